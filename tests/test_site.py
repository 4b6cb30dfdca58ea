"""The site of the documents: it builds without a warning, every document is on it, and its pictures are true."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tilewise.bench import charts, plot, svg
from tilewise.bench.record import Record

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))
import pictures  # noqa: E402

sys.path.remove(str(ROOT / "docs"))
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
IN_NAVIGATION = re.findall(r"[:-] ([\w/-]+\.md)", CONFIG)


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_show_what_tilewise_does(name):
    kept = (pictures.HERE / f"{name}.svg").read_text(encoding="utf-8")
    assert kept == pictures.picture(name), "python docs/pictures.py draws them anew"


def test_pictures_are_shown_and_none_is_left_over():
    shown = {
        name for file in (ROOT / "docs").rglob("*.md") for name in re.findall(r"pictures/(\w+)\.svg", file.read_text())
    }
    assert shown == set(pictures.PICTURES) == {file.stem for file in pictures.HERE.glob("*.svg")}


PLOTS = sorted(file.relative_to(ROOT / "benchmarks").with_suffix("") for file in (ROOT / "benchmarks").rglob("*.svg"))


@pytest.mark.parametrize("name", PLOTS, ids=str)
def test_plots_are_of_the_records_beside_them(name):
    file = ROOT / "benchmarks" / f"{name}.json"
    record = Record.read(file)
    drawn = svg.picture(charts.charts(record), *plot.title_of(record))
    again = f"tilewise report benchmarks/{name}.json --plot benchmarks/{name}.svg"
    assert file.with_suffix(".svg").read_text(encoding="utf-8") == drawn, again


def test_every_document_is_in_the_navigation():
    want = {str(file.relative_to(ROOT)) for file in (ROOT / "docs").rglob("*.md")}
    assert set(IN_NAVIGATION) == want | {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"}


def test_the_site_builds_and_no_link_is_broken(tmp_path):
    """As `make docs` does, in another folder."""
    rule = re.search(r"cp -R (.+) site/pages/", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert rule
    pages = tmp_path / "site" / "pages"
    pages.mkdir(parents=True)
    for name in rule[1].split():
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, pages / name)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    command = [Path(sys.executable).parent / "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    html = tmp_path / "site" / "html"
    built = {str(file.relative_to(html)) for file in html.rglob("*.html")}
    assert {name.replace(".md", ".html").replace("README", "index") for name in IN_NAVIGATION} <= built
    for file in html.rglob("*.html"):
        for target in re.findall(r'<img[^>]+src="([^":]+)"', file.read_text(encoding="utf-8")):
            assert (file.parent / target).exists(), f"{file.name} shows {target}"
