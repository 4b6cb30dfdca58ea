"""Records of the bench: reading, comparing, charts, pages and pictures."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tilewise import InvalidArgument
from tilewise.tools.bench import charts, page, plot, scaling, svg, tables
from tilewise.tools.bench.compare import changes, compare
from tilewise.tools.bench.measure import Timing
from tilewise.tools.bench.record import Cell, Record, TimedResult
from tilewise.tools.cli import main

KEPT = Path(__file__).parents[2] / "benchmarks/records/cpu/xeon-avx512-2-core.json"
ABOUT = {
    "suite": "prefill",
    "quick": False,
    "complete": True,
    "device": {"cpu": "A <CPU>", "cores": 2, "threads": 2, "vector_width": 16, "last_cache_bytes": 2**25},
    "versions": {"torch": "2.13.0"},
    "date": "2026-11-15T08:00:00+00:00",
    "command": "tilewise bench --suite prefill",
    "environment": {},
    "ceilings": {"read_gb_per_s": 10.0, "sgemm_gflop_per_s": 100.0, "read_bytes": 1.0, "sgemm_size": 1.0},
    "notes": [],
}


def way(name, seconds, spread=0.01, error=1e-6, note=""):
    return TimedResult(name, Timing(seconds, seconds, spread, 9), error, note)


def cell(group="prefill: m", name="1k", ours=1.0, peers=(("SDPA flash", 2.0), ("SDPA math", 8.0)), **other):
    ways = (way("tilewise", ours), *(way(*peer) for peer in peers))
    facts = {"metric": "flops", "allowed": 1e-5, "flops": 10**10, "bytes": 10**8} | other
    return Cell(group, name, ways=ways, **facts)


def record(*cells, **about):
    return Record({**ABOUT, **about}, cells)


def write(path, *cells, **about):
    path.write_text(json.dumps(record(*cells, **about).as_data()))
    return path


def test_ratio_is_to_the_fastest_peer_that_is_right():
    assert cell().ratio == 2.0
    assert cell(peers=[("SDPA flash", 0.1, 0.01, float("nan")), ("SDPA math", 8.0)]).ratio == 8.0
    assert cell(peers=[("tilewise, contiguous", 0.1)]).ratio is None
    assert record(cell(), cell(ours=0.5)).mean_ratio == pytest.approx(8**0.5)


def test_share_is_of_the_slower_limit():
    found = record(cell())
    assert found.share(found.cells[0], found.cells[0].ways[0]) == pytest.approx(0.1), "products: 0.1 s of 1"
    reading = cell(bytes=2 * 10**9)
    assert found.share(reading, reading.ways[0]) == pytest.approx(0.2)


def test_a_result_that_is_not_known_to_be_right_is_wrong():
    bad = cell()
    bad = replace(bad, ways=(replace(bad.ways[0], error=float("nan")), *bad.ways[1:]))
    none = replace(bad, ways=(replace(bad.ways[0], error=None), *bad.ways[1:]))
    assert [len(record(c).wrong) for c in (cell(), bad, none, replace(bad, ways=()))] == [0, 1, 1, 1]


def test_records_are_the_same_after_writing_and_reading(tmp_path):
    bad = cell(peers=[("SDPA flash", 0.1, 0.01, float("nan"))], refused={"FlexAttention": "why"}, x=1024, memory=5)
    file = write(tmp_path / "a.json", cell(), bad)
    assert Record.read(file).as_data() == record(cell(), bad).as_data()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "{", "[" * 100_000, '{"rows": [{"D": 64}]}', '{"rows": 3}', '{"cells": [{"x": 1}]}']
)
def test_a_file_that_is_no_record_is_named(text, tmp_path, capsys):
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(InvalidArgument, match=r"a\.json"):
        Record.read(file)
    assert main(["compare", str(file), str(tmp_path / "none.json")]) == 2
    assert "a.json" in capsys.readouterr().err


WRONG_KINDS = {
    "device": [None, 3, "x", [], {"threads": 0}, {"last_cache_bytes": "x"}], "versions": [None, 3, {"torch": 3}],
    "environment": [None, {"A": []}], "ceilings": ["x", {"read_gb_per_s": "x"}, {"read_bytes": 10**400}],
    "peers": [-1, {"a": 1}], "notes": [3, [3]], "dtype": [3], "seconds": [float("nan")],
    "group": [None, []], "x": ["x", 0, -1], "allowed": [None], "bytes": [10**400, -1], "refused": [[], {"a": 1}],
    "timing.seconds": [None, 0, -1, 1e-320, float("inf"), 10**400, "1"], "timing.spread": [None, "x"], "error": ["x"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, x) for name, xs in WRONG_KINDS.items() for x in xs], ids=str)
def test_values_of_another_kind_are_refused_and_named(name, value, tmp_path, capsys):
    data = record(cell()).as_data()
    inside = data["cells"][0]
    where = data if name in ABOUT or name in ("peers", "dtype", "seconds") else inside
    where = inside["ways"][0]["timing"] if "." in name else inside["ways"][0] if name == "error" else where
    where[name.rpartition(".")[2]] = value
    file, right = tmp_path / "a.json", write(tmp_path / "right.json", cell())
    file.write_text(json.dumps(data))
    for words in (["report", str(file)], ["compare", str(file), str(right)], ["compare", str(right), str(file)]):
        assert main(words) == 2
        told = capsys.readouterr().err
        assert "a.json" in told
        assert name in told


def test_texts_do_not_steer_the_terminal(tmp_path, capsys):
    file = write(tmp_path / "a.json", cell(group="a\x1b[31mb", name="\udcff"), notes=["\x07"], versions={"torch": "\r"})
    assert main(["report", str(file)]) == 0
    assert main(["report", str(file), "--html", str(tmp_path / "a.html"), "--plot", str(tmp_path / "a.svg")]) == 0
    assert main(["compare", str(file), str(write(tmp_path / "b.json", cell(group="a?[31mb", name="?")))]) == 0
    shown = capsys.readouterr().out
    assert "a?[31mb" in shown
    assert not any(letter in shown for letter in "\x1b\x07\r\udcff")


def test_a_file_without_end_is_not_read_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tilewise.tools.bench.record.LARGEST", 100)
    with pytest.raises(InvalidArgument, match="it has more than"):
        Record.read(write(tmp_path / "a.json", cell()))


def test_ways_and_places_that_a_report_needs(tmp_path, capsys):
    bars = {
        "name": "a",
        "against": "SDPA",
        "bar": 1.0,
        "least": 1.0,
        "is_share": False,
        "value": 1,
        "verdict": "missed",
    }
    alone = Record({**ABOUT, "suite": "cpu"}, [cell(group="a", peers=[])], [bars]).as_data()
    scale = record(cell(x=1024), cell(name="2k"), suite="scale").as_data()
    for data in (alone, scale):
        (tmp_path / "a.json").write_text(json.dumps(data))
        assert main(["report", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.svg")]) == 2
        assert "a.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ['{"cells": []}', '{"cells": [], "device": 3}', '{"cells": [], "device": {}, "rows": [1]}']
)
def test_a_record_that_is_not_whole_is_named(text, tmp_path, capsys):
    file = tmp_path / "a.json"
    file.write_text(text)
    assert main(["report", str(file)]) == 2
    assert "a.json" in capsys.readouterr().err


def test_the_kept_record_with_bars_is_read():
    found = Record.read(KEPT)
    assert len(found.rows) == 18
    assert len(found.cells) == sum(map(len, found.groups.values())) >= 50
    assert not found.wrong
    for row in found.rows:
        assert min(cell.over_peer for cell in found.groups[row["name"]]) == pytest.approx(row["worst"])


@pytest.mark.parametrize(
    ("before", "now", "spread", "verdict"),
    [
        (1.0, 0.9, 0.01, "faster"),
        (1.0, 1.1, 0.01, "SLOWER"),
        (1.0, 1.02, 0.001, "same"),
        (1.0, 1.1, 0.2, "same"),
        (1.0, 0.9, 0.2, "same"),
    ],
)
def test_changes_count_beyond_noise(before, now, spread, verdict):
    old, new = (Record(ABOUT, [Cell("g", "c", "flops", (way("tilewise", t, spread),))]) for t in (before, now))
    assert [change.verdict for change in changes(old, new)] == [verdict]


def test_compare_shows_what_changed_and_its_status_says_slower(tmp_path, capsys):
    a = write(tmp_path / "a.json", cell(name="x"), cell(name="y"), cell(name="only a"))
    b = write(tmp_path / "b.json", cell(name="x", ours=0.5), cell(name="y"), quick=True)
    assert main(["compare", str(a), str(b)]) == 0
    text = capsys.readouterr().out
    assert "prefill: m: x" in text
    assert "2.00x" in text
    assert "prefill: m: y" not in text
    assert "1 faster, 0 slower, 1 the same" in text
    assert "1 cases only in the first" in text
    assert "quick: False before, True now" in text
    assert main(["compare", str(b), str(a)]) == 1
    assert "SLOWER" in capsys.readouterr().out
    assert main(["compare", str(a), str(a), "--all"]) == 0
    assert "prefill: m: y" in capsys.readouterr().out


def test_a_slower_machine_is_not_our_doing(tmp_path, capsys):
    a = write(tmp_path / "a.json", cell(name="x"), cell(name="y"))
    slow = [("SDPA flash", 4.0), ("SDPA math", 16.0)]
    b = write(tmp_path / "b.json", cell(name="x", ours=2.0, peers=slow), cell(name="y", ours=2.0, peers=slow))
    assert main(["compare", str(a), str(b)]) == 0
    text = capsys.readouterr().out
    assert "peers ran at 0.50x their earlier speed" in text
    assert "0 faster, 0 slower, 2 the same" in text


def test_compare_tells_wrong_results_and_nothing_in_common(tmp_path, capsys):
    a = write(tmp_path / "a.json", cell())
    wrong = cell()
    b = write(tmp_path / "b.json", replace(wrong, ways=(replace(wrong.ways[0], error=float("nan")), wrong.ways[1])))
    assert main(["compare", str(a), str(b)]) == 1
    assert "WRONG: prefill: m, 1k" in capsys.readouterr().out
    assert compare(a, write(tmp_path / "c.json", cell(name="other"))) == 2


def test_the_kept_record_compares_with_itself(capsys):
    assert main(["compare", str(KEPT), str(KEPT)]) == 0
    assert " 0 faster, 0 slower" in capsys.readouterr().out


def test_exponents_are_fitted_to_the_long_cases():
    lengths = [2**n for n in range(10, 16)]
    kinds = {"full": 2.0, "window": 1.0}
    cells = [
        cell(kind, str(n), ours=1e-9 * n**power + 1e-5, peers=[], x=n, cells=n**power, tiles=n, memory=2**20)
        for kind, power in kinds.items()
        for n in lengths
    ]
    full, window = scaling.growths(record(*cells, suite="scale"))
    assert full.time == pytest.approx(2.0, abs=0.05)
    assert window.time == pytest.approx(0.53, abs=0.02), "its start still counts: 1e-5 s of 4e-5"
    assert full.cells == pytest.approx(1.0, abs=0.02)
    assert (full.is_linear, full.is_flat) == (True, True)
    assert "linear in cells, memory flat" in "\n".join(scaling.growth_table(record(*cells, suite="scale")))
    square = [replace(c, memory=int((c.x or 0) ** 2), cells=int(c.x or 1)) for c in cells[:6]]  # of time L^2
    bad = scaling.growth("full", square)
    assert (bad.is_linear, bad.is_flat) == (False, False)
    assert "NOT linear in cells, memory GROWS" in "\n".join(scaling.growth_table(record(*square, suite="scale")))


def test_too_little_is_not_fitted():
    assert scaling.exponent([1], [1]) is None
    assert scaling.exponent([2, 2], [1, 3]) is None
    assert scaling.exponent([1, 2, 0], [4, 4, 1]) == pytest.approx(0)


def test_lines_where_there_are_points_and_bars_where_not():
    three = [cell(name=str(n), x=n) for n in (1, 2, 4)]
    assert "polyline" in charts.chart(three).body
    assert "polyline" not in charts.chart(three[:2]).body
    drawn = charts.charts(record(cell("prefill: a"), cell("prefill: b"), *[replace(c, group="dims: c") for c in three]))
    assert list(drawn) == ["prefill (GFLOP/s)", "dims: c (GFLOP/s)"], "groups of one case share a chart"
    assert "a, 1k · 2.00x as fast as the best peer" in drawn["prefill (GFLOP/s)"].body


def test_wrong_ways_look_wrong():
    bad = cell(peers=[("SDPA flash", 0.1, 0.01, float("nan"))])
    assert 'class="bad"' in charts.chart([bad]).body
    assert "WRONG" in page.page(record(bad))


class Checker(HTMLParser):
    """Tags that are closed in order, and nothing from elsewhere."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], ""

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "link", "rect", "line", "polyline"):
            self.open.append(tag)
        for name, value in attributes:
            assert name not in ("src", "onclick"), (tag, name)
            assert name != "href" or value == "data:,"

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


