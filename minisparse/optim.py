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
        name = type(self).__name__
        params = self._several(params)
        groups = params if params and isinstance(params[0], dict) else [{"params": params}]
        self.param_groups = []
        self._options = set(defaults)
        self._state: dict[Tensor, dict] = {}
        seen = set()
        for group in groups:
            known = isinstance(group, dict) and "params" in group
            if not known or set(group) - {"params", *defaults}:
                raise TypeError(f"{name}: a group is a dict of params and any of {list(defaults)}")
            leaves = [self._leaf(p) for p in self._several(group["params"])]
            for leaf in leaves:
                if leaf in seen:
                    raise ValueError(f"{name}: a parameter of shape {leaf.shape} is given twice")
                seen.add(leaf)
            self.param_groups.append({**defaults, **group, "params": leaves})
        if not seen:
            raise ValueError(f"{name}: no parameters")
        for group in self.param_groups:
            self._check(group)

    def _several(self, params):
        if isinstance(params, (Tensor, dict)) or hasattr(params, "__tensor__"):
            raise TypeError(f"{type(self).__name__}: params is a list, got one {type(params)}")
        return list(params)

    def _leaf(self, p):
        leaf = p.__tensor__() if hasattr(p, "__tensor__") else p
        if not isinstance(leaf, Tensor):
            raise TypeError(f"{type(self).__name__}: a parameter is a Tensor, got {type(p)}")
        if leaf._node is not None or not leaf.requires_grad:
            raise ValueError(
                f"{type(self).__name__}: a Tensor of shape {leaf.shape} is no leaf that requires "
                "grad, so no gradient would ever reach it"
            )
        return leaf

    def _check(self, group):
        wrong = set(group) ^ {"params", *self._options}
        if wrong:
            raise ValueError(f"{type(self).__name__}: unknown or missing options {sorted(wrong)}")
        for key in ("lr", "weight_decay"):
            if not (math.isfinite(group[key]) and group[key] >= 0):
                raise ValueError(f"{type(self).__name__}: {key}={group[key]} must be 0 or more")

    def _new_state(self, p):
        raise NotImplementedError

    def _update(self, p, g, state, group):
        raise NotImplementedError

    def step(self):
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            self._check(group)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p._version[0] += 1
                    state = self._state_of(p, group)
                    self._update(p._array, kernels.contiguous(p.grad), state, group)

    def _state_of(self, p, group):
        if p not in self._state:
            self._state[p] = self._new_state(p._array)
        return self._state[p]

    def zero_grad(self):
        """Set the gradient of every parameter to None."""
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def _numbered(self):
        leaves = [p for group in self.param_groups for p in group["params"]]
        return {str(i): p for i, p in enumerate(leaves)}

    def state_dict(self) -> dict:
        """Return a copy of the options and the state, as nested dicts of arrays and numbers."""
        return {
            "kind": type(self).__name__,
            "groups": {
                str(i): {
                    k: np.array(v) if isinstance(v, tuple) else v
                    for k, v in group.items()
                    if k != "params"
                }
                for i, group in enumerate(self.param_groups)
            },
            "state": {
                i: {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in state.items()}
                for i, p in self._numbered().items()
                if (state := self._state.get(p))
            },
        }

    def load_state_dict(self, state):
        """Take over what :meth:`state_dict` returned for the same parameters.

        Raises
        ------
        ValueError
            If it belongs to another optimizer or to other parameters.  Nothing has changed then.
        """
        name, leaves = type(self).__name__, self._numbered()
        if not isinstance(state, dict) or state.get("kind") != name:
            raise ValueError(f"{name}: this is not the state of such an optimizer")
        if set(state["groups"]) != {str(i) for i in range(len(self.param_groups))}:
            raise ValueError(f"{name}: the state has {len(state['groups'])} groups")
        groups = []
        for i, group in enumerate(self.param_groups):
            loaded = {**group, **state["groups"][str(i)], "params": group["params"]}
            if set(loaded) != set(group):
                raise ValueError(
                    f"{name}: the state has options {sorted(set(loaded) ^ set(group))}"
                )
            self._check(loaded)
            groups.append(loaded)
        new = {}
        for i, entries in state["state"].items():
            if i not in leaves:
                raise ValueError(f"{name}: the state has a parameter {i}, there are {len(leaves)}")
            p = leaves[i]
            fresh = self._new_state(p._array)
            if set(fresh) != set(entries):
                raise ValueError(f"{name}: parameter {i} has state {sorted(entries)}")
            for key, value in entries.items():
                value, like = np.array(value), fresh[key]
                kind, shape = np.asarray(like).dtype.kind, np.shape(like)
                if value.shape != shape or value.dtype.kind != kind:
                    raise ValueError(
                        f"{name}: {key} of parameter {i} is {value.dtype} of shape {value.shape}, "
                        f"needs shape {shape}"
                    )
                if isinstance(like, np.ndarray):
                    fresh[key] = value.astype(like.dtype)
                elif value < 0:
                    raise ValueError(f"{name}: {key} of parameter {i} is {value}")
                else:
                    fresh[key] = value.item()
            new[p] = fresh
        self.param_groups, self._state = groups, new


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
        if not 0 <= group["momentum"] < math.inf:
            raise ValueError(f"SGD: momentum={group['momentum']} must be 0 or more")
        if group["nesterov"] and not group["momentum"]:
            raise ValueError("SGD: nesterov needs a momentum")

    def _new_state(self, p):
        return {"started": False, "buffer": np.zeros_like(p)}

    def _state_of(self, p, group):
        return super()._state_of(p, group) if group["momentum"] else None

    def _update(self, p, g, state, group):
        lr, decay = group["lr"], group["weight_decay"]
        if state is None:
            kernels.sgd(p, g, None, lr, 0.0, False, decay)
        else:
            first = not state["started"]
            state["started"] = True
            momentum, nesterov = group["momentum"], group["nesterov"]
            kernels.sgd(p, g, state["buffer"], lr, momentum, nesterov, decay, first=first)


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
        if np.shape(group["betas"]) != (2,) or not all(0 <= b < 1 for b in group["betas"]):
            raise ValueError(
                f"{type(self).__name__}: betas={group['betas']} must be two numbers in [0, 1)"
            )
        if not 0 <= group["eps"] < math.inf:
            raise ValueError(f"{type(self).__name__}: eps={group['eps']} must be 0 or more")

    def _new_state(self, p):
        return {"step": 0, "mean": np.zeros_like(p), "mean_square": np.zeros_like(p)}

    def _update(self, p, g, state, group):
        state["step"] += 1
        (beta1, beta2), lr, eps = group["betas"], group["lr"], group["eps"]
        moments, decay = (state["mean"], state["mean_square"]), group["weight_decay"]
        step, decoupled = state["step"], self._decoupled
        kernels.adam(p, g, *moments, step, lr, beta1, beta2, eps, decay, decoupled)


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
