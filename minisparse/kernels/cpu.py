"""The kernels for NumPy arrays, compiled by Numba, serial and parallel.

Each kernel is one *body* that does chunk c of `chunks` of the work. Run serially it does chunk 0
of 1. Run in parallel, T tasks draw the numbers of smaller chunks from a counter until none is
left. An output element is written by one chunk only, and how it is computed does not depend on
the chunk it falls in; so the result is bitwise the same for every number of threads.

Everything compiled lives in this one file: Numba's cache watches the file of the function that is
cached, and would not notice a change in a helper elsewhere.
"""

import contextlib
import multiprocessing
import os
import threading

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic, models, register_model
from numba.np.ufunc import parallel as numba_parallel

from . import Plan, get_num_threads
from .memory import empty
from .reference import adam_scalars

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
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm, vec):
        super().__init__(dmm, vec, ir.VectorType(dmm.lookup(vec.dtype).get_value_type(), vec.lanes))


def _shuffle(builder, a, b, lanes):
    i32 = ir.IntType(32)
    mask = ir.Constant(ir.VectorType(i32, len(lanes)), [ir.Constant(i32, n) for n in lanes])
    return builder.shuffle_vector(a, b, mask)


@intrinsic
def data(typingctx, array):
    """The address of the first element of an array in C order."""

    def codegen(context, builder, sig, args):
        return context.make_array(array)(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), codegen


@intrinsic
def get(typingctx, array, i):
    """array[i], without a check."""

    def codegen(context, builder, sig, args):
        return builder.load(builder.gep(args[0], [args[1]]))

    return array.dtype(array, types.intp), codegen


@intrinsic
def put(typingctx, array, i, value):
    """array[i] = value, without a check."""

    def codegen(context, builder, sig, args):
        builder.store(args[2], builder.gep(args[0], [args[1]]))
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), codegen


