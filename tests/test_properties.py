"""Laws that hold for every pattern, every layout and every SciPy matrix.

Numbers are small integers wherever sums have to be exact, so most tests ask for equality.
"""

import copy
import itertools
import operator
import pickle

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse as sp
from hypothesis import assume, example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import minisparse as ms
from minisparse import sparse as mss
from minisparse import testing as mt
from minisparse.pattern import IndexMap

from .layouts import laid_out

DTYPES = st.sampled_from([np.float32, np.float64])
SIDES = st.tuples(st.integers(0, 5), st.integers(0, 5))
ANY_FORMAT = st.sampled_from(mt.FORMATS)
BACKENDS = pytest.mark.parametrize("backend", ["cpu", "reference"])


def matrix(pattern, values):
    """Write the values into a dense matrix, entry by entry."""
    out = np.zeros(pattern.shape, np.asarray(values).dtype)
    for i in range(pattern.shape[0]):
        for e in range(pattern.indptr[i], pattern.indptr[i + 1]):
            out[i, pattern.indices[e]] = values[e]
    return out


def entries(pattern, dense):
    """Read a dense matrix at the stored entries, in canonical order."""
    places = [
        (i, pattern.indices[e])
        for i in range(pattern.shape[0])
        for e in range(pattern.indptr[i], pattern.indptr[i + 1])
    ]
    return np.array([dense[p] for p in places], dense.dtype)


def bits(x):
    """Return what a computed array is, so that -0.0 differs from 0.0 and NaN equals itself."""
    x = np.asarray(x.data if isinstance(x, ms.Tensor) else x)
    return x.shape, x.dtype, x.tobytes()


def check_equal(x, y):
    x, y = (a.data if isinstance(a, ms.Tensor) else np.asarray(a) for a in (x, y))
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y, strict=True)


def leaf(data):
    return ms.tensor(data, requires_grad=True)


def numbers(data, shape, dtype=np.float64):
    return data.draw(mt.arrays(shape=shape, dtype=dtype, exact=True))


# ------------------------------------------------------------------------------------- products


@BACKENDS
@given(data=st.data(), dtype=DTYPES)
def test_sparse_times_dense_is_the_dense_product(backend, data, dtype):
    """CASES 20, 21: also with nothing stored, empty rows and sizes of 0."""
    S, x = data.draw(mt.spmm_operands(dtype=dtype, exact=True))
    D = matrix(S.pattern, S.values.data)
    with ms.backend(backend):
        check_equal(S @ x, np.matmul(D, x))
        check_equal(ms.matmul(S, leaf(x)), np.matmul(D, x))
        check_equal(ms.matmul(S.to_scipy(), leaf(x)), np.matmul(D, x))
        if x.ndim < 3:
            check_equal(S @ x, S.to_scipy() @ x)
    right = x if x.ndim == 1 else np.swapaxes(x, -1, -2)
    with ms.backend(backend):
        check_equal(right @ S.T, np.matmul(right, D.T))
        check_equal(leaf(right) @ S.T.to_scipy(), np.matmul(right, D.T))


@BACKENDS
@given(data=st.data(), dtype=DTYPES)
def test_dense_times_sparse_is_the_dense_product(backend, data, dtype):
    S = data.draw(mt.sparse_tensors(dtype=dtype, exact=True))
    lead = data.draw(st.lists(st.integers(0, 3), max_size=2))
    x = numbers(data, (*lead, S.shape[0]), dtype)
    with ms.backend(backend):
        check_equal(x @ S, np.matmul(x, matrix(S.pattern, S.values.data)))


@given(data=st.data())
def test_stacks_are_products_one_by_one(data):
    S, x = data.draw(mt.spmm_operands(exact=True, ndim=st.integers(3, 4)))
    assume(all(x.shape[:-2]))
    y = (S @ x).data
    for i in np.ndindex(x.shape[:-2]):
        check_equal(y[i], S @ x[i])


@BACKENDS
@given(data=st.data(), dtype=DTYPES)
def test_product_and_transposed_product_are_adjoint(backend, data, dtype):
    S = data.draw(mt.sparse_tensors(dtype=dtype, exact=True))
    y, x = (numbers(data, (n,), dtype) for n in S.shape)
    with ms.backend(backend):
        left, right = (S @ x) @ y, x @ (S.T @ y)
        assert left.item() == right.item() == (y @ (S @ x)).item() == ((y @ S) @ x).item()


@BACKENDS
@given(data=st.data())
def test_product_is_linear_in_values_and_in_x(backend, data):
    (pattern, v), x = data.draw(mt.spmm_operands(exact=True, as_arrays=True))
    w, y = numbers(data, v.shape), numbers(data, x.shape)
    a, b = data.draw(st.tuples(*[st.integers(-3, 3)] * 2))
    S, R = ms.SparseTensor(pattern, v), ms.SparseTensor(pattern, w)
    with ms.backend(backend):
        check_equal(S.with_values(a * v + b * w) @ x, a * (S @ x) + b * (R @ x))
        check_equal(S @ (a * x + b * y), a * (S @ x) + b * (S @ y))


