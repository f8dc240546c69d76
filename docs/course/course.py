"""What the cells of the course share: judging an exercise, showing source, timing, drawing."""

import inspect
import re
import time

import matplotlib.pyplot as plt
import numpy as np

import minisparse as ms


def check(test):
    """Run the test of an exercise now; say "not yet" as long as its body is missing."""
    name = test.__name__.replace("exercise_", "exercise ").replace("_", ".")
    try:
        test()
    except NotImplementedError:
        print(f"{name}: not yet")
    else:
        print(f"{name}: correct")


def agree(name, mine, right):
    """Fail if the array `mine` is not `right` up to rounding; say where it differs first."""
    mine, right = np.asarray(mine), np.asarray(right)
    assert mine.shape == right.shape, f"{name} has shape {mine.shape}, not {right.shape}"
    for place in np.argwhere(~np.isclose(mine, right))[:1]:
        values = f"{mine[*place]:.6g}, not {right[*place]:.6g}"
        raise AssertionError(f"{name}[{', '.join(map(str, place))}] is {values}")


def lend(f, kind, gradients):
    """Make of `f`, a function on a tape of our own, an operation that ms.gradcheck can judge.

    `kind` puts an array on the tape; ``gradients(output, inputs, g)`` walks it.
    """

    @ms.primitive
    def ours(*arrays):
        return f(*map(kind, arrays)).value

    @ours.vjp
    def _(g, need, arrays):
        inputs = [kind(a) for a in arrays]
        return tuple(gradients(f(*inputs), inputs, g))

    return ours


def show(function):
    """Print a function of the package where it stands, without its docstring."""
    function = inspect.unwrap(getattr(function, "py_func", function))
    lines, first = inspect.getsourcelines(function)
    source = re.sub(r' *"""(.|\n)*?"""\n+', "", "".join(lines), count=1)
    print(f"# {function.__module__}, line {first}\n{source}")


def show_rule(primitive):
    """Print the gradient rule of a primitive of the package: it stands right below it."""
    function = inspect.unwrap(primitive)
    lines, _ = inspect.findsource(function)
    first = next(i for i, x in enumerate(lines) if x.startswith(f"@{function.__name__}.vjp"))
    print(f"# {function.__module__}, line {first + 1}")
    print("".join(lines[first:]).split("\n\n\n")[0])


def ms_graph(tensor):
    """Read labels and edges for `draw` off a graph of the package's."""
    dot = ms.viz.graph(tensor).dot
    labels = {n: t.replace("\\n", "\n") for n, t in re.findall(r'(n\d+) \[label="(.*?)"', dot)}
    return labels, re.findall(r"(n\d+) -> (n\d+);", dot)


def quickest(calls, seconds=0.3):
    """Return the least time of each of the named calls in seconds.

    They take turns, so that what else the machine does hits all of them: at least three times, and
    as often as fits into `seconds` for each.
    """
    for call in calls.values():
        call()  # compiles, fills caches
    best, turns = dict.fromkeys(calls, float("inf")), 0
    end = time.perf_counter() + seconds * len(calls)
    while turns < 3 or time.perf_counter() < end:
        turns += 1
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def draw(labels, edges):
    """Draw a graph from left to right: `labels` by node, `edges` as pairs (from, to)."""
    depth = dict.fromkeys(labels, 0)
    for _ in labels:  # the longest way from a leaf
        for a, b in edges:
            depth[b] = max(depth[b], depth[a] + 1)
    place = {}
    for node, d in depth.items():
        others = [n for n in labels if depth[n] == d]
        place[node] = d, (len(others) - 1) / 2 - others.index(node)
    _, ax = plt.subplots(figsize=(2.1 * (1 + max(depth.values())), 3))
    for a, b in edges:
        bend = -0.4 if depth[b] - depth[a] > 1 else 0  # around what stands between
        style = {"arrowstyle": "->", "color": "0.4", "shrinkA": 30, "shrinkB": 34}
        style["connectionstyle"] = f"arc3,rad={bend}"
        ax.annotate("", place[b], place[a], arrowprops=style)
    for node, text in labels.items():
        leaf = not any(b == node for _, b in edges)
        box = {"boxstyle": "round,pad=0.5" if leaf else "square,pad=0.5", "edgecolor": "0.3"}
        ax.text(
            *place[node],
            text,
            ha="center",
            va="center",
            fontsize=10,
            bbox=box | {"facecolor": "#dcebf7" if leaf else "#fdf0d5"},
        )
    xs, ys = zip(*place.values(), strict=True)
    ax.set(xlim=(min(xs) - 0.6, max(xs) + 0.6), ylim=(min(ys) - 0.7, max(ys) + 0.7))
    ax.axis("off")
    return ax
