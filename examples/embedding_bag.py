"""Whose docstring is this? Text classification with a table of which each step touches little.

    pip install -e ".[examples]" && python examples/embedding_bag.py

The texts are the first paragraphs of docstrings in the source of installed packages; the question
is which package one comes from. Words and pairs of words are hashed to rows of a table of
200,000 × 32, a text is the mean of its rows, and a linear layer guesses. The mean is a product
with a constant sparse matrix, and the table's gradient (`sparse=True`) holds only the rows that
were looked up, so Adam changes only those. A fifth of the files is held out. The numbers depend on
the packages' versions, the seconds on what else the machine does.

Joulin, Grave, Bojanowski and Mikolov, "Bag of tricks for efficient text classification", 2017.
"""

import argparse
import ast
import importlib.util
import itertools
import os
import pathlib
import re
import sysconfig
import time
import warnings
import zlib

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # two thread pools that spin slow each other

import numpy as np
from tqdm import tqdm

import minisparse as ms
from minisparse import nn

PACKAGES = ["Python", "numpy", "scipy", "sklearn", "matplotlib", "networkx"]


def sources(package):
    """Return the files of a package, tests left out; of Python, the standard library's."""
    if package == "Python":
        root = pathlib.Path(sysconfig.get_path("stdlib"))
    else:
        root = pathlib.Path(importlib.util.find_spec(package).origin).parent
    skip = {"tests", "test", "site-packages", "dist-packages"}
    return sorted(f for f in root.rglob("*.py") if not skip & set(f.relative_to(root).parts))


def docstrings(file):
    """Yield the first paragraph of every docstring in a file."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # templates, and files that are broken on purpose
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield (ast.get_docstring(node) or "").split("\n\n")[0]


def hashed(text, rows):
    """Return the rows of the words and of the pairs of words of a text."""
    words = re.findall(r"\w+", text.lower())
    grams = words + [" ".join(pair) for pair in itertools.pairwise(words)]
    return np.array([zlib.crc32(gram.encode()) % rows for gram in grams], dtype=np.int64)


def corpus(rows, files_each):
    """Return (texts as rows of the table, labels), to train on and held out; no text twice."""
    warnings.simplefilter("ignore")  # of the sources' old escapes
    rng, seen, parts = np.random.default_rng(0), set(), ([], [])
    for label, package in enumerate(tqdm(PACKAGES, desc="reading")):
        files = sources(package)
        for file in rng.permutation(files)[:files_each]:
            part = parts[rng.random() < 0.2]  # a file is seen whole, or held out whole
            for text in docstrings(file):
                if len(text.split()) > 3 and text not in seen:
                    seen.add(text)
                    part.append((hashed(text, rows), label))
    return [([ids for ids, _ in part], np.array([y for _, y in part])) for part in parts]


def bag(texts):
    """Return the rows that texts look up, and the matrix that takes the mean for each text."""
    lengths = np.array([len(ids) for ids in texts])
    indptr = np.append(0, np.cumsum(lengths))
    pattern = ms.Pattern((len(texts), indptr[-1]), indptr, np.arange(indptr[-1]))
    mean = np.repeat(1 / lengths, lengths).astype(np.float32)
    return np.concatenate(texts), ms.SparseTensor(pattern, mean)


def batches(texts, labels, size, rng):
    order = rng.permutation(len(texts))
    for at in range(0, len(order), size):
        chosen = order[at : at + size]
        yield *bag([texts[i] for i in chosen]), labels[chosen]


def network(rows, d, sparse):
    table = nn.Embedding(rows, d, sparse=sparse, rng=0)
    table.weight.data = 0.1 * table.weight.data
    return table, nn.Linear(d, len(PACKAGES), rng=1)


def train(table, head, data, epochs, batch, most=None):
    """Train with Adam, for `most` steps at most; return the rows and the seconds of each step."""
    optimizer = ms.optim.Adam([table.weight, *head.parameters()], lr=5e-3)
    rng, touched, seconds = np.random.default_rng(0), [], []
    steps = itertools.chain.from_iterable(batches(*data, batch, rng) for _ in range(epochs))
    total = min(epochs * -(-len(data[0]) // batch), most or np.inf)
    for ids, mean, labels in tqdm(itertools.islice(steps, most), total=total):
        start = time.perf_counter()
        optimizer.zero_grad()
        nn.cross_entropy(head(mean @ table(ids)), labels).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        touched.append(len(getattr(table.weight.grad, "rows", table.weight.grad)))
    return touched, seconds


def main(rows, d, files_each, epochs, batch):
    data, (texts, truth) = corpus(rows, files_each)
    ms.warmup(dtypes=("float32",))  # the times below hold no compilation
    print(f"{len(data[0]):,} docstrings to train on, {len(texts):,} held out")
    table, head = network(rows, d, sparse=True)
    touched, seconds = train(table, head, data, epochs, batch)
    ids, mean = bag(texts)
    with ms.no_grad():
        guess = np.argmax(head(mean @ table(ids)), axis=1)
    most = np.bincount(data[1]).argmax()
    print(f"accuracy, held out: {np.mean(guess == truth):.1%}", end="; ")
    print(f"always {PACKAGES[most]}: {np.mean(truth == most):.1%}")
    for i, name in enumerate(PACKAGES):
        print(f"  {name:10} {np.mean(guess[truth == i] == i):6.1%} of {np.sum(truth == i):5,}")
    print(f"rows of the table in a step of {batch} texts: {np.mean(touched):,.0f} of {rows:,}")
    _, dense = train(*network(rows, d, sparse=False), data, 1, batch, most=20)
    print(f"median step: {1e3 * np.median(seconds):.2f} ms", end="; ")
    print(f"with a dense gradient of the table: {1e3 * np.median(dense):.2f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000, help="of the table")
    parser.add_argument("--dim", type=int, default=32, help="columns of the table")
    parser.add_argument("--files", type=int, default=400, help="of each package, at most")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()
    main(args.rows, args.dim, args.files, args.epochs, args.batch)