@BACKENDS
@given(data=st.data(), dtype=DTYPES)
def test_sddmm_is_the_dense_product_read_at_the_entries(backend, data, dtype):
    p = data.draw(mt.patterns())
    k = data.draw(st.lists(st.integers(0, 4), max_size=1))
    U, V = (numbers(data, (n, *k), dtype) for n in p.shape)
    full = np.outer(U, V) if not k else U @ V.T
    with ms.backend(backend):
        S = ms.sddmm(U, V, p)
        assert S.pattern is p
        check_equal(S.values, entries(p, full.astype(dtype)))


SPECIAL = st.sampled_from([0.0, 1.0, -2.0, np.inf, -np.inf, np.nan])


@BACKENDS
@given(data=st.data())
def test_nan_and_inf_reach_what_they_touch_and_nothing_else(backend, data):
    """CASES 29: a stored zero times infinity is NaN, an absent entry contributes nothing."""
    p = data.draw(mt.patterns())
    v = data.draw(mt.arrays(shape=(p.nnz,), elements=SPECIAL))
    x = data.draw(mt.arrays(shape=(p.shape[1], 2), elements=SPECIAL))
    u = data.draw(mt.arrays(shape=(p.shape[0], 2), elements=SPECIAL))
    y, w = np.zeros((p.shape[0], 2)), np.zeros(p.nnz)
    with np.errstate(invalid="ignore"):
        for i in range(p.shape[0]):
            for e in range(p.indptr[i], p.indptr[i + 1]):
                y[i] += v[e] * x[p.indices[e]]
                w[e] = u[i, 0] * x[p.indices[e], 0] + u[i, 1] * x[p.indices[e], 1]
        with ms.backend(backend):
            check_equal(ms.SparseTensor(p, v) @ x, y)
            check_equal(ms.sddmm(u, x, p).values, w)


# ------------------------------------------------------------------------------------- gradients


@BACKENDS
@given(data=st.data(), dtype=DTYPES)
def test_gradients_are_the_dense_ones_read_at_the_entries(backend, data, dtype):
    S, x = data.draw(mt.spmm_operands(dtype=dtype, exact=True, requires_grad=True))
    x = leaf(x)
    with ms.backend(backend):
        y = S @ x
        g = data.draw(mt.cotangents(shape=y.shape, dtype=dtype, exact=True))
        y.backward(g)
    D = leaf(matrix(S.pattern, S.values.data))
    dense_x = leaf(x.data)
    ms.matmul(D, dense_x).backward(g)
    check_equal(S.grad, entries(S.pattern, D.grad))
    check_equal(x.grad, dense_x.grad)


@BACKENDS
@given(data=st.data(), dtype=DTYPES)
def test_gradients_of_dense_times_sparse(backend, data, dtype):
    """CASES 10: an ndarray on the left is recorded as one on the right is."""
    S = data.draw(mt.sparse_tensors(dtype=dtype, exact=True, requires_grad=True))
    lead = data.draw(st.lists(st.integers(0, 3), max_size=2))
    x = numbers(data, (*lead, S.shape[0]), dtype)
    tensor, dense_x, D = leaf(x), leaf(x), leaf(matrix(S.pattern, S.values.data))
    with ms.backend(backend):
        y = tensor @ S
        g = data.draw(mt.cotangents(shape=y.shape, dtype=dtype, exact=True))
        (from_array,) = ms.grad(x @ S, [S], g)
        y.backward(g)
    ms.matmul(dense_x, D).backward(g)
    check_equal(S.grad, entries(S.pattern, D.grad))
    check_equal(tensor.grad, dense_x.grad)
    assert bits(from_array) == bits(S.grad)


@BACKENDS
@given(data=st.data())
def test_gradients_of_sddmm_are_products(backend, data):
    """CASES 6: two products with the sparse matrix of the cotangents."""
    p = data.draw(mt.patterns())
    k = data.draw(st.integers(0, 3))
    U, V = (leaf(numbers(data, (n, k))) for n in p.shape)
    g = data.draw(mt.cotangents(shape=(p.nnz,), exact=True))
    with ms.backend(backend):
        ms.sddmm(U, V, p).values.backward(g)
    G = matrix(p, g)
    check_equal(U.grad, G @ V.data)
    check_equal(V.grad, G.T @ U.data)


@given(data=st.data())
def test_gradient_through_transposes_and_sums_of_products(data):
    """CASES 2: what arrives is a slice of a bigger gradient, and each use adds its share."""
    S, x = data.draw(mt.spmm_operands(exact=True, ndim=2, requires_grad=True))
    k = x.shape[1]
    joined = ms.concatenate([S @ x, ms.transpose((S @ x).T), 2 * (x.T @ S.T).T], axis=1)
    g = data.draw(mt.cotangents(shape=joined.shape, exact=True))
    joined.backward(g)
    total = g[:, :k] + g[:, k : 2 * k] + 2 * g[:, 2 * k :]
    check_equal(S.grad, entries(S.pattern, total @ x.T))


