"""torch's flex_attention: results, gradients, block masks of both, and code that imported torch's."""

import gc
import sys
import types

import pytest
import torch
from torch.nn.attention import flex_attention as theirs
from torch.nn.attention.flex_attention import BlockMask

import tilewise
from tilewise import InvalidArgument
from tilewise.compat import block_mask as masks
from tilewise.compat import flex_attention as flex

if not hasattr(theirs, "AuxRequest"):
    pytest.skip("torch's function of 2.9 and newer is the one to compare with", allow_module_level=True)
AuxRequest = theirs.AuxRequest
H, L, D = 4, 100, 16
random = torch.Generator().manual_seed(0)
DOC = torch.arange(512) // 27
MIXED_UP = torch.randperm(512, generator=random)
LISTS = [f"{full}{side}_{what}" for full in ("", "full_") for side in ("kv", "q") for what in ("num_blocks", "indices")]


def draw(*shape):
    return torch.randn(shape, generator=random) * 2


def causal(b, h, q, k):
    return q >= k


def documents(b, h, q, k):
    return (q >= k) & (DOC[q] == DOC[k])


def scattered(b, h, q, k):
    return (MIXED_UP[q] + MIXED_UP[k] * h) % 3 > b


def nothing(b, h, q, k):
    return q < 0


MASKS = {
    "causal": causal,
    "documents": documents,
    "scattered": scattered,
    "noop": theirs.noop_mask,
    "nothing": nothing,
    "and": theirs.and_masks(causal, lambda b, h, q, k: q - k < 30),
    "or": theirs.or_masks(documents, lambda b, h, q, k: k < 30),
}


def cells(mask_mod, rows, heads, lengths=(L, L)):
    return theirs.create_mask(mask_mod, rows, heads, *lengths, device="cpu")


