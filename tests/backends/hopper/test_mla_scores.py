"""Scores of latent kernels as tensor cores add them up, emulated: what is cut off must not show in lse."""

import math
import sys

import numpy as np
import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from tilewise.backends.hopper.mla import config
from tilewise.core.storage import latent_parts, stored_as
from tilewise.core.tensors import sequences
from tilewise.reference import attend
from tilewise.testing.case import make
from tilewise.testing.cases import INDICES, LATENT
from tilewise.testing.check import Mismatch, judge, largest_error

CASES = [c for c in (*LATENT, *INDICES) if c.D == 576 and c.dtype != "f32" and not c.q_lengths and not c.split_size]


def cut(x, exponent, bits):
    """Multiples of 2^(exponent - bits), towards 0."""
    step = np.ldexp(1.0, exponent - bits)
    return np.trunc(x / step) * step


def added(total, q, k):
    """Q K' added to float32 numbers: 16 columns at a time, with two bits more than float32 has.

    The average loss of such sums agrees with that of an H200.
    """
    for c in range(0, q.shape[1], 16):
        parts = np.concatenate([q[:, None, c : c + 16] * k[None, :, c : c + 16], total[..., None]], -1)
        total = cut(parts, np.frexp(np.abs(parts).max(-1))[1][..., None], 26).sum(-1)
        total = cut(total, np.frexp(total)[1], 24)
    return total


def product(q, k):
    """Q K' in float32, the last 64 columns first."""
    order = np.r_[512:576, 0:512]
    return added(np.zeros((len(q), len(k))), q[:, order], k[:, order])


def chained(q, k8, scales, rope):
    """Scores of float8 rows: one accumulator, which is multiplied from group to group."""
    total = np.zeros((len(q), len(k8)))
    ratios = [*(scales[:, :3] / scales[:, 1:]).astype(np.float32).T, scales[:, 3]]
    for g, ratio in enumerate(ratios):
        at = slice(128 * g, 128 * g + 128)
        total = (added(total, q[:, at], k8[:, at]) * ratio).astype(np.float32).astype(np.float64)
    return added(total, q[:, 512:], rope)


def in_order(q, k):
    """Q K' in float32, column by column: torch's own arithmetic on a GPU. On a CPU the order is that of its library."""
    total = np.zeros((len(q), len(k)), np.float32)
    for c in range(q.shape[1]):
        total = (total + q[:, None, c] * k[None, :, c]).astype(np.float32)  # exact products: an FMA
    return total.astype(np.float64)


def check_lse(case):
    call = make(case).checked(return_lse=True)
    p, found = call.problem, []
    for seq in sequences(p, call.tensors):
        exact, keys = attend(seq), seq.keys(0, seq.kv_len, torch.float64)[0].numpy()
        q = seq.q.double().flatten(0, 1).numpy()

        def scores(products, factor, exact=exact):
            s = torch.from_numpy(products).view(exact.scores.shape) * factor
            return torch.where(exact.scores.isinf(), -math.inf, s)

        lse = torch.logsumexp(scores(product(q, keys), config.factor(p) * math.log(2)), -1)
        if call.tensors.sinks is not None:
            lse = torch.logaddexp(lse, call.tensors.sinks.double()[:, None])
        found.append((lse, exact.lse, largest_error(scores(in_order(q, keys), p.scale), exact.scores)))
    error = max(e for _, _, e in found)
    for lse, exact, _ in found:
        judge("lse", lse, exact, error, torch.float32)  # half of what is allowed


@pytest.mark.parametrize("case", CASES, ids=str)
def test_lse_keeps_its_bound(case):
    check_lse(case)


def test_sums_that_are_cut_off_would_not(monkeypatch):
    monkeypatch.setattr(config, "CUT_OFF", 0.0)
    wrong = 0
    for case in CASES:
        try:
            check_lse(case)
        except Mismatch:
            wrong += 1
    assert wrong >= 3


@pytest.mark.parametrize("seed", range(3))
def test_chained_scores_of_float8_rows_keep_the_bound_of_lse(seed):
    g, stored, scale = torch.Generator().manual_seed(seed), stored_as("fp8_latent"), 576**-0.5
    q, k = torch.randn(24, 576, generator=g).bfloat16(), 3 * torch.randn(500, 576, generator=g)
    k[:, :128] *= 0.1
    k[:, 256:384] *= 5
    data, _ = stored.quantise(k)
    exact, rough = (
        torch.logsumexp(q.to(t) @ stored.dequantise(data, None, t).mT * scale, -1).double()
        for t in (torch.float64, torch.float32)
    )
    s = chained(q.double().numpy(), *(x.double().numpy() for x in latent_parts(data)))
    factor = scale * (1 + config.CUT_OFF * 2.0**-24)
    judge(
        "lse", torch.logsumexp(torch.from_numpy(s) * factor, -1), exact, 2 * (rough - exact).abs().max(), torch.float32
    )
