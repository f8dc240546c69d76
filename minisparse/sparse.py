"""Sparse tensors and parameters: a fixed pattern and a differentiable vector of values.

The primitives here are closed under differentiation: each rule is written in the others.

=================  =======================================  ================================
primitive          value                                    its gradients are
=================  =======================================  ================================
``spmm``           ``A X`` or ``Aᵀ X``                      ``sddmm``, ``spmm`` transposed
``affine``         ``X Aᵀ + b``, also of ``relu(X)``        ``sddmm``, ``spmm``, a sum
``sddmm``          ``u_i · v_j`` at each entry (i, j)       ``spmm``, ``spmm`` transposed
``gather``         ``x[index]``                             ``segment_sum``
``segment_sum``    sum of ``x`` over equal ``index``        ``gather``
``sample``         entries of a dense matrix                ``spread``
``spread``         a dense matrix of the entries            ``sample``
=================  =======================================  ================================
"""

import copy
import math
import operator
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import scipy.sparse as sp

from . import kernels, ops
from .engine import Tensor, as_floats, as_operand, is_grad_enabled, primitive, raw, require, tensor
from .ops.shapes import swapped
from .pattern import IndexMap, Pattern, _flat, _from_flat, canonical

if TYPE_CHECKING:
    from ._members import SparseMembers as _Base  # what `algebra` binds, for type checkers
else:
    _Base = object

# ----------------------------------------------------------------------------------- primitives


@primitive
def spmm(values, x, *, pattern, transpose=False):
    """Return ``A X``, or ``Aᵀ X`` if `transpose`, where A has `values` on `pattern`.

    Parameters
    ----------
    values : Tensor or ndarray of shape (nnz,)
    x : Tensor or ndarray of shape (n_cols, k) or (n_cols,), (n_rows, k) or (n_rows,) if `transpose`
    pattern : Pattern
    transpose : bool

    Raises
    ------
    ValueError
        If the shapes do not fit.
    TypeError
        If the dtypes differ.

    Notes
    -----
    Time O(nnz·k).  Memory beyond the result: at most a copy of `x`, where it is not in C order, or
    where panels or rows that begin at cache lines make the product faster; and two of `values`,
    where they are permuted.
    """
    return _spmm(values, x, None, pattern, transpose)


@spmm.vjp(values=1, x=0)
def _spmm_rule(g, need, values, x, pattern, transpose):
    if all(need) and not isinstance(g, Tensor):  # one walk for both
        plans = pattern.plan, pattern.plan_T
        return kernels.spmm_vjp(*(plans[::-1] if transpose else plans), values, x, g)
    u, v = (x, g) if transpose else (g, x)
    dvalues = _sddmm(u, v, pattern=pattern) if need[0] else None
    dx = spmm(values, g, pattern=pattern, transpose=not transpose) if need[1] else None
    return dvalues, dx


def _spmm(values, x, bias, pattern, transpose, relu=False):
    shape = pattern.shape[::-1] if transpose else pattern.shape
    if x.ndim not in (1, 2) or x.shape[0] != shape[1]:
        raise ValueError(f"spmm: x of shape {x.shape}, the pattern {shape} needs {shape[1]} rows")
    _check_shape("spmm: values", values, pattern.nnz)
    if values.dtype != x.dtype:
        raise TypeError(f"spmm: values of dtype {values.dtype}, x of dtype {x.dtype}")
    return kernels.spmm(pattern.plan_T if transpose else pattern.plan, values, x, bias, relu)


@primitive
def affine(values, x, bias, *, pattern, relu=False):
    """Return ``X Aᵀ + b``, a layer: for X of shape (batch, n_cols) or (n_cols,), b of (n_rows,).

    If `relu`, that of ``relu(X)``, without a pass over X for it.
    """
    _check_shape("affine: bias", bias, pattern.shape[0])
    return _spmm(values, x.T, bias, pattern, False, relu).T


@affine.vjp(values=1)
def _(g, need, values, x, pattern, relu):
    if all(need[:2]) and not isinstance(g, Tensor):
        dvalues, dx = kernels.spmm_vjp(pattern.plan, pattern.plan_T, values, x.T, g.T, relu)
    else:
        u = ops.relu(x) if relu and need[0] else x
        dvalues, dx = _spmm_rule(g.T, need[:2], values, u.T, pattern, False)
        dx = ops.where(~(raw(x) <= 0).T, dx, 0.0) if relu and need[1] else dx
    if need[2] and g.ndim == 2:
        # A short sum is up to four times as fast by einsum; a long one is less exact.
        g = ops.sum(g, axis=0) if isinstance(g, Tensor) or len(g) > 1024 else np.einsum("ij->j", g)
    return dvalues, dx.T if need[1] else None, g


