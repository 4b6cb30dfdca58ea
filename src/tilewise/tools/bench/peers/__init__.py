"""What else on this machine could do a call: one file for each library, found by whether it can be imported.

A file has `missing()`, which says why the library is not here or gives None, and `ways(case, x)`, which gives its ways
to compute the call, each a `Way` with a call or with the reason why not.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import ModuleType

import torch

from ...workloads import Inputs, Workload
from . import cpu_attn, flash_attn, flashinfer, flex, mlx, onnxruntime, sdpa, xformers
from .way import OURS, Refused, Way

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


def find(case: Workload, x: Inputs, names: Sequence[str]) -> Iterator[Way]:
    """Every way of the peers `names` to compute the call, also those that refuse."""
    if case.page_size:  # only ours is held to slots that must not matter
        x = replace(x, k=x.k.nan_to_num(), v=x.v.nan_to_num())
    for name in names:
        try:
            yield from PEERS[name].ways(case, x)
        except Refused as error:
            yield Way(error.way, refusal=str(error))
        except Exception as error:  # one that does not load, or whose set-up fails
            yield Way(name, refusal=f"{type(error).__name__}: {_line(error)}")


def tried(way: Way) -> tuple[torch.Tensor | None, str]:
    """The output of a way, or None and why there is none. A peer may fail in any manner; that is a result."""
    if way.call is None:
        return None, way.refusal
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            return way.call(), ""
        except Exception as error:
            reasons = [_line(w.message) for w in said if "kernel not used because" not in str(w.message)]
            return None, next((r for r in reasons if r), "") or _line(error)


def _line(error: object) -> str:
    """The first line of what went wrong, without the place in the other library's source."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text.partition(" (Triggered internally")[0][:160]


__all__ = ["OURS", "PEERS", "Refused", "Way", "find", "installed", "tried"]
