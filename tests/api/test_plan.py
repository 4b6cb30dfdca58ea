"""The plan: what it says, what it counts, that it is kept."""

import subprocess
import sys

import pytest
import torch

from tilewise import InvalidArgument, Quantised, Unsupported, attention, plan
from tilewise.backends.cpu import other_cpus
from tilewise.core.mask_rules import MaskRules, key_spans
from tilewise.core.options import Options
from tilewise.core.tensors import Sequence, sequences
from tilewise.core.tile_spans import span_counts, span_tiles
from tilewise.dispatch import call_cache, planner
from tilewise.reference import visible_cells
from tilewise.validation.calls import dense


def test_counts_are_exact():
    q, k = torch.randn(2, 4, 30, 16), torch.randn(2, 2, 50, 16)
    v = torch.randn(2, 2, 50, 8)
    lengths = torch.tensor([50, 13])
    mask = torch.rand(4, 30, 50) < 0.5
    for options in ({}, {"causal": True}, {"window": 7}, {"kv_lengths": lengths, "causal": True}, {"mask": mask},
                    {"mask": torch.where(mask, 0.0, -torch.inf)[:1], "chunk": 9, "kv_lengths": lengths}):  # fmt: skip
        call = dense(q, k, v, Options(**options))
        cells = sum(int(visible_cells(seq).sum()) for seq in sequences(call.problem, call.tensors))
        cost = plan(q, k, v, **options).cost
        assert cost.cells == cells
        assert cost.flops == 2 * cells * (16 + 8)


def test_tiles_and_bytes():
    q = torch.randn(1, 2, 1024, 32)
    full = plan(q, q, q, backend="torch")
    assert full.cost.tiles == (0, 0, 2 * 8 * 2)
    assert full.cost.bytes_moved == 4 * q.numel() * 4
    causal = plan(q, q, q, causal=True, backend="torch")
    assert causal.cost.tiles.skip == 2 * 4
    window = plan(q, q, q, causal=True, window=1, backend="torch")
    assert window.cost.cells == 2 * 1024
    packed = Quantised.from_float(q, "int4", 32)
    assert plan(q, packed, packed).cost.bytes_moved == 2 * q.numel() * 4 + 2 * (q.numel() // 2 + 4 * q.numel() // 32)


def test_values_inside_the_keys_are_read_once():
    q, k = torch.randn(2, 4, 4, 24), torch.randn(2, 2, 4, 24)
    inside = plan(q, k, k[..., :16])
    apart = plan(q, k, k[..., :16].clone())
    assert inside.problem.v_in_k
    assert "V in K" in str(inside)
    assert "V in K" not in str(apart)
    assert apart.cost.bytes_moved - inside.cost.bytes_moved == 2 * 2 * 4 * 16 * 4


@pytest.mark.parametrize(("machine", "dtype", "twice"), [
    ("sm_80", torch.bfloat16, False), ("sm_80", torch.float32, False), ("apple-m4", torch.float16, True),
])  # fmt: skip
def test_a_plan_says_where_rows_with_v_in_k_are_read_twice(machine, dtype, twice):
    q, k = torch.randn(1, 16, 1, 576, dtype=dtype), torch.randn(1, 1, 200, 576, dtype=dtype)
    assert ("read twice" in str(plan(q, k, k[..., :512], device=machine))) is twice
    assert "read twice" not in str(plan(q, k, k[..., :512].contiguous(), device=machine))


@pytest.mark.parametrize(("kind", "stored"), [("int8", 512), ("fp8_e4m3", 512), ("fp8_latent", 528)])
def test_decode_reads_rows_of_bytes_with_v_in_k_once(kind, stored):
    k = Quantised.from_float(torch.randn(1, 1, 2000, 576), kind, 128)
    v = Quantised(k.data[..., :stored], None if k.scales is None else k.scales[..., :4], kind, 128)
    for machine in ("sm_80", "sm_90", "gfx942"):
        for q_len, twice in ((1, False), (500, machine == "sm_90")):
            q = torch.randn(1, 16, q_len, 576, dtype=torch.bfloat16)
            assert ("read twice" in str(plan(q, k, v, backend="triton", device=machine))) is twice


def test_plain_torch_reads_rows_with_v_in_k_once(monkeypatch):
    q, k = torch.randn(1, 4, 3, 64), torch.randn(1, 1, 200, 64)
    expected = attention(q, k, k[..., :48].contiguous(), backend="torch")
    monkeypatch.delattr(Sequence, "values")
    assert torch.equal(attention(q, k, k[..., :48], backend="torch"), expected)


def test_values_are_inside_the_keys_by_address_strides_and_width():
    def inside(k, v):
        return plan(k, k, v).problem.v_in_k

    k = torch.randn(2, 2, 4, 24)
    assert inside(k, k[..., :16])
    assert inside(k.to("meta"), k.to("meta")[..., :16]) is False
    meta = k.to("meta")
    assert inside(meta, meta[..., :16])
    wide = torch.randn(2, 2, 4, 40)
    assert inside(wide[..., 8:32], wide[..., 8:24])
    for values in (k, k[..., 8:], k.clone()[..., :16], k[..., :16].clone(), k[..., :16].half(), k[..., :1]):
        assert inside(k, values) is (values.shape[-1] == 1)
    assert not inside(k, k.flip(2)[..., :16])
    assert not inside(k, k[:, :, ::2].repeat_interleave(2, 2)[..., :16])
    assert not inside(k, k[:, :1].expand(2, 2, 4, 24)[..., :16])
    assert not inside(k[..., ::2], k[..., ::2][..., :8])  # both are copied


def test_tiles_are_counted_as_they_are_marked():
    """`span_counts` is `span_tiles` without its tiles."""
    g = torch.Generator().manual_seed(0)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=g))

    for _ in range(2000):
        left, right = (draw(0, 9) if draw(0, 1) else None for _ in range(2))
        rules = MaskRules(bool(draw(0, 1)), (left, right), draw(0, 1) * draw(1, 12))
        Lk, tile = draw(0, 40), (draw(1, 9), draw(1, 9))
        lo, hi = key_spans(rules, draw(-20, 30) + torch.arange(draw(0, 40)), draw(0, Lk))
        marked = span_tiles(lo[None], hi[None], Lk, tile)
        assert span_counts(lo, hi, Lk, tile) == tuple(int((marked == kind).sum()) for kind in range(3))


