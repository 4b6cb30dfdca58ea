"""Which problems latent decode serves, and its launch heuristics: plain functions of a `Problem`.

Their measurements are in benchmarks/h200/LOG.md, latent #1, #2, #8 and #11, sparse #5 and #6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ....core.mask_rules import NO_RULES, MaskRules
from ....core.problem import Problem
from ...gpu.flags import DTYPE_NAMES, ceil_pow2
from ...gpu.target import Target
from .spec import FEW, KEYS, LATENT, ROPE, ROWS, Spec

MOST_QUERIES = 16
TILE = ROWS, 2 * KEYS  # keys are taken in pairs of blocks
# Tensor cores truncate when they accumulate: each of the 36 sums that make a score loses half a last bit of its size on
# average, in all about CUT_OFF last bits of the score (of 2^-24 of it).
CUT_OFF = 8.0
COMBINED = 4096  # elements that a program of `combine` holds at a time
MOST_INSIDE = 32  # most fragments that one consumer combines
LONGER = 1.05  # how much longer runs may be if no sequence is split then


def is_latent(problem: Problem) -> bool:
    """Whether all heads share rows of 576 columns, of which the first 512 are the values."""
    p = problem
    return p.v_in_k and (p.kv_heads, p.head_dim, p.value_dim) == (1, LATENT + ROPE, LATENT)


def in_fp8(problem: Problem) -> bool:
    """Whether the latent columns are in float8, with scales in each row."""
    return problem.k_format.name == problem.v_format.name == "fp8_latent"


def refusal(problem: Problem) -> str | None:
    """Why latent decode cannot serve a problem that `is_latent`; None if it can."""
    p, rules = problem, problem.rules
    last = rules.q_offset == "end" or (rules.q_offset == p.kv_len - p.q_len and not rules.kv_lengths)
    missing = {
        "q and k of other types than float16 or bfloat16, both the same": not in_fp8(p)
        and (p.q_dtype != p.k_dtype or DTYPE_NAMES.get(p.q_dtype) not in ("f16", "bf16")),
        "fp8_latent without key indices": in_fp8(p) and p.selection is None,
        "fp8_latent with q of another type than bfloat16": in_fp8(p) and DTYPE_NAMES.get(p.q_dtype) != "bf16",
        f"more than {MOST_QUERIES} queries": p.q_len > MOST_QUERIES and p.selection is None,
        "block indices": p.selection is not None and p.selection.block > 1,
        "packed queries or keys": p.packed_q,
        "windows or chunks": rules.relative() not in (NO_RULES, MaskRules(causal=True)),
        "causal queries that are not the last positions": rules.causal and not last,
        "k_start or strides of positions": rules.affine != "",
        "masks": p.mask is not None,
        "softcap": p.softcap > 0,
        "ALiBi": p.alibi,
        "split_size": p.split_size is not None,
        "scales that are not positive": not p.scale > 0,
        f"pages of {p.page_size}, only of 16, 32 and multiples of 64": (
            p.form == "paged" and p.page_size % KEYS != 0 and p.page_size not in (16, 32)
        ),
        "key indices into 32 GiB or more": p.large_kv and p.selection is not None,  # offsets are 32-bit, by 16 bytes
        "rows that do not begin at multiples of 16 bytes, or are broadcast": not p.aligned,
    }
    return next((f"no latent decode with {what}" for what, there in missing.items() if there), None)


GATHERING: dict[str, Any] = {"consumer_regs": 232, "producer_regs": 40}
FP8: dict[str, Any] = {"consumer_regs": 208, "producer_regs": 96, "fp8": True}


@dataclass(frozen=True)
class Config:
    """The shape of the launches."""

    head_rows: int  # heads of a tile, a power of two; its other rows are further queries
    tiles: int  # of 64 query rows
    splits: int  # runs of keys, each with a program for each tile
    sequences: int  # with key indices every query is one
    size: int  # pairs of blocks of a run, with key indices
    cut: bool  # whether runs may end within a sequence
    few: bool  # few rows per sequence, which are the columns of all products
    inside: bool  # the last-arriver combines fragments, not a separate launch
    # Of `combine`: fragments of a sequence at a time, and rows and columns of the output.
    at_once: int
    rows: int
    columns: int
    combiners: int  # programs

    @property
    def partial_rows(self) -> int:
        """Rows of partials: two partials of each program."""
        return 2 * self.splits * self.tiles * ROWS if self.cut else 0


def config_of(problem: Problem, target: Target) -> Config:
    p, chosen = problem, problem.selection
    if chosen is None:
        head_rows, sequences, q_len = min(ROWS, ceil_pow2(p.heads)), p.batch, p.q_len
    else:  # queries share no keys, so that a tile has one query
        head_rows, sequences, q_len = ROWS, p.batch * p.q_len, 1
    tiles = -(-p.heads // head_rows) * -(-q_len // (ROWS // head_rows))
    splits = max(1, target.processors // tiles)
    size, cut = 0, splits > 1
    if chosen is not None:
        pairs = max(1, -(-chosen.count // TILE[1]))
        size, whole = -(-sequences * pairs // splits), -(-sequences // splits) * pairs
        if cut := whole > size * LONGER:
            splits = -(-sequences * pairs // size)
        else:
            size, splits = whole, -(-sequences * pairs // whole)
    at_once = min(32, 1 << (splits // sequences + 1).bit_length())  # about as many fragments as sequences have
    columns = min(LATENT, COMBINED // at_once)
    rows = COMBINED // at_once // columns
    combiners = sequences * -(-p.heads * q_len // rows) * (LATENT // columns)
    few = chosen is None and head_rows * q_len <= FEW
    inside = few and cut and most_fragments(p, splits) <= MOST_INSIDE
    return Config(head_rows, tiles, splits, sequences, size, cut, few, inside, at_once, rows, columns, combiners)


def most_fragments(problem: Problem, splits: int) -> int:
    """Most fragments of a sequence, for any lengths: all others may have one pair of blocks each."""
    longest = max(1, -(-problem.kv_len // TILE[1]))
    size = -(-(longest + problem.batch - 1) // splits)
    return -(-longest // size) + 1


def factor(problem: Problem) -> float:
    """The factor from dot products to logits in base 2, corrected for CUT_OFF."""
    return problem.scale * math.log2(math.e) * (1 + CUT_OFF * 2.0**-24)


def workspace_bytes(c: Config) -> int:
    """Bytes of partials with their lse, and of where each sequence's are."""
    return 4 * (c.partial_rows * (LATENT + 1) + c.sequences)


