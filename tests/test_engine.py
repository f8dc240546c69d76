"""The tape: recording, walking, freeing, in-place changes, NumPy's protocol, the dtype rule."""

import asyncio
import copy
import gc
import pickle
import threading
import weakref

import numpy as np
import pytest
import scipy.sparse as sp

import minisparse as ms


def leaf(*data, dtype=None):
    return ms.tensor(data if len(data) != 1 else data[0], requires_grad=True, dtype=dtype)


# ------------------------------------------------------------------------------------- the tape


def test_backward_twice_adds_up_and_never_thrice():
    """CASES 23."""
    x = leaf(3.0)
    z = 1 * x**2
    z.backward(retain_graph=True)
    assert x.grad == 6
    first = x.grad
    z.backward()
    assert x.grad == 12
    assert first == 6  # accumulation made a new array
    with pytest.raises(RuntimeError, match="freed"):
        z.backward()
    assert x.grad == 12


def test_freed_graph_is_seen_from_a_new_end():
    x = leaf([1.0, 2.0])
    y = ms.exp(x)
    y.sum().backward()
    before = x.grad
    with pytest.raises(RuntimeError, match="freed"):
        (y * 2).sum().backward()
    assert x.grad is before


def test_nodes_that_keep_no_array_are_walked_again():
    x = leaf([1.0, 2.0])
    y = x + 1
    y.sum().backward()
    y.sum().backward()
    np.testing.assert_array_equal(x.grad, [2, 2])


def test_array_handed_to_two_operands_is_not_added_into():
    """CASES 24."""
    a, b = leaf([1.0, 1.0]), leaf([1.0, 1.0])
    ((a + b).sum() + a.sum()).backward()
    np.testing.assert_array_equal(a.grad, [2, 2])
    np.testing.assert_array_equal(b.grad, [1, 1])


def test_broadcast():
    """CASES 25."""
    a, b = leaf([2.0]), leaf([[3.0, 4.0]])
    (a * b).sum().backward()
    np.testing.assert_array_equal(a.grad, [7])
    np.testing.assert_array_equal(b.grad, [[2, 2]])
    assert a.grad.shape == (1,)


def test_long_chain():
    """CASES 27."""
    x = leaf(1.0)
    y = x
    for _ in range(100_000):
        y = y * 1.0
    y.backward()
    assert x.grad == 1
    last = weakref.ref(y)
    del y
    assert last() is None


def test_long_chain_is_freed_on_a_small_stack():
    def build():
        y = leaf(1.0)
        for _ in range(100_000):
            y = y + 1.0
        y.backward()

        done.append(y.item())

    done = []
    size = threading.stack_size(256 * 1024)
    try:
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(size)
    assert done == [100_001]


def test_diamond_walks_each_node_once():
    calls = []

    @ms.primitive
    def counted(x):
        return x * 1.0

    @counted.vjp
    def _(g, need):
        calls.append(1)
        return g

    y = counted(leaf(1.0))
    for _ in range(30):
        y = y + y
    y.backward()
    assert len(calls) == 1


def test_unused_parameter():
    """CASES 11."""
    x, unused = leaf(1.0), leaf([1.0, 2.0])
    y = x * 2
    np.testing.assert_array_equal(ms.grad(y, unused, retain_graph=True), [0, 0])
    y.backward()
    assert unused.grad is None


def test_grad_of_inner_tensors_and_repeats():
    x = leaf([1.0, 2.0])
    y = x * x
    z = (y * 3).sum()
    gy, gx, gy2 = ms.grad(z, [y, x, y])
    np.testing.assert_array_equal(gy, [3, 3])
    np.testing.assert_array_equal(gx, [6, 12])
    assert not np.shares_memory(gy, gy2)
    assert x.grad is None


def test_grad_frees_only_what_it_ran():
    x, w = leaf([1.0, 2.0]), leaf([3.0, 4.0])
    y = ms.exp(w) * x
    ms.grad(y.sum(), x)  # exp was not needed for it, so it is intact ...
    with pytest.raises(RuntimeError, match="freed"):
        y.sum().backward()  # ... but the product was
    ms.grad(ms.exp(w).sum(), w)


