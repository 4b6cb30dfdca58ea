"""Exchanges that fail: a rank has died, hangs, or was called with something else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .layout import Ranks


class RankLost(RuntimeError):
    """Another rank did not send what this one needs, or did not take what it was sent: it has died, or hangs."""


def lost_rank(ranks: Ranks, peers: Sequence[int], error: Exception) -> RankLost:
    """What a failed exchange means, in words."""
    them = ", ".join(map(str, peers))
    what = str(error).strip().partition("\n")[0][:300]
    return RankLost(
        f"rank {ranks.rank} of {ranks.size} had an exchange with rank {them}, which failed: {what}. A rank has died, "
        "hangs, or was called with other sizes or options (validate=True compares them). The group is of no use now: "
        "end all ranks. How long they wait is timeout= of init_process_group"
    )


@contextmanager
def told(ranks: Ranks) -> Iterator[None]:
    """Around an exchange of all ranks: what fails is said in words."""
    try:
        yield
    except RuntimeError as error:
        raise lost_rank(ranks, [u for u in range(ranks.size) if u != ranks.rank], error) from error
