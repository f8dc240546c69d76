"""Newton-CG against Adam on a sparse logistic regression with feature crosses.

    pip install -e ".[examples]" && python examples/second_order.py

The data are the 569 tumours of scikit-learn's breast-cancer set, 30 standardised features each; a
quarter is held out. The model is z = xᵀ W x with a constant 1 in front of x: the first row of W
holds the offset and the linear weights, and of the 435 products of two features W has those most
correlated with the label (`--crosses 0`: none). SciPy's Newton-CG gets gradients and products with
the Hessian, which is never built. Writes `second_order.png`. The seconds depend on what else the
machine does.
"""

import argparse
import time

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
from scipy.optimize import minimize
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

import minisparse as ms


def data():
    """Return features (after a column of ones) and labels ±1: to train on, and held out."""
    x, y = load_breast_cancer(return_X_y=True)
    x, x_test, y, y_test = train_test_split(x, 2.0 * y - 1, random_state=0, stratify=y)
    mean, std = x.mean(axis=0), x.std(axis=0)
    x, x_test = (np.insert((a - mean) / std, 0, 1, axis=1) for a in (x, x_test))
    return x, y, x_test, y_test


def chosen(x, y, crosses):
    """Return the pattern of W: its first row, and the products most correlated with the label."""
    n = x.shape[1]
    i, j = np.triu_indices(n - 1, k=1) + np.ones((2, 1), int)  # not the column of ones
    strength = np.abs(np.corrcoef((x[:, i] * x[:, j]).T, y)[-1, :-1])
    best = np.argsort(-strength)[:crosses]
    rows, cols = np.append(np.zeros(n, int), i[best]), np.append(np.arange(n), j[best])
    return ms.Pattern.from_coords(rows, cols, (n, n))


def main(crosses, steps):
    ms.warmup(dtypes=("float64",))  # the seconds below hold no compilation
    x, y, x_test, y_test = data()
    pattern = chosen(x, y, crosses)

    def logits(W, x):
        return ms.sum((x @ W) * x, axis=1)

    def loss(W):
        """Mean of log(1 + exp(-y z)), and a little of the squared weights."""
        return ms.mean(ms.softplus(-y * logits(W, x))) + 1e-3 * ms.sum(W.values**2)

    def run(name, optimise):
        """Optimise new weights; return the rows (work so far, gradient norm)."""
        W = ms.SparseParameter((pattern, np.zeros(pattern.nnz)))
        work, curve = {"gradients": 0, "products": 0}, []

        def gradient(w):
            W.free.data = w
            value, g = ms.value_and_grad(loss)(W)
            work["gradients"] += 1
            curve.append((sum(work.values()), np.linalg.norm(g)))
            return value, g

        def product(w, v):
            W.free.data = w
            work["products"] += 1
            return ms.hvp(loss, W, v)

        begin = time.perf_counter()
        optimise(W, gradient, product)
        seconds = time.perf_counter() - begin
        value, g = ms.value_and_grad(loss)(W)
        accuracy = np.mean(np.sign(logits(W, x_test).data) == y_test)
        print(
            f"{name:10} {work['gradients']:10} {work['products']:12} {seconds:8.2f} {value:12.8f} "
            f"{np.linalg.norm(g):14.1e} {accuracy:9.1%}"
        )
        return np.array(curve).T

    def newton(W, gradient, product):
        start = W.free.numpy()
        result = minimize(gradient, start, jac=True, hessp=product, method="Newton-CG")
        W.free.data = result.x

    def adam(W, gradient, product):
        optimizer = ms.optim.Adam([W], lr=0.4)  # of 0.02 to 0.8, the one soonest at 1e-6
        for _ in range(steps):
            W.grad = gradient(W.free.data)[1]
            optimizer.step()

    print(f"{pattern.nnz} weights of {x.shape[1] ** 2}: {x.shape[1]} linear, {crosses} crosses\n")
    print(
        f"{'':10} {'gradients':>10} {'H. products':>12} {'seconds':>8} {'final loss':>12} "
        f"{'gradient norm':>14} {'accuracy':>9}"
    )
    figure, ax = plt.subplots(layout="constrained")
    for name, optimise in {"Newton-CG": newton, "Adam": adam}.items():
        ax.semilogy(*run(name, optimise), ".-", ms=3, lw=0.8, label=name)
    ax.set(xlabel="gradients and products with the Hessian", ylabel="norm of the gradient")
    ax.legend()
    figure.savefig("second_order.png", dpi=120)
    print("\naccuracy is that on the held-out quarter; gradient norms: second_order.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--crosses", type=int, default=30, help="products of two features to keep")
    parser.add_argument("--steps", type=int, default=400, help="of Adam")
    args = parser.parse_args()
    main(args.crosses, args.steps)
