"""The cache directory, and whether files in it can be trusted."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path


def cache_home() -> Path:
    """TILEWISE_CACHE_DIR, else a folder in the user's cache directory, else one in the temporary directory."""
    base = os.environ.get("TILEWISE_CACHE_DIR")
    if base:
        return Path(base)
    try:
        if sys.platform == "darwin":
            home = Path.home() / "Library" / "Caches"
        elif sys.platform == "win32":
            home = Path(os.environ.get("LOCALAPPDATA") or Path.home())
        else:
            home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no HOME, and a user without a name, as in containers
        return _temporary() / f"tilewise-{os.getuid()}"
    return home / "tilewise"


def _temporary() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # nothing is writable; the write will say so
        return Path("/tmp")


def others_may_change(status: os.stat_result) -> str | None:
    """Why a file or folder is not to be trusted (its owner, or who else may write to it); None if it is."""
    if not hasattr(os, "getuid"):
        return None
    if status.st_uid not in (os.getuid(), 0):
        return f"belongs to user {status.st_uid}, not to user {os.getuid()}"
    if status.st_mode & 0o022:
        return f"may be written to by others (mode {status.st_mode & 0o777:o})"
    return None
