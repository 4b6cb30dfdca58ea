"""What a call asks for, without its tensors.

The three entry points are brought into one form before anything else looks at them:

    q, out   [B, H, Lq, D] or, packed, [1, H, T, D] with `cu_seqlens_q`
    k, v     [B, Hkv, Lk, D], packed [1, Hkv, T, D] with `cu_seqlens_k`, or pages [P, Hkv, page_size, D]

All are strided views of what the caller gave. A `Problem` is frozen and hashable: equal problems get the same plan.
With `grads` it is the backward pass of that call.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from .expression.mods import Mods
from .mask_rules import NO_RULES, MaskRules
from .storage import StorageFormat

Form = Literal["dense", "varlen", "paged"]
MAX_HEAD_DIM = 576
# The arguments that may have a gradient, in the order of `Problem.grads`. Captured tensors of a score_mod follow:
# "captured0" and so on, by their numbers.
GRADS = ("q", "k", "v", "mask", "sinks", "alibi_slopes", "q_bias", "k_bias")
CAPTURED = "captured"
# The statistics that have a gradient. `max_logits` has none: it is for limits, not for losses.
SMOOTH_STATISTICS = ("entropy", "key_mass", "weights")


def captured_number(name: str) -> int | None:
    """The number of a captured tensor by its name in `Problem.grads`; None for the other arguments."""
    return int(name.removeprefix(CAPTURED)) if name.startswith(CAPTURED) else None


@dataclass(frozen=True, slots=True)
class MaskSpec:
    """A dense mask: its dtype, and which of its dims [B, H, Lq, Lk] are broadcast."""

    dtype: torch.dtype
    broadcast: tuple[bool, bool, bool, bool]

    @property
    def is_bool(self) -> bool:
        return self.dtype == torch.bool


@dataclass(frozen=True, slots=True)
class Selection:
    """`key_indices` or `block_indices`: the keys or blocks of keys that each query sees. Keys are blocks of 1."""

    count: int  # indices for each query, or for each block of queries
    block: int = 1  # keys in a block, and queries that share a list
    by_head: bool = False  # each KV head has its own

    def __str__(self) -> str:
        """In words.

        >>> print(Selection(2048), Selection(16, 64), sep=" | ")
        2048 key indices | 16 block indices of 64
        """
        return f"{self.count} key indices" if self.block == 1 else f"{self.count} block indices of {self.block}"


def other_formats(problem: Problem | WriteProblem, served: Collection[str]) -> str | None:
    """The refusal of a backend that serves only these formats of K and V, and no float64; None if they suffice."""
    if isinstance(problem, Problem) and problem.q_dtype == torch.float64:
        return "it has no float64"
    stored = (("k", problem.k_format), ("v", problem.v_format))
    other = [f"{name} in {fmt}" for name, fmt in stored if fmt.name not in served]
    return f"it has no {' and no '.join(other)}" if other else None


def no_bias_or_tree(problem: Problem) -> str | None:
    """The refusal of a backend without tree masks, q_bias and k_bias; None if the problem has none of them."""
    if problem.tree:
        return "it has no tree_mask"
    return "it has no q_bias and no k_bias" if problem.biased else None


def no_alibi_by_tree(problem: Problem) -> str | None:
    """The refusal of a backend whose ALiBi uses the numbers of keys, not a tree's positions; None if that is right."""
    return "it has no alibi_slopes by positions of a tree" if problem.positions and problem.alibi else None


def no_mods(problem: Problem) -> str | None:
    """The refusal of a backend without functions of the user; None if the problem has none."""
    return None if problem.mods is None else f"it has no {problem.mods.described} yet"


def no_mods_by_tree(problem: Problem) -> str | None:
    """The refusal of a backend whose functions are given the numbers of keys, not a tree's positions."""
    if problem.mods is None or not problem.positions:
        return None
    return f"it has no {problem.mods.described} by positions of a tree"


def no_dropout(problem: Problem) -> str | None:
    """The refusal of a backend without dropout; None if the problem has none."""
    return "it has no dropout" if problem.dropout_p else None


def no_dropout_by_tree(problem: Problem) -> str | None:
    """The refusal of a backend whose dropout uses the numbers of keys, not a tree's positions."""
    return "it has no dropout by positions of a tree" if problem.positions and problem.dropout_p else None


def no_selection(problem: Problem) -> str | None:
    """The refusal of a backend without key and block indices; None if the problem has none."""
    s = problem.selection
    return None if s is None else f"it has no {'key' if s.block == 1 else 'block'} indices"


FAMILIES = ("prefill", "decode", "pages", "quantised", "indices", "functions", "backward")


def family_of(problem: Problem, decode: bool) -> str:
    """Of `FAMILIES`, the kernels of a call: for backends that have one set of kernels with flags. `decode`: as the
    backend cuts a dense call.
    """
    p = problem
    which = {
        "backward": bool(p.grads),
        "functions": p.mods is not None,
        "indices": p.selection is not None,
        "quantised": p.k_format.is_quantised or p.v_format.is_quantised,
        "pages": p.form == "paged",
        "decode": decode,
    }
    return next((name for name, it_is in which.items() if it_is), "prefill")


