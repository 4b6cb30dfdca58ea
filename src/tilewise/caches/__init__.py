"""KV caches: contiguous, ring, paged, shared, quantised. They use the public attention functions."""

from .contiguous import KVCache

__all__ = ["KVCache"]
