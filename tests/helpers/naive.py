"""A cache as plain lists, and attention over it by the oracle: what the caches are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from tilewise import Quantised
from tilewise.core.options import Options
from tilewise.core.storage import FLOATS
from tilewise.core.tensors import sequences
from tilewise.kv_cache import hadamard
from tilewise.reference import attend
from tilewise.testing import check
from tilewise.testing.check import Mismatch, judge, largest_error, torch_errors, torch_math
from tilewise.validation import calls

# Sets of queries that torch's own error is taken from before a result is called wrong. Sixteen are too few where some
# 40000 results are judged: one was 1.41 times as far off as those allowed (an int4 ring of 8 keys of 8). Over 300 sets
# of queries ours were off by 6.4e-7 in the mean square there and 2.1e-6 at most, torch's by 6.8e-7 and 1.9e-6.
MANY = 256


def stored(x, name, group=64):
    """What a cache of this type makes of rows."""
    return x.float().to(FLOATS[name]).float() if name in FLOATS else Quantised.from_float(x, name, group).dequantise()


class Row:
    """A sequence: its tokens in a list, and the first position that is still held."""

    def __init__(self, dtype="f32", v_dtype=None, group=64):
        self.dtype, self.v_dtype, self.group = dtype, v_dtype or dtype, group
        self.tokens: list[tuple[torch.Tensor, torch.Tensor]] = []  # [Hkv, D], [Hkv, Dv]
        self.first = 0

    def copy(self):
        other = Row(self.dtype, self.v_dtype, self.group)
        other.tokens, other.first = list(self.tokens), self.first
        return other

    def append(self, k, v, capacity=None):
        """k and v [Hkv, n, D]."""
        k, v = stored(k, self.dtype, self.group), stored(v, self.v_dtype, self.group)
        self.tokens += [(k[:, i], v[:, i]) for i in range(k.shape[1])]
        if capacity is not None:
            self.first = max(self.first, len(self.tokens) - capacity)

    def truncate(self, length):
        del self.tokens[length:]

    def held(self, which):
        """The keys (0) or values (1) held, [Hkv, n, D]."""
        rows = [token[which] for token in self.tokens[self.first :]]
        return torch.stack(rows, 1) if rows else None

    @classmethod
    def held_by(cls, cache, sequence):
        """What a `PagedKVCache` holds of a sequence."""
        row = cls()
        row.append(cache.keys(sequence), cache.values(sequence))
        return row

    def attend(self, q, q_offset=None, dtype=torch.float32, rotated=False, **options):
        """q [H, Lq, D] over all tokens that are held, at their true positions; [H, Lq, Dv], lse [H, Lq].

        `dtype` is what the call is judged as: no narrower than the queries, keys and values are. With `rotated`, torch
        turns all of them too, and its output back.
        """
        n = len(self.tokens)
        if not n:
            return None
        k, v = (torch.stack([token[i] for token in self.tokens], 1).to(dtype) for i in (0, 1))
        mask = options.pop("mask", None)
        if self.first:
            assert mask is None
            mask = (torch.arange(n) >= self.first).expand(q.shape[1], n)
        offset = n - q.shape[1] if q_offset is None else q_offset
        # Few numbers may be right by chance in torch's arithmetic: other sets of queries, each of the same elements,
        # count too. (With 4 of them one of some 10000 results was 1.03 times as far off as it may be: 3 keys of 8.)
        few = [sign * q.roll(n, -1) for n in range(8) for sign in (1, -1)]

        def errors(sets):
            """What torch's errors on these sets allow in out and in lse, and the exact result of the first set."""
            keys, values = (x.expand(len(sets), *x.shape) for x in (k, v))
            call = calls.dense(
                torch.stack(sets).to(dtype), keys, values, Options(q_offset=offset, mask=mask, **options)
            )
            factor = 3 if call.problem.softcap else 2
            both = turned_errors(call) if rotated else torch_errors(call)
            return *(factor * x for x in both), attend(next(sequences(call.problem, call.tensors)))

        def many(which):
            signs = torch.randint(0, 2, (MANY, q.shape[-1]), generator=torch.Generator().manual_seed(0)) * 2 - 1
            return errors([q * sign for sign in signs])[which]

        out, lse, exact = errors(few)
        return Exact("out", exact.out, out, partial(many, 0)), Exact("lse", exact.lse, lse, partial(many, 1))


class Exact(NamedTuple):
    """A result in float64, and how far others may be from it: 2 times as far as torch's arithmetic, 3 with softcap."""

    name: str
    values: torch.Tensor
    allowed: float
    allowed_by_many: Callable[[], float]  # the same from MANY sets of queries, for a result that is off by the first


def turned_errors(call):
    """`torch_errors` of a call whose rows are turned by a Hadamard matrix first and its output turned back."""
    t = call.tensors
    turned = replace(t, q=hadamard.rotate(t.q), k=hadamard.rotate(t.k), v=hadamard.rotate(t.v))
    out = lse = 0.0
    for sequence, other in zip(sequences(call.problem, t), sequences(call.problem, turned), strict=True):
        exact, (plain_out, plain) = attend(sequence), torch_math(other)
        out = max(out, largest_error(hadamard.rotate_back(plain_out), exact.out))
        lse = max(lse, largest_error(plain.scores, exact.scores), largest_error(plain.lse, exact.lse))
    return out, lse


def assert_close(got, want):
    """As near to the oracle as the project's rule says."""
    try:
        judge(want.name, got, want.values, want.allowed, got.dtype)
    except Mismatch:
        judge(want.name, got, want.values, want.allowed_by_many(), got.dtype)


def query_sets(q):
    """The queries and up to 7 sets of the same elements in other places, as many as have `check.MANY` rows together.

    Torch's arithmetic may get a few numbers right by chance; that of many tells how exact it is.
    """
    width = q.shape[-1]
    sets = min(8, width, -(-check.MANY * width // max(1, q.numel())))
    return [q.roll(i * (width // sets), -1) for i in range(sets)]


def assert_as_torch(got, exact, plain, name="rows"):
    """At most twice as far from the exact numbers, in float64, as torch's own in `plain`."""
    judge(name, got, exact, 2 * largest_error(plain, exact), got.dtype)
