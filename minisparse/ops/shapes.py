"""Primitives that move numbers about: shapes, views, joins, and indexing with its adjoint."""

import copy
import itertools

import numpy as np
from numpy.lib.array_utils import normalize_axis_index, normalize_axis_tuple

from .. import kernels
from ..engine import Tensor, as_operand, primitive, raw, require

__all__ = [
    "RowGrad", "broadcast_to", "concatenate", "expand_dims", "getitem", "index_add", "ravel",
    "reshape", "split", "squeeze", "stack", "take", "take_along_axis", "transpose",
]  # fmt: skip


@primitive
def reshape(x, *, shape):
    """Give `x` another shape of the same size, as :func:`numpy.reshape` in C order.

    Parameters
    ----------
    x : Tensor or array_like
    shape : int or tuple of int
        One entry may be -1.
    """
    return np.reshape(x, shape)


reshape.vjp(lambda g, need, x_shape: reshape(g, shape=x_shape))


def ravel(x):
    """Flatten `x` in C order, as :func:`numpy.ravel`."""
    return reshape(x, shape=(-1,))


def squeeze(x, axis=None):
    """Drop axes of length one, as :func:`numpy.squeeze`."""
    return reshape(x, shape=np.squeeze(raw(x), axis).shape)


def expand_dims(x, axis):
    """Insert axes of length one, as :func:`numpy.expand_dims`."""
    return reshape(x, shape=np.expand_dims(raw(x), axis).shape)


@primitive
def transpose(x, *, axes=None):
    """Permute the axes of `x`, as :func:`numpy.transpose`; the default reverses them."""
    return np.transpose(x, axes)


@transpose.vjp
def _(g, need, axes):
    places = range(g.ndim)[::-1] if axes is None else normalize_axis_tuple(axes, g.ndim)
    return transpose(g, axes=sorted(range(g.ndim), key=places.__getitem__))


def swapped(x):
    """Transpose a matrix, or each matrix of a stack; a vector is what it was."""
    n = raw(x).ndim
    return x if n < 2 else transpose(x, axes=(*range(n - 2), n - 1, n - 2))


@primitive
def broadcast_to(x, *, shape):
    """Repeat `x` to `shape` by NumPy's rules, as a read-only view that stores nothing."""
    return np.broadcast_to(x, shape)


broadcast_to.vjp(lambda g, need, x_shape: fold(g, x_shape))


@primitive
def sum_to(x, *, shape):
    """Sum `x` down to `shape`: the adjoint of broadcasting from `shape`."""
    lead = x.ndim - len(shape)
    axes = [i + lead for i, n in enumerate(shape) if n == 1 and x.shape[i + lead] != 1]
    return np.sum(x, axis=(*range(lead), *axes), keepdims=True).reshape(shape)


sum_to.vjp(lambda g, need, x_shape: broadcast_to(g, shape=x_shape))


def fold(g, shape):
    """Bring the gradient of a broadcast operand back to the operand's own shape."""
    return g if g.shape == shape else sum_to(g, shape=shape)


@primitive
def astype(x, *, dtype):
    """Bring `x` to float32 or float64; the gradient comes back in the dtype of `x`."""
    return x.astype(dtype)


astype.vjp(lambda g, need: g)  # the engine brings every gradient to its operand's dtype


@primitive
def to(x, *, device, back=None):
    """Bring `x` to "cpu" or "cuda"; the gradient goes `back` to where `x` came from."""
    return kernels.moved(x, device)


to.vjp(lambda g, need, device, back: to(g, device=back, back=device))


# ---------------------------------------------------------------------------- joining and splitting


@primitive
def _concatenate(*xs, axis):
    return np.concatenate(xs, axis=axis)


@_concatenate.vjp
def _(g, need, xs_shape, axis):
    axis = normalize_axis_index(axis, g.ndim)
    ends = np.cumsum([0, *(shape[axis] for shape in xs_shape)]).tolist()
    keys = [(slice(None),) * axis + (slice(*cut),) for cut in itertools.pairwise(ends)]
    return tuple(_getitem(g, key=k) if n else None for k, n in zip(keys, need, strict=True))


