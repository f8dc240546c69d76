"""The computation graph as text that draws: DOT, Mermaid, and a picture in notebooks."""

from __future__ import annotations

from .engine import Tensor


class Graph:
    """What :func:`graph` returns.

    Attributes
    ----------
    dot : str
        For Graphviz.
    mermaid : str
        For Markdown pages and notebooks that draw Mermaid.
    """

    def __init__(self, nodes, edges):
        self._nodes, self._edges = nodes, edges

    @property
    def dot(self):
        shapes = {"op": "box", "leaf": "ellipse"}
        lines = [f'  n{i} [label="{t}", shape={shapes[k]}];' for i, (k, t) in self._nodes.items()]
        lines += [f"  n{a} -> n{b};" for a, b in self._edges]
        return "\n".join(["digraph {", *lines, "}"])

    @property
    def mermaid(self):
        marks = {"op": ("[", "]"), "leaf": ("([", "])")}
        lines = []
        for i, (kind, text) in self._nodes.items():
            left, right = marks[kind]
            lines.append(f'  n{i}{left}"{text}"{right}')
        lines += [f"  n{a} --> n{b}" for a, b in self._edges]
        return "\n".join(["flowchart TD", *lines])

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/vnd.mermaid": self.mermaid, "text/plain": self.dot}

    def __repr__(self):
        return self.dot


def graph(tensor):
    """Draw how a Tensor was computed.

    Parameters
    ----------
    tensor : Tensor, SparseTensor or SparseParameter

    Returns
    -------
    Graph
        With ``.dot`` and ``.mermaid`` text, and a picture in notebooks.  Boxes are operations,
        rounded ones the leaves whose gradients they lead to, each with its shape and dtype.

    Examples
    --------
    >>> import minisparse as ms
    >>> x = ms.tensor([1.0, 2.0], requires_grad=True)
    >>> print(ms.viz.graph((x * x).sum()).mermaid)
    flowchart TD
      n0["sum<br>() float64"]
      n1["multiply<br>(2,) float64"]
      n2(["leaf<br>(2,) float64"])
      n1 --> n0
      n2 --> n1
      n2 --> n1
    """
    if hasattr(tensor, "__tensor__"):
        tensor = tensor.__tensor__()
    if not isinstance(tensor, Tensor):
        raise TypeError(f"graph: needs a Tensor, got a {type(tensor).__name__}")
    found: dict = {tensor._node or tensor: 0}  # what is met first has the smaller number
    nodes, edges = {}, []
    for node in (queue := list(found)):
        op = getattr(node, "op", None)
        name = op.name if op else "leaf"
        nodes[found[node]] = ("op" if op else "leaf"), f"{name}<br>{node.shape} {node.dtype}"
        for parent in node.parents if op else ():
            if parent is not None:
                if parent not in found:
                    found[parent] = len(found)
                    queue.append(parent)
                edges.append((found[parent], found[node]))
    return Graph(nodes, edges)
