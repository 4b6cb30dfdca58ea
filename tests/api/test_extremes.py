"""Windows, offsets, sinks and softcaps at the ends of their ranges, on the GPU backends without a GPU.

The calls are those of benchmarks/h200/trust.py, which runs them on a GPU.
"""

import importlib.util
import json
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

import gluon_sim
from gluon_values import Tensor
from hopper_sim import Launch
from interpreted import interpreted
from metal_sim import needs_simulator, simulator
from tilewise import AttentionState
from tilewise.core.mask_rules import RULE_NUMBERS, MaskRules, key_span
from tilewise.core.options import Options
from tilewise.validation import calls

TRUST = Path(__file__).parents[2] / "benchmarks/h200/trust.py"
spec = importlib.util.spec_from_file_location("trust", TRUST)
trust = sys.modules["trust"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(trust)
KERNELS = gluon_sim.load()


def test_triton_in_the_interpreter(tmp_path):
    run = interpreted(TRUST, "--device", "cpu", "--backends", "triton", "--light", "--out", tmp_path)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    rows = json.loads((tmp_path / "trust.json").read_text())
    assert len(rows) > 50
    assert all(row["ok"] for row in rows)


ENDS = (-(2**31), -(2**31) + 1, -(2**31) + 40, -(2**30), -41, -1, 0, 1, 23, 24, 25, 100, 2**30, 2**31 - 41, 2**31 - 1)
SIDES = (None, 0, 1, 5, 24, 2**30, 2**31 - 41, 2**31 - 2, 2**31 - 1)


def exact_span(rules, position, n_keys):
    """In Python's integers; ends are brought into `0 .. n_keys`, where they mean the same."""
    lo, hi = key_span(rules, position, n_keys)
    lo, hi = min(max(lo, 0), n_keys), min(max(hi, 0), n_keys)
    return (lo, hi) if lo < hi else None


def spans(kernels, rules, n_keys):
    """`lo`, `hi` at all of ENDS by the text of the GPU kernels, in int32 that wraps."""
    positions, n = Tensor(np.array(ENDS, np.int32)), Tensor(np.int32(n_keys))
    numbers = [Tensor(np.int32(rules.numbers()[name])) for name in RULE_NUMBERS]
    return kernels.mask_rules.key_span(positions, n, numbers, SimpleNamespace(rules=rules.flags))


def wrong_spans(kernels):
    """How many rows of all combinations see other keys than they should."""
    wrong = 0
    for causal, left, right, chunk, n_keys in product(
        (False, True), SIDES, SIDES, (0, 1, 7, 2**30, 2**31 - 1), (0, 24)
    ):
        rules = MaskRules(causal, (left, right), chunk)
        want = [exact_span(rules, p, n_keys) for p in ENDS]
        ends = zip(*(np.broadcast_to(x.a, len(ENDS)).tolist() for x in spans(kernels, rules, n_keys)), strict=True)
        got = [(a, b) if a < b else None for a, b in ends]
        wrong += sum(x != y for x, y in zip(got, want, strict=True))
    return wrong


def test_no_position_side_or_chunk_overflows():
    assert wrong_spans(gluon_sim.load()) == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [("lo = tl.maximum(lo, ahead - ", "lo = tl.maximum(lo, position - "), ("near + 1)", "position + 1)"),
     ("reach = tl.where(near < 0, ", "reach = tl.where(near < 1 << 30, ")],
)  # fmt: skip
def test_sums_that_overflow_are_noticed(old, new):
    assert wrong_spans(gluon_sim.load({"mask_rules": [(old, new)]})) > 0


@pytest.mark.parametrize("cap", [1e3, 1e6, 1e12, 1e30])
def test_tanh_is_exact_near_zero(cap):
    """As the Hopper kernel computes it, relative to the exact value: without the polynomial all of it would be lost."""
    softmax = gluon_sim.load().softmax
    s = np.concatenate([np.linspace(-40, 40, 4001), np.geomspace(1e-6, 5e3, 2001)]).astype(np.float32)
    s = s[s != 0]
    exact = cap * np.tanh(s.astype(np.float64) / cap)

    def error(is_exact):
        got = softmax.tanh(Tensor(s * np.float32(1 / cap)), is_exact).a.astype(np.float64) * cap
        return np.max(np.abs(got - exact) / np.abs(exact))

    assert error(True) < 6e-7
    assert error(False) > 1e-4


def hopper_calls():
    """The calls of trust.py that Hopper's kernels serve, in float16."""
    return [c for c in trust.CALLS if not c.paged and c.dtype == torch.float16 and not c.only and c.Lq > 0]


@pytest.mark.parametrize("call", hopper_calls(), ids=lambda c: c.name)
def test_hopper_as_plain_python(call, monkeypatch):
    """By the kernels' own text (`gluon_sim.py`)."""

    def run(q, k, v, *, backend, **options):
        checked = calls.dense(q, k, v, Options(**options))
        Launch(checked).run(KERNELS)
        return AttentionState(checked.out, checked.lse)

    monkeypatch.setattr(trust.tilewise, "attention", run)
    monkeypatch.setattr(trust, "BF16", torch.float16)  # which NumPy has not
    shares = trust.judge(call, *trust.run(call, "hopper", "cpu"))
    assert max(shares) <= 1


@needs_simulator
@pytest.mark.parametrize("call", [c for c in trust.CALLS if not c.heavy and c.Lq > 0],
                         ids=lambda c: c.name)  # fmt: skip
def test_metal_in_the_simulator(call):
    with simulator():
        shares = trust.judge(call, *trust.run(call, "metal", "cpu"))
    assert max(shares) <= 1
