"""The CUDA kernels: on a GPU, or without one in Numba's simulator and compiled to PTX.

With the extra cuda13 or cuda12 installed, ``NUMBA_ENABLE_CUDASIM=1 pytest tests/test_cuda.py`` runs
the kernels in the simulator; without the variable they are compiled, and run where there is a GPU.
"""

import gc
import importlib.util
import re
import sys
from types import SimpleNamespace

import numba
import numpy as np
import pytest

import minisparse as ms
from minisparse.kernels import cuda, reference

from . import layouts
from .test_kernels import DTYPES, check_same, normal, plan_of, transposed, whole_numbers

SIMULATED = bool(numba.config.ENABLE_CUDASIM)
INSTALLED = importlib.util.find_spec("numba_cuda") is not None
HERE = SIMULATED or (INSTALLED and ms.cuda.is_available())
runs = pytest.mark.skipif(not HERE, reason="neither a GPU nor NUMBA_ENABLE_CUDASIM=1")
compiles = pytest.mark.skipif(
    SIMULATED or not INSTALLED, reason="PTX needs numba-cuda, and not the simulator"
)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the simulator's inf and NaN

KINDS = [("float32", "int32"), ("float64", "int64")]
WIDTHS = {"float32": [None, 0, 2, 16, 64], "float64": [1, 7, 33, 100]}


def uneven():
    """Rows without entries, with a few, and one with an entry in each of 40 columns."""
    mask = np.random.default_rng(0).random((9, 40)) < np.arange(9)[:, None] / 50
    mask[4], mask[6] = True, False
    return mask


MASKS = {
    "nothing": np.zeros((0, 0), bool),
    "no rows": np.zeros((0, 4), bool),
    "no columns": np.zeros((4, 0), bool),
    "no entries": np.zeros((3, 5), bool),
    "uneven": uneven(),
    "full": np.ones((2, 17), bool),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Rows are cut early; the simulator, which starts a thread for each of CUDA's, gets few."""
    monkeypatch.setattr(cuda, "SPLIT", 16)
    if SIMULATED:
        monkeypatch.setattr(cuda, "BLOCK", 64)
        monkeypatch.setattr(cuda, "SUMS", 64 * cuda.EACH * 3 // 2)


def on_device(a):
    if SIMULATED or not isinstance(a, np.ndarray):
        return a
    import cupy

    return cupy.asarray(a)


def on_host(a):
    return a if isinstance(a, np.ndarray) else a.get()


def run(name, *args, **options):
    """What the CUDA kernel makes of NumPy arrays; those within plans stay on the host."""
    out = getattr(cuda, name)(*map(on_device, args), **options)
    return tuple(map(on_host, out)) if isinstance(out, tuple) else on_host(out)


def check(name, *args, close=False, **options):
    """Equal to the reference: in all bits if the numbers are whole, else closely."""
    got, expected = run(name, *args, **options), getattr(reference, name)(*args, **options)
    pairs = zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]
    for a, b in pairs:
        if close:
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=20 * np.finfo(b.dtype).eps)
        else:
            check_same(a, b)
            assert a.flags.c_contiguous or name == "gate"


# On a GPU or in the simulator -------------------------------------------------------------------


@runs
@pytest.mark.parametrize(("dtype", "index"), KINDS)
@pytest.mark.parametrize("mask", MASKS)
def test_products(mask, dtype, index):
    """For each width, with a perm and without."""
    plan = plan_of(MASKS[mask], index)
    back, values = transposed(plan), whole_numbers(0, plan.nnz, dtype=dtype)
    for k in WIDTHS[dtype][:: 1 if plan.nnz else 2]:
        columns = () if k is None else (k,)
        x = whole_numbers(1, plan.n_cols, *columns, dtype=dtype)
        g = whole_numbers(2, plan.n_rows, *columns, dtype=dtype)
        bias = whole_numbers(3, plan.n_rows, dtype=dtype)
        check("spmm", plan, values, x, bias, True)
        check("spmm_vjp", plan, back, values, x, g)
        check("spmm_vjp", back, plan, values, g, x, True)


