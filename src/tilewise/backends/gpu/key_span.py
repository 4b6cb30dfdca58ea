"""Which keys the rules leave to a query, on a GPU: `core/mask_rules.py`'s `key_span` for Triton and Gluon kernels."""

import triton.language as tl

import triton


@triton.jit
def key_span(position, n_keys, numbers, S: tl.constexpr):
    """`[lo, hi)` of queries at `position`, both within `0 .. n_keys`: a scalar or a vector.

    `numbers` are those of RULE_NUMBERS, `S.rules` says which rules there are (`RuleFlags`). No sum overflows, whatever
    int32 position, side or chunk is given: numbers of one sign are first made small.
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
