"""`tilewise chat`: a model on this machine with attention by tilewise, and by torch's SDPA to compare.

A chat keeps its KV cache: only the new tokens of each prompt are computed.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..errors import InvalidArgument
from .pretrained import causal_lm, converted, smollm2_file


@dataclass(frozen=True)
class Answer:
    """Generated tokens, and the seconds that the new part of the prompt and each token took."""

    tokens: list[int]
    prompt: int  # tokens of it that were computed
    prompt_seconds: float
    seconds: float

    @property
    def per_second(self) -> float:
        """Tokens a second after the prompt, without the first, which comes with it."""
        return (len(self.tokens) - 1) / self.seconds if len(self.tokens) > 1 else 0.0

    def __str__(self) -> str:
        prompt = f"{self.prompt} tokens of the prompt in {self.prompt_seconds:.2f} s"
        return f"{prompt}, then {self.per_second:.1f} tokens/s"


class Talk:
    """A model, a transformers cache and the tokens in it."""

    def __init__(self, model: Any, attention: str = "tilewise", make_cache: Callable[[], Any] | None = None) -> None:
        from transformers import DynamicCache

        self.model, self.attention = model, attention
        self.make_cache = make_cache or (lambda: DynamicCache(config=model.config))
        self.cache: Any = self.make_cache()
        self.cached: list[int] = []

    @torch.inference_mode()
    def answer(
        self,
        prompt: list[int],
        most: int,
        end: int | None = None,
        show: Callable[[int], None] | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Answer:
        """Greedy decoding after a prompt, until `end`, `most` tokens or `stopped`."""
        self.model.set_attn_implementation(self.attention)
        start = time.perf_counter()
        new = prompt[self._keep(prompt) :]
        tokens = [self._step(new)]
        prompt_done = time.perf_counter()
        while True:
            if show is not None:
                show(tokens[-1])
            if tokens[-1] == end or len(tokens) == most or stopped():
                break
            tokens.append(self._step(tokens[-1:]))
        return Answer(tokens, len(new), prompt_done - start, time.perf_counter() - prompt_done)

    def _step(self, tokens: list[int]) -> int:
        step = self.model(torch.tensor([tokens]), past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cached += tokens
        return int(step.logits[0, -1].argmax())

    def _keep(self, prompt: list[int]) -> int:
        """Truncates the cache to the prefix that it shares with the prompt, but its last token; returns its length."""
        pairs = zip(self.cached, prompt[:-1], strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.cached), len(prompt) - 1))
        if same < len(self.cached):
            try:
                self.cache.crop(same - len(self.cached))
            except (InvalidArgument, RuntimeError):  # a windowed cache has dropped those tokens
                self.cache, same = self.make_cache(), 0
        self.cached = self.cached[:same]
        return same


def chat(
    question: str | None,
    most: int,
    compare: bool,
    model: Path | None = None,
    gguf: Path | None = None,
    stored: str | None = None,
) -> int:
    """Answers one question, or questions from the terminal until an empty line; returns the exit status."""
    folder = model
    if folder is None:
        source = gguf or smollm2_file()  # reports missing packages first
        print(f"loading {source.stem}", file=sys.stderr)
        folder = converted(source)
    net, tokenizer = causal_lm(folder, "auto" if model else torch.float32)
    end, room = tokenizer.eos_token_id, net.config.get_text_config(decoder=True).max_position_embeddings
    talks = {"tilewise": Talk(net, "tilewise", _cache_of(net, stored))}
    if compare:
        talks["SDPA"] = Talk(net, "sdpa")
    messages: list[dict[str, str]] = []
    while True:
        text = question if question is not None else _ask()
        if not text:
            return 0
        messages.append({"role": "user", "content": text})
        prompt = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])
        if len(prompt) + most > room:
            print(
                f"tilewise chat: the conversation has {len(prompt)} tokens, and the model's context is full",
                file=sys.stderr,
            )
            return 1
        if len(messages) == 1:  # one-time set-up is not timed
            for talk in talks.values():
                Talk(net, talk.attention, talk.make_cache).answer(prompt, 2)
        with _interruptible() as stopped:
            ours = talks["tilewise"].answer(prompt, most, end, _Printer(tokenizer), stopped)
        print(f"\n\ntilewise  {ours}")
        if compare and not stopped():
            theirs = talks["SDPA"].answer(prompt, most, end)
            same = "the same tokens" if theirs.tokens == ours.tokens else "other tokens"
            print(f"SDPA      {theirs}, {same}")
        if question is not None:
            return 0
        messages.append({"role": "assistant", "content": tokenizer.decode(ours.tokens, skip_special_tokens=True)})


def _cache_of(model: Any, stored: str | None) -> Callable[[], Any] | None:
    if stored is None:
        return None
    from ..compat.transformers import QuantisedCache

    return lambda: QuantisedCache(model.config, stored)


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C only sets a flag, so that no step is left half done; a second one interrupts as usual."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, note)
    except ValueError:  # not in the main thread
        yield lambda: False
        return
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGINT, before)


def _ask() -> str:
    try:
        return input("\n> ").strip()
    except EOFError:
        return ""


class _Printer:
    """Prints tokens as they come. A token may be part of a character, so all are decoded each time."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.shown = tokenizer, ""
        self.tokens: list[int] = []

    def __call__(self, token: int) -> None:
        self.tokens.append(token)
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if not text.endswith("�"):
            print(text[len(self.shown) :], end="", flush=True)
            self.shown = text
