"""tilewise as an attention implementation of Hugging Face transformers.

Any model that uses transformers' attention interface takes `attn_implementation="tilewise"` once tilewise is imported,
before or after transformers: `discovery` calls `register`.

>>> from tilewise.compat import transformers as tilewise_transformers
>>> tilewise_transformers.register()
'tilewise'
"""

from __future__ import annotations

import os
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch

from ..api import attention, varlen_attention
from ..core.extras import MissingPackage, install_line, need
from ..errors import InvalidArgument
from .autocast import autocast
from .discovery import too_old

need("hf", "transformers", by="tilewise.compat.transformers")
if reason := too_old():
    raise MissingPackage(f"{reason}: {install_line('hf')}", name="transformers")
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel  # noqa: E402

from .latent_cache import CachedLatent, LatentCache, absorbed_queries  # noqa: E402
from .lazy_mask import Pattern, pattern_of  # noqa: E402
from .mask_patterns import make_mask  # noqa: E402
from .own_attention import has_own_attention  # noqa: E402
from .quantised_cache import CachedKV, QuantisedCache  # noqa: E402

__all__ = ["LatentCache", "QuantisedCache", "attention_forward", "register", "register_flash"]

# transformers treats names that contain these differently.
RESERVED = ("flash", "sdpa", "flex_attention", "eager", "paged|", "/")
# As a repository's owner and name. With "flash" and 2 in it, transformers' continuous batching accepts it.
FLASH = "tilewise/flash-attn2"
Packed = tuple[Any, Any, Any, Any, Any]  # offsets of q and k, the longest sequences of both, lengths of k in use


def register(name: str = "tilewise", *, unpad: bool = False) -> str:
    """Registers `name` as an attention implementation of transformers: an attention function and a mask function.

    Args:
        unpad: padding of an encoder's batch is not computed: its rows give 0, where SDPA's see the tokens. Faster, and
            right for models that read no row of padding: a pooler of the last row, or a mean without the mask, does.

    Returns:
        `name`, for `from_pretrained(..., attn_implementation=name)` or `model.set_attn_implementation(name)`.
    """
    if any(word in name for word in RESERVED):
        remedy = "transformers gives names with " + ", ".join(map(repr, RESERVED)) + " a meaning of their own"
        raise InvalidArgument("name", repr(name), "a plain name such as 'tilewise'", remedy)
    if not hasattr(PreTrainedModel.set_attn_implementation, "__wrapped__"):
        PreTrainedModel.set_attn_implementation = _warning(PreTrainedModel.set_attn_implementation)
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, partial(make_mask, unpad=True) if unpad else make_mask)
    return name


def _warning(set_name: Any) -> Any:
    """`set_attn_implementation` that warns of models which compute attention by themselves, and so keep doing it."""

    @wraps(set_name)
    def set_attn_implementation(self: Any, attn_implementation: Any, *args: Any, **options: Any) -> None:
        set_name(self, attn_implementation, *args, **options)
        names = attn_implementation.values() if isinstance(attn_implementation, dict) else (attn_implementation,)
        if any(isinstance(name, str) and AttentionInterface().get(name) is attention_forward for name in names):
            has_own_attention(type(self.config))

    return set_attn_implementation


