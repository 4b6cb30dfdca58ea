"""Dequantises elements of quantised caches in registers, for the products; and quantises them, for writes.

From shared memory to MMA operand registers, bytes go one by one and 16-bit numbers eight at a time. So bytes are read
in units of two where a chunk holds enough of them. Each byte of a unit gives its own chunk: every second column of K,
multiplied with every second column of q, or every second column of the output.

A half with the high bits of 1024 and u in its low bits is 1024 + u: one instruction puts u = x + bias there (two's
complement with its sign bit flipped), another subtracts. Biased keys skip the subtraction: with no high bits set the
half is u / 2**24, a small number that tensor cores multiply exactly. The bias adds 8 times the sum of q to a dot
product, so accumulators start from minus that (`q_load.py: key_bias`). Only where no tile is ever recomputed by another
loop, which would give other bits.
"""

import triton.language as tl

import triton

from ...core.storage import FORMATS, LEVEL_WORDS, MIDPOINTS

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: a float32 of that size has no fraction, so adding it rounds to even
# Bits of an element, and the half with its high bits to set and sign bit to flip, which is subtracted afterwards.
CODES = {"int8": ("FF", "6480"), "int4": ("0F", "6408")}


@triton.constexpr_function
def bytes_ptx(kind, half):
    """PTX: four bytes to four halves; of int4 their low or high nibbles."""
    if kind == "fp8_e4m3":
        return "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"
    mask, code = CODES[kind]
    flip = code[2:] * 4
    unpack = "".join(f"prmt.b32 ${i}, x, 0x64646464, 0x{order};" for i, order in enumerate(("4140", "4342")))
    less = "".join(f"sub.rn.f16x2 ${i}, ${i}, x;" for i in range(2))
    return (
        f"{{ .reg .b32 x; shr.b32 x, $2, {4 * half}; lop3.b32 x, x, 0x{mask * 4}, 0x{flip}, 0x6A; {unpack}"
        f" mov.b32 x, 0x{code * 2}; {less} }}"
    )


@triton.constexpr_function
def pairs_ptx(kind, byte, half, biased):
    """PTX: byte `byte` of two units of two bytes to two halves; of int4 its low or high nibble."""
    if kind == "fp8_e4m3":
        return (
            "{ .reg .b32 x; .reg .b16 a, b; prmt.b32 x, $1, 0, 0x3120; mov.b32 {a, b}, x;"
            f" cvt.rn.f16x2.e4m3x2 $0, {'ab'[byte]}; }}"
        )
    mask, code = CODES[kind]
    if half:  # the high nibble stays in place: 16 u
        mask, code = "F0", "6480"
    if biased:
        code = f"00{code[2:]}"
    bits = f"shr.b32 x, $1, {8 * byte}; lop3.b32 x, x, 0x{f'00{mask}' * 2}, 0x{code * 2}, 0x6A;"
    if biased:
        rest = "mov.b32 $0, x;"
    elif half:  # (1024 + 16 u) / 16 - (64 + 8)
        rest = "mov.b32 y, 0x2C002C00; mov.b32 z, 0xD480D480; fma.rn.f16x2 $0, x, y, z;"
    else:
        rest = f"mov.b32 y, 0x{code * 2}; sub.rn.f16x2 $0, x, y;"
    return f"{{ .reg .b32 x, y, z; {bits} {rest} }}"


@triton.constexpr_function
def level_word(i):
    return LEVEL_WORDS[i]


@triton.jit
def level(code):
    """The value of a 4-bit codebook index: a byte of one of two words, and a sign."""
    word = tl.where((code & 4) != 0, level_word(1), level_word(0)).to(tl.uint32)
    x = ((word >> ((code & 3) * 8)) & 255).to(tl.float32)
    return tl.where((code & 8) != 0, -x, x)


