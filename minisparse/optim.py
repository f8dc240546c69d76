"""Optimizers, whose step is one fused pass over a parameter in place; clipping; schedules."""

import math
import mmap
import operator

import numpy as np

from . import kernels
from .engine import Tensor, require


class Optimizer:
    """What the optimizers share: parameter groups, state, and the walk over them.

    Parameters
    ----------
    params : sequence
        Tensors, SparseParameters, or dicts with ``"params"`` and options that differ from the
        defaults.

    Attributes
    ----------
    param_groups : list of dict
        Options of each group may be changed between steps, ``group["lr"]`` above all.

    Raises
    ------
    ValueError
        For an empty list, a parameter given twice, a Tensor that is not a leaf requiring grad, or
        an option out of range.
    """

    def __init__(self, params, **defaults):
        name, groups = type(self).__name__, self._several(params)
        if not groups or not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        self._keys = {"params", *defaults}
        self._state: dict[Tensor, dict] = {}
        self.param_groups = []
        for group in groups:
            if not isinstance(group, dict) or not {"params"} <= set(group) <= self._keys:
                raise TypeError(f"{name}: a group is a dict of params and any of {list(defaults)}")
            leaves = [self._leaf(p) for p in self._several(group["params"])]
            self.param_groups.append({**defaults, **group, "params": leaves})
        leaves = self._leaves()
        require(leaves, f"{name}: no parameters")
        require(len(set(leaves)) == len(leaves), f"{name}: a parameter is given twice")
        for group in self.param_groups:
            self._check(group)

    def _several(self, params):
        if isinstance(params, Tensor) or not hasattr(params, "__iter__"):
            kind = type(params).__name__
            raise TypeError(f"{type(self).__name__}: needs a list (m.parameters()), got a {kind}")
        return list(params)

    def _leaf(self, p):
        leaf = p.__tensor__() if hasattr(p, "__tensor__") else p
        if not isinstance(leaf, Tensor):
            raise TypeError(f"{type(self).__name__}: a parameter is a Tensor, got {type(p)}")
        if leaf._node is not None or not leaf.requires_grad:
            what = f"a Tensor of shape {leaf.shape} is no leaf that requires grad"
            raise ValueError(f"{type(self).__name__}: {what}, so no gradient ever reaches it")
        return leaf

    def _leaves(self):
        return [p for group in self.param_groups for p in group["params"]]

    def _check(self, group):
        if wrong := self._keys ^ set(group):
            raise ValueError(f"{type(self).__name__}: unknown or missing options {sorted(wrong)}")
        for key in ("lr", "momentum", "eps", "weight_decay"):
            if not 0 <= group.get(key, 0) < math.inf:
                raise ValueError(f"{type(self).__name__}: {key}={group[key]} must be 0 or more")

    def _new_state(self, p, zeros):
        """Return the state of a parameter at the start; ``zeros(p)`` makes its arrays."""

    def _state_of(self, p, group):
        if p not in self._state:
            zeros = _thin_zeros if hasattr(p.grad, "rows") else _zeros
            self._state[p] = self._new_state(p._array, zeros)
        state, device = self._state[p], kernels.device_of(p._array)  # it may have moved since
        state |= {k: kernels.moved(a, device) for k, a in state.items() if k != "step"}
        return state

    def _update(self, array, g, state, group):
        """Change `array`, and the arrays and the step of `state`, in place."""

    def step(self):
        """Update every parameter that has a gradient; of a row-sparse one, only those rows.

        Raises
        ------
        ValueError
            If an option is out of range, or a parameter of a group with weight decay has a
            row-sparse gradient: its other rows would have to decay too.  Nothing has changed then.

        Notes
        -----
        Whatever interrupts it, control-C above all, each parameter has been updated with all of its
        state or not at all; those that stand first in the list may have been, and others not.
        """
        for group in self.param_groups:
            self._check(group)
            if group["weight_decay"] and any(hasattr(p.grad, "rows") for p in group["params"]):
                cure = "a row-sparse gradient does not decay: use a group with weight_decay=0"
                raise ValueError(f"{type(self).__name__}: {cure} for it")
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p._version[0] += 1
                g, state = p.grad, self._state_of(p, group)
                rows, values = getattr(g, "rows", ...), getattr(g, "values", g)
                values = values.to_dense() if hasattr(values, "to_dense") else values
                if rows is ... and kernels.contiguous(p._array) is p._array:
                    self._update(p._array, values, state, group)
                    continue
                # On copies, which are written back: what interrupts that has it done once more.
                whole = {"": p._array, **state}
                at = {key: ... if key == "step" else rows for key in whole}
                parts = {k: a.copy() if at[k] is ... else a[rows] for k, a in whole.items()}
                self._update(parts[""], values, parts, group)
                try:
                    _write(whole, at, parts)
                except BaseException:
                    _write(whole, at, parts)
                    raise

    def zero_grad(self):
        """Set the gradient of every parameter to None."""
        for p in self._leaves():
            p.grad = None

    def state_dict(self) -> dict:
        """Return a copy of the options and the state, as nested dicts of arrays and numbers."""
        states = [self._state.get(p, {}) for p in self._leaves()]
        return {
            "kind": type(self).__name__,
            "groups": {i: _copied(group) for i, group in _numbered(self.param_groups).items()},
            "state": {i: _copied(state) for i, state in _numbered(states).items() if state},
        }

    def load_state_dict(self, state):
        """Take over what :meth:`state_dict` returned for the same parameters.

        Raises
        ------
        ValueError
            If it belongs to another optimizer or to other parameters.  Nothing has changed then.
        """
        name, own = type(self).__name__, _numbered(self.param_groups)
        try:
            kind, given_groups, given_states = (state[k] for k in ("kind", "groups", "state"))
            nested = [*given_groups.values(), *given_states.values()]
        except (TypeError, KeyError, AttributeError):
            kind, nested = None, []
        if kind != name or not all(isinstance(part, dict) for part in nested):
            raise ValueError(f"{name}: this is not the state of such an optimizer")
        if set(given_groups) != set(own):
            raise ValueError(f"{name}: the state has {len(given_groups)} groups, not {len(own)}")
        groups = [{**_options(given_groups[i]), "params": old["params"]} for i, old in own.items()]
        for group in groups:
            self._check(group)
        leaves, loaded = _numbered(self._leaves()), {}
        for i, given in given_states.items():
            fresh = self._new_state(leaves[i]._array, _zeros) if i in leaves else None
            if fresh is None or set(fresh) != set(given):
                raise ValueError(f"{name}: there is no parameter {i} with state {sorted(given)}")
            for key, start in fresh.items():
                value = np.asarray(given[key])
                if value.shape != start.shape or value.dtype.kind != start.dtype.kind:
                    wrong = f"{value.dtype} of shape {value.shape}, not {start.dtype} {start.shape}"
                    raise ValueError(f"{name}: {key} of parameter {i} is {wrong}")
                fresh[key] = np.asarray(value.astype(start.dtype, order="C"), like=start)
            if fresh.get("step", 0) < 0:
                raise ValueError(f"{name}: step of parameter {i} is {fresh['step']}")
            loaded[leaves[i]] = fresh
        self.param_groups, self._state = groups, loaded