@dataclass(frozen=True, slots=True)
class WriteProblem:
    """Storing new rows of K and V in a cache."""

    device: torch.device
    k_format: StorageFormat
    v_format: StorageFormat


@dataclass(frozen=True, slots=True)
class CascadeProblem:
    """Cascade attention over a shared prefix: what its cost per key depends on."""

    device: torch.device
    kv_heads: int
    group: int  # query heads of a KV head
    width: int  # D + Dv
    bytes: int  # of a key and its value, one head
    threads: int


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention call: sizes, dtypes and options. The form of the tensors is above."""

    form: Form
    device: torch.device
    batch: int
    heads: int
    kv_heads: int
    q_len: int  # the longest sequence of queries
    kv_len: int  # the longest sequence of keys; for pages, what the block table can hold
    head_dim: int
    value_dim: int
    q_dtype: torch.dtype
    k_format: StorageFormat
    v_format: StorageFormat
    scale: float
    packed_q: bool = False
    total_q: int = 0  # rows of a packed q
    page_size: int = 0
    rules: MaskRules = NO_RULES
    softcap: float = 0.0
    alibi: bool = False
    q_bias: bool = False
    k_bias: bool = False
    sinks: bool = False
    mods: Mods | None = None  # the functions of the user
    mask: MaskSpec | None = None
    tree: bool = False  # a mask [Lq, Lq] over the last Lq keys of each sequence
    positions: bool = False  # a tensor has the positions of the queries and those keys
    selection: Selection | None = None
    k_shared_dim: int = 0  # the last columns of K, which are in `k_shared`, one head for all
    dropout_p: float = 0.0
    tile_map: tuple[int, int] | None = None  # the map's tile
    split_size: int | None = None
    return_lse: bool = False
    allow_tf32: bool = False
    v_in_k: bool = False  # V is a view of the first columns of K (MLA): one row in memory holds both
    aligned: bool = True  # rows of q, k, v and out begin at multiples of 16 bytes, and none is broadcast
    large_kv: bool = False  # K spans 32 GiB or more: 32 bits do not number its blocks of 16 bytes
    copies: tuple[str, ...] = field(default=())  # arguments that had to be copied, and why
    grads: tuple[str, ...] = ()  # the gradients to compute, of `GRADS`; empty: a forward call
    dlse: bool = False  # backward: there is a gradient by `lse`
    deterministic: bool = True  # backward: the same bits each time

    @property
    def k_dtype(self) -> torch.dtype:
        """The dtype of K's stored numbers."""
        return self.k_format.dtype

    @property
    def v_dtype(self) -> torch.dtype:
        return self.v_format.dtype

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def biased(self) -> bool:
        """Whether q_bias or k_bias is added to scores; -inf in them hides."""
        return self.q_bias or self.k_bias

    @property
    def selected_keys(self) -> int:
        """Keys per query: all, or as many as its indices select."""
        return self.kv_len if self.selection is None else self.selection.count * self.selection.block

    @property
    def sharing_queries(self) -> int:
        """Queries of a sequence that may share a tile: all, or those that share their indices."""
        return self.q_len if self.selection is None else min(self.q_len, self.selection.block)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute: no output element, no query, no key, or no index."""
        rows = self.total_q if self.packed_q else self.q_len
        chosen = 1 if self.selection is None else self.selection.count
        return 0 in (self.batch, rows, self.q_len, self.kv_len, chosen)

    @property
    def has_lengths(self) -> bool:
        """Whether sequences may have fewer keys than `kv_len`."""
        return self.rules.kv_lengths or self.form != "dense"

    def with_joined_keys(self) -> Problem:
        """The problem with `k_shared` joined to K, for a backend that reads keys from one tensor."""
        aligned = self.aligned and self.head_dim * self.k_dtype.itemsize % 16 == 0
        copies = (*self.copies, "k: k_shared beside each head's own columns")
        return replace(self, k_shared_dim=0, aligned=aligned, copies=copies)

    def options(self) -> tuple[str, ...]:
        """The options that are set, in words: what a kernel is specialised on."""
        words = [
            f"gqa {self.group}" * (self.group > 1),
            "V in K" * self.v_in_k,
            f"{self.k_shared_dim} columns of k shared" * bool(self.k_shared_dim),
            *self.rules.describe(),
            f"softcap {self.softcap:g}" * bool(self.softcap),
            "alibi" * self.alibi,
            "q_bias" * self.q_bias,
            "k_bias" * self.k_bias,
            "sinks" * self.sinks,
            "" if self.mods is None else self.mods.described,
            "" if self.mask is None else f"{'bool' if self.mask.is_bool else 'additive'} mask",
            "" if self.selection is None else str(self.selection),
            "tree mask" * self.tree,
            "positions" * self.positions,
            f"dropout {self.dropout_p:g}" * bool(self.dropout_p),
            "tile map" * (self.tile_map is not None),
            "lengths" * self.has_lengths,
            "lse" * self.return_lse,
            "" if not self.grads else f"gradients of {', '.join(self.grads)}",
            "dlse" * self.dlse,
            "sums in any order allowed" * (not self.deterministic),
        ]
        return tuple(word for word in words if word)
