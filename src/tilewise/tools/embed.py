"""`tilewise embed`: the similarity of sentences by all-MiniLM-L6-v2, with attention by tilewise."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from .pretrained import minilm, minilm_folder

EXAMPLES = (
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "A cheetah is running behind its prey.",
    "Attention is computed tile by tile.",
)


def batch(tokenizer: Any, sentences: Sequence[str]) -> dict[str, torch.Tensor]:
    """Tokens of sentences and their mask `[B, L]`, padded on the right to the longest."""
    encoded = tokenizer(list(sentences), padding=True, truncation=True, return_tensors="pt")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


@torch.inference_mode()
def embed(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sentences as unit vectors `[B, 384]`: the mean of their tokens, normalised."""
    states = model(**inputs).last_hidden_state
    weights = inputs["attention_mask"][..., None].to(states.dtype)
    return torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1), dim=-1)


def show(sentences: Sequence[str]) -> int:
    """Prints the cosine similarity of sentences; returns the exit status."""
    minilm_folder()  # reports missing packages first
    print("loading all-MiniLM-L6-v2", file=sys.stderr)
    model, tokenizer = minilm()
    sentences = sentences or EXAMPLES
    vectors = embed(model, batch(tokenizer, sentences))
    alike = vectors @ vectors.T
    for i, sentence in enumerate(sentences):
        print(" ".join(f"{value:5.2f}" for value in alike[i].tolist()), " ", sentence)
    return 0
