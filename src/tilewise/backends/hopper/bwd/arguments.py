"""The arguments of the backward kernel as one value, its buffers in shared memory, and its register layouts."""

from ...gpu.gluon import gl, gluon, mbarrier, opaque, reinterpret
from ..signature import Size, struct


class CallArguments:
    """Arguments of both backward kernels, after their own. Blocks of the narrow kernel are key blocks."""

    KV_LENGTHS: object
    Q_OFFSET: object
    CU_Q: object
    CU_K: object
    TABLE: object  # packed: int32 [blocks, 2], each block's sequence and number there
    heads: Size
    group: Size
    q_len: Size
    kv_len: Size
    q_blocks: Size  # of statistics, per head of a batch row; packed: per head, with room for all sequences
    blocks: Size  # per plane; packed: per head, with room for all sequences
    planes: Size  # (batch row, head) pairs; packed: heads; split: times the number of splits
    q_offset: Size
    left: Size  # of a window
    right: Size  # 0 for causal
    swizzle: Size
    scale: object
    softcap: object
    S: object


class MaskArguments:
    """Arguments of kernels with a mask, between their own and the call's; None without a mask."""

    mask: object  # [1, 1, BM, 64], in the mask's dtype: 64 keys
    MASK: object  # pointers to the mask and its gradient, where TMA does not copy them
    DMASK: object
    HUGE: object  # int32: whether a query block has a huge lse (`preprocess`)
    mask_b: object
    mask_h: object
    mask_q: object
    mask_k: object
    dmask_b: object
    dmask_h: object
    dmask_q: object
    dmask_k: object
    mask_batch: object  # 1: each batch row has its own mask; 0: they share it
    mask_heads: object


@struct
class BackwardArguments(MaskArguments, CallArguments):
    q: object  # descriptors: q and do [1, 1, BM, D], k, v, dk, dv [1, 1, 64, D]
    k: object
    v: object
    do: object
    dk: object
    dv: object
    dq: object  # float32 [128, 32] of [query blocks * 2 * 128, 32]: a consumer's part, packed (`pack_dq`)
    stats: object  # [BM, 32] of [query blocks * BM, 32], in q's dtype: -lse / scale and -delta, 16 parts each
    lse: object  # with softcap: float32 [1, BM] of [query blocks, BM], -lse * log2(e); with a mask -lse
    dmask: object  # as `mask`
    SEMAPHORES: object  # int32, one for each query block of a head
    COUNTER: object
    FLAG: object  # int32: a gradient is not finite
    DK: object  # pointers to dk and dv, for tiles in which a packed sequence ends, and direct stores; splits: partials
    DV: object
    dk_b: object
    dk_h: object
    dk_l: object
    dv_b: object
    dv_h: object
    dv_l: object
    piece: object  # with a converter: descriptors [16, 32] of the tensor of `dq`, and [1, 1, 16, 32] of dQ
    dq16: object
    DQ: object  # pointer to dQ, for rows at the end of a packed sequence
    dq_h: object
    dq_l: object
    splits: object  # programs that share a key block; None is one


@struct
class Buffers:
    k: gl.shared_memory_descriptor  # [2, 1, 1, 64, D]
    v: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor  # [q_stages, 1, 1, BM, D]
    do: gl.shared_memory_descriptor  # [do_stages, 1, 1, BM, D]
    stats: gl.shared_memory_descriptor  # [q_stages, BM, 32]
    lse: object  # with softcap or a mask: [q_stages, 1, BM]
    mask: object  # [2, 1, 1, BM, 64]: one part per consumer
    huge: object  # [q_stages, 1]: HUGE of the query block
    ds: object  # [2, 64, BM]: one part per consumer; with a mask dS is in `dq` (`ds_place`)
    dq: gl.shared_memory_descriptor  # [2 * dq_stages, 128, 32]
    piece: object  # with a converter: [pieces, 16, 32] and, in q's dtype, [2, 1, 1, 16, 32]
    piece16: object
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    dq_empty: gl.shared_memory_descriptor
    mask_full: object
    indices: object  # persistent: [2, 1], indices of key blocks, and their mbarriers
    index_full: object
    index_empty: object
    kv_empty: object
    piece_full: object


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(made.index(i), count=arrivals)
    return made


