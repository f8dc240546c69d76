"""Solutions to chapter 4: one function for each exercise."""

import numpy as np


def momentum_step(p, g, buffer, lr, momentum):
    buffer *= momentum
    buffer += g
    p -= lr * buffer


def adam_step(p, g, m, v, step, lr, beta1, beta2, eps):
    m += (1 - beta1) * (g - m)
    v[...] = beta2 * v + (1 - beta2) * g**2
    m_hat = m / (1 - beta1**step)
    v_hat = v / (1 - beta2**step)
    p -= lr * m_hat / (np.sqrt(v_hat) + eps)


def free_gradient(index, g, n_free):
    there = index >= 0
    return np.bincount(index[there], g[there], minlength=n_free)


def convolution_labels(pattern):
    return pattern.indices - pattern.rows


def deviations(pattern):
    return np.sqrt(2 / pattern.fan_in[pattern.rows])
