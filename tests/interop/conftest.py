"""The last line of a run: how much was compared with RocketMQ."""

from __future__ import annotations

import pytest

from tests.interop.conformance import LEDGER


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if LEDGER:
        stores = {outcome.directory for outcome in LEDGER}
        answers = sum(outcome.answers for outcome in LEDGER)
        differences = {name for outcome in LEDGER for name in outcome.named}
        terminalreporter.write_line(
            f"{len(stores)} stores, {answers:,} answers compared, {len(differences)} named differences"
        )
