"""One table of operations, which every check in test_table.py runs over.

A row gives the public function as it is called, the same in plain NumPy or SciPy, the inputs (drawn
well away from kinks), and calls that must fail.  A primitive of the package that no row uses fails
a test.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable

import numpy as np
import scipy.sparse as sp
import scipy.special

import minisparse as ms
from minisparse import algebra, linalg, ops
from minisparse import sparse as mss
from minisparse.engine import raw
from minisparse.pattern import IndexMap

RNG = np.random.default_rng(7)


def normal(*shape):
    return RNG.normal(size=shape)


def apart(*shape):
    """Numbers whose magnitudes are at least 0.1, and no two of them closer than 0.05."""
    n = int(np.prod(shape))
    return (RNG.permutation(n) * 0.1 + 0.1).reshape(shape) * RNG.choice([-1, 1], size=shape)


def positive(*shape):
    return RNG.uniform(0.5, 2.0, size=shape)


@dataclasses.dataclass
class Row:
    """One operation: `f(*inputs)` and `reference(*inputs)` agree; calls in `errors` fail."""

    name: str
    f: Callable
    reference: Callable
    inputs: tuple
    uses: tuple
    errors: tuple = ()
    order: int = 2


P = ms.Pattern.random((5, 7), density=0.4, rng=1)
TALL = ms.Pattern((3, 2), [0, 0, 2, 2], [0, 1])  # with empty rows
EMPTY = ms.Pattern((3, 4), [0, 0, 0, 0], [])
OTHER = ms.Pattern.random((5, 7), density=0.3, rng=2)
FULL = ms.Pattern.banded((5, 7), 1, 3)
RIGHT = ms.Pattern.random((7, 4), density=0.4, rng=3)
SQUARE = ms.Pattern.banded((5, 5), 1, 2)
MAP = IndexMap(np.array([2, -1, 0, 0, 3]), 4)
BASE = np.array([9.0, -0.0, 9.0, 9.0, 9.0])


def dense(values, pattern):
    return sp.csr_array((values, pattern.indices, pattern.indptr), shape=pattern.shape).toarray()


def unary(name, inputs, f=None, reference=None):
    f = f or getattr(ms, name)
    reference = reference or getattr(np, name)
    errors = (
        (TypeError, lambda: f(ms.tensor([1.0]), ms.tensor([1.0]), 1, 2, 3)),
        (TypeError, lambda: f()),
    )
    return [
        Row(f"{name}{shape}", f, reference, (inputs(*shape),), (getattr(ops, name),), errors)
        for shape in ((3, 4), (), (0, 2))
    ]


def binary(name, left, right):
    f, reference = getattr(ms, name), getattr(np, name)
    shapes = [((3, 4), (3, 4)), ((3, 1), (4,)), ((), (2, 2)), ((2, 3), ()), ((0, 3), (1, 3))]
    errors = (
        (ValueError, lambda: f(ms.tensor([1.0, 2.0]), np.ones(3))),
        (TypeError, lambda: f(ms.tensor([1.0]), "a")),
        (TypeError, lambda: f(ms.tensor([1.0]), 1j)),
        (TypeError, lambda: f(ms.tensor([1.0]), ms.tensor([1.0], dtype="float32"))),
    )
    return [
        Row(f"{name}{a}{b}", f, reference, (left(*a), right(*b)), (getattr(ops, name),), errors)
        for a, b in shapes
    ]


def reduction(name, inputs, reference=None, shape=(3, 4, 2)):
    f, reference = getattr(ms, name), reference or getattr(np, name)
    uses = (getattr(ops, name),)
    choices = [{}, {"axis": 1}, {"axis": -1, "keepdims": True}, {"axis": (0, 2)}]
    errors = ((ValueError, lambda: f(ms.tensor([1.0]), axis=3)),)  # AxisError is a ValueError

    def bind(g, kwargs):
        return lambda x: g(x, **kwargs)

    return [
        Row(f"{name}{k}", bind(f, k), bind(reference, k), (inputs(*shape),), uses, errors)
        for k in choices
    ]


def transposed(S, t):
    return S.T if t else S


def product(a, b, p, q, t):
    return ms.SparseTensor(p, a) @ transposed(ms.SparseTensor(q, b), t)


def product_reference(a, b, p, q, t):
    masks = p.to_mask(), q.to_mask().T if t else q.to_mask()
    return (dense(a, p) @ (dense(b, q).T if t else dense(b, q)))[
        (masks[0].astype(int) @ masks[1]) > 0
    ]


def over_rows(f, v, p, t):
    """Apply f to the stored entries of each row; join what it gives."""
    values, mask = (dense(v, p).T, p.to_mask().T) if t else (dense(v, p), p.to_mask())
    parts = [f(row[there]) for row, there in zip(values, mask, strict=True)]
    return np.concatenate([np.zeros(0), *parts])


def softmax_reference(x, axis=-1):
    return scipy.special.softmax(x, axis=axis)


TABLE: list[Row] = [
    *binary("add", normal, normal),
    *binary("subtract", normal, normal),
    *binary("multiply", normal, normal),
    *binary("divide", normal, positive),
    *binary("power", positive, normal),
    *binary("maximum", apart, lambda *s: np.full(s, 0.033)),
    *binary("minimum", apart, lambda *s: np.full(s, 0.033)),
    *unary("negative", normal),
    *unary("absolute", apart),
    *unary("sign", apart),
    *unary("exp", normal),
    *unary("expm1", normal),
    *unary("log", positive),
    *unary("log1p", positive),
    *unary("sqrt", positive),
    *unary("square", normal),
    *unary("sin", normal),
    *unary("cos", normal),
    *unary("tan", lambda *s: RNG.uniform(-1, 1, s)),
    *unary("arctan", normal),
    *unary("tanh", normal),
    *unary("sigmoid", normal, reference=scipy.special.expit),
    *unary("softplus", normal, reference=lambda x: np.log1p(np.exp(x))),
    *unary("relu", apart, reference=lambda x: x * (x > 0)),
    *unary("leaky_relu", apart, reference=lambda x: np.where(x > 0, x, 0.01 * x)),
    *unary("erf", normal, reference=scipy.special.erf),
    *unary("gelu", normal, reference=lambda x: x * scipy.special.ndtr(x)),
    Row(
        "power(2)",
        lambda x: x**2,
        lambda x: x**2,
        (np.array([0.0, -1.5, 2.0]),),
        (ops.power,),
    ),
    Row(
        "power at 0, 1 and 2",
        ms.power,
        np.power,
        (positive(4), np.array([0.0, 1.0, 2.0, -0.0])),
        (ops.power,),
        order=3,
    ),
    Row(
        "clip",
        lambda x: ms.clip(x, -0.55, 1.05),
        lambda x: np.clip(x, -0.55, 1.05),
        (apart(4, 5),),
        (ops.clip,),
        ((TypeError, lambda: ms.clip(ms.tensor([1.0]), ms.tensor(0.0), 1.0)),),
    ),
    Row("clip(min)", lambda x: ms.clip(x, a_min=0), lambda x: np.clip(x, 0, None), (apart(9),), ()),
    Row(
        "where",
        lambda x, y: ms.where([[True], [False]], x, y),
        lambda x, y: np.where([[True], [False]], x, y),
        (normal(3), normal(2, 3)),
        (ops.elementwise._where,),
        ((ValueError, lambda: ms.where([True, False], ms.tensor([1.0, 2.0, 3.0]), 0)),),
    ),
    *reduction("sum", normal),
    *reduction("mean", normal),
    *reduction("var", normal),
    *reduction("std", normal),
    *reduction("max", apart),
    *reduction("min", apart),
    *reduction("logsumexp", normal, scipy.special.logsumexp),
    *reduction("norm", normal, lambda x, **k: np.sqrt(np.sum(x * x, **k))),
    Row(
        "var(ddof)",
        lambda x: ms.var(x, ddof=1),
        lambda x: np.var(x, ddof=1),
        (normal(5),),
        (),
    ),
    Row(
        "norm(vector)",
        lambda x: ms.norm(x, ord=2),
        lambda x: np.linalg.norm(x, ord=2),
        (normal(5),),
        (),
        ((ValueError, lambda: ms.norm(ms.tensor([[1.0]]), ord=1)),),
    ),
    Row(
        "softmax",
        ms.softmax,
        softmax_reference,
        (normal(3, 4),),
        (ops.softmax,),
    ),
    Row(
        "softmax(axis)",
        lambda x: ms.softmax(x, axis=0),
        lambda x: softmax_reference(x, 0),
        (normal(3, 4),),
        (),
    ),
    Row(
        "log_softmax",
        ms.log_softmax,
        lambda x: scipy.special.log_softmax(x, axis=-1),
        (normal(3, 4),),
        (ops.log_softmax,),
    ),
    *(
        Row(
            f"matmul{a}{b}",
            ms.matmul,
            np.matmul,
            (normal(*a), normal(*b)),
            (ops.matmul,),
            ((ValueError, lambda: ms.matmul(ms.tensor([1.0]), np.ones(2))),),
        )
        for a, b in [
            ((3, 4), (4, 2)),
            ((4,), (4, 2)),
            ((3, 4), (4,)),
            ((4,), (4,)),
            ((2, 3, 4), (4, 2)),
            ((3, 4), (2, 4, 2)),
            ((2, 1, 3, 4), (5, 4, 2)),
            ((4,), (2, 4, 3)),
            ((2, 3, 4), (4,)),
            ((0, 4), (4, 2)),
            ((3, 0), (0, 2)),
        ]
    ),
    *(
        Row(f"dot{a}{b}", ms.dot, np.dot, (normal(*a), normal(*b)), (ops.matmul,))
        for a, b in [
            ((), (3,)),
            ((2, 3), (3,)),
            ((2, 3), (4, 3, 2)),
            ((3,), (2, 3, 2)),
            ((2, 0), (3, 0, 2)),
        ]
    ),
    Row(
        "reshape",
        lambda x: x.reshape(3, -1),
        lambda x: x.reshape(3, -1),
        (normal(2, 6),),
        (ops.reshape,),
        ((ValueError, lambda: ms.reshape(ms.tensor([1.0]), (2,))),),
    ),
    Row("ravel", ms.ravel, np.ravel, (normal(2, 3),), ()),
    Row(
        "squeeze",
        lambda x: ms.squeeze(x, 1),
        lambda x: np.squeeze(x, 1),
        (normal(2, 1, 3),),
        (),
        ((ValueError, lambda: ms.squeeze(ms.tensor([1.0, 2.0]), 0)),),
    ),
    Row("expand_dims", lambda x: ms.expand_dims(x, 1), lambda x: x[:, None], (normal(2, 3),), ()),
    Row("transpose", ms.transpose, np.transpose, (normal(2, 3, 4),), (ops.transpose,)),
    Row(
        "transpose(axes)",
        lambda x: ms.transpose(x, (1, -1, 0)),
        lambda x: np.transpose(x, (1, -1, 0)),
        (normal(2, 3, 4),),
        (),
        ((ValueError, lambda: ms.transpose(ms.tensor([[1.0]]), (0, 0))),),
    ),
    Row(
        "broadcast_to",
        lambda x: ms.broadcast_to(x, (4, 2, 3)),
        lambda x: np.broadcast_to(x, (4, 2, 3)),
        (normal(2, 1),),
        (ops.broadcast_to,),
        ((ValueError, lambda: ms.broadcast_to(ms.tensor([1.0, 2.0]), (3,))),),
    ),
    Row(
        "sum_to",
        lambda x: ops.shapes.sum_to(x, shape=(2, 1)),
        lambda x: x.sum(axis=(0, 2)).reshape(2, 1),
        (normal(4, 2, 3),),
        (ops.shapes.sum_to,),
    ),
    Row(
        "concatenate",
        lambda x, y: ms.concatenate([x, y, x], axis=-1),
        lambda x, y: np.concatenate([x, y, x], axis=-1),
        (normal(2, 3), normal(2, 1)),
        (ops.shapes._concatenate,),
        ((ValueError, lambda: ms.concatenate([ms.tensor([1.0]), ms.tensor([[1.0]])])),),
    ),
    Row(
        "concatenate(None)",
        lambda x, y: ms.concatenate([x, y], axis=None),
        lambda x, y: np.concatenate([x, y], axis=None),
        (normal(2, 3), normal(2)),
        (),
    ),
    Row(
        "stack",
        lambda x, y: ms.stack([x, y], axis=1),
        lambda x, y: np.stack([x, y], axis=1),
        (normal(2, 3), normal(2, 3)),
        (),
        ((ValueError, lambda: ms.stack([ms.tensor([1.0]), ms.tensor([1.0, 2.0])])),),
    ),
    Row(
        "split",
        lambda x: ms.split(x, [1, 3], axis=1),
        lambda x: np.split(x, [1, 3], axis=1),
        (normal(2, 5),),
        (),
        (
            (ValueError, lambda: ms.split(ms.tensor([1.0, 2.0, 3.0]), 2)),
            (TypeError, lambda: ms.split(ms.tensor([1.0, 2.0]), ms.tensor([1.0]))),
        ),
    ),
    Row("split(3)", lambda x: ms.split(x, 3), lambda x: np.split(x, 3), (normal(6, 2),), ()),
    *(
        Row(
            f"getitem[{key}]",
            lambda x, key=key: x[key],
            lambda x, key=key: x[key],
            (normal(4, 5),),
            (ops.shapes._getitem,),
            (
                (IndexError, lambda: ms.tensor([1.0])[3]),
                (TypeError, lambda: ms.tensor([1.0])[ms.tensor([1.0])]),
            ),
        )
        for key in (
            1,
            (slice(None, None, -2), 3),
            (Ellipsis, None, slice(1, 3)),
            [2, 0, 2],
            (np.array([[0, 1], [1, 1]]), np.array([2, 2])),
            np.arange(20).reshape(4, 5) % 3 == 0,
        )
    ),
    Row(
        "scatter",
        lambda x: ops.shapes.scatter(x, key=np.array([2, 0, 2]), shape=(4, 2)),
        lambda x: np.array([x[1], 0 * x[0], x[0] + x[2], 0 * x[0]]),
        (normal(3, 2),),
        (ops.shapes.scatter,),
    ),
    Row(
        "lookup",
        lambda x: ops.shapes.lookup(x, ids=np.array([[3, 0], [3, 3]]), sparse=True),
        lambda x: x[[[3, 0], [3, 3]]],
        (normal(4, 2),),
        (ops.shapes.lookup,),
    ),
    Row(
        "take",
        lambda x: ms.take(x, [[3, 0], [3, 3]], axis=1),
        lambda x: np.take(x, [[3, 0], [3, 3]], axis=1),
        (normal(2, 4),),
        (),
        (
            (TypeError, lambda: ms.take(ms.tensor([1.0]), [0.5])),
            (IndexError, lambda: ms.take(ms.tensor([1.0]), [1])),
        ),
    ),
    Row(
        "take(flat)",
        lambda x: ms.take(x, [3, 0]),
        lambda x: np.take(x, [3, 0]),
        (normal(2, 2),),
        (),
    ),
    Row(
        "take_along_axis",
        lambda x: ms.take_along_axis(x, np.array([[0], [2]]), axis=1),
        lambda x: np.take_along_axis(x, np.array([[0], [2]]), axis=1),
        (normal(2, 3),),
        (),
        ((ValueError, lambda: ms.take_along_axis(ms.tensor([1.0]), np.array([[0]]))),),
    ),
    Row(
        "index_add",
        lambda x, v: ms.index_add(x, [1, 1], v, axis=1),
        lambda x, v: np.stack([x[:, 0], x[:, 1] + v[:, 0] + v[:, 1]], axis=1),
        (normal(3, 2), normal(3, 2)),
        (),
        ((ValueError, lambda: ms.index_add(ms.tensor([1.0]), [0], [1.0, 2.0])),),
    ),
    Row(
        "astype",
        lambda x: x.astype(np.float64),
        lambda x: x,
        (normal(3),),
        (ops.shapes.astype,),
        ((TypeError, lambda: ms.tensor([1.0]).astype(np.float16)),),
    ),
    Row(
        "to",
        lambda x: ops.to(x, device="cpu", back="cpu"),
        lambda x: x,
        (normal(3),),
        (ops.to,),
        ((ValueError, lambda: ms.tensor([1.0]).to("tpu")),),
    ),
    # ---------------------------------------------------------------------- sparse with sparse
    *(
        Row(
            f"product of {left} and {right}{'T' * t}",
            lambda a, b, p=left, q=right, t=t: product(a, b, p, q, t),
            lambda a, b, p=left, q=right, t=t: product_reference(a, b, p, q, t),
            (normal(left.nnz), normal(right.nnz)),
            (algebra.spgemm, algebra._spgemm_dot),
            (
                (ValueError, lambda: P_TENSOR @ P_TENSOR),
                (ValueError, lambda: P_TENSOR @ sp.eye_array(5)),
                (TypeError, lambda: P_TENSOR @ P_TENSOR.T.astype(np.float32)),
            ),
            order=3,
        )
        for left, right, t in [
            (P, RIGHT, False),
            (P, OTHER, True),
            (TALL, ms.Pattern((2, 3), [0, 0, 2], [0, 2]), False),
            (EMPTY, ms.Pattern.dense((4, 2)), False),
        ]
    ),
    Row(
        "product with itself",
        lambda v: ms.SparseTensor(SQUARE, v) @ ms.SparseTensor(SQUARE, v),
        lambda v: product_reference(v, v, SQUARE, SQUARE, False),
        (normal(SQUARE.nnz),),
        (),
        order=3,
    ),
    *(
        Row(
            f"{f.__name__} of {p} and {q}",
            lambda a, b, p=p, q=q, f=f: f(ms.SparseTensor(p, a), ms.SparseTensor(q, b)),
            lambda a, b, p=p, q=q, f=f, both=both: f(dense(a, p), dense(b, q))[
                both(p.to_mask(), q.to_mask())
            ],
            (normal(p.nnz), normal(q.nnz)),
            (mss.gather, mss.segment_sum),
            (
                (ValueError, lambda f=f: f(P_TENSOR, P_TENSOR.T)),
                (TypeError, lambda f=f: f(P_TENSOR, P_TENSOR.astype(np.float32))),
                (TypeError, lambda f=f: f(P_TENSOR, "a")),
            ),
        )
        for f, both in [
            (operator.add, np.logical_or),
            (operator.sub, np.logical_or),
            (operator.mul, np.logical_and),
        ]
        for p, q in [(P, OTHER), (P, P), (EMPTY, ms.Pattern.dense((3, 4))), (EMPTY, EMPTY)]
    ),
    *(
        Row(
            f"scale {kwargs}",
            lambda v, r, c, keys=kwargs: ms.SparseTensor(P, v).scale(
                **{key: {"rows": r, "cols": c}[key] for key in keys}
            ),
            lambda v, r, c, keys=kwargs: (
                dense(v, P) * (r[:, None] if "rows" in keys else 1) * (c if "cols" in keys else 1)
            )[P.to_mask()],
            (normal(P.nnz), normal(5), normal(7)),
            (),
            (
                (ValueError, lambda: P_TENSOR.scale(rows=np.ones(7))),
                (ValueError, lambda: P_TENSOR.scale(cols=1.0)),
            ),
        )
        for kwargs in [("rows",), ("cols",), ("rows", "cols")]
    ),
    *(
        Row(
            f"rows [{rows}]",
            lambda v, rows=rows: ms.SparseTensor(P, v)[rows],
            lambda v, rows=rows: dense(v, P)[rows][P.to_mask()[rows]],
            (normal(P.nnz),),
            (),
            (
                (IndexError, lambda: P_TENSOR[[5]]),
                (TypeError, lambda: P_TENSOR[[True, False]]),
                (TypeError, lambda: P_TENSOR[[0.5]]),
                (TypeError, lambda: P_TENSOR[0]),
                (TypeError, lambda: P_TENSOR[0, 1]),
                (TypeError, lambda: P_TENSOR[ms.tensor([1.0])]),
            ),
        )
        for rows in ([3, 0, 3, -1], slice(None, None, -2), np.arange(5) % 2 == 0, np.zeros(0, int))
    ),
    *(
        Row(
            f"sum({axis})",
            lambda v, axis=axis: ms.SparseTensor(P, v).sum(axis=axis),
            lambda v, axis=axis: dense(v, P).sum(axis=axis),
            (normal(P.nnz),),
            (),
            ((ValueError, lambda: P_TENSOR.sum(axis=2)),),
        )
        for axis in (None, 0, 1, -1, -2)
    ),
    *(
        Row(
            f"{name} of {p}{'T' * t}",
            lambda v, name=name, p=p, t=t: getattr(transposed(ms.SparseTensor(p, v), t), name)(),
            lambda v, f=f, p=p, t=t: over_rows(f, v, p, t),
            (apart(p.nnz),),
            uses,
            order=3 if "soft" in name else 2,
        )
        for name, f, uses in [
            ("row_mean", lambda r: [r.mean() if len(r) else 0.0], ()),
            ("row_max", lambda r: [r.max(initial=-np.inf)], (algebra._row_max,)),
            (
                "row_logsumexp",
                lambda r: [scipy.special.logsumexp(r) if len(r) else -np.inf],
                (algebra._row_logsumexp,),
            ),
            (
                "row_softmax",
                lambda r: scipy.special.softmax(r) if len(r) else r,
                (algebra._row_softmax,),
            ),
        ]
        # Of an empty row these are -inf, which has no differences.
        for p in ((FULL,) if name in ("row_max", "row_logsumexp") else (P, TALL, EMPTY))
        for t in (False, True)
    ),
    *(
        Row(
            f"diagonal of {p}",
            lambda v, p=p: ms.SparseTensor(p, v).diagonal(),
            lambda v, p=p: np.diagonal(dense(v, p)),
            (normal(p.nnz),),
            (),
        )
        for p in (P, TALL, SQUARE, EMPTY)
    ),
    Row(
        "block",
        lambda a, b, d: ms.block(
            [
                [ms.SparseTensor(P, a), None, sp.eye_array(5, 3)],
                [None, d, ms.SparseTensor(TALL, b).T],
            ]
        ),
        lambda a, b, d: np.block(
            [
                [dense(a, P), np.zeros((5, 3)), np.eye(5, 3)],
                [np.zeros((2, 7)), d, dense(b, TALL).T],
            ]
        )[BLOCKED],
        (normal(P.nnz), normal(TALL.nnz), normal(2, 3)),
        (),
        (
            (ValueError, lambda: ms.block([[P_TENSOR, None], [None, None]])),
            (ValueError, lambda: ms.block([[P_TENSOR], [P_TENSOR.T]])),
            (ValueError, lambda: ms.block([[P_TENSOR, P_TENSOR], [None]])),
            (ValueError, lambda: ms.block([[np.ones(3)]])),
            (ValueError, lambda: ms.block([])),
            (TypeError, lambda: ms.block([[P_TENSOR, P_TENSOR.astype(np.float32)]])),
        ),
    ),
    Row(
        "block_diag",
        lambda a, d: ms.block_diag([ms.SparseTensor(P, a), d, sp.eye_array(2)]),
        lambda a, d: np.concatenate([a, d.ravel(), np.ones(2)]),
        (normal(P.nnz), normal(2, 3)),
        (),
        (
            (ValueError, lambda: ms.block_diag([])),
            (ValueError, lambda: ms.block_diag([P_TENSOR, None])),
        ),
    ),
    Row(
        "diag",
        lambda v: ms.diag(v) / 2,
        lambda v: v / 2,
        (normal(4),),
        (),
        ((ValueError, lambda: ms.diag([[1.0]])),),
    ),
    *(
        Row(
            f"spsolve{shape}{'T' * t}",
            lambda v, b, t=t: ms.spsolve(transposed(ms.SparseTensor(SQUARE, v), t), b),
            lambda v, b, t=t: np.linalg.solve(dense(v, SQUARE).T if t else dense(v, SQUARE), b),
            (positive(SQUARE.nnz) + 4 * (SQUARE.rows == SQUARE.indices), normal(5, *shape)),
            (linalg._spsolve,),
            (
                (ValueError, lambda: ms.spsolve(P_TENSOR, np.ones(5))),
                (ValueError, lambda: ms.spsolve(ms.diag([1.0, 2.0]), np.ones(3))),
                (ValueError, lambda: ms.spsolve(ms.diag([1.0, 2.0]), 1.0)),
                (np.linalg.LinAlgError, lambda: ms.spsolve(ms.diag([1.0, 0.0]), np.ones(2))),
                (TypeError, lambda: ms.spsolve(np.eye(2), np.ones(2))),
                (
                    TypeError,
                    lambda: ms.spsolve(ms.diag([1.0]), ms.tensor([1.0], dtype="float32")),
                ),
            ),
            order=3,
        )
        for shape in ((), (2,), (1,))
        for t in (False, True)
    ),
    # ------------------------------------------------------------------------- the sparse family
    *(
        Row(
            f"spmm{pattern}{x_shape}{'T' * t}",
            lambda v, x, p=pattern, t=t: mss.spmm(v, x, pattern=p, transpose=t),
            lambda v, x, p=pattern, t=t: (dense(v, p).T if t else dense(v, p)) @ x,
            (normal(pattern.nnz), normal(pattern.shape[not t], *x_shape)),
            (mss.spmm,),
            (
                (ValueError, lambda: P_TENSOR @ np.ones(6)),
                (ValueError, lambda: P_TENSOR @ np.ones((2, 6, 3))),
                (ValueError, lambda: np.ones(4) @ P_TENSOR),
                (ValueError, lambda: P_TENSOR @ 2.0),
                (TypeError, lambda: P_TENSOR @ ms.tensor(np.ones(7), dtype="float32")),
            ),
            order=3,
        )
        for pattern in (P, TALL, EMPTY)
        for x_shape in ((3,), (), (0,))
        for t in (False, True)
    ),
    *(
        Row(
            f"affine{pattern}{batch}",
            lambda v, x, b, p=pattern: mss.affine(v, x, b, pattern=p),
            lambda v, x, b, p=pattern: x @ dense(v, p).T + b,
            (
                normal(pattern.nnz),
                normal(*batch, pattern.shape[1]),
                normal(pattern.shape[0]),
            ),
            (mss.affine,),
            (
                (
                    ValueError,
                    lambda: mss.affine(P_TENSOR.values, np.ones(6), np.ones(5), pattern=P),
                ),
                (
                    ValueError,
                    lambda: mss.affine(P_TENSOR.values, np.ones((2, 2, 7)), np.ones(5), pattern=P),
                ),
                (
                    ValueError,
                    lambda: mss.affine(P_TENSOR.values, np.ones(7), np.ones(4), pattern=P),
                ),
                (ValueError, lambda: mss.affine(P_TENSOR.values, np.ones(7), 1.0, pattern=P)),
            ),
            order=3,
        )
        for pattern in (P, TALL, EMPTY)
        for batch in ((3,), (), (0,))
    ),
    *(
        Row(
            f"relu_affine{batch}",
            lambda v, x, b: mss.affine(v, x, b, pattern=P, relu=True),
            lambda v, x, b: np.maximum(x, 0) @ dense(v, P).T + b,
            (normal(P.nnz), normal(*batch, P.shape[1]), normal(P.shape[0])),
            (mss.affine,),
            order=3,
        )
        for batch in ((3,), (), (0,), (16,))
    ),
    *(
        Row(
            f"sddmm{pattern}{shape}",
            lambda u, v, p=pattern: ms.sddmm(u, v, p),
            lambda u, v, p=pattern: (np.outer(u, v) if u.ndim == 1 else u @ v.T)[p.to_mask()],
            (normal(pattern.shape[0], *shape), normal(pattern.shape[1], *shape)),
            (mss._sddmm,),
            (
                (ValueError, lambda: ms.sddmm(np.ones((4, 2)), np.ones((7, 2)), P)),
                (ValueError, lambda: ms.sddmm(np.ones((5, 2)), np.ones((7, 3)), P)),
                (ValueError, lambda: ms.sddmm(np.ones(5), np.ones((7, 3)), P)),
            ),
            order=3,
        )
        for pattern in (P, TALL, EMPTY)
        for shape in ((3,), (), (0,))
    ),
    Row(
        "cube of spmm",
        lambda v, x: mss.spmm(v, x, pattern=P) ** 3,
        lambda v, x: (dense(v, P) @ x) ** 3,
        (normal(P.nnz), normal(7, 2)),
        (),
        order=3,
    ),
    Row(
        "cube of sddmm",
        lambda u, v: mss._sddmm(u, v, pattern=TALL) ** 3,
        lambda u, v: (u @ v.T)[TALL.to_mask()] ** 3,
        (normal(3, 2), normal(2, 2)),
        (),
        order=3,
    ),
    Row(
        "gather",
        lambda x: mss.gather(x, index_map=MAP, base=np.asarray(BASE, x.dtype, like=raw(x))),
        lambda x: np.array([x[2], -0.0, x[0], x[0], x[3]]),
        (normal(4),),
        (mss.gather,),
        ((ValueError, lambda: mss.gather(np.ones(3), index_map=MAP)),),
    ),
    Row(
        "segment_sum",
        lambda x: mss.segment_sum(x, index_map=MAP),
        lambda x: np.array([x[2] + x[3], 0.0, x[0], x[4]]),
        (normal(5),),
        (mss.segment_sum,),
        ((ValueError, lambda: mss.segment_sum(np.ones(4), index_map=MAP)),),
    ),
    Row(
        "from_dense",
        lambda D: ms.SparseTensor.from_dense(D, P),
        lambda D: D[P.to_mask()],
        (normal(5, 7),),
        (mss.sample,),
        ((ValueError, lambda: ms.SparseTensor.from_dense(np.ones((7, 5)), P)),),
    ),
    Row(
        "to_dense",
        lambda v: ms.SparseTensor(P, v).to_dense(),
        lambda v: dense(v, P),
        (normal(P.nnz),),
        (mss.spread,),
        (
            (ValueError, lambda: ms.SparseTensor(P, [1.0])),
            (TypeError, lambda: ms.SparseTensor(3, [1.0])),
        ),
    ),
    *(
        Row(
            f"sparse times {shape}",
            lambda v, d: ms.SparseTensor(P, v) * d,
            lambda v, d: (dense(v, P) * d)[P.to_mask()],
            (normal(P.nnz), normal(*shape)),
            (),
            ((ValueError, lambda: P_TENSOR * np.ones(6)), (TypeError, lambda: P_TENSOR * "a")),
        )
        for shape in ((), (5, 7), (5, 1), (7,), (1, 1))
    ),
    *(
        Row(
            f"stacked {lead}",
            lambda v, x, y: [ms.SparseTensor(P, v) @ x, y @ ms.SparseTensor(P, v)],
            lambda v, x, y: [dense(v, P) @ x, y @ dense(v, P)],
            (normal(P.nnz), normal(*lead, 7, 2), normal(*lead, 3, 5)),
            (),
        )
        for lead in ((2,), (2, 3), (0,))
    ),
    Row(
        "transposed values",
        lambda v: ms.SparseTensor(P, v).T.values,
        lambda v: dense(v, P).T[P.to_mask().T],
        (normal(P.nnz),),
        (),
    ),
    Row(
        "from_coords",
        lambda v: ms.SparseTensor.from_coords([1, 0, 1], [0, 1, 0], v, (2, 3)),
        lambda v: np.array([v[1], v[0] + v[2]]),
        (normal(3),),
        (),
        (
            (ValueError, lambda: ms.SparseTensor.from_coords([2], [0], [1.0], (2, 3))),
            (ValueError, lambda: ms.SparseTensor.from_coords([-1], [0], [1.0], (2, 3))),
            (ValueError, lambda: ms.SparseTensor.from_coords([0], [0, 1], [1.0], (2, 3))),
        ),
    ),
]

BLOCKED = np.block(
    [
        [P.to_mask(), np.zeros((5, 3), bool), np.eye(5, 3, dtype=bool)],
        [np.zeros((2, 7), bool), np.ones((2, 3), bool), TALL.to_mask().T],
    ]
)
P_TENSOR = ms.SparseTensor(P, np.ones(P.nnz))
