"""Mistakes planted in the Metal texts: every barrier taken out, and what other kernels are known to do wrong."""

import multiprocessing
import time
from dataclasses import dataclass, replace

import pytest
import torch

import tilewise
from metal_sim import needs_simulator, simulator
from mslsim import Fault
from mslsim.mutants import barriers, mutate
from tilewise.backends.metal import text
from tilewise.backends.metal.spec import Operand, Options, Spec
from tilewise.testing.case import Case
from tilewise.testing.check import Mismatch, check_case

pytestmark = needs_simulator

OP = Operand("float", "PLAIN", "float", 96, 96)
TEXTS = {"tiled": text.attention(Spec("tiled", "float", OP, OP, Options(causal=True), sg_rows=2)).torch,
         "vector": text.attention(Spec("vector", "float", OP, OP, Options(causal=True), rows=1)).torch}  # fmt: skip
CLASSIFY = text.classification(1).torch
COMBINE = text.combine("float", Options(splits=True, lse=True, sinks=True)).torch


def nonfinite_call(kernel):
    """Several tiles of keys, several slices of columns, two simdgroups a row, and values that are not finite."""
    q, k, v = (torch.randn(1, 1, n, 96, generator=torch.Generator().manual_seed(n)) for n in (12, 70, 71))
    v = v[:, :, :70]
    v[:, :, 60, 3] = float("nan")
    if kernel == "vector":
        return tilewise.attention(q[:, :, :1], k, v, causal=True, backend="metal")
    return tilewise.attention(q, k, v, causal=True, backend="metal")


@pytest.mark.parametrize(
    ("kernel", "number"), [(name, i) for name, source in TEXTS.items() for i in range(len(barriers(source)))]
)
def test_a_barrier_that_is_taken_out_is_missed(kernel, number):
    def change(source):
        return barriers(source)[number].without if f"kernel void {kernel}(" in source else source

    with simulator():
        nonfinite_call(kernel)  # as it should be: no fault
    with simulator(change=change), pytest.raises(Fault) as found:
        nonfinite_call(kernel)
    assert found.value.kind in ("race", "uninitialised")


def test_no_barrier_was_overlooked():
    assert {name: len(barriers(source)) for name, source in TEXTS.items()} == {"tiled": 6, "vector": 1}
    assert not barriers(COMBINE)
    assert not barriers(CLASSIFY)


@dataclass(frozen=True)
class Mutant:
    """A mistake, as replacements in the texts that hold them, and cases each of which must notice it."""

    name: str
    edits: tuple[tuple[str, str], ...]
    cases: tuple[Case, ...]

    def change(self, source):
        for old, new in self.edits:
            if old in source:
                source = mutate(source, old, new, source.count(old))
        return source


def mutant(name, *edits, cases):
    return Mutant(name, edits, tuple(cases))