def test_grad_errors():
    x = leaf([1.0, 2.0])
    with pytest.raises(ValueError, match="does not require grad"):
        ms.grad((x * 2).sum(), ms.tensor(1.0))
    with pytest.raises(TypeError, match="not a Tensor"):
        ms.grad(np.ones(3), x)
    with pytest.raises(TypeError, match="not a Tensor"):
        ms.grad((x * 2).sum(), [np.ones(2)])
    with pytest.raises(RuntimeError, match="grad_output"):
        ms.grad(x * 2, x)
    with pytest.raises(ValueError, match="shape"):
        ms.grad(x * 2, x, np.ones(3))
    with pytest.raises(RuntimeError, match="gradient"):
        (x * 2).backward()
    with pytest.raises(ValueError, match="shape"):
        (x * 2).backward(np.ones((2, 1)))
    with pytest.raises(RuntimeError, match="does not require grad"):
        ms.tensor(1.0).backward()
    assert x.grad is None


def test_create_graph_inside_no_grad():
    x = leaf(2.0)
    y = x**3
    with ms.no_grad():
        g = ms.grad(y, x, create_graph=True)
        assert not ms.is_grad_enabled()
    assert ms.grad(g, x) == 12


def test_third_order():
    x = leaf(2.0)
    g = ms.grad(x**4, x, create_graph=True)
    g = ms.grad(g, x, create_graph=True)
    assert ms.grad(g, x) == 48


def test_only_what_the_rule_names_is_kept():
    big = np.ones(1000)
    x = leaf(big)
    y = x * 2.0  # its result is asked for by nobody
    watched = weakref.ref(y._array)
    z = y + 1.0
    del y
    assert watched() is None
    z.sum().backward()
    np.testing.assert_array_equal(x.grad, 2 * big)


def test_constant_operand_costs_no_activation():
    """Multiplying by a constant keeps the constant, not the activation."""
    x, c = leaf([1.0, 2.0]), ms.tensor([3.0, 4.0])
    y = ms.exp(x) + 0.0
    z = (y * c).sum()
    watched = weakref.ref(y._array)
    del y
    assert watched() is None
    z.backward()
    np.testing.assert_allclose(x.grad, np.exp([1, 2]) * [3, 4])


def test_no_cycles():
    """CASES 8: with the garbage collector off, what a step made dies at once."""
    gc.collect()
    gc.disable()
    try:
        x = leaf([1.0, 2.0])
        y = ms.tanh(x * x) * ms.softmax(x)
        loss = y.sum()
        node, data = weakref.ref(y), weakref.ref(y._array)
        g = ms.grad(loss, x, create_graph=True)
        g.sum().backward()
        del y, loss, g
        assert node() is None
        assert data() is None
        x.grad = None
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_grad_mode_nests_and_restores():
    """CASES 28."""
    assert ms.is_grad_enabled()
    with ms.no_grad():
        with ms.no_grad():
            assert not ms.is_grad_enabled()
        assert not ms.is_grad_enabled()
    assert ms.is_grad_enabled()

    @ms.no_grad()
    def inside():
        assert not ms.is_grad_enabled()
        raise KeyError

    with pytest.raises(KeyError):
        inside()
    assert ms.is_grad_enabled()


def test_grad_mode_belongs_to_thread_and_task():
    """CASES 28."""
    seen = []
    with ms.no_grad():
        thread = threading.Thread(target=lambda: seen.append(ms.is_grad_enabled()))
        thread.start()
        thread.join()
    assert seen == [True]

    async def without():
        with ms.no_grad():
            await asyncio.sleep(0)
            return ms.is_grad_enabled()

    async def with_grad():
        await asyncio.sleep(0)
        return ms.is_grad_enabled()

    async def both():
        return await asyncio.gather(without(), with_grad(), without())

    assert asyncio.run(both()) == [False, True, False]


