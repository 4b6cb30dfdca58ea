"""What FlashAttention 3 and vLLM's copy of it add, by tilewise: against the same formula in float64."""

import inspect
import itertools

import pytest
import torch

from test_compat_flash_attn import (  # noqa: F401
    HEADS,
    Cache,
    _judged,
    close,
    close_rotated,
    formula,
    offsets,
    peaked,
    turn,
)
from tilewise import InvalidArgument, varlen_attention
from tilewise.compat import flash_attn as fa
from tilewise.compat import flash_attn_3 as fa3
from tilewise.compat._flash import inputs as flash_inputs
from tilewise.testing.check import judge, largest_error

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("window", [(2, 1), (-1, 1), (3, -1), (-1, -1)])
def test_window_as_a_tensor(window):
    q, k, v = peaked(1, 5, HEADS, 16), peaked(1, 9, 2, 16), peaked(1, 9, 2, 16)
    want = fa.flash_attn_func(q, k, v, window_size=window)
    assert fa.flash_attn_func(q, k, v, window_size=torch.tensor(window)).equal(want)
    assert fa.flash_attn_func(q, k, v, window_size=list(window)).equal(want)
    close(want[0], formula(q[0], k[0], v[0], window_size=window)[0])
    assert fa.flash_attn_with_kvcache(q, k, v, window_size=torch.tensor(window)).equal(
        fa.flash_attn_with_kvcache(q, k, v, window_size=window)
    )
    assert fa.flash_attn_func(q, k, v, window_size=None).equal(fa.flash_attn_func(q, k, v))


OPTIONS = [{}, {"causal": True}, {"window_size": (3, 1)}, {"causal": True, "softcap": 4.0}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("form", ["packed", "pages"])
def test_queries_in_use(form, options):
    """`seqused_q`: the last query in use is at the end of the keys in use; the rows after it are 0."""
    cu_q, cu_k = offsets((4, 5, 7, 1)), offsets((9, 3, 5, 12))
    used_q, used_k = (torch.tensor(x, dtype=torch.int32) for x in ((3, 5, 0, 1), (9, 2, 5, 7)))
    q, k, v = peaked(17, HEADS, 16), peaked(29, 2, 16), peaked(29, 2, 16)
    if form == "packed":
        arguments, rest = (k, v, cu_q, cu_k, 7, 12), {}
        keys, vals = ([x[cu_k[b] : cu_k[b + 1]] for b in range(4)] for x in (k, v))
    else:
        pages_k, pages_v = peaked(12, 4, 2, 16), peaked(12, 4, 2, 16)
        table = torch.randperm(12).reshape(4, 3).int()
        arguments, rest = (pages_k, pages_v, cu_q, None, 7, 12), {"block_table": table}
        keys, vals = ([x[table[b]].flatten(0, 1) for b in range(4)] for x in (pages_k, pages_v))
    out, lse = fa.flash_attn_varlen_func(
        q, *arguments, seqused_q=used_q, seqused_k=used_k, return_softmax_lse=True, **rest, **options
    )
    for b, (rows, n) in enumerate(zip(used_q.tolist(), used_k.tolist(), strict=True)):
        mine = slice(int(cu_q[b]), int(cu_q[b]) + rows)
        want = formula(q[mine], keys[b][:n], vals[b][:n], **options)
        close(out[mine], want[0])
        close(lse[:, mine], want[1])
        after = slice(mine.stop, int(cu_q[b + 1]))
        assert out[after].eq(0).all()
        assert lse[:, after].eq(-torch.inf).all()


def test_queries_in_use_without_lengths_of_keys():
    cu_q, cu_k = offsets((4, 5)), offsets((9, 6))
    q, k, v = peaked(9, HEADS, 16), peaked(15, 2, 16), peaked(15, 2, 16)
    out = fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 9, causal=True, seqused_q=torch.tensor([2, 5]))
    close(out[:2], formula(q[:2], k[:9], v[:9], causal=True)[0])
    close(out[4:], formula(q[4:], k[9:], v[9:], causal=True)[0])


