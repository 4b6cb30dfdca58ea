"""A layer's cache on a CPU for vLLM's backend: the layout of its blocks, and work that layers share."""

from __future__ import annotations

from typing import Any

import torch

from ..core.kv_store import RowFormat, Store, WriteSlots
from ..dispatch import call_cache, planner


class NewTokens:
    """The slots of a batch's new tokens, the same for all layers. A negative slot is padding."""

    def __init__(self, slots: torch.Tensor) -> None:
        self.slots, self.count = slots, len(slots)
        self.used: torch.Tensor | None = None  # bool [T], on a CPU, if some are padding
        self._places: tuple[int, WriteSlots] | None = None
        if slots.is_cpu and len(slots) and slots.numpy().min() < 0:
            self.used = slots >= 0
            self.slots = slots[self.used]

    def places(self, blocks: int) -> WriteSlots:
        """For the caches' writer: each token is a sequence, and its slot a position in one sequence of all blocks."""
        if self._places is None or self._places[0] != blocks:
            T = len(self.slots)
            cu, table = (torch.arange(n, dtype=torch.int32, device="cpu") for n in (T + 1, blocks))
            self._places = blocks, WriteSlots(self.slots.int(), cu, T, True, table.expand(T, -1))
        return self._places[1]


class Memory:
    """A layer's cache on a CPU.

    vLLM moves whole blocks, so the layout within one is this backend's: first the keys, `[block size, Hkv, D]`, then
    the values. With vLLM's `[Hkv, block size, 2 D]` decode would be slower.
    """

    def __init__(self, kv_cache: torch.Tensor) -> None:
        blocks, heads, size, width = kv_cache.shape
        self.kv_cache, self.blocks, D = kv_cache, blocks, width // 2
        self.kind = f"{kv_cache.shape} {kv_cache.stride()} {kv_cache.dtype}"
        inner = sum((n - 1) * stride for n, stride in zip(kv_cache.shape[1:], kv_cache.stride()[1:], strict=True))
        if inner + 1 == heads * size * width:  # a block holds nothing else
            strides = (kv_cache.stride(0), size * heads * D, heads * D, D, 1)
            k, v = kv_cache.as_strided((blocks, 2, size, heads, D), strides).unbind(1)
        else:
            k, v = kv_cache.transpose(1, 2).split(D, dim=-1)
        self.pages, self.addresses = (k, v), (k.data_ptr(), v.data_ptr())
        fmt = RowFormat.of("kv_cache", kv_cache.dtype, 64, D)
        keys, values = (Store(fmt, x.transpose(1, 2), None) for x in (k, v))
        self.writer: Any = planner.writer(keys, values, size)

    def is_of(self, kv_cache: torch.Tensor) -> bool:
        mine = self.kv_cache
        return kv_cache is mine or (
            kv_cache.data_ptr() == mine.data_ptr()
            and (kv_cache.shape, kv_cache.stride(), kv_cache.dtype) == (mine.shape, mine.stride(), mine.dtype)
        )

    def write(self, k: torch.Tensor, v: torch.Tensor, new: NewTokens) -> None:
        """Stores rows `[T, Hkv, D]`."""
        self.writer(*map(_by_heads, (k, v)), new.places(self.blocks))


def _by_heads(x: torch.Tensor) -> torch.Tensor:
    """Rows `[T, Hkv, D]` as `[1, Hkv, T, D]`, as writers take them."""
    return (x if x.stride(2) == 1 else x.contiguous()).transpose(0, 1)[None]


class Step:
    """A layer's write and attention in a batch, bound so that layers like it can repeat them with their own tensors."""

    def __init__(self, write: Any, attend: Any) -> None:
        self.write, self.attend = write, attend

    @classmethod
    def after(
        cls, memory: Memory, key: torch.Tensor, value: torch.Tensor, new: NewTokens, args: Any, options: dict[str, Any]
    ) -> Step | None:
        """The step, after `key` and `value` were stored and `paged_attention` ran; None if they cannot be bound."""
        attend = call_cache.bound("paged_attention", args, options)
        bind = getattr(memory.writer, "bound", None)
        if attend is None or bind is None or not key.stride(2) == value.stride(2) == 1:
            return None
        return cls(bind(*map(_by_heads, (key, value)), new.places(memory.blocks)), attend)

    def __call__(
        self, memory: Memory, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor
    ) -> None:
        self.write(*memory.addresses, key.data_ptr(), value.data_ptr())
        self.attend(q, *memory.pages, out)
