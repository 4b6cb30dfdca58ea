"""`return_aux`: statistics of every entry point, by the oracle, and their gradients."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import tilewise
from tilewise import Aux, InvalidArgument, Unsupported, attention, paged_attention, plan, varlen_attention
from tilewise.backends import reference as honest
from tilewise.core.problem import GRADS
from tilewise.core.tensors import sequences
from tilewise.dispatch import planner
from tilewise.reference import attend, statistics, with_leaves
from tilewise.testing.case import Case, make
from tilewise.testing.cases import CASES, GRADIENTS
from tilewise.testing.check import Mismatch, judge, largest_error
from tilewise.testing.statistics import check_statistics, with_indices
from tilewise.validation.backward import BackwardCall, BackwardTensors

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of torch's own imports
EVERYTHING = ("lse", "max_logits", "entropy", "key_mass", "weights")
DIFFERENTIABLE = ("entropy", "key_mass", "weights")


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_by_torch(case):
    check_statistics(case, "torch", queries=None if len(str(case)) % 2 else 3)


@pytest.mark.parametrize("case", CASES[::20], ids=str)
def test_by_the_best_backend(case):
    check_statistics(case, None, queries=3)


@pytest.mark.parametrize("case", CASES[1::20], ids=str)
def test_mass_and_weights_alone(case):
    """Then a first pass is left out."""
    check_statistics(case, None, queries=5, names=("lse", "key_mass", "weights"))


def test_the_oracle_by_hand():
    """Two keys with weights 1/4 and 3/4, and the same with a sink that takes a half."""
    q, k = torch.ones(1, 1, 2, 1), torch.tensor([0.0, math.log(3)]).view(1, 1, 2, 1)
    for sink, share, top in ((None, 1.0, math.log(3)), (torch.tensor([math.log(4)]), 0.5, math.log(3))):
        p = torch.tensor([0.25, 0.75]) * share
        for backend in ("reference", "torch"):
            _, aux = attention(
                q, k, k, scale=1.0, sinks=sink, return_aux=EVERYTHING, backend=backend,
                weight_indices=torch.tensor([[[1, -1], [0, 2]]]),
            )  # fmt: skip
            assert aux.entropy.flatten().tolist() == pytest.approx([-(p * p.log()).sum().item()] * 2, rel=1e-6)
            assert aux.max_logits.flatten().tolist() == pytest.approx([top] * 2)
            assert aux.key_mass.flatten().tolist() == pytest.approx((2 * p).tolist())
            assert aux.weights.flatten().tolist() == pytest.approx([float(p[1]), 0, float(p[0]), 0])


# Mistakes


def no_sinks_in_entropy(s, first, indices):
    found = statistics(s, first, indices)
    p = s.probs / s.probs.sum(-1, keepdim=True).clamp_min(1e-300)
    return found | {"entropy": torch.special.entr(p).sum(-1)}


def a_term_of_the_sink(s, first, indices):
    rest = (1 - s.probs.sum(-1)).clamp_min(0) * s.lse.isfinite()
    found = statistics(s, first, indices)
    return found | {"entropy": found["entropy"] + torch.special.entr(rest)}


def mass_of_hidden_keys(s, first, indices):
    p = torch.where(s.visible, s.probs, 1e-3)
    return statistics(s, first, indices) | {"key_mass": p[:, first:].sum(1)}


def mass_of_all_queries(s, first, indices):
    return statistics(s, 0, indices)


def mass_of_the_first_queries(s, first, indices):
    return statistics(s, first, indices) | {"key_mass": s.probs[:, : s.probs.shape[1] - first].sum(1)}


def max_before_masks(s, first, indices):
    return statistics(s, first, indices) | {"max_logits": torch.where(s.visible, s.scores, 9.0).amax(-1)}


def max_of_sinks(s, first, indices):
    found = statistics(s, first, indices)
    return found | {"max_logits": torch.maximum(found["max_logits"], s.lse - 1)}


def max_of_nothing_is_zero(s, first, indices):
    found = statistics(s, first, indices)
    return found | {"max_logits": found["max_logits"].clamp_min(-1e30)}


def entropy_in_bits(s, first, indices):
    found = statistics(s, first, indices)
    return found | {"entropy": found["entropy"] / math.log(2)}


def weights_of_the_next_key(s, first, indices):
    return statistics(s, first, torch.where(indices >= 0, indices + 1, indices))


def weights_of_the_first_head(s, first, indices):
    found = statistics(s, first, indices)
    return found | {"weights": found["weights"][:1].expand_as(found["weights"])}


MISTAKES = [
    *(no_sinks_in_entropy, a_term_of_the_sink, mass_of_hidden_keys, mass_of_all_queries, mass_of_the_first_queries),
    *(max_before_masks, max_of_sinks, max_of_nothing_is_zero, entropy_in_bits, weights_of_the_next_key),
    weights_of_the_first_head,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.__name__)
def test_the_suite_rejects(mistake, monkeypatch):
    def run(plan, tensors, wanted):
        wanted.clear()
        for seq in sequences(plan.problem, tensors):
            own = wanted.of(seq)
            for name, x in mistake(attend(seq), own.first_query(seq), own.indices).items():
                getattr(own, name).copy_(x)

    monkeypatch.setattr(honest, "run_statistics", run)

    def all_pass():
        for case in CASES[::5]:
            check_statistics(case, "reference", queries=3)

    with pytest.raises(Mismatch):
        all_pass()


@pytest.mark.parametrize("case", CASES[::40], ids=str)
def test_the_oracle_passes(case):
    check_statistics(case, "reference", queries=3)


# Gradients


def oracle_gradients(call, names, compute):
    incoming = call.requested.statistics
    leaves, tensors = with_leaves(call.problem, call.tensors, names, compute)
    total = torch.zeros((), dtype=compute)
    for seq in sequences(call.problem, tensors):
        own = incoming.of(seq)
        result = statistics(attend(seq, compute), own.first_query(seq), own.indices)
        total = total + sum((result[name] * getattr(own, name).to(compute)).sum() for name in DIFFERENTIABLE)
    if not total.requires_grad:
        return {name: torch.zeros_like(x) for name, x in leaves.items()}
    return dict(zip(leaves, torch.autograd.grad(total, list(leaves.values()), materialize_grads=True), strict=True))


def as_argument(x, call, name, layout, like):
    held = BackwardTensors(call.tensors, x)
    setattr(held, f"d{name}", x)
    return BackwardCall(call.problem, held, layout).result(name, like.double())


def check_gradients(case, device="cpu"):
    inputs = make(case, device)
    requested = with_indices(inputs) | {"key_mass_queries": 3}
    options, call = inputs.options | requested, inputs.checked(**requested)
    there = {name: getattr(call.tensors, name) for name in GRADS if name != "v"}
    names = tuple(name for name, x in there.items() if x is not None and x.is_floating_point())
    named = dict(zip("qkv", inputs.args[:3], strict=True)) | options
    leaves = {name: named[name].detach().requires_grad_() for name in names}
    args = [leaves.get(name, named[name]) for name in "qkv"]
    options |= {name: x for name, x in leaves.items() if name in options}
    _, aux = inputs.entry(*args, *inputs.args[3:], **options)
    numbers = torch.Generator().manual_seed(11)
    total = 0.0
    for name in DIFFERENTIABLE:
        x = getattr(aux, name)
        call.requested.results[name].copy_(torch.randn(x.shape, generator=numbers))
        total = total + (x * call.requested.results[name]).sum()
    found = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    exact, plain = (oracle_gradients(call, names, dtype) for dtype in (torch.float64, torch.float32))
    for name, x in zip(leaves, found, strict=True):
        layout = inputs.options.get("layout", "bhld")
        right, rounded = (as_argument(y[name], call, name, layout, leaves[name]) for y in (exact, plain))
        # The 2x rule, and an ulp of the terms: they are about 1 and may cancel, with one visible key to 0.
        size = max(1.0, float(right.abs().max())) if right.numel() else 1.0
        allowed = 2 * largest_error(rounded, right) + torch.finfo(x.dtype).eps * size
        judge(f"d{name}", x, right, allowed, x.dtype)


# Not those whose V or shared columns are views: their gradients are those of the whole.
@pytest.mark.parametrize(
    "case", [c for c in GRADIENTS if c.form != "paged" and not (c.latent or c.shared)][::3], ids=str
)
def test_gradients(case):
    check_gradients(case)


def test_gradients_that_forget_the_sink_are_found(monkeypatch):
    from tilewise.backends.torch import statistics_gradients as module

    honest_by_weights = module._StatisticRows._by_weights

    def wrong(self, rows, cols, s, probs):
        return honest_by_weights(self, rows, cols, s, probs) + 0.01 * (probs > 0.1)

    check_gradients(Case(Hkv=2, sinks=True, causal=True))
    monkeypatch.setattr(module._StatisticRows, "_by_weights", wrong)
    with pytest.raises(Mismatch):
        check_gradients(Case(Hkv=2, sinks=True, causal=True))


def test_entropy_and_out_together():
    """A loss of both, as entropy regularisation has it, equals the sum of the two gradients."""
    q, k, v = (torch.randn(1, h, 40, 16, requires_grad=True) for h in (4, 2, 2))

    def loss(out=0.0, entropy=0.0):
        found, aux = attention(q, k, v, causal=True, return_aux=("entropy", "max_logits", "lse"))
        assert not aux.max_logits.requires_grad
        assert aux.lse.requires_grad
        return out * found.square().sum() + entropy * aux.entropy.mean() + out * aux.lse.sum()

    both, first, second = (torch.autograd.grad(loss(*x), (q, k, v)) for x in ((1.0, 0.5), (1.0, 0.0), (0.0, 0.5)))
    for x, a, b in zip(both, first, second, strict=True):
        torch.testing.assert_close(x, a + b)


def test_gradcheck():
    """In float64, by differences; statistics are those before dropout."""
    shapes = ((1, 4, 5, 8), (1, 2, 7, 8), (4,))
    q, k, sinks = (torch.randn(*s, dtype=torch.float64).requires_grad_() for s in shapes)
    indices = torch.tensor([[0, 3], [6, 1], [2, -1], [5, 5], [4, 0]])[None]

    def statistics_of(q, k, sinks, name, **dropout):
        return getattr(
            attention(
                q, k, k.detach(), sinks=sinks, softcap=3.0, causal=True, return_aux=EVERYTHING, key_mass_queries=3,
                weight_indices=indices, **dropout,
            )[1], name,
        )  # fmt: skip

    for name in DIFFERENTIABLE:
        assert torch.autograd.gradcheck(lambda *x, name=name: statistics_of(*x, name), (q, k, sinks))
    for name in EVERYTHING:
        with_dropout = statistics_of(q, k, sinks, name, dropout_p=0.5, dropout_seed=1)
        assert with_dropout.equal(statistics_of(q, k, sinks, name))


def test_large_scores_have_gradients():
    """Where float32 has no digits for log(sum) in lse: every logit has a bias of -1e9."""
    q, k = torch.randn(1, 2, 8, 16, requires_grad=True), torch.randn(1, 2, 8, 16)
    found = []
    for bias in (0.0, -(2.0**30)):
        _, aux = attention(q * 1e-5, k, k, k_bias=torch.full((1, 1, 8), bias), return_aux=("entropy",))
        found.append(torch.autograd.grad(aux.entropy.sum(), q)[0])
        assert aux.entropy.flatten().tolist() == pytest.approx([math.log(8)] * 16, rel=1e-3)
    assert float((found[0] - found[1]).abs().max()) <= 1e-6


def test_what_is_not_served_says_so():
    q = torch.randn(1, 1, 8, 16, requires_grad=True)
    _, aux = attention(q, q, q, return_aux=("entropy",))
    (first,) = torch.autograd.grad(aux.entropy.sum(), q, create_graph=True)
    with pytest.raises(Unsupported, match="there are no second derivatives of statistics"):
        first.sum().backward()
    with forward_ad.dual_level():
        x = forward_ad.make_dual(q.detach(), torch.ones_like(q))
        with pytest.raises(Unsupported, match="no forward-mode derivatives of statistics"):
            attention(x, x, x, return_aux=("entropy",))


# Ways of a call


def drawn(*shapes):
    numbers = torch.Generator().manual_seed(3)
    return [torch.randn(*shape, generator=numbers) * 2 for shape in shapes]


def same(a, b, exact=True):
    for name in EVERYTHING:
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) is (y is None), name
        if x is not None:
            bound = {"rtol": 0, "atol": 0} if exact else {}
            torch.testing.assert_close(torch.as_tensor(x), torch.as_tensor(y), **bound)


def test_forms_agree():
    """Dense, packed, paged, blhd, NumPy and repeated calls."""
    q, k, v = drawn((2, 4, 24, 32), (2, 2, 40, 32), (2, 2, 40, 32))
    indices = torch.randint(-1, 40, (2, 24, 3), generator=torch.Generator().manual_seed(1))
    options = {"return_aux": EVERYTHING, "weight_indices": indices, "key_mass_queries": 5, "causal": True}
    out, want = attention(q, k, v, **options)
    assert attention(q, k, v, causal=True).equal(out)
    for _ in range(2):
        again, aux = attention(q, k, v, **options)
        assert again.equal(out)
        same(aux, want)
    _, aux = attention(*(x.numpy() for x in (q, k, v)), **options | {"weight_indices": indices.numpy()})
    assert isinstance(aux.key_mass, np.ndarray)
    same(aux, want)
    _, aux = attention(*(x.transpose(1, 2) for x in (q, k, v)), layout="blhd", **options)
    same(Aux(*(x.transpose(1, 2) for x in aux)), want)
    pack = lambda x: x.transpose(1, 2).flatten(0, 1)  # noqa: E731
    cu = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (24, 40)]
    _, aux = varlen_attention(pack(q), pack(k), pack(v), *cu, **options | {"weight_indices": indices.flatten(0, 1)})
    assert aux.key_mass.shape == (80, 4)
    same(Aux(*(x.unflatten(0, (2, -1)).transpose(1, 2) for x in aux)), want, exact=False)
    pages = [x.transpose(1, 2).reshape(10, 8, 2, 32) for x in (k, v)]
    table = torch.cat([torch.arange(10).view(2, 5), torch.zeros(2, 1)], 1).int()
    lengths = torch.tensor([40, 40], dtype=torch.int32)
    _, aux = paged_attention(q, *pages, table, lengths, **options)
    assert aux.key_mass.shape == (2, 4, 48)
    assert not aux.key_mass[..., 40:].any()
    same(aux._replace(key_mass=aux.key_mass[..., :40]), want, exact=False)


def test_only_what_is_requested():
    q, k, v = drawn((1, 2, 5, 16), (1, 2, 7, 16), (1, 2, 7, 16))
    state = attention(q, k, v, return_lse=True)
    for names in ((), ("lse",), ("entropy",), ["max_logits", "lse"], ("key_mass", "key_mass")):
        out, aux = attention(q, k, v, return_aux=names)
        assert out.equal(state.out)
        assert {name for name in EVERYTHING if getattr(aux, name) is not None} == set(names)
    target = torch.full_like(state.out, math.nan)
    assert attention(q, k, v, return_aux=("entropy",), out=target)[0] is target
    assert target.equal(state.out)


@pytest.mark.parametrize("sizes", [(0, 3, 5), (2, 0, 5), (2, 3, 0)])
def test_empty(sizes):
    B, Lq, Lk = sizes
    q, k = torch.randn(B, 4, Lq, 16), torch.randn(B, 2, Lk, 16)
    indices = torch.zeros(B, Lq, 2, dtype=torch.int32)
    _, aux = attention(q, k, k, return_aux=EVERYTHING, weight_indices=indices, sinks=torch.zeros(4))
    assert [tuple(x.shape) for x in aux] == [(B, 4, Lq)] * 3 + [(B, 4, Lk), (B, 4, Lq, 2)]
    assert (aux.max_logits == -math.inf).all()
    assert not any(x.any() for x in aux[2:])


def test_under_torch_compile():
    q, k, v = drawn((1, 4, 24, 32), (1, 2, 40, 32), (1, 2, 40, 32))
    sinks = torch.randn(4)
    indices = torch.randint(-1, 40, (1, 24, 3))

    def call(q, k, v, sinks):
        return attention(
            q, k, v, causal=True, sinks=sinks, return_aux=EVERYTHING, weight_indices=indices, key_mass_queries=4
        )

    compiled = torch.compile(call, fullgraph=True)
    same(compiled(q, k, v, sinks)[1], call(q, k, v, sinks)[1])
    gradients = []
    for run in (call, compiled):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
        out, aux = run(*leaves)
        loss = out.sum() + sum(getattr(aux, name).square().sum() for name in DIFFERENTIABLE)
        gradients.append(torch.autograd.grad(loss, leaves))
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_in_transforms():
    q, k, v = drawn((3, 1, 4, 24, 32), (1, 2, 40, 32), (1, 2, 40, 32))

    def entropy(q):
        return attention(q, k, v, return_aux=("entropy", "key_mass"))[1].entropy

    rows = torch.func.vmap(entropy)(q)
    assert torch.stack([entropy(x) for x in q]).equal(rows)
    by_func = torch.func.grad(lambda q: entropy(q).sum())(q[0])
    leaf = q[0].clone().requires_grad_()
    assert torch.autograd.grad(entropy(leaf).sum(), leaf)[0].equal(by_func)


def test_the_plan_names_them():
    q, k, v = drawn((1, 4, 24, 32), (1, 2, 40, 32), (1, 2, 40, 32))
    found = plan(q, k, v, return_aux=("entropy",))
    assert found.statistics.backend == "torch"
    assert "statistics torch" in str(found)
    assert plan(q, k, v, return_aux=("lse",)).statistics is None
    assert planner.statistics(found.problem, "reference")[0].backend == "reference"


def test_meta_tensors_have_shapes():
    q, k = torch.empty(2, 4, 24, 32, device="meta"), torch.empty(2, 2, 40, 32, device="meta")
    _, aux = attention(q, k, k, return_aux=("entropy", "key_mass"))
    assert tuple(aux.key_mass.shape) == (2, 4, 40)
    assert tuple(aux.entropy.shape) == (2, 4, 24)


# Caches


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_caches(rotate, layout):
    lengths, (k, v) = [9, 21], drawn((2, 2, 21, 32), (2, 2, 21, 32))
    (q,) = drawn((2, 4, 3, 32))
    rows = tilewise.KVCache(2, 2, 64, 32, rotate=rotate)
    rows.append(k, v, counts=lengths)
    pages = tilewise.PagedKVCache(16, 4, kv_heads=2, head_dim=32, rotate=rotate)
    ids = [pages.create() for _ in lengths]
    for b, n in enumerate(lengths):
        pages.append(ids[b], k[b, :, :n].transpose(0, 1), v[b, :, :n].transpose(0, 1))
    indices = torch.randint(-1, 21, (2, 3, 2))
    options = {"return_aux": EVERYTHING, "weight_indices": indices, "layout": layout}
    given = q if layout == "bhld" else q.transpose(1, 2)
    _, want = attention(
        q, k, v, kv_lengths=torch.tensor(lengths, dtype=torch.int32), causal=True, return_aux=EVERYTHING,
        weight_indices=indices,
    )  # fmt: skip
    for aux in (rows.attend(given, **options)[1], pages.attend(ids, given, **options)[1]):
        aux = aux if layout == "bhld" else Aux(*(x.transpose(1, 2) for x in aux))
        assert not aux.key_mass[..., 21:].any()
        same(aux._replace(key_mass=aux.key_mass[..., :21]), want, exact=False)
    assert rows.attend(given, **options)[1].key_mass.shape[2 if layout == "bhld" else 1] == 21


def test_queries_that_a_row_does_not_have_do_not_count():
    """Of row 0 only the first query is used: what stands after it must not reach the mass of its keys."""
    (k, v), (q,) = drawn((2, 2, 12, 32), (2, 2, 12, 32)), drawn((2, 4, 3, 32))
    q[0, :, 1:] = math.nan
    rows = tilewise.KVCache(2, 2, 64, 32)
    pages = tilewise.PagedKVCache(16, 4, kv_heads=2, head_dim=32)
    rows.append(k, v)
    ids = [pages.create() for _ in range(2)]
    for b in range(2):
        pages.append(ids[b], k[b].transpose(0, 1), v[b].transpose(0, 1))
    for found in (
        rows.attend(q, counts=[1, 3], return_aux=("key_mass", "entropy")),
        pages.attend(ids, q, counts=[1, 3], return_aux=("key_mass", "entropy")),
    ):
        mass = found[1].key_mass
        assert mass[0].sum(-1).tolist() == pytest.approx([1.0] * 4)
        assert mass[1].sum(-1).tolist() == pytest.approx([3.0] * 4)
        assert found[1].entropy[0, :, 0].isfinite().all()


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
@pytest.mark.parametrize("window", [None, 5])
def test_a_ring(window, layout):
    """Its tokens lie in two runs, merged: with sinks, which take their share of the whole."""
    k, v, q, sinks = drawn((1, 2, 21, 32), (1, 2, 21, 32), (1, 4, 2, 32), (4,))
    cache = tilewise.KVCache(1, 2, 8, 32, ring=True)
    cache.append(k, v)
    names = ("max_logits", "entropy")
    given, back = (q, lambda x: x) if layout == "bhld" else (q.transpose(1, 2), lambda x: x.transpose(1, 2))
    out, aux = cache.attend(given, window=window, sinks=sinks, return_aux=names, layout=layout)
    kept = {"k_start": 13, "q_offset": 19, "causal": True, "window": window, "sinks": sinks}
    want, whole = attention(q, k[:, :, 13:], v[:, :, 13:], return_aux=names, **kept)
    torch.testing.assert_close(back(out), want)
    same(Aux(max_logits=back(aux.max_logits), entropy=back(aux.entropy)), whole, exact=False)
    with pytest.raises(InvalidArgument, match="return_aux: got weights of a ring's keys, expected lse, max_logits"):
        cache.attend(q, return_aux=("key_mass",))
    out, aux = cache.attend(q, return_aux=("lse",))
    assert aux.lse.equal(cache.attend(q, return_lse=True).lse)
    assert out.equal(cache.attend(q))


# Merging


def test_parts_merge():
    """Parts of any size, an empty one, and sinks of any size."""
    q, k, v = drawn((2, 4, 24, 32), (2, 2, 40, 32), (2, 2, 40, 32))
    sinks = torch.tensor([-math.inf, 0.5, 4.0, math.inf])
    names = ("lse", "max_logits", "entropy")
    ends = (0, 1, 25, 25, 40)
    parts = [
        attention(q, k[:, :, a:b], v[:, :, a:b], causal=True, q_offset=10, k_start=a, return_aux=names)
        for a, b in itertools.pairwise(ends)
    ]
    for given in (None, sinks):
        out, whole = attention(q, k, v, causal=True, q_offset=10, sinks=given, return_aux=names)
        merged, aux = tilewise.merge(parts, sinks=None if given is None else given[:, None])
        torch.testing.assert_close(merged, out)
        same(aux, whole, exact=False)
    state, _ = tilewise.merge([(x, Aux(lse=aux.lse)) for x, aux in parts])
    torch.testing.assert_close(state, tilewise.merge([(x, aux.lse) for x, aux in parts]).out)


def test_entropy_of_parts_has_a_gradient():
    q, k, v = drawn((1, 4, 6, 32), (1, 2, 40, 32), (1, 2, 40, 32))
    found = []
    for ends in ((0, 40), (0, 15, 40)):
        x = q.clone().requires_grad_()
        parts = [
            attention(x, k[:, :, a:b], v[:, :, a:b], return_aux=("lse", "entropy")) for a, b in itertools.pairwise(ends)
        ]
        _, aux = tilewise.merge(parts)
        found.append(torch.autograd.grad(aux.entropy.sum(), x)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_a_backward_pass_has_none():
    q = torch.randn(1, 4, 6, 32)
    out, lse = attention(q, q, q, return_lse=True)
    for option in ({"return_aux": ("lse",)}, {"key_mass_queries": 3}):
        with pytest.raises(TypeError, match=rf"{next(iter(option))}: got an unknown keyword; help"):
            tilewise.attention_backward(q, q, q, out, lse, out, **option)


def test_what_does_not_merge_says_so():
    q, k, v = drawn((1, 4, 6, 32), (1, 2, 40, 32), (1, 2, 40, 32))

    def part(*names):
        return attention(q, k, v, return_aux=names)

    for states, words in (
        ([part("lse"), part("entropy")], "got a state without Aux.lse"),
        ([part("lse", "entropy"), part("lse")], "got lse, expected entropy, lse, as the first state"),
        ([part("lse", "key_mass")] * 2, "got key_mass, expected lse, max_logits, entropy alone"),
        ([part("lse"), attention(q, k, v, return_lse=True)], "without Aux.lse"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            tilewise.merge(states)
