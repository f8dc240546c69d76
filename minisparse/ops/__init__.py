"""The dense operations, and what makes a Tensor speak Python's operators and NumPy's protocol."""

from __future__ import annotations

import copy
import functools
import inspect

import numpy as np

from ..engine import Tensor, as_dtype, is_grad_enabled, raw, tensor
from . import elementwise, products, reductions, shapes
from .elementwise import *
from .products import *
from .reductions import *
from .shapes import *
from .shapes import astype

__all__ = [*elementwise.__all__, *products.__all__, *reductions.__all__, *shapes.__all__]

# ------------------------------------------------------------------------------------ operators


def bind_operator(name, function):
    """Bind ``x op y`` and ``y op x`` on Tensors to a function of two operands."""
    setattr(Tensor, f"__{name}__", function)
    setattr(Tensor, f"__r{name}__", lambda self, other: function(other, self))

    def inplace(self, other):
        if is_grad_enabled():
            if self._requires_grad and self._node is None:
                raise RuntimeError(
                    "a leaf that requires grad is changed in place only under `with ms.no_grad():`"
                )
            return function(self, other)
        self.data = function(self.detach(), other)
        return self

    setattr(Tensor, f"__i{name}__", inplace)


for _name, _function in (
    ("add", elementwise.add),
    ("sub", elementwise.subtract),
    ("mul", elementwise.multiply),
    ("truediv", elementwise.divide),
    ("pow", elementwise.power),
    ("matmul", products.matmul),
):
    bind_operator(_name, _function)


def _compare(ufunc):
    return lambda self, other: ufunc(self._array, raw(other))


def _setitem(self, key, value):
    if is_grad_enabled():
        raise RuntimeError(
            "t[...] = a changes a Tensor in place, only under `with ms.no_grad():`; "
            "ms.where and ms.index_add are the differentiable ways"
        )
    self._overwrite(key, value)


def _float(self):
    if self.size != 1:
        raise TypeError(f"only a Tensor of one element becomes a number, not shape {self.shape}")
    return self.item()


def _len(self):
    if not self.shape:
        raise TypeError("len() of a Tensor of shape ()")
    return self.shape[0]


def _repr(self):
    text = np.array2string(self._array, separator=", ", prefix="tensor(")
    extra = "" if self.dtype == np.float64 else f", dtype={self.dtype}"
    if self._node is not None:
        extra += f", op={self._node.op.name}"
    elif self.requires_grad:
        extra += ", requires_grad=True"
    return f"tensor({text}{extra})"


def _format(self, spec):
    return format(self.item(), spec) if spec and self.size == 1 else format(repr(self), spec)


def _array(self, dtype=None, copy=None):
    if self.requires_grad:
        raise TypeError(
            "a Tensor that requires grad does not become an array, since its gradient would be "
            "lost: use t.numpy() for the numbers, ms.matmul(A, t) or ms.multiply(A, t) to combine "
            "it with a SciPy matrix or an array, ms.stack to join a list of Tensors"
        )
    return np.array(self.data, dtype=dtype, copy=copy)


def _item(self):
    """Return the only element as a Python float; ValueError if there is not just one."""
    return self._array.item()


def _numpy(self):
    """Return the numbers as a read-only NumPy view that is not differentiated."""
    return self.data


def _reduce(self):
    if self._node is not None:
        op = self._node.op.name
        raise TypeError(f"the result of {op} is neither pickled nor copied: use .detach()")
    make = functools.partial(tensor, requires_grad=self.requires_grad)
    return make, (self._array,), self._grad


def _set_grad(self, grad):
    self._grad = copy.copy(grad)


def _iterate(self):
    return (self[i] for i in range(len(self)))


def _astype(self, dtype):
    """Return it in float32 or float64; the gradient comes back in this dtype."""
    return astype(self, dtype=as_dtype(dtype))


def _reshape(self, *shape):
    """Give it another shape of the same size: ``t.reshape(2, 3)`` or ``t.reshape((2, 3))``."""
    return reshape(self, shape=shape[0] if len(shape) == 1 else shape)


def _transpose(self, *axes):
    """Permute the axes: ``t.transpose()``, ``t.transpose(1, 0)`` or ``t.transpose((1, 0))``."""
    return transpose(self, axes=(axes[0] if len(axes) == 1 else axes) or None)


def _method(function):
    @functools.wraps(function)
    def method(self, *args, **kwargs):
        return function(self, *args, **kwargs)

    return method


