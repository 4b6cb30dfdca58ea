"""Loads tiles of K and V from dense, packed or paged memory, plain or quantised, in chunks of columns.

A head dim is split into chunks whose widths are powers of two (576 = 512 + 64, 72 padded to 128); quantised tensors are
split where their scale groups end, so that each row of a chunk has one scale. A chunk of int4 bytes gives two chunks of
elements: the low nibbles and, D / 2 columns further on, the high ones. Where bytes are read two at a time
(`dequant.py`), a chunk gives two chunks of elements: every second column.
"""

import triton.language as tl

import triton

from ...core import storage
from ...core.private.triton import INTERPRETED

UNIT = tl.constexpr(16777216.0)  # biased keys are multiples of 1 / UNIT (`dequant.py`)
LATENT, LATENT_SCALES = tl.constexpr(storage.LATENT), tl.constexpr(storage.LATENT_SCALES)
TYPES = {"f32": tl.float32, "f16": tl.float16, "bf16": tl.bfloat16}


@triton.constexpr_function
def keys_of(spec):
    return spec.keys


@triton.constexpr_function
def values_of(spec):
    return spec.values


@triton.constexpr_function
def queries_of(spec):
    """Queries of a tile; with indices, at most as many as share them."""
    queries = spec.BM // spec.row_groups // spec.pack
    return min(queries, spec.chosen) if spec.chosen else queries


@triton.constexpr_function
def work_type(op):
    return TYPES[op.work]


@triton.constexpr_function
def round_type(spec):
    return TYPES[spec.round]


@triton.constexpr_function
def precision_of(op):
    """`input_precision` of a product. The interpreter always multiplies in float32, and does not know every name."""
    return "ieee" if INTERPRETED else op.precision


@triton.constexpr_function
def is_interpreted():
    return INTERPRETED


@triton.constexpr_function
def width_of(op, i):
    return op.widths[i]


@triton.constexpr_function
def parts_of(op):
    return op.parts


@triton.constexpr_function
def groups_of(op):
    return op.groups


@triton.constexpr_function
def unit_of(op):
    return op.unit


@triton.constexpr_function
def half_of(op, part):
    """Of int4: whether a chunk of elements holds the low (0) or high nibbles (1)."""
    return part // op.unit


@triton.constexpr_function
def first_of(op, i):
    """The first unit of a chunk."""
    return sum(op.widths[:i])


@triton.constexpr_function
def start_of(op, i, part):
    return op.start(i, part)


@triton.constexpr_function
def is_padded(op, i):
    return sum(op.widths[: i + 1]) > op.columns


@triton.constexpr_function
def group_of(op, i, part):
    return op.group_at(i, part)


@triton.constexpr_function
def row_groups_of(op):
    return op.row_groups


@triton.constexpr_function
def leads(op, i, part):
    """Whether this chunk of elements is the first of its scale group."""
    before = (i, part - 1) if part else (i - 1, op.parts - 1)
    return before[0] < 0 or op.group_at(i, part) != op.group_at(*before)


@triton.constexpr_function
def ends(op, i, part):
    """Whether this chunk of elements is the last of its scale group."""
    after = (i, part + 1) if part + 1 < op.parts else (i + 1, 0)
    return after[0] == len(op.widths) or op.group_at(i, part) != op.group_at(*after)


@triton.jit
def power_of_two(x):
    """The largest power of two not above x >= 0; 1 for 0, infinity for infinity."""
    y = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(y == 0, 1.0, y)


@triton.jit
def find_pages(n0, hi, TABLE, S: tl.constexpr, MASKED: tl.constexpr):
    """Page numbers of the tile that begins at key `n0`, by `S.lookup`: one, all of the tile [BK / page], or that of
    each row [BK]; 0 without pages.
    """
    PAGE: tl.constexpr = S.page
    BK: tl.constexpr = S.BK
    if S.lookup == "":
        found = n0 * 0
    else:
        if S.lookup == "tile":
            n = n0 // PAGE
        elif S.lookup == "pages":
            n = n0 // PAGE + tl.arange(0, BK // PAGE)
        else:
            n = (n0 + tl.arange(0, BK)) // PAGE
        if MASKED:
            found = tl.load(TABLE + n, mask=n * PAGE < hi, other=0)
        else:
            found = tl.load(TABLE + n)
    return found


@triton.jit
def tile_rows(n0, found, S: tl.constexpr):
    """Location of a tile's rows: page and slot of the first, then pages and slots of each relative to those."""
    r = tl.arange(0, S.BK)
    page = n0 * 0
    pages = r * 0
    slot = n0
    slots = r
    if S.lookup == "tile":
        page = found
        slot = n0 % S.page
    elif S.lookup != "":
        pages = found
        slot = n0 * 0
        if S.lookup == "pages":
            slots = r % S.page
        else:
            slots = (n0 + r) % S.page
    return page, slot, pages, slots


@triton.jit
def chosen_places(INDICES, count, lo, hi, S: tl.constexpr):
    """Length of a list of blocks, in keys, up to the last block with a key in `lo .. hi`: lists may be padded."""
    blocks = count // S.chosen
    places = blocks * 0
    for i in range(0, blocks, 64):
        at = i + tl.arange(0, 64)
        index = tl.load(INDICES + at, mask=at < blocks, other=-1)
        seen = (index >= 0) & (index * S.chosen < hi) & (index * S.chosen + S.chosen > lo)
        places = tl.maximum(places, tl.max(tl.where(seen, (at + 1) * S.chosen, 0), 0))
    return places


