"""The Hopper backward kernel run by `gluon_sim`: arguments as a launch would give them, over NumPy."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

import gluon_sim
from gluon_sim import Descriptor, Machine
from gluon_values import Pointer, Tensor
from hopper_sim import flat
from tilewise.backends.gpu.launch_program import Workspaces
from tilewise.backends.gpu.target import nvidia
from tilewise.backends.hopper.bwd import config
from tilewise.backends.hopper.bwd.prepost import MOST_LSE
from tilewise.core.tensors import BackwardTensors

LOWEST = -6e4


def parts_of(x: np.ndarray) -> np.ndarray:
    """[rows] as [rows, 16] of float16, whose sum it is."""
    found = np.zeros((len(x), 16), np.float16)
    for n in range(3):
        found[:, n] = x.astype(np.float16)
        x = x - found[:, n].astype(np.float32)
    return found


def listed(cu: torch.Tensor, block: int, room: int) -> Pointer:
    """What `list_blocks` writes."""
    counts = [-(-(b - a) // block) for a, b in pairwise(cu.tolist())]
    blocks = [(b, n) for b, count in enumerate(counts) for n in range(count)]
    blocks += [(0, 1 << 22)] * (room - len(blocks))
    return Pointer(np.array(blocks, np.int32).reshape(-1))


def launch(kernel: Any, arguments: Any, made: dict[str, Any], programs: int, seed: int) -> None:
    given = {name: made[name] for name in arguments.NAMES}
    given |= {name: Tensor(np.int32(made[name])) for name in arguments.SIZES}
    gluon_sim.MACHINE = Machine(programs, seed)
    gluon_sim.MACHINE.run(lambda: kernel(**given))


class Backward:
    """One backward pass: what comes before the kernel in NumPy, the kernel by the simulator, what comes after it."""

    def __init__(self, problem: Any, t: BackwardTensors, **changes: Any) -> None:
        self.problem, self.t, self.changes = problem, t, changes
        self.launcher = self.launcher_of(problem)
        self.starts = [0] * problem.batch
        self.lengths = [problem.q_len] * problem.batch
        if problem.packed_q:
            cu = t.forward.cu_seqlens_q.tolist()
            self.starts, self.lengths = cu[:-1], [b - a for a, b in pairwise(cu)]
        self.launcher.spec = replace(self.launcher.spec, **changes)
        self.given = self.launcher.tensors(t, Workspaces(t.dout.device))
        self.spec = replace(self.launcher.spec_for(self.given), **changes)
        if "ACC" in self.given:
            self.given["ACC"].fill_(float("nan"))

    def launcher_of(self, problem: Any) -> Any:
        from tilewise.backends.hopper.bwd.narrow_launch import NarrowLauncher

        return NarrowLauncher(problem, nvidia(90))

    def entries(self) -> Any:
        """Batch row, head, first row, rows in it, and place of each query block."""
        p, BM, per_head = self.problem, self.launcher.BM, self.launcher.q_blocks
        for b, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            for h in range(p.heads):
                for i in range(-(-length // BM)):
                    at = h * per_head + start // BM + b + i if p.packed_q else (b * p.heads + h) * per_head + i
                    yield 0 if p.packed_q else b, h, start + i * BM, min(BM, length - i * BM), at

    def before(self) -> None:
        f, p, BM = self.t.forward, self.problem, self.launcher.BM
        stats, lse2 = self.given["STATS"].numpy(), self.given["LSE2"]
        stats[...] = 0
        if self.t.dmask is not None and config.skips_cells(p):
            self.t.dmask.zero_()
        self.given["SEMAPHORES"].zero_()
        self.given["COUNTER"].zero_()
        for b, h, row, count, entry in self.entries():
            rows = slice(row, row + count)
            lse = f.lse[b, h, rows].numpy()
            delta = (f.out[b, h, rows].float() * self.t.dout[b, h, rows].float()).sum(-1).numpy()
            if self.t.dlse is not None:
                delta = delta - self.t.dlse[b, h, rows].numpy()
            seen = ~np.isinf(lse)  # as `preprocess` has it: NaN is passed on
            minus = np.zeros(BM, np.float32)
            minus[:count] = np.where(seen, -delta, 0)
            at = slice(entry * BM, entry * BM + BM)
            stats[at, 16:] = parts_of(minus)
            low = np.full(BM, LOWEST, np.float32)
            if self.spec.mask:
                huge = self.spec.softcap or (np.abs(lse[seen]) > MOST_LSE.value).any()
                self.given["HUGE"][entry] = int(huge)
                lse2[entry] = -torch.inf
                lse2[entry, :count] = torch.from_numpy(np.where(seen, -lse, -np.inf))
                if huge:
                    continue
            low[:count] = np.where(seen, -lse / p.scale, LOWEST)
            stats[at, :16] = parts_of(low)
            if lse2 is not None and not self.spec.mask:
                lse2[entry] = -torch.inf
                lse2[entry, :count] = torch.from_numpy(np.where(seen, -lse * np.float32(1.4426950408889634), -np.inf))

    def run(self, kernels: Any, programs: int = 0, seed: int = 0) -> None:
        self.before()
        g, s, t = self.given, self.spec, self.t
        k_blocks = self.launcher.k_blocks(t.forward.k)
        made = self.launcher.arguments(g) | self.launcher.partials(g) | {"S": s}
        made = {name: flat(x) if isinstance(x, torch.Tensor) else x for name, x in made.items()}
        described = self.launcher.descriptors(g).items()
        made |= {name: d and Descriptor(d.base.numpy(), d.block_shape) for name, d in described}
        if s.packed:
            made["TABLE"] = listed(t.forward.cu_seqlens_k, 128, k_blocks)
        arguments = kernels["bwd.arguments"].BackwardArguments
        launch(kernels["bwd.kernel"].backward, arguments, made, programs or k_blocks * self.launcher.planes, seed)
        self.after()
        if config.sums_mask(self.problem):
            count = g["DMASK"].shape[0] * made["planes_h"] * self.launcher.q_blocks * made["tiles_k"]
            launch(kernels["bwd.mask_sums"].mask_sums, kernels["bwd.mask_sums"].SumArguments, made, count, seed)

    def after(self) -> None:
        s, p = self.spec, self.problem
        for name in ("DK", "DV") if s.split else ():
            x, to = self.given[f"{name}_PARTIALS"], self.given[name]
            x = x.view(to.shape[0], to.shape[1], -1, *x.shape[2:]).sum(2)
            to.copy_(x[..., : to.shape[3]])
        x = self.given["ACC"].view(-1, 2, 4, 8, 8, 4, 2, 2)
        order = (0, 2, 6, 4, 1, 3, 5, 7) if s.BM == 64 else (0, 1, 2, 6, 4, 3, 5, 7)
        x = x.permute(order).reshape(-1, s.BM, s.D)
        dq = self.given["DQ"]
        if p.packed_q:
            for gradient in (self.given["DK"], self.given["DV"]):
                gradient[:, :, int(self.t.forward.cu_seqlens_k[-1]) :] = 0
        for b, h, row, count, entry in self.entries():
            if not int(self.given["SEMAPHORES"][entry]):
                dq[b, h, row : row + count] = 0
            elif not s.converts:
                dq[b, h, row : row + count] = (x[entry, :count, : p.head_dim] * p.scale).to(dq.dtype)


class Wide(Backward):
    """The same of wide heads: two launches."""

    def launcher_of(self, problem: Any) -> Any:
        from tilewise.backends.hopper.bwd.wide.launch import WideLauncher

        return WideLauncher(problem, nvidia(90))

    def run(self, kernels: Any, programs: int = 0, seed: int = 0) -> None:
        self.before()
        for s in self.launcher.specs:
            self.launch_one(kernels, replace(s, **self.changes), seed)
        if self.problem.packed_q:
            for x, cu in ((self.t.dq, "CU_Q"), (self.t.dk, "CU_K"), (self.t.dv, "CU_K")):
                x[:, :, int(self.given[cu][-1]) :] = 0

    def launch_one(self, kernels: Any, s: Any, seed: int) -> None:
        from tilewise.backends.hopper.bwd.wide.launch import names_of

        g, names = self.given, names_of(s) | {"stats": "STATS", "lse": "LSE2"}
        made: dict[str, Any] = {name: flat(x) for name, x in g.items()} | self.launcher.sizes
        own = self.launcher.own(g, s)
        for name, value in own.items():
            if hasattr(value, "block_shape"):
                own[name] = Descriptor(g[names[name.rstrip("1")]].numpy(), value.block_shape)
        made |= own | {"DX": flat(own["DX"]), "DY": flat(own["DY"])}
        if s.packed:
            made["TABLE"] = listed(g["CU_Q" if s.of_queries else "CU_K"], s.BO, own["blocks"])
        arguments = kernels["wide.arguments"].WideArguments
        launch(kernels["wide.kernel"].wide_backward, arguments, made, own["blocks"] * own["planes"], seed)
