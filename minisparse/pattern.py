"""Sparsity patterns: which entries of a matrix exist.  Immutable, shared, hashed by content."""

from __future__ import annotations

import hashlib
import math
import operator
import weakref
from functools import cached_property

import numpy as np
import scipy.sparse as sp

from . import kernels
from .engine import as_floats


class PatternMismatchError(ValueError):
    """Raised where two operands must have one pattern and have two."""


class Pattern:
    """The structure of a CSR matrix: its shape and the positions of its stored entries.

    Parameters
    ----------
    shape : (int, int)
        Rows and columns; either may be 0.
    indptr : array_like of int, shape (n_rows + 1,)
        Row i holds entries ``indptr[i]`` to ``indptr[i + 1]``.
    indices : array_like of int, shape (nnz,)
        The column of each entry, strictly increasing within a row.

    Attributes
    ----------
    shape : (int, int)
    nnz : int
    density : float
        ``nnz / (n_rows * n_cols)``, 0 for an empty shape.
    indptr, indices : ndarray of int32 (int64 where a number would not fit), read-only

    Raises
    ------
    ValueError
        If the arrays are not canonical CSR of that shape; :meth:`from_scipy` and
        :meth:`from_coords` bring other input into that form.
    TypeError
        If they do not hold integers.

    Notes
    -----
    What is derived from a pattern is derived at its first use and kept; patterns with equal content
    compare and hash equal; copying one gives the same object.

    Examples
    --------
    >>> import minisparse as ms
    >>> p = ms.Pattern((2, 3), [0, 2, 3], [0, 2, 1])
    >>> p
    Pattern(shape=(2, 3), nnz=3, density=50%)
    >>> p.fan_in
    array([2, 1], dtype=int32)
    >>> p.T.T is p
    True
    """

    shape: tuple[int, int]
    nnz: int
    indptr: np.ndarray
    indices: np.ndarray
    _origin: weakref.ref | None

    def __init__(self, shape, indptr, indices):
        shape = _as_shape(shape)
        indptr, indices = _as_integers(indptr, "indptr"), _as_integers(indices, "indices")
        _check_structure(shape, indptr, indices)
        if not _rises(indptr, indices):
            raise ValueError(
                "Pattern: columns must increase strictly within a row (no duplicates); "
                "Pattern.from_scipy sorts and merges"
            )
        self._set(shape, indptr, indices)

    def _set(self, shape, indptr, indices, origin=None):
        dtype = _index_dtype(*shape, len(indices))
        indptr, indices = (_frozen(a, dtype) for a in (indptr, indices))
        self.__dict__.update(
            shape=shape, nnz=len(indices), indptr=indptr, indices=indices, _origin=origin
        )

    @classmethod
    def _trusted(cls, shape, indptr, indices, origin=None):
        self = cls.__new__(cls)
        self._set(shape, indptr, indices, origin)
        return self

    def __setattr__(self, name, value):
        raise AttributeError(f"a Pattern is immutable: {name} cannot be set")

    # ------------------------------------------------------------------------------- builders

    @classmethod
    def from_scipy(cls, A):
        """Return the pattern of any SciPy sparse matrix or array; explicit zeros belong to it."""
        return canonical(A)[0]

    @classmethod
    def from_mask(cls, mask):
        """Return the pattern of the True entries of a 2-D boolean array."""
        mask = np.asarray(mask)
        if mask.dtype != bool or mask.ndim != 2:
            raise TypeError(
                f"from_mask: needs a 2-D boolean array, got {mask.ndim}-D of dtype {mask.dtype}"
            )
        return _from_flat(np.flatnonzero(mask), mask.shape)

    @classmethod
    def from_coords(cls, rows, cols, shape):
        """Return the pattern with entries at ``(rows[e], cols[e])`` in any order; equal merge.

        Raises
        ------
        ValueError
            If an index lies outside `shape`, or the lengths differ.
        """
        shape = _as_shape(shape)
        return _from_flat(_sorted_once(_flat(rows, cols, shape)), shape)

    @classmethod
    def diagonal(cls, n):
        """Return the pattern of an n × n diagonal matrix."""
        return cls.banded((n, n), 0, 0)

    @classmethod
    def banded(cls, shape, lower, upper):
        """Return the band with `lower` diagonals below and `upper` above the main one."""
        shape = _as_shape(shape)
        rows = np.arange(shape[0])
        starts, ends = rows - operator.index(lower), rows + operator.index(upper) + 1
        return _from_ranges(shape, np.clip(starts, 0, shape[1]), np.clip(ends, 0, shape[1]))

    @classmethod
    def tril(cls, n):
        """Return the pattern of an n × n lower triangular matrix, diagonal included."""
        return cls.banded((n, n), n, 0)

    @classmethod
    def dense(cls, shape):
        """Return the pattern in which every entry exists."""
        shape = _as_shape(shape)
        return _from_ranges(shape, np.zeros(shape[0], int), np.full(shape[0], shape[1]))

    @classmethod
    def random(cls, shape, *, density=None, fan_in=None, rng=None):
        """Draw a pattern uniformly at random.

        Parameters
        ----------
        shape : (int, int)
        density : float in [0, 1], optional
            Draw ``round(density * n_rows * n_cols)`` distinct entries of the whole matrix.
        fan_in : int, optional
            Draw exactly so many distinct columns in each row.  One of the two is needed.
        rng : None, int or numpy.random.Generator
            As :func:`numpy.random.default_rng`.

        Notes
        -----
        Time and memory in proportion to nnz, and never to the size of a matrix with few entries.

        Examples
        --------
        >>> import minisparse as ms
        >>> ms.Pattern.random((1000, 2000), fan_in=3, rng=0).nnz
        3000
        """
        shape = n_rows, n_cols = _as_shape(shape)
        if (density is None) == (fan_in is None):
            raise ValueError("Pattern.random: give either density or fan_in")
        rng = np.random.default_rng(rng)
        if fan_in is not None:
            fan_in = operator.index(fan_in)
            if not 0 <= fan_in <= n_cols:
                raise ValueError(f"Pattern.random: fan_in={fan_in} of {n_cols} columns")
            return _from_flat(_distinct(n_rows, n_cols, fan_in, rng), shape)
        if not 0 <= density <= 1:
            raise ValueError(f"Pattern.random: density={density} is not between 0 and 1")
        size = n_rows * n_cols
        return _from_flat(_distinct(1, size, round(density * size), rng), shape)

    @classmethod
    def block_diagonal(cls, patterns):
        """Return the pattern with `patterns` along the diagonal, nothing elsewhere."""
        patterns = list(patterns)
        shapes = np.array([p.shape for p in patterns], dtype=np.int64).reshape(-1, 2)
        entries = np.cumsum([0] + [p.nnz for p in patterns])
        columns = np.cumsum([0, *shapes[:, 1]])
        parts = list(zip(patterns, entries[:-1], columns[:-1], strict=True))
        indptr = [[0]] + [p.indptr[1:] + e for p, e, _ in parts]
        indices = [np.zeros(0, int)] + [p.indices + c for p, _, c in parts]
        shape = tuple(int(n) for n in shapes.sum(axis=0))
        return cls._trusted(shape, np.concatenate(indptr), np.concatenate(indices))

    @classmethod
    def local(cls, height, width, kernel):
        """Connect each pixel of a height × width image to the pixels of a window around it.

        Parameters
        ----------
        height, width : int
        kernel : int or (int, int)
            Rows and columns of the window; it is cut off at the border.  Pixel (r, c) is number
            ``r * width + c``.
        """
        sizes = (kernel, kernel) if np.ndim(kernel) == 0 else kernel
        height, width, k_rows, k_cols = map(operator.index, (height, width, *sizes))
        if min(height, width, k_rows, k_cols) < 0:
            raise ValueError("Pattern.local: sizes must not be negative")
        r = np.arange(height)[:, None] + np.arange(k_rows) - k_rows // 2
        c = np.arange(width)[:, None] + np.arange(k_cols) - k_cols // 2
        columns = r[:, None, :, None] * width + c[None, :, None, :]
        inside = ((r >= 0) & (r < height))[:, None, :, None] & ((c >= 0) & (c < width))[:, None, :]
        counts = np.count_nonzero(inside, axis=(2, 3)).ravel()
        n = height * width
        return cls._trusted((n, n), np.append(0, np.cumsum(counts)), columns[inside])

    # ----------------------------------------------------------------------- what is derived

    @property
    def density(self):
        return self.nnz / max(self.shape[0] * self.shape[1], 1)

    @cached_property
    def fan_in(self):
        """Number of entries in each row, shape (n_rows,)."""
        return _frozen(np.diff(self.indptr))

    @cached_property
    def fan_out(self):
        """Number of entries in each column, shape (n_cols,)."""
        counts = np.bincount(self.indices, minlength=self.shape[1])
        return _frozen(counts, self.indices.dtype)

    @cached_property
    def rows(self):
        """The row of each entry, shape (nnz,)."""
        return _frozen(np.repeat(np.arange(self.shape[0], dtype=self.indices.dtype), self.fan_in))

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits that stand for the content, the same on every machine."""
        h = hashlib.blake2b(repr(self.shape).encode(), digest_size=16)
        for array in (self.indptr, self.indices):
            h.update(array.astype(array.dtype.newbyteorder("<"), copy=False).data)
        return h.hexdigest()

    @property
    def T(self):
        """The transposed pattern; ``P.T.T is P``."""
        return self._source() or self._transposed

    def _source(self):
        """Return the pattern this one is the transpose of, if somebody still holds that."""
        return None if self._origin is None else self._origin()

    @cached_property
    def _transposed(self):
        indptr, indices, _ = self.by_column
        return Pattern._trusted(self.shape[::-1], indptr, indices, weakref.ref(self))

    @cached_property
    def by_column(self):
        """The entries in column order: (indptr, row of each, its number in row order)."""
        origin = self._source()
        if origin is not None:
            perm = np.empty_like(self.indices)
            perm[origin.by_column[2]] = np.arange(self.nnz, dtype=perm.dtype)
            return origin.indptr, origin.indices, _frozen(perm)
        numbers = np.arange(self.nnz, dtype=self.indices.dtype)
        A = sp.csr_array((numbers, self.indices, self.indptr), shape=self.shape).tocsc()
        return tuple(_frozen(a, numbers.dtype) for a in (A.indptr, A.indices, A.data))

    @cached_property
    def plan(self):
        """What the kernels need to multiply by a matrix of this pattern."""
        return kernels.Plan(self.indptr, self.indices, self.shape[1])

    @cached_property
    def plan_T(self):
        """What the kernels need to multiply by its transpose, with values in row order."""
        indptr, indices, perm = self.by_column
        return kernels.Plan(indptr, indices, self.shape[0], perm)

    @cached_property
    def map_T(self):
        """The map that brings values in row order into column order."""
        return IndexMap(self.by_column[2], self.nnz)

    def find(self, other) -> np.ndarray:
        """Return the number here of each entry of `other`, -1 where it is absent.

        Costs O(nnz log nnz) and is not kept.
        """
        if other.shape != self.shape:
            raise ValueError(f"patterns of shapes {self.shape} and {other.shape}")
        if other is self:
            return np.arange(self.nnz)
        here, there = (_flat(p.rows, p.indices, p.shape) for p in (self, other))
        if not self.nnz:
            return np.full(other.nnz, -1)
        at = np.minimum(np.searchsorted(here, there), self.nnz - 1)
        return np.where(here[at] == there, at, -1)

    # ----------------------------------------------------------------------------- as other things

    def to_scipy(self, values=None):
        """Return a new ``scipy.sparse.csr_array`` with `values`, or ones."""
        values = np.ones(self.nnz) if values is None else np.array(values)
        if values.shape != (self.nnz,):
            raise ValueError(f"to_scipy: values of shape {values.shape}, needs ({self.nnz},)")
        arrays = (values, self.indices.copy(), self.indptr.copy())
        return sp.csr_array(arrays, shape=self.shape)

    def to_mask(self):
        """Return a dense boolean array of the pattern's shape, True at its entries."""
        mask = np.zeros(self.shape, dtype=bool)
        mask[self.rows, self.indices] = True
        return mask

    def spy(self, ax=None):
        """Draw the pattern (with matplotlib) and return the axes.

        Large patterns are drawn as the density of entries in at most 400 × 400 cells.
        """
        if ax is None:
            import matplotlib.pyplot as plt

            ax = plt.gca()
        n_rows, n_cols = self.shape
        bins = max(min(n_rows, 400), 1), max(min(n_cols, 400), 1)
        r = self.rows.astype(np.int64) * bins[0] // max(n_rows, 1)
        c = self.indices.astype(np.int64) * bins[1] // max(n_cols, 1)
        counts = np.bincount(r * bins[1] + c, minlength=bins[0] * bins[1]).reshape(bins)
        extent = (-0.5, n_cols - 0.5, n_rows - 0.5, -0.5)
        ax.imshow(counts, cmap="Greys", extent=extent, aspect="auto", interpolation="nearest")
        ax.set_title(f"{n_rows} × {n_cols}, {self.nnz} stored ({self.density:.3g})")
        return ax

    def __eq__(self, other):
        if not isinstance(other, Pattern):
            return NotImplemented
        return self is other or (
            self.shape == other.shape
            and self.nnz == other.nnz
            and np.array_equal(self.indptr, other.indptr)
            and np.array_equal(self.indices, other.indices)
        )

    def __hash__(self):
        return hash(self.digest)

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return Pattern, (self.shape, self.indptr, self.indices)

    def __repr__(self):
        return f"Pattern(shape={self.shape}, nnz={self.nnz}, density={100 * self.density:.3g}%)"


