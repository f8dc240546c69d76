"""minisparse: a small sparse autodiff engine for fixed sparse connectivity on a CPU."""

from . import nn, optim
from .engine import Tensor, grad, is_grad_enabled, no_grad, primitive, tensor
from .gradcheck import GradcheckError, gradcheck
from .kernels import backend, get_num_threads, set_num_threads, warmup
from .ops import *
from .pattern import Pattern, PatternMismatchError
from .runtime import show_config
from .sparse import SparseParameter, SparseTensor, matmul, multiply, sddmm

__version__ = "0.1.0"

__all__ = [
    "absolute", "add", "arctan", "backend", "broadcast_to", "clip", "concatenate", "cos",
    "divide", "dot", "erf", "exp", "expand_dims", "expm1", "gelu", "get_num_threads", "getitem",
    "grad", "gradcheck", "GradcheckError", "index_add", "is_grad_enabled", "leaky_relu", "log",
    "log1p", "log_softmax", "logsumexp", "matmul", "max", "maximum", "mean", "min", "minimum",
    "multiply", "negative", "nn", "no_grad", "norm", "optim", "Pattern", "PatternMismatchError",
    "power", "primitive", "ravel", "relu", "reshape", "sddmm", "set_num_threads", "show_config",
    "sigmoid", "sign", "sin", "softmax", "softplus", "SparseParameter", "SparseTensor", "split",
    "sqrt", "square", "squeeze", "stack", "std", "subtract", "sum", "take", "take_along_axis",
    "tan", "tanh", "tensor", "Tensor", "transpose", "var", "warmup", "where",
]  # fmt: skip
