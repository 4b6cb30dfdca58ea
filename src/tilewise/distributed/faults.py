"""Failed exchanges: a rank has died, hangs, or was called with other arguments."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..errors import InvalidArgument

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
        "hangs, or was called with other sizes or options (validate=True compares them). The group is of no use now: "
        "end all ranks. How long they wait is timeout= of init_process_group"
    )


@contextmanager
def told(ranks: Ranks) -> Iterator[None]:
    """Turns errors of an exchange between all ranks into `RankLost`."""
    try:
        yield
    except RuntimeError as error:
        raise lost_rank(ranks, [u for u in range(ranks.size) if u != ranks.rank], error) from error


connected: weakref.WeakSet[Any] = weakref.WeakSet()  # groups
_kinds: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()  # of calls that it has agreed on
MOST_KINDS = 4096


def is_known(ranks: Ranks, kind: Any) -> bool:
    """Whether a group has agreed on a call of this kind; ranks whose calls were equal give the same answer."""
    return ranks.size == 1 or kind in _kinds.get(ranks.group, ())


def agree(ranks: Ranks, said: dict[str, object], device: torch.device, kind: Any = None) -> None:
    """Compares `said` between ranks by one exchange of digests. Raises on all if it differs, else `kind` is known."""
    if ranks.size == 1:
        return
    mine = torch.tensor([zlib.crc32(repr(x).encode()) for x in said.values()], device=device)
    everyone = [torch.empty_like(mine) for _ in range(ranks.size)]
    with told(ranks):
        dist.all_gather(everyone, mine, group=ranks.group)
    for i, (name, here) in enumerate(said.items()):
        others = [rank for rank, digest in enumerate(everyone) if int(digest[i]) != int(mine[i])]
        if others:
            given = f"{here} on rank {ranks.rank}, and something else on rank {', '.join(map(str, others))}"
            uneven = "length= says how many tokens all ranks hold, where they do not hold equally many"
            raise InvalidArgument(name, given, "the same on all ranks", uneven if name in ("q", "k", "v", "x") else "")
    connected.add(ranks.group)
    if kind is None:
        return
    known = _kinds.setdefault(ranks.group, set())
    if len(known) >= MOST_KINDS:
        known.clear()
    known.add(kind)