@given(data=st.data())
def test_to_dense_and_from_dense_are_inverse_and_adjoint(data):
    """CASES 9: values that require grad stay attached."""
    S = data.draw(mt.sparse_tensors(exact=True, requires_grad=True))
    D = numbers(data, S.shape)
    check_equal(S.to_dense(), matrix(S.pattern, S.values.data))
    back = ms.SparseTensor.from_dense(S.to_dense(), S.pattern)
    check_equal(back.values, S.values)
    read = ms.SparseTensor.from_dense(D, S.pattern)
    check_equal(read.values, entries(S.pattern, D))
    assert np.sum(S.to_dense().data * D) == np.sum(S.values.data * read.values.data)
    g = data.draw(mt.cotangents(shape=S.shape, exact=True))
    S.to_dense().backward(g)
    check_equal(S.grad, entries(S.pattern, g))
    dense = leaf(D)
    h = data.draw(mt.cotangents(shape=(S.nnz,), exact=True))
    ms.SparseTensor.from_dense(dense, S.pattern).values.backward(h)
    check_equal(dense.grad, matrix(S.pattern, h))


@BACKENDS
@given(data=st.data(), n_source=st.integers(0, 5))
def test_gather_and_segment_sum_are_adjoint(backend, data, n_source):
    places = st.lists(st.integers(-1, n_source - 1), max_size=8)
    index_map = IndexMap(np.array(data.draw(places), np.int64), n_source)
    n = len(index_map.index)
    x, y = leaf(numbers(data, (n_source,))), leaf(numbers(data, (n,)))
    with ms.backend(backend):
        down, up = (
            mss.gather(x, index_map=index_map),
            mss.segment_sum(y, index_map=index_map),
        )
        check_equal(down, np.array([x.data[i] if i >= 0 else 0.0 for i in index_map.index]))
        sums = np.zeros(n_source)
        for i, value in zip(index_map.index, y.data, strict=True):
            if i >= 0:
                sums[i] += value
        check_equal(up, sums)
        assert down.data @ y.data == x.data @ up.data
        down.backward(y.data)
        up.backward(x.data)
    check_equal(x.grad, up)
    check_equal(y.grad, down)


# ------------------------------------------------------------------------ sums and elementwise


@given(data=st.data(), dtype=DTYPES)
def test_sums_and_products_entry_by_entry(data, dtype):
    """CASES 15: an entry that comes out zero stays stored."""
    S = data.draw(mt.sparse_tensors(dtype=dtype, exact=True))
    R = data.draw(mt.sparse_tensors(pattern=S.pattern, dtype=dtype, exact=True))
    for f in (operator.add, operator.sub, operator.mul):
        T = f(S, R)
        assert T.pattern == S.pattern
        check_equal(T.values, f(S.values.data, R.values.data))
        check_equal(T.to_dense(), f(S.to_dense().data, R.to_dense().data))
    assert (S - S).nnz == S.nnz
    for T in (S * 2, 2 * S, S / 0.5, ms.multiply(2.0, S), -(S * -2)):
        assert T.pattern is S.pattern
        check_equal(T.values, 2 * S.values.data)


@given(data=st.data(), dtype=DTYPES)
def test_sparse_times_broadcast_dense(data, dtype):
    """CASES 25: the gradient of a broadcast factor has the factor's own shape."""
    S = data.draw(mt.sparse_tensors(dtype=dtype, exact=True, requires_grad=True))
    n_rows, n_cols = S.shape
    shapes = [(), (1,), (n_cols,), (1, n_cols), (n_rows, 1), (n_rows, n_cols), (1, 1)]
    d = leaf(numbers(data, data.draw(st.sampled_from(shapes)), dtype))
    T = data.draw(st.sampled_from([operator.mul, lambda x, y: y * x]))(S, d)
    assert T.pattern == S.pattern
    check_equal(T.to_dense(), S.to_dense().data * d.data)
    g = data.draw(mt.cotangents(shape=(S.nnz,), dtype=dtype, exact=True))
    T.values.backward(g)
    D, dense_d = leaf(S.to_dense().data), leaf(d.data)
    ms.multiply(D, dense_d).backward(matrix(S.pattern, g))
    check_equal(S.grad, entries(S.pattern, D.grad))
    check_equal(d.grad, dense_d.grad)


@given(data=st.data())
def test_transposed_views(data):
    S = data.draw(mt.sparse_tensors(exact=True, requires_grad=True))
    assert S.T.T is S
    assert S.T.shape == S.shape[::-1]
    check_equal(S.T.to_dense(), S.to_dense().data.T)
    check_equal((S.T + S.T).to_dense(), 2 * S.to_dense().data.T)
    g = data.draw(mt.cotangents(shape=S.shape[::-1], exact=True))
    S.T.to_dense().backward(g)
    check_equal(S.grad, entries(S.pattern, g.T))


# --------------------------------------------------------------------------------------- layouts


