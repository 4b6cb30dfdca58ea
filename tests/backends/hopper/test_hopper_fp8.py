"""Prefill in float8 on Hopper, which no call is planned for: run as plain Python, compiled ahead of time."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

import gluon_sim
from aot import SHARED
from gluon_sim import Descriptor, Machine
from gluon_values import Pointer, SimError
from hopper_aot import build
from hopper_sim import flat
from tilewise.backends.gpu.target import nvidia
from tilewise.backends.hopper.fp8 import kernel
from tilewise.backends.hopper.fp8.launch import Fp8, config_of
from tilewise.core.mask_rules import RULE_NUMBERS

FP8 = torch.float8_e4m3fn
KERNELS = gluon_sim.load(places=gluon_sim.FP8)


def turned(v, keys):
    """What `transpose` writes: [B, H, D, keys], in each 16 keys 0, 1, 8, 9, 2, 3, 10, 11 and so on."""
    order = torch.tensor([8 * (i // 2 % 2) + 2 * (i // 4) + i % 2 for i in range(16)])
    x = torch.nn.functional.pad(v, (0, 0, 0, keys - v.shape[2])).unflatten(2, (-1, 16))
    return x[:, :, :, order].flatten(2, 3).mT.contiguous()


class Inputs:
    """Float8 numbers, as float16 for NumPy, with scales of rows of q and heads of k and v."""

    def __init__(self, B=1, H=2, Hkv=1, Lq=200, Lk=300, D=128, causal=False, outlier=1.0):
        g = torch.Generator().manual_seed(Lq + D)
        q, k, v = (torch.randn(B, h, n, D, generator=g) for h, n in ((H, Lq), (Hkv, Lk), (Hkv, Lk)))
        q = 3 * q
        k[..., 5] *= outlier
        self.causal, self.scale = causal, D**-0.5
        largest = (q.abs().amax(-1), k.abs().amax((-2, -1)), v.abs().amax((-2, -1)))
        self.scales = [x / 448 for x in largest]
        self.q, self.k, self.v = (
            (x / s.reshape(*s.shape, *(1,) * (4 - s.ndim))).to(FP8).half()
            for x, s in zip((q, k, v), self.scales, strict=True)
        )
        self.out = torch.full((B, H, Lq, D), float("nan"), dtype=torch.float16)
        self.lse = torch.full((B, H, Lq), float("nan"))

    def attention(self, dtype, fp8):
        """Dense attention in `dtype`; with `fp8`, weights are rounded as the kernel's are."""
        group = self.q.shape[1] // self.k.shape[1]
        q, k, v = (
            (x.to(dtype) * s.to(dtype).reshape(*s.shape, *(1,) * (4 - s.ndim)))
            for x, s in zip((self.q, self.k, self.v), self.scales, strict=True)
        )
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        s = q @ k.mT * self.scale
        if self.causal:
            Lq, Lk = s.shape[-2:]
            s = s.masked_fill(torch.ones(Lq, Lk).tril(Lk - Lq) == 0, -torch.inf)
        top = s.amax(-1, keepdim=True).clamp_min(-1e30)
        p = torch.exp(s - top)
        total = p.sum(-1, keepdim=True)
        p = (256 * p).to(FP8).to(dtype) / 256 if fp8 else p
        out = torch.where(total == 0, 0.0, p @ v / torch.where(total == 0, 1.0, total))
        return out, torch.logsumexp(s, -1)

    def check(self):
        want, lse = self.attention(torch.float64, False)
        rough, rough_lse = self.attention(torch.float32, True)
        for got, exact, near in ((self.out, want, rough.half()), (self.lse, lse, rough_lse)):
            there = exact != -torch.inf
            assert bool((got[~there] == -torch.inf).all())
            error, bound = ((x.double() - exact)[there].abs().max() for x in (got, near))
            assert error <= 2 * bound + torch.finfo(got.dtype).eps, f"off by {error}, at most {2 * bound}"


def run(inputs, kernels=KERNELS, seed=0, processors=3, promote=True, **shape):
    i = inputs
    made = Fp8(i.q, i.k, i.causal, i.scale, config_of(**shape), promote, nvidia(90, processors))
    s, vt = made.spec, turned(i.v, made.padded)
    counter = np.zeros(4, np.int32)
    given = made.arguments(i.q, i.k, vt, i.scales, i.out, i.lse, torch.from_numpy(counter))
    given |= {
        "q": Descriptor(i.q.numpy(), (1, 1, 64, s.chunk_d)), "k": Descriptor(i.k.numpy(), (1, 1, s.BN, s.chunk_d)),
        "v": Descriptor(vt.numpy(), (1, 1, s.DV, s.BN)), "o": Descriptor(i.out.numpy(), (1, 1, 64, s.DV)),
        "LSE": flat(i.lse), "COUNTER": Pointer(counter) if made.bound.dynamic else None,
    }  # fmt: skip
    given |= {f"{x}_SCALES": flat(scales) for x, scales in zip("QKV", i.scales, strict=True)}
    names = [n for name in kernel.Arguments.NAMES for n in (RULE_NUMBERS if name == "rules" else (name,))]
    gluon_sim.MACHINE = Machine(made.bound.programs, seed)
    gluon_sim.MACHINE.run(lambda: getattr(kernels, "fp8.kernel").fp8_kernel(*(given[name] for name in names)))