@primitive
def _sddmm(u, v, *, pattern):
    """Return ``u_i · v_j`` for each entry (i, j) of `pattern`: sddmm's values, (nnz,)."""
    rows = (*u.shape[:1], *v.shape[:1])
    if u.ndim not in (1, 2) or rows != pattern.shape or u.shape[1:] != v.shape[1:]:
        needs = "U of shape (n_rows, k) or (n_rows,), and V like it with n_cols"
        shapes = f"U of shape {u.shape} and V of shape {v.shape}"
        raise ValueError(f"sddmm: {shapes}, the pattern {pattern.shape} needs {needs}")
    if u.dtype != v.dtype:
        raise TypeError(f"sddmm: U of dtype {u.dtype}, V of dtype {v.dtype}")
    return kernels.sddmm(pattern.plan, u, v)


@_sddmm.vjp(u=1, v=0)
def _(g, need, u, v, pattern):
    du = spmm(g, v, pattern=pattern) if need[0] else None
    dv = spmm(g, u, pattern=pattern, transpose=True) if need[1] else None
    return du, dv


@primitive
def gather(x, *, index_map, base=None):
    """Return ``x[index]``; where the index is -1, `base` (or 0), bit for bit.

    Parameters
    ----------
    x : Tensor or ndarray of shape (index_map.n_source,)
    index_map : IndexMap
    base : ndarray of the shape of the result, optional
    """
    _check_shape("gather: x", x, index_map.n_source)
    if base is not None and base.dtype != x.dtype:
        raise TypeError(f"gather: x of dtype {x.dtype}, base of dtype {base.dtype}")
    return kernels.gather(x, index_map.index, base)


gather.vjp(lambda g, need, index_map: segment_sum(g, index_map=index_map))


@primitive
def segment_sum(x, *, index_map):
    """Return the sum of `x` over the places that each source number went to; adjoint of gather."""
    _check_shape("segment_sum: x", x, *index_map.index.shape)
    return kernels.segment_sum(x, *index_map.segments)


segment_sum.vjp(lambda g, need, index_map: gather(g, index_map=index_map))


@primitive
def sample(x, *, pattern):
    """Return the entries of the dense matrix `x` at `pattern`, shape (nnz,)."""
    _check_shape("from_dense: the matrix", x, *pattern.shape)
    return x[pattern.rows, pattern.indices]


sample.vjp(lambda g, need, pattern: spread(g, pattern=pattern))


@primitive
def spread(values, *, pattern):
    """Return the dense matrix with `values` at `pattern` and zeros elsewhere."""
    _check_shape("to_dense: values", values, pattern.nnz)
    out = np.zeros(pattern.shape, values.dtype, like=values)
    out[pattern.rows, pattern.indices] = values
    return out


spread.vjp(lambda g, need, pattern: sample(g, pattern=pattern))


def _check_shape(name, x, *shape):
    if x.shape != shape:
        raise ValueError(f"{name} of shape {x.shape}, needs {shape}")


# -------------------------------------------------------------------------------- sparse tensors


