"""tilewise as an attention backend of SGLang: `--attention-backend tilewise`.

SGLang finds `register` by the entry point `tilewise` of its group `sglang.srt.plugins`. Written for SGLang 0.5.23: keys
and values of a layer are two tensors of token slots `[slots, Hkv, D]`, and a table has the slot of each token of each
request. With a page size of `p`, slots come in runs of `p`; so these are pages, and a batch is one `paged_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from ..api import paged_attention
from ..errors import InvalidArgument

NAME = "tilewise"


def register() -> None:
    """Registers the backend with SGLang and its name with the command line."""
    from sglang.srt.server_args import add_attention_backend_choices

    register_attention_backend(NAME)(TilewiseBackend)
    add_attention_backend_choices([NAME])


@dataclass
class Batch:
    """What all layers of one forward pass share."""

    table: torch.Tensor  # int32 [B, pages]
    lengths: torch.Tensor  # int32 [B]: keys, those of the queries included
    offsets: torch.Tensor  # int32 [B + 1]: cu_seqlens_q
    longest: int  # queries of one request


class TilewiseBackend(AttentionBackend):
    """Attention of every layer, over the pools of one model runner."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.slots = model_runner.req_to_token_pool.req_to_token  # [requests, tokens]
        self.pool = model_runner.token_to_kv_pool
        self.page_size = model_runner.page_size
        if hasattr(self.pool, "translate_loc_from_full_to_swa"):
            remedy = "start SGLang with --disable-hybrid-swa-memory"
            raise InvalidArgument("token_to_kv_pool", type(self.pool).__name__, "one pool for all layers", remedy)
        self.batch: Batch | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Reads a batch once, for all layers."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        if forward_batch.spec_info is not None:
            remedy = "start SGLang without speculative decoding"
            raise InvalidArgument("spec_info", type(forward_batch.spec_info).__name__, "None", remedy)
        lengths = forward_batch.seq_lens.to(torch.int32)
        most = int(forward_batch.seq_lens_cpu.max())  # on the host already
        rows = self.slots[forward_batch.req_pool_indices, : -(-most // self.page_size) * self.page_size]
        table = (rows[:, :: self.page_size] // self.page_size).to(torch.int32)
        if mode.is_decode():
            offsets = torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
            longest = 1
        else:
            counts = forward_batch.extend_seq_lens
            offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
            longest = max(forward_batch.extend_seq_lens_cpu)
        self.batch = Batch(table, lengths, offsets, longest)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes new keys and values to their slots, then attends: `q` `[T, H D]` to `[T, H Dv]`."""
        if layer.is_cross_attention:
            raise InvalidArgument("layer", "cross attention", "self attention", "use another backend for this model")
        if layer.logit_cap and layer.logit_capping_method != "tanh":
            raise InvalidArgument("logit_capping_method", layer.logit_capping_method, "tanh")
        if save_kv_cache and k is not None:
            self.pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        assert self.batch is not None
        b, heads = self.batch, layer.tp_q_head_num
        k_pages, v_pages = (
            buffer.unflatten(0, (-1, self.page_size))
            for buffer in (self.pool.get_key_buffer(layer.layer_id), self.pool.get_value_buffer(layer.layer_id))
        )
        width = layer.sliding_window_size  # keys to the left of the query's own
        out = paged_attention(
            q.reshape(-1, heads, layer.qk_head_dim),
            k_pages,
            v_pages,
            b.table,
            b.lengths,
            cu_seqlens_q=b.offsets,
            max_q=b.longest,
            causal=layer.attn_type != AttentionType.ENCODER_ONLY,
            scale=layer.scaling,
            softcap=layer.logit_cap,
            window=None if width is None or width < 0 else (width, None),
            sinks=sinks,
        )
        return out.flatten(1)

    forward_decode = forward_extend  # a step is a batch whose requests have one query each
