"""`tilewise report`"""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import Commands, command


def add(commands: Commands) -> None:
    parser = command(
        commands,
        run,
        help="show a record of the bench as tables, a page or a picture",
        description="Reads a JSON file of `tilewise bench`, made on any machine, and prints its tables, writes the "
        "HTML page or draws the charts.",
        example="tilewise report now.json --html now.html --plot now.svg",
    )
    parser.add_argument("record", type=Path, metavar="FILE.json")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report as an HTML page")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw charts, as .svg or .png")


def run(args: argparse.Namespace) -> int:
    from ..bench.run import show

    return show(args.record, args.html, args.plot)
