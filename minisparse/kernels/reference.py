"""The kernels as plain loops: what they mean, written to be read.

These functions are the definition that every other backend is tested against, and what runs when
Numba's compiler is switched off. They are slow: each number is handled by the interpreter.

Throughout, A is a matrix of shape (n_rows, n_cols) in compressed sparse row form: the entries of
row i are numbered ``indptr[i]`` to ``indptr[i + 1] - 1``; entry e lies in column ``indices[e]`` and
has the value ``values[e]``, or ``values[perm[e]]`` where a plan has a `perm`. The columns of one
row are distinct; no order of them is assumed. Sums run in the order of the entries and in the
dtype of the arrays. An entry that is not stored takes no part in anything; a stored 0.0 does, so
that 0.0 * inf is NaN.
"""

import math

import numpy as np


@np.errstate(all="ignore")  # as compiled code: infinity and NaN pass without a word
def spmm(plan, values, x, bias=None, relu=False):
    """Sparse matrix times dense: out[i, :] = bias[i] + sum over entries (i, j) of A[i, j] x[j, :].

    Parameters
    ----------
    plan : Plan
        The structure of A.
    values : ndarray of shape (nnz,)
    x : ndarray of shape (n_cols, k) or (n_cols,)
    bias : ndarray of shape (n_rows,), optional
        What the sums start from, 0.0 without.
    relu : bool
        Take ``gate(x, x)`` instead of x.

    Returns
    -------
    ndarray of shape (n_rows, k) or (n_rows,)
        New, in C order. Rows without entries are exactly the bias.

    Notes
    -----
    O(nnz·k + n_rows·k).
    """
    x = gate(x, x) if relu else x
    out = np.zeros((plan.n_rows, *x.shape[1:]), x.dtype)
    for i in range(plan.n_rows):
        out[i] = 0 if bias is None else bias[i]
        for e in range(plan.indptr[i], plan.indptr[i + 1]):
            value = values[e if plan.perm is None else plan.perm[e]]
            out[i] += value * x[plan.indices[e]]
    return out


def spmm_vjp(plan, back, values, x, g, relu=False):
    """Both gradients of ``y = A x``: sddmm for the values, Aᵀ g for x; through ReLU if `relu`.

    Parameters
    ----------
    plan, back : Plan
        The structures of A and of its transpose, for the same `values`.
    values : ndarray of shape (nnz,)
    x : ndarray of shape (n_cols, k) or (n_cols,)
    g : ndarray of shape (n_rows, k) or (n_rows,)
        The gradient of y.

    Returns
    -------
    (ndarray of shape (nnz,), ndarray like x)
        In the order of `values`; in C order.

    Notes
    -----
    O(nnz·k + (n_rows + n_cols)·k).
    """
    dx = spmm(back, values, g)
    return sddmm(plan, g, gate(x, x) if relu else x), gate(dx, x) if relu else dx


@np.errstate(all="ignore")
def sddmm(plan, u, v):
    """Sampled dense-dense product: out[e] = sum over c of u[i, c] v[j, c], entry e being (i, j).

    Parameters
    ----------
    plan : Plan
        The structure that says which entries of u vᵀ are wanted.
    u : ndarray of shape (n_rows, k) or (n_rows,)
    v : ndarray of shape (n_cols, k) or (n_cols,)

    Returns
    -------
    ndarray of shape (nnz,)
        In the order of the plan's `values`: the result of entry e is at e, or at ``perm[e]``.

    Notes
    -----
    O(nnz·k + n_rows).
    """
    if u.ndim == 1:
        u, v = u[:, None], v[:, None]
    out = np.zeros(plan.nnz, u.dtype)
    for i in range(plan.n_rows):
        for e in range(plan.indptr[i], plan.indptr[i + 1]):
            at = e if plan.perm is None else plan.perm[e]
            for c in range(u.shape[1]):
                out[at] += u[i, c] * v[plan.indices[e], c]
    return out


def gather(x, index, base=None):
    """Pick elements: out[e] = x[index[e]], or base[e] (0.0 without base) where index[e] < 0.

    Parameters
    ----------
    x : ndarray of shape (n,)
    index : integer ndarray of shape (m,)
        Each below n; negative where nothing is picked.
    base : ndarray of shape (m,), optional

    Returns
    -------
    ndarray of shape (m,)
        Copies, bit for bit.

    Notes
    -----
    O(m). Its adjoint is `segment_sum`.
    """
    out = np.zeros(len(index), x.dtype)
    for e in range(len(index)):
        if index[e] >= 0:
            out[e] = x[index[e]]
        elif base is not None:
            out[e] = base[e]
    return out