BOTH = (Case(B=1, Lq=40, Lk=90), Case(B=1, Lq=1, Lk=90))  # tiled and vector
PAGES = Case(form="paged", B=4, Hkv=2, lengths=(1, 16, 70, 133), D=64, causal=True)
SEES = "n >= sees.lo && n < sees.hi"
MUTANTS = [
    mutant("softcap accepted and never applied", ("p.softcap * soft_tanh(s / p.softcap)", "s"),
           cases=[replace(c, softcap=5.0) for c in BOTH]),
    mutant("a tail read past the length and masked by -65504",
           ("n0 + r >= lo && n0 + r < hi &&", "n0 + r < p.kv_len &&"),
           (f"bool sees_it = {SEES};", f"bool sees_it = true; if (!({SEES})) x += -65504.0f;"),
           ("const int end = min(hi, tiles.hi * BK);", "const int end = p.kv_len;"),
           ("if (n < sees[r].lo || n >= sees[r].hi) continue;", ""),
           ("slope[r], s.offset + row.query - n) + bias;",
            "slope[r], s.offset + row.query - n) + (n < sees[r].lo || n >= sees[r].hi ? -65504.0f : 0.0f);"),
           cases=[replace(c, B=2, lengths=(37, 50)) for c in BOTH]),
    mutant("causal aligned to the top left", ("s.offset = p.q_offset;", "s.offset = 0;"),
           cases=[replace(c, causal=True) for c in (BOTH[0], replace(BOTH[1], Lq=2))]),
    mutant("window of W + 1", ("ahead - p.left", "ahead - p.left - 1"),
           cases=[replace(c, causal=True, window=7) for c in BOTH]),
    mutant("a classifier that looks at half of a tile's columns", ("i % p.tile_k;", "i % (p.tile_k / 2);"),
           cases=[Case(B=1, Lq=150, Lk=300, mask="qk", mask_kind=kind, pattern="blocks") for kind in ("bool", "f32")]),
    mutant("scale rounded to bfloat16", ("dot * p.scale;", "dot * float(bfloat(p.scale));"), cases=BOTH),
    mutant("ALiBi that rewards distance", ("s -= slope *", "s += slope *"),
           cases=[replace(c, H=6, alibi="h") for c in BOTH]),
    mutant("paged causal that compares with the row number",
           ("s.offset + row.query;", "(PAGE > 0 ? 0 : s.offset) + row.query;"),
           ("s.offset + row.query, s.kv_len", "(PAGE > 0 ? 0 : s.offset) + row.query, s.kv_len"),
           cases=[replace(PAGES, Lq=5), replace(PAGES, Lq=3)]),
    mutant("the mean of v", ("power(score[i / 2].thread_elements()[i % 2] - highest)", "1.0f"),
           ("power(x - highest)", "1.0f"), cases=BOTH),
    mutant("one mask plane for all heads", ("row.head * p.mask_h", "0"),
           cases=[replace(c, mask="hqk", mask_kind=kind) for c in BOTH for kind in ("bool", "f32")]),
    mutant("a mask's bias of -65504 taken for hidden",
           ("cell.bias) != 0xff800000u", "cell.bias) != 0xff800000u && cell.bias > -65504.0f"),
           cases=[replace(c, mask="hqk", mask_kind="f32", pattern="least") for c in BOTH]),
    mutant("a stale maximum", ("o[i].thread_elements()[0] *= alpha;", ";"), ("o[r][i] * alpha", "o[r][i]"), cases=BOTH),
    mutant("sinks dropped", ("bool has_sink, float sink) {", "bool has_sink, float sink) {\n  has_sink = false;"),
           cases=[replace(c, sinks=True) for c in BOTH]),
    mutant("KV head h % Hkv", ("head / p.group)", "head % (p.heads / p.group))"),
           cases=[Case(B=1, H=6, Hkv=2, Lq=40)]),
    mutant("pages in the order of the pool", ("t.table[s.b * p.table_b + n / PAGE]", "(n / PAGE)"),
           cases=[replace(PAGES, Lq=20), replace(PAGES, Lq=1)]),
    mutant("keys of the previous sequence", ("s.kv_first = t.cu_k[b];", "s.kv_first = max(t.cu_k[b] - 1, 0);"),
           cases=[Case(form="varlen", q_lengths=(33, 20), lengths=(40, 33)),
                  Case(form="varlen", q_lengths=(1, 1), lengths=(40, 33))]),
    mutant("one scale for each row", ("scales[c / group]", "scales[0]"),
           cases=[replace(c, D=64, k="int8/32", v="int8/32") for c in BOTH]),
    mutant("lse in base 2", ("top * LN2) + log(l)", "top * LN2) + log2(l)"), cases=BOTH),
    mutant("a hidden value that reaches a row as 0 * NaN",
           ("if (!is_finite(float(*at)))", "if (false)"),
           ("if (!cell.seen) continue;\n      bias = cell.bias;", "bias = cell.seen ? 0.0f : -3.0e38f;"),
           cases=()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("found", "case"), [(m, c) for m in MUTANTS for c in m.cases], ids=lambda x: getattr(x, "name", str(x))
)
def test_the_suite_rejects(found, case):
    with simulator(change=found.change), pytest.raises((Mismatch, Fault)):
        check_case(case, "metal")


def test_every_edit_is_one():
    """A replacement of what is not there would prove nothing."""
    every = [*TEXTS.values(), CLASSIFY, COMBINE]
    for found in MUTANTS:
        for old, new in found.edits:
            assert any(old in source for source in every), (found.name, old)
            assert old != new


@pytest.mark.parametrize("Lq", [1, 40])
def test_a_hidden_value_is_never_multiplied(Lq):
    """With the guards against 0 * NaN taken out, a NaN under a mask shows."""
    leaky = next(m for m in MUTANTS if "0 * NaN" in m.name)
    q, k, v = (torch.randn(1, 1, n, 32, generator=torch.Generator().manual_seed(n)) for n in (Lq, 60, 61))
    v = v[:, :, :60].clone()
    v[:, :, 50] = float("nan")
    mask = torch.arange(60) != 50
    with simulator():
        assert tilewise.attention(q, k, v, mask=mask[None], backend="metal").isfinite().all()
    with simulator(change=leaky.change):
        assert tilewise.attention(q, k, v, mask=mask[None], backend="metal").isnan().any()


@pytest.mark.parametrize(("old", "new"), [("plane % p.plane_heads * p.mask_h", "0"), ("head * p.states_h", "0")])
def test_one_tile_plane_for_all_heads_is_noticed(old, new):
    """Heads that see different halves of the keys."""
    q, k, v = (torch.randn(1, 2, 64, 32, generator=torch.Generator().manual_seed(n)) for n in range(3))
    mask = torch.stack([torch.arange(64) < 32, torch.arange(64) >= 32])[:, None].expand(2, 64, 64)
    want = tilewise.attention(q, k, v, mask=mask, backend="reference")
    for change, right in ((lambda source: source, True), (lambda source: source.replace(old, new), False)):
        with simulator(change=change):
            got = tilewise.attention(q, k, v, mask=mask, backend="metal")
        assert torch.allclose(got, want, atol=1e-4) is right


def forever(source):
    """Slices of columns that never come to an end past 256."""
    return source.replace("c0 < DP; c0 += DC", "c0 < DP; c0 += c0 < 256 ? DC : 0")


def attend_wide(change):
    q = torch.randn(1, 1, 33, 320)
    with simulator(change=change):
        tilewise.attention(q, q, q, backend="metal")


def test_a_head_dim_over_256_that_loops_forever_is_noticed():
    """In processes of their own: the right text ends, and the wrong one has not when twice as long has passed."""
    assert forever(TEXTS["tiled"]) != TEXTS["tiled"]
    spawn = multiprocessing.get_context("spawn")
    started = time.monotonic()
    right = spawn.Process(target=attend_wide, args=(str,))
    right.start()
    right.join()
    assert right.exitcode == 0
    wrong = spawn.Process(target=attend_wide, args=(forever,))
    wrong.start()
    try:
        wrong.join(2 * (time.monotonic() - started))
        assert wrong.is_alive()
    finally:
        wrong.kill()
        wrong.join()
