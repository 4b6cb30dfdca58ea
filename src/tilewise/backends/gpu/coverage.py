"""With which Triton, and on which GPUs, the kernels were seen to work: one table, read by the backends.

A family of kernels is what is compiled, proven and declined together. Its entry for a Triton is one of

- `ran(...)`: the conformance suite passed with it on these GPUs, and there is a record of that;
- `COMPILES`: all its kernels compile with it, for every GPU of docs/platforms.md; on no GPU they ran;
- `FAILS`: they do not compile, or not all of them.

A version that is not listed was never tried: kernels may work with it, if it is not older than all that are. Everything
but `ran` is for `tilewise prove` to decide, on the machine that has it. docs/platforms.md shows this table.
"""

from __future__ import annotations

from ...core.plan import Lacking, Unproven
from ...core.private import number
from . import target as targets
from .target import Target

Known = tuple[str, ...] | None  # the GPUs that kernels ran on; None if they do not compile
COMPILES: Known = ()
FAILS: Known = None
MEASURED_WITH = "3.6"  # the Triton that machines are planned for that are not here


def ran(*gpus: str) -> Known:
    return gpus


HOPPER = {"3.6": ran("sm_90"), "3.7": COMPILES, "3.8": COMPILES, "3.9": COMPILES}
TRITON = {"3.6": ran("sm_90"), "3.7": COMPILES, "3.9": COMPILES}

KERNELS: dict[str, dict[str, dict[str, Known]]] = {
    "hopper": {
        "prefill": HOPPER,
        "latent decode": HOPPER,
        "latent indices": HOPPER,
        "backward": HOPPER,
        "wide backward": HOPPER,
    },
    "triton": {
        "prefill": TRITON,
        "decode": TRITON,
        "pages": TRITON,
        "quantised": TRITON,
        "indices": TRITON,
        "functions": dict.fromkeys(TRITON, COMPILES),
        "backward": TRITON,
    },
}


def refusal(backend: str, family: str) -> str | None:
    """Why the installed Triton cannot have the kernels of a family, if it cannot.

    A machine that calls are only planned for is taken to have one that can.
    """
    if targets.plans_for_another():
        return None
    installed, entries = targets.triton_version(), KERNELS[backend][family]
    if not installed:
        return "Triton is not installed"
    works = [version for version, known in entries.items() if known is not None]
    if (short := _short(installed)) is None or number(short) < number(works[0]):
        return Lacking(f"needs Triton {works[0]} or newer, and {installed} is installed")
    if entries.get(short, ()) is None:
        return Lacking(f"needs Triton {' or '.join(works)}, and {installed} is installed")
    return None


def question(backend: str, family: str, target: Target, taken: bool) -> Unproven | None:
    """What no record says of a family here; None if one says that it is right. `taken`: all the same, with a note."""
    if target.vendor == "interpreter":
        return None
    another = targets.plans_for_another()
    version = MEASURED_WITH if another else _short(targets.triton_version()) or ""
    entries = KERNELS[backend][family]
    known = entries.get(version)
    if known is not None and target.gpu in known:
        return None
    if known is None:
        what = f"not tested with Triton {version}"
    elif any(target.gpu in (gpus or ()) for gpus in entries.values()):
        what = f"compiled with Triton {version}, not yet run on a GPU"
    else:
        what = f"compiled for {target.gpu}, not yet run on hardware"
    return Unproven(what, taken)


def _short(version: str) -> str | None:
    """ "3.7.1+git12" as "3.7"; None if it is no number."""
    words = version.split(".")[:2]
    return ".".join(words) if len(words) == 2 and all(word.isdigit() for word in words) else None
