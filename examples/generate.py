"""Generates for many prompts at once over one `PagedKVCache`, with the engine in `engine.py`.

python examples/generate.py                 # 24 prompts with a common prefix
python examples/generate.py --stream        # one answer, token by token
python examples/generate.py --load 300      # requests of mixed lengths that arrive over time
python examples/generate.py --soak 10000    # many such requests, some cancelled; checks all texts and pages
"""

from __future__ import annotations

import argparse
import random
import threading
import time

import torch
from engine import Engine, Model, Sampling, logits_of, one_by_one

TIE = 1e-3  # logits closer than this may swap their order when a larger batch rounds differently


def prompts_of(count, shared=100, vocabulary=512, seed=1):
    """Prompts with the same `shared` first tokens and random tokens after them."""
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(vocabulary, (shared,), generator=g).tolist()
    lengths = torch.randint(1, 40, (count,), generator=g).tolist()
    return [start + torch.randint(vocabulary, (n,), generator=g).tolist() for n in lengths]


def load(engine, count, new, sampling, draw, more=0.5, cancel=0.0):
    """Runs `count` requests of mixed lengths and returns them.

    Before each step requests arrive as long as a random draw is below `more`: with 0.5, one on average. Half of them
    begin with one of four prefixes. After each step a request is cancelled with probability `cancel`.
    """
    starts = [[draw.randrange(engine.model.vocabulary) for _ in range(40)] for _ in range(4)]
    requests = []
    while len(requests) < count or engine.waiting or engine.running:
        while len(requests) < count and draw.random() < more:
            prompt = list(draw.choice(starts)) if draw.random() < 0.5 else []
            prompt += [draw.randrange(engine.model.vocabulary) for _ in range(draw.randint(1, 60))]
            requests.append(engine.add(prompt, draw.randint(1, new), sampling))
        engine.step()
        for request in [*engine.running, *engine.waiting]:
            if draw.random() < cancel:
                engine.cancel(request)
    return requests


def differences(model, texts):
    """How many of the `(prompt, tokens)` differ from one-by-one generation, and how many more differ after a tie."""
    wrong = ties = 0
    for prompt, tokens in texts:
        prompt, tokens = list(prompt), list(tokens)
        want = one_by_one(model, prompt, len(tokens) - len(prompt))
        if tokens == want:
            continue
        at = next(i for i, (a, b) in enumerate(zip(tokens, want, strict=True)) if a != b)
        logits = logits_of(model, want[:at])
        tie = bool((logits[want[at]] - logits[tokens[at]]).abs() < TIE)
        ties += tie
        wrong += not tie
    return wrong, ties


def memory():
    """Resident bytes of this process on Linux, else 0."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:
        return 0


def soak(count, seed=0, rounds=10):
    """Runs requests of mixed lengths with few pages and some cancels; returns a list of problems."""
    model = Model(vocabulary=256, width=64, layers=2, heads=4, kv_heads=2)
    engine, draw = Engine(model, pages=100, page_size=8, most=24, budget=128), random.Random(seed)
    texts, sizes, cancelled, threads = [], [], 0, 0
    start = time.perf_counter()
    for number in range(rounds):
        requests = load(engine, (count + rounds - 1 - number) // rounds, 24, Sampling(), draw, cancel=0.004)
        texts += [(bytes(request.prompt), bytes(request.tokens)) for request in requests]  # bytes take the least memory
        cancelled += sum(request.state == "cancelled" for request in requests)
        sizes.append(memory())
        threads = threads or threading.active_count()
    print("\n".join(engine.statistics.lines(time.perf_counter() - start)))
    grown = sizes[-1] - sizes[rounds // 2]
    print(f"{count} requests, {cancelled} cancelled; {grown / 1e6:+.1f} MB in the second half; checking their texts")
    wrong, ties = differences(model, texts)
    stats, problems = engine.cache.stats(), []
    if wrong:
        problems.append(f"{wrong} texts differ from one-by-one generation")
    if stats.used or stats.free + stats.kept != engine.cache.num_pages:
        problems.append(f"pages are lost: {stats}")
    if threading.active_count() > threads:
        problems.append(f"{threading.active_count()} threads, {threads} after the first round")
    if grown > 16e6:
        problems.append(f"memory grew by {grown / 1e6:.0f} MB")
    if engine.generators or engine.running or engine.waiting:
        problems.append("the engine still holds requests")
    print(f"{count - wrong - ties} texts equal to one-by-one generation, {ties} more up to a tie")
    return problems


def positive(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of 1 or more")
    return int(text)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=positive, default=24)
    parser.add_argument("--new", type=positive, default=32, help="tokens to generate for each")
    parser.add_argument("--pages", type=positive, default=160, help="pages of 16 tokens")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the most likely token")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--stream", action="store_true", help="one prompt, tokens printed as they come")
    what.add_argument("--load", type=positive, metavar="N", help="N requests that arrive over time")
    what.add_argument(
        "--soak", type=positive, metavar="N", help="N requests to a smaller model, some cancelled, all checked"
    )
    parser.add_argument("--check", action="store_true", help="compare with one-by-one generation (slow)")
    options = parser.parse_args()
    if options.check and options.temperature:
        parser.error(f"--check: texts of --temperature {options.temperature:g} are random and cannot be compared")
    if options.soak:
        problems = soak(options.soak)
        print("\n".join(problems) or "nothing was lost")
        return 1 if problems else 0
    try:
        sampling = Sampling(options.temperature, options.top_k, options.top_p)
    except ValueError as error:
        parser.error(str(error))
    model = Model()
    engine = Engine(model, pages=options.pages)
    start = time.perf_counter()
    if options.load:
        try:
            requests = load(engine, options.load, options.new, sampling, random.Random(0))
        except ValueError as error:
            parser.error(f"--pages {options.pages}: {error}")
    else:
        show = (lambda request, token: print(token, end=" ", flush=True)) if options.stream else None
        prompts = prompts_of(1 if options.stream else options.prompts)
        try:  # all at once: a prompt that cannot fit is an error before anything is computed
            requests = [engine.add(prompt, options.new, sampling, show) for prompt in prompts]
        except ValueError as error:
            parser.error(f"--pages {options.pages}: {error}")
        while len(engine.waiting) > 1:
            engine.waiting.pop()
        engine.step()  # the others find their common prefix in the cache
        engine.waiting += requests[1:]
        engine.run()
        print(end="\n" * options.stream)
    print(f"{len(requests)} prompt{'s' * (len(requests) > 1)}")
    print("\n".join(engine.statistics.lines(time.perf_counter() - start)))
    if options.check:
        wrong, ties = differences(model, [(request.prompt, request.tokens) for request in requests])
        print(f"{len(requests) - wrong - ties} of {len(requests)} equal to one-by-one generation, {ties} up to a tie")
        return 1 if wrong else 0
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