@gluon.constexpr_function
def dq_split(S):
    """(rows, columns) of the part of dQ [BM, D] that one consumer computes."""
    return (64, S.D // 2) if S.BM == 64 else (64, S.D)


@gluon.jit
def new_buffers(a):
    D: gl.constexpr = a.S.D
    BM: gl.constexpr = a.S.BM
    DTYPE: gl.constexpr = a.q.dtype
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BM], DTYPE)
    k = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, D], a.k.layout)
    v = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, D], a.v.layout)
    q = gl.allocate_shared_memory(DTYPE, [a.S.q_stages, 1, 1, BM, D], a.q.layout)
    do = gl.allocate_shared_memory(DTYPE, [a.S.do_stages, 1, 1, BM, D], a.do.layout)
    stats = gl.allocate_shared_memory(DTYPE, [a.S.q_stages, BM, 32], a.stats.layout)
    lse = None
    if a.S.row_lse:
        lse = gl.allocate_shared_memory(gl.float32, [a.S.q_stages, 1, BM], a.lse.layout)
    huge = None
    if a.S.mask_first:
        huge = gl.allocate_shared_memory(gl.int32, [a.S.q_stages, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    mask = None
    mask_full = None
    if a.S.mask_tiles:
        mask = gl.allocate_shared_memory(a.mask.dtype, [2, 1, 1, BM, 64], a.mask.layout)
        mask_full = barriers(1, 1)
    ds = None
    if not a.S.mask:
        ds = gl.allocate_shared_memory(DTYPE, [2, 64, BM], DS_LAYOUT)
    dq = gl.allocate_shared_memory(gl.float32, [2 * a.S.dq_stages, 128, 32], a.dq.layout)
    piece = None
    piece16 = None
    piece_full = None
    if a.S.converts:
        piece = gl.allocate_shared_memory(gl.float32, [a.S.pieces, 16, 32], a.piece.layout)
        piece16 = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 16, 32], a.dq16.layout)
        piece_full = barriers(a.S.pieces, 1)
    indices = None
    index_full = None
    index_empty = None
    kv_empty = None
    if a.S.persistent:  # an mbarrier without waiters must not exist: its memory would be given to tiles
        indices = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
        index_full = barriers(2, 1)
        index_empty = barriers(2, 5 if a.S.converts else 4)
        if not a.S.split:
            kv_empty = barriers(1, 2)
    return Buffers(
        k, v, q, do, stats, lse, mask, huge, ds, dq, piece, piece16, barriers(1, 1), barriers(1, 1),
        barriers(a.S.q_stages, 1), barriers(a.S.do_stages, 1), barriers(a.S.dq_stages, 1), mask_full, indices,
        index_full, index_empty, kv_empty, piece_full,
    )  # fmt: skip


@gluon.constexpr_function
def score_layout(S):
    """S^T and dP^T [64, BM] of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.BM, 16])


@gluon.constexpr_function
def grad_layout(S):
    """dK and dV [64, D] of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.D, 16])


@gluon.constexpr_function
def row_layout(S):
    """The same rows in the same groups of four lanes, with 8 contiguous columns of a row per thread."""
    more = [[0, 1 << n] for n in range(5, S.D.bit_length() - 1)]
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], *more]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, S.D])


@gluon.constexpr_function
def dq_layout(S):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, dq_split(S)[1], 16])


@gluon.jit
def ds_place(a, buf, u, h):
    """The buffer of consumer h's dS^T [64, BM] at use u, or of its tile of dmask [1, 1, BM, 64]. With a mask it is that
    of this use's dQ: shared memory cannot hold a mask tile, dS and two stages of dO.
    """
    BM: gl.constexpr = a.S.BM
    if a.S.dmask_tiles:
        place = reinterpret(buf.dq.index(u % a.S.dq_stages * 2 + h), a.q.dtype, [1, 1, BM, 64], a.dmask.layout)
    elif a.S.mask:
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BM], a.q.dtype)
        place = reinterpret(buf.dq.index(u % a.S.dq_stages * 2 + h), a.q.dtype, [64, BM], LAYOUT)
    else:
        place = buf.ds.index(h + (opaque(u) >> 30))
    return place


@gluon.jit
def tile(buffer, n, STAGES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    return buffer.index(opaque(n) % STAGES).reshape([ROWS, COLUMNS])