def test_mask_bytes_are_those_of_mixed_tiles():
    q = torch.randn(1, 2, 8, 16)
    plain = plan(q, q, q).cost.bytes_moved
    mixed = torch.ones(8, 8, dtype=torch.bool)
    assert plan(q, q, q, mask=mixed).cost.bytes_moved == plain
    mixed[0, 0] = False
    assert plan(q, q, q, mask=mixed).cost.bytes_moved == plain + 64
    assert plan(q, q, q, mask=mixed.expand(2, 8, 8)).cost.bytes_moved == plain + 2 * 64


def test_decode_reads_only_the_window():
    q, k = torch.randn(1, 1, 1, 64), torch.randn(1, 1, 10_000, 64)
    whole, window = plan(q, k, k).cost, plan(q, k, k, window=100).cost
    assert whole.bytes_moved == (2 * 10_000 + 2) * 64 * 4
    assert window.bytes_moved == (2 * 100 + 2) * 64 * 4


def test_words():
    q, k = torch.randn(1, 8, 5, 64).bfloat16(), torch.randn(1, 2, 70, 64).bfloat16()
    text = str(plan(q[..., ::2], k[..., ::2], k, causal=True, window=9, sinks=torch.zeros(8), backend="torch"))
    for words in ("heads 8/2", "gqa 4", "causal", "window (8, None)", "sinks", "backend    torch", "D 32/64"):
        assert words in text, words
    for words in ("bfloat16", "q: its last dim has stride 2", "k: its last dim", "FLOP over", "tiles", "workspace"):
        assert words in text, words
    assert "\n" not in plan(q, k, k).summary()


