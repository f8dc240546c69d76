"""Hypothesis strategies for sparse matrices and for the arrays that meet them.

Every argument is given by keyword, and may be a value or a strategy of such values, as in
:mod:`hypothesis.extra.numpy`.  A wrong value is refused where the strategy is made, one drawn from
a strategy where it is drawn.  Sizes are drawn first and small ones come first, so that examples
shrink to small matrices, C order, few entries and zeros.

With ``exact=True`` all numbers are integers from -4 to 4.  Then sums of products come out the same
in any order, in float32 as well, and a test may ask for equality where it otherwise would have to
choose a tolerance.

This module needs ``hypothesis``; nothing else in the package imports it.
"""

from __future__ import annotations

import operator

import numpy as np
import scipy.sparse as sp
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.extra import numpy as hnp

from .engine import as_dtype, tensor
from .pattern import Pattern
from .sparse import SparseParameter, SparseTensor

__all__ = [
    "arrays", "cotangents", "patterns", "scipy_csr", "sparse_parameters", "sparse_tensors",
    "spmm_operands",
]  # fmt: skip

LAYOUTS = ("C", "Fortran", "sliced", "reversed", "read-only", "stride 0", "unaligned")
FORMATS = ("csr", "csc", "coo", "bsr", "lil", "dok", "dia")
MAX_SIDE = 6


# ------------------------------------------------------------------------- arguments and numbers


def _sizes(shape):
    shape = tuple(operator.index(n) for n in shape)
    if any(n < 0 for n in shape):
        raise ValueError
    return shape


def _sides(shape):
    n_rows, n_cols = _sizes(shape)
    return n_rows, n_cols


def _a(kind):
    def check(value):
        if not isinstance(value, kind):
            raise TypeError
        return value

    return check


def _among(names):
    return lambda value: names[names.index(value)]


_SIDE = st.integers(0, MAX_SIDE)
_FLAG = _a(bool), "True or False", st.booleans()
# How each argument is checked, what to say if it is wrong, and what None draws.
_ARGUMENTS = {
    "shape": (
        _sizes,
        "a tuple of integers of 0 or more",
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=MAX_SIDE),
    ),
    "sides": (_sides, "a pair of integers of 0 or more", st.tuples(_SIDE, _SIDE)),
    "dtype": (as_dtype, "float32 or float64", None),
    "layout": (_among(LAYOUTS), f"one of {LAYOUTS}", st.sampled_from(LAYOUTS)),
    "format": (_among(FORMATS), f"one of {FORMATS}", None),
    "ndim": (_among(range(1, 33)), "an integer from 1 to 32", st.integers(1, 3)),
    "pattern": (_a(Pattern), "a Pattern", None),
}


def _arguments(function, **given):
    """Return a strategy for each argument: of one value, which is checked now, or of many."""
    strategies = []
    for name, value in given.items():
        check, needs, default = _ARGUMENTS.get(name, _FLAG)
        shown = "shape" if name == "sides" else name

        def checked(value, check=check, needs=needs, shown=shown):
            try:
                return check(value)
            except (TypeError, ValueError):
                message = f"{function}: {shown}={value!r}, needs {needs}, or a strategy of these"
                raise InvalidArgument(message) from None

        if value is None and default is not None:
            strategies.append(default)
        elif isinstance(value, st.SearchStrategy):
            strategies.append(value.map(checked))
        else:
            strategies.append(st.just(checked(value)))
    return strategies


def _pattern_argument(function, pattern, shape):
    if pattern is None:
        return _patterns(*_arguments(function, sides=shape))
    if shape is not None:
        raise InvalidArgument(f"{function}: give either pattern or shape, not both")
    return _arguments(function, pattern=pattern)[0]


def _numbers(dtype, exact):
    if exact:
        return st.integers(-4, 4).map(float)
    return st.floats(-4, 4, width=8 * dtype.itemsize, allow_subnormal=False)


@st.composite
def _plain(draw, shape, dtype, exact, elements=None):
    """Draw a C-ordered array; every number of its own, so that few are equal by accident."""
    elements = _numbers(dtype, exact) if elements is None else elements
    return draw(hnp.arrays(dtype, shape, elements=elements, fill=st.nothing()))


def _laid_out(array, layout):
    """Return an array of the same numbers in another memory layout."""
    if layout == "Fortran":
        return array.copy("F")  # np.asfortranarray would make one axis of none
    if layout == "sliced":  # NaN around it: who reads past a stride finds out
        around = np.full([2 * n + 1 for n in array.shape], np.nan, array.dtype)
        view = around[(slice(1, None, 2),) * array.ndim + (...,)]
    elif layout == "reversed":
        view = np.empty_like(array)[(slice(None, None, -1),) * array.ndim + (...,)]
    elif layout == "unaligned":
        view = np.ndarray(array.shape, array.dtype, bytearray(array.nbytes + 1), offset=1)
    else:
        view = np.empty_like(array)
    view[...] = array
    view.flags.writeable = layout != "read-only"
    return view


