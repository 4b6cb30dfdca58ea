"""Every bad argument is refused by name, before anything is written."""

import copy
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from tilewise import (
    AttentionState,
    InvalidArgument,
    Quantised,
    TileMap,
    Unsupported,
    alibi_slopes,
    attention,
    merge,
    paged_attention,
    plan,
    varlen_attention,
)
from tilewise.dispatch import call_cache, planner
from tilewise.errors import UnexpectedArgument
from tilewise.validation import shapes

B, H, Hkv, Lq, Lk, D = 2, 4, 2, 5, 7, 8
TREE, NODES = {"tree_mask": torch.ones(1, Lq, Lq).bool()}, torch.arange(Lk - Lq, Lk).expand(B, Lq)


def dense_args():
    return {"q": torch.randn(B, H, Lq, D), "k": torch.randn(B, Hkv, Lk, D), "v": torch.randn(B, Hkv, Lk, D)}


def varlen_args():
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 5], [0, 3, 7]))
    shapes = {"q": (5, H, D), "k": (7, Hkv, D), "v": (7, Hkv, D)}
    return {name: torch.randn(shape) for name, shape in shapes.items()} | {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}


def paged_args():
    return {
        "q": torch.randn(B, H, 1, D),
        "k_pages": torch.randn(6, 4, Hkv, D),
        "v_pages": torch.randn(6, 4, Hkv, D),
        "block_table": torch.tensor([[1, 2, 3], [0, 5, 99]], dtype=torch.int32),
        "context_lens": torch.tensor([9, 8], dtype=torch.int32),
    }


def causal_map(**rules):
    return TileMap.from_spec(Lq, Lk, (4, 4), **rules)


ints = lambda *x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
bools = lambda *shape: torch.ones(shape, dtype=torch.bool)  # noqa: E731
randn = torch.randn
STATES = torch.zeros(1, 1, 2, 2, dtype=torch.uint8)

BLOCK_MASK = create_block_mask(lambda b, h, i, j: j <= i, None, None, 128, 128, device="cpu")

