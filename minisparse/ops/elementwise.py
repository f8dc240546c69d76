"""Elementwise primitives, each with its rule right below it.  All broadcast as NumPy does."""

import functools
import math

import numpy as np

from ..engine import Tensor, primitive, raw
from ..kernels import gate
from .shapes import fold

__all__ = [
    "absolute", "add", "arctan", "clip", "cos", "divide", "erf", "exp", "expm1", "gelu",
    "leaky_relu", "log", "log1p", "maximum", "minimum", "multiply", "negative", "power", "relu",
    "sigmoid", "sign", "sin", "softplus", "sqrt", "square", "subtract", "tan", "tanh", "where",
]  # fmt: skip


def of_numpy(function):
    """Make a primitive of NumPy's function of the same name; what is decorated only describes it.

    There are no keywords: with them NumPy could write where no rule knows of it.
    """
    compute = getattr(np, function.__name__)
    return primitive(functools.wraps(function)(lambda *arrays: compute(*arrays)))


# ------------------------------------------------------------------------------------ arithmetic


@of_numpy
def add(x, y):
    """Return ``x + y``."""


@add.vjp
def _(g, need, x_shape, y_shape):
    return fold(g, x_shape) if need[0] else None, fold(g, y_shape) if need[1] else None


@of_numpy
def subtract(x, y):
    """Return ``x - y``."""


@subtract.vjp
def _(g, need, x_shape, y_shape):
    return fold(g, x_shape) if need[0] else None, fold(-g, y_shape) if need[1] else None


@of_numpy
def multiply(x, y):
    """Return ``x * y``."""


@multiply.vjp(x=1, y=0)
def _(g, need, x, y, x_shape, y_shape):
    return fold(g * y, x_shape) if need[0] else None, fold(g * x, y_shape) if need[1] else None


@of_numpy
def divide(x, y):
    """Return ``x / y``.

    Notes
    -----
    Where a zero divisor is to be masked out, mask it before dividing and again after:
    ``ms.where(d > 0, x / ms.where(d > 0, d, 1), 0)``.  Masking only the result leaves 0 times
    infinity in the gradient, which is NaN.
    """


@divide.vjp(out=1)
def _(g, need, y, out, x_shape, y_shape):
    dx = g / y
    return fold(dx, x_shape) if need[0] else None, fold(-dx * out, y_shape) if need[1] else None


@of_numpy
def power(x, y):
    """Return ``x ** y``; the exponent's gradient at ``0 ** y`` is 0 for y ≥ 0."""


@power.vjp(out=1)
def _(g, need, x, y, out, x_shape, y_shape):
    dx = dy = None
    if need[0]:
        zero = (y == 0) & (np.absolute(raw(x)) < np.finfo(x.dtype).tiny)  # 0 · 0 ** -1 is NaN
        dx = fold(g * y * power(x, _where(1.0, y - 1, condition=zero)), x_shape)
    if need[1]:
        flat = (x == 0) & (y >= 0)
        log_x = log(_where(1.0, x, condition=flat))
        dy = fold(_where(0.0, g * out * log_x, condition=flat), y_shape)
    return dx, dy


@of_numpy
def negative(x):
    """Return ``-x``."""


negative.vjp(lambda g, need: -g)


@of_numpy
def absolute(x):
    """Return ``|x|``; the gradient at 0 is 0."""


absolute.vjp(lambda g, need, x: g * sign(x))


@of_numpy
def sign(x):
    """Return -1, 0 or 1; the gradient is 0 everywhere."""


sign.vjp(lambda g, need: np.zeros_like(raw(g)))


# --------------------------------------------------------------------- exponentials and powers


@of_numpy
def exp(x):
    """Return ``e ** x``."""


exp.vjp(lambda g, need, out: g * out)


@of_numpy
def expm1(x):
    """Return ``e ** x - 1``, exact near 0."""


expm1.vjp(lambda g, need, out: g * (out + 1))


@of_numpy
def log(x):
    """Return the natural logarithm of `x`."""


log.vjp(lambda g, need, x: g / x)


@of_numpy
def log1p(x):
    """Return ``log(1 + x)``, exact near 0."""


log1p.vjp(lambda g, need, x: g / (x + 1))


@of_numpy
def sqrt(x):
    """Return the square root of `x`; the gradient at 0 is infinite."""


sqrt.vjp(lambda g, need, out: g * 0.5 / out)


@of_numpy
def square(x):
    """Return ``x * x``."""


square.vjp(lambda g, need, x: g * x * 2)


# ------------------------------------------------------------------------------ trigonometry


@of_numpy
def sin(x):
    """Return the sine of `x` in radians."""


sin.vjp(lambda g, need, x: g * cos(x))


@of_numpy
def cos(x):
    """Return the cosine of `x` in radians."""


cos.vjp(lambda g, need, x: -g * sin(x))


@of_numpy
def tan(x):
    """Return the tangent of `x` in radians."""


tan.vjp(lambda g, need, out: g * (out * out + 1))


@of_numpy
def arctan(x):
    """Return the inverse tangent of `x`, in radians."""


arctan.vjp(lambda g, need, x: g / (x * x + 1))


