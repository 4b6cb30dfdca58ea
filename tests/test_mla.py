"""Latent decode on Hopper without a GPU: its kernels compiled ahead of time, and how fragments are combined."""

import os
import re
import subprocess
import sys

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from aot import SHARED
from hopper_aot import build
from tilewise.backends.hopper.mla.combine import combine
from tilewise.backends.hopper.mla.entry import latent_decode
from tilewise.backends.hopper.mla.launch import Latent, spec_of
from tilewise.errors import Unsupported

BF16, F16 = torch.bfloat16, torch.float16


def arguments(heads=128, q_len=1, page=64, paged=True, dtype=BF16, lse=True, lengths=True, **ways):
    """Arguments of the kernel, on no device."""

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    q = empty(4, q_len, heads, 576).transpose(1, 2)
    cache = empty(100, page, 576) if paged else empty(4, 1000, 576)
    spec = spec_of(q, page, paged=paged, causal=True, lengths=lengths, lse=lse, **ways)
    latent = Latent(spec, 4, heads, q_len, 1000)
    out = empty(4, heads, q_len, 512)
    sums = empty(4, heads, q_len, dtype=torch.float32) if lse else None
    n = empty(4, dtype=torch.int32) if lengths else None
    table = empty(4, 20, dtype=torch.int32) if paged else None
    return latent, latent.arguments(q, cache, out, sums, n, table, 576**-0.5, latent.workspace("meta"))


def check(**given):
    latent, made = arguments(**given)
    built = build(latent_decode, made, ("S",))
    assert built.shared <= SHARED[90]
    assert "serialized" not in built.report
    assert "injected" not in built.report  # a wait that the kernel does not ask for
    assert len(built.loops) == 4  # of each consumer: pairs seen whole, and others
    for loop in built.loops:
        text = "\n".join(loop)
        assert len(re.findall(r"HGMMA\.64x64x16", text)) == 36
        assert len(re.findall(r"HGMMA\.64x256x16", text)) in (8, 12)  # 12: the last product of a fragment stands apart
        assert not re.search(r"\b(STL|LDL)\b", text)
    # Consumer 1 waits for P0 V0 after its exponentials.
    late = ["\n".join(loop) for loop in built.loops if any("gsb0, 0x1" in x for x in loop)]
    assert len(late) == 2
    for text in late:
        between = text.split("gsb0, 0x1")[1].split("gsb0, 0x0")[0]
        assert between.count("MUFU.EX2") >= 32
    # Barriers lie beyond the tiles, and each is one that somebody waits at.
    places = built.barrier_places
    assert len(places) == 2 + 2 * latent.spec.pieces + 4 + 2 + 1 + 2 + 1
    assert min(places) >= 3 * 64 * 576 * 2 + 64 * 64 * 2


def test_the_kernel_compiles_without_spills_in_its_loops():
    check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        {"heads": 16}, {"q_len": 4, "heads": 16}, {"page": 16}, {"page": 256}, {"paged": False, "lengths": False},
        {"dependent": True}, {"dtype": F16, "lse": False}, {"p_buffers": 2}, {"width": 64}, {"width": 256}, {"gate": 0},
    ],
    ids=str,
)  # fmt: skip
def test_other_kernels_compile_without_spills_in_their_loops(given):
    check(**given)


def test_combining_compiles():
    latent, made = arguments(dependent=True)
    for latent.rows in (1, 8):
        given = latent.combining(made)
        build(combine, given, ("ROWS", "AT_ONCE", "MOST", "DEPENDENT"), options=latent.combine_options)


@pytest.mark.parametrize("page", [48, 96, 1000])
def test_pages_that_no_copy_fits_are_refused(page):
    with pytest.raises(Unsupported, match=f"page_size is {page}"):
        arguments(page=page)


COMBINE = """
import sys, torch
from tilewise.backends.hopper.mla.combine import combine
torch.manual_seed(0)


def runs(pairs, parts):
    "Of each part: (sequence, first pair, last pair), as schedule.py has it."
    total = sum(pairs)
    found = []
    for part in range(parts):
        at, end, mine = part * total // parts, (part + 1) * total // parts, []
        begin = 0
        for seq, n in enumerate(pairs):
            first, last = max(at, begin) - begin, min(end, begin + n) - begin
            if first < last:
                mine.append((seq, first, last))
            begin += n
        found.append(mine)
    return found


for lengths, heads, q_len, head_rows, parts, ROWS in (
    ([300, 0, 4000, 129], 5, 3, 8, 9, 2), ([20000], 64, 1, 64, 66, 1), ([1, 2, 3], 16, 1, 16, 2, 8),
    ([700] * 300, 2, 1, 2, 7, 8), ([5000, 10], 96, 2, 64, 3, 4),
):
    batch, queries = len(lengths), 64 // head_rows
    across = -(-heads // head_rows)
    tiles = across * -(-q_len // queries)
    pairs = [max(1, -(-n // 128)) for n in lengths]
    part_out = torch.full((2 * parts, tiles, 64, 512), float("nan"))
    part_lse = torch.full((2 * parts, tiles, 64), float("nan"))
    out = torch.full((batch, heads, q_len, 512), float("nan"))
    lse = torch.full((batch, heads, q_len), float("nan"))
    want, sums = out.clone(), lse.clone()
    pieces = {}
    for part, run in enumerate(runs(pairs, parts)):
        for i, (seq, first, last) in enumerate(run):
            alone = first == 0 and last == pairs[seq]
            x, w = torch.randn(tiles, 64, 512), torch.randn(tiles, 64) * 20
            if lengths[seq] == 0 or last == 2:
                x, w = x * 0, w * 0 - float("inf")  # rows that see none of these keys
            pieces.setdefault(seq, []).append((x, w, alone))
            if not alone:
                part_out[2 * part + (i > 0)], part_lse[2 * part + (i > 0)] = x, w
    for seq, found in pieces.items():
        w = torch.stack([w for _, w, _ in found])
        top = torch.logsumexp(w.double() * 0.6931471805599453, 0)
        share = torch.exp2(w.double() - torch.where(top.isinf(), 0, top / 0.6931471805599453))
        o = (share[..., None] * torch.stack([x for x, _, _ in found]).double()).sum(0)
        for h in range(heads):
            for l in range(q_len):
                tile = l // queries * across + h // head_rows
                row = l % queries * head_rows + h % head_rows
                want[seq, h, l], sums[seq, h, l] = o[tile, row].float(), top[tile, row].float()
                if found[0][2]:  # one program had it all
                    out[seq, h, l], lse[seq, h, l] = want[seq, h, l], sums[seq, h, l]
    combine[(batch * tiles * (64 // ROWS),)](
        out, lse, part_out, part_lse, torch.tensor(lengths, dtype=torch.int32), *out.stride()[:3], *lse.stride(),
        batch, heads, q_len, 0, head_rows, tiles, parts, ROWS=ROWS, AT_ONCE=16 // ROWS, MOST=128, DEPENDENT=False,
    )
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, sums, rtol=1e-5, atol=1e-5)
print("right")
"""


def test_fragments_are_combined_in_the_interpreter():
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", COMBINE]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert run.stdout.strip() == "right", run.stdout + run.stderr[-3000:]
