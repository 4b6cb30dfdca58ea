"""A repeated call launches what its first call did: the same kernels in the same order, with the same grids, numbers,
tensor maps and options, and pointers to the same tensors at their new addresses. Without a GPU.
"""

import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from triton.runtime import jit

import launch_recorder
from launch_calls import append, backward, changes, forward, merged, misaligned, repeats
from launch_mutants import MUTANTS
from tilewise.backends import hopper, triton
from tilewise.backends.gpu import launch_program, semaphores
from tilewise.core.private import torch as private
from tilewise.testing.case import Case
from tilewise.testing.cases import CASES, GRADIENTS, LATENT_ROWS

BF16 = Case(dtype="bf16", D=64)
DECODE = replace(BF16, H=8, Hkv=2, Lq=1, Lk=3000, D=128)
PAGED = replace(DECODE, form="paged", lengths=(3000, 70))
VARLEN = replace(BF16, Hkv=2, form="varlen", q_lengths=(70, 1, 133), lengths=(90, 7, 133), causal=True)
LATENT = replace(BF16, H=16, Hkv=1, Lq=1, Lk=900, D=576, Dv=512, latent=True, causal=True)
LATENT_PAGED = replace(LATENT, form="paged", page=64, lengths=(900, 70))
MASKED = replace(BF16, Lq=200, Lk=300, mask_kind="bf16")
MANY = replace(BF16, B=4, Lq=1000, causal=True)  # more work tiles than an H200 has places

TRITON = {
    "prefill": replace(BF16, Lq=200, causal=True), "padded head dim": replace(BF16, Lq=90, D=72, Dv=40),
    "decode": replace(DECODE, Lk=90), "split": DECODE, "split, long": replace(DECODE, B=1, Lk=9000, sinks=True),
    "split, combined after": replace(DECODE, B=1, H=16, Hkv=1, Lk=9000, D=256), "split, paged": PAGED,
    "split, int8": replace(DECODE, k="int8/64", v="int8/64"), "paged, int4": replace(PAGED, k="int4/64", v="int4/64"),
    "paged, fp8": replace(PAGED, k="fp8_e4m3/64", v="fp8_e4m3/64", q_lengths=(1, 2)),
    "mask": replace(MASKED, mask="hqk"), "mask, bool": replace(MASKED, mask="bhqk", mask_kind="bool"),
    "mask of keys": replace(MASKED, mask="b11k"), "mask, decode": replace(DECODE, mask="b11k"),
    "tile map": replace(MASKED, mask="qk", tile=(64, 64), pattern="blocks"),
    "tile map, other tiles": replace(MASKED, mask="bhqk", mask_kind="bool", tile=(32, 256), pattern="blocks"),
    "varlen": VARLEN, "varlen, ordered": replace(VARLEN, causal=False),
    "paged, ordered": replace(PAGED, q_lengths=(70, 33)),
    "key indices": replace(BF16, Hkv=2, Lq=40, Lk=300, indices="h37"),
    "block indices": replace(BF16, Hkv=2, Lq=512, indices="3", block=64),
    "latent": LATENT_PAGED, "latent, fp8": replace(LATENT_PAGED, k="fp8_latent/128", v="fp8_latent/128"),
    "tree": replace(BF16, Hkv=2, Lq=40, Lk=90, tree="b", positions=True, window=6),
    "biases": replace(BF16, Lq=60, Lk=90, q_bias="bh", k_bias="1h", alibi="bh", sinks=True, softcap=5.0),
    "places": replace(BF16, B=4, Lq=60, Lk=90, k_start="rows", k_stride="rows", offset="rows", causal=True),
}  # fmt: skip
TRITON_BACKWARD = {
    "causal": replace(BF16, Hkv=2, Lq=200, causal=True), "float32": Case(Lq=90, D=40, causal=True, sinks=True),
    "mask, dense": replace(MASKED, mask="bhqk"), "mask, broadcast": replace(MASKED, mask="qk"),
    "mask, bool": replace(MASKED, mask="hqk", mask_kind="bool"), "wide": replace(BF16, Lq=90, D=256, causal=True),
    "tile map": replace(MASKED, mask="qk", mask_kind="bool", tile=(64, 32), pattern="blocks"),
    "varlen": VARLEN, "key indices": replace(BF16, Hkv=2, Lq=200, Lk=300, indices="h37"),
    "block indices": replace(BF16, Hkv=2, Lq=512, indices="3", block=64, mask="hqk", mask_kind="bool"),
    "tree": replace(BF16, Hkv=2, Lq=40, Lk=90, tree="b", positions=True, window=6),
    "biases": replace(BF16, Lq=60, Lk=90, q_bias="bh", k_bias="1h", alibi="bh", sinks=True, softcap=5.0),
}  # fmt: skip
HOPPER = {
    "prefill": replace(BF16, Lq=200), "causal": replace(BF16, Lq=200, causal=True), "dynamic": MANY,
    "wide": replace(BF16, Lq=200, D=256, causal=True), "chunks": replace(BF16, Lq=200, D=512, window=(50, 9)),
    "block indices": replace(BF16, Hkv=2, Lq=512, indices="h3", block=128), "varlen": VARLEN,
    "lengths": replace(BF16, B=3, Lq=200, lengths=(200, 0, 70), offset="rows", causal=True, alibi="bh", sinks=True),
    "latent": LATENT, "latent, paged": LATENT_PAGED, "latent, rows": replace(LATENT_PAGED, H=128, Lq=2, sinks=True),
    "latent, many": replace(LATENT, B=8, H=64, Lk=300), "gather": replace(LATENT_PAGED, indices="70"),
    "gather, fp8": replace(LATENT_PAGED, k="fp8_latent/128", v="fp8_latent/128", Lq=2, indices="60"),
}  # fmt: skip
HOPPER_BACKWARD = {
    "causal": replace(BF16, Hkv=2, Lq=200, causal=True), "full": replace(BF16, Lq=256, D=128),
    "split": replace(BF16, B=1, H=2, Lq=1000, D=128, causal=True), "persistent": replace(MANY, H=8, D=128),
    "softcap": replace(BF16, Lq=200, D=128, softcap=30.0, sinks=True), "varlen": VARLEN,
    "lengths": replace(BF16, B=3, Lq=200, lengths=(200, 0, 70), causal=True),
    "mask": replace(MASKED, Lk=320, mask="bhqk"), "mask, no tiles": replace(MASKED, Lk=301, mask="hqk"),
    "mask, sums": replace(MASKED, Lk=320, mask="qk"), "mask, float32": replace(MASKED, mask="hqk", mask_kind="f32"),
    "wide": replace(BF16, Lq=200, D=256, causal=True), "wide, odd": replace(BF16, Lq=200, D=192, Dv=128, causal=True),
    "wide, split": replace(BF16, Hkv=2, Lq=200, D=512, causal=True, sinks=True),
    "wide, softcap": replace(BF16, Lq=200, D=256, softcap=30.0), "wide, varlen": replace(VARLEN, D=512),
}  # fmt: skip

