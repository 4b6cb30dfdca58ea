"""The tensors of a call, in the form that `problem.py` describes, and a view of one sequence of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from .dropout import kept_cells, kept_scale
from .mask_rules import MaskRules, key_spans, visible_by_position
from .problem import CAPTURED, GRADS, Problem, captured_number
from .storage import StorageFormat
from .tile_map import TileMap


@dataclass(slots=True)
class Tensors:
    """What a backend reads and writes: strided views with unit stride in the last dim; broadcast dims have stride 0."""

    q: torch.Tensor  # [B, H, Lq, D] or, packed, [1, H, T, D]
    k: torch.Tensor  # [B, Hkv, Lk, D], [1, Hkv, T, D] or pages [P, Hkv, page_size, D]; packed: fewer columns
    v: torch.Tensor  # likewise with Dv
    out: torch.Tensor  # as q, with Dv
    lse: torch.Tensor | None = None  # float32, as q without its last dim
    k_scales: torch.Tensor | None = None  # as k, one for each group of the last dim
    v_scales: torch.Tensor | None = None
    mask: torch.Tensor | None = None  # [B, H, Lq, Lk], stride 0 where broadcast; bool or float
    tree_mask: torch.Tensor | None = None  # bool [B, Lq, Lq], stride 0 where sequences share it
    positions: torch.Tensor | None = None  # int32 [B, Lq], likewise: where queries and their own keys stand
    alibi_slopes: torch.Tensor | None = None  # float32 [B, H]
    q_bias: torch.Tensor | None = None  # float32 [B, H, Lq] or, packed, [1, H, T]; stride 0 where broadcast
    k_bias: torch.Tensor | None = None  # float32 [B, H, Lk] or, of packed keys, [1, H, T]
    sinks: torch.Tensor | None = None  # float32 [H]
    k_shared: torch.Tensor | None = None  # as k, of one head: its last columns, which all heads share
    places: torch.Tensor | None = None  # int32 [B, 3]: k_start, k_stride, q_stride, where they are not the same in all
    key_indices: torch.Tensor | None = None  # int32 [B, Hkv, ceil(Lq / block), n], packed [1, Hkv, T, n]; stride 0
    # where heads share them; blocks of keys if `Problem.selection.block` is over 1
    dropout_seed: torch.Tensor | None = None  # int64 [1]
    kv_lengths: torch.Tensor | None = None  # int32 [B]; the context lengths of a paged call
    q_offset: torch.Tensor | None = None  # int32 [B]
    cu_seqlens_q: torch.Tensor | None = None  # int32 [B + 1]
    cu_seqlens_k: torch.Tensor | None = None  # int32 [B + 1]
    block_table: torch.Tensor | None = None  # int32 [B, max_pages]
    tile_map: TileMap | None = None
    captured: tuple[torch.Tensor, ...] = ()  # what the functions of the user read, as `Problem.mods` declares

    def tables(self) -> list[torch.Tensor | None]:
        """The fields in TABLES, in their order."""
        return [getattr(self, name) for name in TABLES]

    def with_joined_keys(self) -> Tensors:
        """The tensors with `k_shared` joined to K: see `Problem.with_joined_keys`."""
        assert self.k_shared is not None
        return replace(self, k=torch.cat([self.k, self.k_shared.expand(*self.k.shape[:3], -1)], -1), k_shared=None)


FIELDS = tuple(f.name for f in fields(Tensors) if f.name not in ("tile_map", "captured"))  # those that hold a tensor
INPUTS = tuple(name for name in FIELDS if name not in ("out", "lse"))
TABLES = FIELDS[FIELDS.index("kv_lengths") :]  # lengths, offsets and the block table: the last fields


@dataclass(slots=True)
class BackwardTensors:
    """What a backward pass reads (`forward` with its `out` and `lse`, `dout`, `dlse`) and writes (the gradients).

    The gradients named in `Problem.grads` are there, uninitialised; every element is written.
    """

    forward: Tensors
    dout: torch.Tensor  # as out; strides may be 0
    dlse: torch.Tensor | None = None  # float32, as lse; strides may be 0
    dq: torch.Tensor | None = None  # as q, and in its dtype
    dk: torch.Tensor | None = None  # likewise; never broadcast, even if k is
    dv: torch.Tensor | None = None
    dmask: torch.Tensor | None = None  # [1 or B, 1 or H, 1 or Lq, 1 or Lk]: summed over the mask's broadcast dims, in
    # float32; in the mask's dtype if it has none
    dsinks: torch.Tensor | None = None  # float32 [H]
    dalibi_slopes: torch.Tensor | None = None  # float32 [B, H]
    dq_bias: torch.Tensor | None = None  # float32, full size: sums over broadcast dims are taken later
    dk_bias: torch.Tensor | None = None
    dcaptured: dict[int, torch.Tensor] = field(default_factory=dict)  # float32, by number, as the captured tensors

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients that are there, by their names in `Problem.grads`."""
        found = {name: getattr(self, f"d{name}") for name in GRADS}
        captured = {f"{CAPTURED}{number}": x for number, x in self.dcaptured.items()}
        return {name: x for name, x in found.items() if x is not None} | captured


