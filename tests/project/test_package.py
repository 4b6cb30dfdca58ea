"""The package as it is imported and used."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tilewise


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_import_is_light():
    """Counted, not timed: nothing beyond torch but small modules of our own, and few others of Python's."""
    loaded = run(
        "import torch, sys; before = set(sys.modules); import tilewise; print(*set(sys.modules) - before)"
    ).split()
    ours = [name for name in loaded if name.partition(".")[0] == "tilewise"]
    others = sorted({name.partition(".")[0] for name in loaded} - {"tilewise"} - set(sys.stdlib_module_names))
    assert others == [], "packages that torch had not imported"
    assert len(loaded) - len(ours) <= 5, sorted(set(loaded) - set(ours))
    assert len(ours) <= 100
    assert not [name for name in ours if name.startswith(("tilewise.backends.", "tilewise.tools"))]


def test_public_names():
    for name in tilewise.__all__:
        assert hasattr(tilewise, name)
    assert tilewise.__version__


def test_modules_are_loaded_when_they_are_named():
    """As the README has them, after `import tilewise` alone."""
    named = "compat.sdpa.install, compat.flash_attn.install, compat.flash_attn_3, distributed.attention, testing"
    code = "import sys, tilewise; before = set(sys.modules); [tilewise.{}]; print(*set(sys.modules) - before)"
    loaded = run(code.format(named.replace(", ", ", tilewise."))).split()
    assert {f"tilewise.{name}" for name in ("compat.sdpa", "compat.flash_attn", "distributed", "testing")} <= {*loaded}
    assert not hasattr(tilewise, "distribute")
    assert not hasattr(tilewise.compat, "sdp")


def test_alibi_slopes():
    assert tilewise.alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    twelve = tilewise.alibi_slopes(12)
    assert twelve[:8].equal(tilewise.alibi_slopes(8))
    assert twelve[8:].tolist() == pytest.approx([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])
    assert len(set(tilewise.alibi_slopes(71).tolist())) == 71


def test_does_not_depend_on_torchs_precision():
    """float32 means float32, whatever torch is set to."""
    q, k, v = (torch.randn(1, 2, 64, 64) * 2 for _ in range(3))
    exact = tilewise.attention(q, k, v, backend="reference")
    torch.set_float32_matmul_precision("medium")
    try:
        fast = tilewise.attention(q, k, v, backend="torch")
    finally:
        torch.set_float32_matmul_precision("highest")
    torch.testing.assert_close(fast, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_offsets_past_2_31():
    """K and V whose last rows lie more than 2^31 elements from their first; what decides is read at the end."""
    rows, width = 2**20, 2112
    assert (rows - 1) * width > 2**31
    wide = torch.zeros(rows, width, dtype=torch.float16)  # 4.4 GB
    wide[-20:, :64] = torch.randn(20, 64).half() * 3
    k = wide[None, None, :, :64]
    q = torch.randn(1, 1, 2, 64).half()
    for options in ({"window": 8}, {"window": 8, "causal": True}):
        got = tilewise.attention(q, k, k, **options)
        want = tilewise.attention(q, k[:, :, -20:], k[:, :, -20:], backend="reference", **options)
        torch.testing.assert_close(got.float(), want.float(), rtol=2e-3, atol=2e-3)
        assert got.abs().amax() > 1


def test_every_environment_variable_is_documented():
    """Names that the package takes from the environment stand on one page."""
    root = Path(tilewise.__file__).parent
    found = set()
    for file in root.rglob("*.py"):
        found |= set(re.findall(r"""environ(?:\.get\(|\[)["'](\w+)""", file.read_text(encoding="utf-8")))
    assert {"TILEWISE_CACHE_DIR", "TRITON_INTERPRET"} <= found
    page = (root.parent.parent / "docs" / "environment.md").read_text(encoding="utf-8")
    assert {name for name in found if f"`{name}`" not in page} == set()
