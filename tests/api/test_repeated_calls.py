"""Calls of the same shapes with another value of one option: each gives its own result, whatever was remembered.

Keys with a mistake are planted in the call cache; these tests must reject each.
"""

import pytest
import torch

from tilewise import InvalidArgument, Quantised, attention, paged_attention, varlen_attention
from tilewise.dispatch import call_cache
from tilewise.testing.case import Inputs
from tilewise.testing.check import Mismatch, check_call


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 1.7


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(autouse=True)
def _forget():
    call_cache.forget()
    yield
    call_cache.forget()


# As many heads as rows: both layouts are legal.
SQUARE = (draw(2, 6, 6, 16), draw(2, 6, 6, 16, seed=1), draw(2, 6, 6, 16, seed=2))
LENGTHS = {"kv_lengths": ints(6, 5), "validate": False}
STORED = (SQUARE[0], *(Quantised.from_float(x, "int8", 32) for x in SQUARE[1:]))
PACKED = (draw(7, 4, 16), draw(9, 2, 16, seed=1), draw(9, 2, 16, seed=2), ints(0, 3, 7), ints(0, 5, 9))
PAGES = (draw(6, 4, 6, 16, seed=1), draw(6, 4, 6, 16, seed=2), torch.tensor([[5, 2, 0], [4, 1, 3]]).int(), ints(10, 9))
CALLS = {
    "dense": Inputs(attention, SQUARE, {}),
    "dense with lengths": Inputs(attention, SQUARE, LENGTHS),
    "dense with lengths, checked": Inputs(attention, SQUARE, LENGTHS | {"validate": None}),
    "quantised": Inputs(attention, STORED, {}),
    "varlen": Inputs(varlen_attention, PACKED, {"max_q": 5, "max_k": 6, "validate": False}),
    "paged": Inputs(paged_attention, (SQUARE[0], *PAGES), {"validate": False}),
    "paged, packed": Inputs(
        paged_attention,
        (draw(7, 6, 16), *PAGES),
        {"cu_seqlens_q": ints(0, 3, 7), "max_q": 5, "validate": False},
    ),
}
# The value of the plain call and another, both unlike any other option's.
OPTIONS = {
    "scale": (None, 0.9),
    "causal": (False, True),
    "q_offset": (None, 2),
    "window": (None, (3, 1)),
    "chunk": (None, 4),
    "softcap": (None, 1.5),
    "split_size": (None, 3),
    "return_lse": (True, False),
    "allow_tf32": (False, True),
    "layout": ("bhld", "blhd"),
    "backend": ("cpu", "torch"),
}
TENSORS = {
    "q_offset": ints(2, 3),
    "mask": draw(5, 1),
    "sinks": draw(6),
    "alibi_slopes": draw(6).abs(),
}
PLANTED = ("scale", "softcap", "q_offset", "window", "chunk", "causal", "layout", "return_lse")


def common(x, options, packed):
    """`out` or `lse` in the caller's layout as `[B, H, L, ...]`."""
    if packed:
        return x.transpose(0, 1)[None]
    return x.transpose(1, 2) if options.get("layout") == "blhd" else x


def check_values(name, option, values):
    """Calls with one value and the other, each twice, against the oracle."""
    inputs = CALLS[name]
    packed = inputs.args[0].ndim == 3
    for value in (*values, *values):
        options = {"return_lse": True, "backend": "cpu", "causal": option == "q_offset"} | {option: value}
        backend = options.pop("backend")
        result = inputs.call(backend, **options)
        call = inputs.checked(**options)
        if not options["return_lse"]:
            if not isinstance(result, torch.Tensor):
                raise Mismatch("a state where out alone was asked for")
            continue
        if isinstance(result, torch.Tensor):
            raise Mismatch("out alone where a state was asked for")
        check_call(call, *(common(x, options, packed) for x in result))


def can(name, option):
    return option != "layout" or CALLS[name].args[0].ndim == 4


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", CALLS)
def test_another_value(name, option):
    if can(name, option):
        check_values(name, option, OPTIONS[option])
        check_values(name, option, OPTIONS[option][::-1])


