"""Beside the Hopper backward kernel, in Triton's interpreter: the non-finite fix-up, the list of key blocks."""

import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from interpreted import interpreted


def test_in_the_interpreter():
    done = interpreted(Path(__file__))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all right" in done.stdout


def fixed_up(case):
    """Gradients by the fix-up alone, of inputs with NaN in every hidden place."""
    import torch

    from tilewise.backends.gpu.launch_program import Workspaces
    from tilewise.backends.hopper.bwd.launch import launcher_of
    from tilewise.backends.hopper.bwd.nonfinite import fix_up
    from tilewise.testing.gradients import judge_gradients, make_gradients

    made = make_gradients(case, grads=("q", "k", "v", "mask") if case.mask == "bhqk" else ("q", "k", "v"))
    t = made.call.tensors
    for x in t.gradients().values():
        x.fill_(float("nan"))
    launcher = launcher_of(made.call.problem)
    given = launcher.tensors(t, Workspaces(t.dout.device))
    given["FLAG"].fill_(0)
    arguments = launcher.arguments(given) | launcher.fix_up.constants
    arguments = {name: arguments[name] for name in fix_up.arg_names}
    fix_up[(3,)](**arguments)
    assert all(x.isnan().all() for x in t.gradients().values())  # nothing was flagged
    given["FLAG"].fill_(1)
    fix_up[(3,)](**arguments)
    if case.form == "varlen":  # rows of no sequence are cleared by another kernel
        for name, cu in (("q", given["CU_Q"]), ("k", given["CU_K"]), ("v", given["CU_K"])):
            t.gradients()[name][:, :, int(cu[-1]) :] = 0
    assert all(torch.isfinite(x).all() for x in t.gradients().values())
    judge_gradients(made, t.gradients())


def statistics(case, huge):
    """Rows of a masked call: -lse, -delta; what the scores' product takes off; blocks of a huge lse."""
    import torch

    from tilewise.backends.gpu.launch_program import Workspaces
    from tilewise.backends.hopper.bwd.launch import launcher_of
    from tilewise.backends.hopper.bwd.prepost import preprocess
    from tilewise.testing.check import judge, largest_error
    from tilewise.testing.gradients import make_gradients

    call = make_gradients(case).call
    p, t = call.problem, call.tensors
    launcher = launcher_of(p)
    given = launcher.tensors(t, Workspaces(t.dout.device))
    given["SHARES"] = None if t.dsinks is None else torch.zeros(launcher.blocks)
    given["LSE2"].fill_(float("nan"))
    given["HUGE"].fill_(-1)
    for name in ("SEMAPHORES", "COUNTER", "FLAG"):  # memory that others have used
        given[name].fill_(7)
    arguments = launcher.arguments(given) | {"D": launcher.arguments(given)["D_V"]}
    preprocess[launcher.longest, p.batch * p.heads](**{name: arguments[name] for name in preprocess.arg_names})
    assert not any(given[name][: launcher.blocks].any() for name in ("SEMAPHORES", "COUNTER", "FLAG"))
    room, seen = launcher.longest * launcher.BM, t.forward.lse.isfinite()
    plain, exact = (
        torch.where(seen, t.dlse.to(dtype) - (t.dout.to(dtype) * t.forward.out.to(dtype)).sum(-1), 0)
        for dtype in (torch.float32, torch.float64)
    )
    factors = torch.tensor([2.0 ** (10 - 10 * n) for n in range(4)] + [0.0] * 12, dtype=torch.float64)
    lse = given["LSE2"].view(p.batch, p.heads, room)
    taken, delta = ((given["STATS"][:, n : n + 16].double() @ factors).view(p.batch, p.heads, room) for n in (0, 16))
    assert torch.equal(lse[:, :, : p.q_len], torch.where(seen, -t.forward.lse, -torch.inf))
    judge("delta", delta[:, :, : p.q_len], exact, 2 * largest_error(plain, exact), torch.float32)
    assert (lse[:, :, p.q_len :] == -torch.inf).all()
    assert (delta[:, :, p.q_len :] == 0).all()
    assert set(given["HUGE"][: launcher.blocks].tolist()) == {int(huge)}
    taken = taken[:, :, : p.q_len]
    minus = -t.forward.lse.double() / p.scale
    if huge:  # the product takes off nothing
        assert (taken == 0).all()
    else:
        assert ((taken - minus).abs() <= minus.abs() * 2.0**-22)[seen].all()
        assert (taken[~seen] < -1e7).all()


