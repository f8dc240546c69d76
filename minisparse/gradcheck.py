"""A gradient checker: every rule against finite differences, in every layout, to any order."""

import math

import numpy as np

from .engine import Tensor, enable_grad, grad, raw, require, tensor
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
    The numbers compared are derivatives of ``sum(c * f(...))`` with a random cotangent c.  A rule
    is also asked for each gradient alone, and for cotangents that are opposite, sliced, transposed,
    reversed, read-only and of stride 0, as they may be in a real graph; a rule that gives something
    else then is reported.  Cost: at least two calls of `f` for each number in the inputs.

    Examples
    --------
    >>> import minisparse as ms
    >>> ms.gradcheck(lambda x: ms.exp(x) * x, ms.tensor([0.5, -1.0]), order=2)
    True
    """
    eps = np.cbrt(np.finfo(float).eps) if eps is None else eps
    rtol, atol = 1e-5 if rtol is None else rtol, 1e-8 if atol is None else atol
    require(order >= 1 and eps > 0, f"gradcheck: order={order} and eps={eps} must be positive")
    single = isinstance(inputs, (Tensor, SparseTensor, np.ndarray, np.generic))
    inputs = [inputs] if single else list(inputs)
    require(inputs, "gradcheck: no inputs, so there is nothing to check")
    points, rng = [_numbers(i, x) for i, x in enumerate(inputs)], np.random.default_rng(rng)

    def run(*arrays):
        leaves = [tensor(a, requires_grad=True) for a in arrays]
        pairs = zip(inputs, leaves, strict=True)
        given = [x._with_leaf(y) if isinstance(x, SparseTensor) else y for x, y in pairs]
        return leaves, _outputs(f(*given))

    with enable_grad():
        for level in range(1, order + 1):
            name = "gradient" if level == 1 else f"gradient of order {level}"
            cotangents = _check_once(run, points, eps, rtol, atol, rng, name)
            run, points = _differentiated(run, len(points)), points + cotangents
    return True


def _numbers(i, x):
    """Return a copy of the numbers of an input that are moved."""
    if isinstance(x, SparseTensor):
        x = x.free if isinstance(x, SparseParameter) else x.values
    if not isinstance(x, (Tensor, np.ndarray, np.generic)):
        raise TypeError(f"gradcheck: input {i} is a {type(x).__name__}, not a Tensor")
    numbers = np.array(x.numpy() if isinstance(x, Tensor) else x)
    if numbers.dtype != np.float64:
        what = f"{numbers.dtype}, in which differences are mostly rounding"
        raise TypeError(f"gradcheck: input {i} is {what}; pass it .astype(np.float64)")
    return numbers


def _outputs(result):
    results = result if isinstance(result, (list, tuple)) else [result]
    results = [r.values if isinstance(r, SparseTensor) else r for r in results]
    wrong = [type(r).__name__ for r in results if not isinstance(r, Tensor)]
    if wrong or not results:
        raise TypeError(f"gradcheck: f returned {wrong or 'no output'}, not Tensors")
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
    return [sum(others, start=first) for first, *others in zip(*parts, strict=True)]


def _check_once(run, points, eps, rtol, atol, rng, name):
    """Compare gradients with differences at `points`; return the cotangents that were used."""
    leaves, outputs = run(*points)
    for k, (y, again) in enumerate(zip(outputs, run(*points)[1], strict=True)):
        if not np.all(np.isfinite(y.data)):
            raise GradcheckError(f"{name}: output {k} is not finite, so it has no differences")
        if not np.array_equal(y.data, again.data):
            raise GradcheckError(f"{name}: output {k} changes from call to call (is f random?)")
    # Not normal deviates, which test inputs often are: a rule that confuses them must not pass.
    cotangents = [
        np.asarray(rng.choice([-1, 1], y.shape) * rng.uniform(0.5, 1.5, y.shape)) for y in outputs
    ]
    gradients = _pull_back(leaves, outputs, cotangents)
    _check_alone(leaves, outputs, cotangents, gradients, name)
    _check_layouts(leaves, outputs, cotangents, name)
    c, at_point = _joined(cotangents), _joined(outputs)
    sizes, reach = np.abs(c * at_point), np.max(np.abs(at_point), initial=0.0)

    def moved(i, index, step):
        arrays = [p.copy() for p in points]
        arrays[i][index] += step
        return _joined(run(*arrays)[1]), arrays[i][index] - points[i][index]

    @np.errstate(all="ignore")
    def differences(i, index, step):
        """Return the central quotient, right minus left, and the size of their rounding."""
        (above, up), (below, down) = moved(i, index, step), moved(i, index, -step)
        quotient = c @ (above - below) / (up - down)
        gap = c @ ((above - at_point) / up - (below - at_point) / down)
        moving = np.sum(sizes, where=above != below) or np.sum(sizes)
        return quotient, gap, 16 * np.finfo(float).eps * moving / step

    for i, index in ((i, index) for i, p in enumerate(points) for index in np.ndindex(p.shape)):
        got, at = gradients[i][index], abs(points[i][index])
        # Where x is small or f curved, a smaller step is needed; a kink stays at any step.
        smaller = 2 + (math.ceil(-math.log(at, 16)) if 0 < at < 1 else 0)
        gap = error = 0.0
        first_noise = np.inf
        for step in (eps * max(1.0, at) / 16**n for n in range(min(smaller, 12) + 1)):
            before, error_before = gap, error
            quotient, gap, noise = differences(i, index, step)
            error = abs(got - quotient)
            scale = max(abs(quotient), min(1.0, reach))
            smooth = abs(gap) <= 1e-4 * scale + noise or abs(gap) <= abs(before) / 4
            first_noise = min(first_noise, noise)
            noise = min(noise, max(first_noise, rtol * abs(quotient)))
            tolerance = atol * min(1.0, scale) + rtol * abs(quotient) + noise
            # What a step leaves out shrinks with it; an error of the rule does not.
            if smooth and (error <= tolerance < np.inf or error < error_before / 8):
                break
        else:
            weighted = "of the outputs times a random cotangent"
            wrong = f"the rule gives {got:.10g}, differences give {quotient:.10g}, {weighted}"
            if not np.isfinite(quotient):
                wrong = f"f is not finite a step of {step:.1e} away"
            elif not smooth:
                apart = f"{before:.3g} apart, and {gap:.3g} with a step 16 times smaller"
                wrong = f"a kink: differences to the left and right are {apart}"
            raise GradcheckError(f"{name} of input {i} at index {index}: {wrong}")
    return cotangents


def _check_alone(leaves, outputs, cotangents, gradients, name):
    """Ask for one gradient at a time, and for the opposite cotangent: rules are linear in it."""
    opposite = _pull_back(leaves, outputs, [-c for c in cotangents])
    for i, leaf in enumerate(leaves):
        alone = _pull_back([leaf], outputs, cotangents)[0]
        expected, where = gradients[i], f"{name} of input {i}"
        _compare(alone, expected, where, "when no other gradient is asked for", "otherwise")
        _compare(-opposite[i], expected, where, "for the opposite cotangent, turned", "otherwise")


def _compare(got, expected, name, when, otherwise):
    size = np.max(np.abs(expected), initial=1.0, where=np.isfinite(expected))
    if not np.allclose(got, expected, rtol=1e-9, atol=1e-12 * size, equal_nan=True):
        at = tuple(map(int, np.unravel_index(np.argmax(np.abs(got - expected)), got.shape)))
        numbers = f"{got[at]:.10g} {when}, {expected[at]:.10g} {otherwise}"
        raise GradcheckError(f"{name} at index {at}: the rule gives {numbers}")


def _joined(parts):
    return np.concatenate([np.ravel(raw(part)) for part in parts])


def _check_layouts(leaves, outputs, cotangents, name):
    """Feed the cotangents again in other memory layouts; the gradients must not notice."""
    for layout, laid_out in _LAYOUTS.items():
        given = [laid_out(c) for c in cotangents]
        got = _pull_back(leaves, outputs, given)
        expected = _pull_back(leaves, outputs, [np.array(c, order="C") for c in given])
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            otherwise = "for a contiguous one: it ignores the layout, or writes into it"
            _compare(a, b, f"{name} of input {i}", f"for a cotangent {layout}", otherwise)


def _sliced(c):
    big = np.full([2 * n + 1 for n in c.shape], np.nan)
    key: tuple = (..., *[slice(1, None, 2)] * c.ndim)
    big[key] = c
    return big[key]


_LAYOUTS = {
    "cut from a larger array": _sliced,
    "with its axes transposed": lambda c: np.array(c, order="F"),
    "with reversed strides": lambda c: np.flip(np.flip(c).copy()),
    "that is read-only": lambda c: np.broadcast_to(c, c.shape),
    "with stride 0": lambda c: np.broadcast_to(1.0, c.shape),
}
