"""Patterns, sparse tensors and parameters: the cases users reported, one by one."""

import copy
import pickle
import weakref

import numpy as np
import pytest
import scipy.sparse as sp

import minisparse as ms
from minisparse.pattern import IndexMap

from .layouts import LAYOUTS, laid_out

A = sp.csr_array(np.array([[1.0, 0, 2], [0, 3, 0]]))
B = np.array([[1.0, 2], [3, 4], [5, 6]])


def parameter(pattern, rng=0):
    return ms.SparseParameter((pattern, np.random.default_rng(rng).normal(size=pattern.nnz)))


# --------------------------------------------------------------------------------- products


def test_toy():
    """The example of CASES: product, gradient of the values, of the dense operand."""
    W, X = ms.SparseParameter(A), ms.tensor(B, requires_grad=True)
    Y = W @ X
    np.testing.assert_array_equal(Y.data, [[11, 14], [9, 12]])
    Y.sum().backward()
    np.testing.assert_array_equal(W.grad, [3, 11, 7])
    np.testing.assert_array_equal(X.grad, [[1, 1], [3, 3], [2, 2]])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_layouts_give_the_same_bits(dtype):
    """CASES 1, 2, 3: cotangents and operands in any layout, bit for bit."""
    rng = np.random.default_rng(0)
    pattern = ms.Pattern.random((40, 30), fan_in=5, rng=0)
    W = ms.SparseParameter((pattern, rng.normal(size=200)), dtype=dtype)
    x, g = rng.normal(size=(30, 17)).astype(dtype), rng.normal(size=(40, 17)).astype(dtype)

    def run(x, g):
        X = ms.tensor(x, requires_grad=True)
        Y = W @ laid_out(X, array=x)
        W.grad = None
        Y.backward(g)
        return Y.data.tobytes(), W.grad.tobytes(), X.grad.tobytes()

    expected = run(x, g)
    for layout in LAYOUTS.values():
        assert run(layout(x), g) == expected
        assert run(x, layout(g)) == expected
    ones = run(x, np.ones_like(g))
    assert run(x, np.broadcast_to(dtype(1), g.shape)) == ones


def test_cotangent_cut_from_a_concatenation():
    """CASES 2."""
    W, X = parameter(ms.Pattern.banded((4, 4), 1, 1)), ms.tensor(np.eye(4), requires_grad=True)
    rng = np.random.default_rng(1)
    joined = ms.concatenate([W @ X, W @ (2 * X)], axis=1)
    C = rng.normal(size=(4, 8))
    (joined[:, 1:7] * C[:, 1:7]).sum().backward()
    D = np.zeros((4, 8))
    D[:, 1:7] = C[:, 1:7]
    dense = D[:, :4] @ np.eye(4) + D[:, 4:] @ (2 * np.eye(4))
    np.testing.assert_allclose(W.grad, dense[W.pattern.to_mask()])


def test_tall_operand_in_fortran_order():
    """CASES 3, at n = 100,000."""
    n = 100_000
    S = ms.SparseTensor(ms.Pattern.diagonal(n), np.arange(n, dtype=float))
    x = np.arange(2.0 * n).reshape(n, 2)
    expected = (S @ x).data
    np.testing.assert_array_equal(expected, x * np.arange(n)[:, None])
    for layout in LAYOUTS.values():
        np.testing.assert_array_equal((S @ layout(x)).data, expected)


def test_diagonal_has_n_weights():
    """CASES 7."""
    W = ms.SparseParameter(sp.diags_array([1.0, 2.0, 3.0]))
    (W @ np.ones((3, 3))).sum().backward()
    np.testing.assert_array_equal(W.grad, [3, 3, 3])


