"""Wrong kernels: each is the oracle with one mistake that real kernels have made. The suite must reject them all."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from problem_space import changed
from tilewise.backends import reference as honest
from tilewise.core.dropout import kept_scale
from tilewise.core.mask_rules import visible_by_position
from tilewise.core.problem import Problem
from tilewise.core.tensors import Sequence, Tensors, sequences
from tilewise.reference import Scores, attend

MUTANTS: list["Mutant"] = []


@dataclass(frozen=True)
class Mutant:
    """A backend with a mistake. `touches` are the fields of a case that the mistake needs."""

    name: str
    touches: tuple[str, ...]
    result: Callable[[Problem, Tensors], list[tuple[Sequence, torch.Tensor, torch.Tensor]]]

    def supports(self, problem):
        return None

    def takes_shared(self, problem):
        return True

    def plan(self, problem):
        return honest.plan(problem)

    def run(self, plan, tensors):
        tensors.out.zero_()
        if tensors.lse is not None:
            tensors.lse.fill_(-math.inf)
        for seq, out, lse in self.result(plan.problem, tensors):
            seq.out.copy_(out)
            if seq.lse is not None:
                seq.lse.copy_(lse)


def mutant(name, *touches):
    def add(fn):
        MUTANTS.append(Mutant(name, touches, fn))
        return fn

    return add


def asks(name, *touches):
    """A mistake in what is asked: `fn(problem)` gives the wrong problem."""

    def add(fn):
        def result(problem, tensors):
            found = [(seq, attend(seq)) for seq in sequences(fn(problem), tensors)]
            return [(seq, r.out, r.lse) for seq, r in found]

        return mutant(name, *touches)(result)

    return add


def reads(name, *touches):
    """A mistake in what is read: `fn(problem, tensors)` gives the wrong tensors."""

    def add(fn):
        def result(problem, tensors):
            wrong = fn(problem, tensors)
            found = [(seq, attend(seq)) for seq in sequences(problem, wrong)]
            return [(seq, r.out, r.lse) for seq, r in found]

        return mutant(name, *touches)(result)

    return add


def softmaxes(name, *touches):
    """A mistake in the arithmetic of one sequence: `fn(seq, scores)` gives the wrong `out` and `lse`."""

    def add(fn):
        def result(problem, tensors):
            return [(seq, *fn(seq, attend(seq))) for seq in sequences(problem, tensors)]

        return mutant(name, *touches)(result)

    return add


def values(seq: Sequence) -> torch.Tensor:
    return seq.values(0, seq.kv_len, torch.float64).repeat_interleave(seq.problem.group, 0)


def rescored(seq: Sequence, scores: torch.Tensor, visible: torch.Tensor):
    """Softmax and output of other scores."""
    s = torch.where(visible, scores, -math.inf)
    logits = s
    if seq.tensors.sinks is not None:
        logits = torch.cat([s, seq.tensors.sinks.double()[:, None, None].expand(-1, seq.q_len, 1)], -1)
    probs = torch.where(visible, torch.softmax(logits, -1)[..., : seq.kv_len], 0.0)
    return probs @ values(seq), torch.logsumexp(logits, -1)


# What is asked


@asks("scale times log2(e) twice")
def _(p):
    return replace(p, scale=p.scale * math.log2(math.e))


@asks("scale rounded to bfloat16", "D")
def _(p):
    return replace(p, scale=float(torch.tensor(p.scale).bfloat16()))


@asks("scale ignored", "scale")
def _(p):
    return replace(p, scale=p.head_dim**-0.5)


@asks("window of W + 1", "window")
def _(p):
    left, right = p.rules.window
    return changed(p, window=(left if left is None else left + 1, right))


@asks("right side of the window ignored", "window")
def _(p):
    return changed(p, window=(p.rules.window[0], None))


@asks("causal aligned to the top left", "causal")
def _(p):
    return changed(p, q_offset=0)


@asks("causal that hides the query's own key", "causal")
def _(p):
    offset = p.rules.q_offset
    return changed(p, q_offset=offset - 1) if isinstance(offset, int) else p


@asks("softcap dropped", "softcap")
def _(p):
    return replace(p, softcap=0.0)


@asks("chunk ignored", "chunk")
def _(p):
    return changed(p, chunk=0)


@asks("keys that stand one position apart", "k_stride")
def _(p):
    return p if p.rules.places == "rows" else changed(p, places=(p.rules.places[0], 1, p.rules.places[2]))


@asks("queries that stand one position apart", "q_stride")
def _(p):
    return p if p.rules.places == "rows" else changed(p, places=(*p.rules.places[:2], 1))


@asks("the first key at position 0", "k_start")
def _(p):
    return p if p.rules.places == "rows" else changed(p, places=(0, *p.rules.places[1:]))


@asks("the last key before a window's left side is seen", "k_stride", "window")
def _(p):
    left, right = p.rules.window
    return p if left is None or p.rules.places == "rows" else changed(p, window=(left + p.rules.places[1] - 1, right))


# What is read


@reads("places of the first row for all", "k_stride")
def _(p, t):
    return replace(t, places=None if t.places is None else t.places[:1].expand(p.batch, -1))


@reads("ALiBi that rewards distance", "alibi")
def _(p, t):
    return replace(t, alibi_slopes=None if t.alibi_slopes is None else -t.alibi_slopes)


@reads("ALiBi slopes of the first row for all", "alibi")
def _(p, t):
    return replace(t, alibi_slopes=None if t.alibi_slopes is None else t.alibi_slopes[:1].expand(p.batch, -1))


@reads("tree mask dropped", "tree")
def _(p, t):
    return replace(t, tree_mask=None)


@reads("tree mask transposed", "tree")
def _(p, t):
    return replace(t, tree_mask=None if t.tree_mask is None else t.tree_mask.mT)


@reads("the first sequence's tree for all", "tree")
def _(p, t):
    return replace(t, tree_mask=None if t.tree_mask is None else t.tree_mask[:1].expand_as(t.tree_mask))


@reads("a tree that begins one key late", "tree")
def _(p, t):
    return replace(t, tree_mask=None if t.tree_mask is None else t.tree_mask.roll(1, -1))


@softmaxes("a tree over the first keys", "tree")
def _(seq, r: Scores):
    tree = seq.tensors.tree_mask
    if tree is None or seq.kv_len <= seq.q_len:
        return r.out, r.lse
    first = torch.nn.functional.pad(tree[seq.b, : seq.q_len, : seq.q_len], (0, seq.kv_len - seq.q_len), value=True)
    return rescored(seq, r.scores, r.visible & first)


@reads("nodes of a tree one after the other", "positions")
def _(p, t):
    return replace(t, positions=None)


@reads("the first sequence's positions for all", "positions")
def _(p, t):
    return replace(t, positions=None if t.positions is None else t.positions[:1].expand_as(t.positions))


@softmaxes("positions of queries, not of their keys", "positions")
def _(seq, r: Scores):
    qpos, slots = seq.positions(slice(0, seq.q_len), slice(0, 0))[0], torch.arange(seq.kv_len)
    return rescored(seq, r.scores, r.visible & visible_by_position(seq.rules, qpos, slots))


@reads("q_bias dropped", "q_bias")
def _(p, t):
    return replace(t, q_bias=None)


@reads("k_bias of the first head for all", "k_bias")
def _(p, t):
    return replace(t, k_bias=None if t.k_bias is None else t.k_bias[:, :1].expand_as(t.k_bias))


@reads("biases of the first row for all", "q_bias", "k_bias")
def _(p, t):
    first = {n: x[:1].expand_as(x) for n in ("q_bias", "k_bias") if (x := getattr(t, n)) is not None}
    return replace(t, **first)


@reads("k_bias of -inf taken for a large number", "k_bias")
def _(p, t):
    return replace(t, k_bias=None if t.k_bias is None else t.k_bias.clamp_min(-1.0))


@reads("k_bias read one key late", "k_bias")
def _(p, t):
    return replace(t, k_bias=None if t.k_bias is None else t.k_bias.roll(1, -1))


def weighed(seq, r, **places):
    """The output with dropout of other places."""
    whole = slice(0, seq.q_len), slice(0, seq.kv_len)
    kept = replace(seq, **places).dropped(torch.ones_like(r.probs), *whole)
    return (r.probs * kept) @ values(seq), r.lse


@softmaxes("dropout ignored", "dropout")
def _(seq, r):
    return r.probs @ values(seq), r.lse


@softmaxes("dropout without 1 / (1 - p)", "dropout")
def _(seq, r):
    return (r.probs * (r.weights != 0)) @ values(seq), r.lse


@softmaxes("dropout before the softmax", "dropout")
def _(seq, r):
    kept = seq.kept(slice(0, seq.q_len), slice(0, seq.kv_len))
    return rescored(seq, r.scores, r.visible & kept)


@softmaxes("dropout by the first batch row's numbers", "dropout")
def _(seq, r):
    return weighed(seq, r, b=0)


@softmaxes("dropout by KV heads", "dropout", "Hkv")
def _(seq, r):
    p = seq.problem
    kept = seq.kept(slice(0, seq.q_len), slice(0, seq.kv_len))[: p.kv_heads].repeat_interleave(p.group, 0)
    return (r.probs * kept * kept_scale(p.dropout_p)) @ values(seq), r.lse


@softmaxes("dropout by row numbers", "dropout")
def _(seq, r):
    return weighed(seq, r, q_offset=0)


@softmaxes("dropout by key numbers", "dropout", "k_stride")
def _(seq, r):
    _, _, q_stride = seq.places
    return weighed(seq, r, rules=replace(seq.rules, places=(0, 1, q_stride)))


@softmaxes("dropout of a seed's low half", "dropout")
def _(seq, r):
    return weighed(seq, r, tensors=replace(seq.tensors, dropout_seed=seq.tensors.dropout_seed & 0xFFFFFFFF))


@reads("sinks dropped", "sinks")
def _(p, t):
    return replace(t, sinks=None)


@reads("lengths of the cache ignored", "lengths")
def _(p, t):
    full = None if t.kv_lengths is None or p.form == "paged" else torch.full_like(t.kv_lengths, p.kv_len)
    return replace(t, kv_lengths=t.kv_lengths if full is None else full)


@reads("a tail tile is skipped")
def _(p, t):
    if p.form != "dense":
        return t
    lengths = torch.full((p.batch,), p.kv_len) if t.kv_lengths is None else t.kv_lengths
    return replace(t, kv_lengths=torch.where(lengths > 32, lengths // 32 * 32, lengths))


@reads("a tail tile is read past the length", "lengths")
def _(p, t):
    if t.kv_lengths is None or p.form == "varlen":
        return t
    return replace(t, kv_lengths=(-(-t.kv_lengths // 16) * 16).clamp_max(p.kv_len))


@reads("one mask plane for all heads", "mask")
def _(p, t):
    return replace(t, mask=None if t.mask is None else t.mask[:, :1].expand_as(t.mask))


@reads("one mask plane for all rows of the batch", "mask")
def _(p, t):
    return replace(t, mask=None if t.mask is None else t.mask[:1].expand_as(t.mask))


@reads("bool mask inverted", "mask")
def _(p, t):
    return replace(t, mask=~t.mask) if t.mask is not None and t.mask.dtype == torch.bool else t


@reads("mask bias ignored, only -inf read", "mask")
def _(p, t):
    return replace(t, mask=t.mask != -math.inf) if t.mask is not None and t.mask.dtype != torch.bool else t


@reads("a finite bias taken for -inf", "mask")
def _(p, t):
    if t.mask is None or t.mask.dtype == torch.bool:
        return t
    return replace(t, mask=t.mask.masked_fill(t.mask < -1e4, -math.inf))


@reads("a classifier that looks at half of a tile's columns", "mask")
def _(p, t):
    if t.mask is None or p.form != "dense":
        return t
    seen = (t.mask if t.mask.dtype == torch.bool else t.mask == 0).clone()
    for j in range(0, p.kv_len, 64):
        half = seen[..., j : j + 32].amin(-1, keepdim=True) > 0
        seen[..., j : j + 64] |= half
    return replace(t, mask=seen) if t.mask.dtype == torch.bool else replace(t, mask=t.mask.masked_fill(seen, 0.0))


@reads("pages in the order of the pool", "page", "lengths")
def _(p, t):
    return t if t.block_table is None else replace(t, block_table=t.block_table.sort(1).values.clamp_max(len(t.k) - 1))


@reads("pages read one entry late", "lengths")
def _(p, t):
    return t if t.block_table is None else replace(t, block_table=t.block_table.roll(-1, 1))


@reads("the first row's pages for all rows", "lengths")
def _(p, t):
    return t if t.block_table is None else replace(t, block_table=t.block_table[:1].expand_as(t.block_table))


@reads("q_offset of the first row for all", "offset")
def _(p, t):
    return replace(t, q_offset=None if t.q_offset is None else t.q_offset[:1].expand(p.batch))


@reads("one scale for each row", "k")
def _(p, t):
    return replace(t, k_scales=None if t.k_scales is None else t.k_scales[..., :1].expand_as(t.k_scales))


@reads("shared columns of keys dropped", "shared")
def _(p, t):
    return replace(t, k_shared=None if t.k_shared is None else torch.zeros_like(t.k_shared))


@reads("shared columns of the key before", "shared")
def _(p, t):
    return replace(t, k_shared=None if t.k_shared is None else t.k_shared.roll(1, 2))


@reads("codebook4 without its signs", "v")
def _(p, t):
    return replace(t, v=t.v & 0x77) if p.v_format.name == "codebook4" else t


@reads("int4 halves swapped", "v")
def _(p, t):
    return replace(t, v=(t.v >> 4) | (t.v << 4)) if p.v_format.packing == 2 else t


@reads("keys of the previous sequence", "q_lengths", "lengths")
def _(p, t):
    return replace(t, cu_seqlens_k=(t.cu_seqlens_k - 1).clamp_min(0)) if p.form == "varlen" else t


@reads("key indices ignored", "indices")
def _(p, t):
    return replace(t, key_indices=None)


@reads("values that are the last columns of their keys", "latent")
def _(p, t):
    return replace(t, v=t.k[..., -t.v.shape[-1] :]) if p.v_in_k and not p.k_format.is_quantised else t


@reads("an index of -1 taken for key 0", "indices")
def _(p, t):
    return t if t.key_indices is None else replace(t, key_indices=t.key_indices.clamp_min(0))


@reads("the first head's indices for all", "indices")
def _(p, t):
    return t if t.key_indices is None else replace(t, key_indices=t.key_indices[:, :1].expand_as(t.key_indices))


@reads("the first row's indices for all", "indices")
def _(p, t):
    return t if t.key_indices is None else replace(t, key_indices=t.key_indices[:, :, :1].expand_as(t.key_indices))


@reads("the last index left out", "indices")
def _(p, t):
    return t if t.key_indices is None else replace(t, key_indices=t.key_indices[..., :-1])


@reads("slots of pages taken for positions", "indices", "lengths")
def _(p, t):
    if t.key_indices is None or t.block_table is None or p.selection.block > 1:
        return t
    page = t.key_indices.clamp_min(0) // p.page_size
    moved = page * p.page_size + (t.key_indices + 1) % p.page_size
    return replace(t, key_indices=torch.where(t.key_indices < 0, -1, moved))


@asks("blocks of one key more", "block")
def _(p):
    return replace(p, selection=replace(p.selection, block=p.selection.block + 1))


# How it is computed


@softmaxes("mean of v")
def _(seq, r: Scores):
    count = r.visible.sum(-1, keepdim=True).clamp_min(1)
    return (r.visible / count).double() @ values(seq), r.lse


@softmaxes("KV head h % Hkv", "Hkv")
def _(seq, r: Scores):
    k, v = (x(0, seq.kv_len, torch.float64).repeat(seq.problem.group, 1, 1) for x in (seq.keys, seq.values))
    s = torch.where(r.visible, seq.problem.scale * (seq.q.double() @ k.mT), -math.inf)
    return torch.where(r.visible, torch.softmax(s, -1), 0.0) @ v, torch.logsumexp(s, -1)


@softmaxes("softcap after the mask", "softcap", "mask")
def _(seq, r: Scores):
    if not seq.problem.softcap or seq.problem.mask is None:
        return r.out, r.lse
    cap = seq.problem.softcap
    return rescored(seq, cap * torch.tanh(r.scores / cap), r.visible)


@softmaxes("softcap after the biases", "softcap", "k_bias")
def _(seq, r: Scores):
    bias = seq.bias(slice(0, seq.q_len), slice(0, seq.kv_len), torch.float64)
    if not seq.problem.softcap or bias is None:
        return r.out, r.lse
    cap = seq.problem.softcap
    return rescored(seq, cap * torch.tanh(r.scores / cap), r.visible)


@softmaxes("ALiBi by row numbers", "alibi")
def _(seq, r: Scores):
    if seq.slopes is None:
        return r.out, r.lse
    i, j = torch.arange(seq.q_len)[:, None], torch.arange(seq.kv_len)
    qpos, kpos = seq.positions(slice(0, seq.q_len), slice(0, seq.kv_len))
    shift = (qpos - kpos).abs() - (i - j).abs()
    return rescored(seq, r.scores + seq.slopes.double()[:, None, None] * shift, r.visible)


@softmaxes("the sink counted once more, as by a second split", "sinks")
def _(seq, r: Scores):
    if seq.tensors.sinks is None:
        return r.out, r.lse
    lse = torch.logaddexp(r.lse, seq.tensors.sinks.double()[:, None].expand_as(r.lse))
    return r.out * (r.lse - lse).exp()[..., None], lse


@softmaxes("the sink counted in every split", "sinks", "split_size")
def _(seq, r: Scores):
    splits = -(-seq.kv_len // (seq.problem.split_size or max(1, seq.kv_len)))
    if seq.tensors.sinks is None or splits < 2:
        return r.out, r.lse
    sinks = seq.tensors.sinks.double()[:, None] + math.log(splits)
    lse = torch.logaddexp(torch.logsumexp(r.scores, -1), sinks.expand_as(r.lse))
    return torch.where(lse[..., None].isfinite(), r.out * (r.lse - lse).exp()[..., None], r.out), lse


@softmaxes("a sink of -inf is NaN in rows that see nothing", "sinks")
def _(seq, r: Scores):
    return torch.where((r.lse == -math.inf)[..., None], math.nan, r.out), r.lse


@softmaxes("a sink of +inf is taken for none", "sinks")
def _(seq, r: Scores):
    out, lse = rescored(replace(seq, tensors=replace(seq.tensors, sinks=None)), r.scores, r.visible)
    taken = r.lse == math.inf
    return torch.where(taken[..., None], out, r.out), torch.where(taken, lse, r.lse)


@softmaxes("a stale maximum: the output is not rescaled when it grows")
def _(seq, r: Scores):
    m = torch.full(r.lse.shape, -math.inf, dtype=torch.float64)
    acc, v = torch.zeros_like(r.out), values(seq)
    for j in range(0, seq.kv_len, 16):
        m = torch.maximum(m, r.scores[..., j : j + 16].amax(-1))
        p = (r.scores[..., j : j + 16] - m.masked_fill(m == -math.inf, 0)[..., None]).exp()
        acc += p @ v[:, j : j + 16]
    total = (r.lse - m.masked_fill(m == -math.inf, 0)).exp()[..., None]
    return torch.where(total == 0, 0.0, acc / total), r.lse


@softmaxes("lse in base 2")
def _(seq, r: Scores):
    return r.out, r.lse * math.log2(math.e)


@softmaxes("lse without the sink", "sinks")
def _(seq, r: Scores):
    return r.out, torch.logsumexp(r.scores, -1)


@softmaxes("hidden cells given -65504 instead of left out", "mask")
def _(seq, r: Scores):
    return rescored(seq, torch.where(r.visible, r.scores, -65504.0), torch.ones_like(r.visible))


@softmaxes("rows that see nothing are NaN", "mask")
def _(seq, r: Scores):
    return torch.where((r.lse == -math.inf)[..., None], math.nan, r.out), r.lse


@softmaxes("one TF32 pass for float32")
def _(seq, r: Scores):
    def tf32(x):
        return ((x.float().view(torch.int32) + 4096) & ~8191).view(torch.float32).double()

    q, k = seq.q.double(), seq.keys(0, seq.kv_len, torch.float64).repeat_interleave(seq.problem.group, 0)
    error = seq.problem.scale * (tf32(q) @ tf32(k).mT - q @ k.mT)
    return rescored(seq, r.scores + error, r.visible)


@softmaxes("weights rounded to bfloat16 for float32")
def _(seq, r: Scores):
    return r.probs.bfloat16().double() @ values(seq), r.lse


@softmaxes("the last value is dropped")
def _(seq, r: Scores):
    return r.out - r.probs[..., -1:] * values(seq)[:, -1:] if seq.kv_len else r.out, r.lse