@st.composite
def _arrays(draw, shape, dtype, exact, layout, elements=None):
    shape, dtype, exact, layout = draw(st.tuples(shape, dtype, exact, layout))
    if layout == "stride 0":
        own = tuple(draw(st.sampled_from([min(n, 1), n])) for n in shape)
        return np.broadcast_to(draw(_plain(own, dtype, exact, elements)), shape)
    return _laid_out(draw(_plain(shape, dtype, exact, elements)), layout)


# ------------------------------------------------------------------------------ dense strategies


def arrays(*, shape=None, dtype=np.float64, exact=False, layout=None, elements=None):
    """Draw dense arrays in every memory layout.

    Parameters
    ----------
    shape : tuple of int, or strategy
        Up to three axes of up to 6 by default, zero sizes among them.
    dtype : float32 or float64, or strategy
    exact : bool, or strategy
        Only integers from -4 to 4; otherwise any numbers in that range.
    layout : str, or strategy
        ``"C"``, ``"Fortran"``, ``"sliced"`` (every second entry of a larger array along each
        axis), ``"reversed"`` (negative strides), ``"read-only"``, ``"stride 0"`` (repeated along
        some axes, hence with equal numbers there) or ``"unaligned"`` (at an odd address); any of
        them by default.
    elements : strategy of numbers, optional
        Draw from it instead, infinities and NaN if it has them.

    Returns
    -------
    strategy of ndarray

    Raises
    ------
    hypothesis.errors.InvalidArgument
        If an argument is neither a value of its kind nor a strategy.

    Examples
    --------
    >>> from hypothesis import find
    >>> from minisparse.testing import arrays
    >>> find(arrays(shape=(2, 2), layout="Fortran", exact=True), lambda x: x.sum() > 0).strides
    (8, 16)
    """
    if elements is not None and not isinstance(elements, st.SearchStrategy):
        raise InvalidArgument(f"arrays: elements={elements!r}, needs a strategy of numbers")
    parts = _arguments("arrays", shape=shape, dtype=dtype, exact=exact, layout=layout)
    return _arrays(*parts, elements)


def cotangents(*, shape, dtype=np.float64, exact=False):
    """Draw gradients of a result of that shape, laid out as a backward pass may hand them on.

    Parameters
    ----------
    shape : tuple of int, or strategy
        That of the result.
    dtype : float32 or float64, or strategy
    exact : bool, or strategy
        As for :func:`arrays`.

    Returns
    -------
    strategy of ndarray
        In C order, transposed, cut from a larger array, with negative strides, read-only, and with
        stride 0, in particular all of one number, as the gradient of a sum is.

    Raises
    ------
    hypothesis.errors.InvalidArgument
        If an argument is neither a value of its kind nor a strategy.

    Examples
    --------
    >>> from hypothesis import find
    >>> from minisparse.testing import cotangents
    >>> find(cotangents(shape=(2, 3)), lambda g: g.strides == (0, 0))
    array([[0., 0., 0.],
           [0., 0., 0.]])
    """
    parts = _arguments("cotangents", shape=shape, dtype=dtype, exact=exact)
    layout = st.sampled_from([kind for kind in LAYOUTS if kind != "unaligned"])
    return _arrays(*parts, layout) | _constant(*parts)


@st.composite
def _constant(draw, shape, dtype, exact):
    shape, dtype, exact = draw(st.tuples(shape, dtype, exact))
    return np.broadcast_to(draw(_plain((), dtype, exact)), shape)


# ----------------------------------------------------------------------------- sparse strategies


@st.composite
def _patterns(draw, shape):
    n_rows, n_cols = draw(shape)
    # Hypothesis fills most of an array with one truth value: sparse masks, and dense ones.
    mask = draw(hnp.arrays(bool, (n_rows, n_cols)))
    if n_rows and draw(st.sampled_from([False, False, False, True])):
        mask[draw(st.integers(0, n_rows - 1))] = True
    return Pattern.from_mask(mask)


def patterns(*, shape=None):
    """Draw sparsity patterns.

    Parameters
    ----------
    shape : (int, int), or strategy
        Sides of up to 6 by default, zero among them.

    Returns
    -------
    strategy of Pattern
        Empty rows and columns, no entries at all, one full row and full matrices are among them.

    Raises
    ------
    hypothesis.errors.InvalidArgument
        If `shape` is neither a pair of sizes nor a strategy.

    Examples
    --------
    >>> from hypothesis import find
    >>> from minisparse.testing import patterns
    >>> find(patterns(), lambda p: p.nnz > 0)
    Pattern(shape=(1, 1), nnz=1, density=100%)
    """
    return _patterns(*_arguments("patterns", sides=shape))


