"""KV caches: contiguous, ring, paged, shared, quantised. They use only the public attention functions."""

from .contiguous import KVCache
from .paged import PagedKVCache

__all__ = ["KVCache", "PagedKVCache"]
