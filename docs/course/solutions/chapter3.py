"""Solutions to chapter 3: one function for each exercise."""

import numpy as np


def sddmm(indptr, indices, u, v, out):
    for i in range(len(u)):
        for e in range(indptr[i], indptr[i + 1]):
            total = u.dtype.type(0)
            for c in range(u.shape[1]):
                total += u[i, c] * v[indices[e], c]
            out[e] = total


def traffic(n_rows, n_cols, nnz, k, itemsize):
    small = 4 * (n_rows + 1) + 4 * nnz + itemsize * nnz
    result = n_rows * k * itemsize
    return small + nnz * k * itemsize + result, small + n_cols * k * itemsize + result


def by_column(indptr, indices, n_cols):
    perm = np.argsort(indices, kind="stable")
    rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    counts = np.bincount(indices, minlength=n_cols)
    return np.append(0, np.cumsum(counts)), rows[perm], perm


def fair_bounds(indptr, parts):
    before = indptr + np.arange(len(indptr))
    return np.searchsorted(before, before[-1] * np.arange(parts + 1) // parts)
