"""The oracle against a formula written out cell by cell, and against numbers computed by hand."""

import math
import random

import pytest
import torch

import tilewise
from tilewise.core.options import Options
from tilewise.reference import reference
from tilewise.validation.calls import dense


def cell_by_cell(q, k, v, *, scale, causal=False, window=None, chunk=None, softcap=None, slope=None, bias=None,
                 seen=None, sink=None, q_offset=0, kv_len=None):  # fmt: skip
    """One head: q [Lq, D], k [n, D], v [n, Dv] as lists of floats; the contract read line by line, in Python floats."""
    outs, lses = [], []
    for i, row in enumerate(q):
        qpos = q_offset + i
        logits = []
        for j in range(len(k) if kv_len is None else kv_len):
            s = scale * math.fsum(a * b for a, b in zip(row, k[j], strict=True))
            if softcap:
                s = softcap * math.tanh(s / softcap)
            if slope is not None:
                s -= slope * abs(qpos - j)
            visible = not causal or j <= qpos
            if isinstance(window, int):
                visible &= qpos - j < window
            elif window is not None:
                visible &= window[0] is None or qpos - j <= window[0]
                visible &= window[1] is None or j - qpos <= window[1]
            if chunk:
                visible &= math.floor(j / chunk) == math.floor(qpos / chunk)
            if seen is not None:
                visible &= bool(seen[i][j])
            if bias is not None:
                visible &= bias[i][j] != -math.inf
                s += bias[i][j] if visible else 0
            if visible:
                logits.append((j, s))
        top = max([s for _, s in logits] + ([sink] if sink is not None else []), default=-math.inf)
        weights = [(j, math.exp(s - top)) for j, s in logits]
        total = math.fsum([w for _, w in weights] + ([math.exp(sink - top)] if sink is not None else []))
        outs.append([math.fsum(w / total * v[j][d] for j, w in weights) for d in range(len(v[0]))])
        lses.append(top + math.log(total) if total else -math.inf)
    return outs, lses


