"""The non-finite fix-up by the kernel itself: the same pass again, in which NaN and Inf in q, k and dO count as 0.

Products multiply what lies under hidden cells by zero, and `0 * NaN` is NaN. A call whose gradients are not finite is
flagged, and launched again with `S.clean`: each tile of K, Q and dO is cleaned in shared memory before it is
multiplied, and dS of hidden cells is selected, so that V may hold anything there. The order of all sums is that of the
first launch: what is hidden changes no bit. A row that sees NaN has NaN in its lse or its delta, and its gradients are
NaN all the same. Unless the flag is set, the producer takes no key block, and all partitions end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .arguments import tile
from .sync import DS_READY, named_barrier


@gluon.constexpr_function
def rows_layout(D):
    """Of rows of D columns, 16 bytes a thread."""
    lanes = min(32, D // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def clean(place, D: gl.constexpr):
    """Zeros in place of NaN and Inf, in rows [N, D] of shared memory."""
    x = place.load(rows_layout(D))
    value = x.to(gl.float32)
    place.store(gl.where(value - value == 0, x, gl.zeros_like(x)))


@gluon.jit
def cleaned():
    """Both consumers' tiles are clean, for products to read."""
    fence_async_shared()
    named_barrier("bar.sync", DS_READY, 256)


@gluon.jit
def clean_keys(a, buf, C: gl.constexpr):
    """K of this consumer, once it is there: both read it for dQ."""
    D: gl.constexpr = a.S.D
    clean(buf.k.index(C).reshape([64, D]), D)
    cleaned()


@gluon.jit
def clean_queries(a, buf, u, C: gl.constexpr):
    """Q and dO of use u: half of the rows by each consumer."""
    D: gl.constexpr = a.S.D
    BM: gl.constexpr = a.S.BM
    HALF: gl.constexpr = a.S.BM // 2
    mbarrier.wait(buf.q_full.index(u % a.S.q_stages), (u // a.S.q_stages) & 1)
    mbarrier.wait(buf.do_full.index(u % a.S.do_stages), (u // a.S.do_stages) & 1)
    clean(tile(buf.q, u, a.S.q_stages, BM, D).slice(C * HALF, HALF, 0), D)
    clean(tile(buf.do, u, a.S.do_stages, BM, D).slice(C * HALF, HALF, 0), D)
    cleaned()
