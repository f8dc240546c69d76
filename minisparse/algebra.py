"""Sparse with sparse: sums, products, scaling, selection, assembly, and what rows hold.

The structure of each result follows from the patterns alone: it is worked out once for the patterns
that meet, kept while they live, and a training step is arithmetic on values.  A result holds every
entry that its operands can give it, also one whose value comes out as zero.
"""

import numpy as np
import scipy.sparse as sp

from . import kernels, ops
from .engine import Tensor, primitive, raw, require, tensor
from .ops.shapes import indices_of
from .pattern import IndexMap, Pattern, once
from .sparse import SparseTensor, as_sparse, gather, segment_sum

# ---------------------------------------------------------------------- union and intersection


@once
def _union(p, q):
    both = p.to_scipy() + q.to_scipy(np.full(q.nnz, 1j))  # the real parts are p's, the others q's
    pattern = Pattern._trusted(p.shape, both.indptr, both.indices)
    places = np.append(np.flatnonzero(both.data.real > 0), np.flatnonzero(both.data.imag > 0))
    return pattern, IndexMap(places, pattern.nnz)


def _sum(x, y):
    pattern, places = _union(x.pattern, y.pattern)
    both = ops.concatenate([x.values, y.values])
    return SparseTensor(pattern, segment_sum(both, index_map=places))


@once
def _intersection(p, q):
    at = q.find(p)
    both = np.flatnonzero(at >= 0)
    pattern = Pattern.from_coords(p.rows[both], p.indices[both], p.shape)
    return pattern, IndexMap(both, p.nnz), IndexMap(at[both], q.nnz)


def _common(x, y):
    pattern, map_x, map_y = _intersection(x.pattern, y.pattern)
    values = gather(x.values, index_map=map_x) * gather(y.values, index_map=map_y)
    return SparseTensor(pattern, values)


def _elementwise(function, merged):
    """Make an operator of two sparse operands: `function` of their values, entry by entry.

    Where their patterns differ, it is `merged`.
    """

    def operator(x, y):
        x, y = as_sparse(x, y), as_sparse(y, x)
        require(x.shape == y.shape, f"{function.__name__}: shapes {x.shape} and {y.shape} differ")
        if x.pattern == y.pattern:
            return x.with_values(function(x.values, y.values))
        return merged(x, y)

    return operator


_add = _elementwise(ops.add, _sum)
_multiply = _elementwise(ops.multiply, _common)

# ------------------------------------------------------------------------------ matrix product


@primitive
def spgemm(a, b, *, left, right, out):
    """Return the values of A B on the pattern `out`, where A has `a` on `left`, B `b` on `right`.

    Parameters
    ----------
    a, b : Tensor or ndarray of shape (nnz of left,), (nnz of right,)
    left, right : Pattern
    out : Pattern
        Holds all of the product.

    Notes
    -----
    Time O(number of pairs of entries that meet), memory O(nnz + threads · n_cols); that of each of
    its gradients is the same.
    """
    return kernels.spgemm(out.plan, left.plan, right.plan, a, b)


@spgemm.vjp(a=1, b=0)
def _(g, need, a, b, left, right, out):
    da = _spgemm_dot(g, b, left=out, right=right, out=left) if need[0] else None
    db = _spgemm_dot(g, a, left=out, right=left, out=right, transpose=True) if need[1] else None
    return da, db


@primitive
def _spgemm_dot(x, y, *, left, right, out, transpose=False):
    """Return the values of X Yᵀ on `out`, or of Yᵀ X if `transpose`: the gradients of a product.

    X has `x` on `left`, which holds every product of the pattern `out` with that of Y, `right`.
    """
    return kernels.spgemm_dot(out.plan, left.plan, right.plan, x, y, transpose)


