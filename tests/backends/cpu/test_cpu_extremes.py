"""The CPU backend at its limits: infinite sinks, softcaps far above all scores, values near 1e38, no queries."""

import pytest
import torch

from tilewise import PagedKVCache, Quantised, attention, paged_attention, plan, varlen_attention
from tilewise.testing.case import Inputs
from tilewise.testing.check import check_call, judge, torch_errors

INF = float("inf")
# Query rows, keys and threads: decode, decode of several rows, split decode, prefill, split prefill
SHAPES = [(1, 300, 1), (3, 300, 1), (1, 2100, 2), (70, 300, 1), (20, 2100, 2)]
PATHS = pytest.mark.parametrize(("rows", "keys", "threads"), SHAPES)


@pytest.fixture(autouse=True)
def _threads(request):
    """As many threads as the test's case says, one if it says nothing."""
    threads = torch.get_num_threads()
    case = getattr(request.node, "callspec", None)
    torch.set_num_threads(case.params.get("threads", 1) if case else 1)
    yield
    torch.set_num_threads(threads)


def inputs(rows, keys, seed=0, dtype=torch.float32):
    """8 heads over 2 KV heads of 64."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(1, 8, rows, 64, generator=g)
    k, v = torch.randn(2, 1, 2, keys, 64, generator=g)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def check(q, k, v, **options):
    """Twice: a call that comes again goes another way."""
    for _ in range(2):
        state = attention(q, k, v, return_lse=True, backend="cpu", **options)
        check_call(Inputs(attention, (q, k, v), options).checked(), *state)
    return state


@PATHS
def test_the_shapes_are_the_paths(rows, keys, threads):
    found = plan(*inputs(rows, keys), backend="cpu")
    assert (found.splits > 1) == (keys > 1000)
    assert found.kernel.startswith("decode") == (rows < 5)


# Sinks


@PATHS
@pytest.mark.parametrize("options", [{}, {"q_offset": -2}, {"mask": "none"}])
def test_a_sink_of_minus_infinity_is_none(rows, keys, threads, options):
    q, k, v = inputs(rows, keys)
    if "mask" in options:
        options = {"mask": torch.arange(rows)[:, None].expand(rows, keys) > 0}  # the first row sees nothing
    options = {**options, "causal": "q_offset" in options, "return_lse": True, "backend": "cpu"}
    want = attention(q, k, v, **options)
    got = attention(q, k, v, sinks=torch.full((8,), -INF), **options)
    assert got.out.equal(want.out)
    assert got.lse.equal(want.lse)
    one = torch.tensor([-INF, 0.5, -INF, INF, 2.0, -INF, INF, -INF])
    mixed = attention(q, k, v, sinks=one, **options)
    none = one == -INF
    assert mixed.out[:, none].equal(want.out[:, none])
    assert mixed.lse[:, none].equal(want.lse[:, none])
    assert (mixed.out[:, one == INF] == 0).all()
    assert (mixed.lse[:, one == INF] == INF).all()
    assert mixed.lse[:, [1, 4]].isfinite().all()
    masked = want.lse[0, 1] == -INF
    assert (mixed.lse[0, 1, masked] == 0.5).all()


@PATHS
def test_a_sink_of_infinity_takes_all_weight(rows, keys, threads):
    """What it leaves is 0, also times values that are not finite."""
    q, k, v = inputs(rows, keys)
    v[0, 0, 5, 3], v[0, 1, 7, 0] = INF, float("nan")
    state = attention(q, k, v, sinks=torch.full((8,), INF), return_lse=True, backend="cpu")
    assert (state.out == 0).all()
    assert (state.lse == INF).all()


def test_infinite_sinks_of_pages_and_packed_rows():
    q, k, v = inputs(3, 320)
    table, lengths = torch.arange(20, dtype=torch.int32)[None], torch.tensor([317], dtype=torch.int32)
    pages = [x[0].transpose(0, 1).reshape(20, 16, 2, 64).contiguous() for x in (k, v)]
    cu = [torch.tensor([0, 0, n], dtype=torch.int32) for n in (3, 320)]
    packed = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    for sinks, lse in ((torch.full((8,), -INF), None), (torch.full((8,), INF), INF)):
        for call in (
            lambda s: paged_attention(q, *pages, table, lengths, sinks=s, return_lse=True, backend="cpu"),
            lambda s: varlen_attention(*packed, *cu, sinks=s, return_lse=True, backend="cpu"),
        ):
            got, plain = call(sinks), call(None)
            assert got.out.equal(plain.out if lse is None else torch.zeros_like(plain.out))
            assert got.lse.equal(plain.lse if lse is None else torch.full_like(plain.lse, INF))


# Softcap


@PATHS
@pytest.mark.parametrize("softcap", [1e6, 1e30, 3e38])
@pytest.mark.parametrize(("scale", "factor"), [(None, 1.0), (-1e-12, 1e12), (1e-30, 1e15)])
def test_a_softcap_far_above_all_scores_changes_nothing(rows, keys, threads, softcap, scale, factor):
    """scale / softcap may be below the least float; scores are not."""
    q, k, v = inputs(rows, keys)
    q, k = q * factor, k * (factor if scale == 1e-30 else 1)
    scale = scale and scale / 8
    state = check(q, k, v, softcap=softcap, scale=scale)
    check_call(Inputs(attention, (q, k, v), {"scale": scale}).checked(), *state)


@PATHS
def test_scores_as_large_as_a_large_softcap(rows, keys, threads):
    """The reference's are in float64: here products are past float32's range, or the softcap."""
    q, k, v = inputs(rows, keys)
    k[..., 1:], q[..., 1:] = 0, 0
    q, k = q.sign() * 1e15, k.sign() * 1e15
    state = attention(q, k, v, softcap=1e25, scale=1.0, return_lse=True, backend="cpu")
    want = 1e25 * torch.tanh(torch.tensor(1e30 / 1e25, dtype=torch.float64))
    judge("lse", state.lse, want.expand_as(state.lse), 0.0, torch.float32)


@pytest.mark.parametrize("softcap", [1e-30, 1e-38, 1e-42])
def test_the_least_softcaps_leave_the_mean(softcap):
    q, k, v = inputs(5, 300)
    q[:, :, 0] = 0
    out = check(q, k, v, softcap=softcap).out
    mean = v.double().mean(2, keepdim=True).repeat_interleave(4, 1).expand_as(out)
    plain = torch_errors(Inputs(attention, (0 * q, k, v), {}).checked())[0]  # weights that are all the same
    judge("out", out, mean, 2 * plain, torch.float32)


# Large values


@PATHS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 8.0}], ids=str)
@pytest.mark.parametrize(("factor", "size"), [(6.0, 1e30), (1.0, 1e37), (0.0, 8e37)])
def test_large_values_do_not_overflow(rows, keys, threads, dtype, options, factor, size):
    """Sums of weights times values pass float32's range where the output does not."""
    q, k, v = inputs(rows, keys, 1, dtype)
    check(q * factor, k, (v.float().clamp(-4, 4) * size).to(dtype), **options)


