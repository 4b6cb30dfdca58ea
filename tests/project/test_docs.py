"""What the documents say is true: their code runs and prints what is shown, their commands, files and links exist."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import json
import pkgutil
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import tilewise
import tilewise.backends
from printed import for_any_machine
from tilewise.dispatch import planner

ROOT = Path(__file__).resolve().parents[2]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
# What was tried. These name files as they were then, so only their links are checked.
LOGS = sorted((ROOT / "benchmarks").rglob("LOG.md"))
# These two import servers that are not installed; `test_compat_serving.py` has stand-ins.
ELSEWHERE = ("tilewise.__main__", "tilewise.compat.sglang", "tilewise.compat.vllm")
MODULES = sorted(m.name for m in pkgutil.walk_packages(tilewise.__path__, "tilewise.") if m.name not in ELSEWHERE)
BACKEND_FILE = re.compile(r"# src/tilewise/backends/(\w+)/__init__\.py\n")


@dataclass(frozen=True)
class Block:
    """A fenced block; `follows` is the block before it when nothing but blank lines lies between."""

    language: str
    text: str
    line: int
    follows: Block | None = None


def blocks(document: Path) -> list[Block]:
    found: list[Block] = []
    fence, start, last_end = "", 0, -1
    lines = document.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        mark = re.match(r"\s*(`{3,})(\w*)\s*$", line)
        if not mark:
            continue
        if not fence:
            fence, start, language = mark[1], number, mark[2]
        elif mark[1] == fence and not mark[2]:
            near = found and not any(text.strip() for text in lines[last_end + 1 : start])
            text = "".join(f"{text}\n" for text in lines[start + 1 : number])
            found.append(Block(language, text, start + 1, found[-1] if near else None))
            fence, last_end = "", number
    assert not fence, f"{document.name}: the block at line {start + 1} is not closed"
    return found


def prose(document: Path) -> str:
    """A document without its blocks."""
    return re.sub(r"(?ms)^\s*(`{3,})\w*\s*$.*?^\s*\1\s*$", "", document.read_text(encoding="utf-8"))


def by_name(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.fixture
def new_backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose modules are backends; the planner forgets them, and its plans, afterwards."""
    monkeypatch.setattr(tilewise.backends, "__path__", [*tilewise.backends.__path__, str(tmp_path)])
    monkeypatch.setattr(planner, "BACKENDS", planner.BACKENDS)
    planner.choose.cache_clear()
    yield tmp_path
    planner.choose.cache_clear()
    planner.load.cache_clear()
    for folder in tmp_path.iterdir():
        sys.modules.pop(f"tilewise.backends.{folder.name}", None)
        if hasattr(tilewise.backends, folder.name):
            delattr(tilewise.backends, folder.name)


