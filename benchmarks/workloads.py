"""The workloads: patterns, operands and gradients, made once from a seed and read by every peer."""

import dataclasses
import pathlib
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp

from minisparse import Pattern

from .harness import aligned


@dataclasses.dataclass(frozen=True)
class Workload:
    """A sparse matrix A of `shape` and a dense operand X of `k` columns: the product is A X.

    With `batch_first` the operand is held as its transpose in C order, and the product is Xᵀ Aᵀ.
    A `first` layer's operand needs no gradient.
    """

    name: str
    shape: tuple
    fan_in: int
    k: int
    kind: str = "random"
    dtype: str = "float32"
    batch_first: bool = False
    first: bool = False

    def __str__(self):
        extra = ["batch-first"] * self.batch_first + ["values' gradient only"] * self.first
        sizes = f"{self.shape[0]} × {self.shape[1]}, {self.fan_in} a row, k = {self.k}"
        return ", ".join([f"{self.name}: {sizes}", self.dtype, *extra])

    def pattern(self):
        if self.kind == "zipf":
            return zipf(self.shape, self.fan_in)
        return Pattern.random(self.shape, fan_in=self.fan_in, rng=0)


def zipf(shape, fan_in):
    """Draw entries whose rows and columns follow a Zipf law, as links of a network do."""
    rng, n = np.random.default_rng(0), shape[0] * fan_in
    cells = [np.minimum(rng.zipf(1.5, n) - 1, side - 1) * 7919 % side for side in shape]
    spread = [rng.integers(side, size=n) for side in shape]
    mixed = [np.where(rng.random(n) < 0.5, a, b) for a, b in zip(cells, spread, strict=True)]
    return Pattern.from_coords(*mixed, shape)


WORKLOADS = {
    w.name: w
    for w in (
        Workload("fc512", (512, 512), 51, 64),
        Workload("fc4096-1", (4096, 4096), 41, 256),
        Workload("fc4096-5", (4096, 4096), 205, 128),
        Workload("w64k", (65_536, 65_536), 16, 64),
        Workload("w1m", (1_000_000, 1_000_000), 10, 16),
        Workload("powerlaw", (100_000, 100_000), 13, 64, "zipf"),
    )
}
"""Those that the bars speak of."""


def _variants():
    fc, wide = WORKLOADS["fc4096-1"], WORKLOADS["w64k"]
    for k in (1, 2, 10, 100):
        yield dataclasses.replace(fc, name=f"fc4096-1/k{k}", k=k)
    yield dataclasses.replace(WORKLOADS["fc512"], name="fc512/k1", k=1)
    yield dataclasses.replace(wide, name="w64k/k1", k=1)
    for w in (fc, wide):
        yield dataclasses.replace(w, name=f"{w.name}/float64", dtype="float64")
        yield dataclasses.replace(w, name=f"{w.name}/batch-first", batch_first=True)
        yield dataclasses.replace(w, name=f"{w.name}/first-layer", first=True)
    yield Workload("tall", (16_384, 784), 20, 64)
    yield Workload("flat", (1000, 100_000), 200, 64)


VARIANTS = {w.name: w for w in _variants()}
"""Those where minisparse must never be slower than the best peer."""


class Problem(NamedTuple):
    """What a peer is given. `x` and `g` are (n_cols, k) and (n_rows, k), or batch-first."""

    pattern: Pattern
    values: np.ndarray
    x: np.ndarray
    g: np.ndarray
    batch_first: bool
    first: bool


def write(workload, folder):
    """Write the problem of a workload, and its results in float64, into a folder."""
    rng, pattern = np.random.default_rng(1), workload.pattern()
    n_rows, n_cols = workload.shape
    sizes = pattern.nnz, (n_cols, workload.k), (n_rows, workload.k)
    values, x, g = (rng.uniform(-1, 1, size).astype(workload.dtype) for size in sizes)
    sample = rng.integers(max(pattern.nnz, 1), size=2000)
    y, dx, dvalues = reference(pattern, values, x, g, sample)
    turn = np.transpose if workload.batch_first else np.asarray
    arrays = {
        "indptr": pattern.indptr, "indices": pattern.indices, "values": values, "x": turn(x),
        "g": turn(g), "y": turn(y), "dx": turn(dx), "sample": sample, "dvalues": dvalues,
    }  # fmt: skip
    for name, array in arrays.items():
        np.save(pathlib.Path(folder) / f"{name}.npy", np.ascontiguousarray(array))


def read(workload, folder):
    """Return the Problem in a folder, its arrays aligned to cache lines, and what it results in."""
    load = lambda name: np.load(pathlib.Path(folder) / f"{name}.npy")  # noqa: E731 - short
    pattern = Pattern(workload.shape, load("indptr"), load("indices"))
    operands = (aligned(load(name)) for name in ("values", "x", "g"))
    problem = Problem(pattern, *operands, workload.batch_first, workload.first)
    return problem, [load(name) for name in ("y", "dx", "sample", "dvalues")]


def reference(pattern, values, x, g, sample):
    """Return A X, Aᵀ G, and the gradients of the values at `sample`, in float64."""
    A = sp.csr_array((values.astype(float), pattern.indices, pattern.indptr), shape=pattern.shape)
    rows, columns = pattern.rows[sample], pattern.indices[sample]
    dvalues = np.einsum("ek,ek->e", g[rows].astype(float), x[columns].astype(float))
    return A @ x.astype(float), A.T @ g.astype(float), dvalues


class Layer(NamedTuple):
    """An n × n layer of a density, its operand `x` and the gradient `g` of its product."""

    n: int
    density: float
    x: np.ndarray
    g: np.ndarray


def layer_of(n, batch, density):
    """Draw a Layer."""
    rng = np.random.default_rng(0)
    x, g = (rng.standard_normal((n, batch), dtype=np.float32) for _ in range(2))
    return Layer(n, density, aligned(x), aligned(g))
