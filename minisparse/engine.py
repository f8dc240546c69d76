"""Reverse-mode automatic differentiation over arrays, in one file.

The whole idea in five sentences.  A *primitive* is a function of arrays.  Called with a
:class:`Tensor` it runs as usual and leaves a :class:`Node` behind: which primitive ran, which
nodes its operands came from (the *edges*), and the few arrays its rule will want again.  The *rule*
of a primitive (its vector-Jacobian product, ``vjp``) takes the gradient ``g`` of some scalar with
respect to the result and returns the gradient with respect to each operand.  Walking the nodes from
the newest to the oldest, and adding up what arrives at each edge, is the chain rule.  Since rules
are written in primitives, running them on Tensors records them too: that is every higher
derivative, with no second set of formulas.

An edge is a :class:`Node`, or, where a graph begins, the leaf :class:`Tensor` itself.  Nodes do not
hold the Tensors they came from, so an intermediate array lives only if a rule asked for it.
"""

import contextlib
import contextvars
import functools
import inspect
import itertools
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ._members import Members as _Base  # what `ops` binds, for type checkers
else:
    _Base = object

# (is recording on, what was before): leaving restores what was there, with no state on no_grad.
_mode: contextvars.ContextVar[tuple] = contextvars.ContextVar("grad_mode", default=(True, None))
_counter = itertools.count()
_FREED = object()
PIECEWISE = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
_UNWATCHED = [0]  # the version of plain arrays, which may change unseen


# ---------------------------------------------------------------------------------- grad mode


class no_grad(contextlib.ContextDecorator):  # noqa: N801 - a function to its users
    """Switch recording off, as a context manager or a decorator.

    The state belongs to the running thread and async task; leaving restores what was there before,
    also by an exception.  Inside, ``t += a`` and ``t[...] = a`` change a Tensor in place.

    Notes
    -----
    One thing can prevent the restoring, as it can for every context manager written in Python:
    control-C at the very moment of leaving.  :func:`is_grad_enabled` tells.

    Examples
    --------
    >>> import minisparse as ms
    >>> w = ms.tensor([1.0, 2.0], requires_grad=True)
    >>> with ms.no_grad():
    ...     w -= 0.5
    >>> w
    tensor([0.5, 1.5], requires_grad=True)
    """

    enabled = False

    def __enter__(self):
        _mode.set((self.enabled, _mode.get()))
        return self

    def __exit__(self, *exc_info):
        _mode.set(_mode.get()[1])

    def __call__(self, function):
        if any(runs_piecewise(function) for runs_piecewise in PIECEWISE):
            raise TypeError("no_grad decorates plain functions; use `with ms.no_grad():` inside")
        return super().__call__(function)


class enable_grad(no_grad):  # noqa: N801 - as no_grad
    """Switch recording on: the opposite of :class:`no_grad`."""

    enabled = True


def is_grad_enabled() -> bool:
    """Tell whether operations are being recorded in this thread or async task.

    Examples
    --------
    >>> import minisparse as ms
    >>> ms.is_grad_enabled()
    True
    """
    return _mode.get()[0]


# ------------------------------------------------------------------------------------ tensors


def require(holds, message, error=ValueError):
    """Raise `error` unless it holds. Not where time counts: the message is made in any case."""
    if not holds:
        raise error(message)


def as_dtype(dtype, what="dtype") -> np.dtype:
    """Return float32 or float64 in native byte order; anything else is a TypeError."""
    dtype = np.dtype(dtype)
    if dtype.type not in (np.float32, np.float64):
        raise TypeError(f"{what}: {dtype} is not supported; it takes float32 and float64")
    return np.dtype(dtype.type)  # the one object of it, which `is` finds


