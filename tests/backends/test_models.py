"""The known models: every layer of each computes, on every backend that runs here, what the oracle says."""

import pytest
import torch

from tilewise import InvalidArgument, TileMap
from tilewise.tools import models, patterns
from tilewise.tools.bench.oracle import MOST_ERROR, oracle_errors
from tilewise.tools.models import MODELS
from tilewise.tools.workloads import Workload, make_inputs, of_layer

CPU = torch.device("cpu")
LAYERS = [(model, layer) for model in MODELS.values() for layer in model.layers]
IDS = [f"{model.name}-{layer.name}" for model, layer in LAYERS]


def small(layer, rows, keys, **sizes):
    """The layer with window and chunk as short as the sequence, and few of its heads."""
    group = layer.heads // layer.kv_heads
    kv_heads = min(layer.kv_heads, 2)
    case = of_layer(layer, "", rows * 64, keys * 64, **sizes).shortened(64)
    return Workload(**{**{f: getattr(case, f) for f in Workload.__dataclass_fields__}, "kv_heads": kv_heads}
                    | {"heads": min(kv_heads * group, 16 if kv_heads == 1 else kv_heads * group)})  # fmt: skip


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize(("model", "layer"), LAYERS, ids=IDS)
def test_layers_are_right_in_prefill_and_decode(model, layer, backend):
    for rows in (150, 1):
        x = make_inputs(small(layer, rows, 150), CPU, torch.float32)
        assert oracle_errors(x, [x.attend(backend)])[0] <= MOST_ERROR[torch.float32]


@pytest.mark.parametrize(("model", "layer"), LAYERS, ids=IDS)
def test_layers_ask_for_what_they_say(model, layer):
    case = small(layer, 150, 150)
    asked = " ".join(make_inputs(case, CPU, torch.float32).plan().problem.options())
    for word, is_asked in {
        "causal": layer.causal, "window": layer.window, "chunk": layer.chunk, "softcap": layer.softcap,
        "sinks": layer.sinks, "alibi": layer.alibi, "gqa": layer.heads != layer.kv_heads,
    }.items():  # fmt: skip
        assert (word in asked.lower()) == bool(is_asked), (word, asked)


def test_heads_divide_and_names_are_keys():
    for name, model in MODELS.items():
        assert name == model.name
        assert model.about
        assert len({layer.name for layer in model.layers}) == len(model.layers)
        assert all(layer.heads % layer.kv_heads == 0 for layer in model.layers)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(InvalidArgument, match="llama-3-8b"):
        models.find("llama-9")
    with pytest.raises(InvalidArgument, match="local, global"):
        models.find("gemma-4").layer("full")


@pytest.mark.parametrize("sizes", [{"packed": True, "lengths": (70, 1, 33)}, {"page_size": 16, "lengths": (70, 1, 33)}])
def test_packed_and_paged_inputs_are_right_and_a_wrong_one_is_seen(sizes):
    case = small(MODELS["gpt-oss"].layer("local"), 1, 70, **sizes)
    x = make_inputs(case, CPU, torch.float32)
    out = x.attend()
    assert oracle_errors(x, [out])[0] <= MOST_ERROR[torch.float32]
    last = out.clone()
    last[-1] += 1e-3  # of the last sequence alone
    assert oracle_errors(x, [last])[0] > MOST_ERROR[torch.float32]


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("name", patterns.PATTERNS)
def test_patterns_hide_and_show_and_every_row_sees_itself(name, added):
    rows = 40 if name == "tree" else 700
    seen = patterns.PATTERNS[name](rows, 900)
    assert seen.shape == (rows, 900)
    assert seen.dtype == torch.bool
    assert seen.any(1).all()
    assert not seen.all()
    assert seen[torch.arange(rows), torch.arange(900 - rows, 900)].all()
    case = Workload("", "", 4, 2, 16, rows, 900, mask=name, added=added)
    x = make_inputs(case, CPU, torch.float32)
    assert oracle_errors(x, [x.attend()])[0] <= MOST_ERROR[torch.float32]


def test_block_sparse_cells_grow_with_the_length_not_its_square():
    counts = [int(patterns.blocks(n, n).sum()) for n in (2048, 4096, 8192)]
    assert counts[1] / counts[0] == pytest.approx(2, rel=0.1)
    assert counts[2] / counts[1] == pytest.approx(2, rel=0.05)
    assert TileMap.from_mask(patterns.blocks(4096, 4096), (128, 128)).counts().mixed == 0, "whole blocks"
