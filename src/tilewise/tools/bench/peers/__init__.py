"""Peers: other libraries that could compute a call on this machine, a file for each.

A file has `missing()`, why the library cannot be used or None, and `candidates(case, x)`, which yields a `Candidate`
for each of its kernels: a call, or the reason why there is none.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import ModuleType

import torch

from ...workloads import Inputs, Workload
from . import cpu_attn, flash_attn, flashinfer, flex, mlx, onnxruntime, sdpa, xformers
from .candidate import OURS, Candidate, Refused

PEERS: dict[str, ModuleType] = {
    "sdpa": sdpa,
    "flex": flex,
    "flash-attn": flash_attn,
    "flashinfer": flashinfer,
    "xformers": xformers,
    "onnxruntime": onnxruntime,
    "mlx": mlx,
    "cpu-attn": cpu_attn,
}


def installed() -> dict[str, str | None]:
    """Each library and why it cannot be used, or None."""
    return {name: module.missing() for name, module in PEERS.items()}


def find(case: Workload, x: Inputs, names: Sequence[str]) -> Iterator[Candidate]:
    """Every candidate of the peers `names`, including those that refuse it."""
    if case.page_size:  # the peers' kernels may read slack, which holds NaN
        x = replace(x, k=x.k.nan_to_num(), v=x.v.nan_to_num())
    for name in names:
        try:
            yield from PEERS[name].candidates(case, x)
        except Refused as error:
            yield Candidate(error.name, refusal=str(error))
        except Exception as error:  # it does not load, or its set-up fails
            yield Candidate(name, refusal=f"{type(error).__name__}: {_line(error)}")


def tried(candidate: Candidate) -> tuple[torch.Tensor | None, str]:
    """The output of a candidate, or None and why there is none. A failure of a peer, of any kind, is a result."""
    if candidate.call is None:
        return None, candidate.refusal
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return candidate.call(), ""
        except Exception as error:
            reasons = [_line(w.message) for w in caught if "kernel not used because" not in str(w.message)]
            return None, next((r for r in reasons if r), "") or _line(error)


def _line(error: object) -> str:
    """The first line of an error, without its location in the other library's source."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text.partition(" (Triggered internally")[0][:160]


__all__ = ["OURS", "PEERS", "Candidate", "Refused", "find", "installed", "tried"]
