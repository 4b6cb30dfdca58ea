"""One tile of a backward pass: recomputes the weights of BQ queries over BK keys, and the gradients of their logits.

    p  = exp(logits - lse)
    dl = p (dropout(dout v^T) - delta)     of the logits, which additive masks and ALiBi slopes share
    ds = dl (1 - tanh^2)                   of the scaled scores, under a softcap

Tiles are [BQ, BK] for dQ and transposed, [BK, BQ], for dK and dV, so that in both the operand that is summed over is in
registers. The functions take rows and keys in either shape: one of them as a column, the other as a row.
"""

import triton.language as tl

import triton

from ...gpu.mask_rules import key_position, key_span, query_position
from ..dropout import dropped, kept_cells
from ..kv_load import first_of, precision_of, width_of, work_type
from ..mask import tree_cells, visible_cells
from ..mod_operations import differentiate_mods
from ..score_mod import LOG2E, tanh
from .captured import times
from .load import k_of, load_bias, load_columns, load_numbers, load_tile, v_of


@triton.jit
def add_dot(s, a, b, OP: tl.constexpr, APART: tl.constexpr = False):
    """s + a b. Tensor cores truncate when they accumulate, so float32 products are added outside, rounded; by fma,
    since Triton would merge a dot and an addition into one accumulating dot. APART: other types too.
    """
    if OP.work == "f32" or APART:
        d = tl.dot(a, b, input_precision=precision_of(OP))
        s = tl.fma(d, tl.full(s.shape, 1.0, tl.float32), s)
    else:
        s = tl.dot(a, b, s, input_precision=precision_of(OP))
    return s


@triton.jit
def add_outer(s, a, b, OP: tl.constexpr, S: tl.constexpr):
    """s + a b^T of chunks [M, W] and [N, W]. For few rows as a sum of rounded products, with the error of a tree of
    additions: a torch matmul has no larger error there, but tensor cores have.
    """
    a = a.to(work_type(OP))
    b = b.to(work_type(OP))
    if S.few:
        s += tl.sum(a[:, None, :] * b[None, :, :], 2)
    else:
        s = add_dot(s, a, tl.trans(b), OP)
    return s


@triton.jit
def outer_product(a, b, M: tl.constexpr, N: tl.constexpr, OP: tl.constexpr, S: tl.constexpr):
    """a b^T, [M, N], over the columns of all chunks."""
    s = tl.zeros([M, N], tl.float32)
    if S.reload:
        W: tl.constexpr = width_of(OP, 0)
        for column in tl.range(0, OP.columns, W, num_stages=1):  # not unrolled, or all loads would be issued at once
            s = add_outer(s, load_columns(a, column, W, OP), load_columns(b, column, W, OP), OP, S)
    else:
        for i in tl.static_range(len(OP.widths)):
            s = add_outer(s, a[i], b[i], OP, S)
    return s


@triton.jit
def add_product(acc, a, b, OP: tl.constexpr, S: tl.constexpr):
    """acc + a b, chunk by chunk. In a fix-up, NaN and Inf in b count as 0: where they are seen, `a` is NaN already."""
    result = ()
    for i in tl.static_range(len(acc)):
        if S.reload:
            x = load_columns(b, first_of(OP, i), width_of(OP, i), OP)
        else:
            x = b[i]
        if S.guard == "fixup":
            x = tl.where(x.to(tl.float32) * 0.0 == 0.0, x, 0.0)
        x = x.to(work_type(OP))
        # If a sum were still in flight when the tile's cells are stored, every product would be waited for (C7515).
        result = result + (add_dot(acc[i], a.to(work_type(OP)), x, OP, S.dmask == "cells"),)
    return result


@triton.jit
def hide_cells(s, hidden, qpos, n, ok, at, mask_k, rules, S: tl.constexpr):
    """`hidden` where a cell is not visible by position or by a bool mask. `ok`: rows and keys that exist."""
    _, _, n_keys, numbers = rules
    lo, hi = key_span(qpos, n_keys, numbers, S)
    s, seen = visible_cells(s, n, ok, ok, lo, hi, at, mask_k, S)
    return tl.where(seen, s, hidden)


@triton.constexpr_function
def selects(spec):
    """Whether cells that a float mask hides need a select. Adding -inf alone makes weights 0, or NaN where a score is
    not finite; then a gradient is NaN too, its program sets a flag, and the fix-up recomputes it.
    """
    sums = spec.dq_bias or spec.dk_bias or spec.mods is not None  # these have no flag
    return sums or not (spec.guard == "flag" and spec.dmask != "sums" and (spec.dq or spec.dk or spec.dv))


