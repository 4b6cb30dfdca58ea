"""Options, lengths and sizes at the ends of their ranges: clamped where the meaning is clear, else refused."""

import sys

import pytest
import torch

from tilewise import (
    InvalidArgument,
    TileMap,
    alibi_slopes,
    attention,
    attention_backward,
    merge,
    paged_attention,
    plan,
    varlen_attention,
)
from tilewise.core.options import (
    LARGEST,
    LEAST,
    LIMIT,
    Options,
    as_chunk,
    as_offset,
    as_scale,
    as_softcap,
    as_split_size,
    as_window,
)
from tilewise.testing.check import check_call
from tilewise.validation import calls

HUGE = (LIMIT - 1, LIMIT, 2**31 - 2, 2**31 - 1, 2**31, 2**32 + 1, sys.maxsize, 10**30)
BACKENDS = ("cpu", "torch", "reference")


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 1.7


def dense(Lq=9, Lk=7):
    return draw(1, 4, Lq, 16), draw(1, 2, Lk, 16, seed=1), draw(1, 2, Lk, 16, seed=2)


def ints(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("wide", HUGE)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_wider_than_any_distance_is_none(wide, backend):
    """More queries than keys: the first rows are before the first key."""
    q, k, v = dense()
    for window, same in ((wide + 1, None), ((wide, 3), (None, 3)), ((1, wide), (1, None)), ((wide, wide), None)):
        for options in ({}, {"causal": True}, {"q_offset": -5}):
            want = attention(q, k, v, window=same, backend=backend, return_lse=True, **options)
            got = attention(q, k, v, window=window, backend=backend, return_lse=True, **options)
            assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_widest_window_is_kept(backend):
    q, k, v = dense()
    for options in ({"window": (LIMIT - 2, 2)}, {"window": (2, LIMIT - 2)}, {"window": LIMIT - 1, "q_offset": 400}):
        call = calls.dense(q, k, v, Options(return_lse=True, **options))
        assert LIMIT - 2 in call.problem.rules.window
        check_call(call, *attention(q, k, v, backend=backend, return_lse=True, **options))


@pytest.mark.parametrize("large", HUGE)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_large_chunk_still_ends_at_position_0(large, backend):
    q, k, v = dense()
    call = calls.dense(q, k, v, Options(chunk=10**6, q_offset=-4, return_lse=True))
    got = attention(q, k, v, chunk=large, q_offset=-4, backend=backend, return_lse=True)
    check_call(call, *got)
    assert bool((got.lse[:, :, :4] == -torch.inf).all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("offset", [LIMIT - 9, 7 - LIMIT, 10**6])
@pytest.mark.parametrize("rows", [False, True])
def test_far_offsets(backend, offset, rows):
    q, k, v = dense()
    for options in ({"causal": True}, {"window": (4, 4)}, {"window": (LIMIT - 2, 0)}, {"chunk": 8}, {"chunk": 2**40}):
        options["q_offset"] = ints(offset) if rows else offset
        call = calls.dense(q, k, v, Options(return_lse=True, **options))
        check_call(call, *attention(q, k, v, backend=backend, return_lse=True, **options))


@pytest.mark.parametrize("offset", [LIMIT - 8, 6 - LIMIT, 2**31 - 1, -(2**31), 2**40, -(10**30)])
def test_offsets_out_of_range_are_refused(offset):
    q, k, v = dense()
    for entry in (attention, plan):
        with pytest.raises(InvalidArgument, match=r"^q_offset: got .* expected -536870905 to 536870903"):
            entry(q, k, v, q_offset=offset)
    if abs(offset) < 2**63:
        with pytest.raises(InvalidArgument, match=r"^q_offset\[0\]: got .* expected -536870905 to 536870903"):
            attention(q, k, v, q_offset=ints(offset))


def test_the_rule_leaves_room_in_32_bits():
    """What a kernel computes for any pair, and for rows that pad a tile."""
    slack = 1024
    for q_len, kv_len in ((0, 0), (1, 1), (9, 7), (LIMIT, LIMIT), (1, LIMIT), (LIMIT, 1)):
        for offset in (kv_len - LIMIT, LIMIT - q_len, kv_len - q_len):
            as_offset(offset, q_len, kv_len)
            ends = (offset, offset + q_len + slack)
            for side in (0, LIMIT - 2):
                assert as_window((side, side)) == (side, side)
                for position in ends:
                    rules = position - side, position + side + 1
                    assert all(-(2**31) <= x < 2**31 for x in (*rules, position - kv_len - slack))
            chunk = as_chunk(10**30)
            assert all(-(2**31) <= p // chunk * chunk <= p // chunk * chunk + chunk < 2**31 for p in ends)
    assert as_split_size(10**30) == LIMIT


@pytest.mark.parametrize("value", [2**32 + 2, 2**31, -(2**32) + 2, -1, 2**62])
def test_int64_values_do_not_wrap(value):
    q, k, v = dense()
    with pytest.raises(InvalidArgument, match=rf"^kv_lengths\[0\]: got {value}, expected 0 to 7"):
        attention(q, k, v, kv_lengths=ints(value))
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]
    for name, cu in (("cu_seqlens_q", (ints(0, value), ints(0, 7))), ("cu_seqlens_k", (ints(0, 9), ints(0, value)))):
        with pytest.raises(InvalidArgument, match=rf"^{name}\[.*\]: got {value}"):
            varlen_attention(*rows, *cu)
    with pytest.raises(InvalidArgument, match=rf"^kv_lengths\[0\]: got {value}"):
        varlen_attention(*rows, ints(0, 9), ints(0, 7), kv_lengths=ints(value))
    pages = draw(4, 4, 2, 16)
    with pytest.raises(InvalidArgument, match=rf"^context_lens\[0\]: got {value}"):
        paged_attention(q, pages, pages, ints(2, 0)[None], ints(value))
    with pytest.raises(InvalidArgument, match=rf"^block_table\[0, 1\]: got {value}"):
        paged_attention(q, pages, pages, ints(2, value)[None], ints(8))
    want = paged_attention(q, pages, pages, ints(2, 0)[None], ints(4))
    assert torch.equal(paged_attention(q, pages, pages, ints(2, value)[None], ints(4)), want)  # an entry never read


@pytest.mark.parametrize("value", [2**32 + 2, 2**31, -(2**32) + 2, -(2**62), 2**62])
def test_int64_values_that_are_not_read_do_not_wrap(value):
    """`validate=False` is what a GPU does by default. Too long is all there is, below 0 is nothing."""
    q, k, v = dense()
    o = {"validate": False}
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]
    pages, table = draw(4, 4, 2, 16), ints(2, 0)[None]

    def end(length):
        return length if value > 0 else 0

    made = calls.dense(q, k, v, Options(kv_lengths=ints(value), **o)).tensors
    assert made.kv_lengths.tolist() == [end(7)]
    packed = (ints(0, value), ints(0, value), Options(max_q=9, max_k=7, kv_lengths=ints(value), **o))
    made = calls.varlen(*rows, *packed).tensors
    assert made.cu_seqlens_q.tolist() == [0, end(9)]
    assert made.cu_seqlens_k.tolist() == [0, end(7)]
    assert made.kv_lengths.tolist() == [end(7)]
    packed_q = Options(cu_seqlens_q=ints(0, value), max_q=9, **o)
    made = calls.paged(rows[0], pages, pages, table, ints(value), packed_q).tensors
    assert made.cu_seqlens_q.tolist() == [0, end(9)]
    assert made.kv_lengths.tolist() == [end(8)]
    made = calls.paged(q, pages, pages, ints(2, value)[None], ints(8), Options(**o)).tensors
    assert made.block_table.tolist() == [[2, 2**31 - 1 if value > 0 else -(2**31)]]  # no page, and not another one
    got = attention(q, k, v, kv_lengths=ints(value), q_offset=ints(0), **o)
    assert torch.equal(got, attention(q, k, v, kv_lengths=ints(end(7)), q_offset=ints(0)))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("page", [4, 1000, 2**31 - 1, 2**32 + 1, -1, -(2**31)])
def test_the_cpu_reads_no_page_that_is_not_there(page, first):
    """Not with `validate=False` either, by a call of a new kind or by one like those before."""
    q, pages = draw(1, 2, 1, 16), draw(4, 4, 2, 16)
    kind = {"scale": 0.1 + 1e-12 * page, "validate": False, "backend": "cpu"}
    if not first:
        paged_attention(q, pages, pages, ints(2, 0)[None], ints(5), **kind)
    with pytest.raises(InvalidArgument, match="block_table"):
        paged_attention(q, pages, pages, ints(2, page)[None], ints(5), **kind)


def test_the_cpu_reads_no_row_that_is_not_there():
    """The same of lengths and offsets in int32, which are taken as they are."""
    rows, pages = draw(9, 2, 16), draw(4, 4, 2, 16)
    kind = {"scale": 0.123, "validate": False, "backend": "cpu"}
    with pytest.raises(InvalidArgument, match="context_lens"):
        paged_attention(draw(1, 2, 1, 16), pages, pages, ints(2, 0)[None].int(), ints(900).int(), **kind)
    wrong = ints(0, 900).int()
    with pytest.raises(InvalidArgument, match="cu_seqlens"):
        varlen_attention(rows, rows, rows, wrong, wrong, **kind)
    packed = {"cu_seqlens_q": wrong, "cu_seqlens_k": wrong, "max_q": 900, "max_k": 900}
    with pytest.raises(InvalidArgument, match="cu_seqlens"):
        attention_backward(rows, rows, rows, rows.clone(), draw(9, 2), rows, **packed, **kind)


@pytest.mark.parametrize("name", ["scale", "softcap"])
@pytest.mark.parametrize("value", [10**400, float("inf"), float("nan"), -(10**400)])
def test_numbers_that_are_not_finite(name, value):
    with pytest.raises(InvalidArgument, match=f"^{name}: got"):
        attention(*dense(), **{name: value})


def test_scales_outside_of_float32_are_refused():
    with pytest.raises(InvalidArgument, match="finite number of float32"):
        attention(*dense(), scale=1e39)


@pytest.mark.parametrize("scale", [7e-46, 1e-46, 1e-60, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scale_that_is_0_in_float32_is_0(backend, dtype, scale):
    """And not a positive number to the plan: every weight is the same, and finite."""
    q, k, v = (x.to(dtype) for x in dense())
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    cu = [ints(0, n, dtype=torch.int32) for n in (9, 7)]
    pages, table = [x[:, None] for x in packed[1:]], torch.arange(7)[None].int()
    calls_ = [
        lambda s: attention(q, k, v, scale=s, backend=backend),
        lambda s: attention(q[:, :, :1], k, v, scale=s, backend=backend),
        lambda s: varlen_attention(*packed, *cu, scale=s, backend=backend),
        lambda s: paged_attention(q, *pages, table, ints(7), scale=s, backend=backend),
    ]
    assert as_scale(scale, 16) == as_scale(-scale, 16) == 0.0
    for call in calls_:
        assert torch.equal(call(scale), call(0.0))


def test_other_scales_are_as_they_are_given():
    for scale in (None, 96**-0.5, 0.1, 1e-45, LARGEST, -0.3):
        assert as_scale(scale, 96) == (96**-0.5 if scale is None else scale)


def test_softcaps_stay_inside_of_float32():
    assert as_softcap(1e300) == LARGEST
    assert as_softcap(1e-300) == LEAST
    q, k, v = dense()
    for backend in ("torch", "reference"):
        want = attention(q, k, v, backend=backend)
        torch.testing.assert_close(attention(q, k, v, softcap=1e300, backend=backend), want, rtol=1e-6, atol=1e-6)
        flat = attention(q, k, v, softcap=1e-300, backend=backend)  # every weight is the same
        torch.testing.assert_close(flat[0, ::2], v.mean(2).expand(9, 2, 16).transpose(0, 1))


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("keys", [5, 20000])
def test_no_queries_over_many_keys(backend, keys):
    lse = torch.Size([1, 4, 0])
    q, k = draw(1, 4, 0, 16), draw(1, 2, keys, 16)
    for options in ({}, {"causal": True, "window": 9}, {"sinks": torch.ones(4)}, {"split_size": 64}):
        assert attention(q, k, k, backend=backend, return_lse=True, **options).lse.shape == lse
        assert plan(q, k, k, backend=backend, **options).cost.flops == 0
    pages, table = k[0].transpose(0, 1).unflatten(0, (-1, 5)), torch.arange(keys // 5, dtype=torch.int32)[None]
    assert paged_attention(q, pages, pages, table, ints(keys), backend=backend, return_lse=True).lse.shape == lse
    for rows in (0, 3):  # rows that belong to no sequence
        packed, cu, flat = draw(rows, 4, 16), ints(0, 0), k[0].transpose(0, 1)
        options = {"sinks": torch.ones(4), "backend": backend, "return_lse": True}
        states = [
            varlen_attention(packed, flat, flat, cu, ints(0, keys), **options),
            paged_attention(packed, pages, pages, table, ints(keys), cu_seqlens_q=cu, **options),
        ]
        for state in states:
            assert state.out.shape == (rows, 4, 16)
            assert bool((state.out == 0).all())
            assert bool((state.lse == -torch.inf).all())


def test_infinite_sinks_merge():
    """A state whose sink took all weight leaves nothing to the others."""
    q, k, v = dense()
    full = attention(q, k, v, sinks=torch.full((4,), torch.inf), return_lse=True, backend="reference")
    assert bool((full.out == 0).all())
    assert bool((full.lse == torch.inf).all())
    other = attention(q, k, v, return_lse=True)
    for states in ([full, other], [other, full], [full] * 3):
        merged = merge(states)
        assert bool((merged.out == 0).all())
        assert bool((merged.lse == torch.inf).all())


def test_slopes_of_too_many_heads_are_refused():
    for heads in (2**16 + 1, 2**40, True, 0):
        with pytest.raises(InvalidArgument, match=r"^heads: got"):
            alibi_slopes(heads)
    assert len(alibi_slopes(2**16)) == 2**16


def test_tiles_larger_than_the_mask_need_no_memory():
    mask = torch.ones(8, 9, dtype=torch.bool)
    assert TileMap.from_mask(mask, (2**29, 2**29)).counts() == (0, 0, 1)
    assert TileMap.from_spec(8, 9, (2**29, 2**29), window=sys.maxsize).counts() == (0, 0, 1)
    with pytest.raises(InvalidArgument, match=r"^tile: got"):
        TileMap.from_mask(mask, (2**40, 1))


def test_small_tensors_reach_a_backend_one_after_the_other():
    """Kernels know no strides of lengths, offsets, tables, sinks and slopes but those of a table's rows."""

    def spread(x):
        return torch.stack((x, x + 1), -1)[..., 0]

    q, k, lengths = draw(2, 4, 3, 16), draw(2, 2, 8, 16), torch.tensor([5, 8], dtype=torch.int32)
    numbers = torch.tensor([0.5, 0.25, 1.0, 2.0])
    o = {"kv_lengths": lengths, "q_offset": lengths - 3, "sinks": numbers, "alibi_slopes": numbers.expand(2, 4)}
    t = calls.dense(q, k, k, Options(**{name: spread(x) for name, x in o.items()})).tensors
    assert {getattr(t, name).stride(-1) for name in o} == {1}
    for name, x in o.items():
        assert torch.equal(getattr(t, name), x)
    pages, table = draw(6, 4, 2, 16), torch.tensor([[5, 2, 0], [4, 1, 3]], dtype=torch.int32)
    t = calls.paged(q, pages, pages, spread(table), spread(lengths), Options()).tensors
    assert t.block_table.stride(-1) == t.kv_lengths.stride(-1) == 1
    part = table[:, :2]
    assert calls.paged(q, pages, pages, part, lengths, Options()).tensors.block_table is part  # its rows have a stride
