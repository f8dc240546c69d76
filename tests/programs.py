"""Random programs over every public operation, and an interpreter of them in dense NumPy.

A *draw* of an operation chooses operands among what a program has computed so far, or makes new
ones, and gives two functions of them: the public one, and the same in NumPy, where a sparse matrix
is a `Sparse`.  The interpreter knows no derivative.  What depends on a comparison (which is larger,
which side of a kink) is settled when the program is drawn, at a distance from every kink; the rest
is analytic, so its functions take complex numbers, and the imaginary part of ``f(x + i h d) / h``
is the derivative in the direction d, exact to rounding for any small h.
"""

import math
import operator
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
import scipy.special
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import minisparse as ms

from .layouts import LAYOUTS, laid_out

STEP = 1e-20
MARGIN = 0.01  # how far from a kink a number stays, where it does not lie on it exactly


class Sparse(NamedTuple):
    """What stands for a SparseTensor: its dense form, and where an entry exists."""

    dense: np.ndarray
    mask: np.ndarray

    @property
    def shape(self):
        return self.mask.shape


class Node(NamedTuple):
    """One value of a program, as a function of earlier ones; of a leaf, its number."""

    name: str
    ours: object
    naive: object
    args: tuple
    leaf: int | None = None


def placed(values, mask):
    out = np.zeros(mask.shape, values.dtype)
    out[mask] = values
    return Sparse(out, mask)


def plain(value):
    """Return the numbers of a value of ours or of the interpreter, of a sparse one the stored."""
    if isinstance(value, Sparse):
        return value.dense[value.mask]
    if sp.issparse(value):
        value = ms.SparseTensor.from_scipy(value)
    value = value.values if isinstance(value, ms.SparseTensor) else value
    return value.data if isinstance(value, ms.Tensor) else np.asarray(value)


