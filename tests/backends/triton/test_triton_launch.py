"""Launches by address without a GPU: what the driver is given, and where memory that stays comes from."""

import ctypes
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from tilewise.backends.gpu import block_sparsity_launch, launch_program, launcher, semaphores
from tilewise.backends.gpu.driver import NO_CONTEXT, CULaunchAttribute, CULaunchConfig
from tilewise.backends.gpu.launch_program import LaunchProgram, Recorder
from tilewise.core.private import torch as private
from tilewise.core.tensors import Tensors
from tilewise.dispatch import call_cache

SIGNATURE = {
    "Q": "*bf16", "n": "i32", "S": "constexpr", "stride": "i64", "scale": "fp32", "OUT": "*fp32", "one": "constexpr",
}  # fmt: skip
GIVEN = {"Q": None, "n": -7, "S": "spec", "stride": 1 << 40, "scale": 0.25, "OUT": None, "one": 1}


def compiled(**changes):
    meta = {
        "num_ctas": 1, "global_scratch_size": 0, "profile_scratch_size": 0, "launch_cooperative_grid": False,
        "launch_pdl": False, "num_warps": 4, "shared": 1234,
    }  # fmt: skip
    return SimpleNamespace(
        metadata=SimpleNamespace(**(meta | changes)), src=SimpleNamespace(signature=SIGNATURE), function=99
    )


class Driver:
    """Reads what `cuLaunchKernelEx` would be given."""

    def __init__(self, *errors):
        self.errors, self.calls, self.contexts = list(errors), [], []

    def context(self):
        return 42

    def set_context(self, context):
        self.contexts.append(context)

    def launch(self, how, function, parameters, extra):
        at = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        kinds = [ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64, ctypes.c_float] + [ctypes.c_uint64] * 3
        values = [kind.from_address(at[i]).value for i, kind in enumerate(kinds)]
        copy = CULaunchConfig.from_buffer_copy(ctypes.string_at(how, ctypes.sizeof(CULaunchConfig)))
        self.calls.append((copy, function, values, extra))
        return self.errors.pop(0) if self.errors else 0


@pytest.fixture
def program(monkeypatch):
    """Makes a program of one kernel for a driver; the current stream is 7."""
    monkeypatch.setattr(private, "current_stream", lambda index: 7)

    def make(driver, **changes):
        monkeypatch.setattr(launch_program, "driver", lambda: driver)
        recorder = Recorder([torch.zeros(8, dtype=torch.bfloat16), torch.zeros(8)], recording=True, captured=False)
        given = GIVEN | dict(zip(("Q", "OUT"), recorder.tensors, strict=True))
        recorder.launches.append((compiled(**changes), (5, 3), given))
        return LaunchProgram(recorder)

    return make


def test_a_launch_has_every_argument_in_its_place(program):
    driver = Driver()
    high = (1 << 47) + 16
    program(driver)([high, 32])
    how, function, values, extra = driver.calls[0]
    assert function == 99
    assert extra is None
    assert values == [high, -7, 1 << 40, 0.25, 32, 0, 0], "two scratch pointers come last"
    assert (how.x, how.y, how.z) == (5, 3, 1)
    assert (how.threads, how.threads_y, how.threads_z, how.shared) == (128, 1, 1, 1234)
    assert (how.stream, how.count) == (7, 0)


def test_the_next_launch_has_its_own_pointers_and_stream(program, monkeypatch):
    driver = Driver()
    made = program(driver)
    made([16, 32])
    monkeypatch.setattr(private, "current_stream", lambda index: 8)
    made([48, 64])
    assert [(call[2][0], call[2][4], call[0].stream) for call in driver.calls] == [(16, 32, 7), (48, 64, 8)]


def test_a_kernel_that_may_start_early_says_so(program):
    driver = Driver()
    program(driver, launch_pdl=True)([16, 32])
    how = driver.calls[0][0]
    assert how.count == 1
    assert how.attributes is not None


def test_sizes_of_the_drivers_structures():
    """As `cuda.h` has them on 64-bit machines."""
    assert ctypes.sizeof(CULaunchConfig) == 56
    assert ctypes.sizeof(CULaunchAttribute) == 72
    assert CULaunchAttribute.value.offset == 8


def test_a_launch_that_fails_is_an_error(program):
    with pytest.raises(RuntimeError, match="CUDA error 701"):
        program(Driver(701))([16, 32])


def test_a_thread_without_a_context_is_given_one(program):
    driver = Driver(NO_CONTEXT)
    program(driver)([16, 32])
    assert driver.contexts == [42]
    assert len(driver.calls) == 2
    with pytest.raises(RuntimeError, match="CUDA error 201"):
        program(Driver(NO_CONTEXT, NO_CONTEXT))([16, 32])


@pytest.mark.parametrize("wrong", [[16], [16, 32, 48]])
def test_pointers_are_counted(program, wrong):
    with pytest.raises(Exception, match="pack_into expected 2 items"):
        program(Driver())(wrong)


