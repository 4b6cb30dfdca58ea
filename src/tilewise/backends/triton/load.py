"""Tiles of K and V: from dense, packed or paged memory, plain or quantised, in chunks of columns.

A head dim is cut into chunks whose widths are powers of two (576 = 512 + 64, 72 = 64 + 8 padded to 16); quantised
tensors are cut where their scale groups end, so that one scale belongs to each row of a chunk. A chunk of int4 bytes
gives two chunks of elements: the low halves and, D / 2 further on, the high ones.
"""

import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret
TYPES = {"f32": tl.float32, "f16": tl.float16, "bf16": tl.bfloat16}


@triton.constexpr_function
def keys_of(spec):
    return spec.keys


@triton.constexpr_function
def values_of(spec):
    return spec.values


@triton.constexpr_function
def work_type(op):
    return TYPES[op.work]


@triton.constexpr_function
def round_type(spec):
    return TYPES[spec.round]


@triton.constexpr_function
def precision_of(op):
    """The interpreter multiplies in float32 whatever it is told, and does not know every name."""
    return "ieee" if INTERPRETED else op.precision


@triton.constexpr_function
def width_of(op, i):
    return op.widths[i]


@triton.constexpr_function
def parts_of(op):
    return op.parts


@triton.constexpr_function
def start_of(op, i, part):
    """The first column of a chunk of elements."""
    return sum(op.widths[:i]) + part * op.columns


@triton.constexpr_function
def is_padded(op, i):
    return sum(op.widths[: i + 1]) > op.columns


@triton.constexpr_function
def group_of(op, i, part):
    """The scale group of a chunk of elements that lies in one."""
    return (sum(op.widths[:i]) + part * op.columns) // op.group


@triton.jit
def power_of_two(x):
    """The largest power of two that x >= 0 holds; 1 for 0. For infinity infinity."""
    y = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(y == 0, 1.0, y)


@triton.jit
def load_rows(base, ok, S: tl.constexpr):
    """The rows of q that go with the chunks of k, a tuple of [BM, W], and what each row was divided by [BM].

    `base` [BM] points to each row. To meet quantised keys in float16, rows of bfloat16 are brought to a largest number
    of 2**14: what then falls below float16's range is under 2**-28 of it.
    """
    OP: tl.constexpr = keys_of(S)
    raw = ()
    top = ok.to(tl.float32) * 0.0
    for i in tl.static_range(len(OP.widths)):
        for part in tl.static_range(parts_of(OP)):
            d = tl.arange(0, width_of(OP, i))
            inside = ok[:, None] & (d < OP.columns - start_of(OP, i, 0))[None, :]
            x = tl.load(base[:, None] + start_of(OP, i, part) + d[None, :], mask=inside, other=0.0)
            raw = raw + (x,)
            if OP.rescaled:
                top = tl.maximum(top, tl.max(tl.abs(x.to(tl.float32)), 1))
    factor = tl.maximum(power_of_two(top), 1e-30) * (1.0 / 16384.0)
    chunks = ()
    for i in tl.static_range(len(OP.widths) * parts_of(OP)):
        x = raw[i]
        if OP.rescaled:
            x = x.to(tl.float32) / factor[:, None]
        x = x.to(work_type(OP))
        if S.negate:
            x = -x
        chunks = chunks + (x,)
    return chunks, factor


@triton.jit
def tile_rows(n0, hi, TABLE, BK: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr):
    """Where rows `n0 .. n0 + BK` lie: the page and slot of the first, and those of each from there, 0 or [BK]."""
    r = tl.arange(0, BK)
    page = n0 * 0
    pages = r * 0
    slot = n0
    slots = r
    if PAGE > 0:
        if PAGE % BK == 0:  # the tile lies in one page
            page = tl.load(TABLE + n0 // PAGE)
            slot = n0 % PAGE
        else:
            n = n0 + r
            if MASKED:
                pages = tl.load(TABLE + n // PAGE, mask=n < hi, other=0)
            else:
                pages = tl.load(TABLE + n // PAGE)
            slot = n0 * 0
            slots = n % PAGE
    return page, slot, pages, slots


@triton.jit
def row_offsets(where, stride_b, stride_l, BK: tl.constexpr, PAGE: tl.constexpr):
    """Elements from the base to the first row, and from there to each [BK]; in 64 bits, a cache may hold 2**31."""
    page, slot, pages, slots = where
    first = tl.cast(slot, tl.int64) * stride_l
    each = slots.to(tl.int64) * stride_l
    if PAGE > 0:
        if PAGE % BK == 0:
            first += page.to(tl.int64) * stride_b
        else:
            each += pages.to(tl.int64) * stride_b
    return first, each


@triton.jit
def load_chunk(base, rows, ok, i: tl.constexpr, OP: tl.constexpr, MASKED: tl.constexpr):
    """Chunk `i` of the rows at offsets `rows`: [BK, W]; rows that are not `ok` and padding give 0."""
    first, each = rows
    d = start_of(OP, i, 0) + tl.arange(0, width_of(OP, i))
    at = (base + first) + (each[:, None] + d[None, :])
    if is_padded(OP, i):
        if MASKED:
            x = tl.load(at, mask=ok[:, None] & (d < OP.columns)[None, :], other=0)
        else:
            x = tl.load(at, mask=(d < OP.columns)[None, :], other=0)
    else:
        if MASKED:
            x = tl.load(at, mask=ok[:, None], other=0)
        else:
            x = tl.load(at)
    return x


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


@triton.constexpr_function
def ptx_of(op, part):
    return {"int8": INT8_PTX, "fp8": FP8_PTX, "int4": (LOW_PTX, HIGH_PTX)[part]}[op.kind].value


@triton.jit
def widened(raw, part: tl.constexpr, OP: tl.constexpr, TYPE: tl.constexpr):
    """Stored numbers as TYPE, exactly; of int4, the low (part 0) or high (part 1) halves of each byte."""
    if OP.fast:
        x = tl.inline_asm_elementwise(ptx_of(OP, part), "=r,=r,r", [raw], tl.float16, is_pure=True, pack=4).to(TYPE)
    elif OP.kind == "int4":
        if part == 0:
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


@triton.jit
def row_scales(base, rows, ok, group: tl.constexpr, MASKED: tl.constexpr):
    """The scale of each row for one group: float32 [BK]."""
    first, each = rows
    if MASKED:
        x = tl.load(base + first + each + group, mask=ok, other=0.0)
    else:
        x = tl.load(base + first + each + group)
    return x.to(tl.float32)


@triton.jit
def element_scales(base, rows, ok, i: tl.constexpr, part: tl.constexpr, OP: tl.constexpr, MASKED: tl.constexpr):
    """The scale of each element of a chunk that crosses groups: float32 [BK, W]."""
    first, each = rows
    d = start_of(OP, i, 0) + tl.arange(0, width_of(OP, i))
    group = (d + part * OP.columns) // OP.group
    inside = (d < OP.columns)[None, :]
    if MASKED:
        inside = inside & ok[:, None]
    x = tl.load(base + first + each[:, None] + group[None, :], mask=inside, other=0.0)
    return x.to(tl.float32)