@intrinsic(prefer_literal=True)
def zeros(typingctx, array, size):
    """A vector of zeros that takes `size` bytes (a literal), one lane at least."""
    if not isinstance(size, types.IntegerLiteral):
        return None
    vec = Vec(array.dtype, max(1, size.literal_value * 8 // array.dtype.bitwidth))

    def codegen(context, builder, sig, args):
        return ir.Constant(context.get_value_type(vec), None)

    return vec(array, size), codegen


@intrinsic
def zero(typingctx, like):
    """A vector of zeros of the type of `like`."""

    def codegen(context, builder, sig, args):
        return ir.Constant(context.get_value_type(like), None)

    return like(like), codegen


@intrinsic
def width(typingctx, like):
    """The number of lanes, known at compile time."""

    def codegen(context, builder, sig, args):
        return context.get_constant(types.intp, like.lanes)

    return types.intp(like), codegen


@intrinsic
def load(typingctx, like, array, i):
    """array[i : i + lanes] as a vector."""

    def codegen(context, builder, sig, args):
        at = builder.gep(args[1], [args[2]])
        at = builder.bitcast(at, context.get_value_type(like).as_pointer())
        return builder.load(at, align=array.dtype.bitwidth // 8)

    return like(like, array, types.intp), codegen


@intrinsic
def store(typingctx, array, i, vector):
    """array[i : i + lanes] = vector."""

    def codegen(context, builder, sig, args):
        at = builder.gep(args[0], [args[1]])
        at = builder.bitcast(at, context.get_value_type(vector).as_pointer())
        builder.store(args[2], at, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), codegen


@intrinsic
def splat(typingctx, like, value):
    """A vector with `value` in every lane."""

    def codegen(context, builder, sig, args):
        undefined = ir.Constant(context.get_value_type(like), ir.Undefined)
        first = builder.insert_element(undefined, args[1], ir.Constant(ir.IntType(32), 0))
        return _shuffle(builder, first, undefined, [0] * like.lanes)

    return like(like, like.dtype), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """a b + c, for vectors or numbers: in one rounding where the machine can."""

    def codegen(context, builder, sig, args):
        t = context.get_value_type(a)
        name = f"v{a.lanes}f{a.dtype.bitwidth}" if isinstance(a, Vec) else f"f{a.bitwidth}"
        f = ir.FunctionType(t, [t, t, t])
        f = cgutils.get_or_insert_function(builder.module, f, f"llvm.fmuladd.{name}")
        return builder.call(f, args)

    return a(a, a, a), codegen


@intrinsic
def last_lanes(typingctx, vector, n):
    """The vector with all but the last n lanes set to zero."""

    def codegen(context, builder, sig, args):
        i64 = ir.IntType(64)
        lane = [ir.Constant(i64, n) for n in range(vector.lanes, 0, -1)]
        lane = ir.Constant(ir.VectorType(i64, vector.lanes), lane)
        bound = ir.Constant(lane.type, ir.Undefined)
        bound = builder.insert_element(bound, args[1], ir.Constant(ir.IntType(32), 0))
        bound = _shuffle(builder, bound, bound, [0] * vector.lanes)
        keep = builder.icmp_signed("<=", lane, bound)
        return builder.select(keep, args[0], ir.Constant(args[0].type, None))

    return vector(vector, types.intp), codegen


def _sums(builder, vectors):
    """Emit code that sums the lanes of each vector, all of them together.

    A step adds the upper half of each vector to its lower half and packs two results into one
    vector. The sum of one vector is the same tree whatever is beside it.
    """
    size = lanes = vectors[0].type.count
    while size > 1:
        half = size // 2
        packed = []
        for a, b in zip(vectors[::2], vectors[1::2] or [None], strict=True):
            low = [n for n in range(lanes if b is None else 2 * lanes) if n % size < half]
            b = a if b is None else b
            packed.append(
                builder.fadd(
                    _shuffle(builder, a, b, low), _shuffle(builder, a, b, [n + half for n in low])
                )
            )
        vectors, size, lanes = packed, half, packed[0].type.count
    while len(vectors) > 1:
        join = [*range(2 * lanes)]
        vectors = [
            _shuffle(builder, a, b, join) for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        lanes *= 2
    return vectors[0]


@intrinsic
def total(typingctx, vector):
    """The sum of the lanes, in a fixed order."""

    def codegen(context, builder, sig, args):
        return builder.extract_element(_sums(builder, args), ir.Constant(ir.IntType(32), 0))

    return vector.dtype(vector), codegen


@intrinsic
def totals(typingctx, a, b, c, d):
    """A vector of four: the sum of the lanes of each, in the order of `total`."""

    def codegen(context, builder, sig, args):
        return _sums(builder, args)

    return Vec(a.dtype, 4)(a, a, a, a), codegen


@intrinsic(prefer_literal=True)
def lane(typingctx, vector, n):
    """Lane n (a literal) of a vector."""
    if not isinstance(n, types.IntegerLiteral):
        return None

    def codegen(context, builder, sig, args):
        return builder.extract_element(args[0], ir.Constant(ir.IntType(32), n.literal_value))

    return vector.dtype(vector, n), codegen


@intrinsic
def prefetch(typingctx, like, array, i):
    """Ask for the cache lines of array[i : i + lanes]; any offset is safe."""

    def codegen(context, builder, sig, args):
        i8p, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        f = ir.FunctionType(ir.VoidType(), [i8p, i32, i32, i32])
        f = builder.module.declare_intrinsic("llvm.prefetch", [i8p], f)
        at = builder.bitcast(builder.gep(args[1], [args[2]]), i8p)
        for line in range(0, like.lanes * like.dtype.bitwidth // 8, 64):
            line = builder.gep(at, [ir.Constant(ir.IntType(64), line)])
            builder.call(f, [line, *(ir.Constant(i32, n) for n in (0, 3, 1))])  # read, keep, data
        return context.get_dummy_value()

    return types.void(like, array, types.intp), codegen


@intrinsic
def transpose(typingctx, like, out, to, out_step, x, at, x_step):
    """Move a square block: out[to + r out_step + c] = x[at + c x_step + r] for r, c < lanes."""

    def codegen(context, builder, sig, args):
        n, i64 = like.lanes, ir.IntType(64)
        pointer, align = context.get_value_type(like).as_pointer(), like.dtype.bitwidth // 8
        _, out, to, out_step, x, at, x_step = args

        def row(base, start, step, r):
            at = builder.add(start, builder.mul(step, ir.Constant(i64, r)))
            return builder.bitcast(builder.gep(base, [at]), pointer)

        rows = [builder.load(row(x, at, x_step, r), align=align) for r in range(n)]
        halves = [
            [half * n // 2 + lane // 2 + lane % 2 * n for lane in range(n)] for half in (0, 1)
        ]
        for _ in range(n.bit_length() - 1):  # each round interleaves the first rows with the last
            pairs = zip(rows[: n // 2], rows[n // 2 :], strict=True)
            rows = [_shuffle(builder, a, b, half) for a, b in pairs for half in halves]
        for r in range(n):
            builder.store(rows[r], row(out, to, out_step, r), align=align)
        return context.get_dummy_value()

    i = types.intp
    return types.void(like, out, i, i, x, i, i), codegen


@intrinsic
def draw(typingctx, counter):
    """Return counter[0] and add 1 to it, as one step among threads."""

    def codegen(context, builder, sig, args):
        one = ir.Constant(ir.IntType(64), 1)
        return builder.atomic_rmw("add", args[0], one, "monotonic")

    return types.int64(counter), codegen


@intrinsic
def call(typingctx, address, chunk, chunks, args):
    """Call the compiled body at `address` with (chunk, chunks, *args).

    So the parallel form runs the very machine code of the serial one, and is quick to compile.
    """

    def codegen(context, builder, sig, values):
        kinds = [types.intp, types.intp, *args.types]
        convention = context.call_conv
        pointer = convention.get_function_type(types.none, kinds).as_pointer()
        body = builder.inttoptr(values[0], pointer)
        values = [*values[1:3], *cgutils.unpack_tuple(builder, values[3])]
        convention.call_function(builder, body, types.none, kinds, values)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, args), codegen


# ---------------------------------------------------------------------------------------------
# The bodies

FLAGS = {"error_model": "numpy", "nogil": True}
body = numba.njit(**FLAGS)
inlined = numba.njit(forceinline=True, **FLAGS)


@inlined
def _row(ptr, n, goal):
    """The first of n rows with ptr[i] + i >= goal: entries and rows count alike as work."""
    low, high = 0, n
    while low < high:
        middle = (low + high) // 2
        if np.int64(get(ptr, middle)) + middle < goal:
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def _share(c, chunks, n):
    """The bounds of chunk c of n elements; multiples of 16, so that no cache line is shared."""
    step = (n + chunks * 16 - 1) // (chunks * 16) * 16
    return min(c * step, n), min((c + 1) * step, n)


@inlined
def _value(values, perm, permuted, e):
    return get(values, np.int64(get(perm, e)) if permuted else np.int64(e))


@inlined
def _tile(like, rest, out, to, values, perm, permuted, x, k, c, start, end, indices, last, ahead):
    """Columns c to c + rest of one row of A x, stored at offset `to`.

    They are held as two vectors that may overlap, so that no masks are needed. The sums stay in
    registers over all entries of the row.
    """
    shift = rest - width(like)
    low = high = zero(like)
    for e in range(start, end):
        if ahead:
            at = np.int64(get(indices, min(e + ahead, last))) * k + c
            prefetch(like, x, at)
            prefetch(like, x, at + shift)
        value = splat(like, _value(values, perm, permuted, e))
        at = np.int64(get(indices, e)) * k + c
        low = fma(value, load(like, x, at), low)
        high = fma(value, load(like, x, at + shift), high)
    store(out, to, low)
    store(out, to + shift, high)


@inlined
def _dot(zero, values, perm, permuted, x, start, end, indices):
    """One row times a vector, in four interleaved sums."""
    s0 = s1 = s2 = s3 = zero
    whole = start + (end - start) // 4 * 4
    for e in range(start, whole, 4):
        s0 = fma(_value(values, perm, permuted, e), get(x, get(indices, e)), s0)
        s1 = fma(_value(values, perm, permuted, e + 1), get(x, get(indices, e + 1)), s1)
        s2 = fma(_value(values, perm, permuted, e + 2), get(x, get(indices, e + 2)), s2)
        s3 = fma(_value(values, perm, permuted, e + 3), get(x, get(indices, e + 3)), s3)
    for e in range(whole, end):
        s0 = fma(_value(values, perm, permuted, e), get(x, get(indices, e)), s0)
    return (s0 + s1) + (s2 + s3)


@body
def _spmm(chunk, chunks, out, values, perm, x, ptr, indices, permuted, column, longest, ahead):
    """out[:, column : column + k] = A x, without the rows of more than `longest` entries."""
    k, width, size = x.shape[1], out.shape[1], x.itemsize
    full = 256 // size
    n, last = len(ptr) - 1, len(indices) - 1
    work = len(indices) + n
    none = x.dtype.type(0)
    out, values, perm, x = data(out), data(values), data(perm), data(x)
    ptr, indices = data(ptr), data(indices)
    first, bound = _row(ptr, n, work * chunk // chunks), _row(ptr, n, work * (chunk + 1) // chunks)
    for i in range(first, bound):
        start, end = np.int64(get(ptr, i)), np.int64(get(ptr, i + 1))
        to = i * width + column
        if end - start > longest:
            continue
        if k == 1:
            put(out, to, _dot(none, values, perm, permuted, x, start, end, indices))
            continue
        for c in range(0, k, full):
            # Two vectors of the smallest power of two that is at least half of what is left.
            rest = min(k - c, full)
            where = out, to + c, values, perm, permuted, x, k, c
            row = (rest, *where, start, end, indices, last, ahead)
            if rest * size > 128:
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
def _entries(like, out, perm, u, u0, v, k, first, bound, indices, last, permuted, more, ahead):
    """out[e] = (out[e] if more) + u[u0 :] . v[j] for the entries e in first..bound of one row.

    Vectors run along the columns; the last one is moved back to end with the row, its lanes that
    were summed before set to zero. Four entries at a time share the loads of u and the sums
    across lanes.
    """
    lanes = width(like)
    tail = k % lanes
    whole = k - tail
    end = k - lanes
    stop = first + (bound - first) // 4 * 4
    for e in range(first, stop, 4):
        a, b = np.int64(get(indices, e)) * k, np.int64(get(indices, e + 1)) * k
        c, d = np.int64(get(indices, e + 2)) * k, np.int64(get(indices, e + 3)) * k
        if ahead:
            for n in range(4):
                at = np.int64(get(indices, min(e + ahead + n, last))) * k
                for q in range(0, k, lanes):
                    prefetch(like, v, at + q)
        sa = sb = sc = sd = zero(like)
        for q in range(0, whole, lanes):
            w = load(like, u, u0 + q)
            sa = fma(w, load(like, v, a + q), sa)
            sb = fma(w, load(like, v, b + q), sb)
            sc = fma(w, load(like, v, c + q), sc)
            sd = fma(w, load(like, v, d + q), sd)
        if tail:
            w = last_lanes(load(like, u, u0 + end), tail)
            sa = fma(w, last_lanes(load(like, v, a + end), tail), sa)
            sb = fma(w, last_lanes(load(like, v, b + end), tail), sb)
            sc = fma(w, last_lanes(load(like, v, c + end), tail), sc)
            sd = fma(w, last_lanes(load(like, v, d + end), tail), sd)
        sums = totals(sa, sb, sc, sd)
        if permuted or more:
            _add(out, perm, permuted, more, e, lane(sums, 0))
            _add(out, perm, permuted, more, e + 1, lane(sums, 1))
            _add(out, perm, permuted, more, e + 2, lane(sums, 2))
            _add(out, perm, permuted, more, e + 3, lane(sums, 3))
        else:
            store(out, e, sums)
    for e in range(stop, bound):
        a = np.int64(get(indices, e)) * k
        sa = zero(like)
        for q in range(0, whole, lanes):
            sa = fma(load(like, u, u0 + q), load(like, v, a + q), sa)
        if tail:
            w = last_lanes(load(like, u, u0 + end), tail)
            sa = fma(w, last_lanes(load(like, v, a + end), tail), sa)
        _add(out, perm, permuted, more, e, total(sa))


@inlined
def _add(out, perm, permuted, more, e, value):
    at = np.int64(get(perm, e)) if permuted else np.int64(e)
    put(out, at, get(out, at) + value if more else value)


@body
def _sddmm(chunk, chunks, out, perm, u, v, ptr, indices, permuted, column, more, ahead):
    """out[e] = (out[e] if more) + u[i, column : column + k] . v[j] for a share of the entries.

    A share may begin and end inside a row.
    """
    first, bound = _share(chunk, chunks, len(indices))
    i, high, last = 0, len(ptr) - 1, len(indices) - 1
    k, width, size = v.shape[1], u.shape[1], v.shape[1] * v.itemsize
    out, perm, u, v = data(out), data(perm), data(u), data(v)
    ptr, indices = data(ptr), data(indices)
    while high - i > 1:  # to the row of the first entry: ptr[i] <= first < ptr[i + 1]
        middle = (i + high) // 2
        if get(ptr, middle) <= first:
            i = middle
        else:
            high = middle
    while first < bound:
        end = min(np.int64(get(ptr, i + 1)), bound)
        arrays = out, perm, u, i * width + column, v, k
        row = (*arrays, first, end, indices, last, permuted, more, ahead)
        if size >= 64:
            _entries(zeros(v, 64), *row)
        elif size >= 16:
            _entries(zeros(v, 16), *row)
        else:
            _entries(zeros(v, 4), *row)
        first = end
        i += 1


@body
def _gather(chunk, chunks, out, x, index, base, ahead):
    """An empty `base` stands for zeros."""
    first, bound = _share(chunk, chunks, len(index))
    last, based, none = len(index) - 1, len(base) > 0, x.dtype.type(0)
    out, x, index, base = data(out), data(x), data(index), data(base)
    for e in range(first, bound):
        if ahead:
            prefetch(zeros(x, 4), x, np.int64(get(index, min(e + ahead, last))))
        at = get(index, e)
        if at >= 0:
            put(out, e, get(x, at))
        else:
            put(out, e, get(base, e) if based else none)


@body
def _segment_sum(chunk, chunks, out, x, ptr, order):
    n, none = len(ptr) - 1, x.dtype.type(0)
    work = len(order) + n
    out, x, ptr, order = data(out), data(x), data(ptr), data(order)
    first, bound = _row(ptr, n, work * chunk // chunks), _row(ptr, n, work * (chunk + 1) // chunks)
    for s in range(first, bound):
        value = none
        for p in range(get(ptr, s), get(ptr, s + 1)):
            value += get(x, get(order, p))
        put(out, s, value)


@body
def _sgd(chunk, chunks, p, buf, g, lr, momentum, nesterov, weight_decay, first):
    """An empty `buf` stands for none."""
    scalar = p.dtype.type
    lr, momentum, weight_decay = scalar(lr), scalar(momentum), scalar(weight_decay)
    start, end = _share(chunk, chunks, len(p))
    buffered = len(buf) > 0
    p, buf, g = data(p), data(buf), data(g)
    for e in range(start, end):
        w, d = get(p, e), get(g, e)
        if weight_decay != 0:
            d += weight_decay * w
        if buffered:
            mean = d if first else momentum * get(buf, e) + d
            put(buf, e, mean)
            d = d + momentum * mean if nesterov else mean
        put(p, e, w - lr * d)


@body
def _adam(chunk, chunks, p, m, v, g, beta2, from_g, from_g2, size, root, eps, decay, keep):
    scalar = p.dtype.type
    beta2, from_g, from_g2, size = scalar(beta2), scalar(from_g), scalar(from_g2), scalar(size)
    root, eps, decay, keep = scalar(root), scalar(eps), scalar(decay), scalar(keep)
    start, end = _share(chunk, chunks, len(p))
    p, m, v, g = data(p), data(m), data(v), data(g)
    for e in range(start, end):
        w, d = get(p, e) * keep, get(g, e)
        if decay != 0:
            d += decay * w
        mean = get(m, e)
        mean += from_g * (d - mean)
        square = beta2 * get(v, e) + from_g2 * d * d
        put(m, e, mean)
        put(v, e, square)
        put(p, e, w - size * (mean / (np.sqrt(square) / root + eps)))


@body
def _copy(chunk, chunks, out, x):
    """out[n] = x[:, n m : (n + 1) m] for out of shape (panels, rows, m).

    The rows or the columns of x are contiguous. m is a multiple of 64 bytes, or there is one
    panel.
    """
    rows, columns = x.shape
    m = out.shape[2]
    down, across = x.strides[0] // x.itemsize, x.strides[1] // x.itemsize
    out, x = data(out), data(x)
    like = zeros(x, 64)
    lanes = width(like)
    first, bound = _share(chunk, chunks, rows)
    for i in range(first, bound, lanes):
        stop = min(i + lanes, bound)
        for c in range(0, columns, lanes):
            end = min(c + lanes, columns)
            to = c // m * rows * m + i * m + c % m
            at = i * down + c * across
            if down == 1 and stop - i == lanes and end - c == lanes:
                transpose(like, out, to, m, x, at, across)
            elif across == 1 and end - c == lanes:
                for r in range(stop - i):
                    store(out, to + r * m, load(like, x, at + r * down))
            else:
                for r in range(stop - i):
                    for q in range(end - c):
                        put(out, to + r * m + q, get(x, at + r * down + q * across))


# ---------------------------------------------------------------------------------------------
# The same in parallel, the body being given by its address


def _tasks(tasks, chunks, address, args):
    counter = np.zeros(1, np.int64)
    for _ in numba.prange(tasks):
        c = draw(data(counter))
        while c < chunks:
            call(address, c, chunks, args)
            c = draw(data(counter))


# ---------------------------------------------------------------------------------------------
# Compiling at first use, and the choice between serial and parallel

PARALLEL_WORK = 1 << 21
"""Up to this much work is done by one thread. The unit is a multiply-add in a vector, about 36
picoseconds; waking OpenMP's threads takes 15 microseconds where they do not spin."""

_wake = 1  # how many times as long the threading layer takes: 3 for Numba's own, "workqueue"

CHUNK_WORK = 1 << 18
"""The least work worth a chunk of its own: 10 microseconds."""

MAX_CHUNKS = 1024

_busy = threading.Lock()
# Whether this process was forked from one that had launched Numba's threads; perhaps before this
# module was imported, by multiprocessing.
_forked = numba_parallel._is_initialized and multiprocessing.parent_process() is not None


def _after_fork_in_child():
    """Numba's threads do not survive a fork, and its layers do not know how to start anew."""
    global _busy, _forked
    _busy = threading.Lock()
    _forked = _forked or numba_parallel._is_initialized
    global_compiler_lock.release()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=_after_fork_in_child,
    )


class _Kernel:
    """A body and its parallel form, each compiled once for every combination of array types.

    Parameters
    ----------
    body : dispatcher
    written : int
        The first so many arrays are written, the others only read.
    layout : {"C", "A"}
        Of the arrays that are read.
    """

    def __init__(self, body, written=1, layout="C"):
        self.body, self.written, self.layout = body.py_func, written, layout
        self.serial, self.parallel = {}, {}

    def __call__(self, key, work, *args):
        """Run the kernel; `key` stands for the types of the arrays in `args`."""
        kernel = self.serial.get(key) or self.compile(key, args)
        if work > PARALLEL_WORK * _wake and not _forked and get_num_threads() > 1:
            # Numba's layers abort or oversubscribe when two threads enter them at once: who
            # finds one inside goes alone.
            busy = _busy
            if busy.acquire(blocking=False):
                try:
                    kernel, address = self.parallel.get(key) or self.compile_parallel(key)
                    chunks = min(int(work) // CHUNK_WORK + 1, MAX_CHUNKS)
                    kernel(min(get_num_threads(), chunks), chunks, address, args)
                    return
                finally:
                    busy.release()
        kernel(0, 1, *args)

    def compile(self, key, args):
        """Compile the body for arguments like `args`, with inputs that are read-only.

        Such a kernel takes writable arrays as well.
        """
        with global_compiler_lock:
            kinds, arrays = [types.intp, types.intp], 0
            for arg in args:
                kind = numba.typeof(arg)
                if isinstance(kind, types.Array):
                    arrays += 1
                    if arrays > self.written:
                        kind = kind.copy(readonly=True, layout=self.layout)
                kinds.append(kind)
            if key not in self.serial:
                self.serial[key] = _compile(self.body, tuple(kinds))
        return self.serial[key]

    def compile_parallel(self, key):
        """Compile the parallel form where there is a serial one; this starts Numba's threads."""
        global _wake
        with global_compiler_lock:
            if key not in self.parallel:
                ((signature, body),) = self.serial[key].overloads.items()
                kinds = types.intp, types.intp, types.intp, types.Tuple(signature[2:])
                kernel = _compile(_tasks, kinds, parallel=True)
                address = body.library.get_pointer_to_function(body.fndesc.llvm_func_name)
                self.parallel[key] = kernel, address
                if numba_parallel._threading_layer == "workqueue":
                    _wake = 3
        return self.parallel[key]


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


_KERNELS = _SPMM, _SDDMM, _GATHER, _SEGMENT_SUM, _SGD, _ADAM, _COPY = (
    _Kernel(_spmm),
    _Kernel(_sddmm),
    _Kernel(_gather),
    _Kernel(_segment_sum),
    _Kernel(_sgd, written=2),
    _Kernel(_adam, written=3),
    _Kernel(_copy, layout="A"),
)

# ---------------------------------------------------------------------------------------------
# The doors

SPLIT = 1 << 14
"""A row of more than twice as many entries is summed in pieces of so many."""

AHEAD = 64
"""How many lines ahead the dense operand is asked for."""


def _core_cache():
    """Bytes of the second-level cache of a core."""
    try:
        with open("/sys/devices/system/cpu/cpu0/cache/index2/size") as file:
            return int(file.read().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return 1 << 20


CACHE = _core_cache()


def _ahead(x):
    """How many entries ahead to ask for the rows of x; 0 (not at all) where x is near anyway."""
    if x.nbytes <= CACHE // 2:
        return 0
    return min(AHEAD // max(1, min(4, x.shape[1] * x.itemsize // 64)), 64)


class _Derived:
    """What the kernels need of a plan: the key of its index types, and its giant rows apart."""

    __slots__ = ("giants", "key", "longest")

    def __init__(self, plan):
        self.key = plan.indices.dtype.char
        self.giants, self.longest = (), plan.nnz
        if plan.nnz > 2 * SPLIT:
            self.longest = 2 * SPLIT
            rows = np.flatnonzero(np.diff(plan.indptr) > self.longest)
            self.giants = [(i, *_pieces(plan, i)) for i in rows]
        plan.derived = self


def _pieces(plan, i):
    """Row i as a matrix of its own, of SPLIT entries a row; and its slice of the entries."""
    entries = slice(plan.indptr[i], plan.indptr[i + 1])
    n = entries.stop - entries.start
    ptr = np.append(np.arange(0, n, SPLIT, plan.indptr.dtype), n).astype(plan.indptr.dtype)
    return Plan(ptr, plan.indices[entries], plan.n_cols), entries


def contiguous(x):
    """See reference."""
    flags = x.flags.num
    if flags & 0x101 == 0x101 and x.dtype.isnative and type(x) is np.ndarray:  # C order, aligned
        return x
    if x.ndim == 2 and x.size > 4096 and x.strides[0] == x.itemsize and _plain(x):
        return _panels(x, x.shape[1])[0]
    out = empty(x.shape, x.dtype.newbyteorder("="))
    out[...] = x
    return out


def _plain(x):
    """Whether kernels can read x where its strides allow it."""
    return x.flags.aligned and x.dtype.isnative and x.dtype.char in "fd"


def _panels(x, m):
    """x in C order, cut into panels of m columns: an array of shape (panels, len(x), m)."""
    if x.itemsize not in x.strides or not _plain(x):
        x = contiguous(x)
    out = empty((-(-x.shape[1] // m), len(x), m), x.dtype)
    _COPY(x.dtype.char, 32 * x.size, out, x.view(np.ndarray))
    return out


def _cut(plan, x):
    """Return the parts of x to multiply one after the other, as pairs (first column, part).

    Narrow panels pay where x is too large for the core's own cache, a panel is not, and a row of
    x is needed often enough to be worth the copy. Else x is one part.
    """
    m = 256 // x.itemsize
    whole = x.shape[1] // m * m
    if (
        whole <= m
        or x.nbytes <= CACHE // 2
        or len(x) * 256 > CACHE * 3 // 4
        or plan.nnz < 16 * len(x)
    ):
        return [(0, contiguous(x))]
    parts = [(n * m, panel) for n, panel in enumerate(_panels(x[:, :whole], m))]
    if whole < x.shape[1]:
        parts.append((whole, contiguous(x[:, whole:])))
    return parts


def spmm(plan, values, x):
    """See reference."""
    if x.ndim == 1:
        return spmm(plan, values, x[:, None]).reshape(-1)
    derived = plan.derived or _Derived(plan)
    perm, values, k = plan.perm, contiguous(values), x.shape[1]
    out = empty((plan.n_rows, k), x.dtype)
    if perm is not None and k * x.itemsize > 256:  # several passes over a row: permute once
        values, perm = gather(values, perm), None
    permuted = perm is not None
    key = x.dtype.char + derived.key
    for column, part in _cut(plan, x):
        work = (plan.nnz + plan.n_rows) * (part.shape[1] + 16)
        arrays = out, values, perm if permuted else plan.indices, part, plan.indptr, plan.indices
        _SPMM(key, work, *arrays, permuted, column, derived.longest, _ahead(part))
    for i, pieces, entries in derived.giants:  # at most nnz / SPLIT of them
        of_row = gather(values, perm[entries]) if permuted else values[entries]
        sums = spmm(pieces, of_row, x)
        row = out[i]
        row[...] = sums[0]
        for piece in sums[1:]:
            row += piece
    return out


def sddmm(plan, u, v):
    """See reference."""
    if u.ndim == 1:
        u, v = u[:, None], v[:, None]
    derived = plan.derived or _Derived(plan)
    u, perm = contiguous(u), plan.perm
    out = empty((plan.nnz,), u.dtype)
    if u.shape[1] == 0:
        out[...] = 0
        return out
    permuted = perm is not None
    key = u.dtype.char + derived.key
    for column, part in _cut(plan, v):
        work = plan.nnz * (part.shape[1] + 16)
        arrays = out, perm if permuted else plan.indices, u, part, plan.indptr, plan.indices
        _SDDMM(key, work, *arrays, permuted, column, column > 0, _ahead(part))
    return out


def gather(x, index, base=None):
    """See reference."""
    x, index = contiguous(x), contiguous(index)
    out = empty((len(index),), x.dtype)
    base = x[:0] if base is None else contiguous(base)
    key = x.dtype.char + index.dtype.char
    _GATHER(key, 32 * len(index), out, x, index, base, _ahead(x[:, None]))
    return out


def segment_sum(x, indptr, order):
    """See reference."""
    x, indptr, order = contiguous(x), contiguous(indptr), contiguous(order)
    out = empty((len(indptr) - 1,), x.dtype)
    key = x.dtype.char + indptr.dtype.char + order.dtype.char
    _SEGMENT_SUM(key, 32 * (len(order) + len(out)), out, x, indptr, order)
    return out


def sgd(p, g, buf, lr, momentum=0.0, nesterov=False, weight_decay=0.0, first=False):
    """See reference."""
    p, g = p.reshape(-1), contiguous(g).reshape(-1)
    buf = p[:0] if buf is None else buf.reshape(-1)
    scalars = float(lr), float(momentum), bool(nesterov), float(weight_decay), bool(first)
    _SGD(p.dtype.char, 8 * p.size, p, buf, g, *scalars)


def adam(p, g, m, v, step, lr, beta1, beta2, eps, weight_decay=0.0, decoupled=False):
    """See reference."""
    scalars = adam_scalars(step, lr, beta1, beta2, eps, weight_decay, decoupled)
    arrays = p.reshape(-1), m.reshape(-1), v.reshape(-1), contiguous(g).reshape(-1)
    _ADAM(p.dtype.char, 16 * p.size, *arrays, *map(float, scalars))


def warmup(dtypes):
    """Compile every kernel, serial and parallel, for `dtypes` and 32-bit indices."""
    plan = Plan(np.array([0, 1], np.int32), np.array([0], np.int32), 1)
    for dtype in dtypes:
        x = np.ones((1, 1), dtype)
        row = x[0]
        spmm(plan, row, x)
        sddmm(plan, x, x)
        gather(row, plan.indices)
        segment_sum(row, plan.indptr, plan.indices)
        sgd(row, row.copy(), None, 0.1)
        adam(row, row.copy(), row.copy(), row.copy(), 1, 0.1, 0.9, 0.99, 1e-8)
        _panels(x, 1)
    if not _forked:
        for kernel in _KERNELS:
            for key in list(kernel.serial):
                kernel.compile_parallel(key)


def config():
    """What Numba runs on, as far as it has started."""
    kernels = [kernel for kinds in _KERNELS for kernel in kinds.serial.values()]
    return {
        "threading_layer": getattr(numba_parallel, "_threading_layer", None),
        "cache": kernels[0].stats.cache_path if kernels else None,
    }
