"""Two real models, their attention by tilewise and by torch's SDPA, interleaved: all of it, and the attention alone.

    make chat embed  # once, for the weights
    python benchmarks/cpu/models.py --json benchmarks/records/cpu/models.json

SmolLM2-135M-Instruct reads a prompt of 1,500 tokens and makes 64 more; all-MiniLM-L6-v2 embeds 32 sentences in one
batch, padded to the longest. Whole runs are timed as they are; in runs of their own the attention function of all
layers is timed, by a clock around it and by torch's profiler. That function is transformers' own for SDPA, with what it
does around it, and tilewise's likewise.
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

from tilewise.compat.mask_patterns import make_mask
from tilewise.compat.transformers import attention_forward
from tilewise.tools.bench.machine import describe
from tilewise.tools.bench.report import write_json
from tilewise.tools.chat import Answer, Talk
from tilewise.tools.embed import batch, embed
from tilewise.tools.pretrained import minilm, smollm2

PROMPT, NEW = 1500, 64
PROFILED = 4  # new tokens while the profiler looks on
SENTENCES = 32
WORDS = (
    "the quick survey of the northern coast took most of a summer because the old charts had been drawn by hand and "
    "were wrong in many places so that every bay had to be sounded again and each rock given its true position before "
    "a new map could be printed and sold to the captains who had waited for it since the spring of that year"
).split()
FUNCTIONS = {"tilewise": (attention_forward, make_mask), "sdpa": (sdpa_attention_forward, sdpa_mask)}


def timed(name: str, spent: list[float]) -> str:
    """An implementation of that name that adds the seconds of its calls to `spent`, and that a profiler can see."""
    function, mask = FUNCTIONS[name]

    def attention(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        with record_function("attention"):
            out = function(*arguments, **options)
        spent[0] += time.perf_counter() - start
        return out

    AttentionInterface.register(f"{name}_timed", attention)
    AttentionMaskInterface.register(f"{name}_timed", mask)
    return f"{name}_timed"


def compare(model: Any, run: Callable[[], Any], part: Callable[[], Any], repeats: int, turns: int) -> dict[str, Any]:
    """Medians of whole runs and of the attention in them, peers interleaved.

    `part` is what the profiler sees: it keeps every operator, and takes minutes to count those of a long text.
    """
    names = list(FUNCTIONS)
    spent = {name: [0.0] for name in names}
    timers = {name: timed(name, spent[name]) for name in names}
    whole, inside, profiled = ({name: [] for name in names} for _ in range(3))
    results = {}
    for turn in range(repeats + 1):
        for name in names[:: 1 if turn % 2 else -1]:
            model.set_attn_implementation(name)
            start = time.perf_counter()
            results[name] = run()
            seconds = time.perf_counter() - start
            model.set_attn_implementation(timers[name])
            spent[name][0] = 0.0
            run()
            if turn:  # the first of each only warms up
                whole[name].append(seconds)
                inside[name].append(spent[name][0])
    for turn in range(turns):
        for name in names[:: 1 if turn % 2 else -1]:
            model.set_attn_implementation(timers[name])
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                part()
            found = next(row for row in profiler.key_averages() if row.key == "attention")
            profiled[name].append(found.cpu_time_total / 1e6)
    record = {"seconds": whole, "attention_seconds": inside, "profiled_attention_seconds": profiled}
    for what, taken in list(record.items()):
        record[f"median_{what}"] = {name: statistics.median(taken[name]) for name in names}
        record[f"ratio_of_{what}"] = statistics.median(taken["sdpa"]) / statistics.median(taken["tilewise"])
    return {"results": results, "record": record}


def show(what: str, record: dict[str, Any]) -> None:
    rows = {"whole": "seconds", "attention": "attention_seconds", "by the profiler": "profiled_attention_seconds"}
    for row, key in rows.items():
        ours, sdpa = (record[f"median_{key}"][name] for name in ("tilewise", "sdpa"))
        print(f"{what:28} {row:16} tilewise {ours:8.4f} s  SDPA {sdpa:8.4f} s  {record[f'ratio_of_{key}']:5.2f}x")


def answer(model: Any, prompt: list[int], most: int) -> Answer:
    """The next tokens, by the implementation that the model has now."""
    return Talk(model, model.config._attn_implementation).answer(prompt, most)


def smollm2_record(dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    model, tokenizer = smollm2(dtype)
    ids = tokenizer.encode(" ".join(WORDS * 40))[:PROMPT]
    assert len(ids) == PROMPT
    made = compare(model, lambda: answer(model, ids, NEW), lambda: answer(model, ids, PROFILED), repeats, 1)
    answers = made["results"]
    record = made["record"]
    record |= {
        "model": "SmolLM2-135M-Instruct", "dtype": str(dtype), "prompt": PROMPT, "new": NEW, "profiled_new": PROFILED,
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
    run = lambda: embed(model, inputs)  # noqa: E731
    made = compare(model, run, run, 10 * repeats, 2 * repeats)
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
        results.append(minilm_record(options.repeats))
    if options.only != "minilm":
        results += [smollm2_record(getattr(torch, name), options.repeats) for name in options.dtypes.split(",")]
    if options.json:
        only = f" --only {options.only}" if options.only else ""
        command = f"python benchmarks/cpu/models.py{only} --repeats {options.repeats} --dtypes {options.dtypes}"
        write_json(options.json, describe(command) | {"results": results})


if __name__ == "__main__":
    main()
