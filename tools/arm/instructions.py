"""How many AArch64 instructions a first call executes: compiling its kernels, or with those of a wheel.

    python tools/arm/instructions.py FOLDER --json RECORD
    python tools/arm/instructions.py FOLDER --json RECORD --wheel dist/tilewise-0.1.0-py3-none-any.whl

`environment.py` makes the folder. Emulated seconds say nothing of a real core, instructions do: qemu counts them by a
plugin, which its static build cannot load: Debian's other build is downloaded, and `cc` makes the plugin. All threads
run on one core, so that no addition to the count is lost. The record has billions of instructions, beyond
`import torch`, and the seconds that they take at one a cycle of a Graviton2.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path

from environment import apt, run, unpack

from conformance import SOURCE, unpacked

PACKAGES = ("qemu-user", "libcapstone4", "liburing2")
GIGAHERTZ = 2.5  # of a Graviton2
# The counter lies in a file, which the program that is counted reads.
PLUGIN = r"""
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
int qemu_plugin_version = 1;
size_t qemu_plugin_tb_n_insns(const void *);
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t, void (*)(uint64_t, void *));
void qemu_plugin_register_vcpu_tb_exec_inline(void *, int, void *, uint64_t);
static uint64_t *count;
static void translated(uint64_t id, void *block) {
    qemu_plugin_register_vcpu_tb_exec_inline(block, 0, count, qemu_plugin_tb_n_insns(block));
}
int qemu_plugin_install(uint64_t id, const void *info, int argc, char **argv) {
    count = mmap(0, 8, PROT_READ | PROT_WRITE, MAP_SHARED, open(getenv("INSTRUCTIONS"), O_RDWR), 0);
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    return count == MAP_FAILED;
}
"""
PROGRAM = """
import json, os, sys
def count():
    with open(os.environ["INSTRUCTIONS"], "rb") as file:
        return int.from_bytes(file.read(8), "little")
import torch
counts = [count()]
import tilewise
counts.append(count())
q, k = torch.ones(1, 8, int(sys.argv[1]), 64), torch.ones(1, 8, 512, 64)
for _ in range(2):
    tilewise.attention(q, k, k, causal=True)
    counts.append(count())
print(json.dumps(counts))
"""
CALLS = {"prefill f32": 512, "decode f32": 1}


def counting(folder: Path) -> dict[str, str]:
    """The environment in which `folder`'s Python runs under a qemu that counts."""
    own = folder / "counting"
    if not (own / "count.so").exists():
        host = subprocess.check_output(["dpkg", "--print-architecture"], text=True).strip()
        packages = own / "packages"
        packages.mkdir(parents=True, exist_ok=True)
        options = apt(own, host)
        run(*options, "update")
        run(*options, "download", *PACKAGES, cwd=packages)
        unpack(packages, own)
        (own / "count.c").write_text(PLUGIN)
        run("cc", "-shared", "-fPIC", "-O2", str(own / "count.c"), "-o", str(own / "count.so"))
    libraries = next(own.glob("usr/lib/*/libcapstone.so.*")).parent
    return {"QEMU": str(own / "usr/bin/qemu-aarch64"), "QEMU_PLUGIN": str(own / "count.so"),
            "LD_LIBRARY_PATH": str(libraries), "OMP_NUM_THREADS": "1"}  # fmt: skip


def counted(folder: Path, package: Path, rows: int) -> dict[str, float]:
    """Billions of instructions in a new process without kept kernels: of the import, the first call, the second."""
    with tempfile.TemporaryDirectory() as kept:
        file = Path(kept) / "instructions"
        file.write_bytes(bytes(8))
        own = {"PYTHONPATH": str(package), "TILEWISE_CACHE_DIR": f"{kept}/kernels", "INSTRUCTIONS": str(file)}
        done = subprocess.run(
            ["taskset", "-c", "0", str(folder / "python"), "-c", PROGRAM, str(rows)],
            env=os.environ | counting(folder) | own, check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
    counts = json.loads(done.stdout)
    names = ("import tilewise", "first call", "second call")
    return {name: round((b - a) / 1e9, 4) for name, a, b in zip(names, counts, counts[1:], strict=False)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, required=True, help="the record, read and written")
    parser.add_argument("--calls", default=",".join(CALLS), help="comma separated")
    parser.add_argument("--wheel", type=Path, help="take the package out of this one")
    given = parser.parse_args()
    folder, kernels = given.folder.resolve(), "compiled" if given.wheel is None else "of a wheel"
    package = SOURCE if given.wheel is None else unpacked(given.wheel, folder)
    held = json.loads(given.json.read_text()) if given.json.exists() else {}
    for call in given.calls.split(","):
        found = counted(folder, package, CALLS[call])
        found["seconds"] = round((found["import tilewise"] + found["first call"]) / GIGAHERTZ, 2)
        held |= {f"{call}, kernels {kernels}": found}
        print(call, found, flush=True)
        given.json.write_text(json.dumps(held, indent=1) + "\n")


if __name__ == "__main__":
    main()