def test_no_grad_decorates_plain_functions_only():
    def generator():
        yield 1

    async def coroutine():
        pass

    for function in (generator, coroutine):
        with pytest.raises(TypeError, match="plain functions"):
            ms.no_grad()(function)


# ------------------------------------------------------------------------------ in-place changes


def test_saved_tensor_changed_in_place():
    """CASES 26."""
    w = leaf(3.0)
    y = w**2
    with ms.no_grad():
        w -= 1.0
    with pytest.raises(RuntimeError, match=r"power .* changed in place"):
        y.backward()
    assert w.grad is None


def test_saved_view_changed_by_an_optimizer():
    """CASES 26."""
    w, x = leaf(np.ones((2, 3))), leaf(np.ones((4, 3)))
    y = (x @ w.T).sum()
    y.backward(retain_graph=True)
    ms.optim.SGD([w], lr=0.1).step()
    with pytest.raises(RuntimeError, match="matmul"):
        y.backward()


@pytest.mark.parametrize("view", [lambda t: t.detach(), lambda t: t[::2], lambda t: t.T])
def test_views_share_the_version(view):
    w = leaf([1.0, 2.0, 3.0])
    y = (w * w).sum()
    with ms.no_grad():
        other = view(w)
        other[...] = 0.0
    assert w.data[0] == 0
    with pytest.raises(RuntimeError, match="changed in place"):
        y.backward()


def test_unneeded_saved_tensors_may_change():
    """A constant operand that serves only a gradient nobody wants gives no false alarm."""
    x, c = leaf([1.0]), ms.tensor([2.0])
    y = x * c  # keeps c for x; x serves only c, which is constant
    with ms.no_grad():
        x += 1.0
    y.backward()
    np.testing.assert_array_equal(x.grad, [2])
    a, b = leaf([1.0]), leaf([2.0])
    y = a * b
    with ms.no_grad():
        a += 1.0
    np.testing.assert_array_equal(ms.grad(y, a, retain_graph=True), [2])
    with pytest.raises(RuntimeError, match="changed in place"):
        ms.grad(y, b)


def test_in_place_rules():
    w = leaf([1.0, 2.0])
    with pytest.raises(RuntimeError, match="no_grad"):
        w += 1.0
    with pytest.raises(RuntimeError, match="no_grad"):
        w[0] = 1.0
    y = first = w * 2.0
    y += 1.0
    assert y is not first
    np.testing.assert_array_equal(first.data, [2, 4])
    total = ms.tensor(0.0)
    total += w.sum()
    total.backward()
    np.testing.assert_array_equal(w.grad, [1, 1])
    with ms.no_grad():
        w *= 3.0
        w[0] = ms.tensor(7.0)
    np.testing.assert_array_equal(w.data, [7, 6])
    w.data = [0.0, 1.0]
    np.testing.assert_array_equal(w.data, [0, 1])
    with pytest.raises(ValueError, match="shape"):
        w.data = [1.0]
    with ms.no_grad(), pytest.raises(ValueError, match="shape"):
        w += np.ones((2, 2))
    for a in (w.data, w.numpy(), np.asarray(w.detach())):
        with pytest.raises(ValueError, match="read-only"):
            a[0] = 1.0


def test_tensor_copies():
    a = np.ones(2)
    t = ms.tensor(a)
    a[0] = 5.0
    assert t.data[0] == 1


def test_grad_may_be_assigned():
    p = leaf([1.0, 2.0])
    (p * p).sum().backward()
    p.grad *= 0.5
    np.testing.assert_array_equal(p.grad, [1, 2])
    p.grad = np.ones(2, np.float32)
    assert p.grad.dtype == np.float64
    with pytest.raises(ValueError, match="shape"):
        p.grad = np.ones(3)
    p.grad = None
    assert p.grad is None
    with pytest.raises(ValueError, match="leaves"):
        (p * 2).grad = np.ones(2)


# ------------------------------------------------------------------------- dtypes and conversion


