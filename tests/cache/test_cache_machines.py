"""Random operations on the caches beside plain lists: contents, sharing, reference counts, attention."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from naive import Row, assert_close
from tilewise import CacheFull, InvalidArgument, KVCache, PagedKVCache
from tilewise.kv_cache.prefix_cache import ROOT

D, HEADS = 8, 2
COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}


def replaced(cache, way):
    """A copy, after the memory of what it was made of is overwritten."""
    other = COPIES[way](cache)
    for store in (cache.store.k, cache.store.v):
        for x in (store.data, store.scales):
            if x is not None:
                x.view(torch.uint8).fill_(0x7F)
    return other


def content(ids, layers):
    """Keys and values of the last of these token ids, as a model would compute them: from all before it.

    Returns `[layers, 2, 1, D]`.
    """
    seed = hash(tuple(ids)) & 0x7FFFFFFF
    return torch.randn(layers, 2, 1, D, generator=torch.Generator().manual_seed(seed)) * 2


class Sequence:
    """A sequence as lists: token ids, rows of each layer, and pages, objects that forks share until one writes."""

    def __init__(self, dtype, layers):
        self.ids, self.rows, self.pages = [], [Row(dtype, group=32) for _ in range(layers)], []
        self.known = 0  # leading tokens whose ids the cache was told
        self.version = 0  # changes, for handles

    def fork(self):
        other = Sequence(self.rows[0].dtype, 0)
        other.ids, other.pages, other.known = list(self.ids), list(self.pages), self.known
        other.rows = [row.copy() for row in self.rows]
        for page in other.pages:
            page["users"] += 1
        return other

    def append(self, new, page_size, told):
        if told and self.known == len(self.ids):
            self.known += len(new)
        self.version += bool(new)
        for token in new:
            slot = len(self.ids) % page_size
            if slot == 0:
                self.pages.append({"users": 1})
            elif self.pages[-1]["users"] > 1:
                self.pages[-1]["users"] -= 1
                self.pages[-1] = {"users": 1}
            self.ids.append(token)
            for row, (k, v) in zip(self.rows, content(self.ids, len(self.rows)), strict=True):
                row.append(k[:, None], v[:, None])

    def truncate(self, length, page_size):
        self.version += length < len(self.ids)
        del self.ids[length:]
        for row in self.rows:
            row.truncate(length)
        self.known = min(self.known, length)
        while len(self.pages) > -(-length // page_size):
            self.pages.pop()["users"] -= 1


class PagedMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.sequences = {}
        self.dead = []
        self.handle = self.static = None
        self.last = []  # the sequences of the last step, and how many tokens each got

    @initialize(
        page_size=st.integers(1, 4),
        pages=st.integers(4, 24),
        dtype=st.sampled_from(["f32", "int8", "int4"]),
        layers=st.integers(1, 2),
    )
    def start(self, page_size, pages, dtype, layers):
        self.P, self.dtype, self.layers = page_size, dtype, layers
        self.cache = PagedKVCache(pages, page_size, 1, D, dtype, layers=layers, group=32)

    def pick(self, data, least=1):
        """Some live sequences, in any order."""
        live = sorted(self.sequences)
        return data.draw(st.lists(st.sampled_from(live), min_size=min(least, len(live)), max_size=5, unique=True))

    @rule()
    def create(self):
        self.sequences[self.cache.create()] = Sequence(self.dtype, self.layers)

    def draw(self, data, told, packed, numbers=None, most=7):
        """New tokens for some sequences: ids, keys and values of each layer, arguments of a call, and the pages that
        they need.
        """
        numbers = self.pick(data) if numbers is None else numbers
        counts = data.draw(st.lists(st.integers(0, most), min_size=len(numbers), max_size=len(numbers)))
        new = [data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)) for n in counts]
        rows, needed = [], 0
        writers = {}  # sequences that will write into a page that they share now
        for number, tokens in zip(numbers, new, strict=True):
            s = self.sequences[number]
            rows.append([content(s.ids + tokens[: i + 1], self.layers) for i in range(len(tokens))])
            needed += -(-(len(s.ids) + len(tokens)) // self.P) - len(s.pages)
            if tokens and len(s.ids) % self.P:
                writers.setdefault(id(s.pages[-1]), (s.pages[-1], []))[1].append(number)
        for page, those in writers.values():
            needed += len(those) - (page["users"] == len(those))
        flat = [x for row in rows for x in row]
        if packed:
            kv = torch.stack(flat, 2) if flat else torch.zeros(self.layers, 2, 0, 1, D)  # [layers, 2, T, 1, D]
        else:
            kv = torch.full((self.layers, 2, len(numbers), 1, max([*counts, 1]), D), torch.nan)
            for b, row in enumerate(rows):
                for i, token in enumerate(row):
                    kv[:, :, b, :, i] = token
        arguments = {"counts": counts, "tokens": [t for tokens in new for t in tokens] if told else None}
        return numbers, new, kv, arguments, needed

    def appended(self, numbers, new, told):
        for number, tokens in zip(numbers, new, strict=True):
            self.sequences[number].append(tokens, self.P, told)
        self.last = list(zip(numbers, map(len, new), strict=True))

    def has_room(self, needed):
        return needed <= self.cache.stats().free + self.cache.stats().kept

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), told=st.booleans(), packed=st.booleans())
    def append(self, data, told, packed):
        numbers, new, kv, arguments, needed = self.draw(data, told, packed)
        stats = self.cache.stats()
        if not self.has_room(needed):
            before = self.state()
            with pytest.raises(CacheFull, match=f"{needed} pages are needed, {stats.free + stats.kept} of"):
                self.append_all(numbers, kv, arguments)
            assert before == self.state()
            return
        self.append_all(numbers, kv, arguments)
        self.appended(numbers, new, told)
        used = len({id(p) for s in self.sequences.values() for p in s.pages})
        assert self.cache.stats().used == used  # copies were made where needed, and nowhere else

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), told=st.booleans(), how=st.sampled_from(["write", "truncate", "free", "extend", "lose"]))
    def step(self, data, told, how):
        """`extend`, then `write`; or something in between, after which the batch must be refused."""
        numbers, new, kv, arguments, needed = self.draw(data, told, packed=True)
        if not self.has_room(needed):
            return
        old = {n: len(self.sequences[n].ids) for n in numbers}
        batch = self.cache.extend(numbers, **arguments)
        self.appended(numbers, new, told)
        order = data.draw(st.permutations(range(self.layers)))
        if how == "write":
            for layer in order:
                batch.write(*kv[layer], layer)
            return
        if self.layers > 1 and data.draw(st.booleans()):  # in some layers: nobody may find the pages yet
            batch.write(*kv[order[0]], order[0])
        changed = [n for n, tokens in zip(numbers, new, strict=True) if tokens][:1]
        for n in changed:
            if how == "truncate":
                self.cache.truncate(n, old[n])
            elif how == "free":
                self.cache.free(n)
                self.sequences.pop(n).truncate(0, self.P)
                self.dead.append(n)
            elif how == "extend":
                try:
                    self.cache.extend(n)
                except CacheFull:
                    changed = []
        if changed and how != "lose":
            before = self.state()
            last, rows = order[-1], kv[order[-1]]
            for use in (
                lambda: batch.write(*rows, last),
                lambda: batch.attend(torch.zeros(rows.shape[1], HEADS, D), last),
            ):
                with pytest.raises(InvalidArgument, match=f"made before sequence {changed[0]} was"):
                    use()
            assert before == self.state()
        for n in numbers:  # what was never written is taken back
            if n in self.sequences:
                if self.cache.length(n) > old[n]:
                    with pytest.raises(InvalidArgument, match="not all written"):
                        self.cache.fork(n)
                self.cache.truncate(n, old[n])
                self.sequences[n].truncate(old[n], self.P)

    def append_all(self, numbers, kv, arguments):
        """`append`, or what it does if there are more layers than one."""
        if self.layers == 1:
            self.cache.append(numbers, *kv[0], **arguments)
            return
        batch = self.cache.extend(numbers, **arguments)
        try:
            for layer in range(self.layers):
                batch.write(*kv[layer], layer)
        except BaseException:
            batch.undo()
            raise

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), told=st.booleans(), forks=st.integers(0, 3))
    def failing_append(self, data, told, forks):
        """Also of several forks that share the page they would write to."""
        numbers = self.pick(data)
        for _ in range(forks):
            numbers.append(self.cache.fork(numbers[0]))
            self.sequences[numbers[-1]] = self.sequences[numbers[0]].fork()
        numbers, _, kv, arguments, needed = self.draw(data, told, packed=True, numbers=numbers)
        if needed > self.cache.stats().free or not kv.shape[2]:  # prefixes that are given up do not come back
            return
        last = self.layers - 1
        kept = self.cache.store.writer(last)

        def partly(*arguments):
            kept(*arguments)
            raise RuntimeError("no kernel")

        self.cache.store.writers[last] = partly
        before = self.books()
        with pytest.raises(RuntimeError, match="no kernel"):
            self.append_all(numbers, kv, arguments)
        self.cache.store.writers[last] = kept
        assert self.books() == before

    def books(self):
        s = self.cache.store.sequences
        numbers = [s.length.tolist(), s.known.tolist(), s.written.tolist(), s.pool.refs.tolist()]
        return [*numbers, [self.pages_of(n) for n in self.sequences]]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), told=st.booleans(), packed=st.booleans(), again=st.booleans())
    def static_step(self, data, told, packed, again):
        """A step of a static batch, of three rows of up to two tokens; often of the sequences of the step before."""
        ROWS, MOST, CAPACITY = 3, 2, 24
        again = [n for n, _ in self.last if n in self.sequences][:ROWS] if again else []
        numbers, new, kv, arguments, needed = self.draw(data, told, True, again or self.pick(data)[:ROWS], MOST)
        if self.static is None or self.static.cache is not self.cache:
            self.static = self.cache.static_batch(ROWS, CAPACITY, MOST)
        if any(len(self.sequences[n].ids) + len(t) > CAPACITY for n, t in zip(numbers, new, strict=True)):
            with pytest.raises(InvalidArgument, match="at most, this batch's capacity"):
                self.static.extend(numbers, **arguments)
            return
        if not self.has_room(needed):
            with pytest.raises(CacheFull):
                self.static.extend(numbers, **arguments)
            return
        self.static.extend(numbers, **arguments)
        q = torch.randn(ROWS, HEADS, MOST, D, generator=torch.Generator().manual_seed(5)) * 2
        counts = arguments["counts"] + [0] * (ROWS - len(numbers))
        for layer in range(self.layers):
            rows, queries = kv.new_full((2, ROWS, 1, MOST, D), torch.nan), q
            for b, one in enumerate(kv[layer].split(arguments["counts"], 1)):
                rows[:, b, :, : counts[b]] = one.transpose(1, 2)
            if packed:
                rows = kv.new_full((2, ROWS * MOST, 1, D), torch.nan)
                rows[:, : kv.shape[2]] = kv[layer]
                queries = torch.cat([x[:, :n].transpose(0, 1) for x, n in zip(q, counts, strict=True)])
                queries = torch.cat([queries, q.new_full((ROWS * MOST - len(queries), HEADS, D), torch.nan)])
            self.static.write(*rows, layer)
            out = self.static.attend(queries, layer)
            if layer == 0:
                outs = [x.transpose(0, 1) for x in out.split([*counts, ROWS * MOST - sum(counts)])] if packed else out
        self.appended(numbers, new, told)
        for b, number in enumerate(numbers):
            if counts[b]:
                want = self.sequences[number].rows[0].attend(q[b, :, : counts[b]], causal=True)
                assert_close(outs[b][:, : counts[b]], want[0])

    @precondition(lambda self: self.last)
    @rule(layer=st.integers(0, 1))
    def attend_as_last(self, layer):
        """Of the sequences of the last step, with as many queries as it had tokens: batches may be reused."""
        if not all(n in self.sequences and self.sequences[n].ids and count for n, count in self.last):
            return
        numbers, counts = map(list, zip(*self.last, strict=True))
        if any(len(self.sequences[n].ids) < count for n, count in self.last):
            return
        q = torch.randn(sum(counts), HEADS, D, generator=torch.Generator().manual_seed(4)) * 2
        out = self.cache.attend(numbers, q, counts=counts, layer=min(layer, self.layers - 1))
        for number, one, got in zip(numbers, q.split(counts), out.split(counts), strict=True):
            row = self.sequences[number].rows[min(layer, self.layers - 1)]
            assert_close(got.transpose(0, 1), row.attend(one.transpose(0, 1), causal=True)[0])

    @rule()
    def press(self):
        """Takes all pages that are not used, so that no prefix is kept, and gives them back."""
        stats = self.cache.stats()
        number = self.cache.create()
        batch = self.cache.extend(number, (stats.free + stats.kept) * self.P)
        assert self.cache.stats().kept == 0
        batch.undo()
        self.cache.free(number)

    @rule(way=st.sampled_from(sorted(COPIES)))
    def replace(self, way):
        self.cache = replaced(self.cache, way)
        self.handle = self.static = None

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def look(self, data):
        """Takes a view, to be used later."""
        numbers = self.pick(data)
        self.handle = self.cache.view(numbers), [(n, self.sequences[n], self.sequences[n].version) for n in numbers]

    @precondition(lambda self: self.handle)
    @rule()
    def use_handle(self):
        view, seen = self.handle
        q = torch.randn(len(seen), HEADS, 1, D, generator=torch.Generator().manual_seed(3)) * 2
        if any(self.sequences.get(n) is not s or s.version != version for n, s, version in seen):
            with pytest.raises(InvalidArgument, match="batch: got one made before sequence"):
                view.attend(q)
            return
        out = view.attend(q)
        for b, (_, s, _) in enumerate(seen):
            want = s.rows[0].attend(q[b], causal=True)
            assert not out[b].any() if want is None else assert_close(out[b], want[0]) is None

    def state(self):
        """All bookkeeping and all bytes."""
        s = self.cache.store.sequences
        numbers = [s.length.tolist(), s.pool.refs.tolist(), s.pool.free, list(s.pool.kept), dict(s.slot_of)]
        parts = (
            x for store in (self.cache.store.k, self.cache.store.v) for x in (store.data, store.scales) if x is not None
        )
        return [*numbers, s.table.host.tobytes(), *(x.view(torch.uint8).numpy().tobytes() for x in parts)]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data):
        [source] = self.pick(data)[:1]
        self.sequences[self.cache.fork(source)] = self.sequences[source].fork()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def truncate(self, data):
        [number] = self.pick(data)[:1]
        s = self.sequences[number]
        length = data.draw(st.integers(0, len(s.ids)))
        self.cache.truncate(number, length)
        s.truncate(length, self.P)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free(self, data):
        numbers = self.pick(data)
        self.cache.free(numbers)
        for number in numbers:
            self.sequences.pop(number).truncate(0, self.P)
            self.dead.append(number)

    @rule(ids=st.lists(st.integers(0, 1), max_size=10), data=st.data())
    def match(self, ids, data):
        if self.sequences and data.draw(st.booleans()):
            [like] = self.pick(data)[:1]
            ids = self.sequences[like].ids + ids
        number, held = self.cache.prefix_match(ids)
        assert held % self.P == 0
        assert held <= len(ids)
        s = Sequence(self.dtype, self.layers)
        # Whatever was matched has the rows of these very ids, and pages that live sequences hold are not held twice.
        s.append(ids[:held], self.P, told=True)
        s.pages = []
        self.sequences[number] = s
        held_pages = self.pages_of(number)
        objects = {page: obj for other in self.sequences for page, obj in
                   zip(self.pages_of(other), self.sequences[other].pages, strict=False)}  # fmt: skip
        for page in held_pages:
            obj = objects.get(page, {"users": 0})
            obj["users"] += 1
            s.pages.append(obj)
        # A sequence that told all its ids from the start and never lost its place can be found by them.
        sequences = self.cache.store.sequences
        for n, other in self.sequences.items():
            slot = sequences.slot_of[n]
            if n != number and sequences.node[slot] > 0 and sequences.pool.index.holds(int(sequences.node[slot])):
                common = int(sequences.depth[slot]) * self.P
                assert common <= other.known
                if ids[:common] == other.ids[:common] and len(ids) >= common:
                    assert held >= common

    def pages_of(self, number):
        s = self.cache.store.sequences
        return s.pages(s.slot_of[number]).tolist()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), cascade=st.sampled_from([None, True, False]), queries=st.integers(1, 3))
    def attend(self, data, cascade, queries):
        numbers = self.pick(data)
        if len(numbers) == 1:
            cascade = None
        q = torch.randn(len(numbers), HEADS, queries, D, generator=torch.Generator().manual_seed(queries)) * 2
        out = self.cache.attend(numbers, q, cascade=cascade, layer=self.layers - 1)
        for b, number in enumerate(numbers):
            want = self.sequences[number].rows[-1].attend(q[b], causal=True)
            if want is None:
                assert not out[b].any()
            else:
                assert_close(out[b], want[0])

    @rule(data=st.data())
    def wrong_ids(self, data):
        wrong = data.draw(st.sampled_from([*self.dead[-3:], 10**6, -1, "a", None, 1.0, True, False]))
        before = self.state()
        live = sorted(self.sequences)[:2]
        message = "a live sequence; create, fork and prefix_match give ids" if type(wrong) is int else "expected"
        if type(wrong) is int and wrong in self.dead:
            message = "a live sequence; it was freed"
        for call in (
            lambda: self.cache.free([*live, wrong]), lambda: self.cache.fork(wrong),
            lambda: self.cache.truncate(wrong, 0), lambda: self.cache.extend([*live, wrong], 1),
        ):  # fmt: skip
            with pytest.raises(InvalidArgument, match=message):
                call()
        if live:
            with pytest.raises(InvalidArgument, match=f"{live[0]} twice"):
                self.cache.free([live[0], *live])
        assert before == self.state()

    @invariant()
    def books_agree(self):
        if not hasattr(self, "cache"):
            return
        s = self.cache.store.sequences
        pool, stats = s.pool, self.cache.stats()
        assert set(s.slot_of) == set(self.sequences)
        refs = np.zeros(pool.pages, dtype=int)
        for number, sequence in self.sequences.items():
            pages = self.pages_of(number)
            assert self.cache.length(number) == len(sequence.ids)
            assert [pool.refs[page] for page in pages] == [obj["users"] for obj in sequence.pages]
            for page in pages:
                refs[page] += 1
            # Ids that count as known are those of these tokens, wherever the pages came from.
            assert s.known[s.slot_of[number]] == sequence.known
            assert s.ids[pages].reshape(-1)[: sequence.known].tolist() == sequence.ids[: sequence.known]
        assert refs.tolist() == pool.refs.tolist()
        # Every page is used, kept or free, and one of them only.
        free = set(pool._stack[: pool.free].tolist())
        used, kept = set(np.flatnonzero(refs).tolist()), set(pool.kept)
        assert len(free) == pool.free
        assert len(free) + len(used) + len(kept) == pool.pages == len(free | used | kept)
        assert all(pool.index.node_of[page] for page in kept)
        assert not any(pool.index.node_of[page] for page in free)
        assert (stats.used, stats.kept, stats.free) == (len(used), len(kept), len(free))
        assert stats.shared == (refs > 1).sum()
        # The prefix index: a node's page holds its ids; parents are there, and know it.
        nodes = pool.index.nodes
        for number, node in nodes.items():
            assert pool.index.node_of[node.page] == number
            assert s.ids[node.page].tobytes() == node.ids
            assert pool.index.holds(node.parent)
            assert node.parent == ROOT or number in nodes[node.parent].children
            assert all(nodes[child].parent == number for child in node.children)
        # A sequence's node is as deep in the tree as it says, and the path to it is of the sequence's own ids.
        for number, sequence in self.sequences.items():
            slot = s.slot_of[number]
            node, depth = int(s.node[slot]), int(s.depth[slot])
            assert depth * self.P <= sequence.known
            if pool.index.holds(node):
                path = []
                while node != ROOT:
                    path.insert(0, nodes[node].ids)
                    node = nodes[node].parent
                assert len(path) == depth
                assert b"".join(path) == np.array(sequence.ids[: depth * self.P], dtype=np.int64).tobytes()

    @invariant()
    def rows_agree(self):
        for number, sequence in self.sequences.items():
            if sequence.ids:
                for layer, row in enumerate(sequence.rows):
                    assert self.cache.keys(number, layer).equal(row.held(0))
                    assert self.cache.values(number, layer).equal(row.held(1))

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        self.cache.free(list(self.sequences))
        stats = self.cache.stats()
        assert (stats.used, stats.free + stats.kept) == (0, stats.pages)  # nothing leaks
        number = self.cache.create()
        count = stats.pages * self.P
        self.append_all(
            [number], torch.zeros(self.layers, 2, count, 1, D), {"counts": [count]}
        )  # all can be used again
        assert self.cache.stats().used == stats.pages


class RowsMachine(RuleBasedStateMachine):
    """`KVCache`, with and without ring."""

    @initialize(capacity=st.integers(1, 12), ring=st.booleans(), dtype=st.sampled_from(["f32", "f16", "int4"]))
    def start(self, capacity, ring, dtype):
        self.cache = KVCache(2, 1, capacity, D, dtype, ring=ring, group=32)
        self.rows = [Row(dtype, group=32) for _ in range(2)]
        self.seed = 0

    @rule(counts=st.tuples(st.integers(0, 16), st.integers(0, 16)))
    def append(self, counts):
        self.seed += 1
        L, cache = max(counts), self.cache
        k, v = torch.randn(2, 2, 1, L, D, generator=torch.Generator().manual_seed(self.seed)) * 2
        if not cache.ring and any(len(r.tokens) + n > cache.capacity for r, n in zip(self.rows, counts, strict=True)):
            with pytest.raises(CacheFull):
                cache.append(k, v, counts)
            return
        cache.append(k, v, counts)
        for b, row in enumerate(self.rows):
            row.append(k[b, :, : counts[b]], v[b, :, : counts[b]], cache.capacity if cache.ring else None)

    @rule(b=st.integers(0, 1), data=st.data())
    def truncate(self, b, data):
        row = self.rows[b]
        length = data.draw(st.integers(row.first, len(row.tokens)))
        self.cache.truncate(b, length)
        row.truncate(length)

    @rule(way=st.sampled_from(sorted(COPIES)))
    def replace(self, way):
        self.cache = replaced(self.cache, way)

    @rule(b=st.integers(0, 1))
    def reset(self, b):
        self.cache.reset(b)
        self.rows[b] = Row(self.rows[b].dtype, group=32)

    @rule(queries=st.integers(1, 4), window=st.none() | st.integers(1, 12), causal=st.booleans())
    def attend(self, queries, window, causal):
        q = torch.randn(2, HEADS, queries, D, generator=torch.Generator().manual_seed(queries)) * 2
        short = window and any(max(0, len(r.tokens) - queries - window + 1) < r.first for r in self.rows)
        if short:
            with pytest.raises(InvalidArgument, match="window"):
                self.cache.attend(q, window=window, causal=causal)
            return
        out = self.cache.attend(q, window=window, causal=causal)
        for b, row in enumerate(self.rows):
            want = row.attend(q[b], window=window, causal=causal)
            if want is None:
                assert not out[b].any()
            else:
                assert_close(out[b], want[0])

    @invariant()
    def rows_agree(self):
        if hasattr(self, "cache"):
            assert self.cache.lengths.tolist() == [len(row.tokens) for row in self.rows]
            for b, row in enumerate(self.rows):
                held = row.held(0)
                assert self.cache.keys(b).shape[1] == 0 if held is None else self.cache.keys(b).equal(held)


QUICK = settings(max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(QUICK, max_examples=1000, stateful_step_count=100)

TestPaged = PagedMachine.TestCase
TestPaged.settings = QUICK
TestRows = RowsMachine.TestCase
TestRows.settings = QUICK


@pytest.mark.slow
class TestPagedLong(PagedMachine.TestCase):
    settings = LONG


@pytest.mark.slow
class TestRowsLong(RowsMachine.TestCase):
    settings = LONG
