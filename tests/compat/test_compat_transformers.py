"""transformers' models with tilewise's attention, against their own eager attention."""

import copy
import functools
import os
import subprocess
import sys
import types

import pytest
import torch
from transformers import (
    AttentionInterface,
    ContinuousBatchingConfig,
    DataCollatorWithFlattening,
    GenerationConfig,
    StaticCache,
    Trainer,
    TrainingArguments,
)
from transformers import masking_utils as hf

from hf_models import DECODERS, ENCODERS, VOCABULARY, build
from tilewise import InvalidArgument, varlen_attention
from tilewise.compat import discovery, flash_attn, mask_patterns
from tilewise.compat import transformers as ours
from tilewise.compat.lazy_mask import LazyMask
from tilewise.compat.mask_patterns import make_mask
from tilewise.core.extras import install_line
from tilewise.testing.check import Mismatch, judge, largest_error

ours.register()
LENGTH = 14
PADDINGS = {"no": (0, 0, 0), "left": (5, 0, 9), "right": (-5, 0, -9), "one": (0,)}


def exact_attention(
    module, query, key, value, attention_mask, scaling, softcap=None, s_aux=None, position_bias=None, **_
):
    """What eager attention computes, with a softmax in float64 and 0 where a row sees nothing."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    else:
        scores = scores + attention_mask
    if s_aux is not None:
        scores = torch.cat((scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2), None


def exact_mask(*arguments, allow_is_causal_skip=None, allow_is_bidirectional_skip=None, **options):
    return hf.sdpa_mask(*arguments, allow_is_causal_skip=False, **options)


AttentionInterface.register("exact", exact_attention)
hf.AttentionMaskInterface.register("exact", exact_mask)


@functools.cache
def model_of(name):
    return build(name)


@functools.cache
def exact_of(name):
    """The model in float64."""
    model = copy.deepcopy(model_of(name)).double()
    if name in ("gpt_oss", "deepseek_v3"):
        model.set_experts_implementation("eager")  # the faster ones have no float64
    return model


def inputs(name):
    """Tokens and their mask; padding is on the left if positive."""
    pads = PADDINGS[name]
    tokens = torch.randint(3, VOCABULARY, (len(pads), LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(tokens.shape, dtype=torch.long)
    for row, pad in zip(mask, pads, strict=True):
        row[: max(pad, 0)] = 0
        row[LENGTH + min(pad, 0) :] = 0
    return tokens, mask


def run(model, implementation, *arguments, **options):
    """What a model gives at each token: logits, or its last hidden states."""
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        result = model(*arguments, **options)
    return result.logits if "logits" in result else result.last_hidden_state


def check(name, *arguments, visible=slice(None), implementation="tilewise", **options):
    """As right as eager attention: at most twice its error, by the model in float64."""
    got = run(model_of(name), implementation, *arguments, **options)[visible]
    plain = run(model_of(name), "eager", *arguments, **options)[visible]
    compare(name, got, plain, run(exact_of(name), "exact", *arguments, **options)[visible])


def compare(name, got, plain, exact):
    factor = 3.0 if name == "gemma2" else 2.0  # with softcap
    judge("out", got, exact, factor * largest_error(plain, exact), torch.float32)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_logits(name, padding):
    tokens, mask = inputs(padding)
    check(name, tokens, attention_mask=mask, visible=mask.bool())
    if padding == "no":
        check(name, tokens)


@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_these_models_notice(name):
    """What averages the values, or takes a mask for another, does not pass for attention here."""

    def mean(module, query, key, value, attention_mask, **_):
        groups = query.shape[1] // value.shape[1]
        return value.repeat_interleave(groups, 1).mean(2, keepdim=True).expand_as(value[:, :1]).transpose(1, 2), None

    def nearly(module, query, key, value, attention_mask, **options):
        return ours.attention_forward(module, query, key * 1.02, value, attention_mask, **options)

    tokens, mask = inputs("left")
    for broken in (mean, nearly):
        AttentionInterface.register("broken", broken)
        hf.AttentionMaskInterface.register("broken", make_mask)
        with pytest.raises((Mismatch, RuntimeError)):
            check(name, tokens, attention_mask=mask, visible=mask.bool(), implementation="broken")


@pytest.mark.parametrize("cache", [None, "static", False], ids=["dynamic", "static", "no cache"])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_generate(name, padding, cache):
    """Greedy texts, token by token those of eager; long enough that windows and chunks move on.

    After padding on the right, a window or chunk may hold nothing else. Eager then takes the mean of all keys, padding
    too; by the contract, as with SDPA, such a row gives 0, and the texts are compared with those of `exact_attention`.
    """
    tokens, mask = inputs(padding)
    model = model_of(name)
    options = {"attention_mask": mask, "max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
    texts = []
    for implementation in ("exact" if padding == "right" else "eager", "tilewise"):
        model.set_attn_implementation(implementation)
        caching = {"use_cache": False} if cache is False else {"cache_implementation": cache}
        with torch.no_grad():
            texts.append(model.generate(tokens, **options, **caching))
    assert texts[0].equal(texts[1])
    assert texts[0].shape[1] == LENGTH + 9


@pytest.mark.parametrize("name", ["llama", "gemma2", "llama4"])
def test_a_prompt_in_parts_over_a_static_cache(name):
    """Several queries over keys that lie before them, with empty slots after them."""
    tokens, mask = inputs("left")
    logits = []
    for model, implementation in [(model_of(name), "tilewise"), (model_of(name), "eager"), (exact_of(name), "exact")]:
        cache = StaticCache(config=model.config, max_cache_len=20)
        parts = [
            run(model, implementation, tokens[:, a:b], attention_mask=mask[:, :b], past_key_values=cache)
            for a, b in ((0, 8), (8, 14))
        ]
        logits.append(torch.cat(parts, 1)[mask.bool()])
    compare(name, *logits)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3"])
def test_packed_sequences(name):
    """Positions that start again are sequences of their own: no mask is built, and each is what it is alone."""
    tokens, _ = inputs("no")
    positions = torch.tensor([[*range(5), *range(9)], [*range(14)], [*range(1), *range(7), *range(6)]])
    check(name, tokens, position_ids=positions, use_cache=False)
    packed = run(model_of(name), "tilewise", tokens, position_ids=positions, use_cache=False)
    alone = [run(*how, tokens[:1, 5:]) for how in ((model_of(name), "eager"), (exact_of(name), "exact"))]
    compare(name, packed[:1, 5:], *alone)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_packed_sequences_by_their_offsets(name):
    """As transformers' flattening collator gives them, for models too that do not look at positions."""
    tokens, _ = inputs("one")
    cu = torch.tensor([0, 5, 14], dtype=torch.int32)
    positions = torch.tensor([[*range(5), *range(9)]])
    offsets = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 9, "max_length_k": 9}
    packed = run(model_of(name), "tilewise", tokens, position_ids=positions, use_cache=False, **offsets)
    alone = [
        torch.cat([run(*how, tokens[:, a:b]) for a, b in ((0, 5), (5, 14))], 1)
        for how in ((model_of(name), "eager"), (exact_of(name), "exact"))
    ]
    compare(name, packed, *alone)


