"""Sparse with sparse: structure once, values after; solves; derivatives of functions."""

import copy
import gc
import pickle
import threading
import weakref

import numpy as np
import pytest
import scipy.sparse as sp
import scipy.special
from hypothesis import given
from hypothesis import strategies as st

import minisparse as ms
from minisparse import algebra, linalg
from minisparse import testing as mt
from minisparse.kernels import cpu

from .layouts import LAYOUTS, laid_out

DTYPES = st.sampled_from([np.float32, np.float64])
BACKENDS = pytest.mark.parametrize("backend", ["cpu", "reference"])
SIDES = st.integers(0, 5)


def dense(S):
    return S.to_scipy().toarray()


def draw_sparse(data, shape, dtype=np.float64):
    return data.draw(mt.sparse_tensors(shape=shape, dtype=dtype, exact=True))


# ------------------------------------------------------------------------- against the dense ones


@BACKENDS
@given(data=st.data(), n=SIDES, m=SIDES, k=SIDES, dtype=DTYPES)
def test_product(backend, data, n, m, k, dtype):
    A, B = draw_sparse(data, (n, m), dtype), draw_sparse(data, (m, k), dtype)
    with ms.backend(backend):
        C = A @ B
    assert C.dtype == dtype
    np.testing.assert_array_equal(dense(C), dense(A) @ dense(B), strict=True)
    possible = A.pattern.to_mask().astype(int) @ B.pattern.to_mask()
    np.testing.assert_array_equal(C.pattern.to_mask(), possible > 0)


@BACKENDS
@given(data=st.data(), n=SIDES, m=SIDES, k=SIDES)
def test_gradients_of_the_product(backend, data, n, m, k):
    """d(A B) with cotangent G: G Bᵀ at A's entries, Aᵀ G at B's, also through transposes."""
    A, B = (S.with_values(S.values.detach()) for S in (draw_sparse(data, (n, m)),) * 2)
    B = draw_sparse(data, (m, k))
    A.values.requires_grad = True
    B = B.with_values(ms.tensor(B.values.data, requires_grad=True))
    with ms.backend(backend):
        for flip in (False, True):
            C = (B.T @ A.T) if flip else A @ B
            g = data.draw(mt.cotangents(shape=(C.nnz,), exact=True))
            da, db = ms.grad(C.values, [A, B], g)
            G = C.pattern.to_scipy(g).toarray()
            G = G.T if flip else G
            np.testing.assert_array_equal(da, (G @ dense(B).T)[A.pattern.to_mask()])
            np.testing.assert_array_equal(db, (dense(A).T @ G)[B.pattern.to_mask()])


@given(data=st.data(), shape=st.tuples(SIDES, SIDES), dtype=DTYPES)
def test_sums_and_differences(data, shape, dtype):
    A, B = draw_sparse(data, shape, dtype), draw_sparse(data, shape, dtype)
    for S, expected in ((A + B, dense(A) + dense(B)), (A - B, dense(A) - dense(B))):
        assert S.dtype == dtype
        np.testing.assert_array_equal(dense(S), expected, strict=True)
        mask = A.pattern.to_mask() | B.pattern.to_mask()  # what cancels stays stored
        np.testing.assert_array_equal(S.pattern.to_mask(), mask)
    M = A * B
    np.testing.assert_array_equal(dense(M), dense(A) * dense(B))
    np.testing.assert_array_equal(M.pattern.to_mask(), A.pattern.to_mask() & B.pattern.to_mask())


@BACKENDS
@given(data=st.data(), n=SIDES, m=SIDES, k=SIDES)
def test_laws(backend, data, n, m, k):
    """(A B) x = A (B x); (A + C) x = A x + C x; (A B)ᵀ = Bᵀ Aᵀ; (A + C)ᵀ = Aᵀ + Cᵀ."""
    A, B, C = (draw_sparse(data, shape) for shape in ((n, m), (m, k), (n, m)))
    x, y = (data.draw(mt.arrays(shape=(side, 2), exact=True)) for side in (k, m))
    with ms.backend(backend):
        np.testing.assert_array_equal(((A @ B) @ x).data, (A @ (B @ x)).data)
        np.testing.assert_array_equal(((A + C) @ y).data, (A @ y + C @ y).data)
        for left, right in (((A @ B).T, B.T @ A.T), ((A + C).T, A.T + C.T)):
            assert left.pattern == right.pattern
            np.testing.assert_array_equal(left.values.data, right.values.data)


@given(data=st.data(), shape=st.tuples(SIDES, SIDES))
def test_gradients_are_the_dense_ones_read_at_the_entries(data, shape):
    """Of sums, elementwise products, scaling, sums over axes and diagonals."""
    A, B = draw_sparse(data, shape), draw_sparse(data, shape)
    A, B = (S.with_values(ms.tensor(S.values.data, requires_grad=True)) for S in (A, B))
    D, E = (ms.tensor(dense(S), requires_grad=True) for S in (A, B))
    r, c = (np.arange(1.0, n + 1) for n in shape)
    d = min(shape)
    for sparse, whole in (
        ((A + B).to_dense(), D + E),
        ((A - B).to_dense(), D - E),
        ((A * B).to_dense(), D * E * (A.pattern.to_mask() & B.pattern.to_mask())),
        (A.scale(rows=r, cols=c).to_dense(), D * r[:, None] * c),
        (A.sum(axis=0), D.sum(axis=0)),
        (A.sum(axis=1), D.sum(axis=1)),
        (A.diagonal(), D[np.arange(d), np.arange(d)]),
    ):
        g = data.draw(mt.cotangents(shape=whole.shape, exact=True))
        got, expected = ms.grad(sparse, [A, B], g), ms.grad(whole, [D, E], g)
        for S, structured, full in zip((A, B), got, expected, strict=True):
            np.testing.assert_array_equal(structured, full[S.pattern.to_mask()])


