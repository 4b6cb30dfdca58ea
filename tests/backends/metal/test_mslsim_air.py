"""Kernels that Apple's own compiler has compiled, executed, against the same texts as the simulator reads them.

The library comes with MLX's wheel for macOS, which is downloaded; where it cannot be had nothing is compared.
"""

import pytest

from metal_sim import needs_simulator

pytestmark = needs_simulator


@pytest.fixture(scope="module", autouse=True)
def wheel():
    from mslsim import metallib

    found = metallib.wheel()
    if isinstance(found, str):
        pytest.skip(found)


PAIRS = [
    ("vector", "bfloat", {"options": ("float",), "queries": 3, "keys": 77}),
    ("vector", "half", {"options": ("sinks",), "queries": 3, "keys": 77}),
    ("2pass", "float", {"options": ("causal",), "queries": 2, "keys": 100}),
    ("steel", "bfloat", {"options": ("bool", "sinks"), "queries": 50, "keys": 70}),
]


@pytest.mark.parametrize(("family", "kind", "rest"), PAIRS, ids=[f"{p[0]} {p[1]}" for p in PAIRS])
def test_a_text_means_what_apple_compiled(family, kind, rest):
    from mslsim.against_apple import Pair, compare

    found = compare(Pair(family, kind, 64, 64, **rest))
    assert found.equal == found.numbers
    assert found.error < {"float": 1e-5, "half": 4e-3, "bfloat": 3e-2}[kind]


@pytest.mark.parametrize(
    ("family", "old", "new"),
    [("2pass", "fast::exp(maxs[simd_gid] - max_score)", "fast::exp2(maxs[simd_gid] - max_score)"),
     ("vector", "static_cast<T>(o[i])", "static_cast<T>(o[i] * 1.00001f)")],
)  # fmt: skip
def test_another_meaning_is_noticed(family, old, new):
    from mslsim.against_apple import Pair, compare

    assert old in _text()
    found = compare(Pair(family, "float", 64, 64, keys=77), change=lambda text: text.replace(old, new))
    assert found.equal < found.numbers


def test_another_order_of_buffers_is_noticed():
    from mslsim.against_apple import Pair, compare

    def swapped(text):
        return text.replace("gqa_factor [[buffer(4)]]", "gqa_factor [[buffer(-1)]]").replace(
            "N [[buffer(5)]]", "N [[buffer(4)]]").replace("[[buffer(-1)]]", "[[buffer(5)]]")  # fmt: skip

    assert swapped(_text()) != _text()
    with pytest.raises(AssertionError, match="by Apple's compiler as"):
        compare(Pair("vector", "float", 64, 64), change=swapped)


def _text():
    from mslsim import metallib

    return metallib.text_of("mlx/backend/metal/kernels/sdpa_vector.h", {})


def test_unknown_functions_are_named():
    from mslsim.air import _DECLARED, _defined

    with pytest.raises(NotImplementedError, match="sample_texture"):
        _DECLARED.sub(_defined, "declare float @air.sample_texture.f32(float) #1")
