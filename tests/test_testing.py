"""The public strategies reach the corners they promise, shrink to small cases, and refuse junk."""

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

import minisparse as ms
from minisparse import testing as mt

FIXED = settings(max_examples=3000, database=None, derandomize=True, deadline=None)
QUICK = settings(FIXED, phases=[Phase.generate])  # the corner is reached; how small is no matter
SMALL = st.tuples(st.integers(2, 4), st.integers(2, 4))
ANY_FORMAT = st.sampled_from(mt.FORMATS)


def is_read_only(x):
    return not x.flags.writeable


def repeats(A):
    """Tell whether a csr, csc or coo matrix gives some entry twice."""
    B = A.tocoo()
    return len(set(zip(*(c.tolist() for c in B.coords), strict=True))) < A.nnz


def is_unsorted(A):
    starts = set(A.indptr.tolist())
    return any(b < a and e not in starts for e, (a, b) in enumerate(pairs(A.indices), start=1))


def pairs(x):
    return zip(x[:-1].tolist(), x[1:].tolist(), strict=True)


def row_counts(W):
    """Return how many entries each free weight of a parameter stands for."""
    values = ms.SparseParameter.values.fget(W)
    (g,) = ms.grad(values.sum(), [W])
    return g


LAYOUTS = {
    "zero-dimensional": lambda x: x.ndim == 0,
    "zero size": lambda x: x.ndim > 1 and x.size == 0,
    "C order": lambda x: x.ndim > 1 and x.flags.c_contiguous and not x.flags.f_contiguous,
    "Fortran order": lambda x: x.flags.f_contiguous and not x.flags.c_contiguous,
    "sliced": lambda x: x.size > 3 and x.strides[-1] == 2 * x.itemsize,
    "negative strides": lambda x: x.ndim > 1 and x.size > 3 and max(x.strides) < 0,
    "read-only": lambda x: is_read_only(x) and 0 not in x.strides,
    "all one number, stride 0": lambda x: x.size > 3 and set(x.strides) == {0},
    "some strides 0": lambda x: min(x.shape, default=0) > 1 and 0 in x.strides and any(x.strides),
    "unaligned": lambda x: x.size > 3 and not x.flags.aligned,
    "a zero": lambda x: x.size > 1 and not x.all(),
    "a negative number": lambda x: x.size > 1 and (x < 0).any(),
}  # fmt: skip


@pytest.mark.parametrize("corner", LAYOUTS)
def test_arrays_reach(corner):
    find(mt.arrays(), LAYOUTS[corner], settings=QUICK)


@pytest.mark.parametrize("corner", [c for c in LAYOUTS if c not in ("unaligned", "C order")])
def test_cotangents_reach(corner):
    find(mt.cotangents(shape=mt.arrays().map(np.shape)), LAYOUTS[corner], settings=QUICK)


PATTERNS = {
    "no rows": lambda p: p.shape[0] == 0 < p.shape[1],
    "no columns": lambda p: p.shape[1] == 0 < p.shape[0],
    "neither": lambda p: p.shape == (0, 0),
    "no entries": lambda p: p.nnz == 0 < min(p.shape),
    "an empty row between others": lambda p: len(p.fan_in) > 2 and p.fan_in[1] == 0 < p.fan_in[2],
    "an empty last row": lambda p: p.nnz and p.fan_in[-1] == 0,
    "an empty last column": lambda p: p.nnz and p.fan_out[-1] == 0,
    "full": lambda p: p.nnz > 1 and p.density == 1,
    "one dense row": lambda p: (
        min(p.shape) > 2 and max(p.fan_in) == p.shape[1] and sum(p.fan_in > 1) == 1
    ),
    "wide": lambda p: p.nnz and p.shape[0] < p.shape[1],
    "tall": lambda p: p.nnz and p.shape[0] > p.shape[1],
    "many": lambda p: p.nnz > 12,
}


@pytest.mark.parametrize("corner", PATTERNS)
@pytest.mark.parametrize("name", ["patterns", "tensors", "parameters", "operands", "scipy"])
def test_sparse_strategies_reach_every_kind_of_pattern(name, corner):
    strategy = {
        "patterns": mt.patterns(),
        "tensors": mt.sparse_tensors().map(lambda S: S.pattern),
        "parameters": mt.sparse_parameters().map(lambda W: W.pattern),
        "operands": mt.spmm_operands().map(lambda operands: operands[0].pattern),
        "scipy": mt.scipy_csr(canonical=True).map(ms.Pattern.from_scipy),
    }[name]
    find(strategy, lambda p: bool(PATTERNS[corner](p)), settings=QUICK)


PARAMETERS = {
    "every entry its own weight": lambda W: W.nnz > 2 and W.values is W.free,
    "nothing to train": lambda W: W.nnz > 2 and W.n_free == 0,
    "some frozen, the others their own": lambda W: 0 < W.n_free == row_counts(W).sum() < W.nnz,
    "tied, none frozen": lambda W: 1 < W.n_free < W.nnz == row_counts(W).sum(),
    "tied and frozen": lambda W: 1 < W.n_free < row_counts(W).sum() < W.nnz,
    "no entries": lambda W: W.nnz == 0 < W.shape[0],
}


