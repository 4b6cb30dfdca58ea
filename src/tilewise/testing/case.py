"""One conformance case: sizes and options as one value, and the call that it describes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from .. import api
from ..core.options import Options
from ..validation import calls
from ..validation.calls import Call
from .inputs import Maker

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """Sizes and options of a call. Defaults are the plainest call; `str(case)` names what differs from them."""

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
    shared: int = 0  # the last columns of k are `k_shared`
    latent: bool = False  # v is a view of the first Dv columns of k
    form: str = "dense"
    causal: bool = False
    window: Any = None
    chunk: int | None = None
    softcap: float | None = None
    scale: float | None = None
    alibi: str = ""  # "h" or "bh"
    q_bias: str = ""  # its dims without the last, each full or 1: "bh", "1h", "b1", "11"; packed: "h" or "1"
    k_bias: str = ""
    sinks: bool | str = False  # or "none" (all -inf), or "mixed" (-inf, +inf and numbers)
    offset: Any = None  # an int, or "rows" for a tensor
    k_start: Any = 0  # likewise
    k_stride: Any = 1
    q_stride: Any = 1
    lengths: Shape = ()  # kv_lengths or, for pages, context_lens; for varlen the keys of each sequence
    q_lengths: Shape = ()  # packed queries of these lengths
    used: Shape = ()  # varlen: kv_lengths, in addition to cu_seqlens_k
    page: int = 16
    indices: str = ""  # key indices of each query: "12", or "h12" for each KV head separately
    block: int = 0  # block indices instead, with this block size
    mask: str = ""  # its dims, each full or 1: "qk", "1qk", "hqk", "bhqk", "b11k", ...
    mask_kind: str = "bool"  # or "f32", "f16", "bf16": added
    pattern: str = (
        # random, blocks, rows (some see nothing), least (some hold only the least finite number), tree, near (0, but
        # not 0)
        "random"
    )
    dropout: float = 0.0
    tree: str = ""  # "b" or "1": a tree mask of each sequence, or of all
    positions: bool = False  # of the tree's nodes: their depths
    tile: tuple[int, int] | None = None  # pass a tile map with these tiles
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
        """The checked call, for the oracle."""
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
    """The inputs of a case: the same for the same case and draw, with `slack` in every place that must not matter.

    With `sized`, packed queries and keys have `max_q` and `max_k`, which a GPU's plan depends on.
    """
    return Inputs(*Maker(case, device, slack, draw, sized).call())