@_spgemm_dot.vjp(x=1, y=0)
def _(g, need, x, y, left, right, out, transpose):
    dx = dy = None
    if need[0]:  # the product that has the pattern of X: G Y, or Y G
        a, b = ((y, right), (g, out)) if transpose else ((g, out), (y, right))
        dx = spgemm(a[0], b[0], left=a[1], right=b[1], out=left)
    if need[1]:
        dy = _spgemm_dot(x, g, left=left, right=out, out=right, transpose=not transpose)
    return dx, dy


@once
def _product(p, q):
    ones = [r.to_scipy(np.ones(r.nnz, dtype=bool)) for r in (p, q)]
    return Pattern.from_scipy(ones[0] @ ones[1])


def _matmul(x, y):
    x, y = as_sparse(x, y), as_sparse(y, x)
    p, q = x.pattern, y.pattern
    if p.shape[1] != q.shape[0]:
        raise ValueError(f"matmul: {p.shape} @ {q.shape}: {p.shape[1]} columns, {q.shape[0]} rows")
    out = _product(p, q)
    return SparseTensor(out, spgemm(x.values, y.values, left=p, right=q, out=out))


# ------------------------------------------------------------------------------ rows and columns


@primitive
def _row_max(values, *, pattern):
    """Return the largest of `values` in each row; ties share the gradient equally."""
    return kernels.row_max(pattern.plan, values)


@_row_max.vjp
def _(g, need, values, out, pattern):
    rows = pattern.map_rows
    hit = (raw(values) == gather(raw(out), index_map=rows)).astype(values.dtype)
    shares = hit / gather(np.maximum(segment_sum(hit, index_map=rows), 1), index_map=rows)
    return gather(g, index_map=rows) * shares


@primitive
def _row_softmax(values, *, pattern):
    """Return ``exp(values)`` divided by its sum in each row; never overflows."""
    return kernels.row_softmax(pattern.plan, values)


@_row_softmax.vjp
def _(g, need, out, pattern):
    weighted = g * out
    total = segment_sum(weighted, index_map=pattern.map_rows)
    return weighted - out * gather(total, index_map=pattern.map_rows)


@primitive
def _row_logsumexp(values, *, pattern):
    """Return ``log(sum(exp(values)))`` of each row; -inf where it is empty or all -inf."""
    top = kernels.row_max(pattern.plan, values)
    top[np.isinf(top)] = 0
    with np.errstate(divide="ignore", over="ignore"):  # log(0); exp beside an infinite entry
        e = np.exp(values - kernels.gather(top, pattern.map_rows.index))
        return np.log(kernels.segment_sum(e, *pattern.map_rows.segments)) + top


@_row_logsumexp.vjp
def _(g, need, values, out, pattern):
    finite = ops.where(raw(out) == -np.inf, 0.0, out)  # exp(-inf - 0) = 0: no weight, no gradient
    weights = ops.exp(values - gather(finite, index_map=pattern.map_rows))
    return gather(g, index_map=pattern.map_rows) * weights


def _select(pattern, rows):
    """Return the pattern of some rows, and the number of each of its entries in `pattern`."""
    counts = (pattern.indptr[rows + 1] - pattern.indptr[rows]).astype(np.int64)
    ends = np.cumsum(counts)
    entries = np.repeat(pattern.indptr[rows] - (ends - counts), counts) + np.arange(counts.sum())
    shape = len(rows), pattern.shape[1]
    return Pattern._trusted(shape, np.append(0, ends), pattern.indices[entries]), entries


