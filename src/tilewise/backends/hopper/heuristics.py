"""How a problem is cut for Hopper's prefill kernel. Plain functions of a `Problem`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...problem import Problem
from .spec import Spec

NAMES = {torch.float16: "f16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Config:
    """The shape of a launch."""

    BN: int
    consumers: int
    k_stages: int
    v_stages: int
    persistent: bool = True
    dynamic: bool = True  # where slots differ: programs take the next slot when they are ready
    share: int = 8  # programs that are to work on the same keys at a time
    staged: str = "own"
    out_columns: int = 0  # 0: all
    q_stages: int = 2
    consumer_regs: int = 240
    producer_regs: int = 24


FEW_QUERIES = 16  # queries up to here are decoded: they wait for memory, not for products
SHORT = 2048  # keys up to which two consumers are faster than three at D=64; see `config`
LITTLE = 4e10  # operations that the Triton backend does in the host time of a call here, 125 us to its 25


def refusal(problem: Problem) -> str | None:
    """Why a problem is not for these kernels, in a few words; None if it is."""
    p = problem
    if p.q_dtype not in NAMES or not p.q_dtype == p.k_dtype == p.v_dtype:
        return "takes q, k and v in float16 or bfloat16, all alike"
    if p.form == "paged":
        return "has no kernel for pages"
    if not p.aligned:
        return "needs rows that begin at multiples of 16 bytes, and none broadcast"
    if not p.scale > 0:
        return "needs a positive scale"
    if p.head_dim > 512:
        return "has no kernel for head dims over 512"
    return None


def slower(problem: Problem) -> str | None:
    """Why the Triton backend is the better choice, if it is: as a rule, because it takes less time.

    Measured: masks of a window of 1024 in 8k keys, D=128, bool / additive: 0.286 / 0.362 ms; Triton's 0.261 / 0.300.
    """
    p = problem
    if p.q_len <= FEW_QUERIES:
        return f"leaves {FEW_QUERIES} queries and fewer to the Triton backend, which is faster there"
    if p.mask is not None:
        return "leaves masks to the Triton backend, which is faster there"
    if p.packed_q and p.kv_lengths:
        return "leaves packed sequences with kv_lengths to the Triton backend: here they have not run on a GPU yet"
    if operations(p) < LITTLE:
        return "leaves small calls to the Triton backend, which starts them sooner"
    return None


def operations(problem: Problem) -> float:
    """About how many there are, by the longest sequence."""
    p = problem
    left, right = p.window
    keys = float(p.kv_len)
    if p.causal:
        keys /= 2 if p.q_len == p.kv_len else 1
        right = 0
    if left is not None:
        keys = min(keys, left + 1 + (p.kv_len if right is None else right))
    if p.chunk:
        keys = min(keys, p.chunk)
    rows = p.total_q if p.packed_q else p.batch * p.q_len
    return 2.0 * rows * p.heads * keys * (p.head_dim + p.value_dim)


def notes(problem: Problem, c: Config) -> tuple[str, ...]:
    found = [f"{c.consumers} warpgroups of 64 rows, TMA, {c.k_stages} tiles of keys under way"]
    if problem.split_size:
        found.append("split_size: keys are walked in one pass, which is batch-invariant already")
    return tuple(found)


def ceil_pow2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def chunk_widths(columns: int) -> tuple[int, int]:
    """(width, count) of the chunks that cover the head dim: one where a power of two does, up to 256."""
    if columns <= 256 and not 128 < columns <= 192:
        return max(64, ceil_pow2(columns)), 1
    if columns <= 192:
        return 64, 3
    return 128, -(-columns // 128)


def value_parts(problem: Problem) -> tuple[int, int]:
    """(width, count) of the tiles of the value dim; over wide heads they wait in chunks of 128 (see `config`)."""
    least = 64 if problem.head_dim <= 256 else 128
    width = min(256, max(least, ceil_pow2(problem.value_dim)))
    return width, -(-problem.value_dim // width)


def config(problem: Problem) -> Config:
    """What fits the shared memory (227 KiB) and the registers, and was the fastest there.

    Measured (TFLOPS full / causal, 16k tokens): D=64, three consumers and two: 1k 421 / 229 and 433 / 296, 4k 507 / 429
    and 456 / 426, 16k 516 / 500 and 420 / 452. D=256, the output in memory of its own and in q's: 1k 663 / 458 and
    647 / 461, 4k 744 / 686 and 727 / 675, 16k 751 / 762 and 741 / 733.
    """
    width, chunks = chunk_widths(problem.head_dim)
    DV, _ = value_parts(problem)
    # Tiles of a mask have a power of two of rows.
    if width * chunks <= 64 and DV <= 64 and problem.mask is None and problem.kv_len > SHORT:
        return Config(128, 3, 2, 2, consumer_regs=160, producer_regs=32)
    if width * chunks <= 128 and DV <= 128:
        return Config(128, 2, 2, 2)
    if width * chunks <= 192 and DV <= 128:
        return Config(128, 2, 2 * chunks, 2, out_columns=DV // 2, q_stages=1)
    if width * chunks <= 256:
        return Config(64, 2, 2 * chunks, 2, out_columns=DV // 2, q_stages=1)
    return Config(64, 2, 4, 1, staged="borrowed", out_columns=128, q_stages=1)


def uneven(problem: Problem) -> bool:
    """Whether some tiles of rows have more keys than others."""
    p = problem
    return p.causal or p.chunk > 0 or p.window != (None, None) or p.packed_q or p.kv_lengths or p.mask is not None


def section(problem: Problem, c: Config, programs: int) -> int:
    """Planes whose tiles are mixed, the longest first, if some have more to do.

    Few enough that several programs read the same keys at about the same time: then most reads come from the L2 cache.
    """
    p = problem
    if p.packed_q or not uneven(p):
        return 1
    tiles = -(-p.q_len // (64 * c.consumers))
    return max(1, min(p.batch * p.heads, programs // min(c.share, tiles)))


def spec(problem: Problem, c: Config) -> Spec:
    """What the kernel is compiled for."""
    p = problem
    left, right = p.window
    mask = "" if p.mask is None else "bool" if p.mask.is_bool else "float"
    ruled = p.causal or p.chunk > 0 or p.window != (None, None)
    width, chunks = chunk_widths(p.head_dim)
    DV, parts = value_parts(p)
    tail = p.kv_lengths or p.form != "dense" or p.kv_len % c.BN != 0
    return Spec(
        dtype=NAMES[p.q_dtype],
        chunk_d=width,
        chunks=chunks,
        DV=DV,
        parts=parts,
        BN=c.BN,
        consumers=c.consumers,
        q_stages=c.q_stages,
        k_stages=c.k_stages,
        v_stages=c.v_stages,
        staged=c.staged,
        out_columns=c.out_columns or DV,
        consumer_regs=c.consumer_regs,
        producer_regs=c.producer_regs,
        packed=p.packed_q,
        lengths=p.kv_lengths,
        offset=p.q_offset if isinstance(p.q_offset, str) else "int",
        causal=p.causal,
        left=left is not None,
        right=right is not None,
        chunk=p.chunk > 0,
        softcap=p.softcap > 0,
        alibi=p.alibi,
        sinks=p.sinks,
        mask=mask,
        linear=not p.softcap and not p.alibi and mask != "float",
        tail=tail,
        # Past the end of a dense tensor TMA reads zeros; anything else that is hidden may be NaN.
        guard=mask != "" or ruled or p.kv_lengths or p.form != "dense",
        lse=p.return_lse,
    )