@BACKENDS
@given(data=st.data(), dtype=DTYPES, transpose=st.booleans(), exact=st.booleans())
def test_layouts_make_no_bit_of_difference_to_products(backend, data, dtype, transpose, exact):
    """CASES 1, 2, 3: operands and cotangents in any layout, against their contiguous copies."""
    numbers = {"dtype": dtype, "exact": exact}
    p = data.draw(mt.patterns())
    k = data.draw(st.lists(st.integers(0, 3), max_size=1))
    n_in, n_out = p.shape if transpose else p.shape[::-1]
    v = data.draw(mt.arrays(shape=(p.nnz,), **numbers))
    x = data.draw(mt.arrays(shape=(n_in, *k), **numbers))
    g = data.draw(mt.cotangents(shape=(n_out, *k), **numbers))
    before = bits(v), bits(x), bits(g)

    def run(v, x, g):
        leaves = leaf(v), leaf(x)
        v, x = (laid_out(t, array=a) for t, a in zip(leaves, (v, x), strict=True))
        y = mss.spmm(v, x, pattern=p, transpose=transpose)
        return [bits(a) for a in (y, *ms.grad(y, leaves, g))]

    with ms.backend(backend):
        assert run(v, x, g) == run(v.copy("C"), x.copy("C"), g.copy("C"))
    assert (bits(v), bits(x), bits(g)) == before


@BACKENDS
@given(data=st.data(), dtype=DTYPES)
def test_layouts_make_no_bit_of_difference_to_sddmm(backend, data, dtype):
    """CASES 2, 3: the factors and the cotangent of the values."""
    p = data.draw(mt.patterns())
    k = data.draw(st.lists(st.integers(0, 3), max_size=1))
    u, v = (data.draw(mt.arrays(shape=(n, *k), dtype=dtype)) for n in p.shape)
    g = data.draw(mt.cotangents(shape=(p.nnz,), dtype=dtype))

    def run(u, v, g):
        leaves = leaf(u), leaf(v)
        u, v = (laid_out(t, array=a) for t, a in zip(leaves, (u, v), strict=True))
        w = mss._sddmm(u, v, pattern=p)
        return [bits(a) for a in (w, *ms.grad(w, leaves, g))]

    with ms.backend(backend):
        assert run(u, v, g) == run(u.copy("C"), v.copy("C"), g.copy("C"))


@given(data=st.data(), dtype=DTYPES)
def test_layouts_make_no_bit_of_difference_on_the_right_and_in_stacks(data, dtype):
    """CASES 2, 3: through the public operator, with one to three axes."""
    S = data.draw(mt.sparse_tensors(dtype=dtype, requires_grad=True))
    lead = data.draw(st.lists(st.integers(0, 3), max_size=2))
    x = data.draw(mt.arrays(shape=(*lead, S.shape[0]), dtype=dtype))
    g = data.draw(mt.cotangents(shape=(*lead, S.shape[1]), dtype=dtype))
    plain = x @ S, *ms.grad(x @ S, [S], g)
    copied = x.copy("C") @ S, *ms.grad(x.copy("C") @ S, [S], g.copy("C"))
    assert [bits(a) for a in plain] == [bits(a) for a in copied]


@given(data=st.data(), dtype=DTYPES)
def test_layouts_make_no_difference_to_a_parameter(data, dtype):
    """CASES 2: through the expansion of tied weights."""
    W = data.draw(mt.sparse_parameters(dtype=dtype))
    g = data.draw(mt.cotangents(shape=(W.nnz,), dtype=dtype))
    a, b = (ms.grad(W.values, [W], h, retain_graph=True)[0] for h in (g, g.copy("C")))
    assert bits(a) == bits(b)


# ------------------------------------------------------------------------------------ parameters


@given(data=st.data())
def test_parameter_against_a_dictionary(data):
    """CASES 13, 14, 19b: values, weights and gradients by place, whatever order SciPy had."""
    A = data.draw(mt.scipy_csr(exact=True, format=st.sampled_from(["csr", "csc", "coo"])))
    values = {}
    for i, j, v in zip(*A.tocoo().coords, A.tocoo().data, strict=True):
        values[int(i), int(j)] = values.get((int(i), int(j)), 0.0) + v
    places = sorted(values)

    trainable = data.draw(st.none() | hnp.arrays(bool, A.shape))
    share = data.draw(st.none() | hnp.arrays(np.int64, A.shape, elements=st.integers(0, 1)))
    if share is not None:  # those that start from different values have different labels
        for place in places:
            share[place] += 2 * int(values[place])
    weights = {}  # label: places, in the order of their first entry
    for place in places:
        if trainable is None or trainable[place]:
            label = place if share is None else int(share[place])
            weights.setdefault(label, []).append(place)

    as_sparse = data.draw(st.booleans())
    given_mask = sp.csr_array(trainable) if as_sparse and trainable is not None else trainable
    W = ms.SparseParameter(A, trainable=given_mask, share=share)
    assert [tuple(p) for p in zip(W.pattern.rows, W.pattern.indices, strict=True)] == places
    assert W.n_free == len(weights)
    assert (W.values is W.free) == (sum(map(len, weights.values())) == len(weights) == len(places))
    check_equal(W.values, np.array([values[p] for p in places], float))
    check_equal(W.free, np.array([values[group[0]] for group in weights.values()], float))

    x = numbers(data, (A.shape[1], 2))
    opt = ms.optim.SGD([W], lr=0.5)
    for _ in range(2):
        y = W @ x
        g = data.draw(mt.cotangents(shape=y.shape, exact=True))
        if not y.requires_grad:
            break
        W.free.grad = None
        y.backward(g)
        full = g @ x.T
        expected = [sum(full[p] for p in group) for group in weights.values()]
        check_equal(W.grad, np.array(expected, float))
        opt.step()
        for group, d in zip(weights.values(), expected, strict=True):
            for place in group:
                values[place] -= 0.5 * d
        check_equal(W.values, np.array([values[p] for p in places], float))


