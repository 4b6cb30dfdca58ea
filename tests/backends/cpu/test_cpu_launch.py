"""Launches of the CPU backend: threads, repeated calls, retries, the structs that Python and kernels share."""

import ctypes
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from numba import njit

from tilewise import InvalidArgument, PagedKVCache, attention, plan
from tilewise.backends.cpu import compiler, threads
from tilewise.backends.cpu.codegen.numba_ops import item_at, params_at
from tilewise.backends.cpu.params import Params, Team, WorkItem
from tilewise.backends.cpu.threads import pool
from tilewise.dispatch import call_cache, planner
from tilewise.dispatch.planner import choose
from tilewise.testing.case import Case, make
from tilewise.testing.check import check_case


@pytest.fixture(autouse=True)
def _threads():
    """Tests that set the number of threads leave it as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@njit
def scale_and_items(address):
    p = params_at(address)
    p.q_l = p.items + 1
    return p.scale, p.page


@njit
def last_of_item(address):
    return item_at(address).splits


def test_kernels_and_python_see_the_same_structs():
    params, item = Params(items=41, scale=0.5, page=16), WorkItem(splits=7)
    assert scale_and_items(ctypes.addressof(params)) == (0.5, 16)
    assert params.q_l == 42
    assert last_of_item(ctypes.addressof(item)) == 7


@pytest.fixture
def undone(monkeypatch):
    """Plans whose items of many rows are left undone at first, as AMX leaves those with an infinity."""
    function, asked = compiler.function, []

    def without_prefill(name):
        if name == "prefill":
            asked.append(name)
            return 0 if len(asked) <= undone_plans else function(name)
        return function(name)

    undone_plans = 1
    monkeypatch.setattr(compiler, "function", without_prefill)

    def begin(plans):
        nonlocal undone_plans
        undone_plans = plans
        planner.choose.cache_clear()
        call_cache.forget()
        return asked

    yield begin
    monkeypatch.undo()
    planner.choose.cache_clear()
    call_cache.forget()


@pytest.mark.parametrize("threads", [1, 2])
def test_an_undone_item_is_done_by_a_retry(undone, threads):
    torch.set_num_threads(threads)
    q, k, v = torch.randn(3, 1, 4, 300, 64)
    want = attention(q, k, v, causal=True, return_lse=True, backend="cpu")
    asked, counts = undone(1), []
    for _ in range(4):
        state = attention(q, k, v, causal=True, return_lse=True, backend="cpu")
        assert state.out.equal(want.out)
        assert state.lse.equal(want.lse)
        counts.append(len(asked))
    assert counts[0] > 1
    assert counts[1] == counts[3]  # a struct keeps what was compiled for it


def test_a_retry_of_a_cascade(undone):
    torch.set_num_threads(2)
    cache = PagedKVCache(200, 16, kv_heads=2, head_dim=64, device="cpu")
    first = cache.create()
    cache.append([first], *torch.randn(2, 1, 2, 600, 64))
    ids = [first, *(cache.fork(first) for _ in range(5))]
    cache.append(ids, *torch.randn(2, 6, 2, 33, 64))
    q = torch.randn(6, 8, 1, 64)
    want = cache.attend(ids, q, cascade=True, return_lse=True)
    asked = undone(1)  # of the shared keys: 24 rows
    got = cache.attend(ids, q, cascade=True, return_lse=True)
    assert len(asked) > 1
    assert got.out.equal(want.out)
    assert got.lse.equal(want.lse)


def test_an_error_of_a_worker_is_raised_and_the_threads_are_free(monkeypatch):
    torch.set_num_threads(2)
    q, k, v = torch.randn(3, 1, 4, 300, 64)
    want = attention(q, k, v, backend="cpu")
    monkeypatch.setattr(pool, "parallel", None)

    def interrupted(self, task):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(threads.Worker, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            attention(q, k, v, backend="cpu")
    assert not pool.busy.locked()
    assert attention(q, k, v, backend="cpu").equal(want)


def test_scratch_memory_of_a_team_grows_with_what_is_asked_for():
    """By size alone, by the number of threads alone, and after a call that needed so much that it was given back."""
    own = threads.Pool()
    most = threads.MOST_KEPT
    for count, size in ((2, 1000), (2, 5000), (2, 300), (4, 300), (3, most + 1), (2, 9000), (4, most + 2), (5, 1)):
        team = own.acquire(count, size)
        try:
            assert team
            memories = (ctypes.c_int64 * count).from_address(team + ctypes.sizeof(Team))
            for address, scratch in zip(memories, own.scratches, strict=False):
                memory = scratch.memory.ctypes.data
                assert memory <= address
                assert address + size <= memory + scratch.memory.nbytes
        finally:
            own.release()


def test_large_scratch_memory_is_given_back():
    scratch = threads.ScratchBuffer()
    scratch.address(threads.MOST_KEPT + 1)
    assert scratch.memory.nbytes > threads.MOST_KEPT
    scratch.address(1000)
    assert scratch.memory.nbytes < 2000
    before = scratch.memory
    scratch.address(500)
    assert scratch.memory is before


class TestThreads:
    def inputs(self, length=600):
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(2, h, length, 64, generator=generator) for h in (4, 2, 2)]

    def test_several_callers_at_once(self):
        """Ten Python threads make different calls at the same time; each gets its own result."""
        torch.set_num_threads(4)
        q, k, v = self.inputs()
        calls = [
            {"causal": True},
            {"window": 50},
            {"softcap": 5.0},
            {"q_offset": 0, "causal": True},
            {"scale": 0.3},
        ] * 2
        want = [attention(q, k, v, backend="cpu", **options) for options in calls]
        with ThreadPoolExecutor(len(calls)) as pool:
            for _ in range(10):
                got = list(pool.map(lambda options: attention(q, k, v, backend="cpu", **options), calls))
                assert all(a.equal(b) for a, b in zip(got, want, strict=True))

    def test_any_number_of_threads_gives_the_same_rows(self):
        q, k, v = self.inputs()
        threads = torch.get_num_threads()
        try:
            results = []
            for n in (1, 2, 3, 8):
                torch.set_num_threads(n)
                assert f"{n} thread" in plan(q, k, v, causal=True, backend="cpu").kernel  # kept plans are of one number
                results.append(attention(q, k, v, causal=True, backend="cpu"))
        finally:
            torch.set_num_threads(threads)
        assert all(r.equal(results[0]) for r in results)

    def test_torchs_threads_and_workers_give_the_same_bits(self, monkeypatch):
        torch.set_num_threads(3)
        q, k, v = self.inputs()
        results = [attention(q, k, v, causal=True, backend="cpu")]
        if platform.system() == "Linux":
            assert pool.parallel is not None, "torch's OpenMP runtime was not found"
        monkeypatch.setattr(pool, "parallel", None)
        before = len(pool.workers)
        results.append(attention(q, k, v, causal=True, backend="cpu"))
        assert len(pool.workers) >= max(before, 2)
        assert results[0].equal(results[1])

    def test_after_a_fork(self):
        """A forked child has no threads of its parent's; it starts its own."""
        script = """
import os, signal, torch
from tilewise import attention
from tilewise.dispatch import call_cache

torch.set_num_threads(2)
q, k, v = torch.randn(3, 1, 4, 300, 64)
want = attention(q, k, v, causal=True, backend="cpu")
child = os.fork()
if child == 0:  # NumPy compares: torch's own threads do not outlive a fork
    signal.alarm(600)  # ends a child that hangs
    same = (attention(q, k, v, causal=True, backend="cpu").numpy() == want.numpy()).all()
    os._exit(0 if same else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
        subprocess.run([sys.executable, "-c", script], check=True, timeout=900)

    def test_decode_splits_and_merges(self):
        q, k, v = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 20_000, 64), torch.randn(1, 2, 20_000, 64)
        torch.set_num_threads(4)
        plan_ = plan(q, k, v, backend="cpu")
        assert plan_.splits > 1
        want = attention(q, k, v, backend="reference")
        torch.testing.assert_close(attention(q, k, v, backend="cpu"), want, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("threads", [1, 2, 4])
    @pytest.mark.parametrize(("rows", "keys"), [(1, 40), (1, 5000), (70, 700)])
    def test_a_repeated_call_is_the_first_one(self, rows, keys, threads):
        """Also alone, while the threads are busy with another call."""
        torch.set_num_threads(threads)
        call_cache.forget()
        first, other = ([torch.randn(1, 6, rows, 64), *torch.randn(2, 1, 2, keys, 64)] for _ in range(2))
        want = [attention(*x, causal=True, return_lse=True, backend="cpu") for x in (first, other)]
        call_cache.forget()
        got = [attention(*x, causal=True, return_lse=True, backend="cpu") for x in (other, first, other)][1:]
        assert len(call_cache._known) == 1
        with pool.busy:
            got.append(attention(*first, causal=True, return_lse=True, backend="cpu"))
        for a, b in zip(got, [*want, want[0]], strict=True):
            assert a.out.equal(b.out)
            assert a.lse.equal(b.lse)

    @pytest.mark.parametrize(
        "case",
        [
            Case(B=1, H=9, Hkv=3, Lq=32, Lk=2100, D=64, causal=True),
            Case(B=1, H=3, Lq=70, Lk=2100, D=64, dtype="bf16", window=(900, 0), sinks=True),
            Case(B=1, H=3, Lq=70, Lk=2100, D=64, dtype="f16", softcap=20.0),
            Case(B=1, H=3, Lq=40, Lk=2100, D=40, mask="hqk", pattern="blocks", tile=(16, 64)),
            Case(form="paged", B=2, H=6, Hkv=1, lengths=(2050, 300), q_lengths=(30, 7), D=64, causal=True),
        ],
        ids=str,
    )
    def test_few_items_of_many_rows_are_split(self, case):
        torch.set_num_threads(2)
        assert choose(make(case).checked().problem, "cpu").splits > 1
        check_case(case, "cpu")


def test_repeated_calls_are_the_same_to_the_bit():
    """The second of equal calls takes the fast path; so do other tensors of the same kind, and none other."""
    call_cache.forget()
    for options in ({}, {"causal": True}, {"return_lse": True}, {"layout": "blhd"}):
        q, k, v = (torch.randn(2, 6, 6, 32) for _ in range(3))
        first = attention(q, k, v, **options)
        again = attention(q, k, v, **options)
        other = attention(q + 1, k, v, **options)
        fresh = attention(q + 1, k, v, out=torch.empty_like(q), **options)
        for a, b in ((first, again), (other, fresh)):
            pairs = zip(a, b, strict=True) if options.get("return_lse") else [(a, b)]
            assert all(x.equal(y) for x, y in pairs)
    assert attention(q, k, v, causal=True).ne(attention(q, k, v)).any()
    with pytest.raises(InvalidArgument):
        attention(q, k, v, causal=1)
    assert attention(q.requires_grad_(), k, v).requires_grad


@pytest.mark.parametrize("which", [0, 1, 2], ids="qkv")
def test_repeated_calls_tell_strides_apart(which):
    """Tensors of one shape whose rows lie otherwise are another call; strides of dims of size 1 make no difference."""
    call_cache.forget()
    x = [torch.randn(1, 4, 1, 32), *torch.randn(2, 1, 4, 50, 32)]
    want = attention(*x, backend="cpu")
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) if i == which else t for i, t in enumerate(x)]
    odd = [t.as_strided(t.shape, (7, *t.stride()[1:])) if i == which else t for i, t in enumerate(x)]
    assert attention(*turned, backend="cpu").equal(want)
    assert len(call_cache._known) == (1 if which == 0 else 2)  # one row of a head: q is contiguous either way
    assert attention(*odd, backend="cpu").equal(want)
    assert len(call_cache._known) == (1 if which == 0 else 2)
