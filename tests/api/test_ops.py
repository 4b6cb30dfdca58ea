"""tilewise as torch operators: opcheck, torch.compile in one graph, static and dynamic lengths, torch.export."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx

import tilewise
from tilewise import (
    InvalidArgument,
    Quantised,
    TileMap,
    attention,
    attention_backward,
    paged_attention,
    varlen_attention,
)
from tilewise.compat import flash_attn, sdpa
from tilewise.testing.check import judge, largest_error


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def peaked(*shape):
    return torch.randn(shape) * 1.7


def dense(rows=5, keys=9):
    return peaked(2, 4, rows, 16), peaked(2, 2, keys, 16), peaked(2, 2, keys, 8)


CU = torch.tensor([0, 3, 7], dtype=torch.int32)
TABLE, LENGTHS = torch.tensor([[5, 2, 0], [4, 1, 3]], dtype=torch.int32), torch.tensor([10, 5], dtype=torch.int32)
INT8 = Quantised.from_float(dense()[1], "int8", 32)
INT4 = Quantised.from_float(dense()[2], "int4", 32)
DENSE = {
    "plain": {},
    "causal": {"causal": True, "q_offset": 1, "left": 3, "scale": 0.3, "softcap": 5.0},
    "mask": {"mask": torch.rand(5, 9) > 0.3, "kv_lengths": torch.tensor([9, 4]), "sinks": torch.rand(4)},
    "rows": {"q_offsets": torch.tensor([1, 4]), "causal": True, "alibi_slopes": torch.rand(4), "chunk": 4},
    "strides": {"k_starts": torch.tensor([1, 4]), "causal": True, "k_stride": 2, "q_stride": 3},
    "biases": {"q_bias": torch.rand(2, 4, 5), "k_bias": torch.rand(1, 4, 9), "causal": True},
    "tree": {"tree_mask": torch.rand(2, 5, 5) > 0.5},
    "nodes": {"tree_mask": torch.rand(2, 5, 5) > 0.5, "positions": torch.tensor([[4, 5, 5, 6, 6]]), "left": 1},
    "indices": {"key_indices": torch.tensor([3, -1, 0, 8]).int().expand(2, 5, 4).contiguous(), "causal": True},
    "blocks": {"block_indices": torch.tensor([[[2, 0], [1, -1]]] * 2).int(), "block_size": 4},
    "named": {"split_size": 4, "backend": "torch", "validate": True},
}


def opcheck(name, tensors, options):
    for suffix in ("", "_lse"):
        torch.library.opcheck(getattr(torch.ops.tilewise, name + suffix).default, tensors, options)


@pytest.mark.parametrize("name", DENSE)
def test_opcheck_dense(name):
    opcheck("attention", dense(), DENSE[name])


def test_opcheck_other_forms():
    q, k, v = dense()
    opcheck("attention", tuple(x.transpose(1, 2) for x in (q, k, v)), {"layout": "blhd", "causal": True})
    stored = {"k_scales": INT8.scales, "k_stored": "int8/32", "v_scales": INT4.scales, "v_stored": "int4/32"}
    opcheck("attention", (q, INT8.data, INT4.data), stored)
    packed = peaked(7, 4, 16), peaked(7, 2, 16), peaked(7, 2, 8)
    opcheck("varlen_attention", (*packed, CU, CU), {"causal": True, "max_q": 4, "max_k": 4})
    pages = peaked(6, 4, 2, 16), peaked(6, 4, 2, 8)
    opcheck("paged_attention", (q, *pages, TABLE, LENGTHS), {"causal": True})
    opcheck("paged_attention", (packed[0], *pages, TABLE, LENGTHS), {"cu_seqlens_q": CU, "max_q": 4})


def check(function, *calls, dynamic=None, graphs=1):
    """Compiled in one graph, it gives what it gives without; `graphs` counts how often it was traced."""
    counter = CompileCounter()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=counter)
    for arguments in calls:
        want, got = function(*arguments), compiled(*arguments)
        for a, b in zip(want, got, strict=True) if isinstance(want, tuple) else [(want, got)]:
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
    assert counter.frame_count == graphs


def test_compile_every_option():
    def both(q, k, v, slopes, sinks, lengths, mask, offsets):
        a = attention(
            q, k, v, scale=0.3, causal=True, window=(6, None), chunk=8, softcap=5.0, alibi_slopes=slopes, sinks=sinks,
            kv_lengths=lengths, mask=mask, q_offset=offsets, split_size=4, allow_tf32=True, backend="torch",
        )  # fmt: skip
        out, lse = attention(q + a.mean(), k, v, window=4, return_lse=True)
        return a, out, lse

    slopes, sinks = torch.rand(4), torch.rand(4)
    check(both, (*dense(), slopes, sinks, torch.tensor([9, 6]), torch.rand(5, 9) > 0.2, torch.tensor([4, 3])))


def test_compile_other_entry_points():
    def steps(q, pages, table, lengths, packed, cu):
        a = paged_attention(q, *pages, table, lengths, causal=True, validate=False)
        b = paged_attention(packed, *pages, table, lengths, cu_seqlens_q=cu, max_q=4, return_lse=True)
        c = varlen_attention(packed, packed, packed, cu, cu, max_q=4, max_k=4, causal=True)
        return a, *b, c

    pages = peaked(6, 4, 2, 16), peaked(6, 4, 2, 16)
    check(steps, (dense()[0], pages, TABLE, LENGTHS, peaked(7, 4, 16), CU))


def test_compile_quantised_and_out():
    def into(q, k, k_scales, v, v_scales, out):
        attention(q, Quantised(k, k_scales, "int8", 32), Quantised(v, v_scales, "int4", 32), out=out)
        return out * 2

    q = dense()[0]
    check(into, (q, INT8.data, INT8.scales, INT4.data, INT4.scales, torch.zeros(2, 4, 5, 8)))


def test_lengths_are_dynamic():
    """One graph for every length, of queries and of keys, also where a number follows from a shape."""

    def block(q, k, v):
        return attention(q, k, v, causal=True, q_offset=k.shape[2] - q.shape[2], window=k.shape[2] // 2)

    check(block, *(dense(rows, keys) for rows, keys in ((5, 9), (6, 11), (13, 40), (3, 3))), dynamic=True)
    torch._dynamo.reset()
    check(block, *(dense(rows, 9) for rows in (5, 5, 6, 7, 8)), graphs=2)  # static once, then dynamic


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of Inductor's own imports
def test_compilers_take_it(backend):
    """Work around the call, functionalised and (where there is a C++ compiler) compiled."""

    def layer(x, w, out):
        q, k, v = (x @ w).unflatten(-1, (3, 4, 16)).unbind(2)
        y = attention(q, k, v, causal=True, layout="blhd").flatten(2).relu()
        attention(q, k, v, out=out, layout="blhd")
        return y + out.mean()

    def with_torch(x, w):
        q, k, v = (x @ w).unflatten(-1, (3, 4, 16)).movedim(1, 3).unbind(1)  # [B, H, L, D]
        causal, full = (F.scaled_dot_product_attention(q, k, v, is_causal=c).transpose(1, 2) for c in (True, False))
        return causal.flatten(2).relu() + full.mean(), full

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for length in (7, 12):
        x, w = torch.randn(2, length, 32), torch.randn(32, 192) * 0.2
        out = torch.zeros(2, length, 4, 16)
        results = zip((compiled(x, w, out), out), with_torch(x, w), with_torch(x.double(), w.double()), strict=True)
        for got, plain, exact in results:
            judge("out", got, exact, 2 * largest_error(plain, exact), torch.float32)


def test_drop_ins_compile():
    q, k, v = dense()
    check(lambda q, k, v: sdpa.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), (q, k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    check(lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(3, 0)), (q, k, v))
    packed = [peaked(7, 4, 16) for _ in range(3)]
    check(lambda q, k, v, cu: flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, 4, 4, causal=True), (*packed, CU))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_decoding_with_a_cache_compiles(backend):
    """Appending, rotary and pages in one graph; the cache is written in place."""
    angles = torch.rand(12, 8) * 6

    def step(q, k, v, k_pages, v_pages, table, lengths):
        return flash_attn.flash_attn_with_kvcache(
            q, k_pages, v_pages, k, v, angles.cos(), angles.sin(), lengths, block_table=table, causal=True
        )

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    pages = [peaked(6, 4, 2, 16) for _ in range(2)]
    twins = [x.clone() for x in pages]
    for i in range(2):
        q, k, v = peaked(2, 1, 4, 16), peaked(2, 1, 2, 16), peaked(2, 1, 2, 16)
        want = step(q, k, v, *pages, TABLE, LENGTHS + i)
        assert torch.equal(compiled(q, k, v, *twins, TABLE, LENGTHS + i), want)
        assert all(map(torch.equal, pages, twins))
    with pytest.raises(InvalidArgument, match=r"block_table\[0, 0\]: got 9"):
        compiled(q, k, v, *twins, torch.tensor([[9, 2, 0], [4, 1, 3]], dtype=torch.int32), LENGTHS)


def test_a_swapped_in_function_compiles():
    def block(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    with sdpa.installed():
        check(block, dense())


def test_export():
    class Block(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, causal=True)

    length = torch.export.Dim("length", min=2, max=512)
    shapes = ({2: length}, {2: length}, {2: length})
    program = torch.export.export(Block(), dense(9, 9), dynamic_shapes=shapes)
    assert any(node.target is torch.ops.tilewise.attention.default for node in program.graph.nodes)
    q, k, v = dense(20, 20)
    assert torch.equal(program.module()(q, k, v), attention(q, k, v, causal=True))


GRADIENTS = {
    "plain": {},
    "causal": {"causal": True, "q_offset": 1, "left": 3, "scale": 0.3, "softcap": 5.0},
    "mask": {"mask": torch.rand(4, 1, 9), "kv_lengths": torch.tensor([9, 4]), "sinks": torch.rand(4)},
    "rows": {"q_offsets": torch.tensor([1, 4]), "causal": True, "alibi_slopes": torch.rand(4), "chunk": 4},
    "strides": {"k_starts": torch.tensor([1, 4]), "causal": True, "k_stride": 2, "q_stride": 3},
    "biases": {"q_bias": torch.rand(2, 4, 5), "k_bias": torch.rand(1, 4, 9), "causal": True},
    "tree": {"tree_mask": torch.rand(2, 5, 5) > 0.5},
    "nodes": {"tree_mask": torch.rand(2, 5, 5) > 0.5, "positions": torch.tensor([[4, 5, 5, 6, 6]]), "left": 1},
    "indices": DENSE["indices"],
    "blocks": DENSE["blocks"],
}


def trained(*tensors):
    return tuple(x.clone().requires_grad_() for x in tensors)


@pytest.mark.parametrize("name", GRADIENTS)
def test_opcheck_gradients(name):
    options = {
        n: x.requires_grad_(x.is_floating_point()) if torch.is_tensor(x) else x for n, x in GRADIENTS[name].items()
    }
    opcheck("attention", trained(*dense()), options)
    packed = peaked(7, 4, 16), peaked(7, 2, 16), peaked(7, 2, 8)
    if name in ("plain", "causal"):
        opcheck("varlen_attention", (*trained(*packed), CU, CU), options | {"max_q": 4, "max_k": 4})


def test_opcheck_of_the_operators_of_derivatives():
    """Each is differentiable in its turn, but for the last two."""
    q, k, v = dense()
    out, lse = attention(q, k, v, causal=True, sinks=torch.ones(4), return_lse=True)
    given = {"out": out, "lse": lse, "dout": torch.randn_like(out), "dlse": torch.randn_like(lse)}
    given |= {"sinks": torch.ones(4), "dentropy": torch.randn_like(lse)}
    given["dkey_mass"] = torch.randn(*lse.shape[:2], k.shape[2])
    given |= {"q": q, "k": k, "v": v, "moved_out": torch.randn_like(out), "moved_lse": torch.randn_like(lse)}
    asked = {"grads": "q,k,v,sinks", "moved": "q,sinks", "tangents": [torch.randn_like(q), torch.ones(4)]}
    for name, names in tilewise.derivative_ops.ARGUMENTS.items():
        operator = getattr(torch.ops.tilewise, name).default
        tensors = [given.get(which, asked.get(which)) for which in names]
        torch.library.opcheck(operator, tuple(tensors), {"causal": True})
        if name not in ("attention_second_order", "attention_statistics_backward"):
            needing = [x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in tensors]
            torch.library.opcheck(operator, tuple(needing), {"causal": True})


def same_gradients(function, compiled, *arguments):
    inputs = [x for x in arguments if x.requires_grad]
    results = []
    for f in (function, compiled):
        out = f(*arguments)
        out = out[0].sum() + 2 * out[1].sum() if isinstance(out, tuple) else out.sin().sum()
        results.append((out.detach(), torch.autograd.grad(out, inputs)))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_forward_and_backward(backend):
    """In one graph, with dynamic lengths, every tensor that may require grad among them."""

    def all_options(q, k, v, mask, sinks, slopes):
        return attention(q * 2, k, v, mask=mask, sinks=sinks, alibi_slopes=slopes, causal=True, softcap=5.0) * 3

    compiled = torch.compile(all_options, fullgraph=True, backend=backend)
    for rows in (5, 7, 8):
        given = *dense(rows, 9), torch.randn(4, 1, 9), torch.randn(4), torch.rand(4)
        same_gradients(all_options, compiled, *trained(*given))
    same_gradients(all_options, compiled, given[0].requires_grad_(), *given[1:])

    def both(q, k, v):
        return tuple(attention(q, k, v, window=4, return_lse=True))

    same_gradients(both, torch.compile(both, fullgraph=True, backend=backend), *trained(*dense()))

    def packed(q, k, v):
        return varlen_attention(q, k, v, CU, CU, causal=True, max_q=4, max_k=4)

    given = trained(peaked(7, 4, 16), peaked(7, 2, 16), peaked(7, 2, 8))
    same_gradients(packed, torch.compile(packed, fullgraph=True, backend=backend), *given)


def test_one_graph_forward_and_one_backward():
    """The compiler sees one operator forward, the one with lse, and one backward."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    seen = []

    def record(graph, _):
        seen.append([str(n.target) for n in graph.graph.nodes if "tilewise" in str(n.target)])
        return make_boxed_func(graph.forward)

    compiled = torch.compile(
        lambda *x: attention(*x, causal=True), fullgraph=True, backend=aot_autograd(fw_compiler=record)
    )
    compiled(*trained(*dense())).sum().backward()
    assert seen == [["tilewise.attention_lse.default"], ["tilewise.attention_backward.default"]]


