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
from tilewise.backends.hopper.mla.kernel import latent_decode
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
    # One thread arrives at an mbarrier for all of its warpgroup: after they have met.
    for loop in built.loops:
        last = ""
        for line in loop:
            if "SYNCS.ARRIVE" in line:
                assert last == "BAR"
            if met := re.search(r"BAR\.SYNC|HGMMA|DEPBAR|\bLDS|\bSTS", line):
                last = "BAR" if met[0] == "BAR.SYNC" else met[0]
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
        {"ahead": True}, {"named": True}, {"named": True, "p_buffers": 2, "prefetch": True},
        {"prefetch": True, "page": 16}, {"prefetch": True, "paged": False},
    ],
    ids=str,
)  # fmt: skip
def test_other_kernels_compile_without_spills_in_their_loops(given):
    check(**given)


@pytest.mark.parametrize("at_once", [2, 32])
def test_combining_compiles(at_once):
    latent, made = arguments(dependent=True)
    latent.at_once = at_once
    given = latent.combining(made) | {"ROWS": 8 // at_once or 1, "COLUMNS": min(512, 4096 // at_once)}
    built = build(combine, given, ("ROWS", "COLUMNS", "AT_ONCE", "DEPENDENT"), options=latent.combine_options)
    assert len(re.findall(r"LDG\.E\.128", built.sass)) >= 8  # all of a program's numbers are under way together


@pytest.mark.parametrize(("batch", "heads", "fragments"), [(128, 128, 2), (16, 16, 16), (1, 128, 32)])
def test_combining_programs_cover_every_number_once(batch, heads, fragments):
    latent = Latent(arguments(heads=heads)[0].spec, batch, heads, 1, 4096)
    assert latent.at_once == fragments
    assert latent.at_once * latent.rows * latent.columns == 4096
    assert latent.combiners * latent.rows * latent.columns == batch * heads * 512


def test_rows_that_lie_apart_are_not_prefetched():
    latent, _ = arguments(prefetch=True)
    q = torch.empty(4, 128, 1, 576, dtype=BF16, device="meta")
    cache = torch.empty(100, 64, 640, dtype=BF16, device="meta")[..., :576]
    with pytest.raises(Unsupported, match="640 apart"):
        latent.arguments(q, cache, q[..., :512], None, None, None, 1.0, latent.workspace("meta"))


@pytest.mark.parametrize("page", [48, 96, 1000])
def test_pages_that_no_copy_fits_are_refused(page):
    with pytest.raises(Unsupported, match=f"page_size is {page}"):
        arguments(page=page)


COMBINE = """
import sys, torch
from tilewise.backends.hopper.mla.combine import combine
from tilewise.testing.check import judge, largest_error
torch.manual_seed(0)


def size_of(pairs, parts):
    "Pairs of a run, as tile_scheduler.py has it."
    size, longest = -(-sum(pairs) // parts), max(pairs)
    other = -(-longest // (longest // size)) if size < longest else -(-size // longest) * longest

    def cuts(size):
        ends = [sum(pairs[: i + 1]) for i in range(len(pairs))]
        return sum((end - 1) // size - (end - n) // size for end, n in zip(ends, pairs, strict=True))

    return other if (other - size) * parts * 2 <= 7 * (cuts(size) - cuts(other)) else size


def runs(pairs, parts):
    "Of each part: (sequence, first pair, last pair)."
    size = size_of(pairs, parts)
    found = []
    for part in range(parts):
        at, mine, begin = part * size, [], 0
        for seq, n in enumerate(pairs):
            first, last = max(at, begin) - begin, min(at + size, begin + n) - begin
            if first < last:
                mine.append((seq, first, last))
            begin += n
        found.append(mine)
    assert sum(last - first for mine in found for _, first, last in mine) == sum(pairs)
    return found


def combined(x, w):
    "Parts [n, tiles, 64, 512] with lse [n, tiles, 64], of base 2, put together in their type; lse of base e."
    top = torch.logsumexp(w * 0.6931471805599453, 0)
    share = torch.exp2(w - torch.where(top.isinf(), 0, top / 0.6931471805599453))
    return (share[..., None] * x).sum(0), top


# Sequences of one length are not cut where that costs little; others are.
assert size_of([32] * 128, 66) == 64 and size_of([64] * 64, 66) == 64 and size_of([32] * 32, 33) == 32
assert size_of([256] * 16, 132) == 32 and size_of([512], 66) == 8
assert size_of([20 + i % 9 for i in range(128)], 66) == -(-sum(20 + i % 9 for i in range(128)) // 66)


for lengths, heads, q_len, head_rows, parts, AT_ONCE, ROWS, COLUMNS in (
    ([300, 0, 4000, 129], 5, 3, 8, 9, 2, 4, 512), ([20000], 64, 1, 64, 66, 32, 1, 128),
    ([1, 2, 3], 16, 1, 16, 2, 4, 2, 512), ([700] * 300, 2, 1, 2, 7, 2, 4, 512), ([5000, 10], 96, 2, 64, 3, 16, 1, 256),
):
    batch, queries = len(lengths), 64 // head_rows
    across = -(-heads // head_rows)
    tiles = across * -(-q_len // queries)
    pairs = [max(1, -(-n // 128)) for n in lengths]
    part_out = torch.full((2 * parts, tiles, 64, 512), float("nan"))
    part_lse = torch.full((2 * parts, tiles, 64), float("nan"))
    out = torch.full((batch, heads, q_len, 512), float("nan"))
    lse = torch.full((batch, heads, q_len), float("nan"))
    want, sums, plain, plain_sums = out.double(), lse.double(), out.clone(), lse.clone()
    pieces = {}
    places = torch.zeros(batch, dtype=torch.int32)
    for part, run in enumerate(runs(pairs, parts)):
        for i, (seq, first, last) in enumerate(run):
            alone = first == 0 and last == pairs[seq]
            x, w = torch.randn(tiles, 64, 512), torch.randn(tiles, 64) * 20
            if lengths[seq] == 0 or last == 2:
                x, w = x * 0, w * 0 - float("inf")  # rows that see none of these keys
            pieces.setdefault(seq, []).append((x, w, alone))
            places[seq] += (1 << 16) + (2 * part + (i > 0) if first == 0 else 0)
            if not alone:
                part_out[2 * part + (i > 0)], part_lse[2 * part + (i > 0)] = x, w
    for seq, found in pieces.items():
        x, w = (torch.stack([piece[i] for piece in found]) for i in (0, 1))
        o, top = combined(x.double(), w.double())
        plain_o, plain_top = combined(x, w)
        for h in range(heads):
            for l in range(q_len):
                tile = l // queries * across + h // head_rows
                row = l % queries * head_rows + h % head_rows
                want[seq, h, l], sums[seq, h, l] = o[tile, row], top[tile, row]
                plain[seq, h, l], plain_sums[seq, h, l] = plain_o[tile, row], plain_top[tile, row]
                if found[0][2]:  # one program had it all
                    out[seq, h, l], lse[seq, h, l] = want[seq, h, l], sums[seq, h, l]
    combine[(batch * -(-heads * q_len // ROWS) * (512 // COLUMNS),)](
        out, lse, part_out, part_lse, places, *out.stride()[:3], *lse.stride(), heads, q_len, head_rows, tiles,
        ROWS=ROWS, COLUMNS=COLUMNS, AT_ONCE=AT_ONCE, DEPENDENT=False,
    )
    judge("out", out, want, 2 * largest_error(plain, want), out.dtype)
    judge("lse", lse, sums, 2 * largest_error(plain_sums, sums), lse.dtype)
print("right")
"""


def test_fragments_are_combined_in_the_interpreter():
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", COMBINE]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert run.stdout.strip() == "right", run.stdout + run.stderr[-3000:]
