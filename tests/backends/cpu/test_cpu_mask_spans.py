"""Rows of a dense mask that leave one run of keys: computed as a window is, and right whatever else is in a mask."""

import pytest
import torch

from tilewise import TileMap, attention
from tilewise.core.options import Options
from tilewise.testing.check import check_call
from tilewise.validation import calls

INF = torch.inf
L = 203


def drawn(*shape, seed=0, dtype=torch.float32):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def inputs(dtype=torch.float32, heads=4):
    return drawn(2, heads, L, 40, dtype=dtype), *(drawn(2, 2, L, 40, seed=n, dtype=dtype) for n in (1, 2))


def near(left=37, right=0):
    away = torch.arange(L)[:, None] - torch.arange(L)
    return (away <= left) & (away >= -right)


def added(mask, dtype=torch.float32):
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -INF)


def judged(mask, **options):
    """Against the oracle, in float32; and the same bits with a tile map."""
    q, k, v = inputs()
    call = calls.dense(q, k, v, Options(mask=mask, return_lse=True, **options))
    out, lse = attention(q, k, v, mask=mask, return_lse=True, backend="cpu", **options)
    check_call(call, out, lse)
    again = attention(q, k, v, mask=mask, tile_map=TileMap.from_mask(mask, (16, 32)), backend="cpu", **options)
    assert again.equal(out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(L, L), (1, L, L), (4, L, L), (2, 1, L, L), (2, 4, L, L)], ids=str)
def test_a_window_as_a_mask_has_its_bits(shape, dtype):
    """Also where each head and row has its own copy."""
    q, k, v = inputs(dtype)
    wanted = attention(q, k, v, causal=True, window=38, backend="cpu")
    assert attention(q, k, v, mask=near().expand(shape).contiguous(), backend="cpu").equal(wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_additive(dtype):
    assert judged(added(near(20, 30), dtype)).equal(judged(added(near(20, 30), torch.float32)))


def test_heads_of_their_own():
    masks = torch.stack([near(left, 3 * left) for left in (0, 5, 50, 300)])
    judged(masks)
    judged(added(masks))


SHAPES, CELLS = ("holes", "unseen rows", "one cell", "every other"), ("bias", "minus zero", "nan")


@pytest.mark.parametrize(
    ("edit", "kind"), [(edit, kind) for kind in ("bool", "added") for edit in (*SHAPES, *CELLS * (kind == "added"))]
)
def test_other_rows(edit, kind):
    """Rows that are not one run, or that add something, among those that are."""
    mask = near(60, 20)
    if edit == "holes":
        mask[::3, 50:60] = False
    elif edit == "unseen rows":
        mask[40:120] = False
    elif edit == "one cell":
        mask = torch.eye(L, dtype=torch.bool)
    elif edit == "every other":
        mask[:, ::2] = False
    if kind == "bool":
        judged(mask)
        return
    mask = added(mask)
    if edit == "bias":
        mask[100, 90] = 2.5
    elif edit == "minus zero":
        mask = torch.where(mask == 0, -0.0, mask)
    elif edit == "nan":
        q, k, v = inputs()
        clean = attention(q, k, v, mask=mask, backend="cpu")
        mask[100, 101] = torch.nan
        out = attention(q, k, v, mask=mask, backend="cpu")
        assert out[:, :, 100].isnan().all()
        rest = torch.arange(L) != 100
        torch.testing.assert_close(out[:, :, rest], clean[:, :, rest])
        return
    judged(mask)


def test_with_rules():
    """What a rule hides is not looked at, and does not matter."""
    q, k, v = inputs()
    mask = added(near(40, 40))
    wanted = judged(mask, causal=True, window=(30, 5))
    mask[near(30, 0).logical_not()] = torch.nan
    assert attention(q, k, v, mask=mask, causal=True, window=(30, 5), backend="cpu").equal(wanted)


def test_true_may_be_any_byte():
    mask = near()
    bytes_ = mask.to(torch.uint8) * torch.randint(1, 256, (L, L), dtype=torch.uint8)
    q, k, v = inputs()
    wanted = attention(q, k, v, mask=mask, backend="cpu")
    assert attention(q, k, v, mask=bytes_.view(torch.bool), backend="cpu").equal(wanted)


def test_split_keys_and_lengths():
    judged(near(150, 9), split_size=64)
    q, k, v = inputs()
    lengths = torch.tensor([L, 90], dtype=torch.int32)
    mask = added(near(80, 30))
    out = attention(q, k, v, mask=mask, kv_lengths=lengths, q_offset=0, backend="cpu")
    mask[:, 90:] = torch.where(torch.arange(L)[:, None] % 2 == 0, torch.nan, -INF)  # past the second row's keys
    again = attention(q, k, v, mask=mask, kv_lengths=lengths, q_offset=0, backend="cpu")
    assert again[1].equal(out[1])


def test_values_under_the_mask_do_not_matter():
    q, k, v = inputs()
    mask = near(30, 0)
    mask[:, 100] = False
    wanted = attention(q, k, v, mask=mask, backend="cpu")
    v[:, :, 100], k[:, :, 100] = torch.nan, torch.inf
    assert attention(q, k, v, mask=mask, backend="cpu").equal(wanted)
