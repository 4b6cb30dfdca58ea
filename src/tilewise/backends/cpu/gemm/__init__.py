"""Matrix products: blocked GEMM for prefill, GEMV for decode; fp32 vectors, AMX tiles, VNNI integers."""

from collections import namedtuple

# A GEMM policy: how the prefill mainloop multiplies. `step` query rows at a time, which stand in panels of `panel`. The
# policy's own scratch memory is w = memory(p, t). Its five methods, and its epilogue:
#   pack_queries(p, t, w, item, q_start, R)             Q^T; True if there is a number that it cannot take
#   pack_keys(p, t, w, k, at, tile, count, last)        a tile of K; likewise
#   pack_values(p, t, w, v, at, tile, count, full)      a tile of V; True if non-finite values were taken out
#   weights(p, t, w, item, row, R, tile, end, ...)      p = softmax(K Q^T), with m, l and alpha
#   add_values(p, t, w, item, v, at, row, R, ...)       acc = alpha acc + p V, and the values that were taken out
#   epilogue(p, t, w, R)                                acc [R, Dv] of its sums
Gemm = namedtuple("Gemm", "panel step memory pack_queries pack_keys pack_values weights add_values epilogue")
