"""Decode on the CPU: prefetch, scales, pages."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from naive import assert_as_torch
from tilewise import Quantised, attention, paged_attention, varlen_attention
from tilewise.backends.cpu import compiler, config
from tilewise.backends.cpu.gemm import amx, gemv_vnni
from tilewise.dispatch import call_cache, planner
from tilewise.testing.case import Case, Inputs
from tilewise.testing.check import check_call, check_case


@pytest.fixture
def cache_of(monkeypatch):
    """Sets the size of the L2 cache, past which rows are prefetched."""

    def set_size(size):
        monkeypatch.setattr(config, "second_level_cache", lambda: size)
        call_cache.forget()
        planner.choose.cache_clear()

    yield set_size
    monkeypatch.undo()
    call_cache.forget()
    planner.choose.cache_clear()
    call_cache.forget()


def call(kind, keys, rows=1):
    """A call of 8 heads over 2 KV heads of 64."""
    torch.manual_seed(keys)
    q, k, v = torch.randn(2, 8, rows, 64), *torch.randn(2, 2, 2, keys, 64)
    if kind == "pages":
        pages = -(-keys // 16)
        table = torch.randperm(2 * pages).int().reshape(2, pages)
        lengths = torch.tensor([keys, keys // 2 + 1], dtype=torch.int32)
        return partial(paged_attention, q, *torch.randn(2, 2 * pages, 16, 2, 64), table, lengths)
    if kind in ("f32", "f16", "bf16"):
        dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind]
        return partial(attention, q.to(dtype), k.to(dtype), v.to(dtype))
    name, group = kind.split()
    return partial(attention, q, *(Quantised.from_float(x, name, group=int(group)) for x in (k, v)))


@pytest.mark.parametrize("keys", [1, 7, 96, 129, 1000])
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "pages", "int8 64", "int8 32", "int4 64", "fp8_e4m3 32"])
def test_prefetch_changes_no_bit(cache_of, kind, keys):
    """And a call gives what the oracle does, whichever groups share a scale."""
    attend = call(kind, keys)
    cache_of(1 << 40)
    without = attend(backend="cpu")
    cache_of(0)
    assert attend(backend="cpu").equal(without)
    check_call(Inputs(attend.func, attend.args, {}).checked(), *attend(backend="cpu", return_lse=True))


AMX = [
    Case(B=1, H=8, Hkv=1, Lq=1, Lk=1000, D=128),
    Case(B=2, H=32, Hkv=2, Lq=1, Lk=333, D=64),
    Case(B=1, H=18, Hkv=2, Lq=1, Lk=97, D=96, Dv=32, sinks=True),
    Case(B=1, H=4, Hkv=1, Lq=4, Lk=300, D=64, causal=True, softcap=20.0),
    Case(B=1, H=12, Hkv=1, Lq=1, Lk=500, D=576, Dv=512),
    Case(B=1, H=8, Hkv=1, Lq=2, Lk=700, D=64, window=(301, 0), alibi="h"),
    Case(form="paged", H=16, Hkv=2, Lq=1, D=128, lengths=(31, 1111), page=16),
    Case(form="paged", H=16, Hkv=1, q_lengths=(1, 40), D=64, lengths=(700, 300), page=3, causal=True),
    Case(B=1, H=16, Hkv=1, Lq=1, Lk=400, D=64, mask="hqk", pattern="blocks"),
]


@pytest.mark.skipif(not amx.usable(), reason="no AMX here")
@pytest.mark.parametrize("case", AMX, ids=str)
def test_many_rows_in_bf16_take_amx(monkeypatch, case):
    case = replace(case, dtype="bf16")
    used = []
    function = compiler.function
    monkeypatch.setattr(compiler, "function", lambda name: used.append(name) or function(name))
    planner.choose.cache_clear()
    call_cache.forget()
    check_case(case, "cpu")
    assert {"amx_qk", "amx_pv"} <= set(used)


def quantised_call(kind, rows=1, **changes):
    """8 heads over 2 KV heads of 128, 333 keys; `changes` are made to the queries and to scales of K and V."""
    torch.manual_seed(3)
    q = torch.randn(1, 8, rows, 128)
    k, v = (Quantised.from_float(torch.randn(1, 2, 333, 128), kind) for _ in range(2))
    for name, (place, value) in changes.items():
        {"q": q, "k": k.scales, "v": v.scales}[name][place] = value
    return partial(attention, q, k, v)


NAN, INF = float("nan"), float("inf")
ODD = {
    "plain": {},
    "zero queries": {"q": (..., 0.0)},
    "one large": {"q": ((0, 3, 0, 5), 1e4)},
    "too large for fixed point": {"q": (slice(None), 3e30)},
    "too small for fixed point": {"q": (slice(None), 3e-31)},
    "negative scale of a key": {"k": ((0, 1, 9), -0.02)},
    "scales of keys are 0": {"k": (..., 0.0)},
    "negative scale of a value": {"v": ((0, 0, 7, 0), -0.02)},
    "scales of values are 0": {"v": (..., 0.0)},
    "small scales of values": {"v": (..., 1e-33)},
}
NOT_FINITE = {
    "nan in a query": {"q": ((0, 3, 0, 5), NAN)},
    "infinite scale of a key": {"k": ((0, 0, 7, 0), INF)},
    "nan scale of a key": {"k": ((0, 1, 332, 1), NAN)},
    "infinite scale of a value": {"v": ((0, 0, 7, 0), INF)},
    "nan scale of a value": {"v": ((0, 0, 7, 0), NAN)},
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("odd", ODD)
def test_integer_dots_are_as_exact_as_float32(monkeypatch, kind, odd, rows):
    """int8 and int4 by VNNI: as near to the oracle as float32, and by float32 where limbs are out of range."""
    attend = quantised_call(kind, rows, **ODD[odd])
    assert ({f"vnni_qk {kind}", f"vnni_pv {kind}"} <= compiled_by(monkeypatch, attend)) == gemv_vnni.has_vnni()
    check_call(Inputs(attend.func, attend.args, {}).checked(), *attend(backend="cpu", return_lse=True))


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("odd", NOT_FINITE)
def test_what_is_not_finite_shows_where_torch_shows_it(kind, odd):
    attend = quantised_call(kind, **NOT_FINITE[odd])
    q, *quantised = attend.args
    k, v = (x.dequantise(torch.float32).repeat_interleave(4, 1) for x in quantised)
    got, want = attend(backend="cpu"), torch.nn.functional.scaled_dot_product_attention(q, k, v)
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    finite = want.isfinite()
    assert not finite.all()
    torch.testing.assert_close(got[~finite], want[~finite], equal_nan=True, rtol=0, atol=0)
    assert_as_torch(got[finite], exact[finite], want[finite])


def test_a_query_that_is_not_a_number_gives_none():
    q, k, v = torch.randn(1, 4, 1, 64), *torch.randn(2, 1, 2, 1500, 64)
    q[0, 1, 0, 3] = NAN
    for split in (None, 128):
        state = attention(q, k, v, backend="cpu", return_lse=True, split_size=split)
        assert state.out[0, 1].isnan().all()
        assert state.lse[0, 1].isnan().all()
        assert state.out[0, [0, 2, 3]].isfinite().all()
        assert state.lse[0, [0, 2, 3]].isfinite().all()


@pytest.mark.parametrize(("kind", "head_dim", "group"), [("int8", 96, 64), ("int4", 64, 64), ("int8", 128, 32)])
def test_other_rows_take_fp32(monkeypatch, kind, head_dim, group):
    q, k, v = torch.randn(1, 2, 1, head_dim), *torch.randn(2, 1, 2, 40, head_dim)
    attend = partial(attention, q, *(Quantised.from_float(x, kind, group=group) for x in (k, v)))
    assert not {name for name in compiled_by(monkeypatch, attend) if name.startswith("vnni")}


def compiled_by(monkeypatch, attend):
    """Names of the kernels that a call asks for."""
    used = []
    function = compiler.function
    monkeypatch.setattr(compiler, "function", lambda name: used.append(name) or function(name))
    planner.choose.cache_clear()
    call_cache.forget()
    attend(backend="cpu")
    return set(used)


HEAD_BATCHES = [
    Case(form="paged", H=8, Hkv=8, Lq=1, D=64, lengths=(31, 700), page=16),
    Case(form="paged", H=12, Hkv=3, B=3, Lq=2, D=80, lengths=(49, 300, 1), page=5, causal=True, alibi="h", sinks=True),
    Case(form="paged", H=32, Hkv=32, B=1, Lq=16, D=128, lengths=(130,), page=16, causal=True),  # two head batches
    Case(form="paged", H=16, Hkv=4, B=3, q_lengths=(1, 4, 0), D=64, lengths=(700, 300, 5), page=16, window=(100, 0)),
    Case(form="paged", H=16, Hkv=2, B=1, Lq=1, D=128, lengths=(2111,), page=16, dtype="bf16"),
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", HEAD_BATCHES, ids=str)
def test_head_batches(case, threads):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        check_case(case, "cpu")
    finally:
        torch.set_num_threads(before)


ALONE = [  # keys of three sequences, of which the second has many queries or one
    (["bf16", "f16", "f32"], 100, (1500, 1200, 300)),
    (["bf16", "f16", "f32", "int8", "int4"], 1, (3000, 700, 96)),
]


@pytest.mark.parametrize("paged", [False, True], ids=["packed", "paged"])
@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize(
    ("kind", "queries", "lengths"), [(kind, *rest) for kinds, *rest in ALONE for kind in kinds], ids=str
)
def test_a_row_gives_the_same_bits_beside_any_other(kind, queries, lengths, heads, paged):
    """With `split_size`: in a batch with longer ones, with many queries, and by itself."""
    torch.manual_seed(heads)
    q_lengths = (1, queries, 1)
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}.get(kind, torch.float32)
    q = torch.randn(sum(q_lengths), 2 * heads, 64).to(dtype)
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    cu_q = torch.tensor([0, *q_lengths]).cumsum(0).int()
    pages = [-(-n // 16) for n in lengths]
    k, v = torch.randn(2, sum(pages) if paged else ends[-1], *[16] * paged, heads, 64).to(dtype)
    if kind in ("int8", "int4"):
        k, v = (Quantised.from_float(x, kind) for x in (k, v))
    table = torch.full((3, max(pages)), -1, dtype=torch.int32)
    for b, order in enumerate(torch.randperm(sum(pages)).int().split(pages)):
        table[b, : len(order)] = order

    def attend(rows):
        """These sequences in one call."""
        at = torch.cat([torch.arange(cu_q[b], cu_q[b + 1]) for b in rows])
        cu = torch.tensor([0, *(q_lengths[b] for b in rows)]).cumsum(0).int()
        options = {"causal": True, "split_size": 512, "backend": "cpu"}
        if paged:
            held = torch.tensor([lengths[b] for b in rows]).int()
            return paged_attention(q[at], k, v, table[rows], held, cu_seqlens_q=cu, **options)
        keys = torch.cat([torch.arange(ends[b], ends[b + 1]) for b in rows])
        cu_k = torch.tensor([0, *(lengths[b] for b in rows)]).cumsum(0).int()
        parts = (
            Quantised(x.data[keys], x.scales[keys], x.dtype, x.group) if kind[:3] == "int" else x[keys] for x in (k, v)
        )
        return varlen_attention(q[at], *parts, cu, cu_k, **options)

    whole = attend([0, 1, 2])
    for b in range(3):
        assert attend([b]).equal(whole[cu_q[b] : cu_q[b + 1]])
    assert attend([2, 0]).equal(whole[[-1, 0]])
