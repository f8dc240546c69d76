"""Dense products."""

import math

from ..engine import raw
from .elementwise import multiply, of_numpy
from .shapes import fold, reshape, swapped, transpose

__all__ = ["dot", "matmul"]


@of_numpy
def matmul(x, y):
    """Return ``x @ y`` of dense operands, with NumPy's rules for vectors and stacks."""


@matmul.vjp(x=1, y=0)
def _(g, need, x, y, x_shape, y_shape):
    # A vector is a matrix of one row (on the left) or one column (on the right).
    g_shape = g.shape[: len(g.shape) - (len(x_shape) > 1) - (len(y_shape) > 1)]
    left = x_shape if len(x_shape) > 1 else (1, *x_shape)
    right = y_shape if len(y_shape) > 1 else (*y_shape, 1)
    g = reshape(g, shape=g_shape + left[-2:-1] + right[-1:])
    dx = dy = None
    if need[0]:
        y = reshape(y, shape=(-1, 1)) if len(y_shape) == 1 else y
        dx = reshape(fold(matmul(g, swapped(y)), left), shape=x_shape)
    if need[1]:
        x = reshape(x, shape=(1, -1)) if len(x_shape) == 1 else x
        dy = reshape(fold(matmul(swapped(x), g), right), shape=y_shape)
    return dx, dy


def dot(x, y):
    """Return the product of `x` and `y` as :func:`numpy.dot`: sums over the last axis of `x`."""
    x_shape, y_shape = raw(x).shape, raw(y).shape
    if not x_shape or not y_shape:
        return multiply(x, y)
    if len(y_shape) < 3:
        return matmul(x, y)
    last, n = len(y_shape) - 2, y_shape[-2]
    rest = y_shape[:last] + y_shape[last + 1 :]
    flat = transpose(y, axes=(last, *range(last), last + 1))
    return reshape(matmul(x, reshape(flat, shape=(n, math.prod(rest)))), shape=x_shape[:-1] + rest)
