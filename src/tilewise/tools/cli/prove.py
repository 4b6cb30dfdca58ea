"""`tilewise prove`"""

from __future__ import annotations

import argparse

from .arguments import Commands, command, device


def add(commands: Commands) -> None:
    parser = command(
        commands,
        run,
        help="check this machine's kernels by family, so that the planner may take those that no record covers",
        description="Runs a part of the conformance suite for each family of kernels, with repeats, memory full of NaN "
        "and the times that decide between backends, in under two minutes. What it finds is kept beside the kernel "
        "cache, for this device, driver and these versions; the planner takes what is right and faster, and leaves out "
        "what failed. It goes on where it was stopped. The exit status is 1 if a family failed.",
        example="tilewise prove --report",
    )
    parser.add_argument(
        "--device", type=numbered_device, metavar="cpu|cuda|cuda:N|mps", help="default: the GPU if there is one"
    )
    parser.add_argument("--again", action="store_true", help="forget the earlier result")
    parser.add_argument("--minutes", type=minutes, default=None, metavar="N", help="the most it may take (default 2)")
    parser.add_argument(
        "--report",
        action="store_true",
        help="print the result as a block for an issue",
    )


def numbered_device(text: str) -> str:
    kind, _, number = text.partition(":")
    if number and not (kind == "cuda" and number.isdecimal()):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected cpu, cuda, cuda:N or mps")
    return device(kind) + f":{number}" * bool(number)


def minutes(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1440:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of minutes above 0")
    return number


def run(args: argparse.Namespace) -> int:
    from ..prove import prove

    return prove(args.device, args.again, args.minutes, args.report)
