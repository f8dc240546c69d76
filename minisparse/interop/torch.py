"""A sparse layer for PyTorch that runs on minisparse's CPU kernels.

Values and activations stay PyTorch's: the kernels read and write their memory.  The two functions
here differentiate into each other, so that derivatives of any order come from PyTorch's engine.
"""

import math

import torch

from .. import kernels, nn
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
    dtype : torch.float32 or torch.float64
    **options
        ``pattern``, ``density``, ``fan_in``, ``weight``, ``bias`` and ``rng``, as those of
        :class:`minisparse.nn.SparseLinear`, by which the layer starts.

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
        Unless exactly one of pattern, density, fan_in and weight is given, of the right shape, or
        if entries of `weight` are frozen or tied.

    Notes
    -----
    CPU tensors only, and not under ``torch.compile`` or the transformations of ``torch.func``.
    Inputs are (..., in_features).  The output is held feature-major (its transpose is contiguous),
    so that a chain of such layers copies nothing.

    Examples
    --------
    >>> import torch
    >>> from minisparse.interop.torch import SparseLinear
    >>> layer = SparseLinear(1000, 500, fan_in=10, rng=0)
    >>> layer(torch.ones(4, 1000)).sum().backward()
    >>> layer.values.grad.shape
    torch.Size([5000])
    """

    def __init__(self, in_features, out_features, *, dtype=torch.float32, **options):
        super().__init__()
        options["dtype"] = str(dtype).removeprefix("torch.")
        layer = nn.SparseLinear(in_features, out_features, **options)
        if layer.weight.values is not layer.weight.free:
            raise ValueError("SparseLinear: entries that are frozen or tied are not supported here")
        self.pattern, bias = layer.weight.pattern, layer.bias
        self.values = torch.nn.Parameter(torch.tensor(layer.weight.free.numpy()))
        self.bias = None if bias is None else torch.nn.Parameter(torch.tensor(bias.numpy()))

    def forward(self, x):
        """Return ``x Wᵀ + b`` for x of shape (..., in_features)."""
        if not isinstance(x, torch.Tensor) or x.dtype != self.values.dtype:
            kind = getattr(x, "dtype", type(x).__name__)
            raise TypeError(f"SparseLinear: x of {kind}, it needs a Tensor of {self.values.dtype}")
        *lead, features = x.shape
        n_out, n_in = self.pattern.shape
        if features != n_in:
            raise ValueError(f"SparseLinear: x of shape {tuple(x.shape)} needs {n_in} features")
        y = _SpMM.apply(self.values, x.reshape(math.prod(lead), n_in).T, self.pattern, False).T
        y = y if self.bias is None else y + self.bias
        return y.reshape(*lead, n_out)

    def get_extra_state(self):
        """Return the pattern, for ``state_dict()``, as tensors."""
        arrays = (self.pattern.shape, self.pattern.indptr, self.pattern.indices)
        return dict(zip(("shape", "indptr", "indices"), map(torch.tensor, arrays), strict=True))

    def _load_from_state_dict(self, state, prefix, *args):
        if f"{prefix}_extra_state" in state:  # PyTorch compares it after it has copied the values
            self.set_extra_state(state[f"{prefix}_extra_state"])
        super()._load_from_state_dict(state, prefix, *args)

    def set_extra_state(self, state):
        """Compare the pattern of a ``state_dict()`` with this layer's; ValueError if it differs."""
        given = Pattern(*(state[name].numpy() for name in ("shape", "indptr", "indices")))
        if given != self.pattern:
            both = " and ".join(f"{p} {p.digest[:8]}" for p in (given, self.pattern))
            raise ValueError(f"SparseLinear: patterns differ, the state's and this layer's: {both}")

    def extra_repr(self):
        """Describe the layer in PyTorch's listing of modules."""
        return f"{self.pattern}, bias={self.bias is not None}"
