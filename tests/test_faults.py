"""Exceptions in the middle: the state is as before, or as after, and the next step is right."""

import contextlib
import itertools
import signal
import sys

import numpy as np
import pytest

import minisparse as ms
from minisparse import kernels
from minisparse.kernels import cpu, memory

pytestmark = pytest.mark.compiled


def interrupted(call, n):
    """Raise KeyboardInterrupt at the n-th moment of `call`; tell whether it lasted as long.

    Python heeds signals when a function is entered and when a call has returned, and so does a
    profiler.  Those of the package count here, but for finalizers: from these nothing gets out.
    """
    moments = itertools.count()

    def profile(frame, event, arg):
        ours = frame.f_globals.get("__name__", "").startswith("minisparse")
        ours = ours and event in ("call", "return", "c_return") and "__del__" not in names(frame)
        if ours and next(moments) == n:
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def names(frame):
    """Yield the name of each function that is running, the innermost first."""
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


def leaf(*shape, rng=0):
    return ms.tensor(np.random.default_rng(rng).normal(size=shape), requires_grad=True)


def bits(p, opt):
    """Return all that belongs to a parameter."""
    return p.data.tobytes(), *(np.array(a).tobytes() for a in opt._state.get(p, {}).values())


def check_quiet():
    """Hold that nobody has left anything switched off or taken."""
    assert ms.is_grad_enabled()
    assert cpu._turn == memory._pool.turn == [None]
    idle = memory._pool.idle
    assert memory._pool.idle_bytes == sum(size * len(blocks) for size, blocks in idle.items())


# ------------------------------------------------------------------------------- control-C


@pytest.mark.parametrize("kind", ["dense", "strided", "rows"])
@pytest.mark.parametrize(
    "make",
    [ms.optim.Adam, ms.optim.AdamW, lambda p, lr: ms.optim.SGD(p, lr, momentum=0.9)],
    ids=["Adam", "AdamW", "SGD"],
)
def test_a_parameter_is_updated_with_its_state_or_not_at_all(make, kind):
    leaves = [leaf(4, 3), leaf(5, 2, rng=1)]
    if kind == "strided":
        leaves = [p.T.detach() for p in leaves]
        for p in leaves:
            p.requires_grad = True
    gradients = [np.ones(p.shape) for p in leaves]
    if kind == "rows":
        gradients = [ms.RowGrad([1, 3], np.ones((2, p.shape[1])), p.shape) for p in leaves]
    opt = make(leaves, lr=0.1)
    if kind == "rows":
        opt.param_groups[0]["weight_decay"] = 0.0

    def step():
        for p, g in zip(leaves, gradients, strict=True):
            p.grad = g
        opt.step()

    step()
    start, state = [p.data.copy() for p in leaves], opt.state_dict()
    before = [bits(p, opt) for p in leaves]
    step()
    after, seen = [bits(p, opt) for p in leaves], set()
    for n in itertools.count():
        opt.load_state_dict(state)
        for p, data in zip(leaves, start, strict=True):
            p.data = data
        assert [bits(p, opt) for p in leaves] == before
        if not interrupted(opt.step, n):
            break
        now = [bits(p, opt) for p in leaves]
        assert all(x in pair for x, pair in zip(now, zip(before, after, strict=True), strict=True))
        seen.add(tuple(x == y for x, y in zip(now, after, strict=True)))
    assert [bits(p, opt) for p in leaves] == after
    assert seen == {(False, False), (True, False), (True, True)}


def test_an_interrupted_training_step_is_taken_again(monkeypatch):
    """Gradients of all parameters or of none; and then the step that would have been."""
    monkeypatch.setattr(cpu, "PARALLEL_WORK", -1)
    net = ms.nn.Sequential(
        ms.nn.SparseLinear(400, 300, fan_in=3, rng=0), ms.nn.ReLU(), ms.nn.Linear(300, 2, rng=1)
    )
    opt, x = ms.optim.Adam(net.parameters(), lr=0.1), np.ones((32, 400), np.float32)
    params = opt._leaves()
    for p in params:
        p.grad = np.ones(p.shape)

    def gradients():
        return [p.grad.tobytes() for p in params]

    before, loss = gradients(), (net(x) ** 2).sum()
    loss.backward(retain_graph=True)
    after, seen = gradients(), []
    for n in itertools.count():
        for p in params:
            p.grad = np.ones(p.shape)
        if not interrupted(lambda: (net(x) ** 2).sum().backward(), n):
            break
        check_quiet()
        seen.append(gradients())
        assert seen[-1] in (before, after)
    assert before in seen
    assert after in seen
    assert gradients() == after


