"""Latent decode on Hopper without a GPU: its kernels compiled ahead of time, and how fragments are combined."""

import re
import sys
from dataclasses import replace

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)


from aot import SHARED, tensors_of
from hopper_aot import build
from interpreted import interpreted
from problem_space import changed, problem_of
from tilewise.backends import hopper
from tilewise.backends.gpu.gluon import gl, gluon, mbarrier
from tilewise.backends.gpu.launch_program import Workspaces
from tilewise.backends.gpu.target import nvidia
from tilewise.backends.hopper.fwd import config as prefill
from tilewise.backends.hopper.mla import config
from tilewise.backends.hopper.mla.combine import combine
from tilewise.backends.hopper.mla.kernel import latent_decode
from tilewise.backends.hopper.mla.launch import Launcher
from tilewise.core.options import Options
from tilewise.core.problem import MaskSpec, Selection
from tilewise.core.storage import PLAIN, stored_as
from tilewise.dispatch import planner
from tilewise.validation import calls

BF16, F16 = torch.bfloat16, torch.float16
META = Workspaces(torch.device("meta"))
DESCRIBED = ("q", "q_rope", "k", "k_rope", "out")  # to TMA


def problem(heads=128, q_len=1, page=64, paged=True, dtype=BF16, lse=True, lengths=True, **changes):
    sizes = {
        "form": "paged" if paged else "dense", "device": torch.device("cuda"), "batch": 4, "heads": heads,
        "kv_heads": 1, "q_len": q_len, "kv_len": 1280, "head_dim": 576, "value_dim": 512, "q_dtype": dtype,
        "k_format": PLAIN[dtype], "v_format": PLAIN[dtype], "scale": 0.1, "page_size": page if paged else 0,
        "v_in_k": True, "causal": True, "q_offset": "end", "kv_lengths": paged or lengths, "return_lse": lse,
    }  # fmt: skip
    return problem_of(**(sizes | changes))


def launcher(p, **ways):
    made = Launcher(p, nvidia(90))
    made.spec = replace(made.spec, **ways)
    return made


def arguments(ways=None, **given):
    """Arguments of the kernels, on no device."""
    p = problem(**given)
    made, t = launcher(p, **(ways or {})), tensors_of(p)
    t.v = t.k[..., :512]
    return made, made.arguments(t, META)


def check_arrivals(built):
    """One thread arrives at an mbarrier for all of its warpgroup: after they have met."""
    for loop in built.loops:
        last = ""
        for line in loop:
            if "SYNCS.ARRIVE" in line:
                assert last == "BAR"
            if met := re.search(r"BAR\.SYNC|HGMMA|DEPBAR|\bLDS|\bSTS", line):
                last = "BAR" if met[0] == "BAR.SYNC" else met[0]


def check(ways=None, spills=0, **given):
    latent, made = arguments(ways, **given)
    built = build(latent_decode, made, ("S",))
    assert built.shared <= SHARED[90]
    assert "serialized" not in built.report
    assert len(built.loops) == 2  # of each consumer
    for loop in built.loops:
        text = "\n".join(loop)
        assert len(re.findall(r"HGMMA\.64x64x16", text)) == 36
        assert len(re.findall(r"HGMMA\.64x256x16", text)) == 8
        assert len(re.findall(r"\b(STL|LDL)\b", text)) <= spills
    # Consumer 1 waits for P0 V0 after its exponentials. A wait that the kernel does not ask for stands where outputs
    # are rescaled, which is seldom: between a branch and the place that it leads to.
    late = ["\n".join(loop) for loop in built.loops if any("gsb0, 0x1" in x for x in loop)]
    assert len(late) == 1
    before, _, after = late[0].partition("gsb0, 0x1")
    assert after.split("gsb0, 0x0")[0].count("MUFU.EX2") >= 32
    assert built.report.count("injected") == before.count("gsb0, 0x0") == 1
    assert before.split("gsb0, 0x0")[0].rsplit("BRA", 1)[1].count("FMUL") == 128
    check_arrivals(built)
    # Barriers lie beyond the tiles, and each is one that somebody waits at.
    places = built.barrier_places
    assert len(places) == 2 + 2 * latent.spec.pieces + 4 + 2 + 1 + 2 + 1  # q, pieces, halves, ropes, S, weights, sums
    assert min(places) >= 3 * 64 * 576 * 2 + 64 * 64 * 2


