"""Models of transformers that compute attention by themselves, whatever the name of the implementation."""

from __future__ import annotations

import sys
import warnings

import torch

_found: dict[type, bool] = {}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_own_attention(config: type) -> bool:
    """Whether the models of a config class do not call transformers' attention interface; warns if so, once for each.

    As transformers, by their module: it has attention layers, and does not import the interface.
    """
    if config not in _found:
        module = sys.modules.get(config.__module__.replace(".configuration_", ".modeling_"))
        names = vars(module) if module is not None else {}
        layers = (x for name, x in names.items() if "Attention" in name and isinstance(x, type))
        own = any(issubclass(x, torch.nn.Module) and x.__module__ == module.__name__ for x in layers)  # type: ignore[union-attr]
        _found[config] = own and "ALL_ATTENTION_FUNCTIONS" not in names
        if _found[config]:
            remedy = "load it without attn_implementation='tilewise'"
            warnings.warn(
                f"models of {config.__name__} compute attention by themselves: transformers does not call "
                f"tilewise there; {remedy}",
                stacklevel=2,
            )
    return _found[config]