@given(data=st.data(), shape=st.tuples(SIDES, SIDES))
def test_scipy_matrices_are_constants(data, shape):
    A = draw_sparse(data, shape)
    B = data.draw(mt.scipy_csr(shape=shape, exact=True))
    for S, expected in (
        (A + B, dense(A) + B.toarray()),
        (B + A, dense(A) + B.toarray()),
        (A - B, dense(A) - B.toarray()),
        (B - A, B.toarray() - dense(A)),
        (ms.multiply(B, A), dense(A) * B.toarray()),
        (ms.matmul(B, A.T), B.toarray() @ dense(A).T),
        (A @ B.T, dense(A) @ B.toarray().T),
    ):
        assert isinstance(S, ms.SparseTensor)
        np.testing.assert_array_equal(dense(S), expected)


@BACKENDS
@given(data=st.data(), shape=st.tuples(SIDES, SIDES), dtype=DTYPES)
def test_row_operations(backend, data, shape, dtype):
    A = draw_sparse(data, shape, dtype)
    with ms.backend(backend):
        got = A.row_mean(), A.row_max(), A.row_logsumexp(), A.row_softmax()
    mean, top, total, soft = got
    assert {x.dtype for x in got} == {np.dtype(dtype)}
    assert soft.pattern is A.pattern
    for i in range(shape[0]):
        row = dense(A)[i][A.pattern.to_mask()[i]]
        expected = (
            row.mean() if len(row) else 0,
            row.max(initial=-np.inf),
            scipy.special.logsumexp(row) if len(row) else -np.inf,
        )
        np.testing.assert_allclose(
            [x.data[i] for x in (mean, top, total)], expected, rtol=1e-5, atol=1e-6
        )
        at = slice(*A.pattern.indptr[i : i + 2])
        weights = scipy.special.softmax(row) if len(row) else row
        np.testing.assert_allclose(soft.values.data[at], weights, rtol=1e-5, atol=1e-6)


@BACKENDS
def test_rows_at_the_edges(backend):
    """Never an overflow; ties share; nothing but -inf has a gradient of zero."""
    inf = np.inf
    p = ms.Pattern((4, 3), [0, 2, 2, 4, 6], [0, 1, 1, 2, 0, 2])
    values = ms.tensor([1e3, 1e3, -inf, -inf, 0.0, inf], requires_grad=True)
    S = ms.SparseTensor(p, values)
    with ms.backend(backend):
        np.testing.assert_array_equal(S.row_max().data, [1e3, -inf, -inf, inf])
        np.testing.assert_allclose(S.row_logsumexp().data, [1e3 + np.log(2), -inf, -inf, inf])
        gradient = ms.grad(S[:3].row_logsumexp(), values, [1.0, 1.0, 1.0])
        np.testing.assert_allclose(gradient, [0.5, 0.5, 0, 0, 0, 0])
        shared = ms.grad(S.row_max(), values, [2.0, 1.0, 1.0, 1.0])
        np.testing.assert_array_equal(shared, [1, 1, 0.5, 0.5, 0, 1])
        np.testing.assert_array_equal(S.row_softmax().values.data[:2], [0.5, 0.5])
        nan = S.with_values([1.0, np.nan, 3.0, 4.0, np.nan, 5.0]).row_max().data
    np.testing.assert_array_equal(nan, [np.nan, -inf, 4.0, np.nan])


def test_products_let_nan_and_inf_through():
    A = ms.SparseTensor(ms.Pattern.dense((2, 2)), [0.0, 1.0, np.nan, 2.0])
    B = ms.SparseTensor(ms.Pattern((2, 2), [0, 1, 2], [0, 1]), [np.inf, 3.0])
    for backend in ("cpu", "reference"):
        with ms.backend(backend):
            np.testing.assert_array_equal((A @ B).values.data, [np.nan, 3.0, np.nan, 6.0])


@given(data=st.data(), heights=st.lists(SIDES, min_size=1, max_size=3), wide=SIDES, last=SIDES)
def test_block(data, heights, wide, last):
    """As SciPy assembles it, with every kind of block."""
    kinds = st.sampled_from(["sparse", "scipy", "array", "tensor", "none"])
    grid, expected = [], []
    for i, n in enumerate(heights):
        line, numbers = [], []
        for j, m in enumerate((wide, last)):
            S = draw_sparse(data, (n, m))
            kind = "sparse" if i == 0 or j == 0 else data.draw(kinds)
            made = {
                "sparse": S,
                "scipy": S.to_scipy(),
                "array": dense(S),
                "tensor": ms.tensor(dense(S)),
                "none": None,
            }[kind]
            line.append(made)
            numbers.append(dense(S) * (made is not None))
        grid.append(line)
        expected.append(numbers)
    whole = ms.block(grid)
    np.testing.assert_array_equal(dense(whole), np.block(expected))
    stack = [line[0] for line in grid]
    np.testing.assert_array_equal(
        dense(ms.block_diag(stack)), sp.block_diag([dense(S) for S in stack]).toarray()
    )


