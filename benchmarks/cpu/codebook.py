"""`codebook4` beside int4, at the same bytes: the error of attention, and what it does to a model.

    python benchmarks/cpu/codebook.py --json benchmarks/records/cpu/codebook.json
    python benchmarks/cpu/codebook.py --model --json benchmarks/records/cpu/codebook_model.json

K and V are rotated, then stored in 4 bits and a float32 scale for each group. int4 and codebook4 are as caches store
them, their scale set by the largest magnitude. To compare: int4 with the best of several scales; levels that are best
for normal numbers (Lloyd-Max) in units of the root mean square, and with the best of several scales. Float32, 128
columns; keys whose elements are alike, and keys of which three elements are 20 times as large. Errors are relative to
the output.

With --model the same ways on SmolLM2-135M and the texts of `smollm2.py`, K and V both: the mean KL divergence of the
next-token distributions from those without rounding, and how often the likeliest token is the same. Some minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tilewise import Quantised, attention
from tilewise.kv_cache import hadamard
from tilewise.tools.bench.machine import describe
from tilewise.tools.bench.report import write_json

HALF = torch.tensor([0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326])
LEVELS = torch.cat([-HALF.flip(0), HALF])
D, SEEDS = 128, 4


def stored(x: torch.Tensor, group: int, unit: Callable, steps: Callable, factors: Sequence[float]) -> torch.Tensor:
    """`x` through `steps` in units of each group's scale times that of `factors` which errs least."""
    y = x.unflatten(-1, (-1, group))
    scale = unit(y)
    tried = torch.stack([steps(y / (scale * factor)) * scale * factor for factor in factors])
    least = (tried - y).square().sum(-1, keepdim=True).argmin(0, keepdim=True)
    return tried.gather(0, least.expand(1, *y.shape))[0].flatten(-2)


def nearest(y: torch.Tensor) -> torch.Tensor:
    return LEVELS[(y[..., None] - LEVELS).abs().argmin(-1)]


def rms(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean(-1, keepdim=True).sqrt()


WAYS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "int4": lambda x, group: Quantised.from_float(x, "int4", group).dequantise(),
    "codebook4": lambda x, group: Quantised.from_float(x, "codebook4", group).dequantise(),
    "int4, best scale": lambda x, group: stored(
        x, group, lambda y: y.abs().amax(-1, keepdim=True) / 7, lambda y: y.round().clamp(-8, 7),
        [0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0],
    ),
    "normal levels": lambda x, group: stored(x, group, rms, nearest, [1.0]),
    "normal levels, best scale": lambda x, group: stored(
        x, group, rms, nearest,
        [0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2],
    ),
}  # fmt: skip


def errors(large: bool, group: int) -> dict[str, float]:
    """Of each way, the mean over some inputs."""
    found = dict.fromkeys(WAYS, 0.0)
    for seed in range(SEEDS):
        random = torch.Generator().manual_seed(seed)
        k, v = torch.randn(2, 1, 2, 400, D, generator=random)
        q = torch.randn(1, 8, 64, D, generator=random) * 3
        if large:
            some = torch.arange(D) % 50 == 5
            k, q = k * torch.where(some, 20.0, 1.0), q / torch.where(some, 8.0, 1.0)
        exact = attention(q, k, v)
        turned = [hadamard.rotate(x) for x in (q, k, v)]
        for name, way in WAYS.items():
            out = hadamard.rotate_back(attention(turned[0], way(turned[1], group), way(turned[2], group)))
            found[name] += float((out - exact).norm() / exact.norm()) / SEEDS
    return found


class Attending:
    """What the model asks of a batch, for one text and without a cache: `to` rounds K and V, `[T, heads, D]`."""

    def __init__(self, length: int, to: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.starts, self.counts, self.to = [0], [length], to

    def write(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> None:
        self.stored = [self.to(x).transpose(0, 1)[None] for x in (k, v)]

    def attend(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        return attention(q.transpose(0, 1)[None], *self.stored, causal=True)[0].transpose(0, 1)


def distributions(model: Any, prompts: list[list[int]], texts: list[list[int]], to: Callable) -> torch.Tensor:
    """Log probabilities at every token of the texts, `[tokens, vocabulary]`."""
    logs = []
    for prompt, text in zip(prompts, texts, strict=True):
        whole = prompt + text[:-1]
        rows = torch.arange(len(whole) - len(text), len(whole))
        logs.append(model(Attending(len(whole), to), whole, rows).log_softmax(-1))
    return torch.cat(logs)


def of_model() -> list[dict]:
    """What each way does to a model's tokens."""
    from smollm2 import PROMPTS, SmolLM, generate

    from tilewise.tools.pretrained import SYSTEM, smollm2_file

    model = SmolLM(smollm2_file())
    chat = "{}<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    prompts = [model.tokenizer.encode(chat.format(SYSTEM, p)).ids for p in PROMPTS]
    texts = generate(model, prompts, {"dtype": "f32"})
    exact = distributions(model, prompts, texts, lambda x: x)
    rows = []
    for group in (32, 64):
        for name, way in WAYS.items():

            def to(x: torch.Tensor, way: Any = way, group: int = group) -> torch.Tensor:
                return hadamard.rotate_back(way(hadamard.rotate(x), group))

            logs = distributions(model, prompts, texts, to)
            kl = (exact.exp() * (exact - logs)).sum(-1).clamp_min(0)
            same = (logs.argmax(-1) == exact.argmax(-1)).float().mean().item()
            rows.append({"group": group, "way": name, "mean_kl": kl.mean().item(), "top1_equal": same})
            print(f"group {group}, {name}: mean KL {kl.mean():.3f}, same token {same:.1%}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", action="store_true")
    args = parser.parse_args()
    about = describe("python benchmarks/cpu/codebook.py " + "--model " * args.model + f"--json {args.json}")
    about["rows"] = of_model() if args.model else []
    for large in (False, True) if not args.model else ():
        for group in (32, 64, 128):
            row = {"keys": "three large" if large else "alike", "group": group, **errors(large, group)}
            about["rows"].append(row)
            print(" ".join(f"{name} {x:.3f}" if isinstance(x, float) else f"{name} {x}," for name, x in row.items()))
    if args.json:
        write_json(args.json, about)


if __name__ == "__main__":
    main()
