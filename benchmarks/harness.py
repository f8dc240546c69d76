"""Processes that take turns, what they run on, and bars that are met or missed."""

import contextlib
import gc
import importlib.metadata
import importlib.util
import multiprocessing
import os
import pathlib
import platform
import subprocess
import sys
import time
import traceback
import warnings
from unittest import mock

import numpy as np

warnings.filterwarnings("ignore", message="Sparse (CSR|invariant)")  # PyTorch's

PASSIVE = {"OMP_WAIT_POLICY": "passive", "OPENBLAS_THREAD_TIMEOUT": "4"}
"""Threads that wait sleep: spinning ones would take the cores from the peer whose turn it is."""


def quartile(seconds):
    """Return the lower quartile: what a noisy machine does when it is not disturbed."""
    return sorted(seconds)[len(seconds) // 4]


def mean(ratios):
    """Return the geometric mean."""
    return float(np.exp(np.mean(np.log(ratios))))


def slope(x, y):
    """Return the exponent p of the power law y ~ x^p through the points, by least squares."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def aligned(array):
    """Return a copy in C order that begins at a cache line."""
    block = np.empty(array.nbytes + 64, np.uint8)
    start = -block.ctypes.data % 64
    out = block[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def installed(package):
    """Return whether `package` can be imported; say so if not."""
    found = importlib.util.find_spec(package) is not None
    if not found:
        print(f"skipped: {package} is not installed")
    return found


def describe():
    """Print the processor, Numba's threading layer, and the versions."""
    model = platform.processor() or platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":")[1].strip() if names else model
    code = """if True:
        import numba
        @numba.njit(parallel=True)
        def f(n):
            total = 0
            for i in numba.prange(n):
                total += i
            return total
        f(9)
        print(numba.threading_layer())"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    versions = [f"Python {platform.python_version()}"]
    for name in ("numpy", "scipy", "numba", "torch", "jax", "tensorflow-cpu", "mkl", "autograd"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    print(f"{model}, {os.cpu_count()} cores; Numba's threading layer: {done.stdout.strip()}")
    print(", ".join(versions))
    print("lower quartiles, in turns; a ratio says how many times as long the peer takes.")


def bar(what, figure, wanted, at_most=False):
    """Print whether a bar is met, with the figure; return it as a record."""
    met = figure <= wanted if at_most else figure >= wanted
    verdict, way = "met" if met else "MISSED", "at most" if at_most else "at least"
    print(f"  {verdict:6} {what}: {figure:.2f} ({way} {wanted:g})")
    return {"bar": what, "figure": figure, "wanted": wanted, "met": bool(met)}


# ------------------------------------------------------------------------------------------ turns


def serve(make, threads, pipe):
    """Live in a process: make what is asked for, time it, call it, until there is no more."""
    if hasattr(os, "sched_setaffinity"):  # whatever a peer starts, it has `threads` cores
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    calls = {}
    for verb, *args in iter(pipe.recv, None):
        try:
            if verb == "make":
                calls = None
                gc.collect()
                calls = make(*args, threads)
                answer = list(calls)
            elif verb == "call":
                answer = calls[args[0]]()
            else:
                answer = turn(calls[args[0]])
        except Exception as error:  # the peer's own trouble is a line in the table, not the end
            if "BENCHMARKS_DEBUG" in os.environ:
                traceback.print_exc()
            answer = f"{type(error).__name__}: {error}".split("\n")[0]
        pipe.send(answer)


def clocked(call):
    """Return how long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def others(pids):
    """Return the processor seconds that other processes have used, by Linux; else NaN."""
    try:
        whole = pathlib.Path("/proc/stat").read_text().split()[1:4]  # user, nice, system
        parts = [pathlib.Path(f"/proc/{pid}/stat").read_text().split(")")[1] for pid in pids]
    except OSError:
        return float("nan")
    own = sum(int(ticks) for part in parts for ticks in part.split()[11:13])
    return (sum(map(int, whole)) - own) / os.sysconf("SC_CLK_TCK")