class _Members(SparseTensor):
    """What a SparseTensor can do beyond products with dense factors; bound to it below."""

    def __add__(self, other):
        if not self._takes(other):
            return self if isinstance(other, int) and other == 0 else NotImplemented  # for sum()
        return _add(self, other)

    def __sub__(self, other):
        return _add(self, -as_sparse(other, self)) if self._takes(other) else NotImplemented

    def __rsub__(self, other):
        return _add(other, -self) if self._takes(other) else NotImplemented

    __radd__ = __add__
    _matmul, _multiply = _matmul, _multiply

    @staticmethod
    def _takes(other):
        if isinstance(other, (Tensor, np.ndarray)):
            raise TypeError("the sum of a sparse and a dense matrix is dense: S.to_dense() + D")
        return isinstance(other, SparseTensor) or sp.issparse(other)

    def __getitem__(self, rows):
        """Return some rows, in the order given, as a SparseTensor.

        Parameters
        ----------
        rows : integers (negative ones count from the end, repetitions are allowed), slice, or mask

        Notes
        -----
        O(entries selected + rows selected).
        """
        n, rows = self.shape[0], 0 if isinstance(rows, tuple) else rows
        chosen = np.arange(*rows.indices(n)) if isinstance(rows, slice) else raw(rows)
        if chosen.ndim != 1:
            raise TypeError("S[rows] takes a list of rows, a slice or a mask; S[[i]] gives one row")
        mask = chosen.dtype == bool and len(chosen) == n
        chosen = np.flatnonzero(chosen) if mask else indices_of(chosen, "S[rows]: rows", n, -n)
        chosen[chosen < 0] += n
        pattern, entries = _select(self.pattern, chosen)
        return SparseTensor(pattern, gather(self.values, index_map=IndexMap(entries, self.nnz)))

    def sum(self, axis=None):
        """Return the sum of the entries: of all, of each column (axis 0), of each row (axis 1)."""
        if axis is None:
            return ops.sum(self.values)
        if axis not in (0, 1, -1, -2):
            raise ValueError(f"sum: axis={axis!r} of a matrix; it is None, 0 or 1")
        index_map = self.pattern.map_rows if axis in (1, -1) else self.pattern.map_columns
        return segment_sum(self.values, index_map=index_map)

    def diagonal(self):
        """Return the entries (i, i) as a Tensor of shape (min(n_rows, n_cols),), 0 if absent."""
        return gather(self.values, index_map=self.pattern.map_diagonal)

    def row_mean(self):
        """Return the mean of the stored entries of each row, shape (n_rows,); 0 of none."""
        total, counts = self.sum(axis=1), np.maximum(self.pattern.fan_in, 1).astype(self.dtype)
        return total / np.asarray(counts, like=raw(total))

    def row_max(self):
        """Return the largest stored entry of each row, shape (n_rows,); -inf of none.

        Ties share the gradient equally.
        """
        return _row_max(self.values, pattern=self.pattern)

    def row_logsumexp(self):
        """Return ``log(sum(exp(entries)))`` of each row, shape (n_rows,); -inf of none."""
        return _row_logsumexp(self.values, pattern=self.pattern)

    def row_softmax(self):
        """Return ``exp(entry)`` divided by its sum over the stored entries of the row.

        Returns
        -------
        SparseTensor
            On the same pattern.

        Examples
        --------
        >>> import minisparse as ms
        >>> S = ms.SparseTensor(ms.Pattern((2, 3), [0, 2, 3], [0, 2, 1]), [1.0, 1.0, 5.0])
        >>> S.row_softmax().values
        tensor([0.5, 0.5, 1. ])
        """
        return self.with_values(_row_softmax(self.values, pattern=self.pattern))


for _name, _member in vars(_Members).items():
    if callable(_member):
        setattr(SparseTensor, _name, _member)

# ------------------------------------------------------------------------------------- assembly


@once
def _layout(n_columns, *patterns):
    """Return the pattern of a grid of blocks, and where its entries stand in their sequence."""
    blocks, total = [], 0
    for p in patterns:
        blocks.append(p and p.to_scipy(np.arange(total, total + p.nnz)))
        total += p.nnz if p else 0
    grid = [blocks[i : i + n_columns] for i in range(0, len(blocks), n_columns)]
    whole = sp.block_array(grid, format="csr")
    whole.sort_indices()
    return Pattern._trusted(whole.shape, whole.indptr, whole.indices), IndexMap(whole.data, total)


