"""The calls of other libraries beside those of minisparse: what the page `coming_from` shows.

A row says what is wanted, and gives the code for each library, or None where it has no such call.
``tests/test_docs.py`` runs every cell of the libraries that are installed, and compares the value
of its last line with that of minisparse.
"""

import ast
import textwrap

import numpy as np

TITLES = {"torch": "PyTorch", "tensorflow": "TensorFlow", "jax": "JAX"}

COMMON = """
import numpy as np
import scipy.sparse as sp

A = sp.csr_array([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0], [4.0, 5.0, 6.0]])
coords = np.stack(A.nonzero(), axis=1)
rows, cols = coords.T
rng = np.random.default_rng(0)
X0, x0, t0 = rng.normal(size=(3, 2)), rng.normal(size=3), rng.normal(size=3)
labels = np.array([0, 1, 1])
"""
"""What every cell finds: a SciPy matrix, the places of its entries, dense arrays."""

SETUP = {
    "minisparse": """
import minisparse as ms
P = ms.Pattern.from_scipy(A)
W = ms.SparseParameter(A)
X, x, t = ms.tensor(X0, requires_grad=True), ms.tensor(x0, requires_grad=True), ms.tensor(t0)
""",
    "torch": """
import torch
import torch.nn.functional as F
values = torch.tensor(A.data, requires_grad=True)
W = torch.sparse_csr_tensor(A.indptr, A.indices, values, A.shape)
X, x = torch.tensor(X0, requires_grad=True), torch.tensor(x0, requires_grad=True)
t, labels = torch.tensor(t0), torch.tensor(labels)
""",
    "tensorflow": """
import tensorflow as tf
values = tf.Variable(A.data)
W = tf.SparseTensor(coords, values, A.shape)
X, x, t = tf.Variable(X0), tf.Variable(x0), tf.constant(t0)
""",
    "jax": """
import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO
values = jnp.array(A.data)
W = BCOO((values, coords), shape=A.shape)
X, x, t = jnp.array(X0), jnp.array(x0), jnp.array(t0)
""",
}

