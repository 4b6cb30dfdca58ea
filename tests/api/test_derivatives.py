"""Double backward, forward mode and torch.func through the entry points, against plain torch in float64."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import tilewise
from largest_tensor import Largest
from tilewise import InvalidArgument, Unsupported, attention, paged_attention, varlen_attention
from tilewise.backends import torch as tiled

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of torch's own imports
LQ, LK, D = 5, 7, 4


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def plain(q, k, v, *, sinks=None, mask=None, q_bias=None, k_bias=None, alibi_slopes=None, table=None, softcap=None):
    """`attention` with all that has gradients, causal, written out: `out` and `lse`. `q` has twice the heads."""
    Lq, Lk = q.shape[-2], k.shape[-2]
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    s = s if softcap is None else softcap * (s / softcap).tanh()
    i, j = torch.arange(Lq)[:, None] + Lk - Lq, torch.arange(Lk)
    for bias in (
        0 if alibi_slopes is None else -alibi_slopes[..., None, None] * (i - j).abs(),
        0 if mask is None else mask,
        0 if q_bias is None else q_bias[..., None],
        0 if k_bias is None else k_bias[..., None, :],
    ):
        s = s + bias
    if table is not None:
        s = s * table[i % 3, j % 3].exp() + s * s * table[0, 1]
    e = torch.where(i >= j, s.exp(), 0.0)
    total = e.sum(-1) if sinks is None else e.sum(-1) + sinks[:, None].exp()
    return (e / total[..., None]) @ v, total.log()


def ours(q, k, v, *, table=None, **options):
    if table is not None:

        def score_mod(score, b, h, i, j):
            return score * table[i % 3, j % 3].exp() + score * score * table[0, 1]

        options["score_mod"] = score_mod
    return tuple(attention(q, k, v, causal=True, return_lse=True, **options))


QKV = {"q": draw(2, 4, LQ, D), "k": draw(2, 2, LK, D), "v": draw(2, 2, LK, D, seed=9)}
OPTIONS = {
    "none": {},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": draw(4)},
    "mask": {"mask": draw(4, 1, LK)},
    "biases": {"q_bias": draw(1, 4, LQ), "k_bias": draw(2, 1, LK)},
    "slopes": {"alibi_slopes": draw(2, 4).abs()},
    "score_mod": {"table": draw(3, 3)},
    "all": {
        "softcap": 2.0, "sinks": draw(4), "mask": draw(2, 1, LQ, 1), "q_bias": draw(1, 1, LQ), "k_bias": draw(2, 4, LK),
        "alibi_slopes": draw(4).abs(),
    },
}  # fmt: skip


def arguments(name, wide):
    """The tensors, and the other options."""
    tensors = {n: x for n, x in (QKV | OPTIONS[name]).items() if isinstance(x, torch.Tensor)}
    others = {n: x for n, x in OPTIONS[name].items() if n not in tensors}
    return {n: x.double() if wide else x.clone() for n, x in tensors.items()}, others


def loss(results):
    out, lse = results
    return (out * out).sum() + (out * torch.arange(D)).sum() + (lse * lse).sum()


def close(got, want, tolerance=2e-5):
    """Relative to the largest element of all of one kind, since terms of that size may cancel."""
    got, want = (torch.utils._pytree.tree_leaves(x) for x in (got, want))
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        assert (x - y).abs().max() <= tolerance * y.abs().max().clamp_min(1)


def second(function, name, wide):
    """The gradients of a penalty on gradients."""
    tensors, others = arguments(name, wide)
    inputs = [x.requires_grad_() for x in tensors.values()]
    found = torch.autograd.grad(loss(function(**tensors, **others)), inputs, create_graph=True)
    penalty = sum((x * x).sum() + x.sum() for x in found)
    return torch.autograd.grad(penalty, inputs)


def moved(function, name, wide):
    """Derivatives in a direction, and the gradients of a loss of them by inputs and tangents."""
    tensors, others = arguments(name, wide)
    names = list(tensors)
    tangents = [draw(*x.shape, seed=3).to(x.dtype).requires_grad_() for x in tensors.values()]
    inputs = [x.requires_grad_() for x in tensors.values()]

    def of(*given):
        return function(**dict(zip(names, given, strict=True)), **others)

    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, y) for x, y in zip(inputs, tangents, strict=True)]
        results = [forward_ad.unpack_dual(x).tangent for x in of(*duals)]
    by_func = jvp(of, tuple(x.detach() for x in inputs), tuple(x.detach() for x in tangents))[1]
    assert all(torch.equal(x, y) for x, y in zip(results, by_func, strict=True))
    return results, torch.autograd.grad(loss(results), inputs + tangents)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("of", [second, moved])
def test_every_option(of, name):
    close(of(ours, name, False), of(plain, name, True))


CHECKED = {
    "window and softcap": {"window": 2, "softcap": 2.0},
    "sinks and mask": {"sinks": draw(2), "mask": draw(2, 3)},
    "slopes and biases": {"alibi_slopes": draw(2), "q_bias": draw(1, 2, 2), "k_bias": draw(1, 1, 3), "chunk": 2},
    "lengths": {"kv_lengths": torch.tensor([2]), "q_offset": 0, "causal": True},
}


@pytest.mark.parametrize("options", CHECKED.values(), ids=CHECKED)
def test_gradgradcheck(monkeypatch, options):
    """torch's own checks by differences, in float64, which calls refuse. Other tensors become float32 in a call."""
    from tilewise.core import storage
    from tilewise.dispatch import call_cache
    from tilewise.validation import arguments as checks
    from tilewise.validation import backward as backward_checks
    from tilewise.validation import calls

    allocate = calls._outputs

    def outputs(c, t, o, width):
        out, lse = allocate(c, t, o, width)
        if lse is not None:
            lse, t.lse = lse.to(out.dtype), t.lse.to(out.dtype)
            t.lse = c.common(lse[..., None])[..., 0]
        return out, lse

    wide = replace(storage.PLAIN[torch.float32], dtype=torch.float64)
    monkeypatch.setitem(storage.PLAIN, torch.float64, wide)
    monkeypatch.setattr(call_cache, "key_of", lambda *_: None)
    monkeypatch.setattr(checks, "FLOATS", (*checks.FLOATS, torch.float64))
    monkeypatch.setattr(calls, "_outputs", outputs)
    monkeypatch.setattr(backward_checks, "_check_like", lambda *_: None)
    tensors = [draw(1, 2, 2, 2), draw(1, 1, 3, 2), draw(1, 1, 3, 1)]
    inputs = [x.double().requires_grad_() for x in tensors]

    def of(q, k, v):
        return tuple(attention(q, k, v, **options, return_lse=True, backend="torch"))

    assert torch.autograd.gradcheck(of, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(of, inputs, check_fwd_over_rev=True)


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_torch_func(layout):
    """In both layouts, over all of torch.func."""

    def of(q, k, v):
        if layout == "bhld":
            return ours(q, k, v)
        turned = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = attention(*turned, causal=True, layout=layout, return_lse=True)
        return out.transpose(1, 2), lse.transpose(1, 2)

    single, wide = list(QKV.values()), [x.double() for x in QKV.values()]
    for transform in (grad, hessian):
        small = [x[:1, :, :2, :2] for x in single]
        found, want = (transform(lambda *x, f=f: loss4(f(*x)), (0, 1, 2)) for f in (of, plain))
        close(found(*small), want(*(x.double() for x in small)))
    for transform in (jacrev, jacfwd):
        found, want = (transform(f, (0, 1, 2))(*x) for f, x in ((of, single), (plain, wide)))
        close(found, want)
    results, pull = vjp(of, *single)
    close(pull(results), vjp(plain, *wide)[1](tuple(x.double() for x in results)))


def loss4(results):
    return sum((x * x).sum() for x in results)


MAPPED = {
    "all": (0, 0, 0),
    "q": (2, None, None),
    "k and v": (None, 1, 0),
    "v": (None, None, 3),
}


@pytest.mark.parametrize("name", ["none", "all", "score_mod", "sinks"])
@pytest.mark.parametrize("dims", MAPPED.values(), ids=MAPPED)
def test_vmap(name, dims):
    """Of any subset of inputs: results, and gradients of each sample by all inputs."""
    found = []
    for function, wide in ((ours, False), (plain, True)):
        tensors, others = arguments(name, wide)
        stacked = [
            x if d is None else torch.stack([x, 2 * x, -x], d) for x, d in zip(tensors.values(), dims, strict=False)
        ]
        extra = list(tensors.values())[3:]
        where = tuple(dims) + (None,) * len(extra)

        def of(*given, function=function, names=tuple(tensors), others=others):
            return function(**dict(zip(names, given, strict=True)), **others)

        def by_all(*given, of=of):
            return grad(lambda *own: loss(of(*own)), tuple(range(len(given))))(*given)

        found.append((vmap(of, where)(*stacked, *extra), vmap(by_all, where)(*stacked, *extra)))
    close(*found)


def test_vmap_of_options():
    """Masks, lengths, slopes, sinks and biases of each sample, under another vmap too."""
    tensors = {
        "mask": draw(3, LQ, LK), "kv_lengths": torch.tensor([[3, 7], [0, 5], [7, 1]]), "alibi_slopes": draw(3, 4).abs(),
        "sinks": draw(3, 4), "k_bias": draw(3, 1, 4, LK), "q_offset": torch.tensor([[1, 2], [0, 0], [3, -1]]),
    }  # fmt: skip
    q, k, v = QKV.values()
    for name, x in tensors.items():

        def of(q, x, name=name):
            return tuple(attention(q, k, v, causal=True, return_lse=True, **{name: x}))

        got = vmap(of, (None, 0))(q, x)
        want = [torch.stack(y) for y in zip(*(of(q, own) for own in x), strict=True)]
        for a, b in zip(got, want, strict=True):
            assert torch.allclose(a, b, atol=1e-6), name
        twice = vmap(vmap(of, (None, 0)), (0, None))(torch.stack([q, -q]), x)
        assert torch.allclose(twice[0][0], got[0], atol=1e-6), name


def test_vmap_with_options_of_one_row():
    """Those that no sample has for itself, in a batch of one."""
    q, k, v = (x[:1] for x in QKV.values())
    given = {
        "q_offset": torch.tensor([1]), "kv_lengths": torch.tensor([6]), "alibi_slopes": draw(1, 4).abs(),
        "mask": draw(1, 4, LQ, LK), "q_bias": draw(1, 4, LQ), "key_indices": torch.arange(5).int().expand(1, LQ, 5),
        "k_stride": torch.tensor([2]),
    }  # fmt: skip
    for name, x in given.items():

        def of(q, name=name, x=x):
            return tuple(attention(q, k, v, causal=True, return_lse=True, **{name: x}))

        got = vmap(of)(torch.stack([q, -q, 2 * q]))
        for a, b in zip(got, of(2 * q), strict=True):
            assert torch.allclose(a[2], b, atol=1e-6), name


def test_packed_sequences():
    """Each as it is alone, in all derivatives."""
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 3, 5], [0, 4, 6, 9]))
    packed = [draw(6, 4, D), draw(11, 2, D), draw(11, 2, D, seed=4)]  # with rows of no sequence

    def together(q, k, v):
        return tuple(varlen_attention(q, k, v, cu_q, cu_k, causal=True, max_q=3, max_k=4, return_lse=True))

    def alone(q, k, v):
        outs, lses = [], []
        for b in (0, 2):
            rows = (slice(x[b], x[b + 1]) for x in (cu_q, cu_k, cu_k))
            own = (x[r].transpose(0, 1)[None] for x, r in zip((q, k, v), rows, strict=True))
            out, lse = ours(*own)
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0].transpose(0, 1))
        return torch.cat(outs), torch.cat(lses)

    def used(results):
        return tuple(x[:5] for x in results)

    tangents = tuple(draw(*x.shape, seed=5) for x in packed)
    close(used(jvp(together, tuple(packed), tangents)[1]), jvp(alone, tuple(packed), tangents)[1])
    assert not any(x[5:].any() for x in jvp(together, tuple(packed), tangents)[1])
    found = []
    for f in (lambda *x: used(together(*x)), alone):
        inputs = [x.clone().requires_grad_() for x in packed]
        first = torch.autograd.grad(loss(f(*inputs)), inputs, create_graph=True)
        found.append(torch.autograd.grad(loss4(first), inputs))
        found[-1] += jacrev(f)(*packed)
    close(found[0], found[1])
    over_batch = vmap(together)(*(torch.stack([x, -x]) for x in packed))
    assert torch.equal(over_batch[0][1], together(*(-x for x in packed))[0])


