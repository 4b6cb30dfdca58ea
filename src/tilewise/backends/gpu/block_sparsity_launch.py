"""Block sparsity: launches that list the key tiles which a dense mask or block indices leave (`block_sparsity.py`)."""

from __future__ import annotations

from typing import Any

import torch

from ...core.private import torch as private
from ...core.problem import Problem
from ...core.storage import as_bytes
from ...core.tensors import Tensors
from ...core.tile_map import TileMap
from .block_sparsity import classify, compact, list_blocks
from .flags import DTYPE_NAMES, ceil_pow2, classifies
from .kernel import Arguments, Kernel, stride_arguments
from .launch_program import Recorder
from .semaphores import capturing

COMPACT_RUN = 256
BLOCK_RUN, BLOCK_CHUNK = 64, 64  # tiles and indices that a program of `list_blocks` compares in a step
# Tiles of a mask that a program of `classify` reads in a step, and their bytes at most: enough loads in flight to keep
# memory busy (h200/masks #1).
CLASSIFY_TILES = 16
CLASSIFY_STEP = 1 << 17
CLASSIFY_WARPS = 16
# LIST, RANK, and their strides: batch, head, row of tiles; and the number of tiles of a row.
Lists = tuple[torch.Tensor | None, torch.Tensor | None, tuple[int, int, int, int]]
NO_LISTS: Lists = (None, None, (0, 0, 0, 0))


class Lister:
    """Makes the lists of a problem's masks, in tiles of BM queries and BK keys.

    `measured`: the GPU is one on which steps of `classify` were timed; Ampere's registers hold half a step.
    """

    def __init__(self, problem: Problem, BM: int, BK: int, measured: bool = True) -> None:
        self.problem, self.BM, self.BK = problem, BM, BK
        self.step = CLASSIFY_STEP if measured else CLASSIFY_STEP // 2
        self.classified = problem.tile_map is None and classifies(problem)
        all_mixed = problem.tile_map is None and not self.classified
        self.compact = Kernel(compact, {"ALL": all_mixed, "RUN": COMPACT_RUN}, num_warps=4)
        self.kept: tuple[Any, ...] = ()

    def states(self, tile_map: TileMap) -> torch.Tensor:
        """A tile map in this launch's tiles. The last one is cached: a map is made once and used by many calls.

        Not during graph capture, whose memory belongs to the graph, nor across streams.
        """
        source = tile_map.states
        if not source.is_cuda or capturing():
            return self.retiled(tile_map)
        stream = private.current_stream(source.device.index)
        if not self.kept or self.kept[0] is not source or self.kept[1:3] != (private.version_of(source), stream):
            self.kept = (source, private.version_of(source), stream, self.retiled(tile_map))
        made: torch.Tensor = self.kept[3]
        return made

    def retiled(self, tile_map: TileMap) -> torch.Tensor:
        states = tile_map.retile((self.BM, self.BK)).states
        return states.expand(*states.shape[:3], -(-self.problem.kv_len // self.BK)).contiguous()

    def launch(self, r: Recorder, t: Tensors, states: torch.Tensor | None = None) -> Lists:
        """The lists of a call's mask; `states` are those of its tile map in this launch's tiles."""
        p = self.problem
        assert t.mask is not None
        assert p.mask is not None
        n = -(-p.kv_len // self.BK)
        full = (p.batch, p.heads, -(-p.q_len // self.BM))
        B, H, tiles = (1 if free else size for size, free in zip(full, p.mask.broadcast, strict=False))
        if states is not None:
            B, H, tiles = states.shape[:3]
        elif not self.classified:
            B = H = tiles = 1
        rows = B * H * tiles
        LIST, RANK = r.empty(rows * n, dtype=torch.int32), r.empty(rows * (n + 1), dtype=torch.int32)
        if self.classified:
            kernel, given = self.classifier(t.mask)
            given |= {"heads": H, "tiles": tiles}
        else:
            kernel, given = self.compact, {"STATES": states}
        r.launch(kernel, (rows, 1), given | {"LIST": LIST, "RANK": RANK, "n": n})
        return LIST, RANK, (H * tiles if B > 1 else 0, tiles if H > 1 else 0, int(tiles > 1), n)

    def classifier(self, mask: torch.Tensor) -> tuple[Kernel, Arguments]:
        """`classify` for a mask, by 32-bit words where rows consist of whole words; and its arguments from the mask."""
        p = self.problem
        each = 4 // mask.element_size()
        *strides, last = mask.stride()
        if last == 1 and not (mask.data_ptr() % 4 or p.kv_len % each or any(stride % each for stride in strides)):
            kind, source = "bool" if mask.dtype == torch.bool else DTYPE_NAMES[mask.dtype], mask.view(torch.int32)
        else:
            kind, source, each = "flags" if mask.dtype == torch.bool else "cells", as_bytes(mask), 1
        given: Arguments = {"MASK": source, "q_len": p.q_len, "kv_len": p.kv_len}
        given |= stride_arguments("mask", "bhqk", source)
        run = max(1, min(CLASSIFY_TILES, self.step // (self.BM * self.BK * mask.element_size())))
        constants = {"BQ": self.BM, "BK": self.BK, "KIND": kind, "EACH": each, "RUN": run}
        return Kernel(classify, constants, num_warps=CLASSIFY_WARPS), given


class BlockLister:
    """Makes the lists of a problem's block indices, in tiles of BM queries and BK keys that divide blocks."""

    def __init__(self, problem: Problem, BM: int, BK: int) -> None:
        self.problem = p = problem
        assert p.selection is not None
        block = p.selection.block
        self.heads = p.heads if p.selection.by_head else 1
        self.tiles, self.n = -(-p.q_len // BM), -(-p.kv_len // BK)
        chunk = max(16, min(BLOCK_CHUNK, ceil_pow2(p.selection.count)))
        constants = {"QUERIES": block // BM, "KEYS": block // BK, "RUN": BLOCK_RUN, "CHUNK": chunk}
        self.kernel = Kernel(list_blocks, constants, num_warps=4)

    def launch(self, r: Recorder, t: Tensors) -> Lists:
        """The lists of a call's indices."""
        H, tiles, n = self.heads, self.tiles, self.n
        rows = self.problem.batch * H * tiles
        LIST, RANK = r.empty(rows * n, dtype=torch.int32), r.empty(rows * (n + 1), dtype=torch.int32)
        r.launch(self.kernel, (rows, 1), self.arguments(t) | {"LIST": LIST, "RANK": RANK})
        return LIST, RANK, (H * tiles, tiles if H > 1 else 0, 1, n)

    def arguments(self, t: Tensors) -> Arguments:
        """The arguments of `list_blocks`, except its outputs."""
        p = self.problem
        assert p.selection is not None
        given: Arguments = {"INDICES": t.key_indices, "heads": self.heads, "group": p.group, "tiles": self.tiles}
        return given | {"n": self.n, "count": p.selection.count} | stride_arguments("indices", "bhl", t.key_indices)
