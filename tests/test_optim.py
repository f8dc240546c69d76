"""Optimizers: PyTorch's formulas step by step, on dense, sparse, frozen and tied weights."""

import itertools

import numpy as np
import pytest
import scipy.sparse as sp

import minisparse as ms

A = sp.csr_array(np.array([[1.0, 0, 2], [0, 3, 0]]))
B = np.array([[1.0, 2], [3, 4], [5, 6]])

OPTIONS = [
    *(
        ("SGD", {"lr": 0.05, "momentum": m, "nesterov": n, "weight_decay": d})
        for m, n, d in itertools.product((0.0, 0.9), (False, True), (0.0, 0.1))
        if m or not n
    ),
    *(
        (name, {"lr": 0.05, "betas": betas, "eps": eps, "weight_decay": d})
        for name, betas, eps, d in itertools.product(
            ("Adam", "AdamW"), ((0.9, 0.999), (0.0, 0.5)), (1e-8, 1e-2), (0.0, 0.1)
        )
    ),
]


def leaf(*shape, dtype=np.float64, rng=0):
    return ms.tensor(np.random.default_rng(rng).normal(size=shape), requires_grad=True, dtype=dtype)


@pytest.mark.parametrize(("name", "options"), OPTIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_steps_are_pytorchs(name, options, dtype):
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    ours = [leaf(3, 4, dtype=dtype), leaf(5, dtype=dtype, rng=1), leaf(2, dtype=dtype, rng=2)]
    theirs = [torch.tensor(p.numpy().copy(), requires_grad=True) for p in ours]
    opt = getattr(ms.optim, name)(ours, **options)
    oracle = getattr(torch.optim, name)(theirs, **options)
    rng = np.random.default_rng(3)
    for step in range(50):
        for p, q in zip(ours[:2], theirs[:2], strict=True):  # the third never has a gradient
            p.grad = rng.normal(size=p.shape).astype(dtype)
            q.grad = torch.tensor(p.grad)
        if step == 25:
            opt.param_groups[0]["lr"] = oracle.param_groups[0]["lr"] = 0.01
        opt.step()
        oracle.step()
        for p, q in zip(ours, theirs, strict=True):
            assert p.dtype == dtype
            tolerance = 2e-5 if dtype == "float32" else 1e-12
            np.testing.assert_allclose(
                p.data, q.detach().numpy(), rtol=tolerance, atol=tolerance / 10
            )


def test_first_step():
    """CASES 40."""
    W = ms.SparseParameter(A)
    (W @ B).sum().backward()
    ms.optim.SGD([W], lr=0.1).step()
    np.testing.assert_allclose(W.values.data, [0.7, 0.9, 2.3], rtol=1e-15)


def test_moments_decay():
    """CASES 41: gradients 1, then 0: the second step is about 0.670 lr; no lazy skipping."""
    p = ms.tensor([0.0], requires_grad=True)
    opt = ms.optim.Adam([p], lr=1.0)
    p.grad = np.ones(1)
    opt.step()
    before = p.data.copy()
    p.grad = np.zeros(1)
    opt.step()
    np.testing.assert_allclose(before - p.data, 0.670, atol=5e-4)


def test_bad_parameters():
    """CASES 41."""
    p, W = leaf(2), ms.SparseParameter(A)
    for bad in (
        [p, p],
        [W, W.free],
        [],
        [p * 2],
        [ms.tensor(1.0)],
        [{"params": [p]}, {"params": [p]}],
    ):
        with pytest.raises(ValueError):
            ms.optim.SGD(bad, lr=0.1)
    for bad in (p, W, [np.ones(2)], [{"params": [p], "speed": 1}], [{"lr": 1}], [{"params": p}]):
        with pytest.raises(TypeError):
            ms.optim.SGD(bad, lr=0.1)
    for options in (
        {"lr": -1},
        {"lr": np.nan},
        {"lr": 1, "momentum": -1},
        {"lr": 1, "nesterov": True},
    ):
        with pytest.raises(ValueError):
            ms.optim.SGD([p], **options)
    for options in (
        {"betas": (1.0, 0.9)},
        {"betas": 0.9},
        {"betas": (0.9,)},
        {"eps": -1},
        {"weight_decay": -1},
    ):
        with pytest.raises(ValueError):
            ms.optim.Adam([p], **options)
    opt = ms.optim.Adam([p])
    opt.param_groups[0]["lrr"] = 0.1
    with pytest.raises(ValueError, match="lrr"):
        opt.step()


def test_tied_weight_counts_once():
    W = ms.SparseParameter(sp.csr_array(np.ones((2, 2))), share=np.zeros((2, 2), int))
    (W @ np.ones(2)).sum().backward()
    ms.optim.SGD([W], lr=0.25, weight_decay=1.0).step()
    np.testing.assert_array_equal(W.to_scipy().toarray(), np.full((2, 2), 1 - 0.25 * 5))


def test_groups():
    a, b = leaf(2), leaf(2, rng=1)
    opt = ms.optim.SGD([{"params": [a], "lr": 1.0}, {"params": [b]}], lr=0.5)
    starts = a.data.copy(), b.data.copy()
    a.grad, b.grad = np.ones(2), np.ones(2)
    opt.step()
    np.testing.assert_array_equal(a.data, starts[0] - 1.0)
    np.testing.assert_array_equal(b.data, starts[1] - 0.5)
    opt.zero_grad()
    assert a.grad is b.grad is None


@pytest.mark.parametrize(
    ("name", "options"),
    [("SGD", {"lr": 0.1, "momentum": 0.9}), ("Adam", {"lr": 0.1}), ("AdamW", {"lr": 0.1})],
)
@pytest.mark.parametrize("saved_after", [0, 3])
def test_interrupted_is_uninterrupted(name, options, saved_after):
    """CASES 42: save, load, go on = never stopped, bit for bit, also before the first step."""

    def fresh():
        parameters = [ms.SparseParameter(A, trainable=np.array([1, 0, 1], bool)), leaf(2, 2)]
        return parameters, getattr(ms.optim, name)(parameters, **options)

    def steps(parameters, opt, n):
        for _ in range(n):
            opt.zero_grad()
            ms.tanh(parameters[1] @ (parameters[0] @ B)).sum().backward()
            opt.step()
        return [p.__tensor__().data.tobytes() if hasattr(p, "free") else p.data.tobytes()
                for p in parameters]  # fmt: skip

    expected = steps(*fresh(), 8)
    parameters, opt = fresh()
    steps(parameters, opt, saved_after)
    state = opt.state_dict()
    twins, other = fresh()
    twins[0].free.data, twins[1].data = parameters[0].free.data, parameters[1].data
    steps(parameters, opt, 2)  # the saved state is a copy
    other.load_state_dict(state)
    assert steps(twins, other, 8 - saved_after) == expected


def test_bad_states_change_nothing():
    p, q = leaf(2), leaf(3)
    opt = ms.optim.Adam([p, q])
    p.grad, q.grad = np.ones(2), np.ones(3)
    opt.step()
    good = opt.state_dict()
    bad_shape = {
        **good,
        "state": {**good["state"], "1": {**good["state"]["1"], "mean": np.ones(7)}},
    }
    for bad in (
        {**good, "kind": "SGD"},
        {**good, "groups": {}},
        {**good, "groups": {"0": {"speed": 1}}},
        {**good, "groups": {"0": {"lr": -1.0}}},
        {**good, "state": {"5": good["state"]["0"]}},
        {**good, "state": {"0": {}}},
        {**good, "state": {"0": {**good["state"]["0"], "step": -5}}},
        {**good, "state": {"0": {**good["state"]["0"], "step": 1.5}}},
        {**good, "state": {"0": {**good["state"]["0"], "mean": np.ones(2, complex)}}},
        [1],
        {"kind": "Adam"},
        {**good, "state": None},
        {**good, "groups": {"0": None}},
        {**good, "groups": {"0": {"lr": 0.1}}},
        bad_shape,
    ):
        with pytest.raises(ValueError):
            opt.load_state_dict(bad)
        after = opt.state_dict()
        assert str(after["groups"]) == str(good["groups"])
        for i in ("0", "1"):
            np.testing.assert_array_equal(after["state"][i]["mean"], good["state"][i]["mean"])


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_leaf_in_another_layout(name):
    start = np.arange(6.0).reshape(2, 3)
    plain = ms.tensor(start, requires_grad=True)
    views = [ms.tensor(start.T).T.detach(), ms.tensor(np.repeat(start, 2, axis=1))[:, ::2].detach()]
    options = {"momentum": 0.9} if name == "SGD" else {}
    for p in views:
        p.requires_grad = True
    leaves = [plain, *views]
    optimizers = [getattr(ms.optim, name)([p], lr=0.1, **options) for p in leaves]
    for step in range(3):
        for p, opt in zip(leaves, optimizers, strict=True):
            p.grad = start + step
            opt.step()
    for p in views:
        np.testing.assert_array_equal(p.data, plain.data)
    assert (plain.data != start).any()


def test_betas_stay_a_pair_of_numbers():
    p = leaf(2)
    opt = ms.optim.Adam([p], betas=(0.5, 0.6))
    state = opt.state_dict()
    opt.load_state_dict(state)
    state["groups"]["0"]["betas"][0] = 0.0
    assert opt.param_groups[0]["betas"] == (0.5, 0.6)


def test_strided_gradient():
    p = leaf(2, 3)
    expected = p.data - 1
    p.grad = np.broadcast_to(1.0, (2, 3))
    ms.optim.SGD([p], lr=1.0).step()
    np.testing.assert_array_equal(p.data, expected)


@pytest.mark.parametrize(
    "make", [lambda p: ms.optim.SGD([p], 0.1, momentum=0.9), lambda p: ms.optim.Adam([p])]
)
def test_scalar_parameter(make):
    p = ms.tensor(1.0, requires_grad=True)
    opt = make(p)
    (p * p + p).backward()
    assert type(p.grad) is np.ndarray
    assert p.grad == 3
    opt.step()
    assert p.item() < 1