def as_floats(data, dtype=None, what="tensor") -> np.ndarray:
    """Return `data` as a new C-ordered float32 or float64 array; integers become float64.

    One of NumPy begins at a cache line: a row that straddles two makes the products slower.
    """
    array = as_array(data)
    own = as_dtype(np.float64 if array.dtype.kind in "biu" else array.dtype, what)
    own = own if dtype is None else as_dtype(dtype)
    if not isinstance(array, np.ndarray):
        return array.astype(own, order="C")
    memory = np.empty(array.size + 16, own)
    memory = memory[-memory.ctypes.data % 64 // memory.itemsize :][: array.size]
    memory[:] = array.ravel()
    return memory.reshape(array.shape)


class Tensor(_Base):
    """An array that knows how it was made; created by :func:`tensor` and by operations.

    Attributes
    ----------
    data : ndarray
        Read-only view of the numbers; a copy where they are on a GPU.  Assigning copies new
        numbers in, in place.
    grad : ndarray or None
        Filled on leaves by :meth:`backward`: same shape and dtype, in memory of its own.
    requires_grad : bool
        Whether gradients flow to it.  May be set on leaves only.

    Notes
    -----
    Equality is elementwise, as in NumPy; hashing is by identity.
    """

    __slots__ = ("__weakref__", "_array", "_grad", "_node", "_requires_grad", "_version")

    def __init__(self, array, requires_grad=False, node=None, version=None):
        self._array, self._grad = array, None  # as it is: `tensor` copies and checks
        self._requires_grad, self._node = requires_grad, node
        self._version = version or [0]  # belongs to the memory: views and detach() share it

    @property
    def data(self):
        """The array, as a read-only view; what is assigned is copied in."""
        if not isinstance(self._array, np.ndarray):
            return self._array.copy()  # who knows no read-only view gives a copy
        view = self._array.view()
        view.flags.writeable = False
        return view

    @data.setter
    def data(self, array):
        if (array := raw(array)).shape != self.shape:
            raise ValueError(f"data of shape {array.shape} for a Tensor of shape {self.shape}")
        self._overwrite(..., array)

    def _overwrite(self, key, value):
        self._array[key] = np.asarray(as_operand(raw(value), self.dtype, "data"), like=self._array)
        self._version[0] += 1

    grad = property(attrgetter("_grad"), doc="The gradient of a leaf, or None.")

    @grad.setter
    def grad(self, value):
        if value is not None:
            if self._node is not None:
                raise ValueError("only leaves have a .grad; this is the result of an operation")
            if not hasattr(value, "to_dense") or hasattr(value, "__tensor__"):
                value = _beside(as_operand(raw(value), self.dtype, "grad"), self._array, "grad")
            if value.shape != self.shape:
                raise ValueError(f"grad of shape {value.shape} for a Tensor of shape {self.shape}")
        self._grad = value

    requires_grad = property(attrgetter("_requires_grad"), doc="Do gradients flow to it?")

    @requires_grad.setter
    def requires_grad(self, value):
        if self._node is not None:
            raise RuntimeError("requires_grad can be set on leaves only; use .detach()")
        self._requires_grad = bool(value)

    shape = property(attrgetter("_array.shape"), doc="The lengths of the axes, a tuple of int.")
    ndim = property(attrgetter("_array.ndim"), doc="The number of axes.")
    size = property(attrgetter("_array.size"), doc="The number of elements.")
    dtype = property(attrgetter("_array.dtype"), doc="numpy.float32 or numpy.float64.")

    def detach(self):
        """Return a Tensor that shares this one's memory and does not require grad."""
        return Tensor(self._array, version=self._version)

    def backward(self, gradient=None, *, retain_graph=False):
        """Add to every leaf's ``.grad`` the gradient of this Tensor.

        Parameters
        ----------
        gradient : array_like of this Tensor's shape, optional
            The cotangent to start from; 1 for a Tensor of one element, else required.
        retain_graph : bool
            Keep what the graph saved, so that it can be walked again.

        Raises
        ------
        RuntimeError
            If it does not require grad, if `gradient` is missing, if the graph was freed, or if a
            saved Tensor was changed in place.  Nothing has changed then.
        ValueError, TypeError
            If `gradient` has another shape, or holds no real numbers.
        """
        require(self._requires_grad, "backward: this Tensor does not require grad", RuntimeError)
        leaves, owned = _walk(self, _seed(self, gradient, "gradient"), None, False, retain_graph)
        for leaf, g in leaves.items():
            if leaf._grad is not None:
                g = leaf._grad + g
            elif leaf not in owned and not hasattr(g, "to_dense"):
                g = g.copy()
            leaves[leaf] = np.asarray(g) if isinstance(g, np.generic) else g
        # One call, so that what interrupts it leaves all of them or none.
        list(map(setattr, leaves, itertools.repeat("_grad"), leaves.values()))


def tensor(data, *, requires_grad=False, dtype=None) -> Tensor:
    """Copy `data` into a new leaf Tensor.

    Parameters
    ----------
    data : array_like
        float32 or float64 are kept; integers and booleans become float64.
    requires_grad : bool
        Whether ``.grad`` is to be filled by ``backward``.
    dtype : float32 or float64, optional

    Raises
    ------
    TypeError
        For any other dtype (float16, complex, object, ...).

    Examples
    --------
    >>> import minisparse as ms
    >>> w = ms.tensor([3.0], requires_grad=True)
    >>> (w * w).backward(gradient=[1.0])
    >>> w.grad
    array([6.])
    """
    return Tensor(as_floats(data, dtype), bool(requires_grad))


def as_array(x) -> np.ndarray:
    """Return an array, of NumPy or on a GPU, as it is, and anything else as one of NumPy."""
    elsewhere = hasattr(x, "__cuda_array_interface__") and hasattr(x, "__array_function__")
    return x if elsewhere else np.asarray(x)


def raw(x) -> np.ndarray:
    """Return the array under a Tensor, and anything else as an array."""
    return x._array if isinstance(x, Tensor) else as_array(x)


# --------------------------------------------------------------------------------- primitives


class Node:
    """One recorded call: the tape is these, linked by `parents`.

    Attributes
    ----------
    op : _Op
        Which primitive ran.
    parents : list of (Node, Tensor or None)
        The edge of each operand: the node that made it, the leaf it is, None for a constant.
    saved : list
        What the rule asked for, in the order of its parameters.
    guards : list of (version, version seen, gradient served or None)
        How to see that a saved Tensor has changed since.
    shape, dtype
        Of the result.
    order : int
        Parents have smaller numbers, so sorting by it is a topological order.
    """

    __slots__ = ("dtype", "guards", "op", "order", "parents", "saved", "shape")


class _Op:
    """What a primitive knows of its own signature and of its rule's."""

    def __init__(self, function):
        self.name, self.rule = function.__name__.strip("_"), None
        self.wants: list = []  # (kind, which, gradient served or None)
        params = list(inspect.signature(function).parameters.values())
        arrays = [p for p in params if p.kind is not p.KEYWORD_ONLY]
        self.arrays = [p.name for p in arrays]
        self.variadic = [p.kind for p in arrays] == [inspect.Parameter.VAR_POSITIONAL]
        # What a rule may ask for: (kind, number of the operand or parameter of the structure).
        self.offers: dict = {"out": ("out", None)}
        for i, name in enumerate(self.arrays):
            self.offers |= {name: ("x", i), f"{name}_shape": ("shape", i)}
        self.offers |= {p.name: ("structure", p) for p in params[len(arrays) :]}
        if any(p.default is not p.empty for p in arrays):
            raise TypeError(f"{self.name}: what has a default is structure and comes after the *")
        self.by_place = inspect.Signature([p.replace(kind=p.POSITIONAL_OR_KEYWORD) for p in params])

    def rebind(self, args, kwargs):
        """Sort operands given by name, and structure given by position, into their places."""
        try:
            given = self.by_place.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}") from None
        return [given.pop(name) for name in self.arrays], given

    def define(self, rule, serves):
        """Read off the rule's signature what has to be kept for it."""
        names = list(inspect.signature(rule).parameters)[2:]
        if unknown := [n for n in [*names, *serves] if n not in self.offers or n not in names]:
            raise TypeError(f"rule of {self.name} asks for {unknown}; there are {[*self.offers]}")
        self.wants = [(*self.offers[name], serves.get(name)) for name in names]
        self.rule = rule


