"""Derivatives of functions: products with Jacobians and Hessians, and both in full.

Each function here is a few calls of :func:`minisparse.grad`.  A primal may be a Tensor, an array, a
SparseParameter (differentiated in ``.free``) or a SparseTensor (in ``.values``).  A leaf that
requires grad, and a SparseParameter, are handed to `f` as they are, so that `f` may also reach them
through a model; of anything else `f` gets a new leaf.  Results are plain arrays: one for one
primal, a tuple for several.
"""

import functools

import numpy as np

from .engine import Tensor, enable_grad, grad, raw, require, tensor
from .sparse import SparseTensor


def _leaf(x):
    """Return what `f` is given for a primal, and the Tensor to differentiate in."""
    if isinstance(x, SparseTensor):
        leaf = _leaf(x.__tensor__())[1]
        return (x if leaf is x.__tensor__() else x._with_leaf(leaf)), leaf
    if not isinstance(x, Tensor):
        x = tensor(x)
    if not (x.requires_grad and x._node is None):
        x = x.detach()
        x.requires_grad = True
    return x, x


def _evaluate(f, primals, name, scalar=False):
    """Return f's result as a Tensor, and the Tensors to differentiate in."""
    given, leaves = zip(*map(_leaf, primals), strict=True) if primals else ((), ())
    require(0 < len(set(leaves)) == len(leaves), f"{name}: needs primals, and none twice: copy it")
    with enable_grad():
        y = f(*given)
    if isinstance(y, SparseTensor):
        y = y.values
    require(isinstance(y, Tensor), f"{name}: f returned {type(y)}, not a Tensor", TypeError)
    require(not scalar or y.size == 1, f"{name}: f returned shape {y.shape}, not one element")
    return y, leaves


def _as_tuple(primals):
    """Tell several primals, in a tuple or a list of Tensors, from one, which may be a list."""
    if isinstance(primals, list) and any(isinstance(x, (Tensor, SparseTensor)) for x in primals):
        return tuple(primals)
    return primals if isinstance(primals, tuple) else (primals,)


def _dot(gradients, tangents, leaves, name):
    """Return the sum of ``<gradient, tangent>``, after checking the tangents."""
    one = len(leaves) == 1 and not isinstance(tangents, tuple)
    tangents = [raw(t) for t in ((tangents,) if one else tangents)]
    shapes, needed = [t.shape for t in tangents], [x.shape for x in leaves]
    require(shapes == needed, f"{name}: tangents of shapes {shapes}, the primals have {needed}")
    with enable_grad():
        return sum((g * t).sum() for g, t in zip(gradients, tangents, strict=True))


def _one_or_all(results):
    return results[0] if len(results) == 1 else results


def vjp(f, *primals):
    """Evaluate `f`, and return with it the map from cotangents to ``vᵀ J``.

    Parameters
    ----------
    f : callable
        Takes the primals, returns a Tensor (or SparseTensor, which stands for its values).
    *primals : Tensor, array_like, SparseParameter or SparseTensor

    Returns
    -------
    y : ndarray
    pullback : callable
        Takes a cotangent of the shape of y, as often as wanted.

    Examples
    --------
    >>> import minisparse as ms
    >>> y, pullback = ms.vjp(lambda x: x**2, [1.0, 3.0])
    >>> pullback([1.0, 10.0])
    array([ 2., 60.])
    """
    y, leaves = _evaluate(f, primals, "vjp")
    return y.data.copy(), lambda v: _one_or_all(grad(y, leaves, v, retain_graph=True))


def jvp(f, primals, tangents):
    """Evaluate `f`, and return with it ``J t``, its derivative in a direction.

    Parameters
    ----------
    f : callable
    primals, tangents : one, or tuples of one for each argument of `f`
        A tangent has the shape of its primal (of ``.free``, of a SparseParameter).

    Returns
    -------
    y, dy : ndarray

    Notes
    -----
    Two reverse passes, the second through the first.

    Examples
    --------
    >>> import minisparse as ms
    >>> ms.jvp(lambda x: x**2, [1.0, 3.0], [1.0, 10.0])[1]
    array([ 2., 60.])
    """
    y, leaves = _evaluate(f, _as_tuple(primals), "jvp")
    v = tensor(np.zeros_like(y.data), requires_grad=True)
    pulled = grad(y, leaves, v, create_graph=True)  # vᵀ J, linear in v: differentiate in v
    return y.data.copy(), grad(_dot(pulled, tangents, leaves, "jvp"), v)


