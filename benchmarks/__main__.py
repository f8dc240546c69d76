"""Run the benchmarks: ``python -m benchmarks [kernels] [--threads N] [--workload NAME]``."""

import argparse
import json
import platform

import numpy as np

from . import kernels
from .peers import available
from .workloads import WORKLOADS


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("part", nargs="?", choices=["kernels"], default="kernels")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--float64", action="store_true")
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS))
    parser.add_argument("--peer", action="append", help="only these, and minisparse")
    parser.add_argument("--json", help="write the seconds measured to this file")
    options = parser.parse_args()
    peers = available()
    if options.peer:
        peers = {name: p for name, p in peers.items() if name in ("minisparse", *options.peer)}
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print("lower quartiles; a ratio says how many times as long the peer takes")
    dtype = np.float64 if options.float64 else np.float32
    results = kernels.run(peers, options.workload, options.threads, dtype)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
