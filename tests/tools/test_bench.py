"""The bench: its timer, its cases on tiny sizes, its report and its command."""

import json

import pytest
import torch

from tilewise.tools import workloads
from tilewise.tools.bench import cpu_suite, machine, measure, run
from tilewise.tools.bench.cpu_suite import Case, row_of
from tilewise.tools.bench.measure import Timing, blocks, interleaved, summary
from tilewise.tools.bench.record import Cell, Record, TimedResult
from tilewise.tools.bench.tables import tables
from tilewise.tools.bench.targets import Outcome, Row, outcomes, row_table
from tilewise.tools.cli import main

TINY = cpu_suite.Sizes(shrink=128, cache=1 << 16, quantised=1 << 16, read=1 << 16, matrix=16)
ALL = cpu_suite.cases(TINY)


class Clock:
    """Time that passes only in calls."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def __call__(self):
        return self.now

    def callable(self, name, *durations):
        """A call that takes each of `durations` in turn, the last one ever after."""
        left = list(durations)

        def call():
            self.log.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call


def time_with(clock, *calls, budget=0.0, most=300):
    return interleaved(calls, budget, most, clock=clock)


def test_calls_take_turns_after_a_warm_up_of_each():
    clock = Clock()
    a, b = time_with(clock, clock.callable("A", 9.0, 9.0, 1.0), clock.callable("B", 9.0, 9.0, 2.0))
    assert "".join(clock.log) == "AABB" + "AB" * 3
    assert (a.seconds, b.seconds) == pytest.approx((1.0, 2.0)), "the warm-up does not count"
    assert a.rounds == b.rounds == 3
    assert a.spread == pytest.approx(0)


def test_time_is_the_best_of_the_blocks_medians():
    clock = Clock()
    slow, fast = [5.0, 5.0, 5.0], [1.0, 90.0, 2.0]
    (a,) = time_with(clock, clock.callable("A", 1.0, 1.0, *slow, *fast), budget=1e9, most=6)
    assert a.rounds == 6
    assert a.seconds == pytest.approx(2.0), "not the fastest round, and not the median of all"
    assert a.median == pytest.approx(5.0)
    assert a.spread > 0


def test_rounds_end_with_the_budget_but_there_are_three():
    clock = Clock()
    (a,) = time_with(clock, clock.callable("A", 1.0), budget=9.5)
    assert a.rounds == 10
    (b,) = time_with(clock, clock.callable("B", 100.0), budget=1.0)
    assert b.rounds == 3


def test_short_calls_are_repeated_within_a_turn():
    clock = Clock()
    a, b = time_with(clock, clock.callable("A", 1e-4), clock.callable("B", 1.0))
    assert (a.repeats, b.repeats) == (200, 1)
    assert a.seconds == pytest.approx(1e-4)
    assert b.seconds == pytest.approx(1.0)
    clock.log.clear()
    (a,) = time_with(clock, clock.callable("A", 1.0, 9e-3, *[7.0, 1e-3, 9.0, 2e-3] * 3))
    assert a.repeats == 3
    assert a.seconds == pytest.approx(2e-3), "the median of a turn, without its first call"


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 16, 300])
def test_blocks_hold_every_round_once_and_none_is_small(count):
    rounds = list(range(count))
    cut = blocks(rounds)
    assert [i for block in cut for i in block] == rounds
    assert len(cut) <= measure.MOST_BLOCKS
    assert min(map(len, cut)) >= min(3, count)


def test_spread_is_between_the_quartiles():
    assert summary([1.0, 2.0, 3.0, 4.0, 5.0]).spread == pytest.approx(2 / 3)
    assert summary([2.0]).spread == 0


def test_geometric_mean():
    assert measure.geometric_mean([1.0, 4.0]) == pytest.approx(2.0)


def test_every_row_has_cases_and_every_case_a_row():
    for quick in (False, True):
        cases = cpu_suite.cases(cpu_suite.Sizes(), quick)  # no tensors yet
        assert [row.name for row in cpu_suite.ROWS] == list(dict.fromkeys(case.row for case in _in_row_order(cases)))
        assert len({(case.row, case.name) for case in cases}) == len(cases)
    assert len(cpu_suite.cases(TINY, True)) < len(ALL)


def _in_row_order(cases):
    order = [row.name for row in cpu_suite.ROWS]
    return sorted(cases, key=lambda case: order.index(case.row))


@pytest.mark.parametrize(
    "case", [c for c in ALL if not c.needs_half_sdpa], ids=lambda c: f"{c.row} {c.name}".replace(" ", "-")
)
def test_cases_run_and_are_right(case, monkeypatch):
    monkeypatch.setattr(measure, "LEAST_TURN", 0.0)
    result = cpu_suite.measure(case, 0.0)
    ours, peer = result.ways
    assert result.is_right(ours)
    assert result.over_peer > 0
    assert ours.timing.rounds == peer.timing.rounds == 3
    assert result.flops > 0
    if result.group not in ("decode int8 cache", "decode int4 cache") and "read" not in row_of(result.group).against:
        assert peer.error <= result.allowed, "the peer computes something else"


@pytest.mark.parametrize("case", [c for c in ALL if c.needs_half_sdpa][::5], ids=lambda c: f"{c.row} {c.name}")
def test_cases_beside_half_sdpa_are_right(case):
    made = case.prepare()  # the peer is not called: it would end the process on some machines
    assert made.error(made.ours()) <= made.allowed


def test_a_wrong_result_is_seen():
    made = ALL[0].prepare()
    assert not made.error(made.ours() + 1e-3) <= made.allowed
    assert not made.error(made.ours() * torch.nan) <= made.allowed


def cell(row, ratio, name="a case", error=0.0):
    ours, peer = (Timing(seconds, seconds, 0.1, 3) for seconds in (1e-3, 1e-3 * ratio))
    return Cell(
        row,
        name,
        "flops",
        (TimedResult("tilewise", ours, error), TimedResult("SDPA", peer)),
        allowed=1e-5,
        workspace=100,
    )


@pytest.mark.parametrize(
    ("row", "ratios", "verdict"),
    [
        (Row("r", "SDPA", 2.0), [1.0, 4.0], "reached"),
        (Row("r", "SDPA", 2.0), [1.0, 3.9], "missed"),
        (Row("r", "SDPA", 2.0, least=1.0), [0.9, 100.0], "missed"),
        (Row("r", "SDPA", 2.0, least=1.0), [1.0, 100.0], "reached"),
        (Row("r", "read speed", 0.75, is_share=True), [0.75], "reached"),
        (Row("r", "read speed", 0.75, is_share=True), [0.74], "missed"),
        (Row("r", "SDPA", 2.0), [], "not measured"),
    ],
)
def test_verdicts(row, ratios, verdict):
    cells = [cell("r", ratio) for ratio in ratios]
    assert Outcome(row, cells).verdict == verdict
    assert row_table(Record({}, cells, outcomes([row], cells)))[2].count(verdict) == 1


def test_tables_show_bars_beside_what_was_measured():
    rows = [Row("fast", "SDPA", 1.5, least=1.0), Row("read", "read speed", 0.6, least=0.6, is_share=True)]
    cells = [cell("fast", 12.34), cell("read", 0.5, error=float("nan"))]
    found = Record({}, cells, outcomes(rows, cells))
    head, _, fast, read = row_table(found)
    assert head.split() == ["work", "against", "at", "least", "measured", "slowest", "case"]
    assert fast.split() == "fast SDPA 1.50x, each 1.00x 12.3x reached 12.3x a case".split()
    assert read.split() == "read read speed 60% each 50% missed 50% a case".split()
    fast, read, *_ = tables(found)
    assert "WRONG" in "".join(read)
    assert "WRONG" not in "".join(fast)
    json.dumps(found.as_data(), allow_nan=False)


@pytest.fixture
def small_suite(monkeypatch):
    """The command over two tiny cases, without its probe."""
    monkeypatch.setattr(machine, "sdpa_survives", lambda environment=None: True)
    monkeypatch.setattr(cpu_suite, "sizes_here", lambda: (TINY, []))
    monkeypatch.setattr(cpu_suite, "cases", lambda sizes, quick: ALL[:2])
    monkeypatch.setattr(cpu_suite, "QUICK_BUDGET", 0.0)


def test_command_prints_tables_and_writes_json(small_suite, tmp_path, capsys):
    file = tmp_path / "found.json"
    assert main(["bench", "--suite", "cpu", "--quick", "--json", str(file)]) == 0
    shown = capsys.readouterr()
    assert "D 64, L 512, causal" in shown.out
    assert "not measured" in shown.out
    assert "[2/2] prefill f32" in shown.err
    data = json.loads(file.read_text())
    assert data["complete"] is True
    assert data["command"] == f"tilewise bench --suite cpu --quick --json {file}"
    assert data["device"]["cpu"]
    assert data["device"]["threads"] == torch.get_num_threads()
    assert data["versions"]["torch"] == torch.__version__
    assert {"python", "numba", "tilewise"} <= set(data["versions"])
    assert data["date"].startswith("20")
    assert isinstance(data["environment"], dict)
    assert data["ceilings"]["read_gb_per_s"] > 0
    assert data["ceilings"]["sgemm_gflop_per_s"] > 0
    first = data["rows"][0]
    assert (first["bar"], first["least"], len(data["cells"])) == (1.15, 1.0, 2)
    assert first["worst"] == min(cell.over_peer for cell in Record.read(file).cells)
    assert 0 <= data["cells"][0]["ways"][0]["error"] < data["cells"][0]["allowed"]
    assert [p.name for p in tmp_path.iterdir()] == ["found.json"]


def test_interrupt_keeps_what_is_done(small_suite, monkeypatch, tmp_path, capsys):
    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr(cpu_suite, "cases", lambda sizes, quick: [ALL[0], Case("prefill f32", "stopped", stop)])
    file = tmp_path / "found.json"
    assert main(["bench", "--suite", "cpu", "--quick", "--json", str(file)]) == 130
    data = json.loads(file.read_text())
    assert data["complete"] is False
    assert len(data["cells"]) == 1
    assert "interrupted: 1 of 2 cases done" in capsys.readouterr().out


def test_a_wrong_result_fails_the_command(small_suite, monkeypatch, capsys):
    monkeypatch.setattr(cpu_suite, "measure", lambda case, budget: cell(case.row, 2.0, error=float("nan")))
    assert main(["bench", "--suite", "cpu", "--quick"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_bad_arguments(tmp_path, capsys):
    assert main(["bench", "--suite", "cpu", "--json", str(tmp_path / "no" / "file.json")]) == 2
    assert "--json" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--suite", "everything"])
    assert stop.value.code == 2
    assert "'everything'" in capsys.readouterr().err


def test_begins_anew_without_amx_where_that_helps(monkeypatch):
    restarts = []
    monkeypatch.setattr(run, "_restart", restarts.append)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(machine, "sdpa_survives", bool)  # dies unless an environment is given
    run._ensure_half_sdpa(["bench"])
    assert restarts == [["bench"]]
    monkeypatch.setattr(machine, "sdpa_survives", lambda environment=None: False)
    assert run._ensure_half_sdpa(["bench"]) is False
    monkeypatch.setattr(machine, "sdpa_survives", lambda environment=None: True)
    assert run._ensure_half_sdpa(["bench"]) is True
    assert len(restarts) == 1


def test_half_sdpa_cases_are_left_out_where_it_dies(small_suite, monkeypatch, capsys):
    monkeypatch.setattr(machine, "sdpa_survives", lambda environment=None: False)
    half = next(case for case in ALL if case.needs_half_sdpa)
    monkeypatch.setattr(cpu_suite, "cases", lambda sizes, quick: [ALL[0], half])
    assert main(["bench", "--suite", "cpu", "--quick"]) == 0
    shown = capsys.readouterr()
    assert "[1/1]" in shown.err
    assert "are left out" in shown.out


def test_sizes_follow_the_machine(monkeypatch):
    monkeypatch.setattr(machine, "last_cache", lambda: 260 * 1024**2)
    monkeypatch.setattr(machine, "memory_available", lambda: 64 * 1024**3)
    sizes, notes = cpu_suite.sizes_here()
    assert sizes.cache >= 2 * 260 * 1024**2
    assert sizes.quantised / 4 > 260 * 1024**2
    assert notes == []
    monkeypatch.setattr(machine, "memory_available", lambda: 1024**3)
    sizes, notes = cpu_suite.sizes_here()
    assert sizes.cache + sizes.read < 1024**3
    assert len(notes) == 2


def test_normal_numbers_fill_any_shape():
    x = workloads.normal((3, 1_500_000), torch.float16, 3.0)
    assert x.shape == (3, 1_500_000)
    assert x.is_contiguous()
    assert x.float().std() == pytest.approx(3.0, rel=0.01)
