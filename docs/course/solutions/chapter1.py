"""Solutions to chapter 1: one function for each exercise."""

import numpy as np

import minisparse as ms


def quotient_slopes(a, b):
    return 1 / b, -a / b**2


def sum_to(g, shape):
    added = g.ndim - len(shape)
    repeated = [added + i for i, n in enumerate(shape) if n == 1]
    return g.sum(axis=(*range(added), *repeated)).reshape(shape)


def pick_rule(g, shape, index):
    out = np.zeros(shape)
    np.add.at(out, index, g)
    return out


def logsumexp_rule(g, x, out):
    return g * np.exp(x - out)


def swish_rule(g, need, x):
    s = ms.sigmoid(x)
    return g * (s + x * s * (1 - s))
