"""DTensors in `tilewise.attention`, by batch rows and by heads, with their gradients; and `parallelize_module`."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import tilewise
from ranks import Pool, mesh_of
from tilewise import InvalidArgument, distributed


@pytest.fixture(scope="module")
def pool():
    with Pool(4) as ranks:
        yield ranks


def _refused():
    from torch.distributed.tensor import distribute_tensor

    x = distribute_tensor(torch.randn(4, 4, 8, 8), mesh_of("4"))
    try:
        tilewise.attention(x, x, x, backend="torch")
    except InvalidArgument as error:
        return str(error)
    return ""


def _sharded(dim, Hkv, options, layout):
    """The placement of out, and what differs from a call over whole tensors."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    distributed.register_sharding_rules()
    mesh = mesh_of("4")
    torch.manual_seed(0)
    B, H, L, D = 4, 8, 12, 8
    shapes = [(B, h, L, D) if layout == "bhld" else (B, L, h, D) for h in (H, Hkv, Hkv)]
    whole = [torch.randn(shape, requires_grad=True) for shape in shapes]
    given = {"sinks": torch.randn(H, requires_grad=True)} if options.get("sinks") else {}
    if options.get("mask"):
        given["mask"] = torch.randn(options["mask"], requires_grad=True)
    if options.get("bias"):
        given |= {"q_bias": torch.randn(B, H, L), "k_bias": torch.randn(1, H, L)}
        given = {name: x.requires_grad_() for name, x in given.items()}
    at = Replicate() if dim is None else Shard(dim)
    parts = [distribute_tensor(x.detach(), mesh, [at]).requires_grad_() for x in whole]
    extras = {name: distribute_tensor(x.detach(), mesh, [Replicate()]).requires_grad_() for name, x in given.items()}
    rules = {"causal": True, "layout": layout}
    want = tilewise.attention(*whole, **given, **rules, return_lse=True)
    got = tilewise.attention(*parts, **extras, **rules, return_lse=True)
    assert isinstance(got.out, DTensor)
    assert isinstance(got.lse, DTensor)
    (want.out.sum() + want.lse.sum()).backward()
    (got.out.sum() + got.lse.sum()).backward()
    pairs = {"out": (got.out, want.out), "lse": (got.lse, want.lse)}
    pairs |= {f"d{name}": (a.grad, b.grad) for name, a, b in zip("qkv", parts, whole, strict=True)}
    pairs |= {f"d{name}": (extras[name].grad, given[name].grad) for name in given}
    wrong = [name for name, (a, b) in pairs.items() if not torch.allclose(a.full_tensor(), b, atol=2e-5, rtol=1e-4)]
    return str(got.out.placements[0]), wrong


def test_before_the_rules_are_registered_dtensors_are_refused_by_name(pool):
    assert "DTensor" in pool(_refused)[0]


@pytest.mark.parametrize(
    ("dim", "Hkv", "options", "layout", "placed"),
    [
        (0, 2, {}, "bhld", "S(0)"),
        (1, 4, {}, "bhld", "S(1)"),
        (2, 4, {"sinks": True}, "blhd", "S(2)"),
        (None, 2, {}, "bhld", "R"),
        (0, 2, {"sinks": True, "mask": (4, 1, 12, 12)}, "bhld", "S(0)"),
        (1, 8, {"sinks": True, "mask": (8, 1, 12)}, "bhld", "S(1)"),
        (1, 8, {"mask": (12, 12)}, "bhld", "S(1)"),
        (0, 2, {"bias": True}, "bhld", "S(0)"),
        (1, 8, {"bias": True}, "bhld", "S(1)"),
    ],
)
def test_what_is_sharded_stays_sharded(pool, dim, Hkv, options, layout, placed):
    assert pool(_sharded, dim, Hkv, options, layout) == [(placed, [])] * 4


def test_heads_that_do_not_divide_are_gathered(pool):
    assert all(wrong == [] for _, wrong in pool(_sharded, 1, 2, {}, "bhld"))


def _told_apart():
    """Calls of the same shapes that differ in layout, then in which gradients are wanted."""
    from torch.distributed.tensor import Shard, distribute_tensor

    distributed.register_sharding_rules()
    torch.manual_seed(0)
    x = torch.randn(4, 8, 8, 8)
    part = distribute_tensor(x, mesh_of("4"), [Shard(1)])
    fine = []
    for layout in ("bhld", "blhd", "bhld"):
        got = tilewise.attention(part, part, part, layout=layout)
        fine.append(torch.allclose(got.full_tensor(), tilewise.attention(x, x, x, layout=layout), atol=1e-5))
    for names in ("qkv", "q", "kv"):
        whole = {name: x.clone().requires_grad_(name in names) for name in "qkv"}
        parts = {name: part.detach().clone().requires_grad_(name in names) for name in "qkv"}
        for of in (whole, parts):
            tilewise.attention(*of.values(), causal=True).sum().backward()
        pairs = [(parts[name].grad.full_tensor(), whole[name].grad) for name in names]
        fine += [torch.allclose(a, b, atol=1e-5) for a, b in pairs]
    return fine


def test_layouts_and_gradients_are_told_apart(pool):
    assert pool(_told_apart) == [[True] * 9] * 4


HEADS, KV_HEADS, WIDTH = 8, 4, 8


class Attention(nn.Module):
    """Projections around `tilewise.attention`; the number of heads follows from what it is handed."""

    def __init__(self):
        super().__init__()
        size = HEADS * WIDTH
        self.q, self.k, self.v = (nn.Linear(size, n * WIDTH, bias=False) for n in (HEADS, KV_HEADS, KV_HEADS))
        self.o = nn.Linear(size, size, bias=False)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, WIDTH)) for p in (self.q, self.k, self.v))  # [B, L, heads, D]
        return self.o(tilewise.attention(q, k, v, causal=True, window=5, layout="blhd").flatten(-2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return F.normalize(x, dim=-1)


def _parallel(local):
    """What differs from the whole model: its output and the gradients of its weights. And the heads of a rank."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    distributed.register_sharding_rules()
    torch.manual_seed(0)
    whole, x = Model(), torch.randn(2, 12, HEADS * WIDTH)
    part = Model()
    part.load_state_dict(whole.state_dict())
    plan = {f"layers.*.{name}": ColwiseParallel(use_local_output=local) for name in "qkv"}
    parallelize_module(part, mesh_of("4"), plan | {"layers.*.o": RowwiseParallel()})
    heads, call = [], tilewise.attention

    def noted(q, *args, **options):
        heads.append((q.to_local() if isinstance(q, DTensor) else q).shape[2])
        return call(q, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tilewise, "attention", noted)
        got = part(x)
    want = whole(x)
    weights = torch.randn_like(want)
    for out in (want, got):
        (out * weights).sum().backward()
    pairs = {"out": (got, want)}
    pairs |= {name: (p.grad.full_tensor(), whole.get_parameter(name).grad) for name, p in part.named_parameters()}
    wrong = [name for name, (a, b) in pairs.items() if not torch.allclose(a, b, atol=2e-5, rtol=1e-4)]
    return heads, wrong


@pytest.mark.parametrize("local", [True, False])
def test_heads_of_a_model_over_ranks(pool, local):
    """`parallelize_module`, with plain tensors around attention and with DTensors."""
    assert pool(_parallel, local) == [([HEADS // 4] * 2, [])] * 4
