"""After a remembered call, one thing changes at a time: an option, a property of a tensor, a mode of torch.

Each call gives what it gives in a process that never made another, a result or an error, to the bit.
"""

import math
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tilewise import Aux, Quantised, TileMap, attention, paged_attention, varlen_attention
from tilewise.core.signatures import NAMES
from tilewise.dispatch import call_cache


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 1.7


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


# As many heads as rows: both layouts are legal.
DENSE = (draw(2, 6, 6, 16), draw(2, 6, 6, 16, seed=1), draw(2, 6, 6, 16, seed=2))
PACKED = (draw(7, 6, 16), draw(9, 2, 16, seed=1), draw(9, 2, 16, seed=2), ints(0, 3, 7), ints(0, 5, 9))
PAGES = (draw(6, 4, 6, 16, seed=1), draw(6, 4, 6, 16, seed=2), torch.tensor([[5, 2, 0], [4, 1, 3]]).int(), ints(10, 9))
SLOPES = draw(6).abs()


def scaled(factor, slopes):
    return lambda s, b, h, q, k: s * factor + slopes[h] * (q - k)


SCORE_MODS = [scaled(1, SLOPES), scaled(2, SLOPES), scaled(2, SLOPES + 1), scaled(2, draw(6, 2)[:, 0])]
INDICES = torch.tensor([[5, 0, 3, -1], [1, 2, -1, 4]]).int()[:, None].repeat(1, 6, 1)  # [B, Lq, n]
BLOCKS = ints(0, 2)[None, None].repeat(2, 3, 1)
CALLS = {
    "dense": (attention, DENSE, {}),
    "dense, every tensor": (
        attention,
        DENSE,
        {"kv_lengths": ints(6, 5), "q_offset": ints(2, 1), "mask": draw(6, 6), "sinks": draw(6), "causal": True}
        | {"alibi_slopes": draw(6).abs(), "q_bias": draw(2, 6, 6), "k_bias": draw(1, 6, 6), "return_lse": True},
    ),
    "dense, chosen keys": (attention, DENSE, {"key_indices": INDICES, "causal": True}),
    "dense, chosen blocks": (attention, DENSE, {"block_indices": BLOCKS, "block_size": 2}),
    "varlen": (varlen_attention, PACKED, {"max_q": 5, "max_k": 6, "kv_lengths": ints(4, 4), "return_lse": True}),
    "paged": (paged_attention, (DENSE[0], *PAGES), {}),
    "paged, packed": (paged_attention, (draw(7, 6, 16), *PAGES), {"cu_seqlens_q": ints(0, 3, 7), "max_q": 5}),
    "quantised": (attention, (DENSE[0], *(Quantised.from_float(x, "int8", 32) for x in DENSE[1:])), {}),
    "quantised, paged": (
        paged_attention,
        (DENSE[0], Quantised.from_float(PAGES[0], "int4", 32), PAGES[1].half(), *PAGES[2:]),
        {"return_lse": True},
    ),
}
# Other values for each option, wrong ones too. An option that is not here has no test: see the first one below.
OPTIONS = {
    "scale": [0.9, 1, 1.0, True, 1 + 0j, np.float64(0.9), np.float32(0.9), "1", None],
    "causal": [True, 1, False, 0.0, None],
    "q_offset": [0, 2, False, 2.0, np.int64(2), ints(1, 2), torch.tensor([1, 2]), None],
    "k_start": [1, -3, 1.0, True, np.int64(1), ints(1, 2), torch.tensor([1, 2]), ints(1), None],
    "k_stride": [2, 1, 0, 2.0, np.int64(2), ints(1, 2), ints(0, 2), None],
    "q_stride": [2, 1, -1, 2.0, np.int64(2), ints(1, 2), None],
    "window": [
        *(1, True, 3, 3.0, (1, None), (True, None), (3, 1), (3.0, 1), (3, 0), (3, False)),
        *([3, 1], (None, None), None, np.int64(3), (np.int32(3), 1)),
    ],
    "chunk": [1, True, 4, 4.0, np.int64(4), None],
    "mask": [draw(6, 6, seed=3), draw(6, 6, seed=3) > 0, draw(1, 6), draw(6, 12)[:, ::2], None],
    "tree_mask": [
        draw(2, 6, 6) > 0,
        draw(1, 6, 6) > 0,
        draw(2, 6, 12)[..., ::2] > 0,
        draw(2, 6, 6),
        draw(6, 6) > 0,
        None,
    ],
    "k_shared": [draw(2, 6, 6, 4), draw(2, 1, 6, 4), None],
    "positions": [ints(0, 1, 2, 3, 4, 5)[None], ints(*range(12)).view(2, 6), torch.arange(6)[None], None],
    "softcap": [1.5, 2, 1.0, True, 0, 0.0, False, None],
    "alibi_slopes": [draw(6).abs(), draw(2, 6).abs(), draw(6).abs().double(), None],
    "q_bias": [draw(2, 6, 6), draw(1, 1, 6), draw(2, 6, 12)[..., ::2], draw(7, 6), draw(2, 6, 6).half(), draw(6), None],
    "k_bias": [draw(2, 6, 6), draw(1, 1, 6), draw(2, 6, 10), draw(2, 6, 6).double(), draw(9, 1), 1.0, None],
    "score_mod": [*SCORE_MODS, lambda s, b, h, q, k: torch.erfinv(s), 3, None],
    "mask_mod": [lambda b, h, q, k: q >= k, lambda b, h, q, k: SLOPES[h] > 0.5, lambda b, h, q, k: q.float(), None],
    "sinks": [draw(6), draw(6, seed=4), draw(12)[::2], draw(6).half(), 4, None],
    "dropout_p": [0.0, 0, 1.0, True, 1.5, None],  # 0.5 draws a seed each time: see test_dropout.py
    "dropout_seed": [7, True, torch.tensor(7), "7", None],
    "kv_lengths": [ints(4, 3), ints(0, 4), torch.tensor([4, 3]), ints(4, 99), ints(-1, 2), ints(4), None],
    "key_indices": [
        *(INDICES, INDICES.flip(1), INDICES.long(), INDICES[:, None], INDICES[:, None].repeat(1, 6, 1, 1)),
        *(INDICES[:, :3], INDICES[0, :1].repeat(7, 1), INDICES[..., ::2], INDICES.clamp(0, 2), INDICES + 4),
        *(INDICES.float(), 3, None),
    ],
    "block_indices": [BLOCKS, BLOCKS.flip(2), BLOCKS[:, :2], BLOCKS + 5, BLOCKS.clamp(0, 0), None],
    "block_size": [2, 2.0, True, 3, 0, np.int64(2), None],
    "layout": ["blhd", "bhld", "bdlh", None],
    "tile_map": [TileMap.from_mask(draw(6, 6) > 0, (4, 4)), "all", None],
    "split_size": [3, 3.0, True, np.int64(3), None],
    "return_lse": [True, 1, False, 0, None],
    "return_aux": [("lse",), ("max_logits", "entropy"), ["key_mass"], (), "lse", ("none",), 1, None],
    "key_mass_queries": [1, 2.0, None],
    "weight_indices": [INDICES, None],
    "out": [torch.full((2, 6, 6, 16), 7.0), DENSE[0], torch.full((7, 6, 16), 7.0), None],
    "allow_tf32": [True, False, 0, None],
    "deterministic": [True, False, 0, None],
    "validate": [True, 1, False, 0, "no", None],
    "backend": ["cpu", "torch", "reference", "metal", "none", 1, None],
    "max_q": [4, 7, 2, 5.0, True, np.int64(5), None],
    "max_k": [5, 9, 2, 5.0, None],
    "cu_seqlens_q": [ints(0, 2, 7), torch.tensor([0, 2, 7]), ints(0, 5, 7), ints(1, 2, 7), ints(0, 7), None],
}