class Program:
    """A sequence of operations, drawn one by one; `values` are what the interpreter computed."""

    def __init__(self, draw, dtype, sides, most):
        self.draw, self.dtype, self.sides, self.most = draw, np.dtype(dtype), sides, most
        self.rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        self.nodes, self.values, self.leaves = [], [], []
        self.exact = []  # whether a value is the same in float32: then it may lie on a kink
        self.fresh = {}  # how to make a leaf that is a SparseParameter

    # ------------------------------------------------------------------------------ drawing

    def choose(self, *options):
        return self.draw(st.sampled_from(options))

    def flip(self):
        return self.draw(st.booleans())

    def side(self):
        return self.draw(st.sampled_from(self.sides))

    def shape(self, least=0, most=3):
        return tuple(self.side() for _ in range(self.draw(st.integers(least, most))))

    def numbers(self, shape, kind="any"):
        """Make numbers that are the same in float32: small multiples of 1/2, or any."""
        if kind == "positive":
            x = self.rng.uniform(0.5, 2, shape)
        elif self.flip():
            x = self.rng.integers(-4, 5, shape) / 2
        else:
            x = self.rng.normal(size=shape)
        return np.asarray(x, np.float32).astype(np.float64)

    def mask(self, shape):
        return self.rng.random(shape) < self.choose(0.5, 0.2, 0.8, 0.0, 1.0)

    def leaf(self, shape, kind="any", plus=0.0):
        """Make a new operand: a Tensor that requires grad, one that does not, or an array."""
        data = self.numbers(shape, kind) + plus
        layout = LAYOUTS[self.choose(*LAYOUTS)]
        if self.choose(False, False, False, True):
            array = layout(data.astype(self.dtype))
            constant = ms.tensor(array) if self.flip() else array
            return self.keep("constant", lambda: constant, lambda: data, (), exact=True)

        def start(t):
            return laid_out(t, array=layout(ms.engine.raw(t)))

        self.leaves.append(data)
        number = len(self.leaves) - 1
        return self.keep("leaf", start, lambda x: x, (), exact=True, leaf=number)

    def sparse_leaf(self, mask, plus=0.0):
        """Make a new sparse operand: a SparseTensor, or a parameter with frozen and tied weights"""
        pattern = ms.Pattern.from_mask(mask)
        if self.choose(False, False, True):
            return self.parameter(pattern, mask, plus)
        values = self.leaf((pattern.nnz,), plus=plus)
        return self.keep(
            "SparseTensor",
            lambda v: ms.SparseTensor(pattern, v),
            lambda v: placed(v, mask),
            (values,),
            exact=True,
        )

    def parameter(self, pattern, mask, plus):
        trainable = self.rng.random(pattern.nnz) < self.choose(1.0, 0.6)
        share = self.rng.integers(0, 4, pattern.nnz) if self.flip() else np.arange(pattern.nnz)
        start = self.numbers(pattern.nnz) + plus
        labels = [*dict.fromkeys(share[trainable].tolist())]
        index = np.array([labels.index(s) if s in labels else 0 for s in share.tolist()], int)
        free = np.array([start[trainable & (share == s)][0] for s in labels])
        base = np.where(trainable, free[index] if labels else 0.0, start)

        def fresh():
            values = base.astype(self.dtype)
            return ms.SparseParameter((pattern, values), trainable=trainable, share=share)

        def expanded(free):
            values = base.astype(free.dtype)
            values[trainable] = free[index[trainable]]
            return placed(values, mask)

        self.leaves.append(free)
        start = self.keep(
            "SparseParameter", lambda W: W, expanded, (), exact=True, leaf=len(self.leaves) - 1
        )
        self.fresh[len(self.leaves) - 1] = fresh
        return start

    def scipy_leaf(self, mask):
        """Make a SciPy matrix, which takes part as a constant."""
        D = self.numbers(mask.shape) * mask
        kind = getattr(sp, f"{self.choose('csr', 'csc', 'coo')}_array")
        rows, columns = np.nonzero(mask)
        A = kind(sp.coo_array((D[mask].astype(self.dtype), (rows, columns)), shape=mask.shape))
        return self.keep("scipy", lambda: A, lambda: Sparse(D, mask), (), exact=True)

    def dense(self, fits=lambda x: True, shape=None, kind="any"):
        """Pick a dense value that fits, the newest first, or make one: of `shape`, if given."""
        found = [
            i
            for i, v in enumerate(self.values)
            if not isinstance(v, Sparse)
            and (shape is None or v.shape == shape)
            and (kind == "any" or 0.3 < v.min(initial=1.0) <= v.max(initial=1.0) < 4)
            and fits(v)
        ][::-1][:4]
        if found and self.choose(True, True, False):
            return self.draw(st.sampled_from(found))
        for _ in range(20):
            made = self.leaf(self.shape() if shape is None else shape, kind)
            if made is not None and fits(self.values[made]):
                return made
        return None

    def sparse(self, fits=lambda S: True, shape=None, plus=None):
        """Pick a sparse value that fits, or make one, with `plus` added to it."""
        found = [
            i
            for i, v in enumerate(self.values)
            if isinstance(v, Sparse)
            and self.nodes[i].name != "scipy"
            and (shape is None or v.shape == shape)
            and fits(v)
        ][::-1][:4]
        if found and self.choose(True, True, False):
            return self.draw(st.sampled_from(found))
        for _ in range(20):
            mask = self.mask((self.side(), self.side()) if shape is None else shape)
            mask = mask if plus is None else mask | (plus != 0)
            if plus is not None or fits(Sparse(mask * 1.0, mask)):
                made = self.sparse_leaf(mask, 0.0 if plus is None else plus[mask])
                return made if made is not None and fits(self.values[made]) else None
        return None

    def keep(self, name, ours, naive, args, exact=False, leaf=None):
        """Add a value if it is tame; return its number, else None."""
        inputs = [self.leaves[leaf]] if leaf is not None else [self.values[i] for i in args]
        with np.errstate(all="ignore"):
            value = naive(*inputs)
        value = value if isinstance(value, Sparse) else np.asarray(value, np.float64)
        numbers = plain(value)
        largest = np.max(np.abs(numbers), initial=0.0)
        if not largest < 100 or math.prod(value.shape) > self.most or len(value.shape) > 5:
            return None
        self.nodes.append(Node(name, ours, naive, tuple(args), leaf))
        self.values.append(value)
        self.exact.append(exact and all(self.exact[i] for i in args))
        return len(self.values) - 1

    def add(self, name):
        """Draw one operation; return the number of its result, or None where it did not fit."""
        drawn = OPS[name](self, name)
        if drawn is None or None in drawn[2]:
            return None
        return self.keep(name, *drawn, exact=name in MOVES)

    @property
    def largest(self):
        """The largest number there is, 1 at least."""
        return max([1.0, *(np.max(np.abs(plain(v)), initial=0) for v in self.values)])

    def at(self, i):
        """Return the interpreter's value of an operand; None of one that could not be made."""
        return None if i is None else self.values[i]

    def tame(self, gaps, *args):
        """Say whether a comparison is settled: no gap is small, but for exact zeros of leaves."""
        there = np.abs(gaps)
        return np.all((there > MARGIN) | ((there == 0) & all(self.exact[i] for i in args)))

    def tensor(self, x):
        """Make a Tensor of what may be an array still."""
        return x if isinstance(x, ms.Tensor) else ms.tensor(x, dtype=self.dtype)

    # ------------------------------------------------------------------------------ running

    def given(self):
        """Make the inputs of a run: fresh leaves that require grad."""
        return [
            self.fresh[i]() if i in self.fresh
            else ms.tensor(x, requires_grad=True, dtype=self.dtype)
            for i, x in enumerate(self.leaves)
        ]  # fmt: skip

    def run(self, *given):
        """Return all values as computed by minisparse."""
        values = []
        for node in self.nodes:
            args = [values[i] for i in node.args] if node.leaf is None else [given[node.leaf]]
            values.append(node.ours(*args))
        return values

    def interpret(self, given, noise=0, only=None, held=None):
        """Return all values as computed by NumPy; None in place of those not in `only`.

        With `noise`, each result is off by a random rounding error, the same for the same number:
        what it changes is what floating point leaves open. What is detached is a constant: with
        `held`, all values of another run, it is what it was there.
        """
        rng, values = np.random.default_rng(noise), []
        eps = np.finfo(self.dtype).eps
        for number, node in enumerate(self.nodes):
            if only is not None and number not in only:
                values.append(None)
                continue
            if held and node.name == "Tensor.detach":
                values.append(held[number])
                continue
            args = [values[i] for i in node.args] if node.leaf is None else [given[node.leaf]]
            value = node.naive(*args)
            if noise:
                x = value.dense if isinstance(value, Sparse) else np.asarray(value)
                x = x * (1 + eps * rng.uniform(-1, 1, x.shape))
                value = Sparse(x, value.mask) if isinstance(value, Sparse) else x
            values.append(value)
        return values

    def __repr__(self):
        lines = [
            f"  {i}: {n.name}{n.args} {'sparse ' * isinstance(v, Sparse)}{v.shape}"
            for i, (n, v) in enumerate(zip(self.nodes, self.values, strict=True))
        ]
        return "\n".join([f"Program({self.dtype}):", *lines])


