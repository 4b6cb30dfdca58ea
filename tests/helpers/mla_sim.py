"""Calls of latent decode run by `gluon_sim`: the kernel's own text over NumPy, then its fragments combined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import gluon_sim
from gluon_sim import Descriptor, Machine, Shared
from gluon_values import Pointer, Tensor, raw
from hopper_sim import flat
from tilewise.backends.gpu.kernel import stride_arguments
from tilewise.backends.gpu.target import nvidia
from tilewise.backends.hopper.mla.launch import Launcher
from tilewise.validation.calls import Call

FILES = (
    "arguments", "tile_scheduler", "pipeline", "epilogue", "producer", "gather", "scores", "softmax", "narrow",
    "inside", "consumer", "kernel",
)  # fmt: skip
PLACES = {"signature": "backends.hopper"} | dict.fromkeys(FILES, "backends.hopper.mla")


class Tiles(Shared):
    """Shared memory as products read it: a tile [rows, C] is C / 64 pieces [rows, 64], one after the other."""

    def __init__(self, pieces: np.ndarray, shape: Sequence[int]) -> None:
        self.pieces, self.shape, self.layout, self.dtype = pieces, tuple(shape), None, pieces.dtype

    @property
    def a(self) -> np.ndarray:  # type: ignore[override]
        return np.concatenate(list(self.pieces), 1).reshape(self.shape)

    def index(self, i: Any) -> Tiles:
        i, count = int(raw(i)), self.shape[0]
        assert 0 <= i < count
        if count > len(self.pieces):  # pages of fewer rows than a piece
            rows = self.pieces.shape[1] // count
            return Tiles(self.pieces[:, i * rows : (i + 1) * rows], self.shape[1:])
        each = len(self.pieces) // count
        return Tiles(self.pieces[i * each : (i + 1) * each], self.shape[1:])

    def permute(self, dims: Sequence[int]) -> Any:
        return Turned(self)

    def reinterpret(self, dtype: Any, shape: Sequence[int], layout: Any) -> Tiles:
        return Tiles(self.pieces, shape)

    def load(self, layout: Any) -> Tensor:
        return Tensor(self.a)

    def store(self, x: Any) -> None:
        columns = raw(x).reshape(self.pieces.shape[1], -1)
        for piece, part in zip(self.pieces, np.split(columns, len(self.pieces), 1), strict=True):
            piece[...] = part


class Turned(Shared):
    """A tile with its dims the other way round; read when a product is."""

    def __init__(self, tile: Tiles) -> None:
        self.tile = tile

    @property
    def a(self) -> np.ndarray:  # type: ignore[override]
        return self.tile.a.T


class Rows(Descriptor):
    """A tensor as TMA sees it."""

    def read(self, at: Sequence[Any], to: Any) -> None:
        outside, inside = self._span(at)
        block = np.zeros(self.block_type.shape, self.array.dtype)
        block[inside] = self.array[outside]
        to.store(block)


def allocate(dtype: Any, shape: Sequence[int], layout: Any) -> Any:
    if layout == "mbarrier" or len(shape) < 3 or shape[-1] < 64:  # barriers, lines of numbers, what is turned
        return gluon_sim._allocate(dtype, shape, layout)
    rows = shape[-2]
    return Tiles(np.full((int(np.prod(shape)) // (64 * rows), rows, 64), np.nan, dtype), shape)


class Words:
    """Tiles [64, 64] of 16 bits that are written in words of two."""

    def __init__(self, tiles: Tiles) -> None:
        self.tiles = tiles

    def index(self, i: Any) -> Words:
        i = int(raw(i))
        return Words(Tiles(self.tiles.pieces[i : i + 1], (64, 64)))

    def store(self, x: Any) -> None:
        numbers = raw(x)
        if numbers.dtype == np.int32:  # bfloat16, which stands for itself on the device
            numbers = (numbers.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float16)
        self.tiles.store(Tensor(numbers))


def widened(words: Tensor, dtype: Any) -> Tensor:
    numbers = torch.from_numpy(raw(words).view(np.uint8)).view(torch.float8_e4m3fn)
    return Tensor(numbers.to(torch.float16).numpy())


def load(changes: dict[str, list[tuple[str, str]]] | None = None) -> Any:
    changes = changes or {}
    counter = ("    u = 0\n", "    u = gl.zeros([], gl.int32)\n")  # a plain number is none to convert
    made = gluon_sim.load(changes | {"consumer": [counter, *changes.get("consumer", ())]}, PLACES, allocate)
    made.gather.__dict__.update(in_words=lambda tiles, n: Words(tiles), widened=widened)
    return made


def run(call: Call, kernels: Any, seed: int = 0, processors: int = 5, **ways: Any) -> None:
    """Writes `out` and `lse` of a call; `ways` are fields of the kernel's `Spec`."""
    p, t = call.problem, call.tensors
    bound = Launcher(p, nvidia(90, processors))
    c, s = bound.config, replace(bound.spec, prefetch=False, **ways)  # a prefetch changes no result
    rows, stored = t.q.transpose(1, 2).numpy(), t.k[:, 0]
    cache = stored.numpy()
    partial = np.full((max(c.partial_rows, 1), 512), np.nan, np.float32)
    partial_lse = np.full(max(c.partial_rows, 1), np.nan, np.float32)
    fragments, counters = np.full(c.sequences, -1, np.int32), np.zeros(c.sequences, np.int32)
    given: dict[str, Any] = bound.sizes | {
        "factor": p.scale * np.log2(np.e),  # sums are not cut off here
        "q": Rows(rows, (1, s.queries, s.head_rows, s.width)), "q_rope": Rows(rows, (1, s.queries, s.head_rows, 64)),
        "k": Rows(cache, (1, s.page_rows, s.width)), "k_rope": Rows(cache, (1, s.page_rows, 64)),
        "out": Rows(t.out.transpose(1, 2).numpy(), (1, s.queries, s.head_rows, s.width)),
        "CACHE": flat(stored.view(torch.int32) if s.fp8 else stored), "INDICES": flat(t.key_indices),
        "SCALES": flat(stored.view(torch.float32)) if s.fp8 else None,
        "LSE": flat(t.lse), "PARTIAL": Pointer(partial.reshape(-1)), "COUNTERS": Pointer(counters),
        "PARTIAL_LSE": Pointer(partial_lse), "FRAGMENTS": Pointer(fragments), "LENGTHS": flat(t.kv_lengths),
        "TABLE": flat(t.block_table), "SINKS": flat(t.sinks), "page_size": cache.shape[1], "S": s,
    }  # fmt: skip
    given |= stride_arguments("table", "b", t.block_table)
    given |= stride_arguments("page", "bl", stored, 16 // stored.element_size())
    given |= stride_arguments("i", "bhl", t.key_indices) | stride_arguments("lse", "bhl", t.lse)
    gluon_sim.MACHINE = Machine(c.splits * c.tiles, seed)
    names = kernels.arguments.Arguments.NAMES
    gluon_sim.MACHINE.run(lambda: kernels.kernel.latent_decode(*(given[name] for name in names)))
    assert not counters.any(), "they are zero for the next call"
    for seq, entry in enumerate(fragments.tolist()):
        count, first = entry >> 16, entry & 65535
        if count > 1:
            at = [first, *((first // 2 + f) * 2 for f in range(1, count))]
            combine(
                call, seq, *(torch.from_numpy(x).unflatten(0, (-1, c.tiles, 64))[at] for x in (partial, partial_lse)), c
            )


def combine(call: Call, seq: int, x: torch.Tensor, lse: torch.Tensor, c: Any) -> None:
    """Outputs [n, tiles, 64, 512] of a sequence's fragments and their lse, of base 2, to its rows."""
    p, t = call.problem, call.tensors
    top = torch.logsumexp(lse.double() * np.log(2), 0)  # [tiles, 64]
    share = torch.where(lse == -torch.inf, 0.0, torch.exp(lse.double() * np.log(2) - top))
    out = torch.where(share[..., None] == 0, 0.0, share[..., None] * x).sum(0)
    across, queries = -(-p.heads // c.head_rows), 64 // c.head_rows
    b, first = (seq, 0) if p.selection is None else divmod(seq, p.q_len)
    for h in range(p.heads):
        for l in range(p.q_len if p.selection is None else 1):
            at = l // queries * across + h // c.head_rows, l % queries * c.head_rows + h % c.head_rows
            own = top[at]
            if t.sinks is not None:
                own = torch.logaddexp(own, t.sinks[h].double())
            t.out[b, h, first + l] = out[at] * torch.exp(top[at] - own) if own > -torch.inf else 0.0
            if t.lse is not None:
                t.lse[b, h, first + l] = own
