"""Draw the pictures of the site: charts of recorded figures, and a computation graph.

`everything` is called by ``conf.py``.  For each picture it writes an SVG file and a piece of
Markdown that shows it, with its alternative text and the command that made its figures.
"""

import json
import re
from pathlib import Path

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator

import minisparse as ms

HERE = Path(__file__).parent
COLOURS = {
    "minisparse": "#0b6e99", "expert torch": "#c65d1e", "torch csr": "#e3a978",
    "jax bcoo": "#7a6aa8", "mkl": "#4f8a4c", "gather limit": "#888888",
}  # fmt: skip
STYLE = {
    "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "axes.axisbelow": True, "grid.color": "#dddddd", "figure.facecolor": "white",
    "svg.hashsalt": "minisparse",
}  # fmt: skip


def recorded(part):
    """Return what ``record.py`` has written for a part of the benchmarks."""
    return json.loads((HERE / f"{part}.json").read_text())


def written(folder, name, figure, alt, caption, source=None):
    """Save a picture, and the Markdown that shows it."""
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)
    if source:
        caption += f" Made by `{source['command']}` on {source['machine']}."
        if source["disturbed"]:
            caption += " Other processes were busy meanwhile: these figures are rough."
    text = f":::{{figure}} /_generated/{name}.svg\n:alt: {alt}\n\n{caption}\n:::\n"
    (folder / f"{name}.md").write_text(text)


def plain_ticks(ax):
    """Mark 1, 2, 5, 10, ... on a logarithmic axis of y."""
    ax.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("{x:g}")


def everything(folder):
    """Draw all pictures into a folder."""
    folder.mkdir(exist_ok=True)
    with plt.rc_context(STYLE):
        for draw in (speed, scaling, crossover, graph):
            draw(folder)


# ------------------------------------------------------------------------------------------ charts


def speed(folder):
    """Bars: how many times as long as minisparse each peer takes, a group for each workload."""
    source = recorded("kernels")
    times = {(r["workload"], r["kind"], r["peer"]): r["seconds"] for r in source["kernels"]}
    names = list(dict.fromkeys(workload for workload, _, _ in times))
    figure, axes = plt.subplots(2, 1, figsize=(7, 7.5), layout="constrained")
    said = []
    titles = {"forward": "Forward", "both": "Forward and both gradients"}
    for ax, (kind, title) in zip(axes, titles.items(), strict=True):
        peers = [p for p in COLOURS if any((name, kind, p) in times for name in names)]
        for n, peer in enumerate(peers):
            at = np.arange(len(names)) + (n - (len(peers) - 1) / 2) * 0.8 / len(peers)
            ratios = [
                times.get((name, kind, peer), np.nan) / times[name, kind, "minisparse"]
                for name in names
            ]
            ax.bar(at, ratios, 0.8 / len(peers), color=COLOURS[peer], label=peer)
            if peer != "minisparse":
                each = zip(names, ratios, strict=True)
                ratios = ", ".join(f"{name} {r:.2f}" for name, r in each if np.isfinite(r))
                said.append(f"{title.lower()}, {peer}: {ratios}")
        ax.set_xticks(range(len(names)), names)
        ax.set(title=title, yscale="log", ylabel="times minisparse's time")
        ax.set_ylim(0.5)
        ax.axhline(1, color="black", linewidth=0.8)
        plain_ticks(ax)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    alt = "Bars of the time each peer takes over that of minisparse. " + "; ".join(said) + "."
    caption = (
        "How many times as long as minisparse each peer takes, on two threads in float32; a missing"
        " bar is a peer that ran out of memory or has no gradient."
    )
    written(folder, "speed", figure, alt, caption, source)


def scaling(folder):
    """Time and peak memory of a training step as the number of rows grows."""
    source = recorded("scaling")
    table = source["scaling"][0]["table"]
    rows = [r for r in source["scaling"] if r["table"] == table]
    n = [int(r["n"]) for r in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.8), layout="constrained")
    for threads, marker in (("1 thread", "o"), ("2 threads", "s")):
        seconds = np.array([r[f"seconds, {threads}"] for r in rows])
        left.loglog(n, seconds * 1e3, marker + "-", label=threads)
    left.set(title="Time of a training step", xlabel="rows and columns", ylabel="milliseconds")
    left.legend()
    peak = np.array([r["peak"] for r in rows])
    right.loglog(n, peak / 1e6, "o-", color=COLOURS["expert torch"], label="measured")
    dense = 4 * 4.0 * np.array(n) ** 2  # weight, gradient, two moments
    right.loglog(n, dense / 1e6, "--", color="#888888", label="dense weights and state")
    right.set(title="Peak memory", xlabel="rows and columns", ylabel="MB")
    right.legend()
    plain_ticks(left)
    points = [
        f"{side:,} rows: {1e3 * r['seconds, 2 threads']:.3g} ms on two threads, {p / 1e6:.3g} MB"
        for side, r, p in zip(n, rows, peak, strict=True)
    ]
    alt = "Time and memory against the number of rows, both nearly straight lines. "
    caption = (
        f"One training step (product, both gradients, Adam): {table}. The dashed line is what "
        "dense float32 weights, their gradient and Adam's two moments would take."
    )
    written(folder, "scaling", figure, alt + "; ".join(points) + ".", caption, source)


