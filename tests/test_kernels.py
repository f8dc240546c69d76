"""The kernels: every backend against the reference, bit for bit where that is the promise."""

import gc
import mmap
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import minisparse
from minisparse import kernels
from minisparse.kernels import cpu, memory

from . import layouts

pytestmark = pytest.mark.compiled
DTYPES = ["float32", "float64"]
INDEX = ["int32", "int64"]
WIDTHS = [0, 1, 2, 7, 16, 17, 64, 100]


def plan_of(mask, index="int32"):
    """The plan of the True entries of a matrix, row by row."""
    indptr = np.append(0, mask.sum(1, dtype=np.int64).cumsum()).astype(index)
    return kernels.Plan(indptr, mask.nonzero()[1].astype(index), mask.shape[1])


def transposed(plan):
    """The plan of the transpose, whose values stay in the order of `plan`."""
    rows = np.repeat(np.arange(plan.n_rows), np.diff(plan.indptr))
    perm = np.lexsort((rows, plan.indices))
    counts = np.bincount(plan.indices, minlength=plan.n_cols)
    index = plan.indices.dtype
    indptr = np.append(0, counts.cumsum()).astype(index)
    return kernels.Plan(indptr, rows[perm].astype(index), plan.n_rows, perm.astype(index))


def whole_numbers(seed, *shape, dtype="float64"):
    """Small integers, whose sums and products are exact in any order."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(dtype)


def normal(seed, *shape, dtype="float64"):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def reference(name, *args):
    with kernels.backend("reference"):
        return getattr(kernels, name)(*args)


def check_same(a, b):
    """Equal in dtype, shape and every bit."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert a.tobytes() == b.tobytes()


masks = hnp.arrays(bool, st.tuples(st.integers(0, 9), st.integers(0, 9)))
plans = st.builds(plan_of, masks, st.sampled_from(INDEX))
seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from(DTYPES)


@pytest.fixture
def forced(monkeypatch):
    """Everything runs in parallel, in many chunks."""
    monkeypatch.setattr(cpu, "PARALLEL_WORK", -1)
    monkeypatch.setattr(cpu, "CHUNK_WORK", 64)


@pytest.fixture
def threads():
    """Sets the number of threads, and puts it back."""
    before = kernels.get_num_threads()
    yield kernels.set_num_threads
    kernels.set_num_threads(before)


# Against the reference ------------------------------------------------------------------------


@given(plans, st.sampled_from([None, *WIDTHS]), dtypes, seeds)
def test_spmm(plan, k, dtype, seed):
    columns = () if k is None else (k,)
    values = whole_numbers(seed, plan.nnz, dtype=dtype)
    for p in (plan, transposed(plan)):
        x = whole_numbers(seed + 1, p.n_cols, *columns, dtype=dtype)
        bias = whole_numbers(seed + 2, p.n_rows, dtype=dtype)
        for args in ((p, values, x), (p, values, x, bias), (p, values, x, bias, True)):
            out = kernels.spmm(*args)
            check_same(out, reference("spmm", *args))
            assert out.flags.c_contiguous


@given(plans, st.sampled_from([None, *WIDTHS]), dtypes, seeds)
def test_sddmm(plan, k, dtype, seed):
    columns = () if k is None else (k,)
    for p in (plan, transposed(plan)):
        u = whole_numbers(seed, p.n_rows, *columns, dtype=dtype)
        v = whole_numbers(seed + 1, p.n_cols, *columns, dtype=dtype)
        check_same(kernels.sddmm(p, u, v), reference("sddmm", p, u, v))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [*range(1, 36), 63, 64, 65, 100, 127, 128, 129, 200])
def test_every_width(k, dtype):
    """Each remainder of the columns is another combination of vectors."""
    plan = plan_of(np.random.default_rng(k).random((23, 19)) < 0.4)
    values = whole_numbers(1, plan.nnz, dtype=dtype)
    u, v = whole_numbers(2, 23, k, dtype=dtype), whole_numbers(3, 19, k, dtype=dtype)
    dense = np.zeros((23, 19), dtype)
    rows = np.repeat(np.arange(23), np.diff(plan.indptr))
    dense[rows, plan.indices] = values
    check_same(kernels.spmm(plan, values, v), dense @ v)
    check_same(kernels.spmm(transposed(plan), values, u), dense.T @ u)
    dots = (u @ v.T)[rows, plan.indices]
    check_same(kernels.sddmm(plan, u, v), dots)
    check_same(kernels.sddmm(transposed(plan), v, u), dots)


@given(st.integers(0, 40), st.integers(1, 20), st.booleans(), st.sampled_from(INDEX), dtypes, seeds)
def test_gather(m, n, based, index, dtype, seed):
    x, base = normal(seed, n, dtype=dtype), normal(seed + 1, m, dtype=dtype)
    at = np.random.default_rng(seed).integers(-3, n, m).astype(index)
    base = base if based else None
    check_same(kernels.gather(x, at, base), reference("gather", x, at, base))


