"""`mqproc group …` against a real group of processes: plans, execution, JSON."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mqproc import BadRequestError, Client, ResetTo
from mqproc.cli.group import lag_rows
from mqproc.client import Move
from mqproc.types import GroupQueue
from tests.support.command_line import Outcome, call
from tests.support.fakes import CountedName
from tests.support.group import PATIENCE_S, Group, all_of, wait_until

TOPIC = "orders"
COUNT = 40


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """Forty messages in two queues; a test that changes a group creates its own."""
    started = Group(tmp_path_factory.mktemp("groups") / "store").start()
    with started.client() as client:
        client.create_topic(TOPIC, 2)
        client.send_batch(TOPIC, [b"%d" % n for n in range(COUNT)], queue_ids=[n % 2 for n in range(COUNT)])
        client.wait_dispatched()
    yield started
    started.close()


@pytest.fixture
def client(group: Group) -> Iterator[Client]:
    with group.client() as client:
        yield client


def ask(group: Group, *arguments: Any) -> Outcome:
    return call("group", *arguments, "--store", group.store)


def committed_offsets(client: Client, name: str) -> list[int | None]:
    return [queue.offset for queue in client.groups.info(name).queues if queue.topic == TOPIC]


def commit_offsets(client: Client, name: str, first: int, second: int) -> None:
    client.groups.commit(name, TOPIC, 0, first)
    client.groups.commit(name, TOPIC, 1, second)


def test_group_list_shows_groups(group: Group, client: Client) -> None:
    commit_offsets(client, "listed", 5, 7)
    with client.consumer("listed-too", TOPIC, start="earliest"):
        found = ask(group, "list", "--prefix", "listed", "--json")
    assert (found.code, found.err) == (0, "")
    assert [(row["group"], row["members"], row["lag"]) for row in found.json["groups"]] == [
        ("listed", 0, COUNT - 12),
        ("listed-too", 1, COUNT),
    ]
    shown = ask(group, "list", "--prefix", "listed-too")
    assert shown.out.splitlines()[0].split() == ["group", "members", "topics", "lag", "in", "retry", "waiting"]


def test_group_info_shows_queues(group: Group, client: Client) -> None:
    with client.consumer("shown", TOPIC, start="earliest", name="till-1") as consumer:
        found = ask(group, "info", "shown", "--json").json
        shown = ask(group, "info", "shown")
        assert [member["member_id"] for member in found["members"]] == [consumer.member_id]
    assert found["members"][0]["name"] == "till-1"
    assert (found["lag"], found["retry_max_times"], found["consume_enable"]) == (COUNT, 16, True)
    assert [(row["topic"], row["queue_id"], row["offset"], row["lag"]) for row in found["queues"]] == [
        (TOPIC, 0, 0, 20),
        (TOPIC, 1, 0, 20),
    ]
    assert shown.out.splitlines()[0] == (
        "shown: 1 member, 40 messages not consumed, 0 waiting for a retry, dead letters after 16 retries"
    )
    missing = ask(group, "info", "missing")
    assert (missing.code, missing.out) == (5, "")
    assert "no group 'missing'" in missing.err


def test_group_lag_checks_limits(group: Group, client: Client) -> None:
    commit_offsets(client, "late", 19, 20)
    found = ask(group, "lag", "late", "--json")
    assert found.code == 0
    (row,) = found.json["topics"]
    assert (row["topic"], row["lag"]) == (TOPIC, 1)
    assert row["oldest_time_ms"] == client.pull(TOPIC, 0, 19).messages[0].store_timestamp_ms
    assert ask(group, "lag", "late", "--max", 1).code == 0
    assert ask(group, "lag", "late", "--max", 0).code == 1
    assert ask(group, "lag", "late", "--max-age", "1h").code == 0
    assert ask(group, "lag", "late", "--max-age", "1ms", "--json").json["exceeded"] is True
    client.create_topic("other", 1)
    client.groups.commit("late", "other", 0, 0)
    assert ask(group, "lag", "late", "--max", 0, "--topic", "other").code == 0
    mistyped = ask(group, "lag", "late", "--max", 0, "--topic", "othr")
    assert (mistyped.code, mistyped.err) == (5, "mqproc: group late has no progress in topic 'othr'\n")
    commit_offsets(client, "late", 20, 20)
    assert ask(group, "lag", "late", "--max-age", "0").code == 0


def test_reset_plans_and_executes(group: Group, client: Client) -> None:
    commit_offsets(client, "moved", 10, 15)
    planned = ask(group, "reset", "moved", "--to-earliest", "--json")
    assert planned.code == 0
    assert ask(group, "reset", "moved", "--to-earliest", "--detailed-exitcode").code == 2
    assert planned.json["executed"] is False
    assert [(row["before"], row["after"], row["messages"]) for row in planned.json["moves"]] == [
        (10, 0, 10),
        (15, 0, 15),
    ]
    assert committed_offsets(client, "moved") == [10, 15]
    reported = ask(group, "reset", "moved", "--shift-by", -5)
    assert (reported.code, reported.err) == (
        0,
        "would move moved in 2 queues: 10 messages again, 0 skipped; --execute does it\n",
    )
    done = ask(group, "reset", "moved", "--shift-by", -5, "--queue", 1, "--execute")
    assert (done.code, committed_offsets(client, "moved")) == (0, [10, 10])
    moment = client.pull(TOPIC, 0, 0).messages[0].store_timestamp_ms
    for arguments, wanted in (
        (("--to-offset", 3), [3, 3]),
        (("--to-latest",), [20, 20]),
        (("--to-datetime", moment), [0, 0]),
        (("--by-duration", "0s"), [20, 20]),
        (("--by-duration", "2h"), [0, 0]),
    ):
        assert ask(group, "reset", "moved", *arguments, "--execute").code == 0
        assert committed_offsets(client, "moved") == wanted
    again = ask(group, "reset", "moved", "--to-earliest")
    assert (again.code, again.err) == (0, "moved is already at these offsets\n")


def test_reset_keeps_retries_and_skip_drops_them(group: Group, client: Client) -> None:
    """Offsets and times of a topic do not apply to the group's retry topic."""
    with client.consumer("retried", TOPIC, start="earliest") as consumer:
        consumer.nack(*consumer.receive(1, timeout=PATIENCE_S), delay_level=-1)
    client.wait_dispatched()
    assert client.groups.resend("retried", *client.groups.dead_letters("retried")) == 1
    client.wait_dispatched()
    for arguments in (("--to-offset", 3), ("--by-duration", "0s"), ("--to-earliest",), ("--shift-by", 20)):
        assert ask(group, "reset", "retried", *arguments, "--execute").code == 0
        queues = client.groups.info("retried").queues
        assert [(queue.offset, queue.lag) for queue in queues if queue.is_retry] == [(0, 1)], arguments
    named = ask(group, "reset", "retried", "--to-offset", 1, "--topic", "%RETRY%retried")
    assert "0 messages again, 1 skipped" in named.err
    assert ask(group, "skip", "retried", "--execute").code == 0
    assert client.groups.info("retried").lag == 0


