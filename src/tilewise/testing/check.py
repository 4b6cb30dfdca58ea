"""Judges results: the error against the float64 oracle, relative to that of torch's own arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ..core.tensors import Sequence, Tensors, sequences
from ..reference import Scores, attend, selected
from ..validation.calls import Call
from .case import Case, make

MANY = 256  # rows on which torch's error is measured before a randomly drawn case counts as wrong


class Mismatch(AssertionError):
    """A result that violates the contract."""


@dataclass(frozen=True)
class Verdict:
    """The error of the element that is nearest to its bound, and that bound."""

    error: float
    bound: float


def torch_math(seq: Sequence) -> tuple[torch.Tensor, Scores]:
    """Plain torch on the same inputs: scores and softmax in float32, weights and values in q's dtype."""
    p = seq.problem
    result = attend(seq, torch.float32)
    values = seq.values(0, seq.kv_len, torch.float32).repeat_interleave(p.group, 0)
    if p.q_dtype != torch.float32:
        values = values.to(p.q_dtype).float()
    out = selected(result.weights.to(p.q_dtype).float(), values, result.visible)
    return out.to(p.q_dtype), result


def on_host(call: Call) -> Call:
    """The call on a device with float64: an Apple GPU has none."""
    if call.problem.device.type != "mps":
        return call
    attributes: dict[str, Any] = {f.name: getattr(call.tensors, f.name) for f in fields(call.tensors)}
    moved: dict[str, Any] = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in attributes.items()}
    tensors = Tensors(**moved)
    return replace(call, problem=replace(call.problem, device=torch.device("cpu")), tensors=tensors)


def torch_errors(call: Call) -> tuple[float, float]:
    """The largest error that torch's own arithmetic makes in `out` and in `lse`."""
    call = on_host(call)
    errors = [(0.0, 0.0), *(_errors(seq, attend(seq)) for seq in sequences(call.problem, call.tensors))]
    return max(e[0] for e in errors), max(e[1] for e in errors)


def _errors(seq: Sequence, exact: Scores) -> tuple[float, float]:
    """Errors of `out` and `lse`. The error of the scores counts as that of `lse`, which moves as much: there are many
    scores, while there may be a single lse.
    """
    out, plain = torch_math(seq)
    lse = max(largest_error(plain.scores, exact.scores), largest_error(plain.lse, exact.lse))
    return largest_error(out, exact.out), lse


def check_call(call: Call, out: torch.Tensor, lse: torch.Tensor, errors: tuple[float, float] | None = None) -> Verdict:
    """Raises `Mismatch` unless `out` and `lse` are right.

    Each element may be off by 2 (with softcap 3) times the largest error of torch's own arithmetic on the same inputs
    (or by `errors`), and one ulp of the largest output of its row.
    """
    if call.problem.device.type == "mps":
        call, out, lse = on_host(call), out.cpu(), lse.cpu()
    p = call.problem
    factor = 3.0 if p.softcap else 2.0
    covered = torch.zeros(out.shape[2], dtype=torch.bool, device="cpu")
    exact_rows, own_errors = [], [(0.0, 0.0)]
    for seq in sequences(p, call.tensors):
        exact = attend(seq)
        rows = slice(seq.q_start, seq.q_start + seq.q_len)
        covered[rows] = True
        exact_rows.append(((seq.row, slice(None), rows), exact.out, exact.lse))
        if errors is None:
            own_errors.append(_errors(seq, exact))
    out_error, lse_error = errors or (max(e[0] for e in own_errors), max(e[1] for e in own_errors))
    verdicts = [Verdict(0.0, 0.0)]
    for place, exact_out, exact_lse in exact_rows:
        verdicts.append(judge("out", out[place], exact_out, factor * out_error, p.q_dtype))
        verdicts.append(judge("lse", lse[place], exact_lse, factor * lse_error, torch.float32))
    if bool((out[:, :, ~covered] != 0).any()) or bool((lse[:, :, ~covered] != -torch.inf).any()):
        raise Mismatch("rows that belong to no sequence must give 0 and -inf")
    return max(verdicts, key=lambda v: v.error / max(v.bound, 1e-300))


def check_case(case: Case, backend: str | None, device: str = "cpu", draws: int = 1) -> Verdict:
    """Runs a case into a poisoned output and judges it.

    With `draws` above 1 torch's error is the largest on that many inputs, or on fewer with `MANY` rows in all. Before a
    result counts as wrong, it is measured on inputs with `MANY` rows that see a key. This looser bound is for random
    sizes, where an output may be two numbers that torch happens to get exactly right. Named cases are judged on their
    own inputs alone.
    """
    return _poisoned(case, backend, device, draws)[0]


