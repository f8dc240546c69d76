"""Train only the positions you choose: four matrices, each recovered from data.

    python examples/trainable_positions.py [--n N]

Each problem is the same: data y = A x of a matrix A that the model never sees, a parameter that
knows only where A may be non-zero and which entries are constant or equal, and gradient descent.
"""

import argparse

import numpy as np
import scipy.sparse as sp

import minisparse as ms


def recover(title, truth, W, trained):
    """Fit W to the data of `truth`; `trained` marks the positions that may change."""
    x = np.random.default_rng(0).normal(size=(truth.shape[1], 4 * truth.shape[1]))
    steps = 1500 + 50 * truth.shape[1]
    y = truth @ x
    before = W.to_scipy().toarray()

    optimizer = ms.optim.Adam([W], lr=0.1)
    for lr in np.geomspace(0.1, 1e-6, steps):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        ms.nn.mse_loss(W @ x, y).backward()
        optimizer.step()

    after = W.to_scipy().toarray()
    error = np.abs(after - truth).max()
    untouched = before[~trained].tobytes() == after[~trained].tobytes()
    print(f"\n{title}: {W.n_free} weights for {after.size} positions")
    if after.size <= 36:
        for name, matrix in (("before", before), ("after", after)):
            print(f"  {name}:", *str(matrix.round(3)).splitlines(), sep="\n    ")
    print(f"  largest error {error:.1e}; all else bit for bit as before: {untouched}")
    assert error < 1e-6
    assert untouched


def main(n):
    rng = np.random.default_rng(1)

    # y = A x with A diagonal: n weights, not n².
    start = sp.diags_array(np.ones(n))
    truth = np.diag(rng.normal(size=n))
    recover("Diagonal", truth, ms.SparseParameter(start), np.eye(n, dtype=bool))

    # A band of three diagonals, the middle one fixed to one.
    start = sp.diags_array([0.1, 1.0, 0.1], offsets=[-1, 0, 1], shape=(n, n))
    off_diagonal = start.toarray() == 0.1
    truth = np.where(off_diagonal, rng.normal(size=(n, n)), np.eye(n))
    W = ms.SparseParameter(start, trainable=off_diagonal)
    recover("Band around a diagonal of ones", truth, W, off_diagonal)

    # [[0, -0.2 I], [0.35 I, train]]: constant blocks, and one block to learn.
    eye = sp.eye_array(n)
    start = sp.block_array([[None, -0.2 * eye], [0.35 * eye, sp.csr_array(np.ones((n, n)))]])
    lower_right = np.zeros((2 * n, 2 * n), bool)
    lower_right[n:, n:] = True
    truth = np.where(lower_right, rng.normal(size=(2 * n, 2 * n)), start.toarray())
    W = ms.SparseParameter(start, trainable=lower_right)
    recover("Block matrix", truth, W, lower_right)

    # Six weights at places of our choice in a 4 × 4 matrix, two of them twice.
    places = np.array([[1, 0, 2, 0], [0, 3, 0, 4], [5, 0, 1, 0], [0, 6, 0, 4]])
    truth = np.append(0, rng.normal(size=6))[places]
    W = ms.SparseParameter(sp.csr_array((places > 0) * 0.5), share=places)
    recover("Six weights, two of them in two places", truth, W, places > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=3, help="size of the matrices")
    main(parser.parse_args().n)
