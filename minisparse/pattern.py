"""Sparsity patterns: which entries of a matrix exist.  Immutable, shared, hashed by content."""

import contextlib
import functools
import hashlib
import operator
import weakref

import numpy as np
import scipy.sparse as sp

from . import kernels
from .engine import as_floats, require


class cached_property(functools.cached_property):  # noqa: N801 - as the one of Python
    """Without Python 3.11's lock, which a fork may leave taken for ever."""

    lock = property(lambda self: contextlib.nullcontext(), lambda self, lock: None)


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
    _combined: dict
    # Of a transpose, a weak reference to what it is the transpose of.
    _origin = staticmethod(lambda: None)

    def __init__(self, shape, indptr, indices):
        shape = n_rows, n_cols = _as_shape(shape)
        indptr, indices = _as_indices(indptr, "indptr"), _as_indices(indices, "columns")
        _check_structure(n_rows, n_cols, indptr, indices)
        falls = np.flatnonzero(indices[1:] <= indices[:-1]) + 1
        if np.any(indptr[np.searchsorted(indptr, falls)] != falls):
            raise ValueError("Pattern: columns of a row must increase; from_scipy sorts and merges")
        vars(self).update(vars(Pattern._trusted(shape, indptr, indices)))

    @classmethod
    def _trusted(cls, shape, indptr, indices):
        self = cls.__new__(cls)
        dtype = _index_dtype(*shape, len(indices))
        indptr, indices = _frozen(indptr, dtype), _frozen(indices, dtype)
        parts = {"shape": shape, "nnz": len(indices), "indptr": indptr, "indices": indices}
        vars(self).update(parts, _combined={})  # what `once` derives from it and others
        return self

    def __setattr__(self, name, *value):
        raise AttributeError(f"a Pattern is immutable: {name} cannot be set or deleted")

    __delattr__ = __setattr__

    # ------------------------------------------------------------------------------- builders

    @classmethod
    def from_scipy(cls, A):
        """Return the pattern of any SciPy sparse matrix or array; explicit zeros belong to it."""
        return canonical(A)[0]

    @classmethod
    def from_mask(cls, mask):
        """Return the pattern of the True entries of a 2-D boolean array; a Pattern as it is."""
        if isinstance(mask, Pattern):
            return mask
        mask = np.asarray(mask)
        if mask.dtype != bool or mask.ndim != 2:
            raise TypeError(f"from_mask: needs a 2-D boolean array, got {mask.ndim}-D {mask.dtype}")
        return _from_flat(np.flatnonzero(mask), mask.shape)

    @classmethod
    def from_coords(cls, rows, cols, shape):
        """Return the pattern with entries at ``(rows[e], cols[e])`` in any order; equal merge.

        Raises
        ------
        ValueError
            If an index lies outside `shape`, or the lengths differ.
        """
        return _from_flat(_sorted_once(_flat(rows, cols, shape)), shape)

    @classmethod
    def diagonal(cls, n):
        """Return the pattern of an n × n diagonal matrix."""
        return cls.banded((n, n), 0, 0)

    @classmethod
    def banded(cls, shape, lower, upper):
        """Return the band with `lower` diagonals below and `upper` above the main one."""
        shape = n_rows, n_cols = _as_shape(shape)
        rows = np.arange(n_rows)
        lower, upper = (np.clip(operator.index(n), -max(shape), max(shape)) for n in (lower, upper))
        starts, ends = np.clip(rows - lower, 0, n_cols), np.clip(rows + upper + 1, 0, n_cols)
        counts = np.maximum(ends - starts, 0)
        indptr = np.append(0, np.cumsum(counts))
        columns = np.arange(indptr[-1]) - np.repeat(indptr[:-1] - starts, counts)
        return cls._trusted(shape, indptr, columns)

    @classmethod
    def tril(cls, n):
        """Return the pattern of an n × n lower triangular matrix, diagonal included."""
        return cls.banded((n, n), n, 0)

    @classmethod
    def dense(cls, shape):
        """Return the pattern in which every entry exists."""
        return cls.banded(shape, *_as_shape(shape))

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
        require((density is None) != (fan_in is None), "Pattern.random: either density or fan_in")
        key, given, most = ("density", density, 1) if fan_in is None else ("fan_in", fan_in, n_cols)
        require(0 <= given <= most, f"Pattern.random: {key}={given} is not between 0 and {most}")
        if fan_in is None:  # the whole matrix as one row
            n_rows, n_cols, fan_in = 1, n_rows * n_cols, round(density * n_rows * n_cols)
        cells = _distinct(n_rows, n_cols, operator.index(fan_in), np.random.default_rng(rng))
        return _from_flat(cells, shape)

    @classmethod
    def block_diagonal(cls, patterns):
        """Return the pattern with `patterns` along the diagonal, nothing elsewhere."""
        patterns = [cls((0, 0), [0], []), *patterns]  # SciPy's block_diag is confined to int32
        n_rows, n_cols, nnz = np.array([(*p.shape, p.nnz) for p in patterns]).T
        indptr = np.cumsum(np.concatenate([[0], *(p.fan_in for p in patterns)]))
        starts = np.repeat(np.cumsum(n_cols) - n_cols, nnz)
        indices = np.concatenate([p.indices for p in patterns]) + starts
        return cls._trusted(_as_shape((n_rows.sum(), n_cols.sum())), indptr, indices)

    @classmethod
    def local(cls, height, width, kernel):
        """Connect each pixel of a height × width image to the pixels of a window around it.

        Parameters
        ----------
        height, width : int
        kernel : int or (int, int)
            Rows and columns of the window; it is cut off at the border.  Pixel (r, c) is number
            ``r * width + c``.  A window of an even length k begins k / 2 before its pixel.
        """
        kernel = [operator.index(n) for n in np.broadcast_to(kernel, 2)]
        require(min(kernel) >= 0, f"Pattern.local: a window of {kernel} must not be negative")
        rows, columns = (
            cls.banded((n, n), k // 2, k - 1 - k // 2).to_scipy().astype(bool)
            for n, k in zip((height, width), kernel, strict=True)
        )
        return cls.from_scipy(sp.kron(rows, columns, format="csr"))

    # ----------------------------------------------------------------------- what is derived

    @property
    def density(self):
        """The share of the places that are stored, 0 of none."""
        return self.nnz / max(self.shape[0] * self.shape[1], 1)

    @cached_property
    def fan_in(self):
        """Number of entries in each row, shape (n_rows,)."""
        return _frozen(np.diff(self.indptr))

    @cached_property
    def fan_out(self):
        """Number of entries in each column, shape (n_cols,)."""
        return _frozen(np.bincount(self.indices, minlength=self.shape[1]), self.indices.dtype)

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
        return self._origin() or self._transposed

    @cached_property
    def _transposed(self):
        other = Pattern._trusted(self.shape[::-1], *self.by_column[:2])
        vars(other)["_origin"] = weakref.ref(self)
        return other

    @cached_property
    def by_column(self):
        """The entries in column order: (indptr, row of each, its number in row order)."""
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

    @cached_property
    def map_rows(self):
        """The map that brings a number for each row to the entries of that row."""
        return IndexMap(self.rows, self.shape[0], (self.indptr, np.arange(self.nnz)))

    @cached_property
    def map_columns(self):
        """The map that brings a number for each column to the entries of that column."""
        return IndexMap(self.indices, self.shape[1], self.by_column[::2])

    @cached_property
    def map_diagonal(self):
        """The map that brings the entries to the places (i, i)."""
        return IndexMap(self.find(Pattern.banded(self.shape, 0, 0)), self.nnz)

    def find(self, other) -> np.ndarray:
        """Return the number here of each entry of `other`, -1 where it is absent.

        Costs O(nnz log nnz) and is not kept.
        """
        if other.shape != self.shape:
            raise ValueError(f"find: patterns of shapes {self.shape} and {other.shape}")
        here, there = (_flat(p.rows, p.indices, p.shape) for p in (self, other))
        here = np.append(here, -1)  # stands after all of them, and equals none
        at = np.searchsorted(here[:-1], there)
        return np.where(here[at] == there, at, -1)

    # ----------------------------------------------------------------------------- as other things

    def to_scipy(self, values=None):
        """Return a new ``scipy.sparse.csr_array`` with `values`, or ones."""
        values = np.broadcast_to(1.0, self.nnz) if values is None else np.asarray(values)
        if values.shape != (self.nnz,):
            raise ValueError(f"to_scipy: values of shape {values.shape}, needs ({self.nnz},)")
        return sp.csr_array((values, self.indices, self.indptr), shape=self.shape, copy=True)

    def to_mask(self):
        """Return a dense boolean array of the pattern's shape, True at its entries."""
        return self.to_scipy(np.ones(self.nnz, dtype=bool)).toarray()

    def spy(self, ax=None):
        """Draw the pattern (with matplotlib) and return the axes.

        Large patterns are drawn as the density of entries in at most 400 × 400 cells.
        """
        import matplotlib.pyplot as plt

        ax = plt.gca() if ax is None else ax
        n_rows, n_cols = self.shape
        bins = [max(min(n, 400), 1) for n in self.shape]
        counts = np.histogram2d(self.rows, self.indices, bins, ((0, n_rows), (0, n_cols)))[0]
        extent = (-0.5, n_cols - 0.5, n_rows - 0.5, -0.5)
        ax.imshow(counts, cmap="Greys", extent=extent, aspect="auto", interpolation="nearest")
        ax.set_title(repr(self))
        return ax

    def __eq__(self, other):
        if not isinstance(other, Pattern):
            return NotImplemented
        return self is other or self.digest == other.digest

    def __hash__(self):
        return hash(self.digest)

    def __deepcopy__(self, memo=None):
        return self

    __copy__ = __deepcopy__

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
    segments : (indptr, positions), optional
        Where they are known already.

    Notes
    -----
    Its adjoint, the segment sum, needs the positions of each source number: derived once, O(n).
    """

    def __init__(self, index, n_source, segments=None):
        self.index = _frozen(index, _index_dtype(n_source, len(index)))
        self.n_source = n_source
        if segments:
            self.segments = tuple(_frozen(a, self.index.dtype) for a in segments)

    @cached_property
    def segments(self):
        """For each source number, where it went: (indptr, positions), in increasing order."""
        order = np.argsort(self.index, kind="stable")
        indptr = np.searchsorted(self.index[order], np.arange(self.n_source + 1))
        order = order[indptr[0] :]  # the absent ones come first
        return _frozen(indptr - indptr[0], self.index.dtype), _frozen(order, self.index.dtype)


# ------------------------------------------------------------ what is derived from several patterns

_known: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # the first of equal patterns


def once(derive):
    """Make ``derive(*patterns)`` keep its result as long as the patterns live.

    Patterns of equal content share one result, which must not hold the patterns themselves; None
    and other hashable arguments may stand among them.
    """

    @functools.wraps(derive)
    def look_up(*given):
        args = [_known.setdefault(a.digest, a) if isinstance(a, Pattern) else a for a in given]
        home, *others = (a for a in args if isinstance(a, Pattern))
        key = derive, *(a.digest if isinstance(a, Pattern) else a for a in args)
        if key not in home._combined:
            forget = functools.partial(_forget, weakref.ref(home), key)
            home._combined[key] = derive(*args), [weakref.ref(p, forget) for p in others]
        return home._combined[key][0]

    return look_up


def _forget(home, key, died):
    if home() is not None:
        home()._combined.pop(key, None)


# ------------------------------------------------------------------------- checking and building


def canonical(A):
    """Bring a SciPy matrix to canonical CSR without touching it.

    Returns
    -------
    pattern : Pattern
    data : ndarray of shape (nnz,)
        float32, float64, or int64 of integers; a copy; entries given twice have been added.
    as_given : bool
        Whether `A` was canonical CSR already, so that its own order of entries is ours.
    """
    if not sp.issparse(A):
        raise TypeError(
            f"needs a SciPy sparse matrix, got {type(A).__name__}: scipy.sparse.csr_array(D) makes "
            "one of a dense D; where (pattern, values) is taken, that is a way too"
        )
    require(A.ndim == 2, f"needs a sparse matrix of two dimensions, got {A.ndim}")
    # SciPy trusts what the user may have changed since: make the matrix, and check it, again.
    made, wide, shape = getattr(sp, f"{A.format}_array"), _wide(A.dtype), _as_shape(A.shape)
    if A.format == "coo":
        A = made((A.data.astype(wide, copy=False), A.coords), shape=shape)
    elif A.format == "dia":
        A = made((A.data, A.offsets), shape=shape)
    elif A.format == "lil":
        if [*map(len, A.rows)] != [*map(len, A.data)] or len(A.rows) != shape[0]:
            raise ValueError("a lil matrix needs as many values as columns in every row")
    elif A.format in ("csr", "csc", "bsr"):
        A = made((A.data, A.indices, A.indptr), shape=shape)
        blocks, rest = np.divmod(shape, A.blocksize if A.format == "bsr" else 1)
        if rest.any():
            raise ValueError(f"Pattern: a shape of {shape} in blocks of {A.blocksize}")
        n_rows, n_cols = blocks[::-1] if A.format == "csc" else blocks
        _check_structure(n_rows, n_cols, A.indptr, A.indices)
    B = A.tocsr()
    _check_structure(shape[0], shape[1], B.indptr, B.indices)
    data = B.data.astype(wide)
    data = data if wide == np.int64 else as_floats(data, what="a sparse matrix")
    B = sp.csr_array((data, B.indices.copy(), B.indptr.copy()), shape=shape)
    as_given = A.format == "csr" and B.has_canonical_format
    B.sum_duplicates()
    return Pattern._trusted(shape, B.indptr, B.indices), B.data, as_given


def _wide(dtype):
    """Return int64 for integers, since labels above 2**53 are no floats; float64 for others."""
    if dtype.kind not in "biu":
        return dtype
    return np.dtype(np.int64 if dtype.kind != "b" and np.can_cast(dtype, np.int64) else np.float64)


def _as_shape(shape):
    try:
        n_rows, n_cols = (operator.index(n) for n in shape if not isinstance(n, np.bool_))
    except (TypeError, ValueError):
        raise TypeError(f"a shape is a pair of integers, got {shape!r}") from None
    if n_rows < 0 or n_cols < 0 or n_rows * n_cols > np.iinfo(np.int64).max:
        raise ValueError(f"a shape of {shape!r} is negative or has too many cells to number")
    return n_rows, n_cols


def _as_indices(array, name):
    array = np.array(array)  # a copy: it is going to be frozen
    require(array.ndim == 1, f"Pattern: {name} must be a vector, got {array.ndim} dimensions")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"Pattern: {name} must hold integers, got dtype {array.dtype}")
    return array if array.size else np.zeros(0, np.int64)


def _check_inside(name, index, n):
    """Refuse what a kernel could read out of bounds with."""
    if len(index) and not (index.min() >= 0 and index.max() < n):
        raise ValueError(f"Pattern: {name} from {index.min()} to {index.max()}, there are {n}")


def _check_structure(n_rows, n_cols, indptr, indices):
    n = len(indices)
    ends = (len(indptr), *indptr[:1], *indptr[-1:])
    if ends != (n_rows + 1, 0, n) or np.any(indptr[1:] < indptr[:-1]):
        raise ValueError(
            f"Pattern: indptr must be {n_rows + 1} numbers that rise from 0 to {n}, the number of "
            f"entries, got {len(indptr)} from {indptr[:1]} to {indptr[-1:]}"
        )
    _check_inside("columns", indices, n_cols)


def _index_dtype(*sizes):
    return np.int32 if max(sizes) <= np.iinfo(np.int32).max else np.int64


def _frozen(array, dtype=None):
    """Return an index array in C order that nobody can make writable again."""
    array = np.ascontiguousarray(array, dtype=dtype)
    return np.asarray(memoryview(array).toreadonly())


def _flat(rows, cols, shape):
    """Number the cells of a matrix row by row, after checking them."""
    shape, rows, cols = _as_shape(shape), _as_indices(rows, "rows"), _as_indices(cols, "columns")
    if len(rows) != len(cols):
        raise ValueError(f"{len(rows)} rows and {len(cols)} columns: as many of each are needed")
    _check_inside("rows", rows, shape[0])
    _check_inside("columns", cols, shape[1])
    return np.ravel_multi_index((rows, cols), shape)


def _from_flat(flat, shape):
    """Build a pattern from sorted, distinct cell numbers."""
    shape = n_rows, n_cols = _as_shape(shape)
    indptr = np.searchsorted(flat, np.arange(n_rows + 1, dtype=np.int64) * n_cols)
    return Pattern._trusted(shape, indptr, flat % max(n_cols, 1))


def _sorted_once(cells):
    """Sort and drop what is there twice: :func:`numpy.unique`, which takes ten times as long."""
    cells.sort()
    return cells[np.append(True, cells[1:] != cells[:-1])[: len(cells)]]


def _distinct(n_rows, n_cols, n, rng):
    """Draw n distinct columns in each row; return sorted cell numbers."""
    if 2 * n > n_cols:  # draw those to leave out
        chosen = np.ones(n_rows * n_cols, dtype=bool)
        chosen[_distinct(n_rows, n_cols, n_cols - n, rng)] = False
        return np.flatnonzero(chosen)
    cells, missing = np.zeros(0, np.int64), np.full(n_rows, n)
    while missing.any():  # some are drawn twice, and drawn again
        new = np.repeat(np.arange(n_rows, dtype=np.int64) * n_cols, missing)
        new = _sorted_once(new + rng.integers(n_cols, size=len(new)))
        at = np.searchsorted(cells, new)
        fresh = np.append(cells, -1)[at] != new
        cells = np.insert(cells, at[fresh], new[fresh])
        missing -= np.bincount(new[fresh] // n_cols, minlength=n_rows)
    return cells
