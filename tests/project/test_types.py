"""The types that a user's editor shows: a script with one call of each kind, checked by mypy and by pyright."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("typed_script.py")


def run(*command):
    """Runs a checker where `tilewise` is the package of this checkout."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(ROOT / "src"), "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def test_mypy():
    code, said = run("mypy", SCRIPT)
    assert code == 0, said


def test_pyright(tmp_path):
    """It ignores what mypy is told to ignore, and complains if there was nothing to ignore."""
    pytest.importorskip("basedpyright", reason="the extra [dev]")
    config = {
        "include": [str(SCRIPT)],
        "extraPaths": [str(ROOT / "src")],
        "typeCheckingMode": "standard",
        "enableTypeIgnoreComments": True,
        "reportUnnecessaryTypeIgnoreComment": "error",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    code, said = run("basedpyright", "-p", tmp_path, "--pythonpath", sys.executable)
    assert code == 0, said


def test_the_script_calls_what_it_names():
    """Names in it exist: a checker that could not find the package would see no mistake."""
    code = compile(SCRIPT.read_text(), SCRIPT.name, "exec")
    names = {}
    exec(code, names)
    assert names["attention"] is tilewise.attention
    assert names["KVCache"] is tilewise.KVCache


def test_dir_shows_the_public_names_only():
    assert set(dir(tilewise)) == {*tilewise.__all__, "compat", "distributed", "testing"}
    assert all(getattr(tilewise, name) is not None for name in dir(tilewise))
