"""The entry points. Each checks its arguments, makes a plan and runs it; everything else is below them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from . import autograd, ops
from .core import cost
from .core.eager import left_alone
from .core.options import Array, Options
from .core.plan import Plan
from .core.tensors import Tensors
from .core.tracing import is_in_transform, is_traced, is_wrapper
from .dispatch import activity, call_cache, planner
from .errors import InvalidArgument
from .signatures import NAMES, AttentionOptions, Keys, PagedOptions, VarlenOptions, shows
from .state import AttentionState
from .validation import calls, keywords, meta
from .validation.arrays import returner
from .validation.calls import Call

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def attention(
    q: Array, k: Keys, v: Keys, *, return_lse: Literal[False] = False, **options: Unpack[AttentionOptions]
) -> Array: ...


@overload
def attention(
    q: Array, k: Keys, v: Keys, *, return_lse: Literal[True], **options: Unpack[AttentionOptions]
) -> AttentionState: ...


@overload
def attention(
    q: Array, k: Keys, v: Keys, *, return_lse: bool, **options: Unpack[AttentionOptions]
) -> Array | AttentionState: ...


@shows(AttentionOptions)
def attention(q: Array, k: Keys, v: Keys, **options: Any) -> Array | AttentionState:
    """Attention of queries over keys and values: prefill, decode, and anything between.

    Args:
        q: `[B, H, Lq, D]`, float32, float16 or bfloat16.
        k: `[B, Hkv, Lk, D]`; `H` is a multiple of `Hkv`. No wider than `q`; may be `Quantised`.
        v: `[B, Hkv, Lk, Dv]`; likewise.
        scale: multiplies `q k`, in float32. Default `D ** -0.5`.
        causal: a query sees keys up to its own position.
        q_offset: the position of the first query, an int or an int tensor `[B]`. Default: the queries are the last
            positions (`Lk - Lq`, or `kv_lengths - Lq`). 0 aligns causal to the top left, as torch's SDPA does.
        k_start: the position of the first key, an int or an int tensor `[B]`.
        k_stride: positions from one key to the next, likewise: key `j` stands at `k_start + k_stride * j`.
        q_stride: positions from one query to the next, likewise: query `i` stands at `q_offset + q_stride * i`.
        window: `W` keys with the query's own, or `(left, right)` keys beside it; None in a pair is unlimited.
        chunk: a query sees keys of its own chunk of this many positions.
        mask: bool (True = attend) or float (added; `-inf` hides), `[Lq, Lk]`, `[H, Lq, Lk]` or `[B, H, Lq, Lk]`, each
            dim full or 1.
        tree_mask: bool `[B or 1, Lq, Lq]`: which of the last `Lq` keys (the queries' own) each query sees; those before
            them are seen as far as other rules say.
        positions: int `[B or 1, Lq]`, beside `tree_mask`: where the queries and their own keys stand, none before the
            keys that come first. Default: one after the other.
        softcap: `s` becomes `softcap * tanh(s / softcap)`, before any bias.
        alibi_slopes: `[H]` or `[B, H]`: adds `-slope * |qpos - kpos|`. See `tilewise.alibi_slopes`.
        q_bias: float32 `[B or 1, H or 1, Lq]`, added to the scores of each query; for packed queries `[T, H or 1]`.
        k_bias: likewise for each key (pages: up to the longest context). `-inf` hides the key.
        sinks: `[H]`: one more logit in each row's softmax, with no value.
        key_indices: int32 `[B, Lq, n]` or `[B, Hkv, Lq, n]`: the keys that each query sees, in any order, as far as
            other rules leave them; -1 is none. No key twice.
        k_shared: as `k`, of one head: columns of the keys that all heads share (the rope part of latent attention,
            expanded). A key of head `h` is `[k[h], k_shared]`, as wide as `q`.
        block_indices: int32 `[B, ceil(Lq / block_size), n]` or `[B, Hkv, ...]`: likewise blocks of `block_size` keys,
            for each block of `block_size` queries.
        block_size: keys of a block, and queries that share its choice.
        kv_lengths: int `[B]`: keys of row `b` in use; what lies past them is never read.
        layout: `"bhld"`, or `"blhd"` for `[B, L, H, D]` in and out.
        tile_map: which tiles of `mask` to skip; the output is the same with and without.
        split_size: keys per split, fixed: a sequence then gives the same bits in any batch.
        return_lse: return an `AttentionState` of `out` and `lse`, the log of the softmax's sum.
        out: where to write, `[B, H, Lq, Dv]` (or as `layout` says) in q's dtype.
        allow_tf32: one TF32 pass for float32 inputs on a GPU.
        deterministic: of gradients, which are the same to the bit each time. False allows faster reductions where a
            backend has them. The forward pass always is.
        validate: check the values inside lengths, offsets and tables: None where they are on the CPU, True always (a
            GPU then waits), False never.
        backend: serve the call by this backend or raise `Unsupported`; None takes the best that can.

    Returns:
        `out` `[B, H, Lq, Dv]` in q's dtype and of q's kind of array. With `return_lse` an `AttentionState`: `out`, and
        `lse` float32 of `out`'s shape without its last dim.

    >>> q, k, v = (torch.randn(1, heads, 100, 64) for heads in (8, 2, 2))
    >>> attention(q, k, v, causal=True, window=32).shape
    torch.Size([1, 8, 100, 64])
    """
    return _call("attention", calls.dense, (q, k, v), options)


@overload
def varlen_attention(
    q: Array, k: Keys, v: Keys, cu_seqlens_q: Array, cu_seqlens_k: Array,
    *, return_lse: Literal[False] = False, **options: Unpack[VarlenOptions],
) -> Array: ...  # fmt: skip


@overload
def varlen_attention(
    q: Array, k: Keys, v: Keys, cu_seqlens_q: Array, cu_seqlens_k: Array,
    *, return_lse: Literal[True], **options: Unpack[VarlenOptions],
) -> AttentionState: ...  # fmt: skip


@overload
def varlen_attention(
    q: Array, k: Keys, v: Keys, cu_seqlens_q: Array, cu_seqlens_k: Array,
    *, return_lse: bool, **options: Unpack[VarlenOptions],
) -> Array | AttentionState: ...  # fmt: skip


@shows(VarlenOptions)
def varlen_attention(
    q: Array, k: Keys, v: Keys, cu_seqlens_q: Array, cu_seqlens_k: Array, **options: Any
) -> Array | AttentionState:
    """Attention within packed sequences: sequence `b` is rows `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]` of `q`.

    Args:
        q: `[Tq, H, D]`.
        k: `[Tk, Hkv, D]`, or `Quantised`.
        v: `[Tk, Hkv, Dv]`, likewise.
        cu_seqlens_q: int32 `[B + 1]`, from 0, never falling. Rows past the last offset give 0.
        cu_seqlens_k: int32 `[B + 1]`, likewise for `k` and `v`.
        max_q: the longest sequence of queries. Without it a GPU call plans for all rows in one sequence.
        max_k: the longest sequence of keys, likewise.
        kv_lengths: int `[B]`: keys in use of each sequence.
        mask: as in `attention`, `[B, H, max_q, max_k]` and its broadcasts, indexed from each sequence's start.
        key_indices: `[Tq, n]` or `[Tq, Hkv, n]`; keys count from each sequence's start.

    All other options as in `attention`; positions count from each sequence's start.

    Returns:
        `out` `[Tq, H, Dv]`, and with `return_lse` `lse` `[Tq, H]`.

    >>> q, k, v = (torch.randn(10, 4, 32) for _ in range(3))
    >>> cu = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> varlen_attention(q, k, v, cu, cu, causal=True).shape
    torch.Size([10, 4, 32])
    """
    return _call("varlen_attention", calls.varlen, (q, k, v, cu_seqlens_q, cu_seqlens_k), options)


@overload
def paged_attention(
    q: Array, k_pages: Keys, v_pages: Keys, block_table: Array, context_lens: Array,
    *, return_lse: Literal[False] = False, **options: Unpack[PagedOptions],
) -> Array: ...  # fmt: skip


@overload
def paged_attention(
    q: Array, k_pages: Keys, v_pages: Keys, block_table: Array, context_lens: Array,
    *, return_lse: Literal[True], **options: Unpack[PagedOptions],
) -> AttentionState: ...  # fmt: skip


@overload
def paged_attention(
    q: Array, k_pages: Keys, v_pages: Keys, block_table: Array, context_lens: Array,
    *, return_lse: bool, **options: Unpack[PagedOptions],
) -> Array | AttentionState: ...  # fmt: skip


@shows(PagedOptions)
def paged_attention(
    q: Array, k_pages: Keys, v_pages: Keys, block_table: Array, context_lens: Array, **options: Any
) -> Array | AttentionState:
    """Attention over keys and values that lie in pages: key `j` of row `b` is slot `j % page_size` of page
    `block_table[b, j // page_size]`.

    Args:
        q: `[B, H, Lq, D]` (or as `layout` says), or packed `[T, H, D]` with `cu_seqlens_q`.
        k_pages: `[num_pages, page_size, Hkv, D]`, any page size; may be `Quantised`.
        v_pages: `[num_pages, page_size, Hkv, Dv]`, likewise.
        block_table: int32 `[B, max_pages]`; entries past a row's length are never read.
        context_lens: int32 `[B]`: all keys in the cache, those of the current queries included. The queries are the
            last `Lq` positions: append first, then attend.
        cu_seqlens_q: int32 `[B + 1]`, for packed queries of different lengths.
        max_q: the longest sequence of packed queries.
        mask: as in `attention`; its last dim may stop at the longest context.
        key_indices: as in `attention`, and of packed queries as in `varlen_attention`: positions, not slots of pages.

    All other options as in `attention`.

    Returns:
        `out` in the form of `q`, with `Dv`; with `return_lse`, `lse` too.

    >>> pages = torch.randn(2, 8, 16, 4, 32)  # K and V, 8 pages of 16 tokens, 4 heads
    >>> table = torch.tensor([[5, 2, 0], [7, 1, 0]], dtype=torch.int32)
    >>> lengths = torch.tensor([40, 17], dtype=torch.int32)
    >>> paged_attention(torch.randn(2, 8, 1, 32), *pages, table, lengths).shape
    torch.Size([2, 8, 1, 32])
    """
    return _call("paged_attention", calls.paged, (q, k_pages, v_pages, block_table, context_lens), options)


PLANNED_OUTSIDE = "tilewise.plan reads values and addresses: it runs outside graphs, and not with fullgraph=True"
UNREAD = ("sinks", "alibi_slopes", "q_bias", "k_bias", "out")  # by a plan


def plan(
    q: Array,
    k: Keys,
    v: Keys,
    *,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    max_q: int | None = None,
    max_k: int | None = None,
    block_table: Array | None = None,
    context_lens: Array | None = None,
    backend: str | None = None,
    device: str | None = None,
    **options: Any,
) -> Plan:
    """What a call with these arguments would run, and what it would cost, without running it.

    Takes the arguments of `attention`, of `varlen_attention` (with `cu_seqlens_k`) or of `paged_attention` (with
    `block_table`), the tables by name. Reads lengths and masks to count the work; on a GPU that waits. Where inputs
    require grad, `backward` is the plan of their gradients.

    `device` names another machine, such as "sm_90", "gfx942", "apple-m3" or "neon": what would run there, without
    having one. Tensors may be anywhere; an unknown name raises `InvalidArgument` with all names.

    >>> q = torch.randn(1, 8, 1024, 64)
    >>> plan(q, q, q, causal=True).cost.flops == 2 * (64 + 64) * 8 * 1024 * 1025 // 2
    True
    """
    known = Options.__dataclass_fields__
    if unknown := [name for name in options if name not in known]:
        keywords.refuse(unknown, known)
    tables = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "context_lens": context_lens}
    for name, x in {"q": q, "k": k, "v": v, **tables, "block_table": block_table, **options}.items():
        if isinstance(x, torch.Tensor) and (is_wrapper(x) or is_in_transform(x)):
            kind = "tensor of torch.vmap or torch.func" if is_in_transform(x) else type(x).__name__
            raise InvalidArgument(name, f"a {kind}", "one with memory, or on the meta device")
    for name, x in {**tables, **options}.items():
        if name not in UNREAD and isinstance(x, torch.Tensor) and x.is_meta:
            remedy = "take tensors with memory, or leave it out"
            raise InvalidArgument(name, "a tensor on meta", "its values: the plan counts the work by them", remedy)
    needed = autograd.needed({"q": q, "k": k, "v": v, **options})
    if needed and options.get("k_shared") is not None:
        k = calls.joined(k, options.pop("k_shared"), options.get("layout"))
        needed = autograd.needed({"q": q, "k": k, "v": v, **options})
    if block_table is not None:
        if "kv_lengths" in options or cu_seqlens_k is not None or max_k is not None:
            raise InvalidArgument("block_table", "pages with kv_lengths, cu_seqlens_k or max_k", "context_lens alone")
        given = Options(cu_seqlens_q=cu_seqlens_q, max_q=max_q, **options)
        call = calls.paged(q, k, v, block_table, context_lens, given)
    elif cu_seqlens_k is not None:
        given = Options(max_q=max_q, max_k=max_k, **options)
        with autograd.set_aside(needed):
            call = calls.varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, given)
    else:
        for name, alone in (
            ("cu_seqlens_q", cu_seqlens_q),
            ("max_q", max_q),
            ("max_k", max_k),
            ("context_lens", context_lens),
        ):
            if alone is not None:
                raise InvalidArgument(
                    name, "given alone", "cu_seqlens_q with cu_seqlens_k, or block_table with context_lens"
                )
        with autograd.set_aside(needed):
            call = calls.dense(q, k, v, Options(**options))
    planner.check_name(backend)
    threads = torch.get_num_threads()
    if needed:
        call.problem = replace(call.problem, return_lse=True)
    if device is None:
        chosen = planner.choose(call.problem, backend, threads)
    else:
        chosen = planner.choose_on(device, call.problem, backend, threads)
    if needed:
        chosen = replace(chosen, backward=autograd.plan(call.problem, needed, backend, options, device))
    return replace(chosen, cost=cost.estimate(call.problem, call.tensors, chosen.tile))


left_alone(plan, PLANNED_OUTSIDE)


def _call(name: str, check: Callable[..., Call], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Every call of an entry point: as an operator, by the call cache, or checked, planned and run."""
    key, traced = None, is_traced()
    if not traced:
        key = call_cache.key_of(name, args, options)
        if (cached := call_cache.find(key)) is not None:
            try:
                return cached(args, options)
            except RuntimeError:  # a tensor without strided memory (mkldnn) may have the key of one with it
                check(*args, Options(**options))
                raise
    if unknown := [option for option in options if option not in NAMES[name]]:
        keywords.refuse(unknown, NAMES[name])
    as_operator = traced or ops.needs_operator((*args, *options.values()))
    given = {**dict(zip("qkv", args, strict=False)), **options}
    trains = name in autograd.TABLES and not as_operator and autograd.needed(given)
    if given.get("k_shared") is not None and (as_operator or trains):
        args = (args[0], calls.joined(args[1], options.pop("k_shared"), options.get("layout")), *args[2:])
    if as_operator:
        if not traced and meta.is_meta(args[0]):
            _check_meta(name, check, args, options)
        return ops.call(name, args, options)
    if trains:
        return autograd.call(name, args, options)
    call = check(*args, Options(**options))
    back, backend = returner(args[0]), options.get("backend")
    planner.check_name(backend)
    chosen = planner.choose(call.problem, backend, torch.get_num_threads())
    if call.problem.is_empty:
        _write_unseen(call.tensors)
    else:
        copied = call.problem.shared != chosen.problem.shared
        planner.load(chosen.backend).run(chosen, call.tensors.whole() if copied else call.tensors)
        activity.ran(chosen)
        if not copied:
            call_cache.remember(key, args, options, call, chosen)
    return back(call.out) if call.lse is None else AttentionState(back(call.out), back(call.lse))


def _check_meta(name: str, check: Callable[..., Call], args: tuple[Any, ...], options: dict[str, Any]) -> None:
    longest = ["max_k"] * (name == "varlen_attention")
    if name == "varlen_attention" or options.get("cu_seqlens_q") is not None:
        longest.append("max_q")
    planner.check_name(options.get("backend"))
    if (given := meta.checkable(options, longest)) is not None:
        with torch.no_grad():
            check(*args, Options(**given))


def _write_unseen(t: Tensors) -> None:
    """The result of rows that see no key; those of no sequence have no sink either."""
    t.out.zero_()
    if t.lse is None:
        return
    t.lse.fill_(-torch.inf)
    if t.sinks is not None:
        rows = torch.arange(t.lse.shape[2], device=t.lse.device)
        owned = rows >= 0 if t.cu_seqlens_q is None else rows < t.cu_seqlens_q[-1]
        t.lse.copy_(torch.where(owned, t.sinks[:, None], -torch.inf))