def _write(whole, at, parts):
    for key, array in whole.items():
        array[at[key]] = parts[key]


def _zeros(p):
    return np.zeros(p.shape, p.dtype, like=p)


def _thin_zeros(p):
    """Return zeros in small pages, each there once it is touched; NumPy asks for huge ones."""
    if p.nbytes < 1 << 22 or not (isinstance(p, np.ndarray) and hasattr(mmap, "MADV_NOHUGEPAGE")):
        return _zeros(p)
    memory = mmap.mmap(-1, p.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, p.dtype).reshape(p.shape)


def _numbered(things):
    return {str(i): thing for i, thing in enumerate(things)}


def _options(entries):
    return {k: tuple(v.tolist()) if isinstance(v, np.ndarray) else v for k, v in entries.items()}


def _copied(entries):
    """Copy numbers, and arrays and tuples as arrays; the array that holds the step is a number."""
    own = {k: v.item() if k == "step" else v for k, v in entries.items() if k != "params"}
    own = {k: kernels.moved(v, "cpu") for k, v in own.items()}
    return {k: np.array(v) if isinstance(v, (tuple, np.ndarray)) else v for k, v in own.items()}


class SGD(Optimizer):
    """Gradient descent, optionally with momentum: ``p -= lr · g``.

    Parameters
    ----------
    params : sequence of Tensor or SparseParameter, or of dict
    lr : float
    momentum : float
        The buffer is ``b = momentum · b + g``, starting at the first ``g``; then ``p -= lr · b``.
    nesterov : bool
        Then ``p -= lr · (g + momentum · b)``.
    weight_decay : float
        Adds ``weight_decay · p`` to the gradient.

    References
    ----------
    Sutskever, Martens, Dahl and Hinton, On the importance of initialization and momentum in deep
    learning, 2013; in PyTorch's form.

    Examples
    --------
    >>> import minisparse as ms
    >>> w = ms.tensor([1.0], requires_grad=True)
    >>> opt = ms.optim.SGD([w], lr=0.1)
    >>> (w * w).sum().backward()
    >>> opt.step()
    >>> w
    tensor([0.8], requires_grad=True)
    """

    def __init__(self, params, lr, *, momentum=0.0, nesterov=False, weight_decay=0.0):
        super().__init__(
            params, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay
        )

    def _check(self, group):
        super()._check(group)
        require(group["momentum"] or not group["nesterov"], "SGD: nesterov needs a momentum")

    def _new_state(self, p, zeros):
        return {"buffer": zeros(p)}

    def _state_of(self, p, group):
        return super()._state_of(p, group) if group["momentum"] else {}

    def _update(self, array, g, state, group):
        lr, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
        kernels.sgd(array, g, state.get("buffer"), lr, momentum, group["nesterov"], decay)


