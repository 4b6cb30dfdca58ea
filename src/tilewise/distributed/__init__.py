"""Attention over many devices: sequences sharded over the ranks of a mesh, with `torch.distributed`.

from torch.distributed.device_mesh import init_device_mesh
from tilewise import distributed

mesh = init_device_mesh("cuda", (8,))
q, k, v = (distributed.shard(x, mesh, dim=2) for x in (q, k, v))
out = distributed.attention(q, k, v, mesh=mesh, causal=True)
"""

from .attention import attention
from .cache import ShardedKVCache
from .context import context_parallel
from .faults import RankLost
from .layout import positions, shard, unshard
from .pages import receive_sequence, send_sequence
from .plan import DistributedPlan, Machine, RankPlan, plan
from .sharded_batch import ShardedBatch


def register_sharding_rules() -> None:
    """Lets `tilewise.attention` take DTensors, sharded by batch rows or heads, or replicated. Call it once."""
    from . import sharding  # torch.distributed.tensor is large

    sharding.register_sharding_rules()


__all__ = [
    "DistributedPlan",
    "Machine",
    "RankLost",
    "RankPlan",
    "ShardedBatch",
    "ShardedKVCache",
    "attention",
    "context_parallel",
    "plan",
    "positions",
    "receive_sequence",
    "register_sharding_rules",
    "send_sequence",
    "shard",
    "unshard",
]
