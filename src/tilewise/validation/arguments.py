"""Checks of single arguments: rank, shape, dtype and device, and views of them in the common form.

`calls.py` puts them together for each entry point.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..core.arrays import to_tensor, to_write
from ..core.options import LIMIT, is_int, to_int
from ..core.problem import MAX_HEAD_DIM, MaskSpec
from ..core.storage import FLOATS as FORMAT_DTYPES
from ..core.storage import PLAIN, StorageFormat, wide_dtype
from ..core.tensors import INPUTS, Tensors
from ..errors import InvalidArgument
from ..quantised import Quantised
from .memory import overlap, overlaps_itself
from .values import as_int32

FLOATS = tuple(FORMAT_DTYPES.values())


def cast_to_float32(name: str, x: Any) -> str:
    """The remedy for float64, NumPy's default dtype; empty for any other."""
    if str(getattr(x, "dtype", "")).rpartition(".")[2] != "float64":
        return ""
    return f"{name}.float()" if isinstance(x, torch.Tensor) else f"{name}.astype(np.float32)"


@dataclass(slots=True)
class Operand:
    """K or V as `[B, Hkv, L, columns]`, or pages of it."""

    data: torch.Tensor
    scales: torch.Tensor | None
    format: StorageFormat
    width: int  # D or Dv


