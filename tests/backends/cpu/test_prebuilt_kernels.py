"""Kernels that come with the package: for which CPUs, wrong files, and that they are taken."""

import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import prebuilt_kernels
from tilewise.backends.cpu import compiler, kernel_cache, prebuilt
from tilewise.backends.cpu.object_code import emit_object
from tilewise.backends.cpu.targets import TARGETS, V3, V4, matching
from tilewise.tools import doctor_backends
from tiny_kernel import adding, no_compiler, run_tiny, said

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="releases bring kernels for Linux")
ROOT = Path(__file__).parents[3]
BF16 = f"{V4} avx512vnni avx512bf16"


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """An empty place for kept kernels, and nothing said yet."""
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(kernel_cache, "_warned", set())
    return tmp_path / "kept"


@pytest.mark.parametrize(
    ("machine", "features", "name"),
    [
        ("x86_64", "sse4.2 avx", None),  # Ivy Bridge
        ("x86_64", V3, "avx2"),  # Haswell, Zen 1 to 3
        ("x86_64", f"{V3} avxvnni gfni", "avx2"),  # Alder Lake
        ("x86_64", V4, None),  # Skylake-X: 16 lanes, no VNNI
        ("x86_64", f"{V4} avx512vnni", "avx512vnni"),  # Cascade Lake
        ("x86_64", f"{V4} avx512vnni avx512vbmi vaes", "avx512vnni"),  # Ice Lake
        ("x86_64", f"{V4} avx512bf16", None),
        ("x86_64", f"{BF16} avx512vbmi", "avx512bf16"),  # Zen 4
        ("x86_64", f"{BF16} amx-tile amx-bf16 amx-int8 avx512fp16", "amx"),  # Sapphire Rapids
        ("x86_64", f"{BF16} amx-tile", None),
        ("x86_64", BF16.replace("fma ", ""), None),
        ("aarch64", "neon fp-armv8", None),  # Cortex-A72
        ("aarch64", "neon fp-armv8 fullfp16 dotprod lse crc", "neon"),  # Neoverse N1
        ("aarch64", V3, None),
        ("riscv64", V3, None),
    ],
)
def test_a_cpu_has_the_kernels_that_would_be_compiled_for_it(machine, features, name):
    assert matching(machine, set(features.split())) == name


def test_the_emulated_machine_takes_a_wheels_kernels():
    given = runpy.run_path(str(ROOT / "tools/arm/environment.py"))["FEATURES"]
    assert matching("aarch64", {name.removeprefix("+") for name in given.split(",")}) == "neon"


def test_every_target_is_its_own():
    for name, target in TARGETS.items():
        assert matching(target.triple.partition("-")[0], set(target.features)) == name


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A package that brings a kernel `tiny`, which adds 1, for a CPU that this one is taken for."""
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "prebuilt")
    monkeypatch.setattr(prebuilt, "cpu_features", lambda: set(TARGETS["avx2"].features))
    monkeypatch.setattr(prebuilt, "machine", lambda: "x86_64")
    monkeypatch.setattr(compiler, "definition", lambda name: (adding(1), name, compiler.types.void))
    monkeypatch.setattr(compiler, "_kernels", {})
    prebuilt.target.cache_clear()
    prebuilt.write(prebuilt.FOLDER, "tiny", "avx2", emit_object(adding(1), "tiny"))
    yield prebuilt.FOLDER / "avx2" / "tiny.o"
    prebuilt.target.cache_clear()


def tiny():
    compiler._kernels.clear()
    return run_tiny(compiler.kernel("tiny"))


def test_a_prebuilt_kernel_is_loaded_and_nothing_is_written(folder, home, monkeypatch):
    for path in (folder, folder.parent, folder.parent.parent):
        path.chmod(path.stat().st_mode & 0o555)
    no_compiler(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tiny() == 42
    assert not home.exists()
    assert [file.name for file in folder.parent.iterdir()] == ["tiny.o"]
    folder.parent.parent.chmod(0o755)
    folder.parent.chmod(0o755)


def spoil(how, file, monkeypatch):
    whole = file.read_bytes()
    if how == "missing":
        file.unlink()
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "cut":
        file.write_bytes(whole[: len(whole) // 2])
    elif how == "flipped":
        file.write_bytes(whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:])
    elif how == "of another version":
        monkeypatch.setattr(prebuilt, "__version__", "0.0.1")
    elif how == "of other sources":
        monkeypatch.setattr(prebuilt, "sources", lambda: "other")
    elif how == "of another target":
        prebuilt.write(file.parent.parent, "tiny", "avx512vnni", emit_object(adding(2), "tiny"))
        (file.parent.parent / "avx512vnni" / "tiny.o").replace(file)
    else:
        prebuilt.write(file.parent.parent, "other", "avx2", emit_object(adding(2), "tiny"))
        file.with_name("other.o").replace(file)


DAMAGE = ["missing", "empty", "cut", "flipped"]
OTHERS = ["of another version", "of other sources", "of another target", "of another kernel"]


@pytest.mark.parametrize("how", DAMAGE + OTHERS)
def test_what_is_not_as_it_was_made_is_compiled_and_said_once(how, folder, monkeypatch):
    spoil(how, folder, monkeypatch)
    with said() as warned:
        assert [tiny(), tiny()] == [42, 42]
    assert len(warned) == 1
    assert f"{folder} cannot be used (" in str(warned[0].message)
    assert list(kernel_cache.cache_directory().glob("tiny.*.o"))


@pytest.mark.parametrize("what", ["another CPU", "another system", "no folder", "no tiles"])
def test_others_compile_without_a_word(what, folder, monkeypatch):
    if what == "another CPU":
        monkeypatch.setattr(prebuilt, "cpu_features", lambda: set(V4.split()))
    elif what == "another system":
        monkeypatch.setattr(prebuilt.sys, "platform", "darwin")
    elif what == "no folder":
        monkeypatch.setattr(prebuilt, "FOLDER", folder.parent / "nothing")
    else:  # tiles that the system does not let this process use, in a package without what is then its target
        monkeypatch.setattr(prebuilt, "cpu_features", lambda: set(TARGETS["amx"].features))
        monkeypatch.setattr(prebuilt.amx, "usable", lambda: False)
    assert prebuilt.target() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tiny() == 42


def test_tiles_that_may_not_be_used_are_not_there(folder, monkeypatch):
    for name in ("amx", "avx512bf16"):
        (prebuilt.FOLDER / name).mkdir()
    monkeypatch.setattr(prebuilt, "cpu_features", lambda: set(TARGETS["amx"].features))
    for usable, name in ((True, "amx"), (False, "avx512bf16")):
        prebuilt.target.cache_clear()
        monkeypatch.setattr(prebuilt.amx, "usable", lambda usable=usable: usable)
        assert prebuilt.target() == name


def test_what_is_prebuilt_is_counted(folder, monkeypatch):
    monkeypatch.setattr(compiler, "KERNELS", ["tiny", "second"])
    assert compiler.on_disk() == ({"tiny"}, set())
    assert doctor_backends.kept_kernels().startswith(
        "1 of 2 compiled, 1 of them prebuilt, from the package; `tilewise warmup`"
    )
    compiler.compile_function(adding(1), "second")
    assert compiler.on_disk() == ({"tiny"}, {"second"})
    assert doctor_backends.kept_kernels() == "2 of 2 compiled, 1 of them prebuilt, from the package"


@pytest.mark.filterwarnings("ignore")  # JAX, which another test may have imported, warns of every fork
def test_a_forked_process_goes_on_with_its_parents_and_loads_its_own(folder, monkeypatch):
    no_compiler(monkeypatch)
    kernel = compiler.kernel("tiny")
    child = os.fork()
    if child == 0:
        os._exit(0 if run_tiny(kernel) == tiny() == 42 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert run_tiny(kernel) == 42


def test_an_object_defines_its_kernel_and_needs_nothing_of_numba():
    defined, wanted = prebuilt_kernels.symbols(emit_object(adding(1), "tiny"))
    assert defined == {"tiny", "tiny.entry"}
    assert wanted == {name for name in prebuilt_kernels.CALLED if name.startswith("Py")}


SCRIPT = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from tilewise.backends.cpu import compiler, object_code, prebuilt
from tiny_kernel import adding, no_compiler, run_tiny, said
prebuilt.FOLDER = Path({folder!r})
prebuilt.cpu_features, prebuilt.machine = (lambda: set(prebuilt.TARGETS["avx2"].features)), (lambda: "x86_64")
object_code.compile_linked = None
assert run_tiny(compiler.kernel("tiny")) == 42
"""


