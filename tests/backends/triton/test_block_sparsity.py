"""Lists of tiles from block indices, by Triton's interpreter."""

import sys

import pytest

from interpreted import interpreted

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

RUN = """
import torch
from tilewise.backends.gpu.block_sparsity_launch import BlockLister
from tilewise.backends.gpu.launch_program import Recorder
from tilewise.core.options import Options
from tilewise.validation import calls
torch.manual_seed(0)
for Lq, Lk, block, count, heads in ((700, 900, 256, 3, 2), (130, 20000, 128, 90, 1), (256, 256, 128, 1, 2)):
    q, k = torch.randn(2, 4, Lq, 16), torch.randn(2, 2, Lk, 16)
    blocks = torch.rand(2, heads, -(-Lq // block), -(-Lk // block)).argsort(-1)[..., :count].int()
    blocks[..., ::4] = -1
    call = calls.dense(q, k, k, Options(block_indices=blocks, block_size=block))
    recorder = Recorder([call.out], recording=False, captured=False)
    LIST, RANK, (b, h, i, n) = BlockLister(call.problem, 128, 64).launch(recorder, call.tensors)
    for row in range(2):
        for head in range(4):
            for tile in range(-(-Lq // 128)):
                chosen = set(blocks[row, head // 2 if heads > 1 else 0, tile * 128 // block].tolist())
                want = [2 * t for t in range(-(-Lk // 64)) if t * 64 // block in chosen]
                plane = row * b + head * h + tile * i
                ranks = RANK[plane * (n + 1) : (plane + 1) * (n + 1)].tolist()
                assert LIST[plane * n : plane * n + len(want)].tolist() == want
                assert ranks == [sum(2 * t > entry for entry in want) for t in range(n)] + [len(want)]
print("fine")
"""


def test_lists_of_blocks():
    run = interpreted(RUN)
    assert run.stdout == "fine\n", run.stdout + run.stderr[-2000:]
