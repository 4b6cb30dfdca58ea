"""Attention for MLX arrays by the kernels of backend `metal`, through `mx.fast.metal_kernel`.

No torch tensor holds data on the way.

Arguments are checked and planned by their shapes and dtypes alone, as tensors without memory. MLX generates kernel
signatures from the names of buffers; the source and the bodies of entries are the same as for torch.

    from tilewise.mlx import attention
    out = attention(q, k, v, causal=True, window=4096)

The functions take the options of `tilewise.attention` and its kin, as mx.arrays or numbers, except `out`, `tile_map` (a
mask's tiles are classified anyway), dropout and `Quantised` tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mlx.core as mx
import torch

from .backends.metal import config, params, text, unserved
from .backends.metal.device import TYPICAL_CORES
from .backends.metal.launch import SOURCES, spec, state_shape
from .backends.metal.options import MASK_KINDS
from .backends.metal.spec import THREADS
from .backends.metal.text import LANES
from .core.options import Options
from .core.signatures import NAMES
from .errors import InvalidArgument, Unsupported
from .state import AttentionState
from .validation import calls
from .validation.calls import Call

DTYPES = {
    mx.float32: torch.float32,
    mx.float16: torch.float16,
    mx.bfloat16: torch.bfloat16,
    mx.bool_: torch.bool,
    mx.int32: torch.int32,
    mx.int64: torch.int64,
}
MLX = {of: name for name, of in DTYPES.items()}
Outputs = dict[str, tuple[tuple[int, ...], Any]]  # shapes and dtypes
FEWEST = 8  # elements: MLX passes smaller arrays in another address space
ON_CPU = "tilewise.attention takes MLX arrays on the CPU"
REFUSED = {
    "out": "MLX arrays are not written to",
    "tile_map": "a mask's tiles are classified anyway",
    "dropout_p": ON_CPU,
    "dropout_seed": ON_CPU,
}
make_kernel: Callable[..., Any] = mx.fast.metal_kernel  # replaced by tests


def attention(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> Any:
    """`tilewise.attention` of MLX arrays: an array, or an `AttentionState` of two with `return_lse`."""
    return _run("attention", calls.dense, {"q": q, "k": k, "v": v}, options)


def varlen_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    cu_seqlens_q: mx.array,
    cu_seqlens_k: mx.array,
    **options: Any,
) -> Any:
    """`tilewise.varlen_attention` of MLX arrays."""

    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    return _run("varlen_attention", calls.varlen, given, options)


def paged_attention(
    q: mx.array,
    k_pages: mx.array,
    v_pages: mx.array,
    block_table: mx.array,
    context_lens: mx.array,
    **options: Any,
) -> Any:
    """`tilewise.paged_attention` of MLX arrays."""

    given = {"q": q, "k": k_pages, "v": v_pages, "block_table": block_table, "kv_lengths": context_lens}
    return _run("paged_attention", calls.paged, given, options)


def _run(entry: str, check: Callable[..., Call], arrays: dict[str, Any], options: dict[str, Any]) -> Any:
    known = [name for name in NAMES[entry][len(arrays) :] if name not in (*REFUSED, "backend")]
    for name, value in options.items():
        if name in REFUSED and value is not None:
            raise Unsupported("metal", f"{name}= with MLX arrays", REFUSED[name])
        if name not in known and name not in REFUSED:
            raise InvalidArgument(name, "an unknown option", f"one of {', '.join(known)}")
    for name, value in arrays.items():
        if not isinstance(value, mx.array):
            raise InvalidArgument(name, type(value).__name__, "an mx.array")
    shown = {name: _described(name, x) for name, x in arrays.items()}
    plain = {name: _described(name, x) if isinstance(x, mx.array) else x for name, x in options.items()}
    call = check(*shown.values(), Options(**plain))
    arrays = arrays | {name: x for name, x in options.items() if isinstance(x, mx.array)}
    if call.problem.is_empty:
        return _unseen(call, arrays.get("sinks"))
    if make_kernel is mx.fast.metal_kernel and not mx.metal.is_available():
        raise Unsupported("metal", "this MLX has no Metal", "use tilewise.attention, which takes MLX arrays on the CPU")
    if (reason := unserved(call.problem)) is not None:
        raise Unsupported("metal", reason, ON_CPU)
    return _launch(call, arrays)


def _described(name: str, x: mx.array) -> torch.Tensor:
    """A tensor of the array's shape and dtype, without memory."""
    if x.dtype not in DTYPES:
        raise InvalidArgument(name, str(x.dtype), ", ".join(str(dtype) for dtype in DTYPES))
    return torch.empty(x.shape, dtype=DTYPES[x.dtype], device="meta")