def primitive(function):
    """Make a differentiable operation of a function of arrays.

    Positional parameters are arrays and differentiable; keyword-only parameters are structure and
    are not.  On plain arrays the result is just `function`'s; a Tensor among the operands makes the
    result a Tensor, recorded if recording is on and an operand requires grad.  The rule is added
    by ``.vjp``, as a decorator or a call.

    A rule is a function ``(g, need, ...)``: `g` is the gradient of a scalar with respect to the
    result, `need` a list with a bool for each operand: whether its gradient is asked for.  It
    returns a tuple of one gradient (or None) per operand; that of a single one may come bare.
    Whatever else it names is kept for it, and nothing more: an operand's name,
    ``<name>_shape``, ``out`` (the result), a keyword.  ``.vjp(x=1)`` says that `x` serves only the
    gradient of operand 1, so that it need not be kept where that is a constant.

    Called by ``backward``, `g` and the rest are arrays; called under ``create_graph=True`` they are
    Tensors, and what is computed of them by primitives is recorded: that is how higher orders
    come about, and why a rule uses ``ms.cos(x)``, not ``np.cos(x.data)``.  A rule does not write
    into what it was given, and returns new arrays, `g`, or views of what it was given.

    Raises
    ------
    TypeError
        If an operand has a default, or a rule asks for what does not exist.

    Examples
    --------
    >>> import numpy as np
    >>> import minisparse as ms
    >>> @ms.primitive
    ... def cube(x):
    ...     return x**3
    >>> @cube.vjp
    ... def _(g, need, x):
    ...     return 3 * g * x * x
    >>> x = ms.tensor(2.0, requires_grad=True)
    >>> cube(x).backward()
    >>> x.grad
    array(12.)
    >>> cube(np.array([1.0, 2.0]))
    array([1., 8.])

    Two operands and a keyword; each operand serves the gradient of the other:

    >>> @ms.primitive
    ... def scaled_product(x, y, *, scale=1.0):
    ...     return scale * x * y
    >>> @scaled_product.vjp(x=1, y=0)
    ... def _(g, need, x, y, scale):
    ...     return scale * g * y if need[0] else None, scale * g * x if need[1] else None
    >>> y = ms.tensor(5.0, requires_grad=True)
    >>> ms.grad(scaled_product(3.0, y, scale=2.0), y)
    array(6.)
    """
    op = _Op(function)
    n_arrays = None if op.variadic else len(op.arrays)

    @functools.wraps(function)
    def apply(*args, **kwargs):
        if len(args) != n_arrays and n_arrays is not None:
            args, kwargs = op.rebind(args, kwargs)
        if wrong := kwargs and [n for n, value in kwargs.items() if isinstance(value, Tensor)]:
            raise TypeError(f"{op.name}: {', '.join(wrong)} is structure and cannot be a Tensor")
        for a in args:
            if isinstance(a, Tensor):
                like = a._array  # says dtype and device; the other operands must fit
                dtype, kind = like.dtype, type(like)
                break
        else:
            return function(*map(_plain, args), **kwargs)

        recording, recorded, arrays, parents = _mode.get()[0], False, [], []
        for a in args:
            edge = None
            if isinstance(a, Tensor):
                array = a._array
                if recording and a._requires_grad:
                    edge = a._node or a
                    recorded = True
            else:
                array = as_operand(a, dtype, op.name)
            if type(array) is not kind or array.dtype is not dtype:
                array = _beside(array, like, op.name)
            arrays.append(array)
            parents.append(edge)
        out = function(*arrays, **kwargs)
        out = out if isinstance(out, np.ndarray) else as_array(out)
        if out.dtype is not dtype:  # only a keyword `dtype` lets a primitive change it
            out = as_operand(out, kwargs.get("dtype", dtype), f"the result of {op.name}")
        # An array of its own memory is no view; with three operands or more, look at each.
        own = out.base is None and out is not arrays[0] and out is not arrays[-1]
        version = [0] if own and len(arrays) < 3 else _version_of(out, args)
        if not recorded:
            return Tensor(out, False, None, version)
        node = Node()
        node.op, node.parents, node.shape, node.dtype = op, parents, out.shape, out.dtype
        node.order = next(_counter)
        node.saved, node.guards = saved, guards = [], []
        for kind, which, serves in op.wants:
            if serves is not None and parents[serves] is None:
                saved.append(None)
            elif kind == "shape":
                saved.append([a.shape for a in arrays] if op.variadic else arrays[which].shape)
            elif kind == "structure":
                saved.append(kwargs.get(which.name, which.default))
            elif kind == "out":
                saved.append(out)
                guards.append((version, version[0], serves))
            else:
                saved.append(arrays if op.variadic else arrays[which])
                for a in args if op.variadic else (args[which],):
                    seen = a._version if isinstance(a, Tensor) else _UNWATCHED
                    guards.append((seen, seen[0], serves))
        return Tensor(out, True, node, version)

    def vjp(rule=None, /, **serves):
        """Attach the rule ``(g, need, ...) -> gradients``; see :func:`primitive`."""
        if rule is None:
            return functools.partial(vjp, **serves)
        op.define(rule, serves)
        return rule

    apply.vjp = vjp
    return apply


