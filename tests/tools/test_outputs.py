"""Files that commands write: asked for before the work, written whole, and kept when the work is stopped."""

import errno
import json
import os
import signal
import time
from pathlib import Path

import pytest

from tilewise.core import atomic_write
from tilewise.errors import InvalidArgument
from tilewise.tools import tune, verify
from tilewise.tools.bench import cpu_suite, machine, svg
from tilewise.tools.bench.cpu_suite import Case, row_of
from tilewise.tools.bench.record import Record
from tilewise.tools.cli import main

TINY = cpu_suite.Sizes(shrink=128, cache=1 << 16, quantised=1 << 16, read=1 << 16, matrix=16)
FIRST = cpu_suite.cases(TINY)[0]


@pytest.fixture
def suite(monkeypatch):
    """Sets the cases of the suite `cpu`."""
    monkeypatch.setattr(machine, "sdpa_survives", lambda environment=None: True)
    monkeypatch.setattr(cpu_suite, "sizes_here", lambda: (TINY, []))
    monkeypatch.setattr(cpu_suite, "QUICK_BUDGET", 0.0)
    return lambda *cases: monkeypatch.setattr(cpu_suite, "cases", lambda sizes, quick: list(cases))


def bench(file):
    return main(["bench", "--suite", "cpu", "--quick", "--json", str(file)])


def never(*args, **options):
    raise AssertionError("measured before the target was checked")


def refuse_drafts(monkeypatch, number):
    """No file can be created, as on a full or a read-only disk."""
    usual = Path.open

    def refusing(path, mode="r", *args, **options):
        if "x" in mode:
            raise OSError(number, os.strerror(number))
        return usual(path, mode, *args, **options)

    monkeypatch.setattr(Path, "open", refusing)


@pytest.mark.parametrize("option", ["--json", "--html", "--plot"])
def test_bench_asks_for_its_files_before_it_measures(option, suite, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(machine, "ceilings", never)
    (tmp_path / "folder.svg").mkdir()
    targets = ["no/file.svg", "folder.svg", "x" * 300 + ".svg"]
    for name in targets:
        assert main(["bench", "--suite", "cpu", "--quick", option, str(tmp_path / name)]) == 2
        assert option in capsys.readouterr().err
    refuse_drafts(monkeypatch, errno.EROFS)
    assert main(["bench", "--suite", "cpu", "--quick", option, str(tmp_path / "file.svg")]) == 2
    assert os.strerror(errno.EROFS) in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["folder.svg"]


def test_other_commands_ask_first_too(monkeypatch, tmp_path):
    monkeypatch.setattr(verify, "_all", never)
    with pytest.raises(InvalidArgument, match="--json"):
        verify.verify("cpu", None, to=tmp_path / "no" / "file.json")
    with pytest.raises(InvalidArgument, match="--json"):
        tune.tune(None, to=tmp_path / "no" / "file.json", timer=never)


def test_verify_keeps_what_is_done(monkeypatch, tmp_path, capsys):
    def stopped(names, device, backend, jobs):
        yield verify.Result("case:0", "ok", 0.1)
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "_all", stopped)
    file = tmp_path / "checks.json"
    assert main(["verify", "--device", "cpu", "--json", str(file)]) == 130
    report = json.loads(file.read_text())
    assert (report["complete"], report["ok"], [check["name"] for check in report["checks"]]) == (False, 1, ["case:0"])
    shown = capsys.readouterr()
    assert "1 checks passed, 0 failed" in shown.out
    assert "Interrupted. 1 of " in shown.err


