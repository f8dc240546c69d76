"""Fuzzing: random programs, damaged files, and damaged structures with every access checked.

How many inputs are tried goes by the profile: ``pytest --hypothesis-profile=deep`` for many.
"""

import io
import json
import tracemalloc
import warnings
import zipfile

import numpy as np
import pytest
from hypothesis import Phase, event, find, given, settings
from hypothesis import strategies as st

import minisparse as ms
from minisparse.kernels import memory
from minisparse.ops import RowGrad

from . import test_io
from .layouts import LAYOUTS
from .programs import OPS, STEP, TRANSFORMS, plain, programs


@pytest.fixture(autouse=True, scope="module")
def _recycled_memory():
    """Let every result of a kernel, however small, lie in a used block, which is full of NaN."""
    put = memory._pool.put

    def spoil_and_put(size, block):
        block[0][...] = 255
        put(size, block)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory._pool, "put", spoil_and_put)
        patch.setattr(memory, "SMALL", 0)
        yield


def often(factor):
    """Try so many times as many inputs as other tests do."""
    return settings(max_examples=factor * settings().max_examples)


# --------------------------------------------------------------------------------------- programs


class Derivatives:
    """What the interpreter finds for one value of a program, with what floating point leaves open.

    Every method returns (numbers, tolerance): so much a result may be off.
    """

    def __init__(self, p, out):
        self.p, self.out, self.needed = p, out, set()
        numbers = [out]
        while numbers:
            self.needed.add(number := numbers.pop())
            numbers += p.nodes[number].args

    def within(self, compute):
        """Compare `compute(noise)` without noise and with."""
        exact, *noisy = (np.asarray(compute(noise)) for noise in range(3))
        spread = max(np.max(np.abs(x - exact), initial=0) for x in noisy)
        largest = np.max(np.abs(exact), initial=self.p.largest)
        return exact, 64 * spread + 64 * np.finfo(self.p.dtype).eps * largest

    def along(self, d, shift=None, noise=0):
        """Return J d at the leaves plus `shift`, without a tolerance."""
        leaves, held = self.p.leaves, None
        if shift is not None:
            held = self.p.interpret(leaves, noise, self.needed)
            leaves = map(np.add, leaves, shift)
        moved = [x + 1j * STEP * v for x, v in zip(leaves, d, strict=True)]
        with np.errstate(all="ignore"):
            return plain(self.p.interpret(moved, noise, self.needed, held)[self.out]).imag / STEP

    def pushed(self, d):
        """J d."""
        return self.within(lambda noise: self.along(d, noise=noise))

    def first(self, c, d):
        """The product ``cᵀ J d``."""
        return self.within(lambda noise: np.sum(c * self.along(d, noise=noise)))

    def second(self, c, d, e):
        """The derivative of ``cᵀ J d`` in the direction e, by differences of fourth order."""

        def difference(noise, step=1e-3):
            a, b, x, y = (
                np.sum(c * self.along(d, [m * step * v for v in e], noise)) for m in (1, -1, 2, -2)
            )
            return (8 * (a - b) - (x - y)) / (12 * step)

        exact, tolerance = self.within(difference)
        return exact, tolerance + 8 * abs(difference(0, 2e-3) - exact)  # what a step leaves out


def agree(got, expected, what):
    """Compare, unless floating point leaves too much open: then a derivative is huge."""
    (numbers, tolerance), got = expected, np.asarray(got)
    assert got.shape == numbers.shape, what
    size = np.max(np.abs(numbers), initial=1)
    open_to = 0.1 if got.dtype == np.float32 else 1e-3
    if np.isfinite(size) and tolerance < open_to * size:
        error = np.max(np.abs(got - numbers), initial=0)
        assert error <= tolerance, f"{what}: off by {error:.3g}, {tolerance:.3g} allowed"
        event(f"{what.split(',')[0]} compared")
    else:
        event(f"{what.split(',')[0]} too ill-conditioned to compare")


def dot(xs, ys):
    return sum(np.sum(x * y.astype(x.dtype)) for x, y in zip(xs, ys, strict=True))


def only(directions, which):
    """Move along one leaf, and stay where we are in the others."""
    return [v if k == which else 0 * v for k, v in enumerate(directions)]


