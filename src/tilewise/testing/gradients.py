"""The backward half of the suite: gradients against the float64 oracle's, relative to the error of torch's arithmetic.

A backend gets the oracle's `out` and `lse`, rounded, and gradients filled with NaN. Its error in each gradient, as
relative RMS and maximum, may be at most twice (with softcap three times) that of the same formula in torch, in the same
dtype and from the same `out` and `lse`. A gradient of few elements, or from few query rows, counts as wrong only if it
also exceeds torch's error on several inputs.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence as Names
from dataclasses import dataclass

import torch

from ..backends import reference as oracle
from ..core.options import Options
from ..core.problem import Problem
from ..core.tensors import BackwardTensors, Sequence, sequences
from ..dispatch import planner
from ..reference import attend, gradients, visible_cells
from ..validation.backward import BackwardCall, backward, differentiable
from ..validation.calls import Call
from .case import Case, make
from .check import Mismatch, Verdict, within

# Least elements of a gradient: of fewer the RMS says little, and only the largest error is judged. And least query
# rows: everything that a row adds to a gradient has the error of its P.
FEW = 64


@dataclass
class Gradients:
    """The backward pass of a case over inputs with slack, and the same over clean ones, for the oracle."""

    case: Case
    call: BackwardCall
    clean: BackwardCall

    def run(self, backend: str | None) -> dict[str, torch.Tensor]:
        """The gradients by a backend, in the common form; their memory is filled with NaN before."""
        for gradient in self.call.tensors.gradients().values():
            gradient.fill_(float("nan"))
        plan = planner.choose(self.call.problem, backend, torch.get_num_threads())
        if self.call.problem.is_empty:  # never launched
            self.call.write_empty()
        else:
            planner.load_backward(plan.backend).run_backward(plan, self.call.tensors)
        return self.call.tensors.gradients()


def make_gradients(
    case: Case,
    device: str = "cpu",
    slack: float = float("nan"),
    grads: Names[str] | None = None,
    dlse: bool = True,
    dout: str = "",
    deterministic: bool = True,
) -> Gradients:
    """The backward pass of a case, with every gradient that it has unless `grads` says which.

    `dout` is the layout of the incoming gradient: "" contiguous, "expanded", "last" (a last dim of stride 2),
    "permuted".
    """
    calls = [_backward_call(case, device, x, grads, dlse, dout, deterministic) for x in (slack, 0.0)]
    return Gradients(case, *calls)


def _backward_call(
    case: Case, device: str, filler: float, grads: Names[str] | None, dlse: bool, dout: str = "",
    deterministic: bool = True, draw: int = 0,
) -> BackwardCall:  # fmt: skip
    inputs = make(case, device, filler, draw, sized=True)
    call = inputs.checked(return_lse=True)
    oracle.run(oracle.plan(call.problem), call.tensors)
    random = torch.Generator("cpu").manual_seed(zlib.crc32(str(case).encode()) + 1 + draw)
    incoming = torch.randn(call.out.shape, generator=random, dtype=torch.float32, device="cpu")
    incoming_lse = torch.randn(call.out.shape[:-1], generator=random, dtype=torch.float32, device="cpu").to(device)
    incoming = _with_strides(incoming.to(call.out.dtype).to(device), dout)
    if not dout:
        _spoil(call, incoming, incoming_lse, filler)
    names = grads or differentiable(call.problem)
    o = Options(layout=inputs.options.get("layout", "bhld"), deterministic=deterministic)
    return backward(call, o, call.lse, incoming, incoming_lse if dlse else None, names)


def _with_strides(x: torch.Tensor, how: str) -> torch.Tensor:
    if how == "expanded":
        return x[:1, :1, :1].expand(x.shape)
    if how == "last":
        return torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2]
    return x.transpose(0, 1).contiguous().transpose(0, 1) if how == "permuted" else x


def _spoil(call: Call, dout: torch.Tensor, dlse: torch.Tensor, filler: float) -> None:
    """Fills rows with `lse = -inf`, which see nothing, with `filler`."""
    assert call.lse is not None
    masked = call.lse == -torch.inf
    for x in (dout, dlse):
        x[masked] = torch.tensor(filler, device=x.device).to(x.dtype)  # most versions of torch refuse -1e30 in float16


def check_gradients(case: Case, backend: str | None, device: str = "cpu", **how: object) -> Verdict:
    """Runs the backward pass of a case by a backend and judges each gradient."""
    made = make_gradients(case, device, **how)  # type: ignore[arg-type]
    return judge_gradients(made, made.run(backend))


def judge_gradients(made: Gradients, got: dict[str, torch.Tensor]) -> Verdict:
    """Raises `Mismatch` unless each gradient is right."""
    p, b = made.clean.problem, made.clean.tensors
    _check_zeros(p, b, got)
    exact = gradients(p, b.forward, b.dout, b.dlse)
    plain = same_formula(p, b)
    factor = 3.0 if p.softcap else 2.0
    verdicts = [Verdict(0.0, 0.0)]
    for name in p.grads:
        dtype = got[name].dtype
        allowed = (plain[name].to(dtype).double() - exact[name]).abs()
        try:
            verdicts.append(_judge(f"d{name}", got[name], allowed, exact[name], factor))
        except Mismatch:
            few = min(got[name].numel(), p.heads * (p.total_q if p.packed_q else p.batch * p.q_len))
            if few >= FEW:
                raise
            error = _error_of_draws(made, name, -(-FEW // few))
            allowed = allowed.maximum(error * same_formula(p, b, sizes=True)[name].double())
            verdicts.append(_judge(f"d{name}", got[name], allowed, exact[name], factor))
    return max(verdicts, key=lambda v: v.error / max(v.bound, 1e-300))


def _error_of_draws(made: Gradients, name: str, draws: int) -> float:
    """torch's largest error in a gradient on so many inputs, relative to the sums of absolute terms. On one input torch
    may happen to get all of a few elements right.
    """
    p, worst = made.clean.problem, 0.0
    for n in range(1, draws + 1):
        call = _backward_call(made.case, p.device.type, 0.0, (name,), p.dlse, draw=n)
        b = call.tensors
        exact = gradients(call.problem, b.forward, b.dout, b.dlse)[name]
        plain = same_formula(call.problem, b)[name].to(b.gradients()[name].dtype)
        sizes = same_formula(call.problem, b, sizes=True)[name].double()
        worst = max(worst, float(((plain.double() - exact).abs() / sizes.clamp_min(1e-300)).max()))
    return worst


def _check_zeros(p: Problem, b: BackwardTensors, got: dict[str, torch.Tensor]) -> None:
    """Rows that see no key, keys that no row sees and hidden cells of a mask must have gradients of exactly 0."""
    reached = {name: torch.zeros(x.shape, dtype=torch.bool, device=x.device) for name, x in got.items()}
    for seq in sequences(p, b.forward):
        cells = visible_cells(seq)
        kv_row = 0 if p.form == "varlen" else seq.b
        if "q_bias" in got:
            reached["q_bias"][seq.row, :, seq.q_start : seq.q_start + seq.q_len] |= cells.any(-1)
        if "k_bias" in got:
            reached["k_bias"][kv_row, :, seq.kv_start : seq.kv_start + seq.kv_len] |= cells.any(1)
        for name in set(got) & {"k", "v"}:
            keys = reached[name][kv_row, :, seq.kv_start : seq.kv_start + seq.kv_len]
            keys |= cells.any(1).unflatten(0, (p.kv_heads, p.group)).any(1)[..., None]
        if "q" in got:
            reached["q"][seq.row, :, seq.q_start : seq.q_start + seq.q_len] |= cells.any(-1)[..., None]
        if "mask" in got and p.mask is not None:
            for dim, one in enumerate(p.mask.broadcast[1:]):
                cells = cells.any(dim, keepdim=True) if one else cells
            reached["mask"][0 if p.mask.broadcast[0] else seq.b, :, : seq.q_len, : seq.kv_len] |= cells
    for name in set(got) & {"q", "k", "v", "mask", "q_bias", "k_bias"}:
        if bool((got[name][~reached[name]] != 0).any()):
            raise Mismatch(f"d{name}: what is hidden must get exactly 0")


def _judge(name: str, got: torch.Tensor, allowed: torch.Tensor, exact: torch.Tensor, factor: float) -> Verdict:
    if got.numel() == 0:
        return Verdict(0.0, 0.0)
    ulp = torch.finfo(got.dtype).eps
    error = (got.double() - exact).abs()
    sizes = exact.abs().amax(-1, keepdim=True) if exact.ndim == 4 else exact.abs().amax()
    bound = (factor * allowed.max() + ulp * sizes).expand_as(exact)
    verdict = within(name, got, exact, error, bound)
    rms, torch_rms, size = (float(x.square().mean().sqrt()) for x in (error, allowed, exact))
    most = factor * torch_rms + torch.finfo(torch.float32).eps * size
    if not rms <= most and got.numel() >= FEW:
        raise Mismatch(f"{name}: an error of {rms / size:.3g} (relative RMS) where torch's is {torch_rms / size:.3g}")
    return verdict


def same_formula(problem: Problem, tensors: BackwardTensors, *, sizes: bool = False) -> dict[str, torch.Tensor]:
    """The gradients as torch computes them in q's dtype: scores and sums in float32, the weights P and dS rounded.
    With `sizes`, the sums of the absolute values of all terms.

    P = exp(s - lse);  dP = dropout(dout v);  dS = P (dP - delta), delta = dout.out - dlse;  through softcap and scale:
    dQ = dS K, dK = dS Q, dV = dropout(P) dout;  sinks: -exp(sink - lse) delta;  mask: dS;  slopes: -dS |qpos - kpos|;
    biases: sums of dS over keys or queries
    """
    p, t = problem, tensors.forward
    wide = torch.float32
    total = {name: torch.zeros(x.shape, dtype=wide, device=x.device) for name, x in tensors.gradients().items()}
    for seq in sequences(p, t):
        _add_sequence(seq, tensors, total, sizes)
    return {name: x.abs() for name, x in total.items()} if sizes else total


def _add_sequence(seq: Sequence, tensors: BackwardTensors, total: dict[str, torch.Tensor], sizes: bool) -> None:
    p, wide = seq.problem, torch.float32
    rows = slice(seq.q_start, seq.q_start + seq.q_len)
    keys = slice(seq.kv_start, seq.kv_start + seq.kv_len)
    kv_row = 0 if p.form == "varlen" else seq.b

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(p.q_dtype).to(wide)

    r = attend(seq, wide)
    q, dout, out = seq.q.to(wide), tensors.dout[seq.row, :, rows].to(wide), seq.out.to(wide)
    k, v = (x(0, seq.kv_len, wide).repeat_interleave(p.group, 0) for x in (seq.keys, seq.values))  # [H, Lk, D]
    slope = torch.ones(())
    if p.softcap:
        capped = p.softcap * torch.tanh(p.scale * (q @ k.mT) / p.softcap)
        slope = 1 - (capped / p.softcap).square()
    dlse = tensors.dlse[seq.row, :, rows] if tensors.dlse is not None else torch.zeros_like(out[..., 0])
    if sizes:
        q, k, v, out, dout, dlse = q.abs(), k.abs(), v.abs(), out.abs(), dout.abs(), -dlse.abs()
    assert seq.lse is not None
    live = seq.lse.isfinite()
    lse, dout = torch.where(live, seq.lse, 0.0), torch.where(live[..., None], dout, 0.0)
    delta = (dout * out).sum(-1) - torch.where(live, dlse, 0.0)
    probs = torch.where(r.visible & live[..., None], (r.scores - lse[..., None]).exp(), 0.0)
    dp = dout @ v.mT
    whole = slice(0, seq.q_len), slice(0, seq.kv_len)
    dp = seq.dropped(dp, *whole)
    ds = probs * (dp + delta[..., None] if sizes else dp - delta[..., None])  # [H, Lq, Lk]
    if "sinks" in total:
        assert seq.tensors.sinks is not None
        total["sinks"] -= torch.where(live, (seq.tensors.sinks[:, None] - lse).exp() * delta, 0.0).sum(-1)
    if "mask" in total and p.mask is not None:
        summed = [dim for dim, one in zip((0, 1, 2), p.mask.broadcast[1:], strict=True) if one]
        part = ds.sum(summed, keepdim=True) if summed else ds
        total["mask"][0 if p.mask.broadcast[0] else seq.b, :, : seq.q_len, : seq.kv_len] += part
    if "q_bias" in total:
        total["q_bias"][seq.row, :, rows] += ds.sum(-1)
    if "k_bias" in total:
        total["k_bias"][kv_row, :, keys] += ds.sum(-2)
    if "alibi_slopes" in total:
        qpos, kpos = seq.positions(slice(0, seq.q_len), slice(0, seq.kv_len))
        total["alibi_slopes"][seq.b] -= (ds * (qpos - kpos).abs()).sum((-1, -2))
    ds = ds * slope
    if "q" in total:
        total["q"][seq.row, :, rows] += p.scale * (rounded(ds) @ k)
    group = (p.kv_heads, p.group)
    if "k" in total:
        total["k"][kv_row, :, keys] += p.scale * (rounded(ds).mT @ q).unflatten(0, group).sum(1)
    if "v" in total:
        total["v"][kv_row, :, keys] += (rounded(seq.dropped(probs, *whole)).mT @ dout).unflatten(0, group).sum(1)
