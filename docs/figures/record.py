"""Record the figures that the site draws, each by its own benchmark command.

    python docs/figures/record.py [--quick] [PART ...]

Needs the extra `bench`, and a machine that does nothing else.  Writes one JSON file a part beside
this script, with the command and the machine in it.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from benchmarks.harness import others

PEERS = "expert torch", "torch csr", "jax bcoo", "mkl"
LAYERS = "fc4096-1", "fc4096-5", "w64k", "powerlaw"
PARTS = {
    "kernels": [
        *("--threads", "2"),
        *(word for name in LAYERS for word in ("--workload", name)),
        *(word for name in PEERS for word in ("--peer", name)),
    ],
    "scaling": [],
    "crossover": [],
}
"""Part of the benchmarks: its options."""


def disturbed():
    """Return whether other processes use the processors now."""
    before = others([])
    time.sleep(3)
    return (others([]) - before) / 3 > 0.1


def record(part, options):
    """Run one part; put the command and the machine into its file."""
    path = HERE / f"{part}.json"
    words = ["-m", "benchmarks", part, *options]
    command = [sys.executable, *words, "--json", str(path)]
    busy = disturbed()
    done = subprocess.run(command, cwd=HERE.parents[1], stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    done.check_returncode()
    about = {"command": shlex.join(["python", *words]), "machine": done.stdout.splitlines()[0]}
    about["disturbed"] = busy or disturbed() or "disturbed: other processes" in done.stdout
    path.write_text(json.dumps(about | json.loads(path.read_text()), indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="less of each, in some minutes")
    arguments = parser.parse_args()
    for name in arguments.parts or PARTS:
        record(name, PARTS[name] + ["--quick"] * arguments.quick)
