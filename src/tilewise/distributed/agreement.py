"""Agreement: before ranks send anything else, they know that a call is the same, and right, on all of them.

On CPUs each call is compared. On GPUs, where one would have to wait for the comparison, the first call of each *kind*:
that is what messages depend on, apart from values of tensors, so sizes, dtypes and options. Equal calls have equal
kinds on all ranks, whatever their own rows, so all of them, or none, find a kind new.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ..core.expression.mods import Bound
from ..core.private.torch import devices_of
from ..errors import CacheFull, InvalidArgument
from .faults import RankLost, connected, report_lost_ranks

if TYPE_CHECKING:
    from .layout import Ranks

Kind = tuple[tuple[str, Any], ...]  # names and what `described` says of their values
Result = TypeVar("Result")
MOST_KINDS = 4096
WIDTH = 64  # numbers that a rank sends: its state, and a digest of each argument. Equal in all calls
FAULTY, UNREAD = 1, 2  # states: it has a fault; it could not read its arguments
FAULT_BYTES = 2048  # of a fault's text
ALWAYS = ("cpu",)  # devices on which each call is compared

_kinds: weakref.WeakKeyDictionary[Any, set[Kind]] = weakref.WeakKeyDictionary()  # that a group has agreed on


class Fault(NamedTuple):
    """What is wrong with a call."""

    error: Exception  # that this rank raises
    rank: int  # that found it
    text: str


def described(x: Any, *own_dims: int) -> Any:
    """What the kind of a call contains of an option: a plain value; of a tensor which of its dims are broadcast.

    `own_dims`, counted from the last, have this rank's own rows, whose number may differ between ranks. Other sizes
    follow from those of q, k and v, which each rank checks.
    """
    if isinstance(x, Bound):
        return x.mods.text, *((tuple(t.shape), t.dtype, t.requires_grad) for t in x.tensors)
    if not isinstance(x, torch.Tensor):
        return repr(x)  # as text, in which 1, 1.0 and True differ
    broadcast = tuple(None if dim - x.ndim in own_dims else size == 1 for dim, size in enumerate(x.shape))
    return broadcast, x.dtype, x.requires_grad


def is_known(groups: Sequence[Ranks], kind: Kind) -> bool:
    """Whether all groups have agreed on a call of this kind."""
    return all(ranks.size == 1 or kind in _kinds.get(ranks.group, ()) for ranks in groups)


def agreed(
    groups: Sequence[Ranks],
    kind: Kind,
    validate: bool | None,
    check: Callable[[], Result],
    arguments: Callable[[], dict[str, object]],
    device: torch.device | None,
) -> Result:
    """The result of `check`, which raises if this rank's arguments are wrong, once all ranks have agreed on the call.

    Ranks exchange digests of `arguments` and whether `check` has raised. If any has, or if a digest differs, all ranks
    raise. On GPUs, nothing is sent in a call of a known kind.

    Args:
        groups: the dims of the mesh. A fault that is found in one is passed on in the next.
        kind: the kind of the call.
        validate: None: compare, on GPUs calls of a new kind alone. True: compare any call. False: none.
        check: the checks that need no other rank.
        arguments: what must be equal on all ranks, by name; at most `WIDTH` - 1.
        device: of the call's tensors; None if it has none.
    """
    groups = [ranks for ranks in groups if ranks.size > 1]
    skipped = not validate and is_known(groups, kind) and (device is not None and device.type not in ALWAYS)
    if not groups or validate is False or skipped:
        return check()
    fault, result, values = None, None, {}
    try:  # what is wrong is raised once the others know of it
        values = arguments()
    except Exception as error:
        fault = _fault(error, groups[0])
    try:
        result = check()
    except Exception as error:
        fault = _fault(error, groups[0])
    for ranks in groups:
        try:
            fault = _exchange(ranks, values, fault, _device(ranks, device)) or fault
        except RankLost as lost:
            if fault is None:
                raise
            raise fault.error from lost  # which this rank knows for certain
    if fault is not None:
        raise fault.error
    for ranks in groups:
        connected.add(ranks.group)
        known = _kinds.setdefault(ranks.group, set())
        if len(known) >= MOST_KINDS:
            known.clear()
        known.add(kind)
    return result  # type: ignore[return-value]


def _fault(error: Exception, ranks: Ranks) -> Fault:
    argument = getattr(error, "argument", "call")
    what = str(error) if isinstance(error, InvalidArgument) else f"{type(error).__name__}: {error}"
    text = f"{argument}: {what.removeprefix(f'{argument}: ')}"
    return Fault(error, dist.get_global_rank(ranks.group, ranks.rank), text)


def _device(ranks: Ranks, device: torch.device | None) -> torch.device:
    """A device whose tensors the group can send: if possible that of the call."""
    types = devices_of(ranks.group)
    if device is not None and device.type in types:
        return device
    return torch.device("cpu" if "cpu" in types else types[0])


def _exchange(ranks: Ranks, values: dict[str, object], fault: Fault | None, device: torch.device) -> Fault | None:
    """What is wrong with a call as ranks of a group find together: a difference, or a fault of another rank."""
    digests = [zlib.crc32(repr(x).encode()) for x in values.values()]
    state = FAULTY * (fault is not None) + UNREAD * (not values)
    own = [state, *digests, *[0] * (WIDTH - 1 - len(digests))]
    every = [x.tolist() for x in _gathered(torch.tensor(own, dtype=torch.int64, device=device), ranks)]
    first = _remote_fault(ranks, fault, device) if any(numbers[0] & FAULTY for numbers in every) else None
    readable = {rank: numbers for rank, numbers in enumerate(every) if not numbers[0] & UNREAD}
    for i, (name, value) in enumerate(values.items(), 1):  # first of all: a fault may follow from a difference
        if others := [rank for rank, numbers in readable.items() if numbers[i] != own[i]]:
            mine, *theirs = (dist.get_global_rank(ranks.group, rank) for rank in (ranks.rank, *others))
            difference = f"{value} on rank {mine}, but not the same on rank {', '.join(map(str, theirs))}"
            uneven = "pass length=, the tokens of all ranks together, if ranks hold different numbers"
            remedy = uneven if name in ("q", "k", "v", "x") else ""
            return _fault(InvalidArgument(name, difference, "the same on all ranks", remedy), ranks)
    return first


def _remote_fault(ranks: Ranks, fault: Fault | None, device: torch.device) -> Fault | None:
    """The error of the lowest faulty rank, gathered from all; None on ranks that raise their own."""
    text = b"" if fault is None else f"{fault.rank}:{fault.text}".encode()[:FAULT_BYTES]
    padded = torch.tensor(list(text.ljust(FAULT_BYTES, b"\0")), dtype=torch.uint8, device=device)
    texts = [bytes(x.tolist()).rstrip(b"\0").decode(errors="replace") for x in _gathered(padded, ranks)]
    if fault is not None:
        return None
    rank, _, words = next(x for x in texts if x).partition(":")
    argument, _, what = words.partition(": ")
    full = what.removeprefix(f"{CacheFull.__name__}: ")
    want = "valid arguments on every rank"
    refused = InvalidArgument(argument, f"a fault on rank {rank} ({what})", want)
    return Fault(refused if full == what else CacheFull(f"on rank {rank}: {full}"), int(rank), words)


def _gathered(x: torch.Tensor, ranks: Ranks) -> list[torch.Tensor]:
    parts = [torch.empty_like(x) for _ in range(ranks.size)]
    with report_lost_ranks(ranks):
        dist.all_gather(parts, x, group=ranks.group)
    return parts
