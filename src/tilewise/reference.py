"""The oracle: attention in float64, dense and plain. It defines what every backend must compute.

For one sequence, head h, query i at position `qpos`, key j at position `kpos`:

    s = scale * q.k;  softcap;  - slope * |qpos - kpos|;  + q_bias + k_bias;  + mask;  score_mod
    -inf where (i, j) is not visible
    p = softmax(s), with one more logit, the sink, that has no value
    out = dropout(p) v;  lse = log(sum exp(s))

A row that sees no key gives out = 0 and lse = -inf (or its sink). Values under hidden cells have no effect. A sink of
-inf is no sink; one of +inf takes all weight: out = 0, lse = +inf.

`gradients` are those of torch's autograd in float64. A row with an infinite lse contributes none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from .core.expression import cells
from .core.expression.evaluate import evaluate
from .core.problem import CAPTURED, Problem, captured_number
from .core.tensors import Sequence, Tensors, sequences


@dataclass(frozen=True, slots=True)
class Scores:
    """Attention of one sequence with its intermediate results, in the compute dtype."""

    scores: torch.Tensor  # [H, Lq, Lk], -inf where not visible
    probs: torch.Tensor  # [H, Lq, Lk]
    visible: torch.Tensor  # bool [H, Lq, Lk]
    out: torch.Tensor  # [H, Lq, Dv]
    lse: torch.Tensor  # [H, Lq]
    weights: torch.Tensor  # [H, Lq, Lk]: probs after dropout


def visible_cells(seq: Sequence) -> torch.Tensor:
    """Which (query, key) pairs of a sequence see each other: bool `[H, Lq, Lk]`."""
    p, device = seq.problem, seq.tensors.q.device
    qpos, kpos = seq.positions(slice(0, seq.q_len), slice(0, seq.kv_len))
    rules = p.rules
    left, right = rules.window
    seen = torch.ones(seq.q_len, seq.kv_len, dtype=torch.bool, device=device)
    if rules.causal:
        seen &= kpos <= qpos
    if left is not None:
        seen &= qpos - kpos <= left
    if right is not None:
        seen &= kpos - qpos <= right
    if rules.chunk:
        key_chunk, chunk = (torch.div(x, rules.chunk, rounding_mode="floor") for x in (kpos, qpos))
        seen &= key_chunk == chunk
    seen = seen.expand(p.heads, -1, -1)
    mask = seq.mask(slice(0, seq.q_len), slice(0, seq.kv_len))
    if mask is not None:
        seen = seen & (mask if mask.dtype == torch.bool else mask != -torch.inf)
    bias = seq.bias(slice(0, seq.q_len), slice(0, seq.kv_len), torch.float64)
    if bias is not None:
        seen = seen & (bias != -torch.inf)
    tree = seq.tree(slice(0, seq.q_len), slice(0, seq.kv_len))
    if tree is not None:
        seen = seen & tree
    chosen = seq.chosen(slice(0, seq.q_len), slice(0, seq.kv_len))
    seen = seen if chosen is None else seen & chosen
    if p.mods is not None and p.mods.mask is not None:
        own = cells.cells_of(seq.b, p.heads, qpos, kpos)
        seen = seen & evaluate([p.mods.mask], own, seq.tensors.captured, torch.float64)[0]
    return seen


def _scores(seq: Sequence, q: torch.Tensor, k: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Scores `[H, Lq, Lk]` with all that is added to them; where they are not visible they may be anything."""
    p, compute = seq.problem, q.dtype
    s = p.scale * _Product.apply(q, k, visible)
    if p.softcap:
        s = p.softcap * torch.tanh(s / p.softcap)
    qpos, kpos = seq.positions(slice(0, seq.q_len), slice(0, seq.kv_len))
    if seq.slopes is not None:
        s = s - seq.slopes.to(compute)[:, None, None] * (qpos - kpos).abs()
    bias = seq.bias(slice(0, seq.q_len), slice(0, seq.kv_len), compute)
    if bias is not None:
        s = s + bias
    mask = seq.mask(slice(0, seq.q_len), slice(0, seq.kv_len))
    if mask is not None and mask.dtype != torch.bool:
        s = s + mask.to(compute)
    if p.mods is None or p.mods.score is None:
        return s
    at = visible.nonzero(as_tuple=True)  # score_mod is evaluated where it matters
    own = {"b": torch.tensor(seq.b), "h": at[0], "q": qpos[at[1], 0], "k": kpos[0, at[2]]}
    own = {name: x.to(s.device) for name, x in own.items()}
    result = cells.modified(p.mods, s[at], own, seq.tensors.captured)
    return torch.full_like(s, -torch.inf).index_put(at, result)


