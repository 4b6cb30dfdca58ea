"""Decode by AVX-512 BF16, where V lies in K: who takes it, every block of rows, and what its bits depend on."""

from dataclasses import replace

import pytest
import torch

from problem_space import problem_of
from tilewise import attention, paged_attention, plan

pytest.importorskip("numba")

from tilewise.backends.cpu import config, launch
from tilewise.backends.cpu.codegen.bf16_dot import has_bf16
from tilewise.backends.cpu.gemm import amx
from tilewise.core.storage import FORMATS
from tilewise.testing.case import Case
from tilewise.testing.check import check_case

needs_bf16 = pytest.mark.skipif(not has_bf16() or amx.usable(), reason="needs AVX-512 BF16 and no AMX")


def latent(q_len=1, heads=16, **changes):
    bf16 = FORMATS["bf16"]
    fields = {"form": "dense", "device": torch.device("cpu"), "batch": 1, "scale": 0.1, "q_dtype": torch.bfloat16}
    fields |= {"k_format": bf16, "v_format": bf16, "v_in_k": True, "kv_heads": 1}
    fields |= {"heads": heads, "q_len": q_len, "head_dim": 576, "value_dim": 512, "kv_len": 1000}
    return problem_of(**(fields | changes))


@needs_bf16
@pytest.mark.parametrize(("heads", "q_len"), [(1, 1), (16, 1), (128, 1), (128, 4), (16, 300)])
def test_rows_of_latent_attention_are_decoded_by_bf16_dots(heads, q_len):
    p = latent(q_len, heads)
    template = launch.make_template(p, 2)
    assert config.is_decode(p)
    assert template.params.bf16_dot
    assert (template.params.prefill, template.params.prefill_tiles) == (0, 0)
    assert launch.kernels(p, "", False)["matrix_qk"] == "bf16_qk"


@pytest.mark.parametrize(
    "changes",
    [
        {"v_in_k": False},
        {"q_dtype": torch.float32},
        {"k_format": FORMATS["f16"], "v_format": FORMATS["f16"]},
        {"head_dim": 560},
        {"value_dim": 496},
    ],
)
def test_other_calls_are_not(changes):
    assert not config.uses_bf16_dot_decode(latent(**changes))
    assert not launch.make_template(latent(**changes), 1).params.bf16_dot


@needs_bf16
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 13, 16, 23, 31, 32, 47, 63, 70])
def test_every_block_of_rows(rows):
    check_case(Case(B=2, H=rows, Hkv=1, Lq=1, Lk=237, D=96, Dv=64, dtype="bf16", latent=True, lengths=(237, 40)), "cpu")


@needs_bf16
@pytest.mark.parametrize(("D", "Dv"), [(64, 32), (160, 96), (320, 288), (576, 544)])
@pytest.mark.parametrize("heads", [1, 6, 12])
def test_every_strip_of_columns(D, Dv, heads):
    case = Case(B=1, H=heads, Hkv=1, Lq=2, Lk=200, D=D, Dv=Dv, dtype="bf16", latent=True, causal=True)
    check_case(case, "cpu")
    check_case(replace(case, window=33, softcap=4.0, sinks=True), "cpu")


@needs_bf16
def test_a_value_that_is_not_finite_stays_with_the_rows_that_see_it():
    q, k = torch.randn(1, 20, 3, 96).bfloat16(), torch.randn(1, 1, 400, 96).bfloat16()
    clean = attention(q, k, k[..., :64], causal=True)
    k[0, 0, 399, 3] = torch.nan  # the last query's own
    found = attention(q, k, k[..., :64], causal=True)
    assert torch.equal(found[:, :, :2], clean[:, :, :2])
    assert found[:, :, 2].isnan().all()
    k[0, 0, 399, 3], k[0, 0, 5] = 0.0, torch.inf
    assert attention(q, k, k[..., :64], causal=True, window=300).isfinite().all()


@needs_bf16
@pytest.mark.parametrize("q_len", [1, 3, 40])
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(q_len):
    pages, table = torch.randn(40, 16, 1, 96).bfloat16(), torch.randperm(40).view(2, 20).int()
    q, lengths = torch.randn(2, 24, q_len, 96).bfloat16(), torch.tensor([300, 77], dtype=torch.int32)
    options = {"causal": True, "window": 90, "split_size": 128}
    both = paged_attention(q, pages, pages[..., :64], table, lengths, **options)
    for b in range(2):
        alone = paged_attention(q[b : b + 1], pages, pages[..., :64], table[b : b + 1], lengths[b : b + 1], **options)
        assert torch.equal(alone[0], both[b])


@needs_bf16
def test_the_plan_says_so():
    k = torch.randn(1, 1, 500, 96).bfloat16()
    text = str(plan(torch.randn(1, 4, 1, 96).bfloat16(), k, k[..., :64]))
    assert "bf16 decode" in text
    assert "V in K" in text


def test_a_row_is_read_once():
    """Nothing of V is prefetched, and the bytes that a call reads are K's."""
    apart, inside = (launch.make_template(latent(v_in_k=v_in_k), 1).params for v_in_k in (False, True))
    assert (apart.k_row, apart.v_row, inside.k_row, inside.v_row) == (1152, 1024, 1152, 0)
    assert config.bytes_read(latent()) * (576 + 512) == config.bytes_read(latent(v_in_k=False)) * 576
