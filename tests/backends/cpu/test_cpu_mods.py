"""Functions of the user on the CPU: printed expressions, and calls with them, against the oracle."""

import math
import secrets
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from drawn_mods import TENSORS, called, captured, compiled, drawn, inputs
from tilewise import Quantised, attention, paged_attention, plan, varlen_attention
from tilewise.backends.cpu import compiler
from tilewise.backends.cpu.codegen import expression, functions
from tilewise.core.expression.evaluate import evaluate
from tilewise.core.expression.mods import mods_of
from tilewise.core.expression.node import in_order

H, L, D = 4, 150, 24
random = torch.Generator().manual_seed(0)
TABLE, SLOPES = torch.randn(H, 2 * L + 20, generator=random), torch.rand(H, generator=random)
DOC = torch.arange(2 * L) // 41
NEAR = torch.rand(2 * L, 2 * L, generator=random) > 0.5


def draw(*shape, dtype=torch.float32):
    return (torch.randn(shape, generator=random) * 2).to(dtype)


def agree(got, mods, s, cells):
    """Whether results are those of the definition; where float32 and float64 differ there, any is right."""
    tensors = captured()
    want = []
    for dtype in (torch.float32, torch.float64):
        score, mask = evaluate([mods.score, mods.mask], cells | {"s": s}, tensors, dtype)
        want.append(torch.where(mask, score, -math.inf).expand(s.shape).double())
    tolerance = 2e-5 * (1 + want[1].abs()) + 4 * (want[0] - want[1]).abs()
    close = ((got - want[1]).abs() <= tolerance) | (got == want[1]) | (got.isnan() & want[0].isnan())
    return bool((close | ((want[0] - want[1]).abs() > 1e-2)).all())


@pytest.mark.parametrize("kind", ["columns", "rows"])
@pytest.mark.parametrize("seeds", [range(n, n + 8) for n in (0, 8)])
def test_drawn_expressions_are_printed_as_they_are_defined(kind, seeds):
    for seed in seeds:
        mods = drawn(seed)
        s, cells = inputs(kind, seed)
        assert agree(called(kind, compiled(kind, mods), s, cells, captured()), mods, s, cells), mods


def swapped(printer, op, args):
    return ORIGINAL["_of_ints"](printer, op, args[::-1] if op == "sub" else args)


def unclamped(printer, index, size):
    return index


def gathers_first(printer, base, offset, element):
    return printer.spread(printer._element(base, printer.e.builder.extract_element(offset, expression.I32(0)), element))


ORIGINAL = {name: getattr(expression.Printer, name) for name in ("_of_ints", "clamped", "_gather", "_divide")}
MUTANTS = {
    "operands swapped": ("_of_ints", swapped, "|sub q k;float %0;add s %1|%2 T"),
    "no clamp": ("clamped", unclamped, "float32:1|sub q k;max %0 0;min %1 12;load0 %2;add s %3|%4 T"),
    "another index": ("_gather", gathers_first, "float32:1|mod q 7;load0 %0;add s %1|%2 T"),
    "rounded to 0": ("_divide", lambda p, op, x, y, _: p.e.builder.sdiv(*p.alike(x, y)),
                     "|sub q k;floordiv %0 3;float %1;add s %2|%3 T"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_the_printer_are_found(name, monkeypatch):
    method, mutant, text = MUTANTS[name]
    mods, (s, cells) = mods_of(text), inputs("columns")
    tensors = (captured()[1],) if mods.tensors else ()
    want = evaluate([mods.score], cells | {"s": s}, tensors, torch.float32)[0]
    torch.testing.assert_close(called("columns", compiled("columns", mods), s, cells, tensors), want)
    monkeypatch.setattr(expression.Printer, method, mutant)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(called("columns", compiled("columns", mods), s, cells, tensors), want)


def test_offsets_of_64_bits():
    mods = drawn(3)
    s, cells = inputs("columns")
    wide = called("columns", compiled("columns", mods, wide=True), s, cells, captured())
    assert torch.equal(wide, called("columns", compiled("columns", mods), s, cells, captured()))


@pytest.mark.parametrize("kind", ["columns", "rows"])
def test_quotients_that_steps_depend_on_are_exact(kind):
    """Others are products with the reciprocal: 41 / 41 would be below 1."""
    s, cells = inputs(kind)
    for divisor in (7.0, 20.5, 41.0):
        mods = mods_of(f"float32:1|float k;div %0 {divisor};floor %1;int %2;load0 %3;div s {divisor};add %5 %4|%6 -")
        tensors = (torch.arange(100.0) * 1000,)
        want = evaluate([mods.score], cells | {"s": s}, tensors, torch.float32)[0]
        torch.testing.assert_close(called(kind, compiled(kind, mods), s, cells, tensors), want)
    steps = expression.exact_nodes([mods.score])
    assert [x.op for x in in_order(mods.score) if x.op == "div" and x in steps] == ["div"]


@pytest.mark.parametrize("op", functions.FUNCTIONS)
def test_functions_over_their_range(op):
    ends = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-40, 1e14, 88.8, -103.9])
    x = torch.cat(
        [ends, torch.linspace(-120, 120, 20001), torch.linspace(-1e5, 1e5, 2001), torch.logspace(-44, 38, 2001)]
    )
    if op in ("sin", "cos"):
        x = x[x.abs().nan_to_num(0) < 1e15]
    x = torch.cat([x, x.new_zeros(-len(x) % 16)]).view(-1, 16)
    mods = mods_of(f"|{op} s|%0 -")
    cells = inputs("columns")[1] | {"k": torch.zeros(1)}
    got = called("columns", compiled("columns", mods), x, cells, ()).double()
    want = evaluate([mods.score], {"s": x.double()}, (), torch.float64)[0]
    rounded = want.float().double()
    ends = ~rounded.isfinite()
    torch.testing.assert_close(got[ends], rounded[ends], rtol=0, atol=0, equal_nan=True)
    unit = 2.0**-23 * rounded.abs().clamp(min=2.0**-126)
    if op == "sigmoid":  # e^-x overflows where the result is subnormal
        unit = unit.clamp(min=2.0**-126)
    assert ((got - want).abs() <= 2 * unit)[~ends].all()


