"""Support and launch heuristics of the Hopper backward kernels. Plain functions of a `Problem` and a `Target`."""

from __future__ import annotations

import math
from dataclasses import replace

from ....core.mask_rules import MaskRules
from ....core.problem import Problem
from ...gpu.flags import DTYPE_NAMES, needs_exact_tanh
from ...gpu.target import Target
from .spec import BackwardSpec

BN = 128  # keys of a key block
HOP = 3.0  # microseconds between the reduce-adds of successive programs to a query block
PERSISTENT_ROWS = 4096
CONVERTED_ROWS, SHORT_ROWS = 768, 1536
STEP_FLOPS, MASKED_STEP_FLOPS = 4.9e6, 3.3e6  # FLOPs of an SM per microsecond; with a mask, D=64
# Split key blocks: microseconds of a block's prologue and epilogue, and bytes of partials that an SM stores per
# microsecond; the same of the combine launch; the load imbalance of programs that differ in length.
BLOCK_START, STORE_RATE = 5.0, 26e3
COMBINE_START, COMBINE_RATE = 6.0, 8e6
UNEVEN = 1.15
MOST_SPLITS, MOST_SPLITS_PER_SM, LEAST_SAVED = 8, 3, 0.05
# -lse / scale is stored as a sum of parts in q's dtype, and must stay within their range.
LEAST_SCALE, MOST_SCALE = 1e-3, 1e3
RIGHT, LEFT = 1, 2  # edge flags of `consumer.hide`
FURTHEST = 1 << 29  # largest position: its sum with a window's side fits int32


def unstrided(problem: Problem) -> Problem:
    """The problem over plain positions, without strides, as the kernels compute it. Not for refused problems."""
    rules = problem.rules.unstrided()
    assert rules is not None
    return problem if rules is problem.rules else replace(problem, rules=rules)


def refusal(problem: Problem) -> str | None:
    """Why the kernels cannot give the gradients, or None."""
    if problem.rules.unstrided() is None:
        return "no backward pass for strides of positions, but one of queries and keys, with a window that sees some"
    p = unstrided(problem)
    missing = {
        "a KV cache in pages or quantised": p.form == "paged" or p.k_format.is_quantised or p.v_format.is_quantised,
        "ALiBi": p.alibi,
        "rules of positions other than causal and windows": (
            p.rules.relative() != MaskRules(causal=p.rules.causal, window=p.rules.window)
        ),
        "q, k and v of other types than float16 or bfloat16, all the same": not (
            p.q_dtype == p.k_format.dtype == p.v_format.dtype and DTYPE_NAMES.get(p.q_dtype) in ("f16", "bf16")
        ),
        "head dims other than multiples of 8 up to 512, D = Dv up to 128": (
            p.head_dim % 8 + p.value_dim % 8 != 0
            or max(p.head_dim, p.value_dim) > 512
            or (p.head_dim != p.value_dim and not is_wide(p))
        ),
        f"scales outside {LEAST_SCALE:g} to {MOST_SCALE:g}": not LEAST_SCALE <= abs(p.scale) <= MOST_SCALE,
        "rows that do not begin at multiples of 16 bytes, or are broadcast": not p.aligned,
        "offsets past 2**29": isinstance(p.rules.q_offset, int) and abs(p.rules.q_offset) > FURTHEST,
    }
    return next((f"no backward pass for {what}" for what, there in missing.items() if there), mask_refusal(p))


def mask_refusal(problem: Problem) -> str | None:
    """Why the kernels cannot serve the problem's mask, or None."""
    p, m = problem, problem.mask
    if m is None:
        return None
    missing = {
        "bool masks": m.is_bool,
        "masks of other types than float32, float16 or bfloat16": m.dtype not in DTYPE_NAMES,
        "masks that are broadcast over queries or keys": m.broadcast[2] or m.broadcast[3],
        "tile maps": p.tile_map is not None,
        "masks of packed sequences": p.packed_q,
        "masks with head dims over 128": is_wide(p),
        "gradients of broadcast masks with kv_lengths or an offset for each sequence": (
            sums_mask(p) and (p.rules.kv_lengths or p.rules.flags.offset == "rows")
        ),
    }
    return next((f"no backward pass for {what}" for what, there in missing.items() if there), None)


def sums_mask(problem: Problem) -> bool:
    """Whether the gradient of a broadcast mask is requested, which `mask_sums.py` computes."""
    return "mask" in problem.grads and problem.mask is not None and any(problem.mask.broadcast)


def skips_cells(problem: Problem) -> bool:
    """Whether the kernel leaves cells of the mask's gradient unwritten: query blocks that do not see a key block."""
    return not sums_mask(problem) and (problem.rules.by_position or problem.has_lengths)


