"""Numbers of named barriers; warp_specialize uses those below 6."""

from ....gpu.gluon import gl

U_EMPTY = gl.constexpr(6)  # to 8: by stage
W_EMPTY = gl.constexpr(9)  # to 11
P_READY = gl.constexpr(12)  # and 13: P is stored
P_EMPTY = gl.constexpr(14)  # and 15: P has been read
DS_READY = gl.constexpr(11)  # dS is stored; not used where named barriers release rings
