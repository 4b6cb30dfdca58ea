"""The backends for vLLM and SGLang, with their batches built by hand: the servers themselves are not installed here.

Stand-ins for the few names that the backends import are made below; what they hold is what the servers document.
"""

import abc
import copy
import dataclasses
import enum
import importlib
import itertools
import pickle
import sys
import types
from importlib.metadata import entry_points

import pytest
import torch
from torch import distributed as dist

import ranks
from naive import Row, assert_close
from tilewise import InvalidArgument, alibi_slopes, counters
from tilewise.compat import vllm_cpu

HEADS, KV_HEADS, WIDTH = 6, 2, 16
LENGTHS = [9, 1, 20, 13]  # keys of each request, its queries included
QUERIES = [9, 1, 1, 5]  # a prompt, two steps of decoding, the rest of a prompt


def peaked(*shape):
    return torch.randn(shape) * 1.7


def modules(monkeypatch, **names):
    """Puts modules into the place of packages that are not installed."""
    for name, members in names.items():
        dotted = name.replace("__", ".")
        for i in range(1, dotted.count(".") + 1):
            parent = ".".join(dotted.split(".")[:i])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        module = types.ModuleType(dotted)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, dotted, module)


def load(monkeypatch, name):
    """A module of ours that imports such packages, new, and forgotten afterwards."""
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, name, module)  # so that the end of the test takes it away
    monkeypatch.delitem(sys.modules, name)
    sys.modules[name] = module
    return module


def check(got, q, rows, **options):
    """Packed queries against each request alone."""
    q = q[: sum(QUERIES)]  # without rows of padding
    parts = zip(got.view_as(q).split(QUERIES), q.split(QUERIES), rows, strict=True)
    for ours, part, (k, v) in parts:
        row = Row()
        row.append(k.transpose(0, 1), v.transpose(0, 1))
        exact, _ = row.attend(part.transpose(0, 1), **options)
        assert_close(ours.transpose(0, 1), exact)


# vLLM


class AttentionType(str, enum.Enum):
    DECODER, ENCODER, ENCODER_ONLY, ENCODER_DECODER = "decoder", "encoder", "encoder_only", "encoder_decoder"


class Backend(abc.ABC):
    @staticmethod
    @abc.abstractmethod
    def get_name(): ...

    @staticmethod
    @abc.abstractmethod
    def get_impl_cls(): ...

    @staticmethod
    @abc.abstractmethod
    def get_builder_cls(): ...


class Impl(abc.ABC):
    __class_getitem__ = classmethod(lambda cls, _: cls)

    @abc.abstractmethod
    def __init__(self): ...

    @abc.abstractmethod
    def forward(self): ...


class Builder(abc.ABC):
    __class_getitem__ = classmethod(lambda cls, _: cls)

    @abc.abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.device = device

    @abc.abstractmethod
    def build(self): ...


