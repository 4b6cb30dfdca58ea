"""The benchmark of latent decode without a GPU: what CUDA graphs hold, and rows in which a kernel faults."""

import contextlib
import gc
import importlib
import json
import sys
import weakref
from pathlib import Path

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

FOLDER = Path(__file__).parents[2] / "benchmarks/h200"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


class Graph:
    replays = 0

    def replay(self):
        self.replays += 1


def test_a_graph_holds_the_tensors_of_its_calls(bench, monkeypatch):
    """It holds their addresses only, and a later capture gives freed memory back to the driver."""
    graph = Graph()
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "graph", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)

    def calls():
        x = torch.zeros(3)
        return [lambda: x.add_(1)], weakref.ref(x)

    ways, x = calls()
    run = bench("timing").graphed(ways)
    del ways
    gc.collect()
    assert x() is not None
    run()
    assert graph.replays == 1


def faulty(latent, faults, together=()):
    """A process that ends where a way of `faults` runs, or, of a row of `together`, when all run interleaved."""

    def listen(args):
        reports = []
        for row, ways in json.loads(args[1]):
            for way in ways:
                if (row, way) in faults:
                    return reports, way, "CUDA error"
            if row in together and len(ways) > 1:
                return reports, latent.INTERLEAVED, "CUDA error"
            reports.append(json.dumps({"row": row, "ways": ways}))
        return reports, "", ""

    return listen


def test_a_way_that_faults_does_not_take_the_others_with_it(bench, monkeypatch):
    latent = bench("latent")
    names = list(latent.ROWS)
    monkeypatch.setattr(latent, "listen", faulty(latent, {(names[1], "b")}))
    rows, failed = latent.time_all(["a", "b", "c"], [])
    assert [r["row"] for r in rows] == names
    assert [r["ways"] for r in rows] == [["a", "c"] if name == names[1] else ["a", "b", "c"] for name in names]
    assert len(failed) == 1
    assert failed[0].startswith(f"{names[1]} / b")


def test_ways_that_fault_together_are_timed_alone(bench, monkeypatch):
    latent = bench("latent")
    names = list(latent.ROWS)
    monkeypatch.setattr(latent, "listen", faulty(latent, {(names[0], "c")}, {names[0]}))
    rows, failed = latent.time_all(["a", "b", "c"], [])
    assert [r["ways"] for r in rows if r["row"] == names[0]] == [["a"], ["b"]]
    assert len(failed) == 2
