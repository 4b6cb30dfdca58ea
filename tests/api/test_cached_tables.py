"""Cached calls with lengths, tables or an `out`: what they check each time, and what they hold on to."""

import gc
import weakref

import pytest
import torch

from tilewise import InvalidArgument, Quantised, attention, paged_attention, varlen_attention
from tilewise.backends.cpu.threads import pool
from tilewise.dispatch import call_cache


def draw(*shape, seed=0, dtype=torch.float32):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


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
        call_cache.forget()
        want.append(attention(*x, **options))
    call_cache.forget()
    got = [attention(*x, **options) for x in (*calls, *calls)]
    [again] = call_cache._known.values()
    assert "_through_run" not in again.launch.__qualname__
    with pool.busy:
        got += [attention(*x, **options) for x in calls]
    for state, exact in zip(got, want * 3, strict=True):
        assert state.out.equal(exact.out)
        assert state.lse.equal(exact.lse)


def test_packed_calls_are_remembered_if_nothing_is_read_to_plan_them():
    q, k, cu_q, cu_k = draw(12, 4, 32), draw(15, 2, 32), ints(0, 2, 11), ints(0, 9, 15)
    longest = {"max_q": 12, "max_k": 15}
    varlen_attention(q, k, k, cu_q, cu_k)  # how long the sequences are is found in the offsets: another plan each time
    assert len(call_cache._known) == 0
    for count, options in enumerate((longest, longest | {"validate": False}, {"validate": False}), 1):
        varlen_attention(q, k, k, cu_q, cu_k, **options)
        assert len(call_cache._known) == count


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
        with pytest.raises(InvalidArgument, match=r"^out: got memory that it shares with q"):
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
