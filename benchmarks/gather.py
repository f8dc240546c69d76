"""The gather limit: how long it takes to only load the rows that a product needs.

For every entry of A the product must bring one row of X to a core. The kernel here reads the column
numbers and, of each row, one word in every cache line; it computes nothing and writes nothing. No
product that loads its rows can be quicker, whatever it does beside.
"""

import functools

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .harness import aligned, clocked

LINE = 64
AHEAD = 0, 2, 4, 8, 16, 32, 64
"""How many entries ahead a row is asked for; 0 is not at all."""


def _address(context, builder, array_type, array, i):
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [i])


@intrinsic
def touch(typingctx, x, i):
    """Load x[i] into a register, where nothing uses it."""

    def codegen(context, builder, sig, args):
        value = builder.load(_address(context, builder, x, *args))
        take = ir.FunctionType(ir.VoidType(), [value.type])
        builder.asm(take, "", "r", [value], True)  # empty, but LLVM must give it the value
        return context.get_dummy_value()

    return types.void(x, types.intp), codegen


@intrinsic
def prefetch(typingctx, x, i):
    """Ask for the cache line of x[i]."""

    def codegen(context, builder, sig, args):
        pointer, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        f = ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
        f = builder.module.declare_intrinsic("llvm.prefetch", [pointer], f)
        at = builder.bitcast(_address(context, builder, x, *args), pointer)
        builder.call(f, [at, i32(0), i32(3), i32(1)])  # to read, keep in all caches, data
        return context.get_dummy_value()

    return types.void(x, types.intp), codegen


@numba.njit(error_model="numpy", nogil=True)
def load_rows(x, k, indices, first, bound, ahead):
    """Touch every line of the rows ``indices[first:bound]`` of x, which is flat, k words a row."""
    step, last = LINE // x.itemsize, len(indices) - 1
    for e in range(first, bound):
        if ahead:
            later = np.int64(indices[min(e + ahead, last)]) * k
            for c in range(0, k, step):
                prefetch(x, later + c)
        row = np.int64(indices[e]) * k
        for c in range(0, k, step):
            touch(x, row + c)


@numba.njit(error_model="numpy", parallel=True)
def load_rows_parallel(x, k, indices, bounds, ahead):
    for t in numba.prange(len(bounds) - 1):
        load_rows(x, k, indices, bounds[t], bounds[t + 1], ahead)


def quickest(x, indices, threads):
    """Return a call that loads the rows `indices` of x in the best way found, and its name.

    It is the best over one thread and all, with one share for each, and over prefetch distances.
    """
    flat, k = x.view(f"u{x.itemsize}").reshape(-1), x.shape[1]
    indices = indices.view(f"u{indices.itemsize}")
    bounds = np.linspace(0, len(indices), threads + 1).astype(np.int64)
    ways = {}
    for ahead in AHEAD:
        ways[f"1 thread, {ahead} ahead"] = functools.partial(
            load_rows, flat, k, indices, 0, len(indices), ahead
        )
        if threads > 1:
            ways[f"{threads} threads, {ahead} ahead"] = functools.partial(
                load_rows_parallel, flat, k, indices, bounds, ahead
            )
    for call in ways.values():
        call()
    best = {name: min(clocked(call) for _ in range(7)) for name, call in ways.items()}
    name = min(best, key=best.get)
    return ways[name], name


def limit(problem, threads):
    """Return the calls of the gather limit as a peer: it has a forward pass only."""
    numba.set_num_threads(threads)
    x = aligned(problem.x.T) if problem.batch_first else problem.x
    if x.itemsize * x.shape[1] < LINE:
        raise ValueError("a row is less than a cache line")
    forward, name = quickest(x, problem.pattern.indices, threads)
    return {"forward": forward, "how": lambda: name}


def stream(problem, threads, nbytes=1 << 28):
    """Return a call that reads `nbytes` bytes in order by the same kernel."""
    numba.set_num_threads(threads)
    x = np.ones((nbytes // 1024, 256), np.float32)
    forward, name = quickest(x, np.arange(len(x), dtype=np.int32), threads)
    return {"forward": forward, "how": lambda: name, "bytes": lambda: x.nbytes}
