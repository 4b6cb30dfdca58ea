"""Launch heuristics: chunks of the head dim, tiles, warps, stages, splits. Plain functions of a `Problem`.

Their measurements are in benchmarks/h200/LOG.md, h200 24, under the names of these functions.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...core.mask_rules import MaskRules
from ...core.problem import CascadeProblem, Problem
from ..gpu.flags import DTYPE_NAMES, ceil_pow2, flags_of
from ..gpu.target import Target
from . import shared_memory
from .flipped_products import (
    flipped_columns,
    flips,
    has_wide_bytes,
    hides,
    is_f16_quantised,
    is_packed,
    pack_of,
    row_groups,
)
from .mod_printer import ModFunctions
from .operands import is_float32, operand, shares_chunks
from .spec import Config as Config
from .spec import Spec
from .split_kv import MOST_SPLITS, split_count

DECODE_ROWS = 16  # queries up to which a call is decode: heads of a group share a tile and the keys are split
COMBINE_BLOCK = 16  # split-KV partials of a row that are loaded at once
COMBINED_REGISTERS = 128  # registers per thread that they may take
SHORT_KEYS = 1 << 16  # keys of all heads up to which splits are short, and tiles too
FOUR_STAGES = 202 << 10  # bytes of shared memory of four stages of D=256, with pages of 16
MOST_ORDERED = 1024  # batches below this size are sorted by one program
L2_SWIZZLE = 32 << 20  # bytes of K and V that an L2 swizzle group may hold; the H200's L2 has 50 MiB


def prefill_tile(problem: Problem, target: Target) -> Config:
    """The fastest of the tiles tried. At D=512 a tile's output does not fit the registers: two programs divide it."""
    wide = max(problem.head_dim, problem.value_dim)
    if target.amd:
        return amd_tile(problem, wide, target)
    if is_float32(problem):
        rows = 32 if target.reads_operands else min(64, target.prefill_rows)
        if wide <= 64:
            return Config(rows, 64, 4, 2)
        if wide <= 128:
            return Config(rows, 32, 4, 1)
        return Config(32, 32, 8, 1) if wide <= 256 else Config(32, 16, 8, 1)
    packed = has_packed(problem)  # elements are unpacked in registers
    if target.prefill_rows == 32:
        return Config(32, 16 if packed else 64, 4, 3) if wide <= 128 else Config(32, 32, 4 if wide <= 256 else 8, 2)
    if packed and wide <= 128 and target.reads_operands:
        return Config(64, 16, 4, 3)
    if wide <= 128:
        simple = problem.rules.relative() in (MaskRules(), MaskRules(causal=True)) and wide == ceil_pow2(wide)
        scattered = problem.selection is not None or problem.page_size > 0
        crowded = problem.biased or problem.mods is not None or (wide > 64 and (scattered or not simple))
        return Config(64, 32 if target.reads_operands and crowded else 64, 4, 3)
    if wide <= 256:  # Ampere's MMA keeps q in registers, which leaves room for fewer rows
        return Config(128, 64, 8, 2) if target.warpgroup_mma or not target.ptx else Config(64, 32, 8, 2)
    plain = not (problem.k_format.is_quantised or problem.v_format.is_quantised)
    if plain and problem.head_dim <= 512 and problem.value_dim == 512 and target.shares_wide_values:
        return Config(128, 32, 8, 2, slices=2) if problem.rules.by_position else Config(64, 32, 4, 3, slices=2)
    if target.reads_operands:
        return Config(32, 32, 8, 1)
    if not plain:
        return Config(64, 64, 8, 1)
    return Config(128, 32, 8, 2) if wide <= 320 else Config(64, 32, 8, 2)


def amd_tile(problem: Problem, wide: int, target: Target) -> Config:
    """Tiles for AMD GPUs, chosen by register use as compiled (q is in registers too); none has been measured."""
    if is_float32(problem):
        return Config(32, 32, 4, 1) if wide <= 128 else Config(32, 16, target.most_warps, 1)
    if target.rdna and problem.mask is not None and (problem.k_format.is_quantised or problem.v_format.is_quantised):
        return Config(32, 32, 8, 1)
    if target.rdna:
        few = wide > 64 or is_crowded(problem)
        return Config(128 if wide <= 128 else 64, 16 if few else 32, 8, 1)
    if wide <= 128 and problem.k_format.packing == problem.v_format.packing == 1:
        return Config(128, 64, 4, 1)
    return Config(64 if wide <= 256 else 32, 32, 4, 1)


