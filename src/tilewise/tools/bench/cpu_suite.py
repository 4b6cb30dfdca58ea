"""The suite `cpu`: its cases, each compared with one peer, and the bars that they have to reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ... import Plan, Quantised, attention, paged_attention, plan
from ...core.storage import FLOATS, QuantDtype
from ..workloads import LOGIT_STD, Inputs, Workload, make_inputs, normal
from . import machine
from .measure import interleaved
from .oracle import MOST_ERROR, oracle_errors
from .peers.candidate import OURS, dense_mask
from .peers.sdpa import sdpa
from .record import Cell, Record, TimedResult
from .targets import Row

CPU = torch.device("cpu")
DTYPES = {name: FLOATS[name] for name in ("f32", "bf16", "f16")}
LEAST_CACHE = 300 * 10**6  # bytes; larger than the last-level cache of a small machine
READ, SDPA, F16, CONTIGUOUS = "read speed", "SDPA", "our f16", "our contiguous"

ROWS = (
    Row("prefill f32", SDPA, 1.15, least=1.0),
    Row("prefill bf16", SDPA, 1.3),
    Row("prefill f16", SDPA, 2.0),
    Row("prefill D 512", SDPA, 1.3),
    Row("short D 32", SDPA, 1.3),
    Row("window 512 of 4096", SDPA, 10.0),
    Row("padding mask, half hidden", SDPA, 1.9),
    Row("decode MHA f32", READ, 0.75, is_share=True),
    Row("decode GQA 4 f32", READ, 0.65, is_share=True),
    Row("decode MHA bf16, f16", READ, 0.60, least=0.60, is_share=True),
    Row("decode GQA 4 bf16, f16", READ, 0.45, least=0.45, is_share=True),
    Row("decode GQA 32/8 8k f32", SDPA, 6.0),
    Row("decode GQA 32/8 8k bf16", SDPA, 20.0),
    Row("decode GQA 32/8 8k f16", SDPA, 40.0),
    Row("decode int8 cache", F16, 1.0, least=1.0),
    Row("decode int4 cache", F16, 0.9, least=0.9),
    Row("smallest call", SDPA, 1.0),
    Row("paged by 16, shuffled", CONTIGUOUS, 0.95, least=0.95),
)


BUDGET, QUICK_BUDGET = 4.0, 0.5  # seconds of timing for each case
FULL_MEMORY = 4 * 1024**2  # bytes of workspace that a thread may take


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case with its tensors in place."""

    ours: Callable[[], torch.Tensor]
    peer: Callable[[], object]
    error: Callable[[torch.Tensor], float]  # the largest error against float64
    allowed: float  # bound of that error
    flops: int
    moved: int  # bytes that ours has to read and write
    workspace: int  # bytes
    peer_read: int = 0  # bytes that the peer reads; if set, read speeds are compared, not times
    peer_same: bool = True  # the peer computes the same output


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement; `prepare` makes its tensors when it is run."""

    row: str
    name: str
    prepare: Callable[[], Prepared]
    needs_half_sdpa: bool = False  # SDPA in 16 bits, which crashes on some machines

    @property
    def metric(self) -> str:
        return "bytes" if self.row.startswith(("decode", "smallest")) else "flops"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the cases are here."""

    shrink: int = 1  # lengths are divided by this: for tests
    cache: int = LEAST_CACHE  # bytes of K and V in decode cases that must not fit in a CPU cache
    quantised: int = LEAST_CACHE  # the same in f16, if the int4 form must not fit either
    read: int = 1024**3  # bytes read to measure the read speed
    matrix: int = 2048

    def length(self, full: int) -> int:
        return max(16, full // self.shrink)


def sizes_here() -> tuple[Sizes, list[str]]:
    """Sizes for this machine's caches and memory, and notes about them."""
    last, memory = machine.last_cache(), machine.memory_available()
    want = Sizes(cache=max(LEAST_CACHE, 2 * last), quantised=4 * max(LEAST_CACHE, last + last // 4))
    most = memory // 6
    got = replace(want, cache=min(want.cache, most), quantised=min(want.quantised, most), read=min(want.read, most))
    notes = []
    if got.cache < max(LEAST_CACHE, last):
        notes.append(f"decode caches of {got.cache / 1e6:.0f} MB, for want of memory, may stay in the last-level cache")
    if got.quantised < want.quantised:
        notes.append(f"int8 and int4 caches, beside {got.quantised / 1e6:.0f} MB of f16, may stay in the last cache")
    return got, notes


def cases(sizes: Sizes, quick: bool = False) -> list[Case]:
    """All cases in the order of `ROWS`; quick: fewer of the same kind."""
    return [*_prefill_cases(sizes, quick), *_decode_cases(sizes, quick)]


@torch.no_grad()
def measure(case: Case, budget: float) -> Cell:
    """Times and checks one case: ours, then its row's peer."""
    prepared = case.prepare()
    error = prepared.error(prepared.ours())
    other = prepared.peer()
    peer_error = prepared.error(other) if prepared.peer_same and isinstance(other, torch.Tensor) else None
    ours, peer = interleaved([prepared.ours, prepared.peer], budget)
    if prepared.peer_read:  # the time in which the peer would read what ours reads
        factor = prepared.moved / prepared.peer_read
        peer = replace(peer, seconds=peer.seconds * factor, median=peer.median * factor)
    results = TimedResult(OURS, ours, error), TimedResult(row_of(case.row).against, peer, peer_error)
    return Cell(
        case.row, case.name, case.metric, results,
        allowed=prepared.allowed, flops=prepared.flops, bytes=prepared.moved, workspace=prepared.workspace,
    )  # fmt: skip


def row_of(name: str) -> Row:
    return next(row for row in ROWS if row.name == name)


def workspace_line(record: Record) -> list[str]:
    """The largest workspace of a call."""
    most = max(record.cells, key=lambda cell: cell.workspace, default=None)
    if most is None:
        return []
    per_thread = most.workspace / record.about["device"]["threads"]
    verdict = "reached" if per_thread < FULL_MEMORY else "missed"
    size = f"{per_thread / 1024**2:.2f} MiB a thread"
    return [f"workspace at most {size}, under 4: {verdict} ({most.group}: {most.name})"]


def _prefill_cases(sizes: Sizes, quick: bool) -> Iterator[Case]:
    for kind, dtype in DTYPES.items():
        for head_dim in (64, 128) if quick else (64, 128, 256):
            for length in (512,) if quick else (512, 2048):
                for causal in (False, True):
                    w = _workload(8, 8, head_dim, sizes.length(length), causal=causal)
                    name = f"D {head_dim}, L {length}, {'causal' if causal else 'full'}"
                    yield Case(f"prefill {kind}", name, partial(_beside_sdpa, w, dtype), kind != "f32")
    for causal in (False, True):
        word = "causal" if causal else "full"
        w = _workload(8, 8, 512, sizes.length(1024), causal=causal)
        yield Case("prefill D 512", f"f32, L 1024, {word}", partial(_beside_sdpa, w, torch.float32))
    w = _workload(8, 8, 32, sizes.length(512))
    yield Case("short D 32", "f32, L 512, full", partial(_beside_sdpa, w, torch.float32))
    length = sizes.length(4096)
    w = replace(_workload(8, 8, 128, length, causal=True), window=-(-512 * length // 4096))
    yield Case("window 512 of 4096", "f32, D 128, causal", partial(_beside_sdpa, w, torch.float32))
    length = sizes.length(2048)
    w = replace(_workload(8, 8, 64, length), lengths=(length // 2,) * 2)
    yield Case("padding mask, half hidden", "f32, D 64, L 2048, batch 2", partial(_padding, w))


def _decode_cases(sizes: Sizes, quick: bool) -> Iterator[Case]:
    for kind, dtype in DTYPES.items():
        for word, kv_heads in (("MHA", 32), ("GQA 4", 8)):
            row = f"decode {word} f32" if kind == "f32" else f"decode {word} bf16, f16"
            keys = _keys(sizes.cache, kv_heads, 128, dtype)
            name = f"{kind}, 32/{kv_heads} heads, D 128, {keys:,} keys"
            yield Case(row, name, partial(_beside_reading, kv_heads, keys, dtype, sizes.read))
    for kind, dtype in DTYPES.items():
        w = _workload(32, 8, 128, sizes.length(8192), rows=1)
        yield Case(f"decode GQA 32/8 8k {kind}", "D 128", partial(_beside_sdpa, w, dtype), kind != "f32")
    quantised: tuple[QuantDtype, ...] = ("int8", "int4")
    for quant in quantised:
        long = _keys(sizes.quantised, 8, 128, torch.float16)
        for keys in (sizes.length(8192),) if quick else (sizes.length(8192), long):
            name = f"f16 queries, 32/8 heads, D 128, {keys:,} keys"
            yield Case(f"decode {quant} cache", name, partial(_beside_f16, quant, keys))
    w = _workload(4, 4, 64, 128, rows=1)
    yield Case("smallest call", "f32, 1 x 4 x 1 x 64 over 128 keys", partial(_beside_sdpa, w, torch.float32))
    length = sizes.length(8192) // 16 * 16
    for kind in ("f32",) if quick else ("f32", "f16"):
        w = replace(_workload(32, 8, 128, length, rows=1), lengths=(length,) * 4, page_size=16)
        name = f"{kind}, decode, batch 4, 32/8 heads, D 128, 8192 keys"
        yield Case("paged by 16, shuffled", name, partial(_paged, w, DTYPES[kind]))
    rows, length = sizes.length(512), sizes.length(2048) // 16 * 16
    w = replace(_workload(8, 8, 128, length, rows=rows, causal=True), lengths=(length,), page_size=16)
    name = "f32, 512 queries over 2048 keys, causal, 8 heads, D 128"
    yield Case("paged by 16, shuffled", name, partial(_paged, w, torch.float32))


def _workload(
    heads: int, kv_heads: int, head_dim: int, keys: int, *, rows: int | None = None, causal: bool = False
) -> Workload:
    return Workload("", "", heads, kv_heads, head_dim, keys if rows is None else rows, keys, causal=causal)


def _keys(size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Keys whose K and V take `size` bytes, in whole 64s."""
    return max(64, -(-size // (2 * kv_heads * head_dim * dtype.itemsize) // 64) * 64)


def _beside_sdpa(w: Workload, dtype: torch.dtype) -> Prepared:
    x = make_inputs(w, CPU, dtype)
    return _prepared(x, _call(x), sdpa(w, x))


def _padding(w: Workload) -> Prepared:
    x = make_inputs(w, CPU, torch.float32)
    mask = dense_mask(w, x)  # [B, 1, 1, Lk]
    x = Inputs(x.q, x.k, x.v, {"mask": mask})
    return _prepared(x, _call(x), sdpa_with(x, mask))


def _beside_reading(kv_heads: int, keys: int, dtype: torch.dtype, read: int) -> Prepared:
    q = normal((1, 32, 1, 128), dtype, LOGIT_STD)
    k, v = (normal((1, kv_heads, keys, 128), dtype, numbers=seed) for seed in (1, 2))
    buffer = machine.read_buffer(read)
    x = Inputs(q, k, v, {})
    prepared = _prepared(x, _call(x), lambda: buffer.sum())
    return replace(prepared, moved=k.nbytes + v.nbytes, peer_read=buffer.nbytes, peer_same=False)


def _beside_f16(kind: QuantDtype, keys: int) -> Prepared:
    q = normal((1, 32, 1, 128), torch.float16, LOGIT_STD)
    k, v = (normal((1, 8, keys, 128), torch.float16, numbers=seed) for seed in (1, 2))
    quantised = [_quantised(x, kind) for x in (k, v)]
    part = Inputs(q[:, :4], _first_head(quantised[0]), _first_head(quantised[1]), {})
    chosen = plan(q, *quantised)
    return Prepared(
        ours=partial(attention, q, *quantised),
        peer=partial(attention, q, k, v),
        error=lambda out: oracle_errors(part, [out[:, :4]])[0],
        allowed=MOST_ERROR[q.dtype],
        peer_same=False,
        **_work(chosen),
    )


def _first_head(x: Quantised) -> torch.Tensor:
    assert x.scales is not None
    return x.format.dequantise(x.data[:, :1], x.scales[:, :1], torch.float32)


def _paged(w: Workload, dtype: torch.dtype) -> Prepared:
    x = make_inputs(w, CPU, dtype)
    assert x.block_table is not None
    k, v = (pages[x.block_table.long()].flatten(1, 2).transpose(1, 2).contiguous() for pages in (x.k, x.v))
    ours = partial(paged_attention, x.q, x.k, x.v, x.block_table, x.lengths, **x.options)
    return _prepared(x, ours, partial(attention, x.q, k, v, **x.options))


def _prepared(x: Inputs, ours: Callable[[], torch.Tensor], peer: Callable[[], object]) -> Prepared:
    return Prepared(ours, peer, lambda out: oracle_errors(x, [out])[0], MOST_ERROR[x.q.dtype], **_work(x.plan()))


def _call(x: Inputs) -> Callable[[], torch.Tensor]:
    return partial(attention, x.q, x.k, x.v, **x.options)


def sdpa_with(x: Inputs, mask: torch.Tensor) -> Callable[[], torch.Tensor]:
    return partial(torch.nn.functional.scaled_dot_product_attention, x.q, x.k, x.v, attn_mask=mask)


def _work(chosen: Plan) -> dict[str, Any]:
    cost = chosen.cost
    assert cost is not None
    return {"flops": cost.flops, "moved": cost.bytes_moved, "workspace": int(chosen.workspace_bytes)}


def _quantised(x: torch.Tensor, kind: QuantDtype) -> Quantised:
    """The first 2048 keys of `x`, quantised and repeated: quantising all of them would take longer than measuring."""
    few = Quantised.from_float(x[:, :, :2048], kind)
    assert few.scales is not None
    times = -(-x.shape[2] // few.shape[2])
    data, scales = (part.repeat(1, 1, times, 1)[:, :, : x.shape[2]].contiguous() for part in (few.data, few.scales))
    return Quantised(data, scales, kind, few.group)
