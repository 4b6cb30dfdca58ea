"""The command line and the demo behind it."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise import KVCache, __version__, plan
from tilewise.tools import cli, demo, show_plan, workloads
from tilewise.tools.bench import machine, oracle
from tilewise.tools.bench.peers.sdpa import sdpa
from tilewise.tools.bench.record import Record
from tilewise.tools.cli import main
from tilewise.tools.models import MODELS
from tilewise.tools.workloads import WORKLOADS, Workload, make_inputs

CPU = torch.device("cpu")
TINY = Workload("tiny", "a small case", heads=4, kv_heads=2, head_dim=8, q_len=10, kv_len=10, causal=True)


@pytest.fixture
def two_tiny_cases(monkeypatch):
    monkeypatch.setattr(demo, "WORKLOADS", (TINY, TINY))
    monkeypatch.setattr(demo, "time_together", lambda calls, device, budget: [1.0 for _ in calls])


def test_quick_demo_shows_every_case_with_its_plan_time_and_small_error(capsys):
    assert main(["demo", "--quick", "--device", "cpu", "--seed", "3"]) == 0
    text = capsys.readouterr().out
    _, *blocks = re.split(r"\n\[\d+/\d+\] ", text)
    assert [block.split(":")[0] for block in blocks] == [case.name for case in WORKLOADS]
    for block in blocks:
        error = re.search(r"error  tilewise +(\S+)", block)
        assert error, block
        assert 0 <= float(error[1]) < 2e-5
        assert re.search(r"plan   \w+: ", block)
        assert re.search(r"time   tilewise +[\d.]+ (s|ms|us)   SDPA +(no: |[\d.]+ (s|ms|us)   speed-up [\d.]+x)", block)
    assert max(map(len, text.splitlines())) <= 100
    assert set(re.findall(r"[^ -~]", text)) == {"\n"}, "control codes when not on a terminal"


def test_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "tilewise", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"tilewise {__version__}\n"


def test_importing_the_package_loads_neither_the_command_nor_what_it_may_use():
    code = "import sys, tilewise; print([m for m in ('tilewise.tools', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


COMMANDS = "doctor demo chat embed serve run plan bench report compare verify tune warmup".split()


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)], ids=str)
def test_help_and_version(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0
    assert "tilewise" in capsys.readouterr().out


def examples(capsys):
    """Each command's example, as its help shows it."""
    found = {}
    for name in COMMANDS:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        shown = " ".join(capsys.readouterr().out.split())
        found[name] = shlex.split(shown.partition("example: tilewise ")[2])
    return found