@given(data=st.data(), dtype=DTYPES)
def test_labels_that_start_from_different_values_are_refused(data, dtype):
    p = data.draw(mt.patterns())
    values = data.draw(mt.arrays(shape=(p.nnz,), dtype=dtype, exact=True))
    share = data.draw(hnp.arrays(np.int64, p.nnz, elements=st.integers(0, 2)))
    first = {}
    agree = all(first.setdefault(s, v) == v for s, v in zip(share, values, strict=True))
    if agree:
        assert ms.SparseParameter((p, values), share=share).n_free == len(first)
    else:
        with pytest.raises(ValueError, match="label"):
            ms.SparseParameter((p, values), share=share)


@pytest.mark.parametrize("name", ["SGD", "momentum", "Adam", "AdamW"])
@given(data=st.data(), dtype=DTYPES)
def test_training_changes_weights_and_nothing_else(name, data, dtype):
    """CASES 15, 16: constants keep their bits, the pattern its arrays; stored zeros move."""
    make = {
        "SGD": lambda W: ms.optim.SGD([W], lr=0.25),
        "momentum": lambda W: ms.optim.SGD([W], lr=0.25, momentum=0.5, nesterov=True),
        "Adam": lambda W: ms.optim.Adam([W], lr=0.25, weight_decay=0.1),
        "AdamW": lambda W: ms.optim.AdamW([W], lr=0.25),
    }[name]
    W = data.draw(mt.sparse_parameters(dtype=dtype))
    p, free, arrays = W.pattern, W.free, (W.pattern.indptr, W.pattern.indices)
    before, start = [bits(a) for a in arrays], W.values.data.copy()
    trained = np.ones(W.nnz, bool) if W._index_map is None else W._index_map.index >= 0
    opt = make(W)
    for _ in range(3):
        opt.zero_grad()
        y = W @ np.ones((W.shape[1], 2), dtype)
        if y.requires_grad:
            y.sum().backward()
        opt.step()
    assert W.pattern is p
    assert W.free is free
    assert p.indptr is arrays[0]
    assert p.indices is arrays[1]
    assert [bits(a) for a in arrays] == before
    after = W.values.data
    assert after.dtype == W.free.dtype == dtype
    assert bits(after[~trained]) == bits(start[~trained])
    assert np.all(after[trained] != start[trained])


@given(data=st.data(), dtype=DTYPES)
def test_prune_keeps_the_largest(data, dtype):
    W = data.draw(mt.sparse_parameters(dtype=dtype, exact=True))
    v = W.values.data
    keep = data.draw(st.integers(0, W.nnz) | st.floats(0, 1))
    n = keep if isinstance(keep, int) else round(keep * W.nnz)
    kept = sorted(sorted(range(W.nnz), key=lambda e: (-abs(v[e]), e))[:n])
    small = W.prune(keep=keep)
    p = W.pattern
    assert small.dtype == dtype
    assert small.shape == W.shape
    check_equal(small.values, v[kept])
    assert small.pattern.rows.tolist() == p.rows[kept].tolist()
    assert small.pattern.indices.tolist() == p.indices[kept].tolist()
    # What was one weight is one weight still, what was constant is constant.
    index = np.arange(W.nnz) if W._index_map is None else W._index_map.index
    labels = index[kept]
    assert small.n_free == len(set(labels[labels >= 0].tolist()))
    ones = small.with_values(np.ones(small.nnz, dtype))
    assert small.n_free == 0 or ms.grad(small.values @ ones.values, small).sum() == sum(labels >= 0)


@given(data=st.data())
def test_prune_a_dense_matrix(data):
    D = numbers(data, data.draw(SIDES))
    keep = data.draw(st.integers(0, D.size))
    W = ms.SparseParameter.prune(D, keep=keep)
    flat = D.ravel()
    kept = sorted(sorted(range(D.size), key=lambda e: (-abs(flat[e]), e))[:keep])
    check_equal(W.values, flat[kept])
    assert (W.pattern.rows * D.shape[1] + W.pattern.indices).tolist() == kept


@given(data=st.data())
def test_from_dense_with_a_mask(data):
    """CASES 15: a zero under the mask is a weight."""
    D = numbers(data, data.draw(SIDES))
    mask = data.draw(hnp.arrays(bool, D.shape))
    W = ms.SparseParameter.from_dense(D, mask)
    assert W.n_free == W.nnz == mask.sum()
    check_equal(W.to_dense(), np.where(mask, D, 0.0))


# ------------------------------------------------------------------------------------- SciPy input


def stored_arrays(A):
    """Return every array a SciPy matrix holds, by name."""
    if A.format == "dok":
        return {"items": np.array(sorted((*k, v) for k, v in A.items()), float)}
    names = {
        "csr": ("indptr", "indices", "data"),
        "csc": ("indptr", "indices", "data"),
        "bsr": ("indptr", "indices", "data"),
        "coo": ("row", "col", "data"),
        "dia": ("offsets", "data"),
        "lil": ("rows", "data"),
    }[A.format]
    return {name: getattr(A, name) for name in names}


