"""Processes with several OpenMP runtimes: kernels run in the threads of the one that torch calls."""

import ctypes
import ctypes.util
import importlib.util
import os
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path

import pytest

from tilewise.backends.cpu import openmp
from tilewise.backends.cpu.threads import pool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="runtimes are looked up on Linux alone")
DEADLINE = 300  # seconds for what takes five: a hang must end the test
SONAME = b"libgomp.so.1"

# Torch's team are the threads that its first parallel regions start; ours are asked for their numbers.
SCRIPT = """
    import ctypes, os, threading

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def note(_):
        seen.append(threading.get_native_id())

    def team(parallel, threads):
        seen.clear()
        parallel(ctypes.cast(note, ctypes.c_void_p), None, threads, 0)
        return set(seen)

    def load(file, mode=0):
        library = ctypes.CDLL(file, mode)
        if mode == 0:  # as another library's calls: with a team of its own
            library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            assert len(team(library.GOMP_parallel, 2)) == 2

    seen = []
    {before}
    import torch
    {after}
    def tasks():
        return set(map(int, os.listdir("/proc/self/task")))

    own, torchs = tasks(), {{threading.get_native_id()}}
    ones = torch.ones(1 << 20)
    from tilewise import attention, plan
    from tilewise.backends.cpu.openmp import mapped_runtimes
    from tilewise.backends.cpu.threads import describe, pool

    def wave(*shape):
        n = torch.Size(shape).numel()
        return 3 * torch.arange(n, dtype=torch.float64).mul_(0.7).sin_().float().view(shape)

    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        ones.add_(1)
        torchs |= tasks() - own
        digests = []
        for rows, keys in ((1, 3000), (130, 700)):
            q, k, v = wave(1, 8, rows, 64).requires_grad_(rows > 1), wave(1, 2, keys, 64), wave(1, 2, keys, 64).cos()
            assert f"{{threads}} thread" in plan(q, k, v, backend="cpu").kernel
            for _ in range(3):
                out = attention(q, k, v, backend="cpu")
                (ones @ ones).item()
            if rows > 1:
                out.square().sum().backward()
                digests.append(q.grad.view(torch.int32).sum().item())
            digests.append(out.view(torch.int32).sum().item())
        ours = team(pool.parallel, threads)
        assert len(ours) == threads, ours
        assert ours <= torchs, (ours, torchs)
        print("digests", threads, *digests)
    files, used = mapped_runtimes(ctypes.cast(pool.parallel, ctypes.c_void_p).value)
    assert describe().startswith(f"torch's, of {{used}}; {{len(files)}} OpenMP runtime"), describe()
    print("runtime", len(files), used)
"""


def run(before="", after="", preload=None):
    code = textwrap.dedent(SCRIPT.format(before=before, after=after))
    environment = os.environ | ({"LD_PRELOAD": str(preload)} if preload else {})
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *digests, last = done.stdout.splitlines()
    _, count, file = last.split(maxsplit=2)
    return digests, int(count), file


@cache
def alone():
    return run()


def torchs_file():
    return openmp.mapped_runtimes(ctypes.cast(pool.parallel, ctypes.c_void_p).value)[1]


@pytest.fixture
def renamed(tmp_path):
    """Copies torch's libgomp under another name, as wheels do."""

    def copied(name):
        code = Path(torchs_file()).read_bytes()
        assert SONAME in code, "torch's runtime has another name: stand-ins are made of libgomp"
        assert len(name) <= len(SONAME)
        file = tmp_path / name
        file.write_bytes(code.replace(SONAME, name.encode().ljust(len(SONAME), b"\0")))
        return file

    return copied


def found(name, variable):
    """The file of a runtime that is installed: the variable says where, else it is beside Python or the system's."""
    if variable in os.environ:
        return os.environ[variable]
    beside = Path(sys.prefix, "lib", name)
    return str(beside) if beside.exists() else ctypes.util.find_library(name[3:].partition(".")[0])


def test_torchs_runtime_alone():
    _, count, file = alone()
    assert file == torchs_file()
    assert count == 1


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_second_libgomp(renamed, place):
    copy = renamed("libgomp-2.so")
    digests, count, file = run(**{place: f"load({str(copy)!r})"})
    assert (digests, count, file) == (alone()[0], 2, torchs_file())


def test_a_libgomp_in_the_global_scope_before_torch(renamed):
    """Torch calls that one."""
    copy = renamed("libgomp-2.so")
    digests, count, file = run(before=f"load({str(copy)!r}, ctypes.RTLD_GLOBAL)")
    assert (digests, count, file) == (alone()[0], 2, str(copy))


@pytest.mark.parametrize(("name", "variable"), [("libiomp5.so", "LIBIOMP5"), ("libomp.so.5", "LIBOMP")])
def test_a_preloaded_runtime(renamed, name, variable):
    """The real one if it is installed (LIBIOMP5, LIBOMP: where), else a copy of libgomp under its name."""
    runtime = found(name, variable) or renamed(name)
    digests, count, file = run(preload=runtime)
    assert digests == alone()[0]
    assert count == 2
    assert Path(file).name.startswith(name.split(".")[0])


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize(
    "module",
    [
        pytest.param(name, marks=pytest.mark.skipif(importlib.util.find_spec(name) is None, reason="not installed"))
        for name in ("sklearn", "sentencepiece")
    ],
)
def test_libraries_that_bring_a_libgomp(module, place):
    digests, count, file = run(**{place: "import sklearn.cluster" if module == "sklearn" else f"import {module}"})
    assert digests == alone()[0]
    assert count > 1
    assert file == torchs_file()


def test_a_runtime_of_others_is_not_taken(renamed, monkeypatch):
    """Nor is its number of threads changed by the question."""
    other = ctypes.CDLL(str(renamed("libgomp-3.so")))
    threads = other.omp_get_max_threads()
    assert not openmp.has_torchs_threads(other)
    assert other.omp_get_max_threads() == threads
    monkeypatch.setattr(ctypes, "CDLL", lambda scope: other)
    assert openmp.find_parallel() is None
