"""On a GPU: the device tests, then products and training steps beside CuPy's and PyTorch's.

    python -m benchmarks.gpu [--json FILE]

Times are those of CUDA events, without what the host does meanwhile unless the device waits for it:
the lower quartile of repeated calls after a few that do not count. Every peer's results are
compared with float64 before. A ratio says how many times as long a peer takes as minisparse.
"""

import argparse
import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

import minisparse as ms

from . import steps
from .harness import bar, clocked, mean, quartile
from .kernels import compare
from .peers import ExpertPyTorch, ExpertPyTorchNet, MinisparseNet
from .steps import SIZES, build
from .workloads import WORKLOADS, Workload, read, write

LARGE = (
    Workload("w640k", (655_360, 655_360), 16, 64),
    Workload("w10m", (10_000_000, 10_000_000), 10, 16),
    Workload("powerlaw1m", (1_000_000, 1_000_000), 13, 64, "zipf"),
)
"""Ten times as large as the largest that a CPU is measured with."""


TESTED = "cuda", "devices"
"""The tests that are run before: of these names."""


class Device:
    """Where things run, and its clock: a GPU's events; the host's clock on a CPU, to test this."""

    def __init__(self, name):
        self.name = name

    def seconds(self, call):
        """Return how long one call takes."""
        if self.name == "cpu":
            return clocked(call)
        import cupy

        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return cupy.cuda.get_elapsed_time(begin, end) / 1e3

    def quartile(self, call, repeats):
        for _ in range(5):
            call()
        return quartile([self.seconds(call) for _ in range(repeats)])


class Ours:
    """Through the public interface: ``W @ X`` and ``(W @ X).backward(G)``, on a device."""

    def __init__(self, problem, device):
        self.W = ms.SparseParameter((problem.pattern, problem.values)).to(device)
        self.X, self.G = (ms.tensor(a).to(device) for a in (problem.x, problem.g))
        self.X.requires_grad = True

    def forward(self):
        with ms.no_grad():
            return self.W @ self.X

    def both(self):
        self.W.grad = self.X.grad = None
        Y = self.W @ self.X
        Y.backward(self.G)
        return Y, self.W.grad, self.X.grad


class Expert(ExpertPyTorch):
    """The expert PyTorch of the other benchmarks, its tensors on the device."""

    def __init__(self, problem, device):
        import torch

        with torch.device(device):
            super().__init__(problem, torch.get_num_threads())

    def forward(self):
        with self.torch.no_grad():
            return self.y()

    def both(self):
        self.weight.grad = self.x.grad = None
        y = self.y()
        y.backward(self.g)
        return y, self.weight.grad, self.x.grad


class CuSPARSE:
    """CuPy's product of a CSR matrix, which is cuSPARSE's SpMM."""

    def __init__(self, problem, device):
        import cupy
        from cupyx.scipy.sparse import csr_matrix

        p = problem.pattern
        arrays = map(cupy.asarray, (problem.values, p.indices, p.indptr))
        self.A, self.x = csr_matrix(tuple(arrays), shape=p.shape), cupy.asarray(problem.x)

    def forward(self):
        return self.A @ self.x


PEERS = {"minisparse": Ours, "cusparse": CuSPARSE, "expert torch": Expert}


def on_host(call):
    """Let a call return NumPy arrays, whatever library's it returns."""

    def moved(result):
        if isinstance(result, tuple):
            return [moved(part) for part in result]
        if isinstance(result, ms.Tensor):
            return result.to("cpu").numpy()
        for method in ("get", "detach", "cpu", "numpy"):  # CuPy's and PyTorch's
            result = getattr(result, method)() if hasattr(result, method) else result
        return result

    return lambda: moved(call())


def products(device, workload, peers, repeats):
    """Return {(peer, kind): seconds} and {peer: why it has none} for a workload."""
    times, reasons = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        write(workload, folder)
        problem, wanted = read(workload, folder)
    for name in peers:
        try:
            peer = PEERS[name](problem, device.name)
            calls = {k: getattr(peer, k) for k in ("forward", "both") if hasattr(peer, k)}
            compare(workload, problem, wanted, **{k: on_host(call) for k, call in calls.items()})
            for kind, call in calls.items():
                times[name, kind] = device.quartile(call, repeats)
        except Exception as error:  # a peer's own trouble is a line in the table, not the end
            if name == "minisparse":
                raise
            reasons[name] = f"{type(error).__name__}: {error}".split("\n")[0]
    return times, reasons