@pytest.mark.parametrize(("stop", "status"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_keeps_what_is_done(stop, status, suite, tmp_path, capsys):
    number = getattr(signal, stop)
    usual = signal.default_int_handler if stop == "SIGINT" else signal.SIG_DFL
    before = signal.signal(number, usual)  # the tests may run under nohup

    def stopped():
        os.kill(os.getpid(), number)
        time.sleep(5)  # the handler ends it
        raise AssertionError("the signal was not seen")

    suite(FIRST, Case(FIRST.row, "stopped", stopped), Case(FIRST.row, "never", never))
    file = tmp_path / "found.json"
    try:
        assert bench(file) == status
        assert signal.getsignal(number) is usual
    finally:
        signal.signal(number, before)
    record = Record.read(file)
    assert record.about["complete"] is False
    assert len(record.cells) == 1
    assert "interrupted: 1 of 3 cases done" in capsys.readouterr().out


def test_an_ignored_signal_stays_ignored(suite, tmp_path):
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        suite(Case(FIRST.row, "hung up", lambda: os.kill(os.getpid(), signal.SIGHUP) or FIRST.prepare()))
        assert bench(tmp_path / "found.json") == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_case_that_fails_is_noted_and_the_others_go_on(suite, tmp_path, capsys):
    def fail():
        raise MemoryError("no room\nfor it")

    suite(Case(FIRST.row, "too large", fail), FIRST)
    file = tmp_path / "found.json"
    assert bench(file) == 1
    shown = capsys.readouterr()
    assert "[1/2] prefill f32, too large: FAILED: no room" in shown.err
    assert "tilewise: not in 1 of 2 cases, no room" in shown.out
    record = Record.read(file)
    assert [cell.name for cell in record.wrong] == ["too large"]
    assert record.about["complete"] is True
    assert len(record.cells) == 2


def test_the_file_is_there_after_each_case(suite, tmp_path):
    """So that a process that is killed outright has lost no more than its last case."""
    file = tmp_path / "found.json"
    seen = []

    def look():
        seen.append(json.loads(file.read_text()))
        return FIRST.prepare()

    suite(FIRST, Case(FIRST.row, "second", look))
    assert bench(file) == 0
    assert (seen[0]["complete"], len(seen[0]["cells"])) == (False, 1)
    assert len(Record.read(file).cells) == 2


def test_results_that_cannot_be_written_are_kept_elsewhere(suite, monkeypatch, tmp_path, capsys):
    """The disk is full by the time that they are there."""
    file, kept = tmp_path / "found.json", tmp_path / "temporary"
    kept.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(kept))

    def fill():
        refuse_drafts(monkeypatch, errno.ENOSPC)
        return FIRST.prepare()

    suite(Case(FIRST.row, "fills the disk", fill))
    assert bench(file) == 0
    shown = capsys.readouterr()
    assert f"{file} cannot be written ({os.strerror(errno.ENOSPC)})" in shown.err
    assert "fills the disk" in shown.out
    (last,) = kept.iterdir()
    assert str(last) in shown.err
    assert len(Record.read(last).cells) == 1


def test_ratios_are_called_speeds_and_the_rest_of_the_time_is_told(suite, tmp_path, capsys):
    suite(FIRST, FIRST)
    assert bench(tmp_path / "found.json") == 0
    shown = capsys.readouterr()
    assert "ratios are speeds: 2x is twice as fast as the peer" in shown.out
    assert "2 cases, 0 s at least" in shown.err
    first, second = (line for line in shown.err.splitlines() if line.startswith("["))
    assert "x as fast as SDPA" in first
    assert first.endswith(" left")
    assert "left" not in second


def test_a_share_is_of_the_speed_of_reading():
    assert row_of("decode MHA f32").describe(0.5) == "50% of the read speed"
    assert row_of("prefill f32").describe(1.5) == "1.50x as fast as SDPA"


def test_a_file_is_written_whole_and_a_link_stays_a_link(tmp_path, monkeypatch):
    real, link = tmp_path / "real.txt", tmp_path / "link.txt"
    real.write_text("before")
    link.symlink_to(real)
    atomic_write.write_whole(link, "after")
    assert link.is_symlink()
    assert real.read_text() == "after"

    def half(path, target):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(Path, "replace", half)
    with pytest.raises(OSError, match="broken"):
        atomic_write.write_whole(real, "lost")
    assert real.read_text() == "after"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.txt", "real.txt"], "a draft is left"


def test_pipes_and_devices_are_written_to(tmp_path):
    atomic_write.check_target("--json", Path("/dev/null"))
    atomic_write.write_whole(Path("/dev/null"), "gone")
    assert not Path("/dev/null").is_file()


def test_the_mode_is_what_the_umask_says(tmp_path):
    before = os.umask(0o027)
    try:
        atomic_write.write_whole(tmp_path / "a", svg.picture({}, "t", ["n"]))
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
