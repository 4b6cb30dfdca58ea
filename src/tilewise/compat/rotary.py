"""Rotary position embedding in plain torch, as FlashAttention applies it."""

from __future__ import annotations

import torch

from ..errors import InvalidArgument


def check(cos: torch.Tensor, sin: torch.Tensor, head_dim: int, positions: int) -> None:
    """Tables `[n, R / 2]` that reach every position of the cache and rotate no more than a head has."""
    if sin.shape != cos.shape or cos.ndim != 2:
        given = f"{tuple(cos.shape)} with rotary_sin {tuple(sin.shape)}"
        raise InvalidArgument("rotary_cos", given, "two tables [positions, rotary_dim / 2]")
    if 2 * cos.shape[1] > head_dim:
        raise InvalidArgument("rotary_cos", f"{cos.shape[1]} angles", f"at most {head_dim // 2}, half the head dim")
    if cos.shape[0] < positions:
        raise InvalidArgument("rotary_cos", f"{cos.shape[0]} positions", f"{positions} or more, as the cache holds")


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """The first R elements of each head of `x` `[B, L, H, D]`, turned in pairs by the angles of its position `[B, L]`.

    A pair is two neighbours if `interleaved`, else elements `r` and `r + R / 2`.
    """
    c, s = (table[positions].float()[:, :, None] for table in (cos, sin))  # [B, L, 1, R / 2]
    half = cos.shape[1]
    turned = x[..., : 2 * half].float()
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * c - b * s, a * s + b * c), dim=-1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = torch.cat((a * c - b * s, a * s + b * c), dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), dim=-1)
