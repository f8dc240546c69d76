"""What is measured: minisparse and its peers, each with the same two calls.

A peer is made from (pattern, values, x, g, threads). `forward()` returns A X; `both()` computes the
product and both gradients and returns (A X, gradient of the values or None, gradient of X).
"""

import ctypes
import importlib.util
import pathlib
import warnings

import numpy as np
import scipy.sparse as sp

warnings.filterwarnings("ignore", message="Sparse (CSR|invariant)")


class Minisparse:
    """Through the public interface: ``W @ X`` and ``(W @ X).backward(G)``."""

    def __init__(self, pattern, values, x, g, threads):
        import minisparse as ms

        ms.set_num_threads(threads)
        self.ms, self.g = ms, g
        self.W = ms.SparseParameter((pattern, values))
        self.X = ms.tensor(x, requires_grad=True)

    def forward(self):
        with self.ms.no_grad():
            return (self.W @ self.X).data

    def both(self):
        self.W.grad = self.X.grad = None
        Y = self.W @ self.X
        Y.backward(self.g)
        return Y.data, self.W.grad, self.X.grad


class ExpertPyTorch:
    """The best PyTorch allows: CSR product, prebuilt transpose, gradient by sampled_addmm."""

    def __init__(self, pattern, values, x, g, threads):
        import torch

        torch.set_num_threads(threads)
        self.torch = torch
        index = lambda a: torch.from_numpy(np.array(a))  # noqa: E731 - a copy that may be written
        t_indptr, t_indices, perm = map(index, pattern.by_column)
        perm = perm.long()
        indptr, indices = index(pattern.indptr), index(pattern.indices)
        shape, nnz = pattern.shape, pattern.nnz
        csr = lambda *a: torch.sparse_csr_tensor(*a, check_invariants=False)  # noqa: E731
        zeros = csr(indptr, indices, torch.zeros(nnz, dtype=torch.from_numpy(values).dtype), shape)

        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx, values, x):
                ctx.save_for_backward(values, x)
                return csr(indptr, indices, values, shape) @ x

            @staticmethod
            def backward(ctx, g):
                values, x = ctx.saved_tensors
                sampled = torch.sparse.sampled_addmm(zeros, g, x.T, beta=0.0)
                transposed = csr(t_indptr, t_indices, values[perm], shape[::-1])
                return sampled.values(), transposed @ g

        self.product = Product.apply
        self.values = torch.from_numpy(values.copy()).requires_grad_()
        self.x, self.g = torch.from_numpy(x.copy()).requires_grad_(), torch.from_numpy(g)

    def forward(self):
        with self.torch.no_grad():
            return self.product(self.values, self.x).numpy()

    def both(self):
        self.values.grad = self.x.grad = None
        y = self.product(self.values, self.x)
        y.backward(self.g)
        return y.detach().numpy(), self.values.grad.numpy(), self.x.grad.numpy()


class PlainPyTorch:
    """A CSR weight in plain autograd; the gradient of the weight comes out dense."""

    def __init__(self, pattern, values, x, g, threads):
        import torch

        if pattern.shape[0] * pattern.shape[1] > 2**26:
            raise MemoryError("the gradient is dense")
        torch.set_num_threads(threads)
        self.torch, self.where = torch, (pattern.rows, pattern.indices)
        parts = (pattern.indptr, pattern.indices, values)
        parts = [torch.from_numpy(np.array(a)) for a in parts]
        self.W = torch.sparse_csr_tensor(*parts, pattern.shape).requires_grad_()
        self.x, self.g = torch.from_numpy(x.copy()).requires_grad_(), torch.from_numpy(g)

    def forward(self):
        with self.torch.no_grad():
            return (self.W @ self.x).numpy()

    def both(self):
        self.W.grad = self.x.grad = None
        y = self.W @ self.x
        y.backward(self.g)
        return y.detach().numpy(), self.W.grad.to_dense().numpy()[self.where], self.x.grad.numpy()


class MaskedPyTorch(PlainPyTorch):
    """A dense weight times a mask."""

    def __init__(self, pattern, values, x, g, threads):
        super().__init__(pattern, values, x, g, threads)
        self.mask = self.torch.from_numpy(pattern.to_mask()).to(self.x.dtype)
        dense = np.zeros(pattern.shape, values.dtype)
        dense[self.where] = values
        self.D = self.torch.from_numpy(dense).requires_grad_()

    def forward(self):
        with self.torch.no_grad():
            return ((self.D * self.mask) @ self.x).numpy()

    def both(self):
        self.D.grad = self.x.grad = None
        y = (self.D * self.mask) @ self.x
        y.backward(self.g)
        return y.detach().numpy(), self.D.grad.numpy()[self.where], self.x.grad.numpy()


