"""Tile shapes and splits of the CPU backend: plain functions of sizes, by what must hold of them."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from tilewise import Quantised
from tilewise.backends.cpu import config
from tilewise.backends.cpu.config import even_rows, head_batch, prefetch_distance, split_size, tile_rows
from tilewise.core.options import Options
from tilewise.validation import calls

MIB = 2**20


@pytest.mark.parametrize("cache", [MIB // 4, MIB // 2, MIB, 2 * MIB])
def test_tile_rows_fit_half_of_the_cache(cache):
    for group, width, most in product((1, 2, 8, 48, 64), (8, 64, 128, 576), (384, 768)):
        rows, size = tile_rows(group, width, width, cache, most), 4 * 2 * width
        assert 1 <= rows <= most
        assert rows == 1 or group * rows <= 64 or group * rows * size <= cache // 2
        wider = tile_rows(group, 2 * width, width, cache, most)
        assert wider <= rows <= tile_rows(group, width, width, 2 * cache, most)


def test_rows_are_cut_evenly():
    for q_len, tasks, threads, step in product((0, 1, 100, 384, 385, 512, 2048), (1, 8, 50), (1, 2, 8), (16, 64)):
        rows = even_rows(384, q_len, tasks, threads, step)
        assert 1 <= rows <= 384
        assert rows == 1 or rows % step == 0
        tiles = -(-q_len // rows)
        assert q_len <= 384 * tiles
        assert rows - (q_len - (tiles - 1) * rows) < max(
            2, step * tiles
        )  # the last tile lacks less than a step of each
    assert 2 * even_rows(384, 512, 1, 4, 64) <= even_rows(384, 512, 8, 4, 64)  # few tasks: smaller tiles


def test_splits_cover_the_keys_with_work_for_each_thread():
    for tasks, keys, threads, tile, each in product(
        (1, 2, 3, 8, 32), (1, 1000, 2048, 8192, 100_000), (2, 4, 16), (96, 256), (4, 16)
    ):
        size = split_size(tasks, keys, threads, tile, each)
        if size == 0:
            assert tasks >= each * threads or keys < 1024
            continue
        assert size % tile == 0
        assert size > 512 - tile
        pieces = tasks * -(-keys // size)
        assert pieces <= each * threads + tasks
        assert size <= 512 or 2 * pieces > each * threads


@pytest.mark.parametrize("keys", [1, 1000, 100_000])
def test_one_thread_and_many_tasks_need_no_splits(keys):
    assert split_size(8, keys, 1, 96) == 0
    assert split_size(1000, keys, 16, 96) == 0


def test_a_head_batch_stays_in_the_cache():
    for kv_heads, row_bytes, splits, threads in product(
        (1, 6, 7, 8, 128), (4096, 60 * 1024, MIB), (1, 16), (1, 2, 16, 64)
    ):
        heads = head_batch(kv_heads, row_bytes, splits, threads)
        assert kv_heads % heads == 0
        assert heads == 1 or heads * row_bytes <= config.HEAD_BATCH_BYTES
        assert heads == 1 or kv_heads // heads * splits >= 2 * threads  # two pieces for each thread
    assert head_batch(8, 4096, 16, 2) > 1


def test_short_rows_are_prefetched_further_ahead(monkeypatch):
    k = torch.randn(1, 1, 512, 64, dtype=torch.float16)
    distances = []
    for kind in ("float16", "int8", "int4"):
        stored = k if kind == "float16" else Quantised.from_float(k, kind)
        problem = calls.dense(k[:, :, :1], stored, stored, Options()).problem
        monkeypatch.setattr(config, "second_level_cache", lambda: 1)
        distances.append(prefetch_distance(problem))
        assert prefetch_distance(replace(problem, page_size=16)) == distances[-1]
        monkeypatch.setattr(config, "second_level_cache", lambda: MIB)
        assert prefetch_distance(problem) == 0  # all of it stays in the cache
    assert 0 < distances[0] < distances[1] <= distances[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 16, 64, 128])
def test_latent_decode_of_one_sequence_has_work_for_each_thread(heads, dtype):
    """One KV head and no batch: only its keys can be cut."""
    k = torch.empty(1, 1, 8192, 576, dtype=dtype)
    q = torch.empty(1, heads, 1, 576, dtype=dtype)
    problem = calls.dense(q, k, k[..., :512], Options()).problem
    for threads in (2, 4, 8):
        found = config.configure(problem, threads, 0)
        assert found.threads == threads
        assert 0 < found.split_size <= 8192 // threads
