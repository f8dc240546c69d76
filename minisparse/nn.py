"""Layers, losses and mini-batches."""

import math

import numpy as np

from . import kernels, ops
from .engine import Tensor, as_dtype, as_floats, primitive, raw, require, tensor
from .ops.shapes import RowGrad, indices_of, lookup
from .pattern import Pattern, PatternMismatchError
from .sparse import SparseParameter, SparseTensor, affine, matmul

# ---------------------------------------------------------------------------------------- modules


class Module:
    """Base of layers and models: finds the parameters among its attributes.

    A parameter is a leaf Tensor that requires grad, or a SparseParameter; it may be an attribute,
    or stand in lists, tuples, dicts, modules and sparse tensors that are attributes.  Subclasses
    define ``forward``; call the module itself.

    Examples
    --------
    >>> import minisparse as ms
    >>> class Scale(ms.nn.Module):
    ...     def __init__(self):
    ...         self.factor = ms.tensor(2.0, requires_grad=True)
    ...     def forward(self, x):
    ...         return x * self.factor
    >>> Scale()([1.0, 2.0])
    tensor([2., 4.], op=multiply)
    """

    training = True

    def forward(self, *args, **kwargs):
        """Compute the module's output; subclasses say how."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

    def _members(self):
        return vars(self).items()

    def _walk(self):
        """Yield (name, thing) for every module and parameter below, each once, in a fixed order."""
        seen: set[int] = set()
        stack: list[tuple[str, object]] = [("", self)]
        while stack:
            name, thing = stack.pop()
            if id(thing) not in seen:
                seen.add(id(thing))
                yield name, thing
                prefix = f"{name}." if name else ""
                stack += [(f"{prefix}{key}", part) for key, part in _parts(thing)][::-1]

    def named_parameters(self):
        """Yield (dotted name, Tensor or SparseParameter), each parameter once.

        Raises
        ------
        ValueError
            If two have one name, as the keys 1 and "1" of a dict give.
        """
        found: dict = {}  # by the leaf; what is met alone and in its SparseParameter is the latter
        for name, thing in self._walk():
            trained = isinstance(thing, Tensor) and thing.requires_grad and thing._node is None
            if isinstance(thing, SparseParameter) or (trained and id(thing) not in found):
                known = found.get(id(_leaf(thing)))
                if known is None or isinstance(known[1], Tensor):
                    found[id(_leaf(thing))] = name, thing
        names = [name for name, _ in found.values()]
        if len(set(names)) < len(names):
            raise ValueError(f"{type(self).__name__}: two parameters have one name among {names}")
        yield from found.values()

    def parameters(self) -> list:
        """Return the parameters, each once."""
        return [p for _, p in self.named_parameters()]

    def zero_grad(self):
        """Set every parameter's gradient to None."""
        for p in self.parameters():
            p.grad = None

    def train(self, mode=True):
        """Put this module and those below into training mode; return it."""
        for _, thing in self._walk():
            if isinstance(thing, Module):
                thing.training = mode
        return self

    def eval(self):
        """Put this module and those below into evaluation mode; return it."""
        return self.train(False)

    def to(self, device):
        """Bring every Tensor below, with its gradient, to "cpu" or "cuda" in place; return self.

        Random numbers are drawn on the CPU and then moved: the same ones everywhere.
        """
        for _, t in self._walk():
            if isinstance(t, SparseParameter):
                t._base = kernels.moved(t._base, device)
            elif isinstance(t, Tensor):
                g, t._array = t._grad, kernels.moved(t._array, device)
                t._grad = g.to(device) if isinstance(g, RowGrad) else kernels.moved(g, device)
                t._version[0] += 1
        return self

    def state_dict(self) -> dict:
        """Return a copy of all parameters and of the state of random generators, by name.

        A Tensor gives an array, a SparseParameter a dict of its pattern, its free weights and, if
        it has any, its ties (which free weight each entry is, -1 if none) and constants; a
        generator (that of a Dropout) the nested dict that NumPy gives.
        """
        return {name: _state(p) for name, p in self._stateful()}

    def _stateful(self):
        """Yield (name, thing) for every parameter and random generator."""
        yield from self.named_parameters()
        for name, thing in self._walk():
            if isinstance(thing, np.random.Generator):
                yield name, thing

    def load_state_dict(self, state):
        """Copy the numbers of :meth:`state_dict` into this module's parameters.

        Raises
        ------
        ValueError
            If names, shapes, ties or constants differ; PatternMismatchError if a pattern does.
            Nothing has changed then.
        """
        own = dict(self._stateful())
        if not isinstance(state, dict):
            raise ValueError(f"load_state_dict: needs a dict, not {type(state).__name__}")
        if set(own) != set(state):
            sides = f"missing {sorted(set(own) - set(state))}, unknown {[*(set(state) - set(own))]}"
            raise ValueError(f"load_state_dict: names differ: {sides}")
        checked: list = []  # (thing, attribute, what it is to be)
        for name, p in own.items():
            what, mine, given = f"load_state_dict: {name}", _state(p), state[name]
            if isinstance(p, np.random.Generator):
                try:
                    type(p.bit_generator)().state = given  # checks it
                except (TypeError, ValueError, KeyError) as error:
                    raise ValueError(f"{what} is no state of a {mine['bit_generator']}") from error
                checked.append((p.bit_generator, "state", given))
                continue
            if isinstance(p, SparseParameter):
                if not isinstance(given, dict) or set(given) != set(mine):
                    raise ValueError(f"{what} needs {sorted(mine)}")
                if p.pattern != (other := given["pattern"]):
                    both = [f"{q!r} {getattr(q, 'digest', '')[:8]}" for q in (p.pattern, other)]
                    raise PatternMismatchError(f"{what} has another pattern: {' and '.join(both)}")
                for key in set(mine) - {"pattern", "free"}:
                    if not np.array_equal(given[key], mine[key], equal_nan=True):
                        raise ValueError(f"{what} has other {key}")
                mine, given = mine["free"], given["free"]
            array = np.asarray(given)
            if array.shape != mine.shape or array.dtype.kind != "f":
                raise ValueError(f"{what} has shape {mine.shape}, not {array.dtype} {array.shape}")
            checked.append((_leaf(p), "data", array))
        for thing, attribute, value in checked:
            setattr(thing, attribute, value)