def _launch(call: Call, arrays: dict[str, Any]) -> Any:
    p, t = call.problem, call.tensors
    c = config.config_of(p, TYPICAL_CORES)
    given: dict[str, Any] = {name: _as_stored(name, arrays.get(field)) for name, field in SOURCES.items()}
    states = None
    if config.classifies(p, c):
        assert t.mask is not None
        shape = state_shape(p, c)
        states = torch.empty(shape, dtype=torch.uint8, device="meta")
        numbers = _arrays(params.numbers(p, c, t, None))
        grid = (shape[3], shape[2], shape[0] * shape[1])
        source = text.classification(MASK_KINDS[t.mask.dtype])
        given |= _call(source, given | numbers, {"states": (tuple(shape), mx.uint8)}, grid, LANES)

    numbers = _arrays(params.numbers(p, c, t, states))
    made = spec(p, c, t)
    rows = (p.total_q if p.packed_q else p.batch * p.q_len) * p.heads
    outputs: Outputs = {"out": (tuple(call.out.shape), MLX[p.q_dtype])}
    if call.lse is not None:
        outputs["lse"] = (tuple(call.lse.shape), mx.float32)
    parts = {
        "partial": ((rows * c.splits * p.value_dim,), mx.float32),
        "partial_ml": ((rows * c.splits * 2,), mx.float32),
    }
    grid = (config.query_tiles(p, c), p.heads // c.pack, c.splits)
    given |= _call(text.attention(made), given | numbers, outputs | parts, grid, THREADS)
    if c.splits > 1:
        combine = text.combine(made.q_type, made.options)
        given |= _call(combine, given | numbers, outputs, (rows // p.heads, p.heads, 1), LANES)
    return given["out"] if call.lse is None else _state(given["out"], given["lse"])


def _state(out: Any, lse: Any) -> AttentionState:
    return AttentionState(out, lse)


def _call(
    source: text.Source,
    given: dict[str, Any],
    outputs: Outputs,
    grid: tuple[int, int, int],
    threads: int,
) -> dict[str, Any]:
    """One kernel over `grid` threadgroups: its outputs by name."""
    made = _kernel(source, make_kernel)(
        inputs=[_enough(given[name]) for name in (*source.inputs, *text.PARAMETERS)],
        grid=(grid[0] * threads, grid[1], grid[2]),
        threadgroup=(threads, 1, 1),
        output_shapes=[outputs[name][0] for name in source.outputs],
        output_dtypes=[outputs[name][1] for name in source.outputs],
    )
    return dict(zip(source.outputs, made, strict=True))


@lru_cache(maxsize=1024)
def _kernel(source: text.Source, make: Callable[..., Any]) -> Any:
    return make(
        # MLX caches compiled kernels by name.
        name=f"tilewise_{source.kernel}_{hashlib.sha256(source.torch.encode()).hexdigest()[:12]}",
        input_names=[*source.inputs, *text.PARAMETERS],
        output_names=list(source.outputs),
        source=source.body,
        header=source.header,
    )


def _arrays(numbers: params.Numbers) -> dict[str, Any]:
    return {
        "ints": mx.array(list(numbers.ints), mx.int32),
        "strides": mx.array(list(numbers.strides), mx.int64),
        "floats": mx.array(list(numbers.floats), mx.float32),
    }


def _as_stored(name: str, x: mx.array | None) -> mx.array | None:
    """An array as a kernel reads it."""
    if x is None:
        return None
    if name in ("lengths", "offsets", "cu_q", "cu_k", "table"):
        return x.astype(mx.int32)
    if name in ("slopes", "sinks"):
        return x.astype(mx.float32)
    return x.view(mx.uint8) if name == "mask" else x


def _enough(x: mx.array) -> mx.array:
    """An array of 8 elements or more."""
    return x if x.size >= FEWEST else mx.pad(x.flatten(), (0, FEWEST - x.size))


def _unseen(call: Call, sinks: mx.array | None) -> Any:
    """The result of an empty problem."""
    out = mx.zeros(tuple(call.out.shape), MLX[call.problem.q_dtype])
    if call.lse is None:
        return out
    shape = tuple(call.lse.shape)
    if sinks is None or call.problem.packed_q:
        return _state(out, mx.full(shape, -float("inf"), mx.float32))
    heads_last = call.tensors.lse is not None and call.tensors.lse.shape != call.lse.shape
    column = sinks.astype(mx.float32)
    return _state(out, mx.broadcast_to(column if heads_last else column[:, None], shape))
