"""Key spans and query spans of the position rules, in Triton and Gluon kernels.

`core/mask_rules.py` has the same two functions; `numbers` are those of its RULE_NUMBERS, and `S.rules` says which rules
apply (`RuleFlags`). If positions are not row indices (`S.rules.affine`), the last three numbers give the positions of
keys and queries; each sequence may have its own.
"""

import triton.language as tl

import triton


@triton.jit
def sequence_numbers(numbers, PLACES, b, S: tl.constexpr):
    """The numbers for the sequence of batch row `b`."""
    if S.rules.affine == "rows":
        left, right, chunk, _, _, _ = numbers
        at = PLACES + 3 * b
        numbers = (left, right, chunk, tl.load(at), tl.load(at + 1), tl.load(at + 2))
    return numbers


@triton.jit
def query_position(offset, row, numbers, S: tl.constexpr):
    """The position of query `row`; the first is at `offset`."""
    if S.rules.affine != "":
        row = row * numbers[5]
    return offset + row


@triton.jit
def key_position(key, numbers, S: tl.constexpr):
    if S.rules.affine != "":
        key = numbers[3] + key * numbers[4]
    return key


@triton.jit
def rows_before(distance, stride):
    """The number of rows before position `distance`, if row i is at position i * stride."""
    return tl.where(distance > 0, (distance - 1) // stride + 1, 0)


@triton.jit
def chunk_start(position, chunk):
    """The first position of the chunk of `position`, which may be negative."""
    inside = position % chunk
    return position - tl.where(inside < 0, inside + chunk, inside)


@triton.jit
def key_span(position, n_keys, numbers, S: tl.constexpr):
    """The key span `[lo, hi)` of queries at `position`, both within `0 .. n_keys`: a scalar or a vector."""
    if S.rules.affine != "":
        lo, hi = affine_key_span(position, n_keys, numbers, S)
    else:
        lo, hi = plain_key_span(position, n_keys, numbers, S)
    return lo, hi


@triton.jit
def query_span(key, offset, q_len, numbers, S: tl.constexpr):
    """The query span `[lo, hi)`: the rows that see `key`, the first row at `offset`; both within `0 .. q_len`."""
    if S.rules.affine != "":
        lo, hi = affine_query_span(key, offset, q_len, numbers, S)
    else:
        lo, hi = plain_query_span(key, offset, q_len, numbers, S)
    return lo, hi


@triton.jit
def affine_key_span(position, n_keys, numbers, S: tl.constexpr):
    left, right, chunk, k_start, k_stride, _ = numbers
    near = position - k_start
    lo = position * 0
    hi = position * 0 + n_keys
    if S.rules.causal:
        hi = tl.minimum(hi, rows_before(near + 1, k_stride))
    if S.rules.left:
        lo = tl.maximum(lo, rows_before(near - left, k_stride))
    if S.rules.right:
        hi = tl.minimum(hi, rows_before(near + right + 1, k_stride))
    if S.rules.chunk:
        start = chunk_start(position, chunk) - k_start
        lo = tl.maximum(lo, rows_before(start, k_stride))
        hi = tl.minimum(hi, rows_before(start + chunk, k_stride))
    return tl.minimum(lo, n_keys), hi


@triton.jit
def affine_query_span(key, offset, q_len, numbers, S: tl.constexpr):
    left, right, chunk, k_start, k_stride, q_stride = numbers
    position = k_start + key * k_stride
    near = position - offset
    lo = key * 0
    hi = key * 0 + q_len
    if S.rules.causal:
        lo = tl.maximum(lo, rows_before(near, q_stride))
    if S.rules.left:
        hi = tl.minimum(hi, rows_before(near + left + 1, q_stride))
    if S.rules.right:
        lo = tl.maximum(lo, rows_before(near - right, q_stride))
    if S.rules.chunk:
        start = chunk_start(position, chunk) - offset
        lo = tl.maximum(lo, rows_before(start, q_stride))
        hi = tl.minimum(hi, rows_before(start + chunk, q_stride))
    return tl.minimum(lo, q_len), hi


@triton.jit
def plain_key_span(position, n_keys, numbers, S: tl.constexpr):
    """No sum overflows, for any int32 position, window side or chunk: numbers of the same sign are clamped first."""
    left, right, chunk, _, _, _ = numbers
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
def tree_span(position, n_keys, own_keys, numbers, S: tl.constexpr):
    """The key span `[lo, hi)` of tree nodes at `position`, which are not before any key below `own_keys`. It hides keys
    below `own_keys`; the others are checked cell by cell (`visible_by_position`).
    """
    left, _, chunk, _, _, _ = numbers
    lo = position * 0
    if S.rules.left:
        lo = tl.maximum(lo, position - left)
    if S.rules.chunk:
        lo = tl.maximum(lo, chunk_start(position, chunk))
    return tl.minimum(lo, tl.maximum(own_keys, 0)), position * 0 + n_keys


@triton.jit
def visible_by_position(position, key, numbers, S: tl.constexpr):
    """Whether a query sees a key by their positions, which broadcast against each other: the rules cell by cell."""
    left, right, chunk, _, _, _ = numbers
    behind = position - key
    seen = behind == behind
    if S.rules.causal:
        seen = seen & (behind >= 0)
    if S.rules.left:
        seen = seen & (behind <= left)
    if S.rules.right:
        seen = seen & (behind >= -right)
    if S.rules.chunk:
        seen = seen & (chunk_start(position, chunk) == chunk_start(key, chunk))
    return seen


@triton.jit
def plain_query_span(key, offset, q_len, numbers, S: tl.constexpr):
    left, right, chunk, _, _, _ = numbers
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
