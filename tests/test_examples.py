"""The examples run, small, in a process of their own each."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import minisparse as ms

pytestmark = pytest.mark.compiled
EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"

# name: (arguments that make it small, packages it needs, the picture it draws)
TABLE = {
    "digits.py": (["--epochs", "2"], ["sklearn", "matplotlib", "tqdm"], "digits.png"),
    "embedding_bag.py": (
        ["--rows", "2000", "--dim", "4", "--files", "8", "--epochs", "1"],
        ["sklearn", "matplotlib", "networkx", "tqdm"],
        None,
    ),
    "inverse_poisson.py": (["--n", "8"], ["matplotlib"], "poisson.png"),
    "karate_gcn.py": (
        ["--steps", "20", "--starts", "2"],
        ["networkx", "matplotlib"],
        "karate.png",
    ),
    "locally_connected.py": (
        ["--side", "16", "--tiles", "5", "20", "--steps", "20"],
        ["sklearn", "PIL", "matplotlib"],
        "locally_connected.png",
    ),
    "million_neurons.py": (
        ["--neurons", "1000", "--steps", "3"],
        ["sklearn", "PIL", "tqdm"],
        None,
    ),
    "pruned_layer.py": (
        ["--keep", "0.2", "0.05", "--epochs", "2", "--more", "1"],
        ["sklearn", "matplotlib"],
        "pruned_layer.png",
    ),
    "second_order.py": (["--steps", "20"], ["sklearn", "matplotlib"], "second_order.png"),
    "sparse_vs_dense.py": (
        ["--densities", "0.02", "1", "--epochs", "1", "--starts", "2"],
        ["sklearn", "matplotlib", "tqdm"],
        "sparse_vs_dense.png",
    ),
    "trainable_positions.py": (["--n", "3"], [], None),
}


def run(name, arguments, folder):
    """Run an example in `folder`; return what it printed."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=folder,
        env={**os.environ, "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_example(name, tmp_path):
    arguments, packages, picture = TABLE[name]
    for package in packages:
        pytest.importorskip(package, reason="the example needs the extra `examples`")
    assert run(name, arguments, tmp_path).strip()
    assert [path.name for path in tmp_path.iterdir()] == [picture] * (picture is not None)
    if picture:
        assert (tmp_path / picture).stat().st_size > 10_000


def test_million_neurons_resumed_is_as_if_it_had_never_stopped(tmp_path):
    for package in ("sklearn", "PIL", "tqdm"):
        pytest.importorskip(package, reason="the example needs the extra `examples`")
    for arguments in (
        ["--steps", "5", "--save", "whole.npz"],
        ["--steps", "2", "--save", "half.npz"],
        ["--steps", "3", "--resume", "half.npz", "--save", "both.npz"],
    ):
        run("million_neurons.py", ["--neurons", "3000", *arguments], tmp_path)
    whole, half, both = (
        dict(flat(ms.load(tmp_path / f"{name}.npz"))) for name in ("whole", "half", "both")
    )
    assert whole == both != half


def flat(state, where=()):
    """Yield (keys, what can be compared) for everything in a nested dict."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from flat(value, (*where, key))
        else:
            yield (*where, key), value.tobytes() if isinstance(value, np.ndarray) else value


def test_million_neurons_scaling(tmp_path):
    for package in ("sklearn", "PIL", "tqdm"):
        pytest.importorskip(package, reason="the example needs the extra `examples`")
    printed = run("million_neurons.py", ["--scaling", "--neurons", "200", "--steps", "1"], tmp_path)
    assert "log-log slopes" in printed
