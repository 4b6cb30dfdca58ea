"""The suites of models. Sizes depend on the device; shapes are those of `models.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..models import MODELS, Layer
from ..patterns import PATTERNS
from ..workloads import Workload, of_layer

PAGE_SIZES = (16, 128)
HEAD_DIMS = (32, 40, 64, 72, 80, 96, 128, 192, 256, 320, 512, 576)
GPU_TOKENS = 16384  # of a call in all: short prompts are batched
KINDS = ("full", "causal", "window", "block-sparse")  # masks of the scaling suite


@dataclass(frozen=True, slots=True)
class Task:
    """One case of a suite."""

    suite: str
    group: str
    case: Workload
    metric: str  # what bounds it: "flops" or "bytes"
    x: float | None = None
    tile_map: bool = False  # the call is given a tile map
    memory: bool = False  # measure peak memory too


@dataclass(frozen=True, slots=True)
class Scope:
    """How large the cases are."""

    on_gpu: bool
    quick: bool = False
    shrink: int = 1  # lengths are divided by this: for tests

    def lengths(self, cpu: tuple[int, ...], gpu: tuple[int, ...], quick: int = 1) -> tuple[int, ...]:
        """The lengths for this device; only the last `quick` of them in a quick run."""
        chosen = gpu if self.on_gpu else cpu
        return tuple(max(16, n // self.shrink) for n in (chosen[:quick] if self.quick else chosen))


def prefill(scope: Scope) -> Iterator[Task]:
    """Prompts."""
    for name, layer in _layers("smollm2 llama-3-8b gemma-2:global gemma-3:local gemma-4:global gpt-oss:local", scope):
        for length in scope.lengths((512, 1024, 2048), (4096, 1024, 16384), quick=1):
            yield Task("prefill", name, _prompt(layer, length, scope), "flops", length)


def decode(scope: Scope) -> Iterator[Task]:
    """The next token over a contiguous cache."""
    for name, layer in _layers("llama-3-8b smollm2 gemma-3:global gemma-4:global gpt-oss:global", scope):
        for rows, length in _caches(scope):
            case = of_layer(layer, f"{rows} x {_k(length)}", 1, length, rows=rows)
            yield Task("decode", name, case, "bytes", length * rows)


def paged(scope: Scope) -> Iterator[Task]:
    """The next token over pages in any order."""
    for name, layer in _layers("llama-3-8b gemma-4:global", scope):
        for size in PAGE_SIZES:
            for rows, length in _caches(scope):
                lengths = tuple(max(1, length - length * (i % 4) // 7) for i in range(rows))
                case = of_layer(layer, f"{rows} x {_k(length)}, pages of {size}", 1, length, lengths=lengths)
                yield Task("paged", name, replace(case, page_size=size), "bytes", length * rows)


def mask(scope: Scope) -> Iterator[Task]:
    """Dense masks, bool and additive, whose hidden tiles can be skipped."""
    plain = replace(MODELS["llama-3-8b"].layers[0], causal=False, heads=8, kv_heads=8)
    for length in scope.lengths((2048,), (8192,)):
        for pattern in PATTERNS:
            rows = 64 // scope.shrink if pattern == "tree" else length
            for added in (False, True):
                case = of_layer(plain, f"{pattern}, {'added' if added else 'bool'}", rows, length, mask=pattern)
                yield Task("mask", f"mask of {_k(length)}", replace(case, added=added), "flops")


def varlen(scope: Scope) -> Iterator[Task]:
    """Packed sequences of many lengths."""
    for name, layer in _layers("minilm llama-3-8b gpt-oss:local", scope):
        longest, count = (4096, 32) if scope.on_gpu else (512, 12)
        if name.startswith("minilm"):
            longest, count = 512, 256 if scope.on_gpu else 24
        longest = max(16, longest // scope.shrink)
        lengths = tuple(max(1, longest * (i * 37 % count + 1) // count) for i in range(count))
        case = of_layer(layer, f"{count} of up to {longest}", longest, longest, lengths=lengths, packed=True)
        yield Task("varlen", name, case, "flops")


def dims(scope: Scope) -> Iterator[Task]:
    """Head dims, including some for which others have no kernel."""
    some = HEAD_DIMS[2::4] if scope.quick else HEAD_DIMS
    for length in scope.lengths((1024,), (4096,)):
        for width in some:
            layer = Layer("full", 8, 8, width)
            case = replace(_prompt(layer, length, scope), name=f"D {width}, {_k(length)}")
            yield Task("dims", f"causal prompt of {_k(length)}, 8 heads", case, "flops", width)


def models(scope: Scope) -> Iterator[Task]:
    """Every layer of every known model: a prompt and the next token."""
    prompt = scope.lengths((1024,), (4096,))[0]
    cache = scope.lengths((4096,), (16384,))[0]
    every = " ".join(f"{model.name}:{layer.name}" for model in MODELS.values() for layer in model.layers)
    for name, layer in _layers(every, scope):
        if layer.name != "absorbed":
            case = replace(_prompt(layer, prompt, scope), name=name)
            yield Task("models", f"prompt of {_k(prompt)}", case, "flops")
        if layer.causal and name != "deepseek-v3 full":  # it decodes in absorbed form
            rows = 16 if scope.on_gpu else 1
            case = of_layer(layer, name, 1, cache, rows=rows)
            yield Task("models", f"next token, {rows} x {_k(cache)}", case, "bytes")


def latent(scope: Scope) -> Iterator[Task]:
    """Latent attention: the next token over latent rows, contiguous and paged, and a prompt in expanded form."""
    layer = MODELS["deepseek-v3"].layer("absorbed")
    for heads in (128, 16):
        for rows, length in _caches(scope):
            case = of_layer(replace(layer, heads=heads), f"{rows} x {_k(length)}", 1, length, rows=rows)
            metric = "flops" if heads > 16 else "bytes"
            yield Task("latent", f"absorbed, {heads} heads", case, metric, length * rows)
            pages = replace(case, name=f"{case.name}, pages of 64", lengths=(length,) * rows, page_size=64)
            yield Task("latent", f"absorbed, {heads} heads", pages, metric, length * rows)
    expanded = replace(MODELS["deepseek-v3"].layer("full"), heads=16, kv_heads=16)
    for length in scope.lengths((1024,), (4096,)):
        yield Task("latent", "expanded, 16 heads", _prompt(expanded, length, scope), "flops", length)


def scale(scope: Scope) -> Iterator[Task]:
    """One head shape over lengths: how time, memory and tiles grow."""
    lengths = scope.lengths((1024, 2048, 4096, 8192, 16384), tuple(2**n for n in range(10, 18)), quick=4)
    layer = Layer("full", 16 if scope.on_gpu else 4, 16 if scope.on_gpu else 4, 128 if scope.on_gpu else 64)
    for kind in KINDS:
        for length in lengths:
            options: dict[str, Any] = {"causal": kind in ("causal", "window")}
            if kind == "window":
                options["window"] = max(16, 512 // scope.shrink)
            if kind == "block-sparse":
                if length > 65536:  # the dense mask, which it is made of, would take 17 GB
                    continue
                options["mask"] = "blocks"
            case = of_layer(layer, _k(length), length, length, **options)
            yield Task("scale", kind, case, "flops", length, tile_map=kind == "block-sparse", memory=True)


SUITES: dict[str, Callable[[Scope], Iterator[Task]]] = {
    "prefill": prefill,
    "decode": decode,
    "paged": paged,
    "mask": mask,
    "varlen": varlen,
    "dims": dims,
    "models": models,
    "latent": latent,
}


def _layers(names: str, scope: Scope) -> Iterator[tuple[str, Layer]]:
    """Layers by `model` or `model:layer`, with their names; windows are shortened as lengths are."""
    for name in names.split():
        model, _, kind = name.partition(":")
        layer = MODELS[model].layer(kind) if kind else MODELS[model].layers[0]
        yield f"{model} {layer.name}" if len(MODELS[model].layers) > 1 else model, _shrunk(layer, scope.shrink)


def _shrunk(layer: Layer, by: int) -> Layer:
    window = layer.window
    if isinstance(window, tuple):
        window = (-(-window[0] // by), -(-window[1] // by))
    elif window is not None:
        window = -(-window // by)
    return replace(layer, window=window, chunk=layer.chunk and -(-layer.chunk // by))


def _prompt(layer: Layer, length: int, scope: Scope) -> Workload:
    rows = max(1, GPU_TOKENS // length) if scope.on_gpu else 1
    return of_layer(layer, f"{rows} x {_k(length)}" if rows > 1 else _k(length), length, length, rows=rows)


def _caches(scope: Scope) -> list[tuple[int, int]]:
    """Batch rows and keys."""
    sizes = [(16, 8192), (1, 4096), (1, 32768), (64, 4096)] if scope.on_gpu else [(1, 4096), (1, 16384), (4, 4096)]
    return [(rows, max(16, length // scope.shrink)) for rows, length in (sizes[:1] if scope.quick else sizes)]


def _k(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)