class SparseTensor(_Base):
    """A matrix with `values` at the entries of `pattern` and nothing elsewhere.

    Parameters
    ----------
    pattern : Pattern
    values : Tensor or array_like of shape (nnz,)
        In the pattern's order: row by row, columns increasing.  A Tensor stays attached to its
        graph; an array is copied.

    Attributes
    ----------
    pattern : Pattern
    values : Tensor of shape (nnz,)
    shape : (int, int)
    nnz : int
    dtype : numpy.dtype
    T : SparseTensor
        The transpose, as a view: no value moves until its ``.values`` are asked for.
    grad : ndarray or None
        Of ``values``.

    Raises
    ------
    ValueError
        If the number of values is not the pattern's.

    Examples
    --------
    >>> import minisparse as ms
    >>> values = ms.tensor([1.0, 2.0, 3.0], requires_grad=True)
    >>> A = ms.SparseTensor(ms.Pattern((2, 3), [0, 2, 3], [0, 2, 1]), values)
    >>> (A @ [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).sum().backward()
    >>> A.grad
    array([ 3., 11.,  7.])
    """

    def __init__(self, pattern, values):
        if not isinstance(pattern, Pattern):
            raise TypeError(f"SparseTensor: pattern is a {type(pattern).__name__}, not a Pattern")
        values = values if isinstance(values, Tensor) else tensor(values)
        _check_shape("SparseTensor: values", values, pattern.nnz)
        self._pattern, self._values = pattern, values

    @classmethod
    def from_scipy(cls, A, *, requires_grad=False, dtype=None):
        """Copy any SciPy sparse matrix or array; entries given twice add up, zeros stay stored."""
        pattern, data, _ = canonical(A)
        return SparseTensor(pattern, tensor(data, requires_grad=requires_grad, dtype=dtype))

    @classmethod
    def from_coords(cls, rows, cols, values, shape):
        """Put ``values[e]`` at ``(rows[e], cols[e])``; equal places add up, differentiably.

        Raises
        ------
        ValueError
            If an index lies outside `shape`, or the lengths differ.
        """
        values = values if isinstance(values, Tensor) else tensor(values)
        cells, cell_of = np.unique(_flat(rows, cols, shape), return_inverse=True)
        _check_shape("from_coords: values", values, len(cell_of))
        index_map = IndexMap(cell_of, len(cells))
        return SparseTensor(_from_flat(cells, shape), segment_sum(values, index_map=index_map))

    @classmethod
    def from_dense(cls, D, pattern):
        """Take the entries of a dense matrix at a pattern (or boolean mask), differentiably."""
        pattern = Pattern.from_mask(pattern)
        return SparseTensor(pattern, sample(D, pattern=pattern))

    ndim = 2
    pattern = property(attrgetter("_pattern"), doc="Which entries are stored, a Pattern.")
    values = property(attrgetter("_values"), doc="What they hold, a Tensor of shape (nnz,).")
    shape = property(attrgetter("pattern.shape"), doc="(n_rows, n_cols).")
    nnz = property(attrgetter("pattern.nnz"), doc="The number of stored entries.")
    dtype = property(attrgetter("values.dtype"), doc="numpy.float32 or numpy.float64.")
    device = property(lambda self: self._operand()[0].device, doc='"cpu" or "cuda".')
    T = property(lambda self: _Transposed(self), doc="The transpose, as a view.")

    @property
    def grad(self):
        """The gradient of the leaf that holds the values, or None."""
        return self.__tensor__().grad

    @grad.setter
    def grad(self, value):
        self.__tensor__().grad = value

    def __tensor__(self):
        """Return the Tensor that stands for this matrix where gradients are asked for."""
        return self.values

    def _operand(self):
        """Return (values, pattern, whether it is the transpose) for the kernels."""
        return self.values, self.pattern, False

    def with_values(self, values):
        """Return a SparseTensor with the same pattern and other values."""
        return SparseTensor(self.pattern, values)

    _with_leaf = with_values  # the like of it with other numbers to be differentiated in

    def astype(self, dtype):
        """Return it in float32 or float64, differentiably."""
        return self.with_values(self.values.astype(dtype))

    def to(self, device):
        """Return it with its values on "cpu" or "cuda", differentiably; itself if they are."""
        return self if self.device == device else self.with_values(self.values.to(device))

    def to_scipy(self):
        """Return a copy as ``scipy.sparse.csr_array``."""
        return self.pattern.to_scipy(self.values.numpy())

    def to_dense(self):
        """Return the dense matrix as a Tensor of shape (n_rows, n_cols), differentiably."""
        return spread(self.values, pattern=self.pattern)

    def scale(self, *, rows=None, cols=None):
        """Return the matrix with entries ``rows[i] · a_ij · cols[j]``, on the same pattern.

        Parameters
        ----------
        rows, cols : Tensor or array_like of shape (n_rows,), (n_cols,), optional
            Left out: ones.

        Raises
        ------
        ValueError
            If a shape does not fit.

        Examples
        --------
        >>> import minisparse as ms
        >>> ms.diag([1.0, 2.0]).scale(rows=[3.0, 4.0]).values
        tensor([3., 8.])
        """
        values, p = self.values, self.pattern
        for name, factor, to in (("rows", rows, "map_rows"), ("cols", cols, "map_columns")):
            if factor is not None:
                if not isinstance(factor, Tensor):
                    factor = as_operand(factor, self.dtype, "scale")
                _check_shape(f"scale: {name}", factor, p.shape[name == "cols"])
                values = values * gather(factor, index_map=getattr(p, to))
        return self.with_values(values)

    def __repr__(self):
        name = type(self).__name__.lstrip("_")
        return f"{name}(shape={self.shape}, nnz={self.nnz}, dtype={self.dtype})"

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        if ufunc in (np.matmul, np.multiply) and method == "__call__" and not kwargs:
            return (matmul if ufunc is np.matmul else multiply)(*inputs)
        return self.__array_function__(ufunc, (), inputs, kwargs)

    def __array_function__(self, function, types, args, kwargs):
        raise TypeError(
            f"numpy.{function.__name__} does not take a sparse tensor: work on its .values (as in "
            "S.with_values(ms.exp(S.values))), .values.numpy(), .to_dense() or .to_scipy(), or use "
            "ms.matmul(A, S) and ms.multiply(A, S) with SciPy matrices, ms.stack to join Tensors"
        )

    def __array__(self, dtype=None, copy=None):
        self.__array_function__(np.asarray, (), (), {})

    def __copy__(self):
        return copy.deepcopy(self)  # copies are independent, as those of a Tensor are

    def __truediv__(self, other):
        if is_sparse(other) or raw(other).ndim:
            return NotImplemented
        return self.with_values(self.values / other)

    def __neg__(self):
        return self.with_values(-self.values)


