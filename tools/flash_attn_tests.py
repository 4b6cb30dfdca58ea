"""Runs FlashAttention's own test files on tilewise, gradients included, and lists their cases by outcome.

    git clone https://github.com/Dao-AILab/flash-attention
    pip install einops pytest
    python tools/flash_attn_tests.py flash-attention --sample 50 --json outcome.json

The files are copied to a temporary folder with "cuda" replaced by the device, and run with `tilewise.compat.flash_attn`
installed as flash-attn. The checks are theirs, of outputs and of gradients. Cases of pages and of float8 ask for no
gradients, but hand in tensors that require them: they run without. Dropout is refused by tilewise: those cases are
counted and not run. The grids have 700,000 cases in all: `--sample` draws so many of each test at random.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewise
from tilewise.compat import flash_attn

# A test file and what it needs beside it.
FILES = {
    "FlashAttention 2": ("tests/test_flash_attn.py", ()),
    "FlashAttention 3": ("hopper/test_flash_attn.py", ("hopper/test_util.py", "hopper/padding.py")),
}
LEFT_OUT = {  # tests by words in their names
    "bw_compatibility": "schemas of operators",
    "generator_arg": "an argument of FlashAttention's C++ module",
    "varlen_paged_kv_num_splits": "a private function of FlashAttention",
    "race_condition": "repeats one call 250 times",
}
SIZES = ("seqlen", "seqlen_q", "seqlen_k")


class Outcomes:
    """A pytest plugin: draws cases, runs them, and counts how they end."""

    def __init__(self, sample: int | None, longest: int, seed: int) -> None:
        self.sample, self.longest, self.random = sample, longest, random.Random(seed)
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        grids: dict[str, list[Any]] = {}
        for item in items:
            grids.setdefault(item.originalname, []).append(item)
        kept = []
        for name, cases in grids.items():
            reason = next((why for word, why in LEFT_OUT.items() if word in name), None)
            if reason is not None:
                self.tests[name] = {"cases": len(cases), "left out": reason}
                continue
            plain = [item for item in cases if not _parameter(item, "dropout_p")]
            short = [item for item in plain if max(_parameter(item, word) for word in SIZES) <= self.longest]
            drawn = short if self.sample is None else self.random.sample(short, min(self.sample, len(short)))
            kept += drawn
            self.tests[name] = {
                "cases": len(cases),
                "with dropout, not run": len(cases) - len(plain),
                "too long, not run": len(plain) - len(short),
                "drawn": len(drawn),
                "outcomes": Counter(),
            }
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        paged = bool(_parameter(item, "paged_kv_block_size") or _parameter(item, "page_size"))
        float8 = _parameter(item, "dtype") == torch.float8_e4m3fn
        with torch.set_grad_enabled(not paged and not float8):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        report = yield
        if call.when != "call":
            return report
        outcome = "passed" if call.excinfo is None else report.outcome
        if call.excinfo is not None and isinstance(call.excinfo.value, tilewise.InvalidArgument):
            outcome = f"refused: {call.excinfo.value.argument}"
        elif outcome == "failed":
            print(f"\n{item.name}: {call.excinfo.exconly()[:300]}")
            self.tests[item.originalname].setdefault("failures", []).append(item.name)
        self.tests[item.originalname]["outcomes"][outcome] += 1
        return report


def _parameter(item: Any, name: str) -> Any:
    return item.callspec.params.get(name, 0) if hasattr(item, "callspec") else 0


class _Properties:
    total_memory = 80 * 2**30


def pretend(device: str) -> None:
    """What the files ask of a GPU while they are imported, and what they take from FlashAttention's private parts."""
    flash_attn.install(replace=True)
    interface: Any = sys.modules["flash_attn.flash_attn_interface"]
    interface.USE_TRITON_ROCM = False
    interface._get_block_size_n = lambda *_: 128  # only for dropout
    if device == "cpu":
        torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
        torch.cuda.get_device_properties = lambda *_: _Properties()  # type: ignore[assignment, return-value]


def run(repository: Path, name: str, outcomes: Outcomes, device: str) -> None:
    path, beside = FILES[name]
    with tempfile.TemporaryDirectory() as folder:
        for source in (path, *beside):
            text = (repository / source).read_text(encoding="utf-8")
            text = re.sub(r"""(["'])cuda\1""", f'"{device}"', text)
            (Path(folder) / Path(source).name).write_text(text, encoding="utf-8")
        sys.path.insert(0, folder)
        options = ["-q", "-p", "no:cacheprovider", "--tb=no", "-c", os.devnull, "--rootdir", folder]
        pytest.main([*options, str(Path(folder) / Path(path).name)], plugins=[outcomes])
        sys.path.remove(folder)
        for source in (path, *beside):
            sys.modules.pop(Path(source).stem, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("repository", type=Path, help="a checkout of FlashAttention")
    parser.add_argument("--sample", type=int, help="cases of each test, drawn at random (default: all)")
    parser.add_argument("--longest", type=int, default=2**40, help="leave out cases of longer sequences")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", choices=list(FILES), action="append", help="one of the two files")
    parser.add_argument("--json", type=Path, help="write the outcomes here")
    given = parser.parse_args()
    pretend(given.device)
    record: dict[str, Any] = {"compared": "outputs and gradients", "files": {}}
    if given.json and given.json.exists():  # the other file's outcomes stay
        record = json.loads(given.json.read_text(encoding="utf-8"))
    for name in given.only or FILES:
        outcomes = Outcomes(given.sample, given.longest, given.seed)
        run(given.repository, name, outcomes, given.device)
        record["files"][name] = {
            "tilewise": tilewise.__version__,
            "torch": torch.__version__,
            "device": platform.machine() if given.device == "cpu" else torch.cuda.get_device_name(),
            "sample": "all cases" if given.sample is None else f"{given.sample} of each test, seed {given.seed}",
            "longest sequence": given.longest if given.longest < 2**40 else None,
            "tests": outcomes.tests,
        }
        for test, found in outcomes.tests.items():
            print(f"{name}: {test}: {found.get('outcomes', found.get('left out'))}", flush=True)
        if given.json:
            given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
