"""The tile scheduler: which keys belong to which program.

Keys are counted in pairs of blocks (128 keys); a sequence has at least one pair. The pairs of all sequences, one after
the other, are split into runs of `size` pairs, at most `splits` of them. Each tile of query rows has a program for each
run, and programs of a run are neighbours, so that its keys are read from HBM once and from L2 for the other tiles.

The size is the smallest that suffices, or the next one that fits the longest sequence (a multiple of its pairs, or an
equal share of them) if so many fewer sequences are split that the longer runs cost less than combining them.

A run is split at the ends of sequences into fragments. A fragment that is not a whole sequence writes a partial: number
2 split if it is the first of its run, else 2 split + 1. For each sequence the kernel writes the partial of its first
fragment and the number of fragments; the others are the first ones of their runs.
"""

from ...gpu.gluon import gl, gluon
from ..signature import struct

RUN = gl.constexpr(128)  # sequences that are read together
CUT = gl.constexpr(7)  # half pairs by which each program is longer when all runs cut a sequence


@gluon.jit
def keys_of_row(a, b):
    """Keys of a batch row, or of several."""
    if a.S.lengths:
        n = gl.load(a.LENGTHS + b)
    else:
        n = b * 0 + a.kv_len
    return n


@gluon.jit
def keys_of(a, seq):
    """Keys of a sequence, or of several; with indices, the number of indices."""
    if a.S.gather:
        n = seq * 0 + a.chosen
    else:
        n = keys_of_row(a, seq)
    return n


@gluon.jit
def pairs_of(n):
    return gl.maximum((n + 127) // 128, 1)


@gluon.jit
def add(x, y):
    return x + y


@gluon.jit
def fitting(least, longest):
    """The smallest size from `least` on that fits sequences of `longest` pairs."""
    share = gl.cdiv(longest, gl.maximum(longest // least, 1))
    return gl.where(least < longest, share, gl.cdiv(least, longest) * longest)


@gluon.jit
def run_of(a, split):
    """The run of a split: its first sequence, the first pair there, the number of pairs, and the size of all runs."""
    if a.S.gather:
        seq, first, left, size = even_run_of(a, split)
    else:
        seq, first, left, size = any_run_of(a, split)
    return seq, first, left, size


@gluon.jit
def even_run_of(a, split):
    """Where all sequences have the same number of pairs, and the size is known."""
    pairs = pairs_of(a.chosen)
    total = a.batch * pairs
    begin = gl.minimum(split * a.size, total)
    end = gl.minimum(begin + a.size, total)
    return begin // pairs, begin % pairs, end - begin, a.size


@gluon.jit
def any_run_of(a, split):
    # Every warp reads all of them: sums within a warp need no barrier.
    EACH: gl.constexpr = gl.BlockedLayout([RUN // 32], [32], [gl.num_warps()], [0])
    total = 0
    longest = 1
    for first in range(0, a.batch, RUN):
        at = first + gl.arange(0, RUN, EACH)
        pairs = gl.where(at < a.batch, pairs_of(keys_of(a, gl.minimum(at, a.batch - 1))), 0)
        total += gl.sum(pairs, 0)
        longest = gl.maximum(longest, gl.max(pairs, 0))
    size = gl.cdiv(total, a.splits)
    other = fitting(size, longest)
    gain = 0  # splits of sequences with `size`, minus those with `other`
    seq = 0
    start = 0  # of the sequence
    other_seq = 0
    other_start = 0
    before = 0
    for first in range(0, a.batch, RUN):
        at = first + gl.arange(0, RUN, EACH)
        inside = at < a.batch
        pairs = gl.where(inside, pairs_of(keys_of(a, gl.minimum(at, a.batch - 1))), 0)
        ends = before + gl.associative_scan(pairs, 0, add)
        passed = inside & (ends <= split * size)
        seq += gl.sum(passed.to(gl.int32), 0)
        start += gl.sum(gl.where(passed, pairs, 0), 0)
        if other != size:
            begins = ends - pairs
            last = gl.maximum(ends - 1, begins)
            cuts = last // size - begins // size - (last // other - begins // other)
            gain += gl.sum(gl.where(inside, cuts, 0), 0)
            passed = inside & (ends <= split * other)
            other_seq += gl.sum(passed.to(gl.int32), 0)
            other_start += gl.sum(gl.where(passed, pairs, 0), 0)
        before += gl.sum(pairs, 0)
    if (other != size) & ((other - size) * a.splits * 2 <= gain * CUT):
        size = other
        seq = other_seq
        start = other_start
    begin = gl.minimum(split * size, total)
    end = gl.minimum(begin + size, total)
    return seq, begin - start, end - begin, size


@struct
class Run:
    """What is left of a program's run, and its tile of query rows."""

    seq: gl.tensor
    first: gl.tensor  # pair of that sequence
    left: gl.tensor  # pairs
    size: gl.tensor  # of all runs
    split: gl.tensor
    tile: gl.tensor


@struct
class Fragment:
    """Pairs first .. last of a sequence; those from `whole` on may hold hidden cells."""

    seq: gl.tensor
    n: gl.tensor  # keys of the sequence
    first: gl.tensor
    last: gl.tensor
    whole: gl.tensor
    pairs: gl.tensor  # of the sequence
    b: gl.tensor  # batch row
    query: gl.tensor  # the first one of the tile
    head: gl.tensor

    @gluon.jit
    def alone(self):
        """Whether the fragment is the whole sequence."""
        return (self.first == 0) & (self.last == self.pairs)


@gluon.jit
def place_of(a, seq, tile):
    """Batch row, first query and first head of a tile of a sequence's rows."""
    across = gl.cdiv(a.heads, a.S.head_rows)
    b = seq
    query = tile // across * a.S.queries
    if a.S.gather:
        b = seq // a.q_len
        query = seq % a.q_len
    return b, query, tile % across * a.S.head_rows


@gluon.jit
def fragment(a, seq, first, left, tile):
    n = keys_of(a, seq)
    pairs = pairs_of(n)
    last = gl.minimum(pairs, first + left)
    seen = n  # keys that every query sees
    if a.S.causal:
        seen = gl.maximum(n - (a.q_len - 1), 0)
    whole = gl.minimum(gl.maximum(seen // 128, first), last)
    if a.S.gather:  # every pair has flags for which of its keys count
        whole = last
    b, query, head = place_of(a, seq, tile)
    return Fragment(seq, n, first, last, whole, pairs, b, query, head)
