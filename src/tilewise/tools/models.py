"""The attention layers of known models, by name. Benchmarks, tests, the tuner, the demo and `tilewise plan` take their
shapes from here.

A new model is one more entry in `MODELS`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Layer:
    """One kind of attention layer: its heads and options."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int = 0  # 0: as head_dim
    latent: bool = False  # V is a view of the first columns of K
    causal: bool = True
    window: int | tuple[int, int] | None = None
    chunk: int | None = None
    softcap: float | None = None
    scale: float | None = None  # None: head_dim ** -0.5
    sinks: bool = False
    alibi: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """A model: its kinds of layers, most frequent first."""

    name: str
    about: str
    layers: tuple[Layer, ...]

    def layer(self, name: str) -> Layer:
        """The layer of that name."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise InvalidArgument("layer", repr(name), f"one of {', '.join(layer.name for layer in self.layers)}")


def _model(name: str, about: str, *layers: Layer) -> Model:
    return Model(name, about, layers)


MODELS = {
    model.name: model
    for model in (
        _model("minilm", "all-MiniLM-L6, a sentence encoder", Layer("full", 12, 12, 32, causal=False)),
        _model("bert-base", "BERT base and its many children", Layer("full", 12, 12, 64, causal=False)),
        _model(
            "modernbert",
            "ModernBERT base: an encoder, two of three layers see 64 tokens to each side",
            Layer("local", 12, 12, 64, causal=False, window=(64, 64)),
            Layer("global", 12, 12, 64, causal=False),
        ),
        _model("smollm2", "SmolLM2 135M", Layer("full", 9, 3, 64)),
        _model("llama-3-8b", "Llama 3 8B", Layer("full", 32, 8, 128)),
        _model("llama-3-70b", "Llama 3 70B", Layer("full", 64, 8, 128)),
        _model(
            "llama-4",
            "Llama 4 Scout: three of four layers see their own chunk of 8192",
            Layer("chunked", 40, 8, 128, chunk=8192),
            Layer("global", 40, 8, 128),
        ),
        _model("qwen3", "Qwen3 8B", Layer("full", 32, 8, 128)),
        _model("qwen3-30b", "Qwen3 30B A3B: eight query heads to a KV head", Layer("full", 32, 4, 128)),
        _model("mistral-7b", "Mistral 7B v0.1: a window of 4096", Layer("local", 32, 8, 128, window=4096)),
        _model(
            "gemma-2",
            "Gemma 2 9B: softcap, every second layer with a window of 4096",
            Layer("local", 16, 8, 256, window=4096, softcap=50.0),
            Layer("global", 16, 8, 256, softcap=50.0),
        ),
        _model(
            "gemma-3",
            "Gemma 3 12B: five of six layers with a window of 1024",
            Layer("local", 16, 8, 256, window=1024),
            Layer("global", 16, 8, 256),
        ),
        _model(
            "gemma-4",
            "Gemma 4 26B A4B: five of six layers with a window of 1024, the others with heads of 512",
            Layer("local", 16, 8, 256, window=1024, scale=1.0),
            Layer("global", 16, 2, 512, scale=1.0),
        ),
        _model(
            "gpt-oss",
            "gpt-oss 20B: sinks, every second layer with a window of 128",
            Layer("local", 64, 8, 64, window=128, sinks=True),
            Layer("global", 64, 8, 64, sinks=True),
        ),
        _model(
            "deepseek-v3",
            "DeepSeek V3: latent attention, as it is trained and (absorbed) as it decodes",
            Layer("full", 128, 128, 192, value_dim=128),
            Layer("absorbed", 128, 1, 576, value_dim=512, latent=True, scale=192**-0.5),
        ),
        _model("bloom-7b", "BLOOM 7B: ALiBi", Layer("full", 32, 32, 128, alibi=True)),
    )
}


def find(name: str) -> Model:
    """The model of that name.

    >>> find("gemma-4").layer("global").head_dim
    512
    """
    if name not in MODELS:
        raise InvalidArgument("model", repr(name), f"one of {', '.join(MODELS)}")
    return MODELS[name]
