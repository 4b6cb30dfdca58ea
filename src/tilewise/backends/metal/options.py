"""Which options a call's kernel is compiled for."""

from __future__ import annotations

import torch

from ...core.mask_rules import OFFSET_KINDS
from ...core.problem import Problem
from ...core.tensors import Tensors
from ...validation.memory import is_aligned
from . import config
from .spec import BK, Config, Options

MASK_KINDS = {torch.bool: 1, torch.float32: 2, torch.float16: 3, torch.bfloat16: 4}
MOST_STEP = 2**31 // (2 * BK)  # elements from a row to the next, up to which 32 bits reach all rows of a tile


def options_of(problem: Problem, c: Config, t: Tensors) -> Options:
    p, flags = problem, problem.rules.flags
    rows = [x.stride(-2) for x in (t.k, t.v, t.k_scales, t.v_scales) if x is not None]
    rows += [] if t.mask is None else [t.mask.stride(-1)]
    return Options(
        packed=p.packed_q,
        varlen=p.form == "varlen",
        page=p.page_size,
        causal=flags.causal,
        left=flags.left,
        right=flags.right,
        chunk=flags.chunk,
        offset=OFFSET_KINDS[flags.offset],
        lengths=flags.lengths,
        mask=0 if p.mask is None else MASK_KINDS[p.mask.dtype],
        states=config.has_states(p, c),
        softcap=p.softcap > 0,
        slopes=p.alibi,
        sinks=p.sinks,
        lse=p.return_lse,
        natural=is_natural(p),
        splits=c.splits > 1,
        fixed_splits=c.split_tiles > 0,
        pack=c.pack,
        wide=all(is_aligned(x) for x in (t.q, t.k, t.v, t.out)),  # of this call: the plan may be of an earlier one
        far=max(rows) > MOST_STEP,
    )


def is_natural(problem: Problem) -> bool:
    """Whether logits stay in natural units. A float mask may hold numbers that log2(e) times as large do not fit, and a
    large softcap is for large scores, whose last bits a factor would cost.
    """
    return problem.softcap > 0 or (problem.mask is not None and not problem.mask.is_bool)
