"""What the engine costs beside the arithmetic: the import, the first step, small operations."""

import functools
import os
import subprocess
import sys
import tempfile

import numpy as np

from .harness import PASSIVE, Turns, bar, installed, quartile

LENGTH = 1000
"""Operations in a chain."""

SIZES = 1, 10, 100

STEP = """if True:
    import time, numpy as np, scipy.sparse, numba, minisparse as ms
    start = time.perf_counter()
    layer = ms.nn.SparseLinear(1000, 1000, fan_in=10, rng=0)
    optimizer = ms.optim.Adam(layer.parameters())
    loss = ms.nn.mse_loss(layer(np.ones((32, 1000))), np.zeros((32, 1000)))
    loss.backward()
    optimizer.step()
    print(time.perf_counter() - start)
"""

IMPORT = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"


def fresh(code, **environment):
    """Return the seconds that code prints in a process of its own."""
    environment = os.environ | PASSIVE | environment
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def chain(x, a, tanh):
    """1,000 operations: a product, a sum, a tanh and a difference, 250 times."""
    for _ in range(LENGTH // 4):
        x = tanh(x * a + a) - a
    return x


def chained(library, size, threads):
    """Return the calls of a peer, after comparing their results with NumPy's."""
    numbers, constant = np.linspace(0.1, 0.9, size), np.linspace(0.1, 0.9, size)
    wanted = chain(numbers, constant, np.tanh)
    if library == "numpy":
        return {"forward": lambda: chain(numbers, constant, np.tanh)}
    if library == "autograd":
        import autograd
        import autograd.numpy as anp

        def total(x):
            return anp.sum(chain(x, constant, anp.tanh))

        gradient = autograd.grad(total)
        np.testing.assert_allclose(total(numbers), wanted.sum(), rtol=1e-9)
        return {"both": lambda: gradient(numbers)}
    if library == "torch":
        import torch as lib

        lib.set_num_threads(threads)
    else:
        import minisparse as lib
    leaf, constant = lib.tensor(numbers, requires_grad=True), lib.tensor(constant)

    def forward():
        with lib.no_grad():
            return chain(leaf, constant, lib.tanh)

    def both():
        leaf.grad = None
        chain(leaf, constant, lib.tanh).sum().backward()
        return leaf.grad

    # The slope of a chain of maps is the product of theirs.
    slope, x = np.ones(size), numbers
    for _ in range(LENGTH // 4):
        x = np.tanh(x * numbers + numbers)
        slope, x = slope * numbers * (1 - x * x), x - numbers
    np.testing.assert_allclose(np.asarray(forward().detach()), wanted, rtol=1e-9)
    np.testing.assert_allclose(np.asarray(both()), slope, rtol=1e-6, atol=1e-12)
    return {"forward": forward, "both": both}


def small_products(library, size, threads):
    """Return the calls of a peer: a sparse 10 × 10 matrix times `size` columns."""
    rng, dense = np.random.default_rng(0), np.eye(10) + np.eye(10, k=1)
    x = rng.normal(size=(10, size))
    if library == "scipy":
        import scipy.sparse as sp

        A = sp.csr_array(dense)
        return {"forward": lambda: A @ x}
    if library == "minisparse":
        import scipy.sparse as sp

        import minisparse as lib

        W = weight = lib.SparseParameter(sp.csr_array(dense))
    else:
        import torch as lib

        lib.set_num_threads(threads)
        W = weight = lib.tensor(dense).to_sparse_csr().requires_grad_()
    X = lib.tensor(x, requires_grad=True)
    g = x if library == "minisparse" else lib.tensor(x)

    def forward():
        with lib.no_grad():
            return W @ X

    def both():
        weight.grad = X.grad = None
        (W @ X).backward(g)
        return X.grad

    np.testing.assert_allclose(np.asarray(forward().detach()), dense @ x, rtol=1e-12)
    np.testing.assert_allclose(np.asarray(both()), dense.T @ x, rtol=1e-12)
    return {"forward": forward, "both": both}


def overhead(quick):
    """Print nanoseconds an operation; return figures and bars."""
    results, bars = [], []
    table = {
        "elementwise": (chained, ("minisparse", "torch", "numpy", "autograd"), LENGTH),
        "sparse 10 × 10 @": (small_products, ("minisparse", "torch", "scipy"), 1),
    }
    print("\nMicroseconds an operation, one thread; forward without recording / forward + backward")
    for title, (maker, libraries, count) in table.items():
        libraries = [name for name in libraries if installed(name)]
        makers = {name: functools.partial(maker, name) for name in libraries}
        with Turns(makers, 1) as turns:
            for size in SIZES[:: 2 if quick else 1]:
                turns.make(size)
                times = turns.measure("forward", "both", budget=1.0 if quick else 3.0)
                row = f"  {title}, {size} numbers:"
                for name in libraries:
                    figures = [times.get((name, kind), np.nan) for kind in ("forward", "both")]
                    texts = (f"{t / count * 1e6:.2f}" if t == t else "–" for t in figures)
                    row += f"  {name} " + " / ".join(texts)
                    row += turns.reasons.get(name, "")
                    results += [
                        {"operation": title, "numbers": size, "peer": name, "seconds": figures}
                    ]
                print(row)
                if maker is chained and ("torch", "both") in times:
                    ratio = times["minisparse", "both"] / times["torch", "both"]
                    what = f"{size} numbers, forward + backward, minisparse over PyTorch"
                    bars.append((what, ratio))
    return results, bars


def run(quick=False):
    """Print imports, first steps and small operations; return all figures."""
    repeats = 5 if quick else 15
    names = {"minisparse": "minisparse", "below": "numpy, scipy.sparse, numba"}
    imports = {key: [] for key in names}
    for _ in range(repeats):
        for key, modules in names.items():
            imports[key].append(fresh(IMPORT.format(modules)))
    imports = {key: quartile(seconds) for key, seconds in imports.items()}
    ours, below = (f"{imports[key] * 1e3:.0f} ms" for key in names)
    print(f"\nImport: minisparse {ours}, numpy + scipy.sparse + numba {below}")
    cold, warm = [], []
    for _ in range(1 if quick else 3):
        with tempfile.TemporaryDirectory() as folder:
            cold.append(fresh(STEP, NUMBA_CACHE_DIR=folder))
            warm += [fresh(STEP, NUMBA_CACHE_DIR=folder) for _ in range(3)]
    cold, warm = quartile(cold), quartile(warm)
    print(f"First training step after the imports: {cold:.2f} s where nothing is compiled yet, "
          f"{warm * 1e3:.0f} ms from Numba's cache")  # fmt: skip
    results, ratios = overhead(quick)
    print("\nBars")
    ratio = imports["minisparse"] / imports["below"]
    bars = [bar("import, minisparse over what it stands on", ratio, 1.5, at_most=True)]
    bars += [bar(what, ratio, 1.5, at_most=True) for what, ratio in ratios]
    first = {"import": imports, "first step": {"cold": cold, "cached": warm}}
    return {"latency": first | {"operations": results}, "bars": bars}