def decode_tile(problem: Problem, target: Target) -> Config:
    """Tiles that fill the shared memory of an SM with keys in flight.

    If pages are neither multiples nor divisors of a tile, they are looked up row by row inside the pipeline, which
    takes half of its stages; 6 stages leave room for two programs per SM, not for three. Quantised keys are read by
    programs of one warp with flipped (transposed) products. At D=64, where rows have half the bytes, tiles are longer
    if there are enough keys.
    """
    p = problem
    rows = decode_rows(p, target)
    pack = pack_of(p.group, rows)
    BM = min(rows, max(16, ceil_pow2(pack * p.sharing_queries)))
    wide = max(p.head_dim, p.value_dim)
    if target.rdna:  # registers hold q and little else
        stored = p.k_format.is_quantised or p.v_format.is_quantised
        warps = 4 if not hides(p) else 8 if BM > 16 else 2 if stored else 4
        return Config(BM, 32 if wide <= 64 else 16, warps, 1 if stored else 2, pack)
    if flips(p):
        few = wide > 64 or (not p.split_size and p.batch * p.kv_heads * p.kv_len <= SHORT_KEYS)
        looked_up = "codebook4" in (p.k_format.name, p.v_format.name)  # needs more registers than one warp has
        warps = 2 if looked_up and not target.measured else 1
        return Config(max(flipped_columns(p), target.least_columns), 32 if few else 64, warps, 3, pack)
    if is_float32(p):
        warps = 8 if wide > 256 and not target.measured else 4
        return Config(BM, 32 if wide <= 128 else 16, min(warps, target.most_warps), 2, pack)
    if has_wide_bytes(p) and target.amd:
        return Config(16, 16, 4, 2, pack_of(p.group, 16))
    if has_wide_bytes(p) and BM > 16:
        return Config(32, 64, 8, 2, pack_of(p.group, 32))
    by_registers = target.ptx and not target.measured  # choose tiles with which no loop spills
    crowded = is_crowded(p)
    if BM > 16:  # more rows, fewer registers for keys
        few = (crowded and by_registers) or (has_packed(p) and not target.measured)
        BK = (32 if few else 64) if wide <= 128 else 32 if wide <= 256 else 16
        return Config(BM, BK, 8 if crowded and by_registers else 4, 3, pack)
    if by_registers and (crowded or (hides(p) and wide > 256)):
        return Config(BM, 32, 4, 3, pack) if wide <= 256 else Config(BM, 16, 8, 2, pack)
    if is_f16_quantised(p) and wide <= 256 and (p.page_size > 0 or is_packed(p) or hides(p)):
        return Config(BM, 32, 4 if by_registers and hides(p) else 1, 3, pack)
    if by_registers and hides(p) and wide <= 128:
        return Config(BM, 64, 4, 3, pack)
    BK = 128 if wide <= 128 else 64 if wide <= 256 else 32
    if crowded and 64 < wide <= 256:
        BK //= 2
    if p.page_size % BK == 0 and p.selection is None:
        return Config(BM, BK, 4, 3, pack)
    if wide > 256:
        return Config(BM, 16, 4, 6, pack)
    if p.selection is None and BK % p.page_size == 0:
        return Config(BM, BK, 4, 4 if wide > 128 and target.shared_memory >= FOUR_STAGES else 3, pack)
    return Config(BM, 128 if wide <= 64 and p.mask is None else 64, 4, 6 if wide <= 128 else 4, pack)


def decode_rows(problem: Problem, target: Target) -> int:
    """Most rows of a decode tile. On targets without measured tiles, few enough that q, the parts of float32 operands
    and wide outputs fit the registers.
    """
    p, most = problem, target.decode_rows
    wide = max(p.head_dim, p.value_dim)
    if target.measured or target.rdna:
        return most
    if target.amd:
        return most if wide <= 256 else 16 if is_float32(p) else 32
    if is_float32(p):
        return 32 if wide <= 64 else 16
    return 16 if wide > 256 and has_packed(p) else most


def is_crowded(problem: Problem) -> bool:
    """Whether mask cells, tree cells, biases or functions of the user take registers besides the scores."""
    return problem.mask is not None or problem.tree or problem.biased or problem.mods is not None


def has_packed(problem: Problem) -> bool:
    """Whether a byte of K or of V holds more than one element."""
    return problem.k_format.packing > 1 or problem.v_format.packing > 1


def sees_all(problem: Problem) -> bool:
    """Whether sequences have one query, at or after the last key, so that `causal` hides nothing and can be dropped.

    Causal costs more than its comparisons. With `split_size` this must not depend on the longest sequence of a batch.
    """
    p = problem
    offset = p.rules.q_offset
    behind = offset == "end" or (isinstance(offset, int) and offset >= p.kv_len - 1 and not p.split_size)
    return p.q_len == 1 and not p.packed_q and behind and not p.rules.affine


def is_decode(problem: Problem) -> bool:
    """Whether queries are so few that the call is memory-bound.

    A packed batch with `split_size` is prefill, with one pass over the keys: one long sequence in it must not change
    the bits of the others.
    """
    p = problem
    return p.sharing_queries <= DECODE_ROWS and not (p.packed_q and p.split_size and p.selection is None)