class _Transposed(SparseTensor):
    """The transpose of another SparseTensor, read through it: what it shows is always current."""

    def __init__(self, base):
        self._base = base

    T = property(attrgetter("_base"))
    pattern = property(attrgetter("_base.pattern.T"))
    values = property(lambda self: gather(self._base.values, index_map=self._base.pattern.map_T))
    dtype = property(attrgetter("_base.dtype"))

    def __tensor__(self):
        raise TypeError("a transposed view has no gradient: ask for that of S, not of S.T")

    def _operand(self):
        values, pattern, transpose = self._base._operand()
        return values, pattern, not transpose


# ------------------------------------------------------------------------------------- products


_DENSE = (Tensor, np.ndarray, float, int)  # asked first, since these are what most products meet
_OURS = (Tensor, SparseTensor)


def is_sparse(x):
    """Tell whether `x` is a SparseTensor or a SciPy sparse matrix or array."""
    return not isinstance(x, _DENSE) and (isinstance(x, SparseTensor) or sp.issparse(x))


def as_sparse(A, other):
    """Return a sparse operand as a SparseTensor; SciPy's takes dtype and device of `other`."""
    if isinstance(A, SparseTensor):
        return A
    dtype, device = (other.dtype, other.device) if isinstance(other, _OURS) else (None, "cpu")
    return SparseTensor.from_scipy(A, dtype=dtype).to(device)


def matmul(x, y):
    """Return ``x @ y``, either of which may be sparse.

    Parameters
    ----------
    x, y : Tensor, SparseTensor, SciPy sparse matrix, or array_like
        A sparse factor on the left takes y of shape (n_cols,), (n_cols, k) or (..., n_cols, k); on
        the right, x of shape (n_rows,) or (..., m, n_rows).  Dense factors follow NumPy's rules.

    Returns
    -------
    Tensor, or SparseTensor if both are sparse
        What SciPy or NumPy returns if no operand is a Tensor or SparseTensor.

    Raises
    ------
    ValueError
        If the shapes do not fit.
    TypeError
        If two Tensors differ in dtype.

    Notes
    -----
    Time O(nnz·k).  Two sparse factors give a SparseTensor with every entry that the product can
    have, whatever its value; its pattern is worked out once for the two patterns.

    The fast layout of the dense factor is C order with the sparse factor's columns as rows; ``X @
    S`` therefore runs without a copy where ``X.T`` is in C order, as the results of such products
    are.  A SciPy matrix is brought to canonical form at each call: make a
    SparseTensor of one that is used often.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> import minisparse as ms
    >>> x = ms.tensor([1.0, 2.0], requires_grad=True)
    >>> ms.matmul(sp.csr_array([[0.0, 3.0]]), x)
    tensor([6.], op=spmm)
    """
    left, right = is_sparse(x), is_sparse(y)
    if not (left or right):
        return ops.matmul(x, y)
    if not (isinstance(x, _OURS) or isinstance(y, _OURS)):
        return x @ y
    if left and right:
        return as_sparse(x, y)._matmul(as_sparse(y, x))
    if left:
        return _sparse_dense(as_sparse(x, y), y)
    return swapped(_sparse_dense(as_sparse(y, x).T, swapped(x)))  # X S = (Sᵀ Xᵀ)ᵀ