def test_processes_at_once(folder):
    code = SCRIPT.format(path=sys.path, folder=str(prebuilt.FOLDER))
    started = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) for _ in range(2)]
    for process in started:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
        assert errors == b""


@pytest.mark.parametrize("target", ["avx2", "neon"])
def test_kernels_are_compiled_for_cpus_that_are_not_here(target, tmp_path):
    """`make` looks at each object: its machine, what it defines, what it calls."""
    prebuilt_kernels.main(str(tmp_path), target, names=["combine"])
    code = kernel_cache.checked((tmp_path / target / "combine.o").read_bytes(), prebuilt.key("combine", target))
    prebuilt_kernels.check(code, "combine", TARGETS[target].triple.partition("-")[0])
    with pytest.raises(AssertionError, match="of another machine"):
        prebuilt_kernels.check(code, "combine", "aarch64" if target == "avx2" else "x86_64")
    with pytest.raises(AssertionError, match="combine"):
        prebuilt_kernels.check(code, "decode", TARGETS[target].triple.partition("-")[0])


BITS = """
import hashlib, sys, torch
from pathlib import Path
from tilewise import attention
from tilewise.backends.cpu import object_code, prebuilt
prebuilt.FOLDER = Path(sys.argv[1])
if prebuilt.FOLDER.is_dir():
    object_code.compile_linked = None
torch.manual_seed(0)
digest = hashlib.sha256()
for dtype in (torch.float32, torch.bfloat16):
    for rows in (1, 70):
        q, k, v = (torch.randn(2, 4, n, 64).to(dtype) * 2 for n in (rows, 150, 150))
        out, lse = attention(q, k, v, causal=True, window=100, softcap=20.0, return_lse=True)
        digest.update(out.view(torch.uint8).numpy().tobytes() + lse.numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.mark.slow
def test_bits_are_those_of_compiled_kernels(tmp_path):
    from tilewise.backends.cpu.gemm import amx
    from tilewise.backends.cpu.isa import cpu_features, machine

    target = matching(machine(), cpu_features() - (set() if amx.usable() else {"amx-tile", "amx-bf16"}))
    if target is None:
        pytest.skip("no target is this CPU")
    names = [name for name in compiler.KERNELS if name.partition(" ")[0] in BITS_KERNELS]
    prebuilt_kernels.main(str(tmp_path / "prebuilt"), target, names=names)
    environment = {**os.environ, "TILEWISE_CACHE_DIR": str(tmp_path / "kept")}
    bits = [
        subprocess.run(
            [sys.executable, "-c", BITS, str(folder)], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for folder in (tmp_path / "prebuilt", tmp_path / "nothing")
    ]
    assert bits[0] == bits[1] != ""


BITS_KERNELS = (
    "schedule launch worker thread_main combine decode prefill prefill_amx prefill_dot qk pv amx_qk amx_pv".split()
)
