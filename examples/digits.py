"""Handwritten digits: sparse layers at 5 % density against the same dense network.

    pip install -e ".[examples]" && python examples/digits.py

The data are the 1,797 real digits of 8 × 8 pixels that ship inside scikit-learn; a third is held
out. Writes `digits.png`: the learning curves, and where the first layer's weights are. The seconds
depend on what else the machine does; accuracy and sizes do not.
"""

import argparse
import os
import time

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


def network(density):
    """Return 64 → 512 → 512 → 10: the first two layers at `density`, all dense if it is None."""

    def layer(n_in, n_out, rng):
        if density is None:
            return nn.Linear(n_in, n_out, rng=rng)
        return nn.SparseLinear(n_in, n_out, density=density, rng=rng)

    return nn.Sequential(
        layer(64, 512, 0), nn.ReLU(), layer(512, 512, 1), nn.ReLU(), nn.Linear(512, 10, rng=2)
    )


def train(name, model, data, epochs):
    """Train with Adam; return a row for the table and the accuracy after each epoch."""
    x_train, x_test, y_train, y_test = data
    optimizer = ms.optim.Adam(model.parameters(), lr=2e-3)
    rng, curve, seconds = np.random.default_rng(0), [], 0.0
    for _ in tqdm(range(epochs), desc=name):
        start = time.perf_counter()
        for x, y in nn.batches(x_train, y_train, 64, rng=rng):
            optimizer.zero_grad()
            nn.cross_entropy(model(x), y).backward()
            optimizer.step()
        seconds += time.perf_counter() - start
        with ms.no_grad():
            curve.append(np.mean(np.argmax(model(x_test), axis=1) == y_test))
    leaves = [getattr(p, "free", p) for p in model.parameters()]
    weights = sum(p.size for p in leaves)
    state = 4 * sum(p.data.nbytes for p in leaves)  # weights, gradients, Adam's two moments
    state += sum(p.pattern.indices.nbytes for p in model.parameters() if hasattr(p, "pattern"))
    return (name, weights, state, seconds, curve[-1]), curve


def main(epochs):
    print("compiling the kernels (once; later runs load them from a cache) ...")
    ms.warmup(dtypes=("float32",))
    digits = load_digits()
    x = (digits.data / 16).astype(np.float32)
    data = train_test_split(x, digits.target, test_size=1 / 3, random_state=0)
    models = {"5 % density": network(0.05), "dense": network(None)}
    results = {name: train(name, model, data, epochs) for name, model in models.items()}

    print(f"\n{'':12} {'weights':>9} {'bytes*':>12} {'seconds':>8} {'test accuracy':>14}")
    for (name, weights, state, seconds, accuracy), _ in results.values():
        print(f"{name:12} {weights:9,} {state:12,} {seconds:8.2f} {accuracy:14.1%}")

    print("* of weights, their positions, gradients and Adam's moments; the last layer is dense")

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), width_ratios=[2, 1])
    for name, (_, curve) in results.items():
        left.plot(range(1, epochs + 1), curve, label=name)
    left.set(xlabel="epoch", ylabel="accuracy on the held-out third", title="Digits")
    left.legend()
    models["5 % density"][0].weight.pattern.spy(right)
    right.set(xlabel="pixel", ylabel="neuron", title="First layer, 5 % of the weights")
    figure.tight_layout()
    figure.savefig("digits.png", dpi=120)
    print("learning curves and the first layer's pattern: digits.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    main(parser.parse_args().epochs)