@np.errstate(all="ignore")
def segment_sum(x, indptr, order):
    """Sum groups of elements: out[s] = sum of x[order[p]] for p in indptr[s] .. indptr[s + 1] - 1.

    Parameters
    ----------
    x : ndarray of shape (n,)
    indptr : integer ndarray of shape (m + 1,)
        Not decreasing, from 0 to len(order).
    order : integer ndarray
        Positions in x, the groups one after the other.

    Returns
    -------
    ndarray of shape (m,)
        Summed from left to right, starting from 0.

    Notes
    -----
    O(len(order) + m).
    """
    out = np.zeros(len(indptr) - 1, x.dtype)
    for s in range(len(out)):
        for p in range(indptr[s], indptr[s + 1]):
            out[s] += x[order[p]]
    return out


def row_max(plan, values):
    """Largest entry of each row: out[i] = max of values[e] over the entries e of row i.

    Parameters
    ----------
    plan : Plan
        Without a `perm`.
    values : ndarray of shape (nnz,)

    Returns
    -------
    ndarray of shape (n_rows,)
        -inf for a row without entries; NaN where the row has one.

    Notes
    -----
    O(nnz + n_rows).
    """
    out = np.full(plan.n_rows, -np.inf, values.dtype)
    for i in range(plan.n_rows):
        for e in range(plan.indptr[i], plan.indptr[i + 1]):
            if values[e] > out[i] or values[e] != values[e]:
                out[i] = values[e]
    return out


@np.errstate(all="ignore")
def row_softmax(plan, values):
    """Softmax of each row: out[e] = exp(values[e] - top) / sum of the same over the row of e.

    Parameters
    ----------
    plan : Plan
        Without a `perm`.
    values : ndarray of shape (nnz,)

    Returns
    -------
    ndarray of shape (nnz,)

    Notes
    -----
    With `top` the largest entry of the row (0 for -inf), no exponential overflows. O(nnz + n_rows).
    """
    out = np.empty_like(values)
    for i, top in enumerate(row_max(plan, values)):
        row = slice(plan.indptr[i], plan.indptr[i + 1])
        out[row] = np.exp(values[row] - (0 if top == -np.inf else top))
        out[row] /= np.cumsum(out[row])[-1:]  # from left to right
    return out


@np.errstate(all="ignore")
def spgemm(plan, plan_a, plan_b, a, b):
    """Sparse times sparse: out[e] = sum over j of A[i, j] B[j, c], entry e being (i, c).

    Parameters
    ----------
    plan, plan_a, plan_b : Plan
        The structures of the product, of A and of B, without a `perm`. That of the product holds
        every (i, c) for which some j has both A[i, j] and B[j, c].
    a, b : ndarray of shape (nnz of A,), (nnz of B,)

    Returns
    -------
    ndarray of shape (nnz of the product,)

    Notes
    -----
    O(nnz of all three + number of pairs of A[i, j] and B[j, c]); memory O(n_cols) for each thread
    beside the result: one row of the product is summed in a dense vector.

    References
    ----------
    Gustavson, "Two fast algorithms for sparse matrices: multiplication and permuted transposition",
    ACM Transactions on Mathematical Software 4, 1978.
    """
    out, dense = np.zeros(plan.nnz, a.dtype), np.zeros(plan.n_cols, a.dtype)
    for i in range(plan.n_rows):
        for e in range(plan_a.indptr[i], plan_a.indptr[i + 1]):
            j = plan_a.indices[e]
            for f in range(plan_b.indptr[j], plan_b.indptr[j + 1]):
                dense[plan_b.indices[f]] += a[e] * b[f]
        for e in range(plan.indptr[i], plan.indptr[i + 1]):
            out[e] = dense[plan.indices[e]]
            dense[plan.indices[e]] = 0
    return out


@np.errstate(all="ignore")
def spgemm_dot(plan, plan_x, plan_y, x, y, transpose=False):
    """The gradients of `spgemm`: X Yᵀ sampled, or Yᵀ X sampled if `transpose`.

    out[e] = sum over c of X[i, c] Y[j, c], entry e being (i, j); or the sum over i of
    Y[i, j] X[i, c], entry e being (j, c).

    Parameters
    ----------
    plan, plan_x, plan_y : Plan
        The structures of the result, of X and of Y, without a `perm`. X holds every (i, c) for
        which the others hold (i, j) and (j, c).
    x, y : ndarray of shape (nnz of X,), (nnz of Y,)
    transpose : bool

    Returns
    -------
    ndarray of shape (nnz of the result,)

    Notes
    -----
    With X the gradient of A B: Y is B and the result that of A, or Y is A and the result that of B.
    The cost is that of `spgemm`: a row of X is laid out in a dense vector, from which the products
    read. If `transpose`, each thread lays all of X out, since its rows are summed over.
    """
    out, dense = np.zeros(plan.nnz, x.dtype), np.zeros(plan_x.n_cols, x.dtype)
    for i in range(plan_x.n_rows):
        for e in range(plan_x.indptr[i], plan_x.indptr[i + 1]):
            dense[plan_x.indices[e]] = x[e]
        left, right = (plan_y, plan) if transpose else (plan, plan_y)
        for e in range(left.indptr[i], left.indptr[i + 1]):
            j = left.indices[e]
            for f in range(right.indptr[j], right.indptr[j + 1]):
                if transpose:
                    out[f] += y[e] * dense[right.indices[f]]
                else:
                    out[e] += dense[right.indices[f]] * y[f]
    return out


