"""The arguments of the forward kernel as one value, which its partitions share."""

from ..signature import Size, struct


@struct
class Arguments:
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
    PLACES: object
    CU_Q: object
    CU_K: object
    ORDER: object
    START: object
    SLOPES: object
    SINKS: object
    LIST: object
    RANK: object
    o_b: Size
    o_h: Size
    o_l: Size
    lse_b: Size
    lse_h: Size
    lse_l: Size
    list_b: Size
    list_h: Size
    list_q: Size
    list_n: Size
    slopes_b: Size
    batch: Size
    heads: Size
    group: Size
    q_len: Size
    kv_len: Size
    total_q: Size
    value_dim: Size
    q_offset: Size
    scale: object
    softcap: object
    rules: Size  # RULE_NUMBERS
    swizzle: Size
    work_tiles: Size
    S: object
