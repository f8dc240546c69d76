"""Sparse with sparse, solves, and graph attention, against SciPy and PyTorch in turns."""

import numpy as np
import scipy.sparse as sp
from scipy.sparse.linalg import splu

import minisparse as ms

from .harness import take_turns


def run(threads=2, repeats=15):
    """Print a line for each bar and return the seconds measured."""
    ms.set_num_threads(threads)
    parts = product(repeats), addition(repeats), solve(repeats), attention(repeats, threads)
    return {name: seconds for part in parts for name, seconds in part.items()}


def report(name, times, over, under, bar, most=False):
    """Print times and the ratio that the bar is about."""
    ratio = times[over] / times[under]
    met = "met" if (ratio <= bar if most else ratio >= bar) else "MISSED"
    listed = ", ".join(f"{key} {1e3 * seconds:.2f} ms" for key, seconds in times.items())
    print(f"{name}: {listed}; {over} / {under} = {ratio:.2f} ({met}: {bar})")


def random(n, fan_in, rng):
    pattern = ms.Pattern.random((n, n), fan_in=fan_in, rng=rng)
    return ms.SparseTensor(pattern, ms.tensor(rng.normal(size=pattern.nnz), requires_grad=True))


def product(repeats, n=20_000, fan_in=10):
    """The product of two sparse matrices and its two gradients."""
    rng = np.random.default_rng(0)
    A, B = random(n, fan_in, rng), random(n, fan_in, rng)
    P, Q = A.to_scipy(), B.to_scipy()
    C = A @ B
    assert abs(C.to_scipy() - P @ Q).max() < 1e-12
    G = rng.normal(size=C.nnz)

    def ours():
        with ms.no_grad():
            return A @ B

    def gradients():
        return ms.grad(C.values, [A, B], G, retain_graph=True)

    dense = gradients()[0]  # checked on some entries
    some = rng.integers(A.nnz, size=50)
    G_C = C.pattern.to_scipy(G)
    for e in some:
        i, j = A.pattern.rows[e], A.pattern.indices[e]
        assert abs(dense[e] - (G_C[[i]] @ Q[[j]].T).toarray().item()) < 1e-10
    times = take_turns(repeats, scipy=lambda: P @ Q, ours=ours, gradients=gradients)
    report("A @ B", times, "scipy", "ours", 4)
    report("A @ B", times, "gradients", "ours", 3, most=True)
    return {f"product {key}": seconds for key, seconds in times.items()}


def addition(repeats, n=100_000, fan_in=10):
    """The sum of two matrices of a million entries each."""
    rng = np.random.default_rng(1)
    A, B = random(n, fan_in, rng), random(n, fan_in, rng)
    P, Q = A.to_scipy(), B.to_scipy()

    def ours():
        with ms.no_grad():
            return A + B

    assert abs(ours().to_scipy() - (P + Q)).max() == 0
    times = take_turns(repeats, scipy=lambda: P + Q, ours=ours)
    report("A + B", times, "scipy", "ours", 3)
    return {f"sum {key}": seconds for key, seconds in times.items()}


def solve(repeats, side=300):
    """A solve with both gradients, on the Poisson matrix of a square grid."""
    step = sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(side, side))
    eye = sp.eye_array(side)
    A = (sp.kron(step, eye) + sp.kron(eye, step)).tocsc()
    W = ms.SparseParameter(A)
    b = ms.tensor(np.random.default_rng(2).normal(size=len(W.shape) and W.shape[0]))
    b.requires_grad = True

    def ours():
        W.free.data = W.free.data  # other values, so another factorisation
        return ms.grad(ms.spsolve(W, b), [W, b], np.ones(b.shape))

    def scipy():
        factor = splu(A)
        x, back = factor.solve(b.data), factor.solve(np.ones(b.shape), "T")
        return ms.sddmm(-back, x, W.pattern).values.data, back

    for got, expected in zip(ours(), scipy(), strict=True):
        assert np.abs(got - expected).max() < 1e-6 * np.abs(expected).max()
    times = take_turns(max(repeats // 3, 3), scipy=scipy, ours=ours)
    report("spsolve", times, "ours", "scipy", 1.3, most=True)
    return {f"solve {key}": seconds for key, seconds in times.items()}


def attention(repeats, threads, nodes=100_000, fan_in=10, heads=8, width=16):
    """A graph-attention layer, forward and backward, one head after the other."""
    rng = np.random.default_rng(3)
    pattern = ms.Pattern.random((nodes, nodes), fan_in=fan_in, rng=rng)
    x = rng.normal(size=(nodes, width)).astype(np.float32)
    weights = rng.normal(size=(heads, width, width)).astype(np.float32) / 4
    scores = rng.normal(size=(heads, 2, width)).astype(np.float32)
    ours_w = ms.tensor(weights, requires_grad=True)
    ours_s = ms.tensor(scores, requires_grad=True)
    one = np.ones((nodes, 1), np.float32)

    def ours():
        ours_w.grad = ours_s.grad = None
        outs = []
        for head in range(heads):
            h = x @ ours_w[head]
            s = h @ ours_s[head].T
            u = ms.concatenate([s[:, :1], one], axis=1)
            v = ms.concatenate([one, s[:, 1:]], axis=1)
            logits = ms.sddmm(u, v, pattern)
            weight = logits.with_values(ms.leaky_relu(logits.values, 0.2)).row_softmax()
            outs.append(weight @ h)
        total = ms.concatenate(outs, axis=1)
        total.backward(np.ones(total.shape, np.float32))
        return total

    calls = {"ours": ours}
    try:
        import torch
    except ImportError:
        print("attention: torch is not installed")
    else:
        torch.set_num_threads(threads)
        rows, columns = (
            torch.from_numpy(a.astype(np.int64)) for a in (pattern.rows, pattern.indices)
        )
        torch_x = torch.from_numpy(x)
        torch_w = torch.tensor(weights, requires_grad=True)
        torch_s = torch.tensor(scores, requires_grad=True)

        def gather():
            torch_w.grad = torch_s.grad = None
            outs = []
            for head in range(heads):
                h = torch_x @ torch_w[head]
                s = h @ torch_s[head].T
                logits = torch.nn.functional.leaky_relu(s[rows, 0] + s[columns, 1], 0.2)
                top = torch.full((nodes,), -torch.inf)
                top = top.scatter_reduce(0, rows, logits.detach(), "amax")
                e = torch.exp(logits - top[rows])
                weight = e / torch.zeros(nodes).index_add(0, rows, e)[rows]
                messages = weight[:, None] * h[columns]
                outs.append(torch.zeros(nodes, width).index_add(0, rows, messages))
            total = torch.cat(outs, 1)
            total.backward(torch.ones_like(total))
            return total

        assert np.abs(gather().detach().numpy() - ours().data).max() < 1e-4
        for a, b in ((torch_w, ours_w), (torch_s, ours_s)):
            assert np.abs(a.grad.numpy() - b.grad).max() < 1e-3 * np.abs(b.grad).max()
        calls["torch"] = gather
    times = take_turns(max(repeats // 3, 3), **calls)
    if "torch" in times:
        report("attention", times, "torch", "ours", 3)
    return {f"attention {key}": seconds for key, seconds in times.items()}