def test_the_call_of_vllm():
    """By keyword: no `cu_seqlens_k`, `out=`, a table, scales that are 1, metadata, a list as the window."""
    cu, lengths = offsets((4, 1, 7)), torch.tensor([9, 3, 12], dtype=torch.int32)
    q, table = peaked(12, HEADS, 16, dtype=torch.bfloat16), torch.randperm(12).reshape(3, 4).int()
    k, v = peaked(12, 4, 2, 16, dtype=torch.bfloat16), peaked(12, 4, 2, 16, dtype=torch.bfloat16)
    out = torch.full_like(q, torch.nan)
    one = torch.ones(()).expand(3, 2)
    got, lse = fa.flash_attn_varlen_func(
        q=q, k=k, v=v, out=out, cu_seqlens_q=cu, max_seqlen_q=7, seqused_k=lengths, max_seqlen_k=12, softmax_scale=0.3,
        causal=True, alibi_slopes=None, window_size=[5, 0], block_table=table, softcap=0.0, fa_version=3,
        scheduler_metadata=torch.zeros(1), q_descale=one, k_descale=one, v_descale=one, num_splits=0, s_aux=None,
        return_softmax_lse=True,
    )  # fmt: skip
    assert got is out
    for b in range(3):
        rows = slice(*cu[b : b + 2].tolist())
        keys, vals = (x[table[b]].flatten(0, 1)[: lengths[b]] for x in (k, v))
        want = formula(q[rows], keys, vals, scale=0.3, causal=True, window_size=(5, 0))
        close(out[rows], want[0])
        close(lse[:, rows], want[1])
    assert fa.get_scheduler_metadata(batch_size=3, anything=1) is None


@pytest.mark.parametrize("width", [16, 40])
@pytest.mark.parametrize("beside", [False, True], ids=["apart", "beside"])
def test_a_second_query(beside, width, monkeypatch):
    """`qv v` is added to `q k`. Where K's rows follow V's in memory, nothing is copied."""
    q, qv = peaked(2, 5, HEADS, 8), peaked(2, 5, HEADS, width) / 2
    rows = peaked(2, 9, 2, width + 8)
    v, k = rows[..., :width], rows[..., width:]
    if not beside:
        v, k = v.clone(), k.clone()
    copies = []
    cat = torch.cat
    monkeypatch.setattr(flash_inputs.torch, "cat", lambda xs, dim: copies.append(xs[0].shape) or cat(xs, dim))
    out, lse, _ = fa.flash_attn_func(q, k, v, causal=True, qv=qv, return_attn_probs=True)
    assert len(copies) == (1 if beside else 2)
    monkeypatch.undo()
    for b in range(2):
        want = formula(q[b], k[b], v[b], causal=True, qv=qv[b])
        close(out[b], want[0])
        close(lse[b], want[1])
    assert fa.flash_attn_func(q, k, v, causal=True, q_v=qv).equal(out)
    scaled = fa.flash_attn_func(q, k, v, softmax_scale=0.2, qv=qv)
    close(scaled[0], formula(q[0], k[0], v[0], scale=0.2, qv=qv[0])[0])
    packed = fa.flash_attn_varlen_func(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), offsets((5, 5)), offsets((9, 9)), 5, 9, causal=True,
        qv=qv.flatten(0, 1), out=torch.empty(10, HEADS, width),
    )  # fmt: skip
    for b in range(2):
        close(packed[5 * b : 5 * b + 5], formula(q[b], k[b], v[b], causal=True, qv=qv[b])[0])
    with pytest.raises(InvalidArgument, match="qv: got head dims 300"):
        fa.flash_attn_func(peaked(1, 1, 1, 300), *[peaked(1, 1, 1, 300)] * 2, qv=peaked(1, 1, 1, 300))


def in_fp8(*tensors):
    return [x.to(FP8) for x in tensors]


