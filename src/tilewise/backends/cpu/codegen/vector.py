"""The vector layer: micro-kernels written as Python that emits LLVM vector code.

A micro-kernel is a function of an `Emit` and its arguments, made callable from Numba code by `@microkernel`. It works
on addresses (int64) and float32; vectors live in registers between `load` and `store`. The width is the host's: 16
floats with AVX-512, 8 with AVX2, 4 elsewhere (NEON, SSE). `load` converts other types to float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ....core.private.numba import cgutils
from ..isa import cpu_features, host_width
from .formats import DECODE, Lanes

Value = Any  # of LLVM
F32, F16, I1, I8, I16, I32, I64 = ir.FloatType(), ir.HalfType(), *(ir.IntType(n) for n in (1, 8, 16, 32, 64))
TYPES = {"i": types.int64, "f": types.float32, "": types.void}
W = host_width()
REGISTERS = 32 if W == 16 or W == 4 else 16  # AVX-512 and NEON have 32
HAS_SCALE = W == 16 and "avx512dq" in cpu_features()  # `reduce` and `scalef` of AVX-512


class Var:
    """A value that changes in a loop; LLVM keeps it in a register."""

    def __init__(self, emit: Emit, value: Value) -> None:
        self.emit = emit
        self.slot = cgutils.alloca_once(emit.builder, value.type)
        self.set(value)

    def get(self) -> Value:
        return self.emit.builder.load(self.slot)

    def set(self, value: Value) -> None:
        self.emit.builder.store(value, self.slot)


class Emit:
    """Emits vector instructions at the current position of Numba's code generator."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    # Types and constants

    def vector(self, element: ir.Type, width: int = W) -> ir.VectorType:
        return ir.VectorType(element, width)

    def f32s(self, value: float) -> ir.Constant:
        return ir.Constant(self.vector(F32), [value] * W)

    def i32s(self, value: int) -> ir.Constant:
        return ir.Constant(self.vector(I32), [value] * W)

    def i64(self, value: int) -> Value:
        return ir.Constant(I64, value)

    @property
    def zeros(self) -> Value:
        return self.f32s(0.0)

    # Memory. Addresses are int64; offsets count elements.

    def pointer(self, address: Value, offset: Any, element: ir.Type, kind: ir.Type) -> Value:
        b = self.builder
        offset = self.i64(offset) if isinstance(offset, int) else offset
        base = b.inttoptr(address, element.as_pointer())
        return b.bitcast(b.gep(base, [offset]), kind.as_pointer())

    def _load(self, address: Value, offset: Any, element: ir.Type, width: int) -> Value:
        value = self.builder.load(self.pointer(address, offset, element, self.vector(element, width)))
        value.align = element.width // 8 if isinstance(element, ir.IntType) else {F32: 4, F16: 2}[element]
        return value

    def load(self, address: Value, offset: Any = 0, kind: str = "f32", part: int = 0) -> Value:
        """Loads W elements of storage format `kind` from `offset` on as float32; `part`: which element of each byte."""
        element, decode = DECODE[kind]
        return decode[part](self.builder, Lanes(W), self._load(address, offset, element, W))

    def load_one(self, address: Value, offset: Any, kind: str, part: int = 0) -> Value:
        """Loads one element, likewise."""
        element, decode = DECODE[kind]
        return decode[part](self.builder, Lanes(), self.load_scalar(address, offset, element))

    def bf16_bits(self, x: Value, constant: Callable[[int], Value]) -> Value:
        """float32 to bfloat16, to nearest even, in the low half of an int32; `constant(n)` is n in x's shape."""
        b = self.builder
        bits = b.bitcast(x, constant(0).type)
        odd = b.and_(b.lshr(bits, constant(16)), constant(1))
        rounded = b.lshr(b.add(bits, b.add(odd, constant(0x7FFF))), constant(16))
        return b.select(b.fcmp_unordered("uno", x, x), constant(0x7FC0), rounded)

    def load_i32(self, address: Value) -> Value:
        return self._load(address, 0, I32, W)

    def load_i16(self, address: Value) -> Value:
        return self._load(address, 0, I16, W)

    def store(self, value: Value, address: Value, offset: Any = 0) -> None:
        self.builder.store(value, self.pointer(address, offset, F32, value.type)).align = 4

    def load_scalar(self, address: Value, offset: Any, element: ir.Type) -> Value:
        return self.builder.load(self.pointer(address, offset, element, element))

    def splat(self, scalar: Value) -> Value:
        """A float32 in every lane."""
        b, kind = self.builder, self.vector(F32)
        lane = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
        return b.shuffle_vector(lane, ir.Constant(kind, ir.Undefined), ir.Constant(self.vector(I32), [0] * W))

    def splat_i32(self, scalar: Value) -> Value:
        b, kind = self.builder, self.vector(I32)
        lane = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
        return b.shuffle_vector(lane, ir.Constant(kind, ir.Undefined), ir.Constant(kind, [0] * W))

    # Arithmetic

    def call(self, name: str, *args: Value, suffix: str = "") -> Value:
        """An LLVM intrinsic over vectors (or scalars) of one type; `suffix` names it unless it is of float32."""
        kind = args[0].type
        suffix = suffix or (f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32")
        function = ir.FunctionType(kind, [kind] * len(args))
        return self.builder.call(
            cgutils.get_or_insert_function(self.builder.module, function, f"llvm.{name}.{suffix}"), args
        )

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        return self.call("fma", a, b, c)

    def max(self, a: Value, b: Value) -> Value:
        """The larger; `b` if either is NaN, as the hardware instruction."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def reduce(self, value: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """Reduces all lanes to a scalar, by halves."""
        b, width = self.builder, value.type.count
        while width > 1:
            width //= 2
            low, high = (self.shuffle(value, value, range(start, start + width)) for start in (0, width))
            value = combine(low, high)
        return b.extract_element(value, ir.Constant(I32, 0))

    def shuffle(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        order = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
        return self.builder.shuffle_vector(a, b, order)

    def sums(self, values: list[Value]) -> Value:
        """The horizontal sums of up to W vectors (a power of two), as one vector of that many lanes.

        Vectors are added in pairs, so n of them take n - 1 steps, not n log2 W.
        """
        width, b = W, self.builder
        count = len(values)
        while len(values) > 1:
            half = width // 2
            folded = []
            for x, y in zip(values[::2], values[1::2], strict=True):
                groups = W // width  # earlier results held side by side in x and y
                low = [g * width + i + side * W for g in range(groups) for side in (0, 1) for i in range(half)]
                high = [lane + half for lane in low]
                folded.append(b.fadd(self.shuffle(x, y, low), self.shuffle(x, y, high)))
            values, width = folded, half
        value = values[0]
        while width > 1:  # fewer than W vectors: fold what is left within each group
            half = width // 2
            groups = value.type.count // width
            low = [g * width + i for g in range(groups) for i in range(half)]
            value = b.fadd(self.shuffle(value, value, low), self.shuffle(value, value, [i + half for i in low]))
            width = half
        order = _bit_reversed(count)
        return self.shuffle(value, value, order)

    def transpose(self, rows: list[Value]) -> list[Value]:
        """Transposes a W x W matrix, given by its rows."""
        step = 1
        while step < W:
            done: list[Any] = [None] * W
            for i in range(W):
                if i & step:
                    continue
                x, y = rows[i], rows[i + step]
                low = [lane if not lane & step else lane - step + W for lane in range(W)]
                high = [lane + step if not lane & step else lane + W for lane in range(W)]
                done[i], done[i + step] = self.shuffle(x, y, low), self.shuffle(x, y, high)
            rows, step = done, step * 2
        return rows

    def exp2(self, x: Value) -> Value:
        """2 ** x to 2 ulp for x up to 127; 0 below -126.5, where results would be subnormal."""
        b = self.builder
        if not HAS_SCALE:
            return self.exp2_of_product(x, self.f32s(1.0))
        # 9 instructions, not 12; subnormal results would be far slower (cpu/exp2 in benchmarks/cpu/LOG.md).
        mask = b.bitcast(b.fcmp_unordered(">=", x, self.f32s(-126.5)), I16)  # NaN stays
        rest = self.avx512("reduce", x, ir.Constant(I32, 1), ir.Constant(I16, -1))  # x - floor(x); 0 of -inf
        return self.avx512("scalef", self.polynomial(EXP2_ABOVE, rest), x, mask)  # times 2 ** floor(x)

    def exp2_of_product(self, x: Value, y: Value) -> Value:
        """`exp2` of x * y, y > 0, to 2 ulp for the exact product: only its fractional part is rounded.

        (Products of 30 rounded first would be off by 8 ulp.) Past 2 ** 22 it is infinite, of either sign, or NaN.
        """
        b = self.builder
        if not HAS_SCALE:
            x = self.max(b.fdiv(self.f32s(-127.0), self.max(y, self.f32s(1e-36))), x)  # NaN stays
        sum_ = self.fma(x, y, self.f32s(ROUND))
        whole = b.fsub(sum_, self.f32s(ROUND))
        power = self.polynomial(EXP2, self.fma(x, y, b.fneg(whole)))
        if HAS_SCALE:
            mask = b.bitcast(b.fcmp_unordered(">=", whole, self.f32s(-126.0)), I16)  # and not -inf, whose rest is NaN
            return self.avx512("scalef", power, whole, mask)
        exponent = b.shl(b.bitcast(sum_, self.vector(I32)), self.i32s(23))  # the low bits of the sum; 0 for -127
        return b.fmul(power, b.bitcast(exponent, self.vector(F32)))

    def polynomial(self, coefficients: Sequence[float], x: Value) -> Value:
        """A polynomial; the highest power's coefficient comes first."""
        p = self.f32s(coefficients[0])
        for coefficient in coefficients[1:]:
            p = self.fma(p, x, self.f32s(coefficient))
        return p

    def avx512(self, name: str, a: Value, b: Value, mask: Value) -> Value:
        """An AVX-512 instruction with two operands; 0 in lanes whose bit in `mask` is not set."""
        args = [a, b, self.zeros, mask, ir.Constant(I32, 4)]  # 4: the current rounding mode
        kind = ir.FunctionType(a.type, [x.type for x in args])
        full_name = f"llvm.x86.avx512.mask.{name}.ps.512"
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, full_name), args)

    # Control

    def var(self, value: Value) -> Var:
        return Var(self, value)

    @contextmanager
    def loop(self, count: Value, step: int = 1) -> Iterator[Value]:
        """Runs its body for 0, step, ... below `count`."""
        with cgutils.for_range_slice(self.builder, self.i64(0), count, self.i64(step), I64) as (index, _):
            yield index