def test_empty():
    """CASES 20, 21."""
    W = ms.SparseParameter((ms.Pattern((3, 2), [0, 0, 0, 0], []), []))
    opt = ms.optim.Adam([W])
    for _ in range(1000):
        Y = W @ np.full((2, 5), 7.0)
        assert not Y.data.any()
    Y.sum().backward()
    assert W.grad.shape == (0,)
    opt.step()
    for left, right in [((0, 4), (4, 0)), ((3, 0), (0, 2)), ((2, 2), (2, 0))]:
        W = parameter(ms.Pattern.dense(left))
        X = ms.tensor(np.ones(right), requires_grad=True)
        Y = W @ X
        assert Y.shape == (left[0], right[1])
        assert not Y.data.any()
        Y.sum().backward()
        assert X.grad.shape == right
        assert W.grad.shape == (W.nnz,)


def test_tridiagonal():
    """CASES 22."""
    n = 50_000
    S = ms.SparseTensor.from_scipy(
        sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n))
    )
    x = ms.tensor(np.ones(n), requires_grad=True)
    (S @ x).sum().backward()
    assert x.grad[0] == x.grad[-1] == 1
    assert not x.grad[1:-1].any()


def test_nan_and_inf_come_through():
    """CASES 29."""
    S = ms.SparseTensor(ms.Pattern((3, 3), [0, 2, 3, 3], [0, 1, 2]), [0.0, 1.0, 2.0])
    x = np.array([[np.inf, 1.0], [1.0, 1.0], [np.nan, 3.0]])
    np.testing.assert_array_equal((S @ x).data, [[np.nan, 1], [np.nan, 6], [0, 0]])
    np.testing.assert_array_equal((x[:, 0] @ S).data, [np.nan, np.inf, 2.0])
    np.testing.assert_array_equal(
        ms.sddmm(np.array([[0.0], [1.0], [1.0]]), x[:, :1], S.pattern).values.data,
        [np.nan, 0, np.nan],
    )


@pytest.mark.parametrize("wrap", [sp.csr_array, sp.csr_matrix, sp.coo_array, sp.bsr_array])
def test_scipy_constants(wrap):
    x = ms.tensor(B, requires_grad=True, dtype="float32")
    y = ms.matmul(wrap(A), x)
    assert y.dtype == np.float32
    y.sum().backward()
    np.testing.assert_array_equal(x.grad, [[1, 1], [3, 3], [2, 2]])
    assert (x.T @ wrap(A.T)).shape == (2, 2)
    assert isinstance(ms.multiply(x.T, wrap(A)), ms.SparseTensor)
    if wrap is sp.csr_matrix:
        with pytest.raises(TypeError, match=r"ms\.matmul"):
            x.T * wrap(A)
    else:
        assert isinstance(x.T * wrap(A), ms.SparseTensor)
    assert isinstance(ms.matmul(wrap(A), B), np.ndarray)
    assert sp.issparse(ms.multiply(wrap(A), 2.0))
    assert sp.issparse(ms.matmul(wrap(A), wrap(A.T)))


def test_operators():
    W = ms.SparseParameter(A)
    for S, expected in [
        (W * 2, A.toarray() * 2),
        (2 * W, A.toarray() * 2),
        (np.float64(2) * W, A.toarray() * 2),
        (ms.tensor(2.0) * W, A.toarray() * 2),
        (W / 2, A.toarray() / 2),
        (-W, -A.toarray()),
        (W + W, A.toarray() * 2),
        (W - W, A.toarray() * 0),
        (W * W, A.toarray() ** 2),
        (np.full((2, 3), 3.0) * W, A.toarray() * 3),
    ]:
        assert isinstance(S, ms.SparseTensor)
        assert S.nnz == 3  # what cancels stays stored
        np.testing.assert_array_equal(S.to_scipy().toarray(), expected)
    np.testing.assert_array_equal((B.T @ W.T).data, B.T @ A.toarray().T)
    np.testing.assert_array_equal(([1.0, 1.0] @ W).data, [1, 3, 2])
    for bad in (lambda: W + 1.0, lambda: W / W, lambda: ms.tensor(1.0) + W):
        with pytest.raises(TypeError):
            bad()
    with pytest.raises(TypeError, match="to_dense"):
        np.asarray(W)
    with pytest.raises(TypeError):
        np.exp(W)


