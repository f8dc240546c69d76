"""A gradient checker: every rule against finite differences, in every layout, to any order."""

from __future__ import annotations

import functools
import math
import operator

import numpy as np

from .engine import Tensor, enable_grad, grad, tensor
from .sparse import SparseParameter, SparseTensor


class GradcheckError(AssertionError):
    """Raised when a gradient and finite differences disagree, or cannot be compared."""


def gradcheck(f, inputs, *, order=1, eps=None, rtol=None, atol=None, rng=0) -> bool:
    """Compare the gradients of `f` with central differences; return True or raise.

    Parameters
    ----------
    f : callable
        Takes the inputs; returns a Tensor, a SparseTensor, or a sequence of them.
    inputs : Tensor, SparseTensor, SparseParameter, array, or a sequence of them
        float64.  They are copied, so `f` and the differences never change them.  Of a SparseTensor
        the stored values are moved, of a SparseParameter the free weights: nothing else exists.
    order : int
        2 checks the gradient of the gradient too, with respect to inputs and cotangent, and so on.
    eps : float, optional
        Relative step; about 6e-6, the cube root of the machine precision, by default.
    rtol, atol : float, optional
        Allowed difference, ``atol * min(1, scale) + rtol * |difference quotient|`` and rounding;
        1e-5 and 1e-8 by default.  The scale is that of the outputs.
    rng : int or numpy.random.Generator
        For the cotangents; the same call gives the same verdict every time.

    Raises
    ------
    GradcheckError
        Naming the input, the index and both numbers.  Where the differences to the left and to the
        right disagree, and go on disagreeing with a smaller step, it reports a kink, whatever the
        rule gave: there is no gradient to compare with.
    TypeError
        If an input is not float64, or `f` returns something else.

    Notes
    -----
    The cotangent also comes sliced, transposed, reversed, read-only and with stride 0, as it may in
    a real graph; a rule that gives something else then is reported.  Cost: two calls of `f` for
    each number in the inputs.

    Examples
    --------
    >>> import minisparse as ms
    >>> ms.gradcheck(lambda x: ms.exp(x) * x, ms.tensor([0.5, -1.0]), order=2)
    True
    """
    if order < 1:
        raise ValueError(f"gradcheck: order={order}, needs 1 or more")
    if isinstance(inputs, (Tensor, SparseTensor, np.ndarray)):
        inputs = (inputs,)
    if not len(inputs):
        raise ValueError("gradcheck: no inputs, so there is nothing to check")
    if eps is not None and not eps > 0:
        raise ValueError(f"gradcheck: eps={eps} must be positive")
    rng = np.random.default_rng(rng)
    builders, points = zip(*[_taken_apart(i, x) for i, x in enumerate(inputs)], strict=True)
    eps = np.cbrt(np.finfo(float).eps) if eps is None else eps
    rtol, atol = 1e-5 if rtol is None else rtol, 1e-8 if atol is None else atol

    def run(*arrays):
        leaves = [tensor(a, requires_grad=True) for a in arrays]
        return leaves, _outputs(f(*[b(leaf) for b, leaf in zip(builders, leaves, strict=True)]))

    with enable_grad():
        for level in range(1, order + 1):
            name = "gradient" if level == 1 else f"gradient of order {level}"
            cotangents = _check_once(run, points, eps, rtol, atol, rng, name)
            run, points = _differentiated(run, len(points)), (*points, *cotangents)
    return True


def _taken_apart(i, x):
    """Split an input into a function of one float64 leaf, and a copy of that leaf's numbers."""
    if isinstance(x, SparseParameter):
        parts = x.pattern, x._index_map, x._base
        numbers = x.free.data

        def build(leaf):
            pattern, index_map, base = parts
            parameter = SparseParameter.__new__(SparseParameter)
            parameter._setup(pattern, leaf, index_map, base)
            return parameter

    elif isinstance(x, SparseTensor):
        pattern, numbers = x.pattern, x.values.data

        def build(leaf):
            return SparseTensor(pattern, leaf)

    elif isinstance(x, (Tensor, np.ndarray)):
        numbers = x.data if isinstance(x, Tensor) else x

        def build(leaf):
            return leaf

    else:
        raise TypeError(f"gradcheck: input {i} is a {type(x).__name__}, not a Tensor")
    if numbers.dtype != np.float64:
        raise TypeError(
            f"gradcheck: input {i} is {numbers.dtype}, in which differences are mostly rounding; "
            "pass it as float64, with .astype(np.float64)"
        )
    return build, np.array(numbers)


def _outputs(result):
    results = result if isinstance(result, (list, tuple)) else [result]
    results = [r.values if isinstance(r, SparseTensor) else r for r in results]
    for r in results:
        if not isinstance(r, Tensor):
            raise TypeError(f"gradcheck: f returned a {type(r).__name__}, not a Tensor")
    if not results:
        raise TypeError("gradcheck: f returned no output, so there is nothing to check")
    return results


def _differentiated(run, n_inputs):
    """Return `run` for the gradients of its outputs, as functions of inputs and cotangents."""

    def run_gradient(*arrays):
        leaves, outputs = run(*arrays[:n_inputs])
        cotangents = [tensor(a, requires_grad=True) for a in arrays[n_inputs:]]
        return [*leaves, *cotangents], _pull_back(leaves, outputs, cotangents, create_graph=True)

    return run_gradient