def test_the_low_level_call_in_a_graph():
    def step(q, k, v, mask, dout):
        out, lse = attention(q, k, v, mask=mask, causal=True, window=4, q_offset=1, return_lse=True)
        names = ("mask", "q", "v")  # in any order
        found = attention_backward(q, k, v, out, lse, dout, grads=names, mask=mask, causal=True, window=4, q_offset=1)
        return found.dq, found.dv, found.dmask

    given = *dense(), torch.randn(4, 1, 9), torch.randn(2, 4, 5, 8)
    check(step, given)
    traced = make_fx(step)(*given)
    assert sum("attention_backward" in str(node.target) for node in traced.graph.nodes) == 1
    assert all(torch.equal(a, b) for a, b in zip(traced(*given), step(*given), strict=True))
    with pytest.raises(Exception, match=r"backend.*None"):
        make_fx(lambda q: attention_backward(q, q, q, q, q[..., 0], q, backend="torch"))(torch.randn(1, 1, 3, 4))


def test_operators_called_by_name_have_gradients():
    q, k, v = trained(*dense())
    want = torch.autograd.grad(attention(q, k, v, causal=True).sum(), (q, k, v))
    for out in (
        torch.ops.tilewise.attention(q, k, v, causal=True),
        torch.ops.tilewise.attention_lse(q, k, v, causal=True)[0],
    ):
        got = torch.autograd.grad(out.sum(), (q, k, v))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with torch.no_grad():
        assert not torch.ops.tilewise.attention(q, k, v).requires_grad
        assert torch.equal(torch.compile(attention, fullgraph=True, backend="eager")(q, k, v), attention(q, k, v))


