"""The flash-attn package's functions by tilewise, against what its documentation says, written out in float64."""

import functools
import inspect
import itertools
from typing import NamedTuple

import pytest
import torch

from naive import query_sets
from tilewise import InvalidArgument, alibi_slopes
from tilewise.compat import flash_attn as fa
from tilewise.testing.check import judge, largest_error


def peaked(*shape, dtype=torch.float32):
    return (torch.randn(shape) * 1.7).to(dtype)


class Expected(NamedTuple):
    """What should come out, and the largest error of plain torch on the same inputs."""

    exact: torch.Tensor
    error: float
    name: str  # "out" or "lse"


def formula(*tensors, **options):
    """One sequence: q [Lq, H, D], k and v [Lk, Hkv, D] to out [Lq, H, D] and lse [H, Lq], bottom-right aligned."""
    exact = attend(*(x.double() for x in tensors), **options)
    narrow = tensors[-1].dtype  # of the weights, as of the values
    q, *others = tensors
    errors = []
    for queries in query_sets(q):
        sets = queries, *others
        best = attend(*(x.double() for x in sets), **options)
        plain = attend(*(x.float() for x in sets), **options, narrow=None if narrow == torch.float32 else narrow)
        errors.append([largest_error(a, b) for a, b in zip(plain, best, strict=True)])
    out, lse, scores = map(max, zip(*errors, strict=True))
    factor = 1.5 if options.get("softcap") else 1.0  # 3x instead of 2x
    return Expected(exact[0], factor * out, "out"), Expected(exact[1], factor * max(lse, scores), "lse")


def attend(
    q, k, v, scale=None, causal=False, window_size=(-1, -1), softcap=0.0, slopes=None, chunk=0, sinks=None, narrow=None,
    qv=None,
):  # fmt: skip
    """The formula in the type of its inputs; with `narrow`, weights and output are rounded to it. Also the scores."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = torch.einsum("ihd,jhd->hij", q, k)
    width = q.shape[-1]
    if qv is not None:
        s = s + torch.einsum("ihd,jhd->hij", qv.to(s.dtype), v)
        width += v.shape[-1]
    s = s * (width**-0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    i = torch.arange(len(q))[:, None] + len(k) - len(q)
    j = torch.arange(len(k))[None, :]
    if slopes is not None:
        s = s - slopes.to(s.dtype)[:, None, None] * (i - j).abs()
    visible = torch.ones(len(q), len(k), dtype=torch.bool)
    left, right = window_size
    if causal:
        visible &= j <= i
    if left >= 0:
        visible &= j >= i - left
    if right >= 0:
        visible &= j <= i + right
    if chunk:
        visible &= torch.div(i, chunk, rounding_mode="floor") == j // chunk
    s = s.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        s = torch.cat((s, sinks.to(s.dtype)[:, None, None].expand(-1, len(q), 1)), -1)
        v = torch.cat((v, torch.zeros_like(v[:1])), 0)
    lse = s.logsumexp(-1)
    p = s.softmax(-1).nan_to_num(0.0)  # a row that sees nothing
    if narrow is not None:
        p = p.to(narrow).to(s.dtype)
    out = torch.einsum("hij,jhd->ihd", p, v)
    return out if narrow is None else out.to(narrow), lse, s


_results: list[tuple[torch.Tensor, Expected]] = []


def close(got, want):
    """Leaves a result to be judged when the test is over."""
    _results.append((got.clone(), want))


@pytest.fixture(autouse=True)
def _judged(request):
    """The rule of conformance: at most twice plain torch's error in the whole call, and one ulp.

    A call's sequences are compared one by one, and in a short one torch may be right by luck: so each test ends with
    all of its results.
    """
    test = request.node.obj

    @functools.wraps(test)
    def judged(*arguments, **options):
        test(*arguments, **options)
        for got, want in _results:
            worst = max(other.error for _, other in _results if other.name == want.name)
            judge(want.name, got, want.exact, 2 * worst, got.dtype)

    torch.manual_seed(0)
    _results.clear()
    request.node.obj = judged


def close_rotated(got, tokens, *angles):
    """Keys `[n, H, D]` that were turned each to its position: complex numbers of float32 are plain torch's way."""
    exact = torch.stack([turn(x.double(), *angles[:2], at, angles[3]) for x, at in zip(tokens, angles[2], strict=True)])
    plain = torch.stack([turn(x, *angles[:2], at, angles[3]) for x, at in zip(tokens, angles[2], strict=True)])
    judge("out", got, exact, 2 * largest_error(plain, exact), got.dtype)
    return exact


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"softmax_scale": 0.3},
    "window": {"window_size": (3, 2)},
    "left": {"window_size": (2, -1)},
    "right": {"window_size": (-1, 1)},
    "causal window": {"causal": True, "window_size": (4, 4)},
    "softcap": {"causal": True, "softcap": 3.0},
    "alibi": {"causal": True, "alibi_slopes": "heads"},
    "alibi rows": {"alibi_slopes": "rows"},
    "chunk": {"causal": True, "attention_chunk": 4},
    "splits": {"causal": True, "num_splits": 3},
    "sinks": {"causal": True, "s_aux": torch.tensor([0.5, 2.0, -1.0, 0.0, 4.0, 1.0])},
    "hints": {"deterministic": True, "pack_gqa": True, "sm_margin": 4, "qv": None},
}
HEADS = 6


