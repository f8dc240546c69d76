"""The density below which a sparse layer trains faster than the same layer, dense.

A step is the product, both gradients and Adam, of an n × n layer in float32.
"""

import functools

import numpy as np

from .harness import Turns, installed
from .peers import LAYERS
from .workloads import layer_of

SIZES, BATCHES = (256, 1024, 4096, 8192), (32, 128, 512)
LOWEST, HIGHEST = 1e-3, 0.9


def checked(make, n, batch, density, threads):
    """Return the calls of a peer, after comparing some rows of its product with float64."""
    layer = layer_of(n, batch, density)
    peer = make(layer, threads)
    y, weight = peer.result()
    wanted = weight[:8].astype(np.float64) @ layer.x.astype(np.float64)
    assert np.abs(y[:8] - wanted).max() < 1e-3 * np.abs(wanted).max(), "wrong product"
    peer.step()
    return {"step": peer.step}


def crossings(n, batch, halvings, budget, threads):
    """Return ({dense peer: crossing density or a bound as text}, the times) for one layer.

    The dense layers are timed in turns with the first sparse ones; bisection is on the logarithm of
    the density, and the last bracket is interpolated.
    """
    peers = {name: p for name, p in LAYERS.items() if name == "minisparse" or installed(p[0])}
    makers = {name: functools.partial(checked, make) for name, (_, make) in peers.items()}
    dense, found, times = [name for name in makers if name != "minisparse"], {}, {}
    with Turns(makers, threads) as turns:
        turns.make(n, batch, LOWEST)
        at = turns.measure("step", budget=budget, rounds=(2, 20))
        times[LOWEST] = at["minisparse", "step"]

        def ours(density):
            if density not in times:
                answer = turns.ask("minisparse", "make", n, batch, density)
                if isinstance(answer, str):
                    raise RuntimeError(answer)
                more = turns.measure(
                    "step", names=["minisparse"], budget=budget / 3, rounds=(2, 20)
                )
                times[density] = more["minisparse", "step"]
            return times[density]

        for name in dense:
            wanted = at[name, "step"]
            low, high = LOWEST, HIGHEST
            if ours(low) > wanted:
                found[name] = f"< {LOWEST}"
                continue
            for _ in range(halvings):
                middle = float(np.sqrt(low * high))
                low, high = (middle, high) if ours(middle) < wanted else (low, middle)
            if high == HIGHEST and ours(high) < wanted:
                found[name] = f"> {HIGHEST}"
            else:
                ends = np.log([ours(low), ours(high)])
                part = np.clip((np.log(wanted) - ends[0]) / np.diff(ends)[0], 0, 1)
                found[name] = float(low * (high / low) ** part)
    return found, {name: at[name, "step"] for name in dense}, times


def run(quick=False, threads=2):
    """Print a table; return all figures."""
    sizes, batches = (SIZES[:3:2], BATCHES[::2]) if quick else (SIZES, BATCHES)
    results = []
    print(f"\nOne layer's training step, float32, threads {threads}: minisparse is faster below")
    print(f"  {'n':>6}{'batch':>7}", end="")
    print(f"{'torch dense ms':>16}{'below density':>15}{'numpy dense ms':>16}{'below density':>15}")
    for n in sizes:
        for batch in batches:
            halvings, budget = (3, 0.3) if quick else (5 if n <= 4096 else 3, 1.5)
            found, dense, times = crossings(n, batch, halvings, budget, threads)
            row = f"  {n:6}{batch:7}"
            for name in ("torch dense", "numpy dense"):
                crossing = found.get(name, "absent")
                text = crossing if isinstance(crossing, str) else f"{100 * crossing:.1f} %"
                row += f"{dense.get(name, np.nan) * 1e3:16.3f}{text:>15}"
            print(row, flush=True)
            key = {"n": n, "batch": batch, "crossings": found, "dense": dense}
            results.append(key | {"minisparse": sorted(times.items())})
    return {"crossover": results}
