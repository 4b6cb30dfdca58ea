"""`plan`: what each rank of a mesh computes, sends and stores, and a model of the time that takes.

The model of a rank, whose numbers are a `Machine`'s:

    a part      2 (D + Dv) FLOP for each visible cell, and for some extra keys in each of its rows (`full` or, on a
                diagonal, `diagonal`), at `flops`; plus `launch`
    merging     what partial results read and write, at `memory`
    a message   `latency`, plus its bytes at `link`, in each direction; rows that are cut out for it are copied first
    a round     computes while the next round's messages are in flight: the longer of the two

Backward: 2 (3D + 2Dv) FLOP a cell, at `backward_flops`; gradients of keys and values are messages to their owner.
Parts of all three gradients are summed at the cost of merging `out`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..core.mask_rules import key_spans
from ..core.options import as_flag, is_int
from ..errors import InvalidArgument
from .arguments import Place, prepare
from .function import head_groups
from .layout import ORDERS, Ranks, ranks_of, total
from .packing import passes
from .pair_call import Call
from .schedule import Pair, Range, Task, round_of

EVERY_RANK = 64  # in a larger ring only some ranks are counted
LOOKED_AT = 16
MOST_RANKS = 4096  # of a mesh given as numbers


@dataclass(frozen=True)
class Machine:
    """Speeds of a device and its links, for `plan`, in FLOP/s, bytes/s and seconds.

    The defaults are fitted to bf16 calls with head dim 128 on an H200 (`benchmarks/records/h200/hopper.json` and
    `benchmarks/records/h200/backward.json`: 1k, 4k and 16k tokens, full and causal). The link speed is that of an
    H100's NVLink.
    """

    name: str = "H200, links of 400 GB/s each way"
    flops: float = 668e12  # long calls
    backward_flops: float = 625e12
    full: float = 75  # extra keys that a row costs
    diagonal: float = 270
    backward_full: float = 130
    backward_diagonal: float = 240
    programs: float = 132  # blocks of 128 keys of a KV head: with fewer a backward call does not fill the device
    launch: float = 8e-6  # a call
    memory: float = 4e12
    merge: float = 1.375  # bytes moved for each byte of a part: each is read, one of eight is written and copied
    backward_merge: float = 1.375  # likewise
    link: float = 400e9
    latency: float = 10e-6

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            x, speed = getattr(self, field.name), field.name.endswith(("flops", "memory", "link"))
            if isinstance(x, bool) or not isinstance(x, (int, float)) or not 0 <= x < math.inf or (speed and not x):
                raise InvalidArgument(field.name, repr(x), "a finite number" + " above 0" * speed)


@dataclass(frozen=True)
class RankPlan:
    """The work of one rank, as part of a `DistributedPlan`."""

    rank: int
    cells: int  # visible (query, key) pairs, over its heads
    calls: int
    steps: int  # steps in which it computes something
    sent: int  # bytes of keys and values, forward
    received: int
    kept: int  # bytes of its q, k, v and out, and of two rounds of keys and values
    seconds: float


@dataclass(frozen=True)
class DistributedPlan:
    """What each rank of a mesh computes, sends and keeps. `str(plan)` is readable text."""

    scheme: str
    ring: int
    inner: int
    length: int
    steps: int  # ring steps
    backward: bool
    ranks: tuple[RankPlan, ...]  # some, in large rings
    ideal: float  # seconds of one device, divided by the ranks
    machine: Machine

    @property
    def balance(self) -> float:
        """The largest number of visible cells of a rank, divided by the mean over ranks."""
        mean = sum(r.cells for r in self.ranks) / len(self.ranks)
        return max(r.cells for r in self.ranks) / mean if mean else 1.0

    @property
    def seconds(self) -> float:
        """Modelled time of the slowest rank."""
        return max(r.seconds for r in self.ranks)

    @property
    def efficiency(self) -> float:
        """`ideal / seconds`: 1.0 is perfect scaling."""
        return self.ideal / self.seconds if self.seconds else 1.0

    @property
    def steps_left_out(self) -> int:
        """Steps of the ring that are not taken."""
        return self.ring - self.steps

    def __str__(self) -> str:
        every = "" if len(self.ranks) == self.ring else f", {len(self.ranks)} of them shown"
        mesh = f"{self.ring} x {self.inner}" if self.inner > 1 else str(self.ring)
        lines = [
            f"{self.scheme} over {mesh} ranks{every}: {self.length:,} tokens",
            f"  steps      {self.steps} of {self.ring}, {self.steps_left_out} left out",
            f"  balance    the slowest rank has {self.balance:.3f} of the mean work",
            f"  time       {1e3 * self.seconds:.3g} ms{' forward and backward' * self.backward}, {self.efficiency:.1%} "
            f"of ideal, by a model: {self.machine.name}",
            "  rank       cells      calls  steps  sent MB  received  kept MB  ms",
        ]
        for r in self.ranks:
            lines.append(
                f"  {r.rank:<6}{r.cells:>13,}{r.calls:>8}{r.steps:>7}{r.sent / 1e6:>10.2f}{r.received / 1e6:>9.2f}"
                f"{r.kept / 1e6:>9.2f}  {1e3 * r.seconds:.3g}"
            )
        return "\n".join(lines)


def plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: Any,
    scheme: str = "zigzag",
    length: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    backward: bool = False,
    machine: Machine | None = None,
    return_lse: bool = False,
    **options: Any,
) -> DistributedPlan:
    """What each rank would compute, send and keep in `attention` with these arguments. Nothing is sent or computed.

    Args:
        q: as in `attention`; so are `k`, `v`, `length`, `cu_seqlens_q`, `cu_seqlens_k` and all options. Tensors may be
            on the meta device.
        mesh: as in `attention`, or a number of ranks, `(ring, inner)` for `"2d"`, which needs no processes. The tensors
            are then those of rank 0.
        scheme: as in `attention`.
        backward: include the backward pass.
        machine: speeds for the modelled times. Default: an H200.
        return_lse: accepted, as in `attention`, but has no effect.

    >>> x = torch.empty(1, 8, 1024, 64, device="meta")  # 8192 tokens over 8 ranks
    >>> p = plan(x, x, x, mesh=8, scheme="ring", causal=True, window=256)
    >>> p.steps, p.ranks[1].received == 255 * 8 * 2 * 64 * 4
    (2, True)
    """
    if machine is not None and not isinstance(machine, Machine):
        raise InvalidArgument("machine", repr(machine), "None or a tilewise.distributed.Machine")
    as_flag("backward", backward)
    as_flag("return_lse", return_lse)
    ring, inner = _sizes(mesh, scheme)
    call, _, places = prepare(q, k, v, ring, inner, scheme, length, (cu_seqlens_q, cu_seqlens_k), options)
    task, m = call.task, machine or Machine()
    sampled = list(range(task.ranks))
    if task.ranks > EVERY_RANK:
        sampled = sorted({round(i * (task.ranks - 1) / (LOOKED_AT - 1)) for i in range(LOOKED_AT)})
    work = [_Rank(call, rank, q, k, v, inner.size, places, m) for rank in sampled]
    length = max(task.cu_q[-1], task.cu_k[-1], sum(map(total, task.k_pieces)))
    steps = 1 if task.gather else len({t for rank_work in work for t in rank_work.active})
    cells = sum(rank_work.cells for rank_work in work) / len(work) * task.ranks * inner.size
    rows = q.shape[call.head] * (1 if call.packed else q.shape[0]) * sum(map(total, task.q_pieces))
    extra = m.diagonal if task.rules.by_position else m.full
    ideal = _seconds(cells + extra * rows, q, v, m.flops, False)
    if backward:
        extra = m.backward_diagonal if task.rules.by_position else m.backward_full
        ideal += _seconds(cells + extra * rows, q, v, m.backward_flops, True)
    ranks = tuple(rank_work.plan(backward) for rank_work in work)
    size = task.ranks * inner.size
    return DistributedPlan(scheme, task.ranks, inner.size, length, steps, backward, ranks, ideal / size, m)


def _sizes(mesh: Any, scheme: str) -> tuple[Ranks, Ranks]:
    """The ranks of a mesh, which may be given as numbers."""
    numbers = (mesh,) if isinstance(mesh, int) else mesh
    if not isinstance(numbers, tuple) or scheme not in ORDERS:
        return ranks_of(mesh, scheme)
    valid = all(map(is_int, numbers)) and len(numbers) == (2 if scheme == "2d" else 1)
    if not valid or not 1 <= min(numbers) <= max(numbers) <= MOST_RANKS:
        want = f"a number of ranks, 1 to {MOST_RANKS}, or a pair (ring, inner) with scheme='2d'"
        raise InvalidArgument("mesh", repr(mesh), want)
    ring, inner = numbers if scheme == "2d" else (1, *numbers) if scheme == "ulysses" else (*numbers, 1)
    return Ranks(None, 0, ring), Ranks(None, 0, inner)


def _seconds(cells: float, q: torch.Tensor, v: torch.Tensor, rate: float, backward: bool) -> float:
    D, Dv = q.shape[-1], v.shape[-1]
    return 2 * (3 * D + 2 * Dv if backward else D + Dv) * cells / rate


class _Rank:
    """The work and messages of a rank's rounds."""

    def __init__(self, call: Call, rank: int, q: Any, k: Any, v: Any, inner: int, places: list[Place], m: Machine):
        self.call, self.rank, self.q, self.v, self.inner, self.m = call, rank, q, v, inner, m
        task = call.task
        batch = 1 if call.packed else q.shape[0]
        self.heads = batch * q.shape[call.head] // inner
        self.kv = kv = max(1, k.shape[call.head] // inner)  # fewer heads than ranks are replicated
        self.batch = batch
        token = batch * kv * (k.shape[-1] * k.element_size() + v.shape[-1] * v.element_size())
        self.groups = len(head_groups(call, self.heads, kv)) if task.ranks > 1 else 1
        self.rounds = [round_of(task, rank, t) for t in range(1 if task.gather else task.ranks)]
        self.parts = [passes(task, r.pairs) if call.packed else r.pairs for r in self.rounds]
        self.counted = [[self.count(p, places) for p in r.pairs] for r in self.rounds]
        self.cells = sum(map(sum, self.counted))
        self.active = [r.step for r in self.rounds if r.pairs]
        self.sent = [sum(x.rows for x in r.sends) * token for r in self.rounds]
        self.received = [sum(x.rows for x in r.sources if x.rank != rank) * token for r in self.rounds]
        # Gradients of keys and values: this rank's own part, and those that others send.
        own_grads = [sum(x.rows for x in r.sources if x.rank == rank) * token for r in self.rounds]
        self.returned = [a + b for a, b in zip(own_grads, self.sent, strict=True)]
        keys = total(task.k_pieces[rank])
        cut: list[int] = []
        already_cut: set[tuple[Range, ...]] = {((0, keys),)}  # rows are cut out once for all rounds that send them
        for r in self.rounds:
            fresh = {x.ranges: x.rows for x in r.sends if x.ranges not in already_cut}
            already_cut |= set(fresh)
            cut.append(sum(fresh.values()) * token)
        self.copied = [2 * x for x in cut] if call.seq == 2 else [0] * len(cut)  # else rows are contiguous
        tokens = total(task.q_pieces[rank])
        self.row = self.heads * v.shape[-1] * q.element_size()  # bytes of a row of out
        self.exchanged = 0.0
        if inner > 1:  # q, k, v and out are exchanged
            token_bytes = self.heads * inner * (q.shape[-1] + v.shape[-1]) * q.element_size() + token * inner
            self.exchanged = token_bytes * tokens / inner * (inner - 1) / inner
        own_bytes = keys * token + tokens * (self.row + self.heads * q.shape[-1] * q.element_size())
        in_transit = max((a + b for a, b in zip(self.received, [*self.received[1:], 0], strict=True)), default=0)
        self.peak_bytes = own_bytes + in_transit

    def count(self, p: Pair, places: list[Place]) -> int:
        """The visible cells of a pair, over heads and batch rows."""
        if p.full:
            return p.rows * p.keys * self.heads
        task: Task = self.call.task
        cells = 0
        rows = torch.arange(p.rows, device="cpu") * p.step + p.qpos
        several = self.heads // (1 if self.call.packed else max(1, len(places)))
        for offset, used in [places[p.doc]] if self.call.packed else places:
            end = p.kpos + p.keys * p.step
            lo, hi = key_spans(task.rules, rows + offset, end if task.fusible else min(used, end))
            lo, hi = (-((p.kpos - x) // p.step) for x in (lo.clamp_min(p.kpos), hi))  # in keys
            cells += int((hi - lo).clamp_min(0).sum())
        return cells * several

    def plan(self, backward: bool) -> RankPlan:
        seconds = self.time(False) + (self.time(True) if backward else 0.0)
        calls = sum(map(len, self.parts)) * self.groups
        sent, received = (round(sum(x) + self.exchanged) for x in (self.sent, self.received))
        return RankPlan(self.rank, self.cells, calls, len(self.active), sent, received, self.peak_bytes, seconds)

    def time(self, backward: bool) -> float:
        """Seconds of all rounds, each overlapped with the next one's messages; a gather's are groups of heads."""
        m = self.m
        work = [self.compute(i, backward) / self.groups for i in range(len(self.rounds))] * self.groups
        loads = [max(a, b) / self.groups for a, b in zip(self.sent, self.received, strict=True)] * self.groups
        messages = [m.latency + x / m.link if x else 0.0 for x in loads]
        # A round's gradients are sent in the next round, with that one's keys and values.
        returned = [0.0, *messages] if backward else [0.0] * (len(messages) + 1)
        in_transit = [a + b for a, b in zip([*messages[1:], 0.0], returned, strict=False)]
        exchange = 2 * m.latency + self.exchanged / m.link if self.inner > 1 else 0.0
        return exchange + messages[0] + sum(map(max, work, in_transit)) + returned[-1]

    def compute(self, i: int, backward: bool) -> float:
        m, pairs = self.m, self.rounds[i].pairs
        cells = 0.0
        for p, visible in zip(pairs, self.counted[i], strict=True):
            kind = ("backward_" if backward else "") + ("full" if p.full else "diagonal")
            programs = self.batch * self.kv / self.groups * -(-p.keys // 128)
            idle = m.programs / programs if backward and programs else 1.0
            cells += (visible + p.rows * self.heads * getattr(m, kind)) * max(1.0, idle)
        rate = m.backward_flops if backward else m.flops
        seconds = _seconds(cells, self.q, self.v, rate, backward)
        merged = 0 if self.call.task.gather or len(self.active) < 2 else sum(p.rows for p in pairs) * self.row
        moved = m.merge * merged
        if backward:
            dq = merged // self.v.shape[-1] * self.q.shape[-1]
            moved = m.backward_merge * (dq + (self.returned[i] if len(self.rounds) > 1 else 0))
        moved += self.copied[i]
        return seconds + len(self.parts[i]) * m.launch * self.groups + moved / m.memory
