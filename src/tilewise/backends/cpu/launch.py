"""From a plan and its tensors to a parameter struct, and threads that work on it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ...core.plan import Plan
from ...core.problem import Problem
from ...core.storage import PLAIN
from ...core.tensors import Tensors
from . import compiler, config
from .codegen.vector import CODES, W
from .gemm import amx, gemv_vnni
from .gemm.fp32 import PANEL
from .params import COUNTER, END, INDEX, MASK_BOOL, NO_LIMIT, NUMBERS, PER_CALL, UNDONE, WORK_ITEM
from .scratch import DIRECT_ROWS, total
from .threads import pool

FLOATS = {torch.float32: CODES["f32"], torch.float16: CODES["f16"], torch.bfloat16: CODES["bf16"]}
SPLIT_BYTES = 256 * 1024  # of all rows of a KV head: four parts for each thread take a MiB of it


@dataclass(frozen=True)
class Launch:
    """What all calls of a problem share."""

    params: Any  # int64, in the order of PARAMS; the tensors are each call's own
    threads: int
    scratch: int  # bytes for each thread
    max_work_items: int
    partial_bytes: int  # of an item's result, if items are split
    by_amx: bool
    work_items: Any = field(default=None)  # the list of items, if it is the same for every call


def prepare(problem: Problem) -> Plan:
    p = problem
    launch = make_launch(p, torch.get_num_threads())
    tile = (min(int(launch.params[INDEX["tile_rows"]]), max(1, p.q_len)), int(launch.params[INDEX["tile_keys"]]))
    split = int(launch.params[INDEX["split_size"]])
    how = "matrix tiles" if launch.params[INDEX["prefill_amx"]] else "packed tiles"
    words = ["straight from the cache" if p.group * p.q_len <= DIRECT_ROWS else how, f"{W} lanes"]
    words.append(f"{launch.threads} thread{'s' * (launch.threads > 1)}")
    return Plan(
        p,
        "cpu",
        ", ".join(words),
        tile,
        splits=-(-p.kv_len // split) if split else 1,
        workspace_bytes=launch.scratch * launch.threads + launch.max_work_items * launch.partial_bytes,
        detail=launch,
    )


def make_launch(p: Problem, threads: int) -> Launch:
    parts = _parts(p)
    most = 768 if parts else 384  # laying K and V into tiles takes more than packing V
    rows = config.tile_rows(p.group, p.head_dim, p.value_dim, config.second_level_cache(), most)
    if not p.packed_q:
        step = max(1, PANEL // p.group)
        rows = config.even_rows(rows, p.q_len, p.batch * p.kv_heads, threads, step)
    keys = config.tile_keys(parts)
    tiles = -(-p.q_len // rows) * p.batch
    if p.packed_q:
        tiles = min(tiles, -(-p.total_q // rows) + p.batch)
    threads = config.threads_for(p, threads)
    Dv = -(-p.value_dim // W) * W
    direct = p.group * p.q_len <= DIRECT_ROWS
    head_batch = 1
    if direct and p.page_size and p.mask is None:
        row_bytes, splits = 4 * p.group * p.q_len * (p.head_dim + p.value_dim), tiles * max(1, p.kv_len // 512)
        head_batch = config.head_batch(p.kv_heads, row_bytes, splits, threads)
    every_row = p.group * (p.total_q if p.packed_q else p.batch * p.q_len)
    split = p.split_size or 0 if direct or p.packed_q else 0  # of sequences of few rows, in any batch
    if not p.split_size and (direct or every_row * 4 * (Dv + 2) <= SPLIT_BYTES):
        each = config.HEAD_BATCH_PIECES if head_batch > 1 else 4
        split = config.split_size(tiles * p.kv_heads // head_batch, p.kv_len, threads, keys, each)
    if split >= p.kv_len:
        split = 0
    pieces = -(-p.kv_len // split) + 1 if split else 1
    part_rows = min(p.group * min(rows, p.q_len), DIRECT_ROWS if p.split_size else 1 << 30)
    left, right = p.window
    numbers = {
        "q_code": FLOATS[p.q_dtype],
        "k_code": CODES[p.k_format.name],
        "v_code": CODES[p.v_format.name],
        "k_group": p.k_format.group or 1,
        "v_group": p.v_format.group or 1,
        "k_row": p.k_format.columns(p.head_dim) * p.k_dtype.itemsize,
        "v_row": p.v_format.columns(p.value_dim) * p.v_dtype.itemsize,
        "mask_code": 0 if p.mask is None else MASK_BOOL if p.mask.is_bool else FLOATS[p.mask.dtype],
        "page": p.page_size,
        "batch": p.batch,
        "heads": p.heads,
        "kv_heads": p.kv_heads,
        "q_len": p.q_len,
        "kv_len": p.kv_len,
        "head_dim": p.head_dim,
        "value_dim": p.value_dim,
        "causal": p.causal,
        "left": NO_LIMIT if left is None else left,
        "right": NO_LIMIT if right is None else right,
        "chunk": p.chunk,
        "offset": p.q_offset if isinstance(p.q_offset, int) else END,
        "tile_rows": rows if head_batch == 1 else max(rows, head_batch * p.q_len),  # room for all of them
        "tile_keys": keys,
        "split_size": split,
        "split_few": p.split_size is not None,
        "partial_bytes": 4 * part_rows * (Dv + 2) if split else 0,
        "head_batch": head_batch,
        "prefetch_distance": config.prefetch_distance(p),
    }
    if not direct and not parts:
        numbers["prefill"] = compiler.function("prefill")
    if parts:
        numbers["prefill_amx"] = compiler.function(f"prefill_amx {p.k_format.name}")
        numbers["tile_config"] = amx.TILE_CONFIG.ctypes.data
    if p.packed_q or direct:
        names = {"decode": "decode", "qk_f32": "qk f32", "pv_f32": "pv f32"}
        # Rows are read straight from the cache if they are whole vectors.
        if p.head_dim % (W * p.k_format.packing) == 0:
            names["qk"] = f"qk {p.k_format.name}"
        if p.value_dim % (W * p.v_format.packing) == 0:
            names["pv"] = f"pv {p.v_format.name}"
        if _tiles_serve(p):
            names |= {"amx_qk": "amx_qk", "amx_pv": "amx_pv"}
        if gemv_vnni.serves(p.k_format.name, p.head_dim, numbers["k_group"]):
            names["vnni_qk"] = f"vnni_qk {p.k_format.name}"
        if gemv_vnni.serves(p.v_format.name, p.value_dim, numbers["v_group"]):
            names["vnni_pv"] = f"vnni_pv {p.v_format.name}"
        numbers |= {name: compiler.function(what) for name, what in names.items()}
    params = np.zeros(NUMBERS, dtype=np.int64)
    for name, value in numbers.items():
        params[INDEX[name]] = value
    params.view(np.float64)[[INDEX["scale"], INDEX["softcap"]]] = p.scale, p.softcap
    scratch = total(p.heads, p.kv_heads, p.head_dim, p.value_dim, numbers["tile_rows"], keys, head_batch, parts)
    most = tiles * p.kv_heads * pieces
    launch = Launch(params, threads, scratch, most, numbers["partial_bytes"], bool(parts))
    if p.form != "dense" or p.kv_lengths or p.q_offset == "rows":
        return launch
    own = params.copy()
    work_items = schedule_items(own, launch)
    return Launch(own, threads, scratch, most, numbers["partial_bytes"], bool(parts), work_items)


def _parts(p: Problem) -> int:
    """bf16 parts of a number, if matrix tiles are used, else 0."""
    if p.group * p.q_len <= DIRECT_ROWS or not PLAIN[p.q_dtype] == p.k_format == p.v_format or not amx.usable():
        return 0
    return amx.PARTS.get(p.k_format.name, 0)


def _tiles_serve(p: Problem) -> bool:
    """Whether decode goes through matrix tiles: all bf16, rows of whole tiles."""
    whole = p.head_dim % amx.BLOCK == 0 and p.value_dim % amx.BLOCK == 0
    return whole and p.q_dtype == p.k_dtype == p.v_dtype == torch.bfloat16 and amx.usable()


def schedule_items(params: Any, launch: Launch) -> Any:
    work_items = np.empty(max(1, launch.max_work_items), dtype=WORK_ITEM)
    order = np.empty(max(1, int(params[INDEX["batch"]])), dtype=np.int64)
    params[INDEX["work_items"]], params[INDEX["counter"]] = work_items.ctypes.data, params.ctypes.data + 8 * COUNTER
    compiler.entry("schedule")(params.ctypes.data, order.ctypes.data)
    return work_items


def _tensor(x: torch.Tensor | None) -> tuple[int, int, int, int]:
    """Address, and strides in bytes of the first three dims."""
    if x is None:
        return 0, 0, 0, 0
    size = x.element_size()
    b, h, l, *_ = x.stride()
    return x.data_ptr(), b * size, h * size, l * size


def _flat(x: torch.Tensor | None, kept: list[Any]) -> int:
    """The address of a small contiguous tensor."""
    if x is None:
        return 0
    x = x.contiguous()
    kept.append(x)
    return x.data_ptr()


def make_params(plan: Plan, t: Tensors) -> tuple[Any, list[Any]]:
    """The parameter struct of a call, and what must live as long as it is in use."""
    p, launch = plan.problem, plan.detail
    params = launch.params.copy()
    kept: list[Any] = [launch]
    states = None
    if t.tile_map is not None and t.mask is not None:
        tile = int(params[INDEX["tile_rows"]]), int(params[INDEX["tile_keys"]])
        states = t.tile_map.retile(tile).states
        states = states.expand(p.batch, p.heads, *(-(-n // s) for n, s in zip((p.q_len, p.kv_len), tile, strict=True)))
        kept.append(states)
    slopes, table = t.alibi_slopes, t.block_table
    if table is not None:
        table = table.contiguous()
        kept.append(table)
    params[: len(PER_CALL)] = (
        *_tensor(t.q),
        *_tensor(t.k),
        *_tensor(t.v),
        *_tensor(t.out),
        *_tensor(t.lse),
        *_tensor(t.k_scales),
        *_tensor(t.v_scales),
        0 if t.k_scales is None else FLOATS[t.k_scales.dtype],
        0 if t.v_scales is None else FLOATS[t.v_scales.dtype],
        *_tensor(t.mask),
        0 if t.mask is None else t.mask.stride(3) * t.mask.element_size(),
        *_tensor(states),
        0 if states is None else states.stride(3),
        *((0, 0, 0) if slopes is None else (slopes.data_ptr(), 4 * slopes.stride(0), 4 * slopes.stride(1))),
        _flat(t.sinks, kept),
        _flat(t.kv_lengths, kept),
        _flat(t.q_offset, kept),
        _flat(t.cu_seqlens_q, kept),
        _flat(t.cu_seqlens_k, kept),
        *((0, 0) if table is None else (table.data_ptr(), 4 * table.stride(0))),
    )
    return params, kept


def run(plan: Plan, t: Tensors) -> None:
    launch = plan.detail
    params, kept = make_params(plan, t)
    address = params.ctypes.data
    params[INDEX["counter"]] = address + 8 * COUNTER
    if launch.work_items is None:
        kept.append(schedule_items(params, launch))
    count = int(params[COUNTER + 1])
    partials = None
    if launch.partial_bytes:
        partials = torch.empty(count * launch.partial_bytes, dtype=torch.uint8, device="cpu")
        params[INDEX["partials"]] = partials.data_ptr()
    run_items(launch, address, count)
    if t.cu_seqlens_q is not None:
        zero_spare_rows(t)


def zero_spare_rows(t: Tensors) -> int:
    """What packed rows of no sequence give. Returns how many belong to one."""
    assert t.cu_seqlens_q is not None
    count = int(t.cu_seqlens_q[-1])
    if count < t.out.shape[2]:
        t.out[:, :, count:] = 0
        if t.lse is not None:
            t.lse[:, :, count:] = -torch.inf
    return count


def run_items(launch: Launch, address: int, count: int) -> None:
    threads = min(launch.threads, count)
    if threads < 2:
        compiler.entry("worker")(address, pool.scratch(launch.scratch))
    else:
        pool.run_kernel("worker", address, threads, launch.scratch)
    if launch.partial_bytes:
        compiler.entry("combine")(address, pool.scratch(launch.scratch))
    if launch.by_amx and _number(address, UNDONE).value:  # an infinity: that item is for vectors, which are not here
        _number(address, INDEX["prefill"]).value = compiler.function("prefill")
        _number(address, COUNTER).value = _number(address, UNDONE).value = 0
        run_items(launch, address, count)


def _number(address: int, index: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(address + 8 * index)
