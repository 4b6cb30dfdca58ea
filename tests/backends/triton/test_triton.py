"""The Triton backend without a GPU: the conformance suite in Triton's interpreter, and its plain functions.

The interpreter must be chosen before Triton is imported, and it takes over the whole process: the suite runs in
processes of its own, each with a share of the cases. It multiplies bfloat16 wrongly: such cases are left to a GPU.
"""

import os
import random
import sys
from dataclasses import replace

import pytest
import torch

from interpreted import as_on, check, interpreted, names, sample, shares
from problem_space import changed, problem_of
from slow import slowly
from tilewise.backends import triton as backend
from tilewise.core.problem import MaskSpec
from tilewise.core.storage import PLAIN, stored_as
from tilewise.testing.cases import CASES, LATENT_ROWS
from tilewise.testing.properties import PROPERTIES

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from tilewise.backends.gpu.flags import classifies
from tilewise.backends.gpu.target import amd, nvidia
from tilewise.backends.triton import config, flipped_products, launch, operands, split_kv

# Slow in the interpreter, and like others but longer; and bfloat16.
LEFT_OUT = ("L1023", "Lk5000", "Lk1000-D576", "L255", "bf16")
INTERPRETED = [c for c in CASES + LATENT_ROWS if not any(word in str(c) for word in LEFT_OUT)]
FIRST = 28  # cases of the sample, which have every option; `make test` runs these
SHARES = 20  # of the cases that are not in the sample, about half a minute each
RUN = """
import sys, torch
from tilewise.testing import properties
from tilewise.testing.cases import CASES, LATENT_ROWS
from tilewise.testing.check import check_case
torch.set_num_threads(1)
work = {str(c): lambda c=c: check_case(c, "triton") for c in CASES + LATENT_ROWS}
work |= {name: lambda check=check: check("triton", "cpu") for name, check in properties.PROPERTIES.items()}
"""


def test_each_option_in_the_interpreter():
    cases = sample(INTERPRETED)[:FIRST]
    check(RUN, *cases)
    assert set().union(*map(names, cases)) == set().union(*map(names, INTERPRETED))


@pytest.mark.slow
def test_each_kind_of_option_in_the_interpreter():
    check(RUN, *sample(INTERPRETED)[FIRST:])


FEW_REPEATS = """
from tilewise.backends.gpu.semaphores import Semaphores
properties.SOME[:] = properties.SOME[2::4]  # splits, pages
taken = []

def take(self, device):
    if self not in taken:
        self.kept = torch.zeros(self.count, dtype=torch.int32)
        taken.append(self)
    return self.kept

def repeats(run=work["repeats"]):
    run()
    assert taken

Semaphores.take = take
work["repeats"] = repeats
"""


def test_repeats_in_the_interpreter():
    """With semaphores that are kept from call to call, as on a GPU: each call leaves them at 0."""
    check(RUN + FEW_REPEATS, "repeats")


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_conformance_in_the_interpreter(share):
    check(RUN, *shares(INTERPRETED, SHARES)[share])


@pytest.mark.slow
@pytest.mark.parametrize("name", PROPERTIES)
def test_properties_in_the_interpreter(name):
    check(RUN, name)


def test_interpreted_kernels_notice_a_wrong_result():
    """The runs above can fail: a window one key too wide is caught."""
    wide = """
import tilewise.backends.triton.launch as launch
init = launch.Launcher.__init__
def wide(self, plan, c, target):
    init(self, plan, c, target)
    self.sizes["left"] += 1
launch.Launcher.__init__ = wide
"""
    with pytest.raises(AssertionError, match="Mismatch"):
        check(wide + RUN, *(c for c in CASES if "window7" in str(c)))


WATCHED = """
from tilewise.backends.triton import launch
init = launch.Launcher.__init__
def watched(self, plan, c, on):
    assert on == other and c.stages <= 2 and c.BM >= 16
    init(self, plan, c, on)
launch.Launcher.__init__ = watched
"""


@pytest.mark.parametrize(
    ("gfx", "every"),
    [("gfx942", 4), *slowly(("gfx942", 1), ("gfx1100", 1), ("gfx1201", 1))],
)
def test_each_option_by_the_tiles_of_amd(gfx, every):
    """The same cases, cut as for AMD's GPUs."""
    cases = [c for c in sample(INTERPRETED) if not amd(gfx).too_wide(max(c.D, c.Dv), backward=False)]
    check(RUN + as_on(gfx) + WATCHED, *cases[: FIRST if every > 1 else None : every])


