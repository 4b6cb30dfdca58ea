"""Proofs: what kernels have shown on this machine, kept as files beside the kernel cache. The planner reads them.

`tilewise prove` writes them (`testing/proving.py`). A proof holds for a device with its driver and one version of
torch, the compiler and tilewise: these facts name the file, so that another driver or version finds none. A file ends
with a digest of what it says; one that is damaged, or that others may write to, is not used, with a warning. Files are
written under another name and renamed, so that a reader never sees half of one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..core.atomic_write import write_whole
from ..core.cache_home import cache_home, others_may_change
from ..core.forks import new_lock
from . import activity

FORMAT = 1
SLOWER = 1.1  # times the next backend's time, from which on a family counts as slower: less is noise
MOST_BYTES = 1 << 24
VARIABLE = "TILEWISE_PROVE"
WAIT = 300  # seconds for a proof that another thread or process makes
READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # a pipe is not waited for
COMMAND = "from tilewise.tools.cli import main; sys.exit(main(['prove', '--device', sys.argv[-1]]))"
REMEDY = "`tilewise prove --again` writes a new one"
Facts = Mapping[str, str]

forgetters: list[Callable[[], None]] = []  # empty the caches that depend on proofs
_read: dict[Path, Proof | None] = {}
_asked: set[str] = set()  # digests of the facts that this process has proven by itself
_lock = new_lock(sys.modules[__name__], "_lock")


class Verdict(NamedTuple):
    """What a machine says of a family of kernels."""

    kind: str  # "proven", "failed", "slower", or "open": not all checks are done
    why: str = ""  # of a failed or a slower one


@dataclass
class Proof:
    """The checks that were made on one machine, by backend and family. None is a check that is still to be made."""

    facts: Facts
    families: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    date: str = ""

    def verdict(self, backend: str, family: str) -> Verdict:
        checks = self.families.get(backend, {}).get(family, {})
        for name, found in checks.items():
            if found is not None and found["status"] == "failed":
                return Verdict("failed", f"{name}: {found['detail']}")
        done = [found for found in checks.values() if found is not None]
        if len(done) < len(checks) or not any(found["status"] == "ok" for found in done):
            return Verdict("open")
        for found in done:
            if (times := found.get("times")) and times[backend] > SLOWER * (best := min(times.values())):
                rival = next(name for name, seconds in times.items() if seconds == best)
                return Verdict("slower", f"{times[backend] / best:.3g}x the time of {rival}")
        return Verdict("proven")

    @property
    def is_complete(self) -> bool:
        """Whether no check is left to be made."""
        left = [name for name, of in self.families.items() for family, checks in of.items()
                if None in checks.values() and self.verdict(name, family).kind != "failed"]  # fmt: skip
        return bool(self.families) and not left


def folder() -> Path:
    return cache_home() / "proofs"


def complete(facts: Facts) -> Facts:
    """The facts of a backend with those that all share."""
    from .. import __version__

    return {**facts, "torch": str(torch.__version__), "tilewise": __version__, "sources": sources()}


@cache
def sources() -> str:
    """A digest of everything that a kernel may depend on: an edited checkout is another version."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for source in sorted(path for part in ("backends", "core") for path in (package / part).rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def path_of(facts: Facts) -> Path:
    return folder() / f"{_digest(facts)[:16]}.json"


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def kept(facts: Facts) -> Proof | None:
    """The proof of a machine; read once in a process, until `renew`."""
    found = _known(path_of(facts))
    return found if found is not None and found.facts == facts else None


def _known(path: Path) -> Proof | None:
    if path not in _read:
        _read[path] = read(path)
    return _read[path]


def matter() -> bool:
    """Whether anything was proven, or is to be: if not, nobody asks for drivers and versions."""
    return VARIABLE in os.environ or bool(_read) or folder().is_dir()