def crossover(folder):
    """The time of a sparse layer's step against its density, and that of the dense layer."""
    source = recorded("crossover")
    cases = source["crossover"]
    rows = -(-len(cases) // 2)
    figure, axes = plt.subplots(rows, 2, figsize=(8, 3.2 * rows), layout="constrained")
    said = []
    for ax, case in zip(axes.flat, cases, strict=False):
        density, seconds = np.array(case["minisparse"]).T
        ax.loglog(100 * density, 1e3 * seconds, "o-", label="minisparse", color="#0b6e99")
        dense = case["dense"]["torch dense"]
        ax.axhline(1e3 * dense, ls="--", color="#c65d1e", label="PyTorch, dense")
        ax.set(title=f"{case['n']}², batch {case['batch']}", xlabel="% of the weights")
        ax.set(ylabel="ms a step")
        ax.xaxis.set_major_formatter("{x:g}")
        plain_ticks(ax)
        crossing = case["crossings"]["torch dense"]
        if not isinstance(crossing, str):
            crossing = f"{100 * crossing:.0f} %"
        said.append(f"{case['n']} by {case['n']}, batch {case['batch']}: {crossing}")
    for ax in axes.flat[len(cases) :]:
        ax.set_visible(False)
    axes.flat[0].legend(fontsize=9)
    alt = "Time of a step against density; the sparse layer is faster below " + "; ".join(said)
    caption = (
        "One layer's training step in float32 on two threads: the sparse layer at several "
        "densities, and the same layer, dense. Left of the crossing the sparse one is faster."
    )
    written(folder, "crossover", figure, alt + ".", caption, source)


# ------------------------------------------------------------------------------------------- graph


def graph(folder):
    """The computation graph of a loss, from the text that ``ms.viz.graph`` gives."""
    model = ms.nn.Sequential(
        ms.nn.SparseLinear(6, 4, fan_in=2, rng=0), ms.nn.Tanh(), ms.nn.SparseLinear(4, 2, fan_in=2)
    )
    loss = ms.nn.mse_loss(model(np.ones((3, 6), np.float32)), np.zeros((3, 2)))
    text = ms.viz.graph(loss).dot
    nodes = {m[1]: (m[2], m[3]) for m in re.finditer(r'(n\d+) \[label="(.*?)", shape=(\w+)', text)}
    edges = re.findall(r"(n\d+) -> (n\d+);", text)
    level = dict.fromkeys(nodes, 0)  # how far from the loss, by the longest way
    for _ in nodes:
        for above, below in edges:
            level[above] = max(level[above], level[below] + 1)
    leaves = [n for n, (_, shape) in nodes.items() if shape == "ellipse"]
    place = {n: (0, level[n]) for n in nodes}  # operations in a column, leaves beside it
    place |= {above: (1, level[below]) for above, below in edges if above in leaves}
    who = "weight of layer 2", "bias of layer 2", "weight of layer 1", "bias of layer 1"
    names = dict(zip(leaves, who, strict=True))  # those nearest to the loss come first
    figure, ax = plt.subplots(figsize=(5.5, 8.2), layout="constrained")
    for above, below in edges:
        (x, y), (to_x, to_y) = place[above], place[below]
        side, down = (0.22 if x else 0), (0 if x else 0.36)
        arrow = {"arrowstyle": "->", "color": "#555555", "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", (to_x + side, to_y + down), (x - side, y - down), arrowprops=arrow)
    for name, (label, shape) in nodes.items():
        what, numbers = label.split("\\n")
        box = {"boxstyle": "round,pad=0.35" if shape == "box" else "round,pad=0.35,rounding_size=1"}
        box |= {"facecolor": "#eaf3f7" if shape == "box" else "#fdf0e4", "edgecolor": "#555555"}
        text = f"{names.get(name, what)}\n{numbers}"
        ax.text(*place[name], text, ha="center", va="center", bbox=box, fontsize=10)
    ax.set(xlim=(-0.45, 1.45), ylim=(-0.5, max(y for _, y in place.values()) + 0.5))
    ax.axis("off")
    operations = [nodes[n][0].split("\\n")[0] for n in nodes if nodes[n][1] == "box"][::-1]
    alt = f"A graph from four leaves down to the loss, through {', '.join(operations)}."
    caption = (
        "What one forward pass records: `ms.viz.graph(loss)` of two sparse layers with a tanh "
        "between them, drawn. Boxes are nodes of the tape, round ones the leaves where gradients "
        "end. The input is a plain array, so no edge leads to it."
    )
    written(folder, "graph", figure, alt, caption)


if __name__ == "__main__":
    everything(HERE.parent / "_generated")
