"""One step of the online softmax: a tile of BK keys against BM query rows.

    s   = q k^T                        [BM, BK], one dot product for each chunk of the head dim
    m'  = max(m, rowmax s)             running maximum
    p   = exp(s - m')                  in base 2
    l   = l exp(m - m') + rowsum p     running sum
    acc = acc exp(m - m') + p v        [BM, W] for each chunk of the value dim

Linear kernels (no softcap, ALiBi or additive mask) keep m in units of the dot product and fold scale and log2(e) into
one multiply-add for each cell; the others keep logits in natural units, where the least finite bias stays finite.
"""

import triton.language as tl

import triton

from ..gpu.mask_rules import key_position
from .dequant import widened
from .dropout import dropped, kept_cells
from .kv_load import (
    chosen_rows,
    element_scales,
    ends,
    find_pages,
    group_of,
    keys_of,
    leads,
    load_chunk,
    load_rest,
    parts_of,
    power_of_two,
    precision_of,
    rest_precision,
    rest_type,
    round_type,
    row_offsets,
    row_scales,
    tile_rows,
    values_of,
    work_type,
)
from .mask import select_visible
from .mod_operations import apply_mods
from .scale_folding import raised_unit, row_maxima, value_scale, value_scales
from .scale_groups import group_scales, group_sums
from .score_mod import LOG2E, logits, rank_one


@triton.jit
def product(a, b, c, PRECISION: tl.constexpr, FLIP: tl.constexpr):
    """a b + c, [BM, N]. With FLIP it is computed as the transposed product b^T a^T, and `b` is given transposed: MMA
    has tiles of 16 rows but 8 columns, so the few rows of `a` become columns.
    """
    if FLIP:
        d = tl.trans(tl.dot(b, tl.trans(a), tl.trans(c), input_precision=PRECISION))
    else:
        d = tl.dot(a, b, c, input_precision=PRECISION)
    return d


@triton.jit
def transposed(x, FLIP: tl.constexpr):
    """Keys [BK, W] as the operand `b` of `product`."""
    if not FLIP:
        x = tl.trans(x)
    return x