def read(path: Path) -> Proof | None:
    """The proof in a file; None if there is none, or if it cannot be used, of which it warns."""
    try:
        found = json.loads(_content(path))
        digest = found.pop("digest")
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']}, expected {FORMAT}")
        if digest != _digest(found):
            raise ValueError("its checksum does not match")
        return Proof(found["facts"], found["families"], found["date"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        why = error.strerror or str(error) if isinstance(error, OSError) else f"it is not a proof ({error})"
        warnings.warn(f"tilewise: {path} is not used: {why}; {REMEDY}", RuntimeWarning, stacklevel=2)
        return None


def _content(path: Path) -> bytes:
    """The bytes of a plain file that nobody else may write to."""
    handle = os.open(path, READ)
    try:
        status = os.fstat(handle)
        reason = others_may_change(status) if stat.S_ISREG(status.st_mode) else "is not a regular file"
        if reason is not None:
            raise PermissionError(errno.EPERM, f"it {reason}")
        with open(handle, "rb", closefd=False) as file:
            return file.read(MOST_BYTES)
    finally:
        os.close(handle)


def write(proof: Proof) -> None:
    """Keeps a proof. It raises an OSError where that cannot be done."""
    path = path_of(proof.facts)
    content = {"format": FORMAT, "date": proof.date, "facts": dict(proof.facts), "families": proof.families}
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(path, json.dumps(content | {"digest": _digest(content)}, indent=1) + "\n", 0o600)


def renew(proof: Proof | None = None) -> None:
    """After a new proof: calls are planned again. `proof`: it holds in this process, wherever it could be kept."""
    _read.clear()
    if proof is not None:
        _read[path_of(proof.facts)] = proof
    for forget in forgetters:
        forget()


def changed(facts: Facts) -> str | None:
    """What is new since the latest proof of the same device, if it has one of another driver or version."""
    older = [_known(path) for path in folder().glob("*.json")] if folder().is_dir() else []
    of_device = [x for x in older if x is not None and x.facts.get("device") == facts["device"] and x.facts != facts]
    if not of_device:
        return None
    then = max(of_device, key=lambda x: x.date).facts
    differ = [name for name in facts if name != "sources" and then.get(name) != facts[name]] or ["sources"]
    words = [f"{name} {facts[name]} (was {then.get(name, 'unknown')})" for name in differ if name != "sources"]
    return ", ".join(words) or "other sources of tilewise"


def prove_now(facts: Facts, device: torch.device) -> None:
    """With TILEWISE_PROVE=auto: proves a device by the command, once in a process. A second thread waits for it."""
    asked, key = os.environ.get("TILEWISE_PROVE"), _digest(facts)
    if not asked or key in _asked:
        return
    if not _lock.acquire(timeout=WAIT):
        return
    try:
        if key not in _asked:
            _asked.add(key)
            if asked == "auto":
                _by_command(facts, device)
            else:
                activity.unknown_value(VARIABLE, asked, "auto")
    finally:
        _lock.release()


def _by_command(facts: Facts, device: torch.device) -> None:
    where = f"{device.type}:{device.index}" if device.index is not None else device.type
    activity.log.warning("%s=auto: checks the kernels on %s first, for up to two minutes", VARIABLE, facts["device"])
    command = python(COMMAND, where)
    try:
        with subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                activity.log.info("prove: %s", line.rstrip())
    except OSError as error:
        activity.log.warning("`tilewise prove` could not be started: %s", error)
    renew()


def python(code: str, *arguments: str) -> list[str]:
    """A command that runs code in another Python with this one's path. `arguments` are the last of its `sys.argv`."""
    start = f"import sys; path = sys.argv[1:-{len(arguments)} or None]; sys.path[:] = path; {code}"
    return [sys.executable, "-c", start, *sys.path, *arguments]


def environment() -> dict[str, str]:
    """For processes of a proof: they start no further proofs."""
    return {name: value for name, value in os.environ.items() if name != VARIABLE}