def _plain(a):
    """Bring an operand of a call without Tensors to an array of floats; numbers stay weak."""
    a = a if isinstance(a, (np.ndarray, np.floating, float, int)) else as_array(a)
    return a.astype(np.float64) if getattr(a, "dtype", np.dtype(float)).kind in "biu" else a


def as_operand(a, dtype, name) -> np.ndarray:
    """Bring a plain operand to the Tensors' dtype: the Tensor's wins."""
    if isinstance(a, np.ndarray) and a.dtype == dtype:
        return a
    array = as_array(float(a) if isinstance(a, int) else a)  # an int may be too long for NumPy
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{name}: needs real numbers, not a {type(a).__name__} of {array.dtype}")
    return array.astype(dtype, copy=False)


def _beside(array, like, name):
    """Return an operand that has the dtype of `like` and lives where it does, or raise.

    A single number of NumPy's suits everywhere, as a scalar.
    """
    if array.dtype != like.dtype:
        raise TypeError(f"{name}: Tensors of {like.dtype} and {array.dtype}; use .astype on one")
    if (host := isinstance(array, np.ndarray)) is isinstance(like, np.ndarray):
        return array  # both NumPy's, or neither
    if host and array.ndim == 0:
        return array[()]
    raise TypeError(f"{name}: arrays on {like.device} and {array.device} do not mix: use .to(...)")


