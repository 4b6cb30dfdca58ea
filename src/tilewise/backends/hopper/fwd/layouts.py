"""Register layouts of tiles in a warpgroup."""

from ...gpu.gluon import gl, gluon


@gluon.constexpr_function
def score_layout(S):
    """S [64, BN]: each row is held by four threads."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.BN, 16])


@gluon.constexpr_function
def out_layout(S):
    """O [64, DV]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.DV, 16])


@gluon.constexpr_function
def wide_layout(columns):
    """Rows of `columns`, eight elements per thread."""
    lanes = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def halves(x):
    """The left and the right half of 64 rows."""
    COLUMNS: gl.constexpr = x.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(x, [64, 2, COLUMNS]), (0, 2, 1)))
