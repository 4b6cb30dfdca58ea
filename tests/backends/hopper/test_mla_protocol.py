"""The barriers of the latent kernel, played through on the host: no interleaving deadlocks or overwrites a tile."""

import random

import pytest

from mla_machine import Barrier, Machine


def play(kind, pieces, seeds, waits=True):
    """`kind` with random fragments, in random order."""
    for seed in range(seeds):
        chance = random.Random(seed)
        fragments = [chance.randint(1, 5) for _ in range(chance.randint(1, 4))]
        machine = kind(fragments, pieces, waits)
        machine.run(chance)
        want = [(u, b) for u in range(sum(fragments)) for b in (0, 1)]
        assert machine.products == [want, want]


@pytest.mark.parametrize("pieces", [2, 4, 8])
@pytest.mark.parametrize("waits", [False, True])
def test_no_interleaving_deadlocks_or_overwrites(pieces, waits):
    play(Machine, pieces, 300, waits)


class Open(Barrier):
    def passed(self, parity):
        return True


# But for the right half of block 0, which is free when the weights of block 1 are there.
NEEDED = ["q_full", "q_free", "scored", "done"] + [
    f"{name} {i}" for name, count in (("full", 4), ("free", 4), ("rope_full", 2), ("ready", 2))
    for i in range(count) if (name, i) != ("free", 1)
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

    for waits in (False, True):
        with pytest.raises(AssertionError):
            play(Without, 2, 300, waits)


def test_the_place_for_weights_is_written_after_it_was_read():
    class Hasty(Machine):
        def __post_init__(self):
            super().__post_init__()
            self.sends_early = True

    with pytest.raises(AssertionError):
        play(Hasty, 2, seeds=100)