@dataclass(slots=True)
class TangentTensors:
    """Forward mode: a direction in the space of inputs, and the derivative of `out` and `lse` in that direction."""

    inputs: Tensors  # in the form of the call's; None where an input does not move, and in all other fields
    out: torch.Tensor  # as out
    lse: torch.Tensor  # as lse


@dataclass(slots=True)
class Statistics:
    """What `return_aux` requests, float32 and to be written; None where it was not requested."""

    max_logits: torch.Tensor | None = None  # as lse
    entropy: torch.Tensor | None = None  # as lse
    key_mass: torch.Tensor | None = None  # [B, H, Lk] or, of packed keys, [1, H, T]; of pages all that a row may hold
    weights: torch.Tensor | None = None  # as out, with n columns
    indices: torch.Tensor | None = None  # int32 [B, H, Lq, n], the keys of `weights`; stride 0 where heads share them
    queries: int = 0  # of each sequence, the last ones, whose weights are summed in `key_mass`; 0: all

    def clear(self) -> None:
        """Writes the statistics of rows that see no key, and of keys that no row sees."""
        for name in ("entropy", "key_mass", "weights"):
            if (x := getattr(self, name)) is not None:
                x.zero_()
        if self.max_logits is not None:
            self.max_logits.fill_(-torch.inf)

    def of(self, seq: Sequence) -> Statistics:
        """Those of one sequence, `[H, Lq]`, `[H, kv_len]` and `[H, Lq, n]`."""
        rows = seq.row, slice(None), slice(seq.q_start, seq.q_start + seq.q_len)
        keys = 0 if seq.problem.form == "varlen" else seq.b, slice(None), slice(seq.kv_start, seq.kv_start + seq.kv_len)
        found = Statistics(queries=self.queries)
        for name in ("max_logits", "entropy", "key_mass", "weights", "indices"):
            if (x := getattr(self, name)) is not None:
                setattr(found, name, x[keys if name == "key_mass" else rows])
        return found

    def first_query(self, seq: Sequence) -> int:
        """The first query of a sequence that counts for `key_mass`."""
        return max(0, seq.q_len - self.queries) if self.queries else 0


