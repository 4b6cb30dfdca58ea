"""Devices as the GPU backends see them: targets, and the version of Triton that kernels need."""

import re
from pathlib import Path

import pytest
import torch

import tilewise
from problem_space import problem_of
from tilewise.backends import hopper, triton
from tilewise.backends.gpu import target
from tilewise.backends.gpu.target import INTERPRETER, Target, nvidia, triton_refusal
from tilewise.core.storage import FORMATS

BACKENDS = Path(tilewise.__file__).parent / "backends"


def problem():
    formats = dict.fromkeys(("k_format", "v_format"), FORMATS["bf16"])
    return problem_of(
        form="dense", device=torch.device("cuda"), batch=2, heads=4, kv_heads=4, q_len=4096, kv_len=4096, head_dim=128,
        value_dim=128, scale=0.1, q_offset=0, q_dtype=torch.bfloat16, **formats,
    )  # fmt: skip


@pytest.mark.parametrize("version", ["3.5.1", "2.0", "", "nightly"])
def test_a_triton_that_does_not_do_is_a_reason_not_an_error(monkeypatch, version):
    monkeypatch.setattr(target, "triton_version", lambda: version)
    for backend in (triton, hopper):
        monkeypatch.setattr(backend, "target_of", lambda device: nvidia(90))
        reason = backend.supports(problem())
        assert reason is not None
        assert version in reason
        assert "Triton" in reason


def test_versions_of_triton(monkeypatch):
    monkeypatch.setattr(target, "triton_version", lambda: "3.7.0+git1234")
    assert triton_refusal((3, 6)) is None
    assert triton_refusal((3, 6), (3, 7)) is None
    assert "3.6, and 3.7.0" in str(triton_refusal((3, 6), (3, 6)))
    assert "3.8 or newer" in str(triton_refusal((3, 8)))
    monkeypatch.setattr(target, "triton_version", lambda: "3.10.0")
    assert triton_refusal((3, 6)) is None


def test_targets_are_told_apart(monkeypatch):
    """An AMD GPU, the interpreter and a GPU of NVIDIA's never stand for one another."""
    properties = type("Properties", (), {"multi_processor_count": 304})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "hip", "6.2")
    amd = target.target_of.__wrapped__(device)
    monkeypatch.setattr(torch.version, "hip", None)
    h200 = target.target_of.__wrapped__(device)
    assert target.target_of.__wrapped__(torch.device("cpu")) == INTERPRETER
    assert (amd.vendor, h200.vendor) == ("amd", "nvidia")
    assert h200 == nvidia(90, 304)
    assert len({amd.name, h200.name, INTERPRETER.name, nvidia(80).name}) == 4
    assert not amd.at_least(80)
    assert not amd.ptx
    assert not INTERPRETER.ptx
    assert amd.shared_memory < h200.shared_memory


def test_an_old_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(triton, "target_of", lambda device: nvidia(75))
    assert "8.0" in str(triton.supports(problem()))
    monkeypatch.setattr(triton, "target_of", lambda device: Target("amd", 0, 304, 64 << 10))
    assert triton.supports(problem()) is None


@pytest.mark.parametrize("name", ["triton", "hopper", "metal", "gpu"])
def test_backends_import_nothing_of_each_other(name):
    """What they share is in `gpu`, which imports none of them."""
    others = {"triton", "hopper", "metal", "cpu", "torch"} - {name}
    for file in (BACKENDS / name).rglob("*.py"):
        for line in file.read_text().splitlines():
            found = re.match(r"\s*from (\.{2,3})(\w+)[\w.]* import", line)
            assert not (found and found[2] in others), f"{file}: {line}"


@pytest.mark.parametrize("name", ["core", "validation", "dispatch", "kv_cache"])
def test_generic_code_names_no_backend(name):
    """It asks the planner, whose list is the one place that does."""
    for file in (BACKENDS.parent / name).rglob("*.py"):
        for line in file.read_text().splitlines():
            assert not re.match(r"\s*(from|import) .*\bbackends\b", line), f"{file}: {line}"
            assert not re.search(r"\"(hopper|triton|metal)\"", line) or line.startswith("BACKENDS ="), f"{file}: {line}"


def test_caches_share_no_private_names():
    """Batches, copies and files work on a cache's `store`."""
    for file in (BACKENDS.parent / "kv_cache").rglob("*.py"):
        for line in file.read_text().splitlines():
            assert not re.search(r"\b(cache|batch|store|sequences|first)\._[a-z]", line), f"{file}: {line}"