def copied(arrays):
    return {
        k: (str(v.tolist()), v.dtype) if v.dtype == object else bits(v) for k, v in arrays.items()
    }


@pytest.mark.parametrize(
    "take",
    [
        lambda A: ms.SparseTensor.from_scipy(A),
        lambda A: ms.SparseParameter(A),
        lambda A: ms.Pattern.from_scipy(A),
        lambda A: ms.matmul(A, ms.tensor(np.eye(A.shape[1]))),
    ],
    ids=["SparseTensor", "SparseParameter", "Pattern", "matmul"],
)
@given(data=st.data(), read_only=st.booleans())
def test_any_scipy_matrix_comes_out_canonical_and_is_left_alone(take, data, read_only):
    """CASES 13, 14, 16, 17: same matrix, caller's arrays byte for byte as they were."""
    A = data.draw(mt.scipy_csr(exact=True, format=ANY_FORMAT))
    D, arrays = A.toarray(), stored_arrays(A)
    before, identities = copied(arrays), {k: id(v) for k, v in arrays.items()}
    if read_only and A.format not in ("dok", "lil"):  # SciPy itself cannot read such a lil
        for v in arrays.values():
            v.flags.writeable = False
    got = take(A)
    now = stored_arrays(A)
    assert copied(now) == before
    if A.format != "dok":
        assert {k: id(v) for k, v in now.items()} == identities
    if isinstance(got, ms.Tensor):
        check_equal(got, D)
        return
    p = got if isinstance(got, ms.Pattern) else got.pattern
    assert p.shape == A.shape
    assert p.indices.dtype == p.indptr.dtype == np.int32  # narrowed, since it fits
    assert p == ms.Pattern(p.shape, p.indptr, p.indices)  # which would refuse any other order
    mask = np.zeros(A.shape, bool)
    mask[A.tocoo().coords] = True
    if A.format not in ("dia", "bsr", "lil", "dok"):  # whose conversions drop or add zeros
        np.testing.assert_array_equal(p.to_mask(), mask)
    if isinstance(got, ms.SparseTensor):
        check_equal(got.to_dense(), D)
        for v in now.values():
            assert v.dtype == object or not np.shares_memory(v, got.values.data)


@given(A=mt.scipy_csr(exact=True), lie=st.booleans())
def test_stale_flags_of_a_scipy_matrix_are_not_believed(A, lie):
    """CASES 14: the user may have changed the arrays after SciPy looked at them."""
    D = A.toarray()
    A.has_sorted_indices = A.has_canonical_format = lie
    before = copied(stored_arrays(A))
    S = ms.SparseTensor.from_scipy(A)
    check_equal(S.to_dense(), D)
    assert copied(stored_arrays(A)) == before
    assert S.pattern == ms.Pattern(S.shape, S.pattern.indptr, S.pattern.indices)


@given(data=st.data(), form=st.sampled_from(["csr", "csc", "coo", "bsr"]))
def test_a_damaged_scipy_matrix_is_refused_or_valid(data, form):
    """CASES 12: indices that the user broke never reach a kernel."""
    A = data.draw(mt.scipy_csr(exact=True, format=form))
    name = data.draw(st.sampled_from(["row", "col"] if form == "coo" else ["indptr", "indices"]))
    array = getattr(A, name)
    assume(len(array))
    place, value = data.draw(st.integers(0, len(array) - 1)), data.draw(st.integers(-2, 8))
    array[place] = value
    try:
        S = ms.SparseTensor.from_scipy(A)
    except ValueError:
        return
    p = S.pattern
    assert p == ms.Pattern(A.shape, p.indptr, p.indices)
    if p.nnz:
        assert np.isfinite((S @ np.ones(p.shape[1])).data).all()


# --------------------------------------------------------------------------------------- patterns


def is_canonical(shape, indptr, indices):
    """The definition, in plain Python."""
    if len(indptr) != shape[0] + 1 or indptr[0] != 0 or indptr[-1] != len(indices):
        return False
    for a, b in itertools.pairwise(indptr):
        row = indices[a:b]
        if a > b or any(not 0 <= c < shape[1] for c in row):
            return False
        if any(c >= d for c, d in itertools.pairwise(row)):
            return False
    return True


INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint32, np.uint64, ">i4", "<i8"]


@st.composite
def structures(draw):
    """Draw (shape, indptr, indices) near a valid pattern and far from one, of any integer dtype."""
    p = draw(mt.patterns())
    shape, indptr, indices = list(p.shape), p.indptr.tolist(), p.indices.tolist()
    for what in draw(st.lists(st.sampled_from([shape, indptr, indices]), max_size=3)):
        number = st.integers(-2, 8) | st.sampled_from([2**31, 2**40, -(2**31), 127])
        change = draw(st.sampled_from(["set", "insert", "drop"]))
        at = draw(st.integers(0, 40)) % (len(what) + 1)
        if change == "insert" and what is not shape:
            what.insert(at, draw(number))
        elif at < len(what) and change == "set":
            what[at] = draw(number)
        elif at < len(what) and what is not shape:
            del what[at]
    limits = np.iinfo(dtype := np.dtype(draw(st.sampled_from(INTEGERS))))
    assume(all(limits.min <= n <= limits.max for n in indptr + indices))
    return shape, np.array(indptr, dtype), np.array(indices, dtype)


