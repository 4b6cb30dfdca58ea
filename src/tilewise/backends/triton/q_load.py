"""Loads rows of q as operands of the products with K."""

import triton.language as tl

import triton

from .kv_load import (
    UNIT,
    first_of,
    group_of,
    groups_of,
    half_of,
    keys_of,
    parts_of,
    power_of_two,
    rest_type,
    rest_width,
    start_of,
    unit_of,
    width_of,
    work_type,
)
from .scale_groups import own_group


@triton.jit
def load_rows(base, ok, S: tl.constexpr):
    """Rows of q in the chunks of K, a tuple of [BM, W], and the factor of each row's dot products [BM].

    `base` [BM] points to each row. To be multiplied by quantised keys in float16, bfloat16 rows are scaled to a largest
    magnitude of 2**14: what then underflows in float16 is under 2**-28 of it.
    """
    OP: tl.constexpr = keys_of(S)
    raw = ()
    top = ok.to(tl.float32) * 0.0
    for i in tl.static_range(len(OP.widths)):
        for part in tl.static_range(parts_of(OP)):
            d = tl.arange(0, width_of(OP, i))
            inside = ok[:, None] & (d < OP.columns - first_of(OP, i))[None, :]
            x = tl.load(base[:, None] + start_of(OP, i, part) + d[None, :] * unit_of(OP), mask=inside, other=0.0)
            raw = raw + (x,)
            if OP.rescaled:
                top = tl.maximum(top, tl.max(tl.abs(x.to(tl.float32)), 1))
    factor = tl.maximum(power_of_two(top), 1e-30) * (1.0 / 16384.0)
    chunks = ()
    for i in tl.static_range(len(OP.widths) * parts_of(OP)):
        x = raw[i]
        if OP.row_groups > 1:
            x = tl.where(own_group(S.BM, i // OP.parts, i % OP.parts, OP), x, 0.0)
        if OP.rescaled:
            x = x.to(tl.float32) / factor[:, None]
            if OP.biased and half_of(OP, i % OP.parts) == 1:
                x = x * (1.0 / 16.0)  # for high nibbles, which are 16 times as large
        x = x.to(work_type(OP))
        if S.negate:
            x = -x
        chunks = chunks + (x,)
    if OP.rest > 0:  # in the unit of the other chunks; exact, as it is a power of two
        d = tl.arange(0, rest_width(OP))
        inside = ok[:, None] & (d < OP.rest)[None, :]
        x = tl.load(base[:, None] + OP.columns * OP.unit + d[None, :], mask=inside, other=0.0).to(tl.float32)
        if OP.rescaled:
            x = x / factor[:, None]
        if S.negate:
            x = -x
        chunks = chunks + (x.to(rest_type(S)),)
    if OP.biased:
        factor = factor * UNIT  # finite for rows of up to 2**117
    return chunks, factor


@triton.jit
def key_bias(q, S: tl.constexpr):
    """Initial accumulators for biased keys, one [BM] for each scale group: minus 8 times the sum of q."""
    OP: tl.constexpr = keys_of(S)
    BM: tl.constexpr = S.BM
    biases = ()
    if OP.biased:
        for g in tl.static_range(groups_of(OP)):
            total = tl.zeros([BM], tl.float32)
            for i in tl.static_range(len(OP.widths)):
                for part in tl.static_range(parts_of(OP)):
                    if group_of(OP, i, part) == g:
                        x = tl.sum(q[i * OP.parts + part].to(tl.float32), 1)
                        if half_of(OP, part) == 1:
                            x = x * 16.0
                        total += x
            biases = biases + (total * (-8.0 / UNIT),)
    return biases
