"""Flash attention for PyTorch in which every kernel is Python."""

from . import forks  # noqa: F401  (before torch is imported)
from .alibi import alibi_slopes
from .api import attention, paged_attention, plan, varlen_attention
from .caches import KVCache, PagedKVCache
from .compat import discovery
from .errors import CacheFull, InvalidArgument, Unsupported
from .plan import Plan
from .quantised import Quantised
from .state import AttentionState, merge
from .tiles import TileMap

__version__ = "0.1.0"

__all__ = [
    "AttentionState",
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
    "merge",
    "paged_attention",
    "plan",
    "varlen_attention",
]

discovery.watch()
