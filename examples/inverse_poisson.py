"""Recover a conductivity field from measurements, through a sparse solve.

    pip install -e ".[examples]" && python examples/inverse_poisson.py [--n N]

A field k on the unit square is hidden. What is known is how a few sources spread through it, by
-div(k grad u) = f with u = 0 on the border: noisy values of u at some points. The unknown is log k
in each of n × n cells. Finite volumes make a sparse system K(k) u = f, and SciPy's L-BFGS fits
log k by gradients that run backward through its solution. The data come from the same grid, which
makes the task easier than a real one. Writes `poisson.png`.
"""

import argparse

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import scipy.sparse as sp
from scipy.optimize import minimize

import minisparse as ms


def incidence(n):
    """Return B, faces × cells: (B u) is the difference of u across each face, 0 outside."""
    d = sp.diags_array([1.0, -1.0], offsets=[0, -1], shape=(n + 1, n))
    eye = sp.eye_array(n)
    return sp.vstack([sp.kron(d, eye), sp.kron(eye, d)])


def blob(x, y, at, width):
    return np.exp(-((x - at[0]) ** 2 + (y - at[1]) ** 2) / (2 * width**2))


def main(n, points, noise):
    rng = np.random.default_rng(0)
    x, y = (np.mgrid[:n, :n].reshape(2, -1) + 0.5) / n
    truth = 1.5 * blob(x, y, (0.3, 0.35), 0.14) - 1.5 * blob(x, y, (0.65, 0.7), 0.16)
    sources = [(a, b) for a in (0.2, 0.5, 0.8) for b in (0.2, 0.5, 0.8)]
    f = np.stack([blob(x, y, at, 0.05) for at in sources], axis=1) / n**2

    B = ms.SparseTensor.from_scipy(incidence(n))
    halves = B.with_values(ms.absolute(B.values) / 2)
    inner = B[B.pattern.fan_in == 2]  # the faces between two cells

    def solve(log_k):
        resistance = halves @ ms.exp(-log_k)  # of a face: half of each cell beside it, in series
        K = B.T @ B.scale(rows=1 / resistance)  # Bᵀ diag(k of faces) B
        return ms.spsolve(K, f)  # one factorisation for all sources

    exact = solve(truth).data
    measured = rng.choice(n * n, min(points, n * n), replace=False)
    sigma = noise * exact[measured].std()
    data = exact[measured] + rng.normal(0, sigma, (len(measured), len(sources)))

    def misfit(log_k):
        """Root mean square of the residuals, in units of the noise: 1 fits as well as the truth."""
        return ms.mean(((solve(log_k)[measured] - data) / sigma) ** 2) ** 0.5

    def objective(log_k):
        return data.size / 2 * misfit(log_k) ** 2 + 10 * ms.sum((inner @ log_k) ** 2)

    history = []
    start = np.zeros(n * n)  # k = 1 everywhere
    result = minimize(
        ms.value_and_grad(objective),
        start,
        jac=True,
        method="L-BFGS-B",
        callback=lambda log_k: history.append(misfit(log_k).item()),
        options={"maxiter": 300},
    )
    print(f"{n} × {n} cells, {len(sources)} sources, {len(measured)} points, noise {noise:.0%}")
    print(f"L-BFGS: {result.nit} iterations, {result.nfev} gradients: {result.message}")
    before, after = (misfit(log_k).item() for log_k in (start, result.x))
    error = np.linalg.norm(result.x - truth) / np.linalg.norm(truth)
    print(f"misfit, in units of the noise: {before:.3f} before, {after:.3f} after")
    print(f"relative error of log k: 1 before, {error:.3f} after")

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    look = {"origin": "lower", "extent": (0, 1, 0, 1), "vmin": -1.5, "vmax": 1.5, "cmap": "RdBu_r"}
    for ax, log_k in ((left, truth), (middle, result.x)):
        shown = ax.imshow(log_k.reshape(n, n).T, **look)
    left.plot(x[measured], y[measured], "k.", ms=4)
    left.plot(*zip(*sources, strict=True), "g*", ms=10)
    left.set_title("True log k; sources (stars), points (dots)")
    middle.set_title("Recovered log k")
    figure.colorbar(shown, ax=(left, middle))
    right.semilogy(history)
    right.axhline(1, color="0.6", ls="--")
    right.set(xlabel="L-BFGS iteration", ylabel="misfit / noise", title="Convergence")
    figure.savefig("poisson.png", dpi=120)
    print("fields, points and convergence: poisson.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=24, help="cells along each side")
    parser.add_argument("--points", type=int, default=80, help="measurement points")
    parser.add_argument("--noise", type=float, default=0.01, help="relative to the data's spread")
    args = parser.parse_args()
    main(args.n, args.points, args.noise)
