"""The conformance cases. Sizes are awkward on purpose; options come alone, in pairs, and all together."""

from __future__ import annotations

from dataclasses import replace

from ..core.storage import quantised_names, stored_as
from .case import Case

LENGTHS = (1, 2, 31, 33, 63, 97, 113, 255, 1023)
HEAD_DIMS = (1, 16, 32, 40, 64, 72, 80, 96, 128, 192, 256, 320, 512, 576)

SIZES = [
    *(Case(B=1, H=3, Lq=n, D=64, causal=True) for n in LENGTHS),
    *(
        Case(B=1, H=2, Lq=n, Lk=m, causal=c)
        for n, m in ((1, 33), (7, 130), (63, 64), (130, 7), (65, 257))
        for c in (False, True)
    ),
    *(Case(Hkv=2, Lq=33, Lk=97, D=d, causal=True) for d in HEAD_DIMS),
    *(Case(B=1, Lq=17, Lk=70, D=d, Dv=e) for d, e in ((64, 32), (192, 128), (576, 512), (40, 72), (1, 576), (576, 1))),
    *(Case(B=1, H=h, Lq=31, causal=True) for h in (1, 3, 9, 12)),
    *(Case(B=1, H=h, Hkv=g, Lq=21, Lk=55) for h, g in ((2, 1), (9, 3), (12, 4), (15, 5), (16, 1), (16, 2))),
    Case(B=3, H=2, Lq=129, Lk=300, D=128, causal=True),
]

DTYPES = [
    *(Case(Hkv=2, Lq=97, D=64, dtype=t, causal=True) for t in ("f16", "bf16")),
    *(Case(Hkv=1, Lq=1, Lk=300, D=128, dtype=t) for t in ("f32", "f16", "bf16")),
    *(
        Case(Lq=50, D=48, dtype=q, k=kv, v=kv)
        for q, kv in (("f32", "f16"), ("f32", "bf16"), ("bf16", "f16"), ("f16", "bf16"))
    ),
    Case(Lq=40, dtype="f32", k="f16", v="bf16", causal=True),
    *(Case(Lq=64, D=96, dtype=t, softcap=10.0, window=20, causal=True, sinks=True, alibi="h") for t in ("f16", "bf16")),
    *(Case(Lq=40, D=256, dtype=t, mask="bhqk", mask_kind=t) for t in ("f16", "bf16")),
]

POSITIONS = [
    *(Case(Lq=30, Lk=70, causal=True, offset=n) for n in (0, 5, 40, 100, -3, -29, -40)),
    Case(B=5, Lq=30, Lk=70, causal=True, offset="rows"),
    *(Case(Lq=90, causal=True, window=w) for w in (1, 7, 64, 500)),
    *(Case(Lq=90, window=w) for w in (1, 7, (3, 5), (None, 4), (0, 0), (10, None), (0, None), (None, 0))),
    Case(Lq=20, Lk=90, causal=True, window=(10, 3)),
    Case(Lq=70, Lk=70, window=(5, 9), offset=-20),
    Case(Lq=70, Lk=70, window=(5, 9), offset=33),
    *(Case(Lq=90, chunk=16, causal=c) for c in (False, True)),
    Case(Lq=50, Lk=90, chunk=37, causal=True, window=20),
    Case(Lq=50, Lk=90, chunk=32, offset=-40),
    # Some write sys.maxsize for "no window"; rows before the first key must still see nothing.
    *(
        Case(Lq=40, Lk=23, window=w, causal=c)
        for w in (2**31 - 1, 2**63 - 1, (1, 2**31 - 2), (2**31, 4))
        for c in (False, True)
    ),
    *(Case(Lq=40, Lk=23, chunk=n, offset=-7) for n in (2**31 - 1, 2**63 - 1)),
    *(Case(Lq=40, Lk=23, window=w, offset=n) for w in (2**29 - 1, (3, 2**29 - 2)) for n in (2**29 - 40, 23 - 2**29)),
    *(Case(Lq=1, Lk=300, D=64, window=w, causal=True) for w in (2**31 - 1, 2**63 - 1)),
    *(Case(B=4, Lq=20, Lk=64, lengths=(0, 1, 37, 64), causal=c) for c in (False, True)),
    Case(B=4, Lq=40, Lk=64, lengths=(0, 1, 37, 64), causal=True, window=9),
    Case(B=4, Lq=40, Lk=64, lengths=(0, 1, 37, 64), causal=True, offset="rows"),
]

