"""`tilewise warmup`"""

from __future__ import annotations

import argparse

from .arguments import Commands, command


def add(commands: Commands) -> None:
    command(
        commands,
        run,
        help="compile the CPU kernels ahead of first use",
        description="Compiles every CPU kernel for this machine and keeps it on disk, so that no first call waits.",
        example="tilewise warmup",
    )


def run(args: argparse.Namespace) -> int:
    from ..warmup import warmup

    return warmup()