def test_users_block_matrix():
    """[[0, -0.2 I], [0.35 I, train]]: constants take no part in the gradient."""
    W = ms.SparseParameter(sp.csr_array(np.ones((2, 2))))
    eye = sp.eye_array(2)
    M = ms.block([[None, -0.2 * eye], [0.35 * eye, W]])
    (M @ np.arange(4.0)).sum().backward()
    np.testing.assert_array_equal(W.grad, [2, 3, 2, 3])
    assert M.nnz == 8
    assert sum([M, M, M]).pattern is M.pattern


def test_selection_repeats_and_counts_from_the_end():
    A = sp.csr_array([[1.0, 0, 2], [0, 0, 0], [0, 3, 0]])
    W = ms.SparseParameter(A)
    S = W[[-1, 0, 0, 1]]
    np.testing.assert_array_equal(dense(S), A.toarray()[[-1, 0, 0, 1]])
    ms.sum(S.values * [1.0, 2.0, 3.0, 4.0, 5.0]).backward()
    np.testing.assert_array_equal(W.grad, [6, 8, 1])
    assert W[[]].shape == (0, 3)
    assert W[W.to_scipy().toarray()[:, 0] > 0].nnz == 2


@given(data=st.data(), n=SIDES)
def test_solve_undoes_the_product(data, n):
    A = draw_sparse(data, (n, n))
    S = ms.block_diag([A.to_scipy() * 0.01 + sp.eye_array(n), sp.eye_array(1)])
    x = np.random.default_rng(n).normal(size=(n + 1, 3))
    for M in (S, S.T):
        np.testing.assert_allclose(ms.spsolve(M, (M @ x).data).data, x, atol=1e-9)
        np.testing.assert_allclose(ms.spsolve(M.to_scipy(), x[:, 0]).data.shape, n + 1)


# ------------------------------------------------------ the faults that users reported elsewhere

P = ms.Pattern((4, 4), [0, 2, 2, 3, 6], [0, 3, 1, 0, 2, 3])  # with an empty row
Q = ms.Pattern((4, 4), [0, 1, 3, 3, 4], [3, 0, 1, 3])  # and column, and another one
B = ms.SparseTensor(Q, [1.0, 2.0, 3.0, 4.0])
EVERY = {
    "sum": lambda S: S + B,
    "difference": lambda S: B - S,
    "elementwise": lambda S: S * B,
    "product": lambda S: S @ B,
    "product from the left": lambda S: B @ S,
    "square": lambda S: S @ S,
    "scale": lambda S: S.scale(rows=np.arange(4.0), cols=np.arange(4.0)),
    "rows": lambda S: S[[3, 0, 3]],
    "block": lambda S: ms.block([[S, None], [B, S.T]]),
    "block_diag": lambda S: ms.block_diag([S, B]),
    "total": lambda S: S.sum(),
    "sum of columns": lambda S: S.sum(axis=0),
    "sum of rows": lambda S: S.sum(axis=1),
    "diagonal": lambda S: S.diagonal(),
    "row_mean": lambda S: S.row_mean(),
    "row_max": lambda S: S[[0, 2, 3]].row_max(),
    "row_logsumexp": lambda S: S[[0, 2, 3]].row_logsumexp(),
    "row_softmax": lambda S: S.row_softmax(),
    "row_softmax of the transpose": lambda S: S.T.row_softmax(),
    "to_dense": lambda S: S.to_dense(),
    "spsolve": lambda S: ms.spsolve(S * 0.01 + sp.eye_array(4), np.arange(4.0)),
}
every = pytest.mark.parametrize("f", EVERY.values(), ids=EVERY.keys())


def values_of(result):
    return result.values if isinstance(result, ms.SparseTensor) else result


@BACKENDS
@every
def test_layouts_of_values_and_cotangents(backend, f):
    """CASES 1, 2, 3: bit for bit as for contiguous ones, and a stride of 0 is one of them."""
    numbers = np.random.default_rng(0).normal(size=P.nnz)

    def run(numbers, g):
        v = ms.tensor(numbers, requires_grad=True)
        with ms.backend(backend):
            y = values_of(f(ms.SparseTensor(P, laid_out(v, array=numbers))))
            g = np.random.default_rng(1).normal(size=y.shape) if g is None else g(y.shape)
            return g, (y.data.tobytes(), ms.grad(y, v, g).tobytes())

    g, expected = run(numbers, None)
    for layout in LAYOUTS.values():
        assert run(layout(numbers), None)[1] == expected
        assert run(numbers, lambda shape, layout=layout: layout(g))[1] == expected
    ones = run(numbers, np.ones)[1]
    assert run(numbers, lambda shape: np.broadcast_to(1.0, shape))[1] == ones


@every
def test_values_stay_attached(f):
    """CASES 9: values that are an expression, through all of the algebra."""
    v = ms.tensor(np.arange(1.0, 7), requires_grad=True)
    doubled = ms.tensor(2 * v.data, requires_grad=True)
    y, expected = (values_of(f(ms.SparseTensor(P, values))) for values in (2 * v, doubled))
    g = np.random.default_rng(1).normal(size=y.shape)
    np.testing.assert_allclose(ms.grad(y, v, g), 2 * ms.grad(expected, doubled, g), rtol=1e-12)


