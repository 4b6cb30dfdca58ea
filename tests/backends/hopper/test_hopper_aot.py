"""The Gluon kernels that the heuristics choose, compiled ahead of time for a Hopper GPU that is not here.

They must compile, fit the shared memory, use TMA and the warpgroup products, never wait for one product before the next
is started, and keep their loops free of spills.
"""

import re

import pytest
import torch

from aot import SHARED
from hopper_aot import kernels_of
from problem_space import problem_of
from slow import slowly
from tilewise.core.problem import Selection
from tilewise.core.storage import PLAIN

F16, BF16 = torch.float16, torch.bfloat16


def problem(D=128, Dv=0, dtype=BF16, **changes):
    sizes = {
        "form": "dense", "device": torch.device("cuda"), "batch": 4, "heads": 16, "kv_heads": 4, "q_len": 4096,
        "kv_len": 4096, "head_dim": D, "value_dim": Dv or D, "q_dtype": dtype, "k_format": PLAIN[dtype],
        "v_format": PLAIN[dtype], "scale": 0.1, "q_offset": 0,
    }  # fmt: skip
    return problem_of(**(sizes | changes))


VARLEN = {"form": "varlen", "packed_q": True, "total_q": 4096, "q_len": 1024, "q_offset": "end"}
ALL = {
    "causal": True, "window": (100, 3), "chunk": 512, "softcap": 9.0, "alibi": True, "sinks": True, "return_lse": True,
    "kv_lengths": True, "q_offset": "rows",
}  # fmt: skip
# How many instructions a loop may have; tiles of D64-short and D256 have 64 keys, the others 128.
HOT = {
    "D64-causal": (problem(64, causal=True, q_len=16384, kv_len=16384), 575),
    "D64-short": (problem(64, causal=True, q_len=1024, kv_len=1024), 350), "D128": (problem(), 320),
    "D128-causal": (problem(causal=True), 610), "D256-causal": (problem(256, causal=True), 500),
}  # fmt: skip
MORE = {
    "D64": (problem(64), 310), "D64-window": (problem(64, causal=True, window=(1023, None)), 750),
    "D256": (problem(256), 430), "D512": (problem(512), 1000), "D512-causal": (problem(512, causal=True), 1140),
    "f16": (problem(dtype=F16, causal=True), 610), "window": (problem(causal=True, window=(1023, None)), 750),
    "softcap": (problem(256, causal=True, softcap=50.0), 670), "varlen": (problem(**VARLEN, causal=True), 620),
    "D192/128": (problem(192, 128, causal=True), 680), "lse": (problem(causal=True, return_lse=True), 615),
}  # fmt: skip
OTHERS = {
    "D64-all": problem(64, **ALL), "D72-all": problem(72, 40, **ALL),
    "D40/96": problem(40, 96), "D320": problem(320, causal=True), "D96-f16": problem(96, dtype=F16, causal=True),
    "D16": problem(16, causal=True), "D256/64": problem(256, 64), "D64/256": problem(64, 256, causal=True),
    "strides": problem(causal=True, window=(999, None), places=(1, 4, 3)),
    "varlen-all": problem(128, **(ALL | VARLEN)), "D512-all": problem(512, **ALL),
    "D320/64": problem(320, 64),
}  # fmt: skip


def check_barriers(main):
    """Every mbarrier is one that somebody waits at, and lies beyond the tiles.

    The memory of one that nobody waits at would be given to a tile as well (see `new_scheduler`).
    """
    s = main.spec
    query_parts = 2 if s.out_aliases_q_chunks else 1
    rings = s.consumers * s.q_stages * query_parts + s.k_stages + s.v_stages
    assert len(main.barrier_places) == 2 * rings + 4 * main.dynamic
    elements = s.BM * s.chunks * s.chunk_d * s.q_stages + s.BN * (s.k_stages * s.chunk_d + s.v_stages * s.DV)
    if s.out_aliases_q_chunks == 0:
        elements += s.BM * s.out_columns
    assert min(main.barrier_places) >= 2 * elements


def check(built, instructions):
    main = built["prefill"]
    assert "HGMMA" in main.sass
    assert "UTMALDG" in main.sass
    assert "USETMAXREG" in main.sass  # consumers have the producer's registers
    check_barriers(main)
    assert main.loops
    for body in main.loops:
        assert not any(re.search(r"\b(STL|LDL)", x) for x in body), "spills in a loop"
        assert len(body) <= instructions
    searched = [any(re.search(r"\b(FMNMX|VOTE)", x) for x in body) for body in main.loops]
    assert main.spec.max_free == (not all(searched)), "maxima, and what a rescale is left out by"
    for kernel in built.values():
        assert kernel.shared <= SHARED[90]
        assert "serialized" not in kernel.report


@pytest.mark.parametrize("name", ["D64-causal", "D128", "D128-causal", *slowly("D64-short", "D256-causal")])
def test_hot_kernels(name):
    case, instructions = HOT[name]
    check(kernels_of(case), instructions)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_kernels(name):
    case, instructions = MORE[name]
    check(kernels_of(case), instructions)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_kernels(name):
    for kernel in kernels_of(OTHERS[name]).values():
        assert kernel.shared <= SHARED[90]
        assert "serialized" not in kernel.report


def test_packed_sequences_with_sinks_compile():
    built = kernels_of(problem(**VARLEN, sinks=True))
    assert set(built) == {"prefill", "fixup", "order"}
    for kernel in built.values():
        assert kernel.shared <= SHARED[90]
        assert "serialized" not in kernel.report


@pytest.mark.parametrize(("causal", "instructions"), [(False, 485), *slowly((True, 630))])
def test_block_indices_compile(causal, instructions):
    """The loops are those of dense calls, and a load from the list."""
    built = kernels_of(problem(causal=causal, selection=Selection(13, 128)))
    assert set(built) == {"prefill", "fixup", "lists"}
    check(built, instructions)


@pytest.mark.slow
def test_strides_of_each_sequence_compile():
    for kernel in kernels_of(problem(256, **ALL, places="rows")).values():  # half the cells a thread of narrower heads
        assert kernel.shared <= SHARED[90]
        assert "serialized" not in kernel.report


@pytest.mark.slow
@pytest.mark.parametrize("name", HOT)
def test_the_other_assembler_agrees(name):
    """Triton brings two versions of ptxas; both give loops of the same kind."""
    case, instructions = HOT[name]
    check(kernels_of(case, "ptxas-blackwell"), round(1.05 * instructions))
