"""Cached calls with lengths or tables: the same bits without checks, and never for a call that differs."""

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch

from tilewise import InvalidArgument, Quantised, attention, paged_attention, varlen_attention
from tilewise.backends.cpu.threads import pool
from tilewise.dispatch import call_cache


def draw(*shape, seed=0, dtype=torch.float32):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


@pytest.fixture(autouse=True)
def _forget():
    call_cache.forget()
    yield
    call_cache.forget()


@contextmanager
def unknown():
    """A call in here is as one that was never made."""
    kept = dict(call_cache._known)
    call_cache.forget()
    yield
    call_cache.forget()
    call_cache._known.update(kept)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("stored", ["f32", "f16", "int8", "int4"])
@pytest.mark.parametrize("form", ["bhld", "blhd", "packed"])
def test_paged_calls(form, stored):
    options = {"causal": True, "window": 9, "softcap": 5.0, "return_lse": True}
    remembered = []
    for seed in range(3):
        pages = [draw(8, 4, 2, 32, seed=seed + 9), draw(8, 4, 2, 16, seed=seed + 19)]
        if stored.startswith("int"):
            pages = [Quantised.from_float(x, stored, 32) for x in pages]
        elif stored == "f16":
            pages = [x.half() for x in pages]
        table = torch.randperm(8, generator=torch.Generator().manual_seed(seed)).int().view(2, 4)
        lengths = ints(3 + seed, 16 - seed)
        q = draw(2, 4, 3, 32, seed=seed)
        extra = {}
        if form == "packed":
            q, extra = draw(6, 4, 32, seed=seed), {"cu_seqlens_q": ints(0, 2 + seed, 6), "max_q": 5}
        elif form == "blhd":
            q, extra = q.transpose(1, 2).contiguous(), {"layout": "blhd"}
        got = paged_attention(q, *pages, table, lengths, validate=False, **extra, **options)
        remembered.append(len(call_cache._known))
        with unknown():
            want = paged_attention(q, *pages, table, lengths, **extra, **options)
        assert got.out.equal(want.out)
        assert got.lse.equal(want.lse)
    assert remembered == [1, 1, 1]


def test_dense_calls():
    k, v = draw(2, 2, 20, 32, seed=1), draw(2, 2, 20, 32, seed=2)
    for seed, (lengths, offsets) in enumerate([(ints(5, 20), ints(1, 7)), (ints(0, 3), ints(9, 2))]):
        q = draw(2, 4, 3, 32, seed=seed)
        for extra in ({}, {"q_offset": offsets}, {"q_offset": 2}):
            want = attention(q, k, v, kv_lengths=lengths, causal=True, **extra)
            got = attention(q, k, v, kv_lengths=lengths, causal=True, validate=False, **extra)
            assert got.equal(want)
    assert len(call_cache._known) == 6
    assert attention(q, k, v, kv_lengths=lengths, validate=False).shape == q.shape
    assert len(call_cache._known) == 7  # not causal: another call


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
@pytest.mark.parametrize("stored", ["int8", "int4", "fp8_e4m3"])
def test_quantised_calls_without_tables(stored, layout):
    for seed in range(3):
        q, k, v = (draw(2, n, n, 32, seed=seed + n) for n in (4, 2, 2))
        k, v = (Quantised.from_float(x, stored, 32) for x in (k, v))
        got = [attention(q, k, v, layout=layout, causal=True, q_offset=7, return_lse=True) for _ in range(2)]
        assert got[1].out.equal(got[0].out)
        assert got[1].lse.equal(got[0].lse)
        with unknown():
            want = attention(q, k, v, layout=layout, causal=True, q_offset=7, return_lse=True)
        assert got[1].out.equal(want.out)
        assert got[1].lse.equal(want.lse)
    assert len(call_cache._known) == 1
    attention(q, k, v, layout=layout, causal=True, q_offset=8)
    assert len(call_cache._known) == 2
    with pytest.raises(InvalidArgument, match="q_offset"):
        attention(q, k, v, layout=layout, causal=True, q_offset="end")


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
@pytest.mark.parametrize("keys", [40, 5000])
def test_quantised_calls_are_launched_by_addresses(keys, layout):
    """Those of scales too; in one thread while the others are busy."""
    shape = (1, 2, keys, 64) if layout == "bhld" else (1, keys, 2, 64)
    calls = []
    for seed in range(2):
        k, v = (draw(*shape, seed=seed + n) for n in (10, 20))
        q = draw(1, 4, 1, 64, seed=seed) if layout == "bhld" else draw(1, 1, 4, 64, seed=seed)
        calls.append((q, Quantised.from_float(k, "int8", 64), Quantised.from_float(v, "int4", 64)))
    options = {"layout": layout, "return_lse": True, "backend": "cpu"}
    want = []
    for x in calls:
        with unknown():
            want.append(attention(*x, **options))
    got = [attention(*x, **options) for x in (*calls, *calls)]
    [again] = call_cache._known.values()
    assert "_through_run" not in again.launch.__qualname__
    with pool.busy:
        got += [attention(*x, **options) for x in calls]
    for state, exact in zip(got, want * 3, strict=True):
        assert state.out.equal(exact.out)
        assert state.lse.equal(exact.lse)


