"""torch's scaled_dot_product_attention by tilewise, against torch's own in float64."""

import copy
import inspect
import itertools
import sys
import types

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import tilewise.compat.sdpa as sdpa
from naive import query_sets
from tilewise import InvalidArgument, attention
from tilewise.compat import sdpa_kernel
from tilewise.testing.check import judge, largest_error

ours = sdpa.scaled_dot_product_attention
torchs = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _same_inputs():
    torch.manual_seed(0)


def peaked(*shape, dtype=torch.float32):
    return (torch.randn(shape) * 1.7).to(dtype)


def plain(q, k, v, mask=None, **options):
    """Torch's arithmetic: scores and softmax in float32, weights and output in q's dtype."""
    rows, keys = q.shape[-2], k.shape[-2]
    given = torch.ones(rows, keys, dtype=torch.bool).tril() if options.pop("is_causal", False) else mask
    heads = max(x.shape[-3] if x.ndim > 2 else 1 for x in (q, k, v))
    if options.pop("enable_gqa", False):
        k, v = (x.repeat_interleave(heads // x.shape[-3], -3) for x in (k, v))
    s = q.float() @ k.float().transpose(-1, -2) * options.get("scale", q.shape[-1] ** -0.5)
    if given is not None:
        s = s.masked_fill(~given, -torch.inf) if given.dtype == torch.bool else s + given
    p = s.softmax(-1).nan_to_num(0.0).to(q.dtype)
    return (p.float() @ v.float()).to(q.dtype)


def check(q, k, v, mask=None, **options):
    """Ours against torch's in float64: at most twice torch's own error in the same dtype."""
    given = mask if mask is None or mask.dtype == torch.bool else mask.double()
    want = torchs(q.double(), k.double(), v.double(), given, **options)
    got = ours(q, k, v, mask, **options)
    assert got.shape == want.shape
    assert got.dtype == q.dtype
    judge("out", got, want, 2 * torch_error(q, k, v, mask, **options), q.dtype)
    assert want.abs().max() > 0.1


def torch_error(q, k, v, mask=None, **options):
    """Torch's own error."""
    given = mask if mask is None or mask.dtype == torch.bool else mask.double()
    errors = []
    for other in query_sets(q):
        exact = torchs(other.double(), k.double(), v.double(), given, **options)
        errors.append(largest_error(plain(other, k, v, mask, **options), exact))
    return max(errors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "keys"), [(9, 9), (5, 12), (12, 5), (1, 30)])
def test_causal_is_top_left(rows, keys, dtype):
    q, k, v = peaked(2, 3, rows, 16, dtype=dtype), peaked(2, 3, keys, 16, dtype=dtype), peaked(2, 3, keys, 8).to(dtype)
    check(q, k, v)
    check(q, k, v, is_causal=True)
    check(q, k, v, is_causal=True, scale=0.4)


@pytest.mark.parametrize(
    "shape", [(5, 9), (1, 9), (5, 1), (3, 5, 9), (1, 1, 9), (2, 3, 5, 9), (2, 1, 1, 9), (1, 3, 5, 1)]
)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks(shape, kind):
    q, k, v = peaked(2, 3, 5, 16), peaked(2, 3, 9, 16), peaked(2, 3, 9, 16)
    mask = torch.rand(shape) > 0.4
    if kind == "float":
        mask = torch.randn(shape).masked_fill(~mask, -torch.inf)
    mask[..., 0, 0] = True if kind == "bool" else 0.5
    check(q, k, v, mask)


@pytest.mark.parametrize(
    "hidden", [torch.zeros(4, 4, dtype=torch.bool), torch.full((4, 4), -torch.inf)], ids=["bool", "float"]
)
def test_rows_that_see_nothing_are_zero(hidden):
    q, k, v = (peaked(1, 2, 4, 8) for _ in range(3))
    mask = hidden.clone()
    mask[0] = True if mask.dtype == torch.bool else 0.0
    check(q, k, v, mask)
    assert ours(q, k, v, hidden).eq(0).all()


def test_shapes_of_any_rank_broadcast():
    for lead in [(), (3,), (2, 3), (2, 1, 3), (2, 2, 1, 3)]:
        check(peaked(*lead, 5, 16), peaked(*lead, 7, 16), peaked(*lead, 7, 8), is_causal=True)
    q, k = peaked(2, 3, 5, 16), peaked(7, 16)
    check(q, k, k)
    check(q, peaked(3, 7, 16), peaked(1, 3, 7, 4))
    check(peaked(1, 3, 5, 16), peaked(4, 3, 7, 16), peaked(4, 3, 7, 16))
    check(peaked(2, 1, 5, 16), peaked(2, 3, 7, 16), peaked(2, 1, 7, 16))
    five = [peaked(2, 2, 3, n, 16) for n in (5, 9, 9)]
    for mask_lead in [(), (3,), (1, 3), (2, 1, 1), (2, 2, 3), (1, 2, 1)]:
        check(*five, torch.rand(*mask_lead, 5, 9) > 0.2)


def test_heads():
    q, k, v = peaked(2, 6, 5, 16), peaked(2, 2, 7, 16), peaked(2, 2, 7, 16)
    check(q, k, v, enable_gqa=True)
    check(q[0], k[0], v[0], enable_gqa=True, is_causal=True)
    check(q, k[:, :1], v[:, :1])
    with pytest.raises(InvalidArgument, match="enable_gqa"):
        ours(q, k, v)
    for kv in [(4, 4), (2, 3), (2, 1)]:
        with pytest.raises(InvalidArgument, match="one number for both, a divisor"):
            ours(q, *(peaked(2, n, 7, 16) for n in kv), enable_gqa=True)


def test_no_keys():
    q = peaked(1, 2, 3, 8)
    assert ours(q, q[:, :, :0], q[:, :, :0]).eq(0).all()


def test_the_signature_is_torchs():
    """Names, order and defaults as torch documents them; all that torch takes by place, ours takes by place."""
    words = torchs.__doc__.split("->")[0].replace("\n", " ").partition("(")[2].rpartition(")")[0]
    documented = [word.strip().split("=") for word in words.split(",")]
    given = inspect.signature(ours).parameters.values()
    assert [p.name for p in given] == [name for name, *_ in documented]
    for p, (_, *default) in zip(given, documented, strict=True):
        assert [str(p.default)] == default or p.default is p.empty
    with pytest.raises(TypeError):
        ours(*(peaked(1, 1, 2, 4) for _ in range(3)), None, 0.0, False, 1.0)


def test_refusals():
    q = peaked(1, 2, 4, 8)
    for options, words in [
        ({"dropout_p": 1.1}, "dropout_p: got 1.1"),
        ({"is_causal": True, "attn_mask": torch.ones(4, 4, dtype=torch.bool)}, "attn_mask: got a mask with is_causal"),
        ({"attn_mask": torch.ones(4, 5, dtype=torch.bool)}, "mask: got shape"),
    ]:
        with pytest.raises(InvalidArgument, match=words):
            ours(q, q, q, **options)
    with pytest.raises(InvalidArgument, match=r"query's torch\.float32"):
        ours(q, q.half(), q)
    with pytest.raises(InvalidArgument, match="float32, float16 or bfloat16"):
        ours(*itertools.repeat(q.long(), 3))
    with pytest.raises(InvalidArgument, match="rank 2 or more"):
        ours(*itertools.repeat(torch.zeros(()), 3))
    with pytest.raises(InvalidArgument, match="broadcast"):
        ours(q, peaked(3, 2, 4, 8), peaked(2, 2, 4, 8))


def test_swapping_in(monkeypatch):
    module = torch.nn.MultiheadAttention(16, 2, batch_first=True)  # calls torch's function in its own module
    calls = []
    monkeypatch.setattr(sdpa, "attention", lambda *a, **o: calls.append(1) or attention(*a, **o))
    x = peaked(2, 5, 16)
    with torch.no_grad():
        want = module(x, x, x, need_weights=False)[0]
        exact = copy.deepcopy(module).double()(*[x.double()] * 3, need_weights=False)[0]
        assert not calls
        module.eval()  # where torch has a fast path of its own
        with sdpa.installed():
            got = module(x, x, x, need_weights=False)[0]
            assert F.scaled_dot_product_attention is ours
    assert len(calls) == 1
    judge("out", got, exact, 2 * largest_error(want, exact), torch.float32)
    assert F.scaled_dot_product_attention is torchs
    with pytest.raises(RuntimeError, match="inside"), sdpa.installed():
        raise RuntimeError("inside")
    assert F.scaled_dot_product_attention is torchs
    sdpa.install()
    try:
        with sdpa.installed():
            pass
        assert F.scaled_dot_product_attention is ours
    finally:
        sdpa.uninstall()
    assert F.scaled_dot_product_attention is torchs


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
@pytest.mark.parametrize(("rows", "keys"), [(7, 7), (3, 9), (9, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_causal_biases(rows, keys, dtype):
    """They are rules over memory that nobody has written: what lies there must not matter."""
    q, k, v = peaked(2, 3, rows, 16, dtype=dtype), peaked(2, 3, keys, 16, dtype=dtype), peaked(2, 3, keys, 8).to(dtype)
    for make, shift in ((causal_upper_left, 0), (causal_lower_right, keys - rows)):
        bias = make(rows, keys)
        bias.as_subclass(torch.Tensor).fill_(torch.nan)
        mask = torch.ones(rows, keys, dtype=torch.bool).tril(shift)
        want = torchs(q.double(), k.double(), v.double(), mask)
        allowed = 2 * largest_error(plain(q, k, v, mask), want) if dtype != torch.float64 else 1e-14
        judge("out", ours(q, k, v, bias), want, allowed, dtype)
        with sdpa.installed(fallback=True):
            judge("out", F.scaled_dot_product_attention(q, k, v, bias), want, allowed, dtype)
        with sdpa.installed(fallback=True):  # what tilewise refuses is as right by torch
            sdpa.fallbacks["told"] = 1
            got = F.scaled_dot_product_attention(q.clone().requires_grad_(), k, v, bias)
            judge("out", got.detach(), want, max(allowed, 2 * largest_error(plain(q, k, v, mask), want)), dtype)
    sdpa.fallbacks.clear()


def test_other_kinds_of_mask():
    class Rule(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return super().__torch_function__(func, types, args, kwargs or {})

    q = peaked(1, 2, 4, 8)
    mask = torch.rand(4, 4) > 0.3
    mask[:, 0] = True
    with pytest.raises(InvalidArgument, match="attn_mask: got a Rule"):
        ours(q, q, q, mask.as_subclass(Rule))
    with pytest.raises(InvalidArgument, match="attn_mask: got a CausalBias of 3 rows and 4 keys"):
        ours(q, q, q, causal_upper_left(3, 4))
    with pytest.raises(InvalidArgument, match="attn_mask: got a mask with is_causal"):
        ours(q, q, q, causal_upper_left(4, 4), is_causal=True)
    assert ours(q, q, q, torch.nn.Buffer(mask)).equal(ours(q, q, q, mask))
    with torch.no_grad():
        parameter = torch.nn.Parameter(torch.randn(4, 4))
        assert ours(q, q, q, parameter).equal(ours(q, q, q, parameter.detach()))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": "mask"}, {"scale": 0.2}], ids=str)
@pytest.mark.parametrize(
    ("width", "dtype"), [(16, torch.float64), (600, torch.float32), (577, torch.bfloat16)], ids=str
)
def test_what_torch_serves(width, dtype, options):
    """float64, and heads wider than any kernel: by torch itself, and it says so."""
    q, k, v = peaked(2, 4, 5, width, dtype=dtype), peaked(2, 2, 9, width, dtype=dtype), peaked(2, 2, 9, 8).to(dtype)
    if "attn_mask" in options:
        options = {"attn_mask": torch.ones(5, 9, dtype=torch.bool).tril(2)}
    got = ours(q, k, v, enable_gqa=True, **options)
    assert got.dtype == dtype
    assert got.equal(torchs(q, k, v, enable_gqa=True, **options))
    assert sdpa.why_torch(q, k, v, **options).startswith("float64" if dtype == torch.float64 else "head dims over 576")
    assert ours(q[0, :2], k[0], v[0]).shape == (2, 5, 8)
    assert sdpa.why_torch(*(x.float()[..., :8] for x in (q, k, v))) is None
    wide = peaked(1, 1, 3, 600)
    assert ours(q[:1, :1, :3].float()[..., :8], wide[..., :8], wide).shape == (1, 1, 3, 600)


def jagged(lengths, heads, width):
    rows = [peaked(n, heads, width) for n in lengths]
    return rows, torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)


@pytest.mark.filterwarnings("ignore:.*nested:UserWarning")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_jagged_tensors(is_causal, kv_heads):
    rows_q, q = jagged((3, 7, 1), 4, 16)
    rows_k, k = jagged((5, 2, 4), kv_heads, 16)
    values = torch.nested.nested_tensor_from_jagged(peaked(11, kv_heads, 8), k.offsets())
    rows_v, v = values.unbind(), values.transpose(1, 2)
    options = {"is_causal": is_causal, "enable_gqa": kv_heads != 4}
    out = ours(q, k, v, **options)
    assert out.is_nested
    assert out.shape[:3] == q.shape[:3]  # the same sequences: such tensors can be added
    for got, *rows in zip(out.unbind(), rows_q, rows_k, rows_v, strict=True):
        one = [x.transpose(0, 1) for x in rows]
        want = torchs(*(x.double() for x in one), **options)
        judge("out", got, want, 2 * largest_error(plain(*one, **options), want) + 1e-7, torch.float32)


@pytest.mark.filterwarnings("ignore:.*nested:UserWarning")
def test_other_nested_tensors():
    rows, q = jagged((3, 7), 2, 16)
    _, k = jagged((4, 6), 1, 16)
    holes = torch.nested.narrow(
        peaked(2, 8, 2, 16), 1, torch.tensor([0, 1]), torch.tensor([3, 7]), layout=torch.jagged
    ).transpose(1, 2)
    for arguments, words in [
        ((q, q, q, torch.ones(3, 3)), "attn_mask: got a mask with nested"),
        ((q, q, peaked(2, 2, 7, 16)), "value: got a plain tensor"),
        ((*[torch.nested.nested_tensor(rows)] * 3,), r"query: got a nested tensor of layout torch\.strided"),
        ((*[q.transpose(1, 2)] * 3,), r"query: got lengths .* transpose\(1, 2\)"),
        ((q, k, k), "key: got 1 heads"),
        ((q, q, jagged((7, 3), 2, 16)[1]), "value: got sequences of other lengths"),
        ((holes, holes, holes), r"query: got a nested tensor with holes.*contiguous\(\)"),
    ]:
        with pytest.raises(InvalidArgument, match=words):
            ours(*arguments)


@pytest.fixture
def _counted(monkeypatch):
    """A clean count of what torch has served."""
    sdpa.fallbacks.clear()
    yield
    sdpa.fallbacks.clear()


@pytest.mark.usefixtures("_counted")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_fallback():
    """torch serves what tilewise refuses, says so once, and counts."""
    q = peaked(1, 2, 4, 8)
    trained = q.clone().requires_grad_()
    with sdpa.installed(fallback=True):
        served = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        assert not sdpa.fallbacks
        nested = torch.nested.nested_tensor([q[0], q[0, :, :3]])  # strided
        with pytest.warns(UserWarning, match="falling back to torch .*query: got a nested tensor of layout"):
            F.scaled_dot_product_attention(nested, nested, nested)
        F.scaled_dot_product_attention(nested, nested, nested)  # a warning would be an error here
        out = F.scaled_dot_product_attention(trained, q, q, is_causal=True)
        out.sum().backward()
        assert sdpa.fallbacks == {"query": 2}
        with pytest.raises(RuntimeError):  # what torch refuses too
            F.scaled_dot_product_attention(q, q[..., :4], q)
    assert served.equal(ours(q, q, q, is_causal=True))
    assert largest_error(out.detach(), torchs(*[q.double()] * 3, is_causal=True)) < 1e-5
    assert trained.grad.abs().sum() > 0
    with sdpa.installed(), pytest.raises(InvalidArgument, match="query"):
        F.scaled_dot_product_attention(nested, nested, nested)


@pytest.mark.parametrize("fast", [True, False])
def test_the_fast_path_of_torchs_modules_is_off_while_it_is_installed(fast, monkeypatch):
    calls = []
    monkeypatch.setattr(sdpa, "attention", lambda *a, **o: calls.append(1) or attention(*a, **o))
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    enabled, x = torch.backends.mha.get_fastpath_enabled(), peaked(2, 5, 16)
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        with torch.inference_mode(), sdpa.installed():
            encoder(x)
        assert len(calls) == 2
        assert torch.backends.mha.get_fastpath_enabled() == fast
        sdpa.install()
        sdpa.install(fallback=True)
        assert not torch.backends.mha.get_fastpath_enabled()
        sdpa.uninstall()
        sdpa.uninstall()
        assert torch.backends.mha.get_fastpath_enabled() == fast
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def test_modules_that_took_torchs_function_before(monkeypatch):
    """`from torch.nn.functional import scaled_dot_product_attention`, under any name, in any module."""
    module = types.ModuleType("a_model")
    module.sdpa, module.other = torchs, torch.nn.functional.softmax
    monkeypatch.setitem(sys.modules, "a_model", module)
    with sdpa.installed():
        assert module.sdpa is ours
        assert module.other is torch.nn.functional.softmax
    assert module.sdpa is torchs
    sdpa.install()
    sdpa.install(fallback=True)
    assert module.sdpa is F.scaled_dot_product_attention
    assert module.sdpa is not ours
    sdpa.uninstall()
    assert module.sdpa is F.scaled_dot_product_attention is torchs


def test_modules_are_searched_once(monkeypatch):
    """Entering again searches what is new: a module, or a module with new names. All are restored, in any order."""
    searched = []
    search = sdpa._replaced.search
    monkeypatch.setattr(sdpa._replaced, "search", lambda key, names: searched.append(key) or search(key, names))
    module = types.ModuleType("a_second_model")
    monkeypatch.setitem(sys.modules, "a_second_model", module)
    with sdpa.installed():
        assert "a_second_model" in searched
    module.sdpa = torchs
    searched.clear()
    with sdpa.installed():
        assert searched == ["a_second_model"]
        assert module.sdpa is ours
        module.late = 1
        with sdpa.installed(fallback=True):
            assert searched == ["a_second_model"] * 2
            assert module.sdpa is sdpa._or_torch
        assert module.sdpa is ours
    assert module.sdpa is torchs
    searched.clear()
    for _ in range(2):
        with sdpa.installed():
            assert module.sdpa is ours
            module.sdpa = None  # its own business
        assert module.sdpa is None
        module.sdpa = torchs
    assert not searched


@pytest.mark.skipif(not sdpa_kernel.registers(), reason="this torch has no registry of flash kernels")
def test_torchs_own_function_runs_on_tilewise(monkeypatch):
    """Code that holds torch's function in ways that no module shows, and torch's C++ modules."""
    calls = []
    monkeypatch.setattr(sdpa_kernel, "attention", lambda *a, **o: calls.append(1) or attention(*a, **o))
    held = [torchs]  # this module's own name of it is taken over too
    q, k = peaked(2, 4, 5, 16), peaked(2, 4, 9, 16)
    mask = torch.rand(2, 1, 5, 9) > 0.3
    mask[..., 0] = True
    assert "tilewise" in torch.nn.attention.list_flash_attention_impls()
    held[0](q, k, k)
    assert not calls
    with sdpa.installed():
        for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"scale": 0.3}):
            calls.clear()
            got = held[0](q, k, k, **options)
            assert len(calls) == 1
            given = {"mask" if name == "attn_mask" else name: x for name, x in options.items()}
            want = torchs(q.double(), k.double(), k.double(), **options)
            judge("out", got, want, 2 * largest_error(plain(q, k, k, **given), want), torch.float32)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
        calls.clear()
        with torch.no_grad():
            layer(peaked(2, 5, 16))
        trained = q.clone().requires_grad_()
        held[0](trained, k, k).sum().backward()  # torch's kernel, whose backward belongs to it
        assert trained.grad.isfinite().all()
        held[0](*(x.double() for x in (q, k, k)))
        held[0](q, k, k, dropout_p=0.3)
    calls.clear()
    held[0](q, k, k)
    assert not calls
    assert torch.nn.attention.current_flash_attention_impl() is None


@pytest.mark.skipif(not sdpa_kernel.registers(), reason="this torch has no registry of flash kernels")
def test_another_implementation_is_left_alone():
    class Handle:
        def remove(self):
            pass

    torch.nn.attention.register_flash_attention_impl("another", register_fn=Handle)
    torch.nn.attention.activate_flash_attention_impl("another")
    try:
        with sdpa.installed():
            assert torch.nn.attention.current_flash_attention_impl() == "another"
        assert torch.nn.attention.current_flash_attention_impl() == "another"
    finally:
        torch.nn.attention.restore_flash_attention_impl()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_mask": torch.ones(3, 3)}, r"^attn_mask: got shape \(3, 3\)"),
        ({"key": torch.zeros(1, 2, 4, 7)}, "^key: got a last dim of 7, expected 8, as query$"),
        ({"value": torch.zeros(1, 2, 5, 8)}, "^value: got .* as key$"),
        ({"is_causal": 3}, "^is_causal: got 3"),
    ],
)
def test_errors_name_torchs_arguments(changes, message):
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(InvalidArgument, match=message) as caught:
        ours(**({"query": q, "key": q, "value": q} | changes))
    assert caught.value.argument == next(iter(changes))
