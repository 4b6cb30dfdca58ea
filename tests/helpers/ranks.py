"""Processes that are ranks of a Gloo group on this machine, started once and handed one function after the other.

They are forked from a server that has imported torch and tilewise, so that four start as fast as one. Whatever happens,
they end: with the pool, with this process, or when a function takes too long.
"""

import multiprocessing
import os
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

DEADLINE = 240  # seconds for one function, on a machine that is busy with other things
TIMEOUT = 120  # seconds that a rank waits for another


class Failure(AssertionError):
    """What a rank raised, with its traceback."""


class Pool:
    """`size` ranks; `pool(function, *args)` calls it on each, and gives their results in order."""

    def __init__(self, size, timeout=TIMEOUT):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed.device_mesh", "tilewise.distributed", "ranks"])
        self.store = tempfile.TemporaryDirectory()
        self.ranks = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            args = (theirs, rank, size, str(Path(self.store.name) / "store"), timeout)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self.ranks.append((process, ours))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __call__(self, function, *args, deadline=DEADLINE, only=None):
        answers = self.ask(function, *args, deadline=deadline, only=only)
        wrong = [(rank, answer) for rank, (fine, answer) in answers.items() if not fine]
        for rank, answer in sorted(wrong, key=lambda x: "Timed out" in x[1]):  # the cause, not those who waited for it
            raise Failure(f"rank {rank}: {answer}")
        return [answer for _, answer in answers.values()]

    def ask(self, function, *args, deadline=DEADLINE, only=None):
        """(whether it went well, its result or traceback) of each rank; one that has died gives (False, "ended")."""
        chosen = range(len(self.ranks)) if only is None else only
        for rank in chosen:
            self.ranks[rank][1].send((function, args))
        end = time.monotonic() + deadline
        answers = {}
        for rank in chosen:
            connection = self.ranks[rank][1]
            if not connection.poll(max(0, end - time.monotonic())):
                self.close()
                raise Failure(f"rank {rank} has not answered within {deadline} s")
            try:
                answers[rank] = connection.recv()
            except EOFError:
                answers[rank] = (False, "ended")
        return answers

    def close(self):
        for process, connection in self.ranks:
            connection.close()
            process.kill()
        for process, _ in self.ranks:
            process.join()
        self.ranks = []
        self.store.cleanup()


def _serve(connection, rank, size, store, timeout):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=limit)
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = True, function(*args)
        except Exception:
            answer = False, traceback.format_exc()
        connection.send(answer)


_meshes = {}


def mesh_of(kind):
    """The meshes of four ranks: "4", "2x2", and "2", two meshes of two that do the same. Made once, by all ranks."""
    if not _meshes:
        _meshes["4"] = init_device_mesh("cpu", (4,))
        _meshes["2x2"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "heads"))
        _meshes["2"] = _meshes["2x2"]["heads"]
    return _meshes[kind]
