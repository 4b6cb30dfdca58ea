"""Bad arguments of the caches are refused by name, and change nothing."""

import numpy as np
import pytest
import torch

from tilewise import InvalidArgument, KVCache, PagedKVCache

X = torch.randn(2, 1, 3, 8)


def filled(ring=False):
    cache = KVCache(2, 1, 4, 8, ring=ring)
    cache.append(X, X)
    return cache


def wrapped():
    """A ring that has lost its first tokens."""
    cache = filled(ring=True)
    cache.append(X, X)
    return cache


def pages():
    cache = PagedKVCache(8, 2, 1, 8)
    first = cache.create()
    cache.append([first], X[:1], X[:1])
    return cache, [first, cache.fork(first)]


def attend(**options):
    cache, sequences = pages()
    cache.attend(sequences, X[:, :, :1], **options)


def new_batch():
    cache, sequences = pages()
    return cache.extend(sequences[:1], 1)


REFUSED = [
    ("device", lambda: KVCache(1, 1, 4, 8, device="bogus")),
    ("device", lambda: KVCache(1, 1, 4, 8, device=[])),
    ("device", lambda: PagedKVCache(1, 1, 4, 8, device="bogus")),
    ("device", lambda: KVCache.load("a", device="bogus")),
    ("device", lambda: PagedKVCache.load("a", device="bogus")),
    ("batch", lambda: KVCache(2**40, 1, 4, 8)),
    ("batch", lambda: KVCache(10**400, 1, 4, 8)),
    ("batch", lambda: KVCache(10**5000, 1, 4, 8)),
    ("batch", lambda: KVCache(-(10**5000), 1, 4, 8)),
    ("kv_heads", lambda: KVCache(1, 2**40, 4, 8)),
    ("layers", lambda: PagedKVCache(4, 4, 1, 8, layers=2**40)),
    ("layers", lambda: PagedKVCache(0, 4, 1, 8, layers=2**16 + 1)),  # a sequence would take memory without a page
    ("layers", lambda: pages()[0].export(0, layers=1)),
    ("layers", lambda: pages()[0].export(0, layers="ab")),
    ("layers", lambda: pages()[0].export(0, layers=(0, 1, 2))),
    ("heads", lambda: pages()[0].export(0, heads=(0, 1.0))),
    ("heads", lambda: pages()[0].export(0, heads=(None, 1))),
    ("first_head", lambda: pages()[0].export(0, first_head="1")),
    ("first_head", lambda: pages()[0].export(0, first_head=-1)),
    ("first_head", lambda: pages()[0].export(0, first_head=2**20)),
    ("first_head", lambda: pages()[0].import_(pages()[0].export(0), first_head=0.5)),
    ("page_size", lambda: PagedKVCache(4, 2**40, 1, 8)),
    ("batch x kv_heads x capacity", lambda: KVCache(2**31 - 1, 2**31 - 1, 2**31 - 1, 8)),
    ("batch x kv_heads x capacity", lambda: KVCache(2**31 - 1, 2**20, 1, 8)),
    ("num_pages x page_size x kv_heads x layers", lambda: PagedKVCache(2**31 - 1, 2**20, 1, 8)),
    ("group", lambda: KVCache(1, 1, 4, 8, group=0)),
    ("group", lambda: KVCache(1, 1, 4, 8, group=[])),
    ("group", lambda: PagedKVCache(1, 1, 4, 8, group=None)),
    ("group", lambda: KVCache(1, 1, 4, 8, "int8", group=np.array([1, 2]))),
    ("dtype", lambda: filled().keys(0, "a")),
    ("dtype", lambda: filled().values(0, None)),
    ("dtype", lambda: pages()[0].keys(0, 0, "a")),
    ("cascade", lambda: attend(cascade=torch.tensor([1.0, 2.0]))),
    ("cascade", lambda: attend(cascade="yes")),
    ("backend", lambda: attend(backend=[])),
    ("backend", lambda: attend(backend=[], cascade=True)),
    ("scale", lambda: attend(scale=[], cascade=True)),
    ("layout", lambda: attend(layout=np.array([1, 2]))),
    ("layout", lambda: filled().attend(X, layout=np.array([1, 2]))),
    ("k", lambda: filled().append(np.float32(1), X)),
    ("v", lambda: filled().append(X[:, :, :1], np.int64(1))),
    ("q", lambda: filled().attend(np.float32(1))),
    ("mask", lambda: filled().attend(X, mask=np.float32(1))),
    ("k", lambda: new_batch().write(np.float32(1), X)),
    ("v", lambda: new_batch().write(X[:1, :, :1], np.float32(1))),
    ("q", lambda: pages()[0].view([0]).attend(np.float32(1))),
    *(
        ("q_offset", lambda make=make, wrong=wrong: make().attend(X, q_offset=wrong))
        for make in (filled, wrapped)
        for wrong in (np.float32(1), "a", np.array(["a", "b"]), np.array([1.5, 2]), torch.tensor([1, 2, 3]), True)
    ),
]