# ------------------------------------------------------------------------------- the operations

OPS = {}  # name: draw(program, name) -> (ours, naive, numbers of the operands) or None
MOVES = set()  # those whose results are numbers of their operands, or exactly zero


def op(*names, moves=False):
    def register(draw):
        OPS.update(dict.fromkeys(names, draw))
        MOVES.update(names if moves else ())
        return draw

    return register


def spelled(p, name):
    """Draw a way to call an operation by name: ours, NumPy's that comes to us, or a method."""
    ways = [getattr(ms, name)]
    if hasattr(np, name) and name not in ("dot", "matmul"):
        ways.append(getattr(np, name))
    if hasattr(ms.Tensor, name) and name != "transpose":
        ways.append(lambda x, *a, **k: getattr(p.tensor(x), name)(*a, **k))
    return p.choose(*ways)


SQRT2 = math.sqrt(2)
SMOOTH = {  # name: (in NumPy, where it is tame)
    "exp": (np.exp, lambda x: x < 4),
    "expm1": (np.expm1, lambda x: x < 4),
    "log": (np.log, lambda x: x > 0.2),
    "log1p": (np.log1p, lambda x: x > -0.8),
    "sqrt": (np.sqrt, lambda x: x > 0.2),
    "square": (np.square, None),
    "sin": (np.sin, None),
    "cos": (np.cos, None),
    "tan": (np.tan, lambda x: abs(np.cos(x)) > 0.3),
    "arctan": (np.arctan, None),
    "tanh": (np.tanh, lambda x: abs(x) < 20),
    "negative": (np.negative, None),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), lambda x: abs(x) < 20),
    "softplus": (lambda x: np.log1p(np.exp(x)), lambda x: abs(x) < 20),
    "erf": (scipy.special.erf, lambda x: abs(x) < 4),
    "gelu": (lambda x: x * (0.5 + 0.5 * scipy.special.erf(x / SQRT2)), lambda x: abs(x) < 4),
}


@op(*SMOOTH)
def _(p, name):
    f, tame = SMOOTH[name]
    x = p.dense(lambda x: tame is None or np.all(tame(x)), kind=p.choose("any", "positive"))
    x = p.dense(kind="positive") if x is None else x
    ways = [operator.neg] if name == "negative" else []
    return p.choose(spelled(p, name), *ways), f, (x,)


SLOPES = {
    "absolute": np.sign,
    "relu": lambda x: (x > 0) * 1.0,
    "leaky_relu": lambda x: np.where(x > 0, 1.0, 0.125),
    "sign": lambda x: 0 * x,
}


@op(*SLOPES)
def _(p, name):
    x = p.dense()
    if not p.tame(p.at(x), x):
        return None
    slope, offset = SLOPES[name](p.at(x)), np.sign(p.at(x)) if name == "sign" else 0.0
    f = spelled(p, name) if name != "absolute" or p.flip() else abs
    f = (lambda x: ms.leaky_relu(x, negative_slope=0.125)) if name == "leaky_relu" else f
    return f, lambda x: x * slope + offset, (x,)


OPERATORS = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul,
    "divide": operator.truediv, "power": operator.pow,
}  # fmt: skip


def partner(p, shape):
    """Draw a shape that broadcasts with `shape`."""
    kept = tuple(n if p.choose(True, True, False) else 1 for n in shape)
    if len(shape) < 3 and p.choose(False, False, True):
        return 2, *kept
    return kept[p.draw(st.integers(0, len(kept))) :] if p.flip() else kept


@op("add", "subtract", "multiply", "divide", "power", "maximum", "minimum")
def _(p, name):
    kinds = {"divide": ("any", "positive"), "power": ("positive", "any")}
    kind_x, kind_y = kinds.get(name, ("any", "any"))
    x = p.dense(kind=kind_x)
    if name in OPERATORS and p.choose(False, False, False, True):
        number = p.choose(2, 3, 0.5, 1, np.float64(1.5), 0 if name == "power" else -1)
        f = OPERATORS[name]
        if p.flip() and (name != "divide" or np.all(abs(p.at(x)) > 0.3)) and number > 0:
            return (lambda x: f(number, p.tensor(x))), (lambda x: f(number, x)), (x,)
        return (lambda x: f(p.tensor(x), number)), (lambda x: f(x, number)), (x,)
    y = p.dense(shape=partner(p, p.at(x).shape), kind=kind_y)
    x, y = (y, x) if name not in kinds and p.flip() else (x, y)
    ours = p.choose(spelled(p, name), OPERATORS.get(name, getattr(ms, name)))
    if name in ("maximum", "minimum"):
        a, b = p.at(x), p.at(y)
        if not p.tame(a - b, x, y):
            return None
        first = np.where(a == b, 0.5, (a > b) == (name == "maximum"))
        return ours, lambda x, y: x * first + y * (1 - first), (x, y)
    return ours, getattr(np, name), (x, y)


@op("clip")
def _(p, name):
    x = p.dense()
    low, high = p.choose((-0.5, 1.0), (None, 0.5), (0.0, None))
    inside, outside = np.ones(p.at(x).shape), np.zeros(p.at(x).shape)
    for bound, side in ((low, operator.lt), (high, operator.gt)):
        if bound is not None:
            if not p.tame(p.at(x) - bound, x):
                return None
            inside[side(p.at(x), bound)] = 0
            outside[side(p.at(x), bound)] = bound
    f = spelled(p, name)
    return (lambda x: f(x, low, high)), lambda x: x * inside + outside, (x,)


