"""Sparse kernels: raw arrays in, raw arrays out.

Everything above this package works with patterns and tensors; everything in it works with plain
float32 or float64 arrays and int32 or int64 index arrays that the caller has checked. This module
is the only place that knows which backend runs: it goes by the class of the arrays it is given,
and for NumPy arrays by `backend`.
"""

import contextlib
import contextvars
import functools
import logging  # noqa: F401 - its lock, which Numba takes, must come after ours at a fork
import os
import sys
import threading

import numpy as np

from . import reference

_backend = contextvars.ContextVar("minisparse_backend", default="cpu")
_num_threads = os.cpu_count() or 1
if hasattr(os, "sched_getaffinity"):  # Linux
    _num_threads = len(os.sched_getaffinity(0))


class Plan:
    """The structure of a sparse matrix, with what kernels derive from it once.

    Parameters
    ----------
    indptr : int32 or int64 ndarray of shape (n_rows + 1,)
    indices : ndarray of shape (nnz,)
        Of the dtype of `indptr`.
    n_cols : int
    perm : ndarray of shape (nnz,), optional
        Of the dtype of `indptr`. Entry e has the value ``values[perm[e]]``. So the transpose of a
        matrix is multiplied without moving its values.

    Notes
    -----
    All three arrays are trusted: C order, aligned, in range. O(1); what a backend derives, it
    derives when it first needs it, and keeps in `derived`.
    """

    __slots__ = ("derived", "indices", "indptr", "n_cols", "n_rows", "nnz", "perm")

    def __init__(self, indptr, indices, n_cols, perm=None):
        self.indptr, self.indices = indptr, indices
        self.perm = indices[:0] if perm is None else perm  # empty: the values come as they are
        self.n_rows, self.n_cols, self.nnz = len(indptr) - 1, n_cols, len(indices)
        self.derived = {}


def derived(derive):
    """Let a function of a plan run once for each plan, which keeps what it returns."""

    def kept(plan):
        if derive not in plan.derived:
            plan.derived[derive] = derive(plan)
        return plan.derived[derive]

    return functools.wraps(derive)(kept)


_born = os.getpid()  # the process that imported this module: perhaps a forebear of the present one
# Held across a fork, so that the child finds none taken by a thread that it does not have: one for
# the import of the compiled kernels, which add Numba's.
_fork_locks = [threading.RLock()]


def _to_each_lock(do):
    return lambda: [getattr(lock, do)() for lock in _fork_locks]


if hasattr(os, "register_at_fork"):  # not on Windows
    _hold, _release = map(_to_each_lock, ("acquire", "release"))
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_release)


@functools.cache
def _compiled():
    """Import the compiled kernels at their first use; the reference where Numba may not compile."""
    with _fork_locks[0]:
        import numba

        if numba.config.DISABLE_JIT:
            return reference
        from . import cpu

        return cpu


def _kernels(array):
    """Return the module of kernels for the class of `array`: the one place that chooses."""
    if isinstance(array, np.ndarray):
        return _compiled() if _backend.get() == "cpu" else reference
    if device_of(array) == "cuda":
        return cuda
    raise TypeError(f"kernels take arrays of NumPy and CuPy, not {type(array).__name__}")


def _door(definition):
    """Make a kernel of its definition in `reference`: the backend goes by its first array."""

    @functools.wraps(definition, [a for a in functools.WRAPPER_ASSIGNMENTS if a != "__module__"])
    def kernel(*args, **kwargs):
        for array in args:
            if type(array) is not Plan:
                return getattr(_kernels(array), definition.__name__)(*args, **kwargs)
        raise TypeError(f"{definition.__name__}: arrays are given by position")

    return kernel


spmm, spmm_vjp, sddmm = map(_door, (reference.spmm, reference.spmm_vjp, reference.sddmm))
gather, segment_sum, gate = map(_door, (reference.gather, reference.segment_sum, reference.gate))
row_max, row_softmax = map(_door, (reference.row_max, reference.row_softmax))
spgemm, spgemm_dot = map(_door, (reference.spgemm, reference.spgemm_dot))
sgd, adam, contiguous = map(_door, (reference.sgd, reference.adam, reference.contiguous))

from . import cuda  # noqa: E402 - it needs what is above


def add_at(out, key, x):
    """Add `x` to ``out[key]`` in place; a place that the key names twice gets both."""
    np.add.at(out, key, x) if isinstance(out, np.ndarray) else _kernels(out).add_at(out, key, x)


def device_of(array):
    """Return "cuda" for an array on a GPU, "cpu" for anything else."""
    return "cuda" if hasattr(array, "__cuda_array_interface__") else "cpu"


def moved(array, device):
    """Return an array on "cpu" or "cuda": itself where it is there already, None for None."""
    if device not in ("cpu", "cuda"):
        raise ValueError(f"to: device {device!r} is neither 'cpu' nor 'cuda'")
    if array is None or device_of(array) == device:
        return array
    if device == "cpu":
        return array.get()
    if why := cuda.why_not():
        raise RuntimeError(why)
    import cupy

    return cupy.asarray(array)


@contextlib.contextmanager
def backend(name):
    """Choose the backend for NumPy arrays in this thread or async task, as a context manager.

    Parameters
    ----------
    name : {"cpu", "reference"}

    Raises
    ------
    ValueError
        If `name` is something else.
    """
    if name not in ("cpu", "reference"):
        raise ValueError(f"backend: {name!r} is unknown; use 'cpu' or 'reference'")
    before = _backend.get()
    try:
        _backend.set(name)
        yield
    finally:
        _backend.set(before)


def get_num_threads():
    """Return the number of threads that kernels use: at first, the cores this process may use."""
    return _num_threads


def set_num_threads(n):
    """Set the number of threads that kernels use. Numba's own setting is left alone.

    Raises
    ------
    ValueError
        If `n` is not an integer of at least 1.

    Notes
    -----
    Kernels may be called from any number of threads: one at a time runs on Numba's threads, the
    others each on their own. A child forked from a process that has launched Numba's threads runs
    its kernels serially; one that is spawned, or forked before, has its own. The results are the
    same bits in all cases.

    Numba's workqueue layer aborts the process when a parallel function of your own runs in one
    thread and a kernel in another. Take another layer (`NUMBA_THREADING_LAYER`), or
    ``set_num_threads(1)``: the kernels then stay out of Numba's threads.
    """
    global _num_threads
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
        raise ValueError(f"set_num_threads: need an integer of at least 1, got {n!r}")
    _num_threads = int(n)


def warmup(dtypes=("float32", "float64")):
    """Compile every kernel for CPUs now, instead of each at its first use."""
    if _compiled() is not reference:
        _compiled().warmup([np.dtype(d) for d in dtypes])


def config():
    """Return how kernels run here, as a dictionary. Starts, imports and compiles nothing."""
    cpu = sys.modules.get(f"{__name__}.cpu")
    return {
        "backend": _backend.get(),
        "threads": get_num_threads(),
        **(cpu.config() if cpu else {"threading_layer": None, "cache": None}),
    }
