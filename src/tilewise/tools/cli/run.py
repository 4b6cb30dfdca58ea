"""`tilewise run`"""

from __future__ import annotations

import argparse
import runpy
import sys
import traceback
from pathlib import Path

from ... import InvalidArgument
from .arguments import Commands, command


def add(commands: Commands) -> None:
    parser = command(
        commands,
        run,
        help="run a Python script with tilewise as its flash_attn",
        description="Runs a script, unchanged, in which `import flash_attn` finds tilewise: its functions on any "
        "device, its package metadata, and transformers' attn_implementation='flash_attention_2' without a GPU. With "
        "--sdpa and --flex, torch's scaled_dot_product_attention and flex_attention are tilewise's too.",
        example="tilewise run --sdpa train.py --epochs 3",
    )
    parser.add_argument("--sdpa", action="store_true", help="replace torch's scaled_dot_product_attention too")
    parser.add_argument("--flex", action="store_true", help="replace torch's flex_attention too")
    parser.add_argument("--replace", action="store_true", help="take the place of an installed flash-attn")
    parser.add_argument("-m", dest="module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="a file, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="handed to the script")


def run(args: argparse.Namespace) -> int:
    from ...compat import flash_attn, flex_attention, sdpa

    if not args.module and not Path(args.script).is_file():
        raise InvalidArgument("script", repr(args.script), "a file", "-m runs a module by its name")
    flash_attn.install(replace=args.replace)
    if args.sdpa:
        sdpa.install()
    if args.flex:
        flex_attention.install()
    sys.argv = [args.script, *args.arguments]
    try:
        if args.module:
            sys.path.insert(0, "")
            runpy.run_module(args.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(args.script).resolve().parent))
            runpy.run_path(args.script, run_name="__main__")
    except Exception:  # with the script's lines, also where tilewise refuses a call
        traceback.print_exc()
        return 1
    return 0
