"""The kernels for NumPy arrays, compiled by Numba, serial and parallel.

Each kernel is one *body* that does the rows (or elements) `first` to `bound` of the work. Run
serially it does all. Run in parallel, T tasks draw the numbers of chunks from a counter until none
is left. An output element is written by one chunk only, and how it is computed does not depend on
the chunk it falls in; so the result is bitwise the same for every number of threads.

The products with a dense matrix are written here; the bodies of all else are those of `reference`.
What calls a helper lives in this one file: Numba's cache watches the file of the function that is
cached, and would not notice a change in a helper elsewhere. (`ask` may: it changes no result.)
"""

import contextlib
import ctypes
import functools
import os
from multiprocessing import parent_process
from pathlib import Path

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic, models, overload, register_model
from numba.np.ufunc import parallel as numba_parallel

from . import Plan, _born, _fork_locks, derived, get_num_threads, reference
from .memory import empty

# ---------------------------------------------------------------------------------------------
# A small vocabulary of vectors. `Vec(float32, 16)` is a Numba type whose values LLVM keeps in
# registers; a machine with narrower registers gets the same code in several pieces. Memory is
# reached through the bare address of an array's first element, since Numba would count references
# to the array at each call of a helper: several atomic operations for every row. Offsets count
# elements, in 64 bits, and are not checked.


class Vec(types.Type):
    """The type of a vector of `lanes` numbers of type `dtype`."""

    def __init__(self, dtype, lanes):
        self.dtype, self.lanes = dtype, lanes
        super().__init__(name=f"Vec({dtype}, {lanes})")


@register_model(Vec)
def _vec_model(dmm, vec):
    number = dmm.lookup(vec.dtype).get_value_type()
    return models.PrimitiveModel(dmm, vec, ir.VectorType(number, vec.lanes))


def _constant(bits, numbers):
    """A vector of integers."""
    return ir.Constant(ir.VectorType(ir.IntType(bits), len(numbers)), numbers)


def _fill(builder, vector_type, value):
    """Emit a vector with `value` in every lane."""
    undefined = ir.Constant(vector_type, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.IntType(32)(0))
    return builder.shuffle_vector(first, undefined, _constant(32, [0] * vector_type.count))


def _of(result, emit):
    """What an intrinsic returns: its signature, and code by ``emit(builder, type, *arguments)``.

    `type` is LLVM's for the result. `emit` returns the result, or None where that is void.
    """

    def codegen(context, builder, sig, args):
        out = emit(builder, context.get_value_type(sig.return_type), *args)
        return out if sig.return_type is not types.void else context.get_dummy_value()

    return result, codegen


@intrinsic
def data(typingctx, array):
    """The address of the first element of an array in C order."""

    def codegen(context, builder, sig, args):
        return context.make_array(array)(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), codegen


