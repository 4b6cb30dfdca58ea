"""How keys and values may be rounded to int8, on a real model: SmolLM2-135M, the texts of `smollm2.py`.

    python benchmarks/cpu/int8_rounding.py --json benchmarks/records/cpu/int8_rounding.json

For each way: the mean KL divergence of the next-token distributions from those without rounding, and how often the
likeliest token is the same. K and V are rounded and widened again inside the model, so that ways can be tried that no
cache stores. bfloat16 is there to compare.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from smollm2 import PROMPTS, SmolLM, generate

from tilewise import attention
from tilewise.kv_cache.hadamard import rotate, rotate_back
from tilewise.tools.bench.machine import describe
from tilewise.tools.bench.report import aligned, write_json
from tilewise.tools.pretrained import SYSTEM, smollm2_file

Rounding = Callable[[torch.Tensor], torch.Tensor]  # of K or V, [T, heads, D]


def int8(group: int = 64) -> Rounding:
    """With the largest number of a group as 127, as the caches do; scales are float16."""

    def to(x: torch.Tensor) -> torch.Tensor:
        parts = x.unflatten(-1, (-1, group))
        scale = (parts.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-7).half().float()
        return ((parts / scale).round().clamp(-127, 127) * scale).flatten(-2)

    return to


def int8_least_squares(x: torch.Tensor) -> torch.Tensor:
    """Of seven scales the one with the least squared error: large numbers may be cut off."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    tried = torch.stack([(x / (scale * f)).round().clamp(-127, 127) * scale * f for f in torch.linspace(0.8, 1, 7)])
    best = (tried - x).square().sum(-1, keepdim=True).argmin(0, keepdim=True)
    return tried.take_along_dim(best, 0)[0]


def int8_with_zero_point(x: torch.Tensor) -> torch.Tensor:
    """From the least number of a row to the largest in 255 steps, wherever zero is."""
    low = x.amin(-1, keepdim=True)
    step = ((x.amax(-1, keepdim=True) - low) / 255).clamp_min(1e-7)
    return ((x - low) / step).round() * step + low


def int8_dense_at_zero(x: torch.Tensor) -> torch.Tensor:
    """256 levels as near to each other as is best for a normal distribution, scaled by the root mean square of a row.

    Their density is the third root of the distribution's, which makes the squared error least.
    """
    wide = x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-7) * 6**0.5
    code = (torch.erf(x / wide) * 128).floor().clamp(-128, 127)
    return torch.erfinv((code + 0.5) / 128) * wide


def rotated(inner: Rounding) -> Rounding:
    return lambda x: rotate_back(inner(rotate(x)))


def shifted(inner: Rounding, tokens: int = 16) -> Rounding:
    """Less the mean of the first keys: a vector that all keys share moves all scores of a query alike."""

    def to(x: torch.Tensor) -> torch.Tensor:
        mean = x[:tokens].mean(0, keepdim=True)
        return inner(x - mean) + mean

    return to


def balanced(inner: Rounding, power: float, tokens: int = 32) -> Rounding:
    """Elements divided by a power of their size in the first keys, as q would be multiplied by it."""

    def to(x: torch.Tensor) -> torch.Tensor:
        pairs = x[:tokens].unflatten(-1, (-1, 2)).square().mean((0, -1), keepdim=True)  # rotary turns pairs
        size = pairs.expand(*pairs.shape[:-1], 2).flatten(-2).sqrt().clamp_min(1e-6) ** power
        return inner(x / size) * size

    return to


def all_but_the_first(inner: Rounding, tokens: int = 4) -> Rounding:
    """The first tokens, which draw the most attention, stay as they are."""
    return lambda x: torch.cat([x[:tokens], inner(x)[tokens:]])


def bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


WAYS: dict[str, tuple[Rounding, Rounding]] = {  # of K and of V
    "bfloat16": (bfloat16, bfloat16),
    "group 64": (int8(), int8()),
    "group 64, K alone": (int8(), unchanged),
    "group 64, V alone": (unchanged, int8()),
    "group 64, rotated": (rotated(int8()), rotated(int8())),
    "group 32, rotated": (rotated(int8(32)), rotated(int8(32))),
    "group 16, rotated": (rotated(int8(16)), rotated(int8(16))),
    "group 64, rotated, scales by least squares": (rotated(int8_least_squares), rotated(int8_least_squares)),
    "group 64, rotated, zero points": (rotated(int8_with_zero_point), rotated(int8_with_zero_point)),
    "group 64, rotated, levels of a normal distribution": (rotated(int8_dense_at_zero), rotated(int8_dense_at_zero)),
    "group 64, K less its mean": (shifted(int8()), int8()),
    "group 64, K less its mean, rotated": (shifted(rotated(int8())), rotated(int8())),
    "group 64, K balanced by its root, rotated": (balanced(rotated(int8()), 0.5), rotated(int8())),
    "group 64, K balanced in full": (balanced(int8(), 1.0), rotated(int8())),
    "group 64, rotated, first 4 tokens exact": (
        all_but_the_first(rotated(int8())),
        all_but_the_first(rotated(int8())),
    ),
}


class Attending:
    """What the model asks of a batch, for one text and without a cache."""

    def __init__(self, length: int, k_rounding: Rounding, v_rounding: Rounding) -> None:
        self.starts, self.counts = [0], [length]
        self.roundings = k_rounding, v_rounding

    def write(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> None:
        self.stored = [to(x).transpose(0, 1)[None] for to, x in zip(self.roundings, (k, v), strict=True)]

    def attend(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        return attention(q.transpose(0, 1)[None], *self.stored, causal=True)[0].transpose(0, 1)


def distributions(model: SmolLM, prompts: list[list[int]], texts: list[list[int]], way: tuple) -> torch.Tensor:
    """Log probabilities at every token of the texts, `[tokens, vocabulary]`."""
    logs = []
    for prompt, text in zip(prompts, texts, strict=True):
        whole = prompt + text[:-1]
        rows = torch.arange(len(whole) - len(text), len(whole))
        logs.append(model(Attending(len(whole), *way), whole, rows).log_softmax(-1))
    return torch.cat(logs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = SmolLM(smollm2_file())
    chat = "{}<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    prompts = [model.tokenizer.encode(chat.format(SYSTEM, p)).ids for p in PROMPTS]
    texts = generate(model, prompts, {"dtype": "f32"})
    exact = distributions(model, prompts, texts, (unchanged, unchanged))
    results, lines = [], [["int8", "mean KL", "max KL", "same likeliest token"]]
    for name, way in WAYS.items():
        logs = distributions(model, prompts, texts, way)
        kl = (exact.exp() * (exact - logs)).sum(-1).clamp_min(0)
        same = (logs.argmax(-1) == exact.argmax(-1)).float().mean().item()
        results.append({"way": name, "mean_kl": kl.mean().item(), "max_kl": kl.max().item(), "top1_equal": same})
        lines.append([name, f"{kl.mean():.1e}", f"{kl.max():.1e}", f"{same:.1%}"])
    print("\n".join(aligned(lines)))
    if options.json:
        write_json(options.json, describe("python benchmarks/cpu/int8_rounding.py") | {"results": results})


if __name__ == "__main__":
    main()
