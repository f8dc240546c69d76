"""Whole training steps of sparse networks: gradients to None, forward, loss, backward, Adam."""

import functools
import itertools
import pickle
import tempfile
from typing import NamedTuple

import numpy as np

from minisparse import Pattern

from .harness import Turns, aligned, bar, installed, mean
from .peers import NETS, SciPyNet

SIZES = {
    "small": ((784, 1000, 1000, 10), 20, 64),
    "middle": ((4096, 16_384, 16_384, 100), 32, 128),
    "large": ((65_536, 262_144, 262_144, 10), 16, 32),
}
"""Name: (widths, fan-in of every layer, batch). ReLU between layers, cross-entropy at the end."""

HEAVY = "torch csr", "torch mask"
"""Beyond the small size they take seconds a step and most of the memory: so they run after the
others, which they would disturb, and not at all in a quick run."""

CHECKED = 3
"""So many losses are compared with float64 before any timing."""


class Net(NamedTuple):
    """What a peer is given: (pattern, values, bias) of each layer, x as (features, batch)."""

    layers: list
    x: np.ndarray
    labels: np.ndarray


def build(widths, fan_in, batch):
    """Draw a network and a batch."""
    rng, layers = np.random.default_rng(0), []
    for n_cols, n_rows in itertools.pairwise(widths):
        pattern = Pattern.random((n_rows, n_cols), fan_in=fan_in, rng=rng)
        values = rng.uniform(-1, 1, pattern.nnz) * np.sqrt(6 / fan_in)
        bias = rng.uniform(-0.1, 0.1, n_rows)
        layers.append((pattern, values.astype(np.float32), bias.astype(np.float32)))
    x = rng.normal(size=(widths[0], batch)).astype(np.float32)
    return Net(layers, x, rng.integers(widths[-1], size=batch))


def checked(make, file, losses, threads):
    """Return the calls of a peer, after comparing its first losses with those of float64."""
    with open(file, "rb") as stored:
        net = pickle.load(stored)
    net = Net([(p, aligned(v), aligned(b)) for p, v, b in net.layers], aligned(net.x), net.labels)
    peer = make(net, threads)
    for n, wanted in enumerate(losses):
        got = peer.step()
        assert abs(got - wanted) < 1e-3 * abs(wanted), f"loss {n} is {got:.6f}, not {wanted:.6f}"
    return {"step": peer.step}


def run(quick=False, threads=None, sizes=None, names=None):
    """Print a table for each size and number of threads, then the bars; return all figures."""
    makers = {
        name: functools.partial(checked, make)
        for name, (package, make) in NETS.items()
        if name in (names or NETS) and installed(package)
    }
    results, ratios = [], {}
    print("\nminisparse and torch hold x as (features, batch) in C order; 'batch-first' is")
    print("minisparse given x as (batch, features) in C order. All layers are sparse.")
    for name in sizes or (["small", "middle"] if quick else SIZES):
        heavy = () if name == "small" else HEAVY
        groups = [[p for p in makers if (p in heavy) == late] for late in (False, True)]
        groups = groups[: 1 if quick else 2]
        net = build(*SIZES[name])
        oracle = SciPyNet(net, dtype=np.float64)
        losses = [oracle.step() for _ in range(CHECKED)]
        with tempfile.NamedTemporaryFile() as stored:
            pickle.dump(net, stored)
            stored.flush()
            del oracle, net
            for t in threads or ([2] if quick else [2, 1]):
                times, reasons, disturbed = {}, {}, ""
                for group in groups:
                    with Turns({peer: makers[peer] for peer in group}, t) as turns:
                        turns.make(stored.name, losses)
                        times |= turns.measure("step", budget=2.0 if quick else 8.0)
                        reasons |= turns.reasons
                        disturbed += turns.disturbed
                widths = "-".join(map(str, SIZES[name][0]))
                print(f"\n{widths}, fan-in {SIZES[name][1]}, batch {SIZES[name][2]}, threads {t}")
                ours = times.get(("minisparse", "step"), np.nan)
                for peer in itertools.chain(*groups):
                    s = times.get((peer, "step"))
                    row = "" if s is None else f"{s * 1e3:12.3f} ms{s / ours:8.2f}"
                    print(f"  {peer:14}{row}  {reasons.get(peer, '')}")
                    if s is not None:
                        key = {"size": name, "threads": t, "peer": peer}
                        results.append(key | {"seconds": s})
                print(disturbed, end="")
                if ("expert torch", "step") in times:
                    ratios[name, t] = times["expert torch", "step"] / ours
    print("\nBars: the expert PyTorch's time over minisparse's")
    bars = [bar(f"{name}, threads {t}", ratio, 3) for (name, t), ratio in ratios.items()]
    if ratios:
        print(f"  geometric mean {mean(list(ratios.values())):.2f}")
    return {"steps": results, "bars": bars}
