"""Appends rows of K and V to a cache, converted or quantised, in one pass.

One program for each token and KV head. It finds its token's sequence b in the cumulative counts, then position
p = starts[b] + i, then slot p % wrap of row b or of page table[b, p // wrap]; tokens past the last sequence are
skipped. A row stays in registers: the largest magnitude of each scale group gives its scale, the row is divided by it,
rounded, and written with its scales. Divisions are correctly rounded, so that the bytes are those of
`Quantised.from_float`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl

import triton

from ...core import storage
from ...core.private.triton import INTERPRETED
from ...core.storage import as_bytes
from ..gpu.flags import ceil_pow2
from ..gpu.kernel import Arguments, Kernel, stride_arguments
from ..gpu.launch_program import LaunchProgram, Recorder, launch_and_record
from ..gpu.launcher import is_aligned
from .dequant import bfloat16_bits, is_packed, largest_of, stored, stored_pair
from .kv_load import LATENT, LATENT_SCALES, scales_in_row

TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32
MOST = tl.constexpr(storage.MOST)


@triton.jit  # type: ignore[untyped-decorator]
def scale_of(x, mine, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scale of a group of elements."""
    top = tl.max(tl.where(mine, tl.abs(x), 0.0), 0)
    top = tl.where((top > MOST) & (top < float("inf")), MOST, top)
    wrong = tl.max((mine & (x != x)).to(tl.int32), 0)
    return tl.where(wrong > 0, float("nan"), tl.div_rn(top, LARGEST))


