"""Causal, window, chunk and length rules, and the interval of keys that they leave visible to each query row.

Each rule keeps one interval of keys, so together they keep one, `[lo, hi)`, and neither end moves left from one row to
the next. Tile maps, costs and tile loops rely on this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

Window = tuple[int | None, int | None]
# The position of the first query: one number for all sequences, "rows" for a tensor [B], or "end": the queries are the
# last positions of their sequence.
Offset = int | Literal["rows", "end"]
OFFSET_KINDS = {"int": 0, "rows": 1, "end": 2}  # as a kernel's struct holds them
# (k_start, k_stride, q_stride): key j is at position k_start + k_stride * j, query i at q_offset + q_stride * i.
# "rows": each sequence has its own, in a tensor [B, 3].
Places = tuple[int, int, int] | Literal["rows"]
PLAIN_PLACES = (0, 1, 1)
PLACE_KINDS = {"": 0, "int": 1, "rows": 2}


@dataclass(frozen=True, slots=True)
class MaskRules:
    """The rules that hide keys by position or by the sequence's length. A new rule is a new field.

    `Problem` holds them as this one value, and backends take it whole. Where offsets, lengths or places differ between
    sequences, the tensor is in `Tensors`, and the field only says that there is one.
    """

    causal: bool = False
    window: Window = (None, None)  # keys to the left and right of the query's own; None = unlimited
    chunk: int = 0  # positions in a chunk; 0: no chunks
    q_offset: Offset = "end"  # the position of the first query
    kv_lengths: bool = False  # each sequence has its own number of keys
    places: Places = PLAIN_PLACES  # strides of positions, and the first key's

    @property
    def by_position(self) -> bool:
        """Whether a rule hides keys by position. Lengths alone hide no key of the sequence."""
        return self.relative() != NO_RULES

    @property
    def flags(self) -> RuleFlags:
        """Which rules are set, without their numbers."""
        left, right = (side is not None for side in self.window)
        offset = self.q_offset if isinstance(self.q_offset, str) else "int"
        return RuleFlags(self.causal, left, right, self.chunk > 0, offset, self.kv_lengths, self.affine)

    @property
    def affine(self) -> str:
        """How positions differ from row numbers: "" not at all, "int" alike in all sequences, "rows" by a tensor."""
        return "" if self.places == PLAIN_PLACES else "rows" if self.places == "rows" else "int"

    def relative(self) -> MaskRules:
        """The rules alone: without positions of queries and keys, and without lengths."""
        return replace(self, q_offset="end", kv_lengths=False, places=PLAIN_PLACES)

    def options(self) -> dict[str, Any]:
        """The rules as options of an entry point."""
        window = None if self.window == (None, None) else self.window
        return {"causal": self.causal, "window": window, "chunk": self.chunk or None}

    @property
    def absolute(self) -> bool:
        """Whether absolute positions matter, and not only the distance from query to key."""
        return self.chunk > 0

    def unstrided(self) -> MaskRules | None:
        """Equivalent rules over row numbers, without strides; None if there are none.

        If queries and keys have the same stride, as in a striped ring, a distance is a multiple of it plus an offset:
        causal and windows become bounds on `i - j`. The distances themselves, which ALiBi uses, do change.
        """
        if not self.affine:
            return self
        if self.places == "rows" or not isinstance(self.q_offset, int) or self.chunk or len(set(self.places[1:])) > 1:
            return None
        shift, stride = self.q_offset - self.places[0], self.places[1]
        left, right = self.window
        least = [-((side + shift) // stride) for side in (0 if self.causal else None, right) if side is not None]
        most = None if left is None else (left - shift) // stride  # largest i - j
        if not least:
            return replace(
                self,
                places=PLAIN_PLACES,
                q_offset=0 if most is None else -most,
                window=(None if most is None else 0, None),
            )
        reach = None if most is None else most - max(least)
        if reach is not None and reach < 0:  # no query sees any key
            return None
        return MaskRules(True, (reach, None), 0, -max(least), self.kv_lengths)

    def numbers(self) -> dict[str, int]:
        """The rules as int32 fields of a kernel's struct; 0 where a rule is not set."""
        flags, (left, right) = self.flags, self.window
        k_start, k_stride, q_stride = PLAIN_PLACES if self.places == "rows" else self.places
        return {
            "causal": self.causal,
            "has_left": flags.left,
            "left": left or 0,
            "has_right": flags.right,
            "right": right or 0,
            "chunk": self.chunk,
            "q_offset": self.q_offset if isinstance(self.q_offset, int) else 0,
            "offset_kind": OFFSET_KINDS[flags.offset],
            "k_start": k_start,
            "k_stride": k_stride,
            "q_stride": q_stride,
            "place_kind": PLACE_KINDS[flags.affine],
            "has_lengths": self.kv_lengths,
        }

    def keys_per_query(self, q_len: int, kv_len: int) -> float:
        """About how many keys a query sees, for cost estimates."""
        left, right = self.window
        step = 1 if self.places == "rows" else self.places[1]  # positions between keys
        keys = float(kv_len)
        if self.causal:
            keys /= 2 if q_len == kv_len else 1
            right = 0
        if left is not None:
            keys = min(keys, (left + 1) / step + (kv_len if right is None else right / step))
        return min(keys, self.chunk / step) if self.chunk else keys

    def describe(self) -> list[str]:
        """The position rules in words, as the options are written."""
        left, right = self.window
        words = ["causal" * self.causal, f"window ({left}, {right})" * (self.window != (None, None))]
        words.append(f"chunk {self.chunk}" * bool(self.chunk))
        if self.places == "rows":
            words.append("k_start, k_stride and q_stride by row")
        else:
            given = zip(("k_start", "k_stride", "q_stride"), self.places, PLAIN_PLACES, strict=True)
            words += [f"{name} {value}" for name, value, plain in given if value != plain]
        return [word for word in words if word]

    def __str__(self) -> str:
        """In words.

        >>> print(MaskRules(causal=True, window=(255, None)), MaskRules(), sep=" | ")
        causal, window (255, None) | none
        """
        return ", ".join(self.describe()) or "none"


