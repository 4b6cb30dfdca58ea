"""The Hopper kernels' own text, run as plain Python (`gluon_sim.py`): schedule, rings, softmax and fix-up, against the
oracle and in random order. Wrong versions of them must be noticed.
"""

import random
import sys

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

import gluon_sim
from gluon_values import SimError
from hopper_sim import Launch
from tilewise.backends.hopper.fwd import config
from tilewise.core.options import Options
from tilewise.core.tensors import sequences
from tilewise.reference import attend
from tilewise.testing.check import Mismatch, check_call
from tilewise.validation import calls

KERNELS = gluon_sim.load()


def dense(D=64, Dv=0, Lq=200, Lk=300, B=1, H=2, Hkv=1, **options):
    """A checked call into a poisoned output."""
    g = torch.Generator().manual_seed(D + Lq)
    q = (3 * torch.randn(B, H, Lq, D, generator=g)).half()
    k, v = (torch.randn(B, Hkv, Lk, d, generator=g).half() for d in (D, Dv or D))
    for name in ("sinks", "alibi_slopes"):
        if options.get(name) is True:
            options[name] = torch.linspace(0.1, 1.0, H)
    if (size := options.get("block_size")) is not None:
        blocks = torch.rand(B, Hkv, -(-Lq // size), -(-Lk // size), generator=g).argsort(-1)[..., :6].int()
        blocks[:, :, 1::3] = -1  # rows that choose nothing
        blocks[..., 1] = torch.where(blocks[..., 0] % 2 == 0, -1, blocks[..., 1])
        options["block_indices"] = blocks
    out = torch.full((B, H, Lq, Dv or D), float("nan"), dtype=torch.float16)
    return calls.dense(q, k, v, Options(out=out, return_lse=True, **options))


def growing(D=128, **options):
    """Logits that grow by some hundred powers of two towards the keys visited last."""
    call = dense(D, Lk=600, H=1, **options)
    call.tensors.k.mul_(torch.linspace(30.0, 0.0, 600).half()[:, None])
    return call


def packed(q_lengths, k_lengths, D=64, spare=3, **options):
    g = torch.Generator().manual_seed(len(q_lengths))
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in (q_lengths, k_lengths))
    q = (3 * torch.randn(int(cu_q[-1]) + spare, 2, D, generator=g)).half()
    k, v = (torch.randn(int(cu_k[-1]) + spare, 1, D, generator=g).half() for _ in range(2))
    out = torch.full_like(q, float("nan"))
    return calls.varlen(q, k, v, cu_q, cu_k, Options(out=out, return_lse=True, **options))


LENGTHS = torch.tensor([250, 3, 0])
CASES = {
    "D64": lambda: dense(),
    "D64 long": lambda: dense(Lq=250, Lk=2100, H=1),  # three consumers
    "D64 causal": lambda: dense(causal=True, Lq=300),  # two programs a processor
    "D128 causal": lambda: dense(128, causal=True, Lq=500),
    "D128 tail": lambda: dense(128, Lq=130, Lk=257, B=2),
    "D192/128": lambda: dense(192, 128, causal=True),
    "D256": lambda: dense(256, causal=True),
    "maxima that grow": lambda: growing(),
    "maxima that grow, causal": lambda: growing(256, sinks=True, q_offset=400, causal=True),
    "D320": lambda: dense(320, Lk=400),
    "D512": lambda: dense(512, causal=True, Lq=300, Lk=200),
    "D512/64": lambda: dense(512, 64, Lq=140),
    "D40/96": lambda: dense(40, 96, Lq=70),
    "window": lambda: dense(128, Lq=400, Lk=400, causal=True, window=70),
    "two sides": lambda: dense(128, Lq=300, Lk=500, window=(30, 150)),
    "chunk": lambda: dense(128, Lq=400, Lk=400, chunk=130, causal=True),
    "lengths": lambda: dense(128, B=3, Lk=300, causal=True, kv_lengths=LENGTHS),
    "offsets": lambda: dense(B=3, Lk=300, causal=True, q_offset=torch.tensor([-50, 0, 1000])),
    "strides": lambda: dense(128, Lq=300, Lk=200, causal=True, k_start=2, k_stride=3, q_stride=2, q_offset=50),
    "keys that nobody sees": lambda: dense(128, Lq=140, Lk=500, window=(40, 3), q_stride=9, q_offset=-100),
    "strides of each row": lambda: dense(
        64,
        B=3,
        Lq=150,
        Lk=300,
        causal=True,
        alibi_slopes=True,
        k_start=torch.tensor([4, -9, 0]),
        k_stride=torch.tensor([1, 2, 3]),
        q_stride=torch.tensor([2, 1, 5]),
        q_offset=torch.tensor([0, 20, 100]),
    ),
    "strides and ALiBi": lambda: dense(128, Lk=150, causal=True, alibi_slopes=True, k_stride=3, q_offset=7),
    "packed, strides": lambda: packed([5, 200, 129], [9, 260, 40], causal=True, k_stride=2, q_stride=3, window=400),
    "before the first key": lambda: dense(128, Lq=300, Lk=100, causal=True, sinks=True),
    "softcap": lambda: dense(128, Lq=300, softcap=5.0, causal=True),
    "softcap, ALiBi, sinks": lambda: dense(128, softcap=5.0, alibi_slopes=True, sinks=True, causal=True),
    "blocks": lambda: dense(128, Lq=500, Lk=900, H=4, Hkv=2, block_size=128),
    "blocks causal": lambda: dense(128, Lq=900, Lk=950, causal=True, block_size=128, sinks=True),
    "blocks, window": lambda: dense(64, Lq=400, Lk=2100, H=1, window=(300, 90), block_size=256),
    "blocks, lengths": lambda: dense(256, B=3, Lk=300, H=1, causal=True, kv_lengths=LENGTHS, block_size=128),
    "packed": lambda: packed([5, 200, 0, 129], [9, 260, 7, 0], causal=True),
    "packed, lengths": lambda: packed([130, 1], [140, 300], D=128, kv_lengths=torch.tensor([100, 300]), sinks=None),
}


def run(call, kernels=KERNELS, seed=0, processors=3):
    """Runs and judges a call."""
    launch = Launch(call, processors)
    launch.run(kernels, seed)
    if bool(call.tensors.v.isfinite().all()):
        check_call(call, call.tensors.out, call.tensors.lse)
    else:
        check_nonfinite(call, call.tensors.out)
    return launch


def check_nonfinite(call, out):
    """Values that are not finite reach the rows that see them, and no other."""
    for seq in sequences(call.problem, call.tensors):
        exact = attend(seq).out
        got = out[seq.row].double()
        near = (got - exact).abs() < 0.02
        if not bool((near | (got == exact) | (got.isnan() & exact.isnan())).all()):
            raise Mismatch("rows that do not see a NaN differ")


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_give_what_the_oracle_does(name):
    call = CASES[name]()
    launch = run(call)
    if not call.problem.packed_q:
        assert sum(launch.done.values()) == launch.bound.work_tiles * launch.bound.spec.consumers


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_order(seed):
    """Programs that fetch work tiles when they are ready, and static schedules; many rounds."""
    chance = random.Random(seed)
    for options in ({}, {"causal": True}, {"window": (chance.randint(0, 200), 3)}):
        run(dense(128, Lq=600, H=chance.choice((1, 3)), **options), seed=seed, processors=chance.choice((1, 2, 5)))


def test_hidden_values_that_are_not_finite_do_not_matter():
    """They are noticed and the tile is computed again."""
    for options in ({"causal": True}, {"window": (9, 0)}, {"block_size": 128}):
        call = dense(Lq=200, Lk=200, H=1, **options)
        call.tensors.v[:, :, 150, ::3] = float("nan")
        call.tensors.v[:, :, 77] = float("inf")
        run(call)


WRONG = {
    "the last work tile left out": ("tile_scheduler", "count = a.work_tiles\n", "count = a.work_tiles - 1\n"),
    "the last work tile of packed sequences left out": (
        "tile_scheduler", "* a.heads * a.S.value_tiles\n", "* a.heads * a.S.value_tiles - 1\n",
    ),
    "the last tile of keys left out": (
        "tile_scheduler", "last = gl.maximum(gl.cdiv(hi, BN), first + 1)", "last = gl.maximum(hi // BN, first + 1)",
    ),
    "the first tile of keys left out": (
        "tile_scheduler", "first = gl.minimum(lo // BN", "first = gl.minimum(lo // BN + 1",
    ),
    "a static schedule with repeats": ("tile_scheduler", "return round * count + ", "return round * (count - 1) + "),
    "work tiles fetched twice": (
        "tile_scheduler", "gl.num_programs(0) + gl.atomic_add", "gl.num_programs(0) - 1 + gl.atomic_add",
    ),
    "a static schedule with gaps": ("tile_scheduler", "return round * count + ", "return round * (count + 1) + "),
    "tiles of rows counted from one": (
        "tile_scheduler", "tile = tiles - 1 - rank // width", "tile = tiles - rank // width",
    ),
    "the ring's wait for free stages flipped": (
        "pipeline", "self.released.index(n % self.STAGES), ((n // self.STAGES) & 1) ^ 1",
        "self.released.index(n % self.STAGES), (n // self.STAGES) & 1",
    ),
    "the ring's wait for full stages flipped": (
        "pipeline", "self.full.index(n % self.STAGES), (n // self.STAGES) & 1",
        "self.full.index(n % self.STAGES), ((n // self.STAGES) & 1) ^ 1",
    ),
    "phases that do not alternate": ("pipeline", "(n // self.STAGES) & 1)", "0)"),
    "the queries' phase flipped": (
        "pipeline", "self.full.index(self.barrier(n, c, part)), (n // self.STAGES) & 1",
        "self.full.index(self.barrier(n, c, part)), ((n // self.STAGES) & 1) ^ 1",
    ),
    "the scheduler's phase flipped": (
        "tile_scheduler", "self.full.index(n & 1), (n >> 1) & 1", "self.full.index(n & 1), ((n >> 1) & 1) ^ 1",
    ),
    "keys released before they are multiplied": (
        "mma", "        s = warpgroup_mma_wait(1, deps=(s,))\n    else:",
        "        release_scores(a, keys, n)\n    else:",
    ),
    "a product not waited for": ("mma", "        s = warpgroup_mma_wait(0, deps=(s,))\n", ""),
    "values of another tile": ("producer", "values.fill(value_use(a, n, j), a.v, [w.kv_b, w.head // a.group, row",
                               "values.fill(value_use(a, n, j), a.v, [w.kv_b, w.head // a.group, row + 1"),
    "the window one key too wide": ("mask_rules", "ahead - left", "ahead - left - 1"),
    "a rescale left out": ("mma", "        o = rescaled(a, o, p)\n", "        o = o\n"),
    "a maximum that is not replaced": ("softmax", "> late, top, m)", "> 1e9, top, m)"),
    "non-finite tiles not flagged": (
        "epilogue", "return (total != total) & rows.ok", "return (total != total) & (rows.row < 0)",
    ),
    "a capped maximum without its cap": ("softmax", "m += a.softcap", "m += 0.0"),
    "a list without entries is seen": ("consumer", "tile_list(a, w).entries > 0", "tile_list(a, w).entries >= 0"),
    "tiles that rules hide in part taken for whole": (
        "consumer", "right = gl.minimum(gl.maximum(begin + after(a, w, tiles, outer), start + 1), end)",
        "right = gl.minimum(start + 1, end)",
    ),
    "lists of the next rows": ("tiles", "        tile = w.top // a.S.BM\n", "        tile = w.top // a.S.BM // 2\n"),
    "the counter left as it is": ("nonfinite", "gl.store(a.COUNTER, 0)", "gl.store(a.COUNTER, 1)"),
}  # fmt: skip


def nonfinite():
    call = dense(Lq=200, Lk=200, H=1, causal=True)
    call.tensors.v[:, :, 150] = float("nan")
    return call


PROBES = (
    (lambda: dense(128, Lq=600, H=2, Lk=600), 3), (lambda: dense(128, Lq=600, H=3, Lk=600, causal=True), 2),
    (lambda: dense(128, Lq=300, H=1, Lk=300, window=(70, 0)), 2), (lambda: packed([5, 200, 129], [9, 260, 7]), 2),
    (nonfinite, 2), (CASES["blocks causal"], 2), (growing, 2), (CASES["softcap"], 2),
)  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_noticed(name):
    file, old, new = WRONG[name]
    kernels = gluon_sim.load({file: [(old, new)]})
    with pytest.raises((SimError, Mismatch)):
        run_probes(kernels)


def run_probes(kernels, probes=PROBES):
    for make, processors in probes:
        run(make(), kernels, processors=processors)


def test_the_probes_pass_as_they_are():
    run_probes(KERNELS)


def paired(*changes):
    """Kernels that carry weights in pairs, as they do with newer versions of Triton."""
    return gluon_sim.load({"mma": [("if PAIRED_WEIGHTS:", "if True:"), *changes]})


@pytest.mark.parametrize("options", [{"causal": True}, {"D": 320}, {"D": 512, "causal": True}], ids=str)
def test_weights_that_are_carried_in_pairs_are_the_same(options):
    """The mainloop's P, in one, two and four pieces: bit for bit."""
    kept, other = dense(**options), dense(**options)
    run(kept)
    run(other, paired())
    assert torch.equal(kept.tensors.out, other.tensors.out)


def test_pairs_that_are_the_wrong_way_round_are_noticed():
    with pytest.raises(Mismatch):
        run(dense(causal=True), paired(("gl.join(low, high)", "gl.join(high, low)")))


SMALL_GROWTH = ("softmax", "GROWTH = gl.constexpr(80.0)", "GROWTH = gl.constexpr(15.0)")  # what float16 has room for


def max_free(monkeypatch, *changes):
    """Kernels without maxima in tiles that every row sees; float16 stands in for bfloat16."""
    monkeypatch.setattr(config, "WIDE_RANGE", (torch.float16,))
    edits = {}
    for file, old, new in (SMALL_GROWTH, *changes):
        edits.setdefault(file, []).append((old, new))
    return gluon_sim.load(edits)


@pytest.mark.parametrize("name", [name for name in CASES if "blocks" not in name])
def test_tiles_that_every_row_sees_need_no_maximum(name, monkeypatch):
    kernels = max_free(monkeypatch)
    call = CASES[name]()
    assert run(call, kernels).bound.spec.max_free == config.max_free(call.problem)


@pytest.mark.parametrize(
    ("options", "change"),
    [
        # The first row sees nothing of the second tile of keys, and all of the first.
        ({"D": 128, "Lq": 130, "Lk": 257, "causal": True}, ("tile_scheduler", "full_hi -= 1", "full_hi -= 0")),
        # The first tile of a work tile comes beside the last P V of the one before.
        ({"Lq": 250, "Lk": 2176}, ("mma", "and not MASKED and not FIRST", "and not MASKED")),
    ],
)
def test_a_row_has_a_maximum_before_tiles_that_look_for_none(options, change, monkeypatch):
    """Without one its tile would be computed again, each time."""
    assert run(dense(**options), max_free(monkeypatch), processors=2).flagged == 0
    assert run(dense(**options), max_free(monkeypatch, change), processors=2).flagged > 0


def test_rows_that_are_computed_again_keep_their_bits(monkeypatch):
    """Where a value that they do not see is not finite, and where another row's logits grow too much.

    Those of lse: the simulator's products round as the rest of a matrix lets them.
    """
    kernels = max_free(monkeypatch)
    wrong = max_free(monkeypatch, ("nonfinite", "LATE, GROWTH)", "LATE, 2.0)"))
    for spoil in ("value", "row"):
        clean, other, by_wrong = (dense(128, Lq=300, Lk=500, H=1, causal=True) for _ in range(3))
        for call in (other, by_wrong):
            if spoil == "value":
                call.tensors.v[:, :, 300:] = float("nan")
            else:
                call.tensors.q[:, :, 100:] *= 20
        launches = [Launch(call) for call in (clean, other, by_wrong)]
        for launch, text in zip(launches, (kernels, kernels, wrong), strict=True):
            launch.run(text)
        assert launches[0].flagged == 0 < launches[1].flagged
        want, got, not_so = (call.tensors.lse[:, :, :100] for call in (clean, other, by_wrong))
        assert torch.equal(got, want)
        assert not torch.equal(not_so, want), "the test would not notice other arithmetic"


def growing_once():
    """Logits whose maxima grow by some powers of two between the first two tiles of keys."""
    call = dense(128, Lq=100, Lk=300, H=1, causal=True)
    call.tensors.k[:, :, 256:] *= 0.05
    return call


MAX_FREE_WRONG = {
    "rescaled twice": ("mma", "(p[0], gl.full_like(p[1], 1.0))", "p"),
    "not rescaled": ("mma", "return rescaled(a, o, p), (p[0]", "return o, (p[0]"),
    "no maxima where a tile is computed again": (
        "nonfinite",
        "weights(a, s, m, l, gl.where(exact, 0.0, late)",
        "weights(a, s, m, l, 1e9",
    ),
}


@pytest.mark.parametrize("name", MAX_FREE_WRONG)
def test_a_wrong_max_free_kernel_is_noticed(name, monkeypatch):
    probes = ((lambda: dense(64, Lq=250, Lk=2176, H=2), 2), (growing_once, 2), (lambda: growing(causal=True), 2))
    run_probes(max_free(monkeypatch), probes)
    with pytest.raises((SimError, Mismatch)):
        run_probes(max_free(monkeypatch, MAX_FREE_WRONG[name]), probes)


def large_values():
    """Logits that grow by 75 powers of two towards the keys visited last, and values that overflow times 2^75.

    float32 stands in for bfloat16, whose range it has.
    """
    g = torch.Generator().manual_seed(0)
    q = torch.ones(1, 1, 100, 128)
    k, v = (torch.randn(1, 1, 600, 128, generator=g) for _ in range(2))
    k = 0.1 * k + torch.linspace(52 / 128**0.5, 0, 600)[:, None]
    out = torch.full((1, 1, 100, 128), float("nan"))
    return calls.dense(q, k, 1e20 * v, Options(out=out, return_lse=True, causal=True, q_offset=550))


def test_weights_times_large_values_do_not_overflow(monkeypatch):
    monkeypatch.setattr(config, "WIDE_RANGE", (torch.float32,))
    assert run(large_values()).flagged > 0
    wrong = gluon_sim.load({"nonfinite": [("gl.where(exact, 0.0, late)", "late")]})
    with pytest.raises(Mismatch):
        run(large_values(), wrong)
