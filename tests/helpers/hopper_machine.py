"""The barriers of the Hopper kernels as a machine on the host.

Producer and consumers are generators that say what they wait for and what they do, in the order of
`backends/hopper/fwd/producer.py` and `consumer.py`. A scheduler lets a random one go on that can. Shared memory
remembers which use of a ring lies in each stage and who has still to read it.
"""

import random
from dataclasses import dataclass


class Ring:
    """STAGES tiles; use n is filled once use n - STAGES has been released by all readers."""

    def __init__(self, stages, readers):
        self.stages, self.readers = stages, readers
        self.holds = {}  # stage -> the use that lies there
        self.released = {}  # use -> readers that have released it

    def can_fill(self, n):
        return n < self.stages or self.released.get(n - self.stages, set()) == set(self.readers)

    def fill(self, n):
        assert self.can_fill(n)
        assert self.holds.get(n % self.stages, n - self.stages) == n - self.stages, "a use was left out"
        self.holds[n % self.stages] = n

    def is_full(self, n):
        return self.holds.get(n % self.stages, -1) >= n

    def read(self, n):
        assert self.holds.get(n % self.stages) == n, "overwritten before it was read"

    def release(self, n, reader):
        self.read(n)
        done = self.released.setdefault(n, set())
        assert reader not in done, "released twice"
        done.add(reader)
        # A barrier counts marks, not consumers: nobody may be a round ahead of another.
        assert n < self.stages or self.released[n - self.stages] == set(self.readers), "a round ahead"


