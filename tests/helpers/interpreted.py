"""Kernels in Triton's interpreter, which takes over a whole process, and the cases that `make test` runs there."""

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

QUICK = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import quick_interpreter
"""
SCRIPT = """
import runpy
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

WORK = """
done, failed = 0, []
for name in work.keys() & set(sys.argv):
    done += 1
    try:
        work[name]()
    except Exception as error:
        failed.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
print("\\n".join(failed))
print(f"{done} done")
sys.exit(bool(failed))
"""
AS_ON = """
from tilewise.backends.gpu import target
other = target.amd("{}")
target._other.set(other)
assert target.target_of(torch.device("cpu")) == other
"""
OTHERS = {"B", "H", "Lq", "Lk", "D", "Dv", "note"}  # fields of a case that are no options
FIXED = 20  # of a case's cost


def interpreted(code, *arguments):
    """Python text, or a file of it, in a process of its own."""
    if isinstance(code, Path):
        code, arguments = SCRIPT, (code, *arguments)
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", QUICK + code, *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500)


def as_on(gfx):
    """Text after which calls are planned as on a GPU of AMD's."""
    return AS_ON.format(gfx)


def check(code, *names):
    """Functions by name, of those that `code` has in `work`: none of them may raise."""
    run = interpreted(code + WORK, *names)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    assert int(run.stdout.split()[-2]) == len(names)


def cost(case):
    """About how long a case takes there: its tiles, each a step in Python."""
    batch = len(case.lengths) if case.form != "dense" else case.B
    rows = case.block or 1 if case.indices else 64
    keys = int(case.indices.removeprefix("h")) * rows if case.indices else case.keys
    columns = 2 + (case.D + (case.Dv or case.D)) // 128
    return batch * case.H * -(-case.queries // rows) * (1 + -(-keys // 64)) * columns


def kind(name, value):
    """What is special about an option: numbers are alike but for their sign, stored types but for their groups."""
    if isinstance(value, tuple):
        return frozenset(kind(name, x) for x in value)
    if isinstance(value, str):
        return value.rstrip("0123456789") if name == "indices" else value.split("/")[0]
    return (value > 0) - (value < 0) if isinstance(value, (int, float)) and value is not True else value


def options(case):
    """What a case has and the plainest has not: its options by kind, its head dim, whether it is a decode."""
    changed = {f.name: getattr(case, f.name) for f in fields(case) if getattr(case, f.name) != f.default}
    found = {(name, kind(name, x)) for name, x in changed.items() if name not in OTHERS}
    return found | {("D", case.D), ("decode", case.queries == 1)}


def names(case):
    return {name for name, _ in options(case)}


def sample(cases):
    """Cases that have every option, then others that have every kind of each; first those with most for their cost."""
    chosen = []
    for found in (names, options):
        left = {case: found(case).difference(*map(found, chosen)) for case in cases}
        while any(left.values()):
            case = max(left, key=lambda c: len(left[c]) / (FIXED + cost(c)))
            chosen.append(case)
            seen = left[case].copy()
            for others in left.values():
                others -= seen
    return chosen


def shares(cases, count):
    """All other cases, in lists of about the same cost."""
    sampled = set(sample(cases))
    found = [[] for _ in range(count)]
    for case in sorted((c for c in cases if c not in sampled), key=cost, reverse=True):
        min(found, key=lambda share: sum(map(cost, share))).append(case)
    return found
