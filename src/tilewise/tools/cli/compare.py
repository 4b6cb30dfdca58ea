"""`tilewise compare`"""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import Commands, command


def add(commands: Commands) -> None:
    parser = command(
        commands,
        run,
        help="show what got faster or slower between two records of the bench",
        description="Compares two JSON files of `tilewise bench`, case by case. A change counts if it is larger than "
        "the spread of both runs and larger than 3%. If both have peers, their average change is taken as a change of "
        "the machine and divided out. The exit status is 1 if tilewise got slower or wrong somewhere, and 2 if nothing "
        "can be compared.",
        example="tilewise compare before.json now.json",
    )
    parser.add_argument("before", type=Path, metavar="A.json")
    parser.add_argument("after", type=Path, metavar="B.json")
    parser.add_argument("--all", action="store_true", help="also show cases without a change")


def run(args: argparse.Namespace) -> int:
    from ..bench.compare import compare

    return compare(args.before, args.after, args.all)
