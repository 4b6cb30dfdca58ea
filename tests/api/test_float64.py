"""float64: plain torch computes it, so that people can check the gradients of their layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import tilewise
from tilewise import InvalidArgument, KVCache, Unsupported

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of torch's own imports
WIDE = torch.float64
OPTIONS = {
    "plain": {},
    "causal and a window": {"causal": True, "window": 3, "softcap": 2.0},
    "mask": {"mask": (4, 5, 6)},
    "sinks": {"sinks": (4,)},
    "slopes": {"alibi_slopes": (4,)},
    "biases": {"q_bias": (2, 4, 5), "k_bias": (1, 4, 6)},
}


def drawn(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(shape, dtype=WIDE, generator=torch.Generator().manual_seed(sum(shape)), requires_grad=grad)


def qkv(grad: bool = True) -> list[torch.Tensor]:
    return [drawn(2, 4, 5, 4, grad=grad), drawn(2, 2, 6, 4, grad=grad), drawn(2, 2, 6, 3, grad=grad)]


@pytest.mark.parametrize("name", OPTIONS)
def test_gradcheck_of_first_and_second_derivatives_and_of_forward_mode(name: str) -> None:
    options = {key: drawn(*x) if isinstance(x, tuple) else x for key, x in OPTIONS[name].items()}
    tensors = {key: x for key, x in options.items() if isinstance(x, torch.Tensor)}

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: torch.Tensor) -> tilewise.AttentionState:
        return tilewise.attention(q, k, v, **options | dict(zip(tensors, given, strict=True)), return_lse=True)

    inputs = (*qkv(), *tensors.values())
    assert gradcheck(call, inputs, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(call, inputs, fast_mode=True)


def test_gradcheck_of_a_function_and_what_it_captures() -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.tanh(s) + table[h, i - j + 8])

    assert gradcheck(call, (*qkv(), drawn(4, 16)), check_forward_ad=True, fast_mode=True)


def test_gradcheck_of_packed_sequences_also_compiled() -> None:
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    inputs = (drawn(5, 4, 4), drawn(5, 2, 4), drawn(5, 2, 4))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tilewise.varlen_attention(q, k, v, cu, cu, causal=True)

    assert gradcheck(call, inputs, fast_mode=True)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*inputs), call(*inputs))
    first, second = (torch.autograd.grad(f(*inputs).square().sum(), inputs) for f in (call, compiled))
    assert all(torch.equal(a, b) and a.dtype == WIDE for a, b in zip(first, second, strict=True))


def test_results_are_those_of_the_oracle_and_repeated_calls_equal() -> None:
    q, k, v = qkv(grad=False)
    exact = tilewise.attention(q, k, v, causal=True, return_lse=True, backend="reference")
    for _ in range(3):
        state = tilewise.attention(q, k, v, causal=True, return_lse=True)
        assert state.out.dtype == state.lse.dtype == WIDE
        torch.testing.assert_close(state.out, exact.out, rtol=0, atol=1e-14)
        torch.testing.assert_close(state.lse, exact.lse, rtol=0, atol=1e-14)
    assert tilewise.attention(q, k.float(), v.bfloat16()).dtype == WIDE
    plan = tilewise.plan(q, k, v)
    assert plan.backend == "torch"
    assert "cpu: it has no float64" in str(plan)


def test_states_merge_in_float64() -> None:
    q, k, v = qkv(grad=False)
    whole = tilewise.attention(q, k, v, return_lse=True)
    halves = [tilewise.attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 2), slice(2, 6))]
    merged = tilewise.merge(halves)
    assert merged.lse.dtype == WIDE
    torch.testing.assert_close(merged.out, whole.out, rtol=0, atol=1e-14)
    torch.testing.assert_close(merged.lse, whole.lse, rtol=0, atol=1e-14)


def test_a_layer_in_float64_over_a_cache_in_float32() -> None:
    q, k, v = qkv(grad=False)
    cache = KVCache(2, 2, 8, 4, value_dim=3, dtype=torch.float32)
    cache.append(k.float(), v.float())
    out = cache.attend(q)
    assert out.dtype == WIDE
    torch.testing.assert_close(out, tilewise.attention(q, k.float(), v.float(), causal=True), rtol=0, atol=1e-14)
    with pytest.raises(InvalidArgument, match=r"k: got torch\.float64, expected float32"):
        cache.append(k, v)


@pytest.mark.parametrize("backend", ["cpu", "triton", "metal", "hopper"])
def test_kernels_refuse_it(backend: str) -> None:
    with pytest.raises(Unsupported):
        tilewise.attention(*qkv(grad=False), backend=backend)


def test_what_is_refused() -> None:
    q, k, v = qkv(grad=False)
    narrow = [x.float() for x in (q, k, v)]
    with pytest.raises(InvalidArgument, match=r"k: got torch\.float64.*k.float\(\)"):
        tilewise.attention(narrow[0], k, v)
    with pytest.raises(InvalidArgument, match=r"mask: got torch\.float64"):
        tilewise.attention(*narrow, mask=drawn(5, 6, grad=False))
    for name, shape in (("sinks", (4,)), ("alibi_slopes", (4,)), ("q_bias", (2, 4, 5)), ("k_bias", (2, 4, 6))):
        with pytest.raises(InvalidArgument, match=rf"{name}: got torch\.float64"):
            tilewise.attention(*narrow, **{name: drawn(*shape, grad=False)})
    with pytest.raises(InvalidArgument, match=r"q: got torch\.float64.*q.astype\(np.float32\)"):
        tilewise.attention(*(np.asarray(x) for x in (q, k, v)))
