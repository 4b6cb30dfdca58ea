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
def report_lost_ranks(ranks: Ranks) -> Iterator[None]:
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


def agree(ranks: Ranks, arguments: dict[str, object], device: torch.device, kind: Any = None) -> None:
    """Compares `arguments` between ranks by one exchange of digests.

    Raises on all ranks if any differs; otherwise `kind` is known from now on.
    """
    if ranks.size == 1:
        return
    own_digests = torch.tensor([zlib.crc32(repr(x).encode()) for x in arguments.values()], device=device)
    all_digests = [torch.empty_like(own_digests) for _ in range(ranks.size)]
    with report_lost_ranks(ranks):
        dist.all_gather(all_digests, own_digests, group=ranks.group)
    for i, (name, own_value) in enumerate(arguments.items()):
        others = [rank for rank, digest in enumerate(all_digests) if int(digest[i]) != int(own_digests[i])]
        if others:
            difference = f"{own_value} on rank {ranks.rank}, and something else on rank {', '.join(map(str, others))}"
            uneven = "length= says how many tokens all ranks hold, where they do not hold equally many"
            raise InvalidArgument(
                name, difference, "the same on all ranks", uneven if name in ("q", "k", "v", "x") else ""
            )
    connected.add(ranks.group)
    if kind is None:
        return
    known = _kinds.setdefault(ranks.group, set())
    if len(known) >= MOST_KINDS:
        known.clear()
    known.add(kind)