@given(st.integers(0, 40), st.sampled_from(["C", "F"]), st.booleans(), dtypes, seeds)
@example(5000, "F", True, "float32", 0)
def test_gate(m, order, boolean, dtype, seed):
    g, y = normal(seed, m, 3, dtype=dtype), normal(seed + 1, m, 3, dtype=dtype)
    y = np.require(y.clip(-1, 1).round(), requirements=[order])
    if m:
        y[0], g[0] = np.nan, -np.inf
    y = y > 0 if boolean else y
    check_same(kernels.gate(g, y), reference("gate", g, y))


@given(st.integers(0, 40), st.integers(0, 12), st.sampled_from(INDEX), dtypes, seeds)
@example(0, 3, "int32", "float32", 0)
def test_segment_sum(m, n, index, dtype, seed):
    """In the same order as the reference, so bit for bit for any numbers."""
    rng = np.random.default_rng(seed)
    x = normal(seed, 17, dtype=dtype)
    cuts = np.sort(rng.integers(0, m + 1, max(n - 1, 0)))
    indptr = np.concatenate(([0], cuts, [m] if n else [])).astype(index)
    order = rng.integers(0, 17, m if n else 0).astype(index)
    check_same(kernels.segment_sum(x, indptr, order), reference("segment_sum", x, indptr, order))


def test_gather_copies_bits():
    """A NaN keeps its payload, a zero its sign."""
    bits = np.array([0x7FC00123, 0xFFC00001, 0x80000000], np.uint32)
    out = kernels.gather(bits.view(np.float32), np.array([2, 0, 1], np.int32))
    assert out.view(np.uint32).tolist() == bits[[2, 0, 1]].tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (5, 9), (3, 1, 300)])
@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.1},
        {"lr": 0.1, "weight_decay": 0.01},
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    ],
)
def test_sgd(dtype, shape, options):
    ours = [normal(n, *shape, dtype=dtype) for n in range(3)]
    theirs = [a.copy() for a in ours]
    for (p, g, buf), on in ((ours, "cpu"), (theirs, "reference")):
        with kernels.backend(on):
            kernels.sgd(p, g, buf if "momentum" in options else None, **options)
    for a, b in zip(ours, theirs, strict=True):
        check_same(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (5, 9), (3, 1, 300)])
@pytest.mark.parametrize(("weight_decay", "decoupled"), [(0.0, False), (0.1, False), (0.1, True)])
def test_adam(dtype, shape, weight_decay, decoupled):
    ours = [normal(0, *shape, dtype=dtype), normal(1, *shape, dtype=dtype)]
    ours += [np.zeros(shape, dtype), np.zeros(shape, dtype)]
    theirs = [a.copy() for a in ours]
    for (p, g, m, v), on in ((ours, "cpu"), (theirs, "reference")):
        with kernels.backend(on):
            n = np.zeros(1, np.int64)
            for step in (1, 2, 3):
                kernels.adam(p, g, m, v, n, 0.01, 0.9, 0.999, 1e-8, weight_decay, decoupled)
                assert n == step
    for a, b in zip(ours, theirs, strict=True):
        check_same(a, b)


def test_adam_moments_decay():
    """CASES 41: gradients 1 and 0: the second step is about 0.670 lr."""
    p, m, v, n = np.zeros(1), np.zeros(1), np.zeros(1), np.zeros(1, np.int64)
    kernels.adam(p, np.ones(1), m, v, n, 0.1, 0.9, 0.999, 1e-8)
    first = p.copy()
    kernels.adam(p, np.zeros(1), m, v, n, 0.1, 0.9, 0.999, 1e-8)
    np.testing.assert_allclose((first - p) / 0.1, 0.670, atol=5e-4)


# Both gradients in one walk ---------------------------------------------------------------------


def check_both(plan, values, x, g, exact=True):
    """Held to the two products apart, for A and for its transpose."""
    back = transposed(plan)
    for p, q, u, v in ((plan, back, x, g), (back, plan, g, x)):
        got = kernels.spmm_vjp(p, q, values, u, v)
        for a, b in zip(got, (kernels.sddmm(p, v, u), kernels.spmm(q, values, v)), strict=True):
            if exact:
                check_same(a, b)
            else:
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@given(plans, st.sampled_from([None, 0, 1, 2, 3, 7, 8, 16, 17, 32, 64, 100, 256]), dtypes, seeds)
def test_spmm_vjp(plan, k, dtype, seed):
    columns = () if k is None else (k,)
    values = whole_numbers(seed, plan.nnz, dtype=dtype)
    x = whole_numbers(seed + 1, plan.n_cols, *columns, dtype=dtype)
    g = whole_numbers(seed + 2, plan.n_rows, *columns, dtype=dtype)
    check_both(plan, values, x, g)
    for relu in (False, True):
        args = plan, transposed(plan), values, x, g, relu
        for a, b in zip(kernels.spmm_vjp(*args), reference("spmm_vjp", *args), strict=True):
            check_same(a, b)


