"""What compute-sanitizer's racecheck says of two partitions that pass numbers on as the Hopper kernels do.

    compute-sanitizer --tool racecheck python benchmarks/h200/race_control.py one

Numbers go from one warpgroup to another through shared memory and mbarriers; before a warpgroup arrives, its threads
meet at a hardware barrier, and one of them arrives for all.

    one      the writer arrives where the reader waits, and the reader where the writer waits
    each     the same, but every thread arrives
    crossed  both write and read: what was written next tells that what came before has been read
    both     both write, meet at a barrier that counts two arrivals, read, and meet at another one
    none     nobody waits: that is a race
"""

import sys

import torch

from tilewise.backends.gpu.gluon import cp_async_arrive, gl, gluon, mbarrier

ROUNDS = gl.constexpr(8)
WAYS = {"none": 0, "one": 1, "crossed": 2, "both": 3, "each": 128}
WAY = gl.constexpr(WAYS[sys.argv[1]])
LAYOUT = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))


@gluon.jit
def arrive(barrier):
    if WAY == 128:
        cp_async_arrive(barrier, increment_count=False)
    else:
        mbarrier.arrive(barrier, count=1)


@gluon.jit
def work(X, Y, places, bars, C: gl.constexpr):
    """Warpgroup C: 0 has the numbers, and 1 those that it is given; in the two ways in which both write, so has 1."""
    at = gl.arange(0, 512, LAYOUT)
    for i in range(ROUNDS):
        if WAY == 3:
            places[C].store(gl.load(X + i * 512 + at))
            arrive(bars[0])
            mbarrier.wait(bars[0], i & 1)
            gl.store(Y + i * 512 + at, places[1 - C].load(LAYOUT))
            arrive(bars[1])
            mbarrier.wait(bars[1], i & 1)
        elif C == 0:
            if WAY == 1 or WAY == 128:
                mbarrier.wait(bars[1], (i & 1) ^ 1)
            places[0].store(gl.load(X + i * 512 + at))
            arrive(bars[0])
            if WAY == 2:
                mbarrier.wait(bars[1], i & 1)
                gl.store(Y + i * 512 + at, places[1].load(LAYOUT))
        else:
            if WAY != 0:
                mbarrier.wait(bars[0], i & 1)
            x = places[0].load(LAYOUT)
            if WAY == 2:
                places[1].store(x)
            else:
                gl.store(Y + i * 512 + at, x)
            arrive(bars[1])


@gluon.jit
def work0(X, Y, places, bars):
    work(X, Y, places, bars, 0)


@gluon.jit
def work1(X, Y, places, bars):
    work(X, Y, places, bars, 1)


@gluon.jit
def pass_on(X, Y):
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    COUNT: gl.constexpr = 128 if WAY == 128 else 2 if WAY == 3 else 1
    places = (
        gl.allocate_shared_memory(gl.float32, [1, 512], LINE).index(0),
        gl.allocate_shared_memory(gl.float32, [1, 512], LINE).index(0),
    )
    bars = (
        gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0),
        gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0),
    )
    mbarrier.init(bars[0], count=COUNT)
    mbarrier.init(bars[1], count=COUNT)
    given = (X, Y, places, bars)
    gl.warp_specialize([(work0, given), (work1, given)], [4], [64])


def main() -> None:
    x = torch.arange(ROUNDS.value * 512, dtype=torch.float32, device="cuda")
    y = torch.zeros_like(x)
    pass_on[(1,)](x, y, num_warps=4)
    torch.cuda.synchronize()
    print(sys.argv[1], "right" if torch.equal(x, y) else "wrong")


if __name__ == "__main__":
    main()