class SciPy:
    """By hand: ``A @ X``, ``A.T @ G``, gathered products (on one thread, as SciPy is)."""

    def __init__(self, pattern, values, x, g, threads):
        parts = (values, pattern.indices, pattern.indptr)
        self.A, self.x, self.g = sp.csr_array(parts, shape=pattern.shape), x, g
        self.pattern = pattern

    def forward(self):
        return self.A @ self.x

    def both(self):
        rows, columns = self.pattern.rows, self.pattern.indices
        dvalues = np.empty_like(self.A.data)
        for i in range(0, len(rows), 1 << 20):
            some = slice(i, i + (1 << 20))
            dvalues[some] = np.einsum("ek,ek->e", self.g[rows[some]], self.x[columns[some]])
        return self.A @ self.x, dvalues, self.A.T @ self.g


class JAX:
    """BCOO, jitted."""

    def __init__(self, pattern, values, x, g, threads):
        import jax
        from jax.experimental import sparse

        jax.config.update("jax_enable_x64", values.dtype == np.float64)
        index = np.stack([pattern.rows, pattern.indices], axis=1)
        made = {"shape": pattern.shape, "indices_sorted": True, "unique_indices": True}

        def product(values, x):
            return sparse.BCOO((values, index), **made) @ x

        def both(values, x, g):
            y, pull = jax.vjp(product, values, x)
            return y, *pull(g)

        self.args = [jax.numpy.asarray(a) for a in (values, x, g)]
        self.forward_, self.both_ = jax.jit(product), jax.jit(both)

    def forward(self):
        return np.asarray(self.forward_(*self.args[:2]).block_until_ready())

    def both(self):
        return tuple(np.asarray(a.block_until_ready()) for a in self.both_(*self.args))


class MKLGeneral(ctypes.Structure):
    """MKL's ``struct matrix_descr``."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("type", "mode", "diag"))


class MKL:
    """``mkl_sparse_s_mm``, forward only."""

    def __init__(self, pattern, values, x, g, threads):
        if values.dtype != np.float32:
            raise TypeError("float32 only")
        prefix = pathlib.Path(np.__file__).parents[4]
        found = sorted(prefix.glob("libmkl_rt.so*")) + sorted(
            (prefix / "lib").glob("libmkl_rt.so*")
        )
        if not found:
            raise ImportError("mkl is not installed")
        self.mkl = ctypes.CDLL(str(found[0]))
        self.mkl.MKL_Set_Num_Threads(threads)
        self.keep = [np.array(a) for a in (pattern.indptr, pattern.indices, values)]
        self.x, self.out = x, np.empty((pattern.shape[0], x.shape[1]), np.float32)
        at = [ctypes.c_void_p(a.ctypes.data) for a in self.keep]
        step = ctypes.sizeof(ctypes.c_int)
        self.handle = ctypes.c_void_p()
        ends = ctypes.c_void_p(self.keep[0].ctypes.data + step)
        shape = [ctypes.c_int(n) for n in pattern.shape]
        self.check(
            self.mkl.mkl_sparse_s_create_csr(
                ctypes.byref(self.handle), ctypes.c_int(0), *shape, at[0], ends, at[1], at[2]
            )
        )
        general = MKLGeneral(20, 0, 0)
        self.mkl.mkl_sparse_set_mm_hint(
            self.handle, 10, general, 101, ctypes.c_int(x.shape[1]), ctypes.c_int(1000)
        )
        self.check(self.mkl.mkl_sparse_optimize(self.handle))
        k = ctypes.c_int(x.shape[1])
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (self.x, self.out)]
        self.call = lambda: self.mkl.mkl_sparse_s_mm(
            10, ctypes.c_float(1), self.handle, general, 101, pointers[0], k, k,
            ctypes.c_float(0), pointers[1], k,
        )  # fmt: skip

    def check(self, status):
        if status:
            raise RuntimeError(f"MKL returned {status}")

    def forward(self):
        self.check(self.call())
        return self.out


def available():
    """Return the peers that can run here, and say which cannot."""
    peers = {"minisparse": Minisparse, "scipy": SciPy, "mkl": MKL}
    for package, names in {
        "torch": {
            "expert torch": ExpertPyTorch,
            "torch csr": PlainPyTorch,
            "torch mask": MaskedPyTorch,
        },
        "jax": {"jax bcoo": JAX},
    }.items():
        if importlib.util.find_spec(package):
            peers |= names
        else:
            print(f"skipped, since {package} is not installed: {', '.join(names)}")
    return peers