class IndexMap:
    """Where each number of one vector comes from in another: the structure of gather.

    Parameters
    ----------
    index : ndarray of int, shape (n,)
        Position in the source; -1 where there is none.
    n_source : int

    Notes
    -----
    Its adjoint, the segment sum, needs the positions of each source number: derived once, O(n).
    """

    def __init__(self, index, n_source):
        self.index = _frozen(index, _index_dtype(n_source, len(index)))
        self.n_source = n_source

    @cached_property
    def segments(self):
        """For each source number, where it went: (indptr, positions), in increasing order."""
        order = np.argsort(self.index, kind="stable")
        absent = np.searchsorted(self.index[order], 0)
        counts = np.bincount(self.index[order[absent:]], minlength=self.n_source)
        indptr = np.append(0, np.cumsum(counts))
        return _frozen(indptr, self.index.dtype), _frozen(order[absent:], self.index.dtype)


# ------------------------------------------------------------------------- checking and building


def canonical(A):
    """Bring a SciPy matrix to canonical CSR without touching it.

    Returns
    -------
    pattern : Pattern
    data : ndarray of shape (nnz,)
        float32 or float64, a copy; entries given twice have been added.
    as_given : bool
        Whether `A` was canonical CSR already, so that its own order of entries is ours.
    """
    if not sp.issparse(A):
        raise TypeError(f"needs a SciPy sparse matrix or array, got {type(A).__name__}")
    if A.ndim != 2:
        raise ValueError(f"needs a sparse matrix of two dimensions, got {A.ndim}")
    # SciPy's conversions trust what the user may have changed since, and its own checks mend it.
    if A.format == "coo":
        rows, columns = A.coords
        _flat(rows, columns, A.shape)
    elif A.format in ("csr", "csc", "bsr"):
        rows, columns = A.blocksize if A.format == "bsr" else (1, 1)
        blocks = A.shape[0] // rows, A.shape[1] // columns
        end = A.indptr[-1] if len(A.indptr) else 0
        swapped = A.format == "csc"
        _check_structure(blocks[::-1] if swapped else blocks, A.indptr, A.indices[:end])
        if len(A.data) < end:
            raise ValueError(f"Pattern: {len(A.data)} values for {end} entries")
    B = A.tocsr()
    indptr, indices, data = B.indptr, B.indices[: B.indptr[-1]], B.data[: B.indptr[-1]]
    data = as_floats(data, what=f"a sparse matrix of dtype {B.dtype}")
    as_given = A.format == "csr" and _rises(indptr, indices)
    if not _rises(indptr, indices):
        # A new object: SciPy's flags on the caller's may be stale, and his arrays stay his.
        C = sp.csr_array((data, indices.copy(), indptr.copy()), shape=B.shape)
        C.sum_duplicates()
        indptr, indices, data = C.indptr, C.indices, C.data
    shape = (int(B.shape[0]), int(B.shape[1]))
    return Pattern._trusted(shape, indptr.copy(), indices.copy()), data, as_given


