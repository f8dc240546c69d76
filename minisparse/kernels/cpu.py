"""Simple kernels, to be replaced by fast ones."""
import numba
import numpy as np

from .memory import empty
from .reference import adam_scalars


def contiguous(x):
    return np.require(x, x.dtype.newbyteorder("="), ["C", "A"])


@numba.njit(error_model="numpy", nogil=True)
def _spmm(indptr, indices, values, perm, x, out):
    for i in range(len(indptr) - 1):
        for c in range(x.shape[1]):
            out[i, c] = 0
        for e in range(indptr[i], indptr[i + 1]):
            v = values[e] if perm is None else values[perm[e]]
            for c in range(x.shape[1]):
                out[i, c] += v * x[indices[e], c]


def spmm(plan, values, x):
    if x.ndim == 1:
        return spmm(plan, values, x[:, None]).reshape(-1)
    out = empty((plan.n_rows, x.shape[1]), x.dtype)
    _spmm(plan.indptr, plan.indices, contiguous(values), plan.perm, contiguous(x), out)
    return out


@numba.njit(error_model="numpy", nogil=True)
def _sddmm(indptr, indices, perm, u, v, out):
    for i in range(len(indptr) - 1):
        for e in range(indptr[i], indptr[i + 1]):
            s = u.dtype.type(0)
            for c in range(u.shape[1]):
                s += u[i, c] * v[indices[e], c]
            out[e if perm is None else perm[e]] = s


def sddmm(plan, u, v):
    out = empty(plan.nnz, u.dtype)
    if u.ndim == 1:
        u, v = u[:, None], v[:, None]
    _sddmm(plan.indptr, plan.indices, plan.perm, contiguous(u), contiguous(v), out)
    return out


def gather(x, index, base=None):
    out = np.where(index >= 0, x[index] if len(x) else 0, 0 if base is None else base)
    return out.astype(x.dtype, copy=False)


@numba.njit(error_model="numpy", nogil=True)
def _segment_sum(x, indptr, order, out):
    for s in range(len(out)):
        t = x.dtype.type(0)
        for p in range(indptr[s], indptr[s + 1]):
            t += x[order[p]]
        out[s] = t


def segment_sum(x, indptr, order):
    out = empty(len(indptr) - 1, x.dtype)
    _segment_sum(contiguous(x), contiguous(indptr), contiguous(order), out)
    return out


def sgd(p, g, buf, lr, momentum, nesterov, weight_decay, first):
    d = g if weight_decay == 0 else g + p.dtype.type(weight_decay) * p
    if buf is not None:
        buf[...] = d if first else p.dtype.type(momentum) * buf + d
        d = d + p.dtype.type(momentum) * buf if nesterov else buf
    p -= p.dtype.type(lr) * d


def adam(p, g, m, v, step, lr, beta1, beta2, eps, weight_decay, decoupled):
    beta2, from_g, from_g2, size, root, eps, decay, keep = (
        p.dtype.type(s)
        for s in adam_scalars(step, lr, beta1, beta2, eps, weight_decay, decoupled)
    )
    p *= keep
    d = g + decay * p if decay else g
    m += from_g * (d - m)
    v[...] = beta2 * v + from_g2 * d * d
    p -= size * (m / (np.sqrt(v) / root + eps))


def warmup(dtypes):
    pass


def config():
    return {"threading_layer": None, "cache": None}