DENSE = [
    # (argument that the message names, changed arguments, a part of the message)
    ("q", {"q": randn(H, Lq, D)}, "rank 4"),
    ("q", {"q": randn(B, H, Lq, D).to(torch.complex64)}, "complex64"),
    ("k", {"k": randn(B, Hkv, Lk, D).double()}, "float64"),
    ("q", {"q": randn(B, H, Lq, D).to(torch.int32)}, "float32, float16 or bfloat16"),
    ("q", {"q": randn(B, H, Lq, 577), "k": randn(B, Hkv, Lk, 577)}, "1 to 576"),
    ("q", {"q": randn(B, H, Lq, 0)}, "1 to 576"),
    ("q", {"q": randn(B, 0, Lq, D)}, "0 heads"),
    ("q", {"q": "queries"}, "torch tensor"),
    ("q", {"q": randn(B, H, Lq, D, device="meta")}, ""),
    ("k", {"k": randn(B, Hkv, Lk)}, "rank 4"),
    ("k", {"k": randn(B + 1, Hkv, Lk, D)}, "batch of 3"),
    ("k", {"k": randn(B, Hkv, Lk, D + 1)}, "last dim of 9"),
    ("k", {"k": randn(B, 3, Lk, D), "v": randn(B, 3, Lk, D)}, "divisor of q's 4"),
    ("k", {"k": randn(B, 0, Lk, D), "v": randn(B, 0, Lk, D)}, "divisor"),
    ("k", {"q": randn(B, H, Lq, D).half()}, "no wider than q"),
    ("k", {"k": randn(B, Hkv, Lk, D).to(torch.float8_e4m3fn)}, "Quantised"),
    ("k", {"k": randn(B, Hkv, Lk, D, device="meta")}, "device meta"),
    ("v", {"v": randn(B, Hkv, Lk + 1, D)}, "as k"),
    ("v", {"v": randn(B, H, Lk, D)}, "as k"),
    ("v", {"v": randn(B, Hkv, Lk, 600)}, "1 to 576"),
    ("scale", {"scale": math.nan}, "finite"),
    ("scale", {"scale": math.inf}, "finite"),
    ("scale", {"scale": "1"}, "finite number"),
    ("scale", {"scale": torch.tensor(1.0)}, "a finite number; float(scale); multiply q by a learned scale"),
    ("softcap", {"softcap": torch.tensor(1.0)}, "a finite number; float(softcap)"),
    ("softcap", {"softcap": -1.0}, "positive"),
    ("softcap", {"softcap": math.nan}, "finite"),
    ("causal", {"causal": 1}, "True or False"),
    ("causal", {"causal": "yes"}, "True or False"),
    ("window", {"window": 0}, "1 or more"),
    ("window", {"window": -1}, "None, not -1"),
    ("window", {"window": (-1, 3)}, "None, not -1"),
    ("window", {"window": (1, 2, 3)}, "pair"),
    ("window", {"window": 2.5}, "int or a pair"),
    ("window", {"window": True}, "int or a pair"),
    ("chunk", {"chunk": 0}, "1 or more"),
    ("split_size", {"split_size": 0}, "1 or more"),
    ("layout", {"layout": "bshd"}, "'bhld' or 'blhd'"),
    ("q_offset", {"q_offset": 1.5}, "int"),
    ("tree_mask", {"tree_mask": randn(B, Lq, Lk) > 0}, "(B, Lq, Lq)"),
    ("tree_mask", {"tree_mask": randn(Lq, Lq) > 0}, "rank 3"),
    ("tree_mask", {"tree_mask": randn(B, Lq, Lq)}, "bool"),
    ("positions", {"positions": NODES}, "tree_mask= beside it"),
    ("positions", {**TREE, "positions": torch.zeros(B, Lq + 1).int()}, "[2, "),
    ("positions", {**TREE, "positions": torch.zeros(B, Lq)}, "int32"),
    ("positions[1]", {**TREE, "positions": NODES - torch.tensor([[0], [1]])}, "keys come first"),
    ("positions[0]", {**TREE, "positions": NODES + 2**29}, "keys come first"),
    ("positions[0]", {**TREE, "positions": NODES + 2**40}, "got 2147483647 or more"),
    ("positions[0]", {**TREE, "positions": NODES - 2**40}, "got -2147483648 or less"),
    ("q_offset", {**TREE, "positions": NODES, "q_offset": 3}, "positions say where queries stand"),
    ("k_stride", {**TREE, "positions": NODES, "k_stride": 2}, "positions say where queries stand"),
    (
        "tile_map",
        {**TREE, "positions": NODES, "causal": True, "tile_map": TileMap.from_spec(Lq, Lk, (4, 4), causal=True)},
        "a map of the mask alone",
    ),
    ("q_bias", {"q_bias": randn(B, H, Lq + 1)}, "[2 or 1, 4 or 1"),
    ("q_bias", {"q_bias": randn(B, H)}, "rank 3"),
    ("q_bias", {"q_bias": randn(B, H, Lq).double()}, "float32"),
    ("k_bias", {"k_bias": randn(B, 3, Lk)}, "[2 or 1, 4 or 1"),
    ("k_bias", {"k_bias": randn(B, H, Lk, device="meta")}, "device meta"),
    ("k_start", {"k_start": 1.5}, "int"),
    ("k_start", {"k_start": None}, "int"),
    ("k_stride", {"k_stride": 0}, "1 to"),
    ("k_stride", {"k_stride": ints(1, 2, 3)}, "[2]"),
    ("k_stride[1]", {"k_stride": ints(1, 0)}, "1 to"),
    ("q_stride", {"q_stride": -2}, "1 to"),
    ("k_start, k_stride, q_stride", {"k_stride": 2**28}, "positions and distances"),
    ("q_offset", {"q_offset": ints(1, 2, 3)}, "[2]"),
    ("q_offset", {"q_offset": randn(2)}, "int32"),
    ("kv_lengths", {"kv_lengths": ints(1, 2, 3)}, "[2]"),
    ("kv_lengths", {"kv_lengths": randn(2)}, "int32"),
    ("kv_lengths", {"kv_lengths": [1, 2]}, "torch tensor"),
    ("kv_lengths[1]", {"kv_lengths": ints(7, 8)}, "0 to 7"),
    ("kv_lengths[0]", {"kv_lengths": ints(-1, 3)}, "0 to 7"),
    ("kv_lengths", {"kv_lengths": ints(1, 2).to("meta")}, "device meta"),
    ("mask", {"mask": lambda b, h, q_idx, kv_idx: kv_idx <= q_idx}, "a function, expected a tensor; mask_mod="),
    ("mask", {"mask": BLOCK_MASK}, "a BlockMask, expected a tensor; mask_mod=block_mask.mask_mod"),
    ("mask", {"mask": bools(Lq, Lk + 1)}, "shape (5, 8)"),
    ("mask", {"mask": bools(B, Lk)}, "for a padding mask [batch, keys] pass mask[:, None, None]"),
    ("mask", {"mask": bools(B, Lq, Lk)}, "for a mask [batch, queries, keys] pass mask[:, None]"),
    ("mask", {"mask": bools(Lk)}, "rank 2"),
    ("mask", {"mask": bools(3, Lq, Lk)}, "(3, 5, 7)"),
    ("mask", {"mask": bools(3, H, Lq, Lk)}, "(2, 4, 5, 7)"),
    ("mask", {"mask": torch.ones(Lq, Lk, dtype=torch.uint8)}, "bool"),
    ("mask", {"mask": torch.zeros(Lq, Lk, dtype=torch.float64)}, "float32"),
    ("mask", {"mask": bools(Lq, Lk).to("meta")}, "device meta"),
    ("alibi_slopes", {"alibi_slopes": randn(3)}, "(4,) or (2, 4)"),
    ("alibi_slopes", {"alibi_slopes": ints(1, 2, 3, 4)}, "float32"),
    ("sinks", {"sinks": randn(B, H)}, "(4,)"),
    ("sinks", {"sinks": 4}, "a learned logit for each head; for first tokens that every query sees, a mask"),
    *(
        (name, {name: number}, "")
        for name in ("q", "k", "mask", "alibi_slopes", "sinks", "kv_lengths")
        for number in (np.int64(0), np.float32(1))
    ),
    ("q_offset", {"q_offset": np.float32(1)}, "torch tensor"),
    ("q_offset", {"q_offset": np.True_}, "torch tensor"),
    ("q_offset", {"q_offset": np.array(1)}, "[2]"),
    ("layout", {"layout": np.array([1, 2])}, "'bhld' or 'blhd'"),
    ("layout", {"layout": []}, "'bhld' or 'blhd'"),
    *(("backend", {"backend": wrong}, "one of") for wrong in ([], {}, 3, np.array([1, 2]))),
    ("tile_map", {"tile_map": bools(2, 2)}, "TileMap"),
    ("tile_map", {"tile_map": TileMap.from_mask(bools(Lq, Lk), (4, 4))}, "without that mask"),
    (
        "tile_map",
        {"tile_map": causal_map(causal=True)},
        "a map of the rules: causal, expected the call's: none",
    ),
    ("tile_map", {"tile_map": causal_map(causal=True), "causal": True, "q_offset": 0}, "other offsets"),
    ("tile_map", {"tile_map": causal_map(causal=True), "causal": True, "k_stride": 2}, "strides"),
    ("tile_map", {"tile_map": causal_map(causal=True), "causal": True, "k_start": ints(0, 1)}, "strides"),
    ("tile_map", {"tile_map": causal_map(causal=True), "causal": True, "kv_lengths": ints(7, 3)}, "other offsets"),
    ("tile_map", {"tile_map": causal_map(window=3), "window": 4}, "the call's: window (3, None)"),
    ("tile_map", {"tile_map": causal_map(), "mask": bools(Lq, Lk)}, "combine them"),
    ("tile_map", {"tile_map": TileMap.from_mask(bools(Lq, Lk + 1), (4, 4)), "mask": bools(Lq, Lk)}, "a map of (5, 8)"),
    ("tile_map", {"tile_map": TileMap.from_mask(bools(3, Lq, Lk), (4, 4)), "mask": bools(H, Lq, Lk)}, "planes"),
    ("tile_map", {"tile_map": TileMap.from_mask(bools(Lq, Lk), (4, 4)), "mask": torch.zeros(Lq, Lk)}, "float mask"),
    ("tile_map", {"tile_map": TileMap.from_mask(bools(1, Lk), (4, 4)), "mask": bools(Lq, Lk)}, "a map of (1, 7)"),
    ("out", {"out": torch.empty(B, H, Lq, D + 1)}, "(2, 4, 5, 8)"),
    ("out", {"out": torch.empty(B, H, Lq, D).half()}, "float32"),
    ("out", {"out": torch.empty(B, H, Lq, 2 * D)[..., ::2]}, "stride 1"),
    ("out", {"out": torch.empty(1, H, Lq, D).expand(B, -1, -1, -1)}, "broadcast"),
    ("out", {"out": torch.empty(B * H * Lq * D).as_strided((B, H, Lq, D), (H * Lq * D, 4, D, 1))}, "share memory"),
    ("out", {"out": torch.empty(B, H, 1, D).expand(B, H, Lq, D)}, "broadcast"),
    ("k", {"k": np.zeros((B, Hkv, Lk, D))}, "k.astype(np.float32)"),
    ("q", {"q": np.array([["a"]])}, "torch can read"),
    ("validate", {"validate": "yes"}, "None, True or False"),
    ("backend", {"backend": "cuda"}, "one of"),
    ("is_causal", {"is_causal": True}, "did you mean causal?"),
    ("mesh", {"mesh": 4}, "tilewise.distributed.attention and tilewise.distributed.plan take it"),
    ("attn_mask", {"attn_mask": None}, "did you mean mask?"),
    ("sliding_window", {"sliding_window": 4}, "did you mean window? window=W means W keys with the query's own"),
    ("window_size", {"window_size": (-1, -1)}, "None, not -1, means unlimited"),
    ("dropout", {"dropout": 0.1}, "did you mean dropout_p?"),
    ("dropout_p", {"dropout_p": 1.5}, "0.0 to 1.0"),
    ("dropout_p", {"dropout_p": None}, "a finite number"),
    ("dropout_p", {"dropout_p": True}, "a finite number"),
    ("dropout_seed", {"dropout_p": 0.1, "dropout_seed": -1}, "an int of 0 to"),
    ("dropout_seed", {"dropout_p": 0.1, "dropout_seed": 1.0}, "an int or an int64 tensor of one element"),
    ("dropout_seed", {"dropout_p": 0.1, "dropout_seed": ints(4)}, "an int or an int64 tensor of one element"),
    ("dropout_seed", {"dropout_p": 0.1, "dropout_seed": torch.zeros(1, device="meta").long()}, "cpu, as q"),
    ("block_mask", {"block_mask": max}, "mask_mod=block_mask.mask_mod takes its function"),
    ("enable_gqa", {"enable_gqa": True}, "leave it out"),
    ("softmax_scale", {"softmax_scale": 1.0}, "did you mean scale?"),
    ("cache_seqlens", {"cache_seqlens": None}, "did you mean kv_lengths?"),
    ("casual", {"casual": True}, "did you mean causal?"),
    ("colour", {"colour": 1}, "colour: got an unknown keyword; help(tilewise.attention) lists all"),
    ("is_causal", {"is_causal": True}, "q_offset=0 aligns the first ones, as torch's is_causal does; help"),
    ("block_table", {"block_table": ints(1)}, "tilewise.paged_attention takes pages: block_table and context_lens"),
    ("page_table", {"page_table": ints(1)}, "tilewise.paged_attention takes pages: block_table"),
    ("cu_seqlens", {"cu_seqlens": ints(0, 5)}, "tilewise.varlen_attention takes packed sequences: cu_seqlens_q and"),
    ("max_seqlen_q", {"max_seqlen_q": 5}, "tilewise.varlen_attention takes packed sequences: cu_seqlens_q and"),
    ("return_attn_probs", {"return_attn_probs": True}, "did you mean return_aux? it returns (out, Aux): max_logits"),
    ("output_attentions", {"output_attentions": True}, "did you mean return_aux? it returns (out, Aux)"),
    ("bias", {"bias": randn(Lq, Lk)}, "did you mean mask? a float mask is added to the scores"),
    ("alibi", {"alibi": True}, "did you mean alibi_slopes? tilewise.alibi_slopes(H) makes them"),
    ("return_lse", {"return_lse": None}, "True or False"),
    ("return_aux", {"return_aux": "entropy"}, "None or a tuple of names out of lse, max_logits, entropy, key_mass"),
    ("return_aux", {"return_aux": ("lse", "maximum")}, "got 'maximum', expected names out of lse, max_logits"),
    ("return_aux", {"return_aux": ("weights",)}, "weight_indices= says at which keys"),
    ("return_lse", {"return_aux": ("lse",), "return_lse": True}, "True beside return_aux"),
    ("key_mass_queries", {"key_mass_queries": 3}, "return_aux=('key_mass',) beside it"),
    ("key_mass_queries", {"return_aux": ("key_mass",), "key_mass_queries": 0}, "how many of the last ones"),
    ("weight_indices", {"weight_indices": ints(1)}, "return_aux=('weights',) beside it"),
    ("weight_indices", {"return_aux": ("weights",), "weight_indices": ints(1)}, "n)"),
]

