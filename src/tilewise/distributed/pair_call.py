"""The parts of a call: each pair of query rows and key rows is a call of tilewise, forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..api import attention, varlen_attention
from ..autograd import AttentionGradients, attention_backward
from ..core.expression.mods import Bound, Mods, placed
from ..core.problem import CAPTURED
from ..state import AttentionState
from .layout import Ranks
from .packing import Pass, packed_rounds
from .schedule import Pair, Range, Round, Task, rounds

Unit = Pair | Pass


@dataclass
class Call:
    """What all parts of a call share. Tensor options are passed separately, since they may require grad."""

    task: Task
    ranks: Ranks
    options: dict[str, Any]  # of all parts: scale, softcap, layout, backend, ...
    packed: bool
    head: int  # the dims of heads and of tokens in q, k, v, out and lse
    seq: int
    offsets: torch.Tensor | int  # the first query's position: for all, or `[B]`
    lengths: torch.Tensor | None  # dense calls: keys in use `[B]`
    device: torch.device
    mods: Mods | None = None  # the functions of the user
    first_head: int = 0  # of this rank, among the heads of all

    @property
    def captured(self) -> tuple[str, ...]:
        """The names of the tensors that the functions capture, among those passed separately."""
        return () if self.mods is None else tuple(f"{CAPTURED}{n}" for n in range(len(self.mods.tensors)))

    @property
    def rounds(self) -> list[tuple[Round, tuple[Unit, ...]]]:
        schedule = rounds(self.task, self.ranks.rank)
        units: Any = packed_rounds(self.task, self.ranks.rank) if self.packed else [r.pairs for r in schedule]
        return list(zip(schedule, units, strict=True))

    @property
    def once(self) -> bool:
        """Whether each row is in at most one part, so that nothing has to be merged."""
        units = [unit for _, of_round in self.rounds for unit in of_round]
        if self.packed:
            return len(units) < 2
        ranges = sorted(rows(unit)[0] for unit in units)
        return all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))

    def cut(self, x: torch.Tensor, which: Range, heads: Range | None = None) -> torch.Tensor:
        for dim, part in ((self.seq, which), (self.head, heads)):
            if part is not None and part[1] - part[0] != x.shape[dim]:  # a view costs ten times this test
                x = x.narrow(dim, part[0], part[1] - part[0])
        return x

    def forward(self, unit: Unit, head: int, q: Any, kv: Any, extras: dict[str, Any]) -> AttentionState:
        """Runs one part. The tensors are sliced to its heads, from `head` on; q, k and v also to its rows."""
        options = self.options | self._part_options(unit, head, extras)
        tables = [options.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_k")] if self.packed else []
        if "sinks" in extras:
            options["sinks"] = extras["sinks"]
        return (varlen_attention if self.packed else attention)(q, *kv, *tables, return_lse=True, **options)

    def backward(
        self, unit: Unit, head: int, tensors: Any, grads: tuple[str, ...], extras: dict[str, Any]
    ) -> AttentionGradients:
        q, k, v, out, lse, dout, dlse = tensors
        shared = {name: x for name, x in self.options.items() if name != "split_size"}
        options = shared | self._part_options(unit, head, extras)
        return attention_backward(q, k, v, out, lse, dout, dlse=dlse, grads=grads, **options)

    def _part_options(self, unit: Unit, head: int, extras: dict[str, Any]) -> dict[str, Any]:
        """The options of one part: rules with the positions of its rows, and its slices of masks and slopes."""
        options = self._pass_options(unit) if isinstance(unit, Pass) else self._pair_options(unit)
        if "mask" in extras:
            options["mask"] = part_of_mask(extras["mask"], unit)
        options |= {name: part_of_bias(name, extras[name], unit) for name in ("q_bias", "k_bias") if name in extras}
        if "key_indices" in extras:
            options["key_indices"] = part_of_indices(extras["key_indices"], unit)
        if "alibi_slopes" in extras:
            slopes = extras["alibi_slopes"]
            options["alibi_slopes"] = slopes[documents(unit)] if self.packed and slopes.ndim == 2 else slopes
        if self.mods is not None:
            mods = placed(self.mods, self.first_head + head, self.packed)
            captured = tuple(extras[name] for name in self.captured)
            if len(mods.tensors) > len(captured):
                captured += (self._ints(documents(unit)),)
            options["score_mod"] = Bound(mods, captured)
        return options

    @property
    def _by_position(self) -> bool:
        """Whether parts need the positions of their keys, not only distances to queries."""
        return self.task.rules.absolute or self.mods is not None

    def _ints(self, values: Any) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def _pair_options(self, p: Pair) -> dict[str, Any]:
        options: dict[str, Any] = {"q_offset": self.offsets + p.qpos - p.kpos}
        if self._by_position or p.step > 1:
            options = {"q_offset": self.offsets + p.qpos, "k_start": p.kpos, "k_stride": p.step, "q_stride": p.step}
        if p.full:
            return options
        if self.lengths is not None:
            options["kv_lengths"] = -((p.kpos - self.lengths) // p.step).clamp(-p.keys, 0)
        return options | self.task.rules.options()

    def _pass_options(self, p: Pass) -> dict[str, Any]:
        ints = self._ints
        starts = [(0, 0) if x is None else (self.task.places[x.doc][0][0] + x.qpos, x.kpos) for x in p.pairs]
        options: dict[str, Any] = {"cu_seqlens_q": ints(p.cu_q), "cu_seqlens_k": ints(p.cu_k)}
        step = max(x.step for x in p.pairs if x)
        if self._by_position or step > 1:
            options |= {"q_offset": ints(q for q, _ in starts), "k_start": ints(k for _, k in starts)}
            options |= {"k_stride": step, "q_stride": step}
        else:
            options["q_offset"] = ints(q - k for q, k in starts)
        options |= {"max_q": p.max_q, "max_k": p.max_k}
        return options if p.full else options | self.task.rules.options()


def rows(unit: Unit) -> tuple[Range, Range]:
    """The part's rows of queries, and of keys in the buffer."""
    if isinstance(unit, Pass):
        return unit.q, unit.k
    return (unit.q, unit.q + unit.rows), (unit.k, unit.k + unit.keys)


