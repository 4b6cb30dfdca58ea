"""`tilewise plan`"""

from __future__ import annotations

import argparse

from ..models import MODELS
from .arguments import Commands, add_dtype, command, default_device, length, machine, rows


def add(commands: Commands) -> None:
    parser = command(
        commands,
        run,
        help="show what a model's layers would run, here or on another machine, its cost, and which tiles are skipped",
        description="Prints the plan of each kind of layer of a model, without running it: backend, kernel, tile, "
        f"splits, memory, work; then a picture of the tiles. Models: {', '.join(MODELS)}.",
        example="tilewise plan --model gemma-4 --length 8192 --device sm_120",
    )
    parser.add_argument("--model", required=True, metavar="NAME", help="a known model")
    parser.add_argument("--layer", metavar="NAME", help="one kind of layer; default: all")
    parser.add_argument("--length", type=length, default=4096, metavar="N", help="keys (default 4096)")
    parser.add_argument("--queries", type=length, metavar="N", help="default: as many as keys; 1 for decoding")
    parser.add_argument("--batch", type=rows, default=1, metavar="N", help="rows (default 1)")
    parser.add_argument("--page-size", type=length, metavar="N", help="the cache is in pages of N tokens")
    parser.add_argument(
        "--device",
        type=machine,
        metavar="cpu|cuda|mps|NAME",
        help="default: cuda if there is a GPU, else cpu; or another machine: sm_90, gfx942, apple-m3, avx2, neon ...",
    )
    add_dtype(parser)
    parser.add_argument("--all", action="store_true", help="also show why backends for other devices were not chosen")
    parser.add_argument("--json", action="store_true", help="the plans as JSON")


def run(args: argparse.Namespace) -> int:
    from ..show_plan import show

    return show(
        args.model,
        layer=args.layer,
        keys=args.length,
        queries=args.queries or args.length,
        rows=args.batch,
        page_size=args.page_size or 0,
        device=default_device(args),
        dtype=args.dtype,
        every_backend=args.all,
        as_json=args.json,
    )
