"""The examples run, and what they claim is so."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


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


def test_the_command(generate, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generate.py", "--prompts", "4", "--new", "3", "--check"])
    generate.main()
    assert "4 of 4 equal to one-by-one generation" in capsys.readouterr().out
