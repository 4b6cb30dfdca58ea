"""The examples of docs/score-mods.md compute what their functions say, called by torch on all cells at once."""

import json

import pytest
import torch

import notebook
from test_site import ROOT, pictures
from tilewise import attention, varlen_attention

PAGE = ROOT / "docs/score-mods.md"
NOTEBOOK = ROOT / "examples/score_mods.ipynb"


@pytest.fixture(scope="module")
def page():
    return pictures.score_mods()


def dense(page, score_mod=None, mask_mod=None):
    q, k, v = (page[name] for name in "qkv")
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    b, h = torch.arange(2).view(2, 1, 1, 1), torch.arange(4).view(4, 1, 1)
    i, j = torch.arange(16)[:, None], torch.arange(16)
    s = q @ k.mT / q.shape[-1] ** 0.5
    s = s if score_mod is None else score_mod(s, b, h, i, j)
    visible = i >= j if mask_mod is None else mask_mod(b, h, i, j)
    return s.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num() @ v


def test_there_are_twenty(page):
    text = PAGE.read_text(encoding="utf-8")
    assert [f"\n**{n}. " in text for n in range(1, 22)] == [True] * 20 + [False]
    assert len(page["examples"]) == 20
    drawn = {title.split(".")[0] for name in pictures.PICTURES if name.startswith("mods") for title, _ in
             pictures.PICTURES[name]}  # fmt: skip
    assert drawn == {str(n) for n in range(1, 21)}


def inside(page, name):
    """The functions of an example with indices that torch takes: clamped as tilewise does."""
    options = dict(page["examples"][name])
    if name == "tree":
        ancestor = page["ancestor"]
        at = (torch.arange(16) - 8).clamp(0)
        options["mask_mod"] = lambda b, h, i, j: (
            ((i >= j) & (j < 8)) | ((i >= 8) & (j >= 8) & ancestor[at[:, None], at])
        )
    if name == "Swin":  # other windows' offsets are outside of the table, and hidden
        table = page["swin_table"]
        options["score_mod"] = lambda s, b, h, i, j: (
            s + table[h, (i // 4 - j // 4 + 1).clamp(0, 2), (i % 4 - j % 4 + 1).clamp(0, 2)]
        )
    return options


@pytest.mark.parametrize("number", range(20))
def test_results_and_gradients(page, number):
    name = list(page["examples"])[number]
    options = page["examples"][name]
    causal = "mask_mod" not in options
    got = attention(page["q"], page["k"], page["v"], causal=causal, **options)
    want = dense(page, **inside(page, name))
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
    learned = {"Swin": "swin_table", "T5": "t5_table", "forgetting": "decay"}.get(name)
    if learned:
        dout = torch.randn(want.shape, generator=torch.Generator().manual_seed(0))
        grads = [torch.autograd.grad(x, page[learned], dout, retain_graph=True)[0] for x in (got, want)]
        torch.testing.assert_close(*grads, atol=2e-5, rtol=1e-4)
        assert grads[0].abs().max() > 0.01


def test_packed_sequences_count_from_their_start(page):
    rows = [page[name].transpose(1, 2).flatten(0, 1) for name in "qkv"]
    ends = torch.tensor([0, 16, 32], dtype=torch.int32)
    with torch.no_grad():
        for name, options in page["examples"].items():
            got = varlen_attention(*rows, ends, ends, causal=True, **options)
            want = attention(page["q"], page["k"], page["v"], causal=True, **options)
            torch.testing.assert_close(got.unflatten(0, (2, 16)).transpose(1, 2), want, atol=1e-5, rtol=1e-5, msg=name)


def test_the_notebook_is_the_page():
    """`python tools/notebook.py examples/score_mods.ipynb --page docs/score-mods.md` makes it."""
    kept = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert kept == notebook.of_page(PAGE, NOTEBOOK)