def test_reset_beyond_queue_is_limited(group: Group, client: Client) -> None:
    commit_offsets(client, "cut", 1, 15)
    reported = "limited to the first or last offset of the queue"
    assert f"2 queues {reported}" in ask(group, "reset", "cut", "--to-offset", 999).err
    assert f"1 queue {reported}" in ask(group, "reset", "cut", "--shift-by", -10).err
    assert reported not in ask(group, "reset", "cut", "--to-offset", 20).err
    assert reported not in ask(group, "reset", "cut", "--to-earliest").err
    assert f"2 queues {reported}" in ask(group, "reset", "cut", "--to-offset", 999, "--execute").err
    assert committed_offsets(client, "cut") == [20, 20]


def test_reset_plan_names_offsets_outside_the_queue(group: Group, client: Client) -> None:
    """Also for a group that is at the queue's end already."""
    commit_offsets(client, "beyond", 1, 20)
    for arguments, requested in ((("--to-offset", 999), [999, 999]), (("--shift-by", -10), [-9, None])):
        moves = ask(group, "reset", "beyond", *arguments, "--json").json["moves"]
        assert [move["requested"] for move in moves] == requested
    moves = client.groups.plan_reset("beyond", ResetTo(offset=999))
    assert [(move.before, move.after, move.requested) for move in moves] == [(1, 20, 999), (20, 20, 999)]
    shown = ask(group, "reset", "beyond", "--to-offset", 999, "--output", "table").out
    assert "19 skipped; 999 is outside the queue" in shown
    client.groups.execute("beyond", moves)
    assert committed_offsets(client, "beyond") == [20, 20]