@pytest.mark.parametrize("k", [None, 5, 16, 32, 64, 200])
def test_relu_inside(monkeypatch, k):
    """As outside: NaN comes through, and its gradient too; also in panels and giant rows."""
    monkeypatch.setattr(cpu, "CACHE", 1 << 14)
    monkeypatch.setattr(cpu, "SPLIT", 30)
    mask = np.random.default_rng(0).random((90, 70)) < 0.4
    mask[5] = mask[:, [2, 9]] = True  # giant in either direction, but none that dominates
    plan, columns = plan_of(mask), () if k is None else (k,)
    values, bias = normal(0, plan.nnz), normal(1, 90)
    x, g = normal(2, 70, *columns), normal(3, 90, *columns)
    x[:9:2], x[0], x[2], x[4] = -0.0, np.nan, np.inf, -np.inf
    y = kernels.gate(x, x)
    check_same(kernels.spmm(plan, values, x, bias, True), kernels.spmm(plan, values, y, bias))
    both = plan, transposed(plan), values
    dvalues, dx = kernels.spmm_vjp(*both, y, g)
    got = kernels.spmm_vjp(*both, x, g, True)
    check_same(got[0], dvalues)
    check_same(got[1], kernels.gate(dx, x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", INDEX)
@pytest.mark.parametrize("case", ["plain", "steps", "panels", "giant", "dominated"])
def test_both_gradients(monkeypatch, threads, case, dtype, index):
    """Apart and in one walk: bit for bit up to 256 bytes a row, and for every thread count."""
    mask = np.random.default_rng(0).random((257, 131)) < 0.3
    mask[200:220], mask[:, 7] = False, False
    mask[100] = mask[:, 50] = True
    if case == "steps":
        monkeypatch.setattr(cpu, "BLOCK", 100)
        monkeypatch.setattr(cpu, "DIRECT", 100)
    monkeypatch.setattr(cpu, "CACHE", 1 << 16 if case == "panels" else 1 << 20)
    monkeypatch.setattr(cpu, "SPLIT", 60 if case == "giant" else 30 if case == "dominated" else 200)
    if case == "dominated":
        mask[:, 60:] = False
        mask[:, :49] &= np.arange(257)[:, None] % 9 == 0
    plan = plan_of(mask, index)
    values, back = normal(0, plan.nnz, dtype=dtype), transposed(plan)
    for k in (1, 2, 3, 7, 8, 16, 17, 32, 64, 100, 256):
        x, g = normal(1, 131, k, dtype=dtype), normal(2, 257, k, dtype=dtype)
        monkeypatch.setattr(cpu, "PARALLEL_WORK", 1 << 40)
        check_both(plan, values, x, g, exact=x[:1].nbytes <= 256)
        expected = kernels.spmm_vjp(plan, back, values, x, g)
        monkeypatch.setattr(cpu, "PARALLEL_WORK", -1)
        for chunk in (64, 1 << 12):
            monkeypatch.setattr(cpu, "CHUNK_WORK", chunk)
            for n in (1, 2, 4):
                threads(n)
                for a, b in zip(kernels.spmm_vjp(plan, back, values, x, g), expected, strict=True):
                    check_same(a, b)


def test_both_gradients_of_nan_and_inf():
    """What is not there adds nothing, nor what comes twice in a vector."""
    plan = plan_of(np.array([[1, 0, 1], [0, 1, 0], [1, 0, 0], [0, 0, 0]], bool))
    values, x, g = np.array([1, 0, 2, 3.0]), np.ones((3, 32)), np.ones((4, 32))
    g[0, 5], g[3], x[1, 0] = np.inf, np.nan, np.nan
    check_both(plan, values, x, g)


# Structure ------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [None, 0, 1, 3])
@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (4, 0), (3, 5)])
def test_nothing_stored(shape, k):
    """CASES 20, 21: exact zeros every time, whatever the memory held before."""
    plan = plan_of(np.zeros(shape, bool))
    columns = () if k is None else (k,)
    x, u = np.full((shape[1], *columns), np.nan), np.ones((shape[0], *columns))
    for _ in range(1000):
        out = kernels.spmm(plan, np.empty(0), x)
        check_same(out, np.zeros((shape[0], *columns)))
        out += np.nan
    check_same(kernels.sddmm(plan, u, x), np.empty(0))
    check_same(kernels.spmm(transposed(plan), np.empty(0), u), np.zeros((shape[1], *columns)))


