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
    for step in range(100):
        for p, q in zip(ours[:2], theirs[:2], strict=True):  # the third never has a gradient
            p.grad = rng.normal(size=p.shape).astype(dtype)
            q.grad = torch.tensor(p.grad)
        if step == 50:
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


# ----------------------------------------------------------------------- row-sparse, clip, schedule


def row_sparse(p, rows, values):
    return ms.RowGrad(rows, np.asarray(values, dtype=p.dtype), p.shape)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"lr": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("Adam", {"lr": 0.1}),
        ("AdamW", {"lr": 0.1, "weight_decay": 0.0}),
    ],
)
def test_rows_are_updated_as_a_small_parameter_would_be(name, options, dtype):
    """The touched rows take the dense step, and nothing else changes by a bit."""
    table, small = leaf(9, 3, dtype=dtype), leaf(9, 3, dtype=dtype)
    small = ms.tensor(table.data[[1, 4]], requires_grad=True)
    before = table.data.copy()
    opts = [getattr(ms.optim, name)([p], **options) for p in (table, small)]
    rng = np.random.default_rng(0)
    for _ in range(5):
        g = rng.normal(size=(2, 3)).astype(dtype)
        table.grad = row_sparse(table, [4, 1], g[::-1])
        small.grad = g
        for opt in opts:
            opt.step()
        assert table.data[[1, 4]].tobytes() == small.data.tobytes()
    others = [0, 2, 3, 5, 6, 7, 8]
    assert table.data[others].tobytes() == before[others].tobytes()
    state = opts[0].state_dict()
    table.grad = np.ones_like(before)  # a dense gradient may follow
    opts[0].step()
    opts[0].load_state_dict(state)


def test_rows_are_skipped_by_request_only():
    """CASES 33, 41: moments of rows that were not looked up decay, unless ``sparse=True``."""
    for sparse in (False, True):
        table = ms.nn.Embedding(3, 2, sparse=sparse, rng=0)
        opt = ms.optim.Adam([table.weight], lr=1.0)
        for row in (0, 1):
            before = table.weight.data.copy()
            opt.zero_grad()
            table([row]).sum().backward()
            opt.step()
        moved = before - table.weight.data
        np.testing.assert_allclose(moved[0], 0.0 if sparse else 0.670, atol=5e-4)
        assert not moved[2].any()
        state = opt.state_dict()["state"]["0"]
        assert table.weight.dtype == state["mean"].dtype == state["mean_square"].dtype == np.float32
        assert table.weight.grad.dtype == np.float32
        assert ms.optim.clip_grad_norm([table.weight], 0.1) > 0.1
        assert table.weight.grad.dtype == np.float32


@pytest.mark.parametrize("saved_after", [0, 2])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_row_sparse_training_goes_on(tmp_path, name, saved_after):
    """CASES 42: through a file, with state that only touched rows have."""

    def fresh():
        table = ms.nn.Embedding(50, 3, sparse=True, rng=0)
        options = {"momentum": 0.9} if name == "SGD" else {}
        opt = getattr(ms.optim, name)([table.weight], lr=0.1, **options)
        return table, opt, ms.optim.StepLR(opt, 2)

    def steps(table, opt, schedule, first, last):
        for step in range(first, last):
            opt.zero_grad()
            (table(np.random.default_rng(step).integers(50, size=9)) ** 2).sum().backward()
            opt.step()
            schedule.step()
        return table.weight.data.tobytes(), opt.param_groups[0]["lr"], str(opt.state_dict())

    expected, whole = steps(*fresh(), 0, 6), fresh()
    steps(*whole, 0, saved_after)
    ms.save(tmp_path / "s", {str(i): part.state_dict() for i, part in enumerate(whole)})
    for i, part in enumerate(other := fresh()):
        part.load_state_dict(ms.load(tmp_path / "s")[str(i)])
    assert steps(*other, saved_after, 6) == expected