VARLEN = [
    ("q", {"q": randn(1, 5, H, D)}, "[T, H, D]"),
    ("cu_seqlens_q", {"cu_seqlens_q": randn(3)}, "int32"),
    ("cu_seqlens_k", {"cu_seqlens_k": ints(0, 7)}, "[3]"),
    ("cu_seqlens_q[2]", {"cu_seqlens_q": ints(0, 4, 2)}, "must not decrease"),
    ("cu_seqlens_q[0]", {"cu_seqlens_q": ints(1, 4, 5)}, "0"),
    ("cu_seqlens_q[-1]", {"cu_seqlens_q": ints(0, 4, 6)}, "at most 5"),
    ("cu_seqlens_k[-1]", {"cu_seqlens_k": ints(0, 4, 8)}, "at most 7"),
    ("cu_seqlens_q", {"cu_seqlens_q": torch.zeros(0, dtype=torch.int32), "cu_seqlens_k": ints()}, "[B + 1]"),
    ("max_q", {"max_q": 2}, "at least 3"),
    ("max_q", {"mask": bools(3, 4), "validate": False}, "longest sequence"),
    ("max_k", {"max_k": -1}, "0 or more"),
    ("kv_lengths[0]", {"kv_lengths": ints(4, 1)}, "0 to 3"),
    ("mask", {"mask": bools(5, 7)}, "(2, 4, 3, 4)"),
    ("max_seqlen_q", {"max_seqlen_q": 4}, "did you mean max_q?"),
    ("cu_seqlens", {"cu_seqlens": ints(0, 5)}, "did you mean cu_seqlens_q?"),
    ("block_table", {"block_table": ints(1, 2)}, "tilewise.paged_attention takes pages"),
    ("backend", {"backend": []}, "one of"),
]