def _leaf(thing):
    """Return the Tensor that a SparseParameter trains, and anything else as it is."""
    return thing.free if isinstance(thing, SparseParameter) else thing


def _parts(thing):
    """Return the (name, part) pairs of a module, a container or a sparse tensor."""
    if isinstance(thing, Module):
        return thing._members()
    if isinstance(thing, dict):
        return thing.items()
    if isinstance(thing, SparseTensor):  # a parameter's free weights have been met with it
        return [(key.strip("_"), part) for key, part in vars(thing).items()]
    return enumerate(thing) if isinstance(thing, (list, tuple)) else ()


def _state(p):
    if isinstance(p, np.random.Generator):
        return p.bit_generator.state
    numbers = kernels.moved(_leaf(p)._array, "cpu").copy()
    if isinstance(p, Tensor):
        return numbers
    state = {"pattern": p.pattern, "free": numbers}
    if p._index_map is not None:
        state["ties"] = np.array(p._index_map.index)
    if p._base is not None:
        state["constants"] = kernels.moved(p._base, "cpu")[p._index_map.index < 0]
    return state


# ------------------------------------------------------------------------------------------ layers


def kaiming_uniform(weight, *, gain=2**0.5, rng=None):
    """Fill a weight uniformly within ``± gain · sqrt(3 / fan_in)``, fan_in taken row by row.

    Parameters
    ----------
    weight : SparseParameter, or Tensor of shape (out, in)
        The free weights of a SparseParameter are filled; a tied one goes by its first entry's row.
    gain : float
        sqrt(2) keeps the variance through ReLU.
    rng : None, int or numpy.random.Generator

    References
    ----------
    He, Zhang, Ren and Sun, Delving deep into rectifiers, arXiv:1502.01852.
    """
    draws = np.random.default_rng(rng).uniform(-1, 1, _leaf(weight).shape)
    _leaf(weight).data = gain / np.sqrt(_fan_in(weight)) * math.sqrt(3) * draws


