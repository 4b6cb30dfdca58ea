"""The `tilewise` command: a file for each of its commands, with `add`, which describes it, and `run`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from .. import InvalidArgument, Unsupported, __version__
from . import bench, chat, compare, demo, doctor, embed, plan, report, tune, verify, warmup
from .arguments import BAD_ARGUMENTS

COMMANDS = (doctor, demo, chat, embed, plan, bench, report, compare, verify, tune, warmup)
AFTERWORD = """\
exit status: 0 if all is well, 1 if a result is wrong or (compare) slower, 2 for bad arguments, 130 after Ctrl-C
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; bad arguments leave through argparse with status 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(words)
    args.words = words
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except (InvalidArgument, Unsupported) as error:
        print(f"tilewise {args.command}: error: {error}", file=sys.stderr)
        return BAD_ARGUMENTS
    except KeyboardInterrupt:
        print(f"tilewise {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as head, has seen enough
        # Python flushes stdout once more as it ends; that would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tilewise",
        description="Flash attention in which every kernel is Python.",
        epilog=AFTERWORD,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tilewise {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser
