"""The key of a function: equal for one made anew, different for whatever its trace depends on."""

import functools
import gc
import sys
import types

import pytest
import torch

from tilewise.core.expression import mods, trace
from tilewise.core.expression.captures import Captures

CPU = torch.device("cpu")
WIDTH = 3
table = torch.randn(4, 9)
settings = types.SimpleNamespace(width=2, table=table)
module = types.ModuleType("users_module")
module.width, module.table = 2, table


@pytest.fixture
def traces(monkeypatch):
    """The functions that were traced, while the test runs."""
    seen = []
    original = trace.trace
    monkeypatch.setattr(mods, "_known", {})
    monkeypatch.setattr(trace, "trace", lambda f, name: seen.append(f) or original(f, name))
    return seen


def bind(function):
    return mods.bind(function, None, CPU)


def made(width, tensor):
    def distance(q, k):
        return (q - k).clamp(0, width)

    return lambda s, b, h, q, k: s + tensor[h, distance(q, k)]


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias, self.width = torch.nn.Embedding(9, 4), 3

    def score_mod(self, s, b, h, q, k):
        return s + self.bias((q - k).clamp(0, self.width))[h]

    forward = score_mod


class Called:
    def __init__(self):
        self.width = 2

    def __call__(me, s, b, h, q, k):  # noqa: N805
        return s * me.width


def test_a_function_made_anew_costs_no_trace(traces):
    first, second = bind(made(3, table)), bind(made(3, table + 1))
    assert len(traces) == 1
    assert first.mods is second.mods
    assert first.tensors[0] is table
    assert torch.equal(second.tensors[0], table + 1)


def test_a_changed_closure_is_seen(traces):
    texts = {bind(made(width, table)).mods.text for width in (3, 1, True, 4)}
    assert len(traces) == 4
    assert len(texts) == 3  # True is 1 to clamp, but not the same key
    bind(made(3, torch.randn(2, 9)))  # another shape, which the function may read
    assert len(traces) == 5


def test_globals_attributes_and_modules_are_seen(traces, monkeypatch):
    def by_global(s, b, h, q, k):
        return s * WIDTH

    def by_attribute(s, b, h, q, k):
        return s * settings.width + settings.table[h, 0]

    def by_module(s, b, h, q, k):
        return s * module.width + module.table[h, 0]

    for function, place, name in (
        (by_global, globals(), "WIDTH"),
        (by_attribute, settings, "width"),
        (by_module, module, "width"),
    ):
        before = bind(function).mods.text
        assert bind(function).mods.text == before
        set_value = monkeypatch.setitem if isinstance(place, dict) else monkeypatch.setattr
        set_value(place, name, 5)
        assert bind(function).mods.text != before
    assert len(traces) == 6
    other = torch.randn(4, 9)
    monkeypatch.setattr(settings, "table", other)
    assert bind(by_attribute).tensors[0] is other
    assert len(traces) == 6


def test_methods_layers_and_callable_objects(traces):
    layer, called = Layer(), Called()
    for function in (layer.score_mod, layer, layer.score_mod, layer):
        assert bind(function).tensors[0] is layer.bias.weight
    assert len(traces) == 1
    layer.width = 5
    assert "min %1 5" in bind(layer.score_mod).mods.text
    layer.bias = torch.nn.Embedding(9, 4)
    assert bind(layer.score_mod).tensors[0] is layer.bias.weight
    assert len(traces) == 2
    before = bind(called).mods.text
    called.width = 7
    assert bind(called).mods.text != before


def test_defaults_and_partials(traces):
    def scaled(factor, s, b, h, q, k, offset=1.0):
        return s * factor + offset

    texts = [bind(functools.partial(scaled, factor)).mods.text for factor in (2, 3, 2)]
    assert texts[0] == texts[2] != texts[1]
    assert len(traces) == 2
    scaled.__defaults__ = (2.0,)
    assert bind(functools.partial(scaled, 2)).mods.text != texts[0]


def test_functions_in_functions_are_seen(traces):
    def outer(width):
        def inner(x):
            return x.clamp(0, width)

        return lambda s, b, h, q, k: s + inner(q)

    assert bind(outer(2)).mods is not bind(outer(3)).mods
    functions = [lambda x: x + 1, lambda x: x + 2]
    chosen = functions[0]

    def score_mod(s, b, h, q, k):
        return chosen(s) + functions[1](s)

    before = bind(score_mod).mods.text
    chosen = functions[1]
    assert bind(score_mod).mods.text != before


def test_the_same_tensor_twice_is_one_and_two_are_two(traces):
    def pair(x, y):
        return lambda s, b, h, q, k: s + x[h, 0] * y[h, 1]

    assert len(bind(pair(table, table)).tensors) == 1
    assert len(bind(pair(table, table.clone())).tensors) == 2
    assert len(traces) == 2


def test_what_no_key_describes_is_traced_each_time(traces):
    def through(s, b, h, q, k):
        local = settings  # the attribute of a local name: not followed
        return s * local.width

    first = bind(through).mods.text
    settings.width, width = 11, settings.width
    try:
        assert bind(through).mods.text != first
    finally:
        settings.width = width
    assert Captures(through, "score_mod").key is None
    hidden = {"deep": [{"er": object()}]}
    assert Captures(lambda s, b, h, q, k: hidden, "score_mod").key is None


def test_tensors_that_the_function_makes_stay_with_the_trace(traces):
    def weights(s, b, h, q, k):
        return s * torch.tensor([1.0, 2.0, 4.0, 8.0])[h]

    first, second = bind(weights), bind(weights)
    assert len(traces) == 1
    assert first.tensors[0].tolist() == second.tensors[0].tolist() == [1.0, 2.0, 4.0, 8.0]


def test_a_key_keeps_no_tensor_alive():
    import weakref

    big = torch.randn(4, 9)
    reference = weakref.ref(big)
    bind(made(6, big))
    del big
    gc.collect()
    assert reference() is None


def test_what_bytecode_does_not_name_is_traced_each_time(traces, monkeypatch):
    monkeypatch.setitem(sys.modules, "users_module", module)

    def imports(s, b, h, q, k):
        from users_module import width

        return s * width

    def reads_globals(s, b, h, q, k):
        return s * globals()["WIDTH"]

    def imports_math(s, b, h, q, k):
        import math

        return s * math.pi

    for function in (imports, reads_globals):
        first = bind(function).mods
        monkeypatch.setattr(module, "width", 7)
        monkeypatch.setitem(globals(), "WIDTH", 8)
        assert bind(function).mods is not first
        monkeypatch.undo()
        monkeypatch.setitem(sys.modules, "users_module", module)
    assert Captures(imports_math, "score_mod").key is not None


def test_a_detached_tensor_is_another_load(traces):
    learned = torch.nn.Parameter(table.clone())

    def score_mod(s, b, h, q, k):
        return s + learned[h, q] * learned.detach()[h, k]

    for _ in range(2):
        bound = bind(score_mod)
        assert bound.needing_grad() == (0,)
        assert [x.requires_grad for x in bound.tensors] == [True, False]
        assert bound.tensors[1].data_ptr() == learned.data_ptr()
    assert bind(lambda s, b, h, q, k: s * learned.data[h, k]).needing_grad() == ()
