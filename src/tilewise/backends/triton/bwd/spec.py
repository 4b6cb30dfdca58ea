"""Launch shapes of a backward pass, and what its kernels are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from ...gpu.flags import Flags
from ..spec import Operand


@dataclass(frozen=True)
class Tile:
    """The shape of one launch: BQ queries by BK keys in each step."""

    BQ: int
    BK: int
    warps: int
    stages: int
    reload: bool = False  # tiles are not kept: every product loads what it multiplies, a chunk of columns at a time


@dataclass(frozen=True)
class BackwardConfig:
    """The launches of a backward pass. `apart`: dK and dV are computed by separate launches."""

    keys: Tile  # of dK and dV: a program for each BK keys
    queries: Tile  # of dQ: a program for each BQ queries
    mask: Tile  # of the gradient of a broadcast mask: a program for each BQ x BK of its cells
    apart: bool = False
    distances: Tile | None = None  # of captured tensors by distances: a program for each BK of them; BQ is BK


@dataclass(frozen=True)
class BackwardSpec(Flags):
    """Compile-time parameters of a kernel. Sizes, strides, windows and lengths are run-time arguments."""

    q: Operand  # in the same chunks of columns as K
    k: Operand
    v: Operand
    dout: Operand
    round: str  # q's type, to which weights and gradients of scores are rounded before they are multiplied
    BQ: int
    BK: int
    group: int  # query heads of one KV head
    reload: bool
    few: bool  # so few queries that products over columns are sums, not MMA
    varlen: bool
    mask_group: int  # query heads that share a plane of a mask with several
    listed: bool  # iterate over the list of tiles that a mask leaves, rather than over a range
    partial: bool  # some cells of tiles may not be visible
    tail_q: bool  # the queries may end inside a tile
    guard: str  # what is done about NaN and Inf under hidden cells: "", "flag" or "fixup" (`launch.py`)
    ptx: bool  # the GPU takes inline PTX
    near: bool  # the offsets of a tile's rows in the mask and in lse, from the first, fit int32
    grain: int  # the unit in which strides of q, k, v and dout are passed
    dq: bool  # the gradients that are computed
    dk: bool
    dv: bool
    dmask: str  # "cells": a gradient for each cell, "sums": over the dims that are `summed`, or ""
    summed: tuple[bool, bool, bool, bool]  # broadcast dims of the mask [B, H, Lq, Lk]
    dsinks: bool
    dslopes: bool
    dq_bias: bool
    dk_bias: bool
    dlse: bool
    loads: int  # loads of captured tensors whose gradients are summed: over keys, over queries, or
    diagonal: bool  # over all cells of a distance between query and key

    @property
    def of_scores(self) -> bool:
        """Whether a kernel of keys computes more than dV."""
        return self.dk or self.dk_bias or self.loads > 0
