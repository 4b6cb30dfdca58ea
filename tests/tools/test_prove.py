"""`tilewise prove`: what a machine finds of its kernels, and that the planner follows it.

The CPU's kernels are proven in a reduced form. For a GPU there are stand-ins (`tests/helpers/stand_ins.py`), which make
their checks in other processes as the real ones do.
"""

import json
import os
import pickle
import sys
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import stand_ins
import tilewise
from tilewise.backends.gpu.coverage import KERNELS
from tilewise.core.file_lock import wait_for_lock
from tilewise.dispatch import planner, proofs
from tilewise.testing import families, proving
from tilewise.testing.case import Case
from tilewise.testing.check import Mismatch
from tilewise.testing.families import Check
from tilewise.testing.processes import MOST_KILLED, Pool
from tilewise.tools import doctor
from tilewise.tools.cli import main

HELPER = Path(stand_ins.__file__)
SMALL = {
    "CASES": [
        Case(Lq=33, D=64, dtype="bf16", causal=True),
        Case(Hkv=2, Lq=1, Lk=90, D=64, dtype="bf16"),
        Case(form="paged", B=2, H=16, Hkv=1, Lq=1, lengths=(70, 90), D=576, Dv=512, page=64, dtype="bf16", latent=True),
    ],
    "GRADIENTS": [Case(B=1, Lq=40, D=64, dtype="bf16", causal=True)],
    "LARGER": [],
    "LARGER_GRADIENTS": [],
    "WITH_FUNCTIONS": [Case(B=1, Lq=40, Lk=50, note="decay")],
}


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Few checks, and a cache folder of its own for proofs."""
    for name, cases in SMALL.items():
        monkeypatch.setattr(families, name, cases)
    # Times of calls as small as the cases.
    monkeypatch.setattr(families, "_timed", lambda family, device: timed(family))
    monkeypatch.setattr(proofs, "cache_home", lambda: tmp_path)
    monkeypatch.delenv("TILEWISE_PROVE", raising=False)
    proofs.renew()
    yield tmp_path
    proofs.renew()


def timed(family):
    case = families.TIMED[family]
    return replace(case, B=2, H=case.H // case.Hkv * min(case.Hkv, 2), Hkv=min(case.Hkv, 2), Lq=min(case.Lq, 70),
                   Lk=90, lengths=(90, 90) if case.lengths else (), indices=case.indices and "9")  # fmt: skip


def on_stand_ins(monkeypatch, faults=None, **facts):
    """The planner's GPU backends are stand-ins; returns what proves them."""
    stand_ins.install(faults or {}, monkeypatch.setattr, stand_ins.FACTS | facts)
    monkeypatch.setattr(planner, "_warned", {"hopper", "triton"})
    planner.choose.cache_clear()
    command = [sys.executable, str(HELPER), json.dumps(faults or {}), "cpu"]
    return lambda **options: proving.prove("cpu", command=command, seconds=3600.0, **options)


def prefill(**changes):
    inputs = families.make(SMALL["CASES"][0])
    return tilewise.plan(*inputs.args, **(inputs.options | changes))