OPTIONS = [
    {},
    {"causal": True},
    {"causal": True, "q_offset": 0},
    {"causal": True, "q_offset": -2},
    {"window": 3},
    {"causal": True, "window": 1},
    {"window": (2, 1)},
    {"window": (None, 2)},
    {"window": (1, None), "q_offset": 4},
    {"chunk": 3},
    {"chunk": 4, "causal": True, "q_offset": -5},
    {"softcap": 2.0},
    {"slope": 0.5},
    {"slope": 0.25, "causal": True, "softcap": 3.0},
    {"sink": 1.5},
    {"sink": -2.0, "causal": True, "q_offset": -3},
    {"seen": True},
    {"bias": True},
    {"kv_len": 4},
    {"kv_len": 0},
    {"kv_len": 5, "causal": True},
    {
        "softcap": 2.5,
        "slope": 0.1,
        "bias": True,
        "sink": 0.3,
        "causal": True,
        "window": (4, 1),
        "chunk": 6,
        "kv_len": 7,
    },
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_oracle_is_the_formula(options):
    rng = random.Random(str(options))
    Lq, Lk, D, Dv = 6, 9, 5, 4
    q, k, v = ([[rng.gauss(0, 2) for _ in range(d)] for _ in range(n)] for n, d in ((Lq, D), (Lk, D), (Lk, Dv)))
    named = dict(options)
    call = {name: named[name] for name in ("causal", "window", "chunk", "softcap", "q_offset") if name in named}
    if named.pop("seen", None):
        named["seen"] = [[rng.random() < 0.6 for _ in range(Lk)] for _ in range(Lq)]
        call["mask"] = torch.tensor(named["seen"])
    if named.pop("bias", None):
        named["bias"] = [[rng.choice([-math.inf, -1e30, 0.0, 0.5]) for _ in range(Lk)] for _ in range(Lq)]
        call["mask"] = torch.tensor(named["bias"])
    if "slope" in named:
        call["alibi_slopes"] = torch.tensor([named["slope"]])
    if "sink" in named:
        call["sinks"] = torch.tensor([named["sink"]])
    if "kv_len" in named:
        call["kv_lengths"] = torch.tensor([named["kv_len"]])
    named.setdefault("q_offset", named.get("kv_len", Lk) - Lq)
    q, k, v = (torch.tensor(x) for x in (q, k, v))  # what the call reads are float32 numbers
    sunk = {name: torch.tensor(named[name]).item() for name in ("slope", "sink") if name in named}
    want, want_lse = cell_by_cell(q.tolist(), k.tolist(), v.tolist(), scale=D**-0.5, **(named | sunk))
    checked = dense(q[None, None], k[None, None], v[None, None], Options(**call))
    [got] = reference(checked.problem, checked.tensors)
    torch.testing.assert_close(got.out[0], torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(got.lse[0], torch.tensor(want_lse, dtype=torch.float64), rtol=1e-12, atol=1e-13)


def attend(*args, **options):
    return tilewise.attention(*args, backend="reference", return_lse=True, **options)


def column(*numbers):
    return torch.tensor(numbers, dtype=torch.float32).view(1, 1, -1, 1)


def test_by_hand():
    """q.k = 0 and ln 3: weights 1/4 and 3/4."""
    out, lse = attend(column(1.0), column(0.0, math.log(3)), column(4.0, 8.0), scale=1.0)
    assert out.item() == pytest.approx(7.0)
    assert lse.item() == pytest.approx(math.log(4))


def test_by_hand_sink():
    """A sink of ln 4 beside weights 1 and 3 halves the output."""
    sinks = torch.tensor([math.log(4)])
    out, lse = attend(column(1.0), column(0.0, math.log(3)), column(4.0, 8.0), scale=1.0, sinks=sinks)
    assert out.item() == pytest.approx(3.5)
    assert lse.item() == pytest.approx(math.log(8))


def test_by_hand_causal_is_bottom_right():
    """Two queries over three keys of equal score: means of the first two and of all three."""
    out, _ = attend(column(0.0, 0.0), column(0.0, 0.0, 0.0), column(3.0, 6.0, 12.0), causal=True)
    assert out.flatten().tolist() == pytest.approx([4.5, 7.0])
    out, _ = attend(column(0.0, 0.0), column(0.0, 0.0, 0.0), column(3.0, 6.0, 12.0), causal=True, q_offset=0)
    assert out.flatten().tolist() == pytest.approx([3.0, 4.5])


def test_by_hand_window_counts_the_query():
    out, _ = attend(column(0.0, 0.0, 0.0), column(0.0, 0.0, 0.0), column(3.0, 6.0, 12.0), causal=True, window=2)
    assert out.flatten().tolist() == pytest.approx([3.0, 4.5, 9.0])


def test_by_hand_alibi():
    """Distance 1 at slope ln 3 weighs a third: (1/3 * 4 + 1 * 8) / (4/3) = 7."""
    slopes = torch.tensor([math.log(3)])
    out, _ = attend(column(0.0), column(0.0, 0.0), column(4.0, 8.0), alibi_slopes=slopes)
    assert out.item() == pytest.approx(7.0)


def test_scores_and_probabilities_are_there():
    q, k, v = (torch.randn(1, 2, n, 8) for n in (3, 5, 5))
    checked = dense(q, k, v, Options(causal=True))
    [r] = reference(checked.problem, checked.tensors)
    torch.testing.assert_close(r.probs.sum(-1), torch.ones(2, 3, dtype=torch.float64))
    assert (r.scores == -math.inf).equal(~r.visible)


def test_equals_sdpa():
    q, k, v = (torch.randn(2, h, 17, 24, dtype=torch.float32) for h in (6, 3, 3))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attend(q, k, v, causal=True).out, want, rtol=1e-5, atol=1e-6)