def slower(problem: Problem) -> str | None:
    """Why the planner prefers the Triton backend for a supported problem, or None (h200/LOG.md, backward #15)."""
    p, m = problem, problem.mask
    if m is None:
        return None
    apart = {
        "float32 masks": m.dtype.itemsize == 4,
        "masks whose rows do not begin at multiples of 16 bytes": p.kv_len % 8 != 0,
        "gradients of dense masks with a softcap": p.softcap > 0 and "mask" in p.grads and not sums_mask(p),
    }
    why = "to the Triton backend: each thread would read or write its own cells of the mask"
    return next((f"leaves {what} {why}" for what, there in apart.items() if there), None)


def is_wide(problem: Problem) -> bool:
    """Whether the wide-head kernel serves the problem (wide/kernel.py)."""
    return problem.head_dim > 128


def spec_of(problem: Problem, target: Target) -> BackwardSpec:
    p, flags = problem, problem.rules.flags
    split = splits_of(p, target) > 1
    own_dq = converts(p) and not split
    BM, D = tile_of(p)
    ends = p.has_lengths or p.kv_len % BN != 0  # keys may end inside a block
    both = flags.hides_left and (ends or sum(sides(p)) < BM + BN)
    return BackwardSpec(
        DTYPE_NAMES[p.q_dtype],
        D,
        BM,
        hides_right=flags.hides_right,
        hides_left=flags.hides_left,
        packed=p.packed_q,
        lengths=flags.lengths,
        offset=flags.offset,
        right_edges=RIGHT * (flags.hides_right or ends or both) + LEFT * both,
        left_edges=LEFT * flags.hides_left + RIGHT * both,
        softcap=p.softcap > 0,
        exact_tanh=needs_exact_tanh(p),
        near_tanh=near_tanh(p),
        mask=p.mask is not None,
        dmask="mask" in p.grads and not sums_mask(p),
        persistent=split or persistent(p),
        converts=own_dq,
        pieces=2 if D == 128 else 4,  # what fits in the rest of shared memory
        direct=split or direct(p),
        split=split,
        producer_regs=32 if own_dq and D == 128 else 24,  # with 32, consumers have 8 registers fewer
        guarded=flags.hides_right or flags.hides_left or p.has_lengths or p.mask is not None,
    )


def persistent(problem: Problem) -> bool:
    """Whether the kernel is persistent: where few query rows see a key block (h200/LOG.md, backward #9)."""
    stores_mask = "mask" in problem.grads and not sums_mask(problem)
    return rows_of_block(problem) <= PERSISTENT_ROWS and not (stores_mask and problem.head_dim <= 64)


def converts(problem: Problem) -> bool:
    """Whether the kernel itself converts dQ to its dtype.

    Only if a key block has at least `CONVERTED_ROWS` rows: converting costs as much as 8 steps of the main loop. Not in
    long programs at D=64 with a softcap: it is slower there (h200/LOG.md, backward #14, #16).
    """
    p, flags = problem, problem.rules.flags
    if p.mask is not None or not flags.hides_right or not persistent(p):
        return False
    if p.head_dim > 64:
        return rows_of_block(p) >= CONVERTED_ROWS * p.group
    return p.softcap == 0 or is_short(p)


def direct(problem: Problem) -> bool:
    """Whether dK and dV are stored from registers: in short programs, and where dQ is converted (backward #14)."""
    p = problem
    if p.mask is not None or not persistent(p):
        return False
    return converts(p) or is_short(p)


def is_short(problem: Problem) -> bool:
    """Whether programs are short, and not because of a window's left side."""
    return rows_of_block(problem) < SHORT_ROWS and not problem.rules.flags.hides_left