def test_scipy_on_the_left_is_recorded():
    """CASES 10: as on the right; where SciPy does not ask us, a TypeError that names the way."""
    S, A = ms.SparseParameter(B), sp.csr_array(np.arange(16.0).reshape(4, 4))
    for left, right, sign in ((A + S, S + A, 1), (A - S, S - A, -1), (ms.multiply(A, S), S * A, 1)):
        assert left.pattern == right.pattern
        np.testing.assert_array_equal(left.values.data, sign * right.values.data)
        g = np.arange(1.0, left.nnz + 1)
        np.testing.assert_array_equal(
            ms.grad(left.values, S, g), sign * ms.grad(right.values, S, g)
        )
    (product,) = ms.grad((ms.matmul(A, S)).values.sum(), [S])
    np.testing.assert_array_equal(product, A.sum(axis=0)[S.pattern.rows])
    for call in (lambda: A @ S, lambda: A.dot(S), lambda: A * S, lambda: sp.csr_matrix(A) * S):
        try:
            result = call()
        except TypeError as error:
            assert "ms." in str(error)  # noqa: PT017 - SciPy's version decides which it is
        else:
            assert isinstance(result, ms.SparseTensor)
            assert result.values.requires_grad


def test_structure_of_results():
    """CASES 13, 14, 15, 16, 17: canonical, zeros kept, narrow, of the shape that was said."""
    raw = np.array([5.0, 7.0, 1.0, -1.0]), np.array([2, 0, 1, 1]), np.array([0, 2, 4])
    A = sp.csr_array(
        tuple(a.astype(np.int64) if a.dtype.kind == "i" else a for a in raw), shape=(2, 6)
    )
    before = [a.tobytes() for a in (A.data, A.indices, A.indptr)]
    S = ms.SparseParameter(sp.csr_array(([1.0], ([0], [0])), shape=(2, 6)))
    zero = S - S.to_scipy()
    assert zero.nnz == 1
    for result, shape in (
        (A + S, (2, 6)),
        (S - A, (2, 6)),
        (ms.multiply(A, S), (2, 6)),
        (ms.matmul(A, S.T), (2, 2)),
        (ms.block([[A, S]]), (2, 12)),
        (ms.block_diag([S, A])[[1, 0, 2]], (3, 12)),
        (ms.block([[S], [A]]).T, (6, 4)),
    ):
        p = result.pattern
        assert result.shape == p.shape == shape
        assert ms.Pattern(p.shape, p.indptr, p.indices) == p  # sorted, nothing twice, in range
        assert p.indices.dtype == p.indptr.dtype == np.int32
    assert (A + S).nnz == 3  # 1 - 1, given as two entries, is one that is zero
    assert [a.tobytes() for a in (A.data, A.indices, A.indptr)] == before
    first = (A + S).pattern, (S @ S.T).pattern
    (S + S).values.sum().backward()
    ms.optim.SGD([S], lr=0.5).step()  # to 0.0
    assert S.values.item() == 0
    assert ((A + S).pattern, (S @ S.T).pattern) == first
    assert (S @ S.T).pattern is first[1]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (3, 4)])
def test_nothing_stored_anywhere(shape):
    """CASES 20, 21: right shapes, zeros, gradients of length 0, from every operation."""
    v = ms.tensor(np.zeros(0), requires_grad=True)
    n, m = shape
    S = ms.SparseTensor(ms.Pattern(shape, np.zeros(n + 1, int), []), v)
    for result, expected in (
        (S + S, shape),
        (S * S, shape),
        (S @ S.T, (n, n)),
        (S.T @ S, (m, m)),
        (S[[]], (0, m)),
        (ms.block([[S, S]]), (n, 2 * m)),
        (ms.block_diag([S, S.T]), (n + m, n + m)),
        (S.scale(rows=np.ones(n), cols=np.ones(m)), shape),
        (S.row_softmax(), shape),
        (S.T.row_softmax(), (m, n)),
        (S.to_dense(), shape),
        (S.sum(), ()),
        (S.sum(axis=0), (m,)),
        (S.sum(axis=1), (n,)),
        (S.row_mean(), (n,)),
        (S.diagonal(), (min(n, m),)),
    ):
        values = values_of(result)
        assert result.shape == expected
        assert not values.data.any()
        assert ms.grad(values, v, np.ones(values.shape)).shape == (0,)
    for result in (S.row_max(), S.row_logsumexp()):
        np.testing.assert_array_equal(result.data, np.full(n, -np.inf))
        assert ms.grad(result, v, np.ones(n)).shape == (0,)
    x = ms.spsolve(S @ S.T + sp.eye_array(n), np.ones(n))
    np.testing.assert_array_equal(x.data, np.ones(n))


