"""The product, and the product with its gradients, against every peer and against the machine."""

import functools
import tempfile

import numpy as np

from . import gather
from .harness import Turns, bar, installed, mean
from .peers import PRODUCTS
from .workloads import VARIANTS, WORKLOADS, read, write

EASY = "torch csr", "jax bcoo", "tensorflow"
"""Autodiff as it comes out of the box."""

QUICK = ("fc512", "fc4096-1", "w64k", "fc4096-1/k1", "w64k/batch-first", "w64k/first-layer")


def checked(make, workload, folder, threads):
    """Return the calls of a peer of products, after comparing what they return with float64."""
    problem, wanted = read(workload, folder)
    peer = make(problem, threads)
    calls = {kind: getattr(peer, kind) for kind in ("forward", "both") if hasattr(peer, kind)}
    compare(workload, problem, wanted, **calls)
    return calls


def compare(workload, problem, wanted, forward, both=None):
    """Compare what a peer's calls return with float64."""
    y, dx, sample, dvalues = wanted
    terms = problem.pattern.nnz / problem.pattern.shape[0]
    tolerance = np.sqrt(terms) * np.finfo(workload.dtype).eps * 64

    def check(what, got, wanted):
        assert np.abs(got - wanted).max() < tolerance * np.abs(wanted).max(), f"wrong {what}"

    check("product", forward(), y)
    if both is not None:
        got_y, got_values, got_x = both()
        check("product", got_y, y)
        check("gradient of the values", got_values[sample], dvalues)
        if not workload.first:
            check("gradient of X", got_x, dx)


def loads(make, workload, folder, threads):
    """Return the calls of a limit."""
    return make(read(workload, folder)[0], threads)


def run(quick=False, threads=None, workloads=None, names=None):
    """Print a table for each workload and number of threads, then the bars; return all figures."""
    cases = WORKLOADS | VARIANTS
    workloads = workloads or (QUICK if quick else list(cases))
    makers = {
        name: functools.partial(checked, make)
        for name, (package, make) in PRODUCTS.items()
        if name in (names or PRODUCTS) and installed(package)
    }
    makers |= {
        "gather limit": functools.partial(loads, gather.limit),
        "streaming": functools.partial(loads, gather.stream),
    }
    results, bars = [], []
    for t in threads or ([2] if quick else [2, 1]):
        tables = {}
        with Turns(makers, t) as turns:
            for name in workloads:
                with tempfile.TemporaryDirectory() as folder:
                    write(cases[name], folder)
                    turns.make(cases[name], folder)
                effort = {"budget": 1.0, "rounds": (2, 9)} if quick else {}
                times = turns.measure("forward", "both", **effort)
                tables[name] = times
                print_table(cases[name], t, turns, times)
                results += [
                    {"workload": name, "threads": t, "peer": peer, "kind": kind, "seconds": s}
                    for (peer, kind), s in times.items()
                ]
        bars += print_bars(tables, t)
    return {"kernels": results, "bars": bars}


def print_table(workload, threads, turns, times):
    print(f"\n{workload}, threads {threads}")
    print(f"  {'':14}{'forward ms':>12}{'ratio':>8}{'+ gradients':>13}{'ratio':>8}")
    for peer in turns.makers:
        row = f"  {peer:14}"
        for kind, width in (("forward", 12), ("both", 13)):
            if (peer, kind) in times:
                t, ours = times[peer, kind], times.get(("minisparse", kind), np.nan)
                row += f"{t * 1e3:{width}.3f}{t / ours:8.2f}"
        if peer == "streaming" and (peer, "forward") in times:
            rate = turns.ask(peer, "call", "bytes") / times[peer, "forward"] / 1e9
            row = f"  {peer:14}{rate:12.1f} GB/s"
        how = f"({turns.ask(peer, 'call', 'how')})" if "how" in turns.kinds.get(peer, ()) else ""
        print(f"{row}  {turns.reasons.get(peer, how)}")
    print(turns.disturbed, end="")


def print_bars(tables, threads):
    """Print how minisparse stands to the peers and limits that were measured; return it."""
    kind_of = {"forward": "forward", "both": "forward + gradients"}
    bars = []

    def ratios(kind, peers):
        """Yield (workload, the best of the peers over minisparse)."""
        for name in [name for name in tables if name in WORKLOADS]:
            times = [tables[name][p, kind] for p in peers if (p, kind) in tables[name]]
            if times and ("minisparse", kind) in tables[name]:
                yield name, min(times) / tables[name]["minisparse", kind]

    def each(peers, kind, wanted, small):
        for name, ratio in ratios(kind, peers):
            least = small if name == "fc512" else wanted
            what = f"{name}, {kind_of[kind]}, {peers[0]}"
            bars.append(bar(what, ratio, least))

    def overall(peers, kind, wanted, title):
        all_ratios = [r for _, r in ratios(kind, peers)]
        if all_ratios:
            bars.append(bar(f"geometric mean, {kind_of[kind]}, {title}", mean(all_ratios), wanted))

    print(f"\nBars, threads {threads}: the peer's time over minisparse's")
    each(["expert torch"], "both", 2, 2)
    overall(["expert torch"], "both", 3, "expert torch")
    for name in [n for n in ("fc4096-1", "w64k", "powerlaw") if n in tables]:
        if {("torch layer", "both"), ("expert torch", "both")} <= set(tables[name]):
            ratio = tables[name]["expert torch", "both"] / tables[name]["torch layer", "both"]
            bars.append(bar(f"{name}, forward + gradients inside PyTorch, expert torch", ratio, 2))
    overall(EASY, "both", 10, "best autodiff out of the box")
    each(["expert torch"], "forward", 2, 1.2)
    each(["mkl"], "forward", 1.3, 1.2)
    each(["gather limit"], "forward", 0.75, 0.75)
    overall(["gather limit"], "forward", 0.85, "gather limit")
    for name in [name for name in tables if name in VARIANTS]:
        for kind in ("forward", "both"):
            times = dict(tables[name])
            limits = "minisparse", "torch layer", "gather limit", "streaming"
            ours = times.get(("minisparse", kind))
            peers = {p: t for (p, k), t in times.items() if k == kind and p not in limits}
            if ours and peers:
                best = min(peers, key=peers.get)
                figure = peers[best] / ours
                if peers[best] < 50e-6:  # then 10 microseconds more are allowed
                    figure = (peers[best] + 10e-6) / ours
                bars.append(bar(f"{name}, {kind_of[kind]}, best peer ({best})", figure, 1))
    return bars
