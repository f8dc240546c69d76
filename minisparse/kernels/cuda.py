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

import numba
import numpy as np

from . import reference

cuda = None  # numba.cuda, once `_kernel` has run: kernels look for it among their globals

BLOCK = 128  # threads of a block
BLOCKS = 128  # a launch has at least so many; of fewer Numba warns that they keep no GPU busy
MOST_BLOCKS = 1 << 16  # beyond so many, a thread of `run` does several rows
FULL = 1 << 18  # so many threads keep a large GPU busy
SPLIT = 256  # rows of more entries may be cut into pieces
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
    """Make the kernel in which each thread calls ``body(*args)``.

    If `rows`, its arguments are n and args, and threads call ``body(i, i + 1, *args)`` for i < n;
    one calls ``body(0, 0, *args)`` if n is 0. Arguments come in a tuple, for want of ``*args``.
    """
    global cuda
    from numba import cuda

    body = cuda.jit(body, device=True)

    def each_thread(args):
        body(*args)

    def each_row(n, args):
        for i in range(cuda.grid(1), max(n, 1), cuda.gridsize(1)):
            body(i, min(i + 1, n), *args)

    return cuda.jit(each_row if rows else each_thread)


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
    if id(a) not in _copies:
        import cupy

        _copies[id(a)] = _argument(cupy.asarray(a))
        cupy.cuda.get_current_stream().synchronize()  # this once: any stream may read it from now
        weakref.finalize(a, _copies.pop, id(a), None).atexit = False
    return _copies[id(a)]


