"""Memory and endurance, each in a process of its own: what the fixed pattern promises."""

import os

import pytest

pytestmark = pytest.mark.compiled

PEAK = r"""
import re
import numpy as np
import minisparse as ms

def peak():  # of this program alone: getrusage would count what the process was before it
    with open("/proc/self/status") as status:
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read())[1]) * 1024 / 1e6

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
    in_new_process(f"{PEAK}\nstep(3, 1, 1, optimizer=True)\nstep(3, 1, 2)")  # compiles, and caches
    printed = in_new_process(f"{PEAK}\n{call}\nprint(peak())", timeout=300)
    assert float(printed) < limit


@linux
def test_sddmm_memory(in_new_process):
    """CASES 6: five entries of a 20,000 × 20,000 matrix; dense, it would take 3.2 GB."""
    printed = in_new_process(
        f"""{PEAK}
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
        f"""{PEAK}
import gc, os
if not {collect}:
    gc.disable()
net = ms.nn.Sequential(ms.nn.SparseLinear(500, 300, fan_in=20, rng=0), ms.nn.Tanh(),
                       ms.nn.SparseLinear(300, 10, density=0.5, rng=1))
opt = ms.optim.Adam(net.parameters(), lr=1e-3)
x, y = np.ones((128, 500), np.float32), np.arange(128) % 10
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
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