def test_transpose_is_a_live_view():
    W = ms.SparseParameter(sp.csr_array(A != 0).astype(float), share=np.zeros((2, 3), int))
    T = W.T
    assert T.T is W
    before = (T @ np.ones(2)).data
    with ms.no_grad():
        W.free.data = [5.0]
    np.testing.assert_array_equal((T @ np.ones(2)).data, 5 * before)
    np.testing.assert_array_equal(T.to_scipy().toarray(), W.to_scipy().toarray().T)
    np.testing.assert_array_equal(T.values.data, [5, 5, 5])
    (T @ np.ones(2)).sum().backward()
    np.testing.assert_array_equal(W.grad, [3])


def test_values_stay_attached():
    """CASES 9."""
    v = ms.tensor([1.0, 2.0, 3.0], requires_grad=True)
    S = ms.SparseTensor(ms.Pattern((3, 3), [0, 2, 2, 3], [0, 2, 1]), v)
    S.to_dense().sum().backward()
    np.testing.assert_array_equal(v.grad, [1, 1, 1])
    assert S.values is v
    assert S.grad is v.grad


def test_reference_backend_gives_the_same():
    W, X = parameter(ms.Pattern.random((20, 30), fan_in=4, rng=0)), np.ones((30, 3))
    fast = W @ X
    with ms.backend("reference"):
        np.testing.assert_allclose((W @ X).data, fast.data)
    with pytest.raises(ValueError, match="backend"), ms.backend("gpu"):
        pass


# ---------------------------------------------------------------------------------- structure


@pytest.mark.parametrize(
    ("shape", "indptr", "indices"),
    [
        ((3, 0), [0, 1, 1, 1], [0]),
        ((2, 3), [0, 1, 2], [0, 3]),
        ((2, 3), [0, 1, 2], [0, -1]),
        ((2, 3), [0, 2, 1], [0, 1]),
        ((2, 3), [1, 1, 2], [0, 1]),
        ((2, 3), [0, 1, 1], [0, 1]),
        ((2, 3), [0, 1, 3], [0, 1]),
        ((2, 3), [0, 1], [0]),
        ((2, 3), [0, 2, 2], [1, 0]),
        ((2, 3), [0, 2, 2], [1, 1]),
        ((2, 3), [[0, 1, 2]], [0, 1]),
        ((-1, 3), [0], []),
        ((2, 3), [0, 1, 2], [0, 2**40]),
    ],
)
def test_bad_structure(shape, indptr, indices):
    """CASES 12."""
    with pytest.raises(ValueError, match=r"\w"):
        ms.Pattern(shape, indptr, indices)


def test_bad_kinds():
    """CASES 19."""
    for arguments in [
        ((2, 3), [0, 1.0, 2], [0, 1]),
        ((2, 3), [0, 1, 2], [True, False]),
        (3, [0], []),
    ]:
        with pytest.raises(TypeError):
            ms.Pattern(*arguments)
    p = ms.Pattern.from_scipy(A)
    for array in (p.indptr, p.indices, p.rows, p.fan_in, p.fan_out):
        assert array.dtype == np.int32
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(AttributeError, match="immutable"):
        p.shape = (1, 1)


def test_callers_arrays_stay_his():
    indices = np.array([0, 1])
    p = ms.Pattern((2, 3), [0, 1, 2], indices)
    indices[0] = 2
    assert p.indices[0] == 0
    assert indices.flags.writeable


def test_duplicates_merge():
    """CASES 13."""
    C = sp.csr_array((np.array([1.0, 1.0]), np.array([0, 0]), np.array([0, 0, 2])), shape=(2, 2))
    before = [a.tobytes() for a in (C.data, C.indices, C.indptr)]
    W = ms.SparseParameter(C)
    assert W.nnz == 1
    assert W.values.item() == 2
    assert W.free.shape == (1,)
    assert [a.tobytes() for a in (C.data, C.indices, C.indptr)] == before
    (W @ np.ones(2)).sum().backward()
    assert W.grad.shape == (1,)


