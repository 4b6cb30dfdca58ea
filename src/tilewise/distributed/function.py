"""Attention over a ring of ranks as one autograd function.

Forward: while the parts of a round are computed, the keys of the next round are in transit. Results of parts are merged
in float32, in the order of rounds.
Backward: keys are sent again in the same rounds. Each part has the `out` and `lse` of all keys, so that its gradients
add up. Gradients of keys and values go directly to their owner while the next round is computed.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Generator
from contextlib import closing
from functools import partial
from typing import Any

import torch

from ..autograd import AttentionGradients
from ..core.problem import CAPTURED, captured_number
from ..errors import no_double_backward
from .exchange import GradReturn, KVReceive, drained_on_error
from .pair_call import Call, Unit, add_to_mask, documents, part_of_bias, rows
from .partial_merge import GradSum, MergedState, sinks_by_head
from .schedule import Range

EXTRAS = ("mask", "sinks", "alibi_slopes", "q_bias", "k_bias", "key_indices")
HEAD_DIMS = {"mask": -3, "q_bias": -2, "k_bias": -2, "key_indices": -3}  # the last dim in the others
MOST_GROUPS = 8  # of heads, into which a gather is cut
LEAST_ROWS = 2**16  # query rows of such a group, over all its heads: fewer do not fill a GPU


def head_groups(call: Call, heads: int, kv_heads: int) -> list[Range]:
    """Groups of KV heads that are sent together: one in a ring; several in a gather, to overlap sending and computing.

    Equal on all ranks, even if their numbers of tokens differ. `heads` counts q's heads over all batch rows.
    """
    if not call.task.gather or call.ranks.size == 1:
        return [(0, kv_heads)]
    tokens = sum(piece.size for pieces in call.task.q_pieces for piece in pieces) // call.task.ranks
    groups = min(MOST_GROUPS, tokens * heads // LEAST_ROWS)
    size = max(1, -(-kv_heads // max(1, groups)))
    return [(lo, min(lo + size, kv_heads)) for lo in range(0, kv_heads, size)]


def work_of(call: Call, q: torch.Tensor, k: torch.Tensor) -> list[Any]:
    """A list of (KV heads, round, its parts)."""
    heads = q.shape[call.head] * (1 if call.packed else q.shape[0])
    groups = head_groups(call, heads, k.shape[call.head])
    return [(kv, round, units) for kv in groups for round, units in call.rounds]


def receive_rounds(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Generator[tuple[Any, ...], None, None]:
    """Yields (KV heads, their query heads, round, its parts, its K and V), with the next round's in transit.

    The caller closes it, also after an error: closing waits for messages in transit.
    """
    group = q.shape[call.head] // k.shape[call.head] if k.shape[call.head] else 1
    row_caches: defaultdict[Range, Any] = defaultdict(dict)  # rows of some heads that are sent to several ranks

    def receive(kv: Range, round: Any) -> KVReceive:
        kv_part = tuple(x.narrow(call.head, kv[0], kv[1] - kv[0]) for x in (k, v))
        return KVReceive(call.ranks, round, kv_part, call.seq, row_caches[kv])

    work = work_of(call, q, k)
    in_transit: list[KVReceive] = []
    with drained_on_error(in_transit):
        in_transit += [receive(kv, round) for kv, round, _ in work[:1]]
        for i, (kv, round, units) in enumerate(work):
            in_transit += [receive(*following[:2]) for following in work[i + 1 : i + 2]]
            yield kv, (kv[0] * group, kv[1] * group), round, units, in_transit.pop(0).buffer()


class Attention(torch.autograd.Function):
    """`(out, lse)` of this rank's queries over all ranks' keys."""

    @staticmethod
    def forward(ctx: Any, call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *extras: Any) -> Any:
        present = {name: x for name, x in zip((*EXTRAS, *call.captured), extras, strict=True) if x is not None}
        out, lse, rounding = forward(call, q, k, v, present, exact=True)
        ctx.call = call
        ctx.save_for_backward(q, k, v, out, lse, rounding, *extras)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise no_double_backward()
        extra_names = (*EXTRAS, *ctx.call.captured)
        names = ("q", "k", "v", *extra_names)
        q, k, v, out, lse, rounding, *extras = ctx.saved_tensors
        wanted = tuple(name for name, needed in zip(names, ctx.needs_input_grad[1:], strict=True) if needed)
        dout = torch.zeros_like(out) if dout is None else dout
        if rounding is not None and q.dtype == torch.float32:  # lse's rounding error scales P = exp(s - lse)
            dout = dout * rounding.neg().exp()[..., None]
            dlse = dlse if dlse is None else dlse * rounding.neg().exp()
        elif rounding is not None:  # delta from the merged out before rounding: parts were rounded already
            correction = (dout.float() * (out.float() - rounding)).sum(-1)
            dlse = correction if dlse is None else dlse + correction
        present = {name: x for name, x in zip(extra_names, extras, strict=True) if x is not None}
        grads = backward(ctx.call, (q, k, v, out, lse, dout, dlse), present, wanted)
        return (None, *(grads.get(name) for name in names))


def _head_slices(extras: dict[str, Any], heads: Range, kv: Range) -> dict[str, Any]:
    """The slices of masks, sinks, slopes and indices for some heads; captured tensors whole."""
    slices = {}
    for name, x in extras.items():
        if captured_number(name) is not None:
            slices[name] = x
            continue
        dim = HEAD_DIMS.get(name, -1)
        lo, hi = kv if name == "key_indices" else heads
        has_heads = x.ndim >= (4 if name == "key_indices" else -dim) and x.shape[dim] > 1
        slices[name] = x.narrow(dim, lo, hi - lo) if has_heads else x
    return slices


def forward(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: dict[str, Any], exact: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`out`, `lse` and, if `exact` and parts were merged, what `backward` needs to correct for rounding.

    That is `out` in float32 or, for float32 inputs, the rounding error of `lse`.
    """
    parts = sum(len(units) for _, units in call.rounds)
    merged = MergedState(call, q, v.shape[-1], parts, extras.get("sinks"), exact)
    # Sinks go with a row's only part; else `merged` adds them.
    part_extras = {name: x for name, x in extras.items() if name != "sinks" or merged.once}
    with closing(receive_rounds(call, q, k, v)) as rounds:
        for kv, heads, _, units, buffer in rounds:
            head_extras = _head_slices(part_extras, heads, kv)
            for unit in units:
                q_rows, k_rows = rows(unit)
                kv_cut = [call.cut(x, k_rows) for x in buffer]
                part = call.forward(unit, heads[0], call.cut(q, q_rows, heads), kv_cut, head_extras)
                merged.add(q_rows, heads, part)
    everything = (0, q.shape[call.seq]), (0, q.shape[call.head])
    if merged.once and [(which, heads) for which, heads, _ in merged.pending] == [everything]:
        return *merged.pending[0][2], None
    merged.merge()
    if merged.wide is not None:
        return merged.out, merged.lse, torch.where(merged.lse.isfinite(), merged.wide - merged.lse, 0.0).float()
    return merged.out.to(q.dtype), merged.lse, None if merged.out.dtype == q.dtype else merged.out