CALLS = {f"triton, {name}": partial(forward, case, triton) for name, case in TRITON.items()}
CALLS |= {f"triton backward, {name}": partial(backward, case, triton) for name, case in TRITON_BACKWARD.items()}
CALLS |= {f"hopper, {name}": partial(forward, case, hopper) for name, case in HOPPER.items()}
CALLS |= {f"hopper backward, {name}": partial(backward, case, hopper) for name, case in HOPPER_BACKWARD.items()}
CALLS |= {
    "write, bf16": partial(append, "bf16", packed=False, paged=False),
    "write, int8": partial(append, "int8", packed=True, paged=True),
    "write, V in K": partial(append, "bf16", packed=True, paged=True, inside=True),
    "merge": partial(merged, 3, total=False), "merge, sum": partial(merged, 2, total=True),
}  # fmt: skip
KERNELS = {
    "gpu.block_sparsity": "classify compact list_blocks", "gpu.varlen_order": "rank_sequences sort_sequences",
    "hopper.bwd.kernel": "backward", "hopper.bwd.mask_sums": "mask_sums", "hopper.bwd.nonfinite": "fix_up",
    "hopper.bwd.prepost": "clear_rest combine_splits list_blocks postprocess preprocess",
    "hopper.bwd.wide.kernel": "wide_backward", "hopper.fwd.kernel": "fwd_kernel", "hopper.mla.combine": "combine",
    "hopper.mla.kernel": "latent_decode", "triton.bwd.keys": "key_gradients", "triton.bwd.mask": "mask_gradients",
    "triton.bwd.queries": "query_gradients", "triton.bwd.rows": "row_sums sum_delta", "triton.combine": "combine",
    "triton.fwd_kernel": "fwd_kernel", "triton.kv_write": "append", "triton.merge": "merge_kernel",
}  # fmt: skip


@pytest.fixture
def recorder(monkeypatch):
    return launch_recorder.install(monkeypatch)


@pytest.fixture
def call(request):
    """A call by name."""
    made = CALLS[request.param]()
    assert not isinstance(made, str), made
    return made


@pytest.mark.parametrize("call", CALLS, indirect=True)
def test_a_repeated_call_launches_the_same(recorder, call):
    assert repeats(recorder, call) == {}


