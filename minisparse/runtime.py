"""What runs underneath: a report of the configuration."""

import platform
from importlib import metadata

from . import kernels


def show_config():
    """Print versions, threads and backend: what belongs in a bug report.

    Compiles nothing and starts no thread.
    """
    versions = {name: metadata.version(name) for name in ("minisparse", "numpy", "scipy", "numba")}
    rows = {"python": platform.python_version(), **versions, **kernels.config()}
    for name, value in rows.items():
        print(f"{name:16} {value}")  # noqa: T201 - printing is what it is for
