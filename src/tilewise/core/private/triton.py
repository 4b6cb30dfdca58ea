"""Every private name of Triton that is no name of Gluon, and what Triton says of a kernel that it compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import find

SEEN = {
    "triton": {"3.6 3.7 3.8 3.9": "knobs.runtime.interpret backends.nvidia.driver.TMA_DTYPE_DEVICE_TO_HOST"},
}

INTERPRETED = find("triton.knobs.runtime.interpret") is True
# From a dtype in the form of a descriptor to the driver's.
TMA_DTYPES = find("triton.backends.nvidia.driver.TMA_DTYPE_DEVICE_TO_HOST")


class Launch(NamedTuple):
    """What launching a compiled kernel takes."""

    kinds: dict[str, str]  # of its arguments, in order, without those that are compiled in
    forms: tuple[dict[str, Any], ...]  # of its descriptors: block, element, swizzle
    warps: int
    shared: int  # bytes
    early: bool  # may start before the kernel that it follows has ended
    function: Any  # the driver's handle


def launch_of(compiled: Any) -> Launch:
    """What Triton says of a kernel that it compiled."""
    meta = compiled.metadata
    assert meta.num_ctas == 1
    assert meta.global_scratch_size == meta.profile_scratch_size == 0
    assert not meta.launch_cooperative_grid
    kinds = {name: kind for name, kind in compiled.src.signature.items() if kind != "constexpr"}
    forms = tuple(getattr(meta, "tensordesc_meta", None) or ())
    return Launch(kinds, forms, meta.num_warps, meta.shared, meta.launch_pdl, compiled.function)