def test_the_pool_is_whole_whenever_it_is_interrupted(monkeypatch):
    monkeypatch.setattr(memory, "MAX_IDLE_BYTES", 5 << 16)
    monkeypatch.setattr(memory, "_pool", memory._Pool())
    for n in range(40):
        for size in (1 << 16, 1 << 17):
            interrupted(lambda size=size: memory._pool.put(size, memory._fresh(size)), n)
            check_quiet()
        interrupted(lambda: memory._pool.take(1 << 16), n)
        check_quiet()
        memory._pool.put(1 << 16, memory._fresh(1 << 16))
        assert 0 < memory._pool.idle_bytes <= 5 << 16


def test_a_file_is_the_old_one_or_the_new_one(tmp_path, in_new_process):
    in_new_process(
        f"""
import itertools, os, sys
import minisparse as ms
from tests.test_faults import interrupted
def save(x):
    try:
        ms.save("s", {{"x": x}})
    except ValueError:  # of zipfile, when it is left with a member open; it complains later, too
        raise KeyboardInterrupt from None
os.chdir({str(tmp_path)!r})
sys.unraisablehook = lambda *args: None
seen = set()
for n in itertools.count():
    save(0.0)
    if not interrupted(lambda: save(1.0), n):
        break
    seen.add(ms.load("s")["x"])
    assert os.listdir() == ["s"]
assert seen == {{0.0, 1.0}}
"""
    )


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers that send signals")
@pytest.mark.parametrize("sparse", [False, True])
def test_control_c_at_random_moments(in_new_process, sparse):
    """Real signals, among threads, in training that goes on."""
    printed = in_new_process(
        f"""
import random, signal, sys, time
import numpy as np
import minisparse as ms
from minisparse.kernels import cpu
from tests.test_faults import bits, check_quiet
sys.unraisablehook = lambda *args: None  # what comes in a finalizer goes no further
ms.warmup(["float32"])
table = ms.nn.Embedding(3000, 8, sparse={sparse}, rng=0)
net = ms.nn.SparseLinear(8, 300, fan_in=4, rng=1)
ids = np.arange(0, 3000, 10)
cpu.PARALLEL_WORK = 1 << 17  # some kernels on threads
leaves = [table.weight, *(ms.nn._leaf(p) for p in net.parameters())]
opt = ms.optim.Adam(leaves)
def train(gradients):
    opt.zero_grad()
    (net(table(ids)) ** 2).mean().backward()
    for p, g in zip(leaves, gradients):  # those that are known, to the bit
        p.grad = g
    opt.step()
train([None] * 3)
opt.zero_grad()
(net(table(ids)) ** 2).mean().backward()
gradients = [p.grad for p in leaves]
lasts = 1.0  # in seconds; it only says when the signals had best come
for _ in range(5):
    begun = time.perf_counter()
    train(gradients)
    lasts = min(lasts, time.perf_counter() - begun)
signal.signal(signal.SIGALRM, signal.default_int_handler)
random.seed(0)
hit = 0
for _ in range(100):
    state, start = opt.state_dict(), [p.data.copy() for p in leaves]
    before = [bits(p, opt) for p in leaves]
    train(gradients)
    after = [bits(p, opt) for p in leaves]
    opt.load_state_dict(state)
    for p, data in zip(leaves, start):
        p.data = data
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-6 + random.random() * lasts)
        train(gradients)
        time.sleep(1)  # until the signal, unless it has come in a finalizer
    except KeyboardInterrupt:
        hit += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    check_quiet()
    for p, old, new in zip(leaves, before, after):
        assert bits(p, opt) in (old, new)
print(hit)
"""
    )
    assert int(printed) > 50


# ------------------------------------------------------------------------------- memory


def trained(break_off=contextlib.nullcontext, steps=3):
    """Train a little, each step after one that was broken off; return all that has become of it."""
    net = ms.nn.Sequential(
        ms.nn.SparseLinear(30, 40, fan_in=3, dtype=np.float64, rng=0),
        ms.nn.Tanh(),
        ms.nn.SparseLinear(40, 5, fan_in=4, dtype=np.float64, rng=1),
    )
    opt, x = ms.optim.Adam(net.parameters(), lr=0.1), np.random.default_rng(0).normal(size=(8, 30))
    for _ in range(steps):
        for breaking in (True, False):
            with break_off() if breaking else contextlib.nullcontext():
                opt.zero_grad()
                (net(x) ** 2).sum().backward()
                if not breaking:
                    opt.step()
    return [bits(p, opt) for p in opt._leaves()]


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_no_memory_for_a_kernel(monkeypatch, error):
    """At each place where a kernel asks for memory."""
    expected, empty, allocations = trained(), cpu.empty, 0

    @contextlib.contextmanager
    def failing_at(n):
        count = itertools.count()

        def failing(*args):
            if next(count) == n:
                raise error
            return empty(*args)

        with monkeypatch.context() as patch, contextlib.suppress(error):
            patch.setattr(cpu, "empty", failing)
            yield
        nonlocal allocations
        allocations = next(count)

    for n in range(20):
        assert trained(lambda n=n: failing_at(n)) == expected
        check_quiet()
        if allocations <= n:
            break
    assert 4 <= n < 19


