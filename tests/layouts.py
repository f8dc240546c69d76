"""The same numbers in other places of memory: the layouts in which operands may come."""

import numpy as np

import minisparse as ms


def sliced(x):
    """Every second entry of a larger array, with NaN between: who reads past a stride finds out."""
    around = np.full([2 * n + 1 for n in x.shape], np.nan, x.dtype)
    view = around[(..., *[slice(1, None, 2)] * x.ndim)]
    view[...] = x
    return view


def unaligned(x):
    """At an odd address."""
    out = np.ndarray(x.shape, x.dtype, bytearray(x.nbytes + 1), offset=1)
    out[...] = x
    return out


LAYOUTS = {  # of any number of dimensions, none among them
    "C": lambda x: np.array(x, order="C"),
    "Fortran": lambda x: np.array(x, order="F"),
    "sliced": sliced,
    "reversed": lambda x: np.flip(np.flip(x).copy()),
    "read-only": lambda x: np.broadcast_to(x, x.shape),
    "unaligned": unaligned,
}


@ms.primitive
def laid_out(x, *, array):
    """Return an array that holds the numbers of x, as it lies; ms.tensor copies into C order."""
    return array


@laid_out.vjp
def _(g, need):
    return g
