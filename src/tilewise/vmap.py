"""`torch.vmap` over the operators: where it can be, the mapped dim becomes part of the batch; else one call follows
another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .core.expression.mods import mods_of
from .core.problem import CAPTURED

ROWS = ("kv_lengths", "q_offsets", "k_starts", "k_strides", "q_strides")
BATCHED = ("q", "k", "v", "out", "lse", "dout", "dlse", "moved_out", "moved_lse", *ROWS)
# Their dims without the batch: of smaller rank, or of batch 1, they are shared by all rows.
SHARED = {
    "mask": 3, "tree_mask": 2, "positions": 1, "alibi_slopes": 1, "q_bias": 2, "k_bias": 2, "key_indices": None,
    "block_indices": None,
}  # fmt: skip
ASKED = ("grads", "moved", "tangents")


def batched(operator: Any, names: Sequence[str], info: Any, dims: Any, *args: Any, **options: Any) -> Any:
    """The rule of an operator whose positional arguments have these names."""
    given = dict(zip(names, args, strict=False))
    mapped = dict(zip(names, dims, strict=False))
    found = None
    if names[3:5] != ("cu_seqlens_q", "cu_seqlens_k") and "block_table" not in names:
        found = _as_batch(operator, info.batch_size, given, mapped, options)
    if found is None:
        found = _one_by_one(operator, info.batch_size, args, dims, options)
    results, single = found
    if single:
        return results[0], 0
    listed = "grads" in given or "statistics" in options
    return (list(results), [0] * len(results)) if listed else (tuple(results), (0,) * len(results))


def _one_by_one(operator: Any, count: int, args: Any, dims: Any, options: dict[str, Any]) -> tuple[Any, bool]:
    def own(x: Any, dim: Any, n: int) -> Any:
        if isinstance(x, list):
            return [own(y, d, n) for y, d in zip(x, dim, strict=True)]
        return x if dim is None else x.select(dim, n)

    calls = [operator(*(own(x, dim, n) for x, dim in zip(args, dims, strict=True)), **options) for n in range(count)]
    if isinstance(calls[0], torch.Tensor):
        return [torch.stack(calls)], True
    return [torch.stack(xs) for xs in zip(*calls, strict=True)], False


def _as_batch(
    operator: Any, count: int, given: dict[str, Any], mapped: dict[str, Any], options: dict[str, Any]
) -> tuple[Any, bool] | None:
    """One call over `count` times the batch; None if a tensor without a batch is mapped, or gets gradients."""
    grads, moved = ([x for x in given.get(y, "").split(",") if x] for y in ("grads", "moved"))
    tangents, their_dims = given.get("tangents", []), mapped.get("tangents", [])
    if given.get("cu_seqlens_q") is not None or "statistics" in options or "dentropy" in given:
        return None
    own = {name for name, dim in mapped.items() if name not in ASKED and dim is not None}
    own |= {name for name, dim in zip(moved, their_dims, strict=True) if dim is not None} | set(grads)
    if (
        any(name == "sinks" or name.startswith(CAPTURED) for name in own)
        or _by_row(options)
        or options.get("dropout_p")
    ):
        return None
    q_dim = mapped["q"]
    batch = given["q"].shape[0 if q_dim is None else int(q_dim == 0)]

    def fold(name: str, x: torch.Tensor, dim: int | None) -> torch.Tensor:
        x = x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)
        if name not in BATCHED:
            rank = SHARED[name]
            if rank is not None and x.ndim == rank + 1:
                x = x[:, None]
            elif rank is not None and x.ndim < rank + 1:  # a mask without heads
                x = x[(slice(None), *[None] * (rank + 2 - x.ndim))]
            x = x.expand(count, batch, *x.shape[2:])
        return x.flatten(0, 1)

    def folded(name: str, x: Any, dim: int | None) -> Any:
        whole = name in BATCHED or name in own or (name in SHARED and _has_batch(name, x, batch))
        return fold(name, x, dim) if isinstance(x, torch.Tensor) and whole else x

    arguments = {name: x if name in ASKED else folded(name, x, mapped[name]) for name, x in given.items()}
    if tangents:
        named = zip(moved, tangents, their_dims, strict=True)
        arguments["tangents"] = [folded(name, x, dim) for name, x, dim in named]
    results = operator(*arguments.values(), **options)
    if not grads:
        single = isinstance(results, torch.Tensor)
        return [x.unflatten(0, (count, batch)) for x in ([results] if single else results)], single

    def shape(name: str) -> list[int]:  # of one gradient
        sizes, dim = list(given[name].shape), mapped[name]
        return sizes if dim is None else sizes[:dim] + sizes[dim + 1 :]

    unfolded = []
    for name, x in zip(grads, results, strict=True):
        x, want = x.unflatten(0, (count, batch)), shape(name)
        if x[0].numel() != torch.Size(want).numel():  # the batch shares it
            x = x.sum(1)
        unfolded.append(x.reshape(count, *want))
    return unfolded, False


def _has_batch(name: str, x: Any, batch: int) -> bool:
    """Whether a tensor has a row for each of the batch. One row serves any batch, except of slopes."""
    rank = SHARED[name]
    if not isinstance(x, torch.Tensor) or rank is None:
        return isinstance(x, torch.Tensor)
    return x.ndim > rank and x.shape[0] == batch and (batch > 1 or name == "alibi_slopes")


def _by_row(options: dict[str, Any]) -> bool:
    """Whether functions of the user depend on the batch row."""
    if (text := options.get("mods")) is None:
        return False
    mods = mods_of(text)
    return any(root is not None and "b" in root.inputs for root in (mods.score, mods.mask))