def notes(c: Config) -> tuple[str, ...]:
    found = ["V read as part of K", "two warpgroups with 256 columns of the output each, TMA"]
    if c.size:
        found[1] = "two warpgroups with 256 columns of the output each, rows gathered by another"
    elif c.few:
        found[1] = "two warpgroups with every second block each, query rows as columns of products, TMA"
    elif c.tiles > 1:
        found.append("the next keys are prefetched to L2")
    if c.inside:
        found.append("the last program of a sequence combines it")
    return tuple(found)


def spec(problem: Problem, c: Config) -> Spec:
    """What the kernel is compiled for."""
    p = problem
    page_rows = min(KEYS, p.page_size) if p.form == "paged" else KEYS
    return Spec(
        DTYPE_NAMES[p.q_dtype],
        page_rows,
        paged=p.form == "paged",
        head_rows=c.head_rows,
        rows=FEW if c.few else ROWS,
        causal=p.rules.causal and p.q_len > 1,
        lengths=p.rules.kv_lengths,
        lse=p.return_lse,
        sinks=p.sinks,
        inside=c.inside,
        gather=p.selection is not None,
        width=128 if in_fp8(p) or (c.few and page_rows == KEYS) else 256 if page_rows == KEYS or p.selection else 64,
        prefetch=c.tiles > 1,  # faster only where several programs read the same keys
        **(FP8 if in_fp8(p) else GATHERING if p.selection is not None else {}),
    )
