"""`LatentCache`: a KV cache for transformers' models of latent attention (MLA: DeepSeek, GLM, Kimi).

These models cache a latent row c (`kv_lora_rank` elements from which keys and values are projected) and a rope part r
that all heads share, and would expand them to keys and values of every head at each step. With keys [W_uk c, r] and
values W_uv c, the projections can be applied to queries and outputs instead (absorbed form):

    q . k = (W_uk^T q_nope) . c + q_rope . r        sum p v = W_uv (sum p c)

A step is then attention of all heads over one KV head, [c, r], whose first elements are the values. Prompts, and chunks
of `EXPANDED` queries or more, are cheaper in the expanded form.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from ..errors import InvalidArgument
from ..kv_cache import KVCache
from .quantised_cache import CachedKV, QuantisedLayer, check_capacity

# From this many queries on, expanding a key (2 * 512 * 256 FLOP for each head of DeepSeek V3) costs less than what the
# absorbed form costs more for each query (2 * (576 + 512 - 192 - 128)).
EXPANDED = 170


class CachedLatent(CachedKV):
    """The latent rows of a layer, returned to the model in place of keys and values; the last `new` are new."""

    def __init__(self, cache: KVCache, tokens: int, new: int, dtype: torch.dtype) -> None:
        super().__init__(cache, tokens)
        self.new, self.dtype = new, dtype

    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows in the model's form: latent parts and rope parts, `[B, 1, L, ...]`."""
        latent = self.cache.latent
        rows = self.cache.store.k.map(lambda x: x[:, :, : self.tokens]).floats(self.dtype)
        return rows[..., :latent], rows[..., latent:]


class LatentLayer(QuantisedLayer):
    """The cache of one layer: a `KVCache` with `latent=`, and the keys of the model's indexer, if it has one."""

    def __init__(self, make: Callable[..., KVCache], capacity: int, stored: torch.dtype | str | None) -> None:
        super().__init__(make, capacity)
        self.stored = stored

    def reset(self) -> None:
        super().reset()
        self.indexer_keys: torch.Tensor | None = None  # [B, L, D]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, _, tokens, width = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        options = {"latent": value_states.shape[-1], "device": self.device}
        self.cache = self.make(batch, 1, self._room(tokens), width, self.stored or self.dtype, **options)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        """`key_states` are latent parts, `value_states` rope parts."""
        rows = torch.cat((key_states, value_states), -1)
        cached, _ = super().update(rows, key_states)
        return (key_states, value_states) if cached is rows else (cached, cached)

    def hold(self, new: int) -> CachedKV:
        assert self.cache is not None
        return CachedLatent(self.cache, self.held, new, self.dtype)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        old = [] if self.indexer_keys is None else [self.indexer_keys]
        self.indexer_keys = torch.cat([*old, indexer_key_states], 1)
        return self.indexer_keys

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.indexer_keys is not None and tokens_to_remove:
            self.indexer_keys = self.indexer_keys[:, :tokens_to_remove]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._select_indexer(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._select_indexer(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys.repeat_interleave(repeats, 0)

    def _select_indexer(self, rows: torch.Tensor) -> None:
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[rows.to(self.indexer_keys.device)]


class LatentCache(Cache):  # type: ignore[misc]
    """A transformers cache for models with latent attention (MLA) and `attn_implementation="tilewise"`.

    Args:
        config: config of a model whose attention keeps latent rows: DeepSeek V2, V3, V3.2, GLM, Kimi, MiniCPM3, ...
        dtype: storage of rows: `"fp8_latent"`, `"int8"`, ... Default: the dtype of the model's rows.
        group: elements that share a scale: 32, 64 or 128.
        capacity: tokens to allocate at the start. Without it, the cache grows by an eighth at a time.

    A token takes `kv_lora_rank + qk_rope_head_dim` elements in each layer. Decode steps are computed in the absorbed
    form. Pass it to `generate` like a `QuantisedCache`.
    """

    def __init__(
        self, config: Any, dtype: torch.dtype | str | None = None, *, group: int = 64, capacity: int = 0
    ) -> None:
        text = config.get_text_config(decoder=True)
        absorb(text.model_type)
        layers = DynamicCache(config=config).layers
        if other := {type(x).__name__ for x in layers if not isinstance(x, DynamicLayer) or x.is_sliding}:
            raise InvalidArgument("config", f"a model with {other.pop()}", "layers of full attention")
        check_capacity(capacity)
        make = partial(KVCache, group=group)
        make(0, 1, 1, text.kv_lora_rank + text.qk_rope_head_dim, dtype, latent=text.kv_lora_rank)  # checks options
        super().__init__(layers=[LatentLayer(make, capacity, dtype) for _ in layers])

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, including slots for future tokens."""
        return sum(layer.cache.nbytes for layer in self.layers if layer.cache is not None)


@cache
def absorb(model_type: str) -> None:
    """Patches the attention of a transformers model to pass latent rows to tilewise. Other caches are not affected."""
    try:
        module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
        classes = [x for _, x in inspect.getmembers(module, inspect.isclass) if "expand_kv" in vars(x)]
    except ImportError:
        classes = []
    if not classes:
        given, wanted = f"a model of type {model_type!r}", "one whose attention has expand_kv, as DeepSeek V3"
        raise InvalidArgument("config", given, wanted, "use a QuantisedCache or a DynamicCache")
    attention: Any
    for attention in classes:
        attention.expand_kv = _or_cached(attention.expand_kv)


def _or_cached(expand: Any) -> Any:
    @wraps(expand)
    def expand_kv(self: Any, kv_nope: Any, k_rot: Any) -> tuple[Any, Any]:
        if not isinstance(kv_nope, CachedLatent):
            return expand(self, kv_nope, k_rot)
        return expand(self, *kv_nope.parts()) if kv_nope.new >= EXPANDED else (kv_nope, k_rot)

    return expand_kv


def absorbed_queries(module: Any, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries `[B, H, L, nope + rope]` as `[B, H, L, rank + rope]`, and W_uv `[H, rank, Dv]` for the output."""
    nope, weight = module.qk_nope_head_dim, module.kv_b_proj.weight
    if not weight.is_floating_point() or module.kv_b_proj.bias is not None:
        given = f"a kv_b_proj of {weight.dtype}" + " with a bias" * (module.kv_b_proj.bias is not None)
        raise InvalidArgument("past_key_values", f"a LatentCache with {given}", "float weights", "use a DynamicCache")
    weight = weight.to(query.dtype).unflatten(0, (-1, nope + module.v_head_dim))  # [H, nope + Dv, rank]
    latent = query[..., :nope] @ weight[:, :nope]
    return torch.cat((latent, query[..., nope:]), -1), weight[:, nope:].mT
