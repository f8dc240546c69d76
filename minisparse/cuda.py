"""Whether tensors can live on a GPU: ``t.to("cuda")``."""


def why_not():
    """Return why kernels cannot run on a GPU, as a sentence; None where they can.

    Notes
    -----
    Imports numba-cuda and CuPy, and starts the driver.
    """
    try:
        import cupy
        import numba_cuda  # noqa: F401 - without it numba.cuda is an older one, or none

        cupy.cuda.runtime.getDeviceCount()
    except (ImportError, RuntimeError) as error:  # not installed; no driver, or no device
        return f"CUDA takes a device, its driver and minisparse[cuda13] or [cuda12]: {error}."


def is_available():
    """Return whether kernels can run on a GPU here: see `why_not`."""
    return why_not() is None
