"""Functions judged beside torch's own arithmetic, as the conformance suite judges a backend."""

import torch

from tilewise.testing.check import judge, largest_error

DRAWS = 8  # inputs that torch's error is taken from: of few numbers it may be small by chance


class Formula(torch.autograd.Function):
    """softmax(s) v, whose backward pass has s, v, out and lse, and computes the weights again from them."""

    @staticmethod
    def forward(ctx, s, v):
        out, lse = s.softmax(-1) @ v, s.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(s, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        s, v, out, lse = ctx.saved_tensors
        p = (s - lse).exp()
        return p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)), p.mT @ dout


def sdpa(q, k, v, mask=None, is_causal=False, scale=None):
    """torch's function `[..., L, D]`, with fewer heads of k and v too, by torch's arithmetic and that formula."""
    if q.ndim == 4:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = (q.shape[-1] ** -0.5 if scale is None else scale) * (q @ k.mT)
    if is_causal:
        mask = torch.ones(s.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
    return Formula.apply(s, v)


def results(function, inputs, dout):
    """What a function gives, and the gradients of its inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout(out))]


def judge_beside(ours, plain, *inputs):
    """The output of `ours` and its inputs' gradients, against those of `plain` in float64: each may be twice as far off
    as `plain` is in the inputs' dtype, on these inputs and on others of the same elements in other places.
    """

    def dout(out):
        return torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)

    pairs = []
    for n in range(DRAWS):
        moved = [x.flatten().roll(7 * n).view_as(x) for x in inputs]
        pairs.append([results(plain, given, dout) for given in (moved, [x.double() for x in moved])])
    for i, got in enumerate(results(ours, inputs, dout)):
        want = pairs[0][1][i]
        assert got.shape == want.shape
        judge("out", got, want, 2 * max(largest_error(a[i], b[i]) for a, b in pairs), got.dtype)
        assert want.abs().max() > 0