@pytest.mark.parametrize("stored", ["f32", "int8"])
def test_packed_calls(stored):
    for seed in range(3):
        q, k, v = draw(12, 4, 32, seed=seed), draw(15, 2, 32, seed=seed + 9), draw(15, 2, 32, seed=seed + 19)
        if stored == "int8":
            k, v = (Quantised.from_float(x, stored, 32) for x in (k, v))
        cu_q, cu_k = ints(0, 2 + seed, 11), ints(0, 9 - seed, 15)
        options = {"causal": True, "window": 5, "max_q": 12, "max_k": 15, "return_lse": True}
        for lengths in (None, ints(4, 6)):
            want = varlen_attention(q, k, v, cu_q, cu_k, kv_lengths=lengths, **options)
            got = varlen_attention(q, k, v, cu_q, cu_k, kv_lengths=lengths, validate=False, **options)
            assert got.out.equal(want.out)
            assert got.lse.equal(want.lse)
    assert len(call_cache._known) == 4
    varlen_attention(q, k, v, cu_q, cu_k)  # how long the sequences are is found in the offsets: another plan each time
    assert len(call_cache._known) == 4
    varlen_attention(q, k, v, cu_q, cu_k, validate=False)  # planned for all rows in one sequence
    assert len(call_cache._known) == 5


@pytest.mark.parametrize("validate", [None, True])
def test_values_are_checked_unless_they_are_not_to_be(validate):
    """Those of a remembered call too."""
    q, pages = draw(2, 4, 1, 32), draw(8, 4, 2, 32)
    table, lengths, offsets = torch.arange(8, dtype=torch.int32).view(2, 4), ints(5, 9), ints(3, 4)
    for flag in (False, validate):
        for _ in range(2):
            paged_attention(q, pages, pages, table, lengths, validate=flag, q_offset=offsets, causal=True)
    assert len(call_cache._known) == 2

    def call(table, lengths, offsets):
        paged_attention(q, pages, pages, table, lengths, validate=validate, q_offset=offsets, causal=True)

    with pytest.raises(InvalidArgument, match=r"context_lens\[1\]"):
        call(table, ints(5, 99), offsets)
    with pytest.raises(InvalidArgument, match=r"block_table\[1, 2\]"):
        call(table + table.eq(6) * 2, lengths, offsets)
    call(table + table.eq(7) * 9, lengths, offsets)  # past the length: never read
    with pytest.raises(InvalidArgument, match=r"q_offset\[0\]"):
        call(table, lengths, ints(2**30, 1))