def turn(call):
    """Return how long calls of one turn take, in some 20 milliseconds.

    The first one finds the caches full of what others did, and on some machines idle memory taken
    back, as happens in no training loop; unless it is very long it does not count.
    """
    first = clocked(call)
    if first > 0.5:
        return [first]
    seconds = []
    while len(seconds) < 2 or (sum(seconds) < 0.02 and len(seconds) < 50):
        seconds.append(clocked(call))
    return seconds


class Turns:
    """A process for each of several peers, which are timed in turns; a context manager.

    Parameters
    ----------
    makers : dict of {name: function}
        The function runs in the peer's process, with the arguments given to :meth:`make` and the
        number of threads. It checks its own results and returns {kind: call}; what it raises is
        the reason in the table why this peer has no figure. It must be picklable.
    threads : int

    Attributes
    ----------
    disturbed : str
        A line that says so, if other processes were busy during the last :meth:`measure`.
    """

    def __init__(self, makers, threads):
        self.makers, self.threads, self.running = makers, threads, {}
        self.kinds, self.reasons, self.disturbed = {}, {}, ""
        counts = {f"{name}_NUM_THREADS": str(threads) for name in ("OMP", "MKL", "OPENBLAS")}
        self.environment = PASSIVE | counts

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name in list(self.running):
            self.stop(name)

    def stop(self, name):
        process, pipe = self.running.pop(name)
        with contextlib.suppress(OSError):  # it died
            pipe.send(None)
        process.join(10)
        if process.is_alive():
            process.kill()

    def ask(self, name, *order):
        """Send an order to a peer and return its answer; a string says what went wrong."""
        if name not in self.running:
            spawn = multiprocessing.get_context("spawn")
            pipe, other = spawn.Pipe()
            args = self.makers[name], self.threads, other
            process = spawn.Process(target=serve, args=args, daemon=True)
            with mock.patch.dict(os.environ, self.environment):
                process.start()
            other.close()  # so that the end of the process ends the pipe
            self.running[name] = process, pipe
        try:
            self.running[name][1].send(order)
            return self.running[name][1].recv()
        except (EOFError, OSError):
            self.stop(name)
            return "its process died"

    def make(self, *args):
        """Let every peer prepare itself, one after the other, undisturbed."""
        self.kinds, self.reasons = {}, {}
        for name in self.makers:
            answer = self.ask(name, "make", *args)
            (self.reasons if isinstance(answer, str) else self.kinds)[name] = answer

    def measure(self, *kinds, names=None, budget=4.0, rounds=(4, 60)):
        """Time the calls of these kinds.

        Parameters
        ----------
        kinds : str
        names : sequence of str, optional
            Only these peers.
        budget : float
            About so many seconds for each kind.
        rounds : (int, int)
            At least and at most so many turns.

        Returns
        -------
        dict of {(peer, kind): seconds}, the lower quartiles
        """
        times, begin = {}, time.perf_counter()
        pids = [os.getpid(), *(process.pid for process, _ in self.running.values())]
        before = others(pids)
        for kind in kinds:
            able = [n for n in names or self.kinds if kind in self.kinds.get(n, ())]
            start = time.perf_counter()
            seconds = {name: self.ask(name, "time", kind) for name in able}
            once = time.perf_counter() - start
            for _ in range(int(np.clip(budget / max(once, 1e-6), *rounds)) - 1):
                for name in able:
                    if not isinstance(seconds[name], str):
                        more = self.ask(name, "time", kind)
                        seconds[name] = more if isinstance(more, str) else seconds[name] + more
            for name, answer in seconds.items():
                if isinstance(answer, str):
                    self.reasons[name] = answer
                else:
                    times[name, kind] = quartile(answer)
        cores = (others(pids) - before) / (time.perf_counter() - begin)
        self.disturbed = f"  (disturbed: other processes used {cores:.1f} cores)\n"
        self.disturbed *= cores > 0.1
        return times
