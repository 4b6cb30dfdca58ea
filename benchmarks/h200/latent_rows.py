"""Rows of latent decode as they are timed: `paged_attention` and FlashMLA, each checked before it is timed."""

from __future__ import annotations

import sys
from typing import Any

import torch
from latent_cases import BF16, SCALE, Result, judge, oracle_of, stage
from timing import Way, graphed, seconds

from tilewise import paged_attention

INTERLEAVED = "all interleaved"
OWN, PEER = "tilewise", "FlashMLA"
# name: batch, keys, heads, queries
ROWS = {
    "128 x 4k, 128 heads": (128, 4096, 128, 1),
    "64 x 8k, 128 heads": (64, 8192, 128, 1),
    "32 x 4k, 128 heads, 2 queries": (32, 4096, 128, 2),
    "1 x 64k, 128 heads": (1, 65536, 128, 1),
    "128 x 4k, 16 heads": (128, 4096, 16, 1),
    "16 x 32k, 16 heads": (16, 32768, 16, 1),
}


class Row:
    """Inputs of a row, in copies that do not fit into L2 together, and the result for the last copy."""

    def __init__(self, name: str, peers: str) -> None:
        self.batch, self.keys, self.heads, self.q_len = ROWS[name]
        self.name, self.peers = name, peers
        torch.manual_seed(1)
        pages = self.batch * self.keys // 64
        self.copies = max(1, -(-300_000_000 // (pages * 64 * 1152)))
        self.caches = [torch.randn(pages, 64, 576, device="cuda", dtype=BF16) for _ in range(self.copies)]
        self.table = torch.randperm(pages, device="cuda", dtype=torch.int32).view(self.batch, -1)
        self.lengths = torch.full((self.batch,), self.keys, dtype=torch.int32, device="cuda")
        self.q = torch.randn(self.batch, self.q_len, self.heads, 576, device="cuda", dtype=BF16)
        self.want = self.oracle()

    def oracle(self) -> Result:
        found = [
            oracle_of(self.q[b].transpose(0, 1), self.caches[-1][self.table[b].long()].flatten(0, 1))
            for b in range(self.batch)
        ]
        return torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found])

    def own(self) -> list[Way]:
        """Calls that return their output and lse."""
        q = self.q.transpose(1, 2)

        def call(cache: torch.Tensor) -> Result:
            pages = cache[:, :, None]
            tables = self.table, self.lengths
            state = paged_attention(q, pages, pages[..., :512], *tables, scale=SCALE, causal=True, return_lse=True)
            return state.out, state.lse

        return [lambda cache=cache: call(cache) for cache in self.caches]

    def peer(self) -> list[Way]:
        sys.path.insert(0, self.peers)
        import peers_load

        M = peers_load.flashmla()
        views = [cache.view(-1, 64, 1, 576) for cache in self.caches]
        *_, plan = M.dense_decode(self.q, views[0], self.table, self.lengths)

        def call(view: torch.Tensor) -> Result:
            out = M.dense_decode(self.q, view, self.table, self.lengths, plan=plan)[0]
            return out.transpose(1, 2), self.want[1]

        return [lambda view=view: call(view) for view in views]

    def run_of(self, way: str, eager: bool) -> tuple[Way, str]:
        """What is timed, run a few times already, and what is wrong with its results."""
        calls = self.peer() if way == PEER else self.own()
        for call in calls:
            got = call()
        torch.cuda.synchronize()
        text = judge(f"{way}, eager", got, self.want)
        if eager:
            return lambda: [call() for call in calls], text
        captured: list[Result] = []
        replay = graphed([*calls[:-1], lambda: captured.append(calls[-1]())])
        for _ in range(3):
            replay()
        torch.cuda.synchronize()
        return replay, text or judge(f"{way}, in a graph", captured[-1], self.want)


def time_row(name: str, ways: list[str], peers: str, budget: float, eager: bool) -> dict[str, Any]:
    """Times of the ways of a row, interleaved. Says which way is next, so that one that faults is known."""
    stage("inputs")
    row = Row(name, peers)
    torch.cuda.synchronize()
    runs: dict[str, Way] = {}
    wrong: dict[str, str] = {}
    for way in ways:
        stage(way)
        runs[way], text = row.run_of(way, eager)
        if text:
            wrong[way] = text
    stage(INTERLEAVED)
    times = {way: t / row.copies for way, t in seconds(runs, 40, budget).items()}
    flops = 2 * row.batch * row.keys * row.heads * row.q_len * 1088
    size = row.batch * row.keys * 1152
    return {
        "row": name, "copies": row.copies, "wrong": wrong,
        "us": {way: round(t * 1e6, 1) for way, t in times.items()},
        "TFLOPS": {way: round(flops / t / 1e12, 1) for way, t in times.items()},
        "TB/s": {way: round(size / t / 1e12, 2) for way, t in times.items()},
    }  # fmt: skip
