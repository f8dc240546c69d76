"""What the documentation says: every public name is in its reference, calls of others are right."""

import importlib.util
import pathlib
import re

import numpy as np
import pytest

from minisparse import testing

from .test_package import public_things

DOCS = pathlib.Path(__file__).parents[1] / "docs"


SPEC = importlib.util.spec_from_file_location("calls", DOCS / "calls.py")
CALLS = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(CALLS)


def test_every_public_name_is_in_the_reference():
    pages = [path.read_text() for path in (DOCS / "reference").glob("*.md")]
    blocks = re.findall(r"autosummary::\n   :toctree: generated\n\n(.*?)```", "".join(pages), re.S)
    listed = "".join(blocks).split()
    modules = {"cuda", "nn", "optim", "viz"}  # their names are there, one by one
    public = {name for name, _ in public_things()} - modules
    public |= {f"testing.{name}" for name in testing.__all__} | {"interop.torch.SparseLinear"}
    assert len(set(listed)) == len(listed)
    assert set(listed) == public


CASES = [(r, x) for r in CALLS.ROWS for x in CALLS.LIBRARIES if CALLS.cell(r, x) is not None]


@pytest.mark.parametrize(("row", "library"), CASES, ids=lambda x: x if isinstance(x, str) else x[0])
@pytest.mark.filterwarnings("ignore")  # those of other libraries
def test_calls_do_what_the_table_says(row, library):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    wanted, _ = CALLS.value(row, "minisparse")
    assert np.all(np.isfinite(wanted))
    got, entries = CALLS.value(row, library) if library != "minisparse" else (wanted, None)
    if got.shape != wanted.shape:  # a vector of values beside a matrix: compare at the entries
        dense, flat = (got, wanted) if got.ndim == 2 else (wanted, got)
        got, wanted = dense[entries], flat
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
