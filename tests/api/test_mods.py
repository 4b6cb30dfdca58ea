"""`score_mod` and `mask_mod` in calls: forms, positions, gradients, refusals."""

import gc
import pickle
import weakref

import pytest
import torch

import tilewise
from tilewise import (
    InvalidArgument,
    TileMap,
    Unsupported,
    attention,
    attention_backward,
    paged_attention,
    plan,
    varlen_attention,
)
from tilewise.dispatch import call_cache

H, L, D = 4, 37, 16
random = torch.Generator().manual_seed(0)
TABLE = torch.randn(H, 2 * L, generator=random)
DOC = torch.arange(L) // 11


def draw(*shape):
    return torch.randn(shape, generator=random) * 2


def tensors(*, grad=False, length=L):
    return [draw(2, H, length, D).requires_grad_(grad) for _ in range(3)]


def relative(table):
    return lambda s, b, h, q, k: 20 * torch.tanh(s / 20) + table[h, q - k + L]


def documents(b, h, q, k):
    return (DOC[q] == DOC[k]) & (q >= k)


def dense(q, k, v, score=None, mask=None):
    """The functions on all cells at once, as torch broadcasts."""
    s = q @ k.mT / D**0.5
    b, h = torch.arange(len(q)).view(-1, 1, 1, 1), torch.arange(H).view(-1, 1, 1)
    i, j = torch.arange(q.shape[2]).view(-1, 1), torch.arange(k.shape[2])
    s = s if score is None else score(s, b, h, i, j)
    s = s if mask is None else s.masked_fill(~mask(b, h, i, j), -torch.inf)
    return s.softmax(-1) @ v


@pytest.mark.parametrize("backend", [None, "torch", "reference"])
def test_results_and_gradients(backend):
    q, k, v = tensors(grad=True)
    table = TABLE.clone().requires_grad_()
    inputs = (q, k, v, table)
    out = attention(q, k, v, score_mod=relative(table), mask_mod=documents, backend=backend)
    want = dense(q, k, v, relative(table), documents)
    torch.testing.assert_close(out, want)
    dout = draw(*out.shape)
    gradients = (torch.autograd.grad(x, inputs, dout) for x in (out, want))
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_indices_are_positions():
    q, k, v = tensors()
    options = {"score_mod": relative(TABLE), "mask_mod": documents}
    whole = attention(q, k, v, **options)
    last = attention(q[:, :, -3:], k, v, **options)  # decode: the last positions
    torch.testing.assert_close(last, whole[:, :, -3:])
    first = attention(q[:, :, :5], k, v, q_offset=0, **options)
    torch.testing.assert_close(first, whole[:, :, :5])
    strided = attention(q[:, :, 1::2], k, v, q_offset=1, q_stride=2, **options)
    torch.testing.assert_close(strided, whole[:, :, 1::2])
    part = attention(q, k[:, :, 4:], v[:, :, 4:], q_offset=0, k_start=4, **options)
    torch.testing.assert_close(part, dense(q, k, v, relative(TABLE), lambda b, h, i, j: documents(b, h, i, j) & (j > 3))
                               .nan_to_num())  # fmt: skip


def test_sequences_count_from_their_start():
    q, k, v = (draw(30, H, D) for _ in range(3))
    cu = torch.tensor([0, 13, 30], dtype=torch.int32)
    scale = torch.tensor([1.0, 0.25])

    def score_mod(s, b, h, i, j):
        return s * scale[b] + TABLE[h, i - j + L]

    out = varlen_attention(q, k, v, cu, cu, score_mod=score_mod, causal=True)
    for n, rows in enumerate((slice(0, 13), slice(13, 30))):
        own = [x[None, rows].transpose(1, 2) for x in (q, k, v)]
        want = attention(*own, score_mod=lambda s, b, h, i, j, n=n: score_mod(s, b + n, h, i, j), causal=True)
        torch.testing.assert_close(out[rows].transpose(0, 1), want[0])
    pages = [torch.stack([x[:8], x[8:16], x[16:24]]) for x in (k, v)]
    table = torch.tensor([[2, 0], [1, 0]], dtype=torch.int32)
    lengths = torch.tensor([13, 6], dtype=torch.int32)
    out = paged_attention(draw(2, H, 1, D), *pages, table, lengths, score_mod=score_mod)
    assert out.isfinite().all()


def test_minus_infinity_hides_and_nan_there_does_not_matter():
    q, k, v = tensors(grad=True)
    bias = torch.zeros(L)
    bias[5::2] = -torch.inf
    bias.requires_grad_()
    with torch.no_grad():
        k[:, :, 5::2], v[:, :, 5::2] = torch.nan, torch.nan
    out = attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[j] * torch.where(i < 0, torch.nan, 1.0))
    assert not out.isfinite().all()  # NaN scores are visible: mask_mod says what is hidden
    out = attention(
        q, k, v, mask_mod=lambda b, h, i, j: (j < 5) | (j % 2 == 0), score_mod=lambda s, b, h, i, j: s + bias[j]
    )
    assert out.isfinite().all()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v, bias)):
        assert gradient.isfinite().all()
    with torch.no_grad():
        nothing = attention(q, k, v, mask_mod=lambda b, h, i, j: i < 0, return_lse=True)
    assert (nothing.out == 0).all()
    assert (nothing.lse == -torch.inf).all()