@contextmanager
def unknown():
    """A call in here is as one in a process that never made another."""
    kept = dict(call_cache._known)
    call_cache.forget()
    yield
    call_cache.forget()
    call_cache._known.update(kept)


def outcome(entry, args, options):
    """What a call gives, as something to compare: arrays and their kind, or an error and its text."""
    if isinstance(options.get("out"), torch.Tensor):  # of its own each time: one call must not see another's
        options = options | {"out": options["out"].clone()} if options["out"] is not args[0] else options
    try:
        result = entry(*args, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    results = result if isinstance(result, tuple) else (result,)
    if isinstance(results[-1], Aux):
        results = (results[0], *(x for x in results[1] if x is not None))
    kinds = [(type(x).__name__, tuple(x.shape), str(x.dtype), str(getattr(x, "device", ""))) for x in results]
    return type(result).__name__, kinds, [bits(x) for x in results]


def bits(x):
    if not isinstance(x, torch.Tensor):
        return x.tobytes()
    return b"" if x.is_meta else x.contiguous().view(torch.uint8).numpy().tobytes()


def check(name, args, options):
    """The call after a remembered one of `name`, and that one after it."""
    entry, plain_args, plain = CALLS[name]
    with unknown():
        want = outcome(entry, args, options)
    with unknown():
        base = outcome(entry, plain_args, plain)
    # Comparisons by name: with CI set, pytest would write out how two lists of numbers differ, in seconds.
    for _ in range(2):
        as_before = outcome(entry, plain_args, plain) == base
        assert as_before, plain
    assert call_cache.find(call_cache.key_of(entry.__name__, plain_args, plain)) is not None
    for _ in range(3):
        as_alone = outcome(entry, args, options) == want
        assert as_alone, options
    as_before = outcome(entry, plain_args, plain) == base
    assert as_before, plain


@pytest.mark.parametrize("name", CALLS)
def test_every_option_is_flipped_here(name):
    entry, args, _ = CALLS[name]
    assert set(NAMES[entry.__name__][len(args) :]) <= set(OPTIONS)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("option", OPTIONS)
def test_options(name, option):
    """Options of other entry points too: they are unknown, whatever was remembered."""
    _, args, options = CALLS[name]
    for value in OPTIONS[option]:
        check(name, args, options | {option: value})
    check(name, args, {n: x for n, x in options.items() if n != option})
    check(name, args, {**options, "no_option": None})


class Subclass(torch.Tensor):
    pass


def turned(x):
    """The same numbers with the first two dims of size over 1 the other way in memory."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def padded(x):
    """The same numbers, not one after the other."""
    wide = x.new_zeros((*x.shape[:-1], x.shape[-1] + 3))
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def shifted(x):
    """The same numbers at an address that is no multiple of 16."""
    flat = x.new_empty(x.numel() + 1)[1:].view(x.shape)
    return flat.copy_(x)


def negated_in_place(x):
    """The same numbers in the same form, which torch holds the negative of."""
    return torch._neg_view(-x)


def negated(x):
    """The same numbers, which torch holds the negative of."""
    return torch.complex(torch.zeros_like(x), -x).conj().imag


PROPERTIES = {
    "other numbers": lambda x: x.flip(0).contiguous(),
    "shape, first dim": lambda x: x[:-1],
    "shape, last dim": lambda x: x[..., :-1],
    "shape, one dim more": lambda x: x[None],
    "strides": turned,
    "contiguity": padded,
    "last stride": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "broadcast": lambda x: x[:1].expand(x.shape),
    "alignment": shifted,
    "dtype": lambda x: x.half() if x.is_floating_point() else x.long(),
    "another dtype": lambda x: x.bfloat16() if x.is_floating_point() else x.short(),
    "float64": torch.Tensor.double,
    "device": lambda x: x.to("meta"),
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "gradient": lambda x: x.clone().requires_grad_() if x.is_floating_point() else x,
    "subclass": lambda x: x.as_subclass(Subclass),
    "sparse": torch.Tensor.to_sparse,
    "mkldnn": lambda x: x.to_mkldnn() if x.is_floating_point() else x,
    "negated": lambda x: negated(x) if x.dtype == torch.float32 else x,
    "negated in place": lambda x: negated_in_place(x) if x.dtype == torch.float32 else x,
    "NumPy": lambda x: x.numpy(),
    "a number": lambda x: 1,
    "None": lambda x: None,
    "int8": lambda x: Quantised.from_float(x.float(), "int8", 32),
    "int8, other groups": lambda x: Quantised.from_float(x.float(), "int8", 64),
    "int4": lambda x: Quantised.from_float(x.float(), "int8" if x.shape[-1] % 2 else "int4", 32),
}


def places(name):
    """Where a call has tensors: positions of arguments, names of options."""
    _, args, options = CALLS[name]
    given = {**dict(enumerate(args)), **options}
    return [place for place, x in given.items() if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("change", PROPERTIES)
@pytest.mark.parametrize("name", CALLS)
def test_properties_of_tensors(name, change):
    _, args, options = CALLS[name]
    for place in places(name):
        x = args[place] if isinstance(place, int) else options[place]
        if isinstance(place, int):
            check(name, (*args[:place], PROPERTIES[change](x), *args[place + 1 :]), options)
        else:
            check(name, args, options | {place: PROPERTIES[change](x)})


@pytest.mark.parametrize("name", ["dense", "varlen", "paged"])
@pytest.mark.parametrize("change", PROPERTIES)
def test_properties_of_quantised_tensors(monkeypatch, name, change):
    """A remembered call of quantised keys, and then one whose data or scales are others, or none."""
    entry, (q, k, v, *tables), options = CALLS[name]
    stored = Quantised.from_float(k, "int8", 32)
    monkeypatch.setitem(CALLS, "quantised", (entry, (q, stored, v, *tables), options))
    for part in ("data", "scales"):
        parts = {"data": stored.data, "scales": stored.scales}
        try:
            changed = Quantised(**parts | {part: PROPERTIES[change](parts[part])}, dtype="int8", group=32)
        except Exception:  # refused already
            changed = k
        check("quantised", (q, changed, v, *tables), options)


def test_formats_of_the_same_bytes_are_two_calls():
    _, (q, k, *rest), options = CALLS["quantised, paged"]
    check("quantised, paged", (q, Quantised(k.data, k.scales, "codebook4", k.group), *rest), options)


@pytest.mark.filterwarnings("ignore")  # torch's own, of tangents
@pytest.mark.parametrize("name", CALLS)
def test_modes_of_torch(name):
    entry, args, options = CALLS[name]
    check(name, args, options)
    before = outcome(entry, args, options)
    with torch.inference_mode():
        check(name, args, options)
    with torch.no_grad():
        check(name, (args[0].clone().requires_grad_(), *args[1:]), options)
    count = len(call_cache._known)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        check(name, args, options)
        assert len(call_cache._known) == count + 1  # a plan for other threads
    finally:
        torch.set_num_threads(threads)
    with torch.autograd.forward_ad.dual_level():
        tangent = torch.autograd.forward_ad.make_dual(args[0], torch.ones_like(args[0]))
        got = outcome(entry, (tangent, *args[1:]), options)
        if entry is paged_attention or any(isinstance(x, Quantised) for x in args):
            kind, text = got
            assert kind == "InvalidArgument"
            assert "tangent" in text or "Quantised" in text
        else:
            assert got == before
    assert outcome(entry, args, options) == before


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_never_served_by_a_remembered_call(name):
    entry, args, options = CALLS[name]
    entry(*args, **options)
    for place in places(name):
        x = (args[place] if isinstance(place, int) else options[place]).clone()
        if not x.is_floating_point():
            continue
        x.requires_grad_()
        changed = (*args[:place], x, *args[place + 1 :]) if isinstance(place, int) else args
        changed_options = options if isinstance(place, int) else options | {place: x}
        assert call_cache.key_of(entry.__name__, changed, changed_options) is None
        with torch.no_grad():
            assert call_cache.key_of(entry.__name__, changed, changed_options) is not None


def test_keys_without_strides_are_rejected(monkeypatch):
    key_of = call_cache.key_of
    monkeypatch.setattr(call_cache, "key_of", lambda *call: key_of(*call) and (*key_of(*call)[:3], *key_of(*call)[4:]))
    with pytest.raises(AssertionError):
        check("dense", (turned(DENSE[0]), *DENSE[1:]), {})


def blind(key_of, option):
    """A key function that leaves out an option."""
    return lambda name, args, options: key_of(name, args, {n: x for n, x in options.items() if n != option})


@pytest.mark.parametrize(
    "option", ["scale", "softcap", "q_offset", "window", "chunk", "causal", "layout", "return_lse"]
)
@pytest.mark.parametrize("name", CALLS)
def test_keys_without_an_option_are_rejected(monkeypatch, name, option):
    monkeypatch.setattr(call_cache, "key_of", blind(call_cache.key_of, option))
    with pytest.raises(AssertionError):
        test_options(name, option)


def untyped(key_of):
    """A key function that leaves out the types of options."""

    def without(x):
        return tuple(map(without, (y for y in x if not isinstance(y, type)))) if type(x) is tuple else x

    return lambda *call: without(key_of(*call))


@pytest.mark.parametrize("option", ["causal", "return_lse", "allow_tf32", "chunk", "split_size", "window", "scale",
                                    "softcap", "q_offset", "validate"])  # fmt: skip
def test_keys_without_types_are_rejected(monkeypatch, option):
    monkeypatch.setattr(call_cache, "key_of", untyped(call_cache.key_of))
    with pytest.raises(AssertionError):
        test_options("dense", option)


@pytest.mark.parametrize("number", [2.5, 3.0])
def test_numbers_that_differ_in_their_last_bit_are_two_options(number):
    for option in ("scale", "softcap"):
        for value in (number, math.nextafter(number, 9.0)):
            attention(*DENSE, **{option: value})
    assert len(call_cache._known) == 4


@pytest.mark.parametrize("name", [name for name in CALLS if "quantised" not in name])
def test_values_that_lie_in_the_keys_are_another_call(name):
    entry, (q, k, _, *tables), options = CALLS[name]
    inside = k[..., :8]  # the first columns of k, in its memory
    others = [k.clone()[..., :8], k[..., 1:9], inside.contiguous()]
    for first in (inside, *others):
        call_cache.forget()
        for values in (first, *others, inside, first):
            want = entry(q, k, values.clone(memory_format=torch.contiguous_format), *tables, **options)
            got = entry(q, k, values, *tables, **options)
            assert all(torch.equal(x, y) for x, y in zip(*map(list, (got, want)), strict=True))
            known = call_cache.find(call_cache.key_of(entry.__name__, (q, k, values, *tables), options))
            assert known.problem.v_in_k is (values is inside)


def first_half(x):
    """The first columns of a quantised tensor, in its memory."""
    return Quantised(x.data[..., :64], x.scales[..., :1], x.dtype, x.group)


@pytest.mark.parametrize("form", ["dense", "paged"])
def test_quantised_values_that_lie_in_the_keys_are_another_call(form):
    shape = (2, 3, 20, 128) if form == "dense" else (4, 10, 3, 128)
    keys, others = (Quantised.from_float(draw(*shape, seed=n), "int8", 64) for n in (1, 2))
    q, options = draw(2, 6, 1, 128, seed=3), {"backend": "torch"}  # which reads rows that hold both once
    entry, tables = attention, ()
    if form == "paged":
        entry, tables = paged_attention, (ints([0, 1], [2, 3]), ints(17, 20))
    inside, apart = first_half(keys), first_half(others)
    call_cache.forget()
    want = [entry(q, keys, inside, *tables, **options)]
    call_cache.forget()
    want.append(entry(q, keys, apart, *tables, **options))
    for order in ((0, 1, 0, 1), (1, 0, 1, 0)):
        call_cache.forget()
        for n in order:
            assert entry(q, keys, (inside, apart)[n], *tables, **options).equal(want[n])
        assert sorted(x.problem.v_in_k for x in call_cache._known.values()) == [False, True]


def test_the_cache_has_a_size(monkeypatch):
    monkeypatch.setattr(call_cache, "MOST", 3)
    q, k, v = DENSE
    for keys in range(1, 7):
        attention(q, k[:, :, :keys], v[:, :, :keys])
        assert 1 <= len(call_cache._known) <= 3