def both(options, batch):
    """The options as given to the function, and as given to the formula for row b."""
    flash_options = dict(options)
    slopes = None
    if "alibi_slopes" in options:
        rows = options["alibi_slopes"] == "rows"
        flash_options["alibi_slopes"] = torch.rand(batch, HEADS) if rows else alibi_slopes(HEADS)
        slopes = flash_options["alibi_slopes"].expand(batch, HEADS)

    def of_row(b):
        return {
            "scale": options.get("softmax_scale"),
            "causal": options.get("causal", False),
            "window_size": options.get("window_size", (-1, -1)),
            "softcap": options.get("softcap", 0.0),
            "slopes": None if slopes is None else slopes[b],
            "chunk": options.get("attention_chunk", 0),
            "sinks": options.get("s_aux"),
        }

    return flash_options, of_row


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("rows", "keys"), [(9, 9), (3, 11), (11, 6)])
def test_dense(name, rows, keys):
    q, k, v = peaked(2, rows, HEADS, 16), peaked(2, keys, 2, 16), peaked(2, keys, 2, 16)
    flash_options, of_row = both(OPTIONS[name], 2)
    out, lse, probs = fa.flash_attn_func(q, k, v, return_attn_probs=True, **flash_options)
    assert lse.shape == (2, HEADS, rows)
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    assert probs.numel() == 0
    for b in range(2):
        want_out, want_lse = formula(q[b], k[b], v[b], **of_row(b))
        close(out[b], want_out)
        close(lse[b], want_lse)
    assert fa.flash_attn_func(q, k, v, **flash_options).equal(out)
    assert fa.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), **flash_options).equal(out)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dense_in_16_bits(dtype):
    q, k, v = (peaked(1, 20, HEADS, 64, dtype=dtype) for _ in range(3))
    out = fa.flash_attn_func(q, k, v, causal=True)
    assert out.dtype == dtype
    close(out[0], formula(q[0], k[0], v[0], causal=True)[0])


@pytest.mark.parametrize("name", OPTIONS)
def test_qkvpacked(name):
    qkv = peaked(2, 9, 3, HEADS, 16)
    flash_options, of_row = both(OPTIONS[name], 2)
    out = fa.flash_attn_qkvpacked_func(qkv, **flash_options)
    packed = fa.flash_attn_varlen_qkvpacked_func(
        qkv.flatten(0, 1), torch.tensor([0, 9, 18], dtype=torch.int32), 9, **flash_options
    )
    for b in range(2):
        want, _ = formula(*qkv[b].unbind(1), **of_row(b))
        close(out[b], want)
        close(packed[9 * b : 9 * b + 9], want)


LENGTHS_Q, LENGTHS_K = (4, 0, 7, 1), (9, 3, 5, 12)


