"""Each folder of the package has a README: what is there, and what its modules may import."""

import ast
import re
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src/tilewise"
BACKENDS = [f"backends/{path.parent.name}" for path in sorted((SRC / "backends").glob("*/__init__.py"))]
FOLDERS = [*(path.parent.name for path in sorted(SRC.glob("*/__init__.py"))), *BACKENDS]
ANYTHING = "tools", "backends"  # commands use the whole package; each backend has a README of its own


def place(parts):
    """The folder or module of the package that a dotted name begins with."""
    if len(parts) > 1 and parts[0] == "backends" and (SRC / "backends" / parts[1]).is_dir():
        return f"backends/{parts[1]}"
    return parts[0] if (SRC / parts[0]).is_dir() else f"{parts[0]}.py"


def imported(file):
    """What a module imports of the package, at any depth of its code."""
    package = file.relative_to(SRC).parent.parts
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            named = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                named = (*package[: len(package) - node.level + 1], *named)
            elif named[:1] == ("tilewise",):
                named = named[1:]
            else:
                continue
            for name in node.names:
                yield place((*named, name.name)), node.lineno


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_says_what_it_holds(folder):
    text = (SRC / folder / "README.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {folder}\n")
    assert "\nStart with " in text
    assert len(text.splitlines()) <= 16
    for name in re.findall(r"`([\w/]+(?:\.py|\.metal|/))`", text.partition("May import")[0]):
        assert (SRC / folder / name).exists(), name


@pytest.mark.parametrize("folder", [name for name in FOLDERS if name not in ANYTHING])
def test_modules_import_what_their_readme_allows(folder):
    text = (SRC / folder / "README.md").read_text(encoding="utf-8")
    allowed = {folder, "__version__.py", *re.findall(r"`([^`]+)`", text.partition("May import from tilewise: ")[2])}
    found = {
        (what, f"{file.relative_to(SRC)}:{line}")
        for file in (SRC / folder).rglob("*.py")
        for what, line in imported(file)
        if what not in allowed
    }
    assert found == set()
