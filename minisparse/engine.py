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

from __future__ import annotations

import contextvars
import functools
import inspect
import itertools
from operator import attrgetter
from typing import Any

import numpy as np

FLOATS = (np.dtype(np.float32), np.dtype(np.float64))

# (is recording on, what was before): leaving restores what was there, with no state on no_grad.
_mode: contextvars.ContextVar[tuple] = contextvars.ContextVar("grad_mode", default=(True, None))
_counter = itertools.count()
_FREED = object()
_UNWATCHED = [0]  # the version of plain arrays, which may change unseen


# ---------------------------------------------------------------------------------- grad mode


class no_grad:  # noqa: N801 - a function to its users, like every context manager
    """Switch recording off, as a context manager or a decorator.

    The state belongs to the running thread and async task; leaving restores what was there before,
    also by an exception.  Inside, ``t += a`` and ``t[...] = a`` change a Tensor in place.

    Examples
    --------
    >>> import minisparse as ms
    >>> w = ms.tensor([1.0, 2.0], requires_grad=True)
    >>> with ms.no_grad():
    ...     w -= 0.5
    >>> w
    tensor([0.5, 1.5], requires_grad=True)
    """

    def __enter__(self):
        _mode.set((False, _mode.get()))
        return self

    def __exit__(self, *exc_info):
        _mode.set(_mode.get()[1])

    def __call__(self, function):
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError("no_grad: a generator runs piecewise; use `with ms.no_grad():` inside")
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def wrapper(*args, **kwargs):
                with self:
                    return await function(*args, **kwargs)
        else:

            @functools.wraps(function)
            def wrapper(*args, **kwargs):
                with self:
                    return function(*args, **kwargs)

        return wrapper


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


def as_dtype(dtype) -> np.dtype:
    """Return float32 or float64 as a NumPy dtype; anything else is a TypeError."""
    dtype = np.dtype(dtype)
    if dtype.newbyteorder("=") not in FLOATS:
        raise TypeError(f"dtype {dtype} is not supported: minisparse computes in float32, float64")
    return dtype.newbyteorder("=")


def as_floats(data, dtype=None, what="tensor") -> np.ndarray:
    """Return `data` as a new C-ordered float32 or float64 array; integers become float64."""
    array = np.array(data, order="C")
    if array.dtype.kind in "biu":
        array = array.astype(np.float64)
    if array.dtype.newbyteorder("=") not in FLOATS:
        raise TypeError(
            f"{what}: data of dtype {array.dtype} is not supported; "
            "minisparse takes float32 or float64 (integers and booleans become float64)"
        )
    return array.astype(as_dtype(array.dtype if dtype is None else dtype), copy=False)


