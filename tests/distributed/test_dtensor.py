"""DTensors in `tilewise.attention`: sharded by batch rows and by heads, their gradients too."""

import pytest
import torch

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
