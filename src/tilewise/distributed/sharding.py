"""Sharding rules of tilewise's operators, for DTensors.

Sharded by batch, by heads (if the KV heads divide) or replicated; broadcast arguments are replicated. DTensor dispatch
costs tens of microseconds a call; `local_map` avoids it by passing local tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from .. import derivative_ops, ops
from ..core import tracing
from ..core.private.torch import (
    OpStrategy,
    RuntimeSchemaInfo,
    arguments_of,
    dtensor_dispatcher,
    expand_to_full_mesh,
)
from ..core.problem import GRADS

Placements = list[Placement | None]
Sharding = tuple[str, int]  # what is sharded, and its dim in q, k and v
Strategies = list[tuple[Placements, Placements]]  # placements of results and of arguments
BY_BATCH = ("kv_lengths", "q_offsets", "k_starts", "k_strides", "q_strides", "key_indices", "block_indices")
RANK_WITH_BATCH = {
    "mask": 4,
    "tree_mask": 3,
    "positions": 2,
    "alibi_slopes": 2,
    "q_bias": 3,
    "k_bias": 3,
}  # of arguments that may be broadcast


def register_sharding_rules() -> None:
    """Lets `tilewise.attention` take DTensors, sharded by batch rows or heads, or replicated. Call it once."""
    if tracing.dtensors:
        return
    _register("attention", _forward, lambda args: 1)
    _register("attention_lse", _forward, lambda args: 2)
    _register("attention_backward", _backward, lambda args: len(args[-1].split(",")))
    tracing.dtensors = True


def _register(name: str, rule: Callable[..., Strategies], outputs: Callable[[list[Any]], int]) -> None:
    """Registers a rule for an operator.

    Not by torch's `register_sharding`: it takes a list of gradients for one result, and two layouts for one call.
    """
    operator = getattr(torch.ops.tilewise, name).default
    tensors = sum("Tensor" in str(x.type) for x in arguments_of(operator))

    def strategy_of(schema: Any) -> Any:
        args = [spec(x) for x in schema.args_schema]
        count = outputs(args)
        placements = [
            (results * count if len(results) == 1 else results) + inputs
            for results, inputs in rule(args, dict(schema.kwargs_schema))
        ]
        strategies = expand_to_full_mesh(schema.get_mesh_from_args(), schema, placements, input_index=count)
        if name == "attention_backward" and count == 1:  # one result, but in a list
            for strategy in strategies.strategies:
                strategy.output_specs = (strategy.output_specs,)
        return strategies

    def spec(x: Any) -> Any:
        return x.strategies[0].output_spec if isinstance(x, OpStrategy) else x

    info = RuntimeSchemaInfo(tensors, ["layout"], needs_pytree=True)
    dtensor_dispatcher.sharding_propagator.register_op_strategy(operator, strategy_of, info)


def _forward(tensors: list[Any], options: dict[str, Any]) -> Strategies:
    named = dict(zip(ops.NAMES["attention"], tensors, strict=False))
    placed = [_placed(named, sharding) for sharding in _shardings(named, options)]
    return [([placements["q"]], list(placements.values())) for placements in placed]


def _backward(tensors: list[Any], options: dict[str, Any]) -> Strategies:
    *tensors, grads = tensors
    named = dict(zip(derivative_ops.ARGUMENTS["attention_backward"][:-1], tensors, strict=True))
    strategies: Strategies = []
    for sharding in _shardings(named, options):
        placed = _placed(named, sharding)
        summed: Placement = Replicate() if sharding[0] == "whole" else Partial()  # of a replicated input
        inputs = [placed[name] for name in (*GRADS, *ops.CAPTURES) if name in grads.split(",")]
        results = [summed if isinstance(x, Replicate) else x for x in inputs]
        strategies.append((results, [*placed.values(), None]))
    return strategies


def _shardings(named: dict[str, Any], options: dict[str, Any]) -> list[Sharding]:
    """Replicated, by batch rows, by heads."""
    q, k = named["q"], named["k"]
    head = 2 if options.get("layout") == "blhd" else 1
    # Functions of the user are given the numbers of batch rows and heads; dropout depends on them.
    if options.get("mods") is not None or options.get("dropout_p"):
        return [("whole", 0)]
    shardings = [("whole", 0), ("batch", 0)]
    if k.shape[head] % k.mesh.size() == 0 and q.shape[head] % k.shape[head] == 0:
        shardings.append(("heads", head))
    return shardings


def _placed(named: dict[str, Any], sharding: Sharding) -> dict[str, Placement | None]:
    """Each tensor's placement; None for those that were not given."""
    return {name: None if x is None else _placement(name, x.shape, sharding) for name, x in named.items()}


def _placement(name: str, shape: Sequence[int], sharding: Sharding) -> Placement:
    if sharding[0] == "whole":
        return Replicate()
    kind, dim = sharding
    if name in ("q", "k", "v", "out", "lse", "dout", "dlse"):
        return Shard(dim)
    if kind == "batch":
        own = name in BY_BATCH or (len(shape) == RANK_WITH_BATCH.get(name, 0) and shape[0] > 1)
        return Shard(0) if own else Replicate()
    if name in ("q_bias", "k_bias"):
        return Shard(1) if shape[1] > 1 else Replicate()
    if name in ("sinks", "alibi_slopes"):
        return Shard(len(shape) - 1)
    if name == "mask" and len(shape) > 2 and shape[-3] > 1:
        return Shard(len(shape) - 3)
    return Shard(1) if name in ("key_indices", "block_indices") and len(shape) == 4 else Replicate()
