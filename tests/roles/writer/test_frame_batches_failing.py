"""Batches of append frames that fail: each frame is refused once and leaves nothing."""

from __future__ import annotations

import errno
import os
import resource
import struct
from typing import Any

import pytest

from mqproc.config.options import FlushDiskType
from mqproc.errors import (
    BadMessageError,
    DiskFullError,
    FlushFailedError,
    InternalError,
    MqprocError,
    StoreBusyError,
    StoreReadOnlyError,
)
from mqproc.layout import control as words_of
from mqproc.wire.operations import AppendRequest, CreateTopicRequest, DeleteTopicRequest, Operation
from tests.roles.rigs import Client, MakeRig, WriterRig, append_bytes, columns, error_of, frame_bytes, several, single

# Writes that fail


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, DiskFullError), (errno.EIO, InternalError)])
@pytest.mark.parametrize("failing", range(4))
def test_failed_write_refuses_frames_once_and_leaves_nothing(
    make_rig: MakeRig, number: int, error: type[MqprocError], failing: int
) -> None:
    """The first frames end with a segment, the following ones are written as they are staged."""
    rig = make_rig()
    client = rig.client()
    client.send(single(1, "A", b"first"))
    client.wait_for([1])
    rig.io.write_errors = [0] * failing + [number]
    frames = 60
    client.send(b"".join(single(request_id, "A", b"x" * 30_000) for request_id in range(2, frames + 2)))
    client.wait_for(range(1, frames + 2))
    assert rig.io.write_errors == []
    errors = {request_id: error_of(client, request_id) for request_id in range(1, frames + 2)}
    refused = [request_id for request_id, of in errors.items() if of is not None]
    assert refused
    assert {type(errors[request_id]) for request_id in refused} == {error}
    assert refused == list(range(refused[0], refused[-1] + 1))
    assert_holds(rig, client, [request_id for request_id, of in errors.items() if of is None])
    counts = rig.counts()
    assert counts["append_rejects"] == len(refused)
    assert counts["appended_frames"] == counts["appended_messages"]
    client.send(single(500, "A", b"later"))
    client.wait_for([500])
    assert error_of(client, 500) is None


def assert_holds(rig: WriterRig, client: Client, stored: list[int]) -> None:
    """Assert that these single frames follow each other in the log, with their own counts."""
    places = [columns(client.answers[request_id][0].payload) for request_id in stored]
    offsets: dict[int, list[int]] = {}
    for _, (queue_offset,), (queue_id,) in places:
        offsets.setdefault(queue_id, []).append(queue_offset)
    for of in offsets.values():
        assert of == list(range(len(of)))
    expected = {("A", queue_id): len(offsets.get(queue_id, ())) for queue_id in range(4)}
    assert rig.next_offsets() == expected
    assert rig.counts()["appended_messages"] == len(stored)
    log = rig.log(0, rig.written)
    for (physical,), _, _ in places:
        assert struct.unpack_from(">q", log, physical + 28) == (physical,)
    ready_end = rig.words[words_of.SEGMENTS_READY_END]
    assert not any(rig.log(rig.written, ready_end))


def test_frames_of_a_failed_segment_are_not_stored_when_it_is_made(make_rig: MakeRig) -> None:
    """As of a log that was found to end with a segment, without space for the next one."""
    rig = make_rig()
    ready_end = rig.words[words_of.SEGMENTS_READY_END]
    rig.words[words_of.SEGMENTS_READY_END], rig.words[words_of.SEGMENT_ERRNO] = 0, errno.ENOSPC
    client = rig.client()
    client.send(single(1, "A") + several(2, "A", [b"x" * 1000] * 9) + single(3, "A"))
    client.wait_for([1, 2, 3])
    assert {type(error_of(client, request_id)) for request_id in (1, 2, 3)} == {DiskFullError}
    rig.words[words_of.SEGMENTS_READY_END], rig.words[words_of.SEGMENT_ERRNO] = ready_end, 0
    client.send(single(4, "A"))
    client.wait_for([4])
    assert_holds(rig, client, [4])


