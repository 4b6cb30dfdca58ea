"""JAX arrays in, JAX arrays out, over the same memory; and a tilewise call inside `jax.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tilewise import InvalidArgument, Quantised, attention, paged_attention, varlen_attention
from tilewise.core.arrays import to_tensor
from tilewise.core.options import Options
from tilewise.testing.check import check_call
from tilewise.validation import calls


def normal(*shape, seed=0, dtype=jnp.float32):
    return (jax.random.normal(jax.random.key(seed), shape) * 1.7).astype(dtype)


def check(call, out, lse):
    """At most twice torch's own error; `out` and `lse` as `[B, H, L, ...]`."""
    check_call(call, *(torch.from_numpy(np.array(x)) for x in (out, lse)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_type(dtype):
    q, k, v = (normal(2, h, n, 16, seed=i, dtype=dtype) for i, (h, n) in enumerate(((4, 5), (2, 9), (2, 9))))
    lengths, mask, sinks = jnp.array([9, 3], dtype=jnp.int32), jnp.tril(jnp.ones((5, 9), bool), 4), jnp.arange(4.0)
    out, lse = attention(q, k, v, mask=mask, kv_lengths=lengths, sinks=sinks, return_lse=True)
    assert isinstance(out, jax.Array)
    assert isinstance(lse, jax.Array)
    assert out.dtype == dtype
    bits = [torch.from_numpy(np.array(x, dtype=np.float32)).to(getattr(torch, dtype)) for x in (q, k, v)]
    options = {"mask": torch.ones(5, 9, dtype=torch.bool).tril(4), "kv_lengths": torch.tensor([9, 3])}
    want = attention(*bits, sinks=torch.arange(4.0), return_lse=True, **options)
    np.testing.assert_array_equal(np.asarray(out, dtype=np.float32), want.out.float().numpy())
    np.testing.assert_array_equal(np.asarray(lse), want.lse.numpy())


def test_they_are_not_written():
    """They do not change, and others may share them."""
    x = normal(1, 1, 2, 4)
    out = jnp.zeros((1, 1, 2, 4))
    with pytest.raises(InvalidArgument, match="out: got a JAX array, expected one that can be written"):
        attention(x, x, x, out=out)
    assert not out.any()


def test_nothing_is_copied_on_the_way_in():
    x = normal(3, 4)
    assert to_tensor("x", x).data_ptr() == x.unsafe_buffer_pointer()


def test_other_entry_points():
    q, k, v = (normal(7, 2, 8, seed=i) for i in range(3))
    cu = jnp.array([0, 3, 7], dtype=jnp.int32)
    out, lse = varlen_attention(q, k, v, cu, cu, causal=True, return_lse=True)
    call = calls.varlen(q, k, v, cu, cu, Options(causal=True))
    check(call, out.swapaxes(0, 1)[None], lse.swapaxes(0, 1)[None])
    pages = normal(2, 3, 4, 2, 8, seed=4)
    table, lengths = jnp.array([[2, 0]], dtype=jnp.int32), jnp.array([7], dtype=jnp.int32)
    q = q[None, :1].swapaxes(1, 2)
    step = paged_attention(q, pages[0], pages[1], table, lengths, return_lse=True)
    rows = [x[jnp.array([2, 0])].reshape(8, 2, 8)[:7].swapaxes(0, 1)[None] for x in pages]
    check(calls.dense(q, *rows, Options()), *step)
    packed = Quantised.from_float(normal(1, 2, 9, 64), "int8")
    assert isinstance(attention(normal(1, 2, 3, 64), packed, packed), jax.Array)


def test_inside_jit():
    """A call to Python in the middle of a compiled function."""

    def attend(q, k, v):
        shapes = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:-1], q.dtype)
        return jax.pure_callback(
            lambda *x: tuple(attention(*map(np.asarray, x), causal=True, return_lse=True)), shapes, q, k, v
        )

    q, k, v = (normal(1, 4, 6, 16, seed=i) for i in range(3))
    got = jax.jit(lambda q, k, v: [x * 2 for x in attend(q * 2, k, v)])(q, k, v)
    check(calls.dense(q * 2, k, v, Options(causal=True)), *(x / 2 for x in got))


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, lambda f: jax.grad(lambda *x: f(*x).sum())])
def test_tracers_are_refused_with_the_recipe(transform):
    q = normal(2, 1, 4, 6, 16)
    with pytest.raises(InvalidArgument, match=r"^q: got a JAX tracer.*jax\.pure_callback"):
        transform(lambda q, k, v: attention(q, k, v))(q, q, q)
