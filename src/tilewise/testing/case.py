"""One conformance case: sizes and options in a line, and the call that they stand for.

Inputs are peaked (logits of standard deviation 3), or a kernel that averages `v` would pass. Whatever must not matter
holds NaN: keys past a length, keys that nobody chooses, the slack of pages, pages of nobody, rows past the last
sequence. Table entries past a length name a page of nobody.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from .. import api
from ..alibi import alibi_slopes
from ..core.options import PLACES, Options
from ..core.storage import FLOATS, parse
from ..core.tile_map import TileMap
from ..quantised import Quantised
from ..validation import calls
from ..validation.calls import Call

DTYPES = FLOATS
PEAK = 3.0
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """Defaults are the plainest call; `str(case)` names what differs."""

    B: int = 2
    H: int = 4
    Hkv: int = 0  # 0: as H
    Lq: int = 33
    Lk: int = 0  # 0: as Lq
    D: int = 32
    Dv: int = 0  # 0: as D
    dtype: str = "f32"
    k: str = ""  # "": as q; a float dtype, or a quantised one with its group, "int8/64"
    v: str = ""
    latent: bool = False  # v is the first Dv columns of k, in the same memory
    form: str = "dense"
    causal: bool = False
    window: Any = None
    chunk: int | None = None
    softcap: float | None = None
    scale: float | None = None
    alibi: str = ""  # "h" or "bh"
    q_bias: str = ""  # its dims but the last, each full or 1: "bh", "1h", "b1", "11"; of packed rows "h" or "1"
    k_bias: str = ""
    sinks: bool | str = False  # or "none" (each -inf), or "mixed" (of -inf, +inf and numbers)
    offset: Any = None  # an int, or "rows" for a tensor
    k_start: Any = 0  # likewise
    k_stride: Any = 1
    q_stride: Any = 1
    lengths: Shape = ()  # kv_lengths or, for pages, context_lens; for varlen the keys of each sequence
    q_lengths: Shape = ()  # packed queries of these lengths
    used: Shape = ()  # varlen: kv_lengths beside cu_seqlens_k
    page: int = 16
    indices: str = ""  # how many keys each query chooses: "12", or "h12" for each KV head apart
    block: int = 0  # they are blocks of so many keys, for as many queries
    mask: str = ""  # its dims, each full or 1: "qk", "1qk", "hqk", "bhqk", "b11k", ...
    mask_kind: str = "bool"  # or "f32", "f16", "bf16": added
    pattern: str = (
        # random, blocks, rows (some see nothing), least (some hold only the least finite number), tree, near (0, but
        # not 0)
        "random"
    )
    tree: str = ""  # "b" or "1": a tree mask of each sequence, or of all
    tile: tuple[int, int] | None = None  # hand in a tile map of these tiles
    layout: str = "bhld"
    strides: str = ""  # sliced, last (a last dim of stride 2), shared (k and v broadcast over the batch), permuted
    split_size: int | None = None
    note: str = ""

    def __str__(self) -> str:
        words = [self.form] * (self.form != "dense")
        words += [f"B{self.B}", f"H{self.H}"] + [f"Hkv{self.Hkv}"] * bool(self.Hkv)
        words += [f"L{self.Lq}"] + [f"Lk{self.Lk}"] * bool(self.Lk) + [f"D{self.D}"] + [f"Dv{self.Dv}"] * bool(self.Dv)
        shown = {"B", "H", "Hkv", "Lq", "Lk", "D", "Dv", "form"}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name not in shown and value != f.default:
                text = str(value).replace(" ", "").replace("/", "g")
                words.append(text if f.name in ("dtype", "note") else f.name if value is True else f"{f.name}{text}")
        return "-".join(words)

    @property
    def kv_heads(self) -> int:
        return self.Hkv or self.H

    @property
    def keys(self) -> int:
        return max(self.lengths, default=0) if self.form != "dense" else self.Lk or self.Lq

    @property
    def queries(self) -> int:
        return max(self.q_lengths) if self.q_lengths else self.Lq


@dataclass
class Inputs:
    """The arguments of a case, by name."""

    entry: Callable[..., Any]
    args: Any
    options: dict[str, Any]

    def call(self, backend: str | None, **changes: Any) -> Any:
        return self.entry(*self.args, backend=backend, **(self.options | changes))

    def checked(self, **changes: Any) -> Call:
        """The call in the common form, for the oracle."""
        options = self.options | changes
        check: Callable[..., Call] = calls.dense
        if self.entry is api.varlen_attention:
            check = calls.varlen
        elif self.entry is api.paged_attention:
            check = calls.paged
        return check(*self.args, Options(**options))

    def common_state(self, state: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """`out` and `lse` in the caller's layout as `[B, H, Lq, ...]`, or `[1, H, T, ...]` if they are packed."""
        out, lse = state
        if lse.ndim == 2:
            return out.transpose(0, 1)[None], lse.transpose(0, 1)[None]
        return (out.transpose(1, 2), lse.transpose(1, 2)) if self.options.get("layout") == "blhd" else (out, lse)

    def common(self, rows: torch.Tensor) -> torch.Tensor:
        """An `lse` in the caller's layout as `[B, H, Lq]`, or `[1, H, T]` if it is packed."""
        if rows.ndim == 2:
            return rows.transpose(0, 1)[None]
        return rows.transpose(1, 2) if self.options.get("layout") == "blhd" else rows