@pytest.mark.parametrize("option", TENSORS)
@pytest.mark.parametrize("name", CALLS)
def test_with_and_without_a_tensor(name, option):
    rows = CALLS[name].args[0]
    heads = rows.shape[1]
    value = TENSORS[option]
    if option == "mask":
        value = draw(CALLS[name].options.get("max_q", 6), 1)
    elif option != "q_offset":
        value = value[:heads]
    check_values(name, option, (None, value))


def test_other_longest_sequences():
    for option, values in (("max_q", (4, 7)), ("max_k", (5, 9))):
        check_values("varlen", option, values)
    check_values("varlen", "kv_lengths", (None, ints(2, 3)))
    check_values("paged, packed", "max_q", (4, 7))


@pytest.mark.parametrize("number", [2.5, 3])
def test_numbers_next_to_each_other(number):
    """A value that differs in its last bit is another option."""
    near = float(torch.nextafter(torch.tensor(number, dtype=torch.float64), torch.tensor(9.0, dtype=torch.float64)))
    for option in ("scale", "softcap"):
        for name in ("dense", "paged"):
            CALLS[name].call("cpu", **{option: number})
            CALLS[name].call("cpu", **{option: near})
    assert len(call_cache._known) == 8


def seen(key, values):
    """A key function that takes one value of an option for the other."""
    a, b = values

    def blind(name, args, options):
        return key(name, args, {n: a if type(x) is type(b) and x == b else x for n, x in options.items()})

    return blind


@pytest.mark.parametrize(("name", "option"), [(n, o) for n in CALLS for o in PLANTED if can(n, o)])
def test_keys_without_an_option_are_rejected(monkeypatch, name, option):
    monkeypatch.setattr(call_cache, "key_of", seen(call_cache.key_of, OPTIONS[option]))
    with pytest.raises(Mismatch):
        check_values(name, option, OPTIONS[option])


# What the checks accept, and what is equal to it but of another type.
TYPES = [
    ("causal", True, 1),
    ("causal", False, 0.0),
    ("return_lse", True, 1),
    ("return_lse", False, 0),
    ("allow_tf32", False, 0),
    ("chunk", 4, 4.0),
    ("chunk", 1, True),
    ("split_size", 3, 3.0),
    ("window", 1, True),
    ("window", 3, 3.0),
    ("window", (1, None), (True, None)),
    ("window", (3, 1), (3.0, 1)),
    ("window", (3, 0), (3, False)),
    ("scale", 1.0, True),
    ("scale", 1.0, 1 + 0j),
    ("softcap", 1.0, True),
    ("q_offset", 1, True),
    ("q_offset", 2, 2.0),
    ("validate", None, "no"),
    ("validate", True, 1),
    ("validate", False, 0),
]


def check_types(name, option, good, wrong):
    for _ in range(2):
        CALLS[name].call(None, **{option: good})
    with pytest.raises(InvalidArgument, match=f"^{option}: got"):
        CALLS[name].call(None, **{option: wrong})


@pytest.mark.parametrize(("option", "good", "wrong"), TYPES)
@pytest.mark.parametrize("name", CALLS)
def test_checks_do_not_depend_on_earlier_calls(name, option, good, wrong):
    check_types(name, option, good, wrong)


@pytest.mark.parametrize("name", ["varlen", "paged, packed"])
def test_longest_sequences_are_ints(name):
    check_types(name, "max_q", 5, 5.0)


def untyped(key):
    """A key function that leaves out the types of options."""

    def without(x):
        return tuple(map(without, (y for y in x if not isinstance(y, type)))) if type(x) is tuple else x

    return lambda *call: without(key(*call))


EQUAL = [row for row in TYPES if row[1] == row[2] and type(row[2]) is not complex]  # which has no key


@pytest.mark.parametrize(("option", "good", "wrong"), EQUAL)
def test_keys_without_types_are_rejected(monkeypatch, option, good, wrong):
    monkeypatch.setattr(call_cache, "key_of", untyped(call_cache.key_of))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_types("dense", option, good, wrong)


@pytest.mark.parametrize("good", [1, 1.0, 0.25])
def test_numbers_of_both_types_are_remembered(good):
    for _ in range(2):
        attention(*SQUARE, scale=good, softcap=good)
    assert len(call_cache._known) == 1
