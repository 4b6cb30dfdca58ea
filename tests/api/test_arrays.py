"""NumPy and DLPack arrays in, the same kind out."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest
import torch

from tilewise import (
    InvalidArgument,
    KVCache,
    Quantised,
    TileMap,
    alibi_slopes,
    attention,
    paged_attention,
    varlen_attention,
)


class Foreign:
    """An array library that knows DLPack and nothing else."""

    def __init__(self, x):
        self.x = x

    def __dlpack__(self, **kwargs):
        return self.x.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()

    def __array_namespace__(self):
        return Foreign

    @staticmethod
    def from_dlpack(x):
        return Foreign(torch.from_dlpack(x))


def inputs(dtype=np.float32):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, h, n, 16)).astype(dtype) for h, n in ((4, 5), (2, 9), (2, 9))]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_numpy(dtype):
    q, k, v = inputs(dtype)
    mask = np.ones((5, 9), dtype=bool)
    out, lse = attention(q, k, v, mask=mask, kv_lengths=np.array([9, 3]), return_lse=True)
    assert type(out) is type(lse) is np.ndarray
    assert out.dtype == dtype
    assert lse.dtype == np.float32
    bits = (
        (lambda x: torch.from_numpy(x.view(np.int16)).view(torch.bfloat16))
        if dtype == ml_dtypes.bfloat16
        else torch.from_numpy
    )
    want = attention(*map(bits, (q, k, v)), kv_lengths=torch.tensor([9, 3]))
    np.testing.assert_array_equal(out.astype(np.float32), want.float().numpy())


def test_numpy_out_is_written_in_place():
    q, k, v = inputs()
    out = np.full_like(q, np.nan)
    result = attention(q, k, v, out=out)
    assert np.shares_memory(out, result)
    assert np.isfinite(out).all()


def test_numpy_views(recwarn):
    q, k, v = inputs()
    want = attention(q, k, v)
    for x in (q, k, v):
        x.flags.writeable = False
    np.testing.assert_array_equal(attention(q, k, v), want)
    backwards = [np.ascontiguousarray(x[..., ::-1])[..., ::-1] for x in (q, k, v)]
    np.testing.assert_array_equal(attention(*backwards), want)
    np.testing.assert_array_equal(attention(*(np.asfortranarray(x) for x in (q, k, v))), want)
    one = [x[:1][::-1] for x in (q, k, v)]
    np.testing.assert_array_equal(attention(*one), attention(*(x.copy() for x in one)))
    assert [str(w.message) for w in recwarn.list] == []


class Subclass(np.ndarray):
    """One of the many: memory maps, records, units."""


def test_subclasses_of_arrays(tmp_path):
    """torch ends the process over negative strides that come by DLPack."""
    q, k, v = inputs()
    want = attention(q, k, v)
    backwards = [np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1].view(Subclass) for x in (q, k, v)]
    out = np.full_like(q, np.nan).view(Subclass)
    result = attention(*backwards, out=out)
    assert type(result) is np.ndarray
    np.testing.assert_array_equal(out, want)
    mapped = np.memmap(tmp_path / "q", np.float32, "w+", shape=q.shape)
    mapped[:] = q
    np.testing.assert_array_equal(attention(mapped, k, v), want)


@pytest.mark.parametrize("name", ["q", "mask", "out"])
def test_masked_arrays_are_refused(name):
    """Their numbers alone would be read, and what they hide be seen."""
    given = dict(zip("qkv", inputs(), strict=True)) | {
        "mask": np.ones((5, 9), dtype=bool),
        "out": np.empty((2, 4, 5, 16)),
    }
    given[name] = np.ma.masked_array(given[name])
    with pytest.raises(InvalidArgument, match=f"^{name}: got a masked array, expected a plain one"):
        attention(**given)


@pytest.mark.parametrize("index", [np.s_[::-1], np.s_[:, :, ::-1], np.s_[..., ::-1]])
@pytest.mark.parametrize("rotate", [None, False, True])
def test_an_out_that_torch_cannot_write_is_refused(index, rotate):
    """It would be written to a copy. `rotate`: by a cache, which may copy its result into `out`."""
    q, k, v = inputs()
    cache = KVCache(2, 2, 9, 16, "f32", rotate=bool(rotate))
    cache.append(k, v)
    call = cache.attend if rotate is not None else partial(attention, k=k, v=v)
    out = np.full_like(q, 7.0)[index]
    with pytest.raises(InvalidArgument, match=r"^out: got an array with strides .* expected none below 0"):
        call(q, out=out)
    out.flags.writeable = False
    with pytest.raises(InvalidArgument, match=r"^out: got a read-only array"):
        call(q, out=out)
    assert (out == 7.0).all()


class Strided(Foreign):
    """A library that has negative strides, as CuPy does."""

    strides = (-64, 4)


def test_dlpack_of_negative_strides_is_refused():
    with pytest.raises(InvalidArgument, match=r"^mask: got strides \(-64, 4\), expected none below 0; .* copy"):
        TileMap.from_mask(Strided(torch.ones(4, 4)))


def test_dlpack():
    q, k, v = (torch.from_numpy(x) for x in inputs())
    out, lse = attention(Foreign(q), Foreign(k), Foreign(v), return_lse=True)
    assert isinstance(out, Foreign)
    assert isinstance(lse, Foreign)
    assert out.x.equal(attention(q, k, v))


class Mute(Foreign):
    """One whose library has no way back."""

    __array_namespace__ = None

    def __getattribute__(self, name):
        if name == "__array_namespace__":
            raise AttributeError(name)
        return super().__getattribute__(name)


def test_an_array_that_cannot_come_back_is_refused_first():
    q, k, v = inputs()
    out = np.full_like(q, 7.0)
    with pytest.raises(InvalidArgument, match="from_dlpack"):
        attention(Mute(torch.from_numpy(q)), k, v, out=out)
    assert (out == 7.0).all()


NUMBERS = {"window": 3, "chunk": 4, "q_offset": 2, "k_start": 1, "k_stride": 2, "q_stride": 2, "split_size": 3}


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_numpy_integers_are_ints(kind):
    """In a plain call, in one that is remembered, with gradients, and as an operator."""
    q, k, v = (torch.from_numpy(x) for x in inputs())
    numbers = {name: kind(number) for name, number in NUMBERS.items()}
    want = attention(q, k, v, causal=True, **NUMBERS)
    for _ in range(2):
        assert attention(q, k, v, causal=True, **numbers).equal(want)
    assert attention(q, k, v, window=(kind(3), kind(1))).equal(attention(q, k, v, window=(3, 1)))
    assert attention(q.clone().requires_grad_(), k, v, causal=True, **numbers).equal(want)
    assert torch.vmap(lambda x: attention(x, k, v, causal=True, **numbers))(q[None])[0].equal(want)
    x, cu = torch.from_numpy(inputs()[1][0]).transpose(0, 1), torch.tensor([0, 4, 9], dtype=torch.int32)
    longest = {"max_q": kind(5), "max_k": kind(5)}
    packed = varlen_attention(x, x, x, cu, cu)
    assert varlen_attention(x, x, x, cu, cu, **longest).equal(packed)
    assert torch.vmap(lambda x: varlen_attention(x, x, x, cu, cu, **longest))(x[None])[0].equal(packed)


def test_maps_and_slopes_take_numpy_integers():
    two, four = np.int64(2), np.int32(4)
    assert str(TileMap.from_spec(four, four, (two, two), window=two)) == str(TileMap.from_spec(4, 4, (2, 2), window=2))
    scores = torch.randn(2, 2)
    assert (
        TileMap.from_topk(scores, two, (two, 2), 4, four).counts()
        == TileMap.from_topk(scores, 2, (2, 2), 4, 4).counts()
    )
    assert TileMap.from_blocks(torch.zeros(1, 2, 1).int(), two, 4, 4).tile == (2, 2)
    assert alibi_slopes(four).equal(alibi_slopes(4))


def test_tools_take_numpy():
    mask = np.tril(np.ones((8, 8), dtype=bool))
    assert TileMap.from_mask(mask, (2, 2)).counts() == TileMap.from_spec(8, 8, (2, 2), causal=True).counts()
    assert TileMap.from_spec(8, 8, (2, 2), kv_lengths=np.array([3, 8])).states.shape == (2, 1, 4, 4)
    keys = np.random.default_rng(0).standard_normal((2, 3, 5, 64)).astype(np.float32)
    packed = Quantised.from_float(keys, "fp8_e4m3")
    again = Quantised(
        packed.data.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn), packed.scales.numpy(), "fp8_e4m3", 64
    )
    assert again.dequantise().equal(packed.dequantise())


def test_kinds_may_be_mixed_and_q_decides():
    q, k, v = inputs()
    assert isinstance(attention(torch.from_numpy(q), k, v), torch.Tensor)
    assert isinstance(attention(q, torch.from_numpy(k), v), np.ndarray)


def test_other_entry_points():
    q, k, v = (np.random.default_rng(1).standard_normal((7, 2, 8)).astype(np.float32) for _ in range(3))
    cu = np.array([0, 3, 7], dtype=np.int32)
    assert isinstance(varlen_attention(q, k, v, cu, cu), np.ndarray)
    pages = np.random.default_rng(2).standard_normal((2, 3, 4, 2, 8)).astype(np.float32)
    table, lengths = np.array([[2, 0]], dtype=np.int32), np.array([7], dtype=np.int32)
    assert isinstance(paged_attention(q[None, :1].swapaxes(1, 2), *pages, table, lengths), np.ndarray)
