"""Memory and endurance, each in a process of its own: what the fixed pattern promises."""

import os
import textwrap

import pytest

pytestmark = pytest.mark.compiled

MEMORY = r"""
import os, re
import numpy as np
import minisparse as ms

def peak():  # of this program alone: getrusage would count what the process was before it
    with open("/proc/self/status") as status:
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read())[1]) * 1024 / 1e6

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def step(n, fan_in, k, optimizer=False):
    layer = ms.nn.SparseLinear(n, n, fan_in=fan_in, bias=False, rng=0)
    X = ms.tensor(np.ones((n, k), np.float32), requires_grad=True)
    opt = ms.optim.Adam([layer.weight]) if optimizer else None
    Y = layer.weight @ X
    Y.backward(np.ones((n, k), np.float32))
    assert X.grad.shape == (n, k) and layer.weight.grad.shape == (n * fan_in,)
    if opt:
        opt.step()
"""


linux = pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="Linux tells the peak memory of a program"
)


@linux
@pytest.mark.parametrize(
    ("call", "limit"),
    [
        ("step(50_000, 1, 1)", 330),  # CASES 5; most of it is NumPy, SciPy and Numba themselves
        ("step(100_000, 100, 64)", 800),
        ("step(1_000_000, 10, 16, optimizer=True)", 1000),
    ],
)
def test_peak_memory(in_new_process, call, limit):
    """CASES 5: memory of forward and backward in proportion to what is stored, in MB."""
    # The first compiles, and caches.
    in_new_process(f"{MEMORY}\nstep(3, 1, 1, optimizer=True)\nstep(3, 1, 2)")
    printed = in_new_process(f"{MEMORY}\n{call}\nprint(peak())")
    assert float(printed) < limit


@linux
def test_sddmm_memory(in_new_process):
    """CASES 6: five entries of a 20,000 × 20,000 matrix; dense, it would take 3.2 GB."""
    printed = in_new_process(
        f"""{MEMORY}
n = 20_000
pattern = ms.Pattern.from_coords([0, 5, 100, 7_000, n - 1], [3, n - 1, 0, 7_000, 12], (n, n))
U, V = (ms.tensor(np.ones((n, 4)), requires_grad=True) for _ in range(2))
ms.sddmm(U, V, pattern).values.sum().backward()
assert U.grad.sum() == V.grad.sum() == 20
print(peak())
"""
    )
    assert float(printed) < 330


@linux
@pytest.mark.parametrize("collect", [True, False])
def test_a_thousand_steps_take_no_more_memory(in_new_process, collect):
    """CASES 8: flat after the first few steps, also with the garbage collector off."""
    printed = in_new_process(
        f"""{MEMORY}
import gc
if not {collect}:
    gc.disable()
net = ms.nn.Sequential(ms.nn.SparseLinear(500, 300, fan_in=20, rng=0), ms.nn.Tanh(),
                       ms.nn.SparseLinear(300, 10, density=0.5, rng=1))
opt = ms.optim.Adam(net.parameters(), lr=1e-3)
x, y = np.ones((128, 500), np.float32), np.arange(128) % 10
for i in range(1050):
    opt.zero_grad()
    loss = ms.nn.cross_entropy(net(x), y)
    loss.backward()
    opt.step()
    if i == 49:
        start = resident()
assert net[0].weight.nnz == 6000
print(resident() - start)
"""
    )
    assert float(printed) < 4e6


