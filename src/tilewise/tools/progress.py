"""Output lines, with a progress bar below them on a terminal if rich is installed."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, TextIO


class Screen:
    """Prints lines, to standard output by default, above a progress bar if that is a terminal."""

    def __init__(self, steps: int, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._progress = _rich_progress(self._stream) if self._stream.isatty() else None
        self._task = None if self._progress is None else self._progress.add_task("", total=steps + 1)

    def __enter__(self) -> Screen:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()

    def print(self, text: str) -> None:
        if self._progress is None:
            print(text, file=self._stream, flush=True)
        else:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, label: str) -> None:
        """The next step begins."""
        if self._progress is not None:
            self._progress.update(self._task, description=label, advance=1)


def _rich_progress(stream: TextIO) -> Any:
    """A transient progress bar; None without rich."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    except ImportError:
        return None
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, transient=True, console=Console(file=stream))