def bandwidth(device, nbytes):
    """Return the bytes a second that a copy of `nbytes` reads and writes."""
    x = ms.tensor(np.zeros(nbytes // 4, np.float32)).to(device.name)
    y = x.detach() * 1
    with ms.no_grad():

        def copy():
            y[...] = x

        return 2 * nbytes / device.quartile(copy, 20)


def traffic(workload, nnz):
    """Return the bytes of a product: every row of X that an entry asks for, indices, the result."""
    size = np.dtype(workload.dtype).itemsize
    return nnz * (workload.k * size + size + 4) + workload.shape[0] * (workload.k * size + 4)


class OursNet(MinisparseNet):
    """A network of ``ms.nn`` on the device."""

    def __init__(self, net, device):
        super().__init__(net, ms.get_num_threads())
        self.net.to(device)
        self.x = ms.tensor(np.ascontiguousarray(net.x)).to(device).T


class ExpertNet(ExpertPyTorchNet):
    def __init__(self, net, device):
        import torch

        with torch.device(device):
            super().__init__(net, torch.get_num_threads())


def training(device, widths, fan_in, batch, peers, repeats):
    """Return {peer: seconds} of a whole training step, after three losses were compared."""
    net, times = build(widths, fan_in, batch), {}
    oracle = steps.SciPyNet(net, dtype=np.float64)
    losses = [oracle.step() for _ in range(steps.CHECKED)]
    for name in peers:
        step = {"minisparse": OursNet, "expert torch": ExpertNet}[name](net, device.name).step
        got = [step() for _ in losses]
        np.testing.assert_allclose(got, losses, rtol=1e-3)
        times[name] = device.quartile(step, repeats)
    return times


def describe(device):
    """Print the card, the versions and the bandwidth of a copy; return the last."""
    speed = bandwidth(device, 1 << (24 if device.name == "cpu" else 30))
    with contextlib.suppress(ImportError):
        import cupy

        if device.name != "cpu":
            card = cupy.cuda.runtime.getDeviceProperties(0)
            print(card["name"].decode(), "compute capability", card["major"], card["minor"])
            print("CUDA", cupy.cuda.runtime.runtimeGetVersion(), "CuPy", cupy.__version__)
    print(f"a copy moves {speed / 1e9:.0f} GB/s")
    return speed


def run(device, workloads, sizes, peers=tuple(PEERS), repeats=30):
    """Print the tables and the bars; return all figures."""
    speed, results, ratios = describe(device), [], {}
    for workload in workloads:
        times, reasons = products(device, workload, peers, repeats)
        print(f"\n{workload}")
        moved = traffic(workload, workload.pattern().nnz)
        for (name, kind), s in times.items():
            ratio = s / times["minisparse", kind]
            share = f"{moved / s / speed:7.2f} of the copy's bandwidth" * (kind == "forward")
            print(f"  {name:13} {kind:8} {s * 1e3:9.3f} ms {ratio:6.2f} {share}")
            results.append({"workload": workload.name, "peer": name, "kind": kind, "seconds": s})
            ratios.setdefault((name, kind), []).append(ratio)
        for name, reason in reasons.items():
            print(f"  {name:13} {reason}")
    for size, (widths, fan_in, batch) in sizes.items():
        times = training(device, widths, fan_in, batch, [p for p in peers if p != "cusparse"], 20)
        print(f"\ntraining step, {size}: {'-'.join(map(str, widths))}")
        for name, s in times.items():
            print(f"  {name:13} {s * 1e3:9.3f} ms {s / times['minisparse']:6.2f}")
            results.append({"size": size, "peer": name, "kind": "step", "seconds": s})
    print("\nBars: the peer's time over minisparse's")
    bars = []
    if forward := ratios.get(("cusparse", "forward")):
        bars.append(bar("forward, cuSPARSE, the least", min(forward), 0.8))
        bars.append(bar("forward, cuSPARSE, geometric mean", mean(forward), 1))
    if both := ratios.get(("expert torch", "both")):
        bars.append(bar("both gradients, expert PyTorch, geometric mean", mean(both), 1))
    return {"copy": speed, "gpu": results, "bars": bars}


def main():
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--json", help="write all figures to this file")
    options = parser.parse_args()
    if not ms.cuda.is_available():
        sys.exit(ms.cuda.why_not())
    tests = [str(pathlib.Path(__file__).parents[1] / "tests" / f"test_{n}.py") for n in TESTED]
    failed = subprocess.run([sys.executable, "-m", "pytest", "-q", *tests]).returncode
    found = run(Device("cuda"), [*WORKLOADS.values(), *LARGE], SIZES)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(found, indent=1))
    sys.exit(failed)


if __name__ == "__main__":
    main()