def hvp(f, primals, tangents):
    """Return ``H t``, the Hessian of a scalar function times a direction.

    Parameters
    ----------
    f : callable
        Returns a Tensor of one element.
    primals, tangents : one, or tuples of one for each argument of `f`

    Returns
    -------
    ndarray of the shape of the primal, or a tuple of them for several

    Notes
    -----
    Costs a few gradients, and no memory for a Hessian.

    References
    ----------
    Pearlmutter, "Fast exact multiplication by the Hessian", Neural Computation 6, 1994.

    Examples
    --------
    >>> import minisparse as ms
    >>> ms.hvp(lambda x: (x**3).sum(), [1.0, 2.0], [1.0, 1.0])
    array([ 6., 12.])
    """
    y, leaves = _evaluate(f, _as_tuple(primals), "hvp", scalar=True)
    gradients = grad(y, leaves, create_graph=True)
    return _one_or_all(grad(_dot(gradients, tangents, leaves, "hvp"), leaves))


def jacobian(f, x):
    """Return the derivative of each output in each input, as a dense array.

    Parameters
    ----------
    f : callable
        Of one argument.
    x : Tensor, array_like, SparseParameter or SparseTensor

    Returns
    -------
    ndarray of shape ``(*y.shape, *x.shape)`` for the output y
        Where x is sparse, its shape is that of its weights or values.

    Notes
    -----
    One reverse pass for each output.

    Examples
    --------
    >>> import minisparse as ms
    >>> ms.jacobian(lambda x: x[0] * x, [2.0, 3.0])
    array([[4., 0.],
           [3., 2.]])
    """
    y, (leaf,) = _evaluate(f, (x,), "jacobian")
    rows = np.empty((y.size, *leaf.shape), y.dtype, like=raw(y))
    for i in range(y.size):
        one = np.zeros(y.size, y.dtype, like=raw(y))
        one[i] = 1
        rows[i] = grad(y, leaf, one.reshape(y.shape), retain_graph=True)
    return rows.reshape(y.shape + leaf.shape)


def hessian(f, x):
    """Return the second derivatives of a scalar function, as a dense array.

    Parameters
    ----------
    f : callable
        Of one argument; returns a Tensor of one element.
    x : Tensor, array_like, SparseParameter or SparseTensor

    Returns
    -------
    ndarray of shape ``(*x.shape, *x.shape)``

    Notes
    -----
    One reverse pass for each number in x; :func:`hvp` needs no such array.

    Examples
    --------
    >>> import minisparse as ms
    >>> ms.hessian(lambda x: x[0] * x[1] ** 2, [2.0, 3.0])
    array([[0., 6.],
           [6., 4.]])
    """

    def gradient(given):
        y, leaf = _evaluate(f, (given,), "hessian", scalar=True)
        return grad(y, leaf[0], create_graph=True)

    return jacobian(gradient, _leaf(x)[0])


def value_and_grad(f):
    """Make of `f` a function that returns its value and its gradient.

    Parameters
    ----------
    f : callable
        Returns a Tensor of one element.

    Returns
    -------
    callable
        Takes the primals; returns (float, gradient): an ndarray for one primal, else a tuple.  Fit
        for ``scipy.optimize.minimize(..., jac=True)``.

    Examples
    --------
    >>> import minisparse as ms
    >>> ms.value_and_grad(lambda x: (x**2).sum())([1.0, 3.0])
    (10.0, array([2., 6.]))
    """

    @functools.wraps(f)
    def both(*primals):
        y, leaves = _evaluate(f, primals, "value_and_grad", scalar=True)
        return y.item(), _one_or_all(grad(y, leaves))

    return both
