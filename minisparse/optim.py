"""Optimizers: each step is one fused pass over a parameter, in place."""

from __future__ import annotations

import math

import numpy as np

from . import kernels
from .engine import Tensor


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
        if not leaves:
            raise ValueError(f"{name}: no parameters")
        if len(set(leaves)) < len(leaves):
            raise ValueError(f"{name}: a parameter is given twice")
        for group in self.param_groups:
            self._check(group)

    def _several(self, params):
        if isinstance(params, Tensor) or hasattr(params, "__tensor__"):
            raise TypeError(f"{type(self).__name__}: params is a list, got one {type(params)}")
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

    def _new_state(self, p):
        raise NotImplementedError

    def _state_of(self, p):
        if p not in self._state:
            self._state[p] = self._new_state(p._array)
        return self._state[p]

    def _update(self, p, array, group):
        raise NotImplementedError

    def step(self):
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            self._check(group)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p._version[0] += 1
                    in_c_order = kernels.contiguous(p._array)
                    self._update(p, in_c_order, group)
                    if in_c_order is not p._array:
                        p._array[...] = in_c_order

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
            fresh = self._new_state(leaves[i]._array) if i in leaves else None
            if fresh is None or set(fresh) != set(given):
                raise ValueError(f"{name}: there is no parameter {i} with state {sorted(given)}")
            for key, start in fresh.items():
                value, like = np.asarray(given[key]), np.asarray(start)
                if value.shape != like.shape or value.dtype.kind != like.dtype.kind:
                    wrong = f"{value.dtype} of shape {value.shape}, not {like.dtype} {like.shape}"
                    raise ValueError(f"{name}: {key} of parameter {i} is {wrong}")
                fresh[key] = value.item() if key == "step" else value.astype(like.dtype, order="C")
            if fresh.get("step", 0) < 0:
                raise ValueError(f"{name}: step of parameter {i} is {fresh['step']}")
            loaded[leaves[i]] = fresh
        self.param_groups, self._state = groups, loaded


def _numbered(things):
    return {str(i): thing for i, thing in enumerate(things)}


def _options(entries):
    return {k: tuple(v.tolist()) if isinstance(v, np.ndarray) else v for k, v in entries.items()}


def _copied(entries):
    """Copy numbers, and arrays and tuples as arrays."""
    return {
        key: np.array(value) if isinstance(value, (tuple, np.ndarray)) else value
        for key, value in entries.items()
        if key != "params"
    }


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
        if group["nesterov"] and not group["momentum"]:
            raise ValueError("SGD: nesterov needs a momentum")

    def _new_state(self, p):
        return {"buffer": np.zeros_like(p, order="C")}

    def _update(self, p, array, group):
        lr, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
        buffer = self._state_of(p)["buffer"] if momentum else None
        kernels.sgd(array, p.grad, buffer, lr, momentum, group["nesterov"], decay)


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

    def _new_state(self, p):
        zeros = np.zeros_like(p, order="C")
        return {"step": 0, "mean": zeros, "mean_square": zeros.copy()}

    def _update(self, p, array, group):
        state = self._state_of(p)
        state["step"] += 1
        lr, betas, eps, decay = (group[key] for key in ("lr", "betas", "eps", "weight_decay"))
        step, mean, square = state["step"], state["mean"], state["mean_square"]
        kernels.adam(array, p.grad, mean, square, step, lr, *betas, eps, decay, self._decoupled)


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
