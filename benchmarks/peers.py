"""What is measured: minisparse and its peers, each with the same calls.

Three families: products (made from a `workloads.Problem`), networks (from a `steps.Net`) and single
layers (from a `crossover.Layer`). Each is made in a process of its own, and imports its framework
there.
"""

import contextlib
import ctypes
import functools
import os
import pathlib

import numpy as np

from .harness import clocked, quartile

LR, BETAS, EPS = 1e-3, (0.9, 0.999), 1e-8
"""Adam's options, for everyone."""


def must_fit(nbytes):
    """Raise MemoryError where `nbytes` are more than half of the machine's memory."""
    if nbytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2:
        raise MemoryError(f"needs {nbytes / 2**30:.0f} GiB")


def import_torch(threads):
    import torch

    torch.set_num_threads(threads)
    return torch


def import_jax(dtype):
    import jax
    from jax.experimental import sparse

    jax.config.update("jax_enable_x64", dtype == np.float64)
    return jax, sparse


# --------------------------------------------------------------------------------------- products
# `forward()` returns A X; `both()` computes the product and both gradients and returns (A X, the
# gradient of the values, the gradient of X); for a first layer the last is None and not computed.


class Minisparse:
    """Through the public interface: ``W @ X`` and ``(W @ X).backward(G)``."""

    def __init__(self, problem, threads):
        import minisparse as ms

        ms.set_num_threads(threads)
        self.ms, self.g, self.batch_first = ms, problem.g, problem.batch_first
        self.W = ms.SparseParameter((problem.pattern, problem.values))
        self.X = problem.x if problem.first else ms.tensor(problem.x, requires_grad=True)

    def product(self):
        return self.X @ self.W.T if self.batch_first else self.W @ self.X

    def forward(self):
        with self.ms.no_grad():
            return self.product().data

    def both(self):
        self.W.grad = None
        if isinstance(self.X, self.ms.Tensor):
            self.X.grad = None
        Y = self.product()
        Y.backward(self.g)
        return Y.data, self.W.grad, getattr(self.X, "grad", None)


def csr(torch, *args):
    return torch.sparse_csr_tensor(*args, check_invariants=False)


def expert_product(torch, pattern, dtype):
    """Return product(values, x): the best PyTorch allows.

    A CSR product, a transpose built once, the values' gradient by ``sampled_addmm``, everything in
    C order.
    """
    indptr, indices = torch.tensor(pattern.indptr), torch.tensor(pattern.indices)
    t_indptr, t_indices, perm = map(torch.tensor, pattern.by_column)
    shape, perm = pattern.shape, perm.long()
    zeros = csr(torch, indptr, indices, torch.zeros(pattern.nnz, dtype=dtype), shape)

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values, x):
            x = x.contiguous()
            ctx.save_for_backward(values, x)
            return csr(torch, indptr, indices, values, shape) @ x

        @staticmethod
        def backward(ctx, g):
            values, x = ctx.saved_tensors
            g = g.contiguous()
            sampled = torch.sparse.sampled_addmm(zeros, g, x.T, beta=0.0).values()
            if not ctx.needs_input_grad[1]:
                return sampled, None
            return sampled, csr(torch, t_indptr, t_indices, values[perm], shape[::-1]) @ g

    return Product.apply


class ExpertPyTorch:
    """:func:`expert_product` under autograd."""

    def __init__(self, problem, threads):
        self.torch = torch = import_torch(threads)
        self.x = torch.tensor(problem.x).requires_grad_(not problem.first)
        self.g, self.batch_first = torch.tensor(problem.g), problem.batch_first
        self.prepare(problem)

    def prepare(self, problem):
        product = expert_product(self.torch, problem.pattern, self.x.dtype)
        self.weight = values = self.torch.tensor(problem.values).requires_grad_()
        self.product = lambda x: product(values, x)

    def y(self):
        return self.product(self.x.T).T if self.batch_first else self.product(self.x)

    def forward(self):
        with self.torch.no_grad():
            return self.y().numpy()

    def both(self):
        self.weight.grad = self.x.grad = None
        y = self.y()
        y.backward(self.g)
        dx = None if self.x.grad is None else self.x.grad.numpy()
        return y.detach().numpy(), self.values_of(self.weight.grad), dx

    def values_of(self, grad):
        return grad.numpy()