ROWS = [
    (
        "an array with a gradient",
        "ms.tensor(x0, requires_grad=True)",
        "torch.tensor(x0, requires_grad=True)",
        "tf.Variable(x0)",
        "jnp.array(x0)",
    ),
    (
        "a sparse matrix to train, from SciPy's `A`",
        "ms.SparseParameter(A)",
        """
        torch.sparse_csr_tensor(
            A.indptr, A.indices, A.data, A.shape,
            requires_grad=True)
        """,
        """
        values = tf.Variable(A.data)
        tf.SparseTensor(coords, values, A.shape)
        """,
        "BCOO((A.data, coords), shape=A.shape)",
    ),
    (
        "its product with a dense matrix",
        "W @ X",
        "W @ X",
        "tf.sparse.sparse_dense_matmul(W, X)",
        "W @ X",
    ),
    (
        "the gradient of its values",
        """
        (W @ X).sum().backward()
        W.grad                 # (nnz,)
        """,
        """
        W = torch.sparse_csr_tensor(
            A.indptr, A.indices, A.data, A.shape,
            requires_grad=True)
        (W @ X).sum().backward()
        W.grad                 # rows × columns
        """,
        """
        with tf.GradientTape() as tape:
            W = tf.SparseTensor(coords, values, A.shape)
            loss = tf.reduce_sum(
                tf.sparse.sparse_dense_matmul(W, X))
        tape.gradient(loss, values)        # (nnz,)
        """,
        """
        def loss(values):
            W = BCOO((values, coords), shape=A.shape)
            return (W @ X).sum()
        jax.grad(loss)(values)             # (nnz,)
        """,
    ),
    (
        "gradients as results",
        """
        loss = (W @ X).sum()
        ms.grad(loss, X)
        """,
        """
        loss = (W @ X).sum()
        torch.autograd.grad(loss, X)[0]
        """,
        """
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(
                tf.sparse.sparse_dense_matmul(W, X))
        tape.gradient(loss, X)
        """,
        "jax.grad(lambda X: (W @ X).sum())(X)",
    ),
    (
        "cut the graph",
        "x.detach()",
        "x.detach()",
        "tf.stop_gradient(x)",
        "jax.lax.stop_gradient(x)",
    ),
    (
        "record nothing",
        """
        with ms.no_grad():
            y = W @ X
        y
        """,
        """
        with torch.no_grad():
            y = W @ X
        y
        """,
        "tf.sparse.sparse_dense_matmul(W, X)   # no tape",
        "W @ X                                 # no jax.grad",
    ),
    (
        "a gradient that can be differentiated again",
        """
        g = ms.grad((x**3).sum(), x,
                    create_graph=True)
        ms.grad(g.sum(), x)
        """,
        """
        (g,) = torch.autograd.grad(
            (x**3).sum(), x, create_graph=True)
        torch.autograd.grad(g.sum(), x)[0]
        """,
        """
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                y = tf.reduce_sum(x**3)
            g = tf.reduce_sum(inner.gradient(y, x))
        outer.gradient(g, x)
        """,
        """
        g = jax.grad(lambda x: (x**3).sum())
        jax.grad(lambda x: g(x).sum())(x)
        """,
    ),
    (
        "Hessian times a vector",
        """
        def f(x):
            return (x**3).sum()
        ms.hvp(f, x, t)
        """,
        """
        def f(x):
            return (x**3).sum()
        torch.autograd.functional.hvp(f, x, t)[1]
        """,
        """
        with tf.autodiff.ForwardAccumulator(x, t) as acc:
            with tf.GradientTape() as tape:
                y = tf.reduce_sum(x**3)
            g = tape.gradient(y, x)
        acc.jvp(g)
        """,
        """
        def f(x):
            return (x**3).sum()
        jax.jvp(jax.grad(f), (x,), (t,))[1]
        """,
    ),
    (
        "Hessian",
        "ms.hessian(lambda x: (x**3).sum(), x)",
        """
        torch.autograd.functional.hessian(
            lambda x: (x**3).sum(), x)
        """,
        """
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                y = tf.reduce_sum(x**3)
            g = inner.gradient(y, x)
        outer.jacobian(g, x)
        """,
        "jax.hessian(lambda x: (x**3).sum())(x)",
    ),
    (
        "entries of a dense product, X Xᵀ, at a pattern",
        "ms.sddmm(X, X, P)",
        """
        torch.sparse.sampled_addmm(
            W, X, X.T, beta=0.0)
        """,
        """
        tf.reduce_sum(
            tf.gather(X, rows) * tf.gather(X, cols), 1)
        """,
        "(X[rows] * X[cols]).sum(1)",
    ),
    (
        "softmax over the entries of each row",
        "W.row_softmax()",
        "torch.sparse.softmax(W.to_sparse_coo(), 1)",
        "tf.sparse.softmax(W)",
        """
        top = jax.ops.segment_max(values, rows, 3)
        e = jnp.exp(values - top[rows])
        e / jax.ops.segment_sum(e, rows, 3)[rows]
        """,
    ),
    (
        "sparse times sparse",
        "W @ W",
        "W @ W",
        None,
        "W @ W",
    ),
    (
        "solve A y = x",
        "ms.spsolve(W, x)",
        "torch.linalg.solve(W.to_dense(), x)   # dense",
        """
        tf.linalg.solve(                 # dense
            tf.sparse.to_dense(W), x[:, None])[:, 0]
        """,
        """
        from jax.experimental.sparse.linalg import spsolve
        spsolve(values, A.indices, A.indptr, x)
        """,
    ),
    (
        "one step of an optimizer",
        """
        opt = ms.optim.Adam([x], lr=0.1)
        (x**2).sum().backward()
        opt.step()
        x
        """,
        """
        opt = torch.optim.Adam([x], lr=0.1)
        (x**2).sum().backward()
        opt.step()
        x
        """,
        """
        opt = tf.keras.optimizers.Adam(0.1, epsilon=1e-8)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x**2)
        opt.apply_gradients([(tape.gradient(loss, x), x)])
        x
        """,
        None,
    ),
    (
        "clip the norm of all gradients",
        """
        (x**2).sum().backward()
        ms.optim.clip_grad_norm([x], 1.0)
        x.grad
        """,
        """
        (x**2).sum().backward()
        torch.nn.utils.clip_grad_norm_([x], 1.0)
        x.grad
        """,
        """
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x**2)
        g = tape.gradient(loss, x)
        tf.clip_by_global_norm([g], 1.0)[0][0]
        """,
        None,
    ),
    (
        "cross-entropy of logits",
        "ms.nn.cross_entropy(X, labels)",
        "F.cross_entropy(X, labels)",
        """
        tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels, X))
        """,
        """
        logp = jax.nn.log_softmax(X)
        -jnp.take_along_axis(logp, labels[:, None], 1).mean()
        """,
    ),
    (
        "look up rows",
        "ms.take(X, labels, axis=0)",
        "X[labels]",
        "tf.gather(X, labels)",
        "X[labels]",
    ),
    (
        "add into rows",
        "ms.index_add(X, labels, np.ones((3, 2)))",
        """
        X.index_add(0, labels,
                    torch.ones((3, 2), dtype=X.dtype))
        """,
        """
        tf.tensor_scatter_nd_add(
            X, labels[:, None], tf.ones((3, 2), X.dtype))
        """,
        "X.at[labels].add(jnp.ones((3, 2)))",
    ),
    (
        "join",
        "ms.concatenate([X, X], axis=1)",
        "torch.cat([X, X], dim=1)",
        "tf.concat([X, X], axis=1)",
        "jnp.concatenate([X, X], axis=1)",
    ),
    (
        "compare with finite differences",
        "ms.gradcheck(ms.tanh, x)",
        "torch.autograd.gradcheck(torch.tanh, x)",
        """
        exact, near = tf.test.compute_gradient(tf.tanh, [x])
        np.allclose(exact, near, atol=1e-6)
        """,
        """
        from jax.test_util import check_grads
        check_grads(jnp.tanh, (x,), order=1) is None
        """,
    ),
    (
        "an operation of your own",
        """
        @ms.primitive
        def cube(x):
            return x**3
        @cube.vjp
        def _(g, need, x):
            return 3 * g * x**2
        ms.grad(cube(x).sum(), x)
        """,
        """
        class Cube(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x**3
            @staticmethod
            def backward(ctx, g):
                return 3 * g * ctx.saved_tensors[0]**2
        torch.autograd.grad(Cube.apply(x).sum(), x)[0]
        """,
        """
        @tf.custom_gradient
        def cube(x):
            return x**3, lambda g: 3 * g * x**2
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(cube(x))
        tape.gradient(y, x)
        """,
        """
        @jax.custom_vjp
        def cube(x):
            return x**3
        cube.defvjp(lambda x: (cube(x), x),
                    lambda x, g: (3 * g * x**2,))
        jax.grad(lambda x: cube(x).sum())(x)
        """,
    ),
]

