"""Gradients through the functions that stand in the place of others', against torch's own in float64."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import beside
import tilewise
from beside import judge_beside
from tilewise.backends.torch import backward as tiled
from tilewise.compat import flash_attn as fa
from tilewise.compat import flash_attn_3 as fa3
from tilewise.compat import sdpa
from tilewise.dispatch import call_cache, planner

torchs = sdpa._torchs


def peaked(*shape, dtype=torch.float32):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 1.7).to(dtype)


def plain(q, k, v, causal=False, scale=None):
    """`[B, L, H, D]` by torch, causal to the bottom right."""
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    seen = seen.tril(k.shape[1] - q.shape[1]) if causal else seen
    return beside.sdpa(*(x.transpose(1, 2) for x in (q, k, v)), seen, scale=scale).transpose(1, 2)


Q, K, V = peaked(2, 9, 4, 16), peaked(2, 13, 2, 16), peaked(2, 13, 2, 16)
CU = torch.tensor([0, 4, 9], dtype=torch.int32)


@pytest.mark.parametrize("module", [fa, fa3], ids=["2", "3"])
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attn(module, causal):
    judge_beside(lambda *x: module.flash_attn_func(*x, causal=causal), lambda *x: plain(*x, causal), Q, K, V)
    qkv = peaked(2, 9, 3, 4, 16)
    judge_beside(
        lambda x: module.flash_attn_qkvpacked_func(x, causal=causal), lambda x: plain(*x.unbind(2), causal), qkv
    )
    if module is fa:
        kv = peaked(2, 13, 2, 2, 16)
        judge_beside(
            lambda q, x: fa.flash_attn_kvpacked_func(q, x, causal=causal),
            lambda q, x: plain(q, *x.unbind(2), causal),
            Q,
            kv,
        )


def packed(q, k, v, causal=True):
    parts = zip((0, 4), (4, 9), strict=True)
    return torch.cat([plain(*(x[None, a:b] for x in (q, k, v)), causal)[0] for a, b in parts])


@pytest.mark.parametrize("module", [fa, fa3], ids=["2", "3"])
def test_flash_attn_varlen(module):
    given = peaked(9, 4, 16), peaked(9, 2, 16), peaked(9, 2, 16)
    judge_beside(lambda *x: module.flash_attn_varlen_func(*x, CU, CU, 5, 5, causal=True), packed, *given)
    qkv = peaked(9, 3, 4, 16)
    judge_beside(
        lambda x: fa.flash_attn_varlen_qkvpacked_func(x, CU, 5, causal=True), lambda x: packed(*x.unbind(1)), qkv
    )


def test_lse_of_flash_attn_has_gradients():
    def scores(q, k):
        return torch.einsum("blhd,bmhd->bhlm", q, k.repeat_interleave(2, 2)) / 4

    judge_beside(
        lambda q, k: fa.flash_attn_func(q, k, V, return_attn_probs=True)[1],
        lambda q, k: torch.logsumexp(scores(q, k), -1),
        Q,
        K,
    )


def test_rows_that_are_not_used_have_no_gradients():
    q, k, v = (peaked(9, h, 16).requires_grad_() for h in (4, 2, 2))
    used = torch.tensor([3, 2], dtype=torch.int32)
    out = fa.flash_attn_varlen_func(q, k, v, CU, CU, 5, 5, seqused_q=used, causal=True)
    out.sum().backward()
    assert q.grad[[3, 6, 7, 8]].eq(0).all()
    assert q.grad[[1, 2, 4, 5]].ne(0).any(-1).any(-1).all()


def test_a_second_query_whose_keys_lie_beside_the_values():
    """MLA: v and k are parts of one row; a gradient reaches both."""
    row = peaked(2, 13, 1, 24)
    q, qv = peaked(2, 9, 4, 8), peaked(2, 9, 4, 16)

    def ours(q, qv, row):
        v, k = row.split((16, 8), -1)
        return fa3.flash_attn_func(q, k, v, causal=True, qv=qv)

    def exact(q, qv, row):
        v, _ = row.split((16, 8), -1)
        return plain(torch.cat((qv, q), -1), row, v, True)

    judge_beside(ours, exact, q, qv, row)


def forget():
    call_cache.forget()
    planner.choose.cache_clear()


@pytest.mark.parametrize("module", [fa, fa3], ids=["2", "3"])
def test_deterministic_is_honoured(module, monkeypatch):
    seen, run = [], tiled.run_backward
    monkeypatch.setattr(tilewise.backends.torch, "run_backward", lambda p, t: (seen.append(p.problem), run(p, t)))
    monkeypatch.setattr(planner, "BACKENDS", ("torch",))
    forget()
    q, k, v = (peaked(9, h, 16).requires_grad_() for h in (4, 2, 2))
    for choice in ({}, {"deterministic": True}, {"deterministic": False}):
        module.flash_attn_func(q[None], k[None], v[None], **choice).sum().backward()
        module.flash_attn_varlen_func(q, k, v, CU, CU, 5, 5, **choice).sum().backward()
        module.flash_attn_qkvpacked_func(torch.stack((q, q, q), 1)[None], **choice).sum().backward()
    forget()
    assert [p.deterministic for p in seen] == [False] * 3 + [True] * 3 + [False] * 3


def test_sdpa():
    q, k, v = (x.transpose(1, 2).contiguous() for x in (Q, K.repeat_interleave(2, 2), V.repeat_interleave(2, 2)))
    ours = sdpa.scaled_dot_product_attention
    judge_beside(lambda *x: ours(*x, is_causal=True), lambda *x: beside.sdpa(*x, is_causal=True), q, k, v)
    judge_beside(ours, beside.sdpa, q, k, v, peaked(2, 1, 9, 13))
    judge_beside(ours, beside.sdpa, q, k, v, peaked(9, 13))
    judge_beside(lambda *x: ours(*x), lambda *x: beside.sdpa(*x), q[0], k[0], v[0])
    with sdpa.installed(fallback=True):
        judge_beside(F.scaled_dot_product_attention, beside.sdpa, q, k, v)
    assert not sdpa.fallbacks


def test_sdpa_in_a_module():
    module = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = peaked(2, 9, 16)
    names, weights = zip(*module.named_parameters(), strict=True)

    def plain(x, *weights):
        return torch.func.functional_call(module, dict(zip(names, weights, strict=True)), x)

    def ours(x, *weights):
        with sdpa.installed():
            return plain(x, *weights)

    judge_beside(ours, plain, x, *weights)


def test_sdpa_under_autocast_has_torchs_dtype():
    q, k, v = (peaked(2, 4, 9, 16).requires_grad_() for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        out, want = (f(q, k.bfloat16(), v, peaked(9, 9)) for f in (sdpa.scaled_dot_product_attention, torchs))
        double = sdpa.scaled_dot_product_attention(*(x.double() for x in (q, k, v)))
    assert out.dtype == want.dtype == torch.bfloat16
    assert double.dtype == torch.float64
    (dq,) = torch.autograd.grad(out.float().sum(), q)
    assert dq.dtype == torch.float32


def test_jagged_tensors():
    rows = [peaked(n, 2, 16) for n in (4, 9)]

    def ours(*rows):
        x = torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
        return sdpa.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3, is_causal=True).transpose(1, 2).values()

    judge_beside(ours, lambda *rows: torch.cat([plain(*[x[None]] * 3, causal=True)[0] for x in rows]), *rows)
