"""tilewise under flash-attn's names: what can be imported, what it does, and that all of it can be undone."""

import importlib
import importlib.util
import sys

import pytest
import torch

from test_compat_flash_attn import offsets, peaked, turn
from tilewise import InvalidArgument
from tilewise.compat import bert_padding, flash_attn, flash_attn_3, rotary
from tilewise.testing.check import judge, largest_error

NAMES = (
    "flash_attn",
    "flash_attn.flash_attn_interface",
    "flash_attn.bert_padding",
    "flash_attn.layers",
    "flash_attn.layers.rotary",
    "flash_attn_interface",
)


@pytest.fixture
def _installed():
    flash_attn.install()
    yield
    flash_attn.uninstall()


@pytest.mark.usefixtures("_installed")
def test_flash_attn_can_be_imported():
    for name in NAMES:
        assert importlib.util.find_spec(name) is not None  # as transformers asks
        importlib.import_module(name)
    from flash_attn import __version__, flash_attn_func, flash_attn_varlen_qkvpacked_func, flash_attn_with_kvcache
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
    from flash_attn.flash_attn_interface import flash_attn_varlen_func
    from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
    from flash_attn_interface import flash_attn_func as third
    from flash_attn_interface import get_scheduler_metadata

    assert flash_attn_func is flash_attn.flash_attn_func
    assert flash_attn_varlen_func is flash_attn.flash_attn_varlen_func
    assert flash_attn_varlen_qkvpacked_func is flash_attn.flash_attn_varlen_qkvpacked_func
    assert flash_attn_with_kvcache is flash_attn.flash_attn_with_kvcache
    assert third is flash_attn_3.flash_attn_func
    assert get_scheduler_metadata() is None
    assert (pad_input, unpad_input, index_first_axis) == (
        bert_padding.pad_input, bert_padding.unpad_input, bert_padding.index_first_axis,
    )  # fmt: skip
    assert (apply_rotary_emb, RotaryEmbedding) == (rotary.apply_rotary_emb, rotary.RotaryEmbedding)
    assert tuple(map(int, __version__.split("+")[0].split("."))) >= (2, 8)
    flash_attn.install()  # again: nothing happens
    assert sys.modules["flash_attn"].flash_attn_func is flash_attn_func


@pytest.mark.parametrize(
    ("code", "missing"),
    [
        ("import flash_attn.modules.mha", "flash_attn.modules"),
        ("from flash_attn.ops.triton.rotary import apply_rotary", "flash_attn.ops"),
        ("from flash_attn.losses.cross_entropy import CrossEntropyLoss", "flash_attn.losses"),
        ("from flash_attn import _flash_attn_forward", "flash_attn._flash_attn_forward"),
        (
            "from flash_attn.flash_attn_interface import _flash_attn_forward",
            "flash_attn.flash_attn_interface._flash_attn_forward",
        ),
        ("from flash_attn.layers import patch_embed", "flash_attn.layers.patch_embed"),
        ("from flash_attn_interface import _flash_attn_forward", "flash_attn_interface._flash_attn_forward"),
    ],
)
@pytest.mark.usefixtures("_installed")
def test_what_is_not_there_is_told_by_tilewise(code, missing):
    with pytest.raises(ModuleNotFoundError) as caught:
        exec(code, {})
    text = str(caught.value)
    assert text.startswith(f"{missing} is not there: tilewise is installed as flash_attn")
    assert all(name in text for name in NAMES)


@pytest.mark.usefixtures("_installed")
def test_whoever_only_asks_is_told_no():
    import flash_attn as installed

    assert importlib.util.find_spec("flash_attn.modules") is None
    assert not hasattr(installed, "_flash_attn_forward")
    with pytest.raises(ModuleNotFoundError, match="No module named 'nothing_of_this_name'"):
        importlib.import_module("nothing_of_this_name")
    flash_attn.uninstall()
    with pytest.raises(ModuleNotFoundError, match="No module named 'flash_attn'"):
        importlib.import_module("flash_attn.modules")