@pytest.mark.parametrize("corner", PARAMETERS)
def test_sparse_parameters_reach(corner):
    find(mt.sparse_parameters(), lambda W: bool(PARAMETERS[corner](W)), settings=QUICK)


@pytest.mark.parametrize(("frozen", "tied"), [(False, False), (True, False), (False, True)])
@given(data=st.data())
def test_sparse_parameters_do_as_told(frozen, tied, data):
    W = data.draw(mt.sparse_parameters(frozen=frozen, tied=tied))
    counts = row_counts(W) if W.n_free else np.zeros(0)
    assert frozen or counts.sum() == W.nnz
    assert tied or np.all(counts == 1)


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("corner", ["no columns", "stack of nothing", "ordinary"])
def test_spmm_operands_reach(ndim, corner):
    def holds(operands):
        S, x = operands
        assert x.ndim == ndim
        if corner == "ordinary":
            return S.nnz > 3 and x.size > 1
        if corner == "no columns":
            return x.shape[-1] == 0 < S.shape[0]
        return x.shape[0] == 0

    find(mt.spmm_operands(ndim=ndim), holds, settings=QUICK)


@pytest.mark.parametrize("corner", [c for c in LAYOUTS if c != "zero-dimensional"])
def test_spmm_operands_reach_every_layout(corner):
    find(mt.spmm_operands(), lambda operands: LAYOUTS[corner](operands[1]), settings=QUICK)


@pytest.mark.parametrize("corner", ["negative", "stride 0", "unaligned", "read-only", "sliced"])
def test_spmm_operands_as_arrays_reach_layouts_of_the_values(corner):
    holds = {
        "negative": lambda v: v.strides[0] < 0,
        "stride 0": lambda v: v.strides[0] == 0,
        "unaligned": lambda v: not v.flags.aligned,
        "read-only": lambda v: is_read_only(v) and v.strides[0],
        "sliced": lambda v: v.strides[0] == 2 * v.itemsize,
    }[corner]

    def reached(operands):
        (pattern, values), x = operands
        assert values.shape == (pattern.nnz,)
        assert pattern.shape[1] == x.shape[0 if x.ndim == 1 else -2]
        return len(values) > 2 and bool(holds(values))

    find(mt.spmm_operands(as_arrays=True), reached, settings=QUICK)


SCIPY = {
    "sorted, no duplicates": lambda A: A.nnz > 2 and not is_unsorted(A) and not repeats(A),
    "unsorted": lambda A: is_unsorted(A) and not repeats(A),
    "duplicates": repeats,
    "unsorted duplicates": lambda A: is_unsorted(A) and repeats(A),
    "a stored zero": lambda A: A.nnz > 1 and (A.data == 0).any(),
    "int64": lambda A: A.nnz > 1 and A.indices.dtype == A.indptr.dtype == np.int64,
    "int32": lambda A: A.nnz > 1 and A.indices.dtype == A.indptr.dtype == np.int32,
    "an array": lambda A: A.nnz > 1 and isinstance(A, sp.sparray),
    "a matrix": lambda A: A.nnz > 1 and isinstance(A, sp.spmatrix),
}


@pytest.mark.parametrize("corner", SCIPY)
@pytest.mark.parametrize("form", ["csr", "csc"])
def test_scipy_csr_reaches(form, corner):
    find(mt.scipy_csr(format=form), lambda A: bool(SCIPY[corner](A)), settings=QUICK)


@pytest.mark.parametrize("form", mt.FORMATS)
def test_scipy_csr_reaches_every_format(form):
    find(mt.scipy_csr(format=ANY_FORMAT), lambda A: A.format == form and A.nnz > 1, settings=QUICK)
    if form == "coo":
        find(mt.scipy_csr(format="coo"), repeats, settings=QUICK)


@given(A=mt.scipy_csr(format=ANY_FORMAT, canonical=True))
def test_canonical_means_canonical(A):
    assert ms.Pattern.from_scipy(A).nnz == A.tocoo().nnz
    if A.format in ("csr", "csc"):
        assert not is_unsorted(A)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(data=st.data())
def test_exact_numbers_are_small_integers_of_the_dtype(dtype, data):
    S, x = data.draw(mt.spmm_operands(dtype=dtype, exact=True, shape=SMALL))
    A = data.draw(mt.scipy_csr(dtype=dtype, exact=True))
    W = data.draw(mt.sparse_parameters(dtype=dtype, exact=True))
    c = data.draw(mt.cotangents(shape=(3,), dtype=dtype, exact=True))
    for numbers in (S.values.data, x, A.data, W.values.data, W.free.data, c):
        assert numbers.dtype == dtype
        assert np.array_equal(numbers, np.round(numbers))
        assert np.all(np.abs(numbers) <= 4)