for _name, _value in {
    "item": _item,
    "numpy": _numpy,
    "__reduce__": _reduce,
    "__setstate__": _set_grad,
    "__float__": _float,
    "__int__": lambda self: int(_float(self)),
    "__bool__": lambda self: bool(self._array),
    "__len__": _len,
    "__repr__": _repr,
    "__format__": _format,
    "__array__": _array,
    "__neg__": lambda self: negative(self),
    "__pos__": lambda self: self,
    "__abs__": lambda self: absolute(self),
    "__getitem__": lambda self, key: shapes.select_items(self, key),
    "__setitem__": _setitem,
    "__iter__": _iterate,
    "__lt__": _compare(np.less),
    "__le__": _compare(np.less_equal),
    "__gt__": _compare(np.greater),
    "__ge__": _compare(np.greater_equal),
    "__eq__": _compare(np.equal),
    "__ne__": _compare(np.not_equal),
    "T": property(lambda self: transpose(self)),
    "astype": _astype,
    "reshape": _reshape,
    "transpose": _transpose,
    **{
        function.__name__: _method(function)
        for function in (sum, mean, var, std, max, min, clip, ravel, squeeze, dot, take)
    },
}.items():
    setattr(Tensor, _name, _value)

# ----------------------------------------------------------------------------- NumPy's protocol

_RECORDED = {
    getattr(np, name): globals()[name]
    for name in (set(__all__) & set(dir(np)))
} | {
    np.linalg.norm: reductions.norm, np.amax: reductions.max, np.amin: reductions.min,
    np.float_power: elementwise.power, np.positive: lambda x: x,
}  # fmt: skip

_PLAIN = {
    np.isfinite, np.isnan, np.isinf, np.signbit, np.less, np.less_equal, np.greater,
    np.greater_equal, np.equal, np.not_equal, np.logical_and, np.logical_or, np.logical_not,
    np.logical_xor, np.argmax, np.argmin, np.argsort, np.argwhere, np.argpartition, np.shape,
    np.ndim, np.size, np.nonzero, np.flatnonzero, np.count_nonzero, np.any, np.all, np.allclose,
    np.isclose, np.array_equal, np.array_equiv, np.searchsorted, np.digitize, np.shares_memory,
    np.may_share_memory, np.iscomplexobj, np.isrealobj, np.iscomplex, np.isreal, np.isneginf,
    np.isposinf, np.result_type, np.can_cast, np.array2string, np.array_repr, np.array_str,
    np.nanargmax, np.nanargmin,
}  # fmt: skip


def _plain(value):
    """Replace the Tensors in a call's arguments by their numbers."""
    if isinstance(value, Tensor):
        return value.data
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(v) for v in value)
    return value


def _refuse(function, why="has no gradient rule"):
    name = getattr(function, "__name__", function)
    return TypeError(
        f"numpy.{name} {why} here: use t.numpy() for the plain numbers, and ms.matmul(A, t) or "
        "ms.multiply(A, t) to combine a Tensor with a SciPy matrix"
    )


def _array_ufunc(self, ufunc, method, *inputs, **kwargs):
    if method == "__call__":
        if ufunc in _PLAIN:
            return ufunc(*_plain(inputs), **kwargs)
        if kwargs:
            raise _refuse(ufunc, f"with {', '.join(kwargs)}= would lose the gradient, so it is out")
        if ufunc in _RECORDED:
            return _RECORDED[ufunc](*inputs)
    raise _refuse(ufunc if method == "__call__" else f"{ufunc.__name__}.{method}")


@functools.cache
def _defaults(function):
    """Return the parameters of a NumPy function and their defaults; none where it does not say."""
    try:
        return {p.name: p.default for p in inspect.signature(function).parameters.values()}
    except ValueError:
        return {}


def _array_function(self, function, types, args, kwargs):
    if function in _PLAIN:
        return function(*_plain(args), **{name: _plain(v) for name, v in kwargs.items()})
    if function not in _RECORDED:
        raise _refuse(function)
    # NumPy's order of optional parameters is not always ours: pass them by name.
    defaults, own = _defaults(function), _RECORDED[function]
    names = list(defaults)
    first = 2 if function in (np.dot, np.where) else 1
    for name, value in zip(names[first:], args[first:], strict=False):
        kwargs = {**kwargs, name: value}
    if names:
        args = args[:first] or (kwargs.pop(names[0]),)
    known = inspect.signature(own).parameters
    unknown = {k for k, v in kwargs.items() if k not in known and v is not defaults.get(k, _refuse)}
    if unknown:
        raise _refuse(function, f"with {', '.join(sorted(unknown))}= has no gradient rule")
    return own(*args, **{k: v for k, v in kwargs.items() if k in known})


Tensor.__array_ufunc__ = _array_ufunc  # type: ignore[attr-defined]
Tensor.__array_function__ = _array_function  # type: ignore[attr-defined]
