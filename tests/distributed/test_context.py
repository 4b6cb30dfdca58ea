"""Models under `context_parallel`, and with their weights sharded: each step is that of one process."""

import pytest
import torch
from torch import distributed as dist
from torch.nn import functional as F  # noqa: N812

from ranks import Pool, mesh_of
from tilewise import InvalidArgument, distributed

LENGTH = 24


def _close(got, want):
    """By float32's rounding, over a model of a few layers."""
    return bool((got - want).abs().max() <= 1e-4 * want.abs().max().clamp_min(1e-3))


def _torchs_function(scheme, kind, length=LENGTH):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, 16) for heads in (4, 2, 2))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    buffers, before = [q, k, v], [x.clone() for x in (q, k, v)]
    patched = F.scaled_dot_product_attention
    mesh = mesh_of(kind)
    with distributed.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2], scheme=scheme):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        inside = out.shape[2]
    same = all(torch.equal(x, old) for x, old in zip(buffers, before, strict=True))
    restored = F.scaled_dot_product_attention is patched and same
    return inside, restored, _close(distributed.unshard(out, mesh, 2, scheme, length=length), want)


@pytest.mark.parametrize(("scheme", "kind"), [("zigzag", "4"), ("ring", "2"), ("2d", "2x2")])
def test_torchs_function_over_a_mesh(pool, scheme, kind):
    n = LENGTH // (2 if kind == "2" else 4)
    assert pool(_torchs_function, scheme, kind) == [(n, True, True)] * 4


def test_parts_that_differ_by_a_token(pool):
    found = pool(_torchs_function, "zigzag", "4", LENGTH - 1)
    assert sum(n for n, _, _ in found) == LENGTH - 1
    assert all(restored and close for _, restored, close in found)


def _refusals():
    mesh, x = mesh_of("4"), torch.randn(1, 4, 8, 16)
    found = []

    def note(function, *args, **options):
        try:
            function(*args, **options)
            found.append("none")
        except InvalidArgument as error:
            found.append(error.argument)

    def enter(**options):
        with distributed.context_parallel(mesh, **options):
            pass

    note(enter, buffers=[x], buffer_seq_dims=[])
    note(enter, no_restore_buffers={x})
    note(enter, buffers=[x], buffer_seq_dims=[4])
    note(enter, buffers=[x], buffer_seq_dims=["2"])
    note(enter, buffers=[3], buffer_seq_dims=[0])
    note(enter, buffers=[x, x], buffer_seq_dims=[2, 2])
    with distributed.context_parallel(mesh):
        note(enter)
    note(enter, buffers=[torch.zeros(15), torch.zeros(16)], buffer_seq_dims=[0, 0])
    with distributed.context_parallel(mesh):
        note(F.scaled_dot_product_attention, x, x, x, attn_mask=torch.zeros(8, 8))
        note(F.scaled_dot_product_attention, *[x.double()] * 3)
    gone = torch.arange(8.0)
    with distributed.context_parallel(mesh, buffers=[gone], buffer_seq_dims=[0], no_restore_buffers={gone}):
        pass
    return [*found, len(gone)]


def test_what_cannot_be_sharded_is_refused(pool):
    more = ["buffer_seq_dims[0]", "buffer_seq_dims[0]", "buffers[0]", "buffers", "context_parallel"]
    assert pool(_refusals)[0] == ["buffer_seq_dims", "no_restore_buffers", *more, "buffers", "attn_mask", "query", 2]


def _fast_path():
    """A layer of torch that in eval mode calls no function of Python at all."""
    torch.manual_seed(0)
    layer, x = torch.nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True).eval(), torch.randn(1, LENGTH, 16)
    with torch.no_grad():
        want, given = layer(x), x.clone()
        with distributed.context_parallel(mesh_of("4"), buffers=[given], buffer_seq_dims=[1]):
            out = layer(given)
    return _close(distributed.unshard(out, mesh_of("4"), 1), want), torch.backends.mha.get_fastpath_enabled()


def test_torchs_fast_path_is_off_inside(pool):
    assert pool(_fast_path) == [(True, True)] * 4


def _backward_outside():
    """Where autograd finds the buffers as they were, and where it does not."""
    found = []
    for kept in (True, False):
        labels = torch.arange(LENGTH) % 5
        weight = torch.randn(LENGTH // 4, 5, requires_grad=True)
        keep = {labels} if kept else None
        how = {"buffers": [labels], "buffer_seq_dims": [0], "no_restore_buffers": keep}
        with distributed.context_parallel(mesh_of("4"), **how):
            loss = F.cross_entropy(weight, labels)
        try:
            loss.backward()
            found.append("fine")
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_a_backward_pass_outside_needs_its_buffers_unrestored(pool):
    fine, refused = pool(_backward_outside)[0]
    assert fine == "fine"
    assert "modified by an inplace operation" in refused


def _train(name, length):
    """The loss and the gradients of a model's step, sharded and whole."""
    import transformers

    from hf_models import DECODERS, VOCABULARY

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = DECODERS[name]().train()
    model.set_attn_implementation("tilewise")
    tokens = torch.randint(3, VOCABULARY, (1, length + 1), generator=torch.Generator().manual_seed(1))
    inputs, labels = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    places = torch.arange(length)[None]

    def step():
        logits = model(inputs, position_ids=places, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / length

    loss = step()
    loss.backward()
    want = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with distributed.context_parallel(dist.group.WORLD, buffers=[inputs, labels, places], buffer_seq_dims=[1, 1, 1]):
        share = step()
        share.backward()
    total = share.detach()
    dist.all_reduce(total)
    wrong = [] if _close(total, loss.detach()) else ["loss"]
    for key, p in model.named_parameters():
        if key in want:
            dist.all_reduce(p.grad)
            wrong += [] if _close(p.grad, want[key]) else [key]
    return wrong


@pytest.mark.slow
def test_models_of_transformers():
    """A training step over a sharded sequence."""
    pytest.importorskip("transformers")
    with Pool(2) as two:
        for name in ("gemma2", "gpt_oss", "llama4"):
            for length in (8, 24):  # windows and chunks of 6: longer and shorter than a rank's part
                assert two(_train, name, length) == [[]] * 2, name