def documents(unit: Unit) -> list[int]:
    assert isinstance(unit, Pass)
    return [0 if pair is None else pair.doc for pair in unit.pairs]


def part_of_bias(name: str, bias: torch.Tensor, unit: Unit) -> torch.Tensor:
    """A pair's view of `q_bias` (this rank's rows) or of `k_bias` (all keys)."""
    assert isinstance(unit, Pair)
    if name == "q_bias":
        return bias.narrow(-1, unit.q, unit.rows)
    return bias[..., slice(unit.kpos, unit.kpos + unit.keys * unit.step, unit.step)]


def part_of_indices(indices: torch.Tensor, unit: Unit) -> torch.Tensor:
    """Key indices of a pair's rows, relative to its keys; -1 for other keys."""
    assert isinstance(unit, Pair)
    chosen = indices.narrow(-2, unit.q, unit.rows)
    away = chosen - unit.kpos
    here = (chosen >= 0) & (away >= 0) & (away < unit.keys * unit.step) & (away % unit.step == 0)
    return torch.where(here, away // unit.step, -1).to(torch.int32)


# Masks. That of a dense call has this rank's rows and all keys; that of a packed call has all rows too.


def part_of_mask(mask: torch.Tensor, unit: Unit) -> torch.Tensor:
    """A part's slice of a mask: a view, or a padded copy for packed documents."""
    if isinstance(unit, Pair):
        return _cells(mask, unit, slice(unit.q, unit.q + unit.rows))
    part = mask.new_zeros((len(unit.pairs), mask.shape[1], unit.max_q, unit.max_k))
    for place, cells in _documents(part, mask, unit):
        place.copy_(cells)
    return part


def add_to_mask(dmask: torch.Tensor, part: torch.Tensor, unit: Unit) -> None:
    """Adds a part's gradient to the mask's."""
    if isinstance(unit, Pair):
        _cells(dmask, unit, slice(unit.q, unit.q + unit.rows)).add_(part)
        return
    for place, cells in _documents(part, dmask, unit):
        summed = [dim for dim, size in enumerate(cells.shape) if size == 1 != place.shape[dim]]
        cells.add_(place.sum(summed, keepdim=True) if summed else place)


def _documents(part: torch.Tensor, mask: torch.Tensor, unit: Pass) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each document, its cells in a part's mask and in the whole mask, `[1 or H, rows, keys]`."""
    for i, pair in enumerate(unit.pairs):
        if pair is not None:
            whole = mask[pair.doc if mask.shape[0] > 1 else 0]
            rows = slice(pair.qpos, pair.qpos + pair.rows * pair.step, pair.step)
            yield part[i, :, : pair.rows, : pair.keys], _cells(whole, pair, rows)


def _cells(mask: torch.Tensor, pair: Pair, rows: slice) -> torch.Tensor:
    """A pair's cells of a mask, a view."""
    if mask.shape[-2] > 1:
        mask = mask[..., rows, :]
    return mask[..., slice(pair.kpos, pair.kpos + pair.keys * pair.step, pair.step)] if mask.shape[-1] > 1 else mask