def check_program(p, draw):
    with ms.backend(draw(st.sampled_from(["cpu", "cpu", "cpu", "reference"]))):
        check_values(p, p.run(*p.given()))
        out = len(p.nodes) - 1 - draw(st.integers(0, 2))
        if out >= 0 and p.leaves:
            check_derivatives(p, out, draw)


def check_values(p, values):
    noisy = [p.interpret(p.leaves, noise) for noise in range(3)]
    for i, (node, got) in enumerate(zip(p.nodes, values, strict=True)):
        expected = Derivatives(p, i).within(lambda noise, i=i: plain(noisy[noise][i]))
        agree(plain(got), expected, f"value, {i}: {node.name}")
        if isinstance(got, ms.Tensor | ms.SparseTensor):
            assert got.dtype == p.dtype
        if isinstance(got, ms.SparseTensor):
            np.testing.assert_array_equal(got.pattern.to_mask(), p.values[i].mask)
            assert got.pattern == ms.Pattern(got.shape, got.pattern.indptr, got.pattern.indices)


def check_derivatives(p, out, draw):
    expected, leaves = Derivatives(p, out), p.given()
    y = p.run(*leaves)[out]
    y = y.values if isinstance(y, ms.SparseTensor) else y
    if not isinstance(y, ms.Tensor) or not y.requires_grad:
        return
    c, *directions = (p.rng.normal(size=s) for s in (y.shape, *[x.shape for x in p.leaves] * 2))
    c = np.asarray(c, p.dtype)
    if c.size and draw(st.booleans()):
        c = np.broadcast_to(c.flat[0], c.shape)
    else:
        c = LAYOUTS[draw(st.sampled_from([*LAYOUTS]))](c)
    d, e = directions[: len(p.leaves)], directions[len(p.leaves) :]

    gradients = ms.grad(y, leaves, c, retain_graph=True)
    for i, g in enumerate(gradients):
        assert g.dtype == p.dtype
        agree(
            np.sum(g * d[i].astype(g.dtype)), expected.first(c, only(d, i)), f"gradient, leaf {i}"
        )
    y.backward(c, retain_graph=True)
    for leaf, g in zip(leaves, gradients, strict=True):
        kept = np.zeros_like(g) if leaf.grad is None else leaf.grad
        kept = kept.to_dense() if isinstance(kept, RowGrad) else kept
        scale = np.max(np.abs(g), initial=p.largest)
        np.testing.assert_allclose(kept, g, rtol=0, atol=1000 * np.finfo(p.dtype).eps * scale)

    cotangent = ms.tensor(c, requires_grad=True)
    slope = dot(ms.grad(y, leaves, cotangent, create_graph=True), d)
    if slope.requires_grad:
        *rows, pushed = ms.grad(slope, [*leaves, cotangent])
        agree(pushed, expected.pushed(d), "gradient of a gradient in the cotangent")
        agree(dot(rows, e), expected.second(c, d, e), "second derivative")
    check_transform(p, out, draw, c, d, e)


def check_transform(p, out, draw, c, d, e):
    """Whichever function of functions is asked, the numbers are the same."""
    expected, leaves = Derivatives(p, out), tuple(p.given())
    name, which = draw(st.sampled_from(TRANSFORMS)), draw(st.integers(0, len(leaves) - 1))
    transform = getattr(ms, name)

    def f(*leaves):
        return p.run(*leaves)[out]

    def scalar(*leaves):
        y = f(*leaves)
        return ((y.values if isinstance(y, ms.SparseTensor) else y) * c).sum()

    def of_one(function):
        return lambda x: function(*leaves[:which], x, *leaves[which + 1 :])

    def several(results):
        return results if len(leaves) > 1 else (results,)

    if name == "jvp":
        got = transform(f, leaves, tuple(d))[1]
        agree(got, expected.pushed(d), name)
    elif name == "hvp":
        got = several(transform(scalar, leaves, tuple(d)))
        agree(dot(got, e), expected.second(c, d, e), name)
    elif name in ("vjp", "value_and_grad"):
        got = transform(f, *leaves)[1](c) if name == "vjp" else transform(scalar)(*leaves)[1]
        agree(dot(several(got), d), expected.first(c, d), name)
    elif d[which].size * max(c.size, 1) < 200:
        one = of_one(f if name == "jacobian" else scalar)
        got = np.tensordot(transform(one, leaves[which]), d[which], d[which].ndim)
        if name == "jacobian":
            agree(got.astype(p.dtype), expected.pushed(only(d, which)), name)
        else:
            second = expected.second(c, only(d, which), only(e, which))
            agree(np.sum(got * e[which]).astype(p.dtype), second, name)