def sgd(p, g, buf, lr, momentum=0.0, nesterov=False, weight_decay=0.0):
    """One step of stochastic gradient descent, in place: p -= lr d.

    Parameters
    ----------
    p : ndarray
        The parameter, changed in place. C order.
    g : ndarray like p
        The gradient.
    buf : ndarray like p, or None
        The running sum of gradients, changed in place, zeros at first; None where momentum is 0.
    lr, momentum, weight_decay : float
    nesterov : bool

    Notes
    -----
    With d = g + weight_decay p: without momentum d is the direction; with momentum,
    buf = momentum buf + d, and the direction is buf, or d + momentum buf for Nesterov. O(size).
    """
    scalar = p.dtype.type
    lr, momentum, weight_decay = scalar(lr), scalar(momentum), scalar(weight_decay)
    for at in np.ndindex(p.shape):
        d = g[at]
        if weight_decay != 0:
            d = d + weight_decay * p[at]
        if buf is not None:
            buf[at] = momentum * buf[at] + d
            d = d + momentum * buf[at] if nesterov else buf[at]
        p[at] = p[at] - lr * d


def adam_scalars(scalar, step, lr, beta1, beta2, eps, weight_decay, decoupled):
    """Return the numbers of one Adam step that do not depend on the element, as `scalar`.

    They are: beta2, 1 - beta1, 1 - beta2, the step size lr / (1 - beta1**step),
    sqrt(1 - beta2**step), eps, the L2 weight decay, and the factor of decoupled decay.
    """
    size, root = lr / (1 - beta1**step), math.sqrt(1 - beta2**step)
    decay, keep = (0.0, 1 - lr * weight_decay) if decoupled else (weight_decay, 1.0)
    return map(scalar, (beta2, 1 - beta1, 1 - beta2, size, root, eps, decay, keep))


def adam(p, g, m, v, n, lr, beta1, beta2, eps, weight_decay=0.0, decoupled=False):
    """One step of Adam (AdamW where `decoupled`), in place.

    Parameters
    ----------
    p : ndarray
        The parameter, changed in place. C order.
    g : ndarray like p
        The gradient.
    m, v : ndarray like p
        Running means of the gradient and of its square, changed in place.
    n : int64 ndarray of one element
        How many steps were taken before; raised by one, by the same code that changes the others:
        whatever interrupts a step, either all of them have changed or none.
    lr, beta1, beta2, eps, weight_decay : float
    decoupled : bool
        False: weight_decay p is added to the gradient. True: p is first scaled by
        1 - lr weight_decay.

    Notes
    -----
    With step = n + 1: m += (1 - beta1) (g - m); v = beta2 v + (1 - beta2) g²;
    p -= lr / (1 - beta1**step) · m / (sqrt(v) / sqrt(1 - beta2**step) + eps). O(size).

    References
    ----------
    Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015. Loshchilov and Hutter,
    "Decoupled weight decay regularization", ICLR 2019.
    """
    n += 1
    step = n.item()
    scalars = adam_scalars(p.dtype.type, step, lr, beta1, beta2, eps, weight_decay, decoupled)
    beta2, from_g, from_g2, size, root, eps, decay, keep = scalars
    for at in np.ndindex(p.shape):
        w, d = p[at] * keep, g[at]
        if decay != 0:
            d = d + decay * w
        m[at] = m[at] + from_g * (d - m[at])
        v[at] = beta2 * v[at] + from_g2 * d * d
        p[at] = w - size * (m[at] / (np.sqrt(v[at]) / root + eps))


def gate(g, y):
    """Let through where y is positive: out = 0.0 where y <= 0, else g. ``gate(x, x)`` is ReLU.

    Parameters
    ----------
    g, y : ndarray of one shape
        y may be boolean.

    Returns
    -------
    ndarray like g
        New. NaN in y lets through.

    Notes
    -----
    O(size).
    """
    return np.where(y <= 0, g.dtype.type(0), g)


def contiguous(x):
    """Return x in C order, aligned and in native byte order: x itself if it already is."""
    return np.require(x, x.dtype.newbyteorder("="), ["C", "A", "E"])
