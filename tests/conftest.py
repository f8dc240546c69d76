"""Hypothesis profiles and counts, compilation beforehand, and running code in a new process."""

import os
import re
import subprocess
import sys

import numba
import pytest
from hypothesis import HealthCheck, settings

import minisparse as ms

_common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=50, **_common)
settings.register_profile("ci", max_examples=50, derandomize=True, print_blob=True, **_common)
settings.register_profile("deep", max_examples=int(os.environ.get("DEEP", 1000)), **_common)


def pytest_configure(config):
    if not config.getoption("--hypothesis-profile"):  # which Hypothesis loads itself
        settings.load_profile("ci" if os.environ.get("CI") else "dev")
    if config.getoption("--fence"):
        from .fence import fence_all

        fence_all()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Note how many inputs Hypothesis tried in a test; one that counts by itself records them."""
    report = yield
    told = re.findall(r"(\d+) passing", getattr(item, "hypothesis_statistics", ""))
    if told and call.when == "call":
        report.user_properties.append(("inputs", sum(map(int, told))))
    return report


def pytest_terminal_summary(terminalreporter):
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.getreports(kind)]
    counts = [n for r in reports if r.when == "call" for k, n in r.user_properties if k == "inputs"]
    if counts:
        terminalreporter.line(f"{sum(counts):,} inputs tried in {len(counts)} property tests")


def pytest_addoption(parser):
    parser.addoption("--fence", action="store_true", help="guard the memory around all arrays")


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
