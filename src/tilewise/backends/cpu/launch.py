"""Makes the parameter struct of a call from its plan and tensors, and runs the kernel `launch` on it.

All calls go the same way: `prepare` makes a `LaunchTemplate`, which the calls of a problem share, `make_params` the
struct of one call, `launcher` the function that runs it. A repeated call runs that function with other addresses; a
cascade is a struct with a second one attached.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...core.dropout import kept_scale, threshold
from ...core.plan import Plan
from ...core.problem import Problem
from ...core.tensors import Tensors
from ...validation import values
from . import compiler, config
from .codegen.dtypes import CODES, NAMES
from .codegen.vector import W
from .gemm import amx, gemv_amx, gemv_sdot, gemv_vnni
from .mod_gradients import derivatives_of
from .mods import depends_on_values, put_mods, table_of
from .params import WORK_ITEM, Gradients, Params, Rules, put_tensor
from .replay import REST, Launcher, OwnFields, launcher, zero_rows
from .scratch import scratch_bytes
from .threads import MOST_KEPT

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
        dropout_threshold=threshold(p.dropout_p),
        dropout_scale=kept_scale(p.dropout_p),
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
FLAT = ("sinks", "dropout_seed", "row_places", "q_offsets", *TABLES)
# Fields of `Params` that have other names in `Tensors`
TENSORS = {"tree": "tree_mask", "slopes": "alibi_slopes", "row_places": "places", "q_offsets": "q_offset",
           "cu_q": "cu_seqlens_q", "cu_k": "cu_seqlens_k", "table": "block_table",
           "indices": "key_indices"}  # fmt: skip


def make_params(plan: Plan, t: Tensors, bound: bool = False) -> tuple[Params, list[Any]]:
    """The parameter struct of a call, and the objects that must outlive it. If `bound`, each launch brings tensors of
    its own.
    """
    p, template = plan.problem, plan.detail
    params = Params.from_buffer_copy(template.params)
    kept: list[Any] = [template]
    for name in STRIDED + FLAT:
        x = getattr(t, TENSORS.get(name, name))
        if x is not None and name in FLAT:
            x = x if name == "table" else x.contiguous()
            if not bound:
                kept.append(x)
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
        spans = torch.zeros(rows_of(t.mask), dtype=torch.int64, device="cpu")  # none is computed
        put_tensor(params, "spans", spans.expand(t.mask.shape[:3]))
        kept.append(spans)
    if template.work_items is None and not bound:
        kept.append(schedule_items(params, template.max_work_items, template.schedule))
    return params, kept


def rows_of(mask: torch.Tensor) -> list[int]:
    """The sizes of a mask without its last dim, 1 where it is broadcast."""
    return [n if stride else 1 for n, stride in zip(mask.shape[:3], mask.stride()[:3], strict=True)]


def bind(plan: Plan, t: Tensors) -> Launcher | None:
    """A launcher of the same call for other tensors; None if there is none.

    With `checks_tables` it checks lengths, offsets and block tables itself: it returns False, and does nothing, if they
    refer to rows that do not exist.
    """
    p, template = plan.problem, plan.detail
    if p.mods is not None and depends_on_values(p.mods, t):
        return None
    fields = {name: TENSORS.get(name, name) for name in STRIDED + FLAT if name not in TABLES}
    there = {name: field for name, field in fields.items() if field in REST and getattr(t, field) is not None}
    if any(not getattr(t, field).is_contiguous() for name, field in there.items() if name in FLAT):
        return None  # it would be copied
    params, kept = make_params(plan, t, bound=True)
    if template.work_items is None:
        if template.max_work_items * (params.partial_bytes + WORK_ITEM.itemsize) > MOST_KEPT // 2:
            return None  # it would need memory for the most items that a call may have
        params.schedule, params.max_items = compiler.function(template.schedule), template.max_work_items
        params.q_rows, params.kv_rows = p.total_q, t.k.shape[0 if p.page_size else 2]
    own = None
    if there or p.mods is not None:
        rows = rows_of(t.mask) if params.spans and t.mask is not None else ()
        table = None if p.mods is None else table_of(t.captured)
        own = OwnFields({name: REST.index(field) for name, field in there.items()}, rows, table)
    return launcher((params,), template.scratch, kept, own)


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
