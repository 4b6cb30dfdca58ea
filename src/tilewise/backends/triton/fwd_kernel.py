"""The forward kernel: attention of one tile of query rows over the keys that it sees, for prefill and decode.

A program owns BM rows: BM // pack queries times `pack` query heads of one KV head (pack is 1 in prefill, the group in
decode, so that each key is read once for all heads that share it). Its mainloop goes over key tiles in order, from the
first that any of its rows sees to the last: masked tiles at either end, unmasked ones between them, or the list of
tiles that a dense mask leaves. With key or block indices, a program owns only queries that share their indices, and a
key tile is a range of positions in these. K and V go from global to shared memory by pipelined copies; q, m, l and acc
stay in registers. With `split` (split-KV) the keys are divided among programs, and each writes its partial (m, l, acc);
the last-arriver combines them ("inside"), or `combine.py` does ("after"). With `slices` the value columns are divided:
programs that share rows each compute all scores and a slice of the output.

P V in the fast loops also multiplies values under hidden cells, by zero. If such a value is not finite, acc becomes
NaN; then, and only then, the tile is recomputed by a slower loop that keeps non-finite values from rows that do not see
them (non-finite fix-up). Decode does so in the same kernel ("inside"). In prefill that loop would take registers from
the fast ones: there a program sets a flag ("flag"), and a second launch over the same tiles recomputes the flagged ones
("fixup"); its other programs exit at once.
"""

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

import triton

from ..gpu.mask_rules import key_span, query_position, sequence_numbers, tree_span
from ..gpu.signature import kernel_of
from .arguments import NAMES, SIZES
from .dropout import seed_of
from .epilogue import combine_splits, empty_acc, has_nonfinite, normalise, store_acc
from .kv_load import chosen_places, find_pages, queries_of, scales_in_row, values_of
from .mainloop import step, unit_of_m
from .mask import find_ordered, find_sequence, node_position
from .q_load import key_bias, load_rows
from .scale_folding import LEAST_SCALE, unfolded


@triton.jit
def empty_state(pages, S: tl.constexpr):
    BM: tl.constexpr = S.BM
    SUM_COLUMNS: tl.constexpr = S.sum_columns
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    if S.sum_columns > 0:
        l = tl.zeros([BM, SUM_COLUMNS], tl.float32)
    power = tl.full([BM], LEAST_SCALE / 4096, tl.float32)
    return m, l, empty_acc(values_of(S), BM), power, pages


