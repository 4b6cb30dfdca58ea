"""What is compiled: the kernels that a list of calls chooses, and MLX's own for the same shapes."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from agx.translate import Instance, to_opencl
from mslsim import metallib
from mslsim.against_apple import KERNELS
from tilewise.backends.metal import config, launch, text
from tilewise.backends.metal.spec import THREADS
from tilewise.backends.metal.spec import Options as MetalOptions
from tilewise.core.options import Options
from tilewise.quantised import Quantised
from tilewise.validation import calls

CORES = 10
HALVES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(frozen=True)
class Source:
    """A text with its kernel: what is compiled, and by which digest the record knows it."""

    name: str
    text: str
    kernel: str
    threads: tuple[int, int, int]
    instance: Instance | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    def opencl(self) -> str:
        return to_opencl(self.text, self.kernel, self.threads, self.instance)


def _call(D: int, dtype: str, Lq: int, Lk: int, group: int, stored: str = "", **options: Any) -> calls.Call:
    """A dense call of 8 KV heads, checked as always, over tensors without memory."""
    sizes = ((8 * group, Lq), (8, Lk), (8, Lk))
    q, k, v = (torch.empty(1, heads, rows, D, dtype=HALVES[dtype], device="meta") for heads, rows in sizes)
    if stored:
        width = D // 2 if stored == "int4" else D
        of = torch.uint8 if stored == "int4" else torch.int8
        data = torch.empty(1, 8, Lk, width, dtype=of, device="meta")
        scales = torch.empty(1, 8, Lk, D // 32, dtype=torch.float16, device="meta")
        k = v = Quantised(data, scales, stored, 32)  # type: ignore[arg-type, assignment]
    return calls.dense(q, k, v, Options(**options))


def _chosen(name: str, call: calls.Call) -> Source:
    c = config.config_of(call.problem, CORES)
    made = launch.spec(call.problem, c, call.tensors)
    return Source(name, text.attention(made).torch, c.kernel, (THREADS, 1, 1), facts={"rows": c.rows})


PREFILL: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 256},
}


def ours() -> Iterator[Source]:
    for dtype in ("f16", "bf16"):
        for D in (64, 96, 128):
            for rules, options in PREFILL.items() if dtype == "f16" else [("causal", PREFILL["causal"])]:
                yield _chosen(f"tiled {dtype} D{D} {rules}", _call(D, dtype, 1024, 1024, 4, **options))
    for dtype, D in (("f16", 256), ("f16", 512), ("f32", 128)):
        yield _chosen(f"tiled {dtype} D{D} causal", _call(D, dtype, 1024, 1024, 4, causal=True))
    mask = torch.empty(1024, 1024, dtype=torch.bool, device="meta")
    yield _chosen("tiled f16 D128 bool mask", _call(128, "f16", 1024, 1024, 4, mask=mask))
    yield _chosen("tiled f16 D128 int8", _call(128, "f16", 1024, 1024, 4, stored="int8", causal=True))
    for D, group in ((128, 1), (128, 4), (128, 8), (64, 8), (256, 4)):
        yield _chosen(f"vector f16 D{D} rows {group}", _call(D, "f16", 1, 4096, group, causal=True))
    for stored in ("int4", "int8"):
        yield _chosen(f"vector {stored} D128 rows 4", _call(128, "f16", 1, 4096, 4, stored=stored, causal=True))
    yield Source("combine f16", text.combine("half", MetalOptions(splits=True)).torch, "combine", (text.LANES, 1, 1))


_UNROLL = ("#define STEEL_PRAGMA_UNROLL\n", '#define STEEL_PRAGMA_UNROLL _Pragma("clang loop unroll(full)")\n')


def mlx() -> Iterator[Source]:
    """MLX's texts, from its wheel, for lengths that are multiples of its tiles: its own have less to do."""
    for D in (64, 128):
        body = metallib.text_of(KERNELS + "sdpa_vector.h", {"blocks": 32})
        for kernel, threads in (("sdpa_vector", (1024, 1, 1)), ("sdpa_vector_2pass_1", (32, 4, 1))):
            numbers = {"D": D, "V": D} | ({"TK": 4} if "2pass" in kernel else {})
            yield Source(f"{kernel} f16 D{D}", body, kernel, threads, Instance({"T": "half"}, numbers))
    for D in (64, 80, 128):
        for rules, constants in (("plain", {}), ("causal", {"do_causal": 1})):
            body = metallib.text_of(
                KERNELS + "steel/attn/kernels/steel_attention.h", constants | {"align_Q": 1, "align_K": 1}
            )
            for old, new in (_UNROLL, ("src += str_y;", "src += int(str_y);")):
                assert old in body
                body = body.replace(old, new)
            numbers = {"BQ": 32, "BK": 32 if D < 128 else 16, "BD": D, "BV": D, "WM": 4, "WN": 1}
            types = {"T": "half", "MaskType": "half", "AccumType": "float"}
            name = f"steel_attention f16 D{D} {rules}"
            yield Source(name, body, "attention", (32, 4, 1), Instance(types, numbers))


KINDS: dict[str, Callable[[], Iterator[Source]]] = {"tilewise": ours, "mlx": mlx}