def test_masks_of_a_users_own():
    tokens, _ = inputs("no")
    visible = torch.rand(3, 1, LENGTH, LENGTH) > 0.3
    visible |= torch.eye(LENGTH, dtype=torch.bool)
    added = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    check("llama", tokens, attention_mask=added)
    as_bool = run(model_of("llama"), "tilewise", tokens, attention_mask=visible)
    plain = run(model_of("llama"), "eager", tokens, attention_mask=added)
    compare("llama", as_bool, plain, run(exact_of("llama"), "exact", tokens, attention_mask=visible))


def dense(mask, shape, offset=0):
    """A pattern as a bool mask, by the meaning of its options."""
    batch, _, rows, keys = shape
    if mask is None:
        return torch.ones(rows, keys, dtype=torch.bool).tril(offset).expand(batch, 1, -1, -1)
    q = torch.arange(rows)[:, None] + mask.pattern.options.get("q_offset", 0)
    k = torch.arange(keys)[None]
    left, right = mask.pattern.options.get("window", (None, None))
    visible = torch.ones(rows, keys, dtype=torch.bool)
    if mask.pattern.options["causal"]:
        visible &= k <= q
    if left is not None:
        visible &= q - k <= left
    if right is not None:
        visible &= k - q <= right
    if "chunk" in mask.pattern.options:
        visible &= q // mask.pattern.options["chunk"] == k // mask.pattern.options["chunk"]
    visible = visible.expand(batch, 1, rows, keys)
    if "kv_lengths" in mask.pattern.options:
        visible = visible & (k < mask.pattern.options["kv_lengths"][:, None, None, None])
    if "mask" in mask.pattern.options:
        assert mask.pattern.options["mask"].shape == (batch, 1, 1, keys)
        visible = visible & mask.pattern.options["mask"]
    return visible


