"""The Triton kernel that appends: its bytes in the interpreter, its code compiled ahead of time."""

import sys

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from aot import SHARED, compile_kernel
from interpreted import interpreted
from tilewise.backends.triton.kv_write import Append
from tilewise.core.kv_store import RowFormat, Store, WriteSlots

RUN = """
import torch
from tilewise.backends.triton.kv_write import Append
from tilewise.backends.torch.kv_write import Append as InTorch
from tilewise.core.kv_store import WriteSlots
from tilewise.core.kv_store import RowFormat
torch.manual_seed(0)
FORMS = [(64, 64, 32, 0, 0), (80, 48, 128, 1, 1), (96, 6, 64, 1, 0), (40, 128, 32, 0, 1)]
LATENT = [(576, 512, 128, 1, 1), (544, 512, 128, 0, 0)]

def stored(dtype, source, inside, D, Dv, group, paged, packed, late=0, none=0):
    outer, slots = (9, 3) if paged else (5, 7)
    formats = [RowFormat.of("dtype", dtype, group, w) for w in (D, Dv)]
    sides = []
    for _ in range(2):
        stores = [f.empty(outer, 2, slots, device=torch.device("cpu")) for f in formats]
        if inside:
            stores[1] = stores[0].first(formats[1])
        for s in stores:
            for x in (s.data, s.scales):
                if x is not None:
                    x.view(torch.uint8).fill_(77)  # V in K too
        sides.append(stores)
    counts = torch.tensor([2, 0, 11 if not paged else 5, 0, 3])
    cu = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
    starts = torch.tensor([1, 0, 2, 6, 0], dtype=torch.int32)
    table = torch.tensor([[8, 1, 0], [2, 2, 2], [0, 3, 4], [1, 1, 5], [6, 7, 0]], dtype=torch.int32)
    tokens = int(cu[-1])
    shape = (1, 2, tokens + none) if packed else (5, 2, 11)
    k, v = (torch.randn(*shape, w).mul(3).to(source) for w in (D, Dv))
    k[0, 0, 0] = 0
    v[0, 1, 0] = torch.finfo(source).max
    places = WriteSlots(starts + late, cu, tokens + none, bool(packed), table if paged else None, padded=none > 0)
    Append(*sides[0], slots)(k, v, places)
    places.starts = starts
    InTorch(*sides[1], slots)(k, v, places)
    pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(*sides) for name in ("data", "scales")]
    return all(x is None or x.view(torch.uint8).equal(y.view(torch.uint8)) for x, y in pairs)

done = 0
for dtype in ("f32", "f16", "int8", "int4", "codebook4", "fp8_e4m3", "fp8_latent", "latent int8", "latent fp8_latent"):
    inside, dtype = dtype.startswith("latent"), dtype.split()[-1]
    both = LATENT if dtype == "fp8_latent" else FORMS[1:2] if inside else FORMS
    for source, forms in ((torch.float32, both), (torch.float16, both[:1])):
        for form in forms:
            for none in (0, 4):  # tokens of no sequence
                assert stored(dtype, source, inside, *form, none=none), (dtype, source, form, none)
            done += 1
assert not stored("f32", torch.float32, False, *FORMS[0], late=1)
print(done)
"""


def test_it_stores_the_same_bytes_as_torch():
    """And rows one slot too late would be noticed."""
    run = interpreted(RUN)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    assert int(run.stdout) == 30 + 3 + 2 + 3


def stores(dtype, D, paged):
    fmt = RowFormat.of("dtype", dtype, 64, D)

    def empty(width, kind):
        shape = (512, 16, 8, width) if paged else (64, 8, 4096, width)
        x = torch.empty(shape, dtype=kind, device="meta")
        return x.transpose(1, 2) if paged else x

    scales = empty(fmt.scales, torch.float32) if fmt.scales else None
    return [Store(fmt, empty(fmt.columns, fmt.dtype), scales)] * 2


def appended(dtype):
    """Kernels that store rows in pages and in a plain cache, with their arguments."""
    for D, paged in ((576 if dtype == "fp8_latent" else 128, True), (576, False)):
        call = Append(*stores(dtype, D, paged), 16 if paged else 4096)
        ints = torch.empty(65, dtype=torch.int32, device="meta")
        table = torch.empty(64, 128, dtype=torch.int32, device="meta") if paged else None
        rows = torch.empty((1, 8, 64, D), dtype=torch.bfloat16, device="meta")
        yield call.prepare(call.tensors(rows, rows, WriteSlots(ints[:64], ints, 64, True, table)), packed=True)


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3", "int8", "int4", "codebook4", "fp8_latent"])
def test_it_compiles_without_spills(dtype, arch):
    for kernel, arguments in appended(dtype):
        built = compile_kernel(kernel, arguments, arch)
        assert built.spills == 0
        assert built.shared <= SHARED[arch]