def test_what_has_no_gradients_is_refused():
    q, _, v = dense()
    q.requires_grad_()
    pages = peaked(6, 4, 2, 16), peaked(6, 4, 2, 8)
    with pytest.raises(InvalidArgument, match="paged keys have no gradients"):
        torch.ops.tilewise.paged_attention(q, *pages, TABLE, LENGTHS)
    stored = {"k_scales": INT8.scales, "k_stored": "int8/32"}
    with pytest.raises(InvalidArgument, match="quantised keys have no gradients"):
        torch.ops.tilewise.attention(q, INT8.data, v, **stored)
    with pytest.raises(Exception, match="paged keys have no gradients"):
        torch.compile(paged_attention, fullgraph=True, backend="aot_eager")(q, *pages, TABLE, LENGTHS)


def test_selective_checkpointing_by_the_operators_name():
    """The operator's outputs are saved, the rest is computed again."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    ran = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.append(str(func))
            return func(*args, **(kwargs or {}))

    def policy(ctx, op, *args, **kwargs):
        kept = op is torch.ops.tilewise.attention_lse.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    q, k, v = trained(*dense())
    block = lambda q, k, v: attention(q.sigmoid(), k, v, causal=True).cos()  # noqa: E731
    want = torch.autograd.grad(block(q, k, v).sum(), (q, k, v))
    with Count():
        out = checkpoint(
            block, q, k, v, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        )
        got = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert ran.count("tilewise.attention_lse.default") == 1
    assert ran.count("aten.sigmoid.default") == 2


def test_tile_maps_are_refused_in_traced_code():
    mask = torch.ones(5, 9, dtype=torch.bool)
    tiles = TileMap.from_mask(mask, (4, 4))
    with pytest.raises(Exception, match="tile_map"):
        torch.compile(lambda *x: attention(*x, mask=mask, tile_map=tiles), fullgraph=True, backend="eager")(*dense())


def test_eager_calls_do_not_pass_the_dispatcher(monkeypatch):
    monkeypatch.setattr(tilewise.ops, "traced", None)
    monkeypatch.setattr(tilewise.ops, "_run", None)
    assert attention(*dense()).shape == (2, 4, 5, 8)


@pytest.mark.parametrize("width", [16, 24], ids=["value dim of q", "another"])
@pytest.mark.parametrize("place", ["contiguous", "transposed", "sliced", "broadcast"])
@pytest.mark.parametrize("entry", ["attention", "attention blhd", "varlen_attention"])
def test_strides_of_results_are_those_that_tracers_are_told(entry, place, width):
    """Compiled code reads results by them: those of a q that is a view, too."""
    shapes = {"attention": (2, 4, 6, 16), "attention blhd": (2, 6, 4, 16), "varlen_attention": (12, 4, 16)}
    shape = shapes[entry]

    def given(device):
        q = torch.ones(shape, device=device)
        if place == "transposed":
            q = torch.ones(*shape[:-3], shape[-2], shape[-3], 16, device=device).transpose(-2, -3)
        elif place == "sliced":
            q = torch.ones(*shape[:-1], 20, device=device)[..., :16]
        elif place == "broadcast":
            q = torch.ones(1, *shape[1:], device=device).expand(shape)
        k, v = torch.ones(shape, device=device), torch.ones(*shape[:-1], width, device=device)
        if entry == "varlen_attention":
            cu = torch.tensor([0, 5, 12], dtype=torch.int32, device=device)
            return tilewise.varlen_attention(q, k, v, cu, cu, max_q=7, max_k=7, return_lse=True)
        layout = "blhd" if "blhd" in entry else "bhld"
        return tilewise.attention(q, k, v, layout=layout, return_lse=True)

    for told, real in zip(given("meta"), given("cpu"), strict=True):
        assert (told.shape, told.stride(), told.dtype) == (real.shape, real.stride(), real.dtype)
