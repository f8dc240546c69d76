"""Threads, forks and new processes on each of Numba's threading layers, and the same bits in all.

The work is done once in this process and held to SciPy. A cell of the matrix is a process that does
it again, however it is disturbed, and finds the same bits. As a script this file is one cell:
``NUMBA_THREADING_LAYER=tbb python tests/test_processes.py fork_amid_kernels``.
"""

import asyncio
import collections
import contextlib
import contextvars
import ctypes
import faulthandler
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import minisparse as ms
from minisparse import kernels

pytestmark = pytest.mark.compiled

# The work: all that is dispatched in parallel, at sizes where it is ------------------------------

N = 4000


@functools.cache
def normal(seed, *shape, dtype=np.float32):
    """Numbers whose sums depend on their order."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@functools.cache
def patterns():
    """Two wide ones, two thin ones, and labels that tie the entries of the first."""
    made = [ms.Pattern.random((N, N), fan_in=f, rng=f) for f in (70, 69, 9, 8)]
    return *made, np.random.default_rng(0).integers(0, 50_000, made[0].nnz)


def results(layout=np.ascontiguousarray):
    """Every operation with its gradients: a dictionary of arrays."""
    wide, other, thin, thinner, labels = patterns()
    out = {}

    def leaf(seed, *shape):
        return ms.tensor(normal(seed, *shape), requires_grad=True)

    def record(name, y, *leaves):
        y.backward(layout(normal(100, *y.shape)))
        out[name] = y.detach().numpy()
        for i, t in enumerate(leaves):
            out[f"{name}: gradient {i}"], t.grad = t.grad, None

    a, b, c, d = (leaf(i, p.nnz) for i, p in enumerate((wide, other, thin, thinner)))
    A, B, C, D = (
        ms.SparseTensor(p, t) for p, t in ((wide, a), (other, b), (thin, c), (thinner, d))
    )
    for k in (16, 20):  # both gradients in one walk, and apart
        x = leaf(4, N, k)
        record(f"A X, k = {k}", A @ x, a, x)
        record(f"Aᵀ X, k = {k}", A.T @ x, a, x)
    record("A Xᵀ", A @ layout(normal(5, 64, N)).T, a)
    u, v = leaf(6, N, 20), leaf(7, N, 20)
    record("sddmm", ms.sddmm(u, v, wide).values, u, v)
    record("A + B", (A + B).values, a, b)
    record("row maxima", A.row_max(), a)
    record("softmax", A.row_softmax().values, a)
    record("C D", (C @ D).values, c, d)
    tied = ms.SparseParameter((wide, normal(8, 50_000)[labels]), share=labels)
    record("tied", tied @ leaf(4, N, 16), tied.free)
    p = leaf(9, 600_000)
    record("ReLU", ms.relu(p), p)
    opt = ms.optim.SGD([p], lr=0.5, momentum=0.5, nesterov=True)
    for _ in range(2):
        p.grad = normal(10, 600_000)
        opt.step()
    out["SGD"] = p.detach().numpy()
    return out


def training(steps=3, layout=np.ascontiguousarray, threads=(), dtype=np.float32):
    """The parameters after some steps of a sparse network: a dictionary of arrays."""
    first = ms.nn.SparseLinear(N, N, pattern=patterns()[0], rng=1, dtype=dtype)
    last = ms.nn.SparseLinear(N, 10, fan_in=500, rng=2, dtype=dtype)
    model = ms.nn.Sequential(first, ms.nn.ReLU(), last)
    opt = ms.optim.Adam(model.parameters(), lr=1e-3)
    x = layout(normal(3, 64, N, dtype=dtype))
    for step in range(steps):
        if threads:
            ms.set_num_threads(threads[step % len(threads)])
        opt.zero_grad()
        ms.nn.cross_entropy(model(x), np.arange(64) % 10).backward()
        opt.step()
    parameters = first.weight.free, first.bias, last.weight.free, last.bias
    return {f"parameter {i}": p.detach().numpy() for i, p in enumerate(parameters)}


def digests(arrays):
    """The bits of each array, in few."""
    return {k: hashlib.sha256(np.ascontiguousarray(v)).hexdigest() for k, v in arrays.items()}


def work(layout=np.ascontiguousarray):
    return digests(results(layout) | training(layout=layout))


def dots(pattern, u, v):
    parts = np.array_split(np.arange(pattern.nnz), 16)
    rows, columns = pattern.rows, pattern.indices
    return np.concatenate([np.einsum("ij,ij->i", u[rows[e]], v[columns[e]]) for e in parts])


def check_results(got):
    """Hold them to SciPy and NumPy in float64."""
    wide, other, thin, thinner, labels = patterns()
    number = functools.partial(normal, dtype=np.float64)
    g = functools.partial(number, 100)
    A, B, C, D = (p.to_scipy(number(i, p.nnz)) for i, p in enumerate((wide, other, thin, thinner)))

    def held(name, *expected):
        names = [name, *(f"{name}: gradient {i}" for i in range(len(expected) - 1))]
        for key, value in zip(names, expected, strict=True):
            np.testing.assert_allclose(got.pop(key), value, rtol=1e-4, atol=1e-4, err_msg=key)

    for k in (16, 20):
        x = number(4, N, k)
        held(f"A X, k = {k}", A @ x, dots(wide, g(N, k), x), A.T @ g(N, k))
        held(f"Aᵀ X, k = {k}", A.T @ x, dots(wide, x, g(N, k)), A @ g(N, k))
    x, u, v = number(5, 64, N).T, number(6, N, 20), number(7, N, 20)
    held("A Xᵀ", A @ x, dots(wide, g(N, 64), x))
    G = wide.to_scipy(g(wide.nnz))
    held("sddmm", dots(wide, u, v), G @ v, G.T @ u)
    total = A + B  # no sum is 0: every entry is stored
    G = np.zeros((N, N))
    at = np.repeat(np.arange(N), np.diff(total.indptr)), total.indices
    G[at] = g(total.nnz)
    held("A + B", total.data, G[wide.rows, wide.indices], G[other.rows, other.indices])
    top = np.maximum.reduceat(A.data, A.indptr[:-1])
    held("row maxima", top, np.where(A.data == top[wide.rows], g(N)[wide.rows], 0))
    e = np.exp(A.data)
    s = e / np.bincount(wide.rows, e)[wide.rows]
    inner = np.bincount(wide.rows, s * g(wide.nnz))
    held("softmax", s, s * (g(wide.nnz) - inner[wide.rows]))
    total = (C @ D).sorted_indices()
    G = total.copy()
    G.data = g(total.nnz)
    to_c, to_d = (G @ D.T).toarray(), (C.T @ G).toarray()
    gradients = to_c[thin.rows, thin.indices], to_d[thinner.rows, thinner.indices]
    held("C D", total.data, *gradients)
    T = wide.to_scipy(number(8, 50_000)[labels])
    used, where = np.unique(labels, return_index=True)
    order = np.argsort(np.argsort(where))  # a weight's place goes by its first entry
    place = np.empty(50_000, int)
    place[used] = order
    tied = np.bincount(place[labels], dots(wide, g(N, 16), number(4, N, 16)))
    held("tied", T @ number(4, N, 16), tied)
    p, buf, d = number(9, 600_000).copy(), 0, number(10, 600_000)
    held("ReLU", np.maximum(p, 0), np.where(p > 0, g(600_000), 0))
    for _ in range(2):
        buf = 0.5 * buf + d
        p -= 0.5 * (d + 0.5 * buf)
    held("SGD", p)
    assert not got


def check_training(got):
    """Hold it to the same three steps written out with SciPy."""
    first = ms.nn.SparseLinear(N, N, pattern=patterns()[0], rng=1, dtype=np.float64)
    last = ms.nn.SparseLinear(N, 10, fan_in=500, rng=2, dtype=np.float64)
    one, two = first.weight.pattern, last.weight.pattern
    parameters = [
        p.detach().numpy().copy()
        for p in (first.weight.free, first.bias, last.weight.free, last.bias)
    ]
    m, v = ([np.zeros_like(p) for p in parameters] for _ in range(2))
    x, labels = normal(3, 64, N, dtype=np.float64).T, np.arange(64) % 10
    for step in (1, 2, 3):
        w1, b1, w2, b2 = parameters
        h = one.to_scipy(w1) @ x + b1[:, None]
        e = np.exp(two.to_scipy(w2) @ np.maximum(h, 0) + b2[:, None])
        d2 = e / e.sum(0)
        d2[labels, np.arange(64)] -= 1
        d2 /= 64
        d1 = np.where(h > 0, two.to_scipy(w2).T @ d2, 0)
        gradients = dots(one, d1, x), d1.sum(1), dots(two, d2, np.maximum(h, 0)), d2.sum(1)
        for i, g in enumerate(gradients):
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.999 * v[i] + 0.001 * g * g
            mean, root = m[i] / (1 - 0.9**step), np.sqrt(v[i] / (1 - 0.999**step))
            parameters[i] = parameters[i] - 1e-3 * mean / (root + 1e-8)
    for ours, theirs in zip(got.values(), parameters, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-9)


# In a process of the matrix ----------------------------------------------------------------------


@functools.cache
def on_threads():
    """The compiled kernels, of which smaller work than elsewhere runs on Numba's threads."""
    module = compiled()
    module.PARALLEL_WORK = 1 << 22
    return module


if __name__ in ("__main__", "__mp_main__"):
    compiled, kernels._compiled = kernels._compiled, on_threads


@functools.cache
def expected():
    """What the work gives: as the process that checked it says, else as it is done serially."""
    if "EXPECTED" in os.environ:
        return json.loads(os.environ["EXPECTED"])
    before = ms.get_num_threads()
    ms.set_num_threads(1)
    try:
        return work()
    finally:
        ms.set_num_threads(before)


def check():
    """Do the work: not a bit differs."""
    found = work()
    assert found == expected(), [key for key in found if found[key] != expected()[key]]


def check_product():
    """A small part of the work: forward and both gradients."""
    a, x = (ms.tensor(normal(*n), requires_grad=True) for n in ((0, patterns()[0].nnz), (4, N, 16)))
    y = ms.SparseTensor(patterns()[0], a) @ x
    y.backward(normal(100, N, 16))
    got = digests({"": y.detach().numpy(), ": gradient 0": a.grad, ": gradient 1": x.grad})
    assert got == {key: expected()[f"A X, k = 16{key}"] for key in got}


def threads_of_this_process():
    """The processor time of each thread, in nanoseconds."""
    times = {}
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it has just ended
            times[task.name] = int((task / "schedstat").read_text().split()[0])
    return times


AT_START = threads_of_this_process() if sys.platform == "linux" else {}


def check_in_parallel():
    """The work, by Numba's threads on the layer asked for; every kernel among it."""
    import numba

    check()
    from minisparse.kernels import cpu

    assert numba.threading_layer() == numba.config.THREADING_LAYER
    serial = [kernel.body.__name__ for kernel in cpu._kernels.values() if not kernel.parallel]
    assert not serial, f"never ran in parallel: {serial}"
    for _ in range(100):  # on a busy machine the thread that calls may do all of it
        now = threads_of_this_process()
        busy = [t for name, t in now.items() if name not in AT_START and t > 10**6]
        if len(busy) >= (numba.config.NUMBA_NUM_THREADS > 1):
            break
        check()
    else:
        raise AssertionError("no thread of Numba's did anything")
    assert numba.get_num_threads() == numba.config.NUMBA_NUM_THREADS


def check_forked():
    """The work, in a child that has none of the threads of its parent."""
    from minisparse.kernels import cpu

    check()
    assert cpu._forked


@contextlib.contextmanager
def at_least(launches):
    """Kernels, all launched before, are so many times; among threads the turns go by chance."""
    from minisparse.kernels import cpu

    count = collections.Counter()

    def counted(launch):
        def counting(*args):
            count["launches"] += 1
            return launch(*args)

        return counting

    kept = [(kernel, dict(kernel.parallel)) for kernel in cpu._kernels.values()]
    for kernel, parallel in kept:
        kernel.parallel = {key: (counted(f), address) for key, (f, address) in parallel.items()}
    yield
    for kernel, parallel in kept:
        kernel.parallel = parallel
    assert count["launches"] >= launches


@contextlib.contextmanager
def meanwhile(n, task):
    """Other threads do the task over and over; an exception in one comes out."""
    over = threading.Event()

    def loop():
        while True:
            task()
            if over.is_set():
                return

    with ThreadPoolExecutor(n) as pool:
        loops = [pool.submit(loop) for _ in range(n)]
        try:
            yield
        finally:
            over.set()
    [each.result() for each in loops]


def start_child(task):
    pid = os.fork()
    if pid == 0:
        try:
            task()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def wait_for(pid):
    assert os.waitpid(pid, 0)[1] == 0, "a child failed"
    sys.stdout.write("fork survived\n")


def in_child(task):
    wait_for(start_child(task))


def in_child_and_grandchild():
    in_child(lambda: (check_forked(), sys.stdout.flush(), in_child(check_forked)))


SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


@scenario
def four_threads():
    """From the first use on."""

    def all_check():
        with ThreadPoolExecutor(4) as pool:
            [done.result() for done in [pool.submit(check) for _ in range(4)]]

    all_check()
    check_in_parallel()
    with at_least(1):
        all_check()


@scenario
def many_threads():
    check_in_parallel()
    with at_least(1), ThreadPoolExecutor(64) as pool:
        [done.result() for done in [pool.submit(check_product) for _ in range(128)]]

    async def tasks():
        await asyncio.gather(*[asyncio.to_thread(check_product) for _ in range(20)])

    asyncio.run(tasks())


@scenario
def fork_after_use():
    check_in_parallel()
    in_child_and_grandchild()
    with at_least(20):
        check()


@scenario
def fork_amid_kernels():
    check_in_parallel()
    with meanwhile(3, check_product):
        for _ in range(3):
            in_child_and_grandchild()
    with at_least(20):
        check()


@scenario
def fork_in_a_thread():
    check_in_parallel()
    with ThreadPoolExecutor(1) as pool:
        forks = [pool.submit(in_child_and_grandchild) for _ in range(2)]
        while not all(fork.done() for fork in forks):
            check_product()
    [fork.result() for fork in forks]


@scenario
def fork_before_use():
    """A child that is forked before Numba's threads exist has its own."""
    in_child(lambda: (check_in_parallel(), sys.stdout.flush(), in_child(check_forked)))
    check_in_parallel()


def gather():
    x = np.arange(3e5)
    assert (kernels.gather(x, np.arange(len(x))[::-1]) == x[::-1]).all()


@scenario
def fork_during_first_use():
    """While another thread imports Numba, compiles, and launches Numba's threads."""
    assert "numba" not in sys.modules
    thread, children = threading.Thread(target=gather), []
    thread.start()
    while thread.is_alive() and len(children) < 8:
        children.append(start_child(gather))
        time.sleep(0.05)
    assert children
    for pid in children:
        wait_for(pid)
    thread.join()


def users_own():
    """A parallel function of the user's."""
    import numba

    @numba.njit(parallel=True, nogil=True)
    def squares(n):
        out = np.zeros(n)
        for i in numba.prange(n):
            out[i] = i * i
        return out

    right = np.arange(100_000.0) ** 2

    def run():
        assert (squares(len(right)) == right).all()

    run()
    return run


@scenario
def fork_after_users_own_use():
    """Numba's threads were there before the first kernel of ours, which is a child's."""
    users_own()
    assert "minisparse.kernels.cpu" not in sys.modules
    in_child(check_forked)
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        pool.submit(check_forked).result()
    check()


@scenario
def beside_users_own():
    """The workqueue layer takes one thread at a time, whoever it is: there, we stay out of it."""
    run = users_own()
    check()
    if os.environ["NUMBA_THREADING_LAYER"] == "workqueue":
        ms.set_num_threads(1)
    with meanwhile(1, run):
        check()


@scenario
def pools_of_processes():
    check_in_parallel()
    fork = multiprocessing.get_context("fork")
    with meanwhile(2, check_product):
        with ProcessPoolExecutor(2, fork) as pool:
            [done.result() for done in [pool.submit(check_forked) for _ in range(3)]]
        with fork.Pool(2) as pool:
            [done.get() for done in [pool.apply_async(check_forked) for _ in range(3)]]


@scenario
def spawn_and_forkserver():
    """These begin anew, and run in parallel."""
    check_in_parallel()
    for method in ("spawn", "forkserver"):
        with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
            pool.submit(check_in_parallel).result()


@scenario
def interrupts():
    """KeyboardInterrupt amid kernels, in the main thread and thrown into another one."""
    check_in_parallel()
    rng, interrupted = np.random.default_rng(), 0
    for _ in range(20):
        timer = threading.Timer(rng.uniform(0.01, 0.1), signal.raise_signal, [signal.SIGINT])
        try:
            timer.start()
            while timer.is_alive():
                check_product()
            timer.join()
        except KeyboardInterrupt:
            interrupted += 1
        timer.join()
    assert interrupted

    def until_thrown():
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                check_product()

    for _ in range(5):
        thread = threading.Thread(target=until_thrown)
        thread.start()
        time.sleep(rng.uniform(0.01, 0.05))
        where, what = ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt)
        assert ctypes.pythonapi.PyThreadState_SetAsyncExc(where, what) == 1
        thread.join()
    with at_least(20):
        check()


@scenario
def signal_handler():
    """A handler that runs kernels, wherever the main thread is."""
    check_in_parallel()
    calls = []

    def handler(*_):
        contextvars.Context().run(check_product)  # records, also where backward does not
        calls.append(1)
        signal.setitimer(signal.ITIMER_PROF, 0.02)

    signal.signal(signal.SIGPROF, handler)
    signal.setitimer(signal.ITIMER_PROF, 0.02)
    for _ in range(2):
        check()
    signal.setitimer(signal.ITIMER_PROF, 0)
    assert calls
    check()


@scenario
def daemons_at_exit():
    check_in_parallel()

    def for_ever():
        while True:
            check_product()

    for _ in range(4):
        threading.Thread(target=for_ever, daemon=True).start()
    time.sleep(0.2)


@scenario
def numbas_setting():
    """It belongs to each thread, and stays what it is there."""
    import numba

    check_in_parallel()
    n = numba.get_num_threads()

    def thread(own):
        assert numba.get_num_threads() == n
        numba.set_num_threads(own)
        check()
        return numba.get_num_threads() == own

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(thread, (1, n)))
    assert numba.get_num_threads() == n
    numba.set_num_threads(1)
    check()
    assert numba.get_num_threads() == 1
    numba.set_num_threads(n)


@scenario
def beside_torch():
    import torch

    threads = torch.get_num_threads()
    x = torch.ones(300, 300)
    with meanwhile(2, lambda: torch.testing.assert_close(x @ x, 300 * x)):
        check_in_parallel()
        assert torch.get_num_threads() == threads
    in_child(check_forked)


@scenario
def same_bits():
    """For 1, 2 and 4 threads and any layout, and whole trainings; prints their bits."""
    layouts = {
        "C": np.ascontiguousarray,
        "Fortran": np.asfortranarray,
        "sliced": lambda x: np.repeat(x, 2, axis=0)[::2],
        "negative": lambda x: np.ascontiguousarray(x[::-1])[::-1],
    }
    for n, layout in zip((1, 2, 4, 3), layouts.values(), strict=True):
        ms.set_num_threads(n)
        found = work(layout)
        assert found == expected(), [k for k in found if found[k] != expected()[k]]
    trainings = [digests(training(100, threads=n)) for n in ((1,), (2,), (1, 4, 2, 3))]
    assert trainings[0] == trainings[1] == trainings[2]
    sys.stdout.write(json.dumps(trainings[0]))


def settings():
    """What belongs to the user."""
    import numba

    pools = []
    with contextlib.suppress(ImportError):
        import threadpoolctl

        pools = threadpoolctl.threadpool_info()
    return {
        "environment": dict(os.environ),
        "errors": np.geterr(),
        "interrupt": signal.getsignal(signal.SIGINT),
        "numba": (numba.config.THREADING_LAYER, numba.config.NUMBA_NUM_THREADS),
        "torch": sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None,
    }, {pool["filepath"]: pool["num_threads"] for pool in pools}


def run(name):
    faulthandler.register(signal.SIGALRM, chain=True)  # who hangs says where
    signal.alarm(500)
    os.register_at_fork(after_in_child=functools.partial(signal.alarm, 400))
    ms.set_num_threads(4)
    if name == "beside_torch":
        importlib.import_module("torch")
    before = settings() if name != "fork_during_first_use" else None
    SCENARIOS[name]()
    if before:
        after = settings()
        assert after[0] == before[0]
        assert after[1] | before[1] == after[1]  # Numba's own pool may have come


# The matrix ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def known():
    """The bits of the work, which is right."""
    numbers = results() | training()
    return json.dumps(digests(numbers))


def test_the_work_is_right():
    check_results(results())
    check_training(training(dtype=np.float64))


def environment(layer, threads=4):
    """For Numba to use a layer; for TBB from PyPI, the loader must be told of the environment."""
    where = {}
    if layer == "tbb":
        try:
            files = importlib.metadata.files("tbb")
        except importlib.metadata.PackageNotFoundError:
            pytest.skip("the package tbb is not installed")
        (library,) = (f.locate().resolve().parent for f in files if f.name == "libtbb.so.12")
        where = {"LD_LIBRARY_PATH": f"{library}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
    return {"NUMBA_THREADING_LAYER": layer, "NUMBA_NUM_THREADS": str(threads), **where}


@pytest.mark.parametrize("layer", ["omp", "workqueue", "tbb"])
@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name != "same_bits"])
def test_matrix(in_new_process, known, tmp_path, record_property, scenario, layer):
    """CASES 37: no abort, no hang, no bit that differs, no setting touched."""
    if scenario == "beside_torch" and not importlib.util.find_spec("torch"):
        pytest.skip("torch is not installed")
    cache = {"NUMBA_CACHE_DIR": str(tmp_path)} if scenario == "fork_during_first_use" else {}
    out = in_new_process(Path(__file__), scenario, EXPECTED=known, **environment(layer), **cache)
    if forks := out.count("fork survived"):
        record_property("forks", forks)


def test_numba_with_one_thread(in_new_process, known):
    in_new_process(Path(__file__), "four_threads", EXPECTED=known, **environment("omp", 1))


def test_same_bits(in_new_process, known):
    """In every process, on every layer, for every number of threads; 100 steps of training, too."""
    bits = set()
    for layer, blas in (("omp", "1"), ("omp", "2"), ("workqueue", "2")):
        bits.add(
            in_new_process(
                Path(__file__),
                "same_bits",
                EXPECTED=known,
                OPENBLAS_NUM_THREADS=blas,
                **environment(layer),
            )
        )
    assert len(bits) == 1


def test_memory_at_fork_and_exit(in_new_process):
    """A turn taken at the fork is free in the child; blocks alive at exit do no harm."""
    out = in_new_process("""
import os, sys
import numpy as np
from minisparse.kernels import cpu, memory
kept = memory.empty(10**5, np.float64)
loop = [memory.empty(10**5, np.float64)]
loop.append(loop)
memory._pool.turn.pop()
pid = os.fork()
if pid == 0:
    a = memory.empty(10**5, np.float32)
    del a
    os._exit(memory._pool.idle_bytes == 0)
memory._pool.turn.append(None)
assert os.waitpid(pid, 0)[1] == 0
sys.modules["kept"] = kept
sys.stderr = sys.stdout
""")
    assert out == ""


if __name__ == "__main__":
    run(sys.argv[1])
