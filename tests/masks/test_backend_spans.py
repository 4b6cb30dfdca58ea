"""Every backend's own `key_span` against the one in `core/mask_rules.py`."""

from ctypes import addressof
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numba import njit

import gluon_sim
import mslsim
from gluon_values import Tensor
from metal_sim import needs_simulator
from tilewise.backends.cpu.codegen.numba_ops import params_at
from tilewise.backends.cpu.kv_access import affine
from tilewise.backends.cpu.kv_access import key_span as cpu_key_span
from tilewise.backends.cpu.kv_access import query_span as cpu_query_span
from tilewise.backends.cpu.params import Params, Rules
from tilewise.backends.metal import params, text
from tilewise.core.mask_rules import RULE_NUMBERS, MaskRules, key_span, key_spans, query_span

SIDES = (None, 0, 1, 5, 40)
RULES = [
    MaskRules(causal, (left, right), chunk)
    for causal, left, right, chunk in product((False, True), SIDES, SIDES, (0, 1, 7, 50))
]
STRIDED = [  # key_span and query_span with keys and queries that are not one position apart
    MaskRules(causal, (left, right), chunk, places=places)
    for causal, left, right, chunk, places in product(
        (False, True), (None, 0, 5), (None, 0, 40), (0, 7), ((-9, 1, 1), (3, 4, 1), (0, 1, 3), (5, 2, 3), (-70, 9, 9))
    )
]
LENGTHS = (0, 1, 24)
POSITIONS = range(-30, 60)
CELLS = list(product(POSITIONS, LENGTHS))


def seen(lo, hi, kv_len):
    """The keys of a span: ends that are past the first or the last key mean the same; None if there are none."""
    lo, hi = max(lo, 0), min(hi, kv_len)
    return (lo, hi) if lo < hi else None


def wanted(rules):
    return [seen(*key_span(rules, position, kv_len), kv_len) for position, kv_len in CELLS]


def given(lo, hi):
    return [seen(a, b, kv_len) for a, b, (_, kv_len) in zip(lo.tolist(), hi.tolist(), CELLS, strict=True)]


def test_many_rows_at_once():
    positions, lengths = (torch.tensor(x) for x in zip(*CELLS, strict=True))
    for rules in RULES + STRIDED:
        assert given(*key_spans(rules, positions, lengths)) == wanted(rules), rules


@njit
def cpu_spans(address, positions, lengths, lo, hi):
    p = params_at(address)
    for i in range(len(positions)):
        lo[i], hi[i] = cpu_key_span(p, affine(p, 0, positions[i]), 0, lengths[i])


def test_cpu():
    """Compiled, over the struct that kernels are given."""
    positions, lengths = (np.array(x) for x in zip(*CELLS, strict=True))
    lo, hi = np.zeros_like(positions), np.zeros_like(positions)
    for rules in RULES + STRIDED:
        params = Params(rules=Rules(**rules.numbers()))
        cpu_spans(addressof(params), positions, lengths, lo, hi)
        assert given(lo, hi) == wanted(rules), rules


@njit
def cpu_query_spans(address, keys, offset, q_len, lo, hi):
    p = params_at(address)
    for i in range(len(keys)):
        lo[i], hi[i] = cpu_query_span(p, affine(p, 0, offset), keys[i], q_len)


def test_cpu_queries():
    keys = np.arange(60)
    lo, hi = np.zeros_like(keys), np.zeros_like(keys)
    for rules, offset in product(RULES + STRIDED, (-7, 0, 20)):
        params = Params(rules=Rules(**rules.numbers()))
        cpu_query_spans(addressof(params), keys, offset, 24, lo, hi)
        got = [seen(a, b, 24) for a, b in zip(lo.tolist(), hi.tolist(), strict=True)]
        assert got == [seen(*query_span(rules, key, offset, 24), 24) for key in keys.tolist()], (rules, offset)