def _sparse_dense(S, x):
    """Return ``S X`` for X of one, two or more dimensions."""
    values, pattern, transpose = S._operand()
    x = x if isinstance(x, Tensor) else raw(x)
    if x.ndim < 3:
        return spmm(values, x, pattern=pattern, transpose=transpose)
    *lead, rows, k = x.shape
    n = x.ndim
    front = ops.transpose(x, axes=(n - 2, *range(n - 2), n - 1))
    # Not -1: with nothing in the stack, its size could not be told.
    flat = ops.reshape(front, shape=(rows, math.prod(lead) * k))
    y = spmm(values, flat, pattern=pattern, transpose=transpose)
    y = ops.reshape(y, shape=(y.shape[0], *lead, k))
    return ops.transpose(y, axes=(*range(1, n - 1), 0, n - 1))


def multiply(x, y):
    """Return ``x * y`` elementwise, either of which may be sparse.

    A sparse factor times a number or a dense one (broadcast to its shape) is a SparseTensor on its
    pattern; two sparse factors give one on the entries that both have.

    Parameters
    ----------
    x, y : Tensor, SparseTensor, SciPy sparse matrix, or array_like

    Returns
    -------
    SparseTensor if a factor is sparse, else Tensor
        What SciPy or NumPy returns if no operand is a Tensor or SparseTensor.

    Raises
    ------
    ValueError
        If the shapes do not fit.

    Notes
    -----
    Time and memory O(nnz + n_rows + n_cols), also for the gradient of a factor that is broadcast
    along an axis; that of a factor of the full shape is dense, as the factor is.
    """
    if not is_sparse(x):
        x, y = y, x
    if not is_sparse(x):
        return ops.multiply(y, x)
    if not (isinstance(x, _OURS) or isinstance(y, _OURS)):
        return x.multiply(y)
    S = as_sparse(x, y)
    return S._multiply(as_sparse(y, S)) if is_sparse(y) else _scaled(S, y)


def _scaled(S, d):
    """Return S times a dense factor that broadcasts to its shape, on S's pattern."""
    d = d if isinstance(d, Tensor) else as_operand(d, S.dtype, "multiply")
    if np.broadcast_shapes(d.shape, S.shape) != S.shape:
        raise ValueError(f"multiply: a factor of shape {d.shape} does not fit {S.shape}")
    d_rows, d_cols = (1, 1, *d.shape)[-2:]
    if (d_rows, d_cols) == S.shape:
        factor = sample(ops.reshape(d, shape=S.shape), pattern=S.pattern)
        return S.with_values(S.values * factor)
    flat = ops.ravel(d) if d.ndim else d  # one number for all, for each row, or for each column
    if d.size == 1:
        return S.with_values(S.values * flat)
    return S.scale(rows=flat) if d_cols == 1 else S.scale(cols=flat)


def _times(x, y):
    """Return ``x * y``, elementwise but for SciPy's matrices, which mean the product by it."""
    if isinstance(x, sp.spmatrix) or isinstance(y, sp.spmatrix):
        raise TypeError("* of a SciPy matrix is unclear: use ms.matmul(A, t) or ms.multiply(A, t)")
    return multiply(x, y)


# A Tensor and a SparseTensor on either side of an operator meet in one function.
ops.bind_operator("matmul", matmul)
ops.bind_operator("mul", _times)
for _name in ("__matmul__", "__rmatmul__", "__mul__", "__rmul__"):
    setattr(SparseTensor, _name, getattr(Tensor, _name))


def sddmm(U, V, pattern):
    """Return the matrix with ``U[i] · V[j]`` at each entry (i, j) of `pattern`, and no others.

    Parameters
    ----------
    U : Tensor or array_like of shape (n_rows, k) or (n_rows,)
    V : Tensor or array_like of shape (n_cols, k) or (n_cols,)
    pattern : Pattern

    Returns
    -------
    SparseTensor

    Raises
    ------
    ValueError
        If the shapes do not fit.

    Notes
    -----
    Time O(nnz·k), memory O(nnz); its gradients are two products with a sparse matrix.

    Examples
    --------
    >>> import minisparse as ms
    >>> ms.sddmm([1.0, 2.0], [3.0, 4.0], ms.Pattern.diagonal(2)).values
    tensor([3., 8.])
    """
    require(isinstance(pattern, Pattern), f"sddmm: {type(pattern)} is not a Pattern", TypeError)
    if not (isinstance(U, Tensor) or isinstance(V, Tensor)):
        U, V = tensor(U), tensor(V)
    return SparseTensor(pattern, _sddmm(U, V, pattern=pattern))


