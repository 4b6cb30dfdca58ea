"""`tilewise warmup`: compiles kernels ahead of the first calls."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from .. import api
from ..core.plan import Plan
from ..core.storage import FLOATS
from .models import Model, find
from .progress import Screen
from .workloads import Workload, make_inputs, of_layer

PAGE = 16


def warmup() -> int:
    """Compiles the CPU kernels and keeps them on disk; returns the exit status."""
    from ..backends.cpu import unusable

    reason = unusable()
    if reason is not None:
        print(f"the CPU kernels cannot be compiled: {reason}")
        return 1
    from ..backends.cpu import compiler, kernel_cache

    start = time.perf_counter()
    with Screen(len(compiler.KERNELS)) as screen:
        for done, name in enumerate(compiler.KERNELS, start=1):
            screen.step(name)
            compiler.function(name)
            screen.print(f"{done:2} of {len(compiler.KERNELS)}  {name:14} {time.perf_counter() - start:6.1f} s")
    brought, kept = compiler.on_disk()
    if brought:
        print(f"{len(brought)} prebuilt, from the package")
    if len(brought | kept) < len(compiler.KERNELS):
        print(f"not all could be kept in {kernel_cache.cache_directory()}")
        return 1
    if kept - brought:
        print(f"kept in {kernel_cache.cache_directory()}")
    x = torch.empty(1, 1, 64, 64)
    print(*(f"{offer}\n" for offer in _offers(api.plan(x, x, x, causal=True))), sep="", end="")
    return 0


def cases(model: Model, length: int) -> list[Workload]:
    """A prompt of each kind of layer; the next token, over a cache and over pages."""
    workloads = []
    for layer in model.layers:
        workloads.append(of_layer(layer, f"{layer.name} prompt", length, length))
        if layer.causal:  # encoders do not decode
            workloads.append(of_layer(layer, f"{layer.name} token", 1, length))
            name = f"{layer.name} token from pages"
            workloads.append(of_layer(layer, name, 1, length, lengths=(length,), page_size=PAGE))
    return workloads


def warm_model(name: str, device: str, dtype: str | None, length: int, train: bool) -> int:
    """Runs each call of a model's layers once, so that its kernels are in the disk cache; returns the exit status."""
    model = find(name)
    kind = FLOATS[dtype or ("bf16" if device == "cuda" else "f32")]
    todo, start = cases(model, length), time.perf_counter()
    offers: dict[str, None] = {}  # each once
    print(f"{model.name}: {model.about}")
    with Screen(len(todo)) as screen:
        for done, case in enumerate(todo, start=1):
            screen.step(case.name)
            inputs = make_inputs(case, torch.device(device), kind)
            gradients = train and case.q_len > 1
            if gradients:
                inputs = replace(inputs, **{name: getattr(inputs, name).detach().requires_grad_() for name in "qkv"})
            out = inputs.attend()
            if gradients:
                out.sum().backward()
            if device == "cuda":
                torch.cuda.synchronize()
            plan, seconds = inputs.plan(), time.perf_counter() - start
            words = case.name + " and its gradients" * gradients
            screen.print(f"{done:2} of {len(todo)}  {words:34} {plan.backend:9} {seconds:6.1f} s")
            offers |= dict.fromkeys(_offers(plan))
    print(*offers, sep="\n", end="\n" * bool(offers))
    return 0


def _offers(plan: Plan) -> list[str]:
    """What `tilewise prove` would change for a call."""
    reasons = [*plan.notes, *(f"{name}: {reason}" for name, reason in plan.passed_over)]
    return [reason for reason in reasons if "`tilewise prove` checks" in reason]
