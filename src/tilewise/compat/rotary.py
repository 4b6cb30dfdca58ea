"""Rotary position embedding in plain torch, as FlashAttention applies it, and its module `layers.rotary`."""

from __future__ import annotations

import torch

from ..errors import InvalidArgument
from ..validation import values

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
]


def check(cos: torch.Tensor, sin: torch.Tensor, head_dim: int, positions: int) -> None:
    """Checks that tables `[n, R / 2]` cover every position of the cache and R is at most the head dim."""
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
    """Rotates the first R elements of each head of `x` `[B, L, H, D]` by its position `[B, L]`.

    Pairs are adjacent elements if `interleaved`, else `r` and `r + R / 2`.
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


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: torch.Tensor | int = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """`x` `[B, L, H, D]`, or packed `[T, H, D]` with `cu_seqlens`, rotated by positions from `seqlen_offsets` on.

    Args:
        cos: `[positions, R / 2]`, for the first R elements of each head.
        sin: likewise.
        interleaved: rotate pairs of neighbours; else pairs of elements `r` and `r + R / 2`.
        inplace: write into `x` and return it.
        seqlen_offsets: position of each sequence's first token: an int, or int `[B]`.
        cu_seqlens: int32 `[B + 1]`, the offsets of packed sequences.
        max_seqlen: the longest of them; not needed.
    """
    form = "[B, L, H, D]" if cu_seqlens is None else "[T, H, D]"
    if x.ndim != form.count(",") + 1:
        raise InvalidArgument("x", f"shape {tuple(x.shape)}", form)
    starts = torch.as_tensor(seqlen_offsets, device=x.device).long()
    if cu_seqlens is None:
        positions = starts.reshape(-1, 1) + torch.arange(x.shape[1], device=x.device)  # [1 or B, L]
        positions = positions.expand(len(x), -1)
    else:
        from ._flash.inputs import Rows

        rows = Rows.of(cu_seqlens, len(x))
        positions = (starts.expand(len(cu_seqlens) - 1)[rows.sequence] + rows.place)[None]
    check(cos, sin, x.shape[-1], 0)
    if positions.numel() and values.readable(positions, None):
        first, last = int(positions.min()), int(positions.max())
        if first < 0 or last >= len(cos):
            raise InvalidArgument(
                "seqlen_offsets", f"tokens at {first} to {last}", f"positions in cos, 0 to {len(cos) - 1}"
            )
    if cu_seqlens is None:
        turned = rotate(x, cos, sin, positions, interleaved)
    else:
        turned = rotate(x[None], cos, sin, positions, interleaved)[0]
    return x.copy_(turned) if inplace else turned


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cos_k: torch.Tensor | None = None,
    sin_k: torch.Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: torch.Tensor | int = 0,
    num_heads_q: int | None = None,
) -> torch.Tensor:
    """Rotates q and k of `qkv` `[B, L, 3, H, D]`, or `[B, L, H + 2 Hkv, D]` with `num_heads_q`, in place."""
    if qkv.ndim == 5 and qkv.shape[2] == 3:
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    elif qkv.ndim == 4 and num_heads_q is not None:
        both = num_heads_q + (qkv.shape[2] - num_heads_q) // 2
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q:both]
    else:
        given = f"shape {tuple(qkv.shape)} with num_heads_q={num_heads_q}"
        raise InvalidArgument("qkv", given, "[B, L, 3, H, D], or [B, L, H + 2 Hkv, D] with num_heads_q=H")
    apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    cos, sin = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    apply_rotary_emb(k, cos, sin, interleaved, True, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    seqlen_offsets: torch.Tensor | int = 0,
) -> torch.Tensor:
    """Rotates k of `kv` `[B, L, 2, Hkv, D]` in place."""
    if kv.ndim != 5 or kv.shape[2] != 2:
        raise InvalidArgument("kv", f"shape {tuple(kv.shape)}", "[B, L, 2, Hkv, D]")
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


class RotaryEmbedding(torch.nn.Module):
    """Rotary embedding of q and k, with tables that grow for longer sequences.

    Args:
        dim: number of elements of each head that are rotated.
        base: pair `r` is rotated by `position * base ** (-2 r / dim)`.
        interleaved: rotate pairs of neighbours; else pairs of elements `r` and `r + dim / 2`.
        scale_base: xPos: q grows and k shrinks with its position, in steps of this many tokens. None is off.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        even = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        self.register_buffer("inv_freq", self.base ** -(even / dim), persistent=False)
        scale = None if scale_base is None else (even + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: torch.Tensor | None = None
        self._sin_cached: torch.Tensor | None = None
        self._cos_k_cached: torch.Tensor | None = None
        self._sin_k_cached: torch.Tensor | None = None

    def _update_cos_sin_cache(
        self, seqlen: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Makes tables for `seqlen` positions, unless there are some that long of this device and dtype."""
        known = self._cos_cached
        if known is not None and seqlen <= self._seq_len_cached and (known.device, known.dtype) == (device, dtype):
            return
        self._seq_len_cached = seqlen
        even = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)  # inv_freq may be narrower by now
        steps = torch.arange(seqlen, device=device, dtype=torch.float32)
        angles = torch.outer(steps, self.base ** -(even / self.dim))
        cos, sin = angles.cos(), angles.sin()
        if self.scale_base is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        growth = ((even + 0.4 * self.dim) / (1.4 * self.dim)) ** ((steps - seqlen // 2) / self.scale_base)[:, None]
        self._cos_cached, self._sin_cached = (cos * growth).to(dtype), (sin * growth).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / growth).to(dtype), (sin / growth).to(dtype)

    def forward(
        self,
        qkv: torch.Tensor,
        kv: torch.Tensor | None = None,
        seqlen_offset: torch.Tensor | int = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Rotates `qkv` (see `apply_rotary_emb_qkv_`), or q `[B, L, H, D]` and `kv`, in place, and returns them.

        Args:
            seqlen_offset: position of the first token: an int, or int `[B]`, which needs `max_seqlen`.
            max_seqlen: number of positions that the tables must cover.
        """
        if max_seqlen is None and isinstance(seqlen_offset, int):
            max_seqlen = qkv.shape[1] + seqlen_offset
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, qkv.device, qkv.dtype)
        cos, sin = self._cos_cached, self._sin_cached
        if cos is None or sin is None:
            raise InvalidArgument("max_seqlen", None, "the longest sequence, where seqlen_offset is a tensor")
        cos_k, sin_k = self._cos_k_cached, self._sin_k_cached
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        cos, sin = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
        return q, apply_rotary_emb_kv_(kv, cos, sin, self.interleaved, seqlen_offset)