def test_examples_of_the_help_run(capsys, monkeypatch, tmp_path):
    """In an empty folder, in which only what another example writes is there; those that take minutes are parsed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")
    shown = examples(capsys)
    assert [words[0] for words in shown.values()] == COMMANDS
    bench = cli._parser().parse_args(shown["bench"])
    record = Record({**machine.describe("tilewise bench"), "suite": "prefill"}, []).as_data()
    for file in (bench.json, Path("before.json")):
        file.write_text(json.dumps(record), encoding="utf-8")
    for name in ("doctor", "plan", "report"):
        assert main(shown[name]) == 0, shown[name]
    assert main(shown["compare"]) == 2
    assert "have no case in common" in capsys.readouterr().out
    for name in ("demo", "chat", "embed", "serve", "verify", "tune", "warmup"):
        assert cli._parser().parse_args(shown[name]).command == name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "what a model's layers would run"),
        (["dance"], "'dance'"),
        (["demo", "--fast"], "--fast"),
        (["demo", "--device", "tpu"], "expected cpu, cuda or mps"),
        (["demo", "--seed", "-1"], "--seed"),
        (["demo", "--seed", "x"], "whole number"),
        (["demo", "--seed", str(2**63)], "below 2**63"),
        (["plan"], "--model"),
        (["plan", "--model", "qwen3", "--length", "many"], "8192 or 8k"),
        (["plan", "--model", "qwen3", "--length", "16777216k"], "1 to 16777216"),
        (["plan", "--model", "qwen3", "--batch", "1000000"], "a number of rows, 1 to 65536"),
        (["plan", "--model", "qwen3", "--device", "sm_75"], "sm_80, sm_86"),
        (["plan", "--model", "qwen3", "--dtype", "float64"], "expected f32 (float32), f16 (float16), bf16 (bfloat16)"),
        (["compare", "one.json"], "B.json"),
    ],
)
def test_bad_arguments_exit_with_2_and_a_message(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_device_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--device", "cuda"])
    assert stop.value.code == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_interrupt_says_what_is_done(two_tiny_cases, monkeypatch, capsys):
    made = []

    def interrupted(*arguments):
        if made:
            raise KeyboardInterrupt
        made.append(arguments)
        return make_inputs(*arguments)

    monkeypatch.setattr(demo, "make_inputs", interrupted)
    assert main(["demo", "--device", "cpu"]) == 130
    text = capsys.readouterr().out
    assert "error  tilewise" in text
    assert "1 of 2 cases done" in text


@pytest.mark.parametrize("change", [0.01, float("nan")])
def test_a_wrong_result_is_called_wrong(change, two_tiny_cases, monkeypatch, capsys):
    right = workloads.Inputs.attend
    monkeypatch.setattr(
        workloads.Inputs, "attend", lambda x, backend=None: right(x, backend) + change * (backend is None)
    )
    assert main(["demo", "--device", "cpu"]) == 1
    assert "WRONG results in tiny" in capsys.readouterr().out


@pytest.mark.parametrize("has_rich", [True, False])
def test_on_a_terminal_with_and_without_rich(has_rich, two_tiny_cases, monkeypatch, capsys):
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich.progress", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert demo.demo(CPU) == 0
    text = capsys.readouterr().out
    assert text.count("error  tilewise") == 2
    assert ("\x1b" in text) == has_rich


@pytest.mark.parametrize(
    "options",
    [{}, {"q_len": 1}, {"q_len": 7}, {"window": 3}, {"lengths": (10, 4), "causal": False}, {"lengths": (10, 10)}],
    ids=str,
)
def test_sdpa_is_asked_for_the_same_thing(options):
    case = Workload(**{**{name: getattr(TINY, name) for name in Workload.__dataclass_fields__}, **options})
    x = make_inputs(case, CPU, torch.float32)
    assert oracle.oracle_errors(x, [sdpa(case, x)()])[0] < 1e-5


def test_paged_inputs_are_shuffled_and_poisoned_past_each_length():
    case = next(case for case in WORKLOADS if case.page_size).shortened(8)
    x = make_inputs(case, CPU, torch.float32)
    pages = [page for row in x.block_table.tolist() for page in row if page >= 0]
    assert sorted(pages) == list(range(len(pages)))
    assert pages != sorted(pages)
    slack = len(pages) * case.page_size - sum(case.lengths)
    assert int(x.k[..., 0, 0].isnan().sum()) == slack > 0


@pytest.mark.parametrize("rows", [1, 5, 64, 65, 200])
def test_row_blocks_reach_both_ends(rows):
    blocks = oracle.row_blocks(rows, 64)
    assert (blocks[0].start, blocks[-1].stop) == (0, rows)
    assert all(0 < block.stop - block.start <= 64 for block in blocks)


def test_plan_shows_every_kind_of_layer_with_its_tiles(capsys):
    assert main(["plan", "--model", "gemma-4", "--length", "8k", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "local layers: dense attention on cpu: batch 1, heads 16/8, Lq 8192, Lk 8192, D 256, float32" in text
    assert "global layers: dense attention on cpu: batch 1, heads 16/2, Lq 8192, Lk 8192, D 512, float32" in text
    assert "window (1023, None)" in text
    assert text.count("TileMap 8192 x 8192") == 2
    rows = [line for line in text.splitlines() if line and set(line) <= set(".▒█")]
    assert rows
    assert rows[0][0] in "▒█"
    assert rows[0][-1] == ".", "causal"
    assert text.count("; each mark is ") == 2
    assert "are merged here" not in text


def test_a_closed_pipe_has_a_status_of_its_own():
    """As of a process that SIGPIPE ends; 1 would say that a result is wrong."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "tilewise", "plan", "--model", "smollm2"]
    buffered = {name: x for name, x in os.environ.items() if name != "PYTHONUNBUFFERED"}
    found = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=buffered)
    os.close(write)
    assert found.returncode == 141
    assert found.stderr == ""


def test_letters_that_an_encoding_lacks_are_no_error(monkeypatch):
    """What a pipe on Windows takes has no blocks, and a folder's name may be of no encoding at all."""
    monkeypatch.setenv("TILEWISE_CACHE_DIR", "/nowhere/\udcff")
    for words, shown in ((["plan", "--model", "llama-3-8b", "--length", "64", "--device", "cpu"], "?"),
                         (["doctor"], "/nowhere/?")):  # fmt: skip
        stream = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(words) == 0
        stream.flush()
        assert shown in stream.buffer.getvalue().decode("cp1252")


def test_plan_of_a_decode_step_over_pages(capsys):
    words = ["--layer", "global", "--queries", "1", "--page-size", "16", "--batch", "4", "--dtype", "bf16"]
    assert main(["plan", "--model", "gpt-oss", "--length", "4096", "--device", "cpu", *words]) == 0
    text = capsys.readouterr().out
    assert "paged attention on cpu: batch 4, heads 64/8, Lq 1, Lk 4096, pages of 16, D 64, bfloat16" in text
    assert "sinks" in text
    assert "local" not in text.partition("\n")[2]


