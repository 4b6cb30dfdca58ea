"""The `tilewise` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from . import InvalidArgument, Unsupported, __version__
from .planner import BACKENDS

BAD_ARGUMENTS = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; bad arguments leave through argparse with status 2."""
    args = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except (InvalidArgument, Unsupported) as error:
        print(f"tilewise {args.command}: error: {error}", file=sys.stderr)
        return BAD_ARGUMENTS
    except BrokenPipeError:  # the reader, such as head, has seen enough
        # Python flushes stdout once more as it ends; that would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tilewise", description="Flash attention in which every kernel is Python.")
    parser.add_argument("--version", action="version", version=f"tilewise {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    bench = commands.add_parser(
        "bench",
        help="measure the kernels beside torch's SDPA and the machine's own limits",
        description="Times each case in turns with its peer (SDPA, reading memory, another form of ours), checks it "
        "against float64 and says which bars are reached. Progress goes to stderr. Ctrl-C ends the measuring and keeps "
        "what is done. Exit status 1 if a result is wrong.",
    )
    bench.add_argument("--suite", choices=("cpu",), required=True, help="which cases to measure")
    bench.add_argument("--quick", action="store_true", help="fewer cases and shorter: under two minutes")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    bench.set_defaults(run=_bench)
    demo = commands.add_parser(
        "demo",
        help="run attention in the shapes of known models, timed and checked",
        description="Runs attention in the shapes of known models on the best backend at hand. For each: the plan, the "
        "time beside that of torch's SDPA, and the error against a float64 oracle.",
    )
    demo.add_argument("--quick", action="store_true", help="shorter sequences, fewer repeats")
    demo.add_argument("--device", type=_device, metavar="cpu|cuda", help="default: cuda where there is one")
    demo.add_argument("--seed", type=_seed, default=0, metavar="N", help="of the random inputs (default 0)")
    demo.set_defaults(run=_demo)
    tune = commands.add_parser(
        "tune",
        help="find the fastest tiles of the GPU kernels on this GPU",
        description="Times every tile that fits on the shapes of known models and keeps the fastest in a JSON file, "
        "which later calls read. Takes minutes, most of them for compiling. Ctrl-C ends it and keeps what is done.",
    )
    tune.add_argument("--quick", action="store_true", help="shorter sequences only")
    tune.add_argument("--json", type=Path, metavar="FILE", help="default: tuned.json in the cache directory")
    tune.set_defaults(run=_tune)
    verify = commands.add_parser(
        "verify",
        help="check every kernel that this machine can run",
        description="Runs the conformance suite on a device: every case and property, and on a GPU large tensors, "
        "repeats and CUDA graphs too. Exit status 1 if a check fails.",
    )
    verify.add_argument("--device", type=_device, metavar="cpu|cuda", help="default: cuda where there is one")
    verify.add_argument("--backend", choices=BACKENDS, help="default: the best for each case")
    verify.add_argument("--quick", action="store_true", help="one case in four")
    verify.add_argument("--jobs", type=_count, default=0, metavar="N", help="processes (default: by device)")
    verify.add_argument("--json", type=Path, metavar="FILE", help="write every check's result there")
    verify.set_defaults(run=_verify)
    warmup = commands.add_parser(
        "warmup",
        help="compile the CPU kernels ahead of first use",
        description="Compiles every CPU kernel for this machine and keeps it on disk, so that no first call waits.",
    )
    warmup.set_defaults(run=_warmup)
    return parser


def _bench(args: argparse.Namespace) -> int:
    from .bench.run import bench

    return bench(args.suite, args.quick, args.json)


def _demo(args: argparse.Namespace) -> int:
    from .demo import demo

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return demo(torch.device(device), quick=args.quick, seed=args.seed)


def _tune(args: argparse.Namespace) -> int:
    from .tune import tune

    if not torch.cuda.is_available():
        print("tilewise tune: error: torch sees no CUDA device here, and tiles are timed on a GPU", file=sys.stderr)
        return BAD_ARGUMENTS
    return tune(torch.device("cuda", torch.cuda.current_device()), args.quick, args.json)


def _verify(args: argparse.Namespace) -> int:
    from .verify import verify

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return verify(device, args.backend, args.quick, args.jobs, args.json)


def _warmup(args: argparse.Namespace) -> int:
    from .warmup import warmup

    return warmup()


def _device(text: str) -> str:
    if text not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected cpu or cuda")
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch sees no CUDA device here; use cpu")
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of processes, 1 to 1024")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of 0 or more, below 2**63")
    return int(text)
