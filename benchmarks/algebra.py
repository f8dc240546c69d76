"""Sparse with sparse, a solve with its gradients, and graph attention, beside SciPy and PyTorch."""

import numpy as np
import scipy.sparse as sp

from minisparse import Pattern

from .harness import Turns, bar

PARTS = "product", "sum", "solve", "attention"
HEADS, WIDTH = 8, 16


def matrices(part):
    """Return SciPy matrices of the patterns and numbers that every peer starts from."""
    rng = np.random.default_rng(0)
    if part == "solve":
        step = sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(300, 300))
        eye = sp.eye_array(300)
        return [(sp.kron(step, eye) + sp.kron(eye, step)).tocsr()]
    n = 20_000 if part == "product" else 100_000
    patterns = (Pattern.random((n, n), fan_in=10, rng=rng) for _ in range(2))
    return [p.to_scipy(rng.normal(size=p.nnz)) for p in patterns]


def layer(nodes):
    """Return the features, weights and score vectors of the attention layer."""
    rng = np.random.default_rng(1)
    shapes = (nodes, WIDTH), (HEADS, WIDTH, WIDTH), (HEADS, 2, WIDTH)
    x, w, s = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return x, w / 4, s


def ours(part, threads):
    """Return our calls of a part."""
    import minisparse as ms

    ms.set_num_threads(threads)
    A, *others = matrices(part)
    S, *rest = (ms.SparseTensor.from_scipy(M, requires_grad=True) for M in (A, *others))
    if part in ("product", "sum"):
        (T,) = rest

        def forward():
            with ms.no_grad():
                return S @ T if part == "product" else S + T

        if part == "sum":
            return {"forward": forward, "checked": lambda: forward().to_scipy()}
        C = S @ T
        G = np.random.default_rng(2).normal(size=C.nnz)

        def gradients():
            return ms.grad(C.values, [S, T], G, retain_graph=True)

        def checked():
            """The product, and <G, A T> + <G, S B> for the operands themselves: 2 <G, A B>."""
            da, db = gradients()
            both, one = da @ S.values.data + db @ T.values.data, G @ C.values.data
            assert abs(both - 2 * one) < 1e-9 * np.abs(G).sum(), "wrong gradients"
            return C.to_scipy()

        return {"forward": forward, "gradients": gradients, "checked": checked}
    if part == "solve":
        W = ms.SparseParameter(A)
        b = ms.tensor(np.random.default_rng(2).normal(size=A.shape[0]), requires_grad=True)

        def solve():
            W.free.data = W.free.data  # seen as other values, so another factorisation
            return ms.grad(ms.spsolve(W, b), [W, b], np.ones(b.shape))

        return {"forward": solve, "checked": solve}
    x, *weights = layer(A.shape[0])
    w, s = (ms.tensor(a, requires_grad=True) for a in weights)
    one = np.ones((len(x), 1), np.float32)

    def attend():
        heads = []
        for i in range(HEADS):
            h = x @ w[i]
            scores = h @ s[i].T
            u = ms.concatenate([scores[:, :1], one], axis=1)
            v = ms.concatenate([one, scores[:, 1:]], axis=1)
            logits = ms.sddmm(u, v, S.pattern)
            weight = logits.with_values(ms.leaky_relu(logits.values, negative_slope=0.2))
            heads.append(weight.row_softmax() @ h)
        y = ms.concatenate(heads, axis=1)
        return y.data, *ms.grad(y, [w, s], np.ones(y.shape, np.float32))

    return {"forward": attend, "checked": attend}


def scipy(part, threads):
    """Return SciPy's calls of a part: it has one thread and no gradients of its own."""
    from scipy.sparse.linalg import splu

    import minisparse as ms

    A, *others = matrices(part)
    if part == "attention":
        raise ValueError("not a job for SciPy")
    if part == "solve":
        pattern, columns = Pattern.from_scipy(A), A.tocsc()
        b = np.random.default_rng(2).normal(size=A.shape[0])

        def solve():
            factor = splu(columns)
            x, back = factor.solve(b), factor.solve(np.ones(b.shape), "T")
            return ms.sddmm(-back, x, pattern).values.data, back

        return {"forward": solve, "checked": solve}
    (B,) = others
    call = (lambda: A @ B) if part == "product" else (lambda: A + B)
    return {"forward": call, "checked": call}


def torch(part, threads):
    """Return PyTorch's attention by gather and index_add."""
    if part != "attention":
        raise ValueError("measured on attention only")
    import torch

    torch.set_num_threads(threads)
    pattern = Pattern.from_scipy(matrices(part)[0])
    rows, columns = (torch.from_numpy(a.astype(np.int64)) for a in (pattern.rows, pattern.indices))
    x, *weights = map(torch.from_numpy, layer(pattern.shape[0]))
    w, s = (a.requires_grad_() for a in weights)

    def attend():
        heads = []
        for i in range(HEADS):
            h = x @ w[i]
            scores = h @ s[i].T
            logits = torch.nn.functional.leaky_relu(scores[rows, 0] + scores[columns, 1], 0.2)
            top = torch.full((len(x),), -torch.inf)
            top = top.scatter_reduce(0, rows, logits.detach(), "amax")
            e = torch.exp(logits - top[rows])
            weight = e / torch.zeros(len(x)).index_add(0, rows, e)[rows]
            messages = weight[:, None] * h[columns]
            heads.append(torch.zeros(len(x), WIDTH).index_add(0, rows, messages))
        y = torch.cat(heads, 1)
        gradients = torch.autograd.grad(y, [w, s], torch.ones_like(y))
        return tuple(a.detach().numpy() for a in (y, *gradients))

    return {"forward": attend, "checked": attend}


def close(a, b):
    """Return whether two results are the same, but for rounding."""
    if sp.issparse(a):
        return abs(a - b).max() < 1e-9
    return all(np.abs(p - q).max() < 1e-3 * np.abs(q).max() for p, q in zip(a, b, strict=True))


def run(quick=False, threads=None):
    """Print the times of each part and the bars; return both."""
    threads, bars, times = (threads or [2])[0], [], {}
    with Turns({"minisparse": ours, "scipy": scipy, "torch": torch}, threads) as turns:
        for part in PARTS:
            turns.make(part)
            peer = next(name for name in turns.kinds if name != "minisparse")
            a, b = (turns.ask(name, "call", "checked") for name in ("minisparse", peer))
            assert close(a, b), f"{part}: {peer} has another result: {a} {b}"
            del a, b
            found = turns.measure("forward", "gradients", budget=3 if quick else 8)
            print(f"\n{part}, threads {threads}{turns.disturbed}")
            for (name, kind), seconds in found.items():
                print(f"  {name:12}{kind:10}{seconds * 1e3:10.2f} ms")
                times[f"{part} {name} {kind}"] = seconds
            mine, its = found["minisparse", "forward"], found[peer, "forward"]
            if part == "solve":
                bars.append(bar("solve with gradients over SciPy's", mine / its, 1.3, at_most=True))
            else:
                wanted = {"product": 4, "sum": 3, "attention": 3}[part]
                bars.append(bar(f"{part}: {peer} over ours", its / mine, wanted))
            if part == "product":
                both = found["minisparse", "gradients"]
                bars.append(bar("gradients over product", both / mine, 3, at_most=True))
    return {"algebra": times, "bars": bars}