def test_unsorted_columns():
    """CASES 14."""
    C = sp.csr_array((np.array([5.0, 7.0]), np.array([2, 0]), np.array([0, 2])), shape=(1, 3))
    W = ms.SparseParameter(C)
    np.testing.assert_array_equal(W.values.data, [7, 5])
    (W @ np.array([1.0, 10.0, 100.0])).sum().backward()
    np.testing.assert_array_equal(W.grad, [1, 100])
    np.testing.assert_array_equal(C.indices, [2, 0])


def test_stale_scipy_flags_are_not_believed():
    C = sp.csr_array(np.array([[1.0, 2.0]]))
    assert C.has_canonical_format
    C.indices[:] = C.indices[::-1]
    np.testing.assert_array_equal(ms.SparseParameter(C).values.data, [2, 1])
    C.indices[0] = 17
    with pytest.raises(ValueError, match="columns"):
        ms.SparseParameter(C)
    for other in (sp.coo_array(A).copy(), sp.csc_array(A), sp.bsr_array(A).copy()):
        (other.coords[1] if other.format == "coo" else other.indices)[0] = 1000
        with pytest.raises(ValueError):
            ms.Pattern.from_scipy(other)


def test_zeros_stay_stored_and_trainable():
    """CASES 15."""
    C = sp.csr_array((np.array([0.0, 1.0]), np.array([0, 1]), np.array([0, 2])), shape=(1, 2))
    S = ms.SparseTensor.from_scipy(C)
    assert (S + S).nnz == 2
    W = ms.SparseParameter(C)
    opt = ms.optim.SGD([W], lr=1.0)
    for _ in range(3):
        opt.zero_grad()
        (W @ np.ones(2)).sum().backward()
        opt.step()
        if W.values.data[1] == 0:
            zero_was_stored = W.nnz == 2
    assert zero_was_stored
    np.testing.assert_array_equal(W.values.data, [-3, -2])


def test_index_dtype_survives():
    """CASES 16."""
    C = sp.csr_array(A)
    C.indices, C.indptr = C.indices.astype(np.int64), C.indptr.astype(np.int64)
    W = ms.SparseParameter(C)
    indices = W.pattern.indices
    assert indices.dtype == np.int32
    assert C.indices.dtype == np.int64
    for S in (W * 2, W + W, -W, W.astype("float32"), W.with_values(W.values * 2)):
        assert S.pattern is W.pattern
    (W @ B).sum().backward()
    ms.optim.SGD([W], lr=1.0).step()
    assert W.pattern.indices is indices
    assert W.to_scipy().indices.dtype == np.int32


def test_trailing_columns_are_kept():
    """CASES 17."""
    C = sp.coo_array(([1.0], ([0], [0])), shape=(2, 7))
    assert ms.SparseParameter(C).shape == (2, 7)
    assert (ms.SparseParameter(C) @ np.ones(7)).shape == (2,)
    assert ms.Pattern.from_coords([0], [0], (2, 7)).T.shape == (7, 2)


def test_pattern_identity():
    p = ms.Pattern.random((30, 20), density=0.1, rng=0)
    q = ms.Pattern.from_scipy(p.to_scipy())
    assert p == q
    assert hash(p) == hash(q)
    assert p.digest == q.digest
    assert p is not q
    assert p != p.T
    assert p != "p"
    assert copy.copy(p) is p
    assert copy.deepcopy(p) is p
    assert pickle.loads(pickle.dumps(p)) == p
    assert p.T.T is p
    assert p.T is p.T
    assert p.T.T.T is p.T
    np.testing.assert_array_equal(p.T.to_mask(), p.to_mask().T)
    np.testing.assert_array_equal(p.fan_in, p.to_mask().sum(axis=1))
    np.testing.assert_array_equal(p.fan_out, p.to_mask().sum(axis=0))
    np.testing.assert_array_equal(p.rows, np.nonzero(p.to_mask())[0])


def test_transpose_does_not_keep_its_origin_alive():
    p = ms.Pattern.random((30, 20), density=0.1, rng=0)
    t, origin = p.T, weakref.ref(p)
    mask = p.to_mask()
    del p
    assert origin() is None
    np.testing.assert_array_equal(t.T.to_mask(), mask)
    assert t.T.T is t


