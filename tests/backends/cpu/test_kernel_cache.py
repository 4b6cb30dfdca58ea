"""Kept kernels: files that are damaged, of another kernel, of another user; disks that are full; processes that die."""

import errno
import itertools
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from llvmlite.binding.module import ModuleRef
from numba import njit, types
from numba.core import event

from tilewise.backends.cpu import compiler, kernel_cache
from tilewise.backends.cpu.codegen.load_store import get_i64, put_i64
from tilewise.backends.cpu.codegen.numba_ops import ONE, jit
from tilewise.backends.cpu.linker import link
from tilewise.backends.cpu.object_code import emit_object
from tilewise.core import cache_home
from tilewise.kv_cache import block_loops
from tiny_kernel import adding, no_compiler, run_tiny, said

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="owners and modes of POSIX")
KEY = bytes(range(32))


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """An empty place, and nothing said yet."""
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(kernel_cache, "_warned", set())
    return tmp_path / "kept"


def compile_tiny(name="tiny", adds=1):
    return run_tiny(compiler.compile_function(adding(adds), name))


def kept():
    (file,) = (file for file in kernel_cache.cache_directory().iterdir() if file.suffix in (".o", ".nbc"))
    return file


def key_of(name="tiny"):
    signature, codegen = compiler.types.void(compiler.types.int64), compiler.cpu_target.target_context.codegen()
    return kernel_cache.CachedKernel(name).key(signature, codegen.magic_tuple())


@pytest.fixture
def silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.usefixtures("silent")
def test_a_kernel_is_compiled_once(monkeypatch):
    assert compile_tiny() == 42
    file = kept()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    no_compiler(monkeypatch)
    assert compile_tiny() == 42


def test_threads_that_ask_at_once_get_one_kernel(monkeypatch):
    """Code is freed with its kernel: of two, one would be gone while its address is in use."""
    threads, made = 8, []
    asking = threading.Barrier(threads)

    def compile_slowly(*_):
        made.append(compiler.compile_function(adding(1), "tiny"))
        time.sleep(0.1)  # the others wait by now
        return made[-1]

    def ask(_):
        asking.wait()
        return compiler.kernel("tiny")

    monkeypatch.setattr(compiler.prebuilt, "load", compile_slowly)
    monkeypatch.setattr(compiler, "_kernels", {})
    with ThreadPoolExecutor(threads) as pool:
        kernels = list(pool.map(ask, range(threads)))
    assert len(made) == 1
    assert all(found is made[0] for found in kernels)


def test_functions_of_a_kernel_are_linked_once_each(monkeypatch):
    """Numba would link each with all that it calls, for every caller anew, and count references in it."""

    @jit
    def first(x):
        return x + 1

    @jit
    def second(x):
        return first(x) * 2

    @jit
    def third(x):
        return second(x) + first(x)

    def kernel(address):
        number = max(third(get_i64(address)), ONE)
        put_i64(address, number + second(ONE) + first(ONE))  # (2 * (x + 1) + x + 1) + 4 + 2

    def once(address):
        put_i64(address, max(get_i64(address), ONE))

    emit_object(once, "once")  # Numba's runtime and its `max` are then compiled, whatever ran before
    links, before = [], (ModuleRef.link_in, event.start_event, types.Record.__repr__)
    monkeypatch.setattr(ModuleRef, "link_in", lambda *args, **kws: links.append(args) or before[0](*args, **kws))
    code = emit_object(kernel, "linked")
    assert len(links) == 4 + 1 + 4  # a module for each function and the entry, and those of what is called
    number = np.array([10], dtype=np.int64)
    link(code, "linked").entry(number.ctypes.data)
    assert number[0] == 39
    assert b"NRT" not in code
    assert before[1:] == (event.start_event, types.Record.__repr__)
    monkeypatch.undo()
    later = njit(lambda x, y: max(third(x), y))  # Numba's own way, over functions that were compiled for a kernel
    assert [later(2, 5), later(2, 50)] == [9, 50]


def test_constants_that_kernels_take_from_core_are_in_the_digest():
    """Else code that was compiled with other constants would be used."""
    package, used = Path(kernel_cache.__file__).parent, set()
    for file in (package / name for name in ("codegen", "gemm", "mainloop")):
        for source in file.glob("*.py"):
            for module, names in re.findall(r"^from \.{4}core\.(\w+) import (.+)$", source.read_text(), re.MULTILINE):
                used |= {f"{module}.py" for name in re.findall(r"\w+", names) if name.isupper()}
    assert {"large_lse.py", "storage.py"} <= used <= set(kernel_cache.CORE_SOURCES)


@pytest.mark.usefixtures("silent")
def test_every_truncation_and_every_flipped_byte_is_seen():
    contents = os.urandom(500)
    kernel_cache.write("x.o", KEY, contents)
    assert kernel_cache.read("x.o", KEY) == contents
    file = kernel_cache.cache_directory() / "x.o"
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        with pytest.raises(kernel_cache.Damaged):
            kernel_cache.read("x.o", KEY)
    for at in range(len(whole)):
        for bit in (1, 128):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            with pytest.raises(kernel_cache.Damaged):
                kernel_cache.read("x.o", KEY)
    file.write_bytes(whole + b"\0")
    with pytest.raises(kernel_cache.Damaged):
        kernel_cache.read("x.o", KEY)
    file.write_bytes(whole)
    with pytest.raises(kernel_cache.Damaged):
        kernel_cache.read("x.o", KEY[::-1])  # of another kernel


