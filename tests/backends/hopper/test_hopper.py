"""What the Hopper backend serves and how it cuts a problem, as plain functions. Its kernels: test_hopper_aot.py."""

import random
from dataclasses import replace

import pytest
import torch

from hopper_fits import check_hopper
from interpreted import interpreted
from problem_space import changed, draw, problem_of
from tilewise.backends import hopper, triton
from tilewise.backends.gpu import coverage, target
from tilewise.backends.gpu.target import nvidia
from tilewise.backends.hopper.fwd import config, launch
from tilewise.core.plan import Plan
from tilewise.core.problem import MaskSpec, Selection
from tilewise.core.storage import FORMATS
from tilewise.dispatch import planner

SHARED = 227 << 10


def problem(D=128, Dv=0, **changes):
    sizes = {
        "form": "dense", "device": torch.device("cuda"), "batch": 4, "heads": 16, "kv_heads": 4, "q_len": 4096,
        "kv_len": 4096, "head_dim": D, "value_dim": Dv or D, "q_dtype": torch.bfloat16, "k_format": FORMATS["bf16"],
        "v_format": FORMATS["bf16"], "scale": 0.1, "q_offset": 0,
    }  # fmt: skip
    return problem_of(**(sizes | changes))


def test_a_machine_without_a_hopper_gpu_is_told_so():
    assert hopper.supports(replace(problem(), device=torch.device("cpu"))) == "runs on Hopper GPUs"


def test_versions_of_triton(monkeypatch):
    """One with which the kernels only compile is taken if the backend is named; where they do not, it is refused."""
    for backend in (hopper, triton):
        monkeypatch.setattr(backend, "target_of", lambda device: nvidia(90))
    monkeypatch.setattr(planner, "_warned", {"hopper"})
    choose = planner.choose.__wrapped__
    entries = {"3.6": ("sm_90",), "3.7": (), "3.8": None}
    monkeypatch.setitem(coverage.KERNELS, "hopper", dict.fromkeys(coverage.KERNELS["hopper"], entries))
    served = {"3.6.0": (True, True), "3.6.1": (True, True), "3.7.1": (True, False), "3.99.0": (True, False)}
    for version in (*served, "3.5.1", "3.8.0", "none"):
        monkeypatch.setattr(target, "triton_version", lambda version=version: version)
        named, chosen = served.get(version, (False, False))
        for asked in (problem(), replace(problem(), grads=("q", "k", "v"), return_lse=True)):
            assert (planner.supports("hopper", asked) is None) == named
            if not named:
                continue
            found = choose(asked)
            assert found.backend == ("hopper" if chosen else "triton")
            reason = dict(found.passed_over).get("hopper", "")
            assert chosen or "`tilewise prove`" in reason
            assert chosen or "backend='hopper'" in reason
            assert chosen == (not any("tilewise prove" in note for note in choose(asked, "hopper").notes))
    monkeypatch.setattr(hopper, "target_of", lambda device: nvidia(100))
    assert hopper.supports(problem()) == "runs on Hopper GPUs"


@pytest.mark.parametrize("version", ["3.7.1", "3.8.0"])
def test_kernels_that_are_not_used_are_warned_of_once(version, monkeypatch):
    """Where they would have been taken, and in a plan for this machine alone."""
    for backend in (hopper, triton):
        monkeypatch.setattr(backend, "target_of", lambda device: nvidia(90))
    entries = {"3.6": ("sm_90",), "3.7": (), "3.8": None}
    monkeypatch.setitem(coverage.KERNELS, "hopper", dict.fromkeys(coverage.KERNELS["hopper"], entries))
    monkeypatch.setattr(planner, "_warned", set())
    monkeypatch.setattr(target, "triton_version", lambda: version)
    choose = planner.choose.__wrapped__
    small = problem(batch=1, heads=4, q_len=512, kv_len=512)
    for silent in (small, problem(q_len=1)):
        choose(silent)
    planner.choose_elsewhere(problem())
    with pytest.warns(RuntimeWarning, match=f"the hopper kernels are not used on this .*{version[:3]}") as heard:
        choose(problem())
    assert len(heard) == 1
    choose(problem(causal=True))  # warnings are errors


