"""Random graphs, grown step by step, against a naive engine that shares no idea with ours.

The naive engine differentiates forwards, with dual numbers, one direction at a time, by formulas of
its own.  It also keeps the books on what may be walked: which results were freed, and which arrays
that a gradient needs have been changed in place since.
"""

import copy
import itertools
import operator

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.extra import numpy as hnp
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import minisparse as ms
from minisparse import testing as mt

WIDE = ms.Pattern((2, 3), [0, 2, 3], [0, 2, 1])
SQUARE = ms.Pattern((3, 3), [0, 2, 2, 3], [0, 2, 1])  # with an empty row
SHAPES = [(), (3,), (2,), (2, 3), (3, 2), (1, 3), (2, 1), (3, 3)]

# ------------------------------------------------------------------------------ the naive engine

tags = itertools.count()


class Dual:
    """``v + t ε`` with ε² = 0, one ε for each tag; v and t may hold older tags only."""

    def __init__(self, tag, v, t):
        self.tag, self.v, self.t = tag, v, t


def parts(xs):
    """Split operands by their newest tag: (tag or None, values, tangents or None)."""
    tag = max((x.tag for x in xs if isinstance(x, Dual)), default=None)
    own = [isinstance(x, Dual) and x.tag == tag for x in xs]
    values = [x.v if o else x for x, o in zip(xs, own, strict=True)]
    return tag, values, [x.t if o else None for x, o in zip(xs, own, strict=True)]


def zeros(x):
    return zeros(x.v) if isinstance(x, Dual) else np.zeros_like(x)


def linear(f, *xs):
    """Apply a function that is linear in all its operands together."""
    tag, values, tangents = parts(xs)
    if tag is None:
        return f(*values)
    tangents = [zeros(v) if t is None else t for v, t in zip(values, tangents, strict=True)]
    return Dual(tag, linear(f, *values), linear(f, *tangents))


def bilinear(f, x, y):
    """Apply a function that is linear in each of its two operands."""
    tag, (xv, yv), (xt, yt) = parts((x, y))
    if tag is None:
        return f(xv, yv)
    terms = [] if xt is None else [bilinear(f, xt, yv)]
    terms += [] if yt is None else [bilinear(f, xv, yt)]
    return Dual(tag, bilinear(f, xv, yv), linear(np.add, *terms) if terms[1:] else terms[0])


def times(x, y):
    return bilinear(np.multiply, x, y)


CURVES = {  # a function, and its derivative at x
    "exp": (np.exp, lambda x: curve("exp", x)),
    "sin": (np.sin, lambda x: curve("cos", x)),
    "cos": (np.cos, lambda x: times(-1.0, curve("sin", x))),
    "square": (np.square, lambda x: times(2.0, x)),
    "inverse": (lambda x: 1 / x, lambda x: times(-1.0, curve("square", curve("inverse", x)))),
    "tanh": (
        np.tanh,
        lambda x: curve("square", curve("inverse", curve("cosh", x))),
    ),
    "cosh": (np.cosh, lambda x: curve("sinh", x)),
    "sinh": (np.sinh, lambda x: curve("cosh", x)),
}


def curve(name, x):
    f, derivative = CURVES[name]
    if isinstance(x, Dual):
        return Dual(x.tag, curve(name, x.v), times(derivative(x.v), x.t))
    return f(x)


class Node:
    """One value of the graph: `key` stays the same when its memory is changed in place."""

    def __init__(self, f, args=(), tracked=False, value=None, key=None):
        self.f, self.args, self.tracked = f, args, tracked
        self.key = self if key is None else key
        above = frozenset().union(*(a.keys for a in args))
        self.keys = above | {self.key} if tracked else frozenset()
        self.value = f({}, *args) if value is None else value
        self.saved, self.state, self.watched = (), "whole", None


def seeded(x, tag, direction):
    """Move x in a direction of its own; the dual number of the youngest tag stays outermost."""
    if isinstance(x, Dual) and x.tag > tag:
        return Dual(x.tag, seeded(x.v, tag, direction), x.t)
    return Dual(tag, x, direction)