@pytest.mark.parametrize("damage", [b"", b"\0" * 4096, None, "flip"], ids=["empty", "zeros", "truncated", "flipped"])
def test_a_damaged_file_is_compiled_again_and_said_once(damage, monkeypatch):
    for name in ("tiny", "second"):
        compile_tiny(name)
    files = sorted(kernel_cache.cache_directory().glob("*.o"))
    for file in files:
        whole = file.read_bytes()
        flipped = whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:]
        file.write_bytes(whole[: len(whole) // 2] if damage is None else flipped if damage == "flip" else damage)
    with said() as warned:
        assert [compile_tiny(name) for name in ("tiny", "second")] == [42, 42]
    assert len(warned) == 1
    assert "cannot be read (its checksum does not match): compiling its kernel again" in str(warned[0].message)
    no_compiler(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(kernel_cache, "_warned", set())
        assert [compile_tiny(name) for name in ("tiny", "second")] == [42, 42]


def test_code_of_another_kernel_is_not_loaded():
    """Not under its name, nor after a change of what it was made of, however well its file is written."""
    assert compile_tiny("tiny", adds=1) == 42
    mine = kept()
    code = mine.read_bytes()
    mine.unlink()
    assert compile_tiny("other", adds=2) == 43
    kept().write_bytes(code)
    with said():
        assert compile_tiny("other", adds=2) == 43
    assert kernel_cache.CachedKernel("a", "1").name == kernel_cache.CachedKernel("a", "2").name
    cases = itertools.product("ab", "12", ("()", "(int64)"), ("znver4", "haswell"))
    assert len({kernel_cache.CachedKernel(name, stamp).key(sig, cpu) for name, stamp, sig, cpu in cases}) == 16


def test_an_entry_takes_as_many_whole_numbers_as_its_kernel():
    entry = compiler.compile_function(adding(1), "tiny").entry
    number = np.array([41])
    assert entry(np.int64(number.ctypes.data)) == 0
    assert number[0] == 42
    for wrong in ((), (1, 2)):
        with pytest.raises(TypeError):
            entry(*wrong)
    for wrong, error in ((1.5, TypeError), (None, TypeError), (2**64, OverflowError)):
        with pytest.raises(error):
            entry(wrong)


def evil():
    """A file with the right digest, as anybody can write it: another kernel's code."""
    compile_tiny()
    kernel_cache.write(kept().name, key_of(), emit_object(adding(2), "tiny"))


def test_the_planted_file_would_do_harm():
    evil()
    assert compile_tiny() == 43


def plant(what, folder):
    file = next(folder.glob("*.o"))
    if what == "folder of all":
        folder.chmod(0o777)
    elif what == "folder of a group":
        folder.chmod(0o770)
    elif what == "folder by a link":
        folder.rename(folder.parent / "elsewhere")
        folder.symlink_to(folder.parent / "elsewhere")
    elif what == "file of all":
        file.chmod(0o666)
    elif what == "file by a link":
        file.rename(folder.parent / "elsewhere")
        file.symlink_to(folder.parent / "elsewhere")
    elif what == "file that is none":
        file.unlink()
        file.mkdir()
    elif what == "file that is a pipe":  # which nobody writes to: whoever opens it would wait
        file.unlink()
        os.mkfifo(file, 0o600)
    else:
        target = folder if "folder" in what else file
        if os.getuid() == 0:
            os.chown(target, 4242, -1)
        return target
    return None


PLANTS = ["folder of all", "folder of a group", "folder by a link", "file of all", "file by a link"]
PLANTS += ["file that is none", "file that is a pipe", "another's folder", "another's file"]


@pytest.mark.parametrize("what", PLANTS)
def test_what_others_can_write_to_is_never_loaded(what, monkeypatch):
    evil()
    if plant(what, kernel_cache.cache_directory()) is not None and os.getuid() != 0:
        monkeypatch.setattr(os, "getuid", lambda: 4242)
    with said() as warned:
        assert compile_tiny() == 42
    assert len({str(w.message) for w in warned}) == len(warned) <= 2  # reading and, if that fails too, keeping
    if "folder" in what:
        assert "TILEWISE_CACHE_DIR" in str(warned[0].message)


def test_root_does_not_load_what_a_user_owns(monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 0)
    status = os.stat_result((0o100644, 0, 0, 1, 1000, 1000, 0, 0, 0, 0))
    assert "belongs to user 1000" in cache_home.others_may_change(status)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert cache_home.others_may_change(status) is None
    roots = os.stat_result((0o100644, 0, 0, 1, 0, 0, 0, 0, 0, 0))
    assert cache_home.others_may_change(roots) is None


def test_a_full_disk_is_no_reason_to_fail(home):
    """Files of at most 1000 bytes: the write fails as on a disk without room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with said() as warned:
            assert compile_tiny() == 42
            assert compile_tiny("second") == 42
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert len(warned) == 1
    assert "every process will compile its own kernels" in str(warned[0].message)
    assert not any(kernel_cache.cache_directory().iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["open", "makedirs", "mkdir", "replace"])
def test_no_error_of_the_system_fails_a_call(number, call, monkeypatch):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    with said() as warned:
        assert compile_tiny() == 42
    monkeypatch.undo()
    assert os.strerror(number) in str(warned[-1].message)


def test_a_place_that_is_a_file(home):
    home.write_text("")
    with said():
        assert compile_tiny() == 42


SCRIPT = """
import os, signal, sys
sys.path[:0] = {tests!r}
from test_kernel_cache import compile_tiny, kernel_cache
die = {die!r}
if die == "before the name":
    os.replace = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
elif die == "half written":
    class Half:
        def __init__(self, handle): self.handle = handle
        def __enter__(self): return self
        def __exit__(self, *_): pass
        def write(self, data):
            os.write(self.handle, data[: len(data) // 2])
            if len(data) > 100: os.kill(os.getpid(), signal.SIGKILL)
    kernel_cache.open = lambda handle, mode: (Half if mode == "wb" else lambda x: open(x, mode))(handle)
assert compile_tiny() == 42
"""


def start(die=None):
    code = SCRIPT.format(tests=[str(Path(__file__).parent), *sys.path], die=die)
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)


@pytest.mark.parametrize("die", ["before the name", "half written"])
def test_a_process_that_is_killed_at_writing_leaves_nothing_to_load(die):
    process = start(die)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    left, lock = sorted(kernel_cache.cache_directory().iterdir(), key=lambda file: file.suffix, reverse=True)
    assert (left.suffix, lock.suffix) == (".tmp", ".lock")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile_tiny() == 42
    assert left.exists()  # its process may yet live
    os.utime(left, (0, 0))
    kept().unlink()
    assert compile_tiny() == 42
    assert [file.suffix for file in kernel_cache.cache_directory().iterdir()] == [".o"]


def test_processes_at_once_leave_one_whole_file(monkeypatch):
    for process in [start() for _ in range(2)]:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
        assert b"Warning" not in errors
    assert len(list(kernel_cache.cache_directory().iterdir())) == 1
    no_compiler(monkeypatch)
    assert compile_tiny() == 42


HOLDER = """
import sys, time
from tilewise.backends.cpu import kernel_cache
with kernel_cache.file_lock({file!r}):
    print("alone", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(home):
    """Another process that is compiling the tiny kernel."""
    code = HOLDER.format(file=kernel_cache.CachedKernel("tiny").file(key_of()))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"alone\n"
    yield process
    process.kill()
    process.communicate()


def test_a_kernel_that_another_process_compiles_is_waited_for(holder, monkeypatch):
    contents = emit_object(adding(1), "tiny")
    waits = []

    def sleep(_):
        waits.append(1)
        if len(waits) == 3:  # the other one is done
            kernel_cache.write(kernel_cache.CachedKernel("tiny").file(key_of()), key_of(), contents)
            holder.kill()
            holder.wait()

    monkeypatch.setattr(kernel_cache.time, "sleep", sleep)
    no_compiler(monkeypatch)
    assert compile_tiny() == 42
    assert len(waits) >= 3


def test_a_process_that_dies_or_hangs_is_not_waited_for(holder, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(kernel_cache, "LOCK_WAIT", 0)
        assert compile_tiny() == 42  # it hangs
    kept().unlink()
    holder.kill()
    holder.wait()
    monkeypatch.setattr(kernel_cache.time, "sleep", lambda _: pytest.fail("waits for nobody"))
    assert compile_tiny() == 42


def test_a_user_without_home_or_name(monkeypatch, tmp_path):
    monkeypatch.delenv("TILEWISE_CACHE_DIR")
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(cache_home.tempfile, "tempdir", str(tmp_path))
    assert cache_home.cache_home() == tmp_path / f"tilewise-{os.getuid()}"
    assert compile_tiny() == 42
    assert stat.S_IMODE(cache_home.cache_home().stat().st_mode) == 0o700
    monkeypatch.setattr(cache_home.tempfile, "gettempdir", lambda: (_ for _ in ()).throw(FileNotFoundError()))
    assert cache_home.cache_home().parent == Path("/tmp")


def test_loops_of_caches_are_kept_in_the_same_place(monkeypatch, home):
    """And not in the package or at home, which may not be written to."""

    def call():
        table, to = np.arange(12, dtype=np.int32).reshape(3, 4), np.zeros((2, 4), dtype=np.int32)
        block_loops.compiled.__wrapped__(block_loops.copy_rows)(table, np.array([2, 0]), to)
        assert to.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]

    package = Path(block_loops.__file__).parent
    before = set(package.rglob("*.nb?"))  # of an older version
    call()
    assert kept().name.startswith("copy_rows.")
    assert set(package.rglob("*.nb?")) == before
    monkeypatch.setenv("TILEWISE_CACHE_DIR", "/proc/nothing")
    with said():
        call()