def test_memory_that_is_not_of_the_call_is_refused(program, monkeypatch):
    """A launcher that keeps a tensor, or makes one past the recorder, would launch on its old address."""
    recorder = Recorder([torch.zeros(8)], recording=True, captured=False)
    given = GIVEN | {"Q": recorder.tensors[0], "OUT": torch.zeros(8)}
    recorder.launches.append((compiled(), (1, 1), given))
    monkeypatch.setattr(launch_program, "driver", Driver)
    with pytest.raises(RuntimeError, match="neither a tensor of the call nor a workspace"):
        LaunchProgram(recorder)


def test_what_stays_is_made_by_another_thread(monkeypatch):
    """While `torch.compile` warms up, what a thread allocates goes to a graph's pool, where nothing may stay."""
    makers = []

    def zeros(self, sets, device):
        makers.append(threading.get_ident())
        return [torch.zeros(self.count, dtype=torch.int32) for _ in range(sets)]

    monkeypatch.setattr(semaphores.Semaphores, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(private, "is_capturing", lambda: False)
    monkeypatch.setattr(private, "current_stream", lambda device: 5)
    kept = semaphores.Semaphores(8, spare=2)
    device = torch.device("cuda", 0)
    assert kept.address(5, device) == kept.take(device).data_ptr() == kept.by_stream[5].data_ptr()
    assert len(makers) == 1
    assert makers[0] != threading.get_ident()
    assert len(kept.spare) == 2


def test_no_memory_for_what_stays_is_an_error(monkeypatch):
    def zeros(self, sets, device):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(semaphores.Semaphores, "zeros", zeros)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with pytest.raises(torch.OutOfMemoryError, match="counters"):
        semaphores.Semaphores(8).lasting(torch.device("cuda", 0))


def test_a_tile_map_that_comes_again_is_cut_once(monkeypatch):
    """Until its states change, another stream asks, or a graph is captured."""
    made, stream, captured = [], [7], [False]
    lister = block_sparsity_launch.Lister.__new__(block_sparsity_launch.Lister)
    lister.kept = ()
    monkeypatch.setattr(lister, "retiled", lambda tile_map: made.append(tile_map) or f"cut {len(made)}")
    monkeypatch.setattr(private, "current_stream", lambda index: stream[0])
    monkeypatch.setattr(block_sparsity_launch, "capturing", lambda: captured[0])

    def tile_map():
        states = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=0), _version=0)
        return SimpleNamespace(states=states)

    first, second = tile_map(), tile_map()
    assert [lister.states(first) for _ in range(3)] == ["cut 1"] * 3
    captured[0] = True
    assert lister.states(first) == "cut 2"
    captured[0] = False
    assert lister.states(first) == "cut 1"
    first.states._version += 1
    assert lister.states(first) == "cut 3"
    stream[0] = 8
    assert [lister.states(first) for _ in range(2)] == ["cut 4"] * 2
    assert lister.states(second) == "cut 5"


class Recorded:
    """In the place of a plan's launches: what they are given."""

    def __init__(self):
        self.recorded, self.called, self.launched = {}, [], []

    def __call__(self, t):
        self.called.append(t)
        given = [x for x in (getattr(t, name) for name in call_cache.FIELDS) if x is not None]
        self.recorded[launcher.key_of(t.k, given)] = self.launched.append


def test_any_call_is_launched_by_the_addresses_of_its_tensors(monkeypatch):
    """In the order of the fields, whatever the caller's layout is; the first time through the plan."""
    monkeypatch.setattr(private, "current_device", lambda: None)  # a CPU has no index
    q, pages, out = torch.randn(2, 4, 1, 32), torch.randn(8, 16, 2, 32), torch.empty(2, 4, 1, 32)
    lengths, table = torch.ones(2, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)
    rows = pages.transpose(1, 2)
    bound = Recorded()
    launch = launcher.bind_addresses(bound, Tensors(q, rows, rows, out, kv_lengths=lengths, block_table=table))
    given = (q, pages, pages, out, None, None, None, None, None, None, lengths, None, None, None, table)
    launch(*given)
    [t] = bound.called
    assert (t.k.shape, t.k.stride(), t.kv_lengths is not None, t.lse) == (rows.shape, rows.stride(), True, None)
    launch(*given)
    assert bound.launched == [[x.data_ptr() for x in (q, pages, pages, out, lengths, table)]]
    shifted = torch.zeros(3, dtype=torch.int32)[1:]
    launch = launcher.bind_addresses(bound, Tensors(q, rows, rows, out, kv_lengths=shifted, block_table=table))
    for n in (2, 3):
        launch(*given[:10], shifted, *given[11:])  # not aligned: through the plan, which knows
        assert len(bound.called) == n
        assert bound.called[-1].kv_lengths.data_ptr() == shifted.data_ptr()