ROUND = 1.5 * 2**23 + 127  # adding it rounds to an integer; 127 is the exponent's bias
# Highest power first. 2 ** x on [-0.5, 0.5] to a relative 2e-9, with 2 ** 0 = 1 kept exact.
EXP2 = (1.5353362e-4, 1.3398875e-3, 9.618437e-3, 5.5503324e-2, 2.4022648e-1, 6.931472e-1, 1.0)
EXP2_ABOVE = (2.1612925e-4, 1.2467843e-3, 9.675452e-3, 5.5485282e-2, 2.4022931e-1, 6.9314706e-1, 1.0)  # on [0, 1]


def _bit_reversed(count: int) -> list[int]:
    bits = count.bit_length() - 1
    return [int(f"{i:0{bits}b}"[::-1], 2) if bits else 0 for i in range(count)]


def microkernel(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes `fn(emit, *args)` callable from Numba: `"iif>f"` takes two int64 and a float32 and returns a float32."""
    names, _, result = signature.partition(">")

    def wrap(fn: Callable[..., Any]) -> Any:
        def typed(typingctx: Any, *args: Any) -> Any:
            def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
                value = fn(Emit(builder), *values)
                return context.get_dummy_value() if value is None else value

            return TYPES[result](*(TYPES[n] for n in names)), codegen

        # Numba takes the number of arguments from the function itself.
        params = ", ".join(f"a{i}" for i in range(len(names)))
        scope: dict[str, Any] = {"typed": typed}
        exec(f"def {fn.__name__}(typingctx, {params}):\n    return typed(typingctx, {params})", scope)
        return intrinsic(scope[fn.__name__])

    return wrap