@dataclasses.dataclass
class Common:
    """The fields of vLLM's batch that concern attention."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True


class Registry(enum.Enum):
    """Names of backends; a plugin adds its own in each process."""

    CPU_ATTN = "theirs"


def register_backend(name, path):
    member = object.__new__(Registry)
    member._name_, member._value_ = name, path
    Registry._member_map_[name] = Registry._value2member_map_[path] = member


def forget_backend():
    for names in (Registry._member_map_, Registry._value2member_map_):
        for name in ("TILEWISE", "tilewise.compat.vllm.TilewiseBackend"):
            names.pop(name, None)


class CpuPlatform:
    """As vLLM 0.32 has it: whatever is asked for, it is its own."""

    def is_cpu(self):
        return True

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
        return f"theirs for {num_heads}"


@pytest.fixture
def vllm(monkeypatch):
    yield vllm_backend(monkeypatch)
    sys.modules.pop("tilewise.compat.vllm", None)
    forget_backend()


def vllm_backend(monkeypatch, **more):
    """Our module for vLLM, among stand-ins."""
    backend = {
        "AttentionBackend": Backend, "AttentionImpl": Impl, "AttentionMetadata": object, "AttentionType": AttentionType,
        "AttentionMetadataBuilder": Builder, "CommonAttentionMetadata": Common,
    }  # fmt: skip
    modules(
        monkeypatch,
        vllm__v1__attention__backend=backend,
        vllm__v1__attention__backends__registry={
            "register_backend": register_backend,
            "AttentionBackendEnum": Registry,
        },
        vllm__platforms={"current_platform": CpuPlatform()},
        **more,
    )
    return load(monkeypatch, "tilewise.compat.vllm")


def vllm_batch(size, padding=3):
    """A batch as vLLM makes it, with rows of padding at its end; and the cache, head-major in memory."""
    blocks = -(-max(LENGTHS) // size)
    table = (1 + torch.randperm(len(LENGTHS) * blocks)).view(len(LENGTHS), blocks).int()  # block 0 is no one's
    cache = peaked(1 + len(LENGTHS) * blocks, KV_HEADS, size, 2 * WIDTH)
    positions = [range(n - m, n) for n, m in zip(LENGTHS, QUERIES, strict=True)]
    slots = [int(table[b, p // size]) * size + p % size for b, row in enumerate(positions) for p in row]
    offsets = torch.tensor([0, *torch.tensor(QUERIES).cumsum(0)], dtype=torch.int32)
    batch = Common(
        offsets, torch.tensor(LENGTHS, dtype=torch.int32), sum(QUERIES), max(QUERIES), max(LENGTHS), table,
        torch.tensor(slots + [-1] * padding),
    )  # fmt: skip
    return batch, cache, sum(QUERIES) + padding


VLLM = {
    "plain": ({}, {}),
    "window": ({"sliding_window": 4}, {"window": 4}),
    "softcap": ({"logits_soft_cap": 5.0}, {"softcap": 5.0}),
    "sinks": ({"sinks": torch.linspace(-1, 2, HEADS)}, {"sinks": torch.linspace(-1, 2, HEADS)}),
    "alibi": ({"alibi_slopes": alibi_slopes(HEADS).tolist()}, {"alibi_slopes": alibi_slopes(HEADS)}),
}


@pytest.mark.parametrize("size", [1, 5, 16])
@pytest.mark.parametrize("name", VLLM)
@pytest.mark.parametrize("causal", [True, False])
def test_vllm(vllm, name, size, causal):
    theirs, ours = VLLM[name]
    batch, cache, tokens = vllm_batch(size)
    batch.causal = causal
    backend = vllm.TilewiseBackend
    impl = backend.get_impl_cls()(HEADS, WIDTH, 0.3, KV_HEADS, **theirs)
    metadata = backend.get_builder_cls()(None, ["layer"], None, torch.device("cpu")).build(0, batch)
    q, k, v = peaked(tokens, HEADS, WIDTH), peaked(tokens, KV_HEADS, WIDTH), peaked(tokens, KV_HEADS, WIDTH)
    held = torch.cat(impl.pages(cache), -1)  # [blocks, block size, Hkv, 2 D], as it was
    output = torch.full((tokens, HEADS * WIDTH), torch.nan)
    assert impl.forward(None, q, k, v, cache, metadata, output) is output
    now = torch.cat(impl.pages(cache), -1)
    assert int((now != held).any(-1).any(-1).sum()) == sum(QUERIES)  # nothing but the new slots
    assert output[sum(QUERIES) :].isnan().all()
    pages = now[batch.block_table_tensor.long()].flatten(1, 2)  # [B, slots, Hkv, 2 D]
    rows = [(pages[b, :n, :, :WIDTH], pages[b, :n, :, WIDTH:]) for b, n in enumerate(LENGTHS)]
    start = 0
    for b, m in enumerate(QUERIES):  # what was appended is at the end of its row
        assert rows[b][0][-m:].equal(k[start : start + m])
        assert rows[b][1][-m:].equal(v[start : start + m])
        start += m
    check(output[: sum(QUERIES)], q, rows, scale=0.3, causal=causal, **ours)


def vllm_layers(vllm, metadata, layers):
    """What each of `layers` (impl, q, k, v, cache) gives and stores, one after the other; `metadata()` is a batch's."""
    results = []
    for impl, q, k, v, cache in layers:
        cache, output = cache.clone(), torch.full(q.shape, torch.nan)
        impl.forward(None, q, k, v, cache, metadata(), output)
        results += [output, torch.cat(impl.pages(cache), -1)]
    return results