@pytest.mark.parametrize("scales", ["none", "number", "heads"])
@pytest.mark.parametrize("form", ["dense", "packed", "pages", "cache"])
def test_float8(form, scales):
    """Scales of float8 belong to a sequence and a KV head; the result is bfloat16."""
    q, k, v = in_fp8(peaked(2, 5, HEADS, 32), peaked(2, 12, 2, 32), peaked(2, 12, 2, 32))
    factors = dict.fromkeys("qkv", 1.0)
    if scales == "number":
        factors = {"q": 0.5, "k": 1.5, "v": 0.7}
    elif scales == "heads":
        factors = {name: torch.rand(2, 2) + 0.5 for name in "qkv"}
    given = {} if scales == "none" else {f"{name}_descale": x for name, x in factors.items()}
    if form == "dense":
        out = fa.flash_attn_func(q, k, v, causal=True, **given)
    elif form == "cache":
        k_cache, v_cache = (torch.zeros(2, 15, 2, 32).to(FP8) for _ in "kv")
        k_cache.view(torch.int8)[:, :9] = k.view(torch.int8)[:, :9]
        v_cache.view(torch.int8)[:, :9] = v.view(torch.int8)[:, :9]
        new = (x[:, 9:].contiguous() for x in (k, v))
        out = fa.flash_attn_with_kvcache(q, k_cache, v_cache, *new, cache_seqlens=9, causal=True, **given)
    elif form == "pages":
        table = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32)
        pages = (x.reshape(6, 4, 2, 32) for x in (k, v))
        cu, lengths = offsets((5, 5)), torch.tensor([12, 12], dtype=torch.int32)
        out = fa.flash_attn_varlen_func(
            q.flatten(0, 1), *pages, cu, None, 5, 12, causal=True, block_table=table, seqused_k=lengths, **given
        ).unflatten(0, (2, 5))
    else:
        flat = (x.flatten(0, 1) for x in (q, k, v))
        out = fa.flash_attn_varlen_func(*flat, offsets((5, 5)), offsets((12, 12)), 5, 12, causal=True, **given)
        out = out.unflatten(0, (2, 5))
    assert out.dtype == torch.bfloat16
    for b in range(2):

        def scaled(x, name, b=b):
            factor = factors[name]
            if isinstance(factor, torch.Tensor):
                factor = factor[b].double().repeat_interleave(x.shape[2] // 2)[:, None]
            return x[b].double() * factor

        exact = formula(scaled(q, "q"), scaled(k, "k"), scaled(v, "v"), causal=True)[0].exact
        # Plain torch: weights and output in bfloat16.
        close(out[b], _bfloat(exact, scaled(q, "q"), scaled(k, "k"), scaled(v, "v")))


def _bfloat(exact, q, k, v):
    narrow = formula(q.bfloat16(), k.bfloat16(), v.bfloat16(), causal=True)[0]
    return narrow._replace(exact=exact, error=max(narrow.error, largest_error(exact.bfloat16().double(), exact)))


def test_scales_of_wider_types_are_not_used():
    q = peaked(1, 4, 2, 16)
    want = fa.flash_attn_func(q, q, q)
    assert fa.flash_attn_func(q, q, q, k_descale=torch.tensor([[3.0, 3.0]])).equal(want)
    with pytest.raises(InvalidArgument, match=r"k_descale: got shape \(3,\)"):
        fa.flash_attn_func(*in_fp8(q, q, q), k_descale=torch.ones(3))
    with pytest.raises(InvalidArgument, match="qv: got a second query in float8"):
        fa.flash_attn_func(*in_fp8(q, q, q), qv=q.to(FP8))


ROWS_Q, ROWS_K = (2, 0, 5), (3, 1, 2)


@pytest.mark.parametrize("form", ["rows", "indexed", "pages", "indexed pages"])
@pytest.mark.parametrize("packed_k", [True, False], ids=["packed k", "k"])
@pytest.mark.parametrize("packed_q", [True, False], ids=["packed q", "q"])
@pytest.mark.parametrize("rotated", [False, True, "elsewhere"], ids=["plain", "rotary", "rotary_seqlens"])
def test_append_in_every_form(form, packed_q, packed_k, rotated):
    """New keys and queries, each packed or not, over rows, chosen rows, pages and chosen rows of a table."""
    cache = Cache("pages" if "pages" in form else form, 3, 20)
    if form == "indexed pages":
        order = torch.tensor([2, 0, 1])
        cache.options = {"block_table": cache.table[order.argsort()], "cache_batch_idx": order.int()}
    lengths = torch.tensor([0, 7, 15], dtype=torch.int32)
    rows_q, rows_k = (ROWS_Q if packed_q else (5, 5, 5)), (ROWS_K if packed_k else (3, 3, 3))
    q = peaked(sum(rows_q) + (2 if packed_q else 0), HEADS, 16)  # two rows of no sequence
    k, v = (peaked(sum(rows_k) + (2 if packed_k else 0), 2, 16) for _ in "kv")
    options = dict(cache.options)
    if packed_q:
        options |= {"cu_seqlens_q": offsets(rows_q), "max_seqlen_q": 5}
    if packed_k:
        options["cu_seqlens_k_new"] = offsets(rows_k)
    start, cos, sin = lengths, None, None
    if rotated:
        angles = torch.rand(20, 4) * 6
        cos, sin = angles.cos(), angles.sin()
        if rotated == "elsewhere":
            start = options["rotary_seqlens"] = lengths // 2
    before = cache.k.clone(), cache.v.clone()
    out = fa.flash_attn_with_kvcache(
        q if packed_q else q.unflatten(0, (3, 5)), cache.k, cache.v,
        *(x if packed_k else x.unflatten(0, (3, 3)) for x in (k, v)),
        cos, sin, lengths, causal=True, rotary_interleaved=False, **options,
    )  # fmt: skip
    if packed_q:
        assert out[sum(rows_q) :].eq(0).all()
    else:
        out = out.flatten(0, 1)
    for b, n in enumerate(lengths.tolist()):
        mine_q, mine_k = (slice(*offsets(rows)[b : b + 2].tolist()) for rows in (rows_q, rows_k))
        queries, keys, at = q[mine_q].double(), k[mine_k].double(), int(start[b])
        if rotated:
            places = range(at, at + len(keys))
            keys = close_rotated(cache.row(cache.k, b)[n : n + len(keys)], k[mine_k], cos, sin, places, False)
            queries = torch.stack([turn(x, cos, sin, at + i, False) for i, x in enumerate(queries)] or [queries])
            queries = queries.reshape(-1, HEADS, 16)
        else:
            assert cache.row(cache.k, b)[n : n + len(keys)].equal(k[mine_k])
        assert cache.row(cache.v, b)[n : n + len(keys)].equal(v[mine_k])
        for old, x in zip(before, (cache.k, cache.v), strict=True):  # nothing else is written
            assert cache.row(x, b)[:n].equal(cache.row(old, b)[:n])
            assert cache.row(x, b)[n + len(keys) :].equal(cache.row(old, b)[n + len(keys) :])
        if len(queries):
            keys = torch.cat((cache.row(before[0], b)[:n].double(), keys))
            vals = torch.cat((cache.row(before[1], b)[:n], v[mine_k]))
            close(out[mine_q], formula(queries, keys, vals, causal=True)[0])


def test_packed_keys_of_which_none_belongs_to_a_sequence():
    cache = Cache("rows", 2, 6)
    before = cache.k.clone()
    q, k = peaked(2, 1, HEADS, 16), peaked(3, 2, 16)
    fa.flash_attn_with_kvcache(q, cache.k, cache.v, k, k, cache_seqlens=6, cu_seqlens_k_new=offsets((0, 0)))
    assert cache.k.equal(before)


@pytest.mark.parametrize("form", ["rows", "indexed", "pages"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (3, 2)}, {}], ids=str)
def test_chunks_start_after_the_padding(form, packed, options):
    cache = Cache(form, 3, 20)
    lengths, pad = torch.tensor([9, 20, 5], dtype=torch.int32), torch.tensor([3, 0, 4], dtype=torch.int32)
    rows = (3, 2, 1) if packed else (2, 2, 2)
    q = peaked(sum(rows), HEADS, 16)
    for b in range(3):
        cache.spoil(b, int(pad[b]))
    more = {"cu_seqlens_q": offsets(rows), "max_seqlen_q": 3} if packed else {}
    out = fa.flash_attn_with_kvcache(
        q if packed else q.unflatten(0, (3, 2)), cache.k, cache.v, cache_seqlens=lengths, cache_leftpad=pad,
        attention_chunk=4, **more, **cache.options, **options,
    )  # fmt: skip
    out = out if packed else out.flatten(0, 1)
    for b, (start, end) in enumerate(zip(pad.tolist(), lengths.tolist(), strict=True)):
        mine = slice(*offsets(rows)[b : b + 2].tolist())
        keys, vals = (cache.row(x, b)[start:end] for x in (cache.k, cache.v))
        close(out[mine], formula(q[mine], keys, vals, chunk=4, **options)[0])


