"""The oracle's gradients, and torch's in float64: against finite differences, for every option."""

from dataclasses import replace

import pytest
import torch
from torch.autograd import gradcheck

from tilewise.backends import reference
from tilewise.backends import torch as tiled
from tilewise.core.problem import GRADS
from tilewise.core.storage import StorageFormat
from tilewise.core.tensors import BackwardTensors
from tilewise.testing.case import Case, make
from tilewise.validation.backward import differentiable

FLOAT64 = StorageFormat("f64", torch.float64, 64)  # callers have no such one: the oracle is checked in its own type
SMALL = Case(B=2, H=2, Lq=5, Lk=7, D=3, Dv=2)
CASES = [
    SMALL,
    replace(SMALL, H=4, Hkv=2, causal=True),
    replace(SMALL, Lq=7, Lk=5, causal=True),  # rows that see nothing
    replace(SMALL, window=(2, 1)),
    replace(SMALL, Lq=9, Lk=9, chunk=4, causal=True),
    replace(SMALL, softcap=1.5, scale=0.7),
    replace(SMALL, scale=-0.4),
    replace(SMALL, offset=-2, causal=True, sinks=True),
    replace(SMALL, offset="rows", causal=True),
    replace(SMALL, lengths=(0, 6), sinks=True),
    replace(SMALL, sinks=True, softcap=3.0),
    replace(SMALL, q_bias="bh", k_bias="1h", causal=True, sinks=True, softcap=3.0),
    replace(SMALL, k_stride=2, q_stride=3, offset=1, causal=True, alibi="h"),
    replace(SMALL, sinks="none", lengths=(0, 6)),
    replace(SMALL, H=3, sinks="mixed"),
    replace(SMALL, alibi="h", causal=True),
    replace(SMALL, alibi="bh"),
    replace(SMALL, mask="qk"),
    *(replace(SMALL, mask=m, mask_kind="f32") for m in ("qk", "1k", "q1", "hqk", "h1k", "bhqk", "b11k", "b1q1")),
    replace(SMALL, mask="bhqk", mask_kind="f32", pattern="rows", softcap=2.0, alibi="bh", sinks=True, causal=True),
    Case(form="varlen", H=4, Hkv=2, D=3, q_lengths=(3, 0, 5), lengths=(4, 2, 5), causal=True, sinks=True),
    Case(form="varlen", H=2, D=3, q_lengths=(3, 4), lengths=(5, 6), used=(2, 6), mask="b1qk", mask_kind="f32"),
]  # fmt: skip


class ByBackend(torch.autograd.Function):
    """A call by a backend's `run` and `run_backward`, all of it in float64."""

    @staticmethod
    def forward(ctx, backend, problem, tensors, names, *leaves):
        t = replace(tensors, **with_leaves(tensors, names, leaves))
        t.out, t.lse = torch.empty_like(t.out), torch.empty_like(t.lse)
        backend.run(backend.plan(problem), t)
        ctx.held = backend, problem, t, names, [x.shape for x in leaves]
        return t.out, t.lse

    @staticmethod
    def backward(ctx, dout, dlse):
        backend, problem, t, names, shapes = ctx.held
        p = replace(problem, grads=tuple(names), dlse=True)
        made = {
            f"d{name}": torch.full(s, torch.nan, dtype=torch.float64) for name, s in zip(names, shapes, strict=True)
        }
        masked = t.lse.isinf()
        b = BackwardTensors(t, dout, torch.where(masked, 0.0, dlse), **made)
        backend.run_backward(backend.plan_backward(p), b)
        return None, None, None, None, *made.values()


def with_leaves(tensors, names, leaves):
    return {n: x.expand(tensors.mask.shape) if n == "mask" else x for n, x in zip(names, leaves, strict=True)}


@pytest.mark.parametrize("backend", [reference, tiled], ids=["reference", "torch"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_finite_differences(case, backend):
    call = make(case, slack=0.0).checked(return_lse=True)
    p, t = call.problem, call.tensors
    double = {n: getattr(t, n) for n in GRADS}
    t = replace(t, **{n: x.double() for n, x in double.items() if x is not None and x.dtype != torch.bool})
    t.out, t.lse = t.out.double(), t.lse.double()
    p = replace(p, q_dtype=torch.float64, k_format=FLOAT64, v_format=FLOAT64)
    if p.mask is not None and not p.mask.is_bool:
        p = replace(p, mask=replace(p.mask, dtype=torch.float64))
    leaves = []
    for name in differentiable(p):
        x = getattr(t, name)
        if name == "mask":
            x = x[tuple(slice(0, 1) if one else slice(None) for one in p.mask.broadcast)]
        if name in ("mask", "q_bias", "k_bias"):
            x = x.masked_fill(x == -torch.inf, -3.0)  # hidden cells have no finite differences; rules hide others
        leaves.append(x.clone().contiguous().requires_grad_())
    infinite = p.sinks and not bool(t.sinks.isfinite().all())

    def call_it(*given):
        if infinite:  # an infinite sink has no finite differences: only what is beside it is checked
            given = [t.sinks if n == "sinks" else x for n, x in zip(differentiable(p), given, strict=True)]
        out, lse = ByBackend.apply(backend, p, t, differentiable(p), *given)
        return out, torch.where(lse.isinf(), 0.0, lse)

    assert gradcheck(call_it, tuple(leaves), fast_mode=True)
