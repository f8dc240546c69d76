"""The computation graph as text that draws: DOT, Mermaid, and a picture in notebooks."""

from .engine import Tensor, require


class Graph:
    """What :func:`minisparse.viz.graph` returns.

    Attributes
    ----------
    dot : str
        For Graphviz.
    mermaid : str
        For Markdown pages and notebooks that draw Mermaid.
    """

    def __init__(self, dot, mermaid):
        self.dot, self.mermaid = dot, mermaid

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
    require(isinstance(tensor, Tensor), f"graph: needs a Tensor, not {type(tensor)}", TypeError)
    numbers: dict = {tensor._node or tensor: 0}  # what is met first has the smaller number
    dot, mermaid, edges = ["digraph {"], ["flowchart TD"], []
    for node in (queue := list(numbers)):
        op, i = getattr(node, "op", None), numbers[node]
        name, what = op.name if op else "leaf", f"{node.shape} {node.dtype}"
        dot.append(f'  n{i} [label="{name}\\n{what}", shape={"box" if op else "ellipse"}];')
        left, right = ("[", "]") if op else ("([", "])")
        mermaid.append(f'  n{i}{left}"{name}<br>{what}"{right}')
        for parent in node.parents if op else ():
            if parent is not None:
                if parent not in numbers:
                    numbers[parent] = len(numbers)
                    queue.append(parent)
                edges.append((numbers[parent], i))
    dot += [*(f"  n{a} -> n{b};" for a, b in edges), "}"]
    mermaid += [f"  n{a} --> n{b}" for a, b in edges]
    return Graph("\n".join(dot), "\n".join(mermaid))