def by_gpu(function, rules, *given):
    """A function of `gpu/mask_rules.py` as plain Python over int32, for all of `given` at once."""
    numbers = [Tensor(np.int32(rules.numbers()[name])) for name in RULE_NUMBERS]
    given = [Tensor(np.array(x, np.int32)) for x in given]
    return [x.a + np.zeros_like(given[0].a) for x in function(*given, numbers, SimpleNamespace(rules=rules.flags))]


def test_triton_and_hopper():
    kernels = gluon_sim.load().mask_rules
    for rules in RULES + STRIDED:
        assert given(*by_gpu(kernels.key_span, rules, *zip(*CELLS, strict=True))) == wanted(rules), rules


QUERIES = list(product(range(30), (-40, -1, 0, 13), (1, 24)))


def wrong_queries(kernels):
    """The rules for which a key is seen by other queries than those that see it."""
    wrong = []
    for rules in RULES + STRIDED:
        lo, hi = by_gpu(kernels.query_span, rules, *zip(*QUERIES, strict=True))
        got = [seen(*ends, q_len) for *ends, (_, _, q_len) in zip(lo, hi, QUERIES, strict=True)]
        want = [seen(*query_span(rules, key, offset, q_len), q_len) for key, offset, q_len in QUERIES]
        wrong += [rules] * (got != want)
    return wrong


def test_the_queries_of_a_key():
    assert wrong_queries(gluon_sim.load().mask_rules) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [("key + left + 1", "key + left"), ("key - right", "key + right"), ("near - right, q_stride", "near, q_stride")],
)
def test_a_wrong_side_of_queries_is_noticed(old, new):
    assert wrong_queries(gluon_sim.load({"mask_rules": [(old, new)]}).mask_rules)


SPANS = """
using namespace tilewise;
kernel void spans(device const int* positions [[buffer(0)]], device const int* lengths [[buffer(1)]],
                  constant int* ints [[buffer(2)]], constant long* strides [[buffer(3)]],
                  constant float* floats [[buffer(4)]], device int* lo [[buffer(5)]], device int* hi [[buffer(6)]],
                  uint i [[thread_position_in_grid]]) {
  const Params p = read_params(ints, strides, floats);
  const Span s = key_span(p, positions[i], lengths[i]);
  lo[i] = s.lo;
  hi[i] = s.hi;
}
"""


# Options of the text, and numbers that `key_span` does not read, by which they are passed here.
SWITCHES = {"CAUSAL": "batch", "LEFT": "heads", "RIGHT": "group", "CHUNK": "chunk"}
FLAGS = {"batch": "causal", "heads": "has_left", "group": "has_right"}


def wrong_by_metal(source):
    """The rules for which the text leaves other keys to a query."""
    kernel = mslsim.compile_shader(source + SPANS).spans
    positions, lengths = (torch.tensor(x, dtype=torch.int32) for x in zip(*CELLS, strict=True))
    lo, hi = torch.zeros_like(positions), torch.zeros_like(positions)
    numbers = (0,) * len(params.STRIDES), (0.0,) * len(params.FLOATS)
    size, wrong = [len(CELLS), 1, 1], []
    for rules in RULES:
        ints = [int(rules.numbers().get(FLAGS.get(name, name), 0)) for name in params.INTS]
        kernel(positions, lengths, ints, *numbers, lo, hi, threads=size, group_size=size, arg_casts={2: "int32"})
        wrong += [rules] * (given(lo, hi) != wanted(rules))
    return wrong


@needs_simulator
def test_metal():
    source = text.classification(1).header.rpartition("[[")[0]
    for name, value in SWITCHES.items():  # known when the kernel runs: one text for all rules
        source = source.replace(f"#define {name} 0\n", f"#define {name} p.{value}\n")
    assert wrong_by_metal(source) == []
    assert wrong_by_metal(source.replace("ahead - p.left", "ahead - p.left - 1"))
