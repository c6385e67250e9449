"""A running group with SYNC_FLUSH: lock, group commit, deadlines, deletion, dispatch lag."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mqproc.client._async.client import AsyncClient
from mqproc.errors import MessageTooLargeError, SendOutcomeUnknownError
from mqproc.types import Message, PullStatus, SendResult, SendStatus
from mqproc.util.units import MIB
from mqproc.wire.connection import Request
from mqproc.wire.operations import AppendAnswer
from tests.client.memory_roles import STORE_HOST, MemoryRoles
from tests.support.command_line import call
from tests.support.group import Group, wait_until


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    started = Group(
        tmp_path_factory.mktemp("running") / "store",
        flush_disk_type="SYNC_FLUSH",
        mapped_file_size_commit_log=16 * MIB,
        max_message_size=4 * MIB,
    ).start()
    yield started
    started.close()


def test_ten_sends_share_one_commit(group: Group) -> None:
    with group.client() as client:
        found = client.send_many([Message("ten", b"body %d" % number) for number in range(10)])
        assert [result.status for result in found] == [SendStatus.PUT_OK] * 10
    words = group.words()
    assert words["writer_synced"] == words["written"] >= found[-1].physical_offset


def test_hundred_concurrent_sends_succeed(group: Group) -> None:
    async def send_all() -> list[SendResult]:
        async with AsyncClient(group.store, timeout=60) as client:
            return await asyncio.gather(*(client.send("hundred", b"%d" % number) for number in range(100)))

    found = asyncio.run(send_all())
    assert [result.status for result in found] == [SendStatus.PUT_OK] * 100
    assert len({result.physical_offset for result in found}) == 100
    # The first send creates the topic; all messages get offsets in its queues.
    with group.client() as client:
        group.wait_dispatched()
        queues = client.queues("hundred")
        assert sorted(queue.queue_id for queue in queues) == list(range(len(queues)))
        places = [(result.queue_id, result.queue_offset) for result in found]
        assert sorted(places) == [(queue.queue_id, n) for queue in queues for n in range(queue.max_offset)]


def test_hundred_sends_past_deadline_stay_unknown(tmp_path: Path) -> None:
    """Late answers are dropped, and no call waits for them."""
    (tmp_path / "mqproc").mkdir(mode=0o700)
    held: list[Request] = []

    def hold(request: Request) -> bool:
        held.append(request)
        return True

    async def send_all(roles: MemoryRoles) -> None:
        async with AsyncClient(tmp_path, timeout=2.0) as client:
            sends = [asyncio.ensure_future(client.send("T", b"%d" % number)) for number in range(100)]
            outcomes = await asyncio.gather(*sends, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [SendOutcomeUnknownError] * 100
            assert len(held) == 100
            roles.behaviour = answer_held
            client.timeout_s = 60.0
            assert (await client.send("T", b"next")).status is SendStatus.PUT_OK
            assert [type(send.exception()) for send in sends] == [SendOutcomeUnknownError] * 100
            assert len(asyncio.all_tasks()) <= 2, "this one, and the connection's reader"

    with MemoryRoles(tmp_path) as roles:

        def answer_held(request: Request) -> bool:
            """Answer all previous requests before the next one is handled."""
            roles.behaviour = lambda request: False
            places = [np.zeros(1, "<i8"), np.zeros(1, "<i8"), np.zeros(1, "<i4")]
            for late in held:
                late.answer(AppendAnswer(1, STORE_HOST), places)
            return False

        roles.behaviour = hold
        asyncio.run(send_all(roles))
        assert [message.body for message in roles.messages] == [b"next"]


def test_topic_deletion_keeps_two_of_ten(group: Group) -> None:
    topics = [f"topic-{number}" for number in range(10)]
    kept = topics[3:5]
    with group.client() as client:
        for topic in topics:
            client.create_topic(topic, 2)
            client.send(topic, topic.encode(), queue_id=1)
        group.wait_dispatched()
        before = {topic.topic for topic in client.topics()}
        for topic in sorted(set(topics) - set(kept)):
            client.delete_topic(topic)
        folders = {path.name for path in group.paths.consume_queue.iterdir()}
        assert folders & set(topics) == set(kept)
        assert {topic.topic for topic in client.topics()} == before - (set(topics) - set(kept))
        port = wait_until(lambda: group.words()["monitor_port"], what="the monitor listens")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as told:
            counted = told.read().decode()
        assert [topic for topic in topics if f'mqproc_messages_appended_total{{topic="{topic}"}} 1' in counted] == kept
        assert [topic for topic in topics if f'"{topic}"' in counted] == kept
        for topic in kept:
            assert [message.body for message in client.pull(topic, 1, 0).messages] == [topic.encode()]


def test_body_limit_is_exact_to_the_byte(group: Group) -> None:
    with group.client() as client:
        with pytest.raises(MessageTooLargeError, match="body of 4,194,305 bytes; max_message_size is 4,194,304"):
            client.send("large", bytes(4 * MIB + 1))
        assert client.get(client.send("large", bytes(4 * MIB)).message_id).body == bytes(4 * MIB)


def test_second_start_fails_until_first_group_stops(group: Group) -> None:
    """The end of the log and of every queue is the same after stop and start."""
    with group.client() as client:
        client.send("locked", b"before")
        group.wait_dispatched()
        queues = client.queues()
        end = group.words()["written"]
    second = call("up", "--store", group.store)
    assert second.code == 7
    assert str(group.pid("supervisor")) in second.err
    assert group.stop() == 0
    group.start()
    with group.client() as client:
        assert client.queues() == queues
    assert group.words()["written"] == end


def test_stop_with_dispatch_behind_leaves_abort_file(make_group: Callable[..., Group]) -> None:
    """The next start dispatches the rest."""
    group = make_group()
    obstacle = group.paths.consume_queue / "blocked"
    obstacle.write_bytes(b"a file where the topic's folder is to be")
    with group.client(read_your_writes=False) as client:
        client.send("blocked", b"waiting", queue_id=0)
        wait_until(lambda: group.words()["dispatch_errno"], what="dispatch held up")
        assert client.pull("blocked", 0, 0).status is PullStatus.NO_MESSAGE_IN_QUEUE
    assert group.stop() == 1
    assert group.paths.abort.exists()
    obstacle.unlink()
    group.start()
    with group.client() as client:
        assert [message.body for message in client.pull("blocked", 0, 0).messages] == [b"waiting"]
    assert group.stop() == 0
    assert not group.paths.abort.exists()