@pytest.mark.parametrize("validate", [None, True])
def test_offsets_are_checked_in_remembered_calls(validate):
    q, k = draw(7, 2, 32), draw(9, 2, 32)

    def call(cu_q, cu_k, lengths):
        options = {"max_q": 4, "max_k": 6, "kv_lengths": lengths, "validate": validate}
        return varlen_attention(q, k, k, cu_q, cu_k, **options)

    good = ints(0, 3, 7), ints(0, 5, 9), ints(5, 2)
    assert call(*good).equal(call(*good))
    assert len(call_cache._known) == 1
    for place, wrong, match in (
        (0, ints(1, 3, 7), r"cu_seqlens_q\[0\]"),
        (0, ints(0, 8, 7), r"cu_seqlens_q\[2\]: got 7"),
        (0, ints(0, 1, 7), "max_q: got 4"),
        (1, ints(0, 5, 10), r"cu_seqlens_k\[-1\]: got 10"),
        (2, ints(5, 5), r"kv_lengths\[1\]"),
    ):
        with pytest.raises(InvalidArgument, match=match):
            call(*(wrong if i == place else x for i, x in enumerate(good)))


def test_what_needs_a_check_is_checked():
    q, pages = draw(2, 4, 1, 32), draw(8, 4, 2, 32)
    table, lengths = torch.arange(8, dtype=torch.int32).view(2, 4), ints(5, 9)
    want = paged_attention(q, pages, pages, table, lengths, validate=False)
    strided = torch.zeros(2, 4, 1, 64)[..., ::2].copy_(q)
    assert paged_attention(strided, pages, pages, table, lengths, validate=False).equal(want)
    assert paged_attention(q, pages, pages, table.long(), lengths, validate=False).equal(want)
    shifted = torch.zeros(2 * 4 * 32 + 1)[1:].view(2, 4, 1, 32).copy_(q)  # not aligned: on a CPU the same plan
    assert paged_attention(shifted, pages, pages, table, lengths, validate=False).equal(want)
    assert len(call_cache._known) == 1
    for wrong in ({"scale": "a"}, {"window": 0}, {"causal": 1}, {"softcap": -1.0}, {"layout": "lbhd"}, {"max_q": 3}):
        with pytest.raises(InvalidArgument):
            paged_attention(q, pages, pages, table, lengths, validate=False, **wrong)
    with pytest.raises(InvalidArgument, match="requires grad"):
        paged_attention(q.clone().requires_grad_(), pages, pages, table, lengths, validate=False)
    with pytest.raises(InvalidArgument):
        paged_attention(q[:1], pages, pages, table, lengths, validate=False)


@pytest.mark.parametrize("form", ["plain", "quantised", "paged"])
def test_calls_that_write_to_the_callers_memory(form):
    """Remembered as any other; memory that is read is refused each time."""
    pool = torch.zeros(3, 2, 4, 6, 32)
    q, k = pool[0].copy_(draw(2, 4, 6, 32)), draw(2, 2, 6, 32, seed=1)
    call, rest = attention, (k, k)
    if form == "quantised":
        rest = (Quantised.from_float(k, "int8", 32), k)
    elif form == "paged":
        table = torch.arange(4, dtype=torch.int32).view(2, 2)
        call, rest = paged_attention, (draw(4, 4, 2, 32), draw(4, 4, 2, 32, seed=2), table, ints(8, 7))
    want = call(q, *rest)
    known = len(call_cache._known)
    for out in (pool[1], pool[2], pool[1].zero_()):
        assert call(q, *rest, out=out) is out
        assert out.equal(want)
    assert len(call_cache._known) == known + 1
    near = pool.flatten()[q.numel() - 8 :][: q.numel()].view(q.shape)
    for wrong in (pool[0], near):
        with pytest.raises(InvalidArgument, match=r"^out: got memory that q is in"):
            call(q, *rest, out=wrong)


def remembered():
    return next(reversed(call_cache._known.values()))


