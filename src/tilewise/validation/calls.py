"""From the arguments of an entry point to a `Problem` and its `Tensors`.

`arguments.py` checks each argument by itself, this file how they fit together, and `values.py` the values inside
lengths, offsets and tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..core.arrays import to_tensor
from ..core.dropout import as_seed
from ..core.expression.mods import Mods, bind
from ..core.expression.spans import split
from ..core.mask_rules import PLAIN_PLACES, Offset, Places, place_rows
from ..core.options import (
    LIMIT,
    PLACES,
    STATISTICS,
    Options,
    as_block_size,
    as_dropout_p,
    as_flag,
    as_offset,
    as_places,
    as_rules,
    as_scale,
    as_size,
    as_softcap,
    as_split_size,
    is_int,
    to_int,
    with_rules,
)
from ..core.problem import Form, MaskSpec, Problem, Selection
from ..core.tensors import Tensors
from ..errors import InvalidArgument
from ..quantised import Quantised
from . import shapes, values
from .arguments import Checker, Operand
from .function_checks import check_loads
from .memory import is_aligned, is_large, is_v_in_k
from .tile_checks import as_tile_map, check_map_of_mod, check_tile_map

if TYPE_CHECKING:
    from .statistics import Requested


@dataclass(slots=True)
class Call:
    """A checked call. `out` and `lse` are what is returned, in the caller's layout; `tensors` has views of them."""

    problem: Problem
    tensors: Tensors
    out: torch.Tensor
    lse: torch.Tensor | None
    requested: Requested | None = None  # statistics, by `return_aux`


def dense(q: Any, k: Any, v: Any, o: Options) -> Call:
    """Checks a call of `attention`."""
    c = Checker(q, o.layout, packed=False)
    ck, cv = (c.operand(name, x, c.form_of_q()) for name, x in (("k", k), ("v", v)))
    B, H, Lq, _ = c.q.shape
    shapes.warn_if_transposed(H, Lq, ck.data.shape, c.form_of_q())
    if ck.data.shape[0] != B:
        raise InvalidArgument("k", f"a batch of {ck.data.shape[0]}", f"{B}, as q")
    lengths = None if o.kv_lengths is None else c.ints("kv_lengths", o.kv_lengths, (B,))
    t = Tensors(c.q, ck.data, cv.data, c.q, kv_lengths=lengths)
    return _checked(c, "dense", ck, cv, t, o, batch=B, q_len=Lq, kv_len=ck.data.shape[2])


def varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, o: Options) -> Call:
    """Checks a call of `varlen_attention`."""
    c = Checker(q, o.layout, packed=True)
    ck, cv = (c.operand(name, x, "[T, H, D]") for name, x in (("k", k), ("v", v)))
    cu_q = c.ints("cu_seqlens_q", cu_seqlens_q, (None,))
    cu_k = c.ints("cu_seqlens_k", cu_seqlens_k, (len(cu_q),))
    B = len(cu_q) - 1
    q_len = values.longest("max_q", o.max_q, "cu_seqlens_q", cu_q, c.q.shape[2], o)
    kv_len = values.longest("max_k", o.max_k, "cu_seqlens_k", cu_k, ck.data.shape[2], o)
    lengths = None if o.kv_lengths is None else c.ints("kv_lengths", o.kv_lengths, (B,))
    t = Tensors(c.q, ck.data, cv.data, c.q, kv_lengths=lengths, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    return _checked(c, "varlen", ck, cv, t, o, batch=B, q_len=q_len, kv_len=kv_len)


def paged(q: Any, k: Any, v: Any, block_table: Any, context_lens: Any, o: Options) -> Call:
    """Checks a call of `paged_attention`."""
    c = Checker(q, o.layout, packed=o.cu_seqlens_q is not None)
    form = "[num_pages, page_size, Hkv, D]"
    ck, cv = (c.operand(name, x, form) for name, x in (("k_pages", k), ("v_pages", v)))
    page_size = ck.data.shape[2]
    if page_size == 0:
        raise InvalidArgument("k_pages", "pages of 0 tokens", "1 or more")
    lengths = c.ints("context_lens", context_lens, (None,))
    B = len(lengths)
    table = c.ints("block_table", block_table, (B, None))
    capacity = min(LIMIT, table.shape[1] * page_size)
    cu_q = None
    if o.cu_seqlens_q is not None:
        cu_q = c.ints("cu_seqlens_q", o.cu_seqlens_q, (B + 1,))
        q_len = values.longest("max_q", o.max_q, "cu_seqlens_q", cu_q, c.q.shape[2], o)
    elif c.q.shape[0] != B:
        raise InvalidArgument("context_lens", f"{B} lengths", f"{c.q.shape[0]}, the batch of q")
    elif o.max_q is not None:
        raise InvalidArgument(
            "max_q", o.max_q, "None: it belongs to packed queries", "give cu_seqlens_q too, or leave it out"
        )
    else:
        q_len = c.q.shape[2]
    t = Tensors(c.q, ck.data, cv.data, c.q, kv_lengths=lengths, cu_seqlens_q=cu_q, block_table=table)
    return _checked(c, "paged", ck, cv, t, o, batch=B, q_len=q_len, kv_len=capacity, page_size=page_size)


def _checked(
    c: Checker,
    form: Form,
    ck: Operand,
    cv: Operand,
    t: Tensors,
    o: Options,
    *,
    batch: int,
    q_len: int,
    kv_len: int,
    page_size: int = 0,
) -> Call:
    """The checks that all entry points share, and the `Problem`. `t` has q, k, v and tables; the rest is added here."""
    _check_keys(c, form, ck, cv, t, o, q_len, kv_len)
    t.tile_map = as_tile_map(o.tile_map, c.q.shape[1], t.k.shape[1])
    places = _positions_of_rows(c, t, o, batch)
    capacity = kv_len if form == "paged" else t.k.shape[2]
    mask, kv_len = _score_tensors(c, form, t, o, places, batch, q_len, kv_len)
    selection = _selection(c, o, t, batch, q_len)
    t.k_scales, t.v_scales = ck.scales, cv.scales
    if dropout_p := as_dropout_p(o.dropout_p):
        t.dropout_seed = as_seed(o.dropout_seed, c.device).reshape(1)
    o, mods = _functions(c, t, o)
    out, lse = _outputs(c, t, o, cv.width)
    as_flag("deterministic", o.deterministic)  # used by the backward pass; a wrong value is refused here already
    offset = _offset(form, t, o, q_len, kv_len)
    rows: Places = "rows"
    if all(is_int(x) for x in places):
        rows = as_places(places, offset, q_len, kv_len)
    else:
        t.places = place_rows(places, batch, c.device, LIMIT)
    shared = 0 if t.k_shared is None else t.k_shared.shape[3]
    # A byte of 4-bit data holds columns d and d + D/2, so V cannot be a view of the first columns of K.
    alike = ck.format == cv.format and ck.format.packing == 1 and not shared
    problem = Problem(
        form=form,
        device=c.device,
        batch=batch,
        heads=c.q.shape[1],
        kv_heads=ck.data.shape[1],
        q_len=q_len,
        kv_len=kv_len,
        head_dim=c.q.shape[3],
        value_dim=cv.width,
        q_dtype=c.q.dtype,
        k_format=ck.format,
        v_format=cv.format,
        scale=as_scale(o.scale, c.q.shape[3]),
        packed_q=c.packed,
        total_q=c.q.shape[2] if c.packed else 0,
        page_size=page_size,
        rules=as_rules(o, offset, t.kv_lengths is not None, rows, (q_len, kv_len)),
        softcap=as_softcap(o.softcap),
        alibi=t.alibi_slopes is not None,
        q_bias=t.q_bias is not None,
        k_bias=t.k_bias is not None,
        sinks=t.sinks is not None,
        mods=mods,
        mask=mask,
        tree=t.tree_mask is not None,
        positions=t.positions is not None,
        selection=selection,
        k_shared_dim=shared,
        dropout_p=dropout_p,
        tile_map=None if t.tile_map is None else t.tile_map.tile,
        split_size=as_split_size(o.split_size),
        return_lse=lse is not None,
        allow_tf32=as_flag("allow_tf32", o.allow_tf32),
        v_in_k=alike and is_v_in_k(t.k, t.v) and is_v_in_k(t.k_scales, t.v_scales),
        aligned=all(is_aligned(x) for x in (t.q, t.k, t.v, t.out)),
        large_kv=is_large(t.k),
        copies=tuple(c.copies),
    )
    _check_values(problem, t, o, places)
    requested = None
    if any(getattr(o, name) is not None for name in STATISTICS):
        from . import statistics  # few calls need it

        requested = statistics.requested(c, form, t, o, out, capacity)
    return Call(problem, t, out, lse, requested)


def _check_keys(
    c: Checker, form: Form, ck: Operand, cv: Operand, t: Tensors, o: Options, q_len: int, kv_len: int
) -> None:
    """Checks that widths, rows, heads and lengths of K, V and `k_shared` fit q. Sets `t.k_shared`."""
    names = ("k_pages", "v_pages") if form == "paged" else ("k", "v")
    H, Hkv, D = c.q.shape[1], ck.data.shape[1], c.q.shape[3]
    t.k_shared = None if o.k_shared is None else _shared(c, form, ck, o.k_shared)
    shared = 0 if t.k_shared is None else t.k_shared.shape[3]
    if ck.width + shared != D:
        with_shared = f", with k_shared {ck.width + shared}" * bool(shared)
        raise InvalidArgument(names[0], f"a last dim of {ck.width}{with_shared}", f"{D}, as q")
    if cv.data.shape[:3] != ck.data.shape[:3]:
        given, want = (tuple(x.data.shape[:3]) for x in (cv, ck))
        raise InvalidArgument(names[1], f"(batch or pages, heads, rows) = {given}", f"{want}, as {names[0]}")
    if Hkv == 0 or H % Hkv:
        forms = {"dense": "[B, L, H, D] needs layout='blhd'", "paged": "pages are [num_pages, page_size, Hkv, D]"}
        raise InvalidArgument(names[0], f"{Hkv} heads", f"a divisor of q's {H}", forms.get(form, ""))
    as_size("the length of q", q_len)
    as_size(f"the length of {names[0]}", kv_len)
    if not (o.validate is None or isinstance(o.validate, bool)):
        raise InvalidArgument("validate", repr(o.validate), "None, True or False")


def _positions_of_rows(c: Checker, t: Tensors, o: Options, batch: int) -> list[Any]:
    """Sets `t.q_offset` if the option is a tensor. Returns k_start, k_stride and q_stride, ints or tensors `[B]`."""
    o.q_offset = to_int(o.q_offset)
    if o.q_offset is not None and not is_int(o.q_offset):
        if isinstance(o.q_offset, (bool, float, str)):
            raise InvalidArgument("q_offset", repr(o.q_offset), "None, an int or an int tensor [B]")
        t.q_offset = c.ints("q_offset", o.q_offset, (batch,))
    return [c.place(name, getattr(o, name), batch) for name in PLACES]


def _outputs(c: Checker, t: Tensors, o: Options, width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`out` and `lse` in the caller's layout, new or given. Sets `t.out` and `t.lse` to views of them."""
    out = c.output(o.out, width, t)
    t.out = c.common(out)
    if not as_flag("return_lse", o.return_lse):
        return out, None
    lse = out.new_empty(out.shape[:-1], dtype=c.wide)
    t.lse = c.common(lse[..., None])[..., 0]
    return out, lse


def _score_tensors(
    c: Checker, form: Form, t: Tensors, o: Options, places: list[Any], batch: int, q_len: int, kv_len: int
) -> tuple[MaskSpec | None, int]:
    """Adds to `t` all tensors that change scores. Returns the mask's kind, and `kv_len`, which a mask, bias or tile map
    over pages may shorten.
    """
    H, spec = c.q.shape[1], None
    if o.mask is not None:
        t.mask, spec = c.mask(o.mask, (batch, H, q_len, kv_len), any_keys=form == "paged")
        kv_len = t.mask.shape[3]  # over pages it may be shorter
    t.alibi_slopes = None if o.alibi_slopes is None else c.per_head("alibi_slopes", o.alibi_slopes, H, batch)
    t.sinks = None if o.sinks is None else c.sinks(o.sinks, H)
    if o.tree_mask is not None:
        t.tree_mask = c.tree(o.tree_mask, batch, q_len)
    if o.positions is not None:
        t.positions = _positions(c, o, places, batch, q_len)
    if o.q_bias is not None:
        t.q_bias = c.bias("q_bias", o.q_bias, (batch, H, c.q.shape[2]), c.packed, any_keys=False)
    if o.k_bias is not None:
        packed, any_keys = form == "varlen", form == "paged" and (spec is None or spec.broadcast[3])
        sizes = (batch, H, t.k.shape[2] if packed else kv_len)
        t.k_bias = c.bias("k_bias", o.k_bias, sizes, packed, any_keys)
        kv_len = t.k_bias.shape[2] if any_keys else kv_len
        t.mask = None if t.mask is None else t.mask[..., :kv_len]
    if form == "paged" and t.mask is None and t.k_bias is None and t.tile_map is not None:
        kv_len = min(kv_len, t.tile_map.shape[1])
    return spec, kv_len


def _functions(c: Checker, t: Tensors, o: Options) -> tuple[Options, Mods | None]:
    """What the functions of the user compute, and the options with the rules that a mask_mod states. Sets `t.captured`.

    A tile map of rules has to name the call's, and nodes of a tree have rules of their own: then functions stay whole.
    """
    bound = bind(o.score_mod, o.mask_mod, c.device)
    check_map_of_mod(t.tile_map, None if bound is None else bound.mods)
    if bound is None:
        return o, None
    tensors = tuple(c.captured(n, x) for n, x in enumerate(bound.tensors))
    mods: Mods | None = bound.mods
    if (t.tile_map is None or t.tile_map.spec is None) and o.tree_mask is None:
        rules, rest = split(bound.mods)
        if (narrowed := with_rules(o, rules)) is not None:
            o, mods = narrowed, rest
    t.captured = () if mods is None else tensors
    return o, mods


def _offset(form: Form, t: Tensors, o: Options, q_len: int, kv_len: int) -> Offset:
    """The position of the first query, as `MaskRules.q_offset` has it."""
    if t.q_offset is not None:
        return "rows"
    if o.q_offset is not None:
        return as_offset(o.q_offset, q_len, kv_len)
    return "end" if t.kv_lengths is not None or form != "dense" else kv_len - q_len


def _check_values(problem: Problem, t: Tensors, o: Options, places: list[Any]) -> None:
    """Checks the values inside tables, indices and a tile map, as `validate` asks; tables become int32."""
    if any(isinstance(x, torch.Tensor) and values.readable(x, o.validate) for x in places):
        values.check_places(problem, places, t.q_offset, o.validate)
    values.check_tables(problem, t.k.shape[0 if problem.form == "paged" else 2], o.validate, *t.tables())
    ranges: dict[str, tuple[int, ...]] = {"q_offset": (-LIMIT, LIMIT), "block_table": ()}
    ranges |= {"kv_lengths": (0, problem.kv_len), "cu_seqlens_q": (0, t.q.shape[2]), "cu_seqlens_k": (0, t.k.shape[2])}
    for name, ends in ranges.items():
        if (x := getattr(t, name)) is not None:
            setattr(t, name, values.as_int32(x, *ends))
    values.check_positions(problem, t, o.validate)
    check_tile_map(problem, t, o.validate)
    if o.validate is True:
        check_loads(problem, t)
    values.check_indices(problem, t.key_indices, o.validate)


def _shared(c: Checker, form: Form, ck: Operand, given: Any) -> torch.Tensor:
    """Checks `k_shared`, the last columns of K that all heads share: as k, with one head."""
    if isinstance(given, Quantised) or ck.format.is_quantised:
        raise InvalidArgument("k_shared", "quantised keys", "k and k_shared of floats", "keys in one tensor")
    x = c.operand("k_shared", given, "[T, H, D]" if form == "varlen" else c.form_of_q()).data
    want = (ck.data.shape[0], 1, ck.data.shape[2])
    if tuple(x.shape[:3]) != want or x.dtype != ck.data.dtype:
        got = f"{x.dtype}, (batch, heads, rows) = {tuple(x.shape[:3])}"
        raise InvalidArgument("k_shared", got, f"{ck.data.dtype}, {want}: one head for all of k's")
    return x


def device_of(q: Any) -> torch.device:
    """Where a call runs whose queries these are."""
    return q.device if isinstance(q, torch.Tensor) else torch.device("cpu")


def joined(k: Any, k_shared: Any, layout: Any = "bhld") -> torch.Tensor:
    """`[k, k_shared]` as one tensor, `k_shared` repeated for each head: for gradients and graphs."""
    k, x = to_tensor("k", k), to_tensor("k_shared", k_shared)
    heads = 2 if layout == "blhd" else 1
    want = tuple(1 if dim == heads else n for dim, n in enumerate(k.shape[:-1]))
    if tuple(x.shape[:-1]) != want or x.dtype != k.dtype:
        raise InvalidArgument("k_shared", f"{x.dtype} {tuple(x.shape)}", f"{k.dtype} {want}, then its columns")
    return torch.cat([k, x.expand(*k.shape[:-1], -1)], -1)


def _positions(c: Checker, o: Options, places: list[Any], batch: int, q_len: int) -> torch.Tensor:
    """The positions of queries and their own keys: int32 `[B, Lq]`, stride 0 where sequences share them."""
    if o.tree_mask is None:
        remedy = "q_offset= says where the first query stands, q_stride= how others follow"
        raise InvalidArgument("positions", "positions without tree_mask", "tree_mask= beside it", remedy)
    given = zip(PLACES, places, PLAIN_PLACES, strict=True)
    moved = [name for name, x, plain in given if not is_int(x) or x != plain]
    if o.q_offset is not None or moved:
        name = "q_offset" if o.q_offset is not None else moved[0]
        raise InvalidArgument(name, "given beside positions", "one of them", "positions say where queries stand")
    shared = getattr(o.positions, "shape", (0,))[0] == 1 != batch
    x = values.as_int32(c.ints("positions", o.positions, (1 if shared else batch, q_len)))
    return x.expand(batch, q_len)


def _selection(c: Checker, o: Options, t: Tensors, batch: int, q_len: int) -> Selection | None:
    """Adds key or block indices to `t`; returns their `Selection`, or None if there are none."""
    block = as_block_size(o)
    name = "key_indices" if o.block_indices is None else "block_indices"
    given = o.key_indices if o.block_indices is None else o.block_indices
    if given is None:
        return None
    if name == "block_indices" and c.packed:
        remedy = "key_indices take packed queries"
        raise InvalidArgument(name, "blocks of packed queries", "queries [B, H, Lq, D]", remedy)
    rows = c.q.shape[2] if c.packed else -(-q_len // block)
    t.key_indices, by_head = c.indices(name, given, batch, t.k.shape[1], rows)
    return Selection(t.key_indices.shape[-1], block, by_head)
