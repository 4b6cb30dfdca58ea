"""Who needs which keys, checked against every cell of small problems: no processes, no attention."""

import itertools
import random

import pytest

from tilewise.core.mask_rules import MaskRules, key_span
from tilewise.distributed.layout import pieces
from tilewise.distributed.packing import passes
from tilewise.distributed.schedule import Task, needed, rounds, spans, steps

RULES = [
    MaskRules(),
    MaskRules(causal=True),
    MaskRules(causal=True, window=(5, None)),
    MaskRules(window=(3, 2)),
    MaskRules(window=(None, 4)),
    MaskRules(causal=True, chunk=6),
    MaskRules(chunk=7, window=(4, 4)),
]


def make_task(rules, ranks, lengths, order="zigzag", offsets=None, used=None, gather=False, fusible=True):
    """Documents of `lengths`, (queries, keys) each, with tokens after the last that belong to none."""
    cu_q, cu_k = ([0, *itertools.accumulate(n)] for n in zip(*lengths, strict=True))
    q_pieces, k_pieces = (
        tuple(pieces(cu[-1] + 3 * (len(lengths) > 1), ranks, r, order, cu[1:-1]) for r in range(ranks))
        for cu in (cu_q, cu_k)
    )
    offsets = offsets or [(k - q,) for q, k in lengths]
    doc_places = tuple(tuple((at, k) for at in places) for (_, k), places in zip(lengths, offsets, strict=True))
    return Task(rules, q_pieces, k_pieces, tuple(cu_q), tuple(cu_k), doc_places, fusible and used is None, gather)


def draw(seed):
    random.seed(seed)
    docs = random.choice([1, 1, 3])
    lengths = []
    for _ in range(docs):
        k = random.randrange(0, 30)
        lengths.append((k if random.random() < 0.6 else random.randrange(0, 30), k))
    offsets, order = None, random.choice(["zigzag", "contiguous", "striped"])
    if docs == 1 and random.random() < 0.3:
        offsets = [tuple(random.sample(range(-4, 12), 2))]
    return make_task(
        random.choice(RULES),
        random.choice([1, 2, 3, 5]),
        lengths,
        order,
        offsets,
        gather=random.random() < 0.3 and order != "striped",
        fusible=offsets is None and random.random() < 0.7 and order != "striped",
    )


def tokens(held, cu):
    """(document, position) of each row of a rank; None for tokens of nobody."""
    found = [None] * sum(piece.size for piece in held)
    for doc, pos, row, count, step in spans(held, cu):
        found[row : row + count] = [(doc, pos + i * step) for i in range(count)]
    return found


def buffer_of(task, round):
    """What the rows of a round's buffer are, from what its sources sent."""
    sent = {}
    for rank, ranges in round.sources:
        rows = tokens(task.k_pieces[rank], task.cu_k)
        sent[rank] = [rows[i] for lo, hi in ranges for i in range(lo, hi)]
    return [sent[rank][row + i] for rank, row, count in round.order for i in range(count)]


def visible(task, query, key):
    """Whether any batch row sees the cell; whether all do."""
    seen = []
    for offset, length in task.places[query[0]]:
        lo, hi = key_span(task.rules, offset + query[1], length)
        seen.append(query[0] == key[0] and lo <= key[1] < hi)
    return any(seen), all(seen)


@pytest.mark.parametrize("seed", range(120))
def test_every_visible_cell_is_computed_once_and_no_other_is_called_full(seed):
    task = draw(seed)
    for rank in range(task.ranks):
        queries = tokens(task.q_pieces[rank], task.cu_q)
        count = {}
        for round in rounds(task, rank):
            keys = buffer_of(task, round)
            for p in round.pairs:
                for i, j in itertools.product(range(p.rows), range(p.keys)):
                    query, key = queries[p.q + i], keys[p.k + j]
                    some, every = visible(task, query, key)
                    if p.full:
                        assert every
                    if some:
                        count[query, key] = count.get((query, key), 0) + 1
                    if not p.full:  # what the call sees by the positions that it is given
                        for offset, length in task.places[p.doc]:
                            qpos, kpos = offset + p.qpos + i * p.step, p.kpos + j * p.step
                            lo, hi = key_span(task.rules, qpos, max(length, p.kpos + p.keys * p.step))
                            here = lo <= kpos < hi and (key[1] < length)
                            lo, hi = key_span(task.rules, offset + query[1], length)
                            assert here == (lo <= key[1] < hi), (p, query, key)
        everyone = [x for r in range(task.ranks) for x in tokens(task.k_pieces[r], task.cu_k) if x]
        want = {(q, k) for q in queries if q for k in everyone if visible(task, q, k)[0]}
        assert count == dict.fromkeys(want, 1)


