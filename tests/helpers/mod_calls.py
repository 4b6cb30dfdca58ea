"""Calls with functions of the user, judged against the oracle: for backends whose kernels are interpreted."""

import math

import torch

from drawn_mods import captured, drawn
from tilewise import Quantised, attention, paged_attention, varlen_attention
from tilewise.core.expression.mods import Bound

H, L, D = 4, 70, 24
random = torch.Generator().manual_seed(0)
TABLE, SLOPES = torch.randn(H, 2 * L + 20, generator=random), torch.rand(H, generator=random)
DOC = torch.arange(2 * L) // 29
NEAR = torch.rand(2 * L, 2 * L, generator=random) > 0.5
PER_DTYPE = {torch.float32: 2e-5, torch.float16: 3e-3}


def draw(*shape, dtype=torch.float32, size=2.0):
    return (torch.randn(shape, generator=random) * size).to(dtype)


def softcap_table(s, b, h, q, k):
    return 20 * torch.tanh(s / 20) + TABLE[h, q - k + L]


def documents(b, h, q, k):
    return (DOC[q] == DOC[k]) & (q >= k)


def by_head(b, h, q, k):
    return torch.where(h % 2 == 0, q - k < 40, NEAR[q, k])


def hides(s, b, h, q, k):
    return torch.where((q + k) % 3 == 0, -math.inf, s - SLOPES[h] * (q - k).abs())


FUNCTIONS = {
    "score": {"score_mod": softcap_table},
    "mask": {"mask_mod": documents},
    "both": {"score_mod": softcap_table, "mask_mod": by_head},
    "nothing": {"mask_mod": lambda b, h, q, k: q < -(h + 1)},
    "hides": {"score_mod": hides},
    "number": {"score_mod": lambda s, b, h, q, k: s * 0 + 1.5, "mask_mod": lambda b, h, q, k: k % 3 == 1},
    "with others": {"score_mod": softcap_table, "mask_mod": documents, "softcap": 15.0, "window": 60, "q_stride": 1,
                    "alibi_slopes": SLOPES},
    "masks": {"score_mod": softcap_table, "mask_mod": documents, "mask": draw(2, 1, L, L), "scale": -0.4,
              "k_bias": draw(2, H, L), "sinks": draw(H)},
    "bool mask": {"score_mod": hides, "mask": NEAR[:L, :L]},
    "positions": {"score_mod": softcap_table, "mask_mod": by_head, "k_start": 3, "k_stride": 2, "q_offset": 9},
}  # fmt: skip


def compare(got, want, dtype=torch.float32, allowed=0.0):
    """`allowed`: twice the error of torch's arithmetic on the same inputs."""
    atol = max(PER_DTYPE[dtype], allowed)
    torch.testing.assert_close(got.out.float(), want.out.float(), atol=atol, rtol=PER_DTYPE[dtype])
    torch.testing.assert_close(got.lse, want.lse, atol=max(1e-4, allowed), rtol=1e-5)


def call_of(name, backend):
    """A call of `FUNCTIONS` with many rows, few, and one of two KV heads."""
    for q_len, kv_heads, dtype in ((L, H, torch.float32), (5, 2, torch.float16), (1, 2, torch.float32)):
        if q_len < L and "mask" in FUNCTIONS[name]:
            continue
        options = FUNCTIONS[name] | {"return_lse": True}
        q, k, v = (draw(2, n, m, D, dtype=dtype) for n, m in ((H, q_len), (kv_heads, L), (kv_heads, L)))
        out = torch.full_like(q, torch.nan)
        got = attention(q, k, v, backend=backend, out=out, **options)
        compare(got, attention(q, k, v, backend="reference", **options), dtype)


def drawn_call(seed, backend):
    """A random expression, with GQA; errors as large as those of the torch backend are allowed."""
    dtype = (torch.float32, torch.float16)[seed % 2]
    q, k, v = (draw(2, n, m, D, dtype=dtype) for n, m in ((H, 33), (2, 70), (2, 70)))
    options = {"score_mod": Bound(drawn(seed, mask=seed % 3 > 0), captured()), "return_lse": True}
    want, plain, got = (attention(q, k, v, backend=b, **options) for b in ("reference", "torch", backend))
    error = max((plain[n].float() - want[n].float()).nan_to_num(0).abs().max().item() for n in (0, 1))
    compare(got, want, dtype, 2 * error)


def other_forms(backend):
    """Packed, paged and quantised calls."""
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 40, 41, 80], [0, 45, 67, 110]))
    scale = torch.tensor([1.0, 0.5, 0.25])
    options = {
        "score_mod": lambda s, b, h, q, k: s * scale[b] + TABLE[h, q - k + L],
        "mask_mod": lambda b, h, q, k: (q >= k) & ((k + b) % 5 != 0),
        "return_lse": True,
    }
    q, k, v = draw(85, H, D), draw(110, 2, D), draw(110, 2, D)
    compare(*(varlen_attention(q, k, v, cu_q, cu_k, backend=b, **options) for b in (backend, "reference")))
    pages = [draw(9, 16, 2, 32) for _ in range(2)]
    table = torch.tensor([[2, 0, 7], [5, 4, 1], [3, 6, 8]], dtype=torch.int32)
    lengths = torch.tensor([40, 17, 48], dtype=torch.int32)
    for q_len in (1, 17):
        q = draw(3, H, q_len, 32)
        for stored in ("", "int8", "int4"):
            held = [Quantised.from_float(x, stored, group=32) if stored else x for x in pages]
            compare(*(paged_attention(q, *held, table, lengths, backend=b, **options) for b in (backend, "reference")))