REFUSED = {
    "float": {"q_dtype": torch.float32, "k_format": FORMATS["f32"], "v_format": FORMATS["f32"]},
    "alike": {"v_format": FORMATS["f16"]},
    "pages": {"form": "paged", "page_size": 16},
    "dense masks": {"mask": MaskSpec(torch.bool, (True, True, False, False))},
    "16 bytes": {"aligned": False},
    "a scale of over": {"scale": -0.5},
    "over 1e-30": {"scale": 1e-50},  # 0 in float32
    "512": {"head_dim": 576},
    "all alike": {"k_format": FORMATS["int8"], "v_format": FORMATS["int8"]},
}


@pytest.mark.parametrize("word", REFUSED)
def test_refusals_name_what_is_missing(word):
    assert word in (config.refusal(problem(**REFUSED[word])) or "")


SLOWER = {
    "queries": {"q_len": 16},
    "split_size": {"split_size": 512},
    "small": {"batch": 1, "heads": 4, "q_len": 512, "kv_len": 512},
    "small calls to": {"batch": 1, "selection": Selection(1, 128)},
    "small calls": {"batch": 1, "heads": 4, "causal": True, "window": (20, None)},
}


@pytest.mark.parametrize("word", SLOWER)
def test_what_triton_does_faster_is_left_to_it(word, monkeypatch):
    """The planner passes over a backend that declines, and says why; a call that names it is served."""
    p = problem(**SLOWER[word])
    assert word in (config.slower(p) or "")
    assert config.slower(problem()) is None
    monkeypatch.setattr(hopper, "supports", lambda problem: None)
    for backend in (hopper, triton):
        monkeypatch.setattr(backend, "unproven", lambda problem: None)
    monkeypatch.setattr(planner.load("triton"), "supports", lambda problem: None)
    monkeypatch.setattr(planner.load("triton"), "plan", lambda problem: Plan(problem, "triton", "", (64, 64)))
    planner.choose.cache_clear()
    chosen = planner.choose(p)
    assert chosen.backend == "triton"
    assert chosen.passed_over == (("hopper", config.slower(p)),)
    assert planner.choose(p, "hopper").backend == "hopper"
    assert planner.choose(problem()).backend == "hopper"
    planner.choose.cache_clear()


def test_operations_count_what_rules_leave():
    whole = config.operations(problem())
    assert whole == 4 * 128 * 4 * 16 * 4096 * 4096
    assert config.operations(problem(causal=True)) == whole / 2
    assert config.operations(problem(causal=True, window=(1023, None))) == whole / 4
    assert config.operations(problem(window=(511, 512))) == whole / 4
    assert config.operations(problem(chunk=512)) == whole / 8
    assert config.operations(problem(selection=Selection(4, 128))) == whole / 8
    assert config.operations(problem(causal=True, selection=Selection(99, 128))) == whole / 2


def test_what_is_served():
    for changes in (
        {}, {"causal": True, "window": (9, None)}, {"softcap": 5.0}, {"alibi": True}, {"sinks": True}, {"chunk": 9},
        {"kv_lengths": True, "q_offset": "end"},
        {"form": "varlen", "packed_q": True, "total_q": 99, "q_len": 50}, {"head_dim": 512, "value_dim": 512},
    ):  # fmt: skip
        assert config.refusal(problem(**changes)) is None


def test_block_indices_of_whole_tiles_are_served(monkeypatch):
    monkeypatch.setattr(hopper, "target_of", lambda device: nvidia(90))
    for D in (64, 128, 192, 256, 512):
        for block in (128, 256, 384):
            p = problem(D, selection=Selection(5, block), kv_len=8192)
            c = config.config_of(p)
            assert hopper.supports(p) is None
            assert hopper.declines(p) is None
            assert block % (64 * c.consumers) == block % c.BN == 0
        for selection in (Selection(2048), Selection(5, 64), Selection(5, 200)):
            assert "multiples of 128" in hopper.supports(problem(D, selection=selection))
    masked = problem(selection=Selection(5, 128), mask=MaskSpec(torch.bool, (True, True, False, False)))
    assert "dense masks" in hopper.supports(masked)
    assert hopper.supports_backward(replace(problem(selection=Selection(5, 128)), grads=("q",))) is not None


