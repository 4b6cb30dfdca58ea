"""Saved caches: what comes back, and what is refused."""

import json
import os
import random

import pytest
import torch
from safetensors.torch import load_file

from tilewise import CacheFull, InvalidArgument, KVCache, PagedKVCache
from tilewise.kv_cache.serialization import files

TYPES = ["f32", "f16", "bf16", "fp8_e4m3", "int8", "int4"]


def rows(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("ring", [False, True])
def test_rows_come_back(tmp_path, dtype, ring):
    cache = KVCache(3, 2, 12, 64, dtype, v_dtype="int8", value_dim=32, group=32, rotate=dtype == "int4", ring=ring)
    cache.append(rows(3, 2, 9, 64), rows(3, 2, 9, 32, seed=1), [9, 0, 4])
    if ring:
        cache.append(rows(3, 2, 9, 64, seed=2), rows(3, 2, 9, 32, seed=3))
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    again = KVCache.load(path)
    q = rows(3, 4, 1, 64, seed=4)
    assert again.lengths.equal(cache.lengths)
    assert again.attend(q).equal(cache.attend(q))
    for one in (cache, again):
        one.append(rows(3, 2, 1, 64, seed=5), rows(3, 2, 1, 32, seed=6))
    assert again.attend(q).equal(cache.attend(q))
    assert [again.keys(b).equal(cache.keys(b)) for b in range(3)] == [True] * 3


@pytest.mark.parametrize("dtype", TYPES)
def test_pages_come_back(tmp_path, dtype):
    cache = PagedKVCache(30, 4, 2, 64, dtype, layers=2, v_dtype="f16", group=32)

    def put(one, sequences, counts, seed, tokens=None):
        batch = one.extend(sequences, counts, tokens)
        for layer in range(2):
            batch.write(*rows(2, batch.tokens, 2, 64, seed=seed + layer), layer=layer)

    a, gone, b = cache.create(), cache.create(), cache.create()
    put(cache, [a, gone, b], [10, 8, 3], 0, tokens=range(21))
    fork = cache.fork(a)
    cache.free(gone)  # its pages are kept
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    again = PagedKVCache.load(path)
    assert again.stats() == cache.stats()
    q = rows(3, 4, 1, 64, seed=4)
    for one in (cache, again):  # what follows is the same, new ids, copies and prefixes included
        put(one, [a, fork, b], [1, 1, 1], 7)
        new, held = one.prefix_match(range(10, 18))
        assert held == 8
        assert one.prefix_match(range(8))[1] == 8
        assert new == fork + 1
        put(one, [new], [2], 9, tokens=[5, 6])
    assert again.stats() == cache.stats()
    for layer in range(2):
        assert again.attend([a, fork, b], q, layer=layer).equal(cache.attend([a, fork, b], q, layer=layer))
        assert again.keys(new, layer).equal(cache.keys(new, layer))
    again.free([a, fork, b, new, new + 1])
    assert again.stats().used == 0
    assert again.stats().free + again.stats().kept == 30


@pytest.mark.parametrize("page_size", [1, 4, 7])
def test_a_prefix_goes_into_another_cache(tmp_path, page_size):
    cache = PagedKVCache(30, 4, 2, 64, "int4", layers=2, rotate=True)
    a = cache.create()
    batch = cache.extend(a, 10, tokens=range(10))
    for layer in range(2):
        batch.write(*rows(2, 10, 2, 64, seed=layer), layer=layer)
    rest = cache.extend(a, 1)  # its id is not known
    for layer in range(2):
        rest.write(*rows(2, 1, 2, 64, seed=9), layer=layer)
    path = tmp_path / "prefix.safetensors"
    cache.save_prefix(path, a)
    other = PagedKVCache(30, page_size, 2, 64, "int4", layers=2, rotate=True)
    b = other.load_prefix(path)
    assert other.length(b) == 11
    for layer in range(2):
        assert other.keys(b, layer).equal(cache.keys(a, layer))
        assert other.values(b, layer).equal(cache.values(a, layer))
    assert other.prefix_match(range(10))[1] == 10 // page_size * page_size
    small = PagedKVCache(1, 4, 2, 64, "int4", layers=2, rotate=True)
    with pytest.raises(CacheFull):
        small.load_prefix(path)
    assert small.stats().free == 1
    assert small.stats().sequences == 0
    with pytest.raises(InvalidArgument, match="rotate True, expected False, as the cache has"):
        PagedKVCache(30, 4, 2, 64, "int4", layers=2).load_prefix(path)


@pytest.fixture
def saved(tmp_path):
    cache = KVCache(2, 2, 8, 32, "int8", group=32)
    cache.append(*rows(2, 2, 2, 5, 32))
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    return path


def test_a_file_cut_off_anywhere_is_refused(saved):
    whole = saved.read_bytes()
    for size in [*range(40), *random.Random(0).sample(range(40, len(whole)), 60), len(whole) - 1]:
        saved.write_bytes(whole[:size])
        with pytest.raises(InvalidArgument, match="path: got"):
            KVCache.load(saved)
    saved.write_bytes(whole + b"x")
    with pytest.raises(InvalidArgument, match=f"got .*{len(whole) + 1} bytes, expected {len(whole)}"):
        KVCache.load(saved)


def test_an_altered_byte_is_refused_wherever_it_is(saved):
    whole = saved.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    places = [*range(8), *random.Random(0).sample(range(8, len(whole)), 150)]
    for place in places:
        changed = bytearray(whole)
        changed[place] ^= 1
        if 8 <= place < 8 + length and bytes(changed[8 : 8 + length]).strip() == whole[8 : 8 + length].strip():
            continue  # a blank after the header
        saved.write_bytes(changed)
        with pytest.raises(InvalidArgument, match="path: got"):
            KVCache.load(saved)
    saved.write_bytes(whole)
    KVCache.load(saved)


def reseal(path, change):
    """A file with another header and a digest that fits it."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    meta = entries.pop("__metadata__")
    body = change(meta, entries, data[8 + length :])
    meta.pop("digest")
    digest = files._digest(meta, entries)
    digest.update(body)
    header = json.dumps({"__metadata__": meta | {"digest": digest.hexdigest()}, **entries}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + body)


def test_shape_dtype_version_and_kind_are_checked(saved):
    def keep(meta, entries, body):
        return body

    def version(meta, entries, body):
        meta["version"] = "2"
        return body

    def shape(meta, entries, body):
        entries["k"]["shape"] = [2, 2, 32, 5]
        return body

    def dtype(meta, entries, body):
        entries["k"]["dtype"] = "U8"
        return body

    def more(meta, entries, body):
        end = entries["first"]["data_offsets"][1]
        entries["extra"] = {"dtype": "U8", "shape": [1], "data_offsets": [end, end + 1]}
        return body + b"x"

    whole = saved.read_bytes()
    reseal(saved, keep)
    KVCache.load(saved)
    for change, message in (
        (version, "version '2', expected version '1'"),
        (shape, r"k \(2, 2, 32, 5\) torch.int8, expected \(2, 2, 5, 32\)"),
        (dtype, r"k \(2, 2, 5, 32\) torch.uint8"), (more, "tensors .*extra"),
    ):  # fmt: skip
        saved.write_bytes(whole)
        reseal(saved, change)
        with pytest.raises(InvalidArgument, match=message):
            KVCache.load(saved)
    saved.write_bytes(whole)
    with pytest.raises(InvalidArgument, match="kind 'KVCache', expected kind 'PagedKVCache'"):
        PagedKVCache.load(saved)


def test_any_reader_of_safetensors_reads_it(saved):
    tensors = load_file(saved)
    cache = KVCache.load(saved)
    assert tensors["k"].equal(cache.store.k.data[:, :, :5])
    assert tensors["lengths"].tolist() == [5, 5]


def test_slots_that_hold_nothing_are_not_written(tmp_path):
    """Memory that was never a token's does not get into a file."""
    cache = KVCache(2, 1, 8, 8, "f32")
    cache.store.k.data.fill_(7.25)
    x = torch.zeros(2, 1, 5, 8)
    cache.append(x, x, [5, 2])
    cache.save(tmp_path / "x")
    assert torch.tensor(7.25).numpy().tobytes() * 2 not in (tmp_path / "x").read_bytes()


def test_an_earlier_file_stays_if_writing_fails(saved, monkeypatch):
    whole = saved.read_bytes()
    monkeypatch.setattr(files.Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("no room")))
    with pytest.raises(OSError, match="no room"):
        KVCache.load(saved).save(saved)
    assert saved.read_bytes() == whole
    assert list(saved.parent.iterdir()) == [saved]


