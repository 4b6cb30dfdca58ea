"""Checks of gradients on a GPU that `tilewise verify` adds to the suite: repeats, graphs, memory full of NaN."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..testing.case import Case
from ..testing.check import Mismatch
from ..testing.gradient_properties import SOME, kept, same
from ..testing.gradients import make_gradients
from ..testing.properties import fill_free_memory

Check = Callable[[str | None, str], None]
LARGE = (  # odd sizes, GQA, windows, sinks: tiles wait for others in every kernel of the backward pass
    Case(B=2, H=8, Hkv=2, Lq=500, Lk=700, D=128, dtype="bf16", causal=True),
    Case(B=2, H=8, Lq=700, Lk=500, D=64, dtype="bf16", window=(300, 10), sinks=True),
    Case(B=1, H=4, Hkv=2, Lq=300, Lk=400, D=256, dtype="f16", causal=True),
    Case(form="varlen", H=8, Hkv=2, q_lengths=(70, 1, 500), lengths=(70, 90, 500), D=128, dtype="bf16", causal=True),
)


def thousand_gradients(backend: str | None, device: str) -> None:
    """A thousand repeats of a backward pass give the same bits, with other work in between."""
    for case in LARGE:
        made = make_gradients(case, device)
        first = kept(made, backend)
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        noise = torch.randn(512, 512, device=device)
        for _ in range(1000):
            noise = (noise @ noise).clamp(-1, 1)
            for name, x in made.run(backend).items():
                wrong += (x != first[name]).sum()
        if int(wrong):
            raise Mismatch(f"{case}: {int(wrong)} elements differed in 1000 repeats")


def gradients_in_graphs(backend: str | None, device: str) -> None:
    """A captured backward pass gives the bits of an eager one, also after the incoming gradient has changed."""
    for case in (*LARGE, *SOME):
        made = make_gradients(case, device)
        kept(made, backend)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = made.run(backend)
        for scale in (1.0, -0.5):
            made.call.tensors.dout.mul_(scale)
            graph.replay()
            replayed = {name: x.clone() for name, x in captured.items()}
            same(f"{case} replayed, dout by {scale}", kept(made, backend), replayed)


def gradients_in_poisoned_memory(backend: str | None, device: str) -> None:
    """NaN in new workspaces has no effect."""
    for case in (*LARGE, *SOME):
        made = make_gradients(case, device)
        results = []
        for fill in (0.0, float("nan")):
            fill_free_memory(device, fill)
            results.append(kept(made, backend))
        same(f"{case} in memory full of NaN", *results)


GPU_CHECKS: dict[str, Check] = {
    check.__name__: check for check in (thousand_gradients, gradients_in_graphs, gradients_in_poisoned_memory)
}