def dense(q, k, v, visible=None, scale=None, score_mod=None):
    """Output and lse by plain torch."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if score_mod is not None:
        b, h = torch.arange(len(q)).view(-1, 1, 1, 1), torch.arange(q.shape[1]).view(-1, 1, 1)
        s = score_mod(s, b, h, torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2]))
    if visible is not None:
        s = s.masked_fill(~visible, -torch.inf)
    weights = s.softmax(-1).nan_to_num()
    return weights @ v, s.logsumexp(-1)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("rows", "heads"), [(None, None), (2, 3)])
@pytest.mark.parametrize(("tile", "lengths", "separate"), [(32, (100, 100), True), ((64, 16), (128, 70), False)])
def test_block_masks_are_torchs(name, rows, heads, tile, lengths, separate):
    arguments = (MASKS[name], rows, heads, *lengths, "cpu", tile)
    ours, want = (f(*arguments, separate_full_blocks=separate) for f in (flex.create_block_mask,
                                                                       theirs.create_block_mask))  # fmt: skip
    for which in LISTS:
        got, expected = getattr(ours, which), getattr(want, which)
        assert (got is None) == (expected is None), which
        if got is not None:
            assert got.dtype == expected.dtype
            assert torch.equal(got, expected), which
    assert isinstance(ours, BlockMask)
    assert (repr(ours), str(ours), ours.shape) == (repr(want), str(want), want.shape)
    assert ours.sparsity() == want.sparsity()
    assert torch.equal(ours[0, 0].to_dense(), want[0, 0].to_dense())
    assert torch.equal(ours.to("cpu").to_dense(), want.to_dense())


def test_long_masks_are_made_without_their_cells():
    mask = flex.create_block_mask(MASKS["causal"], None, None, 1 << 16, 1 << 16, "cpu", 1 << 9)
    n = (1 << 16) // (1 << 9)
    assert int(mask.full_kv_num_blocks.sum()) == n * (n - 1) // 2
    assert int(mask.kv_num_blocks.sum()) == n


@pytest.mark.parametrize("name", MASKS)
def test_results_are_torchs(name):
    q, k, v = draw(2, H, L, D), draw(2, 2, L, D), draw(2, 2, L, 24)
    out, lse = dense(q, k, v, cells(MASKS[name], 2, H), scale=0.3)
    for make in (theirs.create_block_mask, flex.create_block_mask):
        mask = make(MASKS[name], 2, H, L, L, "cpu", 32)
        for _ in range(2):  # what is known of a mask is kept
            got = flex.flex_attention(q, k, v, None, mask, 0.3, True, return_aux=AuxRequest(lse=True))
            torch.testing.assert_close(got[0], out)
            torch.testing.assert_close(got[1].lse, lse)
    assert got[1].max_scores is None
    both = flex.flex_attention(q, k, v, None, mask, 0.3, True, return_aux=AuxRequest(lse=True, max_scores=True))[1]
    scores = (q @ k.repeat_interleave(H // 2, 1).mT * 0.3).masked_fill(~cells(MASKS[name], 2, H), -torch.inf)
    torch.testing.assert_close(both.max_scores, scores.amax(-1))
    torch.testing.assert_close(both.lse, lse)


@pytest.mark.filterwarnings("ignore:.*unfused:UserWarning", "ignore:return_lse:FutureWarning")
def test_against_torchs_function_with_a_score_mod():
    table = draw(H, 3 * L)

    def score_mod(s, b, h, q, k):
        return 20 * torch.tanh(s / 20) + table[h, q - k + L]

    q, k, v = draw(2, H, 7, D), draw(1, H, L, D).expand(2, -1, -1, -1), draw(2, H, L, D)
    mask = flex.create_block_mask(documents, None, None, 7, L, "cpu")
    want = theirs.flex_attention(q, k, v, score_mod, mask, return_lse=True)
    for got, expected in zip(flex.flex_attention(q, k, v, score_mod, mask, return_lse=True), want, strict=True):
        torch.testing.assert_close(got, expected)
    x = q.double(), k.double(), v.double()
    assert torch.equal(flex.flex_attention(*x, score_mod), theirs.flex_attention(*x, score_mod))


def test_keys_of_one_batch_row_are_those_of_all():
    q, k, v = draw(3, H, L, D), draw(1, H, L, D), draw(1, H, L, D)
    mask = flex.create_block_mask(causal, None, None, L, L, "cpu")
    got = flex.flex_attention(q, k, v, block_mask=mask)
    torch.testing.assert_close(got, dense(q, k, v, cells(causal, 1, 1))[0])


def blocks_of(which):
    return which.sum(-1).int(), which.int().argsort(dim=-1, descending=True, stable=True).int()


@pytest.mark.parametrize("mask_mod", [None, causal, scattered], ids=["none", "causal", "scattered"])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("rows", "heads", "tile"), [(1, 1, (32, 16)), (2, H, (16, 48))])
def test_blocks_that_no_function_makes(mask_mod, full, rows, heads, tile):
    """What is listed decides, whatever a mask_mod would say of other blocks."""
    partial = torch.rand(rows, heads, 4, 5, generator=random) < 0.5
    whole = (torch.rand(partial.shape, generator=random) < 0.4) & ~partial & full
    lists = (*blocks_of(partial), *(blocks_of(whole) if full else (None, None)))
    for x in lists[1::2]:
        if x is not None:  # what is past a count may be anything
            x[torch.arange(5) >= lists[0 if x is lists[1] else 2][..., None]] = 77
    mask = BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=tile, mask_mod=mask_mod, seq_lengths=(4 * tile[0] - 3, 5 * tile[1]), compute_q_blocks=False
    )
    lengths = mask.seq_lengths

    def spread(x):
        return x.repeat_interleave(tile[0], 2).repeat_interleave(tile[1], 3)[:, :, : lengths[0]]

    q, k, v = draw(2, H, lengths[0], D), draw(2, H, lengths[1], D), draw(2, H, lengths[1], D)
    visible = spread(partial) & (True if mask_mod is None else cells(mask_mod, 2, H, lengths)) | spread(whole)
    torch.testing.assert_close(flex.flex_attention(q, k, v, block_mask=mask), dense(q, k, v, visible)[0])


def test_a_mask_that_was_changed_is_read_anew():
    q, k, v = (draw(1, H, 64, D) for _ in range(3))
    bias, starts = torch.arange(64) % 8 == 3, torch.tensor(5)  # no block is full, whatever is written
    for make in (theirs.create_block_mask, flex.create_block_mask):
        mask = make(lambda b, h, q, k: (q >= k) & ~bias[k] & (k >= starts), None, None, 64, 64, "cpu", 16)

        def check(mask, want):
            got = flex.flex_attention(q, k, v, block_mask=mask)
            torch.testing.assert_close(got, dense(q, k, v, want)[0])

        visible = cells(causal, 1, 1, (64, 64)) & (torch.arange(64) >= 5) & ~bias
        check(mask, visible)
        bias[20] = True  # the function captures it
        check(mask, visible & ~bias)
        bias[20] = False
        other = mask._adjust(64, 64)
        check(other, visible)
        other.kv_num_blocks[0, 0, 2] = 0  # nothing for rows 32 to 47
        rows = (torch.arange(64) // 16 != 2)[:, None]
        check(other, visible & rows)
        other.mask_mod = causal
        check(other, cells(causal, 1, 1, (64, 64)) & rows)


def test_a_slice_of_a_mask_decodes():
    """As models write it: the block row of the next token, and the whole mask's function from there on."""
    q, k, v = draw(1, H, 1, D), draw(1, H, 96, D), draw(1, H, 96, D)
    at = torch.tensor(53)
    for make in (theirs.create_block_mask, flex.create_block_mask):
        whole = make(documents, None, None, 96, 96, "cpu", 32)
        row = whole[:, :, 53 // 32]
        row.seq_lengths = (1, 96)
        if row.mask_mod is not theirs.noop_mask:  # of older torch, which does not mark slices
            with pytest.raises(InvalidArgument, match="block_mask: got a slice without a mask_mod"):
                flex.flex_attention(q, k, v, block_mask=row)
        row.mask_mod = lambda b, h, q, k: documents(b, h, q + at, k)
        for step in (53, 54):
            at.fill_(step)
            want = dense(q, k, v, cells(documents, 1, 1, (96, 96))[:, :, step : step + 1])[0]
            torch.testing.assert_close(flex.flex_attention(q, k, v, block_mask=row), want)
        at.fill_(53)


def test_gradients():
    q, k, v = (draw(2, n, L, D).requires_grad_() for n in (H, 2, 2))
    table = draw(H, 2 * L).requires_grad_()
    mask = flex.create_block_mask(documents, None, None, L, L, "cpu", 32)

    def score_mod(s, b, h, q, k):
        return s + table[h, q - k + L]

    out, lse = flex.flex_attention(q, k, v, score_mod, mask, enable_gqa=True, return_lse=True)
    want = dense(q, k, v, cells(documents, 1, 1), score_mod=score_mod)
    dout, dlse = draw(*out.shape), draw(*lse.shape)
    inputs = q, k, v, table
    for a, b in zip(
        torch.autograd.grad((out, lse), inputs, (dout, dlse)), torch.autograd.grad(want, inputs, (dout, dlse)),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_autocast_casts_as_torch_does():
    q, k, v = (draw(1, H, L, D) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        out = flex.flex_attention(q, k, v)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, flex.flex_attention(*(x.bfloat16() for x in (q, k, v))))


def test_under_compile():
    q, k, v = (draw(1, H, L, D) for _ in range(3))
    bias = draw(L)

    def model(q, k, v):
        mask = flex.create_block_mask(causal, None, None, L, L, "cpu")
        return flex.flex_attention(q * 2, k, v, lambda s, b, h, q, k: s + bias[k], mask) + 1

    want = model(q, k, v)
    assert torch.equal(torch.compile(model, backend="eager")(q, k, v), want)
    mask = torch.compile(flex.create_block_mask, backend="eager")(causal, None, None, L, L, "cpu")
    compiled = torch.compile(flex.flex_attention, backend="eager")
    got = compiled(q * 2, k, v, score_mod=lambda s, b, h, q, k: s + bias[k], block_mask=mask) + 1
    assert torch.equal(got, want)
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"tilewise traces (score_mod and )?mask_mod itself"):
        torch.compile(model, backend="eager", fullgraph=True)(q, k, v)


q, short = torch.zeros(1, H, L, D), torch.zeros(1, H, 7, D)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"return_aux": AuxRequest(lse=True), "return_lse": True}, "return_lse: got both"),
        ({"key": q[:, :2], "value": q[:, :2]}, "key: got 2 heads, expected query's 4; enable_gqa"),
        ({"key": q.expand(2, -1, -1, -1)}, "key: got 2 batch rows, expected query's 1, or 1"),
        ({"query": q[0]}, "query: got rank 3"),
        ({"query": torch.nested.nested_tensor([q[0, 0]], layout=torch.jagged)}, "query: got a nested tensor"),
        ({"block_mask": causal}, "block_mask: got a function"),
        ({"query": short}, "block_mask: got a mask of 100 queries and 100 keys, expected 7 and 100"),
        ({"block_mask": flex.create_block_mask(causal, 2, None, L, L, "cpu")[:]}, "block_mask: got a slice"),
        ({"block_mask": theirs.create_block_mask(scattered, 2, 3, L, L, "cpu")},
         "block_mask: got a mask for 2 batch rows and 3 heads, expected 1 and 4"),
        ({"kernel_options": 3}, "kernel_options: got int"),
        ({"score_mod": lambda s, b, h, q, k: torch.special.i0(s)}, r"score_mod: got torch.i0 at .*test_compat_flex"),
        ({"scale": "x"}, "scale: got"),
    ],
)  # fmt: skip
def test_refusals(changes, message):
    mask = flex.create_block_mask(causal, None, None, L, L, "cpu")
    with pytest.raises(InvalidArgument, match=f"^{message}") as caught:
        flex.flex_attention(**({"query": q, "key": q, "value": q, "block_mask": mask} | changes))
    assert caught.value.argument in (*changes, "block_mask", "key")
    with pytest.raises(InvalidArgument, match="compute_dq_write_order"):
        flex.create_block_mask(causal, None, None, L, L, "cpu", compute_dq_write_order=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, None, None, L, L), "mask_mod: got None"),
        ((causal, None, None, -1, L), "Q_LEN: got -1"),
        ((causal, None, None, L, 2.5), "KV_LEN: got 2.5"),
        ((causal, -2, None, L, L), "B: got -2"),
        ((causal, None, None, L, L, "cpu", 0), r"BLOCK_SIZE: got \(0, 0\)"),
    ],
)
def test_refusals_of_masks(arguments, message):
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        flex.create_block_mask(*arguments, **({} if len(arguments) > 5 else {"device": "cpu"}))


