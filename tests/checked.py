"""The compiled kernels with every access checked, and structures to run them on.

For a process of its own: see test_fuzz.py.
"""

import itertools

import numpy as np
import scipy.sparse as sp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import minisparse as ms
from minisparse import testing as mt
from minisparse.kernels import Plan, cpu

from .guards import CHUNKS, check_all
from .test_properties import is_canonical, structures

# -------------------------------------------------------------------- what the checks must notice


def led_astray(far, dtype):
    """Return calls of every kernel, by name, with a structure that leads to place `far` of two."""
    good = Plan(np.array([0, 1, 2], np.int32), np.array([0, 1], np.int32), 2)
    bad = Plan(good.indptr, np.array([0, far], np.int32), 2)
    long = Plan(np.array([0, 1, far + 1], np.int32), good.indices, 2)
    v, index = np.ones(2, dtype), np.array([0, far], np.int32)
    calls = {
        "segment_sum": lambda: cpu.segment_sum(v, good.indptr, index),
        "spgemm": lambda: cpu.spgemm(good, bad, good, v, v),
        "spgemm_dot": lambda: cpu.spgemm_dot(bad, good, good, v, v),
        "spgemm_dot, transposed": lambda: cpu.spgemm_dot(good, bad, good, v, v, True),
    }
    for k in (1, 2, 3, 5, 9, 17, 40, 64, 70):
        x = np.ones((2, k), dtype)
        calls[f"spmm, {k}"] = lambda x=x: cpu.spmm(bad, v, x)
        calls[f"sddmm, {k}"] = lambda x=x: cpu.sddmm(bad, x, x)
        calls[f"spmm_vjp, {k}"] = lambda x=x: cpu.spmm_vjp(good, bad, v, x, x)
    if far > 0:  # a row may end before it starts; to a gather, what is outside is nothing
        calls["row_max"] = lambda: cpu.row_max(long, v)
        calls["row_softmax"] = lambda: cpu.row_softmax(long, v)
    if far > 2 * CHUNKS:  # nearer, it lands in the dense row of another chunk
        calls["spgemm, right"] = lambda: cpu.spgemm(good, good, bad, v, v)
    return calls


def prove():
    """Say which kernels do not notice where they are led."""
    missed = []
    for far, dtype in itertools.product((2, -1, 10**6), (np.float32, np.float64)):
        for name, call in led_astray(far, dtype).items():
            try:
                call()
                missed.append((name, far, dtype.__name__))
            except IndexError:
                pass
    return missed


# ------------------------------------------------------------------------------- what is fuzzed

WIDTHS = st.sampled_from([2, 1, 0, 3, 5, 8, 9, 16, 17, 40, 64, 70])


@st.composite
def built(draw):
    """Draw a pattern that a door let in, however damaged what it was given; None if it did not."""
    shape, indptr, indices = draw(structures())
    doors = "Pattern", "csr", "csc", "coo", "bsr", "coords"
    # The others make an indptr, which for 2**40 rows takes 8 TB whatever is in them.
    door = draw(st.sampled_from(doors)) if shape[0] < 1000 else "Pattern"
    try:
        if door == "Pattern":
            return ms.Pattern(shape, indptr, indices)
        if door == "coords":
            n = draw(st.integers(0, min(len(indptr), len(indices))))
            return ms.Pattern.from_coords(indptr[:n], indices[:n], shape)
        A = draw(mt.scipy_csr(exact=True, format=door))
        if door == "coo":
            n = min(len(indptr), len(indices))
            A.data, A.coords = np.ones(n), (indptr[:n], indices[:n])
        else:
            A.indptr, A.indices = indptr, indices
            if draw(st.booleans()):
                A.data = np.ones((len(indices), *A.data.shape[1:]))
        if draw(st.booleans()):
            A._shape = tuple(shape)
        return ms.Pattern.from_scipy(A)
    except (ValueError, TypeError):
        return None


def use(p, draw):
    """Run all that reads a structure, and the gradients of it, on a pattern."""
    dtype = draw(st.sampled_from([np.float64, np.float32]))
    v = ms.tensor(np.arange(p.nnz) % 5 - 2.0, requires_grad=True, dtype=dtype)
    S = ms.SparseTensor(p, v)
    results = [S.sum(axis=1), S.row_mean(), S.row_max(), S.row_logsumexp(), S.row_softmax()]
    rows = np.arange(p.shape[0])[:: draw(st.sampled_from([1, -1, 2]))]
    results += [S + S[np.arange(p.shape[0])], S * S, S - S, S[rows], S[rows[:0]]]
    results += [S.scale(rows=np.ones(p.shape[0])), ms.block([[S], [S]]), ms.block_diag([S, S])]
    if max(p.shape) < 1000:
        k = draw(WIDTHS)
        x, u = (ms.tensor(np.ones((n, k)), requires_grad=True, dtype=dtype) for n in p.shape[::-1])
        R = draw(mt.sparse_tensors(shape=p.shape, dtype=dtype, exact=True))
        results += [S @ x, S.T @ u, u.T @ S, S @ x.sum(axis=1), S.T @ u.sum(axis=1)]
        results += [ms.sddmm(u, x, p), ms.sddmm(x, u, p.T), ms.sddmm(S @ x, x, p)]
        results += [S.sum(axis=0), S.sum(), S.diagonal(), S.to_dense(), S.T.values, S + R, R * S]
        results += [S @ R.T, R.T @ S, S.T @ S, S @ S.T, S.T.row_softmax(), S.T + R.T, S.T.row_max()]
        results += [S.scale(cols=np.ones(p.shape[1])), ms.block([[S, None], [None, S.T]])]
        results += [ms.SparseTensor.from_dense(S.to_dense(), p), S * np.ones(p.shape)]
        D = np.zeros(p.shape)
        for e, (i, j) in enumerate(zip(p.rows, p.indices, strict=True)):
            D[i, j] = e % 5 - 2
        np.testing.assert_array_equal((S @ x).data, D @ x.data)
        if p.shape[0] == p.shape[1]:
            A = S + 99 * sp.eye_array(p.shape[0])
            results += [ms.spsolve(A, u), ms.spsolve(A.T, u)]
    W = ms.SparseParameter((p, v.data), share=v.data.astype(int))
    results += [W.values * 1, W.prune(keep=0.5).values]
    for y in results:
        y = y.values if isinstance(y, ms.SparseTensor) else y
        if y.requires_grad and draw(st.booleans()):
            leaves = [v] if max(p.shape) >= 1000 else [v, x, u]
            leaves = leaves if y._node is not None else [y]
            leaves = [t for t in leaves if t.requires_grad]
            c = ms.tensor(np.ones(y.shape), requires_grad=True, dtype=dtype)
            g = ms.grad(y, leaves, c, create_graph=True)
            total = sum((part * 2).sum() for part in g)
            if total.requires_grad:
                ms.grad(total, [*leaves, c])


def main(max_examples, derandomize):
    """Fuzz; return how many structures were tried, and how many were valid."""
    tried = [0, 0]

    @settings(
        max_examples=max_examples, derandomize=derandomize, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(p=built(), data=st.data())
    def run(p, data):
        tried[0] += 1
        if p is not None:
            tried[1] += 1
            assert is_canonical(p.shape, p.indptr.tolist(), p.indices.tolist())
            use(p, data.draw)

    check_all()
    missed = prove()
    assert not missed, missed
    run()
    return tried
