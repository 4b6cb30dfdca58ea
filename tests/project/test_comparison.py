"""The first column of the comparison is what tilewise does: a check for each row, which runs what its cell says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tilewise
from tilewise import PagedKVCache, Quantised, TileMap, attention, distributed, varlen_attention
from tilewise.backends.gpu.coverage import KERNELS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "comparison.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text(encoding="utf-8").partition("\n## ")[0].splitlines()
    if line.startswith("|") and not line.startswith("|---")
]
L = 12
CU = torch.tensor([0, 5, L], dtype=torch.int32)


def qkv(H: int = 2, Hkv: int = 2, D: int = 8, Dv: int = 8, Lq: int = L, grad: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = (1, H, Lq, D), (1, Hkv, L, D), (1, Hkv, L, Dv)
    return [torch.randn(shape, requires_grad=grad) for shape in shapes]


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any = 0.0, seen: Any = None) -> torch.Tensor:
    """Attention with cells added and hidden, written out."""
    scores = q @ k.mT / q.shape[-1] ** 0.5 + bias
    scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v


ROW, COLUMN = torch.arange(L)[:, None], torch.arange(L)
BEFORE = COLUMN <= ROW


def takes(seen: torch.Tensor | None = None, bias: Any = 0.0, **options: Any) -> Callable[[], None]:
    """A call with these options is attention with these cells."""

    def check() -> None:
        q, k, v = qkv()
        same(attention(q, k, v, **options), dense(q, k, v, bias, seen))

    return check


def runs_on_a_cpu() -> None:
    assert tilewise.plan(*qkv(), backend="cpu").backend == "cpu"


def ran_elsewhere() -> None:
    families = (family for backend in KERNELS.values() for family in backend.values())
    known = [found for family in families for found in family.values()]
    assert {arch for found in known for arch in found or ()} == {"sm_90"}


def backward() -> None:
    q, k, v = qkv(grad=True)
    found = torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))
    for a, b in zip(found, torch.autograd.grad(dense(q, k, v).sum(), (q, k, v)), strict=True):
        same(a, b)


def head_dims() -> None:
    for D in (1, 80, 576):
        q, k, v = qkv(D=D, Dv=D)
        same(attention(q, k, v), dense(q, k, v))
    with pytest.raises(tilewise.InvalidArgument):
        attention(*qkv(D=577))


def widths() -> None:
    q, k, v = qkv(D=24, Dv=16)
    same(attention(q, k, v), dense(q, k, v))


def groups() -> None:
    q, k, v = qkv(H=4)
    same(attention(q, k, v), dense(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))


def offsets() -> None:
    q, k, v = qkv(Lq=3)
    for offset in (0, 4, L - 3):
        seen = torch.arange(L) <= torch.arange(3)[:, None] + offset
        same(attention(q, k, v, causal=True, q_offset=offset), dense(q, k, v, seen=seen))


def skipped_tiles() -> None:
    states = TileMap.from_mask(BEFORE[None, None], (4, 4)).states[0, 0]
    assert (states == 0).sum() == 3
    tile_map = TileMap.from_mask(BEFORE[None, None], (4, 4))
    q, k, v = qkv()
    same(attention(q, k, v, mask=BEFORE, tile_map=tile_map), dense(q, k, v, seen=BEFORE))


def chosen() -> None:
    q, k, v = qkv()
    keys = torch.tensor([[0, 3, 7]]).expand(1, L, 3).contiguous().int()
    same(attention(q, k, v, key_indices=keys), dense(q, k, v, seen=torch.isin(COLUMN, torch.tensor([0, 3, 7]))))
    blocks = torch.tensor([[[0], [0], [2]]], dtype=torch.int32)
    seen = torch.tensor([0, 0, 2]).repeat_interleave(4)[:, None] == (COLUMN // 4)
    same(attention(q, k, v, block_indices=blocks, block_size=4), dense(q, k, v, seen=seen))


def softcap() -> None:
    q, k, v = qkv()
    scores = 2 * torch.tanh(q @ k.mT / 8**0.5 / 2)
    same(attention(q, k, v, softcap=2.0), scores.softmax(-1) @ v)


def sinks() -> None:
    q, k, v = qkv()
    sink = torch.tensor([0.5, -1.0])
    scores = torch.cat([q @ k.mT / 8**0.5, sink.view(1, 2, 1, 1).expand(1, 2, L, 1)], -1)
    same(attention(q, k, v, sinks=sink), scores.softmax(-1)[..., :-1] @ v)


def dropout() -> None:
    q, k, v = qkv()
    outs = [attention(q, k, v, dropout_p=0.5, dropout_seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def functions() -> None:
    q, k, v = qkv()
    out = attention(q, k, v, score_mod=lambda s, b, h, i, j: s * 2, mask_mod=lambda b, h, i, j: j <= i)
    same(out, dense(q, k, v, q @ k.mT / 8**0.5, BEFORE))


def packed() -> None:
    q, k, v = qkv()
    seen = (COLUMN < 5) == (ROW < 5)
    rows = (x[0].transpose(0, 1) for x in (q, k, v))
    same(varlen_attention(*rows, CU, CU).transpose(0, 1)[None], dense(q, k, v, seen=seen))


def pages() -> None:
    q, k, v = qkv(Lq=1)
    for size in (1, 3, 16):
        cache = PagedKVCache(L, size, 2, 8)
        sequence = cache.create()
        cache.append([sequence], k, v)
        same(cache.attend([sequence], q), dense(q, k, v))


def stored() -> None:
    q, k, v = qkv(D=64, Dv=64)
    for name in ("int8", "int4", "codebook4", "fp8_e4m3"):
        stored = [Quantised.from_float(x, name) for x in (k, v)]
        same(attention(q, *stored), dense(q, *(x.dequantise() for x in stored)))


def merging() -> None:
    q, k, v = qkv()
    parts = [attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 5), slice(5, L))]
    same(tilewise.merge(parts).out, dense(q, k, v))
    same(parts[0].lse, (q @ k[:, :, :5].mT / 8**0.5).logsumexp(-1))


def statistics() -> None:
    q, k, v = qkv()
    scores = q @ k.mT / 8**0.5
    p = scores.softmax(-1)
    _, aux = attention(q, k, v, return_aux=("max_logits", "entropy", "key_mass"))
    same(aux.max_logits, scores.amax(-1))
    same(aux.entropy, -(p * p.log()).sum(-1))
    same(aux.key_mass, p.sum(-2))


def gradients_of_scores() -> None:
    q, k, v = qkv()
    mask, k_bias = torch.randn(1, 1, L, L, requires_grad=True), torch.randn(1, 2, L, requires_grad=True)
    found = torch.autograd.grad(attention(q, k, v, mask=mask, k_bias=k_bias).square().sum(), (mask, k_bias))
    want = torch.autograd.grad(dense(q, k, v, mask + k_bias[:, :, None]).square().sum(), (mask, k_bias))
    for a, b in zip(found, want, strict=True):
        same(a, b)


def same_gradients() -> None:
    q, k, v = qkv(grad=True)
    runs = [torch.autograd.grad(attention(q, k, v).square().sum(), (q, k, v)) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def more_derivatives() -> None:
    q, k, v = qkv()
    _, moved = torch.func.jvp(lambda q: attention(q, k, v), (q,), (torch.ones_like(q),))
    _, want = torch.func.jvp(lambda q: dense(q, k, v), (q,), (torch.ones_like(q),))
    same(moved, want)
    x = qkv(grad=True)[0]
    once = torch.autograd.grad(attention(x, k, v).square().sum(), x, create_graph=True)[0]
    twice = torch.autograd.grad(dense(x, k, v).square().sum(), x, create_graph=True)[0]
    same(torch.autograd.grad(once.square().sum(), x)[0], torch.autograd.grad(twice.square().sum(), x)[0])


def same_bits_in_any_batch() -> None:
    torch.manual_seed(0)
    q, (k, v) = torch.randn(3, 2, 1, 8), torch.randn(2, 3, 2, 200, 8)
    whole = attention(q, k, v, split_size=64)
    assert all(
        torch.equal(attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], split_size=64)[0], whole[i]) for i in range(3)
    )


def ranks() -> None:
    q, k, v = (torch.empty(1, 2, 64, 8, device="meta") for _ in range(3))
    found = distributed.plan(q, k, v, mesh=4, causal=True, window=16, sinks=torch.zeros(2))
    assert len(found.ranks) == 4


def arrays() -> None:
    q, k, v = (x.numpy() for x in qkv())
    out = attention(q, k, v)
    assert isinstance(out, np.ndarray)
    same(torch.from_numpy(out), dense(*qkv()))


CHECKS: dict[str, tuple[str, Callable[[], None]]] = {
    "fused kernels": ("CPU, NVIDIA", runs_on_a_cpu),
    "ran on AMD or Apple GPUs": ("no", ran_elsewhere),
    "backward": ("yes", backward),
    "runs on a CPU": ("yes", runs_on_a_cpu),
    "float32": ("yes", takes()),
    "head dim": ("1 to 576", head_dims),
    "K and V of different width": ("yes", widths),
    "GQA, MQA": ("yes", groups),
    "causal if Lq != Lk": ("any offset", offsets),
    "sliding window": ("yes", takes(BEFORE & (ROW - COLUMN < 4), causal=True, window=4)),
    "chunked": ("yes", takes(BEFORE & (ROW // 4 == COLUMN // 4), causal=True, chunk=4)),
    "strided positions (every n-th token)": ("yes", takes(3 * COLUMN <= ROW, causal=True, q_offset=0, k_stride=3)),
    "bool mask": ("yes", takes((ROW + COLUMN) % 3 > 0, mask=(ROW + COLUMN) % 3 > 0)),
    "additive mask": ("yes", takes(bias=(ROW - COLUMN) / 10, mask=(ROW - COLUMN) / 10)),
    "mask and causal in one call": (
        "yes",
        takes(BEFORE & ((COLUMN % 3 > 0) | (ROW == 0)), mask=(COLUMN % 3 > 0) | (ROW == 0), causal=True),
    ),
    "score and mask functions that you write": ("yes", functions),
    "skips tiles that a mask hides": ("yes", skipped_tiles),
    "per-query lists of keys or key blocks": ("yes", chosen),
    "softcap": ("yes", softcap),
    "query bias plus key bias": (
        "yes",
        takes(bias=ROW / 9 - COLUMN / 7, q_bias=(ROW.T / 9)[None], k_bias=-(COLUMN / 7)[None, None]),
    ),
    "ALiBi": ("yes", takes(bias=-0.3 * (ROW - COLUMN).abs(), alibi_slopes=torch.full((2,), 0.3))),
    "sinks": ("yes", sinks),
    "dropout": ("yes", dropout),
    "packed sequences": ("yes", packed),
    "paged KV": ("any page size", pages),
    "quantised KV": ("int8, int4, 4-bit codebook, fp8", stored),
    "lse, merging partial results": ("both", merging),
    "largest score, entropy, sums of weights by key": ("yes", statistics),
    "gradients of masks and biases": ("yes", gradients_of_scores),
    "gradients have the same bits each time": ("yes, by default", same_gradients),
    "forward mode, gradients of gradients": ("yes", more_derivatives),
    "the same bits in any batch": ("yes, by `split_size`", same_bits_in_any_batch),
    "over ranks, with windows and sinks": ("yes", ranks),
    "NumPy and DLPack arrays": ("yes", arrays),
}


def test_every_row_has_a_check_and_every_cell_a_word() -> None:
    head, *rows = ROWS
    assert {row[0]: row[1] for row in rows} == {name: cell for name, (cell, _) in CHECKS.items()}
    assert all(len(row) == len(head) and all(row) for row in rows)


def test_every_column_says_what_was_read_and_when() -> None:
    sources = PAGE.read_text(encoding="utf-8").partition("\n## ")[2]
    for name in ROWS[0][2:]:
        assert any(
            line.startswith(f"| {name} |") and line.rstrip(" |")[-10:-6] == "2026" for line in sources.splitlines()
        ), name


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of torch's own imports
def test_tilewise_does_what_its_cell_says(name: str) -> None:
    CHECKS[name][1]()
