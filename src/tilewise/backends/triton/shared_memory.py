"""Resources of a launch: an upper bound on shared memory, and registers.

The bound is calibrated against Triton 3.6, which allocates without a GPU (`benchmarks/h200/fits.py`):

    q        all of a tile's rows, in the type of the products with K
    buffers  K, V, their scales, pages and elements of captured tensors, once for each stage; one less for plain 16-bit
             operands without wgmma, since the last stage is being loaded to registers
    operands K and V of one step where they are converted for the products, and the weights
    scratch  of reductions and layout conversions, which pass data between warps
"""

from __future__ import annotations

from ...core.problem import Problem
from ..gpu.target import Target
from .mod_printer import captured_bytes
from .spec import Config, Operand, Spec

SCRATCH = 1024  # bytes, and for each warp:
WARP_SCRATCH = 256


def needed(problem: Problem, c: Config, s: Spec, target: Target) -> int:
    """An upper bound on the bytes that the kernels of a launch take, the fix-up (of one stage) included."""
    k, v = s.keys, s.values
    q = c.BM * _elements(k) * _size(k)
    step = [c.BK * _elements(op) * _size(op) for op in (k, v)]
    widest = [c.BK * max(op.widths) * _size(op) for op in (k, v)]
    weights = 4 * c.BM * c.BK
    scratch = SCRATCH + WARP_SCRATCH * c.warps
    plain = all(op.kind == "plain" and op.work != "f32" for op in (k, v))
    one_stage = q + max(step) + widest[0] + weights + scratch
    epilogue = 4 * c.BM * max(v.widths) + scratch
    bytes_of_stage = _loaded(k, c, problem.k_dtype.itemsize)
    bytes_of_stage += 0 if s.v_in_k else _loaded(v, c, problem.v_dtype.itemsize)
    bytes_of_stage += {"": 0, "tile": 16, "pages": 4 * c.BK // max(1, s.page), "rows": 4 * c.BK}[s.lookup]
    bytes_of_stage += 4 * c.BK if s.chosen else 0  # indices
    bytes_of_stage += captured_bytes(problem.mods, c.BM, c.BK)
    if target.amd:  # operands pass through shared memory to registers; one stage stays in registers
        passing = max(*widest, weights) if c.stages == 1 or not plain else weights
        first = c.BM * max(k.widths) * _size(k)
        last = c.BM * max(v.widths) * (4 if s.round == "f32" else 2)
        return max((c.stages - 1) * bytes_of_stage + passing, first, last) + scratch
    own_products = target.warpgroup_mma and c.BM >= 64  # MMA of Hopper and Blackwell, which reads shared memory
    if plain and own_products:
        loop = q + c.stages * bytes_of_stage + scratch
    elif plain:
        loop = q + (c.stages - 1) * bytes_of_stage + weights + scratch
    else:
        q_chunk = c.BM * max(k.widths) * _size(k)  # being converted to the MMA layout
        loop = q + q_chunk + c.stages * bytes_of_stage + weights + step[0] + widest[1] + scratch
    return max(loop if c.stages > 1 else 0, one_stage if c.stages == 1 or s.guard == "flag" else 0, epilogue)


def registers(c: Config, s: Spec, target: Target) -> int:
    """Registers of a thread that the output and the scores of a tile take, in float32."""
    columns = sum(s.values.widths) * s.values.parts + c.BK
    return c.BM * columns // (target.wave * c.warps)


def spills(c: Config, s: Spec, target: Target) -> bool:
    """Whether these leave too few registers for the rest of a step."""
    return registers(c, s, target) > target.most_registers("f32" in (s.keys.work, s.values.work))


def _size(op: Operand) -> int:
    """Bytes of an element as an MMA operand."""
    return 4 if op.work == "f32" else 2


def _elements(op: Operand) -> int:
    """Columns of a row, padding included."""
    return sum(op.widths) * op.parts + 2 * op.rest  # as wide as float32


def _loaded(op: Operand, c: Config, itemsize: int) -> int:
    """Bytes of a tile as stored, with its scales: for each row and group or, where chunks span groups, for each
    element.
    """
    rows = c.BK * sum(op.widths) * (itemsize if op.kind == "plain" else op.unit)
    if op.kind == "plain":
        return rows
    return rows + 2 * c.BK * op.rest + 4 * c.BK * (max(op.groups, op.row_groups) if op.factored else _elements(op))
