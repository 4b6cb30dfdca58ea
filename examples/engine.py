"""A small engine with continuous batching over one `PagedKVCache`, in plain PyTorch, made to be copied.

A step processes chunks of prompts and one token of each running request. They are packed into one batch without
padding, up to a budget of tokens. Prompts with a common prefix share pages. When pages run out, the request that came
last is preempted: it gives its pages back and starts again later, from those that are still cached. `generate.py` runs
the engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from tilewise import CacheFull, PagedKVCache


class Model:
    """A typical decoder with random weights: RMS norm, rotary positions, grouped queries, gated MLP."""

    def __init__(self, vocabulary=512, width=256, layers=4, heads=8, kv_heads=2, seed=0):
        self.heads, self.kv_heads, self.head_dim, self.vocabulary = heads, kv_heads, width // heads, vocabulary
        g = torch.Generator().manual_seed(seed)

        def matrix(rows, columns):
            return torch.randn(rows, columns, generator=g) / columns**0.5

        self.embedding = torch.randn(vocabulary, width, generator=g)
        qkv, hidden = (heads + 2 * kv_heads) * self.head_dim, 2 * width
        shapes = {"qkv": (qkv, width), "o": (width, width), "in": (2 * hidden, width), "out": (width, hidden)}
        self.layers = [{name: matrix(*shape) for name, shape in shapes.items()} for _ in range(layers)]
        self.head = matrix(vocabulary, width)

    def __call__(self, tokens, positions, attend, rows=slice(None)):
        """Logits of some rows of packed tokens [T]; `attend(layer, q, k, v)` takes [T, heads, D]."""
        x = self.embedding[tokens]
        for number, w in enumerate(self.layers):
            qkv = (norm(x) @ w["qkv"].T).unflatten(1, (-1, self.head_dim))
            q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
            x = x + attend(number, rotary(q, positions), rotary(k, positions), v).flatten(1) @ w["o"].T
            gate, up = (norm(x) @ w["in"].T).chunk(2, 1)
            x = x + (functional.silu(gate) * up) @ w["out"].T
        return norm(x[rows]) @ self.head.T


def norm(x):
    return x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()


def rotary(x, positions):
    """x [T, heads, D]."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 10000.0 ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen: the most likely one, or a random one of the most likely."""

    temperature: float = 0.0  # 0: the most likely token
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not (self.temperature >= 0 and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise ValueError(f"{self}: temperature and top_k are 0 or more, top_p is above 0 and at most 1")

    def choose(self, logits, generator):
        if self.temperature == 0:
            return int(logits.argmax())
        logits, order = ((logits - logits.max()) / self.temperature).sort(descending=True)
        if self.top_k:
            logits, order = logits[: self.top_k], order[: self.top_k]
        chances = logits.softmax(-1)
        chances[chances.cumsum(-1) - chances > self.top_p] = 0  # the first is always kept
        return int(order[torch.multinomial(chances, 1, generator=generator)])


@dataclass(eq=False)
class Request:
    prompt: list[int]
    new: int  # tokens to generate
    sampling: Sampling
    on_token: Callable | None  # called with the request and each new token
    added: float
    tokens: list[int] = field(default_factory=list)  # prompt and generated tokens
    sequence: int | None = None  # its id in the cache while it runs
    state: str = "waiting"  # running, done or cancelled
    first: float | None = None  # time of the first token, and of the last
    last: float | None = None

    @property
    def generated(self):
        return self.tokens[len(self.prompt) :]


@dataclass
class Statistics:
    computed: int = 0  # tokens that went through the model
    sought: int = 0  # prompt tokens without the last one; `found` of them were in the cache
    found: int = 0
    made: int = 0  # tokens generated
    preempted: int = 0  # requests that gave their pages back and began again
    steps: int = 0
    waits: list[float] = field(default_factory=list)  # seconds from a request to its first token

    def lines(self, seconds):
        waits = sorted(self.waits) or [0.0]
        median, late = (1e3 * waits[int(share * (len(waits) - 1))] for share in (0.5, 0.95))
        return [
            f"{self.made} tokens in {seconds:.2f} s: {self.made / seconds:.0f} tokens/s, {self.steps} steps",
            f"first token after {median:.0f} ms at the median, {late:.0f} ms at 95%",
            f"{self.found} of {self.sought} prompt tokens found in the cache, {self.preempted} requests preempted",
        ]


class Engine:
    """Requests in, tokens out."""

    def __init__(self, model, pages=256, page_size=16, dtype="f32", most=64, budget=512):
        self.model, self.most, self.budget = model, most, budget
        self.cache = PagedKVCache(
            pages, page_size, model.kv_heads, model.head_dim, dtype, layers=len(model.layers)
        )  # fmt: skip
        self.waiting, self.running = deque(), []
        self.generators = {}
        self.statistics = Statistics()

    def add(self, prompt, new, sampling=None, on_token=None):
        """Adds a request. `step` and `run` serve it; `cancel` ends it early."""
        prompt = list(prompt)
        if not prompt or new < 1:
            raise ValueError(f"a prompt of {len(prompt)} tokens and {new} new ones: both must be 1 or more")
        if not all(0 <= token < self.model.vocabulary for token in prompt):
            raise ValueError(f"a token of the prompt is not below {self.model.vocabulary}, the size of the vocabulary")
        need = -(-(len(prompt) + new - 1) // self.cache.page_size)  # the last token is not written
        if need > self.cache.num_pages:
            raise ValueError(
                f"{len(prompt)} tokens and {new} new ones need {need} pages of {self.cache.page_size}, of "
                f"{self.cache.num_pages} in all: give more pages, or ask for less"
            )
        request = Request(prompt, new, sampling or Sampling(), on_token, time.perf_counter(), list(prompt))
        self.waiting.append(request)
        return request

    def cancel(self, request):
        """Ends a request and keeps the tokens that it has generated."""
        if request.state == "waiting":
            self.waiting.remove(request)
        elif request.state == "running":
            self.running.remove(request)
        else:
            return
        self._end(request, "cancelled")

    def step(self):
        """Adds a token to every running request whose prompt is processed; returns the requests that are done."""
        while self.waiting and len(self.running) < self.most and self._has_room(self.waiting[0]):
            request = self.waiting.popleft()
            request.sequence, held = self.cache.prefix_match(request.tokens[:-1])
            request.state = "running"
            self.statistics.sought += len(request.tokens) - 1
            self.statistics.found += held
            self.running.append(request)
        taken, new, batch = self._batch()
        if batch is None:
            return []
        tokens = [token for row in new for token in row]
        positions = torch.cat([torch.arange(s, s + len(row)) for s, row in zip(batch.starts, new, strict=True)])

        def attend(layer, q, k, v):
            batch.write(k, v, layer)
            return batch.attend(q, layer)

        # Requests whose tokens are all in the cache now, and the rows of their last tokens
        whole = [n for n, r in enumerate(taken) if self.cache.length(r.sequence) == len(r.tokens)]
        rows = batch.cu_seqlens[1:].long()[whole] - 1
        logits = self.model(torch.tensor(tokens), positions, attend, rows)
        self.statistics.computed += len(tokens)
        self.statistics.steps += 1
        now = time.perf_counter()
        for row, n in zip(logits, whole, strict=True):
            self._give(taken[n], row, now)
        done = [r for r in taken if r.state == "running" and len(r.generated) == r.new]
        for request in done:
            self.running.remove(request)
            self._end(request, "done")
        return done

    def run(self):
        while self.waiting or self.running:
            self.step()

    def _has_room(self, request):
        """Whether there are enough pages for a request and for the next tokens of all running ones."""

        def pages(tokens):
            return -(-tokens // self.cache.page_size)

        stats = self.cache.stats()
        promised = sum(pages(len(r.tokens) + 1) - pages(self.cache.length(r.sequence)) for r in self.running)
        return not self.running or pages(len(request.tokens) + 1) + promised <= stats.free + stats.kept

    def _batch(self):
        """The requests of a step, the new tokens of each, and the cache's batch with room for them."""
        while self.running:
            left, taken, new = self.budget, [], []
            for request in self.running:  # in order of arrival
                start = self.cache.length(request.sequence)
                row = request.tokens[start : start + left]
                if row:
                    taken.append(request)
                    new.append(row)
                    left -= len(row)
            try:
                tokens = [token for row in new for token in row]
                return taken, new, self.cache.extend([r.sequence for r in taken], [len(row) for row in new], tokens)
            except CacheFull:
                last = self.running.pop()  # `add` has checked that a single request always fits
                self.cache.free(last.sequence)
                last.sequence, last.state = None, "waiting"
                self.waiting.appendleft(last)
                self.statistics.preempted += 1
        return [], [], None

    def _give(self, request, logits, now):
        if request.state != "running":  # cancelled by another's `on_token`
            return
        generator = self.generators.get(request)
        if generator is None and request.sampling.temperature:
            generator = self.generators[request] = torch.Generator().manual_seed(request.sampling.seed)
        token = request.sampling.choose(logits, generator)
        request.tokens.append(token)
        self.statistics.made += 1
        if request.first is None:
            request.first = now
            self.statistics.waits.append(now - request.added)
        request.last = now
        if request.on_token is not None:
            request.on_token(request, token)

    def _end(self, request, state):
        if request.sequence is not None:
            self.cache.free(request.sequence)
        request.sequence, request.state = None, state
        self.generators.pop(request, None)


def one_by_one(model, prompt, new):
    """Greedy generation without a cache: torch's own attention over the whole text for each token."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(int(logits_of(model, tokens).argmax()))
    return tokens


def logits_of(model, tokens):
    def attend(layer, q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    return model(torch.tensor(tokens), torch.arange(len(tokens)), attend, slice(-1, None))[0]
