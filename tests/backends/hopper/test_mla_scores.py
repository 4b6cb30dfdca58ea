"""Scores of latent kernels as tensor cores add them up, emulated: what is cut off must not show in lse."""

import math
import sys

import numpy as np
import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from tilewise.backends.hopper.mla import config
from tilewise.core.tensors import sequences
from tilewise.reference import attend
from tilewise.testing.case import make
from tilewise.testing.cases import INDICES, LATENT
from tilewise.testing.check import Mismatch, judge, torch_errors

CASES = [c for c in (*LATENT, *INDICES) if c.D == 576 and c.dtype != "f32" and not c.q_lengths and not c.split_size]


def cut(x, exponent, bits):
    """Multiples of 2^(exponent - bits), towards 0."""
    step = np.ldexp(1.0, exponent - bits)
    return np.trunc(x / step) * step


def product(q, k):
    """Q K' in float32: 16 columns at a time, with two bits more than float32 has, the last 64 columns first.

    The average loss of such sums agrees with that of an H200.
    """
    order = np.r_[512:576, 0:512]
    q, k = q[:, order], k[:, order]
    total = np.zeros((len(q), len(k)))
    for c in range(0, 576, 16):
        parts = np.concatenate([q[:, None, c : c + 16] * k[None, :, c : c + 16], total[..., None]], -1)
        total = cut(parts, np.frexp(np.abs(parts).max(-1))[1][..., None], 26).sum(-1)
        total = cut(total, np.frexp(total)[1], 24)
    return total


def check_lse(case):
    call = make(case).checked(return_lse=True)
    p, (_, error) = call.problem, torch_errors(call)
    for seq in sequences(p, call.tensors):
        exact, keys = attend(seq), seq.keys(0, seq.kv_len, torch.float64)[0].numpy()
        s = torch.from_numpy(product(seq.q.double().flatten(0, 1).numpy(), keys)).view(exact.scores.shape)
        s = torch.where(exact.scores.isinf(), -math.inf, s * (config.factor(p) * math.log(2)))
        lse = torch.logsumexp(s, -1)
        if call.tensors.sinks is not None:
            lse = torch.logaddexp(lse, call.tensors.sinks.double()[:, None])
        judge("lse", lse, exact.lse, 2 * error, torch.float32)


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