@triton.jit
def chosen_rows(n0, lo, hi, count, INDICES, TABLE, S: tl.constexpr):
    """The keys [BK] at positions `n0 ..` of `count` selected keys, which of them are in `lo .. hi`, and the location of
    their rows as `tile_rows` returns it.
    """
    j = n0 + tl.arange(0, S.BK)
    index = tl.load(INDICES + j // S.chosen, mask=j < count, other=-1)
    n = index * S.chosen + j % S.chosen
    ok = (index >= 0) & (n >= lo) & (n < hi)
    n = tl.where(ok, n, 0)
    pages = n * 0
    slots = n
    if S.page > 0:
        pages = tl.load(TABLE + n // S.page, mask=ok, other=0)
        slots = n % S.page
    return n, ok, (n0 * 0, n0 * 0, pages, slots)


@triton.jit
def row_offsets(where, stride_b, stride_l, ALIGN: tl.constexpr, S: tl.constexpr):
    """Offsets in elements, from the base to the first row and from there to each [BK]; int64: a cache may hold 2**31.

    Strides are multiples of ALIGN, which Triton cannot infer through a reshape.
    """
    PAGE: tl.constexpr = S.page
    BK: tl.constexpr = S.BK
    page, slot, pages, slots = where
    first = tl.cast(slot, tl.int64) * stride_l
    each = slots.to(tl.int64) * stride_l
    if S.lookup == "tile":
        first += page.to(tl.int64) * stride_b
    elif S.lookup == "pages":
        starts = tl.broadcast_to((pages.to(tl.int64) * stride_b)[:, None], [BK // PAGE, PAGE])
        each = tl.multiple_of(each + tl.reshape(starts, [BK]), ALIGN)
    elif S.lookup == "rows":
        each += pages.to(tl.int64) * stride_b
    return first, each


@triton.jit
def load_chunk(base, rows, ok, i: tl.constexpr, OP: tl.constexpr, MASKED: tl.constexpr, TURNED: tl.constexpr):
    """Loads chunk `i`, in storage units, of the rows at offsets `rows`: [BK, W], or [W, BK] if TURNED. Rows that are
    not `ok` and padding give 0.
    """
    first, each = rows
    d = first_of(OP, i) + tl.arange(0, width_of(OP, i))
    inside = d < OP.columns
    if TURNED:
        each, d, ok, inside = each[None, :], d[:, None], ok[None, :], inside[:, None]
    else:
        each, d, ok, inside = each[:, None], d[None, :], ok[:, None], inside[None, :]
    at = (base + first) + (each + d)
    if is_padded(OP, i):
        if MASKED:
            x = tl.load(at, mask=ok & inside, other=0)
        else:
            x = tl.load(at, mask=inside, other=0)
    else:
        if MASKED:
            x = tl.load(at, mask=ok, other=0)
        else:
            x = tl.load(at)
    return x


@triton.constexpr_function
def rest_width(op):
    return max(16, 1 << (op.rest - 1).bit_length())


@triton.constexpr_function
def rest_type(spec):
    """Operand type for the bfloat16 elements of a latent row: bfloat16 if q is, else float32."""
    return tl.bfloat16 if spec.round == "bf16" else tl.float32


@triton.constexpr_function
def rest_precision(spec):
    """Different 16-bit types are multiplied in TF32, which holds both exactly."""
    return "ieee" if INTERPRETED else "tf32" if spec.ptx and spec.round == "f16" else spec.keys.precision


@triton.jit
def scales_in_row(row, UNIT: tl.constexpr = 1):
    """Pointer to the scales of a latent row; `row` points to its first unit of UNIT bytes."""
    return (row + LATENT // UNIT).to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def load_rest(base, rows, ok, OP: tl.constexpr, TYPE: tl.constexpr, MASKED: tl.constexpr):
    """The bfloat16 elements of latent rows: [BK, W]. Loaded as bits: the interpreter has no bfloat16."""
    first, each = rows
    d = tl.arange(0, rest_width(OP))
    inside = (d < OP.rest)[None, :]
    if MASKED:
        inside = inside & ok[:, None]
    at = base + (LATENT + LATENT_SCALES) // OP.unit
    if OP.unit == 1:
        at = at.to(tl.pointer_type(tl.int16), bitcast=True)
        first, each = first // 2, each // 2
    bits = tl.load(at + first + (each[:, None] + d[None, :]), mask=inside, other=0)
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True).to(TYPE)


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
    """The scale of each element of a chunk that spans scale groups: float32 [BK, W]."""
    first, each = rows
    d = start_of(OP, i, 0) + tl.arange(0, width_of(OP, i))
    group = (d + part * OP.columns) // OP.group
    inside = (d < OP.columns)[None, :]
    if MASKED:
        inside = inside & ok[:, None]
    x = tl.load(base + first + each[:, None] + group[None, :], mask=inside, other=0.0)
    return x.to(tl.float32)
