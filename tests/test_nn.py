"""Modules, layers, losses and mini-batches."""

import copy
import functools
import pickle

import numpy as np
import pytest

import minisparse as ms
from minisparse import nn

from .layouts import LAYOUTS

RNG = np.random.default_rng(5)


def net(rng=0):
    return nn.Sequential(
        nn.SparseLinear(8, 6, fan_in=3, rng=rng), nn.Tanh(), nn.Linear(6, 4, rng=rng), nn.Sigmoid()
    )


def test_parameters_are_found_once():
    """CASES 11."""

    class Model(nn.Module):
        def __init__(self):
            self.layers = [nn.Linear(2, 2), {"inner": nn.SparseLinear(2, 2, density=1.0)}]
            self.again = self.layers[0]
            self.scale = ms.tensor(1.0, requires_grad=True)
            self.constant = ms.tensor(1.0)
            self.result = self.scale * 2
            self.itself = self
            self.unrelated = "text"

    names = [name for name, _ in Model().named_parameters()]
    assert names == [
        "layers.0.weight", "layers.0.bias", "layers.1.inner.weight", "layers.1.inner.bias", "scale",
    ]  # fmt: skip
    assert len(Model().parameters()) == 5


def test_odd_modules():
    A = ms.SparseTensor(ms.Pattern.diagonal(2), ms.tensor([1.0, 2.0], requires_grad=True))
    W = ms.SparseParameter(A)
    module = nn.Module()
    module.loop = [W.free]
    module.loop.append(module.loop)
    module.weight, module.view = W, W.T
    module.sparse = A
    assert [name for name, _ in module.named_parameters()] == ["weight", "sparse.values"]
    module = nn.Sequential(nn.Linear(1, 1))
    module.extra = W.T
    assert [name for name, _ in module.named_parameters()] == ["0.weight", "0.bias", "extra.base"]
    module.twice = {1: ms.tensor(1.0, requires_grad=True), "1": ms.tensor(1.0, requires_grad=True)}
    with pytest.raises(ValueError, match=r"one name"):
        module.state_dict()


def test_mistakes_are_named():
    x = np.ones((2, 3))
    for layer in (nn.Linear(4, 2), nn.SparseLinear(4, 2, density=1.0)):
        with pytest.raises(ValueError, match="4 features"):
            layer(x)
    with pytest.raises(TypeError, match="one by one"):
        nn.Sequential([nn.ReLU()])
    with pytest.raises(TypeError, match="not a Pattern"):
        nn.SparseLinear(2, 2, pattern=np.ones((2, 2), bool))
    with pytest.raises(TypeError, match="csr_array"):
        ms.SparseParameter(np.eye(3))
    model = net()
    model[2] = nn.Linear(6, 1)
    assert model(np.ones((2, 8))).shape == (2, 1)


def test_frozen_weights_belong_to_the_state():
    layer = nn.SparseLinear(4, 2, density=1.0)
    layer.weight.free.requires_grad = False
    assert set(layer.state_dict()) == {"weight", "bias"}


def test_modes_and_zero_grad():
    model = net()
    assert model.training
    assert model.eval() is model
    assert not model[0].training
    model.train()
    assert model[3].training
    model(np.ones((2, 8))).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert len(model) == 4


@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (0,)])
def test_linear_layers(lead):
    x = RNG.normal(size=(*lead, 8)).astype(np.float32)
    for layer in (nn.Linear(8, 6, rng=0), nn.SparseLinear(8, 6, fan_in=3, rng=0)):
        W = layer.weight.to_dense().data if hasattr(layer.weight, "nnz") else layer.weight.data
        y = layer(x)
        assert y.shape == (*lead, 6)
        assert y.dtype == np.float32
        np.testing.assert_allclose(y.data, x @ W.T + layer.bias.data, rtol=1e-5, atol=1e-6)
    for bare in (nn.Linear(8, 6, bias=False), nn.SparseLinear(8, 6, density=0.5, bias=False)):
        assert bare.bias is None
        assert len(bare.parameters()) == 1
        assert bare(x).shape == (*lead, 6)