@pytest.mark.parametrize("call", CALLS, indirect=True)
def test_a_call_with_other_strides_is_not_launched_with_the_first_ones(recorder, call):
    assert changes(recorder, call) == {}


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("triton, prefill", "q"), ("triton, split", "k"), ("triton, paged, int4", "v_scales"), ("triton, mask", "mask"),
        ("triton, tile map", "states"), ("triton backward, causal", "dk"), ("triton backward, mask, broadcast", "mask"),
        ("triton backward, tile map", "states"), ("hopper, causal", "lse"), ("hopper, block indices", "key_indices"),
        ("hopper, varlen", "cu_seqlens_k"), ("hopper, latent, paged", "block_table"),
        ("hopper backward, causal", "lse"), ("hopper backward, mask", "mask"),
        ("hopper backward, mask", "dmask"), ("hopper backward, wide", "dlse"), ("write, bf16", "k"), ("merge", "lse1"),
    ],
    indirect=["call"],
)  # fmt: skip
def test_a_call_that_is_not_aligned_is_compiled_anew(recorder, call, name):
    assert misaligned(recorder, call, name) == {}


def test_every_kernel_is_launched(recorder):
    found = set()
    for make in CALLS.values():
        made = make()
        found |= {x.kernel for x in recorder.record(made.new(), made.tensors)}
    assert found == {f"{module}.{name}" for module, names in KERNELS.items() for name in names.split()}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_mistake_is_rejected(recorder, monkeypatch, mutant):
    """Calls without a mistake pass the same checks above."""
    mutant.apply(monkeypatch)
    assert mutant.check(recorder, CALLS[mutant.call]()) != {}


def patched():
    """What the recorder takes the place of."""
    found = [private.current_device, private.current_stream, private.is_capturing]
    found += [getattr(torch.cuda, name) for name in ("device", "current_device", "is_available", "synchronize")]
    found += [torch.version.cuda, vars(jit.KernelInterface)["__getitem__"]]
    found += [launch_program.driver, launch_program.tensor_map_driver]
    found += [semaphores.Semaphores.take, semaphores.Semaphores.zeros, semaphores.Thread, semaphores._kept]
    return found


def test_nothing_is_left_behind():
    before = patched()
    with pytest.MonkeyPatch.context() as patch:
        recorder = launch_recorder.install(patch)
        assert repeats(recorder, CALLS["hopper, causal"]()) == {}
    assert all(x is y for x, y in zip(before, patched(), strict=True))


def in_16_bits(case, index):
    """As near as the Hopper kernels come to a case."""
    changed = {"dtype": ("bf16", "f16")[index % 2], "k": "", "v": "", "D": -(-case.D // 8) * 8}
    changed |= {"Dv": -(-case.Dv // 8) * 8, "Lq": case.Lq + 32 * (case.form == "dense" and case.Lq <= 16)}
    return replace(case, **changed, strides="" if case.strides == "sliced" else case.strides)


def in_16_bits_with_gradients(case, D, Dv):
    kind = "bf16" if case.mask_kind != "bool" else "bool"
    return replace(case, D=D, Dv=Dv, dtype="bf16", k="", v="", mask_kind=kind, alibi="", tile=None, chunk=None)


WIDTHS = ((64, 64), (128, 128), (192, 128), (256, 256), (512, 512))
SWEEPS = {
    "triton": lambda: [partial(forward, c, triton) for c in CASES + LATENT_ROWS],
    "triton, bf16": lambda: [partial(forward, replace(c, dtype="bf16"), triton) for c in CASES if c.dtype == "f32"],
    "triton backward": lambda: [partial(backward, c, triton) for c in GRADIENTS],
    "hopper": lambda: [partial(forward, in_16_bits(c, i), hopper) for i, c in enumerate(CASES)],
    "hopper, latent": lambda: [partial(forward, c, hopper) for c in CASES + LATENT_ROWS if c.latent],
    **{
        f"hopper backward {D}, {Dv}": lambda D=D, Dv=Dv: [
            partial(backward, in_16_bits_with_gradients(c, D, Dv), hopper) for c in GRADIENTS
        ]
        for D, Dv in WIDTHS
    },
    "writes": lambda: [
        partial(append, dtype, packed=packed, paged=paged)
        for dtype in ("bf16", "f32", "int8", "int4", "fp8_e4m3") for packed in (False, True) for paged in (False, True)
    ],
}  # fmt: skip
LEAST = {"hopper, latent": 10, "writes": 20}  # calls of a sweep that are served; others 50


@pytest.mark.slow
@pytest.mark.parametrize("sweep", SWEEPS)
def test_every_case(recorder, sweep):
    served, wrong = 0, {}
    for make in SWEEPS[sweep]():
        made = make()
        if isinstance(made, str):
            continue
        served += 1
        if found := repeats(recorder, made) | changes(recorder, made):
            wrong[str(make)] = found
    assert wrong == {}
    assert served >= LEAST.get(sweep, 50)