def test_no_memory_from_the_system(in_new_process):
    """A batch too large is refused by the system; a smaller one is as if nothing had been."""
    pytest.importorskip("resource", reason="needs a limit on memory")
    in_new_process(
        """
import resource
import numpy as np
import minisparse as ms
from tests.test_faults import bits, check_quiet
ms.set_num_threads(1)
def start():
    layer = ms.nn.SparseLinear(2000, 4000, fan_in=3, rng=0)
    return layer, ms.optim.Adam(layer.parameters())
def step(layer, opt, batch):
    opt.zero_grad()
    (layer(np.ones((batch, 2000), np.float32)) ** 2).mean().backward()
    opt.step()
def state(layer, opt):
    return [bits(p, opt) for p in opt._leaves()]
expected, given = start(), start()
for trainer in (expected, given):
    step(*trainer, 10)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
failures = 0
for batch in (5_000, 10_000, 20_000, 100_000):  # each gets further, or less far
    resource.setrlimit(resource.RLIMIT_AS, (used + 400_000_000, -1))
    try:
        step(*given, batch)
        fits = True
    except MemoryError:
        fits = False
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    if fits:
        step(*expected, batch)
    failures += not fits
    check_quiet()
    assert state(*given) == state(*expected)
assert failures >= 2, failures
step(*given, 10), step(*expected, 10)
assert state(*given) == state(*expected)
"""
    )


# ------------------------------------------------------------------------------- user's code


def odd(forward=None, rule=None):
    """Make a primitive, the identity, in which something is raised."""

    @ms.primitive
    def passing(x):
        if forward:
            raise forward
        return x * 1.0

    @passing.vjp
    def _(g, need):
        if rule:
            raise rule
        return g

    return passing


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("place", ["forward", "rule"])
def test_in_a_users_primitive(place, error):
    """Modes, gradients and versions are as before, in every kind of walk."""
    a, b = leaf(3), leaf(3, rng=1)
    a.grad = first = np.ones(3)
    versions = a._version[0], b._version[0]
    broken = odd(**{place: error})
    walks = [
        lambda y: y.backward(),
        lambda y: ms.grad(y, [a, b]),
        lambda y: ms.grad(y, [a, b], create_graph=True),
        lambda y: ms.hvp(lambda a: (broken(a) ** 3).sum(), a, np.ones(3)),
        lambda y: ms.value_and_grad(lambda a: broken(a).sum())(a),
    ]

    def run(walk, mode, kept):
        y = (broken(a) * b).sum() + kept
        with mode():
            walk(y)

    for walk in walks:
        for mode in (contextlib.nullcontext, ms.no_grad):
            kept = (b * b).sum()
            with pytest.raises(error):
                run(walk, mode, kept)
            assert ms.is_grad_enabled()
            assert a.grad is first
            assert b.grad is None
            assert (a._version[0], b._version[0]) == versions
            np.testing.assert_array_equal(ms.grad(kept, b), 2 * b.data)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_in_no_grad(error):
    w = leaf(3)
    opt = ms.optim.SGD([w], lr=0.5)
    y, before = (w * w).sum(), w.data.copy()
    with pytest.raises(error), ms.no_grad(), ms.backend("reference"):
        w.data = raising(error)
    with pytest.raises(ValueError, match="shape"), ms.no_grad():
        w += np.ones((2, 3))
    assert ms.is_grad_enabled()
    assert kernels.config()["backend"] == "cpu"
    y.backward()  # nothing was changed
    opt.step()
    np.testing.assert_array_equal(w.data, before - 0.5 * (2 * before))


def raising(error):
    raise error


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("place", ["zipfile._ZipWriteFile.write", "os.fsync", "os.replace"])
def test_while_a_file_is_written(tmp_path, monkeypatch, error, place):
    path, opt = tmp_path / "s", ms.optim.Adam([leaf(3)])
    opt._leaves()[0].grad = np.ones(3)
    opt.step()
    state = opt.state_dict()
    ms.save(path, state)
    opt.step()
    with monkeypatch.context() as patch:
        patch.setattr(place, lambda *args: raising(error))
        with pytest.raises(error):
            ms.save(path, opt.state_dict())
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    assert str(ms.load(path)) == str(state)
    ms.save(path, opt.state_dict())
    assert ms.load(path)["state"]["0"]["step"] == 2