class Tensor:
    """An array that knows how it was made; created by :func:`tensor` and by operations.

    Attributes
    ----------
    data : ndarray
        Read-only view of the numbers.  Assigning copies new numbers in, in place.
    grad : ndarray or None
        Filled on leaves by :meth:`backward`: same shape and dtype, shares memory with nothing.
    requires_grad : bool
        Whether gradients flow to it.  May be set on leaves only.

    Notes
    -----
    Equality is elementwise, as in NumPy; hashing is by identity.
    """

    __slots__ = ("__weakref__", "_array", "_grad", "_node", "_requires_grad", "_version")
    __hash__ = object.__hash__

    def __init__(self, data, *, requires_grad=False, dtype=None):
        self._array = as_floats(data, dtype)
        self._requires_grad = bool(requires_grad)
        self._grad = None
        self._node = None
        self._version = [0]  # belongs to the memory: views and detach() share it

    @property
    def data(self):
        view = self._array.view()
        view.flags.writeable = False
        return view

    @data.setter
    def data(self, array):
        array = array._array if isinstance(array, Tensor) else np.asarray(array)
        if array.shape != self.shape:
            raise ValueError(f"data of shape {array.shape} for a Tensor of shape {self.shape}")
        self._overwrite(..., array)

    def _overwrite(self, key, value):
        value = value._array if isinstance(value, Tensor) else np.asarray(value)
        if value.dtype.kind not in "biuf":
            raise TypeError(f"cannot write data of dtype {value.dtype} into a {self.dtype} Tensor")
        self._array[key] = value
        self._version[0] += 1

    @property
    def grad(self):
        return self._grad

    @grad.setter
    def grad(self, value):
        if value is not None:
            if self._node is not None:
                raise ValueError("only leaves have a .grad; this is the result of an operation")
            if not hasattr(value, "to_dense"):
                value = value._array if isinstance(value, Tensor) else value
                value = _operand(value, self.dtype, "grad")
            if value.shape != self.shape:
                raise ValueError(f"grad of shape {value.shape} for a Tensor of shape {self.shape}")
        self._grad = value

    @property
    def requires_grad(self):
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, value):
        if self._node is not None:
            raise RuntimeError("requires_grad can be set on leaves only; use .detach()")
        self._requires_grad = bool(value)

    @property
    def shape(self):
        return self._array.shape

    @property
    def ndim(self):
        return self._array.ndim

    @property
    def size(self):
        return self._array.size

    @property
    def dtype(self):
        return self._array.dtype

    def numpy(self):
        """Return the numbers as a read-only NumPy view that is not differentiated."""
        return self.data

    def detach(self):
        """Return a Tensor that shares this one's memory and does not require grad."""
        return wrap(self._array, version=self._version)

    def item(self):
        """Return the only element as a Python float; ValueError if there is not just one."""
        return self._array.item()

    def __float__(self):
        if self.size != 1:
            raise TypeError(f"only a Tensor of one element becomes a float, not shape {self.shape}")
        return self._array.item()

    def __int__(self):
        return int(float(self))

    def __format__(self, spec):
        return format(self.item(), spec) if spec and self.size == 1 else format(repr(self), spec)

    def __bool__(self):
        return bool(self._array)

    def __len__(self):
        if not self.shape:
            raise TypeError("len() of a Tensor of shape ()")
        return self.shape[0]

    def __repr__(self):
        text = np.array2string(self._array, separator=", ", prefix="tensor(")
        extra = "" if self.dtype == np.float64 else f", dtype={self.dtype}"
        if self._node is not None:
            extra += f", op={self._node.op.name}"
        elif self._requires_grad:
            extra += ", requires_grad=True"
        return f"tensor({text}{extra})"

    def __array__(self, dtype=None, copy=None):
        if self._requires_grad:
            raise TypeError(
                "a Tensor that requires grad does not become an array, since its gradient would be "
                "lost: use t.numpy() for the numbers, ms.matmul(A, t) or ms.multiply(A, t) to "
                "combine it with a SciPy matrix or an array, ms.stack to join a list of Tensors"
            )
        if copy or (dtype is not None and np.dtype(dtype) != self.dtype):
            if copy is False:
                raise ValueError(f"a {self.dtype} Tensor does not become {dtype} without a copy")
            return self._array.astype(dtype or self.dtype)
        return self.data

    def __reduce__(self):
        if self._node is not None:
            raise TypeError(
                f"the result of {self._node.op.name} belongs to a graph and is neither pickled nor "
                "copied: use .detach() first"
            )
        return _rebuild, (self._array, self._requires_grad, self._grad)

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
        """
        if not self._requires_grad:
            raise RuntimeError("backward: this Tensor does not require grad")
        edge = self._node or self
        _, leaves, owned = _walk(edge, _seed(self, gradient, "gradient"), None, False, retain_graph)
        for leaf, g in leaves.items():
            if leaf._grad is not None:
                leaf._grad = np.asarray(leaf._grad + g) if type(g) is np.ndarray else leaf._grad + g
            else:
                leaf._grad = g if leaf in owned or type(g) is not np.ndarray else np.array(g)


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
    return Tensor(data, requires_grad=requires_grad, dtype=dtype)


def _rebuild(data, requires_grad, grad):
    t = Tensor(data, requires_grad=requires_grad)
    t._grad = grad.copy() if isinstance(grad, np.ndarray) else grad
    return t


def wrap(data, *, requires_grad=False, node=None, version=None) -> Tensor:
    """Make a Tensor around an array without copying or checking it (for the package itself)."""
    t = Tensor.__new__(Tensor)
    t._array = data
    t._requires_grad = requires_grad
    t._grad = None
    t._node = node
    t._version = [0] if version is None else version
    return t


# --------------------------------------------------------------------------------- primitives


class Node:
    """One recorded call: the tape is these, linked by `parents`.

    Attributes
    ----------
    op : _Op
        Which primitive ran.
    parents : tuple of (Node, Tensor or None)
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
        self.function = function
        self.name = function.__name__
        self.rule = None
        self.wants: tuple = ()  # (kind, operand index or keyword, gradient served or None)
        params = inspect.signature(function).parameters.values()
        self.structure = {p.name: p.default for p in params if p.kind is p.KEYWORD_ONLY}
        arrays = [p for p in params if p.kind is not p.KEYWORD_ONLY]
        self.variadic = len(arrays) == 1 and arrays[0].kind is inspect.Parameter.VAR_POSITIONAL
        for p in arrays:
            if not self.variadic and (p.kind is p.VAR_POSITIONAL or p.default is not p.empty):
                raise TypeError(
                    f"primitive {self.name}: {p} must be a plain positional parameter; what has a "
                    "default is structure and comes after the *"
                )
        self.arrays = [p.name for p in arrays]

    def rebind(self, args, kwargs):
        """Sort operands given by name, and structure given by position, into their places."""
        n = len(self.arrays)
        args, extra = list(args[:n]), args[n:]
        if len(extra) > len(self.structure):
            raise TypeError(f"{self.name}: too many arguments")
        for name, value in zip(self.structure, extra, strict=False):
            if name in kwargs:
                raise TypeError(f"{self.name}: {name} is given twice")
            kwargs[name] = value
        for name in self.arrays[len(args) :]:
            if name not in kwargs:
                raise TypeError(f"{self.name}: operand {name} is missing")
            args.append(kwargs.pop(name))
        return args, kwargs

    def define(self, rule, serves):
        """Read off the rule's signature what has to be kept for it."""
        names = list(inspect.signature(rule).parameters)
        wants = []
        for name in names[2:]:
            base = name.removesuffix("_shape")
            if name in self.arrays:
                wants.append(("xs" if self.variadic else "x", self.arrays.index(name)))
            elif name == "out" or name in self.structure:
                wants.append(("out", None) if name == "out" else ("structure", name))
            elif base in self.arrays:
                wants.append(("shapes" if self.variadic else "shape", self.arrays.index(base)))
            else:
                raise TypeError(
                    f"the rule of {self.name} asks for {name!r}; it may ask for g, need, then any "
                    f"of {self.arrays}, their <name>_shape, out, {list(self.structure)}"
                )
        unknown = set(serves) - set(names)
        if len(names) < 2 or unknown:
            raise TypeError(f"the rule of {self.name} begins with g, need; unknown: {unknown}")
        self.wants = tuple((*w, serves.get(name)) for w, name in zip(wants, names[2:], strict=True))
        self.rule = rule