def concatenate(arrays, axis=0):
    """Join a sequence of Tensors or arrays along an axis, as :func:`numpy.concatenate`."""
    if axis is None:
        arrays, axis = [ravel(a) for a in arrays], 0
    return _concatenate(*arrays, axis=axis)


def stack(arrays, axis=0):
    """Join a sequence of Tensors or arrays along a new axis, as :func:`numpy.stack`.

    Examples
    --------
    >>> import minisparse as ms
    >>> x = ms.tensor([1.0, 2.0])
    >>> ms.stack([x, 2 * x])
    tensor([[1., 2.],
            [2., 4.]])
    """
    arrays = list(arrays)
    shapes = {raw(a).shape for a in arrays}
    require(len(shapes) == 1, f"stack: needs one common shape, got {sorted(shapes)}")
    return concatenate([expand_dims(a, axis) for a in arrays], axis)


def split(x, indices_or_sections, axis=0):
    """Cut `x` into a list of pieces along an axis, as :func:`numpy.split`."""
    axis = normalize_axis_index(axis, raw(x).ndim)
    pieces = np.split(np.arange(raw(x).shape[axis]), raw(indices_or_sections).tolist())
    cuts = [slice(p[0], p[-1] + 1) if len(p) else slice(0) for p in pieces]
    return [_getitem(x, key=(slice(None),) * axis + (cut,)) for cut in cuts]


# ------------------------------------------------------------------------------------- indexing


def _basic(key):
    """Tell whether a key picks a view, so that no entry can be named twice."""
    parts = key if isinstance(key, tuple) else (key,)
    views = slice, int, np.integer, type(None), type(...)
    return all(isinstance(k, views) and not isinstance(k, bool) for k in parts)


def _own(key):
    """Copy the index arrays of a key: the caller may change his before the gradient is taken."""
    if isinstance(key, tuple):
        return tuple(_own(k) for k in key)
    if isinstance(key, Tensor):
        raise TypeError("getitem: a Tensor is not an index; use an array of integers or booleans")
    return np.array(key) if isinstance(key, list) else copy.copy(key)


@primitive
def _getitem(x, *, key):
    return x[key]


_getitem.vjp(lambda g, need, key, x_shape: scatter(g, key=key, shape=x_shape))


@primitive
def scatter(x, *, key, shape):
    """Add `x` into zeros of `shape` at ``[key]``: the adjoint of indexing."""
    out = np.zeros(shape, x.dtype, like=x)
    if _basic(key):
        out[key] = x
    else:
        kernels.add_at(out, key, x)
    return out


scatter.vjp(lambda g, need, key: _getitem(g, key=key))


class RowGrad:
    """A gradient that is zero but for some rows: what a lookup in a large table sends back.

    Parameters
    ----------
    rows : array_like of int, shape (m,)
        Where a row stands more than once, its values add up.
    values : ndarray of shape (m, ...)
    shape : tuple of int
        That of the whole gradient.

    Attributes
    ----------
    rows : ndarray of shape (n,)
        Increasing, each once.
    values : ndarray of shape (n, ...)
    shape : tuple of int
    dtype : numpy.dtype

    Examples
    --------
    >>> import numpy as np
    >>> import minisparse as ms
    >>> g = ms.RowGrad([2, 0, 2], np.array([[1.0], [2.0], [3.0]]), (4, 1))
    >>> g.rows, (g + g).to_dense().ravel()
    (array([0, 2]), array([4., 0., 8., 0.]))
    """

    def __init__(self, rows, values, shape):
        rows = indices_of(kernels.moved(raw(rows), "cpu"), "RowGrad: rows", shape[0])
        if values.shape != (*rows.shape, *shape[1:]):
            raise ValueError(f"RowGrad: {rows.size} rows, values of {values.shape} for {shape}")
        order = np.argsort(rows, kind="stable")
        rows = rows[order]
        first = np.flatnonzero(np.append(True, rows[1:] != rows[:-1])[: len(rows)])
        # Sums by a product with ones: CuPy's add.reduceat takes differences of running sums.
        plan = kernels.Plan(np.append(first, rows.size), order, rows.size)
        ones = np.ones_like(values, shape=(rows.size,))
        sums = kernels.spmm(plan, ones, values.reshape(rows.size, values[:1].size))
        self.values = sums.reshape(first.size, *shape[1:])
        self.rows, self.shape, self.dtype = rows[first], tuple(shape), values.dtype

    __array_ufunc__ = None  # array + self comes to __radd__

    def __add__(self, other):
        if isinstance(other, RowGrad):
            rows = np.append(self.rows, other.rows)
            return RowGrad(rows, np.concatenate([self.values, other.values]), self.shape)
        out = raw(other).copy()
        out[self.rows] += self.values
        return out

    __radd__ = __add__

    def __mul__(self, number):
        scaled = copy.copy(self)
        scaled.values = self.values * self.dtype.type(number)
        return scaled

    def to_dense(self):
        """Return the whole gradient as an array."""
        return self + np.zeros(self.shape, self.dtype, like=self.values)

    def to(self, device):
        """Return it with its values on "cpu" or "cuda"."""
        return RowGrad(self.rows, kernels.moved(self.values, device), self.shape)

    def __repr__(self):
        return f"RowGrad(rows={len(self.rows)}, shape={self.shape}, dtype={self.dtype})"