@runs
@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_layouts(layout, k):
    """Of every operand; on a device, those there are."""
    plan, columns = plan_of(MASKS["uneven"]), () if k is None else (k,)
    host = normal(0, plan.nnz), normal(1, 40, *columns), normal(2, 9, *columns), normal(3, 9)
    if SIMULATED:
        values, x, g, bias = map(layouts.LAYOUTS[layout], host)
    else:
        import cupy

        lay = {
            "Fortran": cupy.asfortranarray,
            "sliced": lambda x: cupy.repeat(x, 2, axis=-1)[..., ::2],
            "reversed": lambda x: cupy.flip(cupy.flip(x).copy()),
        }.get(layout, cupy.array)
        values, x, g, bias = (lay(cupy.asarray(a)) for a in host)
    whole = *map(on_device, host), transposed(plan)
    for relu in (False, True):
        got = cuda.spmm(plan, values, x, bias, relu)
        check_same(on_host(got), on_host(cuda.spmm(plan, whole[0], whole[1], whole[3], relu)))
        got = cuda.spmm_vjp(plan, whole[-1], values, x, g, relu)
        expected = cuda.spmm_vjp(plan, whole[-1], *whole[:3], relu)
        for a, b in zip(got, expected, strict=True):
            check_same(on_host(a), on_host(b))


@runs
@pytest.mark.parametrize("k", [1, 33])
def test_nan_and_infinity(k):
    """They come through where an entry is, and nowhere else; ReLU lets NaN through."""
    plan = plan_of(MASKS["uneven"])
    values, x, g = normal(0, plan.nnz), normal(1, 40, k), normal(2, 9, k)
    values[3], x[2], x[4], x[7], g[4], g[8] = 0, np.inf, np.nan, -np.inf, np.inf, np.nan
    for relu in (False, True):
        args = plan, values, x, None, relu
        np.testing.assert_allclose(run("spmm", *args), reference.spmm(*args), rtol=1e-12)
        args = plan, transposed(plan), values, x, g, relu
        for a, b in zip(run("spmm_vjp", *args), reference.spmm_vjp(*args), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@runs
def test_results_repeat():
    """Bit for bit, whatever runs first."""
    n = 9 if SIMULATED else 900
    plan = plan_of(np.random.default_rng(0).random((n, 40)) < 0.4)
    args = plan, transposed(plan), normal(0, plan.nnz, dtype="float32")
    args = *args, normal(1, 40, 33, dtype="float32"), normal(2, n, 33, dtype="float32")
    first = run("spmm_vjp", *args)
    for _ in range(1 if SIMULATED else 100):
        for a, b in zip(run("spmm_vjp", *args), first, strict=True):
            check_same(a, b)


@runs
@pytest.mark.parametrize(("dtype", "index"), KINDS)
@pytest.mark.parametrize("density", [0, 0.15, 1])
def test_sparse_products(density, dtype, index):
    rng = np.random.default_rng(0)
    a, b = rng.random((7, 9)) < density, rng.random((9, 5)) < density
    a[3] = b[:, 2] = False
    plans = (*(plan_of(m, index) for m in (a.astype(int) @ b > 0, a, b)),)
    whole, left, right = plans
    g, x, y = (whole_numbers(n, p.nnz, dtype=dtype) for n, p in enumerate(plans))
    check("spgemm", whole, left, right, x, y)
    check("spgemm_dot", left, whole, right, g, y)
    check("spgemm_dot", right, whole, left, g, x, True)


@runs
@pytest.mark.parametrize(("dtype", "index"), KINDS)
def test_bodies_of_the_reference(dtype, index):
    """Those that `reference` shares, but for products and optimizers."""
    for mask in MASKS.values():
        plan = plan_of(mask, index)
        values = normal(0, plan.nnz, dtype=dtype)
        check("row_max", plan, values)
        check("row_softmax", plan, values, close=True)
        order = np.random.default_rng(0).permutation(plan.nnz).astype(index)
        check("segment_sum", whole_numbers(0, plan.nnz, dtype=dtype), plan.indptr, order)
    values[:3] = np.nan, -np.inf, 0
    check("row_max", plan, values)
    at = np.array([3, -1, 0, 9, -5], index)
    check("gather", values, at)
    check("gather", values, at, normal(1, 5, dtype=dtype))
    check("gate", values, -values)
    check("gate", values, values > 0)
    check("gate", *(normal(n, 5, 9, dtype=dtype).T for n in (0, 1)))


@runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (5, 30)])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd", {"lr": 0.1, "weight_decay": 0.01}),
        ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("adam", {"weight_decay": 0.1}),
        ("adam", {"weight_decay": 0.1, "decoupled": True}),
    ],
)
def test_optimizers(name, options, shape, dtype):
    def steps(kernel, place):
        p, g = (place(np.asarray(normal(n, *shape, dtype=dtype))) for n in (0, 1))
        state = [place(np.zeros(shape, dtype)) for _ in range(2)]
        rest = state[:1] if name == "sgd" else [*state, np.zeros((), np.int64)]
        if name == "sgd" and "momentum" not in options:
            rest = [None]
        scalars = () if name == "sgd" else (0.01, 0.9, 0.999, 1e-8)
        for _ in range(3):
            kernel(p, g, *rest, *scalars, **options)
        return [on_host(a) for a in (p, *rest) if a is not None]  # the count of steps too

    got = steps(getattr(cuda, name), on_device)
    for a, b in zip(got, steps(getattr(reference, name), np.array), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=50 * np.finfo(dtype).eps)


