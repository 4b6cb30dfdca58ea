"""Small loops over arrays: pages for new tokens, the tables of a step, the merge of a cascade.

A backend compiles them if it can, since a hundred NumPy calls would be too slow for a step of 64 sequences. Without one
they run as plain Python, slowly, with the same result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

from ..dispatch import planner


@cache
def compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    """A loop of this file, compiled if a backend can."""
    return planner.compile_loop(loop)


def count_pages(slots: Any, new: Any, length: Any, table: Any, refs: Any, node_of: Any, page_size: Any, copied: Any):  # type: ignore[no-untyped-def]
    """Counts for new tokens: pages wanted, pages of the longest sequence, and writes into pages of the prefix index.

    A partly filled page that is shared and written counts as one more: its writer gets a copy, and `copied[b]` is set.
    If all sequences that share a page write to it, the last of them keeps it.
    """
    wanted, longest, known = 0, 0, 0
    for b in range(len(slots)):
        old = length[slots[b]]
        have, want = (old + page_size - 1) // page_size, (old + new[b] + page_size - 1) // page_size
        wanted += want - have
        longest = max(longest, want)
        copied[b] = False
        if old % page_size and new[b]:
            page = table[slots[b], have - 1]
            if refs[page] > 1:
                wanted += 1
                copied[b] = True
                refs[page] -= 1  # for the sequences after it; restored below
            elif node_of[page]:
                known += 1
    for b in range(len(slots)):
        if copied[b]:
            refs[table[slots[b], (length[slots[b]] - 1) // page_size]] += 1
    return int(wanted), int(longest), int(known)  # NumPy integers if not compiled


def give_pages(  # type: ignore[no-untyped-def]
    slots: Any, new: Any, length: Any, table: Any, refs: Any, page_size: Any, copied: Any, fresh: Any, changes: Any,
    starts: Any, cu: Any, lengths: Any, version: Any,
):  # fmt: skip
    """Gives `fresh` pages to sequences, as `count_pages` counted: new pages, and copies, which come first in `changes`.

    `changes[i]` is the row and column of a table, the page there now, and the page that it is a copy of. Returns the
    number of copies. Writes `starts`, the sums `cu` and the new `lengths`, and increments the version of sequences with
    new tokens.
    """
    taken = 0
    for b in range(len(slots)):
        if copied[b]:
            slot = slots[b]
            column = (length[slot] - 1) // page_size
            source = table[slot, column]
            refs[source] -= 1
            table[slot, column] = fresh[taken]
            changes[taken, 0], changes[taken, 1], changes[taken, 2] = slot, column, fresh[taken]
            changes[taken, 3] = source
            taken += 1
    copies = taken
    total = 0
    for b in range(len(slots)):
        slot = slots[b]
        old, after = length[slot], length[slot] + new[b]
        for column in range((old + page_size - 1) // page_size, (after + page_size - 1) // page_size):
            table[slot, column] = fresh[taken]
            changes[taken, 0], changes[taken, 1], changes[taken, 2] = slot, column, fresh[taken]
            taken += 1
        length[slot] = after
        if new[b]:
            version[slot] += 1
        starts[b], cu[b], lengths[b] = old, total, after
        total += new[b]
    cu[len(slots)] = total
    return copies


def note_ids(  # type: ignore[no-untyped-def]
    slots: Any, starts: Any, new: Any, table: Any, known: Any, depth: Any, ids: Any, page_ids: Any, page_size: Any,
    full: Any,
):  # fmt: skip
    """Stores the ids of new tokens in their pages. `full[b]`: pages with known ids, if more than are indexed."""
    at = 0
    for b in range(len(slots)):
        slot = slots[b]
        for position in range(starts[b], starts[b] + new[b]):
            page_ids[table[slot, position // page_size], position % page_size] = ids[at]
            at += 1
        if known[slot] == starts[b]:
            known[slot] = starts[b] + new[b]
        pages = known[slot] // page_size
        full[b] = pages if pages > depth[slot] else 0


def mark_written(written: Any, slots: Any, starts: Any, lengths: Any):  # type: ignore[no-untyped-def]
    """Marks tokens from `starts` to `lengths` as written, unless earlier ones are not.

    Returns the first sequence with unwritten tokens, or the number of sequences.
    """
    first = len(slots)
    for b in range(len(slots) - 1, -1, -1):
        if written[slots[b]] == starts[b]:
            written[slots[b]] = lengths[b]
        if written[slots[b]] < lengths[b]:
            first = b
    return first


def copy_rows(table: Any, slots: Any, to: Any):  # type: ignore[no-untyped-def]
    """Copies some rows of a table."""
    for b in range(len(slots)):
        for j in range(to.shape[1]):
            to[b, j] = table[slots[b], j]


def merge_rows(out: Any, lse: Any, other: Any, other_lse: Any):  # type: ignore[no-untyped-def]
    """`tilewise.merge` of two states in float32, into the first: `[rows, Dv]` and `[rows]`."""
    for r in range(len(lse)):
        if other_lse[r] == -math.inf:
            continue
        top = max(lse[r], other_lse[r])
        mine, its = math.exp(lse[r] - top), math.exp(other_lse[r] - top)  # one of them is 1
        if top == math.inf:  # of a sink that takes all weight
            mine, its = 1.0 if lse[r] == top else 0.0, 1.0 if other_lse[r] == top else 0.0
        total = mine + its
        mine, its = mine / total, its / total
        if mine == 0:  # an empty state: its row may hold anything
            for d in range(out.shape[1]):
                out[r, d] = other[r, d]
        else:
            for d in range(out.shape[1]):
                out[r, d] = mine * out[r, d] + its * other[r, d]
        lse[r] = top + math.log(total)
