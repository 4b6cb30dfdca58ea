"""Functions of float32 vectors, over all of their range, to a few ulp. NaN stays NaN."""

from __future__ import annotations

import math

from llvmlite import ir

from .vector import EXP2, F32, HAS_SCALE, I16, I32, I64, Emit, Value, W

F64 = ir.DoubleType()
SHIFT = 1.5 * 2**23  # adding it rounds to an integer, in the low bits
LOG2E = (1.4426950216293335, 1.9259629911266175e-8)  # a float32, and the rest
LN2 = (0.693145751953125, 1.42860682030941723212e-6)  # a few bits, and the rest
# (log(1 + f) - f + f^2 / 2) / f^3 for f from sqrt(1/2) - 1 to sqrt(2) - 1, so that log is right to a relative 1.4e-9
LOG = (0.066752719, -0.11646434, 0.11904712, -0.12411269, 0.14217892, -0.16667644, 0.20002204, -0.25000016, 0.33333311)
# tanh x = x + x^3 P(x^2) up to 0.625, to a relative 4e-9; highest power first.
TANH = (-5.704985e-3, 2.0639086e-2, -5.3739715e-2, 1.3331442e-1, -3.3333281e-1)
HALF_PI = (1.5707963267948966, 6.123233995736766e-17, -1.4973849048591833e-33)
SIN = [(-1) ** n / math.factorial(2 * n + 1) for n in range(6, -1, -1)]  # of r / r, by r^2, up to pi / 4
COS = [(-1) ** n / math.factorial(2 * n) for n in range(6, -1, -1)]


def _round(e: Emit, x: Value) -> tuple[Value, Value]:
    """The nearest integer, as float and int32, of |x| < 2^22."""
    b = e.builder
    sum_ = b.fadd(x, e.f32s(SHIFT))
    bits = b.sub(b.bitcast(sum_, e.vector(I32)), b.bitcast(e.f32s(SHIFT), e.vector(I32)))
    return b.fsub(sum_, e.f32s(SHIFT)), bits


def _limit(e: Emit, x: Value, least: float, most: float) -> Value:
    """x between two numbers; NaN stays."""
    b = e.builder
    x = b.select(b.fcmp_ordered("<", x, e.f32s(least)), e.f32s(least), x)
    return b.select(b.fcmp_ordered(">", x, e.f32s(most)), e.f32s(most), x)


def _times_power(e: Emit, x: Value, whole: Value, bits: Value) -> Value:
    """x * 2 ** whole for -160 < whole < 160, also where the result is subnormal or overflows."""
    b = e.builder
    if HAS_SCALE:
        return e.avx512("scalef", x, whole, ir.Constant(I16, -1))
    half = b.ashr(bits, e.i32s(1))
    for part in (half, b.sub(bits, half)):
        x = b.fmul(x, b.bitcast(b.shl(b.add(part, e.i32s(127)), e.i32s(23)), e.vector(F32)))
    return x


def exp2(e: Emit, x: Value) -> Value:
    b = e.builder
    x = _limit(e, x, -152.0, 129.0)
    whole, bits = _round(e, x)
    return _times_power(e, e.polynomial(EXP2, b.fsub(x, whole)), whole, bits)


def exp(e: Emit, x: Value) -> Value:
    b = e.builder
    x = _limit(e, x, -105.0, 89.0)
    whole, bits = _round(e, b.fmul(x, e.f32s(LOG2E[0])))
    rest = e.fma(x, e.f32s(LOG2E[1]), e.fma(x, e.f32s(LOG2E[0]), b.fneg(whole)))
    return _times_power(e, e.polynomial(EXP2, rest), whole, bits)


def _split(e: Emit, x: Value) -> tuple[Value, Value]:
    """f and n, a float, with x = (1 + f) * 2 ** n; 1 + f is between sqrt(1/2) and sqrt(2)."""
    b, ints = e.builder, e.vector(I32)
    small = b.fcmp_ordered("<", x, e.f32s(2.0**-126))
    bits = b.bitcast(b.select(small, b.fmul(x, e.f32s(2.0**24)), x), ints)
    power = b.ashr(b.sub(bits, e.i32s(0x3F3504F3)), e.i32s(23))
    mantissa = b.bitcast(b.sub(bits, b.shl(power, e.i32s(23))), e.vector(F32))
    power = b.sub(power, b.select(small, e.i32s(24), e.i32s(0)))
    return b.fsub(mantissa, e.f32s(1.0)), b.sitofp(power, e.vector(F32))


def _log_ends(e: Emit, x: Value, y: Value) -> Value:
    """y, the logarithm of x, where x is a positive number; else -inf, inf or NaN."""
    b = e.builder
    y = b.select(b.fcmp_ordered("==", x, e.f32s(math.inf)), x, y)
    y = b.select(b.fcmp_ordered("==", x, e.zeros), e.f32s(-math.inf), y)
    return b.select(b.fcmp_unordered("<", x, e.zeros), e.f32s(math.nan), y)