def attend(seq: Sequence, compute: torch.dtype = torch.float64) -> Scores:
    """Attention of one sequence, every step in `compute`."""
    p, t = seq.problem, seq.tensors
    q = seq.q.to(compute)  # [H, Lq, D]
    k = seq.keys(0, seq.kv_len, compute).repeat_interleave(p.group, 0)  # [H, Lk, D]
    v = seq.values(0, seq.kv_len, compute).repeat_interleave(p.group, 0)  # [H, Lk, Dv]
    visible = visible_cells(seq)
    if p.mods is not None and p.mods.score is not None:
        with torch.no_grad():
            visible = visible & (_scores(seq, q, k, visible) != -torch.inf)  # its derivative there may be anything
    s = torch.where(visible, _scores(seq, q, k, visible), -torch.inf)

    logits, blank = s, ~visible.any(-1, keepdim=True)
    taken = torch.zeros_like(blank)
    if t.sinks is not None:
        sink = t.sinks.to(compute)[:, None, None].expand(-1, seq.q_len, 1)
        logits, blank, taken = torch.cat([s, sink], -1), blank & (sink == -torch.inf), sink == torch.inf
    constant = blank | taken  # no visible key, or all weight on the sink: such a row has no gradient
    logits = torch.where(constant, 0.0, logits)
    lse = _LogSum.apply(logits)
    lse = torch.where(constant[..., 0], torch.where(taken[..., 0], torch.inf, -torch.inf), lse)
    probs = torch.where(visible & ~constant, torch.softmax(logits, -1)[..., : seq.kv_len], 0.0)
    weights = seq.dropped(probs, slice(0, seq.q_len), slice(0, seq.kv_len))
    out = _Weighted.apply(weights, v, visible)
    return Scores(s, probs, visible, out, lse, weights)


