"""torch's `BlockMask`: made from intervals of positions, and read as a `mask_mod` that says what its blocks say."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.nn.attention.flex_attention import BlockMask

from ..core.eager import eager_function
from ..core.expression.cells import visible_cells
from ..core.expression.mods import Bound, Mods, bind
from ..core.mod_tiles import states_of_mod
from ..core.private.torch import version_of
from ..core.tile_map import FULL, MIXED, TileMap
from ..errors import InvalidArgument
from .caller_names import caller_names

Tensor = torch.Tensor
MaskMod = Callable[..., Tensor]
Parts = tuple[tuple[Any, int], ...]  # each with the number of times that it was written to; -1 if that is not known
MOST_CELLS = 1 << 20  # that are evaluated at once
NO_BLOCKS = 1 << 30  # from this size on a block holds all cells: the mask is its mask_mod alone
OF_A_SLICE = "_sliced_mask_mod_error"  # what torch gives the slices of a mask as mask_mod


class _Kept(NamedTuple):
    """What is known of a mask, as long as it has these parts, and its mask_mod computes this from these tensors."""

    parts: Parts
    mods: Mods | None
    captured: Parts | None  # None: whatever mask_mod computes
    mask_mod: MaskMod


_known: WeakKeyDictionary[BlockMask, _Kept] = WeakKeyDictionary()


@caller_names(Lq="Q_LEN", Lk="KV_LEN", tile="BLOCK_SIZE", batch="B", heads="H")
def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """The same block mask as torch's function makes, without its Q_LEN x KV_LEN cells.

    Intervals of positions show which blocks `mask_mod` leaves empty or full; the cells of the others are evaluated,
    some blocks at a time. `flex_attention` takes the result as its `mask_mod`: the blocks are what torch and you see.

    Args:
        mask_mod: `mask_mod(b, h, q_idx, kv_idx)`: whether a query sees a key.
        B, H: batch rows and query heads, or None: 1, for all.
        Q_LEN, KV_LEN: the lengths.
        device: that of the block mask and of what `mask_mod` captures. Default: the accelerator's, else the CPU.
        BLOCK_SIZE: of queries and of keys, or both.
        separate_full_blocks: False lists full blocks with the others, as torch does.
        compute_dq_write_order: must be False: it orders what a kernel of torch writes.
    """
    del _compile, dq_kv_order
    if compute_dq_write_order:
        raise InvalidArgument("compute_dq_write_order", True, "False", "tilewise's gradients are already deterministic")
    if device is None:
        device = _accelerator()
    BQ, BK = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    shape, tile = (Q_LEN, KV_LEN), (BQ, BK)
    rows, heads = 1 if B is None else B, 1 if H is None else H
    states = TileMap.from_mod(mask_mod, *shape, tile, batch=rows, heads=heads, q_offset=0, device=device).states
    if (bound := bind(None, mask_mod, states.device)) is not None:
        states = _exact(states, bound, shape, tile)
    for ends, length, size in zip((states[:, :, -1:], states[..., -1:]), shape, tile, strict=True):
        if length % size:  # to torch, cells past the ends are hidden
            ends.clamp_(max=MIXED)
    partial = states == MIXED if separate_full_blocks else states != 0
    full = states == FULL if separate_full_blocks else None
    lists: dict[str, Any] = {}
    for name, which in (("", partial), ("full_", full)):
        for side, at in (("kv", which), ("q", None if which is None else which.mT)):
            counts, indices = (None, None) if at is None else _listed(at, rows, heads)
            lists |= {f"{name}{side}_num_blocks": counts, f"{name}{side}_indices": indices}
    made = BlockMask(seq_lengths=shape, BLOCK_SIZE=tile, mask_mod=mask_mod, **lists)
    _known[made] = _Kept(_parts(made), None, None, mask_mod)
    return made


eager_function(
    create_block_mask,
    "tilewise traces mask_mod itself: torch.compile breaks the graph there, and fails with fullgraph=True",
)


def _accelerator() -> Any:
    found = torch.accelerator.current_accelerator()
    return "cpu" if found is None else found


def _exact(states: Tensor, bound: Bound, shape: tuple[int, int], tile: tuple[int, int]) -> Tensor:
    """The states with all tiles that intervals left open decided by their cells."""
    states = states.clone()
    mixed = (states == MIXED).nonzero()
    inside = [torch.arange(size, device=states.device) for size in tile]
    for some in mixed.split(max(1, MOST_CELLS // (tile[0] * tile[1]))):
        b, h, i, j = (x[:, None, None] for x in some.unbind(1))
        cells = {"b": b, "h": h, "q": i * tile[0] + inside[0][:, None], "k": j * tile[1] + inside[1]}
        visible = visible_cells(bound.mods, cells, bound.tensors)
        assert visible is not None
        outside = (cells["q"] >= shape[0]) | (cells["k"] >= shape[1])
        visible = visible.expand(outside.shape)
        any_seen = (visible & ~outside).flatten(1).any(1)
        all_seen = (visible | outside).flatten(1).all(1)
        states[tuple(some.unbind(1))] = any_seen.to(torch.uint8) + (any_seen & all_seen).to(torch.uint8)
    return states


def _listed(blocks: Tensor, rows: int, heads: int) -> tuple[Tensor, Tensor]:
    """The blocks of each row as torch lists them: how many, and their numbers, the others after them."""
    counts = blocks.sum(-1, dtype=torch.int32)
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return tuple(x.expand(rows, heads, *x.shape[2:]) for x in (counts, order))  # type: ignore[return-value]


def mask_mod_of(mask: BlockMask, batch: int, heads: int) -> MaskMod:
    """What a block mask leaves visible, as a mask_mod: a full block, and what the mask's own mask_mod says of a partial
    one. Where intervals prove that mask_mod gives the same blocks by itself, it is taken alone: kernels find its rules.
    """
    parts, known = _parts(mask), _known.get(mask)
    if known is not None and known.captured is None and _same(parts, known.parts):
        return known.mask_mod
    own = mask.mask_mod
    if getattr(own, "__name__", "") == OF_A_SLICE:
        remedy = "set the slice's mask_mod: the whole mask's, with the slice's first query added to q_idx"
        raise InvalidArgument("block_mask", "a slice without a mask_mod", "one with its own", remedy)
    if min(mask.BLOCK_SIZE) >= NO_BLOCKS:
        return own
    bound = bind(None, own, mask.kv_indices.device)
    mods, tensors = (None, ()) if bound is None else bound
    captured = _written(tensors)
    if known is not None and known.mods is mods and _same(parts, known.parts) and _same(captured, known.captured):
        return known.mask_mod
    found = _within_blocks(mask, own, bound, batch, heads)
    _known[mask] = _Kept(parts, mods, captured, found)
    return found


def _parts(mask: BlockMask) -> Parts:
    lists = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    return (*_written(lists), (mask.mask_mod, 0))


def _written(tensors: Iterable[Tensor | None]) -> Parts:
    return tuple([(x, 0 if x is None else -1 if x.is_inference() else version_of(x)) for x in tensors])


def _same(these: Parts, those: Parts | None) -> bool:
    """Whether they are the same objects, and known not to have been written to."""
    return (
        those is not None
        and len(these) == len(those)
        and all(x is y and n == m >= 0 for (x, n), (y, m) in zip(these, those, strict=True))
    )


def _within_blocks(mask: BlockMask, own: MaskMod, bound: Bound | None, batch: int, heads: int) -> MaskMod:
    listed, tile, shape = _states(mask), tuple(mask.BLOCK_SIZE), tuple(mask.seq_lengths)
    if any(n not in (1, size) for n, size in zip(listed.shape, (batch, heads), strict=False)):
        given = f"a mask for {listed.shape[0]} batch rows and {listed.shape[1]} heads"
        raise InvalidArgument("block_mask", given, f"{batch} and {heads}, each as in query or 1")
    if bound is None:
        proven = torch.full((1, 1, 1, 1), FULL, dtype=torch.uint8, device=listed.device)
    else:
        proven = states_of_mod(bound, 0, shape, tile, batch, heads)  # type: ignore[arg-type]
    covered = listed[:, :, : -(-shape[0] // tile[0]), : -(-shape[1] // tile[1])]
    full_proven = bool(((covered != FULL) | (proven == FULL)).all())
    if full_proven and bool(((covered != 0) | (proven == 0)).all()):
        return own
    one_row, one_head = (n == 1 for n in listed.shape[:2])
    (BQ, BK), sees_all = tile, bound is None

    def in_blocks(b: Any, h: Any, q: Any, k: Any) -> Any:
        state = listed[0 if one_row else b, 0 if one_head else h, q // BQ, k // BK]
        if sees_all:
            return state != 0
        visible = own(b, h, q, k)
        return (state != 0) & (visible if full_proven else visible | (state == FULL))

    return in_blocks


def _states(mask: BlockMask) -> Tensor:
    """The blocks that a mask lists: uint8 `[1 or B, 1 or H, nq, nk]`; 0 is one that it does not."""
    most = max(mask.kv_indices.shape[-1], -(-mask.seq_lengths[1] // mask.BLOCK_SIZE[1]))
    states = None
    lists = (mask.kv_num_blocks, mask.kv_indices, MIXED), (mask.full_kv_num_blocks, mask.full_kv_indices, FULL)
    for counts, indices, state in lists:
        if counts is None or indices is None:
            continue
        used = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
        at = torch.where(used, indices, most).long().clamp(0, most)  # what is past a count may be anything
        found = torch.zeros((*at.shape[:-1], most + 1), dtype=torch.uint8, device=at.device)
        found = found.scatter_(-1, at, state)[..., :most]
        states = found if states is None else torch.maximum(states, found)
    assert states is not None
    rows = -(-mask.seq_lengths[0] // mask.BLOCK_SIZE[0])
    if states.ndim > 4 or states.shape[-2] < rows:
        given = f"kv_indices of shape {tuple(mask.kv_indices.shape)}"
        want = f"[B, H, {rows}, n]: {mask.seq_lengths[0]} queries in blocks of {mask.BLOCK_SIZE[0]}"
        raise InvalidArgument("block_mask", given, want)
    return states[(None,) * (4 - states.ndim)]
