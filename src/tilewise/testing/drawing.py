"""Random calls: sizes, dtypes and options in any combination, including the ends of their ranges.

Shared by hypothesis (`tests/helpers/strategies.py`), which shrinks failures, and long runs by seed
(`benchmarks/cpu/random_calls.py`): each passes its own `Chooser`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from ..core.mask_rules import PLAIN_PLACES
from ..core.options import LIMIT, PLACES
from .case import Case

STORED = ("", "f16", "bf16", "int8/32", "int8/128", "int4/32", "int4/64", "codebook4/64", "fp8_e4m3/64")
HUGE = (2**29 - 1, 2**31 - 1, 2**31, sys.maxsize, 10**20)
SOFTCAPS = (None, 0.5, 5.0, 50.0, 1e6, 1e30)
SCALES = (None, 1.0, -0.2, 0.01)
MASKS = ("qk", "1k", "hqk", "bhqk", "b11k", "1hq1")
CHANGES = (
    "causal",
    "window",
    "chunk",
    "offset",
    "softcap",
    "scale",
    "sinks",
    "split_size",
    "alibi",
    *PLACES,
    "q_bias",
    "k_bias",
)


class Chooser(Protocol):
    """The source of choices. The plainest value comes first."""

    def pick(self, values: Sequence[Any]) -> Any: ...

    def number(self, low: int, high: int) -> int: ...


class Seeded:
    """Choices by a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def pick(self, values: Sequence[Any]) -> Any:
        return self.random.choice(values)

    def number(self, low: int, high: int) -> int:
        return self.random.randint(low, high)


def draw_case(
    c: Chooser,
    most: int = 70,
    forms: Sequence[str] = ("dense", "varlen", "paged"),
    dtypes: Sequence[str] = ("f32", "f16", "bf16"),
    head_dims: Sequence[int] = range(1, 97),
    indices: bool = False,
) -> Case:
    """A `Case` with up to `most` queries and keys a sequence, perhaps 0; some with key indices if `indices`."""
    form = c.pick(forms)
    batch = c.pick((1, 2, 3, 4))
    lengths = tuple(c.number(0, most) for _ in range(batch))
    queries = tuple(c.pick((0, c.number(1, most), 1)) for _ in range(batch))
    rows = c.pick((c.number(1, most), 1, 0))
    kv_heads = c.pick((1, 2, 3))
    fields: dict[str, Any] = {"form": form, "B": batch, "H": kv_heads * c.pick((1, 2, 5)), "Hkv": kv_heads, "Lq": rows}
    fields |= {name: draw_option(c, name) for name in CHANGES if c.pick((False, True))}
    fields["D"], fields["Dv"] = c.pick(head_dims), c.pick(head_dims)
    fields["dtype"] = c.pick(dtypes)
    for name, width in (("k", "D"), ("v", "Dv")):
        fits = [s for s in STORED if not (s.startswith(("int4", "codebook4")) and fields[width] % 2)]
        fields[name] = c.pick(("", c.pick(fits)))
    if form == "dense":
        keys = fields["Lk"] = c.number(max(1, *lengths), most + 1)
        fields["lengths"] = c.pick(((), lengths))
        if not (fields["k"] + fields["v"]):  # quantised tensors are made in one layout
            fields["layout"] = c.pick(("bhld", "blhd"))
            strides = c.pick(("", "sliced", "last", "permuted", "shared"))
            fields["strides"] = "" if fields["lengths"] and strides == "shared" else strides
    else:
        keys, fields["lengths"] = max(lengths), lengths
        if form == "varlen" or c.pick((False, True)):
            fields["q_lengths"] = queries
        if form == "paged":
            fields["page"] = c.pick((16, 1, 3, 64))
        elif c.pick((False, True)):
            fields["used"] = tuple(c.number(0, n) for n in lengths)
    count = max(queries) if fields.get("q_lengths") else rows
    if min(keys, count) > 1 and c.pick((False, True)):  # a mask dim of size 1 would be broadcast
        fields |= {"mask": c.pick(MASKS), "mask_kind": c.pick(("bool", "f32", "f16", "bf16"))}
        fields["pattern"] = c.pick(("random", "blocks", "rows", "least"))
        if c.pick((False, True)):
            fields["tile"] = (c.pick((c.number(1, 80), 2**29)), c.number(1, 80))
    if count > 0 and c.pick((False, False, True)):
        fields["tree"] = c.pick(("b", "1"))
        fields["positions"] = c.pick((False, True))
    if fields["Dv"] < fields["D"] and not fields["k"] + fields["v"]:
        fields["latent"] = c.pick((False, True))
    if indices and c.pick((False, False, True)):
        fields["indices"] = c.pick(("", "h")) + str(c.pick((c.number(1, 40), 1, c.number(40, 2 * most))))
        fields["block"] = 0 if fields.get("q_lengths") else c.pick((0, 0, c.number(1, 40)))
    return consistent(Case(**fields))