class TorchLayer(ExpertPyTorch):
    """Our kernels inside PyTorch: the layer of minisparse.interop, under PyTorch's autograd."""

    def prepare(self, problem):
        import minisparse as ms
        from minisparse.interop.torch import SparseLinear

        ms.set_num_threads(self.torch.get_num_threads())
        n_out, n_in = problem.pattern.shape
        layer = SparseLinear(n_in, n_out, pattern=problem.pattern, bias=False, dtype=self.x.dtype)
        layer.values.data = self.torch.tensor(problem.values)
        self.weight, self.product = layer.values, lambda x: layer(x.T).T


class PlainPyTorch(ExpertPyTorch):
    """A CSR weight in plain autograd; the gradient of the weight comes out dense."""

    copies = 1

    def prepare(self, problem):
        p = problem.pattern
        must_fit(self.copies * np.prod(p.shape, dtype=float) * problem.values.itemsize)
        self.where = p.rows, p.indices
        parts = (self.torch.tensor(a) for a in (p.indptr, p.indices, problem.values))
        self.weight = csr(self.torch, *parts, p.shape).requires_grad_()
        self.product = lambda x: self.weight @ x

    def values_of(self, grad):
        return grad.numpy()[self.where]


class MaskedPyTorch(PlainPyTorch):
    """A dense weight times a mask."""

    copies = 4

    def prepare(self, problem):
        super().prepare(problem)
        self.weight, mask = masked(self.torch, problem.pattern, problem.values)
        self.product = lambda x: (self.weight * mask) @ x


def masked(torch, pattern, values):
    """Return a dense leaf with `values` on the pattern, and the mask in its dtype."""
    dense = np.zeros(pattern.shape, values.dtype)
    dense[pattern.rows, pattern.indices] = values
    mask = torch.tensor(pattern.to_mask()).to(torch.tensor(values[:0]).dtype)
    return torch.tensor(dense).requires_grad_(), mask


class SciPy:
    """By hand: ``A @ X``, ``A.T @ G``, gathered products (on one thread, as SciPy is)."""

    def __init__(self, problem, threads):
        self.problem, self.A = problem, problem.pattern.to_scipy(problem.values)

    def forward(self):
        p = self.problem
        return (self.A @ p.x.T).T if p.batch_first else self.A @ p.x

    def both(self):
        p, turn = self.problem, np.transpose if self.problem.batch_first else np.asarray
        x, g = turn(p.x), turn(p.g)
        dvalues = sampled(p.pattern, g, x)
        return turn(self.A @ x), dvalues, None if p.first else turn(self.A.T @ g)


def sampled(pattern, u, v):
    """Return ``u[i] · v[j]`` for each entry (i, j), some thousands at a time."""
    rows, columns = pattern.rows, pattern.indices
    out = np.empty(pattern.nnz, u.dtype)
    for start in range(0, len(rows), 1 << 14):
        some = slice(start, start + (1 << 14))
        out[some] = np.einsum("ek,ek->e", u[rows[some]], v[columns[some]])
    return out


class JAX:
    """BCOO, jitted."""

    def __init__(self, problem, threads):
        jax, sparse = import_jax(problem.values.dtype)
        multiply, index = jax_product(jax, sparse, problem.pattern)

        def product(index, values, x):
            return (
                multiply(index, values, x.T).T
                if problem.batch_first
                else multiply(index, values, x)
            )

        def both(index, values, x, g):
            if problem.first:
                y, pull = jax.vjp(lambda values: product(index, values, x), values)
            else:
                y, pull = jax.vjp(functools.partial(product, index), values, x)
            return y, *pull(g)

        self.args = [index, *map(jax.numpy.asarray, (problem.values, problem.x, problem.g))]
        self.forward_, self.both_ = jax.jit(product), jax.jit(both)

    def forward(self):
        return np.asarray(self.forward_(*self.args[:3]).block_until_ready())

    def both(self):
        results = [np.asarray(a.block_until_ready()) for a in self.both_(*self.args)]
        return *results, *[None] * (3 - len(results))


