"""Failed exchanges: a rank has died, hangs, or was called with other arguments."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .layout import Ranks


class RankLost(RuntimeError):
    """An exchange with another rank failed: that rank has died, hangs, or was called with other arguments."""


def lost_rank(ranks: Ranks, peers: Sequence[int], error: Exception) -> RankLost:
    """The error for a failed exchange."""
    them = ", ".join(map(str, peers))
    what = str(error).strip().partition("\n")[0][:300]
    return RankLost(
        f"rank {ranks.rank} of {ranks.size} had an exchange with rank {them}, which failed: {what}. A rank has died, "
        "hangs, or was called with other sizes or options (validate=True compares them). The process group cannot be "
        "used any more: stop all ranks. init_process_group(timeout=) sets how long they wait"
    )


@contextmanager
def report_lost_ranks(ranks: Ranks) -> Iterator[None]:
    """Turns errors of an exchange between all ranks into `RankLost`."""
    try:
        yield
    except RuntimeError as error:
        raise lost_rank(ranks, [u for u in range(ranks.size) if u != ranks.rank], error) from error


connected: weakref.WeakSet[Any] = weakref.WeakSet()  # groups whose communicator is set up
