"""The functions of the flash-attn package, served by tilewise: FlashAttention 2's signatures, on any device.

Arguments that FlashAttention 3 and vLLM's copy renamed or added are taken by keyword: `_flash.options.Later`.
`flash_attn_3` has FlashAttention 3's own signatures. Causal and windows are aligned to the bottom right, and a row that
sees no key gives 0. There are gradients. `install()` makes these functions importable as `flash_attn`.

>>> q, k, v = (torch.randn(2, 10, heads, 64) for heads in (8, 2, 2))
>>> flash_attn_func(q, k, v, causal=True, window_size=(4, 0)).shape
torch.Size([2, 10, 8, 64])
"""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from ..api import attention, paged_attention, varlen_attention
from ..errors import InvalidArgument
from ..state import AttentionState
from ..validation import values
from ._flash.inputs import Rows, inputs, needs_inputs
from ._flash.install import install, uninstall
from ._flash.kvcache import flash_attn_with_kvcache
from ._flash.options import NAMES, FlashOptions, Later, VarlenFlashOptions, WindowSize, one_table, translate
from .caller_names import caller_names

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "install",
    "uninstall",
]

WithLse = tuple[torch.Tensor, torch.Tensor]
WithProbs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Result = torch.Tensor | WithLse | WithProbs


@overload
def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ..., window_size: WindowSize = ...,
    softcap: float = ..., alibi_slopes: torch.Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = False, **later: Unpack[Later],
) -> torch.Tensor: ...  # fmt: skip
@overload
def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    *, return_attn_probs: Literal[True], **options: Unpack[FlashOptions],
) -> WithProbs: ...  # fmt: skip
@overload
def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ..., window_size: WindowSize = ...,
    softcap: float = ..., alibi_slopes: torch.Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: bool = ..., **later: Unpack[Later],
) -> Result: ...  # fmt: skip
@caller_names(**NAMES)
def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, **later: Unpack[Later],
) -> Result:  # fmt: skip
    """Attention of `q` `[B, Lq, H, D]` over `k`, `v` `[B, Lk, Hkv, D]`.

    Args:
        dropout_p: the probability that a weight is dropped; `torch.manual_seed` decides which.
        softmax_scale: factor of the scores. Default: `D ** -0.5`.
        causal: query `i` sees keys up to `i + Lk - Lq`.
        window_size: number of visible keys to the left and to the right of the query's own; -1 is unlimited.
        softcap: scores become `softcap * tanh(score / softcap)`; 0.0 is off.
        alibi_slopes: `[H]` or `[B, H]`: `slope * abs(i + Lk - Lq - j)` is subtracted from the scores.
        deterministic: gradients have the same bits each time; the forward pass always does.
        return_attn_probs: return `(out, softmax_lse, S_dmask)`.

    Returns:
        `out` `[B, Lq, H, D]`; with `return_attn_probs` also `softmax_lse` `[B, H, Lq]` (float32; `-inf` where a row
        sees no key) and `S_dmask`, which is empty: `tilewise.dropout_mask` makes a mask.
    """
    options = translate(k.shape[1], dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, later)
    if not deterministic and torch.is_grad_enabled():
        options["deterministic"] = False
    if needs_inputs(q, k, later):
        call = inputs(q, k, v, options, later, q.shape[0])
        result = call.result(
            attention(call.q, call.k, call.v, layout="blhd", return_lse=return_attn_probs, **call.options)
        )
    else:
        result = attention(q, k, v, layout="blhd", return_lse=return_attn_probs, **options)
    return _result(q, result, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, **later: Unpack[Later],
) -> Result:  # fmt: skip
    """`flash_attn_func` for `qkv` `[B, L, 3, H, D]`."""
    q, k, v = _parts("qkv", qkv, "[B, L, 3, H, D]")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, **later,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, **later: Unpack[Later],
) -> Result:  # fmt: skip
    """`flash_attn_func` for `kv` `[B, Lk, 2, Hkv, D]`."""
    k, v = _parts("kv", kv, "[B, L, 2, H, D]")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, **later,
    )  # fmt: skip


