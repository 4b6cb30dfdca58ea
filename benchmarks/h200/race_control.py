"""What compute-sanitizer's racecheck says of two partitions that pass numbers on as the Hopper kernels do.

    PYTHONPATH=src compute-sanitizer --tool racecheck python benchmarks/h200/race_control.py guarded
    PYTHONPATH=src compute-sanitizer --tool racecheck python benchmarks/h200/race_control.py bare

One warpgroup stores 128 numbers in shared memory, its threads meet at a hardware barrier and one of them arrives at an
mbarrier; the other warpgroup waits there and loads them, and so back. That is all that a kernel can do. `bare` is the
same without the waits, which is a race: whether the tool would see one.
"""

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ROUNDS = 8
LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def write(X, Y, place, full, free, BARE: gl.constexpr, ROUNDS: gl.constexpr):
    for i in range(ROUNDS):
        if not BARE:
            mbarrier.wait(free, (i & 1) ^ 1)
        place.store(gl.load(X + i * 128 + gl.arange(0, 128, LAYOUT)))
        mbarrier.arrive(full, count=1)


@gluon.jit
def read(X, Y, place, full, free, BARE: gl.constexpr, ROUNDS: gl.constexpr):
    for i in range(ROUNDS):
        if not BARE:
            mbarrier.wait(full, i & 1)
        x = place.load(LAYOUT)
        mbarrier.arrive(free, count=1)
        gl.store(Y + i * 128 + gl.arange(0, 128, LAYOUT), x)


@gluon.jit
def pass_on(X, Y, BARE: gl.constexpr, ROUNDS: gl.constexpr):
    place = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(free, count=1)
    given = (X, Y, place, full, free, BARE, ROUNDS)
    gl.warp_specialize([(read, given), (write, given)], [4], [64])


def main() -> None:
    bare = sys.argv[1:] == ["bare"]
    x = torch.arange(ROUNDS * 128, dtype=torch.float32, device="cuda")
    y = torch.zeros_like(x)
    pass_on[(1,)](x, y, bare, ROUNDS, num_warps=4)
    torch.cuda.synchronize()
    print("bare" if bare else f"guarded: {'right' if torch.equal(x, y) else 'WRONG'}")


if __name__ == "__main__":
    main()
