"""Solutions to chapter 2: one function for each exercise."""

import numpy as np

import minisparse as ms


def to_csr(rows, cols, values, shape):
    places, which = np.unique(rows * shape[1] + cols, return_inverse=True)
    counts = np.bincount(places // shape[1], minlength=shape[0])
    summed = np.bincount(which, values, minlength=len(places))
    return np.append(0, np.cumsum(counts)), places % shape[1], summed


def spmm_transposed(indptr, indices, values, n_cols, g):
    out = np.zeros((n_cols, g.shape[1]))
    for i in range(len(indptr) - 1):
        for e in range(indptr[i], indptr[i + 1]):
            out[indices[e]] += values[e] * g[i]
    return out


def value_gradient(indptr, indices, g, x):
    out = np.zeros(len(indices))
    for i in range(len(indptr) - 1):
        for e in range(indptr[i], indptr[i + 1]):
            out[e] = g[i] @ x[indices[e]]
    return out


def sddmm_rule(g, u, v, pattern):
    Z = ms.SparseTensor(pattern, g)
    return Z @ v, Z.T @ u


def scale_rule(g, values, r, c, rows, cols):
    dr = np.bincount(rows, g * values * c[cols], minlength=len(r))
    dc = np.bincount(cols, g * values * r[rows], minlength=len(c))
    return g * r[rows] * c[cols], dr, dc
