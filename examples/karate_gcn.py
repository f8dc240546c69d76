"""Zachary's karate club: graph convolution and graph attention, from two labels.

    pip install -e ".[examples]" && python examples/karate_gcn.py

A club of 34 members split in two. The networks are told who befriends whom, and the side of two
members: the instructor, node 0, and the administrator, node 33. They predict the other 32, from
several random starts. Writes `karate.png`: the predictions of the first start, and the weights of
its edges.

Kipf and Welling, "Semi-supervised classification with graph convolutional networks", 2017;
Veličković et al., "Graph attention networks", 2018; Zachary, "An information flow model for
conflict and fission in small groups", 1977.
"""

import argparse

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import networkx as nx
import numpy as np

import minisparse as ms
from minisparse import nn

LABELLED = [0, 33]


def glorot(rng, n_in, n_out):
    return ms.tensor(rng.normal(0, (2 / (n_in + n_out)) ** 0.5, (n_in, n_out)), requires_grad=True)


class Convolution(nn.Module):
    """H = A X W: each node adds up itself and its neighbours, by weights that stay as they are."""

    def __init__(self, A, n_in, n_out, rng):
        degree = A.sum(axis=1).data
        self.edges = A.scale(rows=degree**-0.5, cols=degree**-0.5)  # D^-1/2 A D^-1/2
        self.W = glorot(rng, n_in, n_out)

    def forward(self, x):
        return self.edges @ (x @ self.W)


class Attention(nn.Module):
    """H = softmax(e) X W: the weight of edge (i, j) follows from what its ends hold."""

    def __init__(self, A, n_in, n_out, rng):
        self.pattern = A.pattern
        self.W = glorot(rng, n_in, n_out)
        self.to, self.fro = glorot(rng, n_out, 1), glorot(rng, n_out, 1)

    def forward(self, x):
        h = x @ self.W
        ones = np.ones((len(h), 1))
        left = ms.concatenate([h @ self.to, ones], axis=1)
        right = ms.concatenate([ones, h @ self.fro], axis=1)
        e = ms.sddmm(left, right, self.pattern)  # to · h_i + fro · h_j, on the edges only
        self.edges = e.with_values(ms.leaky_relu(e.values, 0.2)).row_softmax()
        return self.edges @ h


def train(layer, A, sides, steps, seed):
    """Train two layers; return each node's probability of side 1, and the weights of the edges."""
    rng = np.random.default_rng(seed)
    model = nn.Sequential(layer(A, len(sides), 16, rng), nn.Tanh(), layer(A, 16, 2, rng))
    optimizer = ms.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    x = np.eye(len(sides))  # nothing is known of a node but which it is
    for _ in range(steps):
        optimizer.zero_grad()
        nn.cross_entropy(model(x)[LABELLED], sides[LABELLED]).backward()
        optimizer.step()
    with ms.no_grad():
        probability = ms.softmax(model(x), axis=1)[:, 1].data
    return probability, model[2].edges.to_scipy()


def draw(ax, graph, title, probability, edges, wrong):
    where = nx.kamada_kawai_layout(graph)
    width = [8 * (edges[i, j] + edges[j, i]) for i, j in graph.edges]
    nx.draw_networkx_edges(graph, where, width=width, edge_color="0.6", ax=ax)
    nodes = nx.draw_networkx_nodes(
        graph, where, node_color=probability, cmap="coolwarm", vmin=0, vmax=1, ax=ax
    )
    nodes.set(edgecolors=["black" if w else "none" for w in wrong], linewidths=2.5)
    nx.draw_networkx_labels(graph, where, font_size=8, ax=ax)
    ax.axis("off")
    ax.set_title(f"{title}: {sum(wrong)} wrong (ringed)")
    return nodes


def main(steps, starts):
    graph = nx.karate_club_graph()
    sides = np.array([int(club != "Mr. Hi") for _, club in graph.nodes(data="club")])
    others = np.setdiff1d(np.arange(len(sides)), LABELLED)
    adjacency = nx.to_scipy_sparse_array(graph, weight=None, dtype=float)
    adjacency.setdiag(1)  # a node hears itself too
    A = ms.SparseTensor.from_scipy(adjacency)

    figure, axes = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    for ax, layer in zip(axes, (Convolution, Attention), strict=True):
        runs = [train(layer, A, sides, steps, seed) for seed in range(starts)]
        wrong = np.array([(p > 0.5) != sides for p, _ in runs])
        right = 1 - wrong[:, others].mean(axis=1)
        print(
            f"{layer.__name__:12} accuracy on {len(others)} unlabelled nodes, {starts} starts: "
            f"mean {right.mean():.1%}, from {right.min():.1%} to {right.max():.1%}"
        )
        nodes = draw(ax, graph, layer.__name__, *runs[0], wrong[0])
    figure.colorbar(nodes, ax=axes, label="probability of the administrator's side")
    figure.savefig("karate.png", dpi=120)
    print("the graph, its edges as wide as their weights in the last layer: karate.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--starts", type=int, default=10, help="how many random starts")
    args = parser.parse_args()
    main(args.steps, args.starts)
