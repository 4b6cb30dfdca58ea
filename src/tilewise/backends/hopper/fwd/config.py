"""Launch heuristics of Hopper's prefill kernel. Plain functions of a `Problem`.

Their measurements are in benchmarks/h200/LOG.md, h200 25, under the names of these functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....core.mask_rules import MaskRules
from ....core.problem import Problem
from ...gpu.flags import DTYPE_NAMES, ceil_pow2, flags_of
from .spec import Spec

TYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Config:
    """The shape of a launch."""

    BN: int
    consumers: int
    k_stages: int
    v_stages: int
    share: int = 8  # programs that should read the same keys at a time
    lends: bool = False  # the output reuses shared memory of q
    out_columns: int = 0  # 0: all
    q_stages: int = 2
    overlaps: bool = True
    late_wait: bool = False
    per_processor: int = 1  # programs per SM
    consumer_regs: int = 240
    producer_regs: int = 24


FEW_QUERIES = 16  # queries up to which a call is decode, which is memory-bound
MANY_ROUNDS = 64  # work tiles of a program after which the last one matters little
SHORT = 2048  # keys up to which two consumers are as fast as three at D=64; see `config_of`
SHORT_CAUSAL = 4096  # keys up to which two programs per SM are faster there
LITTLE = 1.5e10  # operations; see `slower`
LEAST_SCALE = 1e-30  # a scale of 0 in float32 would never replace the initial running max
WIDE_RANGE = (torch.bfloat16,)  # types with the range of float32


def refusal(problem: Problem) -> str | None:
    """Why a problem is not for these kernels, in a few words; None if it is."""
    p = problem
    if p.q_dtype not in TYPES or not p.q_dtype == p.k_dtype == p.v_dtype:
        return "takes q, k and v in float16 or bfloat16, all alike"
    if p.form == "paged":
        return "has no kernel for pages"
    if p.mask is not None:
        return "has no kernel for dense masks, which Triton's serves faster"
    if not p.aligned:
        return "needs rows that begin at multiples of 16 bytes, and none broadcast"
    if not p.scale > LEAST_SCALE:
        return f"needs a scale of over {LEAST_SCALE:g}"
    if p.head_dim > 512:
        return "has no kernel for head dims over 512"
    return None if p.selection is None else blocks_refusal(p)


def blocks_refusal(problem: Problem) -> str | None:
    """Why key or block indices are not for these kernels, whose tiles come from lists; None if they are."""
    p, c = problem, config_of(problem)
    assert p.selection is not None
    tile = max(64 * c.consumers, c.BN)
    if p.selection.block % tile:
        return f"takes indices of blocks that are multiples of {tile}, and others not"
    return None


def slower(problem: Problem) -> str | None:
    """Why the Triton backend is the better choice, if it is: as a rule, because it takes less time."""
    p = problem
    if p.q_len <= FEW_QUERIES:
        return f"leaves {FEW_QUERIES} queries and fewer to the Triton backend, which is faster there"
    if p.split_size:
        return "leaves split_size to the Triton backend: which of the two is faster depends on the batch"
    if operations(p) < LITTLE:
        return "leaves small calls to the Triton backend, which starts them sooner"
    return None


def operations(problem: Problem) -> float:
    """Approximate FLOPs, by the longest sequence."""
    p = problem
    rows = p.total_q if p.packed_q else p.batch * p.q_len
    keys = p.rules.keys_per_query(p.q_len, p.kv_len)
    if p.selection is not None:
        keys = min(keys, p.selection.count * p.selection.block)
    return 2.0 * rows * p.heads * keys * (p.head_dim + p.value_dim)


def notes(problem: Problem, c: Config) -> tuple[str, ...]:
    under_way = f"{c.k_stages} tiles of keys" if c.v_stages else f"{c.k_stages} chunks of keys and values"
    found = [f"{c.consumers} warpgroups of 64 rows, TMA, {under_way} under way"]
    if c.per_processor > 1:
        found.append(f"{c.per_processor} programs share a processor")
    if max_free(problem):
        found.append("max-free softmax in tiles of keys that every row sees")
    if problem.split_size:
        found.append("split_size: keys are read in one pass, which is batch-invariant already")
    return tuple(found)


def chunk_widths(columns: int) -> tuple[int, int]:
    """(width, count) of the chunks that cover the head dim: one chunk where a power of two up to 256 does."""
    if columns <= 256 and not 128 < columns <= 192:
        return max(64, ceil_pow2(columns)), 1
    return 64, -(-columns // 64)


def value_tiling(problem: Problem) -> tuple[int, int]:
    """(width, count) of the tiles of the value dim; over wide heads they wait in chunks of 128 (see `config_of`)."""
    least = 64 if problem.head_dim <= 256 else 128
    width = min(256, max(least, ceil_pow2(problem.value_dim)))
    return width, -(-problem.value_dim // width)


def config_of(problem: Problem) -> Config:
    """The fastest launch shape measured that fits shared memory (227 KiB) and registers."""
    width, chunks = chunk_widths(problem.head_dim)
    DV, _ = value_tiling(problem)
    if width * chunks <= 64 and DV <= 64:
        if only_causal(problem) and problem.kv_len <= SHORT_CAUSAL and not problem.split_size:
            return Config(64, 2, 3, 3, share=2, overlaps=False, per_processor=2, consumer_regs=112)
        late = not (problem.softcap or problem.alibi or problem.rules.flags.hides_left)  # else it would spill
        if problem.selection is None and problem.kv_len > SHORT:
            return Config(128, 3, 4, 4, late_wait=late, consumer_regs=160, producer_regs=32)
        return Config(128, 2, 4, 4, share=2, late_wait=late)
    if width * chunks <= 128 and DV <= 128:
        return Config(128, 2, 2, 2)
    if width * chunks <= 192 and DV <= 128:
        return Config(128, 2, 2 * chunks, 2, out_columns=DV // 2, q_stages=1)
    if width * chunks <= 256:
        return Config(64, 2, 2 * chunks, 2, out_columns=DV // 2, q_stages=1)
    return Config(128, 2, 6, 0, lends=True, out_columns=64, q_stages=1, overlaps=False)


def only_causal(problem: Problem) -> bool:
    """Whether the call is causal, without other options that would take registers."""
    p = problem
    others = p.softcap or p.alibi or p.rules.kv_lengths or p.packed_q or p.rules.affine
    return p.rules.relative() == MaskRules(causal=True) and not others and p.selection is None


def uneven(problem: Problem) -> bool:
    """Whether some work tiles have more keys than others."""
    p = problem
    return p.rules.by_position or p.packed_q or p.rules.kv_lengths or p.selection is not None


def prefetches_tile(problem: Problem, c: Config, rounds: float) -> bool:
    """Whether a program fetches its next work tile before it loads the keys of this one, not after; `rounds`: work
    tiles per program.

    At the end, a work tile fetched early waits for its program while others are idle; one fetched late starts late.

    A consumer receives the next work tile before it skips keys that only other consumers' rows see. If those are
    loaded first, there must be room for them: one tile to the left of a window, but any number between chunks.
    """
    return rounds > MANY_ROUNDS or problem.rules.flags.jumps or c.v_stages < 2


def swizzle(problem: Problem, c: Config, programs: int) -> int:
    """Planes (batch row, head) of an L2 swizzle group, whose tiles are interleaved, the longest first; 1 for packed
    queries, and where all tiles are equally long.

    Few enough that several programs read the same keys at about the same time, so that most reads hit L2.
    """
    p = problem
    if p.packed_q or not uneven(p):
        return 1
    tiles = max(1, -(-p.q_len // (64 * c.consumers)))  # calls of no query are planned too
    return max(1, min(p.batch * p.heads, programs // min(c.share, tiles)))


def hides_memory(problem: Problem) -> bool:
    """Whether hidden keys or values may be NaN. Past the end of a dense tensor TMA reads zeros."""
    p = problem
    return p.rules.by_position or p.has_lengths or p.selection is not None


def max_free(problem: Problem) -> bool:
    """Whether the softmax is max-free in tiles without hidden cells (see softmax.py): weights have float32's range, and
    rows have seen a key in an earlier tile. Where nothing is hidden, the call must be long enough to pay for the launch
    of the fix-up.
    """
    p = problem
    if p.q_dtype not in WIDE_RANGE or p.selection is not None or p.head_dim > 192:
        return False
    return hides_memory(p) or p.kv_len > SHORT


def spec(problem: Problem, c: Config) -> Spec:
    """What the kernel is compiled for; `prefetch_tile` is set by the launch."""
    p = problem
    width, chunks = chunk_widths(p.head_dim)
    DV, value_tiles = value_tiling(p)
    return Spec(
        **flags_of(p, c.BN),
        dtype=DTYPE_NAMES[p.q_dtype],
        chunk_d=width,
        chunks=chunks,
        DV=DV,
        value_tiles=value_tiles,
        BN=c.BN,
        consumers=c.consumers,
        q_stages=c.q_stages,
        k_stages=c.k_stages,
        v_stages=c.v_stages,
        out_aliases_q_chunks=DV // width if c.lends else 0,
        out_columns=c.out_columns or DV,
        overlaps=c.overlaps,
        late_wait=c.late_wait,
        max_free=max_free(p),
        consumer_regs=c.consumer_regs,
        producer_regs=c.producer_regs,
        guard=max_free(p) or hides_memory(p),
        blocks=p.selection is not None,
        fixup=False,
        prefetch_tile=False,
    )
