"""The group consumer against a real group: assignment, commits, retries, ways to consume."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqproc import (
    BadRequestError,
    Client,
    FilterSyntaxError,
    GroupInUseError,
    GroupNotFoundError,
    OffsetOutOfRangeError,
    OffsetOverflowError,
    SqlFilter,
    StaleOffsetError,
    StoredMessage,
    TagFilter,
    TopicNotFoundError,
)
from mqproc.client import group_requests as group_calls
from mqproc.client._sync.consumer import Consumer
from mqproc.client.assignment import HOLD_S
from mqproc.client.group_requests import Nacking, ResetTo
from tests.support.group import (
    PATIENCE_S,
    Group,
    all_batches_of,
    all_of,
    bodies_of,
    fill,
    hide_from_one_pull,
    no_thread_starts,
    offsets,
    wait_until,
)


@pytest.fixture
def client(shared: Group) -> Iterator[Client]:
    with shared.client() as client:
        yield client


# One consumer


def test_consumer_gets_messages_once_in_queue_order(client: Client) -> None:
    sent = fill(client, "Once", 4000)
    with client.consumer("once", "Once", start="earliest", pull_messages=100) as consumer:
        assert consumer.queues == [("Once", queue_id) for queue_id in range(4)]
        found = list(itertools.islice(consumer.messages(timeout=PATIENCE_S), len(sent)))
    assert bodies_of(found) == sent
    for queue_id in range(4):
        assert [message.queue_offset for message in found if message.queue_id == queue_id] == list(range(1000))
    assert offsets(client, "once", "Once") == [1000] * 4
    assert client.groups.info("once").lag == 0


def test_consumer_without_thread_releases_its_queues(client: Client) -> None:
    fill(client, "Threadless", 1)
    with no_thread_starts(), pytest.raises(RuntimeError, match="can't start new thread"):
        client.consumer("threadless", "Threadless", start="earliest")
    assert client.groups.info("threadless").members == ()
    with client.consumer("threadless", "Threadless", start="earliest") as consumer:
        assert len(consumer.queues) == 4


def test_done_messages_are_committed_and_others_redelivered(client: Client) -> None:
    sent = fill(client, "Again", 100, queues=1)

    def fail_at_40() -> None:
        with client.consumer("again", "Again", start="earliest") as consumer:
            for message in consumer:
                if message.body == b"40":
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_at_40()
    assert offsets(client, "again", "Again") == [40]
    with client.consumer("again", "Again") as consumer:
        for message in consumer:
            if message.body == b"60":
                break
    # Left without an error, the last message is done too.
    assert offsets(client, "again", "Again") == [61]
    with client.consumer("again", "Again") as consumer:
        assert [message.body for message in all_of(consumer, len(sent[61:]))] == sent[61:]


def test_consumer_loop_can_be_left_and_resumed(client: Client) -> None:
    sent = fill(client, "Twice", 50, queues=1)
    with client.consumer("twice", "Twice", start="earliest") as consumer:
        first = [next(iter(consumer)).body for _ in range(1)]
        assert first == [sent[0]]
        assert [message.body for message in all_of(consumer, len(sent) - 1)] == sent[1:]


def test_a_group_begins_at_the_end_the_beginning_or_a_time(client: Client) -> None:
    fill(client, "Where", 10, queues=1)
    moment = client.pull("Where", 0, 9).messages[0].store_timestamp_ms + 1
    wait_until(lambda: time.time_ns() // 1_000_000 > moment, what="a later time than the messages'")
    client.send("Where", b"10")
    client.wait_dispatched()
    with client.consumer("latest", "Where") as late, client.consumer("time", "Where", start=moment) as timed:
        client.send("Where", b"11")
        assert [message.body for message in late.receive(10, timeout=PATIENCE_S)] == [b"11"]
        assert [message.body for message in timed.receive(10, timeout=PATIENCE_S)][:1] == [b"10"]
    with client.consumer("earliest", "Where", start="earliest") as early:
        assert [message.body for message in early.receive(3, timeout=PATIENCE_S)] == [b"0", b"1", b"2"]
    with pytest.raises(BadRequestError, match=r'start is "earliest", "latest" or a time: .* is no ISO 8601'):
        client.consumer("never", "Where", start="whenever")


def test_topic_created_later_is_read_from_beginning(client: Client) -> None:
    with client.consumer("later", "Later") as consumer:
        assert consumer.queues == []
        client.send("Later", b"0", queue_id=None)
        assert [message.body for message in consumer.receive(1, timeout=PATIENCE_S)] == [b"0"]


@pytest.mark.parametrize("broadcast", [False, True])
def test_recreated_topic_is_consumed_from_its_beginning(
    client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broadcast: bool
) -> None:
    topic = f"Hidden{broadcast}"
    sent = fill(client, topic, 3, queues=1)
    asked = hide_from_one_pull(monkeypatch, topic)
    own = {"broadcast": True, "offsets_path": tmp_path / "offsets.json"} if broadcast else {}
    with client.consumer(f"hidden-{broadcast}", topic, start="earliest", **own) as consumer:
        assert [message.body for message in all_of(consumer, 3)] == sent
    assert asked[:2] == [0, 0]
    if not broadcast:
        assert offsets(client, "hidden-False", topic) == [3]


def test_filter_selects_and_progress_skips_others(client: Client) -> None:
    client.create_topic("Filtered", 1)
    client.send_batch("Filtered", [b"%d" % n for n in range(100)], tags=["a" if n % 10 else "b" for n in range(100)])
    client.wait_dispatched()
    with client.consumer("filtered", "Filtered", filter="b || c", start="earliest") as consumer:
        assert bodies_of(all_of(consumer, 10)) == [b"%d" % n for n in range(0, 100, 10)]
    assert offsets(client, "filtered", "Filtered") == [100]
    with client.consumer("sql", "Filtered", filter=SqlFilter("TAGS = 'b'"), start="earliest") as consumer:
        assert len(list(itertools.islice(consumer.messages(timeout=PATIENCE_S), 10))) == 10
    assert offsets(client, "sql", "Filtered") == [91]  # The last message of the loop is done.


def test_join_with_invalid_filter_is_refused(client: Client) -> None:
    with pytest.raises(FilterSyntaxError, match="character 4 "):
        client.consumer("mistyped", "NotYet", filter=SqlFilter("a >"))
    with pytest.raises(GroupNotFoundError):
        client.groups.info("mistyped")


@pytest.mark.parametrize("text", ["amount > 5", "region='north'", "region\tIS NULL", "NOT (a <> 1) OR b IN ('x')"])
def test_sql_as_a_filter_of_tags_is_refused(client: Client, text: str) -> None:
    with pytest.raises(BadRequestError, match="is SQL92: give an SqlFilter"):
        client.consumer("confused", "NotYet", filter=text)
    client.consumer("such-tags", "NotYet", filter=TagFilter(text)).close()


@pytest.mark.parametrize("text", ["", "*", "new", " new ", "new || old", "a > 1 || b", "first class", "x=", "a:b"])
def test_filters_of_tags(client: Client, text: str) -> None:
    client.consumer("by-tags", "NotYet", filter=text).close()


def test_progress_skips_filtered_messages_at_once(client: Client) -> None:
    """New messages arrive within about a second, before the waiting pull times out."""
    client.create_topic("Passed", 2)
    client.send_batch("Passed", [b"%d" % n for n in range(100)], tags=["b"] + ["a"] * 99, queue_ids=[0, 1] * 50)
    client.wait_dispatched()
    with client.consumer("passed", "Passed", filter="b", start="earliest") as consumer:
        assert len(all_of(consumer, 1)) == 1
        assert consumer.positions()["Passed", 0] == consumer.positions()["Passed", 1] == 50
        wait_until(lambda: consumer.lag() == 0)
        for end in (55, 60):
            client.send_batch("Passed", [b"more"] * 10, tags=["a"] * 10, queue_ids=[0, 1] * 5)
            told_by = time.monotonic() + HOLD_S / 2
            while offsets(client, "passed", "Passed") != [end, end]:
                assert time.monotonic() < told_by
                assert list(consumer.messages(timeout=0.05)) == []
        client.send("Passed", b"found", tag="b", queue_id=0)
        found = consumer.receive(1, timeout=PATIENCE_S)
        assert [message.body for message in found] == [b"found"]
        # While a message is unacknowledged, later matching ones are found as well.
        for number in range(3):
            client.send_batch("Passed", [b"no"] * 5, tags=["a"] * 5, queue_ids=[0] * 5)
            assert consumer.receive(1, timeout=1.2) == []
            assert consumer.positions()["Passed", 0] == 60, number
        client.send("Passed", b"next", tag="b", queue_id=0)
        found += consumer.receive(1, timeout=PATIENCE_S)
        assert [message.body for message in found] == [b"found", b"next"]
        consumer.ack(*found)
        assert consumer.positions()["Passed", 0] == 77
    assert client.groups.info("passed").lag == 0


def test_acknowledged_messages_are_committed_in_order(client: Client) -> None:
    fill(client, "Acks", 10, queues=1)
    with client.consumer("acks", "Acks", start="earliest") as consumer:
        messages = consumer.receive(10, timeout=PATIENCE_S)
        assert len(messages) == 10
        consumer.ack(*messages[5:], messages[1])
        consumer.commit()
        assert offsets(client, "acks", "Acks") == [0]
        consumer.ack(messages[0])
        consumer.commit()
        assert offsets(client, "acks", "Acks") == [2]
        consumer.ack(*messages)
        consumer.commit()
        assert offsets(client, "acks", "Acks") == [10]


def test_batches_are_arrow(client: Client) -> None:
    sent = fill(client, "Arrow", 1000)
    with client.consumer("arrow", "Arrow", start="earliest") as consumer:
        batches = all_batches_of(consumer, ["body", "queue_offset"], len(sent))
    assert sorted((body for batch in batches for body in batch["body"].to_pylist()), key=int) == sent
    assert offsets(client, "arrow", "Arrow") == [250] * 4


@pytest.mark.parametrize("ordered", [False, True])
def test_handlers_run_in_threads(client: Client, ordered: bool) -> None:
    topic = f"Handled{ordered}"
    fill(client, topic, 400)
    seen: list[tuple[int, int]] = []
    stop = threading.Event()
    at_once: Counter[int] = Counter()
    most: Counter[int] = Counter()
    lock = threading.Lock()

    def handle(message: StoredMessage) -> None:
        with lock:
            at_once[message.queue_id] += 1
            most[message.queue_id] = max(most[message.queue_id], at_once[message.queue_id])
        time.sleep(0.0005)
        with lock:
            at_once[message.queue_id] -= 1
            seen.append((message.queue_id, message.queue_offset))
            if len(seen) == 400:
                stop.set()

    with client.consumer(f"handled{ordered}", topic, start="earliest") as consumer:
        consumer.run(handle, workers=4, ordered=ordered, stop=stop)
    assert sorted(seen) == [(queue_id, offset) for queue_id in range(4) for offset in range(100)]
    if ordered:
        assert set(most.values()) == {1}
        for queue_id in range(4):
            assert [offset for at, offset in seen if at == queue_id] == list(range(100))
    assert offsets(client, f"handled{ordered}", topic) == [100] * 4


# Several


def together(consumers: list[Consumer]) -> list[list[tuple[str, int]]]:
    return [[queue for queue in consumer.queues if not queue[0].startswith("%")] for consumer in consumers]


def test_members_share_queues_evenly_and_hand_over(client: Client) -> None:
    fill(client, "Shared", 0, queues=8)
    first = client.consumer("shared", "Shared")
    assert len(first.queues) == 8
    second, third = client.consumer("shared", "Shared"), client.consumer("shared", "Shared")
    consumers = [first, second, third]
    wait_until(lambda: sorted(len(queues) for queues in together(consumers)) == [2, 3, 3], what="three even shares")
    assert sorted(itertools.chain(*together(consumers))) == [("Shared", queue_id) for queue_id in range(8)]
    second.close()
    wait_until(lambda: [len(queues) for queues in together([first, third])] == [4, 4], what="two even shares")
    for consumer in (first, third):
        consumer.close()
    assert client.groups.info("shared").members == ()


def test_queue_with_messages_in_hand_is_not_reassigned(client: Client) -> None:
    fill(client, "Held", 10, queues=1)
    first = client.consumer("held", "Held", start="earliest", session_timeout=PATIENCE_S)
    messages = first.receive(10, timeout=PATIENCE_S)
    # Both want the retry topic and this one queue; the plan may move it only when it is released.
    second = client.consumer("held", ["Held"], session_timeout=PATIENCE_S)
    first_has = ("Held", 0) in first.queues
    assert second.receive(10, timeout=0.2) == []
    first.ack(*messages)
    first.commit()
    assert offsets(client, "held", "Held") == [10]
    first.close()
    wait_until(lambda: second.queues == [("Held", 0)], what="the queue at the other")
    assert first_has
    assert second.receive(10, timeout=0.2) == []
    second.close()


def test_new_queues_of_a_topic_are_shared(client: Client) -> None:
    fill(client, "Wider", 4, queues=2)
    with client.consumer("wider", "Wider", start="earliest") as consumer:
        assert len(consumer.receive(10, timeout=PATIENCE_S)) >= 1
        client.create_topic("Wider", 6)
        client.send("Wider", b"new", queue_id=5)
        wait_until(lambda: len(consumer.queues) == 6, what="six queues")
        found: list[bytes] = []
        wait_until(lambda: b"new" in (found.extend(m.body for m in consumer.receive(10, timeout=1)) or found))


# Progress by hand


def test_progress_is_monotone_unless_reset(client: Client) -> None:
    fill(client, "Mono", 10, queues=1)
    groups = client.groups
    groups.commit("mono", "Mono", 0, 5)
    with pytest.raises(StaleOffsetError, match="committed offset 5"):
        groups.commit("mono", "Mono", 0, 4)
    with pytest.raises(OffsetOverflowError, match="11"):
        groups.commit("mono", "Mono", 0, 11)
    assert offsets(client, "mono", "Mono") == [5]
    (move,) = groups.plan_reset("mono", ResetTo(earliest=True))
    assert (move.before, move.after, move.messages) == (5, 0, 5)
    assert offsets(client, "mono", "Mono") == [5]
    groups.execute("mono", [move])
    assert offsets(client, "mono", "Mono") == [0]
    with pytest.raises(OffsetOutOfRangeError):
        groups.execute("mono", [move, type(move)("Mono", 0, 0, 99)])
    assert offsets(client, "mono", "Mono") == [0]
    moment = client.pull("Mono", 0, 3).messages[0].store_timestamp_ms
    for to, wanted in (
        (ResetTo(offset=7), 7),
        (ResetTo(shift=-2), 5),
        (ResetTo(latest=True), 10),
        (ResetTo(shift=100), 10),
        (ResetTo(time=moment), 0),
    ):
        moves = groups.plan_reset("mono", to, ["Mono"])
        assert [move.after for move in moves] == [wanted]
        groups.execute("mono", moves)
    with pytest.raises(BadRequestError, match="exactly one"):
        groups.plan_reset("mono", ResetTo(earliest=True, offset=3))


def test_member_continues_at_reset_offset(client: Client) -> None:
    sent = fill(client, "Rewound", 20, queues=1)
    with client.consumer("rewound", "Rewound", start="earliest") as consumer:
        assert len(all_of(consumer, 20)) == 20
        with pytest.raises(GroupInUseError):
            client.groups.commit("rewound", "Rewound", 0, 20)
        with pytest.raises(GroupInUseError):
            client.groups.delete("rewound")
        client.groups.execute("rewound", client.groups.plan_reset("rewound", ResetTo(offset=15)))
        assert [message.body for message in all_of(consumer, 5)] == sent[15:]


def test_a_group_is_cloned_and_deleted(client: Client) -> None:
    fill(client, "Cloned", 10, queues=2)
    client.groups.commit("source", "Cloned", 0, 3)
    client.groups.commit("source", "Cloned", 1, 4)
    client.groups.execute("copy", client.groups.plan_clone("source", "copy"))
    assert offsets(client, "copy", "Cloned") == [3, 4]
    assert client.groups.plan_clone("source", "copy") == []
    assert {group.group: group.lag for group in client.groups.all() if group.group in ("source", "copy")} == {
        "copy": 3,
        "source": 3,
    }
    client.groups.delete("copy")
    with pytest.raises(GroupNotFoundError):
        client.groups.info("copy")
    with pytest.raises(GroupNotFoundError):
        client.groups.delete("copy")


def test_a_group_that_may_not_consume_is_refused(client: Client) -> None:
    from mqproc import PermissionDeniedError

    client.groups.change("closed", enabled=False, retry_max_times=3)
    assert client.groups.info("closed").retry_max_times == 3
    with pytest.raises(PermissionDeniedError, match="consumeEnable"):
        client.consumer("closed", "Any")
    with pytest.raises(BadRequestError, match="allowed are"):
        client.consumer("bad group", "Any")


def test_consumer_continues_where_it_seeks(client: Client) -> None:
    sent = fill(client, "Sought", 40, queues=2)
    with client.consumer("sought", "Sought", start="earliest") as consumer:
        held = consumer.receive(40, timeout=PATIENCE_S)
        consumer.ack(*(message for message in held if message.queue_offset < 3))
        consumer.seek(ResetTo(offset=15))
        # Earlier messages no longer count, and progress is where it was reset to.
        consumer.ack(*held)
        consumer.commit()
        assert offsets(client, "sought", "Sought") == [15, 15]
        assert bodies_of(all_of(consumer, 10)) == sent[30:]
        consumer.seek(ResetTo(shift=-2))
        assert bodies_of(all_of(consumer, 4)) == sent[36:]
        consumer.seek(ResetTo(latest=True))
        assert consumer.receive(10, timeout=0.1) == []
        consumer.seek(ResetTo(earliest=True), ["Sought"])
        assert bodies_of(all_of(consumer, 40)) == sent
        with pytest.raises(TopicNotFoundError, match="does not read topic 'Other'"):
            consumer.seek(ResetTo(offset=0), ["Other"])
        with pytest.raises(BadRequestError, match="exactly one"):
            consumer.seek(ResetTo())
    assert offsets(client, "sought", "Sought") == [20, 20]


# Retries


def test_a_nacked_message_waits_in_its_delay_level_as_rocketmq_puts_it(client: Client) -> None:
    client.create_topic("Nacked", 1)
    client.send("Nacked", b"poison", tag="t", keys=["k1"], properties={"n": "4"})
    client.wait_dispatched()
    with client.consumer("nacked", "Nacked", start="earliest") as consumer:
        (message,) = consumer.receive(1, timeout=PATIENCE_S)
        consumer.nack(message)
        consumer.commit()
    assert offsets(client, "nacked", "Nacked") == [1]
    client.wait_dispatched()
    copy = next(
        found
        for found in client.pull("SCHEDULE_TOPIC_XXXX", 2, 0).messages
        if found.properties["ORIGIN_MESSAGE_ID"] == message.message_id
    )
    assert copy.properties == message.properties | {
        "RETRY_TOPIC": "Nacked",
        "ORIGIN_MESSAGE_ID": message.message_id,
        "DELAY": "3",
        "REAL_TOPIC": "%RETRY%nacked",
        "REAL_QID": "0",
        "WAIT": "false",
    }
    assert (copy.body, copy.reconsume_times, copy.born_timestamp_ms, copy.born_host) == (
        message.body,
        1,
        message.born_timestamp_ms,
        message.born_host,
    )


def test_too_many_failures_end_among_the_dead_letters(client: Client) -> None:
    client.groups.change("dying", retry_max_times=0)
    client.create_topic("Dying", 1)
    client.send("Dying", b"0", properties={"n": "4"})
    client.send("Dying", b"1")
    client.wait_dispatched()
    with client.consumer("dying", "Dying", start="earliest") as consumer:
        for message in itertools.islice(consumer.messages(timeout=PATIENCE_S), 2):
            consumer.nack(message)
    client.wait_dispatched()
    dead = list(client.groups.dead_letters("dying"))
    assert [(letter.body, letter.reconsume_times, letter.properties["DELAY"]) for letter in dead] == [
        (b"0", 1, "0"),
        (b"1", 1, "0"),
    ]
    assert dead[0].properties["RETRY_TOPIC"] == "Dying"
    assert client.groups.resend("dying", *dead) == 2
    with client.consumer("dying", "Dying") as consumer:
        again = all_of(consumer, 2)
    assert [(message.stored_topic, message.body, message.reconsume_times) for message in again] == [
        ("%RETRY%dying", b"0", 0),
        ("%RETRY%dying", b"1", 0),
    ]


def test_nack_of_many_messages_redelivers_all(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """More messages than one request names; those refused for now are sent again later."""
    monkeypatch.setattr(group_calls, "NAMED_MAX", 8)
    monkeypatch.setattr(group_calls, "RESENT_AT_ONCE", 8)
    sent = fill(client, "Many", 20, queues=1)
    with client.consumer("many", "Many", start="earliest") as consumer:
        consumer.nack(*all_of(consumer, 20), delay_level=-1)
    assert offsets(client, "many", "Many") == [20]
    client.wait_dispatched()
    dead = list(client.groups.dead_letters("many"))
    assert bodies_of(dead) == sent
    assert client.groups.resend("many", *dead) == 20
    assert client.groups.resend("many") == 0
    with client.consumer("many", "Many") as consumer:
        assert bodies_of(all_of(consumer, 20)) == sent


def test_nack_refused_for_now_is_repeated_after_others(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_calls, "NAMED_MAX", 2)
    fill(client, "Busy", 4, queues=1)
    messages = list(client.pull("Busy", 0, 0).messages)
    nacking = Nacking("g", messages, 0)
    assert bodies_of(nacking.answered([group_calls.NOT_NOW, 3])) == [b"1"]
    assert (nacking.is_busy, [message.body for message in nacking.left]) == (True, [b"2", b"3", b"0"])
    assert bodies_of(nacking.answered([3, 3])) == [b"2", b"3"]
    assert (nacking.is_busy, [message.body for message in nacking.left]) == (False, [b"0"])
    assert nacking.answered([group_calls.GONE]) == []
    assert (nacking.left, nacking.gone) == ([], messages[:1])


def test_failed_handler_nacks_or_retries_in_order(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    fill(client, "Failing", 4, queues=1)
    client.groups.change("failing", retry_max_times=2)
    tried: list[bytes] = []
    stop = threading.Event()

    def handle(message: StoredMessage) -> None:
        tried.append(message.body)
        if message.body == b"1":
            raise ValueError("never")
        if message.body == b"3":
            stop.set()

    with client.consumer("failing", "Failing", start="earliest") as consumer:
        consumer.run(handle, ordered=True, stop=stop, pause_s=0.01)
    assert tried == [b"0", b"1", b"1", b"1", b"2", b"3"]
    client.wait_dispatched()
    assert [letter.body for letter in client.groups.dead_letters("failing")] == [b"1"]
    assert offsets(client, "failing", "Failing") == [4]
