"""Odd processes: forked ones, and those in which Numba is missing or broken."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tilewise.core import forks

DEADLINE = 300  # seconds for what takes two: a hang must end the test


def run(code):
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


FORK = """
    import os, signal, sys, torch
    {early}
    torch.set_num_threads(2)
    a = torch.randn(700, 700)
    a @ a  # torch's threads are there now
    q, k = 3 * torch.randn(1, 8, 1, 64), torch.randn(1, 8, 4000, 64)
    child = os.fork()
    if child == 0:
        signal.alarm({deadline})  # torch would wait for ever
        import tilewise
        from tilewise.backends.cpu.threads import pool
        plan = tilewise.plan(q, k, k, backend="cpu")
        assert "2 threads" in plan.kernel, plan.kernel
        for _ in range(3):
            got = tilewise.attention(q, k, k, backend="cpu", return_lse=True)
        assert pool.parallel is None
        torch.set_num_threads(1)  # torch's own operations would wait too
        from tilewise.testing.case import Inputs
        from tilewise.testing.check import check_call
        check_call(Inputs(tilewise.attention, (q, k, k), {{}}).checked(), *got)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    print("fine")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
@pytest.mark.parametrize("early", ["import tilewise", ""], ids=["tilewise before the fork", "tilewise after the fork"])
def test_the_first_call_of_a_forked_child(early):
    if not early and not Path("/proc/self/stat").exists():
        pytest.skip("only Linux tells that a process was forked")
    assert "fine" in run(FORK.format(early=early, deadline=DEADLINE - 60))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_gradients_in_a_forked_child_of_one_thread():
    """The remedy that the documents give."""
    code = """
        import os, signal, torch, tilewise
        torch.set_num_threads(2)
        def gradients():
            q = torch.linspace(-1, 1, 8 * 300 * 64).sin().view(1, 8, 300, 64).requires_grad_()
            tilewise.attention(q, q, q, causal=True).square().sum().backward()
            return q.grad
        want = gradients()
        child = os.fork()
        if child == 0:
            signal.alarm({deadline})
            torch.set_num_threads(1)
            os._exit(0 if torch.allclose(gradients(), want, atol=1e-5) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """
    run(code.format(deadline=DEADLINE - 60))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_fork_before_torch_costs_nothing():
    """torch's threads begin in the child: they may be used there."""
    code = """
        import os
        child = os.fork()
        if child == 0:
            import tilewise
            from tilewise.core import forks
            os._exit(5 if forks.forked else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """
    run(code)
    assert not forks.forked


SERVED = """
    import sys, warnings
    {breaks}
    import torch, tilewise
    from tilewise import KVCache, PagedKVCache, Quantised, Unsupported, attention, plan, varlen_attention
    from tilewise.testing.case import Inputs
    from tilewise.testing.check import check_call

    torch.manual_seed(0)
    q, k, v = 3 * torch.randn(1, 4, 3, 64), *torch.randn(2, 1, 2, 50, 64)
    chosen = plan(q, k, v)
    assert chosen.backend == "torch", chosen
    assert {reason!r} in dict(chosen.passed_over)["cpu"], chosen.passed_over
    assert {reason!r} in str(chosen)

    def right(entry, *args, state=None, **options):
        inputs = Inputs(entry, args, options)
        check_call(inputs.checked(), *inputs.common_state(state or entry(*args, return_lse=True, **options)))

    for _ in range(2):
        right(attention, q, k, v, causal=True)
    right(attention, q, *(Quantised.from_float(x, "int8") for x in (k, v)))
    cu = [torch.tensor([0, n], dtype=torch.int32) for n in (3, 50)]
    right(varlen_attention, *(x[0].transpose(0, 1) for x in (q, k, v)), *cu)
    try:
        attention(q, k, v, backend="cpu")
    except Unsupported as error:
        assert {reason!r} in str(error), error
    else:
        raise AssertionError

    for dtype in ("f32", "int8", "int4"):
        cache = KVCache(1, 2, 64, 64, dtype)
        cache.append(k, v)
        assert cache.attend(q).isfinite().all()
        pool = PagedKVCache(20, 4, 2, 64, dtype)
        a = pool.create()
        pool.append(a, k[0].transpose(0, 1), v[0].transpose(0, 1), tokens=list(range(50)))
        b = pool.fork(a)
        for s in (a, b):
            pool.append(s, *torch.randn(2, 1, 2, 64))
        two = 3 * torch.randn(2, 4, 1, 64)
        for cascade in (True, False):
            state = pool.attend([a, b], two, cascade=cascade, return_lse=True)
            for i, s in enumerate((a, b)):
                keys, values, own = pool.keys(s)[None], pool.values(s)[None], slice(i, i + 1)
                right(attention, two[own], keys, values, state=(state.out[own], state.lse[own]))
    from tilewise.tools.cli import main
    assert main(["warmup"]) == 1
    print("fine")
"""


def test_without_numba():
    text = run(SERVED.format(breaks='sys.modules["numba"] = None', reason="numba is not installed"))
    assert "the CPU kernels cannot be compiled: numba is not installed" in text
    assert "fine" in text


@pytest.mark.parametrize(
    "error", ["ImportError('Numba needs NumPy 2.3 or less')", "OSError('no LLVM')", "SystemError('bad')"]
)
def test_with_a_numba_that_cannot_be_imported(tmp_path, error):
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text(f"raise {error}")
    reason = f"numba cannot be imported ({error.partition('(')[0]}: "
    assert "fine" in run(SERVED.format(breaks=f"sys.path.insert(0, {str(tmp_path)!r})", reason=reason))