def test_a_repeated_call_with_a_lambda_made_anew_is_cached():
    q, k, v = tensors()
    call_cache.forget()

    def made(factor, table):
        return lambda s, b, h, i, j: s * factor + table[h, j]

    for factor in (1.0, 1.0, 2.0):
        for table in (TABLE, TABLE + 1):
            out = attention(q, k, v, score_mod=made(factor, table))
            torch.testing.assert_close(out, dense(q, k, v, made(factor, table)))
    assert len(call_cache._known) == 2


def test_backward_names_its_gradients():
    q, k, v = tensors()
    options = {"score_mod": relative(TABLE), "mask_mod": documents}
    out, lse = attention(q, k, v, return_lse=True, **options)
    dout = draw(*out.shape)
    found = attention_backward(q, k, v, out, lse, dout, grads=("q", "score_mod"), **options)
    assert found.dk is None
    table = TABLE.clone().requires_grad_()
    result = dense(q, k, v, relative(table), documents)
    torch.testing.assert_close(found.dscore_mod[0], torch.autograd.grad(result, table, dout)[0], atol=1e-5, rtol=1e-4)
    with pytest.raises(InvalidArgument, match="'score_mod', in a call whose score_mod captures no float tensor"):
        attention_backward(q, k, v, out, lse, dout, grads=("score_mod",), mask_mod=documents)
    again = attention_backward(q, k, v, out, lse, dout, grads=("q", "score_mod"), **options)
    assert torch.equal(found.dscore_mod[0], again.dscore_mod[0])


