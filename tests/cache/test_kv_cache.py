"""`KVCache`: rows of their own length, rings, storage types, rotation, errors, memory."""

import numpy as np
import pytest
import torch

from naive import Row, assert_as_torch, assert_close
from tilewise import CacheFull, InvalidArgument, KVCache, PagedKVCache, Quantised, alibi_slopes, attention
from tilewise.backends.torch.kv_write import Append as InTorch
from tilewise.core.kv_store import RowFormat
from tilewise.kv_cache import hadamard

TYPES = ["f32", "f16", "bf16", "fp8_e4m3", "int8", "int4", "codebook4"]


def rows(*shape, seed=0, scale=2.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def fill(cache, models, counts, seed, capacity=None):
    """Appends ragged rows to a cache and to its models."""
    L = max(counts)
    k = rows(len(models), cache.kv_heads, L, cache.k_format.width, seed=seed)
    v = rows(len(models), cache.kv_heads, L, cache.v_format.width, seed=seed + 1)
    cache.append(k, v, None if min(counts) == L else counts)
    for b, model in enumerate(models):
        model.append(k[b, :, : counts[b]], v[b, :, : counts[b]], capacity)


def compare(cache, models, q_rows, seed=99, **options):
    q = rows(len(models), cache.kv_heads * 2, q_rows, cache.k_format.width, seed=seed)
    got = cache.attend(q, return_lse=True, **options)
    options = {"causal": True, **options}
    for b, model in enumerate(models):
        want = model.attend(q[b], **options)
        if want is None:
            assert not got.out[b].any()
        else:
            assert_close(got.out[b], want[0])
            assert_close(got.lse[b], want[1])


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_grow_apart(dtype):
    cache = KVCache(3, 2, 40, 64, dtype, v_dtype="int8", value_dim=32, group=32)
    models = [Row(dtype, "int8", 32) for _ in range(3)]
    compare(cache, models, 1)  # empty rows see nothing
    for step, counts in enumerate([(5, 5, 5), (1, 1, 1), (3, 0, 7), (0, 0, 0), (1, 1, 1), (9, 20, 2)]):
        fill(cache, models, counts, seed=10 * step)
        assert cache.lengths.tolist() == [len(m.tokens) for m in models]
        compare(cache, models, 1)
        compare(cache, models, 3, window=4, softcap=5.0)
    for b, model in enumerate(models):
        assert cache.keys(b).equal(model.held(0))
        assert cache.values(b).equal(model.held(1))


def test_ragged_queries_stand_where_they_were_appended():
    cache, models = KVCache(3, 2, 40, 64, "f32"), [Row() for _ in range(3)]
    fill(cache, models, (6, 1, 4), seed=0)
    counts = [4, 1, 2]
    fill(cache, models, counts, seed=5)
    q = rows(3, 4, 4, 64, seed=7)
    out = cache.attend(q, counts=counts)
    seq_major = cache.attend(q.transpose(1, 2), counts=torch.tensor(counts), layout="blhd").transpose(1, 2)
    for b, n in enumerate(counts):
        want = models[b].attend(q[b, :, :n], causal=True)[0]
        assert_close(out[b, :, :n], want)
        assert_close(seq_major[b, :, :n], want)


def test_options_pass_through():
    cache, models = KVCache(2, 2, 40, 64, "f32"), [Row() for _ in range(2)]
    fill(cache, models, (20, 9), seed=0)
    slopes, sinks = alibi_slopes(4), rows(4, seed=2)
    compare(cache, models, 3, alibi_slopes=slopes, sinks=sinks, scale=0.3, window=(6, None), chunk=7)
    tree = rows(5, 30, seed=3) > 0  # a mask past the longest row, up to the capacity
    q = rows(2, 4, 5, 64, seed=4)
    out = cache.attend(q, mask=tree)
    for b, model in enumerate(models):
        assert_close(out[b], model.attend(q[b], mask=tree[:, : len(model.tokens)], causal=True)[0])
    into = torch.full_like(out, torch.nan)
    assert cache.attend(q, mask=tree, out=into) is into
    assert into.equal(out)
    array = cache.attend(q.numpy(), mask=tree.numpy())
    assert isinstance(array, np.ndarray)
    assert torch.from_numpy(array).equal(out)


@pytest.mark.parametrize("capacity", [1, 5, 16])
@pytest.mark.parametrize("dtype", ["f32", "int4"])
def test_ring_across_many_wraps(capacity, dtype):
    cache = KVCache(3, 2, capacity, 64, dtype, ring=True)
    models = [Row(dtype) for _ in range(3)]
    rounds = 4
    steps = [(1, 1, 1), (3, 1, 2), (capacity, 1, 0), (1, 1, 1), (2 * capacity + 3, 2, capacity + 1), (1, 1, 1)]
    options = [
        (1, {"window": capacity}),
        (1, {"alibi_slopes": alibi_slopes(4), "sinks": rows(4, seed=2)}),
        (min(3, capacity), {}),  # no window: all that is held
        (2, {"causal": False}),
    ]
    if capacity == 16:
        options += [
            (4, {"window": 13}),
            (4, {"window": (5, None), "chunk": 8}),
            (2, {"q_offset": 40, "causal": False, "alibi_slopes": alibi_slopes(4)}),
        ]
    for step, counts in enumerate(steps * rounds):
        fill(cache, models, counts, step, capacity)
        assert cache.lengths.tolist() == [len(m.tokens) for m in models]
        compare(cache, models, 1)
        for queries, given in options[step // len(steps) :: rounds]:  # each option after each kind of step
            compare(cache, models, queries, **given)
    for b, model in enumerate(models):
        assert cache.keys(b).equal(model.held(0))
    assert cache.store.first.min() > 20 or capacity == 16  # many wraps


@pytest.mark.parametrize("capacity", [2, 3, 5])
def test_a_ring_sees_as_many_keys_as_the_window(capacity):
    """Not one more, and not one less: every window that it can serve, wherever the ring begins."""
    cache, models = KVCache(2, 1, capacity, 8, "f32", ring=True), [Row(), Row()]
    fill(cache, models, (capacity, capacity), 0, capacity)
    for step in range(capacity):
        fill(cache, models, (1, 1), step, capacity)
        for queries in range(1, min(3, capacity + 1)):
            for window in range(1, capacity - queries + 2):
                compare(cache, models, queries, window=window)
                compare(cache, models, queries, window=(window - 1, 0), causal=False)


def test_a_ring_takes_arrays_and_their_out():
    """Also where its keys are read in several runs, whose states are merged."""
    cache = KVCache(1, 2, 6, 8, "f32", ring=True)
    cache.append(*torch.randn(2, 1, 2, 6, 8))
    cache.append(*torch.randn(2, 1, 2, 3, 8))
    q, out = torch.randn(1, 4, 3, 8), np.full((1, 4, 3, 8), np.nan, dtype=np.float32)
    want = cache.attend(q, causal=True, window=4, return_lse=True)
    got = cache.attend(q.numpy(), causal=True, window=4, return_lse=True, out=out)
    assert type(got.out) is type(got.lse) is np.ndarray
    for x, y in ((got.out, want.out), (got.lse, want.lse), (out, want.out)):
        assert torch.from_numpy(x).equal(y)


def test_ring_after_truncation():
    capacity = 8
    cache, models = KVCache(2, 2, capacity, 64, "f32", ring=True), [Row(), Row()]
    for step in range(6):
        fill(cache, models, (5, 3), step, capacity)
        for b, drop in enumerate((2, 1)):
            length = len(models[b].tokens) - drop
            cache.truncate(b, length)
            models[b].truncate(length)
        compare(cache, models, 1)
        compare(cache, models, 2, window=3)
        compare(cache, models, 1, window=5)
    with pytest.raises(InvalidArgument, match=r"length: got 0, expected .* the tokens of row 0"):
        cache.truncate(0, 0)
    cache.reset(0)
    models[0] = Row()
    fill(cache, models, (2, 2), 77, capacity)
    compare(cache, models, 1)
    cache.reset()
    assert cache.lengths.tolist() == [0, 0]


def test_a_ring_says_what_it_has_forgotten():
    cache = KVCache(1, 1, 8, 16, "f32", ring=True)
    x = rows(1, 1, 12, 16)
    cache.append(x, x)
    cache.attend(rows(1, 1, 1, 16), window=8)
    with pytest.raises(InvalidArgument, match=r"window: got 8, which reaches back to position 2 in row 0.*4 or later"):
        cache.attend(rows(1, 1, 3, 16), window=8)
    with pytest.raises(InvalidArgument, match="mask over a ring"):
        cache.attend(rows(1, 1, 3, 16), mask=torch.ones(3, 8, dtype=torch.bool))
    for chunk in (3, np.int64(3)):
        with pytest.raises(InvalidArgument, match="chunk: got 3, expected a divisor"):
            cache.attend(rows(1, 1, 1, 16), chunk=chunk)


@pytest.mark.parametrize("tokens", [0, 3, 12])
def test_a_ring_refuses_from_the_first_call_what_it_cannot_do_later(tokens):
    cache = KVCache(1, 1, 8, 16, "f32", ring=True)
    x = rows(1, 1, tokens, 16)
    cache.append(x, x)
    q = rows(1, 1, 1, 16)
    with pytest.raises(InvalidArgument, match="mask over a ring"):
        cache.attend(q, mask=torch.ones(1, 8, dtype=torch.bool))
    with pytest.raises(InvalidArgument, match="chunk: got 3, expected a divisor"):
        cache.attend(q, chunk=3)
    assert cache.attend(q, chunk=4).isfinite().all()


def snapshot(cache):
    parts = (cache.store.k.data, cache.store.k.scales, cache.store.v.data, cache.store.v.scales, cache.store.on_device)
    return [x.view(torch.uint8).clone() for x in parts if x is not None]


def test_capacity_errors_come_before_any_write():
    cache = KVCache(3, 2, 10, 64, "int8")
    x = rows(3, 2, 8, 64)
    cache.append(x, x, [8, 2, 5])
    before = snapshot(cache)
    with pytest.raises(CacheFull, match="row 0 holds 8 of 10 tokens and cannot take 3 more"):
        cache.append(x[:, :, :3], x[:, :, :3])
    with pytest.raises(CacheFull, match="row 2 holds 5"):
        cache.append(x, x, [2, 8, 6])
    for old, new in zip(before, snapshot(cache), strict=True):
        assert old.equal(new)
    cache.append(x, x, [2, 8, 5])
    assert cache.lengths.tolist() == [10, 10, 10]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c, x: c.append(x, x[:, :1]), "v: got 1 heads of 64, expected 2 heads of 64"),
        (lambda c, x: c.append(x[..., :5], x), "k: got 2 heads of 5"),
        (lambda c, x: c.append(x[0], x), r"k: got shape \(2, 3, 64\), expected \[B, Hkv, L, D\]"),
        (lambda c, x: c.append(x[:1], x[:1]), "k: got a batch of 1, expected 2"),
        (lambda c, x: c.append(x, x[:, :, :2]), "v: got .* as k"),
        (lambda c, x: c.append(x.int(), x), "k: got torch.int32"),
        (lambda c, x: c.append(x, x, [1, 4]), r"counts\[1\]: got 4, expected 0 to 3"),
        (lambda c, x: c.append(x, x, [-1, 1]), r"counts\[0\]: got -1"),
        (lambda c, x: c.append(x, x, [1]), r"counts: got int64 of shape \(1,\)"),
        (lambda c, x: c.append(x, x, [1.0, 2.0]), "counts: got float64"),
        (lambda c, x: c.truncate(2, 0), "row: got 2, expected a row, 0 to 1"),
        (lambda c, x: c.truncate(0, 4), "length: got 4, expected 0 to 3"),
        (lambda c, x: c.reset(-1), "row: got -1"),
        (lambda c, x: c.attend(x, kv_lengths=[1, 2]), "kv_lengths: got an option of attend"),
        (lambda c, x: c.attend(x, counts=[1, 2], q_offset=3), "counts: got counts and q_offset"),
        (
            lambda c, x: c.attend(x, mask=torch.ones(3, 2, dtype=torch.bool)),
            "mask: got 2 keys, its last dim, expected 3 to",
        ),
        (lambda c, x: c.attend(x[..., :5]), "k: got a last dim of 64, expected 5"),
    ],
)
def test_errors_name_the_argument(call, message):
    cache = KVCache(2, 2, 10, 64, "f32")
    x = rows(2, 2, 3, 64)
    cache.append(x, x)
    before = snapshot(cache)
    with pytest.raises(InvalidArgument, match=message):
        call(cache, x)
    assert all(old.equal(new) for old, new in zip(before, snapshot(cache), strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": -1}, "batch: got -1"), ({"kv_heads": 0}, "kv_heads: got 0"), ({"capacity": 0}, "capacity: got 0"),
        ({"head_dim": 577}, "head_dim: got 577, expected an int, 1 to 576"), ({"dtype": "int3"}, "dtype: got 'int3'"),
        ({"dtype": torch.float64}, "dtype: got torch.float64"), ({"v_dtype": 8}, "v_dtype: got 8"),
        ({"dtype": "int8", "group": 16}, "group: got 16"), ({"dtype": "int4", "head_dim": 7}, "dtype: got 'int4' of 7"),
        ({"rotate": True, "head_dim": 20}, "head_dim: got a head of 20, expected a multiple of 8"),
    ],
)  # fmt: skip
def test_errors_of_construction(arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        KVCache(**{"batch": 1, "kv_heads": 1, "capacity": 4, "head_dim": 64, "dtype": "f32"} | arguments)


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", TYPES)
def test_the_kernel_stores_the_same_bits_as_torch(dtype, source):
    """And nothing else: slots that are not written keep their bytes."""
    for D, Dv, group in ((64, 64, 32), (80, 48, 128), (96, 40, 64), (128, 576, 32), (2, 6, 64)):
        caches = [KVCache(3, 2, 20, D, dtype, value_dim=Dv, group=group, ring=True) for _ in range(2)]
        caches[1].store.write = InTorch(caches[1].store.k, caches[1].store.v, 20)
        for cache in caches:
            for part in snapshot_views(cache):
                part.fill_(77)
        for step, counts in enumerate(([1, 1, 1], [7, 0, 3], [30, 2, 1])):
            k, v = rows(3, 2, 30, D, seed=step).to(source), rows(3, 2, 30, Dv, seed=9 - step).to(source)
            k[0, 0, 0] = 0  # a group of zeros
            k[1, 1, 0, 0] = 1e4
            for cache in caches:
                cache.append(k, v, counts)
        for kernel, plain in zip(*map(snapshot_views, caches), strict=True):
            assert kernel.equal(plain)


def snapshot_views(cache):
    parts = (cache.store.k.data, cache.store.k.scales, cache.store.v.data, cache.store.v.scales)
    return [x.view(torch.uint8) for x in parts if x is not None]


def test_every_float8_is_stored_as_it_is():
    """Numbers that float8 has, and the middles between them, which go to the even neighbour."""
    bits = torch.arange(256, dtype=torch.uint8)
    values = bits.view(torch.float8_e4m3fn).float()
    values = values[values.isfinite()].sort().values
    between = (values[1:] + values[:-1]) / 2
    for x in (values, between, between * (1 + 1e-6), between * (1 - 1e-6)):
        row = torch.zeros(1, 1, -(-len(x) // 127), 128)
        flat = torch.nn.functional.pad(x, (0, row.shape[2] * 127 - len(x))).view(-1, 127)
        row[0, 0, :, 1:], row[..., 0] = flat, 448.0  # so that the scale is 1
        cache = KVCache(1, 1, 8, 128, "fp8_e4m3", group=128)
        cache.append(row, row)
        assert cache.store.k.scales[0, 0, : row.shape[2]].eq(1).all()
        want = row.to(torch.float8_e4m3fn).view(torch.uint8)
        assert cache.store.k.data[:, :, : row.shape[2]].view(torch.uint8).equal(want)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("dtype", ["int8", "int4", "codebook4", "fp8_e4m3"])
def test_the_largest_float_stays_finite(dtype, backend, monkeypatch):
    monkeypatch.setattr("tilewise.dispatch.planner.choose_writer", lambda problem: backend)
    x = torch.linspace(-1, 1, 64).sign().expand(1, 1, 2, 64) * torch.finfo(torch.float32).max
    cache = KVCache(1, 1, 4, 64, dtype)
    cache.append(x, x)
    for got in (cache.keys(0)[None], Quantised.from_float(x, dtype).dequantise()):
        torch.testing.assert_close(got, x * (121 / 127 if dtype == "codebook4" else 1), rtol=1e-6, atol=0)


def test_nan_stays_nan_and_infinity_is_not_hidden():
    for dtype in ("int8", "int4", "fp8_e4m3"):
        cache = KVCache(1, 1, 4, 64, dtype, group=32)
        x = rows(1, 1, 2, 64)
        x[0, 0, 0, 3], x[0, 0, 1, 40] = torch.nan, torch.inf
        cache.append(x, x)
        keys = cache.keys(0)[0]
        assert keys[0, :32].isnan().all()
        assert keys[0, 32:].isfinite().all()
        assert not keys[1, 32:].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 64, 96, 128, 576])
def test_rotation_gives_a_row_the_same_bits_in_any_batch(width, dtype):
    x = rows(60, width).to(dtype)
    for turn in (hadamard.rotate, hadamard.rotate_back):
        whole = turn(x)
        for count in (1, 2, 3, 5, 17):
            assert whole[7 : 7 + count].equal(turn(x[7 : 7 + count])), count
        assert whole.equal(turn(x.view(3, 20, width).transpose(0, 1)).transpose(0, 1).reshape(60, width))


@pytest.mark.parametrize("width", [8, 64, 96, 128, 576])
def test_rotation_is_orthogonal(width):
    R = hadamard.matrix(width, torch.device("cpu")).double()
    assert (R @ R.T - torch.eye(width, dtype=torch.double)).abs().max() < 1e-6
    assert R.abs().max() <= 1 / hadamard.block_of(width) ** 0.5 + 1e-6  # every element spreads over its block
    x = rows(100, width)
    assert_as_torch(hadamard.rotate_back(hadamard.rotate(x)), x.double(), (x @ R.float()) @ R.float().T)
    spread = hadamard.rotate(torch.ones(1, width)).abs().max()
    assert spread < 0.6 * hadamard.block_of(width) ** 0.5 or width == 8  # a plain Hadamard matrix gives sqrt(block)


@pytest.mark.parametrize("ring", [False, True])
def test_rotation_changes_nothing_but_rounding(ring):
    plain, turned = (KVCache(2, 2, 12, 64, "f32", value_dim=32, rotate=r, ring=ring) for r in (False, True))
    models = [Row() for _ in range(2)]
    for step in range(6):
        if not ring and step == 2:
            break
        k, v, q = rows(2, 2, 5, 64, seed=step), rows(2, 2, 5, 32, seed=step + 50), rows(2, 4, 3, 64, seed=step + 90)
        for cache in (plain, turned):
            cache.append(k, v)
        for b, model in enumerate(models):
            model.append(k[b], v[b], 12 if ring else None)
        out = torch.full((2, 4, 3, 32), torch.nan)
        got = turned.attend(q, return_lse=True, out=out)
        assert got.out is out
        assert turned.attend(q).equal(out)
        for b, model in enumerate(models):
            want = model.attend(q[b], causal=True, rotated=True)
            assert_close(got.out[b], want[0])
            assert_close(got.lse[b], want[1])
        for x, y in ((turned.keys(1), plain.keys(1)), (turned.values(1), plain.values(1))):
            assert_as_torch(x, y.double(), hadamard.rotate_back(hadamard.rotate(y)))


def test_rotation_helps_where_a_few_channels_are_large():
    """As the keys of real models are: int4 with one scale for 64 elements loses the small ones without it."""
    k, v, q = rows(1, 1, 300, 64, scale=1.0), rows(1, 1, 300, 64, seed=1), rows(1, 1, 50, 64, seed=2)
    k[..., 7] *= 30
    want = attention(q, k, v, backend="reference", causal=True)
    errors = []
    for rotate in (False, True):
        cache = KVCache(1, 1, 300, 64, "int4", v_dtype="f32", rotate=rotate)
        cache.append(k, v)
        errors.append((cache.attend(q) - want).square().mean().sqrt().item())
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize(
    ("dtype", "group", "want"),
    [("f32", 64, 512), ("f16", 64, 256), ("bf16", 64, 256), ("fp8_e4m3", 64, 136), ("int8", 32, 144),
     ("int8", 128, 132), ("int4", 32, 80), ("int4", 64, 72), ("int4", 128, 68)],
)  # fmt: skip
def test_bytes_per_token(dtype, group, want):
    """The formula: bits of the type for each element, and 4 bytes for each group."""
    cache = KVCache(3, 5, 7, 128, dtype, group=group)
    assert RowFormat.of("dtype", dtype, group, 128).bytes == want
    assert cache.bytes_per_token == 2 * 5 * want
    parts = [
        x for x in (cache.store.k.data, cache.store.k.scales, cache.store.v.data, cache.store.v.scales) if x is not None
    ]
    assert cache.nbytes == sum(x.untyped_storage().nbytes() for x in parts) == 3 * 7 * cache.bytes_per_token


def test_large_appends_are_shared_by_threads():
    x = rows(1, 8, 3000, 128)
    caches = []
    threads = torch.get_num_threads()
    for n in (1, 2):
        torch.set_num_threads(n)
        try:
            cache = KVCache(1, 8, 3000, 128, "int4")
            cache.append(x, -x)
        finally:
            torch.set_num_threads(threads)
        caches.append(cache)
    assert caches[0].store.k.data.equal(caches[1].store.k.data)
    assert caches[0].store.v.data.equal(caches[1].store.v.data)
    packed = Quantised.from_float(x, "int4", 64)
    assert caches[0].store.k.data.equal(packed.data)
    assert caches[0].store.k.scales.equal(packed.scales)


def test_repr_and_default_dtype():
    cache = KVCache(2, 4, 100, 64)
    assert cache.k_format.dtype == torch.float32
    cache.append(*torch.zeros(2, 2, 4, 30, 64), [30, 7])
    assert repr(cache) == (
        "KVCache(batch=2, capacity=100, ring=False, lengths=[30, 7], kv_heads=4, head_dim=64, dtype='f32', "
        "device='cpu', nbytes=409600)"
    )
    assert "lengths=[0, 0, 0, 0, 0, 0, 0, 0, ...]" in repr(KVCache(9, 1, 1, 8))
    narrow = repr(KVCache(1, 1, 1, 8, "int8", v_dtype="f16", value_dim=16, group=32, rotate=True))
    assert "head_dim=8, value_dim=16, dtype='int8', v_dtype='f16', group=32, rotate=True" in narrow
    for given, name in (("float16", "f16"), ("bfloat16", "bf16"), ("float32", "f32"), ("float8_e4m3fn", "fp8_e4m3")):
        found = [RowFormat.of("dtype", dtype, 32, 8).name for dtype in (given, getattr(torch, given))]
        assert found == [name, name]
    before = torch.get_default_dtype()
    try:
        for default, name in ((torch.float16, "f16"), (torch.bfloat16, "bf16"), (torch.float64, "f32")):
            torch.set_default_dtype(default)
            assert KVCache(1, 1, 1, 8).k_format.name == name
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("wrong", [1, 0, "no", None])
def test_flags_are_bools(wrong):
    for name in ("ring", "rotate"):
        with pytest.raises(InvalidArgument, match=f"{name}: got {wrong!r}, expected True or False"):
            KVCache(1, 1, 8, 8, "f32", **{name: wrong})
    with pytest.raises(InvalidArgument, match="rotate"):
        PagedKVCache(1, 1, 1, 8, "f32", rotate=wrong)
    assert KVCache(1, 1, 8, 8, "f32", ring=np.True_).ring is True


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((1, 4, 1, 64), torch.float32, "k: got a batch of 2, expected 1, as q"),
        ((2, 4, 1, 32), torch.float32, "k: got a last dim of 64, expected 32, as q"),
        ((2, 3, 1, 64), torch.float32, "k: got 2 heads"),
        ((2, 4, 1, 64), torch.float16, "k: got torch.float32"),
    ],
)
def test_a_query_that_does_not_fit_is_named_as_the_query(shape, dtype, reason, rotate):
    """Nobody passed `k`."""
    cache = KVCache(2, 2, 64, 64, rotate=rotate)
    cache.append(*torch.randn(2, 2, 2, 5, 64))
    with pytest.raises(InvalidArgument, match=rf"^q: got \({shape[0]}, .* fits the cache; {reason}"):
        cache.attend(torch.zeros(shape, dtype=dtype))
