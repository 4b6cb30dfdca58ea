"""How a problem is cut for the GPU: chunks of head dims, tiles, warps, stages, splits. Plain functions of a `Problem`.

Where a number comes from a measurement, the measurement is named beside it (all on one H200, see docs/performance.md).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...problem import Problem, QuantSpec
from ..flags import flags_of, is_ruled
from .spec import Config as Config
from .spec import Operand, Spec
from .splits import split_count

NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
KINDS = {"int8": "int8", "int4": "int4", "fp8_e4m3": "fp8"}
DECODE_ROWS = 16  # queries up to here are decoded: heads of a group share a tile and the keys are split
MERGE_BLOCK = 16  # partial results of a row that are loaded at once
SHARED_BYTES = 227 << 10  # of shared memory that a program of Hopper can have
MOST_ORDERED = 1024  # sequences that one program ranks
L2_SECTION = 32 << 20  # bytes of K and V that a section of planes may hold; the H200's L2 has 50 MiB


def ceil_pow2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def chunks(columns: int, least: int) -> tuple[int, ...]:
    """Powers of two of at least `least` that cover `columns`: two where that pads less than one does."""
    if columns <= least:
        return (least,)
    high = ceil_pow2(columns + 1) // 2  # the largest that fits
    if high == columns:
        return (high,)
    rest = max(least, ceil_pow2(columns - high))
    return (high, rest) if rest < high else (2 * high,)


def least_chunk(BM: int) -> int:
    """The narrowest chunk. Hopper's products of 64 rows or more read past their operands in Triton 3.6 if one of those
    is narrower than 64 columns and was not copied there asynchronously.
    """
    return 64 if BM >= 64 else 32


def operand(
    problem: Problem, width: int, dtype: torch.dtype, quant: QuantSpec | None, is_key: bool, BM: int = 64,
    arch: int = 0, pairs: bool = False,
) -> Operand:  # fmt: skip
    """How K or V is loaded and multiplied. `pairs`: its bytes can be read two at a time.

    float32 numbers are cut into three bfloat16 ones and multiplied in six products: as exact as float32, where three
    TF32 products lose two bits. Two 16-bit types meet in TF32, which holds both exactly.
    """
    q = NAMES[problem.q_dtype]
    exact = "tf32" if problem.allow_tf32 else "bf16x6"
    least = least_chunk(BM)
    if quant is None:
        same = q == NAMES[dtype]
        work, precision = (q, exact) if same or q == "f32" else ("f32", "tf32")
        if work == "f32" and width > 128:  # a product of six needs many registers for each column
            return Operand((64,) * -(-width // 64), width, "plain", 0, False, work, precision, False, False)
        return Operand(chunks(width, least), width, "plain", 0, False, work, precision, False, False)
    columns = width // 2 if quant.dtype == "int4" else width
    whole = quant.group >= width
    factored = whole or (quant.group >= least and (quant.dtype != "int4" or columns % quant.group == 0))
    if whole or not factored:
        widths = chunks(columns, least)
    else:
        rest = columns % quant.group
        widths = (quant.group,) * (columns // quant.group) + ((max(least, ceil_pow2(rest)),) if rest else ())
    work = q if not is_key else "f32"
    if factored and q != "f32":
        work = "f16"  # holds every stored number exactly
    fast = work == "f16" and arch >= (89 if quant.dtype == "fp8_e4m3" else 80)
    rescaled = is_key and work == "f16" and q == "bf16"
    # Four warps share 32 units or more in a product; Hopper's own products want 64 columns, see least_chunk.
    unit = 2 if pairs and factored and BM < 64 and columns == sum(widths) and min(widths) >= 64 else 1
    return Operand(
        tuple(width // unit for width in widths), columns // unit, KINDS[quant.dtype], quant.group, factored, work,
        exact, rescaled, fast, unit,
    )  # fmt: skip


def pack_of(group: int, limit: int = 64) -> int:
    """How many of a group's query heads share a tile: the most that divide it and stay within `limit`."""
    return max(n for n in range(1, min(group, limit) + 1) if group % n == 0)


