"""Prints expressions (`core/expression`) as LLVM code: each node once, as a vector of W cells, or as one number if it
is the same in all lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from llvmlite import ir

from ....core.expression.build import LEAST, MOST
from ....core.expression.node import COMPARE, FLOAT_1, INT_2, Node, in_order
from ....core.private.numba import cgutils
from . import functions
from .vector import F16, F32, I1, I8, I16, I32, I64, Emit, Value, W

SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<="}
STORED = {"float32": F32, "float64": functions.F64, "float16": F16, "bfloat16": I16, "bool": I8, "int8": I8,
          "uint8": I8, "int16": I16, "int32": I32, "int64": I64}  # fmt: skip
BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "bool": 1, "int8": 1, "uint8": 1, "int16": 2,
         "int32": 4, "int64": 8}  # fmt: skip


def is_vector(x: Value) -> bool:
    return isinstance(x.type, ir.VectorType)


def like(x: Value, element: ir.Type) -> ir.Type:
    """The type of this element in the shape of x: a number, or W of them."""
    return ir.VectorType(element, W) if is_vector(x) else element


def constant(x: Value, value: Any) -> ir.Constant:
    """A number in the type of x."""
    return ir.Constant(x.type, [value] * W if is_vector(x) else value)


class Printer:
    """Prints nodes at the current position. `table`: the address of the captured tensors' entries (`mods.py`);
    `tensors`: dtype and rank of each; `lanes`: the index whose neighbours are in neighbouring lanes, `q` or `k`;
    `wide`: whether offsets in captured tensors take 64 bits; `exact`: see `exact_nodes`.
    """

    def __init__(
        self, e: Emit, table: Value, tensors: Sequence[tuple[str, int]], lanes: str, wide: bool, exact: frozenset[Node]
    ) -> None:
        self.e, self.tensors, self.lanes, self.wide, self.exact = e, tensors, lanes, wide, exact
        self.offset = I64 if wide else I32
        self.values: dict[Node, Value] = {}
        # Read before any loop: the compiler must assume that stores change them.
        self.entries: list[tuple[Value, list[tuple[Value, Value]]]] = []
        at = 0
        for _, rank in tensors:
            word = [e.load_scalar(table, at + n, I64) for n in range(1 + 2 * rank)]
            dims = [(e.builder.trunc(word[1 + 2 * n], I32), self.narrowed(word[2 + 2 * n])) for n in range(rank)]
            self.entries.append((word[0], dims))
            at += len(word)

    def narrowed(self, x: Value) -> Value:
        return x if self.wide else self.e.builder.trunc(x, I32)

    def bind(self, node: Node, value: Value) -> None:
        self.values[node] = value

    def print(self, roots: Iterable[Node], chosen: Callable[[Node], bool] = lambda _: True) -> None:
        """Prints what these roots need and `chosen` holds for, unless it is printed already."""
        for node in in_order(*roots):
            if node not in self.values and chosen(node):
                self.values[node] = self._print(node)

    def vector(self, node: Node) -> Value:
        return self.spread(self.values[node])

    def spread(self, x: Value) -> Value:
        """A number in every lane; a vector as it is."""
        if is_vector(x):
            return x
        kind = ir.VectorType(x.type, W)
        if isinstance(x, ir.Constant):
            return ir.Constant(kind, [x.constant] * W)
        lane = self.e.builder.insert_element(ir.Constant(kind, ir.Undefined), x, ir.Constant(I32, 0))
        lanes = ir.Constant(ir.VectorType(I32, W), [0] * W)
        return self.e.builder.shuffle_vector(lane, ir.Constant(kind, ir.Undefined), lanes)

    def alike(self, *values: Value) -> list[Value]:
        """The values as vectors if one of them is."""
        return [self.spread(x) for x in values] if any(map(is_vector, values)) else list(values)

    def _print(self, node: Node) -> Value:
        op, b = node.op, self.e.builder
        if op == "const":
            return ir.Constant({"float": F32, "int": I32, "bool": I1}[node.kind], node.value)
        if op == "load":
            return self._load(node)
        args = self.alike(*(self.values[x] for x in node.children))
        x = args[0]
        if op in FLOAT_1:
            return functions.FUNCTIONS[op](self.e, self.spread(x))
        if op in COMPARE:
            return self._compare(op, next(node.children).kind, *args)
        if op == "where":
            return b.select(*args)
        if op == "float":
            return b.uitofp(x, like(x, F32)) if next(node.children).kind == "bool" else b.sitofp(x, like(x, F32))
        if op == "int":
            return b.zext(x, like(x, I32)) if next(node.children).kind == "bool" else self._to_int(x)
        if op == "not":
            return b.xor(x, constant(x, 1 if node.kind == "bool" else -1))
        if op in INT_2:
            divisor = list(node.children)[1]
            return self._divide(op, x, args[1], divisor.value if divisor.op == "const" else 0)
        if op in ("and", "or", "xor"):
            return {"and": b.and_, "or": b.or_, "xor": b.xor}[op](*args)
        if op == "div" and node not in self.exact and (factor := reciprocal(list(node.children)[1])) is not None:
            return b.fmul(x, constant(x, factor))  # a vector division takes 10 cycles
        return (self._of_floats if node.kind == "float" else self._of_ints)(op, args)

    def _compare(self, op: str, kind: str, x: Value, y: Value) -> Value:
        b = self.e.builder
        if kind == "int":
            return b.icmp_signed(SIGNS[op], x, y)
        return b.fcmp_unordered("!=", x, y) if op == "ne" else b.fcmp_ordered(SIGNS[op], x, y)

    def _of_floats(self, op: str, args: list[Value]) -> Value:
        b, x = self.e.builder, args[0]
        if op in ("max", "min"):  # NaN if either is
            y = args[1]
            first = b.fcmp_unordered(">" if op == "max" else "<", x, y)
            return b.select(first, b.select(b.fcmp_unordered("uno", y, y), y, x), y)
        if op == "neg":
            return b.fneg(x)
        if op == "abs":
            return self.e.call("fabs", x)
        return {"add": b.fadd, "sub": b.fsub, "mul": b.fmul, "div": b.fdiv}[op](*args)

    def _of_ints(self, op: str, args: list[Value]) -> Value:
        b, x = self.e.builder, args[0]
        if op in ("max", "min"):
            return b.select(b.icmp_signed(">" if op == "max" else "<", x, args[1]), *args)
        if op == "neg":
            return b.sub(constant(x, 0), x)
        if op == "abs":
            return b.select(b.icmp_signed("<", x, constant(x, 0)), b.sub(constant(x, 0), x), x)
        return {"add": b.add, "sub": b.sub, "mul": b.mul}[op](*args)

    def _to_int(self, x: Value) -> Value:
        """Towards 0; the nearest int if it does not fit; 0 of NaN."""
        kind = like(x, I32)
        suffix = f"v{W}i32.v{W}f32" if is_vector(x) else "i32.f32"
        function = ir.FunctionType(kind, [x.type])
        name = f"llvm.fptosi.sat.{suffix}"
        return self.e.builder.call(cgutils.get_or_insert_function(self.e.builder.module, function, name), [x])

    def _divide(self, op: str, x: Value, y: Value, divisor: Any) -> Value:
        """Rounded down; 0 by 0. `divisor`: y if it is a constant, else 0."""
        b = self.e.builder
        if divisor > 0 and divisor & (divisor - 1) == 0:
            if op == "mod":
                return b.and_(x, constant(x, divisor - 1))
            return b.ashr(x, constant(x, divisor.bit_length() - 1))
        by_zero = b.icmp_signed("==", y, constant(y, 0))
        y = b.select(by_zero, constant(y, 1), y)
        wide = like(x, functions.F64)  # the quotient of two int32 rounds down to the same integer
        quotient = b.fdiv(b.sitofp(x, wide), b.sitofp(y, wide))
        suffix = f"v{W}f64" if is_vector(x) else "f64"
        whole = b.fptosi(self.e.call("floor", quotient, suffix=suffix), like(x, I64))
        result = b.trunc(whole, x.type)
        if op == "mod":
            result = b.sub(x, b.mul(result, y))
        return b.select(by_zero, constant(x, 0), result)

    # Captured tensors

    def _load(self, node: Node) -> Value:
        b, number = self.e.builder, int(node.args[0])  # type: ignore[arg-type]
        dtype = self.tensors[number][0]
        base, dims = self.entries[number]
        offset: Value = ir.Constant(self.offset, 0)
        for index, (size, stride) in zip(node.children, dims, strict=True):
            place = self.clamped(self.values[index], size)
            wide, step = self.alike(b.sext(place, like(place, self.offset)) if self.wide else place, stride)
            offset = b.add(*self.alike(offset, b.mul(wide, step)))
        if not is_vector(offset):
            return self._decode(dtype, self._element(base, offset, STORED[dtype]))
        step = BYTES[dtype] * direction(node, self.lanes)
        if not step:
            return self._decode(dtype, self._gather(base, offset, STORED[dtype]))
        # Neighbours in memory for neighbours in lanes, unless an index is clamped or lanes have different heads.
        start = b.extract_element(offset, ir.Constant(I32, 0))
        series = ir.Constant(offset.type, [step * lane for lane in range(W)])
        same = b.icmp_signed("==", offset, b.add(self.spread(start), series))
        adjacent = b.icmp_unsigned("==", b.bitcast(same, ir.IntType(W)), ir.Constant(ir.IntType(W), 2**W - 1))
        kind = ir.VectorType(STORED[dtype], W)
        result = cgutils.alloca_once(b, kind)
        with b.if_else(adjacent, likely=True) as (together, apart):
            with together:
                first = start if step > 0 else b.extract_element(offset, ir.Constant(I32, W - 1))
                x = self._element(base, first, STORED[dtype], kind)
                x = x if step > 0 else b.shuffle_vector(x, x, ir.Constant(ir.VectorType(I32, W), [*range(W)][::-1]))
                b.store(x, result)
            with apart:
                b.store(self._gather(base, offset, STORED[dtype]), result)
        return self._decode(dtype, b.load(result))

    def element_of(self, node: Node) -> Value:
        """The number of the element that a load reads, in row-major order, as int64."""
        b, kind = self.e.builder, I64 if self.wide else I32
        number: Value = ir.Constant(kind, 0)
        for index, (size, _) in zip(node.children, self.entries[int(node.args[0])][1], strict=True):  # type: ignore[arg-type]
            place = self.clamped(self.values[index], size)
            if self.wide:
                place, size = b.sext(place, like(place, I64)), b.sext(size, I64)
            number = b.add(*self.alike(b.mul(*self.alike(number, size)), place))
        number = self.spread(number)
        return number if self.wide else b.sext(number, ir.VectorType(I64, W))

    def clamped(self, index: Value, size: Value) -> Value:
        """An index into a dim: from the end if it is negative, then clamped (`evaluate.clamped`)."""
        b = self.e.builder
        index, size = self.alike(index, size)
        zero, last = constant(index, 0), b.sub(size, constant(size, 1))
        index = b.select(b.icmp_signed("<", index, zero), b.add(index, size), index)
        index = b.select(b.icmp_signed("<", index, zero), zero, index)
        return b.select(b.icmp_signed(">", index, last), last, index)

    def _element(self, base: Value, offset: Value, element: ir.Type, kind: ir.Type | None = None) -> Value:
        b = self.e.builder
        offset = offset if self.wide else b.sext(offset, I64)
        x = b.load(b.inttoptr(b.add(base, offset), (kind or element).as_pointer()))
        x.align = max(1, BYTES_OF.get(str(element), 1))
        return x

    def _gather(self, base: Value, offset: Value, element: ir.Type) -> Value:
        b = self.e.builder
        x: Value = ir.Constant(ir.VectorType(element, W), ir.Undefined)
        for lane in range(W):
            at = ir.Constant(I32, lane)
            x = b.insert_element(x, self._element(base, b.extract_element(offset, at), element), at)
        return x

    def _decode(self, dtype: str, x: Value) -> Value:
        """A stored element as float32, int32 or bool."""
        b, kind = self.e.builder, like(x, I32)
        if dtype == "bool":
            return b.icmp_unsigned("!=", x, constant(x, 0))
        if dtype == "int64":
            low, high = constant(x, LEAST), constant(x, MOST)
            x = b.select(b.icmp_signed("<", x, low), low, x)
            return b.trunc(b.select(b.icmp_signed(">", x, high), high, x), kind)
        if dtype == "bfloat16":
            return b.bitcast(b.shl(b.zext(x, kind), ir.Constant(kind, [16] * W if is_vector(x) else 16)), like(x, F32))
        if dtype == "float64":
            return b.fptrunc(x, like(x, F32))
        if dtype == "float16":
            return b.fpext(x, like(x, F32))
        if dtype in ("float32", "int32"):
            return x
        return b.zext(x, kind) if dtype == "uint8" else b.sext(x, kind)


STEPS = ("int", "floor", "ceil", *COMPARE, "load")  # of which a last digit may change all


def exact_nodes(roots: Sequence[Node]) -> frozenset[Node]:
    """Nodes of which a last digit matters: what steps depend on."""
    return frozenset(in_order(*(y for x in in_order(*roots) if x.op in STEPS for y in x.children)))


def reciprocal(x: Node) -> float | None:
    """That of a constant, if it is far from overflow; else None."""
    return 1 / x.value if x.op == "const" and 2.0**-100 < abs(x.value) < 2.0**100 else None


BYTES_OF = {str(element): BYTES[name] for name, element in STORED.items()}


def slope(node: Node, name: str) -> int | None:
    """By how much an int grows with an index, where it is not clamped; None if that is no number."""
    if name not in node.inputs:
        return 0
    parts = [slope(x, name) for x in node.children]
    if node.op == "in":
        return 1
    if None in parts or node.op not in ("add", "sub", "neg", "max", "min", "where"):
        return None
    if node.op in ("max", "min", "where"):  # one side is a limit
        return next((x for x in parts[-2:] if x), 0)
    numbers = [x or 0 for x in parts]
    return -numbers[0] if node.op == "neg" else numbers[0] + (numbers[1] if node.op == "add" else -numbers[1])


def direction(load: Node, lanes: str) -> int:
    """1 or -1 if neighbouring lanes may load neighbouring elements, in that order; else 0."""
    indices = list(load.children)
    if not indices or any(lanes in x.inputs for x in indices[:-1]):
        return 0
    step = slope(indices[-1], lanes)
    return step if step in (1, -1) else 0
