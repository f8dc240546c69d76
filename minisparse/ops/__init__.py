"""The dense operations, and what makes a Tensor speak Python's operators and NumPy's protocol."""

import copy
import functools
import inspect

import numpy as np

from .. import kernels
from ..engine import Tensor, as_dtype, is_grad_enabled, raw, require, tensor
from . import elementwise, products, reductions, shapes
from .elementwise import *
from .products import *
from .reductions import *
from .shapes import *
from .shapes import astype, to

__all__ = [*elementwise.__all__, *products.__all__, *reductions.__all__, *shapes.__all__]

# ----------------------------------------------------------------------------- NumPy's protocol

_RECORDED = {getattr(np, name): globals()[name] for name in set(__all__) & set(dir(np))} | {
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
        return value._array
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(v) for v in value)
    return value


def _refuse(function, why="has no gradient rule"):
    name = getattr(function, "__name__", function)
    return TypeError(
        f"numpy.{name} {why} here: use t.numpy() for the plain numbers, and ms.matmul(A, t) or "
        "ms.multiply(A, t) to combine a Tensor with a SciPy matrix"
    )


@functools.cache
def _defaults(function):
    """Return the parameters of a function and their defaults; none where NumPy does not say."""
    try:
        return {p.name: p.default for p in inspect.signature(function).parameters.values()}
    except ValueError:
        return {}


# ------------------------------------------------------------------------------------ operators


def _compare(ufunc):
    return lambda self, other: ufunc(self._array, raw(other))


class _Members:
    """What a Tensor answers to Python's operators and built-ins and to NumPy; bound to it below."""

    T = property(lambda self: transpose(self), doc="The axes in reverse order.")
    device = property(lambda self: kernels.device_of(self._array), doc='"cpu" or "cuda".')
    sum, mean, var, std, max, min = sum, mean, var, std, max, min
    clip, ravel, squeeze, dot, take = clip, ravel, squeeze, dot, take
    __neg__, __abs__, __getitem__, __hash__ = negative, absolute, getitem, object.__hash__
    __lt__, __le__, __eq__ = map(_compare, (np.less, np.less_equal, np.equal))
    __gt__, __ge__, __ne__ = map(_compare, (np.greater, np.greater_equal, np.not_equal))

    def item(self):
        """Return the only element as a Python float; ValueError if there is not just one."""
        return self._array.item()

    def numpy(self):
        """Return the numbers as a read-only NumPy view that is not differentiated."""
        if self.device != "cpu":
            raise TypeError(f'a Tensor on {self.device} is no NumPy array: use .to("cpu") first')
        return self.data

    def to(self, device):
        """Return it on "cpu" or "cuda", itself where it is there; its gradient comes back."""
        return self if self.device == device else to(self, device=device, back=self.device)

    def astype(self, dtype):
        """Return it in float32 or float64; the gradient comes back in this dtype."""
        return astype(self, dtype=as_dtype(dtype))

    def reshape(self, *shape):
        """Give it another shape of the same size: ``t.reshape(2, 3)`` or ``t.reshape((2, 3))``."""
        return reshape(self, shape=shape[0] if len(shape) == 1 else shape)

    def transpose(self, *axes):
        """Permute the axes: ``t.transpose()``, ``t.transpose(1, 0)`` or ``t.transpose((1, 0))``."""
        return transpose(self, axes=(axes[0] if len(axes) == 1 else axes) or None)

    def __pos__(self):
        return self

    def __float__(self):
        if self.size != 1:
            raise TypeError(f"only one element becomes a number, not a Tensor of {self.shape}")
        return self.item()

    def __int__(self):
        return int(float(self))

    def __bool__(self):
        return bool(self._array)

    def __len__(self):
        require(self.shape, "len() of a Tensor of shape ()", TypeError)
        return self.shape[0]

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __setitem__(self, key, value):
        if is_grad_enabled():
            raise RuntimeError(
                "t[...] = a changes a Tensor in place, only under `with ms.no_grad():`; "
                "ms.where and ms.index_add are the differentiable ways"
            )
        self._overwrite(key, value)

    def __repr__(self):
        text = np.array2string(self._array, separator=", ", prefix="tensor(")
        extra = "" if self.dtype == np.float64 else f", dtype={self.dtype}"
        if self._node is not None:
            extra += f", op={self._node.op.name}"
        elif self.requires_grad:
            extra += ", requires_grad=True"
        return f"tensor({text}{extra})"

    def __format__(self, spec):
        return format(self.item(), spec) if spec and self.size == 1 else format(repr(self), spec)

    def __reduce__(self):
        if self._node is not None:
            op = self._node.op.name
            raise TypeError(f"the result of {op} is neither pickled nor copied: use .detach()")
        make = functools.partial(tensor, requires_grad=self.requires_grad)
        return make, (self._array,), self._grad

    def __setstate__(self, grad):
        self._grad = copy.copy(grad)

    def __array__(self, dtype=None, copy=None):
        if self.requires_grad:
            raise TypeError(
                "a Tensor that requires grad does not become an array, since its gradient would be "
                "lost: use t.numpy() for the numbers, ms.matmul(A, t) or ms.multiply(A, t) to "
                "combine it with a SciPy matrix or an array, ms.stack to join a list of Tensors"
            )
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        if method != "__call__":
            raise _refuse(f"{ufunc.__name__}.{method}")
        if ufunc in _PLAIN:
            return ufunc(*_plain(inputs), **kwargs)
        if kwargs:
            raise _refuse(ufunc, f"with {', '.join(kwargs)}= would lose the gradient, so it is out")
        if ufunc not in _RECORDED:
            raise _refuse(ufunc)
        return _RECORDED[ufunc](*inputs)

    def __array_function__(self, function, types, args, kwargs):
        if function in _PLAIN:
            return function(*_plain(args), **{name: _plain(v) for name, v in kwargs.items()})
        if function not in _RECORDED:
            raise _refuse(function)
        # NumPy's order of optional parameters is not always ours: pass them by name.
        defaults, own = _defaults(function), _RECORDED[function]
        first = 2 if function in (np.dot, np.where) else 1
        if defaults:
            kwargs = {**dict(zip(list(defaults)[first:], args[first:], strict=False)), **kwargs}
            args = args[:first] or (kwargs.pop(next(iter(defaults))),)
        known = _defaults(own)
        given = {k: v for k, v in kwargs.items() if k in known or v is not defaults.get(k, _refuse)}
        if set(given) - set(known):
            raise _refuse(function, f"with {', '.join(given)}= has no gradient rule")
        return own(*args, **given)


for _name, _member in vars(_Members).items():
    if _name not in ("__module__", "__dict__", "__weakref__", "__doc__"):
        setattr(Tensor, _name, _member)


def bind_operator(name, function):
    """Bind ``x op y`` and ``y op x`` on Tensors to a function of two operands."""

    def inplace(self, other):
        if not is_grad_enabled():
            self.data = function(self.detach(), other)
            return self
        if self._requires_grad and self._node is None:
            raise RuntimeError("a leaf that requires grad changes only under `with ms.no_grad():`")
        return function(self, other)

    setattr(Tensor, f"__{name}__", function)
    setattr(Tensor, f"__r{name}__", lambda self, other: function(other, self))
    setattr(Tensor, f"__i{name}__", inplace)


# `@` and `*` take sparse operands too, and are bound where those are defined.
for _name, _function in {"add": add, "sub": subtract, "truediv": divide, "pow": power}.items():
    bind_operator(_name, _function)
