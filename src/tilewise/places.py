"""Where files are kept between runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_home() -> Path:
    """TILEWISE_CACHE_DIR, else a folder in the user's cache directory."""
    base = os.environ.get("TILEWISE_CACHE_DIR")
    if base:
        return Path(base)
    if sys.platform == "darwin":
        home = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        home = Path(os.environ.get("LOCALAPPDATA") or Path.home())
    else:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "tilewise"
