"""Stored numbers of quantised caches to numbers that can be multiplied, in registers.

From shared memory to where the tensor cores want them, bytes go one by one and 16-bit numbers eight at a time. So bytes
are read in units of two where a chunk holds enough of them, and each byte of a unit gives a chunk of its own: every
second column of K, which meets every second column of q, or every second column of the output. fp8, 128 columns: 835
instructions for a tile of 128 keys, 1102 with bytes.
"""

import triton
import triton.language as tl

# Four bytes of int8 to four halves: u = x + 128 in the low byte of 0x64uu is the half 1024 + u.
INT8_PTX: tl.constexpr = tl.constexpr("""{
    .reg .b32 x;
    xor.b32 x, $2, 0x80808080;
    prmt.b32 $0, x, 0x64646464, 0x4140;
    prmt.b32 $1, x, 0x64646464, 0x4342;
    mov.b32 x, 0x64806480;
    sub.rn.f16x2 $0, $0, x;
    sub.rn.f16x2 $1, $1, x;
}""")
# The same for the low and the high halves of four bytes of int4: u = (x & 15) ^ 8 is x + 8.
LOW_PTX: tl.constexpr = tl.constexpr("""{
    .reg .b32 x;
    lop3.b32 x, $2, 0x0F0F0F0F, 0x08080808, 0x6A;
    prmt.b32 $0, x, 0x64646464, 0x4140;
    prmt.b32 $1, x, 0x64646464, 0x4342;
    mov.b32 x, 0x64086408;
    sub.rn.f16x2 $0, $0, x;
    sub.rn.f16x2 $1, $1, x;
}""")
HIGH_PTX: tl.constexpr = tl.constexpr("""{
    .reg .b32 x;
    shr.b32 x, $2, 4;
    lop3.b32 x, x, 0x0F0F0F0F, 0x08080808, 0x6A;
    prmt.b32 $0, x, 0x64646464, 0x4140;
    prmt.b32 $1, x, 0x64646464, 0x4342;
    mov.b32 x, 0x64086408;
    sub.rn.f16x2 $0, $0, x;
    sub.rn.f16x2 $1, $1, x;
}""")
FP8_PTX: tl.constexpr = tl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")


# The same for units of two bytes, of which one register holds two: byte `part` of each (of int4 the low halves for
# parts 0 and 1, the high ones for 2 and 3).
@triton.constexpr_function
def pair_ptx(kind, part):
    byte, half = part % 2, part // 2
    if kind == "fp8":
        text = f"prmt.b32 x, $1, 0, 0x00{2 + byte}{byte}; mov.b32 {{low, high}}, x; cvt.rn.f16x2.e4m3x2 $0, low;"
    else:
        mask, code = {"int8": ("00FF", "6480"), "int4": (("000F", "6408"), ("00F0", "6480"))[half]}[kind]
        text = f"shr.b32 x, $1, {8 * byte}; lop3.b32 x, x, 0x{mask * 2}, 0x{code * 2}, 0x6A; mov.b32 y, 0x{code * 2};"
        text += " sub.rn.f16x2 $0, x, y;"
        if half == 1:  # 1024 + 16 u for u = x + 8: a sixteenth of it, less 64 + 8
            text = text[: text.index("mov")] + "mov.b32 y, 0x2C002C00; mov.b32 z, 0xD480D480; fma.rn.f16x2 $0, x, y, z;"
    return "{ .reg .b32 x, y, z; .reg .b16 low, high; " + text + " }"


@triton.constexpr_function
def ptx_of(op, part):
    if op.unit == 2:
        return pair_ptx(op.kind, part)
    return {"int8": INT8_PTX, "fp8": FP8_PTX, "int4": (LOW_PTX, HIGH_PTX)[part]}[op.kind].value


@triton.jit
def widened(raw, part: tl.constexpr, OP: tl.constexpr, TYPE: tl.constexpr):
    """Part `part` of stored units as TYPE, exactly: a byte of each, or of int4 the low or high half of one."""
    half: tl.constexpr = part // OP.unit
    if OP.fast:
        ptx: tl.constexpr = ptx_of(OP, part)
        if OP.unit == 2:
            x = tl.inline_asm_elementwise(ptx, "=r,r", [raw], tl.float16, is_pure=True, pack=2)
        else:
            x = tl.inline_asm_elementwise(ptx, "=r,=r,r", [raw], tl.float16, is_pure=True, pack=4)
        x = x.to(TYPE)
    else:
        if OP.unit == 2:
            raw = ((raw >> (8 * (part % 2))) & 255).to(tl.uint8)
            if OP.kind == "int8":
                raw = raw.to(tl.int8, bitcast=True)
        if OP.kind == "int4":
            if half == 0:
                x = (((raw & 15) ^ 8).to(tl.int16) - 8).to(tl.float32).to(TYPE)
            else:
                x = (((raw >> 4) ^ 8).to(tl.int16) - 8).to(tl.float32).to(TYPE)
        elif OP.kind == "fp8":
            # float8_e4m3 is a half with a short exponent: 2**8 makes up for the difference of the two biases.
            low = (raw & 127).to(tl.uint16) << 7
            sign = (raw & 128).to(tl.uint16) << 8
            x = (low | sign).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
            x = tl.where((raw & 127) == 127, float("nan"), x).to(TYPE)
        else:
            x = raw.to(tl.float32).to(TYPE)
    return x
