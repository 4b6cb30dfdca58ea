"""Gluon kernels of the Hopper backend run as plain Python: their own text over NumPy, with a stand-in for `gl`.

Partitions are threads of which one runs at a time; a random one that can goes on at each barrier. What is asynchronous
is as late as it may be: a copy by TMA lands at some later step, a product reads shared memory when it is waited for
(with an odd seed when it is started), a store leaves when it is waited for. So a wrong phase, a stage released too soon
or a work left out gives a deadlock, an error or a wrong result. Shared memory begins as NaN. Layouts, registers and the
order of sums are not modelled.
"""

from __future__ import annotations

import importlib.util
import math
import random
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from gluon_values import Pointer, SimError, Tensor, raw, typed

SOURCE = Path(__file__).parents[2] / "src/tilewise"
FILES = ("arguments", "layouts", "tile_scheduler", "pipeline", "tiles", "softmax", "mma", "epilogue", "producer",
         "consumer", "nonfinite", "kernel")  # fmt: skip
PLACES = {"mask_rules": "backends.gpu", "signature": "backends.hopper"} | dict.fromkeys(FILES, "backends.hopper.fwd")
FOLDERS = ("", ".gpu", ".hopper", ".hopper.fwd", ".hopper.bwd", ".hopper.bwd.wide", ".hopper.mla")
BACKWARD = PLACES | {
    f"bwd.{name}": "backends.hopper.bwd"
    for name in (
        "arguments",
        "sync",
        "tile_scheduler",
        "mask",
        "producer",
        "reducer",
        "converter",
        "softcap",
        "products",
        "consumer",
        "mask_sums",
        "kernel",
    )
}
WIDE = BACKWARD | {
    f"wide.{name}": "backends.hopper.bwd.wide"
    for name in ("arguments", "sync", "tile_scheduler", "producer", "epilogue", "consumer", "split", "kernel")
}
PACKAGES = ("plain", "plain.core", *(f"plain.backends{name}" for name in FOLDERS))


# ---- shared memory, barriers, copies


class Shared:
    """A piece of shared memory; views share it."""

    def __init__(self, a: np.ndarray) -> None:
        self.a = a

    def index(self, i: Any) -> Shared:
        i = int(raw(i))
        if not 0 <= i < len(self.a):
            raise SimError(f"piece {i} of {len(self.a)} in shared memory")
        return Shared(self.a[i])

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.a.reshape(shape))

    def permute(self, dims: Sequence[int]) -> Shared:
        return Shared(self.a.transpose(dims))

    def slice(self, start: int, size: int, dim: int) -> Shared:
        return Shared(self.a[(slice(None),) * dim + (slice(start, start + size),)])

    def reinterpret(self, dtype: Any, shape: Sequence[int], layout: Any) -> Shared:
        return Shared(self.a.reshape(-1).view(dtype)[: math.prod(shape)].reshape(shape))

    def load(self, layout: Any) -> Tensor:
        return Tensor(self.a.copy())

    def store(self, x: Any) -> None:
        self.a[...] = raw(x)


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes have come."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def arrive(self, n: int = 1) -> None:
        if self.pending < n:
            raise SimError("more arrivals than the barrier counts")
        self.pending -= n
        self.settle()

    def settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count


class Barriers:
    def __init__(self, shape: Sequence[int]) -> None:
        self.all = [Barrier() for _ in range(shape[0])]

    def index(self, i: Any) -> Barrier:
        i = int(raw(i))
        if not 0 <= i < len(self.all):
            raise SimError(f"barrier {i} of {len(self.all)}")
        return self.all[i]


