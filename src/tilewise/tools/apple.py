"""The report of `tilewise verify --device mps` on a Mac, to paste into an issue.

It has the chip, the versions, the counts of the suite (also for the kernels under MLX, if that is installed), and
times compared with torch's and MLX's own attention, interleaved.
"""

from __future__ import annotations

import importlib.util
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import api
from ..core.mask_rules import PLAIN_PLACES
from ..testing.case import Case, make
from ..testing.check import Verdict, check_call
from .bench import machine
from .bench.measure import interleaved

BUDGET = 2.0  # seconds for each shape
WHERE = "paste all of this into an issue: it goes into the table of docs/metal.md"


@dataclass(frozen=True)
class Shape:
    """The shape of a timed call; causal, float16."""

    name: str
    H: int
    Hkv: int
    Lq: int
    Lk: int
    D: int
    B: int = 1

    def sizes(self) -> list[tuple[int, int, int, int]]:
        """The shapes of q, k and v."""
        rows = ((self.H, self.Lq), (self.Hkv, self.Lk), (self.Hkv, self.Lk))
        return [(self.B, heads, length, self.D) for heads, length in rows]

    def __str__(self) -> str:
        return f"{self.name}, heads {self.H}/{self.Hkv}, Lq {self.Lq}, Lk {self.Lk}, D {self.D}"


SHAPES = (
    Shape("prefill", 32, 8, 1024, 1024, 128),
    Shape("prefill", 16, 16, 4096, 4096, 64),
    Shape("prefill", 8, 4, 1024, 1024, 256),
    Shape("decode", 32, 8, 1, 8192, 128),
    Shape("decode", 8, 4, 1, 4096, 256),
)


@dataclass(frozen=True)
class Timed:
    """Milliseconds of our call and a peer's, or why there are none."""

    what: str
    peer: str
    ours_ms: float | None = None
    peer_ms: float | None = None
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"{self.what}: {self.error}"
        return f"{self.what}: tilewise {self.ours_ms:.3f} ms, {self.peer} {self.peer_ms:.3f} ms"


def has_mlx() -> bool:
    """Whether MLX can run kernels here."""
    if importlib.util.find_spec("mlx") is None:
        return False
    import mlx.core as mx

    return bool(mx.metal.is_available())


def facts() -> dict[str, str]:
    """Chip, system and versions, or why one is unknown."""
    name = getattr(torch.backends.mps, "get_name", None)
    cores = getattr(torch.backends.mps, "get_core_count", None)
    about = {
        "chip": _sysctl("machdep.cpu.brand_string") or (_tried(name) if name else "") or "unknown",
        "GPU cores": (_tried(cores) if cores else "") or "unknown",
        "memory": f"{int(size) >> 30} GiB" if (size := _sysctl("hw.memsize")) else "unknown",
        "macOS": platform.mac_ver()[0] or f"none, this is {platform.system()}",
        "python": platform.python_version(),
    }
    return about | {package: machine.version_of(package) or "not installed" for package in ("tilewise", "torch", "mlx")}


def _sysctl(name: str) -> str:
    if platform.system() != "Darwin":
        return ""
    return subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=10).stdout.strip()


def _tried(find: Callable[[], Any]) -> str:
    try:
        return str(find())
    except Exception:  # torch without MPS has these functions too
        return ""


def times(
    device: str, backend: str | None, shapes: Sequence[Shape] | None = None, budget: float = BUDGET
) -> Iterator[Timed]:
    """Times `attention` and `F.scaled_dot_product_attention` on a device."""
    wait = torch.mps.synchronize if device == "mps" else lambda: None

    def prepare(s: Shape) -> list[Callable[[], object]]:
        q, k, v = (torch.randn(*size, device=device, dtype=torch.float16) for size in s.sizes())
        options: dict[str, Any] = {"enable_gqa": s.Hkv != s.H, "is_causal": s.Lq == s.Lk}

        def ours() -> None:
            api.attention(q, k, v, causal=True, backend=backend)
            wait()

        def theirs() -> None:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
            wait()

        return [ours, theirs]

    return _timed("torch", "F.scaled_dot_product_attention", prepare, shapes or SHAPES, budget)


