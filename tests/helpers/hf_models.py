"""Tiny models of transformers with random weights, each for something that its attention does."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

VOCABULARY = 61
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4,
    "num_hidden_layers": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SHARED_KV = {**SMALL, "num_key_value_heads": 2}  # two query heads for each KV head
SLIDING = ["sliding_attention", "full_attention"]
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}

DECODERS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SHARED_KV)),
    # a head dim that does not follow from the width
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SHARED_KV, head_dim=40)),
    # a window in every layer
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SHARED_KV, sliding_window=6)),
    # softcap, and a window in every other layer
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(
            **SHARED_KV, head_dim=24, sliding_window=6, attn_logit_softcapping=5.0, query_pre_attn_scalar=24
        )
    ),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**SHARED_KV, head_dim=24, sliding_window=6, layer_types=SLIDING)
    ),
    # head dim 512 in layers that see all, scale 1
    "gemma4": lambda: hf.Gemma4ForCausalLM(
        hf.Gemma4TextConfig(
            **SHARED_KV, head_dim=32, global_head_dim=512, sliding_window=6, layer_types=SLIDING,
            vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=8, num_kv_shared_layers=0,
        )
    ),
    # sinks
    "gpt_oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(**SHARED_KV, **EXPERTS, head_dim=16, sliding_window=6, layer_types=SLIDING)
    ),
    # heads of V narrower than those of K
    "deepseek_v3": lambda: hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(
            **{**SMALL, "num_key_value_heads": 4}, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=16,
            qk_nope_head_dim=24, v_head_dim=20, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2,
            moe_intermediate_size=16, first_k_dense_replace=1,
        )
    ),
    # chunks
    "llama4": lambda: hf.Llama4ForCausalLM(
        hf.Llama4TextConfig(
            **SHARED_KV, **EXPERTS, head_dim=16, attention_chunk_size=6, intermediate_size_mlp=64,
            layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0],
        )
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=48, n_head=4, n_layer=2, n_positions=128, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
        )
    ),
}  # fmt: skip
ENCODERS = {
    "bert": lambda: hf.BertModel(hf.BertConfig(**SMALL)),
    # a window on both sides
    "modernbert": lambda: hf.ModernBertModel(
        hf.ModernBertConfig(**SMALL, local_attention=6, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2)
    ),
    # the same with head dim 512
    "embedding_gemma2": lambda: hf.EmbeddingGemma2Model(
        hf.EmbeddingGemma2Config(
            text_config={
                **SHARED_KV, "head_dim": 32, "sliding_window": 5, "layer_types": SLIDING,
                "hidden_size_per_layer_input": 8, "embedding_dim": 32,
                "per_layer_config": {"1": {"head_dim": 512, "num_key_value_heads": 1}},
            }
        )
    ),
    # a bias by distance, scale 1
    "t5_encoder": lambda: hf.T5EncoderModel(
        hf.T5Config(vocab_size=VOCABULARY, d_model=48, d_kv=12, d_ff=64, num_layers=2, num_heads=4, pad_token_id=0)
    ),
}  # fmt: skip


def build(name: str, others: dict[str, Any] | None = None) -> torch.nn.Module:
    return peaked({**DECODERS, **ENCODERS, **(others or {})}[name])


def peaked(make: Any) -> torch.nn.Module:
    """A model whose attention is peaked, so that a wrong mask or scale shows."""
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 1.4 * parameter.shape[-1] ** -0.5)
            elif "sinks" in parameter_name or "bias" in parameter_name:
                parameter.normal_(0.0, 0.5)
    return model
