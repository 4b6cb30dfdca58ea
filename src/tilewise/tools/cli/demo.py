"""`tilewise demo`"""

from __future__ import annotations

import argparse

import torch

from .arguments import Commands, add_device, command, default_device, seed


def add(commands: Commands) -> None:
    parser = command(
        commands,
        run,
        help="run attention in the shapes of known models, timed and checked",
        description="Runs attention in the shapes of known models on the best backend of this machine. For each it "
        "shows the plan, the time and that of torch's SDPA, and the error against a float64 oracle.",
        example="tilewise demo --quick",
    )
    parser.add_argument("--quick", action="store_true", help="shorter sequences, fewer repeats")
    add_device(parser)
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="seed of the random inputs (default 0)")


def run(args: argparse.Namespace) -> int:
    from ..demo import demo

    return demo(torch.device(default_device(args)), quick=args.quick, seed=args.seed)
