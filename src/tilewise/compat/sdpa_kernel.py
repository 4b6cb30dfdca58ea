"""tilewise as torch's flash kernel on the CPU, below `scaled_dot_product_attention`.

torch has a registry of flash implementations (`torch.nn.attention.list_flash_attention_impls`). Importing this module
adds "tilewise" to it; after `activate`, torch's own function runs tilewise wherever it would run its flash kernel. That
kernel still serves gradients, and calls that tilewise cannot.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.attention

from ..api import attention
from ..core.private.torch import FLASH, DispatchKey, DispatchKeySet, unregister
from ..errors import InvalidArgument, Unsupported

NAME = "tilewise"


class _Handle:
    """The registered kernel; torch's registry calls `remove`."""

    def __init__(self) -> None:
        self.before: Any = torch.library.get_kernel(f"aten::{FLASH}", "CPU")
        self.keys = DispatchKeySet(DispatchKey.CPU)
        self.library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of replacing a kernel, which is intended
            self.library.impl(FLASH, self.run, "CPU", allow_override=True)

    def remove(self) -> None:
        unregister(self.library)

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`out` and `lse` of `[B, H, L, E]`; causal is aligned to the top left, as in torch's kernel."""
        tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
        if dropout_p == 0.0 and not any(x.requires_grad for x in tensors):
            offset = 0 if is_causal else None
            try:
                out, lse = attention(
                    query, key, value, causal=is_causal, q_offset=offset, mask=attn_mask, scale=scale, return_lse=True
                )
            except (InvalidArgument, Unsupported):
                pass  # then torch chooses among its kernels
            else:
                return out, lse
        options = {"attn_mask": attn_mask, "scale": scale}
        return self.before.call_boxed(self.keys, query, key, value, dropout_p, is_causal, **options)


def registers() -> bool:
    """Whether this torch has the registry, and access to the kernel that is replaced."""
    return hasattr(torch.nn.attention, "register_flash_attention_impl") and hasattr(torch.library, "get_kernel")


def active() -> bool:
    return registers() and torch.nn.attention.current_flash_attention_impl() == NAME


def activate() -> None:
    """Activates the kernel, unless another implementation is active."""
    if registers() and torch.nn.attention.current_flash_attention_impl() is None:
        torch.nn.attention.activate_flash_attention_impl(NAME)


def restore() -> None:
    """Restores torch's kernel."""
    if active():
        torch.nn.attention.restore_flash_attention_impl()


if registers():
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_Handle)
