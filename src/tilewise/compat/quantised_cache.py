"""`QuantisedCache`: K and V of transformers' models in int8, int4 or fp8, for `generate(..., past_key_values=...)`.

A layer is a `KVCache` that grows. Its `update` returns no tensors but a `CachedKV`, which tilewise's attention reads in
its storage format; nothing is dequantised into a copy. A prompt into an empty cache is attended in full precision.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from ..core.options import is_int
from ..errors import InvalidArgument
from ..kv_cache import KVCache
from ..kv_cache.checks import MOST


class CachedKV:
    """Keys and values of a layer in their storage format; only tilewise's attention can read them."""

    def __init__(self, cache: KVCache, tokens: int) -> None:
        self.cache, self.tokens = cache, tokens

    @property
    def shape(self) -> tuple[int, int, int, int]:
        c = self.cache
        return c.batch, c.kv_heads, self.tokens, c.k_format.width

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a probe whether the attribute exists
            raise AttributeError(name)
        self._refuse()

    def __getitem__(self, index: Any) -> Any:
        self._refuse()

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        cls._refuse()

    @staticmethod
    def _refuse() -> NoReturn:
        raise InvalidArgument(
            "past_key_values", "a QuantisedCache that the model or another attention reads as tensors",
            "attn_implementation='tilewise', and a model that passes its cache to attention unchanged",
            "model.set_attn_implementation('tilewise'), a LatentCache for latent attention, or a DynamicCache",
        )  # fmt: skip


def check_capacity(capacity: Any) -> None:
    if not is_int(capacity) or not 0 <= capacity <= MOST:
        raise InvalidArgument("capacity", repr(capacity), f"a number of tokens, 0 to {MOST}")


