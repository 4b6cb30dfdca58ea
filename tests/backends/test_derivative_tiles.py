"""Forward mode and second order in plain torch, tile by tile, against the float64 oracle. NaN is in all hidden places,
of the tangents too.
"""

from dataclasses import replace

import pytest
import torch

from tilewise.backends import torch as backend
from tilewise.backends.torch import second_order, tangents
from tilewise.core.tensors import TangentTensors, Tensors
from tilewise.reference import directional
from tilewise.testing.case import Case
from tilewise.testing.gradients import _check_zeros, make_gradients

CASES = [
    Case(Lq=20, Lk=37),
    Case(Hkv=2, Lq=33, Lk=70, causal=True, sinks=True),
    Case(Hkv=1, Lq=21, Lk=20, window=(9, 3), layout="blhd", scale=0.3),
    Case(Lq=25, Lk=20, causal=True, softcap=2.0, alibi="h"),
    Case(Lq=18, Lk=30, mask="h1k", mask_kind="f32", alibi="bh", sinks="mixed", softcap=3.0),
    Case(Lq=18, Lk=30, mask="bhqk", mask_kind="f32", pattern="rows", tile=(16, 16)),
    Case(Lq=18, Lk=30, mask="qk", pattern="blocks", q_bias="b1", k_bias="1h"),
    Case(B=3, Lq=18, Lk=30, lengths=(0, 5, 30), causal=True, sinks=True, offset="rows"),
    Case(Lq=18, Lk=30, strides="last", chunk=7, k_stride=2, Dv=16),
    Case(B=3, Hkv=2, Lq=18, Lk=30, indices="h5"),
    Case(Lq=20, Lk=30, tree="b", positions=True, alibi="h"),
    Case(form="varlen", Hkv=2, q_lengths=(5, 0, 33, 1), lengths=(5, 3, 40, 1), causal=True, sinks=True, k_bias="h"),
    Case(form="varlen", q_lengths=(9, 20), lengths=(20, 24), mask="1hqk", mask_kind="f32", used=(11, 0)),
]
NARROW = [
    Case(Hkv=2, Lq=33, Lk=70, window=(9, 3), dtype="bf16", layout="blhd", sinks=True),
    Case(Lq=33, Lk=40, mask="b1qk", mask_kind="f16", dtype="f16", softcap=5.0),
]


def directions(made):
    """Random tangents of all inputs that have gradients: of clean inputs, and with NaN wherever slack is NaN."""
    random = torch.Generator().manual_seed(7)
    found, hidden = {}, {}
    for name in made.call.problem.grads:
        x, y = (getattr(call.tensors.forward, name) for call in (made.clean, made.call))
        own = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())
        tangent = torch.randn(x[own].shape, generator=random).to(x.dtype)
        spoiled = torch.where(y[own].isnan() | (y[own] == -torch.inf), torch.nan, tangent)
        hidden[name] = (tangent if name == "sinks" else spoiled).expand(x.shape)
        found[name] = tangent.expand(x.shape)
    return found, hidden


def run(case, of=None, tile=None):
    """The derivatives by the torch backend, and the oracle's in float64 and float32."""
    made = make_gradients(case)
    if of is not None:
        made = make_gradients(case, grads=of)
    clean, hidden = directions(made)
    p, b = made.call.problem, made.call.tensors
    for x in (*b.gradients().values(),):
        x.fill_(torch.nan)
    fields = {name: hidden.get(name) for name in ("q", "k", "v", "out", *hidden)}
    out, lse = torch.full_like(b.forward.out, torch.nan), torch.full_like(b.forward.lse, torch.nan)
    moved = TangentTensors(Tensors(**fields), out, lse)
    plan = backend.plan_derivatives(p)
    plan = plan if tile is None else replace(plan, tile=tile)
    backend.run_tangent(plan, b.forward, moved)
    backend.run_second_order(plan, b, moved)
    found = {"out": out, "lse": lse} | b.gradients()
    wanted = []
    own = {name: x[tuple(slice(0, 1) if s == 0 else slice(None) for s in x.stride())] for name, x in clean.items()}
    clean = {name: own[name] if name == "mask" else x for name, x in clean.items()}
    c = made.clean.tensors
    for compute in (torch.float64, torch.float32):
        o, l, grads = directional(made.clean.problem, c.forward, c.dout, c.dlse, clean, compute)
        wanted.append({"out": o, "lse": l} | grads)
    _check_zeros(p, c, b.gradients())
    assert not out[c.forward.lse == -torch.inf].any()
    return found, *wanted