def test_rows_without_entries():
    """CASES 20: also where the block is recycled and full of NaN."""
    mask = np.zeros((400, 5), bool)
    mask[7, 2] = True
    plan = plan_of(mask)
    for _ in range(100):
        out = kernels.spmm(plan, np.array([3.0]), np.ones((5, 64)))
        assert out[7].tolist() == [3.0] * 64
        out[7] = 0
        check_same(out, np.zeros((400, 64)))
        out[...] = np.nan


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [None, 0, 1, 3, 64])
@pytest.mark.parametrize("parallel", [False, True])
def test_giant_row(monkeypatch, request, parallel, k, dtype):
    """A row that dominates is summed in pieces; the result is the sum all the same."""
    if parallel:
        request.getfixturevalue("forced")
    monkeypatch.setattr(cpu, "SPLIT", 8)
    mask = np.zeros((9, 100), bool)
    mask[4] = mask[:, 50] = mask[2, :17] = True
    plan, columns = plan_of(mask), () if k is None else (k,)
    values = whole_numbers(0, plan.nnz, dtype=dtype)
    u = whole_numbers(1, 9, *columns, dtype=dtype)
    v = whole_numbers(2, 100, *columns, dtype=dtype)
    for p, x, y in ((plan, v, u), (transposed(plan), u, v)):
        check_same(kernels.spmm(p, values, x), reference("spmm", p, values, x))
        check_same(kernels.sddmm(p, y, x), reference("sddmm", p, y, x))
    far, near = values.copy(), np.flatnonzero(np.repeat(np.arange(9), np.diff(plan.indptr)) == 3)
    far[near] = np.inf, *[-np.inf] * (len(near) - 1)  # between giant rows: passes without a word
    check_same(kernels.spmm(plan, far, v + 8), reference("spmm", plan, far, v + 8))
    wide = transposed(transposed(plan))  # a giant row whose values are permuted
    wide.perm = np.arange(plan.nnz, dtype=np.int32)[::-1].copy()
    check_same(kernels.spmm(wide, values, v), reference("spmm", wide, values, v))


@pytest.mark.parametrize("far", [False, True])
def test_far_operands_are_asked_for_ahead(monkeypatch, far):
    """Rows of an operand that does not fit the cache are prefetched; those of others are not."""
    asked, run = [], cpu._Kernel.__call__
    monkeypatch.setattr(cpu, "CACHE", 512 if far else 1 << 20)
    monkeypatch.setattr(
        cpu._Kernel, "__call__", lambda *args, **most: (asked.append(args[-1]), run(*args, **most))
    )
    plan = plan_of(np.ones((3, 64), bool))
    x = normal(0, 64, 1)
    kernels.spmm(plan, normal(1, plan.nnz), x)
    kernels.sddmm(plan, x[:3], x)
    assert [ahead > 0 for ahead in asked] == [far] * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [128, 200, 257])
@pytest.mark.parametrize("layout", ["C", "F"])
def test_panels(monkeypatch, k, dtype, layout):
    """An operand too large for the cache is copied and multiplied in panels of columns."""
    monkeypatch.setattr(cpu, "CACHE", 8192)
    plan = plan_of(np.random.default_rng(0).random((40, 20)) < 0.8)
    values = whole_numbers(0, plan.nnz, dtype=dtype)
    u = whole_numbers(1, 40, k, dtype=dtype)
    v = np.asarray(whole_numbers(2, 20, k, dtype=dtype), order=layout)
    assert len(next(cpu._parts(plan, v))[1]) > 1
    check_same(kernels.spmm(plan, values, v), reference("spmm", plan, values, v))
    check_same(kernels.sddmm(plan, u, v), reference("sddmm", plan, u, v))


def test_rows_across_cache_lines():
    """An operand whose rows lie across one cache line more than they need is aligned first."""
    memory = whole_numbers(0, 2048 * 16 + 20)
    start = -memory.ctypes.data % 64 // memory.itemsize + 4
    x = memory[start:][: 2048 * 16].reshape(2048, 16)
    plan = plan_of(np.random.default_rng(0).random((20, 2048)) < 0.5)
    ((_, part, _),) = cpu._parts(plan, x)
    assert x.ctypes.data % 64 == 32
    assert part.ctypes.data % 64 == 0
    assert np.array_equal(part[0], x)
    values = whole_numbers(1, plan.nnz)
    check_same(kernels.spmm(plan, values, x), reference("spmm", plan, values, x))


def test_fence(in_new_process):
    """What `pytest --guard=fence` relies on: one element out, on either side, ends the process."""
    in_new_process(
        """
import os, signal, numpy as np
from minisparse.kernels import cpu
from tests import guards

@cpu.body
def copy_one(first, bound, out, x, i):
    cpu.put(cpu.data(out), 0, cpu.get(cpu.data(x), i))

kernel = cpu._Kernel(copy_one)
guards.fence_all()
for i in (0, 7, 8, -1):
    out, pid = np.zeros(1), os.fork()
    if not pid:
        kernel("d", 0, 1, np.zeros(0, int), out, np.arange(8.0), i)
        os._exit(int(out[0] != i))
    status = os.waitpid(pid, 0)[1]
    if 0 <= i < 8:
        assert status == 0
    else:
        assert os.WTERMSIG(status) in (signal.SIGSEGV, signal.SIGBUS)
"""
    )


