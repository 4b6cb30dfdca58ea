"""Dropout through the functions of other libraries: that of `tilewise.attention`, with a seed of torch's generator."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as torchs

import tilewise
from tilewise import InvalidArgument, attention, dropout_mask, varlen_attention
from tilewise.compat import flash_attn as fa
from tilewise.compat import sdpa

P = 0.3


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def seeded(function, *args, **options):
    torch.manual_seed(7)
    return function(*args, **options)


def test_sdpa():
    q, k, v = (draw(2, 4, 9, 8, seed=n).requires_grad_() for n in range(3))
    for options, same in (({}, {}), ({"is_causal": True}, {"causal": True, "q_offset": 0}), ({"scale": 0.2},) * 2):
        got = seeded(sdpa.scaled_dot_product_attention, q, k, v, dropout_p=P, **options)
        want = seeded(attention, q, k, v, dropout_p=P, **same)
        assert torch.equal(got, want)
        grads = [torch.autograd.grad(x.sin().sum(), (q, k, v)) for x in (got, want)]
        assert all(map(torch.equal, *grads))
    assert not torch.equal(got, sdpa.scaled_dot_product_attention(q, k, v, dropout_p=P, scale=0.2))
    with pytest.raises(InvalidArgument, match="dropout_p"):
        sdpa.scaled_dot_product_attention(q, k, v, dropout_p=1.5)


def test_sdpa_in_float64_is_torchs_with_dropout():
    q = torch.ones(1, 1, 4, 64, dtype=torch.float64)
    out = sdpa.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert not torch.equal(out, q)


def test_nested_tensors():
    q = torch.nested.nested_tensor([draw(n, 4, 8) for n in (3, 7)], layout=torch.jagged).transpose(1, 2)
    got = seeded(sdpa.scaled_dot_product_attention, q, q, q, dropout_p=P)
    rows, cu = q.values().transpose(0, 1), q.offsets()
    assert torch.equal(got.values().transpose(0, 1), seeded(varlen_attention, rows, rows, rows, cu, cu, dropout_p=P))


@pytest.mark.parametrize("make", [
    lambda: torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=P, batch_first=True), 2),
    lambda: torch.nn.TransformerDecoderLayer(16, 2, 32, dropout=P, batch_first=True),
])  # fmt: skip
def test_modules_of_torch_in_training(make):
    torch.manual_seed(1)
    module, x = make().train(), draw(2, 9, 16)
    args = (x, x) if isinstance(module, torch.nn.TransformerDecoderLayer) else (x,)
    with sdpa.installed():
        before = sum(tilewise.counters().values())
        first = seeded(module, *args)
        assert sum(tilewise.counters().values()) > before
        assert torch.equal(seeded(module, *args), first)
        assert not torch.equal(module(*args), first)
        first.square().sum().backward()
        assert all(x.grad.isfinite().all() for x in module.parameters())
        module.eval()
        assert torch.equal(module(*args), module(*args))
    assert torch.allclose(module(*args), seeded(module, *args))


def test_multihead_attention_drops_weights_alone():
    """With an identity for what follows, an output is a sum of kept weights times values."""
    module = torch.nn.MultiheadAttention(8, 1, dropout=P, batch_first=True, bias=False).train()
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.eye(8).repeat(3, 1))
        module.out_proj.weight.copy_(torch.eye(8))
        x = torch.eye(8)[None]
        with sdpa.installed():
            got, _ = seeded(module, x, x, x, need_weights=False)
        torch.manual_seed(7)
        kept = dropout_mask((1, 1, 8, 8), P, int(torch.randint(2**63 - 1, (1,))))[0]
    assert torch.equal(got != 0, kept)


def test_flash_attn():
    q, k, v = draw(2, 9, 4, 8).requires_grad_(), draw(2, 12, 2, 8), draw(2, 12, 2, 8, seed=1)
    options = {"dropout_p": P, "causal": True, "layout": "blhd"}
    got = seeded(fa.flash_attn_func, q, k, v, P, causal=True, deterministic=True)
    want = seeded(attention, q, k, v, **options)
    assert torch.equal(got, want)
    assert torch.equal(*(torch.autograd.grad(x.sin().sum(), q)[0] for x in (got, want)))
    assert not torch.equal(fa.flash_attn_func(q, k, v, P, causal=True), got)
    out, lse, mask = seeded(fa.flash_attn_func, q, k, v, P, causal=True, return_attn_probs=True)
    assert torch.equal(out, got)
    assert torch.equal(lse, fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[1])
    assert mask.numel() == 0
    cu = torch.tensor([0, 3, 9], dtype=torch.int32)
    rows = draw(9, 4, 8)
    got = seeded(fa.flash_attn_varlen_func, rows, rows, rows, cu, cu, 6, 6, P)
    assert torch.equal(got, seeded(varlen_attention, rows, rows, rows, cu, cu, max_q=6, max_k=6, dropout_p=P))
    qkv = torch.stack([rows] * 3, 1)
    assert torch.equal(seeded(fa.flash_attn_varlen_qkvpacked_func, qkv, cu, 6, P), got)
    with pytest.raises(InvalidArgument, match="dropout_p"):
        fa.flash_attn_func(q, k, v, -0.1)


MODELS = {
    "llama": {"attention_dropout": P, "num_key_value_heads": 2},
    "bert": {"attention_probs_dropout_prob": P, "hidden_dropout_prob": 0.0},
    "gpt2": {"attn_pdrop": P, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_in_training(name):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    if name == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4}
    config = transformers.AutoConfig.for_model(name, vocab_size=50, **sizes, **MODELS[name])
    torch.manual_seed(0)
    kind = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="tilewise").train()
    tokens = torch.randint(50, (2, 14))

    def step():
        model.zero_grad()
        loss = seeded(model, tokens, labels=tokens, **({} if name == "bert" else {"use_cache": False})).loss
        loss.backward()
        return loss.detach(), [x.grad.clone() for x in model.parameters() if x.grad is not None]

    loss, grads = step()
    again, same = step()
    assert torch.equal(loss, again)
    assert all(map(torch.equal, grads, same))
    with torch.no_grad():
        assert not torch.equal(model(tokens, labels=tokens).loss, loss)
    model.gradient_checkpointing_enable()
    checkpointed, same = step()
    assert torch.equal(checkpointed, loss)
    assert all(map(torch.allclose, same, grads))
    model.eval()
    with torch.no_grad():
        assert torch.equal(*(model(tokens, labels=tokens).loss for _ in range(2)))


def test_torchs_own_share_of_dropped_weights():
    """Means over seeds are those of a call without dropout, as with torch's function."""
    q, k, v = (draw(1, 2, 6, 8, seed=n) for n in range(3))
    want = torchs(q, k, v)
    for function in (torchs, sdpa.scaled_dot_product_attention):
        torch.manual_seed(3)
        mean = torch.stack([function(q, k, v, dropout_p=0.1) for _ in range(3000)]).mean(0)
        assert (mean - want).abs().max() < 0.05
