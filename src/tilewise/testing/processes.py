"""Processes that make checks: a kernel that crashes or never ends takes one of them with it, and nothing else."""

from __future__ import annotations

import pickle
import queue
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..dispatch import proofs
from .families import Check

READY, LAUNCHED, LAST = "ready", "launched", "last"  # besides results, what a process answers
KILLED = (-1, -2, -9, -15)  # signals of somebody, perhaps of the system since memory is full
MOST_KILLED = 3  # processes that others end before no more are started
HOURS = 36000.0  # seconds that are as good as none; a wait cannot be without end
LAST_WORDS = 300  # characters of what a process said before it crashed
Result = tuple[Check, dict[str, Any], "dict[str, float] | None"]  # status, seconds and detail; times by backend


@dataclass(eq=False)
class Child:
    """A process that makes one check at a time."""

    process: subprocess.Popen[bytes]
    stderr: Any
    ready: bool = False
    is_done: bool = False
    check: Check | None = None
    since: float = 0.0
    limit: float = float("inf")  # when its check must have launched its kernels, or then have ended
    late: str = ""  # what did not happen by then

    def give(self, check: Check, seconds: float) -> None:
        self.check, self.since = check, time.monotonic()
        self.limit, self.late = self.since + seconds, f"it did not compile within {seconds:g} s"
        assert self.process.stdin is not None
        with suppress(OSError):  # it has ended; the thread that listens to it says so
            pickle.dump(check, self.process.stdin)
            self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.stderr):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    def last_words(self) -> str:
        self.stderr.seek(0)
        return " ".join(self.stderr.read().decode(errors="replace").split())[-LAST_WORDS:]


@dataclass
class Pool:
    """Up to `size` processes of a command, started as they are needed.

    `limits`: the seconds in which a check must have compiled its kernels, and in which it must have ended since then.
    """

    command: Sequence[str]
    size: int
    limits: tuple[float, float]
    answers: queue.SimpleQueue[tuple[Child, Any]] = field(default_factory=queue.SimpleQueue)
    children: list[Child] = field(default_factory=list)
    killed: int = 0

    def run(self, left: deque[Check], end: float, is_left: Callable[[Check], bool]) -> Iterator[Result]:
        """What each check found, as it is found, until the time `end`. `is_left`: whether one is still to be made."""
        try:
            while self.killed < MOST_KILLED:
                self._give(left, is_left)
                busy = [child for child in self.children if child.check is not None]
                now = time.monotonic()
                if not busy or now >= end:
                    return
                late = [child for child in busy if now >= child.limit]
                for child in late:
                    self._remove(child)
                    yield self._result(child, "failed", child.late, None)
                if late:
                    continue
                until = min(end, now + HOURS, *(child.limit for child in busy))
                with suppress(queue.Empty):
                    if (result := self._heard(*self.answers.get(timeout=until - now))) is not None:
                        yield result
        finally:
            for child in list(self.children):
                self._remove(child)

    def _give(self, left: deque[Check], is_left: Callable[[Check], bool]) -> None:
        while left:
            if not is_left(left[0]):
                left.popleft()
                continue
            child = next((child for child in self.children if child.check is None), None)
            if child is None and len(self.children) == self.size:
                return
            (child or self._start()).give(left.popleft(), self.limits[0])

    def _start(self) -> Child:
        stderr = tempfile.TemporaryFile()  # noqa: SIM115, it is closed with the process
        process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=proofs.environment(),
            start_new_session=True,  # Ctrl-C is for this process, which then ends those
        )  # fmt: skip
        child = Child(process, stderr)
        self.children.append(child)
        threading.Thread(target=self._listen, args=(child,), daemon=True).start()
        return child

    def _listen(self, child: Child) -> None:
        assert child.process.stdout is not None
        with child.process.stdout as answers:
            try:
                while True:
                    self.answers.put((child, pickle.load(answers)))
            except Exception:  # it has ended, perhaps within an answer
                self.answers.put((child, None))

    def _remove(self, child: Child) -> None:
        self.children.remove(child)
        child.end()

    def _heard(self, child: Child, answer: Any) -> Result | None:
        if child not in self.children:
            return None
        if answer is None:
            return self._ended(child)
        word, detail, times = answer
        if word == READY:
            child.ready, child.limit = True, time.monotonic() + self.limits[0]
        elif word == LAST:  # after the next answer
            child.is_done = True
        elif word == LAUNCHED:
            child.limit, child.late = time.monotonic() + self.limits[1], f"it did not end within {self.limits[1]:g} s"
        else:
            return self._result(child, word, detail, times)
        return None

    def _ended(self, child: Child) -> Result | None:
        code, words = child.process.wait(), child.last_words()
        self._remove(child)
        if not child.ready:
            raise RuntimeError(f"the processes of a proof cannot start (status {code}): {words}")
        if child.check is None:
            return None
        killed = code in KILLED
        self.killed += killed
        status = "open" if killed else "failed"
        return self._result(child, status, f"its process ended with status {code}: {words}", None)

    def _result(self, child: Child, status: str, detail: str, times: dict[str, float] | None) -> Result:
        check, seconds = child.check, time.monotonic() - child.since
        assert check is not None
        child.check = None
        if child.is_done and child in self.children:
            self._remove(child)
        return check, {"status": status, "seconds": round(seconds, 3), "detail": detail}, times