def test_dtypes():
    """CASES 33."""
    assert ms.tensor([1, 2]).dtype == np.float64
    assert ms.tensor([True]).dtype == np.float64
    assert ms.tensor(np.ones(2, ">f4")).dtype == np.float32
    assert ms.tensor(np.ones(2, np.float32)).dtype == np.float32
    for bad in (np.float16(1), 1j, "a", None, np.longdouble(1), object()):
        with pytest.raises(TypeError, match="float32"):
            ms.tensor(bad)
    with pytest.raises(TypeError, match="float32"):
        ms.tensor([1.0], dtype=np.float16)


def test_tensors_dtype_wins():
    x = ms.tensor([1.0, 2.0], dtype="float32")
    for other in (2, 2.0, np.float64(2), np.ones(2), np.ones(2, int), [1, 2], np.ones((), bool)):
        assert (x * other).dtype == np.float32
        assert (other * x).dtype == np.float32
    with pytest.raises(TypeError, match="astype"):
        x * ms.tensor(1.0)
    assert (x.astype("float64") * ms.tensor(1.0)).dtype == np.float64


def test_astype_gradient_keeps_the_operands_dtype():
    x = leaf([1.0, 2.0], dtype="float32")
    (x.astype(np.float64) ** 2).sum().backward()
    assert x.grad.dtype == np.float32
    g = ms.grad((x.astype(np.float64) ** 2).sum(), x, create_graph=True)
    assert g.dtype == np.float32
    np.testing.assert_array_equal(ms.grad(g.sum(), x), [2, 2])


def test_ndarray_on_the_left():
    """CASES 10."""
    w, x = np.arange(5.0), leaf(np.ones(5))
    f = w @ x
    f.backward()
    np.testing.assert_array_equal(x.grad, w)
    for left, right in [
        (w - x, -(x - w)),
        (w * x, x * w),
        (np.float64(2) * x, x * 2),
        (w / x, (x / np.maximum(w, 1e-9)) ** -1),
        (2**x, ms.power(2.0, x)),
        (np.dot(w, x), ms.dot(x, w)),
    ]:
        assert left.requires_grad
        np.testing.assert_allclose(left.data, right.data, atol=1e-8)
    assert type(w < x) is np.ndarray
    assert type(x == w) is np.ndarray


def test_where_python_never_asks_us():
    """CASES 10: right, or a TypeError that names ms.matmul; never an object array."""
    x, c = leaf(np.ones(5)), ms.tensor(np.ones(5))
    w, A = np.arange(5.0), sp.csr_array(np.diag(np.arange(5.0)))
    calls = [
        w.dot,
        lambda t: A @ t,
        A.dot,
        lambda t: sp.csr_matrix(A) * t,
        lambda t: A * t,
        lambda t: sp.coo_array(A) @ t,
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"ms\.matmul\(A, t\)"):
            call(x)
    for call in calls[:4]:
        assert call(c).dtype == np.float64
    for convert in (np.asarray, np.array, lambda t: np.array([t, t])):
        with pytest.raises(TypeError, match=r"\.numpy\(\).*ms\.matmul.*ms\.stack"):
            convert(x)
    with pytest.raises(TypeError, match="out= would lose"):
        w += x
    np.testing.assert_array_equal(ms.matmul(A, x).data, w)


