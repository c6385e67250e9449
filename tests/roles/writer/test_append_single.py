"""Single append frames: stored as all others are, by a shorter path."""

from __future__ import annotations

import dataclasses
import errno
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqproc.config.options import FlushDiskType
from mqproc.errors import (
    DiskFullError,
    FlushFailedError,
    InternalError,
    MqprocError,
    RetryLaterError,
    StoreBusyError,
    StoreReadOnlyError,
)
from mqproc.ipc.counters import read_buckets
from mqproc.kernels import append_run
from mqproc.kernels.jit.compile import plain
from mqproc.layout import control as words_of
from mqproc.layout import histograms
from mqproc.store.commitlog.append import CommitLogAppender
from tests.crash.disk import walk_log
from tests.roles.rigs import BODY_MAX, PATIENCE_S, Client, Left, MakeRig, WriterRig, columns, error_of, single
from tests.roles.writer.test_frame_batches import Frame, Outcome, streams
from tests.roles.writer.test_frame_batches_failing import assert_holds

OPTIONS = {"max_queues": 64, "default_topic_queue_nums": 4, "max_message_size": BODY_MAX}
KNOWN = 1
"""The frame that makes a shape known."""


def counted(rig: WriterRig) -> list[bool]:
    """Record whether each following frame takes the short path."""
    appender, ways = rig.writer._appender, []
    short: Callable[..., bool] = appender.add_single

    def add_single(*frame: object) -> bool:
        ways.append(False)
        ways[-1] = short(*frame)
        return ways[-1]

    appender.add_single = add_single  # type: ignore[method-assign]
    return ways


def send_alone(rig: WriterRig, client: Client, request_id: int, body: bytes = b"body") -> MqprocError | None:
    """How a message ends that the writer takes in a step of its own."""
    client.send(single(request_id, "A", body))
    client.wait_for([request_id])
    return error_of(client, request_id)


def known_shape(rig: WriterRig) -> Client:
    """A client for whose messages the writer has a template."""
    client = rig.client()
    assert send_alone(rig, client, KNOWN) is None
    return client


def uncompiled(appender: CommitLogAppender) -> None:
    """Use the kernel's plain twin to append frames."""
    compiled = appender._encode_single
    assert isinstance(compiled, functools.partial)
    assert compiled.func is append_run.append_single
    appender._encode_single = functools.partial(plain(append_run.append_single), *compiled.args)


def taken(
    root: Path, frames: list[Frame], flush: FlushDiskType, *, runs: bool, twin: bool = False
) -> tuple[Left, dict[int, list[Outcome]]]:
    """Outcomes of frames that arrive whole and alone in a step."""
    with WriterRig(root, runs=runs, segments=12, flush_disk_type=flush, **OPTIONS) as rig:
        if twin:
            uncompiled(rig.writer._appender)
        client = rig.client()
        for request_id, frame in enumerate(frames, 1):
            client.send(frame.encode(request_id), steps=1)
            if frame.oneway:
                while rig.step():
                    pass
            else:
                client.wait_for([request_id])
        answers = {
            request_id: [(answer.operation, answer.options, answer.payload) for answer in of]
            for request_id, of in client.answers.items()
        }
        return rig.left(), answers