def primitive(function):
    """Make a differentiable operation of a function of arrays.

    Positional parameters are arrays and differentiable; keyword-only parameters are structure and
    are not.  On plain arrays the result is just `function`'s; a Tensor among the operands makes the
    result a Tensor, recorded if recording is on and an operand requires grad.  The rule is added
    by ``.vjp``: a function ``(g, need, ...)`` returning one gradient (or None) per operand, as a
    tuple; one operand's may come bare.  What else it names is kept for it, and nothing more: an
    operand's name, ``<name>_shape``, ``out`` (the result), a keyword.  ``.vjp(x=1)`` says that `x`
    serves only the gradient of operand 1, and need not be kept if that is a constant.

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
    """
    op = _Op(function)
    n_arrays = -1 if op.variadic else len(op.arrays)

    @functools.wraps(function)
    def apply(*args, **kwargs):
        if len(args) != n_arrays and n_arrays >= 0:
            args, kwargs = op.rebind(args, kwargs)
        for name, value in kwargs.items():
            if isinstance(value, Tensor):
                raise TypeError(f"{op.name}: {name} is structure and cannot be a Tensor")
        dtype = None
        for a in args:
            if isinstance(a, Tensor):
                if dtype is None:
                    dtype = a._array.dtype
                elif a._array.dtype != dtype:
                    raise TypeError(
                        f"{op.name}: Tensors of dtypes {dtype} and {a._array.dtype}; "
                        "bring one to the other's with .astype"
                    )
        if dtype is None:
            return function(*args, **kwargs)

        recording = _mode.get()[0]
        arrays, parents, recorded = [], [], False
        for a in args:
            edge = None
            if isinstance(a, Tensor):
                if recording and a._requires_grad:
                    edge = a._node or a
                    recorded = True
                arrays.append(a._array)
            else:
                arrays.append(_operand(a, dtype, op.name))
            parents.append(edge)
        out = function(*arrays, **kwargs)
        if not isinstance(out, np.ndarray):
            out = np.asarray(out)
        fresh = out.base is None and id(out) not in map(id, arrays)
        version = [0] if fresh else _version_of(out, args)
        if not recorded:
            return wrap(out, version=version)

        node = Node()
        node.op = op
        node.parents = parents
        node.shape = out.shape
        node.dtype = out.dtype
        node.order = next(_counter)
        node.saved = saved = []
        node.guards = guards = []
        for kind, key, serves in op.wants:
            if serves is not None and parents[serves] is None:
                saved.append(None)
            elif kind == "shape":
                saved.append(arrays[key].shape)
            elif kind == "x":
                saved.append(arrays[key])
                seen = args[key]._version if isinstance(args[key], Tensor) else _UNWATCHED
                guards.append((seen, seen[0], serves))
            elif kind == "out":
                saved.append(out)
                guards.append((version, version[0], serves))
            elif kind == "structure":
                saved.append(kwargs.get(key, op.structure[key]))
            elif kind == "shapes":
                saved.append([a.shape for a in arrays])
            else:
                saved.append(arrays)
                seen = [a._version for a in args if isinstance(a, Tensor)]
                guards.extend([(v, v[0], serves) for v in seen])
        return wrap(out, requires_grad=True, node=node, version=version)

    def vjp(rule=None, /, **serves):
        """Attach the rule ``(g, need, ...) -> gradients``; see :func:`primitive`."""
        if rule is None:
            return functools.partial(vjp, **serves)
        op.define(rule, serves)
        return rule

    apply.vjp = vjp  # type: ignore[attr-defined]
    return apply