@pytest.mark.parametrize(
    ("D", "dtype", "options"),
    [
        (16, FP8, {"k_descale": torch.ones(3, 1)}),
        (16, FP8, {"v_descale": torch.ones(7)}),
        (300, torch.float32, {"qv": torch.zeros(1, 1, 2, 300)}),
        (16, torch.float32, {"qv": torch.zeros(1, 1, 2, 5)}),
    ],
)
def test_extra_inputs_are_checked_before_the_cache_is_written(D, dtype, options):
    cache = [torch.zeros(1, 8, 2, D).to(dtype) for _ in range(2)]
    q, k, v = (torch.ones(1, 1, 2, D).to(dtype) for _ in range(3))
    (name,) = options
    with pytest.raises(InvalidArgument, match=name):
        fa.flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=3, **options)
    assert all((x.float() == 0).all() for x in cache)


def test_tables_of_as_many_rows_as_the_cache():
    """FlashAttention 2 wants no more, also where there are more queries than new keys; only what is used counts."""
    cache = Cache("rows", 2, 20)
    angles = torch.rand(20, 8) * 6
    q, k, v = peaked(2, 4, HEADS, 16), peaked(2, 1, 2, 16), peaked(2, 1, 2, 16)
    arguments = q, cache.k, cache.v, k, v, angles.cos(), angles.sin()
    fa.flash_attn_with_kvcache(*arguments, torch.tensor([3, 16]), causal=True)
    fa.flash_attn_with_kvcache(*arguments, torch.tensor([3, 19]))  # all queries are at 19
    with pytest.raises(InvalidArgument, match="rotary_cos: got 20 positions, expected 21 or more"):
        fa.flash_attn_with_kvcache(*arguments, torch.tensor([3, 17]), causal=True)


