"""Gradients through the entry points, and `attention_backward`."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tilewise
from largest_tensor import Largest
from naive import assert_as_torch
from tilewise import (
    InvalidArgument,
    Quantised,
    Unsupported,
    attention,
    attention_backward,
    paged_attention,
    varlen_attention,
)
from tilewise.backends import reference as oracle
from tilewise.backends.torch import backward as tiled
from tilewise.core.options import Options
from tilewise.dispatch import call_cache, planner
from tilewise.reference import gradients
from tilewise.testing.case import Case, make
from tilewise.testing.gradients import judge_gradients, make_gradients, same_formula
from tilewise.validation.backward import backward, differentiable, in_layout


def peaked(*shape, dtype=torch.float32):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 1.7).to(dtype)


def dense(rows=20, keys=33, dtype=torch.float32):
    return [peaked(2, h, n, 16, dtype=dtype).requires_grad_() for h, n in ((4, rows), (2, keys), (2, keys))]


CU_Q, CU_K = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 5, 20], [0, 9, 12, 33]))
CASES = [
    Case(Hkv=2, Lq=33, Lk=70, causal=True, sinks=True),
    Case(Hkv=2, Lq=33, Lk=70, window=(9, 3), dtype="bf16", layout="blhd"),
    Case(Lq=50, Lk=40, causal=True, softcap=5.0, alibi="h", dtype="f16"),
    Case(Lq=33, Lk=40, mask="h1k", mask_kind="f32", alibi="bh", sinks=True),
    Case(Lq=33, Lk=40, mask="b1qk", mask_kind="bf16", dtype="bf16"),
    Case(B=3, Lq=33, Lk=40, lengths=(0, 5, 40), causal=True, sinks=True),
    Case(Lq=33, Lk=40, strides="last", causal=True),
    Case(B=3, Hkv=2, Lq=40, Lk=90, strides="shared", causal=True),
    Case(form="varlen", Hkv=2, q_lengths=(5, 0, 33, 1), lengths=(5, 3, 40, 1), causal=True, sinks=True),
    Case(form="varlen", q_lengths=(9, 30), lengths=(50, 44), mask="1hqk", mask_kind="f32", used=(41, 0)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_through_the_entry_point(case):
    """Forward by the backend that a call takes, backward by what the planner chooses: as right as the rule asks."""
    made = make_gradients(case, slack=0.0)
    inputs = make(case, slack=0.0, sized=True)
    tensors = {**dict(zip("qkv", inputs.args, strict=False)), **inputs.options}
    leaves = {name: tensors[name].requires_grad_() for name in made.call.problem.grads}
    state = inputs.call(None, return_lse=True)
    b = made.clean.tensors
    outgoing = [x.clone() for x in inputs.common_state(state)]
    found = torch.autograd.grad(outgoing, list(leaves.values()), [b.dout, b.dlse])
    shapes = [x.shape for x in leaves.values()]
    assert [x.shape for x in found] == shapes
    assert [x.dtype for x in found] == [x.dtype for x in leaves.values()]
    got = {}
    for name, x in zip(leaves, found, strict=True):
        if name in ("q", "k", "v"):
            got[name] = in_layout(x, case.form == "varlen", case.layout, common=True)
        elif name == "alibi_slopes" and x.ndim == 1:
            continue  # a sum over the batch, below
        else:
            got[name] = x.reshape(b.gradients()[name].shape)
    clean = made.clean
    clean.problem = replace(clean.problem, grads=tuple(got))
    judge_gradients(made, got)
    if "alibi_slopes" in leaves and leaves["alibi_slopes"].ndim == 1:
        problem = replace(clean.problem, grads=("alibi_slopes",))
        exact = gradients(problem, b.forward, b.dout, b.dlse)["alibi_slopes"].sum(0)
        slopes = replace(b, dq=None, dk=None, dv=None, dmask=None, dsinks=None)
        plain = same_formula(problem, slopes)["alibi_slopes"].sum(0)
        x = found[list(leaves).index("alibi_slopes")]
        assert_as_torch(x, exact, plain.to(x.dtype), "dalibi_slopes")


def test_the_low_level_call_gives_what_autograd_gives():
    q, k, v = dense()
    options = {"causal": True, "sinks": peaked(4).requires_grad_(), "mask": peaked(4, 1, 33).requires_grad_()}
    options["alibi_slopes"] = tilewise.alibi_slopes(4).requires_grad_()
    options |= {
        "q_bias": peaked(1, 4, q.shape[2]).requires_grad_(),
        "k_bias": peaked(q.shape[0], 1, 33).requires_grad_(),
    }
    out, lse = attention(q, k, v, return_lse=True, **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    names = ("q", "k", "v", "mask", "sinks", "alibi_slopes", "q_bias", "k_bias")
    inputs = [q, k, v, *(options[name] for name in names[3:])]
    want = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    got = attention_backward(q, k, v, out, lse, dout, dlse=dlse, grads=names, **options)
    assert all(torch.equal(a, b) for a, b in zip(got[:-1], want, strict=True))
    assert got._fields == tuple(f"d{name}" for name in (*names, "score_mod"))
    assert all(x.shape == y.shape for x, y in zip(got[:-1], inputs, strict=True))
    some = attention_backward(q, k, v, out, lse, dout, grads=("k",), **options)
    assert [x is None for x in some] == [True, False, *[True] * 7]
    arrays = [x.detach().numpy() for x in (q, k, v, out, lse, dout)]
    by_numpy = attention_backward(*arrays, causal=True)
    assert type(by_numpy.dq).__module__ == "numpy"


def test_packed_rows_of_no_sequence_get_zero():
    q, k, v = (peaked(40, h, 16).requires_grad_() for h in (4, 2, 2))
    out = varlen_attention(q, k, v, CU_Q, CU_K, causal=True)
    grads = torch.autograd.grad(out, (q, k, v), torch.full_like(out, 3.0))
    assert grads[0][20:].eq(0).all()
    assert grads[1][33:].eq(0).all()
    assert grads[2][9:12].eq(0).all()  # keys of a sequence without queries
    assert grads[2][:9].ne(0).any()


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 2), (3,), (4,)], ids=str)
def test_any_subset_requires_grad(which):
    q, k, v = (x.detach() for x in dense())
    given = [q, k, v, peaked(20, 33), peaked(4)]
    whole = [x.clone().requires_grad_() for x in given]
    state = lambda x: attention(*x[:3], mask=x[3], sinks=x[4])  # noqa: E731
    want = torch.autograd.grad(state(whole).sum(), whole)
    some = [x.clone().requires_grad_(i in which) for i, x in enumerate(given)]
    state(some).sum().backward()
    for i, x in enumerate(some):
        assert (x.grad is not None) == (i in which)
        if i in which:
            assert torch.equal(x.grad, want[i])


def test_strides_of_the_incoming_gradient():
    q, k, v = dense()
    out = attention(q, k, v, causal=True)
    wide = torch.randn(2, 4, 20, 32)
    for dout in (torch.ones(()).expand(out.shape), torch.randn(16).expand(out.shape), wide[..., ::2],
                 torch.randn(16, 20, 4, 2).permute(3, 2, 1, 0)):  # fmt: skip
        got = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        want = torch.autograd.grad(out, (q, k, v), dout.contiguous(), retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def plain(q, k, v):
    """Attention of two query heads a KV head, in torch."""
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def as_torch_rounds(got, function, *inputs):
    """Gradients of a number that `function` gives: off by at most twice what torch's own are, and an ulp."""

    def by(dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        return torch.autograd.grad(function(*leaves), leaves)

    for x, exact, rounded in zip(got, by(torch.float64), by(inputs[0].dtype), strict=True):
        assert_as_torch(x, exact, rounded)


def test_lse_alone_and_unused_outputs():
    q, k, v = dense()
    state = attention(q, k, v, return_lse=True)
    dq, dk, dv = torch.autograd.grad(state.lse.sum(), (q, k, v), retain_graph=True)
    assert dq.abs().sum() > 0
    assert dv.eq(0).all()
    as_torch_rounds((dq, dk), lambda q, k: torch.logsumexp(q @ k.repeat_interleave(2, 1).mT / 4, -1).sum(), q, k)
    assert torch.autograd.grad(state.out.sum(), q)[0].abs().sum() > 0


def test_merged_parts_have_the_gradients_of_the_whole():
    q, k, v = dense()
    parts = [attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 12), slice(12, 33))]
    merged, whole = tilewise.merge(parts).out, attention(q, k, v)
    dout = torch.randn_like(whole)
    for x in (merged, whole):
        as_torch_rounds(torch.autograd.grad(x, (q, k, v), dout), lambda *t: (plain(*t) * dout).sum(), q, k, v)


