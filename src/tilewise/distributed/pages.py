"""Transfers sequences of a `PagedKVCache` between processes, as from prefill to decode workers."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from ..core.options import is_int
from ..errors import CacheFull, InvalidArgument
from ..kv_cache import PagedKVCache
from ..kv_cache.transfer import declared
from .faults import lost_rank
from .layout import Ranks

MOST_HEADER = 2**20  # bytes
Tensors = dict[str, tuple[tuple[int, ...], torch.dtype]]  # the declared shape and dtype of each


def send_sequence(cache: PagedKVCache, sequence: int, to: int, *, group: Any = None, **cut: Any) -> None:
    """Sends a sequence to rank `to` of a process group, where `receive_sequence` takes it.

    A description goes first, and the tensors once the receiver has confirmed that its cache can take them.

    Args:
        cache: the cache that holds the sequence.
        sequence: its id.
        to: the receiving rank of `group`.
        group: a process group. Default: the default group.
        cut: options of `PagedKVCache.export`, to send only some layers or heads.
    """
    _check_peer("to", to, group)
    about, tensors = cache.export(sequence, **cut)
    shapes = _shapes({name: (tuple(x.shape), x.dtype) for name, x in tensors.items()})
    text = torch.tensor(list(json.dumps({"about": about, "tensors": shapes}).encode()), dtype=torch.uint8, device="cpu")
    for x in (torch.tensor([len(text)], device="cpu"), text):
        _transfer(dist.send, x.to(cache.device), to, group)
    if not int(_transfer(dist.recv, _number(0, cache), to, group)):
        raise InvalidArgument(
            "to", f"rank {to}, which refused the sequence", "a cache that can take it: the error of that rank says why"
        )
    for x in tensors.values():
        _transfer(dist.send, x.to(cache.device), to, group)


def receive_sequence(cache: PagedKVCache, *senders: int, group: Any = None, first_head: int = 0) -> int:
    """Receives a sequence that one or more ranks send with `send_sequence`, and returns its new id.

    Args:
        cache: the cache that gets the sequence.
        senders: the sending ranks of `group`, which together have all its layers and heads.
        group: a process group. Default: the default group.
        first_head: as in `PagedKVCache.import_`.
    """
    for sender in senders:
        _check_peer("senders", sender, group)
    headers = [_header(cache, sender, group) for sender in senders]
    plans, wrong = [], None
    for sender, text in zip(senders, headers, strict=True):
        try:
            plans.append(_declared(cache, sender, text))
        except (InvalidArgument, CacheFull) as error:
            wrong = wrong or error
    for sender in senders:  # all, even after an error: a pending transfer would be taken for the next one
        _transfer(dist.send, _number(wrong is None, cache), sender, group)
    if wrong is not None:
        raise wrong
    parts = []
    for sender, (about, declared_tensors) in zip(senders, plans, strict=True):
        tensors = {
            name: _transfer(dist.recv, torch.empty(shape, dtype=dtype, device=cache.device), sender, group)
            for name, (shape, dtype) in declared_tensors.items()
        }
        parts.append((about, tensors))
    return cache.import_(*parts, first_head=first_head)


def _check_peer(name: str, peer: Any, group: Any) -> None:
    """Checks for a rank of the group other than this one: for a missing one torch aborts the process."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if not is_int(peer) or not 0 <= peer < size or peer == rank:
        raise InvalidArgument(name, repr(peer), f"another rank of {size}, 0 to {size - 1}; this is rank {rank}")


def _header(cache: PagedKVCache, sender: int, group: Any) -> bytes:
    size = int(_transfer(dist.recv, _number(0, cache), sender, group))
    if not 0 < size <= MOST_HEADER:
        raise InvalidArgument("sender", f"{sender}, a header of {size} bytes", f"1 to {MOST_HEADER}: send_sequence")
    text = torch.empty(size, dtype=torch.uint8, device=cache.device)
    return bytes(_transfer(dist.recv, text, sender, group).tolist())


def _declared(cache: PagedKVCache, sender: int, text: bytes) -> tuple[Any, Tensors]:
    """What a header declares, checked before memory is allocated for it."""
    try:
        header = json.loads(text)
        about, shapes = header["about"], header["tensors"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgument("sender", f"{sender}, a header that cannot be read", "one of send_sequence") from error
    tensors = declared(cache, f"sender {sender}", about)
    if shapes != _shapes(tensors):
        raise InvalidArgument("sender", f"{sender}, tensors {shapes}", f"{_shapes(tensors)}, as its manifest says")
    return about, tensors


def _number(x: int, cache: PagedKVCache) -> torch.Tensor:
    return torch.tensor([x], dtype=torch.int64, device=cache.device)


def _shapes(tensors: Tensors) -> dict[str, list[Any]]:
    """Shapes and dtypes as a header has them."""
    return {name: [list(shape), str(dtype).removeprefix("torch.")] for name, (shape, dtype) in tensors.items()}


def _transfer(operation: Any, x: torch.Tensor, peer: int, group: Any) -> torch.Tensor:
    if not x.numel():
        return x
    at = dist.get_global_rank(group, peer) if group is not None else peer
    try:
        operation(x.view(-1).view(torch.uint8), at, group=group)  # as bytes: transports do not know every dtype
    except RuntimeError as error:
        raise lost_rank(Ranks(group, dist.get_rank(group), dist.get_world_size(group)), [peer], error) from error
    return x
