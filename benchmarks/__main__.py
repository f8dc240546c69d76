"""Measure minisparse beside its peers: everything, or a part.

kernels    the product and its gradients
steps      whole training steps of sparse networks
algebra    sparse with sparse, solves, and a layer of graph attention
scaling    time and memory as the number of rows, the density, the threads grow
crossover  the density below which a sparse layer's step beats a dense one's
latency    the import, the first step, the cost of small operations
"""

import argparse
import importlib
import json
import time

from .harness import describe
from .steps import SIZES
from .workloads import VARIANTS, WORKLOADS

PARTS = "kernels", "steps", "algebra", "scaling", "crossover", "latency"


def main():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks", None, __doc__, formatter_class=form)
    parser.add_argument("part", nargs="?", choices=PARTS, help="all of them if not given")
    parser.add_argument("--quick", action="store_true", help="less of each: some five minutes")
    parser.add_argument("--threads", type=int, action="append", help="(kernels, steps)")
    parser.add_argument("--workload", action="append", choices=[*WORKLOADS, *VARIANTS])
    parser.add_argument("--size", action="append", choices=SIZES, help="(steps)")
    parser.add_argument("--peer", action="append", help="(kernels, steps) only these; with spaces")
    parser.add_argument("--json", help="write all figures to this file")
    options = parser.parse_args()
    names = options.peer and ["minisparse", *options.peer]
    given = {
        "kernels": {"threads": options.threads, "workloads": options.workload, "names": names},
        "steps": {"threads": options.threads, "sizes": options.size, "names": names},
    }
    describe()
    results = {"bars": []}
    for part in [options.part] if options.part else PARTS:
        start = time.perf_counter()
        print(f"\n== {part}")
        module = importlib.import_module(f".{part}", __package__)
        found = module.run(options.quick, **given.get(part, {}))
        bars = found.pop("bars", [])
        results["bars"] += [{"part": part} | b for b in bars]
        results |= found
        print(f"\n({part} took {time.perf_counter() - start:.0f} s)", flush=True)
        if options.json:
            with open(options.json, "w") as file:
                json.dump(results, file, indent=1)
    missed = sum(not b["met"] for b in results["bars"])
    print(f"\n{len(results['bars'])} bars, {missed} missed")


if __name__ == "__main__":
    main()