PAGED = [
    ("k_pages", {"k_pages": randn(6, 4, D)}, "rank 4"),
    ("k_pages", {"k_pages": randn(6, 0, Hkv, D), "v_pages": randn(6, 0, Hkv, D)}, "pages of 0"),
    ("v_pages", {"v_pages": randn(6, 5, Hkv, D)}, "as k_pages"),
    ("k_pages", {"k_pages": randn(6, 4, 3, D), "v_pages": randn(6, 4, 3, D)}, "divisor"),
    ("block_table", {"block_table": ints(1, 2)}, "[2, n]"),
    ("block_table", {"block_table": randn(2, 3)}, "int32"),
    ("block_table[1, 1]", {"block_table": torch.tensor([[1, 2, 3], [0, 6, 9]], dtype=torch.int32)}, "0 to 5"),
    ("block_table[0, 0]", {"block_table": torch.tensor([[-1, 2, 3], [0, 5, 9]], dtype=torch.int32)}, "0 to 5"),
    ("context_lens[0]", {"context_lens": ints(13, 2)}, "0 to 12"),
    ("context_lens", {"context_lens": ints(3)}, ""),
    ("max_q", {"max_q": 4}, "packed"),
    ("cu_seqlens_q", {"cu_seqlens_q": ints(0, 1), "q": randn(2, H, D)}, "[3]"),
    ("layout", {"cu_seqlens_q": ints(0, 1, 2), "q": randn(2, H, D), "layout": "blhd"}, "[T, H, D]"),
    ("mask", {"mask": bools(1, 13)}, "up to 12"),
    ("mask", {"mask": bools(3, 1, 9)}, "up to 12"),
    ("context_lens[0]", {"mask": bools(1, 0)}, "0 to 0, the keys in mask"),
    ("context_lens[0]", {"mask": bools(1, 8)}, "0 to 8"),
    ("backend", {"backend": {}}, "one of"),
    ("cache_seqlens", {"cache_seqlens": ints(1, 2)}, "did you mean context_lens?"),
    ("block_tables", {"block_tables": ints(1, 2)}, "did you mean block_table?"),
    ("page_table", {"page_table": ints(1, 2)}, "did you mean block_table?"),
]

ALL = [(attention, dense_args, *row) for row in DENSE]
ALL += [(varlen_attention, varlen_args, *row) for row in VARLEN]
ALL += [(paged_attention, paged_args, *row) for row in PAGED]


@pytest.mark.parametrize(
    ("entry", "args", "name", "changes", "words"), ALL, ids=lambda x: x if isinstance(x, str) else ""
)
def test_refused_by_name(entry, args, name, changes, words):
    arguments = args() | changes
    out = arguments.setdefault("out", torch.full_like(arguments["q"], 7.0) if torch.is_tensor(arguments["q"]) else None)
    before = None if out is None or out.is_meta else out.clone()
    with pytest.raises(InvalidArgument) as caught:
        entry(**arguments)
    assert isinstance(caught.value, ValueError)
    assert str(caught.value).startswith(f"{name}: got ") or (not words and ": got " in str(caught.value))
    assert words in str(caught.value)
    assert "expected" in str(caught.value) or isinstance(caught.value, UnexpectedArgument)
    if before is not None:
        assert torch.equal(out.nan_to_num(), before.nan_to_num()), "something was written"


