"""The compile matrix: a sample of it compiled here, the whole in a record. `make matrix` goes through all."""

import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

import compile_matrix
import matrix
import triton
from aot import attend_of, forward_kernels
from assembler import local_in_loops, of_nvidia
from compile_matrix import (
    FIRST,
    TARGETS,
    Item,
    cases,
    commonest,
    compiled,
    entries,
    refusal,
    report,
    without_docstrings,
    wrong,
)
from tilewise.backends.gpu.target import AMD
from tilewise.backends.triton.spec import Config

RECORD = Path(__file__).parents[3] / "benchmarks/records/aot/matrix.json"
SAMPLE = [("decode-D128", gfx) for gfx in AMD] + [("D128-causal", "gfx942"), ("decode-D128", "sm_120")]
# Those that spilled by Hopper's tiles.
SAMPLE += [("backward D128-causal", "sm_86"), ("f32-D128", "sm_80"), ("D128-window", "sm_86"), ("D512", "sm_80")]
SAMPLE += [("int4 prefill", "gfx942"), ("decode-mask", "gfx1100"), ("backward everything, dense mask", "gfx1200")]
# Did not compile, pipelined; spilled by Hopper's tiles.
SAMPLE += [("paged16-tree", "gfx942"), ("paged16-int8-causal", "sm_80"), ("paged16-biases", "sm_120")]
COMBINED = ("decode-D128", "paged16-D128", "decode-D64")
MORE = [(case, target) for case in FIRST for target in TARGETS if (case, target) not in SAMPLE]
MORE += [("int4 prefill", "sm_86"), ("int4 prefill", "sm_120"), ("decode-mask", "sm_86"), ("chosen-all", "sm_100")]
MORE += [("backward everything, dense mask", target) for target in ("sm_86", "sm_120", "gfx942")]
MORE += [
    (case, target)
    for case in ("paged16-tree", "paged16-biases", "decode-mask")
    for target in TARGETS
    if target != "sm_90"
]
MORE += [("paged16-codebook4", "sm_86"), ("paged-packed", "sm_89"), ("biases", "sm_80"), ("backward D512", "sm_80")]
MORE += [("backward D256-causal", "sm_120"), ("backward f32-D64", "sm_86"), ("backward D512", "gfx90a")]


def check(case, target):
    if refusal(case, target) is None:
        first = {key for key, *_ in commonest(case, target)}
        for number, (key, *_) in enumerate(entries(case, target)):
            if key in first:
                assert wrong(compiled(Item(case, target, number, key))) is None


@pytest.mark.parametrize(("case", "target"), SAMPLE)
def test_a_sample(case, target):
    assert refusal(case, target) is None
    check(case, target)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "target"), MORE)
def test_the_commonest_kernels_on_every_target(case, target):
    check(case, target)


def test_spills_are_found():
    """The checks above can fail: a tile of CDNA's on RDNA does not fit its registers."""
    kernel, given = next(forward_kernels(cases()["D128"], TARGETS["gfx1100"], Config(128, 64, 4, 1)))
    found = report(kernel, given, "gfx1100")
    assert found["spills"] > 100
    assert found["loop_spills"] > 10
    row = found | {"target": "gfx1100", "kernel": "fwd_kernel", "wanted": "wmma"}
    assert "spills in a loop" in str(wrong(row))
    fine = row | {"loop_spills": 0}
    assert wrong(fine) is None
    assert "shared memory" in str(wrong(fine | {"shared": 70000}))
    assert "in place of wmma" in str(wrong(fine | {"instruction": ""}))
    assert "does not compile" in str(wrong({"error": "RuntimeError"}))


@pytest.mark.skipif(not triton.__version__.startswith("3.6"), reason="counts instructions as Triton 3.6 makes them")
def test_only_kernels_with_local_memory_are_disassembled():
    """By Hopper's tile a window spills on Ampere; decode has no local memory, and no instruction reads any."""
    spilled = attend_of(cases()["D128-window"], 86, Config(64, 64, 4, 3))
    assert spilled.frame > 0
    assert of_nvidia(spilled)["loop_spills"] == local_in_loops(spilled) > 0
    small = attend_of(cases()["decode-D128"], 120)
    assert small.frame == 0
    assert "LDL" not in small.sass
    assert "STL" not in small.sass


def test_every_kernel_is_among_them():
    names = {name for case in ("D128-causal", "decode-D128", "varlen-full", "bool mask", "backward D128-causal",
             "backward everything", "append bf16", "merge 8") for _, name, *_ in entries(case, "sm_90")}  # fmt: skip
    assert names == {
        "fwd_kernel", "fwd_kernel fixup", "combine", "sort_sequences", "classify", "compact", "sum_delta", "append",
        "key_gradients", "key_gradients fixup", "query_gradients", "query_gradients fixup", "mask_gradients",
        "row_sums", "merge_kernel",
    }  # fmt: skip


