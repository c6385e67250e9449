"""Checks of open transactions that cannot be stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.errors import TooManyQueuesError
from tests.process.test_query import Group
from tests.process.test_transaction_table import half


def test_a_check_that_is_refused_is_tried_less_often_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when there is no room for the topic of those that are given up: all of them were tried every second."""
    group = Group(tmp_path / "store")
    try:
        transactions, found = group.role._transactions, half(0)
        monkeypatch.setattr(transactions._clock, "time_ms", lambda: 1_000_000)
        pauses = []
        for _ in range(7):
            found.due_ms = 0
            transactions._be_busy(found)
            transactions._check_again(found, TooManyQueuesError(""))
            pauses.append(found.due_ms - 1_000_000)
            assert not found.busy
        assert pauses == [1000, 2000, 4000, 8000, 16_000, 30_000, 30_000]
    finally:
        group.close()