# Interleaved shards and striped rings: positions of keys and queries have strides.
AFFINE = [
    *(Case(Lq=40, Lk=70, causal=True, offset=n, k_start=3, k_stride=4, dtype=t) for n, t in ((100, "f32"), (9, "f16"))),
    *(
        Case(Lq=90, Lk=70, causal=True, offset=n, k_start=2, k_stride=3, q_stride=3, window=w)
        for n, w in ((0, None), (1, 40), (-30, (20, 9)))
    ),
    *(Case(Lq=30, Lk=150, window=w, offset=-4, q_stride=7) for w in (2, (1, 3), (20, None))),  # keys that nobody sees
    *(Case(Lq=150, Lk=20, window=w, offset=-9, k_stride=11, k_start=-6) for w in (3, (4, 2))),  # rows that see nothing
    *(Case(Lq=50, Lk=60, chunk=16, k_start=-21, k_stride=s, q_stride=2, offset=-30, causal=s > 1) for s in (1, 3)),
    *(Case(H=6, Lq=n, Lk=80, alibi="h", k_start=5, k_stride=2, q_stride=3, offset=7, causal=n > 1) for n in (1, 4, 60)),
    Case(B=4, Lq=60, Lk=90, k_start="rows", k_stride="rows", q_stride="rows", offset="rows", causal=True, alibi="bh"),
    Case(B=4, Lq=5, Lk=90, k_stride="rows", offset=60, window=(50, 4), lengths=(0, 1, 37, 90)),
    Case(B=3, Lq=40, Lk=90, lengths=(7, 60, 90), k_stride=2, q_stride=2, causal=True, window=30, tile=(16, 32)),
    Case(B=3, Hkv=2, Lq=1, Lk=700, D=64, k_start=1, k_stride=4, offset=1300, causal=True, window=900, split_size=64),
    Case(B=3, Lq=33, Lk=60, k_stride="rows", q_stride=2, offset=9, causal=True, mask="h1k", mask_kind="f32"),
    Case(Lq=33, Lk=90, k_start=40, offset=5, causal=True, mask="hqk", mask_kind="f32", softcap=9.0, sinks=True),
    Case(
        form="varlen", q_lengths=(70, 1, 33), lengths=(70, 90, 33), q_stride=2, k_start="rows", causal=True, window=50
    ),
    Case(form="varlen", q_lengths=(9, 30), lengths=(50, 44), offset="rows", k_stride=3, chunk=20, dtype="bf16"),
    Case(
        form="paged", B=4, Hkv=2, Lq=5, lengths=(1, 16, 70, 133), D=64, offset=200, k_start=1, k_stride=2, causal=True
    ),
    Case(form="paged", Hkv=2, q_lengths=(1, 5, 33), lengths=(1, 70, 133), offset="rows", k_stride="rows", causal=True),
]

SCORES = [
    *(Case(Lq=60, softcap=cap, causal=True) for cap in (1.0, 5.0, 30.0)),
    *(Case(Lq=60, scale=s) for s in (1.0, 0.05, -0.3)),
    *(Case(H=6, Lq=60, Lk=80, alibi=a, causal=c) for a in ("h", "bh") for c in (False, True)),
    Case(H=6, Lq=30, Lk=60, alibi="h", offset=0),
    *(Case(Lq=60, sinks=True, causal=c) for c in (False, True)),
    Case(B=3, Lq=20, Lk=40, sinks=True, lengths=(0, 5, 40)),
    *(Case(Lq=60, sinks=s, causal=True, dtype=t) for s in ("none", "mixed") for t in ("f32", "f16")),
    *(Case(B=3, Lq=20, Lk=40, sinks=s, lengths=(0, 5, 40)) for s in ("none", "mixed")),
    Case(Lq=50, Lk=70, mask="qk", pattern="rows", sinks="mixed"),
    Case(Lq=50, Lk=70, mask="hqk", mask_kind="f32", pattern="rows", sinks="none"),
    Case(Lq=60, softcap=4.0, alibi="h", sinks=True, mask="bhqk", mask_kind="f32"),
]