def _launch(kernel, grid, block, *args):
    """Launch `kernel` on CuPy's current stream; the last of `args` is a tuple with arrays."""
    if numba.config.ENABLE_CUDASIM:
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
        args.insert(0, np.empty_like(new[1], shape=new[0]))
    blocks = max(1, min(-(-n // BLOCK), MOST_BLOCKS))
    _launch(_kernel(body, rows=True), (blocks,), (BLOCK,), n, tuple(args))
    return args[0]


_shared = (functools.partial(kernel, run=run) for kernel in reference.SHARED)
gather, segment_sum, gate, row_max, row_softmax, _, _, sgd, adam = _shared


def contiguous(x):
    """See reference. CuPy's arrays are aligned and of native byte order."""
    return x if x.flags.c_contiguous else x.copy()


def _once(derive):
    """Let a function of a plan run once for each."""

    def kept(plan):
        if derive not in plan.derived:
            plan.derived[derive] = derive(plan)
        return plan.derived[derive]

    return functools.wraps(derive)(kept)


@_once
def _perm(plan):
    """Return the perm, or what stands for none in kernels."""
    return plan.indices[:0] if plan.perm is None else plan.perm


# ---------------------------------------------------------------------------------------------
# Products with a dense matrix


@functools.cache
def _spmm(width):
    """Make the body of spmm whose threads keep `width` sums each in registers.

    A block is of (lanes, parts, rows) threads. Piece p of a row, the entries cut[p] to
    cut[p + 1] - 1, belongs to lanes x parts of them: lane l sums columns l, l + lanes, ..., part q
    takes every so manieth entry from the q-th on. What the parts have meets in shared memory, where
    part 0 adds it from the first to the last. The sum goes to row target[p] of `out`. Empty arrays
    stand for no `bias`, `mask` or `perm`; rows beyond bias and mask have none.
    """
    size = BLOCK * width

    def body(out, values, x, bias, mask, cut, target, indices, perm, k, relu):
        sums, total = cuda.shared.array(size, x.dtype), cuda.local.array(width, x.dtype)
        zero, lanes, parts = x.dtype.type(0), cuda.blockDim.x, cuda.blockDim.y
        lane, part = cuda.threadIdx.x, cuda.threadIdx.y
        me = (cuda.threadIdx.z * parts + part) * lanes + lane
        p = cuda.blockIdx.x * cuda.blockDim.z + cuda.threadIdx.z
        inside, step = p < len(target), lanes * width
        row = target[p] if inside else 0
        first, bound = (cut[p] + part, cut[p + 1]) if inside else (0, 0)
        for left in range(cuda.blockIdx.y * step, k, cuda.gridDim.y * step):  # the same for a block
            column = left + lane
            for w in range(width):
                total[w] = bias[row] if part == 0 and row < len(bias) else zero
            for e in range(first, bound, parts):
                value, at = values[perm[e] if len(perm) else e], indices[e] * k
                for w in range(width):
                    # Beyond k the last column, which costs less than to ask. Numba adds code for
                    # negative places unless they have no sign.
                    other = x[np.uint64(at + min(column + w * lanes, k - 1))]
                    total[w] += value * (zero if relu and other <= zero else other)
            for w in range(width):
                sums[w * BLOCK + me] = total[w]
            cuda.syncthreads()
            for w in range(width):
                at = row * k + column + w * lanes
                if inside and part == 0 and column + w * lanes < k:
                    for q in range(1, parts):
                        total[w] += sums[w * BLOCK + me + q * lanes]
                    out[at] = zero if at < len(mask) and mask[at] <= zero else total[w]
            cuda.syncthreads()

    return body


def _power(n):
    """Return the least power of two that is at least n, from 1 to 32."""
    return min(32, 1 << max(n - 1, 0).bit_length())


def _shape(n, nnz, k):
    """Choose a launch of spmm for n pieces: width, grid and block.

    The columns fill a warp, with several pieces where they are few. Several parts share a piece
    where there are too few threads else, or too few columns for loads from neighbouring places, as
    long as each has 4 entries or more.
    """
    lanes, parts = _power(k), 1
    width = min(4, _power(-(-k // lanes)))
    tiles = max(1, -(-k // (lanes * width)))
    wanted = min(max(8, FULL // max(1, n * tiles)), BLOCK)  # threads a piece
    while lanes * parts < wanted and 8 * parts * n <= nnz:
        parts *= 2
    rows = min(BLOCK // (lanes * parts), 64)  # more are not allowed
    return width, (max(1, -(-n // rows)), min(tiles, 1 << 15)), (lanes, parts, rows)


@_once
def _pieces(plan):
    """Cut long rows: return (cut, target, indices, perm) for their sums, and for the sums of these.

    A row that is not cut is its own target. The pieces of one that is are rows below all others;
    from there they are added up by a second product, with values of 1. Rows of similar length are
    not cut if there are enough of them.
    """
    most = max(SPLIT, min(4 * plan.nnz // max(plan.n_rows, 1), plan.nnz >> 10))
    counts = np.maximum(-(-np.diff(plan.indptr) // most), 1)
    row, long = np.repeat(np.arange(plan.n_rows), counts), np.flatnonzero(counts > 1)
    nth = np.arange(len(row)) - np.repeat(counts.cumsum() - counts, counts)
    cut = np.append(plan.indptr[row] + nth * most, plan.nnz).astype(plan.indptr.dtype)
    below = plan.n_rows + np.arange(counts[long].sum())
    target = row.copy()
    target[counts[row] > 1] = below
    sums = np.append(0, counts[long].cumsum()).astype(cut.dtype), long, below, below[:0]
    return (cut, target, plan.indices, _perm(plan)), sums


def spmm(plan, values, x, bias=None, relu=False, mask=None):
    """See reference. With `mask`, 0.0 where it is <= 0.

    Notes
    -----
    O(nnz·k + n_rows·k) work. A row of any length is shared by many blocks.
    """
    k, none, (pieces, sums) = math.prod(x.shape[1:]), values[:0], _pieces(plan)
    bias, mask = (none if a is None else a for a in (bias, mask))
    out = np.empty_like(x, order="C", shape=(plan.n_rows + len(sums[2]), *x.shape[1:]))
    products = [(pieces, values, x, bool(relu))]
    if len(sums[1]):
        products.append((sums, np.ones_like(values, shape=len(sums[2])), out, False))
    for structure, values, x, relu in products:
        width, grid, block = _shape(len(structure[1]), len(structure[2]), k)
        arrays = *map(_vector, (out, values, x, bias, mask)), *structure
        _launch(_kernel(_spmm(width)), grid, block, (*arrays, k, relu))
    return out[: plan.n_rows]


def _sddmm(out, u, v, rows, indices, perm, k, relu):
    """Body of sddmm: a block is of (lanes, groups) threads, a group takes EACH entries in turn.

    Each lane sums every so manieth column. What they have meets in shared memory, where one thread
    for each entry adds it from left to right; the odd step spreads these threads over the banks.
    Neighbouring entries are mostly of one row, which is then in the nearest cache.
    """
    sums, zero = cuda.shared.array(SUMS, u.dtype), u.dtype.type(0)
    lane, lanes, group = cuda.threadIdx.x, cuda.blockDim.x, cuda.threadIdx.y
    groups, step = cuda.blockDim.y, lanes | 1
    first = cuda.blockIdx.x * groups * EACH
    for q in range(EACH):
        n, total = q * groups + group, zero
        if first + n < len(out):
            at_u, at_v = rows[first + n] * k, indices[first + n] * k
            for c in range(lane, k, lanes):
                other = v[np.uint64(at_v + c)]
                total += u[np.uint64(at_u + c)] * (zero if relu and other <= zero else other)
        sums[n * step + lane] = total
    cuda.syncthreads()
    for n in range(group * lanes + lane, min(groups * EACH, len(out) - first), BLOCK):
        total = zero
        for q in range(lanes):
            total += sums[n * step + q]
        out[perm[first + n] if len(perm) else first + n] = total


@_once
def _rows(plan):
    """Return the row of each entry."""
    return np.repeat(np.arange(plan.n_rows, dtype=plan.indices.dtype), np.diff(plan.indptr))


def sddmm(plan, u, v, relu=False):
    """See reference. With `relu` of ``gate(v, v)`` instead of v.

    Notes
    -----
    O(nnz·k) work, in equal shares whatever the rows are.
    """
    out, k = np.empty_like(u, shape=plan.nnz), math.prod(u.shape[1:])
    lanes = _power(-(-k // 4))
    grid = (max(1, -(-plan.nnz * lanes // (BLOCK * EACH))),)
    args = out, _vector(u), _vector(v), _rows(plan), plan.indices, _perm(plan), k, bool(relu)
    _launch(_kernel(_sddmm), grid, (lanes, BLOCK // lanes), args)
    return out


def spmm_vjp(plan, back, values, x, g, relu=False):
    """See reference: one kernel for each gradient."""
    return sddmm(plan, g, x, relu), spmm(back, values, g, mask=x if relu else None)


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


@_once
def _transposed(plan):
    perm = np.argsort(plan.indices, kind="stable").astype(plan.indptr.dtype)
    indptr = np.searchsorted(plan.indices[perm], np.arange(plan.n_cols + 1))
    return type(plan)(indptr, _rows(plan)[perm], plan.n_rows, perm)


def spgemm(plan, plan_a, plan_b, a, b, dot=False):
    """See reference; the columns of each row increase.

    Notes
    -----
    For each entry (i, c) of the result, O(entries of A's row i, times the logarithm of those of a
    row of B) work. With `dot`, of A Bᵀ.
    """
    structure = _rows(plan), plan.indices, plan_a.indptr, plan_a.indices, _perm(plan_a)
    structure = *structure, plan_b.indptr, plan_b.indices, dot
    return run(_matched, plan.nnz, a, b, *structure, new=(plan.nnz, a))


def spgemm_dot(plan, plan_x, plan_y, x, y, transpose=False):
    """See reference; the columns of each row increase. Transposed, it is Yᵀ times X."""
    return spgemm(plan, _transposed(plan_y) if transpose else plan_y, plan_x, y, x, not transpose)