def kaiming_normal(weight, *, gain=2**0.5, rng=None):
    """Fill a weight from a normal distribution of deviation ``gain / sqrt(fan_in)``, row by row.

    Parameters and reference as for :func:`kaiming_uniform`.
    """
    draws = np.random.default_rng(rng).normal(size=_leaf(weight).shape)
    _leaf(weight).data = gain / np.sqrt(_fan_in(weight)) * draws


def _fan_in(weight):
    """Return the number of entries in the row of each number of the leaf, at least 1."""
    if isinstance(weight, Tensor):
        return max(weight.shape[1], 1)
    rows = weight.pattern.rows
    if weight._index_map is not None:
        indptr, order = weight._index_map.segments
        rows = rows[order[indptr[:-1]]]
    return weight.pattern.fan_in[rows]


class _Affine(Module):
    """``y = x Wᵀ + b``, whatever the weight is."""

    def _start(self, weight, fan_in, bias, rng):
        self.weight, self.bias = weight, None
        if bias:
            bound = 1 / np.sqrt(np.maximum(fan_in, 1))
            start = rng.uniform(-bound, bound, weight.shape[0])
            self.bias = tensor(start, requires_grad=True, dtype=weight.dtype)

    def forward(self, x):
        if np.shape(x)[-1:] != self.weight.shape[1:]:
            shape, n = np.shape(x), self.weight.shape[1]
            raise ValueError(f"{type(self).__name__}: x of shape {shape} needs {n} features last")
        y = matmul(x, self.weight.T)
        return y if self.bias is None else y + self.bias


class Linear(_Affine):
    """``y = x Wᵀ + b`` with a dense weight.

    Parameters
    ----------
    in_features, out_features : int
    bias : bool
    dtype : float32 or float64
    rng : None, int or numpy.random.Generator
        Weight and bias start uniformly within ``± 1 / sqrt(in_features)``.

    Attributes
    ----------
    weight : Tensor of shape (out_features, in_features)
    bias : Tensor of shape (out_features,) or None
    """

    def __init__(self, in_features, out_features, *, bias=True, dtype=np.float32, rng=None):
        rng = np.random.default_rng(rng)
        weight = tensor(np.zeros((out_features, in_features)), requires_grad=True, dtype=dtype)
        kaiming_uniform(weight, gain=math.sqrt(1 / 3), rng=rng)
        self._start(weight, in_features, bias, rng)


