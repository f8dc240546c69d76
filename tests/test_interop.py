"""Our kernels inside PyTorch, and computation graphs as text."""

import numpy as np
import pytest

import minisparse as ms

torch = pytest.importorskip("torch", reason="the layer for PyTorch needs PyTorch")
from minisparse.interop.torch import SparseLinear  # noqa: E402 - after the check above


@pytest.mark.parametrize("lead", [(5,), (2, 3), (), (0,)])
def test_layer_is_the_dense_one(lead):
    layer = SparseLinear(7, 4, density=0.4, dtype=torch.float64, rng=0)
    dense = np.zeros((4, 7))
    dense[layer.pattern.rows, layer.pattern.indices] = layer.values.detach().numpy()
    W = torch.tensor(dense, requires_grad=True)
    x = torch.randn(*lead, 7, dtype=torch.float64, requires_grad=True)
    y, expected = layer(x), torch.nn.functional.linear(x, W, layer.bias.detach())
    torch.testing.assert_close(y, expected)
    g = torch.randn(expected.shape, dtype=torch.float64)
    gradients = torch.autograd.grad(y, [x, layer.values, layer.bias], g)
    dx, dw = torch.autograd.grad(expected, [x, W], g)
    torch.testing.assert_close(gradients[0], dx)
    torch.testing.assert_close(gradients[1], dw[layer.pattern.to_mask()])


def test_gradients_of_any_order():
    layer = SparseLinear(6, 5, fan_in=2, dtype=torch.float64, rng=0)
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)

    def f(values, x):
        return torch.func.functional_call(layer, {"values": values}, (x,)) ** 2

    values = layer.values.detach().requires_grad_()
    assert torch.autograd.gradcheck(f, (values, x))
    assert torch.autograd.gradgradcheck(f, (values, x))


def test_it_trains_and_chains_without_copies():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        SparseLinear(30, 40, fan_in=5, rng=0), torch.nn.ReLU(), SparseLinear(40, 3, fan_in=9, rng=1)
    )
    x, target = torch.randn(20, 30), torch.randn(20, 3)
    assert model[:2](x).T.is_contiguous()
    opt = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        opt.zero_grad()
        loss = ((model(x) - target) ** 2).mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 3
    assert model[0].values.dtype == torch.float32


def test_state_dict_holds_the_pattern(tmp_path):
    layer = SparseLinear(6, 5, fan_in=2, rng=0)
    same, other = SparseLinear(6, 5, fan_in=2, rng=0), SparseLinear(6, 5, fan_in=2, rng=1)
    torch.save(layer.state_dict(), tmp_path / "s.pt")
    state = torch.load(tmp_path / "s.pt", weights_only=True)
    same.load_state_dict(state)
    torch.testing.assert_close(same.values, layer.values)
    before = other.values.detach().clone()
    with pytest.raises(ValueError, match="patterns differ"):
        other.load_state_dict(state)
    torch.testing.assert_close(other.values, before, rtol=0, atol=0)


def test_mistakes_are_named():
    for kwargs in ({}, {"fan_in": 1, "density": 0.5}, {"pattern": ms.Pattern.diagonal(3)}):
        with pytest.raises(ValueError, match="SparseLinear"):
            SparseLinear(4, 3, **kwargs)
    tied = ms.SparseParameter(ms.diag([1.0, 1.0]), share=np.zeros((2, 2), int))
    with pytest.raises(ValueError, match="tied"):
        SparseLinear(2, 2, weight=tied)
    layer = SparseLinear(4, 3, fan_in=2)
    with pytest.raises(ValueError, match="needs 4 features"):
        layer(torch.ones(2, 3))
    for bad in (torch.ones(2, 4).double(), torch.ones(2, 4).int(), np.ones((2, 4), np.float32)):
        with pytest.raises(TypeError, match=r"needs a Tensor of torch\.float32"):
            layer(bad)
    assert "nnz=6" in repr(layer)
