"""tools/flash_attn_tests.py, on a small test file in the place of FlashAttention's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDS = [ROOT / f"benchmarks/records/cpu/{name}.json" for name in ("flash_attn_tests", "flash_attn_gradients")]
FILE = """
import pytest
import torch
from flash_attn import flash_attn_func
from tilewise.testing.check import judge, largest_error
from flash_attn.flash_attn_interface import _get_block_size_n

assert torch.cuda.get_device_capability("cuda")[0] >= 8

@pytest.mark.parametrize("dropout_p", [0.0, 0.17])
@pytest.mark.parametrize("seqlen", [150, 9, 500])
def test_output(seqlen, dropout_p):
    if seqlen == 9:
        pytest.skip("as told")
    torch.manual_seed(0)
    q = torch.randn(1, seqlen, 2, 16, device="cuda", requires_grad=True)
    out = flash_attn_func(q, q, q, dropout_p)
    leaves = [q, q, q.detach().double().requires_grad_()]
    rows = [x.transpose(1, 2) for x in leaves]
    outs = [out, *(torch.nn.functional.scaled_dot_product_attention(x, x, x).transpose(1, 2) for x in rows[1:])]
    grads = [torch.autograd.grad(y, x, torch.ones_like(y))[0] for x, y in zip(leaves, outs)]
    for got, plain, exact in (outs, grads):
        judge("out", got, exact, 2 * largest_error(plain, exact), torch.float32)

@pytest.mark.parametrize("paged_kv_block_size", [None, 16])
def test_pages(paged_kv_block_size):
    assert torch.is_grad_enabled() == (paged_kv_block_size is None)

def test_wrong():
    q = torch.randn(1, 3, 2, 16, device="cuda")
    assert flash_attn_func(q, q, q).equal(q + 1)

def test_refused():
    q = torch.randn(1, 3, 2, 16, device="cuda")
    flash_attn_func(q, q, q, softcap=-1.0)

def test_race_condition():
    raise RuntimeError
"""


def test_cases_are_listed_by_outcome(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_flash_attn.py").write_text(FILE)
    record = tmp_path / "record.json"
    command = [sys.executable, str(ROOT / "tools" / "flash_attn_tests.py"), str(tmp_path), "--longest", "300"]
    command += ["--only", "FlashAttention 2", "--json", str(record)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tests = json.loads(record.read_text())["files"]["FlashAttention 2"]["tests"]
    assert tests["test_output"] == {
        "cases": 6,
        "with dropout, not run": 3,
        "too long, not run": 1,
        "drawn": 2,
        "outcomes": {"passed": 1, "skipped": 1},
    }
    assert tests["test_wrong"]["outcomes"] == {"failed": 1}
    assert tests["test_wrong"]["failures"] == ["test_wrong"]
    assert tests["test_refused"]["outcomes"] == {"refused: softcap": 1}
    assert tests["test_pages"]["outcomes"] == {"passed": 2}
    assert tests["test_race_condition"] == {"cases": 1, "left out": "repeats one call 250 times"}


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_the_record_is_what_the_page_says(record):
    page = (ROOT / "docs/integrations/flash-attn.md").read_text(encoding="utf-8")
    for name, found in json.loads(record.read_text(encoding="utf-8"))["files"].items():
        outcomes = [test["outcomes"] for test in found["tests"].values() if "outcomes" in test]
        passed, skipped = (sum(x.get(word, 0) for x in outcomes) for word in ("passed", "skipped"))
        refused = sum(n for x in outcomes for word, n in x.items() if word.startswith("refused"))
        assert not any("failed" in x for x in outcomes)
        assert f"| {name} | {passed + skipped + refused} | {passed} | {skipped} | {refused} | 0 |" in page
