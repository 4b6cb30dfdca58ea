"""`tilewise tune` without a GPU: times come from a function, everything else is real."""

import json
from dataclasses import replace

import pytest
import torch

from tilewise.backends.gpu.target import INTERPRETER, nvidia
from tilewise.backends.triton import config, shared_memory, tuned
from tilewise.backends.triton.spec import Config
from tilewise.tools import tune
from tilewise.tools.cli import main
from tilewise.tools.models import MODELS
from tilewise.tools.workloads import Workload

CPU = torch.device("cpu")
CASES = (
    Workload("prompt", "", heads=4, kv_heads=2, head_dim=64, q_len=40, kv_len=40, causal=True),
    Workload("token", "", heads=8, kv_heads=2, head_dim=128, q_len=1, kv_len=300),
    Workload("pages", "", heads=4, kv_heads=2, head_dim=64, q_len=1, kv_len=90, lengths=(90, 20), page_size=16),
)


@pytest.fixture(autouse=True)
def small_cases(monkeypatch):
    monkeypatch.setattr(tune, "WORKLOADS", CASES)


def by_size(call, launches):
    """Tiles with many keys are fast; those of 8 warps do not fit."""
    return [None if c.warps == 8 else 1.0 / c.BK + 1e-3 * c.stages for c in launches]


def problem_of(case):
    return tune._checked(tune.make_inputs(case, CPU, torch.bfloat16)).problem


def test_the_fastest_tile_is_kept_and_used(tmp_path, capsys):
    file = tmp_path / "tuned.json"
    assert tune.tune(CPU, quick=True, to=file, timer=by_size) == 0
    table = tuned.read(file)
    assert len(table) == 3
    for case in CASES:
        p = problem_of(case)
        fits = [c for c in tuned.candidates(p, INTERPRETER) if c.warps != 8]
        want = min(fits, key=lambda c: 1.0 / c.BK + 1e-3 * c.stages)
        got = tuned.config_of(p, INTERPRETER, table)
        assert (got.BM, got.BK, got.warps, got.stages) == (want.BM, want.BK, want.warps, want.stages)
        assert got.pack == config.tile(p, INTERPRETER).pack
        assert tuned.config_of(p, INTERPRETER, {}) == config.config_of(p, INTERPRETER)
        other = replace(INTERPRETER, processors=100)
        assert tuned.config_of(p, other, table) == config.config_of(p, other), "kept for another device"
    text = capsys.readouterr().out
    assert [line.split()[3] for line in text.splitlines()[:3]] == ["prompt", "token", "pages"]
    assert text.splitlines()[-1] == f"kept in {file}"


def test_the_same_times_give_the_same_file(tmp_path):
    files = [tmp_path / name for name in ("a.json", "b.json")]
    for file in files:
        tune.tune(CPU, quick=True, to=file, timer=by_size)
    tune.tune(CPU, quick=True, to=files[1], timer=by_size)  # once more, over what is there
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_heuristics_stay_unless_another_is_clearly_faster(tmp_path):
    file = tmp_path / "tuned.json"
    tune.tune(CPU, quick=True, to=file, timer=by_size)
    equal = lambda call, launches: [1.0] + [0.99] * (len(launches) - 1)  # noqa: E731
    tune.tune(CPU, quick=True, to=file, timer=equal)
    assert json.loads(file.read_text())["tiles"] == {}


def test_an_interruption_keeps_what_is_done(tmp_path, capsys):
    file, calls = tmp_path / "tuned.json", []

    def timer(call, launches):
        calls.append(call)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return by_size(call, launches)

    assert tune.tune(CPU, quick=True, to=file, timer=timer) == 130
    assert len(tuned.read(file)) == 2
    assert "2 of 3 shapes are done" in capsys.readouterr().err


def test_prompts_are_long_unless_it_must_be_quick():
    assert [case.q_len for case in tune.cases(quick=True)] == [40, 1, 1]
    assert [(case.q_len, case.kv_len) for case in tune.cases()[:3]] == [(8192, 8192), (1, 300), (1, 90)]


def test_every_layer_of_every_model_is_among_the_cases_unless_it_must_be_quick():
    names = [case.name for case in tune.cases()[3:]]
    assert {name.split()[0] for name in names} == set(MODELS)
    assert {"gemma-4 global prompt", "gemma-4 global token", "gpt-oss local prompt"} <= set(names)
    assert len(tune.cases(quick=True)) == 3


def test_shapes_of_one_key_are_timed_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tune, "WORKLOADS", (CASES[0], CASES[0], CASES[1]))
    calls = []
    timer = lambda call, launches: calls.append(call) or by_size(call, launches)  # noqa: E731
    assert tune.tune(CPU, quick=True, to=tmp_path / "tuned.json", timer=timer) == 0
    assert len(calls) == 2
    assert " 3 of 3" in capsys.readouterr().out


def test_candidates_fit_and_begin_with_the_heuristics_own():
    for case in CASES:
        p = problem_of(case)
        found = tuned.candidates(p, nvidia(90))
        assert found[0] == config.tile(p, nvidia(90))
        assert len(set(found)) == len(found) > 10
        assert all(
            shared_memory.needed(p, c, config.spec(p, c, nvidia(90)), nvidia(90)) <= nvidia(90).shared_memory
            for c in found
        )


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"format": 2, "tiles": {}}', '{"format": 1}', '{"format": 1, "tiles": []}'],
)
def test_a_file_that_is_none_of_ours_is_left_out_with_a_warning(tmp_path, text):
    file = tmp_path / "tuned.json"
    file.write_text(text)
    with pytest.warns(UserWarning, match=r"tuned\.json: not a file that `tilewise tune` wrote"):
        assert tuned.read(file) == {}


def test_a_tile_that_is_none_is_left_out_with_a_warning(tmp_path):
    file = tmp_path / "tuned.json"
    tuned.write(file, {"good": Config(64, 64, 4, 3), "bad": Config(48, 64, 4, 3)})
    with pytest.warns(UserWarning, match="the tile of 'bad'"):
        assert tuned.read(file) == {"good": Config(64, 64, 4, 3)}


def test_the_file_of_this_machine_is_read_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    tuned.kept.cache_clear()
    p = problem_of(CASES[0])
    assert tuned.config_of(p, nvidia(90)) == config.config_of(p, nvidia(90))
    tuned.write(tuned.path(), {tuned.key_of(p, nvidia(90)): Config(128, 32, 8, 2)})
    assert tuned.config_of(p, nvidia(90)) == config.config_of(p, nvidia(90))
    tuned.kept.cache_clear()
    assert tuned.config_of(p, nvidia(90)) == Config(128, 32, 8, 2)
    tuned.kept.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_command_needs_a_gpu(capsys):
    assert main(["tune"]) == 2
    assert "no CUDA device" in capsys.readouterr().err
