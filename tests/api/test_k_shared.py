"""`k_shared`: keys in two tensors, of which all heads share one."""

import numpy as np
import pytest
import torch

from tilewise import InvalidArgument, Quantised, attention, plan, varlen_attention

COPY = "k: k_shared beside each head's own columns"


def inputs(dtype=torch.float32, rows=40, keys=90, columns=16):
    torch.manual_seed(0)
    q, shared = torch.randn(2, 4, rows, 32 + columns, dtype=dtype), torch.randn(2, 1, keys, columns, dtype=dtype)
    both = torch.randn(2, keys, 4, 32 + 24, dtype=dtype).transpose(1, 2)  # as a projection gives keys and values
    return q, both[..., :32], both[..., 32:], shared


def whole(k, shared):
    return torch.cat([k, shared.expand(*k.shape[:-1], -1)], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (3, 16), (40, 16), (40, 32), (40, 7)])
def test_bits_are_those_of_one_tensor(dtype, rows, columns):
    q, k, v, shared = inputs(dtype, rows, columns=columns)
    for _ in range(2):  # the second is a repeated call
        out = attention(q, k, v, k_shared=shared, causal=True)
        assert torch.equal(out, attention(q, whole(k, shared), v, causal=True))
        k, shared = k.clone(), shared + 1


def test_a_cpu_copies_nothing_and_others_say_that_they_do():
    q, k, v, shared = inputs()
    here = plan(q, k, v, k_shared=shared)
    assert (here.backend, here.problem.copies, here.problem.k_shared_dim) == ("cpu", (), 16)
    assert COPY in str(plan(q, k, v, k_shared=shared, device="sm_90"))
    narrow = [x.bfloat16() for x in (q, k, v, shared)]
    assert plan(*narrow[:3], k_shared=narrow[3], device="amx").problem.copies == ()
    assert plan(*narrow[:3], k_shared=narrow[3], device="avx512").problem.copies == ()
    assert "16 columns of k shared" in str(here)


def test_gradients_are_those_of_one_tensor():
    """Of the shared columns a sum over heads; also where they alone require one."""
    q, k, v, shared = inputs(rows=12)
    found = [x.clone().requires_grad_() for x in (q, k, v, shared)]
    attention(*found[:3], k_shared=found[3], causal=True).square().sum().backward()
    exact = [x.clone().requires_grad_() for x in (q, k, v, shared)]
    attention(exact[0], whole(exact[1], exact[3]), exact[2], causal=True).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(found, exact, strict=True))
    alone = shared.clone().requires_grad_()
    attention(q, k, v, k_shared=alone, causal=True).square().sum().backward()
    assert torch.equal(alone.grad, exact[3].grad)
    assert plan(q, k, v, k_shared=alone).backward is not None


def test_in_graphs_other_layouts_and_as_arrays():
    q, k, v, shared = inputs()
    expected = attention(q, whole(k, shared), v, causal=True)
    compiled = torch.compile(lambda *x: attention(*x[:3], k_shared=x[3], causal=True), backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, shared), expected)
    major = [x.transpose(1, 2) for x in (q, k, v, shared)]
    out = attention(*major[:3], k_shared=major[3], causal=True, layout="blhd")
    assert torch.equal(out, expected.transpose(1, 2))
    arrays = [x.contiguous().numpy() for x in (q, k, v, shared)]
    assert np.array_equal(attention(*arrays[:3], k_shared=arrays[3], causal=True), expected.numpy())
    offsets = torch.tensor([0, 40, 80], dtype=torch.int32), torch.tensor([0, 90, 180], dtype=torch.int32)
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v, shared)]
    out = varlen_attention(*rows[:3], *offsets, k_shared=rows[3], causal=True)
    assert torch.equal(out, varlen_attention(rows[0], whole(rows[1], rows[3]), rows[2], *offsets, causal=True))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda k, s: {"k_shared": s[..., :9]}, "a last dim of 32, with k_shared 41, expected 48"),
        (lambda k, s: {"k_shared": s.expand(2, 4, 90, 16)}, "one head for all of k's"),
        (lambda k, s: {"k_shared": s[:, :, 1:]}, "one head for all of k's"),
        (lambda k, s: {"k_shared": s.half()}, "torch.float32"),
        (lambda k, s: {"k_shared": Quantised.from_float(s, "int8", 32)}, "k and k_shared of floats"),
        (lambda k, s: {"k": Quantised.from_float(k, "int8", 32), "k_shared": s}, "k and k_shared of floats"),
        (lambda k, s: {"k_shared": s.expand(2, 4, 90, 16).clone().requires_grad_()}, "then its columns"),
    ],
)
def test_what_is_refused(change, said):
    q, k, v, shared = inputs()
    with pytest.raises(InvalidArgument, match=said.replace("(", r"\(")):
        attention(**{"q": q, "k": k, "v": v} | change(k, shared))
