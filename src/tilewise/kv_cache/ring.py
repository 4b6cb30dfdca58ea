"""Attention over a ring: position p is in slot p modulo the capacity, so a row's tokens may be in two runs of slots.

The upper run starts at the slot of the oldest token, the lower one at slot 0. Within a run, positions and slots differ
by a multiple of the capacity, constant for each row. So causal, windows, ALiBi and chunks that divide the capacity keep
their meaning if the queries' offset is shifted by it; functions of the user are given true positions, as the keys'
`k_start`. Two runs are two calls, merged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..core.options import PLACES, as_chunk, as_window
from ..errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Run:
    """Slots `0` to `lengths[b]` of each row, with the offset of the queries relative to them."""

    lengths: np.ndarray  # int64 [B]
    offsets: np.ndarray  # int64 [B]
    start: np.ndarray  # int64 [B]: the position of slot 0
    hidden: np.ndarray | None = None  # int64 [B]: slots below need a mask: no window hides them


def check_options(capacity: int, options: dict[str, Any]) -> None:
    """Refuses options that a ring cannot take once it has wrapped, also before that, so that no call fails late."""
    chunk = as_chunk(options.get("chunk"))
    if chunk and capacity % chunk:
        raise InvalidArgument("chunk", options["chunk"], f"a divisor of the ring's capacity of {capacity}")
    for name in PLACES:
        if name in options:
            want = "none: a ring's slots have positions of their own"
            raise InvalidArgument(name, options[name], want, "a cache without ring takes it")
    if set(options.get("return_aux") or ()) & {"key_mass", "weights"}:
        remedy = "a cache without ring takes them"
        raise InvalidArgument("return_aux", "weights of a ring's keys", "lse, max_logits and entropy", remedy)
    for name, what in (
        ("mask", "columns"),
        ("tree_mask", "columns"),
        ("k_bias", "columns"),
        ("tile_map", "columns"),
        ("key_indices", "slots"),
        ("block_indices", "slots"),
    ):
        if options.get(name) is not None:
            remedy = "a cache without ring takes them"
            raise InvalidArgument(name, f"{name} over a ring", f"none: its {what} would not be positions", remedy)


def check(first: np.ndarray, q_first: np.ndarray, capacity: int, options: dict[str, Any]) -> None:
    """Refuses a window that reaches back to dropped tokens, for queries from position `q_first[b]` on."""
    window = options.get("window")
    left = as_window(window)[0]
    if left is not None and bool((short := np.maximum(q_first - left, 0) < first).any()):
        b = int(np.argmax(short))
        raise InvalidArgument(
            "window", f"{window!r}, which reaches back to position {max(0, int(q_first[b]) - left)} in row {b}",
            f"one that ends at {int(first[b])} or later, the oldest token that the ring of {capacity} holds",
            "give the ring window + queries - 1 slots, or append and attend in smaller chunks",
        )  # fmt: skip


def runs(first: np.ndarray, length: np.ndarray, q_first: np.ndarray, capacity: int, window: Any) -> list[Run]:
    """The runs of slots that hold positions `first[b]` to `length[b]`."""
    start = first % capacity
    shift = first - start
    end = start + length - first
    below = start if as_window(window)[0] is None and bool(start.any()) else None
    upper = Run(np.minimum(end, capacity), q_first - shift, shift, below)
    if not bool((end > capacity).any()):
        return [upper]
    return [upper, Run(np.maximum(end - capacity, 0), q_first - shift - capacity, shift + capacity)]


def order_does_not_matter(
    first: np.ndarray, length: np.ndarray, capacity: int, q_rows: int, options: dict[str, Any]
) -> bool:
    """Whether every query sees every filled slot, whatever its position, so that one call is enough.

    This holds if rows are full (or start at slot 0) and no rule depends on positions.
    """
    if any(
        options.get(name) is not None for name in ("chunk", "alibi_slopes", "score_mod", "mask_mod", "dropout_seed")
    ):
        return False
    if not bool(((length - first == capacity) | (first % capacity == 0)).all()):
        return False
    if options.get("q_offset") is not None or (options["causal"] and q_rows > 1):
        return False
    left, right = as_window(options.get("window"))
    if right is not None and not options["causal"]:
        return False
    return left is None or (q_rows == 1 and bool((length - 1 - left <= first).all()))


def mask_below(hidden: np.ndarray, slots: int, device: torch.device) -> torch.Tensor:
    """True from slot `hidden[b]` on: `[B, 1, 1, slots]`."""
    starts = torch.from_numpy(hidden).to(device)
    return (torch.arange(slots, device=device) >= starts[:, None])[:, None, None]
