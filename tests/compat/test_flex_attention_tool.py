"""tools/flex_attention_tests.py, on small files in the place of PyTorch's and attention-gym's."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks/records/cpu/attention_gym.json"
MASKS = """
import torch
from torch.nn.attention.flex_attention import and_masks

causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx

def main(device="cuda"):
    from attn_gym import visualize_attention_scores
    q = torch.ones(1, 2, 20, 8, device=device)
    visualize_attention_scores(q, q, mask_mod=causal, device=device, name="causal")
    near = and_masks(causal, lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 3)
    visualize_attention_scores(q, q[:, :1], mask_mod=near, name="near")
"""
MODS = """
import torch
from torch import Tensor

def main(device="cuda"):
    from attn_gym import visualize_attention_scores
    q = torch.ones(1, 2, 20, 8, device=device)
    {}
    visualize_attention_scores(q, q, score_mod={}, name={!r})
"""
NOISE = "made = iter(range(99)); noise = lambda: torch.full((), float(next(made)))"
TESTS = """
import unittest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

class TestFlexAttention(unittest.TestCase):
    def setUp(self):
        self.q = torch.randn(1, 2, 40, 16)

    def test_compiled(self):
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 40, 40, device="cpu")
        out = torch.compile(flex_attention, backend="eager")(self.q, self.q, self.q, block_mask=mask)
        want = torch.nn.functional.scaled_dot_product_attention(self.q, self.q, self.q, is_causal=True)
        torch.testing.assert_close(out, want)
        assert flex_attention.__module__ == "tilewise.compat.flex_attention"

    def test_fullgraph(self):
        torch.compile(lambda q: flex_attention(q * 2, q, q) + 1, backend="eager", fullgraph=True)(self.q)

    def test_refused(self):
        flex_attention(self.q, self.q, self.q, score_mod=lambda s, b, h, q, k: torch.erfinv(s))

    def test_wrong(self):
        assert flex_attention(self.q, self.q, self.q).equal(self.q)

    @unittest.skip("a GPU")
    def test_skipped(self):
        raise RuntimeError
"""
GYM_TEST = """
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from attn_gym.mods import double

@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU")
@pytest.mark.parametrize("length", [3, 30])
def test_double(length):
    q = torch.randn(1, 2, length, 16, device="cuda")
    torch.testing.assert_close(flex_attention(q, q, q, double.f), flex_attention(q, q, q, scale=0.5))
"""


def test_cases_are_listed_by_outcome(tmp_path):
    files = {
        "test_flex_attention.py": TESTS,
        "gym/test/test_double.py": GYM_TEST,
        "gym/test/test_other.py": "raise RuntimeError",
        "gym/attn_gym/__init__.py": "raise RuntimeError",
        "gym/attn_gym/masks/__init__.py": "",
        "gym/attn_gym/masks/causal.py": MASKS,
        "gym/attn_gym/mods/__init__.py": "",
        "gym/attn_gym/mods/double.py": "f = lambda s, b, h, q, k: s * 2\n" + MODS.format("", "f", "double"),
        "gym/attn_gym/mods/odd.py": MODS.format("", "lambda s, b, h, q, k: torch.erfinv(s)", "odd"),
        "gym/attn_gym/mods/wrong.py": MODS.format(NOISE, "lambda s, b, h, q, k: s + noise() * k", "wrong"),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    record = tmp_path / "record.json"
    command = [sys.executable, str(ROOT / "tools/flex_attention_tests.py"), "--json", str(record)]
    command += ["--tests", str(tmp_path / "test_flex_attention.py"), "--gym", str(tmp_path / "gym")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(record.read_text())
    examples = found["attention-gym's examples"]["by name"]
    assert examples.pop("wrong").startswith("failed: off by ")
    assert examples == {"causal": "passed", "near": "passed", "double": "passed", "odd": "refused: score_mod"}
    assert found["attention-gym's tests"] == {"outcomes": {"passed": 2}, "failures": {}}
    assert found["PyTorch's tests"]["outcomes"] == {
        "failed: AssertionError": 1, "passed": 1, "refused: fullgraph=True": 1, "refused: score_mod": 1, "skipped": 1,
    }  # fmt: skip
    assert list(found["PyTorch's tests"]["failures"]) == ["test_wrong"]
    assert "PyTorch's tests: {'failed: AssertionError': 1" in done.stdout


def test_what_the_page_says_of_attention_gym():
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    examples, tests = (record[f"attention-gym's {part}"]["outcomes"] for part in ("examples", "tests"))
    page = " ".join((ROOT / "docs/score-mods.md").read_text(encoding="utf-8").split())
    assert f"{examples['passed']} of its {sum(examples.values())} examples" in page
    run = sum(tests.values()) - tests.get("skipped", 0)
    assert f"{tests['passed']} of {run} of its tests" in page
