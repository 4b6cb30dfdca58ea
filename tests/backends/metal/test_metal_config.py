"""The Metal backend's plain functions: which problems, which kernel, tile and splits, which numbers."""

from dataclasses import replace

import pytest
import torch

from metal_sim import problem, simulator
from tilewise.backends import metal as backend
from tilewise.backends.metal import config, device, launch, params
from tilewise.backends.metal.options import options_of
from tilewise.backends.metal.spec import BK, Config, Operand, operand, padded
from tilewise.core.problem import MaskSpec
from tilewise.core.storage import stored_as
from tilewise.core.tensors import Tensors
from tilewise.dispatch import planner


def test_parameters_are_enough_for_mlx_and_few_enough_for_metal():
    """MLX hands arrays of fewer than 8 elements over in another address space; Metal takes 4 KiB of bytes."""
    for names, size in ((params.INTS, 4), (params.STRIDES, 8), (params.FLOATS, 4)):
        assert 8 <= len(names) <= 4096 // size
        assert len(set(names)) == len(names)


def test_it_refuses_other_devices():
    assert backend.supports(problem(device=torch.device("cpu"))) == "runs on Apple GPUs"
    assert backend.supports(problem(device=torch.device("cuda"))) == "runs on Apple GPUs"


def test_the_planner_picks_it_on_mps(monkeypatch):
    monkeypatch.setattr(device, "mps_cores", lambda: 16)
    monkeypatch.setattr(device, "_mps", None)
    planner.choose.cache_clear()
    try:
        plan = planner.choose(problem(causal=True))
        assert (plan.backend, plan.kernel, plan.tile) == ("metal", "prefill, tiled", (32, 32))
        assert "simulator only" in str(plan)
        assert [name for name, _ in plan.passed_over] == ["hopper", "triton"]
    finally:
        planner.choose.cache_clear()


def test_positions_that_do_not_fit_are_refused(monkeypatch):
    assert backend.supports(problem(q_offset=2**30)) == "positions past 2**30"
    assert backend.supports(problem(q_offset=-(2**29))) is None


def test_a_torch_without_compile_shader_is_named(monkeypatch):
    monkeypatch.delattr(torch.mps, "compile_shader")
    assert "2.7" in backend.supports(problem())