@pytest.mark.parametrize("apart", [False, True])
def test_vllm_layers_of_a_batch(vllm, apart):
    """Layers that are alike leave out what the first of them has done, and give what they would give by themselves."""
    batch, cache, tokens = vllm_batch(4, padding=0)
    given = [{}, {}, {"sliding_window": 4}, {}, {"sinks": torch.ones(HEADS)}, {"sinks": -torch.ones(HEADS)}, {}]
    layers = []
    for number, options in enumerate(given):
        qkv = peaked(tokens, (HEADS + 2 * KV_HEADS) * WIDTH + (number == 6)).narrow(
            1, 0, (HEADS + 2 * KV_HEADS) * WIDTH
        )
        q, k, v = qkv.view(tokens, -1, WIDTH).split([HEADS, KV_HEADS, KV_HEADS], 1)  # one is of other strides
        if apart:
            k = k.transpose(1, 2).contiguous().transpose(1, 2)
        layers.append((vllm.TilewiseImpl(HEADS, WIDTH, 0.3, KV_HEADS, **options), q, k, v, torch.randn_like(cache)))
    builder = vllm.TilewiseBuilder(None, [], None, torch.device("cpu"))
    want = vllm_layers(vllm, lambda: builder.build(0, batch), layers)
    before, metadata = counters().get("cpu", 0), builder.build(0, batch)
    got = vllm_layers(vllm, lambda: metadata, layers)
    assert all(a.equal(b) for a, b in zip(got, want, strict=True))
    assert not torch.stack(got[::2]).isnan().any()
    assert counters().get("cpu", 0) - before == len(layers)
    assert len(metadata.steps) == (0 if apart else 3)  # plain ones, the window's, and those of other strides
    batch.block_table_tensor[2, 1] = 99  # what tables hold is looked at for each layer
    with pytest.raises(InvalidArgument, match="block_table"):
        vllm_layers(vllm, lambda: metadata, layers[1:2])


def test_vllm_places_are_on_the_cpu():
    """Whatever torch's default device is: a kernel of the CPU reads them by address."""
    with torch.device("meta"):
        places = vllm_cpu.NewTokens(torch.tensor([3, -1, 0], device="cpu")).places(4)
    assert {x.device.type for x in (places.starts, places.cu, places.table)} == {"cpu"}
    assert places.starts.tolist() == [3, 0]


def test_vllm_shared_caches(vllm):
    """A layer that uses another one's cache stores nothing, with and without keys of its own."""
    batch, cache, tokens = vllm_batch(4, padding=0)
    metadata = vllm.TilewiseBuilder(None, [], None, torch.device("cpu")).build(0, batch)
    first = vllm.TilewiseImpl(HEADS, WIDTH, 0.3, KV_HEADS)
    shares = vllm.TilewiseImpl(HEADS, WIDTH, 0.3, KV_HEADS, kv_sharing_target_layer_name="first")
    q, k, v = peaked(tokens, HEADS, WIDTH), peaked(tokens, KV_HEADS, WIDTH), peaked(tokens, KV_HEADS, WIDTH)
    outputs = [torch.empty_like(q) for _ in range(3)]
    first.forward(None, q, k, v, cache, metadata, outputs[0])
    held = cache.clone()
    shares.forward(None, q, k + 1, v + 1, cache, metadata, outputs[1])
    first.forward(None, q, None, None, cache, metadata, outputs[2])
    assert cache.equal(held)
    assert outputs[1].equal(outputs[0])
    assert outputs[2].equal(outputs[0])