def test_what_is_kept():
    """The inputs, out and lse; nothing that grows as Lq * Lk, and nothing at all without a gradient."""
    q, k, v = dense()
    lengths = torch.tensor([33, 20])
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out, lse = attention(q, k, v, causal=True, kv_lengths=lengths, return_lse=True)
    assert sorted(x.data_ptr() for x in kept) == sorted(x.data_ptr() for x in (q, k, v, out, lse, lengths))
    count = len(kept)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x), torch.no_grad():
        attention(q, k, v, causal=True)
    assert len(kept) == count
    gone = weakref.ref(attention(q, k, v, causal=True))  # saved as an output: no cycle keeps it
    assert gone() is None


def test_a_remembered_call_without_gradients_does_not_serve_one_with():
    q, k, v = (x.detach() for x in dense())
    mask, lengths = peaked(20, 33), torch.tensor([33, 20], dtype=torch.int32)
    for options in ({}, {"mask": mask}, {"kv_lengths": lengths, "validate": False}, {"sinks": peaked(4)}):
        for _ in range(3):
            assert not attention(q, k, v, **options).requires_grad
        trained = q.clone().requires_grad_()
        for _ in range(3):
            assert attention(trained, k, v, **options).requires_grad
            with torch.no_grad():
                assert not attention(trained, k, v, **options).requires_grad
    trained = mask.clone().requires_grad_()
    attention(q, k, v, mask=trained).sum().backward()
    assert trained.grad.abs().sum() > 0


