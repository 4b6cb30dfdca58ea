"""g++, and what it has made: one runtime, and a library for each text, kept by hash in the user's cache."""

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from mslsim.text import Kernel, check_ascii, entries, to_cpp

HERE = Path(__file__).parent
NAME = "kernel.metal"  # what the text is called in messages

_COMMON = ["-fPIC", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off", "-fsigned-char"]
# No function of ours is to be replaced by another's of the same name: calls among them are direct.
_RUNTIME = [
    "-std=c++17",
    "-O2",
    "-g1",
    "-shared",
    "-pthread",
    "-fno-semantic-interposition",
    "-Wl,-Bsymbolic",
    *_COMMON,
]
_KERNEL = [
    # Older binutils take the files of DWARF 5 for one another.
    *[
        "-std=c++17",
        "-O1",
        "-g1",
        "-gdwarf-4",
        "-fno-var-tracking",  # lines are wanted, where variables are is not
        "-finline-small-functions",
        "-fvisibility-inlines-hidden",
        "-fno-plt",
        *_COMMON,
    ],
    # Two texts may declare the same arrays on the same lines; each library tells of its own.
    "-fno-gnu-unique",
    # MSL knows no double: 1.0 is a float.
    "-fsingle-precision-constant",
    # Each load and store is announced to the runtime; what the optimiser removes before that was never needed.
    *["-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0"],
    "-fsanitize=bounds,signed-integer-overflow,shift,integer-divide-by-zero",
    # A variable that is surely read before it has a value; of those that may be, see _poison.
    "-Werror=uninitialized",
]

# Only these can stand at a wrong address; looking for it makes a third of the time that compiling takes.
_VECTOR_POINTER = re.compile(r"\b(?:vec\s*<[^<>]*>|[a-z]+[234])\s*(?:const\s*)?[*&]")


def why_not() -> str | None:
    """Why this machine cannot run the simulator, or None."""
    if platform.system() != "Linux":
        return "mslsim runs on Linux only"
    if shutil.which("g++") is None:
        return "mslsim needs g++, which is not installed"
    return None


@cache
def cache_folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for folder in (base / "mslsim", Path(tempfile.gettempdir()) / f"mslsim-{os.getuid()}"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise RuntimeError(f"mslsim: neither {base} nor the folder for temporary files can be written")


def _forget_old() -> None:
    """Whenever the simulator or the compiler is new: what was not made in the last month."""
    for path in cache_folder().iterdir():
        with contextlib.suppress(OSError):  # another process may be quicker
            if time.time() - path.stat().st_mtime > 30 * 86400:
                path.unlink()


@cache
def _identity() -> bytes:
    """Of the simulator and the compiler: what they make depends on nothing else but the text."""
    reason = why_not()
    if reason:
        raise RuntimeError(reason)
    gxx = Path(shutil.which("g++") or "").resolve()
    parts = [f"{gxx} {gxx.stat().st_size} {gxx.stat().st_mtime_ns} {platform.machine()}".encode()]
    for path in sorted(p for p in HERE.rglob("*") if p.is_file() and p.suffix not in {".pyc", ".md"}):
        parts += [str(path.relative_to(HERE)).encode(), path.read_bytes()]
    return hashlib.sha256(b"\0".join(parts)).digest()


def _kept(path: Path, make: Callable[[Path], None]) -> None:
    """`make(temporary)` unless `path` is there; processes that want the same wait for the first of them."""
    if path.exists():
        return
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            temporary = path.with_suffix(f".{os.getpid()}{path.suffix}")
            make(temporary)
            temporary.replace(path)


def _run(command: list[str], text: str | None = None) -> str:
    plain = os.environ | {"LC_ALL": "C"}  # messages in English and ASCII
    done = subprocess.run(["g++", *command], input=text, capture_output=True, text=True, env=plain)
    if done.returncode:
        raise SyntaxError(done.stderr[:6000])
    return done.stdout


@cache
def runtime() -> tuple[Path, ctypes.CDLL]:
    path = cache_folder() / f"runtime-{_identity().hex()[:24]}.so"

    def make(out: Path) -> None:
        _forget_old()
        includes = ["-I", str(HERE / "include"), "-I", str(HERE / "runtime")]
        _run([*_RUNTIME, *includes, str(HERE / "runtime" / "runtime.cpp"), "-o", str(out)])

    _kept(path, make)
    return path, ctypes.CDLL(str(path))


@cache
def _poison() -> list[str]:
    """Variables without a value hold 0xfe..., which is a NaN in half and an absurd number otherwise: from g++ 12 on."""
    version = subprocess.run(["g++", "-dumpversion"], capture_output=True, text=True, check=True).stdout
    return ["-ftrivial-auto-var-init=pattern"] if int(version.split(".")[0]) >= 12 else []


def _preprocessed(source: str) -> str:
    """Macros expanded and `#if` decided, so that kernels are found as the compiler sees them."""
    lines = ["" if line.lstrip().startswith("#include") else line for line in source.split("\n")]
    text = f'# 1 "{NAME}"\n' + "\n".join(lines)
    return _run(["-E", "-std=c++17", "-D__METAL__", "-D__METAL_VERSION__=310", "-x", "c++", "-"], text)


@cache  # a library tells the sizes of its arrays once, when it is loaded
def build(source: str, defines: tuple[str, ...] = ()) -> tuple[ctypes.CDLL, Path, list[Kernel]]:
    """The loaded library of a text, its file, and its kernels."""
    check_ascii(source)
    runtime_path, runtime_library = runtime()
    key = hashlib.sha256(_identity() + repr((_KERNEL, defines, source)).encode()).hexdigest()[:32]
    path = cache_folder() / f"{key}.so"
    record = path.with_suffix(".json")

    def make(out: Path) -> None:
        text, kernels = to_cpp(_preprocessed(source))
        cpp = path.with_suffix(f".{os.getpid()}.cpp")
        cpp.write_text(f'#include <metal_stdlib>\n{text}\n# 1 "mslsim"\n{entries(kernels)}')
        alignment = ["-fsanitize=alignment"] if _VECTOR_POINTER.search(text) else []
        flags = [*_KERNEL, *_poison(), *alignment, *(f"-D{d}" for d in defines), "-I", str(HERE / "include")]
        made = out.with_suffix(".o")
        try:
            _run([*flags, "-c", str(cpp), "-o", str(made)])
            _run(["-shared", str(made), str(runtime_path), f"-Wl,-rpath,{runtime_path.parent}", "-o", str(out)])
        finally:
            cpp.unlink()
            made.unlink(missing_ok=True)
        record.write_text(json.dumps([k.to_json() for k in kernels]))

    _kept(path, make)
    if path not in _LOADED:  # a library tells the sizes of its arrays only once
        library = ctypes.CDLL(str(path))
        kernels = [Kernel.from_json(r) for r in json.loads(record.read_text())]
        _learn(library, runtime_library, kernels)
        _LOADED[path] = library, kernels
    library, kernels = _LOADED[path]
    return library, path, kernels


_LOADED: dict[Path, tuple[ctypes.CDLL, list[Kernel]]] = {}


def _learn(library: ctypes.CDLL, runtime_library: ctypes.CDLL, kernels: list[Kernel]) -> None:
    """What only the compiler knows: sizes of elements and of threadgroup arrays."""
    room = 1024
    ids, sizes, lines = (ctypes.c_int * room)(), (ctypes.c_ulong * room)(), (ctypes.c_int * room)()
    count = runtime_library.mslsim_told(ids, sizes, lines, room)
    told: dict[int, int] = {}
    for i in range(count):
        told[ids[i]] = max(told.get(ids[i], 0), sizes[i])
    for k in kernels:
        k.shared_bytes = sum(-(-told.get(i, 0) // 16) * 16 for i in k.arrays)
        described = (ctypes.c_uint * (2 * len(k.parameters) or 1))()
        getattr(library, f"mslsim_describe_{k.name}")(described)
        for i, p in enumerate(k.parameters):
            p.unit, p.writable = described[2 * i], bool(described[2 * i + 1])


def lines_of(path: Path, offsets: list[int]) -> list[int]:
    """The lines of the text that made the code at these offsets of a library; 0 where none did."""
    done = subprocess.run(
        ["addr2line", "-i", "-a", "-e", str(path), *(hex(max(o - 1, 0)) for o in offsets)],
        capture_output=True,
        text=True,
    )
    found: list[int] = []
    for row in done.stdout.splitlines():
        if row.startswith("0x"):
            found.append(0)
        elif found and not found[-1] and NAME in row.rsplit(":", 1)[0]:
            number = row.rsplit(":", 1)[1].split()[0]
            found[-1] = int(number) if number.isdigit() else 0
    return found if len(found) == len(offsets) else [0] * len(offsets)