@kernel_of(NAMES, SIZES, triton.jit)
def fwd_kernel(a, S):
    BM: tl.constexpr = S.BM
    BK: tl.constexpr = S.BK
    PACK: tl.constexpr = S.pack
    BQ: tl.constexpr = queries_of(S)
    if S.pdl:
        gdc_launch_dependents()
    scale = tl.cast(a.scale, tl.float32)  # the interpreter passes a subnormal float32 as float64
    pid = tl.program_id(0)
    split = tl.program_id(1)
    flag = a.FLAGS
    if S.guard == "flag" or S.guard == "fixup":
        flag = a.FLAGS + pid * a.splits + split
    if S.guard == "fixup":
        if tl.load(flag) == 0:
            return
    q_len = a.q_len
    k_b, k_h, k_l, v_b, v_h, v_l = a.k_b, a.k_h, a.k_l, a.v_b, a.v_h, a.v_l
    ks_b, ks_h, ks_l, vs_b, vs_h, vs_l = a.ks_b, a.ks_h, a.ks_l, a.vs_b, a.vs_h, a.vs_l
    if S.grain > 1:
        k_b, k_h, k_l = k_b * S.grain, k_h * S.grain, k_l * S.grain
        v_b, v_h, v_l = v_b * S.grain, v_h * S.grain, v_l * S.grain
    if S.scale_grain > 1:
        ks_b, ks_h, ks_l = ks_b * S.scale_grain, ks_h * S.scale_grain, ks_l * S.scale_grain
        vs_b, vs_h, vs_l = vs_b * S.scale_grain, vs_h * S.scale_grain, vs_l * S.scale_grain
    column = 0  # the first of the value columns that this program computes
    if S.slices > 1:
        column = pid % S.slices * S.values.columns
        pid = pid // S.slices

    # Which tile of which sequence, and which heads.
    if S.packed_q:
        hb = pid % a.head_blocks
        tile = pid // a.head_blocks
        if S.ordered:
            b, before = find_ordered(a.ORDER, tile, a.batch)
            q_start = tl.load(a.CU_Q + b)
            tile -= before
        else:
            b = find_sequence(a.CU_Q, tile, a.batch, BQ)
            q_start = tl.load(a.CU_Q + b)
            tile -= q_start // BQ + b
        owned = b < a.batch
        q_len = tl.load(a.CU_Q + b + 1, mask=owned, other=0)
        q_len = tl.where(owned, q_len, a.total_q) - q_start
        if tile * BQ >= q_len:
            return
        tile = tl.cdiv(q_len, BQ) - 1 - tile  # the last rows of a causal sequence see the most keys
        row_b = b * 0
        b = tl.minimum(b, a.batch - 1)
    else:
        # L2 swizzle groups of planes whose keys fit L2; within a group, the last tiles of all its planes come first.
        tiles = tl.cdiv(q_len, BQ)
        if S.chosen > 0:
            tiles = tl.cdiv(q_len, S.chosen) * tl.cdiv(tl.minimum(q_len, S.chosen), BQ)
        first = pid // (a.swizzle * tiles) * a.swizzle
        width = tl.minimum(a.swizzle, a.batch * a.head_blocks - first)
        rank = pid % (a.swizzle * tiles)
        plane = first + rank % width
        tile = tiles - 1 - rank // width
        b = plane // a.head_blocks
        hb = plane % a.head_blocks
        q_start = b * 0
        row_b = b
        owned = b < a.batch

    # The sequence's keys and positions.
    n_keys = a.kv_len
    if S.varlen:
        kv_start = tl.load(a.CU_K + b)
        n_keys = tl.load(a.CU_K + b + 1) - kv_start
    if S.rules.lengths:
        n_keys = tl.load(a.KV_LENGTHS + b)
    offset = a.q_offset
    if S.rules.offset == "rows":
        offset = tl.load(a.Q_OFFSET + b)
    if S.rules.offset == "end":
        offset = n_keys - q_len
    if S.packed_q:
        n_keys = tl.where(owned, n_keys, 0)

    top_row = tile * BQ
    end_row = q_len
    if S.chosen > 1:  # rows of one block of queries, which share indices
        each = tl.cdiv(tl.minimum(q_len, S.chosen), BQ)
        top_row = tile // each * S.chosen + tile % each * BQ
        end_row = tl.minimum(q_len, tile // each * S.chosen + S.chosen)
        if top_row >= end_row:
            return
    r = tl.arange(0, BM) // S.row_groups
    row = top_row + r // PACK  # [BM]
    head = hb * PACK + r % PACK  # [BM]
    row_ok = row < end_row
    if BM // S.row_groups % PACK != 0 or S.chosen > 0:
        row_ok = row_ok & (r // PACK < BQ)
    kv_head = (hb * PACK // S.group).to(tl.int64)
    numbers = sequence_numbers(a.rules, a.PLACES, b, S)
    qpos = query_position(offset, row, numbers, S)
    row_lo, row_hi = key_span(qpos, n_keys, numbers, S)  # [BM]
    top = query_position(offset, top_row, numbers, S)
    bottom = query_position(offset, tl.minimum(top_row + BQ, end_row) - 1, numbers, S)
    lo, full_hi = key_span(top, n_keys, numbers, S)
    full_lo, hi = key_span(bottom, n_keys, numbers, S)
    own_keys = n_keys - q_len  # the first key that a tree mask covers
    nodes = row  # a placeholder: tuples passed to functions cannot hold None
    if S.positions:
        nodes = a.POSITIONS + b.to(tl.int64) * a.positions_b
        qpos = node_position(nodes, row, row_ok, own_keys)  # [BM]
        row_lo, row_hi = tree_span(qpos, n_keys, own_keys, numbers, S)
        lo, hi = tl.min(tl.where(row_ok, row_lo, n_keys), 0), n_keys
        full_lo, full_hi = tl.max(tl.where(row_ok, row_lo, 0), 0), n_keys
    if S.tree:
        full_hi = tl.minimum(full_hi, tl.maximum(own_keys, 0))

    indices = a.K
    # Tiles first_t .. last_t hold all keys that any row sees; in inner .. outer every row sees every key.
    first_t = lo // BK
    last_t = tl.maximum(tl.cdiv(hi, BK), first_t)
    if S.chosen > 0:
        line = ((q_start + top_row) // S.chosen).to(tl.int64)
        indices = a.INDICES + row_b.to(tl.int64) * a.indices_b + kv_head * a.indices_h + line * a.indices_l
        first_t = tile * 0
        last_t = first_t + tl.cdiv(a.chosen_keys, BK)
        if S.chosen > 1:
            last_t = tl.cdiv(chosen_places(indices, a.chosen_keys, lo, hi, S), BK)
    if S.split:
        if a.split_tiles > 0:  # fixed, independent of the batch
            first_t = tl.maximum(first_t, split * a.split_tiles)
            last_t = tl.minimum(last_t, (split + 1) * a.split_tiles)
        else:
            share = tl.cdiv(last_t - first_t, a.splits)
            last_t = tl.minimum(last_t, first_t + (split + 1) * share)
            first_t += split * share
        last_t = tl.maximum(first_t, last_t)
    inner = tl.minimum(tl.maximum(tl.cdiv(full_lo, BK), first_t), last_t)
    outer = tl.maximum(tl.minimum(full_hi // BK, last_t), inner)

    wide_b = b.to(tl.int64)
    wide_row = row.to(tl.int64)
    wide_head = head.to(tl.int64)
    q_at = a.Q + row_b.to(tl.int64) * a.q_b + (q_start + wide_row) * a.q_l + wide_head * a.q_h  # [BM]
    q, factor = load_rows(q_at, row_ok, S)
    slope = 0.0
    if S.alibi:
        slope = tl.load(a.SLOPES + b * a.slopes_b + head)[:, None]  # [BM, 1]
    k_base = a.K + kv_head * k_h
    v_base = a.V + kv_head * v_h + column
    ks_base = k_base
    vs_base = v_base
    table = k_base
    if S.keys.kind != "plain" and not S.keys.in_row:
        ks_base = a.K_SCALES + kv_head * ks_h
    if S.values.kind != "plain" and not S.values.in_row:
        vs_base = a.V_SCALES + kv_head * vs_h
    if S.page > 0:
        table = a.TABLE + wide_b * a.table_b
    elif S.varlen:
        k_base += kv_start.to(tl.int64) * k_l
        v_base += kv_start.to(tl.int64) * v_l
        ks_base += kv_start.to(tl.int64) * ks_l
        vs_base += kv_start.to(tl.int64) * vs_l
    else:
        k_base += wide_b * k_b
        v_base += wide_b * v_b
        ks_base += wide_b * ks_b
        vs_base += wide_b * vs_b
    if S.keys.in_row:
        ks_base = scales_in_row(k_base, S.keys.unit)
        ks_b, ks_l = k_b * S.keys.unit // 4, k_l * S.keys.unit // 4
    if S.values.in_row:
        vs_base = scales_in_row(v_base, S.values.unit)
        vs_b, vs_l = v_b * S.values.unit // 4, v_l * S.values.unit // 4
    own = 0.0
    if S.q_bias:
        at = a.Q_BIAS + row_b.to(tl.int64) * a.qb_b + (q_start + wide_row) * a.qb_l + wide_head * a.qb_h
        own = tl.load(at, mask=row_ok, other=0.0)[:, None]  # [BM, 1]
    added = (own, row, row_ok, a.kb_l)
    if S.k_bias:
        at = a.K_BIAS + hb.to(tl.int64) * a.kb_h
        if PACK > 1:
            at = a.K_BIAS + wide_head * a.kb_h
        if S.varlen:
            at += kv_start.to(tl.int64) * a.kb_l
        else:
            at += wide_b * a.kb_b
        added = (own, at, row_ok, a.kb_l)
    heads = hb
    if PACK > 1:
        heads = head[:, None]  # [BM, 1]
    user = (b, heads, a.captured)
    drop = (seed_of(a.SEED, S), b, heads)
    rows = (row_lo, row_hi, qpos, slope, factor, key_bias(q, S), numbers, added, user, drop)
    keys = (k_base, ks_base, k_b, k_l, ks_b, ks_l, table, indices, a.chosen_keys)
    values = (v_base, vs_base, v_b, v_l, vs_b, vs_l)
    tree = row
    if S.tree:
        tree = a.TREE + wide_b * a.tree_b + wide_row * a.tree_q  # [BM]
    nodes = (nodes, qpos, numbers)
    mask = (row, row_ok, a.mask_k, tree, own_keys, nodes)
    if S.mask != "":
        at = a.MASK + wide_b * a.mask_b + wide_head * a.mask_h + wide_row * a.mask_q
        mask = (at, row_ok, a.mask_k, tree, own_keys, nodes)

    pages = ()
    if S.prefetch:
        pages = find_pages(first_t * BK, hi, table, S, True)
    state = empty_state(pages, S)
    if S.guard == "fixup":
        for t in tl.range(first_t, last_t, num_stages=1):
            state = step(state, q, t, True, rows, keys, values, mask, scale, a.softcap, lo, hi, S, True, True)
    elif S.listed:
        plane_at = wide_b * a.list_b + hb.to(tl.int64) * a.list_h + tile.to(tl.int64) * a.list_q
        ranks = a.RANK + plane_at * (a.list_n + 1)
        lists = a.LIST + plane_at * a.list_n
        for i in tl.range(tl.load(ranks + first_t), tl.load(ranks + last_t)):
            entry = tl.load(lists + i)
            t = entry >> 1
            mixed = ((entry & 1) != 0) | (t < inner) | (t >= outer)
            state = step(state, q, t, mixed, rows, keys, values, mask, scale, a.softcap, lo, hi, S, True, False)
    elif S.mask != "" or S.chosen > 0:
        for t in tl.range(first_t, last_t):
            state = step(state, q, t, True, rows, keys, values, mask, scale, a.softcap, lo, hi, S, True, False)
    else:
        if S.rules.hides_left:
            for t in tl.range(first_t, inner):
                state = step(state, q, t, True, rows, keys, values, mask, scale, a.softcap, lo, hi, S, True, False)
        for t in tl.range(inner, outer):
            state = step(state, q, t, False, rows, keys, values, mask, scale, a.softcap, lo, hi, S, False, False)
        if S.rules.hides_right or S.tail or S.tree:
            for t in tl.range(outer, last_t):
                state = step(state, q, t, True, rows, keys, values, mask, scale, a.softcap, lo, hi, S, True, False)
    if S.guard == "flag":
        tl.store(flag, has_nonfinite(state[2]).to(tl.int32))
    if S.guard == "inside":
        if has_nonfinite(state[2]):
            state = empty_state(state[4], S)
            for t in tl.range(first_t, last_t, num_stages=1):
                state = step(state, q, t, True, rows, keys, values, mask, scale, a.softcap, lo, hi, S, True, True)

    m, l, acc, power, _ = state
    first_ok = row_ok  # with row groups, only the first row of each q row
    if S.row_groups > 1:
        first_ok = row_ok & (tl.arange(0, BM) % S.row_groups == 0)
    if S.folded:
        acc = unfolded(acc, power)
    if S.sum_columns > 0:
        l = tl.sum(l, 1)
    if S.linear:
        m = tl.where(m == float("-inf"), m, m * unit_of_m(scale, factor, S))
    if S.split:
        # Partials are ordered by output row, then head, then split.
        partial = ((row_b.to(tl.int64) * q_len + q_start + wide_row) * (a.head_blocks * PACK) + head) * a.splits
        tl.store(a.PARTIAL_ML + (partial + split) * 2, m, mask=first_ok)
        tl.store(a.PARTIAL_ML + (partial + split) * 2 + 1, l, mask=first_ok)
        columns: tl.constexpr = S.values.columns * S.values.parts
        store_acc(a.PARTIAL + (partial + split) * columns, acc, row_ok, values_of(S), S.row_groups > 1)
        if S.combine == "inside":
            # The last-arriver combines all partials, and resets the semaphore for the next call.
            tl.debug_barrier()
            done = tl.atomic_add(a.SEMAPHORES + tl.program_id(0), 1, sem="acq_rel", scope="gpu")
            if done != a.splits - 1:
                return
            tl.store(a.SEMAPHORES + tl.program_id(0), 0)
            zeros = empty_acc(values_of(S), BM)
            m, l, acc = combine_splits(a.PARTIAL, a.PARTIAL_ML, partial, a.splits, row_ok, zeros, S.block, values_of(S))
    if S.combine != "after":
        if S.sinks:
            sink = tl.where(row_ok & owned, tl.load(a.SINKS + head, mask=row_ok, other=0.0), float("-inf"))
            m, l, acc = normalise(m, l, acc, sink, True)
        else:
            m, l, acc = normalise(m, l, acc, m, False)
        out_at = a.OUT + row_b.to(tl.int64) * a.o_b + (q_start + wide_row) * a.o_l + wide_head * a.o_h + column
        store_acc(out_at, acc, row_ok, values_of(S), S.row_groups > 1)
        if S.lse:
            lse_at = a.LSE + row_b.to(tl.int64) * a.lse_b + (q_start + wide_row) * a.lse_l + wide_head * a.lse_h
            tl.store(lse_at, m + tl.log(l), mask=first_ok & (column == 0))
