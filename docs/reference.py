"""Writes the reference pages of the site from the docstrings: `python docs/reference.py FOLDER`, as `make docs` does.

A page lists functions and classes with their signatures and their docstrings as Markdown. The pages are not in the
repository, so they cannot be stale.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tilewise
from tilewise.tools import cli

WIDTH = 88  # of a signature's lines
SECTION = re.compile(r"(Args|Returns|Raises|Yields):$")
ENTRY = re.compile(r"    (\*{0,2}\w+(?:, \*{0,2}\w+)*): (.*)")
COMPAT = ("sdpa", "flex_attention", "flash_attn", "xformers", "transformers")  # what imports a server needs that server
PAGES = {
    "calls": ("Functions", "The functions of `tilewise`."),
    "values": ("Values", "Classes of arguments and results."),
    "caches": ("Caches", "KV caches. How to use them: [Caches](../caches.md)."),
    "distributed": ("Many devices", "`tilewise.distributed`. How to use it: [Beyond one device](../distributed.md)."),
    "errors": ("Errors", "Errors that callers may want to catch."),
    "compat": ("Drop-ins", "Other libraries' functions. How to use them: [Other libraries](../integrations.md)."),
    "commands": ("Commands", "The help of `tilewise` and of each command."),
}


def public() -> dict[str, list[Any]]:
    """Each page of Python names, and what is on it."""
    found: dict[str, list[Any]] = {page: [] for page in PAGES if page != "commands"}
    for name in tilewise.__all__:
        if not name.startswith("__"):
            found[page_of(getattr(tilewise, name))].append(getattr(tilewise, name))
    found["distributed"] = functions(importlib.import_module("tilewise.distributed"))
    for module in (importlib.import_module(f"tilewise.compat.{name}") for name in COMPAT):
        found["compat"] += [module, *functions(module)]
    return found


def page_of(thing: Any) -> str:
    """Where a public name is described, by what it is."""
    if not inspect.isclass(thing):
        return "calls"
    if issubclass(thing, Exception):
        return "errors"
    return "caches" if thing.__module__.startswith("tilewise.kv_cache") else "values"


def functions(module: Any) -> list[Any]:
    """The public functions of a module: those that it lists, or else those that are written in it."""
    if hasattr(module, "__all__"):
        return [getattr(module, name) for name in module.__all__ if callable(getattr(module, name))]
    own = [x for _, x in inspect.getmembers(module, inspect.isfunction) if x.__module__ == module.__name__]
    written = [x for x in own if not x.__name__.startswith("_") and x.__doc__]
    return sorted(written, key=lambda x: x.__code__.co_firstlineno)


def page(name: str) -> str:
    """A page as Markdown."""
    title, about = PAGES[name]
    parts = [f"# {title}", f"{about} `make docs` generates this page."]
    if name == "commands":
        parts += commands()
    place = "tilewise.distributed" if name == "distributed" else "tilewise"
    for thing in () if name == "commands" else public()[name]:
        place = thing.__name__ if inspect.ismodule(thing) else place
        parts += entry(thing, place)
    return "\n\n".join(parts) + "\n"


def entry(thing: Any, place: str) -> Iterator[str]:
    """A heading, the signature and the text of a module, a function or a class with its methods; `place` has it."""
    if inspect.ismodule(thing):
        yield f"## {thing.__name__}"
    else:
        level = "###" if place.startswith("tilewise.compat") else "##"
        yield f"{level} {thing.__name__}"
        yield f"```python\n{signature(f'{place}.{thing.__name__}', thing)}\n```"
    yield text(inspect.getdoc(thing) or "")
    if inspect.isclass(thing):
        for name, member, kind in members(thing):
            yield f"### {thing.__name__}.{name}"
            if kind != "property":
                yield f"```python\n{signature(f'{thing.__name__}.{name}', member, bound=kind == 'method')}\n```"
            yield text(inspect.getdoc(member) or "")


def members(thing: type) -> Iterator[tuple[str, Any, str]]:
    """The public methods and properties of a class that say what they do, in the order of its source."""
    seen = set()
    for cls in thing.__mro__:
        if not cls.__module__.startswith("tilewise"):
            continue
        for name, raw in vars(cls).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            is_property = isinstance(raw, property)
            member = raw.fget if is_property else getattr(thing, name)
            if not (is_property or inspect.isroutine(member)) or not inspect.getdoc(member):
                continue
            plain = isinstance(raw, (classmethod, staticmethod))
            yield name, member, "property" if is_property else "plain" if plain else "method"


def signature(name: str, thing: Any, bound: bool = False) -> str:
    """A call by its names and defaults; types are in the text."""
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return name
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    line = f"{name}{inspect.Signature(plain[1:] if bound else plain)}"
    if len(line) <= WIDTH:
        return line
    head, _, inner = line.partition("(")
    return f"{head}(\n" + textwrap.fill(inner[:-1], WIDTH, initial_indent="    ", subsequent_indent="    ") + "\n)"


def text(docstring: str) -> str:
    """A docstring as Markdown: its sections as lists, its examples as code."""
    lines: list[str] = []
    inside = example = False
    for line in docstring.splitlines():
        if example and not line.strip():
            lines.append("```")
            example = False
        if line.lstrip().startswith(">>>") and not example:
            lines += ["", "```pycon"]
            example, inside = True, False
        if example:
            lines.append(line.strip() if line.lstrip().startswith((">>>", "...")) else line)
        elif section := SECTION.match(line):
            lines += ["", f"**{section[1]}**", ""]
            inside = True
        elif inside and (found := ENTRY.match(line)):
            lines.append(f"- `{found[1]}`: {found[2]}")
        elif inside and line.startswith("    "):
            lines.append(f"  {line.strip()}" if lines[-1].startswith(("- ", "  ")) else line.strip())
        else:
            inside = inside and not line.strip()
            lines.append(line)
    return "\n".join([*lines, "```"] if example else lines).strip()


def commands() -> Iterator[str]:
    """The help of every command, as a terminal of 100 columns shows it."""
    os.environ["COLUMNS"] = "100"
    parser = cli._parser()
    yield f"## tilewise\n\n```text\n{parser.format_help().strip()}\n```"
    (of,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for name, command in of.choices.items():
        yield f"## tilewise {name}\n\n```text\n{command.format_help().strip()}\n```"


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in PAGES:
        (folder / f"{name}.md").write_text(page(name), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
