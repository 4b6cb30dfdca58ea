"""The structs that Python and the kernels share. Each is declared once, as a ctypes structure of 64-bit fields.

Python sets fields by name. Kernels read the same memory as a Numba record (`record`); `offset` gives the addresses of
atomics. Strides are in bytes. An address of 0 means that there is no such tensor.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np

from ...core.mask_rules import NO_RULES

CACHE_LINE = 64  # bytes


def fields(names: str, kind: Any = ctypes.c_int64) -> list[tuple[str, Any]]:
    """The fields of a struct, by their names."""
    return [(name, kind) for name in names.split()]


def tensor(name: str, strides: str = "bhl") -> str:
    """The fields of a strided tensor: its address, its strides over the batch (or pages), heads and rows."""
    return " ".join([name, *(f"{name}_{dim}" for dim in strides)])


@cache
def strides(struct: type[ctypes.Structure], name: str) -> list[str]:
    """The fields of a tensor's strides."""
    return [field for field, *_ in struct._fields_ if field[:-1] == f"{name}_"]


def put_tensor(struct: ctypes.Structure, name: str, x: Any) -> None:
    """Sets a tensor's address and its strides."""
    size = x.element_size()
    setattr(struct, name, x.data_ptr())
    for field, stride in zip(strides(type(struct), name), x.stride(), strict=False):  # rows have a unit stride
        setattr(struct, field, stride * size)


def record(struct: type[ctypes.Structure]) -> np.dtype[Any]:
    """The Numba type of a struct."""
    return np.dtype(struct)


def offset(struct: type[ctypes.Structure], name: str) -> np.int64:
    """Bytes from a struct's address to a field. Not int: Numba compiles a function anew for every literal."""
    return np.int64(getattr(struct, name).offset)


class Rules(ctypes.Structure):
    """The numbers of `MaskRules`."""

    _fields_ = fields(" ".join(NO_RULES.numbers()))


class Params(ctypes.Structure):
    """The parameter struct of a call, for every attention kernel."""

    _fields_ = [
        # The tensors, each call's own
        *fields(" ".join(tensor(name) for name in ("q", "k", "v", "out", "lse", "k_scales", "v_scales"))),
        *fields(tensor("mask", "bhqk")),
        *fields(tensor("states", "bhqk")),  # of tiles of the mask: skip, mixed or full
        *fields(tensor("spans", "bhq")),  # of rows of the mask, computed when needed: `mainloop/mask.py`
        *fields(tensor("tree", "bq")),
        *fields(tensor("positions", "b")),  # of a tree's nodes
        *fields(tensor("slopes", "bh")),
        *fields(f"{tensor('q_bias')} {tensor('k_bias')}"),
        *fields("dropout_seed dropout_threshold"),  # the address of the seed; numbers from the threshold on are kept
        *fields("sinks row_places kv_lengths q_offsets cu_q cu_k"),  # row_places: `Tensors.places`
        *fields(tensor("table", "b")),
        *fields(tensor("indices")),  # of keys, or of blocks of them
        *fields(tensor("k_shared")),  # the last columns of K, for all heads
        # Storage types, see `codegen/dtypes.py`; scale groups in elements, rows in bytes
        *fields("q_dtype k_dtype v_dtype mask_dtype k_scales_dtype v_scales_dtype k_group v_group k_row v_row page"),
        *fields("block max_selected"),  # block size of block_indices; most keys of a list
        *fields("batch heads kv_heads q_len kv_len head_dim value_dim shared_columns"),
        ("rules", Rules),
        *fields("scale softcap dropout_scale", ctypes.c_double),
        # Tiles and work items. split_few: only sequences that decode are split
        *fields("tile_rows tile_keys split_size split_few partial_bytes keep_partials head_batch prefetch_distance"),
        *fields("decode_rows bf16_dot"),  # most rows of a group for decode; whether it is `gemv_bf16.py`
        # Functions of the user (`mods.py`): kernels, whether there is a score_mod and a mask_mod, the table of captured
        # tensors, vectors that a backward pass stores for a key, the states of mask_mod's tiles (tile_rows x tile_keys)
        *fields("mod_columns mod_rows mod_scores mod_masks captured mod_vectors"),
        *fields(tensor("mod_states", "bhqk")),
        *fields("work_items partials threads"),
        # If each call lists its own work items: the kernel for it, the most items; packed rows of q, and of k or pages
        *fields("schedule max_items q_rows kv_rows"),
        # Kernels, by address; `matrix_*`: products of decode by AMX or AVX-512 BF16
        *fields("worker combine decode prefill prefill_tiles tile_config qk qk_f32 pv pv_f32 matrix_qk matrix_pv"),
        *fields("dot_qk dot_pv qk_bf16_dot"),
        *fields("gradients"),  # the address of a `Gradients`, for a backward pass
        # A cascade: the `Params` of the call over the prefix, where its rows are (`cascade.py`), the next item to merge
        *fields("prefix_params prefix_rows next_merge"),
        *fields("yield_thread"),  # a function that yields to other threads, for kernels that wait
        # Work items: the next one, their number, how many are done, whether AMX left one undone
        *fields("next_item items done undone"),
    ]