@pytest.mark.parametrize("batch", [7, 1 << 18])
def test_bias_gradient_of_many_rows(batch):
    """A long sum in float32 is as exact as NumPy's, whose partial sums are short."""
    layer = nn.SparseLinear(2, 4, density=1, rng=0)
    g = np.full((4, batch), 0.1, np.float32).T  # as layers hold their activations
    layer(np.zeros((batch, 2), np.float32)).backward(g)
    np.testing.assert_allclose(layer.bias.grad, g.sum(0, np.float64), rtol=1e-6)


def test_chain_stays_feature_major():
    model = nn.Sequential(*(nn.SparseLinear(64, 64, fan_in=4, rng=i) for i in range(2)), nn.ReLU())
    y = model(np.ones((128, 64), np.float32))
    assert y.data.T.flags.c_contiguous


def test_sequential_gives_relu_to_the_layer():
    """Bit for bit what the modules give one after the other; a ReLU of the user's own is asked."""
    rng = np.random.default_rng(0)
    model = nn.Sequential(
        nn.SparseLinear(9, 20, fan_in=4, rng=0),
        nn.ReLU(),
        nn.SparseLinear(20, 30, fan_in=5, rng=1),
        nn.ReLU(),
        nn.SparseLinear(30, 4, fan_in=6, bias=False, rng=2),
        nn.ReLU(),
    )
    for shape in ((16, 9), (9,), (2, 3, 9)):
        x, results = ms.tensor(rng.standard_normal(shape), dtype="float32", requires_grad=True), []
        for apply in (model, lambda x: functools.reduce(lambda x, f: f(x), model.modules, x)):
            y = apply(x)
            y.backward(np.ones(y.shape))
            results.append([y.data, x.grad, *(p.grad for p in model.parameters())])
            model.zero_grad()
            x.grad = None
        for a, b in zip(*results, strict=True):
            assert a.tobytes() == b.tobytes()
    seen = []
    model[1].forward = lambda x: seen.append(x) or ms.relu(x)
    model[4].forward = lambda x: x
    assert model(rng.standard_normal((2, 9), dtype=np.float32)).shape == (2, 30)
    assert len(seen) == 1
    with pytest.raises(ValueError, match="20 features"):
        nn.Sequential(nn.ReLU(), model[2])(np.ones((2, 3)))
    layer = model[2]
    layer.weight = ms.tensor(layer.weight.to_dense().numpy())  # a dense one will do
    x = rng.standard_normal((2, 20), dtype=np.float32)
    y = nn.Sequential(nn.ReLU(), layer)(x)
    assert np.array_equal(y.data, layer(ms.relu(x)).data)


def test_initialisation_goes_by_each_rows_fan_in():
    pattern = ms.Pattern((2, 400), [0, 4, 404], [0, 1, 2, 3, *range(400)])
    layer = nn.SparseLinear(400, 2, pattern=pattern, rng=0)
    values = layer.weight.values.data
    assert np.abs(values[:4]).max() <= 1 / 2
    assert np.abs(values[4:]).max() <= 1 / 20
    assert np.abs(values[4:]).max() > 0.9 / 20
    nn.kaiming_normal(layer.weight, rng=0)
    assert layer.weight.values.data[4:].std() == pytest.approx(np.sqrt(2 / 400), rel=0.15)
    tied = ms.SparseParameter((pattern, np.zeros(404)), share=np.arange(404) % 5)
    nn.kaiming_uniform(tied, rng=0)
    assert tied.n_free == 5
    assert np.ptp(tied.free.data) > 0
    with_empty_row = nn.SparseLinear(2, 2, pattern=ms.Pattern((2, 2), [0, 0, 2], [0, 1]), rng=0)
    assert np.isfinite(with_empty_row.bias.data).all()


def test_given_weight_is_used_as_it_is():
    W = ms.SparseParameter((ms.Pattern.diagonal(3), np.ones(3)), trainable=np.eye(3, dtype=bool))
    layer = nn.SparseLinear(3, 3, weight=W)
    assert layer.weight is W
    assert layer.bias.dtype == np.float64
    for bad in ({}, {"weight": W, "density": 0.1}, {"pattern": ms.Pattern.diagonal(2)}):
        with pytest.raises(ValueError):
            nn.SparseLinear(3, 3, **bad)
    with pytest.raises(TypeError):
        nn.SparseLinear(3, 3, weight=np.eye(3))
    with pytest.raises(TypeError):
        nn.Linear(3, 3, dtype=np.float16)