REPEATED = {
    "plain": {},
    "rules": {"causal": True, "window": 9, "softcap": 5.0, "scale": 0.3},
    "layout": {"layout": "blhd", "causal": True},
    "tensors": {
        "mask": peaked(4, 1, 33).requires_grad_(), "sinks": torch.nn.Parameter(peaked(4)),
        "alibi_slopes": peaked(4).requires_grad_(), "kv_lengths": torch.tensor([33, 20], dtype=torch.int32),
    },
}  # fmt: skip


def repeated(name):
    q, k, v = dense()
    options = REPEATED[name]
    if "layout" in options:
        q, k, v = (x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v))
    leaves = [q, k, v, *(x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad)]
    state = attention(q, k, v, return_lse=True, **options)
    return leaves, state, torch.randn(state.out.shape), torch.randn(state.lse.shape)


@pytest.mark.parametrize("name", REPEATED)
def test_a_repeated_backward_pass_is_not_checked_again(name, monkeypatch):
    call_cache.forget()
    leaves, state, dout, dlse = repeated(name)
    want = [torch.autograd.grad(state, leaves, (scale * dout, dlse), retain_graph=True) for scale in (1, 2)]
    monkeypatch.setattr(tilewise.autograd, "_checked", None)
    for _ in range(2):
        for scale, grads in zip((1, 2), want, strict=True):
            got = torch.autograd.grad(state, leaves, (scale * dout, dlse), retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(got, grads, strict=True))


