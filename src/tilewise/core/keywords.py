"""Unknown keywords: the error names the keyword here that other libraries call so, or says why there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from ..errors import UnknownKeyword

# To tilewise's names, best first; the error names the first that the entry point has.
OTHER_NAMES = {
    "is_causal": ("causal",),
    "attn_mask": ("mask",),
    "attention_mask": ("mask",),
    "attn_bias": ("mask",),
    "key_padding_mask": ("kv_lengths", "mask"),
    "sliding_window": ("window",),
    "window_size": ("window",),
    "softmax_scale": ("scale",),
    "sm_scale": ("scale",),
    "scaling": ("scale",),
    "soft_cap": ("softcap",),
    "logits_soft_cap": ("softcap",),
    "slopes": ("alibi_slopes",),
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
    "return_attn_probs": ("return_lse",),
    "tensor_layout": ("layout",),
    "num_splits": ("split_size",),
}
NOT_NEEDED = {
    "dropout_p": "there is no dropout: leave it out",
    "dropout": "there is no dropout: leave it out",
    "enable_gqa": "leave it out: fewer heads in k and v than in q are enough",
    "deterministic": "leave it out: every result is deterministic",
    "need_weights": "the weights are never made: leave it out",
    "training": "leave it out",
    "score_mod": "softcap=, alibi_slopes=, q_bias=, k_bias= and an additive mask= say what changes a score",
    "mask_mod": "causal=, window=, chunk= and a bool mask= say what is hidden",
    "block_mask": "causal=, window=, chunk=, a bool mask= or block_indices= say what is hidden",
    "mesh": "tilewise.distributed.attention and tilewise.distributed.plan take it",
}


def of(function: Callable[..., Any]) -> list[str]:
    """The names by which a function takes keyword arguments."""
    import inspect

    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]


def refuse(unknown: Iterable[str], known: Iterable[str]) -> NoReturn:
    """Raises for the first unknown keyword, with the name that was probably meant."""
    import difflib

    name, known = next(iter(unknown)), list(known)
    if name in NOT_NEEDED:
        raise UnknownKeyword(name, "an unknown keyword", "none of that name", NOT_NEEDED[name])
    meant = [other for other in OTHER_NAMES.get(name, ()) if other in known]
    meant = meant or difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {meant[0]}?" if meant else ""
    if meant == ["window"]:
        hint += " window=W is W keys with the query's own, a pair the keys on each side; None, not -1, is unlimited"
    raise UnknownKeyword(name, "an unknown keyword", f"one of {', '.join(known)}", hint)
