"""The record of `make agx`: that it is of these texts, and what it says of them."""

import json
from pathlib import Path

import pytest

from agx.cases import ours
from agx.translate import Instance, to_opencl

RECORD = json.loads((Path(__file__).parents[3] / "benchmarks/records/metal/agx.json").read_text())
SOURCES = {source.name: source for source in ours()}


def test_the_record_is_of_these_texts():
    """If this fails, run `make agx`."""
    assert {name: row["digest"] for name, row in RECORD["tilewise"].items()} == {
        name: source.digest for name, source in SOURCES.items()
    }


def test_a_change_of_a_text_would_be_noticed():
    source = SOURCES["combine f16"]
    changed = type(source)(source.name, source.text + " ", source.kernel, source.threads)
    assert changed.digest != source.digest


def test_mlx_has_what_it_is_known_to_have():
    """MLX starts this kernel with 1024 threads, for which a GPU core has 104 half registers each."""
    row = RECORD["mlx"]["sdpa_vector f16 D128"]
    assert (row["threads"], row["spills"]) == (1024, 0)
    assert row["half_registers"] <= 104


OURS = RECORD["tilewise"]


@pytest.mark.parametrize("rules", ["plain", "causal", "window"])
@pytest.mark.parametrize(("D", "theirs", "kib"), [(64, 64, 12), (96, 80, 12), (128, 128, 12.5)])
def test_tiled_kernels_are_of_the_size_of_mlx_s(D, theirs, kib, rules):
    """MLX has no windows, and no kernel for 96: the one for 80 is smaller. An M1 core caches 12 KiB of code."""
    row = OURS[f"tiled f16 D{D} {rules}"]
    mlx = RECORD["mlx"][f"steel_attention f16 D{theirs} {'plain' if rules == 'plain' else 'causal'}"]
    assert row["spills"] == row["fills"] == 0
    assert row["instructions"] <= 1.5 * mlx["instructions"]
    assert row["bytes"] <= kib * 1024
    assert row["threads"] >= 512


SPILL = {"tiled f16 D128 int8"}  # dequantises eight numbers at a time on the way to threadgroup memory


def test_no_other_kernel_spills():
    compiled = {name: row for name, row in OURS.items() if "failed" not in row}
    assert {name for name, row in compiled.items() if row["spills"] > 0} <= SPILL
    assert len(compiled) >= len(OURS) - 1, "Mesa fails on some of them on some days"


def test_decode_takes_fewer_instructions_a_row_the_more_rows_there_are():
    rows = {n: OURS[f"vector f16 D128 rows {n}"]["instructions"] for n in (1, 4, 8)}
    assert rows[1] <= 1.2 * RECORD["mlx"]["sdpa_vector f16 D128"]["instructions"]
    assert rows[1] > rows[4] / 4 > rows[8] / 8


TEMPLATE = """
#include <metal_stdlib>
using namespace metal;
template <typename T, int N = 4>
[[kernel]] void twice(const device T* x [[buffer(0)]], device T* y [[buffer(1)]], const constant int& n [[buffer(2)]],
                      uint3 at [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  const short2 pair = short2(n, N);
  if (lane < uint(pair.x)) y[at.x] = x[at.x] * T(2);
}
"""


def test_a_template_becomes_an_entry():
    made = to_opencl(TEMPLATE, "twice", (32, 1, 1), Instance({"T": "half"}, {"N": 4}))
    assert "[[" not in made
    assert "template" not in made
    assert "void tw(const device T* x, device T* y, const constant int*  n)" in made
    assert "typedef half T;" in made
    assert "constant constexpr int N = 4;" in made
    assert "(short2)((*n), N)" in made
    assert "const uint lane = uint(get_sub_group_local_id());" in made


def test_an_unknown_kernel_is_named():
    with pytest.raises(ValueError, match="thrice"):
        to_opencl(TEMPLATE, "thrice", (32, 1, 1))
