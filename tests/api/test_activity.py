"""Calls are counted by backend, however they are launched, and each new kind is told once."""

import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tilewise import PagedKVCache, attention, attention_backward, counters, plan
from tilewise.dispatch import activity, call_cache


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


class Counted:
    """What is counted inside of `with`."""

    def __enter__(self):
        self.before = counters()
        return self

    def __exit__(self, *_):
        self.calls = {name: n - self.before.get(name, 0) for name, n in counters().items()}
        self.calls = {name: n for name, n in self.calls.items() if n}


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_first_and_repeated_calls(backend):
    x = drawn(1, 2, 5, 16)
    with Counted() as counted:
        for _ in range(3):
            attention(x, x, x, backend=backend)
        attention(x, x, x, q_offset=torch.zeros(1, dtype=torch.int64), causal=True, backend=backend)  # never cached
    assert counted.calls == {backend: 4}
    assert len(call_cache._known) == 1


def test_a_look_and_a_plan_are_no_calls():
    x = drawn(1, 2, 5, 16)
    with Counted() as counted:
        plan(x, x, x)
        attention(x[:, :, :0], x, x)  # nothing to compute
        counters()
    assert counted.calls == {}


def test_backward_passes_are_apart():
    x = drawn(1, 2, 5, 16).requires_grad_()
    with Counted() as counted:
        for _ in range(3):
            attention(x, x, x, causal=True).sum().backward()
        with torch.no_grad():
            state = attention(x, x, x, return_lse=True)
            attention_backward(x, x, x, *state, torch.ones_like(state.out))
    assert counted.calls == {"cpu": 4, "cpu backward": 4}


def test_a_cache_and_its_cascade():
    cache = PagedKVCache(16, 4, 2, 16)
    parent = cache.create()
    cache.append(parent, drawn(8, 2, 16), drawn(8, 2, 16))
    forks = [cache.fork(parent) for _ in range(3)]
    for _ in range(2):
        batch = cache.extend(forks, [1] * 3)
        batch.write(drawn(3, 2, 16), drawn(3, 2, 16))
        with Counted() as counted:
            batch.attend(drawn(3, 4, 16), cascade=True)
        assert counted.calls == {"cpu": 1}


def test_threads_lose_nothing():
    x = drawn(1, 1, 1, 8)
    attention(x, x, x)
    with Counted() as counted, ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: [attention(x, x, x) for _ in range(200)], range(4)))
    assert counted.calls == {"cpu": 800}


def test_a_kind_is_told_once(caplog):
    x = drawn(1, 2, 7, 16)
    activity._logged.clear()
    with caplog.at_level(logging.INFO, "tilewise"):
        for _ in range(2):
            attention(x, x, x)
            attention(x, x, x, causal=True, softcap=3.0)
            call_cache.forget()  # checked and planned again: no new kind
    told = [record.getMessage() for record in caplog.records if record.name == "tilewise"]
    assert len(told) == 2
    assert "backend    cpu" in told[0]
    assert "options    none" in told[0]
    assert "causal" in told[1]
    assert "softcap" in told[1]


def test_lengths_make_no_new_kind(caplog):
    """A cache that grows is told once, and so is the prompt before it."""
    x = drawn(2, 4, 300, 16)
    activity._logged.clear()
    with caplog.at_level(logging.INFO, "tilewise"):
        attention(x, x, x, causal=True)
        for length in range(40, 60):
            attention(x[:1, :, :1], x[:1, :, :length], x[:1, :, :length], causal=True)
        attention(x[:, :, :200], x, x, causal=True)
        attention(x[:1, :, :1].half(), x[:1].half(), x[:1].half(), causal=True)  # another dtype is one
    told = [record.getMessage() for record in caplog.records if record.name == "tilewise"]
    assert [line.split("Lk ")[1].split(",")[0] for line in told] == ["300", "40", "300"]


def test_nothing_is_told_unasked(caplog):
    activity._logged.clear()
    x = drawn(1, 2, 7, 16)
    attention(x, x, x)
    assert not [record for record in caplog.records if record.name == "tilewise"]


@pytest.mark.parametrize(
    ("value", "wanted"), [("plan", "backend    reference"), ("plans", "unknown value 'plans' for TILEWISE_LOG")]
)
def test_the_variable(value, wanted):
    run = (
        "import torch, tilewise; x = torch.zeros(1, 1, 2, 8);"
        "[tilewise.attention(x, x, x, backend='reference') for _ in range(2)]; print(tilewise.counters())"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TILEWISE_LOG": value}
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip() == "{'reference': 2}"
    assert done.stderr.count(wanted) == 1
    assert done.stderr.count("backend    reference") == (value == "plan")