@often(10)
@given(p=programs(), data=st.data())
def test_random_programs(p, data):
    """Values, gradients and second derivatives of whatever can be written, against NumPy."""
    check_program(p, data.draw)


NO_OPERATIONS = {  # no function of numbers, or no numbers that can be differentiated
    "ms": {
        "backend", "get_num_threads", "set_num_threads", "show_config", "warmup", "primitive",
        "tensor", "is_grad_enabled", "no_grad", "grad", "gradcheck", "GradcheckError", "load",
        "save", "cuda", "nn", "optim", "viz", "Pattern", "PatternMismatchError", "RowGrad",
        "SparseParameter", "SparseTensor", "Tensor",
    },
    "nn": {"Module", "batches", "kaiming_normal", "kaiming_uniform"},
    "Tensor": {
        "backward", "data", "device", "dtype", "grad", "item", "ndim", "numpy", "requires_grad",
        "shape", "size", "to",
    },
    "SparseTensor": {
        "device", "dtype", "grad", "ndim", "nnz", "pattern", "shape", "to", "to_scipy",
    },
}  # fmt: skip
SPELLED = {  # what `programs` writes as an operator, by the operator's name
    "__neg__": "negative", "__abs__": "absolute", "__getitem__": "getitem",
    **{f"__{side}{o}__": name for side in ("", "r") for o, name in (
        ("add", "add"), ("sub", "subtract"), ("mul", "multiply"), ("truediv", "divide"),
        ("pow", "power"), ("matmul", "matmul"),
    )},
}  # fmt: skip


@pytest.mark.parametrize("where", NO_OPERATIONS)
def test_every_operation_is_drawn(where):
    """A public operation that no program can contain fails here."""
    if where == "ms":
        public = set(ms.__all__)
    elif where == "nn":
        public = {
            n for n, v in vars(ms.nn).items() if getattr(v, "__module__", "") == ms.nn.__name__
        }
    else:
        public = set(vars(getattr(ms, where)))
    public = {n for n in public if not n.startswith("_") or n in SPELLED}
    assert public >= NO_OPERATIONS[where]
    drawn = {*OPS, *TRANSFORMS} if where in ("ms", "Tensor") else set()
    drawn |= {name.removeprefix(f"{where}.") for name in OPS if name.startswith(where)}
    drawn |= {o for o, name in SPELLED.items() if name in OPS} if where == "Tensor" else set()
    assert not public - NO_OPERATIONS[where] - drawn


UNSHRUNK = settings(max_examples=500, database=None, derandomize=True, phases=[Phase.generate])


@pytest.mark.parametrize("name", sorted(OPS))
def test_every_operation_is_reached(name):
    def there(p):
        return any(node.name == name for node in p.nodes)

    find(programs(names=st.just(name)), there, settings=UNSHRUNK)


@pytest.mark.parametrize("order", [1, 2])
def test_a_wrong_rule_is_noticed(order, monkeypatch):
    @ms.primitive
    def tanh(x):
        return np.tanh(x)

    def rule(g, need, out):
        return g * (1 - out * out) * 1.001 if order == 1 else g * (1 - plain(out) ** 2)

    tanh.vjp(rule)
    monkeypatch.setattr(ms, "tanh", tanh)

    @settings(UNSHRUNK, report_multiple_bugs=False)
    @given(p=programs(names=st.just("tanh"), dtypes=[np.float64]), data=st.data())
    def run(p, data):
        check_program(p, data.draw)

    with pytest.raises(AssertionError, match="gradient, leaf" if order == 1 else "second"):
        run()


# ----------------------------------------------------------------------------------- damaged files

