"""A sequence from one cache to another, of another page size and other heads, in this process and to another one."""

import json

import pytest
import torch
from torch import distributed as dist

from ranks import Pool
from tilewise import CacheFull, InvalidArgument, PagedKVCache, distributed

STORED = [("f32", 32), ("bf16", 32), ("int8", 64), ("int4", 32)]


def filled(page, dtype="f32", group=32, heads=4, tokens=37, pages=40, **options):
    """A cache with a sequence of `tokens` between others, so that its pages are in several runs."""
    torch.manual_seed(0)
    cache = PagedKVCache(pages, page, heads, 64, dtype, layers=2, value_dim=32, group=group, **options)
    other, own = cache.create(), cache.create()
    ids = torch.arange(tokens)
    at = 0
    for n in (5, 9, tokens - 14):
        for sequence, count in ((own, n), (other, 3)):
            batch = cache.extend([sequence], count, tokens=ids[at : at + n] if sequence == own else None)
            for layer in range(2):
                k, v = torch.randn(count, heads, 64), torch.randn(count, heads, 32)
                batch.write(k, v, layer)
        at += n
    return cache, own


def same(a, sequence, b, other, heads=slice(None)):
    return all(
        torch.equal(getattr(a, name)(sequence, layer)[heads], getattr(b, name)(other, layer))
        for name in ("keys", "values")
        for layer in range(2)
    )


@pytest.mark.parametrize(("dtype", "group"), STORED)
@pytest.mark.parametrize("page", [1, 4, 16])
def test_a_sequence_in_pages_of_another_size(dtype, group, page):
    source, sequence = filled(4, dtype, group)
    target = PagedKVCache(50, page, 4, 64, dtype, layers=2, value_dim=32, group=group)
    about, tensors = source.export(sequence)
    json.dumps(about)
    new = target.import_((about, tensors))
    assert target.length(new) == 37
    assert same(source, sequence, target, new)
    q = torch.randn(1, 8, 1, 64)
    for layer in range(2):  # the same bits: the same rows in the same order
        a, b = (c.attend([s], q, layer=layer, backend="torch") for c, s in ((source, sequence), (target, new)))
        assert torch.equal(a, b)
    match, known = target.prefix_match(torch.arange(36))  # its tokens are known there too
    assert known == 36 // page * page
    target.free([match, new])


def test_sequences_without_token_ids_and_without_tokens():
    source, target = (PagedKVCache(9, page, 2, 16, "f32") for page in (4, 3))
    for count in (10, 0):
        sequence = source.create()
        source.append([sequence], *torch.randn(2, 1, 2, count, 16))
        new = target.import_(source.export(sequence))
        assert target.length(new) == count
        assert torch.equal(target.keys(new), source.keys(sequence))


def test_heads_and_layers_from_several_caches():
    whole, sequence = filled(4)
    parts = [whole.export(sequence, layers=(n, n + 1), heads=h) for n in range(2) for h in ((0, 1), (1, 4))]
    for first, count in ((0, 4), (1, 2), (3, 1)):
        target = PagedKVCache(20, 8, count, 64, "f32", layers=2, value_dim=32)
        assert same(whole, sequence, target, target.import_(*parts, first_head=first), slice(first, first + count))
    shard = PagedKVCache(20, 8, 2, 64, "f32", layers=2, value_dim=32)
    own = shard.import_(*parts, first_head=2)
    again = PagedKVCache(20, 5, 4, 64, "f32", layers=2, value_dim=32)
    halves = whole.export(sequence, heads=(0, 2)), shard.export(own, first_head=2)
    assert same(whole, sequence, again, again.import_(*halves))


def test_what_is_refused_changes_nothing():
    source, sequence = filled(4)
    about, tensors = source.export(sequence)
    target = PagedKVCache(20, 4, 4, 64, "f32", layers=2, value_dim=32)
    altered = dict(tensors, k=tensors["k"].clone())
    altered["k"][0, 3, 1, 7] += 1
    with pytest.raises(InvalidArgument, match="k with another checksum"):
        target.import_((about, altered))
    with pytest.raises(InvalidArgument, match="nothing of layer 1, head 0"):
        target.import_(source.export(sequence, layers=(0, 1)))
    with pytest.raises(InvalidArgument, match="dtype 'f32', expected 'f16'"):
        PagedKVCache(20, 4, 4, 64, "f16", layers=2, value_dim=32).import_((about, tensors))
    with pytest.raises(CacheFull):
        PagedKVCache(3, 4, 4, 64, "f32", layers=2, value_dim=32).import_((about, tensors))
    with pytest.raises(InvalidArgument, match="heads: got"):
        source.export(sequence, heads=(2, 9))
    assert target.stats().used == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", 38), ("tokens", -1), ("tokens", "37"), ("known", 38), ("known", None), ("layers", [0, 3]),
        ("layers", [1, 0]), ("layers", 2), ("heads", [0, 10**30]), ("heads", [-1, 3]), ("heads", [0, 3]),
        ("checksums", None), ("checksums", {}), ("head_dim", 10**40), ("dtype", None),
    ],
)  # fmt: skip
def test_a_damaged_manifest_is_refused(field, value):
    source, sequence = filled(4)
    about, tensors = source.export(sequence)
    target = PagedKVCache(20, 4, 4, 64, "f32", layers=2, value_dim=32)
    with pytest.raises(InvalidArgument, match=r"parts\[0\]|sequence"):
        target.import_((about | {field: value}, tensors))
    with pytest.raises(InvalidArgument, match=field):
        target.import_(({name: x for name, x in about.items() if name != field}, tensors))
    assert target.stats().used == 0


