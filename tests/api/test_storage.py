"""`StorageFormat`: what follows from an entry, and that a new one is an entry."""

from __future__ import annotations

import copy
import pickle
import struct
from itertools import product

import pytest
import torch

from naive import assert_as_torch
from tilewise import InvalidArgument, KVCache, Quantised, Unsupported, attention, plan
from tilewise.core import storage
from tilewise.core.kv_store import RowFormat
from tilewise.core.problem import WriteProblem
from tilewise.core.storage import FLOATS, FORMATS, StorageFormat, as_bytes, parse, stored_as
from tilewise.dispatch import planner

SIZES = [
    (name, group, width)
    for name, group, width in product(FORMATS, (32, 128), (2, 64, 72, 512, 576))
    if not stored_as(name, group).wants(width)
]
GROUPED = [name for name in storage.quantised_names() if not stored_as(name).scales_in_row]


@pytest.mark.parametrize(("name", "group", "width"), SIZES)
def test_sizes_of_a_row_are_those_of_its_tensors(name, group, width):
    fmt = stored_as(name, group)
    data, scales = fmt.quantise(torch.randn(3, width))
    assert data.shape == (3, fmt.columns(width))
    assert data.dtype == fmt.dtype
    assert fmt.width(data.shape[1]) == width
    assert (0 if scales is None else scales.shape[1]) == fmt.scales(width)
    if not fmt.scales_in_row:
        assert 8 * data.nbytes == 3 * width * fmt.bits
    assert parse(str(fmt)) == fmt


@pytest.mark.parametrize("name", [name for name in GROUPED if name != "codebook4"])
def test_the_largest_of_a_group_is_stored_exactly_and_the_others_within_half_a_step(name):
    fmt = stored_as(name, 32)
    x = torch.randn(5, 96)
    x[:, 40] = 7.0  # the largest of the second group
    found = fmt.dequantise(*fmt.quantise(x), torch.float64)
    assert torch.allclose(found[:, 40], torch.tensor(7.0, dtype=torch.float64))
    step = x.abs().unflatten(1, (3, 32)).amax(2) / fmt.largest  # of the last place of an integer
    limit = step / 2 if fmt.is_integer else x.abs().unflatten(1, (3, 32)).amax(2) / 16
    assert ((found - x).abs().unflatten(1, (3, 32)) <= limit[..., None] * 1.001).all()


def test_a_codebook_stores_the_nearest_of_its_sixteen_levels():
    """Of elements in units of 1/127 of their group's largest; bits are a sign and an index."""
    fmt = stored_as("codebook4", 32)
    levels = torch.tensor([s * x for s in (1, -1) for x in (6, 18, 30, 43, 57, 74, 94, 121)], dtype=torch.float64)
    x = torch.cat([torch.randn(50, 64), torch.linspace(-127, 127, 64)[None], torch.zeros(1, 64)])
    x[:, 0], x[:, 40] = 127.0, -127.0  # scales are 1
    data, scales = fmt.quantise(x)
    assert (scales == 1).all()
    nearest = levels[(x.double()[..., None] - levels).abs().argmin(-1)]  # of two, the first: the smaller, 6 of 0
    assert torch.equal(fmt.dequantise(data, scales, torch.float64), nearest)
    assert torch.equal(levels[(data & 15).long()], nearest[:, :32])
    assert torch.equal(levels[(data >> 4).long()], nearest[:, 32:])


def test_a_codebook_errs_less_than_int4_on_normal_numbers_of_the_same_bytes():
    x = torch.randn(200, 128)
    for group, gain in ((32, 1.15), (64, 1.2), (128, 1.25)):
        found = {name: stored_as(name, group).quantise(x) for name in ("int4", "codebook4")}
        assert len({sum(y.nbytes for y in parts) for parts in found.values()}) == 1
        errors = {
            name: (stored_as(name, group).dequantise(*parts, torch.float32) - x).norm() for name, parts in found.items()
        }
        assert errors["int4"] > gain * errors["codebook4"]


def test_bytes_stand_for_what_torch_cannot_index():
    for dtype in (torch.float8_e4m3fn, torch.bool):
        assert as_bytes(torch.zeros(4, dtype=dtype)).dtype == torch.uint8
    for dtype in (torch.float32, torch.int8, torch.uint8, torch.bfloat16):
        x = torch.zeros(4, dtype=dtype)
        assert as_bytes(x) is x


class Cubes(StorageFormat):
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


@pytest.fixture
def cubes(monkeypatch):
    monkeypatch.setitem(FORMATS, "cubes4", Cubes("cubes4", torch.uint8, 4, 1.0, 64))
    return "cubes4"


