"""`examples/parallel.py` over two processes: sharded sequences, and `tp_plan="auto"`, as one process does it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import distributed as dist

from ranks import Pool

EXAMPLES = str(Path(__file__).resolve().parents[2] / "examples")
LENGTH = ["--length", "63", "--steps", "3"]  # an odd number of tokens: parts that differ
GENERATE = ["generate", "--steps", "6"]


def _example(words):
    """What `main` returns on a rank, in the environment that torchrun gives it."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # asked for, and not used: there is a group
    if EXAMPLES not in sys.path:
        sys.path.insert(0, EXAMPLES)
    import parallel
    import transformers

    transformers.logging.set_verbosity_error()
    return parallel.main(words)


@pytest.mark.slow
def test_two_processes_do_what_one_does():
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")  # transformers asks for it where a plan shards a model
    with Pool(1) as one, Pool(2) as two:
        want = one(_example, ["train", *LENGTH])[0]
        assert want[0][0] > want[-1][0]
        for words in (["train", *LENGTH], ["train", "--accelerate", *LENGTH]):
            for found in two(_example, words):
                assert found == [pytest.approx(step, rel=1e-4) for step in want]
        (tokens, rows), *others = one(_example, GENERATE) + two(_example, GENERATE)
        assert len(set(tokens[7:])) > 1
        assert others == [(tokens, rows // 2)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--accelerate",)])
def test_no_thread_of_the_process_group_is_left(words):
    """Python aborts at its exit if such a thread then frees a tensor."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    script = f"""
import parallel
parallel.main({["train", *LENGTH, *words]})
print(*(path.read_text() for path in __import__("pathlib").Path("/proc/self/task").glob("*/comm")))
"""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    path = os.pathsep.join([EXAMPLES, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **alone, "PYTHONPATH": path, "ACCELERATE_USE_CPU": "1"}
    out = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert "loss" in out.stdout
    assert "gloo" not in out.stdout
