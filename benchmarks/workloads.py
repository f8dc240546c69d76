"""The workloads: patterns, operands and gradients that every peer builds alike from a seed."""

import dataclasses

import numpy as np
import scipy.sparse as sp

from minisparse import Pattern


@dataclasses.dataclass(frozen=True)
class Workload:
    """A sparse matrix of `shape` and a dense operand of `k` columns."""

    name: str
    shape: tuple
    fan_in: int
    k: int
    kind: str = "random"

    def pattern(self):
        if self.kind == "zipf":
            return zipf(self.shape, self.fan_in)
        return Pattern.random(self.shape, fan_in=self.fan_in, rng=0)

    def arrays(self, dtype):
        """Return (pattern, values, X, G): A has `values`, the product is A X, its gradient G."""
        rng, pattern = np.random.default_rng(1), self.pattern()
        n_rows, n_cols = self.shape
        sizes = pattern.nnz, (n_cols, self.k), (n_rows, self.k)
        return pattern, *(rng.uniform(-1, 1, size).astype(dtype) for size in sizes)


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


def reference(pattern, values, x, g, sample):
    """Return A X, Aᵀ G, and the gradients of the values at `sample`, in float64."""
    A = sp.csr_array((values.astype(float), pattern.indices, pattern.indptr), shape=pattern.shape)
    rows, columns = pattern.rows[sample], pattern.indices[sample]
    dvalues = np.einsum("ek,ek->e", g[rows].astype(float), x[columns].astype(float))
    return A @ x.astype(float), A.T @ g.astype(float), dvalues