@pytest.mark.parametrize("seed", range(120))
def test_what_one_sends_the_other_expects(seed):
    task = draw(seed)
    plans = [rounds(task, rank) for rank in range(task.ranks)]
    assert len({len(plan) for plan in plans}) == 1
    for at in zip(*plans, strict=True):
        assert len({round.step for round in at}) == 1
        sent = {(rank, to.rank, to.ranges) for rank, round in enumerate(at) for to in round.sends}
        came = {(x.rank, rank, x.ranges) for rank, round in enumerate(at) for x in round.sources if x.rank != rank}
        assert sent == came


@pytest.mark.parametrize("seed", range(60))
def test_only_keys_that_are_seen_are_sent(seed):
    random.seed(seed)
    rules = random.choice(RULES[:5])
    n = random.randrange(1, 40)
    orders = ["zigzag", "contiguous", "striped"]
    task = make_task(rules, random.choice([2, 4]), [(n, n)], random.choice(orders), fusible=False)
    for owner, reader in itertools.permutations(range(task.ranks), 2):
        rows = tokens(task.k_pieces[owner], task.cu_k)
        queries = tokens(task.q_pieces[reader], task.cu_q)
        sent = {rows[i] for lo, hi in needed(task, owner, reader) for i in range(lo, hi)}
        assert sent == {key for key in rows if any(visible(task, q, key)[0] for q in queries)}


@pytest.mark.parametrize("seed", range(60))
def test_packed_calls_hold_the_same_cells(seed):
    task = draw(seed)
    for round in rounds(task, 0):
        found = []
        for p in passes(task, round.pairs):
            assert p.cu_q[0] == p.cu_k[0] == 0
            assert list(p.cu_q) == sorted(p.cu_q)
            assert list(p.cu_k) == sorted(p.cu_k)
            for i, pair in enumerate(p.pairs):
                rows, keys = p.cu_q[i + 1] - p.cu_q[i], p.cu_k[i + 1] - p.cu_k[i]
                if pair is None:
                    assert rows == 0 or keys == 0
                else:
                    assert (p.q[0] + p.cu_q[i], p.k[0] + p.cu_k[i]) == (pair.q, pair.k)
                    assert (rows, keys) == (pair.rows, pair.keys)
                    assert pair.full or not p.full
                    found.append(pair)
        assert sorted(found) == sorted(round.pairs)


def test_a_window_of_one_part_takes_two_steps():
    length = 64 * 16
    task = make_task(MaskRules(causal=True, window=(15, None)), 64, [(length, length)], "contiguous")
    assert steps(task) == (0, 1)
    assert needed(task, 5, 6) == ((1, 16),)  # all but the key that no one of the next part sees
    both = make_task(MaskRules(window=(3, 3)), 64, [(length, length)], "contiguous")
    assert steps(both) == (0, 1, 63)


def test_a_causal_zigzag_sends_half_parts_and_computes_equally_much_in_one_call_a_step():
    ranks, n = 4, 8
    task = make_task(MaskRules(causal=True), ranks, [(ranks * n, ranks * n)])
    for rank in range(ranks):
        first, *others = rounds(task, rank)
        assert [(p.rows, p.keys, p.full) for p in first.pairs] == [(n, n, False)]
        for round in others:
            (pair,) = round.pairs
            assert pair.full
            assert pair.rows * pair.keys == n * n // 2
            before = round.sources[0].rank < rank
            assert round.sources[0].rows == (n // 2 if before else n)
