"""xformers' function by tilewise: each bias against the dense mask that xformers materialises for it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tilewise import InvalidArgument
from tilewise.compat import xformers
from tilewise.compat.xformers import (
    FUNCTIONS,
    memory_efficient_attention,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
)

H, K, Q, KV = 2, 16, 5, 8
ROW, COLUMN = torch.arange(Q)[:, None], torch.arange(KV)
END = ROW + KV - Q  # the position of a query, aligned to the bottom right
BIAS = torch.randn(1, H, Q, KV, generator=torch.Generator().manual_seed(0))


def named(name: str, **fields: Any) -> Any:
    """A bias as xformers has it, as far as it is read."""
    return type(name, (), fields)()


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, bias: Any = 0.0) -> torch.Tensor:
    s = torch.einsum("bmhk,bnhk->bhmn", q, k) / q.shape[-1] ** 0.5 + bias
    return torch.einsum("bhmn,bnhk->bmhk", s.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0), v)


DENSE = {
    "LowerTriangularMask": ({}, COLUMN <= ROW),
    "LowerTriangularMaskWithTensorBias": ({"_bias": BIAS}, COLUMN <= ROW),
    "LowerTriangularFromBottomRightMask": ({}, COLUMN <= END),
    "LowerTriangularFromBottomRightLocalAttentionMask": ({"_window_size": 3}, (COLUMN <= END) & (COLUMN > END - 3)),
    "LocalAttentionFromBottomRightMask": (
        {"window_left": 2, "window_right": 1}, (COLUMN <= END + 1) & (COLUMN >= END - 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DENSE)
def test_dense_biases(name: str) -> None:
    fields, seen = DENSE[name]
    q, k, v = random(2, Q, H, K), random(2, KV, H, K, seed=1), random(2, KV, H, K, seed=2)
    out = memory_efficient_attention(q, k, v, attn_bias=named(name, **fields))
    torch.testing.assert_close(out, dense(q, k, v, seen, fields.get("_bias", 0.0)), atol=1e-5, rtol=1e-5)


def lengths(*each: int) -> SimpleNamespace:
    starts = torch.tensor([0, *each], dtype=torch.int32).cumsum(0).int()
    return SimpleNamespace(seqstart=starts, max_seqlen=max(each), min_seqlen=min(each))


def padded(room: int, *used: int) -> SimpleNamespace:
    starts = torch.arange(0, room * len(used) + 1, room, dtype=torch.int32)
    return SimpleNamespace(
        seqstart=starts, max_seqlen=max(used), padding=room, seqlen=torch.tensor(used, dtype=torch.int32)
    )


# name: fields, whether the blocks are causal and aligned to the top left, keys to the left and to the right
PACKED = {
    "BlockDiagonalMask": ({}, None, None, None),
    "BlockDiagonalCausalMask": ({}, True, None, 0),
    "BlockDiagonalCausalFromBottomRightMask": ({}, False, None, 0),
    "BlockDiagonalCausalLocalAttentionMask": ({"_window_size": 3}, True, 2, 0),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": ({"_window_size": 3}, False, 2, 0),
    "BlockDiagonalPaddedKeysMask": ({}, None, None, None),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": ({}, False, None, 0),
    "BlockDiagonalLocalAttentionPaddedKeysMask": ({"window_left": 2, "window_right": 1}, False, 2, 1),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": ({"_window_size": 3}, False, 2, 0),
}


def blocks(q_lengths: Any, k_starts: Any, k_lengths: Any, top: Any, left: Any, right: Any) -> torch.Tensor:
    """The visible cells of sequences one after another."""
    seen, at = torch.zeros(sum(q_lengths), k_starts[-1], dtype=torch.bool), 0
    for n, start, m in zip(q_lengths, k_starts[:-1], k_lengths, strict=True):
        here = torch.arange(n)[:, None] + (0 if top else m - n)
        column = torch.arange(m)
        cells = torch.ones(n, m, dtype=torch.bool)
        cells &= True if right is None else column <= here + right
        cells &= True if left is None else column >= here - left
        seen[at : at + n, start : start + m] = cells
        at += n
    return seen


@pytest.mark.parametrize("name", PACKED)
def test_packed_biases(name: str) -> None:
    fields, top, left, right = PACKED[name]
    used = (4, 6)
    keys = padded(8, *used) if "Padded" in name else lengths(*used)
    bias = named(name, q_seqinfo=lengths(2, 3), k_seqinfo=keys, **fields)
    starts = keys.seqstart.tolist()
    q, k, v = random(1, 5, H, K), random(1, starts[-1], H, K, seed=1), random(1, starts[-1], H, K, seed=2)
    seen = blocks((2, 3), starts, used, top, left, right)
    if "Padded" in name:
        k[0, ~seen.any(0)] = v[0, ~seen.any(0)] = torch.nan  # room is never read
    clean = [x.nan_to_num(0) for x in (k, v)]
    for _ in range(3):
        out = memory_efficient_attention(q, k, v, attn_bias=bias)
        torch.testing.assert_close(out, dense(q, *clean, seen), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_paged_biases(causal: bool) -> None:
    name = "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask" if causal else "PagedBlockDiagonalPaddedKeysMask"
    table = torch.tensor([[1, 0], [3, 2]], dtype=torch.int32)
    bias = named(name, q_seqinfo=lengths(2, 3), k_seqinfo=padded(8, 3, 6), block_tables=table, page_size=4)
    q, k, v = random(1, 5, H, K), random(1, 16, H, K, seed=1), random(1, 16, H, K, seed=2)
    in_order = [x.view(1, 4, 4, H, K)[:, table.flatten().long()].flatten(1, 2) for x in (k, v)]
    seen = blocks((2, 3), (0, 8, 16), (3, 6), False, None, 0 if causal else None)
    out = memory_efficient_attention(q, k, v, attn_bias=bias)
    torch.testing.assert_close(out, dense(q, *in_order, seen), atol=1e-5, rtol=1e-5)


def test_three_and_five_dims() -> None:
    q, k, v = random(2, Q, H, K), random(2, KV, H, K, seed=1), random(2, KV, H, K, seed=2)
    everything = torch.ones(Q, KV, dtype=torch.bool)
    one = memory_efficient_attention(q[:, :, 0], k[:, :, 0], v[:, :, 0], attn_bias=BIAS[:, 0].expand(2, Q, KV))
    torch.testing.assert_close(
        one, dense(*(x[:, :, :1] for x in (q, k, v)), everything, BIAS[:, :1])[:, :, 0], atol=1e-5, rtol=1e-5
    )
    grouped = random(2, Q, H, 3, K)
    expanded = [x[:, :, :, None].expand(2, KV, H, 3, K) for x in (k, v)]
    out = memory_efficient_attention(grouped, *expanded)
    want = dense(grouped.flatten(2, 3), *(x.flatten(2, 3) for x in expanded), everything)
    assert out.shape == grouped.shape
    torch.testing.assert_close(out.flatten(2, 3), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out, memory_efficient_attention(grouped, *(x.contiguous() for x in expanded)))


def test_gradients_dropout_lse_and_dtypes() -> None:
    q, k, v = (random(2, Q, H, K, seed=n).requires_grad_() for n in range(3))
    found = torch.autograd.grad(memory_efficient_attention(q, k, v).sum(), (q, k, v))
    want = torch.autograd.grad(dense(q, k, v, torch.ones(Q, Q, dtype=torch.bool)).sum(), (q, k, v))
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
    torch.manual_seed(0)
    first = memory_efficient_attention(q, k, v, p=0.5)
    torch.manual_seed(0)
    assert torch.equal(first, memory_efficient_attention(q, k, v, p=0.5))
    assert not torch.equal(first, memory_efficient_attention(q, k, v, p=0.5))
    assert not memory_efficient_attention_forward(q, k, v).requires_grad
    out, lse = memory_efficient_attention_forward_requires_grad(q, k, v, scale=0.1, output_dtype=torch.float64)
    assert out.dtype == torch.float64
    torch.testing.assert_close(lse, (torch.einsum("bmhk,bnhk->bhmn", q, k) * 0.1).logsumexp(-1), atol=1e-5, rtol=1e-5)


def test_refusals() -> None:
    q = random(2, Q, H, K)
    with pytest.raises(InvalidArgument, match=r"op: got .*tilewise chooses its own"):
        memory_efficient_attention(q, q, q, op=(None, None))
    with pytest.raises(InvalidArgument, match=r"attn_bias: got a Gappy.*materialize"):
        memory_efficient_attention(q, q, q, attn_bias=named("Gappy"))
    bias = named("BlockDiagonalMask", q_seqinfo=lengths(Q), k_seqinfo=lengths(Q))
    with pytest.raises(InvalidArgument, match="query: got a batch of 2"):
        memory_efficient_attention(q, q, q, attn_bias=bias)
    with pytest.raises(InvalidArgument, match="key: got 3 dims"):
        memory_efficient_attention(q, q[:, :, 0], q)


def test_install_replaces_the_functions_where_they_were_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    home, user = ModuleType("xformers.ops.fmha"), ModuleType("a_user_of_xformers")
    for name in FUNCTIONS:
        setattr(home, name, lambda *args, **options: "theirs")
    user.attend = home.memory_efficient_attention  # type: ignore[attr-defined]
    for name in ("xformers", "xformers.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, home.__name__, home)
    monkeypatch.setitem(sys.modules, user.__name__, user)
    monkeypatch.setattr(xformers, "_replaced", [])
    xformers.install()
    assert user.attend is home.memory_efficient_attention is memory_efficient_attention  # type: ignore[attr-defined]
    xformers.uninstall()
    assert user.attend() == home.memory_efficient_attention() == "theirs"  # type: ignore[attr-defined]


def test_install_without_xformers_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xformers", None)
    monkeypatch.setattr(xformers, "_replaced", [])
    with pytest.raises(ImportError, match="pip install --no-deps xformers"):
        xformers.install()