def test_numpy_functions():
    x = leaf([[1.0, 2.0], [3.0, 4.0]])
    recorded = [
        (np.exp(x), ms.exp(x)),
        (np.sum(x, 0), x.sum(axis=0)),
        (np.sum(x, axis=1, keepdims=True), x.sum(axis=1, keepdims=True)),
        (np.sum(a=x), x.sum()),
        (np.mean(x, 0), x.mean(axis=0)),
        (np.var(x, 1), x.var(axis=1)),
        (np.std(x, axis=0, ddof=1), x.std(axis=0, ddof=1)),
        (np.max(x, 1), x.max(axis=1)),
        (np.where(x > 2, x, 0), ms.where(x.data > 2, x, 0)),
        (np.concatenate([x, np.ones((1, 2))]), ms.concatenate([x, [[1.0, 1.0]]])),
        (np.stack((x, x), axis=-1), ms.stack([x, x], axis=-1)),
        (np.reshape(x, (4,)), x.reshape(4)),
        (np.transpose(x, (1, 0)), x.T),
        (np.linalg.norm(x), ms.norm(x)),
        (np.linalg.norm(x, axis=1), ms.norm(x, axis=1)),
        (np.clip(x, 2, 3), x.clip(2, 3)),
        (np.take(x, [0], 1), x.take([0], axis=1)),
        (np.squeeze(x[:, :1], 1), x[:, 0]),
        (np.matmul(x, x), x @ x),
        (np.abs(x), abs(x)),
        (np.expand_dims(x, 0), x.reshape(1, 2, 2)),
        (np.ravel(x), x.reshape(-1)),
    ]
    for got, expected in recorded:
        assert got.requires_grad
        np.testing.assert_array_equal(got.data, expected.data)
    assert np.isfinite(x).all()
    assert np.argmax(x) == 3
    assert np.shape(x) == (2, 2)
    assert np.allclose(x, x.data)
    for bad in (np.median, np.cumsum, np.zeros_like, np.add.reduce, np.linalg.inv, np.arctan2):
        with pytest.raises(TypeError, match=r"\.numpy\(\)"):
            bad(x) if bad is not np.arctan2 else bad(x, x)
    with pytest.raises(TypeError, match="dtype"):
        np.sum(x, dtype=np.float32)
    with pytest.raises(ValueError, match="ord"):
        np.linalg.norm(x, 2)


def test_python_protocols():
    x = leaf([[1.0, 2.0], [3.0, 4.0]])
    assert len(x) == 2
    assert [row.data.tolist() for row in x] == [[1, 2], [3, 4]]
    assert x.size == 4
    assert x.ndim == 2
    assert float(ms.tensor([2.5])) == 2.5
    assert ms.tensor(2.5).item() == 2.5
    assert {x: 1}[x] == 1
    for bad in (lambda: len(ms.tensor(1.0)), lambda: list(ms.tensor(1.0)), lambda: float(x)):
        with pytest.raises(TypeError):
            bad()
    with pytest.raises(ValueError, match="ambiguous"):
        bool(x)
    assert "requires_grad=True" in repr(x)
    assert "op=multiply" in repr(x * 2)


def test_pickle_and_copy():
    """CASES 42."""
    x = leaf([1.0, 2.0], dtype="float32")
    (x * x).sum().backward()
    for twin in (pickle.loads(pickle.dumps(x)), copy.copy(x), copy.deepcopy(x)):
        assert twin.requires_grad
        assert twin.dtype == np.float32
        np.testing.assert_array_equal(twin.data, x.data)
        np.testing.assert_array_equal(twin.grad, x.grad)
        assert not np.shares_memory(twin.data, x.data)
        assert not np.shares_memory(twin.grad, x.grad)
    for bad in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"\.detach\(\)"):
            bad(x * 2)


# ------------------------------------------------------------------------------- user primitives


def test_primitive_signature_errors():
    with pytest.raises(TypeError, match="comes after"):
        ms.primitive(lambda x=1: x)

    @ms.primitive
    def f(x, *, scale=2.0):
        return x * scale

    with pytest.raises(TypeError, match=r"asks for \['y'\]"):
        f.vjp(lambda g, need, y: g)
    with pytest.raises(TypeError, match="asks for"):
        f.vjp(lambda g, need: g, x=0)
    with pytest.raises(RuntimeError, match="no gradient rule"):
        f(leaf(1.0)).backward()
    f.vjp(lambda g, need, scale: g * scale)
    x = leaf(1.0)
    f(x, 3.0).backward()
    assert x.grad == 3
    f(x=x).backward()
    assert x.grad == 5
    with pytest.raises(TypeError, match=r"too many|multiple"):
        f(x, 1.0, 2.0)
    with pytest.raises(TypeError, match="missing"):
        f(scale=1.0)
    with pytest.raises(TypeError, match="multiple"):
        f(x, 1.0, scale=2.0)