class QuantisedLayer(CacheLayerMixin):  # type: ignore[misc]
    """The cache of one layer. With `window` it holds at least the tokens in the next query's window.

    Tokens are in the order of their positions. Those past the window are dropped all at once, when room is needed.
    """

    is_croppable = True

    def __init__(self, make: Callable[..., KVCache], capacity: int = 0, window: int | None = None) -> None:
        super().__init__()
        self.make, self.capacity, self.window = make, capacity, window
        self.is_sliding = window is not None
        self.record_past = False
        self.reset()

    def reset(self) -> None:
        self.cache: KVCache | None = None
        self.held = self.cumulative_length = 0  # tokens in the cache, and all so far
        self.is_initialized = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, heads, _, width = key_states.shape
        room = self._room(self._kept(key_states.shape[2]))
        self.dtype, self.device = key_states.dtype, key_states.device
        self.cache = self.make(batch, heads, room, width, value_dim=value_states.shape[3], device=self.device)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        new = key_states.shape[2]
        if self.cache is None:
            self.lazy_initialization(key_states, value_states)
        assert self.cache is not None
        if prompt := self.held == 0:
            kept = self._kept(new)  # the end of a prompt that is longer than the window
            k, v = (x[:, :, new - kept :] for x in (key_states, value_states))
        else:
            kept, k, v = new, key_states, value_states
        if self.held + kept > self.cache.capacity:
            self._make_room(kept)
        if prompt:  # it attends to the states themselves, which have their gradients
            k, v = k.detach(), v.detach()
        self.cache.append(k, None if self.cache.latent else v)
        self.held += kept
        self.cumulative_length += new
        if prompt:
            return key_states, value_states
        cached = self.hold(new)
        return cached, cached

    def hold(self, new: int) -> CachedKV:
        """A `CachedKV` of all tokens, the last `new` of which are new."""
        assert self.cache is not None
        return CachedKV(self.cache, self.held)

    def _kept(self, tokens: int) -> int:
        """How many of `tokens` tokens the next query can see."""
        return tokens if self.window is None or self.record_past else min(tokens, self.window - 1)

    def _room(self, tokens: int) -> int:
        """Slots for so many tokens and an eighth more: amortised, each token is copied eight times."""
        least = 0 if self.window is None else self.window - 1
        return max(self.capacity, -(-(max(tokens, least) * 9 // 8 + 1) // 64) * 64)

    def _make_room(self, new: int) -> None:
        assert self.cache is not None
        kept = self._kept(self.held)
        fits = self._room(0) if self.window is not None else 0
        room = fits if kept + new <= fits else self._room(kept + new)
        self.cache = self.cache.gather(start=self.held - kept, capacity=room)
        self.held = kept

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.held == 0:
            return query_length, 0
        if self.cache is not None and self.held + query_length > self.cache.capacity:
            kept = self._kept(self.held)  # `update` will make room
        else:
            kept = self.held
        return kept + query_length, self.cumulative_length - kept

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_max_length(self) -> int:
        return -1 if self.window is None else self.window

    def activate_past_recording(self) -> None:
        """Keeps tokens past the window until the next `crop`, which may need them."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens; their number is negative, as in transformers."""
        if tokens_to_remove > 0:
            raise InvalidArgument("tokens_to_remove", tokens_to_remove, "0 or a negative number")
        if self.cache is None:
            return
        left, total = self.held + tokens_to_remove, self.cumulative_length + tokens_to_remove
        if left < 0 or left < (total if self.window is None else min(total, self.window - 1)):
            remedy = "call activate_past_recording() before the tokens that may be removed"
            given = f"{tokens_to_remove} of {self.held} tokens held, in a window of {self.window}"
            raise InvalidArgument(
                "tokens_to_remove", given, "fewer: the window would need tokens that were dropped", remedy
            )
        if tokens_to_remove:
            for row in range(self.cache.batch):
                self.cache.truncate(row, left)
        self.held, self.cumulative_length = left, total
        if self.window is not None and left > (room := self._room(0)):  # recorded tokens past the window
            self.held = self.window - 1
            self.cache = self.cache.gather(start=left - self.held, capacity=room)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        rows = beam_idx.tolist()
        if self.cache is not None and rows != list(range(self.cache.batch)):
            self.cache = self.cache.gather(rows)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.cache is not None:
            self.cache = self.cache.gather(torch.arange(self.cache.batch)[indices.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.cache is not None:
            self.cache = self.cache.gather(torch.arange(self.cache.batch).repeat_interleave(repeats))


class QuantisedCache(Cache):  # type: ignore[misc]
    """A transformers cache with quantised K and V, for models with `attn_implementation="tilewise"`.

    Args:
        config: config of the model, which says which layers have windows. Without it, every layer keeps all tokens.
        dtype: storage of K and V: `"int8"`, `"int4"`, `"codebook4"`, `"fp8_e4m3"`, `"f16"`, `"bf16"` or `"f32"`.
        v_dtype: storage of V. Default: as K.
        group: elements that share a scale: 32, 64 or 128.
        rotate: rotate K and V before quantisation, as in `KVCache`.
        capacity: tokens to allocate at the start, in layers without a window. Without it, the cache grows by an eighth
            at a time.

    `generate` takes it with padding, beams, assisted and prompt-lookup decoding, and you can pass it again to continue.
    Layers with a window hold the window and up to an eighth more tokens.
    """

    def __init__(
        self,
        config: Any = None,
        dtype: torch.dtype | str = "int8",
        v_dtype: torch.dtype | str | None = None,
        *,
        group: int = 64,
        rotate: bool = False,
        capacity: int = 0,
    ) -> None:
        make = partial(KVCache, dtype=dtype, v_dtype=v_dtype, group=group, rotate=rotate)
        make(0, 1, 1, 128)  # checks options
        check_capacity(capacity)
        layer = partial(QuantisedLayer, make)
        if config is None:
            super().__init__(layer_class_to_replicate=partial(layer, capacity))
            return
        layers: list[Any] = []
        for theirs in DynamicCache(config=config).layers:
            if type(theirs) is DynamicLayer:
                layers.append(layer(capacity))
            elif type(theirs) is DynamicSlidingWindowLayer:
                layers.append(layer(0, theirs.sliding_window))
            elif type(theirs) is LinearAttentionLayer:  # no keys and values
                layers.append(theirs)
            else:
                given = f"a model with a {type(theirs).__name__}"
                raise InvalidArgument("config", given, "layers of full or sliding attention", "use a DynamicCache")
        super().__init__(layers=layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, including slots for future tokens."""
        return sum(layer.cache.nbytes for layer in self.layers if getattr(layer, "cache", None) is not None)
