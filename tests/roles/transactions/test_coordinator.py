"""Checks of open transactions that cannot be stored, or read."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.errors import CorruptStoreError, TooManyQueuesError
from mqproc.layout import control as words_of
from tests.roles.query.test_role import Group
from tests.roles.transactions.test_open_transactions import half


def test_check_refused_is_retried_with_backoff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No space for the topic of abandoned ones: all of them were retried every second."""
    group = Group(tmp_path / "store")
    try:
        transactions, found = group.role._transactions, half(0)
        monkeypatch.setattr(transactions._clock, "time_ms", lambda: 1_000_000)
        pauses = []
        for _ in range(7):
            found.due_ms = 0
            transactions._set_busy(found)
            transactions._retry_check(found, TooManyQueuesError(""))
            pauses.append(found.due_ms - 1_000_000)
            assert not found.busy
        assert pauses == [1000, 2000, 4000, 8000, 16_000, 30_000, 30_000]
    finally:
        group.close()


def test_rollback_only_for_half_messages_deleted_by_retention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Likewise a half message that begins on an unreadable page, and for good."""
    group = Group(tmp_path / "store")
    try:
        transactions, found = group.role._transactions, half(1)
        transactions._table.add(found)
        monkeypatch.setattr(transactions._reading, "record_at", lambda _place: None)
        with pytest.raises(CorruptStoreError, match="no record begins at 100 of the log"):
            transactions._message(found)
        transactions._check_half(found, 1_000_000)
        assert found.due_ms == 1_000_000 + transactions._options.transaction_check_interval
        assert not found.busy
        group.control.words[words_of.MIN_PHYSICAL_OFFSET] = 101
        transactions._check_half(found, 1_000_000)
        assert found.busy, "a mark is on its way"
    finally:
        group.close()
