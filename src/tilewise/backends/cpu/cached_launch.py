"""A repeated call: one compiled function does all of it, given nothing but addresses."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from ...core.plan import Plan
from ...core.tensors import Tensors
from . import compiler
from .launch import Launch, make_params, run_items
from .params import BLOCK_BYTES, COUNTER, INDEX, TASK_BYTES
from .threads import address_of, pool


def bind(plan: Plan, t: Tensors) -> Any:
    """The same call for other addresses of q, k, v, out, lse and the scales of k and v. `run` has listed the items."""
    launch = plan.detail
    template, kept = make_params(plan, t)
    count = int(template[COUNTER + 1])
    threads = min(launch.threads, count)
    go = _stepwise(launch, template, count)
    if not launch.by_amx and (threads < 2 or pool.parallel):  # tiles may leave something undone
        go = _one_kernel(launch, template, count, threads, go)
    go.kept = kept, template
    return go


def _one_kernel(launch: Launch, template: Any, count: int, threads: int, stepwise: Any) -> Any:
    """The kernel makes its own parameter struct, starts torch's threads and combines.

    In Python those steps take 2 us, and 40 between the layers of a model, whose weights push them out of the caches:
    a decode step of SmolLM2 over 1500 keys went from 1.3x to 1.6x of SDPA's speed (two threads, attention alone).
    """
    wanted = ["worker", *["combine"] * bool(launch.partial_bytes), *["thread_main"] * (threads > 1)]
    for name in wanted:
        template[INDEX[name]] = compiler.function(name)
    template[INDEX["threads"]] = threads
    if threads > 1:
        template[INDEX["parallel"]] = address_of(pool.parallel)
    parts = -(-count * launch.partial_bytes // 64) * 64
    size = BLOCK_BYTES + TASK_BYTES + parts + launch.scratch
    relaunch, scratch, start = compiler.entry("relaunch"), pool.scratch, template.ctypes.data

    def call(memories: int, q: Any, k: Any, v: Any, out: Any, lse: Any, k_scales: Any, v_scales: Any) -> None:
        relaunch(start, scratch(size), memories, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(),
              0 if lse is None else lse.data_ptr(), 0 if k_scales is None else k_scales.data_ptr(),
              0 if v_scales is None else v_scales.data_ptr())  # fmt: skip

    def alone(q: Any, k: Any, v: Any, out: Any, lse: Any, k_scales: Any = None, v_scales: Any = None) -> None:
        call(0, q, k, v, out, lse, k_scales, v_scales)

    def go(q: Any, k: Any, v: Any, out: Any, lse: Any, k_scales: Any = None, v_scales: Any = None) -> None:
        if pool.parallel is None:  # a forked child
            stepwise(q, k, v, out, lse, k_scales, v_scales)
        elif not pool.busy.acquire(blocking=False):
            call(0, q, k, v, out, lse, k_scales, v_scales)
        else:
            try:
                call(pool.memories(threads, launch.scratch), q, k, v, out, lse, k_scales, v_scales)
            finally:
                pool.busy.release()

    return alone if threads < 2 else go


def _stepwise(launch: Launch, template: Any, count: int) -> Any:
    """The steps of `launch.run`, on a copy of its parameter struct."""
    numbers = ctypes.c_int64 * len(template)
    places = [INDEX[name] for name in ("q", "k", "v", "out", "lse", "k_scales", "v_scales")]
    counter_at, partials_at = INDEX["counter"], INDEX["partials"]

    def go(q: Any, k: Any, v: Any, out: Any, lse: Any, k_scales: Any = None, v_scales: Any = None) -> None:
        params = numbers.from_buffer_copy(template)  # a struct of its own: threads may make the same call at once
        address = ctypes.addressof(params)
        for at, x in zip(places, (q, k, v, out, lse, k_scales, v_scales), strict=True):
            params[at] = 0 if x is None else x.data_ptr()
        params[counter_at] = address + 8 * COUNTER
        if launch.partial_bytes:
            partials = torch.empty(count * launch.partial_bytes, dtype=torch.uint8, device="cpu")
            params[partials_at] = partials.data_ptr()
        run_items(launch, address, count)

    return go
