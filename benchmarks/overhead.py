"""What the engine costs beside the arithmetic: small operations, and importing the package.

    pip install -e ".[bench]" && python benchmarks/overhead.py

Two figures, each as a ratio within this run, alternating with what it is compared to, lower
quartile of repeats: a chain of 1,000 small elementwise operations, forward and backward, against
PyTorch's eager mode; importing minisparse against importing numpy, scipy.sparse and numba.
"""

import subprocess
import sys
import time

import numpy as np

import minisparse as ms


def quartile(seconds):
    return sorted(seconds)[len(seconds) // 4]


def chain(x, a, tanh):
    """1,000 operations: a product, a sum, a tanh and a difference, 250 times."""
    for _ in range(250):
        x = tanh(x * a + a) - a
    return x


def operations(size, repeats=60):
    """Return seconds for the chain, forward and backward: (minisparse, PyTorch)."""
    import torch

    torch.set_num_threads(1)
    numbers = np.linspace(0.1, 0.9, size)
    ours = ms.tensor(numbers, requires_grad=True), ms.tensor(numbers), ms.tanh
    theirs = torch.tensor(numbers, requires_grad=True), torch.tensor(numbers), torch.tanh
    times = [], []
    for _ in range(repeats):
        for leaf, constant, tanh, seconds in ((*ours, times[0]), (*theirs, times[1])):
            start = time.perf_counter()
            chain(leaf, constant, tanh).sum().backward()
            seconds.append(time.perf_counter() - start)
    np.testing.assert_allclose(ours[0].grad, theirs[0].grad.numpy(), rtol=1e-9)
    return map(quartile, times)


def imports(repeats=15):
    """Return seconds in fresh processes: (importing minisparse, importing what it stands on)."""
    code = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"
    times = [], []
    for _ in range(repeats):
        for names, seconds in (("minisparse", times[0]), ("numpy, scipy.sparse, numba", times[1])):
            done = subprocess.run(
                [sys.executable, "-c", code.format(names)], capture_output=True, check=True
            )
            seconds.append(float(done.stdout))
    return map(quartile, times)


if __name__ == "__main__":
    for size in (1, 10, 100):
        ours, theirs = operations(size)
        print(
            f"1,000 operations on {size:3} numbers, forward + backward: minisparse "
            f"{ours * 1e3:.2f} ms, PyTorch {theirs * 1e3:.2f} ms, ratio {ours / theirs:.2f} "
            f"({'met' if ours <= 1.5 * theirs else 'MISSED'}: at most 1.5)"
        )
    ours, theirs = imports()
    verdict = "met" if ours <= 1.5 * theirs else "MISSED"
    print(
        f"import minisparse {ours * 1e3:.0f} ms, numpy + scipy.sparse + numba {theirs * 1e3:.0f} "
        f"ms, ratio {ours / theirs:.2f} ({verdict}: at most 1.5)"
    )
