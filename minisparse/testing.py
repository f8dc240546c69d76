"""Hypothesis strategies for sparse matrices and for the arrays that meet them.

Every argument is given by keyword, and may be a value or a strategy of such values, as in
:mod:`hypothesis.extra.numpy`.  A wrong value is refused where the strategy is made, one drawn from
a strategy where it is drawn.  Sizes are drawn first and small ones come first, so that examples
shrink to small matrices, C order, few entries and zeros.

With ``exact=True`` all numbers are integers from -4 to 4.  Then sums of products come out the same
in any order, in float32 as well, and a test may ask for equality where it otherwise would have to
choose a tolerance.

This module needs ``hypothesis``; nothing else in the package imports it.  The first use of a kernel
compiles it, which Hypothesis would take for a slow test: call ``ms.warmup()`` before, or set
``deadline=None``.

Examples
--------
>>> import numpy as np
>>> from hypothesis import given, settings
>>> from minisparse.testing import spmm_operands
>>> @settings(deadline=None, database=None, max_examples=20)
... @given(spmm_operands(exact=True))
... def test_product(operands):
...     S, x = operands
...     assert np.array_equal((S @ x).data, S.to_dense().data @ x)
>>> test_product()
"""

import functools

import numpy as np
import scipy.sparse as sp
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.extra import numpy as hnp

from .engine import require, tensor
from .pattern import Pattern
from .sparse import SparseParameter, SparseTensor

__all__ = [
    "arrays", "cotangents", "patterns", "scipy_csr", "sparse_parameters", "sparse_tensors",
    "spmm_operands",
]  # fmt: skip

LAYOUTS = ("C", "Fortran", "sliced", "reversed", "read-only", "stride 0", "unaligned")
FORMATS = ("csr", "csc", "coo", "bsr", "lil", "dok", "dia")

# ------------------------------------------------------------------------------------- arguments


def _is_shape(v):
    return isinstance(v, tuple) and all(isinstance(n, int | np.integer) and n >= 0 for n in v)


_DTYPES = np.dtype(np.float32), np.dtype(np.float64)
_SIDE = st.integers(0, 6)
_SIZES, _SIDES = st.lists(_SIDE, max_size=3).map(tuple), st.tuples(_SIDE, _SIDE)
_FLAG = "True or False", lambda v: isinstance(v, bool), st.booleans()
# What each argument needs, in words; whether a value is that; what None stands for.
_NEEDS = {
    "sizes": ("a tuple of integers of 0 or more", _is_shape, _SIZES),
    "shape": ("a pair of integers of 0 or more", lambda v: _is_shape(v) and len(v) == 2, _SIDES),
    "dtype": ("float32 or float64", _DTYPES.__contains__, st.sampled_from(_DTYPES)),
    "layout": (f"one of {LAYOUTS}", LAYOUTS.__contains__, st.sampled_from(LAYOUTS)),
    "format": (f"one of {FORMATS}", FORMATS.__contains__, st.sampled_from(FORMATS)),
    "ndim": ("an integer from 1 to 32", range(1, 33).__contains__, st.integers(1, 3)),
    "pattern": ("a Pattern", lambda v: isinstance(v, Pattern), None),
    "elements": ("a strategy of numbers", lambda v: isinstance(v, st.SearchStrategy), st.none()),
}


def _argument(function, name, value):
    """Return a strategy of one value, which is checked now, or of many, each when it is drawn."""
    dense = name == "shape" and function in ("arrays", "cotangents")
    needs, holds, default = _NEEDS.get("sizes" if dense else name, _FLAG)

    def checked(value):
        require(holds(value), f"{function}: {name}={value!r}, needs {needs}", InvalidArgument)
        return value

    if isinstance(value, st.SearchStrategy) and not holds(value):
        return value.map(checked)
    return default if value is None else st.just(checked(value))


def _strategy(function):
    """Turn a function of `draw` and of values into one of values or strategies of such."""
    composite, name = st.composite(function), function.__name__

    @functools.wraps(composite)
    def public(**given):
        composite(**given)  # Python refuses names that are missing or too many
        given = function.__kwdefaults__ | given
        drawn = {key: _argument(name, key, value) for key, value in given.items()}
        if "pattern" in given:  # the function sees no shape
            shape = drawn.pop("shape")
            if given["pattern"] is None:
                drawn["pattern"] = patterns(shape=shape)
            elif given["shape"] is not None:
                raise InvalidArgument(f"{name}: give either pattern or shape, not both")
        return st.fixed_dictionaries(drawn).flatmap(lambda values: composite(**values))

    return public


# ------------------------------------------------------------------------------ dense strategies


def _plain(shape, dtype, exact, elements=None):
    """Draw a C-ordered array; every number of its own, so that few are equal by accident."""
    ends = {"min_value": -4, "max_value": 4}
    if elements is None:
        elements = st.integers(**ends) if exact else {**ends, "allow_subnormal": False}
    return hnp.arrays(dtype, shape, elements=elements, fill=st.nothing())