def _poisoned(
    case: Case, backend: str | None, device: str, draws: int, *, sized: bool = False
) -> tuple[Verdict, tuple[torch.Tensor, torch.Tensor]]:
    inputs = make(case, device, sized=sized)
    poison = torch.full_like(inputs.checked().out, float("nan"))
    call = inputs.checked(out=poison)
    result = inputs.call(backend, out=poison, return_lse=True)
    if result.out.data_ptr() != poison.data_ptr():
        raise Mismatch("out= was not the tensor that came back")
    state = call.tensors.out, inputs.common(result.lse)
    rows = case.H * (sum(case.q_lengths) if case.q_lengths else case.B * case.Lq)
    few = min(draws, draws_of(rows))
    try:
        verdict = check_call(call, *state, worst_errors(case, device, few, sized=sized))
    except Mismatch:
        many = draws_of(rows_that_see(call)) if draws > 1 else 1
        if many <= few:
            raise
        verdict = check_call(call, *state, worst_errors(case, device, many, sized=sized))
    return verdict, state


def draws_of(rows: int) -> int:
    """How many inputs of so many rows have `MANY` rows in all."""
    return -(-MANY // max(1, rows))


def rows_that_see(call: Call) -> int:
    """The number of rows that see a key: others have no error to measure."""
    call = on_host(call)
    return sum(int(attend(seq).lse.isfinite().sum()) for seq in sequences(call.problem, call.tensors))


def worst_errors(case: Case, device: str, draws: int, *, sized: bool = False) -> tuple[float, float] | None:
    """The largest `torch_errors` on so many inputs of a case; None for one, which `check_call` measures itself."""
    if draws == 1:
        return None
    errors = [torch_errors(make(case, device, draw=n, sized=sized).checked()) for n in range(draws)]
    return max(e[0] for e in errors), max(e[1] for e in errors)


def check_repeats(
    case: Case,
    change: Case,
    backend: str | None,
    device: str = "cpu",
    draws: int = 1,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Verdict:
    """Checks a case and one with an option changed as `check_case` does; then repeats the first, the other and the
    first, within `around`. The repeats run twice and without checks of values, so that they come from the call cache:
    they must give the same bits. All are `sized`, so that a GPU has one plan for them.
    """
    judged = {variant: _poisoned(variant, backend, device, draws, sized=True) for variant in (case, change)}
    for variant in (case, change, case):
        inputs = make(variant, device, sized=True)
        with around():
            states = [inputs.call(backend, return_lse=True, validate=False) for _ in range(2)]
        for state in states:
            for got, want in zip(inputs.common_state(state), judged[variant][1], strict=True):
                if not bool(((got == want) | (got.isnan() & want.isnan())).all()):
                    raise Mismatch(f"{variant}: a repeated call differs from the first")
    return max((verdict for verdict, _ in judged.values()), key=lambda v: v.error / max(v.bound, 1e-300))


def largest_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error where the exact result is finite."""
    finite = exact.isfinite()
    return float((got.double() - exact)[finite].abs().max()) if bool(finite.any()) else 0.0


def judge(name: str, got: torch.Tensor, exact: torch.Tensor, allowed: float, dtype: torch.dtype) -> Verdict:
    """Raises `Mismatch` unless each element is within `allowed` and one ulp of `dtype` (for `out`, of its row)."""
    if got.numel() == 0:
        return Verdict(0.0, 0.0)
    got = got.double()
    finite = exact.isfinite()
    if bool((got[~finite] != exact[~finite]).any()):
        raise Mismatch(f"{name}: {got[~finite][:4].tolist()} where the oracle has {exact[~finite][:4].tolist()}")
    sizes = torch.where(finite, exact.abs(), 0.0)
    largest = sizes.amax(-1, keepdim=True) if name == "out" else sizes
    bound = (allowed + largest * torch.finfo(dtype).eps).expand_as(exact)
    return within(name, got, exact, torch.where(finite, (got - exact).abs(), 0.0), bound)


def within(name: str, got: torch.Tensor, exact: torch.Tensor, error: torch.Tensor, bound: torch.Tensor) -> Verdict:
    """Raises `Mismatch` unless each element's error is within its bound."""
    wrong = ~(error <= bound)  # NaN is never within a bound
    if bool(wrong.any()):
        where = tuple(wrong.nonzero()[0].tolist())
        raise Mismatch(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} elements are off; at {where} "
            f"got {float(got[where])}, the oracle has {float(exact[where])}, the bound is {float(bound[where]):.3g}"
        )
    nearest = int((error / bound.clamp_min(1e-300)).argmax())  # to its bound; elements differ in theirs
    return Verdict(float(error.flatten()[nearest]), float(bound.flatten()[nearest]))
