"""The 35 bad inputs and their answers, one table over the real sockets and files of real groups."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqproc.layout.control import QUERY, WRITER
from mqproc.supervisor.store_folder import CONTROL_SOCKET
from mqproc.types import TagFilter
from mqproc.wire.operations import Operation
from mqproc.wire.operations.groups import EARLIEST, GroupNackRequest
from mqproc.wire.operations.log import ByKeyRequest, CreateTopicRequest, DeleteTopicRequest, PullRequest
from mqproc.wire.operations.pop import GroupReceiveRequest
from tests.bad_input import clients, stores, troubles
from tests.bad_input.more_requests import MORE
from tests.bad_input.requests import (
    append,
    append_properties,
    append_sharded,
    cut,
    header,
    question,
    refused,
)
from tests.bad_input.scene import IS_ROOT, Row, Scene, check

MIB = 1 << 20
BAD_TOPICS = {
    "empty": ("", "empty"),
    "too long": ("t" * 128, "128 bytes exceeds 127"),
    "slash": ("a/b", "0x2F at 1"),
    "dots": ("..", "0x2E at 0"),
    "NUL": ("a\0", "0x00 at 1"),
    "space": ("a b", "0x20 at 1"),
    "not ASCII": ("ä", "0xC3 at 0"),
}
RESERVED = (
    "SCHEDULE_TOPIC_XXXX",
    "%RETRY%group",
    "%DLQ%group",
    "rmq_sys_wheel_timer",
    "RMQ_SYS_TRANS_HALF_TOPIC",
    "RMQ_SYS_TRANS_OP_HALF_TOPIC",
    "rmq_sys_REVIVE_LOG_DefaultCluster",
)
BAD_SQL = {"a = = 1": 4, "a = 'b": 4, "a = 1 AND": 9, "(a = 1": 6, "a = 1)": 5, "a BETWEEN 1": 11, "a # 1": 2, "1": 0}
TOO_LONG = b"name\x01" + b"v" * 32_763 + b"\x02"


def create(topic: str, queues: int) -> tuple[Operation, CreateTopicRequest, bytes]:
    return Operation.CREATE_TOPIC, CreateTopicRequest(topic, queues), b""


def by_key(key: str, begin_ms: int = 0, end_ms: int = 1 << 62, most: int = 64) -> ByKeyRequest:
    return ByKeyRequest("known", key, begin_ms, end_ms, most)


def pull(**changes: Any) -> PullRequest:
    return PullRequest("known", 0, 0, **changes)


LONG_SQL = pull(sql="a = '" + "x" * 4_097 + "'")
LARGE = "frame of 69,206,048 bytes exceeds 67,108,864"
TABLE = [
    # Frames
    cut(1, "a frame above max_frame_bytes", "FRAME_TOO_LARGE", LARGE, header(payload=66 * MIB)),
    cut(1, "options above it", "FRAME_TOO_LARGE", "exceeds 67,108,864", header(options=(1 << 32) - 1)),
    cut(2, "a negative length", "FRAME_TOO_LARGE", "exceeds 67,108,864", header(payload=(1 << 64) - 1)),
    cut(2, "a reserved word", "BAD_FRAME", "0x7, not 0", header(zero=7)),
    cut(3, "another protocol", "UNSUPPORTED_VERSION", r"speaks 1\.\.1", b"GET / HTTP/1.1\r\n\r\n" * 2),
    cut(3, "another version", "UNSUPPORTED_VERSION", r"version 9; speaks 1\.\.1", header(version=9)),
    refused(4, "an unknown command", "UNKNOWN_COMMAND", "4711", header(4711)),
    refused(4, "an answer for a request", "UNKNOWN_COMMAND", "", header(0x8010)),
    refused(4, "another role's command", "UNKNOWN_COMMAND", "", (Operation.PULL, pull(), b"")),
    Row(5, "frames that end amid", clients.ends_amid, "", "^4 partial frames$", closes=True),
    Row(6, "a byte now and then", clients.trickles_in, "TIMEOUT", r"1\.5 s", closes=True, refused_by=WRITER),
    # Clients
    Row(7, "a client that reads nothing", clients.reads_nothing, "SLOW_CONSUMER", closes=True, refused_by=QUERY),
    Row(
        8,
        "a client too many",
        clients.one_connection_more,
        "TOO_MANY_CONNECTIONS",
        "24 connections are open",
        closes=True,
        refused_by=WRITER,
    ),
    Row(
        8,
        "100 more than 10,000",
        clients.ten_thousand,
        "TOO_MANY_CONNECTIONS",
        "10,000 connections are open",
        closes=True,
    ),
    *(
        Row(
            9,
            f"another user {what}",
            clients.another_user(role, data),
            "PERMISSION_DENIED",
            "user 65534 may not",
            closes=True,
            refused_by="" if role == CONTROL_SOCKET else role,
            root_only=True,
        )
        for what, role, data in (
            ("who says nothing", WRITER, b""),
            ("with a whole message", WRITER, clients.frame()),
            ("with what is no frame", WRITER, b"GET / HTTP/1.1\r\n\r\n"),
            ("at the query role", QUERY, header(Operation.PING)),
            ("at the supervisor", CONTROL_SOCKET, header(Operation.STOP_GROUP)),
        )
    ),
    # Messages
    *(refused(10, f"topic: {name}", "BAD_TOPIC", says, append(topic)) for name, (topic, says) in BAD_TOPICS.items()),
    *(
        refused(10, f"a new one: {name}", "BAD_TOPIC", says, create(topic, 1))
        for name, (topic, says) in BAD_TOPICS.items()
    ),
    *(refused(11, topic, "TOPIC_RESERVED", topic[:8], append(topic)) for topic in RESERVED),
    *(
        refused(11, f"{what} {topic}", "TOPIC_RESERVED", "made, widened or deleted", request)
        for topic in RESERVED
        if not topic.startswith("%")
        for what, request in (
            ("making", create(topic, 2)),
            ("deletion of", (Operation.DELETE_TOPIC, DeleteTopicRequest(topic), b"")),
        )
    ),
    refused(12, "a body too large", "MESSAGE_TOO_LARGE", "262,145.*262,144", append(body=b"b" * 262_145)),
    refused(12, "properties too large", "PROPERTIES_TOO_LARGE", "32,767", append_properties(TOO_LONG)),
    refused(12, "constant ones too large", "PROPERTIES_TOO_LARGE", "32,767", append(gap_after_keys=TOO_LONG)),
    refused(13, "a tag with a separator", "BAD_PROPERTY", "TAGS", append(tag="a\x02b")),
    refused(13, "a sharding key with one", "BAD_PROPERTY", "__SHARDINGKEY", append_sharded(b"a\x01b")),
    refused(13, "no end of a value", "BAD_PROPERTY", "not pairs", append(gap_after_keys=b"name\x01value")),
    refused(13, "no end of a name", "BAD_PROPERTY", "not pairs", append(gap_before_keys=b"name\x02")),
    Row(
        13,
        "a key with a space",
        lambda scene: clients.raised(scene, lambda client: client.send("known", b"x", keys=["order 7"])),
        "BAD_PROPERTY",
        "'order 7' holds the separator byte 0x20",
    ),
    Row(14, "an empty body", clients.sends_an_empty_body, "", "^body b''$", stores=True),
    refused(15, "a queue below 0", "NO_SUCH_QUEUE", "queue id -7; topic has 4 queues", append(queue_id=-7)),
    refused(15, "a queue at the count", "NO_SUCH_QUEUE", "queue id 4; topic has 4 queues", append(queue_id=4)),
    refused(16, "a queue too many", "TOO_MANY_QUEUES", "65 more queues exceed max_queues = 64", create("many", 65)),
    Row(
        16,
        "a topic too many",
        clients.queues_beyond_all,
        "TOO_MANY_QUEUES",
        r"\d more queues exceed max_queues = 32; 0 are left",
    ),
    # Reads
    Row(17, "a pull of what is not there", clients.pulls_what_is_not_there, "NO_MATCHED_LOGIC_QUEUE"),
    refused(
        17, "deletion of it", "TOPIC_NOT_FOUND", "'nobody'", (Operation.DELETE_TOPIC, DeleteTopicRequest("nobody"), b"")
    ),
    Row(18, "a pull below 0", clients.pulls_at(-1), "OFFSET_TOO_SMALL", r"next 0 of \[0, 3\)"),
    Row(18, "a pull at the end", clients.pulls_at(3), "OFFSET_OVERFLOW_ONE", r"next 3 of \[0, 3\)"),
    Row(18, "a pull behind the end", clients.pulls_at(4), "OFFSET_OVERFLOW_BADLY", r"next 3 of \[0, 3\)"),
    Row(18, "a pull far behind it", clients.pulls_at(1 << 62), "OFFSET_OVERFLOW_BADLY", r"next 3 of \[0, 3\)"),
    Row(19, "0 messages", clients.pulls_so_many(0), "FOUND", "^1 messages"),
    Row(19, "-5 messages", clients.pulls_so_many(-5), "FOUND", "^1 messages"),
    Row(19, "a billion messages", clients.pulls_so_many(10**9), "FOUND", "^3 messages"),
    Row(19, "0 by a frame", clients.pulls_by_frame(0), "FOUND", "^1 messages of 40"),
    Row(19, "fewer than any number", clients.pulls_by_frame(-(1 << 63)), "FOUND", "^1 messages of 40"),
    Row(19, "more than max_pull_bytes", clients.pulls_by_frame(10**9), "FOUND", "^20 messages of 40"),
    Row(19, "more than any number", clients.pulls_by_frame((1 << 64) - 1), "FOUND", "^20 messages of 40"),
    Row(19, "0 bytes", clients.pulls_by_frame(10**9, 0), "FOUND", "^1 messages of 40"),
    Row(20, "progress beyond the end", clients.commits(4), "OFFSET_OVERFLOW", "4.*3", refused_by=QUERY),
    Row(21, "progress that goes back", clients.commits(1), "STALE_OFFSET", "committed offset 2", refused_by=QUERY),
    Row(21, "a reset that goes back", clients.resets_back, "", "stands at 0"),
    question(22, "an empty key", "BAD_REQUEST", "a topic and a key", Operation.BY_KEY, by_key("")),
    question(22, "an end before the begin", "BAD_REQUEST", r"\(5\).*\(9\)", Operation.BY_KEY, by_key("k", 9, 5)),
    question(22, "too many", "BAD_REQUEST", "65,537.*from 1 to 65,536", Operation.BY_KEY, by_key("k", most=65_537)),
    question(22, "none", "BAD_REQUEST", "max_messages = 0.*from 1 to", Operation.BY_KEY, by_key("k", most=0)),
    *(
        question(
            23, f"SQL: {sql}", "BAD_FILTER", rf"character {at + 1} .*; position {at}$", Operation.PULL, pull(sql=sql)
        )
        for sql, at in BAD_SQL.items()
    ),
    question(23, "much SQL", "BAD_FILTER", "of 4,103 bytes exceeds 4,096; position 4096", Operation.PULL, LONG_SQL),
    question(
        23,
        "long tags",
        "BAD_FILTER",
        "of 4,097 bytes exceeds 4,096; position 4096",
        Operation.PULL,
        pull(tags=["ä" * 2048, "t"]),
    ),
    question(
        23,
        "a simple consumer's",
        "BAD_FILTER",
        "character 5 .*; position 4$",
        Operation.GROUP_RECEIVE,
        GroupReceiveRequest("group", ["known"], 1, 1_000, 0, EARLIEST, 0, [], "a = = 1"),
    ),
    *(
        Row(
            23,
            f"tags: {what}",
            lambda scene, tags=tags: clients.raised(  # type: ignore[misc]
                scene, lambda client: client.pull("known", 0, 0, filter=TagFilter(tags))
            ),
            "BAD_FILTER",
            says,
        )
        for what, tags, says in (
            ("none of them", " || ", r"' \|\| ' names no tag"),
            ("a separator", "a || b\x02", r"character 7 \(the first is 1\): a tag cannot contain byte 0x02"),
            ("too long", "a || " + "b" * 4_092, "of 4,097 bytes exceeds 4,096"),
        )
    ),
    # Times
    refused(24, "a level below 0", "BAD_LEVEL", "-1 is out of range: from 0 to 18", append(delay_level=-1)),
    refused(24, "a level above the last", "BAD_LEVEL", "19 is out of range: from 0 to 18", append(delay_level=19)),
    refused(24, "a time below 0", "BAD_TIME", "-5", append(deliver_at_ms=-5)),
    refused(24, "a time too far off", "BAD_TIME", "timer_max_delay_sec = 259,200", append(deliver_at_ms=1 << 50)),
    question(
        24,
        "a retry level above the last",
        "BAD_LEVEL",
        "19 is above 18",
        Operation.GROUP_NACK,
        GroupNackRequest("group", [("known", 0, 0)], delay_level=19),
    ),
    # Troubles
    Row(
        25,
        "a send to a full disk",
        troubles.sends_to_a_full_disk,
        "DISK_FULL",
        "bytes must be free",
        refused_by=WRITER,
        root_only=True,
    ),
    Row(26, "a send after a failed sync", troubles.sends_after_a_failed_sync, "STORE_READ_ONLY", "errno 5.*repair"),
    Row(
        27,
        "a send to a killed writer",
        troubles.sends_to_a_killed_writer,
        "RETRY_LATER",
        "restarted.*come back in 100 ms",
        restarts={WRITER},
        stores=True,
    ),
    Row(28, "a read of damage", troubles.reads_damage, "CORRUPT", r"\[\d+, \d+\)"),
    # Starts
    Row(29, "a second supervisor", stores.second_supervisor, "exit 7", r"in use by pid \d+ since 20"),
    Row(30, "commands without a store", stores.commands_without_a_store, "exit 5", "no such folder"),
    Row(
        30, "commands on a file", stores.commands_on(stores.a_file, stores.COMMANDS), "exit 3", "a_file: a file, not a"
    ),
    Row(
        30,
        "commands on a folder that is no store",
        stores.commands_on(stores.an_empty_folder, stores.OF_STORES),
        "exit 3",
        "an_empty_folder: not a store: it has no folder commitlog",
    ),
    Row(30, "a start in a file's place", stores.starts_in_place_of_a_file, "exit 3", "not a folder"),
    Row(30, "a start where nothing may be written", stores.starts_where_nothing_may_be_written, "exit 3", "written"),
    Row(30, "a start below no folder", stores.starts_below_a_missing_folder, "exit 3", "parent folder does not exist"),
    Row(30, "a start in an open folder", stores.starts_in_an_open_folder, "exit 3", "writable by everyone.*0777"),
    Row(
        30, "a start in another's", stores.starts_in_anothers_folder, "exit 3", "belongs to user 65534", root_only=True
    ),
    Row(30, "a start in RocketMQ's folder", stores.starts_on_rocketmqs_open_folder, "", "^0755 0700$"),
    Row(31, "other sizes and strays", stores.starts_on_disorder, "", "65,536, .*1,048,576: 65,536 is used"),
    Row(31, "a symlink", stores.starts_on_a_symlink, "exit 3", "a symlink"),
    Row(31, "another's file", stores.starts_on_anothers_file, "exit 3", "belongs to user 65534", root_only=True),
    Row(32, "a strange control file", stores.starts_on_a_strange_control_file, "", "epoch 1$"),
    *(
        Row(32, f"a control file {what}", stores.starts_on_a_control_file(what), "", told)
        for what, told in stores.CONTROL_FILES.items()
    ),
    Row(32, "one that a group has lost", stores.second_supervisor_without_words, "exit 7", r"in use by pid \d+ since"),
    Row(33, "no good checkpoint", stores.starts_without_a_checkpoint, "", "738 records from the beginning 0"),
    Row(34, "garbled offsets", stores.starts_on_garbled_offsets, "", "read with a remark.*truncated"),
    Row(
        35,
        "a start with files of no pages",
        stores.starts_with("mapped_file_size_commit_log=5000"),
        "exit 8",
        "= 5,000 is out of range: from 4,096 to 2,147,483,648 bytes, in whole pages of 4,096",
    ),
    Row(
        35,
        "files of 0 bytes",
        stores.checks("mapped_file_size_commit_log=0"),
        "exit 8",
        "= 0 is out of range: from 4,096 to 2,147,483,648 bytes",
    ),
    Row(
        35,
        "files above 2 GiB",
        stores.checks("mapped_file_size_commit_log=3GiB"),
        "exit 8",
        "= 3,221,225,472 is out of range: from 4,096 to 2,147,483,648 bytes",
    ),
]


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    # Not below pytest's folder, which other users may not enter.
    with tempfile.TemporaryDirectory(prefix="mqproc-bad-input-") as folder:
        found = Scene(Path(folder))
        try:
            yield found.start()
        finally:
            found.close()


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_it_gets_its_answer_and_changes_nothing_else(scene: Scene, row: Row) -> None:
    if row.root_only and not IS_ROOT:
        pytest.skip("needs root")
    check(scene, row)


@pytest.mark.parametrize("row", MORE, ids=lambda row: row.name)
def test_other_requests_that_cannot_be_are_refused_alike(scene: Scene, row: Row) -> None:
    check(scene, row)


def test_the_readme_has_the_same_rows() -> None:
    """Each number once, in order, and every code that the rows expect."""
    lines = (Path(__file__).parent / "README.md").read_text().splitlines()
    told = {int(line.split("|")[1]): line for line in lines if re.match(r"\| \d", line)}
    assert list(told) == list(range(1, 36)) == sorted({row.number for row in TABLE})
    missing = [str(row) for row in TABLE if row.code not in told[row.number]]
    assert not missing
    # Rows that end a connection say so.
    assert {number for number, line in told.items() if "✂" in line} == {row.number for row in TABLE if row.closes}