def test_other_backward_passes_are_told_apart(monkeypatch):
    """Other gradients, without one of lse, other strides, another mode: each is checked, and right."""
    call_cache.forget()
    checked, checks = [], tilewise.autograd._checked
    monkeypatch.setattr(tilewise.autograd, "_checked", lambda *a: (checked.append(1), checks(*a))[1])
    leaves, (out, lse), dout, dlse = repeated("tensors")
    q, k, v = leaves[:3]
    alone = attention(q, k.detach(), v.detach())
    fresh = lambda x: call_cache.forget() or x()  # noqa: E731
    ways = {
        "all": lambda: torch.autograd.grad((out, lse), leaves, (dout, dlse), retain_graph=True),
        "dq": lambda: torch.autograd.grad(alone, q, dout, retain_graph=True),
        "no dlse": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
        "strides": lambda: torch.autograd.grad(
            out, leaves, dout.transpose(1, 2).contiguous().transpose(1, 2), retain_graph=True
        ),
        "expanded": lambda: torch.autograd.grad(out.sum(), leaves, retain_graph=True),
    }
    want = {name: fresh(way) for name, way in ways.items()}
    call_cache.forget()
    checked.clear()
    for _ in range(2):
        for name, way in ways.items():
            assert all(torch.equal(a, b) for a, b in zip(way(), want[name], strict=True))
    assert len(checked) == len(ways) + 1  # an expanded one is copied each time
    torch.use_deterministic_algorithms(True)
    try:
        ways["all"]()
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(checked) == len(ways) + 2


def test_views_of_one_projection():
    """q, k and v beside each other in memory; and v in k's own memory, which is another call than v elsewhere."""
    call_cache.forget()
    qkv = peaked(2, 20, 12, 16).requires_grad_()
    wide = peaked(2, 20, 4, 24)
    for q, k, v in [qkv.split(4, 2), (qkv[:, :, :4], wide, wide[..., :16]), (qkv[:, :, :4], wide, wide[..., 8:])] * 2:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        q = torch.nn.functional.pad(q, (0, k.shape[-1] - 16))
        copies = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
        want = torch.autograd.grad(attention(*copies, causal=True).cos().sum(), copies)
        views = [x.detach().requires_grad_() for x in (q, k, v)]
        got = torch.autograd.grad(attention(*views, causal=True).cos().sum(), views)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_in_place_changes_are_seen():
    q, k, v = dense()
    out = attention(q, k, v)
    with torch.no_grad():
        k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_graph_of_the_backward_pass_changes_no_bit():
    q, k, v = dense()
    (dq,) = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    (want,) = torch.autograd.grad(attention(q, k, v).sum(), q)
    assert torch.equal(dq, want)