def test_from_linear():
    dense = nn.Linear(6, 4, rng=0)
    layer = nn.SparseLinear.from_linear(dense, keep=10)
    assert layer.weight.nnz == 10
    kept = layer.weight.to_scipy().toarray()
    np.testing.assert_array_equal(kept[kept != 0], dense.weight.data[kept != 0])
    assert np.abs(dense.weight.data[kept == 0]).max() <= np.abs(kept[kept != 0]).min()
    np.testing.assert_array_equal(layer.bias.data, dense.bias.data)
    assert layer.bias is not dense.bias


def test_state_dict():
    model, other = net(), net()
    for p in other.parameters():
        leaf = getattr(p, "free", p)
        leaf.data = np.zeros(leaf.shape)
    state = model.state_dict()
    other.load_state_dict(state)
    x = RNG.normal(size=(3, 8)).astype(np.float32)
    np.testing.assert_array_equal(model(x).data, other(x).data)
    model[2].bias.data = np.ones(4)
    assert not (state["2.bias"] == 1).any()

    before = other.state_dict()
    different = {**state["0.weight"], "pattern": ms.Pattern.random((6, 8), fan_in=3, rng=9)}
    for error, bad in (
        (ValueError, {}),
        (ValueError, {**state, "extra": np.ones(1)}),
        (ValueError, {**state, "2.bias": np.ones(5, np.float32)}),
        (ValueError, {**state, "2.bias": np.ones(4, int)}),
        (ValueError, {**state, "0.weight": np.ones(3)}),
        (ValueError, {**state, "0.weight": {**state["0.weight"], "pattern": None}}),
        (ms.PatternMismatchError, {**state, "0.weight": different}),
    ):
        changed = {k: v + 1 if isinstance(v, np.ndarray) and v.shape else v for k, v in bad.items()}
        with pytest.raises(error):
            other.load_state_dict(changed)
        for name, value in other.state_dict().items():
            flat = value["free"] if isinstance(value, dict) else value
            was = before[name]["free"] if isinstance(value, dict) else before[name]
            np.testing.assert_array_equal(flat, was)


def test_ties_belong_to_the_state():
    def layer(labels):
        pattern = ms.Pattern.dense((2, 2))
        return nn.SparseLinear(2, 2, weight=ms.SparseParameter((pattern, np.ones(4)), share=labels))

    one, other = layer(np.array([0, 0, 1, 1])), layer(np.array([0, 1, 1, 0]))
    one.load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match="ties"):
        other.load_state_dict(one.state_dict())


def test_constants_belong_to_the_state():
    def layer(constant):
        W = ms.SparseParameter(
            (ms.Pattern.diagonal(2), [constant, 1.0]), trainable=np.array([False, True])
        )
        return nn.SparseLinear(2, 2, weight=W, rng=0)

    layer(3.0).load_state_dict(layer(3.0).state_dict())
    with pytest.raises(ValueError, match="constants"):
        layer(3.0).load_state_dict(layer(4.0).state_dict())


def test_pickle_and_copy():
    """CASES 42."""
    model = net()
    x = np.ones((2, 8), np.float32)
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        np.testing.assert_array_equal(twin(x).data, model(x).data)
        twin[2].bias.data = np.full(4, 100.0)
        assert (twin(x).data != model(x).data).any()


def test_losses_against_pytorch():
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    logits, labels = RNG.normal(size=(5, 2, 4)), RNG.integers(4, size=(5, 2))
    target = RNG.normal(size=(5, 2, 4))
    for reduction in ("mean", "sum", "none"):
        ours = nn.cross_entropy(logits, labels, reduction=reduction)
        theirs = torch.nn.functional.cross_entropy(
            torch.tensor(logits).reshape(10, 4), torch.tensor(labels).ravel(), reduction=reduction
        )
        np.testing.assert_allclose(np.ravel(ours), theirs.numpy(), rtol=1e-12)
        ours = nn.mse_loss(logits, target, reduction=reduction)
        theirs = torch.nn.functional.mse_loss(
            torch.tensor(logits), torch.tensor(target), reduction=reduction
        )
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-12)


def test_gradients_of_losses():
    logits, labels = RNG.normal(size=(5, 2, 4)), RNG.integers(4, size=(5, 2))
    target = RNG.normal(size=(5, 2, 4))
    x = ms.tensor(logits)
    assert ms.gradcheck(lambda x: nn.cross_entropy(x, labels), x, order=2)
    assert ms.gradcheck(lambda x: nn.mse_loss(x, target), x, order=2)
    one = logits[0, 0]
    expected = np.log(np.exp(one).sum()) - one[labels[0, 0]]
    assert nn.cross_entropy(x[0, 0], labels[0, 0]).item() == pytest.approx(expected)


