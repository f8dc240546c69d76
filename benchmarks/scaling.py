"""Time and memory of training as the number of rows, the density and the threads grow.

A step is ``W @ X``, both gradients, and Adam. Every point has a process of its own, whose peak
memory (VmHWM) counts from the building of the pattern on; what the process held before is taken
off.
"""

import pathlib

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


def run(quick=False):
    """Print two tables and their exponents; return all figures."""
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
    return {"scaling": results}
