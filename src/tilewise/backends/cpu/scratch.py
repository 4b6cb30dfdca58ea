"""A thread's scratch memory: its parts and their sizes, declared once; `partition` places them."""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False, disallow-untyped-calls=False
from __future__ import annotations

from collections import namedtuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from .codegen.numba_ops import ONE, jit
from .codegen.vector import I64, W
from .config import DECODE_ROWS, DECODE_TILE_KEYS, HEAD_BATCH_BYTES, PREFETCH_BYTE_KEYS
from .gemm.amx import BLOCK
from .gemm.fp32 import KEYS, PANEL
from .params import CACHE_LINE, SELECTED_BYTES

# np.int64, not int: Numba would compile a function again for every literal argument.
PAD = np.int64(24)  # address tables are padded to a multiple of KEYS and of KEY_PAD
CHUNK = np.int64(48)  # keys that are summed at once in P V
TAIL = np.int64(32)  # extra keys that the last decode tile of a sequence may have
SCORES = np.int64(DECODE_TILE_KEYS + TAIL)  # of a row in a decode tile
PANEL_ = np.int64(PANEL)
GROUPS = 18  # most scales of a row
HEAD_BATCH, WORD, ZERO_BYTES = np.int64(HEAD_BATCH_BYTES), np.int64(8), np.int64(0)
Scratch = namedtuple(
    "Scratch",
    "acc k_table v_table k_next v_next next_count k_scales v_scales m l alpha slopes lo hi positions heads some_lo "
    "some_hi all_lo all_hi mask_rows mask_columns states mod_state selected selected_order selected_count done "
    "downscaled row_sums derivatives q s keys values packed nonfinite weights",
)
TileScratch = namedtuple("TileScratch", "q acc s p sums k v rows")  # replaces Scratch.q and the parts after it
BackwardScratch = namedtuple(
    "BackwardScratch",
    "table m l slopes lo hi positions heads some_lo some_hi all_lo all_hi first_row last_row mask_rows mask_columns "
    "states mod_state own item selected entries unselected distances slope_sums derivatives q_rows dout_rows q dout s "
    "ds dcap keys finite_keys values dk dv block_dk block_dv",
)


@register_jitable(error_model="numpy")  # Python calls it too, without compiling it
def round_up(n, to):
    """n rounded up to a multiple of `to`; in kernels also `up`."""
    return (n + to - 1) // to * to


@register_jitable(error_model="numpy")
def table_size(tile_keys):
    """Bytes of the address table of a tile's rows."""
    return 8 * (tile_keys + TAIL + PAD + PREFETCH_BYTE_KEYS)  # which is over KEYS


