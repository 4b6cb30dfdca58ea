"""Flash attention for PyTorch, written entirely in Python."""

from .core import forks  # noqa: F401  (before torch is imported)

# isort: split

from typing import TYPE_CHECKING

from .alibi import alibi_slopes
from .api import attention, paged_attention, plan, varlen_attention
from .autograd import AttentionGradients, attention_backward
from .compat import discovery
from .core.dropout import dropout_mask
from .core.lazy import modules
from .core.plan import Plan
from .core.tile_map import TileMap
from .dispatch.activity import counters
from .errors import CacheFull, InvalidArgument, Unsupported
from .kv_cache import KVCache, PagedKVCache
from .quantised import Quantised
from .state import AttentionState, Aux, merge

__version__ = "0.1.0"

__all__ = [
    "AttentionGradients",
    "AttentionState",
    "Aux",
    "CacheFull",
    "InvalidArgument",
    "KVCache",
    "PagedKVCache",
    "Plan",
    "Quantised",
    "TileMap",
    "Unsupported",
    "__version__",
    "alibi_slopes",
    "attention",
    "attention_backward",
    "counters",
    "dropout_mask",
    "merge",
    "paged_attention",
    "plan",
    "varlen_attention",
]

if TYPE_CHECKING:  # type checkers accept any name of a module with a __getattr__
    from . import distributed, testing  # noqa: F401
else:
    __getattr__ = modules(__name__, "distributed", "testing")


def __dir__() -> list[str]:
    return sorted([*__all__, "compat", "distributed", "testing"])


discovery.watch()