def test_row_sparse_gradients():
    """Repeated rows add up; sums of them stay row-sparse, with a dense one they are dense."""
    table = ms.nn.Embedding(6, 2, sparse=True, dtype=np.float64, rng=0)
    dense = ms.tensor(table.weight.data, requires_grad=True)
    ids, c = np.array([[5, 1], [1, 1]]), np.arange(8.0).reshape(2, 2, 2)
    (table(ids) * c).sum().backward()
    (dense[ids] * c).sum().backward()
    g = table.weight.grad
    assert isinstance(g, ms.RowGrad)
    assert g.rows.tolist() == [1, 5]
    np.testing.assert_array_equal(g.to_dense(), dense.grad)
    table([0, 5]).sum().backward()  # a second backward adds up
    assert isinstance(table.weight.grad, ms.RowGrad)
    assert table.weight.grad.rows.tolist() == [0, 1, 5]
    (table([2]).sum() + table.weight.sum()).backward()
    assert isinstance(table.weight.grad, np.ndarray)
    dense[[0, 5]].sum().backward()
    (dense[[2]].sum() + dense.sum()).backward()
    np.testing.assert_array_equal(table.weight.grad, dense.grad)
    # Through ms.grad, and for a table that is no leaf, it comes out dense.
    np.testing.assert_array_equal(ms.grad(table(ids).sum(), table.weight)[:, 0], [0, 3, 0, 0, 0, 1])
    w = table.weight
    w.grad = None
    doubled = ms.ops.shapes.lookup(w * 2, ids=ids, sparse=True)
    doubled.sum().backward()
    np.testing.assert_array_equal(w.grad[:, 0], [0, 6, 0, 0, 0, 2])
    second = ms.grad(ms.sum(table(ids) ** 3), w, create_graph=True)
    np.testing.assert_allclose(ms.grad(second.sum(), w)[5], 6 * w.data[5])


def test_row_sparse_gradients_refused():
    p = leaf(4, 2)
    p.grad = row_sparse(p, [1], [[1.0, 2.0]])
    opt = ms.optim.SGD([p], lr=0.1, weight_decay=0.1)
    before = p.data.copy()
    with pytest.raises(ValueError, match="weight_decay=0"):
        opt.step()
    np.testing.assert_array_equal(p.data, before)
    for rows, values, error in (
        ([4], np.ones((1, 2)), IndexError),
        ([-1], np.ones((1, 2)), IndexError),
        ([1], np.ones((2, 2)), ValueError),
        ([0.5], np.ones((1, 2)), TypeError),
    ):
        with pytest.raises(error):
            ms.RowGrad(rows, values, (4, 2))


def test_work_is_for_touched_rows(in_new_process):
    """A table of 1.28 GB: backward and step touch 1,000 rows, and memory shows it."""
    printed = in_new_process(
        "import numpy as np, minisparse as ms\n"
        "table = ms.nn.Embedding(5_000_000, 64, sparse=True, rng=0)\n"
        "def rss():\n"
        "    return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) / 1024\n"
        "opt = ms.optim.Adam([table.weight])\n"
        "ids = np.random.default_rng(0).integers(5_000_000, size=1000)\n"
        "ms.warmup(['float32'])\n"
        "before = rss()\n"
        "for step in range(3):\n"
        "    opt.zero_grad()\n"
        "    table(ids).sum().backward()\n"
        "    opt.step()\n"
        "print(rss() - before)\n"
    )
    assert float(printed) < 40  # MB; the two moments of the whole table would be 2,560


def test_clipping_is_pytorchs():
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    ours = [leaf(3, 4), leaf(5, rng=1), leaf(2, rng=2)]
    theirs = [torch.tensor(p.numpy().copy(), requires_grad=True) for p in ours]
    for scale, most in ((1.0, 0.5), (1e-3, 0.5), (1.0, 0.0), (1e4, 1e9)):
        for p, q in zip(ours[:2], theirs[:2], strict=True):
            p.grad = scale * np.random.default_rng(3).normal(size=p.shape)
            q.grad = torch.tensor(p.grad)
        kept = ours[0].grad
        norm = ms.optim.clip_grad_norm(ours, most)
        expected = torch.nn.utils.clip_grad_norm_(theirs, most).item()
        np.testing.assert_allclose(norm, expected)
        for p, q in zip(ours[:2], theirs[:2], strict=True):
            np.testing.assert_allclose(p.grad, q.grad.numpy(), rtol=1e-12)
        assert norm <= most or kept is not ours[0].grad  # what was visible is not written into