@triton.constexpr_function
def hides_elsewhere(spec):
    """Whether cells are hidden by position, or do not exist."""
    rules = spec.rules
    return spec.tail or spec.tail_q or rules.hides_left or rules.hides_right


@triton.jit
def seen_cells(bias, qpos, n, ok, rules, S: tl.constexpr):
    """Which cells are visible by position and, if that `selects`, by a float mask."""
    _, _, n_keys, numbers = rules
    lo, hi = key_span(qpos, n_keys, numbers, S)
    seen = tl.full(bias.shape, 1, tl.int1)
    if selects(S):
        seen = bias != float("-inf")
    if S.tail or S.tail_q:
        seen = seen & ok
    if S.rules.hides_right:
        seen = seen & (n < hi)
    if S.rules.hides_left:
        seen = seen & (n >= lo)
    return seen


@triton.jit
def capped(s, scale, softcap, S: tl.constexpr):
    """tanh(scale s / softcap). Of 16-bit calls with usual softcaps as 1 - 2 / (1 + exp(2x)): an absolute error of 1e-7,
    in five instructions.
    """
    if S.round == "f32" or S.exact_tanh:
        y = tanh(s * scale / softcap, S.exact_tanh)
    else:
        factor = tl.minimum(tl.maximum(scale / softcap * (2.0 * LOG2E), -3e38), 3e38)
        e = 1.0 + tl.exp2(s * factor)
        if S.ptx:
            e = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [e], tl.float32, is_pure=True, pack=1)
        else:
            e = 1.0 / e
        y = tl.fma(e, tl.full(e.shape, -2.0, tl.float32), tl.full(e.shape, 1.0, tl.float32))
    return y


@triton.jit
def tile_gradients(
    s, dp, mixed, bias, lse, delta, qpos, n, ok, slope, added, tree, at, mask_k, user, kept, rules, S: tl.constexpr
):  # fmt: skip
    """Of the products `s` = q k^T and `dp` = dout v^T of a tile: weights for dV, gradients of logits, of scores, and of
    the elements that functions of the user load. Logits are those that such functions are given.

    `ok`: rows and keys that exist; `mixed`: not every cell is visible; `bias`: cells of a float mask; `added`: biases
    of rows and keys; `tree`: rows of a tree mask, and its first key; `kept`: the cells that dropout keeps. A hidden
    cell has a weight of 0 and, unless an operand under it is not finite, gradients of 0. In the fix-up its gradients
    are always 0, and the weights for dV of a row whose dout is not finite are NaN, since `add_product` replaces that
    dout by 0.
    """
    scale, softcap, _, numbers = rules
    tree_at, own_keys = tree
    factor = scale
    bent = 1.0
    if S.softcap:
        s = capped(s, scale, softcap, S)
        bent = tl.fma(-s, s, tl.full(s.shape, 1.0, tl.float32))
        factor = softcap
    EARLY: tl.constexpr = S.linear and S.guard != "fixup"  # hide before lse, which may be NaN, is subtracted
    if S.partial and EARLY:
        if mixed:
            s = hide_cells(s, tl.where(scale < 0, float("inf"), float("-inf")), qpos, n, ok, at, mask_k, rules, S)
    # x: logits minus lse, in natural units or in base 2. Biases may be huge, and lse then is too: it is subtracted
    # last.
    NATURAL: tl.constexpr = S.round == "f32" or S.alibi or S.biased or S.mask == "float" or S.mods is not None
    if S.mask == "float":
        bias = bias.to(tl.float32)
    by_score = 1.0
    by_loads = ()
    if S.mods is not None:
        x = s * factor
        if S.alibi:
            x = x - slope * tl.abs(qpos - key_position(n, numbers, S)).to(tl.float32)
        if S.biased:
            x = x + added
        if S.mask == "float":
            x = x + bias
        b, head, captured = user
        cells = (b, head, qpos, key_position(n, numbers, S), captured)
        x, by_score, by_loads = differentiate_mods(x, cells, S)
        x = x - lse
    elif S.alibi:
        x = tl.fma(s, factor, -(slope * tl.abs(qpos - key_position(n, numbers, S)).to(tl.float32)))
        if S.mask == "float":
            x = x + bias
        if S.biased:
            x = x + added
        x = x - lse
    elif S.mask == "float":
        x = tl.fma(s, factor, bias)
        if S.biased:
            x = x + added
        x = x - lse
    elif S.biased:
        x = tl.fma(s, factor, tl.broadcast_to(added, s.shape)) - lse
    elif NATURAL:
        x = tl.fma(s, factor, -lse)  # the difference is small and rounded once
    else:
        x = tl.fma(s, factor * LOG2E, -(lse * LOG2E))
    LAST: tl.constexpr = S.dmask == "sums"  # only dl is needed: select dl, not x
    if LAST:
        seen = seen_cells(bias, qpos, n, ok, rules, S)
        if S.biased:
            seen = seen & (added != float("-inf"))
    elif S.mask == "float":
        if selects(S) or hides_elsewhere(S):
            x = tl.where(seen_cells(bias, qpos, n, ok, rules, S), x, float("-inf"))
    elif S.partial and not EARLY:
        if mixed:
            x = hide_cells(x, float("-inf"), qpos, n, ok, at, mask_k, rules, S)
    if S.biased:
        x = tl.where(added == float("-inf"), float("-inf"), x)
    if S.tree:
        if mixed:
            x = tl.where(tree_cells(tree_at, n - own_keys, ok, False), x, float("-inf"))
    if NATURAL:
        p = tl.exp2(x * LOG2E)
    else:
        p = tl.exp2(x)
    if S.dropout:
        dp = dropped(dp, kept, S)
    dl = p * (dp - delta)
    if LAST:
        if S.tree or S.mods is not None:
            seen = seen & (x != float("-inf"))
        dl = tl.where(seen, dl, 0.0)
    elif S.mods is not None:
        dl = tl.where(x == float("-inf"), 0.0, dl)
    elif (
        S.partial
        and (S.guard == "fixup" or S.dmask != "" or S.dslopes or S.dq_bias or S.dk_bias)
        and not (S.mask == "float" and not selects(S))
    ):
        dl = tl.where(x == float("-inf"), p, dl)  # p is 0 there
    loads = ()
    if S.mods is not None:
        for i in tl.static_range(len(by_loads)):
            loads = loads + (times(dl, by_loads[i]),)
        dl = times(dl, by_score)
    ds = dl
    if S.softcap:
        ds = dl * bent
    if S.guard == "fixup":
        p = tl.where(x == float("-inf"), 0.0, p + delta * 0.0)
        if S.softcap:
            ds = tl.where(x == float("-inf"), 0.0, ds)
    if S.dropout:
        p = dropped(p, kept, S)
    return p, dl, ds, loads


