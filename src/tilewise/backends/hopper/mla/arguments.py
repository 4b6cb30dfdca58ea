"""The arguments of the latent kernel as one value, which its partitions share."""

from triton.experimental import gluon

from ..signature import declared, held


@declared
class Arguments:
    """`object` where there may be nothing (None), or a number that is known at compile time."""

    q: object  # descriptor of tiles [1, queries, head_rows, width] of q as [B, Lq, H, 576]
    q_rope: object  # the same with 64 columns
    k: object  # [1, page_rows, width] of the pages
    k_rope: object
    CACHE: object  # the pages themselves
    OUT: object
    LSE: object
    PARTIAL: object  # float32 [2 splits, tiles, 64, 512]: outputs of sequences that several programs share
    PARTIAL_LSE: object  # float32 [2 splits, tiles, 64], in base 2
    FRAGMENTS: object  # int32 [B]: partial of a sequence's first fragment, and from bit 16 on how many it has
    LENGTHS: object
    TABLE: object
    SINKS: object
    o_b: object
    o_h: object
    o_l: object
    lse_b: object
    lse_h: object
    lse_l: object
    table_b: object
    page_b: object
    batch: object
    heads: object
    q_len: object
    kv_len: object
    page_size: object
    tiles: object  # of query rows
    splits: object  # into which the keys of all sequences are cut
    factor: object  # scale * log2(e)
    S: object

    @gluon.constexpr_function
    def __init__(self, *values):
        for name, value in zip(self.NAMES, values, strict=True):
            setattr(self, name, held(value))
