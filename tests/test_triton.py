"""The Triton backend without a GPU: the conformance suite in Triton's interpreter, and its plain functions.

The interpreter must be chosen before Triton is imported, and it takes over the whole process: the suite runs in
processes of its own, each with a share of the cases. It multiplies bfloat16 wrongly: such cases are left to a GPU.
"""

import os
import subprocess
import sys

import pytest
import torch

from tilewise.backends import triton as backend
from tilewise.problem import MaskSpec, Problem, QuantSpec

pytest.importorskip("triton")
from tilewise.backends.triton import heuristics

SHARES = 8  # about a minute each; two of them run in `make test`
# Slow in the interpreter, and like others but longer.
LONG = ("L1023", "Lk5000", "Lk1000-D576", "L255")
RUN = """
import sys, torch
from tilewise.conformance.cases import CASES
from tilewise.conformance.check import check_case
from tilewise.conformance.properties import PROPERTIES
torch.set_num_threads(1)
share, shares, long = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
names = [c for c in CASES if "bf16" not in str(c) and not any(word in str(c) for word in long)]
failed = []
for case in names[share::shares]:
    try:
        check_case(case, "triton")
    except Exception as error:
        failed.append(f"{case}: {type(error).__name__}: {str(error)[:300]}")
for name in list(PROPERTIES)[share::shares]:
    try:
        PROPERTIES[name]("triton", "cpu")
    except Exception as error:
        failed.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
print("\\n".join(failed))
print(f"{len(names[share::shares])} cases")
sys.exit(bool(failed))
"""


@pytest.mark.parametrize("share", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, SHARES))])
def test_conformance_in_the_interpreter(share):
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", RUN, str(share), str(SHARES), *LONG]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    assert int(run.stdout.split()[-2]) > 20


def test_interpreted_kernels_notice_a_wrong_result():
    """The runs above can fail: a window one key too wide is caught."""
    code = RUN.replace("torch.set_num_threads(1)", "import tilewise.backends.triton.launch as launch\n"
        "init = launch.Bound.__init__\n"
        "def wide(self, plan, c, arch):\n    init(self, plan, c, arch)\n    self.sizes['left'] += 1\n"
        "launch.Bound.__init__ = wide\nCASES = [c for c in CASES if 'window7' in str(c)]\nPROPERTIES = {}")  # fmt: skip
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, "0", "1"], env=env, capture_output=True, text=True
    )
    assert run.returncode == 1
    assert "Mismatch" in run.stdout


def problem(**changes):
    sizes = {
        "form": "dense", "device": torch.device("cuda"), "batch": 2, "heads": 8, "kv_heads": 8, "q_len": 512,
        "kv_len": 512, "head_dim": 64, "value_dim": 64, "q_dtype": torch.float16, "k_dtype": torch.float16,
        "v_dtype": torch.float16, "scale": 0.1, "q_offset": 0,
    }  # fmt: skip
    return Problem(**(sizes | changes))


def test_it_refuses_the_cpu_without_the_interpreter():
    if "TRITON_INTERPRET" in os.environ:
        pytest.skip("the interpreter is on")
    assert backend.supports(problem(device=torch.device("cpu"))) == "runs on GPUs"


@pytest.mark.parametrize(
    ("columns", "least", "want"),
    [(1, 32, (32,)), (64, 32, (64,)), (72, 32, (64, 32)), (72, 64, (128,)), (96, 32, (64, 32)), (112, 32, (128,)),
     (192, 64, (128, 64)), (320, 64, (256, 64)), (576, 64, (512, 64)), (65, 32, (64, 32)), (33, 32, (64,))],
)  # fmt: skip
def test_chunks_cover_with_little_padding(columns, least, want):
    assert heuristics.chunks(columns, least) == want
    assert sum(want) >= columns


def test_every_chunk_of_a_quantised_head_lies_in_one_group():
    for kind, width in (("int8", 72), ("int8", 128), ("int4", 128), ("int4", 256), ("fp8_e4m3", 576)):
        for group in (32, 64, 128):
            quant = QuantSpec(kind, group)
            op = heuristics.operand(problem(), width, torch.int8, quant, True, BM=16)
            if not op.factored:
                continue
            for part in range(op.parts):
                start = part * op.columns
                for chunk in op.widths:
                    last = min(start + chunk, op.columns * (part + 1)) - 1
                    assert start // group == last // group, (kind, width, group)
                    start += chunk


def test_types_that_meet_lose_nothing():
    f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
    for q, k, want in (
        (f16, f16, "f16"),
        (bf16, f16, "f32"),
        (f16, bf16, "f32"),
        (f32, f16, "f32"),
        (bf16, bf16, "bf16"),
    ):
        assert heuristics.operand(problem(q_dtype=q), 64, k, None, True).work == want
    assert heuristics.operand(problem(q_dtype=f32), 64, f32, None, True).precision == "bf16x6"
    assert heuristics.operand(problem(q_dtype=f32, allow_tf32=True), 64, f32, None, True).precision == "tf32"


@pytest.mark.parametrize(
    ("programs", "tiles", "places", "want"),
    [(8, 32, 132, 8), (8, 1000, 132, 16), (128, 64, 132, 1), (512, 64, 132, 1), (1, 1000, 132, 126), (8, 7, 132, 1),
     (32, 256, 132, 4), (0, 5, 132, 1), (100, 64, 132, 9)],
)  # fmt: skip
def test_splits_fill_the_processors(programs, tiles, places, want):
    assert heuristics.split_count(programs, tiles, places) == want


def test_split_size_fixes_the_splits_whatever_the_batch():
    for batch in (1, 7, 64):
        c = heuristics.config(problem(batch=batch, q_len=1, kv_len=1000, split_size=100), 132, 90)
        assert (c.splits, c.split_tiles) == (-(-1000 // c.BK), 1)
    long = problem(form="varlen", packed_q=True, total_q=100, q_len=1, split_size=100)
    assert heuristics.config(long, 132, 90).splits == 1


def test_a_groups_heads_share_a_tile():
    assert [heuristics.pack_of(n) for n in (1, 4, 3, 12, 128, 127)] == [1, 4, 3, 12, 64, 1]
    c = heuristics.config(problem(q_len=1, heads=16, kv_heads=2), 132, 90)
    assert (c.pack, c.BM) == (8, 16)


def test_masks_are_classified_unless_each_head_has_its_own_bias():
    for dtype, broadcast, want in (
        (torch.bool, (False,) * 4, True), (torch.float16, (True, False, False, False), True),
        (torch.float16, (False,) * 4, False),
    ):  # fmt: skip
        assert heuristics.classifies(problem(mask=MaskSpec(dtype, broadcast))) is want
    assert not heuristics.lists_tiles(problem(q_len=4, mask=MaskSpec(torch.bool, (False,) * 4)))


def test_planes_of_a_section_fit_the_cache():
    p = problem(causal=True, batch=8, heads=32, kv_heads=32, kv_len=16384, head_dim=128, value_dim=128)
    c = heuristics.config(p, 132, 90)
    assert heuristics.section(p, c) == (32 << 20) // (16384 * 512)
    assert heuristics.section(problem(), c) == 1
