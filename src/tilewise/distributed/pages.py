"""Sequences of a `PagedKVCache` from process to process: prefill in one, decode in another."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from ..errors import InvalidArgument
from ..kv_cache import PagedKVCache
from ..kv_cache.transfer import declared
from .faults import lost_rank
from .layout import Ranks

MOST_HEADER = 2**20  # bytes


def send_sequence(cache: PagedKVCache, sequence: int, to: int, *, group: Any = None, **cut: Any) -> None:
    """Sends a sequence to rank `to` of a process group; `cut` are options of `PagedKVCache.export`."""
    about, tensors = cache.export(sequence, **cut)
    shapes = _shapes({name: (tuple(x.shape), x.dtype) for name, x in tensors.items()})
    text = torch.tensor(list(json.dumps({"about": about, "tensors": shapes}).encode()), dtype=torch.uint8)
    device = cache.device
    messages = [torch.tensor([len(text)]), text, *tensors.values()]
    for x in messages:
        _moved(dist.send, x.to(device), to, group)


def receive_sequence(cache: PagedKVCache, *senders: int, group: Any = None, first_head: int = 0) -> int:
    """A new sequence of what `senders` send, which have all its layers and heads together."""
    parts = []
    for sender in senders:
        size = int(_moved(dist.recv, torch.zeros(1, dtype=torch.int64, device=cache.device), sender, group))
        if not 0 < size <= MOST_HEADER:
            raise InvalidArgument("sender", f"{sender}, a header of {size} bytes", f"1 to {MOST_HEADER}: send_sequence")
        text = _moved(dist.recv, torch.empty(size, dtype=torch.uint8, device=cache.device), sender, group)
        try:
            said = json.loads(bytes(text.tolist()))
            about, shapes = said["about"], said["tensors"]
        except (ValueError, KeyError, TypeError) as error:
            given = f"{sender}, a header that cannot be read"
            raise InvalidArgument("sender", given, "one of send_sequence") from error
        found = declared(cache, f"sender {sender}", about)  # before memory is taken
        if shapes != _shapes(found):
            raise InvalidArgument("sender", f"{sender}, tensors {shapes}", f"{_shapes(found)}, as its manifest says")
        tensors = {}
        for name, (shape, dtype) in found.items():
            tensors[name] = _moved(dist.recv, torch.empty(shape, dtype=dtype, device=cache.device), sender, group)
        parts.append((about, tensors))
    return cache.import_(*parts, first_head=first_head)


def _shapes(tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, list[Any]]:
    """As a header has them."""
    return {name: [list(shape), str(dtype).removeprefix("torch.")] for name, (shape, dtype) in tensors.items()}


def _moved(how: Any, x: torch.Tensor, peer: int, group: Any) -> torch.Tensor:
    if not x.numel():
        return x
    at = dist.get_global_rank(group, peer) if group is not None else peer
    try:
        how(x.view(-1).view(torch.uint8), at, group=group)  # as bytes: not every transport knows every dtype
    except RuntimeError as error:
        raise lost_rank(Ranks(group, dist.get_rank(group), dist.get_world_size(group)), [peer], error) from error
    return x
