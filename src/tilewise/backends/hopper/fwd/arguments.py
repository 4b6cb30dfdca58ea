"""The arguments of the forward kernel as one value, which its partitions share."""

from triton.experimental import gluon

from ..signature import declared, held


@declared
class Arguments:
    """`object` where there may be nothing (None), or a number that is known at compile time."""

    q: object  # descriptors of tiles: q and out [1, 1, 64, columns], k and v [1, 1, BN, columns]
    k: object
    v: object
    o: object
    OUT: object
    LSE: object
    FLAGS: object
    COUNTER: object
    KV_LENGTHS: object
    Q_OFFSET: object
    CU_Q: object
    CU_K: object
    ORDER: object
    START: object
    SLOPES: object
    SINKS: object
    MASK: object
    LIST: object
    RANK: object
    o_b: object
    o_h: object
    o_l: object
    lse_b: object
    lse_h: object
    lse_l: object
    mask_b: object
    mask_h: object
    mask_q: object
    mask_k: object
    list_b: object
    list_h: object
    list_q: object
    list_n: object
    slopes_b: object
    batch: object
    heads: object
    group: object
    q_len: object
    kv_len: object
    total_q: object
    value_dim: object
    q_offset: object
    scale: object
    softcap: object
    rules: object  # RULE_NUMBERS
    swizzle: object
    work_tiles: object
    S: object

    @gluon.constexpr_function
    def __init__(self, *values):
        for name, value in zip(self.NAMES, values, strict=True):
            setattr(self, name, held(value))
