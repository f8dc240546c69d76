"""The product, and the product with both its gradients, against every peer."""

import numpy as np

from .harness import measure
from .workloads import WORKLOADS

EASY = ("torch csr", "jax bcoo")  # autodiff as it comes out of the box


def run(peers, names=None, threads=2, dtype=np.float32):
    """Print a table for each workload and the ratios that the bar speaks of; return all times."""
    results, ratios = {}, {"expert": [], "easy": []}
    for name in names or WORKLOADS:
        w = WORKLOADS[name]
        times = measure(peers, name, dtype, threads)
        results[name] = {" ".join(key): value for key, value in times.items()}
        print(f"\n{name}: {w.shape[0]} × {w.shape[1]}, {w.fan_in} a row, k = {w.k}, "
              f"{np.dtype(dtype)}, threads {threads}")  # fmt: skip
        print(f"  {'':14}{'forward ms':>12}{'ratio':>8}{'both ms':>12}{'ratio':>8}")
        ours = {kind: times["minisparse", kind] for kind in ("forward", "both")}
        for peer in peers:
            row = f"  {peer:14}"
            for kind in ours:
                if (peer, kind) in times:
                    t = times[peer, kind]
                    row += f"{t * 1e3:12.3f}{t / ours[kind]:8.2f}"
            print(row + f"  {times.get((peer, ''), '')}")
        if ("expert torch", "both") in times:
            ratios["expert"].append(times["expert torch", "both"] / ours["both"])
        easy = [times[peer, "both"] for peer in EASY if (peer, "both") in times]
        if easy:
            ratios["easy"].append(min(easy) / ours["both"])
    for what, wanted in (("expert", 3), ("easy", 10)):
        if ratios[what]:
            mean = float(np.exp(np.mean(np.log(ratios[what]))))
            verdict = "met" if mean >= wanted else "MISSED"
            print(f"\nforward + both gradients, geometric mean against {what} autodiff: "
                  f"{mean:.2f} ({verdict}: {wanted})")  # fmt: skip
    return results
