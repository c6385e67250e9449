"""Tests against RocketMQ, and a pytest plugin that prints the number of compared answers.

`tests/conftest.py` registers the plugin. A run that compared nothing fails. A test's counts are part of its report, so
that the process that prints them also has those of other processes (`-n`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

PROPERTY: Final = "compared with RocketMQ"
# Its collection fails if a folder has no fixtures.
_SUITE: Final = "interop/test_conformance.py"
Record = Callable[[str, object], None]


def note(record_property: Record, store: str, answers: int, differences: set[str]) -> None:
    """Add the number of compared answers of a store, and the differences, to a test report."""
    record_property(PROPERTY, [store, answers, sorted(differences)])


class Ledger:
    """Totals of the run so far."""

    def __init__(self) -> None:
        self._asked = False
        self._stores: set[str] = set()
        self._answers = 0
        self._differences: set[str] = set()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._asked |= report.failed and report.nodeid.endswith(_SUITE)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call":
            return
        for name, value in report.user_properties:
            if name == PROPERTY:
                store, answers, differences = value
                self._asked = True
                self._stores.add(store)
                self._answers += answers
                self._differences.update(differences)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._asked and not (self._stores and self._answers) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._asked:
            terminalreporter.write_line(
                f"{len(self._stores)} stores, {self._answers:,} answers compared, "
                f"{len(self._differences)} named differences"
            )


def pytest_configure(config: pytest.Config) -> None:
    # An xdist worker sends its reports to the process that prints.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Ledger())
