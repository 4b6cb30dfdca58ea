"""Masks that are known by their rules are tensors for whatever transformers' models do with masks."""

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch.utils.checkpoint import checkpoint
from transformers import masking_utils as hf

from tilewise.compat import transformers as ours
from tilewise.compat.lazy_mask import LazyMask, pattern_of
from tilewise.compat.mask_patterns import make_mask

F = torch.nn.functional
# Arguments of the methods that need some; x is the mask.
ARGUMENTS = {
    "unsqueeze": lambda x: (1,),
    "to": lambda x: (torch.float32,),
    "view": lambda x: (-1, 6),
    "permute": lambda x: (0, 1, 3, 2),
    "reshape": lambda x: (-1,),
    "repeat_interleave": lambda x: (2, 0),
    "cumsum": lambda x: (-1,),
    "scatter": lambda x: (-1, torch.zeros(2, 1, 6, 1, dtype=torch.long), True),
    "scatter_": lambda x: (-1, torch.zeros(2, 1, 6, 1, dtype=torch.long), True),
    "masked_fill": lambda x: (x, False),
    "flip": lambda x: ((-1,),),
    "new_ones": lambda x: (2,),
    "new_zeros": lambda x: (2,),
    "expand": lambda x: (2, 3, 6, 6),
    "expand_as": lambda x: (torch.zeros(2, 3, 6, 6),),
    "repeat": lambda x: (1, 2, 3, 1),
    "transpose": lambda x: (1, 2),
    "unfold": lambda x: (3, 2, 1),
    "tile": lambda x: ((1, 2),),
    "type_as": lambda x: (torch.zeros(1),),
    "index_select": lambda x: (3, torch.tensor([2, 0])),
    "ne": lambda x: (0,),
}
NOT_ON_BOOLS = {"min", "argmax", "values", "append", "unsqueeze_"}  # or on lists and 2D masks alone
OPERATIONS = {
    "index": lambda x: x[:, 0, 0, :],
    "ellipsis": lambda x: x[..., :4],
    "none": lambda x: x[None, :, :, 2:],
    "gather": lambda x: x[torch.tensor([1, 0])],
    "not": lambda x: ~x,
    "and": lambda x: x & torch.ones(6, dtype=torch.bool),
    "or": lambda x: torch.zeros(6, dtype=torch.bool) | x,
    "minus": lambda x: 1.0 - x.float(),
    "times": lambda x: x * torch.randn(6, generator=torch.Generator().manual_seed(0)),
    "equal": lambda x: x == 0,
    "less": lambda x: x < 1,
    "added": lambda x: torch.zeros(2, 4, 6, 6) + x,
    "any": lambda x: torch.tensor(bool(x.any()) and not bool(x.all())),
    "where": lambda x: torch.where(x, torch.full((), 0.0), torch.finfo(torch.float32).min),
    "cat": lambda x: torch.cat([x, x.new_ones(2, 1, 6, 2)], -1),
    "pad": lambda x: F.pad(x, (0, 3), value=False),
    "like": lambda x: torch.zeros_like(x, dtype=torch.float32) + torch.ones_like(x),
    "sdpa": lambda x: F.scaled_dot_product_attention(*[torch.ones(2, 1, 6, 8).cumsum(2)] * 3, attn_mask=x),
    "stack": lambda x: torch.stack([y[0] for y in x]),
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "list": lambda x: torch.tensor(x.tolist()),
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "device": lambda x: x.to("cpu").to(device=x.device, dtype=torch.int8),
}


def lazy(rule=hf.causal_mask_function):
    padding = torch.ones(2, 6, dtype=torch.bool)
    padding[1, :2] = False
    mask = make_mask(2, 6, 6, mask_function=rule, attention_mask=padding, allow_is_bidirectional_skip=True)
    assert type(mask) is LazyMask
    return mask, hf.sdpa_mask(2, 6, 6, mask_function=rule, attention_mask=padding, allow_is_causal_skip=False)


def methods():
    """The methods of tensors that transformers' models call on something that is named a mask."""
    root = Path(transformers.__file__).parent / "models"
    found = set()
    for file in root.glob("*/modeling_*.py"):
        text = file.read_text()
        if "masking_utils import" in text:
            found |= set(re.findall(r"\w*masks?\.([a-z_]+)\(", text))
    return sorted(name for name in found if hasattr(torch.Tensor, name))


def test_methods_that_models_call():
    """None is unknown here: a new one needs its arguments in this file."""
    names = methods()
    assert {"repeat", "flip", "view", "expand", "masked_fill"} <= set(names)
    for name in set(names) - NOT_ON_BOOLS:
        for rule in (hf.causal_mask_function, hf.sliding_window_bidirectional_mask_function(2)):
            mask, plain = lazy(rule)
            arguments = ARGUMENTS.get(name, lambda x: ())
            if name == "view":
                plain = plain.contiguous()
                mask.cells = plain
            if name.endswith("_"):
                mask.cells = plain.clone()
                plain = plain.clone()
            got, want = (getattr(x, name)(*arguments(x)) for x in (mask, plain))
            same(got, want)
            if name.endswith("_"):
                same(mask.clone(), want)


def same(got, want):
    assert type(got) is type(want) or isinstance(got, LazyMask)
    if isinstance(want, torch.Tensor):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert torch.equal(got.clone(), want)
    else:
        assert got == want


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name):
    mask, plain = lazy()
    same(OPERATIONS[name](mask), OPERATIONS[name](plain))
    assert pattern_of(mask) is not None  # it was only read


@pytest.mark.parametrize("inference", [False, True])
def test_a_mask_that_was_written_to_has_no_pattern(inference):
    """Its cells count, whoever wrote: a method, an assignment, or an operation on a view."""

    def assigned(x):
        x[:, :, 3:, 0] = False

    def by_view(x):
        x[:, 0][:, 3:, 0].fill_(False)

    for write in (assigned, by_view, lambda x: x.logical_and_(torch.arange(6) > 0)):
        with torch.inference_mode(inference):
            mask, plain = lazy()
            with torch.inference_mode(False):
                plain = plain.clone()
                mask.cells = plain.clone()
            write(mask)
            write(plain)
            assert pattern_of(mask) is None
            q, k = torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
            out, _ = ours.attention_forward(torch.nn.Module(), q, k, k, mask)
            want, _ = ours.attention_forward(torch.nn.Module(), q, k, k, plain)
        assert torch.equal(out, want)


def test_a_shape_that_would_change_in_place_is_refused():
    with pytest.raises(RuntimeError, match="unsqueeze_"):
        lazy()[0].unsqueeze_(0)


def test_nothing_is_computed_before_it_is_read():
    made = []
    mask, _ = lazy()
    make, mask.make = mask.make, lambda: made.append(1) or mask.make_()
    mask.make_ = make
    assert (mask.shape, mask.dtype, mask.ndim, mask.device.type) == ((2, 1, 6, 6), torch.bool, 4, "cpu")
    assert mask.to("cpu") is mask
    assert mask.contiguous() is mask
    assert "causal" in repr(mask)
    q = torch.randn(2, 2, 6, 8, requires_grad=True)
    for reentrant in (False, True):
        attend = lambda q, mask: ours.attention_forward(torch.nn.Module(), q, q, q, mask)[0]  # noqa: E731
        checkpoint(attend, q, mask, use_reentrant=reentrant).sum().backward()
    assert not made
    assert mask.sum() > 0
    assert mask.sum() > 0
    assert made == [1]