@dataclass
class Machine:
    work_tiles: list  # of each, for each consumer: (tiles passed over, own tiles, tiles passed over)
    consumers: int
    chunks: int
    pieces: int
    q_stages: int
    k_stages: int
    v_stages: int  # 0: values lie in the ring of the keys
    lent: int  # chunks of q that lend the output their memory
    overlaps: bool
    dynamic: bool
    ahead: bool = True  # the next work tile is fetched before the keys of this one are loaded
    chance: random.Random | None = None  # which tiles are masked

    def __post_init__(self):
        everyone = range(self.consumers)
        self.keys = Ring(self.k_stages, everyone)
        self.values = Ring(self.v_stages, everyone) if self.v_stages else self.keys
        self.queries = [[Ring(self.q_stages, [c]) for _ in range(2 if self.lent else 1)] for c in everyone]
        self.scheduler = Ring(2, everyone)
        self.products = [[] for _ in everyone]

    def count(self, i):
        return sum(self.work_tiles[i][0])

    def key_use(self, n, i):
        return n * (self.chunks + (0 if self.v_stages else self.pieces)) + i

    def value_use(self, n, j):
        return n if self.v_stages else self.key_use(n, self.chunks + j)

    def producer(self):
        n = 0
        yield from self.hand_out(0)
        for i in range(len(self.work_tiles)):
            if self.ahead:
                yield from self.hand_out(i + 1)
            for t in range(self.count(i)):
                if t == 0:
                    yield from self.fill_first(i, n)
                else:
                    yield from self.fill_keys(n + t, 0, self.chunks)
                for j in range(self.pieces):
                    yield self.values.can_fill, self.value_use(n + t, j)
                    self.values.fill(self.value_use(n + t, j))
            if not self.ahead:
                yield from self.hand_out(i + 1)
            n += self.count(i)

    def fill_first(self, i, n):
        room = min(self.chunks, self.k_stages)
        if not self.lent:
            yield from self.fill_keys(n, 0, self.chunks)
            yield from self.fill_queries(i, 0)
            return
        early = max(1, min(room, self.k_stages - self.pieces))
        yield from self.fill_keys(n, 0, early)
        yield from self.fill_queries(i, 0)
        yield from self.fill_keys(n, early, room)
        yield from self.fill_queries(i, 1)
        yield from self.fill_keys(n, room, self.chunks)

    def fill_keys(self, n, begin, end):
        for k in range(begin, end):
            yield self.keys.can_fill, self.key_use(n, k)
            self.keys.fill(self.key_use(n, k))

    def fill_queries(self, i, part):
        for rings in self.queries:
            yield rings[part].can_fill, i
            rings[part].fill(i)

    def hand_out(self, j):
        if self.dynamic:
            yield self.scheduler.can_fill, j
            self.scheduler.fill(j)

    def take(self, c, j):
        if self.dynamic:
            yield self.scheduler.is_full, j
            self.scheduler.release(j, c)

    def pass_keys(self, c, begin, end):
        for use in [self.key_use(n, k) for n in range(begin, end) for k in range(self.chunks)]:
            yield self.keys.is_full, use
            self.keys.release(use, c)

    def pass_values(self, c, begin, end):
        for use in [self.value_use(n, j) for n in range(begin, end) for j in range(self.pieces)]:
            yield self.values.is_full, use
            self.values.release(use, c)

    def pass_over(self, c, begin, end):
        for n in range(begin, end):
            yield from self.pass_keys(c, n, n + 1)
            yield from self.pass_values(c, n, n + 1)

    def scores(self, c, i, n, first=False):
        """Starts S; of several chunks all but the last are released."""
        for k in range(self.chunks):
            late = self.lent > 0 and k >= self.chunks - self.lent
            if first and late and k == self.chunks - self.lent:
                yield self.queries[c][1].is_full, i
            self.queries[c][late].read(i)
            yield self.keys.is_full, self.key_use(n, k)
            self.keys.read(self.key_use(n, k))
            if k > 0:
                self.keys.release(self.key_use(n, k - 1), c)
        yield None, 0  # anything may happen while products are under way

    def output(self, c, n):
        """Starts O; of several pieces all but the last are released."""
        for j in range(self.pieces):
            yield self.values.is_full, self.value_use(n, j)
            self.values.read(self.value_use(n, j))
            if j > 0:
                self.values.release(self.value_use(n, j - 1), c)
        yield None, 0

    def step(self, c, i, n, last):
        overlaps = self.overlaps and (self.chance is None or self.chance.random() < 0.7)  # else the tile is masked
        if overlaps:
            yield from self.scores(c, i, n)
            yield from self.output(c, last)
        else:
            yield from self.output(c, last)
            yield self.keys.is_full, self.key_use(n, 0)
            self.values.release(self.value_use(last, self.pieces - 1), c)
            yield from self.scores(c, i, n)
        self.keys.release(self.key_use(n, self.chunks - 1), c)
        self.products[c].append((i, n))
        yield None, 0
        if overlaps:
            self.values.release(self.value_use(last, self.pieces - 1), c)

    def first_tile(self, c, i, n):
        yield self.queries[c][0].is_full, i
        yield from self.scores(c, i, n, first=True)
        self.keys.release(self.key_use(n, self.chunks - 1), c)
        self.products[c].append((i, n))

    def consumer(self, c):
        begin, i = 0, 0
        before, own, after = self.work_tiles[0][c]
        yield from self.take(c, 0)
        yield from self.pass_over(c, 0, before)
        yield from self.first_tile(c, 0, before)
        start = before
        while True:
            before, own, after = self.work_tiles[i][c]
            end = begin + before + own
            for n in range(start + 1, end):
                yield from self.step(c, i, n, n - 1)
            self.queries[c][0].release(i, c)
            yield from self.take(c, i + 1)
            more = i + 1 < len(self.work_tiles)
            next_begin = begin + before + own + after
            start = next_begin + (self.work_tiles[i + 1][c][0] if more else 0)
            joined = more and start - end < self.v_stages and not self.lent
            if joined:
                yield from self.pass_keys(c, end, start)
                yield self.queries[c][0].is_full, i + 1
                yield from self.step(c, i + 1, start, end - 1)
                yield from self.pass_values(c, end, start)
            else:
                yield from self.output(c, end - 1)
                self.values.release(self.value_use(end - 1, self.pieces - 1), c)
                yield from self.pass_over(c, end, next_begin)
            if self.lent:
                yield None, 0  # the output leaves
                self.queries[c][1].release(i, c)
            if more and not joined:
                yield from self.pass_over(c, next_begin, start)
                yield from self.first_tile(c, i + 1, start)
            if not more:
                return
            begin, i = next_begin, i + 1

    def run(self, chance):
        actors = [self.producer(), *(self.consumer(c) for c in range(self.consumers))]
        waiting = [next(actor) for actor in actors]
        pace = [chance.choice((1, 1, 20)) for _ in actors]  # some are much slower than others
        while actors:
            ready = [j for j, (test, n) in enumerate(waiting) if test is None or test(n)]
            assert ready, f"deadlock: {[(t.__name__, n) for t, n in waiting]}"
            j = chance.choices(ready, [1 / pace[j] for j in ready])[0]
            try:
                waiting[j] = next(actors[j])
            except StopIteration:
                for line in (actors, waiting, pace):
                    del line[j]


def random_work_tiles(chance, consumers, most, most_after=9):
    work_tiles = []
    for _ in range(chance.randint(1, 6)):
        count = chance.randint(1, 7)
        work = []
        for _ in range(consumers):
            before = chance.randint(0, min(most, count - 1))
            after = chance.randint(0, min(most, most_after, count - 1 - before))
            work.append((before, count - before - after, after))
        work_tiles.append(work)
    return work_tiles