PAGES = {
    "models": lambda: record(
        cell(), cell(name="2k", peers=[], refused={"SDPA": "it has no <softcap>"}), cell("decode: m", metric="bytes"),
        peers={"sdpa": None, "flashinfer": "not installed"}, notes=["loud & clear"],
    ),
    "bars": lambda: Record.read(KEPT),
    "scale": lambda: record(
        *[cell(kind, str(n), ours=n * 1e-6, x=n, cells=n, tiles=n, memory=n)
          for kind in ("full", "window") for n in (1024, 2048, 4096)], suite="scale",
    ),
    "empty": lambda: record(complete=False),
    "scale, one failed": lambda: record(
        *[cell("full", str(n), ours=n * 1e-6, x=n, cells=n, tiles=n, memory=n) for n in (1024, 2048, 4096)],
        *[replace(cell(kind, "8k", x=8192), ways=(), refused={"tilewise": "no memory"}) for kind in ("full", "window")],
        suite="scale",
    ),
    "failed": lambda: record(replace(cell(), ways=(), refused={"tilewise": "out of memory"})),
}  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_whole_and_need_nothing_from_elsewhere(name):
    text = page.page(PAGES[name]())
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert "<script" not in text
    assert not re.search(r"https?://(?!www\.w3\.org)|@import|url\(", text)
    assert "prefers-color-scheme:dark" in text
    assert 'name="viewport"' in text
    if name == "models":
        assert "it has no <softcap>" in checker.text
        assert "A <CPU>" in checker.text
        assert "Note: loud & clear" in checker.text.partition("Charts")[0]