PIECES = """
import torch
from tilewise import Quantised, attention, paged_attention
from tilewise.backends.gpu import varlen_order
from tilewise.backends.triton import launch, split_kv
from tilewise.dispatch import call_cache, planner
torch.manual_seed(0)

# Splits combined by the last program and by a launch of their own, which is what a CUDA graph holds: the same bits.
inside = []
first = launch.Launcher.launch
def watched(self, r, t):
    inside.append(self.combines_inside)
    first(self, r, t)
launch.Launcher.launch = watched
q, k, v = torch.randn(2, 6, 1, 64), torch.randn(2, 2, 900, 64), torch.randn(2, 2, 900, 64)
results = []
for most in (split_kv.COMBINE_BYTES, 0):
    split_kv.COMBINE_BYTES = most
    call_cache.forget()
    planner.choose.cache_clear()
    results.append(attention(q, k, v, return_lse=True, sinks=torch.randn(6).mul(0).add(1), backend="triton"))
assert inside == [True, False], inside
assert (results[0].out == results[1].out).all() and (results[0].lse == results[1].lse).all()

# Sequences by their keys, longest first, equal ones as they come; tiles of query rows before each.
def ranked(q_lengths, k_lengths, total, BQ):
    cu = [torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in (q_lengths, k_lengths)]
    ranks = torch.full((2 * len(q_lengths) + 2,), -1, dtype=torch.int32)
    N = 1 << len(q_lengths).bit_length()
    varlen_order.sort_sequences[(1,)](cu[0], cu[1], None, ranks, len(q_lengths), total, VARLEN=True, BQ=BQ, N=N)
    return ranks.tolist()
assert ranked([5, 70, 0, 33], [9, 90, 1, 90], 120, 16) == [1, 3, 0, 2, 4, 0, 5, 8, 9, 9]
assert ranked([3], [3], 3, 16) == [0, 1, 0, 1]

# Quantised pages: groups that a head's halves visit out of turn, and values whose sizes are far apart.
for kind, D, page in (("int4", 256, 16), ("fp8_e4m3", 128, 8), ("int8", 64, 5)):
    q, k, v = torch.randn(2, 4, 1, D).half(), torch.randn(2, 2, 80, D), torch.randn(2, 2, 80, D)
    v[:, 0, :40] *= 2.0**-30
    v[0, 0, 60:] *= 2.0**9
    v[:, 1, 10:] *= 2.0**-9
    k, v = (Quantised.from_float(x, kind, 64) for x in (k, v))
    want = attention(q.float(), k.dequantise(), v.dequantise(), backend="reference").double()
    def pages(x):
        return x.transpose(1, 2).reshape(-1, page, 2, x.shape[-1])
    k, v = (Quantised(pages(x.data), pages(x.scales), kind, 64) for x in (k, v))
    table = torch.arange(160 // page, dtype=torch.int32).view(2, -1)
    got = paged_attention(q, k, v, table, torch.full((2,), 80, dtype=torch.int32), backend="triton").double()
    for b in range(2):
        for h in range(4):
            error = (got[b, h] - want[b, h]).norm() / want[b, h].norm()
            assert error < 1e-3, (kind, b, h, error)
print("fine")
"""


def test_pieces_in_the_interpreter():
    run = interpreted(PIECES)
    assert run.stdout == "fine\n", run.stdout + run.stderr[-2000:]


