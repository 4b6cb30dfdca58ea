"""Files of caches under attack: cut, altered, forged, and disks and processes that fail while they are written.

Whatever is done to a file, loading it refuses with a word or gives what was saved; never a crash, never other data. A
file that was there stays whole until the next one is.
"""

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tilewise import InvalidArgument, KVCache, PagedKVCache
from tilewise.kv_cache import formats
from tilewise.kv_cache.serialization import files


def rows(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2


def a_cache(seed=0):
    cache = KVCache(2, 1, 4, 8, "int8", group=32, value_dim=4)
    cache.append(rows(2, 1, 3, 8, seed=seed), rows(2, 1, 3, 4, seed=seed + 1), [3, 2])
    return cache


def a_ring():
    cache = KVCache(1, 1, 3, 8, "f16", ring=True)
    cache.append(*rows(2, 1, 1, 5, 8))
    return cache


def some_pages():
    cache = PagedKVCache(6, 2, 1, 8, "f32")
    a, gone = cache.create(), cache.create()
    cache.append([a, gone], *rows(2, 2, 1, 3, 8), tokens=range(6))
    b = cache.fork(a)
    cache.append([b], *rows(2, 1, 1, 1, 8, seed=3), tokens=[9])
    cache.free(gone)
    return cache


class Kind:
    """A way to save and to load, and to tell what came back."""

    def __init__(self, kind):
        self.kind = kind

    def save(self, path):
        cache = {"rows": a_cache, "ring": a_ring}.get(self.kind, some_pages)()
        if self.kind == "prefix":
            cache.save_prefix(path, 2)
        else:
            cache.save(path)

    def load(self, path):
        """What is in the file, as bytes: all that can be seen of it."""
        if self.kind in ("rows", "ring"):
            cache = KVCache.load(path)
            seen = [cache.lengths, *(part(b) for b in range(cache.batch) for part in (cache.keys, cache.values))]
        elif self.kind == "pages":
            cache = PagedKVCache.load(path)
            seen = [part(s) for s in (0, 2) for part in (cache.keys, cache.values)]
            seen += [torch.tensor([cache.prefix_match(ids)[1] for ids in (range(3), range(3, 6), [0, 1, 2, 9])])]
        else:
            cache = PagedKVCache(6, 2, 1, 8, "f32")
            number = cache.load_prefix(path)
            seen = [cache.keys(number), cache.values(number), torch.tensor(cache.prefix_match([0, 1, 2, 9])[1])]
        return [x.numpy().tobytes() for x in seen]


@pytest.fixture(params=["rows", "ring", "pages", "prefix"])
def kind(request):
    return Kind(request.param)


@pytest.fixture
def saved(kind, tmp_path):
    """A small file, its bytes, and what it holds."""
    path = tmp_path / "cache"
    kind.save(path)
    return path, path.read_bytes(), kind.load(path)


def test_cut_off_at_every_byte(kind, saved):
    path, whole, _ = saved
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(InvalidArgument, match="path: got"):
            kind.load(path)


def same_or_refused(kind, path, contents):
    """Whether a file still holds what was saved; if not, it must be refused by its name."""
    try:
        loaded = kind.load(path)
    except InvalidArgument as error:
        if error.argument != "path":
            raise
        return False
    assert loaded == contents
    return True


@pytest.mark.parametrize("change", [1, 0x20, 0xFF])
def test_every_byte_altered(kind, saved, change):
    path, whole, contents = saved
    accepted = 0
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= change
        path.write_bytes(data)
        accepted += same_or_refused(kind, path, contents)
    header = int.from_bytes(whole[:8], "little")
    assert accepted <= len(whole[8 : 8 + header]) - len(whole[8 : 8 + header].rstrip())  # blanks after the header


def test_every_range_removed_zeroed_or_moved(kind, saved):
    path, whole, contents = saved
    step = max(1, len(whole) // 40)
    for start in range(0, len(whole), step):
        for size in (1, 7, 64, len(whole) // 2):
            part = whole[start : start + size]
            for data in (
                whole[:start] + whole[start + size :], whole[:start] + bytes(len(part)) + whole[start + size :],
                whole[start:] + whole[:start], whole[:start] + part + whole[start:],
            ):  # fmt: skip
                if data == whole:
                    continue
                path.write_bytes(data)
                same_or_refused(kind, path, contents)


def forged(path, whole, change, digest=True):
    """Writes a file whose header `change` has altered, with a digest that agrees with it."""
    length = int.from_bytes(whole[:8], "little")
    entries = json.loads(whole[8 : 8 + length])
    meta = entries.pop("__metadata__")
    about = json.loads(meta["about"])
    body = bytearray(whole[8 + length :])
    body = change(about, entries, body, meta) or body
    if "about" in meta and meta["about"] is not None and not meta.pop("raw", False):
        meta["about"] = json.dumps(about, sort_keys=True)
    if digest:
        meta.pop("digest", None)
        sum_ = files._digest(meta, entries)
        sum_.update(bytes(body))
        meta["digest"] = sum_.hexdigest()
    header = json.dumps({"__metadata__": meta, **entries}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(body))


def ints_of(entries, body, name):
    """An array over a tensor of ints in the body."""
    begin, end = entries[name]["data_offsets"]
    dtype = {"I32": np.int32, "I64": np.int64}[entries[name]["dtype"]]
    return np.frombuffer(memoryview(body)[begin:end], dtype=dtype)


@pytest.mark.parametrize(
    ("lengths", "first"),
    [([5, 2], None), ([-1, 2], None), ([3, -2147483648], None), ([2, 2], None), ([3, 2], [1, 0]), ([4, 2], None),
     ([3, 2], [0, -1]), ([2147483647, 2], None)],
)  # fmt: skip
def test_lengths_that_the_rows_do_not_have(tmp_path, lengths, first):
    path = tmp_path / "cache"
    a_cache().save(path)

    def change(about, entries, body, meta):
        ints_of(entries, body, "lengths")[:] = lengths
        if first:
            ints_of(entries, body, "first")[:] = first

    forged(path, path.read_bytes(), change)
    with pytest.raises(InvalidArgument, match=r"path: got .*(row \d with tokens .*|slots), expected"):
        KVCache.load(path)


@pytest.mark.parametrize(("length", "first"), [(5, 1), (5, -1), (5, 6), (-1, 0), (2147483647, 0)])
def test_lengths_that_a_ring_does_not_have(tmp_path, length, first):
    path = tmp_path / "cache"
    a_ring().save(path)

    def change(about, entries, body, meta):
        ints_of(entries, body, "lengths")[:] = length
        ints_of(entries, body, "first")[:] = first

    forged(path, path.read_bytes(), change)
    with pytest.raises(InvalidArgument, match=r"path: got .*row 0 with tokens"):
        KVCache.load(path)


PAGE_LISTS = [
    ("length", 0, 100), ("length", 0, -1), ("length", 1, 5), ("known", 0, 4), ("known", 0, -1), ("depth", 0, 2),
    ("depth", 0, -1), ("table", (0, 0), 77), ("table", (0, 0), -1), ("table", (0, 1), 0), ("sequences", 1, 0),
    ("sequences", 0, -5), ("sequences", 1, 1000), ("node", 0, 0), ("nodes", (0, 0), 0), ("nodes", (0, 0), -3),
    ("nodes", (1, 1), 500), ("nodes", (0, 2), 77), ("nodes", (0, 2), -1), ("nodes", (1, 2), 0), ("nodes", (1, 0), 1),
    ("nodes", (0, 0), 2**62 + 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "place", "value"), PAGE_LISTS)
def test_lists_of_pages_that_do_not_agree(tmp_path, name, place, value):
    path = tmp_path / "cache"
    some_pages().save(path)

    def change(about, entries, body, meta):
        ints_of(entries, body, name).reshape(entries[name]["shape"])[place] = value

    forged(path, path.read_bytes(), change)
    with pytest.raises(InvalidArgument, match=r"path: got .*, expected sequences and pages that agree"):
        PagedKVCache.load(path)


FUZZ = """
import sys, torch
sys.path.insert(0, sys.argv[3])
from pathlib import Path
from test_cache_faults import forged, ints_of
from tilewise import InvalidArgument, KVCache, PagedKVCache

path, kind = Path(sys.argv[1]), sys.argv[2]
whole, loaded, refused = path.read_bytes(), 0, 0
names = ("lengths", "first") if kind == "KVCache" else (
    "ids", "table", "sequences", "length", "known", "node", "depth", "nodes")
sizes = {}
def look(about, entries, body, meta):
    sizes.update({name: len(ints_of(entries, body, name)) for name in names})
forged(path, whole, look)
for name, size in sizes.items():
    for i in range(size):
        for value in (-2**31, -1, 0, 1, 2, 3, 5, 100, 2**31 - 1):
            def change(about, entries, body, meta):
                ints_of(entries, body, name)[i] = value
            forged(path, whole, change)
            try:
                if kind == "KVCache":
                    cache = KVCache.load(path)
                    cache.attend(torch.zeros(cache.batch, 2, 1, 8))
                    cache.reset()
                    cache.append(*(torch.zeros(cache.batch, 1, 1, n) for n in (8, cache.v_format.width)))
                else:
                    cache = PagedKVCache.load(path)
                    live = list(cache.store.sequences.slot_of)
                    cache.attend(live, torch.zeros(len(live), 2, 1, 8))
                    cache.prefix_match(range(4))
                    cache.free(live)
                    number = cache.create()
                    room = cache.stats().free * cache.page_size
                    cache.append(number, *torch.zeros(2, room, 1, 8), counts=[room])
                loaded += 1
            except InvalidArgument as error:
                assert error.argument == "path", error
                refused += 1
print(loaded, refused)
"""


@pytest.mark.parametrize("kind", ["KVCache", "PagedKVCache"])
def test_any_numbers_with_a_digest_that_agrees(tmp_path, kind):
    """Either refused, or a cache that can be used: in a process of its own, which must not die."""
    path = tmp_path / "cache"
    (a_cache() if kind == "KVCache" else some_pages()).save(path)
    command = [sys.executable, "-c", FUZZ, str(path), kind, os.path.dirname(__file__)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    loaded, refused = map(int, run.stdout.split())
    assert loaded > 0
    assert refused > loaded / 4


def about_(name, value):
    def change(about, entries, body, meta):
        about[name] = value

    return change


def entry_(**fields):
    def change(about, entries, body, meta):
        entries["lengths"].update(fields)

    return change


def raw_about(text):
    def change(about, entries, body, meta):
        meta.update(about=text, raw=True)

    return change


def drop(name):
    def change(about, entries, body, meta):
        about.pop(name) if name in about else entries.pop(name)

    return change


HOSTILE = {
    "no kv_heads": drop("kv_heads"), "no slots": drop("slots"), "no tensor": drop("first"),
    "more": about_("device", "cuda"), "kv_heads text": about_("kv_heads", "1"),
    "kv_heads null": about_("kv_heads", None),
    "kv_heads bool": about_("kv_heads", True), "kv_heads list": about_("kv_heads", [1]),
    "kv_heads 0": about_("kv_heads", 0), "batch negative": about_("batch", -2), "batch float": about_("batch", 2.0),
    "batch huge": about_("batch", 2**70), "capacity 0": about_("capacity", 0),
    "capacity huge": about_("capacity", 2**31 - 1),
    "capacity larger": about_("capacity", 2**40), "slots negative": about_("slots", -1), "slots": about_("slots", 4),
    "dtype": about_("dtype", "object"), "dtype list": about_("dtype", ["f32"]), "group": about_("group", 33),
    "head_dim": about_("head_dim", 10**9), "ring text": about_("ring", "yes"), "rotate": about_("rotate", 1),
    "rotated 4": about_("rotate", True), "NaN": about_("batch", float("nan")),
    "about a list": raw_about("[]"), "about a number": raw_about("7"), "about nothing": raw_about(""),
    "about no JSON": raw_about("{"), "about deep": raw_about("[" * 100_000),
    "about twice": raw_about('{"a": 1, "a": 2}'), "tensor dtype": entry_(dtype="I128"),
    "tensor dtype list": entry_(dtype=["I32"]), "tensor dtype null": entry_(dtype=None),
    "shape text": entry_(shape="2"), "shape negative": entry_(shape=[-2]), "shape bool": entry_(shape=[True, True]),
    "shape float": entry_(shape=[2.0]), "shape null": entry_(shape=None), "shape nested": entry_(shape=[[2]]),
    "shape huge": entry_(shape=[2**40, 2**40]), "shape zero": entry_(shape=[0, 2**63]),
    "shape two negatives": entry_(shape=[-1, -2]), "offsets text": entry_(data_offsets="ab"),
    "offsets one": entry_(data_offsets=[0]), "offsets backwards": entry_(data_offsets=[8, 0]),
    "offsets far": entry_(data_offsets=[2**60, 2**60 + 8]), "offsets negative": entry_(data_offsets=[-8, 0]),
    "another field": entry_(more=1),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_forged_headers(tmp_path, monkeypatch, name):
    path = tmp_path / "cache"
    a_cache().save(path)
    forged(path, path.read_bytes(), HOSTILE[name])
    monkeypatch.setattr(formats.RowFormat, "empty", lambda *_, **__: pytest.fail("memory was taken"))
    with pytest.raises(InvalidArgument, match="path: got"):
        KVCache.load(path)


@pytest.mark.parametrize(
    "header",
    [b"", b"{}", b"[]", b"7", b"null", b'"x"', b"\xff\xfe", b"{" * 9000, b"[" * 100_000, b'{"__metadata__": 3}',
     b'{"__metadata__": {}}', b'{"__metadata__": {"kind": 7}}', b'{"__metadata__": null, "a": 1}',
     b'{"__metadata__": {}, "__metadata__": {}}', b'{"a": []}', b"1" * 10_000, b"NaN", '{"a": 1}'.encode("utf-16")],
    ids=lambda header: repr(header[:30]),
)  # fmt: skip
def test_headers_that_are_none(tmp_path, header):
    path = tmp_path / "cache"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    for load in (KVCache.load, PagedKVCache.load, PagedKVCache(2, 4, 1, 8, "f32").load_prefix):
        with pytest.raises(InvalidArgument, match="path: got"):
            load(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_pages", 2**31 - 1), ("num_pages", 3), ("num_pages", -1), ("layers", 2**62), ("layers", 0), ("page_size", 0),
     ("page_size", 2**60), ("created", 2), ("created", -1), ("created", 2**63), ("kept", 0), ("kept", 7), ("kept", -1)],
)  # fmt: skip
def test_forged_pages(tmp_path, monkeypatch, name, value):
    path = tmp_path / "cache"
    some_pages().save(path)
    forged(path, path.read_bytes(), about_(name, value))
    monkeypatch.setattr(formats.RowFormat, "empty", lambda *_, **__: pytest.fail("memory was taken"))
    if name == "num_pages" and value > 0:  # as little as can be: of the machine's memory
        monkeypatch.setattr("tilewise.kv_cache.serialization.load._memory", lambda _: 1 << 30)
    with pytest.raises(InvalidArgument, match="path: got"):
        PagedKVCache.load(path)


def test_forged_layers_of_a_cache_without_pages(tmp_path):
    """They take no memory, but each sequence has a number for every layer."""
    path = tmp_path / "cache"
    PagedKVCache(0, 2, 1, 8, "f32").save(path)
    forged(path, path.read_bytes(), about_("layers", 2**27))
    with pytest.raises(InvalidArgument, match="layers: got 134217728"):
        PagedKVCache.load(path)


@pytest.mark.parametrize(
    ("name", "value"), [("tokens", -1), ("tokens", 2**40), ("tokens", 5), ("known", 5), ("known", -1)]
)
def test_forged_prefixes(tmp_path, name, value):
    path = tmp_path / "cache"
    some_pages().save_prefix(path, 2)
    forged(path, path.read_bytes(), about_(name, value))
    cache = PagedKVCache(6, 2, 1, 8, "f32")
    with pytest.raises(InvalidArgument, match="path: got"):
        cache.load_prefix(path)
    assert (cache.stats().sequences, cache.stats().free) == (0, 6)


def test_memory_that_cannot_be_had_is_said(tmp_path, monkeypatch):
    path = tmp_path / "cache"
    a_cache().save(path)

    def none(*_, **__):
        raise RuntimeError("you tried to allocate")

    monkeypatch.setattr(formats.RowFormat, "empty", none)
    with pytest.raises(InvalidArgument, match=r"path: got .*more than fits in memory \(you tried"):
        KVCache.load(path)


@pytest.mark.parametrize(
    "cache",
    [KVCache(2, 1, 4, 8, "f32"), KVCache(0, 1, 4, 8, "int8"), KVCache(2, 1, 4, 8, "fp8_e4m3", ring=True),
     PagedKVCache(4, 2, 1, 8, "f32"), PagedKVCache(0, 2, 1, 8, "int4")],
    ids=repr,
)  # fmt: skip
def test_empty_caches_come_back(tmp_path, cache):
    cache.save(tmp_path / "cache")
    assert repr(type(cache).load(tmp_path / "cache")) == repr(cache)


def test_sequences_without_ids_come_back(tmp_path):
    cache = PagedKVCache(4, 2, 1, 8, "f32")
    a, b = cache.create(), cache.create()
    cache.append(a, *rows(2, 3, 1, 8))
    cache.save(tmp_path / "cache")
    again = PagedKVCache.load(tmp_path / "cache")
    assert again.keys(a).equal(cache.keys(a))
    assert again.length(b) == 0
    for number in (a, b):
        cache.save_prefix(tmp_path / "prefix", number)
        other = PagedKVCache(4, 2, 1, 8, "f32")
        assert other.keys(other.load_prefix(tmp_path / "prefix")).equal(cache.keys(number))


def test_slots_of_pages_that_hold_nothing_are_not_written(tmp_path):
    cache = PagedKVCache(4, 4, 1, 8, "f32")
    cache.store.k.data.fill_(7.25)
    freed, a = cache.create(), cache.create()
    cache.append([freed, a], *torch.zeros(2, 2, 1, 3, 8), tokens=[123456789] * 6)
    cache.free(freed)
    cache.truncate(a, 1)
    cache.append(a, *torch.zeros(2, 1, 1, 8))
    cache.save(tmp_path / "cache")
    data = (tmp_path / "cache").read_bytes()
    assert torch.tensor(7.25).numpy().tobytes() * 2 not in data
    assert data.count((123456789).to_bytes(8, "little")) == 1


# While a file is written


class Full:
    """A file on a disk that has room for so many bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, data):
        self.file.write(bytes(data)[: self.room])
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_what_was_there(kind, saved, monkeypatch):
    path, whole, _ = saved
    for room in range(0, len(whole), max(1, len(whole) // 50)):
        monkeypatch.setattr(files, "open", lambda *a, room=room: Full(os.fdopen(*a), room), raising=False)
        with pytest.raises(OSError, match="No space left"):
            kind.save(path)
        assert path.read_bytes() == whole
        assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("where", ["open", "fsync", "replace"])
def test_a_disk_that_refuses_leaves_what_was_there(kind, saved, monkeypatch, where):
    path, whole, _ = saved

    def refuse(*_):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(files.Path if where == "replace" else files.os, where, refuse)
    with pytest.raises(PermissionError):
        kind.save(path)
    monkeypatch.undo()
    assert path.read_bytes() == whole
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.skipif(os.name == "nt", reason="folders cannot be opened there")
def test_a_file_is_on_disk_before_its_name_is(kind, saved, monkeypatch):
    """After a power failure the name must not lead to a file without contents; the name itself is in the folder."""
    path, _, _ = saved
    sync, replace, done = os.fsync, files.Path.replace, []

    def synced(number):
        done.append("folder" if stat.S_ISDIR(os.fstat(number).st_mode) else os.fstat(number).st_size)
        sync(number)

    monkeypatch.setattr(files.os, "fsync", synced)
    monkeypatch.setattr(files.Path, "replace", lambda *args: (done.append("name"), replace(*args)))
    kind.save(path)
    assert done == [path.stat().st_size, "name", "folder"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(kind, saved):
    path, whole, _ = saved
    path.parent.chmod(0o500)
    try:
        with pytest.raises(PermissionError):
            kind.save(path)
        assert path.read_bytes() == whole
    finally:
        path.parent.chmod(0o700)


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[3])
from test_cache_faults import Full, a_cache
from tilewise.kv_cache.serialization import files

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

class Dying(Full):
    def write(self, data):
        try:
            super().write(data)
        except OSError:
            self.file.flush()
            die()

path, where = sys.argv[1:3]
if where.isdigit():
    files.open = lambda *a: Dying(open(*a), int(where))
elif where == "replaced":
    replace = files.Path.replace
    files.Path.replace = lambda *a: (replace(*a), die())
else:
    setattr(files.Path if where == "replace" else files.os, where, die)
a_cache(seed=7).save(path)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal here")
@pytest.mark.parametrize("where", ["0", "8", "500", "fsync", "replace", "replaced"])
def test_a_process_that_is_killed_leaves_a_whole_file(tmp_path, where):
    path, kind = tmp_path / "cache", Kind("rows")
    kind.save(path)
    old = kind.load(path)
    a_cache(seed=7).save(tmp_path / "new")
    new = kind.load(tmp_path / "new")
    command = [sys.executable, "-c", KILLED, str(path), where, os.path.dirname(__file__)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == -signal.SIGKILL, run.stderr[-2000:]
    assert kind.load(path) == (new if where == "replaced" else old)
    a_cache(seed=7).save(path)  # what it left is in nobody's way
    assert kind.load(path) == new


def test_many_threads_save_to_one_path(tmp_path):
    path, start = tmp_path / "cache", threading.Barrier(8)
    caches = [a_cache(seed=seed) for seed in range(8)]

    def save(cache):
        start.wait()
        for _ in range(5):
            cache.save(path)
            KVCache.load(path)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(save, caches))
    assert any(KVCache.load(path).keys(0).equal(cache.keys(0)) for cache in caches)
    assert os.listdir(tmp_path) == ["cache"]


@pytest.mark.skipif(not hasattr(os, "symlink") or sys.platform == "win32", reason="no links here")
def test_links_are_not_followed(tmp_path, monkeypatch):
    victim, path = tmp_path / "victim", tmp_path / "cache"
    victim.write_text("precious")
    for name in (".cache.part", ".known.part"):
        (tmp_path / name).symlink_to(victim)
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "known")
    with pytest.raises(FileExistsError):
        a_cache().save(path)  # even a name that was guessed
    monkeypatch.undo()
    a_cache().save(path)
    path.unlink()
    path.symlink_to(victim)
    a_cache().save(path)  # the link gives way, and not what it points to
    assert victim.read_text() == "precious"
    assert not path.is_symlink()
    assert KVCache.load(path).lengths.tolist() == [3, 2]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidArgument, match=r"path: got .*not a regular file"):
        KVCache.load(tmp_path / "pipe")
    with pytest.raises(OSError, match="directory"):
        KVCache.load(tmp_path)


def test_a_new_file_has_the_usual_mode(tmp_path):
    (tmp_path / "usual").touch()
    a_cache().save(tmp_path / "cache")
    assert (tmp_path / "cache").stat().st_mode == (tmp_path / "usual").stat().st_mode
