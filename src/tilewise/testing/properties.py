"""Properties of results, whatever the numbers. Each takes a backend and a device and raises `Mismatch`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from ..api import attention, paged_attention, varlen_attention
from ..core.tensors import sequences
from ..core.tile_map import TileMap
from ..errors import Unsupported
from ..reference import visible_cells
from ..state import AttentionState, merge
from .case import Case, make
from .check import Mismatch, check_call, check_case

Property = Callable[[str | None, str], None]
PROPERTIES: dict[str, Property] = {}


def prop(fn: Property) -> Property:
    PROPERTIES[fn.__name__] = fn
    return fn


def same(what: str, a: Any, b: Any) -> None:
    """Raises unless two results are equal to the bit (NaN only in the same places)."""
    pairs = zip(a, b, strict=True) if isinstance(a, AttentionState) else [(a, b)]
    for x, y in pairs:
        if x.shape != y.shape or not bool(((x == y) | (x.isnan() & y.isnan())).all()):
            raise Mismatch(f"{what}: the results differ, by up to {float((x.float() - y.float()).abs().max()):.3g}")


def fill_free_memory(device: str, value: float) -> None:
    """Fills memory that the next calls will take with a value: blocks of every size, which are freed again."""
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
    blocks = [torch.full((1 << n,), value, device=device) for n in range(7, 23) for _ in range(4)]
    del blocks


SOME = [
    Case(Hkv=2, Lq=70, Lk=200, D=64, causal=True),
    Case(Hkv=2, Lq=70, Lk=200, D=64, dtype="f16", window=(30, 5), sinks=True),
    Case(B=3, Hkv=1, Lq=1, Lk=900, D=64, lengths=(900, 1, 333)),
    Case(B=3, Hkv=1, Lq=5, Lk=300, D=64, lengths=(300, 1, 222), causal=True, softcap=5.0),
    Case(Lq=90, Lk=150, mask="bhqk", mask_kind="f32", alibi="h"),
    Case(form="varlen", q_lengths=(70, 1, 33), lengths=(70, 90, 33), causal=True),
    Case(form="paged", B=3, Hkv=2, Lq=1, lengths=(1, 70, 333), D=64, page=16),
    Case(form="paged", B=3, Hkv=2, Lq=1, lengths=(1, 70, 333), D=64, page=16, k="int8/64", v="int4/64"),
]


@prop
def repeats(backend: str | None, device: str) -> None:
    """The same call gives the same bits."""
    for case in SOME:
        inputs = make(case, device)
        first = inputs.call(backend, return_lse=True)
        for _ in range(3):
            same(str(case), first, inputs.call(backend, return_lse=True))


@prop
def lse_does_not_change_out(backend: str | None, device: str) -> None:
    for case in SOME:
        inputs = make(case, device)
        same(str(case), inputs.call(backend), inputs.call(backend, return_lse=True).out)


@prop
def slack_does_not_matter(backend: str | None, device: str) -> None:
    """NaN, Inf or numbers in slots past a length, in the slack of pages, and in padding rows, have no effect."""
    slacks = (float("nan"), float("inf"), -1e30, 0.0)
    cases = [c for c in SOME if c.lengths] + [Case(Hkv=2, Lq=50, strides="sliced")]
    for case in cases:
        results = [make(case, device, slack).call(backend, return_lse=True) for slack in slacks]
        for slack, result in zip(slacks[1:], results[1:], strict=True):
            same(f"{case} with {slack} in the slack", results[0], result)


@prop
def unused_table_entries_do_not_matter(backend: str | None, device: str) -> None:
    """Table entries past a length need not be pages."""
    for case in (c for c in SOME if c.form == "paged"):
        inputs = make(case, device)
        want = inputs.call(backend, return_lse=True)
        table = inputs.args[3]
        used = torch.arange(table.shape[1], device=device) * case.page < inputs.args[4][:, None]
        for entry in (-1, 2**30, 2**31 - 1):
            args = list(inputs.args)
            args[3] = torch.where(used, table, entry).to(torch.int32)
            got = inputs.entry(*args, backend=backend, return_lse=True, **inputs.options)
            same(f"{case} with entries of {entry}", want, got)


@prop
def hidden_keys_do_not_matter(backend: str | None, device: str) -> None:
    """A hidden key does not affect a row, even if other rows of its tile see it."""
    q, k, v = (torch.randn(1, h, 70, 32, generator=torch.Generator().manual_seed(1)).to(device) for h in (4, 2, 2))
    visible = torch.rand(70, 70, generator=torch.Generator().manual_seed(2)).to(device) < 0.5
    rows = torch.arange(70, device=device)
    visible[:, 40] = rows % 3 == 0
    bias = torch.where(visible, 0.5, -torch.inf)
    indices = torch.where(visible, rows, -1).to(torch.int32)[None]  # [1, Lq, Lk]
    options: list[tuple[dict[str, Any], torch.Tensor]] = [
        ({"causal": True}, rows < 40),
        ({"window": (5, 3)}, (rows < 37) | (rows > 45)),
        ({"chunk": 16}, rows // 16 != 40 // 16),
        ({"mask": visible}, ~visible[:, 40]),
        ({"mask": bias}, ~visible[:, 40]),
        ({"key_indices": indices}, ~visible[:, 40]),
        ({"block_indices": indices[:, :18, ::4] // 4, "block_size": 4}, ~visible[rows // 4, 40]),
    ]
    for option, masked in options:
        name_of = next(iter(option))
        try:
            clean = attention(q, k, v, return_lse=True, backend=backend, **option)
        except Unsupported:
            continue
        for filler in (float("nan"), float("inf"), 3e38):
            for name in "kv":
                spoilt = {"k": k.clone(), "v": v.clone()}
                spoilt[name][:, :, 40] = filler
                result = attention(q, spoilt["k"], spoilt["v"], return_lse=True, backend=backend, **option)
                what = f"{name_of}: {filler} in {name}[40], in rows that do not see it"
                same(what, *(AttentionState(x.out[:, :, masked], x.lse[:, :, masked]) for x in (clean, result)))
        spoilt_v = v.clone()
        spoilt_v[:, :, 40] = float("nan")
        result = attention(q, k, spoilt_v, backend=backend, **option)
        if not bool(result[:, :, ~masked].isnan().all()):
            raise Mismatch(f"{name_of}: rows that see a NaN must be NaN")


@prop
def hidden_values_do_not_matter_in_16_bits(backend: str | None, device: str) -> None:
    """The same for NaN in v, in float16 and bfloat16, if the backend supports them."""
    numbers = torch.Generator().manual_seed(1)
    wide = [torch.randn(1, h, 150, 64, generator=numbers).to(device) for h in (4, 2, 2)]
    visible = torch.rand(150, 150, generator=numbers).to(device) < 0.5
    visible[:, 64:128] = True  # a tile without hidden cells
    rows = torch.arange(150, device=device)
    for dtype in (torch.float16, torch.bfloat16):
        q, k, v = (x.to(dtype) for x in wide)
        bias = torch.where(visible, 0.5, -torch.inf).to(dtype)
        for option, masked in (
            ({"causal": True}, rows < 40),
            ({"mask": visible}, ~visible[:, 40]),
            ({"mask": bias}, ~visible[:, 40]),
        ):
            spoilt = v.clone()
            spoilt[:, :, 40] = float("nan")
            try:
                clean = attention(q, k, v, return_lse=True, backend=backend, **option)
            except Unsupported:
                continue
            result = attention(q, k, spoilt, return_lse=True, backend=backend, **option)
            what = f"{dtype}, {next(iter(option))}: NaN in v[40], in rows that do not see it"
            same(what, *(AttentionState(x.out[:, :, masked], x.lse[:, :, masked]) for x in (clean, result)))


@prop
def biases_hide(backend: str | None, device: str) -> None:
    """A key that `k_bias` hides has no effect, and a row with `q_bias` of -inf sees no key."""
    for dtype in (torch.float32, torch.float16):
        numbers = torch.Generator().manual_seed(1)
        q, k, v = (torch.randn(1, h, 150, 64, generator=numbers).to(device, dtype) for h in (4, 2, 2))
        k_bias = torch.randn(1, 4, 150, generator=numbers).to(device)
        k_bias[..., 40] = -torch.inf
        q_bias = torch.zeros(1, 1, 150, device=device)
        q_bias[..., 30] = -torch.inf
        try:
            clean = attention(q, k, v, q_bias=q_bias, k_bias=k_bias, return_lse=True, backend=backend)
        except Unsupported:
            continue
        for filler in (float("nan"), float("inf")):
            for name in "kv":
                spoilt = {"k": k.clone(), "v": v.clone()}
                spoilt[name][:, :, 40] = filler
                result = attention(
                    q, spoilt["k"], spoilt["v"], q_bias=q_bias, k_bias=k_bias, return_lse=True, backend=backend
                )
                same(f"{dtype}: {filler} in {name}[40], which k_bias hides", clean, result)
        for lq in (150, 1):  # prefill, decode
            rows: dict[str, Any] = {"q_bias": q_bias[..., :lq], "k_bias": k_bias, "backend": backend}
            mask = torch.zeros(lq, 150, device=device)
            plain = attention(q[:, :, :lq], k, v, mask=mask, return_lse=True, **rows)
            for filler in (float("nan"), float("inf")):
                mask[:, 40] = mask[30:31] = filler
                what = f"{dtype}, {lq} rows: {filler} in a mask where biases hide"
                same(what, plain, attention(q[:, :, :lq], k, v, mask=mask, return_lse=True, **rows))
        none = AttentionState(clean.out[:, :, 30], clean.lse[:, :, 30])
        same("q_bias of -inf", none, AttentionState(torch.zeros_like(none.out), torch.full_like(none.lse, -torch.inf)))
        if bool((clean.lse[:, :, 31] == -torch.inf).any()):
            raise Mismatch("q_bias of -inf in one row hides keys from the next")


@prop
def trees_hide(backend: str | None, device: str) -> None:
    """Keys that a tree mask hides have no effect, and it is as accurate as the equal dense mask; likewise with a window
    by the positions of its nodes.
    """
    for dtype, lq, positions in product(("f32", "f16"), (6, 70), (False, True)):
        case = Case(Hkv=2, Lq=lq, Lk=200, D=64, dtype=dtype, tree="1", positions=positions)
        inputs = make(replace(case, window=3) if positions else case, device)
        q, k, v = inputs.args
        call = inputs.checked()
        try:
            clean = inputs.call(backend, return_lse=True)
        except Unsupported:
            continue
        visible = torch.stack([visible_cells(seq) for seq in sequences(call.problem, call.tensors)])
        check_call(call, *attention(q, k, v, mask=visible, return_lse=True, backend=backend))
        for key, name in product((150, 200 - lq, 200 - lq + 2), "kv"):
            spoilt = {"q": q, "k": k.clone(), "v": v.clone()}
            spoilt[name][:, :, key] = float("nan")
            hidden = ~visible[0, 0, :, key]
            result = attention(*spoilt.values(), **inputs.options, return_lse=True, backend=backend)
            what = f"{dtype}: NaN in {name}, in rows from which a tree{' with positions' * positions} hides it"
            same(what, *(AttentionState(x.out[:, :, hidden], x.lse[:, :, hidden]) for x in (clean, result)))


@prop
def tile_maps_do_not_matter(backend: str | None, device: str) -> None:
    """With a map of any tile, with none, and with the mask's broadcast dims written out."""
    base = Case(Lq=150, Lk=300, D=64, pattern="blocks")
    for dims, kind, rules in (("qk", "bool", {}), ("hqk", "f32", {}), ("bhqk", "bool", {"causal": True, "window": 90})):
        inputs = make(replace(base, mask=dims, mask_kind=kind, **rules), device)  # type: ignore[arg-type]
        plain = inputs.call(backend, return_lse=True)
        mask = inputs.options["mask"]
        for tile in ((64, 64), (24, 40), (1, 7), (33, 300), (500, 1000)):
            tiled = TileMap.from_mask(mask, tile)
            same(f"{dims} {kind} {tile}", plain, inputs.call(backend, return_lse=True, tile_map=tiled))
            if rules:
                both = tiled & TileMap.from_spec(150, 300, tile, device=device, **rules)  # type: ignore[arg-type]
                same(f"{dims} {kind} {tile} and rules", plain, inputs.call(backend, return_lse=True, tile_map=both))
        expanded = mask.expand(2, 4, 150, 300).contiguous()
        same(f"{dims} {kind} expanded", plain, inputs.call(backend, return_lse=True, mask=expanded))