# q_bias and k_bias, some of them -inf.
BIASES = [
    *(
        Case(Hkv=2, Lq=50, Lk=70, q_bias=a, k_bias=b, causal=True)
        for a, b in (("bh", "bh"), ("1h", "b1"), ("11", "11"))
    ),
    *(Case(Hkv=2, Lq=50, Lk=70, D=64, k_bias="bh", dtype=t) for t in ("f16", "bf16")),
    Case(Lq=50, Lk=70, q_bias="1h"),
    Case(Lq=50, Lk=70, q_bias="bh", sinks="mixed", causal=True),
    *(Case(Hkv=1, Lq=n, Lk=300, D=64, q_bias="bh", k_bias="bh", causal=True, dtype="f16") for n in (1, 3, 16)),
    Case(Lq=60, Lk=90, q_bias="bh", k_bias="1h", softcap=5.0, alibi="bh", sinks=True, mask="bhqk", mask_kind="f32"),
    Case(Lq=60, Lk=90, k_bias="b1", mask="hqk", pattern="rows", window=(20, 5)),
    Case(Lq=150, Lk=200, k_bias="bh", mask="hqk", pattern="blocks", tile=(32, 32), causal=True),
    Case(Lq=40, Lk=90, k_bias="1h", mask="h1k", mask_kind="f32", causal=True, layout="blhd"),
    Case(B=4, Lq=20, Lk=64, lengths=(0, 1, 37, 64), q_bias="bh", k_bias="bh", causal=True),
    Case(B=4, Hkv=2, Lq=1, Lk=600, D=64, lengths=(0, 1, 300, 600), k_bias="bh", sinks=True, split_size=64),
    Case(Lq=33, Lk=60, k_stride=2, q_stride=3, offset=4, causal=True, q_bias="1h", k_bias="bh", D=40, Dv=72),
    Case(form="varlen", Hkv=2, q_lengths=(5, 20, 0, 64), lengths=(40, 7, 10, 64), q_bias="h", k_bias="h", causal=True),
    Case(form="varlen", q_lengths=(9, 30), lengths=(50, 44), used=(41, 0), k_bias="1", q_bias="1", dtype="bf16"),
    Case(form="paged", B=4, Hkv=2, Lq=5, lengths=(1, 16, 70, 133), D=64, q_bias="bh", k_bias="bh", causal=True),
    Case(form="paged", Hkv=2, q_lengths=(1, 5, 33), lengths=(1, 70, 133), D=64, q_bias="h", k_bias="1h", causal=True),
    Case(Hkv=2, Lq=9, Lk=90, D=64, k="int8/64", v="int4/64", k_bias="bh", causal=True),
    Case(Hkv=2, Lq=7, Lk=170, D=64, indices="h33", q_bias="bh", k_bias="bh", causal=True),
]

# Trees of draft tokens: a node sees its ancestors, and all keys before the tree.
TREES = [
    *(
        Case(Hkv=2, Lq=n, Lk=300, D=64, tree="b", dtype=t)
        for n, t in ((2, "f32"), (8, "f16"), (40, "f32"), (16, "bf16"))
    ),
    Case(Hkv=2, Lq=70, tree="1", causal=True),
    Case(Lq=50, Lk=30, tree="b"),
    Case(Hkv=1, Lq=6, Lk=700, D=64, tree="1", split_size=64, sinks=True, lengths=(700, 333)),
    Case(B=4, Hkv=2, Lq=9, Lk=64, lengths=(0, 1, 37, 64), tree="b", window=(20, None), alibi="h"),
    Case(Lq=20, Lk=90, tree="b", mask="hqk", mask_kind="f32", softcap=5.0, k_bias="bh"),
    Case(Lq=40, Lk=200, tree="1", mask="hqk", pattern="blocks", tile=(32, 32)),
    Case(Lq=33, Lk=60, tree="b", mask="h1k", mask_kind="f32", q_bias="1h"),
    Case(Lq=9, Lk=90, tree="b", offset=-3, k_stride=2, causal=True, layout="blhd"),
    Case(form="varlen", Hkv=2, q_lengths=(5, 20, 0, 64), lengths=(40, 7, 10, 64), tree="b"),
    *(Case(form="paged", B=4, Hkv=2, Lq=5, lengths=(1, 16, 70, 333), D=64, tree="b", page=n) for n in (16, 3)),
    Case(form="paged", B=4, Hkv=2, Lq=8, lengths=(9, 16, 70, 333), D=64, tree="1", page=16, k="int8/64", v="int4/64"),
    Case(form="paged", Hkv=2, q_lengths=(1, 5, 33), lengths=(1, 70, 133), D=64, tree="b", dtype="f16", window=60),
    Case(Hkv=2, Lq=7, Lk=170, D=64, indices="h33", tree="b", causal=True),
    Case(
        B=3, H=6, Hkv=2, Lq=65, Lk=190, D=72, Dv=40, causal=True, window=(300, 2), softcap=9.0, alibi="bh", sinks=True,
        offset="rows", k_start=-40, k_stride=2, q_stride=3, lengths=(190, 3, 120), mask="bhqk", mask_kind="f32",
        q_bias="b1", k_bias="1h", tree="b", layout="blhd",
    ),
    *(Case(Hkv=2, Lq=40, Lk=90, tree=t, positions=True, **rules) for t, rules in (
        ("1", {"window": 6}), ("b", {"window": (9, 1)}), ("b", {"chunk": 8}), ("1", {"causal": True, "window": 30}),
    )),
    Case(Lq=30, Lk=20, tree="b", positions=True, window=3, dtype="f16"),
    Case(Hkv=1, Lq=6, Lk=700, D=64, tree="b", positions=True, window=300, split_size=64, lengths=(700, 333)),
    Case(Lq=20, Lk=90, tree="b", positions=True, window=5, mask="hqk", mask_kind="f32", softcap=5.0, k_bias="bh"),
    Case(form="varlen", Hkv=2, q_lengths=(5, 20, 0, 64), lengths=(40, 7, 10, 64), tree="b", positions=True, window=4),
    *(
        Case(form="paged", B=4, Hkv=2, Lq=9, lengths=(9, 16, 70, 333), D=64, tree="b", positions=True, window=w, page=n)
        for w, n in ((3, 16), (40, 3))
    ),
    Case(form="paged", Hkv=2, q_lengths=(1, 5, 33), lengths=(1, 70, 133), tree="b", positions=True, chunk=16),
    Case(Hkv=2, Lq=7, Lk=170, D=64, indices="h33", tree="b", positions=True, window=60),
]  # fmt: skip