def _as_blocks(blocks, what):
    """Bring blocks to SparseTensors of one dtype: that of the first Tensor among them."""
    first = next((b for b in blocks if isinstance(b, (Tensor, SparseTensor))), None)

    def made(b):
        if b is None or isinstance(b, SparseTensor):
            return b
        b = b if isinstance(b, Tensor) or sp.issparse(b) else np.asarray(b)
        require(b.ndim == 2, f"{what}: a block of shape {b.shape} is not a matrix")
        if isinstance(b, Tensor):
            return SparseTensor(Pattern.dense(b.shape), ops.ravel(b))
        return as_sparse(sp.csr_array(b), first)

    return [made(b) for b in blocks]


def block(blocks):
    """Assemble a matrix from a grid of blocks, as :func:`scipy.sparse.block_array`.

    Parameters
    ----------
    blocks : list of lists
        Each row as long as the others, of SparseTensors, SciPy matrices, Tensors and arrays of two
        dimensions, and None for nothing.  Every entry of a Tensor belongs to the pattern; of an
        array those that are not zero.

    Returns
    -------
    SparseTensor
        Differentiable in the values of every block.

    Raises
    ------
    ValueError
        If the shapes do not fit, or a row or column of the grid holds only None.
    TypeError
        If Tensors differ in dtype.

    Notes
    -----
    The layout is worked out once for the patterns; a call costs O(nnz).  The result holds the
    values of that moment: assemble it anew in each step of a training loop.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> import minisparse as ms
    >>> W = ms.SparseParameter(sp.csr_array([[2.0, 0.0], [0.0, 3.0]]))
    >>> ms.block([[None, -0.2 * sp.eye_array(2)], [W, None]]).to_scipy().toarray()
    array([[ 0. ,  0. , -0.2,  0. ],
           [ 0. ,  0. ,  0. , -0.2],
           [ 2. ,  0. ,  0. ,  0. ],
           [ 0. ,  3. ,  0. ,  0. ]])
    """
    grid = [list(row) for row in blocks]
    widths, lines = {len(row) for row in grid}, (*grid, *zip(*grid, strict=False))
    if len(widths) != 1 or any(all(b is None for b in line) for line in lines):
        raise ValueError("block: needs rows as long as one another, none and no column all None")
    flat = _as_blocks([b for row in grid for b in row], "block")
    pattern, index_map = _layout(widths.pop(), *(b and b.pattern for b in flat))
    values = ops.concatenate([b.values for b in flat if b is not None])
    return SparseTensor(pattern, gather(values, index_map=index_map))


def block_diag(blocks):
    """Put blocks along the diagonal, and nothing elsewhere.

    Parameters
    ----------
    blocks : sequence of SparseTensors, SciPy matrices, Tensors or arrays of two dimensions

    Returns
    -------
    SparseTensor

    Raises
    ------
    ValueError
        If there is no block.

    Notes
    -----
    O(nnz): a batch of graphs is one sparse matrix.

    Examples
    --------
    >>> import minisparse as ms
    >>> ms.block_diag([[[1.0, 2.0]], [[3.0]]]).to_scipy().toarray()
    array([[1., 2., 0.],
           [0., 0., 3.]])
    """
    blocks = _as_blocks(list(blocks), "block_diag")
    require(blocks and None not in blocks, "block_diag: needs a list of matrices")
    pattern = Pattern.block_diagonal([b.pattern for b in blocks])
    return SparseTensor(pattern, ops.concatenate([b.values for b in blocks]))


def diag(vector):
    """Return the square matrix with a vector on its diagonal, and nothing elsewhere.

    Parameters
    ----------
    vector : Tensor or array_like of shape (n,)

    Returns
    -------
    SparseTensor
        Of shape (n, n), with n entries.

    Examples
    --------
    >>> import minisparse as ms
    >>> ms.diag([1.0, 2.0]) @ [3.0, 4.0]
    tensor([3., 8.])
    """
    vector = vector if isinstance(vector, Tensor) else tensor(vector)
    require(vector.ndim == 1, f"diag: needs a vector, got shape {vector.shape}")
    return SparseTensor(Pattern.diagonal(len(vector)), vector)
