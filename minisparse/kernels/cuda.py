"""The kernels on a GPU, by numba-cuda, for CuPy arrays; in Numba's simulator for NumPy arrays.

A kernel is launched on CuPy's current stream and waits for nothing. Results repeat bit for bit:
nothing is added by atomic operations, and every sum has one order. What is no product is a body of
`reference`, run with one thread a row or element. The bodies of products are written here; they
differ from the reference in who does what.

The threads of a block are numbered by x first, and 32 successive ones are a warp: they load
together, fastest from neighbouring places. So x runs over the columns of the dense operand.

Importing this module imports neither Numba's CUDA nor CuPy: the first launch does, and `why_not`.
"""

import functools
import math
import weakref

import numpy as np

from . import derived, reference

cuda = None  # numba.cuda, once `_kernel` has run: kernels look for it among their globals

BLOCK = 128  # threads of a block
BLOCKS = 128  # a launch has at least so many; of fewer Numba warns that they keep no GPU busy
SPLIT = 256  # rows of more entries are summed in pieces of so many
EACH = 8  # entries that a group of threads of sddmm takes
SUMS = BLOCK * EACH * 3 // 2  # what a block of sddmm has to add up, with gaps


def why_not():
    """Return why kernels cannot run on a GPU, as a sentence; None where they can.

    Notes
    -----
    Imports numba-cuda and CuPy, and starts the driver.
    """
    try:
        import cupy
        import numba_cuda  # noqa: F401 - without it numba.cuda is an older one, or none

        cupy.cuda.runtime.getDeviceCount()
    except (ImportError, RuntimeError) as error:  # not installed; no driver, or no device
        return f"CUDA takes a device, its driver and minisparse[cuda13] or [cuda12]: {error}."


def is_available():
    """Return whether kernels can run on a GPU here: see `why_not`."""
    return why_not() is None


# ---------------------------------------------------------------------------------------------
# Launches


@functools.cache
def _kernel(body, rows=False):
    """Make a kernel of a body, whose argument is the tuple of all, for want of ``*args``.

    If `rows`, its arguments are n and the tuple, and threads call ``body(i, i + 1, *args)`` for
    i < n; one calls ``body(0, 0, *args)`` if n is 0.
    """
    global cuda
    from numba import cuda

    body = cuda.jit(body, device=rows)

    def each(n, args):
        for i in range(cuda.grid(1), max(n, 1), cuda.gridsize(1)):
            body(i, min(i + 1, n), *args)

    return cuda.jit(each) if rows else body


# Kept, since by this object Numba finds the launches it has prepared.
_stream = functools.cache(lambda pointer: cuda.external_stream(pointer))
_copies = {}  # device copies of host arrays, by the id of the array


def _argument(a):
    """Return what a kernel takes for `a`: a number, or an array of the device or of the host.

    The latter is part of a pattern: it does not change, and its copy lives as long as it does.
    """
    if isinstance(a, (int, np.generic)):
        return a
    if not isinstance(a, np.ndarray):
        return cuda.as_cuda_array(a, sync=False)  # waits for no other stream
    if a.dtype.kind == "f":
        raise TypeError("an array of numbers on the cpu among those on cuda: use .to(...)")
    if id(a) not in _copies:
        import cupy

        copy = _argument(cupy.asarray(a))
        cupy.cuda.get_current_stream().synchronize()  # this once: any stream may read it from now
        weakref.finalize(a, _copies.pop, id(a), None).atexit = False
        _copies[id(a)] = copy  # last, so that what interrupts leaves nothing without a finalizer
    return _copies[id(a)]


def _launch(kernel, grid, block, *args):
    """Launch `kernel` on CuPy's current stream; the last of `args` is a tuple, an array first."""
    if isinstance(args[-1][0], np.ndarray):  # in the simulator
        return kernel[grid, block](*args)
    import cupy

    where = (max(grid[0], BLOCKS), *grid[1:]), block, _stream(cupy.cuda.get_current_stream().ptr)
    kernel[where](*args[:-1], tuple(map(_argument, args[-1])))


def _vector(a):
    """Return an array flattened in C order, and a number as it is."""
    if isinstance(a, (int, np.generic)):
        return a
    return contiguous(a) if a.ndim == 1 else contiguous(a).reshape(-1)


