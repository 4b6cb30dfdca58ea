"""Launches the call of a parameter struct, first or repeated: Python passes addresses to the kernel `launch`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.tensors import FIELDS
from . import compiler
from .mods import with_addresses
from .params import CACHE_LINE, LAUNCH_BYTES, WORK_ITEM, Params
from .scheduler import SPARE_ROWS, UNDONE_ITEM, WRONG_TABLES
from .threads import pool

# Takes the tensors of a call in the order of FIELDS: OPERANDS, and REST if the call has any of these.
Launcher = Callable[..., bool]
OPERANDS = ("q", "k", "v", "out", "lse", "k_scales", "v_scales")
REST = tuple(name for name in FIELDS if name not in OPERANDS)
LAUNCH_TABLES = ("kv_lengths", "cu_seqlens_q", "cu_seqlens_k", "block_table")  # as the kernel `launch` takes them
NO_TABLES = [0] * len(LAUNCH_TABLES)
assert FIELDS == OPERANDS + REST


@dataclass
class OwnFields:
    """The fields in which a call's copy of the struct differs, beside what the kernel `launch` is given."""

    tensors: dict[str, int]  # to places in REST
    span_rows: Sequence[int] = ()  # how many spans of a mask's rows it computes
    table: Any = None  # of captured tensors, which follow REST

    def filled(self, params: Params, rest: Sequence[Any]) -> Params:
        """The struct of a call with the tensors `rest`."""
        copy = Params.from_buffer_copy(params)
        for name, i in self.tensors.items():
            setattr(copy, name, rest[i].data_ptr())
        if self.span_rows:
            spans = torch.zeros(self.span_rows, dtype=torch.int64, device="cpu")  # none is computed
            copy.spans, copy.kept_spans = spans.data_ptr(), spans
        if self.table is not None:
            table = with_addresses(self.table, rest[-1])
            copy.captured, copy.kept_table = ctypes.addressof(table), table
        return copy


def launcher(structs: tuple[Params, ...], scratch: int, kept: Any, own: OwnFields | None = None) -> Launcher:
    """A function that launches the call of the first struct on other tensors of the same kind.

    It only passes addresses: the kernel copies the struct, starts the threads and combines partials (cpu 17 in
    benchmarks/cpu/LOG.md). `kept` are objects that must outlive the structs; `own`: each call has a copy of the first.
    """
    params, scratch_of_thread = structs[0], pool.scratch
    launch, address = compiler.entry("launch"), ctypes.addressof(params)
    own_items, items = params.schedule != 0, params.max_items or params.items
    params.threads = threads = min(params.threads, items)
    size = LAUNCH_BYTES + -(-items * params.partial_bytes // CACHE_LINE) * CACHE_LINE + scratch
    if own_items:
        size += items * WORK_ITEM.itemsize + 8 * params.batch + CACHE_LINE
    tables_at, cu_q = [REST.index(name) for name in LAUNCH_TABLES], REST.index("cu_seqlens_q")

    def go(q: Any, k: Any, v: Any, out: Any, lse: Any, k_scales: Any = None, v_scales: Any = None, *more: Any) -> bool:
        tables, copy, at = NO_TABLES, params, address
        if own_items:
            tables = [0 if (x := more[i]) is None else x.data_ptr() for i in tables_at]
        if own is not None:
            copy = own.filled(params, more)
            at = ctypes.addressof(copy)
        while True:
            team = pool.acquire(threads, scratch) if threads > 1 else 0
            try:
                status = launch(
                    at, scratch_of_thread(size), team, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(),
                    0 if lse is None else lse.data_ptr(), 0 if k_scales is None else k_scales.data_ptr(),
                    0 if v_scales is None else v_scales.data_ptr(), *tables,
                )  # fmt: skip
            finally:
                if team:
                    pool.release()
            if not status & UNDONE_ITEM:
                break
            for x in (*structs, copy):  # an infinity, which tiles cannot process: again, by fp32
                x.prefill = compiler.function("prefill")
        if status & WRONG_TABLES:
            return False
        if status & SPARE_ROWS:
            zero_rows(out, lse, int(more[cu_q][-1]), 0)
        return True

    go.kept, go.checks_tables = (structs, kept), own_items  # type: ignore[attr-defined]
    return go


def zero_rows(out: torch.Tensor, lse: torch.Tensor | None, first: int, dim: int) -> None:
    """Writes 0 and -inf to rows from `first` on, which see nothing."""
    out.narrow(dim, first, out.shape[dim] - first).zero_()
    if lse is not None:
        lse.narrow(dim, first, lse.shape[dim] - first).fill_(-torch.inf)