def test_changes_in_place_are_seen():
    """CASES 26: what the algebra saved, and what the solver keeps, belongs to one set of values."""
    b = np.arange(1.0, 5)

    def fresh():
        return ms.SparseParameter(ms.diag(b) + 0.1 * B.to_scipy())

    for f in (
        lambda W: W @ W,
        lambda W: W * W,
        lambda W: W.row_max(),
        lambda W: W.row_logsumexp(),
        lambda W: ms.block([[W, W * W]]),
    ):
        W = fresh()
        y = values_of(f(W)).sum()
        with ms.no_grad():
            W.free += 1.0
        with pytest.raises(RuntimeError, match="changed in place"):
            y.backward()
    W = fresh()
    x = ms.spsolve(W, b)
    expected = ms.grad(x.sum(), W, retain_graph=True)
    with ms.no_grad():
        W.free *= 2.0
    with pytest.raises(RuntimeError, match="spsolve saved was changed in place"):
        ms.grad(x.sum(), W)
    np.testing.assert_allclose(ms.grad(ms.spsolve(W, b).sum(), W), expected / 4)


@BACKENDS
@given(data=st.data(), shape=st.tuples(SIDES, SIDES))
def test_nan_and_inf_reach_their_rows_and_no_others(backend, data, shape):
    """CASES 29: in sums and products, and in what is taken over rows."""
    special = st.sampled_from([0.0, 1.0, -2.0, np.inf, -np.inf, np.nan])
    p, q = data.draw(mt.patterns(shape=shape)), data.draw(mt.patterns(shape=shape[::-1]))
    v, w = (data.draw(mt.arrays(shape=(r.nnz,), elements=special)) for r in (p, q))
    A, C = ms.SparseTensor(p, v), ms.SparseTensor(q, w)
    with np.errstate(all="ignore"), ms.backend(backend):
        product, total = np.zeros((shape[0], shape[0])), np.zeros(shape)
        for i, j, x in zip(p.rows, p.indices, v, strict=True):
            total[i, j] += x
            for e in range(*q.indptr[j : j + 2]):
                product[i, q.indices[e]] += x * w[e]
        for j, i, x in zip(q.rows, q.indices, w, strict=True):
            total[i, j] += x
        np.testing.assert_array_equal(dense(A @ C), product)
        np.testing.assert_array_equal(dense(A + C.T), total)
        for i, (start, end) in enumerate(zip(p.indptr, p.indptr[1:], strict=False)):
            row = v[start:end]
            np.testing.assert_array_equal(A.row_max().data[i], row.max(initial=-np.inf))
            np.testing.assert_array_equal(A.sum(axis=1).data[i], row.sum())
            if len(row) and not (row == -np.inf).all():
                soft, logs = scipy.special.softmax(row), scipy.special.logsumexp(row)
                np.testing.assert_allclose(A.row_softmax().values.data[start:end], soft, rtol=1e-12)
                np.testing.assert_allclose(A.row_logsumexp().data[i], logs, rtol=1e-12)


# ------------------------------------------------------------------------------------- once only


def test_structure_is_worked_out_once(monkeypatch):
    """Equal patterns share it, whoever made them; a step is arithmetic on values."""
    calls = []
    index_map, from_scipy = algebra.IndexMap, ms.Pattern.from_scipy
    monkeypatch.setattr(algebra, "IndexMap", lambda *a: calls.append("map") or index_map(*a))
    monkeypatch.setattr(
        ms.Pattern, "from_scipy", staticmethod(lambda *a: calls.append("product") or from_scipy(*a))
    )

    def operands(seed):
        rng = np.random.default_rng(seed)
        patterns = [ms.Pattern.random((6, 6), density=0.4, rng=s) for s in (11, 12)]
        return [ms.SparseTensor(p, rng.normal(size=p.nnz)) for p in patterns]

    first = operands(0)
    results = [f(*first).pattern for f in (algebra._add, algebra._multiply, algebra._matmul)]
    for seed in (1, 2):
        again = operands(seed)
        same = [f(*again).pattern for f in (algebra._add, algebra._multiply, algebra._matmul)]
        assert all(a is b for a, b in zip(results, same, strict=True))
    assert calls == ["map", "map", "map", "product"]  # a sum has one, a product of entries two


@pytest.mark.parametrize("kept", [0, 1])
def test_structure_is_released_with_either_pattern(kept):
    p = [ms.Pattern.random((9, 9), density=0.3, rng=seed) for seed in (21, 22)]
    S = [ms.SparseTensor(q, np.ones(q.nnz)) for q in p]
    results = [S[0] + S[1], S[0] @ S[1], S[1] @ S[0], ms.block([[S[0], S[1]]])]
    died = [weakref.ref(r.pattern) for r in results]
    gc.disable()
    try:
        del results
        assert all(ref() is not None for ref in died)
        del S[1 - kept], p[1 - kept]
        assert [ref() for ref in died] == [None] * 4
    finally:
        gc.enable()


def test_self_product_leaves_no_cycle():
    p = ms.Pattern.random((9, 9), density=0.3, rng=31)
    A = ms.SparseTensor(p, np.ones(p.nnz))
    seen = weakref.ref((A @ A).pattern), weakref.ref(p)
    gc.disable()
    try:
        del A, p
        assert [ref() for ref in seen] == [None, None]
    finally:
        gc.enable()


