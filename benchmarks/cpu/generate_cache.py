"""generate() over a `QuantisedCache` and over transformers' DynamicCache: SmolLM2-135M after 4096 tokens.

    make chat  # once, for the weights
    python benchmarks/cpu/generate_cache.py --json benchmarks/records/cpu/generate_cache.json

One prompt is computed once, and its keys and values go into every cache. Then all take the same steps, interleaved: the
tokens are those that float32 attention over a DynamicCache finds. For each: memory, time of a step, how often its
likeliest token is the same, the mean KL divergence of its next-token distributions.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import torch
from transformers import DynamicCache

from tilewise.compat.transformers import QuantisedCache
from tilewise.tools.bench.machine import describe
from tilewise.tools.bench.report import write_json
from tilewise.tools.pretrained import smollm2

TEXT = """The sea was calm that morning, and the old man sat in his boat and waited for the fish. He had been a sailor,
a carpenter and, for one short summer, a teacher of mathematics; he knew the names of {n} stars. """
WAYS = {
    "DynamicCache, tilewise": ("tilewise", None),
    "DynamicCache, sdpa": ("sdpa", None),
    "int8": ("tilewise", {}),
    "int8 K, int4 V": ("tilewise", {"dtype": "int8", "v_dtype": "int4", "group": 32, "rotate": True}),
    "int4, group 32, rotated": ("tilewise", {"dtype": "int4", "group": 32, "rotate": True}),
    "fp8_e4m3": ("tilewise", {"dtype": "fp8_e4m3"}),
}


def prompt_of(tokenizer, tokens: int) -> torch.Tensor:
    text = "".join(TEXT.format(n=n) for n in range(tokens // 40))
    return torch.tensor([tokenizer.encode(text)[:tokens]])


def nbytes(cache) -> int:
    if isinstance(cache, QuantisedCache):
        return cache.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model, tokenizer = smollm2(getattr(torch, options.dtype))
    prompt = prompt_of(tokenizer, options.context)
    step = model(prompt, past_key_values=DynamicCache(config=model.config), logits_to_keep=1)
    caches = {}
    for name, (_, stored) in WAYS.items():
        cache = DynamicCache(config=model.config) if stored is None else QuantisedCache(model.config, **stored)
        for i, layer in enumerate(step.past_key_values.layers):
            cache.update(layer.keys, layer.values, i)
        caches[name] = cache
    token = step.logits[:, -1:].argmax(-1)
    seconds, same, kl = ({name: [] for name in WAYS} for _ in range(3))
    for _ in range(options.steps):
        for name, (attention, _) in WAYS.items():
            model.set_attn_implementation(attention)
            start = time.perf_counter()
            logits = model(token, past_key_values=caches[name]).logits[0, -1]
            seconds[name].append(time.perf_counter() - start)
            logs = logits.float().log_softmax(-1)
            if name == next(iter(WAYS)):
                exact = logs
            same[name].append(bool(logs.argmax() == exact.argmax()))
            kl[name].append(float((exact.exp() * (exact - logs)).sum().clamp_min(0)))
        token = exact.argmax()[None, None]
    results = []
    print(f"{'cache':26} {'MB':>7} {'ms/step':>8} {'top-1':>7} {'mean KL':>9}")
    for name in WAYS:
        row = {
            "cache": name, "bytes": nbytes(caches[name]), "step_ms": 1e3 * median(seconds[name]),
            "top1_equal": sum(same[name]) / len(same[name]), "mean_kl": sum(kl[name]) / len(kl[name]),
        }  # fmt: skip
        results.append(row)
        print(
            f"{name:26} {row['bytes'] / 1e6:7.1f} {row['step_ms']:8.1f} {row['top1_equal']:7.1%} {row['mean_kl']:9.2e}"
        )
    if options.json:
        about = describe("python benchmarks/cpu/generate_cache.py")
        about |= {"context": options.context, "steps": options.steps, "dtype": options.dtype, "results": results}
        write_json(options.json, about)


if __name__ == "__main__":
    main()
