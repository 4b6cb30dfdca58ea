"""Dropout: the generator, that its mask depends on places alone, and that every way to call sees the same one."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise import (
    InvalidArgument,
    KVCache,
    PagedKVCache,
    Quantised,
    attention,
    attention_backward,
    dropout_mask,
    paged_attention,
    varlen_attention,
)
from tilewise.core import dropout
from tilewise.dispatch import call_cache, planner

BACKENDS = [name for name in ("reference", "torch", "cpu") if name in planner.BACKENDS]
P, SEED = 0.3, 2**45 + 11
ROUNDED = round(P * 2**16) / 2**16
DROPPED = {"dropout_p": P, "dropout_seed": SEED}


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def weights(call, q, keys, **options):
    """The weights that a call multiplies values by: those of one-hot values."""
    return call(q, keys, torch.eye(keys.shape[-2]).expand(*keys.shape[:2], -1, -1).contiguous(), **options)


def plain(q, k, v, kept, causal=True):
    """The definition, in torch: scores, softmax, dropout by a mask, values."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(s.shape[-1] - s.shape[-2]), -torch.inf)
    return (torch.softmax(s, -1) * kept / (1 - ROUNDED)) @ v


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        (0, 0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (0xFFFFFFFF, 0xFFFFFFFF, None),
    ],
)
def test_the_generator_is_philox(counter, key, want):
    """Of zeros as Random123 publishes it; of the largest words as the same in Python's integers."""
    c, k = [torch.tensor([counter])] * 4, [torch.tensor([key])] * 2
    got = tuple(int(x) for x in dropout.philox(c, tuple(k)))
    assert got == philox_of_ints([counter] * 4, [key] * 2)
    assert want is None or got == want


def philox_of_ints(c, k):
    for _ in range(7):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return tuple(c)


def test_the_mask_is_as_documented():
    """Each cell by itself: counter, key, word, half and threshold, places below 0 among them."""
    mask = dropout_mask((2, 3, 5, 21), P, SEED, q_offset=-3, k_start=-7)
    for b, h, i, j in ((0, 0, 0, 0), (1, 2, 4, 20), (1, 0, 1, 6), (0, 2, 3, 7), (1, 1, 2, 11)):
        qpos, kpos = i - 3, j - 7
        words = philox_of_ints([kpos >> 3 & 0xFFFFFFFF, qpos & 0xFFFFFFFF, h, b], [SEED & 0xFFFFFFFF, SEED >> 32])
        number = words[kpos >> 1 & 3] >> (16 if kpos & 1 else 0) & 0xFFFF
        assert bool(mask[b, h, i, j]) == (number >= round(P * 2**16))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_its_share(p):
    mask = dropout_mask((4, 4, 100, 100), p, 3).float()
    assert abs(mask.mean() - (1 - p)) < 5 * (p * (1 - p) / mask.numel()) ** 0.5 + 2e-5
    for dim in range(4):  # no row, column, head or batch row is special
        others = [d for d in range(4) if d != dim]
        assert (mask.mean(others) - (1 - p)).abs().max() < 6 * (
            p * (1 - p) / (mask.numel() / mask.shape[dim])
        ) ** 0.5 + 2e-5


