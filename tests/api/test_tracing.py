"""Every way to trace or transform a call, and every kind of tensor: the right numbers or a refusal by name."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tilewise import InvalidArgument, Quantised, attention, paged_attention, plan, varlen_attention
from tilewise.compat import flash_attn
from tilewise.dispatch import call_cache

CU = torch.tensor([0, 3, 7], dtype=torch.int32)
TABLE, LENGTHS = torch.tensor([[5, 2, 0], [4, 1, 3]], dtype=torch.int32), torch.tensor([10, 5], dtype=torch.int32)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 1.7


def dense(q, k, v):
    return attention(q, k, v, causal=True, window=(6, None), scale=0.3, return_lse=True)


def packed(q, k, v):
    return varlen_attention(q, k, v, CU, CU, causal=True, return_lse=True)


def paged(q, k, v):
    return paged_attention(q, k, v, TABLE, LENGTHS, causal=True, return_lse=True)


CALLS = {
    "dense": (dense, [(2, 4, 5, 16), (2, 2, 9, 16), (2, 2, 9, 8)]),
    "varlen": (packed, [(7, 4, 16), (7, 2, 16), (7, 2, 8)]),
    "paged": (paged, [(2, 4, 3, 16), (6, 4, 2, 16), (6, 4, 2, 8)]),
}


@pytest.fixture(params=CALLS)
def call(request):
    """An entry point, and two sets of inputs for it; an eager call has been remembered."""
    function, shapes = CALLS[request.param]
    inputs = [tuple(draw(*shape, seed=10 * n + i) for i, shape in enumerate(shapes)) for n in range(2)]
    function(*inputs[0])
    return function, *inputs


def same(got, want):
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(call, mode):
    """A graph that was made with some numbers computes with others."""
    function, first, second = call
    graph = make_fx(function, tracing_mode=mode, _allow_non_fake_inputs=True)(*first)
    same(graph(*second), function(*second))


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated, and its tracer warns of constants
def test_jit_trace(call):
    function, first, second = call
    same(torch.jit.trace(lambda *x: tuple(function(*x)), first)(*second), function(*second))


@pytest.mark.filterwarnings("ignore")
def test_jit_trace_with_numbers_from_sizes():
    def block(q, k, v):
        return attention(q, k, v, causal=True, q_offset=k.shape[2] - q.shape[2] - 1)

    shapes = CALLS["dense"][1]
    first, second = (tuple(draw(*shape, seed=seed + i) for i, shape in enumerate(shapes)) for seed in (0, 10))
    assert torch.equal(torch.jit.trace(block, first)(*second), block(*second))


def test_functionalize(call):
    function, first, _ = call
    same(torch.func.functionalize(function)(*first), function(*first))


def test_vmap():
    q, k, v = (draw(3, *shape, seed=i) for i, shape in enumerate(CALLS["dense"][1]))
    got = torch.vmap(lambda *x: tuple(dense(*x)))(q, k, v)
    for i in range(3):
        same((x[i] for x in got), dense(q[i], k[i], v[i]))


class Watching(TorchDispatchMode):
    """A dispatch mode that does nothing but see the operators."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **kwargs or {})


def test_dispatch_modes_see_one_operator(call):
    function, first, _ = call
    want = function(*first)
    with Watching() as mode:
        got = function(*first)
    same(got, want)
    assert len(mode.seen) == 1
    assert mode.seen[0].startswith("tilewise.")


def test_arrays_inside_a_dispatch_mode():
    q, k, v = (draw(*shape, seed=i) for i, shape in enumerate(CALLS["dense"][1]))
    out = torch.empty(2, 4, 5, 8)
    with Watching():
        got = attention(q.numpy(), k.numpy(), v.numpy(), mask=torch.ones(5, 9, dtype=torch.bool).numpy())
        attention(q, k, v, out=out, window=4)
    assert type(got).__module__ == "numpy"
    assert torch.equal(torch.from_numpy(got), attention(q, k, v))
    assert torch.equal(out, attention(q, k, v, window=4))


@pytest.mark.parametrize("inside", [True, False])
def test_fake_tensors(inside):
    """With their mode and without it."""
    mode = FakeTensorMode()
    q, k, v = (mode.from_tensor(draw(*shape)) for shape in CALLS["dense"][1])
    if inside:
        with mode:
            got = dense(q, k, v)
    else:
        got = dense(q, k, v)
    assert isinstance(got.out, FakeTensor)
    assert got.out.shape == (2, 4, 5, 8)
    assert got.lse.shape == (2, 4, 5)
    with pytest.raises(InvalidArgument, match="FakeTensor"):
        plan(q, k, v)


