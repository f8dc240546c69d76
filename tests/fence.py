"""Memory that may not be touched, on either side of every array that a compiled kernel sees.

Numba's bounds checking sees an index into an array; the kernels' vectors go by bare addresses,
which it does not see. Beside a page that the system guards, a load or store that is one element
out ends the process, whoever makes it. ``pytest --fence`` runs any test like this.
"""

import ctypes
import itertools
import mmap

import numpy as np

from minisparse.kernels import cpu

PAGE = mmap.PAGESIZE
ON_THE_LEFT, ON_THE_RIGHT = True, False
_protect = ctypes.CDLL(None, use_errno=True).mprotect
_protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def fenced(array, side):
    """A copy of an array, strides and all, that begins or ends where the guarded page is.

    Of a gigabyte, which only a test of offsets has, there is no copy.
    """
    if array.nbytes > 1 << 30:
        return array
    low, high = np.lib.array_utils.byte_bounds(array) if array.size else (array.ctypes.data,) * 2
    room = -(-(high - low) // PAGE) * PAGE
    memory = mmap.mmap(-1, room + 2 * PAGE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    start = PAGE if side is ON_THE_LEFT else PAGE + room - (high - low)
    ctypes.memmove(base + start, low, high - low)
    copy = np.ndarray(
        array.shape, array.dtype, memory, start + array.ctypes.data - low, array.strides
    )
    for page in (base, base + PAGE + room):
        if _protect(page, PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    return copy


def fence(kernel, side):
    """Let a kernel of `cpu` run on fenced copies of its arrays; then write back what it wrote."""

    def run(self, key, work, *args, **options):
        copies = [fenced(a, side) if isinstance(a, np.ndarray) else a for a in args]
        kernel(self, key, work, *copies, **options)
        for array, copy in itertools.islice(zip(args, copies, strict=True), self.written):
            if array.size:
                array[...] = copy

    return run


def fence_all():
    """Fence every kernel, on both sides: each runs twice, and must write the same."""
    right, left = (fence(cpu._Kernel.__call__, side) for side in (ON_THE_RIGHT, ON_THE_LEFT))

    def run(self, key, work, *args, **options):
        before = [args[n].copy() for n in range(self.written)]
        right(self, key, work, *args, **options)
        after = [args[n].tobytes() for n in range(self.written)]
        for array, old in zip(args, before, strict=False):
            array[...] = old
        left(self, key, work, *args, **options)
        assert after == [args[n].tobytes() for n in range(self.written)]

    cpu._Kernel.__call__ = run
