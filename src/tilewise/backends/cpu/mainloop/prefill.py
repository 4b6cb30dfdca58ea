"""Prefill mainloop: many query rows over tiles of keys, scores [keys, rows], by blocked products.

Query rows are packed in transposed panels once: Q^T [D, panel]. For each tile of keys and each panel:

    s [keys, panel] = K Q^T         s -> p, weights         acc [panel, Dv] = alpha acc + p^T V

A GEMM policy (`gemm.Gemm`) does this by fp32 vectors (`prefill_fp32.py`) or by tiles of bf16 (`prefill_tiles.py`).
Panels are skipped where none of their rows sees a key.
"""

# mypy: ignore-errors
from __future__ import annotations

from ..codegen.load_store import put_i64
from ..codegen.numba_ops import ONE, ZERO, item_at, params_at, up
from ..codegen.vector import W
from ..gemm import amx, bf16_tiles
from ..kv_access import key_source, kv_location, sequence, value_source
from ..scratch import partition
from .dropout import has_dropout, scale_kept
from .mask import FULL, SKIP, has_bias_or_tree, read_states
from .mods import has_mods, mod_state, mods_apply
from .prefill_fp32 import FP32
from .prefill_tiles import tiles_gemm
from .rows import init_rows, list_spans, seen_by_all
from .scores import max_free_bound
from .selected_keys import first_key, list_selected, selected_count, selected_list


def mainloop(gemm):
    """`fn(params, scratch, item)`: all keys of the item. The result is m, l and acc [R, Dv], if `done` is not 0."""
    panel, step, memory, pack_queries, pack_keys, pack_values, weights, add_values, epilogue = gemm

    def prefill(params, scratch, address):
        p, item = params_at(params), item_at(address)
        t = partition(p, scratch)
        w = memory(p, t)
        q_start, _, kv_start, kv_len, _ = sequence(p, item.b)
        R, BK = p.heads // p.kv_heads * item.rows, p.tile_keys
        k, v, at = key_source(p), value_source(p), kv_location(p, item, kv_start, selected_list(p, t))
        put_i64(t.done, ZERO)
        if pack_queries(p, t, w, item, q_start, R):  # [panels, D, panel]
            return
        list_selected(p, t, item)
        first, last, no_mask = init_rows(p, t, item, up(R, panel), up(p.value_dim, W))
        for g in range(p.heads // p.kv_heads):
            put_i64(t.states + 8 * g, FULL)
        list_spans(t, up(R, panel))
        all_lo, all_hi = seen_by_all(t, R)
        bound = max_free_bound(p, t, selected_count(p, t, kv_len))
        start = first_key(p, item)
        tile = start + max(0, first - start) // BK * BK
        while tile < last:
            end = min(tile + BK, last)
            unmasked, skipped = not has_bias_or_tree(p, item.b, end), False
            if not no_mask:
                unmasked, skipped = read_states(p, item, t.states, tile, min(tile + BK, kv_len))
            if has_mods(p):
                state = mod_state(p, item, tile, end)
                put_i64(t.mod_state, state)
                unmasked, skipped = unmasked and not mods_apply(p, state), skipped or state == SKIP
            if not skipped:
                full = unmasked and all_lo <= tile and all_hi >= end  # every row sees every key
                if pack_keys(p, t, w, item, k, at, tile, end - tile, last):  # [keys, D]
                    return
                nonfinite = pack_values(p, t, w, v, at, tile, end - tile, full)  # [keys, Dv]
                for row in range(0, R, step):
                    weights(p, t, w, item, row, R, tile, end, unmasked, bound)  # [keys, step]
                    add_values(p, t, w, item, v, at, row, R, tile, end, nonfinite)  # [step, Dv]
            tile += BK
        epilogue(p, t, w, R)
        if has_dropout(p):
            scale_kept(p, t, R)
        put_i64(t.done, ONE)

    return prefill


prefill = mainloop(FP32)


def prefill_amx_function(dtype):
    return mainloop(tiles_gemm(amx.tiles(dtype)))


def prefill_dot_function(dtype):
    return mainloop(tiles_gemm(bf16_tiles.tiles(dtype)))