def backward(
    call: Call, tensors: tuple[Any, ...], extras: dict[str, Any], wanted: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    q, k, v, out, lse, dout, dlse = tensors
    inputs = {"q": q, "k": k, "v": v, **extras}
    results = {
        name: torch.zeros(inputs[name].shape, dtype=torch.float32, device=q.device)
        for name in wanted
        if name not in "qkv"
    }
    if "sinks" in wanted:
        results["sinks"] = _sink_grads(call, extras["sinks"], out, lse, dout, dlse)
    grads = tuple(name for name in wanted if name != "sinks")
    kv_names = tuple(name for name in ("k", "v") if name in wanted)
    part_extras = {name: x for name, x in extras.items() if name != "sinks"}
    sums = {name: GradSum(call, inputs[name], _part_count(call, name)) for name in wanted if name in "qkv"}
    returns: list[GradReturn] = []
    with drained_on_error(returns), closing(receive_rounds(call, q, k, v)) as rounds:
        for kv, heads, round, units, buffer in rounds if grads else ():
            head_extras = _head_slices(part_extras, heads, kv)
            extra_grads = _head_slices({name: results[name] for name in grads if name not in "qkv"}, heads, kv)
            key_grads: dict[str, list[tuple[Range, torch.Tensor]]] = {name: [] for name in kv_names}
            for unit in units:
                q_rows, k_rows = rows(unit)
                q_cut, *cut = [None if x is None else call.cut(x, q_rows, heads) for x in (q, out, lse, dout, dlse)]
                kv_cut = [call.cut(x, k_rows) for x in buffer]
                part = call.backward(unit, heads[0], (q_cut, *kv_cut, *cut), grads, head_extras)
                if part.dq is not None:
                    sums["q"].add(heads, q_rows, part.dq)
                for name, x in (("k", part.dk), ("v", part.dv)):
                    if x is not None:
                        key_grads[name].append((k_rows, x))
                _add_extras(call, extra_grads, part, unit)
            if kv_names:
                received = dict(zip("kv", buffer, strict=False))
                kv_grads = tuple(_round_grad(call, received[name], key_grads[name]) for name in kv_names if received)
                accumulate = [partial(sums[name].add, kv) for name in kv_names]
                owned = tuple(inputs[name].narrow(call.head, kv[0], kv[1] - kv[0]) for name in kv_names)
                returns.append(GradReturn(call.ranks, round, kv_grads, accumulate, owned, call.seq))
                if len(returns) > 1:
                    returns.pop(0).add()
        for last in returns:
            last.add()
    results |= {name: x.result() for name, x in sums.items()}
    return {name: x.to(inputs[name].dtype) for name, x in results.items()}


def _part_count(call: Call, name: str) -> int:
    """How many parts a gradient is summed from, for each group of heads."""
    if name == "q":
        return sum(len(units) for _, units in call.rounds)
    own = (x for round, _ in call.rounds for x in round.sources if x.rank == call.ranks.rank)
    theirs = (x for round, _ in call.rounds for x in round.sends)
    return sum(len(x.ranges) for x in itertools.chain(own, theirs))


def _round_grad(call: Call, like: torch.Tensor, parts: list[tuple[Range, torch.Tensor]]) -> torch.Tensor:
    """The gradient of a round's keys: that of its only part, or a sum in float32."""
    if len(parts) == 1 and parts[0][0] == (0, like.shape[call.seq]):
        return parts[0][1]
    total = torch.zeros_like(like, dtype=torch.float32)
    for which, part in parts:
        call.cut(total, which).add_(part)
    return total


def _add_extras(call: Call, totals: dict[str, torch.Tensor], part: AttentionGradients, unit: Unit) -> None:
    """Adds a part's gradients of the mask, of biases, of slopes and of captured tensors to `totals`."""
    if part.dmask is not None:
        add_to_mask(totals["mask"], part.dmask, unit)
    for name, x in (("q_bias", part.dq_bias), ("k_bias", part.dk_bias)):
        if x is not None:
            part_of_bias(name, totals[name], unit).add_(x)
    for number, x in enumerate(part.dscore_mod or ()):
        if (total := totals.get(f"{CAPTURED}{number}")) is not None and x is not None:
            total.add_(x)
    slopes = totals.get("alibi_slopes")
    if slopes is not None and part.dalibi_slopes is not None:
        if call.packed and slopes.ndim == 2:
            slopes.index_add_(0, torch.tensor(documents(unit), device=slopes.device), part.dalibi_slopes.float())
        else:
            slopes.add_(part.dalibi_slopes)


def _sink_grads(
    call: Call, sinks: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: Any
) -> torch.Tensor:
    """dsinks = -sum over rows of exp(sink - lse) * delta. A row has one sink, however many parts."""
    delta = (dout.float() * out.float()).sum(-1, dtype=torch.float64)  # [B, H, n]; float64, since they cancel
    if dlse is not None:
        delta = delta - dlse
    live = lse.isfinite()
    weights = (sinks_by_head(call, sinks, lse).double() - torch.where(live, lse, 0.0)).exp()
    dsinks = torch.where(live, -weights * delta, 0.0)
    return dsinks.sum([dim for dim in range(lse.ndim) if dim != call.head])  # [H]
