"""A cache as plain lists, and attention over it by the oracle: what the caches are compared with."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewise import Quantised, checks
from tilewise.caches.formats import PLAIN
from tilewise.conformance.check import judge, torch_errors
from tilewise.options import Options
from tilewise.reference import attend
from tilewise.tensors import sequences


def stored(x, name, group=64):
    """What a cache of this type makes of rows."""
    return x.float().to(PLAIN[name]).float() if name in PLAIN else Quantised.from_float(x, name, group).dequantise()


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

    def attend(self, q, q_offset=None, dtype=torch.float32, **options):
        """q [H, Lq, D] over all tokens that are held, at their true positions; [H, Lq, Dv], lse [H, Lq].

        `dtype` is what the call is judged as: no narrower than the queries, keys and values are.
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
        # Few numbers may be right by chance in torch's arithmetic: three other sets of queries count too.
        calls = [
            checks.dense(x[None].to(dtype), k[None], v[None], Options(q_offset=offset, mask=mask, **options))
            for x in (q, -q, q.flip(-1), -q.flip(-1))
        ]
        errors = [torch_errors(call) for call in calls]
        factor = 3 if calls[0].problem.softcap else 2
        (sequence,) = sequences(calls[0].problem, calls[0].tensors)
        exact = attend(sequence)
        return (
            Exact("out", exact.out, factor * max(out for out, _ in errors)),
            Exact("lse", exact.lse, factor * max(lse for _, lse in errors)),
        )


class Exact(NamedTuple):
    """A result in float64, and how far others may be from it: 2 times as far as torch's arithmetic, 3 with softcap."""

    name: str
    values: torch.Tensor
    allowed: float


def assert_close(got, want, tolerance=2e-5):
    """As near to the oracle as the project's rule says; two results of kernels within `tolerance` of each other."""
    if isinstance(want, Exact):
        judge(want.name, got, want.values, want.allowed, got.dtype)
    else:
        torch.testing.assert_close(got.float(), want.float(), rtol=tolerance, atol=tolerance)
