"""A machine proves its kernels: each check runs in another process, and what it finds is kept as a proof at once.

A check that fails, crashes its process or never ends fails its family, whose other checks are left out. Memory that is
full, a process that somebody ends, and time that is over say nothing: those checks are made the next time.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import torch

from ..core.file_lock import release, wait_for_lock
from ..dispatch import planner, proofs
from ..dispatch.proofs import Proof
from ..errors import InvalidArgument
from . import families
from .families import Check
from .processes import Pool

SECONDS = 110.0  # of a proof in all: what is left then is for the next one
# Seconds in which a GPU's kernels must compile, and a check must then end; a CPU's do not hang.
LIMITS = {"cuda": (90.0, 60.0), "mps": (90.0, 60.0), "cpu": (float("inf"), float("inf"))}
WRITES = 10.0  # seconds that a process may take longer than it was given
MOST_PROCESSES = 8
MEMORY = 3 << 30  # bytes of a GPU for each of them: its context, the largest case and the scores of the oracle
CHILD = "from tilewise.testing.prove_child import main; main()"
OWN_SIGNALS = (-1, -2, -9, -15)  # a process that somebody ended, or the system for lack of memory
STDERR_TAIL = 300  # characters of what a process said before it crashed

Show = Callable[[int, int, str], None]  # checks done, checks in all, and what was done


def prove(
    device: str | torch.device | None = None,
    *,
    again: bool = False,
    seconds: float = SECONDS,
    of_family: int = families.OF_FAMILY,
    show: Show = lambda done, every, what: None,
    command: Sequence[str] | None = None,
) -> Proof:
    """Proves the kernels of a device, going on where an earlier proof stopped, and keeps what it finds for the planner.

    Args:
        device: by default the GPU, or the CPU if there is none.
        again: forget the earlier proof.
        seconds: what it may take in all. `Proof.is_complete` says whether it was enough.
        of_family: how many conformance cases each family of kernels has to pass, beside larger ones.
        show: called after each check.
        command: of the processes that make the checks.

    Raises:
        InvalidArgument: no backend has kernels on the device that can be proven.
    """
    end = time.monotonic() + seconds
    where = _device(device)
    facts = {name: found for name in planner.BACKENDS if (found := planner.proof_facts(name, where)) is not None}
    if not facts:
        raise InvalidArgument("device", str(where), "one with kernels that can be proven: a GPU, or a CPU with Numba")
    own = next(iter(facts.values()))
    backends = [name for name, of in facts.items() if of == own]
    with _alone(own, max(0.0, seconds), lambda: show(0, 1, "another process checks this machine: waiting")) as alone:
        proofs.renew()
        proof = (None if again and alone else proofs.kept(own)) or Proof(own)
        if not alone:
            return proof
        checks = families.checks_of(str(where), backends, of_family)
        if not checks:
            raise InvalidArgument(
                "device", str(where), "one with kernels that run here: `tilewise doctor` says what lacks"
            )
        _add(proof, checks)
        try:
            _keep(proof)
            _make(proof, checks, str(where), end, show, command or proofs.python(CHILD, str(where)))
        finally:
            proofs.renew(proof)
    return proof


def _device(device: str | torch.device | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")


@contextmanager
def _alone(facts: proofs.Facts, seconds: float, waits: Callable[[], None]) -> Iterator[bool]:
    """Waits for another process that proves the same machine, and keeps others waiting; False if it still does."""
    handle, alone = None, True
    with suppress(OSError):
        path = proofs.path_of(facts).with_suffix(".lock")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    if handle is not None and not (alone := wait_for_lock(handle, 0.0)):
        waits()
        alone = wait_for_lock(handle, seconds + WRITES)
    try:
        yield alone
    finally:
        if handle is not None:
            release(handle)


def _add(proof: Proof, checks: Sequence[Check]) -> None:
    """Adds what is to be checked. Of an earlier proof the results stay, if the check is still one."""
    planned: dict[str, dict[str, dict[str, Any]]] = {}
    for check in checks:
        done = proof.families.get(check.backend, {}).get(check.family, {}).get(str(check))
        planned.setdefault(check.backend, {}).setdefault(check.family, {})[str(check)] = done
    proof.families = planned
    proof.date = datetime.now(timezone.utc).strftime("%Y-%m-%d")


def _make(proof: Proof, checks: Sequence[Check], device: str, end: float, show: Show, command: Sequence[str]) -> None:
    """Makes the checks that are left: on a GPU those of results by several processes, since they mostly compile, then
    times, one after the other; elsewhere family by family.
    """
    kind = torch.device(device).type
    of_results = [check for check in checks if check.kind != "time"]
    timed = [check for check in checks if check.kind == "time"]
    if kind == "cuda":
        fit = int(torch.cuda.mem_get_info(device)[0] // MEMORY)
        phases = [(of_results, max(1, min(MOST_PROCESSES, os.cpu_count() or 1, fit))), (timed, 1)]
    else:
        order = list(dict.fromkeys((check.backend, check.family) for check in checks))
        phases = [(sorted(checks, key=lambda check: order.index((check.backend, check.family))), 1)]
    done = sum(_result(proof, check) is not None for check in checks)
    for some, size in phases:
        wrong = _failed(proof)  # so that times are compared with those of right kernels
        left = deque(replace(check, apart=wrong) for check in some if _is_left(proof, check))
        pool = Pool(command, size, LIMITS[kind])
        for check, found, times in pool.run(left, end, lambda check: _is_left(proof, check)):
            if found["status"] != "open":
                proof.families[check.backend][check.family][str(check)] = found | ({"times": times} if times else {})
                _keep(proof)
                done += 1
            words = f"{check.backend} {check.family}, {check}: {found['status']} {found['detail']}"
            show(done, len(checks), words.rstrip())


def _keep(proof: Proof) -> None:
    with suppress(OSError):  # a folder that cannot be written: the proof is for this process alone
        proofs.write(proof)


def _result(proof: Proof, check: Check) -> Any:
    return proof.families[check.backend][check.family][str(check)]


def _failed(proof: Proof) -> tuple[tuple[str, str], ...]:
    names = [(backend, family) for backend, of in proof.families.items() for family in of]
    return tuple(name for name in names if proof.verdict(*name).kind == "failed")


def _is_left(proof: Proof, check: Check) -> bool:
    """Whether a check is to be made: not if it was, nor if its family has failed."""
    return _result(proof, check) is None and proof.verdict(check.backend, check.family).kind != "failed"