def _version_of(out, args):
    """Find the version counter of the memory that `out` sees: a view shares its operand's."""
    for a in args:
        if isinstance(a, Tensor) and (out is a._array or np.may_share_memory(out, a._array)):
            return a._version
    return [0]


# ------------------------------------------------------------------------------- the backward walk


def grad(output, inputs, grad_output=None, *, create_graph=False, retain_graph=None):
    """Return the gradient of `output` with respect to each of `inputs`; leaves ``.grad`` alone.

    Parameters
    ----------
    output : Tensor
    inputs : Tensor, SparseParameter, SparseTensor, or a sequence of them
        Any Tensors of the graph; a SparseParameter stands for its ``.free``, a SparseTensor for its
        ``.values``.
    grad_output : array_like or Tensor of the shape of `output`, optional
        The cotangent; 1 if `output` has one element, else required.
    create_graph : bool
        Record the computation of the gradients, so that they can be differentiated again.
    retain_graph : bool, optional
        Keep what the graph saved; the default is `create_graph`.

    Returns
    -------
    ndarray (Tensor if `create_graph`), or a tuple of them for a sequence
        Zeros where `output` does not depend on an input.

    Raises
    ------
    ValueError
        If an input does not require grad.
    TypeError
        If `output` or an input is no Tensor.
    RuntimeError
        As :meth:`Tensor.backward`.

    Examples
    --------
    >>> import minisparse as ms
    >>> x = ms.tensor(2.0, requires_grad=True)
    >>> first = ms.grad(x**3, x, create_graph=True)
    >>> ms.grad(first, x)
    array(12.)
    """
    if not isinstance(output, Tensor):
        raise TypeError(f"grad: output is a {type(output).__name__}, not a Tensor")
    single = isinstance(inputs, Tensor) or hasattr(inputs, "__tensor__")
    inputs = [inputs] if single else inputs
    targets = [t.__tensor__() if hasattr(t, "__tensor__") else t for t in inputs]
    for i, t in enumerate(targets):
        require(isinstance(t, Tensor), f"grad: input {i} is {type(t)}, not a Tensor", TypeError)
        require(t._requires_grad, f"grad: input {i} does not require grad")
    edges = [t._node or t for t in targets]
    found, owned = {}, set()
    seed = _seed(output, grad_output, "grad_output", create_graph)
    if output._requires_grad:
        retain = create_graph if retain_graph is None else retain_graph
        found, owned = _walk(output, seed, set(edges), create_graph, retain)

    def result(t, edge):
        g = found[edge] if edge in found else np.zeros_like(t._array)
        g = g.to_dense() if hasattr(g, "to_dense") else g
        recorded = isinstance(g, Tensor)
        if not recorded and (edge not in owned or sum(e is edge for e in edges) > 1):
            g = g.copy(order="K")
        return Tensor(g) if create_graph and not recorded else g

    results = tuple(result(t, edge) for t, edge in zip(targets, edges, strict=True))
    return results[0] if single else results


