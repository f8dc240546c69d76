"""Tensors that hold arrays of another class than NumPy's: with a stand-in for CuPy's, no GPU."""

import copy
import pickle

import numpy as np
import pytest
import scipy.sparse as sp

import minisparse as ms
from minisparse.engine import raw

from . import standin
from .standin import Standin
from .table import TABLE, P


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """Let "cuda" stand for arrays of the stand-in's class, and count what comes back of them."""
    with standin.device(monkeypatch) as cls:
        yield cls


@pytest.fixture
def stays(device):
    """Fail where an array, or a number, came back to the host on the way."""
    yield
    assert (device.gets, device.reads) == (0, 0)


def host(x):
    """Return the numbers of an array of either class, or of a Tensor, uncounted."""
    x = raw(x.values if isinstance(x, ms.SparseTensor) else x)
    return x._host if isinstance(x, Standin) else x


def leaf(x, where="cuda"):
    """Return a leaf on a device."""
    x = ms.tensor(x).to(where)
    x.requires_grad = True
    return x


ON_DEVICE = [row for row in TABLE if "spsolve" not in row.name and row.name != "to"]


def numbers(row, where):
    """Return the results of a row, its gradients and their gradients, as arrays on a device."""
    inputs = [leaf(x, where) for x in row.inputs]
    results = row.f(*inputs)
    arrays = []
    for r in results if isinstance(results, list) else [results]:
        r = r.values if isinstance(r, ms.SparseTensor) else r
        c = ms.tensor(np.cos(np.arange(r.size)).reshape(r.shape)).to(where)
        gradients = ms.grad(r, inputs, c, create_graph=True)
        total = sum((g * g).sum() for g in gradients)
        if total.requires_grad:
            total.backward(retain_graph=True)
        r.backward(c)
        arrays += [raw(r), *map(raw, gradients)]
    leaves = [x.grad for x in inputs if x.grad is not None]
    return arrays + [g.to_dense() if isinstance(g, ms.RowGrad) else g for g in leaves]


