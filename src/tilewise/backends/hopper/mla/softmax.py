"""From scores to weights; and clears values that weights of 0 would not hide."""

from ...gpu.gluon import fence_async_shared, gl, gluon, reinterpret

# The running max is replaced by one that is larger by so many powers of 2, which is rare. Then outputs are rescaled.
LATE = gl.constexpr(8.0)


@gluon.jit
def finite(m):
    """What is subtracted for a running max: 0 if nothing was seen yet, since -inf - -inf is NaN."""
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def alpha_of(a, m, m_new):
    """alpha, by which sums so far are rescaled when the running max becomes `m_new`."""
    return gl.exp2((m - finite(m_new)) * a.factor)


@gluon.jit
def to_weights(a, s, top, m, KEYS: gl.constexpr):
    """P in float32, with keys in dimension KEYS as in S, whose maxima are `top`; the new running max, and where it has
    changed.
    """
    higher = (top - m) * a.factor > LATE
    m_new = gl.where(higher, top, m)
    shift = finite(m_new) * a.factor
    p = gl.exp2(gl.fma(s, gl.full_like(s, a.factor), gl.zeros_like(s) - gl.expand_dims(shift, KEYS)))
    return p, m_new, higher


@gluon.jit
def clear_hidden(a, sh, masked, n, base, b: gl.constexpr, half: gl.constexpr):
    """Zeroes values that weights of 0 would not hide: those past the last key, and non-finite ones of keys that some
    queries do not see. Queries that see such a key have NaN in their scores, since values are columns of keys.
    """
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    SMALL: gl.constexpr = sh.k_rope.layout
    if not a.S.gather:
        first = n  # the first key that not every query sees
        if a.S.causal:
            first = n - (a.q_len - 1)
        if masked & (base + 64 > first):
            row = gl.arange(0, 64, gl.SliceLayout(1, WIDE))
            for i in range(4 + (n >> 31)):  # 4, not unrolled: code that runs once is fetched from memory
                tile = reinterpret(sh.k, sh.k.dtype, [16, 64, 64], SMALL).index((2 * b + half) * 4 + i)
                v = tile.load(WIDE)
                ok = (base + row < first)[:, None]
                if a.S.causal:
                    ok = ok | ((base + row < n)[:, None] & (gl.abs(v.to(gl.float32)) < float("inf")))
                tile.store(gl.where(ok, v, gl.zeros_like(v)))
            fence_async_shared()