def selected(weights: torch.Tensor, x: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """`weights @ x` over visible cells only: since 0 * inf is NaN, non-finite values go to the rows that see them."""
    finite = x.isfinite()
    total = weights @ torch.where(finite, x, 0.0)
    if bool(finite.all()):
        return total
    nonfinite = torch.where(finite, 0.0, x)[:, None]  # [H, 1, n, D]
    return total + torch.where(visible[..., None], weights[..., None] * nonfinite, 0.0).sum(-2)


class _LogSum(torch.autograd.Function):
    """`torch.logsumexp` whose gradient is a softmax. torch's own is exp(logits - lse), which does not sum to 1 if all
    logits are 1e30 or -1e30.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return torch.logsumexp(logits, -1)

    @staticmethod
    def backward(ctx: Any, dlse: torch.Tensor) -> torch.Tensor:
        (logits,) = ctx.saved_tensors
        return dlse[..., None] * torch.softmax(logits, -1)


class _Product(torch.autograd.Function):
    """`q @ k.mT`, with the gradients of a product over visible cells."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q, k, visible)
        return q @ k.mT

    @staticmethod
    def backward(ctx: Any, ds: torch.Tensor) -> Any:
        q, k, visible = ctx.saved_tensors
        ds = torch.where(visible, ds, 0.0)  # a softcap's derivative turns a hidden NaN into NaN again
        return selected(ds, k, visible), selected(ds.mT, q, visible.mT), None


class _Weighted(torch.autograd.Function):
    """`probs @ v` over visible cells."""

    @staticmethod
    def forward(ctx: Any, probs: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(probs, v, visible)
        return selected(probs, v, visible)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        probs, v, visible = ctx.saved_tensors
        return torch.where(visible, dout @ v.mT, 0.0), selected(probs.mT, dout, visible.mT), None


def statistics(s: Scores, first_query: int = 0, indices: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """The statistics of one sequence: `max_logits` and `entropy` `[H, Lq]`, `key_mass` `[H, Lk]` over the queries from
    `first_query` on, and `weights` at `indices` `[H, Lq, n]`, 0 for those that are no key.
    """
    some = s.probs != 0
    terms = torch.where(some, -s.probs * torch.where(some, s.probs, 1.0).log(), 0.0)
    none = s.scores.new_full((*s.scores.shape[:2], 1), -torch.inf)
    found = {
        "max_logits": torch.cat([s.scores, none], -1).amax(-1),
        "entropy": terms.sum(-1),
        "key_mass": s.probs[:, first_query:].sum(1),
    }
    if indices is not None:
        count = s.probs.shape[-1]
        at = torch.where((indices >= 0) & (indices < count), indices.long(), count)
        found["weights"] = torch.nn.functional.pad(s.probs, (0, 1)).gather(-1, at)
    return found


def reference(problem: Problem, tensors: Tensors, compute: torch.dtype = torch.float64) -> list[Scores]:
    """Attention of every sequence of a call."""
    return [attend(seq, compute) for seq in sequences(problem, tensors)]


def gradients(
    problem: Problem,
    tensors: Tensors,
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    compute: torch.dtype = torch.float64,
) -> dict[str, torch.Tensor]:
    """The gradients in `problem.grads`, in `compute`, in the form of `BackwardTensors`.

    `tensors.out` and `tensors.lse` are not read: the forward pass is evaluated again.
    """
    with torch.enable_grad():
        leaves, outputs = _differentiable(problem, tensors, dlse is not None, problem.grads, compute)
        pairs = [(x, (dout if x.ndim == 3 else dlse)[at].to(compute)) for x, at in outputs]  # type: ignore[index]
        reached = [pair for pair in pairs if pair[0].requires_grad]  # lse does not depend on v
        if not reached:
            return {name: torch.zeros_like(x) for name, x in leaves.items()}
        results, incoming = zip(*reached, strict=True)
        found = torch.autograd.grad(results, list(leaves.values()), incoming, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def directional(
    problem: Problem,
    tensors: Tensors,
    dout: torch.Tensor,
    dlse: torch.Tensor,
    tangents: dict[str, torch.Tensor],
    compute: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The derivatives of `out` and `lse` where inputs move by `tangents`, and the gradients in `problem.grads` of
    <dout, the first> + <dlse, the second>. All in `compute`, in the form of `gradients`.
    """
    moved = [torch.zeros(x.shape, dtype=compute, device=x.device) for x in (tensors.out, dlse)]
    with torch.enable_grad():
        names = tuple(dict.fromkeys((*problem.grads, *tangents)))
        leaves, outputs = _differentiable(problem, tensors, True, names, compute)
        outputs = [(x, at) for x, at in outputs if x.requires_grad]
        given = [(dout if x.ndim == 3 else dlse)[at].to(compute).requires_grad_() for x, at in outputs]
        results = [x for x, _ in outputs]
        grads = torch.autograd.grad(results, list(leaves.values()), given, create_graph=True, materialize_grads=True)
        by_name = dict(zip(leaves, grads, strict=True))
        total = torch.stack([(by_name[name] * x.to(compute)).sum() for name, x in tangents.items()]).sum()
        wanted = [*given, *(leaves[name] for name in problem.grads)]
        found = torch.autograd.grad(total, wanted, materialize_grads=True)
    for (x, at), y in zip(outputs, found, strict=False):
        moved[0 if x.ndim == 3 else 1][at] = y
    return moved[0], moved[1], dict(zip(problem.grads, found[len(given) :], strict=True))


def _differentiable(
    problem: Problem, tensors: Tensors, lse: bool, names: tuple[str, ...], compute: torch.dtype
) -> tuple[dict[str, torch.Tensor], list[tuple[torch.Tensor, Any]]]:
    """The inputs as leaves by name, and the outputs of each sequence with where they stand in the call's."""
    leaves, given = with_leaves(problem, tensors, names, compute)
    outputs: list[tuple[torch.Tensor, Any]] = []
    for seq in sequences(problem, given):
        at = seq.row, slice(None), slice(seq.q_start, seq.q_start + seq.q_len)
        result = attend(seq, compute)
        outputs += [(result.out, at)] + [(result.lse, at)] * lse
    return leaves, outputs


def with_leaves(
    problem: Problem, tensors: Tensors, names: tuple[str, ...], compute: torch.dtype
) -> tuple[dict[str, torch.Tensor], Tensors]:
    """The inputs of these names as leaves, and a call's tensors with them."""
    held = {
        name: getattr(tensors, name) if (number := captured_number(name)) is None else tensors.captured[number]
        for name in names
    }
    if problem.mask is not None and "mask" in held:
        held["mask"] = held["mask"][tuple(slice(0, 1) if one else slice(None) for one in problem.mask.broadcast)]
    leaves = {name: x.detach().to(compute, copy=True).requires_grad_() for name, x in held.items()}
    given: dict[str, Any] = dict(leaves)
    if "mask" in given:
        given["mask"] = given["mask"].expand(tensors.mask.shape)  # type: ignore[union-attr]
    captured = tuple(given.pop(f"{CAPTURED}{n}", x) for n, x in enumerate(tensors.captured))
    return leaves, replace(tensors, captured=captured, **given)
