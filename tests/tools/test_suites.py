"""The suites of models on tiny sizes: the same way as on a GPU, but for the clock."""

import json
from types import SimpleNamespace

import pytest
import torch

from tilewise.tools.bench import cpu_suite, grid, machine, measure_gpu, plot, precompile, run, suites
from tilewise.tools.bench.measure import Timing
from tilewise.tools.bench.record import Record
from tilewise.tools.cli import main
from tilewise.tools.models import MODELS

CPU = torch.device("cpu")
TINY = suites.Scope(on_gpu=False, shrink=64)
BENCH = grid.Bench(CPU, torch.float32, 0.0, ["sdpa"])
ALL = {**suites.SUITES, "scale": suites.scale}


@pytest.fixture
def tiny(monkeypatch):
    """Commands over tiny cases, with no time spent on timing."""
    monkeypatch.setattr(run, "Scope", lambda on_gpu, quick: suites.Scope(on_gpu, quick, shrink=64))
    monkeypatch.setattr(run, "BUDGETS", {"cpu": (0.0, 0.0)})
    monkeypatch.setattr(cpu_suite, "QUICK_BUDGET", 0.0)
    sizes = cpu_suite.Sizes(read=1 << 16, matrix=16)
    monkeypatch.setattr(cpu_suite, "sizes_here", lambda: (sizes, []))
    monkeypatch.setattr("tilewise.tools.bench.measure.LEAST_TURN", 0.0)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_cases_have_names_of_their_own_and_quick_ones_are_fewer(name, on_gpu):
    tasks = list(ALL[name](suites.Scope(on_gpu)))  # no tensors yet
    quick = list(ALL[name](suites.Scope(on_gpu, quick=True)))
    assert len({(task.group, task.case.name) for task in tasks}) == len(tasks)
    assert len(quick) <= len(tasks)
    assert {(t.group, t.case.name) for t in quick} <= {(t.group, t.case.name) for t in tasks}
    assert all(task.metric in ("flops", "bytes") for task in tasks)


def test_the_models_suite_has_every_layer_of_every_model():
    names = {task.case.name for task in suites.models(TINY)}
    want = {f"{m.name} {layer.name}" if len(m.layers) > 1 else m.name for m in MODELS.values() for layer in m.layers}
    assert names == want


@pytest.mark.parametrize("name", ALL)
def test_one_case_of_each_group_is_measured_and_right(name, monkeypatch, tiny):
    firsts = {}
    for task in ALL[name](TINY):
        firsts.setdefault(task.group if name != "models" else f"{task.group} {len(firsts) // 9}", task)
    for task in list(firsts.values())[:6]:
        cell = grid.measure(task, BENCH)
        assert cell.ours is not None
        assert cell.is_right(cell.ours)
        assert all(cell.is_right(way) for way in cell.ways), [(w.name, w.error) for w in cell.ways]
        assert cell.flops > 0 < cell.bytes
        assert cell.cells > 0 < cell.tiles
        assert cell.plan.startswith("cpu: ")
        assert cell.ways[0].name == "tilewise"
        assert len(cell.ways) > 1 or cell.refused, "no peer was asked"
        assert (cell.memory is not None) == (name == "scale")