@overload
def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = ..., max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ...,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ..., window_size: WindowSize = ...,
    softcap: float = ..., alibi_slopes: torch.Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = False, block_table: torch.Tensor | None = ...,
    *, seqused_q: torch.Tensor | None = ..., seqused_k: torch.Tensor | None = ...,
    page_table: torch.Tensor | None = ..., out: torch.Tensor | None = ..., return_softmax_lse: Literal[False] = False,
    **later: Unpack[Later],
) -> torch.Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    *, return_attn_probs: Literal[True], **options: Unpack[VarlenFlashOptions],
) -> WithProbs: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    *, return_softmax_lse: Literal[True], **options: Unpack[VarlenFlashOptions],
) -> WithLse: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = ..., max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ...,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ..., window_size: WindowSize = ...,
    softcap: float = ..., alibi_slopes: torch.Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: bool = ..., block_table: torch.Tensor | None = ...,
    *, seqused_q: torch.Tensor | None = ..., seqused_k: torch.Tensor | None = ...,
    page_table: torch.Tensor | None = ..., out: torch.Tensor | None = ..., return_softmax_lse: bool = ...,
    **later: Unpack[Later],
) -> Result: ...  # fmt: skip
@caller_names(**NAMES, kv_lengths="seqused_k", context_lens="seqused_k", k_pages="k", v_pages="v")
def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: torch.Tensor | None = None,
    *, seqused_q: torch.Tensor | None = None, seqused_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None, out: torch.Tensor | None = None, return_softmax_lse: bool = False,
    **later: Unpack[Later],
) -> Result:  # fmt: skip
    """`flash_attn_func` within packed sequences: `q` `[Tq, H, D]`, `k` and `v` `[Tk, Hkv, D]`.

    Args:
        cu_seqlens_q: int32 `[B + 1]`: sequence `b` has rows `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]` of `q`.
        cu_seqlens_k: likewise for `k` and `v`; None if `seqused_k` gives the number of keys in pages.
        max_seqlen_q: length of the longest sequence of queries, or more.
        max_seqlen_k: length of the longest sequence of keys, or more.
        block_table: int32 `[B, pages]`; `k` and `v` are then pages `[num_pages, page_size, Hkv, D]` of any size.
        seqused_q: int32 `[B]`: number of queries in use in each sequence; later rows give 0, and lse `-inf`.
        seqused_k: int32 `[B]`: number of keys in use in each sequence.
        page_table: another name for `block_table`.
        out: tensor to write the output to.
        return_softmax_lse: return `(out, softmax_lse)`.

    Returns:
        `out` `[Tq, H, D]`; with `return_attn_probs` also `softmax_lse` `[H, Tq]` and an empty tensor.
    """
    table = one_table(block_table, page_table)
    lengths = seqused_k
    if lengths is None and (table is not None or seqused_q is not None):
        if cu_seqlens_k is None:
            raise InvalidArgument("cu_seqlens_k", None, "the lengths of the keys, in it or in seqused_k")
        lengths = cu_seqlens_k.diff()
    longest_q, longest_k = (None if n is None else index(n) for n in (max_seqlen_q, max_seqlen_k))
    keys = k.shape[0] if longest_k is None else longest_k
    if table is not None and longest_k is None:
        keys = table.shape[-1] * k.shape[1]
    options: dict[str, Any] = translate(
        keys, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, later
    )
    options["return_lse"] = return_attn_probs or return_softmax_lse
    if seqused_q is not None:
        assert lengths is not None
        options["q_offset"] = _first_positions(seqused_q, lengths, cu_seqlens_q)
    call = None
    if needs_inputs(q, k, later):
        call = inputs(q, k, v, options, later, len(cu_seqlens_q) - 1, cu_seqlens_q)
        q, k, v, options = call.q, call.k, call.v, call.options
    target = out if call is None else None
    if table is not None:
        assert lengths is not None
        result = paged_attention(
            q, k, v, table, lengths, cu_seqlens_q=cu_seqlens_q, max_q=longest_q, out=target, **options
        )
    elif cu_seqlens_k is None:
        raise InvalidArgument("cu_seqlens_k", None, "int32 [B + 1]", "only keys in pages can do without")
    else:
        if not deterministic and torch.is_grad_enabled():
            options["deterministic"] = False
        result = varlen_attention(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_q=longest_q, max_k=longest_k, kv_lengths=seqused_k, out=target,
            **options,
        )  # fmt: skip
    if call is not None:
        result = call.result(result, out)
    if seqused_q is not None:
        result = _clear_unused(result, seqused_q, cu_seqlens_q)
    if return_softmax_lse and not return_attn_probs:
        return result.out, result.lse.transpose(-1, -2).contiguous()
    return _result(q, result, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, **later: Unpack[Later],
) -> Result:  # fmt: skip
    """`flash_attn_varlen_func` for `qkv` `[T, 3, H, D]`."""
    q, k, v = _parts("qkv", qkv, "[T, 3, H, D]")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs, **later,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, **later: Unpack[Later],
) -> Result:  # fmt: skip
    """`flash_attn_varlen_func` for `kv` `[Tk, 2, Hkv, D]`."""
    k, v = _parts("kv", kv, "[T, 2, H, D]")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs, **later,
    )  # fmt: skip


