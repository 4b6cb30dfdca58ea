"""Prefill in 16 bits on the CPU: by AMX or AVX-512 BF16 where the processor has it, by fp32 vectors elsewhere."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import njit

from tilewise import attention, plan
from tilewise.backends.cpu import config
from tilewise.backends.cpu.codegen.bf16_dot import has_bf16
from tilewise.backends.cpu.codegen.vector import W
from tilewise.backends.cpu.gemm import amx, pack_tiles
from tilewise.dispatch import call_cache, planner
from tilewise.testing.case import Case
from tilewise.testing.cases import CASES
from tilewise.testing.check import check_case

PREFILL = [c for c in CASES if c.dtype == "f32" and not c.k and not c.v and c.Lq > 16 and c.mask_kind in ("", "bool")]


LESS = ["bf16"] * amx.usable() + ["vectors"]  # processors with less than this one


@pytest.fixture(params=LESS)
def less(monkeypatch, request):
    """As on a processor without AMX, or without AVX-512 BF16 as well."""

    def forget():
        call_cache.forget()
        planner.choose.cache_clear()

    monkeypatch.setattr(amx, "usable", lambda: False)
    if request.param == "vectors":
        monkeypatch.setattr(config, "has_bf16", lambda: False)
    forget()
    yield request.param
    forget()


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("case", PREFILL, ids=str)
def test_prefill_in_16_bits(case, dtype):
    check_case(replace(case, dtype=dtype), "cpu")


@pytest.mark.parametrize("case", [c for c in CASES if c.dtype != "f32"], ids=str)
def test_the_same_with_less(less, case):
    check_case(case, "cpu")


def test_the_plan_says_which(less):
    q = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16)
    by_dots = less == "bf16" and has_bf16()
    assert plan(q, q, q, backend="cpu").kernel.startswith("bf16 prefill, " if by_dots else "prefill, ")
    assert plan(q, q, q.float().half(), backend="cpu").kernel.startswith("prefill, ")


@pytest.mark.skipif(not has_bf16(), reason="needs AVX-512 BF16")
@pytest.mark.parametrize("rows", [17, 31, 33, 64, 97])
@pytest.mark.parametrize(("D", "Dv"), [(32, 32), (40, 72), (64, 96), (128, 64)])
def test_blocks_of_tiles(rows, D, Dv):
    """Rows, keys and columns past whole blocks, with rules that cut panels."""
    for causal, window in ((False, None), (True, None), (True, 40)):
        options = {"causal": causal} | ({"window": window} if window else {})
        check_case(Case(B=1, H=2, Hkv=1, Lq=rows, Lk=rows + 230, D=D, Dv=Dv, dtype="bf16", **options), "cpu")


SIMULATED = """
import sys
import amx_sim
amx_sim.install()
import torch
torch.set_num_threads(1)  # the registers are one thread's
from dataclasses import replace
from tilewise import attention, plan
from tilewise.testing.case import Case
from tilewise.testing.case import Case
from tilewise.testing.cases import CASES
from tilewise.testing.check import check_case
dtype = sys.argv[1]
prefill = [c for c in CASES if c.dtype == "f32" and not c.k and not c.v and c.Lq > 16 and c.mask_kind in ("", "bool")]
for case in prefill[::2]:
    check_case(replace(case, dtype=dtype), "cpu")
if dtype == "bf16":
    for rows in (8, 16):
        check_case(Case(B=1, H=rows, Hkv=1, Lq=1, Lk=300, D=64, dtype=dtype), "cpu")
q, k, v = torch.randn(3, 1, 2, 300, 64).to({"f16": torch.float16, "bf16": torch.bfloat16}[dtype])
assert plan(q, k, v, backend="cpu").kernel.startswith("AMX prefill")
for columns in (32, 20):  # of K that all heads share
    some, shared = k[..., :-columns], k[:, :1, :, -columns:]
    joined = torch.cat([some, shared.expand(1, 2, 300, columns)], -1)
    assert attention(q, some, v, k_shared=shared, backend="cpu").equal(attention(q, joined, v, backend="cpu"))
clean = attention(q, k, v, causal=True, backend="cpu")
k[0, 1, 150, 7] = torch.inf  # it has no parts: the retry takes it
assert attention(q, k, v, causal=True, backend="cpu")[:, 0].equal(clean[:, 0])
k_bias = torch.zeros(1, 2, 300)
k_bias[0, 1, 150] = -torch.inf  # no row sees that key: the results are those of a finite one
hidden = attention(q, k, v, k_bias=k_bias, backend="cpu")
k[0, 1, 150, 7] = 0
assert attention(q, k, v, k_bias=k_bias, backend="cpu").equal(hidden)
print("fine")
"""


@pytest.mark.slow
@pytest.mark.skipif(W != 16, reason="AMX is for processors with 16 lanes")
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_amx_in_software(dtype, tmp_path):
    """The AMX kernels where there is no AMX: their own text, with the instructions as loops (`amx_sim.py`)."""
    helpers = str(Path(__file__).parents[2] / "helpers")
    paths = os.pathsep.join([helpers, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "TILEWISE_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths}
    command = [sys.executable, "-c", SIMULATED, dtype]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_numbers_that_are_not_finite(dtype, where, value):
    """They give what they give in float32, and nothing where they are not seen."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(1, 2, 300, 64, generator=generator).to(dtype) for name in "qkv"}
    clean = attention(**tensors, causal=True, backend="cpu")
    tensors[where][0, 1, 150, 7] = value
    result = attention(**tensors, causal=True, backend="cpu")
    wide = attention(**{name: x.float() for name, x in tensors.items()}, causal=True, backend="reference")
    assert result[:, 0].equal(clean[:, 0])  # the other head
    if where == "v" or value != value:  # an infinity in q or k sends its rows to fp32, which rounds otherwise
        assert result[:, 1, :150].equal(clean[:, 1, :150])
    finite = wide.isfinite()
    assert finite.equal(result.isfinite())
    torch.testing.assert_close(result.float()[finite], wide[finite], rtol=2e-2, atol=2e-2)
    assert result[~finite & ~wide.isnan()].float().equal(wide[~finite & ~wide.isnan()])


def test_memory_of_a_thread():
    for dtype in (torch.float16, torch.bfloat16):
        wide = torch.empty(1, 16, 5000, 576, dtype=dtype)
        assert plan(wide, wide, wide, backend="cpu").workspace_bytes / torch.get_num_threads() < 4 * 2**20


@pytest.mark.skipif(W != 16, reason="AMX is for processors with 16 lanes")
@pytest.mark.parametrize("parts", [1, 2])
def test_parts_add_up(parts):
    """Numbers of 8 bits have one part, those of 11 bits (float16) two."""
    numbers = torch.randn(64, generator=torch.Generator().manual_seed(0)).to((torch.bfloat16, torch.float16)[parts - 1])
    source, to = numbers.float().numpy().copy(), np.zeros((parts, 64), dtype=np.uint16)
    split_row = pack_tiles.make_split_row(parts)
    run = njit(lambda to, source: split_row(to, 128, 64, source, 64))
    assert run(to.ctypes.data, source.ctypes.data) == 0
    total = torch.from_numpy(to.view(np.int16)).view(torch.bfloat16).float().sum(0)
    assert total.numpy().tolist() == source.tolist()
    source[5] = np.nan
    assert np.isnan(run(to.ctypes.data, source.ctypes.data))
