"""Threads that run compiled kernels, which hold no interpreter lock.

Kernels run in torch's own threads where they can be had (`openmp.py`), else in workers. Each worker sleeps on a lock of
its own; the caller wakes as many as it wants, works itself, then waits for them. Work is shared out by the kernels,
which take items from a common counter. A call that finds the threads busy with another call goes on alone: there are
never more threads at work than `torch.get_num_threads()`.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable

import numpy as np

from ...core import forks
from . import compiler
from .openmp import find_parallel


def address_of(function: Callable[..., None] | None) -> int:
    """Where the code of a C function is."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


class Worker:
    """A sleeping thread and its scratch memory."""

    def __init__(self) -> None:
        self.awake, self.done = threading.Lock(), threading.Lock()
        self.awake.acquire()
        self.done.acquire()
        self.task: Callable[[int], None] | None = None
        self.scratch = Scratch()
        threading.Thread(target=self._run, name="tilewise", daemon=True).start()

    def start(self, task: Callable[[int], None], scratch: int) -> None:
        self.task, self.address = task, self.scratch.address(scratch)
        self.awake.release()

    def _run(self) -> None:
        while True:
            self.awake.acquire()
            assert self.task is not None
            try:
                self.task(self.address)
            finally:
                self.task = None
                self.done.release()


class Scratch:
    """Memory that is kept from call to call and grows when a call wants more."""

    def __init__(self) -> None:
        self.memory = np.empty(0, dtype=np.uint8)
        self.size = self.start = 0

    def address(self, size: int) -> int:
        if self.size < size:
            self.memory = np.empty(size + 64, dtype=np.uint8)
            self.size, self.start = size, (self.memory.ctypes.data + 63) // 64 * 64
        return self.start


class Pool:
    """The workers of this process. Forked children start their own."""

    def __init__(self) -> None:
        self._reset()
        if not forks.forked:
            self.parallel = find_parallel()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self.parallel = None  # torch's threads do not outlive a fork, and their runtime would wait for them
        self.scratches: list[Scratch] = []
        self.addresses = (ctypes.c_int64 * 0)()  # of those memories
        self.address = self.room = 0
        self.workers: list[Worker] = []
        self.busy = threading.Lock()
        self.own = threading.local()

    def scratch(self, size: int) -> int:
        """Scratch memory of the calling thread."""
        try:
            own = self.own.scratch
        except AttributeError:
            own = self.own.scratch = Scratch()
        return own.start if own.size >= size else own.address(size)

    def run(self, task: Callable[[int], None], threads: int, scratch: int) -> None:
        """Runs `task(address of scratch memory)` in up to `threads` threads, this one among them."""
        if threads < 2 or not self.busy.acquire(blocking=False):
            task(self.scratch(scratch))
            return
        try:
            while len(self.workers) < threads - 1:
                self.workers.append(Worker())
            helpers = self.workers[: threads - 1]
            for worker in helpers:
                worker.start(task, scratch)
            try:
                task(self.scratch(scratch))
            finally:
                for worker in helpers:
                    worker.done.acquire()  # items are short: Ctrl-C is seen when the current ones are done
        finally:
            self.busy.release()

    def run_kernel(self, name: str, params: int, threads: int, scratch: int) -> None:
        """Runs the kernel `name` on a parameter struct in up to `threads` threads, each with scratch memory."""
        if self.parallel is None:
            kernel = compiler.entry(name)
            self.run(lambda memory: kernel(params, memory), threads, scratch)
        elif not self.busy.acquire(blocking=False):
            compiler.entry(name)(params, self.scratch(scratch))
        else:
            try:
                task = (ctypes.c_int64 * 4)(0, compiler.function(name), params, self.memories(threads, scratch))
                self.parallel(compiler.function("thread_main"), ctypes.addressof(task), threads, 0)
            finally:
                self.busy.release()

    def memories(self, threads: int, scratch: int) -> int:
        """Where the addresses of the memories of torch's threads are. For who holds `busy`."""
        if len(self.scratches) < threads or self.room < scratch:
            self.scratches += [Scratch() for _ in range(threads - len(self.scratches))]
            self.room = max(self.room, scratch)
            places = [s.address(self.room) for s in self.scratches]
            self.addresses = (ctypes.c_int64 * len(places))(*places)
            self.address = ctypes.addressof(self.addresses)
        return self.address


pool = Pool()
