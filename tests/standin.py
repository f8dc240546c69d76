"""An array class that stands in for CuPy's where there is no GPU, and counts what comes back.

It holds a NumPy array and answers as CuPy 14 does, in what matters here: results are always
arrays, of no dimensions too; numbers mix with it, NumPy's arrays do not, but as indices; it does
not become a NumPy array unasked; a NumPy function or keyword that CuPy lacks is a TypeError.
"""

import collections
import contextlib

import numpy as np
from numba import config

from minisparse import kernels
from minisparse.kernels import Plan, cuda, reference

Flags = collections.namedtuple("Flags", "c_contiguous f_contiguous owndata")

COMPARISONS = {"greater", "greater_equal", "less", "less_equal", "equal", "not_equal"}
UFUNCS = COMPARISONS | {
    "absolute", "add", "arctan", "bitwise_and", "bitwise_or", "cos", "divide", "erf", "exp",
    "expit", "expm1", "invert", "isfinite", "isinf", "isnan", "log", "log1p", "logaddexp",
    "logical_and", "logical_not", "logical_or", "logical_xor", "matmul", "maximum", "minimum",
    "multiply", "negative", "power", "sign", "signbit", "sin", "sqrt", "square", "subtract", "tan",
    "tanh",
}  # fmt: skip
LIKE = "dtype order shape"
REDUCTION = "axis dtype out keepdims"
# What CuPy has, with the keywords that it takes there.
FUNCTIONS = {
    "all": "axis out keepdims", "any": "axis out keepdims", "append": "axis",
    "argmax": "axis dtype out keepdims", "argsort": "axis kind", "array2string": "separator prefix",
    "asarray": "dtype order copy", "broadcast_to": "", "clip": "", "concatenate": "axis",
    "count_nonzero": "axis", "einsum": "dtype optimize", "empty": "dtype order", "empty_like": LIKE,
    "expand_dims": "axis", "flatnonzero": "", "full_like": LIKE, "max": "axis out keepdims",
    "may_share_memory": "", "min": "axis out keepdims", "ndim": "", "nonzero": "",
    "ones_like": LIKE, "reshape": "order", "result_type": "", "shape": "", "shares_memory": "",
    "size": "", "squeeze": "axis", "sum": REDUCTION, "transpose": "axes", "where": "",
    "zeros": "dtype order", "zeros_like": LIKE,
}  # fmt: skip