def test_builders():
    np.testing.assert_array_equal(ms.Pattern.diagonal(3).to_mask(), np.eye(3, dtype=bool))
    np.testing.assert_array_equal(ms.Pattern.tril(3).to_mask(), np.tri(3, dtype=bool))
    assert ms.Pattern.dense((2, 3)).to_mask().all()
    band = ms.Pattern.banded((4, 6), 1, 2).to_mask()
    i, j = np.indices((4, 6))
    np.testing.assert_array_equal(band, (j - i >= -1) & (j - i <= 2))
    np.testing.assert_array_equal(ms.Pattern.from_mask(band).to_mask(), band)
    p = ms.Pattern.random((50, 40), fan_in=39, rng=0)
    assert set(p.fan_in) == {39}
    assert ms.Pattern.random((50, 40), density=0.9, rng=0).nnz == 1800
    assert ms.Pattern.random((0, 40), density=0.9).nnz == 0
    assert ms.Pattern.random((5, 4), fan_in=2, rng=1) == ms.Pattern.random((5, 4), fan_in=2, rng=1)
    blocks = ms.Pattern.block_diagonal([ms.Pattern.dense((1, 2)), ms.Pattern.tril(2)])
    np.testing.assert_array_equal(
        blocks.to_mask(), sp.block_diag([np.ones((1, 2)), np.tri(2)]).toarray() != 0
    )
    assert ms.Pattern.block_diagonal([]).shape == (0, 0)
    wide = ms.Pattern((1, 2**31 - 2), [0, 1], [2**31 - 3])  # columns in 32 bits, those of two not
    assert ms.Pattern.block_diagonal([wide, wide]).indices.tolist() == [2**31 - 3, 2**32 - 5]
    local = ms.Pattern.local(4, 5, (3, 1)).to_mask()
    r, c = np.divmod(np.arange(20), 5)
    near = (abs(r[:, None] - r) <= 1) & (c[:, None] == c)
    np.testing.assert_array_equal(local, near)
    for bad in (
        lambda: ms.Pattern.random((2, 2)),
        lambda: ms.Pattern.random((2, 2), density=0.1, fan_in=1),
        lambda: ms.Pattern.random((2, 2), fan_in=3),
        lambda: ms.Pattern.random((2, 2), density=1.5),
        lambda: ms.Pattern.from_coords([0], [5], (2, 2)),
        lambda: ms.Pattern.from_coords([0, 1], [1], (2, 2)),
        lambda: ms.Pattern.diagonal(-1),
    ):
        with pytest.raises(ValueError):
            bad()
    with pytest.raises(TypeError, match="boolean"):
        ms.Pattern.from_mask(np.eye(2))


def test_spy():
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="drawing needs matplotlib")
    pyplot.switch_backend("agg")
    ax = ms.Pattern.diagonal(10).spy()
    np.testing.assert_array_equal(np.asarray(ax.images[0].get_array()), np.eye(10))
    pyplot.close("all")


def test_index_map_segments():
    m = IndexMap(np.array([2, -1, 0, 2, -1]), 4)
    indptr, order = m.segments
    np.testing.assert_array_equal(indptr, [0, 1, 1, 3, 3])
    np.testing.assert_array_equal(order, [2, 0, 3])


# --------------------------------------------------------------------------------- parameters


def trained(W, steps=3):
    opt = ms.optim.Adam([W], lr=0.1)
    for _ in range(steps):
        opt.zero_grad()
        (W @ np.ones((W.shape[1], 2))).sum().backward()
        opt.step()
    return W


def test_frozen_entries_keep_their_bits():
    payload = np.array([-0.0, np.nan, 3.0, 1e-310])
    payload.view(np.uint64)[1] |= 12345  # a NaN that carries something
    p = ms.Pattern((2, 3), [0, 2, 5], [0, 2, 0, 1, 2])
    W = ms.SparseParameter((p, np.append(payload, 1.0)), trainable=np.array([0, 0, 0, 0, 1], bool))
    assert W.n_free == 1
    with ms.no_grad():
        W.free += 5.0
    assert W.values.data[:4].tobytes() == payload.tobytes()
    assert W.values.data[4] == 6
    assert pickle.loads(pickle.dumps(W)).values.data.tobytes() == W.values.data.tobytes()