def splits_and_indices(backend):
    q, k, v = draw(1, H, 1, D), draw(1, 2, 2 * L, D), draw(1, 2, 2 * L, D)
    options = {"score_mod": softcap_table, "mask_mod": lambda b, h, q, k: NEAR[k, h], "return_lse": True}
    compare(*(attention(q, k, v, backend=b, split_size=64, **options) for b in (backend, "reference")))
    indices = torch.randperm(2 * L, generator=random)[:33].view(1, 1, 33).int()
    compare(*(attention(q, k, v, key_indices=indices, backend=b, **options) for b in (backend, "reference")))


def hidden_cells(backend):
    """NaN and infinities that a function hides cannot matter; what a row sees does."""

    def mask_mod(b, h, q, k):
        return (k % 7 != 3) & (k != q)

    options = {"score_mod": softcap_table, "mask_mod": mask_mod, "return_lse": True}
    for q_len in (L, 3):
        q, k, v = draw(1, H, q_len, D), draw(1, H, L, D), draw(1, H, L, D)
        clean = attention(q, k, v, backend=backend, **options)
        k[:, :, 3::7], v[:, :, 3::7] = torch.nan, torch.inf
        v[:, :, -q_len:][:, :, :1] = torch.nan  # the first query does not see it, others do
        got = attention(q, k, v, backend=backend, **options)
        assert torch.equal(got.out[:, :, 0], clean.out[:, :, 0])
        assert torch.equal(got.lse, clean.lse)
        assert got.out[:, :, 1:].isnan().all()


def repeated(backend):
    """Captured tensors of other values, strides and sizes, in calls that come again."""
    q, k, v = draw(1, H, 3, D), draw(1, 2, L, D), draw(1, 2, L, D)
    tables = [TABLE, TABLE * 2, TABLE.T.contiguous().T, TABLE[:, : 2 * L], TABLE.half(), TABLE[:, :0]]

    def call(table, name):
        def mask_mod(b, h, q, k):
            return table.shape[1] > 0  # nothing is inside an empty one

        return attention(
            q, k, v, score_mod=lambda s, b, h, q, k: s + table[h, q - k + L], mask_mod=mask_mod, backend=name
        )

    for _ in range(3):
        for table in tables:
            torch.testing.assert_close(call(table, backend), call(table, "reference"), atol=2e-5, rtol=2e-5)


DOCUMENTS = {
    "documents": documents,
    "of heads": by_head,
    "of sequences": lambda b, h, q, k: (k < 70) | (b == 1),
    "everything": lambda b, h, q, k: k >= 0,
}


def skipped_tiles(backend):
    """Tiles that a mask_mod hides are skipped, no other is, and the bits are those of all tiles."""
    from tilewise.backends.triton import mod_lists_launch
    from tilewise.dispatch import call_cache

    listed = {}
    own = mod_lists_launch.ModLister.launch

    def recorded(self, r, t):
        listed["n"], listed["ranks"], listed["spec"] = self.n, (made := own(self, r, t))[1], self.spec
        return made

    def unlisted(self, r, t):
        LIST, RANK, strides = own(self, r, t)
        n = self.n
        RANK.view(-1, n + 1)[:] = torch.arange(n + 1)
        LIST.view(-1, n)[:] = 2 * torch.arange(n)
        return LIST, RANK, strides

    q, k, v = (draw(2, n, 135, D) for n in (H, 2, 2))
    for name, mask_mod in DOCUMENTS.items():
        options = {"mask_mod": mask_mod, "return_lse": True, "q_offset": 0, "window": (100, None)}
        mod_lists_launch.ModLister.launch = recorded
        got = attention(q, k, v, backend=backend, **options)
        compare(got, attention(q, k, v, backend="reference", **options))
        BM, BK = listed["spec"].BM, listed["spec"].BK
        i, j = torch.arange(135)[:, None], torch.arange(135)
        b, h = torch.arange(2)[:, None, None, None], torch.arange(H)[:, None, None]
        cells = torch.as_tensor(mask_mod(b, h, i, j)) & (i - j <= 100)
        cells = cells.expand(2, H, 135, 135)
        if name == "documents":
            cells = cells.tril()
        cells = torch.nn.functional.pad(cells, (0, -135 % BK, 0, -135 % BM))
        tiles = cells.unflatten(2, (-1, BM)).unflatten(4, (-1, BK)).any(5).any(3)
        counts = listed["ranks"].view(-1, listed["n"] + 1)[:, -1]
        want = tiles.sum(3)
        planes = counts.numel() // want.shape[2]
        want = want if planes == 2 * H else want[:, :1] if planes == 2 else want[:1] if planes == H else want[:1, :1]
        assert torch.equal(counts, want.flatten().int()), name
        mod_lists_launch.ModLister.launch = unlisted
        call_cache.forget()
        for x, y in zip(attention(q, k, v, backend=backend, **options), got, strict=True):
            assert torch.equal(x, y), name
    mod_lists_launch.ModLister.launch = own


def a_tile_too_few(backend):
    """The calls above find a list that ends too early."""
    from tilewise.backends.triton import mod_lists_launch

    own = mod_lists_launch.ModLister.launch

    def fewer(self, r, t):
        LIST, RANK, strides = own(self, r, t)
        ranks = RANK.view(-1, self.n + 1)
        ranks[:] = torch.minimum(ranks, (ranks[:, -1:] - 1).clamp_min(1))
        return LIST, RANK, strides

    mod_lists_launch.ModLister.launch = fewer
    q, k, v = (draw(1, n, 200, D) for n in (H, 2, 2))
    options = {"mask_mod": lambda b, h, q, k: k // 50 % 2 == 0, "return_lse": True, "q_offset": 0}
    got, want = (attention(q, k, v, backend=b, **options) for b in (backend, "reference"))
    assert not torch.allclose(got.lse, want.lse, atol=1e-3)
