"""What `tilewise doctor` finds of each backend: whether it runs here, the remedy if not, what was proven of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any


def guarded(probe: Callable[[], Any]) -> Any:
    """The result of a probe, or why it failed."""
    try:
        return probe()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return {"error": f"{type(error).__name__}: {error}"}


def backends() -> dict[str, Any]:
    """What is known of each backend, best first."""
    from ..dispatch.planner import BACKENDS

    return {name: guarded(lambda name=name: backend(name)) for name in BACKENDS}  # type: ignore[misc]


def backend(name: str) -> dict[str, Any]:
    """Whether a backend can serve a plain call on its own kind of device, and the remedy if not."""
    import torch

    from ..dispatch import planner

    device = "cuda" if torch.cuda.is_available() and name not in ("cpu", "metal") else "cpu"
    if name == "metal" and torch.backends.mps.is_available():
        device = "mps"
    problem = _plain_problem(device)
    reason = planner.load(name).supports(problem)
    if reason is None:
        more = {"kernels": guarded(kept_kernels)} if name == "cpu" else {}
        taken, words = planner.trust(name, problem)
        if words is not None:
            more["records"] = "used only if named: " * (not taken) + words
        if (shown := guarded(lambda: _proof(name, problem.device))) is not None:
            more["proof"] = shown
        return {"usable": True, "device": device, **more}
    return {"usable": False, "reason": reason, "remedy": guarded(lambda: remedy(name))}


def _proof(name: str, device: Any) -> str | None:
    """What `tilewise prove` found of a backend's families; None if it was not run."""
    from ..dispatch import planner, proofs

    facts = planner.proof_facts(name, device) if proofs.folder().is_dir() else None
    proof = None if facts is None else proofs.kept(facts)
    if proof is None or name not in proof.families:
        return None
    by_kind: dict[str, list[str]] = {}
    for family in proof.families[name]:
        by_kind.setdefault(proof.verdict(name, family).kind, []).append(family)
    words = {"failed": "failed, not used", "slower": "slower than the next backend", "open": "not finished"}
    found = "; ".join(f"{words.get(kind, kind)}: {', '.join(families)}" for kind, families in sorted(by_kind.items()))
    return f"by `tilewise prove` on {proof.date}: {found}"


def _plain_problem(device: str) -> Any:
    import torch

    from ..core.options import Options
    from ..validation import calls

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = torch.empty(1, 8, 1024, 128, dtype=dtype, device=device)
    return calls.dense(x, x, x, Options(causal=True)).problem


def remedy(name: str) -> str:
    """What to do so that a backend can run."""
    import torch

    if name == "cpu":
        return "pip install numba" if importlib.util.find_spec("numba") is None else "use backend='torch'"
    if name == "metal":
        if not torch.backends.mps.is_built():
            return "needs a Mac with Apple silicon, and torch for macOS"
        if not torch.backends.mps.is_available():
            return "torch sees no Apple GPU: needs macOS 14 or newer"
        return "pip install --upgrade torch: 2.7 or newer"
    if name in ("triton", "hopper"):
        if torch.version.cuda is None and torch.version.hip is None:
            return "this torch is built for the CPU alone: install a CUDA or ROCm build of it, on a machine with a GPU"
        if not torch.cuda.is_available():
            return "torch sees no GPU: check the driver (nvidia-smi), and CUDA_VISIBLE_DEVICES"
        if importlib.util.find_spec("triton") is None:
            return "pip install triton"
        return (
            "backend='triton' serves these calls"
            if name == "hopper"
            else "needs an NVIDIA GPU from Ampere on, or one of AMD's: see docs/platforms.md"
        )
    return "see the reason"


def kept_kernels() -> str:
    """How many of the CPU kernels are compiled and on disk."""
    from ..backends.cpu import compiler

    brought, kept = compiler.on_disk()
    done, every = len(brought | kept), len(compiler.KERNELS)
    words = f"{done} of {every} compiled" + f", {len(brought)} of them prebuilt, from the package" * bool(brought)
    return words + ("" if done == every else "; `tilewise warmup` compiles the rest")