def tile(problem: Problem, target: Target) -> Config:
    """The tile of a problem, not yet split."""
    return decode_tile(problem, target) if is_decode(problem) else prefill_tile(problem, target)


def config_of(problem: Problem, target: Target, known: Config | None = None) -> Config:
    """The launch shape of a problem on a device; from a `known` tile, if given."""
    p, c = problem, known or tile(problem, target)
    if c.BM == 8 and not flips(p):
        c = tile(p, target)
    c = fitted(p, c, target)
    if not is_decode(p):
        return c
    tiles = -(-p.selected_keys // c.BK)
    if p.split_size:
        split_tiles = -(-p.split_size // c.BK)
        return replace(c, splits=max(1, -(-tiles // split_tiles)), split_tiles=split_tiles)
    programs = busy_tiles(p, c) * (p.heads // c.pack)
    most = MOST_SPLITS if c.warps > 1 else MOST_SPLITS // 2  # combining takes time too
    return replace(c, splits=split_count(programs, tiles, target.processors * programs_at_once(p, c), most))


def fitted(problem: Problem, c: Config, target: Target) -> Config:
    """The tile fitted to the device: eight warps where four would spill, then reduced until shared memory holds it, by
    fewer stages (down to two), then fewer rows or keys.

    It must not depend on the batch: with `split_size` the bits of a sequence do not.
    """
    # Triton 3.6 cannot lower pipelined loads of trees and biases for AMD's GPUs.
    most = 1 if target.amd and (problem.tree or problem.biased) else target.most_stages
    c = replace(c, stages=min(c.stages, most))
    if c.warps == 4 < target.most_warps and shared_memory.spills(c, spec(problem, c, target), target):
        c = replace(c, warps=8)
    while target.amd and c.BM > 16 and shared_memory.spills(c, spec(problem, c, target), target):
        c = fewer_rows(problem, c)
    while shared_memory.needed(problem, c, spec(problem, c, target), target) > target.shared_memory:
        if c.stages > 2 or (c.stages == 2 and c.BM <= 16 and c.BK <= 16):
            c = replace(c, stages=c.stages - 1)
        elif max(16, c.BK) < c.BM:
            c = fewer_rows(problem, c)
        else:
            assert c.BK > 16, f"no tile fits {target}: {problem}"
            c = replace(c, BK=c.BK // 2)
    return c


def fewer_rows(problem: Problem, c: Config) -> Config:
    return replace(c, BM=c.BM // 2, pack=pack_of(problem.group, c.BM // 2) if c.pack > 1 else 1)


def programs_at_once(problem: Problem, c: Config) -> int:
    """Target occupancy: programs per SM.

    Of one-warp programs 8 to 12 would fit, but fewer read memory faster.
    """
    if c.warps == 1:
        return 4 if flips(problem) and problem.group > 1 and not is_packed(problem) else 8
    return 2 if problem.form == "paged" and not prefetches_pages(problem, c) else 1


def tile_queries(problem: Problem, c: Config) -> int:
    """Queries of a tile."""
    BQ = c.BM // row_groups(problem, c) // c.pack
    return BQ if problem.selection is None else min(BQ, problem.selection.block)


def busy_tiles(problem: Problem, c: Config) -> int:
    """Most tiles that can have rows. With packed sequences the grid also has empty programs, which exit at once."""
    p, BQ = problem, tile_queries(problem, c)
    if not p.packed_q or p.selection is not None:
        return query_tiles(p, c)
    return min((p.total_q + p.batch * (BQ - 1)) // BQ, p.batch * -(-p.q_len // BQ))


def query_tiles(problem: Problem, c: Config) -> int:
    """Tiles of query rows in all sequences; for packed ones the size of the grid, an upper bound."""
    p, BQ = problem, tile_queries(problem, c)
    if p.packed_q:
        return p.total_q // BQ + p.batch + 1
    if p.selection is not None:
        return p.batch * -(-p.q_len // p.selection.block) * -(-p.sharing_queries // BQ)
    return p.batch * -(-p.q_len // BQ)


def orders(problem: Problem) -> bool:
    """Whether the sequences of a packed batch are sorted, longest first; one program sorts them, so there is a limit.

    Not causal ones: the last rows of a sequence come first, so even a long sequence that is scheduled last ends in
    short tiles.
    """
    return problem.packed_q and not (problem.rules.causal or is_decode(problem)) and 1 < problem.batch < MOST_ORDERED


def lookup(problem: Problem, c: Config) -> str:
    """How a tile's pages are looked up: one page per tile, all pages of the tile, or row by row.

    Row by row, a thread loads and multiplies a page number for each row that it copies, and quantised rows are short.
    """
    if problem.page_size and problem.selection is not None:
        return "rows"
    if not problem.page_size or problem.page_size % c.BK == 0:
        return "tile" if problem.page_size else ""
    return "pages" if c.BK % problem.page_size == 0 and is_decode(problem) else "rows"


def prefetches_pages(problem: Problem, c: Config) -> bool:
    """Whether a tile's page numbers are prefetched during the tile before it: unless they are looked up row by row.

    Else the lookup is a stage of the pipeline. Not where a tile is a page of 16.
    """
    return lookup(problem, c) in ("tile", "pages") and c.BK > 16 and not lists_tiles(problem)


def lists_tiles(problem: Problem) -> bool:
    """Whether key tiles come from the block-sparsity list of a dense mask or a mask_mod. Decode reads the whole mask
    instead.
    """
    p = problem
    masked = p.mask is not None or (p.mods is not None and p.mods.mask is not None)
    return masked and p.selection is None and not is_decode(p)


def swizzle(problem: Problem, c: Config) -> int:
    """Planes (batch row, head block) of an L2 swizzle group, whose tiles are interleaved: those whose keys fit L2
    together. 1 for packed queries, and where no rule makes some tiles longer than others.
    """
    p = problem
    if not p.rules.by_position or p.packed_q:
        return 1
    size = p.kv_len * (p.head_dim * p.k_dtype.itemsize + p.value_dim * p.v_dtype.itemsize) * c.pack // p.group
    planes = p.batch * (p.heads // c.pack)
    return max(1, min(planes, L2_SWIZZLE // max(1, size)))


def spec(problem: Problem, c: Config, target: Target, pairs: bool = True) -> Spec:
    """What the kernel is compiled for. `pairs`: bytes of K and V can be read two at a time."""
    p = problem
    flags = flags_of(p, c.BK)
    if sees_all(p):
        flags["rules"] = replace(flags["rules"], causal=False)
    if p.mods is not None:
        flags |= {"mods": ModFunctions(p.mods), "linear": flags["linear"] and p.mods.score is None}
    guard = ("inside" if is_decode(p) else "flag") if hides(p) else ""
    keys = operand(p, p.head_dim, p.k_format, True, c.BM, target, pairs, row_groups(p, c))
    # Biased sums are larger, and so are their errors: within tolerance up to D=128, too large with D=256.
    if guard == "" and keys.kind == "int4" and keys.unit == 2 and keys.work == "f16" and p.head_dim <= 128:
        keys = replace(keys, biased=True, rescaled=True)
    values = operand(p, p.value_dim // c.slices, p.v_format, False, c.BM, target, pairs, row_groups(p, c))
    return Spec(
        **flags,
        keys=keys,
        values=values,
        v_in_k=p.v_in_k and c.slices == 1 and shares_chunks(keys, values, c.BM),
        round=DTYPE_NAMES[p.q_dtype],
        BM=c.BM,
        BK=c.BK,
        pack=c.pack,
        group=p.group,
        slices=c.slices,
        ordered=orders(p),
        varlen=p.form == "varlen",
        page=p.page_size,
        chosen=0 if p.selection is None else p.selection.block,
        lookup=lookup(p, c),
        listed=lists_tiles(p),
        negate=flags["linear"] and p.scale < 0,
        guard=guard,
        split=c.splits > 1,
        combine="after" if c.splits > 1 else "",
        block=min(combine_block(p, c, target), ceil_pow2(c.splits)),
        ptx=target.ptx,
        grain=1,
        align=1,
        scale_grain=1,
        scale_align=1,
        flip=c.BM == 8 or row_groups(p, c) > 1,
        pdl=c.splits > 1 and target.dependent_launch,
        prefetch=prefetches_pages(p, c),
        sum_columns=min(max(8 * c.warps, target.least_columns), c.BK) if guard == "" and c.BM < 64 else 0,
    )


def combine_block(problem: Problem, c: Config, target: Target) -> int:
    """Split-KV partials that are loaded at once; on targets without measured tiles, as many as registers hold."""
    if target.measured:
        return COMBINE_BLOCK
    numbers = -(-c.BM * ceil_pow2(problem.value_dim // c.slices) // (target.wave * c.warps))  # per thread and partial
    return next(n for n in (COMBINE_BLOCK, 8, 4, 2, 1) if n == 1 or n * numbers <= COMBINED_REGISTERS)


def cascade_gain(problem: CascadeProblem, rows: np.ndarray, tokens: int) -> float:
    """Seconds saved if sequences share one pass over a prefix of `tokens`.

    From the decode time of a shared prefix and the host time of a cascade's calls (h200 23).
    """
    return (len(rows) - 1) * tokens * problem.kv_heads * problem.bytes / 4.5e12 - 600e-6