@prop
def tile_maps_do_not_matter_in_decode(backend: str | None, device: str) -> None:
    """A key is hidden alone: most tiles of the kernel are full, but not in a map of other tiles."""
    plain = Case(B=1, H=8, Hkv=2, Lk=300, D=64, mask="b11k")
    stored = [replace(plain, k=kind, v=kind) for kind in ("", "int8/64", "int4/64", "fp8_e4m3/64")]
    latent = replace(plain, dtype="bf16", Hkv=1, D=80, Dv=64, latent=True)
    for case, lq in product((*stored, replace(plain, dtype="bf16"), latent), (1, 3)):
        inputs = make(replace(case, Lq=lq), device)
        mask = torch.ones(1, 1, 1, 300, dtype=torch.bool, device=device)
        mask[..., 100] = False
        try:
            bare = inputs.call(backend, return_lse=True, mask=mask)
        except Unsupported:
            continue
        for tile in ((64, 64), (1, 256)):
            tiled = inputs.call(backend, return_lse=True, mask=mask, tile_map=TileMap.from_mask(mask, tile))
            same(f"{case}, {lq} queries, {tile}", bare, tiled)


@prop
def rules_equal_masks(backend: str | None, device: str) -> None:
    """Causal, window and chunk are as accurate as the equal dense mask (not to the bit: tiles differ)."""
    moved = {"causal": True, "window": 7, "offset": -5}
    strided = {"causal": True, "window": (50, None), "offset": 4, "k_start": 2, "k_stride": 3, "q_stride": 4}
    for rules in ({"causal": True}, {"window": (9, 4)}, {"chunk": 20}, moved, strided):
        case = Case(Lq=60, Lk=90, **rules)
        inputs = make(case, device)
        call = inputs.checked()
        visible = torch.stack([visible_cells(seq) for seq in sequences(call.problem, call.tensors)])
        result = attention(*inputs.args, mask=visible, return_lse=True, backend=backend)
        check_call(call, result.out, result.lse)


