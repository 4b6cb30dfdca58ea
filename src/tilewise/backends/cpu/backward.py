"""The backward pass: makes the structs of the kernel `backward` from a plan and its tensors. See `launch.py`."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import partial

import torch

from ...core import large_lse
from ...core.plan import Plan
from ...core.problem import Problem, Selection
from ...core.tensors import BackwardTensors, Tensors
from . import compiler, config
from .codegen.dtypes import CODES, NAMES
from .codegen.vector import W
from .gemm.fp32 import ROWS
from .launch import LaunchTemplate, check_tables, make_params, problem_params, same_items, schedule_items
from .mainloop.mod_kernels import vectors_of
from .mod_gradients import CapturedSums, derivatives_of
from .params import Gradients, put_tensor
from .replay import launcher
from .scratch import backward_scratch_bytes, round_up
from .threads import pool, yield_thread


def prepare(problem: Problem) -> Plan:
    """The plan of a backward pass, with the `LaunchTemplate` of its calls."""
    p = problem
    rows, keys = config.backward_tile(p)
    threads = config.threads_for(p, torch.get_num_threads())
    shared = p.mask.broadcast if p.mask is not None and "mask" in p.grads else (False, False)
    d = derivatives_of(p)
    gradients = Gradients(every_row=shared[0], every_head=shared[1], slots=tiles(p, rows), by_score=d.by_score)
    params = problem_params(p, tile_rows=rows, tile_keys=keys, head_batch=1, threads=threads)
    params.gradients, params.yield_thread = ctypes.addressof(gradients), yield_thread()
    params.mod_vectors = vectors_of(d.parts)
    bf16 = config.backward_in_bf16(p)
    params.worker = compiler.function("backward" + " selected" * (p.selection is not None) + " bf16" * bf16)
    scratch = backward_scratch_bytes(params)
    most = p.batch * p.kv_heads * -(-p.kv_len // keys)
    items = schedule_items(params, most, "schedule_backward") if same_items(p) else None
    every_row = p.total_q if p.packed_q else p.batch * p.q_len
    return Plan(
        p,
        "cpu",
        f"{'bf16 ' * bf16}backward, {W} lanes, {threads} thread{'s' * (threads > 1)}",
        (min(rows, max(1, p.q_len)), keys),
        workspace_bytes=scratch * threads + 4 * p.heads * every_row + 4 * dq_floats(p, rows),
        detail=LaunchTemplate(params, scratch, most, items, "schedule_backward", gradients),
    )


def tiles(p: Problem, rows: int) -> int:
    """The most tiles of rows of a KV head: packed sequences share none."""
    return p.total_q // rows + p.batch if p.packed_q else p.batch * -(-p.q_len // rows)


def dq_floats(p: Problem, rows: int) -> int:
    """The size of dq's float32 accumulator, in slots for whole tiles."""
    return p.kv_heads * tiles(p, rows) * int(round_up(p.group * rows, ROWS) * round_up(p.head_dim, W))


