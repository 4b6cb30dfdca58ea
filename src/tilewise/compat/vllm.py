"""tilewise as an attention backend of vLLM: `vllm serve ... --attention-backend TILEWISE`.

vLLM finds `register` by the entry point `tilewise` of its group `vllm.general_plugins`. Written for vLLM 0.32: keys and
values of a layer are one tensor `[blocks, Hkv, block size, 2 D]` of any strides, and a batch is packed queries with
offsets, lengths and a block table: one `paged_attention` call.

Decode context parallel (`--decode-context-parallel-size R`): token i of a request is on rank i mod R of its group. In
each layer the queries of all heads are gathered, each rank attends over its own tokens with an affine rule of
positions, for any kind of batch, and gets the merged results of its own heads: one gather and one all-to-all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)

from ..api import paged_attention, varlen_attention
from ..core.problem import MAX_HEAD_DIM
from ..distributed.combine import combine, gathered
from ..distributed.layout import Ranks
from ..errors import InvalidArgument
from .vllm_cpu import Memory, NewTokens, Step

NAME = "TILEWISE"
ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


def register() -> None:
    """Registers the backend with vLLM, which calls this in each of its processes."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    path = f"{__name__}.TilewiseBackend"
    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, path)
        # vLLM unpickles its configuration in processes that have not loaded plugins yet: the name must resolve there.
        AttentionBackendEnum[NAME].__reduce_ex__ = lambda protocol: (registered, ())
    if current_platform.is_cpu():
        _let_cpus_choose(type(current_platform), path)


def registered() -> Any:
    """The backend in vLLM's list, after registering it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register()
    return AttentionBackendEnum[NAME]


def _let_cpus_choose(platform: Any, path: str) -> None:
    """On a CPU vLLM ignores the requested backend and takes its own; this makes it take tilewise if requested."""
    theirs = platform.get_attn_backend_cls
    if getattr(theirs, "by_tilewise", False):
        return

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, *rest: Any, **more: Any
    ) -> Any:
        other = attn_selector_config.use_mla or attn_selector_config.use_sparse
        if getattr(selected_backend, "name", None) == NAME and not other:
            return path
        return theirs(selected_backend, attn_selector_config, *rest, **more)

    get_attn_backend_cls.by_tilewise = True  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


class TilewiseBackend(AttentionBackend):
    """What tilewise supports, in vLLM's interface."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[TilewiseImpl]:
        return TilewiseImpl

    @staticmethod
    def get_builder_cls() -> type[TilewiseBuilder]:
        return TilewiseBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 1 <= head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_dcp(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, *ENCODERS)


@dataclass
class TilewiseMetadata(AttentionMetadata):
    """A batch: `tokens` queries in use, those of request `b` from `query_start_loc[b]`."""

    tokens: int
    query_start_loc: torch.Tensor  # int32 [B + 1]
    max_query_len: int
    seq_lens: torch.Tensor  # int32 [B]: keys, those of the queries included
    block_table: torch.Tensor  # int32 [B, blocks]
    causal: bool
    ranks: Ranks  # over which the tokens of requests are sharded
    local_lens: torch.Tensor  # int32 [B]: keys that this rank has
    new: NewTokens
    steps: dict[Any, Step] = field(default_factory=dict)  # bound calls of earlier layers, for layers like them

    @cached_property
    def is_plain(self) -> bool:
        """Whether each query has a new key to store, and all are on this rank."""
        return self.new.count == self.tokens and self.new.used is None and self.ranks.size == 1