def _parts(name: str, x: torch.Tensor, form: str) -> tuple[torch.Tensor, ...]:
    """Views of the tensors that are packed in the third dim from the end."""
    count = 3 if name == "qkv" else 2
    if x.ndim != form.count(",") + 1 or x.shape[-3] != count:
        raise InvalidArgument(name, f"shape {tuple(x.shape)}", form)
    return x.unbind(-3)


def get_scheduler_metadata(*_: Any, **__: Any) -> None:
    """Returns None: tilewise plans each call by itself. FlashAttention 3's metadata is accepted and not used."""


def _first_positions(used_q: torch.Tensor, lengths: torch.Tensor, cu_seqlens_q: torch.Tensor) -> torch.Tensor:
    """The position of each sequence's first query, if `used_q` are in use and the last is at the sequence's end."""
    for name, x in (("seqused_q", used_q), ("seqused_k", lengths)):
        if x.shape != (len(cu_seqlens_q) - 1,) or x.dtype not in (torch.int32, torch.int64):
            raise InvalidArgument(name, f"{tuple(x.shape)} {x.dtype}", f"int32 ({len(cu_seqlens_q) - 1},)")
    values.check_lengths("seqused_q", used_q, cu_seqlens_q.diff(), "queries in the sequence", None)
    return lengths - used_q


def _clear_unused(result: Any, used_q: torch.Tensor, cu_seqlens_q: torch.Tensor) -> Any:
    """Sets unused rows to the result of rows that see no key."""
    out, lse = result if isinstance(result, AttentionState) else (result, None)
    rows = Rows.of(cu_seqlens_q, out.shape[0])
    unused = rows.place >= used_q[rows.sequence]
    # With a backward pass the output is saved and must not be written; without, it may be the caller's own.
    fill = torch.Tensor.masked_fill if out.requires_grad else torch.Tensor.masked_fill_
    out = fill(out, unused[:, None, None], 0.0)
    return out if lse is None else AttentionState(out, fill(lse, unused[:, None], -torch.inf))


def _result(q: torch.Tensor, result: Any, return_attn_probs: bool) -> Result:
    """The result in FlashAttention's form: lse with heads before rows, and no probabilities."""
    if not return_attn_probs:
        return result
    return result.out, result.lse.transpose(-1, -2).contiguous(), q.new_empty(0)