def softcap_table(s, b, h, q, k):
    return 20 * torch.tanh(s / 20) + TABLE[h, q - k + L]


def documents(b, h, q, k):
    return (DOC[q] == DOC[k]) & (q >= k)


def by_head(b, h, q, k):
    return torch.where(h % 2 == 0, q - k < 40, NEAR[q, k])


def hides(s, b, h, q, k):
    return torch.where((q + k) % 3 == 0, -math.inf, s - SLOPES[h] * (q - k).abs())


FUNCTIONS = {
    "score": {"score_mod": softcap_table},
    "mask": {"mask_mod": documents},
    "both": {"score_mod": softcap_table, "mask_mod": by_head},
    "nothing": {"mask_mod": lambda b, h, q, k: q < -(h + 1)},
    "hides": {"score_mod": hides},
    "with others": {"score_mod": softcap_table, "mask_mod": documents, "softcap": 15.0, "window": 60, "q_stride": 1,
                    "alibi_slopes": SLOPES},
    "positions": {"score_mod": softcap_table, "mask_mod": by_head, "k_start": 3, "k_stride": 2, "q_offset": 9},
}  # fmt: skip
PER_DTYPE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def compare(got, want, dtype=torch.float32):
    torch.testing.assert_close(got.out.float(), want.out.float(), atol=PER_DTYPE[dtype], rtol=PER_DTYPE[dtype])
    torch.testing.assert_close(got.lse, want.lse, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", PER_DTYPE, ids=str)
def test_prefill_and_decode(name, dtype):
    options = FUNCTIONS[name] | {"return_lse": True}
    for q_len, kv_heads in ((L, H), (L - 13, 1), (7, 2), (1, H)):
        q, k, v = (draw(2, n, length, D, dtype=dtype) for n, length in ((H, q_len), (kv_heads, L), (kv_heads, L)))
        got, want = (attention(q, k, v, backend=backend, **options) for backend in ("cpu", "reference"))
        compare(got, want, dtype)
        assert torch.equal(got.out == 0, want.out == 0) or name != "nothing"


@pytest.mark.parametrize("q_len", [L, 3])
def test_what_a_function_hides_cannot_matter(q_len):
    def mask_mod(b, h, q, k):
        return (k % 7 != 3) & (k != q)

    options = {"score_mod": softcap_table, "mask_mod": mask_mod, "return_lse": True}
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = draw(1, H, q_len, D, dtype=dtype), draw(1, H, L, D, dtype=dtype), draw(1, H, L, D, dtype=dtype)
        clean = attention(q, k, v, backend="cpu", **options)
        k[:, :, 3::7], v[:, :, 3::7] = torch.nan, torch.inf
        v[:, :, -q_len:][:, :, :1] = torch.nan  # the first query does not see it, others do
        got = attention(q, k, v, backend="cpu", **options)
        assert torch.equal(got.out[:, :, 0], clean.out[:, :, 0])
        assert torch.equal(got.lse, clean.lse)
        assert q_len < 2 or got.out[:, :, 1:].isnan().all()


def test_packed_paged_and_quantised_calls():
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 40, 41, 120], [0, 55, 97, 180]))
    scale = torch.tensor([1.0, 0.5, 0.25])
    options = {
        "score_mod": lambda s, b, h, q, k: s * scale[b] + TABLE[h, q - k + L],
        "mask_mod": lambda b, h, q, k: (q >= k) & ((k + b) % 5 != 0),
        "return_lse": True,
    }
    q, k, v = draw(120, H, D), draw(180, 2, D), draw(180, 2, D)
    compare(*(varlen_attention(q, k, v, cu_q, cu_k, backend=b, **options) for b in ("cpu", "reference")))
    pages = [draw(9, 16, 2, 32) for _ in range(2)]
    table = torch.tensor([[2, 0, 7], [5, 4, 1], [3, 6, 8]], dtype=torch.int32)
    lengths = torch.tensor([40, 17, 48], dtype=torch.int32)
    for q_len in (1, 5, 17):
        q = draw(3, H, q_len, 32)
        args = (table, lengths)
        compare(*(paged_attention(q, *pages, *args, backend=b, **options) for b in ("cpu", "reference")))
        for stored in ("int8", "fp8_e4m3", "int4"):
            packed = [Quantised.from_float(x, stored, group=32) for x in pages]
            compare(*(paged_attention(q, *packed, *args, backend=b, **options) for b in ("cpu", "reference")))