@triton.jit
def query_tile(n0, mixed, bias, rows, keys, rules, S: tl.constexpr):
    """Keys from `n0` on, their indices, and gradients of logits, scores and loads [BQ, BK]. `bias`: a float mask's
    cells; None: load them.
    """
    q, dout, lse, delta, row, row_ok, at, slope, biases, tree, offset, mask_k, user, drop = rows
    K, k_l, V, v_l = keys
    BK: tl.constexpr = S.BK
    n = n0 + tl.arange(0, BK)
    key_ok = n < rules[2]
    if S.diagonal:
        key_ok = key_ok & (n >= 0)
    ok = row_ok[:, None] & key_ok[None, :]
    k = load_tile(K, n0, k_l, key_ok, k_of(S), S, S.tail)
    v = load_tile(V, n0, v_l, key_ok, v_of(S), S, S.tail)
    if S.mask == "float" and bias is None:
        bias = load_bias(at[:, None] + tl.cast(n0, tl.int64) * mask_k, tl.arange(0, BK)[None, :], mask_k, ok, S)
    own, keys_at, stride = biases
    added = own[:, None]
    if S.k_bias:
        added = added + load_numbers(keys_at, n, stride, key_ok, S.tail)[None, :]
    s = outer_product(q, k, S.BQ, BK, k_of(S), S)  # [BQ, BK]
    dp = outer_product(dout, v, S.BQ, BK, v_of(S), S)
    qpos = query_position(offset, row, rules[3], S)
    kept = ok
    if S.dropout:
        kept = kept_cells(drop, n0, n, qpos, rules[3], S)
    _, dl, ds, loads = tile_gradients(
        s, dp, mixed, bias, lse[:, None], delta[:, None], qpos[:, None], n[None, :],
        ok, slope, added, (tree[0][:, None], tree[1]), at[:, None], mask_k, user, kept, rules, S,
    )  # fmt: skip
    return k, n, dl, ds, loads