def jax_product(jax, sparse, pattern):
    """Return product(index, values, x) by BCOO, and its index."""
    index = jax.numpy.asarray(np.stack([pattern.rows, pattern.indices], axis=1))
    made = {"shape": pattern.shape, "indices_sorted": True, "unique_indices": True}
    return lambda index, values, x: sparse.BCOO((values, index), **made) @ x, index


@contextlib.contextmanager
def quiet():
    """Send what C++ writes to standard error nowhere."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


class TensorFlow:
    """``tf.sparse.sparse_dense_matmul`` in a ``tf.function``."""

    def __init__(self, problem, threads):
        os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")
        with quiet():
            import tensorflow as tf

            with contextlib.suppress(RuntimeError):  # it has started, with as many, before
                tf.config.threading.set_intra_op_parallelism_threads(threads)
                tf.config.threading.set_inter_op_parallelism_threads(threads)
            tf.constant(0)
        p = problem.pattern
        index = tf.constant(np.stack([p.rows, p.indices], axis=1).astype(np.int64))
        values, x, g = map(tf.constant, (problem.values, problem.x, problem.g))
        wanted = (values,) if problem.first else (values, x)

        @tf.function
        def product(values, x):
            A = tf.SparseTensor(index, values, p.shape)
            if problem.batch_first:
                y = tf.sparse.sparse_dense_matmul(A, x, adjoint_b=True)
                return tf.transpose(y)
            return tf.sparse.sparse_dense_matmul(A, x)

        @tf.function
        def both(values, x, g):
            wanted = (values,) if problem.first else (values, x)
            with tf.GradientTape() as tape:
                tape.watch(wanted)
                y = product(values, x)
            return y, *tape.gradient(y, wanted, g)

        self.n = len(wanted)
        self.forward = lambda: product(values, x).numpy()
        self.both_ = lambda: both(values, x, g)

    def both(self):
        return *(a.numpy() for a in self.both_()), *[None] * (2 - self.n)


class MKLGeneral(ctypes.Structure):
    """MKL's ``struct matrix_descr``."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("type", "mode", "diag"))


class MKL:
    """``mkl_sparse_s_mm``, or ``_mv`` where there is one column; forward only."""

    def __init__(self, problem, threads):
        pattern, values, x = problem.pattern, problem.values, problem.x
        letter, real = {"f": ("s", ctypes.c_float), "d": ("d", ctypes.c_double)}[values.dtype.char]
        prefix = pathlib.Path(np.__file__).parents[4]
        found = [p for where in (prefix, prefix / "lib") for p in where.glob("libmkl_rt.so*")]
        if not found:
            raise ImportError("mkl is not installed")
        mkl = ctypes.CDLL(str(min(found)))
        mkl.MKL_Set_Num_Threads(threads)
        k, n = x.shape if problem.batch_first else x.shape[::-1]
        layout, ld_x, ld_y = (102, n, pattern.shape[0]) if problem.batch_first else (101, k, k)
        self.out = np.empty_like(problem.g)
        self.keep = [x, np.array(pattern.indptr), np.array(pattern.indices), values]
        pointer = lambda a: ctypes.c_void_p(a.ctypes.data)  # noqa: E731 - short
        starts, indices, numbers = map(pointer, self.keep[1:])
        ends = ctypes.c_void_p(starts.value + self.keep[1].itemsize)
        handle, general = ctypes.c_void_p(), MKLGeneral(20, 0, 0)
        shape = map(ctypes.c_int, pattern.shape)
        check(
            getattr(mkl, f"mkl_sparse_{letter}_create_csr")(
                ctypes.byref(handle), 0, *shape, starts, ends, indices, numbers
            )
        )
        mkl.mkl_sparse_set_mm_hint(handle, 10, general, layout, ctypes.c_int(k), 1000)
        check(mkl.mkl_sparse_optimize(handle))
        f = getattr(mkl, f"mkl_sparse_{letter}_m{'v' if k == 1 else 'm'}")
        start, end = (10, real(1), handle, general), (real(0), pointer(self.out))
        if k == 1:
            self.call = lambda: f(*start, pointer(x), *end)
        else:
            self.call = lambda: f(*start, layout, pointer(x), k, ld_x, *end, ld_y)

    def forward(self):
        check(self.call())
        return self.out