def as_fields(gradients: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Gradients by their names in `Problem.grads` as fields of `BackwardTensors`."""
    numbers = {captured_number(name): x for name, x in gradients.items()}
    numbers.pop(None, None)
    return {f"d{name}": x for name, x in gradients.items() if name in GRADS} | {"dcaptured": numbers}


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Prefixes that sequences of a paged call share, as a paged call of its own: one sequence for each prefix.

    `q` has the call's queries, packed `[T, H, D]`, sorted by prefix.
    """

    q: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    cu_seqlens: torch.Tensor
    max_q: int
    back: torch.Tensor | None  # int64 [T]: the row in `q` of each of the call's rows; None if the order is the same

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.block_table, self.lengths, self.cu_seqlens


@dataclass(slots=True)
class Sequence:
    """Sequence `b` of a call: its rows, length and positions, and its keys and values, dequantised."""

    problem: Problem
    tensors: Tensors
    b: int
    q_start: int  # its first row in q and out
    q_len: int
    kv_start: int  # its first row in k and v, if they are packed
    kv_len: int
    q_offset: int  # the position of its first query
    rules: MaskRules  # the problem's, with the sequence's own places

    @property
    def row(self) -> int:
        """Its index in the first dim of q and out."""
        return 0 if self.problem.packed_q else self.b

    @property
    def q(self) -> torch.Tensor:  # [H, Lq, D]
        return self.tensors.q[self.row, :, self.q_start : self.q_start + self.q_len]

    @property
    def out(self) -> torch.Tensor:  # [H, Lq, Dv]
        return self.tensors.out[self.row, :, self.q_start : self.q_start + self.q_len]

    @property
    def lse(self) -> torch.Tensor | None:  # [H, Lq]
        lse = self.tensors.lse
        return None if lse is None else lse[self.row, :, self.q_start : self.q_start + self.q_len]

    @property
    def slopes(self) -> torch.Tensor | None:  # [H]
        slopes = self.tensors.alibi_slopes
        return None if slopes is None else slopes[self.b]

    @property
    def places(self) -> tuple[int, int, int]:
        """k_start, k_stride, q_stride."""
        places = self.rules.places
        assert places != "rows"
        return places

    @property
    def own_keys(self) -> int:
        """The first of the last Lq keys: the queries' own."""
        return self.kv_len - self.q_len

    def position(self, row: int) -> int:
        """The position of query `row`, unless a tensor has it."""
        return self.q_offset + self.places[2] * row

    def positions(
        self, rows: slice, cols: slice, device: torch.device | str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [n, 1], [1, m]
        """The positions of these queries and keys, on the device of q or another."""
        k_start, k_stride, q_stride = self.places
        device = self.tensors.q.device if device is None else device
        i, j = (torch.arange(x.start, x.stop, device=device) for x in (rows, cols))
        if self.tensors.positions is not None:
            given = self.tensors.positions[self.b, : self.q_len].to(device).long().clamp_min(self.own_keys)
            kpos = torch.where(j < self.own_keys, j, given[(j - self.own_keys).clamp_min(0)]) if self.q_len else j
            return given[rows, None], kpos[None, :]
        return (self.q_offset + q_stride * i)[:, None], (k_start + k_stride * j)[None, :]

    def spans(
        self, rows: slice, device: torch.device | str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [n, 1] each
        """The keys `[lo, hi)` that the rules leave to these queries. With positions of a tree's nodes they cover only
        the keys before the tree: `tree` has the rest.
        """
        qpos = self.positions(rows, slice(0, 0), device)[0]
        lo, hi = key_spans(self.rules, qpos, self.kv_len)
        if self.tensors.positions is not None:
            lo, hi = lo.clamp_max(max(0, self.own_keys)), torch.full_like(hi, self.kv_len)
        return lo, hi

    def keys(self, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:  # [Hkv, n, D]
        t = self.tensors
        own = self._widened(t.k, t.k_scales, self.problem.k_format, start, end, dtype)
        if t.k_shared is None:
            return own
        shared = self._widened(t.k_shared, None, self.problem.k_format, start, end, dtype)
        return torch.cat([own, shared.expand(*own.shape[:2], -1)], -1)

    def values(self, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:  # [Hkv, n, Dv]
        t = self.tensors
        return self._widened(t.v, t.v_scales, self.problem.v_format, start, end, dtype)

    def keys_and_values(self, start: int, end: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Both; if V is in K, values are a view of the keys."""
        k = self.keys(start, end, dtype)
        return k, k[..., : self.problem.value_dim] if self.problem.v_in_k else self.values(start, end, dtype)

    def mask(self, rows: slice, cols: slice) -> torch.Tensor | None:  # [H, n, m]
        mask = self.tensors.mask
        return None if mask is None else mask[self.b, :, rows, cols]

    def chosen(self, rows: slice, cols: slice) -> torch.Tensor | None:  # bool [H, n, m]
        """The cells selected by key or block indices; None if the call has none."""
        indices, selection, p = self.tensors.key_indices, self.problem.selection, self.problem
        if indices is None or selection is None:
            return None
        block, device = selection.block, indices.device
        first, last = cols.start // block, -(-cols.stop // block)
        i = torch.arange(self.q_start + rows.start, self.q_start + rows.stop, device=device) // block
        heads = p.kv_heads if selection.by_head else 1
        own = indices[self.row, :heads][:, i].long()  # [1 or Hkv, n, count]
        own = torch.where((own >= first) & (own < last), own, last) - first  # out of range: into a spare column
        blocks = torch.zeros((heads, len(i), last - first + 1), dtype=torch.bool, device=device).scatter_(2, own, True)
        j = torch.arange(cols.start, cols.stop, device=device) // block - first
        cells = blocks[:, :, j]
        return cells.repeat_interleave(p.group, 0) if heads > 1 else cells.expand(p.heads, -1, -1)

    def kept(self, rows: slice, cols: slice) -> torch.Tensor | None:  # bool [H, n, m]
        """The cells whose weights dropout keeps; None without dropout."""
        seed, p = self.tensors.dropout_seed, self.problem
        if seed is None:
            return None
        h = torch.arange(p.heads, device=seed.device)[:, None, None]
        return kept_cells(p.dropout_p, seed, self.b, h, *self.positions(rows, cols))

    def dropped(self, weights: torch.Tensor, rows: slice, cols: slice) -> torch.Tensor:  # [H, n, m]
        """Weights after dropout, or gradients by them."""
        kept = self.kept(rows, cols)
        return weights if kept is None else torch.where(kept, weights * kept_scale(self.problem.dropout_p), 0.0)

    def tree(self, rows: slice, cols: slice) -> torch.Tensor | None:  # bool [n, m]
        """The cells that the tree mask and rules on its positions leave; None if all these keys are before the tree."""
        tree, own = self.tensors.tree_mask, self.own_keys
        if tree is None or cols.stop <= own:
            return None
        before = max(0, own - cols.start)  # these keys are before the tree
        seen = tree[self.b, rows, max(cols.start - own, 0) : cols.stop - own]
        if self.tensors.positions is not None:
            seen = seen & visible_by_position(self.rules, *self.positions(rows, slice(cols.start + before, cols.stop)))
        return torch.nn.functional.pad(seen, (before, 0), value=True)

    def bias(self, rows: slice, cols: slice, dtype: torch.dtype) -> torch.Tensor | None:  # [H, n or 1, m or 1]
        """q_bias + k_bias of these cells."""
        t, total = self.tensors, None
        if t.q_bias is not None:
            own = slice(self.q_start + rows.start, self.q_start + rows.stop)
            total = t.q_bias[self.row, :, own, None].to(dtype)
        if t.k_bias is not None:
            own = slice(self.kv_start + cols.start, self.kv_start + cols.stop)
            keys = t.k_bias[0 if self.problem.form == "varlen" else self.b, :, None, own].to(dtype)
            total = keys if total is None else total + keys
        return total

    def _widened(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        stored: StorageFormat,
        start: int,
        end: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        own = None if scales is None else self._rows(scales, start, end)
        return stored.dequantise(self._rows(x, start, end), own, dtype)

    def _rows(self, x: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """Rows `start..end` of this sequence's K or V (or their scales): `[Hkv, n, ...]`."""
        p, table = self.problem, self.tensors.block_table
        if table is None:
            row = 0 if p.form == "varlen" else self.b
            return x[row, :, self.kv_start + start : self.kv_start + end]
        first, last = start // p.page_size, -(-end // p.page_size)
        of_bytes = x.view(torch.uint8) if x.element_size() == 1 else x  # torch 2.8 cannot gather float8
        pages = of_bytes[table[self.b, first:last].long()].view(x.dtype)  # [pages, Hkv, page_size, D]
        skip = start - first * p.page_size
        return pages.transpose(0, 1).flatten(1, 2)[:, skip : skip + end - start]


def sequences(problem: Problem, tensors: Tensors) -> Iterator[Sequence]:
    """The sequences of a call, one for each batch row. Reads lengths and offsets on the host."""

    def on_host(x: torch.Tensor | None) -> list[Any] | None:
        return None if x is None else x.tolist()

    lengths, offsets, places = map(on_host, (tensors.kv_lengths, tensors.q_offset, tensors.places))
    cu_q, cu_k = on_host(tensors.cu_seqlens_q), on_host(tensors.cu_seqlens_k)
    for b in range(problem.batch):
        q_start, q_len = (cu_q[b], cu_q[b + 1] - cu_q[b]) if cu_q else (0, problem.q_len)
        kv_start, kv_len = (cu_k[b], cu_k[b + 1] - cu_k[b]) if cu_k else (0, problem.kv_len)
        if lengths is not None:
            kv_len = lengths[b]
        offset = problem.rules.q_offset
        if not isinstance(offset, int):
            offset = kv_len - q_len if offsets is None else offsets[b]
        rules = problem.rules if places is None else replace(problem.rules, places=tuple(places[b]))
        yield Sequence(problem, tensors, b, q_start, q_len, kv_start, kv_len, offset, rules)
