"""Counts calls by backend, and logs the plan of each new kind of call once.

The logger is `tilewise`, level INFO; `TILEWISE_LOG=plan` writes it to stderr. Calls that differ only in batch size or
lengths are of one kind.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from itertools import count

from ..core.forks import new_lock
from ..core.plan import Plan

VARIABLE = "TILEWISE_LOG"
log = logging.getLogger("tilewise")
_calls: dict[str, count[int]] = {}
_looks: dict[str, int] = {}  # reads of each counter: `next` is the only way to read one, and advances it
_logged: set[tuple[object, ...]] = set()  # kinds of calls
_lock = new_lock(sys.modules[__name__], "_lock")


def counter(plan: Plan) -> Callable[[], int]:
    """The function to call for each run of a plan. `next` of a count is one step in C, so threads lose no call."""
    name = f"{plan.backend} backward" if plan.problem.grads else plan.backend
    with _lock:
        return _calls.setdefault(name, count()).__next__


def counters() -> dict[str, int]:
    """How many calls each backend has run in this process; backward passes have their own entry, `"cpu backward"`.

    It counts launches of attention, by an entry point, a cache, an operator of a compiled graph or a drop-in for
    another library's function. A call with nothing to compute is not launched.

    >>> import tilewise, torch
    >>> before = tilewise.counters().get("reference", 0)
    >>> x = torch.zeros(1, 1, 2, 8)
    >>> _ = tilewise.attention(x, x, x, backend="reference")
    >>> tilewise.counters()["reference"] - before
    1
    """
    with _lock:
        found = {}
        for name, calls in sorted(_calls.items()):
            looks = _looks.get(name, 0)
            found[name], _looks[name] = next(calls) - looks, looks + 1
    return {name: calls for name, calls in found.items() if calls}


def ran(plan: Plan) -> None:
    """Counts a run of a call that was not in the call cache, and logs a new kind of call."""
    counter(plan)()
    if log.isEnabledFor(logging.INFO) and (kind := _kind(plan)) not in _logged:
        _logged.add(kind)
        log.info("%s", plan)


def _kind(plan: Plan) -> tuple[object, ...]:
    """The kind of a call: without batch size and lengths, which change at every decode step."""
    p, others = plan.problem, tuple(name for name, _ in plan.passed_over)
    sizes = (p.heads, p.kv_heads, p.head_dim, p.value_dim, p.page_size)
    stored = (p.q_dtype, p.k_format, p.v_format)
    return plan.backend, plan.kernel, p.form, p.device, *sizes, *stored, p.options(), p.copies, plan.notes, others


def unknown_value(variable: str, value: str, supported: str) -> None:
    log.warning("unknown value %r for %s; the only supported value is %r", value, variable, supported)


def from_environment(value: str | None) -> None:
    """Sends the log to stderr if the environment variable asks for it."""
    if not value:
        return
    if value != "plan":
        unknown_value(VARIABLE, value, "plan")
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("tilewise: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False  # else the program's own handlers would write it again


from_environment(os.environ.get(VARIABLE))
