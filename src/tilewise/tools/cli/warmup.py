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
        help="compile kernels ahead of first use: all of the CPU's, or those of a model's layers",
        description="Without a model: compiles every CPU kernel that the package does not bring prebuilt, and keeps "
        "it on disk, so that no first call waits. With one: runs each call that its layers make once, on a GPU where "
        f"there is one, so that their kernels are compiled and kept. Models: {', '.join(MODELS)}.",
        example="tilewise warmup --model llama-3-8b",
    )
    parser.add_argument("--model", metavar="NAME", help="a known model")
    add_device(parser)
    add_dtype(parser)
    parser.add_argument("--length", type=length, default=4096, metavar="N", help="tokens of a model's prompt (4096)")
    parser.add_argument("--train", action="store_true", help="gradients of the prompts too")


def run(args: argparse.Namespace) -> int:
    from ..warmup import warm_model, warmup

    if args.model is not None:
        return warm_model(args.model, default_device(args), args.dtype, args.length, args.train)
    if args.device == "cuda":
        raise InvalidArgument("--model", "none", "a known model: a GPU's kernels are those of its layers")
    return warmup()