def test_it_is_undone():
    flash_attn.install()
    flash_attn.uninstall()
    assert not set(NAMES) & set(sys.modules)
    for name in ("flash_attn", "flash_attn_interface"):
        with pytest.raises(ImportError):
            importlib.import_module(name)
    flash_attn.uninstall()  # again: nothing happens


@pytest.mark.parametrize("imported", [False, True])
def test_a_flash_attn_that_is_installed_is_not_replaced_unasked(tmp_path, monkeypatch, imported):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("from flash_attn import other\nflash_attn_func = 'theirs'\n")
    (tmp_path / "flash_attn" / "other.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    if imported:
        importlib.import_module("flash_attn")
    try:
        with pytest.raises(InvalidArgument, match="replace: got False, and flash-attn is installed"):
            flash_attn.install()
        flash_attn.install(replace=True)
        assert importlib.import_module("flash_attn").flash_attn_func is flash_attn.flash_attn_func
        with pytest.raises(ImportError):
            importlib.import_module("flash_attn.other")
        flash_attn.uninstall()
        assert importlib.import_module("flash_attn").flash_attn_func == "theirs"
        assert importlib.import_module("flash_attn.other")
    finally:
        flash_attn.uninstall()
        for name in ("flash_attn", "flash_attn.other"):
            sys.modules.pop(name, None)


def test_padding_and_back():
    x = peaked(3, 5, 2, 4)
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    tokens, indices, cu, longest, used = bert_padding.unpad_input(x, mask)
    assert tokens.equal(x[mask.bool()])
    assert indices.tolist() == [0, 1, 6, 7, 8, 9]
    assert (cu.tolist(), cu.dtype, longest, used.tolist()) == ([0, 2, 6, 6], torch.int32, 4, [2, 4, 0])
    assert bert_padding.pad_input(tokens, indices, 3, 5).equal(x * mask[..., None, None])
    unused = torch.zeros_like(mask)
    unused[0, 4] = unused[2, 1] = 1
    tokens, indices, cu, longest, used = bert_padding.unpad_input(x, mask.bool(), unused)
    assert indices.tolist() == [0, 1, 4, 6, 7, 8, 9, 11]
    assert (cu.tolist(), longest, used.tolist()) == ([0, 3, 7, 8], 4, [2, 4, 0])
    with pytest.raises(InvalidArgument, match="attention_mask"):
        bert_padding.unpad_input(x, mask[:2])


def test_padding_of_rows_with_several_sequences():
    x = peaked(3, 6, 4)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    tokens, indices, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert cu.tolist() == [0, 2, 5, 8, 10, 16]
    assert longest == 6
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, *range(12, 18)]
    assert tokens.equal(x.flatten(0, 1)[indices])


def test_gradients_go_through_padding():
    x = peaked(2, 3, 4).requires_grad_()
    tokens, indices, *_ = bert_padding.unpad_input(x, torch.tensor([[1, 1, 0], [0, 1, 1]]))
    (bert_padding.pad_input(tokens, indices, 2, 3) * 3).sum().backward()
    assert x.grad[..., 0].tolist() == [[3, 3, 0], [0, 3, 3]]