class Checker:
    """Checks the arguments of one call against its `q`. Collects the copies that had to be made."""

    def __init__(self, q: Any, layout: Any, packed: bool) -> None:
        self.copies: list[str] = []
        self.packed = packed
        if not isinstance(layout, str) or layout not in ("bhld", "blhd"):
            raise InvalidArgument("layout", repr(layout), "'bhld' or 'blhd'")
        self.seq_major = layout == "blhd"
        if packed and self.seq_major:
            raise InvalidArgument("layout", "'blhd' with packed queries", "no layout: packed tensors are [T, H, D]")
        given, q = q, to_tensor("q", q)
        self.device = q.device
        self.q = self.unit_stride("q", self.common(self.plain("q", q, self.form_of_q())))
        # An array in float64, NumPy's default, is more likely an oversight than a wish for slow float64.
        self.floats = tuple(PLAIN) if isinstance(given, torch.Tensor) and q.dtype == torch.float64 else FLOATS
        if self.q.dtype not in self.floats:
            raise InvalidArgument("q", q.dtype, "float32, float16 or bfloat16", cast_to_float32("q", given))
        self.wide = wide_dtype(self.q.dtype)
        self.head_width("q", self.q.shape[-1])
        if self.q.shape[1] == 0:
            raise InvalidArgument("q", "0 heads", "1 or more")

    def form_of_q(self) -> str:
        return "[T, H, D]" if self.packed else "[B, L, H, D]" if self.seq_major else "[B, H, L, D]"

    def plain(self, name: str, x: Any, form: str) -> torch.Tensor:
        """`x` as a tensor; checks that it has the rank of `form`, is on q's device and does not require grad."""
        x = to_tensor(name, x)
        rank = form.count(",") + 1
        if x.ndim != rank:
            raise InvalidArgument(name, f"shape {tuple(x.shape)}", f"rank {rank}: {form}")
        if x.device != self.device:
            raise InvalidArgument(name, f"device {x.device}", f"{self.device}, as q")
        if x.requires_grad and torch.is_grad_enabled():
            remedy = "paged keys, and arrays other than torch tensors, have no gradients: torch.no_grad(), or detach"
            raise InvalidArgument(name, "a tensor that requires grad", "one that does not", remedy)
        return x

    def common(self, x: torch.Tensor, form: str = "") -> torch.Tensor:
        """A view of `x`, given in `form` (default: that of q), as `[B, H, L, ...]`; packed `[1, H, T, ...]`, pages
        `[P, H, page_size, ...]`.
        """
        form = form or self.form_of_q()
        if form.startswith("[T,"):
            return x.transpose(0, 1)[None]
        return x if form.startswith("[B, H") else x.transpose(1, 2)

    def unit_stride(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if x.stride(-1) == 1 or x.shape[-1] == 1:
            return x
        self.copies.append(f"{name}: its last dim has stride {x.stride(-1)}, not 1")
        return x.contiguous()

    def head_width(self, name: str, width: int) -> None:
        if not 1 <= width <= MAX_HEAD_DIM:
            raise InvalidArgument(name, f"a last dim of {width}", f"1 to {MAX_HEAD_DIM}")

    def operand(self, name: str, x: Any, form: str) -> Operand:
        """Checks K or V (or their pages), plain or quantised, given in `form`."""
        if isinstance(x, Quantised):
            data = self.plain(f"{name}.data", x.data, form)
            scales = None
            if x.scales is not None:
                scales = self.common(self.plain(f"{name}.scales", x.scales, form), form)
                scales = self.unit_stride(f"{name}.scales", scales)
            stored, width = x.format, x.shape[-1]
        else:
            data, scales = self.plain(name, x, form), None
            width = data.shape[-1]
            if data.dtype not in self.floats:
                remedy = cast_to_float32(name, x) or "wrap narrower types in tilewise.Quantised, with their scales"
                raise InvalidArgument(name, data.dtype, "float32, float16 or bfloat16", remedy)
            if data.dtype.itemsize > self.q.dtype.itemsize:
                remedy = f"convert {name} to {self.q.dtype}, or q to {data.dtype}"
                raise InvalidArgument(name, data.dtype, f"no wider than q's {self.q.dtype}", remedy)
            stored = PLAIN[data.dtype]
        self.head_width(name, width)
        return Operand(self.unit_stride(name, self.common(data, form)), scales, stored, width)

    def ints(self, name: str, x: Any, shape: tuple[int | None, ...]) -> torch.Tensor:
        """A tensor of lengths, offsets or pages, int32 or int64; None in `shape` is any size."""
        x = to_tensor(name, x)
        if x.dtype not in (torch.int32, torch.int64):
            raise InvalidArgument(name, x.dtype, "int32 (or int64)")
        words = "[" + ", ".join("n" if n is None else str(n) for n in shape) + "]"
        if x.ndim != len(shape) or any(n not in (None, given) for n, given in zip(shape, x.shape, strict=True)):
            raise InvalidArgument(name, f"shape {tuple(x.shape)}", words)
        if x.device != self.device:
            raise InvalidArgument(name, f"device {x.device}", f"{self.device}, as q")
        return x

    def place(self, name: str, x: Any, batch: int) -> torch.Tensor | int:
        """`k_start` or a stride: an int, or int32 or int64 `[B]`."""
        x = to_int(x)
        if is_int(x):
            return int(x)
        if x is None or isinstance(x, (bool, float, str)):
            raise InvalidArgument(name, repr(x), "an int or an int tensor [B]")
        return self.ints(name, x, (batch,))

    def per_head(self, name: str, x: Any, heads: int, batch: int | None = None) -> torch.Tensor:
        """Float32 `[H]` or, with `batch`, `[B, H]`: one number for each head (and row)."""
        x = to_tensor(name, x)
        shapes = [(heads,)] if batch is None else [(heads,), (batch, heads)]
        if tuple(x.shape) not in shapes:
            raise InvalidArgument(name, f"shape {tuple(x.shape)}", " or ".join(map(str, shapes)))
        if x.dtype not in self.floats:
            raise InvalidArgument(name, x.dtype, "float32")
        x = self.plain(name, x, "[" + ", ".join("n" * x.ndim) + "]").to(self.wide)
        x = x if x.stride(-1) == 1 else x.contiguous()
        return x if batch is None else x.expand(batch, heads)

    def tree(self, x: Any, batch: int, rows: int) -> torch.Tensor:
        """A tree mask as `[B, Lq, Lq]`, with stride 0 where sequences share it."""
        x, want = self.plain("tree_mask", x, "[B, Lq, Lq]"), f"[{batch} or 1, {rows}, {rows}]: (B, Lq, Lq)"
        if x.dtype != torch.bool:
            raise InvalidArgument("tree_mask", x.dtype, "bool (True = attend)")
        if x.shape[0] not in (1, batch) or tuple(x.shape[1:]) != (rows, rows):
            remedy = "a mask over all keys is mask="
            raise InvalidArgument("tree_mask", f"shape {tuple(x.shape)}", want, remedy)
        return self.unit_stride("tree_mask", x).expand(batch, rows, rows)

    def bias(self, name: str, x: Any, sizes: tuple[int, int, int], packed: bool, any_keys: bool) -> torch.Tensor:
        """A bias as float32 `[B, H, L]`, stride 0 where it is broadcast. That of packed rows is given as `[T, H]` and
        becomes `[1, H, T]`.

        With `any_keys` the last size is an upper bound, as for a mask.
        """
        x = to_tensor(name, x)
        batch, heads, rows = sizes
        want = f"[{rows}, {heads} or 1]" if packed else f"[{batch} or 1, {heads} or 1, {'up to ' * any_keys}{rows}]"
        if x.dtype not in self.floats:
            raise InvalidArgument(name, x.dtype, f"float32 {want}")
        x = self.plain(name, x, "[T, H]" if packed else "[B, H, L]").to(self.wide)
        x = x.transpose(0, 1)[None] if packed else x
        given, length = tuple(x.shape), x.shape[2]
        if (given[0] not in (1, batch) or given[1] not in (1, heads)
            or (length > rows if any_keys else length != rows)):  # fmt: skip
            raise InvalidArgument(name, f"shape {given[:0:-1] if packed else given}", want)
        return x.expand(1 if packed else batch, heads, length)

    def sinks(self, x: Any, heads: int) -> torch.Tensor:
        """Float32 `[H]`. A number is refused: elsewhere `sinks` counts first tokens, which are a mask here."""
        if isinstance(x, (int, float)):
            want = f"a float tensor ({heads},), a learned logit for each head"
            remedy = "for first tokens that every query sees, a mask (docs/masks.md, Sparse patterns)"
            raise InvalidArgument("sinks", repr(x), want, remedy)
        return self.per_head("sinks", x, heads)

    def captured(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """A tensor that a function of the user reads: of any rank, strides and dtype that `NAMES` has."""
        what = f"score_mod or mask_mod, captured tensor {number} {tuple(x.shape)}"
        if self.device.type == "meta":  # of a call without memory only shapes matter
            x = x.to("meta")
        if x.device != self.device:
            raise InvalidArgument(what, f"device {x.device}", f"{self.device}, as q")
        if x.requires_grad and torch.is_grad_enabled():
            raise InvalidArgument(
                what, "a tensor that requires grad", "one that does not", "call under torch.no_grad()"
            )
        return x.detach()

    def indices(self, name: str, x: Any, batch: int, heads: int, rows: int) -> tuple[torch.Tensor, bool]:
        """Key or block indices as int32 `[B, Hkv, rows, n]`, stride 0 where heads share them (of packed queries
        `[1, Hkv, T, n]`), and whether each KV head has its own.
        """
        x = to_tensor(name, x)
        if x.dtype not in (torch.int32, torch.int64):
            raise InvalidArgument(name, x.dtype, "int32 (or int64)")
        rank = 2 if self.packed else 3
        outer = (rows,) if self.packed else (batch, rows)
        at = 1  # where the heads' dim is
        sizes = (*x.shape[:at], *x.shape[at + 1 :]) if x.ndim == rank + 1 else tuple(x.shape)
        own = x.shape[at] if x.ndim == rank + 1 else 1
        if x.ndim not in (rank, rank + 1) or sizes[:-1] != outer or own not in (1, heads):
            want = " or ".join(f"({', '.join(map(str, s))}, n)" for s in (outer, (*outer[:at], heads, *outer[at:])))
            raise InvalidArgument(name, f"shape {tuple(x.shape)}", want)
        if x.device != self.device:
            raise InvalidArgument(name, f"device {x.device}", f"{self.device}, as q")
        x = as_int32(x, -2, LIMIT)  # values below -1 stay below it, to be refused
        x = x.unsqueeze(at) if x.ndim == rank else x
        x = x.transpose(0, 1)[None] if self.packed else x
        return x.expand(-1, heads, -1, -1), own > 1

    def mask(self, x: Any, sizes: tuple[int, int, int, int], any_keys: bool) -> tuple[torch.Tensor, MaskSpec]:
        """A mask as `[B, H, Lq, Lk]` with stride 0 where it is broadcast.

        With `any_keys` the last size is an upper bound: a paged mask may stop at the longest context.
        """
        if callable(x) or type(x).__name__ == "BlockMask":
            remedy = "mask_mod= takes a function of b, h, q_idx, kv_idx; score_mod= one of score and these"
            if kind := type(x).__name__ == "BlockMask":
                remedy = "mask_mod=block_mask.mask_mod, and q_offset=0 where q_idx counts from the first query"
            raise InvalidArgument("mask", "a BlockMask" if kind else "a function", "a tensor", remedy)
        x = to_tensor("mask", x)
        if x.dtype != torch.bool and x.dtype not in self.floats:
            raise InvalidArgument("mask", x.dtype, "bool (True = attend) or float32, float16, bfloat16 (added)")
        if x.ndim not in (2, 3, 4):
            raise InvalidArgument(
                "mask", f"shape {tuple(x.shape)}", "rank 2 [Lq, Lk], 3 [H, Lq, Lk] or 4 [B, H, Lq, Lk]"
            )
        given = tuple(x.shape)
        x = self.plain("mask", x, "[" + ", ".join("n" * x.ndim) + "]")
        x = x[(None,) * (4 - x.ndim)]
        most = sizes[3]
        if any_keys and x.shape[3] != 1 and x.shape[3] <= most:
            sizes = (*sizes[:3], x.shape[3])
        if any(n not in (1, size) for n, size in zip(x.shape, sizes, strict=True)):
            last = f"up to {most}" if any_keys else f"{most}"
            want = f"one that broadcasts to ({sizes[0]}, {sizes[1]}, {sizes[2]}, {last})"
            by_row = {
                2: "for a padding mask [batch, keys] pass mask[:, None, None]",
                3: "for a mask [batch, queries, keys] pass mask[:, None]",
            }
            remedy = by_row.get(len(given), "") if given[0] == sizes[0] else ""
            raise InvalidArgument("mask", f"shape {given}", want, remedy)
        x = self.unit_stride("mask", x)
        broadcast = tuple(n == 1 and size != 1 for n, size in zip(x.shape, sizes, strict=True))
        return x.expand(sizes), MaskSpec(x.dtype, broadcast)  # type: ignore[arg-type]

    def output(self, out: Any, width: int, t: Tensors) -> torch.Tensor:
        """The tensor to write, in the caller's layout: `out`, checked against all inputs in `t`, or a new one."""
        B, H, L, _ = self.q.shape
        shape = (L, H, width) if self.packed else (B, L, H, width) if self.seq_major else (B, H, L, width)
        if out is None:
            return self.q.new_empty(shape)
        out = to_write("out", out)
        if tuple(out.shape) != shape or out.dtype != self.q.dtype or out.device != self.device:
            given = f"{tuple(out.shape)} {out.dtype} on {out.device}"
            raise InvalidArgument("out", given, f"{shape} {self.q.dtype} on {self.device}")
        if out.requires_grad and torch.is_grad_enabled():
            raise InvalidArgument("out", "a tensor that requires grad", "one that does not", "detach it")
        if overlaps_itself(out):
            given = f"a broadcast tensor, or one whose elements share memory (strides {out.stride()})"
            raise InvalidArgument("out", given, "a tensor whose elements do not share memory")
        if out.stride(-1) != 1 and width > 1:
            raise InvalidArgument("out", f"a last dim of stride {out.stride(-1)}", "stride 1")
        inputs = {name: getattr(t, name) for name in INPUTS} | {
            f"captured tensor {n}": x for n, x in enumerate(t.captured)
        }
        for name, x in inputs.items():
            if x is not None and overlap(out, x):
                raise InvalidArgument("out", f"memory that it shares with {name}", "memory of its own")
        return out