@triton.jit
def dot_keys(
    q, bias, K, KS, rows, scale_rows, ok,
    BM: tl.constexpr, BK: tl.constexpr, OP: tl.constexpr, S: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """q k^T [BM, BK], the loaded chunks of K, and its scales as from `value_scales`. A scale that a row's whole chunk
    shares is applied to the dot product, not to the keys.
    """
    FLIP: tl.constexpr = S.flip
    s = tl.zeros([BM, BK], tl.float32)
    chunks = ()
    scales = ()
    for i in tl.static_range(len(OP.widths)):
        raw = load_chunk(K, rows, ok, i, OP, MASKED, False)  # [BK, W]
        chunks = chunks + (raw,)
        for part in tl.static_range(parts_of(OP)):
            if OP.rounds and i > 0:
                # Tensor cores truncate when they accumulate, so chunks are added outside, rounded; by fma, since
                # Triton would merge a dot and an addition into one accumulating dot.
                d = product(
                    q[i],
                    transposed(raw.to(work_type(OP)), FLIP),
                    tl.zeros([BM, BK], tl.float32),
                    precision_of(OP),
                    FLIP,
                )
                s = tl.fma(d, tl.full([BM, BK], 1.0, tl.float32), s)
            elif OP.kind == "plain":
                s = product(q[i], transposed(raw.to(work_type(OP)), FLIP), s, precision_of(OP), FLIP)
            elif OP.factored:
                k = widened(raw, part, OP, work_type(OP))
                if leads(OP, i, part):
                    d = tl.zeros([BM, BK], tl.float32)
                    if OP.biased:
                        d += bias[group_of(OP, i, part)][:, None]
                d = product(q[i * OP.parts + part], transposed(k, FLIP), d, precision_of(OP), FLIP)
                if ends(OP, i, part) and OP.row_groups > 1:
                    scale = group_scales(KS, scale_rows, ok, BM, OP, MASKED)  # [BM, BK]
                    scales = scales + (scale,)
                    s = group_sums(d * scale, BM, BK, OP.row_groups)
                elif ends(OP, i, part):
                    scale = row_scales(KS, scale_rows, ok, group_of(OP, i, part), MASKED)[None, :]  # [1, BK]
                    scales = scales + (scale,)
                    if group_of(OP, i, part) == 0:
                        s = d * scale
                    else:
                        s = tl.fma(d, tl.broadcast_to(scale, [BM, BK]), s)
            else:
                scale = element_scales(KS, scale_rows, ok, i, part, OP, MASKED)  # [BK, W]
                k = (widened(raw, part, OP, tl.float32) * scale).to(work_type(OP))
                s = product(q[i * OP.parts + part], transposed(k, FLIP), s, precision_of(OP), FLIP)
    if OP.rest > 0:
        k = load_rest(K, rows, ok, OP, rest_type(S), MASKED)
        s = product(q[len(OP.widths) * OP.parts], transposed(k, FLIP), s, rest_precision(S), FLIP)
    return s, chunks, scales


@triton.jit
def nonfinite_terms(value, visible):
    """What NaN and infinite values add to the rows that see them: [BM, W] of 0, +-inf or NaN.

    One dot product counts them: 1 for +inf, 256 for -inf, both for NaN.
    """
    code = tl.where(value > 0, 1.0, tl.where(value < 0, 256.0, 257.0))
    code = tl.where(value - value == 0, 0.0, code)
    hits = tl.dot(visible.to(tl.float16), code.to(tl.float16)).to(tl.int32)
    up = tl.where(hits % 256 > 0, float("inf"), 0.0)
    return up + tl.where(hits >= 256, float("-inf"), 0.0)


@triton.jit
def add_values(
    acc, p, alpha, visible, V, VS, rows, scale_rows, ok, scales, chunks,
    S: tl.constexpr, MASKED: tl.constexpr, CLEAN: tl.constexpr,
):  # fmt: skip
    """acc * alpha + p v, chunk by chunk; V in K is in `chunks`. CLEAN keeps NaN and Inf from rows that do not see them.

    Weights are rounded to q's type, and multiplied in a type that holds both weights and values.
    """
    OP: tl.constexpr = values_of(S)
    result = ()
    for i in tl.static_range(len(OP.widths)):
        if S.v_in_k:
            raw = chunks[i]
            if S.flip:
                raw = tl.trans(raw)
        else:
            raw = load_chunk(V, rows, ok, i, OP, MASKED, S.flip)  # [BK, W], flipped [W, BK]
        for part in tl.static_range(parts_of(OP)):
            old = acc[i * OP.parts + part] * alpha[:, None]
            if OP.kind == "plain":
                v = raw.to(work_type(OP))
                weights = p.to(round_type(S)).to(work_type(OP))
                if CLEAN:
                    value = raw.to(tl.float32)
            elif S.folded:
                # Fold scales into the weights, which are fewer than the values.
                if leads(OP, i, part):
                    weights = (p * scales[group_of(OP, i, part)]).to(work_type(OP))
                v = widened(raw, part, OP, work_type(OP))
            elif OP.factored and S.round != "f32":
                # The same, in the unit of each row's own weights, since some keys may be hidden.
                if leads(OP, i, part):
                    scale = value_scale(VS, scale_rows, ok, group_of(OP, i, part), scales, S, MASKED)  # [1, BK]
                    weights = p * scale
                    if CLEAN:
                        weights = p * tl.where(scale - scale == 0, scale, 0.0)
                    power = power_of_two(tl.max(tl.abs(weights), 1))[:, None]  # [BM, 1]
                    weights = (weights * (1.0 / power)).to(work_type(OP))
                v = widened(raw, part, OP, work_type(OP))
                if CLEAN:
                    value = v.to(tl.float32) * tl.trans(scale)
            else:
                if OP.factored:
                    scale = tl.trans(value_scale(VS, scale_rows, ok, group_of(OP, i, part), scales, S, MASKED))
                else:
                    scale = element_scales(VS, scale_rows, ok, i, part, OP, MASKED)
                value = widened(raw, part, OP, tl.float32) * scale
                v = value.to(round_type(S)).to(work_type(OP))
                weights = p.to(round_type(S)).to(work_type(OP))
            if CLEAN:
                v = tl.where(value - value == 0, v, 0.0).to(work_type(OP))
            if OP.kind != "plain" and OP.factored and S.round != "f32" and not S.folded:
                new = old + tl.dot(weights, v) * power
            else:
                new = product(weights, v, old, precision_of(OP), S.flip)
            if CLEAN:
                new += nonfinite_terms(value, visible)
            result = result + (new,)
    return result


@triton.constexpr_function
def halvings(n):
    """Halvings from `n` columns to 8."""
    return n.bit_length() - 4


@triton.jit
def row_sum(x, BM: tl.constexpr, BK: tl.constexpr):
    """Row sums of x [BM, BK] in a fixed order: a tree of pairwise additions.

    A plain `tl.sum` follows the register layout, which differs from loop to loop. A tile computed by another loop
    (mixed or full, fix-up) would then differ in the last bit. Column bits that the MMA layout keeps within a thread
    are reduced first: all but bits 1 and 2.
    """
    for _ in tl.static_range(halvings(BK)):
        x = tl.sum(tl.reshape(x, [BM, 2, x.shape[1] // 2]), 1)
    x = tl.sum(tl.reshape(x, [BM, 4, 2]), 2)
    x = tl.sum(tl.reshape(x, [BM, 2, 2]), 1)
    return tl.sum(x, 1)


@triton.jit
def column_sums(x, BM: tl.constexpr, BK: tl.constexpr, N: tl.constexpr):
    """Sums over every N-th column of x [BM, BK]: [BM, N]. With 32 of them, threads exchange nothing."""
    if BK > N:
        x = tl.sum(tl.reshape(x, [BM, BK // N, N]), 1)
    return x


@triton.jit
def step(
    state, q, t, mixed, rows, keys, values, mask, scale, softcap, lo, hi,
    S: tl.constexpr, MASKED: tl.constexpr, CLEAN: tl.constexpr,
):  # fmt: skip
    """Adds key tile `t` to `state` = (m, l, acc, power, pages). MASKED: cells may be hidden; with a list of tiles, only
    if `mixed`. `power`: the unit of acc (`scale_folding.py`).

    `rows` = (row_lo, row_hi, qpos, slope, factor, bias), each [BM], the rules' numbers, what `rank_one`, functions of
    the user and `kept_cells` take; `keys`, `values` = base, scales and strides. Only keys `lo .. hi`, those that any
    row sees, are loaded. `pages`: prefetched page numbers of tile `t`. With key or block indices, a tile is a range of
    positions in these.
    """
    BM: tl.constexpr = S.BM
    BK: tl.constexpr = S.BK
    m, l, acc, power, pages = state
    K, KS, k_b, k_l, ks_b, ks_l, TABLE, INDICES, count = keys
    V, VS, v_b, v_l, vs_b, vs_l = values
    row_lo, row_hi, qpos, slope, factor, bias, numbers, added, user, drop = rows
    n0 = t * BK
    if S.chosen > 0:
        n, ok, where = chosen_rows(n0, lo, hi, count, INDICES, TABLE, S)
    else:
        n = n0 + tl.arange(0, BK)
        ok = (n >= lo) & (n < hi)  # [BK]
        if S.prefetch and not CLEAN:
            found = pages
            pages = find_pages(n0 + BK, hi, TABLE, S, True)
        else:
            found = find_pages(n0, hi, TABLE, S, MASKED)
        where = tile_rows(n0, found, S)
    k_rows = row_offsets(where, k_b, k_l, S.align, S)
    ks_rows = row_offsets(where, ks_b, ks_l, S.scale_align, S)
    s, chunks, scales = dot_keys(q, bias, K, KS, k_rows, ks_rows, ok, BM, BK, keys_of(S), S, MASKED)  # [BM, BK]
    if not S.linear:
        if S.keys.rescaled:
            s = s * factor[:, None]
        kpos = key_position(n, numbers, S)[None, :]
        s = logits(s, scale, softcap, qpos[:, None], kpos, slope, S.softcap, S.exact_tanh, S.alibi)
    if S.biased:
        sum_of_biases = rank_one(n, ok, added, S)
        s = s + sum_of_biases
    visible = ok[None, :]
    cells = user
    if S.mods is not None:
        b, heads, captured = user
        cells = (b, heads, qpos[:, None], key_position(n, numbers, S)[None, :], captured)
    if MASKED:
        if S.listed and S.mods is None and not CLEAN:
            if mixed:
                s, _ = select_visible(s, n, ok, row_lo, row_hi, mask, cells, S)
        else:
            s, visible = select_visible(s, n, ok, row_lo, row_hi, mask, cells, S)
    elif S.mods is not None:
        s, visible = apply_mods(s, visible, cells, S)
        s = tl.where(visible, s, float("-inf"))
    if S.biased:  # after a mask, which may hold anything where a bias is -inf
        left = sum_of_biases != float("-inf")
        s = tl.where(left, s, float("-inf"))
        visible = visible & left

    vs_rows = row_offsets(where, vs_b, vs_l, S.scale_align, S)
    if S.folded:
        scales, size = value_scales(VS, vs_rows, ok, scales, S, MASKED)
        m_new, size = row_maxima(s, size, BM, BK)
        power, inverse, change = raised_unit(power, size)
    else:
        m_new = tl.max(s, 1)
    m_new = tl.maximum(m, m_new)  # [BM]
    base = tl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen yet: -inf - -inf would be NaN
    if S.linear:
        c = unit_of_m(scale, factor, S) * LOG2E
        p = tl.exp2(tl.fma(s, column(c, S), (-(base * c))[:, None]))
        alpha = tl.exp2((m - base) * c)
    else:
        p = tl.exp2((s - base[:, None]) * LOG2E)
        alpha = tl.exp2((m - base) * LOG2E)
    if S.guard == "":  # no tile is ever recomputed by another loop
        if S.sum_columns > 0:
            l = l * alpha[:, None] + column_sums(p, BM, BK, S.sum_columns)
        else:
            l = l * alpha + tl.sum(p, 1)
    else:
        l = l * alpha + row_sum(p, BM, BK)
    v_rows = row_offsets(where, v_b, v_l, S.align, S)
    weights = p
    if S.dropout:
        weights = dropped(p, kept_cells(drop, n0, n, qpos, numbers, S), S)
    if S.folded:
        weights = weights * inverse[:, None]
        alpha = alpha * change
    acc = add_values(acc, weights, alpha, visible, V, VS, v_rows, vs_rows, ok, scales, chunks, S, MASKED, CLEAN)
    return m_new, l, acc, power, pages


@triton.jit
def unit_of_m(scale, factor, S: tl.constexpr):
    """The factor from m of a linear kernel to natural units: a scalar, or one for each row [BM]."""
    if S.keys.rescaled:
        unit = scale * factor
    else:
        unit = scale
    return unit


@triton.jit
def column(x, S: tl.constexpr):
    if S.keys.rescaled:
        x = x[:, None]
    return x
