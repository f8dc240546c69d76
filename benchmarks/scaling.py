"""Time and memory of training as the number of rows, the density and the threads grow.

A step is ``W @ X``, both gradients, and Adam. Every point has a process of its own, whose peak
memory (VmHWM) counts from the building of the pattern on; what the process held before is taken
off.
"""

import pathlib

import numpy as np

from .harness import Turns, slope
from .peers import MinisparseLayer
from .workloads import layer_of

ROWS = 1000, 10_000, 100_000, 1_000_000
A_ROW, BATCH = 10, 16
DENSITIES = 0.001, 0.003, 0.01, 0.03, 0.1, 0.3
SIDE = 4096


def memory(field="VmHWM"):
    """Return a figure of this process in bytes, by Linux; NaN elsewhere."""
    status = pathlib.Path("/proc/self/status")
    if not status.exists():
        return float("nan")
    return 1024 * int(status.read_text().split(f"{field}:")[1].split()[0])


def trained(n, density, threads):
    """Return the calls of one point, after three steps on another tiny layer and three on it."""
    tiny = MinisparseLayer(layer_of(64, BATCH, 0.2), threads)
    for _ in range(3):
        tiny.step()
    before = memory()
    layer = MinisparseLayer(layer_of(n, BATCH, density), threads)
    for _ in range(3):
        layer.step()
    return {"step": layer.step, "memory": lambda: memory() - before, "nnz": lambda: layer.W.nnz}


def point(n, density, threads, budget):
    """Return (entries, seconds, peak bytes) of a fresh process."""
    with Turns({"minisparse": trained}, threads) as turns:
        turns.make(n, density)
        if turns.reasons:
            raise RuntimeError(turns.reasons["minisparse"])
        peak, nnz = (turns.ask("minisparse", "call", what) for what in ("memory", "nnz"))
        times = turns.measure("step", budget=budget)
    return nnz, times["minisparse", "step"], peak


def looked_up(n_rows, n_ids, threads):
    """Return the calls of a table of 64 columns of which a step looks up and trains `n_ids` rows.

    The memory is what backward and three steps of Adam take beside the table.
    """
    import minisparse as ms

    ms.set_num_threads(threads)
    ms.warmup(["float32"])
    table = ms.nn.Embedding(n_rows, 64, sparse=True, rng=0)
    optimizer = ms.optim.Adam([table.weight])
    ids = np.random.default_rng(1).integers(n_rows, size=n_ids)

    def step():
        optimizer.zero_grad()
        table(ids).sum().backward()
        optimizer.step()

    before = memory()
    for _ in range(3):
        step()
    return {"step": step, "memory": lambda: memory() - before}


def lookups(quick, budget):
    """Print what a step costs for tables and touched rows of several sizes; return the figures."""
    print("\nnn.Embedding(n, 64, sparse=True) and Adam, float32, one thread: one training step")
    print(f"  {'rows':>10}{'looked up':>12}{'ms':>10}{'MB beside the table':>22}")
    sizes, results = [10_000, 500_000] if quick else [50_000, 500_000, 5_000_000], []
    for n_rows, n_ids in [(n, 1000) for n in sizes] + [(sizes[-1], 100), (sizes[-1], 10_000)]:
        with Turns({"minisparse": looked_up}, 1) as turns:
            turns.make(n_rows, n_ids)
            peak = turns.ask("minisparse", "call", "memory")
            seconds = turns.measure("step", budget=budget)["minisparse", "step"]
        print(f"  {n_rows:10}{n_ids:12}{seconds * 1e3:10.3f}{peak / 1e6:22.1f}")
        results.append({"rows": n_rows, "looked up": n_ids, "seconds": seconds, "peak": peak})
    return results


def run(quick=False):
    """Print the tables and their exponents; return all figures."""
    budget = 0.5 if quick else 2.0
    rows, densities = (ROWS[:3], DENSITIES[::2]) if quick else (ROWS, DENSITIES)
    results = []

    def table(title, name, cases):
        print(f"\n{title}, batch {BATCH}, float32: one training step")
        print(f"  {name:>10}{'entries':>12}{'1 thread ms':>13}{'2 threads ms':>14}{'speed-up':>10}"
              f"{'peak MB':>10}{'bytes an entry':>16}")  # fmt: skip
        found = []
        for label, n, density in cases:
            (nnz, one, peak), (_, two, _) = (point(n, density, t, budget) for t in (1, 2))
            print(f"  {label:>10}{nnz:12}{one * 1e3:13.3f}{two * 1e3:14.3f}{one / two:10.2f}"
                  f"{peak / 1e6:10.1f}{peak / nnz:16.0f}")  # fmt: skip
            found.append((nnz, one, two, peak))
            key = {"table": title, name: label, "entries": nnz, "peak": peak}
            results.append(key | {"seconds, 1 thread": one, "seconds, 2 threads": two})
        nnz, one, two, peak = zip(*found, strict=True)
        figures = {"1 thread": slope(nnz, one), "2 threads": slope(nnz, two)}
        print("  exponents in the entries: time " + ", ".join(
            f"{figure:.2f} ({which})" for which, figure in figures.items()
        ) + f"; memory {slope(nnz[1:], peak[1:]):.2f} (without the first)")  # fmt: skip

    table(f"n rows and columns, {A_ROW} a row", "n", [(f"{n}", n, A_ROW / n) for n in rows])
    cases = [(f"{100 * d:g} %", SIDE, d) for d in densities]
    table(f"{SIDE} × {SIDE}, growing density", "density", cases)
    return {"scaling": results, "lookups": lookups(quick, budget)}