def evaluate(node, seeds):
    """Return the value of a node as a dual number; seeds: {key: [(tag, direction), ...]}."""
    if not seeds.keys() & node.keys:
        return node.value
    memo = seeds.setdefault("memo", {})
    if node not in memo:
        x = node.f(seeds, *node.args) if node.args else node.value
        for tag, direction in seeds.get(node.key, ()):
            x = seeded(x, tag, direction)
        memo[node] = x
    return memo[node]


def apply(f):
    """Make a function of values into one of nodes."""
    return lambda seeds, *args: f(*(evaluate(a, seeds) for a in args))


def gradient(seeds, y, x, c):
    """Return the gradient of ``sum(c * y)`` with respect to x, one direction after the other."""
    results, c = [], evaluate(c, seeds)
    for index in np.ndindex(x.value.shape):
        tag, direction = next(tags), np.zeros_like(x.value)
        direction[index] = 1
        inner = {k: v for k, v in seeds.items() if k != "memo"}
        inner[x.key] = [*inner.get(x.key, ()), (tag, direction)]
        result = evaluate(y, inner)
        own = isinstance(result, Dual) and result.tag == tag
        results.append(linear(np.sum, times(c, result.t if own else zeros(y.value))))
    return linear(lambda *r: np.array(r).reshape(x.value.shape), *results)


def plan(root, targets):
    """Say whether a walk must succeed ("whole"), must fail ("broken"), or may do either."""
    wanted, ran, verdicts = {}, [], {"whole"}

    def visit(node, hidden):
        if not node.tracked:
            return False
        if (node, hidden) in wanted:
            return wanted[node, hidden]
        if node.watched is not None:  # the gradient of a gradient: its nodes are not ours to see
            hidden = True
            verdicts.update("either" for memory, then in node.watched if memory[0] != then)
        needs = [visit(a, hidden) for a in node.args]
        if any(needs):
            ran.append((node, hidden))
            broken = node.state == "freed" or any(
                memory[0] != then and (serves is None or needs[serves])
                for memory, then, serves in node.saved
            )
            if broken or node.state == "unknown":
                verdicts.add("broken" if broken and not hidden else "either")
        wanted[node, hidden] = any(needs) or targets is None or node.key in targets
        return wanted[node, hidden]

    visit(root, False)
    return next(v for v in ("broken", "either", "whole") if v in verdicts), ran


# ------------------------------------------------------------------------- what is put to the test


def placed(pattern, values):
    out = np.zeros(pattern.shape)
    out[pattern.rows, pattern.indices] = values
    return out


def sparse(v, x, *, pattern, transpose, left):
    S = ms.SparseTensor(pattern, v)
    S = S.T if transpose else S
    return x @ S if left else S @ x


def naive_sparse(v, x, *, pattern, transpose, left):
    def product(v, x):
        S = placed(pattern, v)
        S = S.T if transpose else S
        return x @ S if left else S @ x

    return bilinear(product, v, x)


