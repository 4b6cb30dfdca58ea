"""Memory of a quantised cache: attention over it makes no copy at full width."""

import platform
import subprocess
import sys

import pytest

RUN = """
import sys, torch
from pathlib import Path
from tilewise import KVCache, PagedKVCache

kind, paged, queries = sys.argv[1], sys.argv[2] == "paged", int(sys.argv[3])
torch.set_num_threads(1)

def field(name):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(name))
    return int(line.split()[1]) * 1024

def filled(chunks):
    tokens = chunks * len(rows[0])
    if paged:
        cache = PagedKVCache(-(-tokens // 16), 16, 8, 128, kind)
        sequence = cache.create()
        for _ in range(chunks):
            cache.append(sequence, *rows)
        return cache, lambda q: cache.attend(sequence, q)
    cache = KVCache(1, 8, tokens, 128, kind)
    for _ in range(chunks):
        cache.append(*rows.transpose(1, 2)[:, None])
    return cache, cache.attend

rows = torch.randn(2, 2048, 8, 128)
q = torch.randn(1, 32, queries, 128)
filled(1)[1](q)  # compiled, and scratch memory is there
cache, attend = filled(48)
attend(q[:, :, :1])
Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
before = field("VmRSS")
attend(q)
print(cache.nbytes, field("VmHWM") - before)
"""


@pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("kind", "form", "queries"), [("int8", "rows", 1), ("int4", "paged", 1), ("fp8_e4m3", "paged", 16)]
)
def test_attention_adds_less_than_one_percent(kind, form, queries):
    run = subprocess.run([sys.executable, "-c", RUN, kind, form, str(queries)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    cache, added = map(int, run.stdout.split())
    assert cache > 100e6
    assert added < 0.01 * cache, f"{added / 1e6:.1f} MB beside a cache of {cache / 1e6:.0f} MB"
