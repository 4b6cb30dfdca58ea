"""`tilewise tune`"""

from __future__ import annotations

import argparse
import sys

import torch

from .arguments import BAD_ARGUMENTS, Commands, add_json, command


def add(commands: Commands) -> None:
    parser = command(
        commands,
        run,
        help="find the fastest tiles for the kernels on this GPU",
        description="Times every tile that fits, on the shapes of known models, and writes the fastest to a JSON file "
        "that later calls read. Takes minutes, most of them for compiling. Ctrl-C stops it and keeps what is done.",
        example="tilewise tune --quick",
    )
    parser.add_argument("--quick", action="store_true", help="only the shapes of the demo")
    add_json(parser, "write to this file, which no call reads; default: tuned.json in the cache directory")


def run(args: argparse.Namespace) -> int:
    from ..tune import tune

    if not torch.cuda.is_available():
        print("tilewise tune: error: torch sees no CUDA device here, and tiles are timed on a GPU", file=sys.stderr)
        return BAD_ARGUMENTS
    return tune(torch.device("cuda", torch.cuda.current_device()), args.quick, args.json)