def splits_of(problem: Problem, target: Target) -> int:
    """How many programs share the query blocks of a key block: more than one where key blocks are too few to fill the
    GPU, or the longest one of a causal call takes more than its share (h200/LOG.md, backward #20).
    """
    p = problem
    if not may_split(p):
        return 1
    blocks = query_blocks(p, tile_of(p)[0])[0]
    most = min(blocks, MOST_SPLITS, MOST_SPLITS_PER_SM * target.processors // max(1, programs_of(p)))
    times = {splits: time_of(p, splits, target) for splits in range(1, most + 1)}
    best = min(times, key=lambda splits: times[splits], default=1)
    return best if best > 1 and times[best] < (1 - LEAST_SAVED) * times[1] else 1


def may_split(problem: Problem) -> bool:
    """Whether split key blocks were checked on a GPU for such problems."""
    p, flags = problem, problem.rules.flags
    other = p.mask is not None or p.packed_q or p.softcap > 0 or p.has_lengths or flags.hides_left
    whole = flags.hides_right or p.kv_len % BN == 0
    return not other and whole and flags.offset == "int" and DTYPE_NAMES[p.q_dtype] == "bf16"


def time_of(problem: Problem, splits: int, target: Target) -> float:
    """Estimated microseconds of the kernel and the combine, from the longest program and from all of them.

    Programs of equal length start together: each waits for the earlier key blocks among them (h200/LOG.md, backward
    #20).
    """
    p, (BM, D) = problem, tile_of(problem)
    step = BM * BN * D * 10 / STEP_FLOPS
    rows = min(p.q_len, sum(sides(p)) + BN) * p.group
    partial = 8 * D * BN if splits > 1 else 0
    start = BLOCK_START + partial / STORE_RATE
    longest, mean = (start + x / BM / splits * step for x in (rows, rows_of_block(p)))
    programs = programs_of(p) * splits
    waves = programs / target.processors
    if p.rules.by_position:
        time = max(longest, mean * waves * UNEVEN)
    else:
        waves = math.ceil(waves)
        time = longest * waves + max(0.0, HOP * (-(-p.kv_len // BN) / waves - 1))
    return time + (COMBINE_START + partial * programs / COMBINE_RATE if splits > 1 else 0.0)


def tile_of(problem: Problem) -> tuple[int, int]:
    """(BM, D): rows and columns of a query block."""
    return (128, 64) if problem.head_dim <= 64 else (64, 128)


def planes_of(problem: Problem) -> int:
    """The number of planes, (batch row, KV head) pairs; packed: KV heads."""
    return problem.kv_heads * (1 if problem.packed_q else problem.batch)


def programs_of(problem: Problem) -> int:
    """Key blocks of all planes."""
    return -(-problem.kv_len // BN) * planes_of(problem)


def near_tanh(problem: Problem) -> bool:
    return problem.softcap > 0 and problem.mask is None and not needs_exact_tanh(problem)


def rows_of_block(problem: Problem) -> float:
    """How many query rows of all heads of a group see a key block, on average."""
    p = problem
    rows = p.total_q / p.batch if p.packed_q else p.q_len
    return rows * p.group * p.rules.keys_per_query(p.q_len, p.kv_len) / p.kv_len


def sides(problem: Problem) -> tuple[int, int]:
    """A window's left and right side, as the kernels take them; causal is a right side of 0."""
    left, right = (FURTHEST if side is None else min(side, FURTHEST) for side in problem.rules.window)
    return left, 0 if problem.rules.causal else right


def query_blocks(problem: Problem, BM: int) -> tuple[int, int]:
    """Query blocks of the longest sequence, and those allocated per head of a batch row (packed: per head)."""
    p = problem
    longest = -(-p.q_len // BM)
    return longest, p.total_q // BM + p.batch if p.packed_q else longest


def workspace_bytes(problem: Problem, s: BackwardSpec, target: Target) -> int:
    """dQ in float32, and 64 bytes of statistics for each row; 4 more with softcap or a mask. Split key blocks: dK and
    dV in float32 for each program, of which there are at most `MOST_SPLITS_PER_SM` per SM.
    """
    p = problem
    blocks = query_blocks(p, s.BM)[1] * p.heads * (1 if p.packed_q else p.batch)
    partials = 8 * s.D * BN * programs_of(p) * splits_of(p, target) if s.split else 0
    return blocks * (s.BM * (4 * s.D + 64 + 4 * s.row_lse) + 4) + partials


def notes(problem: Problem, target: Target) -> tuple[str, ...]:
    found = {
        "dQ added in the order of key blocks": True,
        "dK and dV of the splits of a key block summed by a launch of its own": splits_of(problem, target) > 1,
        "the mask's gradient summed by a launch of its own": sums_mask(problem),
    }
    return tuple(note for note, there in found.items() if there)


def planes_at_once(problem: Problem, s: BackwardSpec, target: Target) -> int:
    """How many planes are interleaved: enough that programs of one plane start at least HOP apart.

    Long causal calls use four times as many, since their programs differ in length (h200/LOG.md, backward #4). With a
    mask, at D=64, fewer are better: key blocks of a plane read the same rows of the mask (backward #17).
    """
    p = problem
    planes = planes_of(p) * splits_of(p, target)
    if s.split:
        return planes
    steps = max(1.0, rows_of_block(p) / s.BM)
    masked = s.mask and s.D == 64
    work = steps * s.BM * BN * s.D * 10 / (MASKED_STEP_FLOPS if masked else STEP_FLOPS)
    more = 1 if p.kv_len <= 1024 else 4 if s.hides_right else 1 if masked else 2
    return max(1, min(planes, round(HOP * target.processors / work + 0.5) * more))
