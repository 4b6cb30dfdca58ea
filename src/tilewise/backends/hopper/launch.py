"""From a plan and its tensors to kernel launches. Nothing here reads a value on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ...plan import Plan
from ...tensors import Tensors
from ..triton.device import processors
from ..triton.heuristics import Config as TileConfig
from ..triton.kernel import as_bytes
from ..triton.listing import NO_LISTS, Lister, Listing, Lists
from ..triton.tickets import Tickets
from . import heuristics
from .heuristics import Config
from .kernel import Given, Kernel, Tile, descriptor
from .order import order
from .prefill import prefill
from .repair import repair

REPAIR_COLUMNS = 128  # of the output that are repaired at a time; more would not fit the registers of a warpgroup
ORDER_RUN = 64  # sequences that one program of `order` ranks
# The pointers of the kernels, and where they come from.
POINTERS = {
    "OUT": "out", "LSE": "lse", "KV_LENGTHS": "kv_lengths", "Q_OFFSET": "q_offset", "CU_Q": "cu_seqlens_q",
    "CU_K": "cu_seqlens_k", "SLOPES": "alibi_slopes", "SINKS": "sinks",
}  # fmt: skip
TENSORS = ("q", "k", "v", "mask", *POINTERS.values())


class Bound:
    """All that a plan's calls have in common."""

    def __init__(self, plan: Plan, c: Config, processors: int) -> None:
        p = self.problem = plan.problem
        s = self.spec = heuristics.spec(p, c)
        tiles = p.total_q // s.BM + p.batch + 1 if p.packed_q else p.batch * -(-p.q_len // s.BM)
        self.slots = tiles * p.heads * s.parts  # of packed sequences the most that there can be
        self.programs = min(self.slots, processors) if c.persistent else self.slots
        self.dynamic = c.dynamic and self.programs < self.slots and heuristics.uneven(p)
        self.repairs = min(processors, self.slots * s.consumers)
        self.tickets = Tickets(1)
        self.order, self.prefill, self.repair = Kernel(order), Kernel(prefill), Kernel(repair)
        self.lister = Lister(p, TileConfig(s.BM, s.BN, 4, 1)) if s.mask else None
        self.listings: dict[Any, tuple[Listing | None, tuple[int, int, int, int]]] = {}
        self.repair_spec = replace(s, DV=min(s.DV, REPAIR_COLUMNS), out_columns=s.DV)
        left, right = p.window
        self.sizes: Given = {
            "batch": p.batch,
            "heads": p.heads,
            "group": p.group,
            "q_len": p.q_len,
            "kv_len": p.kv_len,
            "total_q": p.total_q,
            "value_dim": p.value_dim,
            "q_offset": p.q_offset if isinstance(p.q_offset, int) else 0,
            "scale": p.scale,
            "softcap": p.softcap,
            "left": left or 0,
            "right": right or 0,
            "chunk": p.chunk,
            "section": heuristics.section(p, c, processors),
            "slots": self.slots,
            "S": s,
        }

    def __call__(self, t: Tensors) -> None:
        p = self.problem
        key = tuple([None if x is None else (x.stride(), x.data_ptr() & 15) for x in [getattr(t, n) for n in TENSORS]])
        with torch.cuda.device(t.q.device):
            made = self.made(t.q.device)
            lists = NO_LISTS if self.lister is None else self.list_tiles(self.lister, t, key)
            known = key in self.prefill.ready
            given = self.arguments(t, made, lists, known)
            if p.packed_q:
                self.order(-(-(p.batch + 1) // ORDER_RUN), given | {"BM": self.spec.BM, "RUN": ORDER_RUN}, key)
            self.prefill(self.programs, given, key)
            if self.spec.guard:
                self.repair(self.repairs, self.repair_arguments(t, given, known), key)

    def arguments(self, t: Tensors, made: Given, lists: Lists, known: bool = False) -> Given:
        """The arguments of the kernels; the tensors of a `known` call are like those of an earlier one."""
        s = self.spec
        given: Given = {name: getattr(t, source) for name, source in POINTERS.items()} | made
        if known:
            given |= {"q": Tile(t.q), "k": Tile(t.k), "v": Tile(t.v), "o": Tile(t.out)}
        else:
            given |= {
                "q": descriptor(t.q, 64, s.chunk_d, s.dtype),
                "k": descriptor(t.k, s.BN, s.chunk_d, s.dtype),
                "v": descriptor(t.v, s.BN, s.DV, s.dtype),
                "o": descriptor(t.out, 64, s.out_columns, s.dtype),
            }
        LIST, RANK, list_strides = lists
        given |= {"MASK": None if t.mask is None else as_bytes(t.mask), "LIST": LIST, "RANK": RANK}
        lse = (0, 0, 0) if t.lse is None else t.lse.stride()
        mask = (0, 0, 0, 0) if t.mask is None else t.mask.stride()
        given |= dict(zip(("o_b", "o_h", "o_l"), t.out.stride(), strict=False))
        given |= dict(zip(("lse_b", "lse_h", "lse_l"), lse, strict=True))
        given |= dict(zip(("mask_b", "mask_h", "mask_q", "mask_k"), mask, strict=True))
        given |= dict(zip(("list_b", "list_h", "list_q", "list_n"), list_strides, strict=True))
        given["slopes_b"] = 0 if t.alibi_slopes is None else t.alibi_slopes.stride(0)
        return given | self.sizes

    def repair_arguments(self, t: Tensors, given: Given, known: bool = False) -> Given:
        s = self.repair_spec
        v = given["v"] if known else descriptor(t.v, s.BN, s.DV, s.dtype)
        return given | {"v": v, "S": s}

    def made(self, device: torch.device) -> Given:
        """Memory of a call's own."""
        made: Given = dict.fromkeys(("FLAGS", "COUNTER", "ORDER", "START"))
        if self.spec.guard:
            made["FLAGS"] = torch.empty(self.slots * self.spec.consumers, dtype=torch.int32, device=device)
        if self.dynamic:
            made["COUNTER"] = self.tickets.take(device)
        if self.spec.packed:
            for name in ("ORDER", "START"):
                made[name] = torch.empty(self.problem.batch + 2, dtype=torch.int32, device=device)
        return made

    def list_tiles(self, lister: Lister, t: Tensors, key: Any) -> Lists:
        """The tiles that the call's mask leaves."""
        assert t.mask is not None
        listing, strides = self.listings.get(key, (None, (0, 0, 0, 0)))
        if listing is None or t.tile_map is not None:
            lists, listing = lister.first(t)
            self.listings[key] = (listing, lists[2])
            return lists
        found = listing(t.mask.data_ptr(), t.q.device)
        return found, found[listing.rank_at :], strides


_bound: dict[int, tuple[Plan, Bound]] = {}


def bound_to(plan: Plan) -> Bound:
    """The plan's launches, kept by the plan's identity (the planner keeps plans)."""
    kept = _bound.get(id(plan))
    if kept is None or kept[0] is not plan:
        if len(_bound) > 4096:
            _bound.clear()
        device = plan.problem.device
        kept = _bound[id(plan)] = (plan, Bound(plan, heuristics.config(plan.problem), processors(device)))
    return kept[1]


def bind(plan: Plan, t: Tensors) -> Callable[..., None]:
    """The plan's call on other q, k, v, out and lse, which differ from those in `t` in their addresses only."""
    bound = bound_to(plan)
    forms = [(x.shape, x.stride()) for x in (t.q, t.k, t.v, t.out, t.lse) if x is not None]

    def run(*given: torch.Tensor | None) -> None:
        there = [x for x in given if x is not None]
        q, k, v, out, *lse = (x.as_strided(*form) for x, form in zip(there, forms, strict=True))
        # TMA cannot read or write what does not begin at a multiple of 16 bytes.
        q, k, v = (x.clone() if x.data_ptr() & 15 else x for x in (q, k, v))
        written = torch.empty_like(out) if out.data_ptr() & 15 else out
        bound(Tensors(q, k, v, written, lse[0] if lse else None))
        if written is not out:
            out.copy_(written)

    return run