def test_clipping_at_the_edges():
    W, table = ms.SparseParameter(A), leaf(4, 2)
    W.grad = np.array([3.0, 0.0, 0.0])
    table.grad = row_sparse(table, [1, 1], [[1.0, 0.0], [3.0, 0.0]])
    assert ms.optim.clip_grad_norm([W, table], 2.5) == 5.0
    np.testing.assert_allclose(W.grad, [1.5, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(table.grad.values, [[2.0, 0.0]], rtol=1e-6)
    W.grad = np.array([np.inf, 0.0, 1.0])
    assert ms.optim.clip_grad_norm([W], 1.0) == np.inf
    np.testing.assert_array_equal(W.grad, [np.inf, 0.0, 1.0])
    big = ms.tensor([1.0, 1.0], requires_grad=True, dtype="float32")
    big.grad = np.full(2, 1e30, np.float32)  # whose squares overflow in float32
    np.testing.assert_allclose(ms.optim.clip_grad_norm([big], 1.0), 2**0.5 * 1e30, rtol=1e-6)
    assert ms.optim.clip_grad_norm([leaf(2)], 1.0) == 0.0
    W.grad = np.array([3.0, 0.0, 4.0])
    assert ms.optim.clip_grad_norm([W, W.free, W], 10.0) == 5.0  # each once
    with pytest.raises(ValueError, match="max_norm"):
        ms.optim.clip_grad_norm([W], -1.0)


def test_schedules_are_pytorchs():
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    scheduler = torch.optim.lr_scheduler
    for ours, theirs in (
        (lambda o: ms.optim.StepLR(o, 7, gamma=0.5), lambda o: scheduler.StepLR(o, 7, gamma=0.5)),
        (lambda o: ms.optim.CosineLR(o, 40), lambda o: scheduler.CosineAnnealingLR(o, 40)),
        (
            lambda o: ms.optim.CosineLR(o, 40, min_lr=0.01),
            lambda o: scheduler.CosineAnnealingLR(o, 40, eta_min=0.01),
        ),
    ):
        opt = ms.optim.SGD([{"params": [leaf(1)], "lr": 0.3}, {"params": [leaf(2)]}], lr=0.1)
        q = [torch.zeros(1, requires_grad=True), torch.zeros(2, requires_grad=True)]
        oracle = torch.optim.SGD([{"params": q[:1], "lr": 0.3}, {"params": q[1:]}], lr=0.1)
        a, b = ours(opt), theirs(oracle)
        for _ in range(40):
            for mine, its in zip(opt.param_groups, oracle.param_groups, strict=True):
                np.testing.assert_allclose(mine["lr"], its["lr"], atol=1e-15)
            oracle.step()
            a.step()
            b.step()


def test_warmup_and_resuming():
    opt = ms.optim.SGD([leaf(1)], lr=1.0)
    schedule = ms.optim.CosineLR(opt, 8, warmup=3, min_lr=0.1)
    rates = []
    for step in range(12):
        rates.append(opt.param_groups[0]["lr"])
        if step == 5:
            state = schedule.state_dict()
        schedule.step()
    np.testing.assert_allclose(rates[:4], [0.25, 0.5, 0.75, 1.0])
    np.testing.assert_allclose(rates[8:], 0.1)
    assert rates[3:9] == sorted(rates[3:9], reverse=True)
    other = ms.optim.SGD([leaf(1)], lr=0.7)
    resumed = ms.optim.CosineLR(other, 8, warmup=3, min_lr=0.1)
    resumed.load_state_dict(state)
    for rate in rates[5:]:
        assert other.param_groups[0]["lr"] == rate
        resumed.step()
    other_kind = ms.optim.StepLR(other, 3).state_dict()
    for bad in ({}, None, {**state, "steps": -1}, {**state, "start": [1.0, 2.0]}, other_kind):
        with pytest.raises(ValueError):
            resumed.load_state_dict(bad)
    for call in (
        lambda: ms.optim.CosineLR(opt, 5, warmup=5),
        lambda: ms.optim.StepLR(opt, 0),
        lambda: ms.optim.StepLR(opt, 2, gamma=-1.0),
        lambda: ms.optim.CosineLR(opt, 0),
    ):
        with pytest.raises(ValueError):
            call()
    with pytest.raises(TypeError):
        ms.optim.StepLR([leaf(1)], 1)
    with pytest.raises(TypeError):
        ms.optim.StepLR(opt, 2.5)
    with pytest.raises(TypeError, match=r"parameters\(\)"):
        ms.optim.Adam(ms.nn.Linear(2, 2))
