"""Names that other libraries do not promise to keep: one file for each library, and for Gluon `backends/gpu/gluon.py`.

Nothing else imports them. Each file lists in SEEN what it uses, with the versions that were seen to have it: module
(or object), versions, names. `absent` compares that with what is installed; `tilewise doctor` prints it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, NoReturn

Seen = Mapping[str, Mapping[str, str]]  # module or object: versions, apart by blanks: names, apart by blanks
FILES = {  # private files by library, and what does not work where a name is missing
    "torch": ("tilewise.core.private.torch", "calls of tilewise"),
    "numba": ("tilewise.core.private.numba", "the cpu backend"),
    "triton": ("tilewise.core.private.triton", "the triton and hopper backends"),
    "Gluon": ("tilewise.backends.gpu.gluon", "the hopper backend"),
}


class Missing:
    """Stands where a library lacks a name: whatever uses it fails with a sentence, and nothing else does."""

    def __init__(self, path: str) -> None:
        self._path = path

    def _fail(self) -> NoReturn:
        library = self._path.partition(".")[0]
        raise ImportError(
            f"the installed {library} has no {self._path}; `tilewise doctor` lists the versions that have it"
        )

    def __call__(self, *args: Any, **options: Any) -> NoReturn:
        self._fail()

    def __mro_entries__(self, bases: Any) -> NoReturn:
        self._fail()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # inspection, copies
            raise AttributeError(name)
        self._fail()


def find(path: str) -> Any:
    """The object at a path `module.name.name`, or what stands in for one that is not there."""
    found = _at(path)
    return Missing(path) if found is None else found


def _at(path: str) -> Any:
    place, *names = path.split(".")
    try:
        found: Any = importlib.import_module(place)
        for name in names:
            place = f"{place}.{name}"
            of = getattr(found, name, None)
            found = importlib.import_module(place) if of is None and isinstance(found, ModuleType) else of
    except Exception:  # a library that is half there raises anything
        return None
    return found


def number(version: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" as (2, 13)."""
    return tuple(int(x) for x in version.split("+")[0].split(".")[:2])


def wanted(seen: Seen, version: str) -> Iterator[tuple[str, str]]:
    """What is used with a version, as (path, versions that were seen to have it).

    A version between two that were seen is taken as the older one, and a newer one as the newest.
    """
    known = sorted({number(x) for groups in seen.values() for versions in groups for x in versions.split()})
    nearest = max((x for x in known if x <= number(version)), default=known[0])
    for owner, groups in seen.items():
        for versions, names in groups.items():
            if nearest in map(number, versions.split()):
                yield from ((f"{owner}.{name}", versions) for name in names.split())


def absent(seen: Seen, version: str) -> list[str]:
    """A sentence for each name that is not there."""
    return [
        f"no {path}, which was there in {', '.join(versions.split())}"
        for path, versions in wanted(seen, version)
        if _at(path) is None
    ]
