"""Every check here runs over the table of operations."""

import types

import numpy as np
import pytest

import minisparse as ms
from minisparse import algebra, linalg, ops, sparse
from minisparse.ops import elementwise, products, reductions, shapes

from .table import TABLE

rows = pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)


def plain(result):
    """Return the arrays of a result, one or several, dense or sparse."""
    results = result if isinstance(result, list) else [result]
    results = [r.values if isinstance(r, ms.SparseTensor) else r for r in results]
    return [r.data if isinstance(r, ms.Tensor) else np.asarray(r) for r in results]


@rows
def test_forward_is_numpys(row):
    expected = plain(row.reference(*row.inputs))
    got = plain(row.f(*[ms.tensor(x) for x in row.inputs]))
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


@rows
def test_gradcheck(row):
    assert ms.gradcheck(row.f, [ms.tensor(x) for x in row.inputs], order=row.order)


@pytest.mark.parametrize(
    "row", [row for row in TABLE if row.name != "astype"], ids=lambda row: row.name
)
def test_float32_stays_float32(row):
    """CASES 33."""
    inputs = [ms.tensor(x, dtype=np.float32, requires_grad=True) for x in row.inputs]
    results = row.f(*inputs)
    for r in results if isinstance(results, list) else [results]:
        r = r.values if isinstance(r, ms.SparseTensor) else r
        assert r.dtype == np.float32
        gradients = ms.grad(r, inputs, np.ones(r.shape), create_graph=True)
        assert {g.dtype for g in gradients} == {np.dtype(np.float32)}


@rows
def test_plain_operands_are_not_recorded(row):
    """Constants and no_grad leave no graph behind."""
    constant = row.f(*[ms.tensor(x) for x in row.inputs])
    with ms.no_grad():
        unrecorded = row.f(*[ms.tensor(x, requires_grad=True) for x in row.inputs])
    for results in (constant, unrecorded):
        for r in results if isinstance(results, list) else [results]:
            r = r.values if isinstance(r, ms.SparseTensor) else r
            assert not r.requires_grad
            assert r._node is None


@rows
def test_gradients_share_memory_with_nothing(row):
    inputs = [ms.tensor(x, requires_grad=True) for x in row.inputs]
    results = row.f(*inputs)
    for r in results if isinstance(results, list) else [results]:
        r = r.values if isinstance(r, ms.SparseTensor) else r
        cotangent = np.ones(r.shape)
        r.backward(cotangent)
        seen = [cotangent, r.data, *[x.data for x in inputs]]
        for x in inputs:
            if x.grad is not None:
                assert not any(np.shares_memory(x.grad, other) for other in seen)
                seen.append(x.grad)


ERRORS = [(row.name, error, call) for row in TABLE for error, call in row.errors]


@pytest.mark.parametrize(("name", "error", "call"), ERRORS, ids=[e[0] for e in ERRORS])
def test_errors(name, error, call):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).strip()


def test_every_primitive_is_in_the_table():
    used = {f for row in TABLE for f in row.uses}
    missing = []
    for module in (ops, elementwise, products, reductions, shapes, sparse, algebra, linalg):
        for name, thing in vars(module).items():
            if isinstance(thing, types.FunctionType) and hasattr(thing, "vjp"):
                missing += [f"{module.__name__}.{name}"] if thing not in used else []
    assert not missing