def test_what_is_hidden_never_matters():
    """NaN in hidden keys, values and their tangents; rows that see nothing."""
    q, k, v = (x.clone() for x in QKV.values())
    k[:, :, 5:] = v[:, :, 5:] = torch.nan
    lengths, offset = torch.tensor([5, 3]), -2

    def of(q, k, v):
        return tuple(attention(q, k, v, kv_lengths=lengths, q_offset=offset, causal=True, return_lse=True))

    tangents = [torch.ones_like(q), *(torch.where(x.isnan(), torch.nan, 1.0) for x in (k, v))]
    inputs = [x.requires_grad_() for x in (q, k, v)]
    results = jvp(of, tuple(inputs), tuple(tangents))[1]
    by_loss = torch.autograd.grad(results[0].square().sum() + results[1][..., 3:].square().sum(), inputs)
    first = torch.autograd.grad(of(q, k, v)[0].square().sum(), inputs, create_graph=True)
    by_penalty = torch.autograd.grad(loss4(first), inputs)
    for x in (*results, *by_loss, *by_penalty):
        assert x.isfinite().all()
    for dq in (results[0], by_loss[0], by_penalty[0]):
        assert not dq[:, :, :2].any()
    for x in (*by_loss[1:], *by_penalty[1:]):
        assert not x[:, :, 5:].any()


