"""Folding, derivatives and the meaning of operations at the ends of their ranges."""

import copy
import pickle

import pytest
import torch

from test_trace import SCORES, cells
from tilewise.core.expression.build import const, make
from tilewise.core.expression.derivative import derivatives
from tilewise.core.expression.evaluate import FUNCTIONS, clamped, evaluate
from tilewise.core.expression.mods import bind, mods_of
from tilewise.core.expression.node import OPERATIONS, in_order, load, source
from tilewise.core.expression.trace import trace

s, q, k = source("s"), source("q"), source("k")


def value(node, **inputs):
    given = {name: torch.tensor(x) for name, x in inputs.items()} or {"q": torch.tensor(0)}
    return evaluate([node], given, (), torch.float32)[0].item()


def test_equal_nodes_are_one_object():
    assert make("add", q, k) is make("add", q, k)
    assert make("add", q, 1) is not make("add", q, 1.0)
    assert const(0.0) is not const(-0.0)
    assert const(True) is not const(1)
    assert const(float("nan")) is const(float("nan"))


@pytest.mark.parametrize(
    ("node", "folded"),
    [
        (make("add", q, 0), q),
        (make("mul", s, 1.0), s),
        (make("sub", make("add", q, 3), 3), q),
        (make("sub", q, q), const(0)),
        (make("not", make("lt", q, k)), make("le", k, q)),
        (make("and", make("lt", q, k), True), make("lt", q, k)),
        (make("where", const(False), s, 1.0), const(1.0)),
        (make("mul", make("add", 2, 3), q), make("mul", q, 5)),
        (make("add", const(2**31 - 1), 1), const(-(2**31))),
        (make("floordiv", const(-7), 2), const(-4)),
        (make("mod", const(-7), 0), const(0)),
    ],
)
def test_folding(node, folded):
    assert node is folded


def test_what_may_be_nan_is_not_folded():
    assert make("mul", s, 0.0).op == "mul"
    assert make("sub", s, s).op == "sub"
    assert make("eq", s, s).op == "eq"
    assert make("not", make("lt", s, 0.0)).op == "not"


@pytest.mark.parametrize(
    ("op", "args", "want"),
    [
        ("floordiv", (7, 0), 0),
        ("mod", (7, 0), 0),
        ("floordiv", (-(2**31), -1), -(2**31)),
        ("mod", (-(2**31), -1), 0),
        ("add", (2**31 - 1, 1), -(2**31)),
        ("int", (3e10,), 2**31 - 1),
        ("int", (-3e10,), -(2**31)),
        ("int", (float("nan"),), 0),
        ("int", (-2.7,), -2),
    ],
)
def test_ends_of_ranges(op, args, want):
    names = ("q", "k") if isinstance(args[0], int) else ("s",)
    assert value(make(op, *map(source, names[: len(args)])), **dict(zip(names, args, strict=True))) == want
    assert make(op, *args) is const(want)  # folded alike


def test_every_operation_is_defined():
    assert set(FUNCTIONS) | {"float"} == set(OPERATIONS)


def test_indices_outside_are_clamped():
    assert clamped(torch.tensor([-7, -4, -1, 0, 3, 4, 99]), 4).tolist() == [0, 0, 3, 0, 3, 3, 3]
    node = load(0, (q,), "int")
    huge = torch.tensor([2**40, -(2**40)])
    assert evaluate([node], {"q": torch.arange(3)}, (huge,), torch.float32)[0].tolist() == [
        2**31 - 1,
        -(2**31),
        -(2**31),
    ]


@pytest.mark.parametrize("name", SCORES)
def test_derivatives_are_those_of_autograd(name):
    traced = trace(SCORES[name], "score_mod")
    captured = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in traced.tensors]
    inputs = cells()
    inputs["s"] = inputs["s"].double().requires_grad_()
    out = evaluate([traced.root], inputs, captured, torch.float64)[0].expand(2, 3, 12, 12)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weights = torch.where(out.isfinite(), weights, 0.0)
    found = derivatives(traced.root)
    if not out.requires_grad:
        assert not found
        return
    wanted = {0: inputs["s"]} | {n + 1: x for n, x in enumerate(captured) if x.requires_grad}
    grads = torch.autograd.grad(out, list(wanted.values()), weights, materialize_grads=True)
    total = {n: torch.zeros_like(x) for n, x in wanted.items()}
    for node, derivative in found.items():
        slope, *places = evaluate([derivative, *node.children], inputs, captured, torch.float64)
        terms = torch.where(weights != 0, weights * slope, 0.0).detach()
        if node.op == "in":
            total[0] += terms
        else:
            x = total[node.args[0] + 1]
            at = [clamped(i, n).long().expand_as(terms) for i, n in zip(places, x.shape, strict=True)]
            x.index_put_(tuple(at), terms, accumulate=True) if at else x.add_(terms.sum())
    for got, want in zip(total.values(), grads, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


def test_mods_survive_copies_and_pickles():
    bound = bind(lambda s, b, h, q, k: s + torch.ones(3)[h], lambda b, h, q, k: q >= k, torch.device("cpu"))
    for copied in (copy.copy(bound.mods), copy.deepcopy(bound.mods), pickle.loads(pickle.dumps(bound.mods))):
        assert copied is bound.mods
    assert bound.mods.described == "score_mod and mask_mod"
    assert bound.mods.differentiable == (0,)
    assert bound.mods.of_score == 1
    assert mods_of("|add s 1.0|%0 -").by_score is None
    assert mods_of("|mul s 2.0|%0 -").by_score is const(2.0)
    assert mods_of("||- T").score is None


def test_graphs_of_any_depth():
    node = s
    for _ in range(3000):
        node = make("tanh", make("add", node, 1.0))
    assert len(in_order(node)) == 6002
    assert derivatives(node)[s].op == "mul"