@pytest.mark.parametrize("memory", ["heads first", "tokens first", "apart"])
def test_vllm_blocks_hold_what_they_are_given(vllm, memory):
    """However vLLM lays its blocks, no row of one overlaps another, and none lies outside."""
    shape = {"heads first": (9, KV_HEADS, 4, 2 * WIDTH), "tokens first": (9, 4, KV_HEADS, 2 * WIDTH)}
    cache = torch.full(shape.get(memory, (9, KV_HEADS, 4, 2 * WIDTH + 3)), torch.nan)
    cache = cache.transpose(1, 2) if memory == "tokens first" else cache[..., : 2 * WIDTH]
    impl = vllm.TilewiseImpl(HEADS, WIDTH, 0.3, KV_HEADS)
    slots = torch.randperm(36)
    rows = peaked(36, 2 * KV_HEADS * WIDTH).view(36, 2, KV_HEADS, WIDTH)
    for part in (slice(0, 7), slice(7, 36)):
        impl.do_kv_cache_update(None, *rows[part].unbind(1), cache, slots[part])
    assert not cache.isnan().any()
    k, v = impl.pages(cache)
    assert k.flatten(0, 1)[slots].equal(rows[:, 0])
    assert v.flatten(0, 1)[slots].equal(rows[:, 1])
    assert cache.sum().isclose(rows.sum())
    other = torch.zeros_like(cache)  # vLLM may give a layer another cache
    impl.do_kv_cache_update(None, *rows[:1].unbind(1), other, slots[:1])
    assert int(other.count_nonzero()) == 2 * KV_HEADS * WIDTH
    impl.do_kv_cache_update(None, *rows[:0].unbind(1), other, slots[:0])


@pytest.mark.parametrize("window", [None, 3])
def test_vllm_encoders(vllm, window):
    impl = vllm.TilewiseImpl(HEADS, WIDTH, 0.3, KV_HEADS, sliding_window=window, attn_type=AttentionType.ENCODER_ONLY)
    batch, _, tokens = vllm_batch(4)
    q, k, v = peaked(tokens, HEADS, WIDTH), peaked(tokens, KV_HEADS, WIDTH), peaked(tokens, KV_HEADS, WIDTH)
    metadata = vllm.TilewiseBuilder(None, [], None, torch.device("cpu")).build(0, batch)
    impl.do_kv_cache_update(None, k, v, torch.empty(0), batch.slot_mapping)
    output = impl.forward(None, q, k, v, torch.empty(0), metadata, torch.empty(tokens, HEADS * WIDTH))
    ends = torch.tensor(QUERIES).cumsum(0).tolist()
    rows = [(k[end - m : end], v[end - m : end]) for end, m in zip(ends, QUERIES, strict=True)]
    sides = None if window is None else (window - 1, window - 1)
    check(output[: sum(QUERIES)], q, rows, scale=0.3, window=sides)


def test_vllm_is_told(vllm):
    vllm.register()
    assert Registry["TILEWISE"].value == "tilewise.compat.vllm.TilewiseBackend"
    b = vllm.TilewiseBackend
    assert b.get_name() == "TILEWISE"
    assert [n for n in (0, 1, 80, 576, 577) if b.supports_head_size(n)] == [1, 80, 576]
    assert b.supports_attn_type("decoder")
    assert not b.supports_attn_type("encoder_decoder")
    platform = sys.modules["vllm.platforms"].current_platform
    ours, theirs = (types.SimpleNamespace(name=name) for name in ("TILEWISE", "CPU_ATTN"))
    plain, mla = (types.SimpleNamespace(use_mla=x, use_sparse=False) for x in (False, True))
    vllm.register()  # once more: it is asked for in each process, and may be in one twice
    chosen = platform.get_attn_backend_cls(ours, attn_selector_config=plain, num_heads=4)
    assert chosen == "tilewise.compat.vllm.TilewiseBackend"
    for selected, config in ((theirs, plain), (None, plain), (ours, mla)):
        assert platform.get_attn_backend_cls(selected, config, num_heads=4) == "theirs for 4"
    (entry,) = entry_points(group="vllm.general_plugins", name="tilewise")
    assert entry.value == "tilewise.compat.vllm:register"


