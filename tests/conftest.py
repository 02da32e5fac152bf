"""Nothing but a GPU test may skip."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter

settings.register_profile("minicluster", deadline=None)  # no timed tests: machines are shared
settings.load_profile("minicluster")

SKIPPED_WRONGLY = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run ask for everything."""
    parser.addoption("--thorough", action="store_true", help="campaigns of many minutes too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave campaigns out unless asked for."""
    if config.getoption("--thorough"):
        return
    left_out = [item for item in items if item.get_closest_marker("campaign")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_configure(config: pytest.Config) -> None:
    """Start the list of tests that skipped and had no right to."""
    config.stash[SKIPPED_WRONGLY] = []
    # Whoever ends a run early means that its deployments end too: as Ctrl-C, fixtures and all.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
    call: pytest.CallInfo[None],  # noqa: ARG001  (pytest names it)
) -> pytest.TestReport:
    """Note skips of tests without the `gpu` marker."""
    report: pytest.TestReport = yield
    if report.skipped and not hasattr(report, "wasxfail") and not item.get_closest_marker("gpu"):
        item.config.stash[SKIPPED_WRONGLY].append(item.nodeid)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if something skipped that had no right to."""
    if session.config.stash[SKIPPED_WRONGLY] and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    """Name them."""
    for nodeid in config.stash[SKIPPED_WRONGLY]:
        terminalreporter.write_line(f"skipped, but only GPU tests may: {nodeid}", red=True)