# Name: (ours, the naive one, what its gradient has to keep as (operand, gradient it serves)).
BOTH = ((0, 1), (1, 0))
OPS = {
    "add": (operator.add, lambda x, y: linear(np.add, x, y), ()),
    "subtract": (operator.sub, lambda x, y: linear(np.subtract, x, y), ()),
    "multiply": (operator.mul, times, BOTH),
    "divide": (
        operator.truediv,
        lambda x, y: times(x, curve("inverse", y)),
        ((1, None), ("out", 1)),
    ),
    "maximum": (
        lambda x, y, share: ms.maximum(x, y),
        lambda x, y, share: linear(lambda x, y: share * x + (1 - share) * y, x, y),
        ((0, None), (1, None)),
    ),
    "relu": (
        lambda x, mask: ms.relu(x),
        lambda x, mask: linear(lambda x: mask * x, x),
        (("out", 0),),
    ),
    "negative": (operator.neg, lambda x: linear(np.negative, x), ()),
    "exp": (np.exp, lambda x: curve("exp", x), (("out", 0),)),
    "sin": (ms.sin, lambda x: curve("sin", x), ((0, 0),)),
    "tanh": (ms.tanh, lambda x: curve("tanh", x), (("out", 0),)),
    "square": (ms.square, lambda x: curve("square", x), ((0, 0),)),
    "sum": (ms.sum, lambda x, **k: linear(lambda x: np.sum(x, **k), x), ()),
    "reshape": (ms.reshape, lambda x, shape: linear(lambda x: np.reshape(x, shape), x), ()),
    "transpose": (ms.transpose, lambda x: linear(np.transpose, x), ()),
    "broadcast": (
        ms.broadcast_to,
        lambda x, shape: linear(lambda x: np.broadcast_to(x, shape), x),
        (),
    ),
    "getitem": (
        lambda x, key: x[key],
        lambda x, key: linear(lambda x: np.asarray(x[key]), x),
        (),
    ),
    "concatenate": (
        lambda *xs, axis: ms.concatenate(xs, axis=axis),
        lambda *xs, axis: linear(lambda *xs: np.concatenate(xs, axis=axis), *xs),
        (),
    ),
    "stack": (
        lambda *xs: ms.stack(xs),
        lambda *xs: linear(lambda *xs: np.stack(xs), *xs),
        (),
    ),
    "matmul": (operator.matmul, lambda x, y: bilinear(np.matmul, x, y), BOTH),
    "spmm": (sparse, naive_sparse, BOTH),
    "sddmm": (
        lambda u, v, pattern: ms.sddmm(u, v, pattern).values,
        lambda u, v, pattern: bilinear(
            lambda u, v: np.asarray(u @ v.T)[pattern.rows, pattern.indices], u, v
        ),
        BOTH,
    ),
    "to_dense": (
        lambda v, pattern: ms.SparseTensor(pattern, v).to_dense(),
        lambda v, pattern: linear(lambda v: placed(pattern, v), v),
        (),
    ),
}
UNARY = ("relu", "negative", "exp", "sin", "tanh", "square")
SIZES = st.integers(0, 2)


def close(got, expected):
    assert np.shape(got) == np.shape(expected)
    assert np.all(np.abs(got - expected) <= 1e-6 + 1e-7 * np.abs(expected))


class Entry:
    """A Tensor of ours beside the naive node, and the memory it sees: [times it was changed]."""

    def __init__(self, t, n, memory):
        self.t, self.n, self.memory = t, n, memory

    def __repr__(self):
        return f"{self.t!r}".replace("\n", "")


