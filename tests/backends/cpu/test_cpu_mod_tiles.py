"""What functions of the user hide, on the CPU: tiles that are skipped, and spans of rows that need no mask."""

import pytest
import torch

from tilewise import attention, attention_backward, varlen_attention
from tilewise.backends.cpu import mods as functions
from tilewise.core import mod_spans
from tilewise.core.expression.mods import bind
from tilewise.core.expression.spans import split

H, D = 4, 24
random = torch.Generator().manual_seed(0)
TABLE = torch.randn(H, 800, generator=random)


def draw(*shape, dtype=torch.float32):
    return (torch.randn(shape, generator=random) * 2).to(dtype)


def relative(s, b, h, q, k):
    return 20 * torch.tanh(s / 20) + TABLE[h, q - k + 350]


def both(q, k, v, dout, **options):
    out, lse = attention(q, k, v, return_lse=True, **options)
    return (out, lse, *attention_backward(q, k, v, out, lse, dout, **options)[:3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiles_that_are_skipped_change_no_bit(dtype, monkeypatch):
    monkeypatch.setattr(functions, "WORTH_STATES", 0.0)
    monkeypatch.setattr(functions, "WORTH_SPANS", 1e9)
    documents = torch.arange(500) // 190
    masks = {
        "documents": lambda b, h, q, k: (documents[q] == documents[k]) & (q >= k),
        "by head": lambda b, h, q, k: torch.where(h % 2 == 0, q - k < 100, (q // 64 + k // 128) % 3 != 0),
    }
    dout = {q_len: draw(1, H, q_len, D, dtype=dtype) for q_len in (500, 130, 5)}
    for mask in masks.values():
        for q_len, score in ((500, None), (130, relative), (5, None)):
            q, k, v = (draw(1, n, m, D, dtype=dtype) for n, m in ((H, q_len), (2, 500), (2, 500)))
            found = []
            for put in (functions.put_mod_states, lambda *_: None):
                monkeypatch.setattr(functions, "put_mod_states", put)
                options = {"mask_mod": mask, "score_mod": score, "backend": "cpu"}
                found.append(both(q, k, v, dout[q_len], **options))
            assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_states_that_no_tensor_changes_are_computed_once(monkeypatch):
    computed = []
    states = functions.mod_states
    monkeypatch.setattr(functions, "mod_states", lambda *args: computed.append(states(*args)) or computed[-1])
    q, k, v = (draw(1, H, 1000, D) for _ in range(3))
    for _ in range(3):
        attention(q, k, v, mask_mod=lambda b, h, q, k: (q >= k) | (k < 37), backend="cpu")
    assert len(computed) == 1
    assert (computed[0] == 0).any()


# Spans

DOCUMENTS = torch.tensor([0] * 170 + [1] * 41 + [2] * 300 + [5] * 389)
FALLING = -DOCUMENTS
MIXED = (torch.arange(900) * 7) % 5
LIMITS = torch.tensor([[300, 0, 500], [900, 20, 400]])
MASKS = {
    "documents": (lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k], True),
    "documents, causal": (lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k]) & (q >= k), True),
    "falling": (lambda b, h, q, k: (FALLING[k] == FALLING[q]) & (FALLING[q] <= FALLING[k + 30]), True),
    "falling, not": (lambda b, h, q, k: (FALLING[k] < FALLING[q]) | (k < 0), False),
    "later": (lambda b, h, q, k: (DOCUMENTS[k] >= DOCUMENTS[q]) & (FALLING[k] < FALLING[q - 100]), True),
    "by sequence": (lambda b, h, q, k: (k >= LIMITS[b, 1]) & (k < LIMITS[b, 0]) & (k * 2 > q), True),
    "in no order": (lambda b, h, q, k: (MIXED[q] == MIXED[k]) & (DOCUMENTS[q] == DOCUMENTS[k]), False),
    "by head": (lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k]) & ((k + h) % 3 > 0), False),
    "nothing": (lambda b, h, q, k: (DOCUMENTS[k] < DOCUMENTS[q]) & (DOCUMENTS[k] > DOCUMENTS[q]), True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_spans_are_those_of_the_mask(name, dtype, monkeypatch):
    monkeypatch.setattr(functions, "WORTH_SPANS", 0.0)
    found = []
    compute = functions.mod_spans
    monkeypatch.setattr(functions, "mod_spans", lambda *args: found.append(compute(*args)) or found[-1])
    mask, whole = MASKS[name]
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for q_len, score in ((400, None), (90, relative)):
        q, k, v, dout = (draw(2, n, m, D, dtype=dtype) for n, m in ((H, q_len), (2, 400), (2, 400), (H, q_len)))
        options = {"score_mod": score, "mask_mod": mask, "q_offset": 120}
        want = both(q, k, v, dout, backend="reference", **options)
        got = both(q, k, v, dout, backend="cpu", **options)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, atol=tolerance * (1 + float(y.nan_to_num(0, 0, 0).abs().max())), rtol=0)
        hidden = (want[3] == 0).all(-1).all(1)  # dk, of keys that no row sees
        k[:, :2].masked_fill_(hidden[:, None, :, None], torch.nan)
        v.masked_fill_(hidden[:, None, :, None], torch.inf)
        for x, y in zip(both(q, k, v, dout, backend="cpu", **options), got, strict=True):
            torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-6)
    kept = [x for x in found if x is not None]
    assert (len(kept) == len(found)) == (name != "falling, not")
    assert all(x.whole == whole for x in kept)