def test_refusals():
    q, k, v = dense()
    out, lse = attention(q, k, v, return_lse=True)
    dout = torch.ones_like(out)
    int8, arrays = Quantised.from_float(k.detach(), "int8", 32), [x.detach().numpy() for x in (q, k, v)]
    pages, table, lengths = torch.randn(4, 16, 2, 16), torch.zeros(2, 3, dtype=torch.int32), torch.ones(2).int()
    for argument, words, call in [
        ("k", "Quantised", lambda: attention(q, int8, v)),
        ("v", "Quantised", lambda: attention(q, k, int8)),
        ("out", "torch.no_grad", lambda: attention(q, k, v, out=torch.empty_like(q))),
        ("q", "paged", lambda: paged_attention(q, pages, pages, table, lengths)),
        ("mask", "arrays other than torch tensors", lambda: attention(*arrays, mask=peaked(20, 33).requires_grad_())),
        ("k", "dequantise", lambda: attention_backward(q, int8, v, out, lse, dout)),
        ("cu_seqlens_q", "given alone", lambda: attention_backward(q, k, v, out, lse, dout, cu_seqlens_q=table[0])),
        ("cu_seqlens_k", "given alone", lambda: attention_backward(q, k, v, out, lse, dout, cu_seqlens_k=table[0])),
        ("block_table", "no gradients", lambda: attention_backward(q, k, v, out, lse, dout, block_table=table)),
        ("dout", "as the forward pass", lambda: attention_backward(q, k, v, out, lse, dout[:1])),
        ("dout", "float64", lambda: attention_backward(q, k, v, out, lse, dout.double())),
        ("lse", "as the forward pass", lambda: attention_backward(q, k, v, out, lse[..., :1], dout)),
        ("dlse", "float64", lambda: attention_backward(q, k, v, out, lse, dout, dlse=lse.double())),
        ("out", "shape|expected", lambda: attention_backward(q, k, v, out[..., :4], lse, dout)),
        ("grads", "'q'", lambda: attention_backward(q, k, v, out, lse, dout, grads=())),
        ("grads", "'q'", lambda: attention_backward(q, k, v, out, lse, dout, grads=("dq",))),
        ("grads", "tuple", lambda: attention_backward(q, k, v, out, lse, dout, grads="q")),
        ("grads", "tuple", lambda: attention_backward(q, k, v, out, lse, dout, grads=[["q"]])),
        ("grads", "tuple", lambda: attention_backward(*(x.to("meta") for x in (q, k, v, out, lse, dout)), grads="q")),
        ("grads", "float mask", lambda: attention_backward(q, k, v, out, lse, dout, grads=("mask",))),
        ("grads", "sinks", lambda: attention_backward(q, k, v, out, lse, dout, grads=("sinks",))),
        ("deterministic", "True or False", lambda: attention(q, k, v, deterministic=1)),
        ("deterministic", "True or False", lambda: attention_backward(q, k, v, out, lse, dout, deterministic=1)),
        ("max_q", "cu_seqlens", lambda: attention_backward(q, k, v, out, lse, dout, max_q=3)),
        ("split_size", "unknown", lambda: attention_backward(q, k, v, out, lse, dout, split_size=3)),
        ("window_size", "window", lambda: attention_backward(q, k, v, out, lse, dout, window_size=3)),
        ("backend", "one of", lambda: attention_backward(q, k, v, out, lse, dout, backend="fastest")),
    ]:  # fmt: skip
        with pytest.raises(InvalidArgument, match=words) as refusal:
            call()
        assert str(refusal.value).startswith(argument)
    with pytest.raises(Unsupported, match="metal"):
        attention_backward(q, k, v, out, lse, dout, backend="metal")


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize(
    ("case", "name", "bias"),
    [
        (Case(mask="qk", mask_kind="f32"), "mask", -1e9),
        (Case(mask="bhqk", mask_kind="f32", causal=True, Hkv=2), "mask", torch.finfo(torch.float32).min),
        (Case(mask="qk", mask_kind="f32", sinks=True, softcap=5.0, dtype="bf16"), "mask", 1e12),
        (Case(mask="hqk", mask_kind="bf16", dtype="f16"), "mask", torch.finfo(torch.bfloat16).min),
        (Case(q_bias="1h", window=(9, 4)), "q_bias", 1e30),
        (Case(form="varlen", k_bias="h", lengths=(20, 30), q_lengths=(20, 11), dtype="bf16"), "k_bias", -1e30),
    ],
    ids=str,
)
def test_weights_sum_to_one_where_lse_has_no_digits_for_that(case, name, bias, backend):
    """Rows of one large bias: their lse rounds to it. Judged by plain autograd in float32, which keeps the weights."""
    made = make_gradients(replace(case, Lq=40, Lk=40), slack=0.0)
    for call in (made.call, made.clean):
        x = getattr(call.tensors.forward, name)
        own = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]
        rows = {"mask": (..., slice(0, None, 3), slice(None)), "q_bias": (..., slice(0, None, 3)), "k_bias": ...}
        own[rows[name]] = bias
        oracle.run(oracle.plan(call.problem), call.tensors.forward)
    found = made.run(backend)
    p, b = made.clean.problem, made.clean.tensors
    exact, plain = (gradients(p, b.forward, b.dout, b.dlse, compute) for compute in (torch.float64, torch.float32))
    for which, want in exact.items():
        bound = 2 * (plain[which] - want).abs().max() + 32 * torch.finfo(p.q_dtype).eps * want.abs().max()
        assert (found[which] - want).abs().max() <= bound, which


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_parts_of_a_ring_keep_their_share_where_lse_is_large(backend):
    """Each is given the lse of all keys: its own weights sum to less than 1."""
    q, k, v = (x.detach() for x in dense(20, 40))
    mask = torch.full((20, 40), -3e5)
    out, lse = attention(q, k, v, mask=mask, return_lse=True)
    both = [
        attention_backward(q, k[:, :, half], v[:, :, half], out, lse, out, mask=mask[:, half], backend=backend)
        for half in (slice(0, 13), slice(13, 40))
    ]
    whole = attention_backward(q, k, v, out, lse, out, mask=mask, backend=backend)
    difference = torch.cat([part.dv for part in both], 2) - whole.dv
    assert difference.abs().max() < 0.05 * whole.dv.abs().max()  # an lse of 3e5 is rounded by up to 1 / 64