def log(e: Emit, x: Value) -> Value:
    b = e.builder
    f, n = _split(e, x)
    square = b.fmul(f, f)
    low = e.fma(n, e.f32s(LN2[1]), b.fmul(b.fmul(square, f), e.polynomial(LOG, f)))
    low = e.fma(e.f32s(-0.5), square, low)
    return _log_ends(e, x, e.fma(n, e.f32s(LN2[0]), b.fadd(f, low)))


def log2(e: Emit, x: Value) -> Value:
    b = e.builder
    f, n = _split(e, x)
    square = b.fmul(f, f)
    low = e.fma(e.f32s(-0.5), square, b.fmul(b.fmul(square, f), e.polynomial(LOG, f)))
    total = e.fma(f, e.f32s(LOG2E[1]), b.fmul(low, e.f32s(LOG2E[0])))
    return _log_ends(e, x, b.fadd(n, e.fma(f, e.f32s(LOG2E[0]), total)))


def tanh(e: Emit, x: Value) -> Value:
    """A polynomial near 0, else 1 - 2 / (e^2x + 1), which is accurate there."""
    b = e.builder
    square = b.fmul(x, x)
    near = e.fma(b.fmul(e.polynomial(TANH, square), square), x, x)
    size = e.call("fabs", x)
    grown = e.exp2(b.fmul(e.call("minnum", size, e.f32s(10.0)), e.f32s(2 * math.log2(math.e))))
    far = b.fsub(e.f32s(1.0), b.fdiv(e.f32s(2.0), b.fadd(grown, e.f32s(1.0))))
    value = b.select(b.fcmp_ordered("<", size, e.f32s(0.625)), near, e.call("copysign", far, x))
    return b.select(b.fcmp_unordered("uno", x, x), x, value)


def sigmoid(e: Emit, x: Value) -> Value:
    b = e.builder
    return b.fdiv(e.f32s(1.0), b.fadd(e.f32s(1.0), exp(e, b.fneg(x))))


def rsqrt(e: Emit, x: Value) -> Value:
    return e.builder.fdiv(e.f32s(1.0), e.call("sqrt", x))


def sin(e: Emit, x: Value) -> Value:
    return _sine(e, x, 0)


def cos(e: Emit, x: Value) -> Value:
    return _sine(e, x, 1)


def _sine(e: Emit, x: Value, quarter: int) -> Value:
    """sin(x + quarter * pi / 2), by float64; beyond 2^50 it is only bounded."""
    b, wide = e.builder, e.vector(F64)

    def const(value: float) -> Value:
        return ir.Constant(wide, [value] * W)

    def call(name: str, *args: Value) -> Value:
        return e.call(name, *args, suffix=f"v{W}f64")

    def polynomial(coefficients: list[float], square: Value) -> Value:
        total = const(coefficients[0])
        for coefficient in coefficients[1:]:
            total = call("fma", total, square, const(coefficient))
        return total

    big = b.fpext(x, wide)
    whole = call("rint", b.fmul(big, const(1 / HALF_PI[0])))
    whole = b.select(b.fcmp_ordered("<", call("fabs", whole), const(2.0**51)), whole, const(0.0))
    rest = big
    for part in HALF_PI:
        rest = call("fma", b.fneg(whole), const(part), rest)
    inside = b.fcmp_unordered("<=", call("fabs", rest), const(1.0))  # NaN stays
    infinite = b.fcmp_ordered("==", call("fabs", big), const(math.inf))
    rest = b.select(inside, rest, b.select(infinite, const(math.nan), const(0.0)))
    turns = b.trunc(b.fptosi(whole, e.vector(I64)), e.vector(I32))
    turns = b.add(turns, e.i32s(quarter))
    square = b.fmul(rest, rest)
    odd = b.icmp_signed("!=", b.and_(turns, e.i32s(1)), e.i32s(0))
    value = b.select(odd, polynomial(COS, square), b.fmul(rest, polynomial(SIN, square)))
    back = b.icmp_signed("!=", b.and_(turns, e.i32s(2)), e.i32s(0))
    return b.fptrunc(b.select(back, b.fneg(value), value), e.vector(F32))


FUNCTIONS = {
    "exp": exp,
    "exp2": exp2,
    "log": log,
    "log2": log2,
    "tanh": tanh,
    "sigmoid": sigmoid,
    "rsqrt": rsqrt,
    "sin": sin,
    "cos": cos,
    "sqrt": lambda e, x: e.call("sqrt", x),
    "floor": lambda e, x: e.call("floor", x),
    "ceil": lambda e, x: e.call("ceil", x),
}