def test_signatures_are_those_of_flash_attention_3():
    scales = "q_descale k_descale v_descale"
    window = "window_size attention_chunk softcap"
    end = "num_splits pack_gqa deterministic sm_margin return_attn_probs"
    documented = {
        "flash_attn_func": f"q k v softmax_scale causal qv {scales} {window} {end}",
        "flash_attn_qkvpacked_func": f"qkv softmax_scale causal {scales} {window} deterministic num_heads_q sm_margin "
        "return_attn_probs",
        "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k "
        f"softmax_scale causal qv {scales} {window} {end}",
        "flash_attn_with_kvcache": "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx "
        "cache_leftpad page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens "
        f"{scales} softmax_scale causal {window} rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin "
        "return_softmax_lse",
        "flash_attn_combine": "out_partial lse_partial out out_dtype",
    }
    assert {*documented, "get_scheduler_metadata"} == set(fa3.__all__)
    for name, words in documented.items():
        assert list(inspect.signature(getattr(fa3, name)).parameters) == words.split()


def test_flash_attention_3_is_the_same_with_other_places():
    q, k, v = peaked(2, 5, HEADS, 16), peaked(2, 9, 2, 16), peaked(2, 9, 2, 16)
    want, want_lse, _ = fa.flash_attn_func(q, k, v, 0.0, 0.3, True, (4, 0), 2.0, return_attn_probs=True)
    more = {"window_size": (4, 0), "softcap": 2.0}
    out, lse = fa3.flash_attn_func(q, k, v, 0.3, True, **more, return_attn_probs=True)
    close(out[0], formula(q[0], k[0], v[0], scale=0.3, causal=True, **more)[0])
    assert lse.shape == want_lse.shape
    judge("out", out, want.double(), 1e-5, torch.float32)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    packed = fa3.flash_attn_varlen_func(*flat, offsets((5, 5)), offsets((9, 9)), 5, 9, None, None, 0.3, True, **more)
    judge("out", packed.unflatten(0, (2, 5)), want.double(), 1e-5, torch.float32)
    cached, lse = fa3.flash_attn_with_kvcache(
        q, k, v, None, None, None, None, None, 9, softmax_scale=0.3, causal=True, **more, return_softmax_lse=True
    )
    judge("out", cached, want.double(), 1e-5, torch.float32)
    assert lse.shape == (2, HEADS, 5)
    qkv = peaked(1, 7, HEADS + 4, 16)
    parts = qkv.split((HEADS, 2, 2), 2)
    assert fa3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=HEADS).equal(
        fa3.flash_attn_func(*parts, causal=True)
    )
    three = peaked(1, 7, 3, 2, 16)
    assert fa3.flash_attn_qkvpacked_func(three).equal(fa3.flash_attn_func(*three.unbind(2)))
    with pytest.raises(InvalidArgument, match="num_heads_q=None"):
        fa3.flash_attn_qkvpacked_func(qkv)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_combine(dtype):
    q, k, v = peaked(9, HEADS, 16), peaked(12, 2, 16), peaked(12, 2, 16)
    cu, parts = offsets((9,)), [slice(0, 5), slice(5, 6), slice(6, 12)]
    states = [varlen_attention(q, k[s], v[s], cu, offsets((s.stop - s.start,)), return_lse=True) for s in parts]
    out, lse = fa3.flash_attn_combine(*map(torch.stack, zip(*states, strict=True)), out_dtype=dtype)
    want = formula(q, k, v)
    assert out.dtype == dtype or torch.float32
    if dtype is None:
        close(out, want[0])
        close(lse.T, want[1])
    else:
        assert largest_error(out, want[0].exact) < 2**-7 * float(want[0].exact.abs().max())
    target = torch.empty_like(out)
    assert fa3.flash_attn_combine(*map(torch.stack, zip(*states, strict=True)), out=target)[0] is target
    assert target.equal(out)
    with pytest.raises(InvalidArgument, match="lse_partial"):
        fa3.flash_attn_combine(torch.zeros(2, 3, 4), torch.zeros(3, 3))


def test_every_option_has_a_meaning_or_none():
    """No keyword is taken that is not documented."""
    q = peaked(1, 2, 2, 8)
    for function, name in itertools.product((fa.flash_attn_func,), ("is_causal", "fa_versions")):
        with pytest.raises(TypeError, match=name):
            function(q, q, q, **{name: True})
