"""Properties of gradients, whatever the numbers. Each takes a backend and a device and raises `Mismatch`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..backends import reference as oracle
from ..core.mask_rules import NO_RULES
from ..core.problem import MaskSpec
from ..core.storage import FLOATS
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


SLACK = [SOME[2], SOME[4], Case(Lq=60, Lk=40, causal=True, dtype="f16"), Case(Lq=50, mask="qk", pattern="rows")]


@prop
def slack_does_not_matter(backend: str | None, device: str) -> None:
    """NaN, Inf or numbers past a length, in padding rows, and in dout of a row that sees nothing, have no effect."""
    for case in SLACK:
        huge = max(-1e15, torch.finfo(FLOATS[case.dtype]).min)  # finite in this dtype, and so are its products
        finite = [kept(make_gradients(case, device, slack), backend) for slack in (huge, 0.0)]
        same(f"{case} with {huge:.3g} in the slack", *finite)
        # Products of -1e30 overflow: such a pass may have to be computed again, as with NaN, and in another order.
        for slack in (float("nan"), float("inf"), -1e30):
            check_gradients(case, backend, device, slack=slack)


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


class Spoilt(NamedTuple):
    """Gradients with NaN or Inf in a row of q, k or v, beside those without."""

    what: str
    made: Gradients  # without
    clean: dict[str, torch.Tensor]
    got: dict[str, torch.Tensor]
    unseen: torch.Tensor  # bool: rows of these gradients that the spoilt row must not reach
    gone: tuple[str, ...]


def spoilt(backend: str | None, device: str) -> Iterator[Spoilt]:
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
                    yield Spoilt(f"{case}: {filler} in {name}[40]", made, clean, got, unseen, gone)


@prop
def hidden_cells_do_not_matter(backend: str | None, device: str) -> None:
    """A non-finite key affects only rows that see it, a non-finite query only the keys that it sees.

    The other rows are right. Their last bits may differ, since a backend may compute such a pass again in another way.
    """
    for x in spoilt(backend, device):
        rows = x.unseen[:, None]
        try:
            judge_gradients(x.made, x.clean | {g: torch.where(rows, x.got[g], x.clean[g]) for g in x.gone})
        except Mismatch as error:
            raise Mismatch(f"{x.what}: {error}") from None


def hidden_values_change_no_bit(backend: str | None, device: str) -> None:
    """Of backends that compute nothing again: what is hidden changes no bit. Not required of every backend."""
    for case in SLACK:
        first, *others = (kept(make_gradients(case, device, x), backend) for x in (0.0, float("nan"), float("inf")))
        for other in others:
            same(f"{case} with slack", first, other)
    for x in spoilt(backend, device):
        same(x.what, *({g: grads[g][:, :, x.unseen] for g in x.gone} for grads in (x.clean, x.got)))


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
