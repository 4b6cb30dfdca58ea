"""Devices as the GPU backends see them: targets, and the version of Triton that kernels need."""

import importlib
import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tilewise
from problem_space import draw, problem_of
from tilewise.backends import hopper, triton
from tilewise.backends.gpu import coverage, target
from tilewise.backends.gpu.coverage import KERNELS
from tilewise.backends.gpu.target import AMD, INTERPRETER, amd, nvidia
from tilewise.core.storage import FORMATS, stored_as
from tilewise.dispatch import planner

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
    """What compiles is served; what has not run, or was never tried, is a question."""
    served, older = {"3.6.1": None, "3.7.0+git1234": "compiled with Triton 3.7"}, {"3.10.0": "not tested"}
    for version, said in (served | older).items():
        monkeypatch.setattr(target, "triton_version", lambda version=version: version)
        for backend in KERNELS:
            assert coverage.refusal(backend, "prefill") is None
            found = coverage.question(backend, "prefill", nvidia(90), taken=True)
            assert (found is None) == (said is None)
            assert said is None or said in found.what
            assert coverage.question(backend, "prefill", INTERPRETER, taken=True) is None
    monkeypatch.setattr(target, "triton_version", lambda: "3.8.1")
    monkeypatch.setitem(KERNELS["hopper"], "prefill", {"3.6": ("sm_90",), "3.7": (), "3.8": None})
    assert coverage.refusal("hopper", "prefill") == "needs Triton 3.6 or 3.7, and 3.8.1 is installed"


def test_families_are_those_of_the_table():
    """Each that a backend gives a problem has its entries, for the same versions."""
    for backend, families in KERNELS.items():
        assert len({tuple(entries) for entries in families.values()}) == 1
        for entries in families.values():
            assert all(re.fullmatch(r"\d+\.\d+", version) for version in entries)
            assert None not in [next(iter(entries.values()))]
        chance, found = random.Random(0), set()
        own = importlib.import_module(f"tilewise.backends.{backend}")
        for _ in range(300):
            p = draw(chance, indices=True)
            found |= {own.family(p), own.family(replace(p, grads=("q", "k", "v"), mods=None))}
        assert found <= set(families)


def test_targets_are_told_apart(monkeypatch):
    """An AMD GPU, the interpreter and a GPU of NVIDIA's never stand for one another."""
    properties = type("Properties", (), {"multi_processor_count": 304, "gcnArchName": "gfx942:sramecc+:xnack-"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "hip", "6.2")
    mi300 = target._own.__wrapped__(device)
    monkeypatch.setattr(torch.version, "hip", None)
    h200 = target._own.__wrapped__(device)
    assert target._own.__wrapped__(torch.device("cpu")) == INTERPRETER
    assert mi300 == amd("gfx942", 304)
    assert (mi300.vendor, h200.vendor) == ("amd", "nvidia")
    assert h200 == nvidia(90, 304)
    assert len({mi300.name, h200.name, INTERPRETER.name, nvidia(80).name}) == 4
    assert not mi300.at_least(80)
    assert not mi300.ptx
    assert not INTERPRETER.ptx
    assert mi300.shared_memory < h200.shared_memory


def test_an_old_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(triton, "target_of", lambda device: nvidia(75))
    assert "8.0" in str(triton.supports(problem()))
    assert "Turing has no bfloat16" in str(triton.supports(problem()))


def test_amd_is_open_where_kernels_were_compiled_for_it(monkeypatch):
    for gfx in AMD:
        monkeypatch.setattr(triton, "target_of", lambda device, gfx=gfx: amd(gfx))
        assert triton.supports(problem()) is None
        assert triton.unproven(problem()) == (f"compiled for {gfx}, not yet run on hardware", True)
        assert any("tilewise prove" in note for note in planner.choose.__wrapped__(problem(), "triton").notes)
    for gfx in ("gfx1030", ""):
        monkeypatch.setattr(triton, "target_of", lambda device, gfx=gfx: amd(gfx))
        assert "compiled for gfx90a" in str(triton.supports(problem()))


def test_heads_that_would_spill_are_refused(monkeypatch):
    """RDNA has 256 registers for a thread, of which q alone takes half where heads are wide."""
    monkeypatch.setattr(triton, "target_of", lambda device: amd("gfx1100"))
    wide = replace(problem(), head_dim=192, value_dim=192)
    assert "head dim 192" in str(triton.supports(wide))
    assert "128 do" in str(triton.supports(wide))
    assert "gradients" in str(triton.supports_backward(replace(problem(), grads=("q",), return_lse=True)))
    single = replace(problem(), q_dtype=torch.float32)
    assert "float32 products do not fit the registers of gfx1100" in str(triton.supports(single))
    names = ("int8", "int4", "codebook4", "fp8_e4m3")
    stored = {name: replace(problem(), k_format=stored_as(name, 64)) for name in names}
    for name in ("int4", "codebook4", "fp8_e4m3"):
        assert f"{name} do not fit the registers of gfx1100" in str(triton.supports(stored[name]))
    assert triton.supports(stored["int8"]) is None
    monkeypatch.setattr(triton, "target_of", lambda device: amd("gfx1201"))
    assert "float32 products" in str(triton.supports(single))
    assert triton.supports(stored["int4"]) is None
    monkeypatch.setattr(triton, "target_of", lambda device: amd("gfx942"))
    assert triton.supports(wide) is triton.supports(single) is None


def test_only_what_ran_has_no_note(monkeypatch):
    monkeypatch.setattr(target, "triton_version", lambda: "3.6.0")
    for arch in (80, 90, 100):
        monkeypatch.setattr(triton, "target_of", lambda device, arch=arch: nvidia(arch))
        assert (triton.unproven(problem()) is not None) == (arch != 90)


def test_another_gpu_is_seen_in_one_thread_alone():
    """Calls of other threads are planned as ever, and so are this one's afterwards."""
    device = torch.device("cpu")
    with target.planning_for(amd("gfx942")), ThreadPoolExecutor(1) as pool:
        assert target.target_of(device).gfx == "gfx942"
        assert pool.submit(target.target_of, device).result() == INTERPRETER
    assert target.target_of(device) == INTERPRETER


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
            named = re.search(r"\"(hopper|triton|metal)\"", line) and file.parent.name != "private"  # a library
            assert not named or line.startswith("BACKENDS ="), f"{file}: {line}"


def test_caches_share_no_private_names():
    """Batches, copies and files work on a cache's `store`."""
    for file in (BACKENDS.parent / "kv_cache").rglob("*.py"):
        for line in file.read_text().splitlines():
            assert not re.search(r"\b(cache|batch|store|sequences|first)\._[a-z]", line), f"{file}: {line}"
