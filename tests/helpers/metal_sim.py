"""The Metal backend over CPU tensors: its text executed by tools/mslsim, every detector on."""

from contextlib import contextmanager

import pytest
import torch

import mslsim
from problem_space import problem_of
from tilewise.backends.metal import device, launch
from tilewise.core.storage import PLAIN
from tilewise.dispatch import call_cache, planner

why_not = mslsim.why_not()
needs_simulator = pytest.mark.skipif(why_not is not None, reason=f"Metal kernels are not executed here: {why_not}")


@contextmanager
def simulator(cores=10, change=lambda text: text, **options):
    """`attention(..., backend="metal")` runs in the simulator. `change` is given each text before it is compiled."""
    new = launch.workspace

    def compile_shader(text):
        return mslsim.compile_shader(change(text), **options)

    before = device.stand_in
    # Reading the workspace before it is written is a fault.
    launch.workspace = lambda like, size: mslsim.unwritten(new(like, size))
    device.stand_in = device.Device(compile_shader, cores, "cpu")
    try:
        forget_plans()
        yield device.stand_in
    finally:
        launch.workspace, device.stand_in = new, before
        forget_plans()


def forget_plans():
    planner.choose.cache_clear()
    call_cache.forget()


def problem(**changes):
    sizes = {
        "form": "dense", "device": torch.device("mps"), "batch": 2, "heads": 8, "kv_heads": 8, "q_len": 512,
        "kv_len": 512, "head_dim": 64, "value_dim": 64, "q_dtype": torch.float16, "k_format": PLAIN[torch.float16],
        "v_format": PLAIN[torch.float16], "scale": 0.1, "q_offset": 0,
    }  # fmt: skip
    return problem_of(**(sizes | changes))