@pytest.mark.parametrize("form", ["varlen", "paged", "packed pages"])
def test_other_forms(form):
    cu, lengths = torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([3, 9], dtype=torch.int32)
    table = torch.tensor([[0, 1, 2], [1, 2, 0]], dtype=torch.int32)
    pages = torch.randn(3, 4, 2, 8)
    if form == "varlen":
        p = plan(*(torch.randn(5, 2, 8) for _ in range(3)), cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
        assert p.cost.cells == 2 * (6 + 3)
        assert "5 packed rows" in str(p)
    elif form == "paged":
        p = plan(torch.randn(2, 2, 1, 8), pages, pages, block_table=table, context_lens=lengths)
        assert p.cost.cells == 2 * 12
        assert "pages of 4" in str(p)
    else:
        q = torch.randn(5, 2, 8)
        p = plan(q, pages, pages, block_table=table, context_lens=lengths, cu_seqlens_q=cu, causal=True)
        assert p.cost.cells == 2 * (6 + 8 + 9)


def test_plans_are_kept_by_problem():
    planner.choose.cache_clear()
    call_cache.forget()  # a call that another test has made would not ask the planner
    q = torch.randn(1, 2, 8, 16)
    for _ in range(3):
        attention(q, q, q, causal=True)
        attention(q.clone(), q, q, causal=True)
    assert planner.choose.cache_info().misses == 1
    attention(q, q, q)
    assert planner.choose.cache_info().misses == 2


def test_a_plan_does_not_run(monkeypatch):
    monkeypatch.setattr(planner.load("torch"), "run", None)
    q = torch.randn(1, 2, 8, 16)
    assert plan(q, q, q, backend="torch").backend == "torch"
    assert plan(q, q, q, backend="reference").workspace_bytes == 3 * 8 * 2 * 8 * 8


ELSEWHERE = {
    "sm_80": "triton", "sm_90": "hopper", "sm_120": "triton", "gfx942": "triton", "gfx1100": "triton",
    "apple-m3": "metal",
}  # fmt: skip


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_plan_for_another_machine(name):
    """It is that machine's, says so, and leaves this one's plans alone."""
    q = torch.empty(4, 16, 4096, 128, dtype=torch.bfloat16, device="meta")
    here = torch.zeros(1, 1, 64, 128)
    before = plan(here, here, here)
    found = plan(q, q, q, causal=True, device=name)
    assert found.backend == ELSEWHERE[name]
    assert found.problem.device.type == ("mps" if name == "apple-m3" else "cuda")
    assert any(f"planned for {name}" in note for note in found.notes)
    assert any("not yet run" in note or "simulator" in note for note in found.notes) == (name != "sm_90")
    assert plan(here, here, here) == before


def test_a_plan_for_another_machine_needs_no_triton():
    """torch for the CPU brings none. A prompt with gradients, and a step over int8."""
    code = """
import sys; sys.modules["triton"] = None
import torch, tilewise
q = torch.empty(4, 16, 4096, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
for machine in ("sm_90", "sm_120", "gfx942"):
    step = tilewise.Quantised.from_float(torch.zeros(1, 2, 64, 128), "int8")
    one = torch.zeros(1, 8, 1, 128)
    print(tilewise.plan(q, q, q, causal=True, device=machine).backend)
    print(tilewise.plan(one, step, step, device=machine).backend)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["hopper", "triton", "triton", "triton", "triton", "triton"]


def test_plans_for_other_machines_have_their_limits():
    """Tiles and heads of one card are not those of another."""
    q = torch.empty(4, 16, 4096, 256, dtype=torch.bfloat16, device="meta", requires_grad=True)
    found = {name: plan(q, q, q, device=name) for name in ("sm_80", "sm_120", "gfx942", "gfx1100")}
    assert len({found[name].tile for name in ("sm_120", "gfx942", "gfx1100")}) == 3
    assert found["gfx1100"].backend == "torch"
    assert "256 do not fit the registers" in dict(found["gfx1100"].passed_over)["triton"]
    assert found["gfx942"].backward.backend == "triton"
    assert found["gfx1100"].backward.backend == "torch"
    small = q.detach()[..., :64]
    with pytest.raises(Unsupported, match="registers of gfx1100"):
        plan(q.detach(), q.detach(), q.detach(), device="gfx1100", backend="triton")
    assert plan(small, small, small, device="gfx1100", backend="torch").backend == "torch"


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("neon", "prefill, 4 lanes"),
        ("amx", "AMX prefill, 16 lanes"),
        pytest.param("avx2", "prefill, 8 lanes", marks=pytest.mark.slow),
        pytest.param("avx512", "prefill, 16 lanes", marks=pytest.mark.slow),
        pytest.param("avx512bf16", "bf16 prefill, 16 lanes", marks=pytest.mark.slow),
    ],
)
def test_a_plan_for_another_cpu(name, kernel):
    q = torch.empty(1, 4, 512, 64, dtype=torch.bfloat16, device="meta")
    found = plan(q, q, q, causal=True, device=name)
    assert (found.backend, found.problem.device.type) == ("cpu", "cpu")
    assert found.kernel.startswith(kernel)
    with pytest.raises(Unsupported, match="runs on GPUs"):
        plan(q, q, q, device=name, backend="triton")
    with pytest.MonkeyPatch.context() as patched:  # the same call again starts no process
        patched.delattr(other_cpus.subprocess, "run")
        assert plan(q, q, q, causal=True, device=name) == found


@pytest.mark.parametrize("name", ["sm_75", "cuda", "", 90])
def test_an_unknown_machine_is_answered_with_all_names(name):
    q = torch.empty(1, 4, 64, 64, device="meta")
    with pytest.raises(InvalidArgument, match=r"sm_80.*sm_121.*gfx942.*apple-m3.*avx2.*neon"):
        plan(q, q, q, device=name)


def test_packed_decode_is_planned_as_the_unpacked_form():
    """One query a sequence is the last position: causal hides nothing, and no backend is asked for it."""
    pages, lengths = torch.randn(6, 16, 2, 64), torch.tensor([40, 17, 33], dtype=torch.int32)
    table, cu = torch.arange(6, dtype=torch.int32).view(3, 2).repeat(1, 2), torch.arange(4, dtype=torch.int32)
    q = torch.randn(3, 6, 64)
    keys = {"block_table": table, "context_lens": lengths}
    packed = plan(q, pages, pages, **keys, cu_seqlens_q=cu, causal=True)
    alone = plan(q[:, :, None], pages, pages, **keys)
    for name in ("backend", "kernel", "tile", "splits", "workspace_bytes"):
        assert getattr(packed, name) == getattr(alone, name)
    assert packed.problem.rules == alone.problem.rules
    for options in ({"q_offset": 5}, {"k_start": 1}, {"q_offset": torch.tensor([3, 2, 1])}):
        assert plan(q, pages, pages, **keys, cu_seqlens_q=cu, causal=True, **options).problem.rules.causal
    two = torch.tensor([0, 2, 3, 3], dtype=torch.int32)
    assert plan(q, pages, pages, **keys, cu_seqlens_q=two, causal=True).problem.rules.causal


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("kv_lengths", (1,), torch.int32), ("q_offset", (1,), torch.int32), ("mask", (8, 8), torch.bool),
        ("tree_mask", (1, 8, 8), torch.bool), ("key_indices", (1, 8, 2), torch.int32), ("k_start", (1,), torch.int32),
    ],
)  # fmt: skip
def test_values_that_the_work_is_counted_by_are_not_on_meta(name, shape, dtype):
    q = torch.empty(1, 2, 8, 16, device="meta")
    with pytest.raises(InvalidArgument, match=f"{name}: got a tensor on meta, expected its values"):
        plan(q, q, q, **{name: torch.empty(shape, dtype=dtype, device="meta")})
    assert plan(q, q, q, causal=True, sinks=torch.empty(2, device="meta")).cost.cells == 2 * 36