@pytest.mark.parametrize("name", PAGES)
def test_pictures_are_svg_that_stands_alone(name, tmp_path):
    file = tmp_path / "a.svg"
    plot.draw(PAGES[name](), file)
    root = ElementTree.parse(file).getroot()
    assert root.tag.endswith("svg")
    width, height = (float(root.get(name)) for name in ("width", "height"))
    assert width in (svg.WIDTH + 32, 2 * svg.WIDTH + 64)
    assert "var(" not in file.read_text()
    assert height > 0


def test_a_picture_says_what_the_record_notes(tmp_path):
    """Above the charts, in lines that fit: a picture is shown without the page and the tables."""
    notes = ["the machine was busy: load 1.5 at the start", "a word " * 30]
    plot.draw(record(cell(), notes=notes), tmp_path / "a.svg")
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    top = [(float(x.get("y")), x.text) for x in root if x.tag.endswith("text")]
    assert "note: the machine was busy: load 1.5 at the start" in [text for _, text in top]
    assert "a word a word" in top[-1][1]
    assert all(len(text) <= svg.LETTERS for _, text in top[1:])
    first = next(x for x in root if x.tag.endswith("}g"))
    assert float(first.get("transform").strip(")").split()[1]) > top[-1][0]


def test_png(tmp_path):
    file = tmp_path / "a.png"
    plot.draw(PAGES["models"](), file)
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(file.read_bytes()) > 5000, "text is drawn, not left out"