def _operand(a, dtype, name):
    """Bring a plain operand to the Tensors' dtype: the Tensor's wins."""
    if isinstance(a, np.ndarray) and a.dtype == dtype:
        return a
    array = np.asarray(float(a) if isinstance(a, int) else a)  # an int may be too long for NumPy
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"{name}: an operand of type {type(a).__name__} (dtype {array.dtype}); "
            "it takes Tensors, real arrays and numbers"
        )
    return array.astype(dtype)


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
    targets = []
    for i, t in enumerate([inputs] if single else inputs):
        t = t.__tensor__() if hasattr(t, "__tensor__") else t
        if not isinstance(t, Tensor):
            raise TypeError(f"grad: input {i} is a {type(t).__name__}, not a Tensor")
        if not t._requires_grad:
            raise ValueError(f"grad: input {i} does not require grad")
        targets.append(t)
    edges = [t._node or t for t in targets]
    found: dict = {}
    owned: set = set()
    seed = _seed(output, grad_output, "grad_output", create_graph)
    if output._requires_grad:
        retain = create_graph if retain_graph is None else retain_graph
        found, leaves, owned = _walk(output._node or output, seed, set(edges), create_graph, retain)
        found.update(leaves)
    results: list[Any] = []
    for t, edge in zip(targets, edges, strict=True):
        g = found.get(edge)
        if g is None:
            g = np.zeros_like(t._array)
        elif hasattr(g, "to_dense"):
            g = g.to_dense()
        elif edge in owned:
            owned.discard(edge)  # an input named twice gets two arrays
        elif not isinstance(g, Tensor):
            g = np.array(g)
        results.append(wrap(g) if create_graph and not isinstance(g, Tensor) else g)
    return results[0] if single else tuple(results)


def _seed(output, gradient, name, create_graph=False):
    """Check the cotangent a walk starts from, or make the 1 of a single element."""
    if gradient is None:
        if output.size != 1:
            raise RuntimeError(
                f"a Tensor of shape {output.shape} has no single gradient: pass `{name}` of that "
                "shape, or reduce it to one element first"
            )
        gradient = np.ones_like(output._array)
    if isinstance(gradient, Tensor):
        if gradient.dtype != output.dtype:
            raise TypeError(f"{name} is {gradient.dtype}, the output {output.dtype}: use .astype")
    else:
        gradient = wrap(_operand(gradient, output.dtype, name))
    if gradient.shape != output.shape:
        raise ValueError(f"{name} has shape {gradient.shape}, the output {output.shape}")
    return gradient if create_graph else gradient._array