WRONG_PATHS = [None, 3, [], b"ab", "", "a\0b", "\ud800"]


@pytest.mark.parametrize("path", WRONG_PATHS, ids=repr)
def test_what_is_no_path_is_refused(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows_, pages = KVCache(1, 1, 4, 8), PagedKVCache(2, 4, 1, 8)
    sequence = pages.create()
    for call in (
        rows_.save, KVCache.load, pages.save, PagedKVCache.load, pages.load_prefix,
        lambda path: pages.save_prefix(path, sequence),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=r"^path: got"):
            call(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_only_plain_files_are_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache, pipe, link, folder = KVCache(1, 1, 4, 8), tmp_path / "pipe", tmp_path / "link", tmp_path / "folder"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    folder.mkdir()
    for path in (pipe, link, folder, ".", ".."):
        with pytest.raises(InvalidArgument, match=r"^path: got .*plain file, which is replaced"):
            cache.save(path)
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert len(list(tmp_path.iterdir())) == 3
    with pytest.raises(InvalidArgument, match="not a regular file"):
        KVCache.load(pipe)
    with pytest.raises(IsADirectoryError):
        KVCache.load(folder)


def test_a_missing_folder_is_told_by_the_path_that_was_given(tmp_path):
    path = tmp_path / "missing" / "cache"
    with pytest.raises(FileNotFoundError) as caught:
        KVCache(1, 1, 4, 8).save(path)
    assert caught.value.filename == str(path)
    assert ".part" not in str(caught.value)
    with pytest.raises(FileNotFoundError):
        KVCache.load(path)
