"""No call keeps its tensors: they are freed when the caller drops them, without Python's garbage collector."""

import gc
import weakref

import pytest
import torch

from tilewise import KVCache, PagedKVCache, TileMap, attention, attention_backward, merge, varlen_attention
from tilewise.compat.flash_attn import flash_attn_func
from tilewise.dispatch import call_cache

D, H, L = 64, 2, 70


@pytest.fixture
def collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def inputs(grad=False, shape=(1, H, L, D)):
    return [torch.randn(shape, requires_grad=grad) for _ in range(3)]


def backward_of(**options):
    def call():
        q, k, v = inputs(grad=True)
        out = attention(q, k, v, **options)
        out.sum().backward()
        return q, k, v, out, q.grad

    return call


def forward_of(**options):
    def call():
        q, k, v = inputs()
        state = attention(q, k, v, return_lse=True, **options)
        return q, k, v, *state

    return call


def own_backward():
    q, k, v = inputs()
    out, lse = attention(q, k, v, return_lse=True)
    return q, out, lse, *attention_backward(q, k, v, out, lse, q)[:3]


def packed():
    q, k, v = inputs(grad=True, shape=(L, H, D))
    cu = torch.tensor([0, 30, L], dtype=torch.int32)
    out = varlen_attention(q, k, v, cu, cu, causal=True)
    out.sum().backward()
    return q, k, v, cu, out


def merged():
    states = [attention(*inputs(), return_lse=True) for _ in range(2)]
    return *states[0], *merge(states)


def drop_in():
    q, k, v = inputs(grad=True)
    out = flash_attn_func(q, k, v, causal=True)
    out.sum().backward()
    return q, out


def over_rows():
    cache = KVCache(1, H, L, D)
    q, k, v = inputs()
    cache.append(k, v)
    return cache.store.k.data, q, k, v, cache.attend(q)


def over_pages():
    cache = PagedKVCache(20, 16, H, D)
    q, k, v = inputs()
    ids = [cache.create()]
    cache.append(ids, k, v)
    ids += [cache.fork(0), cache.fork(0)]
    cache.append(ids, *(x[:, :, :1].expand(3, -1, -1, -1) for x in (k, v)))
    rows = q[:, :, :1].repeat(3, 1, 1, 1)
    return cache.store.k.data, rows, cache.attend(ids, rows, cascade=True), cache.attend(ids, rows, cascade=False)


LENGTHS = {"kv_lengths": torch.tensor([40])}
MASK = torch.randn(L, L)
CALLS = {
    "forward": forward_of(),
    "mask": forward_of(mask=MASK, tile_map=TileMap.from_mask(MASK, (32, 32))),
    "lengths": forward_of(**LENGTHS),
    "positions": forward_of(causal=True, q_offset=torch.tensor([3]), k_stride=torch.tensor([2])),
    "torch": forward_of(backend="torch"),
    "backward": backward_of(causal=True),
    "backward, lengths": backward_of(**LENGTHS),
    "backward, mask": backward_of(mask=MASK),
    "backward, function": backward_of(score_mod=lambda s, b, h, i, j: s * 0.5),
    "attention_backward": own_backward,
    "packed": packed,
    "merge": merged,
    "flash_attn_func": drop_in,
    "KVCache": over_rows,
    "PagedKVCache": over_pages,
}


@pytest.mark.parametrize("name", CALLS)
def test_tensors_of_a_call_are_freed(name, collector):
    """First calls and repeated ones."""
    call_cache.forget()
    for _ in range(2):
        left = [weakref.ref(x) for x in CALLS[name]()]
        assert [x().shape for x in left if x() is not None] == []
