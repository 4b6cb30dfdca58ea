"""Decoding over a cache whose tokens lie on several ranks: as over one cache."""

import copy
import pickle

import pytest
import torch
from torch import distributed as dist
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from ranks import mesh_of
from tilewise import InvalidArgument, distributed
from tilewise.core.options import Options
from tilewise.distributed.cache import tokens_on_rank
from tilewise.testing.check import check_call, judge, largest_error
from tilewise.validation.calls import dense

LENGTHS = (9, 0, 2)  # tokens before the steps: some ranks hold none of the last two


def _decode(interleave, options, dtype, gather, storage):
    """The largest difference from one cache over some steps, in units of what rounding may do."""
    torch.manual_seed(0)
    mesh, rank = mesh_of("4"), dist.get_rank()
    H, Hkv, D, Dv, layers = 8, 2, 32, 16, 2
    made = {"kv_heads": Hkv, "head_dim": D, "value_dim": Dv, "dtype": storage, "layers": layers}
    one = tilewise.PagedKVCache(30, 4, **made)
    many = distributed.ShardedKVCache(mesh, 12, 4, interleave=interleave, **made)
    ids = [(one.create(), many.create()) for _ in LENGTHS]
    for (a, b), n in zip(ids, LENGTHS, strict=True):
        if n:
            batches = one.extend([a], n), many.extend([b], n)
            for layer in range(layers):
                k, v = torch.randn(1, Hkv, n, D), torch.randn(1, Hkv, n, Dv)
                for batch in batches:
                    batch.write(k, v, layer)
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(H)
    mine = slice(rank * H // 4, (rank + 1) * H // 4) if gather else slice(None)
    worst = 0.0
    for count in (1, 3, 1):
        both = [list(x) for x in zip(*ids, strict=True)]
        batches = one.extend(both[0], count), many.extend(both[1], count)
        for layer in range(layers):
            k, v = torch.randn(3, Hkv, count, D), torch.randn(3, Hkv, count, Dv)
            q = (3 * torch.randn(3, H, count, D)).to(dtype)
            for batch in batches:
                batch.write(k, v, layer)
            want = batches[0].attend(q, layer, backend="torch", return_lse=True, **options)
            part = dict(options)
            for name in ("sinks", "alibi_slopes"):
                if name in part and (gather and name == "sinks"):
                    part[name] = part[name][mine]
            got = batches[1].attend(q[:, mine], layer, backend="torch", return_lse=True, gather=gather, **part)
            exact = want.out[:, mine].float()
            error = (got.out.float() - exact).abs().max() / (4 * torch.finfo(dtype).eps * (1 + exact.abs().max()))
            lse = want.lse[:, mine]
            both_empty = (got.lse == lse) & lse.isinf()
            worst = max(worst, float(error), float(torch.where(both_empty, 0.0, got.lse - lse).abs().max()) / 1e-5)
    sizes = [many.cache.length(b) for _, b in ids], [many.length(b) for _, b in ids]
    many.truncate(ids[0][1], 3)
    fork = many.fork(ids[0][1])
    many.free([b for _, b in ids])
    return worst, sizes, many.cache.length(fork)


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("interleave", [1, 3])
@pytest.mark.parametrize(
    ("options", "dtype", "storage"),
    [
        ({}, torch.float32, "f32"),
        ({"window": 4, "sinks": True, "softcap": 5.0}, torch.float32, "f32"),
        ({"chunk": 5}, torch.bfloat16, "bf16"),
        ({"sinks": True}, torch.float32, "int8"),
    ],
    ids=["plain", "window", "chunk", "int8"],
)
def test_a_sharded_cache_is_one_cache(pool, interleave, options, dtype, storage, gather):
    answers = pool(_decode, interleave, options, dtype, gather, storage)
    for rank, (worst, (own, whole), kept) in enumerate(answers):
        assert worst < 1
        assert whole == [n + 5 for n in LENGTHS]
        assert own == [tokens_on_rank(n, rank, 4, interleave) for n in whole]
        assert kept == tokens_on_rank(3, rank, 4, interleave)


def _odd_sizes():
    """An `out` of an odd number of 16-bit values on each rank, beside an lse of 32 bits."""
    torch.manual_seed(0)
    mesh, rank = mesh_of("4"), dist.get_rank()
    made = {"kv_heads": 1, "head_dim": 8, "value_dim": 15, "dtype": "bf16"}
    many, one = distributed.ShardedKVCache(mesh, 4, 4, **made), tilewise.PagedKVCache(8, 4, **made)
    k, v, q = torch.randn(1, 1, 9, 8), torch.randn(1, 1, 9, 15), torch.randn(1, 4, 1, 8).bfloat16()
    outs = []
    for cache, mine in ((many, slice(rank, rank + 1)), (one, slice(None))):
        sequence = cache.create()
        cache.append([sequence], k.bfloat16(), v.bfloat16())
        outs.append(cache.attend([sequence], q[:, mine], backend="torch"))
    given = [x.bfloat16().expand(-1, 4, -1, -1) for x in (k, v)]
    exact, plain = (scaled_dot_product_attention(*(x.to(d) for x in (q, *given))) for d in (torch.double, q.dtype))
    for out, heads in zip(outs, (slice(rank, rank + 1), slice(None)), strict=True):
        judge("out", out, exact[:, heads], 2 * largest_error(plain, exact), q.dtype)
    return True


def test_values_of_an_odd_width(pool):
    assert pool(_odd_sizes) == [True] * 4


def _copies():
    """Of a cache with one sequence: what a copy's writes change in it, and what comes out of a pickle."""
    torch.manual_seed(0)
    mesh, x = mesh_of("4"), torch.randn(2, 1, 4, 11, 16)
    one = distributed.ShardedKVCache(mesh, 4, 4, 4, 16, "f32")
    sequence = one.create()
    one.append([sequence], *x)
    q, found = x[0][:, :, -1:], []
    want = one.attend([sequence], q, gather=False, backend="torch")
    for other in (copy.copy(one), copy.deepcopy(one)):
        other.append([sequence], *x)
        found.append((one.length(sequence), other.length(sequence)) == (11, 22))
        found.append(torch.equal(one.attend([sequence], q, gather=False, backend="torch"), want))
    back = pickle.loads(pickle.dumps(one))
    for broken in (lambda: back.attend([sequence], q), lambda: back.attach(mesh_of("2")), lambda: one.extend([0], -1)):
        try:
            broken()
            found.append(False)
        except InvalidArgument:
            found.append(True)
    back.attach(mesh)
    found.append(torch.equal(back.attend([sequence], q, gather=False, backend="torch"), want))
    return found


def test_copies_share_nothing_and_a_pickled_cache_finds_its_ranks(pool):
    assert pool(_copies) == [[True] * 8] * 4


def _alibi():
    torch.manual_seed(0)
    x = torch.randn(2, 1, 4, 70, 16)
    cache, slopes = distributed.ShardedKVCache(mesh_of("4"), 5, 4, 4, 16, "f32"), tilewise.alibi_slopes(4)
    a = cache.create()
    cache.append([a], *x)
    q = 3 * x[0][:, :, -64:]
    state = cache.attend([a], q, alibi_slopes=slopes, backend="torch", gather=False, return_lse=True)
    check_call(dense(q, *x, Options(causal=True, alibi_slopes=slopes)), *state)
    refused = 0
    blocks = distributed.ShardedKVCache(mesh_of("4"), 4, 4, 4, 16, "f32", interleave=2)
    blocks.append([blocks.create()], *x[..., :11, :])
    for options in ({"alibi_slopes": slopes}, {"mask": torch.ones(1, 1)}):
        try:
            blocks.attend([0], x[0][:, :, -1:], gather=False, **options)
        except InvalidArgument:
            refused += 1
    return refused


def test_alibi_goes_by_positions_of_the_whole(pool):
    assert pool(_alibi) == [2] * 4


def _first_tokens(interleave):
    """A sequence that is shorter than what lies together on a rank: the others hold no key of the whole batch."""
    torch.manual_seed(0)
    cache, x = (
        distributed.ShardedKVCache(mesh_of("4"), 4, 8, 4, 16, "f32", interleave=interleave),
        torch.randn(2, 1, 4, 5, 16),
    )
    sequence = cache.create()
    cache.append([sequence], *x)
    q = 3 * x[0][:, :, -3:]
    for options in ({}, {"window": (1, 0)}, {"chunk": 2}):
        state = cache.attend([sequence], q, gather=False, backend="torch", return_lse=True, **options)
        check_call(dense(q, *x, Options(causal=True, **options)), *state)
    return True


@pytest.mark.parametrize("interleave", [8, 2**31 - 1])
def test_ranks_without_a_key_of_the_whole_batch(pool, interleave):
    assert pool(_first_tokens, interleave) == [True] * 4


def _latent():
    """Rows that hold K and V come once."""
    torch.manual_seed(0)
    rows, q = torch.randn(1, 1, 9, 24), torch.randn(1, 4, 1, 24)
    cache = distributed.ShardedKVCache(mesh_of("4"), 4, 4, kv_heads=1, head_dim=24, dtype="f32", latent=16)
    sequence = cache.create()
    cache.append(sequence, rows)
    state = cache.attend(sequence, q, gather=False, backend="torch", return_lse=True)
    check_call(dense(q, rows, rows[..., :16], Options(causal=True)), *state)
    return True


def test_latent_rows_are_appended_without_values(pool):
    assert pool(_latent) == [True] * 4


def _refusals():
    """The arguments that are named, of calls that would attend to something else, or end a process."""
    found, rank = [], dist.get_rank()
    x = torch.randn(2, 1, 4, 9, 16)
    q = x[0][:, :, -2:]
    caches = [distributed.ShardedKVCache(mesh_of("4"), 4, 4, 4, 16, "f32", interleave=n) for n in (1, 2)]
    for cache in caches:
        cache.append([cache.create()], *x)
    tree, bias = torch.ones(1, 2, 2, dtype=torch.bool), torch.zeros(1, 1, 2)
    calls = [{"tree_mask": tree}, {"q_bias": bias}, {"k_bias": bias}, {"k_start": 1}, {"k_stride": 2}, {"bogus": 1}]
    calls += [
        {"sinks": torch.zeros(3)},
        {"q": q.clone().requires_grad_()},
        {"window": 0},
        {"chunk": 0},
        {"window": "4"},
    ]
    calls += [
        {"causal": 1},
        {"q": q[:, : 2 + 2 * (rank == 0)], "validate": True},
        {"scale": rank + 1.0},
        {"q": 3},
        {"mask": None},
    ]
    for cache in caches:
        for options in calls:
            try:
                cache.attend([0], **{"q": q, "backend": "torch", **options})
                found.append("none")
            except InvalidArgument as error:
                found.append(error.argument)
    for call in (lambda: cache.truncate(0, 1.5), lambda: cache.length(True), lambda: cache.append([0], x[0][0])):
        try:
            call()
        except InvalidArgument as error:
            found.append(error.argument)
    return found


def test_what_a_sharded_cache_cannot_do_is_refused_on_all_ranks(pool):
    names = ["tree_mask", "q_bias", "k_bias", "k_start", "k_stride", "bogus", "sinks", "q", "window", "chunk", "window"]
    names += ["causal", "q", "scale", "q", "none"]
    assert pool(_refusals) == [[*names, *names, "length", "sequences", "k"]] * 4
