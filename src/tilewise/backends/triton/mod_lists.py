"""Block sparsity of a mask_mod: lists the key tiles in which it leaves a cell to a tile of query rows.

The kernel evaluates the cells, which takes a small part of their products, and keeps none of them. Its lists are as
those of `gpu/block_sparsity.py`.
"""

import triton.language as tl

import triton

from ..gpu.mask_rules import key_position, key_span, query_position, sequence_numbers
from ..gpu.signature import kernel_of
from .bwd.places import sequence

TENSORS = {
    "KV_LENGTHS": "kv_lengths", "Q_OFFSET": "q_offset", "CU_Q": "cu_seqlens_q", "CU_K": "cu_seqlens_k",
    "PLACES": "places",
}  # fmt: skip
SIZES = ["q_len", "kv_len", "heads", "tiles", "n", "q_offset", "rules"]


@kernel_of(["LIST", "RANK", *TENSORS, *SIZES], SIZES, triton.jit)
def list_tiles_of_mods(a, S):
    """One program for each row of tiles. A tile that the rules hide is left out, though no kernel asks for it."""
    BM: tl.constexpr = S.BM
    BK: tl.constexpr = S.BK
    pid = tl.program_id(0).to(tl.int64)
    tile = (pid % a.tiles).to(tl.int32)
    head = (pid // a.tiles % a.heads).to(tl.int32)
    b = (pid // a.tiles // a.heads).to(tl.int32)
    _, q_len, _, n_keys, offset = sequence(
        b, a.CU_Q, a.CU_K, a.KV_LENGTHS, a.Q_OFFSET, a.q_len, a.kv_len, a.q_offset, S
    )
    numbers = sequence_numbers(a.rules, a.PLACES, b, S)
    row = tile * BM + tl.arange(0, BM)
    row_ok = row < q_len
    qpos = query_position(offset, row, numbers, S)
    lo = key_span(query_position(offset, tile * BM, numbers, S), n_keys, numbers, S)[0]
    last = tl.minimum(tile * BM + BM, q_len) - 1
    hi = key_span(query_position(offset, last, numbers, S), n_keys, numbers, S)[1]
    given = tl.zeros([BM, BK], tl.float32)
    count = 0
    for t in range(a.n):
        tl.store(a.RANK + pid * (a.n + 1) + t, count)
        if (t * BK < hi) & (t * BK + BK > lo):
            key = t * BK + tl.arange(0, BK)
            kpos = key_position(key, numbers, S)
            seen = S.mods.mask(given, b, head, qpos[:, None], kpos[None, :], a.captured)
            seen = (row_ok[:, None] & (key < n_keys)[None, :]) & seen
            if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
                tl.store(a.LIST + pid * a.n + count, t * 2)
                count += 1
    tl.store(a.RANK + pid * (a.n + 1) + a.n, count)