def test_what_a_function_detaches_has_no_gradient():
    """So has what only a mask_mod reads, or a comparison."""
    q, k, v = tensors(grad=True)
    table, gate = TABLE.clone().requires_grad_(), torch.randn(H, 2 * L).requires_grad_()

    def score_mod(s, b, h, i, j):
        return s + table[h, i] * table.detach()[h, j] + gate.data[h, i - j + L] * (gate[h, j] > 0)

    def mask_mod(b, h, i, j):
        return (gate[h, j] > -1) & (i >= j)

    with torch.no_grad():
        seen = gate[:, :L].unsqueeze(1) > -1
    options = {"score_mod": score_mod, "mask_mod": mask_mod}
    want = dense(q, k, v, score_mod, lambda b, h, i, j: seen[h, 0, j] & (i >= j))
    got = attention(q, k, v, **options)
    torch.testing.assert_close(got, want.nan_to_num())
    dout = draw(*got.shape)
    gradients = [torch.autograd.grad(x, (q, table), dout, retain_graph=True) for x in (got, want)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(got, gate, dout)
    plain = [x.detach() for x in (q, k, v)]
    masked = attention(*plain, mask_mod=mask_mod)
    assert not masked.requires_grad
    one, lengths = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    paged_attention(plain[0][:1, :, :1], draw(3, 8, H, D), draw(3, 8, H, D), one, lengths, mask_mod=mask_mod)


def test_tensors_of_functions_without_a_key_are_freed():
    """These are traced at each call."""

    class Holder:
        def __init__(self):
            self.table = TABLE.clone()

    def table_of(holder):
        return holder.table

    def call(holder):
        attention(*tensors(), score_mod=lambda s, b, h, i, j: s + table_of(holder)[h, j])
        return weakref.ref(holder.table)

    kept = call(Holder())
    gc.collect()
    assert kept() is None


def test_calls_without_memory():
    """On the meta device only shapes count, of captured tensors too."""
    q, k, v = (x.to("meta") for x in tensors())
    options = {"score_mod": relative(TABLE), "mask_mod": lambda b, h, i, j: (i + j) % 3 > 0}
    assert attention(q, k, v, **options).shape == q.shape
    assert plan(q, k, v, **options).backend == "torch"


def test_captured_tensors_that_require_grad_in_other_places_are_refused():
    q, k, v = tensors()
    table = TABLE.clone().requires_grad_()
    pages, tables = draw(3, 8, H, D), (torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([9], dtype=torch.int32))
    with pytest.raises(InvalidArgument, match=r"captured tensor 0 .* requires grad"):
        paged_attention(q[:1, :, :1], pages, pages, *tables, score_mod=relative(table))
    with torch.no_grad():
        paged_attention(q[:1, :, :1], pages, pages, *tables, score_mod=relative(table))
    with pytest.raises(InvalidArgument, match=r"captured tensor 0 .*device"):
        attention(q, k, v, score_mod=relative(TABLE.to("meta")))
    held = torch.empty_like(q)
    with pytest.raises(InvalidArgument, match=r"out.*captured tensor 0"):
        attention(q, k, v, out=held, score_mod=lambda s, b, h, i, j: s + held[b, h, i, 0])


def test_plans_name_the_functions():
    q, k, v = tensors()
    text = str(plan(q, k, v, score_mod=relative(TABLE), mask_mod=documents))
    assert "score_mod and mask_mod" in text
    with pytest.raises(Unsupported, match="yet"):
        plan(q, k, v, score_mod=relative(TABLE), device="sm_90", backend="hopper")


def test_a_tile_map_and_functions_combine():
    q, k, v = tensors()
    tile_map = TileMap.from_spec(L, L, (8, 8), causal=True)
    got = attention(q, k, v, causal=True, tile_map=tile_map, score_mod=relative(TABLE))
    assert torch.equal(got, attention(q, k, v, causal=True, score_mod=relative(TABLE)))


@pytest.mark.parametrize("mask_mod", [lambda b, h, i, j: i >= j, documents, lambda b, h, i, j: (i + j) % 3 > 0])
def test_a_map_of_a_mask_mod_changes_no_bit(mask_mod):
    """Also where it states rules, which a call takes out of it."""
    q, k, v = tensors()
    tile_map = TileMap.from_mod(mask_mod, L, L, (8, 8))
    got = attention(q, k, v, tile_map=tile_map, mask_mod=mask_mod)
    assert torch.equal(got, attention(q, k, v, mask_mod=mask_mod))
    for other in (None, lambda b, h, i, j: i > j + 1):
        with pytest.raises(InvalidArgument, match="tile_map: got a map of a mask_mod"):
            attention(q, k, v, tile_map=tile_map, mask_mod=other)


def test_functions_that_change_nothing_are_none():
    q, k, v = tensors()
    same = {"score_mod": lambda s, b, h, i, j: s * 1.0, "mask_mod": lambda b, h, i, j: b.new_ones(size=(), dtype=bool)}
    assert plan(q, k, v, **same).problem == plan(q, k, v).problem
    assert torch.equal(attention(q, k, v, **same), attention(q, k, v))
    one = plan(q, k, v, **same | {"mask_mod": documents})
    assert one.problem == plan(q, k, v, mask_mod=documents).problem
    assert TileMap.from_mod(same["mask_mod"], L, L, (8, 8)).counts() == (0, 0, 25)
    hidden = attention(q, k, v, mask_mod=lambda b, h, i, j: b.new_zeros((), dtype=bool))
    assert not hidden.any()
    with pytest.raises(InvalidArgument, match="mask_mod: got None"):
        TileMap.from_mod(None, L, L)


def test_graphs_hold_functions_as_text():
    q, k, v = tensors()
    mod = relative(TABLE)

    def call(q, k, v, table):
        return attention(q, k, v, score_mod=relative(table), mask_mod=documents)

    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(call)(q, k, v, TABLE)
    other = torch.randn_like(TABLE)
    assert torch.equal(graph(q, k, v, other), call(q, k, v, other))
    operator = next(n for n in graph.graph.nodes if "tilewise" in str(n.target))
    assert "tanh" in operator.kwargs["mods"]
    many = [torch.randn(L) for _ in range(9)]
    with pytest.raises(InvalidArgument, match="capture 9 tensors, in traced code"):
        make_fx(lambda q: attention(q, k, v, score_mod=lambda s, b, h, i, j: s + sum(x[j] for x in many)))(q)
    assert attention(q, k, v, score_mod=lambda s, b, h, i, j: s + sum(x[j] for x in many)).isfinite().all()
    assert mod is not None


@pytest.mark.slow
def test_compiled_and_exported():
    q, k, v = tensors(grad=True)
    table = TABLE.clone().requires_grad_()

    def call(q, k, v):
        return attention(q, k, v, score_mod=relative(table), mask_mod=documents)

    inputs = (q, k, v, table)
    want, got = call(q, k, v), torch.compile(call, backend="aot_eager")(q, k, v)
    assert torch.equal(got, want)
    for a, b in zip(*(torch.autograd.grad(x.sum(), inputs) for x in (got, want)), strict=True):
        torch.testing.assert_close(a, b)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(TABLE.clone())

        def forward(self, q, k, v):
            return attention(q, k, v, score_mod=lambda s, b, h, i, j: s + self.table[h, i - j + L])

    layer, plain = Layer(), [x.detach() for x in (q, k, v)]
    exported = torch.export.export(layer, tuple(plain), strict=False).module()
    assert torch.equal(exported(*plain), layer(*plain))


def test_gradients_are_the_same_bits_each_time():
    q, k, v = tensors(grad=True)
    table = TABLE.clone().requires_grad_()
    found = []
    for _ in range(3):
        out = attention(q, k, v, score_mod=relative(table))
        found.append(torch.autograd.grad(out.sum(), table)[0])
    assert all(torch.equal(x, found[0]) for x in found)


def test_options_with_functions_are_pickled():
    problem = plan(*tensors(), score_mod=relative(TABLE)).problem
    assert pickle.loads(pickle.dumps(problem)) == problem
    assert hash(problem) == hash(pickle.loads(pickle.dumps(problem)))
    assert tilewise.plan(*tensors(), score_mod=relative(TABLE + 1)).problem.mods is problem.mods
