"""Options that several commands share, and their types."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from ...core.storage import FLOATS, short_name

BAD_ARGUMENTS = 2
MOST_ROWS, MOST_TOKENS = 2**16, 2**24  # what is counted row by row takes time and memory
Commands = Any  # argparse has no public name for what add_subparsers gives


def command(commands: Commands, run: Any, help: str, description: str, example: str = "") -> Any:
    """A parser for one command, named as the module of `run`."""
    parser = commands.add_parser(
        run.__module__.rpartition(".")[2],
        help=help,
        description=description,
        epilog=f"example: {example}" if example else None,
    )
    parser.set_defaults(run=run)
    return parser


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", type=device, metavar="cpu|cuda|mps", help="default: cuda if there is a GPU, else cpu"
    )


def add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        type=dtype,
        metavar="|".join(FLOATS),
        help="or float32, float16 ...; default: f32 on a CPU, bf16 on a GPU",
    )


def dtype(text: str) -> str:
    """The short name of a dtype, from any of its names."""
    name = short_name(text)
    if name not in FLOATS:
        known = ", ".join(f"{short} ({str(of).removeprefix('torch.')})" for short, of in FLOATS.items())
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {known}")
    return str(name)


def add_json(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help=help)


def default_device(args: argparse.Namespace) -> str:
    return args.device or ("cuda" if torch.cuda.is_available() else "cpu")


def device(text: str) -> str:
    if text not in ("cpu", "cuda", "mps"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected cpu, cuda or mps")
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch sees no CUDA device here; use cpu, and `tilewise doctor` to see why")
    if text == "mps" and not torch.backends.mps.is_available():
        raise argparse.ArgumentTypeError("torch sees no Apple GPU here; `tilewise doctor` says more")
    return text


def machine(text: str) -> str:
    """A device of this machine, or another machine by name."""
    from ...dispatch.planner import machines

    if text in machines():
        return text
    if text not in ("cpu", "cuda", "mps"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected cpu, cuda, mps or one of {', '.join(machines())}")
    return device(text)


def count(text: str) -> int:
    """A number of processes."""
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of processes, 1 to 1024")
    return int(text)


def rows(text: str) -> int:
    """Of a batch."""
    if not text.isdecimal() or not 1 <= int(text) <= MOST_ROWS:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of rows, 1 to {MOST_ROWS}")
    return int(text)


def length(text: str) -> int:
    """A sequence length: 8192, or 8k."""
    digits = text[:-1] if text[-1:] in ("k", "K") else text
    tokens = int(digits) * (1 if digits == text else 1024) if digits.isdecimal() else 0
    if not 1 <= tokens <= MOST_TOKENS:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a length such as 8192 or 8k, 1 to {MOST_TOKENS}")
    return tokens


def seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of 0 or more, below 2**63")
    return int(text)