class Adam(Optimizer):
    """Adam: steps of size `lr` scaled by running moments of the gradient.

    Parameters
    ----------
    params : sequence of Tensor or SparseParameter, or of dict
    lr : float
    betas : (float, float)
        Decay of the running mean of the gradient and of its square.
    eps : float
        Added to the denominator.
    weight_decay : float
        Adds ``weight_decay · p`` to the gradient.

    References
    ----------
    Kingma and Ba, Adam: a method for stochastic optimization, arXiv:1412.6980.

    Examples
    --------
    >>> import minisparse as ms
    >>> w = ms.tensor([1.0], requires_grad=True)
    >>> opt = ms.optim.Adam([w], lr=0.1)
    >>> (w * w).sum().backward()
    >>> opt.step()
    >>> round(w.item(), 6)
    0.9
    """

    _decoupled = False

    def __init__(self, params, lr=1e-3, *, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def _check(self, group):
        super()._check(group)
        betas = group["betas"]
        if np.shape(betas) != (2,) or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"{type(self).__name__}: betas={betas} must be two numbers in [0, 1)")

    def _new_state(self, p, zeros):
        return {"step": np.zeros((), np.int64), "mean": zeros(p), "mean_square": zeros(p)}

    def _update(self, array, g, state, group):
        lr, betas, eps, decay = (group[key] for key in ("lr", "betas", "eps", "weight_decay"))
        step, mean, square = state["step"], state["mean"], state["mean_square"]
        kernels.adam(array, g, mean, square, step, lr, *betas, eps, decay, self._decoupled)