def _seed(output, gradient, name, create_graph=False):
    """Check the cotangent a walk starts from, or make the 1 of a single element."""
    if gradient is None and output.size != 1:
        raise RuntimeError(f"an output of shape {output.shape} needs `{name}` of that shape")
    g = np.ones_like(output._array) if gradient is None else gradient
    array = g._array if isinstance(g, Tensor) else as_operand(g, output.dtype, name)
    array = np.asarray(_beside(array, output._array, name), like=output._array)
    if array.shape != output.shape:
        raise ValueError(f"{name} has shape {array.shape}, the output {output.shape}")
    return (g if isinstance(g, Tensor) else Tensor(array)) if create_graph else array


def _walk(output, *args):
    """Run the rules in a context of their own: whatever interrupts them, grad mode is as it was."""
    return contextvars.copy_context().run(_run_rules, output._node or output, *args)


def _run_rules(root, seed, targets, create_graph, retain):
    """Run the rules from `root` down, newest node first.

    Returns the gradients at the leaves and `targets`, and the edges whose array was made here and
    is seen by nobody else.  Nothing outside is changed, except that nodes which ran are freed
    unless `retain`.
    """
    _mode.set((create_graph, None))
    grads, owned = {root: seed}, set()
    for node, need in _plan(root, targets):
        if (g := grads.pop(node, None)) is None:
            continue
        if targets is not None and node in targets:
            grads[node] = g
        saved = _as_tensors(node) if create_graph else node.saved
        try:
            results = node.op.rule(g, need, *saved)
        except Exception as error:
            error.add_note(f"(while running the gradient rule of {node.op.name})")
            raise
        results = results if type(results) is tuple else (results,)
        if (n := len(results)) != len(need):
            raise RuntimeError(f"the rule of {node.op.name} returned {n} gradients for {len(need)}")
        for edge, needed, r in zip(node.parents, need, results, strict=True):
            if not needed or r is None:
                continue
            if type(r) is not type(g) or r.shape != edge.shape or r.dtype is not edge.dtype:
                r = _checked(r, edge, node.op.name)
            if (old := grads.get(edge)) is None:
                grads[edge] = r
                if type(edge) is Tensor and _is_new(r, g, saved, results):
                    owned.add(edge)
            elif edge in owned and type(old) is type(r) is type(g) is not Tensor:
                np.add(old, r, out=old)
            else:
                total = old + r
                grads[edge] = np.asarray(total) if isinstance(total, np.generic) else total
                owned.add(edge)
        if not retain and node.guards:  # what keeps no operand stays, and can be walked again
            node.saved = _FREED
    return grads, owned


