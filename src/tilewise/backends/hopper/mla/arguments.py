"""The arguments of the latent kernel as one value, which its partitions share."""

from ..signature import Size, struct


@struct
class Arguments:
    q: object  # descriptor of tiles [1, queries, head_rows, width] of q as [B, Lq, H, 576]
    q_rope: object  # the same with 64 columns
    k: object  # [1, page_rows, width] of the pages
    k_rope: object
    CACHE: object  # the cache itself
    SCALES: object  # with float8, the same memory as float32; CACHE is int32 then
    out: object  # descriptor of tiles of the output as [B, Lq, H, 512]
    LSE: object
    PARTIAL: object  # float32 [2 splits, tiles, 64, 512]: partials of sequences that are split over several programs
    PARTIAL_LSE: object  # float32 [2 splits, tiles, 64], in base 2
    FRAGMENTS: object  # int32 [B]: partial of a sequence's first fragment, and from bit 16 on how many it has
    COUNTERS: object  # int32 [B]: semaphores: halves of fragments that are stored, where the last-arriver combines them
    LENGTHS: object
    TABLE: object
    INDICES: object  # int32 [B, Lq, chosen]: keys of each query
    SINKS: object
    lse_b: Size
    lse_h: Size
    lse_l: Size
    table_b: Size
    page_b: Size  # of the cache, in units of 16 bytes
    page_l: Size
    i_b: Size
    i_l: Size
    batch: Size  # sequences; with indices each query is one
    heads: Size
    q_len: Size
    kv_len: Size
    page_size: Size
    tiles: Size  # of query rows
    splits: Size  # of the keys of all sequences
    chosen: Size  # indices of a query
    size: Size  # pairs of a run, with indices
    factor: object  # scale * log2(e)
    S: object