def test_truncated_and_missing_tensors_are_refused():
    source, sequence = filled(4)
    about, tensors = source.export(sequence)
    target = PagedKVCache(20, 4, 4, 64, "f32", layers=2, value_dim=32)
    less = {name: x for name, x in tensors.items() if name != "v"}
    for wrong in (less, tensors | {"k": tensors["k"][:, :-1]}, tensors | {"v": tensors["v"].half()}, {}):
        with pytest.raises(InvalidArgument, match="as its manifest says"):
            target.import_((about, wrong))
    for wrong in (tensors["k"].to_sparse(), tensors["k"].to("meta")):
        with pytest.raises(InvalidArgument, match="expected a dense tensor"):
            target.import_((about, tensors | {"k": wrong}))
    for part in (about, (about,), (about, None), (None, tensors)):
        with pytest.raises(InvalidArgument, match=r"parts\[0\]"):
            target.import_(part)
    with pytest.raises(CacheFull, match="10000000000000000000000"):
        target.import_((about | {"tokens": 10**22}, tensors))
    assert target.stats().used == 0


def _damaged_header(which):
    """What rank 1 says of a header that rank 0 has made up."""
    cache, sequence = filled(4)
    if dist.get_rank() == 0:
        about, tensors = cache.export(sequence)
        shapes = {name: [list(x.shape), str(x.dtype).removeprefix("torch.")] for name, x in tensors.items()}
        header = {"about": about, "tensors": shapes}
        if which == "tokens":
            header["about"] = about | {"tokens": 10**15}
        elif which == "shapes":
            header["tensors"] = shapes | {"k": [[10**12], "float32"]}
        text = json.dumps(header).encode()[: 20 if which == "cut" else None]
        size = 2**62 if which == "size" else len(text)
        dist.send(torch.tensor([size]), 1)
        if which != "size":
            dist.send(torch.tensor(list(text), dtype=torch.uint8), 1)
            accepted = torch.ones(1, dtype=torch.int64)
            dist.recv(accepted, 1)
            assert not accepted  # the sender is told, and sends no more
        return ""
    try:
        distributed.receive_sequence(cache, 0)
    except (InvalidArgument, CacheFull) as error:
        return str(error)
    return "taken"


def test_damaged_headers_are_refused_before_memory_is_taken():
    expected = {"size": "a header of 4611686018427387904 bytes", "cut": "cannot be read"}
    expected |= {"tokens": "does not fit", "shapes": "as its manifest says"}
    with Pool(2) as pool:
        for which, words in expected.items():
            assert words in pool(_damaged_header, which)[1]


def _handed_over(dtype, group):
    """Rank 0 prefills, rank 1 decodes: what each of them would give."""
    cache, sequence = filled(4, dtype, group)
    q = torch.randn(1, 8, 1, 64, generator=torch.Generator().manual_seed(1))
    if dist.get_rank() == 0:
        distributed.send_sequence(cache, sequence, 1)
    else:
        here = PagedKVCache(50, 16, 4, 64, dtype, layers=2, value_dim=32, group=group)
        own = distributed.receive_sequence(here, 0)
        outs = [c.attend([s], q, layer=1, backend="torch") for c, s in ((cache, sequence), (here, own))]
        return torch.equal(*outs)
    return True


def _read(about, tensors):
    """Of memory that two processes share."""
    target = PagedKVCache(50, 16, 4, 64, "f32", layers=2, value_dim=32)
    return target.keys(target.import_((about, tensors)), 1).sum().item()


def test_prefill_in_one_process_and_decode_in_another():
    with Pool(2) as pool:
        for dtype, group in STORED:
            assert pool(_handed_over, dtype, group) == [True, True]
        cache, sequence = filled(4)
        about, tensors = cache.export(sequence)
        shared = {name: x.share_memory_() for name, x in tensors.items()}
        assert pool(_read, about, shared) == [cache.keys(sequence, 1).sum().item()] * 2


def _refused_then_taken():
    """A sequence that the receiver's cache cannot hold, and after it one that it can: nothing of the first is left."""
    outcomes = []
    cache, sequence = filled(4)
    for target in (
        PagedKVCache(50, 16, 4, 64, "f16", layers=2, value_dim=32),
        PagedKVCache(1, 16, 4, 64, "f32", layers=2, value_dim=32),
        PagedKVCache(50, 16, 4, 64, "f32", layers=2, value_dim=32),
    ):
        try:
            if dist.get_rank() == 0:
                distributed.send_sequence(cache, sequence, 1)
                outcomes.append("fine")
            else:
                outcomes.append(
                    "fine" if same(cache, sequence, target, distributed.receive_sequence(target, 0)) else "wrong"
                )
        except (InvalidArgument, CacheFull) as error:
            outcomes.append(str(error).partition(" ")[0])
    for peer in (2, -1, dist.get_rank(), True, "1"):
        with pytest.raises(InvalidArgument, match="another rank of 2"):
            distributed.send_sequence(cache, sequence, peer)
        with pytest.raises(InvalidArgument, match="another rank of 2"):
            distributed.receive_sequence(cache, peer)
    return outcomes


def test_a_refused_sequence_leaves_nothing_under_way():
    with Pool(2) as pool:
        assert pool(_refused_then_taken) == [["to:", "to:", "fine"], ["sender", "a", "fine"]]
