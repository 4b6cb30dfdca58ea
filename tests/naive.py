"""A cache as plain lists, and attention over it by the oracle: what the caches are compared with."""

from __future__ import annotations

import torch

from tilewise import Quantised, attention
from tilewise.caches.formats import PLAIN


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

    def attend(self, q, q_offset=None, **options):
        """q [H, Lq, D] over all tokens that are held, at their true positions; [H, Lq, Dv], lse [H, Lq]."""
        n = len(self.tokens)
        if not n:
            return None
        k, v = (torch.stack([token[i] for token in self.tokens], 1) for i in (0, 1))
        mask = options.pop("mask", None)
        if self.first:
            assert mask is None
            mask = (torch.arange(n) >= self.first).expand(q.shape[1], n)
        offset = n - q.shape[1] if q_offset is None else q_offset
        state = attention(
            q[None].float(), k[None], v[None], q_offset=offset, mask=mask, return_lse=True, backend="reference",
            **options,
        )  # fmt: skip
        return state.out[0], state.lse[0]


def assert_close(got, want, tolerance=2e-5):
    torch.testing.assert_close(got.float(), want.float(), rtol=tolerance, atol=tolerance)
