"""`tilewise verify`"""

from __future__ import annotations

import argparse

from ...dispatch.planner import BACKENDS
from .arguments import Commands, add_device, add_json, command, count, default_device


def add(commands: Commands) -> None:
    parser = command(
        commands,
        run,
        help="check every kernel that this machine can run",
        description="Runs the conformance suite on a device: every case and property; on a GPU also large tensors, "
        "repeats and CUDA graphs. On an Apple GPU it ends with a report to paste into an issue. The exit status is 1 "
        "if a check fails.",
        example="tilewise verify --quick --json checks.json",
    )
    add_device(parser)
    parser.add_argument("--backend", choices=BACKENDS, help="default: the best backend for each case")
    parser.add_argument("--quick", action="store_true", help="one case in four")
    parser.add_argument("--jobs", type=count, default=0, metavar="N", help="processes (default: by device)")
    add_json(parser, "write the result of every check to this file")


def run(args: argparse.Namespace) -> int:
    from ..verify import verify

    return verify(default_device(args), args.backend, args.quick, args.jobs, args.json)