@pytest.mark.parametrize(
    ("mutant", "change"),
    {
        "one key too many": lambda s: s._replace(hi=s.hi + 1),
        "one key too few": lambda s: s._replace(lo=s.lo + (s.lo < s.hi)),
        "the row before": lambda s: s._replace(lo=s.lo.roll(1, 1), hi=s.hi.roll(1, 1)),
        "conditions forgotten": lambda s: s._replace(whole=True),
    }.items(),
)
def test_wrong_spans_are_found(mutant, change, monkeypatch):
    monkeypatch.setattr(functions, "WORTH_SPANS", 0.0)
    compute = functions.mod_spans
    monkeypatch.setattr(functions, "mod_spans", lambda *args: change(compute(*args)))
    q, k, v, dout = (draw(1, H, 300, D) for _ in range(4))
    options = {"mask_mod": MASKS["by head" if mutant == "conditions forgotten" else "documents"][0]}
    want, got = (both(q, k, v, dout, backend=backend, **options) for backend in ("reference", "cpu"))
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert not torch.allclose(x, y, atol=1e-4, rtol=1e-4), name


def test_bits_of_a_sequence_do_not_depend_on_the_batch(monkeypatch):
    monkeypatch.setattr(functions, "WORTH_SPANS", 0.0)
    number = torch.stack([DOCUMENTS[:400], MIXED[:400]])
    q, k, v = (draw(2, H, 400, D) for _ in range(3))
    together = attention(q, k, v, mask_mod=lambda b, h, i, j: number[b, i] == number[b, j], backend="cpu")
    for n in range(2):
        one = {"mask_mod": lambda b, h, i, j, n=n: number[b + n, i] == number[b + n, j], "backend": "cpu"}
        assert torch.equal(together[n : n + 1], attention(*(x[n : n + 1] for x in (q, k, v)), **one))


def test_documents_are_those_of_packed_sequences():
    cu = torch.tensor([0, 170, 211, 511, 900], dtype=torch.int32)
    q, k, v = (draw(1, H, 900, D) for _ in range(3))
    got = attention(q, k, v, mask_mod=MASKS["documents, causal"][0], backend="cpu")
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    want = varlen_attention(*packed, cu, cu, causal=True, backend="cpu")
    torch.testing.assert_close(got[0].transpose(0, 1), want)


def test_comparisons():
    for mask, _ in MASKS.values():
        _, mods = split(bind(None, mask, torch.device("cpu")).mods)
        known, others = mod_spans.comparisons(mods)
        assert all("q" not in x.key.inputs and not {"k", "h"} & x.query.inputs for x in known)
        assert len(known) + others > 0