def _as_shape(shape):
    try:
        n_rows, n_cols = map(operator.index, shape)
    except (TypeError, ValueError):
        raise TypeError(f"a shape is a pair of integers, got {shape!r}") from None
    if n_rows < 0 or n_cols < 0:
        raise ValueError(f"a shape is not negative, got {shape!r}")
    return n_rows, n_cols


def _as_integers(array, name):
    array = np.array(array)  # a copy: it is going to be frozen
    if array.ndim != 1:
        raise ValueError(f"Pattern: {name} must be a vector, got {array.ndim} dimensions")
    if array.dtype.kind not in "iu":
        if array.size:
            raise TypeError(f"Pattern: {name} must hold integers, got dtype {array.dtype}")
        array = array.astype(np.int64)
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"Pattern: {name} holds {array.max()}, too large for an index")
    return array.astype(np.int64, copy=False) if array.dtype.kind == "u" else array


def _check_structure(shape, indptr, indices):
    """Refuse what a kernel could read out of bounds with."""
    n_rows, n_cols = shape
    if indptr.dtype.kind not in "iu" or indices.dtype.kind not in "iu":
        raise TypeError(f"Pattern: structure of dtypes {indptr.dtype} and {indices.dtype}")
    if len(indptr) != n_rows + 1:
        raise ValueError(f"Pattern: indptr has {len(indptr)} entries, {n_rows} rows need one more")
    if indptr[0] != 0:
        raise ValueError(f"Pattern: indptr starts at {indptr[0]}, not at 0")
    if np.any(indptr[1:] < indptr[:-1]):
        raise ValueError("Pattern: indptr decreases")
    if indptr[-1] != len(indices):
        raise ValueError(f"Pattern: indptr ends at {indptr[-1]}, there are {len(indices)} entries")
    if len(indices) and not (indices.min() >= 0 and indices.max() < n_cols):
        raise ValueError(
            f"Pattern: columns from {indices.min()} to {indices.max()}, there are {n_cols}"
        )