@pytest.mark.compiled
def test_a_stream_of_constant_patterns_leaves_memory_flat(in_new_process):
    """Each meets the parameter once; what was derived for the two goes with it."""
    printed = in_new_process(
        "import numpy as np, scipy.sparse as sp, minisparse as ms\n"
        "W = ms.SparseParameter(sp.random_array((200, 200), density=0.1, random_state=0))\n"
        "def rss():\n"
        "    return int(open('/proc/self/status').read().split('VmRSS:')[1].split()[0]) / 1024\n"
        "for step in range(1200):\n"
        "    A = sp.random_array((200, 200), density=0.1, random_state=step + 1)\n"
        "    loss = (W + A).values.sum() + (W @ A).values.sum() + (W * A).values.sum()\n"
        "    (loss + ms.block([[W, A]]).row_softmax().values.sum()).backward()\n"
        "    W.grad = None\n"
        "    if step == 200:\n"
        "        before = rss()\n"
        "del A, loss\n"
        "print(rss() - before, len(W.pattern._combined))\n"
    )
    grown, kept = printed.split()
    assert float(grown) < 10  # MB; one product has 40,000 entries
    assert int(kept) == 0


def test_one_factorisation_for_each_set_of_values(monkeypatch):
    import scipy.sparse.linalg

    count, splu = [], scipy.sparse.linalg.splu
    monkeypatch.setattr(scipy.sparse.linalg, "splu", lambda *a: count.append(1) or splu(*a))
    W = ms.SparseParameter(sp.diags_array([1.0, 4.0, 1.0], offsets=[-1, 0, 1], shape=(5, 5)))
    b = ms.tensor(np.ones(5), requires_grad=True)
    x = ms.spsolve(W, b)
    first = ms.grad(ms.sum(x * x), W, create_graph=True)
    ms.grad(ms.sum(first * first), [W, b])
    ms.spsolve(W, 2 * b)
    ms.spsolve(W.T, b)
    ms.spsolve(W, b).sum().backward()
    tied = ms.SparseParameter(ms.diag(np.ones(5)), share=np.zeros((5, 5), int))
    ms.spsolve(tied, b)
    with ms.no_grad():  # makes other values of the same weights
        ms.spsolve(tied, b)
    assert count == [1, 1]
    count.pop()
    before = W.to_scipy()
    ms.optim.SGD([W], lr=0.1).step()  # other values
    np.testing.assert_allclose(W.to_scipy() @ ms.spsolve(W, b).data, np.ones(5))
    assert len(count) == 2
    assert abs(W.to_scipy() - before).max() > 0
    held = len(linalg._factors)
    copies = copy.deepcopy(W), pickle.loads(pickle.dumps(W))
    assert all(c.nnz == W.nnz for c in copies)
    del x, first, W
    assert len(linalg._factors) == held - 1  # the factors go with the matrix


def test_odd_operands_of_the_solver():
    """Strided values, integers, and nothing to solve for."""
    t = ms.tensor([1.0, 2.0], requires_grad=True)
    S = ms.SparseTensor(ms.Pattern.diagonal(2), t[::-1])
    np.testing.assert_array_equal(ms.spsolve(S, [2.0, 2.0]).data, [1.0, 2.0])
    S = ms.diag(ms.broadcast_to(ms.tensor(2.0), shape=(2,)))
    for b in (np.array([1, 2]), np.array([1, 2], np.float16), [1, 2]):
        np.testing.assert_array_equal(ms.spsolve(S, b).data, [0.5, 1.0])
        np.testing.assert_array_equal(ms.spsolve(S.to_scipy(), b).data, [0.5, 1.0])
    x = ms.spsolve(ms.diag(t), np.zeros((2, 0)))
    assert isinstance(x, ms.Tensor)
    x.sum().backward()
    np.testing.assert_array_equal(t.grad, [0.0, 0.0])
    for bad in ([np.nan, 1.0], [np.inf, 1.0]):
        try:
            assert not np.isfinite(ms.spsolve(ms.diag(bad), [1.0, 1.0]).data).all() or np.inf in bad
        except np.linalg.LinAlgError as error:
            assert "NaN" in str(error)  # noqa: PT017 - SuperLU's version decides which it is


def test_singular_matrices_are_named():
    structural = ms.SparseTensor(ms.Pattern((2, 2), [0, 1, 2], [0, 0]), [1.0, 1.0])
    for S in (structural, ms.diag([1.0, 0.0])):
        with pytest.raises(np.linalg.LinAlgError, match="singular"):
            ms.spsolve(S, [1.0, 1.0])
    assert ms.spsolve(ms.diag(np.zeros(0)), np.zeros(0)).shape == (0,)
    assert ms.spsolve(ms.diag([2.0]), np.zeros((1, 0))).shape == (1, 0)


def test_what_is_refused_and_what_is_converted():
    S = ms.SparseTensor.from_scipy(sp.csr_array(np.array([[2.0, 0.0], [1.0, 3.0]])))
    for kind in (np.uint8, np.int8, np.uint64, bool, np.float32):  # no arithmetic in A's own dtype
        A = sp.csr_array(np.array([[1, 0], [0, 1]]).astype(kind))
        for got, expected in ((S - A, dense(S) - np.eye(2)), (A - S, np.eye(2) - dense(S))):
            np.testing.assert_array_equal(dense(got), expected)
    np.testing.assert_array_equal(S.scale(rows=np.array([1, 2], np.float16)).values.data, [2, 2, 6])
    for bad in (np.array(["a", "b"]), np.array([1j, 2]), np.array([None, 1])):
        with pytest.raises(TypeError, match="scale"):
            S.scale(cols=bad)
    W = ms.SparseParameter(S)
    for change in ("W -= S", "W += S", "W *= 2.0", "W /= 2.0", "W @= S"):
        with ms.no_grad(), pytest.raises(TypeError, match=r"W\.free"):
            exec(change, {"W": W, "S": S})
    with pytest.raises(TypeError, match="to_dense"):
        S + np.ones((2, 2))