def test_plans_in_compiled_code():
    """The graph ends before a plan and goes on after it."""
    q, k, v = (draw(*shape) for shape in CALLS["dense"][1])
    plans = []

    @torch.compile(backend="aot_eager")
    def planned(q, k, v):
        plans.append(plan(q, k, v, causal=True, scale=0.321))  # not planned before
        return q + 1

    assert torch.equal(planned(q, k, v), q + 1)
    assert plans == [plan(q, k, v, causal=True, scale=0.321)]


def test_plans_of_batches():
    q, k, v = (draw(*shape) for shape in CALLS["dense"][1])
    mask = draw(3, 5, 9) > 0
    with pytest.raises(InvalidArgument, match=r"^q: got a tensor of torch\.vmap"):
        torch.vmap(lambda q: plan(q, k, v))(torch.stack([q, q]))
    with pytest.raises(InvalidArgument, match=r"^mask: got a tensor of torch\.vmap"):
        torch.vmap(lambda mask: plan(q, k, v, mask=mask))(mask)


def test_fake_quantised_keys():
    mode = FakeTensorMode()
    q, k, _ = (draw(*shape) for shape in CALLS["dense"][1])
    k = Quantised.from_float(k, "int8", 32)
    k = Quantised(mode.from_tensor(k.data), mode.from_tensor(k.scales), "int8", 32)
    assert isinstance(attention(mode.from_tensor(q), k, k), FakeTensor)


def test_meta_tensors():
    q, k, v = (draw(*shape).to("meta") for shape in CALLS["dense"][1])
    got = dense(q, k, v)
    assert got.out.is_meta
    assert got.out.shape == (2, 4, 5, 8)
    with pytest.raises(InvalidArgument, match="device meta"):
        dense(draw(*q.shape), k, v)


