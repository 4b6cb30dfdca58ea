"""The tensors of a case.

Inputs are peaked (logits of standard deviation 3), or a kernel that averages `v` would pass. Whatever must not matter
holds NaN: keys past a length, keys in no list of indices, the slack of pages, unused pages, rows past the last
sequence. Block table entries past a length name an unused page.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch

from ..core.storage import FLOATS, parse
from ..quantised import Quantised

if TYPE_CHECKING:
    from .case import Case, Shape

PEAK = 3.0


class Tensors:
    """Each is drawn in float32 on the CPU, so that every device and dtype sees the same numbers."""

    def __init__(self, case: Case, device: str, slack: float, draw: int) -> None:
        self.case, self.device, self.slack = case, device, slack
        self.chosen: torch.Tensor | None = None  # bool [B, Hkv, keys or more]
        self.random = torch.Generator("cpu").manual_seed(zlib.crc32(str(case).encode()) + draw)

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
        """`x` in its dtype on its device, filled where `slack` is True, bool of `x`'s shape without its last dim."""
        kind = {"q": "", "k": self.case.k, "v": self.case.v}[name] or self.case.dtype
        if kind in FLOATS:
            x = x.to(FLOATS[kind])
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
            x = permuted(x)
        return x.expand(c.B, -1, -1, -1) if c.strides == "shared" else x

    def packed(self, lengths: Shape, name: str) -> Any:
        """All sequences in one `[T, heads, width]`; k and v have three more rows, in no sequence."""
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
        """Shuffled pages; entries past a row's length name an unused page full of slack.

        A kernel that reads it gives a wrong result; with an entry out of range it could crash the process.
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

    def ints(self, numbers: Any) -> torch.Tensor:
        return torch.tensor(list(numbers), dtype=torch.int32, device=self.device)

    def offsets(self, lengths: Shape) -> torch.Tensor:
        ends = torch.tensor([0, *lengths], device="cpu").cumsum(0)
        return ends.to(torch.int32).to(self.device)


def permuted(x: torch.Tensor) -> torch.Tensor:
    """The same numbers with the outer dims in another order in memory; the last dim keeps its unit stride."""
    order = [*range(x.ndim - 1)][::-1]
    back = [*order, x.ndim - 1]  # a reversal is its own inverse
    return x.permute(back).contiguous().permute(back)


def first_columns(x: Any, width: int) -> Any:
    """A view of the first elements of each row."""
    if not isinstance(x, Quantised):
        return x[..., :width]
    fmt = x.format
    scales = None if x.scales is None else x.scales[..., : fmt.scales(width)]
    return Quantised(x.data[..., : fmt.columns(width)], scales, x.dtype, x.group)
