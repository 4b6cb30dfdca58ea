"""Decode on the CPU: rows that are asked for ahead, scales, pages."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tilewise import Quantised, attention, bound, paged_attention, planner
from tilewise.backends.cpu import amx, compiled, heuristics
from tilewise.conformance.case import Case, Inputs
from tilewise.conformance.check import check_call, check_case


@pytest.fixture
def cache_of(monkeypatch):
    """Sets the size of the second-level cache, past which rows are asked for ahead."""

    def set_size(size):
        monkeypatch.setattr(heuristics, "second_level_cache", lambda: size)
        bound.forget()
        planner.choose.cache_clear()

    yield set_size
    monkeypatch.undo()
    bound.forget()
    planner.choose.cache_clear()


def call(kind, keys, rows=1):
    """A call of 8 heads over 2 KV heads of 64."""
    torch.manual_seed(keys)
    q, k, v = torch.randn(2, 8, rows, 64), *torch.randn(2, 2, 2, keys, 64)
    if kind == "pages":
        pages = -(-keys // 16)
        table = torch.randperm(2 * pages).int().reshape(2, pages)
        lengths = torch.tensor([keys, keys // 2 + 1], dtype=torch.int32)
        return partial(paged_attention, q, *torch.randn(2, 2 * pages, 16, 2, 64), table, lengths)
    if kind in ("f32", "f16", "bf16"):
        dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind]
        return partial(attention, q.to(dtype), k.to(dtype), v.to(dtype))
    name, group = kind.split()
    return partial(attention, q, *(Quantised.from_float(x, name, group=int(group)) for x in (k, v)))


@pytest.mark.parametrize("keys", [1, 7, 96, 129, 1000])
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "pages", "int8 64", "int8 32", "int4 64", "fp8_e4m3 32"])
def test_asking_ahead_changes_no_bit(cache_of, kind, keys):
    """And a call gives what the oracle does, whichever groups share a scale."""
    ask = call(kind, keys)
    cache_of(1 << 40)
    without = ask(backend="cpu")
    cache_of(0)
    assert ask(backend="cpu").equal(without)
    check_call(Inputs(ask.func, ask.args, {}).checked(), *ask(backend="cpu", return_lse=True))


TILES = [
    Case(B=1, H=8, Hkv=1, Lq=1, Lk=1000, D=128),
    Case(B=2, H=32, Hkv=2, Lq=1, Lk=333, D=64),
    Case(B=1, H=18, Hkv=2, Lq=1, Lk=97, D=96, Dv=32, sinks=True),
    Case(B=1, H=4, Hkv=1, Lq=4, Lk=300, D=64, causal=True, softcap=20.0),
    Case(B=1, H=12, Hkv=1, Lq=1, Lk=500, D=576, Dv=512),
    Case(B=1, H=8, Hkv=1, Lq=2, Lk=700, D=64, window=(301, 0), alibi="h"),
    Case(form="paged", H=16, Hkv=2, Lq=1, D=128, lengths=(31, 1111), page=16),
    Case(form="paged", H=16, Hkv=1, q_lengths=(1, 40), D=64, lengths=(700, 300), page=3, causal=True),
    Case(B=1, H=16, Hkv=1, Lq=1, Lk=400, D=64, mask="hqk", pattern="blocks"),
]


@pytest.mark.skipif(not amx.usable(), reason="no matrix tiles here")
@pytest.mark.parametrize("case", TILES, ids=str)
def test_many_rows_in_bf16_go_by_matrix_tiles(monkeypatch, case):
    case = replace(case, dtype="bf16")
    used = []
    function = compiled.function
    monkeypatch.setattr(compiled, "function", lambda name: used.append(name) or function(name))
    planner.choose.cache_clear()
    check_case(case, "cpu")
    assert {"tile_dots", "tile_adds"} <= set(used)