NO_RULES = MaskRules()


@dataclass(frozen=True, slots=True)
class RuleFlags:
    """Which rules are set. Kernels are compiled for these; the rules' numbers are arguments."""

    causal: bool
    left: bool
    right: bool
    chunk: bool
    offset: str  # "int", "rows" or "end"
    lengths: bool
    affine: str = ""  # "", "int" or "rows", as `MaskRules.affine`

    @property
    def hides_left(self) -> bool:
        """Whether keys to the left of a row may be hidden."""
        return self.left or self.chunk

    @property
    def hides_right(self) -> bool:
        """Whether keys to the right of a row may be hidden."""
        return self.causal or self.right or self.chunk

    @property
    def jumps(self) -> bool:
        """Whether `lo` may move by more than one key from a row to the next."""
        return self.chunk or self.affine != ""


# The entries of `MaskRules.numbers` that kernels compiled for certain flags still take as arguments.
RULE_NUMBERS = ("left", "right", "chunk", "k_start", "k_stride", "q_stride")


def place_rows(given: Sequence[torch.Tensor | int], batch: int, device: torch.device, most: int) -> torch.Tensor:
    """`Tensors.places` from ints and tensors [B]. Values that were not checked are clamped to their range."""
    columns = [torch.as_tensor(x, device=device).expand(batch) for x in given]
    ends = [column.clamp(least, most) for column, least in zip(columns, (-most, 1, 1), strict=True)]
    return torch.stack([column.to(torch.int32) for column in ends], 1)


