"""A mask that is known by its rules, and a tensor all the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..core.private.torch import make_wrapper, no_torch_function, tree_map_only, version_of


@dataclass(frozen=True)
class Packed:
    """The sequences of all rows, packed."""

    offsets: torch.Tensor  # int32 [n + 1]
    longest: int
    lengths: torch.Tensor | None = None  # int32 [n]: keys in use; padding is a sequence without any
    only: bool = True  # no other options express the mask


@dataclass(frozen=True)
class Pattern:
    """A mask as options of `tilewise.attention`."""

    options: dict[str, Any]  # keywords of `attention`, and of `varlen_attention` for `packed`
    packed: Packed | None = None
    plain: bool = False  # all keys, or those that causality leaves by itself


class LazyMask(torch.Tensor):
    """A bool mask `[B, 1, Lq, Lk]` with a pattern. Attention takes the pattern; any operation of torch gets the cells,
    which `make` computes once.
    """

    pattern: Pattern
    make: Callable[[], torch.Tensor]
    cells: torch.Tensor | None

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], device: Any, pattern: Pattern, make: Callable[[], torch.Tensor]
    ) -> LazyMask:
        with torch.inference_mode(False):  # its tensors would not count writes
            mask = make_wrapper(cls, shape, dtype=torch.bool, device=torch.device(device))
        mask.pattern, mask.make, mask.cells = pattern, make, None
        return mask

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:  # by gradient checkpointing
            return args[0]
        if torch.Tag.inplace_view in function.tags:
            raise RuntimeError(f"{function}: the shape of a mask of tilewise cannot be changed in place")
        args, kwargs = tree_map_only(LazyMask, LazyMask.dense, (args, kwargs or {}))
        return function(*args, **kwargs)

    def dense(self) -> torch.Tensor:
        if self.cells is None:
            with torch.inference_mode(False):
                cells = self.make()
                self.cells = cells.clone() if cells.is_inference() else cells
        return self.cells

    # What torch refuses for wrappers. A copy has the cells alone.
    def numpy(self, *, force: bool = False) -> Any:
        return self.dense().numpy(force=force)

    def tolist(self) -> Any:
        return self.dense().tolist()

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.dense().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().clone().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyMask({tuple(self.shape)}, {self.pattern.options})"

    __str__ = __repr__


def pattern_of(mask: torch.Tensor | None) -> Pattern | None:
    """The pattern of a mask, unless cells were written to since. A traced mask is a plain tensor with a pattern."""
    if isinstance(mask, LazyMask) and version_of(mask) > 0:
        return None
    return getattr(mask, "pattern", None)