def run(document: Path, block: Block, namespace: dict[str, object]) -> str:
    """Runs a block; what it prints. Tracebacks show the document's own lines."""
    printed = io.StringIO()
    code = compile("\n" * block.line + block.text, by_name(document), "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, namespace)
    return printed.getvalue()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of torch's own imports in forward mode
@pytest.mark.parametrize("document", [d for d in DOCS if any(b.language == "python" for b in blocks(d))], ids=by_name)
def test_python_blocks_run_and_print_what_is_shown(document: Path, new_backends: Path) -> None:
    namespace: dict[str, object] = {"__name__": "__docs__"}
    printed: dict[Block, str] = {}
    with torch.random.fork_rng():
        for block in blocks(document):
            if block.language == "python":
                if name := BACKEND_FILE.match(block.text):
                    (new_backends / name[1]).mkdir()
                    (new_backends / name[1] / "__init__.py").write_text(block.text, encoding="utf-8")
                    importlib.invalidate_caches()
                    planner.BACKENDS = (name[1], *planner.BACKENDS)
                else:
                    printed[block] = run(document, block, namespace)
            elif block.language == "text" and block.follows in printed:
                got = printed.pop(block.follows)
                assert for_any_machine(got) == for_any_machine(block.text), (
                    f"{by_name(document)}:{block.line} shows\n{block.text}\nbut got\n{got}"
                )
    for block, text in printed.items():
        assert not text, f"{by_name(document)}:{block.line} prints, but no output is shown:\n{text}"


def commands(document: Path) -> Iterator[list[str]]:
    """The words of each command line in a document's shell blocks and inline code."""
    lines = [line for b in blocks(document) if b.language in ("bash", "console") for line in b.text.splitlines()]
    for line in [*lines, *re.findall(r"`([^`\n]+)`", prose(document))]:
        for command in re.split(r"&&|;", line.partition("#")[0]):
            yield command.strip().removeprefix("$ ").split()


# Messages have quotes of their own within theirs.
@pytest.mark.parametrize("document", [file for file in DOCS if file.name != "messages.md"], ids=by_name)
def test_commands_exist(document: Path) -> None:
    targets = re.findall(r"(?m)^([A-Za-z][\w-]*)\s*:(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    for words in commands(document):
        if words[:1] == ["make"]:
            wanted = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
            assert set(wanted) <= set(targets), f"{by_name(document)}: `{' '.join(words)}`, but make has {targets}"
        if words[:1] == ["tilewise"] and len(words) > 1 and not words[1].startswith("-"):
            assert_subcommand(words[1])


def assert_subcommand(name: str) -> None:
    cli = importlib.import_module("tilewise.tools.cli")
    with pytest.raises(SystemExit) as stop, contextlib.redirect_stdout(io.StringIO()):
        cli.main([name, "--help"])
    assert stop.value.code in (0, None), f"`tilewise {name}` is no command"


def anchors(document: Path) -> set[str]:
    """The names under which a document's headings can be linked to."""
    headings = re.findall(r"(?m)^#+ (.+?)\s*$", prose(document))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", [*DOCS, *LOGS], ids=by_name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (document.parent / path).resolve() if path else document
        assert linked.is_relative_to(ROOT), f"{by_name(document)} links to {target}"
        assert linked.exists(), f"{by_name(document)} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{by_name(document)} links to {target}; has {anchors(linked)}"


@pytest.mark.parametrize("document", DOCS, ids=by_name)
def test_files_exist(document: Path) -> None:
    for name in re.findall(r"`([\w./-]+(?:\.(?:py|md|toml|cff|txt)|/))`", prose(document)):
        places = (ROOT, ROOT / "src/tilewise", ROOT / "tests", ROOT / "docs")
        assert any((place / name).exists() for place in places), f"{by_name(document)} names {name}"


@pytest.mark.parametrize("name", ["tilewise", *MODULES])
def test_doctests(name: str) -> None:
    module = importlib.import_module(name)
    report = io.StringIO()
    with torch.random.fork_rng(), contextlib.redirect_stdout(report):
        result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.failed == 0, report.getvalue()


@pytest.mark.parametrize("name", ["README.md", "docs/guide.md"])
def test_first_compiles_take_what_their_record_says(name: str) -> None:
    record = json.loads((ROOT / "benchmarks/records/cpu/first_call.json").read_text(encoding="utf-8"))
    rows, machine = record["rows"], "EPYC" if "EPYC" in record["device"]["cpu"] else "Xeon"
    cold = [row["cold"]["seconds"] for row in rows]
    text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
    assert f"compiles its kernels, in {min(cold):.0f} to {max(cold):.0f} s on a 2-core {machine}" in text
    assert max(row["kept"]["seconds"] for row in rows) < 1 or "under a second" not in text
    others = [
        d for d in DOCS if re.search(r"compiles? .{0,60}(twelve|fifteen|twenty|\d+ s\b|\d+ seconds)", d.read_text())
    ]
    assert {by_name(d) for d in others} <= {"README.md", "docs/guide.md", "docs/performance.md"}, (
        "said in another place"
    )


def test_first_calls_from_a_wheel_take_what_their_record_says() -> None:
    record = json.loads((ROOT / "benchmarks/records/cpu/first_call_wheel.json").read_text(encoding="utf-8"))
    cold = [row["cold"]["seconds"] for row in record["rows"]]
    text = " ".join((ROOT / "docs/environment.md").read_text(encoding="utf-8").split())
    assert f"a first call takes {min(cold):.1f} to {max(cold):.1f} s beyond `import torch`" in text


def test_a_missed_bar_names_its_entry_in_a_log() -> None:
    """A row that misses its bar says so, and what limits it stands under an id."""
    text = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    table = (ROOT / "docs/missed.md").read_text(encoding="utf-8")
    rows = [line for line in table.splitlines() if line.startswith(("| H200", "| Xeon"))]
    assert len(rows) >= 10
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 6, row
        assert all(cells), row
        assert re.search(r"\d", cells[3]), row
        assert "missed" in cells[4], row
        assert re.fullmatch(r"\[(h200|cpu) \d+\]\(\.\./benchmarks/\1/LOG\.md#\1-\d+-[\w-]+\)", cells[5]), row
    for line in text.splitlines():
        assert not re.match(r"\|.*\bmissed\b", line), f"in the wrong table: {line}"
    assert len(text.splitlines()) <= 140, "one page for users; what was tried goes to a log"


def test_the_readmes_speeds_are_those_of_the_performance_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("## How fast")[2].partition("\n## ")[0]
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    table = [line for line in readme.splitlines() if line.startswith("|")]
    speeds = re.findall(r"[\d.]+(?=x)|\d+(?= TFLOPS)|[\d.]+(?= ms)", "\n".join(row.split("|")[-2] for row in table))
    assert len(speeds) >= 10
    for speed in speeds:
        rounds_to = [n for n in re.findall(r"\d+\.?\d*", page) if n == speed or f"{float(n):.1f}" == speed]
        assert rounds_to, f"README.md says {speed}"


def test_speeds_of_cpus_are_those_of_their_records() -> None:
    def record(name: str) -> dict:
        return json.loads((ROOT / "benchmarks/records/cpu" / f"{name}.json").read_text(encoding="utf-8"))

    step = {row["case"]: f"{row['wall']['ratio']:.2f}x" for row in record("train_step")["rows"]}
    backward = {name: f"{mean:.3g}x" for name, mean in record("backward")["means"].items()}
    peers = {name: f"{x['mean']:.2f}x | {x['least']:.2f}x" for name, x in record("peers")["ratios"].items()}
    served = {name: x["runs"] for name, x in record("vllm_serving")["results"].items()}
    tokens = [served["TILEWISE"][n]["per_second"] / served["CPU_ATTN"][n]["per_second"] for n in ("32", "8", "1")]
    many, some, one = (f"{ratio:.2f}x" for ratio in tokens)
    bf16 = record("prefill_bf16")
    least = {peer: min(row["ratios"][peer] for row in bf16["rows"]) for peer in bf16["geometric_means"]}
    dots = {peer: f"{mean:.2f}x | {least[peer]:.2f}x" for peer, mean in bf16["geometric_means"].items()}
    prefill = {x["name"]: f"{x['value']:.2f}x | {x['worst']:.2f}x" for x in record("xeon-avx512-2-core")["rows"]}
    said = {
        "docs/training.md": [
            f"is {step['4 x 512']} as fast by tilewise as by SDPA in float32, {step['4 x 512, bfloat16']} in bfloat16",
            f"| {step['4 x 512']} / {step['1 x 2048']} / {step['4 x 512, packed']} |",
            *(f"| SDPA | {backward[dtype]} |" for dtype in ("float32", "bfloat16", "float16")),
        ],
        "docs/performance.md": [
            f"| SDPA, its flash kernel | {peers['SDPA flash']} |",
            f"| CPU_ATTN of vLLM | {peers['CPU_ATTN']} |",
            f"| SDPA | {dots['SDPA']} |",
            f"| OpenVINO 2026.4 | {dots['OpenVINO']} |",
            f"| ONNX Runtime, GroupQueryAttention | {peers['ONNX Runtime GQA']} |",
            f"(../benchmarks/records/cpu/vllm_serving.json)) | {many} / {some} / {one} |",
            *(f"| SDPA | {prefill[f'prefill {dtype}']} |" for dtype in ("f32", "bf16", "f16")),
        ],
        "README.md": [f"{many} / {some} / {one} of the tokens a second"],
    }
    for page, sentences in said.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert [sentence for sentence in sentences if sentence not in text] == [], page


def test_no_install_line_asks_pypi_for_what_is_not_there() -> None:
    """Until tilewise is on PyPI, `pip install tilewise` fails."""
    for document in DOCS:
        for words in commands(document):
            wanted = [word.strip("\"'") for word in words[2:]] if words[:2] == ["pip", "install"] else []
            assert not [word for word in wanted if word.startswith("tilewise")], (
                f"{by_name(document)}: {' '.join(words)}"
            )


def test_public_names_have_docstrings() -> None:
    for name in tilewise.__all__:
        if not name.startswith("__"):
            assert (getattr(tilewise, name).__doc__ or "").strip(), name