def test_equal_kernels_have_one_key():
    """What a kernel does not depend on makes no other of it, and what it does depend on does."""
    keys = {target: [key for key, *_ in entries("decode-D128", target)] for target in ("sm_86", "sm_89", "gfx942")}
    assert keys["sm_86"] == [key for key, *_ in entries("decode-D128", "sm_86")]
    assert len({key for found in keys.values() for key in found}) == sum(map(len, keys.values()))


def test_kernels_of_one_program_are_compiled_once(monkeypatch, tmp_path):
    """By whatever name: splits of decode are combined alike with and without pages. Another tile is another program."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    said = {"shared": 1, "registers": 2, "spills": 0, "loop_spills": 0, "instruction": ""}
    built = []
    monkeypatch.setattr(compile_matrix, "report", lambda *kernel: built.append(kernel) or dict(said))
    found = {case: next(e for e in enumerate(entries(case, "sm_86")) if e[1][1] == "combine") for case in COMBINED}
    rows = [compiled(Item(case, "sm_86", number, entry[0])) for case, (number, entry) in found.items()]
    assert len({row["key"] for row in rows}) == 3
    assert len({row["program"] for row in rows}) == len(built) == 2
    assert all(row | said == row for row in rows)


def test_a_run_begins_with_what_may_be_the_same_program():
    item = Item("decode-D128", "sm_86", 0, "new")
    todo = [item, item._replace(number=1), item._replace(number=2), item._replace(number=3)]
    rows = {todo[1][:3]: {"key": "new"}, todo[2][:3]: {"key": "old"}, todo[3][:3]: {"key": "old", "program": "0"}}
    assert matrix.left(todo, rows) == [todo[3], todo[0], todo[2]]


def test_news_of_another_triton(monkeypatch):
    """A version that is not in the table, one that compiles more or less than it says; a spill is none."""
    entries = {"3.6": ("sm_90",), "3.7": (), "3.8": None}
    monkeypatch.setattr(matrix, "KERNELS", {name: {"prefill": entries} for name in ("hopper", "triton")})
    fine = [{"case": "hopper latent", "loop_spills": 3}, {"case": "D64", "loop_spills": 0}]
    broken = [*fine, {"case": "varlen", "target": "sm_80", "error": "PassManager"}]
    assert matrix.news("3.7.1", fine) == matrix.news("3.6.0", []) == []
    assert matrix.news("3.9.0+git", fine)[0] == (
        "hopper: 1 of 1 kernels compile with Triton 3.9, which coverage.py does not list"
    )
    assert len(matrix.news("3.9.0", fine)) == len(matrix.news("3.8.0", fine)) == 2
    assert matrix.news("3.7.1", broken) == [
        "triton: 1 of 2 kernels compile with Triton 3.7; first not: varlen for sm_80: PassManager"
    ]
    assert [line.partition(":")[0] for line in matrix.news("3.8.0", broken)] == ["hopper"]


def test_the_documents_say_what_the_record_says():
    record = matrix.record(RECORD)
    assert matrix.SAID.search(matrix.DOCS.read_text())[0] == matrix.said(record)


def test_the_record_says_what_was_compiled():
    record = matrix.record(RECORD)
    rows = record["rows"]
    assert {row["target"] for row in rows} == set(TARGETS)
    spilled = [row for row in rows if wrong(row)]
    assert record["wrong"] == len(spilled)
    assert all("spills in a loop" in wrong(row) for row in spilled)
    assert not {row["case"] for row in spilled} & set(FIRST)
    for case in FIRST[:3]:
        assert {row["target"] for row in rows if row["case"] == case} == set(TARGETS)
    assert record["kernels"] == {name: sum(row["target"] == name for row in rows) for name in record["kernels"]}
    assert len({(row["case"], row["target"], row["number"]) for row in rows}) == len(rows)
    assert all(record["kernels"][target] <= count for target, count in record["listed"].items())
    assert sum(record["sources"].values()) == len(rows)


def test_words_make_no_other_kernel():
    code = "@jit\ndef f(x):\n    {}return x + 1{}\n"
    plain = without_docstrings(code.format("", ""))
    assert without_docstrings(code.format('"""Adds."""\n    ', "  # one more")) == plain
    assert without_docstrings(code.format("x = x\n    ", "")) != plain
    assert without_docstrings(code.replace("1", "2").format("", "")) != plain