def in_sequences(mask, shape):
    """The same by its sequences; rows of padding see nothing."""
    batch, _, rows, keys = shape
    cu, chunk = mask.pattern.packed.offsets, mask.pattern.options.get("chunk")
    left, right = mask.pattern.options.get("window", (None, None))
    lengths = cu.diff() if mask.pattern.packed.lengths is None else mask.pattern.packed.lengths
    visible = torch.zeros(batch * rows, batch * keys, dtype=torch.bool)
    for start, end, used in zip(cu[:-1].tolist(), cu[1:].tolist(), lengths.tolist(), strict=True):
        assert end - start <= mask.pattern.packed.longest
        i, j = torch.arange(end - start)[:, None], torch.arange(used)[None]
        part = torch.ones(end - start, used, dtype=torch.bool)
        part &= (j <= i) | (not mask.pattern.options["causal"])
        part &= (i - j <= left) if left is not None else True
        part &= (j - i <= right) if right is not None else True
        part &= (i // chunk == j // chunk) if chunk is not None else True
        visible[start:end, start : start + used] = part
    return torch.stack([visible[b * rows : (b + 1) * rows, b * keys : (b + 1) * keys] for b in range(batch)])[:, None]


FUNCTIONS = {
    "causal": hf.causal_mask_function,
    "both ways": hf.bidirectional_mask_function,
    "window": hf.sliding_window_causal_mask_function(5),
    "two-sided window": hf.sliding_window_bidirectional_mask_function(4),
    "chunk": hf.chunked_causal_mask_function(4, torch.zeros(3, dtype=torch.long)),
    "window in chunks": hf.and_masks(
        hf.sliding_window_causal_mask_function(3), hf.chunked_causal_mask_function(4, torch.zeros(3, dtype=torch.long))
    ),
}


@pytest.mark.parametrize(("rows", "start", "first"), [(14, 0, 0), (4, 10, 0), (1, 13, 0), (3, 13, 8)])
@pytest.mark.parametrize("padding", ["no", "left", "right", None])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("slots", [0, 6])
def test_patterns_mean_what_the_masks_say(name, padding, rows, start, first, slots):
    """Every rule, with padding, over dynamic, trimmed and static caches."""
    keys = start + rows - first + slots
    mask = None
    if padding is not None:
        mask = inputs(padding)[1].bool()
        grown = start + rows - LENGTH
        mask = torch.cat((mask, torch.ones(3, grown, dtype=torch.bool)), 1) if grown >= 0 else mask[:, : start + rows]
    arguments = (3, rows, keys, start, first, FUNCTIONS[name], mask)
    want = hf.sdpa_mask(*arguments, allow_is_causal_skip=False)
    for unpad in (False, True):
        got = make_mask(*arguments, allow_is_causal_skip=True, allow_is_bidirectional_skip=True, unpad=unpad)
        assert got is None or isinstance(got, LazyMask)
        if got is None and name == "both ways":
            assert want.all()
            continue
        want = want.expand(3, 1, rows, keys)
        assert dense(got, want.shape, start - first).equal(want)
        if got is not None:
            assert got.shape == want.shape
            assert got.clone().equal(want)  # as a tensor
        packed = got is not None and got.pattern.packed is not None
        both_ways = name in ("both ways", "two-sided window")
        if packed:
            real = mask[:, None, :, None] if unpad and both_ways else True  # rows of padding then see nothing
            assert in_sequences(got, want.shape).equal(want & real)
        elsewhere = padding == "left" and "chunk" in name  # these chunks do not start with a row's first token
        in_rows = padding in ("left", "right") and unpad if both_ways else padding == "left"
        assert packed == (in_rows and start == 0 and slots == 0 and not elsewhere)


def test_nothing_known_becomes_dense():
    """Padding is lengths if it is on the right, else one byte for each key; only what is arbitrary is a mask."""
    mask = inputs("right")[1]
    assert make_mask(3, 14, 14) is None
    assert make_mask(3, 1, 14, 13) is None
    assert make_mask(3, 14, 14, attention_mask=torch.ones(3, 14, dtype=torch.bool)) is None
    assert make_mask(3, 14, 14, attention_mask=mask.bool()).pattern.options["kv_lengths"].tolist() == [9, 14, 5]
    assert make_mask(3, 14, 14, attention_mask=inputs("left")[1].bool()).pattern.options["mask"].shape == (3, 1, 1, 14)
    sequences = hf.packed_sequence_mask_function(torch.tensor([[0] * 4 + [1] * 10]))
    both = hf.and_masks(hf.sliding_window_causal_mask_function(3), sequences)
    packed = make_mask(1, 14, 14, mask_function=both, allow_is_causal_skip=False)
    assert packed.pattern.packed.offsets.tolist() == [0, 4, 14]
    assert packed.pattern.packed.longest == 10
    assert in_sequences(packed, (1, 1, 14, 14)).equal(
        hf.sdpa_mask(1, 14, 14, mask_function=both, allow_is_causal_skip=False)
    )
    assert packed.pattern.options["window"] == (2, None)

    def odd_keys(batch, head, q, k):
        return k % 2 == 1

    both = hf.and_masks(hf.causal_mask_function, odd_keys)
    arbitrary = make_mask(3, 14, 14, mask_function=both)
    assert type(arbitrary) is torch.Tensor
    assert arbitrary.dtype == torch.bool
    assert arbitrary.equal(hf.sdpa_mask(3, 14, 14, mask_function=both, allow_is_causal_skip=False))
    vmapped = make_mask(3, 14, 14, mask_function=hf.or_masks(hf.causal_mask_function, odd_keys), use_vmap=True)
    assert bool(vmapped[0, 0, 0, 13])
    assert make_mask(3, 14, 14, allow_is_causal_skip=False).shape == (3, 1, 14, 14)  # a model wants to work on it


def test_chunks_that_start_elsewhere_in_each_row():
    """They start with the first token. A prompt's rows are sequences then; later, and with a hole, it is a mask."""
    mask = inputs("left")[1].bool()
    options = {"mask_function": hf.chunked_causal_mask_function(4, torch.tensor([5, 0, 9])), "attention_mask": mask}
    got = make_mask(3, 14, 14, **options)
    assert got.pattern.packed.only
    want = hf.sdpa_mask(3, 14, 14, **options, allow_is_causal_skip=False)
    assert in_sequences(got, want.shape).equal(want & mask[:, None, :, None])
    for arguments in [(3, 1, 14, 13), (3, 14, 20)]:
        got = make_mask(*arguments, **options)
        assert type(got) is torch.Tensor
        assert got.equal(hf.sdpa_mask(*arguments, **options, allow_is_causal_skip=False))
    mask[1, 3] = False
    assert type(make_mask(3, 14, 14, **options)) is torch.Tensor


def test_padding_is_not_computed_where_that_changes_nothing(monkeypatch):
    """A prompt's left padding, without a cache, is sequences over the model's own memory, for whoever asks for it also
    an encoder's; a bias, or keys elsewhere, take the mask.
    """
    calls = []
    note = lambda *a, **o: calls.append(a) or varlen_attention(*a, **o)  # noqa: E731
    monkeypatch.setattr(ours, "varlen_attention", note)
    assert ours.register("unpadded", unpad=True) == "unpadded"
    tokens, mask = inputs("right")
    run(model_of("bert"), "tilewise", tokens, attention_mask=mask)
    assert not calls
    run(model_of("bert"), "unpadded", tokens, attention_mask=mask)
    assert len(calls) == 2
    assert all(x.untyped_storage().nbytes() == 4 * x.numel() for x in calls[0][:3])  # views: nothing else is in there
    run(model_of("t5_encoder"), "unpadded", tokens, attention_mask=mask)
    run(model_of("llama"), "unpadded", tokens, attention_mask=mask)  # its padding sees the tokens
    run(model_of("llama"), "tilewise", tokens, attention_mask=mask.flip(1))  # its keys come from a cache
    assert len(calls) == 2
    run(model_of("llama"), "tilewise", tokens, attention_mask=mask.flip(1), use_cache=False)
    assert len(calls) == 4
    check("bert", tokens, attention_mask=mask, visible=mask.bool(), implementation="unpadded")


def test_an_unknown_transformers_is_read_as_arbitrary(monkeypatch):
    monkeypatch.setattr(mask_patterns, "_closure", lambda function: {})
    assert mask_patterns.read(hf.sliding_window_causal_mask_function(3)) is None
    assert type(make_mask(1, 9, 9, mask_function=hf.sliding_window_causal_mask_function(3))) is torch.Tensor


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated, and its tracer warns of constants
def test_jit_trace():
    """A model traced without padding computes with it: no choice was made by the values of the mask."""
    model = model_of("llama")
    model.set_attn_implementation("tilewise")

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, tokens, mask):
            return self.model(tokens, attention_mask=mask, use_cache=False).logits

    with torch.no_grad():
        traced = torch.jit.trace(Logits(), inputs("no"), check_trace=False)
        for padding in ("no", "left", "right"):
            tokens, mask = inputs(padding)
            got, plain = traced(tokens, mask), run(model, "eager", tokens, attention_mask=mask)
            exact = run(exact_of("llama"), "exact", tokens, attention_mask=mask)
            compare("llama", *(x[mask.bool()] for x in (got, plain, exact)))
            model.set_attn_implementation("tilewise")