def bare(value):
    """Return the NumPy arrays of what is here, also within sequences and keys."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(bare, value))
    return value._host if isinstance(value, Standin) else value


def on_the_host(value):
    """Tell whether there is a NumPy array among the arguments, where CuPy wants its own."""
    if isinstance(value, (tuple, list)):
        return any(map(on_the_host, value))
    return isinstance(value, np.ndarray)


def wrapped(result, *operands):
    """Return a result as an array here, with the operand that it is a view of as its base."""
    if isinstance(result, (tuple, list)) and on_the_host(result):
        return type(result)(wrapped(r, *operands) for r in result)
    if not isinstance(result, (np.ndarray, np.generic)):
        return result
    result, bases = np.asarray(result), [o for o in operands if isinstance(o, Standin)]
    bases = [o.base if o.base is not None else o for o in bases]
    bases = [o for o in bases if np.may_share_memory(o._host, result)]
    return Standin(result, bases[0] if bases else None)


def method(name):
    def call(self, *args, **kwargs):
        with np.errstate(all="ignore"):
            return wrapped(getattr(self._host, name)(*bare(args), **bare_values(kwargs)), self)

    return call


def bare_values(kwargs):
    return {key: bare(value) for key, value in kwargs.items()}


class Standin(np.lib.mixins.NDArrayOperatorsMixin):
    """See above."""

    __slots__ = ("__weakref__", "_host", "base")
    gets = reads = 0  # arrays, and single numbers, that went to the host
    device = "<CUDA Device 0>"

    def __init__(self, host, base=None):
        assert isinstance(host, np.ndarray)
        self._host, self.base = host, base

    shape = property(lambda self: self._host.shape)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    dtype = property(lambda self: self._host.dtype)
    strides = property(lambda self: self._host.strides)
    nbytes = property(lambda self: self._host.nbytes)
    itemsize = property(lambda self: self._host.itemsize)
    T = property(lambda self: wrapped(self._host.T, self))
    __cuda_array_interface__ = property(lambda self: self._host.__array_interface__)

    @property
    def flags(self):
        flags = self._host.flags
        return Flags(flags.c_contiguous, flags.f_contiguous, self.base is None)

    def get(self):
        Standin.gets += 1
        return self._host.copy()

    def item(self):
        Standin.reads += 1
        return self._host.item()

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def __float__(self):
        return float(self.item())

    def __int__(self):
        return int(self.item())

    def __bool__(self):
        Standin.reads += 1
        return bool(self._host)

    def __len__(self):
        return len(self._host)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __repr__(self):
        return repr(self.get())

    def __copy__(self):
        return self.copy()

    def __deepcopy__(self, memo):
        return self.copy()

    def __reduce__(self):
        return Standin, (self.get(),)

    def astype(self, dtype, order="K", copy=True):
        result = self._host.astype(dtype, order=order, copy=copy)
        return self if result is self._host else Standin(result)

    reshape, ravel, copy, view, transpose, squeeze = map(
        method, ("reshape", "ravel", "copy", "view", "transpose", "squeeze")
    )
    sum, max, min, any, all, round = map(method, ("sum", "max", "min", "any", "all", "round"))

    def fill(self, value):
        self._host.fill(bare(value))

    def __getitem__(self, key):
        return wrapped(self._host[bare(key)], self)

    def __setitem__(self, key, value):
        if on_the_host(value) and value.ndim:
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
        self._host[bare(key)] = bare(value)

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **kwargs):
        if ufunc.__name__ not in UFUNCS:
            return NotImplemented
        if not all(isinstance(x, (Standin, np.ndarray, np.generic, complex, float, int))
                   for x in (*inputs, *out)):  # fmt: skip
            return NotImplemented  # a tuple as the key of .at too
        if ufunc.__name__ in COMPARISONS:
            inputs = [x.item() if isinstance(x, np.ndarray) and x.ndim == 0 else x for x in inputs]
        if on_the_host([x for i, x in enumerate(inputs) if method != "at" or i != 1]):
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
        if method == "reduceat":
            raise TypeError("CuPy's takes differences of running sums, which loses digits")
        if out:
            kwargs["out"] = bare(out)
        with np.errstate(all="ignore"):
            result = getattr(ufunc, method)(*bare(list(inputs)), **kwargs)
        return out[0] if out else wrapped(result, *inputs)

    def __array_function__(self, function, types, args, kwargs):
        name = function.__name__
        unknown = set(kwargs) - set(FUNCTIONS.get(name, "").split())
        if name not in FUNCTIONS or unknown or not set(types) <= {Standin, np.ndarray}:
            return NotImplemented
        if name != "asarray" and on_the_host([*args, *kwargs.values()]):
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
        if name == "array2string":
            return function(args[0].get(), *args[1:], **kwargs)
        if name == "asarray" and isinstance(args[0], Standin) and not kwargs:
            return args[0]
        if name.endswith("_like") and not kwargs.get("shape", True):
            del kwargs["shape"]  # CuPy takes () and 0 for none given
        with np.errstate(all="ignore"):
            result = function(*bare(args), **bare_values(kwargs))
        # Not a view of what was the caller's: the way to the device is a copy.
        return wrapped(result.copy() if name == "asarray" else result, *flat(args))


def flat(values):
    """Yield what is in nested sequences."""
    for value in values:
        yield from flat(value) if isinstance(value, (tuple, list)) else (value,)


class _Kernels:
    """Kernels on the arrays of this class, those of the reference or, simulated, of CUDA."""

    def __getattr__(self, name):
        kernel = getattr(cuda if config.ENABLE_CUDASIM else reference, name)

        def run(*args, **kwargs):
            for a in (*args, *kwargs.values()):
                if isinstance(a, np.ndarray) and a.dtype.kind == "f":
                    raise TypeError(f"{name}: a NumPy array of numbers among those on the GPU")
                assert isinstance(a, (Standin, np.ndarray, Plan, float, int, type(None)))
            return wrapped(kernel(*bare(args), **bare_values(kwargs)))

        return run

    def add_at(self, out, key, x):
        np.add.at(out._host, bare(key), bare(x))

    def contiguous(self, x):
        return x if x._host.flags.c_contiguous else x.copy()


@contextlib.contextmanager
def device(monkeypatch):
    """Let "cuda" stand for arrays of this class; yield the class, its counts at 0."""
    moved, choose, run = kernels.moved, kernels._kernels, _Kernels()

    def to(array, where):
        goes = isinstance(array, np.ndarray) and where == "cuda"
        return Standin(array.copy()) if goes else moved(array, where)

    monkeypatch.setattr(kernels, "moved", to)
    monkeypatch.setattr(kernels, "_kernels", lambda a: run if isinstance(a, Standin) else choose(a))
    Standin.gets = Standin.reads = 0
    yield Standin
