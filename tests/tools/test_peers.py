"""The peers of the bench: each is asked for the same thing as ours. Libraries that are not here are stood in for."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tilewise import attention, paged_attention, varlen_attention
from tilewise.compat import flash_attn
from tilewise.tools.bench import peers
from tilewise.tools.bench.oracle import oracle_errors
from tilewise.tools.bench.peers import Candidate
from tilewise.tools.workloads import Inputs, Workload, make_inputs

CPU = torch.device("cpu")
SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 16, "q_len": 40, "kv_len": 40}
CASES = {
    "plain": {},
    "causal": {"causal": True},
    "decode": {"causal": True, "q_len": 1},
    "chunk of queries": {"causal": True, "q_len": 9},
    "window": {"causal": True, "window": 7},
    "two-sided window": {"window": (5, 3)},
    "chunked": {"causal": True, "chunk": 16},
    "scale": {"scale": 1.0},
    "softcap": {"softcap": 5.0, "causal": True},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True, "causal": True},
    "lengths": {"lengths": (40, 7)},
    "batch": {"rows": 3, "causal": True},
    "value dim": {"value_dim": 24},
    "bool mask": {"mask": "documents"},
    "added mask": {"mask": "documents", "added": True},
    "packed": {"packed": True, "lengths": (40, 3, 17), "causal": True},
    "pages": {"page_size": 8, "lengths": (40, 3, 17), "q_len": 1, "causal": True},
}


def case_and_inputs(options, dtype=torch.float32):
    case = Workload("", "", **(SIZES | options))
    return case, make_inputs(case, CPU, dtype)


def results(name, options, dtype=torch.float32):
    """Each candidate's error, or its refusal."""
    case, x = case_and_inputs(options, dtype)
    outcomes = {}
    for candidate in peers.find(case, x, [name]):
        out, reason = peers.tried(candidate)
        outcomes[candidate.name] = reason if out is None else oracle_errors(x, [out])[0]
    return outcomes


@pytest.mark.parametrize("name", CASES)
def test_sdpa_is_right_or_says_why_not(name):
    outcomes = results("sdpa", CASES[name])
    wants = {
        "softcap": {"SDPA": "it has no softcap"}, "sinks": {"SDPA": "it has no sinks"},
    }  # fmt: skip
    if name in wants:
        assert outcomes == wants[name]
    elif name == "value dim":
        assert "same last dimension" in outcomes.pop("SDPA flash"), "torch's own reason"
        assert outcomes.pop("SDPA math") < 1e-5
    else:
        names = {"packed": {"SDPA, one by one"}, "pages": {"SDPA, pages copied"}}
        assert set(outcomes) == names.get(name, {"SDPA flash", "SDPA math"})
        assert max(outcomes.values()) < 1e-5


def test_what_would_not_fit_is_not_tried(monkeypatch):
    monkeypatch.setitem(peers.candidate.MOST_BYTES, "cpu", 4 * 40 * 40 * 4 - 1)
    assert "its scores would take" in results("sdpa", {})["SDPA math"]
    monkeypatch.setitem(peers.candidate.MOST_BYTES, "cpu", 100)
    assert "its mask would take" in results("sdpa", CASES["window"])["SDPA"]
    # K, K times the scale and V, a copy for each query head: 2 x D + Dv columns
    latent = {"heads": 6, "kv_heads": 1, "q_len": 1, "value_dim": 24}
    copies = 6 * 40 * (2 * SIZES["head_dim"] + 24) * 4
    for options, candidate in ((latent, "SDPA math"), (latent | CASES["pages"], "SDPA, pages copied")):
        size = copies * (3 if "lengths" in options else 1)
        monkeypatch.setitem(peers.candidate.MOST_BYTES, "cpu", size)
        assert results("sdpa", options)[candidate] < 1e-5
        monkeypatch.setitem(peers.candidate.MOST_BYTES, "cpu", size - 1)
        assert "its copies of K and V for each query head would take" in results("sdpa", options)[candidate]


def test_the_oracle_takes_few_heads_of_a_large_group(monkeypatch):
    """It has keys of its own for each head, in float64: 128 heads over 32k latent rows were 36 GB."""
    _, x = case_and_inputs({"heads": 40, "kv_heads": 2, "sinks": True, "alibi": True})
    heads_of_calls = []
    attend = Inputs.attend
    monkeypatch.setattr(Inputs, "attend", lambda x, **o: heads_of_calls.append(x.q.shape[1]) or attend(x, **o))
    out = attend(x)
    assert oracle_errors(x, [out])[0] < 1e-5
    assert set(heads_of_calls) == {8}
    for head in (0, 7, 19, 20, 39):  # the first and the last of each group
        wrong = out.clone()
        wrong[:, head] += 1
        assert oracle_errors(x, [wrong])[0] > 0.5


