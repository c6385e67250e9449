"""RocketMQ for the tests of a file; and the last line of a run: how much was compared with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.interop.conformance import LEDGER
from tests.interop.rocketmq import RocketMq


@pytest.fixture(scope="module")
def rocketmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocketMq]:
    with RocketMq(tmp_path_factory.mktemp("rocketmq")) as program:
        yield program


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if LEDGER:
        stores = {outcome.directory for outcome in LEDGER}
        answers = sum(outcome.answers for outcome in LEDGER)
        differences = {name for outcome in LEDGER for name in outcome.named}
        terminalreporter.write_line(
            f"{len(stores)} stores, {answers:,} answers compared, {len(differences)} named differences"
        )
