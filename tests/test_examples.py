"""The examples run, small, in a process of their own each."""

import os
import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
SMALL = {
    "digits.py": ["--epochs", "2"],
    "trainable_positions.py": ["--n", "3"],
}


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_example(name, tmp_path):
    if name == "digits.py":
        for needed in ("sklearn", "matplotlib", "tqdm"):
            pytest.importorskip(needed, reason="the example needs the extra `examples`")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *SMALL[name]],
        cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if name == "digits.py":
        assert (tmp_path / "digits.png").stat().st_size > 10_000
