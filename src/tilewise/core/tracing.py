"""Whether torch traces or transforms the calling code. If so, the entry points call torch operators.

Of an eager call a tracer would only record the allocation of the output, not what the kernels write.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from ..errors import InvalidArgument
from .private.torch import dispatch_modes, forward_level, is_jit_tracing, transform


def is_traced() -> bool:
    """Whether a call has to be an operator. To Dynamo `is_compiling()` is a constant True, so it traces no further."""
    return is_compiling() or dispatch_modes() > 0 or is_jit_tracing() or transform() is not None


def is_transformed() -> bool:
    """Whether the call is inside a torch.func transform, whose tensors may have no memory."""
    return transform() is not None


dtensors = False  # whether `register_sharding_rules` was called


def is_wrapper(x: torch.Tensor) -> bool:
    """Whether it is a tensor subclass that can handle tilewise's operators, as FakeTensor is.

    Nested tensors cannot; DTensors only after `distributed.register_sharding_rules()`.
    """
    kind = type(x)
    if kind is torch.Tensor or kind is torch.nn.Parameter or x.is_nested:
        return False
    if kind.__name__ == "DTensor" and not dtensors:
        return False
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def refuse_tangent(name: str, x: torch.Tensor) -> None:
    if forward_level() >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        remedy = "attention and varlen_attention have forward-mode derivatives: take one of them, or detach it"
        raise InvalidArgument(name, "a tensor with a forward-mode tangent", "one without", remedy)