def make(case: Case, device: str = "cpu", slack: float = float("nan"), draw: int = 0, *, sized: bool = False) -> Inputs:
    """The inputs of a case: the same for the same case and draw, `slack` in every place that must not matter.

    With `sized`, packed queries and keys come with `max_q` and `max_k`, which a GPU's plan depends on.
    """
    return _Maker(case, device, slack, draw, sized).inputs()


def _first_columns(x: Any, width: int) -> Any:
    """A view of the first elements of each row."""
    if not isinstance(x, Quantised):
        return x[..., :width]
    fmt = x.format
    scales = None if x.scales is None else x.scales[..., : fmt.scales(width)]
    return Quantised(x.data[..., : fmt.columns(width)], scales, x.dtype, x.group)


class _Maker:
    def __init__(self, case: Case, device: str, slack: float, draw: int, sized: bool) -> None:
        self.case, self.device, self.slack = case, device, slack
        self.sized = sized or bool(case.mask)  # a mask's size cannot be read from offsets on a GPU
        self.chosen: torch.Tensor | None = None  # bool [B, Hkv, keys or more]
        self.random = torch.Generator("cpu").manual_seed(zlib.crc32(str(case).encode()) + draw)

    def inputs(self) -> Inputs:
        c = self.case
        options = self.options()
        if c.form == "varlen":
            q, k = self.packed(c.q_lengths, "q"), self.packed(c.lengths, "k")
            v = _first_columns(k, c.Dv) if c.latent else self.packed(c.lengths, "v")
            args = (q, k, v, self.offsets(c.q_lengths), self.offsets(c.lengths))
            if c.used:
                options["kv_lengths"] = self.ints(c.used)
            if self.sized:
                options |= {"max_q": c.queries, "max_k": c.keys}
            return Inputs(api.varlen_attention, args, options)
        if c.form == "paged":
            table = self.block_table()
            k = self.pages("k", table)
            v = _first_columns(k, c.Dv) if c.latent else self.pages("v", table)
            if c.q_lengths:
                options["cu_seqlens_q"] = self.offsets(c.q_lengths)
                if self.sized:
                    options["max_q"] = c.queries
            else:
                options["layout"] = c.layout
            q = self.packed(c.q_lengths, "q") if c.q_lengths else self.dense("q")
            return Inputs(api.paged_attention, (q, k, v, table.to(self.device), self.ints(c.lengths)), options)
        options["layout"] = c.layout
        if c.lengths:
            options["kv_lengths"] = self.ints(c.lengths)
        q, k = self.dense("q"), self.dense("k")
        return Inputs(api.attention, (q, k, _first_columns(k, c.Dv) if c.latent else self.dense("v")), options)

    def options(self) -> dict[str, Any]:
        c = self.case
        names = ("causal", "window", "chunk", "softcap", "scale", "split_size")
        options: dict[str, Any] = {name: getattr(c, name) for name in names if getattr(c, name) not in (None, False)}
        batch = len(c.lengths) if c.form != "dense" else c.B
        if c.offset is not None:
            rows = [0, 3, 17, -2, 40]
            options["q_offset"] = self.ints([rows[b % 5] for b in range(batch)]) if c.offset == "rows" else c.offset
        for name, own in (("k_start", [3, -5, 0]), ("k_stride", [2, 1, 5]), ("q_stride", [3, 1, 2])):
            if (value := getattr(c, name)) != Case.__dataclass_fields__[name].default:
                options[name] = self.ints([own[b % 3] for b in range(batch)]) if value == "rows" else value
        if c.alibi:
            slopes = alibi_slopes(c.H, self.device)
            steps = torch.arange(1, batch + 1, device=self.device)[:, None]
            options["alibi_slopes"] = slopes * steps if c.alibi == "bh" else slopes
        lengths = {"q_bias": c.q_lengths or (c.Lq,), "k_bias": c.lengths if c.form == "varlen" else (c.keys,)}
        packed = {"q_bias": bool(c.q_lengths), "k_bias": c.form == "varlen"}
        for name, each in lengths.items():
            if dims := getattr(c, name):
                sizes = [{"b": batch, "h": c.H, "1": 1}[dim] for dim in dims]
                options[name] = self.bias(name, sizes, sum(each), packed[name])
        if c.sinks:
            options["sinks"] = self.sinks().to(self.device)
        if c.mask:
            options["mask"] = self.mask(batch)
        if c.tree:
            options["tree_mask"] = self.tree(batch if c.tree == "b" else 1)
        if c.tile:
            options["tile_map"] = self.tile_map(options)
        if c.indices:
            options["block_indices" if c.block else "key_indices"] = self.indices(batch)
            if c.block:
                options["block_size"] = c.block
        return options

    def indices(self, batch: int) -> torch.Tensor:
        """Drawn without order; some are -1, and some rows choose nothing. Keeps which keys anybody chooses."""
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
        """`[B, H, rows]`, or `[T, H]` of packed rows, some of which nobody sees; growing as decays do."""
        spare = 3 if packed and name == "k_bias" else 0  # rows of nobody
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

    # Tensors. Each is drawn in float32 on the CPU, so that every device and dtype sees the same numbers.

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random, dtype=torch.float32, device="cpu")

    def values(self, name: str, *shape: int) -> torch.Tensor:
        c = self.case
        x = self.normal(*shape)
        if name == "q":
            scale = c.D**-0.5 if c.scale is None else abs(c.scale)
            x *= PEAK / (scale * c.D**0.5)
        return x

    def stored(self, name: str, x: torch.Tensor, slack: torch.Tensor | None) -> Any:
        """`x` in its dtype on its device, with rows of `slack` (bool, `x`'s shape without its last dim) spoilt."""
        kind = {"q": "", "k": self.case.k, "v": self.case.v}[name] or self.case.dtype
        if kind in DTYPES:
            x = x.to(DTYPES[kind])
            if slack is not None:
                x[slack] = self.slack
            return x.to(self.device)
        fmt = parse(kind)
        packed = Quantised.from_float(x, fmt.name, fmt.group)  # type: ignore[arg-type]
        data, scales = packed.data, packed.scales
        if slack is not None and scales is not None:
            scales[slack] = self.slack
        elif slack is not None:
            data[slack] = fmt.quantise(torch.full(x.shape[-1:], self.slack, device="cpu"))[0]
        scales = None if scales is None else scales.to(self.device)
        return Quantised(data.to(self.device), scales, packed.dtype, packed.group)

    def width(self, name: str) -> int:
        return self.case.Dv or self.case.D if name == "v" else self.case.D

    def dense(self, name: str) -> Any:
        c = self.case
        heads, rows = (c.H, c.Lq) if name == "q" else (c.kv_heads, c.Lk or c.Lq)
        batch = 1 if c.strides == "shared" and name != "q" else c.B
        x = self.values(name, batch, heads, rows, self.width(name))
        slack = None
        if name != "q" and c.lengths and c.form == "dense":
            used = torch.tensor(c.lengths, device="cpu")[:, None, None]
            slack = (torch.arange(rows, device="cpu") >= used).expand(batch, heads, rows)
        if name != "q" and self.chosen is not None:
            unused = ~self.chosen[..., :rows].any(0, keepdim=True) if batch == 1 else ~self.chosen[..., :rows]
            slack = unused if slack is None else slack | unused
        x = self.stored(name, x, slack)
        if isinstance(x, Quantised):
            return x
        if c.layout == "blhd":
            x = x.transpose(1, 2).contiguous()
        if c.strides == "sliced":  # every stride odd, NaN on all sides
            wide = x.new_full([n + 3 for n in x.shape[:-1]] + [x.shape[-1] + 5], self.slack)
            wide[1:-2, 2:-1, 1:-2, 2:-3] = x
            x = wide[1:-2, 2:-1, 1:-2, 2:-3]
        elif c.strides == "last":
            x = torch.stack([x, torch.full_like(x, self.slack)], -1).flatten(-2)[..., ::2]
        elif c.strides == "permuted":
            x = _permuted(x)
        return x.expand(c.B, -1, -1, -1) if c.strides == "shared" else x

    def packed(self, lengths: Shape, name: str) -> Any:
        """All sequences in one `[T, heads, width]`; k and v have three rows more, which belong to nobody."""
        c = self.case
        heads, spare = (c.H, 0) if name == "q" else (c.kv_heads, 3)
        x = self.values(name, sum(lengths) + spare, heads, self.width(name))
        slack = torch.arange(len(x), device="cpu") >= sum(lengths)
        if c.used and name != "q":
            start = 0
            for length, used in zip(lengths, c.used, strict=True):
                slack[start + used : start + length] = True
                start += length
        slack = slack[:, None].repeat(1, heads)
        if self.chosen is not None and name != "q":
            start = 0
            for b, length in enumerate(lengths):
                slack[start : start + length] |= ~self.chosen[b, :, :length].T
                start += length
        return self.stored(name, x, slack)

    def block_table(self) -> torch.Tensor:
        """Shuffled pages; entries past a row's length name one that is nobody's, with slack in it.

        A kernel that reads them then gives a wrong result; one that reads a page far away may end the process.
        """
        c = self.case
        counts = [-(-n // c.page) for n in c.lengths]
        order = torch.randperm(sum(counts) + 2, generator=self.random, device="cpu").tolist()
        table = torch.full((len(counts), max(counts) + 1), order.pop(), dtype=torch.int32, device="cpu")
        for b, count in enumerate(counts):
            table[b, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32, device="cpu")
        return table

    def pages(self, name: str, table: torch.Tensor) -> Any:
        c = self.case
        count = sum(-(-n // c.page) for n in c.lengths) + 2
        x = self.values(name, count, c.page, c.kv_heads, self.width(name))
        slack = torch.ones(count, c.page, c.kv_heads, dtype=torch.bool, device="cpu")
        for b, length in enumerate(c.lengths):
            for j in range(length):
                slack[table[b, j // c.page], j % c.page] = False if self.chosen is None else ~self.chosen[b, :, j]
        return self.stored(name, x, slack)

    def tree(self, batch: int) -> torch.Tensor:
        """Queries are nodes whose parents are drawn from those before them; some are detached, and see no node."""
        n = self.case.queries
        seen = torch.eye(n, dtype=torch.bool, device="cpu").repeat(batch, 1, 1)
        for b in range(batch):
            for i in range(1, n):
                parent = int(torch.randint(i, (1,), generator=self.random))
                seen[b, i] |= seen[b, parent]
        seen[:, 3::7] = False
        return seen.to(self.device)

    def mask(self, batch: int) -> torch.Tensor:
        c = self.case
        sizes = {"b": batch, "h": c.H, "q": c.queries, "k": c.keys, "1": 1}
        full = [sizes[dim] for dim in c.mask]
        seen = torch.rand(full, generator=self.random, dtype=torch.float32, device="cpu") < 0.6
        rows, keys = full[-2:]
        i, j = torch.arange(rows, device="cpu")[:, None], torch.arange(keys, device="cpu")[None, :]
        if c.pattern == "blocks":
            seen = ((i // 24 + j // 40) % 3 == 0).expand(full).clone()
        elif c.pattern == "tree":  # each query sees the whole past, itself and its parent's line
            seen = (
                ((j < keys - rows) | (i - (j - keys + rows) == 0) | ((i // 2) == (j - keys + rows)))
                .expand(full)
                .clone()
            )
        elif c.pattern in ("rows", "least"):
            seen[..., ::3, :] = False
        elif c.pattern == "near":
            seen[:] = True
        if c.mask_kind == "bool":
            return (_permuted(seen) if c.strides == "permuted" else seen).to(self.device)
        dtype = DTYPES[c.mask_kind]
        bias = self.normal(*full)
        if c.pattern == "blocks":
            bias = torch.zeros_like(bias)  # full tiles are exactly 0
        elif c.pattern == "near":
            bias = bias.sign() * 2e-3
        hidden = torch.finfo(dtype).min if c.pattern == "least" else -torch.inf
        bias = torch.where(seen, bias, hidden).to(dtype)
        return (_permuted(bias) if c.strides == "permuted" else bias).to(self.device)

    def ints(self, numbers: Any) -> torch.Tensor:
        return torch.tensor(list(numbers), dtype=torch.int32, device=self.device)

    def offsets(self, lengths: Shape) -> torch.Tensor:
        ends = torch.tensor([0, *lengths], device="cpu").cumsum(0)
        return ends.to(torch.int32).to(self.device)


def _permuted(x: torch.Tensor) -> torch.Tensor:
    """The same numbers with the outer dims in another order in memory; the last dim keeps its unit stride."""
    order = [*range(x.ndim - 1)][::-1]
    back = [*order, x.ndim - 1]  # a reversal is its own inverse
    return x.permute(back).contiguous().permute(back)
