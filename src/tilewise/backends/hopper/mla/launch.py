"""From a plan and its tensors to the launches of latent decode. Nothing here reads a value on the device."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch

from ....core.plan import ByPlan, Plan
from ....core.tensors import Tensors
from ...gpu.kernel import Arguments, ByAddress, Kernel, Ready, stride_arguments
from ...gpu.target import Target, target_of
from ...gpu.tensor_map import TensorMap
from ..descriptors import block_descriptor
from . import config
from .combine import combine
from .kernel import latent_decode
from .spec import LATENT, ROPE


class Launches(NamedTuple):
    """What a call like an earlier one launches."""

    decode: Ready
    combining: Ready | None
    maps: list[TensorMap]


class Launcher(ByAddress):
    """All that a plan's calls have in common."""

    # What no kernel reads (v is in k, offsets are those of the last positions) has a place here all the same.
    SOURCES: ClassVar = {
        "q": "q", "k": "k", "v": "v", "OUT": "out", "LSE": "lse", "SINKS": "sinks", "LENGTHS": "kv_lengths",
        "q_offset": "q_offset", "TABLE": "block_table",
    }  # fmt: skip

    def __init__(self, plan: Plan, target: Target) -> None:
        super().__init__()
        p = self.problem = plan.problem
        c = self.config = config.config_of(p, target)
        self.spec = config.spec(p, c)
        self.lse_at = c.partial_rows * LATENT  # in the workspace, in numbers of 4 bytes
        self.fragments_at = self.lse_at + c.partial_rows
        self.decode = Kernel(latent_decode)
        self.combining = Kernel(combine, {"ROWS": c.rows, "COLUMNS": c.columns, "AT_ONCE": c.at_once})
        self.sizes: Arguments = {
            "batch": p.batch, "heads": p.heads, "q_len": p.q_len, "kv_len": p.kv_len, "tiles": c.tiles,
            "splits": c.splits, "head_rows": c.head_rows, "factor": p.scale * math.log2(math.e),
        }  # fmt: skip

    def first(self, t: Tensors, key: object) -> None:
        """A call through Triton; with `key`, later ones like it are launched by address."""
        c = self.config
        given = self.arguments(t, self.workspace(t.q.device))
        maps: dict[object, TensorMap] = {}
        decode = self.decode.first((c.splits * c.tiles, 1), given, maps)
        combining = self.combining.first((c.combiners, 1), given) if c.splits > 1 else None
        if key is not None and decode is not None:
            self.ready[key] = Launches(decode, combining, list(maps.values()))

    def relaunch(self, ready: Launches, addresses: list[int], device: torch.device) -> None:
        """A call like an earlier one, with tensors at these addresses."""
        at: Arguments = dict(zip(self.names, addresses, strict=True))
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        workspace = self.workspace(device)  # kept until the kernels have been queued
        partial = workspace.data_ptr()
        at |= {"q_rope": at["q"], "k_rope": at["k"], "CACHE": at["k"], "PARTIAL": partial}
        at |= {"PARTIAL_LSE": partial + 4 * self.lse_at, "FRAGMENTS": partial + 4 * self.fragments_at}
        with self.lock:
            for tensor_map in ready.maps:
                tensor_map.move(at[tensor_map.name])
            ready.decode([at[name] for name in ready.decode.pointers], stream)
            if ready.combining is not None:
                ready.combining([at[name] for name in ready.combining.pointers], stream)

    def workspace(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.fragments_at + self.problem.batch, dtype=torch.float32, device=device)

    def arguments(self, t: Tensors, workspace: torch.Tensor) -> Arguments:
        """The arguments of both kernels."""
        s, cache = self.spec, t.k[:, 0]  # [pages or B, rows, 576]
        if cache.stride(1) != LATENT + ROPE:
            s = replace(s, prefetch=False)  # of rows that lie one behind the other alone
        rows = t.q.transpose(1, 2)  # [B, Lq, H, 576]
        q_block, k_block = [1, s.queries, s.head_rows], [1, s.page_rows]
        given: Arguments = {
            "q": block_descriptor(rows, [*q_block, s.width], s.dtype),
            "q_rope": block_descriptor(rows, [*q_block, ROPE], s.dtype),
            "k": block_descriptor(cache, [*k_block, s.width], s.dtype),
            "k_rope": block_descriptor(cache, [*k_block, ROPE], s.dtype),
            "CACHE": cache, "page_b": cache.stride(0), "page_size": cache.shape[1],
            "OUT": t.out, "LSE": t.lse, "SINKS": t.sinks, "LENGTHS": t.kv_lengths, "TABLE": t.block_table,
            "PARTIAL": workspace, "PARTIAL_LSE": workspace[self.lse_at :],
            "FRAGMENTS": workspace[self.fragments_at :].view(torch.int32), "S": s,
        }  # fmt: skip
        given |= stride_arguments("table", "b", t.block_table)
        return given | self.sizes | stride_arguments("o", "bhl", t.out) | stride_arguments("lse", "bhl", t.lse)


@ByPlan
def launcher_of(plan: Plan) -> Launcher:
    """The plan's launches."""
    return Launcher(plan, target_of(plan.problem.device))