@pytest.mark.parametrize("row", ON_DEVICE, ids=lambda row: row.name)
def test_every_operation_stays_on_the_device(row, stays):
    there, here = numbers(row, "cuda"), numbers(row, "cpu")
    assert {type(a) for a in there} == {Standin}
    assert len(there) == len(here)
    for a, b in zip(there, here, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(host(a), b, rtol=1e-12, atol=1e-12)


# -------------------------------------------------------------------------------------- training


class Network(ms.nn.Module):
    """Every kind of layer; a frozen and a tied weight; a table with row-sparse gradients."""

    def __init__(self):
        mask = np.arange(P.nnz) % 3 > 0
        frozen = ms.SparseParameter((P, np.cos(np.arange(P.nnz))), trainable=mask, dtype="float32")
        tied = ms.SparseParameter(
            sp.csr_array(np.ones((4, 5))), share=np.arange(20) % 4, dtype="float32"
        )
        self.table = ms.nn.Embedding(9, 7, sparse=True, rng=0)
        self.body = ms.nn.Sequential(
            ms.nn.LayerNorm(7),
            ms.nn.SparseLinear(7, 5, weight=frozen, rng=1),
            ms.nn.Dropout(0.3, rng=2),
            ms.nn.ReLU(),
            ms.nn.SparseLinear(5, 4, weight=tied, rng=3),
            ms.nn.GELU(),
            ms.nn.Linear(4, 6, rng=4),
            ms.nn.Sigmoid(),
            ms.nn.SparseLinear(6, 3, fan_in=2, rng=5),
        )

    def forward(self, ids):
        return self.body(self.table(ids))


OPTIMIZERS = {
    "SGD": lambda p: ms.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: ms.optim.Adam(p, lr=0.1),
}


def train(model, opt, steps=3):
    """Take some steps; return the losses, on whatever device they are."""
    losses = []
    for step in range(steps):
        model.zero_grad()
        loss = ms.nn.cross_entropy(model(np.arange(8) * (step + 1) % 9), np.arange(8) % 3)
        loss.backward()
        opt.step()
        losses.append(loss)
    return losses


def weights(model):
    return [host(p.free if isinstance(p, ms.SparseParameter) else p) for p in model.parameters()]


def assert_equal(a, b, **tolerance):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, **tolerance)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_gives_the_numbers_of_the_cpu(name, device):
    here, there = Network(), Network()
    assert there.to("cuda") is there
    assert_equal(weights(here), weights(there))
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (here, there)]
    expected = train(here, optimizers[0])
    got = train(there, optimizers[1])
    assert (device.gets, device.reads) == (0, 0)
    assert {type(raw(loss)) for loss in got} == {Standin}
    assert_equal([loss.item() for loss in expected], [loss.item() for loss in got], rtol=1e-5)
    assert_equal(weights(here), weights(there), rtol=1e-5, atol=1e-6)
    for p in there.parameters():
        g = p.grad.values if isinstance(p.grad, ms.RowGrad) else p.grad
        assert isinstance(g, Standin)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_from_a_file_on_either_device(name, tmp_path):
    model = Network().to("cuda")
    opt = OPTIMIZERS[name](model.parameters())
    train(model, opt)
    ms.save(tmp_path / "state", {"model": model.state_dict(), "opt": opt.state_dict()})
    state = ms.load(tmp_path / "state")
    train(model, opt)
    for where in ("cpu", "cuda"):
        again = Network().to(where)
        opt = OPTIMIZERS[name](again.parameters())
        again.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        train(again, opt)
        assert {type(p.grad) for p in again.body.parameters()} == (
            {np.ndarray} if where == "cpu" else {Standin}
        )
        assert_equal(weights(again), weights(model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_moves_between_steps(name):
    """Its gradients and the optimizer's state come along."""
    moving, still = Network(), Network()
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (moving, still)]
    for where in ("cuda", "cpu", "cuda"):
        moving.to(where)
        for model, opt in zip((moving, still), optimizers, strict=True):
            train(model, opt, 1)
    assert_equal(weights(moving), weights(still), rtol=1e-5, atol=1e-6)
    opt, (_, other) = optimizers[0], optimizers
    moving.to("cpu")
    opt.step()
    other.step()
    assert_equal(weights(moving), weights(still), rtol=1e-5, atol=1e-6)


def test_evaluation_clipping_and_schedules(device):
    model = Network().to("cuda").eval()
    opt = ms.optim.SGD(model.parameters(), lr=0.1)
    ms.optim.StepLR(opt, 1).step()
    train(model, opt, 1)
    body = model.body.parameters()
    norm = ms.optim.clip_grad_norm(body, 1e-3)
    assert norm > 1e-3
    assert ms.optim.clip_grad_norm(body, 1) == pytest.approx(1e-3, rel=1e-3)
    assert device.gets == 0


def test_losses(stays):
    for loss in (ms.nn.mse_loss, ms.nn.bce_with_logits):
        x, t = leaf(np.linspace(-2, 2, 6)), ms.tensor(np.arange(6) % 2).to("cuda")
        loss(x, t).backward()
        y = leaf(np.linspace(-2, 2, 6), "cpu")
        loss(y, np.arange(6) % 2).backward()
        np.testing.assert_allclose(host(x.grad), y.grad, rtol=1e-12)


# --------------------------------------------------------------------------------- to and fro


def test_to_is_differentiable_and_free_where_it_is(device):
    x = leaf([1.0, 2.0], "cpu")
    assert x.to("cpu") is x
    y = x.to("cuda")
    assert (x.device, y.device, type(raw(y))) == ("cpu", "cuda", Standin)
    assert y.to("cuda") is y
    assert device.gets == 0
    z = (y * y).to("cpu") * ms.tensor([3.0, 5.0])
    (g,) = ms.grad(z, [x], np.ones(2), create_graph=True)
    np.testing.assert_array_equal(g.numpy(), [6.0, 20.0])
    np.testing.assert_array_equal(ms.grad(g, x, [1.0, 1.0]), [6.0, 10.0])
    z.sum().backward()
    np.testing.assert_array_equal(x.grad, [6.0, 20.0])


def test_sparse_tensors_and_parameters_move(device):
    values = leaf(np.arange(P.nnz) + 1.0, "cpu")
    S = ms.SparseTensor(P, values)
    there = S.to("cuda")
    assert S.to("cpu") is S
    assert there.to("cuda") is there
    assert (there.device, there.T.device, there.T.to("cpu").device) == ("cuda", "cuda", "cpu")
    (there @ ms.tensor(np.ones(7)).to("cuda")).sum().backward()
    np.testing.assert_array_equal(values.grad, 1.0)
    mask = np.arange(P.nnz) % 2 > 0
    W = ms.SparseParameter(S, trainable=mask)
    W.free.requires_grad = False
    assert not W.to("cuda").free.requires_grad
    W.free.requires_grad = True
    V = W.to("cuda")
    assert V.to("cuda") is V
    assert W.to("cpu") is W
    assert V.free._node is None
    assert V.free.requires_grad
    assert {type(a) for a in (raw(V.values), raw(V.free), V._base)} == {Standin}
    (V @ ms.tensor(np.ones(7)).to("cuda")).sum().backward()
    assert isinstance(V.grad, Standin)
    assert W.grad is None
    np.testing.assert_array_equal(V.to("cpu").values.data, W.values.data)
    assert (V.to("cpu").free.requires_grad, V.prune(keep=5).device) == (True, "cuda")
    np.testing.assert_array_equal(host(V.prune(keep=5).values), W.prune(keep=5).values.data)


def test_modules_move_in_place():
    model = Network()
    train(model, ms.optim.SGD(model.parameters(), lr=0.1), 1)
    before = model.parameters()
    loss = model(np.arange(8)).sum()
    grads = [p.grad for p in before]
    model.to("cuda")
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert {p.device for p in before} == {"cuda"}
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()
    model.to("cpu")
    assert {p.device for p in before} == {"cpu"}
    for g, p in zip(grads, before, strict=True):
        dense = [x.to_dense() if isinstance(x, ms.RowGrad) else x for x in (g, p.grad)]
        np.testing.assert_array_equal(*dense)


@pytest.mark.parametrize("thing", [ms.tensor([1.0]), ms.diag([1.0]), ms.nn.Linear(2, 2)])
def test_there_are_two_devices(thing):
    with pytest.raises(ValueError, match="'tpu' is neither 'cpu' nor 'cuda'"):
        thing.to("tpu")


def test_devices_do_not_mix():
    """Named are both devices and the cure, whichever stands first."""
    x, y, a = leaf([[1.0, 2.0]]), leaf([[3.0, 4.0]], "cpu"), np.ones((1, 2))
    S, R = ms.diag([1.0, 2.0]), ms.diag([1.0, 2.0]).to("cuda")
    layer = ms.nn.SparseLinear(2, 3, fan_in=1, rng=0, dtype="float64").to("cuda")
    calls = [
        lambda: x + y, lambda: y + x, lambda: x * a, lambda: a * x, lambda: ms.matmul(x, y.T),
        lambda: ms.concatenate([y, x]), lambda: S @ x.T, lambda: R @ y.T, lambda: R @ a.T,
        lambda: S * x, lambda: R * a, lambda: S @ R, lambda: S + R, lambda: layer(y),
        lambda: layer(a), lambda: ms.sddmm(x.T, y.T, ms.Pattern.dense((2, 2))),
        lambda: ms.nn.mse_loss(x, a), lambda: x.backward(a), lambda: ms.grad(x, x, y),
        lambda: ms.grad(y, y, raw(x)), lambda: setattr(x, "grad", a), lambda: y * raw(x),
        lambda: setattr(y, "grad", raw(x)), lambda: ms.where(a > 0, x, y),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(TypeError, match=r"\.to\(") as caught:
            call()
        assert "cpu" in str(caught.value)
        assert "<CUDA Device 0>" in str(caught.value)


def test_numbers_suit_every_device(stays):
    for where in ("cpu", "cuda"):
        x = leaf([[1.0, 2.0]], where)
        for number in (2, 2.0, True, np.float32(2), np.int64(2), np.array(2.0), np.array(2)):
            y = (x * number + number) ** number / number - number
            y.backward(ms.tensor([[1.0, 1.0]]).to(where))
            S = ms.SparseTensor(ms.Pattern.diagonal(2), x.ravel()) * number / number
            assert S.device == where
            assert type(raw(ms.where([[True, False]], x, number))) is type(raw(x))
    scalar = leaf(3.0)
    assert isinstance(ms.grad(scalar * scalar, scalar, 1.0), Standin)
    assert isinstance(raw(ms.grad(scalar * scalar, scalar, 2, create_graph=True)), Standin)
    with ms.no_grad():
        x[0, 0] = 3
        x[...] = np.ones((1, 2))  # copied in, and so brought there
        x -= 0.5
    x.data = np.array([[5.0, 6.0]])
    np.testing.assert_array_equal(host(x), [[5.0, 6.0]])


# ------------------------------------------------------------------------------- the way back


def test_arrays_come_back_by_to_alone(device):
    x = leaf([1.0, 2.0])
    for call in (
        x.numpy, lambda: np.asarray(x.detach()), ms.diag(x).to_scipy,
        lambda: ms.spsolve(ms.diag(x), x), lambda: ms.spsolve(ms.diag([1.0, 2.0]), x),
        lambda: ms.spsolve(ms.diag(x), [1.0, 2.0]),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=r"\.to\("):
            call()
    assert device.gets == 0
    np.testing.assert_array_equal(x.detach().to("cpu").numpy(), [1.0, 2.0])


def test_data_is_a_copy(stays):
    """Nothing is read-only there: what is given out must not lead back in."""
    x = leaf([1.0, 2.0])
    x.data[0] = 9
    np.testing.assert_array_equal(host(x), [1.0, 2.0])


def test_single_numbers_and_texts():
    x = leaf(2.0)
    assert (x.item(), float(x), int(x), bool(x), f"{x:.1f}") == (2.0, 2.0, 2, True, "2.0")
    assert repr(leaf([1.0, 2.0])) == "tensor([1., 2.], requires_grad=True)"
    assert [float(t) for t in leaf([1.0, 2.0])] == [1.0, 2.0]


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies_are_independent_and_stay(copied):
    x = leaf([1.0, 2.0])
    (x * x).backward(ms.tensor([1.0, 1.0]).to("cuda"))
    W = ms.SparseParameter(P.to_scipy(np.arange(P.nnz) + 1.0), trainable=P.rows > 1).to("cuda")
    model = Network().to("cuda")
    for old, new in ((x, copied(x)), (W.free, copied(W).free)):
        assert (new.device, new.requires_grad) == ("cuda", True)
        old.data = np.zeros(old.shape)
        assert host(new).all()
    np.testing.assert_array_equal(host(copied(x).grad), [2.0, 4.0])
    if copied is not copy.copy:
        assert_equal(weights(copied(model)), weights(model))


def test_comparisons_and_plain_functions(stays):
    x = leaf([1.0, 2.0])
    for result in (x > 1, x == x, np.isfinite(x), np.argmax(x)):
        assert isinstance(result, Standin)
    assert np.shape(x) == (2,)


# -------------------------------------------------------------------- derivatives of functions


def test_functional(stays):
    x, t = leaf([1.0, 3.0]), ms.tensor([1.0, 10.0]).to("cuda")
    y, pullback = ms.vjp(lambda x: x**2, x)
    results = [y, pullback(t), *ms.jvp(lambda x: x**2, x, t)]
    results += [ms.hvp(lambda x: (x**3).sum(), x, t), ms.jacobian(lambda x: x[0] * x, x)]
    results += [ms.hessian(lambda x: (x**3).sum(), x)]
    expected = [[1, 9], [2, 60], [1, 9], [2, 60], [6, 180], [[2, 0], [3, 1]], [[6, 0], [0, 18]]]
    assert_equal(list(map(host, results)), expected, rtol=1e-12)


def test_value_and_grad():
    value, g = ms.value_and_grad(lambda x: (x**2).sum())(leaf([1.0, 3.0]))
    assert (value, type(g)) == (10.0, Standin)