def _plan(root, targets):
    """List the nodes to run, newest first, each with which gradients it has to give.

    Everything that can be known to fail is found here, before any rule has run.
    """
    seen, stack, plan = set(), [root], []
    while stack:
        node = stack.pop()
        if type(node) is Node and node not in seen:
            seen.add(node)
            stack.extend(node.parents)
    wanted = set() if targets is None else set(targets)
    for node in sorted(seen, key=attrgetter("order")):  # parents come before what is made of them
        need = [e is not None and (targets is None or e in wanted) for e in node.parents]
        if True not in need:
            continue
        wanted.add(node)
        plan.append((node, need))
        name = node.op.name
        if node.saved is _FREED:
            raise RuntimeError(f"{name} was freed: backward had no retain_graph=True")
        for version, then, serves in node.guards:
            if version[0] != then and (serves is None or need[serves]):
                raise RuntimeError(f"what {name} saved was changed in place: run backward first")
        if node.op.rule is None:
            raise RuntimeError(f"{name} has no gradient rule: define one with .vjp")
    return plan[::-1]


def _as_tensors(node):
    """Give the saved arrays their place in the graph back, so that a rule on them is recorded."""

    versions = (version for version, _, _ in node.guards)

    def attach(array, edge):
        version = next(versions)  # guards stand in the order of what was saved
        if type(edge) is Tensor or (edge is None and version is _UNWATCHED):
            return array if edge is None else edge
        return Tensor(array, edge is not None, edge, version)

    saved = list(node.saved)
    for i, (kind, which, _) in enumerate(node.op.wants):
        if kind == "x" and node.op.variadic:
            saved[i] = [attach(*pair) for pair in zip(saved[i], node.parents, strict=True)]
        elif kind in ("x", "out") and saved[i] is not None:
            saved[i] = attach(saved[i], node if kind == "out" else node.parents[which])
    return saved


def _checked(r, edge, name):
    """Bring what a rule returned to the operand's dtype; a wrong shape is the rule's fault."""
    if hasattr(r, "to_dense"):
        r = r if type(edge) is Tensor else r.to_dense()
    elif not (is_grad_enabled() and isinstance(r, Tensor)):
        r = as_operand(raw(r), edge.dtype, f"the rule of {name}")
    if (got := r.shape) != edge.shape:
        raise RuntimeError(f"rule of {name} returned a gradient of shape {got} for {edge.shape}")
    return r if r.dtype == edge.dtype else r.astype(edge.dtype)


def _is_new(r, g, saved, results):
    """Tell whether a rule made `r` itself and nobody else can see its memory.

    What is given to and kept by a rule, and its other results, may see it; `r` itself is counted.
    """
    others = [g, *results, *saved, *(a for s in saved if type(s) is list for a in s)]
    seen = [o for o in others if r is o or r is getattr(o, "base", None)]
    return type(r) is type(g) is not Tensor and not isinstance(r.base, type(r)) and len(seen) == 1