def test_the_kernel_compiles_without_spills_in_its_loops():
    check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "ways"),
    [
        ({"q_len": 4, "heads": 16, "sinks": True}, {}), ({"page": 16, "spills": 2}, {}),
        ({"page": 256}, {}),
        ({"paged": False, "lengths": False, "q_offset": 1279}, {}), ({"dtype": F16, "lse": False, "q_len": 2}, {}),
        ({}, {"width": 64}), ({}, {"width": 128}), ({}, {"prefetch": False}),
    ],
    ids=str,
)  # fmt: skip
def test_other_kernels_compile_without_spills_in_their_loops(given, ways):
    check(ways, **given)


@pytest.mark.parametrize(
    "given", [{}, {"page": 16, "sinks": True}, {"heads": 5, "q_len": 2, "dtype": F16, "paged": False}], ids=str
)
def test_few_rows_are_the_columns_of_products(given):
    latent, made = arguments(**({"heads": 16} | given))
    built = build(latent_decode, made, ("S",))
    assert latent.spec.rows == 16
    assert built.shared <= SHARED[90]
    assert "serialized" not in built.report
    assert len(built.loops) == 2
    for loop in built.loops:
        text = "\n".join(loop)
        assert len(re.findall(r"HGMMA\.64x16x16", text)) == 36 + 32  # S, and 8 tiles of 64 columns of O
        assert not re.search(r"\b(STL|LDL)\b", text)
    check_arrivals(built)


@gluon.jit
def one_barrier_too_many(X, LAYOUT: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [1, 1], LAYOUT)
    idle = gl.allocate_shared_memory(gl.int64, [1, 1], LAYOUT)
    mbarrier.init(made.index(0), count=1)
    mbarrier.init(idle.index(0), count=1)
    mbarrier.arrive(made.index(0), count=1)
    mbarrier.wait(made.index(0), 0)
    gl.store(X, 1)


def test_a_barrier_that_nobody_waits_at_is_found():
    """So that `build` finds none in any kernel that these tests compile."""
    given = {"X": torch.empty(1, dtype=torch.int32, device="meta"), "LAYOUT": mbarrier.MBarrierLayout()}
    with pytest.raises(AssertionError, match="nobody waits at"):
        build(one_barrier_too_many, given, ("LAYOUT",))


def test_the_last_program_of_a_sequence_combines_few_rows_of_few_fragments():
    for fields, inside in (
        ({"batch": 128, "kv_len": 4096}, True),
        ({"batch": 128, "kv_len": 1 << 17}, False),  # one sequence may have nearly all keys
        ({"batch": 16, "kv_len": 32768}, False),
        ({"batch": 128, "kv_len": 4096, "heads": 17}, False),
    ):
        p = problem(**({"heads": 16} | fields))
        made, t = launcher(p), tensors_of(p)
        t.v = t.k[..., :512]
        assert made.spec.inside is inside
        assert (made.arguments(t, META)["COUNTERS"] is not None) is inside
        assert ("the last program of a sequence combines it" in config.notes(made.config)) is inside


