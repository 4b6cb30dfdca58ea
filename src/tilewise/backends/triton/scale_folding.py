"""Scale folding: scales of quantised values are multiplied into the weights, which are fewer than the values.

The folded weights are float16, and a scale may be any float32. So acc is kept in units of `power`, a power of two that
follows the largest scale so far: weights are at most 8192 units, and what underflows float16's normal range is under
2**-27 of that. Otherwise it is exact, since units are powers of two.

Only where no key is hidden: a hidden key's scale must not affect a row (`Spec.folded`).
"""

import triton.language as tl

import triton

from .kv_load import groups_of, is_interpreted, power_of_two, row_scales, values_of
from .scale_groups import group_scales

LEAST_SCALE = tl.constexpr(2.0**-100)  # so that the unit and its inverse are normal numbers


@triton.jit
def inverse_power(x):
    """1 / x of a power of two; 0 for infinity."""
    bits = tl.maximum(0x7F000000 - x.to(tl.int32, bitcast=True), 0)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def larger(a, b, c, d):
    return tl.maximum(a, c), tl.maximum(b, d)


@triton.jit
def row_maxima(s, size, BM: tl.constexpr, BK: tl.constexpr):
    """Row maxima of `s` and of `size` [1 or BM, BK], both [BM], by one reduction, which shares its barriers.

    Not in the interpreter, which would take a second for each.
    """
    if is_interpreted():
        row_max = tl.max(s, 1)
        most = tl.max(tl.broadcast_to(size, [BM, BK]), 1)
    else:
        row_max, most = tl.reduce((s, tl.broadcast_to(size, [BM, BK])), 1, larger)
    return row_max, most


@triton.jit
def value_scale(VS, rows, ok, group: tl.constexpr, of_keys, S: tl.constexpr, MASKED: tl.constexpr):
    """The scales of one group of a tile's values, [1, BK]; [BM, BK] with row groups. V in K has those of K."""
    if S.v_in_k:
        scale = of_keys[group]
    elif S.row_groups > 1:
        scale = group_scales(VS, rows, ok, S.BM, values_of(S), MASKED)
    else:
        scale = row_scales(VS, rows, ok, group, MASKED)[None, :]
    return scale


@triton.jit
def value_scales(VS, rows, ok, of_keys, S: tl.constexpr, MASKED: tl.constexpr):
    """The scales of all groups, and the largest magnitude of each row of V."""
    scales = ()
    for g in tl.static_range(groups_of(values_of(S))):
        scale = value_scale(VS, rows, ok, g, of_keys, S, MASKED)
        scales = scales + (scale,)
        if g == 0:
            size = tl.abs(scale)
        else:
            size = tl.maximum(size, tl.abs(scale))
    return scales, size


@triton.jit
def raised_unit(power, size):
    """The new unit of acc, from the old one `power`: a 4096th of `size` or more. Also its inverse, and the rescale
    factor of acc. All [BM].
    """
    new = tl.maximum(power, power_of_two(tl.maximum(size, LEAST_SCALE)) * (1.0 / 4096))
    inverse = inverse_power(new)
    return new, inverse, power * inverse


@triton.jit
def unfolded(acc, power):
    """acc in units of 1."""
    result = ()
    for i in tl.static_range(len(acc)):
        result = result + (acc[i] * power[:, None],)
    return result