def test_torch_compile():
    """One graph, padding and all."""
    tokens, mask = inputs("left")
    model = model_of("gemma2")
    plain, exact = (run(*how, tokens, attention_mask=mask) for how in ((model, "eager"), (exact_of("gemma2"), "exact")))
    model.set_attn_implementation("tilewise")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        got = compiled(tokens, attention_mask=mask).logits
    compare("gemma2", *(x[mask.bool()] for x in (got, plain, exact)))


@pytest.mark.parametrize("padding", ["no", "left", "right"])
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_with_gradients(name, padding):
    """A plain forward pass with grad mode on: as right as eager's, and so are its gradients."""
    tokens, mask = inputs(padding)
    results = []
    for model, implementation in ((model_of(name), "tilewise"), (model_of(name), "eager"), (exact_of(name), "exact")):
        model.set_attn_implementation(implementation)
        result = model(tokens, attention_mask=mask)
        logits = (result.logits if "logits" in result else result.last_hidden_state)[mask.bool()]
        assert logits.requires_grad
        weights = [p for p in model.parameters() if p.requires_grad and p.ndim == 2]
        grads = torch.autograd.grad((logits * logits.detach().sin()).sum(), weights, allow_unused=True)
        results.append((logits.detach(), [g for g in grads if g is not None]))
    compare(name, *(logits for logits, _ in results))
    ours_, plain, exact = (torch.cat([g.double().flatten() for g in grads]) for _, grads in results)
    assert largest_error(ours_, exact) <= 4 * largest_error(plain, exact) + 1e-5 * float(exact.abs().max())
    assert exact.abs().max() > 0


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_packed_sequences_with_gradients(name):
    tokens, _ = inputs("one")
    cu = torch.tensor([0, 5, 14], dtype=torch.int32)
    positions = torch.tensor([[*range(5), *range(9)]])
    offsets = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 9, "max_length_k": 9}
    model = model_of(name)
    model.set_attn_implementation("tilewise")
    packed = model(tokens, position_ids=positions, use_cache=False, **offsets).logits
    assert packed.requires_grad
    alone = [
        torch.cat([run(*how, tokens[:, a:b]) for a, b in ((0, 5), (5, 14))], 1)
        for how in ((model_of(name), "eager"), (exact_of(name), "exact"))
    ]
    compare(name, packed.detach(), *alone)


