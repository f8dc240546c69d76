"""Primitives that reduce axes, each with its rule right below it."""

import builtins
import math

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from ..engine import primitive, raw
from .elementwise import _where, exp, square
from .shapes import broadcast_to, reshape

__all__ = ["log_softmax", "logsumexp", "max", "mean", "min", "norm", "softmax", "std", "sum", "var"]


def _kept(shape, axis):
    """Return the shape that a reduction over `axis` has with ``keepdims=True``."""
    axes = normalize_axis_tuple(range(len(shape)) if axis is None else axis, len(shape))
    return tuple(1 if i in axes else n for i, n in enumerate(shape))


def _count(shape, axis):
    """Return how many numbers go into each result of a reduction over `axis`."""
    return math.prod(n for n, k in zip(shape, _kept(shape, axis), strict=True) if k == 1)


@primitive
def sum(x, *, axis=None, keepdims=False):
    """Return the sum of `x` over `axis` (all axes by default), as :func:`numpy.sum`."""
    return np.sum(x, axis=axis, keepdims=keepdims)


@sum.vjp
def _(g, need, x_shape, axis):
    if axis is not None:
        g = reshape(g, shape=_kept(x_shape, axis))
    return broadcast_to(g, shape=x_shape)


def mean(x, axis=None, keepdims=False):
    """Return the mean of `x` over `axis` (all axes by default), as :func:`numpy.mean`."""
    return sum(x, axis=axis, keepdims=keepdims) / _count(raw(x).shape, axis)


def _centred(x, axis):
    return x - mean(x, axis=axis, keepdims=True)


def var(x, axis=None, ddof=0, keepdims=False):
    """Return the variance of `x` over `axis`, as :func:`numpy.var`."""
    total = sum(square(_centred(x, axis)), axis=axis, keepdims=keepdims)
    return total / builtins.max(_count(raw(x).shape, axis) - ddof, 0)


def std(x, axis=None, ddof=0, keepdims=False):
    """Return the standard deviation of `x` over `axis`; its gradient is 0 where `x` is constant."""
    spread = norm(_centred(x, axis), axis=axis, keepdims=keepdims)
    return spread / math.sqrt(builtins.max(_count(raw(x).shape, axis) - ddof, 0))


def _shares(x, best, axis):
    """Return how the entries equal to `best` divide a gradient: equally."""
    hit = (x == best).astype(x.dtype)
    return hit / np.maximum(np.sum(hit, axis=axis, keepdims=True), 1).astype(x.dtype)


@primitive
def max(x, *, axis=None, keepdims=False):
    """Return the largest entries of `x` over `axis`; ties share the gradient equally."""
    return np.max(x, axis=axis, keepdims=keepdims)


@primitive
def min(x, *, axis=None, keepdims=False):
    """Return the smallest entries of `x` over `axis`; ties share the gradient equally."""
    return np.min(x, axis=axis, keepdims=keepdims)


def _to_best(g, need, x, out, axis):
    kept = _kept(x.shape, axis)
    return reshape(g, shape=kept) * _shares(raw(x), raw(out).reshape(kept), axis)


max.vjp(_to_best)
min.vjp(_to_best)


def _top(x, axis):
    """Return the largest entries, kept, with 0 for -inf: what exponents are taken from."""
    # The sum of nothing has the shape; np.max of nothing raises.
    top = (np.max if np.size(x) else np.sum)(x, axis=axis, keepdims=True)
    return np.where(top == -np.inf, top.dtype.type(0), top)


@primitive
def logsumexp(x, *, axis=None, keepdims=False):
    """Return ``log(sum(exp(x)))`` over `axis`; never overflows; of nothing but -inf it is -inf."""
    top = _top(x, axis)
    top = np.where(top == np.inf, np.zeros_like(top), top)
    with np.errstate(divide="ignore", over="ignore"):  # log(0); exp beside an infinite entry
        out = np.log(np.sum(np.exp(x - top), axis=axis, keepdims=True)) + top
    return out if keepdims else np.squeeze(out, axis)


@logsumexp.vjp
def _(g, need, x, out, axis):
    kept = _kept(x.shape, axis)
    # Where it is -inf, exp(-inf - 0) = 0: no weight, no gradient.
    out = _where(0.0, out, condition=out == -np.inf)
    return reshape(g, shape=kept) * exp(x - reshape(out, shape=kept))


@primitive
def softmax(x, *, axis=-1):
    """Return ``exp(x) / sum(exp(x))`` over `axis`; never overflows."""
    e = np.exp(x - _top(x, axis))
    return e / np.sum(e, axis=axis, keepdims=True)


softmax.vjp(lambda g, need, out, axis: out * (g - sum(g * out, axis=axis, keepdims=True)))


@primitive
def log_softmax(x, *, axis=-1):
    """Return ``x - logsumexp(x)`` over `axis`; never overflows."""
    shifted = x - _top(x, axis)
    return shifted - np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True))


log_softmax.vjp(lambda g, need, out, axis: g - exp(out) * sum(g, axis=axis, keepdims=True))


@primitive
def norm(x, *, ord=None, axis=None, keepdims=False):
    """Return the Euclidean norm ``sqrt(sum(x * x))`` over `axis`; its gradient at 0 is 0.

    Parameters
    ----------
    x : Tensor or array_like
    ord : None or 2
        2 only where it means the same: for vectors, that is with one axis.
    axis : None, int or tuple of int
        All axes by default (the Frobenius norm of a matrix).

    Raises
    ------
    ValueError
        For any other `ord`.
    """
    one_axis = x.ndim == 1 if axis is None else np.size(axis) == 1
    if not (ord is None or (ord == 2 and one_axis)):
        raise ValueError(f"norm: ord={ord!r} over axis {axis}; only the Euclidean norm is there")
    return np.sqrt(np.sum(np.square(x), axis=axis, keepdims=keepdims))


@norm.vjp
def _(g, need, x, out, axis):
    kept = _kept(x.shape, axis)
    return reshape(g, shape=kept) * x / reshape(_where(1.0, out, condition=out == 0), shape=kept)
