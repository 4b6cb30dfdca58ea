"""MLX arrays through the Metal backend: the text that MLX makes of it is executed by tools/mslsim.

Without a Mac, MLX makes that text while a function is traced for export, and runs nothing.
"""

import re

import pytest
import torch

import mslsim
import tilewise
from metal_sim import needs_simulator
from mslsim.lint import lint
from mslsim.mlx_text import traced
from tilewise import InvalidArgument, Unsupported
from tilewise.testing.case import Case
from tilewise.tools.apple import check_mlx, to_torch

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
from tilewise import mlx  # noqa: E402

SEEN = []


def memory(x):
    """A copy of an array's memory as numpy knows it."""
    import numpy as np

    return np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)


class Traced:
    """A kernel of MLX's: its text is taken from a trace and executed over copies of the arrays."""

    def __init__(self, **made):
        self.kernel = mx.fast.metal_kernel(**made)
        self.ours = made["header"], made["source"]

    def __call__(self, **call):
        inputs = call.pop("inputs")
        ((name, source),) = traced(lambda *arrays: self.kernel(inputs=list(arrays), verbose=True, **call), *inputs)
        assert all(part in source for part in self.ours)
        SEEN.append(source)
        results = [
            memory(mx.zeros(shape, dtype))
            for shape, dtype in zip(call["output_shapes"], call["output_dtypes"], strict=True)
        ]
        kernel = getattr(mslsim.compile_shader(source), name)
        kernel(*(memory(x) for x in inputs), *results, threads=call["grid"], group_size=call["threadgroup"])
        return [
            mx.array(x).view(dtype) if dtype == mx.bfloat16 else mx.array(x)
            for x, dtype in zip(results, call["output_dtypes"], strict=True)
        ]


@pytest.fixture
def simulated(monkeypatch):
    monkeypatch.setattr(mlx, "make_kernel", Traced)
    mlx._kernel.cache_clear()
    SEEN.clear()
    yield
    mlx._kernel.cache_clear()


CASES = [
    Case(Hkv=2, Lq=33, Lk=97, D=40, causal=True),
    Case(Hkv=2, Lq=1, Lk=700, D=64, dtype="f16", lengths=(700, 33), sinks=True),
    Case(H=2, Lq=40, D=64, dtype="bf16", softcap=8.0, alibi="bh", window=(9, 4)),
    Case(B=1, H=2, Hkv=1, Lq=1, Lk=3, D=2, note="arrays of fewer than 8"),
    Case(Lq=50, Lk=70, mask="hqk", pattern="rows", layout="blhd"),
    Case(Lq=50, Lk=70, mask="b11k", mask_kind="f16", dtype="f16", chunk=32),
    Case(Lq=6, Lk=70, mask="qk", mask_kind="bf16", dtype="bf16", offset="rows", causal=True),
    Case(form="varlen", q_lengths=(5, 0, 33), lengths=(40, 7, 33), causal=True, Hkv=2),
    Case(form="paged", B=3, Hkv=2, Lq=3, lengths=(1, 16, 70), D=64, page=7, causal=True),
    Case(form="paged", B=3, Hkv=2, q_lengths=(1, 5, 20), lengths=(1, 16, 70), D=64, causal=True),
]


@needs_simulator
@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case):
    check_mlx(case)
    assert SEEN
    for source in SEEN:
        assert lint(source) == []
        assert "constant " not in source.split("[[kernel]]")[1], "a small array in another address space"


@needs_simulator
@pytest.mark.usefixtures("simulated")
def test_nothing_is_launched_or_bound_that_a_call_does_not_need():
    """A kernel for the mask's tiles and one for the call. An array of zeros would be a launch of its own in MLX."""
    q = mx.random.normal((1, 2, 40, 64))
    mlx.attention(q, q, q, mask=mx.ones((40, 40), mx.bool_))
    signatures = [source.split("[[kernel]]")[1].partition("{")[0] for source in SEEN]
    named = [re.findall(r"(\w+) \[\[buffer", signature) for signature in signatures]
    parameters = ["ints", "strides", "floats"]
    assert named == [["mask", *parameters, "states"], ["q", "k", "v", "mask", "states", *parameters, "out"]]


@pytest.mark.usefixtures("simulated")
def test_nothing_to_do():
    q, none = mx.zeros((2, 4, 3, 16)), mx.zeros((2, 2, 0, 16))
    sinks = mx.array([1.0, 2.0, 3.0, 4.0])
    state = mlx.attention(q, none, none, sinks=sinks, return_lse=True)
    assert state.out.shape == (2, 4, 3, 16)
    assert state.lse[1, :, 2].tolist() == sinks.tolist()
    assert mlx.attention(mx.zeros((0, 4, 3, 16)), mx.zeros((0, 2, 5, 16)), mx.zeros((0, 2, 5, 16))).shape == (
        0,
        4,
        3,
        16,
    )


def test_what_it_cannot_take_is_named():
    q = mx.zeros((1, 2, 3, 16))
    with pytest.raises(Unsupported, match="no Metal"):
        mlx.attention(q, q, q)
    with pytest.raises(InvalidArgument, match="casual"):
        mlx.attention(q, q, q, casual=True)
    with pytest.raises(InvalidArgument, match="k: got Tensor"):
        mlx.attention(q, torch.zeros(1, 2, 3, 16), q)
    with pytest.raises(Unsupported, match="tile_map"):
        mlx.attention(q, q, q, tile_map=object())
    with pytest.raises(InvalidArgument, match="uint8"):
        mlx.attention(q.astype(mx.uint8), q, q)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_on_the_cpu_mlx_arrays_are_arrays_like_others(dtype):
    q, k, v = (mx.random.normal((1, 2, 20, 16)).astype(dtype) for _ in range(3))
    out = tilewise.attention(q, k, v, causal=True)
    assert isinstance(out, mx.array)
    assert out.dtype == dtype
    want = tilewise.attention(*(to_torch(x) for x in (q, k, v)), causal=True)
    assert to_torch(out).equal(want)
