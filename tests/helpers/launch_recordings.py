"""Digests of what random calls launch, to show that a change of launchers moves no launch.

    python tests/helpers/launch_recordings.py --draws 600 --out before.json
    python tests/helpers/launch_recordings.py --draws 600 --against before.json
    python tests/helpers/launch_recordings.py --show "triton 17"

Random and named calls of both GPU backends, forward and backward: kernels with what they are compiled for, grids,
threads, shared memory, numbers, tensor maps, pointers by the tensor that they point into. Each is recorded as Triton
launches it, repeated with its tensors at other addresses, in a graph capture, and bound by the call cache. A workspace
is known by the order in which it is first used, since its place in an allocation is free; `launch_calls.py` checks that
none overlaps another one. Not a test: it compares two states of the code.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "backends"))

import launch_recorder
from launch_calls import Repeated, backward, forward, is_repeated, moved
from launch_recorder import INPUT, Launch, LaunchRecorder, Map, Place, differences
from test_launches import WIDTHS, in_16_bits, in_16_bits_with_gradients
from tilewise.backends import hopper, triton
from tilewise.testing.cases import CASES, GRADIENTS
from tilewise.testing.drawing import Seeded, draw_case, draw_trained

Made = Callable[[], Repeated | str]


def calls(draws: int) -> Iterator[tuple[str, Made]]:
    """Calls by name; of some a backend says why it does not serve them."""
    forwards = dict(enumerate(CASES)) | {f"drawn {n}": draw_case(Seeded(n), 300, indices=True) for n in range(draws)}
    trained = dict(enumerate(GRADIENTS)) | {f"drawn {n}": draw_trained(Seeded(n), 200) for n in range(draws)}
    for i, (name, case) in enumerate(forwards.items()):
        yield f"triton {name}", partial(forward, case, triton)
        yield f"hopper {name}", partial(forward, in_16_bits(case, i), hopper)
    for i, (name, case) in enumerate(trained.items()):
        yield f"triton backward {name}", partial(backward, case, triton)
        wide = in_16_bits_with_gradients(case, *WIDTHS[i % len(WIDTHS)])
        yield f"hopper backward {name}", partial(backward, wide, hopper)


def text(launches: list[Launch]) -> str:
    """Launches as text that does not depend on addresses."""
    memory: dict[int, str] = {}

    def place(x: Place) -> str:
        if x.kind == INPUT:
            return f"{x.name}+{x.offset}"
        return f"{memory.setdefault(x.address, f'{x.kind} {len(memory)}')}{'' if x.aligned else ', not aligned'}"

    def shown(x: Any) -> str:
        if isinstance(x, Map):
            return f"map of {place(x.place)} {x.described} {x.shape} {x.strides}"
        return place(x) if isinstance(x, Place) else repr(x)

    lines = []
    for x in launches:
        how = (x.compiled_for, x.options, x.grid, x.threads, x.shared, x.early, x.stream)
        lines += [f"{x.kernel} {how}", *(f"  {name} = {shown(value)}" for name, value in x.arguments.items())]
    return "\n".join(lines)


def recordings(recorder: LaunchRecorder, call: Repeated) -> dict[str, list[Launch]]:
    """The launches of each way in which a call is made."""
    recorder.forget()
    found = {"triton": recorder.through_triton(call.new(), call.tensors)}
    with recorder.capture():
        found["triton, captured"] = recorder.through_triton(call.new(), call.tensors)
    launch = call.new()
    recorder.record(launch, call.tensors)
    found["again"] = recorder.record(launch, moved(call))
    with recorder.capture():
        found["captured"] = recorder.record(launch, moved(call))
    if call.bindable is not None:
        launch, bind = call.bindable()
        bound = bind()
        recorder.record(bound, call.tensors)
        found["bound"] = recorder.record(bound, moved(call))
    wrong = differences(found["triton"], found["again"])
    assert not wrong, wrong
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=600, help="random cases of each kind")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--show", help="the launches of one call")
    args = parser.parse_args()
    digests: dict[str, dict[str, str]] = {}
    through_triton = launches = 0
    with pytest.MonkeyPatch.context() as patch:
        recorder = launch_recorder.install(patch)
        for name, make in calls(args.draws):
            if args.show not in (None, name) or isinstance(call := make(), str):
                continue
            found = recordings(recorder, call)
            digests[name] = {way: hashlib.sha256(text(x).encode()).hexdigest()[:16] for way, x in found.items()}
            launches += sum(map(len, found.values()))
            if is_repeated(call):
                through_triton += any(not x.by_address for x in found["again"])
            if args.show:
                print(*(f"{way}\n{text(x)}" for way, x in found.items()), sep="\n\n")
    ways = sum(map(len, digests.values()))
    print(f"{len(digests)} calls, {ways} recordings, {launches} launches; {through_triton} aligned ones not by address")
    if args.out:
        args.out.write_text(json.dumps(digests, indent=1))
    if args.against:
        before = json.loads(args.against.read_text())
        other = [f"{name}, {way}" for name in before for way in before[name] if
                 digests.get(name, {}).get(way) != before[name][way]]  # fmt: skip
        print(*other[:40], f"{len(other)} of {sum(map(len, before.values()))} recordings differ", sep="\n")
        return int(bool(other))
    return 0


if __name__ == "__main__":
    sys.exit(main())