@pytest.mark.parametrize(
    ("entry", "args"), [(attention, dense_args), (varlen_attention, varlen_args), (paged_attention, paged_args)]
)
def test_the_unchanged_call_is_fine(entry, args):
    assert entry(**args()).isfinite().all()


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_out_may_not_be_an_input(which):
    args = dense_args() | {"q": randn(B, H, Lq, D), "k": randn(B, H, Lq, D), "v": randn(B, H, Lq, D)}
    with pytest.raises(InvalidArgument, match=f"memory that it shares with {which}"):
        attention(**args, out=args[which])


OVERLAPS = {
    "sinks": (attention, lambda memory: {"sinks": memory[:H]}),
    "alibi_slopes": (attention, lambda memory: {"alibi_slopes": memory[: B * H].view(B, H)}),
    "mask": (attention, lambda memory: {"mask": memory[: Lq * Lk].view(Lq, Lk)}),
    "kv_lengths": (attention, lambda memory: {"kv_lengths": memory[:B].view(torch.int32)}),
    "q_offset": (attention, lambda memory: {"q_offset": memory[:B].view(torch.int32)}),
    "k_scales": (
        attention,
        lambda memory: {
            "k": Quantised(torch.zeros(B, Hkv, Lk, D, dtype=torch.int8), memory[:28].view(B, Hkv, Lk, 1), "int8", 32)
        },
    ),
    "cu_seqlens_q": (varlen_attention, lambda memory: {"cu_seqlens_q": memory[:3].view(torch.int32)}),
    "cu_seqlens_k": (varlen_attention, lambda memory: {"cu_seqlens_k": memory[:3].view(torch.int32)}),
    "block_table": (paged_attention, lambda memory: {"block_table": memory[:6].view(torch.int32).view(2, 3)}),
    "context_lens": (paged_attention, lambda memory: {"context_lens": memory[:2].view(torch.int32)}),
}


@pytest.mark.parametrize("which", OVERLAPS)
def test_out_may_not_be_another_input(which):
    entry, change = OVERLAPS[which]
    args = {attention: dense_args, varlen_attention: varlen_args, paged_attention: paged_args}[entry]()
    memory = torch.zeros(args["q"].numel())
    name = "kv_lengths" if which == "context_lens" else which
    with pytest.raises(InvalidArgument, match=f"memory that it shares with {name}"):
        entry(**args | change(memory), out=memory.view(args["q"].shape))
    assert bool((memory == 0).all())


@pytest.mark.parametrize(
    "place", ["equal", "first rows", "last rows", "begins before", "begins in it", "encloses", "inside"]
)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_out_may_not_share_memory_with_an_input(name, place):
    """However the two lie to each other: `out` may be larger than an input, smaller, or begin in the middle of it."""
    B, H, L, D = 1, 1, 6, 4
    memory = torch.zeros(40 * D)
    at = 14 * D  # where `out` begins
    begin, rows = {
        "equal": (at, L),
        "first rows": (at, 2),
        "last rows": (at + (L - 2) * D, 2),
        "begins before": (at - D, 2),
        "begins in it": (at + (L - 1) * D, L),
        "encloses": (at - 2 * D, L + 4),
        "inside": (at + 2 * D, 2),
    }[place]
    out = memory[at : at + L * D].view(B, H, L, D)
    args = {"q": torch.ones(B, H, L, D), "k": torch.ones(B, H, rows, D), "v": torch.ones(B, H, rows, D)}
    if name == "q":  # as large as `out`: wider apart, one row for all, or beginning elsewhere
        step = {"encloses": 2 * D, "inside": 0}.get(place, D)
        args["q"] = memory[begin:].as_strided((B, H, L, D), (40 * D, 40 * D, step, 1))
    else:
        args[name] = memory[begin : begin + rows * D].view(B, H, rows, D)
    with pytest.raises(InvalidArgument, match=f"out: got memory that it shares with {name}"):
        attention(**args, out=out)
    assert bool((memory == 0).all())
    for gap in (0, D):  # next to each other, or apart
        args[name] = memory[at + L * D + gap :][: args[name].numel()].view(args[name].shape)
        attention(**args, out=out)
        args[name] = memory[: at - gap][-args[name].numel() :].view(args[name].shape)
        attention(**args, out=out)


def test_strided_outputs_are_not_taken_for_overlapping():
    args = dense_args()
    wide = torch.empty(H, Lq + 1, B, D + 3)
    out = wide.permute(2, 0, 1, 3)[:, :, :Lq, :D]
    assert attention(**args, out=out).equal(attention(**args))


def test_unknown_keywords_are_type_errors_too():
    for entry, args in ((attention, dense_args), (varlen_attention, varlen_args), (paged_attention, paged_args)):
        with pytest.raises(TypeError, match="did you mean causal"):
            entry(**args(), is_causal=True)
    with pytest.raises(TypeError, match="did you mean causal"):
        plan(**dense_args(), is_causal=True)


def test_the_hint_comes_first_and_then_where_the_names_are_listed():
    for entry, args in ((attention, dense_args), (varlen_attention, varlen_args), (paged_attention, paged_args)):
        with pytest.raises(InvalidArgument) as error:
            entry(**args(), casual=True)
        start, end = str(error.value).split("did you mean causal?")
        assert start == "casual: got an unknown keyword; "
        assert end.endswith(f"; help(tilewise.{entry.__name__}) lists all")
        assert len(str(error.value)) < 250


