"""Calls of the Hopper backend run by `gluon_sim`: arguments as a launch would give them, over NumPy."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch

import gluon_sim
from gluon_sim import Descriptor, Machine
from gluon_values import Pointer, SimError
from tilewise.backends.gpu.target import nvidia
from tilewise.backends.hopper.fwd.config import config_of
from tilewise.backends.hopper.fwd.launch import FLAGS_AT, Launcher
from tilewise.core.mask_rules import RULE_NUMBERS
from tilewise.core.problem import Problem
from tilewise.validation.calls import Call


def flat(x: torch.Tensor | None) -> Pointer | None:
    """A pointer to the first element of a tensor, over all of its memory."""
    if x is None:
        return None
    memory = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    memory = memory.view(torch.uint8) if x.dtype == torch.bool else memory
    return Pointer(memory.numpy(), x.storage_offset())


def tiles(x: torch.Tensor, rows: int, columns: int) -> Descriptor:
    return Descriptor(x.numpy(), (1, 1, rows, columns))


def ranks(problem: Problem, t: Any, BM: int) -> dict[str, Any]:
    """What `order.py` writes."""
    cu_q, cu_k = t.cu_seqlens_q.tolist(), t.cu_seqlens_k.tolist()
    B = problem.batch
    keys = [cu_k[b + 1] - cu_k[b] for b in range(B)] + [0]
    rows = [cu_q[b + 1] - cu_q[b] for b in range(B)] + [problem.total_q - cu_q[B]]
    order = sorted(range(B + 1), key=lambda b: (-keys[b], b))
    starts = np.cumsum([0] + [-(-rows[b] // BM) for b in order])
    return {"ORDER": Pointer(np.array(order, np.int32)), "START": Pointer(starts.astype(np.int32))}


def listed_blocks(problem: Problem, t: Any, BM: int, BN: int) -> tuple[Pointer, Pointer, tuple[int, int, int, int]]:
    """What `list_blocks` leaves of block indices [B, Hkv, blocks, n], for each query head."""
    p, nq, nk = problem, -(-problem.q_len // BM), -(-problem.kv_len // BN)
    assert p.selection is not None
    block = p.selection.block
    lists, rank = np.zeros((p.batch, p.heads, nq, nk), np.int32), np.zeros((p.batch, p.heads, nq, nk + 1), np.int32)
    for b, h, i in np.ndindex(p.batch, p.heads, nq):
        chosen = set(t.key_indices[b, h // p.group, i * BM // block].tolist())
        tiles = [tile for tile in range(nk) if tile * BN // block in chosen]
        lists[b, h, i, : len(tiles)] = [2 * tile for tile in tiles]
        rank[b, h, i] = [sum(tile < n for tile in tiles) for n in range(nk + 1)]
    return Pointer(lists.reshape(-1)), Pointer(rank.reshape(-1)), (p.heads * nq, nq, 1, nk)


class Launch:
    """One call, checked and planned; `run` executes its kernels."""

    def __init__(self, call: Call, processors: int = 3, config: Any = None) -> None:
        self.call, self.t = call, call.tensors
        p = self.problem = call.problem
        c = config or config_of(p)
        self.bound = Launcher(p, c, nvidia(90, processors))
        self.done: Counter[tuple[int, ...]] = Counter()
        self.flagged = 0  # tiles of rows that are computed again

    def arguments(self, kernels: Any, spec: Any, counter: Any, flags: Any) -> Any:
        p, t = self.problem, self.t
        given: dict[str, Any] = dict.fromkeys(kernels.arguments.Arguments.NAMES)
        given |= self.bound.sizes | {"S": spec, "rules": tuple(self.bound.sizes[name] for name in RULE_NUMBERS)}
        given |= {
            "q": tiles(t.q, 64, spec.chunk_d), "k": tiles(t.k, spec.BN, spec.chunk_d),
            "v": tiles(t.v, spec.BN // spec.pieces, spec.DV),
            "o": tiles(t.out, 64, self.bound.spec.out_columns),
            "OUT": flat(t.out), "LSE": flat(t.lse), "KV_LENGTHS": flat(t.kv_lengths),
            "PLACES": flat(t.places), "Q_OFFSET": flat(t.q_offset), "CU_Q": flat(t.cu_seqlens_q),
            "CU_K": flat(t.cu_seqlens_k),
            "SLOPES": flat(t.alibi_slopes), "SINKS": flat(t.sinks), "COUNTER": counter, "FLAGS": flags,
        }  # fmt: skip
        for name, x, dims in (("o", t.out, "bhl"), ("lse", t.lse, "bhl")):
            given |= {f"{name}_{dim}": 0 if x is None else x.stride(i) for i, dim in enumerate(dims)}
        given["slopes_b"] = 0 if t.alibi_slopes is None else t.alibi_slopes.stride(0)
        if p.packed_q:
            given |= ranks(p, t, self.bound.spec.BM)
        if p.selection is not None:
            lists, rank, strides = listed_blocks(p, t, self.bound.spec.BM, spec.BN)
            given |= {"LIST": lists, "RANK": rank}
            given |= dict(zip(("list_b", "list_h", "list_q", "list_n"), strides, strict=True))
        return kernels.arguments.Arguments(*(given[name] for name in kernels.arguments.Arguments.NAMES))

    def count_tiles(self, kernels: Any) -> None:
        """Notes each tile of rows that a consumer stores: one that is done twice has the right result too."""
        store = kernels.epilogue.store

        def counting(a: Any, w: Any, o: Any, lse: Any, rows: Any, outs: Any, C: int) -> None:
            self.done[(*(int(n) for n in (w.row_b, w.head, w.value_tile, w.q_start, w.top)), C)] += 1
            store(a, w, o, lse, rows, outs, C)

        kernels.consumer.store = counting

    def run(self, kernels: Any, seed: int = 0) -> None:
        """Prefill, then fixup where hidden values may matter, as a launch does."""
        bound, spec = self.bound, self.bound.spec
        numbers = np.zeros(FLAGS_AT + bound.work_tiles * spec.consumers, np.int32)
        counter = Pointer(numbers) if bound.dynamic else None
        flags = Pointer(numbers, FLAGS_AT)
        a = self.arguments(kernels, spec, counter, flags)
        gluon_sim.MACHINE = Machine(bound.programs, seed)
        self.count_tiles(kernels)
        gluon_sim.MACHINE.run(lambda: kernels.kernel.prefill(a))
        again = [tile for tile, times in self.done.items() if times > 1]
        if again:
            raise SimError(f"{len(again)} tiles are done more than once, {again[0]} for one")
        self.flagged = int(numbers[FLAGS_AT:].sum())
        if spec.guard:
            a = self.arguments(kernels, bound.fixup_spec, counter, flags)
            gluon_sim.MACHINE = Machine(1, seed)
            gluon_sim.MACHINE.run(lambda: kernels.nonfinite.fixup(a))
            if numbers.any():
                raise SimError("the counter and the flags must be zero for the next call")