def test_a_way_that_fails_is_a_result_and_its_warnings_are_not_ours():
    def fails():
        raise RuntimeError("no kernel\nmore")

    assert peers.tried(Candidate("x", fails)) == (None, "no kernel")
    assert peers.tried(Candidate("x", refusal="why")) == (None, "why")


def test_installed_says_what_is_here():
    libraries = peers.installed()
    assert libraries["sdpa"] is None
    assert set(libraries) == set(peers.PEERS)


@pytest.fixture
def stand_in(monkeypatch):
    """Puts a module in the place of one that is not installed."""

    def put(name, **functions):
        module = ModuleType(name)
        module.__dict__.update(functions)
        module.__spec__ = SimpleNamespace(name=name)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return put


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("module", ["flash_attn", "flash_attn_interface"])
def test_flash_attn_is_right_or_says_why_not(name, module, stand_in):
    def paged_by_other_name(*args, page_table=None, **options):
        return flash_attn.flash_attn_with_kvcache(*args, block_table=page_table, **options), None

    is_second = module == "flash_attn"
    stand_in(
        module,
        flash_attn_func=flash_attn.flash_attn_func,
        flash_attn_varlen_func=flash_attn.flash_attn_varlen_func,
        flash_attn_with_kvcache=flash_attn.flash_attn_with_kvcache if is_second else paged_by_other_name,
    )
    assert peers.installed()["flash-attn"] is None
    (outcome,) = results("flash-attn", CASES[name], torch.float16).values()
    lacks = {"chunked": "chunks", "sinks": "sinks", "bool mask": "masks", "added mask": "masks"}
    if name in lacks or (name == "alibi" and not is_second):
        assert outcome == f"it has no {lacks.get(name, 'ALiBi')}"
    else:
        assert outcome < 6e-3
    assert "float32" in next(iter(results("flash-attn", {}).values()))


@pytest.mark.parametrize("name", ["flash-attn", "flashinfer", "xformers"])
def test_a_library_that_does_not_load_is_told(name, stand_in, monkeypatch):
    def broken(module):
        raise OSError("undefined symbol\nmore")

    stand_in("flash_attn")
    monkeypatch.setattr(peers.PEERS[name].importlib, "import_module", broken)
    assert results(name, {}, torch.float16) == {name: "OSError: undefined symbol"}


