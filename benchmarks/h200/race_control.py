"""What compute-sanitizer's racecheck says of two partitions that pass numbers on as the Hopper kernels do.

    compute-sanitizer --tool racecheck python benchmarks/h200/race_control.py one

One warpgroup stores 512 numbers in shared memory and arrives at an mbarrier, where the other one waits before it loads
them; and so back. With `one`, threads meet at a hardware barrier and one of them arrives for all, as in the kernels.
With `each`, every thread arrives. With `none`, nobody waits: that is a race.
"""

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

ROUNDS = 8
LAYOUT = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))


@gluon.jit
def arrive(barrier, ARRIVING: gl.constexpr):
    if ARRIVING == 128:
        async_copy.mbarrier_arrive(barrier, increment_count=False)
    else:
        mbarrier.arrive(barrier, count=1)


@gluon.jit
def write(X, Y, place, full, free, ARRIVING: gl.constexpr, ROUNDS: gl.constexpr):
    for i in range(ROUNDS):
        if ARRIVING > 0:
            mbarrier.wait(free, (i & 1) ^ 1)
        place.store(gl.load(X + i * 512 + gl.arange(0, 512, LAYOUT)))
        arrive(full, ARRIVING)


@gluon.jit
def read(X, Y, place, full, free, ARRIVING: gl.constexpr, ROUNDS: gl.constexpr):
    for i in range(ROUNDS):
        if ARRIVING > 0:
            mbarrier.wait(full, i & 1)
        x = place.load(LAYOUT)
        gl.store(Y + i * 512 + gl.arange(0, 512, LAYOUT), x)
        arrive(free, ARRIVING)


@gluon.jit
def pass_on(X, Y, ARRIVING: gl.constexpr, ROUNDS: gl.constexpr):
    place = gl.allocate_shared_memory(gl.float32, [512], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    COUNT: gl.constexpr = 128 if ARRIVING == 128 else 1
    mbarrier.init(full, count=COUNT)
    mbarrier.init(free, count=COUNT)
    given = (X, Y, place, full, free, ARRIVING, ROUNDS)
    gl.warp_specialize([(read, given), (write, given)], [4], [64])


def main() -> None:
    way = sys.argv[1]
    arriving = {"none": 0, "one": 1, "each": 128}[way]
    x = torch.arange(ROUNDS * 512, dtype=torch.float32, device="cuda")
    y = torch.zeros_like(x)
    pass_on[(1,)](x, y, arriving, ROUNDS, num_warps=4)
    torch.cuda.synchronize()
    print(way, "right" if torch.equal(x, y) else "wrong")


if __name__ == "__main__":
    main()