@op("where")
def _(p, name):
    x = p.dense()
    y = p.dense(shape=partner(p, p.at(x).shape))
    condition = p.mask(np.broadcast_shapes(p.at(x).shape, p.at(y).shape))
    f = p.choose(ms.where, np.where)
    return (lambda x, y: f(condition, x, y)), lambda x, y: np.where(condition, x, y), (x, y)


# ------------------------------------------------------------------------------------ reductions


def axes(p, n):
    """Draw an axis argument: all, one, or several."""
    one = st.integers(-n, n - 1) if n else st.none()
    some = st.lists(st.integers(0, n - 1), unique=True, min_size=1).map(tuple) if n else st.none()
    return p.draw(st.none() | one | some)


def count(shape, axis):
    chosen = range(len(shape)) if axis is None else np.atleast_1d(axis)
    return math.prod(shape[i] for i in chosen)


def squares(x, **k):
    return np.sum(x * x, **k)


def variance(x, axis, keepdims, ddof=0):
    n = count(x.shape, axis)
    centred = x - np.sum(x, axis=axis, keepdims=True) / n
    return squares(centred, axis=axis, keepdims=keepdims) / (n - ddof)


REDUCTIONS = {  # name: (in NumPy, where the numbers it is a root of are tame)
    "sum": (np.sum, None),
    "mean": (lambda x, **k: np.sum(x, **k) / count(x.shape, k["axis"]), None),
    "var": (variance, None),
    "std": (lambda x, **k: np.sqrt(variance(x, **k)), variance),
    "norm": (lambda x, **k: np.sqrt(squares(x, **k)), squares),
    "logsumexp": (lambda x, **k: np.log(np.sum(np.exp(x), **k)), None),
}


@op(*REDUCTIONS)
def _(p, name):
    x = p.dense(lambda x: np.all(abs(x) < 20))
    f, (g, root) = spelled(p, name) if name != "norm" else ms.norm, REDUCTIONS[name]
    k = {"axis": axes(p, p.at(x).ndim), "keepdims": p.flip()}
    if not count(p.at(x).shape, k["axis"]):
        if name not in ("sum", "norm"):
            return None
    elif root and root(p.at(x), **k).min(initial=1.0) < 0.05:
        return None
    if name in ("var", "std") and p.flip():
        k["ddof"] = 1
        if count(p.at(x).shape, k["axis"]) == 1:
            return None
    return (lambda x: f(x, **k)), lambda x: g(x, **k), (x,)


@op("max", "min")
def _(p, name):
    x = p.dense()
    v, k = p.at(x), {"axis": axes(p, p.at(x).ndim), "keepdims": p.flip()}
    if not count(v.shape, k["axis"]):
        return None
    best = getattr(np, name)(v, axis=k["axis"], keepdims=True)
    if not p.tame(np.where(v == best, 0.0 if p.exact[x] else 1.0, v - best), x):
        return None
    share = (v == best) * 1.0
    share = share / np.sum(share, axis=k["axis"], keepdims=True)
    if not p.exact[x] and np.any((share > 0) & (share < 1)):
        return None
    f = spelled(p, name)
    return (lambda x: f(x, **k)), lambda x: np.sum(x * share, **k), (x,)


def softmax(x, axis):
    e = np.exp(x)
    return e / np.sum(e, axis=axis, keepdims=True)


@op("softmax", "log_softmax")
def _(p, name):
    x = p.dense(lambda x: x.ndim and np.all(abs(x) < 20))
    if x is None:
        return None
    axis, f = p.draw(st.integers(-p.at(x).ndim, p.at(x).ndim - 1)), getattr(ms, name)
    if not count(p.at(x).shape, axis):
        return None
    g = softmax if name == "softmax" else lambda x, axis: np.log(softmax(x, axis))
    return (lambda x: f(x, axis=axis)), lambda x: g(x, axis), (x,)


# ------------------------------------------------------------------------- shapes and selections


def both(p, name, x, *args, ours=None, naive=None, **k):
    """Return the public function and NumPy's of one operand and the same parameters."""
    f, g = ours or spelled(p, name), naive or getattr(np, name)
    return (lambda x: f(x, *args, **k)), lambda x: g(x, *args, **k), (x,)


@op("ravel", "reshape", "transpose", "squeeze", "expand_dims", "broadcast_to", moves=True)
def _(p, name):
    x = p.dense()
    shape, n = p.at(x).shape, p.at(x).ndim
    if name == "ravel":
        return both(p, name, x)
    if name == "reshape":
        sizes = [(-1,), (1, *shape), (*shape, 1), shape[::-1], (shape[0], -1) if n else ()]
        target = p.choose(*(s for s in sizes if p.at(x).size or -1 not in s))
        return both(p, name, x, target)
    if name == "transpose":
        order = p.draw(st.none() | st.permutations(range(n)).map(tuple))
        if n == 2 and order == (1, 0) and p.flip():
            return (lambda x: x.T), np.transpose, (x,)
        return both(p, name, x, order)
    if name == "squeeze":
        ones = [i for i, m in enumerate(shape) if m == 1]
        return both(p, name, x, p.choose(None, *ones))
    if name == "expand_dims":
        return both(p, name, x, p.draw(st.integers(-n - 1, n)))
    wide = tuple(3 if m == 1 and p.flip() else m for m in shape)
    return both(p, name, x, (2, *wide) if n < 3 and p.flip() else wide)


