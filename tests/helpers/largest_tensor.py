"""The largest tensor that code makes: what must not grow with Lq * Lk."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """`size`: the most bytes of one result of an operation, in all its `with` blocks."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.size = max(self.size, result.untyped_storage().nbytes())
        return result
