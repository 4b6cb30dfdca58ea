"""The site of the documents: it builds without a warning, every document is on it, and its pictures are true."""

import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import pictures  # noqa: E402
import reference  # noqa: E402

sys.path.remove(str(ROOT / "docs"))
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
IN_NAVIGATION = re.findall(r"[:-] ([\w/-]+\.md)", CONFIG)


@pytest.mark.parametrize("name", pictures.NAMES)
def test_pictures_show_what_tilewise_does(name):
    kept = (pictures.HERE / f"{name}.svg").read_text(encoding="utf-8")
    assert kept == pictures.drawn(name), "python docs/pictures.py draws them anew"


def test_pictures_are_shown_and_none_is_left_over():
    shown = {
        name
        for file in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
        for name in re.findall(r"pictures/(\w+)\.svg", file.read_text())
    }
    assert shown == set(pictures.NAMES) == {file.stem for file in pictures.HERE.glob("*.svg")}


def test_every_document_is_in_the_navigation():
    want = {str(file.relative_to(ROOT)) for file in (ROOT / "docs").rglob("*.md")}
    written = {f"docs/reference/{name}.md" for name in reference.PAGES}
    assert set(IN_NAVIGATION) == want | written | {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"}


def test_the_reference_has_every_public_name_with_all_that_it_says():
    pages = {name: reference.page(name) for name in reference.PAGES}
    for name in tilewise.__all__:
        if name.startswith("__"):
            continue
        thing = getattr(tilewise, name)
        page = pages[reference.page_of(thing)]
        assert f"\n## {name}\n" in page
        text = inspect.getdoc(thing)
        assert text.splitlines()[0] in page
        arguments = re.findall(r"(?m)^    (\w+): ", text.partition("Args:\n")[2].partition("\n\n")[0])
        assert all(f"\n- `{argument}`: " in page for argument in arguments), name
        assert (text.count(">>>") > 0) <= ("```pycon" in page)
    assert "\n### KVCache.append\n" in pages["caches"]
    assert "\n### TileMap.density\n" in pages["values"]
    assert "\n### flash_attn_func\n" in pages["compat"]
    assert [f"\n## tilewise {command}\n" in pages["commands"] for command in ("plan", "bench")] == [True, True]
    for page in pages.values():
        assert page.count("```") % 2 == 0


def test_a_docstring_becomes_markdown():
    text = reference.text(
        "Does a thing.\n\nArgs:\n    a, b: two\n        numbers.\n\nReturns:\n    A `sum`.\n\n>>> f(1)\n1\n\nMore."
    )
    assert re.sub(r"\n+", "\n", text).splitlines() == [
        "Does a thing.", "**Args**", "- `a, b`: two", "  numbers.", "**Returns**", "A `sum`.", "```pycon", ">>> f(1)",
        "1", "```", "More.",
    ]  # fmt: skip


GROUNDS = {"default": "#ffffff", "slate": "#0b0c0f"}  # the theme's, light and dark
STYLE = (ROOT / "docs/site.css").read_text(encoding="utf-8")


def contrast(a, b):
    """As WCAG 2 defines it, of two colours."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", GROUNDS)
def test_links_can_be_read(scheme):
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    (rules,) = re.findall(rf'\[data-md-color-scheme="{scheme}"\]\[data-md-color-primary\] {{([^}}]+)}}', STYLE)
    colours = dict(re.findall(r"--(md-[\w-]+): (#\w{6});", rules))
    assert set(colours) == {"md-typeset-a-color", "md-accent-fg-color"}
    assert all(contrast(colour, GROUNDS[scheme]) >= 4.5 for colour in colours.values())


def test_long_lines_of_code_are_not_cut_off():
    assert re.search(r"\.md-typeset pre > code \{[^}]*white-space: pre-wrap;", STYLE)
    assert "docs/site.css" in CONFIG


def test_the_site_builds_and_no_link_is_broken(tmp_path):
    """As `make docs` does, in another folder."""
    rule = re.search(r"cp -R (.+) site/pages/", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert rule
    pages = tmp_path / "site" / "pages"
    pages.mkdir(parents=True)
    for name in rule[1].split():
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, pages / name)
    reference.write(pages / "docs" / "reference")
    assert "docs/reference.py site/pages/docs/reference" in (ROOT / "Makefile").read_text(encoding="utf-8")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    command = [Path(sys.executable).parent / "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    html = tmp_path / "site" / "html"
    built = {str(file.relative_to(html)) for file in html.rglob("*.html")}
    assert {name.replace(".md", ".html").replace("README", "index") for name in IN_NAVIGATION} <= built
    for file in html.rglob("*.html"):
        assert re.search(r"<link[^>]+site\.css", file.read_text(encoding="utf-8"))
        for target in re.findall(r'<img[^>]+src="([^":]+)"', file.read_text(encoding="utf-8")):
            assert (file.parent / target).exists(), f"{file.name} shows {target}"