@given(structure=structures())
@example(structure=([3, 0], np.array([0, 1, 1, 1]), np.array([0])))
def test_a_pattern_is_valid_or_refused(structure):
    """CASES 12, 17, 19: arrays of any content and dtype, near a valid pattern and far from one."""
    shape, *arrays = structure
    indptr, indices = (a.tolist() for a in arrays)
    if min(shape) >= 0 and is_canonical(shape, indptr, indices):
        built = ms.Pattern(shape, *arrays)
        assert (built.indptr.tolist(), built.indices.tolist()) == (indptr, indices)
        assert built.indices.dtype in (np.int32, np.int64)
        assert not built.indices.flags.writeable
        assert not built.indptr.flags.writeable
        for mine, his in zip((built.indptr, built.indices), arrays, strict=True):
            assert not np.shares_memory(mine, his)
    else:
        with pytest.raises(ValueError, match=r"Pattern: |a shape of .* is negative"):
            ms.Pattern(shape, *arrays)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(max_size=3),
    st.lists(st.integers() | st.floats() | st.none() | st.booleans(), max_size=4),
    hnp.arrays(
        hnp.scalar_dtypes(),
        hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3),
    ),
)


@given(shape=JUNK | SIDES, indptr=JUNK, indices=JUNK)
def test_a_pattern_of_junk_is_refused(shape, indptr, indices):
    """CASES 12: whatever is given, ValueError or TypeError, or a valid pattern."""
    try:
        p = ms.Pattern(shape, indptr, indices)
    except (ValueError, TypeError):
        return
    assert is_canonical(p.shape, p.indptr.tolist(), p.indices.tolist())


@given(data=st.data(), shape=SIDES)
def test_from_coords_adds_up_what_is_given_twice(data, shape):
    """CASES 13: stored once, and each given value has the gradient of its entry."""
    cells = [(i, j) for i in range(shape[0]) for j in range(shape[1])]
    given = data.draw(st.lists(st.sampled_from(cells), max_size=8)) if cells else []
    rows, cols = ([c[axis] for c in given] for axis in (0, 1))
    values = leaf(numbers(data, (len(given),)))
    expected = np.zeros(shape)
    for cell, v in zip(given, values.data, strict=True):
        expected[cell] += v
    S = ms.SparseTensor.from_coords(rows, cols, values, shape)
    check_equal(S.to_dense(), expected)
    assert S.nnz == len(set(given))
    assert S.pattern == ms.Pattern.from_coords(rows, cols, shape)
    g = data.draw(mt.cotangents(shape=shape, exact=True))
    S.to_dense().backward(g)
    check_equal(values.grad, np.array([g[c] for c in given], float))


@given(data=st.data(), shape=SIDES, rows=st.lists(st.integers(-2, 7), min_size=1, max_size=4))
def test_from_coords_refuses_places_outside(data, shape, rows):
    cols = data.draw(st.lists(st.integers(-2, 7), min_size=len(rows), max_size=len(rows)))
    inside = all(0 <= i < shape[0] and 0 <= j < shape[1] for i, j in zip(rows, cols, strict=True))
    if inside:
        assert ms.Pattern.from_coords(rows, cols, shape).nnz == len({*zip(rows, cols, strict=True)})
    else:
        with pytest.raises(ValueError, match=r"(rows|columns) from"):
            ms.Pattern.from_coords(rows, cols, shape)
    with pytest.raises(ValueError, match="as many"):
        ms.Pattern.from_coords(rows, cols[:-1], (9, 9))


@given(p=mt.patterns(), q=mt.patterns())
def test_patterns_compare_and_hash_by_content(p, q):
    """CASES 42: pickling and copying."""
    same = p.shape == q.shape and np.array_equal(p.to_mask(), q.to_mask())
    assert (p == q) is same
    assert (p != q) is not same
    assert (p.digest == q.digest) is same
    assert copy.copy(p) is p
    assert copy.deepcopy({"a": p})["a"] is p
    again = pickle.loads(pickle.dumps(p))
    assert again == p
    assert hash(again) == hash(p)
    assert len({again, p}) == 1
    assert not again.indices.flags.writeable
    wide = ms.Pattern(p.shape, p.indptr.astype(np.int64), p.indices.astype(np.int64))
    assert wide == p
    assert wide.digest == p.digest
    with pytest.raises(AttributeError):
        p.shape = (1, 1)
    for array in (p.indptr, p.indices):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