@given(data=st.data())
def test_arguments_may_be_strategies(data):
    dtypes, flags = st.sampled_from([np.float32, np.float64]), st.booleans()
    x = data.draw(mt.arrays(shape=SMALL, dtype=dtypes, exact=flags, layout=st.just("Fortran")))
    assert x.ndim == 2
    assert x.flags.f_contiguous
    x = data.draw(mt.arrays(shape=(2,), elements=st.just(np.inf)))
    assert np.all(x == np.inf)
    p = data.draw(mt.patterns(shape=SMALL))
    assert min(p.shape) >= 2
    for pattern in (p, st.just(p)):
        S = data.draw(mt.sparse_tensors(pattern=pattern, dtype=dtypes, requires_grad=flags))
        W = data.draw(mt.sparse_parameters(pattern=pattern, frozen=flags, tied=flags))
        assert S.pattern is p
        assert W.pattern is p
    S, x = data.draw(mt.spmm_operands(shape=(2, 3), ndim=st.just(2), requires_grad=True))
    assert S.values.requires_grad
    assert S.shape == (2, 3)
    assert x.shape[0] == 3


@pytest.mark.parametrize(
    ("strategy", "condition", "smallest"),
    [
        (mt.patterns(), lambda p: p.nnz > 1, lambda p: p.shape in [(1, 2), (2, 1)]),
        (mt.arrays(), lambda x: x.size > 1, lambda x: x.tolist() == [0.0, 0.0]),
        (mt.arrays(), lambda x: x.ndim == 2, lambda x: x.size == 0 and x.flags.c_contiguous),
        (
            mt.spmm_operands(exact=True),
            lambda o: (o[0] @ o[1]).data.any(),
            lambda o: (
                o[0].values.data.tolist() == [1.0]
                and o[0].shape == (1, 1)
                and o[1].tolist() == [1.0]
                and o[1].flags.writeable
            ),
        ),
        (
            mt.scipy_csr(exact=True),
            repeats,
            lambda A: A.shape == (1, 1) and A.data.tolist() == [0.0, 0.0],
        ),
        (
            mt.sparse_parameters(exact=True),
            lambda W: 0 < W.n_free < W.nnz,
            lambda W: W.nnz == 2 and not W.values.data.any(),
        ),
    ],
)
def test_examples_shrink_to_small_ones(strategy, condition, smallest):
    assert smallest(find(strategy, condition, settings=FIXED))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mt.arrays(shape=3), r"arrays: shape=3, needs a tuple of integers"),
        (lambda: mt.arrays(shape=(2, -1)), r"arrays: shape=\(2, -1\), needs a tuple"),
        (lambda: mt.arrays(shape=(2.5,)), r"arrays: shape=\(2.5,\)"),
        (lambda: mt.arrays(dtype="float16"), r"arrays: dtype='float16', needs float32 or float64"),
        (lambda: mt.arrays(layout="D"), r"arrays: layout='D', needs one of \('C', 'Fortran'"),
        (lambda: mt.arrays(exact=1), r"arrays: exact=1, needs True or False"),
        (lambda: mt.arrays(elements=3), r"arrays: elements=3, needs a strategy of numbers"),
        (lambda: mt.cotangents(shape=None, dtype=int), r"cotangents: dtype=<class 'int'>"),
        (lambda: mt.patterns(shape=(2,)), r"patterns: shape=\(2,\), needs a pair of integers"),
        (lambda: mt.patterns(shape=(2, 3, 4)), r"patterns: shape=\(2, 3, 4\)"),
        (lambda: mt.sparse_tensors(pattern=(2, 3)), r"sparse_tensors: pattern=\(2, 3\)"),
        (
            lambda: mt.sparse_tensors(pattern=ms.Pattern.diagonal(2), shape=(2, 2)),
            "sparse_tensors: give either pattern or shape, not both",
        ),
        (lambda: mt.sparse_parameters(frozen="yes"), "sparse_parameters: frozen='yes'"),
        (lambda: mt.spmm_operands(ndim=0), "spmm_operands: ndim=0, needs an integer from 1"),
        (lambda: mt.scipy_csr(format="ell"), r"scipy_csr: format='ell', needs one of \('csr'"),
        (lambda: mt.scipy_csr(canonical=None, shape="ab"), "scipy_csr: shape='ab'"),
    ],
)
def test_wrong_arguments_are_refused_at_once(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()


def test_a_wrong_value_from_a_strategy_is_refused_when_drawn():
    strategy = mt.patterns(shape=st.just((2, -1)))
    with pytest.raises(InvalidArgument, match=r"patterns: shape=\(2, -1\), needs a pair"):
        find(strategy, lambda p: True, settings=QUICK)


@pytest.mark.parametrize("name", mt.__all__)
def test_arguments_are_given_by_keyword(name):
    with pytest.raises(TypeError, match="positional"):
        getattr(mt, name)((2, 3))


def test_the_package_itself_does_not_need_hypothesis(in_new_process):
    in_new_process("import sys; sys.modules['hypothesis'] = None; import minisparse")