def test_vllm_chosen_in_another_process(vllm):
    """vLLM pickles what it was asked for, for a process that knows no plugin yet."""
    vllm.register()
    sent = pickle.dumps({"backend": Registry["TILEWISE"]})
    assert copy.deepcopy(Registry["TILEWISE"]) is Registry["TILEWISE"]
    forget_backend()
    assert pickle.loads(sent)["backend"] is Registry["TILEWISE"]
    assert Registry["TILEWISE"].name == "TILEWISE"


def test_vllm_refusals(vllm):
    with pytest.raises(InvalidArgument, match="kv_cache_dtype"):
        vllm.TilewiseImpl(HEADS, WIDTH, 1.0, kv_cache_dtype="fp8")
    with pytest.raises(InvalidArgument, match="attn_type"):
        vllm.TilewiseImpl(HEADS, WIDTH, 1.0, attn_type="encoder_decoder")
    impl = vllm.TilewiseImpl(HEADS, WIDTH, 1.0, KV_HEADS)
    q = peaked(3, HEADS, WIDTH)
    assert impl.forward(None, q, q, q, None, None, torch.ones(3, 4)).eq(0).all()  # a run that measures memory
    with pytest.raises(InvalidArgument, match="output_scale"):
        impl.forward(None, q, q, q, None, None, q, output_scale=torch.ones(1))
    batch, _, _ = vllm_batch(4)
    batch.causal = torch.tensor([True])
    with pytest.raises(InvalidArgument, match="causal"):
        vllm.TilewiseBuilder(None, [], None, torch.device("cpu")).build(0, batch)