def _pull_back(leaves, outputs, cotangents, *, create_graph=False):
    parts = [
        grad(y, leaves, c, create_graph=create_graph, retain_graph=True)
        for y, c in zip(outputs, cotangents, strict=True)
    ]
    return [
        functools.reduce(operator.add, of_one_input) for of_one_input in zip(*parts, strict=True)
    ]


def _check_once(run, points, eps, rtol, atol, rng, name):
    """Compare gradients with differences at `points`; return the cotangents that were used."""
    leaves, outputs = run(*points)
    again = run(*points)[1]
    for k, (y, z) in enumerate(zip(outputs, again, strict=True)):
        if not np.all(np.isfinite(y.data)):
            raise GradcheckError(f"{name}: output {k} is not finite, so it has no differences")
        if not np.array_equal(y.data, z.data):
            raise GradcheckError(f"{name}: output {k} changes from call to call (is f random?)")
    # Not normal deviates, which test inputs often are: a rule that confuses them must not pass.
    cotangents = [
        np.asarray(rng.choice([-1, 1], y.shape) * rng.uniform(0.5, 1.5, y.shape)) for y in outputs
    ]
    gradients = _pull_back(leaves, outputs, cotangents)
    _check_layouts(leaves, outputs, cotangents, gradients, name)

    def moved(i, index, step):
        arrays = [p.copy() if j == i else p for j, p in enumerate(points)]
        arrays[i][index] += step
        return [y.data for y in run(*arrays)[1]], arrays[i][index] - points[i][index]

    def differences(i, index, step):
        """Return the central quotient, right minus left, and the size of their rounding."""
        (above, up), (below, down) = moved(i, index, step), moved(i, index, -step)
        quotient = gap = moving = total = 0.0
        for c, y, a, b in zip(cotangents, outputs, above, below, strict=True):
            quotient += np.vdot(c, a - b) / (up - down)
            gap += np.vdot(c, (a - y.data) / up - (b - y.data) / down)
            moving += np.sum(np.abs(c * y.data), where=a != b)
            total += np.sum(np.abs(c * y.data))
        return quotient, gap, 64 * np.finfo(float).eps * (moving or total) / step

    reach = max(np.max(np.abs(y.data), initial=0.0) for y in outputs)
    for i, point in enumerate(points):
        for index in np.ndindex(point.shape):
            got, at = gradients[i][index], abs(point[index])
            # Where x is small or f curved, a smaller step is needed; a kink stays at any step.
            smaller = 2 + (math.ceil(-math.log(at, 16)) if 0 < at < 1 else 0)
            steps = [eps * max(1.0, at) / 16**n for n in range(min(smaller, 12) + 1)]
            gap, first_noise = 0.0, np.inf
            for step in steps:
                before = gap
                with np.errstate(all="ignore"):
                    quotient, gap, noise = differences(i, index, step)
                scale = max(abs(quotient), min(1.0, reach))
                smooth = abs(gap) <= 1e-4 * scale + noise or abs(gap) <= abs(before) / 4
                first_noise = min(first_noise, noise)
                noise = min(noise, max(first_noise, 1e-3 * abs(quotient)))
                tolerance = atol * min(1.0, scale) + rtol * abs(quotient) + noise
                agrees = abs(got - quotient) <= tolerance
                if agrees and smooth:
                    break
            where = f"{name} of input {i} at index {index}"
            if not np.isfinite(quotient):
                raise GradcheckError(f"{where}: f is not finite a step of {step:.1e} away")
            if not smooth:
                raise GradcheckError(
                    f"{where}: a kink. The differences to the left and to the right are "
                    f"{before:.3g} apart, and still {gap:.3g} with a step 16 times smaller; "
                    "check at another point"
                )
            if not agrees:
                raise GradcheckError(
                    f"{where}: the rule gives {got:.10g}, differences give {quotient:.10g}"
                )
    return cotangents


def _check_layouts(leaves, outputs, cotangents, gradients, name):
    """Feed the cotangents again in other memory layouts; the gradients must not notice."""
    ones = [np.ones(c.shape) for c in cotangents]
    cases = [(cotangents, gradients, layout) for layout in _LAYOUTS]
    flat = [np.broadcast_to(np.ones(()), c.shape) for c in cotangents]
    cases.append((flat, _pull_back(leaves, outputs, ones), "with stride 0"))
    for given, expected, layout in cases:
        laid_out = [_LAYOUTS[layout](c) if layout in _LAYOUTS else c for c in given]
        got = _pull_back(leaves, outputs, laid_out)
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            scale = np.max(np.abs(b), initial=1.0)
            if not np.allclose(a, b, rtol=1e-9, atol=1e-12 * scale):
                worst = np.unravel_index(np.argmax(np.abs(a - b)), a.shape)
                raise GradcheckError(
                    f"{name} of input {i} at index {tuple(map(int, worst))}: the rule gives "
                    f"{a[worst]:.10g} for a cotangent {layout}, {b[worst]:.10g} for a contiguous "
                    "one of the same numbers: it ignores the layout"
                )


def _sliced(c):
    big = np.full([2 * n + 1 for n in c.shape], np.nan)
    key: tuple = (..., *(slice(1, None, 2) for _ in c.shape))
    view = big[key]
    view[...] = c
    return view


def _reversed(c):
    key: tuple = (..., *(slice(None, None, -1) for _ in c.shape))
    return np.array(c[key], order="C")[key]


def _read_only(c):
    c = c.copy()
    c.flags.writeable = False
    return c


_LAYOUTS = {
    "cut from a larger array": _sliced,
    "with its axes transposed": lambda c: np.array(c, order="F"),
    "with reversed strides": _reversed,
    "that is read-only": _read_only,
}
