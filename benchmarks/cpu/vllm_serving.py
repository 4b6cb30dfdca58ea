"""vLLM on a CPU with its own attention and with tilewise's: the same greedy tokens, and tokens a second of both.

    make .venv-vllm/.installed
    .venv-vllm/bin/python benchmarks/cpu/vllm_serving.py --json benchmarks/records/cpu/vllm_serving.json

SmolLM2-135M in float32, prefix caching and chunked prefill on. Each backend runs in a process of its own, one after the
other and again, for each number of requests; half of the prompts begin alike. Attention is timed inside: what a backend
makes of each batch (`build`), new keys and values into the cache (`do_kv_cache_update`), attention itself (`forward`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BACKENDS = ("CPU_ATTN", "TILEWISE")


def prompts_of(count: int, length: int) -> list[list[int]]:
    """Tokens that are words of no text; prompts with an even number share their first half."""
    import random

    draw = random.Random(0)
    shared = [draw.randrange(1000, 40000) for _ in range(length // 2)]
    rows = [[draw.randrange(1000, 40000) for _ in range(length)] for _ in range(count)]
    return [shared + row[len(shared) :] if n % 2 == 0 else row for n, row in enumerate(rows)]


def timed(kind: Any, name: str, seconds: dict[str, float]) -> None:
    """Adds up the time that a method takes."""
    inner = getattr(kind, name)

    def call(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = inner(*args, **options)
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
        return result

    setattr(kind, name, call)


def serve(options: argparse.Namespace) -> None:
    """One backend, in this process; prints JSON."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from tilewise.compat.vllm import TilewiseBackend

    backend = CPUAttentionBackend if options.backend == "CPU_ATTN" else TilewiseBackend
    inside: dict[str, float] = {}
    timed(backend.get_builder_cls(), "build", inside)
    for name in ("do_kv_cache_update", "forward"):
        timed(backend.get_impl_cls(), name, inside)
    llm = LLM(
        options.model, dtype=options.dtype, attention_backend=options.backend, max_model_len=2048, enforce_eager=True,
        enable_prefix_caching=True, enable_chunked_prefill=True, max_num_batched_tokens=1024, block_size=32,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=options.new, ignore_eos=True)
    warm = [TokensPrompt(prompt_token_ids=row) for row in ([5, 6, 7], *prompts_of(3, options.prompt))]
    llm.generate(warm, SamplingParams(max_tokens=4), use_tqdm=False)  # kernels are compiled
    found = {}
    for count in options.requests:
        prompts = [TokensPrompt(prompt_token_ids=row) for row in prompts_of(count, options.prompt)]
        seconds, tokens, attention = [], [], []
        for _ in range(options.repeat):
            llm.reset_prefix_cache()
            inside.clear()
            start = time.perf_counter()
            made = llm.generate(prompts, greedy, use_tqdm=False)
            seconds.append(time.perf_counter() - start)
            tokens = [list(row.outputs[0].token_ids) for row in made]
            attention.append(dict(inside))
        least = min(attention, key=lambda parts: sum(parts.values()))
        speed = count * options.new / min(seconds)
        found[count] = {"seconds": seconds, "per_second": speed, "attention": least, "tokens": tokens}
    import tilewise

    print(json.dumps({"calls": tilewise.counters(), "runs": found}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--model", help="default: SmolLM2, converted by `tilewise chat`")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of each backend, at most")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model is None:
        from tilewise.tools.pretrained import converted, smollm2_file

        options.model = str(converted(smollm2_file()))
    if options.backend:
        serve(options)
        return 0
    found = {}
    words = ["--prompt", options.prompt, "--new", options.new, "--repeat", options.repeat, "--dtype", options.dtype]
    words += ["--model", options.model, "--requests", *options.requests]
    for name in BACKENDS:
        command = [sys.executable, __file__, "--backend", name, *map(str, words)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=options.limit)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    equal = True
    for count in map(str, options.requests):
        theirs, ours = (found[name]["runs"][count] for name in BACKENDS)
        same = sum(a == b for a, b in zip(theirs["tokens"], ours["tokens"], strict=True))
        equal &= same == len(ours["tokens"])
        speeds = ours["per_second"], theirs["per_second"]
        print(f"{count:>3} requests: tilewise {speeds[0]:.1f}, CPU_ATTN {speeds[1]:.1f} tokens/s, {same} texts equal")
        alone = [sum(run["attention"].values()) for run in (ours, theirs)]
        parts = {name: f"{x:.2f} for {theirs['attention'][name]:.2f}" for name, x in ours["attention"].items()}
        print(f"    attention alone {alone[0]:.2f} s for {alone[1]:.2f}, {alone[1] / alone[0]:.2f}x ({parts})")
    print(f"calls by tilewise: {found['TILEWISE']['calls']}, with CPU_ATTN: {found['CPU_ATTN']['calls']}")
    if options.json:
        from tilewise.tools.bench.machine import describe
        from tilewise.tools.bench.report import write_json

        for result in found.values():
            for run in result["runs"].values():
                run.pop("tokens")
        about = describe("python benchmarks/cpu/vllm_serving.py")
        about |= {"prompt": options.prompt, "new": options.new, "dtype": options.dtype, "equal": equal}
        write_json(options.json, about | {"results": found})
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