@prop
def batch_does_not_matter(backend: str | None, device: str) -> None:
    """With `split_size` a sequence gives the same bits alone and in any batch."""
    cases = [
        Case(B=4, Hkv=2, Lq=1, Lk=700, D=64, lengths=(700, 1, 333, 512), split_size=128),
        Case(B=3, Hkv=2, Lq=4, Lk=300, D=64, lengths=(300, 20, 222), causal=True, split_size=64, dtype="f16"),
        Case(B=3, Hkv=2, Lq=100, Lk=300, D=64, causal=True, split_size=100),
    ]
    for case in cases:
        inputs = make(case, device)
        whole = inputs.call(backend, return_lse=True)
        for b in range(case.B):
            lengths = {"kv_lengths": inputs.options["kv_lengths"][b : b + 1]} if case.lengths else {}
            options = inputs.options | lengths
            alone = attention(*(x[b : b + 1] for x in inputs.args), return_lse=True, backend=backend, **options)
            same(f"{case} row {b}", alone, AttentionState(whole.out[b : b + 1], whole.lse[b : b + 1]))


@prop
def layouts_agree(backend: str | None, device: str) -> None:
    q, k, v = make(Case(Hkv=2, Lq=70, Lk=200, D=64), device).args
    a = attention(q, k, v, causal=True, return_lse=True, backend=backend)
    seq_major = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    b = attention(*seq_major, causal=True, layout="blhd", return_lse=True, backend=backend)
    same("blhd", a, AttentionState(b.out.transpose(1, 2), b.lse.transpose(1, 2)))