class Wrapped(torch.Tensor):
    """A subclass without memory of its own, which hands operators to the tensor inside."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        inner = lambda x: x.inner if isinstance(x, cls) else x  # noqa: E731
        result = function(*tree_map(inner, args), **tree_map(inner, kwargs or {}))
        return tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, result)


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1, 2)])
def test_wrappers_decide_about_the_operator(call, which):
    function, first, _ = call
    got = function(*(Wrapped(x) if i in which else x for i, x in enumerate(first)))
    assert isinstance(got.out, Wrapped)
    same((x.inner for x in got), function(*first))


def test_a_wrapped_mask():
    q, k, v = (draw(*shape) for shape in CALLS["dense"][1])
    mask = draw(5, 9)
    assert torch.equal(attention(q, k, v, mask=Wrapped(mask)).inner, attention(q, k, v, mask=mask))


class Named(torch.Tensor):
    """A subclass with memory: what its numbers mean is its own affair."""


def nested(x):
    return torch.nested.nested_tensor(list(x.unbind(0)))


KINDS = {
    "a nested tensor": nested,
    "layout torch._mkldnn": lambda x: x.to_mkldnn(),
    "layout torch.sparse_coo": lambda x: x.to_sparse(),
    "layout torch.sparse_csr": lambda x: x.to_sparse_csr(),
    "a Named": lambda x: x.as_subclass(Named),
    "an UninitializedParameter": lambda x: torch.nn.UninitializedParameter(requires_grad=False),
}


@pytest.mark.filterwarnings("ignore")  # that these are prototypes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_other_tensors_are_refused(call, kind, which):
    """Whether or not a plain call of the same shapes is remembered."""
    function, first, _ = call
    try:
        odd = KINDS[kind](first[which])
    except RuntimeError:
        pytest.skip("torch has no such tensor of this shape")
    name = ("q", r"k\w*", r"v\w*")[which]
    words = kind.removeprefix("an ")
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=f"^{name}: got .*{words}"):
            function(*(odd if i == which else x for i, x in enumerate(first)))
        function(*first)


def test_parameters_are_tensors(call):
    function, first, _ = call
    same(function(*(torch.nn.Parameter(x, requires_grad=False) for x in first)), function(*first))


def test_dtensors_are_refused():
    dtensor = pytest.importorskip("torch.distributed.tensor")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        q, k, v = (draw(*shape) for shape in CALLS["dense"][1])
        for sharded in ((dtensor.distribute_tensor(q, mesh), k, v), (q, dtensor.distribute_tensor(k, mesh), v)):
            with pytest.raises(InvalidArgument, match=r"got a DTensor.*to_local.*register_sharding_rules"):
                attention(*sharded)
    finally:
        torch.distributed.destroy_process_group()


def test_negated_tensors(call):
    """`z.conj().imag` holds numbers whose sign is a bit of the tensor; of width 1 it even has a unit stride."""
    function, first, _ = call
    negated = [torch.complex(x, -x).conj().imag for x in first]
    assert all(x.is_neg() for x in negated)
    same(function(*negated), function(*first))
    q, k, v = draw(1, 2, 3, 1), draw(1, 2, 4, 1, seed=1), draw(1, 2, 4, 1, seed=2)
    want = [attention(q, k, v) for _ in range(2)][1]
    assert torch.equal(attention(*(torch.complex(x, -x).conj().imag for x in (q, k, v))), want)
    one = draw(1, 1, 1, 1)
    attention(one, one, one)
    assert torch.equal(attention(one, one, torch.complex(one, -one).conj().imag), one)
    with pytest.raises(InvalidArgument, match="out: got a lazily negated tensor"):
        attention(q, k, v, out=torch._neg_view(torch.empty(1, 2, 3, 1)))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of torch's own imports
@pytest.mark.parametrize("which", [0, 1, 2])
def test_forward_mode_of_pages_is_refused(which):
    first = [draw(*shape) for shape in CALLS["paged"][1]]
    with forward_ad.dual_level():
        dual = [forward_ad.make_dual(x, x) if i == which else x for i, x in enumerate(first)]
        with pytest.raises(InvalidArgument, match="forward-mode tangent"):
            paged(*dual)
        same(paged(*first), paged(*first))  # without a tangent nothing is lost

    def of_one(x):
        return tuple(paged(*(x if i == which else y for i, y in enumerate(first))))

    with pytest.raises(InvalidArgument, match="forward-mode tangent"):
        torch.func.jvp(of_one, (first[which],), (first[which],))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", ["causal", "allow_tf32", "deterministic"])
def test_flags_are_flags_in_traced_code_too(name):
    q = draw(1, 2, 5, 16)
    with pytest.raises(InvalidArgument, match=f"{name}: got 1"):
        make_fx(lambda q: attention(q, q, q, **{name: 1}))(q)


def test_symbolic_trace_is_refused_with_the_remedy():
    with pytest.raises(InvalidArgument, match=r"got Proxy.*torch\.fx\.wrap"):
        torch.fx.symbolic_trace(dense)


def test_a_plain_call_is_still_remembered():
    call_cache.forget()
    q, k, v = (draw(*shape) for shape in CALLS["dense"][1])
    dense(q, k, v)
    assert len(call_cache._known) == 1
    with Watching():
        dense(q, k, v)
    known = len(call_cache._known)  # perhaps one more: an operator gives its options in another order
    with Watching():
        dense(q, k, v)
    dense(q, k, v)
    assert len(call_cache._known) == known


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["make_fx", "jit"])
def test_a_step_of_a_drop_in_over_a_cache(way):
    """Lengths are read when the graph runs, not while it is made."""

    def step(q, cache, new, lengths, table):
        return flash_attn.flash_attn_with_kvcache(
            q, cache, cache, new, new, cache_seqlens=lengths, block_table=table, causal=True
        )

    first, second = (
        (draw(2, 1, 4, 16, seed=seed), draw(6, 4, 2, 16, seed=seed + 1), draw(2, 1, 2, 16, seed=seed + 2), lengths)
        for seed, lengths in ((0, torch.tensor([4, 9]).int()), (10, torch.tensor([11, 2]).int()))
    )
    table = TABLE
    trace = make_fx(step) if way == "make_fx" else lambda *x: torch.jit.trace(step, x, check_trace=False)
    graph = trace(*(x.clone() for x in first), table)
    caches = second[1].clone(), second[1].clone()
    results = [f(second[0], cache, *second[2:], table) for f, cache in zip((graph, step), caches, strict=True)]
    assert torch.equal(*results)
    assert torch.equal(*caches)
