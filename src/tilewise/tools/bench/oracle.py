"""Errors of outputs against the float64 oracle, on parts that are small enough for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product

import torch

from ..workloads import Inputs

ORACLE_ROWS = 64
ORACLE_HEADS = 8  # heads of a group in one call: the oracle expands keys and values to float64 for each
# Largest error that rounding explains: outputs reach about 4, where one step is 5e-7, 3e-2 and 4e-3.
MOST_ERROR = {torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 6e-3}


def oracle_errors(x: Inputs, outputs: Sequence[torch.Tensor]) -> list[float]:
    """The largest error of each output against float64, on the first and last KV head, some heads and rows of each."""
    if x.q.device.type == "mps":  # it has no float64
        x, outputs = x.on_host(), [output.cpu() for output in outputs]
    group = x.q.shape[1] // (x.k.shape[1] if x.cu_seqlens is not None else x.kv_heads)
    gaps: list[list[torch.Tensor]] = [[] for _ in outputs]
    for piece, view in _dense_pieces(x):
        for kv_head in sorted({0, piece.kv_heads - 1}):
            some = [slice(kv_head * group + b.start, kv_head * group + b.stop) for b in row_blocks(group, ORACLE_HEADS)]
            for heads, rows in product(some, row_blocks(piece.q.shape[2], ORACLE_ROWS)):
                part = piece.part(heads, rows)
                # unrounded, for the output has q's dtype
                want = replace(part, q=part.q.float()).attend(backend="reference")
                for output, errors in zip(outputs, gaps, strict=True):
                    got = view(output)[:, heads, rows].float()
                    errors.append((got - want).abs().max())
    return [torch.stack(errors).max().item() for errors in gaps]  # torch's max keeps NaN, Python's does not


def row_blocks(rows: int, size: int) -> list[slice]:
    """The first, middle and last `size` of `rows`, or all of them if there are fewer."""
    starts = {0, max(0, (rows - size) // 2), max(0, rows - size)}
    return [slice(start, min(rows, start + size)) for start in sorted(starts)]


def _dense_pieces(x: Inputs) -> Iterator[tuple[Inputs, Callable[[torch.Tensor], torch.Tensor]]]:
    """`x` as dense calls, each with a function that views its part `[B, H, Lq, Dv]` of an output.

    Of packed sequences the first, the longest and the last.
    """
    if x.cu_seqlens is None:
        yield x, lambda output: output
        return
    ends = x.cu_seqlens.tolist()
    spans = [(a, b) for a, b in pairwise(ends) if b > a]
    longest = max(spans, key=lambda span: span[1] - span[0])
    for a, b in sorted({spans[0], longest, spans[-1]}):
        yield x.sequence(a, b), lambda output, a=a, b=b: output[a:b].transpose(0, 1)[None]  # type: ignore[misc]
