"""Dropout of attention weights: which cells are dropped, by seed and place alone.

A counter-based generator (Philox 4x32 of seven rounds: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3")
turns a counter into four words of 32 bits, which are eight numbers of 16 bits, for eight keys at consecutive positions:

    counter     kpos >> 3, qpos, h, b
    key         low and high 32 bits of the seed
    number      of key kpos: the low (of an even kpos) or high half of word kpos >> 1 & 3

A cell is dropped if its number is below `dropout_p * 2**16`. No tile, split, batch, backend or rank has a part in it.
Words are int64 tensors here; kernels have the same in `backends/cpu/dropout.py` and `backends/gpu/dropout.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import InvalidArgument
from .options import as_dropout_p, is_int, to_int

ROUNDS = 7
MULTIPLIERS, KEY_STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
LOW = 0xFFFFFFFF
NUMBERS = 1 << 16  # a cell's number is below this
MOST_SEED = 2**63 - 1

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Sequence[torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Four words of 32 bits, in int64 tensors of the counter's broadcast shape."""
    c0, c1, c2, c3 = (x & LOW for x in counter)
    k0, k1 = key
    for _ in range(ROUNDS):
        a, b = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # of 64 bits: they wrap, and the high half is masked
        c0, c1, c2, c3 = ((b >> 32) & LOW) ^ c1 ^ k0, b & LOW, ((a >> 32) & LOW) ^ c3 ^ k1, a & LOW
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW, (k1 + KEY_STEPS[1]) & LOW
    return c0, c1, c2, c3


def kept_cells(
    dropout_p: float, seed: torch.Tensor, b: int | torch.Tensor, h: torch.Tensor, qpos: torch.Tensor, kpos: torch.Tensor
) -> torch.Tensor:
    """Which cells keep their weight: bool, of the broadcast shape of b, h `[H, 1, 1]`, qpos `[n, 1]`, kpos `[1, m]`."""
    kpos = kpos.reshape(-1).long()
    blocks, at = torch.unique_consecutive(kpos >> 3, return_inverse=True)
    b = torch.as_tensor(b, device=kpos.device)
    seed = seed.reshape(())
    words = philox((blocks, qpos.long(), h.long(), b.long()), (seed & LOW, (seed >> 32) & LOW))
    numbers = torch.stack([half for x in words for half in (x & 0xFFFF, x >> 16)], -1).flatten(-2)
    return numbers[..., at * 8 + (kpos & 7)] >= threshold(dropout_p)


def threshold(dropout_p: float) -> int:
    """Cells with a smaller number are dropped."""
    return round(dropout_p * NUMBERS)


def kept_scale(dropout_p: float) -> float:
    """What the weights of kept cells are multiplied by."""
    return 0.0 if dropout_p == 1 else 1 / (1 - dropout_p)


def with_seed(options: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The options with the seed as a tensor on `device`: the caller's, or one drawn from torch's generator. A call with
    `dropout_p=0.0` is one without both options.
    """
    options = dict(options)
    dropout_p, seed = as_dropout_p(options.pop("dropout_p", 0.0)), options.pop("dropout_seed", None)
    if not dropout_p:
        return options
    seed = drawn_seed(device) if seed is None else as_seed(seed, device)
    return options | {"dropout_p": dropout_p, "dropout_seed": seed}


def drawn_seed(device: torch.device) -> torch.Tensor:
    """From torch's generator of the device: no wait, and each replay of a CUDA graph draws another."""
    if device.type == "mps":  # which draws ints of 32 bits
        return torch.randint(MOST_SEED, (1,), device="cpu").to(device)
    return torch.randint(MOST_SEED, (1,), device=device)


def as_seed(seed: Any, device: torch.device) -> torch.Tensor:
    """A seed as an int64 tensor of one element."""
    seed = to_int(seed)
    if is_int(seed):
        if not 0 <= seed <= MOST_SEED:
            raise InvalidArgument("dropout_seed", seed, f"an int of 0 to {MOST_SEED}")
        return torch.full((1,), seed, dtype=torch.int64, device=device)
    if not isinstance(seed, torch.Tensor) or seed.dtype != torch.int64 or seed.numel() != 1:
        given = f"{seed.dtype} {tuple(seed.shape)}" if isinstance(seed, torch.Tensor) else repr(seed)
        raise InvalidArgument("dropout_seed", given, "None, an int or an int64 tensor of one element")
    if seed.device != device:
        raise InvalidArgument("dropout_seed", f"device {seed.device}", f"{device}, as q")
    return seed


def dropout_mask(
    shape: Sequence[int],
    dropout_p: float,
    dropout_seed: torch.Tensor | int,
    *,
    q_offset: int | None = None,
    k_start: int = 0,
    k_stride: int = 1,
    q_stride: int = 1,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Which cells of a call keep their weight: True = kept. For tests and debugging; a call never makes it.

    Args:
        shape: `(B, H, Lq, Lk)`: sequences, query heads, queries and keys.
        dropout_p: as given to the call.
        dropout_seed: likewise.
        q_offset: the position of the first query. Default: `Lk - Lq`. All positions are as in `attention`.
        k_start: the position of the first key.
        k_stride: positions from one key to the next.
        q_stride: positions from one query to the next.
        device: where the mask is made.

    Returns:
        bool `[B, H, Lq, Lk]`.

    >>> dropout_mask((1, 2, 100, 100), 0.1, 7).float().mean().item()  # doctest: +ELLIPSIS
    0.90...
    """
    B, H, Lq, Lk = shape
    device = torch.device(device)
    b, h, i, j = (torch.arange(n, device=device) for n in (B, H, Lq, Lk))
    qpos, kpos = (Lk - Lq if q_offset is None else q_offset) + q_stride * i, k_start + k_stride * j
    seed = as_seed(dropout_seed, device)
    kept = kept_cells(
        as_dropout_p(dropout_p), seed, b[:, None, None, None], h[:, None, None], qpos[:, None], kpos[None]
    )
    return kept.expand(B, H, Lq, Lk)