def make(rule, n=1):
    if n == 1:

        @ms.primitive
        def odd(x):
            return x * 2.0
    else:

        @ms.primitive
        def odd(x, y):
            return x + y

    odd.vjp(rule)
    return odd


def test_rule_results_are_checked():
    x, y = leaf([1.0, 2.0]), leaf([1.0, 2.0])
    with pytest.raises(RuntimeError, match=r"odd returned a gradient of shape \(3,\)"):
        make(lambda g, need: np.ones(3))(x).sum().backward()
    with pytest.raises(RuntimeError, match="1 gradients for 2"):
        make(lambda g, need: g, 2)(x, y).sum().backward()
    assert x.grad is None
    make(lambda g, need: None)(x).sum().backward()
    assert x.grad is None
    make(lambda g, need: (g, g), 2)(x, y).sum().backward()
    assert not np.shares_memory(x.grad, y.grad)


def test_rule_may_return_what_it_was_given():
    """Whatever a rule returns, .grad shares memory with nothing."""
    for rule in (
        lambda g, need, x: x,
        lambda g, need, x: x[:],
        lambda g, need, out: out,
        lambda g, need: g[::-1][::-1],
    ):
        x = leaf([1.0, 2.0])
        y = make(rule)(x)
        seed = np.ones(2)
        y.backward(seed)
        assert not any(np.shares_memory(x.grad, a) for a in (x.data, y.data, seed))

    both = []

    def twice(g, need):
        both.append(g * 1.0)
        return both[-1], both[-1]

    x, y = leaf([1.0, 2.0]), leaf([1.0, 2.0])
    make(twice, 2)(x, y).sum().backward()
    assert not np.shares_memory(x.grad, y.grad)


def test_kinds_of_results_are_checked():
    x = leaf([1.0, 2.0])

    def returning(result):
        @ms.primitive
        def odd(x):
            return result

        odd.vjp(lambda g, need: g)
        return odd

    assert returning(np.ones(2, np.float32))(x).dtype == np.float64
    for bad in (np.ones(2, complex), None, "text"):
        with pytest.raises(TypeError, match="the result of odd"):
            returning(bad)(x)
    with pytest.raises(TypeError, match="the rule of odd"):
        make(lambda g, need: g * 1j)(x).sum().backward()
    make(lambda g, need: ms.tensor(g))(x).sum().backward()
    np.testing.assert_array_equal(x.grad, [1, 1])


def test_plain_operands_of_any_kind():
    for operand in ([1, 2], np.array([1, 2]), (True, False), np.ones(2, np.float32)):
        for f in (ms.softmax, ms.logsumexp, ms.norm, ms.gelu, ms.mean, ms.square):
            assert not isinstance(f(operand), ms.Tensor)
            np.testing.assert_allclose(f(operand), f(np.asarray(operand, float)), rtol=1e-6)
    assert [len(a) for a in ms.split([1, 2, 3, 4], 2)] == [2, 2]
    assert (ms.softmax(1.0), ms.log_softmax(1.0), ms.logsumexp(3.0)) == (1.0, 0.0, 3.0)


def test_bounds_do_not_widen_float32():
    x = leaf([1.0, 2.0], dtype="float32")
    assert ms.clip(x, np.float64(0.5), np.array([1.0, 1.5])).dtype == np.float32
    assert ms.leaky_relu(x, np.float64(0.1)).dtype == np.float32


def test_masked_arrays_lose_nothing():
    x = leaf([1.0, 2.0])
    for call in (lambda: np.ma.array([0.0, 1.0]) + x, lambda: np.ma.getdata(x)):
        with pytest.raises(TypeError, match="grad"):
            call()


