"""Files for those who come to the project: workflows, hooks and templates parse, and what they run exists."""

import ast
import importlib
import importlib.util
import json
import re
import runpy
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest

from compact_records import MATRIX, RECORDS, compact

ROOT = Path(__file__).resolve().parents[2]
MAKE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
SCRIPTS = sorted(file for name in ("benchmarks", "tools", "examples") for file in (ROOT / name).rglob("*.py"))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
YAML = [
    *WORKFLOWS,
    *sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")),
    ROOT / ".pre-commit-config.yaml",
    ROOT / "CITATION.cff",
]


def parsed(file):
    return pytest.importorskip("yaml").safe_load(file.read_text(encoding="utf-8"))


def name_of(file):
    return file.name


def jobs():
    return [(file.stem, name, job) for file in WORKFLOWS for name, job in parsed(file)["jobs"].items()]


def commands():
    """Every line that a workflow runs, with the name of its job."""
    for workflow, name, job in jobs():
        for step in job["steps"]:
            for line in step.get("run", "").splitlines():
                yield f"{workflow}/{name}", line


@pytest.mark.parametrize("file", YAML, ids=name_of)
def test_files_are_yaml(file):
    """By structure where PyYAML is not here: two spaces a level, no tabs."""
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        indent = len(line) - len(line.lstrip(" "))
        assert "\t" not in line, f"{file.name}:{number}"
        assert indent % 2 == 0, f"{file.name}:{number}"
    assert isinstance(parsed(file), dict)


@pytest.mark.parametrize("file", WORKFLOWS, ids=name_of)
def test_workflows_are_whole(file):
    workflow = parsed(file)
    assert workflow["name"] == file.stem
    assert workflow[True], "`on`, which YAML 1.1 reads as a bool"
    assert workflow["permissions"] == {"contents": "read"}, "a job that needs more says so itself"
    for job in workflow["jobs"].values():
        assert job["runs-on"]
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v1)", step.get("uses", "actions/checkout@v4"))


def test_what_workflows_run_exists(capsys):
    from tilewise.tools.cli import main

    seen = list(commands())
    assert len(seen) >= 10
    targets = re.findall(r"(?m)^([a-z][\w-]*):", MAKE)
    for where, line in seen:
        words = shlex.split(line)
        if words[0] == "make":
            wanted = [word for word in words[1:] if "=" not in word]
            assert wanted, f"{where}: {line}"
            assert set(wanted) <= set(targets), f"{where}: {line}"
            assert all(re.search(rf"(?m)^{w.partition('=')[0]} \?=", MAKE) for w in words[1:] if "=" in w), line
        elif words[0] == "tilewise":
            with pytest.raises(SystemExit) as stop:
                main([words[1], "--help"])
            assert stop.value.code in (0, None), f"{where}: {line}"
            shown = capsys.readouterr().out
            assert all(word in shown for word in words if word.startswith("--")), f"{where}: {line}"
        elif words[0] == "python":
            assert words[1:3] in (["-m", "pip"], ["-m", "build"]), f"{where}: {line}"
        else:
            assert words[0] == "grep", f"{where}: {line}"
            assert (ROOT / words[-1]).exists(), f"{where}: {line}"


def test_every_python_is_tested_and_declared():
    declared = re.findall(r"Python :: (3\.\d+)\"", PROJECT)
    (matrix,) = [job["strategy"]["matrix"]["python"] for _, name, job in jobs() if name == "tests"]
    assert declared == matrix
    assert f'requires-python = ">={declared[0]}"' in PROJECT


def test_the_lowest_versions_are_those_of_the_package():
    (line,) = [line for where, line in commands() if where == "tests/lowest" and " install " in line]
    pinned = dict(re.findall(r'"([\w-]+)==([\d.]+)\.\*"', line))
    (required,) = re.findall(r"(?m)^dependencies = (\[.+\])", PROJECT)
    assert pinned == dict(re.findall(r'"([\w-]+)>=([\d.]+)"', required))


def test_a_tag_that_is_not_the_version_is_refused():
    """The release asks for this very line."""
    from tilewise import __version__

    text = (ROOT / "src/tilewise/__init__.py").read_text(encoding="utf-8").splitlines()
    assert f'__version__ = "{__version__}"' in text
    (line,) = [line for where, line in commands() if line.startswith("grep")]
    assert shlex.split(line)[2].startswith('__version__ = "')


def test_only_the_release_may_ask_for_an_identity():
    allowed = {(workflow, name): job.get("permissions") for workflow, name, job in jobs() if job.get("permissions")}
    assert allowed == {("release", "publish"): {"id-token": "write"}}
    assert not [file.name for file in WORKFLOWS if "secrets." in file.read_text(encoding="utf-8")]


def test_a_bug_report_asks_for_doctor():
    report = parsed(ROOT / ".github/ISSUE_TEMPLATE/bug_report.yml")
    asked = {item["id"]: item for item in report["body"]}
    assert "tilewise doctor" in asked["doctor"]["attributes"]["label"]
    assert asked["doctor"]["validations"] == {"required": True}


def test_a_machines_proof_has_a_template():
    """The block that `tilewise prove --report` prints is asked for, by its name in docs/platforms.md."""
    template = parsed(ROOT / ".github/ISSUE_TEMPLATE/machine_proof.yml")
    asked = {item["id"]: item for item in template["body"]}
    assert "tilewise prove --report" in asked["proof"]["attributes"]["label"]
    assert f'("{template["name"]}")' in (ROOT / "docs/platforms.md").read_text(encoding="utf-8")