def run(plan: Plan, tensors: BackwardTensors, lse_is_right: bool = False) -> None:
    """Writes the gradients. `lse_is_right`: rows with a large lse are corrected already (`core/large_lse.py`)."""
    p, b, t, template = plan.problem, tensors, tensors.forward, plan.detail
    check_tables(p, t)
    if p.selection is not None:
        t = replace(t, key_indices=sorted_indices(p.selection, t.key_indices))
    assert t.lse is not None
    params, kept = make_params(plan, t)
    g = Gradients.from_buffer_copy(template.gradients)
    params.gradients = ctypes.addressof(g)
    delta = torch.empty_like(t.lse)
    incoming = {"dout": b.dout, "dlse": b.dlse, "delta": delta}
    for name, x in (incoming | {"dq": b.dq, "dk": b.dk, "dv": b.dv}).items():
        if x is not None:
            put_tensor(g, name, x)
    g.rows = delta.shape[2]
    pool.run_kernel("delta", ctypes.addressof(params), params.threads, template.scratch)
    if g.large and not lse_is_right:
        large_lse.run(prepare, partial(run, lse_is_right=True), p, b)
        return
    if b.dsinks is not None:
        write_sinks(t, b.dsinks, delta)
    if p.grads == ("sinks",):
        return
    hidden = p.rules.by_position or p.has_lengths or p.rules.q_offset != "end" or p.packed_q
    if b.dq is not None:
        if hidden:  # rows that see no key, padding rows
            b.dq.zero_()
        sums = t.lse.new_empty(dq_floats(p, params.tile_rows))  # float32
        semaphores = t.lse.new_zeros(p.kv_heads * g.slots, dtype=torch.int64)
        g.dq_sums, g.dq_semaphores = sums.data_ptr(), semaphores.data_ptr()
        kept += [sums, semaphores]
    for of_keys in (b.dk, b.dv):
        if of_keys is not None and p.has_lengths:  # keys past a length
            of_keys.zero_()
    blocks = -(-p.kv_len // params.tile_keys)
    slopes = None if b.dalibi_slopes is None else t.lse.new_zeros(blocks, p.batch, p.heads)
    if slopes is not None:
        put_tensor(g, "dslopes", slopes)
    rows = None if b.dq_bias is None else t.lse.new_zeros(blocks, *b.dq_bias.shape)
    if rows is not None:
        put_tensor(g, "dq_bias", rows)
    if b.dk_bias is not None:
        put_tensor(g, "dk_bias", b.dk_bias.zero_())
    mask = None if b.dmask is None else mask_sums(p, g, b.dmask, blocks)
    captured = CapturedSums(p, derivatives_of(p), b, params, g) if b.dcaptured else None
    launcher((params,), template.scratch, [kept, g, delta, t])(t.q, t.k, t.v, t.out, t.lse)
    if slopes is not None and b.dalibi_slopes is not None:
        torch.neg(slopes.sum(0), out=b.dalibi_slopes)
    if rows is not None and b.dq_bias is not None:
        torch.sum(rows, 0, out=b.dq_bias)
    if b.dmask is not None and mask is not None and mask is not b.dmask:
        b.dmask.copy_(mask.sum(0))
    if captured is not None:
        captured.write()


def sorted_indices(selection: Selection, indices: torch.Tensor | None) -> torch.Tensor:
    """Each list of key or block indices in ascending order. What heads share is sorted once."""
    assert indices is not None
    own = indices if selection.by_head else indices[:, :1]
    return own.sort(-1).values.expand_as(indices)


def write_sinks(t: Tensors, dsinks: torch.Tensor, delta: torch.Tensor) -> None:
    """The gradient of sinks, [H], from delta [B, H, Lq]."""
    assert t.sinks is not None
    assert t.lse is not None
    share = torch.where(t.lse.isfinite(), (t.sinks[:, None] - t.lse).exp() * delta, 0.0)
    dsinks.copy_(-share.sum((0, 2), dtype=torch.float64))  # in float32 it would depend on the layout of rows


def mask_sums(p: Problem, g: Gradients, dmask: torch.Tensor, blocks: int) -> torch.Tensor:
    """Where the kernel accumulates the gradient of a mask: `dmask` itself, or a sum for each block of keys."""
    assert p.mask is not None
    by_block = p.mask.broadcast[3]
    sums = dmask.new_zeros(blocks, *dmask.shape) if by_block else dmask.zero_()
    put_tensor(g, "dmask", sums[0] if by_block else sums)
    for dim, one in zip("bhqk", p.mask.broadcast, strict=True):
        if one:
            setattr(g, f"dmask_{dim}", 0)
    g.dmask_dtype, g.dmask_sum = CODES[NAMES[sums.dtype]], any(p.mask.broadcast)
    g.dmask_block = sums.stride(0) * 4 if by_block else 0
    return sums