ALWAYS = {  # what each library of a CPU can say
    "mlx": {"plain", "causal", "decode", "chunk of queries", "window", "lengths", "batch", "bool mask"},
    "onnxruntime": {"causal", "decode", "chunk of queries", "window", "softcap", "batch"},
    "cpu-attn": {"plain", "causal", "decode", "chunk of queries", "window", "softcap", "batch"},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("peer", ALWAYS)
def test_peers_of_a_cpu_are_right_or_say_why_not(peer, name):
    if why := peers.installed()[peer]:
        pytest.skip(why)
    outcomes = results(peer, {"head_dim": 32} | CASES[name])
    for outcome in outcomes.values():
        assert outcome < 6e-3 if isinstance(outcome, float) else outcome.startswith(("it has no ", "its "))
    if name in ALWAYS[peer]:
        assert float in map(type, outcomes.values()), outcomes


class Wrapper:
    """FlashInfer's way: plan, then run."""

    def __init__(self, room, layout, **options):
        assert layout == "NHD"

    def rules(self, sm_scale, window_left, logits_soft_cap):
        window = None if window_left < 0 else (window_left, None)
        return {"scale": sm_scale, "window": window, "softcap": logits_soft_cap}


class Decode(Wrapper):
    def plan(self, ends, indices, last, heads, kv_heads, width, size, q_data_type, kv_data_type, **rules):
        counts = ends.diff()
        self.lengths = ((counts - 1) * size + last).int()
        pages = indices.split(counts.tolist())
        self.table = torch.nn.utils.rnn.pad_sequence(list(pages), batch_first=True).int()
        self.options = self.rules(**rules)

    def run(self, q, cache):
        return paged_attention(q[:, :, None], *cache, self.table, self.lengths, **self.options)[:, :, 0]


class Ragged(Wrapper):
    def plan(self, cu_q, cu_k, heads, kv_heads, width, causal, q_data_type, **rules):
        self.cu, self.options = cu_q, self.rules(**rules) | {"causal": causal}

    def run(self, q, k, v):
        return varlen_attention(q, k, v, self.cu, self.cu, **self.options)


@pytest.mark.parametrize("name", CASES)
def test_flashinfer_is_right_or_says_why_not(name, stand_in):
    rules = Wrapper(None, "NHD").rules

    def prefill(q, k, v, causal, **options):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return attention(q, k, v, causal=causal, **rules(**options))[0].transpose(0, 1)

    def decode(q, k, v, **options):
        return prefill(q[None], k, v, True, **options)[0]

    stand_in(
        "flashinfer",
        single_prefill_with_kv_cache=prefill,
        single_decode_with_kv_cache=decode,
        BatchDecodeWithPagedKVCacheWrapper=Decode,
        BatchPrefillWithRaggedKVCacheWrapper=Ragged,
    )
    (outcome,) = results("flashinfer", CASES[name], torch.float16).values()
    lacks = {
        "chunked": "chunks", "sinks": "sinks", "bool mask": "masks", "added mask": "masks", "alibi": "ALiBi",
        "two-sided window": "windows to the right",
    }  # fmt: skip
    if name in lacks:
        assert outcome == f"it has no {lacks[name]}"
    elif name in ("lengths", "batch"):
        assert outcome == "its batches are packed or paged"
    else:
        assert outcome < 6e-3


class Block:
    """xFormers' block-diagonal masks."""

    def __init__(self, lengths, causal):
        self.lengths, self.causal = lengths, causal

    @classmethod
    def kind(cls, causal):
        return SimpleNamespace(from_seqlens=lambda lengths: cls(lengths, causal))


@pytest.mark.parametrize("name", CASES)
def test_xformers_is_right_or_says_why_not(name, stand_in):
    def forward(q, k, v, attn_bias, scale):
        if q.ndim == 5:
            q, k, v = (x.flatten(2, 3) for x in (q, k, v))
        grouped = q.shape[2] != 4
        if isinstance(attn_bias, Block):
            parts = zip(*(x.split(attn_bias.lengths, 1) for x in (q, k, v)), strict=True)
            out = torch.cat([attention(*p, causal=attn_bias.causal, scale=scale, layout="blhd") for p in parts], 1)
        else:
            rules = attn_bias or {}
            assert not grouped
            out = attention(q, k, v, scale=scale, layout="blhd", **rules)
        return out.unflatten(2, (2, 2))

    bias = SimpleNamespace(
        BlockDiagonalMask=Block.kind(False),
        BlockDiagonalCausalMask=Block.kind(True),
        LowerTriangularFromBottomRightMask=lambda: {"causal": True},
        LocalAttentionFromBottomRightMask=lambda window_left, window_right: {"window": (window_left, window_right)},
    )
    stand_in("xformers")
    stand_in("xformers.ops", memory_efficient_attention_forward=forward, fmha=SimpleNamespace(attn_bias=bias))
    (outcome,) = results("xformers", CASES[name]).values()
    lacks = {
        "softcap": "softcap", "chunked": "chunks", "sinks": "sinks", "alibi": "ALiBi", "pages": "page tables",
        "bool mask": "masks of this form", "added mask": "masks of this form", "lengths": "masks of this form",
    }  # fmt: skip
    if name in lacks:
        assert outcome == f"it has no {lacks[name]}"
    else:
        assert outcome < 1e-5


def test_flex_attention_is_asked_for_the_same_cells_and_scores(monkeypatch):
    """Without compiling, which takes tens of seconds: its functions are called for every cell."""
    import torch.nn.attention.flex_attention as flex

    def whole(q, k, v, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        places = [torch.arange(n).view(*(-1 if i == d else 1 for i in range(4))) for d, n in enumerate(scores.shape)]
        scores = scores if score_mod is None else score_mod(scores, *places)
        if block_mask is not None:
            scores = scores.masked_fill(~block_mask(*places), -torch.inf)
        out = scores.softmax(-1) @ v
        return (out, scores.logsumexp(-1)) if return_lse else out

    monkeypatch.setattr(flex, "flex_attention", whole)
    monkeypatch.setattr(flex, "create_block_mask", lambda mod, *sizes, device: mod)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    for name, options in CASES.items():
        (outcome,) = results("flex", options).values()
        if name in ("packed", "pages"):
            assert "it has no" in outcome
        else:
            assert outcome < 1e-5, name


def test_every_case_is_one_that_sdpa_could_get_wrong():
    """The cases differ from each other in what they compute."""
    outputs = {}
    for name, options in CASES.items():
        if set(options) <= {"causal", "window", "softcap", "sinks", "mask", "chunk"}:
            x = case_and_inputs(options)[1]
            outputs[name] = x.attend()
    plain = scaled_dot_product_attention(*(getattr(case_and_inputs({})[1], n) for n in "qkv"), enable_gqa=True)
    assert torch.allclose(outputs.pop("plain"), plain, atol=1e-5)
    assert all(not torch.allclose(out, plain, atol=1e-3) for out in outputs.values())
