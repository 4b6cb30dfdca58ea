"""The threads that run compiled kernels, without the GIL.

Kernels run in torch's own threads if possible (`openmp.py`), else in workers, which are started through the same
interface (`Pool.by_workers`). Kernels take work items from a shared counter. If the threads are busy with another call,
a call runs in its own thread alone, so at most `torch.get_num_threads()` threads work at any time.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any

import numpy as np

from ...core import forks
from . import compiler
from .openmp import PARALLEL, find_parallel, mapped_runtimes
from .params import CACHE_LINE, Task, Team

MOST_KEPT = 64 * 2**20  # bytes of scratch memory; more is freed by the thread's next call


class Worker:
    """A thread that sleeps on its own lock."""

    def __init__(self) -> None:
        self.awake, self.done = threading.Lock(), threading.Lock()
        self.awake.acquire()
        self.done.acquire()
        self.task = 0
        threading.Thread(target=self._run, name="tilewise", daemon=True).start()

    def start(self, task: int) -> None:
        self.task = task
        self.awake.release()

    def _run(self) -> None:
        while True:
            self.awake.acquire()
            try:
                compiler.entry("thread_main")(self.task)
            finally:
                self.done.release()


class ScratchBuffer:
    """Memory that is reused from call to call and grows as needed."""

    def __init__(self) -> None:
        self.memory = np.empty(0, dtype=np.uint8)
        self.size = self.start = 0

    def address(self, size: int) -> int:
        """The address of at least `size` bytes."""
        if self.size < size:
            self.memory = np.empty(size + CACHE_LINE, dtype=np.uint8)
            self.size = size if size <= MOST_KEPT else 0
            self.start = (self.memory.ctypes.data + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE
        return self.start


class Pool:
    """The threads of this process. Forked children start their own."""

    parallel: Any  # torch's `GOMP_parallel`

    def __init__(self) -> None:
        self._reset()
        if not forks.forked:
            self.parallel = find_parallel()
        forks.in_children(self._reset)

    def _reset(self) -> None:
        self.parallel = None  # torch's threads do not survive a fork, and OpenMP would wait for them
        self.workers: list[Worker] = []
        self.by_workers = PARALLEL(self._run_workers)  # used if torch's is not available
        self.starter: Any = None  # the one that is used
        self.scratches: list[ScratchBuffer] = []
        self.team: Any = None  # a `Team` and the addresses of its scratch memory
        self.address = self.room = 0
        self.busy = threading.Lock()
        self.error: BaseException | None = None
        self.local = threading.local()

    def scratch(self, size: int) -> int:
        """Scratch memory of the calling thread."""
        try:
            own = self.local.scratch
        except AttributeError:
            own = self.local.scratch = ScratchBuffer()
        return own.start if own.size >= size else own.address(size)

    def acquire(self, threads: int, scratch: int) -> int:
        """Acquires the threads, each with `scratch` bytes: the address of a `Team`, or 0 if another call has them."""
        if not self.busy.acquire(blocking=False):
            return 0
        starter = self.parallel or self.by_workers
        if self.starter is not starter or self.room < scratch or len(self.scratches) < threads:
            try:
                self._gather(threads, scratch)
            except BaseException:
                self.busy.release()
                raise
        return self.address

    def release(self) -> None:
        """Releases the threads."""
        error, self.error = self.error, None
        self.busy.release()
        if error is not None:
            raise error

    def run_kernel(self, name: str, params: int, threads: int, scratch: int) -> None:
        """Runs the kernel `name` on a struct in up to `threads` threads, each with scratch memory."""
        team = self.acquire(threads, scratch) if threads > 1 else 0
        if not team:
            compiler.entry(name)(params, self.scratch(scratch))
            return
        try:
            task = Task(0, compiler.function(name), params, team + ctypes.sizeof(Team))
            self.starter(compiler.function("thread_main"), ctypes.addressof(task), threads, 0)
        finally:
            self.release()

    def _gather(self, threads: int, scratch: int) -> None:
        """Makes a `Team` of `threads` threads, each with `scratch` bytes."""
        self.scratches += [ScratchBuffer() for _ in range(threads - len(self.scratches))]
        self.room = max(self.room, scratch)
        self.starter = self.parallel or self.by_workers
        addresses = [s.address(self.room) for s in self.scratches]
        self.team = ctypes.create_string_buffer(ctypes.sizeof(Team) + 8 * len(addresses))
        team = Team.from_buffer(self.team)
        team.parallel = ctypes.cast(self.starter, ctypes.c_void_p).value or 0
        team.thread_main = compiler.function("thread_main")
        memories: Any = (ctypes.c_int64 * len(addresses)).from_buffer(self.team, ctypes.sizeof(Team))
        memories[:] = addresses
        self.address = ctypes.addressof(team)

    def _run_workers(self, function: int, task: int, threads: int, flags: int) -> None:
        """`GOMP_parallel` by workers and this thread. A callback cannot raise, so `release` does."""
        started: list[Worker] = []
        try:
            while len(self.workers) < threads - 1:
                self.workers.append(Worker())
            for worker in self.workers[: threads - 1]:
                worker.start(task)
                started.append(worker)
            compiler.entry("thread_main")(task)
        except BaseException as error:
            self.error = error
        while started:  # they use the caller's memory, so Ctrl-C has to wait for them
            try:
                started[-1].done.acquire()
                started.pop()
            except KeyboardInterrupt as error:
                self.error = error


def describe() -> str:
    """Which threads run kernels, for people."""
    runtimes, own = mapped_runtimes(ctypes.cast(pool.parallel, ctypes.c_void_p).value or 0 if pool.parallel else 0)
    mapped = f"{len(runtimes)} OpenMP runtime{'s' * (len(runtimes) != 1)} mapped"
    if pool.parallel is None:
        return f"tilewise's own: torch's OpenMP runtime was not found, or did not survive a fork; {mapped}"
    return f"torch's, of {own}; {mapped}"


@cache
def yield_thread() -> int:
    """The address of a C function that yields to other threads."""
    function = ctypes.windll.kernel32.SwitchToThread if hasattr(ctypes, "windll") else ctypes.CDLL(None).sched_yield
    return ctypes.cast(function, ctypes.c_void_p).value or 0


pool = Pool()