@pytest.mark.parametrize(
    ("more", "name"), [((True,), "causal"), ((0.5,), "scale"), ((bools(Lq, Lk),), "mask"), ((None, 0.0, True), "mask")]
)
def test_too_many_positional_arguments(more, name):
    """As in calls written for torch's SDPA (a mask, dropout, is_causal) or FlashAttention (dropout, scale, causal)."""
    for entry, args in ((attention, dense_args), (varlen_attention, varlen_args), (paged_attention, paged_args)):
        given = args()
        names = ", ".join(given)
        want = f"got {len(given) + len(more)}, expected {len(given)} \\({names}\\); options go by name, such as {name}="
        for _ in range(2):  # not remembered
            with pytest.raises(TypeError, match=f"positional arguments: {want}; help"):
                entry(*given.values(), *more)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_an_offset_may_be_a_numpy_integer(kind):
    args = dense_args()
    want = attention(**args, causal=True, q_offset=1)
    assert torch.equal(attention(**args, causal=True, q_offset=kind(1)), want)
    assert plan(**args, causal=True, q_offset=kind(1)) == plan(**args, causal=True, q_offset=1)
    tiles = TileMap.from_spec(Lq, Lk, (4, 4), causal=True, q_offset=kind(1))
    assert torch.equal(attention(**args, causal=True, q_offset=1, tile_map=tiles), want)


def test_validate_false_does_not_read_values():
    lengths = ints(7, 7)
    args = dense_args()
    attention(**args, kv_lengths=lengths, validate=False)
    with pytest.raises(InvalidArgument):
        attention(**args, kv_lengths=ints(7, 9), validate=True)


def meta(x):
    return x.to("meta") if isinstance(x, torch.Tensor) else x


OF_VALUES = ("tile_map", "out", "mesh")  # an out of odd strides has plain ones on meta
BY_FORM = [
    row
    for row in ALL
    if row[0] is not varlen_attention  # whose longest sequences are not known
    and "[" not in row[2]
    and row[2] not in OF_VALUES
    and not any(isinstance(x, np.ndarray) or getattr(x, "is_meta", False) for x in row[3].values())
    and torch.is_tensor(row[3].get("q", torch.tensor(0)))
]


@pytest.mark.parametrize(
    ("entry", "args", "name", "changes", "words"), BY_FORM, ids=lambda x: x if isinstance(x, str) else ""
)
def test_meta_tensors_are_refused_too(entry, args, name, changes, words):
    """All that is refused by its form: a dry run that passes is that of a call which is right."""
    with pytest.raises(InvalidArgument) as caught:
        entry(**{key: meta(x) for key, x in (args() | changes).items()})
    assert str(caught.value).startswith(f"{name}: got ") or not words
    assert words in str(caught.value)


def test_meta_tensors_give_shapes():
    """Also with values that cannot be read, with gradients, and with a mask whose sequences are of unknown length."""
    for entry, args in ((attention, dense_args()), (varlen_attention, varlen_args()), (paged_attention, paged_args())):
        args = {key: meta(x) for key, x in args.items()}
        assert entry(**args, validate=True, out=torch.empty_like(args["q"])).shape == args["q"].shape
        if entry is not paged_attention:
            out = entry(**args | {"q": args["q"].requires_grad_()})
            assert torch.autograd.grad(out.sum(), args["q"])[0].shape == args["q"].shape
    packed, mask = {key: meta(x) for key, x in varlen_args().items()}, bools(3, 4).to("meta")
    assert varlen_attention(**packed, mask=mask).shape == (5, H, D)
    with pytest.raises(InvalidArgument, match=r"mask: got shape \(3, 4\), .* broadcasts to \(2, 4, 5, 4\)"):
        varlen_attention(**packed, mask=mask, max_q=5, max_k=4)
    dense = {key: meta(x) for key, x in dense_args().items()}
    with pytest.raises(InvalidArgument, match="out: got memory that it shares with q"):
        attention(**dense, out=dense["q"])


@pytest.mark.parametrize("backend", [None, "torch"])
def test_masks_of_packed_rows_have_the_size_that_is_given(backend):
    """Even if `max_q` and `max_k` are more than there are rows."""
    cu, longest = ints(0, 3, 5), {"max_q": 8, "max_k": 9, "backend": backend}
    q = torch.randn(5, H, D, requires_grad=True)
    mask = torch.randn(8, 9, requires_grad=True)
    small = mask.detach()[:3, :3].clone().requires_grad_()
    large = varlen_attention(q, q, q, cu, cu, mask=mask, **longest)
    other = varlen_attention(q, q, q, cu, cu, mask=small, backend=backend)
    assert torch.allclose(large, other, atol=1e-6)
    found = [torch.autograd.grad(out.square().sum(), m)[0] for out, m in ((large, mask), (other, small))]
    assert torch.allclose(found[0][:3, :3], found[1], atol=1e-5)
    assert found[0].count_nonzero() == found[1].count_nonzero()
    tree = bools(2, 8, 8).tril()
    assert torch.allclose(
        varlen_attention(q, q, q, cu, cu, tree_mask=tree, **longest),
        varlen_attention(q, q, q, cu, cu, causal=True, **longest),
        atol=1e-6,
    )


def test_a_mask_over_pages_may_stop_at_the_longest_context():
    """Also where that is 0."""
    args = paged_args()
    whole = paged_attention(**args, mask=bools(1, 12))
    assert paged_attention(**args, mask=bools(1, 9)).equal(whole)
    args["context_lens"] = ints(0, 0)
    for keys in (12, 1, 0):
        assert not paged_attention(**args, mask=bools(1, keys)).any()


