"""Prints expressions (`core/expression`) as Triton functions, and compiles them: each node once, as a tile of cells or
as what broadcasts to one.

A kernel has them in its `Spec`, as `S.mods.score` and so on, so its own text is the same for all expressions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from ...core.expression.build import LEAST, MOST, const
from ...core.expression.mods import Mods
from ...core.expression.node import COMPARE, INT_2, Node, in_order

CELLS = "s, b, h, q, k, c"  # the inputs, and the captured tensors: of each a pointer, then size and stride of each dim
SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=",
         "and": "&", "or": "|", "xor": "^"}  # fmt: skip
CALLS = {"max": "larger", "min": "smaller", "abs": "tl.abs", "where": "tl.where", "exp": "tl.exp", "exp2": "tl.exp2",
         "log": "tl.log", "log2": "tl.log2", "tanh": "tanh_of", "sigmoid": "sigmoid", "sqrt": "tl.sqrt_rn",
         "rsqrt": "tl.rsqrt", "sin": "tl.sin", "cos": "tl.cos", "floor": "tl.floor", "ceil": "tl.ceil",
         "floordiv": "floor_quotient", "mod": "floor_remainder"}  # fmt: skip
TYPES = {"float": "tl.float32", "int": "tl.int32", "bool": "tl.int1"}
STEPS = ("int", "floor", "ceil", *COMPARE, "load")  # of which a last digit of an argument may change all


@dataclass(frozen=True)
class ModFunctions:
    """The functions of a call as kernels call them, compiled when the first kernel asks. `wide`: offsets in captured
    tensors take 64 bits; `loads`: those by which a backward kernel needs derivatives, as `Mods.by_loads` counts them.
    """

    mods: Mods
    wide: bool = False
    backward: bool = False
    loads: tuple[int, ...] = ()

    def __repr__(self) -> str:
        """What Triton's cache on disk knows a kernel by: all that is printed."""
        return f"ModFunctions({hashlib.sha256(self.text.encode()).hexdigest()})"

    @property
    def text(self) -> str:
        return "".join(self.printed(name) for name in ("score", "mask"))

    def printed(self, name: str) -> str:
        """The text of a function; "" if there is none."""
        root = getattr(self.mods, name)
        if root is None:
            return ""
        own, more = [root], None
        if name == "score" and self.backward:
            own.append(const(1.0) if self.mods.by_score is None else self.mods.by_score)
            derivatives = [*self.mods.by_loads.values()]
            more = [derivatives[n] for n in self.loads]
        return printed(f"mod_{name}", own, more, self.mods.tensors, self.wide)

    @cached_property
    def score(self) -> Any:
        """The score of cells by what it was; in a backward pass, its derivative and a tuple of those by `loads` too.
        None if there is no score_mod.
        """
        return compiled(self.printed("score"), "mod_score")

    @cached_property
    def mask(self) -> Any:
        """Which cells mask_mod leaves; None if there is none."""
        return compiled(self.printed("mask"), "mod_mask")


@cache
def captured_bytes(mods: Mods | None, rows: int, keys: int) -> int:
    """An upper bound on the bytes of captured tensors that a tile of a loop over keys reads in advance."""
    roots = () if mods is None else (x for x in (mods.score, mods.mask) if x is not None)
    loads = [x.inputs for x in in_order(*roots) if x.op == "load" and x.inputs & {"s", "q", "k"}]
    return 8 * sum(rows * keys if "s" in x or {"q", "k"} <= x else rows + keys for x in loads)  # pointers take as much


@cache
def compiled(text: str, name: str) -> Any:
    """The function of a printed text; None of none."""
    if not text:
        return None
    import triton

    from ..gpu.signature import function_from
    from . import mod_operations

    return function_from(text, name, triton.jit, vars(mod_operations))


def printed(
    name: str, own: Sequence[Node], more: Sequence[Node] | None, tensors: Sequence[tuple[str, int]], wide: bool
) -> str:
    """The text of a function of cells with the results of these nodes; those in `more` are a tuple of their own."""
    roots = [*own, *(more or ())]
    exact = frozenset(in_order(*(y for x in in_order(*roots) if x.op in STEPS for y in x.children)))
    first, at = [], 0  # the place of each tensor in `c`
    for _, rank in tensors:
        first.append(at)
        at += 1 + 2 * rank
    names: dict[Node, str] = {}
    lines = [f"def {name}({CELLS}):"]

    def of(x: Node, alone: bool = False) -> str:
        """An argument; `alone`: no other one of the operation is a tensor, so a number has to be one."""
        if x.op != "const":
            return names[x]
        number = repr(x.value) if math.isfinite(x.value) else f'float("{x.value}")'
        return f"tl.full((), {number}, {TYPES[x.kind]})" if alone else number

    for node in in_order(*roots):
        if node.op == "in":
            names[node] = str(node.args[0])
        elif node.op != "const":
            names[node] = f"x{len(names)}"
            if node.op == "load":
                number = int(node.args[0])  # type: ignore[arg-type]
                text = load_text([of(x, True) for x in node.children], tensors[number][0], first[number], wide)
            else:
                numbers = all(x.op == "const" for x in node.children)
                args = [of(x, numbers and n == 0) for n, x in enumerate(node.children)]
                text = operation(node, args, node in exact)
            lines.append(f"    {names[node]} = {text}")
    results = [of(root, True) for root in own]
    if more is not None:
        results.append(f"({''.join(f'{of(root, True)}, ' for root in more)})")
    lines.append(f"    return {', '.join(results)}")
    return "\n".join(lines) + "\n"


def operation(node: Node, args: Sequence[str], exact: bool) -> str:
    """The text of an operation on its arguments."""
    op, x = node.op, args[0]
    first, *others = node.children
    divisor = int(others[0].value) if op in INT_2 and others[0].op == "const" else 0
    if divisor > 0 and divisor & (divisor - 1) == 0:
        return f"{x} & {divisor - 1}" if op == "mod" else f"{x} >> {divisor.bit_length() - 1}"
    if op in ("float", "int"):
        return f"nearest_int({x})" if first.kind == "float" else f"{x}.to({TYPES[op]})"
    if op == "not":
        return f"~{x}"
    if op == "neg":
        return f"-{x}"
    if op == "div" and exact:
        return f"tl.div_rn({', '.join(args)})"
    if op in ("max", "min") and node.kind == "int":
        return f"tl.{op}imum({', '.join(args)})"
    return f" {SIGNS[op]} ".join(args) if op in SIGNS else f"{CALLS[op]}({', '.join(args)})"


def load_text(indices: Iterable[str], dtype: str, at: int, wide: bool) -> str:
    """The text of a load from the tensor whose entry in `c` begins at `at`, as float32, int32 or bool."""
    places = [f"clamped({x}, c[{at + 1 + 2 * n}])" for n, x in enumerate(indices)]
    places = [f"{x}.to(tl.int64)" for x in places] if wide else places
    offsets = "".join(f" + {x} * c[{at + 2 + 2 * n}]" for n, x in enumerate(places))
    x = f"tl.load(c[{at}]{offsets})"
    if dtype == "bool":
        return f"{x} != 0"
    if dtype == "int64":
        x = f"tl.minimum(tl.maximum({x}, {LEAST}), {MOST})"
    return f"{x}.to(tl.{'float32' if 'float' in dtype else 'int32'})"
