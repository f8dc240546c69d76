"""Output arrays: 64-byte aligned, and recycled from step to step.

A fresh 16 MB array costs several times the product that fills it, because the operating system
hands over its pages one fault at a time; an output row that straddles cache lines costs up to
twice. Both costs are paid once per training run here instead of once per call.
"""

import math
import os
import threading

import numpy as np

ALIGN = 64
"""Bytes: a cache line, and the widest vector register."""

SMALL = 1 << 15
"""Arrays below this many bytes come from NumPy, which is quicker for them."""

MAX_IDLE_BYTES = 1 << 29
"""Idle blocks beyond this many bytes are given back to the system, the oldest first."""


class _Pool:
    """Idle blocks by size.

    Every method may be interrupted by another thread or by the garbage collector, which may run
    ``_Block.__del__`` (hence ``put``) in the middle of ``take``. So the lock is only ever tried:
    who does not get it goes without the pool, which costs an allocation and nothing else.
    """

    def __init__(self):
        self.clear()

    def clear(self):
        """Forget every idle block, and any lock held by a thread that a fork left behind."""
        self.lock = threading.Lock()
        self.idle = {}  # size -> blocks; the size used longest ago comes first
        self.idle_bytes = 0

    def take(self, size):
        """Return an idle block of exactly `size` bytes, or None."""
        if self.lock.acquire(blocking=False):
            try:
                if self.idle.get(size):
                    self.idle_bytes -= size
                    return self.idle[size].pop()
            finally:
                self.lock.release()

    def put(self, size, block):
        """Keep `block` for later, dropping the oldest ones where they are too many."""
        if size <= MAX_IDLE_BYTES and self.lock.acquire(blocking=False):
            try:
                self.idle[size] = blocks = self.idle.pop(size, [])  # now the last of the sizes
                blocks.append(block)
                self.idle_bytes += size
                while self.idle_bytes > MAX_IDLE_BYTES:
                    oldest = next(iter(self.idle))
                    if self.idle[oldest]:
                        del self.idle[oldest][0]
                        self.idle_bytes -= oldest
                    else:
                        del self.idle[oldest]
            finally:
                self.lock.release()


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