def draw_trained(c: Chooser, most: int = 70) -> Case:
    """A `Case` that has gradients."""
    case = draw_case(c, most, forms=("dense", "varlen"), indices=True)
    stored = {name: "" for name in ("k", "v") if "/" in getattr(case, name)}
    return replace(case, **stored)  # type: ignore[arg-type]


def draw_option(c: Chooser, name: str) -> Any:
    """A value of one of `CHANGES`."""
    if name == "causal":
        return c.pick((False, True))
    if name == "window":
        side = lambda: c.pick((None, c.number(0, 40), c.pick(HUGE)))  # noqa: E731
        return c.pick((None, c.number(1, 60), (side(), side()), c.pick(HUGE)))
    if name == "chunk":
        return c.pick((None, None, c.number(1, 40), c.pick(HUGE)))
    if name == "offset":
        return c.pick((None, c.number(-20, 60), "rows", c.pick((LIMIT - 200, 200 - LIMIT))))
    if name == "k_start":
        return c.pick((0, c.number(-40, 60), "rows"))
    if name in PLACES:
        return c.pick((1, c.number(1, 9), "rows"))
    if name in ("q_bias", "k_bias"):
        return c.pick(("", "bh", "1h", "b1"))
    if name == "split_size":
        return c.pick((None, c.number(1, 100), c.pick(HUGE)))
    if name == "sinks":
        return c.pick((False, True, "mixed", "none"))
    return c.pick({"softcap": SOFTCAPS, "scale": SCALES, "alibi": ("", "h", "bh")}[name])


def draw_change(c: Chooser, case: Case) -> Case:
    """The same shapes and tensors with one option drawn again."""
    name = c.pick(CHANGES)
    return consistent(replace(case, **{name: draw_option(c, name)}))


def consistent(case: Case) -> Case:
    """The case without combinations that no error bound can judge or that inputs cannot express."""
    if case.alibi and isinstance(case.offset, int) and abs(case.offset) > 1000:
        case = replace(case, offset=7)  # biases of 10**8 would leave the scores no bits
    if isinstance(case.offset, int):  # within the range of positions; on a GPU all keys of a block table count
        room = case.keys + (2 * case.page if case.form == "paged" else 0)
        case = replace(case, offset=min(max(case.offset, room - LIMIT), LIMIT - case.queries))
    if isinstance(case.offset, int) and abs(case.offset) > 2**20:  # the range is for positions one apart
        case = replace(case, k_start=0, k_stride=1, q_stride=1)
    if case.q_lengths and case.q_bias:
        case = replace(case, q_bias=case.q_bias[-1])
    if case.form == "varlen" and case.k_bias:
        case = replace(case, k_bias=case.k_bias[-1])
    if case.tile and not case.mask:
        case = replace(case, tile=None)
    moved = case.offset is not None or (case.k_start, case.k_stride, case.q_stride) != PLAIN_PLACES
    if moved or case.alibi or case.tile:
        case = replace(case, positions=False)  # no kernel has ALiBi by a tree's positions
    return case
