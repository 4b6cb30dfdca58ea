"""`tilewise doctor`"""

from __future__ import annotations

import argparse

from .arguments import Commands, command


def add(commands: Commands) -> None:
    parser = command(
        commands,
        run,
        help="show what this machine has, which backends run on it, and why others do not",
        description="Shows versions, the CPU and its vector extensions, threads, GPUs and driver, each backend "
        "(usable, or why not, with the remedy), other attention libraries and where files are kept. It runs no kernel "
        "and never fails. Put its output into a bug report.",
        example="tilewise doctor --json",
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON")


def run(args: argparse.Namespace) -> int:
    from ..doctor import doctor

    return doctor(args.json)