def prefill_tile(problem: Problem, arch: int) -> Config:
    """The fastest of those tried, at 16k tokens (TFLOPS full / causal).

    D=64: 64x64 445 / 375, 128x64 402 / 373. D=128: 64x64 497 / 441, 128x64 with 8 warps 466 / 404 and, in a window of
    1024, 207 us for 185. D=256: 128x64 504 / 486, 128x32 472 / 432. D=512, where a tile's output does not fit the
    registers: 64x64 201 / 195, 64x32 183 / 181; two programs for the halves of the output, 128x32 239 / 244, 64x32 with
    4 warps 256 / 222, 128x16 213 / 202.
    float32: D=64, 64x64 55 / 54, 64x32 52 / 44; D=128, 64x32 56 / 54, 128x32 with 8 warps 54 / 53.
    """
    wide = max(problem.head_dim, problem.value_dim)
    if "f32" in (_work(problem, True), _work(problem, False)):
        rows = 32 if arch >= 100 else 64
        if wide <= 64:
            return Config(rows, 64, 4, 2)
        if wide <= 128:
            return Config(rows, 32, 4, 1)
        return Config(32, 32, 8, 1) if wide <= 256 else Config(32, 16, 8, 1)
    if arch >= 100:  # Triton 3.6 cannot compile every masked loop over 64 rows and more for Blackwell
        return Config(32, 64, 4, 3) if wide <= 128 else Config(32, 32, 4, 2)
    if wide <= 128:
        return Config(64, 64, 4, 3)
    if wide <= 256:
        return Config(128, 64, 8, 2)
    plain = problem.k_quant is problem.v_quant is None
    if plain and problem.head_dim <= 512 and problem.value_dim == 512 and (arch >= 90 or arch == 0):
        ruled = problem.causal or problem.chunk > 0 or problem.window != (None, None)
        return Config(128, 32, 8, 2, slices=2) if ruled else Config(64, 32, 4, 3, slices=2)
    return Config(64, 64, 8, 1)


def _work(problem: Problem, is_key: bool) -> str:
    p = problem
    if is_key:
        return operand(p, p.head_dim, p.k_dtype, p.k_quant, True).work
    return operand(p, p.value_dim, p.v_dtype, p.v_quant, False).work


def decode_tile(problem: Problem) -> Config:
    """Tiles that fill the shared memory of a processor with keys on their way.

    Measured (bf16, caches of 0.5 to 2 GB): contiguous, where one program runs on a processor at a time, D=64 16x128
    4.43 TB/s, D=128 16x128 4.34 to 4.50 (16x64 4.04), D=256 16x64 4.42, D=512 16x32 4.16. The same tiles for pages that
    hold whole ones (128): 4.33, 4.28 to 4.46, 4.43, 4.10. Smaller pages are looked up row by row in the pipeline, which
    takes half of its stages and leaves room for two programs: pages of 16, D=64 16x128 in 6 stages 4.26, D=128 16x64 in
    5 stages 4.02 to 4.33, D=256 16x64 4.19, D=512 16x16 in 6 stages 3.99 (16x32 3.65).
    int4, D=128: 16x256 90 us where 16x128 took 105; fp8 and int8 132 us, 137 and 141 with 16x256.
    """
    p = problem
    pack = pack_of(p.group)
    BM = min(64, max(16, ceil_pow2(pack * p.q_len)))
    wide = max(p.head_dim, p.value_dim)
    if "f32" in (_work(p, True), _work(p, False)):
        return Config(BM, 32 if wide <= 128 else 16, 4, 2, pack)
    if BM > 16:  # more rows, fewer registers for keys
        BK = 64 if wide <= 128 else 32 if wide <= 256 else 16
        return Config(BM, BK, 4, 3, pack)
    BK = 128 if wide <= 128 else 64 if wide <= 256 else 32
    if p.k_quant is not None and p.v_quant is not None and p.k_quant.dtype == p.v_quant.dtype == "int4":
        BK *= 2 if p.q_len == 1 and p.page_size % (2 * BK) == 0 else 1  # of more queries the sums do not fit
    if p.page_size % BK != 0:
        BK, stages = (128, 6) if wide <= 64 else (64, 5) if wide <= 128 else (64, 4) if wide <= 256 else (16, 6)
        return Config(BM, BK, 4, stages, pack)
    return Config(BM, BK, 4, 3, pack)


def is_decode(problem: Problem) -> bool:
    """Few queries: the time goes into reading the keys.

    A packed batch may hold one long sequence, and its bits must then not depend on that: with `split_size` it takes
    the one pass of prefill.
    """
    return problem.q_len <= DECODE_ROWS and not (problem.packed_q and problem.split_size)


def tile(problem: Problem, arch: int) -> Config:
    """The tile of a problem, not yet split."""
    return decode_tile(problem) if is_decode(problem) else prefill_tile(problem, arch)