def test_seek_returns_offsets_outside_the_queue(client: Client) -> None:
    client.create_topic("Sought", 1)
    client.send_batch("Sought", [b""] * 10)
    client.wait_dispatched()
    with client.consumer("sought", "Sought", start="earliest") as consumer:
        (move,) = consumer.seek(ResetTo(offset=99))
        assert (move.after, move.requested) == (10, 99)
        (move,) = consumer.seek(ResetTo(offset=9))
        assert (move.after, move.requested) == (9, None)


def test_reset_to_time_uses_each_queue(group: Group, client: Client) -> None:
    client.create_topic("Timed", 2)
    times: list[int] = []
    for part in range(3):
        # Different numbers of messages in both queues, so that each has its own middle.
        sent = client.send_batch("Timed", [b"%d" % part] * 9, queue_ids=[0, 0, 1] * 3)
        times.append(sent.store_timestamp_ms)
        wait_until(lambda: time.time_ns() // 1_000_000 > times[-1] + 1, what="a later millisecond")
    client.wait_dispatched()
    client.groups.commit("timed", "Timed", 0, 18)
    client.groups.commit("timed", "Timed", 1, 1)
    assert ask(group, "reset", "timed", "--to-datetime", times[1], "--execute").code == 0
    assert [queue.offset for queue in client.groups.info("timed").queues] == [6, 3]
    assert ask(group, "reset", "timed", "--to-datetime", times[1] + 1, "--execute").code == 0
    assert [queue.offset for queue in client.groups.info("timed").queues] == [12, 6]
    with client.consumer("timed", "Timed") as consumer:
        found = [message.body for message in itertools.islice(consumer.messages(timeout=PATIENCE_S), 9)]
    assert found == [b"2"] * 9


def test_reset_invalid_is_refused(group: Group, client: Client) -> None:
    commit_offsets(client, "stays", 1, 1)
    unsaid = ask(group, "reset", "stays")
    assert (unsaid.code, "exactly one of --to-earliest, --to-latest, " in unsaid.err) == (2, True)
    assert ask(group, "reset", "stays", "--to-earliest", "--to-latest").code == 2
    assert ask(group, "reset", "stays", "--to-datetime", "now", "--by-duration", "1h").code == 2
    no_queue = ask(group, "reset", "stays", "--to-latest", "--queue", 0, "--queue", 7)
    assert (no_queue.code, "no topic of the reset has a queue 7" in no_queue.err) == (2, True)
    assert ask(group, "reset", "missing", "--to-earliest").code == 5
    assert ask(group, "reset", "stays", "--to-earliest", "--topic", "nothing").code == 5
    assert committed_offsets(client, "stays") == [1, 1]
    for arguments in (("reset", "bad name!", "--to-earliest", "--topic", TOPIC), ("clone", "stays", "bad name!")):
        refused = ask(group, *arguments)
        assert (refused.code, "has ' ' at 3" in refused.err) == (2, True), "before there is a plan"
    # With a topic a group can get a start position before it exists.
    assert ask(group, "reset", "fresh", "--to-offset", 4, "--topic", TOPIC, "--execute").code == 0
    assert committed_offsets(client, "fresh") == [4, 4]


def test_skip_clone_and_delete(group: Group, client: Client) -> None:
    commit_offsets(client, "source", 3, 4)
    assert ask(group, "clone", "source", "copy").code == 0
    assert ask(group, "info", "copy").code == 5
    assert ask(group, "clone", "source", "copy", "--execute").code == 0
    assert committed_offsets(client, "copy") == [3, 4]
    assert ask(group, "clone", "missing", "copy").code == 5
    assert ask(group, "clone", "source", "other-copy", "--topic", "othr").code == 5
    planned = ask(group, "skip", "copy", "--json")
    assert (planned.code, sum(row["messages"] for row in planned.json["moves"])) == (0, -33)
    reported = ask(group, "skip", "copy")
    assert [line.split()[2:] for line in reported.out.splitlines()] == [
        ["before", "after", "outcome"],
        ["3", "20", "17", "skipped"],
        ["4", "20", "16", "skipped"],
    ]
    assert [line.split()[2:] for line in ask(group, "reset", "copy", "--to-earliest").out.splitlines()[1:]] == [
        ["3", "0", "3", "again"],
        ["4", "0", "4", "again"],
    ]
    fresh = ask(group, "clone", "copy", "fresh-copy").out.splitlines()[1:]
    assert [line.split()[2:] for line in fresh] == [["-", "3", "starts", "here"], ["-", "4", "starts", "here"]]
    assert ask(group, "skip", "copy", "--execute").code == 0
    assert committed_offsets(client, "copy") == [20, 20]

    planned = ask(group, "delete", "copy")
    assert ask(group, "delete", "copy", "--detailed-exitcode").code == 2
    assert (planned.code, planned.err) == (
        0,
        "would delete copy with its offsets in 2 queues; --execute does it\n",
    )
    with client.consumer("copy", TOPIC):
        assert "once it has no members; now it has 1 member\n" in ask(group, "delete", "copy").err
        refused = ask(group, "delete", "copy", "--execute")
        assert (refused.code, "has 1 member now" in refused.err) == (1, True)
    assert ask(group, "delete", "copy", "--execute", "--json").json["deleted"] is True
    assert ask(group, "info", "copy").code == 5
    client.create_topic("%RETRY%copy", 1)
    assert ask(group, "delete", "copy", "--execute").code == 5
    assert "%RETRY%copy" not in {topic.topic for topic in client.topics()}, "a deletion that was cut off left it"


def test_change_applies_with_execute(group: Group, client: Client) -> None:
    change = ("change", "changed")
    assert ask(group, *change).code == 2
    planned = ask(group, *change, "--disable", "--retry-max-times", 3)
    rows = [line.split() for line in planned.out.splitlines()]
    assert rows == [["setting", "before", "after"], ["retry_max_times", "-", "3"], ["consume_enable", "-", "no"]]
    assert (planned.code, planned.err) == (0, "would change changed; --execute does it\n")
    assert ask(group, "info", "changed").code == 5
    assert ask(group, *change, "--disable", "--retry-max-times", 3, "--execute").code == 0
    found = client.groups.info("changed")
    assert (found.retry_max_times, found.consume_enable) == (3, False)
    same = ask(group, *change, "--disable")
    assert ask(group, *change, "--disable", "--detailed-exitcode").code == 0
    assert ask(group, *change, "--enable", "--detailed-exitcode").code == 2
    assert (same.code, same.out, same.err) == (0, "", "changed already has these settings\n")
    planned = ask(group, *change, "--enable", "--json")
    reported = [{"setting": "consume_enable", "before": False, "after": True}]
    assert (planned.code, planned.json["changes"], planned.json["executed"]) == (0, reported, False)
    assert ask(group, *change, "--enable", "--execute").code == 0
    found = client.groups.info("changed")
    assert (found.retry_max_times, found.consume_enable) == (3, True)
    assert ask(group, "change", "CID_RMQ_SYS_mine", "--disable", "--execute").code == 2


@pytest.mark.parametrize("name", ["CID_RMQ_SYS_TRANS", "CID_RMQ_SYS_REVIVE_GROUP"])
def test_system_groups_cannot_be_moved(group: Group, client: Client, name: str) -> None:
    """Its offsets mark open transactions and check points; beyond them they would never be read."""
    commit_offsets(client, "source", 3, 4)
    for arguments in (
        ("reset", name, "--to-latest", "--topic", TOPIC),
        ("clone", "source", name),
        ("skip", name),
        ("delete", name),
    ):
        refused = ask(group, *arguments)
        assert (refused.code, "is a system group" in refused.err) == (2, True), arguments
    calls: list[Callable[[], object]] = [
        lambda: client.consumer(name, TOPIC),
        lambda: client.simple_consumer(name, TOPIC).receive(1),
        lambda: client.groups.commit(name, TOPIC, 0, 1),
        lambda: client.groups.execute(name, [Move(TOPIC, 0, None, 1)]),
        lambda: client.groups.change(name, retry_max_times=1),
        lambda: client.groups.delete(name),
    ]
    for does in calls:
        with pytest.raises(BadRequestError, match="is a system group"):
            does()


def test_group_names_accept_rocketmq_characters(group: Group, client: Client) -> None:
    """RocketMQ's names match ^[%|a-zA-Z0-9_-]+$; one looks like a retry topic."""
    name = "%RETRY%odd|Name_1-2"
    commit_offsets(client, name, 18, 20)
    with client.consumer(name, TOPIC) as consumer:
        first, second = consumer.receive(2, timeout=PATIENCE_S)
        consumer.nack(first, delay_level=1)
        consumer.nack(second, delay_level=-1)
        (again,) = consumer.receive(2, timeout=PATIENCE_S)
        assert (again.body, again.topic, again.stored_topic) == (first.body, TOPIC, f"%RETRY%{name}")
        consumer.ack(again)
    client.wait_dispatched()
    assert [letter["body"] for letter in ask(group, "dlq", "list", name, "--json").json["dead_letters"]] == [
        second.body.decode()
    ]
    assert ask(group, "lag", name, "--max", 0).code == 0
    assert ask(group, "delete", name, "--execute").err == f"deleted group {name}; %DLQ%{name} stays\n"


def test_dead_letters_are_listed_and_resent(group: Group, client: Client) -> None:
    client.groups.change("sick", retry_max_times=0)
    with client.consumer("sick", TOPIC, start="earliest") as consumer:
        taken = consumer.receive(3, timeout=PATIENCE_S)
        consumer.nack(*taken)
    client.wait_dispatched()
    listed = ask(group, "dlq", "list", "sick", "--body", "text", "--json")
    assert listed.code == 0
    letters = listed.json["dead_letters"]
    assert [letter["body"] for letter in letters] == [message.body.decode() for message in taken]
    assert {letter["topic"] for letter in letters} == {"%DLQ%sick"}
    assert [letter["origin_message_id"] for letter in letters] == [message.message_id for message in taken]
    assert len(ask(group, "dlq", "list", "sick", "-n", 2, "--output", "jsonl").json_lines) == 2
    assert TOPIC in ask(group, "dlq", "list", "sick").out

    planned = ask(group, "dlq", "resend", "sick", "--json")
    assert (planned.code, planned.json["dead_letters"], planned.json["sent"]) == (0, 3, 0)
    assert ask(group, "dlq", "resend", "sick", "--detailed-exitcode").code == 2
    assert ask(group, "dlq", "resend", "sick", "--offset", 1, "--offset", 9).code == 5
    one = ask(group, "dlq", "resend", "sick", "--offset", 1, "--execute")
    assert (one.code, one.err) == (0, "1 of 1 dead letter sent to sick again\n")
    client.wait_dispatched()
    left = client.groups.info("sick").lag
    assert left == COUNT - 3 + 1
    with client.consumer("sick", TOPIC) as consumer:
        again = [message for message in all_of(consumer, left) if message.stored_topic == "%RETRY%sick"]
    assert [message.body for message in again] == [taken[1].body]
    # They stay, so a second resend is the user's decision.
    assert len(ask(group, "dlq", "list", "sick", "--json").json["dead_letters"]) == 3
    assert ask(group, "dlq", "list", "nobody").code == 5
    assert ask(group, "dlq", "list", "source-of-none").code == 5


def test_delete_names_dead_letters_if_any(group: Group, client: Client) -> None:
    commit_offsets(client, "well", 1, 1)
    none = ask(group, "dlq", "resend", "well")
    assert (none.code, none.err) == (0, "well has no dead letters\n")
    assert ask(group, "delete", "well", "--execute").err == "deleted group well\n"
    with client.consumer("ill", TOPIC, start="earliest") as consumer:
        consumer.nack(*consumer.receive(1, timeout=PATIENCE_S), delay_level=-1)
    client.wait_dispatched()
    assert ask(group, "delete", "ill", "--execute").err == "deleted group ill; %DLQ%ill stays\n"


def test_group_without_running_processes_exits_9(group: Group, tmp_path: Any) -> None:
    refused = call("group", "list", "--store", tmp_path)
    assert (refused.code, "mqproc up starts one" in refused.err) == (9, True)


def test_lag_of_many_topics_takes_linear_time() -> None:
    names = CountedName.many(300)
    queues = [GroupQueue(name, queue_id, 2, 0, 5, 1_000, "") for name in names for queue_id in range(4)]
    rows = lag_rows(queues, 3_000)
    compared = CountedName.compared
    assert [(row["topic"], row["lag"], row["age_ms"]) for row in rows] == [(str(name), 12, 2_000) for name in names]
    assert compared <= 10 * len(queues)