def test_no_sequence_has_more_fragments_than_were_reckoned_with():
    for batch, pairs, splits in ((128, 32, 132), (3, 5, 132), (128, 1024, 132), (1, 7, 3)):
        p = problem(16, batch=batch, kv_len=128 * pairs)
        size = -(-(pairs + batch - 1) // splits)  # of runs, where all others are as short as can be
        cuts = {start: len({(start + n) // size for n in range(pairs)}) for start in range(batch)}
        assert max(cuts.values()) <= config.most_fragments(p, splits)


def test_rows_that_are_many_are_not_few():
    for heads, q_len, rows in ((16, 1, 16), (8, 2, 16), (5, 2, 16), (17, 1, 64), (16, 2, 64), (5, 3, 64), (1, 16, 16)):
        p = problem(heads, q_len)
        assert config.spec(p, config.config_of(p, nvidia(90))).rows == rows
    p = chosen(heads=16)
    assert config.spec(p, config.config_of(p, nvidia(90))).rows == 64


def chosen(count=300, fp8=False, **given):
    """A problem with key indices."""
    formats = {"k_format": stored_as("fp8_latent"), "v_format": stored_as("fp8_latent")} if fp8 else {}
    return problem(selection=Selection(count), **(formats | given))


def arguments_by_indices(p, **ways):
    made, t = launcher(p, **ways), tensors_of(p)
    t.v, t.key_indices = t.k, torch.empty(p.batch, 1, p.q_len, p.selection.count, dtype=torch.int32, device="meta")
    return made.arguments(t, META)


def built_by_indices(p, **ways):
    built = build(latent_decode, arguments_by_indices(p, **ways), ("S",))
    assert built.shared <= SHARED[90]
    assert len(built.loops) == 2
    return built


def test_rows_are_gathered_by_16_bytes_and_no_loop_spills():
    built = built_by_indices(chosen(paged=False, lengths=False, q_len=40, q_offset=1240))
    assert "serialized" not in built.report
    assert len(re.findall(r"LDGSTS\.E\.BYPASS\.128", built.sass)) == 2 * 9 * 4
    for loop in built.loops:
        assert not re.search(r"\b(STL|LDL)\b", "\n".join(loop))


@pytest.mark.slow
def test_rows_in_float8_are_loaded_by_16_bytes_and_products_do_not_wait():
    built = built_by_indices(chosen(fp8=True))
    assert not re.search(r"LDG\.E\.U8", built.sass)
    assert len(re.findall(r"LDG\.E\.128", built.sass)) >= 2 * 8 * 2
    assert len(re.findall(r"E4M3\.UNPACK", built.sass)) == 2 * 8 * 16
    assert "serialized" not in built.report
    for loop in built.loops:
        text = "\n".join(loop)
        assert len(re.findall(r"HGMMA\.64x64x16", text)) == 36
        assert len(re.findall(r"HGMMA\.64x128x16", text)) == 16
        assert len(re.findall(r"WARPGROUP\.DEPBAR", text)) == 7  # 5 of the scores, 2 of the values
        assert not re.search(r"\b(STL|LDL)\b", text)
    check_arrivals(built)
    # A register that the producer has to spill comes back behind all loads that are under way.
    widening = built.sass[built.sass.index("E4M3.UNPACK") : built.sass.rindex("E4M3.UNPACK")]
    assert not re.search(r"\b(STL|LDL)\b", widening)


@pytest.mark.parametrize("batch", [1, 128])
@pytest.mark.parametrize("sinks", [False, True])
def test_combining_compiles(batch, sinks):
    latent, made = arguments(batch=batch, sinks=sinks)
    constants = latent.combining.constants
    built = build(combine, {name: (made | constants)[name] for name in combine.arg_names}, tuple(constants))
    assert len(re.findall(r"LDG\.E\.128", built.sass)) >= 8  # all of a program's numbers are under way together


@pytest.mark.parametrize("batch", [1, 2, 16, 128, 500])
@pytest.mark.parametrize("heads", [1, 5, 16, 96, 128])
@pytest.mark.parametrize("q_len", [1, 2, 4, 16])
def test_programs_cover_every_row_and_number(batch, heads, q_len):
    c = config.config_of(problem(heads, q_len, batch=batch), nvidia(90))
    assert c.head_rows & (c.head_rows - 1) == 0
    assert c.tiles * 64 >= heads * q_len
    assert c.splits * c.tiles <= max(132, c.tiles)
    assert c.at_once * c.rows * c.columns == config.COMBINED
    assert c.combiners * c.rows * c.columns >= batch * heads * q_len * 512
    assert (c.combiners - 1) * c.rows * c.columns < batch * (heads * q_len + c.rows - 1) * 512
    assert 2 * c.splits < 1 << 16  # a place among partials has 16 bits


def test_programs_that_share_keys_prefetch_them():
    for heads, q_len in ((16, 1), (64, 1), (16, 4), (128, 1), (16, 8)):
        p = problem(heads, q_len)
        assert config.spec(p, config.config_of(p, nvidia(90))).prefetch is (heads * q_len > 64)


def test_rows_that_lie_apart_are_not_prefetched():
    p = problem()
    t = tensors_of(p)
    for gap in (0, 64):
        t.k = torch.empty(100, 64, 1, 576 + gap, dtype=BF16, device="meta").transpose(1, 2)[..., :576]
        made = launcher(p)
        assert made.arguments(t, META)["S"].prefetch is (gap == 0)


@pytest.mark.parametrize(
    ("batch", "q_len", "splits", "size", "cut"),
    [(1, 4096, 66, 1008, False), (128, 1, 64, 32, False), (32, 1, 64, 8, True), (1, 1, 16, 1, True)],
)
def test_queries_with_indices_are_cut_where_that_is_faster(batch, q_len, splits, size, cut):
    c = config.config_of(chosen(2048, batch=batch, q_len=q_len), nvidia(90))
    assert (c.tiles, c.sequences, c.splits, c.size, c.cut) == (2, batch * q_len, splits, size, cut)
    assert c.splits * c.size >= c.sequences * 16
    assert (c.partial_rows > 0) is cut


def test_a_cache_that_is_too_large_to_gather_from_is_refused():
    """When it is planned (below, among `REFUSED`): other backends serve it."""
    p = chosen()
    assert config.refusal(p) is None
    assert config.refusal(replace(problem(), large_kv=True)) is None, "without key indices"
    q = torch.empty(1, 128, 1, 576, dtype=BF16, device="meta")
    indices = torch.empty(1, 1, 9, dtype=torch.int32, device="meta")
    for pages in (1 << 18, 1 << 19):  # 18 and 36 GiB
        k = torch.empty(pages, 64, 1, 576, dtype=BF16, device="meta")
        tables = (torch.empty(1, 8, dtype=torch.int32, device="meta"), torch.empty(1, dtype=torch.int32, device="meta"))
        made = calls.paged(q, k, k[..., :512], *tables, Options(key_indices=indices)).problem
        assert made.large_kv == (pages == 1 << 19)


REFUSED = {
    "without key indices": {"k_format": stored_as("fp8_latent"), "v_format": stored_as("fp8_latent")},
    "another type than bfloat16": {
        "k_format": stored_as("fp8_latent"),
        "v_format": stored_as("fp8_latent"),
        "selection": Selection(9),
        "dtype": F16,
    },
    "block indices": {"selection": Selection(9, 64)},
    "32 GiB": {"selection": Selection(9), "large_kv": True},
    "types": {"dtype": torch.float32},
    "queries": {"q_len": 17},
    "packed": {"packed_q": True, "total_q": 4},
    "windows": {"window": (9, None)},
    "chunks": {"chunk": 64},
    "last positions": {"q_offset": 3},
    "masks": {"mask": MaskSpec(torch.bool, (True, True, False, False))},
    "softcap": {"softcap": 5.0},
    "ALiBi": {"alibi": True},
    "split_size": {"split_size": 64},
    "positive": {"scale": -0.5},
    "pages of 48": {"page": 48},
    "pages of 96": {"page": 96},
    "pages of 8": {"page": 8},
    "16 bytes": {"aligned": False},
}


@pytest.fixture
def on_hopper(monkeypatch):
    """The planner as on an H200."""
    for module in (hopper, planner.load("triton")):
        monkeypatch.setattr(module, "target_of", lambda device: nvidia(90))
    planner.choose.cache_clear()
    yield
    planner.choose.cache_clear()


@pytest.mark.parametrize("word", REFUSED)
def test_what_is_refused_goes_to_triton_and_says_why(word, on_hopper):
    p = problem(**REFUSED[word])
    assert config.refusal(p).startswith("no latent decode with ")
    chosen = planner.choose(p)
    assert chosen.backend == "triton"
    assert word in chosen.passed_over[0][1]


@pytest.mark.parametrize(
    "given",
    [
        {}, {"heads": 16}, {"heads": 1, "q_len": 16}, {"dtype": F16, "lse": False}, {"page": 16}, {"page": 32},
        {"page": 256}, {"sinks": True}, {"causal": False, "q_offset": 3}, {"causal": False, "q_offset": "rows"},
        {"paged": False}, {"paged": False, "lengths": False, "q_offset": 1279},
        {"paged": False, "lengths": False, "q_offset": 1276, "q_len": 4},
        {"selection": Selection(300), "q_len": 40}, {"selection": Selection(300), "paged": False, "dtype": F16},
        {"selection": Selection(9), "k_format": stored_as("fp8_latent"), "v_format": stored_as("fp8_latent")},
    ],
    ids=str,
)  # fmt: skip
def test_latent_calls_are_decoded(given, on_hopper):
    plan = planner.choose(problem(**given))
    assert plan.backend == "hopper"
    assert plan.kernel.startswith("latent attention by key indices" if "selection" in given else "latent decode")
    assert "V read as part of K" in plan.notes
    assert plan.workspace_bytes < 64 << 20


def test_other_calls_are_not(on_hopper):
    for other in ({"v_in_k": False}, {"kv_heads": 2}, {"value_dim": 448}, {"head_dim": 512, "value_dim": 448}):
        p = problem(**other)
        assert not config.is_latent(p)
        chosen = planner.choose(p)
        assert chosen.backend == "triton"
        assert "latent" not in chosen.passed_over[0][1]
    long = changed(problem(paged=False, q_len=4096, kv_len=4096, q_offset=0, lengths=False), head_dim=512)
    assert prefill.refusal(long) is None
    assert planner.choose(long).kernel.startswith("prefill")


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


def with_sink(o, top, sink):
    "A row [512] and its lse with a sink's logit."
    both = torch.logaddexp(top, sink)
    return o * torch.exp(top - both) if both > -1e30 else o * 0, both


# Sequences of one length are not cut where that costs little; others are.
assert size_of([32] * 128, 66) == 64 and size_of([64] * 64, 66) == 64 and size_of([32] * 32, 33) == 32
assert size_of([256] * 16, 132) == 32 and size_of([512], 66) == 8
assert size_of([20 + i % 9 for i in range(128)], 66) == -(-sum(20 + i % 9 for i in range(128)) // 66)


for sinks, lengths, heads, q_len, head_rows, parts, AT_ONCE, ROWS, COLUMNS in (
    (True, [300, 0, 4000, 129], 5, 3, 8, 9, 2, 4, 512), (True, [5000, 10], 66, 2, 64, 3, 16, 1, 256),
    (False, [300, 0, 4000, 129], 5, 3, 8, 9, 2, 4, 512), (False, [20000], 20, 1, 64, 66, 32, 1, 128),
    (False, [1, 2, 3], 16, 1, 16, 2, 4, 2, 512), (False, [700] * 60, 2, 1, 2, 7, 2, 4, 512),
    (False, [5000, 10], 66, 1, 64, 3, 16, 1, 256),
):
    batch, queries = len(lengths), 64 // head_rows
    logits = torch.randn(heads) * 20 if sinks else None
    if sinks:
        logits[0], logits[1] = float("inf"), -float("inf")
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
                exact, rough = (o[tile, row], top[tile, row]), (plain_o[tile, row], plain_top[tile, row])
                if sinks:
                    exact, rough = with_sink(*exact, logits[h].double()), with_sink(*rough, logits[h])
                want[seq, h, l], sums[seq, h, l] = exact
                plain[seq, h, l], plain_sums[seq, h, l] = rough
                if found[0][2]:  # one program had it all
                    out[seq, h, l], lse[seq, h, l] = want[seq, h, l], sums[seq, h, l]
    combine[(batch * -(-heads * q_len // ROWS) * (512 // COLUMNS),)](
        out, lse, logits, part_out, part_lse, places, *out.stride()[:3], *lse.stride(), heads, q_len, 1, head_rows,
        tiles, ROWS=ROWS, COLUMNS=COLUMNS, AT_ONCE=AT_ONCE,
    )
    judge("out", out, want, 2 * largest_error(plain, want), out.dtype)
    judge("lse", lse, sums, 2 * largest_error(plain_sums, sums), lse.dtype)
print("right")
"""


def test_fragments_are_combined_in_the_interpreter():
    run = interpreted(COMBINE)
    assert run.stdout.strip() == "right", run.stdout + run.stderr[-3000:]