@given(p=mt.patterns())
def test_what_is_derived_from_a_pattern(p):
    mask = np.zeros(p.shape, bool)
    for i in range(p.shape[0]):
        mask[i, p.indices[p.indptr[i] : p.indptr[i + 1]]] = True
    np.testing.assert_array_equal(p.to_mask(), mask)
    assert p.nnz == mask.sum()
    assert p.density == (mask.mean() if mask.size else 0)
    assert p.rows.tolist() == np.nonzero(mask)[0].tolist()
    assert p.fan_in.tolist() == mask.sum(axis=1).tolist()
    assert p.fan_out.tolist() == mask.sum(axis=0).tolist()
    assert p.T.T is p
    assert ms.Pattern.from_mask(mask.T) == p.T
    assert ms.Pattern.from_mask(mask) == p
    assert ms.Pattern.from_scipy(p.to_scipy()) == p
    np.testing.assert_array_equal(p.to_scipy().toarray(), mask)
    for derived in (p.rows, p.fan_in, p.fan_out, p.T.indices, p.T.indptr):
        assert derived.dtype == np.int32
        assert not derived.flags.writeable


@given(data=st.data())
def test_find_gives_numbers_of_entries(data):
    p = data.draw(mt.patterns())
    q = data.draw(mt.patterns(shape=p.shape))
    place = {c: e for e, c in enumerate(zip(p.rows.tolist(), p.indices.tolist(), strict=True))}
    expected = [place.get(c, -1) for c in zip(q.rows.tolist(), q.indices.tolist(), strict=True)]
    assert p.find(q).tolist() == expected


# --------------------------------------------------------------------------------------- builders


@given(shape=SIDES, lower=st.integers(-3, 6), upper=st.integers(-3, 6))
def test_banded(shape, lower, upper):
    offset = np.arange(shape[1]) - np.arange(shape[0])[:, None]
    expected = (offset >= -lower) & (offset <= upper)
    p = ms.Pattern.banded(shape, lower, upper)
    assert p == ms.Pattern(p.shape, p.indptr, p.indices)
    np.testing.assert_array_equal(p.to_mask(), expected)


@given(n=st.integers(0, 6), shape=SIDES)
def test_tril_diagonal_and_dense(n, shape):
    assert ms.Pattern.tril(n) == ms.Pattern.from_mask(np.tri(n, dtype=bool))
    assert ms.Pattern.diagonal(n) == ms.Pattern.from_mask(np.eye(n, dtype=bool))
    assert ms.Pattern.dense(shape) == ms.Pattern.from_mask(np.ones(shape, bool))


@given(
    height=st.integers(0, 4),
    width=st.integers(0, 4),
    kernel=st.integers(0, 5) | st.tuples(st.integers(0, 5), st.integers(0, 5)),
)
def test_local_connects_a_window(height, width, kernel):
    k_rows, k_cols = (kernel, kernel) if isinstance(kernel, int) else kernel
    expected = np.zeros((height * width, height * width), bool)
    for r, c in np.ndindex(height, width):
        for i, j in np.ndindex(k_rows, k_cols):
            y, x = r + i - k_rows // 2, c + j - k_cols // 2
            if 0 <= y < height and 0 <= x < width:
                expected[r * width + c, y * width + x] = True
    p = ms.Pattern.local(height, width, kernel)
    np.testing.assert_array_equal(p.to_mask(), expected)
    assert p == ms.Pattern(p.shape, p.indptr, p.indices)


@given(parts=st.lists(mt.patterns(shape=SIDES), max_size=4))
def test_block_diagonal(parts):
    p = ms.Pattern.block_diagonal(parts)
    expected = np.zeros(p.shape, bool)
    r = c = 0
    for part in parts:
        expected[r : r + part.shape[0], c : c + part.shape[1]] = part.to_mask()
        r, c = r + part.shape[0], c + part.shape[1]
    assert p.shape == (r, c)
    np.testing.assert_array_equal(p.to_mask(), expected)
    assert p == ms.Pattern(p.shape, p.indptr, p.indices)
    full = [part.to_mask() for part in parts if all(part.shape)]
    if len(full) == len(parts) > 0:
        np.testing.assert_array_equal(p.to_mask(), scipy.linalg.block_diag(*full))


@given(
    shape=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    fraction=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
def test_random_draws_exactly_as_many_as_asked(shape, fraction, seed):
    fan_in = round(fraction * shape[1])
    p = ms.Pattern.random(shape, fan_in=fan_in, rng=seed)
    assert np.all(p.fan_in == fan_in)
    q = ms.Pattern.random(shape, density=fraction, rng=seed)
    assert q.nnz == round(fraction * shape[0] * shape[1])
    for r, arguments in ((p, {"fan_in": fan_in}), (q, {"density": fraction})):
        assert r.shape == shape
        assert r == ms.Pattern(r.shape, r.indptr, r.indices)  # sorted and distinct
        assert r == ms.Pattern.random(shape, rng=np.random.default_rng(seed), **arguments)


@given(shape=SIDES, fan_in=st.integers(-2, 8), density=st.floats(-1, 2))
def test_random_refuses_what_cannot_be(shape, fan_in, density):
    if not 0 <= fan_in <= shape[1]:
        with pytest.raises(ValueError, match="fan_in="):
            ms.Pattern.random(shape, fan_in=fan_in, rng=0)
    if not 0 <= density <= 1:
        with pytest.raises(ValueError, match="density="):
            ms.Pattern.random(shape, density=density, rng=0)
    with pytest.raises(ValueError, match="either"):
        ms.Pattern.random(shape)
