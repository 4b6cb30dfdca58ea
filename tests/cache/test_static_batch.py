"""Steps with tables at fixed addresses: the same as other steps, in whatever holds their addresses."""

import copy
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

from tilewise import CacheFull, InvalidArgument, PagedKVCache
from tilewise.backends.torch.kv_write import Append as InTorch

D, LAYERS = 64, 2
KINDS = {
    "f32": {"dtype": "f32"},
    "int8": {"dtype": "int8", "v_dtype": "int4"},
    "rotated": {"dtype": "int8", "rotate": True},
    "latent": {"dtype": "bf16", "latent": 32},
}


def cache_of(kind="f32", pages=60):
    return PagedKVCache(pages, 8, 2, D, layers=LAYERS, **KINDS[kind])


def filled(kind="f32", lengths=(5, 17, 30)):
    """A cache with sequences of these lengths, their ids; all other memory is NaN where it can be."""
    cache = cache_of(kind)
    for x in memory(cache):
        x.fill_(255)
    ids = [cache.create() for _ in lengths]
    batch, g = cache.extend(ids, list(lengths)), torch.Generator().manual_seed(1)
    for layer in range(LAYERS):
        k, v = torch.randn(2, sum(lengths), 2, D, generator=g)
        batch.write(k, None if cache.latent else v, layer)
    return cache, ids


def inputs(rows, seed):
    """q, k and v of a step's packed rows; queries are peaked."""
    g = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(rows, 4, D, generator=g), *torch.randn(2, rows, 2, D, generator=g)


def step(batch, q, k, v, latent=False, **options):
    """A model's layers: keys of a layer are made of what the one before gives."""
    for layer in range(LAYERS):
        batch.write(k, None if latent else v, layer)
        out = batch.attend(q, layer, split_size=16, **options)
        k, v = k + out[:, :2].mean(-1, keepdim=True), v + 1
    return out


def memory(cache):
    """All memory of its keys and values, as bytes."""
    parts = [cache.store.k.data, cache.store.k.scales, cache.store.v.data, cache.store.v.scales]
    return [x.view(torch.uint8) for x in parts if x is not None]


def same(a, b):
    return all(x.equal(y) for x, y in zip(memory(a), memory(b), strict=True))