@triton.jit  # type: ignore[untyped-decorator]
def put_row(  # type: ignore[no-untyped-def]
    SOURCE, TO, SCALES, D: tl.constexpr, W: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr
):
    """Converts or quantises one row of a head, and stores it. W is a power of two that covers D."""
    d = tl.arange(0, W)  # [W]
    x = tl.load(SOURCE + d, mask=d < D, other=0.0)
    if KIND == "plain":
        tl.store(TO + d, x.to(TO.dtype.element_ty), mask=d < D)
    elif KIND == "fp8_latent":
        x = x.to(tl.float32)
        by = tl.full([W], 1.0, tl.float32)
        for g in tl.static_range(LATENT // GROUP):
            scale = scale_of(x, d // GROUP == g, largest_of(KIND))
            tl.store(scales_in_row(TO) + g, scale)
            by = tl.where(d // GROUP == g, tl.where(scale < TINY, TINY, scale), by)
        tl.store(TO + d, stored(tl.div_rn(x, by), "fp8_e4m3"), mask=d < LATENT)
        rest = (TO + LATENT_SCALES + 2 * d - LATENT).to(tl.pointer_type(tl.uint16), bitcast=True)
        tl.store(rest, bfloat16_bits(x), mask=(d >= LATENT) & (d < D))
    else:
        x = x.to(tl.float32)
        HALF: tl.constexpr = D // 2
        LARGEST: tl.constexpr = largest_of(KIND)
        PACKED: tl.constexpr = is_packed(KIND)
        if PACKED:
            high = tl.load(SOURCE + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)
        low_by = tl.full([W], 1.0, tl.float32)
        high_by = tl.full([W], 1.0, tl.float32)
        for g in tl.static_range((D + GROUP - 1) // GROUP):
            mine = d // GROUP == g
            scale = scale_of(x, mine, LARGEST)
            tl.store(SCALES + g, scale)
            by = tl.where(scale < TINY, TINY, scale)
            low_by = tl.where(mine, by, low_by)
            high_by = tl.where((d + HALF) // GROUP == g, by, high_by)
        steps = tl.div_rn(x, low_by)
        if PACKED:
            tl.store(TO + d, stored_pair(steps, tl.div_rn(high, high_by), KIND), mask=d < HALF)
        else:
            tl.store(TO + d, stored(steps, KIND), mask=d < D)


@triton.jit(do_not_specialize=["batch"])  # type: ignore[untyped-decorator]
def append(  # type: ignore[no-untyped-def]
    K, V, K_TO, V_TO, K_SCALES, V_SCALES, STARTS, CU, TABLE,
    k_b, k_h, k_l, v_b, v_h, v_l, kt_b, kt_h, kt_l, vt_b, vt_h, vt_l, ks_b, ks_h, ks_l, vs_b, vs_h, vs_l, table_b,
    batch, wrap, STEPS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, W: tl.constexpr, WV: tl.constexpr,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, K_GROUP: tl.constexpr, V_GROUP: tl.constexpr,
    PACKED: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    # Binary search for the last b with CU[b] <= token; it skips empty sequences.
    b = token * 0
    for step in tl.static_range(STEPS):
        ahead = b + (1 << (STEPS - 1 - step))
        b = tl.where(tl.load(CU + ahead, mask=ahead < batch, other=0x7FFFFFFF) <= token, ahead, b)
    first = tl.load(CU + b)
    i = token - first
    position = tl.load(STARTS + b) + i
    slot = (position % wrap).to(tl.int64)
    outer = b.to(tl.int64)
    new = tl.load(CU + b + 1) - first
    kept = i < new  # tokens past the last sequence belong to none
    if PAGED:
        outer = tl.load(TABLE + outer * table_b + position // wrap, mask=kept, other=0).to(tl.int64)
    else:
        kept = kept & (i >= new - wrap)  # a ring keeps the last `wrap` tokens
    line = b.to(tl.int64)
    row = i.to(tl.int64)
    if PACKED:
        line = line * 0
        row = token.to(tl.int64)
    if kept:
        k_scales = K_SCALES
        v_scales = V_SCALES
        if K_KIND != "plain" and K_KIND != "fp8_latent":
            k_scales = K_SCALES + outer * ks_b + h * ks_h + slot * ks_l
        if V_KIND != "plain" and V_KIND != "fp8_latent":
            v_scales = V_SCALES + outer * vs_b + h * vs_h + slot * vs_l
        put_row(
            K + line * k_b + h * k_h + row * k_l, K_TO + outer * kt_b + h * kt_h + slot * kt_l, k_scales, D, W, K_KIND,
            K_GROUP,
        )  # fmt: skip
        if DV > 0:  # else V is in K
            put_row(
                V + line * v_b + h * v_h + row * v_l, V_TO + outer * vt_b + h * vt_h + slot * vt_l, v_scales, DV, WV,
                V_KIND, V_GROUP,
            )  # fmt: skip


class Append:
    """The writer of one cache; only the source rows and their slots change between calls. See `core/kv_store.py`."""

    def __init__(self, k: Any, v: Any, wrap: int) -> None:
        self.k, self.v, self.wrap = k, v, wrap
        self.heads = k.data.shape[1]
        # Not every GPU has float8: it is written as bytes.
        self.k_to, self.v_to = as_bytes(k.data), as_bytes(v.data)
        self.sizes: Arguments = {"wrap": wrap}
        for name, x in {"kt": self.k_to, "vt": self.v_to, "ks": k.scales, "vs": v.scales}.items():
            self.sizes |= stride_arguments(name, "bhl", x)
        self.constants: dict[str, Any] = {
            "D": k.format.width, "DV": 0 if v.inside else v.format.width,
            "W": ceil_pow2(k.format.width), "WV": ceil_pow2(v.format.width),
            "K_KIND": k.format.name if k.format.is_quantised else "plain", "K_GROUP": k.format.group or 1,
            "V_KIND": v.format.name if v.format.is_quantised else "plain", "V_GROUP": v.format.group or 1,
        }  # fmt: skip
        self.programs: dict[Any, LaunchProgram] = {}

    def __call__(self, k: torch.Tensor, v: torch.Tensor, slots: Any) -> None:
        given = self.tensors(k, v, slots)
        there = [x for x in given if x is not None]
        key = None
        if not INTERPRETED:
            addresses = [x.data_ptr() for x in there]
            if is_aligned(addresses, k.device):
                key = (
                    k.dtype, v.dtype, k.stride(), v.stride(), len(slots.starts), slots.tokens, slots.packed,
                    None if slots.table is None else slots.table.stride(0),
                )  # fmt: skip
                if (program := self.programs.get(key)) is not None:
                    program(addresses)
                    return

        def launch(r: Recorder, own: list[torch.Tensor]) -> None:
            tensors = iter(own)
            kernel, arguments = self.prepare([None if x is None else next(tensors) for x in given], slots.packed)
            r.launch(kernel, (slots.tokens, self.heads), arguments)

        launch_and_record(launch, there, self.programs, key)

    def tensors(self, k: torch.Tensor, v: torch.Tensor, slots: Any) -> tuple[torch.Tensor | None, ...]:
        """The tensors that the kernel takes, in its order."""
        return k, v, self.k_to, self.v_to, self.k.scales, self.v.scales, slots.starts, slots.cu, slots.table

    def prepare(self, tensors: Sequence[Any], packed: bool) -> tuple[Kernel, dict[str, Any]]:
        """The kernel and its arguments; `tensors` are those that it takes, None where there is none."""
        k, v, *_, starts, _, table = tensors
        batch = len(starts)
        kernel = Kernel(
            append,
            {
                **self.constants, "STEPS": max(1, (batch - 1).bit_length()), "PACKED": packed,
                "PAGED": table is not None,
            },
            num_warps=1 if max(self.constants["W"], self.constants["WV"]) <= 128 else 4,
        )  # fmt: skip
        names = ("K", "V", "K_TO", "V_TO", "K_SCALES", "V_SCALES", "STARTS", "CU", "TABLE")
        arguments = dict(zip(names, tensors, strict=True)) | self.sizes
        arguments |= stride_arguments("k", "bhl", k) | stride_arguments("v", "bhl", v)
        return kernel, arguments | {"batch": batch, "table_b": 0 if table is None else table.stride(0)}