@st.composite
def _sparse_tensors(draw, pattern, dtype, exact, requires_grad):
    pattern, dtype = draw(pattern), draw(dtype)
    values = draw(_plain(pattern.nnz, dtype, draw(exact)))
    return SparseTensor(pattern, tensor(values, requires_grad=draw(requires_grad)))


def sparse_tensors(*, pattern=None, shape=None, dtype=np.float64, exact=False, requires_grad=False):
    """Draw SparseTensors whose values are a leaf; stored zeros are among them.

    Parameters
    ----------
    pattern : Pattern, or strategy, optional
        Any of :func:`patterns` by default.
    shape : (int, int), or strategy, optional
        Instead of `pattern`: any pattern of that shape.
    dtype : float32 or float64, or strategy
    exact : bool, or strategy
        As for :func:`arrays`.
    requires_grad : bool, or strategy
        Of the values.

    Returns
    -------
    strategy of SparseTensor

    Raises
    ------
    hypothesis.errors.InvalidArgument
        If an argument is neither a value of its kind nor a strategy, or if both `pattern` and
        `shape` are given.

    Examples
    --------
    >>> from hypothesis import find
    >>> from minisparse.testing import sparse_tensors
    >>> S = find(sparse_tensors(shape=(1, 2), exact=True), lambda S: S.nnz == 2)
    >>> S.values
    tensor([0., 0.])
    """
    name = "sparse_tensors"
    rest = _arguments(name, dtype=dtype, exact=exact, requires_grad=requires_grad)
    return _sparse_tensors(_pattern_argument(name, pattern, shape), *rest)


@st.composite
def _sparse_parameters(draw, pattern, dtype, exact, frozen, tied):
    pattern, dtype, exact = draw(pattern), draw(dtype), draw(exact)
    n = pattern.nnz
    values = draw(_plain(n, dtype, exact))
    trainable = draw(hnp.arrays(bool, n)) if draw(frozen) else None
    share = draw(hnp.arrays(np.int64, n, elements=st.integers(-1, 3))) if draw(tied) else None
    if share is not None:  # those of one label start from one value
        trained = np.ones(n, bool) if trainable is None else trainable
        values[trained] = draw(_plain(5, dtype, exact))[share[trained]]
    return SparseParameter((pattern, values), trainable=trainable, share=share)


def sparse_parameters(
    *,
    pattern=None,
    shape=None,
    dtype=np.float64,
    exact=False,
    frozen=None,
    tied=None,
):
    """Draw SparseParameters, with constant entries and with entries that are one weight.

    Parameters
    ----------
    pattern : Pattern, or strategy, optional
        Any of :func:`patterns` by default.
    shape : (int, int), or strategy, optional
        Instead of `pattern`: any pattern of that shape.
    dtype : float32 or float64, or strategy
    exact : bool, or strategy
        As for :func:`arrays`.
    frozen : bool, or strategy
        Whether to draw a mask of trainable entries; without one all are.  Both by default.
    tied : bool, or strategy
        Whether to draw labels that make several entries one weight.  Both by default.

    Returns
    -------
    strategy of SparseParameter

    Raises
    ------
    hypothesis.errors.InvalidArgument
        If an argument is neither a value of its kind nor a strategy, or if both `pattern` and
        `shape` are given.

    Examples
    --------
    >>> from hypothesis import find
    >>> from minisparse.testing import sparse_parameters
    >>> W = find(sparse_parameters(tied=True, exact=True), lambda W: 0 < W.n_free < W.nnz)
    >>> W.nnz, W.n_free
    (2, 1)
    """
    name = "sparse_parameters"
    rest = _arguments(name, dtype=dtype, exact=exact, frozen=frozen, tied=tied)
    return _sparse_parameters(_pattern_argument(name, pattern, shape), *rest)


@st.composite
def _spmm_operands(draw, pattern, dtype, exact, ndim, requires_grad, as_arrays):
    pattern, dtype, exact, ndim = draw(st.tuples(pattern, dtype, exact, ndim))
    k, *lead = draw(st.tuples(*[st.integers(0, 4)] * (ndim - 1))) or (None,)
    shape = (pattern.shape[1],) if k is None else (*lead, pattern.shape[1], k)

    def drawn(shape):
        return draw(arrays(shape=shape, dtype=dtype, exact=exact))

    if draw(as_arrays):
        return (pattern, drawn((pattern.nnz,))), drawn(shape)
    values = draw(_plain(pattern.nnz, dtype, exact))
    S = SparseTensor(pattern, tensor(values, requires_grad=draw(requires_grad)))
    return S, drawn(shape)


