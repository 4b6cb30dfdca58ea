"""Two real models with their attention by tilewise and by torch's SDPA, in turns: all of it, and the attention alone.

    make chat embed  # once, for the weights
    python benchmarks/cpu/models.py --json benchmarks/cpu/models.json

SmolLM2-135M-Instruct reads a prompt of 1,500 tokens and makes 64 more; all-MiniLM-L6-v2 embeds 32 sentences in one
batch, padded to the longest. Whole runs are timed without a profiler. The time of attention is what torch's profiler
finds in the attention function of all layers; SDPA's has what transformers does around it in it, as tilewise's has.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tilewise.bench.machine import describe
from tilewise.bench.report import write_json
from tilewise.chat import answer
from tilewise.compat.mask_patterns import make_mask
from tilewise.compat.transformers import attention_forward
from tilewise.embed import batch, embed
from tilewise.pretrained import minilm, smollm2

PROMPT, NEW = 1500, 64
SENTENCES = 32
WORDS = (
    "the quick survey of the northern coast took most of a summer because the old charts had been drawn by hand and "
    "were wrong in many places so that every bay had to be sounded again and each rock given its true position before "
    "a new map could be printed and sold to the captains who had waited for it since the spring of that year"
).split()
FUNCTIONS = {"tilewise": (attention_forward, make_mask), "sdpa": (sdpa_attention_forward, sdpa_mask)}


def marked(name: str) -> str:
    """An implementation of that name whose calls a profiler can see."""
    function, mask = FUNCTIONS[name]

    def attention(*arguments: Any, **options: Any) -> Any:
        with record_function("attention"):
            return function(*arguments, **options)

    AttentionInterface.register(f"{name}_marked", attention)
    AttentionMaskInterface.register(f"{name}_marked", mask)
    return f"{name}_marked"


def compare(model: Any, run: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Medians of whole runs and of the attention in them, each peer in turns with the other."""
    whole: dict[str, list[float]] = {name: [] for name in FUNCTIONS}
    attention: dict[str, list[float]] = {name: [] for name in FUNCTIONS}
    results = {}
    for turn in range(repeats + 1):
        for name in FUNCTIONS if turn % 2 else reversed(FUNCTIONS):
            model.set_attn_implementation(name)
            start = time.perf_counter()
            results[name] = run()
            seconds = time.perf_counter() - start
            if turn:  # the first of each only warms up
                whole[name].append(seconds)
    for turn in range(repeats):
        for name in FUNCTIONS if turn % 2 else reversed(FUNCTIONS):
            model.set_attn_implementation(marked(name))
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                run()
            found = next(row for row in profiler.key_averages() if row.key == "attention")
            attention[name].append(found.cpu_time_total / 1e6)
    median = {name: statistics.median(whole[name]) for name in FUNCTIONS}
    share = {name: statistics.median(attention[name]) for name in FUNCTIONS}
    return {
        "results": results,
        "record": {
            "seconds": whole, "median": median, "whole_ratio": median["sdpa"] / median["tilewise"],
            "attention_seconds": attention, "attention_median": share,
            "attention_ratio": share["sdpa"] / share["tilewise"],
        },
    }  # fmt: skip


def show(what: str, record: dict[str, Any]) -> None:
    for name in FUNCTIONS:
        print(
            f"{what:28} {name:9} {record['median'][name]:8.4f} s, attention {record['attention_median'][name]:8.4f} s"
        )
    print(f"{what:28} SDPA / tilewise: whole {record['whole_ratio']:.2f}, attention {record['attention_ratio']:.2f}")


def smollm2_record(dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    model, tokenizer = smollm2(dtype)
    ids = tokenizer.encode(" ".join(WORDS * 40)).ids[:PROMPT]
    assert len(ids) == PROMPT
    made = compare(model, lambda: answer(model, ids, NEW, end=None), repeats)
    answers = made["results"]
    record = made["record"]
    record |= {
        "model": "SmolLM2-135M-Instruct", "dtype": str(dtype), "prompt": PROMPT, "new": NEW,
        "tokens_equal": answers["sdpa"].tokens == answers["tilewise"].tokens,
        "tokens_per_second": {name: a.per_second for name, a in answers.items()},
        "prompt_seconds": {name: a.prompt_seconds for name, a in answers.items()},
    }  # fmt: skip
    show(f"SmolLM2 {dtype}", record)
    print(f"    tokens equal: {record['tokens_equal']}, tokens/s {record['tokens_per_second']}", flush=True)
    return record


def minilm_record(repeats: int) -> dict[str, Any]:
    model, tokenizer = minilm()
    lengths = [4 + (7 * i * i) % 53 for i in range(SENTENCES)]
    inputs = batch(tokenizer, [" ".join((WORDS * 2)[i : i + n]) for i, n in enumerate(lengths)])
    made = compare(model, lambda: embed(model, inputs), repeats)
    cosine = (made["results"]["sdpa"] * made["results"]["tilewise"]).sum(-1).min().item()
    record = made["record"]
    mask = inputs["attention_mask"]
    record |= {
        "model": "all-MiniLM-L6-v2", "dtype": "torch.float32", "shape": list(mask.shape), "tokens": int(mask.sum()),
        "least_cosine": cosine,
    }  # fmt: skip
    show(f"MiniLM {tuple(mask.shape)}, {int(mask.sum())}", record)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=("smollm2", "minilm"))
    parser.add_argument("--dtypes", default="float32", help="of SmolLM2, with commas")
    options = parser.parse_args()
    results = []
    if options.only != "smollm2":
        results.append(minilm_record(8 * options.repeats))
    if options.only != "minilm":
        results += [smollm2_record(getattr(torch, name), options.repeats) for name in options.dtypes.split(",")]
    if options.json:
        write_json(options.json, describe("python benchmarks/cpu/models.py") | {"results": results})


if __name__ == "__main__":
    main()
