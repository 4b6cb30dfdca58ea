"""Gradients of calls with functions of the user by a backend, against the oracle."""

import torch

from drawn_mods import TENSORS, Draw, captured
from tilewise import attention, attention_backward, varlen_attention
from tilewise.core.expression.build import const, make
from tilewise.core.expression.mods import Bound, mods_of
from tilewise.core.expression.node import load, source
from tilewise.core.expression.text import to_text

H, D = 4, 24
random = torch.Generator().manual_seed(0)
TABLE, SLOPES = torch.randn(H, 800, generator=random), torch.rand(H, generator=random)
NEAR = torch.rand(800, 800, generator=random)
PER_DTYPE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def draw(*shape, dtype=torch.float32, size=2.0):
    return (torch.randn(shape, generator=random) * size).to(dtype)


def gradients(q, k, v, dout, dlse, options, backend, out_lse=None, of_captured=True):
    """By a backend, with out and lse of the oracle; `of_captured`: of captured tensors too."""
    tables = {n: x for n, x in options.items() if n.startswith("cu_")}
    rest = {n: x for n, x in options.items() if not n.startswith("cu_")}
    if out_lse is None:
        call = varlen_attention if tables else attention
        out_lse = call(q, k, v, *tables.values(), backend="reference", return_lse=True, **rest)
    names = ["q", "k", "v"]
    smooth = not isinstance(rest["score_mod"], Bound) or rest["score_mod"].mods.differentiable
    names += ["score_mod"] * bool(smooth and of_captured)
    names += [name for name in ("alibi_slopes", "q_bias", "k_bias", "sinks") if name in rest]
    if "mask" in rest and rest["mask"].is_floating_point():
        names.append("mask")
    found = attention_backward(q, k, v, *out_lse, dout, dlse, grads=names, backend=backend, **tables, **rest)
    own = {name: getattr(found, f"d{name}") for name in names if name != "score_mod"}
    return own | {f"captured {n}": x for n, x in enumerate(found.dscore_mod or ()) if x is not None}, out_lse


def errors(got, want):
    return {name: (got[name].double() - x.double()).abs().max().item() for name, x in want.items()}


def agree(got, want, tolerance, allowed=None):
    """Whether errors are below a part of the largest element, or twice the allowed ones."""
    assert got.keys() == want.keys()
    for name, error in errors(got, want).items():
        size = want[name].double().abs().max().item()
        assert error <= max(tolerance * size + 1e-6, 2 * (allowed or {}).get(name, 0.0)), (name, error, size)


def check(q, k, v, options, tolerance, beside_torch=False, backend="cpu", of_captured=True):
    """Against the oracle; with `beside_torch`, errors as large as those of the torch backend are allowed."""
    dout = draw(*q.shape[:-1], v.shape[-1], dtype=q.dtype, size=1.0)
    dlse = draw(*(q.shape[:-1]), size=1.0)
    want, out_lse = gradients(q, k, v, dout, dlse, options, "reference", None, of_captured)
    got, _ = gradients(q, k, v, dout, dlse, options, backend, out_lse, of_captured)
    allowed = None
    if beside_torch:
        allowed = errors(gradients(q, k, v, dout, dlse, options, "torch", out_lse, of_captured)[0], want)
    agree(got, want, tolerance, allowed)
    return got


OPTIONS = [
    {},
    {"window": (20, 3), "softcap": 12.0, "alibi_slopes": SLOPES},
    {"causal": True, "q_bias": draw(1, H, 45, size=1.0), "k_bias": draw(2, H, 70, size=1.0), "sinks": draw(H)},
    {"kv_lengths": torch.tensor([70, 33], dtype=torch.int32), "mask": draw(2, 1, 45, 70, size=1.0)},
    {"k_start": 3, "k_stride": 2, "q_stride": 2, "q_offset": 9},
    {"k_stride": 3, "q_offset": torch.tensor([7, 90], dtype=torch.int32)},
]


AXES = {
    "rows": lambda t: lambda s, b, h, q, k: s - t[h, q % 50] * torch.tanh(s / 9),
    "keys": lambda t: lambda s, b, h, q, k: s + t[h, k // 3] * 0.5,
    "distances": lambda t: lambda s, b, h, q, k: 20 * torch.tanh(s / 20) + t[h, q - k + 350],
    "buckets": lambda t: lambda s, b, h, q, k: s + t[h, (torch.log2((q - k).abs() + 1.0) * 4).int()],
    "cells": lambda t: lambda s, b, h, q, k: s * torch.sigmoid(t[h, (q * k + b) % 7]),
    "many cells": lambda t: lambda s, b, h, q, k: s + NEAR[q, k],
}


# What Triton sums: indices of one axis, whatever is computed from it
OF_AXIS = {
    "rows": lambda: source("q"),
    "keys": lambda: source("k"),
    "distances": lambda: make("sub", source("q"), source("k")),
}


class DrawOfAxis(Draw):
    """Draws functions whose float tensors have indices of one axis each."""

    def draw_index(self):
        r, x = self.random, OF_AXIS[self.random.choice([*OF_AXIS])]()
        form = r.randint(0, 4)
        if form == 0:
            return make(r.choice(("floordiv", "mod")), x, r.choice((2, 3, 7)))
        if form == 1:
            return make("where", make("lt", x, const(r.randint(0, 30))), make("abs", x), make("add", x, source("b")))
        return make("add", x, const(r.randint(0, 9))) if form == 2 else make("max", x, source("h")) if form == 3 else x

    def draw_float(self, depth):
        form = self.random.randint(0, 5) if depth > 0 else 5
        if form == 0:
            return load(self.random.choice((1, 2)), (self.draw_index(),), "float")
        if form == 1:
            return load(0, (self.random.choice((source("h"), source("b"))), self.draw_index()), "float")
        found = super().draw_float(depth)
        return source("s") if found.op == "load" and found.args[0] in (0, 1, 2) else found


def drawn_of_axis(seed):
    """Functions, and the tensors that they capture."""
    draw = DrawOfAxis(seed)
    first = load(0, (source("h"), draw.draw_index()), "float")
    score = make("add", make("mul", draw.draw_float(4), first), make("mul", source("s"), 0.5))
    return Bound(mods_of(to_text((score, draw.draw_bool(3) if seed % 3 else None), TENSORS)), captured())