def test_batches_of_gradients_are_refused():
    q, k, v = (torch.randn(1, 2, 3, 8, requires_grad=True) for _ in range(3))
    state = attention(q, k, v, return_lse=True)
    for out in state:
        with pytest.raises(InvalidArgument, match=r"batch of gradients.*is_grads_batched"):
            torch.autograd.grad(out, q, torch.randn(4, *out.shape), is_grads_batched=True)
    with pytest.raises(InvalidArgument, match=r"batch of gradients.*vectorize"):
        torch.autograd.functional.jacobian(lambda q: attention(q, k, v), q, vectorize=True)


def test_an_out_that_is_read_may_lie_among_the_inputs():
    """In one buffer with them, or expanded: unlike an `out=` it is not written."""
    buffer = torch.randn(4, 2, 3, 7, 8).permute(1, 2, 3, 0, 4).contiguous()  # [B, H, L, 4, D]
    q, k, v, out = buffer.unbind(3)
    out[...], lse = attention(q, k, v, return_lse=True)
    want = attention_backward(*(x.contiguous() for x in (q, k, v, out)), lse, torch.ones_like(q))
    got = attention_backward(q, k, v, out, lse, torch.ones_like(q))
    even, ones = torch.zeros(()).expand(q.shape), torch.ones_like(q)  # zero everywhere
    flat = attention_backward(q, k, v, even, lse, ones).dq, attention_backward(q, k, v, even.clone(), lse, ones).dq
    for x, y in (*zip(got[:3], want[:3], strict=True), flat):
        assert torch.equal(x, y)


def test_the_backward_pass_on_meta_gives_shapes():
    q, k, v = (torch.randn(1, heads, 5, 8, device="meta") for heads in (4, 2, 2))
    out, lse = attention(q, k, v, return_lse=True)
    found = attention_backward(q, k, v, out, lse, out, causal=True)
    assert all(g.is_meta and g.shape == x.shape for g, x in zip(found[:3], (q, k, v), strict=True))
    for name, wrong in {"k": k[..., :4], "v": v[:, :, :4], "out": out[:, :3], "lse": lse[..., None], "dout": k}.items():
        given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": out} | {name: wrong}
        with pytest.raises(InvalidArgument, match=f"^{name}: got "):
            attention_backward(**given)
    with pytest.raises(InvalidArgument, match="softcap: got -1"):
        attention_backward(q, k, v, out, lse, out, softcap=-1.0)


@pytest.mark.parametrize("sizes", [(0, 3, 5), (2, 0, 5), (2, 3, 0), (0, 0, 0)])
def test_empty_sizes(sizes):
    B, Lq, Lk = sizes
    q, k, v = (torch.randn(B, h, n, 16, requires_grad=True) for h, n in ((4, Lq), (2, Lk), (2, Lk)))
    sinks = torch.randn(4, requires_grad=True)
    state = attention(q, k, v, sinks=sinks, return_lse=True)
    (state.out.sum() + 2 * state.lse.sum()).backward()
    assert all(x.grad.eq(0).all() and x.grad.shape == x.shape for x in (q, k, v))
    assert torch.equal(sinks.grad, torch.full((4,), 2.0 * B * Lq))  # a row that sees nothing has its sink for an lse


def test_a_plan_shows_both_directions(monkeypatch):
    q, k, v = dense()
    plan = tilewise.plan(q, k, v, causal=True)
    assert plan.problem.return_lse
    assert plan.backward.problem.grads == ("q", "k", "v")
    assert plan.backward.backend in str(plan)
    assert "gradients of q, k, v" in str(plan)
    with torch.no_grad():
        assert tilewise.plan(q, k, v).backward is None
    assert tilewise.plan(q.detach(), k, v.detach()).backward.problem.grads == ("k",)
    assert tilewise.plan(q, k, v, backend="reference").backward.backend == "reference"
    named = tilewise.plan(q, k, v, sinks=peaked(4).requires_grad_())
    assert named.backward.problem.grads == ("q", "k", "v", "sinks")


