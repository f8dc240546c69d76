"""Hypothesis profiles and counts, compilation beforehand, and running code in a new process."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numba
import pytest
from hypothesis import HealthCheck, settings

import minisparse as ms

_common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=50, **_common)
settings.register_profile("ci", max_examples=50, derandomize=True, print_blob=True, **_common)
settings.register_profile("deep", max_examples=1000, **_common)


def pytest_configure(config):
    if not config.getoption("--hypothesis-profile"):  # which Hypothesis loads itself
        settings.load_profile("ci" if os.environ.get("CI") else "dev")
    if guard := config.getoption("--guard"):
        from . import guards

        {"fence": guards.fence_all, "check": guards.check_all}[guard]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Note how many inputs Hypothesis tried in a test; one that counts by itself records them."""
    report = yield
    told = re.findall(r"(\d+) passing", getattr(item, "hypothesis_statistics", ""))
    if told and call.when == "call":
        report.user_properties.append(("inputs", sum(map(int, told))))
    return report


def pytest_terminal_summary(terminalreporter):
    """Add up what tests recorded of themselves."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.getreports(kind)]
    told = [told for r in reports if r.when == "call" for told in r.user_properties]
    for kind, line in (
        ("inputs", "{:,} inputs tried in {} property tests"),
        ("forks", "{:,} forks survived in {} tests of processes"),
    ):
        counts = [count for name, count in told if name == kind]
        if counts:
            terminalreporter.line(line.format(sum(counts), len(counts)))


def pytest_addoption(parser):
    parser.addoption("--guard", choices=["fence", "check"], help="of memory: see guards.py")


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
    """Run source code, or a file with arguments, in a process of its own; return its output.

    It may import from `tests`.  Who takes `timeout` seconds hangs.
    """
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])

    def run(source, *arguments, timeout=600, **environment):
        command = [source] if isinstance(source, Path) else ["-c", source]
        process = subprocess.Popen(
            [sys.executable, *command, *arguments],
            env={**os.environ, "PYTHONPATH": path, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the children that may be what hangs
            pytest.fail(f"hung for {timeout} s:\n{process.communicate()[1]}")
        assert process.returncode == 0, err
        return out

    return run
