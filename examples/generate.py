"""Many prompts at once over one `PagedKVCache`: continuous batching with shared prefixes, in plain PyTorch.

    python examples/generate.py

A step takes whatever there is to do: whole prompts of requests that have just come in and one token of each that is
under way, packed into one batch without padding. Prompts that begin alike share pages. When pages run out, the
request that came last waits and starts again later, from what is left of its pages.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from tilewise import CacheFull, PagedKVCache


class Model:
    """A decoder as many are: RMS norm, rotary positions, grouped queries, gated MLP. Its weights are random."""

    def __init__(self, vocabulary=512, width=256, layers=4, heads=8, kv_heads=2, seed=0):
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        g = torch.Generator().manual_seed(seed)

        def matrix(rows, columns):
            return torch.randn(rows, columns, generator=g) / columns**0.5

        self.embedding = torch.randn(vocabulary, width, generator=g)
        qkv, hidden = (heads + 2 * kv_heads) * self.head_dim, 2 * width
        shapes = {"qkv": (qkv, width), "o": (width, width), "in": (2 * hidden, width), "out": (width, hidden)}
        self.layers = [{name: matrix(*shape) for name, shape in shapes.items()} for _ in range(layers)]
        self.head = matrix(vocabulary, width)

    def __call__(self, tokens, positions, attend):
        """Logits [T, vocabulary] of packed tokens [T]; `attend(layer, q, k, v)` of [T, heads, D] sees to the rest."""
        x = self.embedding[tokens]
        for number, w in enumerate(self.layers):
            qkv = (norm(x) @ w["qkv"].T).unflatten(1, (-1, self.head_dim))
            q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
            x = x + attend(number, rotary(q, positions), rotary(k, positions), v).flatten(1) @ w["o"].T
            gate, up = (norm(x) @ w["in"].T).chunk(2, 1)
            x = x + (functional.silu(gate) * up) @ w["out"].T
        return norm(x) @ self.head.T


def norm(x):
    return x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()


def rotary(x, positions):
    """x [T, heads, D]."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 10000.0 ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


@dataclass
class Request:
    prompt: list[int]
    new: int  # tokens to generate
    tokens: list[int] = field(default_factory=list)  # prompt and what was generated
    sequence: int = -1


class Engine:
    """Requests in, tokens out."""

    def __init__(self, model, pages=256, page_size=16, dtype="f32", most=64):
        self.model, self.most = model, most
        self.cache = PagedKVCache(
            pages, page_size, model.kv_heads, model.head_dim, dtype, layers=len(model.layers)
        )  # fmt: skip
        self.waiting, self.running = deque(), []
        self.computed = self.found = self.put_off = 0  # tokens computed, tokens found in the cache, requests put off

    def add(self, prompt, new):
        if not prompt or new < 1:
            raise ValueError(f"a prompt of {len(prompt)} tokens and {new} new ones: both must be 1 or more")
        need = -(-(len(prompt) + new - 1) // self.cache.page_size)  # the last token is not written
        if need > self.cache.num_pages:
            raise ValueError(
                f"{len(prompt)} tokens and {new} new ones need {need} pages of {self.cache.page_size}, of "
                f"{self.cache.num_pages} in all: give more pages, or ask for less"
            )
        request = Request(list(prompt), new, list(prompt))
        self.waiting.append(request)
        return request

    def step(self):
        """One token more for every running request."""
        while self.waiting and len(self.running) < self.most:
            request = self.waiting.popleft()
            request.sequence, held = self.cache.prefix_match(request.tokens[:-1])
            self.found += held
            self.running.append(request)
        while True:
            # Tokens that the cache does not hold yet: a whole prompt, or the one that was generated last
            new = [request.tokens[self.cache.length(request.sequence) :] for request in self.running]
            tokens = [token for row in new for token in row]
            try:
                batch = self.cache.extend([r.sequence for r in self.running], [len(row) for row in new], tokens)
                break
            except CacheFull:
                if len(self.running) == 1:
                    raise
                last = self.running.pop()
                self.cache.free(last.sequence)
                self.waiting.appendleft(last)
                self.put_off += 1
        self.computed += len(tokens)
        positions = torch.cat([torch.arange(s, s + len(row)) for s, row in zip(batch.starts, new, strict=True)])

        def attend(layer, q, k, v):
            batch.write(k, v, layer)
            return batch.attend(q, layer)

        logits = self.model(torch.tensor(tokens), positions, attend)
        chosen = logits[batch.cu_seqlens[1:].long() - 1].argmax(-1).tolist()
        for request, token in zip(self.running, chosen, strict=True):
            request.tokens.append(token)
        done = [r for r in self.running if len(r.tokens) == len(r.prompt) + r.new]
        if done:
            self.cache.free([r.sequence for r in done])
            self.running = [r for r in self.running if r not in done]
        return done

    def run(self):
        while self.waiting or self.running:
            self.step()


def one_by_one(model, prompt, new):
    """The same tokens the plain way: no cache, torch's own attention, everything computed anew for each token."""
    tokens = list(prompt)
    for _ in range(new):

        def attend(layer, q, k, v):
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

        logits = model(torch.tensor(tokens), torch.arange(len(tokens)), attend)
        tokens.append(int(logits[-1].argmax()))
    return tokens


def prompts_of(count, shared=100, vocabulary=512, seed=1):
    """Prompts that begin with the same tokens, and go on for a while each in its own way."""
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(vocabulary, (shared,), generator=g).tolist()
    lengths = torch.randint(1, 40, (count,), generator=g).tolist()
    return [start + torch.randint(vocabulary, (n,), generator=g).tolist() for n in lengths]


def positive(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of 1 or more")
    return int(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=positive, default=24)
    parser.add_argument("--new", type=positive, default=32, help="tokens to generate for each")
    parser.add_argument("--pages", type=positive, default=160, help="pages of 16 tokens")
    parser.add_argument("--check", action="store_true", help="compare with one-by-one generation, which is slow")
    options = parser.parse_args()
    model = Model()
    engine = Engine(model, pages=options.pages)
    prompts = prompts_of(options.prompts)
    try:  # all of them, so that what cannot fit is told before anything is computed
        requests = [engine.add(prompt, options.new) for prompt in prompts]
    except ValueError as error:
        parser.error(f"--pages {options.pages}: {error}")
    engine.waiting = deque(requests[:1])
    start = time.perf_counter()
    engine.step()  # the others find the beginning that they share with the first
    engine.waiting += requests[1:]
    engine.run()
    seconds = time.perf_counter() - start
    made = options.prompts * options.new
    print(f"{options.prompts} prompts, {made} new tokens in {seconds:.2f} s: {made / seconds:.0f} tokens/s")
    print(f"{engine.computed} tokens computed, {engine.found} found in the cache, {engine.put_off} requests put off")
    if options.check:
        same = sum(r.tokens == one_by_one(model, r.prompt, r.new) for r in requests)
        print(f"{same} of {options.prompts} equal to one-by-one generation")


if __name__ == "__main__":
    main()