def test_tables_are_checked_where_a_repeated_call_reads_them():
    """The CPU's launcher looks at tables itself: what is wrong is refused in words, and nothing is written."""
    call_cache.forget()
    q, pages = torch.randn(4, 2, 16), torch.randn(3, 4, 2, 16)
    out = torch.empty_like(q)
    right = {
        "table": torch.tensor([[0, 1], [2, 99]], dtype=torch.int32),
        "lengths": torch.tensor([8, 3], dtype=torch.int32),
        "cu": torch.tensor([0, 1, 3], dtype=torch.int32),
    }

    def call(**other):
        x = right | {name: torch.tensor(value, dtype=torch.int32) for name, value in other.items()}
        options = {"cu_seqlens_q": x["cu"], "max_q": 2, "causal": True, "out": out}
        return paged_attention(q, pages, pages, x["table"], x["lengths"], **options).clone()

    want = call()
    assert remembered().checks_tables
    out.fill_(7)
    assert call().equal(want)
    assert (want[3] == 0).all()  # a row of no sequence
    out.fill_(7)
    wrong = {
        "block_table": {"table": [[0, 3], [2, 0]]},
        "context_lens": {"lengths": [9, 3]},
        "cu_seqlens_q": {"cu": [0, 2, 1]},
        "max_q": {"cu": [0, 0, 3]},
    }
    for name, values in wrong.items():
        with pytest.raises(InvalidArgument, match=name.replace("[", r"\[")):
            call(**values)
    assert (out == 7).all()
    assert call(table=[[0, 1], [2, -5]]).equal(want)  # past the length
    other = call(table=[[2, 1], [0, 0]], cu=[0, 2, 4], lengths=[6, 4])
    call_cache.forget()
    assert call(table=[[2, 1], [0, 0]], cu=[0, 2, 4], lengths=[6, 4]).equal(other)


@pytest.mark.parametrize("split_size", [None, 2])
def test_lengths_of_a_repeated_call_are_its_own(split_size):
    call_cache.forget()
    q, k, v = torch.randn(3, 4, 1, 32), torch.randn(3, 2, 9, 32), torch.randn(3, 2, 9, 32)
    cases = [torch.tensor(n, dtype=torch.int32) for n in ([9, 1, 4], [0, 9, 9], [2, 2, 2], [9, 9, 9])]
    found = [attention(q, k, v, kv_lengths=n, split_size=split_size, return_lse=True) for n in cases]
    assert remembered().checks_tables
    for lengths, state in zip(cases, found, strict=True):
        call_cache.forget()
        want = attention(q, k, v, kv_lengths=lengths, split_size=split_size, return_lse=True)
        assert state.out.equal(want.out)
        assert state.lse.equal(want.lse)


def test_a_remembered_call_keeps_none_of_its_callers_tensors():
    """A block table is large; thousands of calls may be remembered."""
    given = {
        "q": draw(6, 4, 16), "k": draw(9, 4, 2, 16), "v": draw(9, 4, 2, 16), "table": ints([0, 1, 2], [3, 4, 5]),
        "lengths": ints(11, 7), "cu": ints(0, 4, 6),
    }  # fmt: skip

    def paged(q, k, v, table, lengths, cu):
        return paged_attention(q, k, v, table, lengths, cu_seqlens_q=cu, max_q=4, causal=True)

    def varlen(q, k, v, table, lengths, cu):
        k, v = k.flatten(0, 1)[:6], v.flatten(0, 1)[:6]
        return varlen_attention(q, k, v, cu, cu, max_q=4, max_k=4, causal=True)

    for call in (paged, varlen):
        tensors = {name: x.clone() for name, x in given.items()}
        out = call(**tensors)
        assert len(call_cache._known) == 1
        gone = {name: weakref.ref(x) for name, x in {**tensors, "out": out}.items()}
        want = out.clone()
        del tensors, out
        gc.collect()
        assert not [name for name, x in gone.items() if x() is not None]
        assert call(**given).equal(want)  # by the remembered call
        call_cache.forget()
