"""Numbers of hardware barriers; warp_specialize takes those below 6."""

from triton.experimental.gluon import language as gl

U_EMPTY = gl.constexpr(6)  # to 8: by stage
W_EMPTY = gl.constexpr(9)  # to 11
P_READY = gl.constexpr(12)  # and 13: P is stored