@of_numpy
def tanh(x):
    """Return the hyperbolic tangent of `x`."""


tanh.vjp(lambda g, need, out: g * (1 - out * out))


# ------------------------------------------------------------------------------ activations


@primitive
def sigmoid(x):
    """Return ``1 / (1 + exp(-x))``; never overflows."""
    from scipy.special import expit

    return expit(x)


sigmoid.vjp(lambda g, need, out: g * out * (1 - out))


@primitive
def softplus(x):
    """Return ``log(1 + exp(x))``; never overflows."""
    return np.logaddexp(x, 0.0)


softplus.vjp(lambda g, need, x: g * sigmoid(x))


@primitive
def relu(x):
    """Return ``max(x, 0)``; the gradient at 0 is 0."""
    return _gated(raw(x), raw(x))


# What is recorded keeps the condition, and nobody watches it: it gets an array of its own.
relu.vjp(lambda g, need, out: _where(g, 0.0, condition=out if out is raw(out) else ~(out <= 0)))


@primitive
def leaky_relu(x, *, negative_slope=0.01):
    """Return `x` where positive, ``negative_slope * x`` elsewhere (also the slope at 0)."""
    return _where(x, x * negative_slope, condition=x > 0)


leaky_relu.vjp(lambda g, need, x, negative_slope: _where(g, g * negative_slope, condition=x > 0))


@primitive
def erf(x):
    """Return the error function of `x`."""
    from scipy.special import erf

    return erf(x)


erf.vjp(lambda g, need, x: g * (2 / math.sqrt(math.pi)) * exp(-x * x))


@primitive
def gelu(x):
    """Return ``x Φ(x)`` with Φ the normal distribution function (the erf form).

    References
    ----------
    Hendrycks and Gimpel, Gaussian Error Linear Units, arXiv:1606.08415.
    """
    return x * (0.5 * erf(x * math.sqrt(0.5)) + 0.5)


@gelu.vjp
def _(g, need, x):
    density = exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
    return g * (erf(x * math.sqrt(0.5)) * 0.5 + 0.5 + x * density)


# ------------------------------------------------------------------------------ selection


@primitive
def _where(x, y, *, condition):
    """Return `x` where the array `condition` holds (is not 0; none is negative), else `y`."""
    zero = isinstance(x, np.ndarray) and np.ndim(y) == 0 and y == 0 and not np.signbit(y)
    if zero and np.result_type(x, y) == x.dtype:
        return _gated(x, condition)
    return np.where(condition, x, y)


@_where.vjp
def _(g, need, x_shape, y_shape, condition):
    dx = fold(_where(g, 0.0, condition=condition), x_shape) if need[0] else None
    dy = fold(_where(g, 0.0, condition=~condition), y_shape) if need[1] else None
    return dx, dy


def _gated(x, by):
    """Return 0 where `by` is 0 or less, `x` elsewhere; NumPy's where takes many times as long."""
    fast = x.size > 4096 and x.dtype.char in "fd" and x.shape == by.shape
    return gate(x, by) if fast else np.where(by <= 0, x.dtype.type(0), x)


def where(condition, x, y):
    """Return `x` where `condition` holds, else `y`; the gradient goes to what was chosen.

    Parameters
    ----------
    condition : array_like of bool
        Not differentiated.
    x, y : Tensor or array_like

    Notes
    -----
    A NaN or infinity in the branch that is not chosen still spoils the gradient if it came from a
    division; see :func:`divide` for the safe way.

    Examples
    --------
    >>> import minisparse as ms
    >>> x = ms.tensor([0.0, 1.0], requires_grad=True)
    >>> d = ms.tensor([0.0, 2.0])
    >>> y = ms.where(d > 0, x / ms.where(d > 0, d, 1), 0)
    >>> y.sum().backward()
    >>> x.grad
    array([0. , 0.5])
    """
    like = raw(x if isinstance(x, Tensor) or np.ndim(x) else y)  # lives where a copy has to
    return _where(x, y, condition=np.asarray(raw(condition).astype(bool), like=like))


def _shared(better, g, need, x, y, x_shape, y_shape):
    """Give all to the operand of maximum or minimum that is `better`, half to each at a tie."""
    share = np.where(x == y, 0.5, better(x, y)).astype(x.dtype)
    dx = fold(g * share, x_shape) if need[0] else None
    return dx, fold(g * (1 - share), y_shape) if need[1] else None


@of_numpy
def maximum(x, y):
    """Return the larger of `x` and `y`; ties share the gradient equally."""


maximum.vjp(functools.partial(_shared, np.greater))


@of_numpy
def minimum(x, y):
    """Return the smaller of `x` and `y`; ties share the gradient equally."""


minimum.vjp(functools.partial(_shared, np.less))


@primitive
def clip(x, *, a_min=None, a_max=None):
    """Limit `x` to [a_min, a_max]; the gradient passes inside and at the bounds."""
    return np.clip(x, a_min, a_max)


@clip.vjp
def _(g, need, x, x_shape, a_min, a_max):
    inside = raw(x) == np.clip(raw(x), a_min, a_max)
    return fold(_where(g, 0.0, condition=inside), x_shape)
