"""`tilewise prove`: a machine checks its own kernels; what it found as lines, and as a block for an issue."""

from __future__ import annotations

import sys

from ..core.atomic_write import check_target
from ..dispatch import proofs
from ..dispatch.proofs import Proof, Verdict
from ..errors import InvalidArgument
from ..testing import proving
from .progress import Screen

INTERRUPTED = 130  # a shell's exit status after Ctrl-C
STEPS = 1000  # of the progress bar, whose checks are counted once they are known
FACTS = ("device", "gpu", "cpu", "driver", "triton", "numba", "llvmlite", "torch", "tilewise", "sources")


def prove(device: str | None, again: bool, minutes: float | None, report: bool) -> int:
    """Proves a device and prints the result; 1 if a family of kernels failed."""
    _warn_of_folder()
    seconds = proving.SECONDS if minutes is None else 60 * minutes
    try:
        with Screen(STEPS, sys.stderr) as screen:
            found = proving.prove(device, again=again, seconds=seconds, show=_shower(screen))
    except KeyboardInterrupt:
        print("Interrupted. Finished checks are kept; `tilewise prove` continues from there.", file=sys.stderr)
        return INTERRUPTED
    print("\n".join(block(found) if report else lines(found)))
    if not found.is_complete:
        print("Some checks are left: run `tilewise prove` again to do them.", file=sys.stderr)
    return int(any(kind == "failed" for _, _, (kind, _) in verdicts(found)))


def _warn_of_folder() -> None:
    try:
        proofs.folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        check_target("TILEWISE_CACHE_DIR", proofs.folder() / "proof")
    except (OSError, InvalidArgument) as error:
        print(f"The result could not be saved, so it has no effect on calls: {error}", file=sys.stderr)


def _shower(screen: Screen) -> proving.Show:
    shown = 0

    def show(done: int, every: int, what: str) -> None:
        nonlocal shown
        for _ in range(STEPS * done // every - shown):
            screen.step(what.partition(",")[0])
        shown = max(shown, STEPS * done // every)
        if ": ok " not in what and ": unsupported " not in what:
            screen.print(what)

    return show


def verdicts(proof: Proof) -> list[tuple[str, str, Verdict]]:
    """Each family with its backend."""
    return [(name, family, proof.verdict(name, family)) for name, of in proof.families.items() for family in of]


def lines(proof: Proof) -> list[str]:
    """The result as text: a line for each family."""
    text = [f"{proof.facts['device']}, {proof.date}"]
    for name, family, verdict in verdicts(proof):
        done, every, seconds = _count(proof, name, family)
        words = f"  {name:8} {family:15} {verdict.kind:8} {done:3} of {every:3} checks, {seconds:.0f} s"
        text.append(", ".join(x for x in (words, _times(proof, name, family), verdict.why) if x))
    path = proofs.path_of(proof.facts)
    return [*text, f"kept in {path}"] if path.exists() else text


def block(proof: Proof) -> list[str]:
    """The result as Markdown, for an issue."""
    facts = [f"{name}: {proof.facts[name]}" for name in FACTS if name in proof.facts]
    text = [f"### `tilewise prove`, {proof.date}", "", *(f"- {fact}" for fact in facts), ""]
    text += ["| backend | family | result | checks | times |", "|---|---|---|---|---|"]
    for name, family, verdict in verdicts(proof):
        done, every, _ = _count(proof, name, family)
        text.append(f"| {name} | {family} | {verdict.kind} | {done} of {every} | {_times(proof, name, family)} |")
    failed = [(name, family, why) for name, family, (kind, why) in verdicts(proof) if kind == "failed"]
    return [*text, *([""] if failed else []), *(f"- {name} {family}: `{why}`" for name, family, why in failed)]


def _count(proof: Proof, name: str, family: str) -> tuple[int, int, float]:
    """Checks that are done, all of them, and the seconds that they took."""
    checks = proof.families[name][family].values()
    done = [found for found in checks if found is not None]
    return len(done), len(checks), sum(found["seconds"] for found in done)


def _times(proof: Proof, name: str, family: str) -> str:
    found = [x["times"] for x in proof.families[name][family].values() if x is not None and "times" in x]
    return ", ".join(f"{backend} {1e6 * seconds:.0f} us" for times in found for backend, seconds in times.items())
