"""Problems drawn from the whole space that the GPU backends serve: every form, dtype, head dim and option."""

import random
from dataclasses import fields, replace
from typing import Any

import torch

from tilewise.core.mask_rules import PLAIN_PLACES, MaskRules
from tilewise.core.problem import MAX_HEAD_DIM, MaskSpec, Problem, Selection
from tilewise.core.storage import PLAIN, StorageFormat, stored_as

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
WIDTHS = (1, 16, 32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256, 320, 384, 448, 512, 576)
GROUPS = (1, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 24, 28, 32, 40, 48, 64, 71, 96, 128)
LENGTHS = (1, 2, 7, 16, 17, 64, 100, 1000, 4096, 16384, 131072)


def problem_of(**options: Any) -> Problem:
    """A problem whose rules are given beside its other fields."""
    rules = {f.name: options.pop(f.name) for f in fields(MaskRules) if f.name in options}
    return Problem(**options, rules=MaskRules(**rules))


def changed(p: Problem, **options: Any) -> Problem:
    """The problem with other fields or rules."""
    rules = {f.name: options.pop(f.name) for f in fields(MaskRules) if f.name in options}
    return replace(p, **options, rules=replace(p.rules, **rules))


def draw(chance: random.Random, indices: bool = False) -> Problem:
    """A problem on a GPU, with key or block indices now and then if `indices`; nothing of it is small on purpose, for
    plans cost no memory.
    """

    def maybe(share: float) -> bool:
        return chance.random() < share

    form = chance.choice(("dense", "dense", "varlen", "paged"))
    D = chance.choice((*WIDTHS, chance.randint(1, MAX_HEAD_DIM)))
    Dv = D if maybe(0.7) else chance.choice((*WIDTHS, chance.randint(1, MAX_HEAD_DIM)))
    q_dtype = chance.choice((F32, F16, BF16, BF16))
    k_format = _stored(chance, q_dtype, D)
    v_format = k_format if maybe(0.7) and Dv % 2 == D % 2 else _stored(chance, q_dtype, Dv)
    batch, kv_heads = chance.choice((1, 2, 5, 64)), chance.choice((1, 2, 4, 8))
    heads = kv_heads * chance.choice(GROUPS)
    q_len = chance.choice((1, 1, 1, 2, 3, 4, 5, 8, 12, 16, 17, 33, 512, 4096))
    kv_len = chance.choice(LENGTHS)
    packed = form == "varlen" or (form == "paged" and maybe(0.4))
    page_size = chance.choice((1, 5, 8, 16, 24, 32, 64, 128, 256)) if form == "paged" else 0
    side = (None, 0, 5, 1000)
    mask = None
    if maybe(0.25):
        broadcast = tuple(maybe(0.5) for _ in range(4))
        mask = MaskSpec(chance.choice((torch.bool, F32, F16, BF16)), broadcast)  # type: ignore[arg-type]
    selection = None
    if indices and maybe(0.2):
        block = 1 if packed else chance.choice((1, 1, 5, 16, 64, 128, 300))
        selection = Selection(chance.choice((1, 7, 64, 2048)), block, maybe(0.5))
    lengths = form == "paged" or maybe(0.3)
    return problem_of(
        form=form,  # type: ignore[arg-type]
        device=torch.device("cuda"),
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=D,
        value_dim=Dv,
        q_dtype=q_dtype,
        k_format=k_format,
        v_format=v_format,
        scale=chance.choice((0.1, 0.1, 1.0, -0.5)),
        packed_q=packed,
        total_q=batch * q_len if packed else 0,
        page_size=page_size,
        causal=maybe(0.5),
        window=(chance.choice(side), chance.choice(side)) if maybe(0.3) else (None, None),
        chunk=chance.choice((1, 64, 5000)) if maybe(0.1) else 0,
        softcap=chance.choice((5.0, 1e30)) if maybe(0.2) else 0.0,
        q_offset=chance.choice(("end", "rows", 0, kv_len - q_len)) if lengths or form != "dense" else kv_len - q_len,
        kv_lengths=lengths,
        places=chance.choice((PLAIN_PLACES, PLAIN_PLACES, PLAIN_PLACES, (3, 2, 1), "rows")),
        alibi=maybe(0.2),
        sinks=maybe(0.2),
        tree=maybe(0.1) and q_len <= 4096,
        q_bias=maybe(0.1),
        k_bias=maybe(0.1),
        mask=mask,
        selection=selection,
        split_size=chance.choice((1, 64, 1000)) if maybe(0.15) else None,
        return_lse=maybe(0.5),
        allow_tf32=maybe(0.1),
        aligned=maybe(0.8),
    )


def _stored(chance: random.Random, q_dtype: torch.dtype, width: int) -> StorageFormat:
    """How K or V is stored."""
    kind = chance.choice(("same", "same", "same", "f16", "bf16", "int8", "fp8_e4m3", "int4"))
    if kind == "int4" and width % 2:
        kind = "int8"
    if kind == "same":
        return PLAIN[q_dtype]
    if kind in ("f16", "bf16"):
        return stored_as(kind)
    return stored_as(kind, chance.choice((32, 64, 128)))
