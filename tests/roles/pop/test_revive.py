"""Redelivery to simple consumers: refused copies and deleted messages."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from mqproc.errors import StoreBusyError, TooManyQueuesError
from mqproc.layout import control as words_of
from mqproc.store.offsets.offset_store import read_unconsumed
from mqproc.store.offsets.pop_receipts import PopCheckPoint
from mqproc.topic_names import REVIVE_TOPIC
from mqproc.wire.operations import GroupAckRequest, Operation
from tests.roles.pop.test_receivers import SOON_S, held_back, is_read, received
from tests.roles.query.test_role import Group
from tests.support.group import wait_until


def test_revive_ack_of_redelivered_message_is_too_late_during_retries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ack counted until the next try despite the redelivery. Message 1 is still held."""
    group = Group(tmp_path / "store")
    now_ms = time.time_ns() // 1_000_000
    group.store.engine.append("Orders", [b"0", b"1", b"2"], now_ms, queues=1)
    group.dispatch()
    point = PopCheckPoint("g", "Orders", 0, 0, (0, 1, 2), now_ms, 1_000, 0, "mqproc")
    sent: list[tuple[Any, ...]] = []
    try:
        caller, pops = group.connect(), group.role._pops
        pops._state.ensure_group("g")
        while not is_read(caller):
            pass
        monkeypatch.setattr(pops._writes, "store", lambda *what: sent.append(what))
        monkeypatch.setattr(pops, "_revive_due", lambda: 0)
        pops._register(point, 0)
        pops._revive(point)
        copies, _, refused, part = sent.pop()
        assert [copy.body for copy in copies] == [b"0", b"1", b"2"]
        part(copies[:1])
        part(copies[2:])
        refused(TooManyQueuesError(""))
        request = GroupAckRequest("g", [("Orders", f"{point.handle()} {offset}") for offset in range(3)])
        caller.ask(Operation.GROUP_ACK, request)
        wait_until(lambda: caller.answer() is None and sent, SOON_S, "an acknowledgement")
        sent.pop()[1](0)
        answer = wait_until(caller.answer, SOON_S, "an answer")
        assert answer[1].accepted == 1
        pops._revive(point)
        closing, *_ = sent.pop()
        assert (len(closing), closing[0].topic) == (1, REVIVE_TOPIC), "none is sent twice"
    finally:
        group.close()


def test_revive_group_without_settings_redelivers_messages(tmp_path: Path) -> None:
    """The group has default settings until its next receive; its messages were lost."""
    group = Group(tmp_path / "store")
    now_ms = time.time_ns() // 1_000_000
    group.store.engine.append("Orders", [b"0"], now_ms, queues=1)
    group.dispatch()
    try:
        pops = group.role._pops
        pops._state.progress.set("g", "Orders", 0, 1)
        assert pops._state.settings.get("g") is None
        (copy,) = pops._copies.missing(received(0, now_ms), [0]).values()
        assert (copy.topic, copy.body) == ("%RETRY%g_Orders", b"0")
    finally:
        group.close()


def test_revive_counts_messages_deleted_before_redelivery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Message 0 is deleted, 1 is redelivered, 2 has a copy; the receipt was closed silently."""
    group = Group(tmp_path / "store")
    engine, now_ms = group.store.engine, time.time_ns() // 1_000_000
    engine.append("Orders", [b"0", b"1", b"2"], now_ms, queues=1)
    group.dispatch()
    stored = held_back(group, monkeypatch)
    try:
        pops, words = group.role._pops, group.control.words
        monkeypatch.setattr(pops, "step", lambda _now_ns: 0)
        pops._state.ensure_group("g")
        pops._register(found := PopCheckPoint("g", "Orders", 0, 0, (0, 1, 2), now_ms, 1_000, 0, "mqproc"), 0)
        number = engine.table.find("Orders", 0)
        engine.table.raise_min_offset(number, 1)
        pops._revive(found)
        found.copied = frozenset({1, 2})
        engine.table.raise_min_offset(number, 3)
        stored.pop()(0)
        stored.pop()(0)
        wait_until(lambda: group.step() >= 0 and words[words_of.RETENTION_UNCONSUMED] > 0)
        assert words[words_of.RETENTION_UNCONSUMED] == 1
        assert read_unconsumed(group.context.io, group.context.paths) == {"g": {"Orders": 1}}
    finally:
        group.close()


def test_revive_rejected_copies_are_retried_with_backoff(tmp_path: Path) -> None:
    group = Group(tmp_path / "store")
    try:
        copies = group.role._pops._copies
        found = PopCheckPoint("g", "Orders", 0, 0, (0,), 0, 1000, 0, "mqproc")
        pauses = [copies.retry_delay_ms(found, TooManyQueuesError("")) for _ in range(10)]
        assert pauses == [200, 400, 800, 1600, 3200, 6400, 12_800, 25_600, 30_000, 30_000]
        assert copies.retry_delay_ms(found, StoreBusyError("")) == 200
    finally:
        group.close()
