"""Two guards of memory: the kernels go by bare addresses, which Numba's checking does not see.

``pytest --guard=fence`` runs any test with each array of a kernel beside a page that the system
guards: a load or store that is one element out ends the process, whoever makes it.

``pytest --guard=check`` runs it with each access checked. The kernels' vocabulary is replaced
before anything is compiled: what was an address becomes an address with the range of offsets that
the array has, and who leaves it gets an IndexError. It compiles everything anew, which takes a
minute or two, in a cache directory of its own: Numba's cache does not know one from the other.
"""

import atexit
import ctypes
import itertools
import mmap
import shutil
import tempfile

import numba
import numpy as np

import minisparse as ms
from minisparse.kernels import cpu

# Fences ---------------------------------------------------------------------------------------

PAGE = mmap.PAGESIZE
ON_THE_LEFT, ON_THE_RIGHT = True, False
_protect = ctypes.CDLL(None, use_errno=True).mprotect
_protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def fenced(array, side):
    """A copy of an array, strides and all, that begins or ends where the guarded page is."""
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

    def run(self, key, work, n, by, *args, **options):
        copies = [fenced(a, side) if isinstance(a, np.ndarray) else a for a in args]
        kernel(self, key, work, n, by, *copies, **options)
        for array, copy in itertools.islice(zip(args, copies, strict=True), self.written):
            if array.size:
                array[...] = copy

    return run


def fence_all():
    """Fence every kernel, on both sides: each runs twice, and must write the same.

    Not where an array takes a gigabyte, as only tests of offsets have it: there is no room for two.
    """
    bare = cpu._Kernel.__call__
    right, left = (fence(bare, side) for side in (ON_THE_RIGHT, ON_THE_LEFT))

    def run(self, key, work, n, by, *args, **options):
        if any(isinstance(a, np.ndarray) and a.nbytes > 1 << 30 for a in args):
            bare(self, key, work, n, by, *args, **options)
            return
        before = [args[n].copy() for n in range(self.written)]
        right(self, key, work, n, by, *args, **options)
        after = [args[n].tobytes() for n in range(self.written)]
        for array, old in zip(args, before, strict=False):
            array[...] = old
        left(self, key, work, n, by, *args, **options)
        assert after == [args[n].tobytes() for n in range(self.written)]

    cpu._Kernel.__call__ = run


# Checks ---------------------------------------------------------------------------------------

CHUNKS = 3  # each kernel does its work in so many, one after the other


def check_all():
    """Check every access from now on."""
    numba.config.CACHE_DIR = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, numba.config.CACHE_DIR)
    data, get, load, put, transpose = cpu.data, cpu.get, cpu.load, cpu.put, cpu.transpose
    draw = cpu.draw
    check = numba.njit("void(int64, int64, int64, int64)", error_model="numpy", nogil=True)(_check)

    @numba.njit
    def checked_data(array):
        low = high = np.int64(0)
        for n, step in zip(array.shape, array.strides):  # noqa: B905 - Numba knows no strict
            if n > 0 and step < 0:
                low += (n - 1) * (step // array.itemsize)
            elif n > 0:
                high += (n - 1) * (step // array.itemsize)
        return data(array), low, high + 1 if array.size else low

    @numba.njit
    def checked_get(array, i):
        check(i, 1, array[1], array[2])
        return get(array[0], np.int64(i))

    @numba.njit
    def checked_load(like, array, i):
        check(i, cpu.width(like), array[1], array[2])
        return load(like, array[0], np.int64(i))

    @numba.njit
    def checked_put(array, i, value):
        check(i, lanes(value), array[1], array[2])
        put(array[0], np.int64(i), value)

    @numba.njit
    def checked_transpose(like, out, to, out_step, x, at, x_step):
        for r in range(cpu.width(like)):
            check(to + r * out_step, cpu.width(like), out[1], out[2])
            check(at + r * x_step, cpu.width(like), x[1], x[2])
        transpose(like, out[0], to, out_step, x[0], at, x_step)

    @numba.njit
    def checked_draw(counter):
        check(0, 1, counter[1], counter[2])
        return draw(counter[0])

    @numba.njit
    def no_prefetch(like, array, i):
        pass

    cpu.data, cpu.get, cpu.load, cpu.put = checked_data, checked_get, checked_load, checked_put
    cpu.transpose, cpu.prefetch, cpu.zeros = checked_transpose, no_prefetch, zeros
    cpu.draw = checked_draw
    cpu._Kernel.__call__ = _in_chunks
    cpu.FLAGS["boundscheck"] = True  # of the bodies that index arrays
    ms.set_num_threads(2)  # which sparse products make room for


def _check(i, n, low, high):
    if i < low or i + n > high:
        raise IndexError


@numba.extending.intrinsic(prefer_literal=True)
def zeros(typingctx, array, size):
    """See `cpu.zeros`; the array may be a checked address."""
    dtype = getattr(array, "types", [array])[0].dtype
    vec = cpu.Vec(dtype, max(1, size.literal_value * 8 // dtype.bitwidth))
    return cpu._of(vec(array, size), lambda builder, vector, *_: vector(None))


def lanes(value):
    """The number of numbers that `put` writes."""


@numba.extending.overload(lanes)
def _(value):
    if isinstance(value, cpu.Vec):
        return lambda value: cpu.width(value)
    return lambda value: 1


def _in_chunks(self, key, work, n, by, *args, most=cpu.MAX_CHUNKS):
    kernel = self.serial.get(key) or self.compile(key, by, args)
    chunks = min(CHUNKS, most)
    for c in range(chunks):
        kernel(*cpu._bounds(c, chunks, n, by), *args)
