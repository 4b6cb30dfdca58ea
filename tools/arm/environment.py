"""Make a folder in which an x86 Linux machine runs AArch64 Python: qemu-user, Debian's Python, wheels from PyPI.

Nothing is installed and no root is needed: packages are downloaded and unpacked. Debian or a container of it is needed,
since its own apt lists are read. `FOLDER/python` then runs scripts as an ARM machine would:

    python tools/arm/environment.py FOLDER
"""

import argparse
import os
import subprocess
import sys
import zipfile
from pathlib import Path

SYSTEM = ("python3", "python3-distutils", "libgomp1", "libstdc++6", "zlib1g")
# The last whose ARM wheel on PyPI is not a CUDA build. Its dependencies are named here: pip would take those of an
# x86 torch, since it reads their conditions for the machine that it runs on.
TORCH = "torch==2.8.0"
WHEELS = (
    "numpy",
    "numba",
    "pytest",
    "hypothesis",
    "filelock",
    "fsspec",
    "jinja2",
    "networkx",
    "sympy",
    "typing_extensions",
    "setuptools",
)
PLATFORMS = ("manylinux2014_aarch64", "manylinux_2_27_aarch64", "manylinux_2_28_aarch64", "any")
# LLVM reads the host's /proc/cpuinfo, finds no ARM core there and uses none of its features.
CPU, FEATURES = "neoverse-n1", "+neon,+fp-armv8,+fullfp16,+dotprod,+lse,+rdm,+crc"


def run(*command: str, cwd: Path | None = None) -> None:
    print("+", " ".join(command[:2]), "...", command[-1], flush=True)
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"failed ({done.returncode}): {' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def apt(folder: Path, architecture: str) -> list[str]:
    """Options for an apt of its own: this machine's Debian sources, another architecture, nothing installed."""
    own = folder / "apt" / architecture
    for name in ("state/lists/partial", "cache/archives/partial", "sources"):
        (own / name).mkdir(parents=True, exist_ok=True)
    (own / "status").touch()
    system = Path("/etc/apt/sources.list.d/debian.sources")
    link = own / "sources" / system.name
    if system.exists() and not link.exists():
        link.symlink_to(system)
    sources = "/dev/null" if system.exists() else "/etc/apt/sources.list"
    options = {
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "Dir::State": own / "state",
        "Dir::State::status": own / "status",
        "Dir::Cache": own / "cache",
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": own / "sources",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "",
    }
    return ["apt-get", "-q", "-y", *(f"-o{key}={value}" for key, value in options.items())]


def unpack(packages: Path, root: Path) -> None:
    root.mkdir(exist_ok=True)
    for package in sorted(packages.glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(package), str(root)], check=True)


def system(folder: Path) -> None:
    """qemu for this machine and Python for ARM, unpacked below `folder`."""
    host = subprocess.check_output(["dpkg", "--print-architecture"], text=True).strip()
    options = apt(folder, host)
    run(*options, "update")
    run(*options, "download", "qemu-user-static", cwd=folder / "apt" / host)
    unpack(folder / "apt" / host, folder / "qemu")
    options = apt(folder, "arm64")
    run(*options, "update")
    run(*options, "--download-only", "install", *SYSTEM)
    unpack(folder / "apt" / "arm64" / "cache" / "archives", folder / "root")


def wheels(folder: Path, version: str) -> None:
    """What tilewise imports and its tests, for ARM: unpacked, since nothing here could run an installer."""
    short = version.replace(".", "")
    platforms = [f"--platform={name}" for name in PLATFORMS]
    for names in ((TORCH, "--no-deps"), WHEELS):
        run(sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", *platforms, "--implementation=cp",
            f"--python-version={version}", f"--abi=cp{short}", "--abi=abi3", "--abi=none",
            f"--dest={folder / 'wheels'}", *names)  # fmt: skip
    for wheel in (folder / "wheels").glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "site")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "root" / "usr" / "bin").exists():
        system(folder)
    python = sorted((folder / "root" / "usr" / "bin").glob("python3.[0-9]*"))[0]
    if not (folder / "site" / "torch").exists():
        wheels(folder, python.name.removeprefix("python"))
    script = folder / "python"
    script.write_text(
        "#!/bin/sh\n"
        f'export PYTHONPATH="{folder / "site"}${{PYTHONPATH:+:$PYTHONPATH}}"\n'
        f"export NUMBA_CPU_NAME=${{NUMBA_CPU_NAME:-{CPU}}} NUMBA_CPU_FEATURES=${{NUMBA_CPU_FEATURES:-{FEATURES}}}\n"
        f'exec ${{QEMU:-{folder}/qemu/usr/bin/qemu-aarch64-static}} -cpu max -L {folder}/root {python} "$@"\n'
    )
    script.chmod(0o755)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([str(script), "-c", "import platform, numpy; print(platform.machine(), numpy.__version__)"], env=env)


if __name__ == "__main__":
    main()
