"""Shared weights on a local pattern are a convolution: learn an edge filter from a photograph.

    pip install -e ".[examples]" && python examples/locally_connected.py

A pattern connects each pixel of a tile to the window around it. Where every entry at one place in
the window is the same weight (`share=`), the product is a correlation, as SciPy computes it; the
script checks that first. Then two parameters on this pattern see tiles of one photograph that
ships inside scikit-learn, and what Sobel's filter makes of them: one with shared weights, one with
weights of its own at each pixel. Both are tested on the other photograph. Writes
`locally_connected.png`.
"""

import argparse

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
from scipy.signal import correlate2d
from sklearn.datasets import load_sample_images

import minisparse as ms

SOBEL = np.array([[1.0, 0.0, -1.0], [2.0, 0.0, -2.0], [1.0, 0.0, -1.0]])


def places(pattern, width, k):
    """Return the place in the k × k window of each entry: 0 at its upper left."""
    (to_row, to_col), (row, col) = (np.divmod(a, width) for a in (pattern.rows, pattern.indices))
    return (row - to_row + k // 2) * k + col - to_col + k // 2


def check(height, width, k):
    """Compare with SciPy on small integers, whose sums are exact."""
    rng = np.random.default_rng(0)
    image = rng.integers(-8, 9, (height, width)).astype(float)
    kernel = rng.integers(-8, 9, (k, k)).astype(float)
    pattern = ms.Pattern.local(height, width, k)
    labels = places(pattern, width, k)
    W = ms.SparseParameter((pattern, kernel.ravel()[labels]), share=labels)
    ours = (W @ image.ravel()).data.reshape(height, width)
    assert np.array_equal(ours, correlate2d(image, kernel, mode="same"))
    print(f"{k} × {k} on {height} × {width}: {W.nnz} entries, {W.n_free} weights, equal to SciPy's")


def cut(image, side):
    """Return the tiles of an image, one a column."""
    rows, cols = (n // side for n in image.shape)
    tiles = image[: rows * side, : cols * side].reshape(rows, side, cols, side)
    return tiles.transpose(1, 3, 0, 2).reshape(side**2, -1)


def paste(tiles, side, cols):
    """Undo `cut`, leaving out the border of each tile, which saw zeros beyond it."""
    inner = tiles.reshape(side, side, -1, cols)[1:-1, 1:-1]
    return inner.transpose(2, 0, 3, 1).reshape(-1, (side - 2) * cols)


def filtered(tiles, side):
    """Return what Sobel's filter makes of each tile; beyond its border are zeros."""
    images = tiles.T.reshape(-1, side, side)
    return np.stack([correlate2d(a, SOBEL, mode="same").ravel() for a in images], axis=1)


def learn(pattern, share, x, y, steps):
    """Fit a parameter that starts from zeros to y = W x."""
    W = ms.SparseParameter((pattern, np.zeros(pattern.nnz)), share=share)
    optimizer = ms.optim.Adam([W], lr=0.2)
    schedule = ms.optim.CosineLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        ms.nn.mse_loss(W @ x, y).backward()
        optimizer.step()
        schedule.step()
    return W


def main(side, counts, steps):
    for size in ((5, 7, 3), (4, 9, 5), (20, 20, 7)):
        check(*size)

    grey = np.stack(load_sample_images().images).mean(axis=-1) / 255
    seen, other = grey - grey[0].mean()  # about zero, where gradient descent is quicker
    cols = other.shape[1] // side
    x, x_test = cut(seen, side), cut(other, side)
    y, y_test = filtered(x, side), filtered(x_test, side)
    pattern = ms.Pattern.local(side, side, 3)
    labels = places(pattern, side, 3)
    order = np.random.default_rng(0).permutation(x.shape[1])  # which tiles are seen first
    print(f"\nrelative error on {x_test.shape[1]} tiles of {side} × {side} from another photograph")
    print(f"{'':18} {'weights':>8}", *(f"{f'{n} tiles':>10}" for n in counts))
    errors, guesses = {}, {}
    for name, share in {"shared": labels, "locally connected": None}.items():
        errors[name] = []
        for n in counts:
            W = learn(pattern, share, x[:, order[:n]], y[:, order[:n]], steps)
            with ms.no_grad():
                guess = (W @ x_test).data
            errors[name].append(np.linalg.norm(guess - y_test) / np.linalg.norm(y_test))
            guesses.setdefault(name, guess)  # of the fewest tiles, for the picture
        print(f"{name:18} {W.n_free:8,}", *(f"{error:10.1e}" for error in errors[name]))
        if share is not None:
            kernel = np.zeros(9)
            kernel[labels] = W.values.data
    rows = str(kernel.reshape(3, 3).round(4) + 0.0).splitlines()  # + 0.0: no -0
    print("the shared weights:", *rows, sep="\n  ")

    figure, axes = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    first, second, third, last = axes.ravel()
    shown = {"Sobel's filter of the other photograph": (first, y_test)}
    for ax, (name, guess) in zip((second, third), guesses.items(), strict=True):
        shown[f"{name}, learnt from {counts[0]} tiles"] = ax, guess
    for title, (ax, tiles) in shown.items():
        ax.imshow(paste(tiles, side, cols), cmap="gray", vmin=-2, vmax=2)
        ax.set_title(title)
        ax.axis("off")
    for name, values in errors.items():
        last.loglog(counts, values, "o-", label=name)
    last.set(xlabel="tiles to learn from", ylabel="relative error on the other photograph")
    last.legend()
    figure.savefig("locally_connected.png", dpi=100)
    print("the filtered photograph and the errors: locally_connected.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", type=int, default=32, help="of a tile, in pixels")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--tiles", type=int, nargs="+", default=[5, 10, 20, 50, 100, 260])
    args = parser.parse_args()
    main(args.side, args.tiles, args.steps)