def test_a_slow_peer_is_called_once_more_and_one_that_compiled_is_timed(tiny, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(grid, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    calls = {"slow": 0, "compiles": 0}

    def way(name, *seconds):
        def call():
            now[0] += seconds[min(calls[name], len(seconds) - 1)]
            calls[name] += 1
            return x.attend()

        return grid.Candidate(name, call)

    task = next(iter(suites.varlen(TINY)))
    x = grid.make_inputs(task.case, CPU, torch.float32)
    monkeypatch.setattr(grid, "find", lambda case, x, names: [way("slow", 9.0, 7.0), way("compiles", 9.0, 0.001)])
    cell = grid.measure(task, BENCH)
    slow, compiles = cell.ways[1:]
    assert (slow.timing.seconds, slow.timing.rounds, slow.note) == (7.0, 1, "once")
    assert (compiles.timing.rounds, compiles.note) == (3, "")
    assert calls["slow"] == 2
    assert all(cell.is_right(way) for way in cell.ways)


def test_a_case_that_fails_is_kept_with_its_reason_and_the_others_go_on(tiny, monkeypatch, capsys, tmp_path):
    usual = grid.measure

    def measure(task, bench):
        if "gemma-4" in task.group:
            raise torch.OutOfMemoryError("out of memory\nmore")
        return usual(task, bench)

    monkeypatch.setattr(grid, "measure", measure)
    file = tmp_path / "a.json"
    command = ["bench", "--suite", "prefill", "--device", "cpu", "--quick", "--json", str(file)]
    assert main(command) == 1
    assert "FAILED: out of memory" in capsys.readouterr().err
    record = Record.read(file)
    assert [cell.group for cell in record.wrong] == ["prefill: gemma-4 global"]
    assert len(record.cells) == 6


def test_the_command_writes_tables_json_page_and_picture(tiny, tmp_path, capsys):
    names = {kind: tmp_path / f"found.{kind}" for kind in ("json", "html", "svg")}
    command = ["bench", "--suite", "paged,varlen", "--device", "cpu", "--quick"]
    command += ["--json", str(names["json"]), "--html", str(names["html"]), "--plot", str(names["svg"])]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert "varlen: gpt-oss local" in shown.out
    assert "SDPA: not in 1 of 7 cases, it has no sinks" in shown.out
    assert "as fast as the fastest peer on average" in shown.out
    assert "[7/7] varlen: gpt-oss local" in shown.err
    data = json.loads(names["json"].read_text())
    assert data["complete"] is True
    assert data["command"] == "tilewise " + " ".join(command)
    assert data["dtype"] == "f32"
    assert data["peers"]["sdpa"] is None
    assert "compiles again" in data["peers"]["flex"]
    record = Record.read(names["json"])
    assert record.as_data() == data, "reading and writing again changes nothing"
    assert "<svg" in names["html"].read_text()
    assert names["svg"].read_text().startswith("<svg")


def test_scaling_prints_exponents_and_verdicts(tiny, tmp_path, capsys):
    file = tmp_path / "scale.json"
    assert main(["bench", "--scale", "--device", "cpu", "--quick", "--peers", "none", "--json", str(file)]) == 0
    text = capsys.readouterr().out
    assert "time ~ cells^" in text
    assert all(kind in text for kind in suites.KINDS)
    record = Record.read(file)
    assert len(record.cells) == 4 * len(suites.KINDS)
    assert all(cell.memory is not None for cell in record.cells)
    assert all(len(cell.ways) == 1 for cell in record.cells)


def test_interrupt_keeps_what_is_done(tiny, monkeypatch, tmp_path, capsys):
    usual, done = grid.measure, []

    def measure(task, bench):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(task)
        return usual(task, bench)

    monkeypatch.setattr(grid, "measure", measure)
    files = [tmp_path / name for name in ("a.json", "a.html")]
    command = [
        "bench",
        "--suite",
        "dims",
        "--device",
        "cpu",
        "--quick",
        "--json",
        str(files[0]),
        "--html",
        str(files[1]),
    ]
    assert main(command) == 130
    record = Record.read(files[0])
    assert (len(record.cells), record.about["complete"]) == (2, False)
    assert "interrupted: 2 of 3 cases done" in capsys.readouterr().out
    assert "interrupted: 2 of 3" in files[1].read_text()


def test_a_wrong_result_fails_the_command(tiny, monkeypatch, capsys):
    from tilewise.tools import workloads

    right = workloads.Inputs.attend
    monkeypatch.setattr(
        workloads.Inputs, "attend", lambda x, backend=None: right(x, backend) + (backend is None) * 0.01
    )
    assert main(["bench", "--suite", "varlen", "--device", "cpu", "--quick"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_in_16_bits_sdpa_is_asked_only_where_it_survives(tiny, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "sdpa_survives", lambda environment=None: False)
    file = tmp_path / "a.json"
    command = ["bench", "--suite", "dims", "--device", "cpu", "--dtype", "bf16", "--quick", "--json", str(file)]
    assert main(command) == 0
    record = Record.read(file)
    assert "crashes here" in record.about["peers"]["sdpa"]
    assert all(len(cell.ways) == 1 for cell in record.cells)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--suite", "cpu,prefill"], "cpu alone"),
        (["--suite", "cpu", "--dtype", "bf16"], "--dtype"),
        (["--suite", "dims", "--plot", "a.jpg"], ".svg or .png"),
        (["--suite", "dims", "--html", "no/such/folder/a.html"], "--html"),
        (["--suite", "dims", "--peers", "flashinfer"], "not installed"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_measured(words, message, capsys, monkeypatch):
    monkeypatch.setitem(
        run.installed.__globals__["PEERS"], "flashinfer", SimpleNamespace(missing=lambda: "not installed")
    )
    assert main(["bench", "--device", "cpu", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--suite", "dance"], "'dance'"),
        (["--suite", "dims", "--scale"], "not allowed with"),
        (["--peers", "sdpa,dance"], "'dance'"),
        (["--dtype", "f64"], "f64"),
        (["--jobs", "0"], "1 to 1024"),
    ],
)
def test_bad_words_leave_with_status_2(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", *words])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_png_without_its_library_names_the_remedy(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "--suite", "dims", "--device", "cpu", "--plot", str(tmp_path / "a.png")]) == 2
    assert "pip install 'matplotlib>=3.8' 'resvg-py>=0.5'" in capsys.readouterr().err


def test_cases_are_run_once_to_compile_them_and_what_fails_is_left_for_later(monkeypatch):
    ran = []
    x = SimpleNamespace(attend=lambda: ran.append("ours"))
    monkeypatch.setattr(precompile, "make_inputs", lambda case, device, dtype: x)
    ways = [SimpleNamespace(call=lambda: ran.append("flex")), SimpleNamespace(call=None)]
    monkeypatch.setattr(precompile, "find", lambda case, x, peers: ways)
    tasks = list(suites.varlen(TINY))
    precompile.run_once(tasks, "cpu", torch.float32, ["flex"])
    assert ran == ["ours", "flex"] * len(tasks)
    x.attend = lambda: 1 / 0
    precompile.run_once(tasks, "cpu", torch.float32, ["flex"])
    precompile.precompile(tasks, CPU, torch.float32, [], jobs=1)
    assert precompile.default_jobs(CPU) == 1
    assert precompile.default_jobs(torch.device("cuda")) >= 1


class Gpu:
    """torch.cuda with a clock of our own: a call takes the seconds that it says, unless it is captured."""

    def __init__(self, monkeypatch, can_capture=True):
        self.now, self.capturing, self.can_capture = 0.0, None, can_capture
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = gpu.now

            def elapsed_time(self, other):
                return (other.at - self.at) * 1e3

        class Graph:
            def replay(self):
                gpu.now += self.seconds

        class Capture:
            def __init__(self, graph):
                self.graph = graph

            def __enter__(self):
                if not gpu.can_capture:
                    raise RuntimeError("operation not permitted when stream is capturing")
                gpu.capturing = 0.0

            def __exit__(self, *error):
                self.graph.seconds, gpu.capturing = gpu.capturing, None

        stream = SimpleNamespace(wait_stream=lambda other: None)
        names = {
            "Event": Event, "CUDAGraph": Graph, "graph": Capture, "synchronize": lambda: None,
            "Stream": lambda: stream, "current_stream": lambda: stream,
        }  # fmt: skip
        for name, value in names.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(measure_gpu, "gpu_sleep", lambda cycles: None)

        class OnStream:
            def __init__(self, stream): ...

            def __enter__(self): ...

            def __exit__(self, *error): ...

        monkeypatch.setattr(torch.cuda, "stream", OnStream)

    def call(self, seconds, host=0.0):
        """A call of so many seconds on the GPU, and as many more if it is not part of a graph."""

        def run():
            if self.capturing is not None:
                self.capturing += seconds
            else:
                self.now += seconds + host

        return run


def test_short_calls_are_timed_in_a_graph_and_long_ones_as_they_are(monkeypatch):
    gpu = Gpu(monkeypatch)
    (short, in_graph), (long, eager) = measure_gpu.interleaved_on_gpu([[gpu.call(1e-5, 5e-5)] * 3, [gpu.call(2e-3)]], 0)
    assert in_graph
    assert not eager
    assert short.seconds == pytest.approx(1e-5), "without the host's share"
    assert long.seconds == pytest.approx(2e-3)
    assert (short.rounds, long.rounds) == (3, 3)
    assert short.repeats % 3 == 0, "whole passes over the sets"


def test_what_cannot_be_captured_is_timed_as_it_is(monkeypatch):
    gpu = Gpu(monkeypatch, can_capture=False)
    ((timing, in_graph),) = measure_gpu.interleaved_on_gpu([[gpu.call(1e-5, 5e-5)]], 0)
    assert not in_graph
    assert timing.seconds == pytest.approx(6e-5)


def test_a_gpu_run_goes_the_same_way(tiny, monkeypatch):
    """The whole of a GPU case but for the GPU: sets of inputs, graphs, notes."""
    gpu = Gpu(monkeypatch)
    bench = grid.Bench(SimpleNamespace(type="cuda"), torch.float32, 0.0, [])
    timed = bench.time([[gpu.call(1e-5)], [gpu.call(1e-3)]])
    assert [note for _, note in timed] == ["", "eager"]
    assert all(isinstance(timing, Timing) for timing, _ in timed)
    task = next(iter(suites.decode(suites.Scope(True))))
    assert grid._sets(task, SimpleNamespace(type="cuda")) == 1, "536 MB: past any cache"
    small = next(t for t in suites.decode(suites.Scope(True)) if t.case.name == "1 x 4k")
    assert grid._sets(small, SimpleNamespace(type="cuda")) == 8
    assert grid._sets(small, CPU) == 1


def test_ceilings_of_a_gpu(monkeypatch):
    gpu = Gpu(monkeypatch)
    made = {"randn": torch.randn, "ones": torch.ones}
    for name, function in made.items():
        monkeypatch.setattr(
            torch,
            name,
            lambda *a, function=function, **o: function(*a, **{k: v for k, v in o.items() if k != "device"}),
        )
    monkeypatch.setattr(torch.Tensor, "sum", lambda x: gpu.call(1e-3)())
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda x, y: gpu.call(2e-3)())
    found = measure_gpu.ceilings(torch.device("cuda"), torch.float32, 0.0, size=16, read=4096)
    assert found["read_gb_per_s"] == pytest.approx(4096 / 1e-3 / 1e9)
    assert found["matmul_gflop_per_s"] == pytest.approx(2 * 16**3 / 2e-3 / 1e9)


def test_memory_of_a_call_is_measured():
    def call():
        return torch.ones(40 * 2**20).add_(1)[:10].clone()  # 160 MB, given back

    taken = machine.taken_by(call, CPU)
    if taken is not None:  # the system says
        assert 100 * 2**20 < taken < 400 * 2**20
