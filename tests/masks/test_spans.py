"""Spans of keys and of queries: each is the other's inverse. What `MaskRules` says of itself is true of them."""

import itertools
from dataclasses import astuple, fields, replace

import pytest

from tilewise.core.mask_rules import RULE_NUMBERS, MaskRules, key_span, query_span

WINDOWS = [(None, None), (0, None), (3, None), (None, 0), (None, 2), (4, 1), (0, 0), (100, 100)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("chunk", [0, 1, 4, 50])
def test_a_query_sees_a_key_iff_the_key_is_seen_by_the_query(causal, window, chunk):
    rules = MaskRules(causal, window, chunk)
    for offset, q_len, kv_len in itertools.product((-5, 0, 3, 20), (1, 9), (1, 13)):
        seen = set()
        for i in range(q_len):
            lo, hi = key_span(rules, offset + i, kv_len)
            seen |= {(i, j) for j in range(lo, hi)}
        inverse = set()
        for j in range(kv_len):
            lo, hi = query_span(rules, j, offset, q_len)
            assert lo >= hi or 0 <= lo < hi <= q_len
            inverse |= {(i, j) for i in range(lo, hi)}
        assert seen == inverse


PLACES = [(0, 1, 1), (3, 1, 1), (-4, 2, 1), (1, 1, 3), (2, 5, 5), (-7, 3, 2)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize("places", PLACES)
def test_spans_are_what_the_definition_leaves(causal, window, chunk, places):
    rules = MaskRules(causal, window, chunk, places=places)
    left, right = (1000 if side is None else side for side in window)
    k_start, k_stride, q_stride = places
    for offset, q_len, kv_len in itertools.product((-5, 0, 20), (1, 9), (1, 13)):
        for i, j in itertools.product(range(q_len), range(kv_len)):
            qpos, kpos = offset + q_stride * i, k_start + k_stride * j
            want = -right <= qpos - kpos <= left and (not causal or kpos <= qpos)
            want = want and (not chunk or qpos // chunk == kpos // chunk)
            lo, hi = key_span(rules, qpos, kv_len)
            assert (lo <= j < hi) == want, (i, j, offset)
            lo, hi = query_span(rules, j, offset, q_len)
            assert (lo <= i < hi) == want, (i, j, offset)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("places", [(0, 1, 1), (3, 1, 1), (2, 5, 5), (-9, 4, 4)])
def test_rules_without_their_stride(causal, window, places):
    found = 0
    for offset, stride in itertools.product(range(-20, 30, 3), (places[2],)):
        rules = MaskRules(causal, window, q_offset=offset, places=places)
        plain = rules.unstrided()
        spans = [key_span(rules, offset + stride * i, 40) for i in range(30)]
        spans = [(max(0, lo), hi) if max(0, lo) < hi else None for lo, hi in spans]
        if plain is None:
            assert set(spans) == {None}
            continue
        found += 1
        assert not plain.affine
        got = [key_span(plain, plain.q_offset + i, 40) for i in range(30)]
        assert [(max(0, lo), hi) if max(0, lo) < hi else None for lo, hi in got] == spans
    assert found
    assert MaskRules(causal, window, q_offset=3, places=(0, 1, 2)).unstrided() is None


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("chunk", [0, 4])
def test_neither_end_moves_left(window, chunk):
    for places in PLACES:
        spans = [query_span(MaskRules(True, window, chunk, places=places), j, 2, 30) for j in range(40)]
        assert all(a <= b and c <= d for (a, c), (b, d) in itertools.pairwise(spans))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("chunk", [0, 1, 4, 50])
def test_what_rules_say_they_hide(causal, window, chunk):
    """Far enough to the left and right of the keys, a rule hides some."""
    rules, keys = MaskRules(causal, window, chunk), 13
    spans = [key_span(rules, position, keys) for position in range(-150, 160)]
    spans = [(min(max(lo, 0), keys), max(min(hi, keys), 0)) for lo, hi in spans]
    assert rules.flags.hides_left == any(lo > 0 for lo, _ in spans)
    assert rules.flags.hides_right == any(hi < keys for _, hi in spans)
    assert rules.by_position == any(span != (0, keys) for span in spans)
    assert rules.flags.jumps or all(b - a <= 1 for (a, _), (b, _) in itertools.pairwise(spans))


OTHERS = {"causal": True, "window": (5, None), "chunk": 7, "q_offset": 3, "kv_lengths": True, "places": (2, 3, 4)}


@pytest.mark.parametrize("name", OTHERS)
def test_every_rule_reaches_the_backends(name):
    assert set(OTHERS) == {f.name for f in fields(MaskRules)}
    rules = replace(MaskRules(), **{name: OTHERS[name]})
    assert rules.numbers() != MaskRules().numbers()
    assert astuple(rules.flags) != astuple(MaskRules().flags)
    assert set(RULE_NUMBERS) <= set(rules.numbers())