@prop
def out_may_be_strided(backend: str | None, device: str) -> None:
    inputs = make(Case(Hkv=2, Lq=70, Lk=200, D=64), device)
    plain = inputs.call(backend)
    wide = plain.new_full((2, 7, 75, 80), 7.0)
    target = wide[:, 2:6, 3:73, 5:69]
    result = inputs.call(backend, out=target)
    same("out=", plain, target)
    if result.data_ptr() != target.data_ptr():
        raise Mismatch("out= was not returned")
    target.fill_(7.0)
    if not bool((wide == 7.0).all()):
        raise Mismatch("something was written beside out")


@prop
def halves_merge(backend: str | None, device: str) -> None:
    """Attention over two halves of the keys merges into attention over all; an empty half drops out."""
    inputs = make(Case(Hkv=2, Lq=20, Lk=200, D=64), device)
    q, k, v = inputs.args
    call = inputs.checked()
    parts = [
        attention(q, k[:, :, a:b], v[:, :, a:b], return_lse=True, backend=backend)
        for a, b in ((0, 3), (3, 150), (150, 150), (150, 200))
    ]
    check_call(call, *merge(parts))
    same("an empty state", parts[1], merge([parts[2], parts[1]]))


@prop
def forms_agree(backend: str | None, device: str) -> None:
    """Packed and paged calls are as accurate as the dense one on the same numbers."""
    inputs = make(Case(Hkv=2, Lq=20, Lk=96, D=64, causal=True), device)
    q, k, v = inputs.args
    call = inputs.checked()
    pack = lambda x: x.transpose(1, 2).flatten(0, 1)  # noqa: E731
    cu = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device=device) for n in (20, 96)]
    packed = varlen_attention(pack(q), pack(k), pack(v), *cu, causal=True, return_lse=True, backend=backend)
    unpack = lambda x: x.unflatten(0, (2, -1)).transpose(1, 2)  # noqa: E731
    check_call(call, unpack(packed.out), unpack(packed.lse))
    k_pages, v_pages = (x.transpose(1, 2).reshape(12, 16, 2, 64) for x in (k, v))
    table = torch.arange(12, dtype=torch.int32, device=device).view(2, 6)
    lengths = torch.tensor([96, 96], dtype=torch.int32, device=device)
    check_call(
        call, *paged_attention(q, k_pages, v_pages, table, lengths, causal=True, return_lse=True, backend=backend)
    )