@op("concatenate", "stack", moves=True)
def _(p, name):
    x = p.dense(lambda x: x.ndim or name == "stack")
    if x is None:
        return None
    shape, n = p.at(x).shape, p.at(x).ndim
    axis = p.draw(st.integers(-n, n - 1 + (name == "stack")))
    other = list(shape)
    if name == "concatenate":
        other[axis] = p.side()
    y = p.dense(shape=tuple(other))
    parts = p.choose([x, y], [x, y, x], [y, x], [x])
    f, g = p.choose(getattr(ms, name), getattr(np, name)), getattr(np, name)
    return (lambda *xs: f(xs, axis=axis)), lambda *xs: g(xs, axis=axis), parts


@op("split", moves=True)
def _(p, name):
    x = p.dense(lambda x: x.ndim)
    if x is None:
        return None
    axis = p.draw(st.integers(-p.at(x).ndim, p.at(x).ndim - 1))
    n = p.at(x).shape[axis]
    cuts = p.draw(st.lists(st.integers(0, n), max_size=2).map(sorted))
    cuts = p.choose(cuts, 1, max(n, 1))
    f, k = p.choose(ms.split, np.split), p.choose(0, -1)
    return (lambda x: f(x, cuts, axis=axis)[k]), lambda x: np.split(x, cuts, axis=axis)[k], (x,)


def places(p, n, shape=None, negative=True):
    """Draw integer indices into an axis of length n."""
    shape = (p.choose(2, 1, 3, 0),) if shape is None else shape
    shape = shape if n else (*shape[:-1], 0)
    return p.rng.integers(-n if negative and n else 0, max(n, 1), shape)


@op("take", "take_along_axis", "index_add", moves=True)
def _(p, name):
    x = p.dense(lambda x: x.ndim)
    if x is None:
        return None
    axis = p.draw(st.integers(-p.at(x).ndim, p.at(x).ndim - 1))
    shape = p.at(x).shape
    n = shape[axis]
    if name == "take":
        flat = p.at(x).size > 0 and p.flip()
        indices = places(p, p.at(x).size if flat else n, p.choose((2,), (), (2, 2)) if n else None)
        return both(p, name, x, indices, axis=None if flat else axis)
    if name == "take_along_axis":
        wanted = list(shape)
        wanted[axis] = p.choose(2, 1, 3) if n else 0
        indices = p.rng.integers(-n, max(n, 1), wanted)
        return both(p, name, x, indices, axis=axis)
    axis %= len(shape)
    indices = places(p, n)
    v = p.dense(shape=shape[:axis] + indices.shape + shape[axis + 1 :])

    def naive(x, v):
        out = np.array(x, np.result_type(x, v))
        np.add.at(out, (slice(None),) * axis + (indices,), v)
        return out

    return (lambda x, v: ms.index_add(x, indices, v, axis=axis)), naive, (x, v)


@op("getitem", moves=True)
def _(p, name):
    x = p.dense()
    shape = p.at(x).shape
    kinds = ["basic", "boolean"] + ["integers", "mixed"] * bool(shape and all(shape))
    kind = p.choose(*kinds)
    if kind == "basic":
        key = p.draw(hnp.basic_indices(shape, allow_newaxis=True, allow_ellipsis=True))
    elif kind == "boolean":
        key = p.mask(shape[: p.draw(st.integers(0, len(shape)))])
    elif kind == "integers":
        key = p.draw(hnp.integer_array_indices(shape, result_shape=st.sampled_from([(2,), (2, 2)])))
    else:
        key = (..., places(p, shape[-1]))
    f = p.choose(ms.getitem, operator.getitem)
    return (lambda x: f(x, key)), lambda x: x[key], (x,)


@op("Tensor.astype", "Tensor.detach", "Tensor.T", moves=True)
def _(p, name):
    x = p.dense()
    if name == "Tensor.detach":  # into a constant: the imaginary part is lost
        return (lambda x: p.tensor(x).detach()), lambda x: np.array(x.real), (x,)
    if name == "Tensor.T":
        return (lambda x: x.T), np.transpose, (x,)
    return (lambda x: p.tensor(x).astype(np.float64).astype(p.dtype)), lambda x: x + 0, (x,)


@op("matmul", "dot")
def _(p, name):
    x = p.dense(lambda x: x.ndim or name == "dot")
    if x is None:
        return None
    shape = p.at(x).shape
    n = shape[-1] if shape else p.side()
    lead = shape[-3:-2] if name == "matmul" else (2,)
    y = p.dense(
        shape=p.choose((n,), (n, p.side()), (*lead, n, p.side()), () if name == "dot" else (n,))
    )
    f = p.choose(getattr(ms, name), operator.matmul if name == "matmul" else np.dot)
    return f, getattr(np, name), (x, y)


# ---------------------------------------------------------------------------------- losses, layers


@op("nn.mse_loss", "nn.bce_with_logits")
def _(p, name):
    x = p.dense(lambda x: np.all(abs(x) < 20))
    y = p.dense(shape=p.at(x).shape)
    how = p.choose("mean", "sum", "none")
    f = getattr(ms.nn, name[3:])

    def naive(x, y):
        e = np.log1p(np.exp(-x)) * y + np.log1p(np.exp(x)) * (1 - y)
        e = (x - y) * (x - y) if name == "nn.mse_loss" else e
        return e if how == "none" else np.sum(e) / (e.size if how == "mean" else 1)

    return (lambda x, y: f(x, y, reduction=how)), naive, (x, y)


