"""Saving and loading: complete or absent, never executed, damage always seen."""

import copy
import json
import pickle
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import minisparse as ms


def check_equal(a, b):
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            check_equal(a[key], b[key])
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()
    else:
        assert a == b or a != a


arrays = hnp.arrays(
    st.sampled_from(["f4", "f8", "i4", "i8", "u1", "u8", "?", ">f4", "<i2"]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
patterns = st.sampled_from(
    [ms.Pattern.diagonal(3), ms.Pattern((2, 0), [0, 0, 0], []), ms.Pattern.tril(4)]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
states = st.recursive(
    st.dictionaries(st.text(), scalars | arrays | patterns, max_size=4),
    lambda inner: st.dictionaries(st.text(), inner | scalars, max_size=3),
    max_leaves=6,
)


@given(state=states)
def test_round_trip(tmp_path_factory, state):
    path = tmp_path_factory.mktemp("io") / "state"
    ms.save(path, state)
    back = ms.load(path)
    check_equal(back, state)
    assert [p.name for p in path.parent.iterdir()] == ["state"]


def test_details(tmp_path):
    path = tmp_path / "x.npz"
    p = ms.Pattern.random((50, 40), density=0.2, rng=0)
    x = np.arange(6.0).reshape(2, 3)
    ms.save(path, {"p": p, "q": {"p": pickle.loads(pickle.dumps(p))}, "F": x.T, "n": np.float32(2)})
    back = ms.load(path)
    assert back["p"] is back["q"]["p"]
    assert back["p"] == p
    assert back["F"].flags.writeable
    assert back["n"] == 2
    assert back["n"].dtype == np.float32
    with zipfile.ZipFile(path) as archive:  # each distinct pattern once
        assert len(archive.namelist()) == 1 + 2 + 2
    assert ms.load(str(path))["p"] == p


@pytest.mark.parametrize("saved_after", [0, 3])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_going_on_is_never_having_stopped(tmp_path, name, saved_after):
    """CASES 42, through a file, with dropout and a schedule."""
    options = {"momentum": 0.9} if name == "SGD" else {}
    x = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)

    def start():
        model = ms.nn.Sequential(
            ms.nn.SparseLinear(6, 9, fan_in=2, rng=1),
            ms.nn.Dropout(0.3, rng=2),
            ms.nn.LayerNorm(9),
            ms.nn.GELU(),
            ms.nn.Linear(9, 1, rng=3),
        )
        opt = getattr(ms.optim, name)(model.parameters(), lr=0.1, **options)
        return model, opt, ms.optim.CosineLR(opt, 20, warmup=2)

    def steps(model, opt, schedule, n):
        for _ in range(n):
            opt.zero_grad()
            (model(x) ** 2).mean().backward()
            opt.step()
            schedule.step()

    whole = start()
    steps(*whole, saved_after)
    ms.save(tmp_path / "s", {str(i): part.state_dict() for i, part in enumerate(whole)})
    steps(*whole, 4)
    other = start()
    steps(*other, 1)  # whatever it did before
    state = ms.load(tmp_path / "s")
    for i, part in enumerate(other):
        part.load_state_dict(state[str(i)])
    steps(*other, 4)
    for p, q in zip(whole[0].parameters(), other[0].parameters(), strict=True):
        check_equal(ms.nn._state(p), ms.nn._state(q))


@pytest.mark.parametrize(
    "state",
    [
        {"a": ms.tensor([1.0])},
        {"a": ms.diag([1.0])},
        {"a": ms.SparseParameter(sp.eye_array(2))},
        {"a": np.array([None])},
        {"a": np.array([1j])},
        {"a": {"b": object()}},
        {"a": ["x"]},
        {"a": [np.ones(2), np.ones(3)]},
        {1: 2},
        [1.0],
        {"a": ms.nn.Linear(1, 1)},
        {"a": np.array(["text"])},
    ],
)
def test_what_cannot_be_saved_touches_nothing(tmp_path, state):
    path = tmp_path / "s"
    ms.save(path, {"x": 1})
    with pytest.raises(TypeError, match="save"):
        ms.save(path, state)
    assert ms.load(path) == {"x": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def small_file(path):
    p = ms.Pattern.random((5, 4), density=0.5, rng=0)
    state = {"p": p, "x": np.arange(4.0), "step": 3, "name": "a"}
    ms.save(path, state)
    return state, path.read_bytes()


def test_every_flipped_bit_and_every_cut_is_seen(tmp_path):
    """A damaged file is a ValueError, or what was saved: zip files have bytes nobody reads."""
    state, whole = small_file(tmp_path / "s")
    broken, seen = tmp_path / "broken", 0
    for i in range(0, len(whole), 3):
        data = bytearray(whole)
        data[i] ^= 1 << (i % 8)
        for damaged in (data, whole[:i]):
            broken.write_bytes(damaged)
            try:
                check_equal(ms.load(broken), state)
            except ValueError:
                seen += 1
    assert seen > len(whole) / 3


def test_foreign_files(tmp_path):
    path = tmp_path / "s"
    evil = pickle.dumps({"x": 1})
    for write in (
        lambda file: file.write(b""),
        lambda file: file.write(evil),
        lambda file: file.write(b"hello"),
        lambda file: np.savez(file, x=np.ones(3)),
        lambda file: np.savez_compressed(file, x=np.ones(3)),
        lambda file: np.save(file, np.ones(3)),
    ):
        with open(path, "wb") as file:
            write(file)
        with pytest.raises(ValueError, match="damaged or was not saved"):
            ms.load(path)
    with pytest.raises(FileNotFoundError):
        ms.load(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"absent'$"):
        ms.save(tmp_path / "absent" / "state.npz", {})


def forged(path, tree, **members):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tree", json.dumps(tree))
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)


def test_forged_files_allocate_nothing_and_run_nothing(tmp_path):
    path = tmp_path / "s"
    header = (
        b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '%s', 'fortran_order': False, 'shape': (%d,), }"
    )

    def npy(dtype, n, body=b""):
        return (header % (dtype, n)).ljust(127) + b"\n" + body

    tree = {"format": "minisparse 1", "state": {"dict": {"x": {"array": "0"}}}}
    forged(path, tree, **{"0": npy(b"<f8", 1, b"\0" * 8)})
    assert ms.load(path) == {"x": np.zeros(1)}
    for data in (
        npy(b"<f8", 10**15),
        npy(b"<f8", 2, b"\0" * 8),
        npy(b"|O", 1, pickle.dumps(1)),
        npy(b"<U1", 1, b"\0" * 4),
        b"\x93NUMPY\x09\x00",
        b"",
    ):
        forged(path, tree, **{"0": data})
        with pytest.raises(ValueError, match="damaged"):
            ms.load(path)
    for state in (
        {"dict": {"x": {"array": "7"}}},
        {"dict": {"x": {"class": "os"}}},
        {"dict": {"x": {"pattern": {"shape": [2, 2]}}}},
        {"dict": 3},
        {"dict": {"x": [{"array": "0"}]}},
        [],
    ):
        forged(path, {"format": "minisparse 1", "state": state})
        with pytest.raises(ValueError, match="damaged"):
            ms.load(path)
    twice = {"dict": {"x": {"array": "0"}, "y": {"array": "0"}}}
    forged(path, {"format": "minisparse 1", "state": twice}, **{"0": npy(b"<f8", 1, b"\0" * 8)})
    with pytest.raises(ValueError, match="damaged"):
        ms.load(path)
    forged(path, {"format": "minisparse 9", "state": {"dict": {}}})
    with pytest.raises(ValueError, match="minisparse 9"):
        ms.load(path)


@pytest.mark.parametrize("claim", [2**31 - 2, 2**32 - 2, 1000])
def test_sizes_are_not_believed(tmp_path, claim):
    """Members that claim gigabytes, or all together more than the file."""
    path = tmp_path / "s"
    ms.save(path, {str(i): np.arange(4.0) for i in range(20)})
    data = bytearray(path.read_bytes())
    at = data.find(b"PK\1\2")
    while at >= 0:
        data[at + 20 : at + 28] = struct.pack("<II", claim, claim)
        at = data.find(b"PK\1\2", at + 1)
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(ValueError, match="claim more than is there"):
        ms.load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 500_000


def test_killed_in_the_middle(tmp_path, in_new_process):
    """The old file is there, whole, whenever the process dies."""
    path = tmp_path / "s"
    ms.save(path, {"x": 1})
    in_new_process(
        "import os, numpy as np, minisparse as ms\n"
        "write, count = np.lib.format.write_array, []\n"
        "def dying(*args, **kwargs):\n"
        "    if count:\n"
        "        os._exit(0)\n"
        "    count.append(1)\n"
        "    write(*args, **kwargs)\n"
        "np.lib.format.write_array = dying\n"
        f"ms.save({str(path)!r}, {{'x': np.ones(100_000), 'y': np.ones(3)}})\n"
        "raise SystemExit('it should have died')\n"
    )
    assert ms.load(path) == {"x": 1}


def test_the_file_is_as_readable_as_others(tmp_path):
    ms.save(tmp_path / "s", {"x": 1})
    (tmp_path / "other").write_text("")
    assert (tmp_path / "s").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_an_error_in_the_middle_leaves_no_trace(tmp_path, monkeypatch):
    path = tmp_path / "s"
    ms.save(path, {"x": 1})

    def full(*args, **kwargs):
        raise OSError("the disk is full")

    monkeypatch.setattr(np.lib.format, "write_array", full)
    with pytest.raises(OSError, match="full"):
        ms.save(path, {"x": np.ones(3)})
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    assert ms.load(path) == {"x": 1}


def test_everything_public_is_copied_and_pickled():
    """Copies are independent; patterns, which cannot change, are shared in memory."""
    model = ms.nn.Sequential(
        ms.nn.SparseLinear(4, 3, fan_in=2, rng=0),
        ms.nn.Dropout(0.5, rng=1),
        ms.nn.Embedding(4, 2, rng=2),
        ms.nn.LayerNorm(3),
    )
    opt = ms.optim.Adam(model[0].parameters())
    model[0](np.ones((2, 4))).sum().backward()
    opt.step()
    things = {
        "tensor": ms.tensor([1.0, 2.0], requires_grad=True),
        "pattern": ms.Pattern.diagonal(3),
        "sparse": ms.diag([1.0, 2.0]),
        "parameter": ms.SparseParameter(sp.eye_array(3), share=np.zeros((3, 3), int)),
        "rows": ms.RowGrad([1, 1], np.ones((2, 2)), (3, 2)),
        "model": model,
        "optimizer": opt,
        "schedule": ms.optim.StepLR(opt, 2),
        "graph": ms.viz.graph(ms.tensor([1.0], requires_grad=True) * 2),
    }
    for duplicate in (copy.deepcopy(things), pickle.loads(pickle.dumps(things))):
        assert repr(duplicate["sparse"]) == repr(things["sparse"])
        assert duplicate["pattern"] == things["pattern"]
        check_equal(duplicate["model"].state_dict(), model.state_dict())
        check_equal(duplicate["optimizer"].state_dict(), opt.state_dict())
        # A copied optimizer trains the copied model, and leaves the original alone.
        before = model.state_dict()
        duplicate["optimizer"].step()
        duplicate["schedule"].step()
        duplicate["schedule"].step()
        assert duplicate["optimizer"].param_groups[0]["lr"] != opt.param_groups[0]["lr"]
        check_equal(model.state_dict(), before)
        changed = duplicate["model"].state_dict()["0.weight"]["free"]
        assert not np.array_equal(changed, before["0.weight"]["free"])
        duplicate["tensor"].data = [5.0, 5.0]
        np.testing.assert_array_equal(things["tensor"].data, [1.0, 2.0])
        np.testing.assert_array_equal(duplicate["rows"].to_dense(), things["rows"].to_dense())