def poisoned(x, rows, total):
    """Rows of a step and NaN for those of no sequence."""
    return torch.cat([x[:rows], torch.full((total - rows, *x.shape[1:]), torch.nan)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [True, False])
def test_steps_are_those_of_other_batches(kind, packed):
    """One token for each of fewer sequences than there is room for; a fork joins, a sequence leaves."""
    (cache, ids), (other, _) = filled(kind), filled(kind)
    batch, latent = cache.static_batch(5, 100), cache.latent is not None
    for n in range(20):
        if n == 7:
            assert cache.fork(ids[1]) == other.fork(ids[1])
            ids = [*ids, 3]
        if n == 12:
            cache.free(ids[0]), other.free(ids[0])
            ids = ids[1:]
        rows = len(ids)
        q, k, v = inputs(5, n)
        batch.extend(ids)
        padded = [poisoned(x, rows, 5) for x in (q, k, v)]
        got = step(batch if packed else Unpacked(batch), *padded, latent)
        want = step(other.extend(ids), q[:rows], k[:rows], v[:rows], latent)
        assert got[:rows].equal(want), n
        assert same(cache, other), n


class Unpacked:
    """Packed rows of `count` tokens for each sequence, given as `[B, H, L, D]`."""

    def __init__(self, batch):
        self.batch = batch

    def rows(self, x):
        return None if x is None else x.unflatten(0, (self.batch.batch, -1)).transpose(1, 2)

    def write(self, k, v, layer):
        self.batch.write(self.rows(k), self.rows(v), layer)

    def attend(self, q, layer, **options):
        return self.batch.attend(self.rows(q), layer, **options).transpose(1, 2).flatten(0, 1)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("writer", ["cpu", "torch"])
def test_some_tokens_of_each(packed, writer, monkeypatch):
    """From none to three; rows past those of a sequence are no tokens."""
    (cache, ids), (other, _) = filled(), filled()
    if writer == "torch":
        monkeypatch.setattr("tilewise.dispatch.planner.writer", InTorch)
        cache.store.writers.clear()
    batch = cache.static_batch(4, 100, count=3)
    for n, counts in enumerate([[1, 3, 2], [0, 0, 3], [3, 1, 0], [0, 0, 0]]):
        rows = sum(counts)
        q, k, v = inputs(12, n)
        batch.extend(ids, counts)
        theirs = other.extend(ids, counts)
        used = [x[:rows] for x in (q, k, v)]
        if packed:
            got = step(batch, *(poisoned(x, rows, 12) for x in (q, k, v)))[:rows]
        else:
            places = torch.tensor([3 * b + i for b, count in enumerate(counts) for i in range(count)], dtype=torch.long)
            padded = [torch.full((12, *x.shape[1:]), torch.nan).index_copy(0, places, x) for x in used]
            got = step(Unpacked(batch), *padded)[places]
        assert got.equal(step(theirs, *used)), n
        assert same(cache, other), n


def test_what_a_graph_holds_stays_in_its_place():
    """Also when the cache's own table grows, in rows and in columns, for sequences that are not in the batch."""
    cache, ids = filled()
    batch = cache.static_batch(3, 60)
    tensors = (batch.block_table, batch.context_lens, batch.cu_seqlens, batch.starts)
    before = [x.data_ptr() for x in tensors]
    batch.extend(ids)
    assert batch.context_lens.tolist() == [6, 18, 31]
    long = cache.create()
    cache.extend(long, 8 * 30)
    more = [cache.create() for _ in range(40)]
    batch.extend([ids[2], more[5]])
    assert [x.data_ptr() for x in (batch.block_table, batch.context_lens, batch.cu_seqlens, batch.starts)] == before
    assert batch.context_lens.tolist() == [32, 1, 0]
    assert batch.starts.tolist() == [31, 0, 0]
    assert batch.cu_seqlens.tolist() == [0, 1, 2, 2]
    assert batch.block_table[0, :4].tolist() == cache.view(ids[2]).block_table[0, :4].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_traced_step_serves_all_that_follow(kind):
    """A trace holds operators and addresses, as a CUDA graph does, and nothing of lengths: replayed as they grow."""
    (cache, ids), (other, _) = filled(kind), filled(kind)
    batch, theirs, latent = cache.static_batch(4, 100), other.static_batch(4, 100), cache.latent is not None
    batch.extend(ids), theirs.extend(ids)
    first = inputs(4, 0)
    graph = make_fx(lambda q, k, v: step(batch, q, k, v, latent))(*first)
    step(theirs, *first, latent)
    for n in range(1, 30):
        if n > 1:
            ids = ids[1:] + ids[:1] if n % 5 else ids
            batch.extend(ids[: 1 + n % 3]), theirs.extend(ids[: 1 + n % 3])
        given = inputs(4, n if n > 1 else 0)
        assert graph(*given)[: 1 + n % 3].equal(step(theirs, *given, latent)[: 1 + n % 3]), n
        assert same(cache, other), n


@pytest.mark.parametrize("kind", KINDS)
def test_it_compiles_to_one_graph(kind):
    """Without a break, and not again as sequences grow, join and leave."""
    (cache, ids), (other, _) = filled(kind), filled(kind)
    batch, theirs, latent = cache.static_batch(4, 100), other.static_batch(4, 100), cache.latent is not None
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for n in range(12):
        now = ids[: 1 + n % 3]
        batch.extend(now), theirs.extend(now)
        given = inputs(4, n)
        assert compiled(batch, *given, latent)[: len(now)].equal(step(theirs, *given, latent)[: len(now)]), n
        assert same(cache, other), n
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_compiled_steps_write_in_place():
    """No copy of the cache is made."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    (cache, ids), (other, _) = filled("int8"), filled("int8")
    batch, theirs = cache.static_batch(4, 100), other.static_batch(4, 100)
    compiled = torch.compile(step, fullgraph=True)
    for n in range(3):
        batch.extend(ids), theirs.extend(ids)
        given = inputs(4, n)
        torch.testing.assert_close(compiled(batch, *given)[:3], step(theirs, *given)[:3])
    assert not counters["inductor"]["possibly_missed_reinplacing_opportunities"]


def test_the_operator_is_sound():
    for kind in KINDS:
        cache, ids = filled(kind)
        batch, latent = cache.static_batch(3, 60), cache.latent
        batch.extend(ids)
        k, v = (x.transpose(0, 1)[None] for x in inputs(3, 0)[1:])
        keys, values = cache.store.k, cache.store.v
        pages = (keys.data, keys.scales, *((None, None) if latent else (values.data, values.scales)))
        if keys.format.name == "f32" or latent:
            pages = tuple(None if x is None else x.nan_to_num() for x in pages)
        tensors = (k, None if latent else v, *pages, batch.starts, batch.cu_seqlens, batch.block_table)
        stored = {"k_stored": str(keys.format.storage), "v_stored": str(values.format.storage)}
        options = {"layer": 1, "packed": True, **stored, "latent": latent}
        torch.library.opcheck(torch.ops.tilewise.write_pages.default, tensors, options)


def test_tokens_can_be_found_by_their_ids():
    cache = cache_of()
    batch, ids = cache.static_batch(1, 100, count=9), [cache.create()]
    batch.extend(ids, 9, tokens=list(range(9)))
    step(batch, *inputs(9, 0))
    found, length = cache.prefix_match(list(range(9)))
    assert length == 8
    assert cache.keys(found).equal(cache.keys(ids[0])[:, :8])
    with pytest.raises(InvalidArgument, match="tokens: got 1 ids, expected 2"):
        batch.extend(ids, 2, tokens=[1])


def test_a_full_pool_changes_nothing():
    cache = cache_of(pages=3)
    ids = [cache.create(), cache.create()]
    batch = cache.static_batch(2, 100, count=16)
    batch.extend(ids, [16, 8])
    lengths = batch.context_lens.clone()
    with pytest.raises(CacheFull):
        batch.extend(ids, [0, 1])
    assert batch.context_lens.equal(lengths)
    assert [cache.length(i) for i in ids] == [16, 8]
    step(batch, *inputs(32, 0))  # its tables are still good


def test_what_does_not_fit_is_refused():
    cache, ids = filled()
    batch = cache.static_batch(2, 32, count=2)
    with pytest.raises(InvalidArgument, match="sequences: got 3 of them, expected 2 at most, this batch's size"):
        batch.extend(ids)
    with pytest.raises(InvalidArgument, match="counts: got 3, expected 2 at most, this batch's count"):
        batch.extend(ids[0], 3)
    batch.extend(ids[2], 2)
    with pytest.raises(InvalidArgument, match="counts: got sequence 2 of 33 tokens, expected 32 at most, this batch's"):
        batch.extend(ids[1:])
    assert cache.length(ids[1]) == 17
    for sizes in ((0, 10), (2, 0), (2, 10, 0), (2.5, 10), (True, 10)):
        with pytest.raises(InvalidArgument, match="expected an int, 1 to"):
            cache.static_batch(*sizes)
    q, k, v = inputs(4, 0)
    for wrong in (k[:3], k[None], k[:, 0]):
        with pytest.raises(InvalidArgument, match="expected 4 packed rows, or 2 x 2; pad them"):
            batch.write(wrong, wrong)
        with pytest.raises(InvalidArgument, match="q: got shape"):
            batch.attend(wrong)
    with pytest.raises(InvalidArgument, match="layer: got 2"):
        batch.write(k, v, 2)
    with pytest.raises(InvalidArgument, match="cu_seqlens_q: got an option of attend"):
        batch.attend(q, cu_seqlens_q=batch.cu_seqlens)


def test_sequences_that_have_changed_are_refused():
    cache, ids = filled()
    batch = cache.static_batch(2, 60)
    batch.extend(ids[:2])
    given = inputs(2, 0)
    cache.extend(ids[2])  # another's
    step(batch, *given)
    cache.truncate(ids[0], 3)
    for use in (lambda: batch.write(*given[1:]), lambda: batch.attend(given[0])):
        with pytest.raises(InvalidArgument, match="batch: got one made before sequence 0 was changed"):
            use()
    with pytest.raises(InvalidArgument, match="sequences: got 2, whose last 1 tokens are not all written"):
        batch.extend([ids[2]])
    batch.extend(ids[:2])
    cache.free(ids[1])
    with pytest.raises(InvalidArgument, match="sequence 1 was freed"):
        step(batch, *given)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(InvalidArgument, match="batch: got a copy or a pickle"):
            copied(batch)
