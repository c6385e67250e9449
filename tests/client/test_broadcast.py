"""Broadcast consumers against a real group: every message, and progress of their own."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqproc import (
    AsyncClient,
    BadRequestError,
    Client,
    CorruptStoreError,
    GroupInUseError,
    GroupNotFoundError,
    StoreBusyError,
    StoredMessage,
)
from mqproc.client import broadcast_progress
from mqproc.client._sync.connection_pool import run_steps
from mqproc.client.broadcast_progress import LocalProgress, OwnProgress, load_offsets
from mqproc.client.group_requests import ResetTo
from mqproc.client.requests import Call
from mqproc.client.subscription import subscription
from mqproc.topic_names import RETRY_MAX_TIMES
from mqproc.wire.operations import GroupAssignment, Operation
from tests.support.group import PATIENCE_S, Group, all_of, bodies_of, fill, no_thread_starts, wait_until


@pytest.fixture
def client(shared: Group) -> Iterator[Client]:
    with shared.client() as client:
        yield client


def test_broadcast_consumer_without_thread_releases_its_file(client: Client, tmp_path: Path) -> None:
    fill(client, "CastThreadless", 0)
    path = tmp_path / "own.json"
    with no_thread_starts(), pytest.raises(RuntimeError, match="can't start new thread") as failed:
        client.consumer("cast", "CastThreadless", broadcast=True, offsets_path=path)
    assert failed.traceback, "the traceback holds a reference to the failed consumer"
    with client.consumer("cast", "CastThreadless", broadcast=True, offsets_path=path) as consumer:
        assert len(consumer.queues) == 4


@contextlib.contextmanager
def no_descriptor() -> Iterator[None]:
    """Leave this process no free descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_broadcast_consumer_without_descriptor_is_busy(client: Client, tmp_path: Path) -> None:
    fill(client, "CastBusy", 0)
    path = tmp_path / "new" / "own.json"
    client.ping()
    with no_descriptor(), pytest.raises(StoreBusyError, match="descriptor"):
        client.consumer("cast", "CastBusy", broadcast=True, offsets_path=path)
    with client.consumer("cast", "CastBusy", broadcast=True, offsets_path=path) as consumer:
        assert len(consumer.queues) == 4


def test_async_broadcast_without_descriptor_is_busy(shared: Group, client: Client, tmp_path: Path) -> None:
    fill(client, "CastAsyncBusy", 0)
    path = tmp_path / "new" / "own.json"

    async def join() -> int:
        async with AsyncClient(shared.store) as own:
            await own.ping()
            with no_descriptor(), pytest.raises(StoreBusyError, match="descriptor"):
                await own.consumer("cast", "CastAsyncBusy", broadcast=True, offsets_path=path)
            async with own.consumer("cast", "CastAsyncBusy", broadcast=True, offsets_path=path) as consumer:
                return len(consumer.queues)

    assert asyncio.run(join()) == 4


