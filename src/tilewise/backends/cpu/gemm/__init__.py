"""Matrix products: blocked GEMM for prefill, GEMV for decode; fp32 vectors, tiles of bf16, VNNI integers."""

from collections import namedtuple

# A GEMM policy: how the prefill mainloop multiplies, `step` query rows at a time, in panels of `panel` rows. Its own
# scratch memory is w = memory(p, t). Its five methods, and its epilogue:
#   pack_queries(p, t, w, item, q_start, R)             Q^T; True if there is a number that it cannot process
#   pack_keys(p, t, w, item, k, at, tile, count, last)  a tile of K; likewise
#   pack_values(p, t, w, v, at, tile, count, full)      a tile of V; True if non-finite values were extracted
#   weights(p, t, w, item, row, R, tile, end, ...)      p = softmax(K Q^T), with m, l and alpha
#   add_values(p, t, w, item, v, at, row, R, ...)       acc = alpha acc + p V, and extracted values
#   epilogue(p, t, w, R)                                acc [R, Dv] of its sums
Gemm = namedtuple("Gemm", "panel step memory pack_queries pack_keys pack_values weights add_values epilogue")

# The products of tiles of bf16 (`mainloop/prefill_tiles.py`), by the instructions of `amx.py` or `bf16_tiles.py`: bf16
# parts of a number; what comes before and after products; an emitter of scores; two micro-kernels (`amx.make_products`)
Tiles = namedtuple("Tiles", "parts load_tile_config release make_scores keys values")
