"""Whether torch traces or transforms the calling code. If so, the entry points call torch operators.

Of an eager call a tracer would only record the allocation of the output, not what the kernels write.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from ..errors import InvalidArgument

_dispatch_modes = torch._C._len_torch_dispatch_stack  # make_fx, FakeTensorMode, FlopCounterMode, ...
_jit_tracing = torch._C._is_tracing
_transform = torch._C._functorch.peek_interpreter_stack  # torch.vmap, torch.func.jvp, functionalize, ...


def is_traced() -> bool:
    """Whether a call has to be an operator. To Dynamo `is_compiling()` is a constant True, so it traces no further."""
    return is_compiling() or _dispatch_modes() > 0 or _jit_tracing() or _transform() is not None


def is_transformed() -> bool:
    """Whether the call is inside a torch.func transform, whose tensors may have no memory."""
    return _transform() is not None


is_in_transform = torch._C._functorch.is_functorch_wrapped_tensor  # of vmap, jvp or grad

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
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        remedy = "tilewise has no forward-mode derivatives: detach it, or take torch's own attention there"
        raise InvalidArgument(name, "a tensor with a forward-mode tangent", "one without", remedy)
