"""Save and load nested dicts of arrays, numbers, strings and patterns, without pickle.

A file is a .npz: one ``.npy`` member for each array, uncompressed, and the member ``tree``, JSON
text in which ``{"array": "3"}`` stands for the array of that name and ``{"pattern": ...}`` for a
pattern; each distinct pattern is stored once.
"""

import contextlib
import errno
import io
import json
import os
import secrets
import zipfile
from pathlib import Path

import numpy as np

from .engine import require
from .pattern import Pattern

_FORMAT = "minisparse 1"


def save(path, state):
    """Write a nested dict to one file, which is complete or absent.

    Parameters
    ----------
    path : str or path
        Used as it is; ``.npz`` is the usual ending.
    state : dict
        With string keys; its values are arrays of numbers or booleans, numbers, strings, booleans,
        None, Patterns, and dicts of these: what every ``state_dict()`` gives.

    Raises
    ------
    TypeError
        If something else is in it.  No file has been touched then.
    FileNotFoundError
        If the directory of `path` does not exist.

    Notes
    -----
    It is written to a temporary file beside `path`, which then takes its place: whatever happens
    meanwhile, what was there before is intact.

    Examples
    --------
    >>> import os, tempfile
    >>> import numpy as np
    >>> import minisparse as ms
    >>> path = os.path.join(tempfile.mkdtemp(), "state.npz")
    >>> ms.save(path, {"step": 3, "model": {"weight": np.array([1.0, 2.0])}})
    >>> ms.load(path)
    {'step': 3, 'model': {'weight': array([1., 2.])}}
    """
    arrays: dict[str, np.ndarray] = {}
    patterns: dict[Pattern, dict] = {}
    require(isinstance(state, dict), f"save: needs a dict, not a {type(state).__name__}", TypeError)
    tree = json.dumps({"format": _FORMAT, "state": _packed(state, "", arrays, patterns)})
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "save: there is no such directory", str(path.parent))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                archive.writestr("tree", tree)
                for name, array in arrays.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _packed(value, where, arrays, patterns):
    """Return `value` as JSON can hold it; put arrays aside under a number."""

    def put(array):
        arrays[name := str(len(arrays))] = array
        return {"array": name}

    if isinstance(value, dict):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"save: the key {wrong[0]!r} in {where or 'the state'} is no string")
        parts = {k: _packed(v, f"{where}[{k!r}]", arrays, patterns) for k, v in value.items()}
        return {"dict": parts}
    if isinstance(value, Pattern):
        if value not in patterns:
            parts = {"indptr": put(value.indptr), "indices": put(value.indices)}
            patterns[value] = {"shape": list(value.shape), **parts}
        return {"pattern": patterns[value]}
    if isinstance(value, (str, bool, int, float, type(None))) and type(value) is not np.float64:
        return value
    if not isinstance(value, (np.ndarray, np.generic)) or value.dtype.kind not in "biuf":
        kind = f"{type(value).__name__} of dtype {getattr(value, 'dtype', None)}"
        hint = "np.array(...), .numpy() and state_dict() give what can be saved"
        raise TypeError(f"save: {where} is a {kind}; {hint}")
    return put(np.asarray(value))


def load(path):
    """Read what :func:`save` wrote.

    Parameters
    ----------
    path : str or path

    Returns
    -------
    dict
        Arrays are new and writable; equal patterns are one object.

    Raises
    ------
    ValueError
        If the file is damaged, or not such a file.  Nothing in it is ever executed, and what is
        allocated is in proportion to the length of the file.
    OSError
        If it cannot be read.
    """
    with open(path, "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                sizes = [(m.file_size, m.compress_size) for m in archive.infolist()]
                length = os.fstat(file.fileno()).st_size
                if any(a != b for a, b in sizes) or sum(a for a, _ in sizes) > length:
                    raise ValueError("a member is compressed, or they claim more than is there")
                tree = json.loads(archive.read("tree"))
                if tree["format"] != _FORMAT or not isinstance(tree["state"]["dict"], dict):
                    raise ValueError(f"its format is {tree['format']!r}")
                return _unpacked(tree["state"], archive, {}, set(archive.namelist()))
        except Exception as error:
            if isinstance(error, OSError) and error.errno != errno.EINVAL:  # of a wrong offset
                raise
            raise ValueError(f"load: {path} is damaged or was not saved here ({error})") from error


def _unpacked(value, archive, patterns, unread):
    """Return what `value` stands for; each member is read once, so that no file grows in memory."""
    if type(value) not in (dict, list):  # a list is nothing that `save` writes
        return value
    ((kind, content),) = value.items()
    if kind == "dict":
        return {k: _unpacked(v, archive, patterns, unread) for k, v in content.items()}
    if kind == "array":
        unread.remove(f"{content}.npy")
        return _read(archive, content)
    require(kind == "pattern", f"unknown {kind}")
    key = json.dumps(content)
    if key not in patterns:
        parts = (content[name] for name in ("indptr", "indices"))
        arrays = (_unpacked(part, archive, patterns, unread) for part in parts)
        patterns[key] = Pattern(content["shape"], *arrays)
    return patterns[key]


def _read(archive, name):
    """Read one array, whose header is checked against what is there before it is believed."""
    data = archive.read(f"{name}.npy")
    stream = io.BytesIO(data)
    require(np.lib.format.read_magic(stream) == (1, 0), "another version of the format")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    if dtype.kind not in "biuf" or min(shape, default=0) < 0:
        raise ValueError(f"an array of dtype {dtype} and shape {shape}")
    flat = np.frombuffer(data, dtype, offset=stream.tell())
    return flat.reshape(shape, order="F" if fortran else "C").copy(order="K")
