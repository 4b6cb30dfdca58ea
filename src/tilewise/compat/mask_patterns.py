"""transformers' attention masks as options of `tilewise.attention`, without building a dense mask.

transformers describes a mask by a function of indices, composed of a few known ones. These are recognised here; an
unknown function becomes a dense mask, as for torch's SDPA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.compiler import is_compiling
from transformers import masking_utils as hf

from ..core.tracing import is_traced
from .lazy_mask import LazyMask, Packed, Pattern
from .own_attention import has_own_attention

Length = int | torch.Tensor


@dataclass(frozen=True)
class Rules:
    """The position rules of a mask function."""

    causal: bool = False
    left: int | None = None  # keys to the left of the query's own; None is unlimited
    right: int | None = None
    chunk: int | None = None
    padding: torch.Tensor | None = None  # [B]: chunks begin here
    segments: torch.Tensor | None = None  # [B, L]: a token sees its own segment


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Length = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = hf.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    *,
    unpad: bool = False,
    **rest: Any,
) -> torch.Tensor | None:
    """The mask function that `register` gives to transformers, with the arguments of `sdpa_mask` there.

    Args:
        unpad: rows of padding may give 0, where they would see tokens: a padded batch becomes packed sequences.

    Returns:
        None if the module's own causality is enough, else a bool mask `[B, 1, Lq, Lk]`. If the rules are known it is a
        `LazyMask`, or under tracing a plain one with a `pattern`. A model that asks for a real mask gets one.
    """

    def real(offset: Length = q_offset) -> torch.Tensor:
        return hf.sdpa_mask(
            batch_size, q_length, kv_length, offset, kv_offset, mask_function, attention_mask,
            allow_is_causal_skip=False, allow_is_bidirectional_skip=False, use_vmap=use_vmap, **rest,
        )  # fmt: skip

    if (config := rest.get("config")) is not None and has_own_attention(type(config)):
        return hf.eager_mask(  # they add it to their scores
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip, use_vmap=use_vmap, **rest,
        )  # fmt: skip
    rules = None if use_vmap else read(mask_function)
    # Packing does not allow to leave the mask out, but it can be a pattern.
    if rules is None or not (
        rules.segments is not None or (allow_is_causal_skip if rules.causal else allow_is_bidirectional_skip)
    ):
        return real()
    pattern = _pattern(q_length, kv_length, rules, q_offset, kv_offset, attention_mask, unpad)
    if pattern is None:
        return real()
    if pattern.plain:
        return None
    if is_traced():  # what reads the pattern alone leaves the cells out of the graph
        mask: Any = real()
        mask.pattern = pattern
        return mask
    shape = (batch_size, 1, q_length, kv_length)
    return LazyMask(shape, rest.get("device", "cpu"), pattern, partial(real, int(q_offset)))


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    """The closure variables of a function."""
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


_BOTH = hf.and_masks(hf.causal_mask_function).__code__
_WINDOW = hf.sliding_window_overlay(1).__code__
_TWO_SIDED = hf.sliding_window_bidirectional_overlay(1).__code__
_CHUNK = hf.chunked_overlay(1, torch.zeros(1, device="cpu")).__code__
_PACKED = hf.packed_sequence_mask_function(torch.zeros(1, 1, device="cpu")).__code__


def read(function: Callable[..., Any]) -> Rules | None:
    """The rules of a mask function of transformers; None if it is not a known one."""
    if function is hf.causal_mask_function:
        return Rules(causal=True)
    if function is hf.bidirectional_mask_function:
        return Rules()
    if is_compiling():  # tracing hides closures
        return None
    code = getattr(function, "__code__", None)
    try:
        if code is _BOTH:
            combined: Rules | None = Rules()
            for part in _closure(function)["mask_functions"]:
                combined = _and(combined, read(part))
            return combined
        if code is _WINDOW:
            return Rules(left=_closure(function)["sliding_window"] - 1)
        if code is _TWO_SIDED:
            width = _closure(function)["sliding_window"]
            return Rules(left=width, right=width)
        if code is _CHUNK:
            closure = _closure(function)
            return Rules(chunk=closure["chunk_size"], padding=closure["left_padding"])
        if code is _PACKED:
            return Rules(segments=_closure(function)["packed_sequence_mask"])
    except KeyError:  # another version, with other closures
        return None
    return None


def _and(a: Rules | None, b: Rules | None) -> Rules | None:
    """The conjunction of two rules; None if `Rules` cannot express it."""
    if a is None or b is None:
        return None
    if any(getattr(a, name) is not None and getattr(b, name) is not None for name in ("chunk", "segments")):
        return None
    first = a if a.chunk is not None else b
    return Rules(
        causal=a.causal or b.causal,
        left=_smaller(a.left, b.left),
        right=_smaller(a.right, b.right),
        chunk=first.chunk,
        padding=first.padding,
        segments=a.segments if b.segments is None else b.segments,
    )


def _smaller(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _pattern(
    rows: int,
    keys: int,
    rules: Rules,
    q_offset: Length,
    kv_offset: int,
    is_token: torch.Tensor | None,
    unpad: bool,
) -> Pattern | None:
    """The pattern of the rules with padding; None if options cannot express it."""
    values_matter = isinstance(q_offset, torch.Tensor) or rules.chunk is not None or rules.segments is not None
    if values_matter and is_traced():  # a graph cannot depend on values
        return None
    shift = int(q_offset) - kv_offset  # the first query's position, relative to the first key
    furthest = shift + rows - 1  # the largest distance of a query from a key on its left
    padded = None
    if is_token is not None and shift == 0 and rows == keys and not is_traced():
        # With causal, padding before the tokens sees nothing, so that leaving it out changes nothing. Padding after
        # them sees them, and `generate` continues from its output.
        padded = _padded(is_token) if (bool(is_token[:, -1].all()) if rules.causal else unpad) else None
    only = False
    if rules.chunk is not None:
        # tilewise counts chunks from the first key (of a sequence), transformers from a position of its own.
        from_here = 0 if rules.padding is None else rules.padding
        away = (from_here - kv_offset) % rules.chunk
        only = bool(away.any()) if isinstance(away, torch.Tensor) else away != 0
        if padded is not None and bool(((padded[1] - from_here) % rules.chunk).any()):
            padded = None
        if rules.segments is not None or (only and padded is None):
            return None
        if rules.causal and furthest < rules.chunk:
            rules = replace(rules, chunk=None)
            only = False
    if rules.left is not None and furthest <= rules.left:
        rules = replace(rules, left=None)
    if rules.right is not None and keys - 1 - shift <= rules.right:
        rules = replace(rules, right=None)
    options: dict[str, Any] = {"causal": rules.causal, "validate": False}
    if rules.left is not None or rules.right is not None:
        options["window"] = (rules.left, rules.right)
    if rules.chunk is not None:
        options["chunk"] = rules.chunk
    if rules.segments is not None:
        packed = _packed(rules.segments) if is_token is None and shift == 0 and rows == keys else None
        return None if packed is None else Pattern(options, packed)
    limits = _limits(is_token, kv_offset, keys)
    plain = not limits and len(options) == 2
    plain = plain and (not rules.causal or (shift == 0 and rows == keys) or (rows == 1 and shift == keys - 1))
    packed = None if padded is None else replace(padded[0], only=only)
    return Pattern({**options, **limits, "q_offset": shift}, packed, plain)


def _limits(is_token: torch.Tensor | None, kv_offset: int, keys: int) -> dict[str, Any]:
    """Padding `[B, S]` (True is a token) as lengths of rows, or as a mask `[B, 1, 1, keys]`."""
    if is_token is None:
        return {}
    is_token = is_token[:, kv_offset : kv_offset + keys]
    if is_token.shape[1] < keys:  # a static cache: slots not yet written
        is_token = torch.nn.functional.pad(is_token, (0, keys - is_token.shape[1]))
    if is_traced():
        return {"mask": is_token[:, None, None]}
    lengths = is_token.sum(1, dtype=torch.int32)
    if bool((lengths == keys).all()):
        return {}
    if bool((is_token == (torch.arange(keys, device=is_token.device) < lengths[:, None])).all()):
        return {"kv_lengths": lengths}
    return {"mask": is_token[:, None, None]}


def _padded(is_token: torch.Tensor) -> tuple[Packed, torch.Tensor] | None:
    """Padded rows `[B, L]` as sequences: the run of tokens of each row, and the padding around it as sequences without
    keys; and where the runs start. None if there is no padding, or padding between tokens.
    """
    batch, keys = is_token.shape
    at = torch.arange(keys, device=is_token.device)
    lengths = is_token.sum(1)
    starts = is_token.int().argmax(1)
    run = (at >= starts[:, None]) & (at < (starts + lengths)[:, None])
    if bool((lengths == keys).all()) or not bool((run == is_token).all()):
        return None
    ends = torch.stack((starts, starts + lengths, torch.full_like(starts, keys)), 1)  # of padding, tokens, padding
    offsets = (ends + keys * torch.arange(batch, device=is_token.device)[:, None]).flatten()
    used = torch.stack((torch.zeros_like(lengths), lengths, torch.zeros_like(lengths)), 1).flatten()
    packed = Packed(torch.nn.functional.pad(offsets, (1, 0)).int(), keys, used.int())
    return packed, starts


def _packed(segments: torch.Tensor) -> Packed | None:
    """The sequences of segments `[B, L]`; None if a segment is not contiguous."""
    steps = segments.diff(dim=1)
    if bool((steps < 0).any()):
        return None
    first = torch.nn.functional.pad(steps != 0, (1, 0), value=True).flatten()
    starts = first.nonzero()[:, 0].to(torch.int32)
    offsets = torch.nn.functional.pad(starts, (0, 1), value=segments.numel())
    return Packed(offsets, int(offsets.diff().max()))
