"""Which problems latent decode serves, and how they are cut: plain functions of a `Problem`.

The measurements behind them are in benchmarks/h200/LOG.md, latent #1 and #2.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....core.mask_rules import NO_RULES, MaskRules
from ....core.problem import Problem
from ...gpu.flags import DTYPE_NAMES, ceil_pow2
from ...gpu.target import Target
from .spec import KEYS, LATENT, ROPE, ROWS, Spec

MOST_QUERIES = 16
TILE = ROWS, 2 * KEYS  # keys are taken in pairs of blocks
COMBINED = 4096  # numbers that a combining program has at a time


def is_latent(problem: Problem) -> bool:
    """Whether all heads share rows of 576 columns, of which the first 512 are the values."""
    p = problem
    return p.v_in_k and (p.kv_heads, p.head_dim, p.value_dim) == (1, LATENT + ROPE, LATENT)


def refusal(problem: Problem) -> str | None:
    """Why latent decode cannot serve a problem that `is_latent`; None if it can."""
    p, rules = problem, problem.rules
    last = rules.q_offset == "end" or (rules.q_offset == p.kv_len - p.q_len and not rules.kv_lengths)
    missing = {
        "q and k of other types than float16 or bfloat16, both the same": (
            p.q_dtype != p.k_dtype or DTYPE_NAMES.get(p.q_dtype) not in ("f16", "bf16")
        ),
        f"more than {MOST_QUERIES} queries": p.q_len > MOST_QUERIES,
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
        "rows that do not begin at multiples of 16 bytes, or are broadcast": not p.aligned,
    }
    return next((f"no latent decode with {what}" for what, there in missing.items() if there), None)


@dataclass(frozen=True)
class Config:
    """The shape of the launches."""

    head_rows: int  # heads of a tile, a power of two; its other rows are further queries
    tiles: int  # of 64 query rows
    splits: int  # runs of keys, each with a program for each tile
    # Of the combining kernel: fragments of a sequence at a time, and rows and columns of the output.
    at_once: int
    rows: int
    columns: int
    combiners: int  # programs

    @property
    def partial_rows(self) -> int:
        """Rows of partial outputs: two of each program. Without splits no sequence is cut."""
        return 2 * self.splits * self.tiles * ROWS if self.splits > 1 else 0


def config_of(problem: Problem, target: Target) -> Config:
    p = problem
    head_rows = min(ROWS, ceil_pow2(p.heads))
    tiles = -(-p.heads // head_rows) * -(-p.q_len // (ROWS // head_rows))
    splits = max(1, target.processors // tiles)
    at_once = min(32, 1 << (splits // p.batch + 1).bit_length())  # about as many fragments as sequences have
    columns = min(LATENT, COMBINED // at_once)
    rows = COMBINED // at_once // columns
    combiners = p.batch * -(-p.heads * p.q_len // rows) * (LATENT // columns)
    return Config(head_rows, tiles, splits, at_once, rows, columns, combiners)


def workspace_bytes(problem: Problem, c: Config) -> int:
    """Partial outputs with their lse, and where each sequence's are."""
    return 4 * (c.partial_rows * (LATENT + 1) + problem.batch)


def notes(c: Config) -> tuple[str, ...]:
    found = ["V read as part of K", "two warpgroups with 256 columns of the output each, TMA"]
    if c.tiles > 1:
        found.append("the next keys are prefetched to L2")
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
        causal=p.rules.causal and p.q_len > 1,
        lengths=p.rules.kv_lengths,
        lse=p.return_lse,
        sinks=p.sinks,
        width=128 if page_rows == KEYS else 64,
        prefetch=c.tiles > 1,  # programs that read the same keys gain; a lone one loses
    )
