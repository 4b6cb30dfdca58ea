"""Printed text, compared on machines of every kind."""

from __future__ import annotations

import re

# Of a plan by the backend `cpu`: lanes, threads and tiles are the machine's.
OF_THE_MACHINE = re.compile(r"(?m)^  (?:backend    cpu|tile  |workspace|tiles).*$")


def for_any_machine(text: str) -> str:
    """Printed text without the numbers that another machine has others of."""
    if "\n  backend    cpu, " not in text:
        return text
    return OF_THE_MACHINE.sub(lambda line: re.sub(r"\d[\d,.]*", "N", re.sub(r"s\b|[KM]iB", "", line[0])), text)
