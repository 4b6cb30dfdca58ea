"""`QuantisedCache` in generate(), against eager attention over keys and values that were quantised and read back."""

import copy
import functools

import pytest
import torch
from transformers import DynamicCache, LlamaConfig

from hf_models import VOCABULARY, build
from tilewise import InvalidArgument, Quantised
from tilewise.compat import quantised_cache
from tilewise.compat.transformers import QuantisedCache, register

register()
PADS = (5, 0, 9)
LENGTH = 14
MODELS = ("llama", "mistral", "gemma2", "gpt_oss", "gemma4", "llama4")


@functools.cache
def model_of(name):
    return build(name)


def prompts(rows=3):
    tokens = torch.randint(3, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    for row, pad in zip(mask, PADS[:rows], strict=True):
        row[:pad] = 0
    return {"input_ids": tokens, "attention_mask": mask}


class ReadBack(DynamicCache):
    """What a `QuantisedCache` holds, as floats: a prompt is attended as it comes and kept quantised."""

    def __init__(self, config, stored, v_stored=None):
        super().__init__(config=config)
        self.stored = stored, v_stored or stored

    def update(self, key_states, value_states, layer_idx, *rest, **more):
        new = key_states, value_states
        narrow = [through(x, stored) for x, stored in zip(new, self.stored, strict=True)]
        first = self.layers[layer_idx].get_seq_length() == 0
        held = super().update(*narrow, layer_idx, *rest, **more)
        return new if first else held


def through(x, stored):
    return Quantised.from_float(x, stored, 64).dequantise() if stored != "f32" else x


def generate(model, attention, cache, inputs, **options):
    model.set_attn_implementation(attention)
    options = {"do_sample": False, "max_new_tokens": 90, "eos_token_id": -1, **options}
    with torch.no_grad():
        return model.generate(**inputs, past_key_values=cache, **options)


def both(name, inputs, stored="int8", v_stored=None, assistant=None, **options):
    """Tokens by tilewise over a `QuantisedCache`, and by eager attention over the same numbers."""
    model = model_of(name)
    found = []
    for attention, kind in (("tilewise", QuantisedCache), ("eager", ReadBack)):
        more = {} if assistant is None else {"assistant_model": copy.deepcopy(model_of(assistant))}
        cache = kind(model.config, stored, v_stored)
        found.append((generate(model, attention, cache, inputs, **options, **more), cache))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_padded_batch(name):
    (ours, cache), (wanted, _) = both(name, prompts())
    assert ours.equal(wanted)
    assert cache.get_seq_length() == LENGTH + 89
    for layer in cache.layers:
        if layer.is_sliding:  # it forgot, and nothing that a window reaches
            assert layer.window - 1 <= layer.held <= 64


@pytest.mark.parametrize(("stored", "v_stored"), [("int4", None), ("fp8_e4m3", None), ("int8", "int4"), ("f32", None)])
def test_formats(stored, v_stored):
    (ours, cache), (wanted, _) = both("gemma2", prompts(), stored, v_stored)
    assert ours.equal(wanted)
    made = cache.layers[0].cache
    assert (made.k_format.name, made.v_format.name) == (stored, v_stored or stored)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_beams(name):
    (ours, _), (wanted, _) = both(name, prompts(), num_beams=3, num_return_sequences=2, max_new_tokens=70)
    assert ours.equal(wanted)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("how", ["assisted", "lookup"])
def test_guessed_tokens(name, how):
    """Tokens that a smaller model or the prompt suggests are taken back where they are wrong."""
    inputs = {"input_ids": prompts(1)["input_ids"].repeat(1, 4)}  # a prompt that repeats itself
    more = {"assistant": "llama"} if how == "assisted" else {"prompt_lookup_num_tokens": 4}
    (ours, cache), (wanted, _) = both(name, inputs, **more)
    assert ours.equal(wanted)
    assert ours.equal(both(name, inputs)[0][0])  # a guess changes nothing
    assert cache.get_seq_length() <= ours.shape[1]


def test_it_goes_on():
    """A second prompt after the first answer, as in a chat."""
    model, first = model_of("gemma2"), prompts(1)["input_ids"]
    texts = []
    for attention, kind in (("tilewise", QuantisedCache), ("eager", ReadBack)):
        cache = kind(model.config, "int8")
        tokens = generate(model, attention, cache, {"input_ids": first}, max_new_tokens=60)
        tokens = torch.cat((tokens, first), 1)
        texts.append(generate(model, attention, cache, {"input_ids": tokens}, max_new_tokens=20))
    assert texts[0].equal(texts[1])


def test_without_a_config_and_reset():
    model = model_of("llama")
    cache = QuantisedCache()
    once = generate(model, "tilewise", cache, prompts())
    assert once.equal(both("llama", prompts())[1][0])
    cache.reset()
    assert cache.get_seq_length() == 0
    assert generate(model, "tilewise", cache, prompts()).equal(once)
    copied = copy.deepcopy(cache)
    cache.crop(-40)
    assert (cache.get_seq_length(), copied.get_seq_length()) == (LENGTH + 49, LENGTH + 89)


def test_memory():
    """int8 takes 17/64 of float32's room, and a window's layer what its window needs."""
    model = model_of("llama")
    cache = QuantisedCache(model.config, capacity=1024)
    generate(model, "tilewise", cache, prompts(), max_new_tokens=2)
    heads, width, layers = 2, 12, 2
    assert cache.nbytes == 2 * layers * 3 * 1024 * heads * (width + 4)  # a scale for a group, or for what there is
    cache = QuantisedCache(model_of("mistral").config)
    generate(model_of("mistral"), "tilewise", cache, prompts())
    assert cache.nbytes == 2 * layers * 3 * 64 * heads * (width + 4)


@pytest.mark.parametrize(("name", "attention"), [("llama", "eager"), ("llama", "sdpa"), ("deepseek_v3", "tilewise")])
def test_other_readers_are_told(name, attention):
    """DeepSeek-V3 caches latent rows and makes keys of them after that."""
    with pytest.raises(InvalidArgument, match="attn_implementation='tilewise'"):
        generate(model_of(name), attention, QuantisedCache(), prompts())


def test_what_is_refused():
    with pytest.raises(InvalidArgument, match="dtype"):
        QuantisedCache(dtype="int3")
    for capacity in (-1, True, 10**30, 1.5):
        with pytest.raises(InvalidArgument, match="capacity: got"):
            QuantisedCache(model_of("mistral").config, capacity=capacity)
    with pytest.raises(InvalidArgument, match="LinearAttentionAndFullAttentionLayer"):
        QuantisedCache(LlamaConfig(num_hidden_layers=1, layer_types=["hybrid"]))
    cache = QuantisedCache(model_of("mistral").config)
    generate(model_of("mistral"), "tilewise", cache, prompts())
    with pytest.raises(InvalidArgument, match="activate_past_recording"):
        cache.crop(-60)
    with pytest.raises(InvalidArgument, match="negative"):
        cache.crop(3)


def test_a_recording_is_trimmed():
    layer = quantised_cache.QuantisedLayer(functools.partial(quantised_cache.KVCache, dtype="int8"), window=6)
    draw = functools.partial(torch.randn, 2, 2)
    layer.update(draw(3, 8), draw(3, 8))
    layer.activate_past_recording()
    for _ in range(40):
        layer.update(draw(3, 8), draw(3, 8))
    assert (layer.held, layer.get_seq_length()) == (123, 123)
    layer.crop(-2)
    assert (layer.held, layer.get_seq_length()) == (5, 121)
    assert layer.cache.lengths.tolist() == [5, 5]


def test_rows_are_chosen():
    cache = QuantisedCache()
    k, v = torch.randn(2, 2, 2, 5, 16)
    cache.update(k, v, 0)
    cache.batch_repeat_interleave(3)
    assert cache.layers[0].cache.keys(2).equal(cache.layers[0].cache.keys(0))
    cache.batch_select_indices(torch.tensor([4, 0]))
    made = cache.layers[0].cache
    assert made.batch == 2
    torch.testing.assert_close(made.keys(0), through(k[1], "int8"), rtol=0, atol=0)
    torch.testing.assert_close(made.values(1), through(v[0], "int8"), rtol=0, atol=0)