class AdamW(Adam):
    """Adam with decoupled weight decay: ``p -= lr · weight_decay · p`` beside Adam's step.

    Parameters
    ----------
    params : sequence of Tensor or SparseParameter, or of dict
    lr, betas, eps
        As for :class:`Adam`.
    weight_decay : float

    References
    ----------
    Loshchilov and Hutter, Decoupled weight decay regularization, arXiv:1711.05101.
    """

    _decoupled = True

    def __init__(self, params, lr=1e-3, *, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        super().__init__(params, lr, betas=betas, eps=eps, weight_decay=weight_decay)


# ------------------------------------------------------------------------- gradients and schedules


def clip_grad_norm(params, max_norm):
    """Scale gradients down so that their norm, of all together, is at most `max_norm`.

    Parameters
    ----------
    params : sequence of Tensor or SparseParameter
        Those without a gradient are skipped.
    max_norm : float

    Returns
    -------
    float
        The norm before.  Where it is not finite, the gradients are left as they are.

    Raises
    ------
    ValueError
        If `max_norm` is negative or no number.

    References
    ----------
    Pascanu, Mikolov and Bengio, On the difficulty of training recurrent neural networks,
    arXiv:1211.5063; the formula is PyTorch's.

    Examples
    --------
    >>> import minisparse as ms
    >>> w = ms.tensor([3.0, 4.0], requires_grad=True)
    >>> (w * w).sum().backward()
    >>> ms.optim.clip_grad_norm([w], 1.0)
    10.0
    >>> w.grad.round(3)
    array([0.6, 0.8])
    """
    require(max_norm >= 0, f"clip_grad_norm: max_norm={max_norm} must be 0 or more")
    leaves = dict.fromkeys(p.__tensor__() if hasattr(p, "__tensor__") else p for p in params)
    params = [p for p in leaves if p.grad is not None]
    flat = [getattr(p.grad, "values", p.grad).reshape(-1) for p in params]
    norm = math.sqrt(sum(float(np.einsum("i,i->", g, g, dtype=np.float64)) for g in flat))
    factor = max_norm / (norm + 1e-6)
    if factor < 1 and math.isfinite(norm):
        for p in params:
            p.grad = p.grad * factor
    return norm


class _Schedule:
    """Sets the learning rate of every group of an optimizer from the number of steps taken."""

    def __init__(self, opt):
        require(isinstance(opt, Optimizer), f"a schedule: {type(opt)} is no optimizer", TypeError)
        self._opt, self._steps = opt, 0
        self._start = [group["lr"] for group in opt.param_groups]
        self._apply()

    def _rate(self, start, step):
        """Return the learning rate of a step, for one that starts from `start`."""

    def _apply(self):
        for group, start in zip(self._opt.param_groups, self._start, strict=True):
            group["lr"] = self._rate(start, self._steps)

    def step(self):
        """Count one step of training, and set the learning rates for the next."""
        self._steps += 1
        self._apply()

    def state_dict(self) -> dict:
        """Return the number of steps and the learning rates that the schedule started from."""
        start = np.array(self._start, dtype=np.float64)
        return {"kind": type(self).__name__, "steps": self._steps, "start": start}

    def load_state_dict(self, state):
        """Take over what :meth:`state_dict` returned, and set the learning rates by it.

        Raises
        ------
        ValueError
            If it is no such state, or has another number of groups.
        """
        try:
            steps, start = int(state["steps"]), np.asarray(state["start"], dtype=np.float64)
            right = state["kind"] == type(self).__name__ and steps >= 0
        except (TypeError, KeyError, ValueError):
            right = False
        if not right or start.shape != (len(self._start),):
            raise ValueError(f"{type(self).__name__}: this is not the state of such a schedule")
        self._steps, self._start = steps, start.tolist()
        self._apply()


class StepLR(_Schedule):
    """Multiply the learning rate by `gamma` after every `step_size` steps.

    Parameters
    ----------
    opt : Optimizer
    step_size : int
    gamma : float

    Examples
    --------
    >>> import minisparse as ms
    >>> opt = ms.optim.SGD([ms.tensor(1.0, requires_grad=True)], lr=1.0)
    >>> schedule = ms.optim.StepLR(opt, step_size=2)
    >>> for _ in range(3):
    ...     schedule.step()
    >>> opt.param_groups[0]["lr"]
    0.1
    """

    def __init__(self, opt, step_size, gamma=0.1):
        if operator.index(step_size) < 1 or not gamma >= 0:
            raise ValueError(f"StepLR: step_size={step_size} below 1, or gamma={gamma} below 0")
        self._size, self._gamma = step_size, gamma
        super().__init__(opt)

    def _rate(self, start, step):
        return start * self._gamma ** (step // self._size)


class CosineLR(_Schedule):
    """Raise the learning rate for `warmup` steps, then lower it along a cosine to `min_lr`.

    Parameters
    ----------
    opt : Optimizer
    total_steps : int
        From then on the rate is `min_lr`.
    warmup : int
        Step t of these has the fraction ``(t + 1) / (warmup + 1)`` of the full rate.
    min_lr : float

    References
    ----------
    Loshchilov and Hutter, SGDR: stochastic gradient descent with warm restarts, arXiv:1608.03983.

    Examples
    --------
    >>> import minisparse as ms
    >>> opt = ms.optim.SGD([ms.tensor(1.0, requires_grad=True)], lr=1.0)
    >>> schedule = ms.optim.CosineLR(opt, total_steps=4)
    >>> schedule.step(), schedule.step()
    (None, None)
    >>> round(opt.param_groups[0]["lr"], 6)
    0.5
    """

    def __init__(self, opt, total_steps, *, warmup=0, min_lr=0.0):
        if not 0 <= warmup < total_steps:
            raise ValueError(f"CosineLR: warmup={warmup} must be below total_steps={total_steps}")
        self._total, self._warmup, self._min = total_steps, warmup, min_lr
        super().__init__(opt)

    def _rate(self, start, step):
        if step < self._warmup:
            return start * (step + 1) / (self._warmup + 1)
        part = min((step - self._warmup) / (self._total - self._warmup), 1)
        return self._min + (start - self._min) * (1 + math.cos(math.pi * part)) / 2