def reserved(n, dtype=np.float32):
    """Return an array of n zeros, in memory that is there once it is touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        return np.frombuffer(mmap.mmap(-1, n * np.dtype(dtype).itemsize, flags=flags), dtype)
    except (OSError, ValueError):
        pytest.skip("no address space")


def test_offsets_in_64_bits():
    """CASES 18: row × width beyond 2³¹, in memory that is reserved and never touched."""
    n, k = 2**27 + 1, 17
    x = reserved(n * k).reshape(n, k)
    x[-1], x[5] = np.arange(k), 1
    plan = kernels.Plan(np.array([0, 2], np.int32), np.array([5, n - 1], np.int32), n)
    values = np.array([2, 3], np.float32)
    assert kernels.spmm(plan, values, x).tolist() == [[2 + 3 * c for c in range(k)]]
    u = np.ones((1, k), np.float32)
    assert kernels.sddmm(plan, u, x).tolist() == [k, k * (k - 1) / 2]


def test_places_in_64_bits():
    """CASES 18: entries beyond 2³¹ in the kernels over rows, of gathers and sums."""
    n = 2**31 + 8
    x, out, last = reserved(n), reserved(n), np.arange(n - 3, n)
    x[last] = 1, 2, 4
    ends = np.array([n - 3, n])
    plan = kernels.Plan(ends, last, 1)
    assert kernels.gather(x, last).tolist() == [1, 2, 4]
    assert kernels.segment_sum(x, np.array([0, 1, 3]), last).tolist() == [1, 6]
    assert kernels.row_max(plan, x).tolist() == [4]
    cpu.run(cpu.reference._row_softmax, 1, out, x, ends)
    np.testing.assert_allclose(out[last], np.exp([-3, -2, 0]) / np.exp([-3, -2, 0]).sum(), 1e-6)


@pytest.mark.parametrize("work", [0, 1 << 24])
def test_no_memory_for_a_part_of_the_work(monkeypatch, work):
    """Each part of a product of sparse matrices has a dense row; without, there is an error."""
    monkeypatch.setattr(cpu, "PARALLEL_WORK", work)
    pointers, here = np.arange(19, dtype=np.int32), np.arange(18, dtype=np.int32)
    plan, values = kernels.Plan(pointers, here, 2**50), np.ones(18, np.float32)
    with pytest.raises(MemoryError):
        kernels.spgemm(plan, plan, plan, values, values)
    for transpose in (False, True):
        with pytest.raises(MemoryError):
            kernels.spgemm_dot(plan, plan, plan, values, values, transpose)


# Numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 2, 7, 17, 64, 100])
def test_nan_and_inf_touch_what_they_touch(k, dtype):
    """CASES 29: a stored 0.0 times inf is NaN, an absent entry contributes nothing."""
    mask = np.array([[1, 0, 1], [0, 1, 0], [1, 0, 0], [0, 0, 0]], bool)
    plan = plan_of(mask)
    values = np.array([1, 0, 2, 3], dtype)  # (0,0) (0,2) (1,1) (2,0)
    x = np.ones((3, k), dtype)
    x[2, k // 2] = np.inf
    x[1, 0] = np.nan
    expected = np.ones((4, k), dtype) * [[1], [2], [3], [0]]
    expected[0, k // 2] = np.nan
    expected[1, 0] = np.nan
    np.testing.assert_array_equal(kernels.spmm(plan, values, x), expected)
    dots = kernels.sddmm(plan, np.ones((4, k), dtype), x)
    np.testing.assert_array_equal(dots, [k, np.inf, np.nan, k])
    zeros = kernels.sddmm(plan, np.zeros((4, k), dtype), x)
    np.testing.assert_array_equal(zeros, [0, np.nan, np.nan, 0])


def test_sums_start_from_positive_zero():
    plan = plan_of(np.ones((1, 1), bool))
    for k in (1, 5, 64):
        out = kernels.spmm(plan, np.array([-0.0]), np.ones((1, k)))
        assert not np.signbit(out).any()


# One result for every thread count and layout ---------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", INDEX)
def test_bitwise_for_every_thread_count(monkeypatch, threads, dtype, index):
    """Serial and parallel, for numbers whose sums do depend on their order."""
    mask = np.random.default_rng(0).random((257, 131)) < 0.2
    mask[100] = True
    mask[200:220] = False
    plan = plan_of(mask, index)
    values, x = normal(0, plan.nnz, dtype=dtype), normal(1, 131, 100, dtype=dtype)
    u = normal(2, 257, 100, dtype=dtype)
    back = transposed(plan)
    order = np.random.default_rng(1).permutation(plan.nnz).astype(index)

    def everything():
        p, m, v = u.copy(), np.zeros_like(u), np.zeros_like(u)
        kernels.adam(p, u, m, v, np.zeros(1, np.int64), 0.1, 0.9, 0.99, 1e-8)
        kernels.sgd(p, u, m, 0.1, 0.9, True, 0.01)
        return [
            *(kernels.spmm(plan, values, x[:, :k]) for k in (1, 7, 64, 100)),
            *(kernels.spmm(back, values, u[:, :k]) for k in (1, 7, 64, 100)),
            *(kernels.sddmm(plan, u[:, :k], x[:, :k]) for k in (1, 7, 64, 100)),
            kernels.sddmm(back, x, u),
            kernels.gather(values, order),
            kernels.segment_sum(values, plan.indptr, order),
            kernels.contiguous(u.T),
            *(p, m, v),
        ]

    threads(1)
    expected = everything()
    monkeypatch.setattr(cpu, "PARALLEL_WORK", -1)
    for chunk in (64, 1 << 12, 1 << 18):
        monkeypatch.setattr(cpu, "CHUNK_WORK", chunk)
        for n in (2, 3, 4, 8):
            threads(n)
            for a, b in zip(everything(), expected, strict=True):
                check_same(a, b)


LAYOUTS = {
    **layouts.LAYOUTS,
    "sliced rows": lambda x: np.repeat(x, 2, axis=0)[::2],
    "negative rows": lambda x: np.ascontiguousarray(x[::-1])[::-1],
    "negative columns": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
    "unaligned Fortran": lambda x: layouts.unaligned(x.T).T,
    "part of Fortran": lambda x: np.asfortranarray(np.repeat(x, 2, axis=0))[::2],
    "memmap": lambda x: x.view(np.memmap),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("k", [1, 2, 7, 64, 100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(layout, k, dtype):
    """CASES 2, 3: the memory layout of what comes in changes no bit of what comes out."""
    plan = plan_of(np.random.default_rng(0).random((70, 90)) < 0.1)
    values = normal(0, plan.nnz, dtype=dtype)
    u, v = normal(1, 70, k, dtype=dtype), normal(2, 90, k, dtype=dtype)
    f = LAYOUTS[layout]
    given = f(v)
    check_same(kernels.spmm(plan, f(values), given), kernels.spmm(plan, values, v))
    check_same(kernels.sddmm(plan, f(u), given), kernels.sddmm(plan, u, v))
    check_same(given.copy(), v)  # nothing was written into it
    at = plan.indices
    check_same(kernels.gather(f(values), at, f(values)), kernels.gather(values, at, values))
    check_same(
        kernels.segment_sum(f(values), plan.indptr, at),
        kernels.segment_sum(values, plan.indptr, at),
    )
    row = u[:, 0]
    check_same(
        kernels.spmm(transposed(plan), values, f(row)), kernels.spmm(transposed(plan), values, row)
    )
    back = transposed(plan)
    for a, b in zip(
        kernels.spmm_vjp(plan, back, f(values), given, f(u)),
        kernels.spmm_vjp(plan, back, values, v, u),
        strict=True,
    ):
        check_same(a, b)


@pytest.mark.parametrize("k", [1, 7, 64])
def test_stride_zero(k):
    """CASES 1: a cotangent that is one number seen everywhere."""
    plan = plan_of(np.random.default_rng(0).random((30, 40)) < 0.2)
    values, v = normal(0, plan.nnz), normal(1, 40, k)
    flat = np.broadcast_to(np.array(1.5), (30, k))
    row = np.broadcast_to(normal(2, 1, k), (30, k))
    for g in (flat, row):
        check_same(kernels.sddmm(plan, g, v), kernels.sddmm(plan, g.copy(), v))
        back = transposed(plan)
        check_same(kernels.spmm(back, values, g), kernels.spmm(back, values, g.copy()))
    one = np.broadcast_to(np.array(2.0), plan.nnz)
    check_same(kernels.spmm(plan, one, v), kernels.spmm(plan, one.copy(), v))


def test_toy():
    """CASES 1: the toy, whose gradient of the values is [3, 11, 7]."""
    plan = kernels.Plan(np.array([0, 2, 3], np.int32), np.array([0, 2, 1], np.int32), 3)
    x, values = np.array([[1.0, 2], [3, 4], [5, 6]]), np.array([1.0, 2, 3])
    assert kernels.spmm(plan, values, x).tolist() == [[11, 14], [9, 12]]
    g = np.broadcast_to(np.array(1.0), (2, 2))
    assert kernels.sddmm(plan, g, x).tolist() == [3, 11, 7]
    assert kernels.spmm(transposed(plan), values, g).tolist() == [[1, 1], [3, 3], [2, 2]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1), (100, 64), (257, 33), (17, 1000)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_contiguous(layout, shape, dtype):
    x = normal(0, *shape, dtype=dtype)
    out = kernels.contiguous(LAYOUTS[layout](x))
    check_same(out, x)
    assert out.flags.c_contiguous
    assert out.flags.aligned
    assert type(out) is np.ndarray


def test_contiguous_returns_what_is_contiguous():
    x = normal(0, 30, 40)
    assert kernels.contiguous(x) is x
    swapped = x.astype(x.dtype.newbyteorder())
    check_same(kernels.contiguous(swapped), x)


# Backends and settings --------------------------------------------------------------------------


def test_backend():
    plan, x = plan_of(np.ones((2, 2), bool)), np.ones((2, 2))
    seen = []
    with kernels.backend("reference"):
        assert kernels.config()["backend"] == "reference"
        thread = threading.Thread(target=lambda: seen.append(kernels.config()["backend"]))
        thread.start()
        thread.join()
        with kernels.backend("cpu"):
            assert kernels.config()["backend"] == "cpu"
            kernels.spmm(plan, np.ones(4), x)
        assert kernels.config()["backend"] == "reference"
    assert seen == ["cpu"]
    with pytest.raises(ValueError, match="cuda"), kernels.backend("cuda"):
        pass
    with pytest.raises(TypeError, match="list"):
        kernels.spmm(plan, [1.0] * 4, x)


def test_threads_setting(threads):
    threads(3)
    assert kernels.get_num_threads() == 3
    for wrong in (0, -1, 1.5, "2", None, True):
        with pytest.raises(ValueError, match="at least 1"):
            kernels.set_num_threads(wrong)
    assert kernels.get_num_threads() == kernels.config()["threads"] == 3


# Memory -----------------------------------------------------------------------------------------


def address(array):
    return array.ctypes.data


@pytest.fixture
def pool(monkeypatch):
    """A pool of its own."""
    pool = memory._Pool()
    monkeypatch.setattr(memory, "_pool", pool)
    return pool


def test_blocks_are_recycled_when_nobody_sees_them(pool):
    a = memory.empty((300, 100), np.float32)
    assert address(a) % 64 == 0
    where, size = address(a), a.nbytes
    view = a[10:20].T
    del a
    b = memory.empty((300, 100), np.float32)
    assert not where <= address(b) < where + size
    buffer = memoryview(view)
    del view
    c = memory.empty((300, 100), np.float32)
    assert not where <= address(c) < where + size
    del buffer
    gc.collect()
    d = memory.empty((100, 300), np.float32)
    assert address(d) == where
    d[...] = 1
    b[...] = c[...] = 2
    assert (d == 1).all()


def test_small_arrays_and_shapes(pool):
    assert memory.empty(3, np.float32).shape == (3,)
    assert memory.empty((), np.float64).shape == ()
    assert memory.empty((0, 10**9), np.float32).shape == (0, 10**9)
    assert memory.empty(10**5, "float64").dtype == np.float64


def test_idle_memory_is_bounded(pool, monkeypatch):
    monkeypatch.setattr(memory, "MAX_IDLE_BYTES", 1 << 20)
    arrays = [memory.empty(100_000 + 5000 * n, np.float32) for n in range(20)]
    last = arrays[-1].nbytes
    while arrays:
        del arrays[0]
    assert pool.idle_bytes <= 1 << 20
    assert pool.idle_bytes == sum(size * len(blocks) for size, blocks in pool.idle.items())
    assert max(size for size, blocks in pool.idle.items() if blocks) >= last  # the oldest went
    memory.empty(1 << 20, np.float64)  # more than the limit by itself: not kept
    assert pool.idle_bytes <= 1 << 20


def test_pool_is_never_waited_for(pool):
    """As when the garbage collector drops a block in the middle of the pool's own code."""
    a = memory.empty(50_000, np.float64)
    turn = pool.turn.pop()
    del a
    b = memory.empty(50_000, np.float64)
    b[...] = 0
    pool.turn.append(turn)
    assert pool.idle_bytes == 0


