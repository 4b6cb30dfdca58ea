"""DTensors in `tilewise.attention`, by batch rows and by heads, with their gradients; and `parallelize_module`."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import beside
import tilewise
from ranks import mesh_of
from sharded import GRADS, judge_gradients
from tilewise import InvalidArgument, distributed
from tilewise.testing.case import Case, make
from tilewise.testing.check import check_call, judge, largest_error
from tilewise.testing.gradients import make_gradients


def _refused():
    from torch.distributed.tensor import distribute_tensor

    x = distribute_tensor(torch.randn(4, 4, 8, 8), mesh_of("4"))
    try:
        tilewise.attention(x, x, x, backend="torch")
    except InvalidArgument as error:
        return str(error)
    return ""


def _elsewhere(registered):
    """What else is handed a DTensor says its name: with the rules too, which are `tilewise.attention`'s."""
    from torch.distributed.tensor import Shard, distribute_tensor

    if registered:
        distributed.register_sharding_rules()
    x, found = distribute_tensor(torch.randn(4, 4, 8, 8), mesh_of("4"), [Shard(1)]), []
    pages = tilewise.PagedKVCache(8, 4, 4, 8, "f32")
    ids = [pages.create() for _ in range(4)]
    for call in (
        lambda: distributed.attention(x, x, x, mesh=mesh_of("4")),
        lambda: tilewise.KVCache(4, 4, 8, 8, "f32").append(x, x),
        lambda: pages.append(ids, x, x),
    ):
        try:
            call()
        except InvalidArgument as error:
            found.append("DTensor" in str(error))
    return found


def _sharded(dim, case):
    """The placement of out, which is judged as any backend's is, its lse and gradients too."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    distributed.register_sharding_rules()
    mesh, backward_pass, inputs = mesh_of("4"), make_gradients(case), make(case)
    options = dict(inputs.options)
    tensors = dict(zip("qkv", inputs.args, strict=True))
    tensors |= {name: options.pop(name) for name in GRADS if name in options}
    at = Replicate() if dim is None else Shard(dim)
    parts = {name: distribute_tensor(x, mesh, [at if name in "qkv" else Replicate()]) for name, x in tensors.items()}
    parts = {name: x.requires_grad_() for name, x in parts.items()}
    others = {name: x for name, x in options.items() if isinstance(x, torch.Tensor)}
    options |= {name: distribute_tensor(x, mesh, [Replicate()]) for name, x in others.items()}
    state = tilewise.attention(**parts, **options, return_lse=True)
    assert all(isinstance(x, DTensor) for x in state)
    check_call(inputs.checked(), *inputs.common_state([x.detach().full_tensor() for x in state]))
    flips = (lambda x: x.transpose(1, 2)) if case.layout == "blhd" else lambda x: x
    dout, dlse = (flips(x) for x in (backward_pass.call.tensors.dout, backward_pass.call.tensors.dlse))
    incoming = [distribute_tensor(y, mesh, x.placements) for x, y in zip(state, (dout, dlse), strict=True)]
    names = [name for name in backward_pass.call.problem.grads if name in parts]
    found = torch.autograd.grad(tuple(state), [parts[name] for name in names], incoming)
    got = {name: x.full_tensor() for name, x in zip(names, found, strict=True)}
    got |= {name: flips(got[name]) for name in "qkv"}
    if "mask" in got:
        got["mask"] = got["mask"].view((1,) * (4 - got["mask"].ndim) + got["mask"].shape)
    judge_gradients(backward_pass, got)
    return str(state.out.placements[0])


def test_before_the_rules_are_registered_dtensors_are_refused_by_name(pool):
    assert "DTensor" in pool(_refused)[0]
    for registered in (False, True):
        assert pool(_elsewhere, registered) == [[True] * 3] * 4


SMALL = Case(B=4, H=8, Lq=12, D=8, causal=True)


@pytest.mark.parametrize(
    ("dim", "case", "placed"),
    [
        (0, replace(SMALL, Hkv=2), "S(0)"),
        (1, replace(SMALL, Hkv=4), "S(1)"),
        (2, replace(SMALL, Hkv=4, sinks=True, layout="blhd"), "S(2)"),
        (None, replace(SMALL, Hkv=2), "R"),
        (0, replace(SMALL, Hkv=2, sinks=True, mask="b1qk", mask_kind="f32"), "S(0)"),
        (1, replace(SMALL, sinks=True, mask="h1k", mask_kind="f32"), "S(1)"),
        (1, replace(SMALL, mask="qk", mask_kind="f32"), "S(1)"),
        (0, replace(SMALL, tree="b"), "S(0)"),
        (0, replace(SMALL, tree="b", positions=True, window=5), "S(0)"),
        (0, replace(SMALL, Hkv=2, q_bias="bh", k_bias="1h"), "S(0)"),
        (1, replace(SMALL, q_bias="bh", k_bias="1h"), "S(1)"),
    ],
    ids=str,
)
def test_what_is_sharded_stays_sharded(pool, dim, case, placed):
    assert pool(_sharded, dim, case) == [placed] * 4


def test_heads_that_do_not_divide_are_gathered(pool):
    pool(_sharded, 1, replace(SMALL, Hkv=2))


def _told_apart():
    """Calls of the same shapes that differ in layout, then in which gradients are wanted."""
    from torch.distributed.tensor import Shard, distribute_tensor

    distributed.register_sharding_rules()
    torch.manual_seed(0)
    x = torch.randn(4, 8, 8, 8)
    part = distribute_tensor(x, mesh_of("4"), [Shard(1)])
    for layout in ("bhld", "blhd", "bhld"):
        got = tilewise.attention(part, part, part, layout=layout).full_tensor()
        plain, exact = (beside.sdpa(*[y.transpose(1, 2) if layout == "blhd" else y] * 3) for y in (x, x.double()))
        got = got.transpose(1, 2) if layout == "blhd" else got
        judge("out", got, exact, 2 * largest_error(plain, exact), torch.float32)
    for names in ("qkv", "q", "kv"):
        found = []
        for y, attend in ((part, tilewise.attention), (x, beside.sdpa), (x.double(), beside.sdpa)):
            leaves = {name: y.detach().clone().requires_grad_(name in names) for name in "qkv"}
            causal = {"causal": True} if y is part else {"is_causal": True}
            attend(*leaves.values(), **causal).sum().backward()
            found.append([leaves[name].grad for name in names])
        for got, plain, exact in zip(*found, strict=True):
            judge("out", got.full_tensor(), exact, 2 * largest_error(plain, exact), torch.float32)
    return True


def test_layouts_and_gradients_are_told_apart(pool):
    assert pool(_told_apart) == [True] * 4


HEADS, KV_HEADS, WIDTH = 8, 4, 8
SCALE = 3.0  # of such projections: scores have a standard deviation of about 3


def _by_torch(q, k, v):
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril().triu(-4)
    return beside.sdpa(*(x.transpose(1, 2) for x in (q, k, v)), mask, scale=SCALE).transpose(1, 2)


class Attention(nn.Module):
    """Projections around attention; the number of heads follows from what it is handed."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        size = HEADS * WIDTH
        self.q, self.k, self.v = (nn.Linear(size, n * WIDTH, bias=False) for n in (HEADS, KV_HEADS, KV_HEADS))
        self.o = nn.Linear(size, size, bias=False)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, WIDTH)) for p in (self.q, self.k, self.v))  # [B, L, heads, D]
        return self.o(self.attend(q, k, v).flatten(-2))


