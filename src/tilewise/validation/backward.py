"""Checks a backward pass: from a checked forward call, its `out` and `lse` to a `Problem` and `BackwardTensors`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..core.arrays import to_tensor
from ..core.options import Options
from ..core.problem import CAPTURED, GRADS, Problem, captured_number
from ..core.storage import wide_dtype
from ..core.tensors import BackwardTensors
from ..errors import InvalidArgument
from .calls import Call
from .memory import is_aligned

KNOWN = (*GRADS, "score_mod")  # the last stands for the float tensors that a score_mod captures


@dataclass(slots=True)
class BackwardCall:
    """A checked backward pass."""

    problem: Problem
    tensors: BackwardTensors
    layout: str  # the caller's

    def write_empty(self) -> None:
        """Writes the gradients of a call in which no row sees a key: 0, except that of a sink through `lse`."""
        b = self.tensors
        for gradient in b.gradients().values():
            gradient.zero_()
        if b.dsinks is not None and b.dlse is not None:
            assert b.forward.lse is not None
            b.dsinks += torch.where(b.forward.lse.isfinite(), b.dlse, 0.0).sum((0, 2))

    def result(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """The gradient of argument `name` in the shape and dtype of that argument, `like`."""
        gradient = self.tensors.gradients()[name]
        if name in ("q", "k", "v"):
            return in_layout(gradient, self.problem.packed_q, self.layout)
        if name == "alibi_slopes" and like.ndim == 1:
            gradient = gradient.sum(0)
        if name in ("q_bias", "k_bias"):
            gradient = gradient if like.ndim == 3 else gradient[0].mT  # [T, H] of packed rows
            shared = [dim for dim, n in enumerate(like.shape) if n == 1 and gradient.shape[dim] != 1]
            gradient = gradient.sum(shared, keepdim=True) if shared else gradient
        return gradient.reshape(like.shape).to(like.dtype)


def backward(call: Call, o: Options, lse: Any, dout: Any, dlse: Any, grads: Sequence[str]) -> BackwardCall:
    """Checks the backward pass of `call`, whose `out` holds what the forward pass gave."""
    layout = o.layout
    p, t, out = call.problem, call.tensors, call.out
    for name, stored in (("k", p.k_format), ("v", p.v_format)):
        if stored.is_quantised:
            raise InvalidArgument(name, "Quantised", "a float tensor", f"{name}.dequantise() has gradients")
        if p.form == "paged":
            raise InvalidArgument(name, "pages", "dense or packed keys", "paged keys and values have no gradients")
    names, wide = as_grads(grads, p), wide_dtype(p.q_dtype)
    lse, dout = to_tensor("lse", lse).detach(), to_tensor("dout", dout).detach()
    _check_like("lse", lse, out.shape[:-1], wide, p.device)
    _check_like("dout", dout, out.shape, out.dtype, p.device)
    if dlse is not None:
        dlse = to_tensor("dlse", dlse).detach()
        _check_like("dlse", dlse, out.shape[:-1], wide, p.device)
        dlse = in_layout(dlse, p.packed_q, layout, common=True)
    copies = p.copies
    dout = in_layout(dout, p.packed_q, layout, common=True)
    if dout.stride(-1) != 1 and dout.shape[-1] != 1:
        copies, dout = (*copies, f"dout: its last dim has stride {dout.stride(-1)}, not 1"), dout.contiguous()
    b = BackwardTensors(replace(t, lse=in_layout(lse, p.packed_q, layout, common=True)), dout, dlse)
    for name in ("q", "k", "v"):
        if name in names:
            x = in_layout(getattr(t, name), p.packed_q, layout)
            new = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            setattr(b, f"d{name}", in_layout(new, p.packed_q, layout, common=True))
    if p.mask is not None and t.mask is not None and "mask" in names:
        shape = [1 if one else n for n, one in zip(t.mask.shape, p.mask.broadcast, strict=True)]
        dtype = wide if any(p.mask.broadcast) else p.mask.dtype
        b.dmask = torch.empty(shape, dtype=dtype, device=p.device)
    if t.sinks is not None and "sinks" in names:
        b.dsinks = torch.empty_like(t.sinks)
    if t.alibi_slopes is not None and "alibi_slopes" in names:
        b.dalibi_slopes = torch.empty(t.alibi_slopes.shape, dtype=wide, device=p.device)
    for name in ("q_bias", "k_bias"):
        if name in names:
            setattr(b, f"d{name}", torch.empty(getattr(t, name).shape, dtype=wide, device=p.device))
    for name in names:
        if (number := captured_number(name)) is not None:
            b.dcaptured[number] = torch.empty(t.captured[number].shape, dtype=wide, device=p.device)
    problem = replace(
        p,
        return_lse=True,
        aligned=p.aligned and all(is_aligned(x) for x in (dout, b.dq, b.dk, b.dv) if x is not None),
        copies=copies,
        grads=names,
        dlse=dlse is not None,
        deterministic=is_deterministic(o.deterministic),
    )
    return BackwardCall(problem, b, layout)


def differentiable(p: Problem) -> tuple[str, ...]:
    """The arguments of a call that can have gradients, in the order of `Problem.grads`."""
    there = {"mask": p.mask is not None and not p.mask.is_bool, "sinks": p.sinks, "alibi_slopes": p.alibi}
    there |= {"q_bias": p.q_bias, "k_bias": p.k_bias}
    captured = () if p.mods is None else (f"{CAPTURED}{number}" for number in p.mods.differentiable)
    return (*(name for name in GRADS if there.get(name, True)), *captured)


def is_deterministic(option: bool) -> bool:
    return option or torch.are_deterministic_algorithms_enabled()


def check_grads(grads: Any) -> None:
    listed = isinstance(grads, Sequence) and not isinstance(grads, str) and grads
    if not listed or not all(isinstance(x, str) and (x in KNOWN or x.startswith(CAPTURED)) for x in grads):
        raise InvalidArgument("grads", repr(grads), f"some of {', '.join(map(repr, KNOWN))}, as a tuple")


def as_grads(grads: Any, p: Problem) -> tuple[str, ...]:
    """The names in the order of `GRADS`; refuses those of arguments that the call does not have."""
    check_grads(grads)
    possible = differentiable(p)
    captured = [name for name in possible if captured_number(name) is not None]
    if "score_mod" in grads:
        grads = [*(name for name in grads if name != "score_mod"), *(captured or ["score_mod"])]
    for name in grads:
        if name not in possible:
            what = {
                "mask": "a call without a float mask",
                "score_mod": "a call whose score_mod captures no float tensor",
            }
            given = f"{name!r}, in {what.get(name, f'a call without {name}')}"
            raise InvalidArgument("grads", given, f"some of this call's differentiable inputs: {', '.join(possible)}")
    return tuple(name for name in possible if name in grads)


def in_layout(x: torch.Tensor, packed: bool, layout: str, *, common: bool = False) -> torch.Tensor:
    """A view of q, k, v, out or lse in the caller's layout, from `[B, H, L, ...]`; with `common`, the other way."""
    if packed:
        return x.transpose(0, 1)[None] if common else x[0].transpose(0, 1)
    return x if layout == "bhld" else x.transpose(1, 2)


def _check_like(name: str, x: torch.Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
    if x.shape != shape or x.dtype != dtype or x.device != device:
        given = f"{tuple(x.shape)} {x.dtype} on {x.device}"
        raise InvalidArgument(name, given, f"{tuple(shape)} {dtype} on {device}, as the forward pass gave it")
