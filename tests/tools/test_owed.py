"""`make h200`: steps in order, within limits, and on from where they stopped. Stand-ins for scripts and for the GPU."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/h200/owed.py"
MACHINE = {"gpu": "a GPU", "sources": "sources 1"}


@pytest.fixture
def owed(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("owed", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "owed", module)
    spec.loader.exec_module(module)
    (tmp_path / "step.py").write_text(
        "import sys, time\n"
        "print('begun', flush=True)\n"
        "if sys.argv[1] == 'hangs': time.sleep(100)\n"
        "if sys.argv[1] == 'wrong': print('case 7: WRONG')\n"
        "open(sys.argv[sys.argv.index('--json') + 1], 'a').write('1')\n"
        "print('counts', {'ok': 3, 'FAILED': 0})\n"
        "sys.exit(sys.argv[1] == 'breaks')\n"
    )
    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(module, "START", 0.0)
    monkeypatch.setattr(module, "identity", lambda: dict(MACHINE))
    return module


def go(owed, monkeypatch, tmp_path, *kinds, **limits):
    """Runs steps of these kinds; outcomes by kind, the exit status, and how often each ran to its end."""
    steps = tuple(owed.Step(kind, "step.py", (kind,), limits.get(kind, 1.0)) for kind in kinds)
    monkeypatch.setattr(owed, "STEPS", steps)
    monkeypatch.setattr(sys, "argv", ["owed.py", "--out", str(tmp_path / "out"), "--minutes", "2"])
    with pytest.raises(SystemExit) as status:
        owed.main()
    results = json.loads((tmp_path / "out/owed.json").read_text())["results"]
    files = {kind: tmp_path / f"out/{kind}.json" for kind in kinds}
    runs = {kind: len(file.read_text()) if file.exists() else 0 for kind, file in files.items()}
    return {kind: result["outcome"] for kind, result in results.items()}, bool(status.value.code), runs


def test_what_is_done_is_not_run_again(owed, monkeypatch, tmp_path):
    first = go(owed, monkeypatch, tmp_path, "fine", "wrong", "breaks", "hangs", hangs=1 / 60)
    assert first[0] == {"fine": "done", "wrong": "FAILED", "breaks": "FAILED", "hangs": "stopped"}
    assert first[1:] == (True, {"fine": 1, "wrong": 1, "breaks": 1, "hangs": 0})
    again = go(owed, monkeypatch, tmp_path, "fine", "wrong", "other")
    assert again[1:] == (True, {"fine": 1, "wrong": 2, "other": 1})
    assert go(owed, monkeypatch, tmp_path, "fine", "other") == (again[0], False, {"fine": 1, "other": 1})
    table = (tmp_path / "out/owed.txt").read_text()
    assert "a GPU | sources 1" in table
    assert "counts {'ok': 3, 'FAILED': 0}" in table  # the last line of a step


def test_other_sources_begin_anew(owed, monkeypatch, tmp_path):
    go(owed, monkeypatch, tmp_path, "fine")
    monkeypatch.setattr(owed, "identity", lambda: MACHINE | {"sources": "sources 2"})
    assert go(owed, monkeypatch, tmp_path, "fine", "more") == (
        {"fine": "done", "more": "done"}, False, {"fine": 2, "more": 1},
    )  # fmt: skip


def test_its_steps_are_there(owed):
    """Scripts and their options, as the parsers know them."""
    for step in owed.STEPS:
        if not step.script:
            continue
        text = (SCRIPT.parent / step.script).read_text()
        options = [word for word in (*step.arguments, step.json, "--peers" if step.peers else "") if word[:2] == "--"]
        assert all(f'add_argument("{option}"' in text for option in options), step.name
