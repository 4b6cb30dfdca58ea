"""From a plan and its tensors to kernel launches.

The first call of a plan with given strides goes through Triton, which compiles. The compiled kernel is kept, and later
calls with the same strides and aligned pointers hand their addresses straight to it: that is a few microseconds where
the way through Triton is tens. Nothing here reads a value on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch

from ...plan import Plan
from ...tensors import Tensors
from . import heuristics
from .attend import attend
from .classify import classify, compact
from .device import arch_of, processors
from .heuristics import Config
from .kernel import INTERPRETED, Arguments, Kernel, Ready
from .listing import Listing
from .reduce import reduce

REDUCE_BLOCK = 8
CLASSIFY_RUN = 4  # tiles that one program looks at
COMPACT_RUN = 256

# The pointers of `attend`, and where they come from.
POINTERS = {
    "Q": "q", "K": "k", "V": "v", "OUT": "out", "LSE": "lse", "K_SCALES": "k_scales", "V_SCALES": "v_scales",
    "MASK": "mask", "SLOPES": "alibi_slopes", "SINKS": "sinks", "KV_LENGTHS": "kv_lengths", "Q_OFFSET": "q_offset",
    "CU_Q": "cu_seqlens_q", "CU_K": "cu_seqlens_k", "TABLE": "block_table",
}  # fmt: skip


# Attention, repair, merging, and the lists of a mask.
Launches = tuple[Ready, Ready | None, Ready | None, Listing | None]


class Bound:
    """All that a plan's calls have in common."""

    def __init__(self, plan: Plan, c: Config, arch: int) -> None:
        p = self.problem = plan.problem
        self.config = c
        spec = self.spec = heuristics.spec(p, c, arch)
        self.kernel = Kernel(attend, {"S": spec}, num_warps=c.warps, num_stages=c.stages)
        self.repairer = None
        if spec.guard == "flag":
            self.repairer = Kernel(attend, {"S": replace(spec, guard="repair")}, num_warps=c.warps, num_stages=1)
        self.reducer = Kernel(
            reduce,
            {
                "DV": p.value_dim,
                "W": heuristics.ceil_pow2(p.value_dim),
                "BS": REDUCE_BLOCK,
                "PACKED": p.packed_q,
                "HAS_SINKS": p.sinks,
                "HAS_LSE": p.return_lse,
                "PDL": spec.pdl,
            },
            num_warps=4,
            launch_pdl=spec.pdl,
        )
        constants = {"BQ": c.BM, "BK": c.BK, "FLOAT": spec.mask == "float", "RUN": CLASSIFY_RUN}
        self.classifier = Kernel(classify, constants, num_warps=8)
        self.classified = p.tile_map is None and heuristics.classifies(p)
        all_mixed = p.tile_map is None and not self.classified
        self.lister = Kernel(compact, {"ALL": all_mixed, "RUN": COMPACT_RUN}, num_warps=4)
        head_blocks = p.heads // c.pack
        self.grid = (heuristics.query_tiles(p, c) * head_blocks, c.splits)
        rows = p.total_q if p.packed_q else p.batch * p.q_len
        self.rows = rows * p.heads
        # The workspace: m and l of every split of every row, then acc. Both begin at multiples of 16 bytes.
        self.part_at = -(-self.rows * c.splits * 2 // 4) * 4
        self.part_end = self.part_at + self.rows * c.splits * p.value_dim
        left, right = p.window
        self.sizes: Arguments = {
            "batch": p.batch,
            "head_blocks": head_blocks,
            "q_len": p.q_len,
            "kv_len": p.kv_len,
            "total_q": p.total_q,
            "q_offset": p.q_offset if isinstance(p.q_offset, int) else 0,
            "scale": abs(p.scale) if spec.linear else p.scale,
            "softcap": p.softcap,
            "left": left or 0,
            "right": right or 0,
            "chunk": p.chunk,
            "section": heuristics.section(p, c),
            "splits": c.splits,
            "split_tiles": c.split_tiles,
        }
        self.present: Any = None
        self.mask_at = 0  # where the mask's address is among those of a call
        self.ready: dict[Any, Launches] = {}

    def __call__(self, t: Tensors) -> None:
        key = None
        if t.tile_map is None and not INTERPRETED:
            if self.present is None:
                names = [name for name in POINTERS.values() if getattr(t, name) is not None]
                self.present, self.mask_at = attrgetter(*names), names.index("mask") if "mask" in names else 0
            given = self.present(t)
            key = tuple([x.stride() for x in given])
            addresses = [x.data_ptr() for x in given]
            if not _plain(addresses, t.q.device):
                key = None
            elif (ready := self.ready.get(key)) is not None:
                merged = [x.data_ptr() for x in (t.out, t.lse, t.sinks, t.cu_seqlens_q) if x is not None]
                self.again(ready, addresses, merged, t.q.device)
                return
        with torch.cuda.device(t.q.device) if not INTERPRETED else _Nowhere():
            self.first(t, key)

    def first(self, t: Tensors, key: Any) -> None:
        """A call through Triton; with `key`, later ones like it are launched by address."""
        workspace, flags = self.memory(t.q.device)
        lists, listing = self.list_tiles(t) if self.spec.listed else ((None, None, (0, 0, 0, 0)), None)
        part = None if workspace is None else workspace[self.part_at :]
        part_ml = None if workspace is None else workspace[: self.part_at]
        arguments = self.arguments(t, lists, part, part_ml, flags)
        attention = self.kernel.first(self.grid, arguments)
        repairing = None if self.repairer is None else self.repairer.first(self.grid, arguments)
        merging = None
        if self.spec.split:
            merging = self.reducer.first((self.rows, 1), self.merge_arguments(t, part, part_ml))
        if key is not None and attention is not None:
            self.ready[key] = (attention, repairing, merging, listing)

    def again(self, ready: Launches, addresses: list[int], merged: list[int], device: torch.device) -> None:
        """A call like an earlier one. Addresses are in the order of the kernels' arguments."""
        attention, repairing, merging, listing = ready
        workspace, flags = self.memory(device)
        part = part_ml = 0
        if workspace is not None:
            part_ml = workspace.data_ptr()
            part = part_ml + 4 * self.part_at
            addresses += [part, part_ml]
        if flags is not None:
            addresses.append(flags.data_ptr())
        if listing is not None:
            lists = listing(addresses[self.mask_at], device)  # kept until the kernel has been queued
            at = lists.data_ptr()
            addresses += [at, at + 4 * listing.rank_at]
        attention(addresses)
        if repairing is not None:
            repairing(addresses)
        if merging is not None:
            merging([part, part_ml, *merged])

    def memory(self, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The workspace of splits and the flags of programs that met strays."""
        workspace = torch.empty(self.part_end, dtype=torch.float32, device=device) if self.spec.split else None
        if self.repairer is None:
            return workspace, None
        return workspace, torch.empty(self.grid[0] * self.grid[1], dtype=torch.int32, device=device)

    def arguments(self, t: Tensors, lists: Any, part: Any, part_ml: Any, flags: Any) -> Arguments:
        """The arguments of `attend`."""
        LIST, RANK, list_strides = lists
        given: Arguments = {name: _bytes(getattr(t, source)) for name, source in POINTERS.items()}
        given |= {"PART": part, "PART_ML": part_ml, "FLAGS": flags, "LIST": LIST, "RANK": RANK}
        given |= _strides("q", t.q) | _strides("k", t.k) | _strides("v", t.v) | _strides("o", t.out)
        given |= _strides("lse", t.lse) | _strides("ks", t.k_scales) | _strides("vs", t.v_scales)
        mask = (0, 0, 0, 0) if t.mask is None else t.mask.stride()
        given |= dict(zip(("mask_b", "mask_h", "mask_q", "mask_k"), mask, strict=True))
        given |= dict(zip(("list_b", "list_h", "list_q", "list_n"), list_strides, strict=True))
        given["slopes_b"] = 0 if t.alibi_slopes is None else t.alibi_slopes.stride(0)
        given["table_b"] = 0 if t.block_table is None else t.block_table.stride(0)
        return given | self.sizes

    def merge_arguments(self, t: Tensors, part: Any, part_ml: Any) -> Arguments:
        """The arguments of `reduce`."""
        p = self.problem
        given: Arguments = {"PART": part, "PART_ML": part_ml, "OUT": t.out, "LSE": t.lse}
        given |= {"SINKS": t.sinks, "CU_Q": t.cu_seqlens_q}
        given |= _strides("o", t.out) | _strides("lse", t.lse)
        return given | {"q_len": p.q_len, "heads": p.heads, "splits": self.config.splits, "batch": p.batch}

    def list_tiles(self, t: Tensors) -> tuple[Any, Listing | None]:
        """The lists of `classify.py` for the call's mask and how to find a plane's: (LIST, RANK, strides and tiles).

        And what later calls need to make theirs.
        """
        p, c, device = self.problem, self.config, t.q.device
        assert t.mask is not None
        assert p.mask is not None
        n = -(-p.kv_len // c.BK)
        full = (p.batch, p.heads, -(-p.q_len // c.BM))
        B, H, tiles = (1 if free else size for size, free in zip(full, p.mask.broadcast, strict=False))
        states = classifying = None
        if t.tile_map is not None:
            states = t.tile_map.retile((c.BM, c.BK)).states
            B, H, tiles = states.shape[:3]
            states = states.expand(B, H, tiles, n).contiguous()
        elif self.classified:
            states = torch.empty(B * H * tiles * n, dtype=torch.uint8, device=device)
            given: Arguments = {"MASK": _bytes(t.mask), "STATES": states}
            given |= dict(zip(("mask_b", "mask_h", "mask_q", "mask_k"), t.mask.stride(), strict=True))
            given |= {"q_len": p.q_len, "kv_len": p.kv_len, "heads": H, "tiles": tiles, "n": n}
            classifying = self.classifier.first((B * H * tiles, -(-n // CLASSIFY_RUN)), given)
        else:
            B = H = tiles = 1
        rows = B * H * tiles
        LIST = torch.empty(rows * n, dtype=torch.int32, device=device)
        RANK = torch.empty(rows * (n + 1), dtype=torch.int32, device=device)
        given = {"STATES": states, "LIST": LIST, "RANK": RANK, "row": n, "column": 1, "n": n}
        compacting = self.lister.first((rows, 1), given)
        lists = (LIST, RANK, (H * tiles if B > 1 else 0, tiles if H > 1 else 0, int(tiles > 1), n))
        return lists, None if compacting is None else Listing(classifying, compacting, rows, n)


def bind(plan: Plan, t: Tensors) -> Callable[..., None]:
    """The plan's call on other q, k, v, out and lse, which differ from those in `t` in their addresses only."""
    bound, device = bound_to(plan), t.q.device
    forms = [(x.shape, x.stride()) for x in (t.q, t.k, t.v, t.out, t.lse) if x is not None]
    key = tuple([stride for _, stride in forms])

    def run(*given: torch.Tensor | None) -> None:
        there = [x for x in given if x is not None]
        addresses = [x.data_ptr() for x in there]
        ready = bound.ready.get(key)
        if ready is None or not _plain(addresses, device):
            q, k, v, out, *lse = (x.as_strided(*form) for x, form in zip(there, forms, strict=True))
            bound(Tensors(q, k, v, out, lse[0] if lse else None))
        else:
            bound.again(ready, addresses, addresses[3:], device)

    return run


def _plain(addresses: list[int], device: torch.device) -> bool:
    """Whether a kernel that was compiled for aligned tensors can be launched for these on the current device."""
    either = 0
    for address in addresses:
        either |= address
    return either & 15 == 0 and torch._C._cuda_getDevice() == device.index


class _Nowhere:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _strides(name: str, x: torch.Tensor | None) -> Arguments:
    strides = (0, 0, 0) if x is None else x.stride()[:3]
    return {f"{name}_{dim}": stride for dim, stride in zip("bhl", strides, strict=True)}


def _bytes(x: torch.Tensor | None) -> torch.Tensor | None:
    """Triton has no bool in memory, and not every GPU has float8: both are read as bytes."""
    if x is None or x.dtype not in (torch.bool, torch.float8_e4m3fn):
        return x
    return x.view(torch.uint8)


_bound: dict[int, tuple[Plan, Bound]] = {}


def bound_to(plan: Plan) -> Bound:
    """The plan's launches, kept by the plan's identity (the planner keeps plans)."""
    kept = _bound.get(id(plan))
    if kept is None or kept[0] is not plan:
        if len(_bound) > 4096:
            _bound.clear()
        device = plan.problem.device
        arch = 0 if INTERPRETED else arch_of(device)
        c = heuristics.config(plan.problem, processors(device), arch_of(device))
        kept = _bound[id(plan)] = (plan, Bound(plan, c, arch))
    return kept[1]
