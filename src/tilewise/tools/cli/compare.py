"""`tilewise compare`"""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import Commands, command


def add(commands: Commands) -> None:
    parser = command(
        commands,
        run,
        help="what got faster or slower between two records of the bench",
        description="Compares two JSON files of `tilewise bench`, case by case. A change counts if it is larger than "
        "the spread of either run, and than 3%. Where both have peers, what changed for them too is the machine's "
        "doing and is taken out. Exit status 1 if something of ours got slower or wrong, 2 if nothing can be compared.",
        example="tilewise compare before.json now.json",
    )
    parser.add_argument("before", type=Path, metavar="A.json")
    parser.add_argument("after", type=Path, metavar="B.json")
    parser.add_argument("--all", action="store_true", help="show what is the same within noise, too")


def run(args: argparse.Namespace) -> int:
    from ..bench.compare import compare

    return compare(args.before, args.after, args.all)
