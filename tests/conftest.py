"""Hypothesis profiles, compilation before the first example, and running code in a new process."""

import os
import subprocess
import sys

import numba
import pytest
from hypothesis import HealthCheck, settings

import minisparse as ms

_common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=50, **_common)
settings.register_profile("ci", max_examples=50, derandomize=True, print_blob=True, **_common)
settings.register_profile("deep", max_examples=2000, **_common)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser):
    parser.addoption("--fence", action="store_true", help="guard the memory around all arrays")


def pytest_configure(config):
    if config.getoption("--fence"):
        from .fence import fence_all

        fence_all()


def pytest_collection_modifyitems(items):
    if numba.config.DISABLE_JIT:
        skip = pytest.mark.skip(reason="with NUMBA_DISABLE_JIT there are no compiled kernels")
        for item in items:
            if item.get_closest_marker("compiled"):
                item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def _compiled():
    ms.warmup()  # no example is slow because a kernel is being compiled


@pytest.fixture
def in_new_process():
    """Run source code in a process of its own; return what it printed."""

    def run(source, *, timeout=120, **environment):
        done = subprocess.run(
            [sys.executable, "-c", source],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