def rows_before(distance: int, stride: int) -> int:
    """How many rows at positions 0, stride, 2 * stride, ... are before `distance`; may be negative."""
    return -(-distance // stride)


def key_span(rules: MaskRules, position: int, kv_len: int) -> tuple[int, int]:
    """`[lo, hi)`: the keys that a query at `position` sees; empty when `hi <= lo`."""
    left, right = rules.window
    assert rules.places != "rows", "each sequence has its own: `Sequence.rules`"
    k_start, k_stride, _ = rules.places

    def before(end: int) -> int:  # keys before a position
        return rows_before(end - k_start, k_stride)

    lo, hi = 0, kv_len
    if rules.causal:
        hi = min(hi, before(position + 1))
    if left is not None:
        lo = max(lo, before(position - left))
    if right is not None:
        hi = min(hi, before(position + right + 1))
    if rules.chunk:
        start = position // rules.chunk * rules.chunk
        lo, hi = max(lo, before(start)), min(hi, before(start + rules.chunk))
    return lo, hi


def query_span(rules: MaskRules, key: int, offset: int, q_len: int) -> tuple[int, int]:
    """`[lo, hi)`: the query rows that see `key`, the first row being at position `offset`; empty when `hi <= lo`.

    The inverse of `key_span`: the sides of a window are swapped. Neither end moves left from one key to the next.
    """
    left, right = rules.window
    assert rules.places != "rows", "each sequence has its own: `Sequence.rules`"
    k_start, k_stride, q_stride = rules.places
    position = k_start + k_stride * key

    def before(end: int) -> int:  # rows before a position
        return rows_before(end - offset, q_stride)

    lo, hi = 0, q_len
    if rules.causal:
        lo = max(lo, before(position))
    if left is not None:
        hi = min(hi, before(position + left + 1))
    if right is not None:
        lo = max(lo, before(position - right))
    if rules.chunk:
        start = position // rules.chunk * rules.chunk
        lo, hi = max(lo, before(start)), min(hi, before(start + rules.chunk))
    return lo, hi


def key_spans(
    rules: MaskRules,
    positions: torch.Tensor,
    kv_len: torch.Tensor | int,
    places: tuple[Any, ...] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`key_span` of many rows: `lo` and `hi`, int64, in the shape of `positions`. `kv_len` broadcasts against it, and
    so do `places` = (k_start, k_stride), which replace those of the rules.
    """
    left, right = rules.window
    if places is None and rules.affine:
        assert rules.places != "rows", "each sequence has its own: `Sequence.rules`"
        places = rules.places[:2]

    def before(end: torch.Tensor) -> torch.Tensor:  # keys before a position
        return end if places is None else -torch.div(places[0] - end, places[1], rounding_mode="floor")

    lo = torch.zeros_like(positions)
    hi = torch.zeros_like(positions) + kv_len
    if rules.causal:
        hi = torch.minimum(hi, before(positions + 1))
    if left is not None:
        lo = torch.maximum(lo, before(positions - left))
    if right is not None:
        hi = torch.minimum(hi, before(positions + right + 1))
    if rules.chunk:
        start = positions.div(rules.chunk, rounding_mode="floor") * rules.chunk
        lo, hi = torch.maximum(lo, before(start)), torch.minimum(hi, before(start + rules.chunk))
    return lo, hi


def visible_by_position(rules: MaskRules, qpos: torch.Tensor, kpos: torch.Tensor) -> torch.Tensor:
    """The rules cell by cell: whether queries at `qpos` see keys at `kpos`, which broadcast against each other."""
    left, right = rules.window
    seen = torch.ones((), dtype=torch.bool, device=qpos.device).expand(torch.broadcast_shapes(qpos.shape, kpos.shape))
    if rules.causal:
        seen = seen & (kpos <= qpos)
    if left is not None:
        seen = seen & (qpos - kpos <= left)
    if right is not None:
        seen = seen & (kpos - qpos <= right)
    if rules.chunk:
        key_chunk, chunk = (x.div(rules.chunk, rounding_mode="floor") for x in (kpos, qpos))
        seen = seen & (key_chunk == chunk)
    return seen