@settings(max_examples=40)
@given(streams(), st.booleans(), st.sampled_from(FlushDiskType))
def test_append_single_equals_appends_of_unknown_templates(
    frames: list[Frame], twin: bool, flush: FlushDiskType
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        left, answers = taken(Path(folder) / "alone", frames, flush, runs=True, twin=twin)
        expected_left, expected_answers = taken(Path(folder) / "unknown", frames, flush, runs=False)
    assert answers == expected_answers
    assert {len(of) for of in answers.values()} <= {1}
    assert left.next_offsets == expected_left.next_offsets
    assert left.counts == expected_left.counts
    assert left.log == expected_left.log


@pytest.mark.parametrize("property_crc", [True, False])
@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("sizes", [(4,), (4, 4, 4)])
def test_append_single_whole_property_strings_leave_no_gap(
    make_rig: MakeRig, sizes: tuple[int, ...], closed: bool, property_crc: bool
) -> None:
    """Strings that end their last property are a byte shorter than others may become."""
    rig = make_rig(enabled_append_prop_crc=property_crc)
    client = rig.client()
    client.send(Frame(sizes=sizes, whole=True, closed=closed).encode(KNOWN))
    client.wait_for([KNOWN])
    ways = counted(rig)
    for number in range(2, 6):
        client.send(Frame(sizes=sizes, whole=True, closed=closed).encode(number))
        client.wait_for([number])
    assert ways == [True] * 4
    ends = [placed.offset + placed.size for placed in walk_log(rig.paths.commit_log)]
    assert len(ends) == 5 * len(sizes)
    assert rig.written == ends[-1]


def test_append_single_known_template_uses_the_fast_path(make_rig: MakeRig) -> None:
    """Otherwise the other tests would also pass for a writer without the short path."""
    rig = make_rig()
    client = known_shape(rig)
    ways = counted(rig)
    for number in range(2, 12):
        assert send_alone(rig, client, number) is None
    assert ways == [True] * 10


def test_append_single_concurrent_frames_are_appended_together(make_rig: MakeRig) -> None:
    rig = make_rig()
    client, other = known_shape(rig), known_shape(rig)
    ways = counted(rig)
    client.send(single(2, "A"))
    other.send(single(2, "A"))
    client.wait_for([2])
    other.wait_for([2])
    client.send(single(3, "A") + single(4, "A"))
    client.wait_for([3, 4])
    assert ways == []
    assert sum(rig.next_offsets().values()) == 6


def test_append_single_ends_segments_as_usual(make_rig: MakeRig) -> None:
    rig = make_rig()
    client = known_shape(rig)
    ways = counted(rig)
    body = b"x" * 30_000
    for number in range(2, 102):
        assert send_alone(rig, client, number, body) is None
    assert rig.written > 2 * rig.options.mapped_file_size_commit_log
    assert ways.count(False) == rig.written // rig.options.mapped_file_size_commit_log
    assert_holds(rig, client, list(range(1, 102)))


def test_append_single_frame_beyond_staging_buffer_is_split(make_rig: MakeRig) -> None:
    rig = make_rig(max_message_size=2000, mapped_file_size_commit_log=4 << 20)
    client = rig.client()
    frames = [Frame(sizes=(2000,) * count).encode(number) for number, count in enumerate((1, 900, 1), 1)]
    for number, frame in enumerate(frames, 1):
        client.send(frame)
        client.wait_for([number])
    assert rig.counts()["appended_messages"] == 902
    assert sum(rig.next_offsets().values()) == 902


# The waiting dispatcher


@dataclasses.dataclass
class Rings:
    """Whether a writer rings its sleeping dispatcher before and after the append."""

    early: bool
    late: bool


def rings(rig: WriterRig, client: Client) -> Rings:
    bell = rig.rig.bells[words_of.DISPATCHER]
    bell.announce()
    client.send(single(100, "A"))
    rig.writer.wait(PATIENCE_S)
    early = bell.wait(0)
    if early:
        bell.drain()
        bell.awake()
    client.wait_for([100])
    late = bell.wait(0)
    bell.drain()
    return Rings(early, late)


def test_append_single_rings_a_waiting_dispatcher_before_the_append(make_rig: MakeRig) -> None:
    rig = make_rig()
    client = known_shape(rig)
    rig.words[words_of.WAITING_PULLS] = 1
    assert rings(rig, client) == Rings(early=True, late=False)


def test_append_single_otherwise_rings_after_the_append(make_rig: MakeRig) -> None:
    rig = make_rig()
    assert rings(rig, known_shape(rig)) == Rings(early=False, late=True)


@pytest.mark.parametrize("options", [{"max_spin_us": 0}, {"flush_disk_type": FlushDiskType.SYNC_FLUSH}])
def test_append_single_rings_after_if_spin_is_too_short(make_rig: MakeRig, options: dict[str, object]) -> None:
    rig = make_rig(**options)
    client = known_shape(rig)
    rig.words[words_of.WAITING_PULLS] = 1
    assert rings(rig, client) == Rings(early=False, late=True)


# With a sync


@pytest.fixture
def synced(make_rig: MakeRig) -> WriterRig:
    return make_rig(flush_disk_type=FlushDiskType.SYNC_FLUSH)


def test_append_single_is_durable_when_answered(synced: WriterRig) -> None:
    client = known_shape(synced)
    ways = counted(synced)
    for number in range(2, 12):
        assert send_alone(synced, client, number) is None
        assert synced.words[words_of.WRITER_SYNCED] == synced.written
    assert ways == [True] * 10
    assert sum(read_buckets(synced.words, histograms.WRITER_SYNCS).counts) == 11


def test_append_single_failed_sync_refuses_it_and_all_following(synced: WriterRig) -> None:
    client = known_shape(synced)
    ways = counted(synced)
    durable = synced.words[words_of.WRITER_SYNCED]
    synced.io.failing = {"/commitlog/": errno.EIO}
    assert isinstance(send_alone(synced, client, 2), FlushFailedError)
    synced.io.failing = {}
    assert isinstance(send_alone(synced, client, 3), StoreReadOnlyError)
    assert ways == [True, False]
    assert synced.words[words_of.WRITER_SYNCED] == durable
    assert {len(of) for of in client.answers.values()} == {1}
    assert synced.counts()["append_rejects"] == 2
    assert synced.words[words_of.role_word(words_of.WRITER, "errors")] == 1


# Refusals


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, DiskFullError), (errno.EIO, InternalError)])
def test_append_single_failed_write_is_reported_once_and_undone(
    make_rig: MakeRig, number: int, error: type[MqprocError]
) -> None:
    rig = make_rig()
    client = known_shape(rig)
    ways = counted(rig)
    stored = [KNOWN]
    for request_id in range(2, 12):
        if failing := request_id % 3 == 0:
            rig.io.write_errors = [number]
        found = send_alone(rig, client, request_id, b"x" * request_id)
        assert type(found) is (error if failing else type(None))
        stored += [] if failing else [request_id]
    assert ways == [request_id % 3 != 0 for request_id in range(2, 12)]
    assert_holds(rig, client, stored)
    assert rig.counts()["append_rejects"] == 3