# ------------------------------------------------------------------------------------ parameters


class SparseParameter(SparseTensor):
    """A trainable sparse matrix: a fixed pattern and the free weights its values are made of.

    Parameters
    ----------
    A : SciPy sparse matrix or array, SparseTensor, or (Pattern, values)
        Where the entries are and what they start from.  Copied.
    trainable : optional
        Which entries are trained: a boolean mask of A's shape, as a SciPy sparse matrix or a dense
        array (read at the stored entries), or of shape (nnz,) in canonical order.  The others keep
        their value bit for bit.  All by default.
    share : optional
        Integer labels, as a matrix of A's shape read at the stored entries, or of shape (nnz,).
        Trainable entries of one label are one weight.
    dtype : float32 or float64, optional
        That of `A` by default.

    Attributes
    ----------
    free : Tensor of shape (n_free,)
        The distinct trainable weights, ordered by their first entry: the leaf that is trained.
    n_free : int
    values : Tensor of shape (nnz,)
        ``free`` itself if every entry is a weight of its own.
    grad : ndarray of shape (n_free,) or None
        That of ``free``.

    Raises
    ------
    ValueError
        If shapes do not fit, if the initial values of one label differ, or if a mask or labels of
        shape (nnz,) come with a matrix that was not in canonical CSR form, since their order would
        be a guess.
    TypeError
        If a mask is not boolean, or labels are not integers.

    Examples
    --------
    A band whose diagonal is fixed to one:

    >>> import numpy as np
    >>> import scipy.sparse as sp
    >>> import minisparse as ms
    >>> A = sp.diags_array([[0.5, 0.5], [1, 1, 1], [0.5, 0.5]], offsets=[-1, 0, 1])
    >>> W = ms.SparseParameter(A, trainable=~np.eye(3, dtype=bool))
    >>> W.n_free
    4
    >>> (W @ np.ones(3)).sum().backward()
    >>> ms.optim.SGD([W], lr=0.25).step()
    >>> W.to_scipy().toarray()
    array([[1.  , 0.25, 0.  ],
           [0.25, 1.  , 0.25],
           [0.  , 0.25, 1.  ]])
    """

    def __init__(self, A, *, trainable=None, share=None, dtype=None):
        ordered = True
        if isinstance(A, tuple):
            A = SparseTensor(*A)
        if isinstance(A, SparseTensor):
            pattern, values = A.pattern, A.values.data
        else:
            pattern, values, ordered = canonical(A)
        values = as_floats(values, dtype)
        trained = np.arange(pattern.nnz)
        if trainable is not None:
            trained = np.flatnonzero(_at_entries(trainable, np.bool_, pattern, ordered))
        first, index = trained, np.full(pattern.nnz, -1)
        index[trained] = np.arange(len(trained))
        if share is not None:
            labels = _at_entries(share, np.integer, pattern, ordered)[trained]
            _, first, weight = np.unique(labels, return_index=True, return_inverse=True)
            order = np.argsort(first)
            first, index[trained] = trained[first[order]], np.argsort(order)[weight]
            start, given = values[first][index[trained]], values[trained]
            wrong = np.flatnonzero((start != given) & ~(np.isnan(start) & np.isnan(given)))
            if len(wrong):
                w = wrong[0]
                but = f"but its entries start from {start[w]} and {given[w]}"
                raise ValueError(f"SparseParameter: label {labels[w]} is one weight, {but}")
        index_map = IndexMap(index, len(first)) if len(first) < pattern.nnz else None
        base = values if len(trained) < pattern.nnz else None
        self._pattern, self._free = pattern, Tensor(values[first], True)
        self._index_map, self._base, self._cache = index_map, base, None

    @classmethod
    def from_dense(cls, D, mask):
        """Make a parameter of the entries of a dense matrix at a boolean mask (or pattern)."""
        return cls(SparseTensor.from_dense(D, mask))

    def prune(self, *, keep):
        """Return a new parameter with only the entries of largest magnitude.

        Called on the class with a dense matrix, ``SparseParameter.prune(D, keep=...)``, it keeps
        the largest entries of D.

        Parameters
        ----------
        keep : int or float
            How many entries, or which fraction of those of D, or of those stored here.

        Notes
        -----
        The order of equal magnitudes is the canonical one.  Frozen entries stay frozen, tied ones
        tied.
        """
        if not isinstance(self, SparseParameter):
            D = tensor(self)
            require(D.ndim == 2, f"prune: needs a matrix, got shape {D.shape}")
            pattern = Pattern.dense(D.shape)
            return SparseParameter((pattern, D.data.ravel())).prune(keep=keep)
        fraction = isinstance(keep, (float, np.floating))
        most = 1 if fraction else self.nnz
        require(0 <= keep <= most, f"prune: keep={keep} is not between 0 and {most}")
        n = round(float(keep) * self.nnz) if fraction else operator.index(keep)
        kept = np.argsort(-np.abs(self.values.detach().to("cpu").data), kind="stable")
        kept = np.sort(kept[:n])
        p = self.pattern
        pattern = Pattern.from_coords(p.rows[kept], p.indices[kept], p.shape)
        index = np.arange(self.nnz) if self._index_map is None else self._index_map.index
        parts = (pattern, self.values.data[kept])
        return SparseParameter(parts, trainable=index[kept] >= 0, share=index[kept])

    def _keep_free(self, value):
        if value is not self._free:  # W.free -= ... under no_grad assigns the same Tensor again
            raise AttributeError("free cannot be replaced: write W.free.data = ... to change it")

    free = property(attrgetter("_free"), _keep_free, doc="The trained weights, a leaf.")
    n_free = property(attrgetter("free.size"), doc="The number of trained weights.")
    dtype = property(attrgetter("free.dtype"), doc="numpy.float32 or numpy.float64.")

    @property
    def values(self):
        """All stored values in their order, a Tensor of shape (nnz,)."""
        if self._index_map is None:
            return self.free
        state = (self.free._version[0], is_grad_enabled(), self.free.requires_grad)
        if self._cache is None or self._cache[0] != state:
            values = gather(self.free, index_map=self._index_map, base=self._base)
            if values.device == "cpu":
                values._array.flags.writeable = False  # the way in is `free`
            self._cache = state, values
        return self._cache[1]

    def __tensor__(self):
        return self.free

    def _with_leaf(self, leaf):
        other = SparseParameter.__new__(SparseParameter)
        vars(other).update(vars(self), _free=leaf, _cache=None)
        return other

    def to(self, device):
        """Return a new parameter on "cpu" or "cuda"; itself if it is there."""
        free = self.free
        other = self._with_leaf(Tensor(kernels.moved(free._array, device), free.requires_grad))
        other._base = kernels.moved(self._base, device)
        return self if self.device == device else other

    def _no_place(self, other):
        raise TypeError("a SparseParameter changes through W.free: W.free -= ... under no_grad")

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __imatmul__ = _no_place

    def __getstate__(self):
        return vars(self) | {"_cache": None}


def _at_entries(what, kind, pattern, ordered):
    """Read a mask or labels at the entries of `pattern`: (nnz,), as the user's order or place."""
    name = "trainable" if kind is np.bool_ else "share"
    what = what if sp.issparse(what) else np.asarray(what)
    if not np.issubdtype(what.dtype, kind) and (sp.issparse(what) or what.size):
        raise TypeError(f"SparseParameter: {name} of dtype {what.dtype}, needs {kind.__name__}")
    if what.shape == pattern.shape and sp.issparse(what):
        there, data, _ = canonical(what)
        return np.append(data, 0)[there.find(pattern)].astype(what.dtype)
    if what.shape == pattern.shape:
        return what[pattern.rows, pattern.indices]
    if what.shape != (pattern.nnz,) or sp.issparse(what):
        needs = f"{pattern.shape} or, if dense, ({pattern.nnz},)"
        raise ValueError(f"SparseParameter: {name} of shape {what.shape}, needs {needs}")
    if not ordered:
        raise ValueError(
            f"SparseParameter: a {name} of shape (nnz,) needs a matrix in canonical CSR form, else "
            "its order is a guess: A = A.tocsr(); A.sum_duplicates(), or give it in A's shape"
        )
    return what