@op("nn.cross_entropy")
def _(p, name):
    x = p.dense(lambda x: x.ndim and x.shape[-1] and np.all(abs(x) < 20))
    if x is None:
        return None
    *lead, n = p.at(x).shape
    labels, how = p.rng.integers(0, n, lead), p.choose("mean", "sum", "none")

    def naive(x):
        flat = -np.log(softmax(x, -1)).reshape(-1, n)
        e = flat[np.arange(len(flat)), labels.ravel()].reshape(lead)
        return e if how == "none" else np.sum(e) / (e.size if how == "mean" else 1)

    return (lambda x: ms.nn.cross_entropy(x, labels, reduction=how)), naive, (x,)


@op("nn.Embedding", moves=True)
def _(p, name):
    """The table's gradient is a RowGrad, where `sparse`."""
    x = p.dense(lambda x: x.ndim == 2)
    if x is None:
        return None
    ids = places(p, len(p.at(x)), p.choose((3,), (2, 2), ()) if len(p.at(x)) else None, False)
    table = ms.nn.Embedding(1, 1, sparse=p.flip(), dtype=p.dtype)

    def ours(x):
        table.weight = p.tensor(x)
        return table(ids)

    return ours, lambda x: x[ids], (x,)


@op("nn.Linear", "nn.SparseLinear", "nn.LayerNorm")
def _(p, name):
    x = p.dense(lambda x: x.ndim and x.shape[-1])
    if x is None:
        return None
    n, m = p.at(x).shape[-1], p.side()
    if name == "nn.LayerNorm":
        layer = ms.nn.LayerNorm(n, dtype=p.dtype)
        w, b = p.dense(shape=(n,)), p.dense(shape=(n,))
        if variance(p.at(x), -1, True).min(initial=1.0) < 0.05:
            return None

        def naive(x, w, b):
            v = variance(x, -1, True)
            return (x - np.sum(x, -1, keepdims=True) / n) / np.sqrt(v + 1e-5) * w + b
    else:
        b = p.dense(shape=(m,))
        if name == "nn.Linear":
            w, layer = p.dense(shape=(m, n)), ms.nn.Linear(n, m, dtype=p.dtype)
        else:
            w, layer = p.sparse(shape=(m, n)), ms.nn.SparseLinear(n, m, density=0, dtype=p.dtype)

        def naive(x, w, b):
            return x @ (w.dense if isinstance(w, Sparse) else w).T + b

    def ours(x, w, b):
        layer.weight, layer.bias = (w if isinstance(w, ms.SparseTensor) else p.tensor(w)), b
        return layer(x)

    return ours, naive, (x, w, b)


@op("nn.ReLU", "nn.GELU", "nn.Tanh", "nn.Sigmoid", "nn.Dropout", "nn.Sequential")
def _(p, name):
    same = {"ReLU": "relu", "GELU": "gelu", "Tanh": "tanh", "Sigmoid": "sigmoid"}.get(name[3:])
    if same is None:  # what does nothing
        layer = ms.nn.Dropout(0.5).eval() if name == "nn.Dropout" else ms.nn.Sequential()
        return (lambda x: layer(p.tensor(x))), lambda x: x + 0, (p.dense(),)
    drawn = OPS[same](p, same)
    return drawn and (getattr(ms.nn, name[3:])(), *drawn[1:])


# ------------------------------------------------------------------------------------- sparse


@op("SparseTensor.to_dense", "SparseTensor.values", "SparseTensor.diagonal", moves=True)
def _(p, name):
    S = p.sparse()
    if name == "SparseTensor.values":
        return (lambda S: S.values), lambda S: S.dense[S.mask], (S,)
    f = operator.methodcaller(name[13:])
    return f, lambda S: np.array(S.dense if name[13:] == "to_dense" else S.dense.diagonal()), (S,)


@op("SparseTensor.from_dense", "SparseTensor.with_values", "SparseTensor.from_coords", moves=True)
def _(p, name):
    if name == "SparseTensor.from_dense":
        x = p.dense(lambda x: x.ndim == 2)
        mask = None if x is None else p.mask(p.at(x).shape)
        return (
            lambda x: ms.SparseTensor.from_dense(x, mask),
            lambda x: Sparse(np.where(mask, x, 0), mask),
            (x,),
        )
    if name == "SparseTensor.with_values":
        S = p.sparse()
        v = p.dense(shape=(int(p.at(S).mask.sum()),))
        return (lambda S, v: S.with_values(v)), lambda S, v: placed(v, S.mask), (S, v)
    shape = p.side(), p.side()
    v = p.dense(lambda v: v.ndim == 1 and (all(shape) or not v.size))
    if v is None:
        return None
    rows, columns = (p.rng.integers(0, max(n, 1), len(p.at(v))) for n in shape)
    mask = np.zeros(shape, bool)
    mask[rows, columns] = True

    def naive(v):
        out = np.zeros(shape, v.dtype)
        np.add.at(out, (rows, columns), v)
        return Sparse(out, mask)

    return (lambda v: ms.SparseTensor.from_coords(rows, columns, v, shape)), naive, (v,)


@op("SparseTensor.T", "SparseTensor.astype", "SparseTensor.__neg__", "SparseTensor.from_scipy")
def _(p, name):
    if name == "SparseTensor.from_scipy":
        A = p.scipy_leaf(p.mask((p.side(), p.side())))
        return ms.SparseTensor.from_scipy, lambda A: A, (A,)
    f, g = {
        "SparseTensor.T": (lambda S: S.T, lambda x: x.T),
        "SparseTensor.astype": (
            lambda S: S.astype(np.float64).astype(p.dtype),
            lambda x: x + 0,
        ),
        "SparseTensor.__neg__": (operator.neg, operator.neg),
    }[name]
    return f, lambda S: Sparse(g(S.dense), g(S.mask) if name[-1] == "T" else S.mask), (p.sparse(),)