# k_shared: each head's own columns, and those that all heads share (expanded latent attention).
SHARED = [
    *(Case(Hkv=h, Lq=70, Lk=150, D=96, Dv=64, dtype=t, shared=32, causal=True)
      for h, t in ((0, "f32"), (2, "f16"), (0, "bf16"))),
    Case(Lq=33, D=72, Dv=40, shared=9, window=20, sinks=True, layout="blhd"),
    Case(B=3, H=2, Lq=150, Lk=300, D=192, Dv=128, shared=64, lengths=(300, 5, 171), causal=True, strides="sliced"),
    Case(Hkv=2, Lq=1, Lk=400, D=96, shared=32),
    Case(Hkv=2, Lq=3, Lk=90, D=50, shared=49, mask="hqk", mask_kind="f32", dtype="f16"),
    Case(form="varlen", Hkv=2, q_lengths=(5, 20, 0, 64), lengths=(40, 7, 10, 64), D=96, shared=32, causal=True),
    Case(Hkv=2, Lq=9, Lk=90, D=64, shared=16, indices="30", causal=True),
]  # fmt: skip

MASK_DIMS = ("qk", "1k", "q1", "hqk", "1qk", "h1k", "bhqk", "b1qk", "1hqk", "b11k", "bhq1")
MASKS = [
    *(Case(Lq=50, Lk=70, mask=dims, mask_kind=kind) for dims in MASK_DIMS for kind in ("bool", "f32")),
    *(Case(Lq=50, Lk=70, mask="bhqk", mask_kind=kind, pattern="rows") for kind in ("bool", "f32")),
    *(Case(Lq=40, Lk=90, mask="h1k", mask_kind=kind, causal=True) for kind in ("bool", "f32")),
    Case(Lq=50, Lk=70, mask="qk", mask_kind="bool", pattern="rows", sinks=True),
    *(Case(Lq=50, Lk=70, mask="hqk", mask_kind=kind, pattern="least") for kind in ("f32", "bf16", "f16")),
    Case(Lq=50, Lk=70, mask="hqk", mask_kind="f32", pattern="least", causal=True, alibi="h"),
    *(Case(Lq=150, Lk=300, mask="1hqk", mask_kind=kind, pattern="blocks") for kind in ("bool", "f32")),
    *(Case(Lq=n, Lk=130, mask="hqk", mask_kind="f32", pattern="near") for n in (1, 50)),
    Case(Lq=50, Lk=130, mask="hqk", mask_kind="f32", pattern="near", tile=(16, 32)),
    *(
        Case(Lq=150, Lk=300, mask=dims, mask_kind=kind, pattern="blocks", tile=tile)
        for dims, tile in (
            ("qk", (64, 64)),
            ("bhqk", (24, 40)),
            ("hqk", (7, 13)),
            ("b1qk", (128, 32)),
            ("1hqk", (1, 300)),
        )
        for kind in ("bool", "f32")
    ),
    Case(Lq=150, Lk=200, mask="hqk", pattern="blocks", tile=(32, 32), causal=True, window=70),
    Case(Lq=130, Lk=200, causal=True, window=40, tile=(16, 48)),
    Case(B=3, Lq=40, Lk=90, lengths=(7, 60, 90), causal=True, tile=(16, 32)),
    Case(Lq=1, Lk=200, mask="b11k", pattern="blocks", tile=(16, 16)),
]

