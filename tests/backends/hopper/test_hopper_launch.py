"""How a Gluon kernel is handed to the driver: tiles, pointers and numbers, with a stand-in for it."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from tilewise.backends.gpu import kernel, launch_program, tensor_map
from tilewise.backends.gpu.driver import NO_CONTEXT, CULaunchConfig
from tilewise.backends.gpu.launch_program import Recorder
from tilewise.backends.hopper.descriptors import descriptor
from tilewise.core.private import torch as private


class TileDriver:
    """A stand-in for NVIDIA's driver: what it is told about tiles, and what a launch finds in its arguments."""

    def __init__(self, *errors):
        self.errors, self.encoded, self.moved, self.launched, self.contexts = list(errors), [], [], [], []

    def context(self):
        return 77

    def set_context(self, context):
        self.contexts.append(context)

    def encode(self, at, element, rank, address, dims, strides, box, steps, *rest):
        assert at % 64 == 0
        arrays = ((dims, ctypes.c_uint64, rank), (strides, ctypes.c_uint64, rank - 1), (box, ctypes.c_uint32, rank))
        self.encoded.append((element, address, *(list((kind * n).from_address(x)) for x, kind, n in arrays), rest))
        ctypes.c_uint64.from_address(at).value = address
        return 0

    def move(self, at, address):
        self.moved.append(address)
        ctypes.c_uint64.from_address(at).value = address
        return 0

    def launch(self, how, function, parameters, extra):
        if self.errors:
            return self.errors.pop(0)
        places = list((ctypes.c_void_p * 14).from_address(parameters))
        kinds = [ctypes.c_uint64, *[ctypes.c_int32] * 4, *[ctypes.c_int64] * 4, ctypes.c_uint64, ctypes.c_int32]
        kinds += [ctypes.c_float, ctypes.c_uint64, ctypes.c_uint64]
        grid = CULaunchConfig.from_address(how)
        found = [kind.from_address(place).value for kind, place in zip(kinds, places, strict=True)]
        self.launched.append((function, (grid.x, grid.threads, grid.shared, grid.stream), found))
        return 0


class Compiled:
    """As Triton would compile a kernel: one tensor in tiles, one pointer, one that is not there, two numbers."""

    function = 5
    metadata = SimpleNamespace(
        num_ctas=1, global_scratch_size=0, profile_scratch_size=0, launch_cooperative_grid=False, num_warps=12,
        launch_pdl=False, shared=1000, tensordesc_meta=(
            {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 1, 64, 64], "fp4_padded": False},
        ),
    )  # fmt: skip
    src = SimpleNamespace(
        signature={
            "q": "tensordesc<bf16[1, 1, 64, 64],layout>", "OUT": "*bf16", "LSE": "constexpr", "n": "i32",
            "scale": "fp32", "S": "constexpr",
        }
    )  # fmt: skip


class Function:
    arg_names = ("q", "OUT", "LSE", "n", "scale", "S")

    def __getitem__(self, grid):
        assert grid == (7, 1)
        return lambda **given: Compiled


@pytest.fixture
def program(monkeypatch):
    """Makes a program that launches the kernel on two tensors, `count` times; the current stream is 21."""
    monkeypatch.setattr(private, "current_stream", lambda index: 21)

    def make(driver, q, count=1):
        monkeypatch.setattr(launch_program, "tensor_map_driver", lambda: driver)
        recorder = Recorder([q, q], recording=True, captured=False)
        x, out = recorder.tensors
        given = {"q": descriptor(x, 64, 64, "bf16"), "OUT": out[:, 1:], "LSE": None, "n": 9, "scale": 0.5, "S": "spec"}
        for _ in range(count):
            recorder.launch(kernel.Kernel(Function()), (7, 1), given | {"other": 1})
        return launch_program.LaunchProgram(recorder)

    return make


Q = torch.empty(1, 5, 3, 64, dtype=torch.bfloat16).transpose(1, 2)


def test_replays_pass_addresses_and_tiles(program):
    driver = TileDriver()
    made = program(driver, Q)
    assert driver.launched == []
    bf16 = tensor_map.TMA_DTYPES[10]
    assert driver.encoded == [
        (bf16, Q.data_ptr(), [64, 5, 3, 1], [192 * 2, 64 * 2, 8 * 2], [64, 64, 1, 1], (0, 3, tensor_map.L2_128B, 0))
    ]
    for address in (4096, 4096, 6144):
        made([address, address + 16])
    assert driver.moved == [4096, 6144]  # only where it changes
    numbers = [1, 3, 5, 64, 8, 64, 192, 1]
    for launched, address in zip(driver.launched, (4096, 4096, 6144), strict=True):
        out = address + 16 + 64 * 2  # from its second head on
        assert launched == (5, (7, 384, 1000, 21), [address, *numbers, out, 9, 0.5, 0, 0])


def test_kernels_that_are_launched_together_share_tiles(program):
    driver = TileDriver()
    program(driver, Q, count=2)([4096, 8192])
    assert len(driver.encoded) == len(driver.moved) == 1
    assert len(driver.launched) == 2


def test_a_launch_that_fails_is_an_error_and_a_new_thread_is_given_a_context(program):
    driver = TileDriver()
    made = program(driver, Q)
    driver.errors = [NO_CONTEXT]
    made([16, 32])
    assert driver.contexts == [77]
    assert len(driver.launched) == 1
    driver.errors = [701]
    with pytest.raises(RuntimeError, match="701"):
        made([16, 32])