def test_pool_among_threads(pool):
    """No block is handed out twice."""
    wrong = []

    def work(number):
        rng = np.random.default_rng(number)
        kept = []
        for _ in range(300):
            a = memory.empty(int(rng.choice([40_000, 50_000])), np.int64)
            a[...] = number
            kept.append(a[5:])
            if len(kept) > 4:
                b = kept.pop(int(rng.integers(5)))
                if (b != number).any():
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# What starts when, and the cache ----------------------------------------------------------------


def test_import_starts_nothing(in_new_process):
    """CASES 39."""
    in_new_process("""
import os, sys, threading, numpy, scipy.sparse
def state():
    tasks = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0
    return tasks, threading.active_count(), dict(os.environ), dict(numpy.geterr())
before = state()
from minisparse import kernels
kernels.config(), kernels.get_num_threads()
assert "numba" not in sys.modules, "numba"
assert state() == before

import numba, scipy.linalg  # which Numba imports while it compiles
from numba.np.ufunc import parallel
layer, count = numba.config.THREADING_LAYER, numba.config.NUMBA_NUM_THREADS
before = state()
plan = kernels.Plan(numpy.array([0, 1], "int32"), numpy.array([0], "int32"), 1)
kernels.spmm(plan, numpy.ones(1), numpy.ones((1, 1)))
assert state() == before, "a serial kernel started a thread"
assert not parallel._is_initialized
assert kernels.config()["threading_layer"] is None
from minisparse.kernels import cpu
cpu.PARALLEL_WORK = -1
kernels.set_num_threads(7)
kernels.spmm(plan, numpy.ones(1), numpy.ones((1, 1)))
assert kernels.config()["threading_layer"] in ("omp", "tbb", "workqueue")
assert (numba.config.THREADING_LAYER, numba.get_num_threads()) == (layer, count)
assert state()[2:] == before[2:]
""")


