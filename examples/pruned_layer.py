"""Prune a trained network by magnitude, and go on training only what is left.

    pip install -e ".[examples]" && python examples/pruned_layer.py

A dense network, 64 → 256 → 256 → 10, learns the 1,797 real digits of 8 × 8 pixels that ship inside
scikit-learn; a third is held out. Then the first two layers keep their largest weights, at several
fractions, and the sparse network that results is trained for some epochs more. Writes
`pruned_layer.png`: the accuracies, and the weights that the first layer keeps for each pixel.

Han, Pool, Tran and Dally, "Learning both weights and connections for efficient neural networks",
2015.
"""

import argparse
import copy
import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # two thread pools that spin slow each other

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import minisparse as ms
from minisparse import nn


def train(model, x_train, y_train, epochs, lr):
    optimizer = ms.optim.Adam(model.parameters(), lr=lr)  # a new one: the weights are new ones
    rng = np.random.default_rng(0)
    for _ in range(epochs):
        for x, y in nn.batches(x_train, y_train, 64, rng=rng):
            optimizer.zero_grad()
            nn.cross_entropy(model(x), y).backward()
            optimizer.step()


def accuracy(model, x, y):
    with ms.no_grad():
        return np.mean(np.argmax(model(x), axis=1) == y)


def pruned(model, keep):
    """Return a new network with this fraction of the weights of all layers but the last."""
    parts = copy.deepcopy(list(model))
    for i, part in enumerate(parts[:-1]):
        if isinstance(part, nn.Linear):
            parts[i] = nn.SparseLinear.from_linear(part, keep=keep)
    return nn.Sequential(*parts)


def size(model):
    """Return the number of weights, and the bytes of these, their positions and the biases."""
    count = total = 0
    for layer in model:
        if hasattr(layer, "weight"):
            W = layer.weight
            count += getattr(W, "free", W).size
            total += getattr(W, "free", W).data.nbytes + layer.bias.data.nbytes
            if isinstance(W, ms.SparseParameter):
                total += W.pattern.indices.nbytes + W.pattern.indptr.nbytes
    return count, total


def main(fractions, epochs, more):
    digits = load_digits()
    x = (digits.data / 16).astype(np.float32)
    x_train, x_test, y_train, y_test = train_test_split(
        x, digits.target, test_size=1 / 3, random_state=0
    )
    dense = nn.Sequential(
        *(nn.Linear(64, 256, rng=0), nn.ReLU()),
        *(nn.Linear(256, 256, rng=1), nn.ReLU()),
        nn.Linear(256, 10, rng=2),
    )
    train(dense, x_train, y_train, epochs, 2e-3)
    before, (weights, total) = accuracy(dense, x_test, y_test), size(dense)
    print(f"accuracy on {len(x_test)} held-out digits; {epochs} epochs, then {more} more\n")
    print(f"{'keep':>6} {'weights':>8} {'bytes':>9} {'pruned':>8} {'fine-tuned':>11}")
    print(f"{'all':>6} {weights:8,} {total:9,} {before:8.1%}")
    rows, models = [], []
    for keep in fractions:
        model = pruned(dense, keep)
        after = accuracy(model, x_test, y_test)
        train(model, x_train, y_train, more, 1e-3)
        rows.append((after, accuracy(model, x_test, y_test)))
        models.append(model)
        weights, total = size(model)
        print(f"{keep:6.1%} {weights:8,} {total:9,} {rows[-1][0]:8.1%} {rows[-1][1]:11.1%}")

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4.5), width_ratios=[3, 2], layout="constrained"
    )
    left.axhline(before, color="0.6", ls="--", label="before pruning")
    for name, scores in zip(("right after", "after fine-tuning"), np.transpose(rows), strict=True):
        left.semilogx(fractions, scores, "o-", label=name)
    left.set(xlabel="fraction of weights kept", ylabel="accuracy on the held-out third")
    left.legend()
    middle = len(models) // 2
    shown = right.imshow(models[middle][0].weight.pattern.fan_out.reshape(8, 8), cmap="viridis")
    right.set(title=f"Weights kept for each pixel, at {fractions[middle]:.1%}")
    figure.colorbar(shown, ax=right)
    figure.savefig("pruned_layer.png", dpi=120)
    print("accuracies, and where the weights are: pruned_layer.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    fractions = [0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005]
    parser.add_argument("--keep", type=float, nargs="+", default=fractions, metavar="FRACTION")
    parser.add_argument("--epochs", type=int, default=30, help="of the dense network")
    parser.add_argument("--more", type=int, default=15, help="epochs after pruning")
    args = parser.parse_args()
    main(args.keep, args.epochs, args.more)