class SparseLinear(_Affine):
    """``y = x Wᵀ + b`` with a weight that exists only on a pattern.

    Parameters
    ----------
    in_features, out_features : int
    pattern : Pattern of shape (out_features, in_features), optional
    density : float, optional
        Draw a random pattern with this fraction of entries.
    fan_in : int, optional
        Draw a random pattern with so many entries in each row.
    weight : SparseParameter of shape (out_features, in_features), optional
        Used as it is (frozen, tied, anything); the bias takes its dtype.
    bias : bool
    dtype : float32 or float64
    rng : None, int or numpy.random.Generator
        For the pattern, and the start within ``± 1 / sqrt(fan_in of the row)``.

    Attributes
    ----------
    weight : SparseParameter of shape (out_features, in_features)
    bias : Tensor of shape (out_features,) or None

    Raises
    ------
    ValueError
        Unless exactly one of pattern, density, fan_in and weight is given, of the right shape.

    Notes
    -----
    Inputs are (..., in_features).  The output is held feature-major: its transpose is in C order,
    so a chain of such layers copies nothing.

    Examples
    --------
    >>> import numpy as np
    >>> import minisparse as ms
    >>> layer = ms.nn.SparseLinear(1000, 500, fan_in=10, rng=0)
    >>> layer.weight.nnz
    5000
    >>> layer(np.ones((4, 1000))).shape
    (4, 500)
    """

    def __init__(
        self, in_features, out_features, *, pattern=None, density=None, fan_in=None, weight=None,
        bias=True, dtype=np.float32, rng=None,
    ):  # fmt: skip
        if not isinstance(pattern, (Pattern, type(None))):
            raise TypeError(f"SparseLinear: pattern is a {type(pattern).__name__}, not a Pattern")
        if sum(a is not None for a in (pattern, density, fan_in, weight)) != 1:
            raise ValueError("SparseLinear: give one of pattern, density, fan_in, weight")
        rng, shape = np.random.default_rng(rng), (out_features, in_features)
        if weight is None:
            if pattern is None:
                pattern = Pattern.random(shape, density=density, fan_in=fan_in, rng=rng)
            weight = SparseParameter((pattern, np.zeros(pattern.nnz)), dtype=dtype)
            kaiming_uniform(weight, gain=math.sqrt(1 / 3), rng=rng)
        elif not isinstance(weight, SparseParameter):
            raise TypeError(f"SparseLinear: weight is a {type(weight).__name__}")
        require(weight.shape == shape, f"SparseLinear: a pattern of {weight.shape} for {shape}")
        self._start(weight, weight.pattern.fan_in, bias, rng)

    def forward(self, x, *, relu=False):
        """Compute the output for `x`, or for its ReLU.

        The ReLU costs next to nothing where there is a bias and x has one or two axes.
        """
        w = self.weight
        suits = isinstance(w, SparseTensor) and self.bias is not None and np.ndim(x) < 3
        if not suits or np.shape(x)[-1:] != w.shape[1:]:
            return super().forward(ops.relu(x) if relu else x)
        return affine(w.values, x, self.bias, pattern=w.pattern, relu=relu)

    @classmethod
    def from_linear(cls, linear, *, keep):
        """Keep the weights of largest magnitude of a :class:`Linear`: a count or a fraction."""
        weight = SparseParameter.prune(linear.weight.data, keep=keep)
        self = cls(*weight.shape[::-1], weight=weight, bias=False)
        if linear.bias is not None:
            self.bias = tensor(linear.bias.data, requires_grad=True)
        return self


class Sequential(Module):
    """Apply modules (or plain functions) one after the other.

    A :class:`ReLU` before a :class:`SparseLinear` with a bias becomes part of its product: the same
    numbers in less time.

    Examples
    --------
    >>> import minisparse as ms
    >>> net = ms.nn.Sequential(ms.nn.Linear(3, 2, rng=0), ms.nn.ReLU())
    >>> [name for name, _ in net.named_parameters()]
    ['0.weight', '0.bias']
    """

    def __init__(self, *modules):
        if not all(map(callable, modules)):
            raise TypeError("Sequential: takes modules and functions one by one, not in a list")
        self.modules = list(modules)

    def _members(self):
        return [*enumerate(self.modules), *vars(self).items()]

    def __getitem__(self, i):
        return self.modules[i]

    def __setitem__(self, i, module):
        self.modules[i] = module

    def __len__(self):
        return len(self.modules)

    def forward(self, x):
        relu = False
        for module, after in zip(self.modules, [*self.modules[1:], None], strict=False):
            if _is_plain(module, ReLU) and _is_plain(after, SparseLinear):
                relu = True  # the layer takes it in
            else:
                x, relu = module(x, relu=True) if relu else module(x), False
        return x


def _is_plain(module, kind):
    return type(module) is kind and "forward" not in vars(module)


class ReLU(Module):
    """``max(x, 0)`` as a module."""

    forward = staticmethod(ops.relu)


class GELU(Module):
    """``x Φ(x)``, in the erf form, as a module."""

    forward = staticmethod(ops.gelu)


class Tanh(Module):
    """The hyperbolic tangent as a module."""

    forward = staticmethod(ops.tanh)


class Sigmoid(Module):
    """``1 / (1 + exp(-x))`` as a module."""

    forward = staticmethod(ops.sigmoid)