def offsets(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


@pytest.mark.parametrize("name", OPTIONS)
def test_varlen(name):
    cu_q, cu_k = offsets(LENGTHS_Q), offsets(LENGTHS_K)
    q, kv = peaked(12, HEADS, 16), peaked(29, 2, 2, 16)
    k, v = kv.unbind(1)
    flash_options, of_row = both(OPTIONS[name], 4)
    out, lse, probs = fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 7, 12, return_attn_probs=True, **flash_options)
    assert lse.shape == (HEADS, 12)
    assert probs.numel() == 0
    used = torch.tensor([8, 0, 5, 3], dtype=torch.int32)
    shorter = fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 7, 12, seqused_k=used, **flash_options)
    for b in range(4):
        rows, keys = slice(*cu_q[b : b + 2].tolist()), slice(*cu_k[b : b + 2].tolist())
        want_out, want_lse = formula(q[rows], k[keys], v[keys], **of_row(b))
        close(out[rows], want_out)
        close(lse[:, rows], want_lse)
        first = slice(keys.start, keys.start + int(used[b]))
        close(shorter[rows], formula(q[rows], k[first], v[first], **of_row(b))[0])
    assert fa.flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, 7, 12, **flash_options).equal(out)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_varlen_in_pages(page_size):
    cu_q, cu_k = offsets(LENGTHS_Q), offsets(LENGTHS_K)
    q = peaked(12, HEADS, 16)
    pages = -(-12 // page_size)
    table = torch.randperm(4 * pages).reshape(4, pages).int()
    k, v = (peaked(4 * pages, page_size, 2, 16) for _ in range(2))
    out = fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 7, 12, causal=True, block_table=table)
    for b in range(4):
        rows = slice(*cu_q[b : b + 2].tolist())
        want, _ = formula(q[rows], *(x[table[b]].flatten(0, 1)[: LENGTHS_K[b]] for x in (k, v)), causal=True)
        close(out[rows], want)
    lengths = torch.tensor(LENGTHS_K, dtype=torch.int32)
    again = fa.flash_attn_varlen_func(q, k, v, cu_q, None, 7, 12, causal=True, page_table=table, seqused_k=lengths)
    assert again.equal(out)


def turn(x, cos, sin, position, interleaved):
    """Rotary, one token [H, D] at a time, by complex numbers of its type."""
    half = cos.shape[1]
    x, cos, sin = x.clone(), cos.to(x.dtype), sin.to(x.dtype)
    a, b = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    turned = torch.complex(x[:, a], x[:, b]) * torch.complex(cos[position], sin[position])
    x[:, a], x[:, b] = turned.real, turned.imag
    return x


