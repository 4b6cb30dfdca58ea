"""Sequences of a `PagedKVCache` from process to process: prefill in one, decode in another."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from ..kv_cache import PagedKVCache
from .faults import lost_rank
from .layout import Ranks


def send_sequence(cache: PagedKVCache, sequence: int, to: int, *, group: Any = None, **cut: Any) -> None:
    """Sends a sequence to rank `to` of a process group; `cut` are options of `PagedKVCache.export`."""
    about, tensors = cache.export(sequence, **cut)
    shapes = {name: [list(x.shape), str(x.dtype).removeprefix("torch.")] for name, x in tensors.items()}
    text = torch.tensor(list(json.dumps({"about": about, "tensors": shapes}).encode()), dtype=torch.uint8)
    device = cache.device
    messages = [torch.tensor([len(text)]), text, *tensors.values()]
    for x in messages:
        _moved(dist.send, x.to(device), to, group)


def receive_sequence(cache: PagedKVCache, *senders: int, group: Any = None, first_head: int = 0) -> int:
    """A new sequence of what `senders` send, which have all its layers and heads together."""
    parts = []
    for sender in senders:
        size = _moved(dist.recv, torch.zeros(1, dtype=torch.int64, device=cache.device), sender, group)
        text = _moved(dist.recv, torch.empty(int(size), dtype=torch.uint8, device=cache.device), sender, group)
        said = json.loads(bytes(text.tolist()))
        tensors = {}
        for name, (shape, dtype) in said["tensors"].items():
            room = torch.empty(shape, dtype=getattr(torch, dtype), device=cache.device)
            _moved(dist.recv, room, sender, group)
            tensors[name] = room
        parts.append((said["about"], tensors))
    return cache.import_(*parts, first_head=first_head)


def _moved(how: Any, x: torch.Tensor, peer: int, group: Any) -> torch.Tensor:
    if not x.numel():
        return x
    at = dist.get_global_rank(group, peer) if group is not None else peer
    try:
        how(x.view(-1).view(torch.uint8), at, group=group)  # as bytes: not every transport knows every dtype
    except RuntimeError as error:
        raise lost_rank(Ranks(group, dist.get_rank(group), dist.get_world_size(group)), [peer], error) from error
    return x