@triton.jit
def widened(raw, part: tl.constexpr, OP: tl.constexpr, TYPE: tl.constexpr):
    """Dequantises part `part` of stored units to TYPE, exactly: one byte of each, or of int4 its low or high nibble.
    Biased keys keep their bias.
    """
    byte: tl.constexpr = part % OP.unit
    half: tl.constexpr = part // OP.unit
    if OP.fast:
        if OP.unit == 2:
            ptx: tl.constexpr = pairs_ptx(OP.kind, byte, half, OP.biased)
            x = tl.inline_asm_elementwise(ptx, "=r,r", [raw], tl.float16, is_pure=True, pack=2)
        else:
            ptx: tl.constexpr = bytes_ptx(OP.kind, half)
            x = tl.inline_asm_elementwise(ptx, "=r,=r,r", [raw], tl.float16, is_pure=True, pack=4)
        x = x.to(TYPE)
    elif OP.biased:
        bits = ((raw >> (8 * byte)) & (15 << (4 * half))) ^ (8 << (4 * half))
        x = bits.to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        if OP.unit == 2:
            raw = ((raw >> (8 * byte)) & 255).to(tl.uint8)
            if OP.kind == "int8":
                raw = raw.to(tl.int8, bitcast=True)
        if OP.kind == "int4":
            x = ((((raw >> (4 * half)) & 15) ^ 8).to(tl.int16) - 8).to(tl.float32).to(TYPE)
        elif OP.kind == "codebook4":
            x = level(((raw >> (4 * half)) & 15).to(tl.uint32)).to(TYPE)
        elif OP.kind == "fp8_e4m3":
            # float8_e4m3 is a half with a short exponent: 2**8 makes up for the difference of the two biases.
            low = (raw & 127).to(tl.uint16) << 7
            sign = (raw & 128).to(tl.uint16) << 8
            x = (low | sign).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
            x = tl.where((raw & 127) == 127, float("nan"), x).to(TYPE)
        else:
            x = raw.to(tl.float32).to(TYPE)
    return x


@triton.constexpr_function
def largest_of(kind):
    return FORMATS[kind].largest


@triton.constexpr_function
def is_packed(kind):
    """Whether a byte holds two elements."""
    return FORMATS[kind].packing == 2


@triton.jit
def round_to_int(x):
    """To the nearest integer, ties to even; NaN to 0."""
    return tl.where(x == x, (x + ROUND) - ROUND, 0.0).to(tl.int32)


@triton.jit
def float8_bits(x):
    """float32 to float8_e4m3fn, to nearest even, as int32; out of range becomes NaN."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # Normal numbers: the exponent's bias changes from 127 to 7, and 20 bits are rounded off.
    normal = (magnitude + ((magnitude >> 20) & 1) + (0x7FFFF - (120 << 23))) >> 20
    # Below 2^-6 (subnormal): added to 2^14, a float32 has its last bit at 2^-9, as this type does.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
    value = tl.where(magnitude < (121 << 23), small, normal)
    return tl.where(magnitude >= (1087 << 20), 0x7F, value) | sign


@triton.jit
def bfloat16_bits(x):
    """float32 to bfloat16, to nearest even, as uint16. Not by Triton's cast, which the interpreter rounds down."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
    return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16)


@triton.jit
def stored(steps, KIND: tl.constexpr):
    """Elements, already divided by their scales, in the storage type."""
    if KIND == "int8":
        x = round_to_int(steps).to(tl.int8)
    else:
        tl.static_assert(KIND == "fp8_e4m3")
        x = float8_bits(steps).to(tl.uint8)
    return x


@triton.jit
def stored_pair(low, high, KIND: tl.constexpr):
    """The same for pairs of elements, packed in a byte."""
    if KIND == "codebook4":
        x = level_code(low) | (level_code(high) << 4)
    else:
        tl.static_assert(KIND == "int4")
        x = (round_to_int(low) & 15) | (round_to_int(high) << 4)
    return x.to(tl.uint8)


@triton.constexpr_function
def midpoint(i):
    return MIDPOINTS[i]


@triton.jit
def level_code(x):
    """The sign and index of the nearest codebook level, as int32; 0 for NaN."""
    code = tl.where(x < 0, 8, 0)
    for i in tl.static_range(7):
        code += (tl.abs(x) > midpoint(i)).to(tl.int32)
    return code
