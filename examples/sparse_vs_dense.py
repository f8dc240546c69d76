"""Many weights or many neurons? Accuracy against density, on handwritten digits.

    pip install -e ".[examples]" && python examples/sparse_vs_dense.py

A wide network, 64 → 256 → 256 → 10, whose first two layers have a random part of their weights,
from 0.5 % to all; the last one, which is small, is dense. Beside each stands a dense network with
as many weights, which is narrow. The data are the 1,797 real digits of 8 × 8 pixels that ship
inside scikit-learn; a third is held out. Each network is trained from several random starts, the
sparse ones on as many patterns. Writes `sparse_vs_dense.png`.
"""

import argparse
import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # two thread pools that spin slow each other

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import minisparse as ms
from minisparse import nn

WIDE = 256
DENSITIES = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]


def network(width, density, seed):
    """Return 64 → width → width → 10 with its first two layers at `density`."""
    rng = np.random.default_rng(seed)

    def layer(n_in, n_out):
        if density == 1:
            return nn.Linear(n_in, n_out, rng=rng)
        return nn.SparseLinear(n_in, n_out, density=density, rng=rng)

    layers = [layer(64, width), nn.ReLU(), layer(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10, rng=rng))


def size(model):
    """Return the number of weights and biases."""
    return sum(getattr(p, "free", p).size for p in model.parameters())


def narrow(n):
    """Return the width of the dense network nearest to n weights and biases."""
    return max(round((38**2 + n - 10) ** 0.5 - 38), 1)  # n = 64 w + w² + 10 w, and 2 w + 10 biases


def accuracy(model, data, epochs, seed):
    """Train with Adam; return the accuracy on the held-out third."""
    x_train, x_test, y_train, y_test = data
    optimizer = ms.optim.Adam(model.parameters(), lr=2e-3)
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        for x, y in nn.batches(x_train, y_train, 64, rng=rng):
            optimizer.zero_grad()
            nn.cross_entropy(model(x), y).backward()
            optimizer.step()
    with ms.no_grad():
        return np.mean(np.argmax(model(x_test), axis=1) == y_test)


def main(densities, epochs, starts):
    print("compiling the kernels (once; later runs load them from a cache) ...")
    ms.warmup(dtypes=("float32",))
    digits = load_digits()
    x = (digits.data / 16).astype(np.float32)
    data = train_test_split(x, digits.target, test_size=1 / 3, random_state=0)
    print(f"mean accuracy of {starts} starts on {len(data[1])} held-out digits, {epochs} epochs\n")
    head = f"{'width':>6} {'weights':>8} {'accuracy':>9}"
    print(f"{'density':>8} {head}   {'dense:':>7} {head}")
    curves = {f"sparse, {WIDE} wide": [], "dense, narrow": []}  # rows of (weights, accuracies)
    for density in tqdm(densities, leave=False):
        line = f"{density:8.1%}"
        width, kept = WIDE, density
        for rows in curves.values():
            models = [network(width, kept, seed) for seed in range(starts)]
            scores = [accuracy(model, data, epochs, seed) for seed, model in enumerate(models)]
            rows.append((size(models[0]), scores))
            line += f" {width:6} {rows[-1][0]:8,} {np.mean(scores):9.1%}" + " " * 11
            width, kept = narrow(rows[-1][0]), 1  # the dense one comes second
        tqdm.write(line.rstrip())

    figure, ax = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name, rows in curves.items():
        weights, scores = [n for n, _ in rows], np.array([s for _, s in rows])
        ax.semilogx(weights, scores.mean(axis=1), "o-", label=name)
        ax.fill_between(weights, scores.min(axis=1), scores.max(axis=1), alpha=0.2)
    ax.set_xticks(weights, [f"{n:,}" for n in weights], rotation=60)
    ax.minorticks_off()
    ax.set(xlabel="weights and biases", ylabel="accuracy on the held-out third")
    ax.set_title("Digits: the mean of the starts, and their range")
    ax.legend(loc="lower right")
    figure.savefig("sparse_vs_dense.png", dpi=120)
    print("both curves: sparse_vs_dense.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--densities", type=float, nargs="+", default=DENSITIES)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--starts", type=int, default=3)
    args = parser.parse_args()
    main(args.densities, args.epochs, args.starts)