@pytest.mark.parametrize("D", [16, 64, 72, 96, 128, 160, 192, 256, 320, 384, 512])
@pytest.mark.parametrize("Dv", [16, 64, 96, 128, 192, 256, 512])
def test_tiles_cover_the_heads_and_fit(D, Dv):
    p = problem(D, Dv)
    c = config.config_of(p)
    s = config.spec(p, c)
    assert s.chunk_d * s.chunks >= D
    assert s.DV * s.value_tiles >= Dv
    assert s.k_stages >= s.chunks or s.out_aliases_q_chunks
    assert s.out_columns in (s.DV, s.DV // 2) or s.out_aliases_q_chunks
    rows = s.consumers * s.chunks * 64 * s.q_stages
    elements = rows * s.chunk_d + s.BN * (s.k_stages * s.chunk_d + s.v_stages * s.DV)
    if s.out_aliases_q_chunks == 0:
        elements += s.BM * s.out_columns
    else:
        assert s.out_columns == s.chunk_d  # it waits in chunks of q, and not in all of them
        assert s.out_aliases_q_chunks * s.chunk_d == s.DV
        assert s.out_aliases_q_chunks < s.chunks
        # Pieces of values are as large as chunks of keys, and the first keys have room beside them.
        assert s.v_stages == 0
        assert s.BN // s.pieces * s.DV == s.BN * s.chunk_d
        assert s.k_stages > s.pieces
    assert 2 * elements + 1024 <= SHARED
    registers = 128 * (s.consumers * c.consumer_regs + c.producer_regs)
    assert registers <= 65536


def test_every_plan_fits():
    """A sample; benchmarks/h200/fits.py goes through 100,000 problems."""
    chance = random.Random(0)
    served = [p for p in (draw(chance, indices=True) for _ in range(20000)) if config.refusal(p) is None]
    assert len(served) > 1000
    assert max(check_hopper(p) for p in served) > 0.9, "the sample does not come near the limit"


def test_calls_of_no_query_are_planned():
    for changes in ({}, {"causal": True}, {"kv_lengths": True, "q_offset": "end"}, {"softcap": 5.0}):
        p = problem(q_len=0, **changes)
        c = config.config_of(p)
        assert config.swizzle(p, c, 132) >= 1
        assert hopper.plan(p).backend == "hopper"


def test_hidden_values_are_looked_for_where_there_can_be_any():
    """Past the end of a dense tensor TMA reads zeros."""
    for changes, guard in (
        ({}, False), ({"kv_len": 4000}, False), ({"softcap": 5.0}, False), ({"causal": True}, True),
        ({"kv_lengths": True}, True), ({"window": (3, 3)}, True), ({"chunk": 5}, True),
        ({"form": "varlen", "packed_q": True, "total_q": 99, "q_len": 50}, True),
    ):  # fmt: skip
        p = problem(**changes)
        assert config.hides_memory(p) == guard
        assert config.spec(p, config.config_of(p)).guard or not guard
        # Programs that fetch work tiles leave their counter to the fix-up kernel.
        assert guard or not config.uneven(p)


def test_swizzle_groups_let_programs_share_keys():
    c = config.config_of(problem(causal=True))
    assert config.swizzle(problem(), c, 132) == 1, "all work tiles are alike"
    for changes in ({}, {"q_len": 256, "kv_len": 256}, {"batch": 1, "heads": 2, "kv_heads": 1}):
        p = problem(causal=True, **changes)
        planes, tiles = config.swizzle(p, c, 132), -(-p.q_len // (64 * c.consumers))
        assert 1 <= planes <= p.batch * p.heads
        assert planes == p.batch * p.heads or 132 // (planes + 1) < min(c.share, tiles) <= 132 // planes


def test_work_tiles_are_fetched_late_where_the_end_counts():
    """With few rounds; and only where a consumer never has more tiles to pass over than there is room for."""
    p = problem(causal=True)
    c = config.config_of(p)
    assert not config.prefetches_tile(p, c, config.MANY_ROUNDS)
    assert config.prefetches_tile(p, c, config.MANY_ROUNDS + 1)
    assert config.prefetches_tile(problem(causal=True, chunk=512), c, 15.5)
    assert config.prefetches_tile(problem(512, causal=True), config.config_of(problem(512, causal=True)), 15.5)


def test_head_dim_64_has_registers_for_a_late_wait_with_few_rules():
    long = {"q_len": 16384, "kv_len": 16384}
    for changes, late in (
        ({}, True), ({"causal": True}, True), ({"kv_lengths": True}, True), ({"softcap": 5.0}, False),
        ({"alibi": True}, False), ({"window": (99, None)}, False), ({"chunk": 99}, False),
    ):  # fmt: skip
        c = config.config_of(problem(64, **long, **changes))
        assert c.late_wait is late
    short = config.config_of(problem(64, q_len=config.SHORT, kv_len=config.SHORT))
    assert short.consumers < c.consumers, "few tiles fill more programs of fewer rows"


def test_maxima_are_left_out_where_weights_have_the_range_of_float32():
    f16 = {"q_dtype": torch.float16, "k_format": FORMATS["f16"], "v_format": FORMATS["f16"]}
    short = {"q_len": config.SHORT, "kv_len": config.SHORT}
    for D, changes, free in (
        (64, {}, True), (64, short, False), (64, short | {"causal": True}, True), (128, f16, False),
        (128, {"softcap": 5.0}, True),
        (128, {"selection": Selection(4, 128)}, False), (256, {}, False),
    ):  # fmt: skip
        for batch in (1, 64):
            p = problem(D, batch=batch, **changes)
            s = config.spec(p, config.config_of(p))
            assert s.max_free is free
            assert s.guard or not free, "tiles whose weights overflow are computed again"


def test_two_programs_share_a_processor_where_keys_are_few_and_causal():
    p = problem(64, causal=True, q_len=1024, kv_len=1024)
    c = config.config_of(p)
    assert c.per_processor == 2
    assert "2 programs share a processor" in config.notes(p, c)
    assert config.config_of(replace(p, q_len=config.SHORT_CAUSAL, kv_len=config.SHORT_CAUSAL)).per_processor == 2
    for changes in (
        {"kv_len": config.SHORT_CAUSAL + 1},
        {"softcap": 5.0},
        {"window": (99, None)},
        {"causal": False},
        {"chunk": 64},
        {"split_size": 99},
    ):
        assert config.config_of(changed(p, **changes)).per_processor == 1
    s = config.spec(p, c)
    elements = s.BM * 64 * s.q_stages + c.BN * 64 * (s.k_stages + s.v_stages) + s.BM * s.out_columns
    assert 2 * (2 * elements + 2048) <= SHARED
    bound = launch.Launcher(p, c, nvidia(90))
    assert bound.programs == 2 * 132
    registers, threads = bound.attention.options["maxnreg"], 128 * (s.consumers + 1)
    assert 2 * registers * threads <= 65536 < 2 * (registers + 8) * threads
    left = registers * threads - 128 * (c.consumer_regs + c.producer_regs)  # the other consumer's
    assert left > 128 * 96
    assert "maxnreg" not in bound.fixup.options


ORDER = """
import random
import torch
from tilewise.backends.gpu.varlen_order import rank_sequences as order

for seed in range(12):
    chance = random.Random(seed)
    batch = (1, 2, 5, 70)[seed % 4]
    q = [chance.choice((0, 1, 63, 128, 129, 700)) for _ in range(batch)]
    k = [chance.choice((0, 5, 128, 128, 900)) for _ in range(batch)]
    total_q = sum(q) + chance.choice((0, 3, 300))
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (q, k))
    ranks, starts = torch.full((2, batch + 2), -1, dtype=torch.int32)
    order[(-(-(batch + 1) // 16),)](cu_q, cu_k, ranks, starts, batch, total_q, 128, 16)
    tiles = [-(-n // 128) for n in (*q, total_q - sum(q))]  # the last are the rows of nobody
    want = sorted(range(batch + 1), key=lambda i: (-([*k, 0][i]), i))
    assert ranks[: batch + 1].tolist() == want, (seed, ranks, want)
    assert starts.tolist() == [sum(tiles[i] for i in want[:r]) for r in range(batch + 2)], seed
print("ok")
"""


def test_packed_sequences_are_ranked():
    """The longest first, and how many tiles come before each; in Triton's interpreter, which needs its own process."""
    done = interpreted(ORDER)
    assert done.stdout == "ok\n", done.stderr
