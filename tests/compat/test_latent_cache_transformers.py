"""`LatentCache` in transformers' models of latent attention, and keys that a model chooses, against eager attention."""

import functools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import transformers as hf
from transformers import DynamicCache

from hf_models import DECODERS, SMALL, VOCABULARY, build
from tilewise import InvalidArgument
from tilewise.compat import latent_cache
from tilewise.compat.transformers import LatentCache, attention_forward, register
from tilewise.dispatch import planner
from tilewise.testing.check import judge, largest_error

register()
MLA = {
    **SMALL, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24, "v_head_dim": 20,
}  # fmt: skip
EXPERTS = {
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}  # fmt: skip
INDEXER = {"index_n_heads": 2, "index_head_dim": 24, "index_topk": 5}
MODELS = {
    "deepseek_v3": DECODERS["deepseek_v3"],
    "deepseek_v2": lambda: hf.DeepseekV2ForCausalLM(
        hf.DeepseekV2Config(**MLA, **{**EXPERTS, "topk_method": "greedy", "first_k_dense_replace": 2})
    ),
    "minicpm3": lambda: hf.MiniCPM3ForCausalLM(hf.MiniCPM3Config(**MLA)),
    "glm4_moe_lite": lambda: hf.Glm4MoeLiteForCausalLM(hf.Glm4MoeLiteConfig(**MLA, **EXPERTS)),
}
SPARSE = {
    "deepseek_v32": lambda: hf.DeepseekV32ForCausalLM(hf.DeepseekV32Config(**MLA, **EXPERTS, **INDEXER)),
    "glm_moe_dsa": lambda: hf.GlmMoeDsaForCausalLM(hf.GlmMoeDsaConfig(**MLA, **EXPERTS, **INDEXER)),
}
PADS = (5, 0, 9)


@functools.cache
def model_of(name):
    model = build(name, MODELS | SPARSE)
    model.set_experts_implementation("eager")  # torch's grouped product has no float64
    return model


def prompts(rows=3, length=14):
    tokens = torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    for row, pad in zip(mask, PADS[:rows], strict=True):
        row[:pad] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def generate(model, attention, cache, inputs, **options):
    model.set_attn_implementation(attention)
    options = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": -1, **options}
    with torch.no_grad():
        return model.generate(**inputs, past_key_values=cache, **options)


def steps(model, attention, cache, tokens, *lengths):
    """Logits of tokens that come in chunks of these lengths."""
    model.set_attn_implementation(attention)
    found, start = [], 0
    with torch.no_grad():
        for n in lengths:
            found.append(model(tokens[:, start : start + n], past_key_values=cache, use_cache=True).logits)
            start += n
    return torch.cat(found, 1)


@pytest.mark.parametrize("name", [*MODELS, *SPARSE])
def test_texts_are_those_of_eager_attention(name):
    model, inputs = model_of(name), prompts()
    expected = generate(model, "eager", DynamicCache(config=model.config), inputs)
    cache = LatentCache(model.config)
    assert torch.equal(generate(model, "tilewise", cache, inputs), expected)
    row = model.config.kv_lora_rank + model.config.qk_rope_head_dim
    assert cache.nbytes == 4 * 3 * row * sum(layer.cache.capacity for layer in cache.layers)


@pytest.mark.parametrize("name", [*MODELS, *SPARSE])
def test_logits_are_as_near_to_float64_as_those_of_eager_attention(name):
    model = model_of(name)
    tokens = torch.randint(3, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(2))
    lengths = (20, 1, 1, 5, 1, 12)
    plain = steps(model, "eager", DynamicCache(config=model.config), tokens, *lengths)
    exact = steps(model.double(), "eager", DynamicCache(config=model.config), tokens, *lengths)
    model.float()
    found = steps(model, "tilewise", LatentCache(model.config), tokens, *lengths)
    apart = steps(model, "tilewise", DynamicCache(config=model.config), tokens, *lengths)
    allowed = 2 * (plain - exact).abs().max()
    assert (found - exact).abs().max() <= allowed
    assert (apart - exact).abs().max() <= allowed