DECODE = [
    *(
        Case(B=1, H=h, Hkv=g, Lq=1, Lk=1000, D=d)
        for h, g, d in ((1, 1, 64), (8, 2, 128), (16, 1, 64), (4, 4, 256), (6, 2, 576))
    ),
    *(Case(B=1, Hkv=2, Lq=1, Lk=n, D=64) for n in (1, 2, 31, 255, 5000)),
    *(Case(Hkv=1, Lq=n, Lk=700, D=64, causal=True) for n in (2, 5, 16)),
    Case(B=4, Hkv=2, Lq=1, Lk=600, D=64, lengths=(0, 1, 300, 600), sinks=True),
    Case(B=4, Hkv=2, Lq=1, Lk=600, D=64, lengths=(0, 1, 300, 600), window=100),
    *(
        Case(B=4, Hkv=2, Lq=1, Lk=600, D=64, lengths=(0, 1, 300, 600), sinks=s, split_size=64)
        for s in (True, "none", "mixed")
    ),
    Case(Hkv=2, Lq=3, Lk=500, D=64, sinks=True, split_size=100, causal=True),
    Case(B=1, Hkv=1, Lq=8, Lk=520, D=64, mask="qk", pattern="tree"),
    Case(Hkv=2, Lq=6, Lk=333, D=80, mask="bhqk", mask_kind="f32", softcap=8.0, alibi="bh"),
    *(Case(B=3, Hkv=2, Lq=1, Lk=900, D=64, lengths=(900, 128, 451), split_size=n) for n in (1, 64, 100, 1000)),
]

VARLEN = [
    Case(form="varlen", q_lengths=(5, 0, 33, 1), lengths=(5, 0, 33, 1), causal=True),
    Case(form="varlen", q_lengths=(5, 20, 1, 64), lengths=(40, 7, 100, 64), causal=True, Hkv=2),
    Case(form="varlen", q_lengths=(5, 20, 1, 64), lengths=(40, 7, 0, 64), Dv=48),
    Case(form="varlen", q_lengths=(70, 1, 33), lengths=(70, 90, 33), window=(8, 3), sinks=True),
    Case(form="varlen", q_lengths=(70, 1, 33), lengths=(70, 90, 33), causal=True, window=11, softcap=6.0, alibi="bh"),
    Case(form="varlen", q_lengths=(9, 30), lengths=(50, 44), used=(41, 0), causal=True),
    Case(form="varlen", q_lengths=(9, 30), lengths=(50, 44), offset="rows", causal=True),
    Case(form="varlen", q_lengths=(9, 30), lengths=(50, 44), mask="bhqk", mask_kind="f32"),
    Case(form="varlen", q_lengths=(9, 30), lengths=(50, 44), mask="hqk", tile=(8, 16)),
    Case(form="varlen", q_lengths=(33, 65), lengths=(33, 65), chunk=16, causal=True, dtype="bf16"),
    Case(form="varlen", q_lengths=(257,), lengths=(300,), D=128, causal=True, dtype="f16"),
    Case(form="varlen", H=6, Hkv=2, q_lengths=(1, 1, 1, 1), lengths=(900, 3, 0, 257), D=64),
    Case(form="varlen", q_lengths=(70, 1, 33), lengths=(70, 0, 33), causal=True, sinks="mixed"),
    Case(form="varlen", q_lengths=(0, 0), lengths=(40, 7), sinks=True),
]

_PAGED = Case(form="paged", B=4, Hkv=2, Lq=1, lengths=(1, 16, 70, 133), D=64)
PAGED = [
    *(replace(_PAGED, page=n) for n in (1, 3, 16, 128)),
    replace(_PAGED, lengths=(0, 16, 17, 1)),
    replace(_PAGED, Lq=5, causal=True),
    replace(_PAGED, Lq=20, causal=True, window=8, sinks=True),
    replace(_PAGED, Lq=3, alibi="bh", softcap=5.0, causal=True, page=7),
    replace(_PAGED, Lq=4, mask="bhqk", pattern="tree"),
    replace(_PAGED, Lq=4, mask="b11k", mask_kind="f32"),
    replace(_PAGED, Lq=2, layout="blhd", causal=True),
    replace(_PAGED, dtype="bf16", Dv=128),
    replace(_PAGED, dtype="f32", k="f16", v="bf16", offset="rows", Lq=3, causal=True),
    replace(_PAGED, q_lengths=(1, 5, 33, 20), causal=True),
    replace(_PAGED, q_lengths=(1, 5, 0, 20), causal=True, window=(6, 0), alibi="h"),
    replace(_PAGED, q_lengths=(1, 1, 40, 2), chunk=32, causal=True, page=5),
    replace(_PAGED, lengths=(700, 33, 1025, 512), split_size=128, page=16),
    *(replace(_PAGED, lengths=(700, 33, 0, 512), split_size=64, sinks=s) for s in (True, "mixed")),
    replace(_PAGED, q_lengths=(0, 0, 0, 0)),
    replace(_PAGED, D=512, lengths=(70, 200), B=2, H=8),
]