def test_read_only_out_is_refused():
    q = np.ones((1, 1, 2, 4), dtype=np.float32)
    out = np.empty_like(q)
    out.flags.writeable = False
    with pytest.raises(InvalidArgument, match="read-only"):
        attention(q, q, q, out=out)


def test_named_backend_never_falls_back(monkeypatch):
    call_cache.forget()
    monkeypatch.setattr(planner, "BACKENDS", ("torch", "reference"))
    monkeypatch.setattr(planner.load("torch"), "supports", lambda problem: "it is Sunday")
    planner.choose.cache_clear()
    args = dense_args()
    with pytest.raises(Unsupported, match=r"'torch' cannot serve this call: it is Sunday; leave out backend="):
        attention(**args, backend="torch")
    assert isinstance(Unsupported("a", "b", "c"), NotImplementedError)
    assert plan(**args).passed_over == (("torch", "it is Sunday"),)
    assert plan(**args).backend == "reference"
    monkeypatch.setattr(planner.load("reference"), "supports", lambda problem: "nor on Mondays")
    planner.choose.cache_clear()
    with pytest.raises(Unsupported, match=r"it is Sunday.*nor on Mondays"):
        attention(**args)
    planner.choose.cache_clear()


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("dtype", lambda: Quantised(torch.zeros(2, 4).to(torch.int8), randn(2, 1), "int2", 64)),
        ("group", lambda: Quantised(torch.zeros(2, 4).to(torch.int8), randn(2, 1), "int8", 16)),
        ("data", lambda: Quantised(torch.zeros(2, 4), randn(2, 1), "int8", 64)),
        ("scales", lambda: Quantised(torch.zeros(2, 100).to(torch.int8), randn(2, 1), "int8", 64)),
        ("scales", lambda: Quantised(torch.zeros(2, 4).to(torch.int8), ints(1, 1)[:, None], "int8", 64)),
        ("x", lambda: Quantised.from_float(randn(2, 5), "int4")),
        ("dtype", lambda: Quantised.from_float(randn(2, 5), "f16")),
        ("group", lambda: Quantised.from_float(randn(2, 5), "int8", 48)),
        ("dtype", lambda: Quantised.from_float(randn(2, 5), [])),
        ("dtype", lambda: Quantised(torch.zeros(2, 4).to(torch.int8), randn(2, 1), np.array([1, 2]), 64)),
        ("group", lambda: Quantised.from_float(randn(2, 5), "int8", 64.0)),
        ("group", lambda: Quantised.from_float(randn(2, 5), "int8", np.array([1, 2]))),
        ("x", lambda: Quantised.from_float(torch.tensor(1.0), "int8")),
        *(
            ("data", lambda width=width: Quantised(torch.zeros(2, width, dtype=torch.uint8), None, "fp8_latent", 128))
            for width in (512, 527, 529, 530, 533, 657)
        ),
        ("x", lambda: Quantised.from_float(ints(1, 2), "int8")),
        ("x", lambda: Quantised.from_float(torch.complex(randn(2, 4), randn(2, 4)), "int8")),
        ("x", lambda: Quantised.from_float(np.float32(1), "int8")),
        ("data", lambda: Quantised(torch.tensor(1).to(torch.int8), randn(1), "int8", 64)),
        ("backend", lambda: plan(**dense_args(), backend=[])),
        ("q_offset", lambda: plan(**dense_args(), q_offset=np.float64(1))),
        ("device", lambda: TileMap.from_spec(4, 4, device="x")),
        ("device", lambda: TileMap.from_spec(4, 4, device=[])),
        ("q_offset", lambda: TileMap.from_spec(4, 4, q_offset=np.float32(1))),
        ("kv_lengths", lambda: TileMap.from_spec(4, 4, kv_lengths=np.int64(1))),
        ("out", lambda: attention(**dense_args(), out=np.float32(1))),
        ("heads", lambda: alibi_slopes(0)),
        ("heads", lambda: alibi_slopes(2.0)),
        ("heads", lambda: alibi_slopes(2**40)),
        ("states", lambda: merge([])),
        ("states", lambda: merge(None)),
        ("states", lambda: merge(randn(2, 3))),
        ("states", lambda: merge(AttentionState(randn(2, 3), randn(2)))),
        ("states[0]", lambda: merge([1, 2])),
        ("states[0]", lambda: merge("ab")),
        ("states[1]", lambda: merge([(randn(2, 3), randn(2)), (randn(2, 3),)])),
        ("states[0]", lambda: merge([("a", "b")])),
        ("states[0]", lambda: merge([(torch.tensor(1.0), torch.tensor(1.0))])),
        ("mask", lambda: TileMap.from_mask(ints(1, 2)[None])),
        ("mask", lambda: TileMap.from_mask(bools(3))),
        ("tile", lambda: TileMap.from_mask(bools(3, 3), (0, 4))),
        ("tile", lambda: TileMap.from_mask(bools(3, 3), 4)),
        ("block_size", lambda: TileMap.from_blocks(ints(0)[None, None], 0, 4, 4)),
        ("count", lambda: TileMap.from_topk(randn(1, 1), True, (4, 4), 4, 4)),
        ("Lq", lambda: TileMap.from_spec(-1, 4)),
        ("window", lambda: TileMap.from_spec(4, 4, window=0)),
        ("kv_lengths", lambda: TileMap.from_spec(4, 4, kv_lengths=randn(2))),
        ("q_offset", lambda: TileMap.from_spec(4, 4, kv_lengths=ints(1, 2), q_offset=ints(1, 2, 3))),
        ("states", lambda: TileMap(torch.zeros(1, 1, 2, 2), (4, 4), (8, 8))),
        ("states", lambda: TileMap(torch.zeros(1, 1, 2, 2, dtype=torch.uint8), (4, 4), (9, 8))),
        ("states", lambda: TileMap(STATES + 3, (4, 4), (8, 8))),
        ("states", lambda: TileMap(STATES.to_sparse(), (4, 4), (8, 8))),
        ("shape", lambda: TileMap(STATES, (4, 4), 8)),
        ("shape", lambda: TileMap(STATES, (4, 4), (8,))),
        ("shape", lambda: TileMap(STATES, (4, 4), (-8, 8))),
        ("shape", lambda: TileMap(STATES, (4, 4), (8.0, 8))),
        ("tile", lambda: TileMap(STATES, None, (8, 8))),
        ("mask_kind", lambda: TileMap(STATES, (4, 4), (8, 8), mask_kind="int")),
        ("spec", lambda: TileMap(STATES, (4, 4), (8, 8), spec=3)),
        ("window", lambda: TileMap.from_spec(8, 8, window="a")),
        ("Lq", lambda: TileMap.from_spec(2**40, 8)),
        ("q_offset", lambda: TileMap.from_spec(8, 8, q_offset=2**40)),
        ("q_offset", lambda: TileMap.from_spec(8, 8, q_offset=True)),
        ("q_offset[1]", lambda: TileMap.from_spec(8, 8, q_offset=torch.tensor([0, 2**40]))),
        ("kv_lengths[0]", lambda: TileMap.from_spec(8, 8, kv_lengths=ints(9))),
        ("speed", lambda: plan(**dense_args(), speed=1)),
        ("max_q", lambda: plan(**dense_args(), max_q=1)),
        ("block_table", lambda: plan(**dense_args(), block_table=ints(1)[None], max_k=1)),
    ],
)
def test_other_refusals(name, make):
    with pytest.raises(InvalidArgument) as caught:
        make()
    assert str(caught.value).startswith(f"{name}: got ")


