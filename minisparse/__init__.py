"""minisparse: a small sparse autodiff engine for fixed sparse connectivity.

Where to look:

- ``Pattern``, ``SparseParameter``, ``SparseTensor``: which entries exist, which are trained;
- ``tensor``, ``grad``, ``no_grad``, ``Tensor.backward``: differentiation; ``primitive``: your own;
- ``matmul``, ``multiply``, ``sddmm``: products with sparse factors; ``block``, ``block_diag``,
  ``diag``: assembly; ``spsolve``: linear systems;
- the operations, by NumPy's names: arithmetic (``add`` ... ``power``), ``exp log sqrt sin tanh``
  and their kin, activations (``relu gelu sigmoid softplus``), ``where clip maximum minimum``,
  reductions (``sum mean var std max min norm logsumexp softmax``), shapes and indexing (``reshape
  transpose concatenate stack split take getitem index_add``);
- ``nn``: layers, losses, mini-batches; ``optim``: SGD, Adam, AdamW, schedules, clipping;
- ``save``, ``load``: nested dicts of arrays and patterns in one file; ``viz.graph``: pictures;
- ``vjp jvp hvp jacobian hessian value_and_grad``: derivatives of functions;
- ``gradcheck``, and ``minisparse.testing`` (not imported here): checks of your own code;
- ``set_num_threads``, ``backend``, ``warmup``, ``show_config``: how it runs; ``cuda``: on a GPU.
"""

from . import cuda, nn, ops, optim, viz
from .algebra import block, block_diag, diag
from .engine import Tensor, grad, is_grad_enabled, no_grad, primitive, tensor
from .functional import hessian, hvp, jacobian, jvp, value_and_grad, vjp
from .gradcheck import GradcheckError, gradcheck
from .io import load, save
from .kernels import backend, get_num_threads, set_num_threads, warmup
from .linalg import spsolve
from .ops import *
from .pattern import Pattern, PatternMismatchError
from .runtime import show_config
from .sparse import SparseParameter, SparseTensor, matmul, multiply, sddmm

__version__ = "0.1.0"

__all__ = [
    *ops.__all__, "backend", "block", "block_diag", "cuda", "diag", "get_num_threads", "grad",
    "gradcheck", "GradcheckError", "hessian", "hvp", "is_grad_enabled", "jacobian", "jvp", "load",
    "nn", "no_grad", "optim", "Pattern", "PatternMismatchError", "primitive", "save", "sddmm",
    "set_num_threads", "show_config", "SparseParameter", "SparseTensor", "spsolve", "tensor",
    "Tensor", "value_and_grad", "viz", "vjp", "warmup",
]  # fmt: skip
