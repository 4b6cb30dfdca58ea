"""Wrong backward passes: the formula in float64 with one mistake each. The suite must reject them all."""

import math
from dataclasses import dataclass, replace

import torch

from tilewise.backends import reference as honest
from tilewise.core.tensors import sequences
from tilewise.reference import attend


@dataclass(frozen=True)
class GradientMutant:
    """A backend with a mistake in its gradients. `touches` are the fields of a case that the mistake needs."""

    name: str
    touches: tuple[str, ...]

    def supports_backward(self, problem):
        return None

    def plan_backward(self, problem):
        return honest.plan(problem)

    def run_backward(self, plan, tensors):
        run(plan.problem, tensors, self.name)


NONE = "no mistake"
MUTANTS = [
    GradientMutant(name, tuple(touches))
    for name, *touches in (
        ("delta left out",),
        ("delta of the wrong sign",),
        ("dlse left out",),
        ("dlse of the wrong sign",),
        ("scale twice in dQ",),
        ("scale left out of dK",),
        ("scale in the mask's gradient", "mask"),
        ("softcap's derivative left out", "softcap"),
        ("softcap's derivative of the score that is not capped", "softcap"),
        ("softcap's derivative in the mask's gradient", "softcap", "mask"),
        ("dK of one head of a group", "Hkv"),
        ("dV of one head of a group", "Hkv"),
        ("dK of a group averaged", "Hkv"),
        ("dK of KV head h % Hkv", "Hkv"),
        ("the sink left out of P", "sinks"),
        ("the sink's gradient forgotten", "sinks"),
        ("the sink's gradient of the wrong sign", "sinks"),
        ("the sink's gradient of the last sequence alone", "sinks"),
        ("a sink of +inf gives NaN", "sinks"),
        ("mask gradient of the last sequence alone", "mask"),
        ("mask gradient of the first head alone", "mask"),
        ("mask gradient of the first row alone", "mask"),
        ("mask gradient of the first key alone", "mask"),
        ("mask gradient left in cells past a sequence", "mask", "q_lengths"),
        ("slopes' gradient by row numbers", "alibi"),
        ("slopes' gradient by keys one position apart", "alibi", "k_stride"),
        ("keys that stand one position apart in dK and dV", "k_stride"),
        ("queries that stand one position apart", "q_stride"),
        ("slopes' gradient of the wrong sign", "alibi"),
        ("a tree mask ignored in dK and dV", "tree"),
        ("q_bias's gradient of the wrong sign", "q_bias"),
        ("q_bias's gradient times scale", "q_bias"),
        ("k_bias's gradient of the first row alone", "k_bias"),
        ("k_bias's gradient of the last sequence in all", "k_bias"),
        ("softcap's derivative in k_bias's gradient", "softcap", "k_bias"),
        ("the diagonal tile dropped in dK and dV", "causal"),
        ("the diagonal left out", "causal"),
        ("the first row that sees a tile of keys dropped", "causal"),
        ("inverse window one row too long", "window"),
        ("inverse window one row too short", "window"),
        ("causal aligned to the top left", "causal"),
        ("the last tile of rows dropped",),
        ("the last tile of keys dropped in dQ",),
        ("keys past a length are not written", "lengths"),
        ("rows of a key's own sequence shifted by one", "q_lengths"),
        ("hidden cells are not selected", "chunk"),
        ("indices ignored in dK and dV", "indices"),
        ("the first row's indices for all in dQ", "indices"),
        ("rows that see nothing are NaN",),
        ("P in base 2",),
        ("dQ accumulated in q's dtype", "dtype"),
        ("dK accumulated in q's dtype", "dtype"),
        ("P rounded to bfloat16 for float32",),
        ("dS rounded to bfloat16 for float32",),
        ("dropout left out of dV", "dropout"),
        ("dropout left out of dP", "dropout"),
        ("dropout without its scale in dV", "dropout"),
        ("dropout without its scale in dP", "dropout"),
        ("dropout of the next head in dP", "dropout"),
        ("dropout after delta", "dropout"),
        ("one TF32 pass for dQ in float32",),
    )
]


