"""Wrong launches by address, each with one mistake that a launcher could make. Comparison must reject them all."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

from launch_calls import changes, misaligned, repeats
from launch_recorder import STREAM
from tilewise.backends.gpu import kernel, launcher, semaphores, tensor_map
from tilewise.backends.gpu.block_sparsity_launch import Lister
from tilewise.backends.gpu.launch_program import LaunchProgram, Origin, Places, Recorder
from tilewise.backends.triton import kv_write, merge
from tilewise.backends.triton.bwd import dense_mask
from tilewise.core.private import torch as private

MUTANTS: list[Mutant] = []


@dataclass(frozen=True)
class Mutant:
    """A mistake, the call that has it (by its name in the tests), and the check that rejects it."""

    name: str
    call: str
    apply: Callable[[pytest.MonkeyPatch], None]
    check: Callable[..., dict[str, list[str]]] = repeats


def mutant(name: str, *calls: str, check: Callable[..., dict[str, list[str]]] = repeats) -> Callable[[Any], Any]:
    def add(apply: Any) -> Any:
        MUTANTS.extend(Mutant(f"{name}: {call}", call, apply, check) for call in calls)
        return apply

    return add


def around(patch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """`owner.name(...)` becomes `change(owner.name, ...)`."""
    honest = getattr(owner, name)
    patch.setattr(owner, name, lambda *given, **more: change(honest, *given, **more))


class AnyKey(dict[Any, Any]):
    """Launches that are found by any key."""

    def get(self, key: Any, default: Any = None) -> Any:
        return next(iter(self.values()), default)


# Pointers


def swapped(replay: Any, self: Any, addresses: list[int]) -> None:
    replay(self, [addresses[1], addresses[0], *addresses[2:]])


@mutant(
    "the first two tensors swapped",
    "triton, prefill",
    "triton, split",
    "hopper, causal",
    "hopper, latent",
    "write, bf16",
    "write, int8",
)
def _(patch: pytest.MonkeyPatch) -> None:
    around(patch, LaunchProgram, "__call__", swapped)


@mutant("K and V swapped where the call is bound", "triton, prefill", "hopper, causal")
def _(patch: pytest.MonkeyPatch) -> None:
    def wrong(bind: Any, own: Any, t: Any) -> Any:
        launch = bind(own, t)
        return lambda q, k, v, *more: launch(q, v, k, *more)

    around(patch, launcher, "bind_addresses", wrong)


@mutant("dK and dV swapped", "triton backward, causal", "hopper backward, causal", "hopper backward, wide")
def _(patch: pytest.MonkeyPatch) -> None:
    def wrong(replay: Any, self: Any, addresses: list[int]) -> None:
        *first, dk, dv = addresses  # the call has no other gradients after them
        replay(self, [*first, dv, dk])

    around(patch, LaunchProgram, "__call__", wrong)


@mutant("the last pointers swapped", "merge", "triton, mask", "hopper, varlen")
def _(patch: pytest.MonkeyPatch) -> None:
    def wrong(replay: Any, self: Any, addresses: list[int]) -> None:
        *first, a, b = addresses
        replay(self, [*first, b, a])

    around(patch, LaunchProgram, "__call__", wrong)


@mutant("the first call's mask", "triton backward, key indices", "triton backward, tree")
def _(patch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []

    def wrong(masked: Any, problem: Any, t: Any) -> Any:
        made = masked(problem, t)
        kept.append(made.mask)
        return replace(made, mask=kept[0])

    around(patch, dense_mask, "masked_tensors", wrong)


# Tensor maps


@mutant(
    "maps stay where they were", "hopper, causal", "hopper, latent", "hopper backward, causal", "hopper backward, wide"
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tensor_map.TensorMap, "move", lambda self, address: None)


@mutant("strides in elements", "hopper, causal", "hopper, latent, paged", "hopper backward, wide")
def _(patch: pytest.MonkeyPatch) -> None:
    def wrong(init: Any, self: Any, like: Any, meta: dict[str, Any], cuda: Any) -> None:
        init(self, like, meta | {"elem_size": 1}, cuda)

    around(patch, tensor_map.TensorMap, "__init__", wrong)


@mutant("a map for blocks of every shape", "hopper, wide")
def _(patch: pytest.MonkeyPatch) -> None:
    def wrong(tensor_map: Any, self: Any, like: Any, form: dict[str, Any]) -> int:
        known = [made.at for key, made in self.made.items() if key[0] == self.index(like.base)]
        return known[0] if known else tensor_map(self, like, form)

    around(patch, Places, "tensor_map", wrong)


# Workspaces


def moved_origin(patch: pytest.MonkeyPatch, move: Callable[[Recorder, Origin], Origin]) -> None:
    around(patch, Recorder, "origin", lambda origin, self, x: move(self, origin(self, x)))


@mutant("memory that is not a tensor at a wrong offset", "triton, split", "hopper, causal", "hopper, latent, many")
def _(patch: pytest.MonkeyPatch) -> None:
    moved_origin(patch, lambda r, x: x if x.source < len(r.tensors) else x._replace(offset=x.offset + 16))


@mutant("partials over the semaphores", "triton, split")
def _(patch: pytest.MonkeyPatch) -> None:
    moved_origin(patch, lambda r, x: x if x.source < len(r.tensors) else x._replace(offset=0))


@mutant("workspaces overlap", "triton, mask", "triton backward, mask, bool", "hopper, block indices")
def _(patch: pytest.MonkeyPatch) -> None:
    def wrong(workspace: Any, self: Any, made: torch.Tensor) -> torch.Tensor:
        workspace(self, made)
        self.workspace_bytes -= 256
        return made

    around(patch, Recorder, "workspace", wrong)


@mutant("too small a workspace", "triton, split, combined after", "hopper, block indices", "hopper, latent, many")
def _(patch: pytest.MonkeyPatch) -> None:
    def wrong(init: Any, self: Any, *given: Any) -> None:
        init(self, *given)
        self.workspace_bytes -= 4

    around(patch, LaunchProgram, "__init__", wrong)


@mutant("the last call's workspace", "triton, split, combined after", "hopper, latent, many")
def _(patch: pytest.MonkeyPatch) -> None:
    kept: dict[Any, torch.Tensor] = {}

    def wrong(empty: Any, *shape: Any, **how: Any) -> torch.Tensor:
        if how.get("dtype") is not torch.uint8 or len(shape) > 1:
            return empty(*shape, **how)
        return kept.setdefault(shape, empty(*shape, **how))

    around(patch, torch, "empty", wrong)


@mutant("the first call's states", "triton, tile map, other tiles", "triton backward, tile map")
def _(patch: pytest.MonkeyPatch) -> None:
    kept: dict[Any, torch.Tensor] = {}
    around(patch, Lister, "states", lambda states, self, tile_map: kept.setdefault(self, states(self, tile_map)))


@mutant("captured calls have the stream's counters", "hopper, causal", "hopper, latent")
def _(patch: pytest.MonkeyPatch) -> None:
    def wrong(take: Any, self: Any, device: torch.device) -> torch.Tensor:
        known: torch.Tensor = next(iter(self.by_stream.values()), None) if self.by_stream else take(self, device)
        return known

    around(patch, semaphores.Semaphores, "take", wrong)


# Launches


def relaunched(patch: pytest.MonkeyPatch, change: Callable[[list[Any]], list[Any]]) -> None:
    """Programs with other launches."""

    def wrong(init: Any, self: Any, *given: Any) -> None:
        init(self, *given)
        self.launches = change(self.launches)

    around(patch, LaunchProgram, "__init__", wrong)


@mutant(
    "the last kernel is missing",
    "triton, prefill",
    "triton backward, causal",
    "triton, split, combined after",
    "triton, split",
)
def _(patch: pytest.MonkeyPatch) -> None:
    relaunched(patch, lambda launches: launches[:-1])


@mutant(
    "launches in another order", "triton, prefill", "triton, split, combined after", "triton, mask", "hopper, varlen"
)
def _(patch: pytest.MonkeyPatch) -> None:
    relaunched(patch, lambda launches: launches[::-1])


@mutant("captures as other calls", "triton, split")
def _(patch: pytest.MonkeyPatch) -> None:
    around(patch, LaunchProgram, "__init__", lambda init, self, recorded, captured=None: init(self, recorded))


@mutant("another grid", "triton, prefill", "hopper backward, mask, sums", "write, bf16", "merge")
def _(patch: pytest.MonkeyPatch) -> None:
    def wrong(init: Any, self: Any, compiled: Any, grid: tuple[int, int], *more: Any) -> None:
        init(self, compiled, (grid[0] + 1, grid[1]), *more)

    around(patch, kernel.KernelLaunch, "__init__", wrong)


@mutant("no stream", "hopper, latent", "hopper backward, wide", "triton, mask")
def _(patch: pytest.MonkeyPatch) -> None:
    def wrong(init: Any, self: Any, *given: Any) -> None:
        init(self, *given)
        self.stream = STREAM

    around(patch, LaunchProgram, "__init__", wrong)


@mutant("starts late", "triton, split, combined after")
def _(patch: pytest.MonkeyPatch) -> None:
    def wrong(init: Any, self: Any, *given: Any) -> None:
        init(self, *given)
        self.config.count = 0

    around(patch, kernel.KernelLaunch, "__init__", wrong)


@mutant("a number too large by one", "triton, varlen", "triton backward, varlen", "hopper, varlen", "write, int8")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kernel, "CELLS", kernel.CELLS | {"i32": lambda n: ctypes.c_int32(n + 1)})


# Keys of launches


@mutant("a key without strides", "triton, prefill", "triton, split", "hopper, causal", "hopper backward, causal",
        "hopper backward, wide", check=changes)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(launcher, "key_of", lambda k, given: (k.shape,))


@mutant(
    "a key without one tensor's strides",
    "triton, mask",
    "hopper, block indices",
    "hopper, latent, paged",
    check=changes,
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(launcher, "key_of", lambda k, given: (k.shape, *[x.stride() for x in given[:-1]]))


@mutant("a key without the number of keys", "hopper, varlen", "hopper backward, varlen", check=changes)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(launcher, "key_of", lambda k, given: tuple(x.stride() for x in given))


@mutant("any key", "triton, prefill", "triton backward, causal", "triton backward, mask, dense",
        "hopper backward, mask", "write, bf16", "merge", check=changes)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    def wrong(init: Any, self: Any, *given: Any) -> None:
        init(self, *given)
        setattr(self, "recorded" if isinstance(self, launcher.PlanLauncher) else "programs", AnyKey())

    for owner in (kv_write.Append, launcher.PlanLauncher):
        around(patch, owner, "__init__", wrong)
    patch.setattr(merge, "_programs", AnyKey())


def aligned_or_not(patch: pytest.MonkeyPatch) -> None:
    """Addresses that are not looked at."""
    for module in (launcher, kv_write, merge):
        patch.setattr(module, "is_aligned", lambda addresses, device: private.current_device() == device.index)


for call, tensor in (
    ("triton, prefill", "q"), ("triton backward, causal", "dk"), ("hopper, causal", "lse"),
    ("hopper backward, causal", "lse"), ("hopper backward, mask", "mask"), ("merge", "lse1"),
):  # fmt: skip
    mutant("unaligned", call, check=partial(misaligned, name=tensor))(aligned_or_not)