class Model(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.layers = nn.ModuleList(Attention(attend) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return F.normalize(x, dim=-1)


def _parallel(local):
    """Judges the output and the gradients of the weights beside torch on the whole model; gives the heads of a rank."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    distributed.register_sharding_rules()
    torch.manual_seed(0)
    heads = []

    def attend(q, k, v):
        heads.append((q.to_local() if isinstance(q, DTensor) else q).shape[2])
        return tilewise.attention(q, k, v, causal=True, window=5, layout="blhd", scale=SCALE)

    part, plain, exact = Model(attend), Model(_by_torch), Model(_by_torch).double()
    for model in (plain, exact):
        model.load_state_dict(part.state_dict())
    plan = {f"layers.*.{name}": ColwiseParallel(use_local_output=local) for name in "qkv"}
    parallelize_module(part, mesh_of("4"), plan | {"layers.*.o": RowwiseParallel()})
    x, weights = torch.randn(2, 2, 12, HEADS * WIDTH)
    found = []
    for model in (part, plain, exact):
        dtype = torch.float64 if model is exact else torch.float32
        out = model(x.to(dtype))
        (out * weights.to(dtype)).sum().backward()
        found.append({"out": out.detach()} | {name: p.grad for name, p in model.named_parameters()})
    for name, got in found[0].items():
        got = got.full_tensor() if isinstance(got, DTensor) else got
        want = found[2][name]
        judge("out", got, want, 2 * largest_error(found[1][name], want), torch.float32)
    return heads


@pytest.mark.parametrize("local", [True, False])
def test_heads_of_a_model_over_ranks(pool, local):
    """`parallelize_module`, with plain tensors around attention and with DTensors."""
    assert pool(_parallel, local) == [[HEADS // 4] * 2] * 4
