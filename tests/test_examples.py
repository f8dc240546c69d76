"""The examples run, small, in a process of their own each."""

import os
import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"

# name: (arguments that make it small, packages it needs, the picture it draws)
TABLE = {
    "digits.py": (["--epochs", "2"], ["sklearn", "matplotlib", "tqdm"], "digits.png"),
    "inverse_poisson.py": (["--n", "8"], ["matplotlib"], "poisson.png"),
    "karate_gcn.py": (
        ["--steps", "20", "--starts", "2"],
        ["networkx", "matplotlib"],
        "karate.png",
    ),
    "second_order.py": (["--steps", "20"], ["sklearn", "matplotlib"], "second_order.png"),
    "trainable_positions.py": (["--n", "3"], [], None),
}


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_example(name, tmp_path):
    arguments, packages, picture = TABLE[name]
    for package in packages:
        pytest.importorskip(package, reason="the example needs the extra `examples`")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert [path.name for path in tmp_path.iterdir()] == [picture] * (picture is not None)
    if picture:
        assert (tmp_path / picture).stat().st_size > 10_000