def turned(x, cos, sin, starts, interleaved):
    """`[B, L, H, D]`, token by token, by complex numbers."""
    return torch.stack(
        [
            torch.stack([turn(token, cos, sin, start + i, interleaved) for i, token in enumerate(row)])
            for row, start in zip(x, starts, strict=True)
        ]
    )


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("starts", [0, 3, torch.tensor([5, 2])], ids=str)
def test_rotary(interleaved, starts):
    angles = torch.rand(12, 4) * 6
    cos, sin = angles.cos(), angles.sin()
    x = peaked(2, 5, 3, 16)
    each = starts.tolist() if isinstance(starts, torch.Tensor) else [starts] * 2
    exact = turned(x.double(), cos, sin, each, interleaved)
    allowed = 2 * largest_error(turned(x, cos, sin, each, interleaved), exact)
    options = {"interleaved": interleaved, "seqlen_offsets": starts}
    got = rotary.apply_rotary_emb(x, cos, sin, **options)
    judge("out", got, exact, allowed, torch.float32)
    packed = rotary.apply_rotary_emb(x.flatten(0, 1)[:8], cos, sin, **options, cu_seqlens=offsets((5, 3)), max_seqlen=5)
    assert packed.equal(got.flatten(0, 1)[:8])
    mine = x.clone()
    assert rotary.apply_rotary_emb(mine, cos, sin, inplace=True, **options) is mine
    assert mine.equal(got)
    qkv = torch.stack((x, x, x), 2)
    rotary.apply_rotary_emb_qkv_(qkv, cos, sin, **options)
    assert qkv.equal(torch.stack((got, got, x), 2))
    grouped = torch.cat((x, x[:, :, :1], x[:, :, :1]), 2)
    rotary.apply_rotary_emb_qkv_(grouped, cos, sin, num_heads_q=3, **options)
    assert grouped.equal(torch.cat((got, got[:, :, :1], x[:, :, :1]), 2))
    kv = torch.stack((x, x), 2)
    rotary.apply_rotary_emb_kv_(kv, cos, sin, **options)
    assert kv.equal(torch.stack((got, x), 2))


def test_rotary_refusals():
    x, cos = peaked(2, 5, 3, 16), torch.rand(6, 8)
    with pytest.raises(InvalidArgument, match="tokens at 2 to 6"):
        rotary.apply_rotary_emb(x, cos, cos, seqlen_offsets=2)
    with pytest.raises(InvalidArgument, match="tokens at -1 to"):
        rotary.apply_rotary_emb(x, cos, cos, seqlen_offsets=torch.tensor([-1, 0]))
    with pytest.raises(InvalidArgument, match="x: got shape"):
        rotary.apply_rotary_emb(x, cos, cos, cu_seqlens=offsets((5, 5)))
    with pytest.raises(InvalidArgument, match="num_heads_q=None"):
        rotary.apply_rotary_emb_qkv_(x, cos, cos)
    with pytest.raises(InvalidArgument, match="kv: got shape"):
        rotary.apply_rotary_emb_kv_(x, cos, cos)
    with pytest.raises(InvalidArgument, match="max_seqlen"):
        rotary.RotaryEmbedding(16)(torch.stack((x, x, x), 2), seqlen_offset=torch.tensor([1, 2]))


@pytest.mark.parametrize("scale_base", [None, 8.0])
def test_rotary_module(scale_base):
    """Angles of `position * base ** (-2 r / dim)`; with xPos, scores still fall with distance alone."""
    module = rotary.RotaryEmbedding(8, base=100.0, scale_base=scale_base)
    x = peaked(1, 6, 3, 16)
    q, kv = module(x.clone(), torch.stack((x, x), 2))
    k = kv[:, :, 0]
    assert kv[:, :, 1].equal(x)
    angles = torch.outer(torch.arange(6.0), 100.0 ** -(torch.arange(0, 8, 2) / 8))
    want = turned(x.double(), angles.double().cos(), angles.double().sin(), [0], False)
    if scale_base is None:
        assert torch.allclose(q.double(), want, atol=1e-5)
        assert torch.allclose(k.double(), want, atol=1e-5)
    same = x[:, :1].expand_as(x)
    q, kv = module(same.clone(), torch.stack((same, same), 2))
    scores = torch.einsum("blhd,bmhd->bhlm", q, kv[:, :, 0])
    for step in range(6):
        line = scores.diagonal(-step, -2, -1)
        assert torch.allclose(line, line[..., :1].expand_as(line), atol=1e-3, rtol=1e-4)
    later = module(torch.stack((x, x, x), 2)[:, :2], seqlen_offset=3)
    if scale_base is None:
        angles = torch.outer(torch.arange(9.0), 100.0 ** -(torch.arange(0, 8, 2) / 8)).double()
        want = turned(x[:, :2].double(), angles.cos(), angles.sin(), [3], False)
        assert torch.allclose(later[:, :, 0].double(), want, atol=1e-5)
