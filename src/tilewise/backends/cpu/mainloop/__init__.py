"""Mainloops and their steps, as Numba code.

Names that all of them use:

    p            the parameter struct (`Params`); g: that of the gradients (`Gradients`)
    item, R      a work item, and its query rows of all heads of the group: row r is query r % item.rows of head
                 r // item.rows
    t, w         scratch memory: addresses of its parts, with shapes in `scratch.py`; w: a GEMM policy's own
    k, v, x      where rows are read: of K, of V, of either (`kv_access.Source`)
    at           whose rows: a sequence and a KV head (`kv_access.KVLocation`)
    D, Dv        head_dim and value_dim, padded to whole vectors
    m, l, alpha  of each row: the running max, the row sum, the rescale factor
    bad          0, or NaN if a number is not finite

Addresses are int64, so `t.s + 4 * n` is float n of the scores.
"""
