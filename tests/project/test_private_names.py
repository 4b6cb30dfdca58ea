"""Private names of other libraries are in one file for each library, with the versions that were seen to have them."""

import ast
import importlib
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tilewise.core import private
from tilewise.tools import doctor
from tilewise.tools.bench.machine import version_of

SRC = Path(__file__).resolve().parents[2] / "src/tilewise"
FILES = {f"{name.removeprefix('tilewise.').replace('.', '/')}.py" for name, _ in private.FILES.values()}
LIBRARIES = {"torch", "numba", "llvmlite", "triton"}
PRIVATE_MODULES = (
    "numba.core",
    "triton.backends",
    "triton.compiler",
    "triton.experimental",
    "triton.knobs",
    "triton.runtime",
)
OTHERS = {"_asdict", "_fields", "_getframe", "_replace"}  # of Python
ELSEWHERE = {  # of other libraries
    "compat/flex_attention.py": {"_instance"},
    "compat/xformers.py": {"_bias", "_window_size"},
    "tools/serve.py": {"_chat_handler", "_completion_handler", "_model_manager", "_response_handler", "_thread"},
    "tools/serve_requests.py": {"_build_generation_config"},
    "tools/bench/peers/cpu_attn.py": {"_C"},  # torch.ops._C is what vLLM calls its operators
}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def names_of_ours(trees):
    """Names with an underscore that the package itself defines."""
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) == "self":
                yield node.attr


def dotted(node):
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return before and f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def imported(node):
    """The absolute paths of what an import statement names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def uses(tree, ours):
    """Private names of other libraries that a module imports, reads or sets."""
    for node in ast.walk(tree):
        for path in imported(node):
            parts = path.split(".")
            if parts[0] in LIBRARIES and (any(map(is_private, parts)) or path.startswith(PRIVATE_MODULES)):
                yield path
        if isinstance(node, ast.Attribute):
            path = dotted(node) or ""
            if (is_private(node.attr) and node.attr not in ours) or path.startswith(PRIVATE_MODULES):
                yield node.attr


@pytest.fixture(scope="module")
def trees():
    return {
        str(file.relative_to(SRC)): ast.parse(file.read_text(encoding="utf-8")) for file in sorted(SRC.rglob("*.py"))
    }


@pytest.fixture(scope="module")
def ours(trees):
    return {*names_of_ours(trees.values()), *OTHERS}


def test_no_other_file_uses_them(trees, ours):
    assert trees.keys() >= FILES
    found = {
        (file, name)
        for file, tree in trees.items()
        if file not in FILES
        for name in uses(tree, ours)
        if name not in ELSEWHERE.get(file, ())
    }
    assert found == set()


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch._C import _functorch",
        "from torch.utils._pytree import tree_map",
        "torch._C._is_tracing()",
        "x.untyped_storage()._cdata",
        "function._torchdynamo_disable = True",
        "from numba.core import cgutils",
        "from numba.core.dispatcher import _FunctionCompiler",
        "numba.core.registry.cpu_target",
        "library._final_module",
        "from triton.experimental import gluon",
        "from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST",
        "triton.knobs.runtime.interpret",
        "from triton._C.libtriton import ir",
    ],
)
def test_a_planted_use_is_found(line, ours):
    assert list(uses(ast.parse(line), ours)) != []


@pytest.mark.parametrize("library", private.FILES)
def test_what_is_listed_is_there(library):
    """Also that nothing else is found by path: each has a list of versions."""
    module = importlib.import_module(private.FILES[library][0])
    version = version_of("triton" if library == "Gluon" else library)
    assert private.absent(module.SEEN, version) == []
    listed = {path for path, _ in private.wanted(module.SEEN, version)}
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and dotted(node.func) == "find"]
    paths = {node.args[0].value for node in found if isinstance(node.args[0], ast.Constant)}
    paths = {path for path in paths if path.rpartition(".")[2] not in vars(module).get("CUDA", "")}  # torch for GPUs
    assert {path for path in paths if not any(x == path or x.startswith(f"{path}.") for x in listed)} == set()


def test_a_version_between_is_taken_as_the_older_one():
    seen = {"os": {"1.2 1.4": "path.sep", "1.4": "sep", "1.2": "no_such"}}
    for version, names in {
        "1.1": "path.sep no_such",
        "1.3.9": "path.sep no_such",
        "1.4": "path.sep sep",
        "2.0+x": "path.sep sep",
    }.items():
        assert [path for path, _ in private.wanted(seen, version)] == [f"os.{name}" for name in names.split()]
    assert private.absent(seen, "1.3") == ["no os.no_such, which was there in 1.2"]
    assert private.absent(seen, "1.4") == []


def test_a_missing_name_breaks_what_needs_it():
    missing = private.find("torch._C._no_such_name")
    for use in (missing, lambda: missing.field, lambda: types.new_class("Class", (missing,))):
        with pytest.raises(ImportError, match=r"the installed torch has no torch\._C\._no_such_name; `tilewise"):
            use()


BROKEN = """
import torch, triton, numba.core.serialize
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
del torch._C._is_any_autocast_enabled, mbarrier.expect, numba.core.serialize.dumps
import tilewise
q = torch.ones(1, 1, 3, 8)
assert tilewise.attention(q, q, q, backend="torch").equal(q)
from tilewise.compat import sdpa
try:
    sdpa.scaled_dot_product_attention(q, q, q)
except ImportError as error:
    print(error)
from tilewise.tools.doctor import doctor
doctor()
"""


def test_doctor_says_what_is_missing():
    done = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert "the installed torch has no torch._C._is_any_autocast_enabled" in text
    assert "no torch._C._is_any_autocast_enabled, which was there in 2.6, 2.11, 2.13, 2.15" in text
    assert "no numba.core.serialize.dumps, which was there in 0.60, 0.68" in text
    assert "Traceback" not in text


def test_doctor_is_silent_where_all_is_there(capsys):
    doctor.doctor()
    assert "which was there" not in capsys.readouterr().out
