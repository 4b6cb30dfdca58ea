"""Runs PyTorch's own tests of flex_attention, and attention-gym's functions, on tilewise; lists them by outcome.

    curl -O https://raw.githubusercontent.com/pytorch/pytorch/v2.13.0/test/inductor/test_flex_attention.py
    git clone https://github.com/meta-pytorch/attention-gym
    python tools/flex_attention_tests.py --tests test_flex_attention.py --gym attention-gym --json outcome.json

Take the test file of the installed torch's version: it imports private functions of torch. The tests run with
`tilewise.compat.flex_attention.install()`; the checks are theirs. Those that read the code which Inductor generates, or
count its graphs, cannot pass: tilewise's function is not traced.

Of attention-gym, each module of `attn_gym/masks` and `attn_gym/mods` draws the weights of an example in its `main`.
Here tilewise computes that example instead, and the result is compared with the function called by torch on all cells.
Its tests of flex_attention run too, with "cuda" replaced by the device.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import random
import re
import sys
import tempfile
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewise
from tilewise.compat import flex_attention as flex

TOLERANCE = 2e-5


class Outcomes:
    """A pytest plugin: draws cases, runs them, and counts how they end."""

    def __init__(self, sample: int | None, seed: int) -> None:
        self.sample, self.random = sample, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.failures: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.sample is not None and len(items) > self.sample:
            items[:] = self.random.sample(items, self.sample)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        report = yield
        if call.when == "call" or report.skipped:
            outcome = report.outcome if call.excinfo is None else outcome_of(call.excinfo.value, report.outcome)
            self.counts[outcome] += 1
            if outcome.startswith("failed"):
                self.failures[item.name] = call.excinfo.exconly()[:300]
        return report

    def record(self) -> dict[str, Any]:
        return {"outcomes": dict(sorted(self.counts.items())), "failures": self.failures}


def outcome_of(error: BaseException, otherwise: str) -> str:
    """What an error means: an argument that tilewise refuses, or a graph around its function."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, tilewise.InvalidArgument):
            return f"refused: {seen.argument}"
        if "mask_mod itself: torch.compile breaks the graph" in str(seen) or "found no compiled frames" in str(seen):
            return "refused: fullgraph=True"
        seen = seen.__cause__ or seen.__context__
    return f"failed: {type(error).__name__}" if otherwise == "failed" else otherwise


def run_tests(files: list[Path], outcomes: Outcomes, device: str | None) -> None:
    """Runs copies of test files; with a device, in the place of "cuda"."""
    with tempfile.TemporaryDirectory() as folder:
        for source in files:
            text = source.read_text(encoding="utf-8")
            if device is not None:
                text = re.sub(r"""(["'])cuda\1""", f'"{device}"', text)
                text = text.replace("torch.cuda.is_available()", "True")
            (Path(folder) / source.name).write_text(text, encoding="utf-8")
        options = ["-q", "-p", "no:cacheprovider", "--tb=no", "-c", os.devnull, "--rootdir", folder]
        pytest.main([*options, folder], plugins=[outcomes])


def load_gym(folder: Path) -> Any:
    """attention-gym as a package without its kernels: masks and mods alone."""
    package: Any = types.ModuleType("attn_gym")
    package.__path__ = [str(folder / "attn_gym")]
    sys.modules["attn_gym"] = package
    return package


def on_all_cells(function: Any, scores: tuple[torch.Tensor, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    """A function of one cell, called by torch on all."""
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=(0,) * len(scores) + dims)
    return function(*scores, *map(torch.arange, sizes))  # type: ignore[no-any-return]


def difference(query: torch.Tensor, key: torch.Tensor, score_mod: Any = None, mask_mod: Any = None, **_: Any) -> float:
    """The largest difference of tilewise's output from torch's, on tensors of the shapes of an example."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(x.shape, generator=generator) for x in (query, key, key))
    groups, sizes = q.shape[1] // k.shape[1], (*q.shape[:3], k.shape[2])
    scores = q @ k.repeat_interleave(groups, 1).mT * q.shape[3] ** -0.5
    if score_mod is not None:
        scores = on_all_cells(score_mod, (scores,), sizes)
    block_mask = None
    if mask_mod is not None:
        scores = scores.masked_fill(~on_all_cells(mask_mod, (), sizes), -torch.inf)
        block_mask = flex.create_block_mask(mask_mod, *sizes, device="cpu", BLOCK_SIZE=16)
    want = scores.softmax(-1).nan_to_num() @ v.repeat_interleave(groups, 1)
    got = flex.flex_attention(q, k, v, score_mod, block_mask, enable_gqa=True)
    return float((got - want).abs().max())


def run_examples(folder: Path) -> dict[str, str]:
    """Outcomes by the names of examples: a module may have several."""
    found: dict[str, str] = {}

    def show(*args: Any, name: str = "", **options: Any) -> None:
        away = difference(*args, **options)
        found[name] = "passed" if away < TOLERANCE else f"failed: off by {away:.1e}"

    load_gym(folder).visualize_attention_scores = show
    for path in sorted(p for kind in ("masks", "mods") for p in (folder / "attn_gym" / kind).glob("[!_]*.py")):
        try:
            module = importlib.import_module(f"attn_gym.{path.parent.name}.{path.stem}")
            if hasattr(module, "main"):
                module.main(device="cpu")
        except Exception as error:
            found[path.stem] = outcome_of(error, "failed")
            print(f"{path.stem}: {str(error)[:200]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tests", type=Path, help="PyTorch's test/inductor/test_flex_attention.py")
    parser.add_argument("--gym", type=Path, help="a checkout of attention-gym")
    parser.add_argument("--sample", type=int, help="test cases, drawn at random (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="for attention-gym's tests")
    parser.add_argument("--json", type=Path, help="write the outcomes here")
    given = parser.parse_args()
    if given.tests is None and given.gym is None:
        parser.error("--tests or --gym: nothing to run")
    record: dict[str, Any] = {"tilewise": tilewise.__version__, "torch": torch.__version__, "cpu": platform.machine()}
    with flex.installed():
        if given.gym is not None:
            found = run_examples(given.gym)
            record["attention-gym's examples"] = {"outcomes": dict(Counter(found.values())), "by name": found}
            tests = [p for p in sorted((given.gym / "test").glob("test_*.py")) if "flex_attention" in p.read_text()]
            outcomes = Outcomes(given.sample, given.seed)
            run_tests(tests, outcomes, given.device)
            record["attention-gym's tests"] = outcomes.record()
        if given.tests is not None:
            outcomes = Outcomes(given.sample, given.seed)
            run_tests([given.tests], outcomes, None)
            record["PyTorch's tests"] = outcomes.record()
    for name, part in record.items():
        print(f"{name}: {part['outcomes'] if isinstance(part, dict) else part}", flush=True)
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