def register_flash() -> str:
    """Registers tilewise's flash-attn functions as a local kernel that transformers can load with `kernels`.

    Continuous batching needs it: it takes only torch's implementations and those with FlashAttention's interface.

    Returns:
        The name, for `model.set_attn_implementation(name, allow_all_kernels=True)`.
    """
    others = [entry for entry in os.environ.get("LOCAL_KERNELS", "").split(":") if entry.partition("=")[0] != FLASH]
    ours = f"{FLASH}={Path(__file__).parent / 'flash_kernel'}"
    os.environ["LOCAL_KERNELS"] = ":".join([*filter(None, others), ours])
    return FLASH


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | CachedKV,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    cache: Any = None,
    output_attentions: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls.

    Args:
        query: `[B, H, Lq, D]`.
        key: `[B, Hkv, Lk, D]`, or the contents of a `QuantisedCache` or `LatentCache`.
        value: `[B, Hkv, Lk, Dv]`, or likewise.
        attention_mask: the result of `make_mask`, or the model's own mask `[B, 1 or H, Lq, Lk]`, bool or additive.
        dropout: the probability that a weight is dropped; models pass their own in training.
        scaling: factor of the scores. Default: `D ** -0.5`.
        is_causal: without a mask, query `i` sees keys 0 to `i`. Default: the module's `is_causal`.
        softcap, s_aux: `softcap` and `sinks` of `tilewise.attention`.
        position_bias: `[1 or B, H, Lq, Lk]`, added to the scores.
        indices: `[B, Lq, n]`: `key_indices` of `tilewise.attention`, for models that choose keys (DeepSeek V3.2, ...).
        block_indices: `[B, Hkv, Lq, n]`: key blocks of each query (MiniMax M3), of the module's `block_size`.
        cu_seq_lens_q, cu_seq_lens_k: offsets of sequences that are packed into one row.
        max_length_q, max_length_k: length of the longest of them.

    Under autocast, query, key and value are converted to its dtype, as in torch's function. Windows need no argument:
    they are part of the mask. Other arguments that transformers passes (positions, flags of the model) do not change
    attention.

    Returns:
        `[B, Lq, H, Dv]`, and None instead of attention weights.
    """
    _refuse(output_attentions, cache)
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    if dropout != 0.0:
        options["dropout_p"] = dropout
    if block_indices is not None:
        indexer: Any = module.indexer
        indices = _keys_of_blocks(block_indices, indexer.block_size, key.shape[2])
    if indices is not None:
        options["key_indices"] = indices.to(torch.int32)
    if isinstance(key, CachedLatent):
        query, values = absorbed_queries(module, *autocast(query, query))
        out = _over_cache(module, query, key, attention_mask, is_causal, position_bias, options)  # [B, L, H, rank]
        return (out.transpose(1, 2) @ values).transpose(1, 2), None
    if isinstance(key, CachedKV):
        return _over_cache(module, query, key, attention_mask, is_causal, position_bias, options), None
    query, key, value = autocast(query, query, key, value)
    if attention_mask is position_bias is cu_seq_lens_q is None and query.shape[2] == 1:
        # A decode step sees the whole cache, and its output is the same in either layout: two views less.
        return attention(query, key, value, **options).transpose(1, 2), None
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)  # [B, L, H, D]
    packed: Any = None if cu_seq_lens_q is None else (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, None)
    if (pattern := pattern_of(attention_mask)) is not None:
        options |= pattern.options
        packed = _packed_by(pattern, q, k, v, indices, position_bias) or packed
    elif attention_mask is not None:
        options["mask"] = attention_mask[..., : k.shape[1]]
        packed = None  # the pattern has the sequences
    elif _is_causal(module, is_causal) and q.shape[1] > 1:
        # Top-left alignment: keys past it are empty slots of a static cache.
        k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
        options |= {"causal": True, "q_offset": 0}
    if packed is not None:
        return _in_sequences(q, k, v, packed, position_bias, options), None
    if position_bias is not None:
        options["mask"] = _with_bias(position_bias[..., : k.shape[1]], options.get("mask"))
    return attention(q, k, v, layout="blhd", **options), None


def _refuse(output_attentions: bool | None, cache: Any) -> None:
    """Refuses arguments of transformers that have no counterpart here."""
    if output_attentions:
        remedy = "attn_implementation='eager' has attention weights"
        raise InvalidArgument("output_attentions", output_attentions, "False", remedy)
    if cache is not None:
        remedy = "use the name that tilewise.compat.transformers.register_flash() returns"
        raise InvalidArgument(
            "cache", type(cache).__name__, "None: this name does not serve continuous batching", remedy
        )


def _is_causal(module: torch.nn.Module, is_causal: bool | None) -> Any:
    return getattr(module, "is_causal", True) if is_causal is None else is_causal


def _over_cache(
    module: torch.nn.Module,
    query: torch.Tensor,
    cached: CachedKV,
    attention_mask: torch.Tensor | None,
    is_causal: bool | None,
    position_bias: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attention over a `QuantisedCache`, whose keys are those of the mask, from position 0 on."""
    (query,) = autocast(query, query)
    if (pattern := pattern_of(attention_mask)) is not None:
        options |= pattern.options
        if (lengths := options.pop("kv_lengths", None)) is not None:
            visible = torch.arange(cached.tokens, device=query.device) < lengths[:, None]
            options["mask"] = visible[:, None, None]  # [B, 1, 1, Lk]
    elif attention_mask is not None:
        options |= {"mask": attention_mask[..., : cached.tokens], "causal": False}
    else:
        options["causal"] = _is_causal(module, is_causal)
    if position_bias is not None:
        options["mask"] = _with_bias(position_bias[..., : cached.tokens], options.get("mask"))
    if query.shape[2] == 1:
        return cached.cache.attend(query, **options).transpose(1, 2)
    return cached.cache.attend(query.transpose(1, 2), layout="blhd", **options)


def _keys_of_blocks(blocks: torch.Tensor, size: int, keys: int) -> torch.Tensor:
    """Block indices `[..., n]` as key indices `[..., n * size]`; -1 where there is none."""
    indices = blocks[..., None] * size + torch.arange(size, device=blocks.device)
    return indices.masked_fill((blocks < 0)[..., None] | (indices >= keys), -1).flatten(-2)


def _packed_by(
    pattern: Pattern,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor | None,
    position_bias: torch.Tensor | None,
) -> Packed | None:
    """The packed sequences of a pattern, if no other options express its mask or packing copies nothing; else None."""
    p = pattern.packed
    if p is None:
        return None
    if p.only and indices is not None:
        raise InvalidArgument("indices", "separate keys for each packed sequence", "one sequence in each row")
    if indices is None and (p.only or (position_bias is None and all(_end_to_end(x) for x in (q, k, v)))):
        return p.offsets, p.offsets, p.longest, p.longest, p.lengths
    return None


def _in_sequences(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packed: Packed,
    position_bias: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attention within the packed sequences of all rows."""
    if position_bias is not None:
        remedy = "give each sequence a row of its own"
        raise InvalidArgument("position_bias", "a bias with packed sequences", "None", remedy)
    cu_q, cu_k, options["max_q"], options["max_k"], options["kv_lengths"] = packed
    options.pop("q_offset", None)  # positions count from each sequence's start
    options.pop("mask", None)  # it hides padding, which is in no sequence
    shape = q.shape[:2]
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    return varlen_attention(q, k, v, cu_q, cu_k, **options).unflatten(0, shape)


def _end_to_end(x: torch.Tensor) -> bool:
    """Whether the rows of `[B, L, H, D]` are contiguous, so that they can be viewed as one."""
    return x.stride(0) == x.shape[1] * x.stride(1)


def _with_bias(bias: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """A position bias and a mask as one float mask."""
    if mask is None:
        return bias
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask


register()  # `discovery` cannot if this module is the first to import transformers