@PATHS
def test_the_largest_values_of_all(rows, keys, threads):
    q, k, v = inputs(rows, keys, 2)
    v = torch.where(torch.arange(keys) % 7 == 3, 0.5, 1.0)[:, None].expand_as(v) * 3e38
    v = v * torch.linspace(0.9, 1, 64)  # as many roundings as columns: of a single sum torch's error may be 0 by chance
    state = check(q * 0, k, v)
    assert state.out.isfinite().all()


@PATHS
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8_e4m3"])
def test_large_quantised_values_do_not_overflow(rows, keys, threads, kind):
    q, k, v = inputs(rows, keys, 3)
    q, k, v = (torch.cat([x, x.flip(-1)], -1) for x in (q, k, v))  # 128 wide: products of bytes
    check(q * 3, Quantised.from_float(k, kind), Quantised.from_float(v.clamp(-4, 4) * 4e37, kind))


@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("length", [300, 4000])
def test_large_values_of_pages_do_not_overflow(heads, length):
    g = torch.Generator().manual_seed(4)
    q, pages = torch.randn(1, 8, 1, 64, generator=g), torch.randn(2, 250, 16, heads, 64, generator=g)
    table, lengths = torch.arange(250, dtype=torch.int32)[None], torch.tensor([length], dtype=torch.int32)
    arguments = (q, pages[0], pages[1] * 2e37, table, lengths)
    state = paged_attention(*arguments, return_lse=True, backend="cpu")
    check_call(Inputs(paged_attention, arguments, {}).checked(), *state)