def _walk(root, seed, targets, create_graph, retain):
    """Run the rules from `root` down, newest node first.

    Returns the gradients found at `targets` that are nodes, those of the leaves, and the set of
    edges whose array was made here and is seen by nobody else.  Nothing outside is changed, except
    that nodes which ran are freed unless `retain`.
    """
    nodes, needs = _plan(root, targets)
    grads = {root: seed}
    found, owned = {}, set()
    expected = Tensor if create_graph else np.ndarray
    _mode.set((create_graph, _mode.get()))
    try:
        for node in nodes:
            g = grads.pop(node, None)
            if g is None:
                continue
            if targets is not None and node in targets:
                found[node] = g
            need = needs[node]
            if True not in need:
                continue
            saved = _as_tensors(node) if create_graph else node.saved
            results = node.op.rule(g, need, *saved)
            if type(results) is not tuple:
                results = (results,)
            if len(results) != len(need):
                raise RuntimeError(
                    f"the rule of {node.op.name} returned {len(results)} gradients for "
                    f"{len(need)} operands"
                )
            for edge, needed, r in zip(node.parents, need, results, strict=True):
                if not needed or r is None:
                    continue
                leaf = type(edge) is Tensor
                if type(r) is not expected or r.shape != edge.shape or r.dtype != edge.dtype:
                    r = _checked(r, edge, leaf, node.op.name)
                old = grads.get(edge)
                if old is None:
                    grads[edge] = r
                    if leaf and not create_graph and _is_new(r, g, saved, results):
                        owned.add(edge)
                elif edge in owned and type(old) is type(r) is np.ndarray:
                    np.add(old, r, out=old)
                else:
                    total = old + r
                    grads[edge] = np.asarray(total) if isinstance(total, np.generic) else total
                    if not create_graph:
                        owned.add(edge)
            if not retain and node.guards:
                node.saved = _FREED
    except Exception as error:
        error.add_note(f"(while running the gradient rule of {node.op.name})")
        raise
    finally:
        _mode.set(_mode.get()[1])
    return found, grads, owned


def _plan(root, targets):
    """List the nodes behind `root`, newest first, with the gradients each has to give.

    Everything that can be known to fail is found here, before any rule has run.
    """
    nodes, seen, stack = [], {root}, [root]
    while stack:
        node = stack.pop()
        if type(node) is Node:
            nodes.append(node)
            for edge in node.parents:
                if edge is not None and edge not in seen:
                    seen.add(edge)
                    stack.append(edge)
    nodes.sort(key=attrgetter("order"))
    needs = {}
    wanted = seen if targets is None else set(targets)
    for node in nodes:  # oldest first: a node is wanted if one of its parents is
        needs[node] = need = tuple([edge in wanted for edge in node.parents])
        if True not in need:
            continue
        wanted.add(node)
        if node.saved is _FREED:
            raise RuntimeError(
                f"the graph behind {node.op.name} was freed by an earlier backward: pass "
                "retain_graph=True to the earlier one, or compute the forward again"
            )
        for version, then, serves in node.guards:
            if version[0] != then and (serves is None or need[serves]):
                raise RuntimeError(
                    f"a Tensor that {node.op.name} saved for its gradient was changed in place "
                    "since (by an optimizer step, t -= ..., t[...] = ... or t.data = ...): run "
                    "backward before the change, or compute the forward again"
                )
        if node.op.rule is None:
            raise RuntimeError(f"{node.op.name} has no gradient rule: define one with .vjp")
    nodes.reverse()
    return nodes, needs


def _as_tensors(node):
    """Give the saved arrays their place in the graph back, so that a rule on them is recorded."""

    def attach(array, edge):
        if edge is None or array is None:
            return array
        if type(edge) is Tensor:
            return edge
        return wrap(array, requires_grad=True, node=edge)

    saved = []
    for (kind, key, _), value in zip(node.op.wants, node.saved, strict=True):
        if kind == "x":
            value = attach(value, node.parents[key])
        elif kind == "xs":
            value = [attach(v, edge) for v, edge in zip(value, node.parents, strict=True)]
        elif kind == "out":
            value = attach(value, node)
        saved.append(value)
    return saved


def _checked(r, edge, leaf, name):
    """Bring what a rule returned to the operand's dtype; a wrong shape is the rule's fault."""
    if hasattr(r, "to_dense"):
        r = r if leaf else r.to_dense()
    elif not isinstance(r, Tensor):
        r = np.asarray(r)
    if r.shape != edge.shape:
        raise RuntimeError(
            f"the rule of {name} returned a gradient of shape {r.shape} for an operand of shape "
            f"{edge.shape}"
        )
    return r if r.dtype == edge.dtype else r.astype(edge.dtype)


def _is_new(r, g, saved, results):
    """Tell whether a rule made `r` itself and nobody else can see its memory."""
    if type(r) is not np.ndarray or isinstance(r.base, np.ndarray) or r is g:
        return False
    others = [*results, *saved]
    others += [array for group in saved if type(group) is list for array in group]
    return sum(o is r for o in others) == 1 and all(
        getattr(o, "base", None) is not r for o in others
    )
