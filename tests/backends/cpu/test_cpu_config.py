"""Tile shapes and splits of the CPU backend: plain functions of sizes."""

from dataclasses import replace

import pytest
import torch

from tilewise import Quantised
from tilewise.backends.cpu import config
from tilewise.backends.cpu.config import even_rows, head_batch, prefetch_distance, split_size, tile_rows
from tilewise.core.options import Options
from tilewise.validation import calls

MIB = 2**20


@pytest.mark.parametrize(
    ("group", "head_dim", "cache", "rows"),
    [(1, 64, 2 * MIB, 384), (1, 512, 2 * MIB, 256), (8, 128, 2 * MIB, 48), (1, 128, MIB // 2, 256), (64, 576, MIB, 1)],
)
def test_tile_rows_fit_half_of_the_cache(group, head_dim, cache, rows):
    assert tile_rows(group, head_dim, head_dim, cache) == rows


@pytest.mark.parametrize(
    ("q_len", "tasks", "threads", "rows"),
    [
        (512, 8, 2, 256),  # not 384 and 128
        (384, 8, 2, 384),
        (385, 8, 2, 256),  # whole panels
        (2048, 8, 2, 384),  # 6 tiles, as 5 would be too large
        (512, 1, 4, 64),  # two tiles for each thread
        (100, 1, 8, 128),  # none of fewer than 64 rows: one tile
        (0, 1, 8, 1),
    ],
)
def test_rows_are_cut_evenly(q_len, tasks, threads, rows):
    assert even_rows(384, q_len, tasks, threads, 64) == rows


@pytest.mark.parametrize(
    ("tasks", "keys", "threads", "size"),
    [
        (8, 100_000, 1, 0),
        (8, 100_000, 2, 0),
        (1, 1000, 2, 0),
        (1, 8192, 2, 1056),
        (2, 100_000, 4, 12_576),
        (3, 2048, 2, 768),
    ],
)
def test_splits_give_each_thread_four_pieces(tasks, keys, threads, size):
    assert split_size(tasks, keys, threads, 96) == size
    assert size == 0 or split_size(tasks, keys, threads, 256) % 256 == 0
    assert split_size(1, 100_000, 2, 96, each=16) == 3168  # 32 pieces
    assert split_size(32, 100_000, 2, 96, each=16) == 0


@pytest.mark.parametrize(
    ("kv_heads", "row_bytes", "splits", "threads", "heads"),
    [
        (8, 4096, 16, 2, 8),
        (1, 4096, 16, 2, 1),
        (128, 4096, 16, 2, 64),  # 256 KiB of queries and sums
        (6, 60 * 1024, 16, 2, 3),  # a divisor
        (7, 60 * 1024, 16, 2, 1),
        (4, MIB, 16, 2, 1),
        (8, 4096, 16, 64, 1),  # two pieces for each thread
        (8, 4096, 16, 16, 4),
        (8, 4096, 1, 1, 4),
    ],
)
def test_a_head_batch_stays_in_the_cache(kv_heads, row_bytes, splits, threads, heads):
    assert head_batch(kv_heads, row_bytes, splits, threads) == heads


@pytest.mark.parametrize(("kind", "keys"), [("float16", 16), ("fp8_e4m3", 16), ("int8", 48), ("int4", 48)])
def test_short_rows_are_prefetched_further_ahead(kind, keys, monkeypatch):
    k = torch.randn(1, 1, 512, 64, dtype=torch.float16)
    stored = k if kind == "float16" else Quantised.from_float(k, kind)
    problem = calls.dense(k[:, :, :1], stored, stored, Options()).problem
    monkeypatch.setattr(config, "second_level_cache", lambda: 1)
    assert prefetch_distance(problem) == keys
    assert prefetch_distance(replace(problem, page_size=16)) == keys
    monkeypatch.setattr(config, "second_level_cache", lambda: MIB)
    assert prefetch_distance(problem) == 0