def test_tables_say_why_ways_are_missing():
    text = "\n".join("\n".join(lines) for lines in tables.tables(PAGES["models"]()))
    assert "SDPA: not in 1 of 3 cases, it has no <softcap>" in text
    assert "3 cases, 0 of ours wrong; 2.00x as fast as the fastest peer" in text
    assert "1 without a peer that can do it" in text
    assert "GB/s" in text


def test_labels_do_not_lie_over_each_other():
    placed = svg._apart(sorted([(10.0, 0.0, n, "") for n in "abc"] + [(200.0, 0.0, "d", "")]), 200.0)
    ys = [y for y, *_ in placed]
    assert all(b - a >= 13 for a, b in pairwise(ys))
    assert ys[-1] <= 200
    crowded = [y for y, *_ in svg._apart([(195.0, 0.0, str(n), "") for n in range(5)], 200.0)]
    assert crowded[-1] == 200
    assert all(b - a >= 13 for a, b in pairwise(crowded))


@pytest.mark.parametrize(("high", "count"), [(1.0, 5), (7.0, 4), (0.03, 4), (1234.0, 7)])
def test_ticks_are_few_and_round(high, count):
    ticks = svg._ticks(0.0, high, False)
    assert 3 <= len(ticks) <= 7
    assert ticks[0] == 0
    assert ticks[-1] <= high


def test_lengths_that_failed_are_left_out_of_the_fit():
    full, window = scaling.growths(PAGES["scale, one failed"]())
    assert full.time == pytest.approx(1.0)
    assert window.time is None
    text = "\n".join(scaling.growth_table(PAGES["scale, one failed"]()))
    assert "4096" in text
    assert "window" not in text


@pytest.mark.parametrize("name", ["models", "scale"])
def test_a_record_is_shown_again(name, tmp_path, capsys):
    made = PAGES[name]()
    file = write(tmp_path / "a.json", *made.cells, **made.about)
    assert main(["report", str(file)]) == 0
    text = capsys.readouterr().out
    assert "A <CPU>" in text
    assert "cases, 0 of ours wrong" in text
    assert ("time ~ cells^" in text) == (name == "scale")
    assert main(["report", str(file), "--html", str(tmp_path / "a.html"), "--plot", str(tmp_path / "a.svg")]) == 0
    assert capsys.readouterr().out == ""
    assert (tmp_path / "a.html").read_text() == page.page(Record.read(file))
    assert main(["report", str(file), "--plot", str(tmp_path / "a.jpg")]) == 2
    assert ".svg or .png" in capsys.readouterr().err
