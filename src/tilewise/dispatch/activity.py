"""What has run: calls counted by backend, and each new kind of call told once by `logging`.

The logger is `tilewise`, at level INFO. `TILEWISE_LOG=plan` writes it to stderr. Batch and lengths make no new kind.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from itertools import count

from ..core.plan import Plan

VARIABLE = "TILEWISE_LOG"
log = logging.getLogger("tilewise")
_calls: dict[str, count[int]] = {}
_looks: dict[str, int] = {}  # a look at a counter moves it by one
_told: set[tuple[object, ...]] = set()  # kinds of calls
_lock = threading.Lock()


def counter(plan: Plan) -> Callable[[], int]:
    """What to call each time that a plan is run. One step in C: threads lose no count."""
    name = f"{plan.backend} backward" if plan.problem.grads else plan.backend
    with _lock:
        return _calls.setdefault(name, count()).__next__


def counters() -> dict[str, int]:
    """How many calls each backend has run in this process; backward passes are counted apart, as `"cpu backward"`.

    Counted are launches of attention: a call of an entry point, of a cache, of a compiled graph's operator or of
    another library's function that tilewise stands in for. A call with nothing to compute is none.

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
    """A call that was not in the call cache has run."""
    counter(plan)()
    if log.isEnabledFor(logging.INFO) and (kind := _kind(plan)) not in _told:
        _told.add(kind)
        log.info("%s", plan)


def _kind(plan: Plan) -> tuple[object, ...]:
    """What calls are told apart by: not batch and lengths, which are others in each step of decoding."""
    p, others = plan.problem, tuple(name for name, _ in plan.passed_over)
    sizes = (p.heads, p.kv_heads, p.head_dim, p.value_dim, p.page_size)
    stored = (p.q_dtype, p.k_format, p.v_format)
    return plan.backend, plan.kernel, p.form, p.device, *sizes, *stored, p.options(), p.copies, plan.notes, others


def from_environment(value: str | None) -> None:
    """Writes the log to stderr if the environment asks for it."""
    if not value:
        return
    if value != "plan":
        log.warning("%s=%r is not known, and changes nothing: 'plan' is", VARIABLE, value)
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("tilewise: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False  # else a handler of the program's writes it a second time


from_environment(os.environ.get(VARIABLE))
