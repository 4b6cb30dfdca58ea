"""Every plan fits its device: shared memory by a bound that the compiler confirms, registers by what a tile holds."""

import random
import sys
from dataclasses import replace

import pytest

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from aot import SHARED, attend_of, shared_of
from problem_space import BF16, F16, F32, draw
from test_triton_aot import DECODE, HOT, PAGED, count, loops, problem, quantised
from tilewise.backends.gpu.target import AMD, amd, nvidia
from tilewise.backends.triton import config, shared_memory

TARGETS = [*map(nvidia, sorted(SHARED)), *map(amd, AMD)]
MOST_REGISTERS = 176  # of 255 for a tile's output and scores; the rest is for q, keys and addresses


def check(p, target):
    """What a plan of `p` takes of a GPU; the share of its shared memory."""
    c = config.config_of(p, target)
    s = config.spec(p, c, target)
    bytes_needed = shared_memory.needed(p, c, s, target)
    assert bytes_needed <= target.shared_memory, (p, target, c)
    assert shared_memory.registers(c, s, target) <= MOST_REGISTERS, (p, target, c)
    assert c.pack * s.row_groups <= c.BM
    assert p.heads % c.pack == 0
    assert c.splits >= 1
    assert config.swizzle(p, c) >= 1
    if target.amd:
        assert c.stages <= 2
        assert c.BM >= 16, "fewer rows are no matrix instruction"
        assert not any((s.ptx, s.pdl, s.keys.fast, s.values.fast)), "NVIDIA's assembly"
        assert {s.keys.precision, s.values.precision} <= {"ieee", "bf16x3", "bf16x6"}
    queries = c.BM // s.row_groups // c.pack
    if p.selection is not None:
        queries = min(queries, p.selection.block)
    assert config.query_tiles(p, c) * queries >= p.batch * p.q_len or p.packed_q
    return bytes_needed / target.shared_memory


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_every_plan_fits(target):
    """A sample; benchmarks/h200/fits.py goes through 100,000 problems on each architecture."""
    chance = random.Random(target.arch)
    drawn = (draw(chance, indices=True) for _ in range(1500 if target.arch in (86, 90, 100) else 500))
    used = [check(p, target) for p in drawn if not target.too_wide(max(p.head_dim, p.value_dim), backward=False)]
    assert max(used) > (0.4 if target.amd else 0.9), "the sample does not come near the limit"


@pytest.mark.parametrize("arch", sorted(SHARED))
@pytest.mark.parametrize("heads", [16, 17, 32, 48, 64, 71, 128])
def test_wide_float32_heads_that_share_keys_fit(heads, arch):
    """Of 64 rows of D=576, q alone takes 144 KiB."""
    for D in (320, 512, 576):
        for changes in (DECODE, PAGED | {"page_size": 16}, DECODE | {"q_len": 16}):
            check(problem(D, dtype=F32, heads=heads, kv_heads=1, **changes), nvidia(arch))


def test_the_bound_can_fail():
    """What was planned before there was a bound."""
    p = problem(576, dtype=F32, heads=64, kv_heads=1, **DECODE)
    c = replace(config.config_of(p, nvidia(90)), BM=64, BK=16, warps=4, stages=2, pack=64)
    assert shared_memory.needed(p, c, config.spec(p, c, nvidia(90)), nvidia(90)) > nvidia(90).shared_memory


COMPILED = {
    "f32-D576-64 heads": (problem(576, dtype=F32, heads=64, kv_heads=1, **DECODE), (90,)),
    "f32-D576-paged": (problem(576, dtype=F32, heads=17, kv_heads=1, **PAGED, page_size=16), (90,)),
    "f32 over bf16": (problem(256, dtype=F32, kv=BF16, heads=64, kv_heads=1, **PAGED, page_size=24), (90,)),
    "bf16 over f16": (problem(512, kv=F16, heads=64, kv_heads=1, **DECODE), (90, 80)),
    "D576-64 heads": (problem(576, 512, heads=64, kv_heads=1, **DECODE), (90, 100)),
    "D256": (problem(256, causal=True), (90, 86)),
    "D576": (problem(576, 512, causal=True), (90, 120)),
    "fp8 of 32": (problem(192, heads=64, kv_heads=1, **DECODE, **quantised("fp8_e4m3", 32)), (89,)),
    "int4 of 32": (problem(96, causal=True, **quantised("int4", 32)), (90, 80)),
    "decode-D128": (problem(**DECODE), (90, 86)),
}


@pytest.mark.parametrize("name", COMPILED)
def test_the_compiler_takes_no_more_than_the_bound(name):
    p, archs = COMPILED[name]
    for arch in archs:
        c = config.config_of(p, nvidia(arch))
        assert (
            shared_of(p, arch)
            <= shared_memory.needed(p, c, config.spec(p, c, nvidia(arch)), nvidia(arch))
            <= SHARED[arch]
        )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_the_compiler_takes_no_more_than_the_bound_of_any_problem(seed):
    chance = random.Random(seed)
    p, arch = draw(chance), chance.choice(sorted(SHARED))
    c = config.config_of(p, nvidia(arch))
    assert shared_of(p, arch) <= shared_memory.needed(p, c, config.spec(p, c, nvidia(arch)), nvidia(arch))


@pytest.mark.parametrize("name", HOT)
def test_measured_tiles_are_left_as_they_are(name):
    """The bound is not so loose that tiles which were measured on an H200 lose stages or rows."""
    p = HOT[name]
    own, c = config.tile(p, nvidia(90)), config.config_of(p, nvidia(90))
    assert (c.BM, c.BK, c.warps, c.stages, c.pack) == (own.BM, own.BK, own.warps, own.stages, own.pack)


@pytest.mark.parametrize("D", [512, 576])
def test_many_rows_of_wide_heads_do_not_spill(D):
    """With four warps, 300 instructions of each step were spills."""
    p = problem(D, 512, heads=64, kv_heads=1, **DECODE)
    built = attend_of(p, 90)
    bodies = loops(built)
    assert bodies
    assert all(count(body, r"\b(STL|LDL)") == 0 for body in bodies)


def test_tiles_do_not_depend_on_the_batch():
    """Nor when they are made smaller: with split_size a sequence gives the same bits in every batch."""
    for heads in (17, 64):
        p = problem(576, dtype=F32, heads=heads, kv_heads=1, **DECODE, split_size=64, batch=1)
        batches = [replace(p, batch=b, kv_len=n) for b in (1, 7, 64) for n in (64, 4096)]
        configs = [config.config_of(x, nvidia(90)) for x in batches]
        assert len({(c.BM, c.BK, c.warps, c.stages, c.split_tiles) for c in configs}) == 1


def test_a_launch_of_no_query_is_planned():
    """Nothing runs, but `plan` may be asked."""
    for changes in ({}, {"causal": True}, {"form": "paged", "page_size": 16, "kv_lengths": True, "q_offset": "end"},
                    {"split_size": 64}, {"window": (5, None)}):  # fmt: skip
        for kv_len in (1, 100000):
            c = config.config_of(problem(q_len=0, kv_len=kv_len, **changes), nvidia(90))
            assert c.splits == 1 or changes.get("split_size")
