"""`ShardedBatch`: a step of some sequences of a `ShardedKVCache`, whose tokens are on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..api import paged_attention
from ..core import keywords
from ..core.eager import eager
from ..core.mask_rules import NO_RULES, visible_by_position
from ..core.options import Options, as_rules
from ..errors import InvalidArgument
from ..kv_cache import checks
from .agreement import Kind, agreed, described
from .arguments import functions_of, with_functions
from .combine import combine, gathered

if TYPE_CHECKING:
    from .cache import ShardedKVCache

# Options of `paged_attention` that do not work here: keys are this rank's alone, heads are those of all ranks.
RULES = tuple(name for name in NO_RULES.options() if name != "causal")
FUNCTIONS = ("score_mod", "mask_mod")
TAKEN = (*RULES, *FUNCTIONS, "scale", "softcap", "alibi_slopes", "split_size", "allow_tf32", "validate", "backend")
OPTIONS = ("sinks", "return_lse", *TAKEN)


@eager
class ShardedBatch:
    """The result of `ShardedKVCache.extend`: room for new tokens of some sequences, in all layers."""

    def __init__(self, cache: ShardedKVCache, sequences: list[int], batch: Any, before: list[int], count: int) -> None:
        self.cache, self.sequences, self.batch, self.before, self.count = cache, sequences, batch, before, count

    def write(self, k: torch.Tensor, v: torch.Tensor | None = None, layer: int = 0) -> None:
        """Stores this rank's share of the new tokens `[B, Hkv, L, D]` of a layer. A latent cache takes only k."""
        c, about = self.cache, described_rows(k, v)
        c.check_connected()
        kind: Kind = ("function", "write"), *sorted((name, repr(x)) for name, x in about.items())

        def arguments() -> dict[str, object]:
            return {"function": "write", **about, "layer": layer, "sequences": (self.sequences, self.before)}

        rows = agreed([c.ranks], kind, None, lambda: self.new_rows(k, v, layer), arguments, c.cache.device)
        self.batch.put(*rows, layer)

    def keep_lengths(self) -> None:
        """Keeps the lengths of sequences that all ranks have extended."""
        self.cache.lengths |= {
            sequence: n + self.count for sequence, n in zip(self.sequences, self.before, strict=True)
        }

    def new_rows(self, k: Any, v: Any, layer: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """This rank's share of checked rows, as `Batch.new_rows`."""
        for name, x in (("k", k), ("v", v)) if v is not None else (("k", k),):
            check_rows(name, x)
            if x.shape[0] != len(self.sequences) or x.shape[2] != self.count:
                want = f"[{len(self.sequences)}, Hkv, {self.count}, D]"
                raise InvalidArgument(name, tuple(x.shape), f"{want}, all new tokens of every sequence")
        checks.both_rows(self.cache.cache, k, v, packed=False)  # all of them: a rank's own may be none
        c = self.cache
        turn = c.ranks.size * c.interleave
        own = [
            (b, n - start)
            for b, start in enumerate(self.before)
            for n in range(start, start + self.count)
            if n % turn // c.interleave == c.ranks.rank
        ]
        rows, at = (torch.tensor([x[i] for x in own], dtype=torch.int64, device=k.device) for i in range(2))
        own_k, own_v = (None if x is None else x.transpose(1, 2)[rows, at] for x in (k, v))
        return self.batch.new_rows(own_k, own_v, layer)

    def attend(
        self, q: torch.Tensor, layer: int = 0, *, causal: bool = True, gather: bool = True, **options: Any
    ) -> Any:
        """Attention of the new tokens' queries over their sequences, on all ranks together.

        Args:
            q: `[B, H, L, D]`: this rank's heads or, with `gather=False`, the same heads on every rank.
            layer: which layer's keys and values.
            causal: a query sees keys up to its own position.
            gather: q has this rank's share of the heads, as in tensor parallelism: rank 0 has the first H, and so on.
            sinks: `[H]`, of this rank's heads.
            alibi_slopes: of the heads of all ranks; only with `interleave=1`.
            score_mod: of the heads of all ranks and positions in the whole sequence, as is `mask_mod`; likewise.

        The other options are `scale`, `window`, `chunk`, `softcap`, `split_size`, `allow_tf32`, `return_lse`, `backend`
        and `validate`. Ranks compare sizes and options as in `attention`.

        Returns:
            `[B, H, L, Dv]` for the heads of `q`; with `return_lse` an `AttentionState`.
        """
        return attend(self.cache, lambda: self, q, layer, causal=causal, gather=gather, **options)

    def positions(self, q: torch.Tensor, causal: bool, options: dict[str, Any]) -> dict[str, Any]:
        """Options for the positions of queries and this rank's keys: strides, or with `interleave` > 1 a mask."""
        c, ranks = self.cache, self.cache.ranks
        first = torch.tensor(self.before, dtype=torch.int32, device=q.device)
        if c.interleave == 1 or ranks.size == 1:
            return {"causal": causal, "q_offset": first, "k_start": ranks.rank, "k_stride": ranks.size}
        most = max((c.own_tokens(n + self.count) for n in self.before), default=0)
        j = torch.arange(max(most, 1), device=q.device)  # a rank without keys needs a mask too
        keys = (j // c.interleave * ranks.size + ranks.rank) * c.interleave + j % c.interleave
        queries = first[:, None, None] + torch.arange(self.count, device=q.device)[:, None]  # [B, L, 1]
        rules = {name: options.pop(name) for name in RULES if name in options}
        visible = visible_by_position(as_rules(Options(**rules | {"causal": causal})), queries, keys)
        return {"causal": False, "mask": visible[:, None]}


def attend(
    c: ShardedKVCache,
    batch_of: Callable[[], ShardedBatch],
    q: Any,
    layer: int = 0,
    *,
    causal: bool = True,
    gather: bool = True,
    **options: Any,
) -> Any:
    """`ShardedBatch.attend` of a batch that is found, and may be refused, with the other checks of the call."""
    ranks, validate = c.ranks, options.get("validate")
    options = with_functions(options, q)
    c.check_connected()
    kind: Kind = ()
    if ranks.size > 1 and validate is not False:
        sizes = (*q.shape, q.dtype, q.requires_grad) if isinstance(q, torch.Tensor) else type(q).__name__
        rules = {"causal": causal, "gather": gather, **options}.items()
        kind = ("function", "attend"), ("q", sizes), *sorted((name, described(x)) for name, x in rules if x is not None)

    def check() -> tuple[ShardedBatch, dict[str, Any]]:
        check_rows("q", q)
        functions_of(options, q)
        _check_options(q, causal, c, options)
        c.cache.view(batch_of().sequences, 0).check(checks.index("layer", layer, c.cache.layers, "layer"))
        return batch_of(), {name: x for name, x in options.items() if name in TAKEN}

    def arguments() -> dict[str, object]:
        given = dict(kind)
        names = ("function", "q", "causal", "gather", "sinks", "return_lse", *TAKEN)
        values: dict[str, object] = {name: given.pop(name, None) for name in names}
        slopes, batch = options.get("alibi_slopes"), batch_of()
        values["alibi_slopes"] = slopes.tolist() if isinstance(slopes, torch.Tensor) else slopes
        return values | {"options": sorted(given), "layer": layer, "sequences": (batch.sequences, batch.before)}

    device = q.device if isinstance(q, torch.Tensor) and not q.is_meta else None
    batch, passed = agreed([ranks], kind, validate, check, arguments, device)
    sinks, heads = options.get("sinks"), q.shape[1]
    if gather and ranks.size > 1:
        q = gathered(q, ranks, 1)
    passed |= batch.positions(q, causal, passed)
    if ranks.size == 1:
        passed["sinks"] = sinks
    state = c.cache.view(batch.sequences, 0).attend(q, layer, return_lse=True, **passed)
    if ranks.size > 1:  # a sink counts once, in the merge
        state = combine(state, ranks, heads if gather else 0, sinks=sinks)
    return state if options.get("return_lse") else state.out


def _check_options(q: torch.Tensor, causal: Any, c: ShardedKVCache, options: dict[str, Any]) -> None:
    """Checks the options of `attend` that need no other rank."""
    if unknown := [name for name, x in options.items() if name not in OPTIONS and x is not None]:
        known = keywords.of(paged_attention)
        if others := [name for name in unknown if name in known]:
            raise InvalidArgument(others[0], "one over a sharded cache", "none")
        names = ["q", "layer", "causal", "gather", *OPTIONS]
        keywords.refuse(unknown, names, "tilewise.distributed.ShardedKVCache.attend")
    heads, sinks = q.shape[1], options.get("sinks")
    if sinks is not None and (not isinstance(sinks, torch.Tensor) or sinks.shape != (heads,)):
        raise InvalidArgument("sinks", getattr(sinks, "shape", type(sinks).__name__), f"({heads},), of q's heads")
    if torch.is_grad_enabled() and q.requires_grad:
        raise InvalidArgument("q", "a tensor that requires grad", "one that does not", "a cache has no gradients")
    for name in ("alibi_slopes", *FUNCTIONS) if c.interleave > 1 and c.ranks.size > 1 else ():
        if options.get(name) is not None:
            raise InvalidArgument(name, "one over blocks of tokens", "none", "a cache with interleave=1 takes it")
    as_rules(Options(causal=causal, **{name: options[name] for name in RULES if name in options}))


def described_rows(k: Any, v: Any) -> dict[str, object]:
    """What must be equal on all ranks of new rows."""
    given = {"k": k, "v": v}
    return {n: (*x.shape, x.dtype) if isinstance(x, torch.Tensor) else type(x).__name__ for n, x in given.items()}


def check_rows(name: str, x: Any) -> None:
    if not isinstance(x, torch.Tensor) or x.ndim != 4:
        raise InvalidArgument(name, getattr(x, "shape", type(x).__name__), "a torch tensor [B, H, L, D]")
