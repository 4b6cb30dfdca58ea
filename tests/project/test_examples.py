"""The examples run, and what they claim is so."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch

import notebook
from printed import for_any_machine

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "examples/generate.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def expected(generate):
    model = generate.Model(width=64, layers=2, heads=4)
    prompts = generate.prompts_of(12, shared=40)
    return model, prompts, [generate.one_by_one(model, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("pages", [120, 16])
def test_a_batch_generates_what_each_prompt_does_alone(generate, expected, pages):
    """With room for all, and with so little that requests are put off."""
    model, prompts, want = expected
    engine = generate.Engine(model, pages=pages, page_size=8)
    early = [engine.add(prompt, 12) for prompt in prompts[:3]]
    for _ in range(4):
        engine.step()
    late = [engine.add(prompt, 12) for prompt in prompts[3:]]  # these come while others are under way
    engine.run()
    assert [request.tokens for request in early + late] == want
    assert len({tuple(tokens) for tokens in want}) == 12
    assert engine.found >= 9 * 40
    assert (engine.put_off > 0) == (pages == 16)
    stats = engine.cache.stats()
    assert (stats.used, stats.free + stats.kept) == (0, pages)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompts", "0"], "--prompts: got '0', expected a whole number of 1 or more"),
        (["--new", "-3"], "--new"),
        (["--new", "0"], "1 or more"),
        (["--pages", "x"], "--pages: got 'x'"),
        (["--pages", "3"], "need 9 pages of 16, of 3 in all: give more pages"),
    ],
    ids=str,
)
def test_the_command_with_bad_numbers(generate, words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generate.py", *words])
    monkeypatch.setattr(generate.Engine, "step", lambda engine: pytest.fail("computed before all was checked"))
    with pytest.raises(SystemExit) as stop:
        generate.main()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_request_that_can_never_fit_is_refused(generate, expected):
    engine = generate.Engine(expected[0], pages=4, page_size=8)
    engine.add(list(range(20)), 13)  # 32 tokens are written
    for prompt, new in ((list(range(20)), 14), ([], 3), ([1], 0)):
        with pytest.raises(ValueError, match=r"need 5 pages|1 or more"):
            engine.add(prompt, new)
    assert len(engine.waiting) == 1


def test_the_notebook_runs_and_prints_what_it_shows():
    """`python tools/notebook.py examples/tour.ipynb --write` keeps what it prints."""
    made = json.loads((ROOT / "examples/tour.ipynb").read_text(encoding="utf-8"))
    with torch.random.fork_rng():
        printed = notebook.run(made, "examples/tour.ipynb")
    assert [for_any_machine(text) for text in printed] == [for_any_machine(text) for text in notebook.shown(made)]
    assert sum(map(bool, printed)) >= 10
    assert "False" not in "".join(printed)


def test_the_notebooks_links_lead_somewhere():
    text = (ROOT / "examples/tour.ipynb").read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)", text)
    assert len(targets) >= 4
    assert all((ROOT / "examples" / target).exists() for target in targets)


def test_the_command(generate, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generate.py", "--prompts", "4", "--new", "3", "--check"])
    generate.main()
    assert "4 of 4 equal to one-by-one generation" in capsys.readouterr().out
