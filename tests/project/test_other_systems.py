"""Windows and macOS, as far as Linux can say: what they lack is taken away, and everything still works."""

import os
import subprocess
import sys

import pytest

from tilewise.core.cache_home import cache_home

# Before tilewise is imported: no owners of files, no links to be refused, no folders as descriptors, no /proc (so no
# GNU OpenMP to be found there), no forks to be told of, no list of cores, no locks of files.
WITHOUT = r"""
import builtins, io, os, pathlib, platform, sys, warnings
import numba, torch
warnings.simplefilter("error")
system = sys.argv[1]
sys.platform = {"Windows": "win32", "Darwin": "darwin"}[system]
platform.system = lambda: system
for name in ("sched_getaffinity",) + (("getuid", "register_at_fork", "O_NOFOLLOW", "O_DIRECTORY", "fork", "geteuid")
                                      if system == "Windows" else ()):
    if hasattr(os, name):
        delattr(os, name)
opened, read_text, plain_open = os.open, pathlib.Path.read_text, builtins.open
def no_descriptors(path, flags, mode=0o777, *, dir_fd=None):
    if dir_fd is not None:
        raise NotImplementedError("dir_fd")
    if os.path.isdir(path):
        raise PermissionError(13, "a folder", path)
    return opened(path, flags, mode)
def no_proc(path, *args, **kwargs):
    if str(path).startswith("/proc"):
        raise FileNotFoundError(2, "none here", str(path))
    return read_text(path, *args, **kwargs)
if system == "Windows":
    os.open = no_descriptors
    sys.modules["fcntl"] = None  # no locks of files
pathlib.Path.read_text = no_proc
"""
WORKS = (
    WITHOUT
    + r"""
import tilewise
from tilewise.backends.cpu import openmp
from tilewise.core.cache_home import cache_home
from tilewise.tools.doctor import examine, lines

assert openmp.find_parallel() is None
torch.set_num_threads(2)
torch.manual_seed(0)
q, k, v = torch.randn(3, 2, 4, 300, 64).unbind(0)
want = torch.nn.functional.scaled_dot_product_attention(q, k, v)
for rows in (300, 1):
    out = tilewise.attention(q[:, :, :rows], k, v, backend="cpu")
    assert float((out - want[:, :, :rows]).abs().max()) < 1e-4
cache = tilewise.KVCache(batch=1, kv_heads=2, head_dim=64, capacity=32, dtype=torch.float32)
cache.append(k[:1, :2, :9], v[:1, :2, :9])
file = os.path.join(os.environ["HERE"], "cache.safetensors")
cache.save(file)
assert torch.equal(tilewise.KVCache.load(file).attend(q[:1, :, :1]), cache.attend(q[:1, :, :1]))
del os.environ["TILEWISE_CACHE_DIR"]
os.environ.pop("LOCALAPPDATA", None)
assert cache_home().name == "tilewise"
print("\n".join(lines(examine())))
"""
)


@pytest.mark.parametrize("system", ["Windows", "Darwin"])
def test_it_works_without_what_linux_has(system, tmp_path):
    env = os.environ | {
        "HERE": str(tmp_path),
        "TILEWISE_CACHE_DIR": str(cache_home()),
    }  # where kernels are kept already
    done = subprocess.run([sys.executable, "-c", WORKS, system], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