def check(status):
    if status:
        raise RuntimeError(f"MKL returned {status}")


PRODUCTS = {
    "minisparse": ("minisparse", Minisparse),
    "expert torch": ("torch", ExpertPyTorch),
    "torch layer": ("torch", TorchLayer),
    "torch csr": ("torch", PlainPyTorch),
    "torch mask": ("torch", MaskedPyTorch),
    "jax bcoo": ("jax", JAX),
    "tensorflow": ("tensorflow", TensorFlow),
    "mkl": ("numpy", MKL),
    "scipy": ("scipy", SciPy),
}
"""Name: (package, class)."""

# --------------------------------------------------------------------------------------- networks
# `step()` is a whole training step and returns the loss before it.


class MinisparseNet:
    """Through the public interface: ``ms.nn`` and ``ms.optim``."""

    def __init__(self, net, threads):
        import minisparse as ms

        ms.set_num_threads(threads)
        modules = []
        for pattern, values, bias in net.layers:
            weight = ms.SparseParameter((pattern, values))
            layer = ms.nn.SparseLinear(*pattern.shape[::-1], weight=weight)
            layer.bias.data = bias
            modules += [layer, ms.nn.ReLU()]
        self.ms, self.net = ms, ms.nn.Sequential(*modules[:-1])
        self.optimizer = ms.optim.Adam(self.net.parameters(), lr=LR, betas=BETAS, eps=EPS)
        self.x, self.labels = self.operand(net.x), net.labels

    def operand(self, x):
        return x.T

    def step(self):
        self.optimizer.zero_grad()
        loss = self.ms.nn.cross_entropy(self.net(self.x), self.labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()


class MinisparseRows(MinisparseNet):
    """The same, fed a batch-first x in C order."""

    def operand(self, x):
        return np.ascontiguousarray(x.T)


class ExpertPyTorchNet:
    """:func:`expert_product`, feature-major, in place where autograd allows; fused Adam."""

    def __init__(self, net, threads):
        self.torch = torch = import_torch(threads)
        self.layers = [
            (*self.layer(p, v), torch.tensor(b).requires_grad_()) for p, v, b in net.layers
        ]
        self.x, self.labels = torch.tensor(net.x), torch.tensor(net.labels)
        leaves = [leaf for _, *leaves in self.layers for leaf in leaves]
        self.optimizer = torch.optim.Adam(leaves, lr=LR, betas=BETAS, eps=EPS, fused=True)

    def layer(self, pattern, values):
        values = self.torch.tensor(values).requires_grad_()
        return expert_product(self.torch, pattern, values.dtype), values

    def step(self):
        self.optimizer.zero_grad()
        h = self.x
        for n, (product, weight, bias) in enumerate(self.layers):
            h = product(weight, h).add_(bias[:, None])
            h = h.relu_() if n < len(self.layers) - 1 else h
        loss = self.torch.nn.functional.cross_entropy(h.T, self.labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()


class PlainPyTorchNet(ExpertPyTorchNet):
    """CSR tensors made from their values in plain autograd."""

    copies = 2

    def __init__(self, net, threads):
        cells = [np.prod(pattern.shape, dtype=float) for pattern, _, _ in net.layers]
        must_fit(4 * (sum(cells) if self.copies > 2 else max(cells)) * self.copies)
        super().__init__(net, threads)

    def layer(self, pattern, values):
        indptr, indices = map(self.torch.tensor, (pattern.indptr, pattern.indices))
        values = self.torch.tensor(values).requires_grad_()
        shape = pattern.shape
        return lambda values, x: csr(self.torch, indptr, indices, values, shape) @ x, values


class MaskedPyTorchNet(PlainPyTorchNet):
    """Dense weights times masks; fused Adam over all of them."""

    copies = 6

    def layer(self, pattern, values):
        weight, mask = masked(self.torch, pattern, values)
        return lambda weight, x: (weight * mask) @ x, weight


class JAXNet:
    """BCOO, the whole step jitted, with its own Adam; the old parameters are given up."""

    def __init__(self, net, threads):
        jax, sparse = import_jax(net.x.dtype)
        jnp = jax.numpy
        products, indices = zip(
            *(jax_product(jax, sparse, pattern) for pattern, _, _ in net.layers), strict=True
        )

        def loss_of(params, indices, x, labels):
            h = x
            for n, (product, index) in enumerate(zip(products, indices, strict=True)):
                values, bias = params[n]
                h = product(index, values, h) + bias[:, None]
                h = jax.nn.relu(h) if n < len(products) - 1 else h
            logs = jax.nn.log_softmax(h, axis=0)
            return -jnp.take_along_axis(logs, labels[None, :], axis=0).mean()

        def step(state, t, *data):
            params, means, squares = state
            loss, grads = jax.value_and_grad(loss_of)(params, *data)
            b1, b2 = BETAS
            tree = jax.tree_util.tree_map
            means = tree(lambda m, g: b1 * m + (1 - b1) * g, means, grads)
            squares = tree(lambda v, g: b2 * v + (1 - b2) * g * g, squares, grads)

            def down(p, m, v):
                return p - LR * (m / (1 - b1**t)) / (jnp.sqrt(v / (1 - b2**t)) + EPS)

            return loss, (tree(down, params, means, squares), means, squares)

        params = [(jnp.asarray(v), jnp.asarray(b)) for _, v, b in net.layers]
        zeros = [jax.tree_util.tree_map(jnp.zeros_like, params) for _ in range(2)]
        self.state, self.t = (params, *zeros), 0
        self.data = indices, jnp.asarray(net.x), jnp.asarray(net.labels)
        self.step_ = jax.jit(step, donate_argnums=0)

    def step(self):
        self.t += 1
        loss, self.state = self.step_(self.state, np.float32(self.t), *self.data)
        self.state[0][0][0].block_until_ready()
        return float(loss)


class SciPyNet:
    """By hand, on SciPy and NumPy; in float64 it is what the others are checked against."""

    def __init__(self, net, threads=1, dtype=np.float32):
        self.x, self.labels = net.x.astype(dtype), net.labels
        self.patterns = [pattern for pattern, _, _ in net.layers]
        self.params = [a.astype(dtype) for _, v, b in net.layers for a in (v, b)]
        self.moments = [(np.zeros_like(p), np.zeros_like(p)) for p in self.params]
        self.t = 0

    def step(self):
        matrices = [p.to_scipy(v) for p, v in zip(self.patterns, self.params[::2], strict=True)]
        inputs = [self.x]
        for A, bias in zip(matrices, self.params[1::2], strict=True):
            h = A @ inputs[-1] + bias[:, None]
            inputs.append(np.maximum(h, 0))
        n = np.arange(len(self.labels))
        e = np.exp(h - h.max(0))
        p = e / e.sum(0)
        loss = -np.log(p[self.labels, n]).mean()
        p[self.labels, n] -= 1
        g, grads = p / h.dtype.type(len(n)), []
        for A, pattern, x in zip(matrices[::-1], self.patterns[::-1], inputs[-2::-1], strict=True):
            grads = [sampled(pattern, g, x), g.sum(1), *grads]
            if x is not self.x:
                g = (A.T @ g) * (x > 0)
        self.t += 1
        for p, g, moments in zip(self.params, grads, self.moments, strict=True):
            adam_by_hand(p, g, *moments, self.t)
        return float(loss)


def adam_by_hand(p, g, m, v, t):
    """Take Adam's step number t, in place."""
    b1, b2 = BETAS
    m *= b1
    m += (1 - b1) * g
    v *= b2
    v += (1 - b2) * g * g
    p -= LR / (1 - b1**t) * m / (np.sqrt(v / (1 - b2**t)) + EPS)


NETS = {
    "minisparse": ("minisparse", MinisparseNet),
    "batch-first": ("minisparse", MinisparseRows),
    "expert torch": ("torch", ExpertPyTorchNet),
    "torch csr": ("torch", PlainPyTorchNet),
    "torch mask": ("torch", MaskedPyTorchNet),
    "jax bcoo": ("jax", JAXNet),
    "scipy": ("scipy", SciPyNet),
}
"""Name: (package, class)."""

# ----------------------------------------------------------------------------------------- layers
# `step()`: the product of an n × n layer with n × batch numbers, both gradients from a given one,
# and Adam. `result()` computes the product and returns it with the weight as SciPy or NumPy has it.


class MinisparseLayer:
    """Through the public interface."""

    def __init__(self, layer, threads):
        import minisparse as ms

        ms.set_num_threads(threads)
        n = layer.n
        pattern = ms.Pattern.random((n, n), density=layer.density, rng=0)
        values = np.random.default_rng(1).normal(size=pattern.nnz).astype(np.float32)
        self.W = ms.SparseParameter((pattern, values))
        self.X, self.g = ms.tensor(layer.x, requires_grad=True), layer.g
        self.optimizer = ms.optim.Adam([self.W], lr=LR, betas=BETAS, eps=EPS)

    def step(self):
        self.optimizer.zero_grad()
        self.X.grad = None
        (self.W @ self.X).backward(self.g)
        self.optimizer.step()

    def result(self):
        return (self.W @ self.X).data, self.W.to_scipy()


class PyTorchLayer:
    """A dense weight; fused Adam; on one thread or all, whichever is quicker."""

    def __init__(self, layer, threads):
        torch = import_torch(threads)
        self.W = torch.randn(layer.n, layer.n).requires_grad_()
        self.X, self.g = torch.tensor(layer.x).requires_grad_(), torch.tensor(layer.g)
        self.optimizer = torch.optim.Adam([self.W], lr=LR, betas=BETAS, eps=EPS, fused=True)
        seconds = {}
        for t in {1, threads}:  # a small layer is quicker on one
            torch.set_num_threads(t)
            seconds[t] = quartile([clocked(self.step) for _ in range(4)])
        torch.set_num_threads(min(seconds, key=seconds.get))

    def step(self):
        self.optimizer.zero_grad()
        self.X.grad = None
        (self.W @ self.X).backward(self.g)
        self.optimizer.step()

    def result(self):
        return (self.W @ self.X).detach().numpy(), self.W.detach().numpy()


class NumPyLayer:
    """A dense weight, gradients and Adam by hand, in place."""

    def __init__(self, layer, threads):
        self.X, self.g, self.t = layer.x, layer.g, 0
        self.W = np.random.default_rng(1).normal(size=(layer.n, layer.n)).astype(np.float32)
        self.moments = np.zeros_like(self.W), np.zeros_like(self.W)

    def step(self):
        self.t += 1
        self.Y, self.dX = self.W @ self.X, self.W.T @ self.g
        adam_by_hand(self.W, self.g @ self.X.T, *self.moments, self.t)

    def result(self):
        return self.W @ self.X, self.W


LAYERS = {
    "minisparse": ("minisparse", MinisparseLayer),
    "torch dense": ("torch", PyTorchLayer),
    "numpy dense": ("numpy", NumPyLayer),
}
"""Name: (package, class)."""