def test_modules_and_samples():
    """functional_call, and the gradients of each sample."""
    layer = torch.nn.Linear(D, 3 * D)

    def of(weights, x):
        q, k, v = functional_call(layer, weights, (x[None, None],)).chunk(3, -1)
        return attention(q, k, v, causal=True).square().sum()

    weights = {n: x.detach() for n, x in layer.named_parameters()}
    samples = draw(3, 6, D)
    found = vmap(grad(of), (None, 0))(weights, samples)
    for n, x in enumerate(samples):
        close({name: y[n] for name, y in found.items()}, grad(of)(weights, x))


@pytest.mark.parametrize("what", ["jvp", "grad of jvp", "grad", "vmap", "hessian"])
def test_compiled(what):
    """Transforms inside of a compiled function: one graph."""
    inputs = tuple(x[:1, :, :3, :4].contiguous() for x in QKV.values())
    tangents = tuple(draw(*x.shape, seed=8) for x in inputs)

    def along(*x):
        return jvp(ours, x, tangents)[1]

    of = {
        "jvp": along,
        "grad of jvp": grad(lambda *x: loss(along(*x)), (0, 1, 2)),
        "grad": grad(lambda *x: loss(ours(*x)), (0, 1, 2)),
        "vmap": lambda *x: vmap(ours)(*(y[None] for y in x)),
        "hessian": hessian(lambda *x: loss(ours(*x)), (0, 1, 2)),
    }[what]
    close(torch.compile(of, fullgraph=True, backend="aot_eager")(*inputs), of(*inputs))


