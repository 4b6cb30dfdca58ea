"""`tilewise bench`"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..models import MODELS
from .arguments import Commands, add_device, add_dtype, add_json, command, count, default_device

SUITES = ("cpu", "prefill", "decode", "paged", "mask", "varlen", "dims", "models", "latent")
PEERS = ("sdpa", "flex", "flash-attn", "flashinfer", "xformers", "onnxruntime", "mlx", "cpu-attn")


def add(commands: Commands) -> None:
    parser = command(
        commands,
        run,
        help="time the kernels against other libraries and the machine's own limits",
        description="Times each case, interleaved with every installed peer (torch's SDPA by each of its kernels, "
        "FlexAttention, flash-attn, FlashInfer, xFormers, ONNX Runtime, MLX, vLLM's CPU_ATTN), compares all outputs "
        "with float64, and shows which share of the machine's own limits each reaches. Shapes are those of known "
        f"models: {', '.join(MODELS)}. Progress goes to stderr. Ratios are speeds. Ctrl-C and SIGTERM stop the "
        "measuring and keep what is done. The exit status is 1 if a result is wrong.",
        example="tilewise bench --suite prefill,decode --json now.json --html now.html",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--suite",
        type=suites,
        metavar="NAME[,NAME...]",
        help=f"which cases: {', '.join(SUITES)}, or all (of the models); cpu has speed goals for the CPU kernels. "
        "Default: cpu on a CPU, prefill,decode on a GPU",
    )
    what.add_argument(
        "--scale",
        action="store_true",
        help="one shape at growing lengths: time, memory and tiles, with fitted exponents",
    )
    add_device(parser)
    add_dtype(parser)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter cases: under two minutes")
    parser.add_argument(
        "--peers",
        type=peers,
        metavar="NAME[,NAME...]",
        help=f"libraries to compare with: {', '.join(PEERS)}, or none; default: all installed",
    )
    parser.add_argument(
        "--jobs", type=count, metavar="N", help="processes that compile for a GPU (default: by number of cores)"
    )
    add_json(parser, "write all numbers to this file")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report as an HTML page")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw charts, as .svg or .png")


def run(args: argparse.Namespace) -> int:
    from ..bench.run import BenchOptions, bench

    device = default_device(args) if args.suite != ("cpu",) or args.device else "cpu"
    default = ("cpu",) if device == "cpu" else ("prefill", "decode")
    return bench(
        BenchOptions(
            words=args.words,
            suites=("scale",) if args.scale else args.suite or default,
            device=device,
            dtype=args.dtype or "",
            quick=args.quick,
            peers=args.peers,
            jobs=args.jobs,
            json=args.json,
            html=args.html,
            plot=args.plot,
        )
    )


def suites(text: str) -> tuple[str, ...]:
    if text == "all":
        return SUITES[1:]
    return _names(text, SUITES)


def peers(text: str) -> tuple[str, ...]:
    return () if text == "none" else _names(text, PEERS)


def _names(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"got {name!r}, expected some of {', '.join(known)}")
    return names
