"""Calls of compiled functions by their address."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def _caller(count: int) -> Any:
    """Calls a compiled function of `count` int64 by its address, the first argument."""
    names = ", ".join(f"a{i}" for i in range(count))

    def typed(fn: Any, *args: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * count)
            builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
            return context.get_dummy_value()

        return types.void(*[types.int64] * (count + 1)), codegen

    scope: dict[str, Any] = {"typed": typed}
    exec(f"def call(typingctx, fn, {names}):\n    return typed(fn, {names})", scope)  # Numba counts arguments
    return intrinsic(scope["call"])


call_nothing, call_kernel, call_mainloop, call_parallel, call_matrix, call_pv, call_qk = map(
    _caller, (0, 2, 3, 4, 10, 11, 12)
)
call_mod_rows, call_mod_columns = map(_caller, (11, 13))