@pytest.mark.parametrize("groups", [1, 8, 40])
@pytest.mark.parametrize("tiles", [3, 12, 64, 1000])
@pytest.mark.parametrize("cores", [10, 80])
def test_splits_fill_the_cores(groups, tiles, cores):
    splits = config.split_count(groups, tiles, cores)
    wanted = config.GROUPS_A_CORE * cores
    most = max(1, min(tiles // config.LEAST_TILES, config.MOST_SPLITS))
    assert 1 <= splits <= most
    assert groups * splits >= wanted or splits == most
    assert splits == 1 or groups * (splits - 1) < wanted, "no more than are needed"


def test_split_size_fixes_the_splits_whatever_the_batch():
    for batch in (1, 7, 64):
        c = config.config_of(problem(batch=batch, q_len=1, kv_len=1000, split_size=100), 10)
        assert c.split_tiles == -(-100 // BK)
        assert c.splits == -(-1000 // (c.split_tiles * BK))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_split_size_fixes_the_tiles_of_packed_sequences(head_dim):
    """One query alone, or beside a sequence of many."""
    alone, beside = (
        problem(form="varlen", packed_q=True, total_q=n, q_len=n, split_size=64, head_dim=head_dim, value_dim=head_dim)
        for n in (1, 100)
    )
    assert config.config_of(alone, 10) == config.config_of(beside, 10)


def test_few_rows_of_a_kv_head_read_it_once():
    """All heads of a group are in one threadgroup, whatever the kernel, up to 8 of 576 columns."""
    for width in (64, 128, 256, 512, 576):
        for group in (1, 2, 4, 8):
            p = problem(q_len=1, heads=16, kv_heads=16 // group, head_dim=width, value_dim=width)
            c = config.config_of(p, 10)
            assert c.pack == group
            assert c.kernel == ("vector" if group <= config.vector_rows(width) else "tiled")
            assert c.rows >= c.pack * c.queries
            assert c.queries >= 1


def test_registers_bound_the_rows():
    for wide in (32, 64, 128, 192, 256, 320, 512, 576):
        assert config.vector_rows(wide) >= 1
        assert config.vector_rows(wide) * 2 * wide // 32 <= 64, "floats of a lane: q and the output"
        assert config.tile_rows(wide) % 8 == 0
        assert config.tile_rows(wide) * wide * 4 <= 18 << 10, "bytes of q in threadgroup memory"


def test_large_groups_share_tiles_by_their_divisors():
    for group in (16, 12, 7, 24, 31, 64, 37):
        c = config.config_of(problem(q_len=1, heads=group, kv_heads=1, head_dim=128, value_dim=128), 10)
        assert c.pack == max(n for n in range(1, c.rows + 1) if group % n == 0)
        assert c.kernel == "vector" or c.rows <= config.tile_rows(128)


def test_packed_rows_have_tiles_enough():
    p = problem(form="varlen", packed_q=True, total_q=100, q_len=64, batch=5)
    c = config.config_of(p, 10)
    for lengths in ((100, 0, 0, 0, 0), (1, 1, 1, 1, 96), (33, 33, 33, 1, 0), (20,) * 5):
        assert config.query_tiles(p, c) >= sum(-(-n // c.queries) for n in lengths)


def test_masks_are_classified_unless_each_head_has_its_own_bias():
    c = Config("tiled", 32)
    own, shared = (False,) * 4, (True, False, False, False)
    for dtype, broadcast, want in ((torch.bool, own, True), (torch.float16, shared, True), (torch.float16, own, False)):
        assert config.classifies(problem(mask=MaskSpec(dtype, broadcast)), c) is want
    bools = MaskSpec(torch.bool, own)
    assert not config.classifies(problem(q_len=2, mask=bools), c), "few queries read all of it"
    assert not config.classifies(problem(mask=bools, tile_map=(8, 8)), c), "there is a map"
    assert not config.uses_states(problem(mask=bools), Config("tiled", 32, 4)), "rows of several heads"


def test_columns_are_filled_up_to_few_sizes():
    assert [padded(n) for n in (1, 32, 33, 96, 97, 128, 129, 192, 193, 576)] == [
        32,
        32,
        64,
        96,
        128,
        128,
        192,
        192,
        256,
        576,
    ]
    assert padded(80, 8) == 80
    assert operand(80, stored_as("int8", 32), torch.bfloat16) == Operand("int8_t", "INT8", "bfloat", 80, 96, 32)
    assert operand(64, stored_as("fp8_e4m3", 32), None).type == "uint8_t"


def test_workspace_is_what_the_plan_says():
    with simulator():
        plan = backend.plan(problem(device=torch.device("cpu"), q_len=1, heads=8, kv_heads=2, kv_len=4096))
        assert plan.splits > 1
        assert plan.workspace_bytes == 4 * 2 * 8 * plan.splits * 66
        assert launch.workspace(torch.zeros(1), 5).numel() == 5


def test_slices_of_columns_are_of_256_bytes_at_most():
    for name, width, want in (("f16", 96, 96), ("f16", 128, 128), ("f16", 320, 80), ("f32", 96, 48), ("f32", 128, 64)):
        assert operand(width, stored_as(name), None, 8).slice(8) == want
    assert operand(128, stored_as("int8", 32), torch.float16, 8).slice(8) == 64, "tiles of floats"
    assert operand(576, stored_as("f16"), None).slice(32) == 96


def test_options_are_those_of_the_call():
    p = problem(causal=True, softcap=3.0, mask=MaskSpec(torch.float16, (True, True, False, False)), q_len=64)
    q, k = (torch.empty(2, 8, n, 64, dtype=torch.float16) for n in (64, 512))
    tensors = Tensors(q, k, k, q, mask=torch.empty(2, 8, 64, 512, dtype=torch.float16))
    c = config.config_of(p, 10)
    made = options_of(p, c, tensors)
    assert made.causal
    assert made.softcap
    assert made.natural, "a float mask may hold numbers that log2(e) times as large do not fit"
    assert made.states
    assert made.wide
    assert not any((made.sinks, made.lse, made.left, made.page, made.splits))
    q = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    assert not options_of(p, c, replace(tensors, q=q)).wide, "of this call, whatever the plan's was"
    far = torch.empty_strided((2, 8, 2, 64), (0, 0, 2**26, 1), dtype=torch.float16, device="meta")
    assert options_of(p, c, replace(tensors, k=far)).far