@prop
def empty_sizes(backend: str | None, device: str) -> None:
    """No query, no key, no batch, no sequence."""
    sinks = torch.randn(4).to(device)
    for B, Lq, Lk in ((0, 3, 5), (2, 0, 5), (2, 0, 9000), (2, 3, 0), (0, 0, 0)):
        q, k, v = (torch.randn(B, h, n, 16, device=device) for h, n in ((4, Lq), (2, Lk), (2, Lk)))
        for options in ({}, {"sinks": sinks}, {"causal": True}):
            state = attention(q, k, v, return_lse=True, backend=backend, **options)
            want = sinks[:, None].expand(B, 4, Lq) if "sinks" in options else torch.full_like(state.lse, -torch.inf)
            same(f"B {B}, Lq {Lq}, Lk {Lk}", state, AttentionState(torch.zeros_like(q), want))
    for q_lengths, lengths in (((), ()), ((0, 0), (0, 0)), ((3, 0), (0, 0)), ((0, 0), (3, 2))):
        case = Case(form="varlen", q_lengths=q_lengths or (0,), lengths=lengths or (0,))
        check_case(case, backend, device)
    check_case(Case(form="varlen", q_lengths=(0, 0), lengths=(5000, 3)), backend, device)
    for lengths in ((0, 0), (3, 0), (5000, 70)):
        check_case(Case(form="paged", Lq=0, lengths=lengths), backend, device)
