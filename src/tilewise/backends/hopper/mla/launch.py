"""From a plan and its tensors to the launches of latent decode. Nothing here reads a value on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch

from ....core.plan import ByPlan, Plan
from ....core.private import torch as private
from ....core.tensors import Tensors
from ...gpu.kernel import AddressLauncher, Arguments, CompiledLaunch, Kernel, stride_arguments
from ...gpu.semaphores import Semaphores
from ...gpu.target import Target, target_of
from ...gpu.tensor_map import TensorMap
from ..descriptors import block_descriptor
from . import config
from .combine import combine
from .kernel import latent_decode
from .spec import LATENT, ROPE


class Launches(NamedTuple):
    """The compiled launches that later calls with the same strides repeat."""

    decode: CompiledLaunch
    combining: CompiledLaunch | None
    maps: list[TensorMap]


class Launcher(AddressLauncher):
    """The launches of a plan: what all its calls share."""

    # Tensors that no kernel reads (V is in K, offsets are those of the last positions) are listed too.
    SOURCES: ClassVar = {
        "q": "q", "k": "k", "v": "v", "OUT": "out", "LSE": "lse", "SINKS": "sinks",
        "INDICES": "key_indices", "LENGTHS": "kv_lengths", "q_offset": "q_offset", "TABLE": "block_table",
    }  # fmt: skip

    def __init__(self, plan: Plan, target: Target) -> None:
        super().__init__()
        p = self.problem = plan.problem
        c = self.config = config.config_of(p, target)
        self.spec = config.spec(p, c)
        self.lse_at = c.partial_rows * LATENT  # offset in the workspace, in elements of 4 bytes
        self.fragments_at = self.lse_at + c.partial_rows
        self.decode = Kernel(latent_decode)
        self.counters = Semaphores(c.sequences)
        self.combining = Kernel(combine, {"ROWS": c.rows, "COLUMNS": c.columns, "AT_ONCE": c.at_once})
        self.sizes: Arguments = {
            "batch": c.sequences, "heads": p.heads, "q_len": p.q_len, "kv_len": p.kv_len, "tiles": c.tiles,
            "splits": c.splits, "head_rows": c.head_rows, "factor": config.factor(p), "size": c.size,
            "chosen": p.selection.count if p.selection else 0, "per": p.q_len if p.selection else 1,
        }  # fmt: skip

    def compile_and_launch(self, t: Tensors, key: object) -> None:
        """Launches through Triton; with `key`, later calls with this key are launched by address."""
        c = self.config
        given = self.arguments(t, self.workspace(t.q.device))
        maps: dict[object, TensorMap] = {}
        decode = self.decode.compile_and_launch((c.splits * c.tiles, 1), given, maps)
        combining = None
        if c.cut and not self.spec.inside:
            combining = self.combining.compile_and_launch((c.combiners, 1), given)
        if key is not None and decode is not None:
            self.ready[key] = Launches(decode, combining, list(maps.values()))

    def relaunch(self, ready: Launches, addresses: list[int], device: torch.device) -> None:
        """Launches by address."""
        at: Arguments = dict(zip(self.names, addresses, strict=True))
        stream = private.current_stream(device.index)
        workspace = self.workspace(device)  # kept until the kernels have been queued
        partial = workspace.data_ptr()
        at |= {
            "q_rope": at["q"],
            "k_rope": at["k"],
            "CACHE": at["k"],
            "SCALES": at["k"],
            "out": at["OUT"],
            "PARTIAL": partial,
        }
        at |= {"PARTIAL_LSE": partial + 4 * self.lse_at, "FRAGMENTS": partial + 4 * self.fragments_at}
        if self.spec.inside:
            at["COUNTERS"] = self.counters.take(device).data_ptr()
        with self.lock:
            for tensor_map in ready.maps:
                tensor_map.move(at[tensor_map.name])
            ready.decode([at[name] for name in ready.decode.pointers], stream)
            if ready.combining is not None:
                ready.combining([at[name] for name in ready.combining.pointers], stream)

    def workspace(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.fragments_at + self.config.sequences, dtype=torch.float32, device=device)

    def arguments(self, t: Tensors, workspace: torch.Tensor) -> Arguments:
        """The arguments of both kernels."""
        s, cache = self.spec, t.k[:, 0]  # [pages or B, rows, 576], in float8 656 bytes
        if cache.stride(1) != LATENT + ROPE:
            s = replace(s, prefetch=False)  # needs contiguous rows
        rows = t.q.transpose(1, 2)  # [B, Lq, H, 576]
        q_block, k_block = [1, s.queries, s.head_rows], [1, s.page_rows]
        given: Arguments = {
            "q": block_descriptor(rows, [*q_block, s.width], s.dtype),
            "q_rope": block_descriptor(rows, [*q_block, ROPE], s.dtype),
            "k": None if s.gather else block_descriptor(cache, [*k_block, s.width], s.dtype),
            "k_rope": None if s.gather else block_descriptor(cache, [*k_block, ROPE], s.dtype),
            "CACHE": cache.view(torch.int32) if s.fp8 else cache,
            "SCALES": cache.view(torch.float32) if s.fp8 else None, "page_size": cache.shape[1],
            "INDICES": t.key_indices, "out": block_descriptor(t.out.transpose(1, 2), [*q_block, s.width], s.dtype),
            "OUT": t.out, "LSE": t.lse, "SINKS": t.sinks, "LENGTHS": t.kv_lengths, "TABLE": t.block_table,
            "PARTIAL": workspace, "PARTIAL_LSE": workspace[self.lse_at :],
            "FRAGMENTS": workspace[self.fragments_at :].view(torch.int32), "S": s,
            "COUNTERS": self.counters.take(workspace.device) if s.inside else None,
        }  # fmt: skip
        given |= stride_arguments("table", "b", t.block_table) | stride_arguments(
            "page", "bl", cache, 16 // cache.element_size()
        )
        given |= stride_arguments("i", "bhl", t.key_indices) | self.sizes
        return given | stride_arguments("o", "bhl", t.out) | stride_arguments("lse", "bhl", t.lse)


@ByPlan
def launcher_of(plan: Plan) -> Launcher:
    """The launcher of a plan."""
    return Launcher(plan, target_of(plan.problem.device))
