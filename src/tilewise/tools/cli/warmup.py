"""`tilewise warmup`"""

from __future__ import annotations

import argparse

from ...errors import InvalidArgument
from ..models import MODELS
from .arguments import Commands, add_device, add_dtype, command, default_device, length


def add(commands: Commands) -> None:
    parser = command(
        commands,
        run,
        help="compile kernels ahead of first use: all CPU kernels, or those of a model's layers",
        description="Without a model: compiles every CPU kernel that is not prebuilt and keeps it on disk, so that no "
        "first call waits. With a model: runs each call of its layers once, on a GPU if there is one, so that their "
        f"kernels are compiled and kept. Models: {', '.join(MODELS)}.",
        example="tilewise warmup --model llama-3-8b",
    )
    parser.add_argument("--model", metavar="NAME", help="a known model")
    add_device(parser)
    add_dtype(parser)
    parser.add_argument(
        "--length", type=length, default=4096, metavar="N", help="tokens of the model's prompt (default 4096)"
    )
    parser.add_argument("--train", action="store_true", help="also compile the gradients of prompts")


def run(args: argparse.Namespace) -> int:
    from ..warmup import warm_model, warmup

    if args.model is not None:
        return warm_model(args.model, default_device(args), args.dtype, args.length, args.train)
    if args.device == "cuda":
        raise InvalidArgument("--model", "none", "a known model: a GPU's kernels are those of its layers")
    return warmup()
