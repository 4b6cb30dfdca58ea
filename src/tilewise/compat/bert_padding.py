"""flash-attn's `bert_padding`: padded batches to packed sequences and back, in plain torch."""

from __future__ import annotations

import torch

from ..errors import InvalidArgument

__all__ = [
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]

Unpadded = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Packs the tokens of a padded batch `[B, L, ...]`.

    Args:
        attention_mask: `[B, L]`, bool or int: tokens that are not padding.
        unused_mask: `[B, L]`: tokens that are packed too, but not in use.

    Returns:
        The tokens `[T, ...]`, their indices in the batch `[T]`, offsets of the rows int32 `[B + 1]`, the length of the
        longest row, and the number of tokens in use in each row, int32 `[B]`.
    """
    kept = attention_mask.bool() if unused_mask is None else attention_mask.bool() | unused_mask.bool()
    used = attention_mask.bool().sum(-1, dtype=torch.int32)
    return (*_pack(hidden_states, kept, kept.sum(-1, dtype=torch.int32)), used)


def unpad_input_for_concatenated_sequences(
    hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor
) -> Unpadded:
    """`unpad_input` where each row holds several sequences.

    Args:
        attention_mask_in_length: `[B, L]`: the first entries of a row are the lengths of its sequences, the others 0.
    """
    lengths = attention_mask_in_length[attention_mask_in_length > 0]  # in order
    slots = torch.arange(attention_mask_in_length.shape[1], device=lengths.device)
    return _pack(hidden_states, slots < attention_mask_in_length.sum(-1, keepdim=True), lengths)


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Puts tokens `[T, ...]` at `indices` of a batch `[B, L, ...]` that is 0 elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def index_first_axis(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows of `x` at `indices`."""
    return x[indices]


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """A tensor with `values` at `indices` of its first axis, and 0 elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


def _pack(x: torch.Tensor, kept: torch.Tensor, lengths: torch.Tensor) -> Unpadded:
    if x.shape[:2] != kept.shape:
        raise InvalidArgument("attention_mask", f"shape {tuple(kept.shape)}", f"{tuple(x.shape[:2])}, as the tokens")
    indices = kept.flatten().nonzero()[:, 0]
    offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    return x.flatten(0, 1)[indices], indices, offsets, longest