def mlx_times() -> Iterator[Timed]:
    """Times the kernels under MLX and `mx.fast.scaled_dot_product_attention`."""
    import mlx.core as mx

    from ..mlx import attention

    def prepare(s: Shape) -> list[Callable[[], object]]:
        q, k, v = (mx.random.normal(size).astype(mx.float16) for size in s.sizes())
        mx.eval(q, k, v)
        mask = "causal" if s.Lq == s.Lk else None
        sdpa = mx.fast.scaled_dot_product_attention
        return [
            lambda: mx.eval(attention(q, k, v, causal=True)),
            lambda: mx.eval(sdpa(q, k, v, scale=s.D**-0.5, mask=mask)),
        ]

    return _timed("MLX", "mx.fast.scaled_dot_product_attention", prepare, SHAPES, BUDGET)


def _timed(
    where: str,
    peer: str,
    prepare: Callable[[Shape], list[Callable[[], object]]],
    shapes: Sequence[Shape],
    budget: float,
) -> Iterator[Timed]:
    for shape in shapes:
        what = f"{where}, {shape}"
        try:
            ours, theirs = (t.seconds * 1e3 for t in interleaved(prepare(shape), budget))
            yield Timed(what, peer, ours, theirs)
        except Exception as error:  # a shape that fails must not lose the report
            yield Timed(what, peer, error=f"{type(error).__name__}: {error}"[:200])


def for_mlx(case: Case) -> bool:
    """Whether MLX can run a case: no quantised tensors, tile maps, key indices, biases, trees or strides, and no
    `k_shared`.
    """
    plain = ("", "f32", "f16", "bf16")
    biased = case.q_bias or case.k_bias or case.tree or case.shared
    strided = (case.k_start, case.k_stride, case.q_stride) != PLAIN_PLACES or case.strides
    return case.k in plain and case.v in plain and case.tile is None and not (strided or case.indices or biased)


def check_mlx(case: Case) -> Verdict:
    """One case with MLX arrays."""
    import mlx.core as mx

    from .. import mlx as ours

    entries: dict[Any, Any] = {
        api.attention: ours.attention,
        api.varlen_attention: ours.varlen_attention,
        api.paged_attention: ours.paged_attention,
    }
    inputs = make(case)
    options = {n: to_mlx(x) if isinstance(x, torch.Tensor) else x for n, x in inputs.options.items()}
    state = entries[inputs.entry](*(to_mlx(x) for x in inputs.args), return_lse=True, **options)
    mx.eval(state.out, state.lse)
    call = inputs.checked()
    out = to_torch(state.out)
    if call.problem.packed_q:
        out = out.transpose(0, 1)[None]
    elif case.layout == "blhd":
        out = out.transpose(1, 2)
    return check_call(call, out, inputs.common(to_torch(state.lse)))


def to_mlx(x: torch.Tensor) -> Any:
    import mlx.core as mx

    if x.dtype == torch.bfloat16:  # NumPy has no bfloat16
        return mx.array(x.contiguous().view(torch.uint16).numpy()).view(mx.bfloat16)
    return mx.array(x.contiguous().numpy())


def to_torch(x: Any) -> torch.Tensor:
    import mlx.core as mx
    import numpy as np

    if x.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(x.view(mx.uint16))).view(torch.bfloat16)
    return torch.from_numpy(np.array(x))


def lines(
    about: Mapping[str, str], counts: Mapping[str, int], failed: Sequence[str], seconds: float, timed: Sequence[Timed]
) -> list[str]:
    """The report as text."""
    suite = f"{counts['ok']} passed, {counts['failed']} failed, {counts['unsupported']} not supported, {seconds:.0f} s"
    text = ["", "```", "tilewise on an Apple GPU"]
    text += [f"  {name:12} {value}" for name, value in about.items()]
    text += [f"  {'conformance':12} {suite}", *(f"  failed       {name}" for name in failed)]
    text += ["  times, causal, float16:", *(f"    {row}" for row in timed)] if timed else ["  no times"]
    return [*text, "```", WHERE]