class Graphs(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool, self.grads, self.recording = [], {}, True

    def teardown(self):
        """At the end, the gradient of every result, each on its own."""
        leaves = list(self.leaves().values())
        for y in self.pool if leaves else ():
            if y.n.tracked and y.n.args:
                c = np.arange(1.0, y.t.size + 1).reshape(y.t.shape)
                self.compare(y, leaves, c, constant(c), True)

    # ------------------------------------------------------------------------------- helpers

    def pick(self, data, fits=lambda t: True):
        """Draw an entry that fits, the newest first; None if there is none."""
        fitting = [e for e in reversed(self.pool) if fits(e.t)]
        return data.draw(st.sampled_from(fitting)) if fitting else None

    def keep(self, t, n):
        """Compare a new result with the naive one, and put it into the pool if it is tame."""
        close(t.data, n.value)
        assert t.shape == n.value.shape
        assert t.requires_grad == n.tracked
        memory = [e.memory for e in self.pool if np.shares_memory(e.t.data, t.data)]
        entry = Entry(t, n, memory[0] if memory else [0])
        if t.size <= 9 and t.ndim <= 3 and np.all(np.abs(n.value) < 100):
            self.pool.append(entry)
        return entry

    def call(self, name, *operands, hidden=None, **k):
        """Run an operation on entries and plain arrays, both ways."""
        if any(o is None for o in operands):
            return
        ours, naive, needs = OPS[name]
        values = [o.t if isinstance(o, Entry) else o for o in operands]
        k = {**k, **(hidden or {})}
        t = ours(*values, **k)
        args = [o.n if isinstance(o, Entry) else constant(o) for o in operands]
        tracked = self.recording and any(a.tracked for a in args)
        own = copy.deepcopy(k)  # the caller may change his
        n = Node(apply(lambda *xs: naive(*xs, **own)), args, tracked)
        entry = self.keep(t, n)
        if tracked:
            plain = [0]
            seen = [o.memory if isinstance(o, Entry) else plain for o in operands]
            kept = [(entry.memory if i == "out" else seen[i], s) for i, s in needs]
            n.saved = [(m, m[0], s) for m, s in kept if s is None or args[s].tracked]

    def changed(self, entry, value):
        """Note that the memory of a leaf holds new numbers, and with it that of its views."""
        entry.memory[0] += 1
        new = {entry.n: Node(None, (), entry.n.tracked, value, entry.n.key)}

        def again(n):
            if n not in new:
                new[n] = Node(n.f, [again(a) for a in n.args], n.tracked, key=n.key)
            return new[n]

        for e in self.pool:
            if e.memory is entry.memory:
                e.n = again(e.n)

    # ------------------------------------------------------------------------------- building

    @initialize(data=st.data())
    def begin(self, data):
        for shape in ((3,), (2, 3), (3, 3)):
            self.new(data, shape, True)

    @rule(data=st.data(), shape=st.sampled_from(SHAPES), requires_grad=st.booleans())
    def new(self, data, shape, requires_grad):
        x = data.draw(mt.arrays(shape=shape, exact=True)) / 4
        leaf = ms.tensor(x, requires_grad=requires_grad)
        self.pool.append(Entry(leaf, Node(None, (), requires_grad, np.array(x)), [0]))

    @rule(data=st.data(), name=st.sampled_from(UNARY))
    def unary(self, data, name):
        x = self.pick(data)
        self.call(name, x, hidden={"mask": x.t.data > 0} if name == "relu" else None)

    @rule(
        data=st.data(),
        name=st.sampled_from(["add", "subtract", "multiply", "divide", "maximum"]),
        plain=st.sampled_from([None, "left", "right"]),
    )
    def binary(self, data, name, plain):
        x = self.pick(data)
        if plain is None:
            y = self.pick(data, lambda t: joint(x.t.shape, t.shape) is not None)
        else:
            shapes = [s for s in SHAPES if joint(x.t.shape, s) is not None]
            y = data.draw(mt.arrays(shape=st.sampled_from(shapes), exact=True))
        x, y = (y, x) if plain == "left" else (x, y)
        a, b = (o.t.data if isinstance(o, Entry) else o for o in (x, y))
        if name == "divide" and np.min(np.abs(b)) < 0.25:
            return
        hidden = {"share": np.where(a == b, 0.5, a > b)} if name == "maximum" else None
        self.call(name, x, y, hidden=hidden)

    @rule(data=st.data(), keepdims=st.booleans())
    def sum(self, data, keepdims):
        x = self.pick(data)
        axis = data.draw(st.none() | st.integers(-x.t.ndim, x.t.ndim - 1)) if x.t.ndim else None
        self.call("sum", x, axis=axis, keepdims=keepdims)

    @rule(data=st.data(), kind=st.sampled_from(["transpose", "reshape", "broadcast", "getitem"]))
    def view(self, data, kind):
        x = self.pick(data)
        shape = x.t.shape
        if kind == "transpose":
            self.call(kind, x)
        elif kind == "reshape":
            options = [s for s in [*SHAPES, (-1,), (1, *shape)] if np.prod(s) in (x.t.size, -1)]
            self.call(kind, x, shape=data.draw(st.sampled_from(options)))
        elif kind == "broadcast":
            options = [s for s in SHAPES if joint(shape, s) == s]
            if options:
                self.call(kind, x, shape=data.draw(st.sampled_from(options)))
        elif shape:
            keys = hnp.basic_indices(shape)
            key = data.draw(keys.filter(lambda k: np.empty(shape)[k].size))
            self.call(kind, x, key=key)

    @rule(data=st.data(), boolean=st.booleans())
    def pick_entries(self, data, boolean):
        x = self.pick(data, lambda t: t.ndim)
        if x is None:
            return
        if boolean:
            key = data.draw(hnp.arrays(bool, x.t.shape))
            key.flat[0] = True
        else:
            n = x.t.shape[0]
            key = np.array(data.draw(st.lists(st.integers(-n, n - 1), min_size=1, max_size=3)))
        self.call("getitem", x, key=key)
        key[...] = 0  # it was the caller's, who may use it for something else

    @rule(data=st.data(), stack=st.booleans())
    def join(self, data, stack):
        x = self.pick(data, lambda t: t.ndim or stack)
        if x is not None and stack:
            self.call("stack", x, self.pick(data, lambda t: t.shape == x.t.shape))
        elif x is not None:
            rest = x.t.shape[1:]
            self.call(
                "concatenate",
                x,
                self.pick(data, lambda t: t.ndim and t.shape[1:] == rest),
                axis=data.draw(st.sampled_from([0, -x.t.ndim])),
            )

    @rule(data=st.data(), plain=st.booleans())
    def matmul(self, data, plain):
        x = self.pick(data, lambda t: t.ndim in (1, 2))
        if x is None:
            return
        n = x.t.shape[-1]
        if plain:
            x = np.arange(2.0 * x.t.shape[0]).reshape(2, -1) / 4, x
        else:
            x = x, self.pick(data, lambda t: t.ndim in (1, 2) and t.shape[0] == n)
        self.call("matmul", *x)

    @rule(
        data=st.data(),
        pattern=st.sampled_from([WIDE, SQUARE]),
        transpose=st.booleans(),
        left=st.booleans(),
    )
    def sparse_product(self, data, pattern, transpose, left):
        n = pattern.shape[left == transpose]  # what x has to have
        values = self.pick(data, lambda t: t.shape == (3,))
        x = self.pick(data, lambda t: t.ndim and t.shape[-1 if left or t.ndim == 1 else -2] == n)
        self.call("spmm", values, x, pattern=pattern, transpose=transpose, left=left)

    @rule(data=st.data(), pattern=st.sampled_from([WIDE, SQUARE]), k=st.integers(1, 3))
    def sddmm_or_to_dense(self, data, pattern, k):
        u, v = (self.pick(data, lambda t, n=n: t.shape == (n, k)) for n in pattern.shape)
        if u is not None and v is not None:
            self.call("sddmm", u, v, pattern=pattern)
        else:
            self.call("to_dense", self.pick(data, lambda t: t.shape == (3,)), pattern=pattern)

    @rule(data=st.data())
    def detach(self, data):
        x = self.pick(data)
        self.keep(x.t.detach(), Node(apply(lambda x: x), [x.n], False))

    # ---------------------------------------------------------------- modes and in-place changes

    @rule(data=st.data(), n=st.integers(1, 3), nested=st.booleans(), fails=st.booleans())
    def without_recording(self, data, n, nested, fails):
        """CASES 28: nested, and left by an exception."""
        self.recording = False
        try:
            with ms.no_grad():
                if nested:
                    with ms.no_grad():
                        assert not ms.is_grad_enabled()
                for _ in range(n):
                    assert not ms.is_grad_enabled()
                    step = data.draw(st.sampled_from(["unary", "binary", "view", "backward"]))
                    if step == "unary":
                        self.unary(data, data.draw(st.sampled_from(UNARY)))
                    elif step == "binary":
                        self.binary(data, "multiply", None)
                    elif step == "view":
                        self.view(data, "transpose")
                    else:
                        self.backward(data, True, 1)
                if fails:
                    raise KeyError
        except KeyError:
            assert fails
        self.recording = True

    @rule(data=st.data(), how=st.sampled_from(["+=", "*=", "[]=", "data", "detached", "step"]))
    def change_in_place(self, data, how):
        """CASES 26: also through a view or a detached Tensor; what was saved is then refused."""
        entry = self.pick(data, lambda t: not t.requires_grad or t in self.leaves())
        if entry is None or entry.n.args:  # a leaf, or a constant that nothing made
            return
        t, new = entry.t, np.array(entry.n.value)
        if how == "step":
            if t.grad is None:
                return
            ms.optim.SGD([t], lr=0.25).step()
            new = new - 0.25 * t.grad
        elif how == "data":
            t.data = new = new + 0.25
        else:
            target = t.detach() if how == "detached" else t
            with ms.no_grad():
                if how == "*=":
                    target *= 0.5
                    new = new * 0.5
                elif how == "[]=" and t.ndim:
                    target[0] = 0.75
                    new[0] = 0.75
                else:
                    target += 0.25
                    new = new + 0.25
        self.changed(entry, new)

    @rule(data=st.data())
    def not_in_place_while_recording(self, data):
        entry = self.pick(data, lambda t: t.requires_grad)
        if entry is None:
            return
        t = entry.t
        with pytest.raises(RuntimeError, match="no_grad"):
            t[...] = 0
        if not entry.n.args:
            with pytest.raises(RuntimeError, match="no_grad"):
                t += 1
        else:
            before = t
            t += 1  # makes a new Tensor
            assert t is not before
            close(t.data, entry.n.value + 1)

    # ------------------------------------------------------------------------------- gradients

    def leaves(self):
        return {e.t: e for e in self.pool if e.n.tracked and not e.n.args}

    def cotangent(self, data, t):
        if t.size == 1 and data.draw(st.booleans()):
            return None, constant(np.ones(t.shape))
        c = data.draw(mt.cotangents(shape=t.shape, exact=True))
        return c, constant(c)

    def walk(self, root, targets, retain, run):
        """Run a walk that must succeed, must fail or may do either, and note what it freed."""
        verdict, ran = plan(root, targets)
        try:
            result = run()
        except RuntimeError as error:
            said = any(words in str(error) for words in ("was freed", "changed in place"))
            if verdict == "whole" or not said:
                raise
            return None
        assert verdict != "broken"
        for node, hidden in ran:
            if not retain and (node.saved or node.watched is not None):
                unsure = hidden and node.state == "whole"
                node.state = "unknown" if unsure else "freed" if not hidden else node.state
        return result, any(hidden for _, hidden in ran)

    def pick_result(self, data, fits=lambda e: True):
        """Draw an entry that requires grad, one that was computed if there is any."""
        tracked = [e for e in reversed(self.pool) if e.n.tracked and fits(e)]
        computed = [e for e in tracked if e.n.args]
        return data.draw(st.sampled_from(computed or tracked)) if tracked else None

    @rule(data=st.data(), retain=st.booleans(), times=st.integers(1, 2))
    def backward(self, data, retain, times):
        """CASES 23, 24: gradients add up; a graph that was freed says so."""
        y = self.pick_result(data)
        for _ in range(times):
            self.backward_from(data, y, retain)

    def backward_from(self, data, y, retain):
        c, naive_c = self.cotangent(data, y.t)
        done = self.walk(y.n, None, retain, lambda: y.t.backward(c, retain_graph=retain))
        if done is None:
            return
        for t, e in self.leaves().items():
            if e.n.key in y.n.keys:
                g = gradient({}, y.n, e.n, naive_c)
                if done[1] and t.grad is None:  # a gradient of a gradient may not depend on it
                    close(g, np.zeros_like(g))
                    continue
                self.grads[t] = self.grads.get(t, 0) + g
                assert not any(np.shares_memory(t.grad, e.t.data) for e in self.pool)
                assert c is None or not np.shares_memory(t.grad, c)

    @rule(data=st.data())
    def backward_from_a_constant(self, data):
        y = self.pick(data, lambda t: not t.requires_grad)
        if y is not None:
            with pytest.raises(RuntimeError, match="does not require grad"):
                y.t.backward(np.ones(y.t.shape))

    @rule(data=st.data(), retain=st.booleans())
    def grad(self, data, retain):
        """Also with respect to what is no leaf, to two inputs, and to what is not there."""
        y = self.pick_result(data)
        xs = [self.pick(data) for _ in range(data.draw(st.integers(1, 2)))]
        c, naive_c = self.cotangent(data, y.t)
        if all(x.t.requires_grad for x in xs):
            self.compare(y, xs, c, naive_c, retain)
        else:
            with pytest.raises(ValueError, match="does not require grad"):
                ms.grad(y.t, [x.t for x in xs], c, retain_graph=retain)

    def compare(self, y, xs, c, naive_c, retain):
        def run():
            return ms.grad(y.t, [x.t for x in xs], c, retain_graph=retain)

        done = self.walk(y.n, {x.n.key for x in xs}, retain, run)
        if done is not None:
            for x, g in zip(xs, done[0], strict=True):
                assert type(g) is np.ndarray
                assert not any(np.shares_memory(g, e.t.data) for e in self.pool)
                close(g, gradient({}, y.n, x.n, naive_c))

    @rule(data=st.data(), plain=st.booleans(), again=st.booleans())
    def grad_to_be_differentiated(self, data, plain, again):
        y = self.pick_result(data, lambda e: order(e.n) < 1)
        if y is None:
            return
        x = data.draw(st.sampled_from([e for e in reversed(self.pool) if e.n.key in y.n.keys]))
        other = None if plain else self.pick(data, lambda t: t.shape == y.t.shape)
        if other is None or order(other.n):
            c, naive_c = self.cotangent(data, y.t)
        else:
            c, naive_c = other.t, other.n

        def run():
            return ms.grad(y.t, x.t, c, create_graph=True)

        done = self.walk(y.n, {x.n.key}, True, run)
        if done is None:
            return
        t = done[0]
        n = Node(lambda seeds, y, x, c: gradient(seeds, y, x, c), [y.n, x.n, naive_c], True)
        close(t.data, n.value)
        if not t.requires_grad:  # then it depends on nothing: no gradient is lost
            for e in self.leaves().values():
                g = gradient({}, n, e.n, constant(np.ones(t.shape)))
                close(g, np.zeros_like(g))
        elif not any(np.shares_memory(e.t.data, t.data) for e in self.pool):
            n.watched = [(e.memory, e.memory[0]) for e in self.pool]
            entry = self.keep(t, n)
            if again:
                self.backward_from(data, entry, True)

    @rule(data=st.data(), to=st.sampled_from([None, 2.0]))
    def assign_grad(self, data, to):
        leaves = self.leaves()
        if leaves:
            t = data.draw(st.sampled_from(list(leaves)))
            t.grad = self.grads[t] = None if to is None else np.full(t.shape, to)
            if to is None:
                del self.grads[t]

    @invariant()
    def everything_agrees(self):
        assert ms.is_grad_enabled()
        for e in self.pool:
            close(e.t.data, e.n.value)
        for t in self.leaves():
            if t in self.grads:
                assert t.grad.dtype == t.dtype
                close(t.grad, self.grads[t])
            else:
                assert t.grad is None


def constant(value):
    return Node(None, (), False, np.array(value, float))


def joint(a, b):
    """Return the shape that two shapes broadcast to, None if they do not fit."""
    try:
        return np.broadcast_shapes(a, b)
    except ValueError:
        return None


def order(n):
    """Return how many gradients of gradients stand behind a node."""
    return max((order(a) for a in n.args), default=0) + (n.watched is not None)


TestGraphs = Graphs.TestCase
TestGraphs.settings = settings(max_examples=2 * settings().max_examples, stateful_step_count=40)
