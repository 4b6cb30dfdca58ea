"""The same kernels read twice: MLX's attention by g++ with the headers in `include/`, and as Apple's compiler read it.

    python -m mslsim.against_apple --json RECORD

Both are executed by the simulator, on the same inputs; results are compared to the bit. (What both share is not
checked by it: the functions exp and log, the order in which lanes are summed, and the layout of matrices, which MLX's
kernels rely on and which is judged here against a plain product.)
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from mslsim import compile_shader, metallib
from mslsim.air import AirLibrary

KERNELS = "mlx/backend/metal/kernels/"
# The names of a type in MLX's kernels of one row, of tiles, in MSL and in torch.
TYPES = {
    "float": ("float", "float32", "float", torch.float32),
    "half": ("float16_t", "float16", "half", torch.float16),
    "bfloat": ("bfloat16_t", "bfloat16", "bfloat", torch.bfloat16),
}
# Function constants, by the name in the texts: those of kernels of one row, and of tiles.
ROW = {"has_mask": 20, "query_transposed": 21, "do_causal": 22, "bool_mask": 23, "float_mask": 24, "has_sinks": 25,
       "blocks": 26}  # fmt: skip
TILE = {"align_Q": 200, "align_K": 201, "has_mask": 300, "do_causal": 301, "has_sinks": 302, "save_lse": 303}
BLOCKS = 32


@dataclass(frozen=True)
class Pair:
    """A kernel of MLX's, with values of its function constants, and a shape."""

    family: str  # "vector", "2pass" or "steel"
    type: str
    D: int
    Dv: int
    heads: int = 4
    kv_heads: int = 2
    queries: int = 1
    keys: int = 50
    options: tuple[str, ...] = ()  # causal, bool, float, sinks

    def __str__(self) -> str:
        shape = f"{self.heads}/{self.kv_heads} heads, {self.queries} x {self.keys}"
        return f"{self.family} {self.type} {self.D}/{self.Dv}, {shape}" + "".join(f", {o}" for o in self.options)