def test_loss_errors():
    for error, bad in (
        (ValueError, lambda: nn.mse_loss(np.ones((3, 1)), np.ones(3))),
        (ValueError, lambda: nn.mse_loss(np.ones(3), np.ones(3), reduction="max")),
        (ValueError, lambda: nn.cross_entropy(np.ones((3, 2)), [0, 1])),
        (ValueError, lambda: nn.cross_entropy(np.ones((1, 2)), [2])),
        (ValueError, lambda: nn.cross_entropy(np.ones((1, 2)), [-1])),
        (TypeError, lambda: nn.cross_entropy(np.ones((1, 2)), [0.0])),
        (NotImplementedError, lambda: nn.Module()(1)),
    ):
        with pytest.raises(error):
            bad()


def test_batches():
    x, y = np.arange(10), np.arange(10) * 2
    seen = []
    for a, b in nn.batches(x, y, 4, rng=0):
        np.testing.assert_array_equal(a * 2, b)
        seen += a.tolist()
    assert sorted(seen) == list(range(10))
    assert seen != list(range(10))
    assert [len(a) for a, _ in nn.batches(x, y, 4)] == [4, 4, 2]
    first = [a.tolist() for a, _ in nn.batches(x, y, 4, rng=3)]
    assert first == [a.tolist() for a, _ in nn.batches(x, y, 4, rng=3)]
    for bad in (lambda: nn.batches(x, y[:3], 4), lambda: nn.batches(x, y, 0)):
        with pytest.raises(ValueError):
            bad()


def test_training_learns():
    model = nn.Sequential(
        nn.SparseLinear(8, 64, fan_in=4, rng=0), nn.ReLU(), nn.Linear(64, 2, rng=1)
    )
    x = RNG.normal(size=(200, 8)).astype(np.float32)
    y = (x[:, 0] * x[:, 1] > 0).astype(int)
    opt = ms.optim.Adam(model.parameters(), lr=0.01)
    indices = model[0].weight.pattern.indices.tobytes()
    for _ in range(60):
        for a, b in nn.batches(x, y, 50, rng=0):
            opt.zero_grad()
            nn.cross_entropy(model(a), b).backward()
            opt.step()
    assert np.mean(np.argmax(model(x).data, axis=1) == y) > 0.95
    assert model[0].weight.pattern.indices.tobytes() == indices


