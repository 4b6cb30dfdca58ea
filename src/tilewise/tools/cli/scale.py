"""`tilewise scale`"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..models import MODELS
from .arguments import Commands, add_json, command, length

MOST_RANKS = 4096  # as `plan` takes
LENGTHS, RANKS = "8192,65536,524288,1048576,10485760", "2,8,64,512"


def add(commands: Commands) -> None:
    parser = command(
        commands,
        run,
        help="predict how well attention scales over many devices, for each scheme",
        description="Predicts the share of the ideal speed that a layer reaches when its sequence is sharded over many "
        "ranks, from exact counts of work and bytes, speeds measured on one device, and the stated speed of links. "
        "Nothing is run.",
        example="tilewise scale --model llama-3-8b --lengths 65536,1048576 --ranks 8,64 --backward",
    )
    parser.add_argument("--model", default="llama-3-8b", metavar="NAME", help=f"one of {', '.join(MODELS)}")
    parser.add_argument("--layer", metavar="NAME", help="a kind of layer; default: the most frequent one")
    parser.add_argument("--window", type=length, metavar="W", help="a window in place of the layer's")
    parser.add_argument("--lengths", type=numbers, default=LENGTHS, metavar="N,N", help=f"tokens (default {LENGTHS})")
    parser.add_argument("--ranks", type=ranks, default=RANKS, metavar="R,R", help=f"devices (default {RANKS})")
    parser.add_argument("--schemes", metavar="NAME,NAME", help="default: all")
    parser.add_argument("--backward", action="store_true", help="forward and backward together")
    parser.add_argument(
        "--link", type=speed, metavar="GB/S", help="speed of each device's link, each way (default 400)"
    )
    parser.add_argument(
        "--tflops", type=speed, metavar="N", help="speed of long forward calls on one device (default 668)"
    )
    add_json(parser, "also write the table to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a chart, as .svg or .png")


def numbers(text: str) -> list[int]:
    return [length(word) for word in text.split(",")]


def ranks(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdecimal() and 1 <= int(word) <= MOST_RANKS for word in words):
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected numbers of devices, 1 to {MOST_RANKS}, such as 2,8,64"
        )
    return [int(word) for word in words]


def speed(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1e-3 <= number <= 1e9:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a speed such as 400, 0.001 to 1e9")
    return number


def run(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from ...distributed.plan import Machine
    from ...errors import InvalidArgument
    from .. import scale
    from ..bench.run import check_files
    from ..models import find

    check_files(args.json, None, args.plot)
    known = find(args.model)
    layer = known.layer(args.layer) if args.layer else known.layers[0]
    layer = replace(layer, window=args.window) if args.window else layer
    schemes = args.schemes.split(",") if args.schemes else scale.SCHEMES
    if unknown := set(schemes) - set(scale.SCHEMES):
        raise InvalidArgument("--schemes", ", ".join(sorted(unknown)), f"some of {', '.join(scale.SCHEMES)}")
    machine = Machine()
    if args.link:
        machine = replace(machine, link=args.link * 1e9, name=f"H200, links of {args.link:g} GB/s each way")
    if args.tflops:
        share = args.tflops * 1e12 / machine.flops
        name = machine.name.replace("H200", f"{args.tflops:g} TFLOPS")
        machine = replace(machine, flops=args.tflops * 1e12, backward_flops=machine.backward_flops * share, name=name)
    return scale.show(layer, args.lengths, args.ranks, schemes, args.backward, machine, args.json, args.plot)
