"""The differentiable solution of sparse linear systems, by SciPy's SuperLU."""

import weakref

import numpy as np

from .engine import Tensor, as_operand, primitive, require
from .sparse import _sddmm, as_sparse, is_sparse, matmul

_factors: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


@primitive
def _spsolve(values, b, *, pattern, factor, transpose=False):
    """Return x with A x = b, or Aᵀ x = b if `transpose`; `factor` is SuperLU's of the values."""
    # SuperLU was given the rows of A as columns, so what it knows as the transpose is A.
    return factor.solve(np.asarray(b, order="F"), "N" if transpose else "T")


@_spsolve.vjp
def _(g, need, values, out, pattern, factor, transpose):
    db = _spsolve(values, g, pattern=pattern, factor=factor, transpose=not transpose)
    u, v = (out, db) if transpose else (db, out)
    return (-_sddmm(u, v, pattern=pattern) if need[0] else None), db


def _factorised(S, values):
    """Factorise a sparse tensor once for each set of values: until they change in place."""
    from scipy.sparse.linalg import splu

    current = S.__tensor__()._version  # of a parameter, that of its weights
    seen, version, factor = _factors.get(S, (None, 0, None))
    if seen is not current or version != seen[0]:
        pattern = S.pattern
        try:
            order = "MMD_AT_PLUS_A" if pattern == pattern.T else "COLAMD"
            factor = splu(pattern.to_scipy(values.numpy()).T, order)
        except RuntimeError as error:
            what = f"{S!r} is singular, or holds NaN or infinity"
            raise np.linalg.LinAlgError(f"spsolve: {error}: {what}") from None
        _factors[S] = current, current[0], factor
    return factor


def spsolve(S, b):
    """Solve the sparse linear system ``S x = b``.

    Parameters
    ----------
    S : SparseTensor, or SciPy sparse matrix, of shape (n, n)
    b : Tensor or array_like of shape (n,) or (n, k)
        One right-hand side or several.

    Returns
    -------
    Tensor of the shape of `b`
        Differentiable to any order in the values of `S` and in `b`.

    Raises
    ------
    ValueError
        If `S` is not square, or the shapes do not fit.
    numpy.linalg.LinAlgError
        If `S` is singular.
    TypeError
        If two Tensors differ in dtype.

    Notes
    -----
    `S` is factorised once for its values: further right-hand sides, the gradients and the gradients
    of those take two triangular solves each.  The factors live as long as `S` does, and may take
    much more memory than it does.  With λ the solution of ``Sᵀ λ = g``, the gradient of b is λ, and
    that of the value at (i, j) is ``-λ_i · x_j``: only the stored entries have one.

    References
    ----------
    Li, "An overview of SuperLU: algorithms, implementation, and user interface", ACM Transactions
    on Mathematical Software 31, 2005.

    Examples
    --------
    >>> import minisparse as ms
    >>> ms.spsolve(ms.diag([2.0, 4.0]), [2.0, 2.0])
    tensor([1. , 0.5])
    """
    if not is_sparse(S):
        raise TypeError(f"spsolve: S is a {type(S).__name__}, neither SparseTensor nor SciPy's")
    S = as_sparse(S, b)
    b = b if isinstance(b, Tensor) else as_operand(b, S.dtype, "spsolve")
    n_rows, n_cols = S.shape
    if n_rows != n_cols or b.ndim not in (1, 2) or len(b) != n_rows:
        raise ValueError(f"spsolve: S of shape {S.shape}, b of shape {b.shape}")
    require(S.dtype == b.dtype, f"spsolve: S of dtype {S.dtype}, b of dtype {b.dtype}", TypeError)
    values, pattern, transpose = S._operand()
    if b.size == 0:  # SuperLU takes no empty operand; the product has the right shape and graph
        return matmul(S, b)
    factor = _factorised(S if not transpose else S.T, values)
    return _spsolve(values, b, pattern=pattern, factor=factor, transpose=transpose)
