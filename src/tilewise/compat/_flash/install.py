"""tilewise under flash-attn's names, so that code that imports flash_attn runs on it unchanged."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ...errors import InvalidArgument
from . import package
from .package import VERSION

_before: dict[str, ModuleType | None] = {}  # the modules that tilewise replaces


def install(*, replace: bool = False) -> None:
    """Makes tilewise importable as flash-attn: `flash_attn`, `flash_attn.flash_attn_interface`,
    `flash_attn.bert_padding`, `flash_attn.layers.rotary` and FlashAttention 3's `flash_attn_interface`. Programs
    that look for the package find it: transformers takes `attn_implementation="flash_attention_2"` without a GPU too.

    Args:
        replace: replace an installed flash-attn in this process; without it, an installed flash-attn is an error. Code
            that has already imported flash-attn's functions keeps them.

    >>> install()
    >>> from flash_attn import flash_attn_func
    >>> from flash_attn.bert_padding import unpad_input
    >>> uninstall()
    """
    if _before:
        return
    modules = _modules()
    for name in ("flash_attn", "flash_attn_interface"):
        if not replace and (name in sys.modules or find_spec(name) is not None):
            raise InvalidArgument("replace", "False, and flash-attn is installed", "True to take its place")
    for name in (*modules, *(other for other in sys.modules if other.startswith("flash_attn."))):
        _before[name] = sys.modules.pop(name, None)
    sys.modules.update(modules)
    sys.meta_path.append(_MISSING)
    package.show()


def uninstall() -> None:
    """Restores what was importable before `install()`."""
    package.hide()
    if _MISSING in sys.meta_path:
        sys.meta_path.remove(_MISSING)
    for name, module in _before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module
    _before.clear()


class _Missing:
    """The last import finder: for a missing module of flash-attn it raises an error that names tilewise.

    `from flash_attn import x` comes here too: if the package has no x, Python looks for a module `flash_attn.x`.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent = name.rpartition(".")[0]
        asks_only = sys._getframe(2).f_globals.get("__name__") == "importlib.util"  # find_spec expects None
        if asks_only or not isinstance(module := sys.modules.get(parent), ModuleType) or parent not in _before:
            return None
        modules = ", ".join(other for other in _before if other in sys.modules)
        # Without `name=`: with it, Python would replace the message by its own.
        raise ModuleNotFoundError(
            f"{name} is not there: tilewise is installed as flash_attn, by tilewise.compat.flash_attn.install(). "
            f"It has the modules {modules}; {parent} has {', '.join(module.__dict__['__all__'])}"
        )


_MISSING = _Missing()


def _modules() -> dict[str, ModuleType]:
    from .. import bert_padding, flash_attn, flash_attn_3, rotary

    functions = {name: getattr(flash_attn, name) for name in flash_attn.__all__ if name.startswith("flash_attn")}
    modules = {
        "flash_attn": _module("flash_attn", {**functions, "__version__": VERSION}),
        "flash_attn.flash_attn_interface": _module("flash_attn.flash_attn_interface", functions),
        "flash_attn.bert_padding": _module("flash_attn.bert_padding", _public(bert_padding)),
        "flash_attn.layers": _module("flash_attn.layers", {}),
        "flash_attn.layers.rotary": _module("flash_attn.layers.rotary", _public(rotary)),
        "flash_attn_interface": _module("flash_attn_interface", _public(flash_attn_3)),
    }
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    return modules


def _public(module: ModuleType) -> dict[str, Any]:
    return {name: getattr(module, name) for name in module.__all__}


def _module(name: str, content: Mapping[str, Any]) -> ModuleType:
    """A module with a spec, which `importlib.util.find_spec` expects of modules in `sys.modules`.

    Each is a package without a folder, so that imports of missing names reach `_Missing`.
    """
    module = ModuleType(name, "flash-attn's functions, served by tilewise.")
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__dict__.update(content)
    module.__dict__["__all__"] = [word for word in content if not word.startswith("_")]
    return module
