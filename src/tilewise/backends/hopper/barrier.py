"""The barrier of a partition's threads, by its name in the installed Triton."""

from triton.experimental.gluon import language as gl

thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # the name since Triton 3.7