QUANTISED = [
    *(
        Case(Hkv=2, Lq=9, Lk=90, D=64, k=t, v=t, causal=True)
        for t in ("int4/32", *(f"{name}/64" for name in quantised_names() if not stored_as(name).wants(64)))
    ),
    *(
        Case(Hkv=1, Lq=1, Lk=400, D=128, dtype=q, k=t, v=t)
        for q in ("bf16", "f16")
        for t in ("int8/128", "int4/64", "int4/128", "codebook4/128", "fp8_e4m3/32", "fp8_e4m3/128")
    ),
    Case(Lq=20, Lk=50, D=72, Dv=40, k="int8/32", v="int4/32", lengths=(50, 13)),
    Case(Lq=20, Lk=50, D=80, k="int4/128", v="f16", softcap=5.0, causal=True),
    Case(Lq=40, Lk=200, D=64, k="fp8_e4m3/64", v="int8/64", mask="hqk", pattern="blocks", tile=(16, 32)),
    *(
        replace(_PAGED, k=a, v=b)
        for a, b in (
            ("int8/64", "int4/32"),
            ("fp8_e4m3/32", "fp8_e4m3/32"),
            ("int4/64", "bf16"),
            ("int8/64", "codebook4/32"),
        )
    ),
    replace(_PAGED, k="int8/64", v="int8/64", q_lengths=(1, 5, 33, 20), causal=True, page=5),
    Case(form="varlen", q_lengths=(5, 20), lengths=(40, 77), D=64, k="int8/64", v="int4/64", causal=True),
    *(replace(_PAGED, D=128, dtype="bf16", page=16, k=t, v=t) for t in ("int8/64", "int4/64", "fp8_e4m3/64")),
    replace(_PAGED, D=128, Lq=2, dtype="f16", page=16, k="fp8_e4m3/64", v="fp8_e4m3/64", causal=True),
    replace(_PAGED, D=256, dtype="f16", page=16, k="int4/64", v="int4/64"),
    Case(Hkv=1, Lq=1, Lk=90, D=256, dtype="f16", k="int4/64", v="int4/64"),
]

STRIDES = [
    *(Case(Hkv=2, Lq=50, layout="blhd", causal=True, dtype=t) for t in ("f32", "f16")),
    *(Case(Hkv=2, Lq=50, strides=s, layout=o) for s in ("sliced", "last") for o in ("bhld", "blhd")),
    *(Case(Hkv=2, Lq=50, strides="permuted", layout=o, causal=True) for o in ("bhld", "blhd")),
    *(Case(Lq=50, Lk=70, strides="permuted", mask="bhqk", mask_kind=t) for t in ("bool", "f32", "bf16")),
    Case(Lq=3, Lk=300, strides="permuted", mask="hqk", mask_kind="f32"),
    Case(B=3, Hkv=2, Lq=1, Lk=300, strides="shared"),
    Case(B=3, Hkv=2, Lq=40, Lk=90, strides="shared", causal=True),
]

_LATENT = Case(form="paged", B=3, H=16, Hkv=1, Lq=1, lengths=(1, 70, 193), D=576, Dv=512, page=64, latent=True)
LATENT = [
    *(replace(_LATENT, dtype=t) for t in ("f32", "f16", "bf16")),
    replace(_LATENT, dtype="bf16", Lq=3, causal=True),
    replace(_LATENT, dtype="bf16", H=5, Lq=2, page=16, lengths=(0, 130, 64), sinks="mixed"),
    replace(_LATENT, dtype="bf16", B=2, H=70, Lq=4, page=128, lengths=(2, 129), causal=True, sinks=True),
    replace(_LATENT, dtype="bf16", lengths=(300, 33, 0), split_size=128),
    replace(_LATENT, dtype="bf16", B=2, H=128, lengths=(233, 40), window=150, causal=True),
    replace(_LATENT, dtype="f16", H=4, lengths=(1, 40, 33), q_lengths=(1, 5, 2), causal=True, page=16),
    replace(_LATENT, D=96, Dv=64, H=4, Hkv=2, dtype="bf16", page=16, Lq=5, causal=True, window=40, softcap=9.0),
    Case(H=16, Hkv=1, Lq=1, Lk=300, D=576, Dv=512, dtype="bf16", latent=True, lengths=(300, 129)),
    Case(H=16, Hkv=1, Lq=2, Lk=150, D=576, Dv=512, dtype="f16", latent=True, layout="blhd", causal=True),
    Case(H=4, Hkv=2, Lq=40, Lk=90, D=72, Dv=64, latent=True, causal=True, strides="sliced"),
    Case(Hkv=1, Lq=2, Lk=90, D=192, Dv=128, k="int8/64", v="int8/64", latent=True, causal=True),
    Case(Hkv=1, Lq=1, Lk=90, D=128, Dv=64, dtype="f16", k="int8/64", v="int8/64", latent=True),
    Case(Hkv=1, Lq=1, Lk=90, D=64, Dv=64, dtype="f16", k="fp8_e4m3/32", v="fp8_e4m3/32", latent=True, sinks=True),
    *(replace(_LATENT, dtype=t, k="int8/128", v="int8/128") for t in ("f32", "f16", "bf16")),
    replace(_LATENT, dtype="f16", B=2, H=20, Lq=2, k="fp8_e4m3/64", v="fp8_e4m3/64", lengths=(2, 129), causal=True),
    Case(form="varlen", H=4, Hkv=1, q_lengths=(5, 20), lengths=(40, 77), D=80, Dv=64, dtype="bf16", latent=True),
]

