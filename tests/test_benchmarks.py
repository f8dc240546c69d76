"""The benchmarks run: their own results are checked, no timing is asserted."""

import functools
import importlib.util

import numpy as np
import pytest

import minisparse as ms
from benchmarks import crossover, gather, gpu, harness, kernels, latency, peers, scaling, steps
from benchmarks.workloads import VARIANTS, WORKLOADS, Workload, layer_of, read, write

pytestmark = pytest.mark.compiled
OURS = [peers.Minisparse, peers.SciPy]
SHAPES = [
    Workload("small", (30, 20), 4, 6),
    Workload("batch-first", (30, 20), 4, 6, batch_first=True),
    Workload("first", (30, 20), 4, 6, dtype="float64", first=True),
    Workload("vector", (20, 30), 4, 1),
    Workload("links", (300, 200), 4, 6, "zipf"),
]


@pytest.mark.parametrize("peer", OURS)
@pytest.mark.parametrize("workload", SHAPES, ids=lambda w: w.name)
def test_products_pass_their_check(tmp_path, peer, workload):
    write(workload, tmp_path)
    calls = kernels.checked(peer, workload, tmp_path, 1)
    assert set(calls) == {"forward", "both"}


class Wrong(peers.SciPy):
    """Off by a little in one number of one result."""

    def __init__(self, problem, threads, which=0):
        super().__init__(problem, threads)
        self.which = which

    def both(self):
        results = list(super().both())
        results[self.which] = results[self.which] + 0.01
        return results


@pytest.mark.parametrize("which", range(3))
def test_a_wrong_result_is_found(tmp_path, which):
    write(SHAPES[0], tmp_path)
    with pytest.raises(AssertionError, match="wrong"):
        kernels.checked(functools.partial(Wrong, which=which), SHAPES[0], tmp_path, 1)


def test_operands_are_aligned(tmp_path):
    write(SHAPES[1], tmp_path)
    problem, _ = read(SHAPES[1], tmp_path)
    assert problem.x.shape == (6, 20)
    assert all(a.ctypes.data % 64 == 0 for a in (problem.values, problem.x, problem.g))


def test_gather_limit_runs(tmp_path):
    write(SHAPES[0], tmp_path)
    problem, _ = read(SHAPES[0], tmp_path)
    forward, name = gather.quickest(problem.x, problem.pattern.indices, 1)
    forward()
    assert name.startswith("1 thread")


def test_losses_agree_with_the_reference():
    net = steps.build((12, 20, 5), 3, 8)
    ours, reference = peers.MinisparseNet(net, 1), peers.SciPyNet(net, dtype=np.float64)
    rows = peers.MinisparseRows(net, 1)
    for _ in range(5):
        wanted = reference.step()
        np.testing.assert_allclose([ours.step(), rows.step()], wanted, rtol=1e-4)


def test_a_layer_takes_a_step():
    assert set(crossover.checked(peers.MinisparseLayer, 64, 4, 0.1, 1)) == {"step"}
    assert set(crossover.checked(peers.NumPyLayer, 64, 4, 0.1, 1)) == {"step"}
    calls = scaling.trained(100, 0.1, 1)
    calls["step"]()
    assert calls["nnz"]() == 1000
    assert layer_of(64, 4, 0.1).x.shape == (64, 4)


@pytest.mark.parametrize("library", ["minisparse", "numpy"])
def test_chains_agree(library):
    assert "forward" in latency.chained(library, 3, 1)


def test_peers_take_turns_and_give_their_reasons():
    makers = {"a": made, "b": failing, "c": dying}
    with harness.Turns(makers, 1) as turns:
        turns.make(5)
        times = turns.measure("work", budget=0, rounds=(1, 1))
        assert turns.ask("a", "call", "argument") == (5, 1)
    assert set(times) == {("a", "work")}
    assert turns.reasons == {"b": "ValueError: no", "c": "its process died"}


def made(*args):
    return {"work": ms.get_num_threads, "argument": lambda: args}


def failing(*args):
    raise ValueError("no")


def dying(*args):
    import os

    os._exit(1)


def test_names_and_statistics():
    assert not WORKLOADS.keys() & VARIANTS.keys()
    assert harness.quartile([4, 3, 2, 1]) == 2
    assert harness.slope([1, 2, 4], [3, 12, 48]) == pytest.approx(2)
    assert harness.mean([1, 4]) == pytest.approx(2)


def test_bars_say_met_or_missed(capsys):
    assert harness.bar("this", 2.0, 1.5)["met"]
    assert not harness.bar("that", 2.0, 1.5, at_most=True)["met"]
    assert "MISSED that: 2.00 (at most 1.5)" in capsys.readouterr().out


def test_the_gpu_benchmark_runs_on_a_cpu(capsys):
    """Its own results are checked against float64 there as well."""
    device, peers_here = gpu.Device("cpu"), ["minisparse"]
    if importlib.util.find_spec("torch"):
        peers_here.append("expert torch")
    sizes = {"tiny": ((12, 20, 5), 3, 8)}
    found = gpu.run(device, SHAPES[:1], sizes, peers_here, repeats=2)
    assert {row["peer"] for row in found["gpu"]} == set(peers_here)
    assert {row["kind"] for row in found["gpu"]} == {"forward", "both", "step"}
    assert found["copy"] > 0