def test_masks_are_copied():
    x, mask = leaf([1.0, 2.0]), np.array([True, False])
    y = ms.where(mask, x, 0.0)
    mask[:] = True
    y.sum().backward()
    np.testing.assert_array_equal(x.grad, [1, 0])


def test_recorded_relu_keeps_its_own_condition():
    """What is recorded for the second order does not see a later change of the result."""
    x, c = leaf([1.0, -1.0, 2.0]), leaf([3.0, 4.0, 5.0])
    y = ms.relu(x)
    first = ms.grad((y * c).sum(), x, create_graph=True)
    with ms.no_grad():
        y[...] = 0
    assert ms.grad(first.sum(), c).tolist() == [1, 0, 1]


def test_second_order_sees_in_place_changes():
    x, c = leaf([2.0]), ms.tensor([3.0])
    for changed in (x, c):
        g = ms.grad((x**3 / c**2).sum(), [x], create_graph=True)[0] / c
        with ms.no_grad():
            changed += 1.0
        with pytest.raises(RuntimeError, match="changed in place"):
            ms.grad(g.sum(), x)


def test_exception_in_a_rule_changes_nothing():
    def broken(g, need):
        raise ZeroDivisionError

    a, b = leaf([1.0]), leaf([1.0])
    y = make(broken)(a) + b * 2
    with pytest.raises(ZeroDivisionError) as caught:
        y.sum().backward()
    assert "odd" in caught.value.__notes__[0]
    assert a.grad is None
    assert b.grad is None
    assert ms.is_grad_enabled()


def test_structure_takes_no_tensors():
    with pytest.raises(TypeError, match="structure"):
        ms.clip(leaf([1.0]), a_min=ms.tensor(0.0))


def test_identity_primitive_shares_the_version():
    @ms.primitive
    def same(x):
        return x

    same.vjp(lambda g, need: g)
    x = leaf([1.0])
    y = same(x)
    z = (y * y).sum()
    with ms.no_grad():
        x += 1.0
    with pytest.raises(RuntimeError, match="changed in place"):
        z.backward()


# ------------------------------------------------------------------------------------- edge values


def test_double_where():
    """CASES 30."""
    e = leaf([1.0, 1.0])
    (np.array([0.0, 2.0]) ** e).sum().backward()
    np.testing.assert_allclose(e.grad, [0, 2 * np.log(2)])
    x, d = leaf([0.0, 1.0]), ms.tensor([0.0, 2.0])
    ms.where(d > 0, x / ms.where(d > 0, d, 1), 0).sum().backward()
    np.testing.assert_array_equal(x.grad, [0, 0.5])


@pytest.mark.parametrize(
    ("f", "at", "expected"),
    [
        (ms.relu, [-1.0, 0.0, 1.0], [0, 0, 1]),
        (ms.max, [3.0, 3.0, 1.0], [0.5, 0.5, 0]),
        (ms.min, [3.0, 1.0, 1.0], [0, 0.5, 0.5]),
        (lambda x: ms.maximum(x, 1.0), [0.0, 1.0, 2.0], [0, 0.5, 1]),
        (lambda x: ms.minimum(1.0, x), [0.0, 1.0, 2.0], [1, 0.5, 0]),
        (lambda x: ms.clip(x, 0, 1), [-0.1, 0.0, 1.0, 1.1], [0, 1, 1, 0]),
        (ms.norm, [0.0, 0.0], [0, 0]),
        (ms.std, [2.0, 2.0], [0, 0]),
        (ms.logsumexp, [-np.inf, -np.inf], [0, 0]),
        (ms.absolute, [-2.0, 0.0, 2.0], [-1, 0, 1]),
        (lambda x: x**2, [0.0, 3.0], [0, 6]),
        (lambda x: x**0, [0.0, 3.0], [0, 0]),
        (lambda x: x**1, [0.0, 3.0], [1, 1]),
        (ms.softplus, [-1000.0, 1000.0], [0, 1]),
        (ms.sigmoid, [-1000.0, 1000.0], [0, 0]),
    ],
)
def test_edges(f, at, expected):
    """CASES 32, and the other edges of the contract."""
    x = leaf(at)
    f(x).sum().backward()
    np.testing.assert_array_equal(x.grad, expected)


