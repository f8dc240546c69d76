"""Whether tensors can live on a GPU: ``t.to("cuda")``."""

from .kernels.cuda import is_available, why_not

__all__ = ["is_available", "why_not"]
