"""Every name of torch that begins with an underscore, or is inside of such a module."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from types import CodeType
from typing import Any

import torch
import torch.distributed
from torch.autograd import forward_ad

from . import find

ALL = "2.6 2.11 2.13 2.15"
NEW = "2.11 2.13 2.15"
CUDA = "_cuda_getCurrentRawStream _cuda_getDevice _cuda_isCurrentStreamCapturing"  # in torch for GPUs alone
SEEN = {
    "torch": {
        ALL: "_is_functional_tensor cpu._is_amx_tile_supported cuda._sleep",
        NEW: "_dynamo.config.recompile_limit",
    },
    "torch.Tensor": {ALL: "_make_wrapper_subclass _version"},
    "torch.UntypedStorage": {ALL: "_cdata"},
    "torch.autograd.forward_ad": {ALL: "_current_level _set_fwd_grad_enabled"},
    "torch.library.Library": {ALL: "_destroy"},
    "torch.ops.aten": {ALL: "_scaled_dot_product_flash_attention_for_cpu"},
    "torch.utils": {ALL: "_python_dispatch._disable_current_modes _pytree.tree_map_only"},
    "torch._functorch": {ALL: "autograd_function.enable_single_level_autograd_function"},
    "torch._C": {
        ALL: f"""
        DispatchKey DispatchKeySet _after_autograd_keyset _are_functorch_transforms_active
        _disabled_torch_function_impl _functorch.is_functorch_wrapped_tensor _functorch.is_legacy_batchedtensor
        _functorch.peek_interpreter_stack _is_fwd_grad_enabled _is_any_autocast_enabled _is_tracing
        _len_torch_dispatch_stack {CUDA * (torch.version.cuda is not None or torch.version.hip is not None)}
        """,
        NEW: "_any_requires_grad",
    },
}
if torch.distributed.is_available():
    SEEN["torch.distributed"] = {
        ALL: """
        ProcessGroup._device_types tensor.DTensor._op_dispatcher tensor._op_schema.OpStrategy
        tensor._op_schema.RuntimeSchemaInfo tensor._ops.utils.expand_to_full_mesh_op_strategy
        """,
    }

# How a call is traced, transformed or dispatched.
dispatch_modes = find("torch._C._len_torch_dispatch_stack")  # make_fx, FakeTensorMode, FlopCounterMode, ...
is_jit_tracing = find("torch._C._is_tracing")
transform = find("torch._C._functorch.peek_interpreter_stack")  # torch.vmap, torch.func.jvp, functionalize, ...
transforms_active = find("torch._C._are_functorch_transforms_active")
is_in_transform = find("torch._C._functorch.is_functorch_wrapped_tensor")  # of vmap, jvp or grad
is_legacy_batched = find("torch._C._functorch.is_legacy_batchedtensor")
single_level = find("torch._functorch.autograd_function.enable_single_level_autograd_function")
forward_enabled = find("torch._C._is_fwd_grad_enabled")
forward_enabled_again = find("torch.autograd.forward_ad._set_fwd_grad_enabled")
is_functional = find("torch._is_functional_tensor")
any_autocast = find("torch._C._is_any_autocast_enabled")  # for any device: takes 0.2 us, a query for one device 1 us
DispatchKey = find("torch._C.DispatchKey")
DispatchKeySet = find("torch._C.DispatchKeySet")
after_autograd = find("torch._C._after_autograd_keyset")
without_modes = find("torch.utils._python_dispatch._disable_current_modes")

# Tensors, storages, operators.
make_wrapper = find("torch.Tensor._make_wrapper_subclass")
no_torch_function = find("torch._C._disabled_torch_function_impl")
tree_map_only = find("torch.utils._pytree.tree_map_only")
FLASH = "_scaled_dot_product_flash_attention_for_cpu"  # the operator of torch's flash kernel on the CPU
version_of = attrgetter("_version")  # of a tensor: how often it was written to

LIBRARY: str = torch._C.__file__  # linked to what torch is

# Streams of GPUs.
current_stream: Any = find("torch._C._cuda_getCurrentRawStream")  # the handle, by the index of a device
current_device: Any = find("torch._C._cuda_getDevice")
is_capturing: Any = find("torch._C._cuda_isCurrentStreamCapturing")


def _any_requires_grad(*tensors: Any) -> bool:
    return any(x is not None and x.requires_grad for x in tensors)


any_requires_grad = getattr(torch._C, "_any_requires_grad", _any_requires_grad)


def forward_level() -> int:
    """The level of forward-mode derivatives; negative outside."""
    return forward_ad._current_level


def in_forward_mode(enabled: bool = True) -> bool:
    """Whether tensors may have tangents of forward mode: in a graph of torch.compile no Python knows the level. If
    `enabled`, not where they are off, as inside of an autograd function.
    """
    return (forward_ad._current_level >= 0 or transforms_active()) and (not enabled or forward_enabled())


def storage_of(x: torch.Tensor) -> int:
    """What a tensor's storage is known by, also on meta."""
    return x.untyped_storage()._cdata


def unregister(library: torch.library.Library) -> None:
    """Removes what a library has registered."""
    library._destroy()


def arguments_of(operator: Any) -> Any:
    """The arguments in an operator's schema."""
    return operator._schema.arguments


def devices_of(group: Any) -> list[str]:
    """The types of devices whose tensors a process group can send."""
    return [x.type for x in group._device_types]


# Of sharding rules and benchmarks: imported when they are named, since that takes long.
_OF_DTENSOR = "torch.distributed.tensor."
_LAZY = {
    "OpStrategy": f"{_OF_DTENSOR}_op_schema.OpStrategy",
    "RuntimeSchemaInfo": f"{_OF_DTENSOR}_op_schema.RuntimeSchemaInfo",
    "expand_to_full_mesh": f"{_OF_DTENSOR}_ops.utils.expand_to_full_mesh_op_strategy",
    "dtensor_dispatcher": f"{_OF_DTENSOR}DTensor._op_dispatcher",
    "dynamo": "torch._dynamo",
    "gpu_sleep": "torch.cuda._sleep",
    "has_amx": "torch.cpu._is_amx_tile_supported",
    "has_avx512": "torch.cpu._is_avx512_supported",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return find(_LAZY[name])
    raise AttributeError(name)


# Marks that Dynamo looks for. torch's own functions set the same, but their import takes a second.
def mark_static(x: torch.Tensor) -> None:
    """As `torch._dynamo.mark_static_address`."""
    x._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]


def mark_constant(function: Any) -> None:
    """As `torch.compiler.assume_constant_result`."""
    function._dynamo_marked_constant = True


def mark_eager(function: Any, reason: str) -> None:
    """As `torch.compiler.disable`: the function and all that it calls is not inlined into a caller's graph, nor traced
    by itself after the graph break.
    """
    function._torchdynamo_disable, function._torchdynamo_disable_msg = True, reason
    if _skip is not None:
        _skip(function.__code__)


def _skipper() -> Callable[[CodeType], None] | None:
    """A function that makes Dynamo skip a code object and all that it calls; None if this torch cannot."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if not all(hasattr(frames, name) for name in ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")):
        return None
    skip = frames._FrameAction.SKIP
    return lambda code: frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))


_skip = _skipper()
