"""Gradients of functions of the user on the CPU, against the oracle: random expressions, forms and options, bits."""

import math

import pytest
import torch

from drawn_mods import TENSORS, captured, drawn
from mod_gradient_calls import (
    AXES,
    OPTIONS,
    PER_DTYPE,
    TABLE,
    D,
    H,
    agree,
    check,
    draw,
    gradients,
    random,
)
from tilewise import attention, attention_backward, plan, varlen_attention
from tilewise.backends.cpu import mod_gradients
from tilewise.core.expression import derivative, sums
from tilewise.core.expression.mods import Bound, Mods
from tilewise.core.expression.trace import trace


@pytest.mark.parametrize("seeds", [range(n, n + 8) for n in (0, 8, 16)], ids=str)
def test_drawn_expressions(seeds):
    """Any expression, with the options in turn, GQA and the dtypes."""
    for seed in seeds:
        dtype = (*PER_DTYPE, torch.float32)[seed % 4]
        q, k, v = (draw(2, n, length, D, dtype=dtype) for n, length in ((H, 45), (2, 70), (2, 70)))
        bound = Bound(drawn(seed, mask=seed % 3 > 0), captured())
        check(q, k, v, OPTIONS[seed % len(OPTIONS)] | {"score_mod": bound}, PER_DTYPE[dtype], beside_torch=True)


@pytest.mark.parametrize("name", AXES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_captured_tensors_by_what_indexes_them(name, dtype, monkeypatch):
    monkeypatch.setattr(mod_gradients, "LISTED", 1 << 12)  # lists that fill
    for heads, q_len, k_len in ((2, 300, 401), (1, 130, 200)):
        q, k, v = (draw(2, n, m, D, dtype=dtype) for n, m in ((H, q_len), (heads, k_len), (heads, k_len)))
        check(q, k, v, {"score_mod": AXES[name](TABLE), "causal": True}, PER_DTYPE[dtype])


def test_packed_sequences():
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 40, 41, 120], [0, 55, 97, 180]))
    q, k, v = draw(125, H, D), draw(185, 2, D), draw(185, 2, D)
    scale = torch.tensor([1.0, 0.5, 0.25])
    tables = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    for name, function in AXES.items():
        mod = function(TABLE)
        options = {"score_mod": lambda s, b, h, q, k, mod=mod: mod(s * scale[b], b, h, q, k)}
        options["mask_mod"] = lambda b, h, q, k: (k + b) % 5 != 0
        got = check(q, k, v, options | tables, 1e-5)
        assert (got["q"][120:] == 0).all(), name