def test_batches_of_gradients():
    """One backward pass of many, by torch.vmap over torch.autograd.grad."""
    q, k, v = (x.clone().requires_grad_() for x in QKV.values())
    out = attention(q, k, v)
    incoming = draw(3, *out.shape)
    found = vmap(lambda x: torch.autograd.grad(out, (q, k, v), x, retain_graph=True))(incoming)
    for n, x in enumerate(incoming):
        close([y[n] for y in found], torch.autograd.grad(out, (q, k, v), x, retain_graph=True))


def test_what_is_not_served_says_so():
    q, k, v = (x[:1, :, :2, :2] for x in QKV.values())

    def of(q):
        return attention(q, k[:, :, :2], v[:, :, :2]).square().sum()

    with pytest.raises(Unsupported, match=r"no forward mode of forward mode.*hessian"):
        jacfwd(jacfwd(of))(q)
    with pytest.raises(Unsupported, match="no third derivatives"):
        grad(lambda q: hessian(of)(q).sum())(q)
    x = q.clone().requires_grad_()
    (dx,) = torch.autograd.grad(of(x), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.square().sum(), x, create_graph=True)
    with pytest.raises(Unsupported, match="no third derivatives"):
        torch.autograd.grad(ddx.sum(), x)
    pages = torch.ones(1, 4, 2, 2)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    with pytest.raises(InvalidArgument, match="paged keys"):
        grad(lambda q: paged_attention(q, pages, pages, table, lengths).sum())(q)
    stored = tilewise.Quantised.from_float(torch.ones(1, 2, 2, 32), "int8")
    with pytest.raises(InvalidArgument, match="quantised keys"):
        grad(lambda q: attention(q, stored, v).sum())(torch.ones(1, 4, 2, 32))


def test_memory_is_flat_in_length(monkeypatch):
    """No tensor of a derivative grows as Lq * Lk."""
    largest = Largest()

    def watched(run):
        def watch(*given):
            with largest:
                run(*given)

        return watch

    for name in ("run_tangent", "run_second_order"):
        monkeypatch.setattr(tiled, name, watched(getattr(tiled, name)))
    sizes = []
    for length in (1024, 2048):
        q, largest.size = torch.randn(1, 1, length, 8, requires_grad=True), 0
        out = jvp(lambda q: attention(q, q, q, causal=True), (q,), (q.detach(),))[1]
        torch.autograd.grad(out.sum(), q)
        sizes.append(largest.size)
    assert sizes[0] == sizes[1] > 0


def test_tensors_are_freed_with_the_call():
    """Without the garbage collector, in forward mode and with a graph of the backward pass."""
    gc.disable()
    try:
        q = QKV["q"].clone().requires_grad_()
        with forward_ad.dual_level():
            out = attention(forward_ad.make_dual(q, q.detach()), q, q)
            forward_ad.unpack_dual(out).tangent.sum().backward()
            kept = weakref.ref(out)
            del out
        assert kept() is None
        out = attention(q, q, q)
        kept = weakref.ref(out)
        (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        torch.autograd.grad(dq.sum(), q)
        del out, dq
        assert kept() is None
    finally:
        gc.enable()