def test_masks_are_forgotten_with_their_callers():
    gc.collect()
    before = len(masks._known)
    mask = theirs.create_block_mask(documents, None, None, L, L, "cpu")
    flex.flex_attention(q, q, q, block_mask=mask)
    assert len(masks._known) == before + 1
    del mask
    assert len(masks._known) == before


def test_code_that_imported_torchs(monkeypatch):
    module = types.ModuleType("a_flex_model")
    module.attend, module.masked = theirs.flex_attention, theirs.create_block_mask
    monkeypatch.setitem(sys.modules, "a_flex_model", module)
    torchs = module.attend, module.masked
    with flex.installed():
        assert (module.attend, module.masked) == (flex.flex_attention, flex.create_block_mask)
        assert theirs.flex_attention is flex.flex_attention
        before = sum(tilewise.counters().values())
        module.attend(q, q, q, block_mask=module.masked(causal, None, None, L, L, "cpu"))
        assert sum(tilewise.counters().values()) == before + 1
    assert (module.attend, module.masked) == torchs == (theirs.flex_attention, theirs.create_block_mask)
    flex.install()
    flex.install(fallback=True)
    assert module.attend is theirs.flex_attention is not torchs[0]
    flex.uninstall()
    assert (module.attend, module.masked) == torchs


