"""Caches under torch's modes: default dtype and device, autocast, inference mode, torch.compile."""

import contextlib
import copy
import pickle
import subprocess
import sys

import pytest
import torch

from tilewise import KVCache, PagedKVCache
from tilewise.backends.torch.kv_write import Append as InTorch
from tilewise.kv_cache import hadamard


def rows(*shape, seed=0):
    """The same numbers in every mode."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * 2


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "meta": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
}
KINDS = {
    "f32": {"dtype": "f32"}, "f16": {"dtype": "f16"}, "int8": {"dtype": "int8"}, "int4": {"dtype": "int4", "group": 32},
    "fp8": {"dtype": "fp8_e4m3"}, "rotated int8": {"dtype": "int8", "rotate": True},
    "rotated f32": {"dtype": "f32", "rotate": True},
}  # fmt: skip


def use_rows(options, path, ring=False, in_torch=False):
    """All that a cache gives, after all that can be done to it."""
    cache = KVCache(2, 2, 12, 64, ring=ring, device="cpu", **options)
    if in_torch:
        cache.store.write = InTorch(cache.store.k, cache.store.v, cache.capacity)
    cache.append(rows(2, 2, 9, 64), rows(2, 2, 9, 64, seed=1), [9, 4])
    if ring:
        cache.append(rows(2, 2, 9, 64, seed=2), rows(2, 2, 9, 64, seed=3))
    seen = [cache.attend(rows(2, 4, n, 64, seed=4), return_lse=True) for n in (1, 3)]
    cache.save(path)
    others = [KVCache.load(path, device="cpu"), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    for other in others:
        other.truncate(0, other.lengths[0] - 1)
        other.append(*rows(2, 2, 2, 1, 64, seed=5))
    outs = [other.attend(rows(2, 4, 1, 64, seed=6)) for other in others]
    return [*(x for state in seen for x in state), *outs, cache.keys(0), cache.values(1), cache.lengths]


def use_pages(options, path):
    cache = PagedKVCache(20, 4, 2, 64, layers=1, device="cpu", **options)
    a = cache.create()
    cache.append(a, *rows(2, 10, 2, 64), tokens=range(10))
    b = cache.fork(a)
    cache.append([a, b], *rows(2, 2, 2, 1, 64, seed=1))
    q = rows(2, 4, 1, 64, seed=2)
    seen = [cache.attend([a, b], q, cascade=cascade) for cascade in (True, False)]
    cache.save(path)
    others = [PagedKVCache.load(path, device="cpu"), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    cache.save_prefix(path, b)
    other = PagedKVCache(20, 8, 2, 64, device="cpu", **options)
    c = other.load_prefix(path)
    outs = [one.attend([a, b], q) for one in others]
    return [*seen, *outs, other.attend(c, q[:1]), cache.keys(b), cache.values(a)]


USES = {
    "rows": use_rows, "ring": lambda *a: use_rows(*a, ring=True), "in torch": lambda *a: use_rows(*a, in_torch=True),
    "pages": use_pages,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use", USES)
def test_a_mode_changes_nothing(use, kind, tmp_path):
    hadamard._signs.cache_clear()
    want = USES[use](KINDS[kind], tmp_path / "cache")
    assert all(x.isfinite().all() for x in want)
    for name, mode in MODES.items():
        hadamard._signs.cache_clear()  # it is made in the mode
        with mode():
            got = USES[use](KINDS[kind], tmp_path / "cache")
        for i, (x, y) in enumerate(zip(got, want, strict=True)):
            assert x.dtype == y.dtype, (name, i)
            assert x.equal(y), (name, i)


def test_what_was_made_in_inference_mode_serves_outside_it():
    hadamard._signs.cache_clear()
    with torch.inference_mode():
        hadamard.rotate(torch.ones(1, 64))
    x = torch.ones(1, 64, requires_grad=True)
    hadamard.rotate(x).sum().backward()
    assert x.grad is not None


class TestCompile:
    """A cache breaks a graph, and stays outside: nothing is compiled again as it grows."""

    def run(self, step, caches, steps=20):
        from torch._dynamo.utils import counters

        torch._dynamo.reset()
        counters.clear()
        compiled, frames = torch.compile(step, backend="eager"), []
        for i in range(steps):
            q, k, v = rows(1, 4, 1, 32, seed=i), rows(1, 2, 1, 32, seed=i + 100), rows(1, 2, 1, 32, seed=i + 200)
            assert compiled(caches[0], q, k, v).equal(step(caches[1], q, k, v))
            frames.append(sum(counters["frames"].values()))
        assert frames[-1] == frames[0], "compiled again"
        assert counters["stats"]["unique_graphs"] <= 3

    @pytest.mark.parametrize("dtype", ["f32", "int8"])
    @pytest.mark.parametrize("ring", [False, True])
    def test_rows(self, dtype, ring):
        def step(cache, q, k, v):
            cache.append(k + 1, v)
            return cache.attend(q * 2) + cache.lengths.max()

        self.run(step, [KVCache(1, 2, 8 if ring else 32, 32, dtype, ring=ring, rotate=ring) for _ in range(2)])

    def test_pages(self):
        def step(cache, q, k, v):
            cache.append([0], k + 1, v)
            return cache.attend([0], q * 2)

        caches = [PagedKVCache(20, 4, 2, 32, "f32") for _ in range(2)]
        for cache in caches:
            cache.create()
        self.run(step, caches)

    def test_batches(self):
        def step(cache, q, k, v):
            batch = cache.extend([0], 1, tokens=[7])
            batch.write(k + 1, v)
            return batch.attend(q * 2)

        caches = [PagedKVCache(20, 4, 2, 32, "f32") for _ in range(2)]
        for cache in caches:
            cache.create()
        self.run(step, caches)

    def test_a_full_graph_is_refused_with_the_reason(self):
        cache = KVCache(1, 1, 4, 8, "f32")
        compiled = torch.compile(lambda x: cache.attend(x), backend="eager", fullgraph=True)
        with pytest.raises(Exception, match="a tilewise cache keeps its lengths in Python"):
            compiled(torch.zeros(1, 1, 1, 8))

    @pytest.mark.skipif(sys.platform == "win32", reason="no such compiler there")
    def test_the_first_use_of_all_is_compiled(self):
        """In a process of its own: what is compiled at first use is not traced."""
        code = """