ROW_GROUPS = """
import sys, torch
from tilewise.testing.case import Case
from tilewise.testing.check import check_case
from tilewise.backends.triton import config
from tilewise.dispatch import call_cache, planner
torch.set_num_threads(1)
paged = dict(form="paged", B=3, Lq=1, lengths=(1, 40, 77), dtype="f16")
for case in (
    Case(Hkv=1, H=3, k="int8/64", v="int8/64", D=128, sinks=True, **paged),  # three heads: a column is idle
    Case(Hkv=2, H=8, k="fp8_e4m3/64", v="fp8_e4m3/64", D=128, page=32, softcap=5.0, **paged),
    Case(Hkv=2, H=2, k="int4/64", v="int4/64", D=256, split_size=32, **paged),
    Case(Hkv=2, H=8, k="int8/32", v="int8/32", D=128, **paged),  # 16 columns
    Case(Hkv=2, H=4, k="int4/32", v="int4/32", D=64, page=128, **paged),
    Case(H=2, Lq=4, Lk=77, k="int8/64", v="int8/64", D=128, dtype="f16", strides="sliced"),
):
    check_case(case, "triton")
    if case.D == 64:  # and in tiles of 64 keys
        config.SHORT_KEYS = 0
        call_cache.forget()
        planner.choose.cache_clear()
        check_case(case, "triton")
print("fine")
"""


def test_scale_groups_beside_one_another_in_the_interpreter():
    """With the case's own bound: twice torch's error."""
    run = interpreted(ROW_GROUPS)
    assert run.stdout == "fine\n", run.stdout + run.stderr[-2000:]


def problem(**changes):
    sizes = {
        "form": "dense", "device": torch.device("cuda"), "batch": 2, "heads": 8, "kv_heads": 8, "q_len": 512,
        "kv_len": 512, "head_dim": 64, "value_dim": 64, "q_dtype": torch.float16, "k_format": PLAIN[torch.float16],
        "v_format": PLAIN[torch.float16], "scale": 0.1, "q_offset": 0,
    }  # fmt: skip
    return problem_of(**(sizes | changes))


def test_it_refuses_the_cpu_without_the_interpreter():
    if "TRITON_INTERPRET" in os.environ:
        pytest.skip("the interpreter is on")
    assert backend.supports(problem(device=torch.device("cpu"))) == "runs on GPUs"


@pytest.mark.parametrize(
    ("columns", "least", "want"),
    [(1, 32, (32,)), (64, 32, (64,)), (72, 32, (64, 32)), (72, 64, (128,)), (96, 32, (64, 32)), (112, 32, (128,)),
     (192, 64, (128, 64)), (320, 64, (256, 64)), (576, 64, (512, 64)), (65, 32, (64, 32)), (33, 32, (64,))],
)  # fmt: skip
def test_chunks_cover_with_little_padding(columns, least, want):
    assert operands.chunks(columns, least) == want
    assert sum(want) >= columns


def test_every_chunk_of_a_quantised_head_lies_in_one_group():
    for kind, width in (("int8", 72), ("int8", 128), ("int4", 128), ("int4", 256), ("fp8_e4m3", 576)):
        for group in (32, 64, 128):
            op = operands.operand(problem(), width, stored_as(kind, group), True, BM=16)
            if not op.factored:
                continue
            for part in range(op.parts):
                start = part * op.columns
                for chunk in op.widths:
                    last = min(start + chunk, op.columns * (part + 1)) - 1
                    assert start // group == last // group, (kind, width, group)
                    start += chunk


def test_types_that_meet_lose_nothing():
    f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
    for q, k, want in (
        (f16, f16, "f16"),
        (bf16, f16, "f32"),
        (f16, bf16, "f32"),
        (f32, f16, "f32"),
        (bf16, bf16, "bf16"),
    ):
        assert operands.operand(problem(q_dtype=q), 64, PLAIN[k], True).work == want
    assert operands.operand(problem(q_dtype=f32), 64, PLAIN[f32], True).precision == "bf16x6"
    assert operands.operand(problem(q_dtype=f32, allow_tf32=True), 64, PLAIN[f32], True).precision == "tf32"


@pytest.mark.parametrize("width", [256, 264, 512, 576])
def test_long_sums_of_decode_are_rounded_on_the_way(width):
    f16 = PLAIN[torch.float16]
    op = operands.operand(problem(), width, f16, True, BM=16)
    assert op.rounds
    assert max(op.widths) <= operands.LONGEST_SUM
    assert width <= sum(op.widths) < width + 32
    assert not operands.operand(problem(), width, f16, False, BM=16).rounds
    assert not operands.operand(problem(), 128, f16, True, BM=16).rounds
    latent = problem(head_dim=576, value_dim=512, v_in_k=True)
    assert not operands.operand(latent, 576, f16, True, BM=16).rounds  # its chunks are V's
    assert operands.operand(problem(head_dim=256, value_dim=40, v_in_k=True), 256, f16, True, BM=16).rounds