def _decode_context_parallel(name, size, causal):
    """A batch over requests whose tokens lie over two ranks, each with its own heads; and what vLLM is told."""
    torch.manual_seed(0)
    rank, count = dist.get_rank(), 2
    group = types.SimpleNamespace(device_group=dist.group.WORLD, rank_in_group=rank, world_size=count)
    parallel = types.SimpleNamespace(decode_context_parallel_size=count, cp_kv_cache_interleave_size=1)
    config, spec = types.SimpleNamespace(parallel_config=parallel), types.SimpleNamespace(dcp_sharded=True)
    q, mine = peaked(sum(QUERIES), count * HEADS, WIDTH), slice(rank * HEADS, (rank + 1) * HEADS)
    rows = [(peaked(n, 2, WIDTH), peaked(n, 2, WIDTH)) for n in LENGTHS]
    theirs, ours = (
        {key: x[mine] if key in ("sinks", "alibi_slopes") else x for key, x in options.items()}
        for options in WHOLE_VLLM[name]
    )
    with pytest.MonkeyPatch.context() as patch:
        vllm = vllm_backend(patch, vllm__distributed__parallel_state={"get_dcp_group": lambda: group})
        batch, cache, _ = vllm_batch(size, padding=0)
        batch.causal = causal
        impl = vllm.TilewiseImpl(HEADS, WIDTH, 0.3, KV_HEADS, **theirs)
        builder = vllm.TilewiseBuilder(spec, [], config, torch.device("cpu"))
        for b, (k, v) in enumerate(rows):  # token i is the (i // count)-th of rank i mod count
            at = [i // count if i % count == rank else -1 for i in range(len(k))]
            slots = [-1 if i < 0 else int(batch.block_table_tensor[b, i // size]) * size + i % size for i in at]
            impl.do_kv_cache_update(None, k, v, cache, torch.tensor(slots))
        output = torch.full((sum(QUERIES), HEADS * WIDTH), torch.nan)
        for _ in range(2):  # slopes are gathered once
            impl.forward(None, q[:, mine], None, None, cache, builder.build(0, batch), output)
        parallel.cp_kv_cache_interleave_size = 4
        with pytest.raises(InvalidArgument, match="cp_kv_cache_interleave_size: got 4, expected 1"):
            vllm.TilewiseBuilder(spec, [], config, torch.device("cpu"))
        flags = vllm.TilewiseBackend.supports_dcp(), impl.can_return_lse_for_decode, impl.lse_base_on_e
    heads = [tuple(x[:, rank : rank + 1] for x in row) for row in rows]  # one KV head for each rank's heads
    check(output, q[:, mine], heads, scale=0.3, causal=causal, **ours)
    return flags


WHOLE_VLLM = VLLM | {
    "sinks": ({"sinks": torch.linspace(-1, 2, 2 * HEADS)}, {"sinks": torch.linspace(-1, 2, 2 * HEADS)}),
    "alibi": ({"alibi_slopes": alibi_slopes(2 * HEADS).tolist()}, {"alibi_slopes": alibi_slopes(2 * HEADS)}),
}


def test_vllm_decode_context_parallel():
    with ranks.Pool(2) as two:
        for name, size, causal in itertools.product(VLLM, (1, 5), (True, False)):
            assert two(_decode_context_parallel, name, size, causal) == [(True, True, True)] * 2


# SGLang


class Mode(enum.Enum):
    EXTEND, DECODE, IDLE = range(3)

    def is_decode(self):
        return self is Mode.DECODE

    def is_idle(self):
        return self is Mode.IDLE


@dataclasses.dataclass
class KVWriteLoc:
    loc: torch.Tensor
    swa_loc: torch.Tensor | None


class Pool:
    """SGLang's slots of one layer."""

    def __init__(self, slots):
        self.k, self.v = peaked(slots, KV_HEADS, WIDTH), peaked(slots, KV_HEADS, WIDTH)

    def get_key_buffer(self, layer_id):
        return self.k

    def get_value_buffer(self, layer_id):
        return self.v

    def set_kv_buffer(self, layer, where, k, v):
        assert where.swa_loc is None
        self.k[where.loc], self.v[where.loc] = (x.view(-1, KV_HEADS, WIDTH) for x in (k, v))


class Runner(types.SimpleNamespace):
    """A model runner with a table of slots, whose pages lie anywhere."""

    def __init__(self, page_size):
        pages = -(-max(LENGTHS) // page_size)
        table = (1 + torch.randperm(len(LENGTHS) * pages)).view(len(LENGTHS), pages, 1)
        slots = torch.zeros(len(LENGTHS) + 2, pages * page_size + 7, dtype=torch.int32)
        self.requests = torch.tensor([4, 0, 5, 2])  # rows of the table in use
        slots[self.requests, : pages * page_size] = (table * page_size + torch.arange(page_size)).flatten(1).int()
        super().__init__(
            req_to_token_pool=types.SimpleNamespace(req_to_token=slots),
            token_to_kv_pool=Pool((len(LENGTHS) * pages + 1) * page_size),
            page_size=page_size,
        )


def sglang_batch(runner, mode):
    lengths = torch.tensor(LENGTHS)
    counts = torch.tensor(QUERIES if mode is Mode.EXTEND else [1] * 4)
    slots = runner.req_to_token_pool.req_to_token[runner.requests]
    new = [slots[b, n - m : n] for b, (n, m) in enumerate(zip(LENGTHS, counts.tolist(), strict=True))]
    return types.SimpleNamespace(
        forward_mode=mode, spec_info=None, seq_lens=lengths, seq_lens_cpu=lengths, req_pool_indices=runner.requests,
        extend_seq_lens=counts, extend_seq_lens_cpu=counts.tolist(), out_cache_loc=torch.cat(new).long(),
    )  # fmt: skip


def layer(**options):
    given = {
        "tp_q_head_num": HEADS, "qk_head_dim": WIDTH, "v_head_dim": WIDTH, "scaling": 0.3, "logit_cap": 0.0,
        "logit_capping_method": "tanh", "sliding_window_size": -1, "layer_id": 0, "is_cross_attention": False,
        "attn_type": "decoder",
    }  # fmt: skip
    return types.SimpleNamespace(**{**given, **options})


@pytest.fixture
def sglang(monkeypatch):
    known, choices = {}, []
    modules(
        monkeypatch,
        sglang__srt__layers__attention__attention_registry={
            "register_attention_backend": lambda name: lambda make: known.__setitem__(name, make), "known": known,
        },
        sglang__srt__layers__attention__base_attn_backend={"AttentionBackend": abc.ABC},
        sglang__srt__layers__radix_attention={"AttentionType": types.SimpleNamespace(ENCODER_ONLY="encoder_only")},
        sglang__srt__mem_cache__memory_pool={"KVWriteLoc": KVWriteLoc},
        sglang__srt__server_args={"add_attention_backend_choices": choices.extend, "choices": choices},
    )  # fmt: skip
    module = load(monkeypatch, "tilewise.compat.sglang")
    yield module
    sys.modules.pop("tilewise.compat.sglang", None)


SGLANG = {
    "plain": ({}, {}, {}),
    "window": ({"sliding_window_size": 3}, {}, {"window": 4}),
    "softcap": ({"logit_cap": 5.0}, {}, {"softcap": 5.0}),
    "sinks": ({}, {"sinks": torch.linspace(-1, 2, HEADS)}, {"sinks": torch.linspace(-1, 2, HEADS)}),
    "both ways": ({"attn_type": "encoder_only"}, {}, {"causal": False}),
}


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("name", SGLANG)
@pytest.mark.parametrize("mode", [Mode.EXTEND, Mode.DECODE])
def test_sglang(sglang, name, page_size, mode, monkeypatch):
    of_layer, of_call, ours = SGLANG[name]
    runner = Runner(page_size)
    backend = sglang.TilewiseBackend(runner)
    batch = sglang_batch(runner, mode)
    if mode is Mode.DECODE:
        monkeypatch.setattr(sys.modules[__name__], "QUERIES", [1] * 4)
    tokens = sum(QUERIES)
    q, k, v = peaked(tokens, HEADS * WIDTH), peaked(tokens, KV_HEADS * WIDTH), peaked(tokens, KV_HEADS * WIDTH)
    backend.init_forward_metadata(batch)
    forward = backend.forward_extend if mode is Mode.EXTEND else backend.forward_decode
    out = forward(q, k, v, layer(**of_layer), batch, **of_call)
    assert out.shape == (tokens, HEADS * WIDTH)
    slots = runner.req_to_token_pool.req_to_token[runner.requests].long()
    pool = runner.token_to_kv_pool
    rows = [(pool.k[slots[b, :n]], pool.v[slots[b, :n]]) for b, n in enumerate(LENGTHS)]
    assert torch.cat([row[0][-m:] for row, m in zip(rows, QUERIES, strict=True)]).flatten(1).equal(k)
    check(out, q.view(tokens, HEADS, WIDTH), rows, **{"scale": 0.3, "causal": True, **ours})
    again = forward(q, None, None, layer(**of_layer), batch, save_kv_cache=False, **of_call)
    assert again.equal(out)


def test_sglang_is_told(sglang):
    sglang.register()
    registry = sys.modules["sglang.srt.layers.attention.attention_registry"]
    assert registry.known == {"tilewise": sglang.TilewiseBackend}
    assert sys.modules["sglang.srt.server_args"].choices == ["tilewise"]
    (entry,) = entry_points(group="sglang.srt.plugins", name="tilewise")
    assert entry.value == "tilewise.compat.sglang:register"


def test_sglang_refusals(sglang):
    runner = Runner(4)
    backend = sglang.TilewiseBackend(runner)
    batch = sglang_batch(runner, Mode.DECODE)
    batch.spec_info = object()
    with pytest.raises(InvalidArgument, match="speculative"):
        backend.init_forward_metadata(batch)
    batch.forward_mode = Mode.IDLE
    backend.init_forward_metadata(batch)
    q = peaked(1, HEADS * WIDTH)
    with pytest.raises(InvalidArgument, match="cross"):
        backend.forward_decode(q, None, None, layer(is_cross_attention=True), batch)
    with pytest.raises(InvalidArgument, match="tanh"):
        backend.forward_decode(q, None, None, layer(logit_cap=1.0, logit_capping_method="other"), batch)
    runner.token_to_kv_pool.translate_loc_from_full_to_swa = None
    with pytest.raises(InvalidArgument, match="disable-hybrid-swa-memory"):
        sglang.TilewiseBackend(runner)
