"""The report of an Apple GPU, over the simulator."""

from dataclasses import replace

import pytest
import torch

from metal_sim import needs_simulator, simulator
from tilewise.testing import check
from tilewise.testing.case import Case, make
from tilewise.testing.check import Mismatch
from tilewise.tools import apple, doctor, doctor_backends, verify
from tilewise.tools.bench.measure import waiting
from tilewise.tools.cli import main
from tilewise.tools.workloads import WORKLOADS, make_inputs

TINY = (apple.Shape("prefill", 2, 1, 40, 40, 32), apple.Shape("decode", 2, 2, 1, 50, 32))


@pytest.fixture
def few(monkeypatch):
    """A suite of three cases and no property, and small shapes."""
    monkeypatch.setattr(verify, "CASES", [Case(Lq=40, causal=True), Case(Lq=1, Lk=70), Case(B=1, Lq=9, k="int8/32")])
    monkeypatch.setattr(verify, "PROPERTIES", {})
    monkeypatch.setattr(apple, "SHAPES", TINY)
    monkeypatch.setattr(apple.times, "__defaults__", (None, 0.01))


@needs_simulator
@pytest.mark.usefixtures("few")
def test_the_report_says_what_ran(capsys, tmp_path):
    with simulator():
        assert verify.verify("cpu", "metal", to=tmp_path / "report.json", mac=True) == 0
    printed = capsys.readouterr().out
    block = printed.split("```")[1]
    for word in ("chip", "macOS", "torch", "mlx", "3 passed, 0 failed", "F.scaled_dot_product_attention", "prefill"):
        assert word in block
    assert block.count(" ms, ") == 2
    assert '"times"' in (tmp_path / "report.json").read_text()


@needs_simulator
@pytest.mark.usefixtures("few")
def test_a_wrong_kernel_is_in_the_report(capsys):
    wrong = {"change": lambda source: source.replace("CAUSAL) s.hi = min(s.hi, near + 1)", "CAUSAL) s.hi = 0")}
    with simulator(**wrong):
        assert verify.verify("cpu", "metal", mac=True) == 1
    block = capsys.readouterr().out.split("```")[1]
    assert "1 failed" in block
    assert "failed       case:B2-H4-L40-D32-causal: Mismatch" in block


def test_a_shape_that_fails_does_not_cost_the_report():
    rows = list(apple.times("cpu", "hopper", TINY, 0.01))
    assert len(rows) == 2
    assert all("Unsupported" in str(row) for row in rows)


def test_facts_are_there_on_any_machine():
    assert {"chip", "GPU cores", "memory", "macOS", "python", "tilewise", "torch", "mlx"} == set(apple.facts())
    assert not apple.has_mlx() or apple.facts()["macOS"][0].isdigit()


@pytest.mark.parametrize("command", ["verify", "demo", "bench"])
def test_mps_is_refused_where_there_is_none(command, capsys, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main([command, "--device", "mps"])
    assert "no Apple GPU" in capsys.readouterr().err


def test_calls_on_an_apple_gpu_are_timed_with_their_wait(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: seen.append(device.type))
    waiting(lambda: seen.append("call"), torch.device("mps"))()
    waiting(lambda: seen.append("call"), torch.device("cpu"))()
    assert seen == ["call", "mps", "call"]


def test_inputs_of_a_device_without_float64_are_moved_for_the_oracle(monkeypatch):
    moved = []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: moved.append(x) or x)
    x = make_inputs(WORKLOADS[0].shortened(64), torch.device("cpu"), torch.float32)
    x = replace(x, options={**x.options, "sinks": torch.zeros(x.q.shape[1])})
    assert set(x.on_host().options) == set(x.options)
    assert {id(t) for t in (x.q, x.k, x.v, x.options["sinks"])} <= {id(t) for t in moved}


def test_results_of_a_device_without_float64_are_judged_on_the_host():
    case = Case(Lq=5, causal=True)
    call = make(case).checked()
    on_mps = replace(call, problem=replace(call.problem, device=torch.device("mps")))
    moved = check.on_host(on_mps)
    assert moved.problem == call.problem
    right = make(case).call("torch", return_lse=True)
    check.check_call(on_mps, *right)
    assert check.torch_errors(on_mps) == check.torch_errors(call)
    with pytest.raises(Mismatch):
        check.check_call(on_mps, right.out + 1, right.lse)


def test_float8_is_not_asked_of_mps():
    index = next(i for i, c in enumerate(verify.CASES) if "fp8" in c.k)
    result = verify._check(f"case:{index}", "mps", "metal")
    assert (result.status, "float8" in result.detail) == ("unsupported", True)


def test_mlx_gets_the_cases_that_it_can():
    taken = [c for c in verify.CASES if apple.for_mlx(c)]
    assert len(taken) > 150
    assert not any("int" in c.k for c in taken)


def test_the_doctor_says_why_it_is_not_usable_without_a_mac(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    found = doctor_backends.backend("metal")
    assert found["reason"] == "runs on Apple GPUs"
    assert "Mac" in found["remedy"]
    assert doctor._gpus()["apple"] is None


@pytest.mark.parametrize(
    ("built", "there", "want"), [(False, False, "Mac"), (True, False, "macOS 14"), (True, True, "2.7")]
)
def test_the_doctor_has_a_remedy(built, there, want, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: built)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: there)
    assert want in doctor_backends.remedy("metal")