def test_splits_and_indices():
    q, k, v = draw(1, H, 1, D), draw(1, 2, 2 * L, D), draw(1, 2, 2 * L, D)
    options = {"score_mod": softcap_table, "mask_mod": lambda b, h, q, k: NEAR[k, h], "return_lse": True}
    want = attention(q, k, v, backend="reference", **options)
    compare(attention(q, k, v, backend="cpu", split_size=96, **options), want)
    indices = torch.randperm(2 * L, generator=random)[:33].view(1, 1, 33).int()
    compare(*(attention(q, k, v, key_indices=indices, backend=b, **options) for b in ("cpu", "reference")))
    q, blocks = (
        draw(1, H, 2 * L, D),
        torch.tensor([[[0, 2], [4, 1], [3, 9], [0, 5]] * 2 + [[1, 2]] * 2], dtype=torch.int32),
    )
    both = (attention(q, k, v, block_indices=blocks, block_size=32, backend=b, **options) for b in ("cpu", "reference"))
    compare(*both)


def test_a_new_function_compiles_no_mainloop(monkeypatch):
    q, k, v = draw(1, H, 20, D), draw(1, H, L, D), draw(1, H, L, D)
    attention(q, k, v, score_mod=softcap_table, backend="cpu")
    monkeypatch.setattr(compiler, "compile_function", None)
    printed = []
    emit = compiler.emit_module
    monkeypatch.setattr(compiler, "emit_module", lambda build, name: printed.append(name) or emit(build, name))
    number = secrets.randbits(20) / 2**20  # not in the disk cache
    attention(q, k, v, score_mod=lambda s, b, h, q, k: s * number + q, backend="cpu")
    assert printed == ["mod_columns", "mod_rows"]
    attention(q, k, v, score_mod=lambda s, b, h, q, k: s * number + q, backend="cpu")
    assert len(printed) == 2


def test_a_repeated_call_reads_the_tensors_that_it_captures():
    q, k, v = (draw(1, n, m, D) for n, m in ((H, 3), (2, L), (2, L)))
    tables = [TABLE, TABLE * 2, TABLE - 1]

    def call(table, backend):
        return attention(q, k, v, score_mod=lambda s, b, h, q, k: s + table[h, q - k + L], backend=backend)

    want = [call(table, "reference") for table in tables]
    for _ in range(2):
        for table, x in zip(tables, want, strict=True):
            torch.testing.assert_close(call(table, "cpu"), x, atol=2e-5, rtol=2e-5)
    changed = TABLE.clone()
    call(changed, "cpu")
    changed.copy_(tables[1])
    torch.testing.assert_close(call(changed, "cpu"), want[1], atol=2e-5, rtol=2e-5)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: call(tables[n % 3], "cpu"), range(60)))
    for n, x in enumerate(found):
        assert torch.equal(x, found[n % 3])


def test_infinities_in_a_repeated_call():
    """Tiles of bf16 leave them to another kernel."""
    q, k, v = (draw(1, n, L, D, dtype=torch.bfloat16) for n in (H, 2, 2))
    options = {"score_mod": lambda s, b, h, q, k: s + TABLE[h, q - k + L], "causal": True, "backend": "cpu"}
    for _ in range(2):
        clean = attention(q, k, v, **options)
    k[:, :, 100], v[:, :, 100] = torch.inf, torch.inf
    for _ in range(2):
        found = attention(q, k, v, **options)
        torch.testing.assert_close(found[:, :, :100], clean[:, :, :100], atol=2e-2, rtol=2e-2)


def test_the_planner_chooses_the_cpu():
    q, k, v = draw(1, H, 20, D), draw(1, H, L, D), draw(1, H, L, D)
    assert plan(q, k, v, score_mod=softcap_table, mask_mod=documents).backend == "cpu"
    assert len(TENSORS) == len(captured())
