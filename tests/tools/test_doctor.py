"""`tilewise doctor`: it finds what is here, names remedies, and nothing that is broken breaks it."""

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tilewise.dispatch import planner
from tilewise.tools import doctor, doctor_backends
from tilewise.tools.cli import main

SECTIONS = ["versions", "system", "cpu", "gpus", "backends", "private_names", "libraries", "files"]


def test_it_says_what_is_here(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"torch                  {torch.__version__}" in text
    for name in planner.BACKENDS:
        assert f"\n  {name:10} " in text
    assert "reference  usable" in text
    assert "error" not in text.lower()


def test_json_holds_the_same(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == SECTIONS
    assert list(found["backends"]) == list(planner.BACKENDS)
    assert found["backends"]["cpu"]["usable"] is True
    assert "compiled" in found["backends"]["cpu"]["kernels"]
    assert found["cpu"]["threads"] == torch.get_num_threads()
    assert found["files"]["writable"] is True


def test_a_cache_folder_that_is_a_file_is_not_writable(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    for name in ("file", "file/folder"):
        monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / name))
        assert main(["doctor", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["files"]["writable"] is False


def test_it_says_which_python_runs_and_what_fills_the_cache(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    for name, mib in (("cpu-1/a.nbc", 2), ("cpu-2/a.nbc", 3), ("models/a/b", 4), ("tuned.json", 1)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(mib * 2**20))
    assert main(["doctor"]) == 0
    facts = dict(line.strip().split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if " " in line.strip())
    found = doctor.examine()
    assert facts["executable"] == found["system"]["executable"] == sys.executable
    files = found["files"]
    assert (files["size_mib"], files["of_it_cpu_kernels_mib"], files["of_it_models_mib"]) == (10, 5, 4)


def test_a_transformers_that_is_too_old(monkeypatch, capsys):
    for version, words in (("5.21.3", "needs transformers 5.22 or newer, not 5.21.3; pip install"), ("6.1", None)):
        monkeypatch.setattr(doctor.machine, "version_of", lambda name, version=version: version)
        assert main(["doctor"]) == 0
        (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("  transformers "))
        assert words in line if words else line.endswith(" 6.1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_backend_that_cannot_run_has_a_reason_and_a_remedy():
    found = doctor.examine()["backends"]["triton"]
    assert found["usable"] is False
    assert found["reason"] == "runs on GPUs"
    assert "CUDA" in found["remedy"] or "driver" in found["remedy"]


@pytest.mark.parametrize(
    ("cuda", "available", "has_triton", "word"),
    [
        (None, False, True, "CUDA or ROCm build"),
        ("13.0", False, True, "nvidia-smi"),
        ("13.0", True, False, "pip install triton"),
        ("13.0", True, True, "Ampere"),
    ],
)
def test_remedies_fit_the_cause(cuda, available, has_triton, word, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: has_triton or None)
    assert word in doctor_backends.remedy("triton")


def test_numba_that_is_missing_is_a_pip_away(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert doctor_backends.remedy("cpu") == "pip install numba"


@pytest.mark.parametrize("error", [RuntimeError("driver too old"), OSError("no"), SystemExit(3)])
def test_nothing_that_is_broken_breaks_it(error, monkeypatch, capsys):
    def broken(*args, **options):
        raise error

    for name in ("get_num_threads",):
        monkeypatch.setattr(torch, name, broken)
    monkeypatch.setattr(torch.cuda, "is_available", broken)
    monkeypatch.setattr(planner, "load", broken)
    monkeypatch.setattr(doctor, "_version", broken)
    for words in (["doctor"], ["doctor", "--json"]):
        assert main(words) == 0
    assert type(error).__name__ in capsys.readouterr().out
    monkeypatch.setattr(planner, "BACKENDS", None)
    assert main(["doctor"]) == 0


def test_a_driver_that_hangs_is_not_waited_for(monkeypatch):
    def hangs(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(shutil, "which", lambda name: "nvidia-smi")
    monkeypatch.setattr(subprocess, "run", hangs)
    assert "TimeoutExpired" in doctor.examine()["gpus"]["driver"]["error"]


def test_gpus_are_listed(monkeypatch):
    of = SimpleNamespace(name="H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: of)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (2**30, 2**31))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = doctor._gpus()
    assert found["devices"] == [
        {"name": "H200", "capability": "9.0", "processors": 132, "free_gib": 1.0, "total_gib": 2.0}
    ]
    assert any("H200" in line for line in doctor._facts(found))