LIBRARIES = "minisparse", *TITLES


def cell(row, library):
    """Return the code of a row for a library, or None."""
    code = row[1 + LIBRARIES.index(library)]
    return code and textwrap.dedent(code).strip()


def value(row, library):
    """Run a cell; return the value of its last line as an array, and where A has entries."""
    names = {}
    exec(COMMON + SETUP[library], names)
    *body, last = ast.parse(cell(row, library)).body
    exec(compile(ast.Module(body, []), row[0], "exec"), names)
    result = eval(compile(ast.Expression(last.value), row[0], "eval"), names)
    for name in ("to_dense", "todense"):  # of a sparse result
        if hasattr(result, name):
            result = getattr(result, name)()
    if type(result).__name__ == "SparseTensor":
        result = names["tf"].sparse.to_dense(result)
    if hasattr(result, "detach"):
        result = result.detach()
    return np.asarray(result), (names["rows"], names["cols"])


def table(library):
    """Return a table in Markdown: what is wanted, the library's code, minisparse's."""

    def block(code):
        if code is None:
            return "–"
        return "\n    ".join(["```python", *code.splitlines(), "```"])

    lines = ["````{list-table}", ":header-rows: 1", ":class: calls", ""]
    lines += ["* - ", f"  - {TITLES[library]}", "  - minisparse"]
    for row in ROWS:
        lines += [f"* - {row[0]}", *(f"  - {block(cell(row, x))}" for x in (library, "minisparse"))]
    return "\n".join([*lines, "````", ""])