@pytest.mark.parametrize("programs", [0, 1, 8, 32, 100, 128, 512])
@pytest.mark.parametrize("tiles", [5, 7, 32, 64, 256, 1000])
def test_splits_fill_the_processors(programs, tiles):
    """As few as fill the rounds of programs, none of them short."""
    places = 132

    def filled(splits):
        return programs * splits / (-(-programs * splits // places) * places) if programs else 0.0

    splits = split_kv.split_count(programs, tiles, places)
    assert 1 <= splits <= split_kv.MOST_SPLITS
    assert splits == 1 or tiles // splits >= 4
    assert all(filled(fewer) < min(filled(splits), 0.95) for fewer in range(1, splits))
    more = range(splits + 1, max(1, min(tiles // 4, split_kv.MOST_SPLITS, 8 * places // max(1, programs))) + 1)
    assert filled(splits) >= 0.95 or all(filled(other) <= filled(splits) + 1e-9 for other in more)


def test_split_size_fixes_the_splits_whatever_the_batch():
    for batch in (1, 7, 64):
        c = config.config_of(problem(batch=batch, q_len=1, kv_len=1000, split_size=100), nvidia(90))
        assert (c.splits, c.split_tiles) == (-(-1000 // c.BK), 1)
    long = problem(form="varlen", packed_q=True, total_q=100, q_len=1, split_size=100)
    assert config.config_of(long, nvidia(90)).splits == 1


@pytest.mark.parametrize("stored", ["f16", "int8", "int4"])
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("q_offset", ["end", 99])
def test_split_size_fixes_the_tiles_whatever_the_batch(stored, page_size, q_offset):
    """Alone, where the query stands behind all keys, and in a large batch with a longer sequence."""
    kind = dict.fromkeys(("k_format", "v_format"), stored_as(stored, 64))
    form = {"form": "paged", "page_size": page_size} if page_size else {}
    alone = problem(batch=1, q_len=1, kv_len=100, q_offset=q_offset, causal=True, split_size=512, **kind, **form)
    beside = replace(alone, batch=64, kv_len=4096)
    first, second = (config.config_of(p, nvidia(90)) for p in (alone, beside))
    assert replace(first, splits=second.splits) == second


def test_a_groups_heads_share_a_tile():
    for group in (1, 4, 3, 12, 128, 127):
        pack = flipped_products.pack_of(group)
        assert pack == max(n for n in range(1, 65) if group % n == 0)
    c = config.config_of(problem(q_len=1, heads=16, kv_heads=2), nvidia(90))
    assert c.pack == 8 <= c.BM


def test_masks_are_classified_unless_each_head_has_its_own_bias():
    for dtype, broadcast, want in (
        (torch.bool, (False,) * 4, True), (torch.float16, (True, False, False, False), True),
        (torch.float16, (False,) * 4, False),
    ):  # fmt: skip
        assert classifies(problem(mask=MaskSpec(dtype, broadcast))) is want
    assert not config.lists_tiles(problem(q_len=4, mask=MaskSpec(torch.bool, (False,) * 4)))


def test_planes_of_a_swizzle_group_fit_the_cache():
    p = problem(causal=True, batch=8, heads=32, kv_heads=32, kv_len=16384, head_dim=128, value_dim=128)
    c = config.config_of(p, nvidia(90))
    planes, size = config.swizzle(p, c), p.kv_len * 2 * 128 * p.k_format.dtype.itemsize
    assert planes * size <= config.L2_SWIZZLE < (planes + 1) * size
    assert config.swizzle(problem(), c) == 1


def test_short_calls_combine_their_splits_themselves():
    short = problem(batch=1, heads=32, kv_heads=8, q_len=1, kv_len=4096, head_dim=128, value_dim=128)
    for p, want in ((short, True), (replace(short, kv_len=65536), False), (replace(short, batch=64), False)):
        c = config.config_of(p, nvidia(90))
        assert split_kv.combines_inside(p, c) is (want and c.splits > 1)
    wide = problem(batch=1, heads=64, kv_heads=1, q_len=16, kv_len=4096, head_dim=512, value_dim=512)
    assert not split_kv.combines_inside(wide, config.config_of(wide, nvidia(90))), "too much for one program"


def test_quantised_caches_are_read_in_pairs_where_that_can_be():
    int4, int8 = stored_as("int4", 128), stored_as("int8", 32)
    one = problem(q_len=1, head_dim=128, value_dim=128, k_format=int4)
    for p, BM, pairs, want in ((one, 16, True, 2), (one, 64, True, 1), (one, 16, False, 1)):
        op = operands.operand(p, 128, int4, True, BM, nvidia(90), pairs)
        assert (op.unit, op.columns, op.widths) == (want, 64 // want, (64 // want,))
        columns = sorted(op.start(0, part) + op.unit * n for part in range(op.parts) for n in range(op.widths[0]))
        assert columns == list(range(128)), "every column once"
    assert operands.operand(one, 64, int8, True, 16, nvidia(90), True).unit == 1, "groups of 32"


def paged(page, **changes):
    return problem(form="paged", page_size=page, kv_lengths=True, q_offset="end", kv_len=4096, **changes)


def stored(kind, group=64, **changes):
    return dict.fromkeys(("k_format", "v_format"), stored_as(kind, group)) | {"q_len": 1} | changes


@pytest.mark.parametrize(
    ("D", "page", "lookup"),
    [(64, 128, "tile"), (128, 128, "tile"), (256, 64, "tile"), (512, 32, "tile"), (64, 16, "pages"), (128, 16, "pages"),
     (256, 1, "pages"), (128, 24, "rows"), (128, 5, "rows")],
)  # fmt: skip
def test_whole_tiles_or_pages_are_read_like_a_contiguous_cache(D, page, lookup):
    sizes = {"q_len": 1, "head_dim": D, "value_dim": D}
    p, one = paged(page, **sizes), problem(kv_len=4096, **sizes)
    c = config.config_of(p, nvidia(90))
    spec = config.spec(p, c, nvidia(90))
    assert (spec.lookup, spec.prefetch) == (lookup, lookup != "rows")
    assert config.prefetches_pages(p, c) is spec.prefetch
    like = config.config_of(one, nvidia(90))
    assert ((c.BM, c.BK, c.splits) == (like.BM, like.BK, like.splits)) is (lookup != "rows")


def test_where_pages_are_not_prefetched():
    wide = paged(16, q_len=1, head_dim=512, value_dim=512)
    spec = config.spec(wide, config.config_of(wide, nvidia(90)), nvidia(90))
    assert (spec.lookup, spec.prefetch) == ("tile", False)
    assert config.programs_at_once(wide, config.config_of(wide, nvidia(90))) == 2, "there is room for two"
    many = paged(64)
    assert config.spec(many, config.config_of(many, nvidia(90)), nvidia(90)).prefetch, "prefill"
    small = config.spec(paged(16), config.config_of(paged(16), nvidia(90)), nvidia(90))
    assert (small.lookup, small.prefetch) == ("rows", False), "prefill"
    masked = replace(many, mask=MaskSpec(torch.bool, (False,) * 4))
    assert not config.spec(masked, config.config_of(masked, nvidia(90)), nvidia(90)).prefetch, (
        "a list does not go tile by tile"
    )
    one = problem(q_len=1)
    assert config.spec(one, config.config_of(one, nvidia(90)), nvidia(90)).lookup == "", "no pages"


@pytest.mark.parametrize(
    ("page", "kind", "changes", "want"),
    [(16, "fp8_e4m3", {}, "flipped"), (128, "int8", {}, "flipped"), (16, "int4", {}, "flipped"),
     (0, "int4", {}, "flipped"), (0, "fp8_e4m3", {}, "flipped"), (0, "int8", {"head_dim": 64}, "flipped"),
     (0, "int8", {"head_dim": 64, "batch": 4}, "flipped"),
     (16, "int8", {"q_len": 2}, "flipped"), (16, "int8", {"q_len": 2, "causal": True}, "one warp"),
     (0, "int8", {"q_len": 2, "causal": True}, "one warp"), (16, "int4", {"heads": 128}, "one warp"),
     (0, "int8", {"heads": 128}, "four warps"), (16, "int8", {"head_dim": 512}, "four warps"),
     (16, "int8", {"q_dtype": torch.float32}, "four warps"), (0, "fp8_e4m3", {"head_dim": 256}, "flipped")],
)  # fmt: skip
def test_quantised_caches_are_read_by_programs_of_one_warp(page, kind, changes, want):
    sizes = stored(kind, **({"heads": 32, "head_dim": 128} | changes))
    sizes["value_dim"] = sizes["head_dim"]
    p = paged(page, **sizes) if page else problem(kv_len=4096, **sizes)
    c = config.config_of(p, nvidia(90))
    spec = config.spec(p, c, nvidia(90))
    assert ("flipped" if spec.flip else "one warp" if c.warps == 1 else "four warps") == want
    assert c.pack * p.q_len <= c.BM
    assert spec.flip is (c.BM == 8)
    assert spec.flip <= spec.folded
    assert spec.folded is (not sizes.get("causal") and "q_dtype" not in sizes), "hidden keys must not set a unit"


@pytest.mark.parametrize(
    ("kind", "group", "changes", "want"),
    [("fp8_e4m3", 64, {}, 2), ("int8", 64, {"heads": 24}, 2), ("int8", 128, {}, 1),
     ("int8", 64, {"heads": 64}, 1), ("int8", 32, {}, 4), ("int4", 32, {}, 4),
     ("int4", 64, {}, 1), ("int8", 32, {"heads": 64}, 1), ("int8", 32, {"head_dim": 64}, 2),
     ("int4", 64, {"heads": 16, "head_dim": 256}, 4), ("int8", 32, {"head_dim": 96}, 1),
     ("int8", 64, {"q_len": 2, "heads": 16}, 2), ("int8", 64, {"value_dim": 64}, 1)],
)  # fmt: skip
def test_scale_groups_that_cut_rows_have_columns_of_their_own(kind, group, changes, want):
    sizes = stored(kind, group, **({"heads": 32, "head_dim": 128} | changes))
    p = paged(16, **({"value_dim": sizes["head_dim"]} | sizes))
    c = config.config_of(p, nvidia(90))
    spec = config.spec(p, c, nvidia(90))
    assert spec.row_groups == want
    assert spec.flip
    assert spec.row_groups * c.pack * p.q_len <= c.BM or spec.row_groups == 1
    assert config.query_tiles(p, c) == p.batch * -(-p.q_len // (c.BM // spec.row_groups // c.pack))
    for op in (spec.keys, spec.values):
        if spec.row_groups > 1:
            assert (len(op.widths), op.groups, op.unit) == (1, 1, 2), "rows are read whole and in pairs"


@pytest.mark.parametrize("sizes", [(1, 8192), (3, 5000), (8, 4096), (64, 1024), (200, 300)])
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_packed_decode_is_cut_as_the_unpacked_form(kind, sizes):
    """One query of each sequence: the same tile and as many splits."""
    more = {"batch": sizes[0], "heads": 32, "kv_heads": 8, "head_dim": 128, "value_dim": 128, "q_len": 1}
    p = replace(paged(16, **(stored(kind, **more) if kind != "bf16" else more)), kv_len=sizes[1])
    packed = replace(p, packed_q=True, total_q=p.batch)
    for arch in (80, 90, 120):
        assert config.config_of(packed, nvidia(arch)) == config.config_of(p, nvidia(arch))


def test_tiles_with_rows_are_all_counted():
    """Whatever the packed sequences are, and never more than the grid has."""
    draw = random.Random(0)
    for _ in range(200):
        lengths = [draw.randint(0, draw.choice((1, 3, 9))) for _ in range(draw.randint(1, 20))]
        p = replace(paged(16, batch=len(lengths), q_len=max(1, *lengths)), packed_q=True, total_q=max(1, sum(lengths)))
        c = config.config_of(p, nvidia(90))
        BQ = config.tile_queries(p, c)
        assert sum(-(-n // BQ) for n in lengths) <= config.busy_tiles(p, c) <= config.query_tiles(p, c)


def test_programs_of_one_warp_fill_the_processors():
    for batch, kv_heads, kind in ((64, 8, "int8"), (64, 8, "int4"), (16, 8, "int8"), (16, 8, "int4"), (16, 32, "int8")):
        p = paged(16, **stored(kind, batch=batch, heads=32, kv_heads=kv_heads, head_dim=128, value_dim=128))
        c = config.config_of(p, nvidia(90))
        programs = config.query_tiles(p, c) * (p.heads // c.pack) * c.splits
        places = 132 * config.programs_at_once(p, c)
        assert c.warps == 1 < config.programs_at_once(p, c)
        assert programs / (-(-programs // places) * places) >= 0.95
    few = replace(p, batch=1, kv_len=1 << 20)
    assert config.config_of(few, nvidia(90)).splits <= split_kv.MOST_SPLITS // 2, "combining takes time too"


def test_a_kept_tile_of_flipped_products_is_not_used_where_keys_are_hidden():
    p = paged(16, **stored("int8", head_dim=128, value_dim=128))
    flipped = config.tile(p, nvidia(90))
    assert flipped.BM == 8
    assert config.config_of(p, nvidia(90), flipped).BM == 8
    assert config.config_of(changed(p, q_len=3, causal=True), nvidia(90), flipped).BM == 16


def test_one_query_behind_all_keys_needs_no_causal_rule():
    one = {"q_len": 1, "causal": True, "kv_len": 100}
    for p, want in ((paged(16, q_len=1, causal=True), False), (paged(16, q_len=2, causal=True), True),
                    (paged(16, q_len=1, causal=True, packed_q=True, total_q=2), True),
                    (problem(**one, q_offset=99), False), (problem(**one, q_offset=98), True),
                    (problem(**one, q_offset="rows"), True),
                    (problem(**one, q_offset="end", kv_lengths=True), False)):  # fmt: skip
        spec = config.spec(p, config.config_of(p, nvidia(90)), nvidia(90))
        assert spec.rules.causal is want
        free = changed(p, causal=False)
        assert spec == config.spec(free, config.config_of(p, nvidia(90)), nvidia(90)) or want


def test_sums_wait_for_the_end_where_no_tile_is_done_twice():
    for p, want in ((problem(q_len=1), True), (problem(q_len=1, causal=True), True), (problem(), False),
                    (problem(q_len=3, causal=True), False), (problem(q_len=1, head_dim=512, value_dim=512), True),
                    (problem(q_len=1, q_dtype=torch.float32, head_dim=576, value_dim=576), True)):  # fmt: skip
        spec = config.spec(p, config.config_of(p, nvidia(90)), nvidia(90))
        assert (spec.sum_columns > 0) is want
        assert not want or spec.BK % spec.sum_columns == 0


def test_int4_keys_are_biased_where_no_tile_is_done_twice_and_sums_are_short():
    int4 = stored_as("int4", 128)
    one = problem(q_len=1, head_dim=128, value_dim=128, k_format=int4, v_format=int4)
    for p, arch, pairs, want in ((one, 90, True, True), (one, 0, True, True), (one, 90, False, False),
                                 (changed(one, q_len=3, causal=True), 90, True, False),
                                 (replace(one, head_dim=256), 90, True, False),
                                 (replace(one, q_dtype=torch.float32), 90, True, False)):  # fmt: skip
        spec = config.spec(p, config.config_of(p, nvidia(arch)), nvidia(arch), pairs)
        assert spec.keys.biased is want
        assert spec.keys.rescaled or not want
        assert not spec.values.biased


def test_d512_is_shared_by_two_programs():
    for causal in (False, True):
        p = problem(head_dim=512, value_dim=512, causal=causal)
        c = config.config_of(p, nvidia(90))
        assert c.slices == 2
        assert config.spec(p, c, nvidia(90)).values.widths == (256,)
    assert config.config_of(problem(head_dim=576, value_dim=512), nvidia(90)).slices == 1
    assert config.config_of(problem(head_dim=512, value_dim=512), nvidia(80)).slices == 1, "too little shared memory"


@pytest.mark.parametrize(
    ("strides", "want"), [((72, 64, 8), 8), ((16, 32, 1600), 16), ((4, 8, 16), 4), ((73, 8, 16), 1), ((0, 0, 16), 16)]
)
def test_what_all_strides_are_multiples_of(strides, want):
    x = torch.empty_strided((1, 1, 1, 8), (*strides, 1))
    assert launch.alignment(x, None) == want
