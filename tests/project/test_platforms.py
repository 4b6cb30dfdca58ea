"""docs/platforms.md: a cell of the table is a record and a command, or empty."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from tilewise.backends.gpu.coverage import KERNELS
from tilewise.backends.gpu.target import AMD, CARDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/platforms.md").read_text()


def rows():
    table = re.search(r"^\| machine \|.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]


def test_no_cell_is_without_a_record():
    found = rows()
    assert len(found) > 10
    for machine, *cells in found:
        assert len(cells) == 4, machine
        assert any(cells), machine
        for cell in filter(None, cells):
            links = re.findall(r"\]\(([^)]+)\)", cell)
            assert links, (machine, cell)
            assert all((ROOT / "docs" / link).exists() for link in links), (machine, cell)
            assert re.search(r"`(make|tilewise|python) ", cell), (machine, cell)


def test_every_gpu_has_a_row():
    """And says that it ran where the plan says so, and nowhere else."""
    ran = {gpu for of in KERNELS.values() for entries in of.values() for gpus in entries.values() for gpu in gpus or ()}
    for name in (*(f"sm_{arch}" for arch in CARDS), *AMD):
        mine = [row for row in rows() if re.search(rf"\b{name}\b", row[0])]
        assert mine, name
        assert all(bool(row[1]) == (name in ran) for row in mine), name


def test_versions_of_triton_are_those_of_the_table():
    """A row for each version, a cell for each backend; "executed" where its kernels have run."""
    table = re.search(r"^\| Triton \|.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    said = {version: dict(zip(("triton", "hopper"), cells, strict=True)) for version, _, *cells in lines}
    for backend, families in KERNELS.items():
        for family, entries in families.items():
            for version, gpus in entries.items():
                word = "does not compile" if gpus is None else "executed" if gpus else "compiled"
                assert word in said[version][backend], (backend, family, version)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
@pytest.mark.parametrize("name", ["triton_versions", "torch_versions"])
def test_tables_of_versions_are_their_records(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    tool = importlib.import_module(name)
    record = json.loads(tool.RECORD.read_text())
    assert tool.SAID.search(PAGE)[0] == tool.said(record.get("kernels") or record["versions"])


def test_no_main_loop_spills_where_triton_3_6_does_not():
    record = json.loads((ROOT / "benchmarks/records/aot/triton_versions.json").read_text())
    for name, rows in record["kernels"].items():
        for version, row in rows.items():
            assert row["spills"] <= rows.get("3.6.0", {"spills": 0})["spills"], (name, version)


def test_instructions_of_arm_are_those_of_the_record():
    record = json.loads((ROOT / "benchmarks/records/arm/first_call.json").read_text())
    said = [
        (f"{found['import tilewise'] + found['first call']:.1f}", f"{found['seconds']:.1f}")
        for found in record.values()
    ]
    rows = re.findall(r"^\| (?:prefill|decode), kernels .* \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted(said)


def test_cases_of_arm_are_those_of_the_record():
    record = json.loads((ROOT / "benchmarks/records/arm/conformance.json").read_text())
    right, wrong, refused = (sum(case["passed"] is value for case in record["cases"]) for value in (True, False, None))
    assert wrong == 0
    assert f"{right + refused} cases, {right} correct, none wrong, {refused} that" in " ".join(PAGE.split())
    assert record["kept kernels"]["cases"] == record["kept kernels"]["equal bits"] > 0
