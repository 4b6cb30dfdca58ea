"""Ranks that die, hang, or call with other arguments: the others say so, and no process stays behind."""

import os
import time

import pytest
import torch
from torch import distributed as dist

from ranks import Pool
from tilewise import InvalidArgument, distributed

TIMEOUT = 6  # seconds that a rank waits for another


def call(wait=0.0, die=False, backward=False, **options):
    """A call in which the last rank does something else before; what is raised, on the others."""
    x = torch.randn(1, 3, 8, 8, requires_grad=backward)
    last = dist.get_rank() == 2
    if last and die:
        os._exit(1)
    if last:
        time.sleep(wait)
    if last and "differs" in options:
        options |= options.pop("differs")
    options.pop("differs", None)
    try:
        out = distributed.attention(x, x, x, mesh=dist.group.WORLD, backend="torch", **options)
        if backward:
            out.sum().backward()
    except (distributed.RankLost, InvalidArgument) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def run(deadline=120, **how):
    with Pool(3, timeout=TIMEOUT) as pool:
        processes = [process for process, _ in pool.ranks]
        answers = pool.ask(call_with, how, deadline=deadline)
    assert not any(process.is_alive() for process in processes)
    return [answer for _, answer in answers.values()]


def call_with(how):
    return call(**how)


@pytest.mark.parametrize("scheme", ["ring", "ulysses"])
def test_a_rank_that_dies(scheme):
    *others, last = run(die=True, scheme=scheme)
    assert last == "ended"
    assert all(x.startswith("RankLost: rank ") and "init_process_group(timeout=)" in x for x in others)


@pytest.mark.slow
def test_a_rank_that_hangs():
    *others, _ = run(wait=3 * TIMEOUT, scheme="ring")
    assert all(x.startswith("RankLost: rank ") for x in others)


def test_other_arguments_on_one_rank_are_found_before_anything_is_sent():
    for name, value in (("softcap", 3.0), ("length", 30)):
        found = run(validate=True, differs={name: value})
        assert all(x.startswith(f"InvalidArgument: {name}: got ") for x in found), found
        assert "but not the same on rank 2, expected the same on all ranks" in found[0]
    assert run(validate=True, backward=True) == ["fine"] * 3


def _other_calls():
    """What calls say whose sizes, dtypes or options differ on one rank, by default; the last one is right."""
    found, last = [], dist.get_rank() == 2
    x = torch.randn(1, 3, 8, 8)
    for options in (
        {"q": x[:, :, :6] if last else x},
        {"q": x.bfloat16() if last else x},
        {"q": x.clone().requires_grad_(last)},
        {"window": 3 if last else None},
        {"window": -3 if last else 3},
        {"scheme": "ring" if last else "gather"},
        {},
    ):
        q = options.pop("q", x)
        try:
            distributed.attention(q, q, q, mesh=dist.group.WORLD, backend="torch", **options)
            found.append("fine")
        except InvalidArgument as error:
            found.append(error.argument)
    return found


def test_other_kinds_of_calls_are_found_by_default():
    with Pool(3, timeout=TIMEOUT) as pool:
        assert pool(_other_calls) == [["q", "q", "q", "window", "window", "scheme", "fine"]] * 3