def _rises(indptr, indices):
    """Tell whether columns increase strictly within every row."""
    rises = indices[1:] > indices[:-1]
    starts = indptr[1:-1]
    rises[starts[(starts > 0) & (starts < len(indices))] - 1] = True
    return bool(rises.all())


def _index_dtype(*sizes):
    return np.int32 if max(sizes) <= np.iinfo(np.int32).max else np.int64


def _frozen(array, dtype=None):
    """Return an index array in C order that nobody can make writable again."""
    array = np.ascontiguousarray(array, dtype=dtype)
    return np.asarray(memoryview(array).toreadonly())


def _flat(rows, cols, shape):
    """Number the cells of a matrix row by row, after checking them."""
    rows, cols = (_as_integers(a, name) for a, name in ((rows, "rows"), (cols, "cols")))
    if len(rows) != len(cols):
        raise ValueError(f"{len(rows)} rows and {len(cols)} columns: as many of each are needed")
    for name, array, n in (("row", rows, shape[0]), ("column", cols, shape[1])):
        if len(array) and not (array.min() >= 0 and array.max() < n):
            raise ValueError(
                f"{name} indices from {array.min()} to {array.max()}, the shape is {tuple(shape)}"
            )
    if math.prod(shape) > np.iinfo(np.int64).max:
        raise ValueError(f"a shape of {shape} has too many cells to number")
    return rows.astype(np.int64, copy=False) * shape[1] + cols


