"""A conformance case over the ranks of a mesh: sharded, computed, put together again, and judged as any backend is."""

from dataclasses import replace

import torch
import torch.distributed as dist

from ranks import mesh_of
from tilewise import distributed
from tilewise.reference import gradients
from tilewise.testing import gradients as judging
from tilewise.testing.case import make
from tilewise.testing.check import MANY, Mismatch, check_call

GRADS = ("q", "k", "v", "mask", "sinks", "alibi_slopes", "q_bias", "k_bias")


class Sharded:
    """The inputs of a case on this rank."""

    def __init__(self, case, scheme, kind):
        self.case, self.scheme, self.mesh = case, scheme, mesh_of(kind)
        self.made = judging.make_gradients(case)
        self.inputs = make(case, sized=True)
        q, k, v, *tables = self.inputs.args
        self.packed = bool(tables)
        self.seq = 0 if tables else 1 if case.layout == "blhd" else 2
        self.cu = dict(zip("qk", tables, strict=False))
        self.lengths = {"q": q.shape[self.seq], "k": k.shape[self.seq]}
        self.leaves = {"q": self.shard(q), "k": self.shard(k, "k"), "v": self.shard(v, "k")}
        self.options = {
            name: x for name, x in self.inputs.options.items() if name not in ("tile_map", "max_q", "max_k")
        }
        for name in GRADS[3:]:
            if name in self.options:
                self.leaves[name] = self.options.pop(name)
        if "mask" in self.leaves and not self.packed and self.leaves["mask"].shape[-2] > 1:
            self.leaves["mask"] = self.shard(self.leaves["mask"], dim=-2)
        if "q_bias" in self.leaves:
            self.leaves["q_bias"] = self.shard(self.leaves["q_bias"], dim=-1)
        if "key_indices" in self.options and not self.packed:
            self.options["key_indices"] = self.shard(self.options["key_indices"], dim=-2)
        if self.packed:
            self.options.pop("layout", None)
            self.options |= {"cu_seqlens_q": tables[0], "cu_seqlens_k": tables[1]}

    def shard(self, x, which="q", dim=None):
        return distributed.shard(
            x, self.mesh, self.seq if dim is None else dim, self.scheme, cu_seqlens=self.cu.get(which)
        )

    def unshard(self, x, which="q", dim=None):
        dim = self.seq if dim is None else dim
        cu = self.cu.get(which)
        return distributed.unshard(x, self.mesh, dim, self.scheme, length=self.lengths[which], cu_seqlens=cu)

    def common(self, x):
        """As the backends have it, `[B, H, L, ...]`."""
        if self.packed:
            return x.transpose(0, 1)[None]
        return x.transpose(1, 2) if self.seq == 1 else x

    def uncommon(self, x):
        if self.packed:
            return x[0].transpose(0, 1)
        return x.transpose(1, 2) if self.seq == 1 else x

    def call(self, backend, **changes):
        options = self.options | {"length": (self.lengths["q"], self.lengths["k"])} | changes
        extras = {name: x for name, x in self.leaves.items() if name not in "qkv"}
        q, k, v = (self.leaves[name] for name in "qkv")
        return distributed.attention(
            q, k, v, mesh=self.mesh, scheme=self.scheme, backend=backend, return_lse=True, **extras, **options
        )

    def forward(self, backend):
        with torch.no_grad():
            state = self.call(backend)
        whole = [self.common(self.unshard(x)) for x in state]
        return lambda: check_call(self.inputs.checked(), *whole)

    def backward(self, backend):
        names = [name for name in self.made.call.problem.grads if name in self.leaves]
        for name in names:
            self.leaves[name] = self.leaves[name].detach().requires_grad_()
        state = self.call(backend)
        b = self.made.call.tensors
        incoming = [self.shard(self.uncommon(x)) for x in (b.dout, b.dlse)]
        found = torch.autograd.grad(tuple(state), [self.leaves[name] for name in names], incoming)
        whole = {name: self.whole(name, x) for name, x in zip(names, found, strict=True)}
        return lambda: judge_gradients(self.made, whole)

    def whole(self, name, x):
        if name in "qkv":
            return self.common(self.unshard(x, "q" if name == "q" else "k"))
        if name == "q_bias":
            return self.unshard(x, dim=-1)
        if name == "mask" and not self.packed and self.inputs.options["mask"].shape[-2] > 1:
            x = self.unshard(x, dim=-2)
        else:
            x = x.contiguous()
            for dim in range(self.mesh.ndim):
                dist.all_reduce(x, group=self.mesh.get_group(dim))
        return x.view((1,) * (4 - x.ndim) + tuple(x.shape)) if name == "mask" else x


def judge_gradients(made, got):
    """Gradients that were put together from parts, a bias's perhaps summed."""
    plainly = {name: x for name, x in got.items() if not name.endswith("bias")}
    judging._check_zeros(made.clean.problem, made.clean.tensors, plainly)
    exact, plain = formulas(made, got)
    factor = 3.0 if made.clean.problem.softcap else 2.0
    for name, x in got.items():
        try:
            judging._judge(f"d{name}", x, plain[name].to(x.dtype), exact[name], factor)
        except Mismatch:
            if x.numel() >= judging.FEW:
                raise
            judging._judge(f"d{name}", x, exact[name] + worst(made.case, name, got), exact[name], factor)


def worst(case, name, got):
    """torch's largest error in a gradient of few elements, on 16 inputs, or fewer that have many of them."""
    errors = []
    for n in range(min(16, -(-MANY // got[name].numel()))):
        exact, plain = formulas(judging.make_gradients(replace(case, note=f"draw {n}")), got)
        errors.append(float((plain[name].to(got[name].dtype).double() - exact[name]).abs().max()))
    return max(errors)


def formulas(made, got):
    """The gradients, exactly and by torch's arithmetic, in the shapes of those that were got."""
    p, b = made.clean.problem, made.clean.tensors
    both = gradients(p, b.forward, b.dout, b.dlse), judging.same_formula(p, b)
    for found in both:
        if "alibi_slopes" in got and got["alibi_slopes"].ndim == 1:
            found["alibi_slopes"] = found["alibi_slopes"].sum(0)
        for name in {"q_bias", "k_bias"} & set(got):
            dims = [d for d, n in enumerate(got[name].shape) if n == 1 != found[name].shape[d]]
            found[name] = found[name].sum(dims, keepdim=True) if dims else found[name]
    return both


def run_case(case, scheme, kind, backend="torch", backward=True):
    """None, or what is wrong with a case over a mesh: judged by rank 0, when all have done their part."""
    sharded = Sharded(case, scheme, kind)
    checks = [sharded.forward(backend)] + [sharded.backward(backend)] * backward
    try:
        for check in checks if dist.get_rank() == 0 else ():
            check()
    except Mismatch as error:
        return f"{case} by {scheme} over {kind}: {error}"
    return None


def run_cases(listed, backend="torch", backward=True):
    found = [run_case(*each, backend, backward) for each in listed]
    return [wrong for wrong in found if wrong]