@intrinsic(prefer_literal=True)
def zeros(typingctx, array, size):
    """A vector of zeros that takes `size` bytes (a literal), one lane at least."""
    vec = Vec(array.dtype, max(1, size.literal_value * 8 // array.dtype.bitwidth))
    return _of(vec(array, size), lambda b, t, *_: t(None))


@intrinsic
def width(typingctx, vector):
    """The number of lanes, known at compile time."""
    return _of(types.intp(vector), lambda b, t, vector: t(vector.type.count))


@intrinsic
def get(typingctx, array, i):
    """array[i], without a check."""
    return _of(array.dtype(array, types.intp), lambda b, t, array, i: b.load(b.gep(array, [i])))


@intrinsic
def load(typingctx, like, array, i):
    """array[i : i + lanes] as a vector of the type of `like`."""

    def emit(b, t, like, array, i):
        return b.load(b.bitcast(b.gep(array, [i]), t.as_pointer()), align=4)

    return _of(like(like, array, types.intp), emit)


@intrinsic
def put(typingctx, array, i, value):
    """array[i] = value, without a check; for a vector array[i : i + lanes] = value."""

    def emit(b, t, array, i, value):
        b.store(value, b.bitcast(b.gep(array, [i]), value.type.as_pointer()), align=4)

    return _of(types.void(array, types.intp, value), emit)


@intrinsic
def prefetch(typingctx, like, array, i):
    """Ask for the cache lines of array[i : i + lanes]; any offset is safe."""

    def emit(b, t, like_value, array, i):
        i32, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        f = ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
        f = b.module.declare_intrinsic("llvm.prefetch", [pointer], f)
        for n in range(0, like.lanes, 512 // like.dtype.bitwidth):
            at = b.gep(b.gep(array, [i]), [ir.IntType(64)(n)])
            b.call(f, [b.bitcast(at, pointer), i32(0), i32(3), i32(1)])  # to read, keep, data

    return _of(types.void(like, array, types.intp), emit)


@intrinsic
def splat(typingctx, like, value):
    """A vector of the type of `like` with `value` in every lane."""
    return _of(like(like, like.dtype), lambda b, t, like, value: _fill(b, t, value))


@intrinsic
def fma(typingctx, x, y, z):
    """x y + z for vectors: in one rounding where the machine can.

    Where z is narrower, the pieces of x y are added to it one after the other.
    """

    def emit(b, t, x, y, total):
        name = f"llvm.fmuladd.v{z.lanes}f{z.dtype.bitwidth}"
        f = cgutils.get_or_insert_function(b.module, ir.FunctionType(t, [t, t, t]), name)
        for n in range(0, x.type.count, t.count):
            piece = _constant(32, [*range(n, n + t.count)])
            total = b.call(f, [*(b.shuffle_vector(v, v, piece) for v in (x, y)), total])
        return total

    return _of(z(x, y, z), emit)


@intrinsic
def gated(typingctx, x, y):
    """0.0 where y <= 0, else x, for numbers or vectors; gated(x, x) is ReLU."""
    return _of(x(x, x), lambda b, t, x, y: b.select(b.fcmp_ordered("<=", y, t(None)), t(None), x))


@intrinsic
def first_lanes(typingctx, vector, n):
    """The vector with all but the first n lanes set to zero."""

    def emit(b, t, vector, n):
        lanes = _constant(64, [*range(t.count)])
        return b.select(b.icmp_signed("<", lanes, _fill(b, lanes.type, n)), vector, t(None))

    return _of(vector(vector, types.intp), emit)


@intrinsic
def totals(typingctx, a, b, c, d):
    """A vector of four: the sum of the lanes of each of four, all by the same tree."""

    def emit(builder, t, *four):
        def join(x, y):
            return builder.shuffle_vector(x, y, _constant(32, [*range(2 * x.type.count)]))

        sums = join(join(*four[:2]), join(*four[2:]))
        while sums.type.count > 4:  # neighbours together
            even = [*range(0, sums.type.count, 2)]
            pairs = [_constant(32, lanes) for lanes in (even, [n + 1 for n in even])]
            sums = builder.fadd(*(builder.shuffle_vector(sums, sums, lanes) for lanes in pairs))
        return sums

    return _of(Vec(a.dtype, 4)(a, b, c, d), emit)


@intrinsic
def lane(typingctx, vector, n):
    """Lane n of a vector."""
    return _of(vector.dtype(vector, types.intp), lambda b, t, v, n: b.extract_element(v, n))


@intrinsic
def transpose(typingctx, like, out, to, out_step, x, at, x_step):
    """Move a square block: out[to + r out_step + c] = x[at + c x_step + r] for r, c < lanes."""

    def emit(b, t, like, out, to, out_step, x, at, x_step):
        def row(array, start, step, r):
            at = b.add(start, b.mul(step, step.type(r)))
            return b.bitcast(b.gep(array, [at]), like.type.as_pointer())

        n = like.type.count
        rows = [b.load(row(x, at, x_step, r), align=4) for r in range(n)]
        mixed = [k + n * odd for k in range(n) for odd in (0, 1)]
        halves = [_constant(32, half) for half in (mixed[:n], mixed[n:])]
        for _ in range(n.bit_length() - 1):  # each round interleaves the first rows with the last
            pairs = zip(rows[: n // 2], rows[n // 2 :], strict=True)
            rows = [b.shuffle_vector(*pair, half) for pair in pairs for half in halves]
        for r in range(n):
            b.store(rows[r], row(out, to, out_step, r), align=4)

    return _of(types.void(like, out, *[types.intp] * 2, x, *[types.intp] * 2), emit)


@intrinsic
def draw(typingctx, counter):
    """Return counter[0] and add 1 to it, as one step among threads."""
    return _of(types.int64(counter), lambda b, t, at: b.atomic_rmw("add", at, t(1), "monotonic"))


@intrinsic
def call(typingctx, address, chunk, chunks, args):
    """Call the compiled body at `address` with (chunk, chunks, *args); True if it raised an error.

    So the parallel form runs the very machine code of the serial one, and is quick to compile.
    """

    def codegen(context, builder, sig, values):
        kinds = [types.intp, types.intp, *args.types]
        convention = context.call_conv
        pointer = convention.get_function_type(types.none, kinds).as_pointer()
        body = builder.inttoptr(values[0], pointer)
        values = [*values[1:3], *cgutils.unpack_tuple(builder, values[3])]
        return convention.call_function(builder, body, types.none, kinds, values)[0].is_error

    return types.boolean(types.intp, types.intp, types.intp, args), codegen


# ---------------------------------------------------------------------------------------------
# The bodies

FLAGS = {"error_model": "numpy", "nogil": True}
body = numba.njit(**FLAGS)
inlined = numba.njit(forceinline=True, **FLAGS)


@inlined
def _row(ptr, n, goal, each):
    """The first of n rows with ptr[i] + each i >= goal, where a row is `each` entries of work."""
    low, high = 0, n
    while low < high:
        middle = (low + high) // 2
        if np.int64(get(ptr, middle)) + middle * each < goal:
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def _place(perm, permuted, e):
    return np.int64(get(perm, e)) if permuted else np.int64(e)


@inlined
def _relu(x, relu):
    """ReLU of a number or vector, unless `relu` is None: code for either, as that is a type."""
    return x if relu is None else gated(x, x)


@inlined
def _tile(like, rest, zero, out, to, values, perm, permuted, x, k, c, *row):
    """Columns c to c + rest of one row of A x + `zero`, stored at offset `to`; x through `relu`.

    They are held as two vectors that may overlap, so that no masks are needed. The sums stay in
    registers over all entries of the row.
    """
    start, end, indices, last, relu, ahead = row
    shift = rest - width(like)
    low = high = splat(like, zero)
    for e in range(start, end):
        if ahead:
            at = np.int64(get(indices, min(e + ahead, last))) * k + c
            prefetch(like, x, at)
            if width(like) >= width(zeros(x, 64)):  # else one line holds both, but for a rest
                prefetch(like, x, at + shift)
        value = splat(like, get(values, _place(perm, permuted, e)))
        at = np.int64(get(indices, e)) * k + c
        low = fma(value, _relu(load(like, x, at), relu), low)
        high = fma(value, _relu(load(like, x, at + shift), relu), high)
    put(out, to, low)
    put(out, to + shift, high)


@inlined
def _pair(like, one, dots, u, more, out, to, values, perm, permuted, x, k, c, *row):
    """A tile as above, and dots[e] = (dots[e] if more) + u[to] . x[j] in its columns.

    Here u goes through `relu`, and the tile through the gradient of that. Each row of x is loaded
    once for both. Four entries share the sums across lanes; in the last round some may be the same.
    """
    start, end, indices, last, relu, ahead = row
    mine, total = _relu(load(like, u, to), relu), like
    sa = sb = sc = sd = one
    for e in range(start, end, 4):
        for n in range(4):
            at = min(e + n, end - 1)
            if ahead:
                prefetch(like, x, np.int64(get(indices, min(e + n + ahead, last))) * k + c)
            row = load(like, x, np.int64(get(indices, at)) * k + c)
            if e + n < end:
                total = fma(splat(like, get(values, _place(perm, permuted, at))), row, total)
            sa, sb, sc, sd = sb, sc, sd, fma(row, mine, one)
        sums = totals(sa, sb, sc, sd)
        for n in range(4):
            if e + n < end:
                at = _place(perm, permuted, e + n)
                put(dots, at, get(dots, at) + lane(sums, n) if more else lane(sums, n))
    put(out, to, total if relu is None else gated(total, mine))


@numba.njit(forceinline=True, fastmath={"reassoc", "contract"}, **FLAGS)
def _dot(zero, values, perm, permuted, x, start, end, indices, relu):
    """One row times a vector, in several sums as LLVM sees fit."""
    total = zero
    for e in range(start, end):
        total += get(values, _place(perm, permuted, e)) * _relu(get(x, get(indices, e)), relu)
    return total


@body
def _spmm(
    first, bound, out, dots, u, values, perm, x, bias, ptr, indices, column, longest, relu, ahead
):
    """out[:, column:] = A x + bias, without the rows of more than `longest` entries.

    x is one panel of k columns after the other: an array of shape (panels, n_cols, k). A chunk
    takes its rows through all of them.

    An empty `perm` stands for the values as they come, an empty `bias` for zeros. Where `dots` is
    not empty, it gets u[i] . x[j] for each entry, in the order of the values; the rows of x then
    take 64 or 128 bytes, or a multiple of 256. Unless `relu` is None, x, or u where `dots` is not
    empty, stands for its ReLU.
    """
    (panels, n_cols, k), width, size = x.shape, out.shape[1], x.itemsize
    full = 256 // size
    last, permuted, both = len(indices) - 1, len(perm) > 0, len(dots) > 0
    zero, one, biased = x.dtype.type(0), zeros(x, 64), len(bias) > 0
    out, values, perm, x, bias = data(out), data(values), data(perm), data(x), data(bias)
    ptr, indices, dots, u = data(ptr), data(indices), data(dots), data(u)
    for panel in range(panels):
        at = np.int64(panel) * n_cols * k
        for i in range(first, bound):
            start, end = np.int64(get(ptr, i)), np.int64(get(ptr, i + 1))
            to = i * width + column + panel * k
            if end - start > longest:
                continue
            if biased:
                zero = get(bias, i)
            if k == 1:
                put(out, to, _dot(zero, values, perm, permuted, x, start, end, indices, relu))
                continue
            for c in range(0, k, full):
                # Two vectors of the smallest power of two that is at least half of what is left.
                rest = min(k - c, full)
                where = out, to + c, values, perm, permuted, x, k, at + c
                row = (rest, zero, *where, start, end, indices, last, relu, ahead)
                pair = one, dots, u, column + panel + c > 0, *where, *row[-6:]
                if both and rest * size > 128:
                    _pair(zeros(x, 256), *pair)
                elif both and rest * size > 64:
                    _pair(zeros(x, 128), *pair)
                elif both:
                    _pair(one, *pair)
                elif rest * size > 128:
                    _tile(zeros(x, 128), *row)
                elif rest * size > 64:
                    _tile(zeros(x, 64), *row)
                elif rest * size > 32:
                    _tile(zeros(x, 32), *row)
                elif rest * size > 16:
                    _tile(zeros(x, 16), *row)
                elif rest * size > 8:
                    _tile(zeros(x, 8), *row)
                else:
                    _tile(zeros(x, 4), *row)


@inlined
def _entries(like, out, u, at, v, base, k, first, bound, indices, last, more, ahead):
    """out[e] = (out[e] if more) + u[at : at + k] . v[j] for the entries first..bound of one row.

    Row j of v begins at base + j k.

    Four entries at a time share the loads of u and the sums across lanes; in the last round some
    may be the same. Vectors run along the columns; the first one is cut so that the others end
    with the row.
    """
    lanes = width(like)
    head = (k - 1) % lanes + 1
    for e in range(first, bound, 4):
        a = base + np.int64(get(indices, e)) * k
        b = base + np.int64(get(indices, min(e + 1, bound - 1))) * k
        c = base + np.int64(get(indices, min(e + 2, bound - 1))) * k
        d = base + np.int64(get(indices, min(e + 3, bound - 1))) * k
        if ahead and bound - e >= 4:
            for n in range(4):
                later = base + np.int64(get(indices, min(e + ahead + n, last))) * k
                for q in range(0, k, lanes):
                    prefetch(like, v, later + q)
        w = load(like, u, at)
        sa = first_lanes(fma(w, load(like, v, a), like), head)
        sb = first_lanes(fma(w, load(like, v, b), like), head)
        sc = first_lanes(fma(w, load(like, v, c), like), head)
        sd = first_lanes(fma(w, load(like, v, d), like), head)
        for q in range(head, k, lanes):
            w = load(like, u, at + q)
            sa = fma(w, load(like, v, a + q), sa)
            sb = fma(w, load(like, v, b + q), sb)
            sc = fma(w, load(like, v, c + q), sc)
            sd = fma(w, load(like, v, d + q), sd)
        sums = totals(sa, sb, sc, sd)
        if bound - e >= 4:
            put(out, e, fma(splat(sums, 1), load(sums, out, e), sums) if more else sums)
            continue
        for n in range(3):  # unrolled, so that the lanes are known
            if e + n < bound:
                put(out, e + n, get(out, e + n) + lane(sums, n) if more else lane(sums, n))


@body
def _sddmm(first, bound, out, u, v, ptr, indices, column, ahead):
    """out[e] = (out[e] if column) + u[i, column:] . v[j] for the entries from first to bound.

    v is in panels, as in `_spmm`. Both may be inside a row.
    """
    n, last, (panels, n_cols, k) = len(ptr) - 1, len(indices) - 1, v.shape
    width, size = u.shape[1], k * v.itemsize
    out, u, v, ptr, indices = data(out), data(u), data(v), data(ptr), data(indices)
    for panel in range(panels):
        start, i = first, _row(ptr, n, first + 1, 0) - 1  # the row of the first entry
        while start < bound:
            end = min(np.int64(get(ptr, i + 1)), bound)
            rows = out, u, i * width + column + panel * k, v, np.int64(panel) * n_cols * k, k
            row = *rows, start, end, indices, last, column + panel > 0, ahead
            if size >= 64:
                _entries(zeros(v, 64), *row)
            elif size >= 16:
                _entries(zeros(v, 16), *row)
            else:
                _entries(zeros(v, 4), *row)
            start = end
            i += 1


def _scatter(first, bound, out, x, index):
    """The inverse of `gather`, as a body for `run`."""
    for e in range(first, bound):
        out[index[e]] = x[e]


@overload(reference.ask)
def _ask(array, place):
    return lambda array, place: prefetch(zeros(array, 64), data(array), np.int64(place))


@body
def _copy(first, bound, out, x):
    """out[n] = x[:, n m : (n + 1) m] for out of shape (panels, rows, m).

    The rows or the columns of x are contiguous. m is a multiple of 64 bytes, or there is one
    panel.
    """
    (rows, columns), m = x.shape, out.shape[2]
    down, across = x.strides[0] // x.itemsize, x.strides[1] // x.itemsize
    out, x = data(out), data(x)
    like = zeros(x, 64)
    lanes = width(like)
    for i in range(first, bound, lanes):
        for c in range(0, columns, lanes):
            high, wide = min(lanes, bound - i), min(lanes, columns - c)
            to, at = (c // m * rows + i) * m + c % m, i * down + c * across
            if down == 1 and high == wide == lanes:
                transpose(like, out, to, m, x, at, across)
                continue
            for r in range(high):
                if across == 1 and wide == lanes:
                    put(out, to + r * m, load(like, x, at + r * down))
                else:
                    for q in range(wide):
                        put(out, to + r * m + q, get(x, at + r * down + q * across))


# ---------------------------------------------------------------------------------------------
# The same in parallel, the body being given by its address


@inlined
def _bounds(chunk, chunks, n, by):
    """The bounds of a chunk of n rows: of equal work by an indptr, of equal length by none.

    Entries and rows count alike as work. Lengths are multiples of 16: no cache line is shared.
    """
    if len(by):
        ptr, work = data(by), np.int64(by[n]) + n
        low = _row(ptr, n, work * chunk // chunks, 1)
        return low, _row(ptr, n, work * (chunk + 1) // chunks, 1)
    step = (n + chunks * 16 - 1) // (chunks * 16) * 16
    return min(chunk * step, n), min((chunk + 1) * step, n)


def _tasks(tasks, chunks, address, n, by, args):
    counter, failed = np.zeros(1, np.int64), np.zeros(1, np.bool_)
    for _ in numba.prange(tasks):
        c = draw(data(counter))
        while c < chunks:
            # What runs at the same time lies far apart, and so does what it writes.
            chunk = c % tasks * (chunks // tasks) + c // tasks
            first, bound = _bounds(chunk, chunks, n, by)
            if call(address, first, bound, args):
                failed[0] = True
            c = draw(data(counter))
    if failed[0]:  # bodies raise nothing else
        raise MemoryError


# ---------------------------------------------------------------------------------------------
# Compiling at first use, and the choice between serial and parallel

# Up to this much work is done by one thread. The unit is a multiply-add in a vector, about 36
# picoseconds. Waking OpenMP's threads, where they do not spin, took from 15 to 200 microseconds,
# the most where they had slept through other parts of a training step.
PARALLEL_WORK = 1 << 24

CHUNK_WORK = 1 << 18  # the least work worth a chunk of its own: 10 microseconds
MAX_CHUNKS = 1024

_turn = [None]  # empty while a thread is inside; no lock, for the reason given in memory.py
# Whether this process was forked from one that had launched Numba's threads. Before this module was
# imported, that shows if the package was imported before the fork, or multiprocessing made it.
_forked = numba_parallel._is_initialized and bool(os.getpid() != _born or parent_process())


def _after_fork_in_child():
    """Numba's threads do not survive a fork, and its layers do not know how to start anew."""
    global _turn, _forked
    _turn = [None]
    _forked = _forked or numba_parallel._is_initialized


_fork_locks.append(global_compiler_lock)
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork_in_child)


_kernels: dict = {}  # of each body


class _Kernel:
    """A body and its parallel form, each compiled once for every combination of array types.

    Parameters
    ----------
    body : function or dispatcher
    written : int
        The first so many arrays are written, the others only read.
    plain : bool
        The body indexes vectors, as those of `reference` do. The others go by addresses.
    """

    def __init__(self, body, written=1, plain=False):
        self.body, self.written, self.plain = getattr(body, "py_func", body), written, plain
        self.shared_by, self.serial, self.parallel = {}, {}, {}

    def __call__(self, key, work, n, by, *args, most=MAX_CHUNKS):
        """Run the kernel on n rows; `key` stands for the types of `by` and the arrays in `args`."""
        kernel = self.serial.get(key) or self.compile(key, by, args)
        if work > PARALLEL_WORK and not _forked and get_num_threads() > 1:
            # Numba's layers abort or oversubscribe when two threads enter them at once: who
            # finds one inside goes alone.
            turn = _turn
            try:
                del turn[0]
            except IndexError:
                pass
            else:
                try:
                    kernel, address = self.parallel.get(key) or self.compile_parallel(key)
                    chunks = min(int(work) // CHUNK_WORK + 1, most)
                    tasks = min(get_num_threads(), chunks)
                    kernel(tasks, chunks // tasks * tasks, address, n, by, args)
                    return
                finally:
                    turn.append(None)
        kernel(0, n, *args)

    def compile(self, key, by, args):
        """Compile the body for arguments like `args`, with inputs that are read-only.

        Such a kernel takes writable arrays as well. Places without a sign spare a plain body what
        Numba does for negative ones, which keeps loops from being vectorized.
        """
        with global_compiler_lock:
            place, layout = (types.uintp, "C") if self.plain else (types.intp, "A")
            kinds = [place, place, *map(numba.typeof, args)]
            for n in range(2 + self.written, len(kinds)):
                if isinstance(kinds[n], types.Array):
                    kinds[n] = kinds[n].copy(readonly=True, layout=layout)
            if key not in self.serial:
                self.shared_by[key] = numba.typeof(by).copy(readonly=True)
                self.serial[key] = _compile(self.body, tuple(kinds))
        return self.serial[key]

    def compile_parallel(self, key):
        """Compile the parallel form where there is a serial one; this starts Numba's threads."""
        with global_compiler_lock:
            if key not in self.parallel:
                _launch()
                ((signature, body),) = self.serial[key].overloads.items()
                kinds = *[types.intp] * 4, self.shared_by[key], types.Tuple(signature[2:])
                kernel = _compile(_tasks, kinds, parallel=True)
                address = body.library.get_pointer_to_function(body.fndesc.llvm_func_name)
                self.parallel[key] = kernel, address
        return self.parallel[key]


def _launch():
    """Launch Numba's threads, where they are not.

    Its OpenMP layer sets OpenMP's number of threads meanwhile, of PyTorch's OpenMP where that is
    loaded: put it back.
    """
    before = []
    with contextlib.suppress(ImportError, OSError, TypeError, AttributeError):
        from numba.np.ufunc import omppool

        for library in map(ctypes.CDLL, (omppool.__file__, None)):  # its own, and that of all
            before.append((library.omp_set_num_threads, library.omp_get_max_threads()))
    numba_parallel._launch_threads()
    for restore, n in before:
        restore(n)


def _compile(function, signature, **options):
    """Compile one signature and no other, through the cache on disk where that works."""
    for cache in (True, True, False):
        kernel = None
        try:
            kernel = numba.njit(cache=cache, **options, **FLAGS)(function)
            kernel.compile(signature)
            kernel.disable_compile()
            return kernel
        except Exception:
            if not cache:
                raise
            # No directory to write to; or a truncated file: cleared, so that the second attempt
            # writes it anew; or a full disk. What is not the cache's fault is raised above.
            with contextlib.suppress(Exception):
                kernel._cache.flush()


def _kernel(*args):
    """The kernel of a body, made once."""
    return _kernels.get(args[0]) or _kernels.setdefault(args[0], _Kernel(*args))


_NOTHING = np.zeros(0, np.intp)
_UNSIGNED = {"i": np.dtype(np.uint32), "l": np.dtype(np.uint64), "q": np.dtype(np.uint64)}


def run(body, n, *args, new=None, by=_NOTHING, cost=32, written=1, parts=MAX_CHUNKS):
    """See `reference.run`. Integers lose their sign, as rows do in `_Kernel.compile`."""
    key, given = by.dtype.char, []
    if new is not None:
        given.append(empty((new[0],), new[1].dtype))
        key += new[1].dtype.char
    for a in args:
        if isinstance(a, np.ndarray):
            a, char = contiguous(a), a.dtype.char
            a = a if a.ndim == 1 else a.reshape(-1)
            a = a.view(_UNSIGNED[char]) if char in _UNSIGNED else a
            key += char
        given.append(a)
    work = cost * (n + (int(by[-1]) if len(by) else 0))
    kernel = _kernels.get(body) or _kernel(body, written, True)
    most = min(parts * get_num_threads(), MAX_CHUNKS)
    kernel(key, work, n, by, *given, most=most)
    return given[0]


_shared = (functools.partial(kernel, run=run) for kernel in reference.SHARED)
gather, segment_sum, gate, row_max, row_softmax, spgemm, spgemm_dot, sgd, adam = _shared
_SPMM, _SDDMM, _COPY = _kernel(_spmm, 2), _kernel(_sddmm), _kernel(_copy)

# ---------------------------------------------------------------------------------------------
# The doors

SPLIT = 1 << 14  # a row of more than twice as many entries is summed in pieces of so many
AHEAD = 64  # how many lines ahead a gathered operand is asked for
DIRECT = 1 << 20  # up to so many values are permuted in one step
BLOCK = 1 << 16  # how many values at least stay together where they are permuted in two steps
CACHE = 1 << 20  # bytes of the second-level cache of a core

with contextlib.suppress(OSError, ValueError):
    _size = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text()
    CACHE = int(_size.strip().removesuffix("K")) * 1024


def _ahead(x):
    """How many entries ahead to ask for the rows of x; 0 (not at all) where x is near anyway."""
    lines = x.shape[-1] * x.itemsize // 64
    return AHEAD // max(1, min(4, lines)) if x[:1].nbytes > CACHE // 2 else 0


@derived
def _giants(plan):
    """The rows to sum in pieces, the bounds of the pieces, and which are the first ones.

    What lies between two giant rows is a piece as well.
    """
    rows = np.flatnonzero(np.diff(plan.indptr) > 2 * SPLIT)
    ends = plan.indptr[np.column_stack((rows, rows + 1))]
    bounds = (np.append(np.arange(a, b, SPLIT), b) for a, b in ends)
    ptr = np.concatenate([rows[:0], *bounds]).astype(plan.indptr.dtype)
    return rows, ptr, np.searchsorted(ptr, ends.ravel())[:-1]


@derived
def _steps(plan):
    """The permutation of the values in two steps, (far, near) with ``far[perm] == near``.

    far[n] is the place of value n: in the block of its entry, among whose entries the values keep
    their order; near[e] is the place where entry e finds its value. So the first step moves
    along in streams, the second stays in a block: both are kind to caches. `far` is empty where
    one step is enough; so is `near` where nothing is permuted.
    """
    far, near = plan.indices[:0], plan.perm
    if len(near) > DIRECT:
        far, block = np.empty_like(near), np.empty(plan.nnz, np.uint16)  # sorted by radix
        block[near] = np.arange(plan.nnz) // max(BLOCK, plan.nnz >> 8)  # at most 257 streams
        far[np.argsort(block, kind="stable")] = np.arange(plan.nnz)
        near = far[near]
    return far, near


@derived
def _home(plan):
    """The inverse of the near step, since to gather is faster than to scatter."""
    home = np.empty_like(_steps(plan)[1])
    home[_steps(plan)[1]] = np.arange(plan.nnz)
    return home


def _in_order(plan, dots, near_done=False):
    """Bring numbers from the order of the plan's entries into that of its values."""
    far, near = _steps(plan)
    if len(near) and not near_done:
        dots = gather(dots, _home(plan))
    return gather(dots, far) if len(far) else dots


def contiguous(x):
    """See reference."""
    if x.flags.num & 0x101 == 0x101 and x.dtype.isnative and type(x) is np.ndarray:
        return x  # in C order and aligned
    if x.ndim == 2 and x.size > 4096 and _readable(x):
        return _panels(x, x.shape[1])[0]
    return reference.contiguous(x)


def _readable(x):
    """Whether `_copy` can read x as it is."""
    return x.flags.aligned and x.dtype.isnative and x.dtype.char in "fd" and x.itemsize in x.strides


def _panels(x, m):
    """x in C order, cut into panels of m columns: an array of shape (panels, len(x), m)."""
    out = empty((x.shape[1] // m, len(x), m), x.dtype)
    _COPY(x.dtype.char, 32 * x.size, len(x), _NOTHING, out, x.view(np.ndarray))
    return out


def _parts(plan, x):
    """Yield the parts of x to multiply in turn: (first column, panels, chunks at most).

    Each part is one panel after the other. Narrow panels pay where x is too large for the core's
    own cache, a panel is not, and a row of x is needed often enough to be worth the copy; a thread
    then stays with its rows. Else x is one panel.
    """
    (n, k), m = x.shape, 256 // x.itemsize
    whole = k // m * m
    pays = x.nbytes > CACHE // 2 and n * 256 <= CACHE * 3 // 4 and plan.nnz >= 16 * n
    if not pays or whole <= m:
        x, size = contiguous(x), k * x.itemsize
        # Where rows are whole cache lines and lie across one more, aligning x pays.
        pays = 0 < size == size // 64 * 64 and plan.nnz * 16 > x.nbytes >= 1 << 17
        yield 0, _panels(x, k) if pays and x.ctypes.data % 64 else x[None], MAX_CHUNKS
        return
    x = x if _readable(x) else contiguous(x)
    yield 0, _panels(x[:, :whole], m), get_num_threads()
    if whole < k:
        yield whole, contiguous(x[:, whole:])[None], MAX_CHUNKS


def spmm(plan, values, x, bias=None, relu=False, u=None, dots=None):
    """See reference. `dots` gets the products of the rows of u and x, as in `_spmm`."""
    if x.ndim == 1:
        return spmm(plan, values, x[:, None], bias, relu).reshape(-1)
    key, relu = x.dtype.char + plan.indices.dtype.char + "r" * relu, relu or None
    out, (far, near) = empty((plan.n_rows, x.shape[1]), x.dtype), _steps(plan)
    ordered = contiguous(values)
    if len(far):
        ordered = run(_scatter, len(far), values, far, new=(len(far), values), cost=40)
    if len(near) and x[:1].nbytes > 256:  # several passes over a row: permute once
        ordered, near = gather(ordered, near), near[:0]
    (giants, ptr, firsts), none = _giants(plan), out.reshape(-1)[:0]
    bias = none if bias is None else contiguous(bias)
    sums = np.zeros((len(ptr), x.shape[1]), x.dtype)
    longest, u, dots = (2 * SPLIT, out, none) if u is None else (plan.nnz, u, dots)
    for column, part, most in _parts(plan, x):
        work = (plan.nnz + plan.n_rows) * len(part) * (part.shape[2] + 16) * (1 + (len(dots) > 0))
        given, ahead = (ordered, near, part), _ahead(part)
        arrays = out, dots, u, *given, bias, plan.indptr, plan.indices
        rest = column, longest, relu, ahead
        _SPMM(key, work, plan.n_rows, plan.indptr, *arrays, *rest, most=most)
        if len(giants):
            arrays, rest = (sums, none, sums, *given, none, ptr, plan.indices), (column, SPLIT)
            _SPMM(key, work, len(sums) - 1, ptr, *arrays, *rest, relu, ahead, most=most)
    if len(giants):
        with np.errstate(all="ignore"):  # every other sum is of what lies between giant rows
            sums = np.add.reduceat(sums, firsts)[::2]
            out[giants] = sums + bias[giants, None] if len(bias) else sums
    return out


def spmm_vjp(plan, back, values, x, g, relu=False):
    """See reference."""
    size = g[:1].nbytes
    suits = size in (64, 128) or 0 < size == size // 256 * 256
    giants, start = _giants(back)[0], back.indptr
    if relu and (not suits or len(giants)):  # the pieces of giant rows know no u to gate by
        dvalues, dx = spmm_vjp(plan, back, values, gate(x, x), g)
        return dvalues, gate(dx, x)
    # One walk pays where a row is whole vectors; but it does not split the row that dominates.
    if not suits or np.any(start[giants + 1] - start[giants] > back.nnz // 8):
        return sddmm(plan, g, x), spmm(back, values, g)
    dots = empty((back.nnz,), g.dtype)
    out = spmm(back, values, g, None, relu, contiguous(x), dots)
    return _in_order(back, dots, near_done=size <= 256), out


def sddmm(plan, u, v):
    """See reference."""
    if u.ndim == 1:
        u, v = u[:, None], v[:, None]
    key = u.dtype.char + plan.indices.dtype.char
    if u.shape[1] == 0:
        return np.zeros(plan.nnz, u.dtype)
    out, u = empty((plan.nnz,), u.dtype), contiguous(u)
    for column, part, most in _parts(plan, v):
        work = plan.nnz * len(part) * (part.shape[2] + 16)
        arrays = out, u, part, plan.indptr, plan.indices
        _SDDMM(key, work, plan.nnz, _NOTHING, *arrays, column, _ahead(part), most=most)
    return _in_order(plan, out)


def warmup(dtypes):
    """Compile every kernel, serial and parallel, for `dtypes` and 32-bit indices."""
    plan = Plan(np.array([0, 1], np.int32), np.array([0], np.int32), 1)
    for dtype in dtypes:
        x = np.ones((1, 1), dtype)
        row = x[0]
        spmm(plan, row, x), spmm(plan, row, x, None, True)
        sddmm(plan, x, x)
        gather(row, plan.indices), run(_scatter, 1, row, plan.indices, new=(1, row))
        segment_sum(row, plan.indptr, plan.indices)
        row_max(plan, row)
        row_softmax(plan, row)
        spgemm(plan, plan, plan, row, row)
        spgemm_dot(plan, plan, plan, row, row), spgemm_dot(plan, plan, plan, row, row, True)
        sgd(row, row.copy(), None, 0.1)
        adam(row, row.copy(), row.copy(), row.copy(), np.zeros(1, np.int64), 0.1, 0.9, 0.99, 1e-8)
        contiguous(np.ones((64, 65), dtype).T)
        gate(row, row), gate(row, row > 0)
    if not _forked:
        for kernel in _kernels.values():
            for key in list(kernel.serial):
                kernel.compile_parallel(key)


def config():
    """What Numba runs on, as far as it has started."""
    kernels = [kernel for kinds in _kernels.values() for kernel in kinds.serial.values()]
    return {
        "threading_layer": getattr(numba_parallel, "_threading_layer", None),
        "cache": kernels[0].stats.cache_path if kernels else None,
    }
