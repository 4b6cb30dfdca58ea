"""AMX in software, for machines with AVX-512 alone: tile registers in memory, their instructions as LLVM loops.

`install()` before any kernel is compiled, in a process of its own with an empty folder for kept kernels: the
registers are one thread's, and the code is not what a processor with AMX would run.
"""

import ctypes

from llvmlite import ir

from tilewise.backends.cpu.codegen.vector import F32, I8, I16, I32, I64, Emit, W
from tilewise.backends.cpu.gemm import amx, gemv_amx

ROWS, TILE = 16, 1024
MEMORY = ctypes.create_string_buffer(8 * TILE + 128)  # 8 tiles of 16 rows of 64 bytes, then their configuration
START = -(-ctypes.addressof(MEMORY) // 64) * 64
CONFIG, CONFIG_ROWS = START + 8 * TILE, 48  # where it is; bytes of it before the rows of each tile


def install() -> None:
    assert W == 16, "AMX comes with AVX-512"
    amx.usable.cache_clear()
    amx.usable = lambda: True
    amx._tile = gemv_amx._tile = _tile


def _tile(e: Emit, name: str, *args: object) -> None:
    b = e.builder
    if name == "ldtilecfg":
        e.store(e.load(b.ptrtoint(args[0], I64)), e.i64(CONFIG))
    if name in ("ldtilecfg", "tilerelease"):
        return
    register = e.i64(START + TILE * args[0])
    if name == "tilezero":
        for row in range(ROWS):
            e.store(e.zeros, register, row * W)
    elif name in ("tileloadd64", "tilestored64"):
        memory, stride = b.ptrtoint(args[1], I64), args[2]
        rows = b.zext(e.load_scalar(e.i64(CONFIG + CONFIG_ROWS + args[0]), 0, I8), I64)
        with e.loop(rows) as row:
            there, here = b.add(memory, b.mul(row, stride)), b.add(register, b.mul(row, e.i64(64)))
            source, to = (there, here) if name == "tileloadd64" else (here, there)
            e.store(e.load(source), to)
    elif name == "tdpbf16ps":
        _multiply(e, register, *(e.i64(START + TILE * tile) for tile in args[1:]))
    else:
        raise NotImplementedError(name)


def _multiply(e: Emit, c: object, a: object, b_: object) -> None:
    """C [16, 16] += A [16, 32] B [32, 16], B in pairs of rows: element 2k and 2k + 1 of each column side by side."""
    b = e.builder
    with e.loop(e.i64(ROWS)) as row:
        line = b.mul(row, e.i64(W))
        total = e.var(e.load(c, line))
        with e.loop(e.i64(16)) as k:
            pairs = b.bitcast(e.load(b_, b.mul(k, e.i64(W))), e.vector(I32))
            for half in range(2):
                column = b.add(b.mul(b.add(line, k), e.i64(2)), e.i64(half))
                bits = b.shl(b.zext(e.load_scalar(a, column, I16), I32), ir.Constant(I32, 16))
                number = e.splat(b.bitcast(bits, F32))
                wide = b.and_(pairs, e.i32s(-0x10000)) if half else b.shl(pairs, e.i32s(16))
                total.set(e.fma(number, b.bitcast(wide, e.vector(F32)), total.get()))
        e.store(total.get(), c, line)