@pytest.mark.parametrize(("name", "make"), REFUSED, ids=[f"{i}-{name}" for i, (name, _) in enumerate(REFUSED)])
def test_refused_by_name(name, make):
    with pytest.raises(InvalidArgument) as caught:
        make()
    assert str(caught.value).startswith(f"{name}: got ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_gpu_that_is_not_there_is_refused():
    for make in (lambda: KVCache(1, 1, 4, 8, device="cuda"), lambda: PagedKVCache(1, 1, 4, 8, device="cuda")):
        with pytest.raises(InvalidArgument, match=r"^device: got 'cuda'"):
            make()


@pytest.mark.parametrize("make", [filled, wrapped])
def test_offsets_may_be_numpy_integers(make):
    cache = make()
    start = int(cache.lengths[0]) - 3
    want = cache.attend(X, q_offset=start)
    for offset in (np.int64(start), np.full(2, start), torch.full((2,), start)):
        assert torch.equal(cache.attend(X, q_offset=offset), want)


def test_tensors_without_memory_are_not_written():
    """A kernel that reads where there is nothing ends the process."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.randn(1, 2, 3, 8)
    cache, paged = KVCache(1, 2, 8, 8, "f32"), PagedKVCache(4, 4, 2, 8, "f32")
    sequence = paged.create()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    for append in (cache.append, lambda k, v: paged.append([sequence], k, v)):
        with pytest.raises(InvalidArgument, match=r"k: got a FakeTensor, expected a plain torch\.Tensor"):
            append(fake, fake)
        with pytest.raises(InvalidArgument, match=r"k: got a tensor inside a torch\.func transform"):
            torch.vmap(lambda k, append=append: append(k, x))(x[None])
    assert cache.lengths.tolist() == [0]
    assert paged.length(sequence) == 0


@pytest.mark.parametrize("dtype", ["f32", "int8"])
def test_gradients_do_not_end_in_a_cache_unsaid(dtype):
    x = torch.ones(1, 1, 2, 64, requires_grad=True)
    rows, pages = KVCache(1, 1, 8, 64, dtype), PagedKVCache(4, 4, 1, 64, dtype)
    sequence = pages.create()
    static = pages.static_batch(1, 8, 2)
    static.extend([sequence], 2)
    calls = [
        lambda k, v: rows.append(k, v),
        lambda k, v: pages.append(sequence, k, v),
        lambda k, v: pages.extend(sequence, 2).write(k, v),
        lambda k, v: static.write(k, v),
    ]
    for call in calls:
        for k, v in ((x, x.detach()), (x.detach(), x)):
            with pytest.raises(InvalidArgument, match=f"{'kv'[k is not x]}: got a tensor that requires grad.*no_grad"):
                call(k, v)
    assert rows.lengths.tolist() == [0]
    with torch.no_grad():
        rows.append(x, x)
    rows.append(x.detach(), x.detach())
