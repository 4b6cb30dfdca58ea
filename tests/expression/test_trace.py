"""Functions of the user become expressions that compute what torch does, or are refused in words."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from tilewise import InvalidArgument, Quantised
from tilewise.core.expression.evaluate import evaluate
from tilewise.core.expression.mods import NAMES, Mods, mods_of
from tilewise.core.expression.text import from_text, to_text
from tilewise.core.expression.trace import SIGNATURES, trace

H, L = 3, 12
random = torch.Generator().manual_seed(0)
table, gate = torch.randn(H, 2 * L, generator=random), torch.randn(H, generator=random)
half = torch.randn(H, generator=random, dtype=torch.float16)
double, rank3 = torch.randn(L, generator=random, dtype=torch.float64), torch.randn(2, H, L, generator=random)
doc = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3])
grid = torch.randn(4, 3, 6, generator=random)[:, :, ::2]  # strides
allowed = torch.rand(L, L, generator=random) > 0.4
learned = torch.nn.Parameter(torch.randn(H, generator=random))
embedding = torch.nn.Embedding(8, H)
number = torch.tensor(2.0)
big = torch.randn(300, generator=random)


def t5_bucket(distance):
    exact = distance.abs()
    far = 4 + (torch.log(exact.float().clamp(min=1) / 4) / math.log(4) * 4).to(torch.long)
    return torch.where(exact < 4, exact, torch.min(far, torch.full_like(far, 7)))


def assigned(s, b, h, q, k):
    distance = q - k
    distance *= 2
    s += distance * 0.1
    s /= 3
    return s.clamp_(-2, 2).sub_(1)


def summed_in_place(s, b, h, q, k):
    total, scale = torch.zeros(()), gate[0] * 2
    scale += 1
    for i in range(3):
        total += table[h, i] * (q - i)
    return s + total * scale


def masked_in_place(b, h, q, k):
    seen = q >= k
    seen &= q - k < 6
    seen |= k == 0
    return seen


def both(*masks):
    return lambda b, h, q, k: functools.reduce(torch.logical_and, (mask(b, h, q, k) for mask in masks))


def causal(b, h, q, k):
    return q >= k


SCORES = {
    "softcap": lambda s, b, h, q, k: 30 * torch.tanh(s / 30),
    "alibi": lambda s, b, h, q, k: s - torch.exp2(-(h + 1) * 8.0 / H) * (q - k).abs(),
    "powers": lambda s, b, h, q, k: s**2 - s**3 + 2.0**s - s**-1 + abs(s) ** 0.5 + 1 / (1 + s.square()) ** 0.5,
    "a table by distance": lambda s, b, h, q, k: s + table[h, q - k + L],
    "in two steps": lambda s, b, h, q, k: s + table[h][q - k + L] * gate.sigmoid()[h],
    "views": lambda s, b, h, q, k: s + table.T[q, h] + rank3[b, :, 3][h] + grid.transpose(0, 2)[q % 3, 1, k % 4],
    "T5": lambda s, b, h, q, k: s + embedding(t5_bucket(q - k))[h],
    "hides": lambda s, b, h, q, k: torch.where(q >= k, s * double[q], -float("inf")),
    "numbers": lambda s, b, h, q, k: s * torch.tensor([1.0, 0.5, 2.0])[h] + torch.tensor(3.0) + torch.zeros_like(s),
    "ints": lambda s, b, h, q, k: s + (q // 3 * 5 - k % 4 + (q ^ k) + (~q & 3)).float() + q / 2 + -7 // (k + 1),
    "division": lambda s, b, h, q, k: torch.div(q - k, 3, rounding_mode="trunc") + s.div(0.7, rounding_mode="floor"),
    "remainder": lambda s, b, h, q, k: s % 0.75 + (q - k) % 5 + torch.remainder(q - k, -3),
    "functions": lambda s, b, h, q, k: torch.sin(s) + torch.cos(q) + torch.rsqrt(1 + s.abs()) + torch.log2(2 + s * s),
    "logs": lambda s, b, h, q, k: F.softplus(s) + F.relu(s) + F.silu(s) - torch.log(s.abs() + 1),
    "clamped": lambda s, b, h, q, k: s.clamp(-0.5, 0.5) + torch.clip(q - k, min=-2) + torch.clamp_max(k, 4) + s.sign(),
    "rounded": lambda s, b, h, q, k: torch.floor(s) + torch.ceil(s * 2) + s.int() + s.long() + (s > 0).float(),
    "chosen": lambda s, b, h, q, k: torch.where(allowed[q, k] & (k != 3) | (h == 1), s, -s).masked_fill(q == 2, 1.0),
    "made": lambda s, b, h, q, k: s + b.new_ones((), dtype=torch.bool) * q.new_full(size=(), fill_value=2, dtype=float)
    + s.new_zeros(3)[k % 3] + b.new_ones(size=(2, L))[1, k],
    "Python's types": lambda s, b, h, q, k: s + (s > 0).to(float) + s.to(int) * (q % 3).to(bool) + q.to(float) / 2,
    "in place": assigned,
    "summed in place": summed_in_place,
    "decays": lambda s, b, h, q, k: s * 0.9 ** (q - k).abs() + 2 ** (-s.abs()) + 3.0**s,
    "shifts": lambda s, b, h, q, k: s + (q >> 2) * 0.5 + (k << 1) + ((k - q) >> 1) + torch.bitwise_right_shift(h, 1),
    "other shapes": lambda s, b, h, q, k: s + table.view(-1)[h * 24 + q] + grid.reshape(6, -1)[q % 6, k % 6]
    + rank3.flatten(1)[b, h * L + k] + rank3.flatten(0, 1)[h, -1] + table.reshape(3, 2, 12)[h, 1, k]
    + gate.view(3, 1)[-1, 0],
    "more functions": lambda s, b, h, q, k: torch.log1p(s.abs()) + torch.hypot(s, (q - k).float()) + torch.trunc(s)
    + torch.fmod(q - k, 3) + torch.fmod(s, 0.7) + table.index_select(1, k[None])[h, 0],
    "on its device": lambda s, b, h, q, k: s + torch.arange(L, device=s.device)[k] + s.new_tensor([1.0, 2.0, 4.0])[h]
    + torch.tensor([3, 5, 7], dtype=s.dtype, device=q.device)[h],
    "rows": lambda s, b, h, q, k: s + torch.dot(table[h, :5], rank3[b, h, :5]) + (table[h, :9] * s).sum(-1)
    + gate @ gate + grid[q % 4].sum() + grid.mean((0, 2))[h] + rank3.sum(1, keepdim=True)[b, 0, k]
    + (doc == doc[q]).sum(),
    "parameter": lambda s, b, h, q, k: s + learned[h] * 2 + half[h],
    "negative index": lambda s, b, h, q, k: s + double[-1] + double[k - L] + table[h, -2],
    "constant": lambda s, b, h, q, k: 1.5,
    "alpha": lambda s, b, h, q, k: torch.add(s, h, alpha=2) - torch.sub(q, k, alpha=3) + torch.rsub(s, 1),
    "isnan": lambda s, b, h, q, k: torch.where(torch.isnan(s / 0 * 0) | torch.isinf(s), 2.0, s),
}  # fmt: skip
MASKS = {
    "causal": causal,
    "window": lambda b, h, q, k: (q >= k) & (q - k < 4),
    "prefix": lambda b, h, q, k: (q >= k) | (k < 5),
    "documents": lambda b, h, q, k: doc[q] == doc[k],
    "by head": lambda b, h, q, k: torch.where(h < 2, q >= k, q - k < 3),
    "in place": masked_in_place,
    "any": lambda b, h, q, k: (doc[:9] == doc[q]).any() & torch.all(grid[:, 0] > -9, dim=0)[k % 3] | (k < 2),
    "joined": both(causal, lambda b, h, q, k: doc[q] == doc[k], lambda b, h, q, k: ~(k == 2)),
    "dense": lambda b, h, q, k: allowed[q][k],
    "ints": lambda b, h, q, k: (q - k) % 3,
    "always": lambda b, h, q, k: True,
    "xor": lambda b, h, q, k: torch.logical_xor(q > 3, k < 4) ^ (b == 1) | torch.logical_not(h),
}
FUNCTIONS = [("score_mod", name, f) for name, f in SCORES.items()] + [
    ("mask_mod", name, f) for name, f in MASKS.items()
]
IDS = [f"{kind} {name}" for kind, name, _ in FUNCTIONS]


def cells():
    s = torch.randn(2, H, L, L, generator=torch.Generator().manual_seed(1))
    b, h = torch.arange(2, dtype=torch.int32).view(-1, 1, 1, 1), torch.arange(H, dtype=torch.int32).view(-1, 1, 1)
    q, k = torch.arange(L, dtype=torch.int32).view(-1, 1), torch.arange(L, dtype=torch.int32)
    return {"s": s, "b": b, "h": h, "q": q, "k": k}


@pytest.mark.parametrize(("kind", "name", "function"), FUNCTIONS, ids=IDS)
def test_a_trace_computes_what_the_function_does(kind, name, function):
    names, inputs = SIGNATURES[kind], cells()
    traced = trace(function, kind)
    got = evaluate([traced.root], inputs, traced.tensors, torch.float32)[0].expand(2, H, L, L)
    flat = [inputs[x].expand(2, H, L, L).flatten() for x in names]
    picked = range(0, len(flat[0]), 7)  # the function itself, cell by cell
    want = torch.stack([torch.as_tensor(function(*(x[i] for x in flat))).detach() for i in picked])
    got = got.flatten()[::7].detach()
    if kind == "mask_mod":
        assert got.dtype == torch.bool
        assert torch.equal(got, want.bool())
    else:
        torch.testing.assert_close(got, want.float(), equal_nan=True, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(("kind", "name", "function"), FUNCTIONS, ids=IDS)
def test_text_parses_back(kind, name, function):
    traced = trace(function, kind)
    declared = [(NAMES[x.dtype], x.ndim) for x in traced.tensors]
    text = to_text((traced.root, None), declared)
    assert "\n" not in text
    roots, tensors = from_text(text)
    assert roots == [traced.root, None]
    assert tensors == declared
    assert mods_of(text) is Mods.__reduce__(mods_of(text))[0](text)


def decides(s, b, h, q, k):
    if q > k:
        return s
    return -s


def without_gradients(s, b, h, q, k):
    with torch.no_grad():
        return s + learned[h]


REFUSED = {
    "if": (decides, r"read by Python \(bool\) at .*test_trace.py:\d+.*torch.where"),
    "max": (lambda s, b, h, q, k: max(s, 0), "torch.maximum of max"),
    "math": (lambda s, b, h, q, k: math.exp(s), r"read by Python \(float\)"),
    "item": (lambda s, b, h, q, k: s * learned[0].item(), r"read by Python \(item\)"),
    "erfinv": (lambda s, b, h, q, k: torch.erfinv(s), r"torch.erfinv at .*test_trace.py"),
    "a large sum": (lambda s, b, h, q, k: s + big.sum(), "a sum over 300 elements at .*compute it before"),
    "a large row": (lambda s, b, h, q, k: s + (big * q).sum(), "a sum over 300 elements at .*at most 256"),
    "a matrix product": (lambda s, b, h, q, k: s + (table @ table.T)[h, 0], "a matrix product at .*compute it before"),
    "random": (lambda s, b, h, q, k: s + torch.rand(()), "torch.rand at"),
    "in place": (lambda s, b, h, q, k: s + table.mul_(2)[h, q], "in place, in a captured tensor or a view"),
    "a captured number in place": (lambda s, b, h, q, k: s + number.add_(1), "captured tensor or a view"),
    "a view in place": (lambda s, b, h, q, k: s.float().mul_(2), "in place, in a captured tensor or a view"),
    "what has a view in place": (lambda s, b, h, q, k: (s.float(), s.mul_(2))[0], "captured tensor or a view"),
    "floats in an int": (lambda s, b, h, q, k: s + q.mul_(s), "torch.float32 in place of torch.int32"),
    "detached": (lambda s, b, h, q, k: s.detach() + 1, "of a result at .*detach the captured tensor itself"),
    "without gradients": (without_gradients, "torch.no_grad at .*detach"),
    "an element": (lambda s, b, h, q, k: s.__setitem__((), 1.0), "setitem in place"),
    "a view of another size": (lambda s, b, h, q, k: s + table.view(5)[q], r"a view of \(3, 24\) as \(5,\)"),
    "shifts by cells": (lambda s, b, h, q, k: s + (q >> h), "a shift by"),
    "outside": (lambda s, b, h, q, k: s + table.cumsum(1)[h, q], "cumsum .*compute it before, and capture the result"),
    "outside, by Python": (lambda s, b, h, q, k: s * float(gate[0]), "compute it before, and capture the result"),
    "a row": (lambda s, b, h, q, k: s + table[h], r"shape \(24,\) where one number"),
    "a float index": (lambda s, b, h, q, k: table[h, q / 2], "an index of torch.float32"),
    "two arguments": (lambda s, b: s, r"positional argument.*score_mod\(score, b, h, q_idx, kv_idx\)"),
    "complex": (lambda s, b, h, q, k: s * torch.ones(H, dtype=torch.complex64)[h], "complex64"),
    "no function": (3, "a int.*a function score_mod"),
    "a string": (lambda s, b, h, q, k: "s", "a str as the result"),
    "too many indices": (lambda s, b, h, q, k: table[h, q, k], "3 indices of a tensor of rank 2"),
    "powers": (lambda s, b, h, q, k: s**2.5, "a power"),
}


@pytest.mark.parametrize(("function", "words"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_expression_is_refused(function, words):
    from tilewise.core.expression.mods import bind

    with pytest.raises(InvalidArgument, match=f"score_mod: got .*{words}"):
        bind(function, None, torch.device("cpu"))


def test_a_mask_that_returns_floats_is_refused():
    with pytest.raises(InvalidArgument, match="mask_mod: got a function that returns floats"):
        trace(lambda b, h, q, k: (q - k).float(), "mask_mod")


def test_errors_of_the_function_itself_are_its_own():
    with pytest.raises(ZeroDivisionError):
        trace(lambda s, b, h, q, k: s * (1 // 0), "score_mod")


def test_tensors_that_are_not_read_are_not_captured():
    def score_mod(s, b, h, q, k):
        unused = table[h, q]  # noqa: F841
        return s + double[k]

    assert trace(score_mod, "score_mod").tensors == (double,)


def test_quantised_tensors_are_no_tensors():
    stored = Quantised.from_float(torch.randn(1, 1, 4, 32), "int8", 32)
    with pytest.raises(Exception, match="Quantised"):
        trace(lambda s, b, h, q, k: s * stored, "score_mod")