def test_trainable_forms_agree():
    D = np.array([[1.0, 0, 2], [3, 4, 0]])
    C = sp.csr_array(D)
    masks = [D != 1, sp.csr_array(D != 1), sp.coo_array(D > 1), np.array([False, True, True, True])]
    for mask in masks:
        W = trained(ms.SparseParameter(C, trainable=mask))
        assert W.n_free == 3
        values = W.to_scipy().toarray()
        assert values[0, 0] == 1
        assert not values[D == 0].any()
        assert (values[D > 1] != D[D > 1]).all()


def test_tied_entries():
    D = np.array([[1.0, 0, 2], [2, 1, 0]])
    W = ms.SparseParameter(sp.csr_array(D), share=np.array([[7, 0, 5], [5, 7, 9]]))
    np.testing.assert_array_equal(W.free.data, [1, 2])
    (W @ np.array([1.0, 10.0, 100.0])).sum().backward()
    np.testing.assert_array_equal(W.grad, [11, 101])
    trained(W)
    values = W.to_scipy().toarray()
    assert values[0, 0] == values[1, 1]
    assert values[0, 2] == values[1, 0]
    # Labels of frozen entries are ignored, and the order is that of first entries.
    mask = np.array([False, True, True, True])
    W = ms.SparseParameter(sp.csr_array(D), trainable=mask, share=np.array([5, 5, 5, 8]))
    np.testing.assert_array_equal(W.free.data, [2, 1])
    with pytest.raises(ValueError, match="label 5"):
        ms.SparseParameter(sp.csr_array(D), share=np.full(4, 5))


def test_values_is_free_when_all_are_their_own():
    W = ms.SparseParameter(A)
    assert W.values is W.free
    assert ms.SparseParameter(A, trainable=np.ones(3, bool)).values.requires_grad
    own = ms.SparseParameter(A, share=np.array([3, 1, 2]))
    assert own.values is own.free
    frozen = ms.SparseParameter(A, trainable=np.zeros(3, bool))
    assert frozen.free.shape == (0,)
    (frozen @ B).sum().backward()
    assert frozen.grad.shape == (0,)


def test_values_are_cached_and_followed():
    W = ms.SparseParameter(A, trainable=np.array([True, False, True]))
    assert W.values is W.values
    (W @ B).sum().backward()
    (W @ B).sum().backward()  # the cached values serve several losses
    np.testing.assert_array_equal(W.grad, [6, 14])
    before = W.values
    ms.optim.SGD([W], lr=1.0).step()
    assert W.values is not before
    np.testing.assert_array_equal(W.values.data, [1 - 6, 2, 3 - 14])
    with ms.no_grad():
        assert not W.values.requires_grad
    assert W.values.requires_grad


@pytest.mark.parametrize("form", ["unsorted", "duplicates", "coo"])
def test_one_dimensional_forms_need_canonical_input(form):
    """CASES 19b."""
    if form == "coo":
        C = sp.coo_array(A)
    else:
        columns = [2, 0] if form == "unsorted" else [0, 0]
        C = sp.csr_array((np.array([1.0, 2.0]), np.array(columns), np.array([0, 2])), shape=(1, 3))
    for keyword in ({"trainable": np.ones(C.nnz, bool)}, {"share": np.zeros(C.nnz, int)}):
        if form == "duplicates":
            keyword = {k: v[:1] for k, v in keyword.items()}
        with pytest.raises(ValueError, match="canonical"):
            ms.SparseParameter(C, **keyword)
    assert ms.SparseParameter(C, trainable=np.ones(C.shape, bool)).n_free > 0
    assert ms.SparseParameter(C, trainable=sp.csr_array(np.ones(C.shape, bool))).n_free > 0