def run(p, b, wrong):
    """Every gradient of a call, with the mistake `wrong`."""
    t = b.forward
    for name, x in b.gradients().items():
        if not (wrong == "keys past a length are not written" and name in ("k", "v")):
            x.zero_()
    last = p.batch - 1
    for seq in sequences(p, t):
        r = attend(seq)
        rows = slice(seq.q_start, seq.q_start + seq.q_len)
        shift = wrong == "rows of a key's own sequence shifted by one" and seq.b > 0 and seq.kv_len > 1
        keys = slice(seq.kv_start - shift, seq.kv_start + seq.kv_len - shift)
        kv_row = 0 if p.form == "varlen" else seq.b
        q, dout, out = seq.q.double(), b.dout[seq.row, :, rows].double(), seq.out.double()
        k, v = (x(0, seq.kv_len, torch.float64).repeat_interleave(p.group, 0) for x in (seq.keys, seq.values))
        live = torch.isfinite(seq.lse)
        if wrong != "rows that see nothing are NaN":
            dout = torch.where(live[..., None], dout, 0.0)
        lse = torch.where(live, seq.lse.double(), 0.0)
        if wrong == "the sink left out of P":
            lse = torch.where(live, torch.logsumexp(r.scores, -1), 0.0)
        delta = (dout * out).sum(-1)
        if b.dlse is not None and wrong != "dlse left out":
            dlse = torch.where(live, b.dlse[seq.row, :, rows].double(), 0.0)
            delta = delta + dlse if wrong == "dlse of the wrong sign" else delta - dlse
        if wrong == "delta left out":
            delta = delta * 0
        if wrong == "delta of the wrong sign":
            delta = -delta
        visible = r.visible & live[..., None]
        i, j = torch.arange(seq.q_len)[:, None], torch.arange(seq.kv_len)[None]
        qpos, kpos = seq.positions(slice(0, seq.q_len), slice(0, seq.kv_len))
        seen = seen_by_keys = visible
        scores = r.scores
        if wrong == "the diagonal tile dropped in dK and dV":
            seen_by_keys = visible & ~((qpos // 32 == kpos // 32) & (kpos // 32 > 0))
        if wrong == "the diagonal left out":
            seen = seen_by_keys = visible & (qpos != kpos)
        if wrong == "the first row that sees a tile of keys dropped":
            seen_by_keys = visible & ~((qpos == j // 16 * 16) & (j // 16 > 0))
        if wrong == "inverse window one row too short" and p.rules.window[0] is not None:
            seen_by_keys = visible & (qpos - kpos < max(1, p.rules.window[0]))
        if wrong == "inverse window one row too long" and p.rules.window[0] is not None:
            wide = replace(p, rules=replace(p.rules, window=(p.rules.window[0] + 1, p.rules.window[1])))
            looser = attend(replace(seq, problem=wide, rules=replace(seq.rules, window=wide.rules.window)))
            scores, seen_by_keys = looser.scores, looser.visible & live[..., None]
        if wrong == "causal aligned to the top left":
            moved = attend(replace(seq, q_offset=0))
            scores, seen = moved.scores, moved.visible & live[..., None]
            seen_by_keys = seen
        if wrong in ("keys that stand one position apart in dK and dV", "queries that stand one position apart"):
            k_start, k_stride, q_stride = seq.rules.places
            near = (k_start, k_stride, 1) if wrong.startswith("queries") else (k_start, 1, q_stride)
            moved = attend(replace(seq, rules=replace(seq.rules, places=near)))
            scores, seen_by_keys = moved.scores, moved.visible & live[..., None]
        if (
            wrong in ("indices ignored in dK and dV", "the first row's indices for all in dQ")
            and p.selection is not None
        ):
            first = t.key_indices[:, :, :1].expand_as(t.key_indices) if "first" in wrong else None
            moved = attend(replace(seq, tensors=replace(t, key_indices=first)))
            scores = moved.scores
            seen, seen_by_keys = (
                moved.visible & live[..., None] if x else visible for x in ("dQ" in wrong, "dK" in wrong)
            )
        if wrong == "a tree mask ignored in dK and dV":
            looser = attend(replace(seq, tensors=replace(t, tree_mask=None)))
            scores, seen_by_keys = looser.scores, looser.visible & live[..., None]
        if wrong == "the last tile of rows dropped":
            seen = seen_by_keys = visible & (i < max(1, seq.q_len // 16 * 16))
        if wrong == "the last tile of keys dropped in dQ":
            seen = visible & (j < max(1, seq.kv_len // 16 * 16))
        exponent = scores - lse[..., None]
        probs_all = (exponent * math.log(2) if wrong == "P in base 2" else exponent).exp()
        dp = dout @ v.mT
        whole = slice(0, seq.q_len), slice(0, seq.kv_len)
        dropped = seq.dropped(torch.ones_like(dp), *whole)
        of_p, of_dp = dropped, dropped
        if wrong.startswith("dropout"):
            plain = {"left": torch.ones_like(dp), "without": (dropped != 0).double(), "of": dropped.roll(1, 0)}
            other = plain.get(wrong.split()[1], dropped)
            of_p, of_dp = (other if wrong.endswith("dV") else dropped), (other if wrong.endswith("dP") else dropped)
        dp = dp * of_dp
        if wrong == "dropout after delta":
            dp = (dp - delta[..., None]) * dropped + delta[..., None]

        def weights(cells, probs_all=probs_all, dp=dp, delta=delta):
            if wrong == "hidden cells are not selected":
                probs = torch.where(cells, probs_all, 0.0)
                return probs, probs * (dp - delta[..., None])
            probs = torch.where(cells, probs_all, 0.0)
            return probs, torch.where(cells, probs * (dp - delta[..., None]), 0.0)

        (_, ds), (probs, ds_keys) = weights(seen), weights(seen_by_keys)
        if b.dsinks is not None and wrong != "the sink's gradient forgotten":
            weight = torch.where(live, (t.sinks.double()[:, None] - lse).exp(), 0.0)
            if wrong == "a sink of +inf gives NaN":
                weight = (t.sinks.double()[:, None] - seq.lse.double()).exp()
            share = (weight * delta).sum(-1) * (1 if wrong == "the sink's gradient of the wrong sign" else -1)
            b.dsinks.copy_(share if wrong == "the sink's gradient of the last sequence alone" else b.dsinks + share)
        dcap = torch.ones_like(ds)
        if p.softcap and wrong != "softcap's derivative left out":
            s = p.scale * (q @ k.mT)
            inner = (
                s
                if wrong == "softcap's derivative of the score that is not capped"
                else (p.softcap * torch.tanh(s / p.softcap))
            )
            dcap = torch.where(visible, 1 - (inner / p.softcap).square(), 0.0)
        if b.dmask is not None:
            part = ds
            if wrong == "scale in the mask's gradient":
                part = part * p.scale
            if wrong == "softcap's derivative in the mask's gradient":
                part = part * dcap
            firsts = ("mask gradient of the first head alone", "mask gradient of the first row alone",
                      "mask gradient of the first key alone")  # fmt: skip
            for dim, one in enumerate(p.mask.broadcast[1:]):
                if one:
                    part = part.narrow(dim, 0, 1) if wrong == firsts[dim] else part.sum(dim, keepdim=True)
            where = b.dmask[0 if p.mask.broadcast[0] else seq.b]
            if wrong == "mask gradient left in cells past a sequence":
                where[:, seq.q_len :] = 1.0
            where = where[:, : seq.q_len, : seq.kv_len]
            alone = wrong == "mask gradient of the last sequence alone"
            where.copy_(part if alone and seq.b == last else where + part)
        if b.dq_bias is not None:
            factor = {"q_bias's gradient of the wrong sign": -1, "q_bias's gradient times scale": p.scale}.get(wrong, 1)
            b.dq_bias[seq.row, :, rows] = factor * ds.sum(-1)
        if b.dk_bias is not None:
            part = ds * dcap if wrong == "softcap's derivative in k_bias's gradient" else ds
            part = part[:, :1].sum(1) if wrong == "k_bias's gradient of the first row alone" else part.sum(1)
            b.dk_bias[kv_row, :, seq.kv_start : seq.kv_start + seq.kv_len] = part
            if wrong == "k_bias's gradient of the last sequence in all" and p.form == "dense":
                b.dk_bias[:, :, : seq.kv_len] = part
        if b.dalibi_slopes is not None:
            near = j if wrong == "slopes' gradient by keys one position apart" else kpos
            distance = (i - j if wrong == "slopes' gradient by row numbers" else qpos - near).abs()
            sign = 1 if wrong == "slopes' gradient of the wrong sign" else -1
            b.dalibi_slopes[seq.b] = sign * (ds * distance).sum((-1, -2))
        ds, ds_keys = ds * dcap, ds_keys * dcap
        if wrong == "P rounded to bfloat16 for float32" and p.q_dtype == torch.float32:
            probs = probs.bfloat16().double()
        if wrong == "dS rounded to bfloat16 for float32" and p.q_dtype == torch.float32:
            ds, ds_keys = ds.bfloat16().double(), ds_keys.bfloat16().double()
        select = wrong != "hidden cells are not selected"
        k0, q0 = (torch.nan_to_num(x, 0.0, 0.0, 0.0) if select else x for x in (k, q))
        if b.dq is not None:
            if wrong == "one TF32 pass for dQ in float32" and p.q_dtype == torch.float32:
                ds, k0 = tf32(ds), tf32(k0)
            dq = p.scale * tiled(ds, k0, p.q_dtype if wrong == "dQ accumulated in q's dtype" else None)
            dq = dq * p.scale if wrong == "scale twice in dQ" else dq
            b.dq[seq.row, :, rows] = dq.to(b.dq.dtype)
        scale = 1 if wrong == "scale left out of dK" else p.scale
        narrow = p.q_dtype if wrong == "dK accumulated in q's dtype" else None
        dk = scale * grouped(p, tiled(ds_keys.mT, q0, narrow), wrong, "dK")
        dv = grouped(p, (probs * of_p).mT @ dout, wrong, "dV")
        for gradient, x in ((b.dk, dk), (b.dv, dv)):
            if gradient is not None:
                gradient[kv_row, :, keys] = x.to(gradient.dtype)


def tiled(weights, x, dtype, size=16):
    """`weights @ x`; in tiles of a few columns, added up in `dtype`, if there is one."""
    if dtype is None:
        return weights @ x
    total = torch.zeros(*weights.shape[:2], x.shape[2], dtype=dtype)
    for left in range(0, weights.shape[2], size):
        total += (weights[..., left : left + size] @ x[:, left : left + size]).to(dtype)
    return total.double()


def grouped(p, x, wrong, which):
    """Gradients of query heads `[H, Lk, D]` to those of KV heads."""
    heads = x.unflatten(0, (p.kv_heads, p.group))
    if wrong == f"{which} of one head of a group":
        return heads[:, 0]
    if wrong == f"{which} of a group averaged":
        return heads.mean(1)
    if wrong == f"{which} of KV head h % Hkv":
        return x.unflatten(0, (p.group, p.kv_heads)).sum(0)
    return heads.sum(1)


def tf32(x):
    return ((x.float().view(torch.int32) + 4096) & ~8191).view(torch.float32).double()