def test_progress_save_without_descriptor_is_busy_until_free(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    progress = LocalProgress(path)
    progress.open()
    progress.put("orders", 0, 7)
    with no_descriptor(), pytest.raises(StoreBusyError, match="descriptor"):
        progress.save()
    progress.save()
    progress.close()
    assert load_offsets(path) == {"orders": {0: 7}}


def test_broadcast_consumers_read_everything_with_own_progress(client: Client, tmp_path: Path) -> None:
    sent = fill(client, "Cast", 100)
    paths = [tmp_path / f"{number}.json" for number in range(2)]
    for path in paths:
        with client.consumer("cast", "Cast", start="earliest", broadcast=True, offsets_path=path) as consumer:
            assert consumer.lag() == len(sent)
            assert bodies_of(all_of(consumer, len(sent))) == sent
            assert consumer.lag() == 0
            with pytest.raises(BadRequestError, match="broadcast"):
                consumer.nack()
    with client.consumer("cast", "Cast", broadcast=True, offsets_path=paths[0]) as consumer:
        client.send("Cast", b"100")
        assert [message.body for message in consumer.receive(10, timeout=PATIENCE_S)] == [b"100"]
    with pytest.raises(GroupNotFoundError):
        client.groups.info("cast")


def test_broadcast_start_by_time_is_retried_after_an_error(client: Client, tmp_path: Path) -> None:
    """The first search fails at the second queue: nothing is assigned until the next search."""
    fill(client, "CastLate", 10, queues=2)
    middle_ms = time.time_ns() // 1_000_000 + 1
    wait_until(lambda: time.time_ns() // 1_000_000 > middle_ms, what="another millisecond")
    client.send_batch("CastLate", [b"%d" % number for number in range(10, 20)], queue_ids=[0, 1] * 5)
    client.wait_dispatched()
    assigned: list[GroupAssignment] = []
    path = tmp_path / "offsets.json"
    wanted = subscription("cast-late", "CastLate", "me", 10.0, middle_ms)
    own = OwnProgress(wanted, str(path), assigned.append, pytest.fail)
    own.open()
    asked = 0

    def failing(call: Call[Any]) -> Any:
        nonlocal asked
        asked += call.operation == Operation.OFFSET_AT
        if call.operation == Operation.OFFSET_AT and asked == 2:
            raise StoreBusyError("not now")
        return client.run(call)

    with pytest.raises(StoreBusyError):
        run_steps(failing, own.find_queues())
    assert assigned == []
    run_steps(failing, own.find_queues())
    assert [each.queues for each in assigned] == [[("CastLate", 0, 0, 5), ("CastLate", 1, 0, 5)]]
    run_steps(failing, own.find_queues())
    assert (len(assigned), asked) == (1, 3)
    # A queue that comes later is read from its beginning, though the consumer's start is a time.
    client.create_topic("CastLate", 3)
    run_steps(failing, own.find_queues())
    assert assigned[1].queues[2] == ("CastLate", 2, 0, 0)
    own.save()
    assert load_offsets(path) == {"CastLate": {0: 5, 1: 5, 2: 0}}


def test_broadcast_failed_message_is_skipped(client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Broadcast has no redelivery; with order a message is tried as often as a member's."""
    fill(client, "CastFailing", 3, queues=1)
    for ordered, tries in ((False, 1), (True, 1 + RETRY_MAX_TIMES)):
        tried: list[bytes] = []
        stop = threading.Event()

        def handle(message: StoredMessage, tried: list[bytes] = tried, stop: threading.Event = stop) -> None:
            tried.append(message.body)
            if message.body == b"2":
                stop.set()
            else:
                raise ValueError("never")

        path = tmp_path / f"{ordered}.json"
        with client.consumer(
            "cast-failing", "CastFailing", start="earliest", broadcast=True, offsets_path=path
        ) as consumer:
            consumer.run(handle, ordered=ordered, stop=stop, pause_s=0.001)
        assert sorted(tried) == sorted([b"0", b"1"] * tries + [b"2"])
        assert load_offsets(path) == {"CastFailing": {0: 3}}
    assert sum("broadcast has no redelivery" in record.message for record in caplog.records) == 4


def test_broadcast_failed_message_is_skipped_async(
    client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(client, "CastAsync", 2, queues=1)
    path = tmp_path / "async.json"

    async def go() -> None:
        stop = asyncio.Event()

        async def handle(message: StoredMessage) -> None:
            if message.body == b"1":
                stop.set()
            raise ValueError("never")

        async with (
            AsyncClient(client.store) as asking,
            await asking.consumer(
                "cast-async", "CastAsync", start="earliest", broadcast=True, offsets_path=path
            ) as consumer,
        ):
            assert await consumer.lag() == 2
            await consumer.run(handle, stop=stop)
            assert await consumer.lag() == 0

    asyncio.run(go())
    assert load_offsets(path) == {"CastAsync": {0: 2}}
    assert sum("broadcast has no redelivery" in record.message for record in caplog.records) == 2


def test_a_broadcast_consumer_seeks_for_itself(client: Client, tmp_path: Path) -> None:
    sent = fill(client, "CastSought", 20, queues=2)
    path = tmp_path / "offsets.json"
    with client.consumer("cast-sought", "CastSought", broadcast=True, offsets_path=path) as consumer:
        consumer.seek(ResetTo(offset=4))
        assert bodies_of(all_of(consumer, 12)) == sent[8:]
        consumer.seek(ResetTo(offset=9))
    with client.consumer("cast-sought", "CastSought", broadcast=True, offsets_path=path) as consumer:
        assert bodies_of(all_of(consumer, 2)) == sent[18:]


def test_progress_beyond_a_queues_end_is_set_back_to_it(client: Client, tmp_path: Path) -> None:
    """After a power failure the saved progress may be beyond the end of the queue."""
    fill(client, "Cut", 5, queues=1)
    path = tmp_path / "own.json"
    path.write_text('{"Cut": {"0": 99}}')
    with client.consumer("cut", "Cut", broadcast=True, offsets_path=path) as consumer:
        assert all_of(consumer, 0) == []
        assert consumer.positions() == {("Cut", 0): 5}
    assert load_offsets(path) == {"Cut": {0: 5}}
    client.send_batch("Cut", [b"5", b"6"])
    with client.consumer("cut", "Cut", broadcast=True, offsets_path=path) as consumer:
        assert bodies_of(all_of(consumer, 2)) == [b"5", b"6"]
    assert load_offsets(path) == {"Cut": {0: 7}}


def test_a_broadcast_consumer_that_has_just_begun_has_its_place(client: Client, tmp_path: Path) -> None:
    """A consumer killed within its first second starts again where it began."""
    fill(client, "CastSoon", 4, queues=1)
    client.wait_dispatched()
    begun = {"CastSoon": {0: 4}}
    with client.consumer("cast-soon", "CastSoon", broadcast=True, offsets_path=tmp_path / "own.json"):
        assert load_offsets(tmp_path / "own.json") == begun

    async def begin() -> None:
        path = tmp_path / "other.json"
        async with (
            AsyncClient(client.store) as other,
            other.consumer("cast-soon", "CastSoon", broadcast=True, offsets_path=path),
        ):
            assert load_offsets(path) == begun

    asyncio.run(begin())


@pytest.mark.parametrize("why", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
def test_progress_that_could_not_be_saved_is_saved_with_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: BaseException
) -> None:
    """Progress is saved when the consumer ends, so nothing is consumed twice."""
    progress = LocalProgress(tmp_path / "own.json")
    progress.open()
    progress.put("T", 0, 7)

    def fail(*_args: object) -> None:
        raise why

    with monkeypatch.context() as patch:
        patch.setattr(broadcast_progress, "replace_file", fail)
        with pytest.raises(type(why)):
            progress.save()
    progress.save()
    progress.close()
    assert load_offsets(tmp_path / "own.json") == {"T": {0: 7}}


def test_broadcast_topic_created_later_is_read_from_beginning(client: Client, tmp_path: Path) -> None:
    """Messages sent before the consumer found the topic's queues count as sent after "latest"."""
    path = tmp_path / "offsets.json"
    with client.consumer("cast-new", "CastNew", broadcast=True, offsets_path=path) as consumer:
        assert consumer.queues == []
        client.create_topic("CastNew", 2)
        client.send_batch("CastNew", [b"0", b"1", b"2"], queue_ids=[0, 1, 0])
        found = [message.body for message in itertools.islice(consumer.messages(timeout=PATIENCE_S), 3)]
        assert sorted(found) == [b"0", b"1", b"2"]
    # It continues there, and reads queues created meanwhile from their beginning.
    client.create_topic("CastNew", 3)
    client.send_batch("CastNew", [b"3", b"4"], queue_ids=[0, 2])
    client.wait_dispatched()
    with client.consumer("cast-new", "CastNew", broadcast=True, offsets_path=path) as consumer:
        assert bodies_of(itertools.islice(consumer.messages(timeout=PATIENCE_S), 2)) == [b"3", b"4"]


def test_broadcast_topic_created_meanwhile_begins_at_start(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "offsets.json"
    with client.consumer("cast-away", "CastAway", broadcast=True, offsets_path=path) as consumer:
        assert consumer.queues == []
    fill(client, "CastAway", 4, queues=1)
    with client.consumer("cast-away", "CastAway", broadcast=True, offsets_path=path) as consumer:
        assert consumer.queues == [("CastAway", 0)]
        client.send("CastAway", b"4", queue_id=0)
        assert [message.body for message in itertools.islice(consumer.messages(timeout=PATIENCE_S), 1)] == [b"4"]


def test_broadcast_consumer_without_name_resumes_its_progress(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever process it is in; a second one that lives beside it has to have a name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    fill(client, "CastNameless", 4, queues=1)
    with client.consumer("cast-nameless", "CastNameless", start="earliest", broadcast=True) as consumer:
        assert bodies_of(all_of(consumer, 4)) == [b"0", b"1", b"2", b"3"]
        with pytest.raises(GroupInUseError, match="a name or an offsets_path of its own"):
            client.consumer("cast-nameless", "CastNameless", start="earliest", broadcast=True)
        with client.consumer("cast-nameless", "CastNameless", start="earliest", broadcast=True, name="two") as other:
            assert len(all_of(other, 4)) == 4
    client.send("CastNameless", b"4")
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with client.consumer("cast-nameless", "CastNameless", broadcast=True) as consumer:
        assert [message.body for message in consumer.receive(10, timeout=PATIENCE_S)] == [b"4"]


@pytest.mark.parametrize("group", ["", "../other", "a/b", None])
def test_no_group_leads_out_of_the_folder_of_progress(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: Any
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(BadRequestError, match=r"^(the group's name is empty|group .*(has '.' at|has '/' at|is None))"):
        client.consumer(group, "Cast", broadcast=True)
    with pytest.raises(BadRequestError, match=r"'\.\./me' can be no file's"):
        client.consumer("cast-named", "Cast", broadcast=True, name="../me")
    assert list(tmp_path.iterdir()) == []


def test_a_member_is_given_no_file(client: Client, tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="offsets_path is for broadcast=True"):
        client.consumer("cast-member", "Cast", offsets_path=tmp_path / "offsets.json")


@pytest.mark.parametrize("path", [3, b"x", "", "a\0b", "~nobody-of-that-name/x"])
def test_broadcast_invalid_path_is_refused(client: Client, path: Any) -> None:
    with pytest.raises(BadRequestError, match=r"^offsets_path "):
        client.consumer("cast-member", "Cast", broadcast=True, offsets_path=path)


def test_a_path_may_begin_at_home_where_there_is_one(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`~` is expanded; without a home folder the error is an MqprocError."""
    fill(client, "CastHome", 1, queues=1)
    monkeypatch.setenv("HOME", str(tmp_path))
    with client.consumer("cast-home", "CastHome", broadcast=True, offsets_path="~/offsets.json", start="earliest"):
        assert (tmp_path / "offsets.json.lock").exists()
    monkeypatch.setattr(Path, "home", lambda: Path("~nobody-of-that-name").expanduser())
    with pytest.raises(BadRequestError, match=r"no home, .*: give an offsets_path"):
        client.consumer("cast-home", "CastHome", broadcast=True)


def test_a_broadcast_consumer_that_could_not_begin_has_no_file(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(client, "CastRefused", 1, queues=1)
    path = tmp_path / "offsets.json"
    path.write_text("no json")
    for _ in range(2):
        with pytest.raises(CorruptStoreError, match=r"offsets\.json"):
            client.consumer("cast-refused", "CastRefused", broadcast=True, offsets_path=path)
    path.unlink()
    with monkeypatch.context() as patched:
        patched.setattr(OwnProgress, "find_queues", refuse)
        with pytest.raises(StoreBusyError):
            client.consumer("cast-refused", "CastRefused", broadcast=True, offsets_path=path)
    with client.consumer(
        "cast-refused", "CastRefused", broadcast=True, offsets_path=path, start="earliest"
    ) as consumer:
        assert len(all_of(consumer, 1)) == 1


def refuse(_own: OwnProgress) -> None:
    raise StoreBusyError("not now")
