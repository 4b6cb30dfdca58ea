"""Which keys a query row sees, on the device: by rules and by a dense mask.

Causal, window, chunk and length rules leave one interval of keys to each row (see `gpu/mask_rules.py`),
so two vectors `row_lo`, `row_hi` `[BM]` hold all of them, and a cell is visible when `row_lo <= n < row_hi`.
"""

import triton.language as tl

import triton

from ..gpu.mask_rules import visible_by_position
from .mod_operations import apply_mods

# Loads one mask cell in the thread that needs it. `tl.load` would impose its coalesced layout: the whole softmax would
# run in that layout and, for the products, in the MMA layout too, and each product would be waited for (h200 24).
CELL_PTX: tl.constexpr = tl.constexpr({
    8: "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.u8 $0, [$1]; }",
    16: "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b16 $0, 0; @p ld.global.nc.u16 $0, [$1]; }",
    32: "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.u32 $0, [$1]; }",
})  # fmt: skip


@triton.constexpr_function
def cell_ptx(bits):
    return CELL_PTX.value[bits]


@triton.jit
def load_cells(at, read, S: tl.constexpr):
    """The cells at pointers `at` [BM, BK], bytes or floats; 0 where `read` is false."""
    TYPE: tl.constexpr = at.dtype.element_ty
    if not S.ptx:
        x = tl.load(at, mask=read, other=0)
    else:
        given = [at.to(tl.int64), read.to(tl.int32)]
        ptx: tl.constexpr = cell_ptx(TYPE.primitive_bitwidth)
        if TYPE.primitive_bitwidth == 8:
            x = tl.inline_asm_elementwise(ptx, "=r,l,r", given, tl.int32, is_pure=True, pack=1)
        elif TYPE.primitive_bitwidth == 16:
            x = tl.inline_asm_elementwise(ptx, "=h,l,r", given, tl.int16, is_pure=True, pack=1)
            x = x.to(TYPE, bitcast=True)
        else:
            x = tl.inline_asm_elementwise(ptx, "=r,l,r", given, tl.int32, is_pure=True, pack=1)
            x = x.to(TYPE, bitcast=True)
    return x


@triton.jit
def visible_cells(s, n, ok, read, lo, hi, at, stride_k, S: tl.constexpr):
    """Scores with a float mask added, and which cells are visible. Rows and keys `n` broadcast, one as a column, the
    other as a row. `lo`, `hi`: each row's key span; `at`: pointer to its first mask cell; only cells in `read` are
    loaded.
    """
    visible = ok & (n < hi)
    if S.rules.hides_left:
        visible = visible & (n >= lo)
    if S.mask != "":
        cell = load_cells(at + n.to(tl.int64) * stride_k, read, S)
        if S.mask == "bool":
            visible = visible & (cell != 0)
        else:
            bias = cell.to(tl.float32)
            s = s + bias
            visible = visible & (bias != float("-inf"))
    return s, visible


@triton.jit
def select_visible(s, n, ok, row_lo, row_hi, mask, cells, S: tl.constexpr):
    """Adds a float mask, applies functions of the user, selects -inf where a cell is hidden (never adds it); also
    returns visible cells [BM, BK].
    """
    at, row_ok, stride_k, tree, own_keys, nodes = mask  # [BM] pointers to each row's first cell
    keys_ok, ok = ok, ok[None, :]
    s, visible = visible_cells(
        s, n[None, :], ok, row_ok[:, None] & ok, row_lo[:, None], row_hi[:, None], at[:, None], stride_k, S
    )
    if S.tree:
        visible = visible & tree_cells(tree[:, None], n[None, :] - own_keys, row_ok[:, None] & ok, S.ptx)
    if S.positions:
        at, qpos, numbers = nodes
        own = n >= own_keys
        kpos = node_position(at, n - own_keys, own & keys_ok, own_keys)
        visible = visible & (visible_by_position(qpos[:, None], kpos[None, :], numbers, S) | ~own[None, :])
    if S.mods is not None:
        s, visible = apply_mods(s, visible, cells, S)
    return tl.where(visible, s, float("-inf")), visible


@triton.jit
def tree_cells(at, column, ok, OPAQUE: tl.constexpr):
    """What a tree mask leaves: `at` points to each row's first cell, columns below 0 are of keys before it.

    From a load of bytes the compiler infers an operand layout for bytes (`kWidth`) for the products that follow. Keys
    are then added up in another order than in loops without a tree, and bits differ where the fix-up runs. OPAQUE hides
    the load behind an instruction that the compiler does not look through.
    """
    x = tl.load(at + column, mask=ok & (column >= 0), other=1).to(tl.int32)
    if OPAQUE:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.int32, is_pure=False, pack=1)
    return x != 0


@triton.jit
def node_position(at, node, ok, own_keys):
    """Positions of tree nodes, clamped to `own_keys`: none is before the keys that precede the tree."""
    return tl.maximum(tl.load(at + node, mask=ok, other=0), own_keys)


@triton.jit
def find_sequence(CU, tile, batch, BQ: tl.constexpr):
    """The sequence of packed tile `tile`, by binary search; `batch` for rows past the last one.

    Sequence b gets the tiles from `CU[b] // BQ + b` on. That is never too few, so the grid needs no lengths.
    """
    low, high = 0, batch + 1
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(CU + middle) // BQ + middle
        if first <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def find_ordered(ORDER, tile, batch):
    """The same in varlen order (`gpu/varlen_order.py`): the sequence, and the number of tiles before its first."""
    low, high = 0, batch + 1
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(ORDER + batch + 1 + middle) <= tile:
            low = middle
        else:
            high = middle
    return tl.load(ORDER + low), tl.load(ORDER + batch + 1 + low)