@pytest.mark.parametrize("word", words_of.CLOSING_WORDS)
def test_append_single_is_blocked_while_a_word_refuses_appends(make_rig: MakeRig, word: int) -> None:
    rig = make_rig()
    client = known_shape(rig)
    written = rig.written
    rig.words[word] = errno.EIO
    assert send_alone(rig, client, 2) is not None
    assert rig.written == written
    rig.words[word] = 0
    ways = counted(rig)
    assert send_alone(rig, client, 3) is None
    assert ways == [True]


def test_append_single_is_delayed_then_refused_as_dispatch_lags(make_rig: MakeRig) -> None:
    rig = make_rig(max_dispatch_behind_bytes=100_000)
    client = known_shape(rig)
    ways = counted(rig)
    request_id, error = KNOWN, None
    while error is None:
        request_id += 1
        error = send_alone(rig, client, request_id, b"x" * 1000)
        if ways[-1]:
            assert rig.words[words_of.WRITER_SLOWED_MS] == 0
    assert isinstance(error, StoreBusyError)
    assert rig.words[words_of.WRITER_SLOWED_MS] > 0
    assert 0 < ways.index(False) < len(ways) - 1
    assert ways == sorted(ways, reverse=True)
    assert 100_000 < rig.written < 102_000


def test_append_single_new_dispatch_lag_limit_applies_at_once(make_rig: MakeRig) -> None:
    rig = make_rig()
    client = known_shape(rig)
    rig.writer.reload(dataclasses.replace(rig.options, max_dispatch_behind_bytes=1))
    assert isinstance(send_alone(rig, client, 2), StoreBusyError)
    rig.writer.reload(rig.options)
    assert [send_alone(rig, client, number) for number in (3, 4)] == [None, None]
    rig.writer.reload(dataclasses.replace(rig.options, max_dispatch_behind_bytes=4 * rig.written))
    ways = counted(rig)
    assert [send_alone(rig, client, number) for number in (5, 6)] == [None, None]
    assert ways == [False, True]


def test_append_single_stopping_writer_takes_no_more(make_rig: MakeRig) -> None:
    rig = make_rig()
    client = known_shape(rig)
    rig.writer._admission.taking = False
    assert isinstance(send_alone(rig, client, 2), RetryLaterError)
    assert rig.counts()["appended_messages"] == 1


def test_append_single_store_time_holds_while_the_clock_is_behind(make_rig: MakeRig) -> None:
    rig = make_rig()
    client = known_shape(rig)
    rig.clock.advance(2000)
    assert send_alone(rig, client, 2) is None
    at_ms = rig.words[words_of.WRITTEN_STORE_TIMESTAMP_MS]
    rig.clock.set_time_ms(at_ms - 1500)
    ways = counted(rig)
    assert send_alone(rig, client, 3) is None
    assert rig.words[words_of.WRITTEN_STORE_TIMESTAMP_MS] == at_ms
    assert rig.words[words_of.WRITER_CLOCK_STEPS] == 1
    rig.clock.set_time_ms(at_ms)
    assert send_alone(rig, client, 4) is None
    assert ways == [False, True]


def test_append_single_unread_answers_all_arrive(make_rig: MakeRig) -> None:
    rig = make_rig()
    client = known_shape(rig)
    ways = counted(rig)
    number = KNOWN
    while client_has_room(rig) and number < 100_000:
        number += 1
        client.send(single(number, "A", b"", queue_id=0), steps=1)
    for _ in range(50):
        number += 1
        client.send(single(number, "A", b"", queue_id=0), steps=1)
    client.wait_for(range(2, number + 1))
    offsets = [columns(client.answers[place][0].payload)[1] for place in range(2, number + 1)]
    assert offsets[1:] == [[offsets[0][0] + place] for place in range(1, number - 1)]
    assert ways[1:] == [True] * (number - 2)


def client_has_room(rig: WriterRig) -> bool:
    """Whether the socket took all answers so far."""
    return not any(connection.output.waiting_bytes for connection in rig.writer._server.connections.values())