def spmm_operands(
    *,
    pattern=None,
    shape=None,
    dtype=np.float64,
    exact=False,
    ndim=None,
    requires_grad=False,
    as_arrays=False,
):
    """Draw the two operands of ``S @ x``.

    Parameters
    ----------
    pattern : Pattern, or strategy, optional
        Any of :func:`patterns` by default.
    shape : (int, int), or strategy, optional
        Instead of `pattern`: any pattern of that shape.
    dtype : float32 or float64, or strategy
        Of both operands.
    exact : bool, or strategy
        As for :func:`arrays`.
    ndim : int, or strategy
        Of the dense operand: 1 for a vector, 2 for a matrix, more for stacks of matrices; from 1
        to 3 by default.
    requires_grad : bool, or strategy
        Of the sparse operand's values.
    as_arrays : bool, or strategy
        Give the sparse operand as ``(pattern, values)``, the values being an ndarray in any layout.

    Returns
    -------
    strategy of (SparseTensor or (Pattern, ndarray), ndarray)
        The dense operand is an array in any layout.

    Raises
    ------
    hypothesis.errors.InvalidArgument
        If an argument is neither a value of its kind nor a strategy, or if both `pattern` and
        `shape` are given.

    Examples
    --------
    >>> from hypothesis import find
    >>> from minisparse.testing import spmm_operands
    >>> S, x = find(spmm_operands(exact=True, ndim=1), lambda operands: operands[0].nnz > 1)
    >>> (S @ x).data.tolist() == (S.to_dense().data @ x).tolist()
    True
    """
    name = "spmm_operands"
    dense = _arguments(name, dtype=dtype, exact=exact, ndim=ndim)
    sparse = _arguments(name, requires_grad=requires_grad, as_arrays=as_arrays)
    return _spmm_operands(_pattern_argument(name, pattern, shape), *dense, *sparse)


@st.composite
def _scipy_csr(draw, shape, dtype, exact, fmt, canonical):
    pattern, dtype, fmt, canonical = draw(st.tuples(_patterns(shape), dtype, fmt, canonical))
    order = np.arange(pattern.nnz)
    if not canonical and pattern.nnz:
        again = draw(st.lists(st.integers(0, pattern.nnz - 1), max_size=4))
        order = np.array(draw(st.permutations([*range(pattern.nnz), *again])))
    data = draw(_plain(len(order), dtype, draw(exact)))
    rows, cols = pattern.rows[order], pattern.indices[order]
    width, kind = draw(st.sampled_from([(w, k) for k in ("array", "matrix") for w in "il"]))
    coo, csr = (getattr(sp, f"{name}_{kind}") for name in ("coo", "csr"))
    if fmt == "coo":
        A = coo((data, (rows, cols)), shape=pattern.shape)
        A.coords = tuple(c.astype(width) for c in (rows, cols))
        return A
    # Built by hand, since conversions would sort and merge: by column, and turned over, for csc.
    if fmt == "csc":
        rows, cols = cols, rows
    sizes = pattern.shape[:: -1 if fmt == "csc" else 1]
    by_row = np.argsort(rows, kind="stable")
    indptr = np.append(0, np.cumsum(np.bincount(rows, minlength=sizes[0])))
    A = csr((data[by_row], cols[by_row], indptr), shape=sizes)
    A.indices, A.indptr = A.indices.astype(width), A.indptr.astype(width)  # it would narrow them
    return A.T if fmt == "csc" else A.asformat(fmt)


def scipy_csr(*, shape=None, dtype=np.float64, exact=False, format="csr", canonical=None):
    """Draw SciPy sparse matrices and arrays, in good order and in bad.

    Parameters
    ----------
    shape : (int, int), or strategy
        Sides of up to 6 by default, zero among them.
    dtype : float32 or float64, or strategy
    exact : bool, or strategy
        As for :func:`arrays`.
    format : str, or strategy
        SciPy's name of a format; ``format=st.sampled_from(minisparse.testing.FORMATS)`` for all.
    canonical : bool, or strategy
        False also draws columns that are out of order and entries given more than once (in the
        formats that can hold them: csr, csc, coo).  Both by default.

    Returns
    -------
    strategy of scipy.sparse.sparray or scipy.sparse.spmatrix
        Stored zeros, empty rows and columns, int32 and int64 indices are among them.

    Raises
    ------
    hypothesis.errors.InvalidArgument
        If an argument is neither a value of its kind nor a strategy.

    Examples
    --------
    >>> from hypothesis import find
    >>> from minisparse.testing import scipy_csr
    >>> A = find(scipy_csr(exact=True), lambda A: not A.has_sorted_indices)
    >>> A.indices.tolist()
    [1, 0]
    """
    numbers = _arguments("scipy_csr", sides=shape, dtype=dtype, exact=exact)
    return _scipy_csr(*numbers, *_arguments("scipy_csr", format=format, canonical=canonical))
