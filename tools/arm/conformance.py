"""Run the small half of the conformance suite on the CPU backend as an AArch64 machine does.

`environment.py` makes the folder that this needs:

    python tools/arm/conformance.py FOLDER --json RECORD
    python tools/arm/conformance.py FOLDER --json RECORD --wheel dist/tilewise-0.1.0-py3-none-any.whl

With a wheel (`make wheel`) the package that is in it, whose kernels are prebuilt: nothing is compiled there.

Each case is judged as everywhere (float64 oracle, twice torch's own error), here against the torch of that machine.
Emulation is some 20 times slower: cases of few cells are taken from every part of the suite, a second process must find
the kernels of the first on disk and give its bits, and the record goes on from where an earlier run stopped.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent.parent / "src"
MOST_CELLS = 60_000  # of a case: heads x queries x keys
GROUPS = ("SIZES", "DTYPES", "POSITIONS", "AFFINE", "SCORES", "BIASES", "TREES", "MASKS", "STRIDES", "DECODE", "VARLEN",
          "PAGED", "QUANTISED", "LATENT", "LATENT_ROWS", "INDICES")  # fmt: skip
SAID = {True: "ok", False: "FAILED", None: "refused"}
THREADS = 3  # every third case runs on two


def cells(case) -> int:
    queries = sum(case.q_lengths) if case.q_lengths else case.B * case.Lq
    return case.H * queries * max(case.lengths or (case.Lk or case.Lq,))


def chosen(share: int) -> list[tuple[str, object]]:
    """Small cases, one of `share` of each group: the name of the group, and the case."""
    from tilewise.testing import cases

    found = []
    for group in GROUPS:
        small = [case for case in getattr(cases, group) if cells(case) <= MOST_CELLS]
        found += [(group, case) for case in small[::share]]
    found += [("gradients", case) for case in [c for c in cases.GRADIENTS if cells(c) <= MOST_CELLS // 4][:: 2 * share]]
    return found


def run_one(group: str, case, number: int) -> dict:
    import torch

    from tilewise.errors import Unsupported
    from tilewise.testing.case import make
    from tilewise.testing.check import check_case
    from tilewise.testing.gradients import check_gradients

    torch.set_num_threads(2 if number % THREADS == 0 else 1)
    started = time.process_time()
    result = {"group": group, "case": str(case), "threads": torch.get_num_threads()}
    try:
        if group == "gradients":
            check_gradients(case, "cpu")
        else:
            check_case(case, "cpu")
            out = make(case, "cpu").call("cpu", return_lse=True)[0]
            result["digest"] = hashlib.sha256(bytes(out.contiguous().view(torch.uint8).flatten().tolist())).hexdigest()[
                :16
            ]
        result["passed"] = True
    except Unsupported as error:
        result |= {"passed": None, "error": str(error)}
    except Exception as error:
        result |= {"passed": False, "error": f"{type(error).__name__}: {str(error)[:400]}"}
    return result | {"seconds": round(time.process_time() - started, 1)}


def inside(record: Path, share: int, seconds: float, again: int) -> int:
    """In the emulated machine: what the record has not, or the first `again` of it once more for equal bits."""
    import numpy
    import torch

    import tilewise
    from tilewise.backends.cpu import isa, prebuilt

    held = json.loads(record.read_text()) if record.exists() else {}
    held |= {"machine": f"{platform.machine()}, emulated", "features": sorted(isa.cpu_features()),
             "torch": torch.__version__, "numpy": numpy.__version__, "tilewise": tilewise.__version__,
             "kernels": "compiled" if prebuilt.target() is None else f"of a wheel, {prebuilt.target()}"}  # fmt: skip
    results, end = held.setdefault("cases", []), time.monotonic() + seconds
    if again:
        compared = [r for r in results if r.get("digest")][:again]
        lookup = {(group, str(case)): case for group, case in chosen(share)}
        repeated = [run_one(r["group"], lookup[r["group"], r["case"]], 0) for r in compared]
        print("\n".join(r["error"] for r in repeated if not r["passed"]), flush=True)
        same = [r.get("digest") == old["digest"] for r, old in zip(repeated, compared, strict=True)]
        held["kept kernels"] = {"cases": len(same), "equal bits": sum(same)}
    done = {(r["group"], r["case"]) for r in results}
    for number, (group, case) in enumerate(chosen(share)):
        if (group, str(case)) in done or time.monotonic() > end:
            continue
        results.append(run_one(group, case, number))
        print(f"{len(results):4} {SAID[results[-1]['passed']]} {results[-1]['seconds']:6} s "
              f"{group}: {case} {results[-1].get('error', '')}", flush=True)  # fmt: skip
        record.write_text(json.dumps(held, indent=1) + "\n")
    record.write_text(json.dumps(held, indent=1) + "\n")
    passed, failed = (sum(r["passed"] is value for r in results) for value in (True, False))
    print(f"{passed} passed, {failed} failed, {len(results) - passed - failed} refused")
    return bool(failed)


def unpacked(wheel: Path, folder: Path) -> Path:
    """The package that is in a wheel."""
    package = folder.resolve() / "wheel"
    shutil.rmtree(package, ignore_errors=True)
    zipfile.ZipFile(wheel).extractall(package)
    return package


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, required=True, help="the record; a run goes on from it")
    parser.add_argument("--share", type=int, default=2, help="one of so many cases of each group")
    parser.add_argument("--seconds", type=float, default=3600.0, help="start no case after this")
    parser.add_argument("--again", type=int, default=0, help="first, so many recorded cases again: equal bits?")
    parser.add_argument("--wheel", type=Path, help="take the package out of this one")
    given = parser.parse_args()
    if platform.machine() in ("aarch64", "arm64"):
        sys.exit(inside(given.json, given.share, given.seconds, given.again))
    kept = given.folder.resolve() / "cache"
    package = SOURCE if given.wheel is None else unpacked(given.wheel, given.folder)
    env = os.environ | {"PYTHONPATH": str(package), "TILEWISE_CACHE_DIR": str(kept)}
    sys.exit(subprocess.run([str(given.folder / "python"), __file__, *sys.argv[1:]], env=env).returncode)


if __name__ == "__main__":
    main()