def test_a_new_format_is_an_entry(cubes, tmp_path):
    """Arguments, plans, caches, files and plain torch take it from `FORMATS`; kernels refuse it by name."""
    k, v = torch.randn(2, 1, 2, 50, 64)
    q = torch.randn(1, 4, 3, 64)
    stored = [Quantised.from_float(x, cubes, 32) for x in (k, v)]
    wide = [x.dequantise().repeat_interleave(2, 1) for x in stored]
    hidden = torch.ones(3, 50, dtype=torch.bool).triu(48)

    def plain(q, k, v):
        return (q @ k.mT / 8).masked_fill(hidden, -torch.inf).softmax(-1) @ v

    exact, rounded = plain(q.double(), *(x.double() for x in wide)), plain(q, *wide)
    for backend in ("reference", "torch", None):
        assert_as_torch(attention(q, *stored, causal=True, backend=backend), exact, rounded)
    assert "k cubes4/32" in str(plan(q, *stored))
    assert plan(q, *stored).backend == "torch"
    with pytest.raises(Unsupported, match="it has no k in cubes4/32 and no v in cubes4/32"):
        attention(q, *stored, backend="cpu")
    cache = KVCache(1, 2, 64, 64, cubes, v_dtype="int8", group=32)
    cache.append(k, v)
    assert torch.equal(cache.keys(0), stored[0].dequantise()[0])
    cache.save(tmp_path / "cache")
    again = KVCache.load(tmp_path / "cache")
    assert torch.equal(again.keys(0), cache.keys(0))
    assert torch.allclose(again.attend(q), cache.attend(q))
    assert again.nbytes == 2 * 64 * (32 + 8 + 64 + 8)


def test_a_latent_row_has_the_bytes_that_servers_give_it():
    """Written out by hand: 512 float8, four float32 scales, 64 bfloat16."""
    fmt = stored_as("fp8_latent")
    assert (fmt.columns(576), fmt.width(656), fmt.scales(576), str(fmt)) == (656, 576, 0, "fp8_latent/128")
    assert stored_as("fp8_latent", 32) is fmt
    assert parse("fp8_latent/128") is fmt
    x = torch.randn(576)
    x[130], x[512] = 896.0, 1.5
    data, scales = fmt.quantise(x)
    assert scales is None
    raw = data.numpy().tobytes()
    assert len(raw) == 656
    factors = struct.unpack("<4f", raw[512:528])
    assert factors[1] == 2.0  # 896 / 448
    assert factors[0] == pytest.approx(x[:128].abs().max().item() / 448)
    assert raw[130] == 0x7E  # 448, the largest
    assert raw[528:530] == b"\xc0\x3f"  # 1.5 in bfloat16
    found = fmt.dequantise(data, None, torch.float64)
    assert found[130] == 896
    assert torch.equal(found[512:], x[512:].bfloat16().double())
    error, size = (y[:512].abs().unflatten(0, (4, 128)).amax(1) for y in (found - x, x))
    assert (error <= size / 16).all()


def test_values_are_the_first_bytes_of_a_latent_row():
    x = torch.randn(1, 1, 70, 576)
    k = Quantised.from_float(x, "fp8_latent", 128)
    v = Quantised(k.data[..., :528], None, "fp8_latent", 128)
    assert (k.shape[-1], v.shape[-1]) == (576, 512)
    assert torch.equal(v.dequantise(), k.dequantise()[..., :512])
    q = torch.randn(1, 4, 2, 576)
    assert plan(q, k, v).problem.v_in_k
    assert not plan(q, k, Quantised.from_float(x[..., :512], "fp8_latent", 128)).problem.v_in_k
    for _ in range(2):  # the second is a repeated call
        out = attention(q, k, v, backend="torch")
        apart = attention(q, k, Quantised.from_float(x[..., :512], "fp8_latent", 128), backend="torch")
        assert torch.equal(out, apart)


@pytest.mark.parametrize("name", ["int4", "codebook4"])
@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_the_first_bytes_of_4_bits_are_no_first_columns(name, backend):
    """They are packed by halves of a row: V at K's address is not V in K."""
    q, k = torch.randn(1, 4, 3, 128), Quantised.from_float(torch.randn(1, 1, 50, 128), name, 32)
    v = Quantised(k.data[..., :32], k.scales[..., :2], name, 32)
    assert not plan(q, k, v).problem.v_in_k
    apart = Quantised(v.data.clone(), v.scales.clone(), name, 32)
    assert torch.equal(attention(q, k, v, backend=backend), attention(q, k, apart, backend=backend))