@primitive
def lookup(table, *, ids, sparse=False):
    """Return ``table[ids]``; if `sparse`, a table that is a leaf gets a :class:`RowGrad`."""
    return table[ids]


@lookup.vjp
def _(g, need, table_shape, ids, sparse):
    if sparse and not isinstance(g, Tensor):
        return RowGrad(ids.ravel(), g.reshape(ids.size, *table_shape[1:]), table_shape)
    return scatter(g, key=ids, shape=table_shape)


def getitem(x, key):
    """Return ``x[key]`` for any NumPy key: slices, integers, index arrays, boolean masks."""
    return _getitem(x, key=key if _basic(key) else _own(key))


def take(x, indices, axis=None):
    """Pick entries (slices, with `axis`) by integer indices, as :func:`numpy.take`."""
    if axis is None:
        x, axis = ravel(x), 0
    lead = (slice(None),) * normalize_axis_index(axis, raw(x).ndim)
    return _getitem(x, key=(*lead, indices_of(indices, "take")))


def indices_of(indices, name, n=None, lowest=0):
    """Copy integer indices, from `lowest` to n - 1 if n is given: the caller may change his."""
    indices = raw(indices)
    if indices.dtype.kind not in "iu" and indices.size:
        raise TypeError(f"{name}: indices of dtype {indices.dtype}; it takes integers")
    if n is not None and indices.size and not lowest <= indices.min() <= indices.max() < n:
        raise IndexError(f"{name}: from {indices.min()} to {indices.max()}, there are {n}")
    return indices.astype(np.intp)


def take_along_axis(x, indices, axis=-1):
    """Pick one entry for each index along an axis, as :func:`numpy.take_along_axis`."""
    indices, n = indices_of(indices, "take_along_axis"), raw(x).ndim
    if axis is None:
        x, axis, n = ravel(x), 0, 1
    require(indices.ndim == n, f"take_along_axis: indices have {indices.ndim} axes, x has {n}")
    key: list = list(np.indices(raw(x).shape, sparse=True))
    key[normalize_axis_index(axis, n)] = indices
    return _getitem(x, key=tuple(key))


def index_add(x, indices, values, axis=0):
    """Return `x` with `values` added at `indices` along an axis; repeated indices add up.

    Parameters
    ----------
    x : Tensor or array_like
    indices : array_like of int
    values : Tensor or array_like
        Shape of `x` with the axis replaced by the shape of `indices`.
    axis : int

    Raises
    ------
    ValueError
        If `values` has another shape.

    Examples
    --------
    >>> import minisparse as ms
    >>> ms.index_add(ms.tensor([0.0, 0.0, 0.0]), [0, 2, 2], [1.0, 2.0, 3.0])
    tensor([1., 0., 5.])
    """
    shape, indices = raw(x).shape, indices_of(indices, "index_add")
    axis = normalize_axis_index(axis, len(shape))
    expected = shape[:axis] + indices.shape + shape[axis + 1 :]
    if raw(values).shape != expected:
        raise ValueError(f"index_add: values of shape {raw(values).shape}, needs {expected}")
    if isinstance(x, Tensor) and not isinstance(values, Tensor):
        values = as_operand(values, x.dtype, "index_add")
    return x + scatter(values, key=(slice(None),) * axis + (indices,), shape=shape)