def caught(function):
    with pytest.raises((InvalidArgument, Unsupported)) as error:
        function(**dense_args())
    return error.value


WRONG = {
    "invalid": lambda q, k, v: attention(q, k, v, window=-1),
    "unknown": lambda q, k, v: attention(q, k, v, is_causal=True),
    "unsupported": lambda q, k, v: attention(q, k, v, backend="hopper"),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
def test_an_error_of_another_process_is_the_same(wrong, again):
    """A pool of processes waits without end for one that cannot be unpickled."""
    error = caught(wrong)
    error.place = "where it was"
    got = again(error)
    assert type(got) is type(error)
    assert str(got) == str(error)
    assert vars(got) == vars(error)


@pytest.mark.parametrize("wrong", [WRONG["invalid"], WRONG["unknown"]], ids=["invalid", "unknown"])
def test_a_graph_that_cannot_be_says_which_argument_is_wrong(wrong):
    """With fullgraph=True torch shows what was raised while it traced, if it can trace how that is made."""
    error = caught(wrong)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"{type(error).__name__}.'{error.argument}'"):
        torch.compile(wrong, fullgraph=True, backend="eager")(**dense_args())


@pytest.mark.parametrize(
    ("function", "arguments", "changes", "remedy"),
    [
        (attention, dense_args, {"k": randn(B, 3, Lk, D), "v": randn(B, 3, Lk, D)}, "needs layout='blhd'"),
        (paged_attention, paged_args, {"k_pages": randn(6, 4, 3, D), "v_pages": randn(6, 4, 3, D)}, "pages are [num"),
        (varlen_attention, varlen_args, {"cu_seqlens_q": ints(2, 3, 5)}, "these are offsets, not lengths"),
        (attention, dense_args, {"kv_lengths": [7, 3]}, "torch.tensor(kv_lengths)"),
        (attention, dense_args, {"q": randn(B, H, Lq, D).bfloat16()}, "convert k to torch.bfloat16, or q to"),
    ],
    ids=["heads", "pages", "offsets", "list", "dtype"],
)
def test_common_mistakes_have_a_remedy(function, arguments, changes, remedy):
    with pytest.raises(InvalidArgument) as caught:
        function(**(arguments() | changes))
    assert remedy in str(caught.value).partition("; ")[2]


def test_tensors_the_other_way_round_are_named_once(monkeypatch):
    """`[B, L, H, D]` as `[B, H, L, D]` is another computation, and a legal one."""
    monkeypatch.setattr(shapes, "_warned", False)
    q, k = torch.randn(1, 300, 8, 4), torch.randn(1, 300, 2, 4)
    usual = [(q[:, :256], k[:, :256], {}), (q, k, {"layout": "blhd"}), (q[:, :, :7], k, {}), (q, k[:, :100], {})]
    usual += [(q[:, :, :1], k[:, :, :1], {})]
    for q_, k_, options in usual:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            attention(q_, k_, k_, backend="torch", **options)
    with pytest.warns(UserWarning, match=r"q as \[B, H, L, D\] has 300 heads of 8 rows .* layout='blhd'"):
        got = attention(q, k, k, backend="torch")
    assert got.shape == q.shape
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        attention(q, k, k, backend="torch", causal=True)
    monkeypatch.setattr(shapes, "_warned", False)
    turned = (x.transpose(1, 2) for x in (q, k, k))
    with pytest.warns(UserWarning, match=r"q as \[B, L, H, D\] .* layout='bhld'"):
        attention(*turned, layout="blhd", backend="torch")