CASES = {
    "full": {"Lq": 200, "Lk": 384},
    "tail": {"Lq": 130, "Lk": 300, "B": 2},
    "causal": {"Lq": 500, "Lk": 500, "causal": True, "H": 3},
    "more keys": {"Lq": 300, "Lk": 700, "causal": True},
    "rows that see nothing": {"Lq": 300, "Lk": 120, "causal": True},
    "one tile": {"Lq": 40, "Lk": 17},
    "D64": {"D": 64, "H": 4, "Hkv": 2},
    "outlier": {"outlier": 40.0, "Lk": 512},
}


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_weights_in_float8(name):
    for shape in ({}, {"BN": 64, "consumers": 3}):
        inputs = Inputs(**CASES[name])
        run(inputs, seed=len(name), **shape)
        inputs.check()


def test_sums_in_the_tensor_cores():
    inputs = Inputs(**CASES["causal"])
    run(inputs, promote=False)
    inputs.check()


WRONG = {
    "keys in their own order": ("(0, 1, 3, 2, 4))", "(0, 1, 2, 3, 4))"),
    "a rescale left out": ("o = gl.fma(o, factor[:, None] + gl.zeros_like(o), x)", "o = o + x"),
    "no scale of k": ("* (k_scale * (a.scale * LOG2E))", "* (a.scale * LOG2E)"),
    "no scale of v": ("v_scale / total", "1.0 / total"),
    "lse of weights times 256": ("(m * factor - SHIFT) * LN2", "m * factor * LN2"),
    "a tile that is hidden in part taken for whole": ("gl.minimum(right, last)", "gl.minimum(start, last)"),
    "values released too soon": (
        "    x = start_output(a, values, n, p, rescaled(a, o, alpha))\n",
        "    x = start_output(a, values, n, p, rescaled(a, o, alpha))\n    values.release(n)\n    n -= 1\n",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_noticed(name):
    kernels = gluon_sim.load({"fp8.kernel": [WRONG[name]]}, gluon_sim.FP8)
    with pytest.raises((SimError, AssertionError)):
        probe(kernels)


def probe(kernels):
    for case in ("causal", "tail"):
        inputs = Inputs(**CASES[case])
        run(inputs, kernels)
        inputs.check()


def test_the_probes_pass_as_they_are():
    probe(KERNELS)


TURN = """
import torch
from tilewise.backends.hopper.fp8.kernel import transpose
for keys, D in ((300, 128), (16, 64), (129, 40)):
    v = torch.randint(0, 256, (2, keys, 3, D), dtype=torch.uint8).transpose(1, 2)
    wide, padded = max(64, 1 << (D - 1).bit_length()), -(-keys // 128) * 128
    vt = torch.full((2, 3, wide, padded), 7, dtype=torch.uint8)
    transpose[(padded // 128, 6)](v, vt, *v.stride()[:3], *vt.stride()[:3], 3, keys, D, D=wide, KEYS=128)
    for place in range(padded):
        key = place // 16 * 16 + (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)[place % 16]
        want = torch.zeros(2, 3, wide, dtype=torch.uint8)
        if key < keys:
            want[..., :D] = v[:, :, key]
        assert torch.equal(vt[..., place], want), place
print("right")
"""


def test_values_are_transposed_in_the_order_of_the_weights():
    v = torch.arange(32.0).view(1, 1, 32, 1)
    assert turned(v, 32)[0, 0, 0, :16].tolist() == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", TURN], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "right", done.stdout + done.stderr[-3000:]


@pytest.mark.parametrize(("causal", "most"), [(False, 450), (True, 590)])
def test_it_compiles_without_spills_in_its_loops(causal, most):
    def empty(*shape, dtype=FP8):
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k, v = (empty(2, 16, 4096, 128) for _ in range(3))
    made = Fp8(q, k, causal, 0.1, config_of(), True, nvidia(90))
    scales = [empty(2, 16, 4096, dtype=torch.float32), *(empty(2, 16, dtype=torch.float32) for _ in range(2))]
    given = made.arguments(
        q, k, made.transposed(v), scales, empty(*q.shape, dtype=torch.bfloat16), scales[0],
        empty(4, dtype=torch.int32) if made.bound.dynamic else None,
    )  # fmt: skip
    built = build(kernel.fp8_kernel, given, ("S",))
    assert built.shared <= SHARED[90]
    assert "C75" not in built.report  # no product is waited for before the next is started
    assert built.loops
    for loop in built.loops:
        assert len(loop) <= most
        assert not any("STL" in x or "LDL" in x for x in loop)
        assert sum("QGMMA.64x128x32.F32.E4M3.E4M3" in x for x in loop) == 8
