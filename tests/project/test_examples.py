"""The examples run, and what they claim is so."""

import importlib
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
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        return importlib.import_module("generate")
    finally:
        sys.path.remove(str(ROOT / "examples"))


@pytest.fixture(scope="module")
def expected(generate):
    model = generate.Model(width=64, layers=2, heads=4)
    prompts = generate.prompts_of(12, shared=40)
    return model, prompts, [generate.one_by_one(model, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("pages", [120, 18])
def test_a_batch_generates_what_each_prompt_does_alone(generate, expected, pages):
    """With room for all, and with so little that requests are preempted."""
    model, prompts, want = expected
    engine = generate.Engine(model, pages=pages, page_size=8)
    early = [engine.add(prompt, 12) for prompt in prompts[:3]]
    for _ in range(4):
        engine.step()
    late = [engine.add(prompt, 12) for prompt in prompts[3:]]  # these come while others are under way
    engine.run()
    assert [request.tokens for request in early + late] == want
    assert len({tuple(tokens) for tokens in want}) == 12
    assert engine.statistics.found >= 9 * 40
    assert (engine.statistics.preempted > 0) == (pages == 18)
    assert engine.statistics.made == 12 * 12
    stats = engine.cache.stats()
    assert (stats.used, stats.free + stats.kept) == (0, pages)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompts", "0"], "--prompts: got '0', expected a whole number of 1 or more"),
        (["--new", "-3"], "--new"),
        (["--new", "0"], "1 or more"),
        (["--pages", "x"], "--pages: got 'x'"),
        (["--top-p", "2"], "top_p"),
        (["--soak", "0"], "--soak"),
        (["--stream", "--load", "3"], "--load: not allowed with argument --stream"),
        (["--check", "--temperature", "1"], "--check: texts of --temperature 1 are random"),
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


def test_a_budget_cuts_prompts_into_pieces(generate, expected):
    model, prompts, want = expected
    engine = generate.Engine(model, pages=120, page_size=8, budget=16)
    requests = [engine.add(prompt, 12) for prompt in prompts]
    sizes = []
    while engine.running or engine.waiting:
        before = engine.statistics.computed
        engine.step()
        sizes.append(engine.statistics.computed - before)
    assert [request.tokens for request in requests] == want
    assert max(sizes) == 16


def test_tokens_come_as_they_are_made_and_a_request_ends_when_told(generate, expected):
    model, prompts, want = expected
    engine = generate.Engine(model, pages=120, page_size=8)
    came = []

    def show(request, token):
        came.append(token)
        if len(came) == 5:
            engine.cancel(other)

    streamed, other = (engine.add(prompt, 12, on_token=on) for prompt, on in zip(prompts, (show, None), strict=False))
    unseen = engine.add(prompts[2], 12)
    engine.cancel(unseen)
    engine.run()
    assert streamed.tokens == want[0]
    assert came == streamed.generated
    assert other.state == "cancelled"
    assert other.tokens == want[1][: len(prompts[1]) + 4]  # the step in which it was told gave it none
    assert unseen.generated == []
    stats = engine.cache.stats()
    assert (stats.used, stats.free + stats.kept) == (0, 120)
    engine.cancel(streamed)  # too late, and nothing to do
    assert streamed.state == "done"


def test_sampling(generate, expected):
    """The same seed gives the same text, preempted or not; the temperature of 0 and one token are the likeliest."""
    model, prompts, want = expected
    texts = []
    for pages in (120, 18):
        engine = generate.Engine(model, pages=pages, page_size=8)
        drawn = [engine.add(p, 12, generate.Sampling(1.5, top_p=0.9, seed=n)) for n, p in enumerate(prompts)]
        alone = engine.add(prompts[0], 12, generate.Sampling(1.5, top_k=1))
        engine.run()
        texts.append([request.tokens for request in drawn])
        assert alone.tokens == want[0]
        assert not engine.generators
    assert texts[0] == texts[1]
    assert texts[0] != want
    for bad in ({"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": -1}, {"temperature": float("nan")}):
        with pytest.raises(ValueError, match="Sampling"):
            generate.Sampling(**bad)


def test_top_k_and_top_p_leave_only_the_likeliest(generate):
    logits, g = torch.tensor([0.0, 3.0, 2.0, -1.0]), torch.Generator().manual_seed(0)
    chosen = {generate.Sampling(1.0, top_k=2).choose(logits, g) for _ in range(200)}
    assert chosen == {1, 2}
    assert {generate.Sampling(1.0, top_p=0.6).choose(logits, g) for _ in range(200)} == {1}
    assert {generate.Sampling(5.0).choose(logits, g) for _ in range(300)} == {0, 1, 2, 3}
    assert {generate.Sampling(1e-42).choose(logits, g) for _ in range(9)} == {1}  # past float32's range
    assert {generate.Sampling(float("inf")).choose(logits, g) for _ in range(200)} == {0, 1, 2, 3}


def test_a_short_soak(generate, capsys):
    assert generate.soak(60) == []
    assert "60 requests" in capsys.readouterr().out


def test_a_soak_sees_what_is_lost(generate, monkeypatch, capsys):
    monkeypatch.setattr(generate.Engine, "_end", lambda engine, request, state: setattr(request, "state", state))
    assert any("pages are lost" in problem for problem in generate.soak(20))


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
    assert generate.main() == 0
    printed = capsys.readouterr().out
    assert "4 of 4 equal to one-by-one generation" in printed
    assert "first token after" in printed
    assert "prompt tokens found in the cache" in printed


@pytest.mark.parametrize("words", [["--stream", "--new", "3"], ["--load", "5", "--new", "4", "--temperature", "0.5"]])
def test_other_ways_to_run_it(generate, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generate.py", *words])
    assert generate.main() == 0
    assert "tokens/s" in capsys.readouterr().out