class Dropout(Module):
    """In training, set each number to 0 with probability `p` and scale the others by 1 / (1 - p).

    Parameters
    ----------
    p : float in [0, 1]
    rng : None, int or numpy.random.Generator
        Its state belongs to ``state_dict()``, so that training can go on where it stopped.

    References
    ----------
    Srivastava, Hinton, Krizhevsky, Sutskever and Salakhutdinov, Dropout, JMLR 15, 2014.
    """

    def __init__(self, p=0.5, *, rng=None):
        require(0 <= p <= 1, f"Dropout: p={p} is no probability")
        self.p, self.rng = p, np.random.default_rng(rng)

    def forward(self, x):
        if not self.training or self.p == 0:
            return x
        x = x if isinstance(x, Tensor) else as_floats(x)
        mask = np.empty_like(raw(x))  # in the memory order of x
        mask[...] = np.asarray(self.rng.random(x.shape, dtype=np.float32) >= self.p, like=mask)
        return ops.multiply(x, mask / max(1 - self.p, np.finfo(mask.dtype).tiny))


class LayerNorm(Module):
    """``(x - mean) / sqrt(variance + eps) · weight + bias`` over the features, the last axis.

    Parameters
    ----------
    features : int
    eps : float
    dtype : float32 or float64

    Attributes
    ----------
    weight, bias : Tensor of shape (features,)
        Ones and zeros at the start.

    References
    ----------
    Ba, Kiros and Hinton, Layer normalization, arXiv:1607.06450.
    """

    def __init__(self, features, *, eps=1e-5, dtype=np.float32):
        self.eps = eps
        self.weight = tensor(np.ones(features), requires_grad=True, dtype=dtype)
        self.bias = tensor(np.zeros(features), requires_grad=True, dtype=dtype)

    def forward(self, x):
        if np.shape(x)[-1:] != self.weight.shape:
            raise ValueError(f"LayerNorm: x of shape {np.shape(x)} needs {self.weight.size} last")
        centred = ops.subtract(x, ops.mean(x, axis=-1, keepdims=True))
        variance = ops.mean(centred * centred, axis=-1, keepdims=True)
        return centred / ops.sqrt(variance + self.eps) * self.weight + self.bias


class Embedding(Module):
    """Look up rows of a table: ids of shape (...) give vectors of shape (..., d).

    Parameters
    ----------
    n, d : int
        Rows and columns of the table.
    sparse : bool
        The table's ``.grad`` is then a :class:`minisparse.RowGrad`, and the optimizers update only
        the rows that were looked up: backward and step cost what was touched, not the table.
    dtype : float32 or float64
    rng : None, int or numpy.random.Generator
        The table starts from a standard normal distribution.

    Attributes
    ----------
    weight : Tensor of shape (n, d)

    Examples
    --------
    >>> import minisparse as ms
    >>> table = ms.nn.Embedding(1000, 2, sparse=True, rng=0)
    >>> table([[3, 5, 3]]).sum().backward()
    >>> table.weight.grad
    RowGrad(rows=2, shape=(1000, 2), dtype=float32)
    """

    def __init__(self, n, d, *, sparse=False, dtype=np.float32, rng=None):
        start = np.random.default_rng(rng).standard_normal((n, d), dtype=as_dtype(dtype))
        self.weight, self.sparse = Tensor(start, True), sparse

    def forward(self, ids):
        """Return the rows of the table.

        Raises
        ------
        IndexError
            If an id is out of range; negative ones are.
        TypeError
            If ids are not integers.
        """
        ids = indices_of(ids, "Embedding: ids", self.weight.shape[0])
        return lookup(self.weight, ids=ids, sparse=self.sparse)


# ------------------------------------------------------------------------------------------ losses


_REDUCTIONS = {"mean": ops.mean, "sum": ops.sum, "none": lambda losses: losses}


def _reduced(losses, reduction):
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is none of {list(_REDUCTIONS)}")
    return _REDUCTIONS[reduction](losses)


