"""What a plan of the Hopper backend takes of a processor, counted from what its kernel allocates."""

from tilewise.backends.hopper.fwd import config
from tilewise.backends.hopper.fwd.launch import FIXUP_COLUMNS

SHARED = 227 << 10
REGISTERS = 1 << 16
BARRIER_BYTES = 8
SLACK = 2048  # tiles begin at multiples of 1024 bytes, barriers and the scratch of reductions lie behind them


def check_hopper(p):
    """Raises unless the launch of `p` fits; the share of the shared memory that it takes."""
    c = config.config_of(p)
    s = config.spec(p, c)
    assert s.chunk_d * s.chunks >= p.head_dim
    assert s.DV * s.value_tiles >= p.value_dim
    queries = s.BM * s.chunks * s.chunk_d * s.q_stages
    ring = s.BN * (s.k_stages * s.chunk_d + s.v_stages * s.DV)
    output = 0 if s.out_aliases_q_chunks else s.BM * s.out_columns
    barriers = 2 * (s.consumers * s.q_stages * (2 if s.out_aliases_q_chunks else 1) + s.k_stages + s.v_stages) + 4
    needed = 2 * (queries + ring + output) + BARRIER_BYTES * barriers + SLACK
    assert needed * c.per_processor <= SHARED, (p, c)
    assert s.k_stages >= s.chunks or s.out_aliases_q_chunks, (
        "a tile's chunks are all needed before the first is released"
    )
    fixup = 2 * (64 * s.chunks * s.chunk_d + s.BN * s.chunk_d + 2 * s.BN * min(s.DV, FIXUP_COLUMNS)) + SLACK
    assert fixup <= SHARED, (p, c)
    threads = 128 * (s.consumers * c.consumer_regs + c.producer_regs)
    assert threads * c.per_processor <= REGISTERS, (p, c)
    # S and O in float32 and P in 16 bits, of one warpgroup; what is left is for addresses and rows.
    assert c.consumer_regs - 16 >= s.BN // 2 + s.DV // 2 + s.BN // 4, (p, c)
    return needed * c.per_processor / SHARED
