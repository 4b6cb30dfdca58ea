"""torch's scaled_dot_product_attention by tilewise, against torch's own in float64."""

import copy
import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import tilewise.compat.sdpa as sdpa
from tilewise import InvalidArgument, attention
from tilewise.conformance.check import judge, largest_error

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
    judge("out", got, want, 2 * largest_error(plain(q, k, v, mask, **options), want), q.dtype)
    assert want.abs().max() > 0.1


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
    for kv in [(4, 4), (2, 3)]:
        with pytest.raises(InvalidArgument, match="divisor"):
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
        ({"dropout_p": 0.1}, "dropout_p: got 0.1"),
        ({"is_causal": True, "attn_mask": torch.ones(4, 4, dtype=torch.bool)}, "attn_mask: got a mask with is_causal"),
        ({"attn_mask": torch.ones(4, 5, dtype=torch.bool)}, "mask: got shape"),
    ]:
        with pytest.raises(InvalidArgument, match=words):
            ours(q, q, q, **options)
    with pytest.raises(InvalidArgument, match=r"query's torch\.float32"):
        ours(q, q.half(), q)
    with pytest.raises(InvalidArgument, match="float32, float16 or bfloat16"):
        ours(*itertools.repeat(q.double(), 3))
    with pytest.raises(InvalidArgument, match="broadcast"):
        ours(q, peaked(3, 2, 4, 8), peaked(2, 2, 4, 8))
    with pytest.raises(InvalidArgument, match="forward only"):
        ours(q.requires_grad_(), q, q)


def test_swapping_in(monkeypatch):
    module = torch.nn.MultiheadAttention(16, 2, batch_first=True)  # calls torch's function in its own module
    calls = []
    monkeypatch.setattr(sdpa, "attention", lambda *a, **o: calls.append(1) or attention(*a, **o))
    x = peaked(2, 5, 16)
    with torch.no_grad():
        want = module(x, x, x, need_weights=False)[0]
        exact = copy.deepcopy(module).double()(*[x.double()] * 3, need_weights=False)[0]
        assert not calls
        module.training = True  # no C++ shortcut
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