def test_new_layers_against_pytorch():
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    rng = np.random.default_rng(0)
    x, c = rng.normal(size=(2, 5, 6)), rng.normal(size=(2, 5, 6))
    ours, theirs = ms.tensor(x, requires_grad=True), torch.tensor(x, requires_grad=True)
    layer, oracle = ms.nn.LayerNorm(6, dtype=np.float64), torch.nn.LayerNorm(6).double()
    layer.weight.data, layer.bias.data = rng.normal(size=6), rng.normal(size=6)
    with torch.no_grad():
        oracle.weight[:] = torch.tensor(layer.weight.numpy())
        oracle.bias[:] = torch.tensor(layer.bias.numpy())
    for f, g in ((layer, oracle), (ms.nn.GELU(), torch.nn.GELU())):
        ours.grad = theirs.grad = None
        (f(ours) * c).sum().backward()
        (g(theirs) * torch.tensor(c)).sum().backward()
        np.testing.assert_allclose(f(ours).data, g(theirs).detach().numpy(), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(ours.grad, theirs.grad.numpy(), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(layer.weight.grad, oracle.weight.grad.numpy())
    np.testing.assert_allclose(layer.bias.grad, oracle.bias.grad.numpy())
    targets = rng.random((2, 5, 6))
    for reduction in ("mean", "sum", "none"):
        mine = ms.nn.bce_with_logits(ours * 30, targets, reduction=reduction)
        its = torch.nn.functional.binary_cross_entropy_with_logits(
            theirs * 30, torch.tensor(targets), reduction=reduction
        )
        np.testing.assert_allclose(mine.data, its.detach().numpy())
    assert ms.gradcheck(lambda x: [layer(x), ms.nn.bce_with_logits(x, targets)], ours, order=2)


def test_dropout():
    layer = ms.nn.Dropout(0.25, rng=0)
    x = ms.tensor(np.ones((200, 50), np.float32), requires_grad=True)
    y = layer(x)
    assert y.dtype == np.float32
    kept = y.data != 0
    assert abs(kept.mean() - 0.75) < 0.02
    np.testing.assert_allclose(y.data[kept], 1 / 0.75, rtol=1e-6)
    y.sum().backward()
    np.testing.assert_array_equal(x.grad, y.data)
    assert layer.eval()(x) is x
    # The memory order of x is kept, and makes no difference to what is dropped.
    ones = ms.tensor(np.ones((30, 20))), ms.tensor(np.ones((20, 30))).T
    a, b = (ms.nn.Dropout(0.5, rng=1)(z).numpy() for z in ones)
    np.testing.assert_array_equal(a, b)
    assert b.T.flags.c_contiguous
    assert not ms.nn.Dropout(1.0)(np.ones(9)).any()
    assert ms.nn.Dropout(0.0)(x) is x
    with pytest.raises(ValueError, match="probability"):
        ms.nn.Dropout(1.5)
    state = layer.train().state_dict()
    first = layer(x).data
    layer.load_state_dict(state)
    np.testing.assert_array_equal(layer(x).data, first)
    before = layer.state_dict()
    for bad in ({"rng": 3}, {"rng": {"bit_generator": "MT19937"}}, {"rng": {}}):
        with pytest.raises(ValueError, match="rng"):
            layer.load_state_dict(bad)
    assert layer.state_dict() == before


def test_embedding():
    table = ms.nn.Embedding(5, 3, dtype=np.float64, rng=0)
    ids = np.array([[4, 0], [4, 4]])
    out = table(ids)
    np.testing.assert_array_equal(out.data, table.weight.data[ids])
    out.sum().backward()
    np.testing.assert_array_equal(table.weight.grad[:, 0], [1, 0, 0, 0, 3])
    ids[:] = 0  # the caller's array may change before backward
    assert table([]).shape == (0, 3)
    for bad, error in (([5], IndexError), ([-1], IndexError), ([0.5], TypeError)):
        with pytest.raises(error):
            table(bad)
    with pytest.raises(ValueError, match="needs 6"):
        ms.nn.LayerNorm(6)(np.ones((2, 5)))
    with pytest.raises(ValueError, match="shape"):
        ms.nn.bce_with_logits(np.ones(3), np.ones(2))
    for sparse in (False, True):
        twin = ms.nn.Embedding(5, 3, sparse=sparse, dtype=np.float64, rng=0)
        weight = twin.weight.data.copy()
        assert ms.gradcheck(
            lambda w: ms.ops.shapes.lookup(w, ids=np.array([[4, 0], [4, 4]])) ** 2, weight, order=2
        )


@pytest.mark.parametrize("sparse", [False, True])
def test_layouts_of_a_tables_cotangents(sparse):
    """CASES 1, 2, 3: bit for bit, and a stride of 0 is one of them."""
    table = ms.nn.Embedding(5, 3, sparse=sparse, rng=0)
    ids = np.array([[4, 0], [4, 4], [1, 0]])

    def run(g):
        table.zero_grad()
        table(ids).backward(g)
        g = table.weight.grad
        return (g.to_dense() if sparse else g).tobytes()

    g = np.random.default_rng(0).normal(size=(3, 2, 3)).astype(np.float32)
    for layout in LAYOUTS.values():
        assert run(layout(g)) == run(g)
    assert run(np.broadcast_to(np.float32(1.5), g.shape)) == run(np.full(g.shape, np.float32(1.5)))


def test_modules_nested_in_lists_and_dicts():
    class Net(ms.nn.Module):
        def __init__(self):
            self.towers = {"left": [ms.nn.Linear(2, 2, rng=0)], "right": (ms.nn.Dropout(rng=1),)}

    names = list(Net().state_dict())
    assert names == ["towers.left.0.weight", "towers.left.0.bias", "towers.right.0.rng"]
    shared = ms.Pattern.diagonal(4)
    model = ms.nn.Sequential(*(ms.nn.SparseLinear(4, 4, pattern=shared, rng=i) for i in range(2)))
    state = model.state_dict()
    assert state["0.weight"]["pattern"] is state["1.weight"]["pattern"]
