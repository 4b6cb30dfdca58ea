"""The barriers of the Hopper kernels, played through on the host: no interleaving deadlocks or overwrites a tile."""

import random

import pytest
import torch

from hopper_machine import Machine, random_work_tiles
from problem_space import problem_of
from tilewise.backends.hopper.fwd import config
from tilewise.core.storage import FORMATS


def launch(D, Dv=0, length=4096, causal=False):
    """The launch that the heuristics choose, as arguments of a `Machine`."""
    p = problem_of(
        form="dense", device=torch.device("cuda"), batch=1, heads=1, kv_heads=1, q_len=length, kv_len=length,
        head_dim=D, value_dim=Dv or D, q_dtype=torch.bfloat16, k_format=FORMATS["bf16"],
        v_format=FORMATS["bf16"], scale=1.0, causal=causal,
    )  # fmt: skip
    c = config.config_of(p)
    s = config.spec(p, c)
    return c.consumers, s.chunks, s.pieces, s.q_stages, s.k_stages, s.v_stages, s.out_aliases_q_chunks, s.overlaps


LAUNCHES = {
    "D64": (64,),
    "D64 short": (64, 64, 1024, True),
    "D128": (128,),
    "D192/128": (192, 128),
    "D256": (256,),
    "D320": (320,),
    "D320/64": (320, 64),
    "D512": (512,),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_no_interleaving_deadlocks_or_overwrites(name):
    consumers, *sizes = launch(*LAUNCHES[name])
    for seed in range(300):
        chance = random.Random(seed)
        # WorkTile tiles are fetched late only where at most one key tile at the end is another's: `prefetches_tile`.
        ahead = sizes[4] < 2 or seed % 4 != 0
        work_tiles = random_work_tiles(chance, consumers, chance.choice((0, 1, 3)), 9 if ahead else 1)
        machine = Machine(work_tiles, consumers, *sizes, dynamic=seed % 2 == 0, ahead=ahead, chance=random.Random(seed))
        machine.run(chance)
        for c in range(consumers):  # every own tile was multiplied, in order
            want, begin = [], 0
            for i, work in enumerate(work_tiles):
                before, own, after = work[c]
                want += [(i, begin + before + n) for n in range(own)]
                begin += before + own + after
            assert machine.products[c] == want


def test_the_simulation_can_fail():
    """Joining work tiles across more tiles than there are stages for values, or waiting for values too soon."""

    class Eager(Machine):
        def step(self, c, i, n, last):
            yield self.values.is_full, last + 1
            yield from super().step(c, i, n, last)

    class Careless(Machine):
        def pass_values(self, c, begin, end):
            yield from ()

    def play(kind, **changes):
        for seed in range(50):
            chance = random.Random(seed)
            work_tiles = random_work_tiles(chance, 2, 2)
            kind(work_tiles, 2, 1, 1, 2, 2, 1, 0, True, **({"dynamic": False} | changes)).run(chance)

    play(Machine)
    for kind in (Eager, Careless):
        with pytest.raises(AssertionError):
            play(kind)
    play(Machine, dynamic=True)
    with pytest.raises(AssertionError, match="deadlock"):  # a late fetch waits for tiles that wait for it
        play(Machine, dynamic=True, ahead=False)


def test_a_ring_that_values_share_needs_the_queries_early():
    """All chunks of the first keys before the queries: there are more of them than stages."""

    class Greedy(Machine):
        def fill_first(self, i, n):
            yield from self.fill_keys(n, 0, self.chunks)
            yield from self.fill_queries(i, 0)
            yield from self.fill_queries(i, 1)

    consumers, *sizes = launch(512)
    chance = random.Random(0)
    work_tiles = random_work_tiles(chance, consumers, 0)
    Machine(work_tiles, consumers, *sizes, dynamic=False).run(chance)
    with pytest.raises(AssertionError, match="deadlock"):
        Greedy(work_tiles, consumers, *sizes, dynamic=False).run(chance)