def test_steps_are_absorbed_and_long_chunks_expanded(monkeypatch):
    """Of a step tilewise sees one KV head whose rows hold both; of a prompt and a long chunk all heads."""
    model, seen = model_of("deepseek_v3"), []
    choose = planner.choose
    monkeypatch.setattr(planner, "choose", lambda p, *rest: seen.append(p) or choose(p, *rest))
    monkeypatch.setattr(latent_cache, "EXPANDED", 7)
    tokens = torch.randint(3, VOCABULARY, (2, 40))
    steps(model, "tilewise", LatentCache(model.config), tokens, 19, 3, 8)
    kinds = {(p.q_len, p.kv_heads, p.head_dim, p.value_dim, p.v_in_k) for p in seen}
    assert kinds == {(19, 4, 40, 20, False), (3, 1, 32, 16, True), (8, 4, 40, 20, False)}


def test_beams_cropping_and_assisted_decoding():
    model, inputs = model_of("deepseek_v3"), prompts()
    expected = generate(model, "eager", DynamicCache(config=model.config), inputs, num_beams=3)
    assert torch.equal(generate(model, "tilewise", LatentCache(model.config), inputs, num_beams=3), expected)
    one = prompts(1)
    expected = generate(model, "eager", DynamicCache(config=model.config), one, prompt_lookup_num_tokens=3)
    found = generate(model, "tilewise", LatentCache(model.config), one, prompt_lookup_num_tokens=3)
    assert torch.equal(found, expected)


def test_a_chosen_set_of_keys_is_not_dropped():
    """With fewer keys than there are, what a model chose matters: without it the text is another."""
    model, inputs = model_of("deepseek_v32"), prompts(length=30)
    few = generate(model, "eager", DynamicCache(config=model.config), inputs)
    for layer in model.model.layers:
        layer.self_attn.indexer.index_topk = 500
    try:
        every = generate(model, "eager", DynamicCache(config=model.config), inputs)
    finally:
        for layer in model.model.layers:
            layer.self_attn.indexer.index_topk = 5
    assert not torch.equal(few, every)
    assert torch.equal(generate(model, "tilewise", DynamicCache(config=model.config), inputs), few)


@pytest.mark.parametrize("dtype", ["int8", "bf16"])
def test_rows_may_be_stored_narrowly(dtype):
    model = model_of("deepseek_v3")
    tokens = torch.randint(3, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(3))
    whole, narrow = LatentCache(model.config), LatentCache(model.config, dtype, group=32)
    expected, found = (steps(model, "tilewise", cache, tokens, 30, 1, 1, 1) for cache in (whole, narrow))
    assert narrow.nbytes < 0.6 * whole.nbytes
    error = (found - expected).norm() / expected.norm()
    assert 0 < error < 0.05


def test_what_is_refused():
    llama = hf.LlamaConfig(**SMALL)
    with pytest.raises(InvalidArgument, match="a model of type 'llama', expected one whose attention has expand_kv"):
        LatentCache(llama)
    model = model_of("deepseek_v3")
    with pytest.raises(InvalidArgument, match="attn_implementation='tilewise'"):
        generate(model, "eager", LatentCache(model.config), prompts())
    with pytest.raises(InvalidArgument, match="'int4' with latent"):
        LatentCache(model.config, "int4")
    for capacity in (-1, True, 10**30, 1.5):
        with pytest.raises(InvalidArgument, match="capacity: got"):
            LatentCache(model.config, capacity=capacity)


@pytest.mark.parametrize("keys", [40, 48])
def test_blocks_that_each_query_chose(keys):
    """As MiniMax M3 hands them over: -1 for none, the last block perhaps not whole."""
    q, k, v = torch.randn(2, 4, 6, 32), torch.randn(2, 2, keys, 32), torch.randn(2, 2, keys, 32)
    blocks = torch.stack([torch.randperm(5)[:3] for _ in range(24)]).view(2, 2, 6, 3)
    blocks[0, 0, 0, 1:], blocks[:, :, 2, 0] = -1, -1
    module = torch.nn.Module()
    module.indexer = torch.nn.Module()
    module.indexer.block_size, module.is_causal = 10, True
    chosen = (blocks[..., None, :] == (torch.arange(keys) // 10)[:, None]).any(-1)  # [B, Hkv, Lq, Lk]
    mask = torch.ones(6, keys, dtype=torch.bool).tril(keys - 6)
    out, _ = attention_forward(module, q, k, v, mask[None, None], block_indices=blocks)
    seen = (chosen & mask).repeat_interleave(2, 1)
    plain, exact = (
        F.scaled_dot_product_attention(*(x.to(dtype) for x in (q, k, v)), seen, enable_gqa=True)
        for dtype in (torch.float32, torch.float64)
    )
    judge("out", out.transpose(1, 2), exact, 2 * largest_error(plain, exact), torch.float32)
