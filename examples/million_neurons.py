"""Three hidden layers of a million neurons with 8 connections each, on a CPU.

    pip install -e ".[examples]" && python examples/million_neurons.py [--neurons N]

An autoencoder of the two photographs that ship inside scikit-learn, cut into tiles of 20 × 20
pixels. Connections are drawn at random, 8 of each neuron to the layer before, and 8 to the pixels
that come out. `--save FILE` keeps weights and Adam's moments, `--resume FILE` goes on from there
as if training had never stopped; `--scaling` measures four sizes, each in a process of its own.
The seconds depend on what else the machine does.
"""

import argparse
import multiprocessing
import os
import sys
import time

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # two thread pools that spin slow each other

import numpy as np
from tqdm import tqdm

import minisparse as ms
from minisparse import nn

SIDE, FAN = 20, 8


def photographs():
    """Return centred grey tiles, one a column: the layout that sparse layers need not copy."""
    from sklearn.datasets import load_sample_images  # not in the processes of --scaling

    grey = np.stack(load_sample_images().images).mean(axis=-1) / 255
    rows, columns = (n // SIDE for n in grey.shape[1:])
    grey = grey[:, : rows * SIDE, : columns * SIDE]
    tiles = grey.reshape(2, rows, SIDE, columns, SIDE).transpose(2, 4, 0, 1, 3)
    tiles = tiles.reshape(SIDE**2, -1).astype(np.float32)
    return tiles - tiles.mean(axis=1, keepdims=True)


def network(neurons):
    """Return pixels → N → N → N → pixels, and its optimizer."""
    layers, n_in = [], SIDE**2
    for seed in range(3):
        layers += [nn.SparseLinear(n_in, neurons, fan_in=FAN, rng=seed), nn.ReLU()]
        n_in = neurons
    hidden = [p for layer in layers for p in layer.parameters()]
    pattern = ms.Pattern.random((neurons, SIDE**2), fan_in=FAN, rng=3).T
    last = nn.SparseLinear(neurons, SIDE**2, pattern=pattern, rng=4)
    # Adam moves each weight by about lr, so a sum of n inputs by n · lr: less for the last layer.
    slow = {"params": last.parameters(), "lr": 1e-3 * FAN * SIDE**2 / pattern.nnz}
    optimizer = ms.optim.Adam([{"params": hidden}, slow], lr=1e-3)
    return nn.Sequential(*layers, last), optimizer


def train(model, optimizer, tiles, steps, batch):
    """Take the given steps; return the loss and the seconds of each."""
    losses, seconds = [], []
    for step in (bar := tqdm(steps)):
        start = time.perf_counter()
        chosen = np.random.default_rng(step).choice(tiles.shape[1], batch, replace=False)
        x = np.ascontiguousarray(tiles[:, chosen]).T
        optimizer.zero_grad()
        loss = nn.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        bar.set_postfix(loss=f"{losses[-1]:.4f}")
    return losses, seconds


def peak_bytes():
    """Return the most memory that this process has held, which Windows does not tell."""
    if sys.platform == "win32":
        return np.nan
    from resource import RUSAGE_SELF, getrusage

    return getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(neurons, tiles, steps, batch):
    """Train a network of this size; return the seconds of its fastest step and peak memory."""
    seconds = train(*network(neurons), tiles, range(steps), batch)[1]
    return min(seconds), peak_bytes()


def scaling(neurons, tiles, steps, batch):
    sizes = [neurons * n for n in (1, 2, 3, 4)]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        table = [pool.apply(measure, (size, tiles, steps, batch)) for size in sizes]
    print(f"\n{'neurons':>10} {'fastest step':>15} {'peak memory':>12}")
    for size, (seconds, peak) in zip(sizes, table, strict=True):
        print(f"{size:10,} {seconds:13.3f} s {peak / 1e9:9.2f} GB")
    slopes = np.polyfit(np.log(sizes), np.log(table), 1)[0]
    print(f"log-log slopes: time {slopes[0]:.3f}, memory {slopes[1]:.3f}")


def main(args):
    ms.warmup(dtypes=("float32",))  # the seconds below hold no compilation
    tiles = photographs()
    if args.scaling:
        return scaling(args.neurons, tiles, args.steps, args.batch)
    start = time.perf_counter()
    model, optimizer = network(args.neurons)
    print(f"drawn in {time.perf_counter() - start:.1f} s: 3 × {args.neurons:,} neurons")
    done = 0
    if args.resume:
        saved = ms.load(args.resume)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved.pop("steps")
    losses, seconds = train(model, optimizer, tiles, range(done, done + args.steps), args.batch)
    if args.save:
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        ms.save(args.save, {"steps": done + args.steps, **parts})

    matrices = [p for p in model.parameters() if isinstance(p, ms.SparseParameter)]
    weights = sum(W.nnz for W in matrices)
    arrays = [a for W in matrices for a in (W.free.data, W.pattern.indices, W.pattern.indptr)]
    sparse, dense = sum(a.nbytes for a in arrays), 4 * sum(np.prod(W.shape) for W in matrices)
    print(f"{weights:,} weights; they and their positions take {sparse / 1e9:,.3f} GB")
    print(f"the same matrices, dense: {dense / 1e9:,.3f} GB")
    print(f"peak memory of the process: {peak_bytes() / 1e9:.2f} GB")
    second = np.median(seconds)
    print(f"{second:.2f} s a step of {args.batch} tiles: {weights / second:,.0f} weights a second")
    print(f"loss of the mean tile: {np.square(tiles).mean():.4f}; of the network, by steps:")
    for i in range(0, args.steps, 10):
        part = losses[i : i + 10]
        print(f"  {done + i + 1:4} to {done + i + len(part):4}: {np.mean(part):.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--neurons", type=int, default=2**20, help="in each hidden layer")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=16, help="tiles a step")
    parser.add_argument("--save", metavar="FILE", help="write a checkpoint at the end")
    parser.add_argument("--resume", metavar="FILE", help="go on from a checkpoint")
    parser.add_argument("--scaling", action="store_true", help="measure N, 2N, 3N and 4N")
    main(parser.parse_args())