# Compiled ---------------------------------------------------------------------------------------


def kind(a):
    """The type that Numba gives an argument which comes from a device, where all can be written."""
    if isinstance(a, tuple):
        return numba.types.Tuple([*map(kind, a)])
    a = numba.typeof(a)
    return a.copy(readonly=False, layout="C") if isinstance(a, numba.types.Array) else a


@pytest.fixture(params=[(7, 5), (8, 0), (9, 0)], ids=str)
def ptx(monkeypatch, request):
    """The text of each kernel in the order of launches, which compile instead."""
    import numba.cuda.dispatcher  # numba-cuda's

    texts, device = [], SimpleNamespace(compute_capability=request.param)
    monkeypatch.setattr(numba.cuda.dispatcher, "get_current_device", lambda: device)

    def compile_instead(kernel, grid, block, *args):
        signature = tuple(map(kind, args))
        texts.append(numba.cuda.compile_ptx(kernel.py_func, signature, cc=request.param)[0])

    monkeypatch.setattr(cuda, "_launch", compile_instead)
    cuda._kernel.cache_clear()  # a device function is compiled for one device
    yield texts
    cuda._kernel.cache_clear()


@compiles
@pytest.mark.parametrize(("dtype", "index"), KINDS)
def test_ptx(ptx, dtype, index):
    """Every kernel compiles; sums stay in registers and in their dtype, and nothing is atomic."""
    plan = plan_of(MASKS["full"], index)
    back, values = transposed(plan), np.zeros(plan.nnz, dtype)
    x, g = np.zeros((plan.n_cols, 64), dtype), np.zeros((plan.n_rows, 64), dtype)
    cuda.spmm_vjp(plan, back, values, x, g, True)
    square = plan_of(np.ones((2, 2), bool), index)
    cuda.spgemm(plan, square, plan, values[:4], values)
    cuda.row_max(plan, values)
    cuda.row_softmax(plan, values)
    cuda.gather(values, plan.indices)
    cuda.segment_sum(values, plan.indptr, plan.indices)
    cuda.gate(values, values)
    cuda.gate(values, values > 0)
    cuda.sgd(values, values, None, 0.1)
    cuda.adam(values, values, values, values, np.zeros(1, np.int64), 0.1, 0.9, 0.99, 1e-8)
    assert len(ptx) == 4 + 9
    for text in ptx:
        assert ".entry" in text
        assert not re.search(r"\b(atom|red)\.|\.local\b|\bcall\b", text)
        assert dtype == "float64" or ".f64" not in text