FIELDS = {  # of the records of a zip file: offset and length of what they claim
    b"PK\1\2": [
        (4, 2), (6, 2), (8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (42, 4),
    ],
    b"PK\3\4": [
        (4, 2), (6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2), (34, 8), (42, 8),
    ],
    b"PK\5\6": [(8, 2), (10, 2), (12, 4), (16, 4), (20, 2)],
}  # fmt: skip
HOW = ("set", "claim", "insert", "cut", "repeat", "truncate")
WHERE = ("tree", "header", "bytes", "swap", "rename", "again", "drop", "compress")
CLAIMS = st.sampled_from([0, 1, 8, 255, 2**15, 2**31 - 1, 2**32 - 2, 2**32 - 1, 2**62, 2**64 - 1])
SCALARS = [2**31, 2**40, 2**63, 10**30, "9" * 5000, {"array": "0"}, {"array": "tree"}]
PATTERN = {"shape": [2, 2], "indptr": {"array": "0"}, "indices": {"array": "1"}}
KEYS = st.sampled_from(["dict", "array", "pattern", "x", "shape", ""])
JSONS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 5)
    | st.floats()
    | st.text(max_size=2)
    | st.sampled_from([*SCALARS, {"pattern": PATTERN}]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=2),
    max_leaves=4,
)


def damaged(draw, whole):
    """Overwrite, insert, cut out, repeat or cut off bytes, or change what a record claims."""
    data = bytearray(whole)
    for how in draw(st.lists(st.sampled_from(HOW), min_size=1, max_size=4)):
        at = draw(st.integers(0, len(data)))
        part = draw(st.binary(min_size=1, max_size=4) | st.integers(1, 60).map(bytes))
        end = at + draw(st.integers(1, 80))
        if how == "set":
            data[at : at + len(part)] = part
        elif how == "insert":
            data[at:at] = part
        elif how == "cut":
            del data[at:end]
        elif how == "repeat":
            data[at:at] = data[at:end]
        elif how == "truncate":
            del data[at:]
        else:
            mark = draw(st.sampled_from(sorted(FIELDS)))
            starts = [i for i in range(len(data)) if data.startswith(mark, i)]
            if starts:
                start, value = draw(st.sampled_from(starts)), draw(CLAIMS | st.integers(0, 400))
                for offset, size in draw(st.lists(st.sampled_from(FIELDS[mark]), max_size=3)):
                    field = (value % 256**size).to_bytes(size, "little")
                    data[start + offset : start + offset + size] = field
    return bytes(data)


def forged(draw, whole):
    """Change members of the archive, and pack them so that every checksum is right."""
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    packing = zipfile.ZIP_STORED
    for how in draw(st.lists(st.sampled_from(WHERE), min_size=1, max_size=3)):
        i, j = (draw(st.integers(0, len(members) - 1)) for _ in range(2))
        (name, data), (other, content) = members[i], members[j]
        if how == "tree":
            members = [(n, retold(draw, d) if n == "tree" else d) for n, d in members]
        elif how == "header":
            members[i] = name, headed(draw, data)
        elif how == "bytes":
            members[i] = name, damaged(draw, data)
        elif how == "swap":
            members[i], members[j] = (name, content), (other, data)
        elif how == "rename":
            members[i] = draw(st.sampled_from([other, "tree", "7.npy", "../0.npy", "0"])), data
        elif how == "again":
            members.insert(j, (name, data))
        elif how == "drop" and len(members) > 1:
            del members[i]
        elif how == "compress":
            packing = zipfile.ZIP_DEFLATED
    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", packing) as archive:
        warnings.simplefilter("ignore")  # of names given twice
        for name, data in members:
            archive.writestr(name, data)
    return out.getvalue()


