"""The kernels as plain loops: what they mean, written to be read.

These functions are the definition that every other backend is tested against, and what runs when
Numba's compiler is switched off. They are slow: each number is handled by the interpreter.

Products with a dense matrix are written once more for each backend, since their speed is in how
they load memory; sparse products once more for GPUs. All else is written here only: a *body* does
the rows or elements `first` to `bound` (exclusive) of the work, and a backend's `run` says who runs
it: here the interpreter, in `cpu` Numba's threads, in `cuda` those of a GPU.

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
def run(body, n, *args, new=None, **hints):
    """Run ``body(0, n, *args)``, by as many workers as the backend has.

    Parameters
    ----------
    body : function
        ``body(first, bound, *args)`` does its part of the work and writes nothing that another part
        reads or writes. Compiled as it stands: plain indexing of vectors, no other function of
        ours but `ask`, `math` for functions of one number.
    n : int
        The number of rows or elements.
    *args : ndarray or number
        Arrays are brought to C order and flattened; those written come first, in C order already.
    new : (int, ndarray), optional
        A new vector of so many numbers like this array comes before `args`.
    **hints
        For a backend that shares out the work: `by`, an indptr by whose entries rows are counted;
        `cost` of an entry, a row or an element, in units of the CPU's; `written`, the number of
        arrays that are written, 1 by default; `parts`, so many for each worker at most, where
        each needs room of its own.

    Returns
    -------
    ndarray
        The first of the arrays.
    """
    args = [contiguous(a).reshape(-1) if isinstance(a, np.ndarray) else a for a in args]
    if new is not None:
        args.insert(0, np.empty(new[0], new[1].dtype))
    body(0, n, *args)
    return args[0]


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
            value = values[plan.perm[e] if len(plan.perm) else e]
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
            at = plan.perm[e] if len(plan.perm) else e
            for c in range(u.shape[1]):
                out[at] += u[i, c] * v[plan.indices[e], c]
    return out


def gather(x, index, base=None, run=run):
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
    base = x[:0] if base is None else base
    x = x if len(x) else np.zeros_like(x, shape=1)
    return run(_gather, len(index), x, index, base, new=(len(index), x), cost=40)


def _gather(first, bound, out, x, index, base):
    none, zero = x.dtype.type(0), index.dtype.type(0)
    for e in range(first, bound):
        inside = 0 <= index[e] < len(x)  # compiled, the index has no sign
        value = x[index[e] if inside else zero]  # a branch would be mispredicted half the time
        out[e] = value if inside else base[e] if len(base) else none


def segment_sum(x, indptr, order, run=run):
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
    n = len(indptr) - 1
    return run(_segment_sum, n, x, indptr, order, new=(n, x), by=indptr)


def _segment_sum(first, bound, out, x, indptr, order):
    for s in range(first, bound):
        total = x.dtype.type(0)
        for p in range(indptr[s], indptr[s + 1]):
            total += x[order[p]]
        out[s] = total


def row_max(plan, values, run=run):
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
    n, indptr = plan.n_rows, plan.indptr
    return run(_row_max, n, values, indptr, new=(n, values), by=indptr)


def _row_max(first, bound, out, values, indptr):
    for i in range(first, bound):
        best = values.dtype.type(-np.inf)
        for e in range(indptr[i], indptr[i + 1]):
            best = values[e] if values[e] > best or values[e] != values[e] else best
        out[i] = best


def row_softmax(plan, values, run=run):
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
    hints = {"new": (plan.nnz, values), "by": plan.indptr, "cost": 160}
    return run(_row_softmax, plan.n_rows, values, plan.indptr, **hints)


def _row_softmax(first, bound, out, values, indptr):
    none, zero = values.dtype.type(-np.inf), values.dtype.type(0)
    for i in range(first, bound):
        top, total = none, zero
        for e in range(indptr[i], indptr[i + 1]):
            top = values[e] if values[e] > top or values[e] != values[e] else top
        top = zero if top == none else top
        for e in range(indptr[i], indptr[i + 1]):
            out[e] = math.exp(values[e] - top)
            total += out[e]
        for e in range(indptr[i], indptr[i + 1]):
            out[e] /= total


def spgemm(plan, plan_a, plan_b, a, b, run=run):
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
    beside the result: one row of the product is summed in a dense vector. Sums run over the entries
    of A's row.

    References
    ----------
    Gustavson, "Two fast algorithms for sparse matrices: multiplication and permuted transposition",
    ACM Transactions on Mathematical Software 4, 1978.
    """
    structure = [array for p in (plan, plan_a, plan_b) for array in (p.indptr, p.indices)]
    hints = {"new": (plan.nnz, a), "by": plan.indptr, "cost": 64, "parts": 2}
    return run(_spgemm, plan.n_rows, a, b, *structure, plan.n_cols, **hints)


def ask(array, place):
    """Ask for a place of an array that will be read soon. Compiled, it comes into the cache."""