def test_hooks_run_what_make_lint_runs():
    hooks = [hook for repo in parsed(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    entries = {hook["entry"].removesuffix(" --force-exclude") for hook in hooks}
    lint = MAKE.partition("\nlint:")[2].partition("\n\n")[0]
    assert entries == {line.strip().replace("$(BIN)", ".venv/bin") for line in lint.splitlines()[1:]}


def test_no_address_is_invented():
    """There is no home on the web yet: no link leads to one, and nobody's mail address is named."""
    files = [*YAML, *(ROOT / name for name in ("SECURITY.md", "CODE_OF_CONDUCT.md", "pyproject.toml"))]
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"github\.com|gitlab\.com|[\w.]+@\w+\.\w+", text), file.name
    assert "[project.urls]" not in PROJECT


@pytest.mark.parametrize(("version", "made", "taken"), [("standard", 1, 1), ("standard", 0, 0), ("editable", 1, 0)])
def test_kernels_that_were_made_go_into_the_wheel(version, made, taken, tmp_path, monkeypatch):
    interface = types.SimpleNamespace(BuildHookInterface=type("Hook", (), {"root": str(tmp_path)}))
    monkeypatch.setitem(sys.modules, "hatchling.builders.hooks.plugin.interface", interface)
    for name in ("hatchling", "hatchling.builders", "hatchling.builders.hooks", "hatchling.builders.hooks.plugin"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    scope = runpy.run_path(str(ROOT / "hatch_build.py"))
    folder, data = tmp_path / "build" / "prebuilt", {"force_include": {}}
    if made:
        folder.mkdir(parents=True)
    scope["ReadyKernels"]().initialize(version, data)
    assert data["force_include"] == ({str(folder): "tilewise/backends/cpu/prebuilt"} if taken else {})
    assert "tools/prebuilt_kernels.py build/prebuilt" in MAKE


def imports(file):
    """What a script imports from tilewise: modules and names. What it tries, for older versions, does not count."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    tried = {id(x) for node in ast.walk(tree) if isinstance(node, ast.Try) for x in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in tried and (node.module or "").startswith("tilewise"):
            yield from ((node.module, alias.name) for alias in node.names)


def test_what_scripts_import_exists():
    found = {(str(file.relative_to(ROOT)), *name) for file in SCRIPTS for name in imports(file)}
    assert len(found) > 200
    missing = []
    for file, module, name in sorted(found):
        try:
            loaded = importlib.import_module(module)
            if not hasattr(loaded, name):
                importlib.import_module(f"{module}.{name}")
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("tilewise"):  # others are packages that are not here
                missing.append((file, module, name))
    assert missing == []


# Packages of other projects that scripts import and that need not be installed here.
OTHERS = {"openai", "openvino", "peers_load", "triton", "vllm"}


def unresolved(file: Path, text: str) -> list[str]:
    """What a script imports that is nowhere: modules and names, without those of tilewise, by their text alone."""
    folders = [file.parent, *(ROOT / name for name in ("benchmarks/h200", "examples", "tools", "tests/helpers"))]
    folders.append(ROOT / "tests" / "backends" / "triton")
    missing = []
    for node in ast.walk(ast.parse(text)):
        wanted: list[tuple[str, list[str]]] = []
        if isinstance(node, ast.Import):
            wanted = [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            wanted = [(str(node.module), [alias.name for alias in node.names])]
        for module, names in wanted:
            top = module.partition(".")[0]
            if top in sys.stdlib_module_names or top in OTHERS or top == "tilewise":
                continue
            found = [folder / top for folder in folders if (folder / top).is_dir()]
            found += [folder / f"{top}.py" for folder in folders if (folder / f"{top}.py").exists()]
            if found and found[0].suffix:
                defined = names_in(found[0])
                missing += [f"{module}.{name}" for name in names if name not in defined]
            elif not found and importlib.util.find_spec(top) is None:
                missing.append(module)
    return missing


def names_in(file: Path) -> set[str]:
    """The names that a module has."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    imported = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    return names | {alias.asname or alias.name for node in imported for alias in node.names}


def test_modules_that_scripts_import_exist():
    missing = {str(file.relative_to(ROOT)): unresolved(file, file.read_text(encoding="utf-8")) for file in SCRIPTS}
    assert {file: names for file, names in missing.items() if names} == {}
    wrong = "from latent_variants import Variant\nfrom timing import seconds, minutes\nimport timing, nowhere\n"
    assert unresolved(ROOT / "benchmarks/h200/sparse.py", wrong) == ["latent_variants", "timing.minutes", "nowhere"]


def test_records_are_compact():
    for file in RECORDS.rglob("*.json"):
        if file.name != MATRIX:
            assert file.read_text() == compact(json.loads(file.read_text())), (
                f"{file.name}: run tools/compact_records.py"
            )


def test_help_of_a_tool_does_nothing(tmp_path):
    """Every script reads its arguments by argparse, so that --help is no folder's name."""
    scripts = [*ROOT.glob("tools/**/*.py"), *ROOT.glob("examples/*.py"), ROOT / "docs" / "pictures.py"]
    scripts = [file for file in scripts if "__main__" in file.read_text()]
    assert len(scripts) > 10
    assert [file.name for file in scripts if "argparse" not in file.read_text()] == []
    tool = str(ROOT / "tools" / "prebuilt_kernels.py")
    done = subprocess.run([sys.executable, tool, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    assert "FOLDER" in done.stdout
    assert list(tmp_path.iterdir()) == []
