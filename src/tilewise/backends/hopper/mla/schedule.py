"""Which keys belong to which program.

Keys are counted in pairs of blocks (128 keys); a sequence has at least one pair. The pairs of all sequences, one after
the other, are cut into `parts` runs of equal length (but for one pair). Each tile of query rows has a program for each
run, and programs of a run are neighbours, so that its keys are read from HBM once and from L2 for the other tiles.

A run is cut at the ends of sequences into fragments. A fragment that is not a whole sequence leaves its output to be
combined, in slot 2 part if the part begins inside or at the start of the sequence, else in slot 2 part + 1.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

RUN = gl.constexpr(256)  # sequences that are looked at together


@gluon.jit
def keys_of(a, seq):
    """Keys of a sequence, or of several."""
    if a.S.lengths:
        n = gl.load(a.LENGTHS + seq)
    else:
        n = seq * 0 + a.kv_len
    return n


@gluon.jit
def pairs_of(n):
    return gl.maximum((n + 127) // 128, 1)


@gluon.jit
def add(x, y):
    return x + y


@gluon.jit
def run_of(a, part):
    """A part's run: its first sequence, the first pair there, and the number of pairs."""
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    total = 0
    for first in range(0, a.batch, RUN):
        at = first + gl.arange(0, RUN, EACH)
        inside = at < a.batch
        total += gl.sum(gl.where(inside, pairs_of(keys_of(a, gl.minimum(at, a.batch - 1))), 0), 0)
    begin = (part.to(gl.int64) * total // a.parts).to(gl.int32)
    end = ((part + 1).to(gl.int64) * total // a.parts).to(gl.int32)
    seq = 0
    start = 0  # of the sequence
    before = 0
    for first in range(0, a.batch, RUN):
        at = first + gl.arange(0, RUN, EACH)
        inside = at < a.batch
        pairs = gl.where(inside, pairs_of(keys_of(a, gl.minimum(at, a.batch - 1))), 0)
        ends = before + gl.associative_scan(pairs, 0, add)
        passed = inside & (ends <= begin)
        seq += gl.sum(passed.to(gl.int32), 0)
        start = gl.maximum(start, gl.max(gl.where(passed, ends, 0), 0))
        before += gl.sum(pairs, 0)
    return seq, begin - start, end - begin


@aggregate
class Run:
    """What is left of a program's run, and its tile of query rows."""

    seq: gl.tensor
    first: gl.tensor  # pair of that sequence
    left: gl.tensor  # pairs
    part: gl.tensor
    tile: gl.tensor

    @gluon.constexpr_function
    def __init__(self, seq, first, left, part, tile):
        self.seq = seq
        self.first = first
        self.left = left
        self.part = part
        self.tile = tile


@aggregate
class Fragment:
    """Pairs first .. last of a sequence; those from `whole` on may hold hidden cells."""

    seq: gl.tensor
    n: gl.tensor  # keys of the sequence
    first: gl.tensor
    last: gl.tensor
    whole: gl.tensor
    alone: gl.tensor  # the fragment is the whole sequence

    @gluon.constexpr_function
    def __init__(self, seq, n, first, last, whole, alone):
        self.seq = seq
        self.n = n
        self.first = first
        self.last = last
        self.whole = whole
        self.alone = alone


@gluon.jit
def fragment(a, seq, first, left):
    n = keys_of(a, seq)
    pairs = pairs_of(n)
    last = gl.minimum(pairs, first + left)
    seen = n  # keys that every query sees
    if a.S.causal:
        seen = gl.maximum(n - (a.q_len - 1), 0)
    whole = gl.minimum(gl.maximum(seen // 128, first), last)
    return Fragment(seq, n, first, last, whole, (first == 0) & (last == pairs))
