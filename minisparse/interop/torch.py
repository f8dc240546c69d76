"""A sparse layer for PyTorch that runs on minisparse's CPU kernels.

Values and activations stay PyTorch's: the kernels read and write their memory.  The two functions
here differentiate into each other, so that derivatives of any order come from PyTorch's engine.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from .. import kernels
from ..pattern import Pattern


class _SpMM(torch.autograd.Function):
    """``A X``, or ``Aᵀ X``, where A has `values` on `pattern`."""

    @staticmethod
    def forward(ctx, values, x, pattern, transpose):
        ctx.save_for_backward(values, x)
        ctx.structure = pattern, transpose
        plan = pattern.plan_T if transpose else pattern.plan
        return torch.from_numpy(kernels.spmm(plan, values.detach().numpy(), x.detach().numpy()))

    @staticmethod
    def backward(ctx, g):
        (values, x), (pattern, transpose) = ctx.saved_tensors, ctx.structure
        if all(ctx.needs_input_grad[:2]) and not torch.is_grad_enabled():  # one walk for both
            plans = (pattern.plan, pattern.plan_T)[:: -1 if transpose else 1]
            arrays = (t.detach().numpy() for t in (values, x, g))
            return *map(torch.from_numpy, kernels.spmm_vjp(*plans, *arrays)), None, None
        u, v = (x, g) if transpose else (g, x)
        dvalues = _SDDMM.apply(u, v, pattern) if ctx.needs_input_grad[0] else None
        dx = _SpMM.apply(values, g, pattern, not transpose) if ctx.needs_input_grad[1] else None
        return dvalues, dx, None, None


class _SDDMM(torch.autograd.Function):
    """``u_i · v_j`` at each entry (i, j) of `pattern`."""

    @staticmethod
    def forward(ctx, u, v, pattern):
        ctx.save_for_backward(u, v)
        ctx.pattern = pattern
        return torch.from_numpy(kernels.sddmm(pattern.plan, u.detach().numpy(), v.detach().numpy()))

    @staticmethod
    def backward(ctx, g):
        (u, v), pattern = ctx.saved_tensors, ctx.pattern
        du = _SpMM.apply(g, v, pattern, False) if ctx.needs_input_grad[0] else None
        dv = _SpMM.apply(g, u, pattern, True) if ctx.needs_input_grad[1] else None
        return du, dv, None


class SparseLinear(torch.nn.Module):
    """``y = x Wᵀ + b`` as a ``torch.nn.Module``, with a weight that exists only on a pattern.

    Parameters
    ----------
    in_features, out_features : int
    pattern : Pattern of shape (out_features, in_features), optional
    density : float, optional
        Draw a random pattern with this fraction of entries.
    fan_in : int, optional
        Draw a random pattern with so many entries in each row.
    bias : bool
    dtype : torch.float32 or torch.float64
    rng : None, int or numpy.random.Generator
        For the pattern and the start, uniform within ``± 1 / sqrt(fan_in of the row)``.

    Attributes
    ----------
    values : torch.nn.Parameter of shape (nnz,)
        In the pattern's order: row by row, columns increasing.
    bias : torch.nn.Parameter of shape (out_features,) or None
    pattern : Pattern
        Goes into ``state_dict()``, and is compared when one is loaded.

    Raises
    ------
    ValueError
        Unless exactly one of pattern, density and fan_in is given, of the right shape.

    Notes
    -----
    CPU tensors only.  Inputs are (..., in_features).  The output is held feature-major (its
    transpose is contiguous), so that a chain of such layers copies nothing.

    Examples
    --------
    >>> import torch
    >>> from minisparse.interop.torch import SparseLinear
    >>> layer = SparseLinear(1000, 500, fan_in=10, rng=0)
    >>> layer(torch.ones(4, 1000)).sum().backward()
    >>> layer.values.grad.shape
    torch.Size([5000])
    """

    def __init__(
        self,
        in_features,
        out_features,
        *,
        pattern=None,
        density=None,
        fan_in=None,
        bias=True,
        dtype=torch.float32,
        rng=None,
    ):
        super().__init__()
        if sum(a is not None for a in (pattern, density, fan_in)) != 1:
            raise ValueError("SparseLinear: give one of pattern, density, fan_in")
        rng, shape = np.random.default_rng(rng), (out_features, in_features)
        if pattern is None:
            pattern = Pattern.random(shape, density=density, fan_in=fan_in, rng=rng)
        if pattern.shape != shape:
            raise ValueError(f"SparseLinear: a pattern of {pattern.shape} for {shape}")
        self.pattern, self.bias = pattern, None
        bound = 1 / np.sqrt(np.maximum(pattern.fan_in, 1))

        def start(bound):
            numbers = torch.from_numpy(rng.uniform(-bound, bound))
            return torch.nn.Parameter(numbers.to(dtype))

        self.values = start(bound[pattern.rows])
        if bias:
            self.bias = start(bound)

    def forward(self, x):
        """Return ``x Wᵀ + b`` for x of shape (..., in_features)."""
        *lead, features = x.shape
        n_out, n_in = self.pattern.shape
        if features != n_in:
            raise ValueError(
                f"SparseLinear: x of shape {tuple(x.shape)} needs {n_in} features last"
            )
        y = _SpMM.apply(self.values, x.reshape(math.prod(lead), n_in).T, self.pattern, False).T
        y = y if self.bias is None else y + self.bias
        return y.reshape(*lead, n_out)

    def get_extra_state(self):
        """Return the pattern, for ``state_dict()``, as tensors."""
        arrays = (self.pattern.shape, self.pattern.indptr, self.pattern.indices)
        return dict(zip(("shape", "indptr", "indices"), map(torch.tensor, arrays), strict=True))

    def set_extra_state(self, state):
        """Compare the pattern of a ``state_dict()`` with this layer's; ValueError if it differs."""
        given = Pattern(*(state[name].numpy() for name in ("shape", "indptr", "indices")))
        if given != self.pattern:
            raise ValueError(f"SparseLinear: the state has {given}, this layer {self.pattern}")

    def extra_repr(self):
        """Describe the layer in PyTorch's listing of modules."""
        return f"{self.pattern}, bias={self.bias is not None}"