def test_parameter_errors():
    for bad in (
        lambda: ms.SparseParameter(A, trainable=np.ones(2, bool)),
        lambda: ms.SparseParameter(A, trainable=np.ones((3, 2), bool)),
        lambda: ms.SparseParameter(A, share=sp.csr_array(np.ones((3, 2), int))),
        lambda: ms.SparseParameter((ms.Pattern.diagonal(2), [1.0])),
        lambda: ms.SparseParameter.from_dense(np.ones((2, 2)), np.ones((2, 3), bool)),
        lambda: ms.SparseParameter(A).prune(keep=4),
        lambda: ms.SparseParameter(A).prune(keep=1.5),
        lambda: ms.SparseParameter.prune(np.ones(3), keep=1),
    ):
        with pytest.raises(ValueError):
            bad()
    for bad in (
        lambda: ms.SparseParameter(np.eye(2)),
        lambda: ms.SparseParameter(A, trainable=np.ones(3, int)),
        lambda: ms.SparseParameter(A, share=np.ones(3)),
        lambda: ms.SparseParameter(A.astype(complex)),
        lambda: ms.SparseParameter((A, [1.0])),
        lambda: ms.SparseTensor(A, [1.0]),
    ):
        with pytest.raises(TypeError):
            bad()


def test_prune():
    D = np.array([[1.0, -5.0], [3.0, 3.0]])
    np.testing.assert_array_equal(
        ms.SparseParameter.prune(D, keep=2).to_scipy().toarray(), [[0, -5], [3, 0]]
    )
    assert ms.SparseParameter.prune(D, keep=0.75).nnz == 3
    assert ms.SparseParameter.prune(D, keep=0).nnz == 0
    W = ms.SparseParameter(
        (ms.Pattern.dense((2, 2)), D.ravel()),
        trainable=np.array([True, True, True, False]),
    )
    V = W.prune(keep=0.75)
    assert (V.nnz, V.n_free, W.nnz) == (3, 2, 4)
    np.testing.assert_array_equal(V.to_scipy().toarray(), [[0, -5], [3, 3]])
    trained(V)
    assert V.to_scipy().toarray()[1, 1] == 3


def test_from_dense():
    D = np.arange(6.0).reshape(2, 3)
    W = ms.SparseParameter.from_dense(D, D > 2)
    np.testing.assert_array_equal(W.to_scipy().toarray(), D * (D > 2))


def test_pickle_and_copy():
    """CASES 42."""
    plain = ms.SparseTensor.from_scipy(A, requires_grad=True)
    tied = ms.SparseParameter(sp.csr_array(A != 0).astype(float), share=np.array([1, 1, 2]))
    own = ms.SparseParameter(A)
    for S in (plain, tied, own, transposed := tied.T):
        for twin in (pickle.loads(pickle.dumps(S)), copy.copy(S), copy.deepcopy(S)):
            assert type(twin) is type(S)
            np.testing.assert_array_equal(twin.to_scipy().toarray(), S.to_scipy().toarray())
            leaf = (twin.T if S is transposed else twin).__tensor__()
            leaf.data = np.zeros(leaf.shape)
            assert S.to_scipy().toarray().any()
    assert copy.deepcopy(own).pattern is own.pattern


def test_numpy_functions_name_the_remedy():
    W = ms.SparseParameter(A)
    np.testing.assert_array_equal(np.matmul(W, B).data, A @ B)
    assert isinstance(np.multiply(2.0, W), ms.SparseTensor)
    for bad in (
        lambda: np.exp(W),
        lambda: np.sum(W),
        lambda: ms.sum(W),
        lambda: np.ones((2, 3)) + W,
    ):
        with pytest.raises(TypeError, match=r"\.to_dense"):
            bad()
    with pytest.raises(TypeError, match="not a Pattern"):
        ms.sddmm(np.ones(2), np.ones(3), A)


