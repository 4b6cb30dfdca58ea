"""Tile maps: which tiles of a score matrix hold no visible cell, and which need no mask."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from typing_extensions import Unpack

from ..errors import InvalidArgument
from . import keywords
from .arrays import to_tensor
from .devices import as_device
from .expression.mods import Mods, bind
from .mod_tiles import states_of_mod
from .options import LIMIT, Options, RuleOptions, as_block, as_offset, as_size, as_tile, is_int, to_int
from .signatures import MaskMod, typed_signature
from .tile_blocks import any_in_tiles, best_of, indices_of, regroup, states_of
from .tile_spans import span_tiles
from .tile_spec import TileMapSpec, spec_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SKIP, MIXED, FULL = 0, 1, 2
MOST_TILES = 1 << 31  # of `from_spec`, which takes no tensor of that size: a byte each


class TileCounts(NamedTuple):
    """Number of tiles in each state, over all planes."""

    skip: int
    mixed: int
    full: int


@dataclass(frozen=True, slots=True, eq=False)
class TileMap:
    """The state of each tile `(BQ, BK)` of a score matrix `[Lq, Lk]`: 0 skip, 1 mixed or 2 full.

    Make maps with `from_mask`, `from_mod` or `from_spec`, combine them with `&`, and pass one to a call as `tile_map=`.
    The output is the same, bit for bit, with and without it. `from_blocks` and `from_topk` make maps of blocks that
    queries choose; pass these to a call as `block_indices=`, which `block_indices()` gives.

    Args:
        states: uint8 `[1 or B, 1 or H, nq, nk]`. `nq = ceil(Lq / BQ)`, or 1 where the mask is broadcast; `nk` likewise.
        tile: `(BQ, BK)`.
        shape: `(Lq, Lk)` of the classified mask or rules; 1 where a mask is broadcast.
        mask_kind: `"bool"` or `"float"` if the map classifies a dense mask.
        spec: the rules, if the map classifies position rules.
        chosen: whether the map holds chosen blocks, which a call needs as `block_indices` too.
        mask_mod: what it computes, if the map classifies a `mask_mod`.
    """

    states: torch.Tensor
    tile: tuple[int, int]
    shape: tuple[int, int]
    mask_kind: str | None = None
    spec: TileMapSpec | None = field(default=None, repr=False)
    chosen: bool = False
    mask_mod: Mods | None = None

    def __post_init__(self) -> None:
        as_tile("tile", self.tile)
        pair = isinstance(self.shape, (tuple, list)) and len(self.shape) == 2
        if not pair or not all(is_int(n) and 0 <= n <= LIMIT for n in self.shape):
            raise InvalidArgument("shape", repr(self.shape), "a pair (Lq, Lk) of ints of 0 or more")
        if not isinstance(self.states, torch.Tensor) or self.states.dtype != torch.uint8 or self.states.ndim != 4:
            given = (
                f"{self.states.dtype} of rank {self.states.ndim}"
                if isinstance(self.states, torch.Tensor)
                else "no tensor"
            )
            raise InvalidArgument("states", given, "a uint8 tensor [1 or B, 1 or H, ceil(Lq / BQ), ceil(Lk / BK)]")
        to_tensor("states", self.states)
        want = tuple(-(-n // t) for n, t in zip(self.shape, self.tile, strict=True))
        if tuple(self.states.shape[2:]) != want:
            raise InvalidArgument(
                "states", f"{tuple(self.states.shape[2:])} tiles", f"{want} for {self.shape} in {self.tile}"
            )
        if self.mask_kind not in (None, "bool", "float"):
            raise InvalidArgument("mask_kind", repr(self.mask_kind), "None, 'bool' or 'float'")
        if self.spec is not None and not isinstance(self.spec, TileMapSpec):
            raise InvalidArgument("spec", type(self.spec).__name__, "None or what TileMap.from_spec makes")
        if self.states.is_cpu:
            self.check_states()

    def check_states(self) -> None:
        """Checks that every state is 0, 1 or 2. It synchronises a GPU, where calls do it only with `validate=True`."""
        if self.states.numel() and int(self.states.max()) > FULL:
            raise InvalidArgument("states", int(self.states.max()), "0 (skip), 1 (mixed) or 2 (full) in every tile")

    @classmethod
    def from_mask(cls, mask: Any, tile: tuple[int, int] = (64, 64)) -> TileMap:
        """Classifies a dense bool or float mask of rank 2, 3 or 4, on the mask's device.

        Only False or `-inf` hides a cell. A tile is full if every cell is visible and, in a float mask, exactly 0.
        Cells past the edges are ignored.

        >>> print(TileMap.from_mask(torch.ones(8, 8).tril().bool(), (2, 2)))
        TileMap 8 x 8 in tiles of 2 x 2: 6 skip, 4 mixed, 6 full
        ▒...
        █▒..
        ██▒.
        ███▒
        """
        BQ, BK = as_tile("tile", tile)
        mask = to_tensor("mask", mask)
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise InvalidArgument("mask", mask.dtype, "a bool or floating point tensor")
        if mask.ndim not in (2, 3, 4):
            raise InvalidArgument("mask", f"rank {mask.ndim}", "rank 2 [Lq, Lk], 3 [H, Lq, Lk] or 4 [B, H, Lq, Lk]")
        planes = mask[(None,) * (4 - mask.ndim)]  # [B, H, Lq, Lk]
        is_bool = mask.dtype == torch.bool
        seen = any_in_tiles(planes if is_bool else planes != -torch.inf, BQ, BK)
        partial = any_in_tiles(~planes if is_bool else planes != 0, BQ, BK)
        states = seen.to(torch.uint8) + (seen & ~partial).to(torch.uint8)
        shape = (planes.shape[2], planes.shape[3])
        return cls(states, (BQ, BK), shape, mask_kind="bool" if is_bool else "float")

    @classmethod
    @typed_signature(RuleOptions, lse=False)
    def from_spec(
        cls,
        Lq: int,
        Lk: int,
        tile: tuple[int, int] = (64, 64),
        *,
        kv_lengths: Any | None = None,
        device: torch.device | str | None = None,
        **options: Unpack[RuleOptions],
    ) -> TileMap:
        """Classifies position rules by arithmetic, without building a mask. The rules are those of `attention`.

        >>> TileMap.from_spec(4096, 4096, (128, 128), causal=True, window=512).density
        0.146484375
        """
        if unknown := [name for name in options if name not in RuleOptions.__annotations__]:
            keywords.refuse(unknown, keywords.of(cls.from_spec), "tilewise.TileMap.from_spec")
        tile = as_tile("tile", tile)
        Lq, Lk = as_size("Lq", Lq), as_size("Lk", Lk)
        if (count := -(-Lq // tile[0]) * -(-Lk // tile[1])) > MOST_TILES:
            raise InvalidArgument("tile", f"{tile}, {count} tiles of {Lq} x {Lk}", f"at most {MOST_TILES} tiles")
        spec, spans = spec_of(Options(**options, kv_lengths=kv_lengths), Lq, Lk, device)
        return cls(span_tiles(*spans, Lk, tile)[:, None], tile, (Lq, Lk), spec=spec)

    @classmethod
    def from_mod(
        cls,
        mask_mod: MaskMod,
        Lq: int,
        Lk: int,
        tile: tuple[int, int] = (64, 64),
        *,
        batch: int = 1,
        heads: int = 1,
        q_offset: int | None = None,
        device: torch.device | str | None = None,
    ) -> TileMap:
        """Classifies a `mask_mod` by intervals of positions, without evaluating a cell.

        A tile is skipped, or full, if that is certain; others are mixed. There is one plane for each batch row and head
        that the function tells apart. `device` is that of the tensors that it captures.

        >>> documents = torch.arange(8) // 3
        >>> print(TileMap.from_mod(lambda b, h, q, k: (documents[q] == documents[k]) & (q >= k), 8, 8, (2, 2)))
        TileMap 8 x 8 in tiles of 2 x 2: 10 skip, 6 mixed, 0 full
        ▒...
        ▒▒..
        .▒▒.
        ...▒
        """
        tile, Lq, Lk = as_tile("tile", tile), as_size("Lq", Lq), as_size("Lk", Lk)
        if (count := -(-Lq // tile[0]) * -(-Lk // tile[1])) > MOST_TILES:
            raise InvalidArgument("tile", f"{tile}, {count} tiles of {Lq} x {Lk}", f"at most {MOST_TILES} tiles")
        offset = Lk - Lq if q_offset is None else as_offset(to_int(q_offset), Lq, Lk)
        if mask_mod is None:
            raise InvalidArgument("mask_mod", "None", "a function mask_mod(b, h, q_idx, kv_idx)")
        device = torch.device("cpu") if device is None else as_device(device)
        bound = bind(None, mask_mod, device)
        sizes = as_size("batch", batch), as_size("heads", heads)
        if bound is None:  # it hides nothing
            tiles = (1, 1, -(-Lq // tile[0]), -(-Lk // tile[1]))
            return cls(torch.full(tiles, FULL, dtype=torch.uint8, device=device), tile, (Lq, Lk))
        return cls(states_of_mod(bound, offset, (Lq, Lk), tile, *sizes), tile, (Lq, Lk), mask_mod=bound.mods)

    @classmethod
    def from_blocks(cls, block_indices: Any, block_size: int, Lq: int, Lk: int) -> TileMap:
        """A map in which the chosen blocks are full and all others are skipped.

        `block_indices` is `[B, ceil(Lq / block_size), n]` or `[B, Hkv, ceil(Lq / block_size), n]`; -1 is no block.

        >>> print(TileMap.from_blocks(torch.tensor([[[0, -1], [1, 3]]]), 2, 4, 8))
        TileMap 4 x 8 in tiles of 2 x 2: 5 skip, 0 mixed, 3 full
        █...
        .█.█
        """
        tile = (size := as_block(block_size), size)
        Lq, Lk = as_size("Lq", Lq), as_size("Lk", Lk)
        states, rows = states_of(block_indices, -(-Lk // tile[1])), -(-Lq // tile[0])
        if states.shape[2] != rows:
            raise InvalidArgument("block_indices", f"{states.shape[2]} rows", f"{rows} = ceil(Lq / block_size)")
        return cls(states, tile, (Lq, Lk), chosen=True)

    @classmethod
    def from_topk(cls, scores: Any, count: int, tile: tuple[int, int], Lq: int, Lk: int) -> TileMap:
        """A map with the `count` tiles of highest score in each row of tiles.

        `scores` is `[B, H, nq, nk]`, `[H, nq, nk]` or `[nq, nk]`. Tiles with a score of `-inf` are never chosen.

        >>> print(TileMap.from_topk(torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 4.0]]), 2, (4, 4), 8, 12))
        TileMap 8 x 12 in tiles of 4 x 4: 2 skip, 0 mixed, 4 full
        █.█
        .██
        """
        return cls(best_of(scores, count), as_tile("tile", tile), (as_size("Lq", Lq), as_size("Lk", Lk)), chosen=True)

    def block_indices(self) -> torch.Tensor:
        """The tiles that are not skipped, as `block_indices` of a call: int32 `[1 or B, H, nq, n]`, padded with -1.

        A call takes `[B, Hkv, nq, n]`, so expand a map of a single plane. Tiles must be square. On a GPU this
        synchronises.

        >>> TileMap.from_spec(6, 6, (2, 2), causal=True).block_indices()[0, 0].tolist()
        [[0, -1, -1], [0, 1, -1], [0, 1, 2]]
        """
        if self.tile[0] != self.tile[1]:
            remedy = "retile it"
            raise InvalidArgument("tile", self.tile, "square tiles: blocks have as many queries as keys", remedy)
        return indices_of(self.states)

    def __and__(self, other: TileMap) -> TileMap:
        """Combines two maps: a tile is skipped if either skips it, and full if both are full."""
        if not isinstance(other, TileMap):
            return NotImplemented
        if self.tile != other.tile:
            raise InvalidArgument("other", f"tiles of {other.tile}", f"{self.tile}", "use other.retile")
        if self.spec is not None and other.spec is not None:
            raise InvalidArgument("other", "a second map of position rules", "one made with all rules in one from_spec")
        shapes = list(zip(self.shape, other.shape, strict=True))
        if any(a != b and 1 not in (a, b) for a, b in shapes):
            raise InvalidArgument("other", f"a map of {other.shape}", f"{self.shape}, or 1 where broadcast")
        planes, others = (tuple(x.states.shape[:2]) for x in (self, other))
        if any(a != b and 1 not in (a, b) for a, b in zip(planes, others, strict=True)):
            raise InvalidArgument("other", f"a map of {others} planes", f"{planes}, or 1 where broadcast: (B, H)")
        if self.states.device != other.states.device:
            raise InvalidArgument("other", f"a map on {other.states.device}", f"one on {self.states.device}")
        states = torch.minimum(self.states, other.states)
        kinds = {self.mask_kind, other.mask_kind} - {None}
        kind = None if not kinds else "float" if "float" in kinds else "bool"
        if self.mask_mod is not None and other.mask_mod not in (None, self.mask_mod):
            raise InvalidArgument("other", "a map of another mask_mod", "one of a mask_mod that has both conditions")
        shape = (max(shapes[0]), max(shapes[1]))
        return TileMap(states, self.tile, shape, mask_kind=kind, spec=self.spec or other.spec,
                       chosen=self.chosen or other.chosen, mask_mod=self.mask_mod or other.mask_mod)  # fmt: skip

    def retile(self, tile: tuple[int, int]) -> TileMap:
        """The same map with another tile size. A tile that covers tiles of different states becomes mixed."""
        tile = as_tile("tile", tile)
        if tile == self.tile:
            return self
        states = self.states
        for dim, (size, old, new) in enumerate(zip(self.shape, self.tile, tile, strict=True), start=2):
            states = regroup(states, dim, size, old, new)
        return TileMap(states, tile, self.shape, self.mask_kind, self.spec, self.chosen, self.mask_mod)

    def counts(self) -> TileCounts:
        """Number of tiles in each state, over all planes. On a GPU this synchronises."""
        skip, mixed, full = torch.bincount(self.states.flatten().long(), minlength=3).tolist()
        return TileCounts(skip, mixed, full)

    @property
    def density(self) -> float:
        """The share of tiles that are not skipped."""
        skip, mixed, full = self.counts()
        return (mixed + full) / max(1, skip + mixed + full)

    def __str__(self) -> str:
        """A picture of the first plane: `.` skip, `▒` mixed, `█` full; in large maps a mark is several tiles."""
        from .tile_pictures import as_text

        return as_text(self)

    def __repr__(self) -> str:
        """One line, without reading the states: they may be on a GPU."""
        source = ["rules"] * (self.spec is not None) + ["chosen blocks"] * self.chosen
        source += [f"a {self.mask_kind} mask"] if self.mask_kind else []
        source += ["a mask_mod"] * (self.mask_mod is not None)
        (Lq, Lk), (BQ, BK) = self.shape, self.tile
        words = f"{Lq} x {Lk} in tiles of {BQ} x {BK}, states {list(self.states.shape)}"
        return f"<TileMap {words}{', of ' * bool(source)}{' and '.join(source)}>"

    def _repr_html_(self) -> str:
        from .tile_pictures import as_html

        return as_html(self)

    def plot(self, ax: Axes | None = None, plane: tuple[int, int] = (0, 0)) -> Axes:
        """Draws one plane with matplotlib and returns its `Axes`, in a new figure unless `ax` is given.

        `ax.figure.savefig("tiles.png")` saves it. The legend is beside the axes. A new figure has room for it; a figure
        of your own needs `layout="constrained"`, or `bbox_inches="tight"` when it is saved.
        """
        from .tile_pictures import draw

        return draw(self, ax, plane)