def _from_flat(flat, shape):
    """Build a pattern from sorted, distinct cell numbers."""
    indptr = np.searchsorted(flat, np.arange(shape[0] + 1, dtype=np.int64) * shape[1])
    columns = flat % max(shape[1], 1)
    return Pattern._trusted(tuple(shape), indptr, columns)


def _from_ranges(shape, starts, ends):
    """Build a pattern whose row i holds the columns ``range(starts[i], ends[i])``."""
    counts = np.maximum(ends - starts, 0)
    indptr = np.append(0, np.cumsum(counts))
    columns = np.arange(indptr[-1]) - np.repeat(indptr[:-1] - starts, counts)
    return Pattern._trusted(shape, indptr, columns)


def _sorted_once(cells):
    """Sort and drop what is there twice: :func:`numpy.unique`, which takes ten times as long."""
    cells.sort()
    return cells[np.append(True, cells[1:] != cells[:-1])[: len(cells)]]


def _distinct(n_rows, n_cols, n, rng):
    """Draw n distinct columns in each row; return sorted cell numbers."""
    bases = np.arange(n_rows, dtype=np.int64)[:, None] * n_cols
    if 16 * n > n_cols:  # the n smallest of as many numbers as there are columns
        some = max(1, (1 << 20) // max(n_cols, 1))
        parts = [
            np.sort(np.argsort(rng.random((len(part), n_cols)), axis=1)[:, :n] + part, axis=1)
            for part in (bases[i : i + some] for i in range(0, n_rows, some))
        ]
        return np.concatenate([np.zeros(0, np.int64), *(part.ravel() for part in parts)])
    cells, missing = np.zeros(0, np.int64), np.full(n_rows, n)
    while missing.any():  # few are drawn twice, and drawn again
        new = np.repeat(bases[:, 0], missing)
        new = _sorted_once(new + rng.integers(n_cols, size=len(new)))
        at = np.searchsorted(cells, new)
        known = np.append(cells, -1)[at] == new
        cells = np.insert(cells, at[~known], new[~known])
        missing -= np.bincount(new[~known] // n_cols, minlength=n_rows)
    return cells
