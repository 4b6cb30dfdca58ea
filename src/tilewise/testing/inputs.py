"""The arguments and options of a case's call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .. import api
from ..alibi import alibi_slopes
from ..core.options import PLACES
from ..core.storage import FLOATS
from ..core.tile_map import TileMap
from .tensors import Tensors, first_columns, permuted

if TYPE_CHECKING:
    from .case import Case


class Maker(Tensors):
    def __init__(self, case: Case, device: str, slack: float, draw: int, sized: bool) -> None:
        super().__init__(case, device, slack, draw)
        self.sized = sized or bool(case.mask or case.tree)  # with one of them a GPU call needs max_q

    def call(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """The entry point, its arguments and options."""
        c = self.case
        options = self.options()
        if c.form == "varlen":
            q, k = self.packed(c.q_lengths, "q"), self.packed(c.lengths, "k")
            v = first_columns(k, c.Dv) if c.latent else self.packed(c.lengths, "v")
            k = self.without_shared(k, 1, options)
            args = (q, k, v, self.offsets(c.q_lengths), self.offsets(c.lengths))
            if c.used:
                options["kv_lengths"] = self.ints(c.used)
            if self.sized:
                options |= {"max_q": c.queries, "max_k": c.keys}
            return api.varlen_attention, args, options
        if c.form == "paged":
            table = self.block_table()
            k = self.pages("k", table)
            v = first_columns(k, c.Dv) if c.latent else self.pages("v", table)
            if c.q_lengths:
                options["cu_seqlens_q"] = self.offsets(c.q_lengths)
                if self.sized:
                    options["max_q"] = c.queries
            else:
                options["layout"] = c.layout
            q = self.packed(c.q_lengths, "q") if c.q_lengths else self.dense("q")
            return api.paged_attention, (q, k, v, table.to(self.device), self.ints(c.lengths)), options
        options["layout"] = c.layout
        if c.lengths:
            options["kv_lengths"] = self.ints(c.lengths)
        q, k = self.dense("q"), self.dense("k")
        v = first_columns(k, c.Dv) if c.latent else self.dense("v")
        return api.attention, (q, self.without_shared(k, 2 if c.layout == "blhd" else 1, options), v), options

    def without_shared(self, k: Any, heads: int, options: dict[str, Any]) -> Any:
        """Keys without their last columns; those of the first head become `k_shared`."""
        n = self.case.shared
        if not n:
            return k
        options["k_shared"] = k.narrow(heads, 0, 1)[..., -n:]
        return k[..., :-n]

    def options(self) -> dict[str, Any]:
        c = self.case
        names = ("causal", "window", "chunk", "softcap", "scale", "split_size")
        options: dict[str, Any] = {name: getattr(c, name) for name in names if getattr(c, name) not in (None, False)}
        batch = len(c.lengths) if c.form != "dense" else c.B
        if c.offset is not None:
            rows = [0, 3, 17, -2, 40]
            options["q_offset"] = self.ints([rows[b % 5] for b in range(batch)]) if c.offset == "rows" else c.offset
        for name, own in (("k_start", [3, -5, 0]), ("k_stride", [2, 1, 5]), ("q_stride", [3, 1, 2])):
            if (value := getattr(c, name)) != c.__dataclass_fields__[name].default:
                options[name] = self.ints([own[b % 3] for b in range(batch)]) if value == "rows" else value
        if c.alibi:
            slopes = alibi_slopes(c.H, self.device)
            steps = torch.arange(1, batch + 1, device=self.device)[:, None]
            options["alibi_slopes"] = slopes * steps if c.alibi == "bh" else slopes
        lengths = {"q_bias": c.q_lengths or (c.Lq,), "k_bias": c.lengths if c.form == "varlen" else (c.keys,)}
        packed = {"q_bias": bool(c.q_lengths), "k_bias": c.form == "varlen"}
        for name, of_rows in lengths.items():
            if dims := getattr(c, name):
                sizes = [{"b": batch, "h": c.H, "1": 1}[dim] for dim in dims]
                options[name] = self.bias(name, sizes, sum(of_rows), packed[name])
        if c.sinks:
            options["sinks"] = self.sinks().to(self.device)
        if c.mask:
            options["mask"] = self.mask(batch)
        if c.tree:
            tree = self.tree(batch if c.tree == "b" else 1)
            options["tree_mask"] = tree.to(self.device)
            if c.positions:
                options["positions"] = self.positions(tree, batch)
        if c.dropout:
            options |= {"dropout_p": c.dropout, "dropout_seed": 2**40 + 17}
        if c.tile:
            options["tile_map"] = self.tile_map(options)
        if c.indices:
            options["block_indices" if c.block else "key_indices"] = self.indices(batch)
            if c.block:
                options["block_size"] = c.block
        return options

    def indices(self, batch: int) -> torch.Tensor:
        """Random indices, unordered; some are -1, some rows have none. Records which keys are in any list."""
        c = self.case
        block, count = c.block or 1, int(c.indices.removeprefix("h"))
        heads = c.kv_heads if c.indices.startswith("h") else 1
        rows = sum(c.q_lengths) if c.q_lengths else -(-c.Lq // block)
        blocks = -(-c.keys // block)
        shape = (1 if c.q_lengths else batch, heads, rows, max(blocks, count))
        order = torch.rand(shape, generator=self.random, dtype=torch.float32, device="cpu").argsort(-1)[..., :count]
        order[..., ::3] = torch.where(torch.arange(rows, device="cpu")[:, None] % 2 == 1, -1, order[..., ::3])
        order = torch.where(order < blocks, order, -1)
        order[..., 3::7, :] = -1
        self.chosen = torch.zeros(batch, c.kv_heads, (blocks + 1) * block, dtype=torch.bool, device="cpu")
        starts = torch.tensor([0, *c.q_lengths], device="cpu").cumsum(0).tolist() if c.q_lengths else None
        for b in range(batch):
            own = order[0, :, starts[b] : starts[b + 1]] if starts else order[b]
            flags = torch.zeros(heads, blocks + 1, dtype=torch.bool, device="cpu")
            flags.scatter_(1, torch.where(own < 0, blocks, own).flatten(1), True)
            flags[:, blocks] = False
            self.chosen[b] = flags.repeat_interleave(block, 1).expand(c.kv_heads, -1)
        order = order.to(torch.int32).to(self.device)
        order = order[0].transpose(0, 1) if c.q_lengths else order
        return order if heads > 1 else order.squeeze(1)

    def bias(self, name: str, sizes: list[int], rows: int, packed: bool) -> torch.Tensor:
        """`[B, H, rows]`, or `[T, H]` of packed rows, some of them in no sequence; growing, as decay biases do."""
        spare = 3 if packed and name == "k_bias" else 0  # rows in no sequence
        x = 2 * self.normal(*sizes, rows + spare) + torch.arange(rows + spare, device="cpu") * 0.05
        x[..., 5::11] = -torch.inf
        return (x.mT if packed else x).to(self.device)

    def sinks(self) -> torch.Tensor:
        sinks = 2 * self.normal(self.case.H)
        if self.case.sinks == "none":
            sinks.fill_(-torch.inf)
        elif self.case.sinks == "mixed":
            sinks[0::3], sinks[1::3] = -torch.inf, torch.inf
        return sinks

    def tile_map(self, options: dict[str, Any]) -> TileMap:
        c = self.case
        assert c.tile is not None
        if c.mask:
            return TileMap.from_mask(options["mask"], c.tile)
        spec: dict[str, Any] = {
            name: options[name] for name in ("causal", "window", "chunk", "q_offset", *PLACES) if name in options
        }
        if c.lengths:
            spec["kv_lengths"] = self.ints(c.lengths)
        return TileMap.from_spec(c.queries, c.keys, c.tile, device=self.device, **spec)

    def tree(self, batch: int) -> torch.Tensor:
        """A tree mask: each query's parent is a random earlier one; some are detached, and see no node."""
        n = self.case.queries
        visible = torch.eye(n, dtype=torch.bool, device="cpu").repeat(batch, 1, 1)
        for b in range(batch):
            for i in range(1, n):
                parent = int(torch.randint(i, (1,), generator=self.random))
                visible[b, i] |= visible[b, parent]
        visible[:, 3::7] = False
        return visible

    def positions(self, tree: torch.Tensor, batch: int) -> torch.Tensor:
        """The positions of nodes: their depths, after the keys before the tree; shared if all have as many."""
        c = self.case
        keys, rows = c.lengths or (c.keys,) * batch, c.q_lengths or (c.Lq,) * batch
        before = torch.tensor([k - n for k, n in zip(keys, rows, strict=True)], device="cpu")[:, None]
        before = before if c.tree == "b" or c.lengths else before[:1]
        return (before + (tree.sum(-1) - 1).clamp_min(0)).to(torch.int32).to(self.device)

    def mask(self, batch: int) -> torch.Tensor:
        c = self.case
        sizes = {"b": batch, "h": c.H, "q": c.queries, "k": c.keys, "1": 1}
        full = [sizes[dim] for dim in c.mask]
        visible = torch.rand(full, generator=self.random, dtype=torch.float32, device="cpu") < 0.6
        rows, keys = full[-2:]
        i, j = torch.arange(rows, device="cpu")[:, None], torch.arange(keys, device="cpu")[None, :]
        if c.pattern == "blocks":
            visible = ((i // 24 + j // 40) % 3 == 0).expand(full).clone()
        elif c.pattern == "tree":  # each query sees all keys before the tree, itself and its ancestors
            visible = (
                ((j < keys - rows) | (i - (j - keys + rows) == 0) | ((i // 2) == (j - keys + rows)))
                .expand(full)
                .clone()
            )
        elif c.pattern in ("rows", "least"):
            visible[..., ::3, :] = False
        elif c.pattern == "near":
            visible[:] = True
        if c.mask_kind == "bool":
            return (permuted(visible) if c.strides == "permuted" else visible).to(self.device)
        dtype = FLOATS[c.mask_kind]
        bias = self.normal(*full)
        if c.pattern == "blocks":
            bias = torch.zeros_like(bias)  # full tiles are exactly 0
        elif c.pattern == "near":
            bias = bias.sign() * 2e-3
        hidden = torch.finfo(dtype).min if c.pattern == "least" else -torch.inf
        bias = torch.where(visible, bias, hidden).to(dtype)
        return (permuted(bias) if c.strides == "permuted" else bias).to(self.device)
