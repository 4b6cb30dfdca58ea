"""Which keys the rules leave to a query, and which queries to a key, in Triton and Gluon kernels.

`core/mask_rules.py` has the same two functions; `numbers` are those of its RULE_NUMBERS, and `S.rules` says which rules
there are (`RuleFlags`).
"""

import triton.language as tl

import triton


@triton.jit
def key_span(position, n_keys, numbers, S: tl.constexpr):
    """`[lo, hi)` of queries at `position`, both within `0 .. n_keys`: a scalar or a vector.

    No sum overflows, whatever int32 position, side or chunk is given: numbers of one sign are first made small.
    """
    left, right, chunk = numbers
    ahead = tl.maximum(position, 0)  # `lo` is the same for all positions before the first key
    near = tl.minimum(position, n_keys)  # and `hi` for all past the last
    lo = position * 0
    hi = position * 0 + n_keys
    if S.rules.causal:
        hi = tl.minimum(hi, near + 1)
    if S.rules.left:
        lo = tl.maximum(lo, ahead - left)
    if S.rules.right:
        reach = tl.where(near < 0, right, tl.minimum(right, n_keys - near))
        hi = tl.minimum(hi, reach + (near + 1))
    if S.rules.chunk:
        start = ahead - ahead % chunk
        lo = tl.maximum(lo, start)
        hi = tl.where(position < 0, 0, tl.minimum(hi, start + tl.minimum(chunk, n_keys - start)))
    return tl.minimum(lo, n_keys), tl.maximum(hi, 0)


@triton.jit
def query_span(key, offset, q_len, numbers, S: tl.constexpr):
    """`[lo, hi)`: the rows that see `key`, of rows at positions `offset` on; both within `0 .. q_len`."""
    left, right, chunk = numbers
    lo = offset
    hi = offset + q_len
    if S.rules.causal:
        lo = tl.maximum(lo, key)
    if S.rules.left:
        hi = tl.minimum(hi, key + left + 1)
    if S.rules.right:
        lo = tl.maximum(lo, key - right)
    if S.rules.chunk:
        start = key - key % chunk
        lo = tl.maximum(lo, start)
        hi = tl.minimum(hi, start + chunk)
    return tl.minimum(lo - offset, q_len), tl.maximum(tl.minimum(hi - offset, q_len), 0)
