"""Text and vision towers with padding: all outputs, in rows of padding too, are those of torch's attention.

Poolers read rows of padding (the last row, a mean without the mask), and some models change the masks themselves.
"""

import copy
import functools
import warnings

import pytest
import torch
import transformers as hf

import tilewise
from hf_models import VOCABULARY, peaked
from tilewise.compat import transformers as ours
from tilewise.compat.own_attention import _found
from tilewise.testing.check import Mismatch, judge, largest_error

LENGTH = 12
SIZES = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
TEXT = {
    **SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
IMAGE = {**SIZES, "patch_size": 4, "image_size": 16}
PATCHES = {**SIZES, "patch_size": 4, "num_patches": 16}
BOTH_WAYS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}

TEXTS = {
    "siglip": lambda: hf.SiglipTextModel(hf.SiglipTextConfig(**TEXT)),
    "siglip2": lambda: hf.Siglip2TextModel(hf.Siglip2TextConfig(**TEXT)),
    "clip": lambda: hf.CLIPTextModel(hf.CLIPTextConfig(**TEXT)),
    "bert": lambda: hf.BertModel(hf.BertConfig(**TEXT)),
    "mpnet": lambda: hf.MPNetModel(hf.MPNetConfig(**TEXT)),
    "roberta": lambda: hf.RobertaModel(hf.RobertaConfig(**TEXT)),
    "modernbert": lambda: hf.ModernBertModel(
        hf.ModernBertConfig(**TEXT, local_attention=6, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2)
    ),
    "longformer": lambda: hf.LongformerModel(hf.LongformerConfig(**TEXT, attention_window=4)),
    # a mask of its own, made of the one it is given
    "doge": lambda: hf.DogeModel(hf.DogeConfig(**TEXT, keep_window_size=64)),
    "pix2struct": lambda: hf.Pix2StructTextModel(
        hf.Pix2StructTextConfig(
            vocab_size=VOCABULARY, hidden_size=48, d_kv=12, d_ff=64, num_layers=2, num_heads=4, initializer_range=0.02
        )
    ),
}
IMAGES = {
    "siglip": lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**IMAGE)),
    "siglip2": lambda: hf.Siglip2VisionModel(hf.Siglip2VisionConfig(**PATCHES)),
    "clip": lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**IMAGE)),
}
OWN = {"mpnet": "MPNetConfig", "longformer": "LongformerConfig"}  # their attention is nobody's but theirs


@functools.cache
def model_of(name, kind):
    return peaked({"text": TEXTS, "image": IMAGES}[kind][name])


def texts(padding):
    tokens = torch.randint(3, VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(tokens)
    for row, pad in enumerate((0, 3, 7, 11)):
        if pad:
            mask[row, slice(-pad, None) if padding == "right" else slice(pad)] = 0
        if padding == "inside" and pad:
            mask[row] = mask[row].roll(2)
    return {"input_ids": tokens.masked_fill(mask == 0, 0), "attention_mask": mask}


def images(name):
    g = torch.Generator().manual_seed(4)
    if name != "siglip2":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=g)}
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 12:] = 0
    shapes = torch.tensor([[4, 4], [3, 4]])
    return {"pixel_values": torch.randn(2, 16, 48, generator=g), "pixel_attention_mask": mask, "spatial_shapes": shapes}


def outputs(model, name, given):
    """All that a model returns, as one row of numbers; and the number of tilewise's calls."""
    floats = next(model.parameters()).dtype
    given = {k: x.to(floats) if x.is_floating_point() else x for k, x in given.items()}
    model.config._attn_implementation = name  # as from_pretrained does: models that compute by themselves take it too
    before = sum(tilewise.counters().values())
    with torch.no_grad():
        result = model(**given, output_hidden_states=True)
    rows = [result.last_hidden_state if "last_hidden_state" in result else result.logits]
    rows += [result.pooler_output] if result.get("pooler_output") is not None else []
    rows += [rows[0].mean(1), *(result.hidden_states or ())]
    return torch.cat([x.flatten() for x in rows]), sum(tilewise.counters().values()) - before


def check(name, kind, given, change=None):
    model = copy.deepcopy(model_of(name, kind))
    torchs = "sdpa" if model._supports_sdpa else "eager"
    plain, none = outputs(model, torchs, given)
    exact, _ = outputs(copy.deepcopy(model).double(), torchs, given)
    got, calls = outputs(model, "tilewise", change(given) if change else given)
    assert none == 0
    assert (calls == 0) == (name in OWN)
    judge("out", got, exact, 2 * largest_error(plain, exact), torch.float32)