def in_a_process(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.stdout.strip() or done.stderr


NAMES = """
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
print("tilewise" in ALL_ATTENTION_FUNCTIONS)
"""


def test_it_registers_itself_before_transformers_and_imports_nothing():
    """tilewise brings no transformers, and transformers brings none of its models, for its sake."""
    code = f"""
import sys, tilewise
print("transformers" in sys.modules, "tilewise.compat.transformers" in sys.modules)
import transformers
print("transformers.modeling_utils" in sys.modules)
{NAMES}
from tilewise.compat.discovery import Finder, Loader
module = sys.modules["transformers.modeling_utils"]
print(any(isinstance(x, Finder) for x in sys.meta_path), isinstance(module.__loader__, Loader))
"""
    assert in_a_process(code).splitlines() == ["False False", "False", "True", "False False"]


def test_it_registers_itself_after_transformers():
    assert in_a_process(f"import transformers.modeling_utils\nimport tilewise\n{NAMES}") == "True"


def test_it_registers_itself_where_its_own_module_imports_transformers():
    """That import runs `discovery` while the module has no `register` yet; it is no warning, and not forgotten."""
    code = f"import warnings; warnings.simplefilter('error', UserWarning)\nimport tilewise.compat.transformers\n{NAMES}"
    assert in_a_process(code) == "True"


@pytest.mark.parametrize("first", ["transformers.modeling_utils", "tilewise"])
def test_an_old_transformers(first):
    """It is named with the remedy, once, when its models are imported and where tilewise is asked for it."""
    code = f"""
import warnings, sys
warnings.showwarning = lambda message, *_: print(message)
import transformers
transformers.__version__ = "5.21.3"
import {first}
import tilewise
{NAMES}
for module in (transformers, None):
    sys.modules["transformers"] = module
    try:
        import tilewise.compat.transformers
    except ImportError as error:
        print(type(error).__name__, error)
"""
    warned, known, old, missing = in_a_process(code).splitlines()
    reason = "tilewise.compat.transformers needs transformers 5.22 or newer, not 5.21.3: "
    assert warned.startswith(f"{reason}attn_implementation='tilewise' is not available; pip install")
    assert known == "False"
    assert old.startswith(f"MissingPackage {reason}")
    assert missing.startswith("MissingPackage tilewise.compat.transformers needs transformers ")
    assert old.endswith(install_line("hf"))
    assert missing.endswith(install_line("hf"))


@pytest.mark.parametrize(
    ("version", "fits"), [("5.22.0", True), ("6.0.0.dev0", True), ("5.9", False), ("4.57.1", False)]
)
def test_versions_of_transformers(version, fits, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(__version__=version))
    assert (discovery.too_old() == "") == fits


def test_a_later_transformers_can_be_imported_whatever_it_has_changed(monkeypatch):
    def changed():
        raise AttributeError("gone")

    monkeypatch.setattr(ours, "register", changed)
    with pytest.warns(UserWarning, match=r"could not register .* with this transformers: AttributeError"):
        discovery.register()


def test_refusals():
    model = model_of("gpt2")
    q = torch.randn(1, 2, 3, 8)
    for options, words in [
        ({"dropout": 1.1}, r"dropout_p: got 1\.1"),
        ({"output_attentions": True}, "eager"),
        ({"cache": object()}, "continuous batching"),
    ]:
        with pytest.raises(InvalidArgument, match=words):
            ours.attention_forward(model, q, q, q, None, **options)
    for name in ("my_flash", "sdpa2", "a/b"):
        with pytest.raises(InvalidArgument, match="plain name"):
            ours.register(name)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_continuous_batching(name, monkeypatch):
    """Prompts of all lengths in one batch that comes and goes; each text is what eager makes of its prompt alone."""
    calls = []
    count = lambda *a, **o: calls.append(o.get("window")) or varlen_attention(*a, **o)  # noqa: E731
    monkeypatch.setattr(flash_attn, "varlen_attention", count)
    monkeypatch.setenv("LOCAL_KERNELS", "someone/else=/nowhere")
    model = model_of(name)
    options = GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=VOCABULARY, pad_token_id=0)
    prompts = [row[mask.bool()].tolist() for row, mask in zip(*inputs("left"), strict=True)]
    model.set_attn_implementation("eager")
    alone = [model.generate(torch.tensor([p]), generation_config=options)[0, len(p) :].tolist() for p in prompts]
    model.set_attn_implementation(ours.register_flash())
    small = ContinuousBatchingConfig(page_size=4, num_blocks=32, max_batch_tokens=16)
    with torch.no_grad():
        texts = model.generate_batch(
            prompts, generation_config=options, continuous_batching_config=small, progress_bar=False
        )
    assert [text.generated_tokens for text in texts.values()] == alone
    assert len(calls) >= 2 * 9
    assert any(calls) == (name != "llama")
    assert os.environ["LOCAL_KERNELS"].startswith("someone/else=/nowhere:tilewise/flash-attn2=")


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_gradient_checkpointing(name):
    """Layers that are computed again in the backward pass give the gradients of those that are not."""
    tokens, mask = inputs("left")
    model = copy.deepcopy(model_of(name)).train()
    model.set_attn_implementation("tilewise")
    gradients = []
    for again in (False, True):
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = model(tokens, attention_mask=mask, labels=tokens, use_cache=False).loss
        gradients.append(
            torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
        )
    for a, b in zip(*gradients, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_trainer(name, tmp_path):
    """Weights after three steps of a Trainer that packs rows and computes layers again: at most twice as far from those
    of a model in float64 as eager attention's are.
    """
    g = torch.Generator().manual_seed(2)
    rows = [torch.randint(3, VOCABULARY, (n,), generator=g).tolist() for n in (5, 12, 20, 9, 7, 15, 30, 4)]
    settings = TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=4, learning_rate=0.1, optim="sgd", use_cpu=True, seed=0,
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    ends = []
    for model, implementation in ((model_of(name), "tilewise"), (model_of(name), "eager"), (exact_of(name), "exact")):
        model = copy.deepcopy(model)
        model.set_attn_implementation(implementation)
        data = [{"input_ids": row, "labels": row} for row in rows]
        Trainer(model, settings, train_dataset=data, data_collator=DataCollatorWithFlattening()).train()
        ends.append(torch.cat([p.detach().double().flatten() for p in model.parameters()]))
    start = torch.cat([p.detach().double().flatten() for p in exact_of(name).parameters()])
    ours_, plain, exact = ((end - (ends[2] if end is not ends[2] else start)).norm() for end in ends)
    assert exact > 0
    assert 0 < ours_ <= (3 if name == "gemma2" else 2) * plain


def test_training_lowers_the_loss():
    """A few steps on one batch, as a trainer takes them; the same curve as eager's."""
    tokens, _ = inputs("no")
    curves = []
    for implementation in ("tilewise", "eager"):
        model = copy.deepcopy(model_of("llama")).train()
        model.set_attn_implementation(implementation)
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        curve = []
        for _ in range(6):
            loss = model(tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        curves.append(curve)
    assert curves[0][-1] < curves[0][0] - 0.05
    assert torch.allclose(*map(torch.tensor, curves), atol=1e-3)


def test_under_autocast():
    """Keys that rotary embeddings have left in float32 beside values in bfloat16."""
    q, k, v = (torch.randn(1, h, 5, 16, requires_grad=True) for h in (4, 2, 2))
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = ours.attention_forward(torch.nn.Module(), q.bfloat16(), k, v, None)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert k.grad.dtype == torch.float32
