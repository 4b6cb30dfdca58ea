"""Unknown arguments: the error names the one here that other libraries call so, or says why there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from ..errors import UnexpectedArgument

FEW = 16  # names that fit into a message
# To tilewise's names, best first; the error names the first that the entry point has.
OTHER_NAMES = {
    "is_causal": ("causal",),
    "attn_mask": ("mask",),
    "attention_mask": ("mask",),
    "attn_bias": ("mask",),
    "bias": ("mask",),
    "relative_position_bias": ("mask",),
    "key_padding_mask": ("kv_lengths", "mask"),
    "sliding_window": ("window",),
    "window_size": ("window",),
    "softmax_scale": ("scale",),
    "sm_scale": ("scale",),
    "scaling": ("scale",),
    "soft_cap": ("softcap",),
    "logits_soft_cap": ("softcap",),
    "slopes": ("alibi_slopes",),
    "alibi": ("alibi_slopes",),
    "s_aux": ("sinks",),
    "learnable_sink": ("sinks",),
    "cache_seqlens": ("kv_lengths", "context_lens"),
    "seqused_k": ("kv_lengths", "context_lens"),
    "seq_lens": ("kv_lengths", "context_lens"),
    "key_value_seq_lengths": ("kv_lengths", "context_lens"),
    "kv_lengths": ("context_lens",),
    "context_lens": ("kv_lengths",),
    "block_tables": ("block_table",),
    "page_table": ("block_table",),
    "cu_seqlens": ("cu_seqlens_q",),
    "max_seqlen_q": ("max_q",),
    "max_seqlen_k": ("max_k",),
    "return_softmax_lse": ("return_lse",),
    "return_attn_probs": ("return_aux",),
    "return_attn_weights": ("return_aux",),
    "return_max_logits": ("return_aux",),
    "output_attentions": ("return_aux",),
    "need_weights": ("return_aux",),
    "tensor_layout": ("layout",),
    "dropout": ("dropout_p",),
    "num_splits": ("split_size",),
}
# What else to know of a name that was probably meant.
EXPLAINED = {
    "window": "window=W means W keys with the query's own, a pair the keys on each side; None, not -1, means unlimited",
    "causal": "it aligns the last query with the last key; q_offset=0 aligns the first ones, as torch's is_causal does",
    "return_lse": "it returns AttentionState(out, lse)",
    "return_aux": "it returns (out, Aux): max_logits, entropy, key_mass, weights at weight_indices; all are never kept",
    "alibi_slopes": "tilewise.alibi_slopes(H) makes them",
    "mask": "a float mask is added to the scores; in a bool mask True means attend",
}
# Of other entry points of tilewise: the first that has one of these names takes it.
ENTRY_POINTS = {
    "block_table": "tilewise.paged_attention takes pages: block_table and context_lens",
    "cu_seqlens_q": "tilewise.varlen_attention takes packed sequences: cu_seqlens_q and cu_seqlens_k",
    "cu_seqlens_k": "tilewise.varlen_attention takes packed sequences: cu_seqlens_q and cu_seqlens_k",
    "max_q": "tilewise.varlen_attention takes packed sequences: cu_seqlens_q and cu_seqlens_k, max_q and max_k",
    "max_k": "tilewise.varlen_attention takes packed sequences: cu_seqlens_q and cu_seqlens_k, max_q and max_k",
    "mesh": "tilewise.distributed.attention and tilewise.distributed.plan take it",
}
NOT_NEEDED = {
    "enable_gqa": "leave it out: fewer heads in k and v than in q are enough",
    "deterministic": "leave it out: every result is deterministic",
    "training": "leave it out",
    "block_mask": "mask_mod=block_mask.mask_mod takes its function; causal=, window=, chunk= and mask= hide keys too",
}


def of(function: Callable[..., Any]) -> list[str]:
    """The names by which a function takes keyword arguments."""
    import inspect

    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]


def refuse(unknown: Iterable[str], known: Iterable[str], function: str) -> NoReturn:
    """Raises for the first unknown keyword of a function, with the name that was probably meant."""
    import difflib

    name, known = next(iter(unknown)), list(known)
    names = OTHER_NAMES.get(name, (name,))
    if meant := [other for other in names if other in known]:
        hint = _did_you_mean(meant[0])
    elif name in NOT_NEEDED:
        hint = NOT_NEEDED[name]
    elif elsewhere := [ENTRY_POINTS[other] for other in names if other in ENTRY_POINTS]:
        hint = elsewhere[0]
    else:
        close = difflib.get_close_matches(name, known, 1)
        few = f"expected one of {', '.join(known)}" if len(known) < FEW else ""
        hint = _did_you_mean(close[0]) if close else few
    raise UnexpectedArgument(name, "got an unknown keyword", hint, function)


def _did_you_mean(name: str) -> str:
    return f"did you mean {name}?" + (f" {EXPLAINED[name]}" if name in EXPLAINED else "")


def refuse_positional(more: tuple[Any, ...], names: tuple[str, ...], function: str) -> NoReturn:
    """Raises for arguments after those of `names`, the only ones that go by position."""
    first = more[0]
    name = "causal" if isinstance(first, bool) else "scale" if isinstance(first, float) else "mask"
    hint = f"options go by name, such as {name}="
    given = f"got {len(names) + len(more)}, expected {len(names)} ({', '.join(names)})"
    raise UnexpectedArgument("positional arguments", given, hint, function)
