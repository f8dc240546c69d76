"""Output arrays: 64-byte aligned, and recycled from step to step.

A fresh 16 MB array costs several times the product that fills it, because the operating system
hands over its pages one fault at a time; an output row that straddles cache lines costs up to
twice. Both costs are paid once per training run here instead of once per call.
"""

import math
import os
from collections import OrderedDict

import numpy as np

ALIGN = 64  # bytes: a cache line, and the widest vector register

SMALL = 1 << 15  # arrays below this many bytes come from NumPy, which is quicker for them

# Idle blocks beyond this many bytes are given back to the system, the oldest first.
MAX_IDLE_BYTES = 1 << 31

MAX_IDLE_SIZES = 1 << 10  # blocks of so many different sizes are kept at most


class _Pool:
    """Idle blocks by size.

    Every method may be interrupted by another thread or by the garbage collector, which may run
    ``_Block.__del__`` (hence ``put``) in the middle of ``take``. So nobody waits for his turn: who
    does not get it goes without the pool, which costs an allocation and nothing else.

    It may also be interrupted by a signal, after any call. So the turn is no lock: one that has
    just been acquired would be lost before ``try``. And the two that must agree, the blocks and
    how many bytes they are, change with no call in between.
    """

    def __init__(self):
        self.clear()

    def clear(self):
        """Forget every idle block, and whose turn it is: a thread that a fork left behind."""
        self.turn = [None]  # empty while somebody is inside
        self.idle = OrderedDict()  # size -> blocks; the size used longest ago comes first
        self.idle_bytes = 0

    def take(self, size):
        """Return an idle block of exactly `size` bytes, or None."""
        try:
            del self.turn[0]
        except IndexError:
            return None
        try:
            blocks = self.idle.get(size)
            if blocks:
                self.idle_bytes -= size
                return blocks.pop()
        finally:
            self.turn.append(None)

    def put(self, size, block):
        """Keep `block` for later, dropping the oldest ones where they are too many."""
        if size > MAX_IDLE_BYTES:
            return
        try:
            del self.turn[0]
        except IndexError:
            return
        try:
            blocks = self.idle.setdefault(size, [])
            self.idle.move_to_end(size)
            self.idle_bytes += size
            blocks.append(block)
            while self.idle_bytes > MAX_IDLE_BYTES or len(self.idle) > MAX_IDLE_SIZES:
                oldest = next(iter(self.idle))
                if self.idle[oldest]:
                    self.idle_bytes -= oldest
                    del self.idle[oldest][0]
                else:
                    del self.idle[oldest]
        finally:
            self.turn.append(None)


_pool = _Pool()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_pool.clear)


class _Block:
    """The owner of one block: NumPy keeps it alive as long as any view of the array lives."""

    __slots__ = ("__array_interface__", "_block", "_put", "_size")

    def __init__(self, block, shape, dtype, size):
        self._block, self._size, self._put = block, size, _pool.put
        interface = {"version": 3, "shape": shape, "typestr": dtype.str, "data": (block[1], False)}
        self.__array_interface__ = interface

    def __del__(self):
        if hasattr(self, "_put"):  # else a signal came while it was being made
            self._put(self._size, self._block)


def _fresh(size):
    memory = np.empty(size + ALIGN, np.uint8)
    return memory, -(-memory.ctypes.data // ALIGN) * ALIGN


def empty(shape, dtype):
    """Return an uninitialised C-order array, aligned to a cache line if it is large.

    Parameters
    ----------
    shape : int or tuple of int
    dtype : dtype

    Returns
    -------
    ndarray
        Large arrays live in a block that returns to a bounded pool when the last array that can
        see it is gone; views and memoryviews keep it.

    Notes
    -----
    O(1), a few microseconds at most.
    """
    dtype = np.dtype(dtype)
    shape = shape if isinstance(shape, tuple) else (shape,)
    size = dtype.itemsize * math.prod(shape)
    if size < SMALL:
        return np.empty(shape, dtype)
    size = -(-size // 4096) * 4096  # nearby sizes share blocks
    return np.asarray(_Block(_pool.take(size) or _fresh(size), shape, dtype, size))