def retold(draw, text):
    """Put something else in one place of the tree."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return text
    holder, key, value = {"tree": tree}, "tree", tree
    holders = [holder]
    while isinstance(value, dict | list) and value and draw(st.integers(0, 9)):
        holder = value
        key = draw(st.sampled_from([*value] if isinstance(value, dict) else range(len(value))))
        value = holder[key]
        holders.append(holder)
    if isinstance(holder, dict) and draw(st.booleans()):
        holder[draw(KEYS)] = holder.pop(key)
    else:
        holder[key] = draw(JSONS | st.just(value).map(lambda v: {"dict": {"x": v}}))
    whole = json.dumps(holders[0]["tree"]) if "tree" in holders[0] else "{}"
    deep = draw(st.sampled_from([0] * 19 + [5000]))
    return ("[" * deep + whole + "]" * deep).encode()


def headed(draw, data):
    """Give an array another header: shape, dtype or order that do not fit, or absurd ones."""
    kinds = [
        "<f8", "<f4", ">f8", "<i8", "|b1", "|O", "<U3", "<M8[s]", "<c16", "|V8", "<f2", "<f16", 3,
        [("a", "<f8")],
    ]  # fmt: skip
    sizes = st.sampled_from([0, 1, 2, 4, 8, -1, 10**9, 10**15, 2**63, 2**64])
    header = {
        "descr": draw(st.sampled_from(kinds)),
        "fortran_order": draw(st.sampled_from([False, True, 2])),
        "shape": draw(st.lists(sizes, max_size=3).map(tuple) | st.sampled_from(["x", None, [4]])),
    }
    if draw(st.integers(0, 9)) == 0:
        del header[draw(st.sampled_from([*header]))]
    text = repr(header).encode().ljust(draw(st.sampled_from([118, 54, 300]))) + b"\n"
    version = draw(st.sampled_from([b"\1\0", b"\1\0", b"\1\0", b"\2\0", b"\3\0"]))
    length = draw(st.sampled_from([len(text)] * 4 + [0, 65535]))
    return b"\x93NUMPY" + version + length.to_bytes(2, "little") + text + data[128:]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda file: None)  # takes longer than all the rest
        yield tmp_path_factory.mktemp("fuzz") / "state"


def load(path, data):
    """Return what a file holds, None if it was refused; what that takes is in its proportion."""
    path.write_bytes(data)
    back, refused = None, ""
    tracemalloc.start()
    try:
        back = ms.load(path)
    except ValueError as error:
        refused = str(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * len(data) + 100_000
    assert back is not None or "is damaged or was not saved here" in refused
    return back


@often(8)
@given(state=test_io.states, data=st.data())
def test_a_damaged_file_is_refused_or_whole(file, state, data):
    """Bytes changed anywhere: an error, or all that was saved."""
    ms.save(file, state)
    back = load(file, damaged(data.draw, file.read_bytes()))
    event("refused" if back is None else "whole")
    if back is not None:
        test_io.check_equal(back, state)


@often(8)
@given(state=test_io.states, data=st.data())
def test_a_forged_file_is_refused_or_could_have_been_saved(file, state, data):
    """Members changed under right checksums: an error, or a state as `save` takes it."""
    ms.save(file, state)
    back = load(file, forged(data.draw, file.read_bytes()))
    event("refused" if back is None else "loaded")
    if back is None:
        return
    seen = []

    def check(value):
        if isinstance(value, dict):
            for key, part in value.items():
                assert isinstance(key, str)
                check(part)
        elif isinstance(value, ms.Pattern):
            assert value == ms.Pattern(value.shape, value.indptr, value.indices)
        elif isinstance(value, np.ndarray):
            assert value.flags.writeable
            assert value.flags.owndata or value.base.flags.owndata
            assert not any(np.shares_memory(value, other) for other in seen)
            seen.append(value)

    assert isinstance(back, dict)
    check(back)
    ms.save(file, back)
    test_io.check_equal(ms.load(file), back)


# -------------------------------------------------------------------------------------- structures


@pytest.mark.compiled
def test_no_structure_leads_out_of_bounds(in_new_process, tmp_path, record_property):
    """CASES 12: whatever a door lets in, kernels with every access checked stay inside."""
    profile = settings()
    printed = in_new_process(
        "from tests import checked\n"
        f"print(*checked.main({profile.max_examples}, {profile.derandomize}))\n",
        timeout=7200,
        NUMBA_CACHE_DIR=str(tmp_path),
    )
    tried, valid = map(int, printed.split())
    record_property("inputs", tried)
    assert valid > tried / 10
