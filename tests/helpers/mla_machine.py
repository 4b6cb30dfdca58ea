"""The barriers of the Hopper latent kernel as a machine on the host.

Producer and consumers are generators in the order of `backends/hopper/mla/producer.py` and `consumer.py`; copies arrive
when the machine likes. A scheduler lets a random one go on that can. Barriers are parities, as in hardware: who waits a
round late or early goes on when the parity happens to fit. Every place in shared memory knows what it holds, and who is
reading it.
"""

from dataclasses import dataclass

QUERIES, WEIGHTS, ROPE, LATENT, MAXIMUM, SUM = "queries", "weights", "rope", "latent", "maximum", "sum"
PLAIN, FLOAT8, NARROW = "16 bits", "float8", "few rows"  # kinds of kernels
FLAGS = "flags"  # and scales: what is gathered is described by them


class Barrier:
    def __init__(self, count=1):
        self.count = self.missing = count
        self.phase = 0

    def arrive(self):
        self.missing -= 1
        if self.missing == 0:
            self.phase, self.missing = self.phase + 1, self.count

    def passed(self, parity):
        return self.phase & 1 != parity


@dataclass
class Machine:
    fragments: list  # pairs of each
    pieces: int
    kind: str = PLAIN

    def __post_init__(self):
        self.holds, self.readers = {}, {}
        self.float8, self.narrow = self.kind == FLOAT8, self.kind == NARROW
        self.sends_early = False
        self.copies = []
        self.q_full, self.q_free = Barrier(), Barrier(2)
        self.full = [Barrier(self.pieces if self.float8 else 1) for _ in range(2 * self.pieces)]
        self.free = [Barrier() for _ in range(4)]
        self.ready = [Barrier(), Barrier()]
        self.rope_full = [Barrier(), Barrier()]
        self.scored, self.done = Barrier(), Barrier(2)
        self.products = [[], []]  # blocks of keys in the order in which they are added to each half of the output

    def write(self, place, value):
        assert not self.readers.get(place), f"{place} is written while it is read"
        self.holds[place] = value

    def begin(self, who, *reads):
        """A product begins to read; until its end nobody may write there."""
        for place, value in reads:
            assert self.holds.get(place) == value, f"{place} holds {self.holds.get(place)}, not {value}"
            self.readers.setdefault(place, set()).add(who)

    def end(self, who):
        for readers in self.readers.values():
            readers.discard(who)

    def load(self, place, value):
        assert self.holds.get(place) == value, f"{place} holds {self.holds.get(place)}, not {value}"

    def copy(self, barrier, places):
        """TMA: from now on places hold nothing, later `places`; then the barrier is passed."""
        for place in places:
            self.write(place, None)
        self.copies.append((barrier, places))

    def arrivals(self, chance):
        barrier, places = self.copies.pop(chance.randrange(len(self.copies)))
        self.holds.update(places)
        barrier.arrive()

    def half(self, b, half):
        each = self.pieces // 2
        return range((2 * b + half) * each, (2 * b + half + 1) * each)

    def describe(self, u, b):
        self.write((FLAGS, u & 1, b), u)
        self.copy(self.rope_full[b], {(ROPE, b): u})

    def producer(self):
        u = 0
        for f, pairs in enumerate(self.fragments):
            yield self.q_free, (f & 1) ^ 1
            self.copy(self.q_full, {(QUERIES, part): f for part in ("latent", "rope")})
            for _ in range(pairs):
                for b in (0, 1):
                    if self.narrow:
                        yield self.free[b], (u & 1) ^ 1
                    elif b == 0 and not self.float8:
                        yield self.scored, (u & 1) ^ 1
                    for half in (0, 1):
                        if not self.float8 and half == 0:
                            self.describe(u, b)
                        if not self.narrow:
                            yield self.free[2 * b + half], (u & 1) ^ 1
                        if self.float8 and half == 0:
                            self.write((FLAGS, u & 1, b), u)
                        elif self.float8:
                            self.copy(self.rope_full[b], {(ROPE, b): u})
                        for i in self.half(b, half):
                            self.copy(self.full[b if self.float8 else i], {(LATENT, i): u})
                u += 1

    def scores(self, c, f, u, b):
        """Products of a block, whose latent columns have one barrier in float8."""
        yield self.rope_full[b], u & 1
        if self.float8:
            yield self.full[b], u & 1
        self.begin((c, "S"), ((ROPE, b), u), ((QUERIES, "rope"), f))
        for i in (i for half in (0, 1) for i in self.half(b, half)):
            if not self.float8:
                yield self.full[i], u & 1
            self.begin((c, "S"), ((LATENT, i), u), ((QUERIES, "latent"), f))

    def weights(self, b):
        """Their place: of float8 that of the block's rope columns."""
        return (ROPE, b) if self.float8 else (WEIGHTS, 0)

    def send(self, c, u):
        self.write(self.weights(c), (c, u))
        self.write((MAXIMUM, c), u)
        yield None, 0
        self.ready[c].arrive()

    def add(self, c, u, b, own):
        """Starts P V of block b."""
        self.load((FLAGS, u & 1, b), u)
        reads = [((LATENT, i), u) for i in self.half(b, c)]
        self.begin((c, "O"), *reads, *([] if own else [(self.weights(b), (b, u))]))
        self.products[c].append((u, b))

    def values(self, c, u, b):
        for i in self.half(b, c):
            yield self.full[i], u & 1

    def step0(self, f, u):
        yield from self.scores(0, f, u, 0)
        yield None, 0
        self.end((0, "S"))
        self.scored.arrive()
        yield None, 0
        self.load((FLAGS, u & 1, 0), u)
        yield from self.send(0, u)
        self.add(0, u, 0, own=True)
        yield self.ready[1], u & 1
        self.load((MAXIMUM, 1), u)
        yield from self.values(0, u, 1)
        self.end((0, "O"))
        self.free[0].arrive()
        yield None, 0
        self.add(0, u, 1, own=False)
        yield None, 0
        self.end((0, "O"))
        self.free[2].arrive()

    def step1(self, f, u):
        yield self.scored, u & 1
        yield from self.scores(1, f, u, 1)
        yield self.ready[0], u & 1
        self.load((MAXIMUM, 0), u)
        yield from self.values(1, u, 0)
        self.add(1, u, 0, own=False)
        yield None, 0
        self.end((1, "S"))
        yield None, 0
        self.load((FLAGS, u & 1, 1), u)
        if self.sends_early:
            yield from self.send(1, u)
            yield None, 0
        self.end((1, "O"))
        if not self.sends_early:
            yield from self.send(1, u)
        self.free[1].arrive()
        yield None, 0
        self.add(1, u, 1, own=True)
        yield None, 0
        self.end((1, "O"))
        self.free[3].arrive()

    def scored_block(self, c, f, u):
        yield from self.scores(c, f, u, c)
        yield None, 0
        self.end((c, "S"))

    def own_block(self, c, f, u):
        yield from self.scored_block(c, f, u)
        self.load((FLAGS, u & 1, c), u)
        yield from self.send(c, u)
        self.add(c, u, c, own=True)
        yield None, 0
        self.load((FLAGS, u & 1, c), u)
        self.end((c, "O"))
        self.free[3 * c].arrive()
        yield None, 0

    def other_block(self, c, f, u):
        b = 1 - c
        yield self.ready[b], u & 1
        self.load((MAXIMUM, b), u)
        self.add(c, u, b, own=False)
        yield None, 0
        self.load((FLAGS, u & 1, b), u)
        self.end((c, "O"))
        self.free[2 * b + c].arrive()
        yield None, 0

    def whole_block(self, c, f, u):
        """A block of few rows: weights are its consumer's own."""
        yield from self.scored_block(c, f, u)
        self.write((WEIGHTS, c), (c, u))
        yield None, 0
        for half in (0, 1):
            self.begin((c, "O"), *(((LATENT, i), u) for i in self.half(c, half)), ((WEIGHTS, c), (c, u)))
        self.products[c].append((u, c))
        yield None, 0
        self.end((c, "O"))
        self.free[c].arrive()
        yield None, 0

    def steps(self, c):
        if self.narrow:
            return (self.whole_block,)
        if self.float8:
            return (self.own_block, self.other_block)[:: 1 - 2 * c]
        return (lambda c, f, u: (self.step0, self.step1)[c](f, u),)

    def consumer(self, c):
        u = 0
        for f, pairs in enumerate(self.fragments):
            yield self.q_full, f & 1
            self.load((QUERIES, "rope"), f)
            for _ in range(pairs):
                for step in self.steps(c):
                    yield from step(c, f, u)
                u += 1
                yield None, 0
            self.write((SUM, c), f)
            yield None, 0
            self.done.arrive()
            yield self.done, f & 1
            self.load((SUM, 1 - c), f)
            yield None, 0
            self.write((QUERIES, "latent"), f"output of {f}")  # which leaves from there
            yield None, 0
            self.q_free.arrive()
            yield None, 0

    def run(self, chance):
        actors = [self.producer(), self.consumer(0), self.consumer(1)]
        waiting = [next(actor) for actor in actors]
        pace = [chance.choice((1, 1, 20)) for _ in actors]
        copying = 1 / chance.choice((2, 2, 20))
        while actors:
            ready = [j for j, (bar, parity) in enumerate(waiting) if bar is None or bar.passed(parity)]
            if self.copies and (not ready or chance.random() < copying):
                self.arrivals(chance)
                continue
            assert ready, "deadlock"
            j = chance.choices(ready, [1 / pace[j] for j in ready])[0]
            try:
                waiting[j] = next(actors[j])
            except StopIteration:
                for line in (actors, waiting, pace):
                    del line[j]