import torch
from tilewise import PagedKVCache
cache = PagedKVCache(20, 4, 2, 32, "f32")
step = torch.compile(lambda s, k, v: cache.append(s, k, v), backend="eager")
step([cache.create()], *torch.ones(2, 1, 2, 3, 32))
assert cache.keys(0).equal(torch.ones(2, 3, 32))
"""
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-2000:]


def test_importing_caches_does_not_import_the_compiler():
    code = "import sys, tilewise; tilewise.KVCache(1, 1, 1, 8); assert 'torch._dynamo' not in sys.modules"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]


WITHOUT = """
import sys
if sys.argv[1] == "missing":
    sys.modules["numba"] = None
else:
    sys.path.insert(0, sys.argv[2])
import torch
from tilewise import KVCache, PagedKVCache
torch.manual_seed(0)
for cache, which in ((KVCache(1, 1, 40, 8, "int8"), ()), (PagedKVCache(10, 4, 1, 8, "int8"), ([0],))):
    if which:
        cache.create()
    for _ in range(3):
        cache.append(*which, *torch.randn(2, 1, 1, 5, 8))
    assert cache.keys(0).shape == (1, 15, 8)
"""


@pytest.mark.parametrize("how", ["missing", "broken"])
def test_without_numba_caches_are_written_by_torch(how, tmp_path):
    (tmp_path / "numba.py").write_text("raise OSError('numba needs another NumPy')")
    run = subprocess.run([sys.executable, "-c", WITHOUT, how, str(tmp_path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]


READ_ONLY = """
import numba.core.caching as caching
def none(*_):
    return None
for locator in caching.CompileResultCacheImpl._locator_classes:  # no folder of the package or the user's may be written
    locator.from_function = none
import torch
from tilewise import PagedKVCache
cache = PagedKVCache(10, 4, 1, 8, "f32")
cache.append(cache.create(), *torch.ones(2, 5, 1, 8), tokens=range(5))
assert cache.attend(0, torch.ones(1, 1, 1, 8)).equal(torch.ones(1, 1, 1, 8))
"""


def test_a_package_that_may_not_be_written():
    run = subprocess.run([sys.executable, "-c", READ_ONLY], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