# Rows of Pix2Struct that see nothing average all keys with SDPA, which adds the bias of positions to the mask.
CASES = [(name, padding) for name in TEXTS for padding in ("left", "right", "inside")]
CASES = [(name, padding) for name, padding in CASES if name != "pix2struct" or padding == "right"]


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_texts(name, padding):
    if name in OWN:
        _found.clear()
        with pytest.warns(UserWarning, match=f"models of {OWN[name]} compute attention by themselves"):
            check(name, "text", texts(padding))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # it is said once
        check(name, "text", texts(padding))


@pytest.mark.parametrize("name", IMAGES)
def test_images(name):
    check(name, "image", images(name))


@pytest.mark.parametrize("name", ["Falcon", "GPTJ"])
def test_a_name_that_has_no_effect_is_not_set_in_silence(name):
    """Their classes of attention are chosen when they are made: transformers leaves them as they are."""
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": VOCABULARY}
    model = getattr(hf, f"{name}Model")(getattr(hf, f"{name}Config")(**sizes, rotary_dim=4))
    _found.clear()
    model.set_attn_implementation("sdpa")
    with pytest.warns(UserWarning, match=f"models of {name}Config compute attention by themselves"):
        model.set_attn_implementation({"": "tilewise"})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # it is said once
        model.set_attn_implementation("tilewise")
        model_of("bert", "text").set_attn_implementation("tilewise")


def test_a_lost_mask_shows():
    """None of this passes if padding is computed with."""
    for name in TEXTS:
        if name not in OWN:
            with pytest.raises(Mismatch):
                check(name, "text", texts("right"), lambda given: {**given, "attention_mask": torch.ones(4, LENGTH)})
    with pytest.raises(Mismatch):
        check("siglip2", "image", images("siglip2"), lambda given: {**given, "pixel_attention_mask": torch.ones(2, 16)})


def test_an_assistant_that_flips_its_mask():
    """Gemma 4's drafts attend to another model's keys, with a window that it turns around."""
    sizes = {"num_key_value_heads": 2, "head_dim": 32, "global_head_dim": 64, "num_kv_shared_layers": 2}
    config = hf.Gemma4TextConfig(
        **TEXT, **sizes, **BOTH_WAYS, vocab_size_per_layer_input=0, hidden_size_per_layer_input=0
    )
    model = peaked(
        lambda: hf.Gemma4AssistantForCausalLM(hf.Gemma4AssistantConfig(text_config=config, backbone_hidden_size=48))
    )
    g = torch.Generator().manual_seed(5)
    embedded = torch.randn(4, 1, 96, generator=g)
    of = {"full_attention": (2, 12, 64), "sliding_attention": (2, 8, 32)}
    states = {name: tuple(torch.randn(4, *size, generator=g) for _ in "kv") for name, size in of.items()}
    mask = texts("left")["attention_mask"]
    results = []
    for dtype, name in ((torch.float32, "tilewise"), (torch.float32, "eager"), (torch.float64, "eager")):
        model = model.to(dtype)
        model.set_attn_implementation(name)
        given = {kind: tuple(x.to(dtype) for x in pair) for kind, pair in states.items()}
        places = torch.full((4, 1), LENGTH - 1)
        with torch.no_grad():
            results.append(
                model(
                    inputs_embeds=embedded.to(dtype), attention_mask=mask, position_ids=places, shared_kv_states=given
                ).logits
            )
    got, plain, exact = results
    judge("out", got, exact, 2 * largest_error(plain, exact), torch.float32)


def test_rows_of_padding_when_they_are_not_computed():
    """Whoever asks for it has zeros there; the tokens' rows, and poolers that read only these, stay what they are."""
    ours.register("tilewise_unpadded", unpad=True)
    given = texts("right")
    model = copy.deepcopy(model_of("bert", "text"))
    rows, poolers = [], []
    for name in ("sdpa", "tilewise_unpadded"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            result = model(**given)
        rows.append(result.last_hidden_state)
        poolers.append(result.pooler_output)
    real = given["attention_mask"].bool()
    assert torch.allclose(rows[0][real], rows[1][real], atol=1e-4)
    assert torch.allclose(*poolers, atol=1e-4)
    assert not torch.allclose(rows[0][~real], rows[1][~real], atol=1e-2)