def backward():
    q, k, v = (torch.zeros(1, 4, 40, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    return tilewise.plan(q, k, v, causal=True).backward


def test_the_cpu_proves_itself(small, capsys):
    """By the command, with real kernels in a process of their own."""
    assert main(["prove", "--device", "cpu", "--minutes", "60"]) == 0
    text = capsys.readouterr().out
    (file,) = (small / "proofs").glob("*.json")
    assert f"kept in {file}" in text
    proof = proofs.kept(planner.proof_facts("cpu", torch.device("cpu")))
    assert proof.is_complete
    assert set(proof.families["cpu"]) == {"prefill", "decode", "pages", "backward", "functions"}
    made = [check for of in proof.families["cpu"].values() for check in of.values()]
    assert {check["status"] for check in made} == {"ok"}
    for family in proof.families["cpu"]:
        assert set(proof.families["cpu"][family][f"time {timed(family)}"]["times"]) == {"cpu", "torch"}
    assert "by `tilewise prove` on" in doctor.examine()["backends"]["cpu"]["proof"]
    before = file.read_bytes()
    assert main(["prove", "--device", "cpu", "--report"]) == 0  # nothing is left to check
    block = capsys.readouterr().out
    assert file.read_bytes() == before
    assert block.startswith("### `tilewise prove`")
    assert "| cpu | prefill |" in block
    assert str(Path.home()) not in block.replace("~", "")


FAULTS = {
    "hopper": {"prefill": "wrong", "latent decode": "crash", "backward": "late"},
    "triton": {"prefill": "full", "decode": "random"},
}


def test_the_planner_follows_what_was_found(small, monkeypatch, caplog):
    """Each fault is that of its family; the others are taken."""
    proof = on_stand_ins(monkeypatch, FAULTS)()
    for name, family, kind, why in (
        ("hopper", "prefill", "failed", "case B2-H4-L33-D64-bf16-causal: out: 1 of 8448 elements are off"),
        ("hopper", "latent decode", "failed", "its process ended with status -11"),
        ("hopper", "backward", "slower", "2x the time of triton"),
        ("triton", "prefill", "open", ""),
        ("triton", "decode", "failed", "repeats, case B2-H4-Hkv2-L1-Lk90-D64-bf16"),
        ("triton", "pages", "proven", ""),
        ("triton", "backward", "proven", ""),
    ):
        found = proof.verdict(name, family)
        assert (found.kind, why in found.why) == (kind, True), (name, family, found)
    assert not proof.is_complete
    plan = prefill()
    assert plan.backend == "triton"
    assert "not yet run on a GPU" in plan.notes[0]  # as without a proof
    reason = dict(plan.passed_over)["hopper"]
    assert "prefill kernels failed on this machine by `tilewise prove`, case B2-H4-L33-D64-bf16-causal: out" in reason
    assert "backend='hopper' uses it anyway" in reason
    named = prefill(backend="hopper")
    assert named.backend == "hopper"
    assert "out: 1 of 8448 elements are off" in named.notes[0]
    assert backward().backend == "triton"
    assert "2x the time of triton" in dict(backward().passed_over)["hopper"]
    inputs = families.make(SMALL["CASES"][1])
    assert tilewise.plan(*inputs.args, **inputs.options).backend == "torch"


class AllRight:
    """In place of `processes.Pool`: every check passes at once."""

    def __init__(self, command, size, limits):
        pass

    def run(self, left, end, is_left):
        while left:
            check = left.popleft()
            if is_left(check):
                times = {check.backend: 1.0, "torch": 2.0} if check.kind == "time" else None
                yield check, {"status": "ok", "seconds": 0.0, "detail": ""}, times


@pytest.fixture
def prove(small, monkeypatch):
    monkeypatch.setattr(proving, "Pool", AllRight)
    return on_stand_ins(monkeypatch)


def test_what_is_proven_is_taken(prove):
    """In the same process too: plans and repeated calls that were cached are made anew."""
    inputs = families.make(SMALL["CASES"][0])
    taken = lambda: [name for name in ("hopper", "triton") if inputs.call(None) is not None and ran(name)]  # noqa: E731
    counts = {}

    def ran(name):
        before, counts[name] = counts.get(name, 0), sum(planner.load(name).calls.values())
        return counts[name] > before

    reason = dict(prefill().passed_over)["hopper"]
    assert "compiled with Triton 3.7, not yet run on a GPU: `tilewise prove` checks them on this machine" in reason
    assert "lets calls use hopper" in reason
    assert taken() == taken() == ["triton"]
    proof = prove()
    assert proof.is_complete
    assert {proof.verdict(name, family).kind for name, of in proof.families.items() for family in of} == {"proven"}
    taken()
    assert taken() == taken() == ["hopper"]
    plan = prefill()
    assert plan.backend == "hopper"
    assert plan.notes == plan.passed_over == ()
    assert backward().backend == "hopper"
    assert prefill(backend="triton").notes == ()


def facts():
    return planner.proof_facts("hopper", torch.device("cpu"))


def test_an_interrupt_loses_nothing(prove, capsys):
    """What was checked is kept, is not proven yet, and is not checked again."""
    shown = []

    def show(done, every, what):
        shown.append(what.partition(": ok")[0])
        if len(shown) == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prove(show=show)
    kept = proofs.read(proofs.path_of(facts()))
    assert sum(check is not None for of in kept.families.values() for x in of.values() for check in x.values()) == 9
    assert not kept.is_complete
    assert kept.verdict("triton", "backward").kind == "open"
    proof = prove(show=show)
    assert proof.is_complete
    assert len(set(shown)) == len(shown) == sum(len(x) for of in proof.families.values() for x in of.values())
    shown.clear()
    prove(again=True, show=lambda done, every, what: shown.append(what))
    assert len(shown) > 9


def test_the_command_keeps_what_it_has_when_interrupted(prove, capsys, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(proving, "prove", interrupted)
    assert main(["prove"]) == 130
    assert "`tilewise prove` continues from there" in capsys.readouterr().err


def test_another_driver_asks_again(prove, monkeypatch):
    """And another version of anything. The earlier proof holds again with the earlier driver."""
    prove()
    assert prefill().backend == "hopper"
    of = planner.load("hopper").facts
    other = planner.load("triton").facts
    for name, value in (("driver", "560.2"), ("triton", "3.7.2")):
        before = of[name]
        of[name] = other[name] = value
        proofs.renew()
        plan = prefill()
        assert plan.backend == "triton"
        assert f"since the last time: {name} {value} (was {before})" in dict(plan.passed_over)["hopper"]
        of[name] = other[name] = before
    proofs.renew()
    assert prefill().backend == "hopper"
    monkeypatch.setattr(proofs, "sources", lambda: "edited")
    proofs.renew()
    assert "other sources of tilewise" in dict(prefill().passed_over)["hopper"]


def damaged(file):
    """By a word, how a proof's file is damaged."""
    content = file.read_bytes()
    half = json.loads(content)
    half["families"]["hopper"]["prefill"].clear()
    yield "truncated", lambda: file.write_bytes(content[: len(content) // 2])
    yield "empty", lambda: file.write_bytes(b"")
    yield "edited", lambda: file.write_text(json.dumps(half))
    yield "a list", lambda: file.write_text("[]")
    yield "no text", lambda: file.write_bytes(b"\xff\x00" * 99)
    yield "of another format", lambda: file.write_bytes(content.replace(b'"format": 1', b'"format": 9'))
    yield "writable by others", lambda: (file.write_bytes(content), file.chmod(0o666))
    yield "a folder", lambda: (file.unlink(), file.mkdir())


def test_a_damaged_file_is_no_proof(prove):
    """It is named once, calls are planned as without it, and the next proof replaces it."""
    prove()
    file = proofs.path_of(facts())
    assert file.stat().st_mode & 0o777 == 0o600
    for word, damage in damaged(file):
        damage()
        proofs.renew()
        with pytest.warns(RuntimeWarning, match=f"{file.name} is not used") as heard:
            assert prefill().backend == "triton", word
        assert len([x for x in heard if "is not used: " in str(x.message)]) == 1, word
        if word == "edited":
            with pytest.warns(RuntimeWarning, match="is not used"):
                assert prove().is_complete
            assert prefill().backend == "hopper"


def test_a_folder_that_cannot_be_written(prove, small, capsys, monkeypatch):
    """The proof holds in its process; the command says that it cannot be kept."""
    (small / "file").touch()
    monkeypatch.setattr(proofs, "cache_home", lambda: small / "file")
    proof = prove()
    assert proof.is_complete
    assert prefill().backend == "hopper"
    monkeypatch.setattr(proving, "prove", lambda *args, **options: proof)
    assert main(["prove"]) == 0
    said = capsys.readouterr()
    assert "could not be saved" in said.err
    assert "kept in" not in said.out
    assert not list((small / "file").parent.glob("proofs"))


def test_one_process_at_a_time(prove, monkeypatch):
    """Who comes second waits, and has nothing left to check."""
    shown, waited = [], []
    wait = proving.wait_for_lock

    def other_process_is_faster(handle, seconds):
        waited.append(seconds)
        if len(waited) == 1:
            return False
        monkeypatch.setattr(proving, "wait_for_lock", wait)
        prove(show=lambda *of: shown.append(of))
        return True

    monkeypatch.setattr(proving, "wait_for_lock", other_process_is_faster)
    said = []
    assert prove(show=lambda done, every, what: said.append(what)).is_complete
    assert said == ["another process checks this machine: waiting"]
    assert waited == [0.0, 3600.0 + proving.WRITES]
    assert shown


def test_who_is_not_alone_changes_nothing(prove, monkeypatch):
    """The other process has not finished when time is over."""
    monkeypatch.setattr(proving, "wait_for_lock", lambda handle, seconds: False)
    monkeypatch.setattr(proofs, "write", lambda proof: pytest.fail("the other process writes"))
    assert not prove(again=True).is_complete


def test_a_lock_is_waited_for(tmp_path):
    first, second = (os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert wait_for_lock(first, 0.0)
    assert not wait_for_lock(second, 0.05)
    os.close(first)
    assert wait_for_lock(second, 0.0)
    os.close(second)


def test_time_that_is_over_says_nothing(small, capsys):
    """No check is made, no family is proven, and the status is that of success."""
    assert main(["prove", "--device", "cpu", "--minutes", "1e-9"]) == 0
    assert "Some checks are left" in capsys.readouterr().err
    proof = proofs.kept(planner.proof_facts("cpu", torch.device("cpu")))
    assert {proof.verdict("cpu", family).kind for family in proof.families["cpu"]} == {"open"}


def test_a_first_call_proves_by_the_environment(prove, monkeypatch, caplog):
    """TILEWISE_PROVE=auto: once in a process, and where something is unproven."""
    asked, tried = [], []
    monkeypatch.setattr(proofs, "_asked", set())
    monkeypatch.setattr(proofs, "_by_command", lambda facts, device: (asked.append(device), prove()))
    monkeypatch.setenv("TILEWISE_PROVE", "yes")
    assert prefill().backend == "triton"
    assert "unknown value 'yes' for TILEWISE_PROVE" in caplog.text
    monkeypatch.setenv("TILEWISE_PROVE", "auto")
    monkeypatch.setattr(proofs, "_asked", set())
    planner.choose.cache_clear()
    by_command = proofs._by_command
    monkeypatch.setattr(proofs, "_by_command", lambda facts, device: tried.append(device))  # and finds nothing
    assert prefill().backend == backward().backend == "triton"
    assert len(tried) == 1
    monkeypatch.setattr(proofs, "_by_command", by_command)
    monkeypatch.setattr(proofs, "_asked", set())
    planner.choose.cache_clear()
    assert doctor.examine()["backends"]["triton"]["records"].startswith("compiled with Triton 3.7")
    assert not asked
    assert prefill().backend == "hopper"
    assert backward().backend == "hopper"
    planner.choose.cache_clear()
    assert prefill().backend == "hopper"
    assert asked == [torch.device("cpu")]


def test_the_command_of_a_first_call_is_logged(small, monkeypatch, caplog):
    code = (
        "import importlib.util, os; "
        "print(sys.argv[-1], os.environ.get('TILEWISE_PROVE'), importlib.util.find_spec('tilewise').origin)"
    )
    monkeypatch.setattr(proofs, "COMMAND", code)
    monkeypatch.setenv("TILEWISE_PROVE", "auto")
    caplog.set_level("INFO")
    proofs._by_command({"device": "Stand-in"}, torch.device("cuda", 3))
    assert f"prove: cuda:3 None {tilewise.__file__}" in caplog.text
    assert "checks the kernels on Stand-in first" in caplog.text
    monkeypatch.setattr(sys, "executable", "/no/python")
    proofs._by_command({"device": "Stand-in"}, torch.device("cuda"))
    assert "could not be started" in caplog.text


@pytest.mark.parametrize(("answers", "limits", "why"), [
    (("ready",), (0.1, 1e9), "it did not compile within 0.1 s"),
    (("ready", "launched"), (1e9, 0.1), "it did not end within 0.1 s"),
])  # fmt: skip
def test_a_check_that_never_ends_has_failed(answers, limits, why):
    """The next one has another process. Here each answers so much, and then nothing."""
    said = b"".join(pickle.dumps((answer, "", None)) for answer in answers)
    code = f"import sys, time; sys.stdout.buffer.write({said!r}); sys.stdout.flush(); time.sleep(1e6)"
    checks = [Check("triton", "prefill", "case", Case(Lq=n)) for n in (1, 2)]
    pool = Pool([sys.executable, "-c", code], 1, limits)
    found = list(pool.run(deque(checks), float("inf"), lambda check: True))
    assert [check for check, *_ in found] == checks
    assert all((of["status"], of["detail"]) == ("failed", why) for _, of, _ in found)
    assert not pool.children


def test_processes_that_somebody_ends_say_nothing():
    """Perhaps the system, since memory is full. After a few no more are started."""
    said = pickle.dumps(("ready", "", None))
    code = f"import os, sys; sys.stdout.buffer.write({said!r}); sys.stdout.flush(); os.kill(os.getpid(), 9)"
    checks = deque(Check("triton", "prefill", "case", Case(Lq=n)) for n in range(1, 9))
    found = list(Pool([sys.executable, "-c", code], 1, (1e9, 1e9)).run(checks, float("inf"), lambda check: True))
    assert [of["status"] for _, of, _ in found] == ["open"] * MOST_KILLED


def test_processes_that_cannot_start_are_an_error(small):
    command = [sys.executable, "-c", "import sys; print('no such thing', file=sys.stderr); exit(3)"]
    with pytest.raises(RuntimeError, match=r"cannot start \(status 3\): no such thing"):
        proving.prove("cpu", command=command)
    assert not proofs.kept(planner.proof_facts("cpu", torch.device("cpu"))).is_complete


def test_poison_and_repeats_can_fail(prove, monkeypatch):
    """A kernel that reads memory before it writes it, and one that gives other bits each time."""
    filled = []
    monkeypatch.setattr(families, "fill_free_memory", lambda device, value: filled.append(value))
    backend = planner.load("triton")
    case = SMALL["CASES"][1]
    for kind, of in (("case", case), ("gradients", SMALL["GRADIENTS"][0])):
        families.run(Check("triton", "decode", f"poison, {kind}", of), "cpu")
        families.run(Check("triton", "decode", f"repeats, {kind}", of), "cpu")
        spoil = backend.spoil
        backend.spoil = lambda plan, result: result.view(-1)[:1].add_(filled[-1])
        with pytest.raises(Mismatch, match="NaN in free memory"):
            families.run(Check("triton", "decode", f"poison, {kind}", of), "cpu")
        random = iter(range(99))
        backend.spoil = lambda plan, result, random=random: result.view(-1)[:1].add_(next(random))
        with pytest.raises(Mismatch, match="elements differed"):
            families.run(Check("triton", "decode", f"repeats, {kind}", of), "cpu")
        backend.spoil = spoil


def test_every_family_of_the_table_is_checked(monkeypatch):
    """On a Hopper GPU: by results, repeats, poison, and a time of its own kernels."""
    on_stand_ins(monkeypatch)
    checks = families.checks_of("cpu", ("hopper", "triton"))
    served = {(name, family) for name, of in KERNELS.items() for family in of}
    assert {(check.backend, check.family) for check in checks} == served
    for name, family in served:
        own = [check for check in checks if (check.backend, check.family) == (name, family)]
        kinds = [check.kind.partition(",")[0] for check in own]
        assert len(own) == len({str(check) for check in own})
        assert kinds.count("time") == 1
        assert kinds.count("repeats") == kinds.count("poison") >= 1
        results = sum(map(kinds.count, ("case", "gradients", "functions")))
        assert 1 <= results <= families.OF_FAMILY + len(families.LARGER)
        grads = ("q", "k", "v") if "backward" in family else ()
        problem = replace(families._problem("case", timed(family), "cpu"), grads=grads)
        assert planner.supports(name, problem) is None
        assert planner.family(name, problem) == family


def test_what_has_no_kernels_is_refused(small, capsys, monkeypatch):
    monkeypatch.setattr(planner, "BACKENDS", ("torch", "reference"))
    assert main(["prove", "--device", "cpu"]) == 2
    assert "a GPU, or a CPU with Numba" in capsys.readouterr().err
    monkeypatch.setattr(planner, "BACKENDS", ("cpu", "torch"))
    monkeypatch.setattr(families, "checks_of", lambda *_: [])  # as with a GPU, and no Triton
    assert main(["prove", "--device", "cpu"]) == 2
    assert "`tilewise doctor` says" in capsys.readouterr().err
    proofs.renew()
    for words in (["--device", "tpu"], ["--device", "cpu:1"], ["--minutes", "0"], ["--minutes", "soon"]):
        with pytest.raises(SystemExit):
            main(["prove", *words])
