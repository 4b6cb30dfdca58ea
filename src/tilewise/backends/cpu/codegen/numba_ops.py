"""Building blocks of Numba kernel code: `jit`, struct views, conversion of rows."""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import intrinsic
from numba.np.numpy_support import from_dtype

from ....core.private.numba import Compiler
from ....core.storage import FORMATS
from ....core.storage import LATENT as LATENT_WIDTH
from ....core.storage import LATENT_SCALES as SCALE_BYTES
from ..params import GRADIENTS, LOAD_SUMS, PARAMS, TASK, TEAM, WORK_ITEM
from . import dtypes
from . import load_store as ls
from .calls import call_nothing
from .load_store import get_f32, get_one, put_f32, put_one
from .vector import W

F = np.float32
LATENT, LATENT_SCALES, LATENT_GROUP = map(np.int64, (LATENT_WIDTH, SCALE_BYTES, FORMATS[dtypes.LATENT_NAME].group))
INF = np.float32(np.inf)
ZERO, ONE = np.int64(0), np.int64(1)  # not int: Numba would compile a function again for every literal
# Numba passes for features that kernels do not use: closures, `with`, loops over literals, array expressions, parfors,
# constant branches, inlined overloads, reference-counted variables (ir_legalization)
UNUSED = {
    *("dead_branch_prune", "inline_overloads", "ir_legalization", "rewrite_semantic_constants"),
    *("dump_parfor_diagnostics", "find_literally", "inline_closure_likes", "literal_unroll", "nopython_rewrites"),
    *("make_function_op_code_to_jit_function", "nopython_supported_feature_validation", "with_lifting"),
}


class KernelCompiler(Compiler):
    """Numba's compiler without those passes."""

    def define_pipelines(self):
        pipelines = super().define_pipelines()
        for pipeline in pipelines:
            pipeline.passes = [each for each in pipeline.passes if each[0].name() not in UNUSED]
        return pipelines


# None of these is called from Python or holds reference-counted objects (`_nrt`): without wrappers and counting,
# kernels compile faster.
OPTIONS = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False}
jit = njit(**OPTIONS, pipeline_class=KernelCompiler)


def policy_jit(suffix):
    """`jit` for functions that are compiled once for each GEMM policy: cached code is found by name."""

    def compiled(fn):
        fn.__qualname__ = f"{fn.__name__}_{suffix}"
        return jit(fn)

    return compiled


def struct_at(record):
    """`fn(address)`: the struct there, whose fields can be read and set."""
    struct = from_dtype(record)

    @intrinsic
    def at(typingctx, address):
        def codegen(context, builder, sig, args):
            return builder.inttoptr(args[0], context.get_value_type(struct))

        return struct(types.int64), codegen

    return at


params_at, item_at, gradients_at, load_sums_at, task_at, team_at = map(
    struct_at, (PARAMS, WORK_ITEM, GRADIENTS, LOAD_SUMS, TASK, TEAM)
)


@njit(**OPTIONS, inline="always", pipeline_class=KernelCompiler)
def up(n, to):
    """n rounded up to a multiple of `to`."""
    return (n + to - 1) // to * to


SPINS = 64  # before a waiting thread yields


@jit
def back_off(spins, yield_thread):
    """A step of a thread that waits; after some it yields to others. Returns the number of steps."""
    if spins >= SPINS:
        call_nothing(yield_thread)
    return spins + 1


@jit
def fill(address, start, end, value):
    """Writes `value` to floats `start` to `end`."""
    for j in range(start, end):
        put_f32(address + 4 * j, value)


@jit
def latent_row_to_f32(to, source, width, padded):
    """`row_to_f32` for `LatentFormat`."""
    bad = ls.first_to_f32(to, source, dtypes.FP8, LATENT)
    for g in range(LATENT // LATENT_GROUP):
        scale = get_f32(source + LATENT + 4 * g)
        bad += scale * F(0)
        ls.row_scale(to + 4 * g * LATENT_GROUP, LATENT_GROUP, scale)
    rest, at = source + LATENT + LATENT_SCALES, to + 4 * LATENT
    whole = (width - LATENT) // W * W
    bad += ls.first_to_f32(at, rest, dtypes.BF16, whole)
    for i in range(whole, width - LATENT):
        x = get_one(rest, dtypes.BF16, i)
        put_f32(at + 4 * i, x)
        bad += x * F(0)
    fill(to, width, padded, F(0))
    return bad


@jit
def row_to_f32(to, source, dtype, width, padded, scales, scales_dtype, group):
    """Converts a row of `width` elements to float32, with zeros up to `padded`. Returns NaN if one is not finite."""
    if dtype == dtypes.LATENT:
        return latent_row_to_f32(to, source, width, padded)
    span = width // 2 if dtypes.is_packed(dtype) else width  # stored numbers
    whole = span // W * W
    bad = ls.first_to_f32(to, source, dtype, whole)
    if span < width:
        half = to + 4 * span
        bad += ls.second_to_f32(half, source, dtype, whole)
        for i in range(whole, span):  # integers: finite
            put_f32(to + 4 * i, ls.get_first(source, dtype, i))
            put_f32(half + 4 * i, ls.get_second(source, dtype, i))
    else:
        for i in range(whole, span):
            x = ls.get_element(source, dtype, i)
            put_f32(to + 4 * i, x)
            bad += x * F(0)
    fill(to, width, padded, F(0))
    if dtypes.is_quantised(dtype):
        for g in range((width + group - 1) // group):
            scale = get_one(scales, scales_dtype, g)
            bad += scale * F(0)
            ls.row_scale(to + 4 * g * group, up(min(group, padded - g * group), W), scale)
    return bad


@jit
def store_row(to, dtype, source, width, factor):
    """out = source * factor in the output's dtype."""
    whole = width // W * W
    if dtype == dtypes.F32:
        ls.store_f32(to, source, whole, factor)
    elif dtype == dtypes.F16:
        ls.store_f16(to, source, whole, factor)
    else:
        ls.store_bf16(to, source, whole, factor)
    for d in range(whole, width):
        put_one(to, dtype, d, get_f32(source + 4 * d) * factor)