def _spgemm(first, bound, out, a, b, ptr, indices, ptr_a, indices_a, ptr_b, indices_b, n_cols):
    dense = np.zeros(n_cols, a.dtype)
    for i in range(first, bound):
        for e in range(ptr_a[i], ptr_a[i + 1]):
            j, later = indices_a[e], ptr_b[indices_a[min(e + 8, len(indices_a) - 1)]]
            ask(b, later)
            ask(indices_b, later)
            for f in range(ptr_b[j], ptr_b[j + 1]):
                dense[indices_b[f]] += a[e] * b[f]
        for e in range(ptr[i], ptr[i + 1]):
            out[e] = dense[indices[e]]
            dense[indices[e]] = 0


def spgemm_dot(plan, plan_x, plan_y, x, y, transpose=False, run=run):
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
    structure = [array for p in (plan, plan_x, plan_y) for array in (p.indptr, p.indices)]
    cost = 64 * max(plan_x.nnz // (plan.nnz + 1), 1)  # all of X is laid out
    hints = {"new": (plan.nnz, x), "by": plan.indptr, "cost": cost, "parts": 2 - transpose}
    body = _spgemm_dot_T if transpose else _spgemm_dot
    return run(body, plan.n_rows, x, y, *structure, plan_x.n_cols, **hints)


def _spgemm_dot(first, bound, out, x, y, ptr, indices, ptr_x, indices_x, ptr_y, indices_y, n_cols):
    dense = np.zeros(n_cols, x.dtype)
    for i in range(first, bound):
        for e in range(ptr_x[i], ptr_x[i + 1]):
            dense[indices_x[e]] = x[e]
        for e in range(ptr[i], ptr[i + 1]):
            j, total = indices[e], x.dtype.type(0)
            later = ptr_y[indices[min(e + 8, len(indices) - 1)]]
            ask(y, later)
            ask(indices_y, later)
            for f in range(ptr_y[j], ptr_y[j + 1]):
                total += dense[indices_y[f]] * y[f]
            out[e] = total


def _spgemm_dot_T(
    first, bound, out, x, y, ptr, indices, ptr_x, indices_x, ptr_y, indices_y, n_cols
):
    dense = np.zeros(n_cols, x.dtype)
    out[ptr[first] : ptr[bound]] = 0
    for i in range(len(ptr_x) - 1):
        for e in range(ptr_x[i], ptr_x[i + 1]):
            dense[indices_x[e]] = x[e]
        for e in range(ptr_y[i], ptr_y[i + 1]):
            j = indices_y[e]
            if first <= j < bound:
                for f in range(ptr[j], ptr[j + 1]):
                    out[f] += y[e] * dense[indices[f]]


def sgd(p, g, buf, lr, momentum=0.0, nesterov=False, weight_decay=0.0, run=run):
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
    buf = p.reshape(-1)[:0] if buf is None else buf
    scalars = *map(p.dtype.type, (lr, momentum, weight_decay)), bool(nesterov)
    run(_sgd, p.size, p, buf, g, *scalars, cost=8, written=2)


def _sgd(first, bound, p, buf, g, lr, momentum, weight_decay, nesterov):
    for e in range(first, bound):
        d = g[e]
        if weight_decay != 0:
            d += weight_decay * p[e]
        if len(buf):
            buf[e] = momentum * buf[e] + d
            d = d + momentum * buf[e] if nesterov else buf[e]
        p[e] -= lr * d


def adam(p, g, m, v, n, lr, beta1, beta2, eps, weight_decay=0.0, decoupled=False, run=run):
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
    step = n.item() + 1
    size, root = lr / (1 - beta1**step), math.sqrt(1 - beta2**step)
    decay, keep = (0.0, 1 - lr * weight_decay) if decoupled else (weight_decay, 1.0)
    scalars = map(p.dtype.type, (beta2, 1 - beta1, 1 - beta2, size, root, eps, decay, keep))
    run(_adam, p.size, p, m, v, n, g, step, *scalars, cost=16, written=4)


def _adam(first, bound, p, m, v, n, g, step, beta2, from_g, from_g2, size, root, eps, decay, keep):
    if first == 0:
        n[0] = step
    for e in range(first, bound):
        w, d = p[e] * keep, g[e]
        if decay != 0:
            d += decay * w
        m[e] += from_g * (d - m[e])
        v[e] = beta2 * v[e] + from_g2 * d * d
        p[e] = w - size * (m[e] / (math.sqrt(v[e]) / root + eps))


def gate(g, y, run=run):
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
    if y.strides[:1] < y.strides[-1:]:  # as layers hold their activations
        return gate(g.T, y.T, run).T
    return run(_gate, g.size, g, y, new=(g.size, g), cost=12).reshape(g.shape)


def _gate(first, bound, out, g, y):
    none = g.dtype.type(0)
    for e in range(first, bound):
        through = g[e]  # read in any case, so that vectors are compared
        out[e] = none if y[e] <= none else through


def contiguous(x):
    """Return x in C order, aligned and in native byte order: x itself if it already is."""
    return np.require(x, x.dtype.newbyteorder("="), ["C", "A", "E"])


# What has a body for any `run`; `cpu` and `cuda` unpack it in this order.
SHARED = gather, segment_sum, gate, row_max, row_softmax, spgemm, spgemm_dot, sgd, adam