@op(
    "SparseTensor.__truediv__",
    "SparseTensor.__mul__",
    "SparseTensor.__rmul__",
    "multiply of sparse",
)
def _(p, name):
    S = p.sparse()
    if name == "SparseTensor.__truediv__":
        d = p.dense(shape=(), kind="positive")
        return operator.truediv, lambda S, d: Sparse(S.dense / d, S.mask), (S, d)
    f = operator.mul if "__" in name else ms.multiply
    other = p.choose("dense", "sparse", "scipy")
    if other == "dense":
        n_rows, n_cols = p.at(S).shape
        shape = p.choose((), (1,), (n_cols,), (1, n_cols), (n_rows, 1), (n_rows, n_cols))
        d = p.dense(shape=shape)
        naive = lambda S, d: Sparse(np.where(S.mask, S.dense * d, 0), S.mask)  # noqa: E731
    else:
        d = another(p, p.at(S).shape, other)
        naive = lambda S, R: Sparse(S.dense * R.dense, S.mask & R.mask)  # noqa: E731
    if name == "SparseTensor.__mul__" or (other == "scipy" and "__" in name):
        return f, naive, (S, d)
    return (lambda d, S: f(d, S)), lambda d, S: naive(S, d), (d, S)


def another(p, shape, kind="sparse"):
    return p.scipy_leaf(p.mask(shape)) if kind == "scipy" else p.sparse(shape=shape)


@op(
    "SparseTensor.__add__", "SparseTensor.__radd__", "SparseTensor.__sub__", "SparseTensor.__rsub__"
)
def _(p, name):
    S = p.sparse()
    R = another(p, p.at(S).shape, p.choose("sparse", "scipy"))
    f = operator.sub if "sub" in name else operator.add
    if "__r" in name:
        ours, sign = (lambda S, R: f(R, S)), (-1 if "sub" in name else 1, 1)
    else:
        ours, sign = f, (1, -1 if "sub" in name else 1)
    if name == "SparseTensor.__radd__" and p.flip():
        ours = lambda S, R: sum([S, ms.SparseTensor.from_scipy(R) if sp.issparse(R) else R])  # noqa: E731

    def naive(S, R):
        return Sparse(sign[0] * S.dense + sign[1] * R.dense, S.mask | R.mask)

    return ours, naive, (S, R)


def product(S, R):
    return Sparse(S.dense @ R.dense, S.mask.astype(int) @ R.mask.astype(int) > 0)


@op("SparseTensor.__matmul__", "SparseTensor.__rmatmul__", "matmul of sparse")
def _(p, name):
    S = p.sparse()
    n_rows, n_cols = p.at(S).shape
    right = name != "SparseTensor.__rmatmul__" and (p.flip() or "of" not in name)
    f = ms.matmul if "of" in name else operator.matmul
    kind = p.choose("dense", "dense", "sparse", "scipy" if f is ms.matmul else "sparse")
    if kind != "dense":
        x = another(p, (n_cols, p.side()) if right else (p.side(), n_rows), kind)
        ours, naive = f, product
    else:
        n, k = (n_cols if right else n_rows), p.side()
        lead = p.choose((), (), (2,), (1, 3), (p.side(),))
        x = p.dense(shape=p.choose((n,), (*lead, n, k) if right else (*lead, k, n)))
        if f is ms.matmul and p.choose(False, False, True):
            S = p.scipy_leaf(p.mask((n_rows, n_cols)))
            f = lambda a, b: ms.matmul(*(p.tensor(v) if not sp.issparse(v) else v for v in (a, b)))  # noqa: E731
        ours, naive = f, lambda x, y: np.matmul(*(getattr(v, "dense", v) for v in (x, y)))
    return ours, naive, (S, x) if right else (x, S)


@op("SparseTensor.scale")
def _(p, name):
    S = p.sparse()
    n_rows, n_cols = p.at(S).shape
    keys = p.choose(("rows",), ("cols",), ("rows", "cols"), ())
    factors = [p.dense(shape=(n_rows if key == "rows" else n_cols,)) for key in keys]

    def naive(S, *factors):
        D = S.dense
        for key, v in zip(keys, factors, strict=True):
            D = D * (v[:, None] if key == "rows" else v)
        return Sparse(D, S.mask)

    return (lambda S, *v: S.scale(**dict(zip(keys, v, strict=True)))), naive, (S, *factors)


@op("SparseTensor.sum")
def _(p, name):
    axis = p.choose(None, 0, 1, -1, -2)
    return (lambda S: S.sum(axis=axis)), lambda S: np.sum(S.dense, axis=axis), (p.sparse(),)


@op("SparseTensor.__getitem__", moves=True)
def _(p, name):
    S = p.sparse()
    n = p.at(S).shape[0]
    rows = p.choose(
        places(p, n),
        p.rng.random(n) < 0.5,
        p.draw(st.slices(n)),
        places(p, n).tolist() if n else np.zeros(0, int),
    )
    return (lambda S: S[rows]), lambda S: Sparse(S.dense[rows], S.mask[rows]), (S,)