# With stand-ins for the device ------------------------------------------------------------------


class Array:
    """Stands for CuPy's."""

    def __init__(self, host):
        self.host = host


@pytest.fixture
def device(monkeypatch):
    """Stand-ins for CuPy and Numba that note what is done."""
    log = []
    stream = SimpleNamespace(ptr=7, synchronize=lambda: log.append("waited"))

    def asarray(a):
        log.append("copied")
        return Array(a)

    def as_cuda_array(a, sync):
        assert not sync
        return "argument", a.host

    cupy = SimpleNamespace(
        asarray=asarray,
        cuda=SimpleNamespace(
            get_current_stream=lambda: stream,
            runtime=SimpleNamespace(getDeviceCount=lambda: 1, error=None),
        ),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "numba_cuda", SimpleNamespace())
    numba_cuda = SimpleNamespace(
        as_cuda_array=as_cuda_array, external_stream=lambda p: ["stream", p]
    )
    monkeypatch.setattr(cuda, "cuda", numba_cuda)
    monkeypatch.setattr(numba.config, "ENABLE_CUDASIM", 0)
    cuda._stream.cache_clear()
    yield SimpleNamespace(log=log, cupy=cupy)
    cuda._stream.cache_clear()


def test_launch(device):
    """On CuPy's current stream; nothing is copied twice, or waited for but such a copy."""
    launches = []

    class Kernel:
        def __getitem__(self, where):
            return lambda *args: launches.append((where, args))

    structure, array = np.arange(3), Array("a")
    for _ in range(2):
        cuda._launch(Kernel(), (1, 2), (64,), 5, (array, structure, np.float32(2), 3, True))
    (grid, block, stream), (n, args) = launches[0]
    assert (grid, block, n) == ((cuda.BLOCKS, 2), (64,), 5)
    assert stream == ["stream", 7]
    assert stream is launches[1][0][2]  # Numba prepares a launch for each stream it has not met
    assert args[0] == ("argument", "a")
    assert args[1][1] is structure
    assert args[2:] == (np.float32(2), 3, True)
    assert launches[1][1][1][1] is args[1]
    assert device.log == ["copied", "waited"]


def test_copies_live_as_long_as_their_arrays(device):
    before, array = len(cuda._copies), np.arange(3)
    device.cupy.asarray = lambda a: Array("a copy")
    assert cuda._argument(array) == ("argument", "a copy")
    assert len(cuda._copies) == before + 1
    del array
    gc.collect()
    assert len(cuda._copies) == before


def test_why_not(device, monkeypatch):
    assert ms.cuda.is_available()
    assert ms.cuda.why_not() is None

    def fails():
        raise RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")

    monkeypatch.setattr(device.cupy.cuda.runtime, "getDeviceCount", fails)
    assert not ms.cuda.is_available()
    assert "no CUDA-capable device" in ms.cuda.why_not()
    for module in ("cupy", "numba_cuda"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, module, None)
            assert module in ms.cuda.why_not()
            with pytest.raises(RuntimeError, match=r"takes a device.*cuda13"):
                ms.tensor(1.0).to("cuda")


def test_nothing_of_cuda_is_imported(in_new_process):
    code = "import minisparse.kernels.cuda, sys; print([m for m in sys.modules if 'cu' in m])"
    assert not {"cupy", "numba_cuda", "numba.cuda"} & set(eval(in_new_process(code)))