def mse_loss(prediction, target, *, reduction="mean"):
    """Return the mean of ``(prediction - target) ** 2``.

    Parameters
    ----------
    prediction, target : Tensor or array_like of one shape
    reduction : {"mean", "sum", "none"}

    Raises
    ------
    ValueError
        If the shapes differ: they are not broadcast.
    """
    shape, other = np.shape(prediction), np.shape(target)
    require(shape == other, f"mse_loss: prediction of shape {shape}, target {other}")
    return _reduced(ops.square(ops.subtract(prediction, target)), reduction)


def bce_with_logits(logits, targets, *, reduction="mean"):
    """Return the mean of ``-t log σ(x) - (1 - t) log(1 - σ(x))``; never overflows.

    Parameters
    ----------
    logits, targets : Tensor or array_like of one shape
        Targets are probabilities, 0 or 1 above all.
    reduction : {"mean", "sum", "none"}

    Raises
    ------
    ValueError
        If the shapes differ.

    Examples
    --------
    >>> import minisparse as ms
    >>> ms.nn.bce_with_logits(ms.tensor([800.0, -800.0]), [1.0, 1.0], reduction="none")
    tensor([  0., 800.])
    """
    if np.shape(logits) != np.shape(targets):
        shapes = f"logits of shape {np.shape(logits)}, targets {np.shape(targets)}"
        raise ValueError(f"bce_with_logits: {shapes}")
    x = logits if isinstance(logits, Tensor) else as_floats(logits)
    t = targets if isinstance(targets, Tensor) else as_floats(targets)
    return _reduced(ops.softplus(-x) * t + ops.softplus(x) * (1 - t), reduction)


def cross_entropy(logits, labels, *, reduction="mean"):
    """Return the mean of ``-log softmax(logits)[label]``; never overflows.

    Parameters
    ----------
    logits : Tensor or array_like of shape (..., n_classes)
    labels : array_like of int, shape (...)
        Between 0 and n_classes - 1.
    reduction : {"mean", "sum", "none"}

    Raises
    ------
    ValueError
        If the shapes do not fit, or a label is out of range.
    TypeError
        If labels are not integers.

    Examples
    --------
    >>> import minisparse as ms
    >>> logits = ms.tensor([[-431.0, 279.0, 427.0]], requires_grad=True)
    >>> loss = ms.nn.cross_entropy(logits, [0])
    >>> loss.backward()
    >>> loss.item(), logits.grad.round(6)
    (858.0, array([[-1.,  0.,  1.]]))
    """
    labels, shape = indices_of(labels, "cross_entropy: labels"), np.shape(logits)
    if not shape or labels.shape != shape[:-1]:
        raise ValueError(f"cross_entropy: labels of shape {labels.shape} for logits {shape}")
    if labels.size and not 0 <= labels.min() <= labels.max() < shape[-1]:
        given = f"labels from {labels.min()} to {labels.max()}"
        raise ValueError(f"cross_entropy: {given} for {shape[-1]} classes")
    at = (*np.indices(labels.shape, sparse=True), labels)
    return _reduced(_cross_entropy(logits, at=at), reduction)


@primitive
def _cross_entropy(logits, *, at):
    """Return ``-log softmax(logits)`` at the places `at`, one in each row."""
    return -ops.log_softmax(logits)[at]


@_cross_entropy.vjp
def _(g, need, logits, at):
    certain = np.zeros_like(raw(logits))
    certain[at] = 1
    return ops.expand_dims(g, axis=-1) * (ops.softmax(logits) - certain)


def batches(x, y, batch_size, *, rng=None):
    """Yield shuffled mini-batches ``(x[rows], y[rows])``; the last one may be smaller.

    Parameters
    ----------
    x, y : ndarray of equal length
    batch_size : int
    rng : None, int or numpy.random.Generator

    Raises
    ------
    ValueError
        If the lengths differ, or `batch_size` is not positive.
    """
    x, y = np.asarray(x), np.asarray(y)
    if len(x) != len(y) or batch_size < 1:
        raise ValueError(f"batches: {len(x)} rows of x, {len(y)} of y, batch_size={batch_size}")
    order = np.random.default_rng(rng).permutation(len(x))
    pieces = (order[i : i + batch_size] for i in range(0, len(x), batch_size))
    return ((x[rows], y[rows]) for rows in pieces)