def test_large_logits():
    """CASES 31."""
    logits = leaf([[-431.0, 279.0, 427.0]])
    loss = ms.nn.cross_entropy(logits, [0])
    loss.backward()
    assert loss.item() == 858
    np.testing.assert_allclose(logits.grad, [[-1, 0, 1]], atol=1e-60)


def test_power_gradient_is_second_order_right_at_zero():
    x = leaf([0.0, 1.0])
    g = ms.grad((x**2).sum(), x, create_graph=True)
    np.testing.assert_array_equal(ms.grad(g.sum(), x), [2, 2])


def test_index_arrays_are_copied():
    x, index = leaf([1.0, 2.0, 3.0]), np.array([0, 0])
    y = x[index]
    index[:] = 2
    y.sum().backward()
    np.testing.assert_array_equal(x.grad, [2, 0, 0])


# ------------------------------------------------------------------------------------ graphs drawn


def test_graph_as_text():
    """Each operation and leaf once, an edge for each use, names, shapes and dtypes."""
    x = ms.tensor([1.0, 2.0], requires_grad=True)
    y = ms.tensor([[3.0], [4.0]], requires_grad=True, dtype="float64")
    z = (x * x + ms.exp(y) * 2.0).sum()
    g = ms.viz.graph(z)
    assert g.dot.startswith("digraph {")
    assert g.dot.endswith("}")
    assert repr(g) == g.dot
    for text, arrow in ((g.dot, "->"), (g.mermaid, "-->")):
        assert text.count(f" {arrow} ") == 7
        assert text.count("leaf") == 2 if text is g.mermaid else text.count(">leaf") == 0
        line = "\\n" if text is g.dot else "<br>"
        for part in ("sum", "() float64"), ("exp", "(2, 1) float64"), ("add", "(2, 2) float64"):
            assert text.count(line.join(part)) == 1
    assert "text/vnd.mermaid" in g._repr_mimebundle_()
    leaf = ms.viz.graph(x)
    assert leaf.mermaid.count("\n") == 1
    W = ms.SparseParameter((ms.Pattern.diagonal(2), [1.0, 2.0]))
    assert "spmm" in ms.viz.graph((W @ x).sum()).dot
    assert "leaf" in ms.viz.graph(W).dot
    with pytest.raises(TypeError, match="needs a Tensor"):
        ms.viz.graph(3.0)


def test_graph_of_a_long_chain():
    x = ms.tensor(1.0, requires_grad=True)
    y = x
    for _ in range(20_000):
        y = y + 1.0
    assert ms.viz.graph(y).dot.count("->") == 20_000


@pytest.mark.parametrize("n", [10, 40_000])
def test_where_with_any_condition(n):
    """A condition holds where NumPy says so, and what is chosen comes bit for bit."""
    x = np.random.default_rng(0).standard_normal(n)
    for value in (-1, 0, 0.5, np.nan, 2, 256, True):
        condition = np.full(n, value)
        t = ms.tensor(x, requires_grad=True)
        out = ms.where(condition, t, 7.25)
        np.testing.assert_array_equal(out.data, np.where(condition, x, 7.25))
        out.sum().backward()
        np.testing.assert_array_equal(t.grad, condition.astype(bool))
    mask = x > 0
    np.testing.assert_array_equal(ms.where(mask, x, 1j), np.where(mask, x, 1j))
    bits = x.view(np.int64).copy()
    bits[0] = 0x7FF8000000000123  # a NaN keeps its payload
    odd = ms.where(np.ones(n, bool), ms.tensor(bits.view(np.float64)), 0.0)
    assert odd.data.tobytes() == bits.tobytes()
    for zero in (0.0, -0.0):
        chosen = ms.where(mask, ms.tensor(x), zero)
        assert chosen.data.tobytes() == np.where(mask, x, zero).tobytes()