def test_masks_of_other_places_differ():
    mask = dropout_mask((2, 2, 64, 64), 0.5, 3)
    others = [mask.flip(0), mask.flip(1), mask.roll(1, 2), mask.roll(1, 3), mask.roll(8, 3)]
    others += [dropout_mask((2, 2, 64, 64), 0.5, seed) for seed in (4, 3 + 2**32, 3 + 2**62)]
    for other in others:
        assert 0.48 < (mask == other).float().mean() < 0.52


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rows", "keys"), [(70, 97), (1, 97), (130, 40), (3, 520)])
def test_every_backend_has_the_same_mask(backend, rows, keys):
    q, k = draw(2, 6, rows, 16), draw(2, 2, keys, 16)
    got = weights(attention, q, k, backend=backend, **DROPPED)
    assert torch.equal(got != 0, dropout_mask((2, 6, rows, keys), **DROPPED))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [
    {"q_offset": 4, "k_start": 3}, {"q_offset": -9, "k_start": -13, "k_stride": 3, "q_stride": 2}, {"k_start": 8},
    {"q_offset": 5, "q_stride": 4, "k_stride": 2}, {"split_size": 16}, {"layout": "blhd"},
], ids=str)  # fmt: skip
def test_places(backend, options):
    q, k = draw(2, 4, 7, 16), draw(2, 4, 75, 16)
    places = {name: x for name, x in options.items() if name not in ("split_size", "layout")}
    if "layout" in options:
        q, k = (x.transpose(1, 2) for x in (q, k))
        v = torch.eye(75)[None, :, None].repeat(2, 1, 4, 1)
        got = attention(q, k, v, backend=backend, **DROPPED, **options).transpose(1, 2)
    else:
        got = weights(attention, q, k, backend=backend, **DROPPED, **options)
    assert torch.equal(got != 0, dropout_mask((2, 4, 7, 75), **DROPPED, **places))


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_paged_and_cut_calls_have_the_mask_of_dense_ones(backend):
    """Positions count from each sequence's start, and the batch row is the sequence."""
    lengths, Lq = (40, 23), 9
    q, k, v = draw(2, 4, Lq, 16), draw(2, 2, 40, 16), draw(2, 2, 40, 16, seed=1)
    options = DROPPED | {"causal": True, "backend": backend}
    want = attention(q, k, v, kv_lengths=ints(*lengths), **options)
    cu_q, cu_k = ints(0, Lq, 2 * Lq), ints(0, 40, 63)
    packed = [torch.cat([x[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)]) for x in (k, v)]
    rows = q.transpose(1, 2).flatten(0, 1)
    got = varlen_attention(rows, *packed, cu_q, cu_k, **options)
    torch.testing.assert_close(got.unflatten(0, (2, Lq)).transpose(1, 2), want)
    pages = [x.transpose(1, 2).reshape(2 * 5, 8, 2, 16).flip(0).contiguous() for x in (k, v)]
    table = ints(*range(9, -1, -1)).view(2, 5)
    got = paged_attention(q, *pages, table, ints(*lengths), **options)
    torch.testing.assert_close(got, want)
    got = paged_attention(rows, *pages, table, ints(*lengths), cu_seqlens_q=cu_q, **options)
    torch.testing.assert_close(got.unflatten(0, (2, Lq)).transpose(1, 2), want)
    parts = [attention(q[:, :, i : i + 4], k, v, kv_lengths=ints(*lengths), **options,
                       q_offset=ints(*lengths) - Lq + i) for i in range(0, Lq, 4)]  # fmt: skip
    torch.testing.assert_close(torch.cat(parts, 2), want)
    halves = [attention(q, k[:, :, j : j + 20], v[:, :, j : j + 20], k_start=j, q_offset=ints(*lengths) - Lq,
                        kv_lengths=(ints(*lengths) - j).clamp(0, 20), return_lse=True, **options)
              for j in (0, 20)]  # fmt: skip
    torch.testing.assert_close(tilewise.merge(halves).out, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_and_gradients(backend):
    q, k, v = draw(2, 4, 33, 16), draw(2, 2, 40, 16), draw(2, 2, 40, 16, seed=1)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    kept = dropout_mask((2, 4, 33, 40), **DROPPED)
    out, lse = attention(*leaves, causal=True, return_lse=True, backend=backend, **DROPPED)
    with torch.no_grad():
        assert torch.equal(lse, attention(q, k, v, causal=True, return_lse=True, backend=backend).lse)
    want = plain(*leaves, kept)
    torch.testing.assert_close(out, want)
    dout, dlse = draw(*out.shape), draw(*lse.shape)
    got = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    alone = torch.logsumexp((q @ k.repeat_interleave(2, 1).mT * 0.25).masked_fill(
        ~torch.ones(33, 40, dtype=torch.bool).tril(7), -torch.inf), -1)  # fmt: skip
    for a, b in zip(got, torch.autograd.grad((want, alone), leaves, (dout, dlse), allow_unused=True), strict=True):
        torch.testing.assert_close(a, b)
    by_hand = attention_backward(*(x.detach() for x in leaves), out.detach(), lse.detach(), dout, dlse, causal=True,
                                 backend=backend, **DROPPED)  # fmt: skip
    for a, b in zip(got, by_hand[:3], strict=True):
        assert torch.equal(a, b)


def test_a_backward_pass_needs_the_seed():
    x = draw(1, 1, 4, 4)
    with pytest.raises(InvalidArgument, match="dropout_seed: got None, expected the seed of the forward call"):
        attention_backward(x, x, x, x, x[..., 0], x, dropout_p=0.1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_everything_dropped(backend):
    q = draw(1, 2, 9, 8).requires_grad_()
    out, lse = attention(q, q, q, dropout_p=1.0, return_lse=True, backend=backend)
    assert torch.equal(out, torch.zeros_like(out))
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert torch.equal(dq, torch.zeros_like(dq))
    assert lse.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_dropout_is_the_call_without(backend):
    q = draw(1, 2, 9, 8)
    for p in (0, 0.0, 2**-18):
        state = torch.get_rng_state()
        assert torch.equal(attention(q, q, q, dropout_p=p, backend=backend), attention(q, q, q, backend=backend))
        assert torch.equal(state, torch.get_rng_state())  # nothing is drawn


@pytest.mark.parametrize("backend", BACKENDS)
def test_repeated_calls(backend):
    """The call cache knows the probability, not the seed; each call without a seed draws another."""
    q = draw(2, 4, 20, 16)
    seeds = (1, 2, 2**40, 1)
    first = [attention(q, q, q, dropout_p=P, dropout_seed=seed, backend=backend) for seed in seeds]
    known = len(call_cache._known)
    again = [attention(q, q, q, dropout_p=P, dropout_seed=torch.tensor([s]), backend=backend) for s in seeds]
    assert len(call_cache._known) == known
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(first[0], first[3])
    assert not torch.equal(first[0], first[1])
    more = attention(q, q, q, dropout_p=0.5, dropout_seed=1, backend=backend)
    assert not torch.equal(more, first[0])
    torch.manual_seed(5)
    drawn = [attention(q, q, q, dropout_p=P, backend=backend) for _ in range(3)]
    torch.manual_seed(5)
    for want in drawn:
        assert torch.equal(attention(q, q, q, dropout_p=P, backend=backend), want)
    assert not torch.equal(drawn[0], drawn[1])


def test_repeated_gradients():
    q = draw(2, 4, 20, 16).requires_grad_()
    grads = []
    for seed in (1, 2, 1, 2, 1):
        (dq,) = torch.autograd.grad(attention(q, q, q, dropout_p=P, dropout_seed=seed).square().sum(), q)
        kept = dropout_mask((2, 4, 20, 20), P, seed)
        (want,) = torch.autograd.grad(plain(q, q, q, kept, causal=False).square().sum(), q)
        torch.testing.assert_close(dq, want, rtol=1e-4, atol=1e-4)
        grads.append(dq)
    assert torch.equal(grads[0], grads[2])
    assert torch.equal(grads[1], grads[3])


def block(q, k, v):
    return attention(q, k, v, causal=True, dropout_p=P).sin()


def two_blocks(q, k, v, how):
    for _ in range(2):
        q = how(block, q, k, v)
    return q


def test_activation_checkpointing_recomputes_the_same_mask():
    q, k, v = (draw(2, 4, 20, 16, seed=n).requires_grad_() for n in range(3))
    found = []
    for reentrant in (None, False, True):
        how = (lambda f, *x: f(*x)) if reentrant is None else partial(checkpoint, use_reentrant=reentrant)
        torch.manual_seed(3)
        for x in (q, k, v):
            x.grad = None
        two_blocks(q, k, v, how).square().sum().backward()
        found.append([x.grad for x in (q, k, v)])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled(checkpointed):
    """Gradients are those of the mask of the forward pass: differences say so."""
    q, k, v = (draw(1, 2, 9, 8, seed=n).requires_grad_() for n in range(3))

    def how(f, *x):
        return checkpoint(f, *x, use_reentrant=False) if checkpointed else f(*x)

    compiled = torch.compile(lambda q, k, v: two_blocks(q, k, v, how), fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    out = compiled(q, k, v)
    got = torch.autograd.grad(out.square().sum(), (q, k, v))
    torch.manual_seed(3)
    same = compiled(q, k, v)
    assert torch.equal(out, same)
    assert not torch.equal(same, compiled(q, k, v))
    torch.manual_seed(3)
    want = two_blocks(q, k, v, lambda f, *x: f(*x))
    torch.testing.assert_close(out, want)
    for a, b in zip(got, torch.autograd.grad(want.square().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b)


def test_compiled_with_a_seed():
    q = draw(1, 2, 9, 8).requires_grad_()
    f = torch.compile(
        lambda q, seed: attention(q, q, q, dropout_p=P, dropout_seed=seed), fullgraph=True, backend="aot_eager"
    )
    for seed in (7, 8, torch.tensor([9])):
        out, want = f(q, seed), attention(q, q, q, dropout_p=P, dropout_seed=seed)
        assert torch.equal(out, want)
        assert torch.equal(*(torch.autograd.grad(x.square().sum(), q)[0] for x in (out, want)))


def test_operators():
    q = draw(2, 4, 9, 8).requires_grad_()
    seed = torch.tensor([7])
    for name, args, tables in (
        ("attention_lse", (q, q, q), ()),
        ("varlen_attention_lse", (q[0].mT.transpose(0, 1).reshape(-1, 4, 9),) * 3, (ints(0, 3, 8), ints(0, 4, 8))),
    ):
        operator = getattr(torch.ops.tilewise, name).default
        args = tuple(x.detach().requires_grad_() for x in args)
        torch.library.opcheck(operator, (*args, *tables), {"dropout_p": 0.25, "dropout_seed": seed})


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of torch's own imports
def test_derivatives_against_torch():
    """Forward mode, both second orders, hessians: of the definition in float64."""
    q, k, v = (draw(1, 2, 5, 4, seed=n) for n in range(3))
    kept = dropout_mask((1, 2, 5, 5), **DROPPED)
    moved = tuple(draw(1, 2, 5, 4, seed=n + 5) for n in range(3))

    def ours(*x):
        return attention(*x, causal=True, **DROPPED).sin()

    def exact(*x):
        return plain(*x, kept).sin()

    wide = tuple(x.double() for x in (q, k, v)), tuple(x.double() for x in moved)
    for transform in (
        lambda f: lambda x, t: torch.func.jvp(f, x, t),
        lambda f: lambda x, t: torch.func.grad(lambda *x: torch.func.jvp(f, x, t)[1].square().sum(), (0, 1, 2))(*x),
        lambda f: lambda x, t: torch.func.jvp(torch.func.grad(lambda *x: f(*x).sum(), (0, 1, 2)), x, t)[1],
        lambda f: lambda x, t: torch.func.hessian(lambda *x: f(*x).sum(), (0, 1, 2))(*x)[0],
    ):
        for a, b in zip(transform(ours)((q, k, v), moved), transform(exact)(*wide), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_vmap():
    """As one call after the other: the mask depends on the row of the call, not of the batch that it becomes."""
    q = draw(3, 2, 2, 9, 8)
    got = torch.vmap(lambda q: attention(q, q, q, **DROPPED))(q)
    for a, b in zip(got, q, strict=True):
        assert torch.equal(a, attention(b, b, b, **DROPPED))
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(lambda q: attention(q, q, q, dropout_p=P))(q)
    drawn = torch.vmap(lambda q: attention(q, q, q, dropout_p=P), randomness="different")(
        q[:1].expand(3, -1, -1, -1, -1)
    )
    assert not torch.equal(drawn[0], drawn[1])


def test_caches():
    q, k, v = draw(2, 4, 5, 16), draw(2, 2, 30, 16), draw(2, 2, 30, 16, seed=1)
    want = attention(q, k, v, causal=True, **DROPPED)
    contiguous = KVCache(2, 2, 40, 16)
    contiguous.append(k, v)
    torch.testing.assert_close(contiguous.attend(q, causal=True, **DROPPED), want)
    paged = PagedKVCache(20, 4, 2, 16)
    sequences = [paged.create() for _ in range(2)]
    paged.append(sequences, k, v)
    torch.testing.assert_close(paged.attend(sequences, q, causal=True, **DROPPED), want)
    assert not torch.equal(paged.attend(sequences, q, causal=True, dropout_p=P), want)


def test_a_ring_cache():
    """Its slots are not in the order of positions."""
    q, k, v = draw(2, 4, 5, 16), draw(2, 2, 30, 16), draw(2, 2, 30, 16, seed=1)
    ring = KVCache(2, 2, 20, 16, ring=True)
    for at in range(0, 30, 5):
        ring.append(*(x[:, :, at : at + 5] for x in (k, v)))
    want = attention(q, k, v, causal=True, window=14, **DROPPED)
    torch.testing.assert_close(ring.attend(q, causal=True, window=14, **DROPPED), want)
    torch.manual_seed(4)
    drawn = ring.attend(q, causal=True, window=14, dropout_p=P)
    torch.manual_seed(4)
    seed = int(torch.randint(2**63 - 1, (1,)))
    torch.testing.assert_close(drawn, attention(q, k, v, causal=True, window=14, dropout_p=P, dropout_seed=seed))


def test_plan():
    q = draw(1, 2, 40, 16).requires_grad_()
    planned = tilewise.plan(q, q, q, dropout_p=P)
    assert f"dropout {ROUNDED:g}" in planned.problem.options()
    assert f"dropout {ROUNDED:g}" in planned.backward.problem.options()
    assert tilewise.plan(q, q, q, dropout_p=0.0).problem == tilewise.plan(q, q, q).problem


@pytest.mark.parametrize(("machine", "chosen", "passed_over"), [
    ("sm_90", "triton", ("hopper", "it has no dropout")), ("apple-m3", "torch", ("metal", "it has no dropout")),
])  # fmt: skip
def test_plans_for_other_machines(machine, chosen, passed_over):
    q = torch.zeros(1, 8, 600, 128, dtype=torch.bfloat16, requires_grad=True)
    planned = tilewise.plan(q, q, q, dropout_p=P, device=machine)
    assert (planned.backend, planned.backward.backend) == (chosen, chosen)
    assert passed_over in planned.passed_over


def test_positions_of_a_tree_go_to_plain_torch():
    q, tree = draw(1, 2, 4, 8), torch.ones(1, 4, 4, dtype=torch.bool).tril()
    call = {"tree_mask": tree, "positions": ints(5, 6, 6, 7)[None], **DROPPED}
    keys = draw(1, 2, 9, 8)
    assert tilewise.plan(q, keys, keys, **call).backend == "torch"
    assert torch.equal(attention(q, keys, keys, **call), attention(q, keys, keys, backend="torch", **call))
    torch.testing.assert_close(attention(q, keys, keys, **call), attention(q, keys, keys, backend="reference", **call))


def test_several_ranks_refuse_it():
    from tilewise.distributed import arguments

    with pytest.raises(InvalidArgument, match="dropout_p: got an option that does not work over several ranks"):
        arguments._supported({"dropout_p": 0.1})
    assert arguments._supported({"dropout_p": 0.0, "causal": True}) == {"causal": True}


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_values_have_no_effect(backend):
    """Nor NaN in what is dropped from the sum of no row: keys past a length."""
    q, k, v = draw(2, 4, 20, 16), draw(2, 2, 40, 16), draw(2, 2, 40, 16, seed=1)
    options = DROPPED | {"kv_lengths": ints(13, 0), "backend": backend}
    want = attention(q, k, v, **options)
    for x in (k, v):
        x[0, :, 13:], x[1] = torch.nan, torch.nan
    assert torch.equal(attention(q, k, v, **options), want)
    assert torch.equal(attention(q, k, v, out=torch.full_like(q, torch.nan), **options), want)


def test_empty_calls():
    for rows, keys in ((0, 5), (5, 0)):
        q, k = draw(1, 2, rows, 4).requires_grad_(), draw(1, 2, keys, 4).requires_grad_()
        out = attention(q, k, k, dropout_p=0.5)
        assert torch.equal(out, torch.zeros(1, 2, rows, 4))
        torch.autograd.grad(out.sum(), (q, k))


def test_options_together():
    """With functions of the user, quantised keys and arrays."""
    q, k, v = draw(1, 4, 9, 32), draw(1, 2, 20, 32), draw(1, 2, 20, 32, seed=1)

    def decay(score, b, h, i, j):
        return score - 0.1 * (i - j)

    for keys in ((k, v), tuple(Quantised.from_float(x, "int8", 32) for x in (k, v))):
        want = attention(q, *keys, causal=True, score_mod=decay, backend="reference", **DROPPED)
        torch.testing.assert_close(attention(q, *keys, causal=True, score_mod=decay, **DROPPED), want)
    arrays = attention(*(x.numpy() for x in (q, k, v)), **DROPPED)
    assert torch.equal(torch.from_numpy(arrays), attention(q, k, v, **DROPPED))
