"""Properties of gradients, whatever the numbers. Each takes a backend and a device and raises `Mismatch`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..backends import reference as oracle
from ..core.mask_rules import NO_RULES
from ..core.problem import MaskSpec
from ..core.tensors import sequences
from ..reference import visible_cells
from .case import Case
from .check import Mismatch
from .gradients import Gradients, check_gradients, judge_gradients, make_gradients

Property = Callable[[str | None, str], None]
GRADIENT_PROPERTIES: dict[str, Property] = {}


def prop(fn: Property) -> Property:
    GRADIENT_PROPERTIES[fn.__name__] = fn
    return fn


SOME = [
    Case(Hkv=2, Lq=70, Lk=200, D=64, causal=True),
    Case(Hkv=2, Lq=70, Lk=200, D=64, dtype="f16", window=(30, 5), sinks=True),
    Case(B=3, Hkv=1, Lq=40, Lk=90, D=64, lengths=(90, 1, 44), causal=True, softcap=5.0, dtype="bf16"),
    Case(Lq=50, Lk=70, mask="h1k", mask_kind="f32", alibi="h"),
    Case(form="varlen", q_lengths=(70, 1, 33), lengths=(70, 90, 33), causal=True),
]


def kept(made: Gradients, backend: str | None) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in made.run(backend).items()}


def same(what: str, a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    for name, x in a.items():
        if not torch.equal(x, b[name]):  # NaN is equal to nothing
            raise Mismatch(f"{what}: d{name} differs, by up to {float((x - b[name]).abs().max()):.3g}")


@prop
def gradients_repeat(backend: str | None, device: str) -> None:
    """The same call gives the same bits."""
    for case in SOME:
        made = make_gradients(case, device)
        first = kept(made, backend)
        for _ in range(3):
            same(str(case), first, kept(made, backend))


@prop
def slack_does_not_matter(backend: str | None, device: str) -> None:
    """NaN, Inf or numbers past a length, in padding rows, and in dout of a row that sees nothing, have no effect."""
    for case in (
        SOME[2],
        SOME[4],
        Case(Lq=60, Lk=40, causal=True, dtype="f16"),
        Case(Lq=50, mask="qk", pattern="rows"),
    ):
        first = kept(make_gradients(case, device), backend)
        for slack in (float("inf"), -1e30, 0.0):
            same(f"{case} with {slack} in the slack", first, kept(make_gradients(case, device, slack), backend))


@prop
def any_subset(backend: str | None, device: str) -> None:
    """Each gradient alone and in pairs, with and without a gradient of `lse`."""
    case = Case(Hkv=2, Lq=40, Lk=70, mask="1qk", mask_kind="f32", sinks=True, alibi="h", causal=True)
    for grads in (("q",), ("k",), ("v",), ("mask",), ("sinks",), ("alibi_slopes",), ("q", "v"), ("k", "v", "mask")):
        check_gradients(case, backend, device, grads=grads)
        check_gradients(case, backend, device, grads=grads, dlse=False)
    for case in SOME:
        check_gradients(case, backend, device, dlse=False)


@prop
def any_strides_of_dout(backend: str | None, device: str) -> None:
    for case in (SOME[0], replace(SOME[0], dtype="bf16"), SOME[4], replace(SOME[0], layout="blhd")):
        for how in ("expanded", "last", "permuted"):
            check_gradients(case, backend, device, dout=how)


@prop
def not_deterministic(backend: str | None, device: str) -> None:
    """`deterministic=False` must be right too."""
    for case in SOME:
        check_gradients(case, backend, device, deterministic=False)


@prop
def hidden_cells_do_not_matter(backend: str | None, device: str) -> None:
    """A non-finite key affects only rows that see it, a non-finite query only the keys that it sees."""
    for dtype in ("f32", "f16", "bf16"):
        for rules in (
            {"causal": True},
            {"window": (5, 3)},
            {"chunk": 16},
            {"mask": "qk"},
            {"mask": "qk", "mask_kind": "f32"},
        ):
            case = Case(B=1, Hkv=2, Lq=70, dtype=dtype, **rules)
            made = make_gradients(case, device)
            clean = kept(made, backend)
            call = made.call
            visible = next(visible_cells(seq) for seq in sequences(call.problem, call.tensors.forward))[0]  # [Lq, Lk]
            for name, unseen, gone in (
                ("k", ~visible[:, 40], ("q",)),
                ("v", ~visible[:, 40], ("q",)),
                ("q", ~visible[40], ("k", "v")),
            ):
                for filler in (float("nan"), float("inf")):
                    got = _with_filler(make_gradients(case, device), name, filler, backend)
                    what = f"{case}: {filler} in {name}[40]"
                    same(what, {g: clean[g][:, :, unseen] for g in gone}, {g: got[g][:, :, unseen] for g in gone})


def _with_filler(made: Gradients, name: str, filler: float, backend: str | None) -> dict[str, torch.Tensor]:
    """The gradients, and the forward results, with `filler` in row 40 of q, k or v."""
    t: Any = made.call.tensors.forward
    getattr(t, name)[:, :, 40] = filler
    oracle.run(oracle.plan(made.call.problem), t)
    return kept(made, backend)


@prop
def rules_equal_masks(backend: str | None, device: str) -> None:
    """A float mask of 0 and -inf that hides what rules hide has the same gradients, and one of its own."""
    strided = {"causal": True, "window": (50, None), "offset": 4, "k_start": 2, "k_stride": 3, "q_stride": 4}
    for rules in ({"causal": True}, {"window": (9, 4)}, {"chunk": 20}, strided):
        made = make_gradients(Case(Lq=60, Lk=90, **rules), device, grads=("q", "k", "v"))
        call = made.call
        visible = torch.stack([visible_cells(seq) for seq in sequences(call.problem, call.tensors.forward)])
        call.tensors.forward.mask = visible
        call.problem = replace(call.problem, rules=NO_RULES, mask=MaskSpec(torch.bool, (False,) * 4))
        judge_gradients(made, made.run(backend))