def test_rows_of_int8_lie_in_one_another_with_their_scales():
    whole, other = (Quantised.from_float(torch.randn(1, 1, 70, 128), "int8", 32) for _ in range(2))
    q = torch.randn(1, 4, 1, 128)

    def in_k(data, scales):
        return plan(q, whole, Quantised(data.data[..., :64], scales.scales[..., :2], "int8", 32)).problem.v_in_k

    assert in_k(whole, whole)
    assert not in_k(whole, other)
    assert not in_k(other, whole)


def test_quantised_says_what_it_wants_of_rows_with_scales():
    data = torch.zeros(3, 656, dtype=torch.uint8)
    with pytest.raises(InvalidArgument, match="None: the scales are in the rows"):
        Quantised(data, torch.ones(3, 4), "fp8_latent", 128)
    with pytest.raises(InvalidArgument, match="scales: got None for int8, expected a tensor"):
        Quantised(data.view(torch.int8), None, "int8", 64)
    with pytest.raises(InvalidArgument, match="rows of 500 bytes, expected rows of 512 or an even number more"):
        Quantised(data[:, :500], None, "fp8_latent", 128)
    with pytest.raises(InvalidArgument, match="last dim 96, expected 512 or an even number more for fp8_latent"):
        Quantised.from_float(torch.zeros(3, 96), "fp8_latent", 128)


def test_a_cache_of_latent_rows(tmp_path):
    x = torch.randn(1, 1, 50, 576)
    cache = KVCache(1, 1, 64, 576, "fp8_ds_mla", value_dim=512)
    cache.append(x, x[..., :512])
    expected = Quantised.from_float(x, "fp8_latent", 128)
    assert torch.equal(cache.keys(0), expected.dequantise()[0])
    assert cache.bytes_per_token == 656 + 528
    cache.save(tmp_path / "cache")
    assert torch.equal(KVCache.load(tmp_path / "cache").values(0), cache.values(0))


def test_a_cache_row_is_as_long_as_its_format_says():
    assert [RowFormat.of("dtype", name, 64, 128).bytes for name in (*FLOATS, *GROUPED)] == [
        512,
        256,
        256,
        136,
        72,
        72,
        136,
    ]


def test_the_planner_chooses_who_writes(cubes):
    def chosen(device, k="int4", v="bf16"):
        return planner.choose_writer(WriteProblem(torch.device(device), stored_as(k, 64), stored_as(v, 64)))

    assert [chosen("cpu"), chosen("cpu", v=cubes)] == ["cpu", "torch"]
    assert [chosen("meta"), chosen("xpu")] == ["torch", "torch"]


@pytest.mark.parametrize("name", storage.quantised_names())
def test_copies_and_pickles(name):
    """Of float8 too, which torch pickles but does not unpickle; a value inside of its key stays there."""
    k = Quantised.from_float(torch.randn(2, 3, 512), name)
    v = Quantised(k.data[..., :528], None, name, k.group) if k.scales is None else k
    for again in (copy.copy(k), copy.deepcopy(k), pickle.loads(pickle.dumps(k))):
        assert (again.dtype, again.group, again.data.dtype) == (k.dtype, k.group, k.data.dtype)
        assert again.dequantise().equal(k.dequantise())
    deep_k, deep_v = copy.deepcopy((k, v))
    assert deep_k.data.data_ptr() == deep_v.data.data_ptr() != k.data.data_ptr()
    assert copy.copy(k).data.data_ptr() == k.data.data_ptr()


def test_one_equals_itself_alone():
    """As `TileMap` does: by numbers it would be a tensor of bools, which no `in` and no `==` can take."""
    one, other = (Quantised.from_float(torch.ones(2, 4), "int8") for _ in range(2))
    assert one == one
    assert one != other
    assert other in [one, other]
    assert len({one, other}) == 2


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize(("offset", "gap"), [(1, 0), (2, 0), (4, 0), (0, 1), (3, 5)])
def test_latent_rows_may_begin_anywhere(backend, offset, gap):
    """Their scales are float32, which torch reads at multiples of 4 bytes alone."""
    rows, q = Quantised.from_float(torch.randn(1, 1, 9, 576), "fp8_latent"), torch.randn(1, 4, 2, 576)
    data = torch.zeros(offset + 9 * (656 + gap), dtype=torch.uint8)[offset:].view(1, 1, 9, -1)[..., :656]
    data.copy_(rows.data)
    moved = Quantised(data, None, "fp8_latent", 128)
    assert moved.dequantise().equal(rows.dequantise())
    want = attention(q, rows, Quantised(rows.data[..., :528], None, "fp8_latent", 128), backend=backend)
    got = attention(q, moved, Quantised(data[..., :528], None, "fp8_latent", 128), backend=backend)
    assert torch.equal(got, want)
