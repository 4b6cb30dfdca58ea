"""Forks while other threads hold locks: the child has its own, and computes."""

import ast
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tilewise.core import forks

SRC = Path(forks.__file__).parents[1]
DEADLINE = 300  # seconds for what takes ten: a hang must end the test
KINDS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Event", "Barrier"}
# Locks that are not made by `new_lock`, and why a fork cannot leave them locked.
OTHERS = {
    "core/forks.py": "makes them",
    "core/private/numba.py": "Numba's and LLVM's: `let_finish`",
    "backends/cpu/compiler.py": "`let_finish`",
    "backends/cpu/threads.py": "`Pool` and its workers are made anew",
    "tools/tune.py": "torch.cuda.Event",
    "tools/bench/measure_gpu.py": "torch.cuda.Event",
}

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")


def dotted(node):
    return ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""


def test_every_lock_is_made_anew():
    """Each lock of the package is made by `new_lock`, under the name of the attribute that it is stored in."""
    made, elsewhere = [], set()
    for file in sorted(SRC.rglob("*.py")):
        path = file.relative_to(SRC).as_posix()
        calls = 0
        for node in ast.walk(tree := ast.parse(file.read_text())):
            if isinstance(node, ast.Name | ast.Attribute) and dotted(node).rpartition(".")[2] in KINDS:
                elsewhere.add(path)
            if isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] == "new_lock":
                calls += 1
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
                continue
            if dotted(node.value.func).rpartition(".")[2] == "new_lock":
                (target,), (owner, name, *_) = node.targets, node.value.args
                is_global = isinstance(target, ast.Name)
                assert ast.unparse(owner) == ("sys.modules[__name__]" if is_global else "self"), path
                assert dotted(target).rpartition(".")[2] == ast.literal_eval(name), path
                calls -= 1
                made.append(path)
        assert calls == 0, f"{path}: the result of new_lock must be stored at once"
    kinds_of_new_locks = {"kv_cache/stores.py"}  # new_lock(self, "lock", threading.RLock)
    assert elsewhere - kinds_of_new_locks == set(OTHERS), "make locks by core.forks.new_lock"
    assert len(made) >= 4


def run(code):
    command = [sys.executable, "-c", textwrap.dedent(HELPERS) + textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


HELPERS = f"""
    import os, signal, sys, threading, torch, tilewise
    from contextlib import ExitStack
    from tilewise.core import forks
    torch.set_num_threads(1)

    def held(*locks):
        "Another thread holds the locks, until the process ends."
        def hold():
            with ExitStack() as stack:
                for lock in locks:
                    stack.enter_context(lock)
                ready.set()
                threading.Event().wait()
        ready = threading.Event()
        threading.Thread(target=hold, daemon=True).start()
        ready.wait()

    def in_child(function):
        child = os.fork()
        if child == 0:
            signal.alarm({DEADLINE - 60})
            status = 1
            try:
                function()
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_locks_that_others_hold():
    """The call counters', that of `context_parallel`, a paged cache's, and those of GPU launchers."""
    run("""
        from types import SimpleNamespace

        from tilewise.backends.gpu import launch_program
        from tilewise.dispatch import activity
        from tilewise.distributed import context
        from tilewise.kv_cache.stores import PageStore

        launch_program.driver = lambda: SimpleNamespace(launch=None, context=lambda: 0)

        def program():
            return launch_program.LaunchProgram(launch_program.Recorder([torch.ones(1)], True, False))

        cache, launcher, gone = tilewise.PagedKVCache(8, 4, 1, 8), program(), program()
        first, rows = cache.create(), torch.ones(1, 1, 8)
        cache.append(first, rows, rows)
        assert isinstance(cache.store, PageStore)
        del gone
        locks = activity._lock, context._alone, cache.store.lock, launcher.lock
        held(*locks)

        def child():
            assert tilewise.counters() == {} or tilewise.counters()
            with activity._lock, context._alone, cache.store.lock, launcher.lock:
                pass
            cache.append(cache.fork(first), rows, rows)
            q = torch.ones(1, 1, 8)
            assert cache.attend([first], q).shape == (1, 1, 8)
            x = torch.ones(1, 1, 3, 8)
            assert (tilewise.attention(x, x, x) == 1).all()

        in_child(child)
        assert not any(lock.acquire(blocking=False) for lock in locks)  # those of this process are still held
    """)


def test_a_fork_of_who_holds_a_lock():
    """`with` releases the lock that it took, and the child's is free."""
    run("""
        cache = tilewise.PagedKVCache(8, 4, 1, 8)
        with cache.store.lock:
            in_child(cache.create)
            assert cache.create() == 0
        held(cache.store.lock)
    """)


def test_forks_beside_compilation(tmp_path):
    """The fork waits for the compilation, so that Numba and LLVM are as they should be, and the child compiles too."""
    run(f"""
        os.environ["TILEWISE_CACHE_DIR"] = {str(tmp_path)!r}
        from tilewise.backends.cpu import compiler, object_code, prebuilt
        from tilewise.core.private import numba as private
        from numba import njit
        prebuilt.load = lambda symbol: None
        forks.PATIENCE = {DEADLINE}  # a busy machine is not a compilation that hangs
        compiler.kernel("combine")  # Numba itself is loaded
        start_event = private.find("numba.core.event.start_event")
        inside, forking, entry_module = threading.Event(), threading.Event(), object_code.entry_module

        def in_the_middle(*given):
            inside.set()
            assert forking.wait({DEADLINE})
            return entry_module(*given)

        object_code.entry_module = in_the_middle
        os.register_at_fork(before=forking.set)  # before tilewise's, which waits: the last one is called first
        thread = threading.Thread(target=compiler.kernel, args=("qk f32",))
        thread.start()
        assert inside.wait({DEADLINE})
        assert private.find("numba.core.event.start_event") is not start_event  # Numba is patched meanwhile

        def child():
            import gc
            assert gc.isenabled()
            assert private.find("numba.core.event.start_event") is start_event
            assert compiler.kernel("qk f32").address
            compiler.kernel("pv f32")
            assert njit(lambda x: x + 1)(1) == 2

        in_child(child)
        thread.join()
    """)


def test_locks_of_the_compilers(tmp_path):
    """A compilation that does not end is not waited for without end."""
    run(f"""
        os.environ["TILEWISE_CACHE_DIR"] = {str(tmp_path)!r}
        from tilewise.backends.cpu import compiler, kernel_cache, prebuilt
        from tilewise.core import file_lock
        from tilewise.core.private.numba import global_compiler_lock, llvm
        prebuilt.load = lambda symbol: None
        forks.PATIENCE = 0.01
        kernel_cache.LOCK_WAIT = {DEADLINE - 100}
        locked = kernel_cache.file_lock("combine")
        held(compiler._lock, global_compiler_lock._lock, llvm.ffi.lib._lock._lock, locked)

        def child():
            assert not file_lock.locked
            assert compiler.kernel("combine").address

        in_child(child)
    """)


def test_two_threads_fork():
    """Each releases what it took."""
    run("""
        threads = [threading.Thread(target=in_child, args=(lambda: None,)) for _ in range(4)]
        from tilewise.backends.cpu import compiler
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with compiler._lock:
            pass
        assert compiler._lock.acquire(blocking=False)
    """)


def test_owners_are_not_kept():
    class Owner:
        def __init__(self):
            self.lock = forks.new_lock(self, "lock")

    owner, before = Owner(), len(forks._owners)
    del owner
    assert len(forks._owners) == before - 1