@pytest.mark.parametrize("pages", [[], ["--page-size", "64"]])
def test_plan_of_a_latent_layer_has_v_in_k(pages, capsys):
    words = ["--layer", "absorbed", "--queries", "1", "--device", "sm_90", *pages]
    assert main(["plan", "--model", "deepseek-v3", *words]) == 0
    text = capsys.readouterr().out
    assert "V in K" in text
    assert "backend    hopper, latent decode" in text


class Largest(TorchDispatchMode):
    """The most bytes of a tensor that is not on the meta device."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and x.device.type != "meta":
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("words", [[], ["--queries", "1", "--page-size", "16"]], ids=str)
def test_a_plan_takes_no_memory_for_its_tensors(words, capsys):
    """At 2,000,000 keys K alone would take 8 GB."""
    with Largest() as largest:
        assert main(["plan", "--model", "gemma-4", "--length", "2000000", "--device", "cpu", *words]) == 0
    assert largest.bytes <= 2**25
    text = capsys.readouterr().out
    assert "Lk 2000000" in text
    assert ("are merged here" in text) == (not words)
    assert max(map(len, text.splitlines())) < 200


def test_plans_on_meta_tensors_are_those_of_real_ones():
    for name, page_size in (("gemma-4", 0), ("gpt-oss", 16), ("gpt-oss", 0)):
        layer = MODELS[name].layers[0]
        q = torch.empty(2, layer.heads, 7, layer.head_dim)
        options = {name: getattr(layer, name) for name in ("causal", "window", "chunk", "softcap", "scale")}
        options["sinks"] = torch.zeros(layer.heads) if layer.sinks else None
        if page_size:
            k = torch.empty(20, page_size, layer.kv_heads, layer.head_dim)
            options["block_table"] = torch.arange(20, dtype=torch.int32).view(2, 10)
            options["context_lens"] = torch.full((2,), 155, dtype=torch.int32)
        else:
            k = torch.empty(2, layer.kv_heads, 155, layer.head_dim)
        want = plan(q, k, k, **options)
        assert show_plan.plan_of(layer, 2, 7, 155, page_size, "cpu", torch.float32) == want


def test_a_plan_says_of_other_backends_only_what_matters_here(capsys):
    words = ["plan", "--model", "llama-3-8b", "--device", "cpu"]
    assert main(words) == 0
    assert "not " not in capsys.readouterr().out
    assert main([*words, "--all"]) == 0
    text = capsys.readouterr().out
    assert [name in text for name in ("not hopper: ", "not triton: ", "not metal: ")] == [True] * 3


@pytest.mark.parametrize("name", ["f16", "float16", "fp16", "half", "torch.float16", "Float16"])
def test_types_go_by_any_of_their_names(name, capsys):
    assert main(["plan", "--model", "llama-3-8b", "--length", "64", "--device", "cpu", "--dtype", name]) == 0
    assert "D 128, float16" in capsys.readouterr().out
    assert KVCache(1, 1, 8, 16, name).k_format.name == "f16"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "llama-9"], "one of minilm"),
        (["--model", "qwen3", "--layer", "local"], "one of full"),
        (["--model", "qwen3", "--queries", "9", "--length", "8"], "at most 8"),
        (["--model", "qwen3", "--batch", "65536", "--length", "4096"], "at most 8192 rows of 4096 queries"),
    ],
)
def test_plans_that_cannot_be(words, message, capsys):
    assert main(["plan", "--device", "cpu", *words]) == 2
    assert message in capsys.readouterr().err


def test_every_model_has_a_plan():
    for model in MODELS.values():
        for layer in model.layers:
            chosen = show_plan.plan_of(layer, 2, 64, 64, 0, "cpu", torch.float32)
            assert chosen.cost.flops > 0


@pytest.mark.parametrize(("name", "backend"), [("sm_120", "triton"), ("gfx942", "triton"), ("apple-m3", "metal")])
def test_plans_for_machines_that_are_not_here(name, backend, capsys):
    words = ["plan", "--model", "llama-3-8b", "--device", name]
    for more in ([], ["--queries", "1", "--page-size", "16"], ["--dtype", "f16", "--batch", "3", "--all"]):
        assert main([*words, *more]) == 0
        text = capsys.readouterr().out
        assert f"  backend    {backend}" in text
        assert f"planned for {name}" in text
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["device"], list(found["layers"])) == (name, ["full"])
    full = found["layers"]["full"]
    assert full["backend"] == backend
    assert set(full["tiles"]) == {"skip", "full", "mixed"}
    assert full["flops"] > 0
    assert any(name in note for note in full["notes"])