def scratch_sizes(heads, kv_heads, head_dim, value_dim, tile_rows, tile_keys, head_batch, decode_rows, selected):
    """Bytes of each part. Those from q on are only for the fp32 mainloops."""
    rows = max(round_up(heads // kv_heads * tile_rows, PANEL), DECODE_ROWS)
    decoded = min(rows, decode_rows)  # rows of one head
    D, Dv = round_up(head_dim, W), round_up(value_dim, W)
    keys = tile_keys + TAIL + PAD
    each_row = 4 * rows  # float32 or int32
    return Scratch(
        acc=4 * rows * Dv,  # [rows, Dv]
        k_table=head_batch * table_size(tile_keys),  # addresses of rows, and of rows to prefetch, for each head
        v_table=head_batch * table_size(tile_keys),
        k_next=8 * keys,  # addresses of the next tile's rows
        v_next=8 * keys,
        next_count=WORD,  # how many of them
        k_scales=4 * keys * GROUPS,  # [groups, keys]
        v_scales=4 * keys * GROUPS,
        m=each_row,  # [rows]: running max
        l=each_row,  # row sums
        alpha=each_row,  # rescale factors
        slopes=each_row,  # of ALiBi
        lo=each_row,  # key spans
        hi=each_row,
        positions=each_row,  # of queries
        heads=each_row,  # likewise
        some_lo=each_row,  # keys that any row of a block of ROWS sees
        some_hi=each_row,
        all_lo=each_row,  # keys that all rows of a vector see
        all_hi=each_row,
        mask_rows=4 * W * keys,  # [W, keys], of one vector of query rows
        mask_columns=4 * W * keys,  # [keys, W]
        states=8 * heads,  # of the mask's tile
        mod_state=WORD,  # of mask_mod's tile
        selected=SELECTED_BYTES * selected,  # selected keys: see `mainloop/selected_keys.py`
        selected_order=4 * selected,
        selected_count=WORD,
        done=WORD,  # whether the mainloop by tiles could process the item
        downscaled=WORD,  # whether weights are downscaled (`nonfinite.py`)
        row_sums=4 * PANEL,  # of a tile's weights
        derivatives=ZERO_BYTES,  # of functions of the user: of the backward pass
        q=4 * rows * D,  # [panels, D, PANEL], or [rows, D] in decode
        s=4 * max(keys * PANEL, head_batch * decoded * SCORES),  # [keys, PANEL] of one panel, or [rows, keys]
        keys=4 * keys * D,  # [keys, D], converted to float32
        values=4 * keys * Dv,  # [keys, Dv], converted to float32
        # V in strips of columns; decode's queries as tiles, limbs or pairs
        packed=max(4 * keys * Dv, min(4 * rows * D, HEAD_BATCH), 2 * decoded * D),
        nonfinite=4 * keys * Dv,  # V's non-finite values
        weights=4 * SCORES * DECODE_ROWS * ((value_dim + 31) // 32),  # [groups, rows, keys]
    )


def backward_sizes(heads, kv_heads, head_dim, value_dim, tile_rows, tile_keys, selected, derivatives):
    """Bytes of each part, for the backward pass. `selected`: 1 with key indices, else 0; `derivatives`: vectors for a
    key of a vector of rows.
    """
    rows = round_up(heads // kv_heads * tile_rows, PANEL)
    D, Dv, keys = round_up(head_dim, W), round_up(value_dim, W), round_up(tile_keys, KEYS)
    each_row, cells = 4 * rows, 4 * keys * rows
    return BackwardScratch(
        table=8 * keys,  # addresses of rows
        m=each_row,  # lse
        l=each_row,  # delta
        slopes=each_row,
        lo=each_row,
        hi=each_row,
        positions=each_row,
        heads=each_row,
        some_lo=each_row,
        some_hi=each_row,
        all_lo=each_row,
        all_hi=each_row,
        first_row=8 * keys,  # for each block of KEYS keys: the rows that see any of them
        last_row=8 * keys,
        mask_rows=4 * W * (keys + W),
        mask_columns=4 * W * (keys + W),
        states=8 * heads,
        mod_state=WORD,
        own=WORD,  # the address of the thread's memory for gradients of captured tensors
        item=WORD,  # the number of the work item
        selected=selected * SELECTED_BYTES * keys,  # see `mainloop/backward_selected.py`, as the next two
        entries=selected * 4 * keys,
        unselected=selected * cells,  # [vectors of rows, keys, W]
        distances=each_row,  # for each row: its sum of dS |qpos - kpos|
        slope_sums=4 * heads,
        derivatives=derivatives * 4 * W * (keys + W),  # of a vector of rows, [keys, derivatives, W]: `mod_gradients.py`
        q_rows=each_row * (D + W),  # [rows, D], or pairs of bf16 rows, then the rows
        dout_rows=each_row * (Dv + W),
        q=each_row * D,  # [panels, D, PANEL]
        dout=each_row * Dv,
        s=cells,  # [keys, rows]: scores, then P
        ds=cells,  # dP, then dS
        dcap=cells,  # softcap's derivative
        keys=4 * keys * D,  # [keys, D]
        finite_keys=4 * keys * D,  # non-finite values replaced by 0
        values=4 * keys * Dv,
        dk=4 * keys * D,
        dv=4 * keys * Dv,
        block_dk=selected * 4 * keys * D,  # of all keys of a block, where dk and dv are those of selected ones
        block_dv=selected * 4 * keys * Dv,
    )


def backward_scratch_bytes(p):
    """Bytes of a thread's scratch memory in a backward pass with these `Params`."""
    cut = p.tile_rows, p.tile_keys, min(p.max_selected, 1), p.mod_vectors
    sizes = backward_sizes(p.heads, p.kv_heads, p.head_dim, p.value_dim, *cut)
    return int(sum(sizes) + CACHE_LINE * (len(sizes) + 1))


def tile_sizes(heads, kv_heads, head_dim, value_dim, tile_rows, tile_keys, parts):
    """Bytes of each part of the mainloop by tiles; numbers are split into `parts` bf16 parts."""
    rows = round_up(heads // kv_heads * tile_rows, BLOCK)
    D, Dv = round_up(head_dim, BLOCK), round_up(value_dim, BLOCK)
    keys = round_up(tile_keys, BLOCK)
    return TileScratch(
        q=2 * parts * rows * D,  # [parts, panels, D / 2, 32] pairs
        acc=4 * rows * Dv,  # [panels, Dv, 32]
        s=4 * 2 * keys * BLOCK,  # [2 panels, 2 halves, keys, 16]
        p=2 * 2 * parts * keys * BLOCK,  # [parts, 2 panels, keys / 2, 32] pairs
        sums=4 * BLOCK * BLOCK,
        k=2 * parts * keys * D,  # [parts, keys, D]
        v=2 * parts * keys * Dv,  # [parts, Dv, keys]
        rows=(4 + 2 * parts * BLOCK) * max(D, Dv),  # a float32 row, then [parts, 32, D or Dv] bf16
    )


def scratch_bytes(p, parts):
    """Bytes of a thread's scratch memory in a call with these `Params`; `parts` as in `config.tiled_prefill`."""
    call = p.heads, p.kv_heads, p.head_dim, p.value_dim, p.tile_rows, p.tile_keys
    sizes = scratch_sizes(*call, p.head_batch, p.decode_rows, p.max_selected)
    tiles = tile_sizes(*call, parts) if parts else (0,)
    first = Scratch._fields.index("q")  # from here on tiles have their own parts
    spare = CACHE_LINE * (first + max(len(sizes) - first, len(tiles)) + 1)
    return int(sum(sizes[:first]) + max(sum(sizes[first:]), sum(tiles)) + spare)


@intrinsic
def aligned_addresses(typingctx, base, sizes):
    """Addresses of consecutive parts of these sizes from `base` on, each aligned to a cache line."""
    assert isinstance(sizes, types.NamedUniTuple), sizes

    def codegen(context, builder, sig, args):
        def aligned(address):
            return builder.and_(builder.add(address, ir.Constant(I64, CACHE_LINE - 1)), ir.Constant(I64, -CACHE_LINE))

        addresses = [aligned(args[0])]
        for i in range(len(sizes) - 1):
            addresses.append(aligned(builder.add(addresses[-1], builder.extract_value(args[1], i))))
        return context.make_tuple(builder, sizes, addresses)

    return sizes(types.int64, sizes), codegen


sizes_of_scratch, sizes_of_tiles, sizes_of_backward = jit(scratch_sizes), jit(tile_sizes), jit(backward_sizes)


@jit
def partition(p, base):
    """The addresses of the parts of a thread's scratch memory, which begins at `base`."""
    cut = p.tile_rows, p.tile_keys, p.head_batch, p.decode_rows, p.max_selected
    sizes = sizes_of_scratch(p.heads, p.kv_heads, p.head_dim, p.value_dim, *cut)
    return aligned_addresses(base, sizes)


@jit
def partition_backward(p, base):
    """Likewise in the backward pass."""
    cut = p.tile_rows, p.tile_keys, min(p.max_selected, ONE), p.mod_vectors
    sizes = sizes_of_backward(p.heads, p.kv_heads, p.head_dim, p.value_dim, *cut)
    return aligned_addresses(base, sizes)


@jit
def partition_tiles(p, t, parts):
    """The memory from `t.q` on, for the mainloop by tiles."""
    sizes = sizes_of_tiles(p.heads, p.kv_heads, p.head_dim, p.value_dim, p.tile_rows, p.tile_keys, parts)
    return aligned_addresses(t.q, sizes)


def replacing(names):
    """`fn(t, *values)`: scratch memory with these parts replaced."""
    names = names.split()
    values = ", ".join(name if name in names else f"t.{name}" for name in Scratch._fields)
    scope = {"Scratch": Scratch}
    exec(f"def replaced_parts(t, {', '.join(names)}):\n    return Scratch({values})", scope)
    return jit(scope["replaced_parts"])


assert PAD % KEYS == 0
