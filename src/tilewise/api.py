"""The entry points. Each hands its arguments to `_call`, which validates, plans and runs them, or launches a repeated
call from the call cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from . import autograd, derivative_ops, differentiation, ops, statistics_ops  # noqa: F401
from .core import cost, keywords
from .core.arrays import converter_back
from .core.dropout import with_seed
from .core.eager import eager_function
from .core.expression import mods
from .core.options import STATISTICS, Array, Options
from .core.plan import Plan
from .core.private.torch import is_in_transform
from .core.signatures import NAMES, TENSORS, AttentionOptions, Keys, Kind, PagedOptions, VarlenOptions, typed_signature
from .core.tensors import Tensors
from .core.tracing import is_traced, is_wrapper
from .dispatch import activity, call_cache, planner
from .errors import InvalidArgument
from .state import AttentionState, Aux
from .validation import calls, meta
from .validation.calls import Call

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def attention(
    q: Kind, k: Keys, v: Keys, *, return_lse: Literal[False] = False, **options: Unpack[AttentionOptions]
) -> Kind: ...
@overload
def attention(
    q: Array, k: Keys, v: Keys, *, return_lse: Literal[True], **options: Unpack[AttentionOptions]
) -> AttentionState: ...
@overload
def attention(
    q: Kind, k: Keys, v: Keys, *, return_lse: bool, **options: Unpack[AttentionOptions]
) -> Kind | AttentionState: ...
@overload
def attention(
    q: Kind, k: Keys, v: Keys, *, return_aux: Sequence[str], **options: Unpack[AttentionOptions]
) -> tuple[Kind, Aux]: ...
@overload
def attention(q: Array, k: Keys, v: Keys, *, return_lse: bool = False, **options: Unpack[AttentionOptions]) -> Any: ...
@typed_signature(AttentionOptions)
def attention(q: Array, k: Keys, v: Keys, *more: Any, **options: Any) -> Array | AttentionState:
    """Attention of queries over keys and values: prefill, decode, and anything between.

    Args:
        q: `[B, H, Lq, D]`, float32, float16 or bfloat16. float64, for `gradcheck`, is computed by plain torch.
        k: `[B, Hkv, Lk, D]`; `H` is a multiple of `Hkv`. No wider than `q`; may be `Quantised`.
        v: `[B, Hkv, Lk, Dv]`; likewise.
        scale: multiplies `q k`, in float32. Default `D ** -0.5`.
        causal: a query sees keys up to its own position.
        q_offset: the position of the first query, an int or an int tensor `[B]`. Default: the queries are the last
            positions (`Lk - Lq`, or `kv_lengths - Lq`). 0 aligns causal to the top left, as torch's SDPA does.
        k_start: the position of the first key, an int or an int tensor `[B]`.
        k_stride: positions from one key to the next, likewise: key `j` is at position `k_start + k_stride * j`.
        q_stride: positions from one query to the next, likewise: query `i` is at position `q_offset + q_stride * i`.
        window: `W` keys including the query's own, or `(left, right)` keys on each side of it; None is unlimited.
        chunk: a query sees only keys of its own chunk of this many positions.
        mask: bool (True = attend) or float (added; `-inf` hides), `[Lq, Lk]`, `[H, Lq, Lk]` or `[B, H, Lq, Lk]`, each
            dim full or 1.
        tree_mask: bool `[B or 1, Lq, Lq]`: which of the last `Lq` keys (the queries' own) each query sees. Keys before
            those are visible unless another rule hides them.
        positions: int `[B or 1, Lq]`, with `tree_mask`: the positions of the queries and their own keys, none before
            the other keys. Default: consecutive.
        softcap: `s` becomes `softcap * tanh(s / softcap)`, before any bias.
        alibi_slopes: `[H]` or `[B, H]`: adds `-slope * |qpos - kpos|`. See `tilewise.alibi_slopes`.
        q_bias: float32 `[B or 1, H or 1, Lq]`, added to the scores of each query; for packed queries `[T, H or 1]`.
        k_bias: likewise for each key (pages: up to the longest context). `-inf` hides the key.
        sinks: `[H]`: one more logit in each row's softmax, with no value.
        score_mod: `score_mod(score, b, h, q_idx, kv_idx)`: a function of yours that returns the score, after all of the
            above; `-inf` hides. Plain Python with torch operations on single numbers; `b` is the batch row (of packed
            and paged calls the sequence), `h` the query head, `q_idx` and `kv_idx` are positions. Tensors that it
            captures may require grad. See docs/score-mods.md.
        mask_mod: `mask_mod(b, h, q_idx, kv_idx)`, likewise: True where the query may see the key.
        key_indices: int32 `[B, Lq, n]` or `[B, Hkv, Lq, n]`: the only keys that each query may see (sparse attention),
            in any order, each once; -1 is none. Other rules may hide more.
        dropout_p: the probability that a weight is dropped, after the softmax; the others are divided by
            `1 - dropout_p`. A multiple of 2**-16: others are rounded. `lse` is that without dropout.
        dropout_seed: decides, with batch row, head and the positions of query and key, which weights are dropped: an
            int or an int64 tensor of one element. Default: drawn from torch's generator. See `tilewise.dropout_mask`.
        k_shared: as `k`, with one head: the last columns of the keys, which all heads share (the rope part of expanded
            latent attention). A key of head `h` is `[k[h], k_shared]`, as wide as `q`.
        block_indices: int32 `[B, ceil(Lq / block_size), n]` or `[B, Hkv, ...]`: likewise blocks of `block_size` keys,
            for each block of `block_size` queries.
        block_size: keys in a block, and queries that share a list of blocks.
        kv_lengths: int `[B]`: how many keys of row `b` are in use; those past them are never read.
        layout: `"bhld"`, or `"blhd"` for `[B, L, H, D]` in and out.
        tile_map: which tiles of `mask` to skip; the output is the same with and without.
        split_size: keys per split, fixed: a sequence then gives the same bits in any batch.
        return_lse: return an `AttentionState` of `out` and `lse`, the log-sum-exp of each row's scores.
        return_aux: return `(out, Aux)` with these statistics of the weights, by name, any of `"lse"`, `"max_logits"`,
            `"entropy"`, `"key_mass"` and `"weights"`. See docs/statistics.md.
        key_mass_queries: `key_mass` sums the weights of the last so many queries alone.
        weight_indices: int `[B, Lq, n]` or `[B, H, Lq, n]`: the keys of `weights`; -1 is none.
        out: where to write, `[B, H, Lq, Dv]` (or as `layout` says) in q's dtype.
        allow_tf32: one TF32 pass for float32 inputs on a GPU.
        deterministic: gradients have the same bits each time. False allows faster reductions where a backend has them.
            The forward pass is always deterministic.
        validate: check the values inside lengths, offsets and tables: None if they are on the CPU, True always (which
            waits for a GPU), False never.
        backend: run on this backend or raise `Unsupported`; None takes the best that supports the call.

    Returns:
        `out` `[B, H, Lq, Dv]` in q's dtype and of q's kind of array. With `return_lse` an `AttentionState`: `out`, and
        `lse` float32 of `out`'s shape without its last dim. With `return_aux` `out` and an `Aux`.

    >>> q, k, v = (torch.randn(1, heads, 100, 64) for heads in (8, 2, 2))
    >>> attention(q, k, v, causal=True, window=32).shape
    torch.Size([1, 8, 100, 64])
    """
    return _call("attention", calls.dense, (q, k, v, *more), options)


@overload
def varlen_attention(
    q: Kind, k: Keys, v: Keys, cu_seqlens_q: Array, cu_seqlens_k: Array,
    *, return_lse: Literal[False] = False, **options: Unpack[VarlenOptions],
) -> Kind: ...  # fmt: skip
@overload
def varlen_attention(
    q: Array, k: Keys, v: Keys, cu_seqlens_q: Array, cu_seqlens_k: Array,
    *, return_lse: Literal[True], **options: Unpack[VarlenOptions],
) -> AttentionState: ...  # fmt: skip
@overload
def varlen_attention(
    q: Kind, k: Keys, v: Keys, cu_seqlens_q: Array, cu_seqlens_k: Array,
    *, return_lse: bool, **options: Unpack[VarlenOptions],
) -> Kind | AttentionState: ...  # fmt: skip
@overload
def varlen_attention(
    q: Kind, k: Keys, v: Keys, cu_seqlens_q: Array, cu_seqlens_k: Array,
    *, return_aux: Sequence[str], **options: Unpack[VarlenOptions],
) -> tuple[Kind, Aux]: ...  # fmt: skip
@overload
def varlen_attention(
    q: Array, k: Keys, v: Keys, cu_seqlens_q: Array, cu_seqlens_k: Array,
    *, return_lse: bool = False, **options: Unpack[VarlenOptions],
) -> Any: ...  # fmt: skip
@typed_signature(VarlenOptions)
def varlen_attention(
    q: Array, k: Keys, v: Keys, cu_seqlens_q: Array, cu_seqlens_k: Array, *more: Any, **options: Any
) -> Array | AttentionState:
    """Attention within packed sequences: sequence `b` is rows `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]` of `q`.

    Args:
        q: `[Tq, H, D]`.
        k: `[Tk, Hkv, D]`, or `Quantised`.
        v: `[Tk, Hkv, Dv]`, likewise.
        cu_seqlens_q: int32 `[B + 1]`, from 0, never falling. Rows past the last offset get 0.
        cu_seqlens_k: int32 `[B + 1]`, likewise for `k` and `v`.
        max_q: the longest sequence of queries. Without it a GPU call plans for all rows in one sequence.
        max_k: the longest sequence of keys, likewise.
        kv_lengths: int `[B]`: keys in use of each sequence.
        mask: as in `attention`, `[B, H, max_q, max_k]` and its broadcasts, indexed from each sequence's start.
        key_indices: `[Tq, n]` or `[Tq, Hkv, n]`; keys count from each sequence's start.
        weight_indices: `[Tq, n]` or `[Tq, H, n]`, likewise. `key_mass` is `[Tk, H]`.

    All other options as in `attention`; positions count from each sequence's start.

    Returns:
        `out` `[Tq, H, Dv]`, and with `return_lse` `lse` `[Tq, H]`.

    >>> q, k, v = (torch.randn(10, 4, 32) for _ in range(3))
    >>> cu = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> varlen_attention(q, k, v, cu, cu, causal=True).shape
    torch.Size([10, 4, 32])
    """
    return _call("varlen_attention", calls.varlen, (q, k, v, cu_seqlens_q, cu_seqlens_k, *more), options)


@overload
def paged_attention(
    q: Kind, k_pages: Keys, v_pages: Keys, block_table: Array, context_lens: Array,
    *, return_lse: Literal[False] = False, **options: Unpack[PagedOptions],
) -> Kind: ...  # fmt: skip
@overload
def paged_attention(
    q: Array, k_pages: Keys, v_pages: Keys, block_table: Array, context_lens: Array,
    *, return_lse: Literal[True], **options: Unpack[PagedOptions],
) -> AttentionState: ...  # fmt: skip
@overload
def paged_attention(
    q: Kind, k_pages: Keys, v_pages: Keys, block_table: Array, context_lens: Array,
    *, return_lse: bool, **options: Unpack[PagedOptions],
) -> Kind | AttentionState: ...  # fmt: skip
@overload
def paged_attention(
    q: Kind, k_pages: Keys, v_pages: Keys, block_table: Array, context_lens: Array,
    *, return_aux: Sequence[str], **options: Unpack[PagedOptions],
) -> tuple[Kind, Aux]: ...  # fmt: skip
@overload
def paged_attention(
    q: Array, k_pages: Keys, v_pages: Keys, block_table: Array, context_lens: Array,
    *, return_lse: bool = False, **options: Unpack[PagedOptions],
) -> Any: ...  # fmt: skip
@typed_signature(PagedOptions)
def paged_attention(
    q: Array, k_pages: Keys, v_pages: Keys, block_table: Array, context_lens: Array, *more: Any, **options: Any
) -> Array | AttentionState:
    """Attention over keys and values in pages: key `j` of row `b` is slot `j % page_size` of page
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
        weight_indices: likewise. `key_mass` is `[B, H, max_pages * page_size]`, 0 past each length.

    All other options as in `attention`.

    Returns:
        `out` in the form of `q`, with `Dv`; with `return_lse`, `lse` too.

    >>> pages = torch.randn(2, 8, 16, 4, 32)  # K and V, 8 pages of 16 tokens, 4 heads
    >>> table = torch.tensor([[5, 2, 0], [7, 1, 0]], dtype=torch.int32)
    >>> lengths = torch.tensor([40, 17], dtype=torch.int32)
    >>> paged_attention(torch.randn(2, 8, 1, 32), *pages, table, lengths).shape
    torch.Size([2, 8, 1, 32])
    """
    return _call("paged_attention", calls.paged, (q, k_pages, v_pages, block_table, context_lens, *more), options)


PLAN_RUNS_EAGERLY = (
    "tilewise.plan reads values and addresses: torch.compile breaks the graph there, and fails with fullgraph=True"
)
# Arguments of which a plan reads no values: these may be on the meta device.
SHAPE_ONLY = ("q", "k", "v", "block_table", "sinks", "alibi_slopes", "q_bias", "k_bias", "out")


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
    """What a call with these arguments would run and cost, without running it.

    Takes the arguments of `attention`, of `varlen_attention` (with `cu_seqlens_k`) or of `paged_attention` (with
    `block_table`), the tables by name. Reads lengths and masks to count the work, which waits for a GPU. If inputs
    require grad, `backward` is the plan of the backward pass.

    `device` names another machine, such as "sm_90", "gfx942", "apple-m3" or "neon", and the plan is what would run
    there. Tensors may be on any device. An unknown name raises `InvalidArgument`, which lists all.

    >>> q = torch.randn(1, 8, 1024, 64)
    >>> plan(q, q, q, causal=True).cost.flops == 2 * (64 + 64) * 8 * 1024 * 1025 // 2
    True
    """
    known = Options.__dataclass_fields__
    if unknown := [name for name in options if name not in known]:
        keywords.refuse(unknown, known, "tilewise.plan")
    tables = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_q": max_q,
        "max_k": max_k,
        "block_table": block_table,
        "context_lens": context_lens,
    }
    _check_plannable({"q": q, "k": k, "v": v, **tables, **options})
    options = with_seed(_with_bound_mods(options, q), calls.device_of(q))
    grads = autograd.needed({"q": q, "k": k, "v": v, **options})
    if grads and options.get("k_shared") is not None:
        k = calls.joined(k, options.pop("k_shared"), options.get("layout"))
        grads = autograd.needed({"q": q, "k": k, "v": v, **options})
    call = _check_form(q, k, v, tables, options, grads)
    planner.check_name(backend)
    threads = torch.get_num_threads()
    if grads:
        call.problem = replace(call.problem, return_lse=True)  # the backward pass reads it
    if device is None:
        chosen = planner.choose(call.problem, backend, threads)
    else:
        chosen = planner.choose_on(device, call.problem, backend, threads)
    if grads:
        chosen = replace(chosen, backward=autograd.plan(call.problem, grads, backend, options, device))
    if call.requested is not None:
        chosen = replace(chosen, statistics=planner.statistics(call.problem, backend)[0])
    return replace(chosen, cost=cost.estimate(call.problem, call.tensors, chosen.tile))


eager_function(plan, PLAN_RUNS_EAGERLY)


def _check_plannable(arguments: dict[str, Any]) -> None:
    """Refuses tensors without the memory or the values that a plan reads."""
    for name, x in arguments.items():
        if not isinstance(x, torch.Tensor):
            continue
        if is_wrapper(x) or is_in_transform(x):
            kind = "tensor of torch.vmap or torch.func" if is_in_transform(x) else type(x).__name__
            raise InvalidArgument(name, f"a {kind}", "one with memory, or on the meta device")
        if x.is_meta and name not in SHAPE_ONLY:
            remedy = "pass tensors with memory, or leave it out"
            raise InvalidArgument(name, "a tensor on meta", "its values: the plan counts the work by them", remedy)


def _check_form(
    q: Array, k: Keys, v: Keys, tables: dict[str, Any], options: dict[str, Any], grads: tuple[str, ...]
) -> Call:
    """Checks a call to plan as the entry point would that takes these tables: paged, varlen or dense attention."""
    given = {name for name, x in tables.items() if x is not None}
    if "block_table" in given:
        if "kv_lengths" in options or given & {"cu_seqlens_k", "max_k"}:
            raise InvalidArgument("block_table", "pages with kv_lengths, cu_seqlens_k or max_k", "context_lens alone")
        o = Options(cu_seqlens_q=tables["cu_seqlens_q"], max_q=tables["max_q"], **options)
        return calls.paged(q, k, v, tables["block_table"], tables["context_lens"], o)
    # The checks refuse tensors that require grad, except where their gradients are planned.
    with torch.no_grad() if grads else nullcontext():
        if "cu_seqlens_k" in given:
            o = Options(max_q=tables["max_q"], max_k=tables["max_k"], **options)
            return calls.varlen(q, k, v, tables["cu_seqlens_q"], tables["cu_seqlens_k"], o)
        for name in ("cu_seqlens_q", "max_q", "max_k", "context_lens"):
            if name in given:
                want = "cu_seqlens_q with cu_seqlens_k, or block_table with context_lens"
                raise InvalidArgument(name, "given alone", want)
        return calls.dense(q, k, v, Options(**options))


def _call(name: str, check: Callable[..., Call], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Runs a call of any entry point, in the first of these ways that applies:

    1. A repeated call is in the call cache: it is launched without validation and planning.
    2. Traced code, or tensors without memory: the call becomes a torch operator (`ops.py`).
    3. Inputs that require grad, or have tangents of forward mode: a `torch.autograd.Function` calls the entry point
       again (`differentiation.py`).
    4. Any other call is validated, planned, run and put into the call cache.

    `check` is the entry point's function in `validation/calls.py`. `options` are those that were given.
    """
    key, traced = None, is_traced()
    if "score_mod" in options or "mask_mod" in options:
        options = _with_bound_mods(options, args[0])
    if "dropout_p" in options or "dropout_seed" in options:
        options = with_seed(options, calls.device_of(args[0]))
    if not traced:
        key = call_cache.key_of(name, args, options)
        if (cached := call_cache.find(key)) is not None:
            try:
                return cached(args, options)
            except RuntimeError:  # `out` overlaps an input, or a tensor has no strided memory (mkldnn): checks name it
                check(*args, Options(**options))
                raise

    if len(args) > len(TENSORS[name]):
        keywords.refuse_positional(args[len(TENSORS[name]) :], TENSORS[name], f"tilewise.{name}")
    if unknown := [option for option in options if option not in NAMES[name]]:
        keywords.refuse(unknown, NAMES[name], f"tilewise.{name}")
    as_operator = traced or ops.needs_operator((*args, *options.values()))
    has_gradients = name in autograd.TABLES and not as_operator
    needs_grad = has_gradients and (
        autograd.needed({**dict(zip("qkv", args, strict=False)), **options})
        or differentiation.any_tangent((*args[:3], *options.values()))
    )
    if (as_operator or needs_grad) and options.get("k_shared") is not None:  # only some kernels take it beside k
        args = (args[0], calls.joined(args[1], options.pop("k_shared"), options.get("layout")), *args[2:])
    if any(options.get(option) is not None for option in STATISTICS):
        from . import statistics  # few calls need it

        return statistics.call(name, args, options, "operator" if as_operator else "gradients" if needs_grad else "")
    if as_operator or needs_grad:
        if needs_grad:
            return differentiation.call(name, args, options)
        if not traced and meta.is_meta(args[0]):
            check_meta(name, check, args, options)
        return ops.call(name, args, options)

    call = check(*args, Options(**options))
    to_caller, backend = converter_back(args[0]), options.get("backend")
    planner.check_name(backend)
    chosen = planner.choose(call.problem, backend, torch.get_num_threads())
    if call.problem.is_empty:
        _write_empty(call.tensors)
    else:
        # The planner drops `k_shared_dim` from the problem of a backend that wants keys in one tensor.
        joins_keys = call.problem.k_shared_dim != chosen.problem.k_shared_dim
        planner.load(chosen.backend).run(chosen, call.tensors.with_joined_keys() if joins_keys else call.tensors)
        activity.ran(chosen)
        if not joins_keys:
            call_cache.remember(key, args, options, call, chosen)
    return to_caller(call.out) if call.lse is None else AttentionState(to_caller(call.out), to_caller(call.lse))


def _with_bound_mods(options: dict[str, Any], q: Any) -> dict[str, Any]:
    """The options with the functions traced: `score_mod` holds both, and the tensors that they capture."""
    options = dict(options)
    functions = options.pop("score_mod", None), options.pop("mask_mod", None)
    bound = None if functions == (None, None) else mods.bind(*functions, calls.device_of(q))
    return options if bound is None else options | {"score_mod": bound}


def check_meta(name: str, check: Callable[..., Call], args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Checks a call over meta tensors as far as shapes and dtypes allow, without a device."""
    longest = ["max_k"] * (name == "varlen_attention")
    if name == "varlen_attention" or options.get("cu_seqlens_q") is not None:
        longest.append("max_q")
    planner.check_name(options.get("backend"))
    if (given := meta.checkable(options, longest)) is not None:
        with torch.no_grad():
            check(*args, Options(**given))


def _write_empty(t: Tensors) -> None:
    """Writes the result of a call in which no row sees a key: `out` is 0, `lse` is -inf or the head's sink.

    Packed rows past the last offset belong to no sequence: they get no sink.
    """
    t.out.zero_()
    if t.lse is None:
        return
    t.lse.fill_(-torch.inf)
    if t.sinks is not None:
        rows = torch.arange(t.lse.shape[2], device=t.lse.device)
        in_sequence = rows >= 0 if t.cu_seqlens_q is None else rows < t.cu_seqlens_q[-1]
        t.lse.copy_(torch.where(in_sequence, t.sinks[:, None], -torch.inf))
