"""From a running state (m, l, acc) to an output row."""

import triton
import triton.language as tl

from .load import parts_of, start_of, width_of
from .scores import LOG2E


@triton.jit
def finish(m, l, acc, sink, SINKS: tl.constexpr):
    """The state with its sink, normalised; m in natural units. A row that saw nothing has l = 1, m = -inf, acc = 0."""
    if SINKS:
        top = tl.maximum(m, sink)
        base = tl.where(top == float("-inf"), 0.0, top)
        shrink = tl.exp2((m - base) * LOG2E)
        l = l * shrink + tl.exp2((sink - base) * LOG2E)
        m = top
    l = tl.where(l == 0, 1.0, l)
    result = ()
    for i in tl.static_range(len(acc)):
        x = acc[i]
        if SINKS:
            x = x * shrink[:, None]
        result = result + (x / l[:, None],)
    return m, l, result


@triton.jit
def store_acc(at, acc, ok, OP: tl.constexpr):
    """Rows `at` [BM] from chunks [BM, W], converted to the type of the memory."""
    for i in tl.static_range(len(OP.widths)):
        for part in tl.static_range(parts_of(OP)):
            d = tl.arange(0, width_of(OP, i))
            inside = ok[:, None] & (d < OP.columns - start_of(OP, i, 0))[None, :]
            x = acc[i * OP.parts + part]
            tl.store(at[:, None] + start_of(OP, i, part) + d[None, :], x.to(at.dtype.element_ty), mask=inside)