def run(body, n, *args, new=None, **hints):
    """See `reference.run`. One thread a row or element; the hints are for a CPU."""
    args = [*map(_vector, args)]
    if new is not None:
        args.insert(0, np.empty(new[0], new[1].dtype, like=new[1]))
    _launch(_kernel(body, rows=True), (max(1, -(-n // BLOCK)),), (BLOCK,), n, tuple(args))
    return args[0]


def _run_adam(body, n, p, m, v, count, *args, **hints):
    """Run the body of `adam`. The count stays on the host, and is raised there after the launch."""
    run(body, n, p, m, v, np.empty(1, count.dtype, like=p), *args)
    count += 1


_shared = (functools.partial(kernel, run=run) for kernel in reference.SHARED)
gather, segment_sum, gate, row_max, row_softmax, _, _, sgd, _ = _shared
adam = functools.partial(reference.adam, run=_run_adam)


def contiguous(x):
    """See reference. CuPy's arrays are aligned and of native byte order."""
    return x if x.flags.c_contiguous else x.copy()


def add_at(out, key, x):
    """See `kernels.add_at`. By atomic operations: the order of sums is not fixed."""
    import cupy

    cupy.add.at(out, key, x)


@derived
def _rows(plan):
    """Return the row of each entry."""
    return np.repeat(np.arange(plan.n_rows, dtype=plan.indices.dtype), np.diff(plan.indptr))


# ---------------------------------------------------------------------------------------------
# Products with a dense matrix


def _spmm(first, bound, out, values, x, bias, cut, target, indices, perm, k):
    """Body of spmm: row target[p] of `out` is the sum of the entries cut[p] to cut[p + 1] - 1.

    Work is numbered by p and column, so that successive threads read successive columns of x: a
    warp does many pieces where columns are few. Rows beyond `bias` have none; an empty `perm`
    stands for the values as they come.
    """
    for n in range(first, bound):
        p, column = n // k, n % k
        row, total = target[p], x.dtype.type(0)
        if row < len(bias):
            total = bias[row]
        for e in range(cut[p], cut[p + 1]):
            # Numba adds code for negative places, unless they have no sign.
            at = np.uint64(indices[e] * k + column)
            total += values[perm[e] if len(perm) else e] * x[at]
        out[row * k + column] = total


@derived
def _pieces(plan):
    """Cut long rows: return (cut, target, indices, perm) for their sums, and for the sums of these.

    A row that is not cut is its own target. The pieces of one that is are rows below all others;
    from there they are added up by a second product, with values of 1.
    """
    counts = np.maximum(-(-np.diff(plan.indptr) // SPLIT), 1)
    long, row = np.flatnonzero(counts > 1), np.repeat(np.arange(plan.n_rows), counts)
    nth = np.arange(len(row)) - (counts.cumsum() - counts)[row]
    cut = np.append(plan.indptr[row] + nth * SPLIT, plan.nnz)
    below = plan.n_rows + np.arange(counts[long].sum())
    target = row.copy()
    target[counts[row] > 1] = below
    sums = np.append(0, counts[long].cumsum()), long, below, below[:0]
    return (cut, target, plan.indices, plan.perm), sums


def spmm(plan, values, x, bias=None, relu=False):
    """See reference.

    Notes
    -----
    O(nnz·k + n_rows·k) work. A long row is shared by many blocks.
    """
    k, none, (pieces, sums) = math.prod(x.shape[1:]), values[:0], _pieces(plan)
    x, bias = gate(x, x) if relu else x, none if bias is None else bias
    out = np.empty((plan.n_rows + len(sums[2]), *x.shape[1:]), x.dtype, like=x)
    run(_spmm, len(pieces[1]) * k, out, values, x, bias, *pieces, k)
    if len(sums[1]):
        ones = np.ones_like(values, shape=len(sums[2]))
        run(_spmm, len(sums[1]) * k, out, ones, out, bias, *sums, k)
    return out[: plan.n_rows]


def _sddmm(args):
    """Body of sddmm: a block is of (lanes, groups) threads, a group takes EACH entries in turn.

    Lane l sums columns l, l + lanes, and so on. What they have meets in shared memory, where one
    thread for each entry adds it from left to right; the odd step spreads these threads over the
    banks.
    Neighbouring entries are mostly of one row, which is then in the nearest cache.
    """
    out, u, v, rows, indices, perm, k = args
    sums, zero = cuda.shared.array(SUMS, u.dtype), u.dtype.type(0)
    lane, lanes, group = cuda.threadIdx.x, cuda.blockDim.x, cuda.threadIdx.y
    groups, step = cuda.blockDim.y, lanes | 1
    first = cuda.blockIdx.x * groups * EACH
    for q in range(EACH):
        n, total = q * groups + group, zero
        if first + n < len(out):
            at_u, at_v = rows[first + n] * k, indices[first + n] * k
            for c in range(lane, k, lanes):
                total += u[np.uint64(at_u + c)] * v[np.uint64(at_v + c)]
        sums[n * step + lane] = total
    cuda.syncthreads()
    for n in range(group * lanes + lane, min(groups * EACH, len(out) - first), BLOCK):
        total = zero
        for q in range(lanes):
            total += sums[n * step + q]
        out[perm[first + n] if len(perm) else first + n] = total


def sddmm(plan, u, v):
    """See reference.

    Notes
    -----
    O(nnz·k) work, in equal shares whatever the rows are.
    """
    out, k = np.empty(plan.nnz, u.dtype, like=u), math.prod(u.shape[1:])
    lanes = min(32, 1 << max(k // 4, 1).bit_length() - 1)  # a power of two
    grid = (max(1, -(-plan.nnz * lanes // (BLOCK * EACH))),)
    args = out, _vector(u), _vector(v), _rows(plan), plan.indices, plan.perm, k
    _launch(_kernel(_sddmm), grid, (lanes, BLOCK // lanes), args)
    return out


def spmm_vjp(plan, back, values, x, g, relu=False):
    """See reference: one kernel for each gradient."""
    dx = spmm(back, values, g)
    return sddmm(plan, g, gate(x, x) if relu else x), gate(dx, x) if relu else dx


# ---------------------------------------------------------------------------------------------
# Sparse products


def _matched(first, bound, out, a, b, rows, cols, a_ptr, a_cols, a_perm, b_ptr, b_cols, dot):
    """Body of the sparse products: each entry of the result, being (i, c), is a sum over j.

    It adds A[i, j] B[j, c] for all j of row i; or, if `dot`, A[c, j] B[i, j] for all j of row c.
    The entry of B is found by bisection, since the columns of a row increase.
    """
    for e in range(first, bound):
        total = out.dtype.type(0)
        mine, other = (cols[e], rows[e]) if dot else (rows[e], cols[e])
        for p in range(a_ptr[mine], a_ptr[mine + 1]):
            row, column = (other, a_cols[p]) if dot else (a_cols[p], other)
            low, high = b_ptr[row], b_ptr[row + 1]
            while low < high:
                middle = (low + high) >> 1
                low, high = (middle + 1, high) if b_cols[middle] < column else (low, middle)
            if low < b_ptr[row + 1] and b_cols[low] == column:
                total += a[a_perm[p] if len(a_perm) else p] * b[low]
        out[e] = total


@derived
def _transposed(plan):
    perm = np.argsort(plan.indices, kind="stable").astype(plan.indptr.dtype)
    indptr = np.searchsorted(plan.indices[perm], np.arange(plan.n_cols + 1))
    return type(plan)(indptr, _rows(plan)[perm], plan.n_rows, perm)


def spgemm(plan, plan_a, plan_b, a, b, dot=False):
    """See reference; the columns of each row increase.

    Notes
    -----
    For each entry (i, c) of the result, O(entries of A's row i, times the logarithm of those of a
    row of B) work. With `dot` the result is B Aᵀ, and A's row is c.
    """
    structure = _rows(plan), plan.indices, plan_a.indptr, plan_a.indices, plan_a.perm
    structure = *structure, plan_b.indptr, plan_b.indices, dot
    return run(_matched, plan.nnz, a, b, *structure, new=(plan.nnz, a))


def spgemm_dot(plan, plan_x, plan_y, x, y, transpose=False):
    """See reference; the columns of each row increase. Transposed, it is Yᵀ times X."""
    return spgemm(plan, _transposed(plan_y) if transpose else plan_y, plan_x, y, x, not transpose)