def config(problem: Problem, processors: int, arch: int, known: Config | None = None) -> Config:
    """The launch of a problem on a device of this architecture with so many processors; by a `known` tile, if any."""
    p, c = problem, known or tile(problem, arch)
    if not is_decode(p):
        return c
    tiles = -(-p.kv_len // c.BK)
    if p.split_size:
        split_tiles = -(-p.split_size // c.BK)
        return replace(c, splits=max(1, -(-tiles // split_tiles)), split_tiles=split_tiles)
    programs = query_tiles(p, c) * (p.heads // c.pack)
    places = processors * (2 if p.form == "paged" and not looks_ahead(p, c) else 1)
    return replace(c, splits=split_count(programs, tiles, places))


def query_tiles(problem: Problem, c: Config) -> int:
    """Tiles of query rows in all sequences; of packed ones the most that there can be."""
    BQ = c.BM // c.pack
    if problem.packed_q:
        return problem.total_q // BQ + problem.batch + 1
    return problem.batch * -(-problem.q_len // BQ)


def orders(problem: Problem) -> bool:
    """Whether the sequences of a packed batch are ranked first; one program sorts them, so there is a limit.

    Not causal ones: the last rows of a sequence come first, so that a long one that comes last ends in short pieces
    anyway (30 short ones and one of 8k: 363 TFLOPS ranked, 367 as they come).
    """
    return problem.packed_q and not (problem.causal or is_decode(problem)) and 1 < problem.batch < MOST_ORDERED


def looks_ahead(problem: Problem, c: Config) -> bool:
    """Whether a tile's page is looked up while the tile before it is done: where each tile lies in one page.

    Else the lookup is a step of the pipeline. Pages of 128, D=128: 4.31 TB/s in decode for 3.76, 436 TFLOPS in prefill
    for 374. Not where a tile is a page of 16: D=512 3.96 TB/s for 3.99.
    """
    return problem.page_size > 0 and problem.page_size % c.BK == 0 and c.BK > 16 and not lists_tiles(problem)


def lists_tiles(problem: Problem) -> bool:
    """Whether a dense mask's tiles are walked by a list; few queries read all of it."""
    return problem.mask is not None and not is_decode(problem)


def classifies(problem: Problem) -> bool:
    """Whether the mask's cells are looked at first, so that tiles can be skipped.

    Not an additive mask with a plane of its own for each head of each row: it is dense as a rule, and reading it twice
    costs more than the tiles that could be skipped.
    """
    p = problem
    return p.mask is not None and (p.mask.is_bool or p.mask.broadcast[0] or p.mask.broadcast[1])


def section(problem: Problem, c: Config) -> int:
    """Planes whose tiles are mixed: those whose keys fit the L2 cache together, if some tiles have more to do."""
    p = problem
    if not (p.causal or p.chunk or p.window != (None, None)) or p.packed_q:
        return 1
    size = p.kv_len * (p.head_dim * p.k_dtype.itemsize + p.value_dim * p.v_dtype.itemsize) * c.pack // p.group
    planes = p.batch * (p.heads // c.pack)
    return max(1, min(planes, L2_SECTION // max(1, size)))


def spec(problem: Problem, c: Config, arch: int, pairs: bool = True) -> Spec:
    """What the kernel is compiled for. `pairs`: bytes of K and V can be read two at a time."""
    p = problem
    flags = flags_of(p, c.BK)
    hides = p.mask is not None or (is_ruled(p) and p.q_len > 1)
    guard = ("inside" if is_decode(p) else "flag") if hides else ""
    keys = operand(p, p.head_dim, p.k_dtype, p.k_quant, True, c.BM, arch, pairs)
    if guard == "" and keys.kind == "int4" and keys.unit == 2 and keys.work == "f16":
        keys = replace(keys, biased=True, rescaled=True)
    return Spec(
        **flags,
        keys=keys,
        values=operand(p, p.value_dim // c.slices, p.v_dtype, p.v_quant, False, c.BM, arch, pairs),
        round=NAMES[p.q_dtype],
        BM=c.BM,
        BK=c.BK,
        pack=c.pack,
        group=p.group,
        slices=c.slices,
        ordered=orders(p),
        varlen=p.form == "varlen",
        page=p.page_size,
        listed=lists_tiles(p),
        negate=flags["linear"] and p.scale < 0,
        guard=guard,
        split=c.splits > 1,
        merge="after" if c.splits > 1 else "",
        block=min(MERGE_BLOCK, ceil_pow2(c.splits)),
        ptx=arch >= 80,
        grain=1,
        pdl=c.splits > 1 and arch >= 90,
        ahead=looks_ahead(p, c),
        late=min(32, c.BK) if guard == "" and c.BM < 64 else 0,
    )
