"""transformers' server with tilewise's attention and with torch's SDPA: tokens a second of eight streams at once.

    make .venv-serve/.installed
    .venv-serve/bin/python benchmarks/cpu/serve.py --json benchmarks/records/cpu/serve.json

Two servers of SmolLM2-135M are up at the same time, with continuous batching; rounds of eight clients go to one and to
the other, interleaved. Prompts are new in each round, so that nothing is found in a cache.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import openai

from tilewise.tools.bench.machine import describe
from tilewise.tools.bench.report import write_json
from tilewise.tools.pretrained import converted, smollm2_file

START_LIMIT = 120.0  # seconds
WORDS = "sea old man boat fish sailor summer star teacher morning wind stone river bread door lamp winter road".split()


def start(attention: str, model: str) -> tuple[subprocess.Popen, openai.OpenAI]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["serve", model, "--host", "127.0.0.1", "--port", str(port), "--attention", attention]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tilewise", *words], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    end = time.perf_counter() + START_LIMIT
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        if process.poll() is not None or time.perf_counter() > end:
            process.terminate()
            raise SystemExit(f"the server with {attention} has ended, or is not up after {START_LIMIT:.0f} s")
        time.sleep(0.5)
    return process, openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=120, max_retries=0)


def ask(client: openai.OpenAI, model: str, text: str, new: int) -> int:
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}], stream=True, temperature=0, max_tokens=new
    )
    return [chunk.usage.completion_tokens for chunk in stream if chunk.usage][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--words", type=int, default=300, help="of a prompt")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds; no round begins after them")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model, draw = str(converted(smollm2_file())), random.Random(0)
    servers = {name: start(name, model) for name in ("tilewise", "sdpa")}
    speeds: dict[str, list[float]] = {name: [] for name in servers}
    try:
        end = time.perf_counter() + options.limit
        for number in range(options.rounds + 1):
            if number > 1 and time.perf_counter() > end:
                break
            prompts = [" ".join(draw.choices(WORDS, k=options.words)) for _ in range(options.streams)]
            for name, (_, client) in servers.items():
                before = time.perf_counter()
                with ThreadPoolExecutor(options.streams) as threads:
                    made = sum(threads.map(lambda text, c=client: ask(c, model, text, options.new), prompts))
                if number:  # the first compiles
                    speeds[name].append(made / (time.perf_counter() - before))
    finally:
        for process, _ in servers.values():
            process.terminate()
        for process, _ in servers.values():
            process.wait()
    rates = [a / b for a, b in zip(speeds["tilewise"], speeds["sdpa"], strict=True)]
    for name, found in speeds.items():
        print(f"{name:9} {median(found):6.1f} tokens/s, {options.streams} streams")
    print(f"tilewise / sdpa: {median(rates):.2f} at the median of {len(rates)} rounds")
    if options.json:
        about = describe("python benchmarks/cpu/serve.py")
        sizes = {name: getattr(options, name) for name in ("streams", "words", "new")}
        write_json(options.json, about | sizes | {"tokens_per_second": speeds, "ratio": median(rates)})


if __name__ == "__main__":
    main()
