"""`StorageFormat`: what follows from an entry, and that a new one is an entry."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from naive import assert_as_torch
from tilewise import KVCache, Quantised, Unsupported, attention, plan
from tilewise.core import storage
from tilewise.core.kv_store import Format
from tilewise.core.problem import WriteProblem
from tilewise.core.storage import FORMATS, StorageFormat, as_bytes, parse, stored_as
from tilewise.dispatch import planner

SIZES = [(name, group, width) for name, group, width in product(FORMATS, (32, 128), (2, 64, 72, 576))]


@pytest.mark.parametrize(("name", "group", "width"), SIZES)
def test_sizes_of_a_row_are_those_of_its_tensors(name, group, width):
    fmt = stored_as(name, group)
    data, scales = fmt.quantise(torch.randn(3, width))
    assert data.shape == (3, fmt.columns(width))
    assert data.dtype == fmt.dtype
    assert fmt.width(data.shape[1]) == width
    assert (0 if scales is None else scales.shape[1]) == fmt.scales(width)
    assert 8 * data.nbytes == 3 * width * fmt.bits
    assert parse(str(fmt)) == fmt


@pytest.mark.parametrize("name", storage.quantised_names())
def test_the_largest_of_a_group_is_stored_exactly_and_the_others_within_half_a_step(name):
    fmt = stored_as(name, 32)
    x = torch.randn(5, 96)
    x[:, 40] = 7.0  # the largest of the second group
    found = fmt.dequantise(*fmt.quantise(x), torch.float64)
    assert torch.allclose(found[:, 40], torch.tensor(7.0, dtype=torch.float64))
    step = x.abs().unflatten(1, (3, 32)).amax(2) / fmt.largest  # of the last place of an integer
    limit = step / 2 if fmt.is_integer else x.abs().unflatten(1, (3, 32)).amax(2) / 16
    assert ((found - x).abs().unflatten(1, (3, 32)) <= limit[..., None] * 1.001).all()


def test_bytes_stand_for_what_torch_cannot_index():
    for dtype in (torch.float8_e4m3fn, torch.bool):
        assert as_bytes(torch.zeros(4, dtype=dtype)).dtype == torch.uint8
    for dtype in (torch.float32, torch.int8, torch.uint8, torch.bfloat16):
        x = torch.zeros(4, dtype=dtype)
        assert as_bytes(x) is x


class Codebook(StorageFormat):
    """4 bits that index a table; its levels lie closer near 0."""

    LEVELS = torch.linspace(-1, 1, 16).pow(3)

    def quantise(self, x):
        groups = x.unflatten(-1, (-1, self.group))
        scales = groups.abs().amax(-1)
        steps = groups / scales[..., None].clamp_min(storage.TINY)
        index = (steps[..., None] - self.LEVELS).abs().argmin(-1).flatten(-2).to(torch.uint8)
        low, high = index.chunk(2, -1)
        return low | (high << 4), scales

    def dequantise(self, data, scales, to):
        index = torch.cat([data & 15, data >> 4], -1).long()
        return self.LEVELS.to(to)[index] * scales.to(to).repeat_interleave(self.group, -1)


class Latent(StorageFormat):
    """A row in bytes: 512 numbers in fp8, their four scales, 64 numbers in bfloat16."""

    def columns(self, width):
        return 512 + 4 * 4 + 2 * (width - 512)

    def width(self, columns):
        return 512 + (columns - 528) // 2

    def scales(self, width):
        return 0

    def quantise(self, x):
        data, scales = stored_as("fp8_e4m3", 128).quantise(x[..., :512])
        rest = x[..., 512:].bfloat16().contiguous()
        return torch.cat([data.view(torch.uint8), scales.view(torch.uint8), rest.view(torch.uint8)], -1), None

    def dequantise(self, data, scales, to):
        numbers = data[..., :512].contiguous().view(torch.float8_e4m3fn)
        factors = data[..., 512:528].contiguous().view(torch.float32)
        rest = data[..., 528:].contiguous().view(torch.bfloat16)
        return torch.cat([stored_as("fp8_e4m3", 128).dequantise(numbers, factors, to), rest.to(to)], -1)


@pytest.fixture
def codebook(monkeypatch):
    monkeypatch.setitem(FORMATS, "codebook4", Codebook("codebook4", torch.uint8, 4, 1.0, 64))
    return "codebook4"


def test_a_new_format_is_an_entry(codebook, tmp_path):
    """Arguments, plans, caches, files and plain torch take it from `FORMATS`; kernels refuse it by name."""
    k, v = torch.randn(2, 1, 2, 50, 64)
    q = torch.randn(1, 4, 3, 64)
    stored = [Quantised.from_float(x, codebook, 32) for x in (k, v)]
    wide = [x.dequantise().repeat_interleave(2, 1) for x in stored]
    hidden = torch.ones(3, 50, dtype=torch.bool).triu(48)

    def plain(q, k, v):
        return (q @ k.mT / 8).masked_fill(hidden, -torch.inf).softmax(-1) @ v

    exact, rounded = plain(q.double(), *(x.double() for x in wide)), plain(q, *wide)
    for backend in ("reference", "torch", None):
        assert_as_torch(attention(q, *stored, causal=True, backend=backend), exact, rounded)
    assert "k codebook4/32" in str(plan(q, *stored))
    assert plan(q, *stored).backend == "torch"
    with pytest.raises(Unsupported, match="it has no k in codebook4/32 and no v in codebook4/32"):
        attention(q, *stored, backend="cpu")
    cache = KVCache(1, 2, 64, 64, codebook, v_dtype="int8", group=32)
    cache.append(k, v)
    assert torch.equal(cache.keys(0), stored[0].dequantise()[0])
    cache.save(tmp_path / "cache")
    again = KVCache.load(tmp_path / "cache")
    assert torch.equal(again.keys(0), cache.keys(0))
    assert torch.allclose(again.attend(q), cache.attend(q))
    assert again.nbytes == 2 * 64 * (32 + 8 + 64 + 8)


def test_a_row_may_hold_its_scales_and_numbers_of_two_types():
    fmt = Latent("latent", torch.uint8, 8, 448.0, 128)
    x = torch.randn(3, 5, 576)
    data, scales = fmt.quantise(x)
    assert (fmt.columns(576), fmt.width(656), fmt.scales(576)) == (656, 576, 0)
    assert data.shape == (3, 5, 656)
    assert scales is None
    found = fmt.dequantise(data, scales, torch.float32)
    assert torch.equal(found[..., 512:], x[..., 512:].bfloat16().float())
    assert ((found - x)[..., :512].abs() <= x[..., :512].abs().amax() / 16).all()
    assert replace(fmt, group=64) != fmt


def test_a_cache_row_is_as_long_as_its_format_says():
    assert [Format.of("dtype", name, 64, 128).bytes for name in FORMATS] == [512, 256, 256, 136, 72, 136]


def test_the_planner_chooses_who_writes(codebook):
    def chosen(device, k="int4", v="bf16"):
        return planner.choose_writer(WriteProblem(torch.device(device), stored_as(k, 64), stored_as(v, 64)))

    assert [chosen("cpu"), chosen("cpu", v=codebook)] == ["cpu", "torch"]
    assert [chosen("meta"), chosen("xpu")] == ["torch", "torch"]
