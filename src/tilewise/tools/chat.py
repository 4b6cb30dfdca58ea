"""`tilewise chat`: SmolLM2-135M-Instruct on this machine, its attention by tilewise and beside it by torch's SDPA."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .pretrained import END, SYSTEM, smollm2, smollm2_file

SUM_OF_POSITIONS = 8192  # of the model


@dataclass(frozen=True)
class Answer:
    """Tokens made after a prompt, and the seconds that the prompt and each token took."""

    tokens: list[int]
    prompt_seconds: float
    seconds: float

    @property
    def per_second(self) -> float:
        """Tokens in a second, after the prompt; the first comes with it."""
        return (len(self.tokens) - 1) / self.seconds if len(self.tokens) > 1 else 0.0


@torch.inference_mode()
def answer(
    model: Any, prompt: list[int], most: int, end: int | None = END, show: Callable[[int], None] | None = None
) -> Answer:
    """The likeliest tokens after a prompt, up to `end` or as many as `most`."""
    start = time.perf_counter()
    step = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
    made = [int(step.logits[0, -1].argmax())]
    prompt_done = time.perf_counter()
    while True:
        if show is not None:
            show(made[-1])
        if made[-1] == end or len(made) == most:
            break
        step = model(torch.tensor([made[-1:]]), past_key_values=step.past_key_values, use_cache=True)
        made.append(int(step.logits[0, -1].argmax()))
    return Answer(made, prompt_done - start, time.perf_counter() - prompt_done)


def chat(question: str | None, most: int, compare: bool) -> int:
    """Answers one question, or those that are typed until an empty line; returns the exit status."""
    smollm2_file()  # what is missing is told first
    print("loading SmolLM2-135M-Instruct", file=sys.stderr)
    model, tokenizer = smollm2()
    for name in ("sdpa", "tilewise") if compare else ("tilewise",):  # what is done once for each is not the answer's
        model.set_attn_implementation(name)
        answer(model, tokenizer.encode(SYSTEM).ids, 2)
    text = SYSTEM
    while True:
        asked = question if question is not None else _ask()
        if not asked:
            return 0
        text += f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        prompt = tokenizer.encode(text).ids
        if len(prompt) + most > SUM_OF_POSITIONS:
            print(f"tilewise chat: the talk has {len(prompt)} tokens, and the model no more room", file=sys.stderr)
            return 1
        ours = answer(model, prompt, most, show=_Printer(tokenizer))
        print(f"\n\ntilewise  {_speed(ours, len(prompt))}")
        if compare:
            model.set_attn_implementation("sdpa")
            sdpa = answer(model, prompt, most)
            model.set_attn_implementation("tilewise")
            same = "the same tokens" if sdpa.tokens == ours.tokens else "other tokens"
            print(f"SDPA      {_speed(sdpa, len(prompt))}, {same}")
        if question is not None:
            return 0
        text += tokenizer.decode(ours.tokens) + "<|im_end|>\n"


def _speed(made: Answer, prompt: int) -> str:
    return f"{made.per_second:6.1f} tokens/s after a prompt of {prompt} in {made.prompt_seconds:.2f} s"


def _ask() -> str:
    try:
        return input("\n> ").strip()
    except EOFError:
        return ""


class _Printer:
    """Prints tokens as they come; one may be a part of a letter, so the text is always that of all."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.shown = tokenizer, ""
        self.tokens: list[int] = []

    def __call__(self, token: int) -> None:
        self.tokens.append(token)
        text = self.tokenizer.decode(self.tokens)
        if not text.endswith("�"):
            print(text[len(self.shown) :], end="", flush=True)
            self.shown = text
