"""The barriers of the latent kernel, played through on the host: no interleaving deadlocks or overwrites a tile."""

import itertools
import random

import pytest

from mla_machine import Barrier, Machine, Named

WAYS = list(itertools.product((2, 4, 8), (0, 1, 2), (1, 2), *[(False, True)] * 3))


def play(kind, pieces, gate, p_buffers, wait_values, ahead, named, seeds):
    """`kind` with random fragments, in random order."""
    for seed in range(seeds):
        chance = random.Random(seed)
        fragments = [chance.randint(1, 5) for _ in range(chance.randint(1, 4))]
        machine = kind(fragments, pieces, gate, p_buffers, wait_values, ahead, named)
        machine.run(chance)
        want = [(u, b) for u in range(sum(fragments)) for b in (0, 1)]
        assert machine.products == [want, want]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_no_interleaving_deadlocks_or_overwrites(way):
    play(Machine, *way, seeds=40)


NAMED = [f"{name} {i}" for name, count in (("free", 4), ("ready", 2)) for i in range(count)] + ["scored", "rope"]


@pytest.mark.parametrize("name", NAMED)
def test_hardware_barriers_are_all_waited_for(name):
    """One that nobody waits for is arrived at twice."""

    class Never(Named):
        def passed(self, parity):
            return True

        def take(self):
            pass

    class Without(Machine):
        def __post_init__(self):
            super().__post_init__()
            line, _, i = name.partition(" ")
            if i:
                getattr(self, line)[int(i)] = Never()
            else:
                setattr(self, line, Never())

    with pytest.raises(AssertionError):
        play(Without, 2, 2, 1, False, False, True, seeds=100)


class Open(Barrier):
    def passed(self, parity):
        return True


NEEDED = ["q_full", "q_free", "scored", "done"] + [
    f"{name} {i}" for name, count in (("full", 4), ("free", 4), ("rope_full", 2), ("ready", 2))
    for i in range(count)
]  # fmt: skip


@pytest.mark.parametrize("name", NEEDED)
def test_no_barrier_can_be_left_out(name):
    class Without(Machine):
        def __post_init__(self):
            super().__post_init__()
            line, _, i = name.partition(" ")
            if i:
                getattr(self, line)[int(i)] = Open()
            else:
                setattr(self, line, Open(getattr(self, line).count))

    # With one place for weights, the right half of block 0 is free when the weights of block 1 are there.
    with pytest.raises(AssertionError):
        play(Without, 2, 2, 2 if name == "free 1" else 1, False, True, False, seeds=300)


def test_one_place_for_weights_is_written_after_it_was_read():
    class Hasty(Machine):
        def __post_init__(self):
            super().__post_init__()
            self.sends_early = True

    with pytest.raises(AssertionError):
        play(Hasty, 2, 2, 1, False, True, False, seeds=100)