class Cache:
    """A cache in one of its three forms; `row(b)` is the K and V of row b in order."""

    def __init__(self, form, batch, capacity):
        self.form, self.options = form, {}
        if form == "pages":
            pages = -(-capacity // 5)
            self.table = torch.randperm(batch * pages + 2)[: batch * pages].reshape(batch, pages).int()
            self.k, self.v = (peaked(batch * pages + 2, 5, 2, 16) for _ in range(2))
            self.options["block_table"] = self.table
        else:
            self.k, self.v = (peaked(batch + 2, capacity, 2, 16) for _ in range(2))
            self.index = torch.randperm(batch + 2)[:batch].int()
            if form == "indexed":
                self.options["cache_batch_idx"] = self.index
            else:
                self.k, self.v, self.index = self.k[:batch], self.v[:batch], torch.arange(batch)

    def row(self, x, b):
        return x[self.table[b]].flatten(0, 1) if self.form == "pages" else x[self.index[b]]

    def spoil(self, b, end):
        """NaN in the first slots of row b."""
        for x, slot in itertools.product((self.k, self.v), range(end)):
            place = (self.table[b, slot // 5], slot % 5) if self.form == "pages" else (self.index[b], slot)
            x[place] = torch.nan


@pytest.mark.parametrize("form", ["rows", "indexed", "pages"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("rows", "new"), [(1, 1), (4, 4), (3, 0)])
def test_with_kvcache(form, name, rows, new):
    cache = Cache(form, 3, 20)
    lengths = torch.tensor([0, 7, 20 - new], dtype=torch.int32)
    q, k, v = peaked(3, rows, HEADS, 16), peaked(3, new, 2, 16), peaked(3, new, 2, 16)
    flash_options, of_row = both(OPTIONS[name], 3)
    flash_options.pop("deterministic", None)
    before = cache.k.clone(), cache.v.clone()
    out, lse = fa.flash_attn_with_kvcache(
        q, cache.k, cache.v, *((k, v) if new else ()), cache_seqlens=lengths, return_softmax_lse=True,
        **cache.options, **flash_options,
    )  # fmt: skip
    assert lse.shape == (3, HEADS, rows)
    for b, n in enumerate(lengths.tolist()):
        keys, vals = (torch.cat((cache.row(old, b)[:n], x[b])) for old, x in zip(before, (k, v), strict=True))
        assert cache.row(cache.k, b)[: n + new].equal(keys)
        assert cache.row(cache.v, b)[: n + new].equal(vals)
        want_out, want_lse = formula(q[b], keys, vals, **of_row(b))
        close(out[b], want_out)
        close(lse[b], want_lse)
        for old, x in zip(before, (cache.k, cache.v), strict=True):  # nothing else is written
            assert cache.row(x, b)[n + new :].equal(cache.row(old, b)[n + new :])


@pytest.mark.parametrize("form", ["rows", "indexed", "pages"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (6, 1)}], ids=str)
def test_rotary(form, interleaved, options):
    cache = Cache(form, 3, 20)
    angles = torch.rand(20, 4) * 6
    cos, sin = angles.cos(), angles.sin()  # 8 of 16 elements turn
    lengths = torch.tensor([0, 7, 17], dtype=torch.int32)
    q, k, v = peaked(3, 3, HEADS, 16), peaked(3, 3, 2, 16), peaked(3, 3, 2, 16)
    before = cache.k.clone(), cache.v.clone()
    out = fa.flash_attn_with_kvcache(
        q, cache.k, cache.v, k, v, cos, sin, lengths, rotary_interleaved=interleaved, **cache.options, **options
    )
    for b, n in enumerate(lengths.tolist()):
        turned_k = close_rotated(cache.row(cache.k, b)[n : n + 3], k[b], cos, sin, range(n, n + 3), interleaved)
        places = [n + (i if options else 0) for i in range(3)]
        turned_q = torch.stack(
            [turn(x.double(), cos, sin, at, interleaved) for x, at in zip(q[b], places, strict=True)]
        )
        keys, vals = torch.cat((cache.row(before[0], b)[:n].double(), turned_k)), cache.row(before[1], b)[:n]
        close(out[b], formula(turned_q, keys, torch.cat((vals, v[b])), **options)[0])


@pytest.mark.parametrize("form", ["rows", "pages"])
@pytest.mark.parametrize("new", ["rows", "packed"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (6, 1)}], ids=str)
def test_rotary_of_packed_queries(form, new, options):
    """Each by its own place in its sequence; without causal and windows all of a sequence by that of the first."""
    cache, counts = Cache(form, 3, 20), (2, 1, 4)
    angles = torch.rand(20, 4) * 6
    cos, sin = angles.cos(), angles.sin()
    lengths, cu = torch.tensor([0, 7, 15], dtype=torch.int32), offsets(counts)
    q, k, v = peaked(7, HEADS, 16), peaked(7, 2, 16), peaked(7, 2, 16)
    rows = [slice(*cu[b : b + 2].tolist()) for b in range(3)]
    given = {"cu_seqlens_k_new": cu}
    if new == "rows":  # four for each sequence
        given, counts = {}, (4, 4, 4)
        k, v = peaked(3, 4, 2, 16), peaked(3, 4, 2, 16)
    before = cache.k.clone(), cache.v.clone()
    out = fa.flash_attn_with_kvcache(
        q, cache.k, cache.v, k, v, cos, sin, lengths, cu_seqlens_q=cu, max_seqlen_q=4, **given, **options,
        **({"page_table": cache.table} if form == "pages" else {}),
    )  # fmt: skip
    for b, n in enumerate(lengths.tolist()):
        k_new, v_new = (x[b] if new == "rows" else x[rows[b]] for x in (k, v))
        turned_k = close_rotated(
            cache.row(cache.k, b)[n : n + counts[b]], k_new, cos, sin, range(n, n + counts[b]), True
        )
        queries = q[rows[b]].double()
        places = [n + (i if options else 0) for i in range(len(queries))]
        turned_q = torch.stack([turn(x, cos, sin, at, True) for x, at in zip(queries, places, strict=True)])
        keys, vals = torch.cat((cache.row(before[0], b)[:n].double(), turned_k)), cache.row(before[1], b)[:n]
        close(out[rows[b]], formula(turned_q, keys, torch.cat((vals, v_new)), **options)[0])


@pytest.mark.parametrize("form", ["rows", "indexed", "pages"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window_size": (4, -1)}], ids=str)
def test_leftpad(form, options):
    cache = Cache(form, 3, 20)
    lengths, pad = torch.tensor([9, 20, 5], dtype=torch.int32), torch.tensor([3, 0, 5], dtype=torch.int32)
    for b in range(3):
        cache.spoil(b, int(pad[b]))
    q = peaked(3, 2, HEADS, 16)
    out = fa.flash_attn_with_kvcache(
        q, cache.k, cache.v, cache_seqlens=lengths, cache_leftpad=pad, **cache.options, **options
    )
    for b, (start, end) in enumerate(zip(pad.tolist(), lengths.tolist(), strict=True)):
        close(out[b], formula(q[b], *(cache.row(x, b)[start:end] for x in (cache.k, cache.v)), **options)[0])


def test_padding_counts_as_positions_of_rotary():
    """Slots are positions, those of padding too, in keys and in queries."""
    cache = Cache("rows", 2, 20)
    angles = torch.rand(20, 8) * 6
    cos, sin = angles.cos(), angles.sin()
    pad, lengths = torch.tensor([4, 0]), torch.tensor([9, 12])
    q, k, v = peaked(2, 2, HEADS, 16), peaked(2, 2, 2, 16), peaked(2, 2, 2, 16)
    out = fa.flash_attn_with_kvcache(q, cache.k, cache.v, k, v, cos, sin, lengths, cache_leftpad=pad, causal=True)
    for b, (start, n) in enumerate(zip(pad.tolist(), lengths.tolist(), strict=True)):
        turned = torch.stack([turn(q[b, i].double(), cos, sin, n + i, True) for i in range(2)])
        close_rotated(cache.k[b, n : n + 2], k[b], cos, sin, range(n, n + 2), True)
        close(out[b], formula(turned, cache.k[b, start : n + 2], cache.v[b, start : n + 2], causal=True)[0])


def test_kvcache_lengths_by_int_and_default():
    q, k, v = peaked(2, 1, HEADS, 16), peaked(2, 9, 2, 16), peaked(2, 9, 2, 16)
    for flash_options, used in [({}, 9), ({"cache_seqlens": 4}, 4)]:
        out = fa.flash_attn_with_kvcache(q, k, v, **flash_options)
        for b in range(2):
            close(out[b], formula(q[b], k[b, :used], v[b, :used])[0])


@pytest.mark.parametrize("form", ["rows", "pages"])
def test_kvcache_with_packed_queries(form):
    cache = Cache(form, 3, 20)
    cu, lengths = offsets((2, 0, 5)), torch.tensor([6, 20, 11], dtype=torch.int32)
    q = peaked(7, HEADS, 16)
    out, lse = fa.flash_attn_with_kvcache(
        q, cache.k, cache.v, cache_seqlens=lengths, causal=True, cu_seqlens_q=cu, max_seqlen_q=5,
        return_softmax_lse=True, **({"page_table": cache.table} if form == "pages" else {}),
    )  # fmt: skip
    for b in range(3):
        rows = slice(*cu[b : b + 2].tolist())
        want = formula(q[rows], *(cache.row(x, b)[: int(lengths[b])] for x in (cache.k, cache.v)), causal=True)
        close(out[rows], want[0])
        close(lse[:, rows], want[1])


def test_signatures_are_those_of_flash_attention_2():
    shared = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
    lengths = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
    documented = {
        "flash_attn_func": f"q k v {shared}",
        "flash_attn_qkvpacked_func": f"qkv {shared}",
        "flash_attn_kvpacked_func": f"q kv {shared}",
        "flash_attn_varlen_func": f"q k v {lengths} {shared} block_table",
        "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {shared}",
        "flash_attn_varlen_kvpacked_func": f"q kv {lengths} {shared}",
        "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx "
        "cache_leftpad block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes "
        "num_splits return_softmax_lse",
    }
    defaults = {"dropout_p": 0.0, "window_size": (-1, -1), "softcap": 0.0, "rotary_interleaved": True, "num_splits": 0}
    flags = ("causal", "deterministic", "return_attn_probs", "return_softmax_lse")
    assert set(documented) | {"get_scheduler_metadata", "install", "uninstall"} == set(fa.__all__)
    for name, words in documented.items():
        parameters = inspect.signature(getattr(fa, name)).parameters.values()
        by_place = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert [p.name for p in by_place] == words.split()
        for p in by_place:
            if p.default is not p.empty:
                assert p.default == defaults.get(p.name, False if p.name in flags else None), (name, p.name)


def test_refusals():
    q, cu = peaked(1, 4, 2, 8), offsets((4,))
    for options, words in [
        ({"dropout_p": 1.1}, "dropout_p: got 1.1"),
        ({"window_size": 4}, "window_size: got 4"),
        ({"softcap": -1.0}, "softcap"),
        ({"window_size": torch.tensor([1, 2, 3])}, "window_size: got"),
        ({"qv": q[..., :4]}, "qv: got"),
        ({"qv": q.half()}, "qv: got"),
        ({"qv": q, "q_v": q}, "q_v: got"),
        ({"num_splits": -1}, "num_splits"),
        ({"attention_chunk": -1}, "attention_chunk"),
    ]:
        with pytest.raises(InvalidArgument, match=words):
            fa.flash_attn_func(q, q, q, **options)
    with pytest.raises(TypeError, match=r"is_causal: .* did you mean causal\?"):
        fa.flash_attn_func(q, q, q, is_causal=True)
    for call in (fa.flash_attn_qkvpacked_func, lambda x: fa.flash_attn_kvpacked_func(q, x)):
        with pytest.raises(InvalidArgument, match=r"kv: got shape \(1, 4, 4, 2, 8\)"):
            call(peaked(1, 4, 4, 2, 8))
    packed = [q[0]] * 3
    for options, words in [
        ({"seqused_q": cu}, "seqused_q"),
        ({"seqused_q": cu[1:] + 1}, r"seqused_q\[0\]: got 5"),
        ({"block_table": cu, "page_table": cu}, "page_table"),
        ({"out": q[0, :3]}, "out"),
        ({"out": q[0, :3], "qv": q[0]}, "out"),
    ]:
        with pytest.raises(InvalidArgument, match=words):
            fa.flash_attn_varlen_func(*packed, cu, cu, 4, 4, **options)
    with pytest.raises(InvalidArgument, match="cu_seqlens_k"):
        fa.flash_attn_varlen_func(*packed, cu, None, 4, 4)
    with pytest.raises(InvalidArgument, match="max_seqlen_q: got 3"):
        fa.flash_attn_varlen_func(*packed, cu, cu, 3, 4)


def test_what_is_refused_leaves_the_cache_as_it_was():
    q, k, cache = peaked(2, 1, 4, 16), peaked(2, 1, 2, 16), peaked(2, 8, 2, 16)
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    cos = torch.rand(8, 4)
    good = {"cache_seqlens": 3}
    for arguments, options, words in [
        ((k,), good, "k with v"),
        ((k, k), {}, "cache_seqlens"),
        ((k, k), {"cache_seqlens": 8}, r"cache_seqlens\[0\]: got 8, expected 0 to 7"),
        ((k, k), {"cache_seqlens": torch.tensor([0, -1])}, r"cache_seqlens\[1\]"),
        ((k, k), {"cache_seqlens": torch.tensor([0.0, 1.0])}, "cache_seqlens: got"),
        ((k.half(), k.half()), good, "k: got"),
        ((k, k[..., :8]), good, "v: got"),
        ((k, k), {**good, "softcap": -1.0}, "softcap"),
        ((k, k), {**good, "alibi_slopes": torch.rand(3)}, "alibi_slopes"),
        ((k, k), {**good, "block_table": table + 1}, r"block_table\[1, 0\]"),
        ((k, k), {**good, "block_table": table, "cache_batch_idx": table[:, 0] + 1}, r"cache_batch_idx\[1\]: got 2"),
        ((k, k), {**good, "cache_batch_idx": table[:, 0] + 1}, r"cache_batch_idx\[1\]: got 2.*row of k_cache"),
        ((k, k), {**good, "cache_seqlens": torch.tensor([2**32, 3])}, r"cache_seqlens\[0\]"),
        ((k, k), {"cache_seqlens": 2**40}, r"cache_seqlens\[0\]"),
        ((k, k), {**good, "cache_leftpad": torch.tensor([4, 0])}, r"cache_leftpad\[0\]"),
        ((k, k, cos), good, "rotary_cos"),
        ((k, k, cos[:7], cos[:7]), good, "rotary_cos: got 7 positions"),
        ((k, k, torch.rand(8, 9), torch.rand(8, 9)), good, "rotary_cos: got 9 angles"),
        ((None, None, cos, cos), good, "new keys"),
        ((k, k, cos, cos), {**good, "rotary_seqlens": table}, "rotary_seqlens"),
        ((k, k), {**good, "cu_seqlens_q": offsets((1, 1))}, "q: got shape"),
        ((k, k), {**good, "cu_seqlens_k_new": offsets((1, 1))}, "k: got"),
        ((k[:, 0], k[:, 0]), {**good, "cu_seqlens_k_new": offsets((1, 2))}, r"cu_seqlens_k_new\[-1\]: got 3"),
        ((None, None), {**good, "cu_seqlens_k_new": offsets((1, 1))}, "new keys"),
        ((k, k, cos, cos), {**good, "rotary_seqlens": torch.tensor([8, 0])}, "rotary_cos: got 8 positions"),
        ((k, k), {**good, "qv": q[..., :8]}, "qv"),
    ]:
        k_cache, v_cache = cache.clone(), cache.clone()
        with pytest.raises(InvalidArgument, match=words):
            fa.flash_attn_with_kvcache(q, k_cache, v_cache, *arguments, **options)
        assert k_cache.equal(cache)
        assert v_cache.equal(cache)
    with pytest.raises(InvalidArgument, match="q: got shape"):
        fa.flash_attn_with_kvcache(q[0], k_cache, v_cache, k[:1], k[:1], cache_seqlens=3)
    assert k_cache.equal(cache)


def test_what_was_right_once_is_not_right_for_ever():
    """A step that is known is not checked again, but for the values in its tables; any other is."""
    cache = Cache("pages", 3, 20)
    lengths = torch.tensor([0, 7, 18], dtype=torch.int32)
    q, k, v = peaked(3, 1, HEADS, 16), peaked(3, 1, 2, 16), peaked(3, 1, 2, 16)

    def step(q=q, k=k, v=v, lengths=lengths, table=cache.table, **options):
        return fa.flash_attn_with_kvcache(
            q, cache.k, cache.v, k, v, cache_seqlens=lengths, block_table=table, **options
        )

    want = step()
    assert step().equal(want)
    before = cache.k.clone(), cache.v.clone()
    for wrong, words in [
        ({"k": k.half()}, "as k_cache"),
        ({"v": v[:2]}, "v: got"),
        ({"q": q[..., :8]}, "k"),
        ({"lengths": lengths + 10}, "leave room"),
        ({"table": cache.table + 99}, "block_table"),
        ({"softcap": -1.0}, "softcap"),
        ({"softmax_scale": [1.0]}, "scale"),
    ]:
        for _ in range(2):
            with pytest.raises(InvalidArgument, match=words):
                step(**wrong)
    assert (cache.k.equal(before[0]), cache.v.equal(before[1])) == (True, True)
    assert step().equal(want)


@pytest.mark.parametrize("form", ["rows", "pages"])
def test_caches_have_no_gradients(form):
    """As in flash-attn: neither the output nor the cache becomes part of a graph."""
    cache = Cache(form, 3, 20)
    lengths = torch.tensor([0, 7, 18], dtype=torch.int32)
    q, k, v = (x.requires_grad_() for x in (peaked(3, 1, HEADS, 16), peaked(3, 1, 2, 16), peaked(3, 1, 2, 16)))
    for new in ((k, v), (None, None)):
        out, lse = fa.flash_attn_with_kvcache(
            q, cache.k, cache.v, *new, cache_seqlens=lengths, return_softmax_lse=True, **cache.options
        )
        assert not any(x.requires_grad for x in (out, lse, cache.k, cache.v))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softmax_scale": torch.inf}, "^softmax_scale: got inf"),
        ({"s_aux": torch.ones(5)}, "^s_aux: got shape"),
    ],
)
def test_errors_name_flash_attentions_arguments(options, message):
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(InvalidArgument, match=message):
        fa.flash_attn_func(q, q, q, **options)
    with pytest.raises(InvalidArgument, match=message):
        fa.flash_attn_with_kvcache(q, q, q, **options)
    with pytest.raises(InvalidArgument, match="k_cache: got a last dim of 4, expected 8, as q"):
        fa.flash_attn_with_kvcache(q, q[..., :4], q)