def unseen(case):
    """dQ of query blocks that no key block adds to is 0 before the kernel; others are left to it."""
    from itertools import product

    from tilewise.backends.gpu.launch_program import Workspaces
    from tilewise.backends.hopper.bwd import config
    from tilewise.backends.hopper.bwd.launch import launcher_of
    from tilewise.backends.hopper.bwd.prepost import preprocess
    from tilewise.testing.gradients import make_gradients

    config.converts = config.persistent = lambda problem: True
    config.splits_of = lambda problem, target: 1
    call = make_gradients(case, grads=("q", "k", "v")).call
    p, t = call.problem, call.tensors
    launcher = launcher_of(p)
    assert launcher.spec.converts
    given = launcher.tensors(t, Workspaces(t.dout.device))
    given["DQ"].fill_(float("nan"))
    arguments = launcher.arguments(given)
    preprocess[launcher.longest, p.batch * p.heads](**{name: arguments[name] for name in preprocess.arg_names})
    left, right = config.sides(p)
    found = set()
    for seq, i in product(range(p.batch), range(launcher.longest)):
        starts = [0, 0]
        rows, keys = p.q_len, p.kv_len
        if p.packed_q:
            ends = [cu.tolist() for cu in (t.forward.cu_seqlens_q, t.forward.cu_seqlens_k)]
            starts = [x[seq] for x in ends]
            rows, keys = (x[seq + 1] - x[seq] for x in ends)
        if t.forward.kv_lengths is not None:
            keys = int(t.forward.kv_lengths[seq])
        if i * launcher.BM >= rows:
            continue
        shift = p.rules.q_offset if isinstance(p.rules.q_offset, int) else keys - rows
        row = range(i * launcher.BM, (i + 1) * launcher.BM)
        # Whole blocks count, as the kernel takes them.
        blocks = [n * 128 - shift for n in range(-(-keys // 128))]
        seen = any(row[-1] >= key - right and row[0] <= key + 127 + left for key in blocks)
        dq = given["DQ"][0 if p.packed_q else seq, :, starts[0] + row[0] : starts[0] + min(row[-1] + 1, rows)]
        assert bool(dq.isnan().all() if seen else (dq == 0).all()), (seq, i)
        found.add(seen)
    assert found == {True, False}


def combined(case, splits):
    """dK and dV of split key blocks are the sums of their partials, in order."""
    from types import SimpleNamespace

    import torch

    from tilewise.backends.gpu.launch_program import Workspaces
    from tilewise.backends.hopper.bwd import config
    from tilewise.backends.hopper.bwd.launch import launcher_of
    from tilewise.testing.gradients import make_gradients

    config.splits_of = lambda problem, target: splits
    call = make_gradients(case).call
    launcher = launcher_of(call.problem)
    given = launcher.tensors(call.tensors, Workspaces(call.tensors.dout.device))
    steps = []
    recorder = SimpleNamespace(launch=lambda *launch: steps.append(launch))
    launcher.launch_main(recorder, given, launcher.arguments(given))
    kernel, grid, arguments = next(x for x in steps if x[0] is launcher.combine)
    want = []
    for name in ("DK", "DV"):
        partials = given[f"{name}_PARTIALS"].normal_()
        given[name].fill_(float("nan"))
        B, Hkv, Lk, D = given[name].shape
        total = torch.zeros(B, Hkv, Lk, D)
        for split in range(splits):
            total += partials.view(B, Hkv, splits, Lk, -1)[:, :, split, :, :D]
        want.append(total.to(given[name].dtype))
    kernel.launch(grid, kernel.arguments(arguments))
    assert all(torch.equal(given[name], x) for name, x in zip(("DK", "DV"), want, strict=True))


def listed():
    import torch

    from tilewise.backends.hopper.bwd.prepost import list_blocks

    for lengths in ([300, 0, 1, 128, 129], [5], [0, 0, 64], [1] * 300 + [500]):
        cu = torch.tensor([0, *lengths]).cumsum(0).int()
        slots = int(cu[-1]) // 128 + len(lengths)
        table = torch.full((slots, 2), -7, dtype=torch.int32)
        list_blocks[(-(-slots // 128),)](cu, table, len(lengths), slots, BN=128, SLOTS=128, RUN=256)
        want = [(b, n) for b, length in enumerate(lengths) for n in range(-(-length // 128))]
        assert len(want) <= slots
        assert table[: len(want)].tolist() == [list(x) for x in want]
        assert (table[len(want) :, 1] * 128 > max(lengths)).all()


if __name__ == "__main__":
    from tilewise.testing.case import Case

    common = {"dtype": "f16", "D": 64}
    fixed_up(Case(B=1, Hkv=2, Lq=90, causal=True, **common))
    fixed_up(Case(B=1, H=2, Lq=50, causal=True, softcap=5.0, **common))
    fixed_up(Case(B=1, H=2, Lq=70, Lk=100, window=(20, 5), **common))
    fixed_up(Case(B=3, H=2, Lq=40, Lk=90, lengths=(90, 0, 44), causal=True, **common))
    fixed_up(Case(B=2, H=2, form="varlen", q_lengths=(70, 33), lengths=(70, 90), causal=True, dtype="f16", D=40))
    fixed_up(Case(B=1, H=2, Lq=40, Lk=60, causal=True, dtype="f16", D=192, Dv=128))
    fixed_up(Case(B=1, H=1, Lq=40, window=(9, 3), softcap=5.0, dtype="f16", D=264))
    fixed_up(Case(B=2, H=2, Lq=70, Lk=100, mask="bhqk", mask_kind="f16", pattern="rows", causal=True, **common))
    fixed_up(Case(B=3, H=1, Lq=40, Lk=104, mask="bhqk", mask_kind="f16", lengths=(104, 0, 37), **common))
    fixed_up(Case(B=2, H=2, Lq=40, mask="hqk", mask_kind="f32", softcap=5.0, **common))
    fixed_up(Case(B=1, H=2, Lq=40, mask="bhqk", mask_kind="f32", pattern="least", softcap=5.0, **common))
    statistics(Case(B=1, H=2, Lq=150, mask="qk", mask_kind="f16", pattern="rows", sinks=True, **common), False)
    statistics(Case(B=2, H=1, Lq=70, mask="qk", mask_kind="f16", pattern="least", dtype="f16", D=128), True)
    statistics(Case(B=1, H=1, Lq=70, mask="qk", mask_kind="f32", pattern="least", **common), True)
    statistics(Case(B=1, H=1, Lq=70, mask="qk", mask_kind="f16", softcap=5.0, **common), True)
    listed()
    combined(Case(B=2, H=4, Hkv=2, Lq=150, Lk=77, dtype="f16", D=40), 3)
    combined(Case(B=1, H=2, Lq=200, Lk=130, causal=True, dtype="f16", D=128), 2)
    unseen(Case(B=3, H=2, Lq=300, Lk=200, lengths=(200, 0, 44), causal=True, **common))
    unseen(Case(B=1, H=1, Lq=700, Lk=150, causal=True, window=(99, None), offset=0, dtype="f16", D=128))
    unseen(Case(B=3, H=1, form="varlen", q_lengths=(400, 33, 5), lengths=(70, 90, 0), causal=True, dtype="f16", D=128))
    print("all right")