# What a step makes, by subject: `start` is run once, `step` again and again.
STEPS = {
    "sums, products and attention": (
        """
p, q = (ms.Pattern.random((60, 60), fan_in=5, rng=seed) for seed in (0, 1))
V = ms.SparseParameter((q, np.ones(q.nnz)))
X = ms.tensor(np.ones((60, 8)), requires_grad=True)
""",
        """
S = ms.sddmm(X, X, p).row_softmax()
T = (S @ V + S * 2 - V).scale(rows=np.ones(60))[::2]
whole = ms.block_diag([ms.block([[T, None], [S, V]]), T])
out = whole.row_max().sum() + whole.T.row_logsumexp().sum() + (S @ X).sum() + whole.diagonal().sum()
out.backward()
X.grad = V.grad = None
""",
    ),
    "solves with changing values": (
        """
W = ms.SparseParameter(sp.diags_array([1.0, 4.0, 1.0], offsets=[-1, 0, 1], shape=(300, 300)))
b = ms.tensor(np.ones(300), requires_grad=True)
opt = ms.optim.SGD([W], lr=1e-9)
""",
        """
out = ms.spsolve(W, b).sum() + ms.spsolve(W.T, b).sum() + ms.spsolve(2 * W, b).sum()
out.backward()
opt.step()
W.grad = b.grad = None
assert len(ms.linalg._factors) <= 2, "one of a parameter, and one of what is alive of this step"
""",
    ),
    "rows of a table": (
        """
table = ms.nn.Embedding(3000, 8, sparse=True, rng=0)
opt = ms.optim.Adam([table.weight])
rng = np.random.default_rng(0)
""",
        """
out = (table(rng.integers(3000, size=(5, 7))) ** 2).sum()
out.backward()
ms.optim.clip_grad_norm([table.weight], 1.0)
opt.step()
opt.zero_grad()
""",
    ),
    "second order": (
        """
W = ms.SparseParameter((ms.Pattern.random((50, 40), fan_in=4, rng=0), np.ones(200)))
x = np.ones((40, 3))
def f(W):
    return (ms.tanh(W @ x) ** 2).sum()
""",
        """
out = f(W)
g = ms.grad(out, W, create_graph=True)
(g * g).sum().backward()
ms.hvp(f, W, np.ones(200)), ms.vjp(f, W)[1](1.0), ms.jvp(f, W, np.ones(200))
W.grad = None
del g
""",
    ),
    "gradient checks": (
        "W = ms.SparseParameter((ms.Pattern.diagonal(3), np.ones(3)))\nx = np.ones(3)",
        "out = W @ x\nms.gradcheck(lambda W, x: ms.exp(W @ x), [W, x], order=1 + (step % 10 == 0))",
    ),
    "files": (
        """
net = ms.nn.Sequential(ms.nn.SparseLinear(90, 80, fan_in=9, rng=0), ms.nn.Dropout(0.5, rng=0))
opt = ms.optim.Adam(net.parameters())
path = os.path.join(tempfile.mkdtemp(), "state")
""",
        """
opt.zero_grad()
out = net(np.ones((2, 90))).sum()
out.backward()
opt.step()
ms.save(path, {"model": net.state_dict(), "optimizer": opt.state_dict()})
state = ms.load(path)
net.load_state_dict(state["model"]), opt.load_state_dict(state["optimizer"])
state = pickle.loads(pickle.dumps(net))
del state
gc.collect(0)  # NumPy reads a header by ast.literal_eval, whose functions know one another
""",
    ),
    "patterns that come and go": (
        "V = ms.SparseParameter((ms.Pattern.random((60, 60), fan_in=5, rng=0), np.ones(300)))",
        """
A = ms.SparseParameter((ms.Pattern.random((60, 60), fan_in=3, rng=step), np.ones(180)))
out = ((A @ V + A) @ np.ones(60)).sum() + ms.block([[V, A]]).T.row_softmax().values.sum()
out.backward()
V.grad = None
del A
assert len(V.pattern._combined) + len(V.pattern.T._combined) == 0, "gone with the other pattern"
""",
    ),
    "the layer inside PyTorch": (
        """
import torch
from minisparse.interop.torch import SparseLinear
layer = SparseLinear(60, 50, fan_in=5, rng=0)
opt = torch.optim.SGD(layer.parameters(), lr=1e-3)
""",
        """
opt.zero_grad()
out = (layer(torch.ones(9, 60, requires_grad=True)) ** 2).sum()
(g,) = torch.autograd.grad(out, [layer.values], create_graph=True)
(g * g).sum().backward()
opt.step()
opt.zero_grad()
del g
""",
    ),
}


@linux
@pytest.mark.parametrize("subject", STEPS)
def test_a_thousand_steps_of_each_kind(in_new_process, subject):
    """CASES 8: flat with the garbage collector off, and what a step made dies at once."""
    start, step = STEPS[subject]
    if "PyTorch" in subject:
        pytest.importorskip("torch", reason="the layer for PyTorch needs PyTorch")
    printed = in_new_process(
        f"""{MEMORY}
import gc, pickle, tempfile, weakref
import scipy.sparse as sp
from minisparse.kernels import memory
{start}
for step in range(1100):
    if step == 99:
        gc.collect()
        gc.disable()
        begun = resident()
{textwrap.indent(step, "    ")}
    if step > 99:
        died = weakref.ref(out)
        assert died() is not None
        del out
        assert died() is None, "a reference cycle"
grown = resident() - begun
found = gc.collect()
assert found == 0, (found, "objects in cycles")
assert memory._pool.idle_bytes <= memory.MAX_IDLE_BYTES
print(grown)
"""
    )
    assert float(printed) < 4e6