@dataclass
class Inputs:
    pair: Pair
    q: torch.Tensor = field(init=False)
    k: torch.Tensor = field(init=False)
    v: torch.Tensor = field(init=False)
    mask: torch.Tensor = field(init=False)
    sinks: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        p, dtype = self.pair, TYPES[self.pair.type][3]
        g = torch.Generator().manual_seed(p.D + p.keys)
        self.q = torch.randn(p.heads, p.queries, p.D, generator=g).mul(2).to(dtype)
        self.k = torch.randn(p.kv_heads, p.keys, p.D, generator=g).mul(2).to(dtype)
        self.v = torch.randn(p.kv_heads, p.keys, p.Dv, generator=g).to(dtype)
        seen = torch.rand(p.heads, p.queries, p.keys, generator=g) < 0.7
        added = torch.randn(p.heads, p.queries, p.keys, generator=g).to(dtype)
        self.mask = seen if "bool" in p.options else added
        self.sinks = torch.randn(p.heads, generator=g).to(dtype)

    def exact(self) -> torch.Tensor:
        """In float64; what a kernel may differ from by rounding alone."""
        p = self.pair
        k, v = (x.double().repeat_interleave(p.heads // p.kv_heads, 0) for x in (self.k, self.v))
        scores = self.q.double() @ k.mT / p.D**0.5
        if "bool" in p.options:
            scores = scores.masked_fill(~self.mask, float("-inf"))
        if "float" in p.options:
            scores = scores + self.mask.double()
        if "causal" in p.options:
            rows = torch.arange(p.queries)[:, None] + p.keys - p.queries
            scores = scores.masked_fill(torch.arange(p.keys) > rows, float("-inf"))
        if "sinks" in p.options:
            sinks = self.sinks.double()[:, None, None].expand(-1, p.queries, 1)
            return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v
        return scores.softmax(-1) @ v


def _int(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32)


def _long(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _bytes(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.contiguous().view(torch.uint8) for x in parts])


def constants(p: Pair) -> dict[str, int]:
    """By the texts' own names."""
    masked = "bool" in p.options or "float" in p.options
    found = {"has_mask": masked, "do_causal": "causal" in p.options, "has_sinks": "sinks" in p.options}
    if p.family == "steel":
        return {**found, "align_Q": p.queries % 32 == 0, "align_K": p.keys % tile(p)[1] == 0}
    return {**found, "bool_mask": "bool" in p.options, "float_mask": "float" in p.options, "blocks": BLOCKS}


def tile(p: Pair) -> tuple[int, int]:
    """Queries and keys of a tile, as the library has them for a head dim."""
    return 32, 32 if p.D < 128 else 16


def names(p: Pair) -> list[tuple[str, str]]:
    """Each kernel's name in Apple's library, and its template's instance in the text."""
    row, tiles, msl, _ = TYPES[p.type]
    if p.family == "vector":
        return [(f"sdpa_vector_{row}_{p.D}_{p.Dv}", f"sdpa_vector<{msl}, {p.D}, {p.Dv}>")]
    if p.family == "2pass":
        first = (f"sdpa_vector_2pass_1_{row}_{p.D}_{p.Dv}", f"sdpa_vector_2pass_1<{msl}, {p.D}, {p.Dv}>")
        return [first, (f"sdpa_vector_2pass_2_{row}_{p.Dv}", f"sdpa_vector_2pass_2<{msl}, {p.Dv}>")]
    mask, of_mask = ("bool_", "bool") if "bool" in p.options else (tiles, msl)
    bq, bk = tile(p)
    name = f"steel_attention_{tiles}_bq{bq}_bk{bk}_bd{p.D}_bv{p.Dv}_wm4_wn1_mask{mask}"
    return [(name, f"attention<{msl}, {bq}, {bk}, {p.D}, {p.Dv}, 4, 1, {of_mask}, float>")]


def run(p: Pair, x: Inputs, kernels: list[Any]) -> list[torch.Tensor]:
    """Everything that the kernels write."""
    dtype = TYPES[p.type][3]
    poison = float("nan")
    out = torch.full((p.heads, p.queries, p.Dv), poison, dtype=dtype)
    scale = torch.tensor([p.D**-0.5])
    strides = _long(p.keys * p.D), _long(p.D), _long(p.keys * p.Dv), _long(p.Dv)
    masks = (x.mask if "bool" in p.options else torch.zeros(1, dtype=torch.bool),
             x.mask if "float" in p.options else torch.zeros(1, dtype=dtype),
             _int(1), _int(p.keys), _int(p.keys * p.queries), x.sinks)  # fmt: skip
    if p.family == "vector":
        kernels[0](x.q, x.k, x.v, out, _int(p.heads // p.kv_heads), _int(p.keys), *strides, scale, *masks,
                   _int(p.heads), threads=(1024 * p.heads, p.queries, 1), group_size=(1024, 1, 1))  # fmt: skip
        return [out]
    if p.family == "2pass":
        parts = torch.full((p.heads, p.queries, BLOCKS, p.Dv), poison, dtype=dtype)
        sums, maxs = (torch.full((p.heads, p.queries, BLOCKS), poison) for _ in range(2))
        group = (32, p.heads // p.kv_heads, p.queries)
        kernels[0](x.q, x.k, x.v, parts, sums, maxs, _int(0), _int(p.keys), *strides, scale, *masks,
                   threads=(group[0] * p.kv_heads, group[1], group[2] * BLOCKS), group_size=group)  # fmt: skip
        kernels[1](
            parts, sums, maxs, out, _int(BLOCKS), threads=(1024 * p.heads, p.queries, 1), group_size=(1024, 1, 1)
        )
        return [parts, sums, maxs, out]
    bq, bk = tile(p)
    blocks = -(-p.queries // bq), -(-p.keys // bk)
    shape = [1, p.heads, p.D, p.queries, p.keys, p.heads // p.kv_heads]
    whole, rest = (p.queries // bq, p.keys // bk), (p.queries % bq, p.keys % bk)
    numbers = torch.tensor([*shape, 0, *blocks, *whole, *rest, p.keys - p.queries], dtype=torch.int32)
    numbers[6:7] = scale.view(torch.int32)
    lie = [(0, n * d, d) for n, d in ((p.queries, p.D), (p.keys, p.D), (p.keys, p.Dv), (p.queries, p.Dv))]
    given = _bytes(numbers, *(_long(*s) for s in lie))
    lse = torch.zeros(p.heads * p.queries)
    kernels[0](x.q, x.k, x.v, out, given, _bytes(_long(0, p.queries * p.keys, p.keys)), x.mask, x.sinks, lse,
               threads=(32 * blocks[0], 4 * p.heads, 1), group_size=(32, 4, 1))  # fmt: skip
    return [out]


@dataclass
class Agreement:
    """What came of a pair: numbers that are equal to the bit, the largest difference, and the error of Apple's."""

    pair: str
    numbers: int
    equal: int
    difference: float
    error: float
    seconds: float = 0.0


def compare(p: Pair, change: Callable[[str], str] = str) -> Agreement:
    """`change` makes another text of it, for tests of this comparison."""
    started = time.perf_counter()
    x, given = Inputs(p), constants(p)
    numbered = {(TILE if p.family == "steel" else ROW)[name]: int(value) for name, value in given.items()}
    apple = [getattr(AirLibrary(metallib.mlx(), name, numbered), name) for name, _ in names(p)]
    header = "steel/attn/kernels/steel_attention.h" if p.family == "steel" else "sdpa_vector.h"
    text = metallib.text_of(KERNELS + header, {name: int(value) for name, value in given.items()})
    for name, instance in names(p):
        text += f'\ntemplate [[host_name("{name}")]] [[kernel]] decltype({instance}) {instance};\n'
    # Types are mixed in MLX's products of matrices: no document promises it, Apple's compiler takes it.
    library = compile_shader(change(text), mixed_matrices=True, races=p.family != "steel")
    for name, _ in names(p):
        bound = [[(b.name, b.index, b.position, b.writable) for b in k._kernel.parameters]
                 for k in (getattr(library, name), next(k for k in apple if k._kernel.name == name))]  # fmt: skip
        if bound[0] != bound[1]:
            raise AssertionError(f"{name}: bound as {bound[0]}, by Apple's compiler as {bound[1]}")
    theirs, ours = run(p, x, apple), run(p, x, [getattr(library, name) for name, _ in names(p)])
    bits = {4: torch.int32, 2: torch.int16}
    equal = sum(int((a.view(bits[a.element_size()]) == b.view(bits[b.element_size()])).sum())
                for a, b in zip(theirs, ours, strict=True))  # fmt: skip
    difference = max(float((a.double() - b.double()).abs().max()) for a, b in zip(theirs, ours, strict=True))
    error = float((theirs[-1].double() - x.exact()).abs().max())
    return Agreement(str(p), sum(a.numel() for a in theirs), equal, difference, error, time.perf_counter() - started)


def pairs() -> Iterator[Pair]:
    for kind in TYPES:
        for d, dv in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)):
            yield Pair("vector", kind, d, dv)
        for option in ("causal", "bool", "float", "sinks"):
            yield Pair("vector", kind, 64, 64, queries=3, keys=77, options=(option,))
        yield Pair("2pass", kind, 64, 64, keys=333)
        yield Pair("2pass", kind, 128, 128, queries=2, keys=100, options=("causal", "sinks"))
        for d in (64, 80, 96, 128):
            yield Pair("steel", kind, d, d, queries=50, keys=70)
        for options in (("causal",), ("bool",), ("float", "sinks"), ("causal", "float")):
            yield Pair("steel", kind, 64, 64, queries=64, keys=96, options=options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="words of a pair")
    given = parser.parse_args()
    found = []
    for p in pairs():
        if given.only and not all(word in str(p) for word in given.only.split(",")):
            continue
        found.append(compare(p))
        a = found[-1]
        apart = f"largest difference {a.difference:.2g}, error {a.error:.2g}"
        print(f"{a.equal:7} of {a.numbers:7} equal, {apart}: {a.pair}", flush=True)
        if given.json:
            held = {"compiler": "Apple metal 32023.883", "library": metallib.WHEEL, "pairs": [asdict(a) for a in found]}
            given.json.write_text(json.dumps(held, indent=1) + "\n")
    equal, numbers = sum(a.equal for a in found), sum(a.numbers for a in found)
    print(f"{len(found)} pairs, {equal} of {numbers} numbers equal to the bit")


if __name__ == "__main__":
    main()
