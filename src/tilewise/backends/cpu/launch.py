"""Makes the parameter struct of a call from its plan and tensors, and runs the kernel `launch` on it.

All calls go the same way: `prepare` makes a `LaunchTemplate`, which the calls of a problem share, `make_params` the
struct of one call, `launcher` the function that runs it. A repeated call runs that function with other addresses; a
cascade is a struct with a second one attached.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...core.plan import Plan
from ...core.problem import Problem
from ...core.tensors import FIELDS, Tensors
from ...validation import values
from . import compiler, config
from .codegen.dtypes import CODES, NAMES
from .codegen.vector import W
from .gemm import amx, gemv_amx, gemv_sdot, gemv_vnni
from .mod_gradients import derivatives_of
from .mods import capturing, depends_on_values, put_mods
from .params import CACHE_LINE, LAUNCH_BYTES, WORK_ITEM, Gradients, Params, Rules, put_tensor
from .scheduler import SPARE_ROWS, UNDONE_ITEM, WRONG_TABLES
from .scratch import scratch_bytes
from .threads import MOST_KEPT, pool

PREFILL = {"": "prefill", "prefill_amx": "AMX prefill", "prefill_dot": "bf16 prefill"}  # what a plan says
KEPT_ITEMS = 1 << 14  # a MiB: with key indices each query has an item


@dataclass(frozen=True)
class LaunchTemplate:
    """What all calls of a problem share: each copies `params` and adds its tensors."""

    params: Params  # without tensors
    scratch: int  # bytes for each thread
    max_work_items: int
    work_items: Any = None  # the work items, if all calls have the same
    schedule: str = "schedule"  # the kernel that lists them
    gradients: Gradients | None = None  # of a backward pass, without tensors


def prepare(problem: Problem) -> Plan:
    """The plan of a problem, with the `LaunchTemplate` of its calls."""
    p = problem
    template = make_template(p, torch.get_num_threads())
    params, threads = template.params, template.params.threads
    how = "decode" if config.is_decode(p) else PREFILL[config.tiled_prefill(p)[0].partition(" ")[0]]
    return Plan(
        p,
        "cpu",
        f"{'bf16 ' * params.bf16_dot}{how}, {W} lanes, {threads} thread{'s' * (threads > 1)}",
        (min(params.tile_rows, max(1, p.q_len)), params.tile_keys),
        splits=-(-p.selected_keys // params.split_size) if params.split_size else 1,
        workspace_bytes=template.scratch * threads + template.max_work_items * params.partial_bytes,
        detail=template,
    )


def make_template(p: Problem, threads: int) -> LaunchTemplate:
    tiled, parts = config.tiled_prefill(p)
    c = config.configure(p, threads, parts)
    cut = "threads tile_rows tile_keys split_size head_batch partial_bytes decode_rows bf16_dot".split()
    params = problem_params(
        p,
        split_few=p.split_size is not None,
        prefetch_distance=config.prefetch_distance(p),
        **{name: getattr(c, name) for name in cut},
    )
    for name, kernel in kernels(p, tiled, bool(c.split_size)).items():
        setattr(params, name, compiler.function(kernel))
    if tiled.startswith("prefill_amx"):
        params.tile_config = amx.TILE_CONFIG.ctypes.data
    kept = same_items(p) and (p.selection is None or c.max_work_items <= KEPT_ITEMS)
    items = schedule_items(params, c.max_work_items) if kept else None
    return LaunchTemplate(params, scratch_bytes(params, parts), c.max_work_items, items)


def same_items(p: Problem) -> bool:
    """Whether the work items of all calls of a problem are the same."""
    return not (p.has_lengths or p.positions) and "rows" not in (p.rules.q_offset, p.rules.affine)


def has_spans(p: Problem, mask: torch.Tensor) -> bool:
    """Whether rows of a mask are scanned for the span of keys that they leave.

    Batch rows, heads and queries may share a row of the mask, and must then have the same keys: no lengths, and no
    rules if queries share it. With key indices, cells of the mask are not in order.
    """
    if p.grads or p.packed_q or p.selection is not None or config.is_decode(p):
        return False
    queries_share = p.q_len > 1 and mask.stride(2) == 0
    return same_items(p) and mask.stride(3) == 1 and not (queries_share and p.rules.by_position)


def problem_params(p: Problem, **tiles: int) -> Params:
    """The parameter struct of a problem: its sizes, dtypes and options, and how it is cut into tiles."""
    same = "batch heads kv_heads q_len kv_len head_dim value_dim scale softcap".split()
    return Params(
        q_dtype=CODES[NAMES[p.q_dtype]],
        k_dtype=CODES[p.k_format.name],
        v_dtype=CODES[p.v_format.name],
        mask_dtype=0 if p.mask is None else CODES[NAMES[p.mask.dtype]],
        k_group=p.k_format.group or 1,
        v_group=p.v_format.group or 1,
        k_row=p.k_format.columns(p.head_dim - p.k_shared_dim) * p.k_dtype.itemsize,
        shared_columns=p.k_shared_dim,
        v_row=0 if p.v_in_k else p.v_format.columns(p.value_dim) * p.v_dtype.itemsize,
        page=p.page_size,
        block=0 if p.selection is None else p.selection.block,
        max_selected=0 if p.selection is None else p.selected_keys,
        rules=Rules(**p.rules.numbers()),
        **{name: getattr(p, name) for name in same},
        **tiles,
    )


def kernels(p: Problem, tiled: str, split: bool) -> dict[str, str]:
    """The kernels of a problem, by the fields of `Params` that hold their addresses; `tiled` of `tiled_prefill`."""
    k, v = p.k_format, p.v_format
    names = {"worker": "worker"}
    if split:
        names["combine"] = "combine"
    if tiled:
        names["prefill_tiles"] = tiled
    elif not config.is_decode(p):
        names["prefill"] = "prefill"
    if p.packed_q or config.is_decode(p):
        names |= {"decode": "decode", "qk_f32": "qk f32", "pv_f32": "pv f32"}
        # Rows of whole vectors are read in place.
        if p.head_dim % (W * k.packing) == 0 and not k.scales_in_row and not p.k_shared_dim:
            names["qk"] = f"qk {k.name}"
        if p.value_dim % (W * v.packing) == 0 and not v.scales_in_row:
            names["pv"] = f"pv {v.name}"
        if gemv_amx.serves(p) and not p.k_shared_dim:
            names |= {"matrix_qk": "amx_qk", "matrix_pv": "amx_pv"}
        elif config.uses_bf16_dot_decode(p):
            names |= {"matrix_qk": "bf16_qk", "matrix_pv": "bf16_pv"}
        if config.uses_bf16_dot_qk(p) and not p.k_shared_dim:
            names["qk_bf16_dot"] = "qk bf16_dot"
        for name, gemv in (("vnni", gemv_vnni), ("sdot", gemv_sdot)):
            if gemv.serves(k, p.head_dim):
                names["dot_qk"] = f"{name}_qk {k.name}"
            if gemv.serves(v, p.value_dim):
                names["dot_pv"] = f"{name}_pv {v.name}"
    return names


def schedule_items(params: Params, most: int, schedule: str = "schedule") -> Any:
    """Lists at most `most` work items; returns their memory."""
    work_items = np.empty(max(1, most), dtype=WORK_ITEM)
    order = np.empty(max(1, params.batch), dtype=np.int64)
    params.work_items = work_items.ctypes.data
    compiler.entry(schedule)(ctypes.addressof(params), order.ctypes.data)
    return work_items


STRIDED = ("q", "k", "v", "out", "lse", "k_scales", "v_scales", "mask", "tree", "positions", "slopes",
           "q_bias", "k_bias", "indices", "k_shared")  # fmt: skip
TABLES = ("kv_lengths", "cu_q", "cu_k", "table")
FLAT = ("sinks", "row_places", "q_offsets", *TABLES)
# Fields of `Params` that have other names in `Tensors`
TENSORS = {"tree": "tree_mask", "slopes": "alibi_slopes", "row_places": "places", "q_offsets": "q_offset",
           "cu_q": "cu_seqlens_q", "cu_k": "cu_seqlens_k", "table": "block_table",
           "indices": "key_indices"}  # fmt: skip


def make_params(plan: Plan, t: Tensors, own_tables: bool = False) -> tuple[Params, list[Any]]:
    """The parameter struct of a call, and the objects that must outlive it.

    With `own_tables` each launch is given lengths, offsets and block tables, and lists its own work items.
    """
    p, template = plan.problem, plan.detail
    params = Params.from_buffer_copy(template.params)
    kept: list[Any] = [template]
    for name in STRIDED + FLAT:
        x = getattr(t, TENSORS.get(name, name))
        if x is not None and name in FLAT:
            x = x if name == "table" else x.contiguous()
            if not (own_tables and name in TABLES):
                kept.append(x)  # not tables that each launch brings
        if x is not None:
            put_tensor(params, name, x)
    if t.k_scales is not None:
        params.k_scales_dtype = CODES[NAMES[t.k_scales.dtype]]
    if t.v_scales is not None:
        params.v_scales_dtype = CODES[NAMES[t.v_scales.dtype]]
    if t.tile_map is not None and t.mask is not None and t.key_indices is None:
        tile = params.tile_rows, params.tile_keys
        states = t.tile_map.retile(tile).states
        states = states.expand(p.batch, p.heads, *(-(-n // s) for n, s in zip((p.q_len, p.kv_len), tile, strict=True)))
        put_tensor(params, "states", states)
        kept.append(states)
    kept += put_mods(params, p, t, derivatives_of(p).parts if p.grads else ())
    if p.selection is not None and t.k.stride(1) > t.k.stride(2):  # heads of a token are not adjacent
        params.head_batch = 1
    if t.mask is not None and has_spans(p, t.mask):
        shape = [n if stride else 1 for n, stride in zip(t.mask.shape[:3], t.mask.stride()[:3], strict=True)]
        spans = torch.zeros(shape, dtype=torch.int64, device="cpu").expand(t.mask.shape[:3])
        put_tensor(params, "spans", spans)
        kept.append(spans)
    if template.work_items is None and not own_tables:
        kept.append(schedule_items(params, template.max_work_items, template.schedule))
    return params, kept


# Takes the tensors of a call in the order of FIELDS: OPERANDS, and REST if the call has tables.
Launcher = Callable[..., bool]
OPERANDS = ("q", "k", "v", "out", "lse", "k_scales", "v_scales")
REST = tuple(name for name in FIELDS if name not in OPERANDS)
LAUNCH_TABLES = ("kv_lengths", "cu_seqlens_q", "cu_seqlens_k", "block_table")  # as the kernel `launch` takes them
NO_TABLES = [0] * len(LAUNCH_TABLES)
assert FIELDS == OPERANDS + REST


def launcher(structs: tuple[Params, ...], scratch: int, kept: Any) -> Launcher:
    """A function that launches the call of the first struct on other tensors of the same kind.

    It only passes addresses: the kernel copies the struct, starts the threads and combines partials (cpu 17 in
    benchmarks/cpu/LOG.md). `kept` are objects that must outlive the structs.
    """
    params, scratch_of_thread = structs[0], pool.scratch
    launch, address = compiler.entry("launch"), ctypes.addressof(params)
    own_items, items = params.schedule != 0, params.max_items or params.items
    params.threads = threads = min(params.threads, items)
    size = LAUNCH_BYTES + -(-items * params.partial_bytes // CACHE_LINE) * CACHE_LINE + scratch
    if own_items:
        size += items * WORK_ITEM.itemsize + 8 * params.batch + CACHE_LINE
    tables_at, cu_q = [REST.index(name) for name in LAUNCH_TABLES], REST.index("cu_seqlens_q")

    def go(
        q: Any, k: Any, v: Any, out: Any, lse: Any, k_scales: Any = None, v_scales: Any = None, *rest: Any,
        address: int = address,
    ) -> bool:  # fmt: skip
        tables = NO_TABLES
        if own_items:
            tables = [0 if (x := rest[i]) is None else x.data_ptr() for i in tables_at]
        while True:
            team = pool.acquire(threads, scratch) if threads > 1 else 0
            try:
                status = launch(
                    address, scratch_of_thread(size), team, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(),
                    0 if lse is None else lse.data_ptr(), 0 if k_scales is None else k_scales.data_ptr(),
                    0 if v_scales is None else v_scales.data_ptr(), *tables,
                )  # fmt: skip
            finally:
                if team:
                    pool.release()
            if not status & UNDONE_ITEM:
                break
            # An infinity, which tiles cannot process: again, by fp32.
            for x in (*structs, Params.from_address(address)):
                x.prefill = compiler.function("prefill")
        if status & WRONG_TABLES:
            return False
        if status & SPARE_ROWS:
            zero_rows(out, lse, int(rest[cu_q][-1]), 0)
        return True

    go.kept, go.checks_tables = (structs, kept), own_items  # type: ignore[attr-defined]
    return go


def bind(plan: Plan, t: Tensors) -> Launcher | None:
    """A launcher of the same call for other q, k, v, out, lse, scales, lengths, offsets and block tables.

    With `checks_tables` it checks lengths, offsets and block tables itself: it returns False, and does nothing, if they
    refer to rows that do not exist.
    """
    p, template = plan.problem, plan.detail
    if p.mods is not None and depends_on_values(p.mods, t):
        return None
    params, kept = make_params(plan, t, template.work_items is None)
    if template.work_items is None:
        if template.max_work_items * (params.partial_bytes + WORK_ITEM.itemsize) > MOST_KEPT // 2:
            return None  # it would need memory for the most items that a call may have
        params.schedule, params.max_items = compiler.function(template.schedule), template.max_work_items
        params.q_rows, params.kv_rows = p.total_q, t.k.shape[0 if p.page_size else 2]
    go = launcher((params,), template.scratch, kept)
    return go if p.mods is None else capturing(go, params, t.captured)


def check_tables(p: Problem, t: Tensors) -> None:
    """Checks lengths, offsets and tables of a call that is not bound (`bind`), whatever `validate` says."""
    tables = (t.kv_lengths, None, t.cu_seqlens_q, t.cu_seqlens_k, t.block_table)
    values.check_tables(p, t.k.shape[0 if p.page_size else 2], True, *tables)


def run(plan: Plan, t: Tensors) -> None:
    """Runs a call that is not bound (`bind`)."""
    check_tables(plan.problem, t)
    params, kept = make_params(plan, t)
    launcher((params,), plan.detail.scratch, kept)(t.q, t.k, t.v, t.out, t.lse, t.k_scales, t.v_scales)
    if t.cu_seqlens_q is not None:
        zero_spare_rows(t)


def zero_spare_rows(t: Tensors) -> int:
    """Writes the result of packed rows in no sequence. Returns how many rows are in one."""
    assert t.cu_seqlens_q is not None
    count = int(t.cu_seqlens_q[-1])
    if count < t.out.shape[2]:
        zero_rows(t.out, t.lse, count, 2)
    return count


def zero_rows(out: torch.Tensor, lse: torch.Tensor | None, first: int, dim: int) -> None:
    """Writes 0 and -inf to rows from `first` on, which see nothing."""
    out.narrow(dim, first, out.shape[dim] - first).zero_()
    if lse is not None:
        lse.narrow(dim, first, lse.shape[dim] - first).fill_(-torch.inf)