class Gradients(ctypes.Structure):
    """The parameters of a backward pass in addition to `Params`."""

    _fields_ = [
        *fields(" ".join(tensor(name) for name in ("dout", "dlse", "delta", "dq", "dk", "dv"))),
        *fields("rows next_rows large"),  # rows of q; the next head for delta; whether an lse is over LARGE
        *fields(tensor("dmask", "bhqk")),  # or a sum for each block of keys, if the mask is broadcast over keys
        *fields("dmask_dtype dmask_block dmask_sum"),
        # Sums of dq in float32, one slot for each tile of rows and KV head, and the next key block that each waits for
        *fields("dq_sums dq_semaphores slots"),
        *fields(tensor("dslopes", "jbh")),  # a sum for each block of keys
        *fields(f"{tensor('dq_bias', 'jbhl')} {tensor('dk_bias')}"),  # likewise; of the keys themselves
        *fields("every_row every_head"),  # whether batch rows or KV heads of a block of keys are one work item
        # Functions of the user: whether the first derivative is that by the score; the `LoadSums` of loads; memory for
        # them, bytes for each thread, the number of threads that have some, how many floats of it are cleared; the work
        # item whose turn it is
        *fields("by_score loads load_count own own_bytes next_own own_cleared turn"),
    ]


class LoadSums(ctypes.Structure):
    """Where the gradient of a load of a captured tensor is summed."""

    _fields_ = [
        *fields("axis"),  # one of `AXES`
        *fields("derivative element"),  # vectors of a key's derivatives; -1: it is 1, or not needed
        *fields("own own_h"),  # bytes in the thread's memory; numbers from head to head
        *fields("listed"),  # most terms of a list in it, or 0: there is a sum for each element
        *fields("sums sums_h"),  # float64, of all items; numbers from head to head, or in all
    ]


class WorkItem(ctypes.Structure):
    """`rows` query rows from `row` on, of one batch row and KV head, over keys `start` to `end`.

    With `splits` above 1 its result is a split-KV partial, to be combined with those of the other splits, each
    `kv_heads` items after the one before.
    """

    _fields_ = fields("b head row rows start end split splits")


class Task(ctypes.Structure):
    """What the threads of a launch share: the next thread's number, the kernel, its struct, their scratch memory."""

    _fields_ = fields("next_thread kernel params memories")


class Team(ctypes.Structure):
    """The threads of this process: the function that starts them and what each runs. Their scratch addresses follow."""

    _fields_ = fields("parallel thread_main")


class LaunchBlock(ctypes.Structure):
    """The beginning of a launch's scratch memory; its split-KV partials follow."""

    _fields_ = [("params", Params), ("task", Task)]


PARAMS, GRADIENTS, LOAD_SUMS, WORK_ITEM, TASK, TEAM = map(record, (Params, Gradients, LoadSums, WorkItem, Task, Team))
LOAD_SUMS_BYTES = np.int64(LOAD_SUMS.itemsize)
WORK_ITEM_BYTES, TEAM_BYTES = np.int64(WORK_ITEM.itemsize), np.int64(TEAM.itemsize)
SELECTED_BYTES = np.int64(16)  # of an entry of `mainloop/selected_keys.py`
LAUNCH_BYTES = -(-ctypes.sizeof(LaunchBlock) // CACHE_LINE) * CACHE_LINE
