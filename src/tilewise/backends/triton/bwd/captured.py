"""Gradients of what functions of the user load from captured tensors: terms of a tile, and their sums."""

import triton.language as tl

import triton


@triton.constexpr_function
def count_loads(spec):
    """The loads whose gradients a kernel sums."""
    return spec.loads


@triton.jit
def times(dl, slope):
    """dl times a derivative, but 0 where dl is 0: in a hidden cell the derivative may be NaN."""
    return tl.where(dl == 0, 0.0, dl * slope)


@triton.jit
def empty_terms(N: tl.constexpr, S: tl.constexpr):
    """Sums [N] of the gradients of each load."""
    sums = ()
    for _ in tl.static_range(count_loads(S)):
        sums = sums + (tl.zeros([N], tl.float32),)
    return sums


@triton.jit
def add_terms(sums, terms):
    """Adds the row sums of gradients of loads."""
    added = ()
    for i in tl.static_range(len(sums)):
        added = added + (sums[i] + tl.sum(terms[i], 1),)
    return added