@op(*[f"SparseTensor.row_{what}" for what in ("mean", "max", "logsumexp", "softmax")])
def _(p, name):
    least = name[-3:] in ("max", "exp") and not name.endswith("softmax")
    S = p.sparse(lambda S: np.all(abs(S.dense) < 20) and (not least or S.mask.any(axis=1).all()))
    if S is None:
        return None
    v, mask = p.at(S)
    ours = operator.methodcaller(name[13:])
    if name.endswith("row_mean"):
        counts = np.maximum(mask.sum(axis=1), 1)
        return ours, lambda S: S.dense.sum(axis=1) / counts, (S,)
    if name.endswith("row_max"):
        best = np.max(np.where(mask, v, -np.inf), axis=1, keepdims=True, initial=-np.inf)
        hit = mask & (v == best)
        if not p.tame(np.where(hit | ~mask, 1.0, v - best), S):
            return None
        if not p.exact[S] and np.any(hit.sum(axis=1) > 1):
            return None
        share = hit / np.maximum(hit.sum(axis=1, keepdims=True), 1)
        return ours, lambda S: np.sum(S.dense * share, axis=1), (S,)

    def total(S):
        e = np.where(S.mask, np.exp(S.dense), 0)
        return e, np.sum(e, axis=1)

    if name.endswith("row_logsumexp"):
        return ours, lambda S: np.log(total(S)[1]), (S,)
    none = ~mask.any(axis=1)
    return ours, lambda S: Sparse(total(S)[0] / (total(S)[1] + none)[:, None], S.mask), (S,)


@op("block", "block_diag")
def _(p, name):
    def part(shape, kinds):
        kind = p.choose(*kinds)
        if kind == "none":
            return None
        if kind != "dense":
            return another(p, shape, kind)
        return p.dense(shape=shape)

    if name == "block_diag":
        parts = [
            another(p, (p.side(), p.side()), p.choose("sparse", "sparse", "scipy"))
            for _ in range(p.choose(2, 1, 3))
        ]
        grid = [[s if i == j else None for j, s in enumerate(parts)] for i in range(len(parts))]
    else:
        heights, widths = ([p.side() for _ in range(p.choose(2, 1))] for _ in range(2))
        kinds = "sparse", "sparse", "none", "dense", "scipy"
        grid = [[part((h, w), kinds) for w in widths] for h in heights]
        if any(all(s is None for s in line) for line in (*grid, *zip(*grid, strict=True))):
            return None
    flat = [s for row in grid for s in row]
    args = [s for s in flat if s is not None]
    shapes = [[None if s is None else p.at(s).shape for s in row] for row in grid]
    rows = [next(s[0] for s in row if s) for row in shapes]
    columns = [next(s[1] for s in column if s) for column in zip(*shapes, strict=True)]

    def arranged(given, fill):
        given = iter(given)
        return [[fill if s is None else next(given) for s in row] for row in grid]

    def ours(*given):
        given = [
            g if sp.issparse(g) or isinstance(g, ms.SparseTensor) else p.tensor(g) for g in given
        ]
        return ms.block_diag(given) if name == "block_diag" else ms.block(arranged(given, None))

    def naive(*given):
        out = np.zeros((sum(rows), sum(columns)), np.result_type(*(plain(g) for g in given)))
        mask = np.zeros(out.shape, bool)
        top = 0
        for height, line in zip(rows, arranged(given, None), strict=True):
            left = 0
            for width, g in zip(columns, line, strict=True):
                if g is not None:
                    at = slice(top, top + height), slice(left, left + width)
                    out[at], mask[at] = g if isinstance(g, Sparse) else (g, True)
                left += width
            top += height
        return Sparse(out, mask)

    return ours, naive, args


@op("diag", moves=True)
def _(p, name):
    v = p.dense(lambda v: v.ndim == 1)
    return ms.diag, lambda v: Sparse(np.diag(v), np.eye(len(v), dtype=bool)), (v,)


@op("sddmm")
def _(p, name):
    shape, k = (p.side(), p.side()), p.choose((p.side(),), ())
    U, V = (p.dense(shape=(n, *k)) for n in shape)
    mask = p.mask(shape)
    pattern = ms.Pattern.from_mask(mask)

    def naive(U, V):
        full = U @ V.T if k else np.multiply.outer(U, V)
        return Sparse(np.where(mask, full, 0), mask)

    return (lambda U, V: ms.sddmm(U, V, pattern)), naive, (U, V)


@op("spsolve")
def _(p, name):
    n = p.side()
    S = p.sparse(lambda S: n == 0 or np.linalg.cond(S.dense) < 20, (n, n), 9 * np.eye(n))
    b = p.dense(shape=p.choose((n,), (n, p.side())))
    return ms.spsolve, lambda S, b: np.linalg.solve(S.dense, b), (S, b)


TRANSFORMS = ("vjp", "jvp", "hvp", "jacobian", "hessian", "value_and_grad")
SMALL, LARGE = (2, 3, 1, 4, 0), (40, 200, 1, 170)


@st.composite
def programs(draw, dtypes=(np.float64, np.float32), names=None, most=8):
    """Draw programs; now and then one of operands as large as those that kernels cut up."""
    large = draw(st.sampled_from([False] * 19 + [True])) if names is None else False
    sides, size = (LARGE, 60_000) if large else (SMALL, 400)
    p = Program(draw, draw(st.sampled_from(dtypes)), sides, size)
    names = st.sampled_from(sorted(OPS)) if names is None else names
    for name in draw(st.lists(names, min_size=1, max_size=3 if large else most)):
        p.add(name)
    return p