def test_gradient_of_a_transposed_view_is_refused():
    S = ms.SparseTensor.from_scipy(A, requires_grad=True)
    loss = (S.T @ np.ones(2)).sum()
    with pytest.raises(TypeError, match=r"of S, not of S\.T"):
        ms.grad(loss, S.T)
    np.testing.assert_array_equal(ms.grad(loss, S), [1, 1, 1])


def test_nothing_gets_past_the_free_weights():
    W = ms.SparseParameter(A, trainable=np.array([True, False, True]))
    v = W.values
    with ms.no_grad(), pytest.raises(ValueError, match="read-only"):
        v += 1.0
    with pytest.raises(AttributeError):
        W.free = np.ones(2)
    for array in (W.pattern.indices, W.pattern.indptr, W.pattern.rows):
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True


def test_damaged_dia_and_lil():
    """CASES 12."""
    C = sp.dia_array(np.eye(3))
    C.data = np.ones((5, 3))
    with pytest.raises(ValueError):
        ms.Pattern.from_scipy(C)
    C = sp.lil_array(np.eye(3))
    C.data[1] = [1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="lil"):
        ms.Pattern.from_scipy(C)
    for column in (10**9, -5, 3):
        C = sp.lil_array(np.eye(3))
        C.rows[0][0] = column
        with pytest.raises(ValueError, match="columns"):
            ms.Pattern.from_scipy(C)
    C = sp.lil_array(np.eye(3))
    C.rows, C.data = C.rows[:2], C.data[:2]
    with pytest.raises(ValueError, match="lil"):
        ms.Pattern.from_scipy(C)


def test_extreme_sizes():
    with pytest.raises(ValueError, match="too many cells"):
        ms.Pattern.random((10, 10**18), fan_in=1)
    assert ms.Pattern.banded((3, 3), 0, 2**63 - 2) == ms.Pattern.banded((3, 3), 0, 3)
    assert ms.Pattern.local(3, 3, np.uint8(0)).nnz == 0
    with pytest.raises(AttributeError, match="immutable"):
        del ms.Pattern.diagonal(2).nnz


def test_labels_beyond_floats():
    C = sp.csr_array(np.ones((1, 2)))
    labels = sp.csr_array(np.array([[2**53, 2**53 + 1]]))
    assert ms.SparseParameter(C, share=labels).n_free == 2


def test_integers_keep_their_value():
    C = sp.csr_array(np.array([[2**63]], dtype=np.uint64))
    assert ms.SparseTensor.from_scipy(C).values.item() == 2.0**63
    twice = ([0, 0], [0, 0])
    for dtype, total in ((np.int8, 200.0), (bool, 2.0), (np.float32, 200.0)):
        C = sp.coo_array((np.array([100, 100], dtype), twice), shape=(1, 1))
        assert ms.SparseTensor.from_scipy(C).values.item() == total
    assert ms.SparseParameter(sp.csr_array((2, 2)), trainable=[], share=[]).n_free == 0


def test_from_dense_takes_masks_and_patterns():
    D = np.arange(4.0).reshape(2, 2)
    for where in (D > 1, ms.Pattern.from_mask(D > 1)):
        np.testing.assert_array_equal(ms.SparseTensor.from_dense(D, where).values.data, [2, 3])
        np.testing.assert_array_equal(ms.SparseParameter.from_dense(D, where).free.data, [2, 3])


@pytest.mark.parametrize("make", [sp.csc_array, lambda A: sp.bsr_array(A, blocksize=(1, 1))])
def test_damaged_matrices_are_refused_and_left_alone(make):
    """CASES 12, 13."""
    C = make(sp.csr_array(np.eye(2)))
    C.data, C.indices = np.resize(C.data, (9, *C.data.shape[1:])), np.arange(9, dtype=np.int32)
    data = C.data
    assert ms.Pattern.from_scipy(C).nnz == 2
    assert C.data is data
    C.indptr[1], C.indptr[2] = 2**30, 0
    with pytest.raises(ValueError, match="indptr"):
        ms.SparseTensor.from_scipy(C)
    C.indptr[:] = [0, 1, 9]
    with pytest.raises(ValueError):
        ms.SparseTensor.from_scipy(C)