class Descriptor:
    """A tensor as TMA sees it: tiles of it, zeros past its ends, where nothing is written."""

    def __init__(self, array: np.ndarray, block: Sequence[int]) -> None:
        self.array, self.layout, self.dtype, self.shape = array, None, array.dtype.type, array.shape
        self.block_type = SimpleNamespace(shape=list(block), nbytes=int(np.prod(block)) * array.itemsize)

    def _span(self, at: Sequence[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        inside, outside = [], []
        for start, size, limit in zip([int(raw(n)) for n in at], self.block_type.shape, self.array.shape, strict=True):
            low, high = min(max(start, 0), limit), min(max(start + size, 0), limit)
            outside.append(slice(low, max(low, high)))
            inside.append(slice(low - start, low - start + max(0, high - low)))
        return tuple(outside), tuple(inside)

    def read(self, at: Sequence[Any], to: Shared) -> None:
        outside, inside = self._span(at)
        to.a[...] = 0
        to.a[inside] = self.array[outside]

    def write(self, at: Sequence[Any], source: np.ndarray, added: bool = False) -> None:
        outside, inside = self._span(at)
        with np.errstate(all="ignore"):  # of a wrong kernel they may be anything
            self.array[outside] = source[inside] + (self.array[outside] if added else 0)


class Product(Tensor):
    """A product under way: it reads its operands when it is waited for."""

    def __init__(self, compute: Callable[[], np.ndarray]) -> None:
        self.compute, self.a = compute, None  # type: ignore[assignment]

    def value(self) -> np.ndarray:
        if self.a is None:
            raise SimError("a product is used before it is waited for")
        return self.a

    def finish(self) -> None:
        self.a = self.compute()


# ---- actors


class Actor:
    """A partition of a program: a thread that runs only when it is told to."""

    def __init__(self, machine: Machine, program: int, body: Callable[[], None], warps: int) -> None:
        self.machine, self.program, self.body, self.warps = machine, program, body, warps
        self.go, self.condition, self.done = threading.Semaphore(0), None, False
        self.error: BaseException | None = None
        self.products: list[Product] = []
        self.stores: list[Callable[[], None]] = []
        self.gathers: list[Callable[[], None]] = []
        self.thread = threading.Thread(target=self.work, daemon=True)

    def work(self) -> None:
        self.go.acquire()
        try:
            if not self.machine.stopped:
                self.body()
        except BaseException as error:  # handed to the scheduler
            self.error = error
        self.done = True
        self.machine.back.release()

    def pause(self, condition: Any = None) -> None:
        self.condition = condition
        self.machine.back.release()
        self.go.acquire()
        if self.machine.stopped:
            raise SystemExit


class Machine:
    """Programs whose actors and copies take random turns."""

    def __init__(self, programs: int, seed: int) -> None:
        self.programs, self.chance, self.early = programs, random.Random(seed), seed % 2 == 1
        self.back, self.stopped = threading.Semaphore(0), False
        self.actors: list[Actor] = []
        self.copies: list[Callable[[], None]] = []
        self.named: dict[tuple[int, int], list[int]] = {}  # hardware barriers: threads that have arrived, phase
        self.spins = 0
        self.current: Any = None
        self.program = 0

    def run(self, kernel: Callable[[], None]) -> None:
        """Sets up each program (it may be all there is), then lets their partitions run."""
        for program in range(self.programs):
            self.program = program
            self.current = SimpleNamespace(products=[], stores=[], pause=self.settle, program=program)
            kernel()
        for actor in self.actors:
            actor.thread.start()
        waiting = list(self.actors)
        try:
            while waiting:
                ready = [x for x in waiting if x.condition is None or x.condition()]
                if self.copies and (not ready or self.chance.random() < 0.4):
                    self.copies.pop(self.chance.randrange(len(self.copies)))()
                    continue
                if not ready:
                    raise SimError(f"deadlock of {len(waiting)} partitions")
                self.current = self.chance.choice(ready)
                self.current.go.release()
                self.back.acquire()
                if self.current.error is not None:
                    raise self.current.error
                if self.current.done:
                    waiting.remove(self.current)
            if self.copies:
                raise SimError("tiles that nobody waits for")
        finally:
            self.stopped = True
            for actor in waiting:
                if not actor.done:
                    actor.go.release()

    def settle(self, condition: Any = None) -> None:
        """For a program without partitions: copies land at once."""
        while self.copies:
            self.copies.pop()()
        if condition is not None and not condition():
            raise SimError("waits for ever")


MACHINE: Any = None


# ---- the stand-ins for `gl`, `tma`, `mbarrier` and the products


def _wait(bar: Barrier, phase: Any, pred: Any = True, deps: Any = ()) -> None:
    parity = int(raw(phase))
    if bool(raw(pred)):
        MACHINE.current.pause(lambda: bar.phase & 1 != parity)


def _arrive(bar: Barrier, count: int = 1) -> None:
    bar.arrive(count)
    MACHINE.current.pause()


def _expect(bar: Barrier, size: int) -> None:
    bar.bytes += size
    bar.arrive()


def _init(bar: Barrier, count: int) -> None:
    bar.count = bar.pending = count


def _copy_in(desc: Descriptor, at: Sequence[Any], bar: Barrier, to: Shared) -> None:
    def land() -> None:
        desc.read(at, to)
        bar.bytes -= desc.block_type.nbytes
        bar.settle()

    MACHINE.copies.append(land)


def _copy_out(desc: Descriptor, at: Sequence[Any], source: Shared) -> None:
    MACHINE.current.stores.append(lambda: desc.write(at, source.a))


def _gather(to: Shared, source: Pointer, mask: Any = None) -> None:
    """A copy by all threads: it lands at some time before the next arrival of copies of its partition."""
    MACHINE.current.gathers.append(lambda: to.store(source.load(mask)))


def _gathered(bar: Barrier, increment_count: bool) -> None:
    """All threads arrive when their copies so far have landed."""
    assert not increment_count
    actor, mine = MACHINE.current, MACHINE.current.gathers
    actor.gathers = []
    threads = 32 * actor.warps

    def land() -> None:
        for copy in mine:
            copy()
        bar.arrive(threads)

    MACHINE.copies.append(land)


def _store_wait(n: int) -> None:
    stores = MACHINE.current.stores
    while len(stores) > n:
        stores.pop(0)()


def _mma(a: Any, b: Shared, acc: Any, use_acc: Any = True, is_async: bool = False) -> Tensor:
    def compute() -> np.ndarray:
        left = a.a if isinstance(a, Shared) else raw(a)
        with np.errstate(all="ignore"):
            c = left.astype(np.float32) @ b.a.astype(np.float32)
            return c + raw(acc) if bool(raw(use_acc)) else c

    product = Product(compute)
    MACHINE.current.products.append(product)
    if not is_async or MACHINE.early:
        _mma_wait(0, (product,))
    return product


def _mma_wait(outstanding: int, deps: tuple[Any, ...]) -> Any:
    products = MACHINE.current.products
    while len(products) > outstanding:
        products.pop(0).finish()
    return deps[0] if len(deps) == 1 else deps


def _partitions(functions: Sequence[tuple[Any, tuple[Any, ...]]], warps: Any, registers: Any) -> None:
    program = MACHINE.program
    for (function, given), count in zip(functions, (4, *warps), strict=True):
        MACHINE.actors.append(Actor(MACHINE, program, lambda f=function, g=given: f(*g), count))


def _allocate(dtype: Any, shape: Sequence[int], layout: Any) -> Any:
    if layout == "mbarrier":
        return Barriers(shape) if len(shape) > 1 else Barrier()
    poison = np.nan if np.dtype(dtype).kind == "f" else 0x7FFFFFF
    return Shared(np.full(shape, poison, dtype=dtype))


def _asm(text: str, constraints: str, given: Sequence[Any], *rest: Any, **options: Any) -> Tensor:
    numbers = [x if isinstance(x, Pointer) else raw(x) for x in given]
    with np.errstate(all="ignore"):
        if "pred far" in text:
            return Tensor(np.tanh(numbers[0]))
        if "KEPT" in text:
            return Tensor(numbers[0] * numbers[1])
        if "neg.f32 n" in text:
            return Tensor(np.float32(1.0) - numbers[0] * numbers[0])
        if text.startswith("shl.b32 $0, $2, 16; and"):  # two of bfloat16, which float16 stands in for
            return Tensor(numbers[0].astype(np.float32))
        if text == "mov.b32 $0, {$1, $2};":  # a pair of 16 bits
            low, high = (x.view(np.uint16).astype(np.uint32) for x in numbers)
            return Tensor((low | high << 16).view(np.int32))
        if text.startswith("rcp"):
            return Tensor(np.float32(1.0) / numbers[0])
        if text.startswith("copysign"):
            return Tensor(np.copysign(numbers[1], numbers[0]))
        if text.startswith("prefetch"):
            return given[0].load()
    raise SimError(f"no such instruction here: {text}")


# ---- the stand-ins for `bwd/sync.py`


def _named_barrier(op: str, number: Any, threads: int) -> None:
    barrier = MACHINE.named.setdefault((MACHINE.current.program, int(raw(number))), [0, 0])
    barrier[0] += 32 * MACHINE.current.warps
    if barrier[0] > threads:
        raise SimError(f"barrier {int(raw(number))}: more threads than it counts")
    phase = barrier[1]
    if barrier[0] == threads:
        barrier[:] = 0, phase + 1
    MACHINE.current.pause((lambda: barrier[1] > phase) if op == "bar.sync" else None)


def _tma_add(desc: Descriptor, at: Sequence[Any], source: Shared) -> None:
    MACHINE.current.stores.append(lambda: desc.write(at, source.a, added=True))


def _load_acquire(at: Pointer) -> Tensor:
    MACHINE.spins += 1
    if MACHINE.spins > 100_000:
        raise SimError("a semaphore is waited for, for ever")
    MACHINE.current.pause()
    return at.load()


def _add_release(at: Pointer) -> None:
    at.store(at.load() + 1)


SYNC = {
    "named_barrier": _named_barrier, "load_acquire": _load_acquire, "add_release": _add_release,
    "bulk_writes_done": lambda: None, "load_relaxed": _load_acquire,
    "nap": lambda: None, "fence_async_global": lambda: None,
}  # fmt: skip


def _elementwise(f: Callable[..., Any]) -> Callable[..., Tensor]:
    def call(*given: Any) -> Tensor:
        values = [raw(x) for x in given]
        like = next((x for x in values if isinstance(x, np.ndarray)), np.asarray(0, np.int32))
        with np.errstate(all="ignore"):
            return Tensor(f(*(typed(x, like) for x in values)))

    return call


def _where(c: Any, a: Any, b: Any) -> Tensor:
    a, b = raw(a), raw(b)
    return Tensor(np.where(raw(c), typed(a, b), typed(b, a)))


def _full(shape: Sequence[int], value: Any, dtype: Any, layout: Any = None) -> Tensor:
    return Tensor(np.full(shape, raw(value), dtype=dtype))


def _same(x: Any, *rest: Any, **options: Any) -> Any:
    return x


def _jit(f: Any = None, **options: Any) -> Any:
    return _same if f is None else f


def _sum(x: Any, axis: int) -> Tensor:
    with np.errstate(over="ignore"):
        return Tensor(np.sum(raw(x), axis, dtype=raw(x).dtype))


def _cdiv(a: Any, b: Any) -> Any:
    return (a + (b - 1)) // b


def stand_in() -> Any:
    """The module `gl`."""
    gl = SimpleNamespace(
        float16=np.float16, float32=np.float32, int16=np.int16, int32=np.int32, int64=np.int64, bfloat16=np.float16,
        constexpr=lambda x=None: x, tensor=Tensor, shared_memory_descriptor=Shared, tuple=tuple,
        associative_scan=lambda x, axis, add: Tensor(np.cumsum(raw(x), axis, dtype=raw(x).dtype)),
        static_range=range, static_assert=lambda ok: None, cdiv=_cdiv, num_warps=lambda: 4,
        program_id=lambda axis: Tensor(np.int32(MACHINE.current.program)),
        num_programs=lambda axis: Tensor(np.int32(MACHINE.programs)),
        minimum=_elementwise(np.minimum), maximum=_elementwise(np.maximum), exp2=_elementwise(np.exp2),
        log=_elementwise(np.log), log2=_elementwise(np.log2), abs=_elementwise(np.abs),
        fma=_elementwise(lambda a, b, c: a * b + c), where=_where,
        arange=lambda a, b, layout=None: Tensor(np.arange(a, b, dtype=np.int32)), full=_full,
        zeros=lambda shape, dtype, layout=None: _full(shape, 0, dtype),
        full_like=lambda x, value: _full(x.shape, value, raw(x).dtype),
        zeros_like=lambda x: Tensor(np.zeros_like(raw(x))), max=lambda x, axis: Tensor(np.max(raw(x), axis)),
        sum=_sum,
        reshape=lambda x, shape: Tensor(raw(x).reshape(shape)), permute=lambda x, dims: Tensor(raw(x).transpose(dims)),
        split=lambda x: (Tensor(raw(x)[..., 0]), Tensor(raw(x)[..., 1])),
        join=lambda a, b: Tensor(np.stack([raw(a), raw(b)], -1)), convert_layout=_same, to_tensor=_same,
        expand_dims=lambda x, axis: Tensor(np.expand_dims(raw(x), axis)),
        load=lambda at, mask=None, other=0, cache_modifier="": at.load(mask, other),
        store=lambda at, x, mask=None: at.store(x, mask),
        inline_asm_elementwise=_asm, warp_specialize=_partitions,
    )  # fmt: skip
    for name in ("SliceLayout", "BlockedLayout", "NVMMADistributedLayout", "DotOperandLayout", "SwizzledSharedLayout",
                 "DistributedLinearLayout"):  # fmt: skip
        setattr(gl, name, lambda *given, **options: None)
    gl.NVMMASharedLayout = SimpleNamespace(get_default_for=lambda *given: None)

    def atomic_add(at: Pointer, n: int, sem: str = "") -> Tensor:
        old = at.load()
        at.store(old + n)
        return old

    gl.atomic_add = atomic_add
    return gl


def modules(allocate: Any) -> dict[str, Any]:
    """What the kernels import of Triton."""

    def module(**names: Any) -> ModuleType:
        made = ModuleType("stand-in")
        made.__path__ = []  # a package
        made.__dict__.update(names)
        return made

    gl = stand_in()
    gl.allocate_shared_memory = allocate
    gluon = module(
        gl=gl,
        gluon=module(jit=_jit, constexpr_function=_same),
        mbarrier=SimpleNamespace(
            wait=_wait, arrive=_arrive, expect=_expect, init=_init, MBarrierLayout=lambda: "mbarrier"
        ),
        tma_load=_copy_in,
        tma_store=_copy_out,
        tma_add=_tma_add,
        tma_store_wait=_store_wait,
        cp_async=_gather,
        cp_async_arrive=_gathered,
        PAIRED_WEIGHTS=False,
        opaque=_same,
        reinterpret=lambda tile, *form: tile.reinterpret(*form),
        thread_barrier=lambda: None,
        fence_async_shared=lambda: None,
        warpgroup_mma=_mma,
        warpgroup_mma_wait=_mma_wait,
        aggregate=_same,
        base_value=Tensor,
    )
    return {
        "triton": module(jit=_jit, constexpr_function=_same, language=gl), "triton.language": module(**vars(gl)),
        "plain.backends.gpu.gluon": gluon,
    }  # fmt: skip


def load(
    changes: dict[str, list[tuple[str, str]]] | None = None,
    places: dict[str, str] = PLACES,
    allocate: Any = _allocate,
    given: dict[str, Any] | None = None,
) -> Any:
    """The kernels' modules by name, over the stand-ins; `changes` of a file's text make a mutant.

    `places` are files and their folders, in the order in which they import one another.
    """
    from tilewise.backends.gpu import flags, signature
    from tilewise.core import mask_rules

    fakes, real = modules(allocate), {"plain.backends.gpu.flags": flags, "plain.core.mask_rules": mask_rules,
             "plain.backends.gpu.signature": signature}  # fmt: skip
    kept = {name: sys.modules.get(name) for name in (*fakes, *PACKAGES, *real)}
    made = {}
    try:
        for name in PACKAGES:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = []  # type: ignore[attr-defined]
        sys.modules.update(real)
        sys.modules.update(fakes)
        for name, folder in places.items():
            file = SOURCE / folder.replace(".", "/") / f"{name.rpartition('.')[2]}.py"
            text = file.read_text()
            for old, new in (changes or {}).get(name, ()):
                if text.count(old) < 1:
                    raise ValueError(f"{name}.py has no {old!r}")
                text = text.replace(old, new)
            full = f"plain.{folder}.{file.stem}"
            spec = importlib.util.spec_from_loader(full, loader=None)
            assert spec is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[full] = made[name] = module
            exec(compile(text, str(file), "exec", dont_inherit=True), module.__dict__)
            if name == "bwd.sync":
                module.__dict__.update(SYNC)
    finally:
        for name, old in kept.items():
            if old is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = old
        for name, folder in places.items():
            sys.modules.pop(f"plain.{folder}.{name.rpartition('.')[2]}", None)
    return SimpleNamespace(**made)
