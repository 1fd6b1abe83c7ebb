"""Fixtures and order of the whole suite."""

from __future__ import annotations

import fnmatch
import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the ranks share few cores
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import pytest

from benchmarks.two_hosts.network import NoNetworkError, two_hosts
from tests.harness import class_under_test, is_own_class


def load_hypothesis_profile() -> None:
    """The same examples each time: a red run can be repeated, and CI does not fail by luck."""
    try:
        from hypothesis import settings
    except ModuleNotFoundError:  # tests/gpu does without
        return
    settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=30, database=None)
    settings.register_profile("explore", deadline=None, max_examples=300)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


load_hypothesis_profile()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "beyond_torch(why): what torchddp does and torch's own class does not")


def mark_thorough(items: list[pytest.Item]) -> None:
    """What the marker rest_is_thorough says. An error if one of its patterns matches nothing of a whole test."""
    unused: dict[str, set[str]] = {}
    for item in items:
        marker = item.get_closest_marker("rest_is_thorough")
        if marker is None:
            continue
        assert isinstance(item, pytest.Function)
        matching = {pattern for pattern in marker.args if fnmatch.fnmatchcase(item.callspec.id, pattern)}
        if not matching:
            item.add_marker(pytest.mark.thorough)
        test = item.nodeid.partition("[")[0]
        unused[test] = unused.get(test, set(marker.args)) - matching
    unused = {test: patterns for test, patterns in unused.items() if patterns}
    some = items and any("[" in argument for argument in items[0].config.args)  # these alone are collected
    if unused and not some:
        raise pytest.UsageError(f"rest_is_thorough: no parameters match {unused}")


# First: what -m selects by is decided here.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_thorough(items)
    # Ranks are forked from this process, which must not have run a backward before, and must not have opened a GPU:
    # tests without ranks come last, and at the very end those that use a GPU in this process.
    items.sort(key=lambda item: ("/tests/unit/" in str(item.path)) + 2 * ("/tests/gpu/" in str(item.path)))
    if is_own_class():
        return
    for item in items:
        marker = item.get_closest_marker("beyond_torch")
        if marker is not None:
            item.add_marker(pytest.mark.xfail(reason=f"torch's class: {marker.args[0]}", strict=False))


def pytest_collection_finish() -> None:
    # Ranks are forked from here, and a garbage collection in one of them would copy each page that has an object on it.
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a test that passed only when it was run again fails the run, unless `may_rerun` says why it may."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or os.environ.get("CI") != "true" or session.exitstatus != pytest.ExitCode.OK:
        return
    flaky = sorted({report.nodeid for report in reporter.stats.get("rerun", ()) if "may_rerun" not in report.keywords})
    if flaky:
        reporter.ensure_newline()
        advice = "mend it, or mark it with may_rerun and a reason"
        reporter.write_line(f"Passed only when run again ({advice}): {', '.join(flaky)}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def ddp_class() -> type:
    """The class under test (see TORCHDDP_TEST_CLASS in tests/harness.py)."""
    return class_under_test()


@pytest.fixture(scope="session")
def two_namespaces() -> None:
    """Skips the test where two network namespaces and a link between them can't be made: without root, ip or tc."""
    try:
        with two_hosts(1_000_000_000):
            pass
    except NoNetworkError as error:
        pytest.skip(str(error))
