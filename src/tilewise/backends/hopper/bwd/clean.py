"""Non-finite fix-up by the kernel itself: a second launch, in which NaN and Inf in q, k and dO count as 0.

Products multiply inputs under hidden cells by zero, and `0 * NaN` is NaN. A call with non-finite gradients is flagged
and recomputed by a launch with `S.clean`: each tile of K, Q and dO is cleaned in shared memory before its products, and
dS of hidden cells is set to 0, so that V may hold anything there. Sums have the same order as in the first launch:
hidden inputs change no bit. A row that sees NaN has NaN in its lse or its delta, so its gradients are still NaN. Unless
the flag is set, the producer takes no key block, and all partitions end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .arguments import tile
from .sync import DS_READY, named_barrier


@gluon.constexpr_function
def rows_layout(D):
    """Layout of rows of D columns, 16 bytes per thread."""
    lanes = min(32, D // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def clean(place, D: gl.constexpr):
    """Replaces NaN and Inf by 0 in rows [N, D] of shared memory."""
    x = place.load(rows_layout(D))
    value = x.to(gl.float32)
    place.store(gl.where(value - value == 0, x, gl.zeros_like(x)))


@gluon.jit
def cleaned():
    """Waits until both consumers' tiles are clean and visible to products."""
    fence_async_shared()
    named_barrier("bar.sync", DS_READY, 256)


@gluon.jit
def clean_half(place, ROWS: gl.constexpr, D: gl.constexpr, C: gl.constexpr):
    """This consumer's half of the rows of a tile [ROWS, D]."""
    HALF: gl.constexpr = ROWS // 2
    clean(place.slice(C * HALF, HALF, 0), D)


@gluon.jit
def clean_keys(a, buf, C: gl.constexpr):
    """Cleans this consumer's K, once loaded; both consumers read it for dQ."""
    D: gl.constexpr = a.S.D
    clean(buf.k.index(C).reshape([64, D]), D)
    cleaned()


@gluon.jit
def clean_queries(a, buf, u, C: gl.constexpr):
    """Cleans Q and dO of use u, half of the rows by each consumer."""
    D: gl.constexpr = a.S.D
    BM: gl.constexpr = a.S.BM
    mbarrier.wait(buf.q_full.index(u % a.S.q_stages), (u // a.S.q_stages) & 1)
    mbarrier.wait(buf.do_full.index(u % a.S.do_stages), (u // a.S.do_stages) & 1)
    clean_half(tile(buf.q, u, a.S.q_stages, BM, D), BM, D, C)
    clean_half(tile(buf.do, u, a.S.do_stages, BM, D), BM, D, C)
    cleaned()
