"""Programs that look for the package flash-attn find tilewise: its metadata, transformers' checks, `tilewise run`."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from tilewise.compat import flash_attn
from tilewise.tools.cli import main

UTILITIES = transformers.modeling_flash_attention_utils
SCRIPT = """
import importlib.metadata, importlib.util, sys
import torch, transformers
from flash_attn import flash_attn_func, __version__
assert importlib.util.find_spec("flash_attn") and importlib.metadata.version("flash-attn") == __version__
assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
config = transformers.LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                                  num_key_value_heads=2, vocab_size=99, attn_implementation="flash_attention_2")
model = transformers.LlamaForCausalLM(config).eval()
assert transformers.utils.is_flash_attn_2_available()
assert flash_attn_func.__module__ == "tilewise.compat.flash_attn"
print(model.config._attn_implementation, *sys.argv[1:], torch.nn.functional.scaled_dot_product_attention.__module__)
"""


@pytest.fixture
def _installed():
    flash_attn.install()
    yield
    flash_attn.uninstall()


def llama(implementation: str, dropout: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=99, attn_implementation=implementation, attention_dropout=dropout,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("padded", ["no", "left", "right"])
def test_flash_attention_2_of_transformers_runs_on_a_cpu(padded: str) -> None:
    tokens = torch.randint(0, 99, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    if padded != "no":
        mask[0, slice(4) if padded == "left" else slice(8, None)] = 0
    ours, theirs = llama("flash_attention_2"), llama("sdpa")
    assert ours.config._attn_implementation == "flash_attention_2"
    with torch.no_grad():
        a, b = (model(tokens, attention_mask=mask).logits for model in (ours, theirs))
    seen = mask.bool()
    torch.testing.assert_close(a[seen], b[seen], atol=1e-5, rtol=1e-5)
    if padded == "left":
        outs = [m.generate(tokens, attention_mask=mask, max_new_tokens=5, do_sample=False) for m in (ours, theirs)]
        assert torch.equal(*outs)


@pytest.mark.usefixtures("_installed")
def test_it_trains() -> None:
    tokens = torch.randint(0, 99, (2, 12), generator=torch.Generator().manual_seed(1))
    found = []
    for name in ("flash_attention_2", "sdpa"):
        model = llama(name).train()
        model(tokens, labels=tokens).loss.backward()
        found.append([x.grad for x in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_the_package_is_found_while_installed_and_gone_after() -> None:
    before = dict(UTILITIES.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2])
    check = UTILITIES.is_flash_attn_2_available
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn")
    flash_attn.install()
    try:
        assert importlib.metadata.version("flash_attn") == importlib.metadata.version("flash-attn") == "2.8.3+tilewise"
        assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
        assert importlib.metadata.distribution("flash-attn").metadata["Name"] == "flash-attn"
        assert UTILITIES.is_flash_attn_2_available()
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version("flash-attn-4")
    finally:
        flash_attn.uninstall()
    assert before == UTILITIES.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
    assert check is UTILITIES.is_flash_attn_2_available
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn")


@pytest.mark.parametrize("options", [[], ["--sdpa", "--flex"]])
def test_tilewise_run_runs_a_script_unchanged(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'imported'\n")
    script = tmp_path / "script.py"
    script.write_text(f"import beside\n{SCRIPT}\nprint(beside.WORD)\n")
    command = [sys.executable, "-m", "tilewise", "run", *options, str(script), "--epochs", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:3] == ["flash_attention_2", "--epochs", "3"]
    assert ("tilewise" in done.stdout) == bool(options)
    assert "imported" in done.stdout


def test_tilewise_run_says_what_went_wrong(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(tmp_path / "missing.py")]) == 2
    assert "-m runs a module by its name" in capfd.readouterr().err
    script = tmp_path / "refused.py"
    script.write_text("import torch, tilewise\nq = torch.ones(1, 2, 3, 4)\ntilewise.attention(q, q, q, sinks=3)\n")
    try:
        assert main(["run", str(script)]) == 1
    finally:
        flash_attn.uninstall()
    assert 'refused.py", line 3' in capfd.readouterr().err