@_strategy
def arrays(draw, *, shape=None, dtype=np.float64, exact=False, layout=None, elements=None):
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
    if layout == "stride 0":
        own = tuple(draw(st.sampled_from([min(n, 1), n])) for n in shape)
        return np.broadcast_to(draw(_plain(own, dtype, exact, elements)), shape)
    array = view = draw(_plain(shape, dtype, exact, elements))
    if layout == "Fortran":
        view = array.copy("F")  # np.asfortranarray would make one axis of none
    elif layout == "sliced":  # NaN around it: who reads past a stride finds out
        around = np.full([2 * n + 1 for n in shape], np.nan, dtype)
        view = around[(slice(1, None, 2),) * len(shape) + (...,)]
    elif layout == "reversed":
        view = array.copy()[(slice(None, None, -1),) * len(shape) + (...,)]
    elif layout == "unaligned":
        view = np.ndarray(shape, dtype, bytearray(array.nbytes + 1), offset=1)
    view[...] = array
    view.flags.writeable = layout != "read-only"
    return view


@_strategy
def cotangents(draw, *, shape, dtype=np.float64, exact=False):
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
    if draw(st.booleans()):
        return np.broadcast_to(draw(_plain((), dtype, exact)), shape)
    layout = st.sampled_from([kind for kind in LAYOUTS if kind != "unaligned"])
    return draw(arrays(shape=shape, dtype=dtype, exact=exact, layout=layout))


# ----------------------------------------------------------------------------- sparse strategies


@_strategy
def patterns(draw, *, shape=None):
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
    # Hypothesis fills most of an array with one truth value: sparse masks, and dense ones.
    mask = draw(hnp.arrays(bool, shape))
    if shape[0] and draw(st.sampled_from([False, False, False, True])):
        mask[draw(st.integers(0, shape[0] - 1))] = True
    return Pattern.from_mask(mask)


@_strategy
def sparse_tensors(
    draw, *, pattern=None, shape=None, dtype=np.float64, exact=False, requires_grad=False
):
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
    values = draw(_plain(pattern.nnz, dtype, exact))
    return SparseTensor(pattern, tensor(values, requires_grad=requires_grad))


@_strategy
def sparse_parameters(
    draw, *, pattern=None, shape=None, dtype=np.float64, exact=False, frozen=None, tied=None
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
    >>> W.n_free < W.nnz
    True
    """
    n, share = pattern.nnz, None
    values = draw(_plain(n, dtype, exact))
    trainable = draw(hnp.arrays(bool, n)) if frozen else np.ones(n, bool)
    if tied:  # those of one label start from one value
        share = draw(hnp.arrays(int, n, elements=st.integers(-1, 3)))
        values = np.where(trainable, draw(_plain(5, dtype, exact))[share], values)
    return SparseParameter((pattern, values), trainable=trainable, share=share)


@_strategy
def spmm_operands(
    draw, *, pattern=None, shape=None, dtype=np.float64, exact=False, ndim=None,
    requires_grad=False, as_arrays=False,
):  # fmt: skip
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
    numbers = {"dtype": dtype, "exact": exact}
    k = draw(st.tuples(*[st.integers(0, 4)] * (ndim - 1)))
    x = draw(arrays(shape=(*k[1:], pattern.shape[1], *k[:1]), **numbers))
    if as_arrays:
        return (pattern, draw(arrays(shape=(pattern.nnz,), **numbers))), x
    return draw(sparse_tensors(pattern=pattern, requires_grad=requires_grad, **numbers)), x


@_strategy
def scipy_csr(draw, *, shape=None, dtype=np.float64, exact=False, format="csr", canonical=None):
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
    >>> bool(A.has_canonical_format)
    False
    """
    pattern = draw(patterns(shape=shape))
    order = list(range(pattern.nnz))
    if order and not canonical:
        order += draw(st.lists(st.sampled_from(range(pattern.nnz)), max_size=4))
        order = draw(st.permutations(order))
    data = draw(_plain(len(order), dtype, exact))
    kind, width = draw(st.sampled_from([(k, w) for k in ("array", "matrix") for w in "il"]))
    rows, cols = (c[order].astype(width) for c in (pattern.rows, pattern.indices))
    if format not in ("csr", "csc"):
        A = getattr(sp, f"coo_{kind}")((data, (rows, cols)), shape=pattern.shape)
        A.coords = rows, cols  # it would narrow them
        return A.asformat(format)
    # Built by hand, since conversions would sort and merge.
    major, minor = (rows, cols) if format == "csr" else (cols, rows)
    by, ends = np.argsort(major, kind="stable"), range(pattern.shape[format == "csc"] + 1)
    indptr = np.searchsorted(major[by], ends).astype(width)
    A = getattr(sp, f"{format}_{kind}")((data[by], minor[by], indptr), shape=pattern.shape)
    A.indices, A.indptr = minor[by], indptr  # it would narrow them
    return A