# fp8_latent, whose rows hold their scales: for backends that support it.
_FP8_LATENT = replace(_LATENT, k="fp8_latent/128", v="fp8_latent/128")
LATENT_ROWS = [
    *(replace(_FP8_LATENT, dtype=t) for t in ("f32", "f16", "bf16")),
    replace(_FP8_LATENT, dtype="f16", B=2, H=70, Lq=2, page=16, lengths=(2, 129), causal=True, sinks=True),
    replace(_FP8_LATENT, dtype="bf16", Lq=2, indices="60", causal=True),
    replace(_FP8_LATENT, dtype="bf16", H=70, page=16, lengths=(0, 193, 33), indices="140", sinks="mixed"),
    replace(_FP8_LATENT, dtype="bf16", D=544, lengths=(300, 33, 0), split_size=128),
    Case(H=2, Lq=20, Lk=50, D=576, Dv=512, k="fp8_latent/128", v="fp8_latent/128", latent=True, lengths=(50, 13)),
    Case(H=4, Hkv=1, Lq=1, Lk=90, D=512, Dv=32, k="fp8_latent/128", v="int8/32", mask="hqk"),
    Case(H=4, Hkv=1, Lq=3, Lk=90, D=40, Dv=512, dtype="f16", k="f16", v="fp8_latent/128", causal=True),
]

INDICES = [
    *(Case(Hkv=2, Lq=n, Lk=300, D=64, indices=i) for n in (1, 3, 40) for i in ("37", "h37")),
    *(Case(Hkv=1, Lq=2, Lk=900, D=128, dtype=t, indices="300", causal=True) for t in ("f32", "f16", "bf16")),
    Case(Hkv=2, Lq=33, Lk=70, indices="1", sinks=True),
    Case(Hkv=2, Lq=33, Lk=70, indices="90", causal=True, window=(20, 3)),
    Case(Hkv=2, Lq=9, Lk=170, indices="h33", chunk=64, softcap=5.0, alibi="bh", offset="rows"),
    Case(B=3, Hkv=2, Lq=9, Lk=90, indices="h24", causal=True, alibi="h", k_start="rows", k_stride="rows"),
    Case(Hkv=2, Lq=70, Lk=90, indices="6", block=8, window=(60, 9), alibi="h", k_start=-3, k_stride=3, q_stride=2),
    Case(B=4, Hkv=2, Lq=5, Lk=64, indices="16", lengths=(0, 1, 37, 64), causal=True, sinks="mixed"),
    Case(Lq=20, Lk=90, D=40, Dv=72, indices="h11", mask="hqk", mask_kind="f32", layout="blhd"),
    Case(Lq=6, Lk=333, D=80, indices="64", mask="b11k", pattern="blocks", tile=(16, 32)),
    Case(B=3, Hkv=2, Lq=1, Lk=700, D=64, indices="257", split_size=64, lengths=(700, 33, 512), sinks=True),
    Case(Hkv=2, Lq=7, Lk=90, D=64, indices="24", strides="sliced"),
    Case(B=3, Hkv=2, Lq=2, Lk=90, indices="24", strides="shared"),
    Case(form="varlen", Hkv=2, q_lengths=(5, 20, 0, 1), lengths=(40, 7, 10, 0), indices="9", causal=True),
    Case(form="varlen", Hkv=2, q_lengths=(9, 30), lengths=(50, 44), used=(41, 0), indices="h17", sinks=True),
    replace(_PAGED, indices="24"),
    replace(_PAGED, indices="h24", Lq=5, causal=True, window=40, page=3),
    replace(_PAGED, indices="33", q_lengths=(1, 5, 33, 20), causal=True, alibi="h"),
    replace(_PAGED, indices="200", lengths=(700, 33, 0, 512), split_size=64, sinks="mixed", dtype="bf16"),
    replace(_PAGED, indices="h50", k="int8/64", v="int4/32", Lq=2, causal=True),
    replace(_PAGED, indices="50", k="fp8_e4m3/32", v="fp8_e4m3/32", page=5),
    Case(Hkv=2, Lq=9, Lk=90, D=64, k="int4/64", v="f16", indices="30", causal=True),
    *(replace(_LATENT, dtype=t, indices="40") for t in ("f32", "bf16")),
    replace(_LATENT, dtype="bf16", H=70, Lq=3, indices="70", causal=True, sinks=True),
    Case(H=16, Hkv=1, Lq=2, Lk=300, D=576, Dv=512, dtype="f16", latent=True, indices="128", lengths=(300, 129)),
    *(Case(Hkv=2, Lq=90, Lk=200, D=64, indices=i, block=b) for i, b in (("3", 32), ("h2", 64), ("7", 5), ("9", 1))),
    Case(Hkv=2, Lq=130, Lk=130, D=64, indices="2", block=48, causal=True, window=70, dtype="f16"),
    Case(B=3, Hkv=2, Lq=1, Lk=700, D=64, indices="9", block=16, lengths=(700, 33, 0), sinks=True, softcap=8.0),
    Case(Lq=90, Lk=150, indices="h4", block=16, mask="bhqk", mask_kind="f32", alibi="h", split_size=32, dtype="bf16"),
    # Of whole tiles: lists of them, not gathers.
    Case(Hkv=2, Lq=200, Lk=700, D=64, indices="h3", block=128, dtype="bf16", causal=True, sinks=True, softcap=8.0),
    Case(H=2, Lq=150, Lk=500, D=128, indices="2", block=256, dtype="f16", lengths=(500, 0), window=(300, 90)),
    Case(H=2, Lq=140, Lk=400, D=192, Dv=128, indices="h2", block=128, dtype="bf16", alibi="h", chunk=300),
    replace(_PAGED, indices="3", block=16),
    replace(_PAGED, indices="h3", block=24, Lq=50, causal=True, page=7, k="int8/64", v="int8/64"),
]

