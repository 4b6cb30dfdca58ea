"""`tilewise warmup` of a model's layers: which calls, and that they run. Of all CPU kernels: `test_cpu.py`."""

import pytest
import torch

from tilewise.tools.cli import main
from tilewise.tools.models import MODELS, find
from tilewise.tools.warmup import cases


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_has_a_prompt_and_what_generates_a_next_token(name):
    model = find(name)
    found = cases(model, 64)
    for layer in model.layers:
        own = [case for case in found if case.name.startswith(f"{layer.name} ")]
        kinds = [(case.q_len, case.page_size) for case in own]
        assert kinds == ([(64, 0), (1, 0), (1, 16)] if layer.causal else [(64, 0)])
        assert {(case.heads, case.head_dim, case.window, case.sinks) for case in own} == {
            (layer.heads, layer.head_dim, layer.window, layer.sinks)
        }
    assert len({case.name for case in found}) == len(found)


@pytest.mark.parametrize("train", [False, True])
def test_a_models_calls_are_run(train, capsys, monkeypatch):
    ran = []
    backward = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda x: (ran.append(x.shape), backward(x))[1])
    words = ["warmup", "--model", "gpt-oss", "--device", "cpu", "--length", "40"]
    assert main(words + ["--train"] * train) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 6
    assert lines[1].startswith(" 1 of 6  local prompt" + " and its gradients" * train)
    assert lines[6].startswith(" 6 of 6  global token from pages")
    assert all(" cpu " in line for line in lines[1:])
    assert len(ran) == 2 * train


def test_what_cannot_be_warmed_is_refused(capsys, monkeypatch):
    assert main(["warmup", "--model", "gpt-7"]) == 2
    assert "gpt-oss" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main(["warmup", "--device", "cuda"]) == 2
    assert "--model" in capsys.readouterr().err