def test_failed_sync_preventing_a_segment_stores_no_frame(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The frame that waited for the segment is refused, with all that was staged before it."""
    rig = make_rig(runs=False, segments=1)
    (rig.paths.commit_log / f"{0:020d}").unlink()
    rig.words[words_of.SEGMENTS_READY_END] = 0

    def fail() -> None:
        rig.words[words_of.FLUSHER_SYNC_ERRNO] = errno.EIO

    monkeypatch.setattr(rig.rig.bells[words_of.COMMITLOG_FLUSHER], "ring", fail)
    client = rig.client()
    client.send(single(1, "A") + several(2, "A", [b"x" * 40_000] * 30))
    client.wait_for([1, 2])
    assert {type(error_of(client, request_id)) for request_id in (1, 2)} == {StoreReadOnlyError}
    assert rig.written == rig.counts()["appended_messages"] == 0


@pytest.mark.parametrize(
    ("number", "expected"),
    [(errno.EMFILE, StoreBusyError), (errno.ENOSPC, DiskFullError), (errno.EIO, InternalError)],
)
def test_uncreatable_topic_fails_only_its_own_frames(
    make_rig: MakeRig, number: int, expected: type[MqprocError]
) -> None:
    """They were reported as not stored, but were: a client that resends stores them twice."""
    rig = make_rig(max_queues=256, default_topic_queue_nums=128)
    client = rig.client()
    client.send(single(1, "A"))
    client.wait_for([1])
    rig.io.refusing = {"mqproc/queues": number}
    client.send(b"".join(single(request_id, topic) for request_id, topic in ((2, "A"), (3, "B"), (4, "A"))))
    client.wait_for([2, 3, 4])
    rig.io.refusing = {}
    errors = {request_id: error_of(client, request_id) for request_id in (2, 3, 4)}
    assert {request_id: type(error) for request_id, error in errors.items() if error} == {3: expected}
    assert rig.counts()["appended_messages"] == 3
    client.send(single(5, "B"))
    client.wait_for([5])
    assert error_of(client, 5) is None


@pytest.mark.parametrize(
    ("number", "expected"),
    [(errno.ENOSPC, DiskFullError), (errno.EIO, InternalError), (errno.EROFS, StoreReadOnlyError)],
)
def test_unrecorded_topic_error_names_its_cause(make_rig: MakeRig, number: int, expected: type[MqprocError]) -> None:
    """A full disk is not an internal error: a later retry succeeds."""
    rig = make_rig()
    client = rig.client()
    client.send(single(1, "A"))
    client.wait_for([1])
    rig.io.refusing = {"topics.journal": number}
    client.send(frame_bytes(Operation.CREATE_TOPIC, 2, CreateTopicRequest("B", 2)))
    client.send(frame_bytes(Operation.DELETE_TOPIC, 3, DeleteTopicRequest("A")))
    client.wait_for([2, 3])
    assert [type(error_of(client, request_id)) for request_id in (2, 3)] == [expected, expected]
    rig.io.refusing = {}
    client.send(frame_bytes(Operation.CREATE_TOPIC, 4, CreateTopicRequest("B", 2)))
    client.send(frame_bytes(Operation.DELETE_TOPIC, 5, DeleteTopicRequest("A")))
    client.wait_for([4, 5])
    assert [error_of(client, request_id) for request_id in (4, 5)] == [None, None]


def test_failed_segment_end_refuses_its_frames_once(make_rig: MakeRig) -> None:
    """Its last records are written, the BLANK after them is not."""
    rig = make_rig()
    rig.io.write_errors = [0] * 10
    client = rig.client()
    client.send(b"".join(single(request_id, "A", b"x" * 30_000) for request_id in range(1, 31)))
    client.wait_for(range(1, 31))
    rig.io.write_errors = [0, errno.ENOSPC]
    client.send(b"".join(single(request_id, "A", b"x" * 30_000) for request_id in range(31, 41)))
    client.wait_for(range(31, 41))
    errors = [error_of(client, request_id) for request_id in range(1, 41)]
    assert any(errors)
    assert_holds(rig, client, [request_id for request_id, error in enumerate(errors, 1) if error is None])


@pytest.mark.parametrize("of", ["write", "segment"])
def test_file_size_limit_error_names_the_limit(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, of: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (4096, resource.RLIM_INFINITY))
    rig = make_rig(runs=False, segments=1)
    client = rig.client()
    if of == "write":
        rig.io.write_errors = [errno.EFBIG]
    else:
        (rig.paths.commit_log / f"{0:020d}").unlink()
        rig.words[words_of.SEGMENTS_READY_END] = 0
        rig.words[words_of.SEGMENT_ERRNO] = errno.EFBIG
    client.send(single(1, "A"))
    client.wait_for([1])
    error = error_of(client, 1)
    assert isinstance(error, DiskFullError)
    assert "File too large; files are limited to 4,096 bytes (ulimit -f)" in str(error)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_missing_descriptors_refuse_frames_until_available(make_rig: MakeRig, number: int) -> None:
    """The write at the end of the previous segment is undone through the open descriptor."""
    rig = make_rig()
    client = rig.client()
    client.send(single(1, "A", b"x" * 30_000))
    client.wait_for([1])
    rig.io.refusing = {"/commitlog/": number}
    client.send(b"".join(single(request_id, "A", b"x" * 30_000) for request_id in range(2, 62)))
    client.wait_for(range(2, 62))
    errors = {request_id: error_of(client, request_id) for request_id in range(1, 62)}
    assert {type(error) for error in errors.values() if error is not None} == {StoreBusyError}
    rig.io.refusing = {}
    client.send(b"".join(single(request_id, "A", b"x" * 30_000) for request_id in range(62, 122)))
    client.wait_for(range(62, 122))
    assert all(error_of(client, request_id) is None for request_id in range(62, 122))
    assert_holds(rig, client, [*(request_id for request_id, of in errors.items() if of is None), *range(62, 122)])


def test_failed_write_not_durably_undone_refuses_all_frames(make_rig: MakeRig) -> None:
    rig = make_rig()
    client = rig.client()
    client.send(single(1, "A"))
    client.wait_for([1])
    rig.io.write_errors = [errno.ENOSPC]
    rig.io.failing = {"/commitlog/": errno.EIO}
    client.send(b"".join(single(number, "A", b"x" * 3000) for number in range(2, 202)))
    client.wait_for(range(2, 202))
    assert all(error_of(client, number) is not None for number in range(2, 202))
    client.send(single(202, "A"))
    client.wait_for([202])
    assert isinstance(error_of(client, 202), StoreReadOnlyError)


def test_read_only_file_system_sets_the_word_and_refuses_all(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_arguments: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    rig = make_rig()
    client = rig.client()
    client.send(single(1, "A"))
    client.wait_for([1])
    end = rig.written
    rig.io.write_errors = [errno.EROFS]
    monkeypatch.setattr(rig.io, "zero", read_only)
    client.send(b"".join(single(number, "A") for number in range(2, 12)))
    client.wait_for(range(2, 12))
    client.send(single(12, "A"))
    client.wait_for([12])
    for number in range(2, 13):
        error = error_of(client, number)
        assert isinstance(error, StoreReadOnlyError)
        assert "the file system has become read-only" in str(error)
    assert rig.written == end


@pytest.mark.parametrize(
    "changes",
    [
        {"born_timestamp_ms": 1 << 63},
        {"unique_prefix": "A" * 28, "unique_counter": 1 << 16},
        {"unique_prefix": "A" * 28, "unique_counter": -1},
        {"flag": 1 << 31},
        {"flag": (-1 << 31) - 1},
    ],
)
def test_value_out_of_its_field_range_is_refused(make_rig: MakeRig, changes: dict[str, Any]) -> None:
    rig = make_rig()
    client = rig.client()
    known = {name: value for name, value in changes.items() if name == "unique_prefix"}
    times = {"born_timestamp_ms": 5} | changes
    client.send(single(1, "A", **known) + append_bytes(2, AppendRequest("A", 1, **times), bytes(4)) + single(3, "A"))
    client.wait_for([1, 2, 3])
    assert [type(error_of(client, number)) for number in (1, 2, 3)] == [type(None), BadMessageError, type(None)]
    name = "unique_counter" if known else next(iter(changes))
    assert f"{name} = {changes[name]} " in str(error_of(client, 2))


# A writer that refuses


@pytest.mark.parametrize(
    ("word", "value", "error"),
    [
        (words_of.DISK_FULL, 1, DiskFullError),
        (words_of.FLUSHER_SYNC_ERRNO, errno.EIO, StoreReadOnlyError),
        (words_of.DAMAGE_READ_ONLY, 1, StoreReadOnlyError),
    ],
)
def test_refusing_writer_answers_each_frame_once_and_stores_none(
    make_rig: MakeRig, word: int, value: int, error: type[MqprocError]
) -> None:
    rig = make_rig()
    client = rig.client()
    client.send(single(1, "A") + single(2, "A"))
    client.wait_for([1, 2])
    before = rig.left()
    rig.words[word] = value
    client.send(b"".join(single(request_id, "A") for request_id in range(3, 203)))
    client.wait_for(range(3, 203))
    assert {type(error_of(client, request_id)) for request_id in range(3, 203)} == {error}
    after = rig.left()
    assert (after.log, after.next_offsets) == (before.log, before.next_offsets)
    assert after.counts["append_rejects"] == 200
    rig.words[word] = 0
    client.send(single(203, "A"))
    client.wait_for([203])
    assert error_of(client, 203) is None


# SYNC_FLUSH


def test_batch_frames_are_answered_after_sync_and_unsynced_before(make_rig: MakeRig) -> None:
    rig = make_rig(flush_disk_type=FlushDiskType.SYNC_FLUSH)
    client = rig.client()
    ids = range(1, 41)
    client.send(b"".join(single(number, "A", wait=number % 4 != 0) for number in ids))
    seen: list[set[int]] = []

    def look(path: str) -> None:
        if "/commitlog/" in path:
            client.read()
            seen.append(set(client.answers))

    rig.io.before_sync = look
    client.wait_for(ids)
    assert seen == [{number for number in ids if number % 4 == 0}]
    assert {len(of) for of in client.answers.values()} == {1}
    assert rig.words[words_of.WRITER_SYNCED] == rig.written


def test_failed_sync_refuses_all_frames_waiting_for_it(make_rig: MakeRig) -> None:
    rig = make_rig(flush_disk_type=FlushDiskType.SYNC_FLUSH)
    client = rig.client()
    rig.io.failing = {"/commitlog/": errno.EIO}
    ids = range(1, 21)
    client.send(b"".join(single(number, "A", wait=number % 4 != 0) for number in ids))
    client.wait_for(ids)
    for number in ids:
        assert isinstance(error_of(client, number), FlushFailedError if number % 4 else type(None))
    client.send(single(21, "A"))
    client.wait_for([21])
    assert isinstance(error_of(client, 21), StoreReadOnlyError)


def test_failed_sync_within_a_batch_stores_nothing_after_it(make_rig: MakeRig) -> None:
    """A sync comes within it when there is no room for more answers."""
    rig = make_rig(flush_disk_type=FlushDiskType.SYNC_FLUSH, segments=16)
    client = rig.client()
    client.send(single(1, "A"))
    client.wait_for([1])
    rig.io.failing = {"/commitlog/": errno.EIO}
    written: list[int] = []
    rig.io.before_sync = lambda path: written.append(rig.written)
    client.send(b"".join(several(number, "A", [b""] * 20_000) for number in range(2, 8)))
    client.wait_for(range(1, 8))
    assert all(error_of(client, number) is not None for number in range(2, 8))
    assert rig.written == written[0]


# Unexpected errors


@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize("place", ["appender.add", "planner.plan"])
def test_unexpected_error_refuses_pending_frames_and_closes_one(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, runs: bool, place: str
) -> None:
    rig = make_rig(runs=runs)
    client, bad = rig.client(), rig.client()
    client.send(single(1, "A", b"first"))
    client.wait_for([1])
    attribute, method = place.split(".")
    with monkeypatch.context() as patch:
        patch.setattr(getattr(rig.writer, f"_{attribute}"), method, _fail)
        bad.send(single(1, "A", b"bad", tag="other"))
        rig.run_until(lambda: len(rig.writer._server.connections) == 1)
    client.send(single(2, "A", b"second"))
    client.wait_for([2])
    assert error_of(client, 2) is None
    assert_holds(rig, client, [1, 2])


def _fail(*_: object, **__: object) -> None:
    raise RecursionError("planted")
