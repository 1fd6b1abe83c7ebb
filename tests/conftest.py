"""Fixtures and test order of the whole suite."""

import fnmatch
import os
import resource
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the ranks share few cores
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import pytest

from benchmarks.hosts import NoNetworkError, two_hosts
from tests.harness import class_under_test, is_own_class
from torchddp.ddp import bucket_sizes
from torchddp.transport.message_cost import MessageLine

# What a shell without job control, nohup or a supervisor may ignore or block. Not SIGHUP: under nohup the run goes on.
SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM, signal.SIGUSR1)
OPEN_FILES = 4096


def restore_usual() -> None:
    """What tests rely on of the process that runs them, and what those that they start inherit."""
    for number in SIGNALS:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o022)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    # Ranks that die on purpose leave no core files.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def load_hypothesis_profile() -> None:
    """Draw the same examples each time, so that failures can be reproduced and CI doesn't fail at random."""
    try:
        from hypothesis import settings
    except ModuleNotFoundError:  # tests/gpu doesn't need it
        return
    settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=30, database=None)
    settings.register_profile("explore", deadline=None, max_examples=300)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


load_hypothesis_profile()


def pytest_configure(config: pytest.Config) -> None:
    restore_usual()
    config.addinivalue_line("markers", "beyond_torch(why): what torchddp does and torch's own class does not")


def mark_thorough(items: list[pytest.Item]) -> None:
    """Apply the marker rest_is_thorough. A pattern that matches no case of a fully collected test is an error."""
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
    some = items and any("[" in argument for argument in items[0].config.args)  # only these are collected
    if unused and not some:
        raise pytest.UsageError(f"rest_is_thorough: no parameters match {unused}")


# First, because -m selects by the markers that this adds.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_thorough(items)
    # Ranks are forked from this process, which must not have run a backward or opened a GPU before:
    # tests without ranks run last, and after them those that use a GPU in this process.
    items.sort(key=lambda item: ("/tests/unit/" in str(item.path)) + 2 * ("/tests/gpu/" in str(item.path)))
    if is_own_class():
        return
    for item in items:
        marker = item.get_closest_marker("beyond_torch")
        if marker is not None:
            item.add_marker(pytest.mark.xfail(reason=f"torch's class: {marker.args[0]}", strict=False))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a test that passed only on a rerun fails the run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or os.environ.get("CI") != "true" or session.exitstatus != pytest.ExitCode.OK:
        return
    if reruns := reporter.stats.get("rerun", ()):
        reporter.write_line("")  # not on the line of dots
        told = "\n".join(f"{report.nodeid}: {report.longreprtext[-3000:]}" for report in reruns)
        reporter.write_line(f"Passed only when run again, so mend it: {told}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def ddp_class() -> type:
    """The class under test (see TORCHDDP_TEST_CLASS in tests/harness.py)."""
    return class_under_test()


@pytest.fixture
def cheap_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Default bucket sizes are those of a quiet machine; on a busy one, large gradients share buckets."""
    monkeypatch.setattr(bucket_sizes, "measure_line", lambda *arguments: MessageLine(2e-6, 1e-10))


@pytest.fixture(scope="session")
def two_namespaces() -> None:
    """Skips the test if two linked network namespaces can't be created: without root, ip or tc."""
    try:
        with two_hosts(1_000_000_000):
            pass
    except NoNetworkError as error:
        pytest.skip(str(error))
