"""How K and V are split into chunks of columns, loaded and multiplied: plain functions of a `Problem`."""

from __future__ import annotations

from dataclasses import replace

from ...core.problem import Problem
from ...core.storage import LATENT, StorageFormat, stored_as
from ..gpu.flags import DTYPE_NAMES, ceil_pow2
from ..gpu.target import INTERPRETER, Target
from .spec import Operand

LONGEST_SUM = 128  # columns that tensor cores may sum, since they truncate the last bits of each sum


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
    """The narrowest chunk. In Triton 3.6, wgmma (64 rows or more) reads past an operand that is narrower than 64
    columns and was not copied asynchronously.
    """
    return 64 if BM >= 64 else 32


def operand(
    problem: Problem, width: int, fmt: StorageFormat, is_key: bool, BM: int = 64,
    target: Target = INTERPRETER, pairs: bool = False, row_groups: int = 1,
) -> Operand:  # fmt: skip
    """How K or V is loaded and multiplied. `pairs`: its bytes can be read two at a time; `row_groups`: scale
    groups with their own rows of q.

    float32 numbers are split into three bfloat16 parts and multiplied in six products: as exact as float32, where three
    TF32 products lose two bits. Different 16-bit types are multiplied in TF32, which holds both exactly. See
    `Target.precision`.
    """
    q = DTYPE_NAMES[problem.q_dtype]
    exact = target.precision(problem.allow_tf32)
    least = least_chunk(BM)
    if not fmt.is_quantised:
        same = q == fmt.name
        work, precision = (q, exact) if same or q == "f32" else ("f32", target.precision(True))
        if work == "f32" and width > 128:  # bf16x6 needs many registers per column
            widths = (64,) * -(-width // 64)
            return Operand(
                widths, width, "plain", 0, False, work, precision, False, False, rounds=is_key and precision == "tf32"
            )
        widths = chunks(width, least)
        # Decode has few products, so it can afford to round the sums of chunks.
        rounds = is_key and work != "f32" and BM < 64 and width > LONGEST_SUM
        rounds = rounds and not (
            problem.v_in_k and begins_with(widths, chunks(problem.value_dim, least), problem.value_dim)
        )
        if rounds:
            rest = width % LONGEST_SUM
            widths = (LONGEST_SUM,) * (width // LONGEST_SUM) + (chunks(rest, least) if rest else ())
        return Operand(widths, width, "plain", 0, False, work, precision, False, False, rounds=rounds)
    if fmt.scales_in_row:
        latent = operand(problem, LATENT, stored_as("fp8_e4m3", fmt.group), is_key, BM, target, pairs)
        return replace(latent, in_row=True, rest=width - LATENT)
    columns = fmt.columns(width)
    whole = fmt.group >= width
    factored = whole or (fmt.group >= least and (fmt.packing == 1 or columns % fmt.group == 0))
    if whole or not factored or row_groups > 1:
        widths = chunks(columns, least)
    else:
        rest = columns % fmt.group
        widths = (fmt.group,) * (columns // fmt.group) + ((max(least, ceil_pow2(rest)),) if rest else ())
    work = q if not is_key else "f32"
    if factored and q != "f32":
        work = "f16"  # holds every stored number exactly
    converts = target.converts_int8 if fmt.is_integer else target.converts_fp8
    fast = work == "f16" and converts and fmt.name != "codebook4"  # codebook4 is a shift, not a conversion
    rescaled = is_key and work == "f16" and q == "bf16"
    # Four warps share 32 units or more in a product; wgmma wants 64 columns, see least_chunk.
    unit = 2 if pairs and factored and BM < 64 and columns == sum(widths) and min(widths) >= 64 else 1
    return Operand(
        tuple(width // unit for width in widths), columns // unit, fmt.name, fmt.group, factored, work,
        exact, rescaled, fast, unit, packing=fmt.packing, row_groups=row_groups,
    )  # fmt: skip


def is_float32(problem: Problem) -> bool:
    """Whether any product has float32 operands."""
    p = problem
    found = operand(p, p.head_dim, p.k_format, True), operand(p, p.value_dim, p.v_format, False)
    return "f32" in [each.work for each in found]


def shares_chunks(keys: Operand, values: Operand, BM: int) -> bool:
    """Whether, with V in K, the chunks of V are chunks of K: same storage, same units, no padding.

    Elements that are converted before the products stay in registers between the two. With 64 rows of q no registers
    are left for quantised ones (h200 24, shares_chunks).
    """
    if BM >= 64 and keys.kind != "plain":
        return False
    alike = (keys.kind, keys.unit, keys.packing, keys.factored) == (values.kind, values.unit, 1, values.factored)
    return alike and begins_with(keys.widths, values.widths, values.columns)


def begins_with(keys: tuple[int, ...], values: tuple[int, ...], columns: int) -> bool:
    """Whether K's first chunks are V's chunks, which cover V's columns without padding."""
    return keys[: len(values)] == values and sum(values) == columns