def test_large_values_of_a_shared_prefix_do_not_overflow():
    """Parts of two calls put together."""
    g = torch.Generator().manual_seed(5)
    cache = PagedKVCache(64, 16, 2, 64, "f32")
    first = cache.create()
    sequences = [first]
    for new in (400, 9, 9, 9):
        k, v = torch.randn(2, new, 2, 64, generator=g)
        cache.append(sequences[-1], k, v * 4e37)
        if len(sequences) < 3:
            sequences.append(cache.fork(first))
    q = torch.randn(3, 8, 1, 64, generator=g)
    for cascade in (True, False):
        got = cache.attend(sequences, q, cascade=cascade, return_lse=True)
        assert got.out.isfinite().all()
        for i, sequence in enumerate(sequences):
            held = q[i : i + 1], cache.keys(sequence)[None], cache.values(sequence)[None]
            check_call(Inputs(attention, held, {}).checked(), got.out[i : i + 1], got.lse[i : i + 1])


@PATHS
def test_a_row_does_not_depend_on_a_neighbour_that_overflows(rows, keys, threads):
    """To the bit; nor on large values that it does not see."""
    q, k, v = inputs(rows + 30, keys, 6)
    large = v.clone()
    large[:, :, -20:] = large[:, :, -20:].clamp(-4, 4) * 8e37  # seen by the last rows
    small, got = (attention(q, k, x, causal=True, return_lse=True, backend="cpu") for x in (v, large))
    assert got.out[:, :, :-20].equal(small.out[:, :, :-20])
    assert got.lse[:, :, :-20].equal(small.lse[:, :, :-20])
    assert got.out[:, :, -20:].isfinite().all()
    assert not got.out[:, :, -20:].equal(small.out[:, :, -20:])


@PATHS
def test_infinities_stay_beside_sums_that_overflow(rows, keys, threads):
    q, k, v = inputs(rows, keys, 7)
    v = v.clamp(-4, 4) * 8e37
    v[:, :, 3, 0], v[:, :, 4, 1], v[:, :, 5, 2] = INF, -INF, float("nan")
    out = attention(q * 0, k, v, backend="cpu")
    assert (out[..., 0] == INF).all()
    assert (out[..., 1] == -INF).all()
    assert out[..., 2].isnan().all()
    assert out[..., 3:].isfinite().all()


# No queries


@pytest.mark.parametrize("keys", [0, 5, 5000])
def test_no_queries_over_many_keys(keys):
    q, k, v = inputs(0, keys)
    assert attention(q, k, v, backend="cpu").shape == (1, 8, 0, 64)
    assert attention(q[:0], k[:0], v[:0], return_lse=True, backend="cpu").lse.shape == (0, 8, 0)
    assert plan(q, k, v, backend="cpu").backend == "cpu"
    for kind in ("int8", "int4"):
        assert attention(q, *(Quantised.from_float(x, kind) for x in (k, v)), backend="cpu").numel() == 0


@pytest.mark.parametrize("heads", [1, 2])
def test_no_queries_over_many_pages(heads):
    pages, table = torch.randn(400, 16, heads, 64), torch.arange(400, dtype=torch.int32)[None]
    lengths = torch.tensor([6400], dtype=torch.int32)
    assert paged_attention(torch.empty(1, 8, 0, 64), pages, pages, table, lengths, backend="cpu").shape[2] == 0
    packed, cu = torch.empty(0, 8, 64), torch.tensor([0, 0], dtype=torch.int32)
    assert paged_attention(packed, pages, pages, table, lengths, cu_seqlens_q=cu, backend="cpu").shape[0] == 0
    keys = torch.randn(5000, heads, 64)
    cu_k = torch.tensor([0, 5000], dtype=torch.int32)
    assert varlen_attention(packed, keys, keys, cu, cu_k, backend="cpu").shape[0] == 0