def test_pairs_leave_nothing_behind():
    """Whichever of the two lives on, and however often others met it."""
    W = ms.SparseParameter(sp.random_array((20, 20), density=0.2, random_state=0))
    for step in range(1, 30):
        if step == 2:
            before = len(weakref.finalize._registry), weakref.getweakrefcount(W.pattern)
        A = sp.random_array((20, 20), density=0.2, random_state=step)
        batch = np.random.default_rng(step).integers(20, size=5)
        ms.matmul(A, W), A + W, W[batch] @ W, ms.block([[A], [W]])
    del A
    assert (len(weakref.finalize._registry), weakref.getweakrefcount(W.pattern)) == before


@pytest.mark.compiled
def test_a_giant_row_among_threads():
    """What is derived for the kernels is seen by other threads when it is complete."""
    n = 200_000
    indptr = np.append(0, np.full(n, 40_000))
    before, x, wrong = ms.get_num_threads(), np.ones((n, 1)), []
    ms.set_num_threads(1)
    try:
        for _ in range(20):
            S = ms.SparseTensor(ms.Pattern((n, n), indptr, np.arange(40_000)), np.ones(40_000))
            S.pattern.plan  # noqa: B018 - the race is about what comes after
            threads = [
                threading.Thread(target=lambda S=S: wrong.append((S @ x).data[0, 0] != 40_000))
                for _ in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        ms.set_num_threads(before)
    assert len(wrong) == 80
    assert not any(wrong)


# ------------------------------------------------------------------------------------- kernels


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bitwise_for_every_thread_count(monkeypatch, dtype):
    """Also with rows of very different length; and equal to the reference, bit for bit."""
    rng = np.random.default_rng(0)
    mask = rng.random((200, 150)) < 0.05
    mask[17] = True
    p, q = ms.Pattern.from_mask(mask), ms.Pattern.from_mask(mask.T)
    a, b = (rng.normal(size=r.nnz).astype(dtype) for r in (p, q))

    def everything():
        A, B = (ms.tensor(x, requires_grad=True) for x in (a, b))
        S = ms.SparseTensor(p, A)
        C = S @ ms.SparseTensor(q, B)
        g = np.random.default_rng(1).normal(size=C.nnz)
        return [C.values, S.row_max(), *ms.grad(C.values, [A, B], g)]

    def bits(results):
        return [np.asarray(getattr(x, "data", x)).tobytes() for x in results]

    with ms.backend("reference"):
        expected = bits(everything())
    before = ms.get_num_threads()
    try:
        for n in (1, 2, 4):
            ms.set_num_threads(n)
            assert bits(everything()) == expected
            monkeypatch.setattr(cpu, "PARALLEL_WORK", -1)
            monkeypatch.setattr(cpu, "CHUNK_WORK", 64)
    finally:
        ms.set_num_threads(before)


def test_wide_indices():
    """64-bit index arrays, also mixed with 32-bit ones, go through the same kernels."""
    rng = np.random.default_rng(0)
    A = sp.random_array((12, 9), density=0.4, random_state=rng, format="csr")
    p = ms.Pattern.from_scipy(A)
    wide = ms.Pattern._trusted(p.shape, p.indptr, p.indices)
    vars(wide).update(indptr=p.indptr.astype(np.int64), indices=p.indices.astype(np.int64))
    S, T = ms.SparseTensor(wide, A.data), ms.SparseTensor.from_scipy(A.T)
    np.testing.assert_allclose(dense(S @ T), (A @ A.T).toarray())
    np.testing.assert_allclose(dense(S + S), 2 * A.toarray())
    np.testing.assert_array_equal(S.row_max().data, ms.SparseTensor.from_scipy(A).row_max().data)


@pytest.mark.compiled
def test_memory_of_an_attention_layer(in_new_process):
    """No array of nnz × k: forward and backward of 1 M edges stay near a few vectors of edges."""
    printed = in_new_process(
        "import numpy as np, minisparse as ms\n"
        "n, k = 100_000, 64\n"
        "p = ms.Pattern.random((n, n), fan_in=10, rng=0)\n"
        "x = np.ones((n, k), np.float32)\n"
        "ms.warmup(['float32'])\n"
        "def peak():\n"
        "    return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) / 1024\n"
        "h = ms.tensor(x, requires_grad=True)\n"
        "before = peak()\n"
        "(ms.sddmm(h, h, p).row_softmax() @ h).backward(x)\n"
        "print(peak() - before)\n"
    )
    assert float(printed) < 250  # an array of nnz × k alone would be 256 MB, and there would be six


# ------------------------------------------------------------------------- derivatives of functions


def quadratic(W, x):
    """x'W'W x, whose derivatives are known."""
    return ((W @ x) ** 2).sum()


def test_derivatives_of_a_quadratic():
    rng = np.random.default_rng(0)
    A, x, t = sp.csr_array(rng.normal(size=(4, 3))), rng.normal(size=3), rng.normal(size=3)
    W, M = ms.SparseParameter(A), A.toarray()
    H = 2 * M.T @ M

    def f(x):
        return quadratic(W, x)

    np.testing.assert_allclose(ms.hessian(f, x), H)
    np.testing.assert_allclose(ms.hvp(f, x, t), H @ t)
    np.testing.assert_allclose(ms.jacobian(lambda x: W @ x, x), M)
    y, pullback = ms.vjp(lambda x: W @ x, x)
    np.testing.assert_allclose(y, M @ x)
    for g in (np.ones(4), np.arange(4.0)):  # as often as wanted
        np.testing.assert_allclose(pullback(g), M.T @ g)
    y, dy = ms.jvp(lambda W, x: W @ x, (W, x), (np.ones(W.n_free), t))
    np.testing.assert_allclose(dy, M @ t + np.full(4, x.sum()))
    value, (dw, dx) = ms.value_and_grad(quadratic)(W, x)
    assert isinstance(value, float)
    np.testing.assert_allclose(dx, H @ x)
    assert dw.shape == (W.n_free,)
    assert W.grad is None


def test_a_leaf_is_used_as_it_is():
    """So `f` may reach its parameters through a model; others are replaced by a new leaf."""
    model = ms.nn.SparseLinear(3, 2, fan_in=2, dtype=np.float64, rng=0)
    x = np.ones((5, 3))
    value, gradients = ms.value_and_grad(lambda *_: (model(x) ** 2).sum())(*model.parameters())
    loss = (model(x) ** 2).sum()
    loss.backward()
    for g, p in zip(gradients, model.parameters(), strict=True):
        np.testing.assert_array_equal(g, p.grad)
    assert value == loss.item()
    tangents = [np.ones(p.shape) for p in (model.weight.free, model.bias)]
    rows = ms.hvp(lambda *_: (model(x) ** 2).sum(), model.parameters(), tangents)
    assert [r.shape for r in rows] == [t.shape for t in tangents]
    t = ms.tensor([1.0, 2.0]) * 3  # not a leaf that requires grad
    np.testing.assert_array_equal(ms.jacobian(lambda t: t * t, t), np.diag([6.0, 12.0]))
    S = ms.diag([1.0, 2.0])
    np.testing.assert_array_equal(ms.jacobian(lambda S: S.row_softmax(), S), np.zeros((2, 2)))
    tied = ms.SparseParameter(sp.eye_array(3), share=np.zeros((3, 3), int))
    np.testing.assert_array_equal(
        ms.hessian(lambda W: ((W @ np.arange(3.0)) ** 2).sum(), tied), [[10.0]]
    )


def test_functional_under_no_grad_and_what_does_not_depend():
    with ms.no_grad():
        assert ms.value_and_grad(lambda x: (x * x).sum())([3.0])[1] == 6.0
        assert ms.hvp(lambda x: (x**3).sum(), [2.0], [1.0]) == 12.0
        assert ms.jvp(lambda x: x**3, [2.0], [1.0])[1] == 12.0
    constant = ms.tensor([1.0, 2.0])
    np.testing.assert_array_equal(ms.jacobian(lambda x: constant, [1.0]), np.zeros((2, 1)))
    np.testing.assert_array_equal(ms.hvp(lambda x: ms.sum(x), [1.0], [1.0]), [0.0])
    np.testing.assert_array_equal(ms.jvp(lambda x: constant, [1.0], [1.0])[1], [0.0, 0.0])


def test_functional_with_weights_that_are_switched_off():
    """A parameter whose `free` does not require grad is replaced by one whose does."""
    W = ms.SparseParameter(sp.csr_array(np.ones((2, 2))), trainable=np.eye(2, dtype=bool))
    W.free.requires_grad = False
    y, pullback = ms.vjp(lambda W: W @ [1.0, 2.0], W)
    np.testing.assert_array_equal(pullback(np.ones(2)), [1.0, 2.0])
    p = ms.tensor([2.0, 3.0], requires_grad=True)
    y, _ = ms.vjp(lambda x: x, p)
    with ms.no_grad():
        p += 10
    np.testing.assert_array_equal(y, [2.0, 3.0])


LEAF = ms.tensor([2.0, 3.0], requires_grad=True)


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (TypeError, lambda: ms.vjp(lambda x: 3.0, [1.0])),
        (TypeError, lambda: ms.jacobian(lambda x: [x, x], [1.0])),
        (ValueError, lambda: ms.vjp(lambda: ms.tensor(1.0))),
        (ValueError, lambda: ms.jvp(lambda x: x, [1.0], [1.0, 2.0])),
        (ValueError, lambda: ms.jvp(lambda x, y: x * y, (1.0, 2.0), (1.0,))),
        (ValueError, lambda: ms.hessian(lambda x: x * x, [1.0, 2.0])),
        (ValueError, lambda: ms.hvp(lambda x: x * x, [1.0, 2.0], [1.0, 1.0])),
        (ValueError, lambda: ms.value_and_grad(lambda x: x * x)([1.0, 2.0])),
        (ValueError, lambda: ms.vjp(lambda a, b: a * b, LEAF, LEAF)),
        (ValueError, lambda: ms.value_and_grad(lambda a, b: (a * b).sum())(LEAF, LEAF)),
        (TypeError, lambda: ms.value_and_grad(lambda x: x * x)(["a"])),
    ],
)
def test_functional_says_what_is_wrong(error, call):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).strip()