def test_without_the_compiler(in_new_process):
    out = in_new_process(
        """
import numpy, sys
from minisparse import kernels
plan = kernels.Plan(numpy.array([0, 1], "int32"), numpy.array([0], "int32"), 1)
print(kernels.spmm(plan, numpy.ones(1), numpy.ones((1, 1))))
assert "minisparse.kernels.cpu" not in sys.modules
kernels.warmup()
""",
        NUMBA_DISABLE_JIT="1",
    )
    assert out.strip() == "[[1.]]"


@pytest.mark.compiled
def test_warmup_leaves_no_body_out(in_new_process):
    in_new_process("""
import inspect
from minisparse import kernels
from minisparse.kernels import cpu, reference

def is_body(f):
    f = getattr(f, "py_func", f)
    return inspect.isfunction(f) and list(inspect.signature(f).parameters)[:2] == ["first", "bound"]

bodies = {name for m in (cpu, reference) for name, f in vars(m).items() if is_body(f)}
assert len(bodies) > 12
kernels.warmup()
assert {kernel.body.__name__ for kernel in cpu._kernels.values()} == bodies
assert all(kernel.parallel for kernel in cpu._kernels.values())
""")


@pytest.fixture
def copied(tmp_path):
    """A copy of the kernels as a package of its own, with no cache yet."""
    package = tmp_path / "site" / "minisparse"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    source = Path(minisparse.__file__).parent / "kernels"
    shutil.copytree(source, package / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    return package / "kernels"


GATHER = """
import sys
sys.path.insert(0, {site!r})
import warnings
warnings.simplefilter("error")
import numpy as np
from minisparse import kernels
from minisparse.kernels import cpu
assert kernels.gather(np.arange(3.0), np.array([2, 0])).tolist() == [2, 0]
(kernel,) = cpu._kernels[cpu.reference._gather].serial.values()
print(sum(kernel.stats.cache_hits.values()), kernels.config()["cache"])
"""


def test_cache_is_used_and_heals(in_new_process, copied):
    """CASES 38: truncated cache files are compiled anew and written anew."""
    cache = copied / "__pycache__"
    source = GATHER.format(site=str(copied.parent.parent))

    def hits():
        return int(in_new_process(source, NUMBA_CACHE_DIR="").split()[0])

    assert hits() == 0
    assert hits() == 1
    for suffix in ("nbi", "nbc"):
        (file,) = cache.glob(f"*.{suffix}")
        for keep in (0, 0.5):
            content = file.read_bytes()
            file.write_bytes(content[: int(keep * len(content))])
            assert hits() == 0
        assert hits() == 1


def test_processes_that_compile_at_once(in_new_process, copied):
    """CASES 38: four with one empty cache; all are right, and leave it whole."""
    source = GATHER.format(site=str(copied.parent.parent))
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(in_new_process, source, NUMBA_CACHE_DIR="") for _ in range(4)]
        assert all(run.result().endswith("__pycache__\n") for run in runs)
    assert in_new_process(source, NUMBA_CACHE_DIR="").startswith("1 ")


@pytest.mark.parametrize("cache_dir", ["", "/dev/null/nowhere"])
def test_no_directory_for_the_cache(in_new_process, copied, cache_dir):
    """CASES 38: neither the package nor the home can be written."""
    (copied / "__pycache__").touch()  # root may write anywhere, but not into a file
    out = in_new_process(
        GATHER.format(site=str(copied.parent.parent)),
        PYTHONDONTWRITEBYTECODE="1",
        NUMBA_CACHE_DIR=cache_dir,
        HOME="/dev/null",
        XDG_CACHE_HOME="/dev/null",
    )
    assert out.split() == ["0", "None"]
