"""What holds for every run: no test skips, none hangs, and what was left out is counted."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec

import psutil
import pytest
from _pytest.terminal import TerminalReporter
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# No deadlines: machines are shared. `make test` draws the same examples every time, so that it
# fails again where it failed; `make test-all` draws new ones (--hypothesis-profile=random).
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile("repeatable")

TIMEOUT_S = {"campaign": 3600, "engine": 600, "simulated": 600}
"""Of tests with these marks, the first that fits; `timeout` in pyproject.toml is for the rest."""

WALLCLOCK = {
    "tests/loadtest/cli/test_lost_processes.py",
    "tests/loadtest/cli/test_run.py",
    "tests/loadtest/selftest/test_selftest.py",
    "tests/loadtest/studies/test_capacity_search.py",
    *(
        f"tests/loadtest/client/test_{name}.py"
        for name in ("client", "dispatcher", "kernel_timestamps", "locustfile", "endpoint")
    ),
}
"""Files whose tests time a real client or start one: no two of these tests run at once."""

IMPORTS_VLLM = {
    "tests/sizing/catalog/test_library_counts.py",
    "tests/serving/test_fuzz.py",
    "tests/serving/cluster/test_serve_compat.py",
    *(
        f"tests/serving/deployment/test_{name}.py"
        for name in ("degrees", "drafts", "exports", "groups", "lora", "pages")
    ),
    "tests/serving/measurement/test_demo_model.py",
    "tests/serving/simulated/test_vllm_scheduler.py",
    *(
        f"tests/serving/replicas/test_{name}.py"
        for name in ("engine_request", "generation", "ray_compat", "vllm_plugin")
    ),
}
"""Files that import vLLM or torch, which takes seconds of a core: one worker runs them all."""

SIMULATED = {
    f"tests/serving/simulated/test_{name}.py"
    for name in (
        "drain",
        "endpoints",
        "group_faults",
        "interrupts",
        "replace",
        "simulated_cluster",
        "simulated_endpoint",
    )
}
"""Files that deploy simulated engines: one worker runs them, most of the time it waits."""

PAGES = {f"tests/sizing/ui/test_{name}.py" for name in ("page", "page_classes", "page_files")}
"""Files that open the page, which keeps its plans in memory: one worker opens it for all."""

SHARES_PLANS = {
    "tests/sizing/evidence/test_refit.py",
    *(
        f"tests/sizing/planner/test_{name}.py"
        for name in ("classes", "long_context", "studies", "users")
    ),
}
"""Files whose tests share what takes seconds to compute: one worker runs all of a file."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run ask for everything, and for another order."""
    parser.addoption("--thorough", action="store_true", help="campaigns of many minutes too")
    parser.addoption("--backwards", action="store_true", help="the last test first")


def pytest_configure(config: pytest.Config) -> None:
    """Watch for what does not run; let a run that is ended early clean up."""
    config.pluginmanager.register(NotRun(config))
    # Whoever ends a run early means that its deployments end too: as Ctrl-C, fixtures and all.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def reason_left_out(item: pytest.Item) -> str:
    """Return why a test is left out of a run that did not select tests; empty: it is not."""
    if item.get_closest_marker("campaign") and not item.config.getoption("--thorough"):
        return "campaigns (make test-all)"
    if item.get_closest_marker("site") and find_spec("mkdocs") is None:
        return "of the documentation site: mkdocs is not installed (make docs)"
    return ""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out campaigns unless asked for, and what is not installed; give tests their timeout."""
    left_out = [item for item in items if reason_left_out(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    if config.getoption("--backwards"):
        items.reverse()
    for item in items:
        for mark, seconds in TIMEOUT_S.items():
            if item.get_closest_marker(mark) and not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(seconds))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Spread tests over the workers; marks of groups are lost between pytest 9.2 and xdist 3.8."""
    return Spread(config, log)


class Spread(LoadScopeScheduling):
    """The next test goes to the worker that is free; what has to stay together goes to one."""

    def _split_scope(self, nodeid: str) -> str:
        """Return what stays together."""
        file = nodeid.split("::", maxsplit=1)[0]
        if file in WALLCLOCK:
            return "wallclock"
        if file in IMPORTS_VLLM:
            return "vllm"
        if file in SIMULATED:
            return "simulated"
        if file in PAGES:
            return "pages"
        return file if file in SHARES_PLANS else nodeid


class NotRun:
    """Tests that skipped, which fails the run, and tests that were left out, which is said."""

    def __init__(self, config: pytest.Config) -> None:
        """Start with none."""
        self._config = config
        self._skipped: list[str] = []
        self._left_out: Counter[str] = Counter()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a module that skipped."""
        if report.skipped:
            self._skipped.append(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that skipped; pytest-xdist repeats here what its workers report."""
        if report.skipped and not hasattr(report, "wasxfail"):
            self._skipped.append(report.nodeid)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Note what is left out, and for which reason."""
        for item in items:
            self._left_out[reason_left_out(item) or self._selection()] += 1

    def _selection(self) -> str:
        """Return the options that select tests, as they were given."""
        named = {"-m": "markexpr", "-k": "keyword", "--deselect": "deselect", "--lf": "lf"}
        given = {option: self._config.getoption(name, None) for option, name in named.items()}
        return "by " + " ".join(f"{option} {what!r}" for option, what in given.items() if what)

    def pytest_keyboard_interrupt(self) -> None:
        """Let workers end their fixtures: pytest-xdist would kill them after ten seconds."""
        if self._config.getoption("numprocesses", None):
            for worker in psutil.Process().children():
                worker.terminate()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the run if a test skipped; a worker of pytest-xdist sends what it left out."""
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["left_out"] = dict(self._left_out)
        if self._skipped and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: WorkerController) -> None:
        """Take over what a worker left out; each leaves out the same."""
        self._left_out |= Counter(getattr(node, "workeroutput", {}).get("left_out", {}))

    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        """Name the skipped tests, count the others."""
        for nodeid in self._skipped:
            terminalreporter.write_line(f"skipped, but no test may: {nodeid}", red=True)
        for reason, count in self._left_out.items():
            terminalreporter.write_line(f"left out: {count} {reason}", yellow=True)