@pytest.mark.filterwarnings("ignore:.*unfused:UserWarning")
def test_torch_serves_what_tilewise_cannot():
    flex.fallbacks.clear()
    x = draw(1, H, 9, D)

    def odd(s, b, h, q, k):
        return s + torch.special.i0(s * 0)

    with flex.installed(fallback=True):
        with pytest.warns(UserWarning, match=r"falling back to torch .*torch\.i0"):
            out = theirs.flex_attention(x, x, x, odd)
        mask = theirs.create_block_mask(lambda b, h, q, k: torch.special.i0(q * 0.1) > 0, None, None, 9, 9, "cpu")
    torch.testing.assert_close(out, dense(x, x, x, score_mod=lambda s, *_: s + 1)[0])
    assert mask.sparsity() < 0
    assert dict(flex.fallbacks) == {"score_mod": 1, "mask_mod": 1}
    flex.fallbacks.clear()


@pytest.mark.parametrize("name", ["llama", "gemma2", "llama4"])
def test_transformers_flex_attention(name):
    """`attn_implementation="flex_attention"` on a CPU: training, with padding, and generation."""
    hf_models = pytest.importorskip("hf_models")
    torch.manual_seed(0)
    model = hf_models.DECODERS[name]()
    ids = torch.randint(3, hf_models.VOCABULARY, (2, 20))
    tokens = torch.ones_like(ids)
    tokens[0, :5] = 0
    labels = torch.where(tokens == 1, ids, -100)
    labels[0, 5] = -100  # the last row of padding would predict it
    found = []
    with flex.installed():
        for implementation in ("eager", "flex_attention"):
            model.set_attn_implementation(implementation)
            model.train().zero_grad()
            before = sum(tilewise.counters().values())
            loss = model(ids, attention_mask=tokens, labels=labels).loss
            loss.backward()
            assert (sum(tilewise.counters().values()) > before) == (implementation == "flex_attention")
            found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
            with torch.no_grad():
                ended = model.eval().generate(ids, attention_mask=tokens, max_new_tokens=4, do_sample=False)
            found[-1].append(ended)
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)
