"""A process that makes checks for `proving.py`, which a kernel that crashes or never ends cannot take with it.

It reads pickled checks from its standard input and writes what it found, as (word, detail, times), to its standard
output: LAUNCHED once kernels run, then "ok", "failed", "unsupported" or, if nothing can be said, "open". What else is
printed goes to standard error.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

import torch

from ..errors import Unsupported
from . import families
from .check import Mismatch
from .processes import LAST, LAUNCHED, READY

MOST_DETAIL = 300  # characters of an error


def main() -> None:
    """Makes checks on the device that the last argument names, until its input ends."""
    device, replies = sys.argv[-1], os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def reply(*words: Any) -> None:
        pickle.dump(words, replies)
        replies.flush()

    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
        torch.set_num_threads(1)  # there are several processes, and the GPU does the work
    reply(READY, "", None)
    while True:
        try:
            check = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            found = families.run(check, device, lambda: reply(LAUNCHED, "", None))
            if on_gpu:
                torch.cuda.synchronize()
        except Unsupported as error:
            reply("unsupported", _words(error), None)
        except Mismatch as error:
            reply("failed", _words(error), None)
        except Exception as error:
            says_nothing = isinstance(error, (MemoryError, torch.OutOfMemoryError, OSError))
            says_nothing |= "out of memory" in str(error).lower()  # Triton's launches raise other types
            if on_gpu:  # an error of the GPU fails all later calls of its process
                reply(LAST, "", None)
            reply("open" if says_nothing else "failed", f"{type(error).__name__}: {_words(error)}", None)
            if on_gpu:
                return
        else:
            reply("ok", *found)


def _words(error: Exception) -> str:
    """The first lines of an error, without the user's name in paths."""
    text, home = " ".join(str(error).split()), os.path.expanduser("~")
    return (text.replace(home, "~") if len(home) > 1 else text)[:MOST_DETAIL]
