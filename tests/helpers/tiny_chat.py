"""A folder as transformers saves models: a tiny Llama with random weights, a tokenizer of letters, a chat template."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<none>", "<user>", "<bot>", "<end>")
TEMPLATE = (
    "{% for m in messages %}{{ ('<user>' if m['role'] == 'user' else '<bot>') + m['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


def save(folder, window=None):
    """Writes the model and its tokenizer; returns the folder."""
    names = [*SPECIAL, *map(chr, range(33, 127)), "Ġ"]  # no bytes that are only a part of a letter; Ġ is a space
    made = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>", pad_token="<none>", chat_template=TEMPLATE, model_max_length=1024
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {
        "vocab_size": len(names), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "eos_token_id": 3,
        "pad_token_id": 0, "initializer_range": 0.3,
    }  # fmt: skip
    if window is None:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=window))
    model.save_pretrained(folder)
    return folder