@pytest.mark.parametrize("indices", [{"key_indices": 33}, {"block_indices": 5, "block_size": 32}], ids=str)
def test_selected_keys(indices):
    name, count = next(iter(indices.items()))
    size = indices.get("block_size", 1)
    rows = -(-90 // size)
    q, k, v = draw(1, H, 90, D), draw(1, 2, 800, D), draw(1, 2, 800, D)
    order = torch.rand(1, 2, rows, 800 // size, generator=random).argsort(-1)[..., :count].int()
    for function in AXES.values():
        check(q, k, v, indices | {name: order, "score_mod": function(TABLE), "causal": True}, 1e-5)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", AXES)
def test_bits_do_not_depend_on_threads(name, threads, monkeypatch):
    monkeypatch.setattr(mod_gradients, "LISTED", 1 << 14)  # lists that fill
    q, k, v, dout = (draw(2, n, 400, D) for n in (H, 2, 2, H))
    options = {"score_mod": AXES[name](TABLE), "causal": True}
    threads(1)
    alone, out_lse = gradients(q, k, v, dout, None, options, "cpu")
    assert "captured 0" in alone
    for count in (2, 3, 5):
        threads(count)
        for _ in range(3):
            for which, x in gradients(q, k, v, dout, None, options, "cpu", out_lse)[0].items():
                assert torch.equal(x, alone[which]), (which, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_hidden_gets_and_gives_nothing(dtype):
    """NaN in hidden keys, in elements and derivatives that only hidden cells have, and rows that see nothing."""
    table = TABLE.clone()
    table[:, 395:] = torch.nan
    options = {
        "mask_mod": lambda b, h, q, k: (k % 7 != 3) & (q > 11) & (q < 290),
        "score_mod": lambda s, b, h, q, k: torch.where(k % 5 == 1, -math.inf, s * TABLE[h, k]) + table[
            h, torch.where(k % 7 == 3, 399, k)
        ] / torch.where(k % 7 == 3, 0.0, 1.0),
    }  # fmt: skip
    q, k, v, dout = (draw(1, n, 300, D, dtype=dtype) for n in (H, 2, 2, H))
    clean, out_lse = gradients(q, k, v, dout, None, options, "cpu")
    for name, x in clean.items():
        assert x.isfinite().all(), name
    for name in "kv":
        assert (clean[name][:, :, 3::7] == 0).all()
        assert (clean[name][:, :, 1::5] == 0).all()
    assert (clean["q"][:, :, :12] == 0).all()
    assert (clean["q"][:, :, 290:] == 0).all()
    k[:, :, 3::7], v[:, :, 3::7] = torch.nan, torch.inf
    dirty, _ = gradients(q, k, v, dout, None, options, "cpu", out_lse)
    agree(dirty, clean, 1e-6)
    want, _ = gradients(q, k, v, dout, None, options, "reference", out_lse)
    agree(dirty, want, PER_DTYPE[dtype])


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_rows_with_a_large_lse(backend):
    """Every score is -1e9 in float32, so all weights are equal, whatever the derivative of the score is."""
    cu = torch.tensor([0, 20, 43, 61], dtype=torch.int32)
    own = [slice(0, 20), slice(20, 43), slice(43, 61)]
    for factor in (1.0, 3.0):
        options = {"score_mod": lambda s, b, h, q, k, factor=factor: s * factor - 1e9, "backend": backend}
        q, k, v, dout = (draw(2, H, 60, D, size=1.0) for _ in range(4))
        out, lse = attention(q, k, v, return_lse=True, q_offset=7, **options)
        dv = attention_backward(q, k, v, out, lse, dout, q_offset=7, grads=("v",), **options).dv
        torch.testing.assert_close(dv, dout.mean(2, keepdim=True).expand_as(dv), atol=1e-5, rtol=1e-4)
        q, k, v, dout = (draw(61, H, D, size=1.0) for _ in range(4))
        out, lse = varlen_attention(q, k, v, cu, cu, return_lse=True, **options)
        packed = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
        dv = attention_backward(q, k, v, out, lse, dout, grads=("v",), **packed, **options).dv
        for rows in own:
            want = dout[rows].mean(0, keepdim=True).expand_as(dv[rows])
            torch.testing.assert_close(dv[rows], want, atol=1e-5, rtol=1e-4)


def test_the_planner_chooses_the_cpu():
    q, k, v = (draw(1, H, 20, D).requires_grad_() for _ in range(3))
    table = TABLE.clone().requires_grad_()
    bound = plan(q, k, v, score_mod=AXES["distances"](table))
    assert bound.backend == "cpu"
    out = attention(q, k, v, score_mod=AXES["distances"](table))
    for x in torch.autograd.grad(out.sum(), (q, k, v, table)):
        assert x.isfinite().all()


# What indices are made of


@pytest.mark.parametrize(
    ("function", "axis"),
    [
        (lambda t: lambda s, b, h, q, k: t[h, 3 * q + b], "rows"),
        (lambda t: lambda s, b, h, q, k: t[b, h], "rows"),
        (lambda t: lambda s, b, h, q, k: t[h, (k - 5) // 2], "keys"),
        (lambda t: lambda s, b, h, q, k: t[h, (q + 7) - (k - 2)], "distances"),
        (lambda t: lambda s, b, h, q, k: t[0, torch.where(q > k, 2 * q - 2 * k, -(k - q))], "cells"),
        (lambda t: lambda s, b, h, q, k: t[0, torch.where(q - k > 0, 2 * q - 2 * k, -(k - q))], "distances"),
        (lambda t: lambda s, b, h, q, k: t[h, (q - k).abs().float().log2().int()], "distances"),
        (lambda t: lambda s, b, h, q, k: t[h, q // 2 - k // 2], "cells"),
        (lambda t: lambda s, b, h, q, k: t[q - k, q], "cells"),
        (lambda t: lambda s, b, h, q, k: t[h, s.int()], "cells"),
    ],
)
def test_axes(function, axis):
    bound = trace(function(TABLE), "score_mod")
    (load,) = (x for x in derivative.derivatives(bound.root) if x.op == "load")
    assert sums.axis_of(list(load.children)) == axis
    assert sums.axis_of(list(load.children), equal_strides=False) == ("cells" if axis == "distances" else axis)


# Mutants


def half_product(give, d, y, a, b):
    give(a, derivative.make("mul", d, b))
    give(b, d)


def square_plus(give, d, y, a):
    give(a, derivative.make("mul", d, derivative.make("add", 1.0, derivative.make("mul", y, y))))


def half_quotient(give, d, y, a, b):
    give(a, derivative.make("div", d, b))
    give(b, derivative.make("mul", derivative.make("div", d, b), y))


def both_branches(give, d, y, c, a, b):
    give(a, d)
    give(b, d)


RULE_MUTANTS = {
    "tanh": square_plus,
    "mul": half_product,
    "where": both_branches,
    "sub": derivative._add,
    "div": half_quotient,
    "sigmoid": lambda give, d, y, a: give(a, derivative.make("mul", d, y)),
    "exp2": lambda give, d, y, a: give(a, derivative.make("mul", d, y)),
}  # fmt: skip
HAS = {  # an expression with the operation: score by s and by an element
    "tanh": "float32:1|load0 k;mul s %0;tanh %1|%2 -",
    "mul": "float32:1|load0 k;mul s %0|%1 -",
    "where": "float32:1|load0 k;lt q k;where %1 s %0|%2 -",
    "sub": "float32:1|load0 k;sub s %0|%1 -",
    "div": "float32:1|load0 k;abs %0;add %1 1.0;div s %2|%3 -",
    "sigmoid": "float32:1|load0 k;mul s %0;sigmoid %1|%2 -",
    "exp2": "float32:1|load0 k;min %0 1.0;exp2 %1;add s %2|%3 -",
}


def drawn_check(text):
    q, k, v = draw(1, H, 40, D), draw(1, 2, 60, D), draw(1, 2, 60, D)
    check(q, k, v, {"score_mod": Bound(Mods(text), (TABLE[0, :60],))}, 1e-5)


@pytest.mark.parametrize("op", RULE_MUTANTS)
def test_mutants_of_the_derivative_are_found(op, monkeypatch):
    drawn_check(HAS[op])
    monkeypatch.setitem(derivative.RULES, op, RULE_MUTANTS[op])
    with pytest.raises(AssertionError):
        drawn_check(HAS[op])


AXIS_MUTANTS = {
    "distances of other strides": ("are_of_distances", lambda roots: True, "q // 2 - k // 2"),
    "any index is of distances": ("axis_of", lambda indices, equal_strides=True: "distances", "q"),
    "any index is of keys": ("axis_of", lambda indices, equal_strides=True: "keys", "distance"),
    "any index is of rows": ("axis_of", lambda indices, equal_strides=True: "rows", "distance"),
}
TEXTS = {
    "q // 2 - k // 2": "float32:1|floordiv q 2;floordiv k 2;sub %0 %1;add %2 30;load0 %3;add s %4|%5 -",
    "q": "float32:1|load0 q;add s %0|%1 -",
    "distance": "float32:1|sub q k;add %0 20;load0 %1;add s %2|%3 -",
}


@pytest.mark.parametrize("name", AXIS_MUTANTS)
def test_mutants_of_sums_are_found(name, monkeypatch):
    function, mutant, text = AXIS_MUTANTS[name]
    drawn_check(TEXTS[text])
    monkeypatch.setattr(sums, function, mutant)
    mod_gradients._derivatives.cache_clear()
    with pytest.raises(AssertionError):
        drawn_check(TEXTS[text])
    mod_gradients._derivatives.cache_clear()


def test_tensors_are_those_that_are_drawn():
    assert len(TENSORS) == len(captured())