def test_a_backend_without_a_backward_pass_is_passed_over_with_the_reason():
    q, k, v = dense()
    plan = tilewise.plan(q, k, v)
    reasons = dict(plan.backward.passed_over)
    assert all(reasons.values())
    for name in reasons:
        if not hasattr(planner.load(name), "supports_backward"):
            assert planner.supports(name, plan.backward.problem)


@pytest.fixture
def problems(monkeypatch):
    """The problems of the torch backend's backward passes."""
    seen, run = [], tiled.run_backward
    monkeypatch.setattr(tilewise.backends.torch, "run_backward", lambda p, t: (seen.append(p.problem), run(p, t)))
    return seen


@pytest.fixture
def _strict():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def backward_of_all(**options):
    """A backward pass by each way to ask for one."""
    q, k, v = dense()
    out, lse = attention(q, k, v, return_lse=True)
    attention_backward(q, k, v, out, lse, out, backend="torch", **options)
    attention(q, k, v, backend="torch", **options).sum().backward()
    packed = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    cu = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (20, 33)]
    varlen_attention(*packed, *cu, backend="torch", **options).sum().backward()
    torch.ops.tilewise.attention(q, k, v, backend="torch", **options).sum().backward()


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"deterministic": False}], ids=str)
def test_deterministic_is_handed_on(problems, options):
    backward_of_all(**options)
    assert [p.deterministic for p in problems] == [options.get("deterministic", True)] * 4
    q, k, v = dense()
    plan = tilewise.plan(q, k, v, **options)
    assert plan.backward.problem.deterministic == options.get("deterministic", True)
    assert plan.problem.deterministic
    assert ("sums in any order allowed" in str(plan)) == (options == {"deterministic": False})


@pytest.mark.usefixtures("_strict")
def test_use_deterministic_algorithms_is_obeyed(problems):
    backward_of_all(deterministic=False)
    assert [p.deterministic for p in problems] == [True] * 4
    q, k, v = dense()
    assert tilewise.plan(q, k, v, deterministic=False).backward.problem.deterministic


def test_activation_checkpointing():
    q, k, v = dense()
    block = lambda q, k, v: attention(q * 2, k, v, causal=True) * 3  # noqa: E731
    want = torch.autograd.grad(block(q, k, v).sum(), (q, k, v))
    got = torch.autograd.grad(checkpoint(block, q, k, v, use_reentrant=False).sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype):
    """Neither around the call nor around its backward pass."""
    q, k, v = dense(dtype=dtype)
    want = torch.autograd.grad(attention(q, k, v, causal=True).float().sum(), (q, k, v))
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v, causal=True)
        got = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert out.dtype == dtype
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_memory_is_flat_in_length():
    """The torch backend's tiles: what it allocates at once does not grow as Lq * Lk."""
    sizes = []
    for length in (1024, 2048):
        call = make(Case(B=1, H=1, Lq=length, D=8, causal=True)).checked(return_lse=True)
        call.tensors.out.fill_(0.5)
        call.tensors.lse.fill_(3.0)
        made = backward(call, Options(), call.lse, call.out, None, differentiable(call.problem))
        with Largest() as largest:
            tiled.run_backward(tiled.plan_backward(made.problem), made.tensors)
        sizes.append(largest.size)
    assert sizes[0] == sizes[1] == 4 * 128 * 256


def test_the_formula_of_the_suite_is_right():
    """What torch's error is measured by is itself near the oracle."""
    made = make_gradients(Case(Hkv=2, Lq=33, Lk=40, causal=True, softcap=5.0, sinks=True, alibi="h"))
    p, b = made.clean.problem, made.clean.tensors
    exact, plain = gradients(p, b.forward, b.dout, b.dlse), same_formula(p, b)
    for name, x in exact.items():
        assert (plain[name] - x).abs().max() < 1e-4 * x.abs().max()
