"""Mesa's compiler for Apple's GPUs and clang, from packages of Debian sid, unpacked into a folder.

apt downloads them by its own rules (signatures are checked) into a root of its own, `.cache/agx`. Nothing is installed:
programs run in that folder by chroot, in a mount namespace of their own, which needs no rights of the superuser.
"""

import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".cache" / "agx"
ROOT = FOLDER / "root"
WORK = ROOT / "build"  # /build for the programs
WANTED = ("mesa-drm-shim", "mesa-opencl-icd", "ocl-icd-libopencl1", "clang-22")
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
MIRROR = "http://deb.debian.org/debian"
_ENTER = 'for x in proc sys dev; do mount --rbind /$x "$0/$x"; done; exec chroot "$0" "$@"'


def unpack() -> None:
    """Downloads and unpacks the packages, if that has not been done."""
    done = FOLDER / "unpacked"
    if done.exists():
        return
    apt = FOLDER / "apt"
    for part in (
        "etc/apt/preferences.d",
        "var/lib/apt/lists/partial",
        "var/lib/dpkg",
        "var/cache/apt/archives/partial",
    ):
        (apt / part).mkdir(parents=True, exist_ok=True)
    (apt / "var/lib/dpkg/status").touch()
    (apt / "etc/apt/sources.list").write_text(f"deb [arch=amd64 signed-by={KEYS}] {MIRROR} sid main\n")
    options = [f"Dir={apt}", f"Dir::State::status={apt}/var/lib/dpkg/status", "Dir::Bin::dpkg=/usr/bin/dpkg"]
    client = ["apt-get", "-qq", *(f"-o{option}" for option in options)]
    subprocess.run([*client, "update"], check=True)
    subprocess.run([*client, "install", "-y", "--download-only", "--no-install-recommends", *WANTED], check=True)
    for part in ("bin", "lib", "lib64", "sbin"):
        (ROOT / "usr" / part).mkdir(parents=True, exist_ok=True)
        if not (ROOT / part).is_symlink():
            (ROOT / part).symlink_to(f"usr/{part}")
    for part in ("proc", "sys", "dev", "tmp", "build"):
        (ROOT / part).mkdir(exist_ok=True)
    for package in archives():
        subprocess.run(["dpkg", "-x", str(package), str(ROOT)], check=True)
    done.touch()


def archives() -> list[Path]:
    return sorted((FOLDER / "apt/var/cache/apt/archives").glob("*.deb"))


@cache
def versions() -> dict[str, str]:
    """Of the packages that the numbers depend on."""
    parts = [path.stem.split("_") for path in archives()]
    return {name: version.replace("%3a", ":") for name, version, _ in parts if name in WANTED}


def inside(command: Sequence[str], environment: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    """Runs a program of the unpacked packages."""
    enter = ["unshare", "--map-root-user", "--mount", "sh", "-c", _ENTER, str(ROOT), *command]
    variables = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/tmp"} | (environment or {})
    return subprocess.run(enter, capture_output=True, text=True, env=variables, timeout=900)