DROPOUT = [
    *(Case(Hkv=2, Lq=90, Lk=130, D=64, dropout=p, causal=c) for p, c in ((0.1, False), (0.6, True), (1.0, False))),
    Case(Hkv=2, Lq=77, Lk=190, D=64, dtype="f16", causal=True, dropout=0.3, window=70, softcap=9.0, sinks=True),
    Case(B=3, Hkv=2, Lq=70, Lk=90, dtype="bf16", alibi="bh", mask="hqk", mask_kind="f32", dropout=0.2, layout="blhd"),
    Case(B=3, Hkv=2, Lq=1, Lk=700, D=64, lengths=(700, 33, 512), split_size=64, dropout=0.4),
    Case(B=4, Lq=40, Lk=64, lengths=(0, 1, 37, 64), causal=True, offset="rows", dropout=0.3, q_bias="bh", k_bias="1h"),
    Case(Lq=50, Lk=70, k_start=3, k_stride=4, q_stride=3, offset=-9, causal=True, dropout=0.5),
    Case(B=3, Hkv=2, Lq=9, Lk=90, k_start="rows", k_stride="rows", indices="h24", dropout=0.3),
    Case(Hkv=2, Lq=70, Lk=90, D=40, Dv=72, indices="6", block=8, dropout=0.3, k_start=5),
    Case(Hkv=2, Lq=130, Lk=150, D=64, indices="h2", block=24, dtype="bf16", causal=True, dropout=0.3),
    Case(Hkv=2, Lq=100, Lk=170, D=64, dtype="bf16", k_start=-5, causal=True, dropout=0.3),
    Case(Lq=40, Lk=90, tree="b", dropout=0.3, dtype="f16"),
    Case(form="varlen", Hkv=2, q_lengths=(70, 1, 0, 33), lengths=(70, 90, 9, 33), causal=True, dropout=0.3),
    replace(_PAGED, dropout=0.5),
    replace(_PAGED, q_lengths=(1, 5, 33, 20), causal=True, page=5, k="int8/64", v="int8/64", dropout=0.3),
]

CASES = [
    *SIZES, *DTYPES, *POSITIONS, *AFFINE, *SCORES, *BIASES, *TREES, *SHARED, *MASKS, *DECODE, *VARLEN, *PAGED,
    *QUANTISED, *LATENT, *STRIDES, *INDICES, *DROPOUT,
]  # fmt: skip
CASES += [
    Case(
        B=3, H=6, Hkv=2, Lq=65, Lk=190, D=72, Dv=40, dtype=t, causal=True, window=(90, 2), chunk=128, softcap=9.0,
        scale=0.2, alibi="bh", sinks=True, offset="rows", lengths=(190, 3, 120), mask="bhqk", mask_kind=t,
        layout="blhd", note="everything",
    )
    for t in ("f32", "f16", "bf16")
]  # fmt: skip

# Calls that have gradients, of the sizes that a float64 oracle can differentiate.
GRADIENTS = [
    c
    for c in CASES
    if c.form != "paged" and not c.shared and "/" not in c.k + c.v and not c.split_size and max(c.keys, c.Lq) <= 1100
]
GRADIENTS += [  # many keys of equal weight: rounded partial sums would show
    Case(B=1, H=2, Lq=40, Lk=1000, D=64, dtype=t, softcap=0.5) for t in ("f16", "bf16")
]