def judge(found, exact, plain):
    """At most twice the error of plain autograd in float32, and some ulps of q's dtype, in which `out` is given."""
    eps = 8 * torch.finfo(found["out"].dtype).eps
    for name, x in found.items():
        want = exact[name]
        assert x.shape == want.shape, name
        # The same terms add up to 0 for a bias that all cells of a row have.
        size = exact["k_bias" if name == "q_bias" and "k_bias" in exact else name].abs().max()
        bound = 2 * (plain[name].double() - want).abs().max() + 8 * eps * size
        assert (x.double() - want).abs().max() <= bound, (name, float((x - want).abs().max()), float(bound))


@pytest.mark.parametrize("case", [*CASES, *NARROW], ids=str)
def test_every_option(case):
    judge(*run(case))


@pytest.mark.parametrize("case", [CASES[1], CASES[4], CASES[5], CASES[10]], ids=str)
def test_in_many_tiles(case):
    judge(*run(case, tile=(16, 16)))


@pytest.mark.parametrize("of", ["q", "k", "v", "sinks"])
def test_of_one_input_alone(of):
    judge(*run(Case(Hkv=2, Lq=18, Lk=30, causal=True, softcap=3.0, sinks=True), of=(of,)))


MISTAKES = {
    "tangent of the scale left out": (tangents, "tangent.q[:, rows].to(work)) * scale", "tangent.q[:, rows].to(work))"),
    "lse' out left out": (tangents, "- lse[..., None] * own.seq.out[:, rows].to(work)", ""),
    "the sink's tangent left out": (tangents, "lse = own.of_sink(rows)", "lse = own.of_sink(rows) * 0"),
    "softcap's slope left out of the tangent": (tangents, "product * (1 - tanh * tanh)", "product"),
    "the mask's tangent left out": (tangents, "s if mask is None else s + mask.to(s.dtype)", "s"),
    "slopes' tangent of the wrong sign": (tangents, "s = s - tangent.slopes", "s = s + tangent.slopes"),
    "hidden tangents": (tangents, "moved_s = torch.where(visible, moved_s, 0.0)", "pass"),
    "kappa left out": (second_order, "by_s -= c.prob * given.kappa[..., None]", "pass"),
    "kappa of the wrong sign": (second_order, "- given.kappa[..., None]", "+ given.kappa[..., None]"),
    "delta without dlse": (second_order, "delta = by_out - dlse", "pass"),
    "lse' left out of E": (second_order, "c.moved - given.lse[..., None]", "c.moved + 0"),
    "softcap's bend left out": (second_order, "by_s * slope + by_moved * bend", "by_s * slope"),
    "K' left out of dQ": (second_order, "dq.baddbmm_(by_moved, tile.moved_k if", "dq.mul_(1); (tile.moved_k if"),
    "Q' left out of dK": (second_order, "dk[:, c.cols] += by_moved.mT @ moved_q", "pass"),
    "V' left out": (second_order, "if keys.moved_v is None", "if True"),
    "dV without the sum": (second_order, "moved_s.mul_(c.prob)", "c.moved.mul_(c.prob)"),
    "the sink's own tangent": (second_order, "weights * still - own.of_sink(rows) * delta", "weights * still"),
    "the sink's gradient": (second_order, "lse * delta - kappa", "-kappa"),
    "the mask's gradient by its tangent": (second_order, "add_biases(b, seq, by_s,", "add_biases(b, seq, by_moved,"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_rejected(name, monkeypatch):
    """One mistake in the text of a module; some case must reject it."""
    module, right, wrong = MISTAKES[name]
    with open(module.__file__, encoding="utf-8") as file:
        text = file.read()
    assert text.count(right) >= 1
    space = dict(vars(module))
    exec(compile(text.replace(right, wrong), module.__file__, "exec"), space)
    if module is tangents:  # its rows are used by both
        monkeypatch.setattr(second_order, "Rows", space["Rows"])
    for function in ("run_tangent", "run_second_order"):
        if function in text and hasattr(module, function):
            monkeypatch.setattr(backend, function, space[function])
    for case, of in [(CASES[1], ("q",)), *((case, None) for case in CASES)]:
        try:
            judge(*run(case, of))
        except AssertionError:
            return
    raise AssertionError(f"no case rejects it: {name}")
