"""Read requests that collect answers: limited per client, without delaying other clients."""

from __future__ import annotations

import time
from typing import Any

import pytest

from mqproc.config.options import Options
from mqproc.errors import InternalError, StoreBusyError
from mqproc.layout import control as words_of
from mqproc.roles.query import reads as admission_module
from mqproc.roles.query import reads as reads_module
from mqproc.roles.query import role as query
from mqproc.roles.query.reads import ReadAdmission
from mqproc.store.read.records import LogScan
from mqproc.util.units import MIB
from mqproc.wire.operations import ByKeyRequest, Empty, Operation, RecordsAnswer, ScanRequest
from tests.roles.query.test_role import PATIENCE_S, Caller, Group, filled, group, offsets_of

__all__ = ["filled", "group"]

SCAN = ScanRequest("Orders", max_messages=2000)


def begin(group: Group, waiting: int) -> None:
    """Step until this many requests wait."""
    deadline = time.monotonic() + PATIENCE_S
    while len(group.role._admission) < waiting and time.monotonic() < deadline:
        group.role._enqueue(group.role._server.poll(0))
        group.role._serve(time.monotonic_ns() + query.STEP_NS)


def answers_of(caller: Caller, group: Group, count: int, under_way_max: int) -> dict[int, list[int]]:
    """Return offsets by request; at no time are more answers unfinished."""
    found: dict[int, list[int]] = {}
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < count and time.monotonic() < deadline:
        assert len(group.role._jobs) <= under_way_max
        if (answer := caller.answer()) is not None:
            found[answer[0]] = offsets_of(answer[2])
    return found


def test_admission_limits_unfinished_answers_per_client(filled: Group) -> None:
    filled.role._admission = ReadAdmission(2)
    caller, other = filled.connect(), filled.connect()
    asked = [caller.ask(Operation.SCAN, SCAN) for _ in range(7)]
    begin(filled, 5)
    assert (len(filled.role._jobs), len(filled.role._admission)) == (2, 5)
    # Requests that collect nothing, and those of other clients, do not wait.
    others = other.ask(Operation.SCAN, SCAN)
    ping = caller.ask(Operation.PING, Empty())
    found = answers_of(caller, filled, 8, 3)
    assert next(iter(found)) == ping
    assert {number: found[number] for number in asked} == dict.fromkeys(asked, filled.store.offsets)
    assert answers_of(other, filled, 1, 3) == {others: filled.store.offsets}
    assert (len(filled.role._jobs), len(filled.role._admission)) == (0, 0)
    assert filled.control.words[words_of.QUERY_REQUESTS] == 9


def test_admission_answers_ending_in_first_slice_skip_the_queue(filled: Group) -> None:
    filled.role._admission = ReadAdmission(1)
    caller = filled.connect()
    asked = [caller.ask(Operation.SCAN, SCAN) for _ in range(3)]
    begin(filled, 2)
    short = caller.ask(Operation.BY_KEY, ByKeyRequest("Orders", "key-7"))
    found = answers_of(caller, filled, 4, 1)
    assert list(found)[:2] == [short, asked[0]] or list(found)[:2] == [asked[0], short]
    assert [number for number in found if number != short] == asked


def test_admission_failed_requests_free_their_place(filled: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    filled.role._admission = ReadAdmission(1)
    caller = filled.connect()
    asked = [caller.ask(Operation.SCAN, SCAN) for _ in range(3)]
    begin(filled, 2)
    one_slice = LogScan.scan_slice

    def failing(*given: Any) -> int:
        monkeypatch.setattr(LogScan, "scan_slice", one_slice)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(LogScan, "scan_slice", failing)
    with pytest.raises(InternalError, match="Input/output"):
        answers_of(caller, filled, 1, 1)
    assert list(answers_of(caller, filled, 2, 1)) == asked[1:]


def test_admission_requests_ending_on_their_turn_free_their_place(
    filled: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has waited and has nothing more to read, for example after its topic's deletion."""
    filled.role._admission = ReadAdmission(2)
    caller = filled.connect()
    asked = [caller.ask(Operation.SCAN, SCAN) for _ in range(6)]
    begin(filled, 4)

    nothing = RecordsAnswer(0, reads_module.END)
    monkeypatch.setitem(reads_module.HANDLERS, Operation.SCAN, lambda *_given: reads_module.at_once(nothing))
    found = answers_of(caller, filled, 6, 2)
    assert [found[number] for number in asked] == [filled.store.offsets] * 2 + [[]] * 4
    assert (len(filled.role._jobs), len(filled.role._admission)) == (0, 0)


def test_admission_disconnected_client_is_forgotten(filled: Group) -> None:
    filled.role._admission = ReadAdmission(1)
    caller, other = filled.connect(), filled.connect()
    for _ in range(5):
        caller.ask(Operation.SCAN, SCAN)
    begin(filled, 4)
    caller.sock.close()
    asked = other.ask(Operation.SCAN, SCAN)
    assert answers_of(other, filled, 1, 2) == {asked: filled.store.offsets}
    assert (len(filled.role._jobs), len(filled.role._admission)) == (0, 0)


def test_admission_full_queue_refuses_for_now(filled: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "WAITING_MAX", 2)
    filled.role._admission = ReadAdmission(1)
    caller = filled.connect()
    for _ in range(4):
        caller.ask(Operation.SCAN, SCAN)
    with pytest.raises(StoreBusyError, match="wait already"):
        answers_of(caller, filled, 1, 1)
    assert len(answers_of(caller, filled, 3, 1)) == 3


def test_admission_limit_follows_client_output_bytes() -> None:
    assert ReadAdmission.by(Options()).limit == Options().client_output_bytes // (8 * MIB) == 16
    assert ReadAdmission.by(Options(client_output_bytes=4096)).limit == 1
