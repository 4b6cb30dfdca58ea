"""The `tilewise` command line: a file for each command, with `add`, its parser, and `run`."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from ... import InvalidArgument, Unsupported, __version__
from ...core.extras import MissingPackage
from . import bench, chat, compare, demo, doctor, embed, plan, prove, report, run, serve, tune, verify, warmup
from .arguments import BAD_ARGUMENTS

COMMANDS = (doctor, demo, chat, embed, serve, run, plan, bench, report, compare, verify, prove, tune, warmup)
AFTERWORD = """\
exit status: 0 for success, 1 if a result is wrong or (compare) slower, 2 for bad arguments, 130 after Ctrl-C and
143 after SIGTERM, which both keep what is done by then, 141 if the reader of a pipe is gone
"""
INTERRUPTED, CLOSED_PIPE = 130, 141
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; for bad arguments argparse exits with status 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not words:
        parser.print_help(sys.stderr)
        parser.exit(BAD_ARGUMENTS)
    args = parser.parse_args(words)
    args.words = words
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # "?" where an encoding, as of a pipe on Windows, has no such letter
    with _stoppable() as stopped:
        status = _run(args)
    return 128 + stopped[0] if stopped and status == INTERRUPTED else status


def _run(args: argparse.Namespace) -> int:
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        status = run(args)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a closed pipe is expected
        return status
    except (InvalidArgument, MissingPackage, Unsupported) as error:
        print(f"tilewise {args.command}: error: {error}", file=sys.stderr)
        return BAD_ARGUMENTS
    except KeyboardInterrupt:
        print(f"tilewise {args.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        # Python flushes stdout at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE


@contextmanager
def _stoppable() -> Iterator[list[int]]:
    """SIGTERM and SIGHUP end a command as Ctrl-C does, keeping finished work; yields the signals received."""
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    replaced = []
    try:
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:  # not under nohup
                signal.signal(number, stop)
                replaced.append(number)
    except ValueError:  # not in the main thread
        pass
    try:
        yield received
    finally:
        for number in replaced:
            signal.signal(number, signal.SIG_DFL)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tilewise",
        description="Flash attention, written entirely in Python.",
        epilog=AFTERWORD,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tilewise {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser
