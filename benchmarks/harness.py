"""Processes that take turns: every peer in one of its own, asked in rounds by this one."""

import multiprocessing
import os
import time

import numpy as np

from .workloads import WORKLOADS, reference


def quartile(seconds):
    """Return the lower quartile: what a noisy machine does when it is not disturbed."""
    return sorted(seconds)[len(seconds) // 4]


def serve(make, workload, dtype, threads, pipe):
    """Run one peer on one workload: check it, then time what is asked for."""
    try:
        pattern, values, x, g = WORKLOADS[workload].arrays(dtype)
        peer = make(pattern, values, x, g, threads)
        sample = np.random.default_rng(2).integers(max(pattern.nnz, 1), size=2000)
        y, dx, dvalues = reference(pattern, values, x, g, sample)
        scale = np.sqrt(pattern.nnz / pattern.shape[0]) * np.finfo(dtype).eps * 64
        assert np.abs(peer.forward() - y).max() < scale * np.abs(y).max(), "wrong product"
        kinds = ["forward"]
        if hasattr(peer, "both"):
            kinds.append("both")
            _, got_values, got_x = peer.both()
            assert np.abs(got_x - dx).max() < scale * np.abs(dx).max(), "wrong gradient of X"
            error = np.abs(got_values[sample] - dvalues).max()
            assert error < scale * np.abs(dvalues).max(), "wrong gradient of the values"
        del y, dx
        pipe.send(kinds)
    except Exception as error:  # the peer's own trouble is a line in the table, not the end
        pipe.send(f"{type(error).__name__}: {error}".split("\n")[0])
        return
    for kind, repeats in iter(pipe.recv, None):
        call, seconds = getattr(peer, kind), []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        pipe.send(seconds)


def measure(peers, workload, dtype=np.float32, threads=2, budget=4.0):
    """Time every peer on a workload, taking turns.

    Returns
    -------
    dict of {(peer, "forward" or "both"): seconds}, lower quartiles; or a reason, under (peer, "")
    """
    os.environ.update(OMP_WAIT_POLICY="passive", OMP_NUM_THREADS=str(threads))
    spawn = multiprocessing.get_context("spawn")
    pipes, kinds, times = {}, {}, {}
    for name, make in peers.items():
        pipes[name], other = spawn.Pipe()
        process = spawn.Process(target=serve, args=(make, workload, dtype, threads, other))
        process.daemon = True
        process.start()
        kinds[name] = pipes[name].recv()  # one after the other: they check themselves undisturbed
        if isinstance(kinds[name], str):
            times[name, ""] = kinds.pop(name)
    for kind in ("forward", "both"):
        able = [name for name in kinds if kind in kinds[name]]
        seconds = {name: ask(pipes[name], kind, 1) for name in able}
        once = sum(map(min, seconds.values()))
        for _ in range(int(np.clip(budget / once, 5, 60))):
            for name in able:
                fast = min(seconds[name]) < 1e-3
                seconds[name] += ask(pipes[name], kind, 10 if fast else 1)
        times |= {(name, kind): quartile(seconds[name]) for name in able}
    for name in kinds:
        pipes[name].send(None)
    return times


def ask(pipe, kind, repeats):
    pipe.send((kind, repeats))
    return pipe.recv()


def take_turns(repeats, **calls):
    """Time calls within this process in rounds, thrice each; lower quartiles by name."""
    seconds = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            for _ in range(3):
                start = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - start)
    return {name: quartile(s) for name, s in seconds.items()}