class TilewiseBuilder(AttentionMetadataBuilder[TilewiseMetadata]):
    """Extracts what tilewise needs from vLLM's batch; nothing is planned ahead."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.ranks = Ranks(None, 0, 1)
        parallel: Any = getattr(vllm_config, "parallel_config", None)
        if getattr(kv_cache_spec, "dcp_sharded", False) and parallel.decode_context_parallel_size > 1:
            from vllm.distributed.parallel_state import get_dcp_group

            group, interleave = get_dcp_group(), parallel.cp_kv_cache_interleave_size
            if interleave != 1:
                remedy = "leave --cp-kv-cache-interleave-size out"
                raise InvalidArgument("cp_kv_cache_interleave_size", interleave, "1", remedy)
            self.ranks = Ranks(group.device_group, group.rank_in_group, group.world_size)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TilewiseMetadata:
        batch = common_attn_metadata
        if not isinstance(batch.causal, bool):
            raise InvalidArgument("causal", "a tensor", "one bool for all requests")
        _, rank, size = self.ranks
        return TilewiseMetadata(
            batch.num_actual_tokens,
            batch.query_start_loc,
            batch.max_query_len,
            batch.seq_lens,
            batch.block_table_tensor,
            batch.causal,
            self.ranks,
            batch.seq_lens if size == 1 else (batch.seq_lens + (size - 1 - rank)) // size,
            NewTokens(batch.slot_mapping),
        )


class TilewiseImpl(AttentionImpl[TilewiseMetadata]):
    """Attention of one layer."""

    can_return_lse_for_decode = True
    lse_base_on_e = True
    supports_dcp = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if attn_type not in (AttentionType.DECODER, *ENCODERS):
            raise InvalidArgument("attn_type", attn_type, "decoder, encoder or encoder_only")
        if kv_cache_dtype not in TilewiseBackend.supported_kv_cache_dtypes:
            raise InvalidArgument("kv_cache_dtype", kv_cache_dtype, "auto, float16 or bfloat16")
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads or num_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._memory: Memory | None = None
        self.slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32, device="cpu")
        self.options: dict[str, Any] = {"scale": float(scale), "softcap": logits_soft_cap, "sinks": sinks}
        if sliding_window is not None:  # counts the query's own key
            right = sliding_window - 1 if attn_type in ENCODERS else None
            self.options["window"] = (sliding_window - 1, right)
        # Equal for layers that differ only in q, k, v and out; None for layers with other tensors of their own.
        self.kind = "" if sinks is not None or alibi_slopes is not None else f"{num_heads} heads, {self.options}"

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes new tokens `[T, Hkv, D]` to their slots; a negative slot is padding."""
        if self.attn_type in ENCODERS:  # they have no cache
            return
        self._write(key, value, kv_cache, NewTokens(slot_mapping))

    def _write(self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, new: NewTokens) -> None:
        if len(key) != new.count:
            key, value = key[: new.count], value[: new.count]
        if kv_cache.is_cpu:
            if new.used is not None:
                key, value = key[new.used], value[new.used]
            if len(new.slots):
                self.memory(kv_cache).write(key, value, new)
            return
        size = kv_cache.shape[2]
        k_pages, v_pages = self.pages(kv_cache)
        slots = new.slots.clamp_min(0)  # padding goes to block 0, which vLLM never uses
        blocks, slots = slots // size, slots % size
        k_pages[blocks, slots] = key.to(k_pages.dtype)
        v_pages[blocks, slots] = value.to(v_pages.dtype)

    def pages(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """K and V as `[blocks, block size, Hkv, D]`, views."""
        if kv_cache.is_cpu:
            return self.memory(kv_cache).pages
        return kv_cache.transpose(1, 2).split(self.head_size, dim=-1)

    def memory(self, kv_cache: torch.Tensor) -> Memory:
        """The cache of this layer; made once."""
        if self._memory is None or not self._memory.is_of(kv_cache):
            self._memory = Memory(kv_cache)
        return self._memory

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TilewiseMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stores new keys and values, and attends with packed queries `[T, H, D]`, into the first rows of `output`."""
        if output_scale is not None or output_block_scale is not None:
            raise InvalidArgument("output_scale", "a tensor", "None: tilewise writes no quantised output")
        if attn_metadata is None:  # vLLM profiles its memory
            return output.zero_()
        m, T = attn_metadata, attn_metadata.tokens
        if self.attn_type in ENCODERS:
            q, k, v, out = query[:T], key[:T], value[:T], output[:T].view(T, self.num_heads, self.head_size)
            cu, longest = m.query_start_loc, m.max_query_len
            varlen_attention(q, k, v, cu, cu, max_k=longest, **self._options(m, out))
            return output
        writes = key is not None and self.kv_sharing_target_layer_name is None
        alike, memory = None, self.memory(kv_cache) if kv_cache.is_cpu else None
        if memory is not None and self.kind and writes and m.is_plain and len(query) == T and output.dim() == 3:
            alike = self.kind, memory.kind, query.dtype, query.stride(), key.stride(), value.stride(), output.stride()
            if (step := m.steps.get(alike)) is not None:
                step(memory, query, key, value, output)
                return output
        q, out = query[:T], output[:T].view(T, self.num_heads, self.head_size)
        if writes:
            self._write(key, value, kv_cache, m.new)
        if m.ranks.size > 1:
            out.copy_(self.sharded(q, kv_cache, m))
            return output
        args, options = (q, *self.pages(kv_cache), m.block_table, m.seq_lens), self._options(m, out)
        options |= {"cu_seqlens_q": m.query_start_loc, "causal": m.causal}
        paged_attention(*args, **options)
        if memory is not None and alike is not None:
            step = Step.after(memory, key, value, m.new, args, options)
            if step is not None:
                m.steps[alike] = step
        return output

    def _options(self, m: TilewiseMetadata, out: torch.Tensor) -> dict[str, Any]:
        if self.slopes is not None:
            self.slopes = self.slopes.to(out.device)
        return {**self.options, "alibi_slopes": self.slopes, "max_q": m.max_query_len, "out": out}

    def sharded(self, query: torch.Tensor, kv_cache: torch.Tensor, m: TilewiseMetadata) -> torch.Tensor:
        """Attention `[T, H, D]` of this rank's heads over requests whose tokens are sharded over the ranks of `m`."""
        q = gathered(query, m.ranks, 1)
        if self.slopes is not None and len(self.slopes) == self.num_heads:  # once: then those of all ranks
            self.slopes = gathered(self.slopes.to(q.device), m.ranks, 0)
        options = self.options | {"alibi_slopes": self.slopes, "sinks": None, "max_q": m.max_query_len}
        options |= {"cu_seqlens_q": m.query_start_loc, "causal": m.causal}
        options["q_offset"] = m.seq_lens - m.query_start_loc.diff()
        options |= {"k_start": m.ranks.rank, "k_stride": m.ranks.size}
        k, v = self.pages(kv_cache)
        state = paged_attention(q, k, v, m.block_table, m.local_lens, return_lse=True, **options)
        return combine(state, m.ranks, self.num_heads, sinks=self.options["sinks"]).out
